/* driver_state.h: the structs behind driver.h. driver.c has the thread and the calls to it, subscription.c has what readers
 * call, and driver_lock.c what both need. The driver's lock guards every field, unless a comment says otherwise. */
#ifndef LLMPY_DRIVER_STATE_H
#define LLMPY_DRIVER_STATE_H

#include "driver.h"

#include <pthread.h>

struct call;

struct driver {
    struct engine *engine;
    uint32_t max_queued;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wake;      /* wakes the thread: there is work */
    pthread_cond_t changed;   /* wakes waiting callers after a boundary that may have brought what they wait for */
    uint32_t n_holders;       /* the creator, subscriptions, notifiers */
    uint32_t n_submitting;    /* calls inside engine_submit */
    uint32_t n_waiting;       /* callers that wait for `changed`, except those in subscription_wait */
    bool is_kicked, is_quiet; /* kicked: there is a command; quiet: the last step found nothing to do, and no kick came since */
    bool was_idle;            /* the engine had no unfinished sequence at the last boundary */
    bool is_closing, is_joined, is_closed, is_dead;
    enum pause_mode pause;    /* the mode in force, from driver_pause and driver_begin_sleep together */
    bool is_pausing;          /* a pause of driver_pause is on */
    uint32_t n_sleepers;      /* calls between driver_begin_sleep and driver_end_sleep */
    bool is_held;             /* the pause has taken effect */
    uint64_t n_begun, n_done; /* turns of the thread begun, and ended; the end of a turn is a boundary */
    struct err fault;
    struct call *calls;
    struct notifier *notifiers;
    bool has_waited_subscription; /* a subscription with a caller in subscription_wait has output */
};

struct token_buffer { /* tokens of one sample that are not yet taken: arrays of `capacity` elements, one after another */
    char *data;
    uint32_t capacity;
};

struct pending {              /* output of one sample that is not yet taken */
    struct output output;     /* the pointers in it are set at the take */
    struct token_buffer buffers[2]; /* the thread fills one while the reader reads the other */
    struct draft_counts drafts; /* of the final output */
    uint32_t filled;          /* index of the buffer being filled */
    bool has_output;
};

struct subscription {
    struct driver *driver;
    struct notifier *notifier; /* NULL: none */
    struct subscription *prev, *next; /* in the notifier's list */
    uint64_t number;
    uint32_t n_samples, n_fresh, n_readers_waiting, n_logprobs;
    bool has_results, ends_only;
    bool is_announced;        /* ready to be taken: reported to the reader, or about to be, and not fully taken since */
    bool is_listed, is_done, is_dropped, is_lost;
    struct output scores;     /* prompt results, copied once */
    float *states;            /* result of a pooling request, copied once */
    char *error;              /* the first grammar error of the request's samples */
    struct pending pending[]; /* [n_samples] */
};

struct notifier {
    struct driver *driver;
    struct notifier *next;
    struct subscription *first, *last;
    uint32_t n_holders;       /* the creator, and every subscription that the notifier announces */
    int descriptor;
    bool is_signalled;
    uint32_t watched, states;
    uint64_t boundary;        /* UINT64_MAX: none */
};

static inline void driver_lock(struct driver *driver)
{
    pthread_mutex_lock(&driver->lock);
}

static inline void driver_unlock(struct driver *driver)
{
    pthread_mutex_unlock(&driver->lock);
}

uint64_t driver_n_queued(struct driver *driver); /* requests that wait in the engine */

/* Call these with the lock held. */
void driver_kick(struct driver *driver);
uint32_t driver_state_now(struct driver *driver);
void driver_hold(struct driver *driver);
/* Releases one reference and unlocks. */
void driver_unlock_release(struct driver *driver);
void notifier_update(struct notifier *notifier, uint32_t states, uint64_t boundary);
void notifier_signal(struct notifier *notifier); /* does nothing if the notifier has nothing to report */
void subscription_set_notifier(struct subscription *subscription, struct notifier *notifier);

struct subscription *subscription_create(struct driver *driver, const struct request_spec *spec, bool ends_only);
void subscription_free(struct subscription *subscription); /* does not release the subscription's reference to the driver */
/* Adds the engine's output of one sample to the subscription. */
void subscription_add(struct subscription *subscription, const struct output *output);
void subscription_announce(struct subscription *subscription);

#endif
