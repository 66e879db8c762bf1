/* experts_rows8_mxfp4.cuh (rows8_): the whole operation on up to 8 rows and packed weights in one launch, so the weights of
 * the way down are fetched while the products of the way up are computed. Blocks take items in turn: first tiles of gate and
 * up of every unit (an expert that has rows, with its rows), then columns of y. An item of y has all units' weights of its
 * columns, so it also adds up the routes. Weights wait for the routes alone; a unit's products are fetched when all of its
 * tiles are written. An item waits only for items that were taken before it, so running blocks always finish, even if other
 * work occupies the device.
 *
 * A warp has a panel of a tile of gate and up, eight rows of each, or eight rows of a unit's W for columns of y. A stage of
 * the ring has some blocks of 64 columns of all warps' W, and of the rows of x of its units, one copy a row. W is the operand
 * of 16 rows of mma.sync m16n8k16 (the way down leaves eight of them empty), x the operand of 8: one chain over the k16 steps
 * 0, 1, 2, ..., as in linear.cu. W is MXFP4 as packed.cuh lays it, x bfloat16.
 *
 * Bound by the bytes of the chosen experts' weights: 4 experts of 3 x 2880 x 2880 take 12 us at the 4.5 TB/s that an H200
 * reads; for now by what the warps do, some 350 cycles a block of 64 columns on the way up, where memory takes 300, and 240
 * down. */
#ifndef LLMPY_CUDA_EXPERTS_ROWS8_MXFP4_CUH
#define LLMPY_CUDA_EXPERTS_ROWS8_MXFP4_CUH

#include "../core/launch.cuh"
#include "../core/mma.cuh"
#include "../core/packed.cuh"
#include "experts_streamed.cuh"

#define ROWS8_ROWS UNSORTED_ROWS
#define ROWS8_ROUTES UNSORTED_ROUTES
#define ROWS8_WARPS 12u /* that multiply */
#define ROWS8_THREADS (ROWS8_WARPS * 32 + 64)
#define ROWS8_ITEMS 4u     /* taken and not yet worked off by a block */
#define ROWS8_STAGES 16u   /* of the ring, at most */
#define ROWS8_SPARED 8192u /* bytes of shared memory that the next kernel's first block may have beside this one's */
#define STAGE_BLOCKS 5u    /* of 64 columns, of a stage: gpt-oss has 45 */
#define X_STEP (STAGE_BLOCKS * 128 + 16) /* from a row of x to the next in a stage, which begins in another bank */
#define DOWN_EIGHTS 3u     /* of rows of W, of an item's every unit */
#define DOWN_UNITS (ROWS8_WARPS / DOWN_EIGHTS) /* of a stage */
#define DOWN_COLUMNS (DOWN_EIGHTS * 8)
#define PANEL_ROWS 16u

/* In device memory, zero between launches. */
struct rows8_counts {
    uint32_t n_taken, n_ended;       /* items, blocks */
    uint32_t products[ROWS8_ROUTES]; /* written tiles of a unit */
};

struct rows8_way {
    uint32_t n_blocks;              /* of 64 columns */
    uint32_t n_tiles;               /* of one expert */
    uint32_t step, tile_step;       /* from one expert, and from one tile, to the next in the map */
    uint32_t unit_bytes, unit_step; /* of a unit's W in a stage, and to the next one's */
    uint32_t slot_step, x_bytes;    /* from a unit's x to the next one's; of all x of a stage, in front of W */
};

struct rows8_shape {
    struct rows8_way up, down;
    uint32_t n_panels; /* beside each other in a tile of up */
    uint32_t n_stages, stage_bytes;
};

struct rows8_maps {
    CUtensorMap up, down;
};

/* Rows of two bytes a value, of the batch or of places. */
struct rows8_rows {
    const char *data;
    uint32_t stride_bytes;
};

