/* lora_shrink.cuh: t of lora.cu, the products of A and rows of x. Orders:
 *   bfloat16  chunk by chunk of LORA_CHUNK columns; lora_expand adds the chunks. Each element of A is the exact sum of three
 *             values of bfloat16, or one value of bfloat16. Each value has a chain of mma.sync m16n8k16: warp i of 16 has
 *             columns 32 i .. 32 i + 31 and those 512 further, in steps of four neighbours of every eight. Then first +
 *             (second + third), then pairwise over warps
 *   others    thread i of T has a chain over the columns 4 i .. 4 i + 3, 4 (i + T) .. of x; then pairwise over lanes 16, 8, 4,
 *             2, 1 apart, then over warps 1, 2, 4, .. apart. T: 256, or 1024 for more than 4096 columns
 * A comes in before the wait. */
#ifndef LLMPY_CUDA_LORA_SHRINK_CUH
#define LLMPY_CUDA_LORA_SHRINK_CUH

#include "../core/eight.cuh"
#include "../core/mma.cuh"
#include "lora_work.cuh"

#define SHRINK_LONG 4096u /* more columns take more threads */

/* Stores elements first .. first + RANKS - 1 of t of a tile's rows: the sums of the warps, [row * RANKS + element] of each. */
template <uint32_t RANKS, uint32_t N_WARPS, uint32_t N>
static __device__ __forceinline__ void store_sums(const lora_work &w, const lora_tile &tile, uint32_t part, uint32_t chunk,
                                                  uint32_t first, uint32_t rank, const float (&sums)[N_WARPS][N])
{
    __syncthreads();
    const uint32_t r = threadIdx.x / RANKS, j = first + threadIdx.x % RANKS;
    if (r >= tile.n_rows || j >= rank)
        return;
    float parts[N_WARPS];
#pragma unroll
    for (uint32_t i = 0; i < N_WARPS; i++)
        parts[i] = sums[i][threadIdx.x];
    w.t_of((uint32_t)w.list[tile.first + r], part, chunk)[j] = sum_pairs<N_WARPS>(parts);
}

/* ---- rows of bfloat16 ---------------------------------------------------------------------------------------------------- */

#define CHUNK_THREADS 512u
#define CHUNK_WARPS (CHUNK_THREADS / 32)
#define CHUNK_TURNS (LORA_CHUNK / 32 / CHUNK_WARPS) /* a warp takes 32 columns in a turn */
#define CHUNK_RANKS 16u

/* Splits two values into three pairs of bfloat16 that add up to them exactly; the largest pair is first. */
static __device__ __forceinline__ void split(float a, float b, uint32_t (&parts)[3])
{
#pragma unroll
    for (uint32_t i = 0; i < 3; i++) {
        const __nv_bfloat162 both = __floats2bfloat162_rn(a, b);
        memcpy(&parts[i], &both, 4);
        a -= __low2float(both);
        b -= __high2float(both);
    }
}

template <bool IS_ALIGNED>
static __device__ __forceinline__ uint4 load_row(const __nv_bfloat16 *row, uint32_t column, uint32_t n_cols)
{
    if (IS_ALIGNED)
        return column < n_cols ? *(const uint4 *)(row + column) : uint4{0, 0, 0, 0};
    const uint16_t *from = (const uint16_t *)row;
    return uint4{pair_at(from, column, n_cols, false), pair_at(from, column + 2, n_cols, false),
                 pair_at(from, column + 4, n_cols, false), pair_at(from, column + 6, n_cols, false)};
}

/* Values of bfloat16 that add up to an element of A. */
template <class W> static constexpr uint32_t VALUES = sizeof(W) == 2 ? 1 : 3;

/* Operands of A of two mma: of each four columns of a thread's eight, value by value. */
template <class W> using a_operands = uint32_t[VALUES<W>][2][4];

/* Element i of the chains of all values. */
static __device__ __forceinline__ float sum_values(const float (&sum)[3][4], uint32_t i)
{
    return sum[0][i] + (sum[1][i] + sum[2][i]);
}

static __device__ __forceinline__ float sum_values(const float (&sum)[1][4], uint32_t i)
{
    return sum[0][i];
}

