/* engine_hold.c: what keeps an engine from running steps: updates of the weights, torn weights, sleep. */
#include "engine_state.h"

#define ASLEEP (HOLD_SCHEDULING | HOLD_WEIGHTS | HOLD_POOL)

uint32_t engine_holds(struct engine *e)
{
    return atomic_load(&e->holds);
}

uint32_t engine_epoch(struct engine *e)
{
    return atomic_load(&e->epoch);
}

enum rc engine_refusal(struct engine *e, struct err *err)
{
    uint32_t holds = atomic_load(&e->holds);
    if (holds & ASLEEP)
        return err_set(err, RC_ASLEEP, "engine sleeps at level %u; call wake_up()", (unsigned)atomic_load(&e->sleep_level));
    if (holds & HOLD_UPDATE)
        return err_set(err, RC_BUSY, "engine is busy: its weights are being updated; commit or abort the update first");
    if (holds & HOLD_TORN)
        return err_set(err, RC_WEIGHTS_MISSING, "weights are incomplete since epoch %u; commit a full update",
                       engine_epoch(e));
    return RC_OK;
}

/* ---- weights ------------------------------------------------------------------------------------------------------------ */

enum rc engine_hold_steps(struct engine *e, struct err *err)
{
    enum rc rc = engine_claim(e, err);
    if (rc)
        return rc;
    if (atomic_load(&e->holds) & HOLD_WEIGHTS)
        rc = engine_refusal(e, err);
    if (!rc)
        rc = engine_end_flights(e, err);
    if (!rc)
        atomic_fetch_or(&e->holds, HOLD_UPDATE);
    engine_publish_stats(e);
    engine_unclaim(e);
    return rc;
}

enum rc engine_commit_weights(struct engine *e, bool recompute, uint32_t *epoch, struct err *err)
{
    enum rc rc = engine_claim(e, err);
    if (rc)
        return rc;
    rc = engine_end_flights(e, err); /* a step is of one epoch, and so are the tokens that it draws */
    if (!rc) {
        *epoch = atomic_fetch_add(&e->epoch, 1) + 1;
        e->stats->weight_epoch = *epoch;
        scheduler_new_epoch(&e->scheduler, recompute);
        atomic_fetch_and(&e->holds, ~(uint32_t)(HOLD_UPDATE | HOLD_TORN));
    }
    engine_publish_stats(e);
    engine_unclaim(e);
    return rc;
}

void engine_abort_update(struct engine *e, bool is_torn)
{
    if (is_torn)
        atomic_fetch_or(&e->holds, HOLD_TORN);
    atomic_fetch_and(&e->holds, ~(uint32_t)HOLD_UPDATE);
}
