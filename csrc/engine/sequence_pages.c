#include "sequence_pages.h"

#include "items.h"
#include "recurrent.h"

#include <string.h>

int32_t *scheduler_table(const struct scheduler *s, uint32_t group, uint32_t slot)
{
    return page_tables_row(&s->tables, group, slot);
}

int32_t pages_look(struct scheduler *s, struct sequence *q, uint32_t block, uint32_t group)
{
    const struct hash *key = sequence_key(q, block);
    int32_t page = block_manager_look(blocks_for(s, q), key, group);
    return page || !s->looks_outside || !outer_tier_has(s->outer, key, group) ? page : PAGE_OUTSIDE;
}

void pages_forget(struct sequence *q)
{
    q->n_published = 0;
    q->is_stale = q->is_mixed = false;
}

void pages_release(struct scheduler *s, struct sequence *q)
{
    if (s->n_state_pages)
        recurrent_release(s, q);
    for (uint32_t b = blocks_of(s, q->n_computed); b-- > 0;) {
        if (s->n_state_pages)
            recurrent_touch(s, q, b);
        for (uint32_t g = 0; g < n_groups(s); g++) {
            int32_t *page = &scheduler_table(s, g, q->slot)[b];
            if (*page)
                block_manager_release(blocks_for(s, q), *page);
            *page = 0;
        }
    }
    memset(q->first_block, 0, sizeof q->first_block);
}

uint32_t pages_first_seen_block(const struct scheduler *s, uint32_t group, uint32_t position)
{
    uint32_t window = config_of(s)->layout.groups[group].window;
    return window && position + 1 > window ? (position + 1 - window) / block_tokens(s) : 0;
}

void pages_advance_windows(struct scheduler *s, struct sequence *q)
{
    for (uint32_t g = 0; g < n_groups(s); g++) {
        int32_t *table = scheduler_table(s, g, q->slot);
        uint32_t first = pages_first_seen_block(s, g, q->n_computed);
        for (; q->first_block[g] < first; q->first_block[g]++) {
            block_manager_release(blocks_for(s, q), table[q->first_block[g]]);
            table[q->first_block[g]] = 0;
        }
    }
}

/* Number of groups in which the block to be written next is shared or published. */
static uint32_t shared_tails(const struct scheduler *s, const struct sequence *q)
{
    uint32_t n = 0;
    for (uint32_t g = 0; q->shares_tail && g < n_groups(s); g++)
        n += !block_manager_is_writable(blocks_for(s, q), scheduler_table(s, g, q->slot)[q->n_computed / block_tokens(s)]);
    return n;
}

/* Replaces those blocks by fresh pages, which copies of this step fill. */
static void tails_copy(struct scheduler *s, struct sequence *q)
{
    for (uint32_t g = 0; q->shares_tail && g < n_groups(s); g++) {
        uint32_t block = q->n_computed / block_tokens(s);
        int32_t *page = &scheduler_table(s, g, q->slot)[block];
        if (block_manager_is_writable(blocks_for(s, q), *page))
            continue;
        struct page_copy copy = {*page, block_manager_take(blocks_for(s, q))};
        block_manager_hold(blocks_for(s, q), copy.source);
        block_manager_release(blocks_for(s, q), copy.source);
        s->copy_owners[s->batch->n_copies] = (struct copy_owner){q, copy.source, q->pool};
        s->batch->copies[s->batch->n_copies++] = copy;
        *page = copy.target;
        if (q->drafts.n_computed > block * block_tokens(s)) /* the drafter's page is not copied */
            q->drafts.n_computed = block * block_tokens(s);
        page_tables_note(&s->tables, g, q->slot, block, block + 1);
    }
    q->shares_tail = false;
}

uint64_t pages_room(const struct scheduler *s, uint32_t number)
{
    const struct pool *pool = &s->pools[number];
    uint64_t kept = pool->n_promised + (pool->n_running ? config_of(s)->n_pages / 100 : 0),
             n_free = block_manager_n_free(pool->blocks);
    return n_free > kept ? n_free - kept : 0;
}

