/* experts_fp8_streamed.cuh: experts_streamed.cuh for FP8 and INT8: experts that have few rows each. Units, tiles, rings and
 * ends are the same; a stage has slabs of W and of x with the scales of their rows. Two stages of sums are under way: while
 * one is folded, the tensor cores make the other. Bound by the bytes of the chosen experts' weights: 8 experts of 3 x 768 x
 * 2048 take 9 us at the 4.5 TB/s that an H200 reads. */
#ifndef LLMPY_CUDA_EXPERTS_FP8_STREAMED_CUH
#define LLMPY_CUDA_EXPERTS_FP8_STREAMED_CUH

#include "experts_fp8.cuh"
#include "experts_streamed.cuh"

/* Slabs of a stage; a chunk of scales has as many or twice as many. */
static __host__ __device__ constexpr uint32_t fp8_unit_slabs(uint32_t eights)
{
    return eights <= 2 ? 4 : 2;
}

/* s.w.n_blocks are slabs. */
struct fp8_streamed_shape {
    struct streamed_shape s;
    uint32_t n_chunks; /* before the numbers of a row of W, of which the last one has the first slabs */
};

/* A block's shared memory: the rings of W and x, which share their barriers, and the scales of their stages. */
struct fp8_streamed_room {
    struct ring w, x;
    uint32_t w_scales, x_scales, w_scales_bytes, x_scales_bytes;
};

template <uint32_t EIGHTS>
static __device__ __forceinline__ struct fp8_streamed_room fp8_streamed_place(uint32_t shared, const struct skinny_shape &w)
{
    const uint32_t n = w.n_stages, slabs = fp8_unit_slabs(EIGHTS);
    const uint32_t w_bytes = slabs * w.tile_rows * FP8_SLAB, x_bytes = slabs * EIGHTS * 8 * FP8_SLAB;
    struct fp8_streamed_room room;
    const uint32_t x_data = shared + n * w_bytes;
    room.w_scales = x_data + n * x_bytes;
    room.w_scales_bytes = w.tile_rows * FP8_CHUNK * sizeof(float);
    room.x_scales = room.w_scales + n * room.w_scales_bytes;
    room.x_scales_bytes = EIGHTS * 8 * FP8_CHUNK * sizeof(float);
    const uint32_t full = room.x_scales + n * room.x_scales_bytes, empty = full + 8 * n;
    room.w = {shared, full, empty, n, w_bytes};
    room.x = {x_data, full, empty, n, x_bytes};
    return room;
}

template <uint32_t EIGHTS, bool IS_PRODUCT>
static __device__ __forceinline__ void fp8_streamed_load_w(const struct fp8_expert_maps &maps,
                                                           const struct fp8_streamed_shape &f, struct streamed_tables *t,
                                                           const struct fp8_streamed_room &room)
{
    const struct skinny_shape &w = f.s.w;
    const uint64_t policy = policy_read_once();
    struct ring_place at = RING_FETCH;
    for (uint32_t item = blockIdx.x; item < t->n_units * w.n_tiles; item += gridDim.x) {
        const uint32_t tile = item % w.n_tiles, step = IS_PRODUCT ? w.tile_rows / 16 : w.tile_rows;
        const uint32_t from = streamed_units(t)[item / w.n_tiles].expert * f.s.expert_step + tile * step;
        for (uint32_t slab = 0; slab < w.n_blocks; slab += fp8_unit_slabs(EIGHTS), room.w.next(at)) {
            const uint32_t full = room.w.expect(at, room.w.stage_bytes + room.w_scales_bytes), target = room.w.data_of(at);
            const uint32_t to_scales = room.w_scales + at.stage * room.w_scales_bytes;
            const uint32_t chunk = f.n_chunks - 1 - slab / FP8_CHUNK;
            if (IS_PRODUCT) {
                copy_pairs(target, &maps.w, from, slab, full, policy);
                copy_pairs(to_scales, &maps.w_scales, from, chunk, full, policy);
            } else {
                copy_box(target, &maps.w, from, slab, full, policy);
                copy_box(to_scales, &maps.w_scales, from, chunk, full, policy);
            }
        }
    }
}