/* Thread (g, q) of a warp, g = lane / 4, q = lane % 4, has columns 8 q .. 8 q + 7 of ranks g and g + 8. */
template <bool IS_ALIGNED>
static __device__ __forceinline__ void load_operands(const float *const (&a)[2], uint32_t column, uint32_t n_cols,
                                                     a_operands<float> &m)
{
#pragma unroll
    for (uint32_t r = 0; r < 2; r++) {
        float v[8];
        load_part<IS_ALIGNED>(a[r], column, n_cols, v);
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            uint32_t values[3];
            split(v[2 * i], v[2 * i + 1], values);
#pragma unroll
            for (uint32_t p = 0; p < 3; p++)
                m[p][i / 2][r + 2 * (i % 2)] = values[p];
        }
    }
}

template <bool IS_ALIGNED>
static __device__ __forceinline__ void load_operands(const __nv_bfloat16 *const (&a)[2], uint32_t column, uint32_t n_cols,
                                                     a_operands<__nv_bfloat16> &m)
{
#pragma unroll
    for (uint32_t r = 0; r < 2; r++) {
        const uint4 v = load_row<IS_ALIGNED>(a[r], column, n_cols);
        m[0][0][r] = v.x;
        m[0][0][r + 2] = v.y;
        m[0][1][r] = v.z;
        m[0][1][r + 2] = v.w;
    }
}

/* A block has CHUNK_RANKS elements of t of a chunk of columns, for a tile of up to ROWS rows. The block of one row takes so
 * little shared memory that it runs beside a block of the linear in front of it. */
template <class W, uint32_t ROWS, bool IS_ALIGNED>
static __global__ void __launch_bounds__(CHUNK_THREADS)
lora_shrink_chunk(const __grid_constant__ lora_work w, rows<__nv_bfloat16> x)
{
    __shared__ float sums[CHUNK_WARPS][ROWS * CHUNK_RANKS];
    const uint32_t warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    const uint32_t chunk = blockIdx.x % w.n_chunks, first = blockIdx.x / w.n_chunks * CHUNK_RANKS;
    const lora_place &place = w.places[blockIdx.y];
    start_next();
    const lora_tile tile = w.has_tile(blockIdx.z) ? w.tile(blockIdx.z) : lora_tile{-1, 0, 0, 0};
    const char *slot = tile.slot < 0 ? NULL : w.slot(tile);
    const uint32_t rank = slot ? *(const uint32_t *)(slot + place.head) : 0;
    if (first >= rank) {
        wait_for_input();
        return;
    }
    const uint32_t column = chunk * LORA_CHUNK + 32 * warp + 8 * q;
    const W *a[2];
#pragma unroll
    for (uint32_t r = 0; r < 2; r++)
        a[r] = (const W *)(slot + place.a) + (size_t)min(first + g + 8 * r, rank - 1) * w.n_cols;
    const __nv_bfloat16 *from = x.at((uint32_t)w.list[tile.first + min(g, tile.n_rows - 1)], 0);
    a_operands<W> m[CHUNK_TURNS];
#pragma unroll
    for (uint32_t i = 0; i < CHUNK_TURNS; i++)
        load_operands<IS_ALIGNED>(a, column + 32 * CHUNK_WARPS * i, w.n_cols, m[i]);
    wait_for_input();
    uint4 v[CHUNK_TURNS];
#pragma unroll
    for (uint32_t i = 0; i < CHUNK_TURNS; i++)
        v[i] = load_row<IS_ALIGNED>(from, column + 32 * CHUNK_WARPS * i, w.n_cols);
    float sum[VALUES<W>][4] = {};
#pragma unroll
    for (uint32_t i = 0; i < CHUNK_TURNS; i++) {
        const uint32_t b[2][2] = {{v[i].x, v[i].y}, {v[i].z, v[i].w}};
#pragma unroll
        for (uint32_t half = 0; half < 2; half++)
#pragma unroll
            for (uint32_t p = 0; p < VALUES<W>; p++)
                mma(sum[p], m[i][p][half], b[half], __nv_bfloat16());
    }
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
        if (ROWS > 1 || 2 * q + i % 2 == 0)
            sums[warp][(2 * q + i % 2) * CHUNK_RANKS + g + 8 * (i / 2)] = sum_values(sum, i);
    store_sums<CHUNK_RANKS>(w, tile, place.number, chunk, first, rank, sums);
}

/* ---- rows of other types ------------------------------------------------------------------------------------------------- */

