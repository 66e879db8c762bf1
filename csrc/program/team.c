#include "team.h"

#include "../base/mem.h"
#include "follower.h"
#include "lora.h"
#include "model_state.h"
#include "rank_check.h"
#include "team_state.h"
#include "tower.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#define NO_RANK UINT32_MAX

typedef enum rc (*rank_function)(struct model *model, void *arg, struct err *err);

/* ---- the ranks' threads ------------------------------------------------------------------------------------------------ */

struct call {
    struct team *team;
    rank_function run;
    void *arg;
    bool is_meeting;          /* ranks wait for each other in it, so one that fails ends the waits of the others */
    enum rc rcs[TEAM_MAX_RANKS];
    atomic_uint first_failed; /* the rank that failed first */
};

/* Notes how a rank's part of a call has ended. A failure ends the waits of the other ranks. */
static void end_rank(struct call *call, uint32_t rank, enum rc rc)
{
    const struct team *team = call->team;
    unsigned none = NO_RANK;
    call->rcs[rank] = rc;
    if (rc && atomic_compare_exchange_strong(&call->first_failed, &none, rank) && call->is_meeting && team->comm)
        team->comm->abort(team->ctxs, team->n_ranks);
}

static void run_rank(void *args, uint32_t rank)
{
    struct call *call = args;
    struct team *team = call->team;
    team->errs[rank] = (struct err){0};
    end_rank(call, rank, call->run(team->models[rank], call->arg, &team->errs[rank]));
}

/* Whether a rank failed because a meeting did, which is another rank's fault. Its error names the ranks already. */
static bool was_stopped(const struct call *call, uint32_t rank)
{
    const struct team *team = call->team;
    return call->is_meeting && team->comm && team->comm->check(team->ctxs[rank], NULL);
}

void team_name_rank(const struct team *team, uint32_t rank, struct err *err)
{
    char reason[sizeof err->message];
    if (!err || team->n_all_ranks == 1)
        return;
    snprintf(reason, sizeof reason, "%s", err->message);
    snprintf(err->message, sizeof err->message, "rank %u (%s): %.450s", team->first_rank + rank, team->devices[rank], reason);
}

/* The result of a call that all ranks have ended. The error is that of the rank that failed first, but a rank that was stopped
 * in a meeting gives way to a rank that failed by itself. */
static enum rc result_of(const struct call *call, struct err *err)
{
    const struct team *team = call->team;
    uint32_t failed = atomic_load(&call->first_failed);
    if (failed == NO_RANK)
        return RC_OK;
    bool is_stopped = was_stopped(call, failed);
    for (uint32_t rank = 0; rank < team->n_ranks && is_stopped; rank++)
        if (call->rcs[rank] && !was_stopped(call, rank)) {
            failed = rank;
            is_stopped = false;
        }
    if (err)
        *err = team->errs[failed];
    if (!is_stopped)
        team_name_rank(team, failed, err);
    return call->rcs[failed];
}

static enum rc run_ranks(struct team *team, rank_function run, void *arg, bool is_meeting, struct err *err)
{
    if (team->n_all_ranks == 1)
        return run(team->models[0], arg, err);
    struct call call = {.team = team, .run = run, .arg = arg, .is_meeting = is_meeting, .first_failed = NO_RANK};
    if (team->pool)
        pool_run(team->pool, run_rank, &call);
    else
        run_rank(&call, 0);
    return result_of(&call, err);
}

/* The same on the caller's thread, one rank after the other. Calls that enqueue little, or wait for what is enqueued, end
 * sooner so: the threads of the ranks sleep between steps, and waking one takes some 50 us. */
static enum rc run_in_turn(struct team *team, rank_function run, void *arg, struct err *err)
{
    struct call call = {.team = team, .run = run, .arg = arg, .is_meeting = true, .first_failed = NO_RANK};
    for (uint32_t rank = 0; rank < team->n_ranks; rank++)
        run_rank(&call, rank);
    return result_of(&call, err);
}

enum rc team_meet(struct team *team, rank_function run, void *arg, struct err *err)
{
    return run_ranks(team, run, arg, true, err);
}

/* ---- making ------------------------------------------------------------------------------------------------------------ */

