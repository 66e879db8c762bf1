/* skinny.cuh: y[r][n] = sum over k of x[r][k] * W[n][k] for 1 to 64 rows of x, W and x of one two-byte type, n_cols a multiple
 * of 64: one float32 accumulator for every output over the k16 steps 0, 1, 2, ..., the chain of every kernel of linear.cu.
 *
 * A block owns tiles of tile_rows rows of W (a multiple of 8, at most 64). One warp streams W through a ring that fills shared
 * memory, one streams x, four multiply with wgmma, W being the operand of 64 rows; where a tile has fewer, the product reads
 * whatever bytes follow, and nobody looks at those sums. W does not wait for the kernel before, so the next kernel's ring fills
 * under the end of this one.
 * Bound by the bytes of W: 4096 x 14336 takes 26 us at the 4.5 TB/s that an H200 reads, 28 us in a chain of launches. */
#ifndef LLMPY_CUDA_SKINNY_CUH
#define LLMPY_CUDA_SKINNY_CUH

#include "linear.cuh"
#include "tensor_map.cuh"
#include "wgmma.cuh"

#define SKINNY_THREADS 192u
#define SKINNY_ROWS 64u
#define SKINNY_SHARED 232448u /* bytes that a block may have on sm_90 */
#define SKINNY_MAX_STAGES 32u

struct skinny_shape {
    uint32_t n_blocks; /* of 64 columns */
    uint32_t n_stages, tile_rows, n_tiles;
};

/* Rows of x that a launch multiplies, in eights. */
static inline uint32_t skinny_eights(uint32_t n_rows)
{
    return n_rows <= 8 ? 1 : n_rows <= 16 ? 2 : n_rows <= 32 ? 4 : 8;
}

/* Columns of a stage of the rings, in blocks of 64. */
static __host__ __device__ constexpr uint32_t skinny_stage_blocks(uint32_t eights)
{
    return eights <= 2 ? 4 : 2;
}

static __device__ __forceinline__ void skinny_load(const CUtensorMap *w_map, const CUtensorMap *x_map,
                                                   const struct skinny_shape &s, uint32_t stage_blocks, uint32_t ring,
                                                   uint32_t full, uint32_t empty, uint32_t stage_bytes, bool is_weight)
{
    uint64_t policy = policy_read_once();
    if (is_weight) {
        start_next();
    } else {
        map_prefetch(x_map);
        wait_for_input();
    }
    uint32_t stage = 0, phase = 1; /* 1: the first round finds every stage empty */
    for (uint32_t tile = blockIdx.x; tile < s.n_tiles; tile += gridDim.x)
        for (uint32_t block = 0; block < s.n_blocks; block += stage_blocks) {
            barrier_wait(empty + 8 * stage, phase);
            barrier_expect(full + 8 * stage, stage_bytes);
            if (is_weight)
                copy_box(ring + stage * stage_bytes, w_map, tile * s.tile_rows, block, full + 8 * stage, policy);
            else
                copy_box(ring + stage * stage_bytes, x_map, 0, block, full + 8 * stage);
            if (++stage == s.n_stages) {
                stage = 0;
                phase ^= 1;
            }
        }
}

/* The columns of one stage. */
template <class T, uint32_t EIGHTS>
static __device__ __forceinline__ void skinny_multiply(float (&sum)[4 * EIGHTS], uint64_t a, uint64_t b, uint32_t tile_rows,
                                                       uint32_t n_blocks)
{
    if (n_blocks == skinny_stage_blocks(EIGHTS)) {
        wgmma_begin();
#pragma unroll
        for (uint32_t i = 0; i < 4 * skinny_stage_blocks(EIGHTS); i++)
            wgmma(sum, a + i / 4 * tile_rows * 8 + i % 4 * 2, b + i / 4 * EIGHTS * 64 + i % 4 * 2, T());
        wgmma_commit();
        wgmma_wait<1>();
        return;
    }
    for (uint32_t i = 0; i < n_blocks; i++, a += tile_rows * 8, b += EIGHTS * 64) {
        wgmma_begin();
#pragma unroll
        for (uint32_t j = 0; j < 4; j++)
            wgmma(sum, a + 2 * j, b + 2 * j, T());
        wgmma_commit();
        wgmma_wait<0>();
    }
}

template <class T, uint32_t EIGHTS>
static __device__ __forceinline__ void skinny_store(const struct output &out, const struct skinny_shape &s, uint32_t tile,
                                                    float (&sum)[4 * EIGHTS])
{
    uint32_t lane = threadIdx.x % 32, n = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (uint32_t i = 0; i < 4 * EIGHTS; i++) {
        uint32_t row = n + i / 2 % 2 * 8;
        if (row < s.tile_rows)
            put<T>(out, i / 4 * 8 + lane % 4 * 2 + i % 2, tile * s.tile_rows + row, sum[i]);
    }
}

