#include "running.h"
#include "tower_join.h"

#include "../base/mem.h"

#include <string.h>

/* A tower is a model of its own that borrows weights and context from the text's. */
struct tower {
    struct model m;
    struct model *text;        /* that has the tower */
    char *features;            /* [encoder_cache_tokens][feature_stride] items: the feature pool */
    uint32_t feature_stride;
    bool is_staged;            /* steps cannot read host memory */
    char *bytes;               /* device memory for what a run computes, if is_staged: its bytes, its tables, ... */
    int32_t *tables[PIECE_TABLES], *feature_rows;
    struct piece_join join;    /* what the next run computes, or the one at hand between its parts */
    const struct item_piece *piece; /* of the run at hand: the joined pieces */
    struct item_piece on_device;    /* ... with the places of their bytes and tables on the device */
    int32_t *placed;           /* [encoder_cache_tokens] in host memory: rows of its features */
    int32_t *visual, *visible_end, *rope_positions; /* ... and for the arrays of a step's rows */
    size_t bytes_size, table_values[PIECE_TABLES];
};

/* ---- what a program wants of a piece ----------------------------------------------------------------------------------- */

static uint32_t row_bytes(const struct program *p)
{
    for (uint32_t i = 0; i < p->n_ops; i++)
        if (p->ops[i].code == OP_PIXELS)
            return p->values[p->ops[i].out[0]].width / p->ops[i].pixels.n_frames;
    return 0;
}

/* Words of a table for each row of the largest piece, as far as the operation reads it. */
static uint32_t words_for(const struct op *op, uint32_t table)
{
    switch (op->code) {
    case OP_EMBED_TAPS:
        return table == PIECE_TAPS + op->embed_taps.of_cells || table == PIECE_WEIGHTS + op->embed_taps.of_cells
                   ? op->embed_taps.n_taps : 0;
    case OP_ROWS: return table == PIECE_LIST + op->rows.list ? row_list_room(op->rows.list) : 0;
    case OP_ROW_ATTENTION: return table == PIECE_SEGMENTS + op->row_attention.segments;
    case OP_GRID_ATTENTION: /* at most 4 n words for n x n rows, of which a window's list has more than the piece */
        return table == PIECE_SEGMENTS + op->grid_attention.segments ? 1
               : table == PIECE_DISTANCES + op->grid_attention.segments || table == PIECE_SHARES + op->grid_attention.segments
                   ? 4 * row_list_room(ROWS_OF_WINDOWS) : 0;
    default: return 0;
    }
}

static uint32_t words_of(const struct program *p, uint32_t table)
{
    uint32_t n = table == PIECE_POSITIONS ? program_n_axes(p) : 0;
    for (uint32_t i = 0; i < p->n_ops; i++) {
        uint32_t own = words_for(&p->ops[i], table);
        n = own > n ? own : n;
    }
    return n;
}

#define WANT(holds, ...)                                     \
    do {                                                     \
        if (!(holds))                                        \
            return err_set(err, RC_INVALID, __VA_ARGS__);    \
    } while (0)

/* The entries of a table are rows below `most`, or from `least` on. */
static enum rc check_entries(const struct item_piece *piece, uint32_t table, int32_t least, uint32_t most, struct err *err)
{
    for (uint32_t i = 0; i < piece->tables[table].n; i++) {
        int32_t row = piece->tables[table].values[i];
        WANT(row >= least && (row < 0 || (uint32_t)row < most), "image: table %u: wanted rows below %u, have %d", table, most,
             row);
    }
    return RC_OK;
}

static enum rc check_segments(const struct item_piece *piece, uint32_t table, uint32_t n_rows, struct err *err)
{
    const int32_t *first = piece->tables[table].values;
    uint32_t n = piece->tables[table].n;
    WANT(n >= 2 && n <= piece->n_rows + 1 && first[0] == 0 && (uint32_t)first[n - 1] == n_rows,
         "image: wanted segments of all %u rows", n_rows);
    for (uint32_t i = 1; i < n; i++)
        WANT(first[i] > first[i - 1], "image: wanted segments of at least one row");
    return RC_OK;
}

