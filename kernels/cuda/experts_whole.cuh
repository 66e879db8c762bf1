/* experts_whole.cuh: the whole operation on up to 8 rows and packed weights in one launch, so that the weights of the way down
 * are on their way while the products of the way up are made. Blocks take items in turn: tiles of gate and up of every unit (an
 * expert that is wanted, with its rows), then columns of y, each with all units' weights of it, so that the routes are added up
 * where their results are made. Weights wait for nothing but the routes; a unit's products are fetched when all of its tiles
 * are there. An item waits only for items that were taken before it, so a block that runs always gets on, whoever else is on
 * the device.
 *
 * Of a tile every warp has a panel: 16 rows of W by 64 columns at a time, one mma.sync m16n8k16 for 16 columns and all rows of
 * x, none of which is gathered: a unit's warps multiply all of them up, and keep the columns of its routes. One chain over the
 * k16 steps 0, 1, 2, ..., as in linear.cu. W is MXFP4 as packed.cuh has it, x bfloat16. Bound by the bytes of the wanted
 * weights: 4 experts of 3 x 2880 x 2880 take 12 us at the 4.5 TB/s that an H200 reads. */
#ifndef LLMPY_CUDA_EXPERTS_WHOLE_CUH
#define LLMPY_CUDA_EXPERTS_WHOLE_CUH

#include "experts_few.cuh"
#include "mma.cuh"
#include "packed.cuh"

#define WHOLE_ROWS FEW_ROWS
#define WHOLE_ROUTES FEW_ROUTES
#define WHOLE_BLOCKS 4u /* of 64 columns, of a stage */
#define WHOLE_WARPS 12u /* that multiply */
#define WHOLE_THREADS (WHOLE_WARPS * 32 + 64)
#define WHOLE_ITEMS 4u      /* taken and not yet worked off by a block */
#define WHOLE_STAGES 16u    /* of a ring, at most */
#define WHOLE_SPARED 8192u  /* bytes of shared memory that the next kernel's first block may have beside this one's */
#define PANEL_ROWS 16u

/* In device memory, zero between launches. */
struct whole_counts {
    uint32_t n_taken, n_ended;       /* items, blocks */
    uint32_t products[WHOLE_ROUTES]; /* tiles of a unit that are there */
};

struct whole_way {
    uint32_t n_blocks; /* of 64 columns */
    uint32_t n_panels; /* beside each other in a stage: of a tile up, of units down */
    uint32_t n_tiles;  /* of one expert */
    uint32_t step, tile_step; /* from one expert, and from one tile, to the next in the map */
};

struct whole_shape {
    struct whole_way up, down;
    uint32_t n_stages, w_bytes, x_bytes; /* of the rings; of a stage */
};

struct whole_maps {
    CUtensorMap up, down, x, products;
};

struct whole_tables {
    uint64_t full[WHOLE_STAGES], empty[WHOLE_STAGES], there[WHOLE_ITEMS], taken[WHOLE_ITEMS]; /* barriers */
    uint32_t n_units, items[WHOLE_ITEMS];
    struct few_unit units[WHOLE_ROUTES];
    float weights[WHOLE_ROUTES]; /* of routes */
    uint16_t experts[WHOLE_ROUTES];
    uint8_t is_first[WHOLE_ROUTES]; /* of its expert */
    uint8_t route_places[WHOLE_ROUTES];
    int8_t places[WHOLE_ROUTES][WHOLE_ROWS];          /* of unit u and row r; below 0: there is no such route */
    uint16_t results[2][WHOLE_ROUTES][PANEL_ROWS];    /* of the columns of an item, by turns */
};

