/* ops_recurrence.c: recurrent mixers, which keep a state for every sequence. */
#include "ops.h"

#define STATE_FITS "inputs, weights and the state fit each other"

static bool is_state(const struct program *p, uint32_t state, uint32_t n_units, uint32_t unit_floats)
{
    return state < p->n_states && p->states[state].n_units == n_units && p->states[state].unit_floats == unit_floats;
}

/* Where recurrent state `number` of the program lies for the sequences of the batch. */
static struct state_view state_of(const struct running *run, uint32_t number)
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

static bool is_conv(const struct program *p, const struct op *op)
{
    uint32_t width = width_of(p, op->in[0]), n_taps = op->conv.n_taps;
    return n_taps >= 2 && is_vector(p, op->weight[0], width * n_taps) && is_optional_vector(p, op->weight[1], width) &&
           is_state(p, op->conv.state, width, n_taps - 1) && width_of(p, op->out[0]) == width;
}

const char *check_conv(const struct program *p, const struct op *op)
{
    return is_conv(p, op) ? NULL : STATE_FITS;
}

enum rc run_conv(struct running *run, const struct step *step, const struct views *v)
{
    const struct model *m = run->m;
    const struct op *op = step->ops[ROLE_MAIN];
    struct conv_args args = {
        .batch = &run->view, .state = state_of(run, op->conv.state), .n_taps = op->conv.n_taps,
        .weight = vector_of(m, op, 0), .bias = vector_of(m, op, 1),
        .has_act = op->conv.act != 0, .act = op->conv.act ? op->conv.act - 1 : 0, .x = v->in[0], .out = v->out,
    };
    return m->backend->conv(m->ctx, &args, run->err);
}

static bool is_ssm(const struct program *p, const struct op *op)
{
    uint32_t width = width_of(p, op->in[0]), n_heads = width_of(p, op->in[1]), n_groups = op->ssm.n_groups;
    if (!n_groups || width % n_heads || n_heads % n_groups || width_of(p, op->in[2]) % n_groups)
        return false;
    for (uint32_t i = 0; i < 3; i++)
        if (op->weight[i] == NO_INDEX || !is_vector(p, op->weight[i], n_heads))
            return false;
    return width_of(p, op->in[2]) == width_of(p, op->in[3]) && width_of(p, op->out[0]) == width &&
           is_state(p, op->ssm.state, n_heads, width / n_heads * (width_of(p, op->in[2]) / n_groups));
}

const char *check_ssm(const struct program *p, const struct op *op)
{
    return is_ssm(p, op) ? NULL : STATE_FITS;
}

enum rc run_ssm(struct running *run, const struct step *step, const struct views *v)
{
    const struct model *m = run->m;
    const struct op *op = step->ops[ROLE_MAIN], *dt_norm = step->ops[ROLE_DT_NORM], *dt_linear = step->ops[ROLE_DT_LINEAR];
    uint32_t n_heads = m->program->weights[op->weight[0]].rows;
    struct ssm_args args = {
        .batch = &run->view, .state = state_of(run, op->ssm.state), .n_heads = n_heads, .head_dim = v->in[0].width / n_heads,
        .n_groups = op->ssm.n_groups, .n_state = v->in[2].width / op->ssm.n_groups,
        .a_log = vector_of(m, op, 0), .dt_bias = vector_of(m, op, 1), .skip = vector_of(m, op, 2),
        .dt_min = op->ssm.dt_min, .dt_max = op->ssm.dt_max, .x = v->in[0], .dt = v->in[1], .b = v->in[2], .c = v->in[3],
        .out = v->out, .gate = v->in[4], .act = act_of(step), .b_norm = vector_of(m, step->ops[ROLE_B_NORM], 0),
        .c_norm = vector_of(m, step->ops[ROLE_C_NORM], 0), .dt_norm = vector_of(m, dt_norm, 0),
        .norm_eps = dt_norm ? dt_norm->rms_norm.eps : 0, .scratch = v->mid,
        .dt_matrix = dt_linear ? matrix_of(m, dt_linear, 0) : NULL,
    };
    return m->backend->ssm(m->ctx, &args, run->err);
}

static bool is_selective_scan(const struct program *p, const struct op *op)
{
    uint32_t width = width_of(p, op->in[0]), n_state = width_of(p, op->in[2]);
    return width_of(p, op->in[1]) == width && width_of(p, op->in[3]) == n_state && width_of(p, op->out[0]) == width &&
           is_vector(p, op->weight[0], width * n_state) && op->weight[1] != NO_INDEX && is_vector(p, op->weight[1], width) &&
           is_optional_vector(p, op->weight[2], width) && is_state(p, op->selective_scan.state, width, n_state);
}

const char *check_selective_scan(const struct program *p, const struct op *op)
{
    return is_selective_scan(p, op) ? NULL : STATE_FITS;
}

enum rc run_selective_scan(struct running *run, const struct step *step, const struct views *v)
{
    const struct model *m = run->m;
    const struct op *op = step->ops[ROLE_MAIN];
    struct selective_scan_args args = {
        .batch = &run->view, .state = state_of(run, op->selective_scan.state), .n_state = v->in[2].width,
        .a_log = vector_of(m, op, 0), .skip = vector_of(m, op, 1),
        .dt_bias = vector_of(m, op, 2), .x = v->in[0], .dt = v->in[1], .b = v->in[2], .c = v->in[3],
        .out = v->out, .gate = v->in[4], .act = act_of(step),
    };
    return m->backend->selective_scan(m->ctx, &args, run->err);
}

static bool is_delta(const struct program *p, const struct op *op)
{
    uint32_t keys = width_of(p, op->in[0]), values = width_of(p, op->in[2]);
    uint32_t n_heads = width_of(p, op->in[3]), n_keys = op->delta.n_key_heads;
    if (!n_keys || n_heads % n_keys || keys % n_keys || values % n_heads || op->weight[1] == NO_INDEX)
        return false;
    return width_of(p, op->in[1]) == keys && width_of(p, op->in[4]) == n_heads && width_of(p, op->out[0]) == values &&
           is_vector(p, op->weight[0], n_heads) && is_vector(p, op->weight[1], n_heads) &&
           is_state(p, op->delta.state, n_heads, keys / n_keys * (values / n_heads));
}

const char *check_delta(const struct program *p, const struct op *op)
{
    return is_delta(p, op) ? NULL : STATE_FITS;
}

enum rc run_delta(struct running *run, const struct step *step, const struct views *v)
{
    const struct model *m = run->m;
    const struct op *op = step->ops[ROLE_MAIN];
    struct delta_args args = {
        .batch = &run->view, .state = state_of(run, op->delta.state), .n_heads = v->in[3].width,
        .n_key_heads = op->delta.n_key_heads, .key_dim = v->in[0].width / op->delta.n_key_heads,
        .value_dim = v->in[2].width / v->in[3].width,
        .a_log = vector_of(m, op, 0), .dt_bias = vector_of(m, op, 1),
        .q = v->in[0], .k = v->in[1], .v = v->in[2], .a = v->in[3], .b = v->in[4], .out = v->out,
    };
    return m->backend->delta(m->ctx, &args, run->err);
}
