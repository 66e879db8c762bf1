#include "tiers.h"

enum rc tiers_poll(struct engine *e, struct err *err)
{
    const struct runner *runner = &e->config.runner;
    const struct host_tier *tier = e->scheduler.tier;
    struct move_state state;
    enum rc rc = runner->poll_moves(runner->ctx, &state, err);
    if (rc)
        return rc;
    e->scheduler.loads_ended = state.ended[MOVE_IN];
    e->stats->host_blocks_total = runner->n_host_slots;
    e->stats->host_blocks_cached = host_tier_n_findable(tier);
    e->stats->host_blocks_swapped = host_tier_n_swapped(tier);
    e->stats->host_cache_hits = e->scheduler.host_hits;
    e->stats->host_stored_bytes = state.bytes[MOVE_OUT];
    e->stats->host_loaded_bytes = state.bytes[MOVE_IN];
    e->stats->host_store_s = state.seconds[MOVE_OUT];
    e->stats->host_load_s = state.seconds[MOVE_IN];
    return RC_OK;
}

enum rc tiers_flush(struct engine *e, struct err *err)
{
    const struct runner *runner = &e->config.runner;
    struct move_args args = {0};
    return host_tier_flush(e->scheduler.tier, &args) ? runner->move(runner->ctx, &args, err) : RC_OK;
}

enum rc tiers_settle(struct engine *e, bool stores, struct err *err)
{
    if (stores)
        block_manager_store_all(e->scheduler.blocks);
    for (uint32_t way = MOVE_OUT; way <= MOVE_IN; way++)
        host_tier_await_number(e->scheduler.tier, UINT64_MAX, way);
    return tiers_flush(e, err);
}
