#define _GNU_SOURCE
#include "engine_state.h"

#include "../base/clock.h"
#include "../base/mem.h"
#include "beams.h"
#include "engine_config.h"
#include "features.h"
#include "pooling.h"
#include "sampler.h"
#include "sequence_pages.h"
#include "tiers.h"

#include <string.h>

#define COMPILE_LOOK_SECONDS 0.002 /* an engine that waits for grammars looks at its commands this often */

_Static_assert(FINISH_ERROR + 1 == N_FINISHES, "every way to finish is counted");

enum rc engine_claim(struct engine *e, struct err *err)
{
    if (atomic_exchange(&e->is_busy, true))
        return err_set(err, RC_BUSY, "engine is in use by another thread; use AsyncEngine, which serves several, or a lock");
    return RC_OK;
}

void engine_unclaim(struct engine *e)
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

static uint32_t in_flight(const struct engine *e)
{
    return (uint32_t)(e->n_started - e->n_ended);
}

/* ---- life ---- */

static void await_masks(void *ctx);

static enum rc flight_create(struct engine *e, uint32_t slot, struct err *err)
{
    struct flight *flight = &e->flights[slot];
    const struct engine_config *config = &e->config;
    /* A sequence may have a task beside those of its rows. */
    size_t n_top = (size_t)(config->max_num_batched_tokens + config->max_num_seqs) * config->max_logprobs +
                   (size_t)config->max_num_seqs * BEAM_CANDIDATES(MAX_BEAM_WIDTH);
    enum rc rc = scheduler_create_batch(&e->scheduler, n_top, &flight->batch, err);
    flight->batch.slot = slot;
    flight->batch.await_masks = await_masks;
    flight->batch.masks_ctx = e;
    flight->batch.vocab_limit = e->config.vocab_limit;
    flight->batch.banned = e->config.banned_ids;
    flight->batch.n_banned = e->config.n_banned;
    flight->states = rc ? NULL : mem_calloc(flight->batch.max_seqs, sizeof *flight->states);
    flight->owners = rc ? NULL : mem_calloc(flight->batch.max_tasks, sizeof *flight->owners);
    if (!rc && (!flight->owners || !flight->states))
        rc = err_set(err, RC_MEMORY, "engine: out of memory for %u tasks", flight->batch.max_tasks);
    return rc;
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
    if (!rc)
        rc = drafter_create(&e->drafter, &e->config, err);
    e->context.drafts = e->drafter.source;
    if (!rc)
        rc = scheduler_create(&e->scheduler, &e->context, e->statistics, err);
    e->max_in_flight = e->drafter.overlaps ? 2 : 1;
    for (uint32_t slot = 0; slot < 2 && !rc; slot++)
        rc = flight_create(e, slot, err);
    if (rc) {
        engine_destroy(e);
        return rc;
    }
    e->stats = statistics_totals(e->statistics);
    e->stats->kv_blocks_total = e->scheduler.n_pools * (config->n_pages - 1ull);
    e->stats->max_steps_in_flight = e->max_in_flight;
    engine_publish_stats(e);
    *result = e;
    return RC_OK;
}

void engine_destroy(struct engine *e)
{
    if (!e)
        return;
    for (; in_flight(e); e->n_ended++) /* no step may still run when the memory is freed */
        e->config.runner.finish(e->config.runner.ctx, &e->flights[e->n_ended % 2].batch, NULL);
    if (e->scheduler.tier)
        tiers_close(e);
    for (uint32_t b = 0; b < N_BUCKETS; b++)
        for (struct request *r = e->map[b], *next; r; r = next) {
            next = r->map_next;
            request_destroy(r);
        }
    grammars_release(atomic_load(&e->grammars));
    engine_drop_moves(e);
    scheduler_destroy(&e->scheduler);
    drafter_destroy(&e->drafter);
    for (uint32_t slot = 0; slot < 2; slot++) {
        batch_destroy(&e->flights[slot].batch);
        mem_free(e->flights[slot].owners);
        mem_free(e->flights[slot].states);
    }
    engine_config_free(&e->config, &e->context);
    statistics_destroy(e->statistics);
    pthread_mutex_destroy(&e->lock);
    mem_free(e);
}

