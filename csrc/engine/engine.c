#define _GNU_SOURCE
#include "engine.h"

#include "../base/mem.h"
#include "engine_config.h"
#include "outbox.h"
#include "sampler.h"

#include <pthread.h>
#include <string.h>
#include <time.h>

#define N_BUCKETS 4096u

_Static_assert(FINISH_ERROR + 1 == N_FINISHES, "every way to finish is counted");

struct engine {
    struct engine_config config;
    struct sequence_context context;
    struct scheduler scheduler;
    struct batch batch;
    struct task_owner *owners;     /* [max_tasks] */
    struct outbox outbox;
    struct statistics *statistics;
    struct engine_stats *stats;    /* the totals in there, which the driver changes */
    bool is_warm;
    double created;
    struct request *held;          /* behind the gate, in their order */
    uint64_t n_held;               /* their sequences */

    pthread_mutex_t lock;          /* guards what follows, up to the blank line; never held longer than O(1) */
    struct request *inbox_first, *inbox_last;
    struct request *map[N_BUCKETS]; /* every request not yet released, by number */
    uint64_t last_number, abort_upto;
    uint64_t gate;                  /* requests behind this number may not enter yet */
    bool wants_reset, wants_recompute, wants_abort;

    atomic_bool has_commands, is_busy, is_dead;
    atomic_uint_least64_t n_live;  /* sequences that are not finished */
    struct err fault;              /* what poisoned the engine; constant once is_dead is set */
};

static double seconds_now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static enum rc claim(struct engine *e, struct err *err)
{
    if (atomic_exchange(&e->is_busy, true))
        return err_set(err, RC_BUSY, "engine is in use by another thread");
    return RC_OK;
}

static void unclaim(struct engine *e)
{
    atomic_store(&e->is_busy, false);
}

static enum rc dead(struct engine *e, struct err *err)
{
    if (err) {
        *err = e->fault;
        err->rc = RC_DEAD;
    }
    return RC_DEAD;
}

/* ---- life ---- */

static void publish_stats(struct engine *e)
{
    struct engine_stats *stats = e->stats;
    stats->num_running = e->scheduler.n_running;
    stats->num_preemptions = e->scheduler.n_preemptions;
    stats->prompt_tokens = e->scheduler.prompt_tokens;
    stats->cached_tokens = e->scheduler.cached_tokens;
    stats->prefix_cache_queries = e->scheduler.cache_queries;
    stats->prefix_cache_hits = e->scheduler.cache_hits;
    stats->prompt_rows = e->scheduler.n_prompt_rows;
    stats->decode_rows = e->scheduler.n_decode_rows;
    stats->redone_rows = e->scheduler.n_redone_rows;
    stats->kv_blocks_free = block_manager_n_free(e->scheduler.blocks);
    stats->kv_blocks_cached = block_manager_n_cached(e->scheduler.blocks);
    stats->evictions = block_manager_n_evictions(e->scheduler.blocks);
    statistics_publish(e->statistics);
}

enum rc engine_create(const struct engine_config *config, struct engine **result, struct err *err)
{
    struct engine *e = mem_calloc(1, sizeof *e);
    if (!e)
        return err_set(err, RC_MEMORY, "engine: out of memory");
    pthread_mutex_init(&e->lock, NULL);
    e->created = seconds_now();
    e->gate = UINT64_MAX;
    enum rc rc = statistics_create(&e->statistics, err);
    if (!rc)
        rc = engine_config_copy(config, &e->config, &e->context, err);
    if (!rc) {
        uint32_t block_tokens = config->layout.block_tokens, stride = (config->max_model_len + block_tokens - 1) / block_tokens;
        rc = batch_create(&e->batch, config->layout.n_groups, config->max_num_batched_tokens, config->max_num_seqs, stride,
                          config->max_logprobs, err);
    }
    if (!rc) {
        e->batch.vocab_limit = e->config.vocab_limit;
        e->batch.banned = e->config.banned_ids;
        e->batch.n_banned = e->config.n_banned;
        rc = scheduler_create(&e->scheduler, &e->context, &e->batch, e->statistics, err);
    }
    if (!rc && !(e->owners = mem_calloc(e->batch.max_tasks, sizeof *e->owners)))
        rc = err_set(err, RC_MEMORY, "engine: out of memory for %u tasks", e->batch.max_tasks);
    if (rc) {
        engine_destroy(e);
        return rc;
    }
    e->stats = statistics_totals(e->statistics);
    e->stats->kv_blocks_total = config->n_pages - 1;
    publish_stats(e);
    *result = e;
    return RC_OK;
}

