#include "recurrent.h"

#include "sequence_pages.h"

#define NEVER UINT32_MAX

int32_t *recurrent_table(const struct scheduler *s, uint32_t slot)
{
    return page_tables_row(&s->tables, config_of(s)->layout.n_groups, slot);
}

static bool is_caching(const struct scheduler *s, const struct sequence *q)
{
    return config_of(s)->prefix_caching && !q->is_stale;
}

/* ---- where snapshots are due ---- */

/* Rounds the distance between two snapshots down to whole blocks, at least one. */
static uint32_t interval(const struct scheduler *s, uint32_t n_tokens)
{
    uint32_t n_blocks = n_tokens / block_tokens(s);
    return (n_blocks ? n_blocks : 1) * block_tokens(s);
}

/* The next position of the prompt behind `at` where a snapshot is due. */
static uint32_t next_due(const struct scheduler *s, const struct sequence *q, uint32_t at)
{
    uint32_t every = interval(s, config_of(s)->snapshot_tokens), due = (at / every + 1) * every;
    if (!is_caching(s, q) || at >= q->last_due)
        return NEVER;
    if (q->leaves_at > at && q->leaves_at < due)
        due = q->leaves_at;
    return due < q->last_due ? due : q->last_due;
}

static bool is_due(const struct scheduler *s, const struct sequence *q)
{
    uint32_t at = q->n_computed;
    return at && (at == q->leaves_at || at == q->last_due || at % interval(s, config_of(s)->snapshot_tokens) == 0);
}

/* True if a temporary snapshot is due. While a sequence generates, only its last snapshot is kept, for a request that continues
 * its text. */
static bool is_temporary_due(const struct scheduler *s, const struct sequence *q)
{
    return q->n_computed > q->last_due && q->n_computed % interval(s, config_of(s)->snapshot_tokens / 8) == 0;
}

uint32_t recurrent_cut(const struct scheduler *s, const struct sequence *q, uint32_t n_rows)
{
    uint32_t left = next_due(s, q, q->n_computed) - q->n_computed;
    return left < n_rows ? left : n_rows;
}

/* ---- the live state ---- */

uint32_t recurrent_needed(const struct scheduler *s, const struct sequence *q)
{
    int32_t bundle = recurrent_table(s, q->slot)[0];
    return !bundle || block_manager_is_shared(blocks_for(s, q), bundle) ? s->n_state_pages : 0;
}

/* Withdraws the temporary snapshot that `bundle`, a newer temporary snapshot, replaces. */
static void drop_passed(struct scheduler *s, struct sequence *q, int32_t bundle)
{
    struct block_manager *blocks = blocks_for(s, q);
    int32_t passed = q->passed_block ? block_manager_find(blocks, sequence_key(q, q->passed_block - 1), BUNDLE_GROUP) : 0;
    if (!block_manager_is_temporary(blocks, bundle))
        return;
    if (passed && passed != bundle && block_manager_is_temporary(blocks, passed) && block_manager_is_free(blocks, passed))
        block_manager_withdraw(blocks, passed);
    q->passed_block = q->n_computed / block_tokens(s);
}

/* Completes the step's next copies, whose sources are those of `held`, with the fresh live state as their target. */
static void fill_copies(struct scheduler *s, struct sequence *q, int32_t held)
{
    const int32_t *table = recurrent_table(s, q->slot);
    struct batch *batch = s->batch;
    for (uint32_t i = 0; i < s->n_state_pages; i++, batch->n_copies++) {
        batch->copies[batch->n_copies].target = table[i];
        s->copy_owners[batch->n_copies] = (struct copy_owner){q, i ? 0 : held, q->pool};
    }
    q->state_copied = s->n_steps;
}

void recurrent_take(struct scheduler *s, struct sequence *q, uint32_t n_spare)
{
    uint32_t n = s->n_state_pages;
    int32_t *table = recurrent_table(s, q->slot), bundle = table[0];
    if (bundle && block_manager_is_writable(blocks_for(s, q), bundle))
        return;
    /* Other running sequences may need a page of each group in this step; none may be preempted for a copy. */
    bool is_shared = bundle && block_manager_is_shared(blocks_for(s, q), bundle);
    if (bundle && !is_shared && n_spare < n + s->n_running * config_of(s)->layout.n_groups) {
        block_manager_withdraw(blocks_for(s, q), bundle);
        for (uint32_t i = 0; s->tier && i < n; i++) /* the step writes what a copy to the host tier may still read */
            host_tier_await(s->tier, table[i], MOVE_OUT);
        return;
    }
    struct batch *batch = s->batch;
    if (bundle && !is_shared)
        drop_passed(s, q, bundle);
    if (bundle)
        for (uint32_t i = 0; i < n; i++)
            batch->copies[batch->n_copies + i].source = table[i];
    block_manager_take_bundle(blocks_for(s, q), table);
    page_tables_note(&s->tables, config_of(s)->layout.n_groups, q->slot, 0, n);
    if (!bundle)
        return;
    fill_copies(s, q, bundle);
    block_manager_hold(blocks_for(s, q), bundle);
    block_manager_release(blocks_for(s, q), bundle);
}

