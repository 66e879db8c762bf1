/* experts_streamed.cuh: products of experts that have few rows each, as linear_skinny.cuh makes them. A unit is up to 8 EIGHTS
 * places of one expert, so only the weights of experts that have rows are read. W of a unit is the operand of 64 rows, its
 * rows of x are the columns. The chain of every output is that of linear_skinny.cuh.
 *
 * experts_streamed writes a row for every place: act(gate) * up, or plain sums. Up to 8 rows of x are not gathered: every unit
 * multiplies all of them and keeps the columns of its routes.
 *
 * Weights cannot be fetched before the routes are known. experts_streamed starts the next kernel only when it has read the
 * routes itself. So that kernel may read the routes and fetch its weights before it waits for its input. Bound by the bytes of
 * the chosen experts' weights: 8 experts of 3 x 768 x 2048 take 17 us at the 4.5 TB/s that an H200 reads. */
#ifndef LLMPY_CUDA_EXPERTS_STREAMED_CUH
#define LLMPY_CUDA_EXPERTS_STREAMED_CUH

#include "../core/launch.cuh"
#include "../linear/linear_skinny.cuh"
#include "experts.cuh"

#define UNSORTED_ROWS 8u /* rows of x that are not sorted beforehand */
#define UNSORTED_ROUTES (UNSORTED_ROWS * EXPERTS_MAX_CHOSEN)
#define STREAMED_TILE_COST 4u
#define NO_PLACE 0xffffffffu
#define NO_EXPERT 0xffffu /* of this rank */

struct streamed_unit {
    uint16_t expert, n_rows;
    uint32_t first; /* place */
};

struct streamed_shape {
    struct skinny_shape w;  /* of one expert's weights */
    uint32_t expert_step;   /* from one expert to the next: rows, or pairs of eight */
    uint32_t tables_at;     /* in shared memory */
    uint32_t max_units;
    bool is_behind;         /* the kernel before has started this one when it saw the routes, so they are written already */
};

struct streamed_tables {
    uint32_t n_units;
    uint16_t experts[UNSORTED_ROUTES], ranks[UNSORTED_ROUTES]; /* of routes; how many of the same expert are before */
    int8_t places[UNSORTED_ROUTES][UNSORTED_ROWS];             /* of unit u and row r; below 0: no such route */
};

static __device__ __forceinline__ struct streamed_unit *streamed_units(struct streamed_tables *t)
{
    return (struct streamed_unit *)(t + 1);
}

/* Sorts up to UNSORTED_ROUTES routes. One block writes their places for the kernels that follow. */
static __device__ void streamed_sort(const struct mixture &m, struct streamed_tables *t, bool is_writing)
{
    const uint32_t n = m.n_routes;
    for (uint32_t i = threadIdx.x; i < n; i += SKINNY_THREADS) {
        const uint32_t expert = (uint32_t)__ldcg(&route_at(m, i)->expert) - m.first;
        t->experts[i] = (uint16_t)(expert < m.n_experts ? expert : NO_EXPERT);
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < n; i += SKINNY_THREADS) {
        uint32_t rank = 0;
        for (uint32_t j = 0; j < i; j++)
            rank += t->experts[j] == t->experts[i];
        t->ranks[i] = (uint16_t)rank;
    }
    __syncthreads();
    for (uint32_t e = threadIdx.x; e <= m.n_experts; e += SKINNY_THREADS) {
        uint32_t first = 0, unit = 0, n_rows = 0;
        for (uint32_t i = 0; i < n; i++) {
            first += m.keeps_places ? (t->experts[i] == e) * i : t->experts[i] < e;
            unit += t->experts[i] < e && !t->ranks[i];
            n_rows += t->experts[i] == e;
        }
        if (e == m.n_experts)
            t->n_units = unit;
        if (!n_rows)
            continue;
        streamed_units(t)[unit] = {(uint16_t)e, (uint16_t)n_rows, first};
        for (uint32_t r = 0; r < UNSORTED_ROWS; r++)
            t->places[unit][r] = -1;
        for (uint32_t i = 0; i < n; i++)
            if (t->experts[i] == e) {
                t->places[unit][i / m.n_chosen] = (int8_t)(first + t->ranks[i]);
                if (is_writing)
                    m.places[i] = first + t->ranks[i];
            }
    }
}