template <class T, uint32_t EIGHTS>
static __global__ void __launch_bounds__(SKINNY_THREADS, 1)
multiply_skinny(const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap x_map, struct skinny_shape s,
                struct output out)
{
    extern __shared__ __align__(1024) uint8_t rings[];
    const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const uint32_t stage_blocks = skinny_stage_blocks(EIGHTS);
    const uint32_t w_bytes = stage_blocks * s.tile_rows * 128, x_bytes = stage_blocks * EIGHTS * 1024;
    const uint32_t w_ring = shared_address(rings), x_ring = w_ring + s.n_stages * w_bytes;
    const uint32_t full = x_ring + s.n_stages * x_bytes, empty = full + 8 * s.n_stages;
    if (threadIdx.x < s.n_stages) {
        barrier_init(full + 8 * threadIdx.x, 2);
        barrier_init(empty + 8 * threadIdx.x, 4);
    }
    barriers_made();
    __syncthreads();
    if (warp >= 4) {
        if (lane == 0)
            skinny_load(&w_map, &x_map, s, stage_blocks, warp == 4 ? w_ring : x_ring, full, empty,
                        warp == 4 ? w_bytes : x_bytes, warp == 4);
        return;
    }
    uint32_t stage = 0, phase = 0, before = 0;
    for (uint32_t tile = blockIdx.x; tile < s.n_tiles; tile += gridDim.x) {
        float sum[4 * EIGHTS] = {};
        for (uint32_t block = 0; block < s.n_blocks; block += stage_blocks) {
            barrier_wait(full + 8 * stage, phase);
            skinny_multiply<T, EIGHTS>(sum, wgmma_rows(w_ring + stage * w_bytes), wgmma_rows(x_ring + stage * x_bytes),
                                       s.tile_rows, min(stage_blocks, s.n_blocks - block));
            if (block && lane == 0)
                barrier_arrive(empty + 8 * before);
            before = stage;
            if (++stage == s.n_stages) {
                stage = 0;
                phase ^= 1;
            }
        }
        wgmma_wait<0>();
        if (lane == 0)
            barrier_arrive(empty + 8 * before);
#pragma unroll
        for (uint32_t i = 0; i < 4 * EIGHTS; i++)
            asm volatile("" : "+f"(sum[i]));
        wait_for_input(); /* for what the sums are added to; x has waited already */
        skinny_store<T, EIGHTS>(out, s, tile, sum);
    }
}

/* ---- the host's side ---------------------------------------------------------------------------------------------------- */

/* Rows of W a tile: the most that keep the blocks' shares near equal; a small weight gets few blocks, so that the next kernel
 * fetches its own on the processors left over. */
static inline uint32_t skinny_tile_rows(uint32_t n_out, uint32_t n_cols, uint32_t n_processors)
{
    uint32_t least = UINT32_MAX, best = 8;
    if ((size_t)n_out * n_cols < (5u << 20))
        return n_out >= 64 * 48 ? 64 : 32;
    for (uint32_t rows = 8; rows <= 64; rows += 8) {
        uint32_t share = ceil_div(ceil_div(n_out, rows), n_processors) * rows;
        least = share < least ? share : least;
    }
    for (uint32_t rows = 8; rows <= 64; rows += 8)
        if (ceil_div(ceil_div(n_out, rows), n_processors) * rows * 16 <= least * 17)
            best = rows;
    return best;
}

static inline uint32_t skinny_bytes(uint32_t n_stages, uint32_t stage_blocks, uint32_t tile_rows, uint32_t eights)
{
    /* The product of the last stage may read beyond it; mostly what follows is there anyway. */
    uint32_t beyond = (64 - tile_rows) * 128, after = n_stages * (stage_blocks * eights * 1024 + 16);
    return n_stages * stage_blocks * tile_rows * 128 + (after > beyond ? after : beyond);
}

static inline uint32_t skinny_stages(uint32_t stage_blocks, uint32_t tile_rows, uint32_t eights)
{
    uint32_t n = SKINNY_MAX_STAGES;
    while (n > 2 && skinny_bytes(n, stage_blocks, tile_rows, eights) > SKINNY_SHARED)
        n--;
    return n;
}

template <class F> static void skinny_visit(uint32_t eights, F f)
{
    switch (eights) {
    case 1: f(std::integral_constant<uint32_t, 1>()); break;
    case 2: f(std::integral_constant<uint32_t, 2>()); break;
    case 4: f(std::integral_constant<uint32_t, 4>()); break;
    default: f(std::integral_constant<uint32_t, 8>());
    }
}

#endif
