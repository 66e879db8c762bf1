/* moves.c: the host memory for pages outside the pool (struct moves of backend.h), and `move` and `poll_moves` of struct
 * runner. A slot has a page of each rank of the process, one behind the other, so a file or a connection gets a slot as one
 * piece of memory. The first rank's context makes it. */
#include "model_state.h"
#include "team_state.h"

#include <stddef.h>

static enum rc refuse(struct err *err, const char *why, const char *knob)
{
    err_set(err, RC_UNSUPPORTED, "host_cache_bytes: %s; %s", why, knob);
    err_name(err, "host_cache_bytes", NULL);
    return RC_UNSUPPORTED;
}

/* Whether moves know the distance of slots, and pools as sources. */
static bool knows_sources(const struct backend *backend)
{
    return backend->moves && backend->moves->size_bytes > offsetof(struct moves, lend) && backend->moves->lend;
}

size_t model_slot_bytes(const struct model *m)
{
    return (m->options.n_here ? m->options.n_here : 1) * m->layout.page_bytes;
}

enum rc model_make_slots(struct model *m, struct err *err)
{
    uint64_t n = m->options.host_cache_bytes / model_slot_bytes(m);
    if (!m->options.host_cache_bytes)
        return RC_OK;
    if (m->options.n_here && m->options.n_ranks > m->options.n_here)
        return refuse(err, "wanted a model of one host, have several (nnodes)", "use host_cache_bytes=0 or one host");
    if (!m->backend->moves || (m->options.n_here > 1 && !knows_sources(m->backend)))
        return refuse(err, "the backend has no copies to host memory", "use host_cache_bytes=0");
    m->n_slots = n < INT32_MAX ? (uint32_t)n : INT32_MAX;
    if (!m->n_slots) {
        err_set(err, RC_CONFIG, "host_cache_bytes must be 0 or at least %zu, a page of this model%s, got %llu.",
                model_slot_bytes(m), m->options.n_here > 1 ? " on all ranks" : "",
                (unsigned long long)m->options.host_cache_bytes);
        err_name(err, "host_cache_bytes", NULL);
        return RC_CONFIG;
    }
    size_t size_bytes = m->options.rank ? 0 : m->n_slots * model_slot_bytes(m);
    enum rc rc = m->backend->moves->create(m->ctx, size_bytes, &m->slots, err);
    m->n_slots = rc ? 0 : m->n_slots;
    return rc;
}

void model_free_slots(struct model *m)
{
    if (m->n_slots)
        m->backend->moves->destroy(m->ctx, m->options.rank ? NULL : m->slots, m->n_slots * model_slot_bytes(m));
    m->n_slots = 0;
}

void team_join_slots(struct team *team)
{
    const struct model *first = team->models[0];
    for (uint32_t rank = 1; rank < team->n_ranks && first->n_slots; rank++)
        team->models[rank]->slots = (char *)first->slots + rank * first->layout.page_bytes;
}

void team_free_slots(struct team *team)
{
    for (uint32_t rank = team->n_ranks; team->models && rank-- > 0;) /* the first rank's memory last */
        if (team->models[rank])
            model_free_slots(team->models[rank]);
}

uint32_t model_n_host_slots(const struct model *m)
{
    return m->n_slots;
}

void *model_host_slots(const struct model *m)
{
    return m->slots;
}

enum rc team_move(void *ctx, struct move_args *args, struct err *err)
{
    const struct team *team = ctx;
    const struct lent_pools *lent = args->source;
    enum rc rc = RC_OK;
    for (uint32_t rank = 0; rank < team->n_ranks && !rc; rank++) {
        const struct model *m = team->models[rank];
        args->source = lent ? lent->pools[rank] : NULL;
        args->pool = m->pool;
        args->host = m->slots;
        args->page_bytes = m->layout.page_bytes;
        args->slot_bytes = model_slot_bytes(m);
        rc = m->backend->moves->move(m->ctx, args, err);
        if (rc)
            team_name_rank(team, rank, err);
    }
    return rc;
}

enum rc team_poll_moves(void *ctx, struct move_state *state, struct err *err)
{
    const struct team *team = ctx;
    struct move_state own = {0};
    enum rc rc = RC_OK;
    *state = (struct move_state){.ended = {UINT64_MAX, UINT64_MAX}};
    for (uint32_t rank = 0; rank < team->n_ranks && !rc; rank++) {
        const struct model *m = team->models[rank];
        rc = m->backend->moves->poll(m->ctx, &own, err);
        for (uint32_t way = MOVE_OUT; way <= MOVE_IN && !rc; way++) {
            state->ended[way] = own.ended[way] < state->ended[way] ? own.ended[way] : state->ended[way];
            state->seconds[way] = own.seconds[way] > state->seconds[way] ? own.seconds[way] : state->seconds[way];
            state->bytes[way] += own.bytes[way];
        }
        state->source_bytes += own.source_bytes;
        state->source_seconds = own.source_seconds > state->source_seconds ? own.source_seconds : state->source_seconds;
        if (rc)
            team_name_rank(team, rank, err);
    }
    return rc;
}

static enum rc lend(void *ctx, void *reader, struct lent_pools *pools, struct err *err)
{
    const struct team *team = ctx, *other = reader;
    const struct backend *backend = team->models[0]->backend;
    enum rc rc = RC_OK;
    if (team->n_ranks != other->n_ranks || team->hosts || other->hosts || other->models[0]->backend != backend ||
        !knows_sources(backend))
        return err_set(err, RC_UNSUPPORTED, "lend: wanted engines of one backend with equally many ranks");
    for (uint32_t rank = 0; rank < team->n_ranks && !rc; rank++) {
        rc = backend->moves->lend(team->models[rank]->ctx, other->models[rank]->ctx, err);
        pools->pools[rank] = team->models[rank]->pool;
    }
    return rc;
}

static enum rc share(void *ctx, uint32_t rank, int *descriptor, uint64_t *offset, uint64_t *size_bytes, struct err *err)
{
    const struct model *m = team_model(ctx, rank);
    size_t place = 0, size = 0;
    enum rc rc = m->backend->moves->share(m->ctx, m->pool, descriptor, &place, &size, err);
    *offset = place;
    *size_bytes = size;
    return rc;
}

static enum rc import(void *ctx, uint32_t rank, int descriptor, uint64_t offset, uint64_t size_bytes,
                      struct imported **imported, const void **pool, struct err *err)
{
    const struct team *team = ctx;
    const struct import_args args = {.device = team->devices[rank], .descriptor = descriptor, .size_bytes = size_bytes};
    void *memory = NULL;
    enum rc rc = team->models[rank]->backend->peers->import_memory(&args, imported, &memory, err);
    *pool = rc ? NULL : (const char *)memory + offset;
    return rc;
}

static void release_import(void *ctx, struct imported *imported)
{
    team_model(ctx, 0)->backend->peers->release_memory(imported);
}

void team_add_lending(const struct team *team, struct runner *runner)
{
    const struct backend *backend = team->models[0]->backend;
    runner->n_ranks = team->n_ranks;
    if (team->hosts || !knows_sources(backend))
        return;
    runner->lend = lend;
    if (!backend->moves->share || !backend->peers)
        return;
    runner->share = share;
    runner->import = import;
    runner->release_import = release_import;
}
