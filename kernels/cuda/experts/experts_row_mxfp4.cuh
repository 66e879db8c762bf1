/* experts_row_mxfp4.cuh (row4_: one row, weights of 4 bits): the whole operation in one launch. The routes of a row name
 * different experts, so route u is unit u. Blocks take items in turn: first pairs of eight rows of gate and eight of up of a
 * unit, then some columns of y. An item of y has all units' weights of its columns, so it also adds up the routes. An item
 * waits only for items that were taken before it, so running blocks always finish, even if other work occupies the device.
 *
 * Weights come in runs of eights through one ring, the way down's behind those of the way up. W is the operand of 16 rows of
 * mma.sync m16n8k16: one chain over the k16 steps 0, 1, 2, ..., as in linear.cu. On the way up a warp has a pair. On the way
 * down two warps have a panel of two eights. They take the panel's chunks of columns in turn and pass the sums to each other,
 * so one warp unpacks while the other multiplies. The eights of a panel may belong to two units: then one unit has the even
 * columns of x and the other the odd columns.
 *
 * Products are stored in pairs with the launch's mark beside them, eight bytes at a time: a block that reads the mark has read
 * the products. No counter and no fence is needed. Blocks unpack their first chunks of the way down before they look for the
 * mark.
 *
 * Bound by the bytes of the chosen experts' weights: 4 experts of 3 x 2880 x 2880 take 12 us at the 4.5 TB/s that an H200
 * reads; for now by what the warps issue, unpacking and mma.sync. */
#ifndef LLMPY_CUDA_EXPERTS_ROW_MXFP4_CUH
#define LLMPY_CUDA_EXPERTS_ROW_MXFP4_CUH

#include "../core/launch.cuh"
#include "experts_rows8_mxfp4.cuh"

#define ROW4_UNITS 4u
#define ROW4_MAX_COLS 6144u /* of x and of products, which are in shared memory as a whole */
#define ROW4_CHUNK 5u       /* blocks of 64 columns: gpt-oss has 45 */
#define ROW4_WARPS 12u      /* that multiply */
#define ROW4_LOADER (ROW4_WARPS + 3) /* the warp that loads, of the scheduler on which gpt-oss leaves one without a pair */
#define ROW4_THREADS (ROW4_WARPS * 32 + 128) /* in warpgroups, for setmaxnreg */
#define ROW4_RUN (ROW4_WARPS * PACKED_BYTES)       /* of a block of a stage: gate, up, or what goes down */
#define ROW4_STAGE_BYTES (2 * ROW4_CHUNK * ROW4_RUN) /* of a chunk of the way up, or two of the way down */
#define LANE_BLOCKS (32 / ROW4_UNITS)              /* from one of a lane's runs of the way down to the next */
#define ROW4_STAGES 16u                            /* of the ring, at most */
#define ROW4_AHEAD 2u                              /* stages in flight, at most */
#define ROW4_EIGHTS 3u                             /* of y's columns, of an item's every unit */
#define ROW4_COLUMNS (ROW4_EIGHTS * 8)
#define ROW4_PANELS (ROW4_WARPS / 2)               /* of an item of the way down */
#define ROW4_QUADS 8u                              /* of products that a thread asks for at once */

/* Zero between launches but for n_launches. Launches have two of them in turns, for row16_counts' reason. */
struct row4_counts {
    uint32_t n_taken, n_ended, n_launches; /* items; blocks that take none any more; launches that had these counts */
};

/* In device memory. */
struct row4_state {
    struct row4_counts counts[2];
    __align__(16) uint64_t products[ROW4_UNITS * ROW4_MAX_COLS / 2]; /* pairs, each with its launch's mark */
};

struct row4_shape {
    uint32_t n_pairs, n_eights;      /* of an expert: eights of gate and of up; eights of y's columns */
    uint32_t up_blocks, down_blocks; /* of 64 columns */
    uint32_t n_tiles, tile_pairs;    /* items of a unit of the way up; pairs of one */
    uint32_t n_up, n_down;           /* items */
    size_t up_bytes, down_bytes;     /* from a block of 64 columns of all experts to the next */
    uint32_t n_stages, parity;       /* of the ring; which of the counts */
    static constexpr uint32_t stage_bytes = ROW4_STAGE_BYTES;
    uint32_t x_at, products_at, products_step, tables_at; /* in shared memory */
};

/* Packed weights, and the row. */
struct row4_input {
    const char *up, *down, *x;
};