/* All threads, of which each has at most one route. */
static __device__ void whole_sort(const struct mixture &m, struct whole_tables *t)
{
    const uint32_t n = m.n_routes, i = threadIdx.x;
    uint32_t own = EXPERTS_MAX, rank = 0, before = 0, n_own = 0, unit = 0;
    for (uint32_t at = i; at < n * WHOLE_ROWS / 4; at += WHOLE_THREADS)
        ((uint32_t *)t->places)[at] = ~0u;
    if (i < n) {
        const struct route *route = route_at(m, i);
        own = (uint32_t)__ldcg(&route->expert);
        t->weights[i] = __ldcg(&route->weight);
        t->experts[i] = (uint16_t)own;
    }
    __syncthreads();
    if (i < n) {
        for (uint32_t j = 0; j < n; j++) {
            rank += j < i && t->experts[j] == own;
            before += t->experts[j] < own;
            n_own += t->experts[j] == own;
        }
        t->is_first[i] = rank == 0;
    }
    const uint32_t n_units = (uint32_t)__syncthreads_count(i < n && rank == 0);
    if (i < n) {
        for (uint32_t j = 0; j < n; j++)
            unit += t->is_first[j] && t->experts[j] < own;
        t->places[unit][i / m.n_chosen] = (int8_t)(before + rank);
        t->route_places[i] = (uint8_t)(before + rank);
        if (rank == 0)
            t->units[unit] = {(uint16_t)own, (uint16_t)n_own, before};
    }
    if (i == 0)
        t->n_units = n_units;
    __syncthreads();
}

/* ---- items and rings ----------------------------------------------------------------------------------------------------- */

struct whole_item {
    bool is_up, is_end;
    uint32_t unit, tile; /* a unit of the way up */
};

static __device__ __forceinline__ struct whole_item whole_item_of(const struct whole_shape &s, uint32_t n_units, uint32_t index)
{
    const uint32_t n_up = n_units * s.up.n_tiles;
    if (index < n_up)
        return {true, false, index / s.up.n_tiles, index % s.up.n_tiles};
    return {false, index - n_up >= s.down.n_tiles, 0, index - n_up};
}

/* Items on their way to those that work on them. */
struct whole_turns {
    uint32_t turn = 0;
    __device__ __forceinline__ void put(struct whole_tables *t, uint32_t index)
    {
        barrier_wait(shared_address(&t->taken[turn % WHOLE_ITEMS]), (turn / WHOLE_ITEMS & 1) ^ 1);
        t->items[turn % WHOLE_ITEMS] = index;
        barrier_arrive(shared_address(&t->there[turn++ % WHOLE_ITEMS]));
    }
    __device__ __forceinline__ uint32_t take(const struct whole_tables *t)
    {
        barrier_wait(shared_address(&t->there[turn % WHOLE_ITEMS]), turn / WHOLE_ITEMS & 1);
        uint32_t index = *(volatile const uint32_t *)&t->items[turn % WHOLE_ITEMS];
        barrier_arrive(shared_address(&t->taken[turn++ % WHOLE_ITEMS]));
        return index;
    }
};

static __device__ __forceinline__ void whole_load_w(const struct whole_maps &maps, const struct whole_shape &s, uint32_t ring,
                                                    struct whole_tables *t, uint32_t *n_taken, uint32_t index)
{
    const uint64_t policy = policy_read_once();
    const uint32_t box = WHOLE_BLOCKS * packed_panel::bytes;
    struct whole_turns turns;
    struct skinny_place at = {0, 1}; /* 1: the first round finds every stage empty */
    for (;;) {
        const struct whole_item item = whole_item_of(s, t->n_units, index);
        turns.put(t, index);
        if (item.is_end)
            return;
        index = atomicAdd(n_taken, 1); /* on its way while this item's weights are asked for */
        const struct whole_way &way = item.is_up ? s.up : s.down;
        const uint32_t end = item.is_up ? item.unit + 1 : t->n_units, step = item.is_up ? 1 : way.n_panels;
        for (uint32_t unit = item.unit; unit < end; unit += step) {
            const uint32_t n = item.is_up ? 1 : min(step, end - unit);
            for (uint32_t block = 0; block < way.n_blocks; block += WHOLE_BLOCKS, skinny_next(&at, s.n_stages)) {
                const uint32_t target = ring + at.stage * s.w_bytes, full = shared_address(&t->full[at.stage]);
                barrier_wait(shared_address(&t->empty[at.stage]), at.phase);
                barrier_expect(full, (item.is_up ? way.n_panels : n) * box);
                for (uint32_t i = 0; i < n; i++) {
                    const uint32_t from = t->units[unit + i].expert * way.step + item.tile * way.tile_step;
                    if (item.is_up)
                        copy_pairs(target, &maps.up, from, block, full, policy);
                    else
                        copy_box(target + i * box, &maps.down, from, block, full, policy);
                }
            }
        }
    }
}

