/* linear_fp8_few.cuh: the linears of linear_fp8.cuh for 1 to 64 rows of x. Blocks, tiles, rings and ends are those of
 * linear_skinny.cuh: W is the operand of 64 rows, of which a tile has tile_rows; four warps multiply, one streams W and the
 * scales of its rows, one streams x and its scales. Two stages of sums are under way: while one is folded, the tensor cores
 * make the other. A barrier takes some 65 cycles to make, so the stream of W makes its own and asks for its first stages before
 * the block has met. Bound by the bytes of W: 4096 x 14336 takes 13.3 us at the 4.5 TB/s that an H200 reads. */
#ifndef LLMPY_CUDA_LINEAR_FP8_FEW_CUH
#define LLMPY_CUDA_LINEAR_FP8_FEW_CUH

#include "../core/mma.cuh"
#include "../core/wgmma_fp8.cuh"
#include "linear_fp8.h"
#include "linear_skinny.cuh"
#include "tile_store.cuh"

/* Slabs of a stage. */
static __host__ __device__ constexpr uint32_t fp8_stage_slabs(uint32_t eights)
{
    return eights <= 2 ? 4 : 2;
}

/* skinny.n_blocks are slabs. n_chunks: chunks of scales of a row of W, of which the last one has the first slabs. x_scales:
 * [slab][8 * EIGHTS]. */
struct fp8_few {
    struct skinny_shape skinny;
    uint32_t n_chunks;
    const float *x_scales;
    bool is_wide; /* y has whole eights of columns on multiples of 16 bytes, and nothing is added */
    uint32_t n_kept; /* stages of all of x, which stay in shared memory for all tiles of a block; 0: x comes anew for each */
};

/* Shared memory through which warps store the results of many rows of x in lines, and the bytes of a row of it. */
#define FP8_PIECE_PITCH 48u
static constexpr __host__ __device__ uint32_t fp8_few_pieces(uint32_t eights)
{
    return eights >= 4 ? 4 * eights * 8 * FP8_PIECE_PITCH : 0;
}

/* A block's shared memory: the rings of W and x, the scales of their stages, and barriers. Stages of W and x have equal places,
 * unless x stays. */
struct fp8_few_room {
    struct ring w, x;
    uint32_t w_scales, x_scales, w_scales_bytes, x_scales_bytes, pieces;
};

template <uint32_t EIGHTS>
static __device__ __forceinline__ struct fp8_few_room fp8_few_place(uint32_t shared, const struct fp8_few &f)
{
    const struct skinny_shape &s = f.skinny;
    const uint32_t slabs = fp8_stage_slabs(EIGHTS), n = s.n_stages, n_x = f.n_kept ? f.n_kept : n;
    const uint32_t w_bytes = slabs * s.tile_rows * FP8_SLAB, x_bytes = slabs * EIGHTS * 8 * FP8_SLAB;
    struct fp8_few_room room;
    const uint32_t x_data = shared + n * w_bytes;
    room.w_scales = x_data + n_x * x_bytes;
    room.w_scales_bytes = s.tile_rows * FP8_CHUNK * sizeof(float);
    room.x_scales = room.w_scales + n * room.w_scales_bytes;
    room.x_scales_bytes = slabs * EIGHTS * 8 * sizeof(float);
    room.pieces = room.x_scales + n_x * room.x_scales_bytes;
    const uint32_t w_full = room.pieces + fp8_few_pieces(EIGHTS), x_full = w_full + 8 * n, empty = x_full + 8 * n_x;
    room.w = {shared, w_full, empty, n, w_bytes};
    room.x = {x_data, x_full, empty, n_x, x_bytes};
    return room;
}

/* The place of a slab's x beside a place of W. */
static __device__ __forceinline__ struct ring_place fp8_few_x_at(const struct fp8_few &f, const struct ring_place &at,
                                                                 uint32_t stage)
{
    struct ring_place stays = {stage, 0};
    return f.n_kept ? stays : at;
}

