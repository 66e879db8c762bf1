/* skinny_normed.cuh: for one row, sum = a + b, the sum's norm and y = the norm times W in one launch, each with the bits of
 * its own kernel: row_norm.cuh's order, skinny.cuh's chain of k16 steps. Every block norms the row by itself into its shared
 * memory, where wgmma takes it as the first of eight columns, while its part of W comes in as in skinny.cuh; the first block
 * writes sum. So no launch of a single block stands between the kernel before and W. Bound by the bytes of W; where these are
 * few, the norm, which each block reads behind them, takes longer than it would alone. */
#ifndef LLMPY_CUDA_SKINNY_NORMED_CUH
#define LLMPY_CUDA_SKINNY_NORMED_CUH

#include "row_norm.cuh"
#include "skinny.cuh"

#define NORMED_WORKERS 128u
#define NORMED_PARTS 4u /* of row_norm.cuh's threads that one of the workers stands for, at most */
#define NORMED_WEIGHTS (10u << 20) /* of W, at least */
#define NORMED_BEYOND 128u /* bytes behind the row that a product reads; the warps' sums of squares lie there */

struct normed_row {
    const void *a, *b;
    void *sum;
    const float *weight;
    float eps;
    uint32_t n_threads; /* row_norm.cuh's T */
};

static __device__ __forceinline__ void normed_meet(void)
{
    asm volatile("bar.sync 1,%0;" ::"n"(NORMED_WORKERS) : "memory");
}

/* Joins the squares of row_norm.cuh's threads threadIdx.x, threadIdx.x + 128, ... */
static __device__ __forceinline__ float normed_squares(float (&squares)[NORMED_PARTS], uint32_t n_threads, float *warps)
{
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (uint32_t apart = 1; apart < 32; apart *= 2)
#pragma unroll
        for (uint32_t j = 0; j < NORMED_PARTS; j++)
            squares[j] = squares[j] + __shfl_xor_sync(~0u, squares[j], apart);
#pragma unroll
    for (uint32_t j = 0; j < NORMED_PARTS; j++)
        if (lane == 0)
            warps[j * (NORMED_WORKERS / 32) + warp] = squares[j];
    normed_meet();
    float sum = warps[lane & (n_threads / 32 - 1)];
    for (uint32_t apart = 1; apart < n_threads / 32; apart *= 2)
        sum = sum + __shfl_xor_sync(~0u, sum, apart);
    return sum;
}

/* By the workers: the normed row into `kept`. */
template <class T> static __device__ __forceinline__ void norm_row(const struct normed_row &x, uint32_t size, T *kept)
{
    const uint32_t first = 8 * threadIdx.x, step = 8 * NORMED_WORKERS;
    float w[NORMED_PARTS][8], values[NORMED_PARTS][8], squares[NORMED_PARTS] = {};
    eight<T> a[NORMED_PARTS], b[NORMED_PARTS];
#pragma unroll
    for (uint32_t j = 0; j < NORMED_PARTS; j++)
        if (first + j * step < size)
            weight_part<true>(x.weight, 0, first + j * step, size, w[j]);
    wait_for_input();
#pragma unroll
    for (uint32_t j = 0; j < NORMED_PARTS; j++) {
        a[j] = part_of<true>((const T *)x.a, first + j * step, size);
        b[j] = part_of<true>((const T *)x.b, first + j * step, size);
    }
#pragma unroll
    for (uint32_t j = 0; j < NORMED_PARTS; j++)
        for (uint32_t i = 0; i < 8; i++) {
            values[j][i] = to_float(round_to<T>(to_float(a[j].values[i]) + to_float(b[j].values[i])));
            squares[j] = fmaf(values[j][i], values[j][i], squares[j]);
        }
    const float scale = norm_scale(normed_squares(squares, x.n_threads, (float *)(kept + size)), size, x.eps);
#pragma unroll
    for (uint32_t j = 0; j < NORMED_PARTS; j++) {
        const uint32_t column = first + j * step;
        if (column >= size)
            break;
        if (blockIdx.x == 0)
            store_eight((T *)x.sum + column, values[j]);
        scale_part(values[j], w[j], scale);
        store_eight(kept + column, values[j]);
    }
    shared_written();
    normed_meet();
}

