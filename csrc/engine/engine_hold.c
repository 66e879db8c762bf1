/* engine_hold.c: updates of the weights and sleep, which keep an engine from running steps. */
#include "tiers.h"

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
        rc = engine_refusal(e, err); /* the error says that the engine sleeps */
    if (!rc)
        rc = engine_end_flights(e, err);
    if (!rc)
        atomic_fetch_or(&e->holds, HOLD_UPDATE);
    engine_publish_stats(e);
    engine_unclaim(e);
    return rc;
}

bool engine_wants_digest(struct engine *e)
{
    return e->scheduler.outer && e->config.has_cache_seed;
}

enum rc engine_commit_weights(struct engine *e, bool recompute, const struct hash *weights, uint32_t *epoch,
                              struct err *err)
{
    enum rc rc = engine_claim(e, err);
    if (rc)
        return rc;
    rc = engine_end_flights(e, err); /* all tokens of a step are of one epoch */
    if (!rc) {
        *epoch = atomic_fetch_add(&e->epoch, 1) + 1;
        e->stats->weight_epoch = *epoch;
        const struct hash own = {.lo = *epoch}; /* enough where keys are secret to the engine */
        scheduler_new_epoch(&e->scheduler, recompute, e->config.has_cache_seed ? weights : &own);
        atomic_fetch_and(&e->holds, ~(uint32_t)(HOLD_UPDATE | HOLD_TORN));
    }
    engine_publish_stats(e);
    engine_unclaim(e);
    return rc;
}

