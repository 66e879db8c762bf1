/* row_attention.h: scratch of one thread in row_attention.c. */
#ifndef LLMPY_ROW_ATTENTION_H
#define LLMPY_ROW_ATTENTION_H

#include "cpu.h"

/* The scores of one row and head over the longest sequence, and of a grid's those with the distances. */
static inline size_t row_attention_scratch_bytes(const struct backend_options *options)
{
    return (2 * (size_t)options->max_rows + 32) * sizeof(float);
}

#endif