/* ---- drafts ---- */

bool recurrent_can_keep(const struct scheduler *s, const struct sequence *q)
{
    return q->state_copied != s->n_steps && block_manager_is_writable(blocks_for(s, q), recurrent_table(s, q->slot)[0]);
}

uint32_t recurrent_draft_limit(const struct scheduler *s, const struct sequence *q)
{
    uint32_t at = q->n_computed, lasting = interval(s, config_of(s)->snapshot_tokens),
             temporary = interval(s, config_of(s)->snapshot_tokens / 8);
    if (!is_caching(s, q))
        return UINT32_MAX;
    uint32_t to_lasting = (lasting - at % lasting) % lasting, to_temporary = (temporary - at % temporary) % temporary;
    return to_lasting < to_temporary ? to_lasting : to_temporary;
}

void recurrent_keep(struct scheduler *s, struct sequence *q)
{
    int32_t *table = recurrent_table(s, q->slot), bundle = table[0];
    q->kept_state = bundle;
    q->kept_at = q->n_computed - q->n_rows;
    for (uint32_t i = 0; i < s->n_state_pages; i++)
        s->batch->copies[s->batch->n_copies + i].source = table[i];
    block_manager_take_bundle(blocks_for(s, q), table);
    page_tables_note(&s->tables, config_of(s)->layout.n_groups, q->slot, 0, s->n_state_pages);
    fill_copies(s, q, bundle);
    block_manager_hold(blocks_for(s, q), bundle);
}

void recurrent_settle(struct scheduler *s, struct sequence *q, bool is_back)
{
    int32_t *table = recurrent_table(s, q->slot);
    block_manager_release(blocks_for(s, q), is_back ? table[0] : q->kept_state);
    if (is_back) {
        block_manager_list_bundle(blocks_for(s, q), q->kept_state, table);
        page_tables_note(&s->tables, config_of(s)->layout.n_groups, q->slot, 0, s->n_state_pages);
    }
    q->kept_state = 0;
}

void recurrent_publish(struct scheduler *s, struct sequence *q)
{
    if (!is_caching(s, q) || q->n_computed % block_tokens(s) || q->n_computed > sequence_n_known(q))
        return;
    bool is_lasting = is_due(s, q);
    if (!is_lasting && !is_temporary_due(s, q))
        return;
    uint32_t block = q->n_computed / block_tokens(s) - 1;
    const struct hash *key = sequence_key(q, block);
    int32_t found = block_manager_find(blocks_for(s, q), key, BUNDLE_GROUP), bundle = recurrent_table(s, q->slot)[0];
    if (found) {
        if (is_lasting)
            block_manager_mark_temporary(blocks_for(s, q), found, false);
        return;
    }
    if (!block_manager_is_writable(blocks_for(s, q), bundle))
        return;
    block_manager_publish(blocks_for(s, q), bundle, key, BUNDLE_GROUP);
    block_manager_mark_temporary(blocks_for(s, q), bundle, !is_lasting);
    s->n_snapshots++;
}

void recurrent_withdraw(struct scheduler *s, const struct sequence *q)
{
    int32_t bundle = recurrent_table(s, q->slot)[0];
    if (bundle && !block_manager_is_shared(blocks_for(s, q), bundle) && !block_manager_is_settled(blocks_for(s, q), bundle))
        block_manager_withdraw(blocks_for(s, q), bundle);
}

void recurrent_release(struct scheduler *s, struct sequence *q)
{
    int32_t *table = recurrent_table(s, q->slot), bundle = table[0];
    if (bundle && !block_manager_is_writable(blocks_for(s, q), bundle) && !block_manager_is_shared(blocks_for(s, q), bundle))
        drop_passed(s, q, bundle);
    if (bundle)
        block_manager_release(blocks_for(s, q), bundle);
    if (q->kept_state)
        block_manager_release(blocks_for(s, q), q->kept_state);
    q->kept_state = 0;
    for (uint32_t i = 0; i < s->n_state_pages; i++)
        table[i] = 0;
}

void recurrent_touch(struct scheduler *s, struct sequence *q, uint32_t block)
{
    if (!is_caching(s, q) || block >= q->n_published)
        return;
    int32_t bundle = block_manager_find(blocks_for(s, q), sequence_key(q, block), BUNDLE_GROUP);
    if (bundle)
        block_manager_touch(blocks_for(s, q), bundle);
}