struct row4_tables {
    uint64_t full[ROW4_STAGES], empty[ROW4_STAGES]; /* barriers */
    uint64_t x_there, is_up_done;                   /* x; the block's items of the way up */
    uint32_t items[ROW4_STAGES];                    /* of stages */
    float2 sums[ROW4_PANELS][32];                   /* of panels, from one of their two warps to the other */
    float results[2][ROW4_UNITS][ROW4_COLUMNS];     /* of the columns of an item; items alternate between the two */
};

/* ---- the warps that fetch ------------------------------------------------------------------------------------------------ */

/* An item's weights; of the lane's first run of eights of every stage: where the first expert's is, and where it goes. */
struct row4_source {
    const char *from;
    size_t expert_bytes, block_bytes; /* from one to the next */
    uint32_t index, unit, n_blocks, stage_blocks, n_runs, run_bytes;
    uint32_t block, at; /* of a stage: the lane's, and its bytes */
};

static __device__ __forceinline__ struct row4_source row4_find(const struct row4_input &in, const struct row4_shape &s,
                                                               uint32_t n_units, uint32_t index)
{
    const uint32_t lane = threadIdx.x % 32;
    struct row4_source from;
    from.index = index;
    if (index < s.n_up) {
        const uint32_t part = lane % 2, first = index % s.n_tiles * s.tile_pairs;
        from.unit = index / s.n_tiles;
        from.from = in.up + (size_t)(part * s.n_pairs + first) * PACKED_BYTES;
        from.expert_bytes = (size_t)2 * s.n_pairs * PACKED_BYTES;
        from.block_bytes = s.up_bytes;
        from.n_blocks = s.up_blocks;
        from.stage_blocks = ROW4_CHUNK;
        from.n_runs = 2;
        from.run_bytes = min(s.tile_pairs, s.n_pairs - first) * PACKED_BYTES;
        from.block = lane / 2;
        from.at = lane * ROW4_RUN;
        return from;
    }
    const uint32_t first = min((index - s.n_up) * ROW4_EIGHTS, s.n_eights);
    from.unit = lane % ROW4_UNITS;
    from.from = in.down + (size_t)first * PACKED_BYTES;
    from.expert_bytes = (size_t)s.n_eights * PACKED_BYTES;
    from.block_bytes = s.down_bytes;
    from.n_blocks = s.down_blocks;
    from.stage_blocks = 2 * ROW4_CHUNK;
    from.n_runs = n_units;
    from.run_bytes = min(ROW4_EIGHTS, s.n_eights - first) * PACKED_BYTES;
    from.block = from.unit < n_units ? lane / ROW4_UNITS : from.stage_blocks;
    from.at = from.block * ROW4_RUN + from.unit * (ROW4_EIGHTS * PACKED_BYTES);
    return from;
}

/* A warp. */
static __device__ __forceinline__ void row4_load(const struct row4_input &in, const struct row4_shape &s,
                                                 const struct mixture &m, const struct ring &ring, struct row4_tables *t,
                                                 struct row4_counts *counts)
{
    static_assert(2 * ROW4_CHUNK <= 2 * LANE_BLOCKS, "a lane a run or two");
    const uint64_t policy = policy_read_once();
    const uint32_t lane = threadIdx.x % 32;
    struct ring_place at = RING_FETCH;
    struct ring_pace pace = {};
    uint32_t next = lane ? 0 : atomicAdd(&counts->n_taken, 1);
    const uint32_t own = expert_soon(m, min(lane, m.n_chosen - 1));
    struct row4_source from = row4_find(in, s, m.n_chosen, __shfl_sync(~0u, next, 0));
    while (from.index < s.n_up + s.n_down) {
        const char *run = from.from + __shfl_sync(~0u, own, from.unit) * from.expert_bytes + from.block * from.block_bytes;
        for (uint32_t block = 0; block < from.n_blocks; block += from.stage_blocks, ring.next(at)) {
            const uint32_t full = ring.full_of(at), target = ring.data_of(at) + from.at;
            const uint32_t n_here = min(from.stage_blocks, from.n_blocks - block);
            ring.wait_empty(at);
            pace.hold(ring, ROW4_AHEAD);
            if (lane == 0) {
                t->items[at.stage] = from.index;
                barrier_expect(full, n_here * from.n_runs * from.run_bytes);
            }
            if (from.block < n_here)
                copy_bytes(target, run, from.run_bytes, full, policy);
            if (from.block + LANE_BLOCKS < n_here)
                copy_bytes(target + LANE_BLOCKS * ROW4_RUN, run + LANE_BLOCKS * from.block_bytes, from.run_bytes, full, policy);
            run += from.stage_blocks * from.block_bytes;
            /* Half-way: early enough for the number to arrive in time, late enough for all blocks to have taken their first
             * item. */
            if (lane == 0 && block == from.n_blocks / 2 / from.stage_blocks * from.stage_blocks)
                next = atomicAdd(&counts->n_taken, 1);
        }
        from = row4_find(in, s, m.n_chosen, __shfl_sync(~0u, next, 0));
    }
    wait_for_input();
    if (lane)
        return;
    ring_end(ring, t->items, at, from.index);
    barrier_wait(shared_address(&t->is_up_done), 0); /* so all of the block have read n_launches */
    if (atomicAdd(&counts->n_ended, 1) + 1 < gridDim.x)
        return;
    counts->n_taken = counts->n_ended = 0;
    counts->n_launches++;
}