template <class T, bool IS_PRODUCT>
static __global__ void __launch_bounds__(SKINNY_THREADS, 1)
multiply_normed(const __grid_constant__ CUtensorMap w_map, struct skinny_shape s, struct output out, struct normed_row row)
{
    extern __shared__ __align__(1024) uint8_t rings[];
    const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const uint32_t stage_blocks = skinny_stage_blocks(1), w_bytes = stage_blocks * s.tile_rows * 128;
    const uint32_t ring = shared_address(rings), x = ring + s.n_stages * w_bytes;
    const uint32_t full = x + s.n_blocks * 128 + NORMED_BEYOND, empty = full + 8 * s.n_stages;
    barriers_init(full, s.n_stages, 1);
    barriers_init(empty, s.n_stages, 4);
    barriers_made();
    __syncthreads();
    if (warp >= 4) {
        if (warp == 4 && lane == 0)
            skinny_load_w<IS_PRODUCT>(&w_map, s, stage_blocks, ring, full, empty, w_bytes);
        return;
    }
    norm_row(row, s.n_blocks * 64, (T *)(rings + s.n_stages * w_bytes));
    struct skinny_place at = {0, 0};
    for (uint32_t tile = blockIdx.x; tile < s.n_tiles; tile += gridDim.x) {
        float sum[4] = {};
        T added[4] = {};
        skinny_read_added<T, 1>(out, s, tile, added);
        skinny_sum<skinny_stage_blocks(1)>(full, empty, s.n_blocks, s.n_stages, &at, sum, [&](uint32_t block) {
            skinny_multiply<T, 1, skinny_stage_blocks(1), 8>(sum, wgmma_rows(ring + at.stage * w_bytes),
                                                             one_row(x + block * 128), s.tile_rows,
                                                             min(stage_blocks, s.n_blocks - block));
        });
        if (IS_PRODUCT)
            skinny_store_products<T, 1>(out, s, tile, sum);
        else
            skinny_store<T, 1>(out, s, tile, sum, added);
    }
}

/* ---- the host's side ---------------------------------------------------------------------------------------------------- */

static inline uint32_t normed_bytes(uint32_t n_stages, uint32_t tile_rows, uint32_t n_blocks)
{
    uint32_t beyond = (64 - tile_rows) * 128, after = n_blocks * 128 + NORMED_BEYOND + n_stages * 16;
    return n_stages * skinny_stage_blocks(1) * tile_rows * 128 + (after > beyond ? after : beyond);
}

static inline uint32_t normed_stages(uint32_t tile_rows, uint32_t n_blocks, uint32_t room)
{
    return ring_stages(room, [&](uint32_t n) { return normed_bytes(n, tile_rows, n_blocks); });
}

/* Does multiply_normed make what is wanted, faster than two launches? */
static inline bool normed_fits(const struct add_rms_norm_args *args)
{
    const struct matrix *matrix = args->linear->matrix;
    const struct view *views[] = {&args->a, &args->b, &args->sum};
    const uint32_t chains = args->out.width / 8, threads = row_threads(chains);
    bool fits = args->n_rows == 1 && !args->inner_weight && (size_t)matrix->n_rows * matrix->n_cols >= NORMED_WEIGHTS &&
                matrix->n_cols == args->out.width && chains <= threads && threads >= NORMED_WORKERS &&
                threads <= NORMED_WORKERS * NORMED_PARTS && (uintptr_t)args->weight % 16 == 0;
    for (const struct view *view : views)
        fits &= (uintptr_t)view->data % 16 == 0;
    return fits && args->sum.data != args->a.data && args->sum.data != args->b.data;
}

template <class T> static auto normed_kernel(bool is_product)
{
    return is_product ? multiply_normed<T, true> : multiply_normed<T, false>;
}

#endif
