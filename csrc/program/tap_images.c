#include "tap_images.h"

#include "../base/mem.h"

#include <string.h>

static uint32_t most_piece_rows(const struct tap_prompt *prompt)
{
    uint32_t most = 1;
    for (uint32_t i = 0; i < prompt->n_items; i++)
        for (uint32_t p = 0; p < prompt->items[i].n_pieces; p++)
            most = prompt->items[i].pieces[p].n_rows > most ? prompt->items[i].pieces[p].n_rows : most;
    return most;
}

/* Numbers the features of all images one after another; the tower puts them into its pool in this order. */
static void list_features(struct tap_images *images, const struct tap_prompt *prompt)
{
    int32_t *features = images->features;
    uint32_t n = 0;
    for (uint32_t i = 0; i < prompt->n_items; n += prompt->items[i++].n_features)
        for (uint32_t at = prompt->items[i].first; at < prompt->items[i].first + prompt->items[i].n_tokens; at++)
            features[at] += features[at] < 0 ? 0 : (int32_t)n;
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

static enum rc run_tower(struct running *run, struct batch *batch)
{
    run->batch = batch;
    enum rc rc = tower_begin(run);
    run->batch = NULL;
    return rc;
}

static uint32_t value_rows(const struct program *tower, const struct item_piece *piece, uint32_t value)
{
    return piece_rows(piece, tower->values[value].list) / tower->values[value].per;
}

uint64_t tap_rows(const struct program *p, const struct tap_prompt *prompt, uint32_t value)
{
    uint64_t n = 0;
    if (value == TAP_LOGITS || value < p->n_values)
        return prompt->n_tokens;
    for (uint32_t i = 0; i < prompt->n_items; i++)
        for (uint32_t k = 0; k < prompt->items[i].n_pieces; k++)
            n += value_rows(p->tower, &prompt->items[i].pieces[k], value - p->n_values);
    return n;
}

/* Reads the values that step s has computed of a piece, and notes how many of their rows are read. */
static enum rc read_values(const struct model *text, uint32_t s, const struct item_piece *piece, const struct tapped *wanted,
                           uint32_t n_wanted, uint64_t *n_read, struct err *err)
{
    const struct model *m = tower_model(text);
    enum rc rc = RC_OK;
    for (uint32_t i = 0; i < n_wanted && !rc; i++) {
        uint32_t value = wanted[i].value - text->program->n_values;
        struct place place;
        if (wanted[i].value == TAP_LOGITS || wanted[i].value < text->program->n_values ||
            !tap_find(m->program, &m->plan.steps[s], value, &place))
            continue;
        uint32_t n = value_rows(m->program, piece, value);
        rc = n ? tap_read(m, place, n, wanted[i].rows + n_read[i] * place.width, err) : RC_OK;
        n_read[i] += n;
    }
    return rc;
}

/* Computes a piece of an item step by step. first: of its features in the pool. */
static enum rc compute_piece(struct batch *b, const struct item_piece *piece, uint32_t first, const struct tapped *wanted,
                             uint32_t n_wanted, uint64_t *n_read, struct running *run)
{
    const struct prompt_item alone = {.pieces = piece, .n_pieces = 1};
    enum rc rc = RC_OK;
    b->encodings[0] = (struct encoding){&alone, first};
    b->n_encodings = 1;
    b->n_rows = 0;
    for (uint32_t s = 0; s < tower_n_steps(run->m) && !rc; s++) {
        b->tower_first = s;
        b->tower_end = s + 1;
        rc = run_tower(run, b);
        rc = rc ? rc : read_values(run->m, s, piece, wanted, n_wanted, n_read, run->err);
    }
    b->tower_first = b->tower_end = 0;
    return rc;
}

enum rc tap_images_compute(struct tap_images *images, const struct tap_prompt *prompt, const struct tapped *wanted,
                           uint32_t n_wanted, struct running *run)
{
    uint64_t *n_read = mem_calloc(n_wanted + 1, sizeof *n_read);
    enum rc rc = n_read ? RC_OK : err_set(run->err, RC_MEMORY, "tap: out of memory");
    for (uint32_t i = 0, first = 0; images->features && i < prompt->n_items; first += prompt->items[i++].n_features)
        for (uint32_t p = 0, at = first; p < prompt->items[i].n_pieces && !rc; p++) {
            const struct item_piece *piece = &prompt->items[i].pieces[p];
            bool has_places = piece->tables[PIECE_PLACES].n;
            rc = compute_piece(&images->batch, piece, has_places ? first : at, wanted, n_wanted, n_read, run);
            at += has_places ? 0 : piece->n_features;
        }
    mem_free(n_read);
    return rc;
}

enum rc tap_images_begin(struct tap_images *images, const struct tap_prompt *prompt, struct running *run, uint32_t first,
                         uint32_t n)
{
    struct batch *b = &images->batch;
    const int32_t *given = prompt->rope_positions;
    uint32_t n_tokens = prompt->n_tokens;
    if (!images->features)
        return RC_OK;
    items_list_ends(program_spans(run->m->program), images->features, n_tokens, prompt->n_prefix, first, n, b->visible_end);
    memcpy(b->visual, images->features + first, n * sizeof *b->visual);
    for (uint32_t axis = 0; axis < b->n_axes; axis++)
        for (uint32_t i = 0; i < n; i++)
            b->rope_positions[(size_t)axis * b->max_rows + i] =
                given ? given[(size_t)axis * n_tokens + first + i] : (int32_t)(first + i);
    b->n_rows = n;
    b->has_visual = true;
    b->n_encodings = 0;
    return run_tower(run, b);
}
