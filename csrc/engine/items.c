#include "items.h"

#include <string.h>

/* ---- copies ------------------------------------------------------------------------------------------------------------ */

static const void *lay_copy(struct carver *c, const void *source, size_t n_bytes)
{
    void *copy = carve(c, n_bytes, 1);
    return copy && n_bytes ? memcpy(copy, source, n_bytes) : copy;
}

static void lay_piece(struct carver *c, const struct item_piece *from, struct item_piece *to)
{
    struct item_piece piece = *from;
    piece.bytes = lay_copy(c, from->bytes, from->n_bytes);
    for (uint32_t i = 0; i < PIECE_TABLES; i++)
        piece.tables[i].values = lay_copy(c, from->tables[i].values, from->tables[i].n * sizeof *from->tables[i].values);
    if (to)
        *to = piece;
}

void items_lay(struct carver *c, const struct request_spec *spec, struct request *r)
{
    struct prompt_item *items;
    int32_t *positions;
    CARVE(c, items, spec->n_items);
    CARVE(c, r->features, spec->n_items ? spec->prompt.n : 0);
    CARVE(c, positions, spec->rope_positions.n);
    for (uint32_t i = 0; i < spec->n_items; i++) {
        struct item_piece *pieces = carve(c, spec->items[i].n_pieces, sizeof *pieces);
        for (uint32_t p = 0; p < spec->items[i].n_pieces; p++)
            lay_piece(c, &spec->items[i].pieces[p], c->base ? &pieces[p] : NULL);
        if (c->base) {
            items[i] = spec->items[i];
            items[i].pieces = pieces;
        }
    }
    r->spec.items = items;
    r->spec.rope_positions.ids = positions;
}

void items_fill(struct request *r, const struct request_spec *spec)
{
    if (spec->rope_positions.n)
        memcpy((int32_t *)r->spec.rope_positions.ids, spec->rope_positions.ids, spec->rope_positions.n * sizeof(int32_t));
    if (spec->n_items)
        items_number(spec->prompt.ids, spec->prompt.n, spec->items, spec->n_items, r->context->config->runner.feature_id,
                     r->features);
}

/* Tokens of the prompt that see each other if a model's prompts do; those that are scored come behind them. */
static uint32_t n_of_prefix(const struct request_spec *spec)
{
    return spec->is_score ? spec->score_start : spec->prompt.n;
}

bool items_visible_ends(const struct request *r, uint32_t first, uint32_t n, int32_t *ends)
{
    const struct request_spec *spec = &r->spec;
    return items_list_ends(r->context->config->runner.spans, spec->n_items ? r->features : NULL, spec->prompt.n,
                           n_of_prefix(spec), first, n, ends);
}

uint32_t items_cut(const struct request *r, uint32_t first, uint32_t n)
{
    const struct request_spec *spec = &r->spec;
    const int32_t *features = spec->n_items ? r->features : NULL;
    while (n && items_continue(r->context->config->runner.spans, features, spec->prompt.n, n_of_prefix(spec), first + n))
        n--;
    return n;
}

struct hash items_root(const struct request *r, struct hash root)
{
    if (r->context->config->runner.spans != SPANS_OF_PROMPT)
        return root;
    root = hash_bytes(&root, r->spec.prompt.ids, n_of_prefix(&r->spec) * sizeof *r->spec.prompt.ids);
    for (uint32_t i = 0; i < r->spec.n_items; i++)
        root = hash_bytes(&root, &r->spec.items[i].content, sizeof r->spec.items[i].content);
    return root;
}

int32_t items_position(const struct request *r, uint32_t axis, uint32_t position)
{
    uint32_t n = r->spec.prompt.n;
    bool is_given = r->spec.rope_positions.n && position < n;
    return is_given ? r->spec.rope_positions.ids[(size_t)axis * n + position] : (int32_t)position + r->spec.rope_delta;
}

/* ---- keys -------------------------------------------------------------------------------------------------------------- */

static bool overlaps(const struct prompt_item *item, uint32_t first, uint32_t n_tokens)
{
    return item->first < first + n_tokens && item->first + item->n_tokens > first;
}

uint32_t items_contents(const struct request_spec *spec, uint32_t first, uint32_t n_tokens, struct hash *found, uint32_t most)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < spec->n_items && n < most; i++)
        if (overlaps(&spec->items[i], first, n_tokens))
            found[n++] = spec->items[i].content;
    return n;
}