struct rows8_tables {
    uint64_t full[ROWS8_STAGES], empty[ROWS8_STAGES], there[ROWS8_ITEMS], taken[ROWS8_ITEMS]; /* barriers */
    uint32_t n_units, items[ROWS8_ITEMS];
    struct streamed_unit units[ROWS8_ROUTES];
    float weights[ROWS8_ROUTES]; /* of routes */
    uint16_t experts[ROWS8_ROUTES];
    uint8_t is_first[ROWS8_ROUTES];                   /* of its expert */
    uint8_t places[ROWS8_ROUTES];                     /* of routes */
    uint8_t rows[ROWS8_ROUTES];                       /* of places */
    uint16_t results[2][ROWS8_ROUTES][DOWN_COLUMNS];  /* of the columns of an item; items alternate between the two */
};

/* Called by all threads; each has at most one route. The routes of a single row name different experts. */
static __device__ void rows8_sort(const struct mixture &m, struct rows8_tables *t)
{
    const uint32_t n = m.n_routes, i = threadIdx.x;
    uint32_t own = EXPERTS_MAX, rank = 0, before = 0, n_own = 0, unit = 0;
    if (i < n) {
        const struct route *route = route_at(m, i);
        own = (uint32_t)__ldcg(&route->expert);
        t->weights[i] = __ldcg(&route->weight);
        t->experts[i] = (uint16_t)own;
    }
    if (m.n_rows == 1) {
        if (i < n) {
            t->units[i] = {(uint16_t)own, 1, i};
            t->places[i] = (uint8_t)i;
            t->rows[i] = 0;
        }
        if (i == 0)
            t->n_units = n;
        __syncthreads();
        return;
    }
    __syncthreads();
    if (i < n) {
        for (uint32_t j = 0; j < n; j++) {
            rank += j < i && t->experts[j] == own;
            before += t->experts[j] < own;
            n_own += t->experts[j] == own;
        }
        t->is_first[i] = rank == 0;
        t->places[i] = (uint8_t)(before + rank);
        t->rows[before + rank] = (uint8_t)(i / m.n_chosen);
    }
    const uint32_t n_units = (uint32_t)__syncthreads_count(i < n && rank == 0);
    if (i < n && rank == 0) {
        for (uint32_t j = 0; j < n; j++)
            unit += t->is_first[j] && t->experts[j] < own;
        t->units[unit] = {(uint16_t)own, (uint16_t)n_own, before};
    }
    if (i == 0)
        t->n_units = n_units;
    __syncthreads();
}

/* ---- items and rings ----------------------------------------------------------------------------------------------------- */

struct rows8_item {
    bool is_up, is_end;
    uint32_t unit, tile; /* a unit of the way up */
};

static __device__ __forceinline__ struct rows8_item rows8_item_of(const struct rows8_shape &s, uint32_t n_units, uint32_t index)
{
    const uint32_t n_up = n_units * s.up.n_tiles;
    if (index < n_up)
        return {true, false, index / s.up.n_tiles, index % s.up.n_tiles};
    return {false, index - n_up >= s.down.n_tiles, 0, index - n_up};
}

/* The units of an item that lie beside each other in a stage, one such group after the other. */
struct rows8_group {
    uint32_t unit, n, end;
    __device__ __forceinline__ rows8_group(const struct rows8_item &item, uint32_t n_units)
        : unit(item.unit), end(item.is_up ? item.unit + 1 : n_units)
    {
        n = min(DOWN_UNITS, end - unit);
    }
    __device__ __forceinline__ bool is_there() const { return unit < end; }
    __device__ __forceinline__ void next()
    {
        unit += n;
        n = min(DOWN_UNITS, end - unit);
    }
};

