/* batch.h: what one step computes, and the runner that computes it. The engine fills a struct batch in host memory (arrays laid
 * out once, at the limits); the runner (csrc/program/executor.c, or a fake one in tests/c) runs the program over it and fills
 * the results. So the engine knows no model and no device, and the executor no request. */
#ifndef LLMPY_BATCH_H
#define LLMPY_BATCH_H

#include "../../kernels/backend.h"

#define BATCH_MAX_GROUPS 16

/* How the layers that need a cache are laid into pages; made from the program at load (kv_cache.h), then constant. */
struct kv_group {
    uint32_t window;       /* 0: full attention; else a row sees its last `window` positions, itself included */
    uint32_t n_layers;
};
struct kv_layout {
    uint32_t n_groups;
    struct kv_group groups[BATCH_MAX_GROUPS];
    uint32_t block_tokens;
    size_t layer_bytes;    /* one layer's part of a page */
    size_t page_bytes;     /* layer_bytes times the most layers of a group */
};

struct batch {
    uint32_t n_rows, n_seqs;
    int32_t *token_ids;      /* [max_rows] */
    int32_t *positions;      /* [max_rows] */
    int32_t *row_seq;        /* [max_rows] slot of the row's sequence: its row of the tables */
    int32_t *seq_first_row;  /* [max_seqs + 1]; every sequence of a step has a row */
    int32_t *tables;         /* [n_groups][max_seqs][table_stride] page numbers; 0 outside a window. Kept from step to step */
    uint32_t max_rows, max_seqs, table_stride;

    struct page_copy *copies; /* [max_seqs * n_groups], done before the rows are computed */
    uint32_t n_copies;

    int32_t *logits_rows;     /* [max_rows] distinct rows whose logits are wanted, ascending */
    uint32_t n_logits_rows;
    struct sample_task *tasks;      /* ordered by logits_row, which here indexes logits_rows */
    struct sample_result *results;  /* one a task, filled by the runner */
    uint32_t n_tasks, max_tasks;    /* max_tasks >= max_rows + max_seqs */
    int32_t *top_ids;               /* [max_tasks * max_logprobs] */
    float *top_values;
    int32_t *top_ranks;

    /* The engine's constants for every draw, as in struct sample_args. */
    uint32_t vocab_limit;
    const int32_t *banned;
    uint32_t n_banned;
};

/* Lays all arrays out at the limits; nothing else of the batch ever allocates. */
enum rc batch_create(struct batch *batch, uint32_t n_groups, uint32_t max_rows, uint32_t max_seqs, uint32_t table_stride,
                     uint32_t max_logprobs, struct err *err);
void batch_destroy(struct batch *batch);

/* The runner. `run` returns when the results are there. A failure is a device fault: the engine is poisoned. */
struct runner {
    void *ctx;
    enum rc (*run)(void *ctx, struct batch *batch, struct err *err);
};

#endif