/* A thread. */
static __device__ __forceinline__ void row4_load_x(const struct row4_input &in, const struct row4_shape &s, uint32_t target,
                                                   uint32_t there)
{
    wait_for_input();
    start_next();
    barrier_expect(there, s.up_blocks * 128);
    copy_bytes(target, in.x, s.up_blocks * 128, there);
}

/* ---- the warps that multiply --------------------------------------------------------------------------------------------- */

typedef ring_reader<struct row4_shape, struct row4_tables> row4_reader;

/* Adds up N blocks of a pair, gate and up a run apart: while one is multiplied, the next is unpacked and the one behind it
 * read. */
template <uint32_t N>
static __device__ __forceinline__ void row4_add(float (&sum)[4], uint32_t words_at, uint32_t exponents_at, uint32_t x_at)
{
    uint32_t words[N][4], exponents[N][4], x[N][2][4], w[N][4][4];
#pragma unroll
    for (uint32_t i = 0; i < N + 2; i++) {
        if (i < N) {
#pragma unroll
            for (uint32_t part = 0; part < 2; part++) {
                const uint32_t run = (2 * i + part) * ROW4_RUN;
                packed_read(words_at + run, exponents_at + run, words[i] + 2 * part, exponents[i] + 2 * part);
                load_matrices(x[i][part], x_at + i * 128 + part * 64);
            }
        }
#pragma unroll
        for (uint32_t k = 0; k < 4; k++) {
            if (i >= 2)
                mma(sum, w[i - 2][k], {x[i - 2][k / 2][k % 2 * 2], x[i - 2][k / 2][k % 2 * 2 + 1]}, __nv_bfloat16());
            if (i >= 1 && i <= N) {
                const uint32_t step = k / 2 * 2, row = k % 2, word = row * 2 + k / 2;
                unpack_word(words[i - 1][word], exponents[i - 1][word], w[i - 1][step][row], w[i - 1][step][row + 2],
                            w[i - 1][step + 1][row], w[i - 1][step + 1][row + 2]);
            }
        }
    }
}

static __device__ __forceinline__ void row4_sum_pair(row4_reader &reader, uint32_t pair, uint32_t x, float (&sum)[4])
{
    const uint32_t lane = threadIdx.x % 32, n_blocks = reader.s.up_blocks;
    uint32_t x_at = x + lane / 8 * 16;
    for (uint32_t block = 0; block < n_blocks; block += ROW4_CHUNK) {
        const uint32_t w_at = reader.open() + pair * PACKED_BYTES;
        uint32_t word = w_at + lane * 8, exponent = w_at + 256 + lane / 4 * 2;
        if (block + ROW4_CHUNK <= n_blocks)
            row4_add<ROW4_CHUNK>(sum, word, exponent, x_at);
        else
            for (uint32_t i = block; i < n_blocks; i++, word += 2 * ROW4_RUN, exponent += 2 * ROW4_RUN, x_at += 128)
                row4_add<1>(sum, word, exponent, x_at);
        x_at += ROW4_CHUNK * 128;
        reader.close();
    }
}

