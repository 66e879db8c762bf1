/* ops_rows.c: operations on rows that need no other row: linears, norms, products, sums, activations. */
#include "ops.h"

const char *check_nothing(const struct program *p, const struct op *op)
{
    (void)p;
    (void)op;
    return NULL;
}

/* Pooling reads the states from the arena (model_read_states). */
enum rc run_states(struct running *run, const struct step *step, const struct views *v)
{
    (void)run;
    (void)step;
    (void)v;
    return RC_OK;
}

const char *check_embed(const struct program *p, const struct op *op)
{
    const struct weight *weight = &p->weights[op->weight[0]];
    uint32_t first_id = op->embed.first_id, end_id = op->embed.end_id;
    if (p->is_tower)
        return "a tower has no tokens";
    if (op->embed.first_row >= weight->rows)
        return "the first row is in the matrix";
    if ((first_id || end_id) && (op->embed.source != EMBED_TOKENS || first_id >= end_id || end_id > INT32_MAX ||
                                 end_id - first_id > weight->rows - op->embed.first_row))
        return "a range of token ids has rows in the matrix";
    return width_of(p, op->out[0]) == weight->cols ? NULL : "the output is as wide as the matrix has columns";
}

enum rc run_embed(struct running *run, const struct step *step, const struct views *v)
{
    const struct model *m = run->m;
    const int32_t *sources[] = {[EMBED_TOKENS] = run->view.token_ids, [EMBED_POSITIONS] = run->view.positions,
                                [EMBED_TYPES] = run->token_types};
    const struct embed_attributes *given = &step->ops[ROLE_MAIN]->embed;
    struct embed_args args = {
        .matrix = matrix_of(m, step->ops[ROLE_MAIN], 0), .token_ids = sources[given->source], .n_rows = run->view.n_rows,
        .scale = given->scale, .out = v->out, .first_row = given->first_row, .first_id = (int32_t)given->first_id,
        .end_id = (int32_t)given->end_id,
    };
    enum rc rc = m->backend->embed(m->ctx, &args, run->err);
    bool has_adapters = run->has_adapters && m->lora.has_embeddings && given->source == EMBED_TOKENS;
    return rc || !has_adapters ? rc : lora_embedding(run, step->ops[ROLE_MAIN]->weight[0], &args);
}

const char *check_linear(const struct program *p, const struct op *op)
{
    const struct weight *weight = &p->weights[op->weight[0]];
    uint32_t out0 = width_of(p, op->out[0]);
    if (width_of(p, op->in[0]) != weight->cols || out0 != weight->rows)
        return "input and output fit the matrix";
    return op->weight[1] == NO_INDEX || is_vector(p, op->weight[1], out0) ? NULL : "the bias is a vector of the output's width";
}

/* add: storage for the view of the added tensor; it must outlive the result. */
static struct linear_args linear_of(const struct running *run, const struct step *step, enum role role, uint32_t n_rows,
                                    struct view x, struct view y, struct view *add)
{
    const struct model *m = run->m;
    const struct op *op = step->ops[role], *input = step->ops[ROLE_INPUT];
    const struct op *norm = input && input->code == OP_RMS_NORM ? input : NULL;
    *add = view_of(run, step->add);
    return (struct linear_args){
        .matrix = matrix_of(m, op, 0),
        .n_rows = n_rows,
        .x = x,
        .y = y,
        .bias = vector_of(m, op, 1),
        .add = add->width ? add : NULL,
        .input = norm ? LINEAR_RMS_NORM : input ? LINEAR_GATED : LINEAR_PLAIN,
        .norm_weight = vector_of(m, norm, 0),
        .norm_eps = norm ? norm->rms_norm.eps : 0,
        .act = act_of(step),
        .is_float_out = op->code == OP_LOGITS,
        .output = step->ops[ROLE_OUTPUT] ? LINEAR_PRODUCT : LINEAR_SUM,
        .mid = view_of(run, step->mid),
    };
}

enum rc head_run(struct running *run, const struct step *step, uint32_t row, uint32_t n_rows, struct view x, struct view y)
{
    struct view add;
    struct linear_args args = linear_of(run, step, ROLE_MAIN, n_rows, x, y, &add);
    enum rc rc = run->m->backend->linear(run->m->ctx, &args, run->err);
    return rc || !run->has_adapters ? rc : lora_head(run, step, row, &args);
}

