/* linear_row.cuh: y = x W for one row x. Each block has the whole row in shared memory, where wgmma takes it as the first of
 * eight columns. W comes in as in linear_skinny.cuh, with its chain of k16 steps. x is given, or it is the norm of sum = a + b:
 * then one launch makes sum, norm and product, each with the bits of its separate kernel, in row_norm.cuh's order. Every block
 * norms the row itself and the first block writes sum, so no launch of a single block delays W. Bound by the bytes of W. The
 * norm reads the row behind the first bytes of W; for a small W it takes longer than it would alone. */
#ifndef LLMPY_CUDA_LINEAR_ROW_CUH
#define LLMPY_CUDA_LINEAR_ROW_CUH

#include "../core/launch.cuh"
#include "../norm/row_norm.cuh"
#include "linear_skinny.cuh"

#define NORMED_WORKERS 128u
#define NORMED_PARTS 4u /* of row_norm.cuh's threads that one of the workers stands for, at most */
#define NORMED_WEIGHTS (10u << 20) /* of W, at least */
#define ROW_BEYOND 128u /* bytes behind the row that a product reads; a norm keeps the warps' sums of squares in them */

/* Of a row as given a alone. */
struct skinny_row {
    const void *a, *b;
    void *sum;
    const float *weight;
    float eps;
    uint32_t n_threads; /* row_norm.cuh's T */
};

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
    meet(1, NORMED_WORKERS);
    float sum = warps[lane & (n_threads / 32 - 1)];
    for (uint32_t apart = 1; apart < n_threads / 32; apart *= 2)
        sum = sum + __shfl_xor_sync(~0u, sum, apart);
    return sum;
}

/* By the workers: the normed row, eight values at a time, to keep(column, values), which puts them into shared memory. warps:
 * room there for the warps' sums of squares. */
template <class T, class KEEP>
static __device__ __forceinline__ void norm_row(const struct skinny_row &x, uint32_t size, float *warps, KEEP keep)
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
    const float scale = norm_scale(normed_squares(squares, x.n_threads, warps), size, x.eps);
#pragma unroll
    for (uint32_t j = 0; j < NORMED_PARTS; j++) {
        const uint32_t column = first + j * step;
        if (column >= size)
            break;
        if (blockIdx.x == 0)
            store_eight((T *)x.sum + column, values[j]);
        scale_part(values[j], w[j], scale);
        keep(column, values[j]);
    }
    shared_written();
    meet(1, NORMED_WORKERS);
}

template <class T, bool IS_PRODUCT, bool IS_NORMED>
static __global__ void __launch_bounds__(SKINNY_THREADS, 1)
linear_row(const __grid_constant__ CUtensorMap w_map, struct skinny_shape s, struct output out, struct skinny_row row)
{
    only_sm_90a();
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const uint32_t stage_blocks = skinny_stage_blocks(1);
    const uint32_t w_bytes = stage_blocks * s.tile_rows * 128, x_bytes = s.n_blocks * 128;
    const uint32_t data = shared_address(shared), x = data + s.n_stages * w_bytes;
    const uint32_t full = x + x_bytes + ROW_BEYOND, empty = full + 8 * s.n_stages, x_there = empty + 8 * s.n_stages;
    const struct ring rings[] = {{data, full, empty, s.n_stages, w_bytes}};
    rings[0].make_barriers(1, 4);
    barriers_init(x_there, 1, 1);
    barriers_made();
    __syncthreads();
    if (warp >= 4) {
        if (warp == 4 && lane == 0)
            skinny_load_w<IS_PRODUCT>(&w_map, s, stage_blocks, rings[0], IS_NORMED || s.is_held ? 0 : x_there);
        if (!IS_NORMED && warp == 5 && lane == 0) {
            wait_for_input();
            barrier_expect(x_there, x_bytes);
            copy_bytes(x, row.a, x_bytes, x_there);
        }
        return;
    }
    if (IS_NORMED) {
        T *kept = (T *)(shared + s.n_stages * w_bytes);
        norm_row<T>(row, s.n_blocks * 64, (float *)(kept + s.n_blocks * 64),
                    [&](uint32_t column, const float (&values)[8]) { store_eight(kept + column, values); });
    } else
        wait_for_input();
    struct ring_place at = RING_READ;
    for (uint32_t tile = blockIdx.x; tile < s.n_tiles; tile += gridDim.x) {
        float sum[4] = {};
        struct skinny_joined<T, 1> joined = {};
        skinny_read<IS_PRODUCT>(out, s, tile, joined);
        if (!IS_NORMED)
            barrier_wait(x_there, 0);
        auto multiply = [&](uint32_t block, auto half_way) {
            skinny_multiply<T, 1, skinny_stage_blocks(1), 8>(sum, wgmma_rows(rings[0].data_of(at)),
                                                             one_row(x + block * 128), s.tile_rows,
                                                             min(stage_blocks, s.n_blocks - block), half_way);
        };
        skinny_sum<skinny_stage_blocks(1)>(rings, s.n_blocks, at, sum, multiply);
        skinny_store<IS_PRODUCT>(out, s, tile, sum, joined);
    }
}

/* ---- the host's side ----------------------------------------------------------------------------------------------------- */

static inline uint32_t row_bytes(uint32_t n_stages, uint32_t tile_rows, uint32_t n_blocks)
{
    uint32_t beyond = (64 - tile_rows) * 128, after = n_blocks * 128 + ROW_BEYOND + n_stages * 16 + 8;
    return n_stages * skinny_stage_blocks(1) * tile_rows * 128 + (after > beyond ? after : beyond);
}

static inline uint32_t row_stages(uint32_t tile_rows, uint32_t n_blocks, uint32_t room)
{
    return ring_stages(room, [&](uint32_t n) { return row_bytes(n, tile_rows, n_blocks); });
}

/* True if shared memory holds the row and a ring. */
static inline bool row_fits(const struct matrix *matrix, const struct skinny_form *form)
{
    return row_bytes(2, form->tile_rows, matrix->n_cols / 64) <= skinny_room(true);
}

/* True if a linear of one row computes the sum and norm before it faster than two launches. */
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

template <class T> static auto row_kernel(bool is_product, bool is_normed)
{
    if (is_normed)
        return is_product ? linear_row<T, true, true> : linear_row<T, false, true>;
    return is_product ? linear_row<T, true, false> : linear_row<T, false, false>;
}

#endif
