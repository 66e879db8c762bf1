/* operations.c: the functions of each operation beside its row in operations.def: check_name checks widths, weights and
 * attributes, run_name runs an operation that plan.c leaves as STEP_OP. */
#include "running.h"

#include <stddef.h>
#include <string.h>

/* Names of enum values in programs and in Python. */
#define ACTS(NAME) \
    NAME(ACT_SILU, "silu") NAME(ACT_GELU, "gelu") NAME(ACT_GELU_TANH, "gelu_tanh") NAME(ACT_RELU, "relu") \
    NAME(ACT_RELU2, "relu2") NAME(ACT_TANH, "tanh") NAME(ACT_SIGMOID, "sigmoid") NAME(ACT_CLIP, "clip") \
    NAME(ACT_XIELU, "xielu") NAME(ACT_IDENTITY, "identity") NAME(ACT_SCALE, "scale")
#define NAME(value, name) [value] = name,
#define NAME_BEHIND_NONE(value, name) [value + 1] = name,
static const char *const acts[] = {ACTS(NAME) NULL}, *const acts_or_none[] = {"none", ACTS(NAME_BEHIND_NONE) NULL};
static const char *const embed_sources[] = {
    [EMBED_TOKENS] = "tokens", [EMBED_POSITIONS] = "positions", [EMBED_TYPES] = "types", NULL};
static const char *const route_scores[] = {
    [ROUTE_SOFTMAX] = "softmax", [ROUTE_SIGMOID] = "sigmoid", [ROUTE_CHOSEN_SOFTMAX] = "chosen_softmax",
    [ROUTE_CHOSEN_SIGMOID] = "chosen_sigmoid", NULL};
static const char *const expert_forms[] = {
    [EXPERT_GATED] = "gated", [EXPERT_CLAMPED] = "clamped", [EXPERT_PLAIN] = "plain", NULL};