void engine_destroy(struct engine *e)
{
    if (!e)
        return;
    for (uint32_t b = 0; b < N_BUCKETS; b++)
        for (struct request *r = e->map[b], *next; r; r = next) {
            next = r->map_next;
            request_destroy(r);
        }
    scheduler_destroy(&e->scheduler);
    batch_destroy(&e->batch);
    mem_free(e->owners);
    engine_config_free(&e->config, &e->context);
    statistics_destroy(e->statistics);
    pthread_mutex_destroy(&e->lock);
    mem_free(e);
}

/* ---- commands from any thread ---- */

enum rc engine_submit(struct engine *e, const struct request_spec *spec, uint64_t *number, struct err *err)
{
    struct request *r;
    if (atomic_load(&e->is_dead))
        return dead(e, err);
    enum rc rc = request_create(&e->context, spec, &r, err);
    if (rc)
        return rc;
    r->queued = seconds_now();
    pthread_mutex_lock(&e->lock);
    *number = r->number = ++e->last_number;
    struct request **bucket = &e->map[r->number % N_BUCKETS];
    r->map_next = *bucket;
    *bucket = r;
    if (e->inbox_first)
        e->inbox_last->next = r;
    else
        e->inbox_first = r;
    e->inbox_last = r;
    atomic_fetch_add(&e->n_live, spec->n);
    atomic_store(&e->has_commands, true);
    pthread_mutex_unlock(&e->lock);
    return RC_OK;
}

static void abort_one(struct engine *e, uint64_t number)
{
    pthread_mutex_lock(&e->lock);
    for (struct request *r = e->map[number % N_BUCKETS]; r; r = r->map_next)
        if (r->number == number)
            atomic_store(&r->is_aborted, true);
    e->wants_abort = true;
    atomic_store(&e->has_commands, true);
    pthread_mutex_unlock(&e->lock);
}

enum rc engine_abort(struct engine *e, const uint64_t *numbers, uint32_t n, struct err *err)
{
    (void)err;
    for (uint32_t i = 0; numbers && i < n; i++)
        abort_one(e, numbers[i]);
    if (!numbers) {
        pthread_mutex_lock(&e->lock);
        e->abort_upto = e->last_number;
        e->wants_abort = true;
        atomic_store(&e->has_commands, true);
        pthread_mutex_unlock(&e->lock);
    }
    return RC_OK;
}

void engine_hold_new(struct engine *e, bool holds)
{
    pthread_mutex_lock(&e->lock);
    e->gate = holds ? e->last_number : UINT64_MAX;
    atomic_store(&e->has_commands, true);
    pthread_mutex_unlock(&e->lock);
}

enum rc engine_reset_prefix_cache(struct engine *e, bool recompute_running, struct err *err)
{
    if (atomic_load(&e->is_dead))
        return dead(e, err);
    pthread_mutex_lock(&e->lock);
    e->wants_reset = true;
    e->wants_recompute |= recompute_running;
    atomic_store(&e->has_commands, true);
    pthread_mutex_unlock(&e->lock);
    return RC_OK;
}

/* ---- the driver ---- */

static void count_finish(struct engine *e, const struct sequence *q, enum finish how)
{
    uint32_t n_new = q->n_output - q->request->spec.prior.n;
    e->stats->finished[how]++;
    statistics_observe(e->statistics, HISTOGRAM_OUTPUT_TOKENS, n_new);
    statistics_observe(e->statistics, HISTOGRAM_END_TO_END, seconds_now() - q->request->queued);
    if (n_new > 1)
        statistics_observe(e->statistics, HISTOGRAM_PER_TOKEN, (q->last_token - q->first_token) / (n_new - 1));
}

static void finish(struct engine *e, struct sequence *q, enum finish how)
{
    count_finish(e, q, how);
    q->finish = how;
    scheduler_remove(&e->scheduler, q);
    outbox_finish(&e->outbox, q);
    atomic_fetch_sub(&e->n_live, 1);
}

static bool is_aborted(const struct sequence *q, uint64_t upto)
{
    return q->request->number <= upto || atomic_load(&q->request->is_aborted);
}

/* Ends all sequences that are aborted; all there are, with an upto of UINT64_MAX. */
static void finish_aborted(struct engine *e, uint64_t upto, enum finish how)
{
    for (uint32_t i = 0; i < e->scheduler.n_running;)
        if (is_aborted(e->scheduler.running[i], upto))
            finish(e, e->scheduler.running[i], how); /* which moves the next one here */
        else
            i++;
    for (struct sequence *q = queue_first(&e->scheduler.waiting), *next; q; q = next) {
        next = queue_next(q);
        if (is_aborted(q, upto))
            finish(e, q, how);
    }
}

