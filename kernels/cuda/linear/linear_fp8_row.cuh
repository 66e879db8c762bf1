/* linear_fp8_row.cuh: the linears of linear_fp8.cuh for one row of x, without a launch that rounds it: each block rounds the
 * row itself, behind the first bytes of W, and keeps it in shared memory, where wgmma takes it as the first of eight columns. W
 * comes in as in linear_fp8_few.cuh. Bound by the bytes of W. */
#ifndef LLMPY_CUDA_LINEAR_FP8_ROW_CUH
#define LLMPY_CUDA_LINEAR_FP8_ROW_CUH

#include "linear_fp8_few.cuh"

#define FP8_ROW_WORKERS 128u
#define FP8_ROW_BEYOND 128u /* bytes behind the row that a product reads */
#define FP8_ROW_STAGES 3u   /* of W, at least */

/* A block's shared memory: W and its scales; the row in x, whose one barrier `full` says that it is there; its scales. */
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

/* By the workers: the rounded row and its scales, for all of them, the tensor cores and the stream of W. */
template <class T, class N>
static __device__ __forceinline__ void fp8_round_row(const T *x, uint32_t width, bool is_aligned, uint32_t n_slabs,
                                                     const struct fp8_rows &to, uint32_t there)
{
    fp8_round_slabs<N>(0, threadIdx.x / FP8_LANES, FP8_ROW_WORKERS / FP8_LANES, n_slabs, to,
                       [&](uint32_t column, float (&values)[8]) {
                           if (is_aligned)
                               load_part<true>(x, column, width, values);
                           else
                               load_part<false>(x, column, width, values);
                       });
    shared_written();
    barrier_arrive(there);
    barrier_wait(there, 0);
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
                                                    const struct fp8_few_room &room, const struct ring_place &at, uint32_t slab,
                                                    const struct skinny_shape &s)
{
    const uint32_t slabs = fp8_stage_slabs(1), last = s.tile_rows - 1, row = skinny_w_row(0);
    const uint32_t scales = room.w_scales + at.stage * room.w_scales_bytes;
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
                                                   struct ring_place &at, const struct skinny_shape &s)
{
    typedef struct fp8_few_sums<N, 1> sums;
    fp8_sum_stages<fp8_stage_slabs(1)>(
        even, odd, room.w, at, s.n_blocks,
        [&](sums &p, const struct ring_place &from, uint32_t slab) { fp8_row_multiply(p, room, from, slab, s); },
        [&](sums &p, const struct ring_place &from, uint32_t slab) { fp8_row_fold(sum, p, room, from, slab, s); });
}

/* As fp8_few_barriers. */
static __device__ __forceinline__ void fp8_row_barriers(const struct fp8_few_room &room, uint32_t n_early, uint32_t warp)
{
    const uint32_t n = room.w.n_stages;
    for (uint32_t i = n_early + (warp < 4 ? warp : 4); i <= 2 * n; i += 5)
        barrier_init(room.w.full + 8 * i, i < n ? 1 : i < 2 * n ? 4 : FP8_ROW_WORKERS);
}

