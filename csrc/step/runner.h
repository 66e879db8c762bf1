/* runner.h: the interface that computes a batch. The model (csrc/program/executor.c) implements it, and so does a fake in
 * tests/c. The engine thus depends on no model and no device, and the executor knows no requests. */
#ifndef LLMPY_RUNNER_H
#define LLMPY_RUNNER_H

#include "adapters.h"
#include "batch.h"

#define RUNNER_MOST_RANKS 64u

struct lent_pools {
    const void *pools[RUNNER_MOST_RANKS]; /* by rank */
};

/* `start` may return before anything is computed. By then it has read every array except the tasks' lists; those must stay
 * valid until `finish`, which waits for the results, has returned. Batches are finished in the order of their start. If
 * is_async is set, a second batch may be started before the first is finished. A failure is a device fault and poisons the
 * engine. */
struct runner {
    void *ctx;
    enum rc (*start)(void *ctx, struct batch *batch, struct err *err);
    enum rc (*finish)(void *ctx, struct batch *batch, struct err *err);
    bool is_async;
    uint64_t (*allocations)(void *ctx); /* number of the runner's allocations outside mem.h so far; NULL: none ever */
    /* Reads state rows first .. first + n of a finished batch into rows [n][states_width]. Call it before starting another
     * batch. */
    enum rc (*read_states)(void *ctx, const struct batch *batch, uint32_t first, uint32_t n, float *rows, struct err *err);
    uint32_t states_width;              /* 0: the model has no states to pool */
    bool lacks_logits;
    /* A runner has both functions or neither. parts: bits of enum sleep_part. `release` frees the memory of the parts and keeps
     * their addresses. With `keeps` it first copies the weights to the host; without, it drops an earlier copy. `restore`
     * allocates memory for the parts again. It fills the weights from the copy, or with zeros if there is none; the contents of
     * the pages are undefined. Each function acts on all parts or, if it fails, on none. */
    enum rc (*release)(void *ctx, uint32_t parts, bool keeps, struct err *err);
    enum rc (*restore)(void *ctx, uint32_t parts, struct err *err);
    bool takes_whole_prompts;           /* all rows of a prompt must be in one step */
    uint32_t n_token_types;             /* 0: tokens have no types */
    /* Whether further batches can be computed, as far as is known without one; any thread. NULL: always. */
    enum rc (*check)(void *ctx, struct err *err);
    struct adapters *adapters;          /* of the model; NULL: it serves none */
    uint32_t n_host_slots;              /* pages for which the model has host memory; 0: none, and it has no moves */
    /* Enqueues moves and waits before a step. The runner fills the pool and the host memory in. args->source: as `lend` gives
     * it, or NULL. */
    enum rc (*move)(void *ctx, struct move_args *args, struct err *err);
    enum rc (*poll_moves)(void *ctx, struct move_state *state, struct err *err); /* does not wait */
    void *host_slots;                   /* [n_host_slots][host_slot_bytes] that memory */
    size_t host_slot_bytes;
    const void *kept;                   /* rows that steps keep for heads, in device memory; NULL: none */
    uint32_t kept_width, kept_stride;   /* in items of activations */
    bool is_head;                       /* batches need source_rows */
    uint32_t n_axes;                    /* axes of rope positions; 0: rows have one position */
    uint32_t n_features, max_encoder_rows; /* rows of the feature pool, and most rows of a piece; 0: the model has no tower */
    uint32_t n_tower_steps;             /* of the tower's plan, which a batch may have a part of; 0: batches have all of it */
    uint32_t spans;                     /* enum spans */
    uint32_t feature_id;                /* token that stands for a feature */
    /* RC_INVALID if the model's tower cannot compute the piece; any thread. */
    enum rc (*check_piece)(void *ctx, const struct item_piece *piece, struct err *err);
    /* The pools of another runner's ranks, from which moves in of this one may copy until that runner changes. */
    enum rc (*lend)(void *ctx, void *reader, struct lent_pools *pools, struct err *err);
    /* For other processes: a descriptor of a rank's pool, which the caller closes, and the pool's place in its memory; and such
     * a pool of another process, as moves of this runner read it. */
    uint32_t n_ranks;
    uint32_t n_pools;                   /* ranks with pages of their own (attention by data); 0 or 1: one pool for all */
    enum rc (*share)(void *ctx, uint32_t rank, int *descriptor, uint64_t *offset, uint64_t *size_bytes, struct err *err);
    enum rc (*import)(void *ctx, uint32_t rank, int descriptor, uint64_t offset, uint64_t size_bytes,
                      struct imported **imported, const void **pool, struct err *err);
    void (*release_import)(void *ctx, struct imported *imported);
};

enum sleep_part { PART_WEIGHTS = 1, PART_POOL = 2, PART_SCHEDULING = 4 /* the engine's: it has no memory */ };

#endif
