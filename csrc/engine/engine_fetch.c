/* engine_fetch.c: copies the blocks of a prompt from the pool of one engine into that of another, from device to device. */
#define _GNU_SOURCE
#include "../base/mem.h"
#include "sequence_pages.h"
#include "tiers.h"

#include <string.h>
#include <time.h>

#define WAIT_S 30.0 /* most for the copies */
#define LOOK_NS 20000

struct fetch {
    struct engine *to, *from;
    struct request *have, *want;   /* the prompt with the keys of each engine */
    struct lent_pools pools;
    int32_t *taken, *source, *pages; /* [most blocks] pages taken so far; [n_state_pages] of a snapshot */
    uint32_t n_taken;
};

/* Whether a page of one engine means the same in the other. */
static bool fits(const struct engine *to, const struct engine *from)
{
    const struct kv_layout *a = &to->config.layout, *b = &from->config.layout;
    bool are_equal = a->n_groups == b->n_groups && a->page_bytes == b->page_bytes && a->block_tokens == b->block_tokens &&
                     a->n_state_pages == b->n_state_pages;
    for (uint32_t g = 0; g < a->n_groups && are_equal; g++)
        are_equal = a->groups[g].window == b->groups[g].window;
    return are_equal && !engine_epoch((struct engine *)to) && !engine_epoch((struct engine *)from);
}

/* The page of the source that has a block, or 0; none that a copy still fills. */
static int32_t source_page(const struct fetch *f, uint32_t block, uint32_t group)
{
    const struct scheduler *s = &f->from->scheduler;
    const struct hash *key = &f->have->prompt_keys[block];
    int32_t page = block_manager_find(s->blocks, key, group);
    bool is_filled = !page || !s->tier || host_tier_last_move(s->tier, page, MOVE_IN) <= s->loads_ended;
    return is_filled && !memcmp(key, &f->want->prompt_keys[block], sizeof *key) ? page : 0;
}

/* Number of leading blocks of which the source has all that has no window, and a snapshot at their end. */
static uint32_t count_blocks(const struct fetch *f)
{
    const struct kv_layout *layout = &f->from->config.layout;
    uint32_t n = f->have->spec.prompt.n / layout->block_tokens;
    for (uint32_t g = 0; g < layout->n_groups; g++)
        for (uint32_t b = 0; b < n && !layout->groups[g].window; b++)
            n = source_page(f, b, g) ? n : b;
    while (layout->n_state_pages && n && !source_page(f, n - 1, BUNDLE_GROUP))
        n--;
    return n;
}

/* Takes pages for a block, or for a snapshot, and orders their copies, unless they are there. False: there is no room. */
static bool fetch_block(struct fetch *f, uint32_t block, uint32_t group)
{
    struct scheduler *to = &f->to->scheduler;
    const struct hash *key = &f->want->prompt_keys[block];
    const uint32_t n = group == BUNDLE_GROUP ? to->n_state_pages : 1;
    f->source[0] = source_page(f, block, group);
    if (!f->source[0] || block_manager_find(to->blocks, key, group))
        return true;
    if (block_manager_n_free(to->blocks) < n || !host_tier_may_load(to->tier))
        return false;
    if (group == BUNDLE_GROUP)
        block_manager_list_bundle(f->from->scheduler.blocks, f->source[0], f->source);
    block_manager_take_to_fill(to->blocks, f->pages, group == BUNDLE_GROUP);
    block_manager_publish_filled(to->blocks, f->pages[0], key, group);
    for (uint32_t i = 0; i < n; i++)
        host_tier_receive(to->tier, f->pages[i], (uint32_t)f->source[i]);
    if (to->events && group != BUNDLE_GROUP)
        pages_note_stored(to, f->want->sequences[0], block, group);
    f->taken[f->n_taken++] = f->pages[0];
    return true;
}

