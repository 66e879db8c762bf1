/* ops_mixture.c: the choice of experts, and the experts. */
#include "ops.h"

const char *check_route(const struct program *p, const struct op *op)
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

uint32_t route_stride(const struct model *m, struct view routes)
{
    return (uint32_t)(routes.stride * m->item_bytes / sizeof(struct route));
}

struct routing routing_of(const struct model *m, const struct op *op, uint32_t n_rows, struct view x, struct view routes,
                          struct view logits)
{
    const struct route_attributes *given = &op->route;
    logits.width = m->program->weights[op->weight[0]].rows;
    logits.stride = (uint32_t)(logits.stride * m->item_bytes / sizeof(float));
    return (struct routing){
        .router = {.matrix = matrix_of(m, op, 0), .n_rows = n_rows, .x = x, .y = logits, .bias = vector_of(m, op, 1),
                   .is_float_out = true},
        .route = {
            .n_rows = n_rows, .n_experts = logits.width, .n_chosen = given->n_chosen, .score = given->score,
            .n_groups = given->n_groups, .chosen_groups = given->chosen_groups, .sums_two = given->sums_two,
            .is_normalised = given->is_normalised, .sum_eps = given->sum_eps, .scale = given->scale, .logits = logits.data,
            .logits_stride = logits.stride, .selection_bias = vector_of(m, op, 2), .routes = routes.data,
            .route_stride = route_stride(m, routes),
        },
    };
}

enum rc run_route(struct running *run, const struct step *step, const struct views *v)
{
    const struct model *m = run->m;
    struct routing routing = routing_of(m, step->ops[ROLE_MAIN], v->n_rows, v->in[0], v->out, v->mid);
    enum rc rc = m->backend->linear(m->ctx, &routing.router, run->err);
    return rc ? rc : RUN_ENTRY(m, route, &routing.route, run->err);
}

const char *check_experts(const struct program *p, const struct op *op)
{
    const struct weight *up = &p->weights[op->weight[0]], *down = op->weight[1] == NO_INDEX ? NULL : &p->weights[op->weight[1]];
    const struct experts_attributes *given = &op->experts;
    uint32_t n_experts = given->n_experts, n_chosen = given->n_chosen, n_held = given->n_local ? given->n_local : n_experts;
    uint32_t in0 = width_of(p, op->in[0]), n_results = given->is_by_route ? n_chosen : 1;
    if (given->is_by_route ? !p->is_of_rank || !n_chosen || (uint64_t)given->first + n_held > n_experts
                           : given->first || given->n_local)
        return "only a rank has some of the experts, and gives results by route";
    if (!down || down->kind != WEIGHT_MATRIX || !n_held || up->n_parts % n_held || down->n_parts % n_held)
        return "up and down are matrices of parts for each expert";
    uint32_t out0 = width_of(p, op->out[0]) / n_results;
    uint64_t inner = down->cols, n_halves = op->experts.form == EXPERT_PLAIN ? 1 : 2, widest = inner > out0 ? inner : out0;
    if (in0 != up->cols || up->rows != n_held * n_halves * inner || down->rows != (uint64_t)n_held * out0 ||
        width_of(p, op->out[0]) % n_results)
        return "input, matrices and output fit each other";
    if (!is_optional_vector(p, op->weight[2], up->rows) || !is_optional_vector(p, op->weight[3], down->rows))
        return "the biases have an element a row of their matrices";
    return width_of(p, op->in[1]) == 4 * n_chosen &&
                   width_of(p, op->out[1]) == n_chosen * 4 * widest + 2 * (uint64_t)n_experts + 16
               ? NULL
               : "the routes are of as many experts, and the scratch has its width";
}

/* What adapters add to the experts that are held; NULL: nothing. lora: storage, which must outlive the result. */
static const struct experts_lora *added_to(const struct running *run, const struct step *step, uint32_t up, uint32_t down,
                                           uint32_t n_held, struct experts_lora *lora)
{
    bool has_lora = run->has_adapters && run->m->lora.has_experts;
    return has_lora ? lora_experts(run, step, up, down, n_held, lora) : NULL;
}

enum rc run_experts(struct running *run, const struct step *step, const struct views *v)
{
    const struct model *m = run->m;
    const struct op *op = step->ops[ROLE_MAIN];
    const struct experts_attributes *given = &op->experts;
    struct experts_lora lora;
    struct experts_args args = {
        .n_rows = v->n_rows, .n_experts = given->n_experts, .n_chosen = given->n_chosen, .form = given->form, .act = given->act,
        .limit = given->limit, .is_input_scaled = given->is_input_scaled, .up = matrix_of(m, op, 0),
        .down = matrix_of(m, op, 1), .up_bias = vector_of(m, op, 2),
        .down_bias = vector_of(m, op, 3), .routes = v->in[1].data,
        .route_stride = route_stride(m, v->in[1]), .x = v->in[0], .y = v->out, .scratch = v->mid, .first = given->first,
        .n_local = given->n_local, .is_by_route = given->is_by_route,
        .lora = added_to(run, step, op->weight[0], op->weight[1], lora_held(op).n_held, &lora),
    };
    run->is_stored = args.is_mirrored = step->is_gathered_next && ranks_mirror_parts(m, &args);
    return m->backend->experts(m->ctx, &args, run->err);
}