/* Segments are squares, and every distance in a square has two rows of each table. */
static enum rc check_grid(const struct program *p, const struct op *op, const struct item_piece *piece, uint32_t n_rows,
                          struct err *err)
{
    uint32_t table = op->grid_attention.segments, n = piece->tables[PIECE_DISTANCES + table].n, side = (n / 2 + 1) / 2;
    uint32_t head_dim = p->values[op->in[0]].width / op->grid_attention.n_heads;
    enum rc rc = check_segments(piece, PIECE_SEGMENTS + table, n_rows, err);
    WANT(rc || (n == 2 * (2 * side - 1) && piece->tables[PIECE_SHARES + table].n == n),
         "image: wanted two rows and shares for each distance, have %u and %u", n, piece->tables[PIECE_SHARES + table].n);
    for (uint32_t i = 1; i < piece->tables[PIECE_SEGMENTS + table].n && !rc; i++) {
        const int32_t *first = piece->tables[PIECE_SEGMENTS + table].values;
        WANT((uint64_t)(first[i] - first[i - 1]) == (uint64_t)side * side, "image: wanted squares of %u x %u rows", side, side);
    }
    for (uint32_t w = 0; w < 2 && !rc; w++)
        rc = check_entries(piece, PIECE_DISTANCES + table, 0, p->weights[op->weight[w]].rows / head_dim, err);
    return rc;
}

static enum rc check_taps(const struct program *p, const struct op *op, const struct item_piece *piece, uint32_t n_rows,
                          struct err *err)
{
    uint32_t table = PIECE_TAPS + op->embed_taps.of_cells, most = op->embed_taps.n_taps;
    uint32_t n = piece->tables[table].n, n_weights = piece->tables[PIECE_WEIGHTS + op->embed_taps.of_cells].n;
    WANT(n_rows && n && n % n_rows == 0 && n / n_rows <= most && n_weights == n,
         "image: wanted up to %u taps and weights for each of %u rows, have %u and %u", most, n_rows, n, n_weights);
    return check_entries(piece, table, 0, p->weights[op->weight[0]].rows / p->values[op->out[0]].width, err);
}

static enum rc check_op(const struct program *p, const struct op *op, const struct item_piece *piece, struct err *err)
{
    const struct value *in = op->in[0] == NO_INDEX ? NULL : &p->values[op->in[0]];
    uint32_t n_in = in ? piece_rows(piece, in->list) : piece->n_rows, table, n_others;
    WANT(!in || n_in % in->per == 0, "image: wanted a multiple of %u rows, have %u", in ? in->per : 1, n_in);
    switch (op->code) {
    case OP_ROW_ATTENTION: return check_segments(piece, PIECE_SEGMENTS + op->row_attention.segments, n_in, err);
    case OP_GRID_ATTENTION: return check_grid(p, op, piece, n_in, err);
    case OP_ROWS:
        table = PIECE_LIST + op->rows.list;
        WANT(op->rows.list || piece->tables[table].n == piece->n_rows, "image: wanted an entry for each of %u rows, have %u",
             piece->n_rows, piece->tables[table].n);
        n_others = op->weight[0] == NO_INDEX ? 0 : p->weights[op->weight[0]].rows / in->width;
        return check_entries(piece, table, -1 - (int32_t)n_others, n_in / in->per, err);
    case OP_EMBED_TAPS: return check_taps(p, op, piece, piece_rows(piece, p->values[op->out[0]].list), err);
    case OP_GROUP:
    case OP_MEAN_ROWS:
        WANT(n_in % p->values[op->out[0]].per == 0, "image: wanted a multiple of %u rows, have %u",
             p->values[op->out[0]].per, n_in);
        return RC_OK;
    case OP_FEATURES:
        WANT(n_in / in->per == piece->n_features, "image: wanted %u features, have rows for %u", piece->n_features,
             n_in / in->per);
        return RC_OK;
    default: return RC_OK;
    }
}

enum rc tower_check_piece(const struct model *m, const struct item_piece *piece, struct err *err)
{
    const struct program *p = m->program->tower;
    uint32_t most = m->tower->m.options.max_num_batched_tokens, n_axes = program_n_axes(p);
    enum rc rc = RC_OK;
    WANT(!piece->tables[PIECE_PLACES].n || piece->tables[PIECE_PLACES].n == piece->n_features,
         "image: wanted a place for each of %u features, have %u", piece->n_features, piece->tables[PIECE_PLACES].n);
    WANT(piece->n_rows && piece->n_rows <= most,
         "image: wanted at most %u patches (max_encoder_rows) in a piece, have %u; raise the option or send a smaller image",
         most, piece->n_rows);
    WANT(piece->n_bytes == (uint64_t)piece->n_rows * row_bytes(p), "image: wanted %u bytes a patch, have %zu for %u patches",
         row_bytes(p), piece->n_bytes, piece->n_rows);
    for (uint32_t list = 1; list < N_ROW_LISTS; list++)
        WANT(piece_rows(piece, list) <= most * row_list_room(list), "image: wanted at most %u rows, have %u",
             most * row_list_room(list), piece_rows(piece, list));
    WANT(piece->tables[PIECE_POSITIONS].n == (uint64_t)n_axes * piece->n_rows,
         "image: wanted %u positions for each of %u rows, have %u", n_axes, piece->n_rows, piece->tables[PIECE_POSITIONS].n);
    for (uint32_t i = 0; i < p->n_ops && !rc; i++)
        rc = check_op(p, &p->ops[i], piece, err);
    return rc;
}