#define OPERATION(CODE, name, n_in, n_out, WEIGHT, ROWS, check, RUN, entry, attributes) \
    static const struct attribute name##_attributes[] = {attributes{0}}; \
    _Static_assert(sizeof(struct name##_attributes) <= OP_ATTRIBUTES * sizeof(uint32_t), "op->words holds them");
#define INTEGER(field) {#field, ATTRIBUTE_INTEGER, NULL},
#define CHOICE(field, names, last) {#field, ATTRIBUTE_INTEGER, names},
#define REAL(field) {#field, ATTRIBUTE_REAL, NULL},
#include "operations.def"

/* ---- checks -------------------------------------------------------------------------------------------------------------- */

static uint32_t width_of(const struct program *p, uint32_t value)
{
    return p->values[value].width;
}

static bool is_vector(const struct program *p, uint32_t weight, uint32_t width)
{
    return p->weights[weight].kind == WEIGHT_VECTOR && p->weights[weight].rows == width;
}

/* Whether a weight is absent, a vector shared by all heads, or a vector with elements for each head. */
static bool is_of_heads(const struct program *p, uint32_t n_heads, uint32_t weight, uint32_t width)
{
    return weight == NO_INDEX || is_vector(p, weight, width) || is_vector(p, weight, width / n_heads);
}

static const char *check_nothing(const struct program *p, const struct op *op)
{
    (void)p;
    (void)op;
    return NULL;
}

static const char *check_embed(const struct program *p, const struct op *op)
{
    const struct weight *weight = &p->weights[op->weight[0]];
    if (op->embed.first_row >= weight->rows)
        return "the first row is in the matrix";
    return width_of(p, op->out[0]) == weight->cols ? NULL : "the output is as wide as the matrix has columns";
}

static const char *check_linear(const struct program *p, const struct op *op)
{
    const struct weight *weight = &p->weights[op->weight[0]];
    uint32_t out0 = width_of(p, op->out[0]);
    if (width_of(p, op->in[0]) != weight->cols || out0 != weight->rows)
        return "input and output fit the matrix";
    return op->weight[1] == NO_INDEX || is_vector(p, op->weight[1], out0) ? NULL : "the bias is a vector of the output's width";
}

static const char *check_rope(const struct program *p, const struct op *op)
{
    const struct rope_attributes *rope = &op->rope;
    if (rope->rope >= p->n_ropes || !rope->head_dim || 2 * p->ropes[rope->rope].n_freqs > rope->head_dim)
        return "the rope exists and turns at most a head's dimensions";
    if (rope->k_head_dim &&
        (2 * p->ropes[rope->rope].n_freqs > rope->k_head_dim || width_of(p, op->in[1]) % rope->k_head_dim))
        return "keys are heads, of at least the turned dimensions";
    return width_of(p, op->in[0]) == width_of(p, op->out[0]) && width_of(p, op->in[1]) == width_of(p, op->out[1])
               ? NULL
               : "widths stay the same";
}

static const char *check_gated(const struct program *p, const struct op *op)
{
    uint32_t in0 = width_of(p, op->in[0]), out0 = width_of(p, op->out[0]);
    return (in0 == out0 || in0 == 1) && width_of(p, op->in[1]) == out0 ? NULL : "all widths are equal, or the gate's is 1";
}

static const char *check_add(const struct program *p, const struct op *op)
{
    uint32_t in0 = width_of(p, op->in[0]);
    return in0 == width_of(p, op->in[1]) && in0 == width_of(p, op->out[0]) ? NULL : "all widths are equal";
}

static const char *check_norm(const struct program *p, const struct op *op)
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

static const char *check_logits(const struct program *p, const struct op *op)
{
    const struct weight *weight = &p->weights[op->weight[0]];
    if (width_of(p, op->in[0]) != weight->cols || weight->rows != p->vocab_size)
        return "the head is [vocab_size][hidden]";
    if (op->weight[1] != NO_INDEX && !is_vector(p, op->weight[1], p->vocab_size))
        return "the bias is a vector of vocab_size";
    return op->logits.scale > 0 && op->logits.softcap >= 0 ? NULL : "the factor is above 0, the cap not below";
}

static const char *check_act(const struct program *p, const struct op *op)
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

static const char *check_row_attention(const struct program *p, const struct op *op)
{
    uint32_t n_heads = op->row_attention.n_heads, n_kv_heads = op->row_attention.n_kv_heads;
    uint32_t q = width_of(p, op->in[0]), k = width_of(p, op->in[1]);
    if (!n_heads || !n_kv_heads || n_heads % n_kv_heads || q % n_heads)
        return "query heads are a multiple of key heads";
    if (p->n_layers)
        return "no layer has a cache where rows see later ones";
    return k == width_of(p, op->in[2]) && k == q / n_heads * n_kv_heads && width_of(p, op->out[0]) == q
               ? NULL
               : "q, k and v are heads * head_dim wide";
}

#define STATE_FITS "inputs, weights and the state fit each other"

static bool is_state(const struct program *p, uint32_t state, uint32_t n_units, uint32_t unit_floats)
{
    return state < p->n_states && p->states[state].n_units == n_units && p->states[state].unit_floats == unit_floats;
}

static bool is_optional_vector(const struct program *p, uint32_t weight, uint32_t width)
{
    return weight == NO_INDEX || is_vector(p, weight, width);
}

static bool is_conv(const struct program *p, const struct op *op)
{
    uint32_t width = width_of(p, op->in[0]), n_taps = op->conv.n_taps;
    return n_taps >= 2 && is_vector(p, op->weight[0], width * n_taps) && is_optional_vector(p, op->weight[1], width) &&
           is_state(p, op->conv.state, width, n_taps - 1) && width_of(p, op->out[0]) == width;
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

static bool is_selective_scan(const struct program *p, const struct op *op)
{
    uint32_t width = width_of(p, op->in[0]), n_state = width_of(p, op->in[2]);
    return width_of(p, op->in[1]) == width && width_of(p, op->in[3]) == n_state && width_of(p, op->out[0]) == width &&
           is_vector(p, op->weight[0], width * n_state) && op->weight[1] != NO_INDEX && is_vector(p, op->weight[1], width) &&
           is_optional_vector(p, op->weight[2], width) && is_state(p, op->selective_scan.state, width, n_state);
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

static const char *check_conv(const struct program *p, const struct op *op)
{
    return is_conv(p, op) ? NULL : STATE_FITS;
}

static const char *check_ssm(const struct program *p, const struct op *op)
{
    return is_ssm(p, op) ? NULL : STATE_FITS;
}

static const char *check_selective_scan(const struct program *p, const struct op *op)
{
    return is_selective_scan(p, op) ? NULL : STATE_FITS;
}

static const char *check_delta(const struct program *p, const struct op *op)
{
    return is_delta(p, op) ? NULL : STATE_FITS;
}

static const char *check_route(const struct program *p, const struct op *op)
{
    const struct weight *router = &p->weights[op->weight[0]];
    uint32_t n_chosen = op->route.n_chosen, n_groups = op->route.n_groups, chosen_groups = op->route.chosen_groups;
    if (width_of(p, op->in[0]) != router->cols || !is_optional_vector(p, op->weight[1], router->rows) ||
        !is_optional_vector(p, op->weight[2], router->rows))
        return "the input fits the router, its biases have an element an expert";
    if (!n_groups || router->rows % n_groups || !chosen_groups || chosen_groups > n_groups || !n_chosen ||
        n_chosen > router->rows / n_groups * chosen_groups)
        return "the experts are in equal groups, of which the chosen ones hold the chosen experts";
    return width_of(p, op->out[0]) == 4 * n_chosen && width_of(p, op->out[1]) == 2 * router->rows
               ? NULL
               : "there is room for routes and logits";
}

static const char *check_experts(const struct program *p, const struct op *op)
{
    const struct weight *up = &p->weights[op->weight[0]], *down = op->weight[1] == NO_INDEX ? NULL : &p->weights[op->weight[1]];
    uint32_t n_experts = op->experts.n_experts, n_chosen = op->experts.n_chosen;
    uint32_t in0 = width_of(p, op->in[0]), out0 = width_of(p, op->out[0]);
    if (!down || down->kind != WEIGHT_MATRIX || !n_experts || up->n_parts % n_experts || down->n_parts % n_experts)
        return "up and down are matrices of parts for each expert";
    uint64_t inner = down->cols, n_halves = op->experts.form == EXPERT_PLAIN ? 1 : 2, widest = inner > out0 ? inner : out0;
    if (in0 != up->cols || up->rows != n_experts * n_halves * inner || down->rows != (uint64_t)n_experts * out0)
        return "input, matrices and output fit each other";
    if (!is_optional_vector(p, op->weight[2], up->rows) || !is_optional_vector(p, op->weight[3], down->rows))
        return "the biases have an element a row of their matrices";
    return width_of(p, op->in[1]) == 4 * n_chosen &&
                   width_of(p, op->out[1]) == n_chosen * 4 * widest + 2 * (uint64_t)n_experts + 16
               ? NULL
               : "the routes are of as many experts, and the scratch has its width";
}

static const char *check_attention(const struct program *p, const struct op *op)
{
    if (op->attention.layer >= p->n_layers)
        return "the cache layer exists";
    const struct cache_layer *layer = &p->layers[op->attention.layer];
    uint32_t q = layer->n_heads * layer->head_dim, kv = layer->n_kv_heads * layer->head_dim;
    if (width_of(p, op->in[0]) != q || width_of(p, op->out[0]) != q || width_of(p, op->in[1]) != kv ||
        width_of(p, op->in[2]) != kv)
        return "q, k and v are heads * head_dim wide";
    for (uint32_t i = 0; i < 2; i++)
        if (op->weight[i] != NO_INDEX && !is_vector(p, op->weight[i], layer->n_heads))
            return "slopes and sinks are vectors of one number a head";
    return op->attention.chunk && op->attention.chunk != layer->window ? "a chunk is the layer's window" : NULL;
}

static const char *check_head_linear(const struct program *p, const struct op *op)
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

static const char *check_latent_attention(const struct program *p, const struct op *op)
{
    uint32_t number = op->latent_attention.layer;
    if (number >= p->n_layers || p->layers[number].n_kv_heads)
        return "the cache layer exists, for latents";
    const struct cache_layer *layer = &p->layers[number];
    uint32_t latent = width_of(p, op->in[2]), rope = width_of(p, op->in[3]), tails = width_of(p, op->in[1]);
    if (layer->head_dim != latent + rope || tails % layer->n_heads || tails / layer->n_heads < rope)
        return "a layer's row is latent and rope key, and every head has the latter at its end";
    return width_of(p, op->in[0]) == layer->n_heads * latent && width_of(p, op->out[0]) == layer->n_heads * latent
               ? NULL
               : "queries and the output are heads * latent wide";
}

static const char *check_position_scale(const struct program *p, const struct op *op)
{
    const struct position_scale_attributes *scale = &op->position_scale;
    if (!scale->every || scale->every > INT32_MAX || scale->first > INT32_MAX || !(scale->slope >= 0))
        return "a step is at least one position, and the slope not below 0";
    return width_of(p, op->in[0]) == width_of(p, op->out[0]) ? NULL : "the width stays the same";
}

/* ---- runs ---------------------------------------------------------------------------------------------------------------- */

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

/* The router's logits are float32 and lie in the operation's second output. */
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

/* ---- the table ----------------------------------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    uint8_t n_in, n_out;
    enum { WEIGHT0_ANY, WEIGHT0_MATRIX, WEIGHT0_VECTOR } weight;
    enum { ROWS_ALONE, ROWS_ACROSS } rows;
    const char *(*check)(const struct program *p, const struct op *op);
    enum rc (*run)(struct running *run, const struct step *step, const struct views *views);
    const struct attribute *attributes;
    size_t entry; /* offset of the required function in struct backend */
} OPS[OP_COUNT] = {
#define ITSELF(name) run_##name
#define PLANNED(name) NULL
#define OPERATION(CODE, name, n_in, n_out, WEIGHT, ROWS, check, RUN, entry, attributes) \
    [OP_##CODE] = {#name, n_in, n_out, WEIGHT0_##WEIGHT, ROWS_##ROWS, check, RUN(name), name##_attributes, \
                   offsetof(struct backend, entry)},
#include "operations.def"
#undef ITSELF
#undef PLANNED
};

const char *op_name(uint32_t code)
{
    return code < OP_COUNT ? OPS[code].name : "?";
}

const struct attribute *op_attributes(uint32_t code)
{
    return OPS[code].attributes;
}

bool op_crosses_rows(uint32_t code)
{
    return OPS[code].rows == ROWS_ACROSS;
}

static const char *check_choices(const struct op *op)
{
    switch (op->code) {
#define OPERATION(CODE, name, n_in, n_out, WEIGHT, ROWS, check, RUN, entry, attributes) \
    case OP_##CODE: { \
        const struct name##_attributes *given = &op->name; \
        (void)given; \
        attributes \
        return NULL; \
    }
#define CHOICE(field, names, last) if (given->field > (last)) return #field " is known";
#include "operations.def"
    default: return "the operation is known";
    }
}

const char *op_check(const struct program *p, const struct op *op, const uint8_t *written)
{
    if (op->code >= OP_COUNT)
        return "the operation is known";
    for (uint32_t i = 0; i < OP_INPUTS; i++) {
        if (op->in[i] == NO_INDEX ? i < OPS[op->code].n_in : op->in[i] >= p->n_values)
            return "all inputs are given";
        if (op->in[i] != NO_INDEX && !written[op->in[i]])
            return "inputs are written before they are read";
    }
    for (uint32_t i = 0; i < OP_OUTPUTS; i++)
        if (op->out[i] == NO_INDEX ? i < OPS[op->code].n_out
                                   : op->out[i] >= p->n_values || p->values[op->out[i]].of != NO_INDEX)
            return "outputs are values of their own";
    for (uint32_t i = 0; i < OP_WEIGHTS; i++)
        if (op->weight[i] != NO_INDEX && op->weight[i] >= p->n_weights)
            return "weights exist";
    bool needs_matrix = OPS[op->code].weight == WEIGHT0_MATRIX;
    if (OPS[op->code].weight != WEIGHT0_ANY &&
        (op->weight[0] == NO_INDEX || p->weights[op->weight[0]].kind != (needs_matrix ? WEIGHT_MATRIX : WEIGHT_VECTOR)))
        return needs_matrix ? "weight 0 is a matrix" : "weight 0 is a vector";
    const char *wanted = check_choices(op);
    return wanted ? wanted : OPS[op->code].check(p, op);
}

enum rc operation_run(struct running *run, const struct step *step)
{
    const struct model *m = run->m;
    struct views views = {step->on_selected ? run->n_wanted_rows : run->view.n_rows, .out = view_of(m, step->out)};
    for (uint32_t i = 0; i < OP_INPUTS; i++)
        views.in[i] = view_of(m, step->in[i]);
    return OPS[step->op->code].run(run, step, &views);
}

bool operation_is_known(const struct backend *b, const struct op *op)
{
    bool scales = op->code == OP_LOGITS && (op->logits.scale != 1 || op->logits.softcap != 0);
    void (*entry)(void);
    memcpy(&entry, (const char *)b + OPS[op->code].entry, sizeof entry);
    return entry && (!scales || b->scale_logits);
}
