/* driver_mail.h: the structs behind driver.h. driver.c has the thread and the calls to it, mail.c has what readers call, and
 * driver_lock.c what both need. The driver's lock guards every field, unless a comment says otherwise. */
#ifndef LLMPY_DRIVER_MAIL_H
#define LLMPY_DRIVER_MAIL_H

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
    uint32_t n_holders;       /* the creator, mails, channels */
    uint32_t n_submitting;    /* calls inside engine_submit */
    uint32_t n_waiting;       /* callers that wait for `changed`, except those in mail_wait */
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
    struct channel *channels;
    bool has_waited_mail;     /* a mail with a caller in mail_wait has news */
};

struct paper { /* tokens of one sample that are not yet taken: arrays of `capacity` elements, one after another */
    char *data;
    uint32_t capacity;
};

struct letter {
    struct news news;         /* the pointers in it are set at the take */
    struct paper papers[2];   /* the thread fills one while the reader reads the other */
    uint32_t filled;          /* index of the paper being filled */
    bool has_news;
};

struct mail {
    struct driver *driver;
    struct channel *channel;  /* NULL: none */
    struct mail *prev, *next; /* in the channel's list */
    uint64_t number;
    uint32_t n_samples, n_fresh, n_readers_waiting, n_logprobs;
    bool has_results, ends_only;
    bool is_announced;        /* ready to be taken: reported to the reader, or about to be, and not fully taken since */
    bool is_listed, is_done, is_dropped, is_lost;
    struct news scores;       /* prompt results, copied once */
    float *states;            /* result of a pooling request, copied once */
    char *error;              /* the first grammar error of the request's samples */
    struct letter letters[];  /* [n_samples] */
};

struct channel {
    struct driver *driver;
    struct channel *next;
    struct mail *first, *last;
    uint32_t n_holders;       /* the creator, and every mail that the channel announces */
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

/* The deadline for pthread_cond_timedwait; seconds are clamped to 0 .. 1e6. */
struct timespec deadline_after(double seconds);
uint64_t driver_n_queued(struct driver *driver); /* requests that wait in the engine */

/* Call these with the lock held. */
void driver_kick(struct driver *driver);
uint32_t driver_state_now(struct driver *driver);
void driver_hold(struct driver *driver);
/* Releases one reference and unlocks. */
void driver_unlock_release(struct driver *driver);
void channel_update(struct channel *channel, uint32_t states, uint64_t boundary);
void channel_signal(struct channel *channel); /* does nothing if the channel has nothing to report */
void mail_set_channel(struct mail *mail, struct channel *channel);

struct mail *mail_create(struct driver *driver, const struct request_spec *spec, bool ends_only);
void mail_free(struct mail *mail); /* does not release the mail's reference to the driver */
/* Adds the engine's news of one sample to the mail. */
void mail_add(struct mail *mail, const struct news *news);
void mail_announce(struct mail *mail);

#endif
