#define _GNU_SOURCE
#include "engine_fetch.h"

#include "../base/mem.h"
#include "sequence_pages.h"
#include "tiers.h"

#include <string.h>
#include <time.h>

#define WAIT_S 30.0 /* most for the copies */
#define LOOK_NS 20000

/* ---- lending ---- */

/* The page that has a block, or 0; none that a copy still fills. */
static int32_t page_of(const struct scheduler *s, const struct request *r, uint32_t block, uint32_t group)
{
    int32_t page = block_manager_find(s->pools[0].blocks, &r->prompt_keys[block], group);
    return page && s->tier && host_tier_last_move(s->tier, page, MOVE_IN) > s->loads_ended ? 0 : page;
}

/* Number of leading blocks of which the pool has all that has no window, and a snapshot at their end. */
static uint32_t count_blocks(const struct scheduler *s, const struct request *r)
{
    const struct kv_layout *layout = &s->context->config->layout;
    uint32_t n = r->spec.prompt.n / layout->block_tokens;
    for (uint32_t g = 0; g < layout->n_groups; g++)
        for (uint32_t b = 0; b < n && !layout->groups[g].window; b++)
            n = page_of(s, r, b, g) ? n : b;
    while (layout->n_state_pages && n && !page_of(s, r, n - 1, BUNDLE_GROUP))
        n--;
    return n;
}

static enum rc list_pages(struct engine *from, const struct request *r, struct lent_prompt *lent, struct err *err)
{
    const struct scheduler *s = &from->scheduler;
    const uint32_t n_groups = from->config.layout.n_groups, n = count_blocks(s, r);
    lent->n_blocks = n;
    lent->n_pages = n ? s->n_state_pages + n * n_groups : 0;
    lent->pages = mem_calloc((size_t)lent->n_pages + 1, sizeof *lent->pages);
    if (!lent->pages)
        return err_set(err, RC_MEMORY, "lend: out of memory");
    if (n)
        lent->last_key = r->prompt_keys[n - 1];
    if (n && s->n_state_pages)
        block_manager_list_bundle(s->pools[0].blocks, page_of(s, r, n - 1, BUNDLE_GROUP), lent->pages);
    for (uint32_t b = 0; b < n; b++)
        for (uint32_t g = 0; g < n_groups; g++)
            lent->pages[s->n_state_pages + b * n_groups + g] = page_of(s, r, b, g);
    return RC_OK;
}

enum rc engine_lend_prompt(struct engine *from, const struct request_spec *spec, struct lent_prompt *lent, struct err *err)
{
    struct request *r = NULL;
    *lent = (struct lent_prompt){0};
    enum rc rc = engine_claim(from, err);
    if (rc)
        return rc;
    rc = engine_refusal(from, err);
    if (!rc && engine_epoch(from))
        rc = err_set(err, RC_UNSUPPORTED, "lend: wanted the weights that were loaded, have an update of them");
    if (!rc)
        rc = engine_end_flights(from, err);
    if (!rc && from->scheduler.tier)
        rc = tiers_poll(from, err);
    if (!rc)
        rc = request_create(&from->context, spec, &r, err);
    if (!rc)
        rc = list_pages(from, r, lent, err);
    if (r)
        request_destroy(r);
    if (rc)
        engine_end_lending(from, lent);
    return rc;
}

void engine_end_lending(struct engine *from, struct lent_prompt *lent)
{
    mem_free(lent->pages);
    lent->pages = NULL;
    engine_publish_stats(from);
    engine_unclaim(from);
}

enum rc engine_reach_pools(struct engine *to, struct engine *from, struct lent_pools *pools, struct err *err)
{
    const struct runner *lender = &from->config.runner;
    if (!lender->lend)
        return err_set(err, RC_UNSUPPORTED, "lend: the engine's pool cannot be read");
    return lender->lend(lender->ctx, to->config.runner.ctx, pools, err);
}

/* ---- taking ---- */

struct taking {
    struct scheduler *to;
    struct request *want;
    int32_t *taken, *pages;        /* [1 + blocks * groups] pages taken so far; [n_state_pages] of a snapshot */
    uint32_t n_taken;
};