enum rc run_linear(struct running *run, const struct step *step, const struct views *v)
{
    struct view add;
    struct linear_args args = linear_of(run, step, ROLE_MAIN, v->n_rows, v->in[0], v->out, &add);
    if (run->has_adapters)
        return lora_linear(run, step, step->ops[ROLE_MAIN]->weight[0], &args);
    run->is_stored = args.is_mirrored = step->is_gathered_next && ranks_mirror(run->m, &args);
    return run->m->backend->linear(run->m->ctx, &args, run->err);
}

const char *check_norm(const struct program *p, const struct op *op)
{
    uint32_t n_heads = op->code == OP_LAYER_NORM ? op->layer_norm.n_heads : op->rms_norm.n_heads;
    uint32_t width = width_of(p, op->in[0]), bias = op->code == OP_LAYER_NORM ? op->weight[1] : NO_INDEX;
    bool has_both = op->weight[0] != NO_INDEX && bias != NO_INDEX;
    if (!n_heads || width % n_heads || width != width_of(p, op->out[0]))
        return "the row is heads of one size";
    if (!is_of_heads(p, n_heads, op->weight[0], width) || !is_of_heads(p, n_heads, bias, width) ||
        (has_both && p->weights[bias].rows != p->weights[op->weight[0]].rows))
        return "weight and bias are vectors of a head's size or of the row's width";
    return NULL;
}

enum rc run_rms_norm(struct running *run, const struct step *step, const struct views *v)
{
    const struct model *m = run->m;
    const struct op *op = step->ops[ROLE_MAIN];
    uint32_t n_heads = op->rms_norm.n_heads;
    struct rms_norm_args args = {v->n_rows, n_heads, v->in[0], v->out, vector_of(m, op, 0), op->rms_norm.eps,
                                 weight_stride(m, op->weight[0], n_heads, v->in[0].width)};
    return m->backend->rms_norm(m->ctx, &args, run->err);
}

enum rc run_layer_norm(struct running *run, const struct step *step, const struct views *v)
{
    const struct model *m = run->m;
    const struct op *op = step->ops[ROLE_MAIN];
    uint32_t either = op->weight[0] == NO_INDEX ? op->weight[1] : op->weight[0];
    struct layer_norm_args args = {v->n_rows, v->in[0], v->out, vector_of(m, op, 0),
                                   vector_of(m, op, 1), op->layer_norm.eps, op->layer_norm.n_heads,
                                   weight_stride(m, either, op->layer_norm.n_heads, v->in[0].width)};
    return m->backend->layer_norm(m->ctx, &args, run->err);
}

const char *check_gated(const struct program *p, const struct op *op)
{
    uint32_t in0 = width_of(p, op->in[0]), out0 = width_of(p, op->out[0]);
    return (in0 == out0 || in0 == 1) && width_of(p, op->in[1]) == out0 ? NULL : "all widths are equal, or the gate's is 1";
}

enum rc run_gated(struct running *run, const struct step *step, const struct views *v)
{
    struct gated_args args = {v->n_rows, step->ops[ROLE_MAIN]->gated.act, v->in[0], v->in[1], v->out};
    return run->m->backend->gated(run->m->ctx, &args, run->err);
}

const char *check_add(const struct program *p, const struct op *op)
{
    uint32_t in0 = width_of(p, op->in[0]);
    return in0 == width_of(p, op->in[1]) && in0 == width_of(p, op->out[0]) ? NULL : "all widths are equal";
}

/* The sum, its norm, and the linear or the route behind the norm. */
static enum rc run_add_rms_norm(struct running *run, const struct step *step, const struct views *v)
{
    const struct model *m = run->m;
    const struct op *norm = step->ops[ROLE_NORM], *term = step->ops[ROLE_TERM], *next = step->ops[ROLE_NEXT];
    struct view add, out = view_of(run, step->next);
    struct add_rms_norm_args args = {
        .n_rows = v->n_rows, .a = v->in[0], .b = v->in[1], .sum = v->out, .out = view_of(run, step->normed),
        .weight = vector_of(m, norm, 0), .eps = norm->rms_norm.eps, .inner_weight = vector_of(m, term, 0),
        .inner_eps = term ? term->rms_norm.eps : 0,
    };
    struct linear_args linear;
    struct routing routing;
    if (next && next->code == OP_ROUTE) {
        routing = routing_of(m, next, v->n_rows, args.out, out, v->mid);
        args.router = &routing.router;
        args.route = &routing.route;
    } else if (next) {
        linear = linear_of(run, step, ROLE_NEXT, v->n_rows, args.out, out, &add);
        args.linear = run->has_adapters ? NULL : &linear;
    }
    enum rc rc = m->backend->add_rms_norm(m->ctx, &args, run->err);
    bool is_left = next && next->code == OP_LINEAR && run->has_adapters;
    return rc || !is_left ? rc : lora_linear(run, step, next->weight[0], &linear);
}