/* Ranks report the progress of their loads together: rank 0's thread is the caller's, so it calls the caller's function. */
struct progress {
    bool (*report)(void *ctx, uint64_t done_bytes, uint64_t total_bytes);
    void *ctx;
    atomic_bool is_stopped;
    uint32_t n_ranks;
    struct rank_progress {
        struct progress *all;
        uint32_t rank;
        _Atomic uint64_t done_bytes, total_bytes;
    } ranks[TEAM_MAX_RANKS];
};

static bool report_rank(void *ctx, uint64_t done_bytes, uint64_t total_bytes)
{
    struct rank_progress *own = ctx;
    struct progress *all = own->all;
    uint64_t done = 0, total = 0;
    atomic_store(&own->done_bytes, done_bytes);
    atomic_store(&own->total_bytes, total_bytes);
    for (uint32_t rank = 0; rank < all->n_ranks; rank++) {
        done += atomic_load(&all->ranks[rank].done_bytes);
        total += atomic_load(&all->ranks[rank].total_bytes);
    }
    if (own->rank == 0 && !all->report(all->ctx, done, total))
        atomic_store(&all->is_stopped, true);
    return !atomic_load(&all->is_stopped);
}

static enum rc open_rank(struct model *model, void *arg, struct err *err)
{
    (void)arg;
    return model_open(model, err);
}

static enum rc load_rank(struct model *model, void *checkpoint, struct err *err)
{
    return model_load(model, checkpoint, err);
}

static enum rc size_rank(struct model *model, void *arg, struct err *err)
{
    (void)arg;
    return model_size_pool(model, err);
}

static enum rc make_rank(struct model *model, void *arg, struct err *err)
{
    (void)arg;
    return model_make_buffers(model, err);
}

static enum rc warm_rank(struct model *model, void *arg, struct err *err)
{
    (void)arg;
    return model_warm(model, err);
}

static enum rc capture_rank(struct model *model, void *arg, struct err *err)
{
    (void)arg;
    return model_capture(model, err);
}

/* Can the ranks here meet those of other processes? */
static enum rc check_hosts(const struct team *team, const struct backend *backend, struct err *err)
{
    const struct comm *comm = backend->comm;
    const bool says_most = comm && comm->size_bytes > offsetof(struct comm, most_of_several);
    const uint32_t most = says_most ? comm->most_of_several : 0;
    if (!team->hosts || team->n_ranks <= most)
        return RC_OK;
    err_set(err, RC_UNSUPPORTED, "nnodes: wanted at most %u ranks a host on %s, have %u; change tensor_parallel_size, or use "
            "one host", most, backend->name, team->n_ranks);
    err_name(err, "nnodes", NULL);
    return RC_UNSUPPORTED;
}

static enum rc check_processes(void *hosts, struct err *err)
{
    return hosts_check(hosts, err);
}

/* The id of the process group of all ranks. Host 0 makes it; the others give zeros. */
static enum rc agree_group_id(const struct team *team, const struct backend *backend, const char *nccl,
                              uint64_t id[GROUP_ID_BYTES / 8], struct err *err)
{
    memset(id, 0, GROUP_ID_BYTES);
    enum rc rc = hosts_is_first(team->hosts) ? backend->peers->group_id(nccl, (uint8_t *)id, err) : RC_OK;
    return rc ? rc : hosts_agree(team->hosts, id, GROUP_ID_BYTES / 8, err);
}

/* Connects the contexts of several ranks. */
static enum rc connect(struct team *team, const struct team_options *given, struct err *err)
{
    const struct backend *backend = team->models[0]->backend;
    uint64_t id[GROUP_ID_BYTES / 8];
    if (team->n_all_ranks == 1)
        return RC_OK;
    enum rc rc = check_hosts(team, backend, err);
    if (rc)
        return rc;
    for (uint32_t rank = 0; rank < team->n_ranks; rank++) {
        team->ctxs[rank] = team->models[rank]->ctx;
        if (team->models[rank]->backend != backend)
            return err_set(err, RC_CONFIG, "device_ids: wanted devices of one backend, have %s and %s", backend->name,
                           team->models[rank]->backend->name);
    }
    if (!backend->comm)
        return err_set(err, RC_UNSUPPORTED, "tensor_parallel_size: the backend %s runs one rank only", backend->name);
    struct comm_options options = {.timeout_seconds = given->timeout_seconds};
    if (team->hosts) {
        options.process = given->hosts->host;
        options.n_processes = given->hosts->n_hosts;
        options.first_rank = team->first_rank;
        options.n_all_ranks = team->n_all_ranks;
        options.exchange = hosts_exchange;
        options.exchange_ctx = team->hosts;
        options.check = check_processes;
    }
    if (team->hosts && given->nccl) {
        options.nccl = given->nccl;
        options.group_id = (uint8_t *)id;
        rc = agree_group_id(team, backend, given->nccl, id, err);
    }
    rc = rc ? rc : backend->comm->open(team->ctxs, team->n_ranks, &options, err);
    if (!rc)
        team->comm = backend->comm;
    return rc;
}