/* A pair of a unit: its products go to `products`. */
static __device__ __forceinline__ void row4_go_up(row4_reader &reader, const struct output &out,
                                                  const expert_product &product, uint32_t own, uint32_t x, uint32_t index,
                                                  uint64_t *products, uint32_t mark)
{
    const struct row4_shape &s = reader.s;
    const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, unit = index / s.n_tiles;
    const uint32_t pair = index % s.n_tiles * s.tile_pairs + warp, n = pair * 8 + lane / 4;
    const uint32_t expert = __shfl_sync(~0u, own, unit);
    const bool is_mine = warp < s.tile_pairs && pair < s.n_pairs;
    const float *bias = out.bias && is_mine ? out.bias + (size_t)expert * 2 * out.n_out + n : NULL;
    const float gate_bias = bias ? bias[0] : 0, up_bias = bias ? bias[out.n_out] : 0;
    float sum[4] = {};
    if (!is_mine)
        return reader.pass(s.up_blocks, ROW4_CHUNK);
    row4_sum_pair(reader, warp, x, sum);
    const float gate = bias ? sum[0] + gate_bias : sum[0], up = bias ? sum[2] + up_bias : sum[2];
    const __nv_bfloat16 value =
        round_to<__nv_bfloat16>(product(to_float(round_to<__nv_bfloat16>(gate)), to_float(round_to<__nv_bfloat16>(up))));
    const uint32_t low = __bfloat16_as_ushort(value), high = __shfl_down_sync(~0u, low, 4);
    if (lane % 8 == 0)
        asm volatile("st.relaxed.gpu.global.u64 [%0],%1;" ::"l"(products + ((size_t)unit * out.n_out + n) / 2),
                     "l"((uint64_t)mark << 32 | high << 16 | low)
                     : "memory");
}

/* Two pairs of products, each with its mark. */
struct row4_quad {
    uint64_t a, b;
    __device__ __forceinline__ void read(const uint64_t *from)
    {
        asm volatile("ld.relaxed.gpu.global.v2.u64 {%0,%1},[%2];" : "=l"(a), "=l"(b) : "l"(from) : "memory");
    }
    __device__ __forceinline__ bool is_there(uint32_t mark) const { return a >> 32 == mark && b >> 32 == mark; }
};

/* Copies all products to shared memory. A thread reads all of its quads at once, and reads those again that are not written
 * yet. */
static __device__ __forceinline__ void row4_fetch(const struct row4_shape &s, uint32_t n_units, uint32_t target,
                                                  const uint64_t *products, uint32_t mark)
{
    const uint32_t n_each = s.n_pairs * 2, n = n_units * n_each, step = ROW4_WARPS * 32; /* quads */
    for (uint32_t first = threadIdx.x; first < n; first += ROW4_QUADS * step) {
        struct row4_quad quads[ROW4_QUADS];
        auto read = [&](uint32_t i) { quads[i].read(products + 2 * (size_t)min(first + i * step, n - 1)); };
#pragma unroll
        for (uint32_t i = 0; i < ROW4_QUADS; i++)
            read(i);
        for (bool is_whole = false; !is_whole;) {
            is_whole = true;
#pragma unroll
            for (uint32_t i = 0; i < ROW4_QUADS; i++)
                if (!quads[i].is_there(mark)) {
                    read(i);
                    is_whole = false;
                }
        }
#pragma unroll
        for (uint32_t i = 0; i < ROW4_QUADS; i++) {
            const uint32_t quad = first + i * step, at = target + quad / n_each * s.products_step + quad % n_each * 8;
            if (quad < n)
                asm volatile("st.shared.v2.u32 [%0],{%1,%2};" ::"r"(at), "r"((uint32_t)quads[i].a), "r"((uint32_t)quads[i].b)
                             : "memory");
        }
    }
    meet(1, ROW4_WARPS * 32);
}

/* Blocks of 64 columns of a panel of the way down, as operands of the tensor cores. Data beyond the last block is never
 * multiplied. */
struct row4_chunk {
    uint32_t w[ROW4_CHUNK][4][4];
    __device__ __forceinline__ void unpack(uint32_t panel)
    {
#pragma unroll
        for (uint32_t i = 0; i < ROW4_CHUNK; i++)
            packed_panel::load(panel + i * ROW4_RUN, w[i]);
    }
    __device__ __forceinline__ void multiply_block(float (&sum)[4], uint32_t i, uint32_t x_at) const
    {
        uint32_t x[2][4];
        load_matrices(x[0], x_at + i * 128);
        load_matrices(x[1], x_at + i * 128 + 64);
#pragma unroll
        for (uint32_t k = 0; k < 4; k++)
            mma(sum, w[i][k], {x[k / 2][k % 2 * 2], x[k / 2][k % 2 * 2 + 1]}, __nv_bfloat16());
    }
    __device__ __forceinline__ void multiply(float (&sum)[4], uint32_t n_blocks, uint32_t x_at) const
    {
        if (n_blocks >= ROW4_CHUNK) {
#pragma unroll
            for (uint32_t i = 0; i < ROW4_CHUNK; i++)
                multiply_block(sum, i, x_at);
            return;
        }
#pragma unroll
        for (uint32_t i = 0; i < ROW4_CHUNK; i++)
            if (i < n_blocks)
                multiply_block(sum, i, x_at);
    }
};

