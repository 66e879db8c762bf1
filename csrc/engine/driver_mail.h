/* driver_mail.h: what driver.c and mail.c share: the structs behind driver.h. The driver's lock guards everything, unless a
 * comment says otherwise. */
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
    pthread_cond_t wake;      /* for the thread: something is to be done */
    pthread_cond_t changed;   /* for waiting readers: a boundary has passed with something that they wait for */
    uint32_t n_holders;       /* the creator, mails, channels */
    uint32_t n_submitting;    /* calls inside engine_submit */
    uint32_t n_waiting;       /* for `changed`, other than for a mail */
    bool is_kicked, is_quiet; /* quiet: a step found nothing to do, and nothing has happened since */
    bool was_idle;            /* at the last boundary */
    bool is_closing, is_joined, is_closed, is_dead;
    enum pause_mode pause;    /* what holds of all that pause */
    bool is_pausing;          /* a caller */
    uint32_t n_sleepers;      /* calls that put the engine to sleep */
    bool is_held;             /* the pause has taken effect */
    uint64_t n_begun, n_done; /* boundaries */
    struct err fault;
    struct call *calls;
    struct channel *channels;
    bool has_waited_mail;     /* a mail that somebody waits for has news */
};

struct paper { /* tokens not yet taken, of one sample: arrays of `capacity` elements one after another */
    char *data;
    uint32_t capacity;
};

struct letter {
    struct news news;         /* its pointers are set when it is taken */
    struct paper papers[2];   /* the thread fills one while the reader looks at the other */
    uint32_t filled;          /* which one is being filled */
    bool has_news;
};

struct mail {
    struct driver *driver;
    struct channel *channel;  /* NULL: none */
    struct mail *prev, *next; /* in the channel's list */
    uint64_t number;
    uint32_t n_samples, n_fresh, n_readers_waiting, n_logprobs;
    bool has_results, ends_only;
    bool is_announced;        /* told of, or about to be, and not taken since */
    bool is_listed, is_done, is_dropped, is_lost;
    struct news scores;       /* prompt results, copied once */
    float *states;            /* of a pooling request, copied once */
    char *error;              /* of a grammar, the first one's */
    struct letter letters[];  /* [n_samples] */
};

struct channel {
    struct driver *driver;
    struct channel *next;
    struct mail *first, *last;
    uint32_t n_holders;       /* the creator, and every mail that it tells of */
    int descriptor;
    bool is_signalled;
    uint32_t watched, states;
    uint64_t boundary;        /* UINT64_MAX: none */
};

/* With the lock held. */
void driver_kick(struct driver *driver);
uint32_t driver_state_now(struct driver *driver);
void driver_hold(struct driver *driver);
/* Gives up one hold; unlocks. */
void driver_unlock_release(struct driver *driver);
void channel_update(struct channel *channel, uint32_t states, uint64_t boundary);
void channel_signal(struct channel *channel); /* if it has something to tell */
void mail_set_channel(struct mail *mail, struct channel *channel);

struct mail *mail_create(struct driver *driver, const struct request_spec *spec, bool ends_only);
void mail_free(struct mail *mail); /* without a hold on the driver */
/* Takes over what the engine tells of one sample. */
void mail_add(struct mail *mail, const struct news *news);
void mail_announce(struct mail *mail);

#endif