/* ---- commands from any thread ---- */

static enum rc order_grammar(struct engine *e, const struct grammar_spec *spec, struct request *r, struct err *err)
{
    struct grammars *grammars = atomic_load(&e->grammars), *others = NULL;
    enum rc rc = grammars ? RC_OK : grammars_create(spec->library, &e->config, e->context.is_special, &grammars, err);
    if (rc)
        return rc;
    if (grammars != atomic_load(&e->grammars) && !atomic_compare_exchange_strong(&e->grammars, &others, grammars)) {
        grammars_release(grammars); /* another thread has made them meanwhile */
        grammars = others;
    }
    struct id_list prior = {r->sequences[0]->output, r->spec.prior.n};
    return grammar_order(grammars, spec, &prior, &r->spec.stop_ids, r->spec.n, r->sequences[0]->drafts.most, &r->grammar,
                         err);
}

enum rc engine_submit(struct engine *e, const struct request_spec *spec, uint64_t *number, struct err *err)
{
    struct request *r;
    if (atomic_load(&e->is_dead))
        return dead(e, err);
    enum rc rc = request_create(&e->context, spec, &r, err);
    if (rc)
        return rc;
    if (spec->grammar.text && (rc = order_grammar(e, &spec->grammar, r, err))) {
        request_destroy(r);
        return rc;
    }
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
    const struct request *r = q->request;
    uint32_t n_new = q->n_output - r->spec.prior.n;
    double now = seconds_now();
    e->stats->finished[how]++;
    statistics_observe(e->statistics, HISTOGRAM_OUTPUT_TOKENS, n_new);
    statistics_observe(e->statistics, HISTOGRAM_END_TO_END, now - r->queued);
    if (r->scheduled)
        statistics_observe(e->statistics, HISTOGRAM_INFERENCE, now - r->scheduled);
    if (n_new)
        statistics_observe(e->statistics, HISTOGRAM_DECODE, q->last_token - q->first_token);
    if (n_new > 1)
        statistics_observe(e->statistics, HISTOGRAM_PER_TOKEN, (q->last_token - q->first_token) / (n_new - 1));
}

static void finish_one(struct engine *e, struct sequence *q, enum finish how)
{
    if (q->n_pending && in_flight(e) == 2) { /* its row in the step started last is wasted */
        e->flights[(e->n_started - 1) % 2].record.n_decode--;
        e->flights[(e->n_started - 1) % 2].record.n_wasted++;
        e->scheduler.n_decode_rows--;
        e->stats->wasted_rows++;
    }
    count_finish(e, q, how);
    if (q->drafts.memory)
        drafter_end(&e->drafter, q);
    q->finish = how;
    if (e->scheduler.n_state_pages && q->drafts.memory && q->state == SEQUENCE_RUNNING)
        pages_publish(&e->scheduler, q); /* the blocks of a step that may have drafts are published after its results */
    scheduler_remove(&e->scheduler, q);
    outbox_finish(&e->outbox, q);
    atomic_fetch_sub(&e->n_live, 1);
}

/* Ends a sequence, and with it the parked ones of its request. A beam search that has not ended has no texts. */
static void finish(struct engine *e, struct sequence *q, enum finish how)
{
    struct request *r = q->request;
    q->n_output = r->beams ? 0 : q->n_output;
    finish_one(e, q, how);
    for (uint32_t i = 0; r->beams && i < r->spec.n; i++)
        if (r->sequences[i]->state == SEQUENCE_PARKED) {
            r->sequences[i]->n_output = 0;
            finish_one(e, r->sequences[i], how);
        }
}

static bool is_aborted(const struct sequence *q, uint64_t upto)
{
    return q->request->number <= upto || atomic_load(&q->request->is_aborted);
}