/* The products of all units, and whether they are in shared memory. */
struct row4_products {
    const uint64_t *from;
    uint32_t mark, at;
    bool is_there;
};

/* The sums of a panel: sum[0] and sum[3] are the thread's. Whether this warp had the last chunk. */
static __device__ __forceinline__ bool row4_sum(row4_reader &reader, uint32_t n_units, struct row4_products *products,
                                                float (&sum)[4])
{
    const struct row4_shape &s = reader.s;
    const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, panel = warp / 2;
    const uint32_t turn = (warp + warp / 4) % 2; /* so that a scheduler has some of both */
    const uint32_t unit = min((2 * panel + lane % 2) / ROW4_EIGHTS, n_units - 1);
    const uint32_t x_at = products->at + unit * s.products_step + lane / 8 * 16;
    const uint32_t own = turn * ROW4_CHUNK * ROW4_RUN + panel * 2 * PACKED_BYTES;
    float2 *between = &reader.t->sums[panel][lane];
    struct row4_chunk chunk;
    chunk.unpack(reader.open() + own);
    reader.close();
    if (!products->is_there)
        row4_fetch(s, n_units, products->at, products->from, products->mark);
    products->is_there = true;
    for (uint32_t block = turn * ROW4_CHUNK; block < s.down_blocks;) {
        if (block) {
            meet(2 + 2 * panel + turn, 64);
            sum[0] = between->x;
            sum[3] = between->y;
        }
        chunk.multiply(sum, s.down_blocks - block, x_at + block * 128);
        if (block + ROW4_CHUNK >= s.down_blocks)
            return true;
        *between = make_float2(sum[0], sum[3]);
        reach(3 + 2 * panel - turn, 64);
        block += 2 * ROW4_CHUNK;
        if (block < s.down_blocks + turn * ROW4_CHUNK) {
            chunk.unpack(reader.open() + own);
            reader.close();
        }
    }
    return false;
}

/* The columns of an item. */
static __device__ __forceinline__ void row4_go_down(row4_reader &reader, const struct mixture &m, const struct output &y,
                                                    uint32_t own, float weight, struct row4_products *products, uint32_t index,
                                                    float (*results)[ROW4_COLUMNS])
{
    const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const uint32_t first = (index - reader.s.n_up) * ROW4_COLUMNS;
    uint32_t unit[2], column[2];
    float bias[2] = {}, sum[4] = {}, total = 0;
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
        const uint32_t eight = warp / 2 * 2 + i;
        unit[i] = eight / ROW4_EIGHTS;
        column[i] = eight % ROW4_EIGHTS * 8 + lane / 4;
        const uint32_t expert = __shfl_sync(~0u, own, unit[i]);
        if (y.bias && unit[i] < m.n_chosen && first + column[i] < y.n_out)
            bias[i] = y.bias[(size_t)expert * y.n_out + first + column[i]];
    }
    if (row4_sum(reader, m.n_chosen, products, sum) && lane % 4 == 0)
#pragma unroll
        for (uint32_t i = 0; i < 2; i++)
            results[unit[i]][column[i]] = to_float(round_to<__nv_bfloat16>(y.bias ? sum[3 * i] + bias[i] : sum[3 * i]));
    meet(1, ROW4_WARPS * 32);
    if (warp)
        return;
    for (uint32_t i = 0; i < m.n_chosen; i++) {
        const float w = __shfl_sync(~0u, weight, i);
        if (lane < ROW4_COLUMNS)
            total = fmaf(w, results[i][lane], total);
    }
    if (lane < ROW4_COLUMNS && first + lane < y.n_out)
        ((__nv_bfloat16 *)y.y)[first + lane] = round_to<__nv_bfloat16>(total);
}

