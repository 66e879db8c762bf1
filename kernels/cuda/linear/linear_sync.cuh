/* linear_sync.cuh: y[r][n] = sum over k of x[r][k] * W[n][k] for 1 to 32 rows of x, with mma.sync and cp.async alone, for every
 * device of compute capability 8.0 or later. W and x have one two-byte type, n_cols is a multiple of 64. Every output is one
 * float32 accumulator over the k16 steps 0, 1, 2, ..., the chain of every kernel of linear.cu.
 *
 * A warp has 16 rows of W, which it copies itself, and all rows of x, which one more warp of the block copies. Both go into a
 * ring of stages, each some blocks of 64 columns: rows in runs of 128 bytes, the 16-byte chunk c of row r at c ^ (r % 8). Where
 * a weight has few rows, a processor has two or three warps, and their chains of products must not wait. So what copies the
 * blocks of a later stage and what loads the operands of the next block stands between the products of a block. Where W is
 * gate | up, eights of their rows alternate, so a thread has both sums of a product. Bound by the bytes of W. */
#ifndef LLMPY_CUDA_LINEAR_SYNC_CUH
#define LLMPY_CUDA_LINEAR_SYNC_CUH

#include "../core/copies.cuh"
#include "../core/launch.cuh"
#include "../core/mma.cuh"
#include "../core/streams.cuh"
#include "../core/wgmma.cuh"
#include "activation.cuh"
#include "linear_sync.h"

#define SYNC_MAX_WARPS 8u /* of a block */

/* A weight and rows of x that cp.async reads. */
struct sync_product {
    const char *w, *x;
    size_t w_row_bytes, x_row_bytes;
    uint32_t n_w_rows, n_blocks; /* n_blocks: of 64 columns */
    bool is_product;
    uint32_t tail_bytes; /* of the last block of columns; 0: it is whole */
};

/* Row i of the tile of W that begins at row `first` of y's columns; beyond the last the last. */
static __device__ __forceinline__ uint32_t sync_w_row(const struct sync_product &p, uint32_t first, uint32_t i)
{
    if (!p.is_product)
        return min(first + i, p.n_w_rows - 1);
    const uint32_t half = p.n_w_rows / 2, n = min(first + i / 16 * 8 + i % 8, half - 1);
    return i / 8 % 2 ? n + half : n;
}

/* The address of a 16-byte chunk in rows of 128 bytes. */
static __device__ __forceinline__ uint32_t sync_chunk(uint32_t rows, uint32_t row, uint32_t chunk)
{
    return rows + row * 128 + ((chunk ^ row % 8) << 4);
}

/* Stores the sum, or act(gate) * up of two, of a row of x. */
template <class T>
static __device__ __forceinline__ void sync_put_product(const struct output &out, uint32_t r, uint32_t n, float gate, float up)
{
    if (r >= out.n_rows || n >= out.n_out)
        return;
    if (out.bias) {
        gate += out.bias[n];
        up += out.bias[n + out.n_out];
    }
    if (out.delta) {
        const float *delta = out.delta + (size_t)r * out.delta_stride + n;
        gate += delta[0];
        up += delta[out.n_out];
    }
    const float value = act_value(to_float(round_to<T>(gate)), out.act);
    ((T *)out.y)[(size_t)r * out.y_stride + n] = round_to<T>(value * to_float(round_to<T>(up)));
}

/* Operands of a block of 64 columns. */
template <uint32_t EIGHTS> struct sync_operands {
    uint32_t a[4][4], b[EIGHTS][2][4];
};

/* What a lane of a warp that multiplies copies to stages and loads from them. A stage has the rows of x, then the tiles of the
 * warps. */