/* Ends all aborted sequences; with upto UINT64_MAX, all sequences. */
static void finish_aborted(struct engine *e, uint64_t upto, enum finish how)
{
    for (uint32_t i = 0; i < e->scheduler.n_running;)
        if (is_aborted(e->scheduler.running[i], upto))
            finish(e, e->scheduler.running[i], how); /* this moves the next sequence to place i */
        else
            i++;
    for (struct sequence *q = queue_first(&e->scheduler.waiting), *next; q; q = next) {
        next = queue_next(q);
        if (is_aborted(q, upto))
            finish(e, q, how);
    }
}

/* Gives an entering sequence its matcher, unless it has already ended. Sets q->finish if the grammar failed, has ended with the
 * prior output, or is not compiled: the request was aborted then, or the engine is dead. */
static void take_matcher(const struct engine *e, struct request *r, struct sequence *q)
{
    enum grammar_state state = grammar_look(r->grammar);
    if (q->finish != FINISH_NONE)
        return;
    if (state == GRAMMAR_FAILED) {
        sequence_fail_grammar(q, grammar_error(r->grammar));
    } else if (state == GRAMMAR_WAITS) {
        q->finish = atomic_load(&e->is_dead) ? FINISH_ERROR : FINISH_ABORT;
    } else {
        q->matcher = grammar_matcher(r->grammar, q->sample);
        q->finish = sequence_grammar_rule(q);
    }
}

static void enter(struct engine *e, struct request *r)
{
    for (uint32_t i = 0; i < (r->beams ? 1 : r->spec.n); i++) {
        struct sequence *q = r->sequences[i];
        if (r->grammar)
            take_matcher(e, r, q);
        enum finish already = q->finish; /* e.g. by a stop rule that the prior output meets */
        bool scores_first = sequence_is_scoring(q) && already != FINISH_ERROR && already != FINISH_ABORT;
        drafter_enter(&e->drafter, q);
        if (r->beams)
            beams_enter(&e->scheduler, r);
        else
            scheduler_add(&e->scheduler, q);
        if (already != FINISH_NONE && scores_first)
            q->matcher = NULL; /* no token will be drawn */
        else if (already != FINISH_NONE)
            finish(e, q, already);
    }
}

/* True for a request behind the gate, or whose grammar is still being compiled, unless the request has been aborted. */
static bool stays_out(struct engine *e, struct request *r, uint64_t gate, uint64_t abort_upto)
{
    if (r->number <= abort_upto || atomic_load(&r->is_aborted))
        return false;
    if (r->number > gate)
        return true;
    bool waits = r->grammar && grammar_look(r->grammar) == GRAMMAR_WAITS;
    e->stats->num_compiling += waits ? r->spec.n : 0;
    return waits;
}

/* Enters held and arrived requests in their order, except those that must stay out. */
static void enter_all(struct engine *e, struct request *arrived, uint64_t gate, uint64_t abort_upto)
{
    struct request **place = &e->held, *r;
    while (*place)
        place = &(*place)->next;
    *place = arrived;
    for (r = arrived; r; r = r->next)
        e->n_held += r->spec.n;
    e->stats->num_compiling = 0;
    for (place = &e->held; (r = *place);) {
        if (stays_out(e, r, gate, abort_upto)) {
            place = &r->next;
        } else {
            *place = r->next;
            e->n_held -= r->spec.n;
            enter(e, r);
        }
    }
    e->stats->num_held = e->n_held - e->stats->num_compiling;
}

static void take_score(struct engine *e, const struct batch *b, struct sequence *q, const struct sample_task *task,
                       const struct sample_result *result)
{
    struct request *r = q->request;
    size_t at = r->n_scored++, k = r->n_score_top;
    r->score_epoch = engine_epoch(e);
    r->score_results[at] = *result;
    for (size_t i = 0; i < k; i++) {
        r->score_top_ids[at * k + i] = b->top_ids[task->top_offset + i];
        r->score_top_values[at * k + i] = b->top_values[task->top_offset + i];
        r->score_top_ranks[at * k + i] = b->top_ranks[task->top_offset + i];
    }
    if (r->n_scored == r->n_to_score && (r->spec.is_score || q->finish != FINISH_NONE))
        finish(e, q, r->spec.is_score ? FINISH_LENGTH : q->finish);
}

