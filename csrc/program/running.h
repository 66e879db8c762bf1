/* running.h: the state of one model step, shared by executor.c (batches, sampling, graphs), operations.c (the table of
 * operations) and ops_*.c (the check and the run of each). */
#ifndef LLMPY_RUNNING_H
#define LLMPY_RUNNING_H

#include "model_state.h"
#include "tower.h"

/* The step that runs: a batch, or the padding rows of a graph that is being captured. */
struct running {
    struct model *m;
    struct batch *batch;             /* NULL while a graph is captured; by data: the rank's part */
    struct batch_view view;
    const int32_t *tables[BATCH_MAX_GROUPS + 1], *wanted_rows;
    bool has_adapters;               /* a row has an adapter, or a graph for such batches is captured */
    const int32_t *row_adapter;      /* [n_rows] slots of the rows' adapters in host memory; NULL: `begin` has brought them */
    const int32_t *token_types;      /* [n_rows]; NULL: all are 0 */
    const int32_t *source_rows;      /* [n_rows] of a head */
    bool is_carried;                 /* as in struct batch; graphs of heads are of such batches */
    const int32_t *visual;           /* [n_rows] rows of the feature pool, -1: none; NULL: no row stands for a feature */
    const int32_t *visible_end;      /* [n_rows] as in struct attention_args; NULL: rows see what is before them */
    const int32_t *rope_positions;   /* [axes][axis_stride] of ropes with axes */
    uint32_t axis_stride;
    const struct item_piece *piece;       /* of a tower: what it computes; its tables and bytes are in device memory */
    const struct item_piece *host_piece;  /* the same with host memory */
    const int32_t *feature_rows;     /* [piece->n_features] rows of the feature pool that the piece's features go to */
    uint32_t first_step, end_step;   /* of the plan; end 0: all of it. Arena and rope tables keep what earlier steps left */
    uint32_t n_wanted_rows, n_logits_rows; /* wanted_rows: first for logits, then for states */
    uint32_t own_row, n_all_rows;    /* by data: the first row of this rank among those of all ranks, and their number */
    const int32_t *row_part;         /* by data: [n_all_rows] the rank of each row */
    uint32_t first_row;              /* of the step that runs, in the arena */
    bool is_stored;                  /* the step before has stored to all ranks what this one gathers */
    bool is_drawn_at_once;           /* the buffer holds all logits of the step, and its draws come behind them */
    struct err *err;
};

static inline struct view view_of(const struct running *run, struct place place)
{
    const struct model *m = run->m;
    size_t first = place.offset + (size_t)run->first_row * place.stride;
    return (struct view){place.width ? m->arena + first * m->item_bytes : NULL, place.width, place.stride};
}

/* Whether the rank samples: rank 0 for all, or each rank for its own sequences. */
static inline bool model_draws(const struct model *m)
{
    return !m->options.rank || m->program->is_by_data;
}

/* Where the tensors of a step lie. width 0: the step has no such tensor. */
struct views {
    uint32_t n_rows;
    struct view in[OP_INPUTS], out, mid;
};

enum rc step_run(struct running *run, const struct step *step);
enum rc rope_tables_run(struct running *run); /* runs before the steps */
enum rc program_run(struct running *run);
/* Samples the rows of a step that are this rank's; the logits buffer holds n_rows rows, with padding. Also marks where the step
 * ends, for backends that only enqueue. */
enum rc logits_draw(struct running *run, uint32_t n_rows);
/* The same of a step whose rows have been sampled. */
enum rc logits_end(struct running *run);
/* ops_ranks.c. Without other ranks there is nothing to share, and a meeting ends at once. */
bool ranks_share_logits(const struct model *model, const struct op *logits); /* each rank has columns of the logits */
struct view ranks_logits(const struct model *model, const struct op *logits); /* this rank's columns */
/* Brings them to the rank that samples the row. */
enum rc ranks_join_logits(struct running *run, const struct op *logits, uint32_t n_rows);
/* Ranks share out so many rows of logits that are drawn at once, or more; fewer are rank 0's. UINT32_MAX: rank 0 has all. */
uint32_t ranks_least_shared_rows(const struct model *model);
struct drawn_rows {
    uint32_t first, end;
};
struct drawn_rows ranks_drawn_rows(const struct model *model, uint32_t n_rows); /* which this rank samples, of n_rows */
enum rc ranks_meet(struct running *run, struct meet_args args);
bool ranks_mirror(const struct model *model, const struct linear_args *args); /* a linear stores to all ranks */
bool ranks_mirror_parts(const struct model *model, const struct experts_args *args);
bool operation_is_known(const struct backend *backend, const struct op *op); /* can run on it */

#endif
