#include "swap.h"

#include "recurrent.h"
#include "sequence_pages.h"

/* ---- the choice ---- */

/* Number of leading positions of a sequence that a preemption by recomputation would find again: those of published blocks, or
 * up to the last snapshot, as long as host memory can hold what the pool loses. */
static uint32_t findable_tokens(const struct scheduler *s, const struct sequence *q, uint32_t n_pages)
{
    if (!config_of(s)->prefix_caching || q->is_stale || host_tier_n_free(s->tier) < n_pages)
        return 0;
    if (!s->n_state_pages)
        return q->n_published * block_tokens(s);
    uint32_t last = q->n_computed >= q->last_due ? q->last_due : 0, passed = q->passed_block * block_tokens(s);
    return last > passed ? last : passed;
}

/* True if copying the pages out and back takes less time than computing the rows again. Unless there was a copy already, a swap
 * measures how long copies take. */
static bool is_cheaper(const struct scheduler *s, const struct sequence *q, uint32_t n_pages)
{
    uint32_t n_found = findable_tokens(s, q, n_pages), n_redone = q->n_computed > n_found ? q->n_computed - n_found : 0;
    double out_s = s->page_move_s[MOVE_OUT], in_s = s->page_move_s[MOVE_IN] > 0 ? s->page_move_s[MOVE_IN] : out_s;
    return n_pages * (out_s + in_s) < n_redone * s->row_s;
}

/* Beams are left out: their places change owners. */
static bool is_wanted(const struct scheduler *s, const struct sequence *q, uint32_t n_pages)
{
    enum preemption how = config_of(s)->preemption;
    if (how == PREEMPTION_RECOMPUTE || q->request->beams || q->kept_state)
        return false;
    return how == PREEMPTION_SWAP || q->is_mixed || is_cheaper(s, q, n_pages);
}

/* ---- copies out ---- */

static uint32_t count_pages(const struct scheduler *s, const struct sequence *q)
{
    uint32_t n = s->n_state_pages;
    for (uint32_t g = 0; g < n_groups(s); g++)
        n += blocks_of(s, q->n_computed) - q->first_block[g];
    return n;
}

/* Copies a page out behind the sequence's other slots; *last: the slot of the page before. A state that others go on to use may
 * be written in this step, so the step waits. False if there is no slot, or if the content comes only with this flush. */
static bool page_out(struct scheduler *s, struct sequence *q, int32_t page, bool is_shared, uint32_t *last)
{
    uint32_t slot = host_tier_is_coming(s->tier, page) ? 0 : host_tier_swap_out(s->tier, page, *last);
    if (!slot)
        return false;
    if (is_shared)
        host_tier_await(s->tier, page, MOVE_OUT);
    q->swapped = q->swapped ? q->swapped : slot;
    *last = slot;
    return true;
}

static bool pages_out(struct scheduler *s, struct sequence *q)
{
    uint32_t last = 0;
    for (uint32_t g = 0; g < n_groups(s); g++) {
        const int32_t *table = scheduler_table(s, g, q->slot);
        for (uint32_t b = q->first_block[g]; b < blocks_of(s, q->n_computed); b++)
            if (!page_out(s, q, table[b], block_manager_is_shared(blocks_for(s, q), table[b]), &last))
                return false;
    }
    for (uint32_t i = 0; i < s->n_state_pages; i++) {
        const int32_t *state = recurrent_table(s, q->slot);
        if (!page_out(s, q, state[i], block_manager_is_shared(blocks_for(s, q), state[0]), &last))
            return false;
    }
    return true;
}

bool swap_out(struct scheduler *s, struct sequence *q, bool are_filled)
{
    if (!are_filled || !q->n_computed)
        return false;
    pages_advance_windows(s, q);
    uint32_t n_pages = count_pages(s, q);
    if (n_pages > host_tier_n_free(s->tier) + host_tier_n_findable(s->tier) || !is_wanted(s, q, n_pages))
        return false;
    if (!pages_out(s, q)) {
        swap_drop(s, q);
        return false;
    }
    q->n_swapped = q->n_computed;
    s->n_swaps++;
    s->n_pages_swapped_out += n_pages;
    return true;
}