/* Units of sorted routes. One warp. */
static __device__ void streamed_cut(const struct mixture &m, struct streamed_tables *t, uint32_t unit_rows)
{
    uint32_t lane = threadIdx.x % 32, n_units = 0;
    for (uint32_t e = lane; e < lane + m.n_experts; e += 32) {
        uint32_t first = e < m.n_experts ? __ldcg(m.offsets + e) : 0, end = e < m.n_experts ? __ldcg(m.offsets + e + 1) : 0;
        uint32_t n = (end - first + unit_rows - 1) / unit_rows, at = n;
        for (uint32_t step = 1; step < 32; step *= 2) {
            uint32_t other = __shfl_up_sync(~0u, at, step);
            at += lane >= step ? other : 0;
        }
        uint32_t total = __shfl_sync(~0u, at, 31);
        at += n_units - n;
        for (; first < end; first += unit_rows)
            streamed_units(t)[at++] = {(uint16_t)e, (uint16_t)min(unit_rows, end - first), first};
        n_units += total;
    }
    if (lane == 0)
        t->n_units = n_units;
}

/* All threads. is_place: rows of x are places, which a kernel before has written. */
static __device__ void streamed_prepare(const struct mixture &m, const struct streamed_shape &s, struct streamed_tables *t,
                                        uint32_t unit_rows, bool is_place)
{
    if (!s.is_behind)
        wait_for_input();
    if (threadIdx.x == 0)
        start_next();
    if (!m.is_sorted)
        streamed_sort(m, t, !is_place && blockIdx.x == 0);
    else if (threadIdx.x < 32)
        streamed_cut(m, t, unit_rows);
    __syncthreads();
}

/* ---- rows of places ------------------------------------------------------------------------------------------------------ */

template <bool IS_PRODUCT>
static __device__ __forceinline__ void streamed_load_w(const CUtensorMap *map, const struct streamed_shape &s,
                                                       struct streamed_tables *t, uint32_t stage_blocks,
                                                       const struct ring &ring)
{
    uint64_t policy = policy_read_once();
    struct ring_place at = RING_FETCH;
    for (uint32_t item = blockIdx.x; item < t->n_units * s.w.n_tiles; item += gridDim.x) {
        uint32_t from = streamed_units(t)[item / s.w.n_tiles].expert * s.expert_step, tile = item % s.w.n_tiles;
        for (uint32_t block = 0; block < s.w.n_blocks; block += stage_blocks, ring.next(at)) {
            const uint32_t full = ring.expect(at, ring.stage_bytes), target = ring.data_of(at);
            if (IS_PRODUCT)
                copy_pairs(target, map, from + tile * (s.w.tile_rows / 16), block, full, policy);
            else
                copy_box(target, map, from + tile * s.w.tile_rows, block, full, policy);
        }
    }
}

static __device__ __forceinline__ void streamed_load_x(const CUtensorMap *map, const struct mixture &m,
                                                       const struct streamed_shape &s, bool is_place, struct streamed_tables *t,
                                                       uint32_t stage_blocks, const struct ring &ring)
{
    wait_for_input();
    struct ring_place at = RING_FETCH;
    for (uint32_t item = blockIdx.x; item < t->n_units * s.w.n_tiles; item += gridDim.x) {
        uint32_t row = is_place ? streamed_units(t)[item / s.w.n_tiles].first : 0;
        for (uint32_t block = 0; block < s.w.n_blocks; block += stage_blocks, ring.next(at)) {
            const uint32_t full = ring.expect(at, ring.stage_bytes);
            copy_box(ring.data_of(at), map, row, block, full);
        }
    }
}

