/* scheduler_check.c: checks the invariants of docs/develop/engine.md that hold between two steps. */
#include "beams.h"
#include "recurrent.h"

#include <string.h>

#define BROKEN(...) return err_set(err, RC_INTERNAL, __VA_ARGS__)

static enum rc check_sequence(const struct scheduler *s, const struct sequence *q, struct err *err)
{
    if (q->n_computed > sequence_n_expected(q) || (!q->n_pending && q->n_computed > sequence_n_known(q)) ||
        q->n_computed != q->n_hit + q->n_taken_rows)
        BROKEN("invariant 12: computed %u of %u known and %u pending, hit %u, rows %u", q->n_computed, sequence_n_known(q),
               q->n_pending, q->n_hit, q->n_taken_rows);
    if (q->n_published * s->context->config->layout.block_tokens > sequence_n_known(q) || q->n_pending > 1 + q->drafts.n)
        BROKEN("invariant 4: %u blocks published, %u tokens known, %u pending and %u drafts between two steps", q->n_published,
               sequence_n_known(q), q->n_pending, q->drafts.n);
    if (!q->shares_tail && q->n_published * s->context->config->layout.block_tokens > q->n_computed)
        BROKEN("invariant 4: %u blocks published, %u positions computed: a published block would be written", q->n_published,
               q->n_computed);
    if (q->state != SEQUENCE_RUNNING || s->slots[q->slot] != q)
        BROKEN("running sequence: slot %u is not its own, or its state is %d", q->slot, q->state);
    return RC_OK;
}

static enum rc check_running(const struct scheduler *s, struct err *err)
{
    uint32_t n_slots = 0, n_in_pools = 0;
    for (uint32_t i = 0; i < s->context->config->max_num_seqs; i++)
        n_slots += s->slots[i] != NULL;
    for (uint32_t i = 0; i < s->n_pools; i++)
        n_in_pools += s->pools[i].n_running;
    if (n_slots != s->n_running || n_in_pools != s->n_running)
        BROKEN("invariant 9: %u sequences run, %u slots are taken, %u are in pools", s->n_running, n_slots, n_in_pools);
    for (uint32_t i = 0; i < s->n_running; i++) {
        struct order order = sequence_order(s->running[i]);
        enum rc rc = check_sequence(s, s->running[i], err);
        if (rc)
            return rc;
        if (i && !sequence_is_ahead(s->running[i - 1], s->running[i]))
            BROKEN("running sequences: number %u is out of order", i);
        if (s->n_preempted && s->running[i]->pool == s->last_victim_pool && !order_is_ahead(&order, &s->last_victim))
            BROKEN("invariant 10: somebody was preempted while a sequence further behind kept running");
    }
    if (s->n_preempted && s->n_admitted)
        BROKEN("invariant 9: a step preempted %u and admitted %u", s->n_preempted, s->n_admitted);
    return RC_OK;
}

static enum rc check_waiting(const struct scheduler *s, struct err *err)
{
    const struct sequence *before = NULL;
    uint64_t n = 0;
    uint32_t n_swapped = 0;
    for (const struct sequence *q = queue_first(&s->waiting); q; before = q, q = queue_next(q), n++) {
        struct order order = sequence_order(q);
        if (before && !sequence_is_ahead(before, q))
            BROKEN("waiting queue: place %llu is out of order", (unsigned long long)n);
        if (q->state != SEQUENCE_WAITING || q->n_computed)
            BROKEN("waiting queue: place %llu has state %d and %u computed rows", (unsigned long long)n, q->state,
                   q->n_computed);
        if (!q->swapped != !q->n_swapped || (!q->swapped && q->n_published))
            BROKEN("waiting queue: place %llu has %u positions in host memory from slot %u on, %u blocks published",
                   (unsigned long long)n, q->n_swapped, q->swapped, q->n_published);
        for (uint32_t slot = q->swapped; slot; slot = host_tier_next(s->tier, slot))
            n_swapped++;
        if (q->parent && q->parent->heap < q->heap)
            BROKEN("waiting queue: place %llu breaks the heap", (unsigned long long)n);
        if (s->n_admitted && !s->n_preempted && !q->is_blocked && !order_is_ahead(&s->last_admitted, &order))
            BROKEN("invariant 10: a waiting sequence was passed over");
    }
    if (n != s->waiting.n)
        BROKEN("waiting queue: %llu found, %llu counted", (unsigned long long)n, (unsigned long long)s->waiting.n);
    if (s->tier && n_swapped != host_tier_n_swapped(s->tier))
        BROKEN("invariant 20: waiting sequences have %u slots of host memory, %u counted", n_swapped,
               host_tier_n_swapped(s->tier));
    if (s->has_stalled)
        BROKEN("invariant 11: a step scheduled nothing though %llu sequences wait", (unsigned long long)n);
    return RC_OK;
}