/* Whether the scratch has room for the rows and the tables of routes, of which the wider end has `widest` columns. */
static bool has_scratch(const struct program *p, const struct op *op, uint64_t n_experts, uint64_t n_chosen, uint64_t widest)
{
    return width_of(p, op->out[1]) >= n_chosen * 4 * widest + 2 * n_experts + 16;
}

static uint64_t larger(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

const char *check_experts_up(const struct program *p, const struct op *op)
{
    const struct experts_up_attributes *given = &op->experts_up;
    const struct weight *up = &p->weights[op->weight[0]];
    uint32_t n_halves = given->form == EXPERT_PLAIN ? 1 : 2, out0 = width_of(p, op->out[0]);
    if (!p->is_of_rank)
        return "only a rank has a part of every expert";
    if (!given->n_experts || up->n_parts % given->n_experts || up->rows % ((uint64_t)given->n_experts * n_halves))
        return "up is a matrix of parts for each expert";
    uint64_t own = up->rows / given->n_experts / n_halves, n_chosen = given->n_chosen;
    if (!n_chosen || out0 % n_chosen || given->first + own > out0 / n_chosen || width_of(p, op->in[0]) != up->cols ||
        !is_optional_vector(p, op->weight[1], up->rows))
        return "input, matrix and output fit each other";
    return width_of(p, op->in[1]) == 4 * n_chosen &&
                   has_scratch(p, op, given->n_experts, n_chosen, larger(up->cols, out0 / n_chosen))
               ? NULL
               : "the routes are of as many experts, and the scratch has room";
}

enum rc run_experts_up(struct running *run, const struct step *step, const struct views *v)
{
    const struct model *m = run->m;
    const struct op *op = step->ops[ROLE_MAIN];
    const struct experts_up_attributes *given = &op->experts_up;
    struct experts_lora lora;
    struct experts_args args = {
        .n_rows = v->n_rows, .n_experts = given->n_experts, .n_chosen = given->n_chosen, .form = given->form, .act = given->act,
        .limit = given->limit, .is_input_scaled = given->is_input_scaled, .up = matrix_of(m, op, 0),
        .up_bias = vector_of(m, op, 1), .routes = v->in[1].data, .route_stride = route_stride(m, v->in[1]), .x = v->in[0],
        .y = v->out, .scratch = v->mid, .half = EXPERTS_UP, .first_column = given->first,
        .lora = added_to(run, step, op->weight[0], NO_INDEX, given->n_experts, &lora),
    };
    run->is_stored = args.is_mirrored = step->is_gathered_next && ranks_mirror_parts(m, &args);
    return m->backend->experts(m->ctx, &args, run->err);
}

const char *check_experts_down(const struct program *p, const struct op *op)
{
    const struct experts_down_attributes *given = &op->experts_down;
    const struct weight *down = &p->weights[op->weight[0]];
    uint64_t out0 = width_of(p, op->out[0]), n_chosen = given->n_chosen;
    if (!p->is_of_rank)
        return "only a rank has a part of every expert";
    if (!given->n_experts || down->n_parts % given->n_experts)
        return "down is a matrix of parts for each expert";
    if (!n_chosen || width_of(p, op->in[0]) != n_chosen * down->cols || down->rows != given->n_experts * out0 ||
        !is_optional_vector(p, op->weight[1], down->rows))
        return "input, matrix and output fit each other";
    return width_of(p, op->in[1]) == 4 * n_chosen && has_scratch(p, op, given->n_experts, n_chosen, larger(down->cols, out0))
               ? NULL
               : "the routes are of as many experts, and the scratch has room";
}

enum rc run_experts_down(struct running *run, const struct step *step, const struct views *v)
{
    const struct model *m = run->m;
    const struct op *op = step->ops[ROLE_MAIN];
    const struct experts_down_attributes *given = &op->experts_down;
    struct experts_lora lora;
    struct experts_args args = {
        .n_rows = v->n_rows, .n_experts = given->n_experts, .n_chosen = given->n_chosen,
        .is_input_scaled = given->is_input_scaled, .down = matrix_of(m, op, 0), .down_bias = vector_of(m, op, 1),
        .routes = v->in[1].data, .route_stride = route_stride(m, v->in[1]), .x = v->in[0], .y = v->out, .scratch = v->mid,
        .half = EXPERTS_DOWN, .lora = added_to(run, step, NO_INDEX, op->weight[0], given->n_experts, &lora),
    };
    return m->backend->experts(m->ctx, &args, run->err);
}

const char *check_combine(const struct program *p, const struct op *op)
{
    uint64_t n_chosen = op->combine.n_chosen;
    if (!p->is_of_rank)
        return "only the program of a rank combines results of routes";
    return n_chosen && width_of(p, op->in[0]) == n_chosen * width_of(p, op->out[0]) && width_of(p, op->in[1]) == 4 * n_chosen
               ? NULL
               : "there is a result for each route";
}

enum rc run_combine(struct running *run, const struct step *step, const struct views *v)
{
    const struct model *m = run->m;
    const struct combine_attributes *given = &step->ops[ROLE_MAIN]->combine;
    struct combine_args args = {v->n_rows, given->n_chosen, given->is_input_scaled, v->in[1].data, route_stride(m, v->in[1]),
                                v->in[0], v->out};
    return m->backend->combine(m->ctx, &args, run->err);
}
