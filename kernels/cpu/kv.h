/* kv.h: the CPU backend's layout of keys and values in a page. A layer's part of a page is [kv head][group of 16 tokens]. A
 * group is keys [head_dim][16 tokens], then values [16 tokens][value_dim], value_dim = head_dim rounded up to 16 (the rest
 * holds zeros). So a vector of keys is 16 tokens wide, a vector of values is 16 columns wide, and neither product of attention
 * sums across lanes. Pages of 16, 32 and 64 tokens hold the same groups. A group of int8 ends with 16 scales of keys and 16 of
 * values, float32. Latent attention stores one run of values a token,
 * token after token, and has no heads (n_kv_heads 0). */
#ifndef LLMPY_KV_H
#define LLMPY_KV_H

#include "../backend.h"

#define KV_GROUP 16u
#define LATENT_MAX_DIM 640u /* of a latent and its rope key together */

static inline uint32_t kv_value_dim(uint32_t head_dim)
{
    return (head_dim + 15) / 16 * 16;
}

/* Bytes of a key's or value's element. 0: pages do not hold the type. */
static inline size_t kv_item_bytes(uint32_t dtype)
{
    switch (dtype) {
    case DTYPE_F32: return 4;
    case DTYPE_F16:
    case DTYPE_BF16: return 2;
    case DTYPE_FP8:
    case DTYPE_I8: return 1;
    default: return 0;
    }
}

static inline bool kv_has_scales(uint32_t dtype)
{
    return dtype == DTYPE_I8;
}

/* Where the scales of a group begin. */
static inline size_t kv_scales_at(uint32_t head_dim, uint32_t dtype)
{
    return (size_t)KV_GROUP * (head_dim + kv_value_dim(head_dim)) * kv_item_bytes(dtype);
}

static inline size_t kv_group_bytes(uint32_t head_dim, uint32_t dtype)
{
    return kv_scales_at(head_dim, dtype) + (kv_has_scales(dtype) ? 2 * KV_GROUP * sizeof(float) : 0);
}

/* Bytes of one layer in a page, or 0 if the kernels do not support the type or size. */
static inline size_t kv_page_layer_bytes(uint32_t n_kv_heads, uint32_t head_dim, uint32_t dtype, uint32_t block_tokens)
{
    bool is_block = block_tokens && block_tokens % KV_GROUP == 0, is_type = kv_item_bytes(dtype) != 0;
    bool is_latent_type = kv_item_bytes(dtype) > 1;
    if (!n_kv_heads && is_latent_type && is_block && head_dim && head_dim <= LATENT_MAX_DIM) /* rows of latent attention */
        return (size_t)block_tokens * head_dim * kv_item_bytes(dtype);
    if (!is_type || !is_block || !head_dim || head_dim > 256)
        return 0;
    return (size_t)n_kv_heads * (block_tokens / KV_GROUP) * kv_group_bytes(head_dim, dtype);
}

/* The group of one kv head that holds a position of a sequence. */
static inline char *kv_group(const struct kv_view *kv, uint32_t block_tokens, uint32_t seq, uint32_t position, uint32_t head)
{
    size_t page = (size_t)kv->table[(size_t)seq * kv->table_stride + position / block_tokens];
    size_t group = (size_t)head * (block_tokens / KV_GROUP) + position % block_tokens / KV_GROUP;
    return (char *)kv->pool + page * kv->page_bytes + kv->layer_offset + group * kv_group_bytes(kv->head_dim, kv->dtype);
}

#endif
