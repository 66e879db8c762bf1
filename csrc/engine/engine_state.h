/* engine_state.h: the inside of an engine, shared by engine.c (requests, steps, news) and engine_hold.c (what keeps steps from
 * running: updates of the weights, sleep). */
#ifndef LLMPY_ENGINE_STATE_H
#define LLMPY_ENGINE_STATE_H

#include "grammar.h"
#include "outbox.h"
#include "scheduler.h"

#include <pthread.h>

#define N_BUCKETS 4096u

/* A step from its scheduling until its results are taken in. */
struct flight {
    struct batch batch;
    struct task_owner *owners;     /* [max_tasks] */
    struct states_owner *states;   /* [max_seqs] */
    uint32_t n_states_owners;
    struct step_record record;
    double started, host_seconds;
    uint64_t n_kv_events;          /* noted when it had been scheduled */
};

struct engine {
    struct engine_config config;
    struct sequence_context context;
    struct scheduler scheduler;
    struct flight flights[2];      /* take turns */
    uint32_t max_in_flight;        /* 2: a step is scheduled while the device computes the one before */
    uint64_t n_started, n_ended;   /* flights */
    double last_done;              /* when the last results came */
    double awaited_seconds;        /* of the step being started, for masks of its draws */
    struct outbox outbox;
    struct statistics *statistics;
    struct engine_stats *stats;    /* the totals in there, which the driver changes */
    bool are_weights_gone;         /* asleep at level 2: nowhere */
    bool is_warm;
    double created;
    struct request *held;          /* behind the gate, in their order */
    uint64_t n_held;               /* their sequences */

    pthread_mutex_t lock;          /* guards what follows, up to the blank line; never held longer than O(1) */
    struct request *inbox_first, *inbox_last;
    struct request *map[N_BUCKETS]; /* every request not yet released, by number */
    uint64_t last_number, abort_upto;
    uint64_t gate;                  /* requests behind this number may not enter yet */
    bool wants_reset, wants_recompute, wants_abort;

    atomic_bool has_commands, is_busy, is_dead;
    atomic_uint holds;             /* of enum engine_hold */
    atomic_uint epoch;             /* of the weights */
    atomic_uint sleep_level;
    atomic_uint_least64_t n_live;  /* sequences that are not finished */
    struct grammars *_Atomic grammars; /* made with the first grammar, then constant; NULL: none yet */
    struct err fault;              /* what poisoned the engine; constant once is_dead is set */
};

/* One driving call at a time: RC_BUSY while there is another. */
enum rc engine_claim(struct engine *engine, struct err *err);
void engine_unclaim(struct engine *engine);
/* Those below: claimed. Waits for the steps in flight and takes their results in. */
enum rc engine_end_flights(struct engine *engine, struct err *err);
void engine_publish_stats(struct engine *engine);
enum rc engine_poison(struct engine *engine, enum rc rc, const struct err *fault, struct err *err);

#endif