template <uint32_t EIGHTS>
static __device__ __forceinline__ void fp8_streamed_load_x(const struct fp8_expert_maps &maps,
                                                           const struct fp8_streamed_shape &f, bool is_place,
                                                           struct streamed_tables *t, const struct fp8_streamed_room &room)
{
    wait_for_input();
    struct ring_place at = RING_FETCH;
    for (uint32_t item = blockIdx.x; item < t->n_units * f.s.w.n_tiles; item += gridDim.x) {
        const uint32_t row = is_place ? streamed_units(t)[item / f.s.w.n_tiles].first : 0;
        for (uint32_t slab = 0; slab < f.s.w.n_blocks; slab += fp8_unit_slabs(EIGHTS), room.x.next(at)) {
            const uint32_t full = room.x.expect(at, room.x.stage_bytes + room.x_scales_bytes);
            copy_box(room.x.data_of(at), &maps.x, row, slab, full);
            copy_box(room.x_scales + at.stage * room.x_scales_bytes, &maps.x_scales, row, slab / FP8_CHUNK, full);
        }
    }
}

/* The sums of a stage's slabs. */
template <class N, uint32_t EIGHTS> struct fp8_streamed_sums {
    typename N::sum p[fp8_unit_slabs(EIGHTS)][4 * EIGHTS];
};

/* Starts the products of the stage at hand. */
template <class N, uint32_t EIGHTS>
static __device__ __forceinline__ void fp8_streamed_multiply(struct fp8_streamed_sums<N, EIGHTS> &sums,
                                                             const struct fp8_streamed_room &room, const struct ring_place &at,
                                                             uint32_t tile_rows)
{
    room.w.wait_full(at);
    const uint64_t a = wgmma_rows(room.w.data_of(at)), b = wgmma_rows(room.x.data_of(at));
    wgmma_begin();
#pragma unroll
    for (uint32_t c = 0; c < fp8_unit_slabs(EIGHTS); c++)
        wgmma_fp8_slab(sums.p[c], a + c * tile_rows * 8, b + c * EIGHTS * 64);
    wgmma_commit();
}

/* Of a row's chunk at this address, the scales of a stage's slabs in their order. In a chunk of W the first slab is last. */
template <uint32_t SLABS, bool IS_REVERSED>
static __device__ __forceinline__ void fp8_stage_scales(uint32_t chunk, uint32_t slab, float (&scales)[SLABS])
{
    if constexpr (SLABS == 4) {
        const float4 v = load_four_floats(chunk);
        scales[0] = IS_REVERSED ? v.w : v.x;
        scales[1] = IS_REVERSED ? v.z : v.y;
        scales[2] = IS_REVERSED ? v.y : v.z;
        scales[3] = IS_REVERSED ? v.x : v.w;
    } else {
        const bool is_second = slab & 2;
        const float2 v = load_two_floats(chunk + (is_second != IS_REVERSED ? 8 : 0));
        scales[0] = IS_REVERSED ? v.y : v.x;
        scales[1] = IS_REVERSED ? v.x : v.y;
    }
}

