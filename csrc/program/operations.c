#include "running.h"

/* The views of a step's inputs and output. */
struct views {
    uint32_t n_rows;
    struct view in[OP_INPUTS], out;
};

static enum rc run_layer_norm(struct running *run, const struct step *step, const struct views *v)
{
    const struct model *m = run->m;
    const struct op *op = step->op;
    uint32_t either = op->weight[0] == NO_INDEX ? op->weight[1] : op->weight[0];
    struct layer_norm_args args = {v->n_rows, v->in[0], v->out, weights_vector(m->weights, op->weight[0]),
                                   weights_vector(m->weights, op->weight[1]), op->layer_norm.eps, op->layer_norm.n_heads,
                                   weight_stride(m, either, op->layer_norm.n_heads, v->in[0].width)};
    return m->backend->layer_norm(m->ctx, &args, run->err);
}

static enum rc run_act(struct running *run, const struct step *step, const struct views *v)
{
    const struct model *m = run->m;
    const struct op *op = step->op;
    struct act_args args = {v->n_rows, op->act.act, v->in[0], v->out, op->act.limit,
                            weights_vector(m->weights, op->weight[0])};
    return m->backend->act(m->ctx, &args, run->err);
}

static enum rc run_row_attention(struct running *run, const struct step *step, const struct views *v)
{
    const struct model *m = run->m;
    const struct row_attention_attributes *given = &step->op->row_attention;
    struct row_attention_args args = {&run->view, given->n_heads, given->n_kv_heads, v->in[0].width / given->n_heads,
                                      given->scale, v->in[0], v->in[1], v->in[2], v->out};
    return m->backend->row_attention(m->ctx, &args, run->err);
}

struct state_view state_of(const struct running *run, uint32_t number)
{
    const struct model *m = run->m;
    const struct state_layer *state = &m->program->states[number];
    const struct kv_place *place = &m->places[m->program->n_layers + number];
    uint32_t unit_bytes = state->unit_floats * (uint32_t)sizeof(float);
    return (struct state_view){
        .pool = m->pool,
        .page_bytes = m->layout.page_bytes,
        .table = run->tables[place->group],
        .table_stride = m->table_stride,
        .first_entry = place->index,
        .n_units = state->n_units,
        .unit_bytes = unit_bytes,
        .units_per_page = (uint32_t)(m->layout.page_bytes / unit_bytes),
    };
}

static enum rc run_conv(struct running *run, const struct step *step, const struct views *v)
{
    const struct model *m = run->m;
    const struct op *op = step->op;
    struct conv_args args = {
        .batch = &run->view, .state = state_of(run, op->conv.state), .n_taps = op->conv.n_taps,
        .weight = weights_vector(m->weights, op->weight[0]), .bias = weights_vector(m->weights, op->weight[1]),
        .has_act = op->conv.act != 0, .act = op->conv.act ? op->conv.act - 1 : 0, .x = v->in[0], .out = v->out,
    };
    return m->backend->conv(m->ctx, &args, run->err);
}

static enum rc run_ssm(struct running *run, const struct step *step, const struct views *v)
{
    const struct model *m = run->m;
    const struct op *op = step->op;
    uint32_t n_heads = m->program->weights[op->weight[0]].rows;
    struct ssm_args args = {
        .batch = &run->view, .state = state_of(run, op->ssm.state), .n_heads = n_heads, .head_dim = v->in[0].width / n_heads,
        .n_groups = op->ssm.n_groups, .n_state = v->in[2].width / op->ssm.n_groups,
        .a_log = weights_vector(m->weights, op->weight[0]),
        .dt_bias = weights_vector(m->weights, op->weight[1]), .skip = weights_vector(m->weights, op->weight[2]),
        .dt_min = op->ssm.dt_min, .dt_max = op->ssm.dt_max, .x = v->in[0], .dt = v->in[1], .b = v->in[2], .c = v->in[3],
        .out = v->out, .gate = v->in[4], .act = step->act, .b_norm = weights_vector(m->weights, step->norm[0]),
        .c_norm = weights_vector(m->weights, step->norm[1]), .dt_norm = weights_vector(m->weights, step->norm[2]),
        .norm_eps = step->norm_eps, .scratch = view_of(m, step->mid),
        .dt_matrix = step->weight == NO_INDEX ? NULL : weights_matrix(m->weights, step->weight),
    };
    return m->backend->ssm(m->ctx, &args, run->err);
}

static enum rc run_selective_scan(struct running *run, const struct step *step, const struct views *v)
{
    const struct model *m = run->m;
    const struct op *op = step->op;
    struct selective_scan_args args = {
        .batch = &run->view, .state = state_of(run, op->selective_scan.state), .n_state = v->in[2].width,
        .a_log = weights_vector(m->weights, op->weight[0]), .skip = weights_vector(m->weights, op->weight[1]),
        .dt_bias = weights_vector(m->weights, op->weight[2]), .x = v->in[0], .dt = v->in[1], .b = v->in[2], .c = v->in[3],
        .out = v->out, .gate = v->in[4], .act = step->act,
    };
    return m->backend->selective_scan(m->ctx, &args, run->err);
}

static enum rc run_delta(struct running *run, const struct step *step, const struct views *v)
{
    const struct model *m = run->m;
    const struct op *op = step->op;
    struct delta_args args = {
        .batch = &run->view, .state = state_of(run, op->delta.state), .n_heads = v->in[3].width,
        .n_key_heads = op->delta.n_key_heads, .key_dim = v->in[0].width / op->delta.n_key_heads,
        .value_dim = v->in[2].width / v->in[3].width,
        .a_log = weights_vector(m->weights, op->weight[0]), .dt_bias = weights_vector(m->weights, op->weight[1]),
        .q = v->in[0], .k = v->in[1], .v = v->in[2], .a = v->in[3], .b = v->in[4], .out = v->out,
    };
    return m->backend->delta(m->ctx, &args, run->err);
}