/* The sums of N values over the warp's lanes, pairwise over lanes 16, 8, 4, 2, 1 apart. Returns that of value sum_number(). */
template <uint32_t N> static __device__ __forceinline__ float sum_lanes(float (&v)[N])
{
    const uint32_t lane = threadIdx.x % 32;
    uint32_t apart = 16;
#pragma unroll
    for (uint32_t n = N / 2; n; n /= 2, apart /= 2)
#pragma unroll
        for (uint32_t i = 0; i < n; i++) {
            const float keep = lane & apart ? v[i + n] : v[i], give = lane & apart ? v[i] : v[i + n];
            v[i] = keep + __shfl_xor_sync(~0u, give, apart);
        }
    for (; apart; apart /= 2)
        v[0] = v[0] + __shfl_xor_sync(~0u, v[0], apart);
    return v[0];
}

template <uint32_t N> static __device__ __forceinline__ uint32_t sum_number(void)
{
    return threadIdx.x % 32 / (32 / N);
}

template <bool IS_ALIGNED, class W, uint32_t RANKS>
static __device__ __forceinline__ void load_a(const W *const (&a)[RANKS], uint32_t column, uint32_t n_cols,
                                              float (&m)[RANKS][4])
{
    if (column < n_cols)
#pragma unroll
        for (uint32_t j = 0; j < RANKS; j++)
            load_four<IS_ALIGNED>(a[j], column, n_cols, m[j]);
}

/* Adds the products of four columns; rows beyond n_rows have the first row's values. */
template <bool IS_ALIGNED, class T, uint32_t ROWS, uint32_t RANKS>
static __device__ __forceinline__ void add_products(const T *const (&from)[ROWS], uint32_t column, uint32_t n_cols,
                                                    const float (&m)[RANKS][4], float (&sum)[ROWS * RANKS])
{
    if (column < n_cols)
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r++) {
            float v[4];
            load_four<IS_ALIGNED>(from[r], column, n_cols, v);
#pragma unroll
            for (uint32_t j = 0; j < RANKS; j++)
#pragma unroll
                for (uint32_t i = 0; i < 4; i++)
                    sum[r * RANKS + j] = fmaf(m[j][i], v[i], sum[r * RANKS + j]);
        }
}

/* A block has RANKS elements of t for a tile of up to ROWS rows. */
template <class T, class W, uint32_t ROWS, uint32_t THREADS, uint32_t RANKS, bool IS_ALIGNED>
static __global__ void __launch_bounds__(THREADS) lora_shrink(const __grid_constant__ lora_work w, rows<T> x)
{
    constexpr uint32_t N = ROWS * RANKS, N_WARPS = THREADS / 32;
    constexpr uint32_t HELD = ROWS > 1 && THREADS > 256 ? 2 : 4; /* turns of A that come in before the wait */
    __shared__ float sums[N_WARPS][N];
    const lora_place &place = w.places[blockIdx.y];
    const uint32_t first = blockIdx.x * RANKS;
    start_next();
    const lora_tile tile = w.has_tile(blockIdx.z) ? w.tile(blockIdx.z) : lora_tile{-1, 0, 0, 0};
    const char *slot = tile.slot < 0 ? NULL : w.slot(tile);
    const uint32_t rank = slot ? *(const uint32_t *)(slot + place.head) : 0;
    if (first >= rank) {
        wait_for_input();
        return;
    }
    const W *a[RANKS];
    const T *from[ROWS];
#pragma unroll
    for (uint32_t j = 0; j < RANKS; j++)
        a[j] = (const W *)(slot + place.a) + (size_t)min(first + j, rank - 1) * w.n_cols;
#pragma unroll
    for (uint32_t r = 0; r < ROWS; r++)
        from[r] = x.at((uint32_t)w.list[tile.first + min(r, tile.n_rows - 1)], 0);
    const uint32_t begin = 4 * threadIdx.x, step = 4 * THREADS;
    float held[HELD][RANKS][4], sum[N] = {};
#pragma unroll
    for (uint32_t i = 0; i < HELD; i++)
        load_a<IS_ALIGNED>(a, begin + i * step, w.n_cols, held[i]);
    wait_for_input();
#pragma unroll
    for (uint32_t i = 0; i < HELD; i++)
        add_products<IS_ALIGNED>(from, begin + i * step, w.n_cols, held[i], sum);
    for (uint32_t column = begin + HELD * step; column < w.n_cols; column += step) {
        float m[RANKS][4];
        load_a<IS_ALIGNED>(a, column, w.n_cols, m);
        add_products<IS_ALIGNED>(from, column, w.n_cols, m, sum);
    }
    const float total = sum_lanes<N>(sum);
    if (threadIdx.x % 32 % (32 / N) == 0)
        sums[threadIdx.x / 32][sum_number<N>()] = total;
    store_sums<RANKS>(w, tile, place.number, 0, first, rank, sums);
}

#endif