/* Counts the references of a slot's tables and checks that they have exactly the pages of the computed positions. */
static enum rc count_tables(const struct scheduler *s, uint32_t slot, uint32_t *refs, struct err *err)
{
    const struct kv_layout *layout = &s->context->config->layout;
    const struct sequence *q = s->slots[slot];
    for (uint32_t g = 0; g < layout->n_groups; g++) {
        const int32_t *table = scheduler_table(s, g, slot);
        uint32_t first = q ? q->first_block[g] : 0,
                 end = q ? (q->n_computed + layout->block_tokens - 1) / layout->block_tokens : 0;
        uint32_t window = layout->groups[g].window, next = q ? q->n_computed : 0;
        if (first && (!window || next + 1 < window + first * layout->block_tokens))
            BROKEN("invariant 6: slot %u gave up block %u of group %u too early, at position %u", slot, first - 1, g, next);
        for (uint32_t b = 0; b < s->tables.stride; b++) {
            if ((table[b] != 0) != (b >= first && b < end) || table[b] < 0 || (uint32_t)table[b] >= s->context->config->n_pages)
                BROKEN("invariant 6: slot %u has page %d at block %u of group %u, blocks %u to %u are computed", slot, table[b],
                       b, g, first, end);
            refs[table[b]] += table[b] != 0;
        }
    }
    return RC_OK;
}

/* Counts the reference of a slot's live state and checks that the state is one whole bundle. */
static enum rc count_state(const struct scheduler *s, uint32_t slot, uint32_t *refs, struct err *err)
{
    uint32_t n = s->n_state_pages;
    const int32_t *table = n ? recurrent_table(s, slot) : NULL;
    for (uint32_t i = 0; i < n; i++)
        if ((table[i] != 0) != (s->slots[slot] != NULL) || table[i] < 0 || (uint32_t)table[i] >= s->context->config->n_pages)
            BROKEN("invariant 6: slot %u has page %d as part %u of its state", slot, table[i], i);
    if (!n || !table[0])
        return RC_OK;
    if (!block_manager_is_bundle(s->pools[s->slots[slot]->pool].blocks, table))
        BROKEN("invariant 6: the state of slot %u is not one bundle", slot);
    refs[table[0]]++;
    refs[s->slots[slot]->kept_state] += s->slots[slot]->kept_state != 0;
    return RC_OK;
}

/* True for the first sample of a beam search that is not parked; every search has one. */
static bool leads_beams(const struct sequence *q)
{
    uint32_t i = 0;
    while (q->request->beams && q->request->sequences[i]->state == SEQUENCE_PARKED)
        i++;
    return q->request->beams && q->request->sequences[i] == q;
}

static enum rc check_searches(const struct scheduler *s, struct err *err)
{
    uint32_t n_parked = 0, n = 0;
    enum rc rc = RC_OK;
    for (uint32_t i = 0; i < s->n_running && !rc; i++, n_parked += n, n = 0)
        rc = leads_beams(s->running[i]) ? beams_check(s->running[i]->request, &n, err) : RC_OK;
    for (const struct sequence *q = queue_first(&s->waiting); q && !rc; q = queue_next(q), n_parked += n, n = 0)
        rc = leads_beams(q) ? beams_check(q->request, &n, err) : RC_OK;
    if (!rc && n_parked != s->n_parked)
        BROKEN("invariant 17: %u samples of beam searches are parked, %u counted", n_parked, s->n_parked);
    return rc;
}

enum rc scheduler_check(const struct scheduler *s, struct err *err)
{
    size_t n_pages = s->context->config->n_pages, n_all = n_pages * s->n_pools;
    uint32_t *refs = s->scratch, *holds = s->scratch + n_all;
    enum rc rc = check_running(s, err);
    if (!rc)
        rc = check_waiting(s, err);
    if (!rc)
        rc = check_searches(s, err);
    memset(s->scratch, 0, 2 * n_all * sizeof *s->scratch);
    for (uint32_t slot = 0; slot < s->context->config->max_num_seqs && !rc; slot++) {
        uint32_t *own = refs + (s->slots[slot] ? s->slots[slot]->pool * n_pages : 0);
        rc = count_tables(s, slot, own, err);
        rc = rc ? rc : count_state(s, slot, own, err);
    }
    if (!rc && s->tier)
        rc = host_tier_check(s->tier, err);
    for (uint32_t i = 0; i < s->n_pools && !rc; i++)
        rc = block_manager_check(s->pools[i].blocks, refs + i * n_pages, holds + i * n_pages, err);
    return rc;
}
