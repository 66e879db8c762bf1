/* comm.h: functions for ranks, the contexts of several devices or processes that run one model together. A part of backend.h,
 * which includes it behind the structures that it uses. */
#ifndef LLMPY_COMM_H
#define LLMPY_COMM_H

/* Several contexts of one backend that run one model together: its ranks. One thread runs each rank. All ranks run the same
 * operations over the same batch in the same order, with their own columns of some values. `meet` and `gather` are meetings:
 * each rank calls the same ones in the same order, and a meeting ends on a rank when all ranks have come to it. They only
 * enqueue. A meeting that fails, or is aborted, leaves the ranks unable to meet again.
 *
 * A rank stores into the memory of the others, which lies at the same place in each rank's shared memory. It may do so as soon
 * as it has passed the meeting before, so the core keeps the target free from that meeting on. */
enum comm_memory { COMM_ARENA = 0 /* values */, COMM_LOGITS = 1, COMM_MEMORIES = 2 };

struct comm_options {
    double timeout_seconds;    /* a rank that waits longer for another rank fails */
    uint32_t first_meeting;    /* for tests: meetings are counted from this number on */
    uint32_t first_rank, n_all_ranks; /* of the first context; of all processes. Used if there is an exchange */
    void *exchange_ctx;
    /* NULL: all ranks are in this process. Each process calls it once a gather. It sends a block of bytes to every other
     * process, and fills `others` [max_bytes] with their blocks. is_to_first: only the first process gets blocks. */
    enum rc (*exchange)(void *ctx, const void *own, size_t own_bytes, bool is_to_first, void *others, size_t max_bytes,
                        size_t *others_bytes, struct err *err);
    /* With an exchange: an error if another process is lost. Long waits ask it; ctx is exchange_ctx. */
    enum rc (*check)(void *ctx, struct err *err);
    /* With an exchange: a process group that has one member in each process. NULL: the process has no NCCL. */
    const char *nccl;          /* path of the library */
    const uint8_t *group_id;   /* [GROUP_ID_BYTES], equal in all processes */
    uint32_t process, n_processes; /* with an exchange: number of this one; count */
};

struct meet_args {
    uint32_t slot, n_tasks;    /* of the last step that sampled: the tasks whose tokens this rank has drawn */
    uint32_t first_task;       /* of them; all ranks get the tokens of all ranks */
};

enum gather_kind {
    GATHER_COLUMNS,            /* columns [first, first + n_columns) of all rows, to all ranks */
    GATHER_ROWS,               /* rows with first_id <= token id < end_id, all columns, to all ranks */
    GATHER_ROUTES,             /* parts j of row i where first_id <= routes[i][j].expert < end_id, to all ranks; a row of whole
                                * has n_chosen equal parts */
    GATHER_TO_FIRST,           /* GATHER_COLUMNS of float32 logits, to rank 0 only */
    GATHER_TO_OWNERS           /* the same to the row's owner only: rank r of R owns the rows from n_rows * r / R on, rounded
                                * down, up to those of rank r + 1 */
};

/* Copies what this rank has of `whole` to other ranks. On return of the meeting, whole is complete. */
struct gather_args {
    uint32_t kind, n_rows;     /* kind: enum gather_kind */
    struct view whole;         /* lies in shared memory: COMM_LOGITS for logits, else COMM_ARENA */
    uint32_t first, n_columns; /* GATHER_COLUMNS and logits: this rank's columns; with n_chosen: of each part */
    struct view a, b;          /* GATHER_COLUMNS: this rank's columns are a, or a + b, and whole gets them, too; width 0: there
                                * is no such term. Without a they are in whole already. a and b may be those columns of whole */
    const int32_t *token_ids;  /* [n_rows], GATHER_ROWS */
    int32_t first_id, end_id;  /* GATHER_ROWS: token ids; GATHER_ROUTES: experts */
    const struct route *routes; /* [n_rows][route_stride], GATHER_ROUTES */
    uint32_t route_stride, n_chosen; /* n_chosen: equal parts of a row; GATHER_COLUMNS: 0 or those that have the columns */
    const struct rms_norm_args *norm; /* FUSION_GATHER_NORM, or NULL: then run it; its x is whole */
    bool is_stored;            /* an earlier operation has stored to all ranks: only meet */
    uint32_t unit;             /* GATHER_COLUMNS: the columns of every rank begin and end at multiples of it; 0: of 1 */
    const struct combine_args *combine; /* FUSION_GATHER_COMBINE, or NULL: GATHER_ROUTES, then run it. Its results are whole, of
                                * which other ranks' parts may stay as they are then */
};

/* Functions for ranks. They take the contexts of all ranks in order, or one of them. */
struct comm {
    uint32_t size_bytes;       /* sizeof(struct comm) */
    /* Connects n_ranks contexts. After a failure none is connected. */
    enum rc (*open)(void *const *ctxs, uint32_t n_ranks, const struct comm_options *options, struct err *err);
    /* Tells all ranks where each rank has its buffer of one purpose (enum comm_memory); all have the same size. */
    enum rc (*share)(void *const *ctxs, uint32_t n_ranks, uint32_t purpose, void *const *memory, size_t size_bytes,
                     struct err *err);
    /* Opens a step, before `begin`: no rank is in the step before any more, and token ids below 0 can be resolved. */
    enum rc (*meet)(void *ctx, const struct meet_args *args, struct err *err);
    enum rc (*gather)(void *ctx, const struct gather_args *args, struct err *err);
    /* RC_DEVICE with a text that names the rank and the meeting, if a wait of this rank has failed so far. */
    enum rc (*check)(void *ctx, struct err *err);
    /* Ends all waits of all ranks with a failure, now and later. Any thread may call it. */
    void (*abort)(void *const *ctxs, uint32_t n_ranks);
    void (*close)(void *const *ctxs, uint32_t n_ranks); /* before the contexts are closed; no rank is in a meeting */
    bool waits_on_device;      /* meet and gather return before the other ranks have come, so one thread can start all ranks */
    uint32_t most_of_several;  /* ranks of this process, at most, if there are other processes; 0: there cannot be any */
    uint32_t least_shared_rows; /* of logits that are worth GATHER_TO_OWNERS; 0: there is no such gather */
    /* Whether a linear is worth is_mirrored, behind which y's gather is_stored. y is some eights of columns of a value in
     * COMM_ARENA. The answer follows from what is equal on all ranks. NULL: none is. */
    bool (*mirrors)(void *ctx, const struct linear_args *args);
    /* The same of experts whose y has parts. */
    bool (*mirrors_parts)(void *ctx, const struct experts_args *args);
};

#endif
