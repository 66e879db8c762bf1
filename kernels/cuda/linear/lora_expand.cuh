/* lora_expand.cuh: delta of lora.cu, the products of t and B. Order: t is a chain over its chunks, delta one chain over the
 * ranks, then times scale, then plus a bias. B comes in before the wait. */
#ifndef LLMPY_CUDA_LORA_EXPAND_CUH
#define LLMPY_CUDA_LORA_EXPAND_CUH

#include "lora.cuh"
#include "lora_work.cuh"

#define EXPAND_THREADS 128u
#define EXPAND_COLUMNS (4 * EXPAND_THREADS)
#define EXPAND_RANKS 16u /* rows of B that a block holds at a time */

template <bool IS_ALIGNED>
static __device__ __forceinline__ void store_four(float *row, uint32_t column, uint32_t n_columns, const float (&v)[4])
{
    if constexpr (IS_ALIGNED) {
        *(float4 *)(row + column) = make_float4(v[0], v[1], v[2], v[3]);
    } else {
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            if (column + i < n_columns)
                row[column + i] = v[i];
    }
}

/* Rows first .. first + EXPAND_RANKS of the transpose of B; zeros beyond the rank. */
template <bool IS_ALIGNED, class W>
static __device__ __forceinline__ void load_b(const W *b, uint32_t first, uint32_t rank, uint32_t column, uint32_t n_rows,
                                              float (&m)[EXPAND_RANKS][4])
{
#pragma unroll
    for (uint32_t j = 0; j < EXPAND_RANKS; j++)
        if (column < n_rows && first + j < rank)
            load_four<IS_ALIGNED>(b + (size_t)(first + j) * n_rows, column, n_rows, m[j]);
        else
            m[j][0] = m[j][1] = m[j][2] = m[j][3] = 0;
}

/* An element of t: a chain over its chunks. */
static __device__ __forceinline__ float sum_chunks(const lora_work &w, uint32_t row, uint32_t part, uint32_t rank)
{
    constexpr uint32_t HELD = 4;
    const float *from = w.t_of(row, part, 0) + rank;
    float sum = 0;
#pragma unroll 4
    for (uint32_t first = 0; first < w.n_chunks; first += HELD) {
        float v[HELD];
#pragma unroll
        for (uint32_t i = 0; i < HELD; i++)
            v[i] = first + i < w.n_chunks ? from[(first + i) * w.max_rank] : 0.0f;
#pragma unroll
        for (uint32_t i = 0; i < HELD; i++)
            sum += v[i];
    }
    return sum;
}

/* What an adapter's bias adds to four columns of delta. */
template <class W>
static __device__ __forceinline__ void load_bias(const lora_work &w, const lora_place &place, const char *slot, uint32_t kind,
                                                 uint32_t column, float (&bias)[4])
{
    const size_t b_bytes = (size_t)w.max_rank * place.n_rows * sizeof(W);
    const float *from = (const float *)(slot + place.b + (b_bytes + 3) / 4 * 4);
    for (uint32_t i = 0; i < 4; i++)
        if (column + i < place.n_rows)
            bias[i] = lora_bias_of(kind, from[column + i], w.base_bias, place.first_row + column + i);
        else
            bias[i] = 0;
}

/* A block has EXPAND_COLUMNS columns of a part for a tile of up to ROWS rows. */
template <class W, uint32_t ROWS, bool IS_ALIGNED>
static __global__ void __launch_bounds__(EXPAND_THREADS) lora_expand(const __grid_constant__ lora_work w)
{
    __shared__ float4 t[ROWS][EXPAND_RANKS / 4];
    __shared__ uint32_t row_of[ROWS];
    start_next();
    const bool is_tile = w.has_tile(blockIdx.y);
    const lora_tile tile = is_tile ? w.tile(blockIdx.y) : lora_tile{-1, 0, 0, 0};
    uint32_t p = 0;
    while (p + 1 < w.n_here && w.places[p + 1].first_block <= blockIdx.x)
        p++;
    const lora_place &place = w.places[p];
    const uint32_t column = (blockIdx.x - place.first_block) * EXPAND_COLUMNS + 4 * threadIdx.x;
    const char *slot = tile.slot < 0 ? NULL : w.slot(tile);
    const uint32_t rank = slot ? *(const uint32_t *)(slot + place.head) : 0;
    const float scale = rank ? *(const float *)(slot + place.head + 4) : -0.0f;
    const W *b = rank ? (const W *)(slot + place.b) : NULL;
    float m[EXPAND_RANKS][4], sum[ROWS][4];
    load_b<IS_ALIGNED>(b, 0, rank, column, place.n_rows, m);
    if (threadIdx.x < tile.n_rows)
        row_of[threadIdx.x] = (uint32_t)w.list[tile.first + threadIdx.x];
#pragma unroll
    for (uint32_t r = 0; r < ROWS; r++)
        for (uint32_t i = 0; i < 4; i++)
            sum[r][i] = rank ? 0.0f : 1.0f; /* 1 * -0.0 */
    __syncthreads();
    wait_for_input();
    for (uint32_t first = 0; first < rank; first += EXPAND_RANKS) {
        if (first) {
            load_b<IS_ALIGNED>(b, first, rank, column, place.n_rows, m);
            __syncthreads();
        }
        for (uint32_t i = threadIdx.x; i < tile.n_rows * EXPAND_RANKS; i += EXPAND_THREADS) {
            const uint32_t j = i % EXPAND_RANKS, r = i / EXPAND_RANKS;
            ((float *)t[r])[j] = first + j < rank ? sum_chunks(w, row_of[r], place.number, first + j) : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r++) {
            if (ROWS > 1 && r >= tile.n_rows)
                break;
#pragma unroll
            for (uint32_t j = 0; j < EXPAND_RANKS; j += 4) {
                const float4 v = t[r][j / 4];
#pragma unroll
                for (uint32_t i = 0; i < 4; i++) {
                    sum[r][i] = fmaf(v.x, m[j][i], sum[r][i]);
                    sum[r][i] = fmaf(v.y, m[j + 1][i], sum[r][i]);
                    sum[r][i] = fmaf(v.z, m[j + 2][i], sum[r][i]);
                    sum[r][i] = fmaf(v.w, m[j + 3][i], sum[r][i]);
                }
            }
        }
    }
    if (!is_tile || column >= place.n_rows)
        return;
    const uint32_t kind = slot ? *(const uint32_t *)(slot + place.head + 8) : LORA_BIAS_NONE;
    float bias[4];
    if (kind)
        load_bias<W>(w, place, slot, kind, column, bias);
#pragma unroll
    for (uint32_t r = 0; r < ROWS; r++) {
        if (r >= tile.n_rows)
            break;
        float v[4];
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            v[i] = kind ? scale * sum[r][i] + bias[i] : scale * sum[r][i];
        store_four<IS_ALIGNED>(w.delta + (size_t)row_of[r] * w.delta_stride + place.first_row, column, place.n_rows, v);
    }
}

#endif
