/* linear_run.h: the inner part of the linear: parts of one type times rows that are packed already. linear.c defines these
 * functions and runs them over whole matrices, experts.c over the parts of one expert. A row's bits are the same either way. */
#ifndef LLMPY_CPU_LINEAR_RUN_H
#define LLMPY_CPU_LINEAR_RUN_H

#include "matrix.h"

/* Consecutive parts of one type, whose activations are packed once. */
struct run {
    const struct cpu_part *parts;
    uint32_t n_parts, n_panels, n_strips;
    uint32_t first_row; /* row of the matrix that becomes column 0 of y */
    const struct linear_type *type;
};

/* A thread's share of a run: panels [panel, end_panel) times strips [strip, end_strip). */
struct share {
    uint32_t panel, end_panel, strip, end_strip;
};

/* Pointers into a thread's scratch, whose size is linear_scratch_bytes. */
struct lane_scratch {
    uint8_t *expanded;
    float *acc, *rows; /* rows: [STRIP_MAX_ROWS][n_cols], to be packed */
    char *strip;       /* one packed strip */
};

struct lane_scratch K(linear_scratch)(const struct cpu *cpu, uint32_t thread, uint32_t n_cols);
/* The run that starts at first_part and ends at end_part at the latest. */
struct run K(linear_next_run)(const struct matrix *matrix, uint32_t first_part, uint32_t end_part, uint32_t n_rows);
/* Computes y (+ bias) (+ add) of args for a share of a run. strips: all rows, packed strip by strip as share_first divides
 * them. */
void K(linear_share)(const struct cpu *cpu, const struct linear_args *args, const struct run *run, const struct share *share,
                     const char *strips, struct lane_scratch *s);

#endif