enum rc run_add(struct running *run, const struct step *step, const struct views *v)
{
    if (step->ops[ROLE_NORM])
        return run_add_rms_norm(run, step, v);
    return run->m->backend->add(run->m->ctx, &(struct add_args){v->n_rows, v->in[0], v->in[1], v->out}, run->err);
}

const char *check_act(const struct program *p, const struct op *op)
{
    uint32_t act = op->act.act;
    if (width_of(p, op->in[0]) != width_of(p, op->out[0]))
        return "the width stays the same";
    if (act == ACT_CLIP && !(op->act.limit > 0))
        return "the limit is above 0";
    uint32_t n_weights = act == ACT_XIELU ? 4 : act == ACT_SCALE ? width_of(p, op->in[0]) : 0;
    return !n_weights || (op->weight[0] != NO_INDEX && is_vector(p, op->weight[0], n_weights))
               ? NULL
               : "the weights are alpha_p, alpha_n, beta and eps, or a factor for each column";
}

enum rc run_act(struct running *run, const struct step *step, const struct views *v)
{
    const struct model *m = run->m;
    const struct op *op = step->ops[ROLE_MAIN];
    struct act_args args = {v->n_rows, op->act.act, v->in[0], v->out, op->act.limit,
                            vector_of(m, op, 0)};
    return m->backend->act(m->ctx, &args, run->err);
}

const char *check_head_linear(const struct program *p, const struct op *op)
{
    const struct weight *weight = &p->weights[op->weight[0]];
    const struct head_linear_attributes *heads = &op->head_linear;
    uint32_t n_heads = heads->n_heads, used = heads->used_rows, in0 = width_of(p, op->in[0]);
    uint32_t taken = heads->is_transposed ? used : weight->cols, given = heads->is_transposed ? weight->cols : used;
    if (!n_heads || weight->rows != (uint64_t)n_heads * heads->head_rows ||
        (uint64_t)heads->first_row + used > heads->head_rows || !used)
        return "the matrix has the heads' rows";
    if (in0 % n_heads || in0 / n_heads < taken)
        return "the input has a part a head, long enough";
    return width_of(p, op->out[0]) == n_heads * given ? NULL : "the output has a part a head";
}

enum rc run_head_linear(struct running *run, const struct step *step, const struct views *v)
{
    const struct model *m = run->m;
    const struct op *op = step->ops[ROLE_MAIN];
    const struct head_linear_attributes *given = &op->head_linear;
    struct head_linear_args args = {matrix_of(m, op, 0), v->n_rows, given->n_heads, given->head_rows,
                                    given->first_row, given->used_rows, given->is_transposed, v->in[0], v->out};
    return m->backend->head_linear(m->ctx, &args, run->err);
}

const char *check_take(const struct program *p, const struct op *op)
{
    const struct weight *columns = &p->weights[op->weight[0]];
    uint32_t width = width_of(p, op->in[0]);
    if (!columns->values || columns->rows != width_of(p, op->out[0]))
        return "the weight is a constant with a number for each column of the output";
    for (uint32_t i = 0; i < columns->rows; i++)
        if (!(columns->values[i] >= 0 && columns->values[i] < (float)width) ||
            columns->values[i] != (float)(uint32_t)columns->values[i])
            return "the numbers are those of columns of the input";
    return NULL;
}

enum rc run_take(struct running *run, const struct step *step, const struct views *v)
{
    const struct model *m = run->m;
    struct take_args args = {v->n_rows, v->in[0], v->out, vector_of(m, step->ops[ROLE_MAIN], 0)};
    return m->backend->take(m->ctx, &args, run->err);
}

const char *check_position_scale(const struct program *p, const struct op *op)
{
    const struct position_scale_attributes *scale = &op->position_scale;
    if (p->is_tower)
        return "a tower has no tokens";
    if (!scale->every || scale->every > INT32_MAX || scale->first > INT32_MAX || !(scale->slope >= 0))
        return "a step is at least one position, and the slope not below 0";
    return width_of(p, op->in[0]) == width_of(p, op->out[0]) ? NULL : "the width stays the same";
}

enum rc run_position_scale(struct running *run, const struct step *step, const struct views *v)
{
    const struct model *m = run->m;
    const struct position_scale_attributes *given = &step->ops[ROLE_MAIN]->position_scale;
    struct position_scale_args args = {run->view.n_rows, given->every, given->first, given->slope, run->view.positions,
                                       v->in[0], v->out};
    return RUN_ENTRY(m, position_scale, &args, run->err);
}
