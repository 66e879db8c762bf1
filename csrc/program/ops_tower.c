/* ops_tower.c: operations of towers, and the one with which a text's program takes their features. */
#include "ops.h"

#define MAX_FRAMES 16u
#define MAX_TAPS 64u
#define MAX_GROUP 256u

static bool has_rows(const struct program *p, uint32_t value, uint32_t list, uint32_t per)
{
    return p->values[value].list == list && p->values[value].per == per;
}

const char *check_pixels(const struct program *p, const struct op *op)
{
    uint32_t n = op->pixels.n_frames, width = width_of(p, op->out[0]);
    if (!p->is_tower || !has_rows(p, op->out[0], ROWS_OF_PIECE, 1))
        return "pixels begin a tower";
    if (!n || n > MAX_FRAMES || width % (3 * n) || !is_vector(p, op->weight[0], 3 * 256))
        return "a row has three channels of equal size, and the table 256 numbers for each";
    return NULL;
}

enum rc run_pixels(struct running *run, const struct step *step, const struct views *v)
{
    const struct model *m = run->m;
    const struct op *op = step->ops[ROLE_MAIN];
    struct pixels_args args = {v->n_rows, op->pixels.n_frames, run->piece->bytes, vector_of(m, op, 0), v->out};
    return m->backend->pixels(m->ctx, &args, run->err);
}

const char *check_embed_taps(const struct program *p, const struct op *op)
{
    uint32_t n = op->embed_taps.n_taps;
    uint32_t list = op->embed_taps.of_cells ? ROWS_OF_CELLS : ROWS_OF_PIECE;
    if (!p->is_tower || !has_rows(p, op->out[0], list, 1) || !n || n > MAX_TAPS)
        return "positions of a tower have taps";
    return p->weights[op->weight[0]].rows % width_of(p, op->out[0]) ? "the table has rows of the output's width" : NULL;
}

enum rc run_embed_taps(struct running *run, const struct step *step, const struct views *v)
{
    const struct model *m = run->m;
    const struct op *op = step->ops[ROLE_MAIN];
    uint32_t table = op->embed_taps.of_cells;
    const int32_t *weights = run->piece->tables[PIECE_WEIGHTS + table].values;
    struct embed_taps_args args = {vector_of(m, op, 0), (const float *)(const void *)weights, v->n_rows,
                                   run->piece->tables[PIECE_TAPS + table].n / v->n_rows,
                                   run->piece->tables[PIECE_TAPS + table].values, v->out};
    return m->backend->embed_taps(m->ctx, &args, run->err);
}

const char *check_rows(const struct program *p, const struct op *op)
{
    if (!p->is_tower || op->rows.list >= N_ROW_LISTS || !has_rows(p, op->out[0], op->rows.list, 1))
        return "the output has the rows of a list of the piece";
    uint32_t width = width_of(p, op->in[0]);
    bool has_rows_of_width = op->weight[0] == NO_INDEX || (p->weights[op->weight[0]].kind == WEIGHT_VECTOR &&
                                                           p->weights[op->weight[0]].rows % width == 0);
    return width == width_of(p, op->out[0]) && has_rows_of_width ? NULL : "the width stays the same, and other rows have it";
}

enum rc run_rows(struct running *run, const struct step *step, const struct views *v)
{
    const struct model *m = run->m;
    const struct op *op = step->ops[ROLE_MAIN];
    const float *other = op->weight[0] == NO_INDEX ? NULL : vector_of(m, op, 0);
    struct select_args args = {v->n_rows, run->piece->tables[PIECE_LIST + op->rows.list].values, v->in[0], v->out, other};
    return m->backend->select(m->ctx, &args, run->err);
}

/* Whether the output has rows for n rows of the input each. */
static bool joins(const struct program *p, const struct op *op, uint32_t n)
{
    const struct value *in = &p->values[op->in[0]];
    return p->is_tower && n && n <= MAX_GROUP && (uint64_t)in->per * n <= MAX_GROUP * MAX_GROUP &&
           has_rows(p, op->out[0], in->list, in->per * n);
}

const char *check_group(const struct program *p, const struct op *op)
{
    const struct value *in = &p->values[op->in[0]];
    if (in->of != NO_INDEX || in->width % 16)
        return "rows that are joined are whole and a multiple of 16 wide";
    return joins(p, op, op->group.n) && width_of(p, op->out[0]) == (uint64_t)in->width * op->group.n
               ? NULL
               : "the output has the columns of so many rows";
}

/* The plan has placed the output where the input lies. */
enum rc run_group(struct running *run, const struct step *step, const struct views *v)
{
    (void)run;
    (void)step;
    (void)v;
    return RC_OK;
}

