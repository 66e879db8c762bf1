/* norm_route.cuh: for a few rows, one launch makes sum = a + b, out = the sum's norm, the router's logits of out and the
 * routes, each with the bits of its own kernel: row_norm.cuh's order, linear.cu's chain of k16 steps, route.cuh.
 *
 * A row has a cluster, a block eight experts, whose weights are fetched before the input is there. Every block norms the row by
 * itself; its first warpgroup multiplies by wgmma, both operands in shared memory: the eight rows of W are the first of 64, the
 * row is the first of eight columns. The logits meet in the first block, whose first warp routes; the last block writes sum and
 * out. Bound by latency: 19 cycles a step, 1.3 us for 2048 columns, and some 2,000 cycles for the routes. */
#ifndef LLMPY_CUDA_NORM_ROUTE_CUH
#define LLMPY_CUDA_NORM_ROUTE_CUH

#include "cluster.cuh"
#include "route.cuh"
#include "row_norm.cuh"
#include "wgmma.cuh"

#define ROUTER_EXPERTS 8u /* of a block */
#define ROUTER_BLOCKS 16u /* of a cluster, at most */
#define ROUTER_ROWS 8u    /* in a call, at most */
#define ROUTER_GROUP 4u   /* blocks of 64 columns that are multiplied at a time */
#define ROUTER_THREADS 512u

/* The router's weights, and what its sums get. */
struct router {
    const char *w;
    size_t row_bytes;
    const float *bias;
};

/* Shared memory: eight rows of W in blocks of 64 columns, then the normed row. A product reads on where either ends. */
static inline uint32_t router_bytes(uint32_t size)
{
    uint32_t row = size * 2 + 112, beyond = 7 * 1024;
    return size * 2 * ROUTER_EXPERTS + (row > beyond ? row : beyond);
}

/* 16 bytes on their way to shared memory. */
static __device__ __forceinline__ void copy_eight(uint32_t target, const void *from)
{
    asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(target), "l"(from) : "memory");
}

static __device__ __forceinline__ void copies_done(void)
{
    asm volatile("cp.async.wait_all;" ::: "memory");
}

/* What the thread has written to shared memory is seen by wgmma; the block still has to meet. */
static __device__ __forceinline__ void tile_written(void)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* The thread's eight columns of the block's rows of W, in the 128-byte swizzle. */
static __device__ __forceinline__ void fetch_router(const struct router &router, uint32_t tile, uint32_t first)
{
    uint32_t t = threadIdx.x, target = tile + t / 8 * 1024;
    const char *from = router.w + first * router.row_bytes + 16 * t;
#pragma unroll
    for (uint32_t r = 0; r < ROUTER_EXPERTS; r++)
        copy_eight(target + r * 128 + ((t % 8 ^ r) << 4), from + r * router.row_bytes);
}

/* Describes a row as it lies in memory as the first of eight, each of which begins 16 bytes behind the one before. An address
 * in a cluster names its block in the upper bits, where other fields of the description are. */
static __device__ __forceinline__ uint64_t one_row(uint32_t address)
{
    return (uint64_t)1 << 32 | (uint64_t)1 << 16 | (address & 0x3ffff) >> 4;
}

template <class T, uint32_t BLOCKS>
static __device__ __forceinline__ void multiply_blocks(uint64_t w, uint64_t x, float (&sum)[4])
{
    wgmma_begin();
#pragma unroll
    for (uint32_t i = 0; i < 4 * BLOCKS; i++)
        wgmma(sum, w + i / 4 * 64 + i % 4 * 2, x + 2 * i, T());
    wgmma_commit();
}

/* By a warpgroup: the sum of the row and row lane / 4 of W, in the lanes whose lane % 4 is 0. */
template <class T> static __device__ __forceinline__ float multiply_row(uint64_t w, uint64_t x, uint32_t n_blocks)
{
    float sum[4] = {};
    for (; n_blocks % ROUTER_GROUP; n_blocks--, w += 64, x += 8) {
        multiply_blocks<T, 1>(w, x, sum);
        wgmma_wait<0>();
    }
    for (; n_blocks; n_blocks -= ROUTER_GROUP, w += 64 * ROUTER_GROUP, x += 8 * ROUTER_GROUP) {
        multiply_blocks<T, ROUTER_GROUP>(w, x, sum);
        wgmma_wait<1>();
    }
    wgmma_wait<0>();
    asm volatile("" : "+f"(sum[0]));
    return sum[0];
}

