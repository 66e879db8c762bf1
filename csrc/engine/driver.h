/* driver.h: a thread that runs an engine, and subscriptions: a subscription delivers the output of one request to its reader.
 * The thread steps while there is work and sleeps otherwise. It never waits for a reader: output that the reader has not taken
 * accumulates in the request's subscription, outside the engine. A reader waits for one subscription, or for many through a
 * notifier. The notifier's file descriptor becomes readable when there is something to take; it is written at most once between
 * two calls of notifier_take. Every function may be called from any thread; one leaf mutex is held for a few microseconds. A
 * subscription has one reader at a time. Semantics: docs/use/async-engine.md. */
#ifndef LLMPY_DRIVER_H
#define LLMPY_DRIVER_H

#include "engine.h"

struct driver;
struct notifier;
struct subscription;

enum driver_state {
    DRIVER_IDLE = 1,      /* every request has ended and its subscription is complete */
    DRIVER_HAS_ROOM = 2,  /* fewer than max_queued sequences wait */
    DRIVER_PAUSED = 4,    /* a pause has taken effect: no step runs */
    DRIVER_DEAD = 8,      /* a fault has ended all requests; no step will run again */
    DRIVER_CLOSED = 16,   /* the thread has ended */
    DRIVER_BOUNDARY = 32, /* the step boundary that a notifier watches has passed; only notifiers report it */
};

enum pause_mode { PAUSE_NONE = 0, PAUSE_WAIT, PAUSE_KEEP, PAUSE_ABORT };

/* Starts the thread. From here on only this thread may drive the engine. The engine must outlive driver_close. max_queued: the
 * most waiting sequences; 0: no limit. */
enum rc driver_create(struct engine *engine, uint32_t max_queued, struct driver **driver, struct err *err);
/* Ends all requests and then the thread. Subscriptions can still be read afterwards. May be called twice. */
void driver_close(struct driver *driver);
/* The same without waiting for the end. */
void driver_stop(struct driver *driver);
/* Releases the creator's reference; every subscription and notifier holds one, too. Call it after driver_close. */
void driver_release(struct driver *driver);

/* Calls engine_submit and creates the subscription for the request's output, which the caller owns. ends_only: announce the
 * subscription only when all samples have finished. RC_QUEUE_FULL: err->code is the number of waiting sequences. */
enum rc driver_submit(struct driver *driver, struct notifier *notifier, const struct request_spec *spec, bool ends_only,
                      struct subscription **subscription, struct err *err);
/* Aborts every request at the next boundary. */
void driver_abort_all(struct driver *driver);
enum rc driver_move_adapter(struct driver *driver, uint64_t from, uint64_t to, struct err *err);
enum rc driver_reset_prefix_cache(struct driver *driver, bool recompute_running, struct err *err);
/* During a pause, PAUSE_ABORT tightens it; any other mode leaves it as it is. PAUSE_NONE resumes. */
void driver_pause(struct driver *driver, enum pause_mode mode);
bool driver_is_pausing(struct driver *driver);
/* driver_begin_sleep starts the pause that engine_sleep needs, as driver_pause does; driver_end_sleep ends it. Steps resume
 * when all these pauses and that of driver_pause have ended. Each begin needs its end. */
void driver_begin_sleep(struct driver *driver, enum pause_mode mode);
void driver_end_sleep(struct driver *driver);
/* Number of the first boundary at which all commands given so far have been carried out. */
uint64_t driver_next_boundary(struct driver *driver);
uint64_t driver_boundary(struct driver *driver); /* the last one that has passed */
uint32_t driver_state(struct driver *driver);    /* of enum driver_state */
/* Waits until one of the states holds, or until the boundary has passed (0: none). False on timeout. */
bool driver_wait(struct driver *driver, uint32_t states, uint64_t boundary, double seconds);
/* The fault that killed the engine; RC_OK if the engine lives. */
enum rc driver_fault(struct driver *driver, struct err *err);
/* Runs a function on the thread between two steps and waits for its end. RC_CLOSED: the thread has ended. */
enum rc driver_call(struct driver *driver, enum rc (*function)(struct engine *, void *, struct err *), void *ctx,
                    struct err *err);

/* Copies the blocks of a prompt that the pool of `from` has into the pool of `to` while both stand between two steps. One such
 * call of a process runs at a time. n_tokens: leading tokens whose blocks `to` has now. */
enum rc driver_fetch(struct driver *to, struct driver *from, const struct request_spec *spec, uint32_t *n_tokens,
                     struct err *err);
/* The same between two processes, over a connected local socket that does not block. The owner answers a reader that has asked
 * for the prompt; its steps stop until the reader has its copies, at most some seconds. */
enum rc driver_lend(struct driver *from, const struct request_spec *spec, int socket, struct err *err);
enum rc driver_borrow(struct driver *to, const struct request_spec *spec, int socket, uint32_t *n_tokens, struct err *err);

uint64_t subscription_number(const struct subscription *subscription);
/* Takes what has arrived since the last take, for at most max samples. Pointers stay valid until the next take or
 * subscription_drop. RC_MEMORY: some output was lost, and the request has ended. */
enum rc subscription_take(struct subscription *subscription, struct output *output, uint32_t max, uint32_t *n, struct err *err);
/* Takes from a subscription of one sample that has only more tokens, all of one epoch. Otherwise it returns false and takes
 * nothing. */
bool subscription_take_more(struct subscription *subscription, struct output *output);
/* Waits until there is something to take; false on timeout. */
bool subscription_wait(struct subscription *subscription, double seconds);
void subscription_abort(struct subscription *subscription);
/* As engine_end_wait. */
void subscription_end_wait(struct subscription *subscription);
/* From here on this notifier announces the subscription (NULL: no notifier does); ends_only as in driver_submit. */
void subscription_move(struct subscription *subscription, struct notifier *notifier, bool ends_only);
/* Drops a subscription that is no longer read: aborts its request if that still runs, and frees its memory. */
void subscription_drop(struct subscription *subscription);

enum rc notifier_create(struct driver *driver, struct notifier **notifier, struct err *err);
int notifier_descriptor(const struct notifier *notifier);
/* Takes the numbers of requests with new output since their last take; each is reported once. *states: the watched
 * states that have come about; they are no longer watched. */
void notifier_take(struct notifier *notifier, uint64_t *numbers, uint32_t max, uint32_t *n, uint32_t *states);
/* Reports each of these states once, and the boundary (0: none), even if they hold already. */
void notifier_watch(struct notifier *notifier, uint32_t states, uint64_t boundary);
/* Subscriptions of the notifier stay usable. */
void notifier_destroy(struct notifier *notifier);

#endif