bool pages_take(struct scheduler *s, struct sequence *q, uint32_t n_rows)
{
    uint32_t have = blocks_of(s, q->n_computed), want = blocks_of(s, q->n_computed + n_rows);
    uint32_t n_free = block_manager_n_free(blocks_for(s, q)),
             needed = (want - have) * n_groups(s) + shared_tails(s, q);
    if (s->n_state_pages)
        needed += recurrent_needed(s, q);
    if (needed > n_free)
        return false;
    if (s->n_state_pages)
        recurrent_take(s, q, n_free - needed);
    tails_copy(s, q);
    for (uint32_t g = 0; g < n_groups(s); g++) {
        int32_t *table = scheduler_table(s, g, q->slot);
        for (uint32_t b = have; b < want; b++)
            table[b] = block_manager_take(blocks_for(s, q));
        page_tables_note(&s->tables, g, q->slot, have, want);
    }
    return true;
}

void pages_note_stored(struct scheduler *s, struct sequence *q, uint32_t block, uint32_t group)
{
    const struct byte_string *salt = &q->request->spec.salt;
    struct kv_event event = {.kind = KV_STORED, .hash = sequence_key(q, block)->lo, .group = group, .has_parent = block > 0,
                             .adapter = q->request->spec.adapter, .pool = q->pool};
    int32_t ids[MAX_BLOCK_TOKENS];
    if (salt->n > KV_EVENT_SALT)
        return;
    if (block) {
        event.parent = sequence_key(q, block - 1)->lo;
    } else if (salt->n) {
        event.n_salt = salt->n;
        memcpy(event.salt, salt->bytes, salt->n);
    }
    for (uint32_t i = 0; i < block_tokens(s); i++)
        ids[i] = sequence_token(q, block * block_tokens(s) + i);
    event.n_images = items_contents(&q->request->spec, block * block_tokens(s), block_tokens(s), event.images, KV_EVENT_IMAGES);
    kv_events_note(s->events, &event, ids);
}

void pages_publish(struct scheduler *s, struct sequence *q)
{
    uint32_t n_known = sequence_n_known(q), n = (q->n_computed < n_known ? q->n_computed : n_known) / block_tokens(s);
    if (!config_of(s)->prefix_caching || q->is_stale)
        return;
    for (; q->n_published < n; q->n_published++) {
        const struct hash *key = sequence_key(q, q->n_published);
        for (uint32_t g = 0; g < n_groups(s); g++) {
            bool is_new = s->events && !block_manager_find(blocks_for(s, q), key, g);
            block_manager_publish(blocks_for(s, q), scheduler_table(s, g, q->slot)[q->n_published], key, g);
            if (is_new)
                pages_note_stored(s, q, q->n_published, g);
        }
        if (s->n_state_pages)
            recurrent_note_key(s, key);
    }
    if (s->n_state_pages)
        recurrent_publish(s, q);
}

void pages_share(struct scheduler *s, struct sequence *lead, struct sequence *q)
{
    for (uint32_t g = 0; g < n_groups(s); g++) {
        const int32_t *source = scheduler_table(s, g, lead->slot);
        int32_t *target = scheduler_table(s, g, q->slot);
        for (uint32_t b = lead->first_block[g]; b < blocks_of(s, lead->n_computed); b++) {
            target[b] = source[b];
            block_manager_share(blocks_for(s, q), target[b]);
        }
        q->first_block[g] = lead->first_block[g];
        page_tables_note(&s->tables, g, q->slot, q->first_block[g], blocks_of(s, lead->n_computed));
    }
    if (s->n_state_pages)
        recurrent_fork(s, lead, q);
    q->shares_tail = lead->shares_tail = lead->n_computed % block_tokens(s) != 0;
}

void pages_give_back(struct scheduler *s, struct sequence *q, uint32_t n_left)
{
    for (uint32_t b = blocks_of(s, q->n_computed); b-- > blocks_of(s, n_left);)
        for (uint32_t g = 0; g < n_groups(s); g++) {
            int32_t *page = &scheduler_table(s, g, q->slot)[b];
            block_manager_release(blocks_for(s, q), *page);
            *page = 0;
        }
    q->n_taken_rows -= q->n_computed - n_left;
    q->n_computed = n_left;
}

bool pages_cancel_copies(struct scheduler *s, const struct sequence *q)
{
    struct batch *batch = s->batch;
    uint32_t n_before = batch->n_copies;
    for (uint32_t i = batch->n_copies; i-- > 0;)
        if (s->copy_owners[i].sequence == q) {
            if (s->copy_owners[i].held)
                block_manager_unhold(blocks_for(s, q), s->copy_owners[i].held);
            batch->copies[i] = batch->copies[--batch->n_copies];
            s->copy_owners[i] = s->copy_owners[batch->n_copies];
        }
    return batch->n_copies < n_before;
}
