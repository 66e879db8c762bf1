/* units.cuh: how quantised matrices lie for the tensor cores. A unit is a panel's 16 rows by 128 columns. It has the numbers of
 * eight k16 steps in the order of operand A, then what scales them:
 *
 *   numbers of 4 bits   word [step / 4][lane][step % 4], byte [pair][eight]: row lane / 4 in the low half, and 8 further on in
 *                       the high half
 *   numbers of 8 bits   word [step / 2][lane][step % 2][eight], byte [pair][half]
 *   numbers of 6 bits   their low 4 bits as above; then word [step / 4][lane][step % 4 / 2], two bits
 *                       [pair][step % 2][eight][half]
 *
 * of columns 2 (lane % 4) + pair + 8 eight and rows lane / 4 + 8 half. A lane's words of two or four steps are 16 bytes.
 *
 *   int4, Q4_0   word [group][row]: a float32 scale, its lowest byte the zero: as in the file, or of Q4_0 (whose scale is a
 *                float16) the scale with a zero of 8
 *   Q8_0         word [row % 8][group], half-word [half]: a float16 scale
 *   Q4_K         word [row % 8][group], byte [half][scale, minimum]; then word [row % 8][half]: d, dmin
 *   Q6_K         byte [row % 8][group][half]: a scale; then half-word [row % 8][half]: d
 *
 * where groups are those of a slab, 128 columns. The units of a panel follow each other. The rows of a matrix, or of each
 * expert in it, are divided into halves, gate and up where they are multiplied, and a panel has eight of each: one thread of a
 * kernel has both sums of a product. Where the halves of a matrix are no whole eights, the 16 rows of a panel follow each
 * other; those of experts always are. */
#ifndef LLMPY_CUDA_UNITS_CUH
#define LLMPY_CUDA_UNITS_CUH

#include "common.cuh"

#include <type_traits>

#define UNIT_COLUMNS 128u

/* A type whose matrices can lie in units. `as`: the type whose kernels read them. */
struct unit_type {
    uint32_t dtype, as;
    uint32_t bits, groups;  /* of a number; of a slab */
    uint32_t headers_bytes; /* behind the numbers */
};
#define N_UNIT_TYPES 6u
static __host__ __device__ constexpr struct unit_type unit_type_at(uint32_t row)
{
    constexpr struct unit_type types[N_UNIT_TYPES] = {
        /* dtype          as               bits  groups  headers_bytes */
        {DTYPE_INT4_G128, DTYPE_INT4_G128, 4,    1,      64},
        {DTYPE_INT4_G32,  DTYPE_INT4_G32,  4,    4,      256},
        {DTYPE_Q4_0,      DTYPE_INT4_G32,  4,    4,      256},
        {DTYPE_Q8_0,      DTYPE_Q8_0,      8,    4,      128},
        {DTYPE_Q4_K,      DTYPE_Q4_K,      4,    4,      192},
        {DTYPE_Q6_K,      DTYPE_Q6_K,      6,    8,      160},
    };
    return types[row];
}

/* All zero: units have no numbers of the type. */
static __host__ __device__ constexpr struct unit_type unit_type_of(uint32_t dtype)
{
    for (uint32_t row = 0; row < N_UNIT_TYPES; row++)
        if (unit_type_at(row).dtype == dtype)
            return unit_type_at(row);
    return {};
}

static __host__ __device__ constexpr bool lies_in_units(uint32_t dtype)
{
    return unit_type_of(dtype).bits;
}

static __host__ __device__ constexpr uint32_t unit_groups(uint32_t dtype)
{
    return unit_type_of(dtype).groups;
}

static __host__ __device__ constexpr uint32_t unit_numbers_bytes(uint32_t dtype)
{
    return 16 * UNIT_COLUMNS * unit_type_of(dtype).bits / 8;
}

static __host__ __device__ constexpr uint32_t unit_bytes(uint32_t dtype)
{
    return unit_numbers_bytes(dtype) + unit_type_of(dtype).headers_bytes;
}

/* The units of a matrix. */
struct matrix_units {
    uint8_t *data;
    uint32_t n_rows, n_slabs; /* slabs: columns in 128s, rounded up */
    uint32_t rows_each;       /* of an expert; of a linear all rows */

    __host__ __device__ __forceinline__ bool is_paired(void) const { return rows_each % 16 == 0; }
    __host__ __device__ __forceinline__ uint32_t n_panels(void) const { return (n_rows + 15) / 16; }
    /* Of a linear, the row that is row r of a panel. */
    __device__ __forceinline__ uint32_t row_of(uint32_t panel, uint32_t r) const
    {
        return is_paired() ? (r < 8 ? 0 : n_rows / 2) + panel * 8 + r % 8 : panel * 16 + r;
    }
    /* The panel that has a row, and the row's number in it. */
    __device__ __forceinline__ void find(uint32_t row, uint32_t &panel, uint32_t &r) const
    {
        const uint32_t expert = row / rows_each, half = rows_each / 2, own = row - expert * rows_each;
        const uint32_t is_second = own >= half, first = own - (is_second ? half : 0);
        panel = is_paired() ? expert * (rows_each / 16) + first / 8 : row / 16;
        r = is_paired() ? first % 8 + 8 * is_second : row % 16;
    }
};

static inline struct matrix_units units_of(const struct matrix *matrix)
{
    return {(uint8_t *)matrix->data, matrix->n_rows, ceil_div(matrix->n_cols, UNIT_COLUMNS), matrix->rows_each};
}

static inline size_t units_bytes(uint32_t dtype, uint32_t n_rows, uint32_t n_cols)
{
    return (size_t)ceil_div(n_rows, 16) * ceil_div(n_cols, UNIT_COLUMNS) * unit_bytes(dtype);
}

/* Calls f with the type whose kernels read a matrix that lies in units. */
template <uint32_t ROW = 0, class F> static void visit_unit_type(uint32_t dtype, F f)
{
    if constexpr (ROW < N_UNIT_TYPES) {
        if (unit_type_at(ROW).dtype == dtype)
            f(std::integral_constant<uint32_t, unit_type_at(ROW).as>());
        else
            visit_unit_type<ROW + 1>(dtype, f);
    }
}

#endif