/* ---- making ------------------------------------------------------------------------------------------------------------ */

enum rc tower_check_backend(const struct model *m, struct err *err)
{
    if (program_spans(m->program) && !(m->backend->fusions(m->ctx) & FUSION_VISIBLE_END))
        return err_set(err, RC_UNSUPPORTED,
                       "images whose tokens see each other (Gemma 3, PaliGemma) are not supported on %s; use the CPU",
                       m->backend->name);
    if (!m->program->tower || !m->options.n_here || m->options.n_here == m->options.n_ranks)
        return RC_OK;
    return err_set(err, RC_UNSUPPORTED, "nnodes above 1 is not supported yet for models that take images; use one host");
}

enum rc tower_plan(struct model *text, uint32_t fusions, struct err *err)
{
    struct tower *t = text->tower = mem_calloc(1, sizeof *t);
    if (!t)
        return err_set(err, RC_MEMORY, "tower: out of memory");
    struct model *m = &t->m;
    t->text = text;
    m->program = text->program->tower;
    m->backend = text->backend;
    m->ctx = text->ctx;
    m->item_bytes = text->item_bytes;
    m->options = text->options;
    m->options.max_num_batched_tokens = text->options.max_encoder_rows;
    m->tower = t;
    t->is_staged = !m->backend->traits->has_host_memory || m->backend->begin;
    const struct op *last = &m->program->ops[m->program->n_ops - 1];
    for (uint32_t i = 0; i < OP_INPUTS && last->in[i] != NO_INDEX; i++)
        t->feature_stride += m->program->values[last->in[i]].width;
    t->feature_stride = (t->feature_stride + 15) & ~15u;
    uint32_t most = m->options.max_num_batched_tokens;
    t->bytes_size = (size_t)most * row_bytes(m->program);
    for (uint32_t i = 0; i < PIECE_TABLES; i++)
        t->table_values[i] = (size_t)(most + 1) * words_of(m->program, i);
    return plan_make(m->program, fusions, false, most, &m->plan, err);
}

static size_t pool_bytes(const struct tower *t)
{
    return (size_t)t->text->options.encoder_cache_tokens * t->feature_stride * t->m.item_bytes;
}

uint64_t tower_planned_bytes(const struct model *text)
{
    const struct tower *t = text->tower;
    if (!t)
        return 0;
    uint64_t n = t->m.plan.arena_values * t->m.item_bytes + pool_bytes(t);
    for (uint32_t r = 0; r < t->m.program->n_ropes; r++)
        n += t->m.program->ropes[r].n_freqs * sizeof(float) * (2 + 2 * (uint64_t)t->m.options.max_num_batched_tokens);
    for (uint32_t i = 0; t->is_staged && i < PIECE_TABLES; i++)
        n += t->table_values[i] * sizeof(int32_t);
    return n + (t->is_staged ? t->bytes_size : 0);
}

uint64_t tower_bytes(const struct model *text)
{
    return tower_planned_bytes(text);
}

const struct model *tower_model(const struct model *text)
{
    return &text->tower->m;
}

uint32_t tower_n_steps(const struct model *text)
{
    return text->tower->m.plan.n_steps;
}

uint64_t tower_features_bytes(const struct model *text)
{
    return text->tower ? pool_bytes(text->tower) : 0;
}

static enum rc buffer(const struct tower *t, size_t size_bytes, void *pointer, struct err *err)
{
    void *made = NULL;
    enum rc rc = size_bytes ? t->m.backend->buffer_create(t->m.ctx, size_bytes, &made, err) : RC_OK;
    memcpy(pointer, &made, sizeof made);
    return rc;
}

static size_t feature_rows_bytes(const struct tower *t)
{
    return ((size_t)t->m.options.max_num_batched_tokens + 1) * sizeof(int32_t);
}

static size_t rows_bytes(const struct tower *t, uint32_t n)
{
    return (size_t)t->text->options.max_num_batched_tokens * n * sizeof(int32_t);
}

