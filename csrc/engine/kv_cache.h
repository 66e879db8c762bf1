/* kv_cache.h: how the layers' caches are laid into pages of one pool. Pure functions, called once at load. */
#ifndef LLMPY_KV_CACHE_H
#define LLMPY_KV_CACHE_H

#include "batch.h"

struct kv_place {
    uint32_t group, index; /* the layer lies at page + index * layer_bytes in pages of its group */
};

/* windows[l]: window of layer l, 0 = full attention. Layers of one kind are split into groups of g, g chosen so that the
 * padding is least among those that make at most BATCH_MAX_GROUPS groups, the largest such g. places: [n_layers].
 * RC_UNSUPPORTED when there are more kinds of layers than groups. */
enum rc kv_layout_make(const uint32_t *windows, uint32_t n_layers, uint32_t block_tokens, size_t layer_bytes,
                       struct kv_layout *layout, struct kv_place *places, struct err *err);
/* Pages that one sequence of n_tokens occupies at most, a step of chunk_tokens included. */
uint64_t kv_layout_pages(const struct kv_layout *layout, uint32_t n_tokens, uint32_t chunk_tokens);
/* The same for one group. */
uint32_t kv_group_blocks(const struct kv_layout *layout, uint32_t group, uint32_t n_tokens, uint32_t chunk_tokens);

#endif
