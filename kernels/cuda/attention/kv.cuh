/* kv.cuh: the layout of keys and values in a layer's part of a page. rope.cu writes it, attention reads it. The configuration
 * chooses among three layouts, and for int8 whether the device runs the kernels of sm_90a.
 *
 *   tiled   [kv head][K, V][token / 8][head_dim / 64 slabs][token % 8][64], the 16-byte chunk c of a token's 128 bytes at
 *           c ^ (token % 8); for 16-bit pages of the type of activations and heads of 64, 128 or 256 values
 *   bytes   the same in e4m3, or int8 on sm_90a, for 16-bit activations and such heads: slabs have 128 values a token, or all
 *           64 of such a head, with chunk c at c ^ (token % 8 / 2). A chunk has 16 values; value 8 h + i is its byte 2 i + h.
 *           Where a key or value in e4m3 has a NaN, all of the key is NaN, so that a reader finds it in any byte of that.
 *           INT8 has sign and magnitude, and before a head's keys float32 scales, [of keys, of values][token]
 *   plain   keys [kv head][token][head_dim], then values alike; for all else. INT8 has float32 scales behind them, of keys
 *           [kv head][token], then of values alike
 *
 * Tiled or as bytes, a head's keys or values of a page are one run, and runs copied one after the other are an operand of
 * the tensor cores, without bank conflicts. */
#ifndef LLMPY_CUDA_KV_CUH
#define LLMPY_CUDA_KV_CUH

#include "../core/common.cuh"

#include <cuda_fp8.h>
#include <type_traits>

enum kv_layout { KV_TILED = 1, KV_BYTES = 2, KV_PLAIN = 4 };

static inline enum kv_layout kv_layout_of(const struct cuda *cuda, uint32_t dtype, uint32_t head_dim)
{
    if (cuda->dtype == DTYPE_F32 || (head_dim != 64 && head_dim != 128 && head_dim != 256))
        return KV_PLAIN;
    if (dtype == cuda->dtype)
        return KV_TILED;
    return dtype == DTYPE_FP8 || (dtype == DTYPE_I8 && !cuda->is_portable) ? KV_BYTES : KV_PLAIN;
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

/* Bytes: the offset of a token's 16-byte chunk c in a run of keys or values. */
static __device__ __forceinline__ uint32_t kv_byte_chunk(uint32_t head_dim, uint32_t token, uint32_t c)
{
    const uint32_t row = head_dim < 128 ? 64 : 128, turn = head_dim < 128 ? token % 8 / 2 : token % 8;
    return token / 8 * 8 * head_dim + c / 8 * 1024 + token % 8 * row + (c % 8 ^ turn) * 16;
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
    /* Of INT8, plain: the scale of a position's key in its page; its value's lies scales() further on. */
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
    /* Bytes: of a head's scales in a page. */
    __device__ __forceinline__ uint32_t scale_bytes(void) const { return std::is_same_v<C, int8_t> ? 8 * block_tokens : 0; }
    /* Bytes: a head's keys in a page. Its values are tiled_values() further on, its scales scale_bytes() before. */
    __device__ __forceinline__ char *head_in(char *page, uint32_t head) const
    {
        return page + head * (2 * tiled_values() + scale_bytes()) + scale_bytes();
    }
    /* Of INT8, bytes: the scales of a head's keys in a page; those of its values are block_tokens further on. */
    __device__ __forceinline__ float *scales_in(char *page, uint32_t head) const
    {
        return (float *)(head_in(page, head) - scale_bytes());
    }
    /* Bytes: the first of the values from 8 * c on of a position's key. They are 2 bytes apart, and the value's are
     * tiled_values() further on. */
    __device__ __forceinline__ C *bytes_in(char *page, uint32_t position, uint32_t head, uint32_t c) const
    {
        uint32_t token = position & (block_tokens - 1);
        return (C *)head_in(page, head) + kv_byte_chunk(head_dim, token, c / 2) + c % 2;
    }
    /* The value d of a position's key, in a layout that the plain kernel reads. */
    template <enum kv_layout L>
    __device__ __forceinline__ const C *one_in(char *page, uint32_t position, uint32_t head, uint32_t d) const
    {
        if (L == KV_BYTES)
            return bytes_in(page, position, head, d / 8) + d % 8 * 2;
        return key_in(page, position, head) + d;
    }
};

#endif