const char *check_mean_rows(const struct program *p, const struct op *op)
{
    return joins(p, op, op->mean_rows.n) && width_of(p, op->in[0]) == width_of(p, op->out[0])
               ? NULL
               : "the output has a row for so many of the input";
}

enum rc run_mean_rows(struct running *run, const struct step *step, const struct views *v)
{
    const struct model *m = run->m;
    struct mean_rows_args args = {v->n_rows, step->ops[ROLE_MAIN]->mean_rows.n, v->in[0], v->out};
    return m->backend->mean_rows(m->ctx, &args, run->err);
}

const char *check_grid_attention(const struct program *p, const struct op *op)
{
    uint32_t n_heads = op->grid_attention.n_heads, width = width_of(p, op->in[0]);
    if (!p->is_tower || op->grid_attention.segments > 1 || p->values[op->in[0]].per != 1)
        return "a tower has squares of two tables";
    if (!n_heads || width % n_heads || width_of(p, op->in[1]) != width || width_of(p, op->in[2]) != width)
        return "q, k and v are heads * head_dim wide";
    for (uint32_t w = 0; w < 2; w++)
        if (op->weight[w] == NO_INDEX || p->weights[op->weight[w]].kind != WEIGHT_VECTOR ||
            p->weights[op->weight[w]].rows % (width / n_heads))
            return "distances have vectors of rows of head_dim";
    return width_of(p, op->out[0]) == width ? NULL : "the output is as wide as q";
}

enum rc run_grid_attention(struct running *run, const struct step *step, const struct views *v)
{
    const struct model *m = run->m;
    const struct op *op = step->ops[ROLE_MAIN];
    uint32_t n_heads = op->grid_attention.n_heads, table = op->grid_attention.segments;
    struct batch_view squares = tower_segments(run, table, v->n_rows);
    struct grid_attention_args args = {
        .batch = &squares, .n_heads = n_heads, .head_dim = v->in[0].width / n_heads, .scale = op->grid_attention.scale,
        .side = (run->piece->tables[PIECE_DISTANCES + table].n / 2 + 1) / 2, .lines = vector_of(m, op, 0),
        .columns = vector_of(m, op, 1), .rows = run->piece->tables[PIECE_DISTANCES + table].values,
        .shares = (const float *)(const void *)run->piece->tables[PIECE_SHARES + table].values, .q = v->in[0], .k = v->in[1],
        .v = v->in[2], .out = v->out};
    return m->backend->grid_attention(m->ctx, &args, run->err);
}

const char *check_features(const struct program *p, const struct op *op)
{
    const struct value *first = &p->values[op->in[0]];
    for (uint32_t i = 1; i < OP_INPUTS; i++)
        if (op->in[i] != NO_INDEX && !has_rows(p, op->in[i], first->list, first->per))
            return "all columns of a feature come from as many rows";
    return p->is_tower ? NULL : "features end a tower";
}

enum rc run_features(struct running *run, const struct step *step, const struct views *v)
{
    const struct model *m = run->m;
    enum rc rc = RC_OK;
    for (uint32_t i = 0, first = 0; i < OP_INPUTS && v->in[i].width && !rc; first += v->in[i++].width) {
        struct place_rows_args args = {v->n_rows, run->feature_rows, v->in[i], tower_features(m, first, v->in[i].width)};
        rc = m->backend->place_rows(m->ctx, &args, run->err);
    }
    (void)step;
    return rc;
}

/* Columns of a feature of the program's tower. */
static uint64_t feature_width(const struct program *p)
{
    const struct op *last = p->tower && p->tower->n_ops ? &p->tower->ops[p->tower->n_ops - 1] : NULL;
    uint64_t width = 0;
    for (uint32_t i = 0; last && i < OP_INPUTS && last->in[i] < p->tower->n_values; i++)
        width += p->tower->values[last->in[i]].width;
    return width;
}

const char *check_splice(const struct program *p, const struct op *op)
{
    uint32_t width = width_of(p, op->in[0]);
    if (width != width_of(p, op->out[0]) || p->values[op->in[0]].of != NO_INDEX)
        return "the width stays the same, of a whole value";
    return (uint64_t)op->splice.first + width <= feature_width(p) ? NULL : "the tower's features have the columns";
}

enum rc run_splice(struct running *run, const struct step *step, const struct views *v)
{
    const struct model *m = run->m;
    const struct splice_attributes *given = &step->ops[ROLE_MAIN]->splice;
    struct view features = m->tower ? tower_features(m, given->first, v->in[0].width) : (struct view){0};
    struct splice_args args = {v->n_rows, given->is_sum, run->visual, features, v->in[0]};
    return run->visual ? m->backend->splice(m->ctx, &args, run->err) : RC_OK;
}
