/* running.h: one step of a model on its way, between executor.c (which walks the plan) and operations.c (which runs what takes
 * part in no fusion). */
#ifndef LLMPY_RUNNING_H
#define LLMPY_RUNNING_H

#include "model_state.h"

/* A batch, or the rows that a captured graph stands for. */
struct running {
    struct model *m;
    struct batch *batch;             /* NULL while a graph is captured */
    struct batch_view view;
    const int32_t *tables[BATCH_MAX_GROUPS + 1], *wanted_rows;
    const int32_t *token_types;      /* [n_rows]; NULL: all are 0 */
    uint32_t n_wanted_rows, n_logits_rows; /* wanted: for their logits, then for their states */
    struct err *err;
};

static inline struct view view_of(const struct model *m, struct place place)
{
    return (struct view){place.width ? m->arena + place.offset * m->item_bytes : NULL, place.width, place.stride};
}

/* Where the recurrent state of that number lies for the sequences of the batch. */
struct state_view state_of(const struct running *run, uint32_t number);

/* From one head's weights of a norm to the next's: 0 where all heads share them, or have none. */
static inline uint32_t weight_stride(const struct model *m, uint32_t weight, uint32_t n_heads, uint32_t width)
{
    return weight != NO_INDEX && n_heads > 1 && m->program->weights[weight].rows == width ? width / n_heads : 0;
}

/* What a route's step asks for. */
void routing_of(const struct running *run, const struct step *step, uint32_t n_rows, struct linear_args *router,
                struct route_args *route);
enum rc step_run(struct running *run, const struct step *step);
enum rc rope_tables_run(struct running *run); /* of a step, before all others */
struct kv_view kv_of(const struct running *run, uint32_t layer); /* executor.c */
enum rc operation_run(struct running *run, const struct step *step);
bool operation_is_known(const struct backend *backend, const struct op *op); /* the backend has what the operation needs */

#endif