template <uint32_t EIGHTS, uint32_t STAGE> struct sync_lane {
    const struct sync_product &p;
    const char *w[4];
    uint32_t w_to[2], w_from[4], x_from[EIGHTS][2];

    /* first: the block's first row of W, as sync_w_row counts. */
    __device__ __forceinline__ sync_lane(const struct sync_product &product, uint32_t first, uint32_t x_rows) : p(product)
    {
        const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = (x_rows + warp * 16) * STAGE * 128;
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            const uint32_t row = i * 4 + lane / 8;
            w[i] = kept(p.w + sync_w_row(p, first, warp * 16 + row) * p.w_row_bytes + lane % 8 * 16);
            if (i < 2)
                w_to[i] = kept(own + sync_chunk(0, row, lane % 8));
            w_from[i] = kept(own + (sync_chunk(0, lane % 16, lane / 16) ^ i * 32)); /* chunk 2 i + lane / 16 */
        }
#pragma unroll
        for (uint32_t i = 0; i < EIGHTS * 2; i++) {
            const uint32_t row = min(i / 2 * 8 + lane % 8, x_rows - 1);
            x_from[i / 2][i % 2] = kept(row * STAGE * 128 + ((lane / 8 ^ row % 8) << 4 ^ i % 2 * 64));
        }
    }
    /* Starts the copy of half of the warp's rows of block b of the stage whose first block is `block`. */
    __device__ __forceinline__ void copy(uint32_t stage, uint32_t block, uint32_t b, uint32_t half) const
    {
        if (block + b < p.n_blocks)
#pragma unroll
            for (uint32_t i = 0; i < 2; i++)
                copy_16(stage + w_to[i] + half * 1024 + b * 2048, w[half * 2 + i] + b * 128);
    }
    __device__ __forceinline__ void advance(void)
    {
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            w[i] += STAGE * 128;
        copies_close();
    }
    __device__ __forceinline__ void load_x(struct sync_operands<EIGHTS> &to, uint32_t stage, uint32_t b) const
    {
#pragma unroll
        for (uint32_t i = 0; i < EIGHTS * 2; i++)
            load_matrices(to.b[i / 2][i % 2], stage + x_from[i / 2][i % 2] + b * 128);
    }
    __device__ __forceinline__ void load_w(struct sync_operands<EIGHTS> &to, uint32_t stage, uint32_t b, uint32_t j) const
    {
        load_matrices(to.a[j], stage + w_from[j] + b * 2048);
    }
};

/* The warp that copies x. */
template <uint32_t EIGHTS, uint32_t STAGE> struct sync_x_copier {
    static const uint32_t row_lanes = STAGE * 8, at_once = 32 / row_lanes; /* of a row in a stage; rows of a copy */
    const struct sync_product &p;
    const char *x;
    uint32_t x_rows, row, to, block; /* block: of the stage's */

    __device__ __forceinline__ sync_x_copier(const struct sync_product &product, uint32_t n_x) : p(product), x_rows(n_x)
    {
        const uint32_t lane = threadIdx.x % 32;
        row = lane / row_lanes;
        block = lane % row_lanes / 8;
        to = kept(sync_chunk(block * 128, row, lane % 8) + row * (STAGE - 1) * 128);
        x = kept(p.x + row * p.x_row_bytes + lane % row_lanes * 16);
    }
    /* Starts the copy of the stage whose first block is `first`, and closes its group. */
    __device__ __forceinline__ void copy(uint32_t stage, uint32_t first)
    {
        const char *from = x;
#pragma unroll
        for (uint32_t i = 0; i < EIGHTS * 8 / at_once; i++, from += at_once * p.x_row_bytes)
            if (row + i * at_once < x_rows && first + block < p.n_blocks)
                copy_16(stage + (to ^ i * at_once % 8 * 16) + i * 512, from);
        x += STAGE * 128;
        copies_close();
    }
};

template <class T, uint32_t EIGHTS>
static __device__ __forceinline__ void sync_multiply(float (&sum)[EIGHTS][4], const struct sync_operands<EIGHTS> &of,
                                                     uint32_t j)
{
#pragma unroll
    for (uint32_t e = 0; e < EIGHTS; e++) {
        const uint32_t b[2] = {of.b[e][j / 2][j % 2 * 2], of.b[e][j / 2][j % 2 * 2 + 1]};
        mma(sum[e], of.a[j], b, T());
    }
}