/* Asks for one stage of W, and for the chunk of scales that begins with it, if one does. */
template <uint32_t EIGHTS, bool IS_PRODUCT>
static __device__ __forceinline__ void fp8_few_ask(const CUtensorMap *map, const CUtensorMap *scales, const struct fp8_few &f,
                                                   const struct fp8_few_room &room, uint32_t stage, uint32_t slot,
                                                   uint32_t tile, uint32_t slab, uint64_t policy)
{
    const uint32_t full = room.w.full + 8 * stage, target = room.w.data + stage * room.w.stage_bytes;
    const uint32_t to_scales = room.w_scales + slot * room.w_scales_bytes, chunk = f.n_chunks - 1 - slab / FP8_CHUNK;
    const uint32_t rows = f.skinny.tile_rows, row = IS_PRODUCT ? tile * (rows / 16) : tile * rows;
    const bool has_scales = slab % FP8_CHUNK == 0;
    barrier_expect(full, room.w.stage_bytes + (has_scales ? room.w_scales_bytes : 0));
    if (IS_PRODUCT) {
        copy_pairs(target, map, row, slab, full, policy);
        if (has_scales)
            copy_pairs(to_scales, scales, row, chunk, full, policy);
    } else {
        copy_box(target, map, row, slab, full, policy);
        if (has_scales)
            copy_box(to_scales, scales, row, chunk, full, policy);
    }
}

/* Chunks of scales have as many slots as there are stages of W. The slot of the stage that begins at `slab` of a tile, or at
 * the next one, behind a stage whose chunk is in `slot`. */
static __device__ __forceinline__ uint32_t fp8_next_slot(uint32_t slot, uint32_t slab, const struct skinny_shape &s)
{
    return slab % FP8_CHUNK && slab < s.n_blocks ? slot : slot + 1 == s.n_stages ? 0 : slot + 1;
}

/* One thread streams W. Its first stages need no wait. */
template <uint32_t EIGHTS, bool IS_PRODUCT> struct fp8_few_weights {
    const CUtensorMap *map, *scales;
    const struct fp8_few &f;
    const struct fp8_few_room &room;
    uint64_t policy;
    uint32_t n_asked, n_early, tile, slab;
    uint32_t n_passed; /* the last stages, which wait until x is there */
    uint32_t slot;     /* of the next chunk of scales */

    __device__ __forceinline__ void ask(uint32_t stage)
    {
        fp8_few_ask<EIGHTS, IS_PRODUCT>(map, scales, f, room, stage, slot, tile, slab, policy);
        slab += fp8_stage_slabs(EIGHTS);
        slot = fp8_next_slot(slot, slab, f.skinny);
        if (slab >= f.skinny.n_blocks) {
            slab = 0;
            tile += gridDim.x;
        }
        n_asked++;
    }
    /* Before the block has met. */
    __device__ __forceinline__ void begin(void)
    {
        start_next();
        while (n_asked < n_early) {
            const uint32_t stage = n_asked;
            barrier_init(room.w.full + 8 * stage, 1);
            barriers_made();
            shared_written();
            ask(stage);
        }
    }
    /* The rest; at most the early stages are under way until x has come. */
    __device__ __forceinline__ void stream(void)
    {
        struct ring_place at = {n_early, 1};
        struct ring_place there = RING_READ;
        bool is_paced = true;
        while (tile < f.skinny.n_tiles) {
            is_paced = is_paced && n_asked < room.w.n_stages && !barrier_test(room.x.full, 0);
            if (is_paced) {
                room.w.wait_full(there);
                room.w.next(there);
            }
            if (n_asked < room.w.n_stages && at.stage + n_passed >= room.w.n_stages)
                barrier_wait(room.x.full, 0);
            room.w.wait_empty(at);
            ask(at.stage);
            room.w.next(at);
        }
    }
};

template <uint32_t EIGHTS>
static __device__ __forceinline__ void fp8_few_load_x(const CUtensorMap *map, const struct fp8_few &f,
                                                      const struct fp8_few_room &room)
{
    const uint32_t slabs = fp8_stage_slabs(EIGHTS);
    map_prefetch(map);
    wait_for_input();
    struct ring_place at = RING_FETCH;
    for (uint32_t tile = blockIdx.x; tile < (f.n_kept ? blockIdx.x + 1 : f.skinny.n_tiles); tile += gridDim.x)
        for (uint32_t slab = 0; slab < f.skinny.n_blocks; slab += slabs, room.x.next(at)) {
            const uint32_t full = room.x.full_of(at);
            if (!f.n_kept)
                room.x.wait_empty(at);
            barrier_expect(full, room.x.stage_bytes + room.x_scales_bytes);
            copy_box(room.x.data_of(at), map, 0, slab, full);
            copy_bytes(room.x_scales + at.stage * room.x_scales_bytes, f.x_scales + slab * EIGHTS * 8, room.x_scales_bytes,
                       full);
        }
}