/* Adds the slabs of a finished stage in order, and gives the stage back. */
template <class N, uint32_t EIGHTS>
static __device__ __forceinline__ void fp8_streamed_fold(float (&sum)[4 * EIGHTS], struct fp8_streamed_sums<N, EIGHTS> &sums,
                                                         const struct fp8_streamed_room &room, const struct ring_place &at,
                                                         uint32_t slab, const struct skinny_shape &w)
{
    const uint32_t slabs = fp8_unit_slabs(EIGHTS), last = w.tile_rows - 1, row = skinny_w_row(0);
    const uint32_t w_at = room.w_scales + at.stage * room.w_scales_bytes;
    const uint32_t x_at = room.x_scales + at.stage * room.x_scales_bytes + threadIdx.x % 4 * 2 * (FP8_CHUNK * 4);
    float low[slabs], high[slabs];
    fp8_stage_scales<slabs, true>(w_at + min(row, last) * (FP8_CHUNK * 4), slab, low);
    fp8_stage_scales<slabs, true>(w_at + min(row + 8, last) * (FP8_CHUNK * 4), slab, high);
#pragma unroll
    for (uint32_t c = 0; c < slabs; c++)
        wgmma_made(sums.p[c]);
#pragma unroll
    for (uint32_t i = 0; i < 4 * EIGHTS; i += 4) {
        float even[slabs], odd[slabs];
        fp8_stage_scales<slabs, false>(x_at + i * 2 * (FP8_CHUNK * 4), slab, even);
        fp8_stage_scales<slabs, false>(x_at + (i * 2 + 1) * (FP8_CHUNK * 4), slab, odd);
#pragma unroll
        for (uint32_t c = 0; c < slabs; c++)
            if (slab + c < w.n_blocks) {
                sum[i] = fmaf((float)sums.p[c][i], even[c] * low[c], sum[i]);
                sum[i + 1] = fmaf((float)sums.p[c][i + 1], odd[c] * low[c], sum[i + 1]);
                sum[i + 2] = fmaf((float)sums.p[c][i + 2], even[c] * high[c], sum[i + 2]);
                sum[i + 3] = fmaf((float)sums.p[c][i + 3], odd[c] * high[c], sum[i + 3]);
            }
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        room.w.release(at.stage);
}

/* The sums of one tile and unit. */
template <class N, uint32_t EIGHTS>
static __device__ __forceinline__ void fp8_streamed_sum(float (&sum)[4 * EIGHTS], struct fp8_streamed_sums<N, EIGHTS> &first,
                                                        struct fp8_streamed_sums<N, EIGHTS> &second,
                                                        const struct fp8_streamed_room &room, struct ring_place &at,
                                                        const struct skinny_shape &w)
{
    typedef struct fp8_streamed_sums<N, EIGHTS> sums;
    fp8_sum_stages<fp8_unit_slabs(EIGHTS)>(
        first, second, room.w, at, w.n_blocks,
        [&](sums &p, const struct ring_place &from, uint32_t) { fp8_streamed_multiply(p, room, from, w.tile_rows); },
        [&](sums &p, const struct ring_place &from, uint32_t slab) { fp8_streamed_fold(sum, p, room, from, slab, w); });
}

/* is_place: rows of x are places, else the rows of the batch. */
template <class T, class N, uint32_t EIGHTS, bool IS_PRODUCT>
static __global__ void __launch_bounds__(SKINNY_THREADS, 1)
experts_fp8_streamed(const __grid_constant__ struct fp8_expert_maps maps, const __grid_constant__ struct fp8_streamed_shape f,
                     struct mixture m, bool is_place, struct output out, expert_product product)
{
    only_sm_90a();
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const struct streamed_shape &s = f.s;
    struct streamed_tables *t = (struct streamed_tables *)(shared + s.tables_at);
    const struct fp8_streamed_room room = fp8_streamed_place<EIGHTS>(shared_address(shared), s.w);
    map_prefetch(warp == 4 ? &maps.w : &maps.x);
    room.x.make_barriers(2, 4);
    barriers_made();
    streamed_prepare(m, s, t, 8 * EIGHTS, is_place);
    if (warp >= 4) {
        if (warp == 4 && lane == 0)
            fp8_streamed_load_w<EIGHTS, IS_PRODUCT>(maps, f, t, room);
        if (warp == 5 && lane == 0)
            fp8_streamed_load_x<EIGHTS>(maps, f, is_place, t, room);
        return;
    }
    wait_for_input();
    struct fp8_streamed_sums<N, EIGHTS> first = {}, second = {};
    struct ring_place at = RING_READ;
    for (uint32_t item = blockIdx.x; item < t->n_units * s.w.n_tiles; item += gridDim.x) {
        float sum[4 * EIGHTS] = {};
        const uint32_t index = item / s.w.n_tiles, tile = item % s.w.n_tiles;
        fp8_streamed_sum(sum, first, second, room, at, s.w);
        const struct streamed_unit unit = streamed_units(t)[index];
        if (IS_PRODUCT)
            streamed_store_products<T, EIGHTS>(out, product, s, t, is_place, unit, index, tile, sum);
        else
            streamed_store_sums<T, EIGHTS>(out, s, t, is_place, unit, index, tile, sum);
    }
}

/* ---- the host's side ----------------------------------------------------------------------------------------------------- */

static inline uint32_t fp8_streamed_bytes(uint32_t n_stages, uint32_t eights, uint32_t tile_rows)
{
    const uint32_t slabs = fp8_unit_slabs(eights), scale_bytes = FP8_CHUNK * (uint32_t)sizeof(float);
    const uint32_t x_bytes = eights * 8 * (slabs * FP8_SLAB + scale_bytes);
    /* The product of the last stage may read beyond its end, as in linear_skinny.cuh. */
    const uint32_t beyond = (64 - tile_rows) * FP8_SLAB, after = n_stages * (x_bytes + tile_rows * scale_bytes + 16);
    return n_stages * slabs * tile_rows * FP8_SLAB + (after > beyond ? after : beyond);
}

/* Divides the shared memory of a block. Returns its size in bytes. */
static inline uint32_t fp8_streamed_cut_memory(struct streamed_shape *s, uint32_t eights)
{
    const uint32_t tables = (uint32_t)(sizeof(struct streamed_tables) + s->max_units * sizeof(struct streamed_unit));
    auto rings = [&](uint32_t n) { return fp8_streamed_bytes(n, eights, s->w.tile_rows); };
    s->w.n_stages = ring_stages(SHARED_BYTES, [&](uint32_t n) { return rings(n) + 16 + tables; });
    s->tables_at = (rings(s->w.n_stages) + 15) / 16 * 16;
    return s->tables_at + tables;
}

typedef void (*fp8_streamed_kernel)(struct fp8_expert_maps, struct fp8_streamed_shape, struct mixture, bool, struct output,
                                    expert_product);

template <class T, class N> static fp8_streamed_kernel fp8_streamed_of(uint32_t eights, bool is_product)
{
    switch (eights) {
    case 1:
        return is_product ? experts_fp8_streamed<T, N, 1, true> : experts_fp8_streamed<T, N, 1, false>;
    case 2:
        return is_product ? experts_fp8_streamed<T, N, 2, true> : experts_fp8_streamed<T, N, 2, false>;
    case 4:
        return is_product ? experts_fp8_streamed<T, N, 4, true> : experts_fp8_streamed<T, N, 4, false>;
    default:
        return is_product ? experts_fp8_streamed<T, N, 8, true> : experts_fp8_streamed<T, N, 8, false>;
    }
}

static enum rc run_fp8_streamed(const struct running_mixture *run, const struct expert_linear *linear, struct err *err)
{
    struct cuda *cuda = run->cuda;
    const uint32_t eights = run->eights;
    const uint32_t max_units = min(run->m.n_experts, run->m.n_routes) + run->m.n_routes / (8 * eights);
    struct fp8_streamed_shape f = {{tiles_of(run, linear), expert_step(linear), 0, max_units, true},
                                   linear->w->parts[0].lead_bytes / (FP8_CHUNK * 4)};
    const uint32_t bytes = fp8_streamed_cut_memory(&f.s, eights);
    struct fp8_expert_maps maps;
    enum rc rc = round_and_map(run, linear, f.s.w.tile_rows, 8 * eights, fp8_unit_slabs(eights), &maps, err);
    if (rc)
        return rc;
    const fp8_streamed_kernel kernel = visit_both(cuda, linear->w, [&](auto value, auto number) {
        return fp8_streamed_of<decltype(value), decltype(number)>(eights, linear->is_product);
    });
    launch(cuda, kernel, min(max_units * f.s.w.n_tiles, cuda->n_processors), SKINNY_THREADS, bytes, maps, f, run->m,
           linear->is_place, output_of(linear), run->product);
    return RC_OK;
}

#endif
