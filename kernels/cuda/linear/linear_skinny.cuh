/* linear_skinny.cuh: y[r][n] = sum over k of x[r][k] * W[n][k] for 1 to 64 rows of x. W and x have one two-byte type, n_cols
 * is a multiple of 64. Every output is one float32 accumulator over the k16 steps 0, 1, 2, ..., the chain of every kernel of
 * linear.cu.
 *
 * A block owns tiles of tile_rows rows of W (a multiple of 8, at most 64). One warp streams W through a ring that fills shared
 * memory, one streams x, four multiply with wgmma. W is the operand of 64 rows; where a tile has fewer, the product reads
 * whatever bytes follow, and those sums are not stored. W does not wait for the kernel before, so the next kernel fills its
 * ring while this one ends. At most SKINNY_AHEAD_BYTES or SKINNY_HELD_BYTES are in flight: enough to keep memory busy, and few
 * enough that the reads and writes of this kernel do not queue behind a whole ring. Where W is gate | up, the block computes
 * act(gate) * up of its sums, each rounded first. Bound by the bytes of W: 4096 x 14336 takes 26 us at the 4.5 TB/s that an
 * H200 reads, 28 us in a chain of launches. */
#ifndef LLMPY_CUDA_LINEAR_SKINNY_CUH
#define LLMPY_CUDA_LINEAR_SKINNY_CUH

#include "../core/launch.cuh"
#include "../core/ring.cuh"
#include "../core/tensor_map.cuh"
#include "activation.cuh"
#include "linear.cuh"

#define SKINNY_THREADS 192u
#define SKINNY_ROWS 64u
#define SKINNY_MAX_STAGES 32u
#define SKINNY_SPARED (40u << 10)     /* bytes of shared memory that the next kernel's first block may have beside a block's */
#define SKINNY_AHEAD_BYTES (64u << 10) /* a processor's share of the memory's rate for 1.9 us */
#define SKINNY_HELD_BYTES (36u << 10)  /* the same of a tile that is held: there in time, as is what the kernel before reads */

struct skinny_shape {
    uint32_t n_blocks; /* of 64 columns */
    uint32_t n_stages, tile_rows, n_tiles;
    uint32_t n_ahead; /* stages of W in flight, at most */
    bool is_held;     /* a block's only tile, nearly all of it, by its shared memory */
};

/* Rows of x that a launch multiplies, in eights. */
static inline uint32_t skinny_eights(uint32_t n_rows)
{
    return n_rows <= 8 ? 1 : n_rows <= 16 ? 2 : n_rows <= 32 ? 4 : 8;
}

/* Columns of a stage of the rings, in blocks of 64. */
static __host__ __device__ constexpr uint32_t skinny_stage_blocks(uint32_t eights)
{
    return eights <= 4 ? 4 : 2;
}

static __device__ __forceinline__ void skinny_load_x(const CUtensorMap *map, const struct skinny_shape &s,
                                                     uint32_t stage_blocks, const struct ring &ring)
{
    map_prefetch(map);
    wait_for_input();
    struct ring_place at = RING_FETCH;
    for (uint32_t tile = blockIdx.x; tile < s.n_tiles; tile += gridDim.x)
        for (uint32_t block = 0; block < s.n_blocks; block += stage_blocks, ring.next(at)) {
            const uint32_t full = ring.expect(at, ring.stage_bytes);
            copy_box(ring.data_of(at), map, 0, block, full);
        }
}

/* x_there: 0, or a barrier that opens when x has arrived. After that no read queues behind W, so the rest of W is fetched
 * without a limit. */