/* Until n have been counted; what was written before is seen, by the copy engine too. */
static __device__ __forceinline__ void whole_wait(const uint32_t *count, uint32_t n)
{
    uint32_t have;
    do
        asm volatile("ld.acquire.gpu.global.u32 %0,[%1];" : "=r"(have) : "l"(count) : "memory");
    while (have != n);
    asm volatile("fence.proxy.async;" ::: "memory");
}

static __device__ __forceinline__ void whole_load_x(const struct whole_maps &maps, const struct whole_shape &s, uint32_t ring,
                                                    uint32_t n_rows, struct whole_tables *t, struct whole_counts *counts)
{
    const uint32_t box = WHOLE_BLOCKS * n_rows * 128;
    struct whole_turns turns;
    struct skinny_place at = {0, 1};
    for (;;) {
        const struct whole_item item = whole_item_of(s, t->n_units, turns.take(t));
        if (item.is_end)
            break;
        const struct whole_way &way = item.is_up ? s.up : s.down;
        const uint32_t end = item.is_up ? 1 : t->n_units, step = item.is_up ? 1 : way.n_panels;
        for (uint32_t unit = 0; unit < end; unit += step) {
            const uint32_t n = min(step, end - unit);
            for (uint32_t i = 0; i < n && !item.is_up; i++)
                whole_wait(&counts->products[unit + i], s.up.n_tiles);
            for (uint32_t block = 0; block < way.n_blocks; block += WHOLE_BLOCKS, skinny_next(&at, s.n_stages)) {
                const uint32_t full = shared_address(&t->full[at.stage]);
                barrier_wait(shared_address(&t->empty[at.stage]), at.phase);
                barrier_expect(full, n * box);
                for (uint32_t i = 0; i < n; i++)
                    copy_box(ring + at.stage * s.x_bytes + i * box, item.is_up ? &maps.x : &maps.products,
                             item.is_up ? 0 : t->units[unit + i].first, block, full);
            }
        }
    }
    /* All products have been waited for when the last block comes here. */
    if (atomicAdd(&counts->n_ended, 1) + 1 < gridDim.x)
        return;
    for (uint32_t unit = 0; unit < t->n_units; unit++)
        counts->products[unit] = 0;
    counts->n_taken = counts->n_ended = 0;
}

/* ---- those that multiply ------------------------------------------------------------------------------------------------- */

/* What a warp reads, and how far it has come. */
struct whole_worker {
    uint32_t w_ring, x_ring, n_rows;
    struct skinny_place at;
};

/* The sums of the panel that lies `panel` bytes into each stage's W and has the rows `x` bytes into its x; another of a block
 * of 64 columns lies the steps further on. */
static __device__ __forceinline__ void whole_sum(struct whole_worker &w, const struct whole_shape &s, struct whole_tables *t,
                                                 uint32_t n_blocks, bool is_mine, uint32_t panel, uint32_t panel_step,
                                                 uint32_t x, float (&sum)[4])
{
    const uint32_t row = min(threadIdx.x % 32 / 4, w.n_rows - 1) * 128 + threadIdx.x % 4 * 4;
    for (uint32_t block = 0; block < n_blocks; block += WHOLE_BLOCKS, skinny_next(&w.at, s.n_stages)) {
        barrier_wait(shared_address(&t->full[w.at.stage]), w.at.phase);
        const uint32_t w_at = w.w_ring + w.at.stage * s.w_bytes + panel, x_at = w.x_ring + w.at.stage * s.x_bytes + x + row;
        const uint32_t n = is_mine ? min(WHOLE_BLOCKS, n_blocks - block) : 0;
#pragma unroll
        for (uint32_t i = 0; i < WHOLE_BLOCKS; i++) {
            if (i >= n)
                break;
            uint32_t a[4][4], b[4][2];
            packed_panel::load(w_at + i * panel_step, a);
#pragma unroll
            for (uint32_t k = 0; k < 8; k++)
                b[k / 2][k % 2] = load_shared_word(x_at + i * w.n_rows * 128 + k * 16);
#pragma unroll
            for (uint32_t k = 0; k < 4; k++)
                mma(sum, a[k], b[k], __nv_bfloat16());
        }
        barrier_arrive(shared_address(&t->empty[w.at.stage]));
    }
}