size_t items_key(const struct request_spec *spec, uint32_t first, uint32_t block_tokens, char *bytes)
{
    size_t n_bytes = 0;
    for (uint32_t i = 0; i < spec->n_items; i++) {
        const struct prompt_item *item = &spec->items[i];
        int64_t offset = (int64_t)first - item->first;
        if (!overlaps(item, first, block_tokens))
            continue;
        memcpy(bytes + n_bytes, &item->content, sizeof item->content);
        memcpy(bytes + n_bytes + sizeof item->content, &offset, sizeof offset);
        n_bytes += ITEM_KEY_BYTES;
    }
    return n_bytes;
}

/* ---- checks ------------------------------------------------------------------------------------------------------------ */

#define REFUSE(...)                                       \
    do {                                                  \
        err_set(err, RC_INVALID, __VA_ARGS__);            \
        err_name(err, "multi_modal_data", NULL);          \
        return RC_INVALID;                                \
    } while (0)

static enum rc check_item(const struct engine_config *config, const struct request_spec *spec, uint32_t i, struct err *err)
{
    const struct prompt_item *item = &spec->items[i];
    uint32_t n_placeholders = 0, before = i ? spec->items[i - 1].first + spec->items[i - 1].n_tokens : 0;
    uint64_t n_features = 0;
    if (item->first < before || !item->n_tokens || (uint64_t)item->first + item->n_tokens > spec->prompt.n)
        REFUSE("image %u: wanted a range of the prompt's %u tokens behind other images, have %u tokens from %u on", i,
               spec->prompt.n, item->n_tokens, item->first);
    for (uint32_t at = item->first; at < item->first + item->n_tokens; at++)
        n_placeholders += (uint32_t)spec->prompt.ids[at] == config->runner.feature_id;
    for (uint32_t p = 0; p < item->n_pieces; p++) {
        enum rc rc = config->runner.check_piece(config->runner.ctx, &item->pieces[p], err);
        if (rc)
            return rc;
        n_features += item->pieces[p].n_features;
        for (uint32_t f = 0; f < item->pieces[p].tables[PIECE_PLACES].n; f++)
            if ((uint32_t)item->pieces[p].tables[PIECE_PLACES].values[f] >= item->n_features)
                REFUSE("image %u: wanted places of its %u features, have %d", i, item->n_features,
                       item->pieces[p].tables[PIECE_PLACES].values[f]);
    }
    if (n_features != item->n_features || n_placeholders != n_features || !n_features)
        REFUSE("image %u: wanted %llu placeholders for its features, have %u", i, (unsigned long long)n_features,
               n_placeholders);
    if (config->runner.spans && n_features > config->max_num_batched_tokens)
        REFUSE("image %u: wanted at most max_num_batched_tokens=%u features, because they are computed in one step, have %llu; "
               "raise the option", i, config->max_num_batched_tokens, (unsigned long long)n_features);
    if ((n_features + 15) / 16 > config->runner.n_features / 16)
        REFUSE("image %u: wanted at most encoder_cache_tokens=%u features, have %llu; raise the option or send a smaller image",
               i, config->runner.n_features, (unsigned long long)n_features);
    return RC_OK;
}

/* All of a prompt whose tokens see each other is computed in one step. */
static enum rc check_prefix(const struct engine_config *config, const struct request_spec *spec, struct err *err)
{
    uint32_t n = n_of_prefix(spec);
    uint64_t n_pages = 0;
    if (config->runner.spans != SPANS_OF_PROMPT)
        return RC_OK;
    for (uint32_t i = 0; i < spec->n_items; i++)
        n_pages += ((uint64_t)spec->items[i].n_features + 15) / 16;
    if (n > config->max_num_batched_tokens)
        REFUSE("prompt: wanted at most max_num_batched_tokens=%u tokens, because they see each other and are computed in one "
               "step, have %u; raise the option", config->max_num_batched_tokens, n);
    if (n_pages > config->runner.n_features / 16)
        REFUSE("images: wanted at most encoder_cache_tokens=%u features, because a prompt is computed in one step, have about "
               "%llu; raise the option", config->runner.n_features, (unsigned long long)n_pages * 16);
    return RC_OK;
}

enum rc items_check(const struct engine_config *config, const struct request_spec *spec, struct err *err)
{
    enum rc rc = check_prefix(config, spec, err);
    if ((spec->n_items || spec->rope_positions.n) && !config->runner.n_features)
        REFUSE("images: the model takes none");
    if (spec->rope_positions.n && spec->rope_positions.n != (uint64_t)config->runner.n_axes * spec->prompt.n)
        REFUSE("rope positions: wanted %u axes of %u tokens, have %u numbers", config->runner.n_axes, spec->prompt.n,
               spec->rope_positions.n);
    for (uint32_t i = 0; i < spec->n_items && !rc; i++)
        rc = check_item(config, spec, i, err);
    return rc;
}
