/* engine_adapters.c: requests in flight that go on with another adapter. */
#include "../base/mem.h"
#include "engine_state.h"

static void move_free(struct engine *e, struct adapter_move *move)
{
    adapters_release(e->config.runner.adapters, move->to);
    mem_free(move);
}

enum rc engine_move_adapter(struct engine *e, uint64_t from, uint64_t to, struct err *err)
{
    struct adapters *adapters = e->config.runner.adapters;
    struct adapter *adapter = adapters ? adapters_find(adapters, to) : NULL;
    if (!adapter)
        return err_set(err, RC_INVALID, "load_adapter: the adapter is no longer loaded");
    struct adapter_move *move = mem_calloc(1, sizeof *move);
    if (!move) {
        adapters_release(adapters, adapter);
        return err_set(err, RC_MEMORY, "load_adapter: out of memory");
    }
    *move = (struct adapter_move){from, adapter, NULL};
    pthread_mutex_lock(&e->lock);
    struct adapter_move **last = &e->moves;
    while (*last)
        last = &(*last)->next;
    *last = move;
    atomic_store(&e->has_commands, true);
    pthread_mutex_unlock(&e->lock);
    return RC_OK;
}

/* Requests that have not entered the scheduler. */
static void move_held(struct engine *e, const struct adapter_move *move)
{
    for (struct request *r = e->held; r; r = r->next) {
        if (!r->adapter || r->adapter->number != move->from || r->beams)
            continue;
        for (uint32_t i = 0; i < r->spec.n; i++)
            sequence_forget_keys(r->sequences[i]);
        request_move(r, move->to);
    }
}

void engine_carry_out_moves(struct engine *e, struct adapter_move *moves)
{
    for (struct adapter_move *move = moves, *next; move; move = next) {
        next = move->next;
        move_held(e, move);
        scheduler_move_adapter(&e->scheduler, move->from, move->to);
        move_free(e, move);
    }
}

void engine_drop_moves(struct engine *e)
{
    for (struct adapter_move *move = e->moves, *next; move; move = next) {
        next = move->next;
        move_free(e, move);
    }
}
