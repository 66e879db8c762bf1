#include "team_weights.h"

#include "../base/mem.h"
#include "model_state.h"
#include "team_state.h"

#include <stdio.h>
#include <string.h>

enum rc team_update_begin(struct team *team, struct update **update, struct err *err)
{
    struct model *models[TEAM_MAX_RANKS] = {NULL};
    if (!team->hosts)
        return update_begin(team->models, team->n_ranks, update, err);
    memcpy(models + team->first_rank, team->models, team->n_ranks * sizeof *models);
    return update_begin_of(models, (const struct program *const *)team->others, team->n_all_ranks, update, err);
}

/* ---- host 0 ------------------------------------------------------------------------------------------------------------ */

/* Copies items of a tensor, counted from the outermost dimension on, as if it had no gaps. */
static enum rc copy_items(const struct update_tensor *t, uint64_t first, uint64_t n, char *to, struct err *err)
{
    const size_t item = dtype_info(t->dtype)->block_bytes;
    uint32_t outer = t->n_dims;
    uint64_t run = 1; /* items one after the other */
    while (outer && (t->shape[outer - 1] == 1 || t->strides[outer - 1] == (int64_t)run))
        run *= (uint64_t)t->shape[--outer];
    enum rc rc = RC_OK;
    for (uint64_t end = first + n, some; first < end && !rc; first += some, to += some * item) {
        uint64_t left = first / run;
        int64_t at = (int64_t)(first % run);
        some = run - first % run < end - first ? run - first % run : end - first;
        for (uint32_t i = outer; i-- > 0; left /= (uint64_t)t->shape[i])
            at += (int64_t)(left % (uint64_t)t->shape[i]) * t->strides[i];
        if (t->read)
            rc = t->read(t->read_ctx, (uint64_t)at * item, some * item, to, err);
        else
            memcpy(to, (const char *)t->data + at * (int64_t)item, some * item);
    }
    return rc;
}

static enum rc read_tensor(void *ctx, uint64_t first, size_t n_bytes, void *to, struct err *err)
{
    const struct update_tensor *tensor = ctx;
    uint64_t item = dtype_info(tensor->dtype)->block_bytes, most = item;
    for (uint32_t i = 0; i < tensor->n_dims; i++)
        most *= (uint64_t)tensor->shape[i];
    if (first % item || n_bytes % item || first > most || n_bytes > most - first)
        return err_set(err, RC_INVALID, "order: a tensor of %llu bytes has no %zu bytes at %llu", (unsigned long long)most,
                       n_bytes, (unsigned long long)first);
    return copy_items(tensor, first / item, n_bytes / item, to, err);
}

enum rc team_weights_elsewhere(struct team *team, const struct weight_call *call, uint64_t *sum, struct err *err)
{
    const struct update_tensor *t = call->path ? NULL : call->tensor;
    struct weight_order order = {.call = call->call, .is_finite = call->is_finite, .has_tensor = t != NULL};
    if (sum)
        *sum = 0;
    if (!team->hosts)
        return RC_OK;
    if (t && !t->is_host)
        return err_set(err, RC_UNSUPPORTED, "weight '%.160s' is in device memory, from which other hosts (nnodes) cannot read; "
                       "pass tensors in host memory, or a directory that all hosts see", call->name);
    if (t) {
        order.dtype = t->dtype;
        order.n_dims = t->n_dims;
        memcpy(order.shape, t->shape, sizeof order.shape);
    }
    int n = snprintf(order.texts, sizeof order.texts, "%s%c%s%c%s", call->name, 0, call->path ? call->path : "", 0,
                     call->path ? call->stored : "");
    if (n < 0 || (size_t)n >= sizeof order.texts)
        return err_set(err, RC_INVALID, "weight '%.80s': its name and its file's path are longer than %zu letters", call->name,
                       sizeof order.texts);
    const struct hosts_memory memory = {.read = read_tensor, .ctx = (void *)(uintptr_t)t};
    enum rc rc = hosts_send_order(team->hosts, &order, sizeof order, err);
    rc = rc ? rc : hosts_await_results(team->hosts, t ? &memory : NULL, sum, err);
    if (rc == RC_WEIGHTS)
        err_name(err, call->name, NULL);
    return rc;
}

/* ---- the other hosts --------------------------------------------------------------------------------------------------- */