/* The router's logits stay in float32: they lie in the operation's second result. */
void routing_of(const struct running *run, const struct step *step, uint32_t n_rows, struct linear_args *router,
                struct route_args *route)
{
    const struct model *m = run->m;
    const struct op *op = step->op;
    const struct route_attributes *given = &op->route;
    uint32_t n_experts = m->program->weights[op->weight[0]].rows;
    struct view routes = view_of(m, step->out), logits = view_of(m, step->mid);
    logits.width = n_experts;
    logits.stride = (uint32_t)(logits.stride * m->item_bytes / sizeof(float));
    *router = (struct linear_args){
        .matrix = weights_matrix(m->weights, op->weight[0]),
        .n_rows = n_rows,
        .x = view_of(m, step->in[0]),
        .y = logits,
        .bias = weights_vector(m->weights, op->weight[1]),
        .is_float_out = true,
    };
    *route = (struct route_args){
        .n_rows = n_rows, .n_experts = n_experts, .n_chosen = given->n_chosen, .score = given->score,
        .n_groups = given->n_groups, .chosen_groups = given->chosen_groups, .sums_two = given->sums_two,
        .is_normalised = given->is_normalised, .sum_eps = given->sum_eps, .scale = given->scale,
        .logits = logits.data, .logits_stride = logits.stride, .selection_bias = weights_vector(m->weights, op->weight[2]),
        .routes = routes.data, .route_stride = (uint32_t)(routes.stride * m->item_bytes / sizeof(struct route)),
    };
}

static enum rc run_route(struct running *run, const struct step *step, const struct views *v)
{
    const struct model *m = run->m;
    struct linear_args router;
    struct route_args route;
    routing_of(run, step, v->n_rows, &router, &route);
    enum rc rc = m->backend->linear(m->ctx, &router, run->err);
    return rc ? rc : m->backend->route(m->ctx, &route, run->err);
}

static enum rc run_experts(struct running *run, const struct step *step, const struct views *v)
{
    const struct model *m = run->m;
    const struct op *op = step->op;
    const struct experts_attributes *given = &op->experts;
    struct view routes = view_of(m, step->in[1]);
    struct experts_args args = {
        .n_rows = v->n_rows, .n_experts = given->n_experts, .n_chosen = given->n_chosen, .form = given->form, .act = given->act,
        .limit = given->limit, .is_input_scaled = given->is_input_scaled, .up = weights_matrix(m->weights, op->weight[0]),
        .down = weights_matrix(m->weights, op->weight[1]), .up_bias = weights_vector(m->weights, op->weight[2]),
        .down_bias = weights_vector(m->weights, op->weight[3]), .routes = routes.data,
        .route_stride = (uint32_t)(routes.stride * m->item_bytes / sizeof(struct route)), .x = view_of(m, step->in[0]),
        .y = view_of(m, step->out), .scratch = view_of(m, step->mid),
    };
    return m->backend->experts(m->ctx, &args, run->err);
}

static enum rc run_head_linear(struct running *run, const struct step *step, const struct views *v)
{
    const struct model *m = run->m;
    const struct op *op = step->op;
    const struct head_linear_attributes *given = &op->head_linear;
    struct head_linear_args args = {weights_matrix(m->weights, op->weight[0]), v->n_rows, given->n_heads, given->head_rows,
                                    given->first_row, given->used_rows, given->is_transposed, v->in[0], v->out};
    return m->backend->head_linear(m->ctx, &args, run->err);
}

static enum rc run_latent_attention(struct running *run, const struct step *step, const struct views *v)
{
    const struct model *m = run->m;
    const struct op *op = step->op;
    uint32_t layer = op->latent_attention.layer;
    struct latent_attention_args args = {
        &run->view, kv_of(run, layer), m->program->layers[layer].n_heads, op->latent_attention.scale,
        v->in[0], v->in[1], v->in[2], v->in[3], v->out};
    return m->backend->latent_attention(m->ctx, &args, run->err);
}

static enum rc run_position_scale(struct running *run, const struct step *step, const struct views *v)
{
    const struct model *m = run->m;
    const struct position_scale_attributes *given = &step->op->position_scale;
    struct position_scale_args args = {run->view.n_rows, given->every, given->first, given->slope, run->view.positions,
                                       v->in[0], v->out};
    return m->backend->position_scale(m->ctx, &args, run->err);
}

enum rc operation_run(struct running *run, const struct step *step)
{
#define ITSELF(name) run_##name
#define PLANNED(name) NULL
#define OPERATION(CODE, name, n_in, n_out, WEIGHT, ROWS, check, RUN, ...) [OP_##CODE] = RUN(name),
    static enum rc (*const RUNS[])(struct running *, const struct step *, const struct views *) = {
#include "operations.def"
    };
#undef ITSELF
#undef PLANNED
    const struct model *m = run->m;
    struct views views = {step->on_selected ? run->n_wanted_rows : run->view.n_rows, .out = view_of(m, step->out)};
    for (uint32_t i = 0; i < OP_INPUTS; i++)
        views.in[i] = view_of(m, step->in[i]);
    return RUNS[step->op->code](run, step, &views);
}

bool operation_is_known(const struct backend *b, const struct op *op)
{
    bool scales = op->code == OP_LOGITS && (op->logits.scale != 1 || op->logits.softcap != 0);
    return op_is_known(b, op->code) && (!scales || b->scale_logits);
}
