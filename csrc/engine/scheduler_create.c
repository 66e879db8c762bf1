/* scheduler_create.c: allocates and frees the scheduler's parts. */
#include "scheduler.h"

#include "../base/mem.h"
#include "../step/kv_layout.h"

uint32_t scheduler_max_copies(const struct engine_config *config)
{
    return config->max_num_seqs * (config->layout.n_groups + config->layout.n_state_pages);
}

enum rc scheduler_create_batch(const struct scheduler *s, size_t n_top, struct batch *batch, struct err *err)
{
    const struct engine_config *config = s->context->config;
    const struct runner *runner = &config->runner;
    enum rc rc = batch_create(batch, &s->tables, config->max_num_batched_tokens, n_top, scheduler_max_copies(config), err);
    if (!rc && s->n_pools > 1)
        rc = batch_add_parts(batch, s->n_pools, err);
    return rc || !runner->n_features ? rc : batch_add_tower(batch, runner->n_axes, runner->n_features, err);
}

static enum rc outer_create(struct scheduler *s, const struct engine_config *config, struct err *err)
{
    const struct runner *runner = &config->runner;
    const struct kv_layout *layout = &config->layout;
    struct connector connector = config->connector ? *config->connector : (struct connector){0};
    enum rc rc = RC_OK;
    if (!s->tier) {
        err_set(err, RC_CONFIG, "disk_cache and kv_connector want host_cache_bytes above 0, got 0.");
        err_name(err, "host_cache_bytes", NULL);
        rc = RC_CONFIG;
    }
    if (rc && config->connector)
        connector.close(connector.ctx);
    if (!rc && config->disk)
        rc = disk_cache_open(config->disk, runner->host_slot_bytes, layout->n_state_pages, layout->block_tokens, &connector,
                             err);
    if (!rc && config->library)
        rc = connector_library_open(config->library, runner->host_slot_bytes, layout->n_state_pages, layout->block_tokens,
                                    &connector, err);
    return rc ? rc : outer_tier_create(&connector, s->tier, runner->host_slots, runner->host_slot_bytes, layout->n_state_pages,
                                       layout->n_groups, &s->outer, err);
}

enum rc scheduler_create(struct scheduler *s, const struct sequence_context *context, struct statistics *statistics,
                         struct err *err)
{
    const struct engine_config *config = context->config;
    const struct kv_layout *layout = &config->layout;
    uint32_t n_slots = config->max_num_seqs;
    *s = (struct scheduler){.context = context, .statistics = statistics, .n_state_pages = layout->n_state_pages};
    s->running = mem_calloc(n_slots, sizeof *s->running);
    s->slots = mem_calloc(n_slots, sizeof *s->slots);
    s->copy_owners = mem_calloc(scheduler_max_copies(config), sizeof *s->copy_owners);
    s->seen_keys = layout->n_state_pages ? mem_calloc(N_SEEN_KEYS, sizeof *s->seen_keys) : NULL;
    s->n_pools = config->runner.n_pools ? config->runner.n_pools : 1;
    s->pools = mem_calloc(s->n_pools, sizeof *s->pools);
    s->scratch = mem_calloc((size_t)s->n_pools * config->n_pages * 2, sizeof *s->scratch);
    enum rc rc = page_tables_create(&s->tables, kv_layout_n_tables(layout), n_slots,
                                    kv_layout_stride(layout, config->max_model_len), err);
    for (uint32_t i = 0; i < s->n_pools && s->pools && !rc; i++)
        rc = block_manager_create(config->n_pages, layout->n_state_pages, &s->pools[i].blocks, err);
    if (!rc && config->runner.n_host_slots)
        rc = host_tier_create(config->runner.n_host_slots, config->n_pages, layout->n_state_pages, &s->tier, err);
    if (!rc && (config->disk || config->library || config->connector))
        rc = outer_create(s, config, err);
    if (!rc && config->n_kv_events)
        rc = kv_events_create(config->n_kv_events, layout->block_tokens, &s->events, err);
    if (!rc)
        rc = adapter_slots_create(&s->adapters, config->runner.adapters, err);
    if (!rc && config->runner.n_features)
        rc = features_create(&config->runner, &s->features, err);
    if (!rc && s->tier)
        host_tier_tell(s->tier, s->events, layout->n_groups);
    for (uint32_t i = 0; i < s->n_pools && s->pools && !rc; i++) {
        block_manager_tell(s->pools[i].blocks, s->events, i);
        block_manager_add_tier(s->pools[i].blocks, s->tier);
    }
    s->n_store_ahead = layout->n_groups * (config->max_num_batched_tokens / layout->block_tokens + 1) + layout->n_state_pages;
    bool has_keys = s->seen_keys || !layout->n_state_pages;
    if (!rc && (!s->running || !s->slots || !s->copy_owners || !s->pools || !s->scratch || !has_keys))
        rc = err_set(err, RC_MEMORY, "scheduler: out of memory for %u slots; lower max_num_seqs", n_slots);
    if (rc)
        scheduler_destroy(s);
    return rc;
}

void scheduler_destroy(struct scheduler *s)
{
    outer_tier_destroy(s->outer);
    for (uint32_t i = 0; s->pools && i < s->n_pools; i++)
        block_manager_destroy(s->pools[i].blocks);
    host_tier_destroy(s->tier);
    adapter_slots_destroy(&s->adapters);
    features_destroy(s->features);
    kv_events_destroy(s->events);
    page_tables_destroy(&s->tables);
    mem_free(s->pools);
    mem_free(s->running);
    mem_free(s->slots);
    mem_free(s->copy_owners);
    mem_free(s->seen_keys);
    mem_free(s->scratch);
    *s = (struct scheduler){0};
}