/* The largest needs of all hosts. */
static enum rc agree_needs(struct hosts *hosts, struct kv_need *needs, uint32_t n, size_t *layer_bytes, struct err *err)
{
    uint64_t *values = mem_calloc(n + 1, sizeof *values);
    enum rc rc = values ? RC_OK : err_set(err, RC_MEMORY, "team: out of memory");
    for (uint32_t i = 0; i < n && !rc; i++)
        values[i] = needs[i].n_units;
    if (!rc) {
        values[n] = *layer_bytes;
        rc = hosts_agree(hosts, values, n + 1, err);
    }
    for (uint32_t i = 0; i < n && !rc; i++)
        needs[i].n_units = (uint32_t)values[i];
    if (!rc)
        *layer_bytes = values[n];
    mem_free(values);
    return rc;
}

/* Places the caches by the largest need of any rank, so that page numbers and tables are equal on all. */
static enum rc lay_caches(struct team *team, struct err *err)
{
    const struct program *p = team->models[0]->program;
    uint32_t n = p->n_layers + p->n_states;
    struct kv_need *largest = mem_calloc(2 * (size_t)n + 1, sizeof *largest), *needs = largest ? largest + n : NULL;
    size_t layer_bytes = 0;
    enum rc rc = largest ? RC_OK : err_set(err, RC_MEMORY, "team: out of memory");
    for (uint32_t rank = 0; rank < team->n_ranks && !rc; rank++) {
        size_t size = model_needs(team->models[rank], needs);
        layer_bytes = size > layer_bytes ? size : layer_bytes;
        for (uint32_t i = 0; i < n; i++) {
            uint32_t n_units = largest[i].n_units > needs[i].n_units ? largest[i].n_units : needs[i].n_units;
            largest[i] = needs[i];
            largest[i].n_units = n_units;
        }
    }
    if (!rc && team->hosts)
        rc = agree_needs(team->hosts, largest, n, &layer_bytes, err);
    for (uint32_t rank = 0; rank < team->n_ranks && !rc; rank++)
        rc = model_lay_cache(team->models[rank], largest, layer_bytes, err);
    mem_free(largest);
    return rc;
}

/* All ranks get as many pages as the rank with the fewest. */
static enum rc level_pages(struct team *team, struct err *err)
{
    uint64_t fewest = UINT32_MAX;
    for (uint32_t rank = 0; rank < team->n_ranks; rank++)
        fewest = team->models[rank]->n_pages < fewest ? team->models[rank]->n_pages : fewest;
    uint64_t missing = UINT32_MAX - fewest;
    enum rc rc = team->hosts ? hosts_agree(team->hosts, &missing, 1, err) : RC_OK;
    for (uint32_t rank = 0; rank < team->n_ranks; rank++)
        team->models[rank]->n_pages = (uint32_t)(UINT32_MAX - missing);
    return rc;
}

enum rc team_share_arenas(struct team *team, void *const *arenas, size_t size_bytes, struct err *err)
{
    void *own[TEAM_MAX_RANKS];
    const struct model *first = team->models[0];
    if (!team->comm)
        return RC_OK;
    for (uint32_t rank = 0; rank < team->n_ranks; rank++)
        own[rank] = team->models[rank]->arena;
    return team->comm->share(team->ctxs, team->n_ranks, COMM_ARENA, arenas ? arenas : own,
                             arenas ? size_bytes : first->plan.arena_values * first->item_bytes, err);
}

static enum rc share_logits(struct team *team, struct err *err)
{
    void *logits[TEAM_MAX_RANKS];
    if (!team->comm || !team->models[0]->logits_bytes)
        return RC_OK;
    for (uint32_t rank = 0; rank < team->n_ranks; rank++)
        logits[rank] = team->models[rank]->logits;
    return team->comm->share(team->ctxs, team->n_ranks, COMM_LOGITS, logits, team->models[0]->logits_bytes, err);
}

