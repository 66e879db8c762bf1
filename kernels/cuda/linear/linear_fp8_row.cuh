/* linear_fp8_row.cuh: the linears of linear_fp8.cuh for one row of x, without a launch that rounds it: each block rounds the
 * row itself, behind the first bytes of W, and keeps it in shared memory, where wgmma takes it as the first of eight columns. x
 * is given, or it is the norm of sum = a + b, as in linear_row.cuh. W comes in as in linear_fp8_few.cuh. Bound by the bytes of
 * W. */
#ifndef LLMPY_CUDA_LINEAR_FP8_ROW_CUH
#define LLMPY_CUDA_LINEAR_FP8_ROW_CUH

#include "linear_fp8.h"
#include "linear_fp8_few.cuh"
#include "linear_row.cuh"

#define FP8_ROW_WORKERS 128u
#define FP8_ROW_BEYOND 128u /* bytes behind the row that a product reads; a norm keeps the warps' sums of squares in them */
#define FP8_HELD_TILE (160u << 10) /* bytes of a block's only tile that it holds as a whole, at most */
#define FP8_ROW_STAGES 3u   /* of W, at least, beside those that a given row passes through */

/* The row. The copy engine brings a given one through the last stages of W, or the workers read it. */
struct fp8_row {
    struct skinny_row row;
    uint32_t width, n_passed; /* these stages; 0: the workers read it */
    bool is_aligned;
};

/* A block's shared memory: W and its scales; the rounded row in x, whose one barrier `full` says that it is there; its scales.
 * The barrier behind says that the given row has come. */
static __device__ __forceinline__ struct fp8_few_room fp8_row_place(uint32_t shared, const struct skinny_shape &s)
{
    const uint32_t n = s.n_stages, w_bytes = fp8_stage_slabs(1) * s.tile_rows * FP8_SLAB;
    struct fp8_few_room room = {};
    const uint32_t x_data = shared + n * w_bytes;
    room.w_scales = x_data + s.n_blocks * FP8_SLAB + FP8_ROW_BEYOND;
    room.w_scales_bytes = s.tile_rows * FP8_CHUNK * sizeof(float);
    room.x_scales = room.w_scales + n * room.w_scales_bytes;
    const uint32_t w_full = (room.x_scales + s.n_blocks * (uint32_t)sizeof(float) + 7) / 8 * 8, empty = w_full + 8 * n;
    room.w = {shared, w_full, empty, n, w_bytes};
    room.x = {x_data, empty + 8 * n, 0, 1, 0};
    return room;
}

static __device__ __forceinline__ uint32_t fp8_row_came(const struct fp8_few_room &room)
{
    return room.x.full + 8;
}

/* By one thread: the given row into the last stages of W. */
static __device__ __forceinline__ void fp8_row_fetch(const struct fp8_few_room &room, const struct fp8_row &x)
{
    wait_for_input();
    barrier_expect(fp8_row_came(room), x.width * 2);
    copy_bytes(room.w.data + (room.w.n_stages - x.n_passed) * room.w.stage_bytes, x.row.a, x.width * 2, fp8_row_came(room));
}

/* By the workers: the rounded row and its scales, for all of them, the tensor cores and the stream of W. */
template <class T, class N>
static __device__ __forceinline__ void fp8_round_row(const struct fp8_row &x, const struct fp8_few_room &room, const uint8_t *w,
                                                     uint32_t n_slabs, const struct fp8_rows &to)
{
    const T *from = (const T *)x.row.a;
    if (x.n_passed) {
        from = (const T *)(w + (room.w.n_stages - x.n_passed) * room.w.stage_bytes);
        barrier_wait(fp8_row_came(room), 0);
    }
    fp8_round_slabs<N>(0, threadIdx.x / FP8_LANES, FP8_ROW_WORKERS / FP8_LANES, n_slabs, to,
                       [&](uint32_t column, float (&values)[8]) {
                           if (x.is_aligned)
                               load_part<true>(from, column, x.width, values);
                           else
                               load_part<false>(from, column, x.width, values);
                       });
    shared_written();
}

