#define _GNU_SOURCE
#include "driver_state.h"

#include "../base/clock.h"
#include "../base/mem.h"

#include <signal.h>
#include <string.h>

#define TAKEN_AT_ONCE 64u

struct call {
    enum rc (*function)(struct engine *, void *, struct err *);
    void *ctx;
    struct err *err;
    enum rc rc;
    bool is_done;
    struct call *next;
};

/* ---- the thread ---- */

static bool may_step(const struct driver *d)
{
    bool runs = d->pause == PAUSE_NONE || (d->pause == PAUSE_WAIT && !d->is_held);
    return runs && !d->is_quiet && !d->is_dead && !engine_holds(d->engine) && engine_has_unfinished(d->engine);
}

static void die(struct driver *d, enum rc rc, const struct err *fault)
{
    driver_lock(d);
    d->fault = *fault;
    d->fault.rc = rc;
    d->is_dead = true;
    driver_unlock(d);
    engine_abort(d->engine, NULL, 0, NULL); /* ends the requests that the engine itself has not ended */
}

/* Moves all output of the engine into the subscriptions; frees dropped subscriptions whose request has ended. */
static void deliver(struct driver *d)
{
    struct output output[TAKEN_AT_ONCE];
    struct err fault;
    uint32_t n;
    do {
        enum rc rc = engine_take(d->engine, false, output, TAKEN_AT_ONCE, &n, NULL);
        if (!d->is_dead && engine_fault(d->engine, &fault)) /* a fault may occur while engine_take carries out commands */
            die(d, fault.rc, &fault);
        if (rc || !n)
            return;
        driver_lock(d);
        for (uint32_t i = 0; i < n; i++) {
            struct subscription *subscription = output[i].owner;
            subscription_add(subscription, &output[i]);
            if (subscription->is_done && subscription->is_dropped) {
                subscription_free(subscription);
                d->n_holders--; /* never the last reference: the creator keeps one while the thread runs */
            }
        }
        driver_unlock(d);
    } while (n);
}

static void run_calls(struct driver *d, struct call *calls)
{
    for (struct call *call = calls, *next; call; call = next) {
        next = call->next;
        enum rc rc = call->function(d->engine, call->ctx, call->err);
        driver_lock(d);
        call->rc = rc;
        call->is_done = true;
        pthread_cond_broadcast(&d->changed);
        driver_unlock(d);
    }
}

/* Passes a boundary: updates the driver's state and notifies notifiers and waiting callers. */
static void pass_boundary(struct driver *d, enum pause_mode pause, bool has_stepped, bool progressed)
{
    driver_lock(d);
    d->n_done = d->n_begun;
    d->is_quiet = has_stepped && !progressed && !d->is_kicked;
    d->was_idle = !engine_has_unfinished(d->engine);
    bool has_run_out = d->was_idle || (has_stepped && !progressed);
    if (pause != PAUSE_NONE && pause == d->pause)
        d->is_held |= pause != PAUSE_WAIT || has_run_out;
    uint32_t states = d->n_waiting || d->notifiers ? driver_state_now(d) : 0;
    for (struct notifier *notifier = d->notifiers; notifier; notifier = notifier->next) {
        notifier_update(notifier, states, d->n_done);
        notifier_signal(notifier);
    }
    if (d->n_waiting || d->has_waited_subscription)
        pthread_cond_broadcast(&d->changed);
    d->has_waited_subscription = false;
    driver_unlock(d);
}

/* One turn of the thread: runs calls and commands, at most one step, and delivers output. The device is idle during calls and
 * after a turn without a step. False once the driver has been stopped and every request has ended. */
static bool turn(struct driver *d)
{
    struct err fault = {0};
    bool progressed = false;
    driver_lock(d);
    while (!d->is_kicked && !may_step(d))
        pthread_cond_wait(&d->wake, &d->lock);
    d->is_kicked = false;
    d->n_begun++;
    bool is_closing = d->is_closing && !d->n_submitting, steps = !d->is_closing && may_step(d);
    enum pause_mode pause = d->pause;
    struct call *calls = d->calls;
    d->calls = NULL;
    driver_unlock(d);
    if (is_closing)
        engine_abort(d->engine, NULL, 0, NULL);
    enum rc rc = calls ? engine_settle(d->engine, &fault) : RC_OK;
    run_calls(d, calls);
    steps &= !engine_holds(d->engine); /* a call may have changed the holds */
    if (!rc && steps)
        rc = engine_step(d->engine, &progressed, &fault);
    if (!rc && (!steps || !engine_has_unfinished(d->engine)))
        rc = engine_settle(d->engine, &fault);
    if (rc && !d->is_dead)
        die(d, rc, &fault);
    deliver(d);
    pass_boundary(d, pause, steps, progressed);
    return !(is_closing && !engine_has_unfinished(d->engine));
}