template <bool IS_PRODUCT>
static __device__ __forceinline__ void skinny_load_w(const CUtensorMap *map, const struct skinny_shape &s,
                                                     uint32_t stage_blocks, const struct ring &ring, uint32_t x_there = 0)
{
    uint64_t policy = policy_read_once();
    start_next();
    struct ring_place at = RING_FETCH;
    struct ring_pace pace = {};
    bool is_paced = true;
    for (uint32_t tile = blockIdx.x; tile < s.n_tiles; tile += gridDim.x)
        for (uint32_t block = 0; block < s.n_blocks; block += stage_blocks, ring.next(at)) {
            is_paced = is_paced && !(x_there && barrier_test(x_there, 0));
            if (is_paced)
                pace.hold(ring, s.n_ahead);
            const uint32_t full = ring.expect(at, ring.stage_bytes), target = ring.data_of(at);
            if (IS_PRODUCT)
                copy_pairs(target, map, tile * (s.tile_rows / 16), block, full, policy);
            else
                copy_box(target, map, tile * s.tile_rows, block, full, policy);
        }
}

/* The columns of one stage; half_way() is called between the products of a whole one. X_STEP: from a block of x to the next,
 * as wgmma's descriptions count. */
template <class T, uint32_t EIGHTS, uint32_t BLOCKS = skinny_stage_blocks(EIGHTS), uint32_t X_STEP = EIGHTS * 64, class F>
static __device__ __forceinline__ void skinny_multiply(float (&sum)[4 * EIGHTS], uint64_t a, uint64_t b, uint32_t tile_rows,
                                                       uint32_t n_blocks, F half_way)
{
    if (n_blocks == BLOCKS) {
        wgmma_begin();
#pragma unroll
        for (uint32_t i = 0; i < 4 * BLOCKS; i++) {
            wgmma(sum, a + i / 4 * tile_rows * 8 + i % 4 * 2, b + i / 4 * X_STEP + i % 4 * 2, T());
            if (i == 2 * BLOCKS - 1)
                half_way();
        }
        wgmma_commit();
        wgmma_wait<1>();
        return;
    }
    for (uint32_t i = 0; i < n_blocks; i++, a += tile_rows * 8, b += X_STEP) {
        wgmma_begin();
#pragma unroll
        for (uint32_t j = 0; j < 4; j++)
            wgmma(sum, a + 2 * j, b + 2 * j, T());
        wgmma_commit();
        wgmma_wait<0>();
    }
}

/* The sums of a tile: multiply(block, half_way) takes the stage at hand, which is given back once the one behind it has been
 * multiplied. The rings share places and `empty`. A wait between two stages takes some 50 cycles of the chain, so the next
 * stage is looked for under the products of this one. */
template <uint32_t BLOCKS, uint32_t RINGS, uint32_t N, class F>
static __device__ __forceinline__ void skinny_sum(const struct ring (&rings)[RINGS], uint32_t n_blocks, struct ring_place &at,
                                                  float (&sum)[N], F multiply)
{
    const uint32_t lane = threadIdx.x % 32;
    uint32_t before = 0;
    bool is_there = false;
    for (uint32_t block = 0; block < n_blocks; block += BLOCKS) {
        for (uint32_t i = 0; i < RINGS && !is_there; i++)
            rings[i].wait_full(at);
        struct ring_place next = at;
        rings[0].next(next);
        is_there = false;
        multiply(block, [&] {
            is_there = true;
            for (uint32_t i = 0; i < RINGS; i++)
                is_there &= rings[i].is_full(next);
        });
        if (block && lane == 0)
            rings[0].release(before);
        before = at.stage;
        at = next;
    }
    wgmma_wait<0>();
    if (lane == 0)
        rings[0].release(before);
#pragma unroll
    for (uint32_t i = 0; i < N; i++)
        asm volatile("" : "+f"(sum[i]));
}

/* Sum i of a thread is that of this row of x and this row of the tile. */
static __device__ __forceinline__ uint32_t skinny_x_row(uint32_t i)
{
    return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
}

static __device__ __forceinline__ uint32_t skinny_w_row(uint32_t i)
{
    return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8;
}

/* The rows, the bias and the adapters' part that are added to the sums of a tile, read before the sums are computed. Sum i of a
 * thread has bias i / 2 % 2. */
template <class T, uint32_t EIGHTS> struct skinny_joined {
    T added[4 * EIGHTS];
    float bias[2], delta[4 * EIGHTS];
};

/* The output of a thread. A tile alternates between eight rows of gate and eight of up, so one thread has both sums of an
 * output. */
