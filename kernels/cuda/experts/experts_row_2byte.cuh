/* experts_row_2byte.cuh (row16_: one row, weights of 16 bits): the whole operation in one launch. The routes of a row name
 * different experts, so route u is unit u, and its product is row u of the down projection's input. Nothing is sorted, and the
 * first weights are fetched as soon as the routes have been read. Blocks take items in turn: first pairs of eight rows of gate
 * and eight of up, then some columns of y. An item of y has all units' weights of its columns, so it also adds up the routes.
 * An item waits only for items that were taken before it, so running blocks always finish, even if other work occupies the
 * device.
 *
 * Weights come in eights, 8 rows by 64 * ROW16_BLOCKS columns, through one ring, the way down's behind those of the way up. A
 * stage has up to 16 eights, as two operands of 64 rows for wgmma. On the way up x is the only used column. On the way down
 * the eights of all units lie beside each other and the units' products are the columns; each unit uses one column. Every
 * output is one accumulator over the k16 steps 0, 1, 2, ..., as in linear.cu.
 *
 * Bound by the bytes of the weights: 8 experts of 3 x 768 x 2048 take 17 us at the 4.5 TB/s that an H200 reads. A block's
 * stores and counts queue behind the weights that it fetches. So it fetches few at a time, and hardly any while the other
 * blocks wait for its last products. */
#ifndef LLMPY_CUDA_EXPERTS_ROW_2BYTE_CUH
#define LLMPY_CUDA_EXPERTS_ROW_2BYTE_CUH

#include "../core/launch.cuh"
#include "experts_rows8_mxfp4.cuh"

#define ROW16_UNITS 8u
#define ROW16_EIGHTS 16u /* of a stage, at most */
#define ROW16_BLOCKS 2u  /* of 64 columns, of a stage */
#define ROW16_EIGHT_BYTES (ROW16_BLOCKS * 1024u)
#define ROW16_AHEAD_BYTES (96u << 10)
#define ROW16_STAGES 16u     /* of the ring, at most */
#define ROW16_MAX_COLS 6144u /* of x and of products, which are in shared memory as a whole */
#define ROW16_WARPS 8u /* that multiply, in two groups */
#define ROW16_THREADS (ROW16_WARPS * 32 + 64)

/* In device memory, zero between launches. Launches alternate between two of them: a block takes its first item before its
 * input is complete, while the launch before may still count in the other one. The launch before that has ended, because the
 * launch before starts this one only when its own input is complete. */
struct row16_counts {
    uint32_t n_taken, n_there, n_ended; /* items taken; items whose products are written; warps that no longer take or wait */
};

struct row16_shape {
    uint32_t inner, n_out;           /* rows of gate, and of down, of an expert */
    uint32_t up_blocks, down_blocks; /* of 64 columns */
    uint32_t n_up, n_down;           /* items */
    uint32_t up_pairs, down_eights;  /* of an item: eights of gate and of up; eights of y's columns */
    uint32_t unit_bits;              /* log2 of the eights from one of an item's columns of y to the next, a unit each */
    uint32_t stage_bytes, n_stages;  /* of the ring */
    uint32_t n_ahead;                /* stages in flight, at most */
    uint32_t tables_at;              /* in shared memory */
};

struct row16_maps {
    CUtensorMap up, down, x, products;
};

struct row16_tables {
    uint64_t full[ROW16_STAGES], empty[ROW16_STAGES];                  /* barriers */
    uint64_t x_there, is_up_done;                                  /* x, then the products; the block's items of the way up */
    uint32_t items[ROW16_STAGES];                                    /* of stages that are an item's first */
    float results[2][ROW16_EIGHTS][8];                               /* of an item's eights; items alternate between the two */
};

/* ---- the warps that fetch ------------------------------------------------------------------------------------------------ */

/* The last warp to come here sets all counts back: no warp takes an item or waits for products any more. */
static __device__ __forceinline__ void row16_end(struct row16_counts *counts)
{
    if (atomicAdd(&counts->n_ended, 1) + 1 == 2 * gridDim.x)
        counts->n_taken = counts->n_there = counts->n_ended = 0;
}

/* An item's weights. Of the lane's eight, if it has one: its unit, its first row in the first expert, rows to the next
 * expert. */
struct row16_source {
    const CUtensorMap *map;
    uint32_t index, n_eights, n_blocks, unit, row, step;
    bool has_eight;
};