/* ---- copies back ---- */

/* Number of leading blocks that are to be findable under the sequence's keys. */
static uint32_t n_published(const struct scheduler *s, const struct sequence *q)
{
    uint32_t n_full = q->n_swapped / block_tokens(s);
    return q->n_published < n_full ? q->n_published : n_full;
}

void swap_look(struct scheduler *s, struct sequence *q, uint32_t slot)
{
    uint32_t n_found = q->is_stale ? 0 : n_published(s, q);
    for (uint32_t g = 0; g < n_groups(s); g++) {
        int32_t *table = scheduler_table(s, g, slot);
        for (uint32_t b = pages_first_seen_block(s, g, q->n_swapped); b < blocks_of(s, q->n_swapped); b++) {
            table[b] = b < n_found ? block_manager_find(blocks_for(s, q), sequence_key(q, b), g) : 0;
            table[b] = table[b] ? table[b] : -1;
        }
    }
}

/* Copies the block in the slot *at back into a page of its own, under its old key if it had one. Moves *at on. */
static void block_in(struct scheduler *s, struct sequence *q, uint32_t group, uint32_t block, uint32_t *at)
{
    int32_t *page = &scheduler_table(s, group, q->slot)[block];
    uint32_t slot = *at;
    *at = host_tier_next(s->tier, slot);
    if (*page > 0) {
        host_tier_drop(s->tier, slot);
        return;
    }
    block_manager_take_to_fill(blocks_for(s, q), page, false);
    host_tier_swap_in(s->tier, slot, *page);
    s->n_pages_swapped_in++;
    if (q->is_stale || block >= q->n_published)
        return;
    block_manager_publish_filled(blocks_for(s, q), *page, sequence_key(q, block), group);
    if (s->events)
        pages_note_stored(s, q, block, group);
}

static void state_in(struct scheduler *s, struct sequence *q, uint32_t at)
{
    int32_t *state = recurrent_table(s, q->slot);
    block_manager_take_to_fill(blocks_for(s, q), state, true);
    for (uint32_t i = 0, next; i < s->n_state_pages; i++, at = next) {
        next = host_tier_next(s->tier, at);
        host_tier_swap_in(s->tier, at, state[i]);
    }
    s->n_pages_swapped_in += s->n_state_pages;
    page_tables_note(&s->tables, n_groups(s), q->slot, 0, s->n_state_pages);
}

void swap_in(struct scheduler *s, struct sequence *q)
{
    uint32_t n_blocks = blocks_of(s, q->n_swapped), at = q->swapped;
    q->n_published = n_published(s, q);
    for (uint32_t g = 0; g < n_groups(s); g++) {
        const int32_t *table = scheduler_table(s, g, q->slot);
        q->first_block[g] = pages_first_seen_block(s, g, q->n_swapped);
        for (uint32_t b = q->first_block[g]; b < n_blocks; b++) {
            s->batch->shares_new_keys |= table[b] > 0 && !block_manager_is_settled(blocks_for(s, q), table[b]);
            if (table[b] > 0)
                block_manager_share(blocks_for(s, q), table[b]); /* before pages are taken */
        }
    }
    for (uint32_t g = 0; g < n_groups(s); g++) {
        for (uint32_t b = q->first_block[g]; b < n_blocks; b++)
            block_in(s, q, g, b, &at);
        page_tables_note(&s->tables, g, q->slot, q->first_block[g], n_blocks);
    }
    if (s->n_state_pages)
        state_in(s, q, at);
    q->n_computed = q->n_hit = q->n_swapped;
    q->n_taken_rows = q->drafts.n_computed = 0;
    q->swapped = q->n_swapped = 0;
}

/* ---- giving up ---- */

void swap_drop(struct scheduler *s, struct sequence *q)
{
    for (uint32_t at = q->swapped, next; at; at = next) {
        next = host_tier_next(s->tier, at);
        host_tier_drop(s->tier, at);
    }
    if (q->n_swapped)
        pages_forget(q);
    q->swapped = q->n_swapped = 0;
}