/* The sums of a stage's slabs. */
template <class N, uint32_t EIGHTS> struct fp8_few_sums {
    typename N::sum p[fp8_stage_slabs(EIGHTS)][4 * EIGHTS];
};

/* Starts the products of the stage at hand. */
template <class N, uint32_t EIGHTS>
static __device__ __forceinline__ void fp8_few_multiply(struct fp8_few_sums<N, EIGHTS> &sums, const struct fp8_few_room &room,
                                                        const struct ring_place &at, const struct ring_place &x_at,
                                                        uint32_t tile_rows)
{
    room.w.wait_full(at);
    room.x.wait_full(x_at);
    const uint64_t a = wgmma_rows(room.w.data_of(at)), b = wgmma_rows(room.x.data_of(x_at));
    wgmma_begin();
#pragma unroll
    for (uint32_t c = 0; c < fp8_stage_slabs(EIGHTS); c++)
        wgmma_fp8_slab(sums.p[c], a + c * tile_rows * 8, b + c * EIGHTS * 64);
    wgmma_commit();
}

/* The scale of slab c of a stage that begins at `slab`, of a chunk's four. */
template <uint32_t SLABS> static __device__ __forceinline__ float fp8_scale_of(const float4 &chunk, uint32_t slab, uint32_t c)
{
    if (SLABS == 4)
        return c == 0 ? chunk.w : c == 1 ? chunk.z : c == 2 ? chunk.y : chunk.x;
    const bool is_second = slab & 2;
    return c == 0 ? (is_second ? chunk.y : chunk.w) : is_second ? chunk.x : chunk.z;
}

