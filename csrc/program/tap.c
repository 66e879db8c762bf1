#define _GNU_SOURCE
#include "tap_images.h"

#include "../base/mem.h"

#include <string.h>

#define MOST_ROWS 256u /* of a chunk */

/* A copy of a model. It shares the model's weights and rope tables. Its plan has no fusions, and it has a separate arena, page
 * pool and batch integers, so the engine's state stays unchanged. */
struct tap {
    struct model m;
    struct running run;
    int32_t *host;             /* [n_integers] token ids, positions, row_seq, wanted rows, types, seq_first_row, page tables */
    uint32_t n_rows, n_pages;  /* most rows of a chunk; entries of the sequence's page tables */
    size_t n_integers;
    int32_t first_rows[2];
    struct tap_prompt prompt;
    struct tap_images images;
    const struct tapped *wanted;
    uint32_t n_wanted, first_rank; /* first_rank: of this host */
};

static enum rc out_of_memory(struct err *err)
{
    return err_set(err, RC_MEMORY, "tap: out of memory");
}

static enum rc take(struct tap *t, size_t size_bytes, void *pointer, struct err *err)
{
    void *made = NULL;
    enum rc rc = t->m.backend->buffer_create(t->m.ctx, size_bytes, &made, err);
    memcpy(pointer, &made, sizeof made);
    return rc;
}

static size_t arena_bytes(const struct tap *t)
{
    return t->m.plan.arena_values * t->m.item_bytes;
}

static size_t pool_bytes(const struct tap *t)
{
    return (1 + (size_t)t->n_pages) * t->m.layout.page_bytes; /* page 0 is reserved */
}

static enum rc tap_open(struct tap *t, const struct model *model, struct err *err)
{
    uint32_t most = model->options.max_num_batched_tokens < MOST_ROWS ? model->options.max_num_batched_tokens : MOST_ROWS;
    uint32_t n_tokens = t->prompt.n_tokens;
    uint32_t spans = program_spans(model->program);
    bool is_whole = program_takes_whole_prompts(model->program) || spans == SPANS_OF_PROMPT || (spans && t->prompt.n_items);
    t->m = *model;
    t->m.arena = t->m.kept = NULL;
    t->m.pool = t->m.staged = NULL;
    memset(&t->m.plan, 0, sizeof t->m.plan);
    t->n_rows = n_tokens < most || is_whole ? n_tokens : most;
    t->m.table_stride = kv_layout_stride(&model->layout, n_tokens);
    t->n_pages = kv_layout_n_tables(&model->layout) * t->m.table_stride;
    t->n_integers = 5 * (size_t)t->n_rows + 2 + t->n_pages;
    enum rc rc = plan_make(model->program, 0, false, t->n_rows, &t->m.plan, err);
    if (!rc)
        rc = take(t, arena_bytes(t), &t->m.arena, err);
    if (!rc)
        rc = take(t, pool_bytes(t), &t->m.pool, err);
    if (!rc)
        rc = take(t, t->n_integers * sizeof(int32_t), &t->m.staged, err);
    t->host = mem_calloc(t->n_integers, sizeof *t->host);
    if (!rc && !t->host)
        rc = out_of_memory(err);
    return rc ? rc : tap_images_open(&t->images, &t->m, &t->prompt, t->n_rows, err);
}

static void tap_close(struct tap *t)
{
    const struct backend *b = t->m.backend;
    tap_images_close(&t->images, &t->m);
    if (t->m.arena)
        b->buffer_destroy(t->m.ctx, t->m.arena, arena_bytes(t));
    if (t->m.pool)
        b->buffer_destroy(t->m.ctx, t->m.pool, pool_bytes(t));
    if (t->m.staged)
        b->buffer_destroy(t->m.ctx, t->m.staged, t->n_integers * sizeof(int32_t));
    plan_clear(&t->m.plan);
    mem_free(t->host);
}

