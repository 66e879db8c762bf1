/* plan.h: turns a checked program into a list of steps, one backend call each, with a place in one arena for every value.
 * plan_make does three things:
 *   - It fuses adjacent operations by a few patterns if the backend has the fused form. Fused equals composed bit for bit.
 *   - It selects the rows whose logits are wanted right after the last operation that crosses rows (attention, recurrence).
 *   - It lets values share memory if their lifetimes do not overlap.
 * Made once at load; constant afterwards. */
#ifndef LLMPY_PLAN_H
#define LLMPY_PLAN_H

#include "program.h"

enum step_code {
    STEP_EMBED, STEP_LINEAR, STEP_RMS_NORM, STEP_ROPE, STEP_QKV, STEP_KV_WRITE, STEP_ATTENTION, STEP_GATED, STEP_ADD,
    STEP_ADD_NORM, STEP_SELECT, STEP_LOGITS, STEP_STATES,
    STEP_OP, /* an operation without a step code; operations.c runs it */
    STEP_COUNT
};

/* Where a value lies: element (r, c) is arena[offset + r * stride + c]. width 0: no value. */
struct place {
    size_t offset;
    uint32_t width, stride;
};

struct step {
    uint32_t code;
    struct place in[OP_INPUTS], add, out; /* in: x; q, k, v (after STEP_QKV only q); gate, up; a, b */
    struct place mid; /* of a linear with a gated product: scratch for gate | up; of a recurrence: scratch; else out1 */
    struct place normed;          /* STEP_ADD_NORM: the normalised sum; `out` is the sum */
    uint32_t weight, bias;        /* weight numbers or NO_INDEX */
    uint32_t norm[3];             /* absorbed norms: of a linear's input; of q, k; of a sum's second term; of b, c, dt */
    uint32_t input, output, act;  /* enum linear_input, enum linear_output and enum act */
    uint32_t rope, layer;
    float eps;
    float norm_eps;               /* of the absorbed norms of a sum's term and of b, c, dt */
    bool has_own_norms;           /* norms of q and k: each head has separate weights */
    bool is_joined;               /* STEP_ADD_NORM: its call computes the next step, a route or a linear, too. On that next
                                   * step: it is already computed. */
    const struct op *op;          /* the operation that the step runs; of STEP_ADD_NORM the sum. A recurrence is a STEP_OP: its
                                   * absorbed gate is in[4], its absorbed projection of dt is `weight` */
    uint32_t made[OP_OUTPUTS];    /* value numbers of the program that this step completes, or NO_INDEX */
    bool on_selected;             /* the step works on the wanted rows (logits, states), else on all rows of the batch */
};

/* Whether the call of the step before computes this step, too. */
static inline bool step_is_made(const struct step *step)
{
    return step->is_joined && step->code != STEP_ADD_NORM;
}

struct plan {
    struct step *steps;
    uint32_t n_steps;
    size_t arena_values;
};

/* fusions: enum fusion flags of the backend; has_qkv: whether the backend has the fused qkv. */
enum rc plan_make(const struct program *program, uint32_t fusions, bool has_qkv, uint32_t max_rows, struct plan *plan,
                  struct err *err);
void plan_clear(struct plan *plan);
const char *step_name(uint32_t code);

#endif
