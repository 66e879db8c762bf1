/* engine_save.c: saves the blocks of one prompt to the outer tier, so that another engine finds them: while its later blocks
 * are computed, and the rest at once. */
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

/* ---- early ---- */

/* False for a page, or bundle, that this step computes: copies run before it. */
static bool is_settled(struct scheduler *s, const struct hash *key, uint32_t group)
{
    int32_t page = block_manager_find(s->pools[0].blocks, key, group);
    return !page || block_manager_is_settled(s->pools[0].blocks, page);
}

/* Copies the pages of a block to the host tier; false if this step computes one of them. */
static bool keep_early(struct scheduler *s, const struct request *r, uint32_t block)
{
    const struct hash *key = &r->prompt_keys[block];
    bool are_settled = !s->n_state_pages || is_settled(s, key, BUNDLE_GROUP);
    for (uint32_t g = 0; g < s->context->config->layout.n_groups; g++)
        are_settled &= is_settled(s, key, g);
    if (are_settled)
        each_block(s, r, block, block + 1, store_block);
    return are_settled;
}

/* Orders the saves of a block; false if its copies have not ended, or if too many saves wait. */
static bool save_soon(struct scheduler *s, const struct request *r, uint32_t block)
{
    const uint32_t n_groups = s->context->config->layout.n_groups;
    bool is_ordered = true;
    for (uint32_t g = 0; g < n_groups && is_ordered; g++)
        is_ordered = outer_tier_save_soon(s->outer, &r->prompt_keys[block], g);
    return is_ordered && (!s->n_state_pages || outer_tier_save_soon(s->outer, &r->prompt_keys[block], BUNDLE_GROUP));
}

/* At most a quarter of host memory holds blocks that have not been saved: others may make them leave. */
static void save_early(struct scheduler *s, struct sequence *q)
{
    const struct request *r = q->request;
    const struct engine_config *config = s->context->config;
    uint32_t n_done = (q->n_computed - q->n_rows) / config->layout.block_tokens,
             n_prompt = r->spec.prompt.n / config->layout.block_tokens,
             most = config->runner.n_host_slots / (4 * (config->layout.n_groups + s->n_state_pages));
    n_done = n_done < n_prompt ? n_done : n_prompt;
    while (q->n_saved_early < q->n_kept_early && save_soon(s, r, q->n_saved_early))
        q->n_saved_early++;
    while (q->n_kept_early < n_done && q->n_kept_early - q->n_saved_early < most && keep_early(s, r, q->n_kept_early))
        q->n_kept_early++;
}

void scheduler_save_early(struct scheduler *s)
{
    for (uint32_t i = 0; i < s->n_running; i++)
        if (s->running[i]->request->spec.saves_early && !s->running[i]->is_stale)
            save_early(s, s->running[i]);
}

/* ---- at once ---- */

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

/* ---- the other engine ---- */

void engine_end_wait(struct engine *e, uint64_t number)
{
    pthread_mutex_lock(&e->lock);
    for (struct request *r = e->map[number % N_BUCKETS]; r; r = r->map_next)
        if (r->number == number)
            atomic_store(&r->has_all_come, true);
    pthread_mutex_unlock(&e->lock);
}
