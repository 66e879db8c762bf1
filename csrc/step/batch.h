/* batch.h: what one step computes. The engine fills a struct batch in host memory; its arrays are allocated once, at their
 * largest size. The runner (runner.h) runs the program over the batch and fills the results. Two batches take turns: the engine
 * fills one while the runner computes the other. Both use the same page tables. */
#ifndef LLMPY_BATCH_H
#define LLMPY_BATCH_H

#include "../../kernels/backend.h"
#include "items.h"

/* Page tables, kept from step to step. Entry ((group * (max_seqs + 1)) + slot) * stride + block is the page of a block of the
 * slot's sequence; 0: the block is outside the window. Each group has one extra row for padding rows; all its entries are
 * page 0. A model with recurrent states has one more table behind the groups': its entries are the pages of a slot's state. */
struct page_tables {
    int32_t *pages;
    uint32_t n_groups, max_seqs, stride; /* n_groups counts the states' table, too */
    struct table_run *runs;  /* [n_groups * (max_seqs + 1)] entries changed since the last step's start; one run a row */
    uint32_t *run_of;        /* [n_groups * (max_seqs + 1)] 1 + index of the row's run in runs; 0: unchanged */
    uint32_t n_runs;
};

enum rc page_tables_create(struct page_tables *tables, uint32_t n_groups, uint32_t max_seqs, uint32_t stride, struct err *err);
void page_tables_destroy(struct page_tables *tables);
int32_t *page_tables_row(const struct page_tables *tables, uint32_t group, uint32_t slot);
/* Notes that entries first .. end of a row have been written. Entries that are only cleared need no note. */
void page_tables_note(struct page_tables *tables, uint32_t group, uint32_t slot, uint32_t first, uint32_t end);
/* Forgets the noted changes: call it when a step that carries them has been started. */
void page_tables_settle(struct page_tables *tables);

/* What belongs to the sequences of one pool of pages: side by side in the arrays of the batch. Rows, logits rows, tasks of the
 * step before and page numbers are counted from the part's first one. */
struct batch_part {
    uint32_t first_row, n_rows, n_seqs, first_seq_row; /* first_seq_row: in seq_first_row, with an end for each part */
    uint32_t first_wanted, n_logits_rows, n_state_rows; /* first_wanted: in logits_rows */
    uint32_t first_state, first_task, n_tasks, first_copy, n_copies;
};

struct batch {
    uint32_t slot;           /* 0 or 1, alternating */
    uint32_t n_rows, n_seqs;
    int32_t *token_ids;      /* [max_rows]; id < 0: the token that task -1 - id of the previous step draws */
    int32_t *positions;      /* [max_rows] */
    int32_t *token_types;    /* [max_rows] valid if has_types; else all types are 0 */
    bool has_types;
    int32_t *row_seq;        /* [max_rows] slot of the row's sequence, which is its row of the page tables */
    int32_t *row_adapter;    /* [max_rows] slot of the row's adapter, -1: none; valid if has_adapters, else no row has one */
    bool has_adapters;
    const void *const *adapter_images; /* [n_adapter_slots] to load before the rows are computed; NULL: the slot stays */
    uint32_t n_adapter_slots;
    int32_t *source_rows;    /* [max_rows] of a head: the kept row of each row; no row of others has one */
    const void *kept;        /* of a head: the rows that its model has kept, at kept_stride */
    uint32_t kept_stride;
    bool is_carried;         /* source_rows are of the head's own kept rows: the batch goes on from drafts */
    int32_t *seq_first_row;  /* [max_seqs + 1]; every sequence of a step has at least one row */
    uint32_t max_rows, max_seqs;
    struct batch_part *parts; /* [n_parts] one a pool; n_parts 0: there is one pool, and the batch is its part */
    uint32_t n_parts;
    int32_t *row_part;       /* [max_rows] the part of each row, with parts */
    const struct page_tables *tables;
    int32_t *visual;         /* [max_rows] the row of the feature pool that replaces the row's embedding, -1: none; valid if
                              * has_visual; else no row has one */
    bool has_visual;
    int32_t *visible_end;    /* [max_rows] the end of the positions that the row sees; valid if has_visual */
    int32_t *rope_positions; /* [n_axes][max_rows] */
    uint32_t n_axes;         /* of the model's ropes; 0: it has none, and no rope_positions */
    struct encoding *encodings; /* [n_encodings] whose features are computed before the rows */
    uint32_t n_encodings;
    uint32_t tower_first, tower_end; /* the part of the tower's plan that the step runs for its only encoding; end 0: all of
                                      * the plan for all encodings. The first part lists the encoding's features. */
    int32_t *feature_rows;   /* rows of the feature pool for the features of all encodings */

    struct page_copy *copies; /* [max_copies], done before the rows are computed */
    uint32_t n_copies, max_copies;
    bool shares_new_keys;     /* an admitted sequence shares blocks that other sequences fill in this step */

    int32_t *logits_rows;     /* [max_rows] distinct rows to compute logits for, ascending; then the state rows */
    uint32_t n_logits_rows, n_state_rows;
    int32_t *state_rows;      /* [max_rows] rows whose hidden states are wanted, while the batch is filled */
    struct sample_task *tasks;      /* ordered by logits_row, which is an index into logits_rows */
    struct sample_result *results;  /* one per task, filled by the runner */
    uint32_t n_tasks, max_tasks;    /* max_tasks >= max_rows + max_seqs */
    int32_t *top_ids;               /* [n_top] alternatives of all tasks */
    float *top_values;
    int32_t *top_ranks;
    bool is_replayed;               /* set by the runner: a captured graph was launched */
    bool has_masks;                 /* some tasks have masks; call await_masks before the first `sample`: it completes them */
    void (*await_masks)(void *ctx);
    void *masks_ctx;

    /* Constants of the engine for every draw, as in struct sample_args. */
    uint32_t vocab_limit;
    const int32_t *banned;
    uint32_t n_banned;
};

/* Allocates the arrays of a model with a tower: n_features: rows of the feature pool. */
enum rc batch_add_tower(struct batch *batch, uint32_t n_axes, uint32_t n_features, struct err *err);
uint32_t batch_n_pieces(const struct batch *batch); /* of the images whose features the step begins */
uint32_t batch_n_piece_rows(const struct batch *batch);
/* Allocates all other arrays at their largest size; no other function of the batch allocates. */
enum rc batch_create(struct batch *batch, const struct page_tables *tables, uint32_t max_rows, size_t n_top,
                     uint32_t max_copies, struct err *err);
void batch_destroy(struct batch *batch);
/* Makes room for parts, right behind batch_create. */
enum rc batch_add_parts(struct batch *batch, uint32_t n_parts, struct err *err);
/* Part `number` of a batch as a batch whose arrays are ranges of those of the whole one. */
struct batch batch_part_of(const struct batch *batch, uint32_t number);
/* The part that has a state row of the batch; *row becomes its number in the part. 0 without parts. */
uint32_t batch_find_state(const struct batch *batch, uint32_t *row);

#endif
