/* own_part.cuh: what a rank has of a gathered value, taken in eights: as it lies there, or as a sum that the gather makes. */
#ifndef LLMPY_CUDA_OWN_PART_CUH
#define LLMPY_CUDA_OWN_PART_CUH

#include "../core/eight.cuh"
#include "meeting.cuh"

/* A rank's own part: some columns of all rows, or of all equal parts of the rows; rows of some token ids; or parts of some
 * experts' routes. */
struct own_part {
    const void *a, *b;  /* row 0, first own column; b: NULL, or added to a */
    void *to[MAX_RANKS];
    uint32_t a_stride, b_stride, to_stride, n_to, n_rows, n_columns;
    const int32_t *token_ids; /* NULL: all rows */
    const struct route *routes; /* [n_rows][route_stride], or NULL: all parts */
    uint32_t route_stride, n_parts, part_columns; /* n_parts 0: rows have no parts */
    int32_t first_id, end_id;
    bool is_aligned;          /* everything is taken in eights */
    bool is_by_rows;          /* a block has rows blockIdx.x, blockIdx.x + gridDim.x, ... */
};

template <class T>
static __device__ __forceinline__ void put_eight(T *row, uint32_t column, uint32_t n, bool is_aligned, const eight<T> &x)
{
    if (is_aligned)
        *(eight<T> *)(row + column) = x;
    else
#pragma unroll
        for (uint32_t i = 0; i < 8; i++)
            if (column + i < n)
                row[column + i] = x.values[i];
}

template <class T>
static __device__ __forceinline__ eight<T> get_eight(const T *row, uint32_t column, uint32_t n, bool is_aligned)
{
    return is_aligned ? part_of<true>(row, column, n) : part_of<false>(row, column, n);
}

/* a, or a + b as the operation `add` rounds it. */
template <class T> static __device__ __forceinline__ eight<T> own_eight(const own_part &own, uint32_t row, uint32_t column)
{
    const T *a = (const T *)own.a + (size_t)row * own.a_stride, *b = (const T *)own.b + (size_t)row * own.b_stride;
    eight<T> x = get_eight(a, column, own.n_columns, own.is_aligned);
    if (!own.b)
        return x;
    float sum[8], other[8];
    to_floats(x, sum);
    to_floats(get_eight(b, column, own.n_columns, own.is_aligned), other);
#pragma unroll
    for (uint32_t i = 0; i < 8; i++)
        sum[i] = sum[i] + other[i];
    return to_eight<T>(sum);
}

/* The norm of the gathered rows. */
template <class T> struct whole_norm {
    rows<T> x, out;
    const float *weight;
    uint32_t n_rows, size;
    float eps;
};

#endif
