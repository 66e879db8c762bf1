#include "kv_layout.h"

struct kinds {
    uint32_t n, windows[BATCH_MAX_GROUPS], n_layers[BATCH_MAX_GROUPS];
};

#define MAX_PIECES 16  /* most pieces into which a layer's state may be split to choose the page size */
#define PAGE_ALIGNMENT 256

static bool kinds_count(const struct kv_need *needs, uint32_t n_layers, struct kinds *kinds)
{
    kinds->n = 0;
    for (uint32_t l = 0; l < n_layers; l++) {
        uint32_t k = 0;
        if (needs[l].n_units)
            continue;
        while (k < kinds->n && kinds->windows[k] != needs[l].window)
            k++;
        if (k == BATCH_MAX_GROUPS)
            return false;
        if (k == kinds->n) {
            kinds->windows[k] = needs[l].window;
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

/* Layers in a group: among the sizes that make at most BATCH_MAX_GROUPS groups, the largest with the least padding. */
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

static size_t aligned(size_t size_bytes)
{
    return (size_bytes + PAGE_ALIGNMENT - 1) / PAGE_ALIGNMENT * PAGE_ALIGNMENT;
}

static uint64_t pages_of(const struct kv_need *need, size_t page_bytes)
{
    uint64_t units_a_page = page_bytes / need->unit_bytes;
    return need->n_units ? (need->n_units + units_a_page - 1) / units_a_page : 0;
}

/* Number of pages for the states of all layers. */
static uint64_t state_pages(const struct kv_need *needs, uint32_t n_layers, size_t page_bytes)
{
    uint64_t n = 0;
    for (uint32_t l = 0; l < n_layers; l++)
        n += needs[l].n_units ? pages_of(&needs[l], page_bytes) : 0;
    return n;
}

/* Page size for a model without attention. The candidates split some layer's state into at most MAX_PIECES equal pieces; the
 * largest that takes at most 1/16 more memory than the best one wins. */
static size_t page_of_states(const struct kv_need *needs, uint32_t n_layers, size_t least)
{
    size_t best = 0, fewest_bytes = SIZE_MAX;
    for (int is_choice = 0; is_choice < 2; is_choice++) /* pass 0 finds the least memory, pass 1 chooses */
        for (uint32_t l = 0; l < n_layers; l++)
            for (uint32_t n = 1; n <= MAX_PIECES; n++) {
                size_t size = aligned((needs[l].n_units + n - 1) / n * needs[l].unit_bytes);
                size_t all = size < least ? SIZE_MAX : size * state_pages(needs, n_layers, size);
                if (!is_choice)
                    fewest_bytes = all < fewest_bytes ? all : fewest_bytes;
                else if (all <= fewest_bytes + fewest_bytes / 16 && size > best)
                    best = size;
            }
    return best;
}

/* Enlarges or chooses the page size for the states, and places each layer's state in pages. */
static void lay_states(const struct kv_need *needs, uint32_t n_layers, struct kv_layout *layout, struct kv_place *places)
{
    size_t least = 0;
    for (uint32_t l = 0; l < n_layers; l++) {
        least = needs[l].n_units && needs[l].unit_bytes > least ? needs[l].unit_bytes : least;
        layout->state_bytes += needs[l].n_units * needs[l].unit_bytes;
    }
    if (!layout->n_groups)
        layout->page_bytes = page_of_states(needs, n_layers, least);
    else if (layout->page_bytes < least)
        layout->page_bytes = aligned(least);
    for (uint32_t l = 0; l < n_layers; l++)
        if (needs[l].n_units) {
            places[l] = (struct kv_place){layout->n_groups, layout->n_state_pages};
            layout->n_state_pages += (uint32_t)pages_of(&needs[l], layout->page_bytes);
        }
}

enum rc kv_layout_make(const struct kv_need *needs, uint32_t n_layers, uint32_t block_tokens, size_t layer_bytes,
                       struct kv_layout *layout, struct kv_place *places, struct err *err)
{
    struct kinds kinds;
    if (!n_layers || !block_tokens)
        return err_set(err, RC_UNSUPPORTED, "KV cache: wanted layers and a block size, have %u layers and block_size=%u",
                       n_layers, block_tokens);
    if (!kinds_count(needs, n_layers, &kinds))
        return err_set(err, RC_UNSUPPORTED, "KV cache: wanted at most %d kinds of attention windows, have more",
                       BATCH_MAX_GROUPS);

    uint32_t size = kinds.n ? group_size(&kinds, n_layers) : 0;
    uint32_t first_group[BATCH_MAX_GROUPS], n_placed[BATCH_MAX_GROUPS] = {0};
    *layout = (struct kv_layout){.block_tokens = block_tokens, .layer_bytes = layer_bytes, .page_bytes = size * layer_bytes};
    for (uint32_t k = 0; k < kinds.n; k++) {
        first_group[k] = layout->n_groups;
        for (uint32_t left = kinds.n_layers[k]; left; left -= layout->groups[layout->n_groups++].n_layers)
            layout->groups[layout->n_groups] = (struct kv_group){kinds.windows[k], left < size ? left : size};
    }
    for (uint32_t l = 0; l < n_layers; l++) {
        uint32_t k = 0;
        if (needs[l].n_units)
            continue;
        while (kinds.windows[k] != needs[l].window)
            k++;
        places[l] = (struct kv_place){first_group[k] + n_placed[k] / size, n_placed[k] % size};
        n_placed[k]++;
    }
    lay_states(needs, n_layers, layout, places);
    return RC_OK;
}

double kv_layout_padding(const struct kv_layout *layout)
{
    uint64_t used = 0, page = layout->page_bytes;
    for (uint32_t g = 0; g < layout->n_groups; g++)
        used += layout->groups[g].n_layers * (uint64_t)layout->layer_bytes;
    double attention = layout->n_groups ? 1 - (double)used / (double)(layout->n_groups * page) : 0;
    double states = layout->n_state_pages ? 1 - (double)layout->state_bytes / (double)(layout->n_state_pages * page) : 0;
    return attention > states ? attention : states;
}

uint64_t kv_layout_pages(const struct kv_layout *layout, uint32_t n_tokens, uint32_t chunk_tokens)
{
    uint64_t n_pages = layout->n_state_pages;
    for (uint32_t g = 0; g < layout->n_groups; g++)
        n_pages += kv_group_blocks(layout, g, n_tokens, chunk_tokens);
    return n_pages;
}

uint32_t kv_group_blocks(const struct kv_layout *layout, uint32_t group, uint32_t n_tokens, uint32_t chunk_tokens)
{
    uint64_t block = layout->block_tokens, window = layout->groups[group].window;
    uint64_t all = (n_tokens + block - 1) / block;
    /* The positions that a chunk's rows see, including the chunk, at the worst alignment to block boundaries. */
    uint64_t seen = window ? (window - 1 + chunk_tokens + block - 2) / block + 1 : all;
    return (uint32_t)(seen < all ? seen : all);
}
