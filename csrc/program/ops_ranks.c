/* ops_ranks.c: what ranks give each other: columns and rows of values, logits, and the meeting that opens a step. */
#include "ops.h"

const char *check_gather(const struct program *p, const struct op *op)
{
    const struct gather_attributes *given = &op->gather;
    uint32_t own = op->in[0], out = op->out[0], width = width_of(p, own), whole = width_of(p, out), root = out;
    if (!p->is_of_rank)
        return "only the program of a rank gathers";
    for (; p->values[root].of != NO_INDEX; root = p->values[root].of)
        ;
    for (; p->values[own].of != NO_INDEX; own = p->values[own].of)
        ;
    if (own == root)
        return "the gathered value is another one than the rank's own";
    const bool is_range = given->kind == GATHER_COLUMNS && !given->n_chosen;
    if (is_range && (uint64_t)given->first + width > whole)
        return "a rank's columns are among the gathered ones";
    if (given->unit && (!is_range || given->first % given->unit || width % given->unit))
        return "a rank's columns begin and end at multiples of the unit";
    if (is_range)
        return NULL;
    if (given->first >= given->end || given->end > INT32_MAX)
        return "a rank has rows of at least one token id, or results of at least one expert";
    if (given->by_rank && given->kind != GATHER_ROWS)
        return "rows belong to ranks";
    if (given->kind == GATHER_COLUMNS)
        return width == whole && own == op->in[0] && root == out && whole % given->n_chosen == 0 &&
                       given->end <= whole / given->n_chosen
                   ? NULL
                   : "a rank's columns of a part are among those of the gathered parts";
    if (given->kind == GATHER_ROUTES &&
        (!given->n_chosen || whole % given->n_chosen || op->in[1] == NO_INDEX || width_of(p, op->in[1]) != 4 * given->n_chosen))
        return "there are routes, and equally many parts of the gathered results";
    return width == whole && own == op->in[0] && root == out ? NULL : "a rank's rows are as wide as the gathered ones";
}

/* The columns of a view from `first` on, as many as `like` has. */
static struct view columns_of(const struct model *m, struct view whole, uint32_t first, struct view like)
{
    return (struct view){(char *)whole.data + (size_t)first * m->item_bytes, like.width, whole.stride};
}

/* The plan has placed the rank's columns or rows in `whole` where it could; else the gather copies them. */
enum rc run_gather(struct running *run, const struct step *step, const struct views *v)
{
    const struct model *m = run->m;
    const struct op *op = step->ops[ROLE_MAIN], *norm = step->ops[ROLE_NORM], *sum = step->ops[ROLE_OUTPUT];
    const struct gather_attributes *given = &op->gather;
    struct gather_args args = {.kind = given->kind, .n_rows = v->n_rows, .whole = v->out, .unit = given->unit,
                               .is_stored = run->is_stored};
    struct rms_norm_args row;
    struct combine_args combine;
    run->is_stored = false;
    if (given->kind == GATHER_COLUMNS && given->n_chosen) {
        args.first = given->first;
        args.n_columns = given->end - given->first;
        args.n_chosen = given->n_chosen;
    } else if (given->kind == GATHER_COLUMNS) {
        args.first = given->first;
        args.n_columns = v->in[0].width;
        if (step->ops[ROLE_SUM] || v->in[0].data != columns_of(m, v->out, given->first, v->in[0]).data) {
            args.a = v->in[0];
            args.b = v->in[1];
        }
    } else {
        args.token_ids = given->by_rank ? run->row_part : run->view.token_ids;
        args.routes = v->in[1].data;
        args.route_stride = route_stride(m, v->in[1]);
        args.n_chosen = given->n_chosen;
        args.first_id = (int32_t)given->first;
        args.end_id = (int32_t)given->end;
    }
    if (norm) {
        row = (struct rms_norm_args){v->n_rows, 1, v->out, view_of(run, step->normed), vector_of(m, norm, 0),
                                     norm->rms_norm.eps, 0};
        args.norm = &row;
    }
    if (sum) {
        combine = (struct combine_args){v->n_rows, sum->combine.n_chosen, sum->combine.is_input_scaled, args.routes,
                                        args.route_stride, v->out, view_of(run, step->next)};
        args.combine = &combine;
    }
    return m->backend->comm->gather(m->ctx, &args, run->err);
}

bool ranks_share_logits(const struct model *m, const struct op *logits)
{
    return m->options.n_ranks > 1 && m->program->weights[logits->weight[0]].rows < m->program->vocab_size;
}

struct view ranks_logits(const struct model *m, const struct op *logits)
{
    return (struct view){m->logits + logits->logits.first_id, m->program->weights[logits->weight[0]].rows, m->vocab_stride};
}

uint32_t ranks_least_shared_rows(const struct model *m)
{
    const struct comm *comm = m->options.n_ranks > 1 ? m->backend->comm : NULL;
    const bool says_least = comm && comm->size_bytes > offsetof(struct comm, least_shared_rows);
    if (!says_least || !comm->least_shared_rows || m->options.n_here < m->options.n_ranks)
        return UINT32_MAX;
    for (uint32_t i = 0; i < m->program->n_ops; i++)
        if (m->program->ops[i].code == OP_LOGITS && ranks_share_logits(m, &m->program->ops[i]))
            return comm->least_shared_rows;
    return UINT32_MAX;
}

struct drawn_rows ranks_drawn_rows(const struct model *m, uint32_t n_rows)
{
    const uint64_t n = n_rows, rank = m->options.rank, n_ranks = m->options.n_ranks;
    if (n_rows < m->least_shared_rows)
        return (struct drawn_rows){0, model_draws(m) ? n_rows : 0};
    return (struct drawn_rows){(uint32_t)(n * rank / n_ranks), (uint32_t)(n * (rank + 1) / n_ranks)};
}

enum rc ranks_join_logits(struct running *run, const struct op *logits, uint32_t n_rows)
{
    const struct model *m = run->m;
    const bool is_shared = run->is_drawn_at_once && n_rows >= m->least_shared_rows;
    struct gather_args args = {
        .kind = is_shared ? GATHER_TO_OWNERS : GATHER_TO_FIRST, .n_rows = n_rows,
        .whole = {m->logits, m->program->vocab_size, m->vocab_stride},
        .first = logits->logits.first_id, .n_columns = m->program->weights[logits->weight[0]].rows,
    };
    return m->backend->comm->gather(m->ctx, &args, run->err);
}

bool ranks_mirror(const struct model *m, const struct linear_args *args)
{
    const struct comm *comm = m->options.n_ranks > 1 ? m->backend->comm : NULL;
    return comm && comm->size_bytes > offsetof(struct comm, mirrors) && comm->mirrors && comm->mirrors(m->ctx, args);
}

bool ranks_mirror_parts(const struct model *m, const struct experts_args *args)
{
    const struct comm *comm = m->options.n_ranks > 1 ? m->backend->comm : NULL;
    return comm && comm->size_bytes > offsetof(struct comm, mirrors_parts) && comm->mirrors_parts &&
           comm->mirrors_parts(m->ctx, args);
}

enum rc ranks_meet(struct running *run, struct meet_args args)
{
    const struct model *m = run->m;
    return m->options.n_ranks > 1 ? m->backend->comm->meet(m->ctx, &args, run->err) : RC_OK;
}