static void enter(struct engine *e, struct request *r)
{
    for (uint32_t i = 0; i < r->spec.n; i++) {
        struct sequence *q = r->sequences[i];
        enum finish already = q->finish;
        scheduler_add(&e->scheduler, q);
        if (already != FINISH_NONE) /* its prior output satisfies a stop rule */
            finish(e, q, already);
    }
}

/* Takes in what has arrived, in its order. Behind the gate only what ends at once enters. */
static void enter_all(struct engine *e, struct request *arrived, uint64_t gate, uint64_t abort_upto)
{
    struct request **place = &e->held, *r;
    while (*place)
        place = &(*place)->next;
    *place = arrived;
    for (r = arrived; r; r = r->next)
        e->n_held += r->spec.n;
    for (place = &e->held; (r = *place);) {
        if (r->number > gate && r->number > abort_upto && !atomic_load(&r->is_aborted)) {
            place = &r->next;
        } else {
            *place = r->next;
            e->n_held -= r->spec.n;
            enter(e, r);
        }
    }
}

/* Acts on everything that came since the last step boundary; false if nothing did. */
static bool take_commands(struct engine *e)
{
    if (!atomic_exchange(&e->has_commands, false))
        return false;
    pthread_mutex_lock(&e->lock);
    struct request *r = e->inbox_first;
    uint64_t upto = e->abort_upto, gate = e->gate;
    bool reset = e->wants_reset, recompute = e->wants_recompute, aborts = e->wants_abort;
    e->inbox_first = e->inbox_last = NULL;
    e->abort_upto = 0;
    e->wants_reset = e->wants_recompute = e->wants_abort = false;
    pthread_mutex_unlock(&e->lock);
    bool is_dead = atomic_load(&e->is_dead);
    enter_all(e, r, gate, is_dead ? UINT64_MAX : upto);
    if (reset)
        scheduler_reset_cache(&e->scheduler, recompute);
    if (aborts || is_dead)
        finish_aborted(e, is_dead ? UINT64_MAX : upto, is_dead ? FINISH_ERROR : FINISH_ABORT);
    return true;
}

static void take_score(struct engine *e, struct sequence *q, const struct sample_task *task, const struct sample_result *result)
{
    struct request *r = q->request;
    size_t at = r->n_scored++, k = r->n_score_top;
    r->score_results[at] = *result;
    for (size_t i = 0; i < k; i++) {
        r->score_top_ids[at * k + i] = e->batch.top_ids[task->top_offset + i];
        r->score_top_values[at * k + i] = e->batch.top_values[task->top_offset + i];
        r->score_top_ranks[at * k + i] = e->batch.top_ranks[task->top_offset + i];
    }
    if (r->spec.is_score && r->n_scored == r->n_to_score)
        finish(e, q, FINISH_LENGTH);
}

static void take_token(struct engine *e, struct sequence *q, const struct sample_task *task, const struct sample_result *result,
                       double now)
{
    const struct batch *b = &e->batch;
    sequence_accept(q, result, b->top_ids + task->top_offset, b->top_values + task->top_offset, b->top_ranks + task->top_offset,
                    now);
    e->stats->generation_tokens++;
    if (q->n_output == q->request->spec.prior.n + 1)
        statistics_observe(e->statistics, HISTOGRAM_FIRST_TOKEN, now - q->request->queued);
    if (q->finish != FINISH_NONE)
        finish(e, q, q->finish);
    else
        outbox_note(&e->outbox, q);
}

static void take_results(struct engine *e, double now)
{
    for (uint32_t t = 0; t < e->batch.n_tasks; t++) {
        struct sequence *q = e->owners[t].sequence;
        const struct sample_result *result = &e->batch.results[t];
        if (q->state == SEQUENCE_FINISHED) /* by an error in an earlier row of this step */
            continue;
        if (result->status != SAMPLE_OK) {
            e->stats->nonfinite_rows += result->status == SAMPLE_NON_FINITE;
            q->status = result->status;
            q->error_position = e->owners[t].position;
            finish(e, q, FINISH_ERROR);
        } else if (e->batch.tasks[t].is_score) {
            take_score(e, q, &e->batch.tasks[t], result);
        } else {
            take_token(e, q, &e->batch.tasks[t], result, now);
        }
    }
}

static void poison(struct engine *e, const struct err *fault)
{
    e->fault = *fault;
    atomic_store(&e->is_dead, true);
    finish_aborted(e, UINT64_MAX, FINISH_ERROR);
}