/* The same of the norm of a sum, of whole slabs. */
template <class T, class N>
static __device__ __forceinline__ void fp8_norm_row(const struct fp8_row &x, float *warps, const struct fp8_rows &to)
{
    norm_row<T>(x.row, x.width, warps, [&](uint32_t column, float (&values)[8]) {
        round_eight<T>(values);
        fp8_round_slab<N>(values, 0, column / FP8_SLAB, to);
    });
}

/* Starts the products of the stage at hand. */
template <class N>
static __device__ __forceinline__ void fp8_row_multiply(struct fp8_few_sums<N, 1> &sums, const struct fp8_few_room &room,
                                                        const struct ring_place &at, uint32_t slab,
                                                        const struct skinny_shape &s)
{
    room.w.wait_full(at);
    const uint64_t a = wgmma_rows(room.w.data_of(at));
    wgmma_begin();
#pragma unroll
    for (uint32_t c = 0; c < fp8_stage_slabs(1); c++) /* slabs beyond the row are not added: any address will do */
        wgmma_fp8_slab(sums.p[c], a + c * s.tile_rows * 8,
                       one_row(room.x.data + (slab + c < s.n_blocks ? slab + c : 0) * FP8_SLAB));
    wgmma_commit();
}

/* Adds the slabs of a finished stage in order, and gives the stage back. Sums of other columns than the first are not used. */
template <class N>
static __device__ __forceinline__ void fp8_row_fold(float (&sum)[4], struct fp8_few_sums<N, 1> &sums,
                                                    const struct fp8_few_room &room, const struct ring_place &at, uint32_t slot,
                                                    uint32_t slab, const struct skinny_shape &s)
{
    const uint32_t slabs = fp8_stage_slabs(1), last = s.tile_rows - 1, row = skinny_w_row(0);
    const uint32_t scales = room.w_scales + slot * room.w_scales_bytes;
    const float4 low = load_four_floats(scales + min(row, last) * 16);
    const float4 high = load_four_floats(scales + min(row + 8, last) * 16);
#pragma unroll
    for (uint32_t c = 0; c < slabs; c++)
        wgmma_made(sums.p[c]);
#pragma unroll
    for (uint32_t c = 0; c < slabs; c++)
        if (slab + c < s.n_blocks) {
            const float x = load_float(room.x_scales + (slab + c) * 4);
            sum[0] = fmaf((float)sums.p[c][0], x * fp8_scale_of<slabs>(low, slab, c), sum[0]);
            sum[2] = fmaf((float)sums.p[c][2], x * fp8_scale_of<slabs>(high, slab, c), sum[2]);
        }
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        room.w.release(at.stage);
}

template <class N>
static __device__ __forceinline__ void fp8_row_sum(float (&sum)[4], struct fp8_few_sums<N, 1> &even,
                                                   struct fp8_few_sums<N, 1> &odd, const struct fp8_few_room &room,
                                                   struct ring_place &at, uint32_t &slot, const struct skinny_shape &s)
{
    typedef struct fp8_few_sums<N, 1> sums;
    fp8_sum_stages<fp8_stage_slabs(1)>(
        even, odd, room.w, at, s.n_blocks,
        [&](sums &p, const struct ring_place &from, uint32_t slab) { fp8_row_multiply(p, room, from, slab, s); },
        [&](sums &p, const struct ring_place &from, uint32_t slab) {
            fp8_row_fold(sum, p, room, from, slot, slab, s);
            slot = fp8_next_slot(slot, slab + fp8_stage_slabs(1), s);
        });
}