/* All hosts take the smallest cache of any, so that they have equally many pages and the same longest sequence. */
static enum rc agree_cache(struct team *team, struct err *err)
{
    uint64_t missing = UINT64_MAX - team->models[0]->options.kv_cache_bytes;
    enum rc rc = hosts_agree(team->hosts, &missing, 1, err);
    for (uint32_t rank = 0; rank < team->n_ranks && !rc; rank++)
        team->models[rank]->options.kv_cache_bytes = UINT64_MAX - missing;
    return rc;
}

/* What host 0 needs to send steps. The message says that all hosts are ready. */
static enum rc prepare_hosts(struct team *team, struct err *err)
{
    uint64_t ready = 1;
    if (!team->hosts)
        return RC_OK;
    const struct step_limits limits = team_limits(team);
    if (hosts_is_first(team->hosts) && !(team->message = mem_alloc(step_message_most_bytes(&limits))))
        return err_set(err, RC_MEMORY, "team: out of memory");
    return hosts_agree(team->hosts, &ready, 1, err);
}

static enum rc make(struct team *team, const struct checkpoint *checkpoint, const struct team_options *options, struct err *err)
{
    enum rc rc = options->hosts ? hosts_open(options->hosts, &team->hosts, err) : RC_OK;
    if (!rc && team->hosts)
        rc = agree_cache(team, err);
    if (!rc)
        rc = run_ranks(team, open_rank, NULL, false, err);
    if (!rc)
        rc = connect(team, options, err);
    if (!rc)
        rc = run_ranks(team, load_rank, (void *)(uintptr_t)checkpoint, false, err);
    if (!rc)
        rc = lay_caches(team, err);
    if (!rc)
        rc = run_ranks(team, size_rank, NULL, false, err);
    if (!rc)
        rc = level_pages(team, err);
    if (!rc)
        rc = run_ranks(team, make_rank, NULL, false, err);
    if (!rc)
        team_join_slots(team);
    if (!rc)
        rc = team_share_arenas(team, NULL, 0, err);
    if (!rc)
        rc = share_logits(team, err);
    if (!rc)
        rc = run_ranks(team, warm_rank, NULL, true, err);
    if (!rc)
        rc = run_ranks(team, capture_rank, NULL, true, err);
    return rc ? rc : prepare_hosts(team, err);
}

/* Makes the team with models that are not opened yet. Takes ownership of the programs. */
static enum rc allocate(struct program **programs, const struct model_options *ranks, const struct team_options *options,
                        struct team **out, struct err *err)
{
    struct team *team = mem_calloc(1, sizeof *team);
    uint32_t n_ranks = options->n_ranks;
    enum rc rc = RC_OK;
    if (team) {
        team->n_ranks = n_ranks;
        team->first_rank = options->hosts ? options->first_rank : 0;
        team->others = options->hosts ? options->others : NULL;
        team->n_all_ranks = options->hosts ? options->n_all_ranks : n_ranks;
        team->models = mem_calloc(n_ranks, sizeof *team->models);
        team->ctxs = mem_calloc(n_ranks, sizeof *team->ctxs);
        team->errs = mem_calloc(n_ranks, sizeof *team->errs);
        team->devices = mem_calloc(n_ranks, sizeof *team->devices);
    }
    for (uint32_t rank = 0; !team && options->others && rank < options->n_all_ranks; rank++)
        program_destroy(options->others[rank]);
    if (!team)
        mem_free(options->others);
    if (!team || !team->models || !team->ctxs || !team->errs || !team->devices)
        rc = err_set(err, RC_MEMORY, "team: out of memory");
    for (uint32_t rank = 0; rank < n_ranks; rank++) {
        if (rc) {
            program_destroy(programs[rank]);
            continue;
        }
        snprintf(team->devices[rank], sizeof *team->devices, "%.31s", ranks[rank].device);
        rc = model_new(programs[rank], &ranks[rank], &team->models[rank], err);
    }
    if (!rc && n_ranks > 1)
        rc = pool_create(n_ranks, "llmpy-rank", &team->pool, err);
    *out = team;
    return rc;
}

