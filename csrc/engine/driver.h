/* driver.h: a thread that runs an engine, and the mail that brings readers what their requests produce. The thread steps while
 * there is work, sleeps otherwise, and waits for nobody: what a reader has not taken merges in the request's mail, outside the
 * engine. Readers wait for one mail, or through a channel for many: its file descriptor becomes readable, written at most once
 * between two calls of channel_take. All calls may come from any thread; one leaf mutex is held for a few microseconds. A mail
 * has one reader at a time. Semantics: docs/use/async-engine.md. */
#ifndef LLMPY_DRIVER_H
#define LLMPY_DRIVER_H

#include "engine.h"

struct driver;
struct channel;
struct mail;

enum driver_state {
    DRIVER_IDLE = 1,      /* every request has ended and its mail is complete */
    DRIVER_HAS_ROOM = 2,  /* fewer than max_queued sequences wait */
    DRIVER_PAUSED = 4,    /* a pause has taken effect: nothing runs */
    DRIVER_DEAD = 8,      /* a fault has ended all requests; nothing will run any more */
    DRIVER_CLOSED = 16,   /* the thread has ended */
    DRIVER_BOUNDARY = 32, /* a step boundary that was asked for has passed; of channels only */
};

enum pause_mode { PAUSE_NONE = 0, PAUSE_WAIT, PAUSE_KEEP, PAUSE_ABORT };

/* Starts the thread. From here on nobody else may drive the engine, which must outlive driver_close. max_queued: 0 is no
 * limit. */
enum rc driver_create(struct engine *engine, uint32_t max_queued, struct driver **driver, struct err *err);
/* Ends all requests and then the thread, whose last mail can still be read. Twice is fine. */
void driver_close(struct driver *driver);
/* The same without waiting for the end. */
void driver_stop(struct driver *driver);
/* Gives up the creator's hold; mails and channels have their own. After driver_close. */
void driver_release(struct driver *driver);

/* engine_submit, with a mail for the answers that the caller owns. ends_only: tell of it only when all samples have finished.
 * RC_QUEUE_FULL: code is the number of sequences that wait. */
enum rc driver_submit(struct driver *driver, struct channel *channel, const struct request_spec *spec, bool ends_only,
                      struct mail **mail, struct err *err);
/* Ends every request at the next boundary. */
void driver_abort_all(struct driver *driver);
enum rc driver_reset_prefix_cache(struct driver *driver, bool recompute_running, struct err *err);
/* A pause may be tightened to PAUSE_ABORT; otherwise the first one holds. PAUSE_NONE resumes. */
void driver_pause(struct driver *driver, enum pause_mode mode);
bool driver_is_pausing(struct driver *driver);
/* The pause that a call of engine_sleep needs before it: from here to the end as driver_pause has it, beside a pause that is
 * there or comes meanwhile. Each beginning has its end. */
void driver_begin_sleep(struct driver *driver, enum pause_mode mode);
void driver_end_sleep(struct driver *driver);
/* Number of the first boundary that comes after everything commanded so far has been acted on. */
uint64_t driver_next_boundary(struct driver *driver);
uint64_t driver_boundary(struct driver *driver); /* the last one that has passed */
uint32_t driver_state(struct driver *driver);    /* of enum driver_state */
/* Waits until one of the states holds, or until the boundary has passed (0: none). False when the time is over. */
bool driver_wait(struct driver *driver, uint32_t states, uint64_t boundary, double seconds);
/* What killed the engine; RC_OK if it lives. */
enum rc driver_fault(struct driver *driver, struct err *err);
/* Runs a function on the thread between two steps and waits for its end. RC_CLOSED: the thread has ended. */
enum rc driver_call(struct driver *driver, enum rc (*function)(struct engine *, void *, struct err *), void *ctx,
                    struct err *err);

uint64_t mail_number(const struct mail *mail);
/* What has come since the last take: at most max samples. Pointers stay valid until the next take, or mail_drop. RC_MEMORY:
 * some of it was lost, and the request ended. */
enum rc mail_take(struct mail *mail, struct news *news, uint32_t max, uint32_t *n, struct err *err);
/* The same for a mail of one sample that has nothing to tell but more tokens of one epoch; false, and nothing taken, for any
 * other. */
bool mail_take_more(struct mail *mail, struct news *news);
/* Waits until there is something to take; false when the time is over. */
bool mail_wait(struct mail *mail, double seconds);
void mail_abort(struct mail *mail);
/* From here on this channel tells of it, NULL for none; ends_only as in driver_submit. */
void mail_move(struct mail *mail, struct channel *channel, bool ends_only);
/* Nobody reads it any more: its request ends, if it has not, and all its memory is freed. */
void mail_drop(struct mail *mail);

enum rc channel_create(struct driver *driver, struct channel **channel, struct err *err);
int channel_descriptor(const struct channel *channel);
/* Requests whose mail has something new since it was last taken, each told of once, and the watched states that came about,
 * which are watched no longer. */
void channel_take(struct channel *channel, uint64_t *numbers, uint32_t max, uint32_t *n, uint32_t *states);
/* Tells once of any of these states, and of the boundary (0: none), even if they hold already. */
void channel_watch(struct channel *channel, uint32_t states, uint64_t boundary);
/* Its mails go on without it. */
void channel_destroy(struct channel *channel);

#endif
