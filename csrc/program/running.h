/* running.h: the state of one model step, shared by executor.c (which runs the plan) and operations.c (which runs the
 * operations without a step code, STEP_OP). */
#ifndef LLMPY_RUNNING_H
#define LLMPY_RUNNING_H

#include "model_state.h"

/* The step that runs: a batch, or the padding rows of a graph that is being captured. */
struct running {
    struct model *m;
    struct batch *batch;             /* NULL while a graph is captured */
    struct batch_view view;
    const int32_t *tables[BATCH_MAX_GROUPS + 1], *wanted_rows;
    const int32_t *token_types;      /* [n_rows]; NULL: all are 0 */
    uint32_t n_wanted_rows, n_logits_rows; /* wanted_rows: first for logits, then for states */
    struct err *err;
};

static inline struct view view_of(const struct model *m, struct place place)
{
    return (struct view){place.width ? m->arena + place.offset * m->item_bytes : NULL, place.width, place.stride};
}

/* Where recurrent state `number` of the program lies for the sequences of the batch. */
struct state_view state_of(const struct running *run, uint32_t number);

/* The distance between the norm weights of adjacent heads. 0: all heads share the weights, or the norm has none. */
static inline uint32_t weight_stride(const struct model *m, uint32_t weight, uint32_t n_heads, uint32_t width)
{
    return weight != NO_INDEX && n_heads > 1 && m->program->weights[weight].rows == width ? width / n_heads : 0;
}

/* Fills the arguments of a route's step: the router's linear and the choice of experts. */
void routing_of(const struct running *run, const struct step *step, uint32_t n_rows, struct linear_args *router,
                struct route_args *route);
enum rc step_run(struct running *run, const struct step *step);
enum rc rope_tables_run(struct running *run); /* runs before the steps */
struct kv_view kv_of(const struct running *run, uint32_t layer); /* executor.c */
enum rc operation_run(struct running *run, const struct step *step);
bool operation_is_known(const struct backend *backend, const struct op *op); /* the backend has all entries that it needs */

#endif
