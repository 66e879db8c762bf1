/* kv.cuh: how the CUDA backend lays keys and values into a page. A layer's part of a page is keys [kv head][token][head_dim],
 * then values alike, so that a head's tokens of a page are one run of bytes. rope.cu writes it, attention.cu reads it. */
#ifndef LLMPY_CUDA_KV_CUH
#define LLMPY_CUDA_KV_CUH

#include "common.cuh"

/* What a kernel needs of a layer's cache. */
template <class C> struct cache {
    char *layer;             /* of page 0 */
    size_t page_bytes;
    const int32_t *table;
    uint32_t table_stride, n_kv_heads, head_dim, block_tokens;
    cache(const struct kv_view &kv, uint32_t tokens)
        : layer((char *)kv.pool + kv.layer_offset), page_bytes(kv.page_bytes), table(kv.table), table_stride(kv.table_stride),
          n_kv_heads(kv.n_kv_heads), head_dim(kv.head_dim), block_tokens(tokens)
    {
    }
    /* Key of a position of a sequence; its value lies values() further on. */
    __device__ __forceinline__ C *key(uint32_t seq, uint32_t position, uint32_t head) const
    {
        size_t page = (size_t)table[(size_t)seq * table_stride + position / block_tokens];
        size_t token = (size_t)head * block_tokens + position % block_tokens;
        return (C *)(layer + page * page_bytes) + token * head_dim;
    }
    __device__ __forceinline__ size_t values() const { return (size_t)n_kv_heads * block_tokens * head_dim; }
};

#endif