static __device__ __forceinline__ void whole_meet(void)
{
    asm volatile("bar.sync 1,%0;" ::"n"(WHOLE_WARPS * 32) : "memory");
}

/* Sum i of a thread is that of this row of x and this row of the panel. */
static __device__ __forceinline__ uint32_t whole_x_row(uint32_t i)
{
    return threadIdx.x % 4 * 2 + i % 2;
}

static __device__ __forceinline__ void whole_store_products(const struct output &out, const expert_product &product,
                                                            const struct whole_tables *t, const struct whole_item &item,
                                                            uint32_t n_panels, const float (&sum)[4])
{
    const uint32_t n = (item.tile * n_panels + threadIdx.x / 32) * (PANEL_ROWS / 2) + threadIdx.x % 32 / 4;
    if (n >= out.n_out || threadIdx.x / 32 >= n_panels)
        return;
    const float *bias = out.bias ? out.bias + (size_t)t->units[item.unit].expert * 2 * out.n_out + n : NULL;
    float gate_bias = bias ? bias[0] : 0, up_bias = bias ? bias[out.n_out] : 0;
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
        const int8_t place = t->places[item.unit][whole_x_row(i)];
        if (place < 0)
            continue;
        float gate = bias ? sum[i] + gate_bias : sum[i], up = bias ? sum[i + 2] + up_bias : sum[i + 2];
        ((__nv_bfloat16 *)out.y)[(size_t)place * out.y_stride + n] =
            round_to<__nv_bfloat16>(product(to_float(round_to<__nv_bfloat16>(gate)), to_float(round_to<__nv_bfloat16>(up))));
    }
}

/* The results of a unit's rows, for those who add them up. */
static __device__ __forceinline__ void whole_keep_results(const struct output &out, const struct few_unit &unit, uint32_t first,
                                                          __nv_bfloat16 (*results)[PANEL_ROWS], const float (&sum)[4])
{
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t r = whole_x_row(i), n = threadIdx.x % 32 / 4 + i / 2 * 8;
        if (r >= unit.n_rows || first + n >= out.n_out)
            continue;
        float value = out.bias ? sum[i] + out.bias[(size_t)unit.expert * out.n_out + first + n] : sum[i];
        results[unit.first + r][n] = round_to<__nv_bfloat16>(value);
    }
}

/* The columns of an item: a thread has one of a row, and adds up the routes in their order. */
static __device__ __forceinline__ void whole_combine(const struct mixture &m, const struct whole_tables *t,
                                                     const struct output &y, uint32_t first,
                                                     const __nv_bfloat16 (*results)[PANEL_ROWS])
{
    const uint32_t row = threadIdx.x / PANEL_ROWS, n = threadIdx.x % PANEL_ROWS;
    if (row >= m.n_rows || first + n >= y.n_out)
        return;
    float sum = 0;
    for (uint32_t i = row * m.n_chosen; i < (row + 1) * m.n_chosen; i++)
        sum = fmaf(t->weights[i], to_float(results[t->route_places[i]][n]), sum);
    ((__nv_bfloat16 *)y.y)[(size_t)row * y.y_stride + first + n] = round_to<__nv_bfloat16>(sum);
}

