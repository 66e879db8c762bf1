/* linear_sync.cuh: y[r][n] = sum over k of x[r][k] * W[n][k] for 1 to 32 rows of x, with mma.sync and cp.async alone, for every
 * device of compute capability 8.0 or later. W and x have one two-byte type, n_cols is a multiple of 64. Every output is one
 * float32 accumulator over the k16 steps 0, 1, 2, ..., the chain of every kernel of linear.cu.
 *
 * A warp has 16 rows of W and all rows of x. Two more warps of a block copy W and x into a ring of stages, each some blocks of
 * 64 columns: rows of 128 bytes, the 16-byte chunk c of row r at c ^ (r % 8). Operands of a block are loaded under the products
 * of the block before it, because a weight with few rows has two warps a processor. Where W is gate | up, eights of their rows
 * alternate, so a thread has both sums of a product. Bound by the bytes of W. */
#ifndef LLMPY_CUDA_LINEAR_SYNC_CUH
#define LLMPY_CUDA_LINEAR_SYNC_CUH

#include "../core/copies.cuh"
#include "../core/launch.cuh"
#include "../core/mma.cuh"
#include "../core/wgmma.cuh"
#include "activation.cuh"
#include "linear_sync.h"

#define SYNC_MAX_WARPS 8u            /* that multiply */
#define SYNC_LOADERS 64u             /* threads that copy */
#define SYNC_STAGE_BYTES (20u << 10) /* of a stage, about */

/* A weight and rows of x that cp.async reads. */
struct sync_product {
    const char *w, *x;
    size_t w_row_bytes, x_row_bytes;
    uint32_t n_w_rows, n_blocks; /* n_blocks: of 64 columns */
    bool is_product;
    uint32_t stage_blocks, n_stages;
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

/* What a loader copies of each stage: of a block every eighth row of W and of x. */
struct sync_copier {
    const struct sync_product &p;
    const char *w[2], *x; /* w: eights with even numbers, and with odd ones */
    uint32_t data, stage_bytes, tile_rows, x_rows, row, to;
    uint32_t offsets[2 * SYNC_MAX_WARPS];

    __device__ __forceinline__ sync_copier(const struct sync_product &product, uint32_t shared, uint32_t n_tile, uint32_t n_x)
        : p(product), data(shared), tile_rows(n_tile), x_rows(n_x)
    {
        const uint32_t t = threadIdx.x % SYNC_LOADERS, first = blockIdx.x * (p.is_product ? tile_rows / 2 : tile_rows);
        row = t / 8;
        to = sync_chunk(0, row, t % 8);
        stage_bytes = p.stage_blocks * (tile_rows + x_rows) * 128;
        x = p.x + row * p.x_row_bytes + t % 8 * 16;
        uint32_t from[2];
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            from[i] = sync_w_row(p, first, row + i * 8);
            w[i] = p.w + from[i] * p.w_row_bytes + t % 8 * 16;
        }
#pragma unroll
        for (uint32_t i = 0; i < 2 * SYNC_MAX_WARPS; i++)
            offsets[i] = (sync_w_row(p, first, row + i * 8) - from[i % 2]) * (uint32_t)p.w_row_bytes;
    }
    /* Starts the copies of a stage whose first block of columns is `block`, and closes their group, which may be empty. */
    __device__ __forceinline__ void start(uint32_t slot, uint32_t block) const
    {
        const uint32_t stage = data + slot * stage_bytes, n = block < p.n_blocks ? min(p.stage_blocks, p.n_blocks - block) : 0;
        for (uint32_t b = 0; b < n; b++) {
            const uint32_t w_to = stage + b * tile_rows * 128 + to;
            const uint32_t x_to = stage + (p.stage_blocks * tile_rows + b * x_rows) * 128 + to;
            const size_t column = (size_t)(block + b) * 128;
#pragma unroll
            for (uint32_t i = 0; i < 2 * SYNC_MAX_WARPS; i++)
                if (i * 8 < tile_rows)
                    copy_16(w_to + i * 1024, w[i % 2] + offsets[i] + column);
            for (uint32_t r = 0; row + r < x_rows; r += 8)
                copy_16(x_to + r * 128, x + r * p.x_row_bytes + column);
        }
        copies_close();
    }
    /* A loader's part of the launch: a barrier for each stage. */
    __device__ __forceinline__ void run(void) const
    {
        uint32_t ahead = p.n_stages - 1;
        for (uint32_t i = 0; i + 1 < p.n_stages; i++)
            start(i, i * p.stage_blocks);
        for (uint32_t block = 0; block < p.n_blocks; block += p.stage_blocks) {
            copies_wait(p.n_stages - 2);
            __syncthreads();
            start(ahead, block + (p.n_stages - 1) * p.stage_blocks);
            ahead = ahead + 1 == p.n_stages ? 0 : ahead + 1;
        }
        copies_wait<0>();
    }
};