template <class T, uint32_t EIGHTS>
static __device__ __forceinline__ void sync_store(const struct sync_product &p, const struct output &out,
                                                  const float (&sum)[EIGHTS][4])
{
    const uint32_t lane = threadIdx.x % 32, row = blockIdx.x * (blockDim.x / 2 - 16) + threadIdx.x / 32 * 16;
#pragma unroll
    for (uint32_t i = 0; i < EIGHTS * 2; i++) {
        const uint32_t r = i / 2 * 8 + lane % 4 * 2 + i % 2, n = (p.is_product ? row / 2 : row) + lane / 4;
        const float low = sum[i / 2][i % 2], high = sum[i / 2][2 + i % 2];
        if (p.is_product) {
            sync_put_product<T>(out, r, n, low, high);
        } else {
            put<T>(out, r, n, low);
            put<T>(out, r, n + 8, high);
        }
    }
}

/* STAGE: blocks of 64 columns of a stage; STAGES: of the ring. */
template <class T, uint32_t EIGHTS, uint32_t STAGE, uint32_t STAGES>
static __global__ void __launch_bounds__(SYNC_MAX_WARPS * 32 + 32)
linear_sync(const __grid_constant__ struct sync_product p, const __grid_constant__ struct output out)
{
    static_assert(STAGE == 2 || STAGE == 4, "operands alternate; a warp copies whole rows of x");
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t x_rows = min(out.n_rows, 8 * EIGHTS), tile_rows = blockDim.x / 2 - 16, n_blocks = p.n_blocks;
    const uint32_t data = kept(shared_address(shared)), stage_bytes = kept((x_rows + tile_rows) * STAGE * 128);
    const uint32_t end = kept(data + STAGES * stage_bytes);
    uint32_t stage = data, freed = data + (STAGES - 1) * stage_bytes;
    auto after = [&](uint32_t of) { return of + stage_bytes == end ? data : of + stage_bytes; };
    start_next();
    wait_for_input();
    if (threadIdx.x >= tile_rows * 2) {
        sync_x_copier<EIGHTS, STAGE> copier(p, x_rows);
        for (uint32_t i = 0; i + 1 < STAGES; i++)
            copier.copy(data + i * stage_bytes, i * STAGE);
        copies_wait<STAGES - 2>();
        __syncthreads();
        for (uint32_t block = 0; block + STAGE <= n_blocks; block += STAGE, freed = after(freed)) {
            copier.copy(freed, block + (STAGES - 1) * STAGE);
            copies_wait<STAGES - 2>();
            __syncthreads();
        }
        copies_wait<0>();
        return;
    }
    sync_lane<EIGHTS, STAGE> lane(p, blockIdx.x * (p.is_product ? tile_rows / 2 : tile_rows), x_rows);
    for (uint32_t i = 0; i + 1 < STAGES; i++) {
#pragma unroll
        for (uint32_t b = 0; b < STAGE * 2; b++)
            lane.copy(data + i * stage_bytes, i * STAGE, b / 2, b % 2);
        lane.advance();
    }
    float sum[EIGHTS][4] = {};
    struct sync_operands<EIGHTS> operands[2];
    copies_wait<STAGES - 2>();
    __syncthreads();
    lane.load_x(operands[0], data, 0);
#pragma unroll
    for (uint32_t j = 0; j < 4; j++)
        lane.load_w(operands[0], data, 0, j);
    for (uint32_t block = 0; block < n_blocks; block += STAGE, freed = after(freed)) {
        const uint32_t ahead = block + (STAGES - 1) * STAGE, next = after(stage);
#pragma unroll
        for (uint32_t b = 0; b < STAGE; b++) {
            struct sync_operands<EIGHTS> &now = operands[b % 2], &then = operands[(b + 1) % 2];
            const bool is_last = b + 1 == STAGE; /* of the stage, so the next operands are those of the next stage */
            const uint32_t from = is_last ? next : stage, i = (b + 1) % STAGE;
            if (block + b >= n_blocks)
                break;
            sync_multiply<T>(sum, now, 0);
            lane.copy(freed, ahead, b, 0);
            if (is_last) {
                lane.copy(freed, ahead, b, 1);
                lane.advance();
                copies_wait<STAGES - 2>();
                __syncthreads(); /* the next stage is there, and this one has been read */
            }
            lane.load_x(then, from, i);
            lane.load_w(then, from, i, 0);
            sync_multiply<T>(sum, now, 1);
            if (!is_last)
                lane.copy(freed, ahead, b, 1);
            lane.load_w(then, from, i, 1);
            lane.load_w(then, from, i, 2);
            sync_multiply<T>(sum, now, 2);
            lane.load_w(then, from, i, 3);
            sync_multiply<T>(sum, now, 3);
        }
        stage = next;
    }
    copies_wait<0>();
    sync_store<T>(p, out, sum);
}

