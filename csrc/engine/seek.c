#include "seek.h"

#include "load_cost.h"
#include "sequence_pages.h"

#include <string.h>

#define LOOK_S 0.005 /* a prompt that another engine still computes is looked for this often */

/* Keeps what the host tier has of the hit, so that the loads do not take its slots. */
static void keep_found(struct scheduler *s, struct sequence *q, uint32_t slot, uint32_t n_hit)
{
    for (uint32_t g = 0; g < n_groups(s); g++)
        for (uint32_t b = 0; b < n_hit; b++) {
            int32_t page = scheduler_table(s, g, slot)[b];
            if (page < 0 && page != PAGE_OUTSIDE)
                host_tier_touch(s->tier, (uint32_t)-page);
        }
    int32_t bundle = s->n_state_pages ? pages_look(s, q, n_hit - 1, BUNDLE_GROUP) : 0;
    if (bundle < 0 && bundle != PAGE_OUTSIDE)
        host_tier_touch(s->tier, (uint32_t)-bundle);
}

/* Orders one block; false if nothing more can be ordered. */
static bool load(struct scheduler *s, struct sequence *q, uint32_t block, uint32_t group)
{
    uint64_t number = outer_tier_load(s->outer, sequence_key(q, block), group);
    q->sought_by = number > q->sought_by ? number : q->sought_by;
    return number > 0;
}

/* Orders what only the outer tier has of a hit, from the beginning on; the snapshot at the end first, without which a model
 * with recurrent states has no hit. */
static void load_missing(struct scheduler *s, struct sequence *q, uint32_t slot, uint32_t n_hit)
{
    bool is_state_outside = s->n_state_pages && pages_look(s, q, n_hit - 1, BUNDLE_GROUP) == PAGE_OUTSIDE;
    if (is_state_outside && !load(s, q, n_hit - 1, BUNDLE_GROUP))
        return;
    for (uint32_t b = 0; b < n_hit; b++) {
        bool is_outside = is_state_outside && !n_groups(s);
        for (uint32_t g = 0; g < n_groups(s); g++)
            if (scheduler_table(s, g, slot)[b] == PAGE_OUTSIDE) {
                if (!load(s, q, b, g))
                    return;
                is_outside = true;
            }
        s->outer_hits += is_outside ? block_tokens(s) : 0;
    }
}

static uint32_t free_slot(const struct scheduler *s)
{
    uint32_t slot = 0;
    while (s->slots[slot])
        slot++;
    return slot;
}

static void clear_tables(struct scheduler *s, uint32_t slot, uint32_t limit)
{
    for (uint32_t g = 0; g < n_groups(s); g++)
        memset(scheduler_table(s, g, slot), 0, limit * sizeof(int32_t));
}

bool seek_awaits(const struct sequence *q)
{
    return q->request->spec.awaits_s > 0 && !q->has_waited;
}

static void seek(struct scheduler *s, struct sequence *q, uint32_t limit)
{
    uint32_t slot = free_slot(s), n_hit;
    s->outer_queries += q->looked > 0 ? 0 : sequence_n_known(q);
    s->looks_outside = true;
    n_hit = q->n_sought = scheduler_find_hit(s, q, slot, limit);
    if (!seek_awaits(q)) /* else the time of the loads costs nothing */
        n_hit = load_cost_cut(s, q, slot, n_hit);
    if (n_hit) {
        keep_found(s, q, slot, n_hit);
        load_missing(s, q, slot, n_hit);
    }
    s->looks_outside = false;
    clear_tables(s, slot, limit);
}

struct asked {
    struct sequence *sequence;
    uint32_t first;                /* block */
};

static const struct hash *key_at(void *ctx, uint32_t i)
{
    const struct asked *asked = ctx;
    return sequence_key(asked->sequence, asked->first + i);
}

/* Asks for the blocks behind those that pool and host tier have. */
static void ask(struct scheduler *s, struct sequence *q, uint32_t limit)
{
    uint32_t slot = free_slot(s);
    struct asked asked = {q, scheduler_find_hit(s, q, slot, limit)};
    clear_tables(s, slot, limit);
    q->sought_by = outer_tier_ask(s->outer, key_at, &asked, limit - asked.first);
}

/* True while a sequence awaits more blocks than it has found. It looks again after a while, and once more behind the end. */
static bool is_awaiting(struct sequence *q, uint32_t limit, double now)
{
    if (!seek_awaits(q))
        return false;
    if (q->n_sought > q->n_sought_before || !q->looked)
        q->progressed = now;
    q->n_sought_before = q->n_sought > q->n_sought_before ? q->n_sought : q->n_sought_before;
    if ((q->has_waited = q->n_sought >= limit))
        return false;
    q->has_waited = atomic_load(&q->request->has_all_come) || now > q->progressed + (double)q->request->spec.awaits_s;
    if (q->has_waited || now >= q->looked + LOOK_S) {
        q->has_asked = q->has_sought = false;
        q->looked = now;
    }
    return true;
}

bool seek_is_on(struct scheduler *s, struct sequence *q, uint32_t limit, double now)
{
    if (!q->has_asked) {
        q->has_asked = true;
        q->sought_by = 0;
        if (outer_tier_must_ask(s->outer))
            ask(s, q, limit);
    }
    bool is_on = outer_tier_is_loading(s->outer, q->sought_by);
    if (!is_on && !q->has_sought) {
        q->has_sought = true;
        q->sought_by = 0;
        seek(s, q, limit);
        is_on = outer_tier_is_loading(s->outer, q->sought_by);
    }
    is_on = is_on || is_awaiting(q, limit, now);
    s->n_seeking += is_on;
    return is_on;
}