/* Counts a token behind n_before new tokens. */
static void note_token(struct engine *e, struct sequence *q, uint32_t n_before, double now)
{
    e->stats->generation_tokens++;
    if (!n_before) {
        statistics_observe(e->statistics, HISTOGRAM_FIRST_TOKEN, now - q->request->queued);
        statistics_observe(e->statistics, HISTOGRAM_PREFILL, now - q->request->scheduled);
        q->first_token = now;
    } else {
        statistics_observe(e->statistics, HISTOGRAM_INTER_TOKEN, now - q->last_token);
    }
    q->last_token = now;
}

static void fail_row(struct engine *e, const struct flight *flight, uint32_t t)
{
    struct sequence *q = flight->owners[t].sequence;
    q->status = flight->batch.results[t].status;
    e->stats->nonfinite_rows += q->status == SAMPLE_NON_FINITE;
    if (q->matcher && matcher_mask_error(q->matcher))
        sequence_fail_grammar(q, matcher_mask_error(q->matcher));
    q->error_position = flight->owners[t].position;
}

static void take_token(struct engine *e, const struct batch *b, struct sequence *q, const struct sample_task *task,
                       const struct sample_result *result, double now)
{
    note_token(e, q, q->n_output - q->request->spec.prior.n, now);
    sequence_accept(q, result, b->top_ids + task->top_offset, b->top_values + task->top_offset, b->top_ranks + task->top_offset,
                    engine_epoch(e));
    if (q->drafts.memory)
        drafter_note(&e->drafter, q, result->id);
    if (q->finish != FINISH_NONE) {
        finish(e, q, q->finish);
        return;
    }
    if (q->state == SEQUENCE_RUNNING)
        pages_publish(&e->scheduler, q);
    outbox_note(&e->outbox, q);
}

/* Takes the candidates of a beam; ends the search if it has ended or if the row failed. */
static void take_candidates(struct engine *e, const struct flight *flight, uint32_t t, double now)
{
    struct sequence *q = flight->owners[t].sequence;
    struct request *r = q->request;
    uint32_t status = flight->batch.results[t].status;
    const char *error = q->matcher ? matcher_mask_error(q->matcher) : NULL;
    note_token(e, q, r->beams->n_tokens, now);
    bool has_failed = error || (status != SAMPLE_OK && status != SAMPLE_NONE_ALLOWED);
    if (has_failed)
        fail_row(e, flight, t);
    if (has_failed)
        beams_fail(r, q);
    else if (!beams_take(&e->scheduler, q, &flight->batch, t, engine_epoch(e)))
        return;
    for (uint32_t i = 0; i < r->spec.n; i++)
        if (r->sequences[i]->state != SEQUENCE_FINISHED)
            finish_one(e, r->sequences[i], r->sequences[i]->finish);
}

/* Reads the pooled states of a step. No later step has been started (sequence_must_wait), so none has overwritten them. */
static enum rc take_states(struct engine *e, struct flight *flight, struct err *err)
{
    enum rc rc = RC_OK;
    for (uint32_t i = 0; i < flight->n_states_owners && !rc; i++) {
        struct states_owner *owner = &flight->states[i];
        struct sequence *q = owner->sequence;
        bool is_finite = true;
        q->request->score_epoch = engine_epoch(e);
        rc = pooling_take(q, &flight->batch, owner->first, owner->n, &is_finite, err);
        if (!rc && !is_finite) {
            e->stats->nonfinite_rows++;
            q->status = SAMPLE_NON_FINITE;
            q->error_position = q->request->first_pooled + q->request->n_pooled;
            finish(e, q, FINISH_ERROR);
        } else if (!rc && q->request->n_pooled == q->request->n_to_pool) {
            finish(e, q, FINISH_LENGTH);
        }
    }
    flight->n_states_owners = 0;
    return rc;
}

