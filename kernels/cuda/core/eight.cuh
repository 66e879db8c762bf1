/* eight.cuh: eight consecutive values of a row as float32, one access of 16 bytes for types of two bytes and two for float32.
 * Where a row does not start on 16 bytes, or ends before, the same values go one by one. */
#ifndef LLMPY_CUDA_EIGHT_CUH
#define LLMPY_CUDA_EIGHT_CUH

#include "common.cuh"

template <class T> struct alignas(16) eight {
    T values[8];
};

/* Can rows of a view of T be taken in eights? */
template <class T> static inline bool has_eights(const struct view &v)
{
    return (uintptr_t)v.data % 16 == 0 && v.stride * sizeof(T) % 16 == 0 && v.width % 8 == 0;
}

template <class T> static __device__ __forceinline__ void load_eight(const T *from, float (&x)[8])
{
    struct eight<T> e = *(const struct eight<T> *)from;
#pragma unroll
    for (uint32_t i = 0; i < 8; i++)
        x[i] = to_float(e.values[i]);
}

template <class T> static __device__ __forceinline__ eight<T> to_eight(const float (&x)[8])
{
    struct eight<T> e;
#pragma unroll
    for (uint32_t i = 0; i < 8; i++)
        e.values[i] = round_to<T>(x[i]);
    return e;
}

static __device__ __forceinline__ void round_two(float &, float &, float)
{
}

static __device__ __forceinline__ void round_two(float &a, float &b, __half)
{
    __half2 both = __floats2half2_rn(a, b);
    a = __low2float(both);
    b = __high2float(both);
}

static __device__ __forceinline__ void round_two(float &a, float &b, __nv_bfloat16)
{
    __nv_bfloat162 both = __floats2bfloat162_rn(a, b);
    a = __low2float(both);
    b = __high2float(both);
}

/* Rounds each value to T, in pairs, which the processor converts much faster than one by one. */
template <class T> static __device__ __forceinline__ void round_eight(float (&x)[8])
{
#pragma unroll
    for (uint32_t i = 0; i < 8; i += 2)
        round_two(x[i], x[i + 1], T());
}

template <class T> static __device__ __forceinline__ void store_eight(T *to, const float (&x)[8])
{
    *(struct eight<T> *)to = to_eight<T>(x);
}

/* Pairwise over neighbours. */
template <uint32_t N> static __device__ __forceinline__ float sum_pairs(const float *x)
{
    if constexpr (N == 1)
        return x[0];
    else
        return sum_pairs<N / 2>(x) + sum_pairs<N / 2>(x + N / 2);
}

/* The values from `column` of `n_columns` on; zeros beyond. */
template <bool IS_ALIGNED, class T>
static __device__ __forceinline__ void load_part(const T *row, uint32_t column, uint32_t n_columns, float (&x)[8])
{
    if (IS_ALIGNED && column < n_columns)
        load_eight(row + column, x);
    else
#pragma unroll
        for (uint32_t i = 0; i < 8; i++)
            x[i] = !IS_ALIGNED && column + i < n_columns ? to_float(row[column + i]) : 0.0f;
}

/* The same as they lie there. */
template <bool IS_ALIGNED, class T>
static __device__ __forceinline__ eight<T> part_of(const T *row, uint32_t column, uint32_t n_columns)
{
    if (IS_ALIGNED && column < n_columns)
        return *(const eight<T> *)(row + column);
    eight<T> x;
#pragma unroll
    for (uint32_t i = 0; i < 8; i++)
        x.values[i] = !IS_ALIGNED && column + i < n_columns ? row[column + i] : round_to<T>(0.0f);
    return x;
}

template <class T> static __device__ __forceinline__ void to_floats(const eight<T> &from, float (&x)[8])
{
#pragma unroll
    for (uint32_t i = 0; i < 8; i++)
        x[i] = to_float(from.values[i]);
}

template <bool IS_ALIGNED, class T>
static __device__ __forceinline__ void store_part(T *row, uint32_t column, uint32_t n_columns, const float (&x)[8])
{
    if (IS_ALIGNED && column < n_columns)
        store_eight(row + column, x);
    else
#pragma unroll
        for (uint32_t i = 0; i < 8; i++)
            if (!IS_ALIGNED && column + i < n_columns)
                row[column + i] = round_to<T>(x[i]);
}

#endif
