/* engine_save.c: saves the blocks of one prompt to the outer tier at once, so that another engine finds them. */
#include "tiers.h"

#define MOST_AT_ONCE 64u /* blocks of a round */

/* Calls visit for every group of blocks first .. end of the prompt. */
static void each_block(struct scheduler *s, const struct request *r, uint32_t first, uint32_t end,
                       void (*visit)(struct scheduler *s, const struct hash *key, uint32_t group))
{
    uint32_t n_groups = s->context->config->layout.n_groups;
    for (uint32_t b = first; b < end; b++) {
        for (uint32_t g = 0; g < n_groups; g++)
            visit(s, &r->prompt_keys[b], g);
        if (s->n_state_pages)
            visit(s, &r->prompt_keys[b], BUNDLE_GROUP);
    }
}

/* Copies a block to the host tier. */
static void store_block(struct scheduler *s, const struct hash *key, uint32_t group)
{
    block_manager_store_key(s->pools[0].blocks, key, group);
}

/* Saves a block, if the host tier has it. */
static void save_block(struct scheduler *s, const struct hash *key, uint32_t group)
{
    outer_tier_save(s->outer, key, group);
}

/* Number of leading blocks that the outer tier has: of every group without a window, or without attention their last
 * snapshot. */
static uint32_t count_saved(struct scheduler *s, const struct request *r, uint32_t n_blocks)
{
    const struct kv_layout *layout = &s->context->config->layout;
    uint32_t n = n_blocks;
    for (uint32_t g = 0; g < layout->n_groups; g++)
        for (uint32_t b = 0; b < n && !layout->groups[g].window; b++)
            if (!outer_tier_has(s->outer, &r->prompt_keys[b], g))
                n = b;
    while (s->n_state_pages && n && !outer_tier_has(s->outer, &r->prompt_keys[n - 1], BUNDLE_GROUP))
        n--;
    return n;
}

/* The blocks of a round are copied to the host tier while those of the round before are saved. Both are pinned there. */
static enum rc save_prompt(struct engine *e, const struct request *r, uint32_t *n_tokens, struct err *err)
{
    struct scheduler *s = &e->scheduler;
    uint32_t block_tokens = e->config.layout.block_tokens, n_blocks = r->spec.prompt.n / block_tokens,
             pages = e->config.layout.n_groups + s->n_state_pages,
             n = e->config.runner.n_host_slots / (4 * pages);
    n = n < 1 ? 1 : n < MOST_AT_ONCE ? n : MOST_AT_ONCE;
    for (uint32_t first = 0; first < n_blocks; first += n) {
        uint32_t end = n_blocks - first < n ? n_blocks : first + n;
        each_block(s, r, first, end, store_block);
        enum rc rc = tiers_await(e, err);
        if (rc)
            return rc;
        outer_tier_settle(s->outer);
        each_block(s, r, first, end, save_block);
    }
    outer_tier_settle(s->outer);
    *n_tokens = count_saved(s, r, n_blocks) * block_tokens;
    return RC_OK;
}

enum rc engine_save_prompt(struct engine *e, const struct request_spec *spec, uint32_t *n_tokens, struct err *err)
{
    struct request *r = NULL;
    enum rc rc = engine_claim(e, err);
    *n_tokens = 0;
    if (rc)
        return rc;
    rc = engine_refusal(e, err);
    if (!rc && !e->scheduler.outer)
        rc = err_set(err, RC_UNSUPPORTED, "prefill: there is no store that others read; set disk_cache or kv_connector");
    if (!rc)
        rc = engine_end_flights(e, err);
    if (!rc)
        rc = request_create(&e->context, spec, &r, err);
    if (!rc && !e->context.config->runner.takes_whole_prompts)
        rc = save_prompt(e, r, n_tokens, err);
    if (r)
        request_destroy(r);
    engine_publish_stats(e);
    engine_unclaim(e);
    return rc;
}
