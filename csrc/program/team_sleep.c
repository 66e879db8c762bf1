/* team_sleep.c: `release` and `restore` of struct runner for all ranks of all hosts: each acts on all of them or on none. */
#include "model_state.h"
#include "team_state.h"

#include <string.h>

typedef enum rc (*rank_call)(struct model *model, uint32_t parts, bool keeps, struct err *err);

static enum rc restore(struct model *model, uint32_t parts, bool keeps, struct err *err)
{
    (void)keeps;
    return model_restore(model, parts, err);
}

/* Sends the parts to sleep again with what they had. */
static void release_again(struct model *model, uint32_t parts)
{
    if (!model_save(model, parts, model->has_copy, NULL))
        model_release(model, parts, model->has_copy, NULL);
}

static void undo_rank(const struct team *team, uint32_t rank, const struct team_order *order)
{
    struct model *model = team->models[rank];
    if (order->call == TEAM_RELEASE)
        model_restore(model, order->parts & ~team->asleep_before, NULL);
    else if (order->call == TEAM_RESTORE)
        release_again(model, order->parts);
}

/* Carries out an order on all ranks of this host, or on none. */
static enum rc obey(struct team *team, const struct team_order *order, struct err *err)
{
    static const rank_call CALLS[] = {[TEAM_SAVE] = model_save, [TEAM_RELEASE] = model_release, [TEAM_RESTORE] = restore};
    uint32_t rank = 0;
    enum rc rc = RC_OK;
    if (order->call == TEAM_UNDO) {
        for (; rank < team->n_ranks && team->done.parts; rank++)
            undo_rank(team, rank, &team->done);
        team->done = (struct team_order){0};
        return RC_OK;
    }
    team->done = (struct team_order){0};
    team->asleep_before = team->models[0]->asleep;
    while (rank < team->n_ranks && !(rc = CALLS[order->call](team->models[rank], order->parts, order->keeps, err)))
        rank++;
    if (!rc) {
        team->done = *order;
        return RC_OK;
    }
    team_name_rank(team, rank, err);
    while (rank-- > 0)
        undo_rank(team, rank, order);
    return rc;
}

/* Carries out an order on all hosts. */
static enum rc obey_everywhere(struct team *team, const struct team_order *order, struct err *err)
{
    struct err theirs = {0};
    if (!team->hosts)
        return obey(team, order, err);
    enum rc rc = hosts_send_order(team->hosts, order, sizeof *order, err);
    if (rc)
        return rc;
    rc = obey(team, order, err);
    enum rc others = hosts_await_results(team->hosts, NULL, NULL, &theirs);
    if (!rc && others && err)
        *err = theirs;
    return rc ? rc : others;
}

static enum rc order_all(struct team *team, enum team_call call, uint32_t parts, bool keeps, struct err *err)
{
    enum rc rc = obey_everywhere(team, &(struct team_order){call, parts, keeps}, err);
    if (rc && team->hosts)
        obey_everywhere(team, &(struct team_order){.call = TEAM_UNDO}, NULL);
    return rc;
}

size_t team_most_order_bytes(void)
{
    return sizeof(struct weight_order);
}

static enum rc obey_sleep(struct team *team, const struct team_order *order, struct err *err)
{
    if (order->parts & ~(uint32_t)(PART_WEIGHTS | PART_POOL))
        return err_set(err, RC_INVALID, "order: there are no parts %u", order->parts);
    return obey(team, order, err);
}

enum rc team_obey(struct team *team, const void *bytes, size_t n_bytes, uint64_t *number, struct err *err)
{
    union {
        uint32_t call;
        struct team_order sleep;
        struct weight_order weights;
        struct tap_order tap;
    } order = {.call = UINT32_MAX};
    *number = 0;
    if (n_bytes >= sizeof order.call && n_bytes <= sizeof order)
        memcpy(&order, bytes, n_bytes);
    bool is_sleep = order.call <= TEAM_UNDO, is_tap = order.call >= TEAM_TAP_OPEN;
    size_t wanted = is_sleep ? sizeof order.sleep : is_tap ? sizeof order.tap : sizeof order.weights;
    if (order.call > TEAM_TAP_CLOSE || n_bytes != wanted)
        return err_set(err, RC_INVALID, "order: there is no call %u of %zu bytes", order.call, n_bytes);
    if (is_sleep)
        return obey_sleep(team, &order.sleep, err);
    return is_tap ? team_obey_tap(team, &order.tap, err) : team_obey_weights(team, &order.weights, number, err);
}

enum rc team_release(void *ctx, uint32_t parts, bool keeps, struct err *err)
{
    enum rc rc = order_all(ctx, TEAM_SAVE, parts, keeps, err);
    return rc ? rc : order_all(ctx, TEAM_RELEASE, parts, keeps, err);
}

enum rc team_restore(void *ctx, uint32_t parts, struct err *err)
{
    return order_all(ctx, TEAM_RESTORE, parts, true, err);
}