enum rc team_create(struct program **programs, const struct checkpoint *checkpoint, struct model_options *ranks,
                    const struct team_options *options, struct team **team, struct err *err)
{
    struct progress progress = {.report = ranks[0].weights.progress, .ctx = ranks[0].weights.progress_ctx,
                                .n_ranks = options->n_ranks};
    for (uint32_t rank = 0; rank < options->n_ranks; rank++) {
        progress.ranks[rank].all = &progress;
        progress.ranks[rank].rank = rank;
        ranks[rank].rank = (options->hosts ? options->first_rank : 0) + rank;
        ranks[rank].n_ranks = options->hosts ? options->n_all_ranks : options->n_ranks;
        ranks[rank].n_here = options->n_ranks;
        if (progress.report) {
            ranks[rank].weights.progress = report_rank;
            ranks[rank].weights.progress_ctx = &progress.ranks[rank];
        }
    }
    struct team *made = NULL;
    struct err failure = {0};
    enum rc rc = allocate(programs, ranks, options, &made, &failure);
    if (!rc)
        rc = make(made, checkpoint, options, &failure);
    if (!rc) {
        lora_join(made->models, made->n_ranks);
        *team = made;
        return RC_OK;
    }
    if (made && made->hosts)
        hosts_end(made->hosts, failure.message);
    team_destroy(made);
    if (err)
        *err = failure;
    return rc;
}

void team_destroy(struct team *team)
{
    if (!team)
        return;
    for (uint32_t rank = 0; team->models && rank < team->n_ranks; rank++)
        if (team->comm && team->models[rank]->ctx)
            team->models[rank]->backend->synchronize(team->models[rank]->ctx, NULL);
    team_end_taps(team);
    if (team->comm)
        team->comm->close(team->ctxs, team->n_ranks);
    team_free_slots(team);
    for (uint32_t rank = 0; team->models && rank < team->n_ranks; rank++)
        model_destroy(team->models[rank]);
    pool_destroy(team->pool);
    hosts_close(team->hosts);
    team_end_update(team);
    for (uint32_t rank = 0; team->others && rank < team->n_all_ranks; rank++)
        program_destroy(team->others[rank]);
    mem_free(team->others);
    mem_free(team->message);
    mem_free(team->models);
    mem_free(team->ctxs);
    mem_free(team->errs);
    mem_free(team->devices);
    mem_free(team);
}

uint32_t team_n_ranks(const struct team *team)
{
    return team->n_ranks;
}

struct hosts *team_hosts(const struct team *team)
{
    return team->hosts;
}

uint32_t team_n_all_ranks(const struct team *team)
{
    return team->n_all_ranks;
}

const struct program *team_program(const struct team *team, uint32_t rank)
{
    bool is_here = rank >= team->first_rank && rank - team->first_rank < team->n_ranks;
    return is_here ? team->models[rank - team->first_rank]->program : team->others[rank];
}

struct model *team_model(const struct team *team, uint32_t rank)
{
    return team->models[rank];
}

struct model *const *team_models(const struct team *team)
{
    return team->models;
}

/* ---- the runner -------------------------------------------------------------------------------------------------------- */

static enum rc start_rank(struct model *model, void *batch, struct err *err)
{
    return model_start(model, batch, err);
}

/* The step goes to the followers before it starts here, so that all ranks compute it at once. */
static enum rc send_step(struct team *team, const struct batch *batch, struct err *err)
{
    size_t n_bytes = step_message_write(batch, ++team->n_steps, team->message);
    return hosts_send_step(team->hosts, team->message, n_bytes, err);
}

/* Whether meetings only enqueue, so that one thread can run all ranks. */
static bool waits_on_device(const struct team *team)
{
    const struct comm *comm = team->comm;
    return comm && comm->size_bytes > offsetof(struct comm, waits_on_device) && comm->waits_on_device;
}

static enum rc draw_rank(struct model *model, void *batch, struct err *err)
{
    return model_draw(model, batch, err);
}

/* By data every rank draws. The first that wants the masks awaits them for all. */
struct masks_gate {
    pthread_mutex_t lock;
    bool is_open;
    const struct batch *batch;
};

static void await_masks_once(void *ctx)
{
    struct masks_gate *gate = ctx;
    pthread_mutex_lock(&gate->lock);
    if (!gate->is_open)
        gate->batch->await_masks(gate->batch->masks_ctx);
    gate->is_open = true;
    pthread_mutex_unlock(&gate->lock);
}