/* Makes and uploads the batch of rows first .. first + n of the sequence. All of them are wanted. */
static enum rc begin_chunk(struct tap *t, uint32_t first, uint32_t n, struct err *err)
{
    int32_t *lists[] = {t->host, t->host + t->n_rows, t->host + 2 * t->n_rows, t->host + 3 * t->n_rows,
                        t->host + 4 * t->n_rows};
    int32_t *ends = t->host + 5 * t->n_rows, *tables = ends + 2, *device = (int32_t *)t->m.staged;
    for (uint32_t i = 0; i < n; i++) {
        lists[0][i] = t->prompt.ids[first + i];
        lists[1][i] = (int32_t)(first + i);
        lists[2][i] = 0;
        lists[3][i] = (int32_t)i;
        lists[4][i] = t->prompt.types ? t->prompt.types[first + i] : 0;
    }
    ends[0] = 0;
    ends[1] = t->first_rows[1] = (int32_t)n;
    for (uint32_t i = 0; i < t->n_pages; i++)
        tables[i] = (int32_t)i + 1;
    t->run = (struct running){
        .m = &t->m, .wanted_rows = device + (lists[3] - t->host), .n_wanted_rows = n, .n_logits_rows = n, .err = err,
        .token_types = t->prompt.types ? device + (lists[4] - t->host) : NULL,
        .n_all_rows = n, .row_part = device + (lists[2] - t->host), /* by data: every rank computes the rows of rank 0 */
        .view = {n, 1, device, device + (lists[1] - t->host), device + (lists[2] - t->host), device + (ends - t->host),
                 t->m.layout.block_tokens, t->first_rows, false},
    };
    for (uint32_t g = 0; g < kv_layout_n_tables(&t->m.layout); g++)
        t->run.tables[g] = device + (tables - t->host) + (size_t)g * t->m.table_stride;
    enum rc rc = t->m.backend->upload(t->m.ctx, device, t->host, t->n_integers * sizeof(int32_t), err);
    if (!rc && !first)
        rc = tap_images_compute(&t->images, &t->prompt, t->wanted, t->n_wanted, &t->run);
    return rc ? rc : tap_images_begin(&t->images, &t->prompt, &t->run, first, n);
}

/* Downloads n rows and converts them to float32. */
static enum rc read_rows(const struct model *m, const void *data, uint32_t dtype, uint32_t width, uint32_t stride, uint32_t n,
                         float *rows, struct err *err)
{
    size_t item = dtype == DTYPE_F32 ? sizeof(float) : m->item_bytes, bytes = ((size_t)(n - 1) * stride + width) * item;
    char *read = mem_alloc(bytes);
    if (!read)
        return out_of_memory(err);
    enum rc rc = m->backend->download(m->ctx, read, data, bytes, err);
    for (uint32_t i = 0; i < n && !rc; i++)
        dtype_to_float(dtype, read + i * stride * item, rows + (size_t)i * width, width);
    mem_free(read);
    return rc;
}

enum rc tap_read(const struct model *m, struct place place, uint32_t n, float *rows, struct err *err)
{
    return read_rows(m, m->arena + place.offset * m->item_bytes, m->backend->activations(m->ctx), place.width, place.stride, n,
                     rows, err);
}

bool tap_find(const struct program *p, const struct step *step, uint32_t value, struct place *place)
{
    if (value >= p->n_values)
        return false;
    uint32_t offset = 0, root = value;
    for (; p->values[root].of != NO_INDEX; root = p->values[root].of)
        offset += p->values[root].offset;
    const struct op *op = step->ops[ROLE_MAIN];
    for (uint32_t i = 0; i < OP_OUTPUTS && step->code == STEP_OPERATION; i++)
        if (op->out[i] == root) {
            *place = op->code == OP_ROPE ? step->in[i] : i ? step->mid : step->out;
            place->offset += offset;
            place->width = p->values[value].width;
            return true;
        }
    return false;
}

static enum rc read_values(struct tap *t, const struct step *step, uint32_t first, uint32_t n, struct err *err)
{
    const struct tapped *wanted = t->wanted;
    enum rc rc = RC_OK;
    struct place place;
    for (uint32_t i = 0; i < t->n_wanted && !rc; i++)
        if (tap_find(t->m.program, step, wanted[i].value, &place))
            rc = tap_read(&t->m, place, n, wanted[i].rows + (size_t)first * place.width, err);
    return rc;
}

static enum rc read_logits(struct tap *t, const struct step *step, uint32_t first, uint32_t n, struct err *err)
{
    const struct tapped *wanted = t->wanted;
    enum rc rc = RC_OK;
    uint32_t vocab = t->m.program->vocab_size;
    for (uint32_t i = 0; i < t->n_wanted; i++)
        for (uint32_t row = 0, some; wanted[i].value == TAP_LOGITS && row < n && !rc; row += some) {
            struct step part = *step;
            some = n - row < t->m.max_logits_rows ? n - row : t->m.max_logits_rows;
            if (row && t->m.options.n_ranks > 1) /* rank 0 has read the logits before */
                rc = t->m.backend->comm->meet(t->m.ctx, &(struct meet_args){0}, err);
            if (rc)
                break;
            part.in[0].offset += (size_t)row * part.in[0].stride;
            t->run.n_logits_rows = some;
            rc = step_run(&t->run, &part);
            if (!rc)
                rc = read_rows(&t->m, t->m.logits, DTYPE_F32, vocab, t->m.vocab_stride, some,
                               wanted[i].rows + (size_t)(first + row) * vocab, err);
        }
    return rc;
}