static void take_results(struct engine *e, const struct flight *flight, double now)
{
    const struct batch *b = &flight->batch;
    for (uint32_t t = 0; t < b->n_tasks; t++) {
        struct sequence *q = flight->owners[t].sequence;
        const struct sample_result *result = &b->results[t];
        q->n_pending -= !b->tasks[t].is_score;
        if (q->state == SEQUENCE_FINISHED) /* by a token of an earlier step, or by an error in an earlier row of this step */
            continue;
        if (q->drafts.n && !drafter_takes(&e->scheduler, q, result, e->stats))
            continue;
        if (q->request->beams) {
            take_candidates(e, flight, t, now);
        } else if (result->status != SAMPLE_OK) {
            fail_row(e, flight, t);
            finish(e, q, FINISH_ERROR);
        } else if (b->tasks[t].is_score) {
            take_score(e, b, q, &b->tasks[t], result);
        } else {
            take_token(e, b, q, &b->tasks[t], result, now);
        }
    }
}

/* Ends the sequences whose grammar ended or failed with their token of this step. */
static void settle_grammars(struct engine *e, const struct flight *flight)
{
    if (!flight->batch.has_masks)
        return;
    grammars_finish_tokens(atomic_load(&e->grammars));
    for (uint32_t t = 0; t < flight->batch.n_tasks; t++) {
        struct sequence *q = flight->owners[t].sequence;
        bool is_open = q->matcher && q->state != SEQUENCE_FINISHED && !q->request->beams;
        enum finish ends = is_open ? sequence_grammar_rule(q) : FINISH_NONE;
        if (ends != FINISH_NONE)
            finish(e, q, ends);
    }
}

/* Steps in flight are dropped: the engine does not wait for them. */
enum rc engine_poison(struct engine *e, enum rc rc, const struct err *fault, struct err *err)
{
    e->fault = *fault;
    e->fault.rc = rc;
    atomic_store(&e->is_dead, true);
    e->n_ended = e->n_started;
    for (uint32_t slot = 0; slot < 2; slot++) {
        for (uint32_t t = 0; t < e->flights[slot].batch.n_tasks; t++)
            e->flights[slot].owners[t].sequence->n_pending = 0;
        e->flights[slot].batch.n_tasks = 0;
    }
    finish_aborted(e, UINT64_MAX, FINISH_ERROR);
    if (err)
        *err = e->fault;
    return rc;
}

/* Makes events of computed steps visible; with no step in flight, all events. */
static void show_events(struct engine *e, uint64_t upto)
{
    kv_events_show(e->scheduler.events, in_flight(e) ? upto : kv_events_count(e->scheduler.events));
}

/* Schedules a step and starts it. *has_rows is false if there was neither a row nor an image to compute. */
static enum rc start_flight(struct engine *e, bool *has_rows, struct err *err)
{
    struct flight *flight = &e->flights[e->n_started % 2];
    struct batch *b = &flight->batch;
    const struct scheduler before = e->scheduler;
    struct err fault = {0};
    double begun = seconds_now();
    if (before.tier && tiers_poll(e, &fault))
        return engine_poison(e, fault.rc, &fault, err);
    scheduler_begin_step(&e->scheduler, b, in_flight(e) > 0, begun);
    enum rc rc = e->drafter.source && !in_flight(e) ? drafter_schedule(&e->drafter, &e->scheduler, &fault) : RC_OK;
    if (rc) {
        scheduler_end_step(&e->scheduler);
        return engine_poison(e, rc, &fault, err);
    }
    flight->n_states_owners = sampler_fill(&e->scheduler, flight->owners, flight->states);
    *has_rows = b->n_rows || b->n_encodings;
    if (!*has_rows)
        return e->scheduler.has_stalled ? err_set(err, RC_INTERNAL, "scheduler: no row was scheduled, although sequences wait")
                                        : RC_OK;
    flight->record = engine_describe_step(e, b, &before, begun);
    flight->n_kv_events = kv_events_count(e->scheduler.events);
    flight->started = e->config.drafts.method >= DRAFT_MODEL ? begun : seconds_now();
    e->n_started++;
    e->awaited_seconds = 0;
    flight->record.n_in_flight = in_flight(e);
    rc = before.tier ? tiers_flush(e, &fault) : RC_OK;
    if (!rc)
        rc = e->config.runner.start(e->config.runner.ctx, b, &fault);
    flight->record.is_replayed = b->is_replayed;
    scheduler_end_step(&e->scheduler);
    flight->host_seconds = (e->config.runner.is_async ? seconds_now() - e->awaited_seconds : flight->started) - begun;
    if (!rc && atomic_load(&e->is_dead)) /* await_masks met a fault */
        return engine_fault(e, err);
    return rc ? engine_poison(e, rc, &fault, err) : RC_OK;
}