static __device__ __forceinline__ struct row16_source row16_find(const struct row16_maps &maps, const struct row16_shape &s,
                                                                 uint32_t n_units, uint32_t index)
{
    const uint32_t lane = threadIdx.x % 32;
    struct row16_source from;
    from.index = index;
    if (index < s.n_up) {
        const uint32_t pairs_each = s.inner / 8, first = index * s.up_pairs, pair = first + lane / 2;
        from.map = &maps.up;
        from.n_eights = 2 * min(s.up_pairs, n_units * pairs_each - first);
        from.n_blocks = s.up_blocks;
        from.unit = min(pair / pairs_each, ROW16_UNITS);
        from.row = lane % 2 * s.inner + pair % pairs_each * 8;
        from.step = 2 * s.inner;
        from.has_eight = lane < from.n_eights;
        return from;
    }
    const uint32_t eight = lane >> s.unit_bits;
    from.map = &maps.down;
    from.n_eights = n_units * s.down_eights;
    from.n_blocks = s.down_blocks;
    from.unit = lane & ((1u << s.unit_bits) - 1);
    from.row = ((index - s.n_up) * s.down_eights + eight) * 8;
    from.step = s.n_out;
    from.has_eight = from.unit < n_units && eight < s.down_eights;
    return from;
}

/* A warp: a lane asks for its eight of every stage. */
static __device__ __forceinline__ void row16_load_w(const struct row16_maps &maps, const struct row16_shape &s,
                                                    const struct mixture &m, const struct ring &ring, struct row16_tables *t,
                                                    struct row16_counts *counts)
{
    const uint64_t policy = policy_read_once();
    const uint32_t lane = threadIdx.x % 32;
    struct ring_place at = RING_FETCH;
    struct ring_pace pace = {};
    uint32_t next = lane ? 0 : atomicAdd(&counts->n_taken, 1);
    const uint32_t own = expert_soon(m, min(lane, m.n_chosen - 1));
    struct row16_source from = row16_find(maps, s, m.n_chosen, __shfl_sync(~0u, next, 0));
    while (from.index < s.n_up + s.n_down) {
        const uint32_t row = __shfl_sync(~0u, own, from.unit) * from.step + from.row;
        for (uint32_t block = 0; block < from.n_blocks; block += ROW16_BLOCKS, ring.next(at)) {
            ring.wait_empty(at);
            if (from.index >= s.n_up && block)
                barrier_wait(shared_address(&t->is_up_done), 0);
            pace.hold(ring, s.n_ahead);
            if (lane == 0) {
                t->items[at.stage] = from.index;
                barrier_expect(ring.full_of(at), from.n_eights * ROW16_EIGHT_BYTES);
            }
            if (from.has_eight)
                copy_box(ring.data_of(at) + lane * ROW16_EIGHT_BYTES, from.map, row, block, ring.full_of(at), policy);
            /* Half-way: early enough for the number to arrive in time, late enough for all blocks to have taken their first
             * item. */
            if (lane == 0 && block == from.n_blocks / 2 / ROW16_BLOCKS * ROW16_BLOCKS)
                next = atomicAdd(&counts->n_taken, 1);
        }
        from = row16_find(maps, s, m.n_chosen, __shfl_sync(~0u, next, 0));
    }
    wait_for_input();
    if (lane)
        return;
    ring_end(ring, t->items, at, from.index);
    row16_end(counts);
}

/* A thread: x, then in its place the products. */
static __device__ __forceinline__ void row16_load_x(const struct row16_maps &maps, const struct row16_shape &s, uint32_t target,
                                                    struct row16_tables *t, struct row16_counts *counts)
{
    const uint32_t there = shared_address(&t->x_there);
    wait_for_input();
    start_next();
    barrier_expect(there, s.up_blocks * 1024);
    copy_box(target, &maps.x, 0, 0, there);
    barrier_wait(shared_address(&t->is_up_done), 0);
    rows8_wait(&counts->n_there, s.n_up);
    barrier_expect(there, s.down_blocks * 1024);
    copy_box(target, &maps.products, 0, 0, there);
    row16_end(counts);
}

/* ---- the warps that multiply --------------------------------------------------------------------------------------------- */

/* The sums of an item; offset, x: where the group's operand of a stage, and the rows of x, are in shared memory. */
template <class T>
static __device__ __forceinline__ void row16_sum(const struct ring (&rings)[1], uint32_t offset, uint32_t x, uint32_t n_blocks,
                                                 struct ring_place &at, float (&sum)[4])
{
    skinny_sum<ROW16_BLOCKS>(rings, n_blocks, at, sum, [&](uint32_t block, auto half_way) {
        skinny_multiply<T, 1, ROW16_BLOCKS>(sum, wgmma_rows(rings[0].data_of(at) + offset, ROW16_EIGHT_BYTES),
                                            wgmma_rows(x + block * 1024), 8, min(ROW16_BLOCKS, n_blocks - block), half_way);
    });
}