static __device__ __forceinline__ void row4_work(row4_reader reader, const struct mixture &m, const struct output &up,
                                                 const struct output &y, const expert_product &product,
                                                 struct row4_state *state)
{
    const struct row4_shape &s = reader.s;
    struct row4_tables *t = reader.t;
    const uint32_t lane = threadIdx.x % 32;
    wait_for_input();
    const uint32_t own = lane < m.n_chosen ? (uint32_t)__ldcg(&route_at(m, lane)->expert) : 0;
    const float weight = lane < m.n_chosen ? __ldcg(&route_at(m, lane)->weight) : 0;
    const uint32_t mark = 2 * __ldcg(&state->counts[s.parity].n_launches) + s.parity + 1;
    struct row4_products products = {state->products, mark, reader.ring.data + s.products_at, false};
    barrier_wait(shared_address(&t->x_there), 0);
    uint32_t index = ring_item(reader.ring, t->items, reader.at);
    for (; index < s.n_up; index = ring_item(reader.ring, t->items, reader.at))
        row4_go_up(reader, up, product, own, reader.ring.data + s.x_at, index, state->products, mark);
    if (lane == 0)
        barrier_arrive(shared_address(&t->is_up_done));
    for (uint32_t parity = 0; index < s.n_up + s.n_down; parity ^= 1, index = ring_item(reader.ring, t->items, reader.at))
        row4_go_down(reader, m, y, own, weight, &products, index, t->results[parity]);
}

/* up, y: the biases and widths of both ways, and where the results go. */
static __global__ void __launch_bounds__(ROW4_THREADS, 1)
    experts_row_mxfp4(const __grid_constant__ struct row4_input in, const __grid_constant__ struct row4_shape s,
                      const __grid_constant__ struct mixture m, const __grid_constant__ struct output up,
                      const __grid_constant__ struct output y, const __grid_constant__ expert_product product,
                      struct row4_state *state)
{
    only_sm_90a();
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    struct row4_tables *t = (struct row4_tables *)(shared + s.tables_at);
    const struct ring ring = {shared_address(shared), shared_address(t->full), shared_address(t->empty), s.n_stages,
                              ROW4_STAGE_BYTES};
    ring.make_barriers(1, ROW4_WARPS);
    barriers_init(shared_address(&t->x_there), 1, 1);
    barriers_init(shared_address(&t->is_up_done), 1, ROW4_WARPS);
    barriers_made();
    __syncthreads();
    if (warp >= ROW4_WARPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (warp == ROW4_LOADER)
            row4_load(in, s, m, ring, t, &state->counts[s.parity]);
        else if (threadIdx.x == ROW4_WARPS * 32)
            row4_load_x(in, s, ring.data + s.x_at, shared_address(&t->x_there));
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 152;");
    row4_work({s, t, ring, RING_READ}, m, up, y, product, state);
}

/* ---- the host's side ----------------------------------------------------------------------------------------------------- */

/* Cuts the operation into items, and the shared memory of a block. */
static inline struct row4_shape row4_cut(const struct mixture &m, uint32_t inner, uint32_t n_cols, uint32_t n_out,
                                         uint32_t n_processors)
{
    struct row4_shape s = {};
    s.n_pairs = inner / 8;
    s.n_eights = n_out / 8;
    s.up_blocks = n_cols / 64;
    s.down_blocks = inner / 64;
    s.tile_pairs = min(ceil_div(s.n_pairs, max(n_processors / m.n_chosen, 1u)), ROW4_WARPS);
    s.n_tiles = ceil_div(s.n_pairs, s.tile_pairs);
    s.n_up = m.n_chosen * s.n_tiles;
    s.n_down = ceil_div(s.n_eights, ROW4_EIGHTS);
    s.up_bytes = (size_t)m.n_experts * 2 * s.n_pairs * PACKED_BYTES;
    s.down_bytes = (size_t)m.n_experts * s.n_eights * PACKED_BYTES;
    s.products_step = inner * 2 + 16; /* so that rows begin in other banks */
    const uint32_t rows_bytes = n_cols * 2 + m.n_chosen * s.products_step;
    s.n_stages = min((SHARED_BYTES - (uint32_t)sizeof(struct row4_tables) - rows_bytes) / ROW4_STAGE_BYTES, ROW4_STAGES);
    s.x_at = s.n_stages * ROW4_STAGE_BYTES;
    s.products_at = s.x_at + n_cols * 2;
    s.tables_at = s.x_at + rows_bytes;
    return s;
}

#endif