static __device__ __forceinline__ uint32_t skinny_output(const struct skinny_shape &s, uint32_t tile)
{
    return tile * (s.tile_rows / 2) + threadIdx.x / 32 * 8 + threadIdx.x % 32 / 4;
}

template <bool IS_PRODUCT, class T, uint32_t EIGHTS>
static __device__ __forceinline__ void skinny_read(const struct output &out, const struct skinny_shape &s, uint32_t tile,
                                                   struct skinny_joined<T, EIGHTS> &joined)
{
    if (out.bias)
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            const uint32_t n = IS_PRODUCT ? skinny_output(s, tile) : tile * s.tile_rows + skinny_w_row(2 * i);
            joined.bias[i] = n < out.n_out ? out.bias[IS_PRODUCT ? n + i * out.n_out : n] : 0;
        }
    if (out.delta)
#pragma unroll
        for (uint32_t i = 0; i < 4 * EIGHTS; i++) {
            const uint32_t r = skinny_x_row(i), half = i / 2 % 2;
            const uint32_t row = IS_PRODUCT ? skinny_output(s, tile) : skinny_w_row(i);
            const uint32_t n = IS_PRODUCT ? row : tile * s.tile_rows + row;
            if (r < out.n_rows && n < out.n_out && (IS_PRODUCT || row < s.tile_rows))
                joined.delta[i] = out.delta[(size_t)r * out.delta_stride + (IS_PRODUCT ? n + half * out.n_out : n)];
        }
    if (IS_PRODUCT || !out.add)
        return;
    const T *from = (const T *)out.add + tile * s.tile_rows;
#pragma unroll
    for (uint32_t i = 0; i < 4 * EIGHTS; i++) {
        uint32_t r = skinny_x_row(i), n = skinny_w_row(i);
        if (r < out.n_rows && n < s.tile_rows && tile * s.tile_rows + n < out.n_out)
            joined.added[i] = from[(size_t)r * out.add_stride + n];
    }
}

template <class Y, uint32_t N>
static __device__ __forceinline__ void skinny_store_values(const struct output &out, const struct skinny_shape &s,
                                                           uint32_t tile, const Y (&values)[N])
{
    Y *to = (Y *)out.y + tile * s.tile_rows;
    const uint32_t n_rows = min(s.tile_rows, out.n_out - tile * s.tile_rows);
#pragma unroll
    for (uint32_t i = 0; i < N; i++)
        if (skinny_x_row(i) < out.n_rows && skinny_w_row(i) < n_rows)
            to[(size_t)skinny_x_row(i) * out.y_stride + skinny_w_row(i)] = values[i];
}

template <class T, uint32_t EIGHTS>
static __device__ __forceinline__ void skinny_store_sums(const struct output &out, const struct skinny_shape &s, uint32_t tile,
                                                         const float (&sum)[4 * EIGHTS], const T (&added)[4 * EIGHTS])
{
    T values[4 * EIGHTS];
#pragma unroll
    for (uint32_t i = 0; i < 4 * EIGHTS; i++)
        values[i] = round_to<T>(sum[i]);
    if (out.add)
#pragma unroll
        for (uint32_t i = 0; i < 4 * EIGHTS; i++)
            values[i] = round_to<T>(to_float(values[i]) + to_float(added[i]));
    skinny_store_values(out, s, tile, values);
}

template <class T, uint32_t EIGHTS>
static __device__ __forceinline__ void skinny_store_products(const struct output &out, const struct skinny_shape &s,
                                                             uint32_t tile, const float (&sum)[4 * EIGHTS])
{
    const uint32_t n = skinny_output(s, tile);
    if (n >= out.n_out || threadIdx.x / 32 * 16 >= s.tile_rows)
        return;
#pragma unroll
    for (uint32_t i = 0; i < 4 * EIGHTS; i += 1 + i % 2 * 2) {
        const uint32_t r = skinny_x_row(i);
        if (r >= out.n_rows)
            continue;
        const float gate = act_value(to_float(round_to<T>(sum[i])), out.act);
        ((T *)out.y)[(size_t)r * out.y_stride + n] = round_to<T>(gate * to_float(round_to<T>(sum[i + 2])));
    }
}