/* Operands of a block of 64 columns. */
template <uint32_t EIGHTS> struct sync_operands {
    uint32_t a[4][4], b[EIGHTS][2][4];
};

template <class T, uint32_t EIGHTS>
static __global__ void __launch_bounds__(SYNC_MAX_WARPS * 32 + SYNC_LOADERS, 2)
linear_sync(const __grid_constant__ struct sync_product p, const __grid_constant__ struct output out)
{
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const uint32_t tile_rows = (blockDim.x - SYNC_LOADERS) / 2, x_rows = min(out.n_rows, 8 * EIGHTS);
    const uint32_t data = shared_address(shared), stage_bytes = p.stage_blocks * (tile_rows + x_rows) * 128;
    start_next();
    wait_for_input();
    if (threadIdx.x >= 2 * tile_rows) {
        sync_copier(p, data, tile_rows, x_rows).run();
        return;
    }
    float sum[EIGHTS][4] = {};
    struct sync_operands<EIGHTS> operands[2];
    uint32_t slot = 0, in_stage = 0, x_at[EIGHTS];
    const uint32_t w_at = sync_chunk(0, warp * 16 + lane % 16, lane / 16);
#pragma unroll
    for (uint32_t e = 0; e < EIGHTS; e++)
        x_at[e] = sync_chunk(0, min(e * 8 + lane % 8, x_rows - 1), lane / 8);
    auto load = [&](struct sync_operands<EIGHTS> &to) {
        if (in_stage == 0)
            __syncthreads(); /* a stage is there, and the one before has been read */
        const uint32_t stage = data + slot * stage_bytes, w = stage + in_stage * tile_rows * 128;
        const uint32_t x = stage + p.stage_blocks * tile_rows * 128 + in_stage * x_rows * 128;
#pragma unroll
        for (uint32_t j = 0; j < 4; j++)
            load_matrices(to.a[j], w + (w_at ^ j * 32)); /* chunk 2 j + lane / 16 */
#pragma unroll
        for (uint32_t e = 0; e < EIGHTS; e++)
#pragma unroll
            for (uint32_t j = 0; j < 2; j++)
                load_matrices(to.b[e][j], x + (x_at[e] ^ j * 64));
        if (++in_stage == p.stage_blocks) {
            in_stage = 0;
            slot = slot + 1 == p.n_stages ? 0 : slot + 1;
        }
    };
    auto multiply = [&](const struct sync_operands<EIGHTS> &of) {
#pragma unroll
        for (uint32_t j = 0; j < 4; j++)
#pragma unroll
            for (uint32_t e = 0; e < EIGHTS; e++) {
                const uint32_t b[2] = {of.b[e][j / 2][j % 2 * 2], of.b[e][j / 2][j % 2 * 2 + 1]};
                mma(sum[e], of.a[j], b, T());
            }
    };
    if constexpr (EIGHTS <= 2) {
        load(operands[0]);
        for (uint32_t block = 0; block < p.n_blocks; block += 2) {
            if (block + 1 < p.n_blocks)
                load(operands[1]);
            multiply(operands[0]);
            if (block + 2 < p.n_blocks)
                load(operands[0]);
            if (block + 1 < p.n_blocks)
                multiply(operands[1]);
        }
    } else {
        for (uint32_t block = 0; block < p.n_blocks; block++) {
            load(operands[0]);
            multiply(operands[0]);
        }
    }
#pragma unroll
    for (uint32_t e = 0; e < EIGHTS; e++)
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            const uint32_t r = e * 8 + 2 * t + i, n = blockIdx.x * tile_rows + warp * 16 + g;
            if (p.is_product) {
                sync_put_product<T>(out, r, blockIdx.x * (tile_rows / 2) + warp * 8 + g, sum[e][i], sum[e][2 + i]);
            } else {
                put<T>(out, r, n, sum[e][i]);
                put<T>(out, r, n + 8, sum[e][2 + i]);
            }
        }
}