/* ---- hits ---- */

uint32_t recurrent_find(struct scheduler *s, struct sequence *q, uint32_t n_blocks)
{
    for (uint32_t n = n_blocks; n; n--) {
        int32_t bundle = pages_look(s, q, n - 1, BUNDLE_GROUP);
        if (bundle < 0 || (bundle && block_manager_is_settled(blocks_for(s, q), bundle)))
            return n;
    }
    return 0;
}

/* The N_SEEN_PLACES places where a key may stand, the latest key first. */
static struct hash *seen_places(const struct scheduler *s, const struct hash *key)
{
    return &s->seen_keys[key->lo % (N_SEEN_KEYS / N_SEEN_PLACES) * N_SEEN_PLACES];
}

static uint32_t seen_place(const struct hash *places, const struct hash *key)
{
    uint32_t at = 0;
    while (at < N_SEEN_PLACES && !hash_equal(&places[at], key))
        at++;
    return at;
}

void recurrent_note_key(struct scheduler *s, const struct hash *key)
{
    struct hash *places = seen_places(s, key);
    uint32_t at = seen_place(places, key);
    for (at = at < N_SEEN_PLACES ? at : N_SEEN_PLACES - 1; at; at--)
        places[at] = places[at - 1];
    places[0] = *key;
}

/* Number of leading blocks that some sequence has published before, even if they are no longer cached. */
static uint32_t seen_blocks(const struct scheduler *s, struct sequence *q, uint32_t limit)
{
    uint32_t n = 0;
    while (n < limit) {
        const struct hash *key = sequence_key(q, n);
        if (seen_place(seen_places(s, key), key) == N_SEEN_PLACES)
            break;
        n++;
    }
    return n;
}

void recurrent_start(struct scheduler *s, struct sequence *q, uint32_t n_hit, uint32_t limit)
{
    q->last_due = limit * block_tokens(s);
    q->leaves_at = seen_blocks(s, q, limit) * block_tokens(s);
    q->passed_block = 0;
    if (!n_hit)
        return;
    const struct hash *key = sequence_key(q, n_hit - 1);
    int32_t bundle = block_manager_look(blocks_for(s, q), key, BUNDLE_GROUP), *table = recurrent_table(s, q->slot);
    if (bundle < 0) {
        block_manager_load(blocks_for(s, q), (uint32_t)-bundle, key, BUNDLE_GROUP, table);
        s->host_hits += config_of(s)->layout.n_groups ? 0 : n_hit * block_tokens(s); /* else hit_load counts blocks */
    } else {
        block_manager_share(blocks_for(s, q), bundle);
        block_manager_list_bundle(blocks_for(s, q), bundle, table);
    }
    block_manager_mark_temporary(blocks_for(s, q), table[0], false);
    page_tables_note(&s->tables, config_of(s)->layout.n_groups, q->slot, 0, s->n_state_pages);
}

void recurrent_fork(struct scheduler *s, const struct sequence *lead, struct sequence *q)
{
    const int32_t *source = recurrent_table(s, lead->slot);
    int32_t *target = recurrent_table(s, q->slot);
    for (uint32_t i = 0; i < s->n_state_pages; i++)
        target[i] = source[i];
    block_manager_share(blocks_for(s, q), target[0]);
    page_tables_note(&s->tables, config_of(s)->layout.n_groups, q->slot, 0, s->n_state_pages);
    q->last_due = lead->last_due;
    q->leaves_at = lead->leaves_at;
    q->passed_block = 0;
}

/* Position of the snapshot that a running prompt makes in this step; if it makes none, position of its next one. */
static uint32_t coming(const struct scheduler *s, const struct sequence *q)
{
    const struct block_manager *blocks = blocks_for(s, q);
    int32_t bundle = recurrent_table(s, q->slot)[0];
    bool is_made_now = q->n_rows && q->n_computed <= q->last_due && is_due(s, q) &&
                       !block_manager_is_writable(blocks, bundle) && !block_manager_is_settled(blocks, bundle);
    return is_made_now ? q->n_computed : next_due(s, q, q->n_computed);
}

bool recurrent_is_awaited(struct scheduler *s, struct sequence *q, uint32_t limit)
{
    for (uint32_t i = 0; limit && i < s->n_running; i++) {
        struct sequence *other = s->running[i];
        uint32_t n = coming(s, other) / block_tokens(s);
        if (other->pool != q->pool || n > limit || !hash_equal(sequence_key(other, n - 1), sequence_key(q, n - 1)))
            continue;
        int32_t there = block_manager_look(blocks_for(s, q), sequence_key(q, n - 1), BUNDLE_GROUP);
        if (!there || (there > 0 && !block_manager_is_settled(blocks_for(s, q), there)))
            return true;
    }
    return false;
}