/* Of an item's way up a warp has a pair, the first of every four lanes its column. */
template <class T> struct row16_product {
    T *to; /* NULL: not this thread's */
    float gate_bias, up_bias;
    __device__ __forceinline__ row16_product(const struct row16_shape &s, const struct output &out, uint32_t n_units,
                                             uint32_t own, uint32_t index)
    {
        const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, pairs_each = s.inner / 8;
        const uint32_t pair = index * s.up_pairs + warp, unit = pair / pairs_each, n = pair % pairs_each * 8 + lane / 4;
        const uint32_t expert = __shfl_sync(~0u, own, min(unit, ROW16_UNITS));
        const bool is_mine = warp < s.up_pairs && unit < n_units && lane % 4 == 0;
        to = is_mine ? (T *)out.y + (size_t)unit * out.y_stride + n : NULL;
        if (is_mine && out.bias) {
            gate_bias = out.bias[(size_t)expert * 2 * s.inner + n];
            up_bias = out.bias[((size_t)expert * 2 + 1) * s.inner + n];
        }
    }
    __device__ __forceinline__ void store(bool has_bias, const expert_product &product, const float (&sum)[4]) const
    {
        if (!to)
            return;
        float gate = has_bias ? sum[0] + gate_bias : sum[0], up = has_bias ? sum[2] + up_bias : sum[2];
        *to = round_to<T>(product(to_float(round_to<T>(gate)), to_float(round_to<T>(up))));
    }
};

/* On the way down a warp has two eights, each of a unit that uses one column. Then each thread has one column of y and adds up
 * the routes in their order. */
template <class T> struct row16_total {
    T *to; /* NULL: not this thread's */
    float bias[ROW16_UNITS];
    __device__ __forceinline__ row16_total(const struct row16_shape &s, const struct output &y, uint32_t n_units, uint32_t own,
                                           uint32_t index)
    {
        const uint32_t n = (index - s.n_up) * s.down_eights * 8 + threadIdx.x;
        const bool is_mine = threadIdx.x < s.down_eights * 8 && n < s.n_out;
        to = is_mine ? (T *)y.y + n : NULL;
#pragma unroll
        for (uint32_t i = 0; i < ROW16_UNITS; i++) {
            const uint32_t expert = __shfl_sync(~0u, own, i);
            if (is_mine && y.bias && i < n_units)
                bias[i] = y.bias[(size_t)expert * s.n_out + n];
        }
    }
    __device__ __forceinline__ void store(const struct row16_shape &s, bool has_bias, uint32_t n_units,
                                          const float (&weights)[ROW16_UNITS], float (*results)[8], const float (&sum)[4]) const
    {
        const uint32_t lane = threadIdx.x % 32, column = threadIdx.x;
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            const uint32_t eight = threadIdx.x / 32 * 2 + i, unit = eight & ((1u << s.unit_bits) - 1);
            if (lane % 4 == unit / 2)
                results[eight][lane / 4] = unit % 2 ? sum[2 * i + 1] : sum[2 * i];
        }
        meet(1, ROW16_WARPS * 32);
        if (!to)
            return;
        float values[ROW16_UNITS], total = 0;
#pragma unroll
        for (uint32_t i = 0; i < ROW16_UNITS; i++)
            if (i < n_units)
                values[i] = results[(column / 8 << s.unit_bits) + i][column % 8];
#pragma unroll
        for (uint32_t i = 0; i < ROW16_UNITS; i++)
            if (i < n_units)
                total = fmaf(weights[i], to_float(round_to<T>(has_bias ? values[i] + bias[i] : values[i])), total);
        *to = round_to<T>(total);
    }
};

