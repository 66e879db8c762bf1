/* row_attention.h: scratch of one thread in row_attention.c. */
#ifndef LLMPY_ROW_ATTENTION_H
#define LLMPY_ROW_ATTENTION_H

#include "cpu.h"

#define ROW_BLOCK 66u      /* rows of a unit of work: eleven register tiles */
#define ROW_TILE_DIM 256u  /* values of a head, at most, that tiles take */
#define ROW_TILE_BYTES ((size_t)304 << 10)

/* A thread's tiles; or the scores of one row and head over the longest sequence, and of a grid's those with the distances. */
static inline size_t row_attention_scratch_bytes(const struct backend_options *options)
{
    size_t row = (2 * (size_t)options->max_rows + 32) * sizeof(float);
    return row > ROW_TILE_BYTES ? row : ROW_TILE_BYTES;
}

#endif