enum rc engine_commit_drafter(struct engine *e, uint32_t *epoch, struct err *err)
{
    enum rc rc = engine_claim(e, err);
    if (rc)
        return rc;
    rc = engine_end_flights(e, err);
    for (uint32_t slot = 0; slot < e->config.max_num_seqs && !rc; slot++)
        if (e->scheduler.slots[slot])
            e->scheduler.slots[slot]->drafts.n_computed = 0;
    if (!rc)
        atomic_fetch_and(&e->holds, ~(uint32_t)HOLD_UPDATE);
    *epoch = engine_epoch(e);
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

/* ---- sleep -------------------------------------------------------------------------------------------------------------- */

static uint32_t parts_asleep(uint32_t holds)
{
    return (holds & HOLD_WEIGHTS ? PART_WEIGHTS : 0) | (holds & HOLD_POOL ? PART_POOL : 0);
}

static uint32_t holds_of(uint32_t parts)
{
    return (parts & PART_WEIGHTS ? HOLD_WEIGHTS : 0) | (parts & PART_POOL ? HOLD_POOL : 0);
}

/* Reports a failure of release or restore. A device fault may leave device memory half changed, so it poisons the engine. */
static enum rc fail(struct engine *e, enum rc rc, struct err *fault, struct err *err)
{
    if (rc == RC_DEVICE)
        return engine_poison(e, rc, fault, err);
    if (err)
        *err = *fault;
    return rc;
}

static enum rc check_alive(struct engine *e, struct err *err)
{
    struct err fault;
    if (!engine_fault(e, &fault))
        return RC_OK;
    if (err) {
        *err = fault;
        err->rc = RC_DEAD;
    }
    return RC_DEAD;
}

static enum rc check_sleep(struct engine *e, uint32_t level, uint32_t parts, struct err *err)
{
    if (level && (parts & PART_WEIGHTS) && (atomic_load(&e->holds) & HOLD_UPDATE))
        return err_set(err, RC_BUSY, "engine is busy: its weights are being updated; commit or abort the update first");
    if (level && parts && !e->config.runner.release)
        return err_set(err, RC_UNSUPPORTED, "sleep: this backend cannot free memory; use level 0");
    return RC_OK;
}

/* Allocates or frees parts of the first n programs that draft. All of them, or after a failure none. */
static enum rc drafters_do(struct engine *e, uint32_t parts, uint32_t n, bool releases, struct err *err)
{
    enum rc rc = RC_OK;
    struct err again = {0};
    uint32_t i = 0;
    for (; i < n && parts && !rc; i++) {
        const struct runner *drafter = &e->config.drafter.runners[i];
        rc = releases ? drafter->release(drafter->ctx, parts, true, err) : drafter->restore(drafter->ctx, parts, err);
    }
    if (rc && drafters_do(e, parts, i - 1, !releases, &again))
        err->rc = rc = RC_DEVICE;
    return rc;
}

/* The drafter's memory could not be brought back to the state of the model's. */
static enum rc unlike(struct err *err)
{
    err->rc = RC_DEVICE;
    return RC_DEVICE;
}

/* Frees parts of the model, and of the drafter those that are awake, or nothing. The drafter's weights always keep a copy on
 * the host, because updates do not bring them. */
static enum rc release(struct engine *e, uint32_t parts, bool keeps, struct err *err)
{
    const struct runner *model = &e->config.runner;
    uint32_t own = parts & ~parts_asleep(atomic_load(&e->holds)), n = e->config.drafter.n_runners;
    struct err again = {0};
    enum rc rc = drafters_do(e, own, n, true, err);
    if (rc || !(rc = model->release(model->ctx, parts, keeps, err)))
        return rc;
    return drafters_do(e, own, n, false, &again) ? unlike(err) : rc;
}

/* Allocates parts of both models again, or none. */
static enum rc restore(struct engine *e, uint32_t parts, struct err *err)
{
    const struct runner *model = &e->config.runner;
    struct err again = {0};
    enum rc rc = drafters_do(e, parts, e->config.drafter.n_runners, false, err);
    if (rc || !(rc = model->restore(model->ctx, parts, err)))
        return rc;
    return drafters_do(e, parts, e->config.drafter.n_runners, true, &again) ? unlike(err) : rc;
}

enum rc engine_sleep(struct engine *e, uint32_t level, uint32_t parts, struct err *err)
{
    struct err fault = {0};
    enum rc rc = engine_claim(e, err);
    if (rc)
        return rc;
    rc = check_alive(e, err);
    if (!rc)
        rc = check_sleep(e, level, parts, err);
    if (!rc)
        rc = engine_end_flights(e, err);
    if (rc)
        goto out;
    uint32_t asleep = parts_asleep(atomic_load(&e->holds)), going = level ? parts & (PART_WEIGHTS | PART_POOL) & ~asleep : 0;
    bool drops = level >= 2 && (parts & PART_WEIGHTS), keeps = level < 2;
    if (drops && !e->are_weights_gone)
        going |= PART_WEIGHTS; /* weights that already sleep: drops their copy on the host */
    if ((going & PART_POOL) && e->scheduler.tier && (rc = tiers_settle(e, keeps, &fault))) {
        rc = fail(e, rc, &fault, err);
        goto out;
    }
    if (going && (rc = release(e, going, keeps, &fault))) {
        rc = fail(e, rc, &fault, err);
        goto out;
    }
    if ((going & PART_POOL) && keeps) /* running sequences compute again what the host tier lacks */
        scheduler_lose_pages(&e->scheduler);
    else if (going & PART_POOL)
        scheduler_drop_cache(&e->scheduler, true);
    e->are_weights_gone |= drops;
    atomic_fetch_or(&e->holds, HOLD_SCHEDULING | holds_of(going) | (drops ? HOLD_TORN : 0u));
    if (level > atomic_load(&e->sleep_level))
        atomic_store(&e->sleep_level, level);
out:
    e->stats->sleep_level = atomic_load(&e->sleep_level);
    engine_publish_stats(e);
    engine_unclaim(e);
    return rc;
}

enum rc engine_wake(struct engine *e, uint32_t parts, struct err *err)
{
    struct err fault = {0};
    enum rc rc = engine_claim(e, err);
    if (rc)
        return rc;
    uint32_t coming = parts & parts_asleep(atomic_load(&e->holds));
    rc = check_alive(e, err);
    if (!rc && coming && (rc = restore(e, coming, &fault)))
        rc = fail(e, rc, &fault, err);
    if (rc)
        goto out;
    if (coming & PART_WEIGHTS)
        e->are_weights_gone = false; /* the weights have memory again */
    uint32_t holds = atomic_fetch_and(&e->holds, ~holds_of(coming)) & ~holds_of(coming);
    if ((parts & PART_SCHEDULING) || (coming && !parts_asleep(holds)))
        holds = atomic_fetch_and(&e->holds, ~(uint32_t)HOLD_SCHEDULING) & ~(uint32_t)HOLD_SCHEDULING;
    if (!(holds & ASLEEP))
        atomic_store(&e->sleep_level, 0);
out:
    e->stats->sleep_level = atomic_load(&e->sleep_level);
    engine_publish_stats(e);
    engine_unclaim(e);
    return rc;
}
