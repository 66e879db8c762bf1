/* experts_routes.cuh: the results of a row's routes where ranks share a mixture. A row of them has n_chosen equal parts; part j
 * is of the row's route j. A rank stores what its experts make (experts_scatter), gathers the parts of the other ranks, and
 * then adds all parts up (experts_combine_parts) by the chain of experts_combine. Bound by the bytes of the parts. */
#ifndef LLMPY_CUDA_EXPERTS_ROUTES_CUH
#define LLMPY_CUDA_EXPERTS_ROUTES_CUH

#include "../core/eight.cuh"
#include "../linear/linear.cuh"
#include "experts.cuh"

#define ROUTE_THREADS 128u

/* Experts that a rank does not hold have no place. */
struct held_experts {
    uint32_t first, n;
    __device__ __forceinline__ uint32_t number(const struct route *route) const { return (uint32_t)route->expert - first; }
    __device__ __forceinline__ bool has(const struct route *route) const { return number(route) < n; }
};

/* Where the parts also go: bytes from y to the same place on other ranks. */
struct part_mirrors {
    uint32_t n;
    ptrdiff_t to[MAX_MIRRORS];
};

/* Puts the rows of places into the parts of their routes, from column `first_column` of a part on. */
template <class T, bool IS_ALIGNED>
static __global__ void __launch_bounds__(ROUTE_THREADS)
experts_scatter(struct mixture m, struct held_experts held, rows<T> from, rows<T> y, uint32_t part_columns,
                uint32_t first_column, const __grid_constant__ struct part_mirrors mirrors)
{
    const uint32_t i = blockIdx.x, column = 8 * (blockIdx.y * ROUTE_THREADS + threadIdx.x);
    float values[8];
    start_next();
    wait_for_input();
    if (!held.has(route_at(m, i)))
        return;
    load_part<IS_ALIGNED>(from.at(m.places[i], 0), column, from.width, values);
    T *part = y.at(i / m.n_chosen, i % m.n_chosen * part_columns + first_column);
    store_part<IS_ALIGNED>(part, column, from.width, values);
    for (uint32_t r = 0; r < mirrors.n; r++)
        store_part<IS_ALIGNED>((T *)((char *)part + mirrors.to[r]), column, from.width, values);
}

template <class T, bool IS_ALIGNED>
static __global__ void __launch_bounds__(ROUTE_THREADS) experts_combine_parts(struct mixture m, rows<T> results, rows<T> y)
{
    const uint32_t row = blockIdx.x, column = 8 * (blockIdx.y * ROUTE_THREADS + threadIdx.x);
    float sum[8] = {};
    start_next();
    wait_for_input();
    for (uint32_t j = 0; j < m.n_chosen; j++) {
        float values[8];
        const float weight = route_weight(m, row * m.n_chosen + j);
        load_part<IS_ALIGNED>(results.at(row, j * y.width), column, y.width, values);
        add_result(sum, weight, values);
    }
    store_part<IS_ALIGNED>(y.at(row, 0), column, y.width, sum);
}

#endif