void team_view_stored(const struct checkpoint_tensor *stored, struct update_tensor *t)
{
    t->dtype = stored->dtype;
    snprintf(t->type, sizeof t->type, "%.20s", stored->type);
    t->n_dims = stored->n_dims < UPDATE_MAX_DIMS ? stored->n_dims : UPDATE_MAX_DIMS;
    t->is_host = true;
    int64_t step = 1;
    for (uint32_t i = t->n_dims; i-- > 0; step *= t->shape[i]) {
        t->shape[i] = (int64_t)stored->shape[i];
        t->strides[i] = step;
    }
}

struct stored {
    const struct checkpoint *checkpoint;
    const struct checkpoint_tensor *tensor;
};

static enum rc read_stored(void *ctx, uint64_t first, size_t n_bytes, void *to, struct err *err)
{
    const struct stored *stored = ctx;
    return checkpoint_read(stored->checkpoint, stored->tensor, first, n_bytes, to, err);
}

/* Opens the file unless it is the last one. */
static enum rc find_stored(struct team *team, const char *path, const char *name, struct stored *stored,
                           struct update_tensor *tensor, struct err *err)
{
    if (!team->source || strcmp(checkpoint_path(team->source, 0), path) != 0) {
        checkpoint_close(team->source);
        team->source = NULL;
        enum rc rc = checkpoint_open(&path, 1, &team->source, err);
        if (rc)
            return rc;
    }
    stored->checkpoint = team->source;
    if (!(stored->tensor = checkpoint_find(team->source, name)))
        return err_set(err, RC_WEIGHTS, "weight '%.160s': %.160s has no such tensor here", name, path);
    team_view_stored(stored->tensor, tensor);
    tensor->read = read_stored;
    tensor->read_ctx = stored;
    return checkpoint_has(stored->checkpoint, stored->tensor, err);
}

static enum rc read_from_first(void *ctx, uint64_t first, size_t n_bytes, void *to, struct err *err)
{
    return hosts_read(ctx, first, n_bytes, to, err);
}

/* The tensor that host 0 has. False: it is none. */
static bool view_sent(const struct team *team, const struct weight_order *order, struct update_tensor *t)
{
    *t = (struct update_tensor){.dtype = order->dtype, .n_dims = order->n_dims, .is_host = true, .read = read_from_first,
                                .read_ctx = team->hosts};
    if (!dtype_info(t->dtype) || t->n_dims > UPDATE_MAX_DIMS)
        return false;
    int64_t step = 1;
    for (uint32_t i = t->n_dims; i-- > 0;) {
        t->shape[i] = order->shape[i];
        t->strides[i] = step;
        if (t->shape[i] < 0 || __builtin_mul_overflow(step, t->shape[i], &step))
            return false;
    }
    return true;
}

void team_end_update(struct team *team)
{
    update_end(team->update);
    checkpoint_close(team->source);
    team->update = NULL;
    team->source = NULL;
}

static enum rc settle(struct team *team, struct err *err)
{
    enum rc rc = team->update ? update_finish(team->update, err) : RC_OK;
    if (!rc && team->update)
        rc = update_settle(team->update, err);
    team_end_update(team);
    return rc;
}

enum rc team_obey_weights(struct team *team, const struct weight_order *order, uint64_t *number, struct err *err)
{
    const char *end = order->texts + sizeof order->texts;
    if (end[-1] || end[-2] || end[-3])
        return err_set(err, RC_INVALID, "order: its texts have no end");
    const char *name = order->texts, *path = name + strlen(name) + 1, *key = path + strlen(path) + 1;
    struct update_tensor tensor = {0};
    struct stored stored;
    enum update_fate fate;
    enum rc rc = RC_OK;
    if (order->call == TEAM_SETTLE)
        return settle(team, err);
    if (order->call == TEAM_END_UPDATE) {
        team_end_update(team);
        return RC_OK;
    }
    if (!team->update)
        rc = team_update_begin(team, &team->update, err);
    if (!rc && *path)
        rc = find_stored(team, path, key, &stored, &tensor, err);
    else if (!rc && order->has_tensor && !view_sent(team, order, &tensor))
        rc = err_set(err, RC_INVALID, "order: type %u and %u dimensions are no tensor", order->dtype, order->n_dims);
    if (rc)
        return rc;
    if (order->call == TEAM_CHECK)
        return update_check(team->update, name, &tensor, order->is_finite, &fate, err);
    if (order->call == TEAM_WRITE)
        return update_write(team->update, name, &tensor, &fate, err);
    struct tensor_sum sum = {0};
    rc = update_sum(team->update, name, *path || order->has_tensor ? &tensor : NULL, &sum, &fate, err);
    *number = sum.sum;
    return rc;
}