/* The queue of items from the warp that takes them to the other warps. */
struct rows8_turns {
    uint32_t turn = 0;
    /* One thread. */
    __device__ __forceinline__ void put(struct rows8_tables *t, uint32_t index)
    {
        barrier_wait(shared_address(&t->taken[turn % ROWS8_ITEMS]), (turn / ROWS8_ITEMS & 1) ^ 1);
        t->items[turn % ROWS8_ITEMS] = index;
        barrier_arrive(shared_address(&t->there[turn++ % ROWS8_ITEMS]));
    }
    /* A warp. */
    __device__ __forceinline__ uint32_t take(const struct rows8_tables *t)
    {
        barrier_wait(shared_address(&t->there[turn % ROWS8_ITEMS]), turn / ROWS8_ITEMS & 1);
        uint32_t index = *(volatile const uint32_t *)&t->items[turn % ROWS8_ITEMS];
        __syncwarp();
        if (threadIdx.x % 32 == 0)
            barrier_arrive(shared_address(&t->taken[turn % ROWS8_ITEMS]));
        turn++;
        return index;
    }
};

/* One thread. */
static __device__ __forceinline__ void rows8_load_w(const struct rows8_maps &maps, const struct rows8_shape &s,
                                                    const struct ring &ring, struct rows8_tables *t, uint32_t *n_taken,
                                                    uint32_t index)
{
    const uint64_t policy = policy_read_once();
    struct rows8_turns turns;
    struct ring_place at = RING_FETCH;
    for (;;) {
        const struct rows8_item item = rows8_item_of(s, t->n_units, index);
        turns.put(t, index);
        if (item.is_end)
            return;
        index = atomicAdd(n_taken, 1); /* arrives while this item's weights are fetched */
        const struct rows8_way &way = item.is_up ? s.up : s.down;
        for (struct rows8_group group(item, t->n_units); group.is_there(); group.next())
            for (uint32_t block = 0; block < way.n_blocks; block += STAGE_BLOCKS, ring.next(at)) {
                const uint32_t full = ring.expect(at, group.n * way.unit_bytes);
                const uint32_t target = ring.data_of(at) + way.x_bytes;
                for (uint32_t i = 0; i < group.n; i++) {
                    const uint32_t from = t->units[group.unit + i].expert * way.step + item.tile * way.tile_step;
                    if (item.is_up)
                        copy_pairs(target, &maps.up, from, block, full, policy);
                    else
                        copy_box(target + i * way.unit_step, &maps.down, from, block, full, policy);
                }
            }
    }
}

/* Adds one to a count, and releases the block's earlier writes. */
static __device__ __forceinline__ void count_released(uint32_t *count)
{
    asm volatile("red.release.gpu.global.add.u32 [%0],1;" ::"l"(count) : "memory");
}

/* The item of the next stage, in rings that note each stage's item. */
static __device__ __forceinline__ uint32_t ring_item(const struct ring &ring, const uint32_t *items,
                                                     const struct ring_place &at)
{
    ring.wait_full(at);
    return *(volatile const uint32_t *)&items[at.stage];
}

/* By a thread that loads: an item beyond the last, of a stage without bytes. */
static __device__ __forceinline__ void ring_end(const struct ring &ring, uint32_t *items, const struct ring_place &at,
                                                uint32_t item)
{
    ring.wait_empty(at);
    items[at.stage] = item;
    barrier_arrive(ring.full_of(at));
}

/* Waits until the count is n. Then the writes released before are visible, also to the copy engine. */
static __device__ __forceinline__ void rows8_wait(const uint32_t *count, uint32_t n)
{
    uint32_t have;
    do
        asm volatile("ld.acquire.gpu.global.u32 %0,[%1];" : "=r"(have) : "l"(count) : "memory");
    while (have != n);
    asm volatile("fence.proxy.async;" ::: "memory");
}

