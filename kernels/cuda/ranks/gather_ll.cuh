/* gather_ll.cuh: gathers of few bytes, whose ranks send packets (packets.cuh): a way to the other device and no order of
 * stores. All ranks' columns begin and end at multiples of 8. A rank's eight columns lie in the slots at a place that follows
 * from their row and column alone, so a receiver need not know who sends them. */
#ifndef LLMPY_CUDA_GATHER_LL_CUH
#define LLMPY_CUDA_GATHER_LL_CUH

#include "../experts/experts.cuh"
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
    bool has_received = false;
    come(meeting, number);
    for (uint32_t i = begin, at = threadIdx.x; i < n; i += lanes, at += n_packets) {
        const uint32_t row = i / eights, column = i % eights * 8;
        if (column - to.first < own.n_columns)
            continue;
        eight<T> x;
        has_received = true;
        receive(meeting, number, at, &x);
        *(eight<T> *)to.whole.at(row, column) = x;
    }
    await_ranks(meeting, number, has_received);
}

/* The same of results of routes, which are in place. A rank sends those of its experts; no other rank has them. */
template <class T>
static __global__ void __launch_bounds__(MEETING_THREADS)
gather_ll_routes(const __grid_constant__ struct meeting meeting, const __grid_constant__ own_part own,
                 const __grid_constant__ gathered<T> to)
{
    start_next_if_alone(meeting);
    wait_for_input();
    const uint32_t number = next_number(meeting), eights = to.whole.width / 8, n = own.n_rows * eights;
    const uint32_t begin = blockIdx.x * blockDim.x + threadIdx.x, lanes = gridDim.x * blockDim.x;
    const uint32_t n_packets = sizeof(eight<T>) / sizeof(uint2) * blockDim.x;
    const auto is_own = [&](uint32_t row, uint32_t column) {
        const int32_t expert = own.routes[(size_t)row * own.route_stride + column / own.part_columns].expert;
        return expert >= own.first_id && expert < own.end_id;
    };
    for (uint32_t i = begin, at = threadIdx.x; i < n; i += lanes, at += n_packets) {
        const uint32_t row = i / eights, column = i % eights * 8;
        if (is_own(row, column))
            send(meeting, number, at, *(const eight<T> *)to.whole.at(row, column));
    }
    bool has_received = false;
    come(meeting, number);
    for (uint32_t i = begin, at = threadIdx.x; i < n; i += lanes, at += n_packets) {
        const uint32_t row = i / eights, column = i % eights * 8;
        if (is_own(row, column))
            continue;
        eight<T> x;
        has_received = true;
        receive(meeting, number, at, &x);
        *(eight<T> *)to.whole.at(row, column) = x;
    }
    await_ranks(meeting, number, has_received);
}

/* The same, and the sums over the routes, by the chain of experts_combine_parts. A block has eights of columns of one row, a
 * thread the same one of all routes. */
template <class T>
static __global__ void __launch_bounds__(MEETING_THREADS)
gather_ll_combine(const __grid_constant__ struct meeting meeting, const __grid_constant__ own_part own,
                  const __grid_constant__ struct mixture m, const rows<T> results, const rows<T> y)
{
    const uint32_t blocks_of_row = (y.width + 8 * blockDim.x - 1) / (8 * blockDim.x), row = blockIdx.x / blocks_of_row;
    const uint32_t column = 8 * (blockIdx.x % blocks_of_row * blockDim.x + threadIdx.x);
    const uint32_t n_packets = sizeof(eight<T>) / sizeof(uint2) * blockDim.x, n = column < y.width ? m.n_chosen : 0;
    const auto is_own = [&](uint32_t j) {
        const int32_t expert = __ldcg(&route_at(m, row * m.n_chosen + j)->expert);
        return expert >= own.first_id && expert < own.end_id;
    };
    start_next_if_alone(meeting);
    wait_for_input();
    const uint32_t number = next_number(meeting);
    for (uint32_t j = 0; j < n; j++)
        if (is_own(j))
            send(meeting, number, threadIdx.x + j * n_packets, *(const eight<T> *)results.at(row, j * y.width + column));
    bool has_received = false;
    float sum[8] = {}, values[8];
    come(meeting, number);
    for (uint32_t j = 0; j < n; j++) {
        eight<T> x;
        if (is_own(j)) {
            x = *(const eight<T> *)results.at(row, j * y.width + column);
        } else {
            has_received = true;
            receive(meeting, number, threadIdx.x + j * n_packets, &x);
        }
        to_floats(x, values);
        add_result(sum, route_weight(m, row * m.n_chosen + j), values);
    }
    if (n)
        *(eight<T> *)y.at(row, column) = to_eight<T>(sum);
    await_ranks(meeting, number, has_received);
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
    bool has_received = false;
    come(meeting, number);
#pragma unroll
    for (uint32_t i = 0; i < PARTS; i++) {
        const uint32_t column = 8 * (threadIdx.x + i * blockDim.x);
        if (column >= norm.size || column - to.first < own.n_columns)
            continue;
        has_received = true;
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
    await_ranks(meeting, number, has_received);
}

#endif
