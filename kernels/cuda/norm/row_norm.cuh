/* row_norm.cuh: the norm of a whole row, and the sum before it, in the order of every kernel that norms rows: thread t of T
 * has columns 8 t, 8 (t + T), ...; T depends on the size alone. Sum of squares: chains of 8 consecutive columns, a thread's
 * one after the other, then pairwise over threads 1, 2, 4, ... apart. */
#ifndef LLMPY_CUDA_ROW_NORM_CUH
#define LLMPY_CUDA_ROW_NORM_CUH

#include "../core/eight.cuh"
#include "head_norm.cuh"

#define ROW_NORM_THREADS 1024u /* at most */

/* x as given, or the sum of a and b. */
template <class T> struct norm_source {
    rows<T> a, b, sum;
};

template <bool HAS_SUM, bool IS_ALIGNED, class T>
static __device__ __forceinline__ void take_part(const norm_source<T> &x, uint32_t row, uint32_t first, uint32_t column,
                                                 uint32_t size, float (&values)[8])
{
    load_part<IS_ALIGNED>(x.a.at(row, first), column, size, values);
    if (!HAS_SUM)
        return;
    float other[8];
    load_part<IS_ALIGNED>(x.b.at(row, first), column, size, other);
#pragma unroll
    for (uint32_t i = 0; i < 8; i++)
        values[i] += other[i];
    round_eight<T>(values);
}

/* The weights from `column` of a head on; ones where there are none. */
template <bool IS_ALIGNED>
static __device__ __forceinline__ void weight_part(const float *weight, size_t first, uint32_t column, uint32_t size,
                                                   float (&w)[8])
{
    if (weight)
        load_part<IS_ALIGNED>(weight + first, column, size, w);
    else
#pragma unroll
        for (uint32_t i = 0; i < 8; i++)
            w[i] = 1.0f;
}

static __device__ __forceinline__ void scale_part(float (&values)[8], const float (&weight)[8], float scale)
{
#pragma unroll
    for (uint32_t i = 0; i < 8; i++)
        values[i] = weight[i] * (values[i] * scale);
}

/* Pairwise over the threads 1, 2, 4, ... apart, of the block's first n_warps, a power of two. Calls without a barrier in
 * between differ in use. */
static __device__ __forceinline__ float block_squares(float sum, uint32_t use, uint32_t n_warps)
{
    __shared__ __align__(16) float all_warps[2][32];
    float *warps = all_warps[use];
    for (uint32_t apart = 1; apart < 32; apart *= 2)
        sum = sum + __shfl_xor_sync(~0u, sum, apart);
    if (n_warps == 1)
        return sum;
    if (threadIdx.x % 32 == 0)
        warps[threadIdx.x / 32] = sum;
    meet(0, 32 * n_warps);
    switch (n_warps) {
    case 2: return sum_pairs<2>(warps);
    case 4: return sum_pairs<4>(warps);
    case 8: return sum_pairs<8>(warps);
    case 16: return sum_pairs<16>(warps);
    default: return sum_pairs<32>(warps);
    }
}

/* Threads that a row of so many chains has. */
static inline uint32_t row_threads(uint32_t chains)
{
    uint32_t threads = 32;
    while (threads < chains && threads < (chains > 2048 ? ROW_NORM_THREADS : ROW_NORM_THREADS / 2))
        threads *= 2;
    return threads;
}

#endif
