/* operations.c: the table of operations. Its rows are in operations.def; each operation's check and run are in ops_*.c. */
#include "backend_library.h"
#include "ops.h"

#include <stddef.h>

/* Names of enum values in programs and in Python. */
#define ACTS(NAME) \
    NAME(ACT_SILU, "silu") NAME(ACT_GELU, "gelu") NAME(ACT_GELU_TANH, "gelu_tanh") NAME(ACT_RELU, "relu") \
    NAME(ACT_RELU2, "relu2") NAME(ACT_TANH, "tanh") NAME(ACT_SIGMOID, "sigmoid") NAME(ACT_CLIP, "clip") \
    NAME(ACT_XIELU, "xielu") NAME(ACT_IDENTITY, "identity") NAME(ACT_SCALE, "scale") \
    NAME(ACT_QUICK_GELU, "quick_gelu")
#define NAME(value, name) [value] = name,
#define NAME_BEHIND_NONE(value, name) [value + 1] = name,
static const char *const acts[] = {ACTS(NAME) NULL}, *const acts_or_none[] = {"none", ACTS(NAME_BEHIND_NONE) NULL};
static const char *const embed_sources[] = {
    [EMBED_TOKENS] = "tokens", [EMBED_POSITIONS] = "positions", [EMBED_TYPES] = "types", NULL};
static const char *const route_scores[] = {
    [ROUTE_SOFTMAX] = "softmax", [ROUTE_SIGMOID] = "sigmoid", [ROUTE_CHOSEN_SOFTMAX] = "chosen_softmax",
    [ROUTE_CHOSEN_SIGMOID] = "chosen_sigmoid", NULL};
static const char *const gather_kinds[] = {
    [GATHER_COLUMNS] = "columns", [GATHER_ROWS] = "rows", [GATHER_ROUTES] = "routes", NULL};
static const char *const expert_forms[] = {
    [EXPERT_GATED] = "gated", [EXPERT_CLAMPED] = "clamped", [EXPERT_PLAIN] = "plain", NULL};

#define OPERATION(CODE, name, n_in, n_out, WEIGHT, ROWS, COLUMNS, check, entry, attributes) \
    static const struct attribute name##_attributes[] = {attributes{0}}; \
    _Static_assert(sizeof(struct name##_attributes) <= OP_ATTRIBUTES * sizeof(uint32_t), "op->words holds them");
#define INTEGER(field) {#field, ATTRIBUTE_INTEGER, NULL},
#define CHOICE(field, names, last) {#field, ATTRIBUTE_INTEGER, names},
#define REAL(field) {#field, ATTRIBUTE_REAL, NULL},
#include "operations.def"

/* ---- the table ----------------------------------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    uint8_t n_in, n_out;
    enum { WEIGHT0_ANY, WEIGHT0_MATRIX, WEIGHT0_VECTOR } weight;
    enum { ROWS_ALONE, ROWS_ACROSS } rows;
    enum { COLUMNS_MIXED, COLUMNS_EACH } columns;
    const char *(*check)(const struct program *p, const struct op *op);
    enum rc (*run)(struct running *run, const struct step *step, const struct views *v);
    const struct attribute *attributes;
    size_t entry; /* offset of the required function in struct backend */
} OPS[OP_COUNT] = {
#define OPERATION(CODE, name, n_in, n_out, WEIGHT, ROWS, COLUMNS, check, entry, attributes) \
    [OP_##CODE] = {#name, n_in, n_out, WEIGHT0_##WEIGHT, ROWS_##ROWS, COLUMNS_##COLUMNS, check, run_##name, \
                   name##_attributes, offsetof(struct backend, entry)},
#include "operations.def"
};

const char *op_name(uint32_t code)
{
    return code < OP_COUNT ? OPS[code].name : "?";
}

const struct attribute *op_attributes(uint32_t code)
{
    return OPS[code].attributes;
}

size_t op_entry(uint32_t code)
{
    return OPS[code].entry;
}

bool op_crosses_rows(uint32_t code)
{
    return OPS[code].rows == ROWS_ACROSS;
}

bool op_is_by_column(uint32_t code)
{
    return OPS[code].columns == COLUMNS_EACH;
}

static const char *check_choices(const struct op *op)
{
    switch (op->code) {
#define OPERATION(CODE, name, n_in, n_out, WEIGHT, ROWS, COLUMNS, check, entry, attributes) \
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
                                   : op->out[i] >= p->n_values ||
                                         (p->values[op->out[i]].of != NO_INDEX && op->code != OP_GATHER))
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

enum rc step_run(struct running *run, const struct step *step)
{
    const struct model *m = run->m;
    uint32_t n_rows = run->piece ? piece_rows(run->piece, step->list) / step->per : run->view.n_rows;
    bool is_wanted = step->on_selected || step->code == STEP_SELECT;
    run->first_row = step->on_selected || step->of_all_ranks ? 0 : run->own_row;
    struct views v = {.n_rows = is_wanted ? run->n_wanted_rows : step->of_all_ranks ? run->n_all_rows : n_rows,
                      .mid = view_of(run, step->mid)};
    for (uint32_t i = 0; i < OP_INPUTS; i++)
        v.in[i] = view_of(run, step->in[i]);
    run->first_row = is_wanted ? 0 : run->first_row;
    v.out = view_of(run, step->out);
    switch (step->code) {
    case STEP_OPERATION: return OPS[step->ops[ROLE_MAIN]->code].run(run, step, &v);
    case STEP_QKV:
    case STEP_KV_WRITE: return qkv_run(run, step, &v);
    case STEP_SELECT: break;
    }
    return m->backend->select(m->ctx, &(struct select_args){v.n_rows, run->wanted_rows, v.in[0], v.out, NULL}, run->err);
}

bool op_scales_logits(const struct op *op)
{
    return op->code == OP_LOGITS && (op->logits.scale != 1 || op->logits.softcap != 0);
}

bool op_spreads_logits(const struct op *op)
{
    return op->code == OP_LOGITS && op->weight[2] != NO_INDEX;
}

bool operation_is_known(const struct backend *b, const struct op *op)
{
    return backend_has(b, OPS[op->code].entry) || entry_is_composed(OPS[op->code].entry);
}
