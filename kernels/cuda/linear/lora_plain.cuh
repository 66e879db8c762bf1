/* lora_plain.cuh: adapters of embeddings and of the head, for lora.cu: y[r][n] += scale * sum over j of t[r][j] * B[n][j], then
 * a bias, where y lies. A head's y is float32 and t = A x; an embedding's y has the type of activations and t is factor times
 * the column of A of the row's id. Orders, by the adapter alone: an element of A x has a chain a lane over every 32nd column,
 * then pairwise over lanes 16, 8, 4, 2, 1 apart; B t is one chain over the rank, and scale * (B t) + y one fused step. Bound by
 * the bytes of B and y (rank 16, 128256 ids, one row: 9 MB). */
#ifndef LLMPY_CUDA_LORA_PLAIN_CUH
#define LLMPY_CUDA_LORA_PLAIN_CUH

#include "../core/launch.cuh"
#include "lora.cuh"

#define PLAIN_WARPS 4u     /* elements of t of a block */
#define PLAIN_THREADS 256u /* columns of a block */

struct lora_plain {
    const char *slots;
    size_t slot_bytes;
    const int32_t *row_slots;
    const int32_t *token_ids; /* NULL: a head's */
    float *t;                 /* [n_rows][n_parts][max_rank] */
    const float *base_bias;
    float factor;
    int32_t first_id, end_id;
    uint32_t n_cols, n_parts, max_rank, number; /* number: of the part */
    struct lora_part part;
    __device__ __forceinline__ const char *slot(uint32_t row) const /* NULL: the row has none, or an id of another rank */
    {
        const bool has_range = token_ids && end_id;
        if (has_range && (token_ids[row] < first_id || token_ids[row] >= end_id))
            return NULL;
        return row_slots[row] < 0 ? NULL : slots + (size_t)(uint32_t)row_slots[row] * slot_bytes;
    }
    __device__ __forceinline__ uint32_t rank(const char *slot) const { return *(const uint32_t *)(slot + part.head); }
    __device__ __forceinline__ float *t_of(uint32_t row) const { return t + ((size_t)row * n_parts + number) * max_rank; }
    __device__ __forceinline__ float element(uint32_t row, const char *slot, uint32_t j) const
    {
        if (!token_ids)
            return t_of(row)[j];
        const uint32_t id = (uint32_t)token_ids[row];
        return id < n_cols ? factor * ((const float *)(slot + part.a))[(size_t)j * n_cols + id] : 0.0f;
    }
};

/* Block (row, ranks): a warp has an element of A x. */
template <class T>
static __global__ void __launch_bounds__(32 * PLAIN_WARPS) lora_plain_shrink(const __grid_constant__ lora_plain w, rows<T> x)
{
    start_next();
    wait_for_input();
    const uint32_t row = blockIdx.x, j = blockIdx.y * PLAIN_WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    const char *slot = w.slot(row);
    if (!slot || j >= w.rank(slot))
        return;
    const float *a = (const float *)(slot + w.part.a) + (size_t)j * w.n_cols;
    float sum = 0;
    for (uint32_t column = lane; column < w.n_cols; column += 32)
        sum = fmaf(a[column], to_float(*x.at(row, column)), sum);
    for (uint32_t apart = 16; apart; apart /= 2)
        sum += __shfl_xor_sync(~0u, sum, apart);
    if (lane == 0)
        w.t_of(row)[j] = sum;
}

/* Block (row, columns). */
template <class Y>
static __global__ void __launch_bounds__(PLAIN_THREADS) lora_plain_expand(const __grid_constant__ lora_plain w, rows<Y> y)
{
    start_next();
    wait_for_input();
    const uint32_t row = blockIdx.x, n = blockIdx.y * PLAIN_THREADS + threadIdx.x;
    const char *slot = w.slot(row);
    if (!slot || n >= w.part.n_rows)
        return;
    const uint32_t rank = w.rank(slot), kind = *(const uint32_t *)(slot + w.part.head + 8);
    const float *b = (const float *)(slot + w.part.b) + n;
    Y *at = y.at(row, w.part.first_row + n);
    float value = to_float(*at), sum = 0;
    for (uint32_t j = 0; j < rank; j++)
        sum = fmaf(w.element(row, slot, j), b[(size_t)j * w.part.n_rows], sum);
    if (rank)
        value = fmaf(*(const float *)(slot + w.part.head + 4), sum, value);
    if (kind)
        value += lora_bias_of(kind, b[(size_t)w.max_rank * w.part.n_rows], w.base_bias, w.part.first_row + n);
    *at = round_to<Y>(value);
}

#endif