static void *run(void *ctx)
{
    struct driver *d = ctx;
    while (turn(d))
        ;
    driver_lock(d);
    d->is_closed = true;
    struct call *calls = d->calls;
    d->calls = NULL;
    for (struct call *call = calls, *next; call; call = next) {
        next = call->next;
        call->rc = err_set(call->err, RC_CLOSED, "engine is closed");
        call->is_done = true;
    }
    for (struct notifier *notifier = d->notifiers; notifier; notifier = notifier->next) {
        notifier_update(notifier, driver_state_now(d), d->n_done);
        notifier_signal(notifier);
    }
    pthread_cond_broadcast(&d->changed);
    driver_unlock(d);
    return NULL;
}

/* ---- life ---- */

/* Starts the thread with all signals blocked: they belong to the program. */
static enum rc start(struct driver *d, struct err *err)
{
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int code = pthread_create(&d->thread, NULL, run, d);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (code)
        return err_set(err, RC_MEMORY, "engine: no more threads");
    pthread_setname_np(d->thread, "llmpy-engine");
    return RC_OK;
}

enum rc driver_create(struct engine *engine, uint32_t max_queued, struct driver **result, struct err *err)
{
    struct driver *d = mem_calloc(1, sizeof *d);
    if (!d)
        return err_set(err, RC_MEMORY, "engine: out of memory");
    cond_init_monotonic(&d->changed);
    pthread_cond_init(&d->wake, NULL);
    pthread_mutex_init(&d->lock, NULL);
    d->engine = engine;
    d->max_queued = max_queued;
    d->n_holders = 1;
    d->was_idle = true;
    enum rc rc = start(d, err);
    if (rc) {
        driver_lock(d);
        driver_unlock_release(d);
        return rc;
    }
    *result = d;
    return RC_OK;
}

void driver_stop(struct driver *d)
{
    driver_lock(d);
    d->is_closing = true;
    driver_kick(d);
    driver_unlock(d);
}

void driver_close(struct driver *d)
{
    driver_stop(d);
    driver_lock(d);
    bool joins = !d->is_joined;
    d->is_joined = true;
    d->n_waiting++;
    while (!joins && !d->is_closed)
        pthread_cond_wait(&d->changed, &d->lock);
    d->n_waiting--;
    driver_unlock(d);
    if (joins)
        pthread_join(d->thread, NULL);
}

void driver_release(struct driver *d)
{
    driver_lock(d);
    driver_unlock_release(d);
}

/* ---- commands ---- */

/* Refuses a submission if the driver is closed, dead or full; else counts it as begun. */
static enum rc admit(struct driver *d, struct err *err)
{
    driver_lock(d);
    enum rc rc = RC_OK;
    uint64_t n;
    if (d->is_closing) {
        rc = err_set(err, RC_CLOSED, "engine is closed");
    } else if (d->is_dead) {
        *err = d->fault;
        rc = err->rc = RC_DEAD;
    } else if (d->max_queued && (n = driver_n_queued(d)) >= d->max_queued) {
        rc = err_set(err, RC_QUEUE_FULL, "queue: wanted fewer than %u waiting requests, have %llu; raise max_queued_requests",
                     d->max_queued, (unsigned long long)n);
        err->code = (int64_t)n;
    }
    if (!rc) {
        d->n_submitting++;
        d->was_idle = false;
    }
    driver_unlock(d);
    return rc;
}

enum rc driver_submit(struct driver *d, struct notifier *notifier, const struct request_spec *spec, bool ends_only,
                      struct subscription **result, struct err *err)
{
    struct request_spec owned = *spec;
    struct subscription *subscription = NULL;
    uint64_t number;
    enum rc rc = admit(d, err);
    if (rc)
        return rc;
    if (!(owned.owner = subscription = subscription_create(d, spec, ends_only)))
        rc = err_set(err, RC_MEMORY, "engine: out of memory");
    driver_lock(d);
    if (subscription) {
        driver_hold(d);
        subscription_set_notifier(subscription, notifier);
    }
    driver_unlock(d);
    if (!rc && !(rc = engine_submit(d->engine, &owned, &number, err)))
        *result = subscription;
    driver_lock(d);
    d->n_submitting--;
    if (!rc)
        subscription->number = number;
    driver_kick(d);
    if (rc && subscription) {
        subscription_set_notifier(subscription, NULL);
        subscription_free(subscription);
        d->n_holders--; /* never the last reference: the caller holds one */
    }
    driver_unlock(d);
    return rc;
}

