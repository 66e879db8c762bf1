/* norm_route.cuh: for a few rows, one launch makes sum = a + b, out = the sum's norm, the router's logits of out and the
 * routes, each with the bits of its own kernel: row_norm.cuh's order, router.cuh's chain, route.cuh.
 *
 * A row has a cluster, a block 16 experts. The block loads their weights into registers before the input is complete. Every
 * block norms the row by itself, and a warp multiplies the 256 columns that it has normed. The parts' sums go to the first
 * block, where the last warps add and route them while the other warps write sum and out. The next launch may poll the routes
 * while this one runs: before it starts, this launch sets their experts below zero. Bound by latency. */
#ifndef LLMPY_CUDA_NORM_ROUTE_CUH
#define LLMPY_CUDA_NORM_ROUTE_CUH

#include "../core/cluster.cuh"
#include "../core/launch.cuh"
#include "../core/wgmma.cuh"
#include "../experts/route.cuh"
#include "../experts/router.cuh"
#include "row_norm.cuh"

#define ROUTED_EXPERTS 128u /* at most: a cluster of eight blocks */
#define ROUTED_ROWS 8u      /* in a call, at most */
#define ROUTED_THREADS 512u /* that have a row, at most */

/* A call. */
template <class T> struct routed {
    norm_source<T> x;
    rows<T> out;
    const float *weight;
    uint32_t size;
    float inverse_size, eps;
    struct router router;
    struct route_args route;
};

struct routed_room {
    uint4 row[ROUTED_THREADS];
    float parts[ROUTER_PARTS][ROUTED_EXPERTS];
    struct route_room<ROUTED_EXPERTS / 32> route;
    uint64_t there; /* barrier: all parts */
};

/* The warp's part of the row's products, to the first block. */
template <class T>
static __device__ __forceinline__ void send_part(const struct router_weights &w, uint32_t warp, struct routed_room &room,
                                                 uint32_t n_experts)
{
    uint32_t lane = threadIdx.x % 32, expert = blockIdx.x * ROUTER_TILE + lane / 4 + lane % 4 * 8;
    float sum[2];
    multiply_one<T>(w, room.row + 32 * warp, sum);
    if (lane % 4 < 2 && expert < n_experts)
        send(address_in(shared_address(&room.parts[warp][expert]), 0), lane % 4 ? sum[1] : sum[0],
             address_in(shared_address(&room.there), 0));
}

/* The first n_warps of a block. */
template <class T>
static __device__ __forceinline__ void norm_row(const struct routed<T> &job, struct routed_room &room, uint32_t warp,
                                                uint32_t n_warps)
{
    const uint32_t row = blockIdx.y, t = threadIdx.x, column = 8 * t;
    const bool has_part = warp * ROUTER_PART < job.size;
    struct router_weights router_w;
    float w[8], values[8], squares = 0;
    if (has_part)
        fetch_weights<T>(job.router, blockIdx.x, warp, router_w);
    weight_part<true>(job.weight, 0, column, job.size, w);
    cluster_wait();
    wait_for_input();
    if (blockIdx.x)
        start_next(); /* not before: the next kernel's first blocks would slow down attention, two kernels before this one */
    take_part<true, true>(job.x, row, 0, column, job.size, values);
#pragma unroll
    for (uint32_t i = 0; i < 8; i++)
        squares = fmaf(values[i], values[i], squares);
    float scale = norm_scale(block_squares(squares, 0, n_warps), job.inverse_size, job.eps);
    const eight<T> sums = to_eight<T>(values);
    scale_part(values, w, scale);
    const eight<T> normed = to_eight<T>(values);
    room.row[t] = split(*(const uint4 *)&normed);
    __syncwarp();
    if (has_part)
        send_part<T>(router_w, warp, room, job.router.n_experts);
    if (blockIdx.x || column >= job.size)
        return;
    barrier_wait(shared_address(&room.there), 0); /* all blocks have read a and b */
    *(eight<T> *)job.x.sum.at(row, column) = sums;
    *(eight<T> *)job.out.at(row, column) = normed;
}