template <bool IS_PRODUCT, class T, uint32_t EIGHTS>
static __device__ __forceinline__ void skinny_store(const struct output &out, const struct skinny_shape &s, uint32_t tile,
                                                    float (&sum)[4 * EIGHTS], const struct skinny_joined<T, EIGHTS> &joined)
{
    if (out.bias)
#pragma unroll
        for (uint32_t i = 0; i < 4 * EIGHTS; i++)
            sum[i] += joined.bias[i / 2 % 2];
    if (out.delta)
#pragma unroll
        for (uint32_t i = 0; i < 4 * EIGHTS; i++)
            sum[i] += joined.delta[i];
    if (IS_PRODUCT)
        skinny_store_products<T, EIGHTS>(out, s, tile, sum);
    else if (out.is_float)
        skinny_store_values(out, s, tile, sum);
    else
        skinny_store_sums<T, EIGHTS>(out, s, tile, sum, joined.added);
}

template <class T, uint32_t EIGHTS, bool IS_PRODUCT>
static __global__ void __launch_bounds__(SKINNY_THREADS, 1)
linear_skinny(const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap x_map, struct skinny_shape s,
              struct output out)
{
    only_sm_90a();
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const uint32_t stage_blocks = skinny_stage_blocks(EIGHTS);
    const uint32_t w_bytes = stage_blocks * s.tile_rows * 128, x_bytes = stage_blocks * EIGHTS * 1024;
    const uint32_t w_data = shared_address(shared), x_data = w_data + s.n_stages * w_bytes;
    const uint32_t w_full = x_data + s.n_stages * x_bytes, x_full = w_full + 8 * s.n_stages, empty = x_full + 8 * s.n_stages;
    const struct ring rings[] = {{w_data, w_full, empty, s.n_stages, w_bytes}, {x_data, x_full, empty, s.n_stages, x_bytes}};
    barriers_init(w_full, 2 * s.n_stages, 1);
    barriers_init(empty, s.n_stages, 4);
    barriers_made();
    __syncthreads();
    if (warp >= 4) {
        if (warp == 4 && lane == 0)
            skinny_load_w<IS_PRODUCT>(&w_map, s, stage_blocks, rings[0]);
        if (warp == 5 && lane == 0)
            skinny_load_x(&x_map, s, stage_blocks, rings[1]);
        return;
    }
    wait_for_input();
    struct ring_place at = RING_READ;
    for (uint32_t tile = blockIdx.x; tile < s.n_tiles; tile += gridDim.x) {
        float sum[4 * EIGHTS] = {};
        struct skinny_joined<T, EIGHTS> joined = {};
        skinny_read<IS_PRODUCT>(out, s, tile, joined);
        auto multiply = [&](uint32_t block, auto half_way) {
            skinny_multiply<T, EIGHTS>(sum, wgmma_rows(rings[0].data_of(at)), wgmma_rows(rings[1].data_of(at)), s.tile_rows,
                                       min(stage_blocks, s.n_blocks - block), half_way);
        };
        skinny_sum<skinny_stage_blocks(EIGHTS)>(rings, s.n_blocks, at, sum, multiply);
        skinny_store<IS_PRODUCT>(out, s, tile, sum, joined);
    }
}

/* ---- the host's side ----------------------------------------------------------------------------------------------------- */

/* Rows of W a tile, of pairs a multiple of 16: the most that keep the blocks' shares near equal, nearer where x is short, as
 * each tile reads all of x. A small weight gets few blocks: the next kernel fetches its own on the processors left over. */