/* Where column r of a unit's product goes. */
static __device__ __forceinline__ uint32_t streamed_place(const struct streamed_tables *t, bool is_place,
                                                          const struct streamed_unit &unit, uint32_t index, uint32_t r)
{
    if (is_place)
        return r < unit.n_rows ? unit.first + r : NO_PLACE;
    return t->places[index][r] < 0 ? NO_PLACE : (uint32_t)t->places[index][r];
}

template <class T, uint32_t EIGHTS>
static __device__ __forceinline__ void streamed_store_products(const struct output &out, const expert_product &product,
                                                               const struct streamed_shape &s, const struct streamed_tables *t,
                                                               bool is_place, const struct streamed_unit &unit, uint32_t index,
                                                               uint32_t tile, const float (&sum)[4 * EIGHTS])
{
    uint32_t n = tile * (s.w.tile_rows / 2) + threadIdx.x / 32 * 8 + threadIdx.x % 32 / 4;
    if (n >= out.n_out || threadIdx.x / 32 * 16 >= s.w.tile_rows)
        return;
    const float *bias = out.bias ? out.bias + (size_t)unit.expert * 2 * out.n_out + n : NULL;
    float gate_bias = bias ? bias[0] : 0, up_bias = bias ? bias[out.n_out] : 0;
#pragma unroll
    for (uint32_t i = 0; i < 4 * EIGHTS; i += 1 + i % 2 * 2) {
        uint32_t place = streamed_place(t, is_place, unit, index, skinny_x_row(i));
        if (place == NO_PLACE)
            continue;
        float gate = bias ? sum[i] + gate_bias : sum[i], up = bias ? sum[i + 2] + up_bias : sum[i + 2];
        ((T *)out.y)[(size_t)place * out.y_stride + n] =
            round_to<T>(product(to_float(round_to<T>(gate)), to_float(round_to<T>(up))));
    }
}

template <class T, uint32_t EIGHTS>
static __device__ __forceinline__ void streamed_store_sums(const struct output &out, const struct streamed_shape &s,
                                                           const struct streamed_tables *t, bool is_place,
                                                           const struct streamed_unit &unit, uint32_t index, uint32_t tile,
                                                           const float (&sum)[4 * EIGHTS])
{
#pragma unroll
    for (uint32_t i = 0; i < 4 * EIGHTS; i++) {
        uint32_t place = streamed_place(t, is_place, unit, index, skinny_x_row(i)), row = skinny_w_row(i);
        uint32_t n = tile * s.w.tile_rows + row;
        if (place == NO_PLACE || row >= s.w.tile_rows || n >= out.n_out)
            continue;
        float value = out.bias ? sum[i] + out.bias[(size_t)unit.expert * out.n_out + n] : sum[i];
        ((T *)out.y)[(size_t)place * out.y_stride + n] = round_to<T>(value);
    }
}

/* The rings of W and of x, which share their barriers, are the first of a block's shared memory. */
struct streamed_memory {
    struct ring w[1], x;
    struct streamed_tables *tables;
};

static __device__ __forceinline__ struct streamed_memory streamed_open(uint8_t *shared, const struct streamed_shape &s,
                                                                       uint32_t eights)
{
    const uint32_t stage_blocks = skinny_stage_blocks(eights), n_stages = s.w.n_stages;
    const uint32_t w_bytes = stage_blocks * s.w.tile_rows * 128, x_bytes = stage_blocks * eights * 1024;
    const uint32_t w_data = shared_address(shared), x_data = w_data + n_stages * w_bytes, full = x_data + n_stages * x_bytes;
    const uint32_t empty = full + 8 * n_stages;
    const struct streamed_memory f = {{{w_data, full, empty, n_stages, w_bytes}},
                                      {x_data, full, empty, n_stages, x_bytes},
                                      (struct streamed_tables *)(shared + s.tables_at)};
    f.x.make_barriers(2, 4);
    barriers_made();
    return f;
}