/* Marks all routes as not chosen yet. The first warp of the first block's team does it, and starts the next launch for the
 * block. */
static __device__ __forceinline__ void open_routes(struct route *routes, uint32_t n_chosen, uint32_t t)
{
    if (t < n_chosen)
        store_route(routes + t, ~0u, 0);
    __threadfence();
    start_next();
}

/* Thread t of the first block's team. */
static __device__ __forceinline__ void route_parts(const struct route_args &a, const float *bias, struct routed_room &room,
                                                   uint32_t t, uint32_t n_parts)
{
    const bool is_expert = t < a.n_experts;
    const float own_bias = bias && is_expert ? bias[t] : 0;
    const float choice_bias = a.selection_bias && is_expert ? a.selection_bias[t] : 0;
    struct route *routes = a.routes + (size_t)blockIdx.y * a.route_stride;
    cluster_wait();
    wait_for_input();
    if (t < 32)
        open_routes(routes, a.n_chosen, t);
    barrier_wait(shared_address(&room.there), 0);
    float logit = sum_parts(&room.parts[0][t], ROUTED_EXPERTS, n_parts);
    route_row<false>(a, bias ? logit + own_bias : logit, choice_bias, t, routes, room.route);
}

template <class T>
static __global__ void __launch_bounds__(ROUTED_THREADS + ROUTED_EXPERTS) norm_route(const struct routed<T> job)
{
    only_sm_90a();
    __shared__ struct routed_room room;
    const uint32_t n_parts = (job.size + ROUTER_PART - 1) / ROUTER_PART, n_team = (job.route.n_experts + 31) / 32;
    const uint32_t n_warps = blockDim.x / 32 - n_team, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (threadIdx.x == 0) {
        barrier_init(shared_address(&room.there), 1);
        barriers_made();
        barrier_expect(shared_address(&room.there), n_parts * job.route.n_experts * sizeof(float));
    }
    cluster_arrive();
    if (warp < n_warps) {
        norm_row(job, room, warp, n_warps);
    } else if (blockIdx.x == 0) {
        route_parts(job.route, job.router.bias, room, threadIdx.x - 32 * n_warps, n_parts);
    } else {
        cluster_wait();
        wait_for_input();
    }
}

/* ---- the host's side ----------------------------------------------------------------------------------------------------- */

/* True if the kernel can compute the call. */
static inline bool norm_route_fits(const struct add_rms_norm_args *args, bool is_aligned)
{
    const struct route_args *route = args->route;
    uint32_t chains = args->out.width / 8, threads = row_threads(chains);
    bool fits_row = is_aligned && !args->inner_weight && args->n_rows <= ROUTED_ROWS && threads >= chains;
    bool fits_route = route->n_experts <= ROUTED_EXPERTS && route->n_groups <= 1 && route->n_chosen &&
                      route->n_chosen <= min(route->n_experts, ROUTE_MAX_CHOSEN);
    return fits_row && fits_route && args->router->matrix->is_router;
}

template <class T> static void launch_norm_route(const struct cuda *cuda, const struct add_rms_norm_args *args)
{
    const uint32_t size = args->out.width, n_experts = args->route->n_experts, n_blocks = ceil_div(n_experts, ROUTER_TILE);
    const struct routed<T> job = {{rows<T>(args->a), rows<T>(args->b), rows<T>(args->sum)},
                                  rows<T>(args->out),
                                  args->weight,
                                  size,
                                  1.0f / (float)size,
                                  args->eps,
                                  router_of(args->router),
                                  route_wanted(args->route)};
    launch_clusters(cuda, norm_route<T>, dim3(n_blocks, args->n_rows), n_blocks,
                    row_threads(size / 8) + 32 * ceil_div(n_experts, 32), 0, job);
}

#endif
