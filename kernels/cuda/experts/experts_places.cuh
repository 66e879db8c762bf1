/* experts_places.cuh: where the rows of routes lie between the products of experts.cu. experts_sort gives every route of more
 * than 8 rows a place, an expert's places side by side in the order of their routes, and gathers their rows of x;
 * experts_combine adds the results of a row's places. Bound by the bytes of the rows: sorting 65,536 routes of 128 experts and
 * gathering rows of 4 KB moves 0.3 GB, 80 us on an H200. */
#ifndef LLMPY_CUDA_EXPERTS_PLACES_CUH
#define LLMPY_CUDA_EXPERTS_PLACES_CUH

#include "../core/eight.cuh"
#include "../core/launch.cuh"
#include "experts.cuh"
#include "experts_routes.cuh"

#define SORTERS 1024u
#define SORTERS_GATHER_ROWS (SORTERS / 32) /* rows, at most, of which experts_sort gathers: one a warp */
#define COMBINERS 128u

/* What is gathered for a route, and of which experts. */
struct sort_input {
    struct held_experts held;
    uint32_t part_columns; /* 0, or the columns of a part: route j of a row takes part j of x */
    bool is_scaled;        /* by the route's weight */
    bool is_late;          /* experts_gather gathers */
};

/* The row of x that is gathered for a place. */
template <class T, bool IS_ALIGNED> struct gathered_row {
    const T *from;
    T *to;
    uint32_t n_columns;
    float weight;
    bool is_scaled;
    __device__ __forceinline__ gathered_row(const struct mixture &m, const struct sort_input &input, const rows<T> &x,
                                            uint32_t width, T *gathered, uint32_t place)
        : to(gathered + (size_t)place * width), n_columns(width), weight(1), is_scaled(input.is_scaled)
    {
        const uint32_t i = m.entries[place];
        from = x.at(i / m.n_chosen, i % m.n_chosen * input.part_columns);
        if (is_scaled)
            weight = route_at(m, i)->weight;
    }
    /* Eight columns. */
    __device__ __forceinline__ void copy(uint32_t column) const
    {
        if (IS_ALIGNED && !is_scaled) {
            if (column < n_columns)
                *(eight<T> *)(to + column) = *(const eight<T> *)(from + column);
            return;
        }
        float values[8];
        load_part<IS_ALIGNED>(from, column, n_columns, values);
#pragma unroll
        for (uint32_t c = 0; c < 8; c++)
            values[c] *= weight;
        store_part<IS_ALIGNED>(to, column, n_columns, values);
    }
};

/* Among the routes from first to end, counts the routes of experts before e, and the routes of e. */
static __device__ __forceinline__ void count_routes(const struct mixture &m, const struct held_experts &held, uint32_t e,
                                                    uint32_t first, uint32_t end, uint32_t *n_before, uint32_t *n_own)
{
#pragma unroll 4
    for (uint32_t i = first; i < end; i += 32) {
        uint32_t at = i + threadIdx.x % 32, expert = at < end ? held.number(route_at(m, at)) : EXPERTS_MAX;
        *n_before += __popc(__ballot_sync(~0u, expert < e));
        *n_own += __popc(__ballot_sync(~0u, expert == e));
    }
}

/* Block e computes the places of expert e's routes, and gathers their rows of x unless that is_late. Each warp scans a part of
 * all routes. */
template <class T, bool IS_ALIGNED>
static __global__ void __launch_bounds__(SORTERS)
experts_sort(struct mixture m, struct sort_input input, rows<T> x, uint32_t n_columns, T *gathered)
{
    __shared__ uint32_t before[32], own[32];
    const uint32_t e = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t per_warp = (m.n_routes + SORTERS - 1) / SORTERS * 32;
    const uint32_t begin = min(warp * per_warp, m.n_routes), end = min(begin + per_warp, m.n_routes);
    start_next();
    wait_for_input();
    uint32_t n_before = 0, n_own = 0;
    count_routes(m, input.held, e, begin, end, &n_before, &n_own);
    if (lane == 0) {
        before[warp] = n_before;
        own[warp] = n_own;
    }
    __syncthreads();
    const uint32_t first = __reduce_add_sync(~0u, before[lane]), n = __reduce_add_sync(~0u, own[lane]);
    uint32_t place = first + __reduce_add_sync(~0u, lane < warp ? own[lane] : 0);
#pragma unroll 4
    for (uint32_t i = begin; i < end; i += 32) {
        bool is_own = i + lane < end && input.held.number(route_at(m, i + lane)) == e;
        uint32_t mask = __ballot_sync(~0u, is_own), at = place + __popc(mask & ((1u << lane) - 1));
        if (is_own) {
            m.places[i + lane] = at;
            m.entries[at] = i + lane;
        }
        place += __popc(mask);
    }
    if (threadIdx.x == 0) {
        m.offsets[e] = first;
        if (e == m.n_experts - 1)
            m.offsets[m.n_experts] = first + n;
    }
    if (input.is_late)
        return;
    __syncthreads();
    for (uint32_t p = first + warp; p < first + n; p += SORTERS / 32) {
        const gathered_row<T, IS_ALIGNED> row(m, input, x, n_columns, gathered, p);
#pragma unroll 4
        for (uint32_t column = 8 * lane; column < n_columns; column += 8 * 32)
            row.copy(column);
    }
}

/* The rows of x of the routes that have places. */
template <class T, bool IS_ALIGNED>
static __global__ void __launch_bounds__(COMBINERS)
experts_gather(struct mixture m, struct sort_input input, rows<T> x, uint32_t n_columns, T *gathered)
{
    start_next();
    wait_for_input();
    if (blockIdx.x < m.offsets[m.n_experts])
        gathered_row<T, IS_ALIGNED>(m, input, x, n_columns, gathered, blockIdx.x)
            .copy(8 * (blockIdx.y * COMBINERS + threadIdx.x));
}

/* y[r] = the sum of the results of r's routes. Results lie by places. */
template <class T, bool IS_ALIGNED>
static __global__ void __launch_bounds__(COMBINERS) experts_combine(struct mixture m, rows<T> results, rows<T> y)
{
    const uint32_t row = blockIdx.x, column = 8 * (blockIdx.y * COMBINERS + threadIdx.x), lane = threadIdx.x % 32;
    float sum[8] = {};
    start_next();
    wait_for_input();
    uint32_t route = row * m.n_chosen + min(lane, m.n_chosen - 1), place = m.places[route];
    float weight = route_weight(m, route);
#pragma unroll 8
    for (uint32_t i = 0; i < m.n_chosen; i++) {
        float values[8], weight_i = __shfl_sync(~0u, weight, i);
        load_part<IS_ALIGNED>(results.at(__shfl_sync(~0u, place, i), 0), column, y.width, values);
        add_result(sum, weight_i, values);
    }
    store_part<IS_ALIGNED>(y.at(row, 0), column, y.width, sum);
}

#endif