template <class T, class N, bool IS_PRODUCT>
static __global__ void __launch_bounds__(SKINNY_THREADS, 1)
linear_fp8_row(const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap w_scales,
               const __grid_constant__ struct fp8_few f, struct output out, struct rows<T> x, bool is_aligned)
{
    only_sm_90a();
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const struct skinny_shape &s = f.skinny;
    const uint32_t base = shared_address(shared);
    const struct fp8_few_room room = fp8_row_place(base, s);
    const uint32_t n_tiles = (s.n_tiles - blockIdx.x + gridDim.x - 1) / gridDim.x;
    const uint32_t n_early = min(s.n_ahead, n_tiles * ((s.n_blocks + fp8_stage_slabs(1) - 1) / fp8_stage_slabs(1)));
    struct fp8_few_weights<1, IS_PRODUCT> weights = {&w_map, &w_scales, f, room, policy_read_once(), 0, n_early, blockIdx.x, 0};
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
        return;
    }
    wait_for_input();
    const struct fp8_rows to = {shared + (room.x.data - base), (float *)(shared + (room.x_scales - base)), 0, 1};
    fp8_round_row<T, N>(x.at(0, 0), x.width, is_aligned, s.n_blocks, to, room.x.full);
    struct fp8_few_sums<N, 1> even = {}, odd = {};
    struct ring_place at = RING_READ;
    for (uint32_t tile = blockIdx.x; tile < s.n_tiles; tile += gridDim.x) {
        float sum[4] = {};
        struct skinny_joined<T, 1> joined = {};
        skinny_read<IS_PRODUCT>(out, s, tile, joined);
        fp8_row_sum(sum, even, odd, room, at, s);
        skinny_store<IS_PRODUCT>(out, s, tile, sum, joined);
    }
}

/* ---- the host's side ----------------------------------------------------------------------------------------------------- */

static inline uint32_t fp8_row_bytes_of(uint32_t n_stages, uint32_t n_slabs, uint32_t tile_rows)
{
    const uint32_t w_scales = tile_rows * FP8_CHUNK * (uint32_t)sizeof(float), beyond = (64 - tile_rows) * FP8_SLAB;
    const uint32_t after = n_slabs * (FP8_SLAB + (uint32_t)sizeof(float)) + FP8_ROW_BEYOND + n_stages * (w_scales + 16) + 16;
    return n_stages * fp8_stage_slabs(1) * tile_rows * FP8_SLAB + (after > beyond ? after : beyond);
}

static inline uint32_t fp8_row_stages(const struct matrix *matrix, bool is_product)
{
    const uint32_t tile_rows = matrix->fp8->forms[is_product][0].numbers.tile_rows, n_slabs = fp8_slabs(matrix->n_cols);
    return ring_stages(SHARED_BYTES, [&](uint32_t n) { return fp8_row_bytes_of(n, n_slabs, tile_rows); });
}

/* True if shared memory holds the row and a ring. */
static inline bool fp8_row_fits(const struct matrix *matrix, bool is_product)
{
    const uint32_t tile_rows = matrix->fp8->forms[is_product][0].numbers.tile_rows;
    return fp8_row_bytes_of(FP8_ROW_STAGES, fp8_slabs(matrix->n_cols), tile_rows) <= SHARED_BYTES;
}

template <class T, class N>
static void fp8_row_launch(const struct cuda *cuda, const struct matrix *matrix, bool is_product, const struct view &x,
                           const struct output &out)
{
    const struct fp8_form *form = &matrix->fp8->forms[is_product][0];
    const struct skinny_form *numbers = &form->numbers;
    const uint32_t n_stages = fp8_row_stages(matrix, is_product), n_slabs = fp8_slabs(matrix->n_cols);
    const uint32_t n_ahead = skinny_ahead(n_stages, fp8_stage_slabs(1), numbers->tile_rows, SKINNY_AHEAD_BYTES);
    const struct fp8_few f = {{n_slabs, n_stages, numbers->tile_rows, numbers->n_tiles, n_ahead, false},
                              matrix->parts[0].lead_bytes / 16, NULL, false};
    launch(cuda, is_product ? linear_fp8_row<T, N, true> : linear_fp8_row<T, N, false>,
           ceil_div(numbers->n_tiles, ceil_div(numbers->n_tiles, cuda->n_processors)), SKINNY_THREADS,
           fp8_row_bytes_of(n_stages, n_slabs, numbers->tile_rows), map_of(&numbers->map), map_of(&form->scales), f, out,
           rows<T>(x), has_eights<T>(x));
}

template <class T, class N> static cudaError_t fp8_row_open(void)
{
    const cudaError_t code = allow_shared(linear_fp8_row<T, N, false>);
    return code ? code : allow_shared(linear_fp8_row<T, N, true>);
}

#endif
