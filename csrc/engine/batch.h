/* batch.h: what one step computes, and the runner that computes it. The engine fills a struct batch in host memory (arrays laid
 * out once, at the limits); the runner (csrc/program/executor.c, or a fake one in tests/c) runs the program over it and fills
 * the results. So the engine knows no model and no device, and the executor no request. Two batches take turns, so that one
 * can be filled while the other is computed; the page tables are one set for both. */
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
    size_t page_bytes;     /* at least layer_bytes times the most layers of a group */
    uint32_t n_state_pages; /* of one sequence's recurrent state: entries of the table behind the groups'; 0: none */
    size_t state_bytes;     /* what is used of them */
};

/* Groups of attention layers, and the table of recurrent states. */
static inline uint32_t kv_layout_n_tables(const struct kv_layout *layout)
{
    return layout->n_groups + (layout->n_state_pages != 0);
}

/* Entries of a row of the tables. */
static inline uint32_t kv_layout_stride(const struct kv_layout *layout, uint32_t max_model_len)
{
    uint32_t n_blocks = (max_model_len + layout->block_tokens - 1) / layout->block_tokens;
    return n_blocks > layout->n_state_pages ? n_blocks : layout->n_state_pages;
}

/* Pages of every slot's sequence, kept from step to step: entry ((group * (max_seqs + 1)) + slot) * stride + block. 0 stands
 * outside a window. The last row of a group is no slot's and names page 0 alone. Behind the groups comes the table of recurrent
 * states, whose entries are pages of the state's pieces. */
struct page_tables {
    int32_t *pages;
    uint32_t n_groups, max_seqs, stride; /* n_groups: tables */
    struct table_run *runs;  /* [n_groups * max_seqs] what changed since a step was last started, one run a row at most */
    uint32_t *run_of;        /* [n_groups * (max_seqs + 1)] place of a row's run in runs + 1; 0: unchanged */
    uint32_t n_runs;
};

enum rc page_tables_create(struct page_tables *tables, uint32_t n_groups, uint32_t max_seqs, uint32_t stride, struct err *err);
void page_tables_destroy(struct page_tables *tables);
int32_t *page_tables_row(const struct page_tables *tables, uint32_t group, uint32_t slot);
/* Entries first .. end of a row have been written. What is only cleared need not be told. */
void page_tables_note(struct page_tables *tables, uint32_t group, uint32_t slot, uint32_t first, uint32_t end);
/* A step that brings all changes has been started. */
void page_tables_settle(struct page_tables *tables);

struct batch {
    uint32_t slot;           /* 0 or 1, by turns */
    uint32_t n_rows, n_seqs;
    int32_t *token_ids;      /* [max_rows]; below 0: the id that task -1 - id of the step before drew */
    int32_t *positions;      /* [max_rows] */
    int32_t *token_types;    /* [max_rows] where has_types says so, else all are 0 */
    bool has_types;
    int32_t *row_seq;        /* [max_rows] slot of the row's sequence: its row of the tables */
    int32_t *seq_first_row;  /* [max_seqs + 1]; every sequence of a step has a row */
    uint32_t max_rows, max_seqs;
    const struct page_tables *tables;

    struct page_copy *copies; /* [max_copies], done before the rows are computed */
    uint32_t n_copies, max_copies;
    bool shares_new_keys;     /* a sequence was admitted to blocks that others fill in this step */

    int32_t *logits_rows;     /* [max_rows] distinct rows whose logits are wanted, ascending; then those whose states are */
    uint32_t n_logits_rows, n_state_rows;
    int32_t *state_rows;      /* [max_rows] the latter, while the batch is filled */
    struct sample_task *tasks;      /* ordered by logits_row, which here indexes logits_rows */
    struct sample_result *results;  /* one a task, filled by the runner */
    uint32_t n_tasks, max_tasks;    /* max_tasks >= max_rows + max_seqs */
    int32_t *top_ids;               /* [max_tasks * max_logprobs] */
    float *top_values;
    int32_t *top_ranks;
    bool is_replayed;               /* set by the runner: a captured graph was launched */
    bool has_masks;                 /* of tasks: they stand once await_masks has returned, called before the first `sample` */
    void (*await_masks)(void *ctx);
    void *masks_ctx;

    /* The engine's constants for every draw, as in struct sample_args. */
    uint32_t vocab_limit;
    const int32_t *banned;
    uint32_t n_banned;
};

/* Lays all arrays out at the limits; nothing else of the batch ever allocates. */
enum rc batch_create(struct batch *batch, const struct page_tables *tables, uint32_t max_rows, uint32_t max_logprobs,
                     uint32_t max_copies, struct err *err);
void batch_destroy(struct batch *batch);

/* The runner. `start` may return before anything is computed: it has read every array but the tasks' lists, and those stay
 * until `finish` has waited for the results. Batches are finished in the order of their start, and at most two are in between,
 * where is_async says that this makes sense. A failure is a device fault: the engine is poisoned. */
struct runner {
    void *ctx;
    enum rc (*start)(void *ctx, struct batch *batch, struct err *err);
    enum rc (*finish)(void *ctx, struct batch *batch, struct err *err);
    bool is_async;
    uint64_t (*allocations)(void *ctx); /* made by the runner besides those of mem.h so far; NULL: none ever */
    /* The states of a finished batch's state rows first .. first + n, [n][states_width], before another batch is started. */
    enum rc (*read_states)(void *ctx, const struct batch *batch, uint32_t first, uint32_t n, float *rows, struct err *err);
    uint32_t states_width;              /* 0: the model has no states to pool */
    bool lacks_logits;
    /* Both or neither. `release` gives the memory of these parts back and keeps their addresses; with `keeps` the weights are
     * copied to the host before, without it a copy from earlier is dropped. `restore` takes memory for them again: with what
     * was copied, else with zeros for weights and anything for pages. Either acts on all parts or, if it fails, on none. */
    enum rc (*release)(void *ctx, uint32_t parts, bool keeps, struct err *err);
    enum rc (*restore)(void *ctx, uint32_t parts, struct err *err);
    bool takes_whole_prompts;           /* all rows of a prompt in one step */
    uint32_t n_token_types;             /* 0: tokens have no types */
};

enum sleep_part { PART_WEIGHTS = 1, PART_POOL = 2, PART_SCHEDULING = 4 /* no memory; the engine's alone */ };

#endif
