/* driver_fetch.c: a call in which two engines stand between their steps. */
#include "driver_state.h"

/* The thread of one engine waits for that of the other, so two such calls in opposite directions would wait for ever. */
static pthread_mutex_t fetch_lock = PTHREAD_MUTEX_INITIALIZER;

struct fetch_call {
    struct driver *to;
    struct engine *from;
    const struct request_spec *spec;
    uint32_t *n_tokens;
};

static enum rc take(struct engine *to, void *ctx, struct err *err)
{
    struct fetch_call *call = ctx;
    return engine_fetch_prompt(to, call->from, call->spec, call->n_tokens, err);
}

static enum rc give(struct engine *from, void *ctx, struct err *err)
{
    struct fetch_call *call = ctx;
    call->from = from;
    return driver_call(call->to, take, call, err);
}

enum rc driver_fetch(struct driver *to, struct driver *from, const struct request_spec *spec, uint32_t *n_tokens,
                     struct err *err)
{
    struct fetch_call call = {.to = to, .spec = spec, .n_tokens = n_tokens};
    pthread_mutex_lock(&fetch_lock);
    enum rc rc = driver_call(from, give, &call, err);
    pthread_mutex_unlock(&fetch_lock);
    return rc;
}