/* Waits for the step that was started first and processes its results. */
static enum rc end_flight(struct engine *e, struct err *err)
{
    struct flight *flight = &e->flights[e->n_ended % 2];
    struct step_record *record = &flight->record;
    struct err fault = {0};
    uint64_t n_tokens = e->stats->generation_tokens, n_accepted = e->stats->accepted_rows;
    enum rc rc = e->config.runner.finish(e->config.runner.ctx, &flight->batch, &fault);
    if (!rc)
        rc = take_states(e, flight, &fault);
    if (rc)
        return engine_poison(e, rc, &fault, err);
    double done = seconds_now(), from = flight->started > e->last_done ? flight->started : e->last_done;
    take_results(e, flight, done);
    settle_grammars(e, flight);
    flight->batch.n_tasks = 0;
    e->n_ended++;
    show_events(e, flight->n_kv_events);
    double period_us = (done - e->last_done) * 1e6;
    e->last_done = done;
    double host_seconds = flight->host_seconds + (seconds_now() - done);
    record->n_tokens = (uint32_t)(e->stats->generation_tokens - n_tokens);
    record->n_accepted = (uint32_t)(e->stats->accepted_rows - n_accepted);
    record->device_us = (float)((done - from) * 1e6);
    record->host_us = (float)(host_seconds * 1e6);
    e->stats->num_steps++;
    if (e->drafter.source)
        drafter_observe(&e->drafter, record, period_us);
    if (e->scheduler.tier)
        tiers_observe(e, record);
    statistics_observe(e->statistics, HISTOGRAM_STEP_ROWS, record->n_rows);
    e->stats->num_replayed_steps += record->is_replayed;
    e->stats->last_step_ms = (done - from) * 1e3;
    e->stats->last_host_us = host_seconds * 1e6;
    statistics_log_step(e->statistics, record);
    return RC_OK;
}

/* The runner calls this when it has enqueued a step up to its draws. The masks of the draws depend on the tokens of the
 * previous step, so its results are processed here, while the device computes. */
static void await_masks(void *ctx)
{
    struct engine *e = ctx;
    double begun = seconds_now();
    scheduler_end_step(&e->scheduler);
    while (in_flight(e) > 1 && !end_flight(e, NULL))
        continue;
    grammars_finish_masks(atomic_load(&e->grammars), &e->stats->num_masks, &e->stats->mask_us);
    e->awaited_seconds += seconds_now() - begun;
}

enum rc engine_end_flights(struct engine *e, struct err *err)
{
    enum rc rc = RC_OK;
    while (in_flight(e) && !rc)
        rc = end_flight(e, err);
    return rc;
}

