/* gather_push.cuh: gathers whose ranks store their part into all ranks' values and then meet them.
 *
 * Without a norm all threads of the grid share the rank's part evenly. With a norm a block has the same rows on all ranks, and
 * norms them as soon as its own flags have come. */
#ifndef LLMPY_CUDA_GATHER_PUSH_CUH
#define LLMPY_CUDA_GATHER_PUSH_CUH

#include "../norm/row_norm.cuh"
#include "own_part.cuh"

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