/* A warp, of which every lane has a row of a unit. */
static __device__ __forceinline__ void rows8_load_x(const struct rows8_shape &s, const struct rows8_rows &x,
                                                    const struct rows8_rows &products, const struct ring &ring,
                                                    struct rows8_tables *t, struct rows8_counts *counts)
{
    static_assert(DOWN_UNITS * ROWS8_ROWS == 32, "a lane a row");
    const uint32_t lane = threadIdx.x % 32, slot = lane / ROWS8_ROWS, row = lane % ROWS8_ROWS;
    struct rows8_turns turns;
    struct ring_place at = RING_FETCH;
    for (;;) {
        const struct rows8_item item = rows8_item_of(s, t->n_units, turns.take(t));
        if (item.is_end)
            break;
        const struct rows8_way &way = item.is_up ? s.up : s.down;
        const uint32_t own = slot * way.slot_step + row * X_STEP;
        for (struct rows8_group group(item, t->n_units); group.is_there(); group.next()) {
            const struct streamed_unit unit = t->units[group.unit + min(slot, group.n - 1)];
            const bool is_row = slot < group.n && row < unit.n_rows;
            const uint32_t place = unit.first + (is_row ? row : 0), n = __popc(__ballot_sync(~0u, is_row));
            const char *from = item.is_up ? x.data + (size_t)t->rows[place] * x.stride_bytes
                                          : products.data + (size_t)place * products.stride_bytes;
            if (!item.is_up)
                rows8_wait(&counts->products[group.unit + min(slot, group.n - 1)], s.up.n_tiles);
            for (uint32_t block = 0; block < way.n_blocks; block += STAGE_BLOCKS, ring.next(at)) {
                const uint32_t n_bytes = min(STAGE_BLOCKS, way.n_blocks - block) * 128;
                ring.wait_empty(at);
                if (lane == 0)
                    barrier_expect(ring.full_of(at), n * n_bytes);
                __syncwarp();
                if (is_row)
                    copy_bytes(ring.data_of(at) + own, from + block * 128, n_bytes, ring.full_of(at));
            }
        }
    }
    /* All products have been waited for when the last block comes here. */
    if (lane || atomicAdd(&counts->n_ended, 1) + 1 < gridDim.x)
        return;
    for (uint32_t unit = 0; unit < t->n_units; unit++)
        counts->products[unit] = 0;
    counts->n_taken = counts->n_ended = 0;
}

/* ---- the warps that multiply --------------------------------------------------------------------------------------------- */

/* A warp's way through a ring, stage by stage. */
template <class SHAPE, class TABLES> struct ring_reader {
    const SHAPE &s;
    TABLES *t;
    struct ring ring;
    struct ring_place at;

    /* Waits for the next stage and returns its address. */
    __device__ __forceinline__ uint32_t open() const
    {
        ring.wait_full(at);
        return ring.data_of(at);
    }
    __device__ __forceinline__ void close()
    {
        __syncwarp();
        if (threadIdx.x % 32 == 0)
            ring.release(at.stage);
        ring.next(at);
    }
    __device__ __forceinline__ void pass(uint32_t n_blocks, uint32_t stage_blocks)
    {
        for (uint32_t block = 0; block < n_blocks; block += stage_blocks) {
            open();
            close();
        }
    }
};

typedef ring_reader<struct rows8_shape, struct rows8_tables> rows8_reader;

/* The part of a block of 64 columns that a lane reads, of 8 or 16 rows of W and of 8 rows of x. */
template <uint32_t EIGHTS> struct rows8_block {
    uint32_t words[2 * EIGHTS], exponents[2 * EIGHTS], x[2][4];
    __device__ __forceinline__ void read(uint32_t w_at, uint32_t exponents_at, uint32_t x_at)
    {
#pragma unroll
        for (uint32_t i = 0; i < EIGHTS; i++)
            packed_read(w_at + i * PACKED_BYTES, exponents_at + i * PACKED_BYTES, words + 2 * i, exponents + 2 * i);
        load_matrices(x[0], x_at);
        load_matrices(x[1], x_at + 64);
    }
};