template <class T>
static __device__ __forceinline__ void row16_work(const struct row16_shape &s, const struct mixture &m,
                                                  const struct output &products, const struct output &y,
                                                  const expert_product &product, const struct ring (&rings)[1], uint32_t offset,
                                                  uint32_t x, struct row16_tables *t, struct row16_counts *counts)
{
    const uint32_t lane = threadIdx.x % 32;
    struct ring_place at = RING_READ;
    wait_for_input();
    const uint32_t own = lane < m.n_chosen ? (uint32_t)__ldcg(&route_at(m, lane)->expert) : 0;
    const float weight = lane < m.n_chosen ? __ldcg(&route_at(m, lane)->weight) : 0;
    float weights[ROW16_UNITS];
#pragma unroll
    for (uint32_t i = 0; i < ROW16_UNITS; i++)
        weights[i] = __shfl_sync(~0u, weight, i);
    barrier_wait(shared_address(&t->x_there), 0);
    uint32_t index;
    while ((index = ring_item(rings[0], t->items, at)) < s.n_up) {
        const struct row16_product<T> wanted(s, products, m.n_chosen, own, index);
        float sum[4] = {};
        row16_sum<T>(rings, offset, x, s.up_blocks, at, sum);
        wanted.store(products.bias, product, sum);
        meet(1, ROW16_WARPS * 32);
        if (threadIdx.x == 0)
            count_released(&counts->n_there);
    }
    if (lane == 0)
        barrier_arrive(shared_address(&t->is_up_done));
    barrier_wait(shared_address(&t->x_there), 1);
    for (uint32_t parity = 0; index < s.n_up + s.n_down; parity ^= 1, index = ring_item(rings[0], t->items, at)) {
        const struct row16_total<T> wanted(s, y, m.n_chosen, own, index);
        float sum[4] = {};
        row16_sum<T>(rings, offset, x, s.down_blocks, at, sum);
        wanted.store(s, y.bias, m.n_chosen, weights, t->results[parity], sum);
    }
}

/* products, y: where they go, with the biases of up and of down. */
template <class T>
static __global__ void __launch_bounds__(ROW16_THREADS, 1)
    experts_row_2byte(const __grid_constant__ struct row16_maps maps, const __grid_constant__ struct row16_shape s,
                      const __grid_constant__ struct mixture m, const __grid_constant__ struct output products,
                      const __grid_constant__ struct output y, const __grid_constant__ expert_product product,
                      struct row16_counts *counts)
{
    only_sm_90a();
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const uint32_t data = shared_address(shared), x = data + s.n_stages * s.stage_bytes;
    struct row16_tables *t = (struct row16_tables *)(shared + s.tables_at);
    const struct ring rings[] = {{data, shared_address(t->full), shared_address(t->empty), s.n_stages, s.stage_bytes}};
    if (threadIdx.x < 4)
        map_prefetch(&maps.up + threadIdx.x);
    rings[0].make_barriers(1, ROW16_WARPS);
    if (threadIdx.x == 32) {
        barrier_init(shared_address(&t->x_there), 1);
        barrier_init(shared_address(&t->is_up_done), ROW16_WARPS);
    }
    barriers_made();
    __syncthreads();
    if (warp < ROW16_WARPS)
        row16_work<T>(s, m, products, y, product, rings, warp / 4 * 8 * ROW16_EIGHT_BYTES, x, t, counts);
    else if (warp == ROW16_WARPS)
        row16_load_w(maps, s, m, rings[0], t, counts);
    else if (lane == 0)
        row16_load_x(maps, s, x, t, counts);
}

/* ---- the host's side ----------------------------------------------------------------------------------------------------- */

/* Cuts the operation into items, and the shared memory of a block. */
static inline struct row16_shape row16_cut(uint32_t n_units, uint32_t inner, uint32_t n_cols, uint32_t n_out,
                                           uint32_t n_processors)
{
    struct row16_shape s = {};
    const uint32_t n_pairs = n_units * (inner / 8);
    s.inner = inner;
    s.n_out = n_out;
    s.up_blocks = n_cols / 64;
    s.down_blocks = inner / 64;
    while (1u << s.unit_bits < n_units)
        s.unit_bits++;
    s.up_pairs = streamed_tile_rows(n_pairs * 16, 1, 16, ROW16_EIGHTS * 8, n_processors) / 16;
    s.down_eights = streamed_tile_rows(n_out, 1, 8, ROW16_EIGHTS * 8 >> s.unit_bits, n_processors) / 8;
    s.n_up = ceil_div(n_pairs, s.up_pairs);
    s.n_down = ceil_div(n_out, 8 * s.down_eights);
    const uint32_t n_eights = max(2 * s.up_pairs, s.down_eights << s.unit_bits);
    /* The product of the last stage may read beyond it. */
    const uint32_t x_bytes = max(max(s.up_blocks, s.down_blocks) * 1024, (ROW16_EIGHTS - n_eights) * ROW16_EIGHT_BYTES);
    s.stage_bytes = n_eights * ROW16_EIGHT_BYTES;
    s.n_stages = min((SHARED_BYTES - (uint32_t)sizeof(struct row16_tables) - x_bytes) / s.stage_bytes, ROW16_STAGES);
    s.n_ahead = min(ceil_div(ROW16_AHEAD_BYTES, s.stage_bytes), s.n_stages);
    s.tables_at = s.n_stages * s.stage_bytes + x_bytes;
    return s;
}

#endif