template <class T, uint32_t N>
static __global__ void __launch_bounds__(ROUTER_THREADS)
norm_route(norm_source<T> x, rows<T> out, const float *weight, uint32_t size, float eps, struct router router,
           struct route_args a)
{
    extern __shared__ __align__(1024) uint8_t tile[];
    __shared__ float logits[ROUTER_EXPERTS * ROUTER_BLOCKS];
    __shared__ struct route best[BEST_PLACES];
    __shared__ uint64_t there;
    const uint32_t rank = blockIdx.x, row = blockIdx.y, column = 8 * threadIdx.x;
    const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const uint32_t expert = rank * ROUTER_EXPERTS + lane / 4, barrier = shared_address(&there);
    T *kept = (T *)(tile + size * 2 * ROUTER_EXPERTS);
    float w[8], values[8], choices[N], squares = 0;
    start_next();
    if (column < size)
        fetch_router(router, shared_address(tile), rank * ROUTER_EXPERTS);
    if (threadIdx.x == 0) {
        barrier_init(barrier, 1);
        barriers_made();
        barrier_expect(barrier, a.n_experts * sizeof(float));
    }
    weight_part<true>(weight, 0, column, size, w);
    read_choice_bias(a, choices, lane);
    float bias = router.bias ? router.bias[expert] : 0;
    copies_done();
    wait_for_input();
    take_part<true, true>(x, row, 0, column, size, values);
#pragma unroll
    for (uint32_t i = 0; i < 8; i++)
        squares = fmaf(values[i], values[i], squares);
    float scale = norm_scale(block_squares(squares, 0, blockDim.x / 32), size, eps);
    cluster_arrive(); /* a and b are read */
    eight<T> sums = to_eight<T>(values);
    scale_part(values, w, scale);
    eight<T> normed = to_eight<T>(values);
    if (column < size)
        *(eight<T> *)(kept + column) = normed;
    tile_written();
    __syncthreads();
    float sum = 0;
    if (warp < 4)
        sum = multiply_row<T>(wgmma_rows(shared_address(tile)), one_row(shared_address(kept)), size / 64);
    cluster_wait();
    if (warp == 0 && lane % 4 == 0)
        send(address_in(shared_address(&logits[expert]), 0), router.bias ? sum + bias : sum, address_in(barrier, 0));
    if (rank == gridDim.x - 1 && column < size) {
        *(eight<T> *)x.sum.at(row, column) = sums;
        *(eight<T> *)out.at(row, column) = normed;
    }
    if (rank || warp)
        return;
    barrier_wait(barrier, 0);
    float all[N];
    read_logits(logits, a.n_experts, all, lane);
    route_row<N, false>(a, all, choices, a.routes + (size_t)row * a.route_stride, best, NULL, lane);
}

/* ---- the host's side ---------------------------------------------------------------------------------------------------- */

template <class T> static auto norm_route_kernel(uint32_t n_experts)
{
    return n_experts <= 32 ? norm_route<T, 1> : norm_route<T, 4>;
}

static inline cudaLaunchConfig_t norm_route_config(const struct cuda *cuda, uint32_t n_blocks, uint32_t n_rows, uint32_t size,
                                                   cudaLaunchAttribute (&attributes)[2])
{
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = n_blocks;
    attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(n_blocks, n_rows);
    config.blockDim = dim3(row_threads(size / 8));
    config.dynamicSmemBytes = router_bytes(size);
    config.stream = cuda->stream;
    config.attrs = attributes;
    config.numAttrs = 2;
    return config;
}

/* Can the kernel make what is wanted? */
static inline bool norm_route_fits(const struct cuda *cuda, const struct add_rms_norm_args *args, bool is_aligned)
{
    const struct matrix *matrix = args->router->matrix;
    const struct route_args *route = args->route;
    uint32_t n = route->n_experts, chains = args->out.width / 8, threads = row_threads(chains);
    bool fits_row = is_aligned && !args->inner_weight && args->n_rows <= ROUTER_ROWS && threads >= chains && threads >= 128;
    bool fits_matrix = matrix->is_whole && matrix->parts[0].dtype == cuda->dtype && matrix->n_cols % 64 == 0;
    bool fits_route = n % ROUTER_EXPERTS == 0 && n <= ROUTER_EXPERTS * ROUTER_BLOCKS && route->n_groups <= 1 &&
                      route->n_chosen && route->n_chosen <= min(n, ROUTE_MAX_CHOSEN);
    return cuda->has_router_clusters && fits_row && fits_matrix && fits_route;
}

template <class T> static void launch_norm_route(const struct cuda *cuda, const struct add_rms_norm_args *args)
{
    const struct matrix *matrix = args->router->matrix;
    struct router router = {matrix->data, matrix->parts[0].row_bytes, args->router->bias};
    norm_source<T> x = {rows<T>(args->a), rows<T>(args->b), rows<T>(args->sum)};
    cudaLaunchAttribute attributes[2] = {};
    uint32_t n_experts = args->route->n_experts, size = args->out.width;
    cudaLaunchConfig_t config = norm_route_config(cuda, n_experts / ROUTER_EXPERTS, args->n_rows, size, attributes);
    cudaLaunchKernelEx(&config, norm_route_kernel<T>(n_experts), x, rows<T>(args->out), args->weight, size, args->eps, router,
                       *args->route);
}

/* Lets the kernels use what they need, and finds out whether the device holds their largest clusters. */
template <class T> static cudaError_t norm_route_open(struct cuda *cuda)
{
    const uint32_t most = 8 * ROUTER_THREADS;
    cudaError_t code = cudaSuccess;
    for (uint32_t n_experts : {32u, ROUTER_EXPERTS * ROUTER_BLOCKS}) {
        auto kernel = norm_route_kernel<T>(n_experts);
        code = code ? code : cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, router_bytes(most));
        code = code ? code : cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    }
    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchConfig_t config = norm_route_config(cuda, ROUTER_BLOCKS, 1, most, attributes);
    config.numAttrs = 1;
    int n = 0;
    code = code ? code : cudaOccupancyMaxActiveClusters(&n, norm_route<T, 4>, &config);
    cuda->has_router_clusters = n > 0;
    return code;
}

#endif
