/* int4_units.cuh: how matrices of 4-bit weights in groups lie for the tensor cores. A unit is a panel's 16 rows by 128 columns.
 * It has the numbers of eight k16 steps in the order of operand A, then a header for each group and row:
 *
 *   word [step / 4][lane][step % 4]   the eight numbers of a step that a lane holds; four steps of a lane are 16 bytes
 *   byte [pair][eight] of a word      columns 2 (lane % 4) + pair + 8 eight: row lane / 4 in the low half, and 8 further on in
 *                                     the high half
 *   header [group][row]               a float32 scale, its lowest byte the zero: as in the file, or of Q4_0 (whose scale is a
 *                                     float16) the scale with a zero of 8
 *
 * The units of a panel follow each other. The rows of a matrix are divided into halves, gate and up where they are multiplied,
 * and a panel has eight of each: one thread of a kernel has both sums of a product. Where halves are no whole eights, the 16
 * rows of a panel follow each other. */
#ifndef LLMPY_CUDA_INT4_UNITS_CUH
#define LLMPY_CUDA_INT4_UNITS_CUH

#include "common.cuh"

#define UNIT_COLUMNS 128u
#define UNIT_WORDS_BYTES 1024u

static __host__ __device__ constexpr bool is_int4(uint32_t dtype)
{
    return dtype == DTYPE_INT4_G128 || dtype == DTYPE_INT4_G32 || dtype == DTYPE_Q4_0;
}

static __host__ __device__ constexpr uint32_t unit_groups(uint32_t dtype)
{
    return dtype == DTYPE_INT4_G128 ? 1 : 4;
}

static __host__ __device__ constexpr uint32_t unit_bytes(uint32_t dtype)
{
    return UNIT_WORDS_BYTES + unit_groups(dtype) * 16 * 4;
}

/* The units of a matrix. */
struct int4_units {
    uint8_t *data;
    uint32_t n_rows, n_slabs; /* slabs: columns in 128s, rounded up */

    __host__ __device__ __forceinline__ bool is_paired(void) const { return n_rows % 16 == 0; }
    __host__ __device__ __forceinline__ uint32_t n_panels(void) const { return (n_rows + 15) / 16; }
    /* The row of the matrix that is row r of a panel. */
    __device__ __forceinline__ uint32_t row_of(uint32_t panel, uint32_t r) const
    {
        return is_paired() ? (r < 8 ? 0 : n_rows / 2) + panel * 8 + r % 8 : panel * 16 + r;
    }
    /* The panel that has a row, and the row's number in it. */
    __device__ __forceinline__ void find(uint32_t row, uint32_t &panel, uint32_t &r) const
    {
        const uint32_t half = n_rows / 2, is_second = row >= half, first = row - (is_second ? half : 0);
        panel = is_paired() ? first / 8 : row / 16;
        r = is_paired() ? first % 8 + 8 * is_second : row % 16;
    }
};

static inline struct int4_units units_of(const struct matrix *matrix)
{
    return {(uint8_t *)matrix->data, matrix->n_rows, ceil_div(matrix->n_cols, UNIT_COLUMNS)};
}

static inline size_t units_bytes(uint32_t dtype, uint32_t n_rows, uint32_t n_cols)
{
    return (size_t)ceil_div(n_rows, 16) * ceil_div(n_cols, UNIT_COLUMNS) * unit_bytes(dtype);
}

#endif
