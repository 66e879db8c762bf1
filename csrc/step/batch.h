/* batch.h: what one step computes. The engine fills a struct batch in host memory (arrays laid out once, at the limits); the
 * runner (runner.h) runs the program over it and fills the results. Two batches take turns, so that one can be filled while the
 * other is computed; the page tables are one set for both. */
#ifndef LLMPY_BATCH_H
#define LLMPY_BATCH_H

#include "../../kernels/backend.h"

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

#endif
