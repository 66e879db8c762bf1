/* gather_ll.cuh: gathers of few bytes, whose ranks send packets (packets.cuh): a way to the other device and no order of
 * stores. All ranks' columns begin and end at multiples of 8. A rank's eight columns lie in the slots at a place that follows
 * from their row and column alone, so a receiver need not know who sends them. */
#ifndef LLMPY_CUDA_GATHER_LL_CUH
#define LLMPY_CUDA_GATHER_LL_CUH

#include "../norm/row_norm.cuh"
#include "own_part.cuh"
#include "packets.cuh"

/* own.to has the rank's own value at most: where its columns are not in place. */
template <class T> struct gathered {
    rows<T> whole;
    uint32_t first; /* of this rank's columns */
};

/* Sends the eight own columns from `column` of the whole row on. */
template <class T>
static __device__ __forceinline__ void send_own(const struct meeting &m, const own_part &own, uint32_t row, uint32_t column,
                                                uint32_t number, uint32_t at, eight<T> *x)
{
    *x = own_eight<T>(own, row, column);
    send(m, number, at, *x);
    if (own.n_to)
        put_eight((T *)own.to[0] + (size_t)row * own.to_stride, column, own.n_columns, own.is_aligned, *x);
}

/* Thread and turn have the same eight columns on all ranks. */
template <class T>
static __global__ void __launch_bounds__(MEETING_THREADS)
gather_ll(const __grid_constant__ struct meeting meeting, const __grid_constant__ own_part own,
          const __grid_constant__ gathered<T> to)
{
    start_next_if_alone(meeting);
    wait_for_input();
    const uint32_t number = next_number(meeting), eights = to.whole.width / 8, n = own.n_rows * eights;
    const uint32_t begin = blockIdx.x * blockDim.x + threadIdx.x, lanes = gridDim.x * blockDim.x;
    const uint32_t n_packets = sizeof(eight<T>) / sizeof(uint2) * blockDim.x;
    for (uint32_t i = begin, at = threadIdx.x; i < n; i += lanes, at += n_packets) {
        const uint32_t row = i / eights, column = i % eights * 8 - to.first;
        eight<T> x;
        if (column < own.n_columns)
            send_own<T>(meeting, own, row, column, number, at, &x);
    }
    come(meeting, number);
    for (uint32_t i = begin, at = threadIdx.x; i < n; i += lanes, at += n_packets) {
        const uint32_t row = i / eights, column = i % eights * 8;
        if (column - to.first < own.n_columns)
            continue;
        eight<T> x;
        receive(meeting, number, at, &x);
        *(eight<T> *)to.whole.at(row, column) = x;
    }
    await_ranks(meeting, number);
}

/* PARTS chains a thread; a block has one row, which it norms as rms_norm does (row_norm.cuh). */
template <class T, uint32_t PARTS>
static __global__ void __launch_bounds__(MEETING_THREADS)
gather_ll_norm(const __grid_constant__ struct meeting meeting, const __grid_constant__ own_part own,
               const __grid_constant__ gathered<T> to, const __grid_constant__ whole_norm<T> norm)
{
    const uint32_t row = blockIdx.x, n_packets = sizeof(eight<T>) / sizeof(uint2) * blockDim.x;
    float w[PARTS][8], sum = 0;
    eight<T> x[PARTS];
    start_next_if_alone(meeting);
#pragma unroll
    for (uint32_t i = 0; i < PARTS; i++)
        weight_part<true>(norm.weight, 0, 8 * (threadIdx.x + i * blockDim.x), norm.size, w[i]);
    wait_for_input();
    const uint32_t number = next_number(meeting);
#pragma unroll
    for (uint32_t i = 0; i < PARTS; i++) {
        const uint32_t column = 8 * (threadIdx.x + i * blockDim.x) - to.first;
        if (column < own.n_columns)
            send_own<T>(meeting, own, row, column, number, threadIdx.x + i * n_packets, &x[i]);
    }
    come(meeting, number);
#pragma unroll
    for (uint32_t i = 0; i < PARTS; i++) {
        const uint32_t column = 8 * (threadIdx.x + i * blockDim.x);
        if (column >= norm.size || column - to.first < own.n_columns)
            continue;
        receive(meeting, number, threadIdx.x + i * n_packets, &x[i]);
        *(eight<T> *)to.whole.at(row, column) = x[i];
    }
    float values[PARTS][8];
#pragma unroll
    for (uint32_t i = 0; i < PARTS; i++) {
        const bool is_inside = 8 * (threadIdx.x + i * blockDim.x) < norm.size;
        for (uint32_t j = 0; j < 8; j++) {
            values[i][j] = is_inside ? to_float(x[i].values[j]) : 0.0f;
            sum = fmaf(values[i][j], values[i][j], sum);
        }
    }
    const float scale = norm_scale(block_squares(sum, 0, blockDim.x / 32), norm.size, norm.eps);
#pragma unroll
    for (uint32_t i = 0; i < PARTS; i++) {
        scale_part(values[i], w[i], scale);
        store_part<true>(norm.out.at(row, 0), 8 * (threadIdx.x + i * blockDim.x), norm.size, values[i]);
    }
    await_ranks(meeting, number);
}

#endif
