/* moves.c: the host memory for pages outside the pool (struct moves of backend.h), and `move` and `poll_moves` of struct
 * runner. Models of one rank only. */
#include "model_state.h"
#include "team.h"

static enum rc refuse(struct err *err, const char *why, const char *knob)
{
    err_set(err, RC_UNSUPPORTED, "host_cache_bytes: %s; %s", why, knob);
    err_name(err, "host_cache_bytes", NULL);
    return RC_UNSUPPORTED;
}

enum rc model_make_slots(struct model *m, struct err *err)
{
    uint64_t n = m->options.host_cache_bytes / m->layout.page_bytes;
    if (!m->options.host_cache_bytes)
        return RC_OK;
    if (m->options.n_ranks > 1)
        return refuse(err, "wanted a model of one rank, have several", "use host_cache_bytes=0 or tensor_parallel_size=1");
    if (!m->backend->moves)
        return refuse(err, "the backend has no copies to host memory", "use host_cache_bytes=0");
    m->n_slots = n < INT32_MAX ? (uint32_t)n : INT32_MAX;
    if (!m->n_slots) {
        err_set(err, RC_CONFIG, "host_cache_bytes must be 0 or at least %zu, a page of this model, got %llu.",
                m->layout.page_bytes, (unsigned long long)m->options.host_cache_bytes);
        err_name(err, "host_cache_bytes", NULL);
        return RC_CONFIG;
    }
    enum rc rc = m->backend->moves->create(m->ctx, m->n_slots * m->layout.page_bytes, &m->slots, err);
    m->n_slots = rc ? 0 : m->n_slots;
    return rc;
}

void model_free_slots(struct model *m)
{
    if (m->slots)
        m->backend->moves->destroy(m->ctx, m->slots, m->n_slots * m->layout.page_bytes);
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
    const struct model *m = team_model(ctx, 0);
    args->pool = m->pool;
    args->host = m->slots;
    args->page_bytes = m->layout.page_bytes;
    return m->backend->moves->move(m->ctx, args, err);
}

enum rc team_poll_moves(void *ctx, struct move_state *state, struct err *err)
{
    const struct model *m = team_model(ctx, 0);
    return m->backend->moves->poll(m->ctx, state, err);
}
