#include "tap_images.h"

#include "../base/mem.h"

static uint32_t most_piece_rows(const struct tap_prompt *prompt)
{
    uint32_t most = 1;
    for (uint32_t i = 0; i < prompt->n_items; i++)
        for (uint32_t p = 0; p < prompt->items[i].n_pieces; p++)
            most = prompt->items[i].pieces[p].n_rows > most ? prompt->items[i].pieces[p].n_rows : most;
    return most;
}

/* Numbers the features of all images one after another, and lists where the tower puts them: in this order. */
static void list_features(struct tap_images *images, const struct tap_prompt *prompt)
{
    int32_t *features = images->features;
    uint32_t n = 0;
    for (uint32_t i = 0; i < prompt->n_items; n += prompt->items[i++].n_features) {
        images->batch.encodings[i] = (struct encoding){&prompt->items[i], n};
        for (uint32_t at = prompt->items[i].first; at < prompt->items[i].first + prompt->items[i].n_tokens; at++)
            features[at] += features[at] < 0 ? 0 : (int32_t)n;
    }
    for (uint32_t i = 0; i < n; i++)
        images->batch.feature_rows[i] = (int32_t)i;
}

enum rc tap_images_open(struct tap_images *images, struct model *m, const struct tap_prompt *prompt, uint32_t n_rows,
                        struct err *err)
{
    const struct program *p = m->program;
    uint32_t n_features = 1; /* room is never empty */
    if (!p->tower || (!prompt->n_items && program_spans(p) != SPANS_OF_PROMPT))
        return RC_OK;
    for (uint32_t i = 0; i < prompt->n_items; i++)
        n_features += prompt->items[i].n_features;
    images->features = mem_calloc(prompt->n_tokens, sizeof *images->features);
    if (!images->features)
        return err_set(err, RC_MEMORY, "tap: out of memory");
    m->tower = NULL;
    m->options.max_num_batched_tokens = images->batch.max_rows = n_rows;
    m->options.max_encoder_rows = most_piece_rows(prompt);
    m->options.encoder_cache_tokens = n_features;
    enum rc rc = batch_add_tower(&images->batch, program_n_axes(p), n_features, err);
    rc = rc ? rc : tower_plan(m, 0, err);
    rc = rc ? rc : tower_make_buffers(m, err);
    if (!rc) {
        items_number(prompt->ids, prompt->n_tokens, prompt->items, prompt->n_items, p->feature_id, images->features);
        list_features(images, prompt);
    }
    return rc;
}

void tap_images_close(struct tap_images *images, struct model *m)
{
    if (images->features)
        tower_destroy(m);
    batch_destroy(&images->batch);
    mem_free(images->features);
}

enum rc tap_images_begin(struct tap_images *images, const struct tap_prompt *prompt, struct running *run, uint32_t first,
                         uint32_t n)
{
    struct batch *b = &images->batch;
    enum spans spans = program_spans(run->m->program);
    if (!images->features)
        return RC_OK;
    for (uint32_t i = n; i-- > 0;) {
        bool continues = i + 1 < n && items_continue(spans, images->features, prompt->n_tokens, prompt->n_prefix, first + i + 1);
        b->visible_end[i] = continues ? b->visible_end[i + 1] : (int32_t)(first + i + 1);
        b->visual[i] = images->features[first + i];
        for (uint32_t axis = 0; axis < b->n_axes; axis++)
            b->rope_positions[(size_t)axis * b->max_rows + i] =
                prompt->rope_positions ? prompt->rope_positions[(size_t)axis * prompt->n_tokens + first + i] : (int32_t)(first + i);
    }
    b->n_rows = n;
    b->has_visual = true;
    b->n_encodings = first ? 0 : prompt->n_items;
    run->batch = b;
    enum rc rc = tower_begin(run);
    run->batch = NULL;
    return rc;
}
