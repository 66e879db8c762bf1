/* fp8_rows.cuh: how rows of FP8 and of INT8 weights in groups of 128 lie on the device. A file's row is a sequence of blocks,
 * each a float32 scale and 128 bytes, e4m3 or signed integers. On the device the scales come first, that of the last block
 * first, in whole 128 bytes; then the numbers, padded with zeros to whole blocks. A part's `data` is its first row's numbers.
 * So the scale of block b is the float32 4 (b + 1) bytes before the numbers of its row, and the copy engine reads numbers in
 * whole lines. The host splits rows as it uploads them. */
#ifndef LLMPY_CUDA_FP8_ROWS_CUH
#define LLMPY_CUDA_FP8_ROWS_CUH

#include "common.cuh"

#include <string.h>

#define FP8_SLAB 128u            /* columns with one scale */
#define FP8_FILE_BLOCK_BYTES 132u

/* Do rows of a type lie so? */
static inline bool has_fp8_rows(uint32_t dtype)
{
    return dtype == DTYPE_FP8 || dtype == DTYPE_INT8_G128;
}

static inline uint32_t fp8_slabs(uint32_t n_cols)
{
    return ceil_div(n_cols, FP8_SLAB);
}

/* Bytes of a row before its numbers. */
static inline uint32_t fp8_lead_bytes(uint32_t n_cols)
{
    return ceil_div(fp8_slabs(n_cols) * (uint32_t)sizeof(float), 128) * 128;
}

static inline size_t fp8_row_bytes(uint32_t n_cols)
{
    return fp8_lead_bytes(n_cols) + (size_t)fp8_slabs(n_cols) * FP8_SLAB;
}

/* A file's row to the device's, from its first scale on. */
static inline void fp8_split(char *row, const char *file, uint32_t n_cols)
{
    const uint32_t lead = fp8_lead_bytes(n_cols), n_slabs = fp8_slabs(n_cols);
    memset(row, 0, lead - n_slabs * sizeof(float));
    for (uint32_t b = 0; b < n_slabs; b++, file += FP8_FILE_BLOCK_BYTES) {
        memcpy(row + lead - (b + 1) * sizeof(float), file, sizeof(float));
        memcpy(row + lead + b * FP8_SLAB, file + sizeof(float), FP8_SLAB);
    }
    memset(row + lead + n_cols, 0, (size_t)n_slabs * FP8_SLAB - n_cols);
}

/* The inverse of fp8_split. */
static inline void fp8_join(char *file, const char *row, uint32_t n_cols)
{
    const uint32_t lead = fp8_lead_bytes(n_cols);
    for (uint32_t b = 0; b < fp8_slabs(n_cols); b++, file += FP8_FILE_BLOCK_BYTES) {
        memcpy(file, row + lead - (b + 1) * sizeof(float), sizeof(float));
        memcpy(file + sizeof(float), row + lead + b * FP8_SLAB, FP8_SLAB);
    }
}

#endif
