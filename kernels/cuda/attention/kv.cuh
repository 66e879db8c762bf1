/* kv.cuh: the layout of keys and values in a layer's part of a page. rope.cu writes it, attention reads it. The configuration
 * alone chooses between two layouts.
 *
 *   tiled   [kv head][K, V][token / 8][head_dim / 64 slabs][token % 8][64], the 16-byte chunk c of a token's 128 bytes at
 *           c ^ (token % 8); for 16-bit pages of the type of activations and heads of 64, 128 or 256 values
 *   plain   keys [kv head][token][head_dim], then values alike; for all else. INT8 has float32 scales behind them, of keys
 *           [kv head][token], then of values alike
 *
 * Tiled, a head's keys or values of a page are one run of bytes, and runs copied one after the other are an operand of the
 * tensor cores, without bank conflicts. */
#ifndef LLMPY_CUDA_KV_CUH
#define LLMPY_CUDA_KV_CUH

#include "../core/common.cuh"

#include <cuda_fp8.h>

static inline bool kv_is_tiled(const struct cuda *cuda, uint32_t dtype, uint32_t head_dim)
{
    return dtype == cuda->dtype && dtype != DTYPE_F32 && (head_dim == 64 || head_dim == 128 || head_dim == 256);
}

/* Calls f with a value of the type of pages. */
template <class F> static void visit_cached(uint32_t dtype, F f)
{
    if (dtype == DTYPE_FP8)
        f(__nv_fp8_e4m3());
    else if (dtype == DTYPE_I8)
        f(int8_t());
    else
        visit_type(dtype, f);
}

/* Bytes of an element in a page; 0: pages do not hold the type. */
static inline size_t kv_item_bytes(uint32_t dtype)
{
    if (dtype == DTYPE_FP8 || dtype == DTYPE_I8)
        return 1;
    return dtype == DTYPE_F32 ? 4 : dtype == DTYPE_F16 || dtype == DTYPE_BF16 ? 2 : 0;
}

static inline size_t kv_scale_bytes(uint32_t dtype)
{
    return dtype == DTYPE_I8 ? sizeof(float) : 0;
}

static __device__ __forceinline__ float to_float(__nv_fp8_e4m3 x)
{
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(x.__x, __NV_E4M3)));
}
static __device__ __forceinline__ float to_float(int8_t x) { return (float)x; }

/* To nearest even, larger magnitudes to 448; a NaN stays one. */
template <> __device__ __forceinline__ __nv_fp8_e4m3 round_to<__nv_fp8_e4m3>(float x)
{
    __nv_fp8_e4m3 rounded;
    rounded.__x = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
    return rounded;
}
template <> __device__ __forceinline__ int8_t round_to<int8_t>(float x)
{
    return (int8_t)__float2int_rn(fmaxf(fminf(x, 127.0f), -127.0f));
}

/* A layer's cache, as an argument of kernels. */
template <class C> struct cache {
    char *layer;             /* of page 0 */
    size_t page_bytes;
    const int32_t *table;
    uint32_t table_stride, n_kv_heads, head_dim;
    uint32_t block_tokens, block_shift; /* a power of two and its exponent */
    cache(const struct kv_view &kv, uint32_t tokens)
        : layer((char *)kv.pool + kv.layer_offset), page_bytes(kv.page_bytes), table(kv.table), table_stride(kv.table_stride),
          n_kv_heads(kv.n_kv_heads), head_dim(kv.head_dim), block_tokens(tokens), block_shift(__builtin_ctz(tokens))
    {
    }
    __device__ __forceinline__ char *page_of(uint32_t seq, uint32_t position) const
    {
        return layer + (size_t)table[(size_t)seq * table_stride + (position >> block_shift)] * page_bytes;
    }
    /* Plain: the key of a position in its page; its value lies values() further on. */
    __device__ __forceinline__ C *key_in(char *page, uint32_t position, uint32_t head) const
    {
        return (C *)page + ((size_t)head * block_tokens + (position & (block_tokens - 1))) * head_dim;
    }
    __device__ __forceinline__ C *key(uint32_t seq, uint32_t position, uint32_t head) const
    {
        return key_in(page_of(seq, position), position, head);
    }
    __device__ __forceinline__ size_t values() const { return (size_t)n_kv_heads * block_tokens * head_dim; }
    /* Of INT8: the scale of a position's key in its page; its value's lies scales() further on. */
    __device__ __forceinline__ float *scale_in(char *page, uint32_t position, uint32_t head) const
    {
        return (float *)(page + 2 * values()) + (size_t)head * block_tokens + (position & (block_tokens - 1));
    }
    __device__ __forceinline__ size_t scales() const { return (size_t)n_kv_heads * block_tokens; }
    /* Tiled: the 8 values from 8 * c on of a position's key. The value's are tiled_values() further on. */
    __device__ __forceinline__ C *tiled_in(char *page, uint32_t position, uint32_t head, uint32_t c) const
    {
        uint32_t token = position & (block_tokens - 1), slab = c / 8, chunk = (c % 8) ^ (token % 8);
        size_t row = (size_t)head * 2 * block_tokens + token / 8 * 8;
        return (C *)page + row * head_dim + (slab * 8 + token % 8) * 64 + chunk * 8;
    }
    __device__ __forceinline__ size_t tiled_values() const { return (size_t)block_tokens * head_dim; }
};

#endif