static enum rc make_staging(struct tower *t, struct err *err)
{
    enum rc rc = buffer(t, t->bytes_size, &t->bytes, err);
    for (uint32_t i = 0; i < PIECE_TABLES && !rc; i++)
        rc = buffer(t, t->table_values[i] * sizeof(int32_t), &t->tables[i], err);
    if (!rc)
        rc = buffer(t, feature_rows_bytes(t), &t->feature_rows, err);
    if (!rc)
        rc = buffer(t, rows_bytes(t, 1), &t->visual, err);
    if (!rc)
        rc = buffer(t, rows_bytes(t, 1), &t->visible_end, err);
    return rc ? rc : buffer(t, rows_bytes(t, program_n_axes(t->text->program)), &t->rope_positions, err);
}

enum rc tower_make_buffers(struct model *text, struct err *err)
{
    struct tower *t = text->tower;
    t->m.weights = text->weights;
    enum rc rc = model_choose_entries(&t->m, err);
    if (!rc)
        rc = buffer(t, t->m.plan.arena_values * t->m.item_bytes, &t->m.arena, err);
    if (!rc)
        rc = model_make_ropes(&t->m, err);
    if (!rc)
        rc = buffer(t, pool_bytes(t), &t->features, err);
    if (!rc && !(t->placed = mem_calloc(text->options.encoder_cache_tokens + 1, sizeof *t->placed)))
        rc = err_set(err, RC_MEMORY, "tower: out of memory");
    if (!rc)
        rc = join_make(&t->join, t->m.program, t->m.options.max_num_batched_tokens, t->is_staged ? 0 : t->bytes_size,
                       t->table_values, err);
    return rc || !t->is_staged ? rc : make_staging(t, err);
}

void tower_destroy(struct model *text)
{
    struct tower *t = text->tower;
    if (!t)
        return;
    const struct backend *b = t->m.backend;
    b->buffer_destroy(t->m.ctx, t->m.arena, t->m.plan.arena_values * t->m.item_bytes);
    b->buffer_destroy(t->m.ctx, t->features, pool_bytes(t));
    b->buffer_destroy(t->m.ctx, t->bytes, t->bytes_size);
    for (uint32_t i = 0; i < PIECE_TABLES; i++)
        b->buffer_destroy(t->m.ctx, t->tables[i], t->table_values[i] * sizeof(int32_t));
    b->buffer_destroy(t->m.ctx, t->feature_rows, feature_rows_bytes(t));
    b->buffer_destroy(t->m.ctx, t->visual, rows_bytes(t, 1));
    b->buffer_destroy(t->m.ctx, t->visible_end, rows_bytes(t, 1));
    b->buffer_destroy(t->m.ctx, t->rope_positions, rows_bytes(t, program_n_axes(text->program)));
    mem_free(t->placed);
    join_clear(&t->join);
    model_free_ropes(&t->m);
    entries_clear(&t->m.entries);
    plan_clear(&t->m.plan);
    mem_free(t);
    text->tower = NULL;
}

/* ---- steps ------------------------------------------------------------------------------------------------------------- */

struct view tower_features(const struct model *m, uint32_t first, uint32_t width)
{
    return (struct view){m->tower->features + (size_t)first * m->item_bytes, width, m->tower->feature_stride};
}

struct batch_view tower_segments(const struct running *run, uint32_t table, uint32_t n_rows)
{
    struct batch_view view = run->view;
    view.n_rows = n_rows;
    const struct item_piece *host = run->host_piece;
    view.n_seqs = host->tables[PIECE_SEGMENTS + table].n - 1;
    view.seq_first_row = run->piece->tables[PIECE_SEGMENTS + table].values;
    view.host_seq_first_row = host->tables[PIECE_SEGMENTS + table].values;
    return view;
}

/* Brings the joined pieces to the device, and the places of their features. */
static enum rc stage(struct tower *t, struct err *err)
{
    const struct backend *b = t->m.backend;
    const struct item_piece *piece = t->piece = join_all(&t->join);
    struct item_piece *on_device = &t->on_device;
    enum rc rc = RC_OK;
    *on_device = *piece;
    if (!t->is_staged)
        return RC_OK;
    on_device->bytes = (const uint8_t *)t->bytes;
    for (size_t i = 0, at = 0; i < t->join.n_pieces && !rc; at += t->join.pieces[i++]->n_bytes)
        rc = b->upload(t->m.ctx, t->bytes + at, t->join.pieces[i]->bytes, t->join.pieces[i]->n_bytes, err);
    for (uint32_t i = 0; i < PIECE_TABLES && !rc; i++) {
        on_device->tables[i].values = t->tables[i];
        if (piece->tables[i].n && t->tables[i]) /* the program reads the table */
            rc = b->upload(t->m.ctx, t->tables[i], piece->tables[i].values, piece->tables[i].n * sizeof(int32_t), err);
    }
    return rc ? rc : b->upload(t->m.ctx, t->feature_rows, t->placed, piece->n_features * sizeof *t->placed, err);
}

