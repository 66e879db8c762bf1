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

enum rc team_weights_elsewhere(struct team *team, const struct weight_call *call, uint64_t *sum, struct err *err)
{
    struct weight_order order = {.call = call->call, .is_finite = call->is_finite};
    if (sum)
        *sum = 0;
    if (!team->hosts)
        return RC_OK;
    int n = snprintf(order.texts, sizeof order.texts, "%s%c%s%c%s", call->name, 0, call->path ? call->path : "", 0,
                     call->path ? call->stored : "");
    if (n < 0 || (size_t)n >= sizeof order.texts)
        return err_set(err, RC_INVALID, "weight '%.80s': its name and its file's path are longer than %zu letters", call->name,
                       sizeof order.texts);
    enum rc rc = hosts_send_order(team->hosts, &order, sizeof order, err);
    return rc ? rc : hosts_await_results(team->hosts, sum, err);
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
    if (rc)
        return rc;
    if (order->call == TEAM_CHECK)
        return update_check(team->update, name, &tensor, order->is_finite, &fate, err);
    if (order->call == TEAM_WRITE)
        return update_write(team->update, name, &tensor, false, &fate, err);
    struct tensor_sum sum = {0};
    rc = update_sum(team->update, name, *path ? &tensor : NULL, &sum, &fate, err);
    *number = sum.sum;
    return rc;
}