static __device__ __forceinline__ void whole_work(const struct whole_shape &s, const struct mixture &m,
                                                  const struct output &products, const struct output &y,
                                                  const expert_product &product, struct whole_counts *counts,
                                                  struct whole_tables *t, struct whole_worker w)
{
    const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), box = WHOLE_BLOCKS * packed_panel::bytes;
    struct whole_turns turns;
    for (uint32_t parity = 0;;) {
        const struct whole_item item = whole_item_of(s, t->n_units, turns.take(t));
        if (item.is_end)
            return;
        if (item.is_up) {
            float sum[4] = {};
            whole_sum(w, s, t, s.up.n_blocks, warp < s.up.n_panels, warp * packed_panel::bytes,
                      s.up.n_panels * packed_panel::bytes, 0, sum);
            whole_store_products(products, product, t, item, s.up.n_panels, sum);
            whole_meet();
            if (threadIdx.x == 0) {
                __threadfence();
                atomicAdd(&counts->products[item.unit], 1);
            }
            continue;
        }
        __nv_bfloat16(*results)[PANEL_ROWS] = (__nv_bfloat16(*)[PANEL_ROWS])t->results[parity];
        for (uint32_t unit = warp; unit - warp < t->n_units; unit += s.down.n_panels) {
            const bool is_mine = warp < s.down.n_panels && unit < t->n_units;
            float sum[4] = {};
            whole_sum(w, s, t, s.down.n_blocks, is_mine, warp * box, packed_panel::bytes,
                                warp * WHOLE_BLOCKS * w.n_rows * 128, sum);
            if (is_mine)
                whole_keep_results(y, t->units[unit], item.tile * PANEL_ROWS, results, sum);
        }
        whole_meet();
        whole_combine(m, t, y, item.tile * PANEL_ROWS, results);
        parity ^= 1;
    }
}

/* products, y: where they go, with the biases of up and of down. */
static __global__ void __launch_bounds__(WHOLE_THREADS, 1)
mix_packed(const __grid_constant__ struct whole_maps maps, const __grid_constant__ struct whole_shape s,
         const __grid_constant__ struct mixture m, const __grid_constant__ struct output products,
         const __grid_constant__ struct output y, const __grid_constant__ expert_product product, struct whole_counts *counts)
{
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const uint32_t w_ring = shared_address(shared), x_ring = w_ring + s.n_stages * s.w_bytes;
    struct whole_tables *t = (struct whole_tables *)(shared + s.n_stages * (s.w_bytes + s.x_bytes));
    uint32_t index = 0;
    start_next();
    if (threadIdx.x < 4)
        map_prefetch(&maps.up + threadIdx.x);
    if (threadIdx.x < s.n_stages) {
        barrier_init(shared_address(&t->full[threadIdx.x]), 2);
        barrier_init(shared_address(&t->empty[threadIdx.x]), WHOLE_WARPS * 32);
    }
    if (threadIdx.x < WHOLE_ITEMS) {
        barrier_init(shared_address(&t->there[threadIdx.x]), 1);
        barrier_init(shared_address(&t->taken[threadIdx.x]), WHOLE_WARPS * 32 + 1);
    }
    barriers_made();
    wait_for_input();
    if (warp == WHOLE_WARPS && lane == 0)
        index = atomicAdd(&counts->n_taken, 1);
    whole_sort(m, t);
    if (warp < WHOLE_WARPS)
        whole_work(s, m, products, y, product, counts, t, {w_ring, x_ring, m.n_rows, {0, 0}});
    else if (warp == WHOLE_WARPS && lane == 0)
        whole_load_w(maps, s, w_ring, t, &counts->n_taken, index);
    else if (lane == 0)
        whole_load_x(maps, s, x_ring, m.n_rows, t, counts);
}

/* ---- the host's side ----------------------------------------------------------------------------------------------------- */

/* Fills in the rings; the bytes of shared memory. */
static inline uint32_t whole_cut_memory(struct whole_shape *s, uint32_t n_rows)
{
    const uint32_t room = SHARED_BYTES - WHOLE_SPARED - (uint32_t)sizeof(struct whole_tables);
    s->w_bytes = max(s->up.n_panels, s->down.n_panels) * WHOLE_BLOCKS * packed_panel::bytes;
    s->x_bytes = s->down.n_panels * WHOLE_BLOCKS * n_rows * 128;
    s->n_stages = min(room / (s->w_bytes + s->x_bytes), WHOLE_STAGES);
    return s->n_stages * (s->w_bytes + s->x_bytes) + (uint32_t)sizeof(struct whole_tables);
}

#endif