/* The same as operands of the tensor cores, in four k16 steps. Missing rows are whatever the registers hold. */
template <uint32_t EIGHTS> struct rows8_steps {
    uint32_t w[4][4], x[4][2];
    __device__ __forceinline__ void open(const struct rows8_block<EIGHTS> &from)
    {
#pragma unroll
        for (uint32_t k = 0; k < 4; k++) {
            x[k][0] = from.x[k / 2][k % 2 * 2];
            x[k][1] = from.x[k / 2][k % 2 * 2 + 1];
            if (EIGHTS == 1)
                asm("" : "=r"(w[k][1]), "=r"(w[k][3]));
        }
    }
    /* Word i: a row of two steps. */
    __device__ __forceinline__ void unpack(const struct rows8_block<EIGHTS> &from, uint32_t i)
    {
        const uint32_t k = i / EIGHTS * 2, row = i % EIGHTS, word = row * 2 + i / EIGHTS;
        unpack_word(from.words[word], from.exponents[word], w[k][row], w[k][row + 2], w[k + 1][row], w[k + 1][row + 2]);
    }
};

/* Adds up N blocks of a stage: while one is multiplied, the next is unpacked and the one behind it read. */
template <uint32_t EIGHTS, uint32_t N>
static __device__ __forceinline__ void rows8_add(float (&sum)[4], uint32_t w_at, uint32_t exponents_at, uint32_t x_at,
                                                 uint32_t w_step)
{
    struct rows8_block<EIGHTS> blocks[N];
    struct rows8_steps<EIGHTS> steps[N];
#pragma unroll
    for (uint32_t i = 0; i < N + 2; i++) {
        if (i < N)
            blocks[i].read(w_at + i * w_step, exponents_at + i * w_step, x_at + i * 128);
        if (i >= 1 && i <= N)
            steps[i - 1].open(blocks[i - 1]);
#pragma unroll
        for (uint32_t k = 0; k < 4; k++) {
            if (i >= 2)
                mma(sum, steps[i - 2].w[k], steps[i - 2].x[k], __nv_bfloat16());
            if (i >= 1 && i <= N && k < 2 * EIGHTS)
                steps[i - 1].unpack(blocks[i - 1], k);
        }
    }
}

/* The sums of the rows of W that lie `panel` bytes into a stage's W, a block of 64 columns w_step further on than the last, and
 * of the rows `x` bytes into its x. */
template <uint32_t EIGHTS>
static __device__ __forceinline__ void rows8_sum(rows8_reader &reader, const struct rows8_way &way, uint32_t panel,
                                                 uint32_t w_step, uint32_t x, float (&sum)[4])
{
    const uint32_t lane = threadIdx.x % 32;
    for (uint32_t block = 0; block < way.n_blocks; block += STAGE_BLOCKS) {
        const uint32_t stage = reader.open(), w_at = stage + way.x_bytes + panel;
        uint32_t word = w_at + lane * 8, exponent = w_at + 256 + lane / 4 * 2, x_at = stage + x;
        if (block + STAGE_BLOCKS <= way.n_blocks)
            rows8_add<EIGHTS, STAGE_BLOCKS>(sum, word, exponent, x_at, w_step);
        else
            for (uint32_t i = block; i < way.n_blocks; i++, word += w_step, exponent += w_step, x_at += 128)
                rows8_add<EIGHTS, 1>(sum, word, exponent, x_at, 0);
        reader.close();
    }
}

/* Sum i of a thread is that of this row of a unit. */
static __device__ __forceinline__ uint32_t rows8_x_row(uint32_t i)
{
    return threadIdx.x % 4 * 2 + i % 2;
}

/* The address at which a lane reads its row of x for load_matrices. Missing rows repeat the last row. */
static __device__ __forceinline__ uint32_t rows8_x_at(const struct streamed_unit &unit)
{
    const uint32_t lane = threadIdx.x % 32;
    return min(lane % 8, (uint32_t)unit.n_rows - 1) * X_STEP + lane / 8 * 16;
}