/* Takes pages for a block, or for a snapshot, and orders their copies, unless they are there. False: there is no room. */
static bool take_block(struct taking *t, uint32_t block, uint32_t group, const int32_t *source)
{
    struct scheduler *s = t->to;
    const struct hash *key = &t->want->prompt_keys[block];
    const uint32_t n = group == BUNDLE_GROUP ? s->n_state_pages : 1;
    if (!*source || block_manager_find(s->pools[0].blocks, key, group))
        return true;
    if (block_manager_n_free(s->pools[0].blocks) < n || !host_tier_may_load(s->tier))
        return false;
    block_manager_take_to_fill(s->pools[0].blocks, t->pages, group == BUNDLE_GROUP);
    block_manager_publish_filled(s->pools[0].blocks, t->pages[0], key, group);
    for (uint32_t i = 0; i < n; i++)
        host_tier_receive(s->tier, t->pages[i], (uint32_t)source[i]);
    if (s->events && group != BUNDLE_GROUP)
        pages_note_stored(s, t->want->sequences[0], block, group);
    t->taken[t->n_taken++] = t->pages[0];
    return true;
}

/* Orders the copies; the number of leading blocks. Pages stay taken until all have been ordered. */
static uint32_t take_blocks(struct taking *t, const struct lent_prompt *lent)
{
    struct scheduler *s = t->to;
    const uint32_t n_groups = s->context->config->layout.n_groups;
    const int32_t *source = lent->pages + s->n_state_pages;
    uint32_t n = 0;
    bool fits = !s->n_state_pages || take_block(t, lent->n_blocks - 1, BUNDLE_GROUP, lent->pages);
    for (; n < lent->n_blocks && fits; n += fits)
        for (uint32_t g = 0; g < n_groups && fits; g++)
            fits = take_block(t, n, g, source++);
    for (uint32_t i = t->n_taken; i-- > 0;)
        block_manager_release(s->pools[0].blocks, t->taken[i]);
    return n;
}

/* Keeps what has come only if the owner still has what was copied. */
static enum rc confirm(const struct taking *t, const struct lent_prompt *lent, struct err *err)
{
    if (!lent->is_held || lent->is_held(lent->ctx))
        return RC_OK;
    for (uint32_t i = t->n_taken; i-- > 0;)
        block_manager_withdraw(t->to->pools[0].blocks, t->taken[i]);
    return err_set(err, RC_IO, "lend: the other process does not answer");
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

/* Whether the keys are the same, and the pages are those of this layout. */
static bool fits(const struct engine *to, const struct request *want, const struct lent_prompt *lent)
{
    const struct kv_layout *layout = &to->config.layout;
    const uint32_t n = lent->n_blocks;
    return n && n <= want->spec.prompt.n / layout->block_tokens &&
           lent->n_pages == layout->n_state_pages + (uint64_t)n * layout->n_groups &&
           !memcmp(&want->prompt_keys[n - 1], &lent->last_key, sizeof lent->last_key);
}

static enum rc take(struct engine *to, struct request *want, const struct lent_prompt *lent, uint32_t *n_tokens,
                    struct err *err)
{
    struct taking t = {.to = &to->scheduler, .want = want};
    if (!fits(to, want, lent))
        return RC_OK;
    t.taken = mem_calloc(2 * (size_t)lent->n_pages + 2, sizeof *t.taken);
    if (!t.taken)
        return err_set(err, RC_MEMORY, "fetch: out of memory");
    t.pages = t.taken + lent->n_pages + 1;
    enum rc rc = tiers_flush(to, err);
    if (!rc) {
        *n_tokens = take_blocks(&t, lent) * to->config.layout.block_tokens;
        rc = tiers_receive(to, &lent->pools, err);
    }
    if (!rc)
        rc = await(to, err);
    if (rc)
        rc = engine_poison(to, rc, err, err);
    else
        rc = confirm(&t, lent, err);
    mem_free(t.taken);
    *n_tokens = rc ? 0 : *n_tokens;
    to->stats->fetched_tokens += *n_tokens;
    return rc;
}

enum rc engine_take_prompt(struct engine *to, const struct request_spec *spec, const struct lent_prompt *lent,
                           uint32_t *n_tokens, struct err *err)
{
    struct request *want = NULL;
    *n_tokens = 0;
    enum rc rc = engine_claim(to, err);
    if (rc)
        return rc;
    rc = engine_refusal(to, err);
    if (!rc && (!to->scheduler.tier || engine_epoch(to)))
        rc = err_set(err, RC_UNSUPPORTED, "fetch: wanted an engine with host_cache_bytes and the weights that were loaded");
    if (!rc)
        rc = request_create(&to->context, spec, &want, err);
    if (!rc)
        rc = take(to, want, lent, n_tokens, err);
    if (want)
        request_destroy(want);
    engine_publish_stats(to);
    engine_unclaim(to);
    return rc;
}
