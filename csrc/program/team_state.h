/* team_state.h: the inside of a team, shared by team.c (which makes and runs it) and team_sleep.c. */
#ifndef LLMPY_TEAM_STATE_H
#define LLMPY_TEAM_STATE_H

#include "../base/pool.h"
#include "team.h"
#include "update.h"

/* What host 0 tells all hosts to do between two steps, beside itself. */
enum team_call {
    TEAM_SAVE,    /* the first half of a release, which changes nothing: model_save */
    TEAM_RELEASE,
    TEAM_RESTORE,
    TEAM_UNDO,    /* of the order before, if it was carried out here: it failed on another host */
    TEAM_SUM,     /* struct weight_order from here on (team_weights.c): the sum of a weight's rows that no rank before has */
    TEAM_CHECK, TEAM_WRITE, /* of a tensor in a file, or of one that host 0 has */
    TEAM_SETTLE,  /* ends an update whose tensors are all written */
    TEAM_END_UPDATE,
    TEAM_TAP_OPEN, TEAM_TAP_RUN, TEAM_TAP_CLOSE /* struct tap_order (team_tap.c) */
};

struct team_order {
    uint32_t call, parts, keeps;
};

struct weight_order {
    uint32_t call, is_finite;
    uint32_t has_tensor;      /* host 0 has a tensor of this type and shape; else it is in the file `path`, or there is none */
    uint32_t dtype, n_dims;
    int64_t shape[UPDATE_MAX_DIMS];
    char texts[4088];         /* name, path and the tensor's name there, each with a 0 behind; the last two may be empty */
};

struct tap_order {
    uint32_t call, n_tokens, n_wanted;
};

struct team {
    uint32_t n_ranks;         /* in this process */
    uint32_t first_rank, n_all_ranks;
    struct hosts *hosts;      /* NULL: there are no other processes */
    char *message;            /* host 0: of a step, for the followers */
    uint64_t n_steps;
    struct model **models;    /* [n_ranks] */
    void **ctxs;              /* [n_ranks] contexts of the backend */
    struct err *errs;         /* [n_ranks] */
    char (*devices)[32];      /* [n_ranks] names, for errors */
    struct pool *pool;        /* NULL: one rank here */
    const struct comm *comm;  /* NULL: not connected */
    struct team_order done;   /* the last order that was carried out here; parts 0: none, or it is undone */
    uint32_t asleep_before;   /* it */
    struct program **others;  /* [n_all_ranks] with hosts: the programs of ranks on other hosts, NULL of those here */
    struct update *update;    /* a follower: of the orders so far; NULL: none */
    struct checkpoint *source; /* the file that they read last */
    struct taken_tap *taken;  /* a follower: what TEAM_TAP_RUN runs; NULL: nothing */
};

/* moves.c. Tells the other ranks where the first rank has made the slots; call it once all have their buffers. */
void team_join_slots(struct team *team);
void team_free_slots(struct team *team); /* before a model is destroyed */
/* team_weights.c */
enum rc team_obey_weights(struct team *team, const struct weight_order *order, uint64_t *number, struct err *err);
void team_end_update(struct team *team);
/* team_tap.c */
enum rc team_obey_tap(struct team *team, const struct tap_order *order, struct err *err);
void team_end_taps(struct team *team);
/* Puts the rank's name before an error. */
void team_name_rank(const struct team *team, uint32_t rank, struct err *err);

#endif
