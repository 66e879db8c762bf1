/* matrix.h: the CPU backend's struct matrix. Every part starts a new panel and is padded to whole panels with zeros.
 * Consecutive parts of one type form a run; linear.c streams the panels of a run as one. Row numbers (of the output of a
 * linear, of matrix_read and embed) count the parts' real rows, without padding. matrix.c creates and fills a matrix, one
 * matrix at a time. A borrowed part (matrix_borrow) lies row by row in the caller's memory; linear.c packs its panels slab by
 * slab, so the bits are those of a written part. */
#ifndef LLMPY_CPU_MATRIX_H
#define LLMPY_CPU_MATRIX_H

#include "linear_type.h"

struct cpu_part {
    const struct linear_type *type;
    uint32_t first_row, n_rows; /* in the matrix */
    uint32_t n_panels, n_blocks;
    size_t panel_bytes;
    uint8_t *panels;            /* [n_panels][panel_bytes] */
    const uint8_t *rows;        /* not NULL: borrowed, read instead of the panels; row_bytes from one row to the next */
    size_t row_bytes;
};

struct matrix {
    uint32_t n_parts, n_rows, n_cols;
    size_t bytes;
    struct weight_chunk *chunk; /* holds the panels */
    struct cpu_part parts[];    /* [n_parts] */
};

/* The part that holds a row of the matrix. */
static inline const struct cpu_part *matrix_part_of(const struct matrix *matrix, uint32_t row)
{
    const struct cpu_part *part = matrix->parts;
    while (row >= part->first_row + part->n_rows)
        part++;
    return part;
}

#ifdef ISA
/* Writes the exact values of some rows, n_cols each. scratch: EXPANDED_MAX_BYTES. */
void K(matrix_rows)(const struct matrix *matrix, uint32_t first_row, uint32_t n_rows, float *rows, float *scratch);
/* rows[i * stride ...] = the exact values of lanes first_lane + i of a part's panel, i < n_lanes, n_cols of them each.
 * scratch: EXPANDED_MAX_BYTES. */
void K(panel_read)(const struct cpu_part *part, uint32_t panel, uint32_t first_lane, uint32_t n_lanes, uint32_t n_cols,
                   float *rows, size_t stride, float *scratch);
#endif

#endif
