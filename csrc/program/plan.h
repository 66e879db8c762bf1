/* plan.h: turns a checked program into a list of steps, one backend call each, with a place in one arena for every value.
 * plan_make does three things:
 *   - It fuses neighbouring operations by the table in patterns.c if the backend has the fused form. Fused equals composed bit
 *     for bit.
 *   - It selects the rows whose logits are wanted right after the last operation that crosses rows (attention, recurrence).
 *   - It lets values share memory if their lifetimes do not overlap.
 * Made once at load; constant afterwards. */
#ifndef LLMPY_PLAN_H
#define LLMPY_PLAN_H

#include "program.h"

enum step_code {
    STEP_OPERATION,               /* runs its operations (runs.c) */
    STEP_QKV, STEP_KV_WRITE,      /* writes the keys and values of an attention; qkv also applies its norms and its rope */
    STEP_SELECT                   /* copies the wanted rows of a value */
};

/* What an operation is in a step. A fused step has several operations. */
enum role {
    ROLE_MAIN,                    /* the operation that names the step; NULL only for STEP_SELECT */
    ROLE_INPUT,                   /* linear: the norm or the gated product of its input */
    ROLE_OUTPUT,                  /* linear, recurrence: the gated product of its output; gather: the sum over its routes */
    ROLE_SUM,                     /* linear: the sum of its output and `add`; gather: the sum of its inputs, which it gathers */
    ROLE_NORM,                    /* sum, gather: the norm of what it makes */
    ROLE_TERM,                    /* sum with a norm: the norm of the sum's second term */
    ROLE_NEXT,                    /* sum with a norm: the route or the linear that reads the norm's output */
    ROLE_ROPE, ROLE_Q_NORM, ROLE_K_NORM, /* attention */
    ROLE_B_NORM, ROLE_C_NORM, ROLE_DT_NORM, ROLE_DT_LINEAR, /* recurrence: what makes its inputs */
    ROLE_COUNT
};

/* Where a value lies: element (r, c) is arena[offset + r * stride + c]. width 0: no value. */
struct place {
    size_t offset;
    uint32_t width, stride;
};

struct step {
    enum step_code code;
    const struct op *ops[ROLE_COUNT]; /* NULL: the step has no such operation */
    struct place in[OP_INPUTS];       /* of the first operation that reads them; in[4] of a recurrence with ROLE_OUTPUT: gate */
    struct place add, out;            /* add: the other term of ROLE_SUM */
    struct place mid;                 /* scratch, or the main operation's second output; gather: the sum of its inputs */
    struct place normed, next;        /* outputs of ROLE_NORM and of ROLE_NEXT; gather: next is that of ROLE_OUTPUT */
    bool on_selected;                 /* the step works on the wanted rows (logits, states), else on all rows of the batch */
    bool of_all_ranks;                /* the step works on the rows of all ranks (program.is_by_data) */
    bool is_gathered_next;            /* the next step is a gather of out, which lies where the gather wants it */
    uint32_t list, per;               /* of a tower: the rows of its result (struct value) */
};

struct plan {
    struct step *steps;
    uint32_t n_steps;
    uint32_t first_carried; /* the first step of batches that go on from drafts; 0: there are no steps before it */
    size_t arena_values;
};

/* fusions: enum fusion flags of the backend; has_qkv: whether the backend has the fused qkv. */
enum rc plan_make(const struct program *program, uint32_t fusions, bool has_qkv, uint32_t max_rows, struct plan *plan,
                  struct err *err);
void plan_clear(struct plan *plan);
/* Writes step `index` in words: operations, a tensor name, the rows. False: there is no such step. */
bool plan_step_text(const struct plan *plan, const struct program *program, uint32_t index, char *text, size_t size_bytes);

#endif