static enum rc run_chunk(struct tap *t, uint32_t first, uint32_t n, struct err *err)
{
    enum rc rc = rope_tables_run(&t->run);
    for (uint32_t i = 0; i < t->m.plan.n_steps && !rc; i++) {
        const struct step *step = &t->m.plan.steps[i];
        if (step->ops[ROLE_MAIN] && step->ops[ROLE_MAIN]->code == OP_LOGITS) {
            rc = read_logits(t, step, first, n, err);
            continue;
        }
        rc = step_run(&t->run, step);
        if (!rc)
            rc = read_values(t, step, first, n, err);
    }
    return rc;
}

static enum rc check_tap(const struct model *model, uint32_t n_tokens, struct err *err)
{
    if (!n_tokens || n_tokens > model->options.max_model_len)
        return err_set(err, RC_INVALID, "tap: wanted 1 to %u tokens, have %u", model->options.max_model_len, n_tokens);
    if (program_takes_whole_prompts(model->program) && n_tokens > model->options.max_num_batched_tokens)
        return err_set(err, RC_INVALID, "tap: wanted at most %u tokens at once, have %u; raise max_num_batched_tokens",
                       model->options.max_num_batched_tokens, n_tokens);
    return model->asleep ? err_set(err, RC_INVALID, "tap: the engine sleeps; call wake_up()") : RC_OK;
}

/* Runs the prompt on one rank, chunk by chunk. taps: of the ranks of this host */
static enum rc run_rank(struct model *model, void *taps, struct err *err)
{
    struct tap *t = taps;
    t += model->options.rank - t->first_rank;
    enum rc rc = RC_OK;
    for (uint32_t first = 0, end = t->prompt.n_tokens; first < end && !rc; first += t->n_rows) {
        uint32_t n = end - first < t->n_rows ? end - first : t->n_rows;
        rc = begin_chunk(t, first, n, err);
        if (!rc)
            rc = run_chunk(t, first, n, err);
    }
    return rc;
}

void taps_close(const struct team *team, struct tap *taps)
{
    for (uint32_t rank = 0; taps && rank < team_n_ranks(team); rank++)
        if (taps[rank].m.backend)
            tap_close(&taps[rank]);
    mem_free(taps);
}

enum rc taps_open(const struct team *team, const struct tap_prompt *prompt, const struct tapped *wanted, uint32_t n_wanted,
                  struct tap **out, struct err *err)
{
    *out = NULL;
    enum rc rc = check_tap(team_model(team, 0), prompt->n_tokens, err);
    if (rc)
        return rc;
    struct tap *taps = mem_calloc(team_n_ranks(team), sizeof *taps);
    if (!taps)
        return out_of_memory(err);
    for (uint32_t rank = 0; rank < team_n_ranks(team) && !rc; rank++) {
        const struct model *model = team_model(team, rank);
        taps[rank].prompt = *prompt;
        taps[rank].wanted = wanted + (size_t)rank * n_wanted;
        taps[rank].n_wanted = n_wanted;
        taps[rank].first_rank = team_model(team, 0)->options.rank;
        rc = model->backend->synchronize(model->ctx, err);
        if (!rc)
            rc = tap_open(&taps[rank], model, err);
    }
    if (rc)
        taps_close(team, taps);
    else
        *out = taps;
    return rc;
}

enum rc taps_run(struct team *team, struct tap *taps, struct err *err)
{
    void *arenas[TEAM_MAX_RANKS];
    for (uint32_t rank = 0; rank < team_n_ranks(team); rank++)
        arenas[rank] = taps[rank].m.arena;
    enum rc rc = team_share_arenas(team, arenas, arena_bytes(&taps[0]), err);
    if (rc)
        return rc;
    rc = team_meet(team, run_rank, taps, err);
    enum rc end = team_share_arenas(team, NULL, 0, rc ? NULL : err);
    return rc ? rc : end;
}
