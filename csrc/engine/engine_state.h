/* engine_state.h: the engine's private struct, shared by engine.c (requests, steps, output) and engine_hold.c (updates of the
 * weights and sleep, which keep steps from running). */
#ifndef LLMPY_ENGINE_STATE_H
#define LLMPY_ENGINE_STATE_H

#include "drafting.h"
#include "grammar.h"
#include "outbox.h"
#include "scheduler.h"

#include <pthread.h>

#define N_BUCKETS 4096u

/* A step in flight: from its scheduling until its results are processed. */
struct flight {
    struct batch batch;
    struct task_owner *owners;     /* [max_tasks] */
    struct states_owner *states;   /* [max_seqs] */
    uint32_t n_states_owners;
    struct step_record record;
    double started, host_seconds;
    uint64_t n_kv_events;          /* number of cache events noted once the step was scheduled */
};

struct engine {
    struct engine_config config;
    struct sequence_context context;
    struct scheduler scheduler;
    struct drafter drafter;
    struct flight flights[2];      /* used alternately */
    uint32_t max_in_flight;        /* 2: a step is scheduled while the device computes the previous one */
    uint64_t n_started, n_ended;   /* numbers of flights */
    double last_done;              /* time of the last results */
    double awaited_seconds;        /* time that the step being started has waited for its masks */
    struct outbox outbox;
    struct statistics *statistics;
    struct engine_stats *stats;    /* the totals in `statistics`; the driver's thread changes them */
    bool are_weights_gone;         /* asleep at level 2: the weights are neither on the device nor on the host */
    bool is_warm;
    double created;
    struct request *held;          /* requests not yet entered (behind the gate, or grammar still compiling), in their order */
    uint64_t n_held;               /* number of their sequences */

    pthread_mutex_t lock;          /* guards what follows, up to the blank line; never held longer than O(1) */
    struct request *inbox_first, *inbox_last;
    struct request *map[N_BUCKETS]; /* every request not yet released, by number */
    uint64_t last_number, abort_upto;
    uint64_t gate;                  /* requests with a higher number may not enter yet */
    bool wants_reset, wants_recompute, wants_abort;
    struct adapter_move *moves;     /* in their order */

    atomic_bool has_commands, is_busy, is_dead;
    atomic_uint holds;             /* bits of enum engine_hold */
    atomic_uint epoch;             /* epoch of the weights */
    atomic_uint sleep_level;
    atomic_uint_least64_t n_live;  /* sequences that are not finished */
    struct grammars *_Atomic grammars; /* made with the first grammar, then constant; NULL: none yet */
    struct err fault;              /* the fault that poisoned the engine; constant once is_dead is set */
};

/* Requests with the adapter of number `from` go on with `to`, which the order holds. */
struct adapter_move {
    uint64_t from;
    struct adapter *to;
    struct adapter_move *next;
};
/* Carries moves out, if there are any, and frees them. No step is in flight. */
void engine_carry_out_moves(struct engine *engine, struct adapter_move *moves);
void engine_drop_moves(struct engine *engine); /* frees those that were not carried out */
/* Begins a driving call; RC_BUSY while there is another one. */
enum rc engine_claim(struct engine *engine, struct err *err);
void engine_unclaim(struct engine *engine);
/* The functions below need the claim. engine_end_flights waits for the steps in flight and processes their results. */
enum rc engine_end_flights(struct engine *engine, struct err *err);
void engine_publish_stats(struct engine *engine);
/* The record of a step that is scheduled but not started. before: the scheduler as it was before the step. */
struct step_record engine_describe_step(const struct engine *engine, const struct batch *batch, const struct scheduler *before,
                                        double begun);
enum rc engine_poison(struct engine *engine, enum rc rc, const struct err *fault, struct err *err);

#endif