/* Adds the slabs of a finished stage in order, and gives the stage back. */
template <class N, uint32_t EIGHTS>
static __device__ __forceinline__ void fp8_few_fold(float (&sum)[4 * EIGHTS], struct fp8_few_sums<N, EIGHTS> &sums,
                                                    const struct fp8_few_room &room, const struct ring_place &at,
                                                    uint32_t x_stage, uint32_t slot, uint32_t slab,
                                                    const struct skinny_shape &s)
{
    const uint32_t slabs = fp8_stage_slabs(EIGHTS), last = s.tile_rows - 1, row = skinny_w_row(0);
    const uint32_t scales = room.w_scales + slot * room.w_scales_bytes;
    const uint32_t x_at = room.x_scales + x_stage * room.x_scales_bytes + threadIdx.x % 4 * 8;
    const float4 low = load_four_floats(scales + min(row, last) * 16);
    const float4 high = load_four_floats(scales + min(row + 8, last) * 16);
#pragma unroll
    for (uint32_t c = 0; c < slabs; c++)
        wgmma_made(sums.p[c]);
#pragma unroll
    for (uint32_t c = 0; c < slabs; c++) {
        const float w_low = fp8_scale_of<slabs>(low, slab, c), w_high = fp8_scale_of<slabs>(high, slab, c);
        if (slab + c < s.n_blocks)
#pragma unroll
            for (uint32_t i = 0; i < 4 * EIGHTS; i += 4) {
                const float2 x = load_two_floats(x_at + (c * EIGHTS + i / 4) * 32);
                sum[i] = fmaf((float)sums.p[c][i], x.x * w_low, sum[i]);
                sum[i + 1] = fmaf((float)sums.p[c][i + 1], x.y * w_low, sum[i + 1]);
                sum[i + 2] = fmaf((float)sums.p[c][i + 2], x.x * w_high, sum[i + 2]);
                sum[i + 3] = fmaf((float)sums.p[c][i + 3], x.y * w_high, sum[i + 3]);
            }
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        room.w.release(at.stage);
}

template <class N, uint32_t EIGHTS>
static __device__ __forceinline__ void fp8_few_sum(float (&sum)[4 * EIGHTS], struct fp8_few_sums<N, EIGHTS> &even,
                                                   struct fp8_few_sums<N, EIGHTS> &odd, const struct fp8_few_room &room,
                                                   struct ring_place &at, uint32_t &slot, const struct fp8_few &f)
{
    typedef struct fp8_few_sums<N, EIGHTS> sums;
    const uint32_t slabs = fp8_stage_slabs(EIGHTS);
    const struct skinny_shape &s = f.skinny;
    fp8_sum_stages<slabs>(
        even, odd, room.w, at, s.n_blocks,
        [&](sums &p, const struct ring_place &from, uint32_t slab) {
            fp8_few_multiply(p, room, from, fp8_few_x_at(f, from, slab / slabs), s.tile_rows);
        },
        [&](sums &p, const struct ring_place &from, uint32_t slab) {
            fp8_few_fold(sum, p, room, from, fp8_few_x_at(f, from, slab / slabs).stage, slot, slab, s);
            slot = fp8_next_slot(slot, slab + slabs, s);
        });
}

/* The rounded sums of a warp, 16 outputs of every row of x, through its piece: lines of 32 bytes instead of single values. */
template <class T, uint32_t EIGHTS>
static __device__ __forceinline__ void fp8_few_store_sums(const struct output &out, const struct skinny_shape &s, uint32_t tile,
                                                          const float (&sum)[4 * EIGHTS], uint32_t piece)
{
    const uint32_t lane = threadIdx.x % 32, column = threadIdx.x / 32 * 16 + lane % 2 * 8;
    const uint32_t corner = piece + (lane / 16 * 8 + lane % 8) * FP8_PIECE_PITCH + lane / 8 % 2 * 16;
#pragma unroll
    for (uint32_t i = 0; i < 4 * EIGHTS; i += 8)
        store_transposed(corner + 2 * i * FP8_PIECE_PITCH, pack(sum[i], sum[i + 1], T()), pack(sum[i + 2], sum[i + 3], T()),
                         pack(sum[i + 4], sum[i + 5], T()), pack(sum[i + 6], sum[i + 7], T()));
    __syncwarp();
#pragma unroll
    for (uint32_t r = lane / 2; r < EIGHTS * 8; r += 16)
        if (r < out.n_rows && column < s.tile_rows && tile * s.tile_rows + column < out.n_out)
            *(uint4 *)((T *)out.y + (size_t)r * out.y_stride + tile * s.tile_rows + column) =
                load_shared(piece + r * FP8_PIECE_PITCH + lane % 2 * 16);
    __syncwarp();
}

/* act(gate) * up of the sums of a warp, 8 outputs of every row of x, likewise. */
template <class T, uint32_t EIGHTS>
static __device__ __forceinline__ void fp8_few_store_products(const struct output &out, const struct skinny_shape &s,
                                                              uint32_t tile, const float (&sum)[4 * EIGHTS], uint32_t piece)
{
    const uint32_t lane = threadIdx.x % 32, column = tile * (s.tile_rows / 2) + threadIdx.x / 32 * 8;
    uint32_t products[EIGHTS];
    const auto multiply = [&](const auto &product) {
#pragma unroll
        for (uint32_t i = 0; i < EIGHTS; i++)
            products[i] = multiply_pairs<T>(pack(sum[4 * i], sum[4 * i + 1], T()), pack(sum[4 * i + 2], sum[4 * i + 3], T()),
                                            product);
    };
    const act_product chosen = {out.act};
    if (chosen.is_common()) /* without a choice for every value */
        multiply([&](float gate, float up) { return chosen.common(gate, up); });
    else
        multiply(chosen);
#pragma unroll
    for (uint32_t i = 0; i < EIGHTS; i += 4)
        store_transposed(piece + (i * 8 + lane) * FP8_PIECE_PITCH, products[i], products[i + 1], products[i + 2],
                         products[i + 3]);
    __syncwarp();
#pragma unroll
    for (uint32_t r = lane; r < EIGHTS * 8; r += 32)
        if (r < out.n_rows && threadIdx.x / 32 * 16 < s.tile_rows && column < out.n_out)
            *(uint4 *)((T *)out.y + (size_t)r * out.y_stride + column) = load_shared(piece + r * FP8_PIECE_PITCH);
    __syncwarp();
}

/* The end of a tile. */
template <bool IS_PRODUCT, class T, uint32_t EIGHTS>
static __device__ __forceinline__ void fp8_few_store(const struct output &out, const struct fp8_few &f, uint32_t tile,
                                                     float (&sum)[4 * EIGHTS], const struct skinny_joined<T, EIGHTS> &joined,
                                                     uint32_t pieces)
{
    if constexpr (EIGHTS >= 4)
        if (f.is_wide) {
            const uint32_t piece = pieces + threadIdx.x / 32 * EIGHTS * 8 * FP8_PIECE_PITCH;
            if (out.bias)
#pragma unroll
                for (uint32_t i = 0; i < 4 * EIGHTS; i++)
                    sum[i] += joined.bias[i / 2 % 2];
            if (out.delta)
#pragma unroll
                for (uint32_t i = 0; i < 4 * EIGHTS; i++)
                    sum[i] += joined.delta[i];
            if (IS_PRODUCT)
                fp8_few_store_products<T, EIGHTS>(out, f.skinny, tile, sum, piece);
            else
                fp8_few_store_sums<T, EIGHTS>(out, f.skinny, tile, sum, piece);
            return;
        }
    skinny_store<IS_PRODUCT>(out, f.skinny, tile, sum, joined);
}

/* Barriers that the stream of W does not make itself: by one lane of each of the five other warps. */
static __device__ __forceinline__ void fp8_few_barriers(const struct fp8_few_room &room, uint32_t n_early, uint32_t warp)
{
    const uint32_t n = room.w.n_stages, n_full = n + room.x.n_stages;
    for (uint32_t i = n_early + (warp < 4 ? warp : 4); i < n_full + n; i += 5)
        barrier_init(room.w.full + 8 * i, i < n_full ? 1 : 4);
}

template <class T, class N, uint32_t EIGHTS, bool IS_PRODUCT>
static __global__ void __launch_bounds__(SKINNY_THREADS, 1)
linear_fp8_few(const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap w_scales,
               const __grid_constant__ CUtensorMap x_map, const __grid_constant__ struct fp8_few f, struct output out)
{
    only_sm_90a();
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const struct skinny_shape &s = f.skinny;
    const struct fp8_few_room room = fp8_few_place<EIGHTS>(shared_address(shared), f);
    const uint32_t n_tiles = (s.n_tiles - blockIdx.x + gridDim.x - 1) / gridDim.x;
    const uint32_t n_early = min(s.n_ahead, n_tiles * ((s.n_blocks + fp8_stage_slabs(EIGHTS) - 1) / fp8_stage_slabs(EIGHTS)));
    struct fp8_few_weights<EIGHTS, IS_PRODUCT> weights = {&w_map, &w_scales, f, room, policy_read_once(),
                                                          0,      n_early,   blockIdx.x, 0,    0,    0};
    if (lane == 0) {
        if (warp == 4)
            weights.begin();
        else
            fp8_few_barriers(room, n_early, warp);
        barriers_made();
    }
    __syncthreads();
    if (warp >= 4) {
        if (warp == 4 && lane == 0)
            weights.stream();
        if (warp == 5 && lane == 0)
            fp8_few_load_x<EIGHTS>(&x_map, f, room);
        return;
    }
    wait_for_input();
    struct fp8_few_sums<N, EIGHTS> even = {}, odd = {};
    struct ring_place at = RING_READ;
    uint32_t slot = 0;
    for (uint32_t tile = blockIdx.x; tile < s.n_tiles; tile += gridDim.x) {
        float sum[4 * EIGHTS] = {};
        struct skinny_joined<T, EIGHTS> joined = {};
        skinny_read<IS_PRODUCT>(out, s, tile, joined);
        fp8_few_sum(sum, even, odd, room, at, slot, f);
        fp8_few_store<IS_PRODUCT>(out, f, tile, sum, joined, room.pieces);
    }
}

/* ---- the host's side ----------------------------------------------------------------------------------------------------- */

/* n_x: stages of x. */
static inline uint32_t fp8_few_bytes(uint32_t n_stages, uint32_t n_x, uint32_t eights, uint32_t tile_rows)
{
    const uint32_t slabs = fp8_stage_slabs(eights), x_bytes = slabs * eights * 8 * (FP8_SLAB + (uint32_t)sizeof(float));
    const uint32_t w_scales = tile_rows * FP8_CHUNK * (uint32_t)sizeof(float);
    /* The product of the last stage may read beyond its end, as in linear_skinny.cuh. */
    const uint32_t beyond = (64 - tile_rows) * FP8_SLAB;
    const uint32_t after = n_stages * (w_scales + 16) + n_x * (x_bytes + 8) + fp8_few_pieces(eights);
    return n_stages * slabs * tile_rows * FP8_SLAB + (after > beyond ? after : beyond);
}

/* n_kept: 0, or the stages of all of x. */
static inline uint32_t fp8_few_stages(uint32_t n_kept, uint32_t eights, uint32_t tile_rows)
{
    return ring_stages(SHARED_BYTES, [&](uint32_t n) { return fp8_few_bytes(n, n_kept ? n_kept : n, eights, tile_rows); });
}

#define FP8_KEPT_RING (80u << 10) /* of W, at least, beside an x that stays */

/* The stages of all of x, where blocks have several tiles and shared memory has room for a ring of W beside it; else 0. */
static inline uint32_t fp8_few_kept(const struct cuda *cuda, const struct skinny_form *form, uint32_t n_slabs, uint32_t eights)
{
    const uint32_t slabs = fp8_stage_slabs(eights), n_x = ceil_div(n_slabs, slabs);
    const uint32_t n_stages = ceil_div(FP8_KEPT_RING, slabs * form->tile_rows * FP8_SLAB);
    const bool fits = fp8_few_bytes(n_stages, n_x, eights, form->tile_rows) <= SHARED_BYTES;
    return fits && form->n_tiles > cuda->n_processors ? n_x : 0;
}

/* Rows of W a tile. From 33 rows of x on, few large tiles reread less of x. */
static inline uint32_t fp8_few_tile_rows(uint32_t n_out, uint32_t n_cols, bool is_pairs, uint32_t eights, uint32_t n_processors)
{
    if (eights == 8 && ceil_div(n_out, 64) * 2 <= n_processors)
        return 64;
    return skinny_tile_rows(n_out, ceil_div(n_cols, 2), is_pairs, eights <= 2 ? 4 : 2, n_processors);
}

static const uint32_t FP8_EIGHTS[] = {2, 4, 8}; /* at most, of the forms of a matrix */

static enum rc fp8_make_form(const struct cuda *cuda, map_encoder encode, const struct matrix *matrix, bool is_pairs,
                             uint32_t eights, struct fp8_form *form, struct err *err)
{
    const struct cuda_part *part = &matrix->parts[0];
    const uint32_t half = matrix->n_rows / 2, n_slabs = fp8_slabs(matrix->n_cols), slabs = fp8_stage_slabs(eights);
    const uint64_t row_bytes = part->row_bytes;
    struct skinny_form *numbers = &form->numbers;
    numbers->tile_rows = fp8_few_tile_rows(matrix->n_rows, matrix->n_cols, is_pairs, eights, cuda->n_processors);
    numbers->n_tiles = ceil_div(matrix->n_rows, numbers->tile_rows);
    const struct map_dims rows = {2, {matrix->n_rows, n_slabs}, {row_bytes, 128}, {numbers->tile_rows, slabs}};
    const struct map_dims pairs = {4, {8, 2, half / 8, n_slabs}, {row_bytes, half * row_bytes, 8 * row_bytes, 128},
                                   {8, 2, numbers->tile_rows / 16, slabs}};
    enum rc rc = map_make(encode, cuda->dtype, part->data, is_pairs ? &pairs : &rows, &numbers->map, err);
    return rc ? rc : fp8_scale_map(encode, cuda->dtype, part->data - part->lead_bytes, row_bytes, matrix->n_rows,
                                   part->lead_bytes / 16, is_pairs, numbers->tile_rows, &form->scales, err);
}

enum rc fp8_take(struct cuda *cuda, map_encoder encode, struct fp8_memory *memory, struct matrix *matrix, struct err *err)
{
    matrix->fp8 = (struct fp8_matrix *)mem_calloc(1, sizeof *matrix->fp8);
    if (!matrix->fp8)
        return err_set(err, RC_MEMORY, "cuda: no memory for a matrix");
    matrix->fp8->matrix = matrix;
    matrix->fp8->next = memory->first;
    memory->first = matrix->fp8;
    enum rc rc = fp8_make_room(cuda, memory, matrix->n_cols, err);
    for (uint32_t i = 0; i < 3 && !rc && !cuda->is_portable; i++) {
        rc = fp8_make_form(cuda, encode, matrix, false, FP8_EIGHTS[i], &matrix->fp8->forms[0][i], err);
        if (!rc && matrix->n_rows % 16 == 0)
            rc = fp8_make_form(cuda, encode, matrix, true, FP8_EIGHTS[i], &matrix->fp8->forms[1][i], err);
    }
    return rc;
}

void fp8_drop(struct fp8_memory *memory, const struct matrix *matrix)
{
    struct fp8_matrix **place = &memory->first;
    while (*place && *place != matrix->fp8)
        place = &(*place)->next;
    if (*place)
        *place = matrix->fp8->next;
    mem_free(matrix->fp8);
}

typedef void (*fp8_few_kernel)(CUtensorMap, CUtensorMap, CUtensorMap, struct fp8_few, struct output);

template <class T, class N> static fp8_few_kernel fp8_few_of(uint32_t eights, bool is_product)
{
    switch (eights) {
    case 1: return is_product ? linear_fp8_few<T, N, 1, true> : linear_fp8_few<T, N, 1, false>;
    case 2: return is_product ? linear_fp8_few<T, N, 2, true> : linear_fp8_few<T, N, 2, false>;
    case 4: return is_product ? linear_fp8_few<T, N, 4, true> : linear_fp8_few<T, N, 4, false>;
    default: return is_product ? linear_fp8_few<T, N, 8, true> : linear_fp8_few<T, N, 8, false>;
    }
}

void fp8_few_multiply(const struct fp8_product &p, const struct tensor_map &x_map, const struct fp8_rows &x, uint32_t eights)
{
    const struct cuda *cuda = p.cuda;
    const struct matrix *matrix = p.matrix;
    const struct output &out = p.out;
    const struct fp8_form *form = &matrix->fp8->forms[p.is_product][eights <= 2 ? 0 : eights / 4];
    const struct skinny_form *numbers = &form->numbers;
    const uint32_t n_slabs = fp8_slabs(matrix->n_cols), slabs = fp8_stage_slabs(eights);
    const uint32_t n_kept = fp8_few_kept(cuda, numbers, n_slabs, eights);
    const uint32_t n_stages = fp8_few_stages(n_kept, eights, numbers->tile_rows);
    const bool is_wide = !out.is_float && !out.add && map_fits(out.y, (size_t)out.y_stride * 2) && out.n_out % 8 == 0;
    const uint32_t n_ahead = skinny_ahead(n_stages, slabs, numbers->tile_rows, SKINNY_AHEAD_BYTES);
    const struct fp8_few f = {{n_slabs, n_stages, numbers->tile_rows, numbers->n_tiles, n_ahead, false},
                              matrix->parts[0].lead_bytes / 16, x.scales, is_wide, n_kept};
    const auto kernel = visit_numbers(matrix, [&](auto number) {
        using N = decltype(number);
        return cuda->dtype == DTYPE_F16 ? fp8_few_of<__half, N>(eights, p.is_product)
                                        : fp8_few_of<__nv_bfloat16, N>(eights, p.is_product);
    });
    launch(cuda, kernel, ceil_div(numbers->n_tiles, ceil_div(numbers->n_tiles, cuda->n_processors)), SKINNY_THREADS,
           fp8_few_bytes(n_stages, n_kept ? n_kept : n_stages, eights, numbers->tile_rows), map_of(&numbers->map),
           map_of(&form->scales), map_of(&x_map), f, out);
}

#endif