/* ---- the host's side ----------------------------------------------------------------------------------------------------- */

typedef void (*sync_kernel)(struct sync_product, struct output);

template <class T> static sync_kernel sync_few_of(uint32_t n_rows)
{
    return n_rows <= 8 ? linear_sync<T, 1> : n_rows <= 16 ? linear_sync<T, 2> : linear_sync<T, 4>;
}

template <class T> static cudaError_t sync_few_open(const struct cuda *cuda)
{
    cudaError_t code = cudaSuccess;
    for (uint32_t n_rows = 8; n_rows <= SYNC_FEW_ROWS && code == cudaSuccess; n_rows *= 2)
        code = allow_shared(sync_few_of<T>(n_rows), cuda->shared_bytes);
    return code;
}

/* Warps or panels of a block, at most `most`: those that keep the processors' shares of n_tiles least. Few in a block cost
 * time, too, because each block reads all of x. */
static inline uint32_t sync_shares(uint32_t n_tiles, uint32_t n_processors, uint32_t most, uint32_t n_rows)
{
    uint32_t best = 1;
    float least = 0;
    for (uint32_t n = 1; n <= most; n++) {
        const uint32_t share = ceil_div(ceil_div(n_tiles, n), n_processors) * n;
        const float cost = (float)share * (1 + (0.25f + (float)n_rows / 64) / (float)n);
        if (n == 1 || cost <= least) {
            least = cost;
            best = n;
        }
    }
    return best;
}

/* Shared memory that a block can have where `side_by_side` blocks share a processor. */
static inline uint32_t sync_room(const struct cuda *cuda, uint32_t side_by_side)
{
    const uint32_t share = cuda->processor_bytes / side_by_side - 1024;
    return cuda->shared_bytes < share ? cuda->shared_bytes : share;
}

template <class T>
static void sync_few_multiply(const struct cuda *cuda, struct sync_product p, const struct output &out)
{
    const uint32_t warps = sync_shares(ceil_div(p.n_w_rows, 16), cuda->n_processors, SYNC_MAX_WARPS, out.n_rows);
    const uint32_t n_blocks = ceil_div(p.n_w_rows, warps * 16), block_bytes = (warps * 16 + out.n_rows) * 128;
    const uint32_t room = sync_room(cuda, n_blocks > cuda->n_processors ? 2 : 1);
    p.stage_blocks = 4;
    while (p.stage_blocks > 1 && (p.stage_blocks * block_bytes > SYNC_STAGE_BYTES || p.stage_blocks * block_bytes * 3 > room))
        p.stage_blocks /= 2;
    p.n_stages = min(COPIES_MOST + 1, room / (p.stage_blocks * block_bytes));
    launch(cuda, sync_few_of<T>(out.n_rows), dim3(n_blocks), warps * 32 + SYNC_LOADERS,
           p.n_stages * p.stage_blocks * block_bytes, p, out);
}

#endif