/* Carries out the commands that arrived since the last step boundary; false if there were none. */
static bool take_commands(struct engine *e)
{
    if (!atomic_exchange(&e->has_commands, false))
        return false;
    pthread_mutex_lock(&e->lock);
    struct request *r = e->inbox_first;
    uint64_t upto = e->abort_upto, gate = e->gate;
    bool reset = e->wants_reset, recompute = e->wants_recompute, aborts = e->wants_abort;
    struct adapter_move *moves = e->moves;
    e->inbox_first = e->inbox_last = NULL;
    e->moves = NULL;
    e->abort_upto = 0;
    e->wants_reset = e->wants_recompute = e->wants_abort = false;
    pthread_mutex_unlock(&e->lock);
    if (reset || aborts || moves)
        engine_end_flights(e, NULL); /* a fault sets is_dead, which is read below */
    bool is_dead = atomic_load(&e->is_dead);
    enter_all(e, r, gate, is_dead ? UINT64_MAX : upto);
    engine_carry_out_moves(e, moves);
    if (reset)
        scheduler_reset_cache(&e->scheduler, recompute);
    if (aborts || is_dead)
        finish_aborted(e, is_dead ? UINT64_MAX : upto, is_dead ? FINISH_ERROR : FINISH_ABORT);
    return true;
}

/* A step behind one with images is scheduled when they are computed: so what arrives meanwhile is in it. */
static bool may_start(struct engine *e)
{
    const struct batch *last = &e->flights[(e->n_started - 1) % 2].batch;
    if (!in_flight(e) || in_flight(e) == e->max_in_flight || last->n_encodings)
        return !in_flight(e);
    if (scheduler_can_overlap(&e->scheduler))
        return true;
    e->stats->num_draft_waits += scheduler_awaits_drafts(&e->scheduler);
    return false;
}

/* Starts as many steps as may be in flight and waits for the first of them. */
static enum rc run_steps(struct engine *e, bool *has_run, struct err *err)
{
    enum rc rc = RC_OK;
    bool has_rows = true;
    uint64_t n_ended = e->n_ended; /* starting a step with masks ends the previous step */
    while (!rc && has_rows && e->n_ended == n_ended && may_start(e))
        rc = start_flight(e, &has_rows, err);
    *has_run = in_flight(e) > 0;
    return rc || !*has_run || e->n_ended != n_ended ? rc : end_flight(e, err);
}

/* Counts only allocations of this thread, because other threads submit requests meanwhile. */
static uint64_t count_allocations(const struct engine *e)
{
    const struct runner *runner = &e->config.runner;
    return mem_count_own() + (runner->allocations ? runner->allocations(runner->ctx) : 0);
}

enum rc engine_step(struct engine *e, bool *progressed, struct err *err)
{
    *progressed = false;
    enum rc rc = engine_claim(e, err);
    if (rc)
        return rc;
    uint64_t n_allocations = count_allocations(e);
    if (e->stats->num_compiling)
        atomic_store(&e->has_commands, true);
    bool has_run = false, has_acted = take_commands(e);
    if (atomic_load(&e->is_dead))
        rc = dead(e, err);
    else
        rc = engine_refusal(e, err);
    if (!rc)
        rc = run_steps(e, &has_run, err);
    if (!rc && !has_run && e->stats->num_compiling)
        grammars_wait(atomic_load(&e->grammars), COMPILE_LOOK_SECONDS);
    *progressed = has_acted || has_run || e->scheduler.n_seeking;
    if (e->is_warm)
        e->stats->allocations_since_warmup += count_allocations(e) - n_allocations;
    e->is_warm |= has_run;
    engine_publish_stats(e);
    engine_unclaim(e);
    return rc;
}

enum rc engine_settle(struct engine *e, struct err *err)
{
    enum rc rc = engine_claim(e, err);
    if (rc)
        return rc;
    rc = engine_end_flights(e, err);
    show_events(e, 0);
    engine_publish_stats(e);
    engine_unclaim(e);
    return rc;
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

enum rc engine_take(struct engine *e, bool finished_only, struct output *output, uint32_t max, uint32_t *n, struct err *err)
{
    *n = 0;
    enum rc rc = engine_claim(e, err);
    if (rc)
        return rc;
    take_commands(e);
    for (struct sequence *q; (q = outbox_next_delivered(&e->outbox));) {
        if (q->request->n_held == 1)
            forget(e, q->request);
        sequence_release(q);
    }
    *n = outbox_take(&e->outbox, finished_only, engine_epoch(e), output, max);
    engine_publish_stats(e);
    engine_unclaim(e);
    return RC_OK;
}