/* As fp8_few_barriers. */
static __device__ __forceinline__ void fp8_row_barriers(const struct fp8_few_room &room, uint32_t n_early, uint32_t warp)
{
    const uint32_t n = room.w.n_stages;
    for (uint32_t i = n_early + (warp < 4 ? warp : 4); i <= 2 * n + 1; i += 5)
        barrier_init(room.w.full + 8 * i, i < n ? 1 : i < 2 * n ? 4 : i == 2 * n ? FP8_ROW_WORKERS : 1);
}

template <class T, class N, bool IS_PRODUCT, bool IS_NORMED>
static __global__ void __launch_bounds__(SKINNY_THREADS, 1)
linear_fp8_row(const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap w_scales,
               const __grid_constant__ struct fp8_few f, struct output out, const __grid_constant__ struct fp8_row x)
{
    only_sm_90a();
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const struct skinny_shape &s = f.skinny;
    const uint32_t base = shared_address(shared);
    const struct fp8_few_room room = fp8_row_place(base, s);
    const uint32_t n_tiles = (s.n_tiles - blockIdx.x + gridDim.x - 1) / gridDim.x;
    const uint32_t n_early = min(s.n_ahead, n_tiles * ((s.n_blocks + fp8_stage_slabs(1) - 1) / fp8_stage_slabs(1)));
    struct fp8_few_weights<1, IS_PRODUCT> weights = {&w_map, &w_scales, f,          room, policy_read_once(),
                                                     0,      n_early,   blockIdx.x, 0,    x.n_passed, 0};
    if (lane == 0) {
        if (warp == 4)
            weights.begin();
        else
            fp8_row_barriers(room, n_early, warp);
        barriers_made();
    }
    __syncthreads();
    if (warp >= 4) {
        if (warp == 4 && lane == 0)
            weights.stream();
        if (warp == 5 && lane == 0 && x.n_passed)
            fp8_row_fetch(room, x);
        return;
    }
    const struct fp8_rows to = {shared + (room.x.data - base), (float *)(shared + (room.x_scales - base)), 0, 1};
    if (IS_NORMED)
        fp8_norm_row<T, N>(x, (float *)(to.numbers + s.n_blocks * FP8_SLAB), to);
    else {
        wait_for_input();
        fp8_round_row<T, N>(x, room, shared, s.n_blocks, to);
    }
    barrier_arrive(room.x.full);
    barrier_wait(room.x.full, 0);
    struct fp8_few_sums<N, 1> even = {}, odd = {};
    struct ring_place at = RING_READ;
    uint32_t slot = 0;
    for (uint32_t tile = blockIdx.x; tile < s.n_tiles; tile += gridDim.x) {
        float sum[4] = {};
        struct skinny_joined<T, 1> joined = {};
        skinny_read<IS_PRODUCT>(out, s, tile, joined);
        fp8_row_sum(sum, even, odd, room, at, slot, s);
        skinny_store<IS_PRODUCT>(out, s, tile, sum, joined);
    }
}

/* ---- the host's side ----------------------------------------------------------------------------------------------------- */

static inline uint32_t fp8_row_bytes_of(uint32_t n_stages, uint32_t n_slabs, uint32_t tile_rows)
{
    const uint32_t w_scales = tile_rows * FP8_CHUNK * (uint32_t)sizeof(float), beyond = (64 - tile_rows) * FP8_SLAB;
    const uint32_t after = n_slabs * (FP8_SLAB + (uint32_t)sizeof(float)) + FP8_ROW_BEYOND + n_stages * (w_scales + 16) + 24;
    return n_stages * fp8_stage_slabs(1) * tile_rows * FP8_SLAB + (after > beyond ? after : beyond);
}

/* Stages of W that a given row passes through. */
static inline uint32_t fp8_row_passed(uint32_t n_cols, uint32_t tile_rows)
{
    return ceil_div(n_cols * 2, fp8_stage_slabs(1) * tile_rows * FP8_SLAB);
}

