#include "tiers.h"

/* A step of few rows takes as long as one of more: it says nothing of the time of a row. A step of RATE_WEIGHT rows weighs as
 * much as all steps before it. */
#define RATE_ROWS 32
#define RATE_WEIGHT 512.0

enum rc tiers_poll(struct engine *e, struct err *err)
{
    const struct runner *runner = &e->config.runner;
    const struct host_tier *tier = e->scheduler.tier;
    struct move_state state;
    enum rc rc = runner->poll_moves(runner->ctx, &state, err);
    if (rc)
        return rc;
    e->scheduler.loads_ended = state.ended[MOVE_IN];
    for (uint32_t way = MOVE_OUT; way <= MOVE_IN; way++)
        if (state.bytes[way])
            e->scheduler.page_move_s[way] = state.seconds[way] / (double)state.bytes[way] * (double)e->config.layout.page_bytes;
    e->stats->num_swaps = e->scheduler.n_swaps;
    e->stats->blocks_swapped_out = e->scheduler.n_pages_swapped_out;
    e->stats->blocks_swapped_in = e->scheduler.n_pages_swapped_in;
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

void tiers_observe(struct engine *e, const struct step_record *record)
{
    double *row_s = &e->scheduler.row_s, seconds = record->device_us * 1e-6 / record->n_rows;
    if (record->n_rows < RATE_ROWS || 2 * (record->n_prompt + record->n_redone) < record->n_rows)
        return;
    *row_s += (*row_s > 0 ? record->n_rows / (record->n_rows + RATE_WEIGHT) : 1) * (seconds - *row_s);
}

enum rc tiers_flush(struct engine *e, struct err *err)
{
    const struct runner *runner = &e->config.runner;
    struct move_args args = {0};
    return host_tier_flush(e->scheduler.tier, &args) ? runner->move(runner->ctx, &args, err) : RC_OK;
}

enum rc tiers_settle(struct engine *e, bool stores, struct err *err)
{
    if (stores) {
        scheduler_leave_pages(&e->scheduler);
        block_manager_store_all(e->scheduler.blocks);
    }
    for (uint32_t way = MOVE_OUT; way <= MOVE_IN; way++)
        host_tier_await_number(e->scheduler.tier, UINT64_MAX, way);
    return tiers_flush(e, err);
}