/* Computes the features of the joined pieces, or does part first .. end of that; end 0: all. */
static enum rc encode(struct tower *t, uint32_t first, uint32_t end, struct err *err)
{
    if (!t->join.n_pieces)
        return RC_OK;
    enum rc rc = first ? RC_OK : stage(t, err);
    const struct item_piece *piece = t->piece;
    struct running run = {.m = &t->m, .err = err, .piece = &t->on_device, .host_piece = piece,
                          .feature_rows = t->is_staged ? t->feature_rows : t->placed, .first_step = first, .end_step = end};
    run.view.n_rows = run.n_wanted_rows = piece->n_rows;
    run.view.positions = run.rope_positions = t->on_device.tables[PIECE_POSITIONS].values;
    run.axis_stride = piece->n_rows;
    rc = rc ? rc : program_run(&run);
    if (rc || !end || end == t->m.plan.n_steps)
        join_end(&t->join);
    return rc;
}

/* Adds a piece to the next run; runs those before it if it does not go with them. rows: of its item's features, or its own. */
static enum rc add_piece(struct tower *t, const struct item_piece *piece, const int32_t *rows, struct err *err)
{
    enum rc rc = RC_OK;
    uint32_t first = t->join.all.n_features;
    if (!join_add(&t->join, piece)) {
        rc = encode(t, 0, 0, err);
        join_add(&t->join, piece);
        first = 0;
    }
    const int32_t *places = piece->tables[PIECE_PLACES].n ? piece->tables[PIECE_PLACES].values : NULL;
    for (uint32_t f = 0; f < piece->n_features; f++)
        t->placed[first + f] = rows[places ? (uint32_t)places[f] : f];
    return rc;
}

void tower_use(struct running *run)
{
    const struct tower *t = run->m->tower;
    if (!t)
        return;
    run->rope_positions = t->rope_positions;
    run->axis_stride = t->text->options.max_num_batched_tokens;
}

/* The arrays of the text's rows. */
static enum rc begin_rows(struct running *run)
{
    const struct tower *t = run->m->tower;
    const struct batch *b = run->batch;
    enum rc rc = RC_OK;
    run->axis_stride = b->max_rows;
    run->rope_positions = b->rope_positions;
    run->visual = b->has_visual ? b->visual : NULL;
    run->visible_end = b->has_visual ? b->visible_end : NULL;
    if (!t->is_staged)
        return RC_OK;
    if (b->n_axes)
        tower_use(run);
    for (uint32_t axis = 0; axis < b->n_axes && !rc; axis++)
        rc = t->m.backend->upload(t->m.ctx, t->rope_positions + (size_t)axis * run->axis_stride,
                                  b->rope_positions + (size_t)axis * b->max_rows, b->n_rows * sizeof(int32_t), run->err);
    if (rc || !b->has_visual)
        return rc;
    run->visual = t->visual;
    run->visible_end = t->visible_end;
    rc = t->m.backend->upload(t->m.ctx, t->visible_end, b->visible_end, b->n_rows * sizeof(int32_t), run->err);
    return rc ? rc : t->m.backend->upload(t->m.ctx, t->visual, b->visual, b->n_rows * sizeof(int32_t), run->err);
}

enum rc tower_begin(struct running *run)
{
    struct tower *t = run->m->tower;
    const struct batch *b = run->batch;
    enum rc rc = RC_OK;
    if (b->n_encodings && !b->tower_first)
        join_end(&t->join); /* of a run that ended before its last part */
    for (uint32_t i = 0; i < b->n_encodings && !b->tower_first && !rc; i++) {
        const struct prompt_item *item = b->encodings[i].item;
        const int32_t *rows = b->feature_rows + b->encodings[i].first;
        for (uint32_t p = 0; p < item->n_pieces && !rc; p++) {
            rc = add_piece(t, &item->pieces[p], rows, run->err);
            rows += item->pieces[p].tables[PIECE_PLACES].n ? 0 : item->pieces[p].n_features;
        }
    }
    if (!rc && b->n_encodings)
        rc = encode(t, b->tower_first, b->tower_end, run->err);
    return rc || !b->n_rows ? rc : begin_rows(run);
}
