/* plan.h: a checked program made ready to run: a list of steps, one backend call each, with every value in its place in one
 * arena. plan_make fuses neighbours by a few named patterns where the backend has the fused form (fused equals composed bit for
 * bit), moves the selection of the rows whose logits are wanted right behind the last attention, and lets values share memory
 * where their lives do not overlap. Made once at load; constant afterwards. */
#ifndef LLMPY_PLAN_H
#define LLMPY_PLAN_H

#include "program.h"

enum step_code {
    STEP_EMBED, STEP_LINEAR, STEP_RMS_NORM, STEP_ROPE, STEP_QKV, STEP_KV_WRITE, STEP_ATTENTION, STEP_GATED, STEP_ADD,
    STEP_ADD_NORM, STEP_SELECT, STEP_LOGITS, STEP_STATES,
    STEP_OP, /* an operation that takes part in no fusion, as operations.c runs it */
    STEP_COUNT
};

/* Where a tensor of rows lies: element (r, c) at arena[offset + r * stride + c], in values. width 0: none. */
struct place {
    size_t offset;
    uint32_t width, stride;
};

struct step {
    uint32_t code;
    struct place in[OP_INPUTS], add, out; /* in: x; q, k, v, or q alone behind STEP_QKV; gate, up; a, b */
    struct place mid; /* of a linear with a gated product: where gate | up would lie, free for the backend; else out1 */
    struct place normed;          /* of STEP_ADD_NORM, whose out is the sum */
    uint32_t weight, bias;        /* weight numbers or NO_INDEX */
    uint32_t norm[3];             /* norms absorbed: of a linear's input; of q and of k; of a sum's second term; of b, c, dt */
    uint32_t input, output, act;  /* enum linear_input, enum linear_output and enum act */
    uint32_t rope, layer;
    float eps;
    float norm_eps;               /* of norms absorbed, where eps is another's */
    bool has_own_norms;           /* of STEP_QKV: each head has weights of its own */
    bool is_joined;               /* of STEP_ADD_NORM: with the next step, a route or a linear, in one call; of that step: made
                                   * before */
    const struct op *op;          /* the operation that names the step; of STEP_ADD_NORM the sum. STEP_OP: in[4] is the gate,
                                   * weight the matrix of dt that a recurrence has absorbed */
    uint32_t made[OP_OUTPUTS];    /* values of the program that this step completes, or NO_INDEX */
    bool on_selected;             /* rows are those whose logits are wanted, else all rows of the batch */
};

/* Has the step before made what this one stands for? */
static inline bool step_is_made(const struct step *step)
{
    return step->is_joined && step->code != STEP_ADD_NORM;
}

struct plan {
    struct step *steps;
    uint32_t n_steps;
    size_t arena_values;
};

/* fusions: enum fusion of the backend; has_qkv: whether it has the fused qkv. */
enum rc plan_make(const struct program *program, uint32_t fusions, bool has_qkv, uint32_t max_rows, struct plan *plan,
                  struct err *err);
void plan_clear(struct plan *plan);
const char *step_name(uint32_t code);

#endif