/* ---- the host's side ----------------------------------------------------------------------------------------------------- */

typedef void (*sync_kernel)(struct sync_product, struct output);

/* Rings: blocks of a stage, and stages. */
struct sync_ring {
    uint32_t stage, stages;
};
enum sync_ring_name { RING_4X6, RING_4X4, RING_4X3, RING_2X4, RING_2X3, N_SYNC_RINGS };
static const struct sync_ring SYNC_RINGS[N_SYNC_RINGS] = {{4, 6}, {4, 4}, {4, 3}, {2, 4}, {2, 3}};

template <class T, uint32_t EIGHTS> static sync_kernel sync_few_with(uint32_t ring)
{
    const sync_kernel kernels[N_SYNC_RINGS] = {linear_sync<T, EIGHTS, 4, 6>, linear_sync<T, EIGHTS, 4, 4>,
                                               linear_sync<T, EIGHTS, 4, 3>, linear_sync<T, EIGHTS, 2, 4>,
                                               linear_sync<T, EIGHTS, 2, 3>};
    return kernels[ring];
}

template <class T> static sync_kernel sync_few_of(uint32_t n_rows, uint32_t ring)
{
    return n_rows <= 8 ? sync_few_with<T, 1>(ring) : n_rows <= 16 ? sync_few_with<T, 2>(ring) : sync_few_with<T, 4>(ring);
}

template <class T> static cudaError_t sync_few_open(const struct cuda *cuda)
{
    cudaError_t code = cudaSuccess;
    for (uint32_t i = 0; i < 3 * N_SYNC_RINGS && code == cudaSuccess; i++)
        code = allow_shared(sync_few_of<T>(8u << i % 3, i / 3), cuda->shared_bytes);
    return code;
}

/* Warps of a block and a ring, of at most 96 KB. By tiles a processor, the fastest on an H200. */
struct sync_few_form {
    uint32_t warps;
    enum sync_ring_name ring;
};
static inline struct sync_few_form sync_few_choose(uint32_t n_tiles, uint32_t n_processors, uint32_t n_rows)
{
    const bool is_tall = n_rows > 16;
    if (n_tiles <= 2 * n_processors)
        return {1, is_tall ? RING_4X4 : RING_4X6};
    if (n_tiles <= 6 * n_processors)
        return {2, is_tall ? RING_4X3 : RING_4X4};
    if (is_tall || n_tiles <= 8 * n_processors)
        return {4, RING_2X4};
    return {7, RING_2X3};
}

/* Shared memory that a block can have where `side_by_side` blocks share a processor. */
static inline uint32_t sync_room(const struct cuda *cuda, uint32_t side_by_side)
{
    const uint32_t share = cuda->processor_bytes / side_by_side - 1024;
    return cuda->shared_bytes < share ? cuda->shared_bytes : share;
}

template <class T>
static void sync_few_multiply(const struct cuda *cuda, const struct sync_product &p, const struct output &out)
{
    const uint32_t n_tiles = ceil_div(p.n_w_rows, 16);
    const struct sync_few_form form = sync_few_choose(n_tiles, cuda->n_processors, out.n_rows);
    const struct sync_ring ring = SYNC_RINGS[form.ring];
    launch(cuda, sync_few_of<T>(out.n_rows, form.ring), dim3(ceil_div(n_tiles, form.warps)), form.warps * 32 + 32,
           ring.stage * ring.stages * (form.warps * 16 + out.n_rows) * 128, p, out);
}

#endif
