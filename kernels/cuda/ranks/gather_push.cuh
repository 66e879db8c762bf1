/* gather_push.cuh: gathers whose ranks store their part into all ranks' values and then meet them.
 *
 * Without a norm all threads of the grid share the rank's part evenly. With a norm a block has the same rows on all ranks, and
 * norms them as soon as its own flags have come. */
#ifndef LLMPY_CUDA_GATHER_PUSH_CUH
#define LLMPY_CUDA_GATHER_PUSH_CUH

#include "../norm/row_norm.cuh"
#include "own_part.cuh"

template <class T> static __device__ __forceinline__ void store_own(const own_part &own)
{
    const uint32_t first = own.is_by_rows ? blockIdx.x : 0, apart = own.is_by_rows ? gridDim.x : 1;
    const uint32_t lane = threadIdx.x + (own.is_by_rows ? 0 : blockIdx.x * blockDim.x);
    const uint32_t lanes = own.is_by_rows ? blockDim.x : gridDim.x * blockDim.x;
    const uint32_t n_eights = (own.n_columns + 7) / 8, n = (own.n_rows + apart - 1 - first) / apart * n_eights;
    for (uint32_t i = lane; i < n; i += lanes) {
        const uint32_t row = first + i / n_eights * apart, column = i % n_eights * 8;
        if (own.token_ids && (own.token_ids[row] < own.first_id || own.token_ids[row] >= own.end_id))
            continue;
        const eight<T> x = own_eight<T>(own, row, column);
        for (uint32_t r = 0; r < own.n_to; r++)
            put_eight((T *)own.to[r] + (size_t)row * own.to_stride, column, own.n_columns, own.is_aligned, x);
    }
}

/* The same of rows that have equal parts. */
template <class T> static __device__ __forceinline__ void store_parts(const own_part &own)
{
    const uint32_t n_eights = (own.n_columns + 7) / 8, n = own.n_rows * own.n_parts * n_eights;
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        const uint32_t part = i / n_eights % own.n_parts, row = i / n_eights / own.n_parts, column = i % n_eights * 8;
        const struct route *route = own.routes ? own.routes + (size_t)row * own.route_stride + part : NULL;
        if (route && (route->expert < own.first_id || route->expert >= own.end_id))
            continue;
        const size_t at = (size_t)row * own.to_stride + part * own.part_columns;
        const eight<T> x = get_eight((const T *)own.a + at, column, own.n_columns, own.is_aligned);
        for (uint32_t r = 0; r < own.n_to; r++)
            put_eight((T *)own.to[r] + at, column, own.n_columns, own.is_aligned, x);
    }
}

template <class T>
static __global__ void __launch_bounds__(MEETING_THREADS)
gather_push(const __grid_constant__ struct meeting meeting, const __grid_constant__ own_part own)
{
    start_next_if_alone(meeting);
    wait_for_input();
    const uint32_t number = next_number(meeting);
    store_own<T>(own);
    meet_ranks(meeting, number);
}

template <class T>
static __global__ void __launch_bounds__(MEETING_THREADS)
gather_push_parts(const __grid_constant__ struct meeting meeting, const __grid_constant__ own_part own)
{
    start_next_if_alone(meeting);
    wait_for_input();
    const uint32_t number = next_number(meeting);
    store_parts<T>(own);
    meet_ranks(meeting, number);
}

/* PARTS chains a thread. */
template <class T, uint32_t PARTS>
static __global__ void __launch_bounds__(MEETING_THREADS)
gather_push_norm(const __grid_constant__ struct meeting meeting, const __grid_constant__ own_part own,
                 const __grid_constant__ whole_norm<T> norm)
{
    const uint32_t column = 8 * threadIdx.x, step = 8 * blockDim.x;
    float w[PARTS][8];
    start_next_if_alone(meeting);
#pragma unroll
    for (uint32_t i = 0; i < PARTS; i++)
        weight_part<true>(norm.weight, 0, column + i * step, norm.size, w[i]);
    wait_for_input();
    const uint32_t number = next_number(meeting);
    store_own<T>(own);
    meet_ranks(meeting, number);
    for (uint32_t row = blockIdx.x, use = 0; row < norm.n_rows; row += gridDim.x, use ^= 1) {
        float values[PARTS][8], sum = 0;
#pragma unroll
        for (uint32_t i = 0; i < PARTS; i++)
            load_part<true>(norm.x.at(row, 0), column + i * step, norm.size, values[i]);
#pragma unroll
        for (uint32_t i = 0; i < PARTS; i++)
            for (uint32_t j = 0; j < 8; j++)
                sum = fmaf(values[i][j], values[i][j], sum);
        const float scale = norm_scale(block_squares(sum, use, blockDim.x / 32), norm.size, norm.eps);
#pragma unroll
        for (uint32_t i = 0; i < PARTS; i++) {
            scale_part(values[i], w[i], scale);
            store_part<true>(norm.out.at(row, 0), column + i * step, norm.size, values[i]);
        }
    }
}

#endif
