/* heads.cuh: per-head rms_norm and rope of a row's heads, 8 values a lane, a head in a group of lanes: for qkv as a separate
 * launch (rope.cu), or inside attention of few sequences (attention_decode.cuh). Every step rounds to the type of activations,
 * as the separate operations do. */
#ifndef LLMPY_CUDA_HEADS_CUH
#define LLMPY_CUDA_HEADS_CUH

#include "../core/eight.cuh"
#include "../norm/head_norm.cuh"
#include "kv.cuh"

template <class T> struct qkv_rows {
    rows<T> q, k, v;
    const float *q_norm, *k_norm; /* or NULL */
    const float2 *table;          /* or NULL */
    float eps;
    uint32_t n_freqs, norm_stride;
    bool interleaved;
    explicit qkv_rows(const struct qkv_args &args)
        : q(args.rope.q), k(args.write.k), v(args.write.v), q_norm(args.q_norm), k_norm(args.k_norm),
          table((const float2 *)args.rope.table), eps(args.eps), n_freqs(args.rope.table ? args.rope.n_freqs : 0),
          norm_stride(args.norm_stride), interleaved(args.rope.interleaved)
    {
    }
};

/* True if rows of 16-bit activations can be stored in eights in pages of their type, or of e4m3 in the layout `bytes`. */
static inline bool heads_fit(const struct cuda *cuda, const struct qkv_args *args)
{
    const struct rope_args *rope = &args->rope;
    const struct kv_write_args *write = &args->write;
    bool turns_eights = !rope->table || rope->interleaved || rope->n_freqs % 8 == 0;
    bool takes_eights = write->kv.dtype == cuda->dtype ||
                        kv_layout_of(cuda, write->kv.dtype, write->kv.head_dim) == KV_BYTES;
    return cuda->dtype != DTYPE_F32 && takes_eights && write->kv.head_dim % 8 == 0 &&
           write->kv.head_dim <= HEAD_NORM_MAX && turns_eights && has_eights<__half>(rope->q) && has_eights<__half>(write->k) &&
           has_eights<__half>(write->v) && write->kv.page_bytes % 16 == 0 && write->kv.layer_offset % 16 == 0;
}

/* Reads from the L2 cache, because the L1 cache may hold older data. */
template <class T> static __device__ __forceinline__ eight<T> fresh_eight(const T *from)
{
    eight<T> x;
    *(uint4 *)&x = __ldcg((const uint4 *)from);
    return x;
}

/* The turns of the lane's 8 values, which begin at `first`, in row r. */
template <class T>
static __device__ __forceinline__ void load_turns(const struct qkv_rows<T> &x, uint32_t r, uint32_t first, float2 (&turns)[8])
{
    const float2 *from = x.table + (size_t)r * x.n_freqs;
#pragma unroll
    for (uint32_t i = 0; i < 8; i++)
        turns[i] = make_float2(0, 0);
    if (!x.table || first >= 2 * x.n_freqs)
        return;
    if (x.interleaved) {
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            if (first / 2 + i < x.n_freqs)
                turns[i] = __ldcg(from + first / 2 + i);
        return;
    }
    from += first < x.n_freqs ? first : first - x.n_freqs; /* whole eights, as heads_fit says */
#pragma unroll
    for (uint32_t i = 0; i < 8; i += 2)
        *(float4 *)&turns[i] = __ldcg((const float4 *)(from + i));
}

static __device__ __forceinline__ void load_weights(const float *norm, uint32_t first, float (&weights)[8])
{
    const float4 *from = (const float4 *)(norm + first);
    *(float4 *)weights = from[0];
    *(float4 *)(weights + 4) = from[1];
}

/* Norms the head's 8 * LANES values, or the first dim of them if the others are zeros. */
template <uint32_t LANES, class T>
static __device__ __forceinline__ void norm_eight(eight<T> *x, const float (&weights)[8], uint32_t dim, float eps)
{
    float wide[8];
    for (uint32_t i = 0; i < 8; i++)
        wide[i] = to_float(x->values[i]);
    float scale = norm_scale(head_squares<LANES>(wide), dim, eps);
    for (uint32_t i = 0; i < 8; i++)
        x->values[i] = round_to<T>(weights[i] * (wide[i] * scale));
}

/* Rotates the lane's 8 values. The other half of the pairs is n_freqs / 8 lanes away, or in the same lane. */
template <uint32_t LANES, class T>
static __device__ __forceinline__ void turn_eight(eight<T> *x, const float2 (&turns)[8], uint32_t n_freqs, bool interleaved)
{
    uint32_t lane = threadIdx.x % LANES, first = lane * 8, apart = n_freqs / 8;
    if (interleaved) {
        for (uint32_t i = 0; i < 4; i++) {
            float a = to_float(x->values[2 * i]), b = to_float(x->values[2 * i + 1]);
            if (first / 2 + i < n_freqs) {
                x->values[2 * i] = round_to<T>(a * turns[i].x - b * turns[i].y);
                x->values[2 * i + 1] = round_to<T>(b * turns[i].x + a * turns[i].y);
            }
        }
        return;
    }
    bool is_first = first < n_freqs;
    uint32_t from = is_first ? lane + apart : lane - apart;
    eight<T> other;
    uint4 mine = *(const uint4 *)x;
    *(uint4 *)&other = make_uint4(__shfl_sync(~0u, mine.x, from, LANES), __shfl_sync(~0u, mine.y, from, LANES),
                                  __shfl_sync(~0u, mine.z, from, LANES), __shfl_sync(~0u, mine.w, from, LANES));
    for (uint32_t i = 0; i < 8 && first < 2 * n_freqs; i++) {
        float along = to_float(x->values[i]) * turns[i].x, across = to_float(other.values[i]) * turns[i].y;
        x->values[i] = round_to<T>(is_first ? along - across : along + across);
    }
}

#endif