/* The sums of one tile and unit. */
template <class T, uint32_t EIGHTS>
static __device__ __forceinline__ void streamed_sum(const struct streamed_memory &f, const struct streamed_shape &s,
                                                    struct ring_place &at, float (&sum)[4 * EIGHTS])
{
    const uint32_t stage_blocks = skinny_stage_blocks(EIGHTS);
    auto multiply = [&](uint32_t block, auto half_way) {
        skinny_multiply<T, EIGHTS>(sum, wgmma_rows(f.w[0].data_of(at)), wgmma_rows(f.x.data_of(at)), s.w.tile_rows,
                                   min(stage_blocks, s.w.n_blocks - block), half_way);
    };
    skinny_sum<skinny_stage_blocks(EIGHTS)>(f.w, s.w.n_blocks, at, sum, multiply);
}

/* is_place: rows of x are places, else the rows of the batch. */
template <class T, uint32_t EIGHTS, bool IS_PRODUCT>
static __global__ void __launch_bounds__(SKINNY_THREADS, 1)
experts_streamed(const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap x_map, struct streamed_shape s,
                 struct mixture m, bool is_place, struct output out, expert_product product)
{
    only_sm_90a();
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const uint32_t stage_blocks = skinny_stage_blocks(EIGHTS);
    map_prefetch(warp == 4 ? &w_map : &x_map);
    const struct streamed_memory f = streamed_open(shared, s, EIGHTS);
    streamed_prepare(m, s, f.tables, 8 * EIGHTS, is_place);
    if (warp >= 4) {
        if (warp == 4 && lane == 0)
            streamed_load_w<IS_PRODUCT>(&w_map, s, f.tables, stage_blocks, f.w[0]);
        if (warp == 5 && lane == 0)
            streamed_load_x(&x_map, m, s, is_place, f.tables, stage_blocks, f.x);
        return;
    }
    wait_for_input();
    struct ring_place at = RING_READ;
    for (uint32_t item = blockIdx.x; item < f.tables->n_units * s.w.n_tiles; item += gridDim.x) {
        float sum[4 * EIGHTS] = {};
        uint32_t index = item / s.w.n_tiles, tile = item % s.w.n_tiles;
        streamed_sum<T, EIGHTS>(f, s, at, sum);
        const struct streamed_unit unit = streamed_units(f.tables)[index];
        if (IS_PRODUCT)
            streamed_store_products<T, EIGHTS>(out, product, s, f.tables, is_place, unit, index, tile, sum);
        else
            streamed_store_sums<T, EIGHTS>(out, s, f.tables, is_place, unit, index, tile, sum);
    }
}

/* ---- the host's side ----------------------------------------------------------------------------------------------------- */

/* Rows of W a tile: the most, up to a limit, that keep the blocks' shares of n_units experts' weights near equal. A tile costs
 * as much as STREAMED_TILE_COST rows besides. */
static inline uint32_t streamed_tile_rows(uint32_t n_out, float n_units, uint32_t step, uint32_t limit, uint32_t n_processors)
{
    uint32_t best = step;
    float least = 0;
    for (uint32_t pass = 0; pass < 2; pass++)
        for (uint32_t rows = step; rows <= limit; rows += step) {
            float n_rounds = ceilf(n_units * (float)ceil_div(n_out, rows) / (float)n_processors);
            float share = n_rounds * (float)(rows + STREAMED_TILE_COST);
            if (pass == 0 && (least == 0 || share < least))
                least = share;
            if (pass == 1 && share * 16 <= least * 17)
                best = rows;
        }
    return best;
}

/* Divides the shared memory of a block. Returns its size in bytes. */
static inline uint32_t streamed_cut_memory(struct streamed_shape *s, uint32_t eights)
{
    const uint32_t tables = (uint32_t)(sizeof(struct streamed_tables) + s->max_units * sizeof(struct streamed_unit));
    auto rings = [&](uint32_t n) { return skinny_bytes(n, skinny_stage_blocks(eights), s->w.tile_rows, eights); };
    s->w.n_stages = ring_stages(SHARED_BYTES, [&](uint32_t n) { return rings(n) + 16 + tables; });
    s->tables_at = (rings(s->w.n_stages) + 15) / 16 * 16;
    return s->tables_at + tables;
}

#endif
