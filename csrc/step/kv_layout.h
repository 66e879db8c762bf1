/* kv_layout.h: how the layers' caches are laid into pages of one pool. Pure functions, called once at load. */
#ifndef LLMPY_KV_LAYOUT_H
#define LLMPY_KV_LAYOUT_H

#include "../base/status.h"

#include <stdbool.h>
#include <stddef.h>

#define BATCH_MAX_GROUPS 16

/* How the layers that need a cache are laid into pages; made from the program at load, then constant. */
struct kv_group {
    uint32_t window;       /* 0: full attention; else a row sees its last `window` positions, itself included */
    uint32_t n_layers;
};
struct kv_layout {
    uint32_t n_groups;
    struct kv_group groups[BATCH_MAX_GROUPS];
    uint32_t block_tokens;
    size_t layer_bytes;    /* one layer's part of a page */
    size_t page_bytes;     /* at least layer_bytes times the most layers of a group */
    uint32_t n_state_pages; /* of one sequence's recurrent state: entries of the table behind the groups'; 0: none */
    size_t state_bytes;     /* what is used of them */
};

/* Groups of attention layers, and the table of recurrent states. */
static inline uint32_t kv_layout_n_tables(const struct kv_layout *layout)
{
    return layout->n_groups + (layout->n_state_pages != 0);
}

/* Entries of a row of the tables. */
static inline uint32_t kv_layout_stride(const struct kv_layout *layout, uint32_t max_model_len)
{
    uint32_t n_blocks = (max_model_len + layout->block_tokens - 1) / layout->block_tokens;
    return n_blocks > layout->n_state_pages ? n_blocks : layout->n_state_pages;
}

/* What a layer keeps of a sequence: keys and values of each position, or a recurrent state of n_units pieces, of which none is
 * cut. */
struct kv_need {
    uint32_t window;     /* of attention; 0: full */
    uint32_t n_units;    /* 0: attention */
    size_t unit_bytes;
};

struct kv_place {
    uint32_t group, index; /* the layer lies at page + index * layer_bytes in pages of its group; a state: its first entry */
};

/* Layers of one kind of attention are split into groups of g, g chosen so that the padding is least among those that make at
 * most BATCH_MAX_GROUPS groups, the largest such g. A page holds g layers, or one piece of a state where that is more;
 * without attention it is cut so that states fill it best. layer_bytes: of an attention layer in a page. places: [n_layers].
 * RC_UNSUPPORTED when there are more kinds of layers than groups. */
enum rc kv_layout_make(const struct kv_need *needs, uint32_t n_layers, uint32_t block_tokens, size_t layer_bytes,
                       struct kv_layout *layout, struct kv_place *places, struct err *err);
/* The share of their pages that attention or states leave empty, whichever is more. */
double kv_layout_padding(const struct kv_layout *layout);
/* Pages that one sequence of n_tokens occupies at most, a step of chunk_tokens included. */
uint64_t kv_layout_pages(const struct kv_layout *layout, uint32_t n_tokens, uint32_t chunk_tokens);
/* The same for one group. */
uint32_t kv_group_blocks(const struct kv_layout *layout, uint32_t group, uint32_t n_tokens, uint32_t chunk_tokens);

#endif
