#include "kv_cache.h"

struct kinds {
    uint32_t n, windows[BATCH_MAX_GROUPS], n_layers[BATCH_MAX_GROUPS];
};

static bool kinds_count(const uint32_t *windows, uint32_t n_layers, struct kinds *kinds)
{
    kinds->n = 0;
    for (uint32_t l = 0; l < n_layers; l++) {
        uint32_t k = 0;
        while (k < kinds->n && kinds->windows[k] != windows[l])
            k++;
        if (k == BATCH_MAX_GROUPS)
            return false;
        if (k == kinds->n) {
            kinds->windows[k] = windows[l];
            kinds->n_layers[k] = 0;
            kinds->n++;
        }
        kinds->n_layers[k]++;
    }
    return true;
}

static uint32_t groups_needed(const struct kinds *kinds, uint32_t size)
{
    uint32_t n = 0;
    for (uint32_t k = 0; k < kinds->n; k++)
        n += (kinds->n_layers[k] + size - 1) / size;
    return n;
}

/* The number of layers in a group: least padding among the sizes that make few enough groups, the largest such. */
static uint32_t group_size(const struct kinds *kinds, uint32_t n_layers)
{
    uint32_t best = 0, best_padded = UINT32_MAX;
    for (uint32_t size = 1; size <= n_layers; size++) {
        uint32_t n_groups = groups_needed(kinds, size);
        if (n_groups <= BATCH_MAX_GROUPS && n_groups * size <= best_padded) {
            best_padded = n_groups * size;
            best = size;
        }
    }
    return best;
}

enum rc kv_layout_make(const uint32_t *windows, uint32_t n_layers, uint32_t block_tokens, size_t layer_bytes,
                       struct kv_layout *layout, struct kv_place *places, struct err *err)
{
    struct kinds kinds;
    if (!n_layers || !block_tokens)
        return err_set(err, RC_UNSUPPORTED, "KV cache: wanted layers and a block size, have %u layers and block_size=%u",
                       n_layers, block_tokens);
    if (!kinds_count(windows, n_layers, &kinds))
        return err_set(err, RC_UNSUPPORTED, "KV cache: wanted at most %d kinds of attention windows, have more",
                       BATCH_MAX_GROUPS);

    uint32_t size = group_size(&kinds, n_layers);
    uint32_t first_group[BATCH_MAX_GROUPS], n_placed[BATCH_MAX_GROUPS] = {0};
    *layout = (struct kv_layout){.block_tokens = block_tokens, .layer_bytes = layer_bytes, .page_bytes = size * layer_bytes};
    for (uint32_t k = 0; k < kinds.n; k++) {
        first_group[k] = layout->n_groups;
        for (uint32_t left = kinds.n_layers[k]; left; left -= layout->groups[layout->n_groups++].n_layers)
            layout->groups[layout->n_groups] = (struct kv_group){kinds.windows[k], left < size ? left : size};
    }
    for (uint32_t l = 0; l < n_layers; l++) {
        uint32_t k = 0;
        while (kinds.windows[k] != windows[l])
            k++;
        places[l] = (struct kv_place){first_group[k] + n_placed[k] / size, n_placed[k] % size};
        n_placed[k]++;
    }
    return RC_OK;
}

uint64_t kv_layout_pages(const struct kv_layout *layout, uint32_t n_tokens, uint32_t chunk_tokens)
{
    uint64_t n_pages = 0;
    for (uint32_t g = 0; g < layout->n_groups; g++)
        n_pages += kv_group_blocks(layout, g, n_tokens, chunk_tokens);
    return n_pages;
}

uint32_t kv_group_blocks(const struct kv_layout *layout, uint32_t group, uint32_t n_tokens, uint32_t chunk_tokens)
{
    uint64_t block = layout->block_tokens, window = layout->groups[group].window;
    uint64_t all = (n_tokens + block - 1) / block;
    /* The keys that a chunk's rows see, plus the chunk, at the worst place against the block boundaries. */
    uint64_t seen = window ? (window - 1 + chunk_tokens + block - 2) / block + 1 : all;
    return (uint32_t)(seen < all ? seen : all);
}