static inline uint32_t fp8_row_stages(const struct matrix *matrix, bool is_product)
{
    const uint32_t tile_rows = matrix->fp8->forms[is_product][0].numbers.tile_rows, n_slabs = fp8_slabs(matrix->n_cols);
    return ring_stages(SHARED_BYTES, [&](uint32_t n) { return fp8_row_bytes_of(n, n_slabs, tile_rows); });
}

/* True if shared memory holds the row and a ring. */
static inline bool fp8_row_has_room(const struct matrix *matrix, bool is_product)
{
    const uint32_t tile_rows = matrix->fp8->forms[is_product][0].numbers.tile_rows;
    const uint32_t n_stages = FP8_ROW_STAGES + fp8_row_passed(matrix->n_cols, tile_rows);
    return fp8_row_bytes_of(n_stages, fp8_slabs(matrix->n_cols), tile_rows) <= SHARED_BYTES;
}

/* True if linear_fp8_row makes the sum and norm before a linear. */
static inline bool fp8_row_norms(const struct add_rms_norm_args *args)
{
    return normed_fits(args) && args->out.width % FP8_SLAB == 0;
}

template <class T, class N> static auto fp8_row_kernel(bool is_product, bool is_normed)
{
    if (is_normed)
        return is_product ? linear_fp8_row<T, N, true, true> : linear_fp8_row<T, N, false, true>;
    return is_product ? linear_fp8_row<T, N, true, false> : linear_fp8_row<T, N, false, false>;
}

template <class T, class N> static void fp8_row_launch(const struct fp8_product &p)
{
    const struct cuda *cuda = p.cuda;
    const struct matrix *matrix = p.matrix;
    const struct add_rms_norm_args *norm = p.norm;
    const struct fp8_form *form = &matrix->fp8->forms[p.is_product][0];
    const struct skinny_form *numbers = &form->numbers;
    const uint32_t n_slabs = fp8_slabs(matrix->n_cols), tile_rows = numbers->tile_rows;
    const bool is_held = numbers->n_tiles <= cuda->n_processors && tile_rows * n_slabs * FP8_SLAB <= FP8_HELD_TILE;
    struct fp8_row x = {};
    x.width = matrix->n_cols;
    x.is_aligned = norm || has_eights<T>(*p.x);
    if (norm)
        x.row = {norm->a.data, norm->b.data, norm->sum.data, norm->weight, norm->eps, row_threads(norm->out.width / 8)};
    else
        x.row.a = p.x->data;
    x.n_passed = !norm && x.is_aligned ? fp8_row_passed(matrix->n_cols, tile_rows) : 0;
    const uint32_t n_whole = ceil_div(n_slabs, fp8_stage_slabs(1)) + x.n_passed, n_most = fp8_row_stages(matrix, p.is_product);
    const uint32_t n_stages = is_held ? min(n_whole, n_most) : n_most;
    const uint32_t n_ahead = skinny_ahead(n_stages - x.n_passed, fp8_stage_slabs(1), tile_rows,
                                          is_held && !norm ? SKINNY_HELD_BYTES : SKINNY_AHEAD_BYTES);
    const struct fp8_few f = {{n_slabs, n_stages, tile_rows, numbers->n_tiles, n_ahead, is_held},
                              matrix->parts[0].lead_bytes / 16, NULL, false, 0};
    launch(cuda, fp8_row_kernel<T, N>(p.is_product, norm != NULL),
           ceil_div(numbers->n_tiles, ceil_div(numbers->n_tiles, cuda->n_processors)), SKINNY_THREADS,
           fp8_row_bytes_of(n_stages, n_slabs, tile_rows), map_of(&numbers->map), map_of(&form->scales), f, p.out, x);
}

template <class T, class N> static cudaError_t fp8_row_open(void)
{
    cudaError_t code = cudaSuccess;
    for (uint32_t i = 0; i < 4 && code == cudaSuccess; i++)
        code = allow_shared(fp8_row_kernel<T, N>(i % 2, i / 2));
    return code;
}

#endif
