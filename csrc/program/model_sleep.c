/* model_sleep.c: releases and restores the memory of weights and KV pages when a model sleeps and wakes. The backend keeps the
 * address ranges, so captured graphs and pointers stay valid. All other memory (tables, scales, staging) stays allocated. The
 * copy of the weights to or from the host overlaps with unmapping or mapping the pages. */
#include "model_state.h"

enum rc model_save(struct model *m, uint32_t parts, bool keeps, struct err *err)
{
    const struct backend *b = m->backend;
    if (!b->pool_release || !b->pool_restore || !b->pool_save || !b->pool_forget)
        return err_set(err, RC_UNSUPPORTED, "sleep: the backend \"%s\" cannot free memory; use level 0", b->name);
    enum rc rc = b->synchronize(m->ctx, err);
    return !rc && (parts & PART_WEIGHTS) && keeps ? b->pool_save(m->ctx, MEMORY_WEIGHTS, err) : rc;
}

enum rc model_release(struct model *m, uint32_t parts, bool keeps, struct err *err)
{
    const struct backend *b = m->backend;
    enum rc rc = RC_OK;
    if ((parts & PART_WEIGHTS) && !keeps)
        b->pool_forget(m->ctx, MEMORY_WEIGHTS);
    if (parts & PART_POOL)
        rc = b->pool_release(m->ctx, MEMORY_KV, err);
    if (!rc && (parts & PART_WEIGHTS) && (rc = b->pool_release(m->ctx, MEMORY_WEIGHTS, err)) &&
        (parts & PART_POOL & ~m->asleep))
        b->pool_restore(m->ctx, MEMORY_KV, NULL);
    if (rc)
        return rc;
    m->asleep |= parts;
    m->has_copy = (parts & PART_WEIGHTS) ? keeps : m->has_copy;
    return RC_OK;
}

enum rc model_restore(struct model *m, uint32_t parts, struct err *err)
{
    const struct backend *b = m->backend;
    enum rc rc = (parts & PART_WEIGHTS) ? b->pool_restore(m->ctx, MEMORY_WEIGHTS, err) : RC_OK;
    if (!rc && (parts & PART_POOL) && (rc = b->pool_restore(m->ctx, MEMORY_KV, err)) && (parts & PART_WEIGHTS)) {
        b->synchronize(m->ctx, NULL);
        b->pool_release(m->ctx, MEMORY_WEIGHTS, NULL);
    }
    if (!rc)
        rc = b->synchronize(m->ctx, err);
    if (!rc)
        m->asleep &= ~parts;
    return rc;
}