/* Orders the copies of the leading blocks; their number. Pages stay taken until all have been ordered. */
static uint32_t fetch_blocks(struct fetch *f, uint32_t n)
{
    struct scheduler *to = &f->to->scheduler;
    const uint32_t n_groups = f->to->config.layout.n_groups;
    uint32_t n_fetched = 0;
    bool fits_in = !to->n_state_pages || !n || fetch_block(f, n - 1, BUNDLE_GROUP);
    for (; n_fetched < n && fits_in; n_fetched += fits_in)
        for (uint32_t g = 0; g < n_groups && fits_in; g++)
            fits_in = fetch_block(f, n_fetched, g);
    while (f->n_taken > 0)
        block_manager_release(to->blocks, f->taken[--f->n_taken]);
    return n_fetched;
}

/* Waits for the copies. The pages of the source may be reused behind it. */
static enum rc await(struct engine *e, struct err *err)
{
    const struct timespec pause = {.tv_nsec = LOOK_NS};
    const uint64_t last = host_tier_last(e->scheduler.tier, MOVE_IN);
    for (double waited = 0; waited < WAIT_S; waited += LOOK_NS * 1e-9) {
        enum rc rc = tiers_poll(e, err);
        if (rc || e->scheduler.loads_ended >= last)
            return rc;
        nanosleep(&pause, NULL);
    }
    return err_set(err, RC_DEVICE, "copies from another engine did not end within %.0f s", WAIT_S);
}

static enum rc fetch(struct fetch *f, uint32_t *n_tokens, struct err *err)
{
    struct engine *to = f->to, *from = f->from;
    const struct runner *lender = &from->config.runner, *reader = &to->config.runner;
    enum rc rc = from->scheduler.tier ? tiers_poll(from, err) : RC_OK;
    if (!rc)
        rc = lender->lend ? lender->lend(lender->ctx, reader->ctx, &f->pools, err) : RC_UNSUPPORTED;
    if (!rc)
        rc = tiers_flush(to, err);
    if (rc)
        return rc;
    *n_tokens = fetch_blocks(f, count_blocks(f)) * to->config.layout.block_tokens;
    rc = tiers_receive(to, &f->pools, err);
    if (!rc)
        rc = await(to, err);
    to->stats->fetched_tokens += rc ? 0 : *n_tokens;
    return rc ? engine_poison(to, rc, err, err) : RC_OK;
}

/* Both engines are claimed. */
static enum rc fetch_claimed(struct fetch *f, const struct request_spec *spec, uint32_t *n_tokens, struct err *err)
{
    const struct kv_layout *layout = &f->to->config.layout;
    const size_t n_most = (size_t)(spec->prompt.n / layout->block_tokens + 1) * (layout->n_groups + 1);
    enum rc rc = engine_refusal(f->from, err);
    if (!rc)
        rc = engine_refusal(f->to, err);
    if (!rc && !f->to->scheduler.tier)
        rc = err_set(err, RC_UNSUPPORTED, "fetch: wanted an engine with host_cache_bytes");
    if (rc || !fits(f->to, f->from))
        return rc;
    rc = engine_end_flights(f->from, err);
    if (!rc)
        rc = request_create(&f->from->context, spec, &f->have, err);
    if (!rc)
        rc = request_create(&f->to->context, spec, &f->want, err);
    f->taken = mem_calloc(n_most + 2 * ((size_t)layout->n_state_pages + 1), sizeof *f->taken);
    if (!rc && !f->taken)
        rc = err_set(err, RC_MEMORY, "fetch: out of memory");
    if (rc)
        return rc;
    f->source = f->taken + n_most;
    f->pages = f->source + layout->n_state_pages + 1;
    return fetch(f, n_tokens, err);
}

enum rc engine_fetch_prompt(struct engine *to, struct engine *from, const struct request_spec *spec, uint32_t *n_tokens,
                            struct err *err)
{
    struct fetch f = {.to = to, .from = from};
    *n_tokens = 0;
    enum rc rc = engine_claim(from, err);
    if (rc)
        return rc;
    rc = engine_claim(to, err);
    if (!rc) {
        rc = fetch_claimed(&f, spec, n_tokens, err);
        engine_publish_stats(to);
        engine_unclaim(to);
    }
    if (f.have)
        request_destroy(f.have);
    if (f.want)
        request_destroy(f.want);
    mem_free(f.taken);
    engine_publish_stats(from);
    engine_unclaim(from);
    return rc;
}