void driver_abort_all(struct driver *d)
{
    driver_lock(d);
    if (!d->is_closed) {
        engine_abort(d->engine, NULL, 0, NULL);
        driver_kick(d);
    }
    driver_unlock(d);
}

enum rc driver_reset_prefix_cache(struct driver *d, bool recompute_running, struct err *err)
{
    driver_lock(d);
    enum rc rc = d->is_closed ? err_set(err, RC_CLOSED, "engine is closed")
                              : engine_reset_prefix_cache(d->engine, recompute_running, err);
    if (!rc)
        driver_kick(d);
    driver_unlock(d);
    return rc;
}

enum rc driver_move_adapter(struct driver *d, uint64_t from, uint64_t to, struct err *err)
{
    driver_lock(d);
    enum rc rc = d->is_closed ? err_set(err, RC_CLOSED, "engine is closed") : engine_move_adapter(d->engine, from, to, err);
    if (!rc)
        driver_kick(d);
    driver_unlock(d);
    return rc;
}

/* ---- pauses, lock held ---- */

static void tighten_pause(struct driver *d, enum pause_mode mode)
{
    if (d->pause == PAUSE_NONE && mode == PAUSE_WAIT) {
        engine_hold_new(d->engine, true);
    } else if (mode == PAUSE_ABORT && d->pause != PAUSE_ABORT) {
        engine_abort(d->engine, NULL, 0, NULL);
        d->is_held = false; /* not in effect until the requests have ended */
    }
    if (mode == PAUSE_ABORT || d->pause == PAUSE_NONE)
        d->pause = mode;
}

static void lift_pause(struct driver *d)
{
    if (d->is_pausing || d->n_sleepers)
        return;
    d->is_held = false;
    d->pause = PAUSE_NONE;
    engine_hold_new(d->engine, false);
}

void driver_pause(struct driver *d, enum pause_mode mode)
{
    driver_lock(d);
    if (!d->is_closing) {
        d->is_pausing = mode != PAUSE_NONE;
        if (mode == PAUSE_NONE)
            lift_pause(d);
        else
            tighten_pause(d, mode);
        driver_kick(d);
    }
    driver_unlock(d);
}

void driver_begin_sleep(struct driver *d, enum pause_mode mode)
{
    driver_lock(d);
    d->n_sleepers++;
    if (!d->is_closing) {
        tighten_pause(d, mode);
        driver_kick(d);
    }
    driver_unlock(d);
}

void driver_end_sleep(struct driver *d)
{
    driver_lock(d);
    d->n_sleepers--;
    if (!d->is_closing) {
        lift_pause(d);
        driver_kick(d);
    }
    driver_unlock(d);
}

bool driver_is_pausing(struct driver *d)
{
    driver_lock(d);
    bool result = d->is_pausing;
    driver_unlock(d);
    return result;
}

uint64_t driver_next_boundary(struct driver *d)
{
    driver_lock(d);
    uint64_t boundary = d->is_closed ? d->n_done : d->n_begun + 1;
    driver_kick(d);
    driver_unlock(d);
    return boundary;
}

uint64_t driver_boundary(struct driver *d)
{
    driver_lock(d);
    uint64_t boundary = d->n_done;
    driver_unlock(d);
    return boundary;
}

uint32_t driver_state(struct driver *d)
{
    driver_lock(d);
    uint32_t states = driver_state_now(d);
    driver_unlock(d);
    return states;
}

enum rc driver_fault(struct driver *d, struct err *err)
{
    driver_lock(d);
    enum rc rc = d->is_dead ? d->fault.rc : RC_OK;
    if (rc)
        *err = d->fault;
    driver_unlock(d);
    return rc;
}

enum rc driver_call(struct driver *d, enum rc (*function)(struct engine *, void *, struct err *), void *ctx, struct err *err)
{
    struct call call = {.function = function, .ctx = ctx, .err = err};
    driver_lock(d);
    if (d->is_closed) {
        driver_unlock(d);
        return err_set(err, RC_CLOSED, "engine is closed");
    }
    struct call **place = &d->calls;
    while (*place)
        place = &(*place)->next;
    *place = &call;
    driver_kick(d);
    while (!call.is_done)
        pthread_cond_wait(&d->changed, &d->lock);
    driver_unlock(d);
    return call.rc;
}