/* A tile of a unit's products. */
static __device__ __forceinline__ void rows8_go_up(rows8_reader &reader, const struct output &out,
                                                   const expert_product &product, const struct rows8_item &item)
{
    const struct rows8_shape &s = reader.s;
    const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const uint32_t n = (item.tile * s.n_panels + warp) * (PANEL_ROWS / 2) + threadIdx.x % 32 / 4;
    if (warp >= s.n_panels)
        return reader.pass(s.up.n_blocks, STAGE_BLOCKS);
    const struct streamed_unit unit = reader.t->units[item.unit];
    const float *bias = out.bias && n < out.n_out ? out.bias + (size_t)unit.expert * 2 * out.n_out + n : NULL;
    const float gate_bias = bias ? bias[0] : 0, up_bias = bias ? bias[out.n_out] : 0;
    float sum[4] = {};
    rows8_sum<2>(reader, s.up, warp * 2 * PACKED_BYTES, s.n_panels * 2 * PACKED_BYTES, rows8_x_at(unit), sum);
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
        if (rows8_x_row(i) >= unit.n_rows || n >= out.n_out)
            continue;
        float gate = bias ? sum[i] + gate_bias : sum[i], up = bias ? sum[i + 2] + up_bias : sum[i + 2];
        ((__nv_bfloat16 *)out.y)[(size_t)(unit.first + rows8_x_row(i)) * out.y_stride + n] =
            round_to<__nv_bfloat16>(product(to_float(round_to<__nv_bfloat16>(gate)), to_float(round_to<__nv_bfloat16>(up))));
    }
}

/* The results of an item's columns, to be added up by rows8_combine. */
static __device__ __forceinline__ void rows8_go_down(rows8_reader &reader, const struct output &out,
                                                     const struct rows8_item &item, __nv_bfloat16 (*results)[DOWN_COLUMNS])
{
    const struct rows8_shape &s = reader.s;
    const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), slot = warp / DOWN_EIGHTS, eight = warp % DOWN_EIGHTS;
    const uint32_t column = eight * 8 + threadIdx.x % 32 / 4, n = item.tile * DOWN_COLUMNS + column;
    for (struct rows8_group group(item, reader.t->n_units); group.is_there(); group.next()) {
        if (slot >= group.n) {
            reader.pass(s.down.n_blocks, STAGE_BLOCKS);
            continue;
        }
        const struct streamed_unit unit = reader.t->units[group.unit + slot];
        const float bias = out.bias && n < out.n_out ? out.bias[(size_t)unit.expert * out.n_out + n] : 0;
        float sum[4] = {};
        rows8_sum<1>(reader, s.down, slot * s.down.unit_step + eight * PACKED_BYTES, DOWN_EIGHTS * PACKED_BYTES,
                     slot * s.down.slot_step + rows8_x_at(unit), sum);
#pragma unroll
        for (uint32_t i = 0; i < 2; i++)
            if (rows8_x_row(i) < unit.n_rows)
                results[unit.first + rows8_x_row(i)][column] = round_to<__nv_bfloat16>(out.bias ? sum[i] + bias : sum[i]);
    }
}

/* Computes the columns of an item: a thread has one column of a row and adds up the routes in their order. */
static __device__ __forceinline__ void rows8_combine(const struct mixture &m, const struct rows8_tables *t,
                                                     const struct output &y, uint32_t first,
                                                     const __nv_bfloat16 (*results)[DOWN_COLUMNS])
{
    static_assert(ROWS8_ROWS * DOWN_COLUMNS <= ROWS8_WARPS * 32, "a thread a result");
    const uint32_t row = threadIdx.x / DOWN_COLUMNS, n = threadIdx.x % DOWN_COLUMNS;
    if (row >= m.n_rows || first + n >= y.n_out)
        return;
    float sum = 0;
#pragma unroll 4
    for (uint32_t i = row * m.n_chosen; i < (row + 1) * m.n_chosen; i++)
        sum = fmaf(t->weights[i], to_float(results[t->places[i]][n]), sum);
    ((__nv_bfloat16 *)y.y)[(size_t)row * y.y_stride + first + n] = round_to<__nv_bfloat16>(sum);
}