static inline uint32_t skinny_tile_rows(uint32_t n_out, uint32_t n_cols, bool is_pairs, uint32_t stage_blocks,
                                        uint32_t n_processors)
{
    uint32_t least = UINT32_MAX, step = is_pairs ? 16 : 8, best = step, sixteenths = is_pairs && stage_blocks == 2 ? 18 : 17;
    if ((size_t)n_out * n_cols < (5u << 20))
        return n_out >= 64 * 48 ? 64 : stage_blocks == 2 ? 16 : 32;
    if ((size_t)n_out * n_cols < (8u << 20) && n_out >= 64 * 64)
        return 64;
    for (uint32_t rows = step; rows <= 64; rows += step) {
        uint32_t share = ceil_div(ceil_div(n_out, rows), n_processors) * rows;
        least = share < least ? share : least;
    }
    for (uint32_t rows = step; rows <= 64; rows += step)
        if (ceil_div(ceil_div(n_out, rows), n_processors) * rows * 16 <= least * sixteenths)
            best = rows;
    return best;
}

/* The same of a large weight and several rows of x: the fewest that need no more turns of the blocks than tiles of 64 rows, so
 * that x is read seldom and the chains of a block are few. */
static inline uint32_t skinny_few_tile_rows(uint32_t n_out, uint32_t n_cols, bool is_pairs, uint32_t stage_blocks,
                                            uint32_t n_processors)
{
    const uint32_t step = is_pairs ? 16 : 8, turns = ceil_div(ceil_div(n_out, 64), n_processors);
    if ((size_t)n_out * n_cols < (8u << 20))
        return skinny_tile_rows(n_out, n_cols, is_pairs, stage_blocks, n_processors);
    return ceil_div(ceil_div(n_out, turns * n_processors), step) * step;
}

static inline uint32_t skinny_bytes(uint32_t n_stages, uint32_t stage_blocks, uint32_t tile_rows, uint32_t eights)
{
    /* The product of the last stage may read beyond its end; usually the data that follows is large enough. */
    uint32_t beyond = (64 - tile_rows) * 128, after = n_stages * (stage_blocks * eights * 1024 + 24);
    return n_stages * stage_blocks * tile_rows * 128 + (after > beyond ? after : beyond);
}

static inline uint32_t skinny_ahead(uint32_t n_stages, uint32_t stage_blocks, uint32_t tile_rows, uint32_t bytes)
{
    uint32_t n = bytes / (stage_blocks * tile_rows * 128);
    const uint32_t most = n_stages > 1 ? n_stages - 1 : 1;
    return n < 1 ? 1 : n < most ? n : most;
}

/* Does the shared memory of a block hold nearly all of its only tile of a large W? */
static inline bool skinny_is_held(const struct matrix *matrix, const struct skinny_form *form, uint32_t n_processors)
{
    const bool is_large = (size_t)matrix->n_rows * matrix->n_cols >= (8u << 20) && form->n_tiles <= n_processors;
    return is_large && form->tile_rows * matrix->n_cols * 2 <= SHARED_BYTES - SKINNY_SPARED / 2;
}

/* Shared memory of a block for up to eight rows. A block that holds its tile leaves some to the next kernel. */
static inline uint32_t skinny_room(bool is_held)
{
    return is_held ? SHARED_BYTES - SKINNY_SPARED : SHARED_BYTES;
}

/* The largest number n of stages for which bytes(n) fit in the room. */
template <class F> static inline uint32_t ring_stages(uint32_t room, F bytes)
{
    uint32_t n = SKINNY_MAX_STAGES;
    while (n > 2 && bytes(n) > room)
        n--;
    return n;
}

static inline uint32_t skinny_stages(uint32_t stage_blocks, uint32_t tile_rows, uint32_t eights, uint32_t room)
{
    return ring_stages(room, [&](uint32_t n) { return skinny_bytes(n, stage_blocks, tile_rows, eights); });
}

typedef void (*skinny_function)(CUtensorMap, CUtensorMap, struct skinny_shape, struct output);

template <class T> static skinny_function skinny_kernel(uint32_t eights, bool is_product)
{
    switch (eights) {
    case 1: return is_product ? linear_skinny<T, 1, true> : linear_skinny<T, 1, false>;
    case 2: return is_product ? linear_skinny<T, 2, true> : linear_skinny<T, 2, false>;
    case 4: return is_product ? linear_skinny<T, 4, true> : linear_skinny<T, 4, false>;
    default: return is_product ? linear_skinny<T, 8, true> : linear_skinny<T, 8, false>;
    }
}

#endif
