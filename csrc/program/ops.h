/* ops.h: what the check and the run of an operation are written with (ops_*.c). check_name returns the requirement that an
 * operation does not meet, or NULL. run_name fills the arguments of the backend's function and calls it. */
#ifndef LLMPY_OPS_H
#define LLMPY_OPS_H

#include "running.h"

#define OPERATION(CODE, name, n_in, n_out, WEIGHT, ROWS, COLUMNS, check, entry, attributes) \
    const char *check(const struct program *p, const struct op *op); \
    enum rc run_##name(struct running *run, const struct step *step, const struct views *v);
#include "operations.def"

/* ---- checks -------------------------------------------------------------------------------------------------------------- */

static inline uint32_t width_of(const struct program *p, uint32_t value)
{
    return p->values[value].width;
}

static inline bool is_vector(const struct program *p, uint32_t weight, uint32_t width)
{
    return p->weights[weight].kind == WEIGHT_VECTOR && p->weights[weight].rows == width;
}

static inline bool is_optional_vector(const struct program *p, uint32_t weight, uint32_t width)
{
    return weight == NO_INDEX || is_vector(p, weight, width);
}

/* Whether a weight is absent, a vector shared by all heads, or a vector with elements for each head. */
static inline bool is_of_heads(const struct program *p, uint32_t n_heads, uint32_t weight, uint32_t width)
{
    return weight == NO_INDEX || is_vector(p, weight, width) || is_vector(p, weight, width / n_heads);
}

/* ---- arguments ----------------------------------------------------------------------------------------------------------- */

/* Weight i of an operation, a vector in device memory. NULL: there is no such operation or no such weight. */
static inline const float *vector_of(const struct model *m, const struct op *op, uint32_t i)
{
    return op ? weights_vector(m->weights, op->weight[i]) : NULL;
}

/* Weight i of an operation, a matrix. */
static inline struct matrix *matrix_of(const struct model *m, const struct op *op, uint32_t i)
{
    return weights_matrix(m->weights, op->weight[i]);
}

/* The distance between the weights of adjacent heads. 0: all heads share the weights, or there are none. */
static inline uint32_t weight_stride(const struct model *m, uint32_t weight, uint32_t n_heads, uint32_t width)
{
    return weight != NO_INDEX && n_heads > 1 && m->program->weights[weight].rows == width ? width / n_heads : 0;
}

/* The act of the gated product that the step computes at its input or its output. */
static inline uint32_t act_of(const struct step *step)
{
    const struct op *input = step->ops[ROLE_INPUT], *output = step->ops[ROLE_OUTPUT];
    const struct op *gated = output ? output : input && input->code == OP_GATED ? input : NULL;
    return gated ? gated->gated.act : 0;
}

/* The two calls of a route: the router's linear of x, and the choice of experts. The logits are float32. */
struct routing {
    struct linear_args router;
    struct route_args route;
};

uint32_t route_stride(const struct model *m, struct view routes); /* in routes */
struct routing routing_of(const struct model *m, const struct op *op, uint32_t n_rows, struct view x, struct view routes,
                          struct view logits);
enum rc head_run(struct running *run, const struct step *step, uint32_t row, uint32_t n_rows, struct view x, struct view y);
enum rc qkv_run(struct running *run, const struct step *step, const struct views *v); /* STEP_QKV and STEP_KV_WRITE */

#endif