/* What has been scheduled, before anything of it is done. */
static struct step_record describe_step(const struct engine *e, double begun)
{
    const struct scheduler *s = &e->scheduler;
    uint32_t n_free = block_manager_n_free(s->blocks);
    return (struct step_record){
        .start = begun,
        .n_rows = e->batch.n_rows,
        .n_prompt = (uint32_t)(s->n_prompt_rows - e->stats->prompt_rows),
        .n_decode = (uint32_t)(s->n_decode_rows - e->stats->decode_rows),
        .n_redone = (uint32_t)(s->n_redone_rows - e->stats->redone_rows),
        .n_admitted = s->n_admitted,
        .n_preempted = s->n_preempted,
        .n_running = s->n_running,
        .n_waiting = (uint32_t)s->waiting.n,
        .n_pages_used = (uint32_t)e->stats->kv_blocks_total - n_free,
        .n_pages_cached = block_manager_n_cached(s->blocks),
    };
}

static void count_step(struct engine *e, struct step_record *step, double begun, double run_seconds)
{
    double seconds = seconds_now() - begun;
    step->device_us = (float)(run_seconds * 1e6);
    step->host_us = (float)((seconds - run_seconds) * 1e6);
    e->stats->num_steps++;
    e->stats->last_step_ms = seconds * 1e3;
    e->stats->last_host_us = (seconds - run_seconds) * 1e6;
    statistics_log_step(e->statistics, step);
}

/* Schedules, runs and takes in one batch; *n_rows is 0 when there was nothing to do. */
static enum rc run_batch(struct engine *e, double begun, uint32_t *n_rows, struct err *err)
{
    struct err fault = {0};
    scheduler_begin_step(&e->scheduler, begun);
    sampler_fill(&e->scheduler, &e->batch, e->owners);
    *n_rows = e->batch.n_rows;
    if (!e->batch.n_rows)
        return e->scheduler.has_stalled ? err_set(err, RC_INTERNAL, "scheduler: no row scheduled though sequences wait")
                                        : RC_OK;
    struct step_record step = describe_step(e, begun);
    uint64_t n_tokens = e->stats->generation_tokens;
    double started = seconds_now();
    enum rc rc = e->config.runner.run(e->config.runner.ctx, &e->batch, &fault);
    double done = seconds_now();
    if (rc) {
        fault.rc = rc;
        poison(e, &fault);
        if (err)
            *err = fault;
    } else {
        take_results(e, done);
    }
    scheduler_end_step(&e->scheduler);
    step.n_tokens = (uint32_t)(e->stats->generation_tokens - n_tokens);
    count_step(e, &step, begun, done - started);
    return rc;
}

enum rc engine_step(struct engine *e, bool *progressed, struct err *err)
{
    *progressed = false;
    enum rc rc = claim(e, err);
    if (rc)
        return rc;
    double begun = seconds_now();
    uint64_t n_allocations = mem_count();
    uint32_t n_rows = 0;
    bool has_acted = take_commands(e);
    if (atomic_load(&e->is_dead))
        rc = dead(e, err);
    else
        rc = run_batch(e, begun, &n_rows, err);
    *progressed = has_acted || n_rows;
    if (e->is_warm)
        e->stats->allocations_since_warmup += mem_count() - n_allocations;
    e->is_warm |= n_rows > 0;
    publish_stats(e);
    unclaim(e);
    return rc;
}

bool engine_has_unfinished(struct engine *e)
{
    return atomic_load(&e->n_live) > 0;
}

uint32_t engine_n_finished(struct engine *e)
{
    return e->outbox.n_finished;
}

/* ---- results ---- */

static void forget(struct engine *e, struct request *r)
{
    pthread_mutex_lock(&e->lock);
    struct request **place = &e->map[r->number % N_BUCKETS];
    while (*place != r)
        place = &(*place)->map_next;
    *place = r->map_next;
    pthread_mutex_unlock(&e->lock);
}

enum rc engine_take(struct engine *e, bool finished_only, struct news *news, uint32_t max, uint32_t *n, struct err *err)
{
    *n = 0;
    enum rc rc = claim(e, err);
    if (rc)
        return rc;
    take_commands(e);
    for (struct sequence *q; (q = outbox_next_delivered(&e->outbox));) {
        if (q->request->n_held == 1)
            forget(e, q->request);
        sequence_release(q);
    }
    *n = outbox_take(&e->outbox, finished_only, e->stats->weight_epoch, news, max);
    publish_stats(e);
    unclaim(e);
    return RC_OK;
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
    enum rc rc = claim(e, err);
    if (rc)
        return rc;
    rc = scheduler_check(&e->scheduler, err);
    uint64_t n_held = e->scheduler.n_running + e->scheduler.waiting.n + e->n_held, n_live = atomic_load(&e->n_live);
    if (!rc && !atomic_load(&e->has_commands) && n_held != n_live)
        rc = err_set(err, RC_INTERNAL, "invariant 16: %llu sequences held, %llu alive", (unsigned long long)n_held,
                     (unsigned long long)n_live);
    unclaim(e);
    return rc;
}
