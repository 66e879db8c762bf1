/* engine_look.c: what callers read of an engine without changing it. */
#define _GNU_SOURCE
#include "engine_state.h"

#include "../base/clock.h"
#include "request_check.h"

#include <string.h>

enum rc engine_fault(struct engine *e, struct err *err)
{
    if (!atomic_load(&e->is_dead))
        return e->config.runner.check ? e->config.runner.check(e->config.runner.ctx, err) : RC_OK;
    *err = e->fault;
    return e->fault.rc;
}

bool engine_has_unfinished(struct engine *e)
{
    return atomic_load(&e->n_live) > 0;
}

const struct runner *engine_runner(const struct engine *e)
{
    return &e->config.runner;
}

enum rc engine_check_prompt(const struct engine *e, const struct request_spec *spec, struct err *err)
{
    return request_check_prompt(&e->config, spec, err);
}

uint32_t engine_block_tokens(const struct engine *e)
{
    return e->config.layout.block_tokens;
}

uint32_t engine_kv_events(struct engine *e, uint64_t *next, struct kv_event *events, int32_t *ids, uint32_t max)
{
    return e->scheduler.events ? kv_events_read(e->scheduler.events, next, events, ids, max) : 0;
}

uint32_t engine_n_finished(struct engine *e)
{
    return e->outbox.n_finished;
}

void engine_stats(struct engine *e, struct engine_stats *stats)
{
    struct snapshot snapshot;
    statistics_read(e->statistics, &snapshot);
    *stats = snapshot.totals;
    stats->num_unfinished = atomic_load(&e->n_live);
    stats->num_waiting = stats->num_unfinished > stats->num_running ? stats->num_unfinished - stats->num_running : 0;
    stats->uptime_s = seconds_now() - e->created;
}

void engine_histograms(struct engine *e, struct histogram *histograms)
{
    struct snapshot snapshot;
    statistics_read(e->statistics, &snapshot);
    memcpy(histograms, snapshot.histograms, sizeof snapshot.histograms);
}

uint32_t engine_step_log(struct engine *e, struct step_record *steps, uint32_t max, uint64_t *first)
{
    return statistics_read_steps(e->statistics, steps, max, first);
}

enum rc engine_check(struct engine *e, struct err *err)
{
    enum rc rc = engine_claim(e, err);
    if (rc)
        return rc;
    rc = scheduler_check(&e->scheduler, err);
    uint64_t n_held = e->scheduler.n_running + e->scheduler.n_parked + e->scheduler.waiting.n + e->n_held,
             n_live = atomic_load(&e->n_live);
    if (!rc && !atomic_load(&e->has_commands) && n_held != n_live)
        rc = err_set(err, RC_INTERNAL, "invariant 16: %llu sequences held, %llu alive", (unsigned long long)n_held,
                     (unsigned long long)n_live);
    engine_unclaim(e);
    return rc;
}
