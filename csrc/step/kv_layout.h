/* kv_layout.h: how the layers' caches are placed in pages of one pool. Pure functions; the layout is made once, at load. */
#ifndef LLMPY_KV_LAYOUT_H
#define LLMPY_KV_LAYOUT_H

#include "../base/status.h"

#include <stdbool.h>
#include <stddef.h>

#define BATCH_MAX_GROUPS 16

/* Where the layers that need a cache lie in pages. Made from the program at load, then constant. */
struct kv_group {
    uint32_t window;       /* 0: full attention; else a row sees its last `window` positions, itself included */
    uint32_t n_layers;
};
struct kv_layout {
    uint32_t n_groups;
    struct kv_group groups[BATCH_MAX_GROUPS];
    uint32_t block_tokens;
    size_t layer_bytes;    /* bytes of a page that one attention layer takes */
    size_t page_bytes;     /* at least layer_bytes times the number of layers of the largest group */
    uint32_t n_state_pages; /* pages of one sequence's recurrent state, listed in the table behind the groups'; 0: no state */
    size_t state_bytes;     /* bytes used in those pages */
};

/* Number of page tables: one per group of attention layers, and one for recurrent states if the model has any. */
static inline uint32_t kv_layout_n_tables(const struct kv_layout *layout)
{
    return layout->n_groups + (layout->n_state_pages != 0);
}

/* Number of entries in a row of the page tables. */
static inline uint32_t kv_layout_stride(const struct kv_layout *layout, uint32_t max_model_len)
{
    uint32_t n_blocks = (max_model_len + layout->block_tokens - 1) / layout->block_tokens;
    return n_blocks > layout->n_state_pages ? n_blocks : layout->n_state_pages;
}

/* What a layer keeps of a sequence: keys and values of each position, or a recurrent state of n_units units. A unit is never
 * split between pages. */
struct kv_need {
    uint32_t window;     /* attention window; 0: full attention */
    uint32_t n_units;    /* 0: an attention layer */
    size_t unit_bytes;
};

struct kv_place {
    uint32_t group, index; /* attention: the layer lies at page + index * layer_bytes in pages of its group;
                            * state: index is the first entry of the layer in the states' table */
};

/* Makes the layout. Layers with the same window are split into groups of g layers; g is the largest number with the least
 * padding that makes at most BATCH_MAX_GROUPS groups. A page holds g layers and at least one unit of a state. Without attention
 * layers, the page size is chosen so that states fill pages well. layer_bytes: bytes of an attention layer in a page. places:
 * [n_layers]. RC_UNSUPPORTED: there are more windows than BATCH_MAX_GROUPS. */
enum rc kv_layout_make(const struct kv_need *needs, uint32_t n_layers, uint32_t block_tokens, size_t layer_bytes,
                       struct kv_layout *layout, struct kv_place *places, struct err *err);
/* The larger of two shares: of attention pages that is left empty, and of state pages that is left empty. */
double kv_layout_padding(const struct kv_layout *layout);
/* The most pages that one sequence of n_tokens occupies, including those of a step of chunk_tokens. */
uint64_t kv_layout_pages(const struct kv_layout *layout, uint32_t n_tokens, uint32_t chunk_tokens);
/* The same for one group. */
uint32_t kv_group_blocks(const struct kv_layout *layout, uint32_t group, uint32_t n_tokens, uint32_t chunk_tokens);

#endif