static enum rc start_by_data(struct team *team, struct batch *batch, struct err *err)
{
    struct masks_gate gate = {PTHREAD_MUTEX_INITIALIZER, false, batch};
    struct batch shared = *batch;
    shared.await_masks = await_masks_once;
    shared.masks_ctx = &gate;
    batch->is_replayed = false;
    return run_ranks(team, start_rank, &shared, true, err);
}

/* The ranks of one process. Masks are awaited by one thread, while all ranks compute. */
static enum rc start_here(struct team *team, struct batch *batch, struct err *err)
{
    if (batch->n_parts)
        return start_by_data(team, batch, err);
    const bool is_short = waits_on_device(team), starts_in_turn = is_short && model_replays(team->models[0], batch);
    enum rc rc = starts_in_turn ? run_in_turn(team, start_rank, batch, err) : run_ranks(team, start_rank, batch, true, err);
    if (rc || !team->models[0]->n_undrawn)
        return rc;
    batch->await_masks(batch->masks_ctx);
    return is_short ? run_in_turn(team, draw_rank, batch, err) : run_ranks(team, draw_rank, batch, true, err);
}

enum rc team_start(void *ctx, struct batch *batch, struct err *err)
{
    struct team *team = ctx;
    if (!team->hosts)
        return start_here(team, batch, err);
    struct err failure = {0};
    enum rc rc = hosts_is_first(team->hosts) ? send_step(team, batch, &failure) : RC_OK;
    if (!rc)
        rc = run_ranks(team, start_rank, batch, true, &failure);
    if (rc)
        hosts_end(team->hosts, failure.message);
    if (rc && err)
        *err = failure;
    return rc;
}

/* Ends the step of one rank; then all of its waits have ended, too. */
static enum rc finish_rank(struct model *model, void *batch, struct err *err)
{
    enum rc rc = model_finish(model, batch, err);
    const struct comm *comm = model->options.n_ranks > 1 ? model->backend->comm : NULL;
    return rc || !comm ? rc : comm->check(model->ctx, err);
}

enum rc team_finish(void *ctx, struct batch *batch, struct err *err)
{
    struct team *team = ctx;
    struct err failure = {0};
    if (team->n_all_ranks == 1)
        return finish_rank(team->models[0], batch, err);
    enum rc rc = run_in_turn(team, finish_rank, batch, &failure);
    if (!rc)
        rc = rank_check_compare(team, &failure);
    if (!rc && team->hosts && hosts_is_first(team->hosts))
        rc = hosts_await_done(team->hosts, team->n_steps, &failure);
    if (rc && team->hosts)
        hosts_end(team->hosts, failure.message);
    if (rc && err)
        *err = failure;
    return rc;
}

enum rc team_read_states(void *ctx, const struct batch *batch, uint32_t first, uint32_t n, float *rows, struct err *err)
{
    const uint32_t rank = batch_find_state(batch, &first);
    const struct batch own = batch->n_parts ? batch_part_of(batch, rank) : *batch;
    return model_read_states(((struct team *)ctx)->models[rank], &own, first, n, rows, err);
}

static enum rc check_piece(void *ctx, const struct item_piece *piece, struct err *err)
{
    return tower_check_piece(((struct team *)ctx)->models[0], piece, err);
}

void team_add_tower(const struct team *team, struct runner *runner)
{
    const struct model *m = team->models[0];
    if (!m->tower)
        return;
    runner->n_axes = program_n_axes(m->program);
    runner->spans = program_spans(m->program);
    runner->n_features = m->options.encoder_cache_tokens;
    runner->max_encoder_rows = m->options.max_encoder_rows;
    runner->n_tower_steps = m->program->is_by_data ? 0 : tower_n_steps(m);
    runner->feature_id = m->program->feature_id;
    runner->check_piece = check_piece;
}

enum rc team_check(void *ctx, struct err *err)
{
    return hosts_check(((struct team *)ctx)->hosts, err);
}

uint64_t team_allocations(void *ctx)
{
    const struct team *team = ctx;
    uint64_t n = 0;
    for (uint32_t rank = 0; rank < team->n_ranks; rank++)
        n += model_allocations(team->models[rank]);
    return n;
}