static __device__ __forceinline__ void rows8_work(rows8_reader reader, const struct mixture &m,
                                                  const struct output &products, const struct output &y,
                                                  const expert_product &product, struct rows8_counts *counts)
{
    struct rows8_tables *t = reader.t;
    struct rows8_turns turns;
    for (uint32_t parity = 0;;) {
        const struct rows8_item item = rows8_item_of(reader.s, t->n_units, turns.take(t));
        if (item.is_end)
            return;
        if (item.is_up) {
            rows8_go_up(reader, products, product, item);
            meet(1, ROWS8_WARPS * 32);
            if (threadIdx.x == 0)
                count_released(&counts->products[item.unit]);
            continue;
        }
        __nv_bfloat16(*results)[DOWN_COLUMNS] = (__nv_bfloat16(*)[DOWN_COLUMNS])t->results[parity];
        rows8_go_down(reader, y, item, results);
        meet(1, ROWS8_WARPS * 32);
        rows8_combine(m, t, y, item.tile * DOWN_COLUMNS, results);
        parity ^= 1;
    }
}

/* products, y: where they go, with the biases of up and of down. */
static __global__ void __launch_bounds__(ROWS8_THREADS, 1)
experts_rows8_mxfp4(const __grid_constant__ struct rows8_maps maps, const __grid_constant__ struct rows8_shape s,
                    const __grid_constant__ struct mixture m, const __grid_constant__ struct rows8_rows x,
                    const __grid_constant__ struct output products, const __grid_constant__ struct output y,
                    const __grid_constant__ expert_product product, struct rows8_counts *counts)
{
    only_sm_90a();
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    struct rows8_tables *t = (struct rows8_tables *)(shared + s.n_stages * s.stage_bytes);
    const struct ring ring = {shared_address(shared), shared_address(t->full), shared_address(t->empty), s.n_stages,
                              s.stage_bytes};
    uint32_t index = 0;
    start_next();
    if (threadIdx.x < 2)
        map_prefetch(&maps.up + threadIdx.x);
    ring.make_barriers(2, ROWS8_WARPS);
    barriers_init(shared_address(t->there), ROWS8_ITEMS, 1);
    barriers_init(shared_address(t->taken), ROWS8_ITEMS, ROWS8_WARPS + 1);
    barriers_made();
    wait_for_input();
    if (warp == ROWS8_WARPS && lane == 0)
        index = atomicAdd(&counts->n_taken, 1);
    rows8_sort(m, t);
    if (warp < ROWS8_WARPS)
        rows8_work({s, t, ring, RING_READ}, m, products, y, product, counts);
    else if (warp > ROWS8_WARPS)
        rows8_load_x(s, x, {products.y, products.y_stride * 2}, ring, t, counts);
    else if (lane == 0)
        rows8_load_w(maps, s, ring, t, &counts->n_taken, index);
}

/* ---- the host's side ----------------------------------------------------------------------------------------------------- */

static inline void rows8_cut_way(struct rows8_way *way, uint32_t n_units, uint32_t n_eights, uint32_t n_rows)
{
    way->unit_bytes = STAGE_BLOCKS * n_eights * PACKED_BYTES;
    way->unit_step = ceil_div(way->unit_bytes, 128) * 128;
    way->slot_step = n_rows * X_STEP;
    way->x_bytes = ceil_div(n_units * way->slot_step, 128) * 128;
}

/* Fills in the ring; the bytes of shared memory. */
static inline uint32_t rows8_cut_memory(struct rows8_shape *s, uint32_t n_rows)
{
    const uint32_t room = SHARED_BYTES - ROWS8_SPARED - (uint32_t)sizeof(struct rows8_tables);
    rows8_cut_way(&s->up, 1, 2 * s->n_panels, n_rows);
    rows8_cut_way(&s->down, DOWN_UNITS, DOWN_EIGHTS, n_rows);
    s->stage_bytes = max(s->up.x_bytes + s->up.unit_step, s->down.x_bytes + DOWN_UNITS * s->down.unit_step);
    s->n_stages = min(room / s->stage_bytes, ROWS8_STAGES);
    return s->n_stages * s->stage_bytes + (uint32_t)sizeof(struct rows8_tables);
}

#endif
