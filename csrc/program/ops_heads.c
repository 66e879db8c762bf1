/* ops_heads.c: rows that a model keeps for a head, and what the head makes of them. All of these operations copy rows. */
#include "ops.h"

static enum rc copy_rows(struct running *run, uint32_t n, const int32_t *rows, struct view from, struct view to)
{
    return run->m->backend->select(run->m->ctx, &(struct select_args){n, rows, from, to, NULL}, run->err);
}

/* Columns first .. first + width of a view. */
static struct view columns_of(const struct model *m, struct view view, uint32_t first, uint32_t width)
{
    return (struct view){(char *)view.data + (size_t)first * m->item_bytes, width, view.stride};
}

static struct view own_kept(const struct model *m, uint32_t width)
{
    return (struct view){m->kept, width, m->kept_stride};
}

const char *check_concat(const struct program *p, const struct op *op)
{
    uint64_t width = (uint64_t)width_of(p, op->in[0]) + width_of(p, op->in[1]);
    return width == width_of(p, op->out[0]) ? NULL : "the output is as wide as both inputs";
}

enum rc run_concat(struct running *run, const struct step *step, const struct views *v)
{
    (void)step;
    const struct model *m = run->m;
    uint32_t first = v->in[0].width;
    enum rc rc = copy_rows(run, v->n_rows, NULL, v->in[0], columns_of(m, v->out, 0, first));
    return rc ? rc : copy_rows(run, v->n_rows, NULL, v->in[1], columns_of(m, v->out, first, v->in[1].width));
}

const char *check_keep(const struct program *p, const struct op *op)
{
    return (uint64_t)op->keep.first + width_of(p, op->in[0]) <= INT32_MAX ? NULL : "kept rows have fewer than 2^31 columns";
}

enum rc run_keep(struct running *run, const struct step *step, const struct views *v)
{
    const struct model *m = run->m;
    uint32_t first = step->ops[ROLE_MAIN]->keep.first, width = v->in[0].width;
    if (!m->kept) /* of a tap */
        return RC_OK;
    return copy_rows(run, v->n_rows, NULL, v->in[0], columns_of(m, own_kept(m, first + width), first, width));
}

const char *check_kept(const struct program *p, const struct op *op)
{
    (void)p;
    (void)op;
    return NULL;
}

enum rc run_kept(struct running *run, const struct step *step, const struct views *v)
{
    (void)step;
    const struct batch *b = run->batch;
    struct view from = {(void *)b->kept, v->out.width, b->kept_stride};
    return copy_rows(run, v->n_rows, run->source_rows, from, v->out);
}

const char *check_carry(const struct program *p, const struct op *op)
{
    uint32_t width = width_of(p, op->in[0]);
    if (!program_is_head(p) || program_kept_width(p) != width)
        return "the program reads kept rows, and keeps rows as wide as these";
    return width == width_of(p, op->out[0]) ? NULL : "the width stays the same";
}

enum rc run_carry(struct running *run, const struct step *step, const struct views *v)
{
    (void)step;
    if (run->is_carried)
        return copy_rows(run, v->n_rows, run->source_rows, own_kept(run->m, v->out.width), v->out);
    return copy_rows(run, v->n_rows, NULL, v->in[0], v->out);
}
