/* scheduler_resets.c: what takes the cache, or its pages, from many sequences at once: resets, commits of weights, a replaced
 * adapter, sleep. */
#include "scheduler.h"
#include "sequence_pages.h"
#include "swap.h"

static void preempt_all(struct scheduler *s, bool may_swap)
{
    while (s->n_running)
        scheduler_preempt(s, s->running[s->n_running - 1], may_swap);
    s->n_preempted = s->n_admitted = 0; /* they describe steps, for scheduler_check */
}

static void pool_reset(struct scheduler *s, bool recompute)
{
    for (uint32_t i = 0; i < s->n_pools; i++)
        block_manager_reset(s->pools[i].blocks);
    features_reset(s->features);
    for (uint32_t i = 0; i < s->n_running; i++)
        s->running[i]->is_stale = true;
    if (recompute)
        preempt_all(s, false);
    s->n_preempted = s->n_admitted = 0;
}

void scheduler_leave_pages(struct scheduler *s)
{
    preempt_all(s, true);
}

void scheduler_drop_cache(struct scheduler *s, bool recompute)
{
    if (s->tier)
        host_tier_reset(s->tier);
    pool_reset(s, recompute);
    for (struct sequence *q = queue_first(&s->waiting); s->tier && q; q = queue_next(q)) {
        q->is_stale = q->swapped > 0;
        if (recompute)
            swap_drop(s, q);
    }
}

void scheduler_reset_cache(struct scheduler *s, bool recompute)
{
    scheduler_drop_cache(s, recompute);
    if (s->outer)
        outer_tier_clear(s->outer);
}

void scheduler_lose_pages(struct scheduler *s)
{
    pool_reset(s, true);
}

/* A search goes on with its adapter: sums of two adapters' logprobs would choose among its beams. */
static bool moves(const struct sequence *q, uint64_t adapter)
{
    return q->request->adapter && q->request->adapter->number == adapter && !q->request->beams;
}

void scheduler_move_adapter(struct scheduler *s, uint64_t from, struct adapter *to)
{
    for (uint32_t i = s->n_running; i-- > 0;)
        if (moves(s->running[i], from))
            scheduler_preempt(s, s->running[i], false);
    for (struct sequence *q = queue_first(&s->waiting); q; q = queue_next(q)) {
        if (!moves(q, from))
            continue;
        swap_drop(s, q);
        if (sequence_is_whole(q) || sequence_is_new(q))
            sequence_start_over(q);
        sequence_forget_keys(q);
    }
    for (struct sequence *q = queue_first(&s->waiting); q; q = queue_next(q))
        if (moves(q, from)) /* once for all sequences of a request */
            request_move(q->request, to);
    s->n_preempted = s->n_admitted = 0;
}

/* A sequence that has drawn no token since its admission still computes its prompt, or recomputes tokens from before a
 * preemption. It starts over: otherwise its keys and values would be of two epochs, but its tokens would report the newer. */
void scheduler_new_epoch(struct scheduler *s, bool recompute, const struct hash *weights)
{
    if (s->outer)
        outer_tier_renew(s->outer, weights);
    scheduler_drop_cache(s, recompute);
    for (uint32_t i = s->n_running; i-- > 0;)
        if (sequence_is_whole(s->running[i]) || s->running[i]->n_output == s->running[i]->n_admitted_output)
            scheduler_preempt(s, s->running[i], false);
        else
            s->running[i]->is_mixed = true;
    for (struct sequence *q = queue_first(&s->waiting); q; q = queue_next(q)) {
        q->has_asked = q->has_sought = false;
        bool starts_over = sequence_is_whole(q) || sequence_is_new(q);
        q->is_mixed = q->swapped > 0;
        if (starts_over || q->n_output == q->n_admitted_output)
            swap_drop(s, q);
        if (starts_over)
            sequence_start_over(q);
    }
    s->n_preempted = 0;
}
