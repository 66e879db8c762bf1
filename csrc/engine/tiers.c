#define _GNU_SOURCE
#include "tiers.h"

#include <time.h>

/* A step of few rows takes as long as one of more: it says nothing of the time of a row. A step of RATE_WEIGHT rows weighs as
 * much as all steps before it, and so do moves of RATE_WEIGHT pages. */
#define RATE_ROWS 32
#define RATE_WEIGHT 512.0
#define SEEK_WAIT_S 0.002 /* an engine that waits for the outer tier alone looks at its commands this often */
#define CLOSE_WAIT_S 30.0 /* most for the last copies to host memory */
#define CLOSE_LOOK_NS 100000

/* Takes up that n more have taken so many seconds each. */
static void observe(double *rate, double n, double seconds)
{
    *rate += (*rate > 0 ? n / (n + RATE_WEIGHT) : 1) * (seconds - *rate);
}

/* Takes up the time of pages that were moved since the last call, by the totals then and now. */
static void observe_pages(const struct engine *e, double *page_s, uint64_t bytes, double seconds, uint64_t bytes_before,
                          double seconds_before)
{
    double n = (double)(bytes - bytes_before) / (double)e->config.runner.host_slot_bytes;
    if (n > 0)
        observe(page_s, n, (seconds - seconds_before) / n);
}

static void poll_outer(struct engine *e)
{
    struct scheduler *s = &e->scheduler;
    struct engine_stats *stats = e->stats;
    struct outer_stats outer;
    if (s->n_seeking && e->n_started == e->n_ended && !s->n_running)
        outer_tier_wait(s->outer, SEEK_WAIT_S);
    outer_tier_poll(s->outer);
    outer_tier_stats(s->outer, &outer);
    observe_pages(e, &s->page_load_s, outer.loaded_bytes, outer.load_s, stats->disk_loaded_bytes, stats->disk_load_s);
    stats->disk_blocks_cached = outer.connector.n_blocks;
    stats->disk_bytes = outer.connector.n_bytes;
    stats->disk_bad_files = outer.connector.n_bad;
    stats->disk_errors = outer.connector.n_errors;
    stats->disk_evictions = outer.connector.n_evicted;
    stats->disk_cache_queries = s->outer_queries;
    stats->disk_cache_hits = s->outer_hits;
    stats->disk_misses = outer.n_missed;
    stats->disk_stored_bytes = outer.saved_bytes;
    stats->disk_loaded_bytes = outer.loaded_bytes;
    stats->disk_store_s = outer.save_s;
    stats->disk_load_s = outer.load_s;
    stats->disk_queued_blocks = (uint64_t)outer.n_loading + outer.n_saving;
}

enum rc tiers_poll(struct engine *e, struct err *err)
{
    const struct runner *runner = &e->config.runner;
    struct host_tier *tier = e->scheduler.tier;
    struct move_state state;
    enum rc rc = runner->poll_moves(runner->ctx, &state, err);
    if (rc)
        return rc;
    e->scheduler.loads_ended = state.ended[MOVE_IN];
    host_tier_note_ended(tier, state.ended);
    if (e->scheduler.outer)
        poll_outer(e);
    observe_pages(e, &e->scheduler.page_move_s[MOVE_OUT], state.bytes[MOVE_OUT], state.seconds[MOVE_OUT],
                  e->stats->host_stored_bytes, e->stats->host_store_s);
    observe_pages(e, &e->scheduler.page_move_s[MOVE_IN], state.bytes[MOVE_IN], state.seconds[MOVE_IN],
                  e->stats->host_loaded_bytes, e->stats->host_load_s);
    e->stats->skipped_loads = e->scheduler.n_skipped_loads;
    e->stats->skipped_load_tokens = e->scheduler.n_skipped_tokens;
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
    uint64_t ordered = host_tier_n_ordered(tier) * runner->host_slot_bytes;
    uint64_t moved = state.bytes[MOVE_OUT] + state.bytes[MOVE_IN] + state.source_bytes;
    e->stats->fetched_bytes = state.source_bytes;
    e->stats->fetch_s = state.source_seconds;
    e->stats->host_queued_bytes = host_tier_is_settled(tier) || ordered < moved ? 0 : ordered - moved;
    return RC_OK;
}

void tiers_observe(struct engine *e, const struct step_record *record)
{
    if (record->n_rows < RATE_ROWS || 2 * (record->n_prompt + record->n_redone) < record->n_rows)
        return;
    observe(&e->scheduler.row_s, record->n_rows, record->device_us * 1e-6 / record->n_rows);
}

enum rc tiers_flush(struct engine *e, struct err *err)
{
    const struct runner *runner = &e->config.runner;
    struct move_args args = {0};
    return host_tier_flush(e->scheduler.tier, &args) ? runner->move(runner->ctx, &args, err) : RC_OK;
}

enum rc tiers_receive(struct engine *e, const struct lent_pools *pools, struct err *err)
{
    const struct runner *runner = &e->config.runner;
    struct move_args args = {.source = pools};
    return host_tier_flush(e->scheduler.tier, &args) ? runner->move(runner->ctx, &args, err) : RC_OK;
}

/* Waits until all moves have ended; false if that takes too long. */
static bool moves_end(struct engine *e)
{
    const struct timespec pause = {.tv_nsec = CLOSE_LOOK_NS};
    for (double waited = 0; waited < CLOSE_WAIT_S; waited += CLOSE_LOOK_NS * 1e-9) {
        if (tiers_poll(e, NULL))
            return false;
        if (host_tier_is_settled(e->scheduler.tier))
            return true;
        nanosleep(&pause, NULL);
    }
    return false;
}

enum rc tiers_await(struct engine *e, struct err *err)
{
    enum rc rc = tiers_flush(e, err);
    if (!rc && !moves_end(e))
        rc = err_set(err, RC_DEVICE, "copies to host memory did not end within %.0f s", CLOSE_WAIT_S);
    return rc;
}

void tiers_close(struct engine *e)
{
    struct scheduler *s = &e->scheduler;
    if (!e->stats || !s->outer || !outer_tier_is_lasting(s->outer) || atomic_load(&e->is_dead) || engine_holds(e))
        return;
    if (e->wants_reset) /* no step has come since */
        scheduler_reset_cache(s, false);
    for (uint32_t round = 0; round < 2; round++) { /* what the host tier has may have to make room for what the pool has */
        if (round)
            block_manager_store_all(s->pools[0].blocks);
        if (tiers_await(e, NULL))
            return;
        outer_tier_save_all(s->outer);
    }
}

enum rc tiers_settle(struct engine *e, bool stores, struct err *err)
{
    if (stores) {
        scheduler_leave_pages(&e->scheduler);
        block_manager_store_all(e->scheduler.pools[0].blocks);
    }
    for (uint32_t way = MOVE_OUT; way <= MOVE_IN; way++)
        host_tier_await_number(e->scheduler.tier, UINT64_MAX, way);
    return tiers_flush(e, err);
}
