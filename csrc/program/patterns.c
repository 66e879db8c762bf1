/* patterns.c: turns operations into nodes, one backend call each. The node of an operation also computes neighbours of the
 * operation where a row of PATTERNS fits. */
#include "planner.h"

#include <string.h>

void node_init(struct node *node, enum step_code code)
{
    memset(node, 0, sizeof *node);
    node->step.code = code;
    for (int i = 0; i < OP_INPUTS; i++)
        node->in[i].root = NO_INDEX;
    node->add.root = node->mid.root = node->out.root = node->normed.root = node->next.root = NO_INDEX;
}

uint32_t root_add(struct planner *b, uint32_t width, uint32_t room)
{
    b->alias[b->n_roots].root = NO_INDEX;
    b->widths[b->n_roots] = width;
    b->rooms[b->n_roots] = room;
    b->per[b->n_roots] = 1;
    return b->n_roots++;
}

static struct node *node_add(struct planner *b, enum step_code code, const struct op *op)
{
    struct node *node = &b->nodes[b->n_nodes++];
    node_init(node, code);
    node->step.ops[ROLE_MAIN] = op;
    return node;
}

bool overlaps(struct ref a, struct ref b)
{
    return a.width && b.width && a.root == b.root && a.offset < b.offset + b.width && b.offset < a.offset + a.width;
}

static struct ref ref_of(const struct planner *b, uint32_t value)
{
    const struct value *values = b->p->values;
    if (value == NO_INDEX)
        return (struct ref){NO_INDEX, 0, 0};
    struct ref ref = {value, 0, values[value].width};
    while (values[ref.root].of != NO_INDEX) {
        ref.offset += values[ref.root].offset;
        ref.root = values[ref.root].of;
    }
    return ref;
}

/* The number of inputs in the whole program that read any column of a value. */
static uint32_t readers(const struct planner *b, uint32_t value)
{
    struct ref ref = ref_of(b, value);
    uint32_t n = 0;
    for (uint32_t i = 0; i < b->p->n_ops; i++)
        for (uint32_t j = 0; j < OP_INPUTS; j++)
            n += overlaps(ref, ref_of(b, b->p->ops[i].in[j]));
    return n;
}

/* The operation of this code that writes exactly this value, if the value has a single reader; else NULL. */
static const struct op *sole_producer(const struct planner *b, uint32_t value, uint32_t code)
{
    for (uint32_t i = 0; i < b->p->n_ops; i++)
        for (uint32_t j = 0; j < OP_OUTPUTS; j++)
            if (b->p->ops[i].out[j] == value)
                return b->p->ops[i].code == code && !b->absorbed[i] && readers(b, value) == 1 ? &b->p->ops[i] : NULL;
    return NULL;
}

/* Whether a norm is over one head on every rank: no rank has more columns, so none has more heads. */
static bool is_of_row(const struct planner *b, const struct op *norm)
{
    const struct value *x = &b->p->values[norm->in[0]];
    return norm->rms_norm.n_heads == 1 && x->width == x->room;
}

/* The norm that writes a value, if it is over whole rows and has a single reader; else NULL. */
static const struct op *sole_norm(const struct planner *b, uint32_t value)
{
    const struct op *norm = sole_producer(b, value, OP_RMS_NORM);
    return norm && is_of_row(b, norm) ? norm : NULL;
}

/* The operation before another one of the program, or NULL. */
static const struct op *before(const struct planner *b, const struct op *op)
{
    return op == b->p->ops ? NULL : op - 1;
}

static void absorb(struct planner *b, struct node *node, enum role role, const struct op *op)
{
    node->step.ops[role] = op;
    b->absorbed[op - b->p->ops] = 1;
}

/* The node now computes `op` first. The operation that it was made for follows as `role` and keeps its output. */
static void begin_with(struct planner *b, struct node *node, const struct op *op, enum role role)
{
    node->step.ops[role] = node->step.ops[ROLE_MAIN];
    absorb(b, node, ROLE_MAIN, op);
    for (int i = 0; i < OP_INPUTS; i++)
        node->in[i] = ref_of(b, op->in[i]);
}

/* ---- patterns ---------------------------------------------------------------------------------------------------- */

static void gated_of_recurrence(struct planner *b, struct node *node)
{
    const struct op *gated = node->step.ops[ROLE_MAIN], *op = sole_producer(b, gated->in[1], OP_SSM);
    op = op ? op : sole_producer(b, gated->in[1], OP_SELECTIVE_SCAN);
    if (!op)
        return;
    begin_with(b, node, op, ROLE_OUTPUT);
    node->in[4] = ref_of(b, gated->in[0]);
}

/* Gate and up are the halves of one linear's output, and the linear is the operation right before. */
static void gated_of_linear(struct planner *b, struct node *node)
{
    const struct op *gated = node->step.ops[ROLE_MAIN], *linear = before(b, gated);
    struct ref gate = ref_of(b, gated->in[0]), up = ref_of(b, gated->in[1]);
    bool is_pair = gate.root == up.root && gate.offset == 0 && up.offset == gate.width && up.width == gate.width &&
                   b->p->values[gate.root].width == 2 * gate.width && readers(b, gate.root) == 2;
    /* A linear has one act, so it cannot have gated products at both its input and its output. */
    if (!is_pair || b->fusions & FUSION_GATED_LINEAR || !linear || b->absorbed[linear - b->p->ops] ||
        linear->code != OP_LINEAR || linear->out[0] != gate.root)
        return;
    begin_with(b, node, linear, ROLE_OUTPUT);
    node->mid = ref_of(b, linear->out[0]);
}

/* The linear right before a sum whose output is a term of it, or NULL. other: the other term. */
static const struct op *linear_of_sum(const struct planner *b, const struct op *sum, uint32_t *other)
{
    for (uint32_t side = 0; side < 2 && sum->in[0] != sum->in[1]; side++) {
        const struct op *linear = sole_producer(b, sum->in[side], OP_LINEAR);
        *other = sum->in[1 - side];
        if (linear && linear + 1 == sum)
            return linear;
    }
    return NULL;
}

static bool is_gathered(const struct planner *b, const struct op *sum)
{
    const struct op *next = sum + 1;
    return next < b->p->ops + b->p->n_ops && next->code == OP_GATHER && next->gather.kind == GATHER_COLUMNS &&
           next->in[0] == sum->out[0];
}

static void sum_of_linear(struct planner *b, struct node *node)
{
    const struct op *sum = node->step.ops[ROLE_MAIN];
    uint32_t other;
    const struct op *linear = linear_of_sum(b, sum, &other);
    if (!linear || (!(b->fusions & FUSION_LINEAR_ADD) && !is_gathered(b, sum)))
        return;
    begin_with(b, node, linear, ROLE_SUM);
    node->add = ref_of(b, other);
}

/* The norm's input is the sum right before it. Later operations may read the sum, too. */
static void norm_of_sum(struct planner *b, struct node *node)
{
    const struct op *norm = node->step.ops[ROLE_MAIN], *sum = before(b, norm);
    if (!sum || !is_of_row(b, norm) || sum->code != OP_ADD || sum->out[0] != norm->in[0])
        return;
    begin_with(b, node, sum, ROLE_NORM);
    node->normed = node->out;
    node->out = ref_of(b, sum->out[0]);
}

static bool is_gathered_twice(const struct planner *b, const struct op *gather)
{
    for (uint32_t i = 0; i < b->p->n_ops; i++)
        if (b->p->ops[i].code == OP_GATHER && &b->p->ops[i] != gather && b->p->ops[i].in[0] == gather->in[0])
            return true;
    return false;
}

/* The norm's input is what the operation right before gathers, which may be the sum before that, unless a linear makes the sum.
 * The sum is a value of its own, so it lies inside the gathered one (plan.c). Later operations may read both. */
static void norm_of_gather(struct planner *b, struct node *node)
{
    const struct op *norm = node->step.ops[ROLE_MAIN], *gather = before(b, norm);
    if (!gather || gather->code != OP_GATHER || gather->gather.kind != GATHER_COLUMNS || gather->gather.n_chosen ||
        gather->out[0] != norm->in[0] || !is_of_row(b, norm) || b->p->values[norm->in[0]].of != NO_INDEX)
        return;
    begin_with(b, node, gather, ROLE_NORM);
    node->normed = node->out;
    node->out = ref_of(b, gather->out[0]);
    const struct op *sum = before(b, gather);
    uint32_t other;
    if (!sum || sum->code != OP_ADD || sum->out[0] != gather->in[0] || is_gathered_twice(b, gather) ||
        (b->fusions & FUSION_LINEAR_ADD_GATHER && linear_of_sum(b, sum, &other)))
        return;
    absorb(b, node, ROLE_SUM, sum);
    node->in[0] = ref_of(b, sum->in[0]);
    node->in[1] = ref_of(b, sum->in[1]);
    node->mid = ref_of(b, sum->out[0]);
}

/* The operation right before gathers the results of routes, and nothing else reads them. */
static void combine_of_gather(struct planner *b, struct node *node)
{
    const struct op *combine = node->step.ops[ROLE_MAIN], *gather = before(b, combine);
    if (!gather || gather->code != OP_GATHER || gather->gather.kind != GATHER_ROUTES || gather->out[0] != combine->in[0] ||
        gather->in[1] != combine->in[1] || readers(b, gather->out[0]) != 1)
        return;
    begin_with(b, node, gather, ROLE_OUTPUT);
    node->next = node->out;
    node->out = ref_of(b, gather->out[0]);
}

static void absorb_norm(struct planner *b, struct node *node)
{
    const struct op *norm = sole_norm(b, node->step.ops[ROLE_MAIN]->in[0]);
    if (!norm)
        return;
    absorb(b, node, ROLE_INPUT, norm);
    node->in[0] = ref_of(b, norm->in[0]);
}

/* Gate and up are neighbouring columns of one value. */
static void absorb_gated(struct planner *b, struct node *node)
{
    const struct op *gated = sole_producer(b, node->step.ops[ROLE_MAIN]->in[0], OP_GATED);
    if (!gated)
        return;
    struct ref gate = ref_of(b, gated->in[0]), up = ref_of(b, gated->in[1]);
    if (gate.root != up.root || up.offset != gate.offset + gate.width || gate.width != up.width)
        return;
    absorb(b, node, ROLE_INPUT, gated);
    node->in[0] = (struct ref){gate.root, gate.offset, 2 * gate.width};
}

static bool has_weight(const struct op *norm)
{
    return norm && norm->weight[0] != NO_INDEX;
}

/* The norms of b, c and dt, and the linear of dt that follows dt's norm. The scratch is for what they make. */
static void absorb_inputs(struct planner *b, struct node *node)
{
    const struct op *op = node->step.ops[ROLE_MAIN], *linear = sole_producer(b, op->in[1], OP_LINEAR);
    const struct value *groups = &b->p->values[op->in[2]];
    if (op->ssm.n_groups != 1 || groups->width != groups->room || !linear || linear->weight[1] != NO_INDEX)
        return;
    const uint32_t inputs[] = {2, 3, 1};
    const struct op *norms[] = {sole_norm(b, op->in[2]), sole_norm(b, op->in[3]), sole_norm(b, linear->in[0])};
    for (uint32_t i = 0; i < 3; i++)
        if (!has_weight(norms[i]) || norms[i]->rms_norm.eps != norms[0]->rms_norm.eps)
            return;
    for (uint32_t i = 0; i < 3; i++) {
        absorb(b, node, ROLE_B_NORM + i, norms[i]);
        node->in[inputs[i]] = ref_of(b, norms[i]->in[0]);
    }
    absorb(b, node, ROLE_DT_LINEAR, linear);
    const struct value *v = b->p->values, *state = &v[norms[0]->in[0]], *dt_in = &v[norms[2]->in[0]], *dt = &v[op->in[1]];
    uint32_t width = ssm_scratch_width(state->width, dt_in->width, dt->width);
    node->mid = (struct ref){root_add(b, width, ssm_scratch_width(state->room, dt_in->room, dt->room)), 0, width};
}

static void absorb_term(struct planner *b, struct node *node)
{
    const struct op *sum = node->step.ops[ROLE_MAIN];
    for (uint32_t side = 0; side < 2 && node->step.ops[ROLE_NORM] && sum->in[0] != sum->in[1]; side++) {
        const struct op *norm = sole_norm(b, sum->in[1 - side]);
        if (has_weight(norm)) {
            absorb(b, node, ROLE_TERM, norm);
            node->in[0] = ref_of(b, sum->in[side]);
            node->in[1] = ref_of(b, norm->in[0]);
            return;
        }
    }
}

/* Merges the node with the node that was made before it, which is the next one of the plan. */
static void absorb_next(struct planner *b, struct node *node)
{
    struct node *next = node - 1;
    node->step.ops[ROLE_NEXT] = next->step.ops[ROLE_MAIN];
    node->step.ops[ROLE_OUTPUT] = next->step.ops[ROLE_OUTPUT];
    node->step.ops[ROLE_SUM] = next->step.ops[ROLE_SUM];
    node->next = next->out;
    node->add = next->add;
    node->mid = next->mid;
    *next = *node;
    b->n_nodes--;
}

/* The operation right behind a sum's norm; NULL: none. */
static const struct op *behind_norm(const struct planner *b, const struct node *node)
{
    const struct op *norm = node->step.ops[ROLE_NORM];
    return norm && norm + 1 < b->p->ops + b->p->n_ops ? norm + 1 : NULL;
}

static void absorb_route(struct planner *b, struct node *node)
{
    const struct op *route = behind_norm(b, node);
    if (route && route->code == OP_ROUTE && route->in[0] == route[-1].out[0])
        absorb_next(b, node);
}

/* The linear is the only reader of the norm's output. */
static void absorb_linear(struct planner *b, struct node *node)
{
    const struct op *norm = node->step.ops[ROLE_NORM];
    if (!behind_norm(b, node) || node->step.ops[ROLE_NEXT] || node[-1].step.ops[ROLE_MAIN]->code != OP_LINEAR)
        return;
    struct ref x = node[-1].in[0];
    if (x.root == norm->out[0] && x.width == b->p->values[norm->out[0]].width && readers(b, norm->out[0]) == 1)
        absorb_next(b, node);
}

static void absorb_rope(struct planner *b, struct node *node)
{
    const struct op *op = node->step.ops[ROLE_MAIN], *rope = sole_producer(b, op->in[0], OP_ROPE);
    if (!rope || rope != sole_producer(b, op->in[1], OP_ROPE) || rope->out[0] != op->in[0] ||
        rope->rope.head_dim != b->p->layers[op->attention.layer].head_dim || rope->rope.k_head_dim || rope->rope.is_tail)
        return;
    absorb(b, node, ROLE_ROPE, rope);
    node->in[0] = ref_of(b, rope->in[0]);
    node->in[1] = ref_of(b, rope->in[1]);
}

/* Whether the norm's weights have a form that qkv takes: one head shared by all, or one for each head. */
static bool fits_heads(const struct planner *b, const struct op *norm, uint32_t n_heads, uint32_t head_dim, bool is_own)
{
    return norm && has_weight(norm) && norm->rms_norm.n_heads == n_heads && readers(b, norm->in[0]) == 1 &&
           b->p->weights[norm->weight[0]].rows == (is_own ? n_heads * head_dim : head_dim);
}

static void absorb_head_norms(struct planner *b, struct node *node)
{
    const struct op *op = node->step.ops[ROLE_MAIN], *rope = node->step.ops[ROLE_ROPE], *from = rope ? rope : op;
    const struct op *q = sole_producer(b, from->in[0], OP_RMS_NORM), *k = sole_producer(b, from->in[1], OP_RMS_NORM);
    const struct cache_layer *layer = &b->p->layers[op->attention.layer];
    for (uint32_t is_own = 0; is_own < 2; is_own++) {
        if (!fits_heads(b, q, layer->n_heads, layer->head_dim, is_own) ||
            !fits_heads(b, k, layer->n_kv_heads, layer->head_dim, is_own) || q->rms_norm.eps != k->rms_norm.eps)
            continue;
        absorb(b, node, ROLE_Q_NORM, q);
        absorb(b, node, ROLE_K_NORM, k);
        node->in[0] = ref_of(b, q->in[0]);
        node->in[1] = ref_of(b, k->in[0]);
        return;
    }
}

/* The rows are tried in order. A row applies if `code` is that of the node's main operation by then and the backend has the
 * fusion; absorb() leaves the node as it is if the neighbours do not fit. */
static const struct {
    uint32_t code, fusion;
    void (*absorb)(struct planner *b, struct node *node);
} PATTERNS[] = {
    /* The node begins with the operation before. */
    {OP_GATED,     FUSION_SSM_GATED,       gated_of_recurrence},
    {OP_GATED,     FUSION_LINEAR_GATED,    gated_of_linear},
    {OP_ADD,       FUSION_LINEAR_ADD | FUSION_LINEAR_ADD_GATHER, sum_of_linear},
    {OP_RMS_NORM,  FUSION_ADD_NORM,        norm_of_sum},
    {OP_RMS_NORM,  FUSION_GATHER_NORM,     norm_of_gather},
    {OP_COMBINE,   FUSION_GATHER_COMBINE,  combine_of_gather},
    /* The node computes its inputs. */
    {OP_LINEAR,    FUSION_NORM_LINEAR,     absorb_norm},
    {OP_LOGITS,    FUSION_NORM_LINEAR,     absorb_norm},
    {OP_LINEAR,    FUSION_GATED_LINEAR,    absorb_gated},
    {OP_LOGITS,    FUSION_GATED_LINEAR,    absorb_gated},
    {OP_SSM,       FUSION_SSM_INPUTS,      absorb_inputs},
    {OP_ADD,       FUSION_NORM_ADD_NORM,   absorb_term},
    {OP_ATTENTION, FUSION_QKV,             absorb_rope},
    {OP_ATTENTION, FUSION_QKV,             absorb_head_norms},
    /* The node ends with the operation behind a sum's norm. */
    {OP_ADD,       FUSION_NORM_ROUTE,      absorb_route},
    {OP_ADD,       FUSION_ADD_NORM_LINEAR, absorb_linear},
};

static struct node *last_node(const struct planner *b)
{
    return &b->nodes[b->n_nodes - 1];
}

static void absorb_neighbours(struct planner *b)
{
    for (uint32_t i = 0; i < sizeof PATTERNS / sizeof *PATTERNS; i++)
        if (last_node(b)->step.ops[ROLE_MAIN]->code == PATTERNS[i].code && b->fusions & PATTERNS[i].fusion)
            PATTERNS[i].absorb(b, last_node(b));
}

/* ---- operations to nodes ------------------------------------------------------------------------------------------ */

/* Attention reads the cache, so its keys and values are written before: by a step before it, or by its own. */
static void emit_attention(struct planner *b, const struct op *op)
{
    struct node *attention = node_add(b, STEP_OPERATION, op), *write = attention;
    if (!(b->fusions & FUSION_QKV_ATTENTION && b->fusions & FUSION_QKV))
        write = node_add(b, b->fusions & FUSION_QKV ? STEP_QKV : STEP_KV_WRITE, op);
    for (int i = 0; i < 3; i++)
        write->in[i] = ref_of(b, op->in[i]);
    absorb_neighbours(b);
    attention->in[0] = write->in[0]; /* q is turned in place */
    attention->out = ref_of(b, op->out[0]);
}

static enum rc emit_rope(struct planner *b, const struct op *op, struct err *err)
{
    if (readers(b, op->in[0]) != 1 || readers(b, op->in[1]) != 1)
        return err_set(err, RC_UNSUPPORTED, "rope: wanted inputs that nothing else reads; it turns them in place");
    struct node *node = node_add(b, STEP_OPERATION, op);
    for (int i = 0; i < 2; i++) {
        node->in[i] = ref_of(b, op->in[i]);
        b->alias[op->out[i]] = node->in[i];
    }
    return RC_OK;
}

/* The rows of a tower's value: of what the operation makes, or (features) of what it reads. */
static void note_rows(const struct planner *b, struct step *step, const struct op *op)
{
    const struct value *value = op->out[0] != NO_INDEX ? &b->p->values[op->out[0]] : op->in[0] != NO_INDEX
                                                       ? &b->p->values[op->in[0]] : NULL;
    step->list = value ? value->list : 0;
    step->per = value ? value->per : 1;
}

/* The output lies where input 0 does. */
static enum rc emit_in_place(struct planner *b, const struct op *op, struct err *err)
{
    if (op->code != OP_GROUP && readers(b, op->in[0]) != 1)
        return err_set(err, RC_UNSUPPORTED, "%s: wanted an input that nothing else reads; it is changed in place",
                       op_name(op->code));
    b->alias[op->out[0]] = ref_of(b, op->in[0]);
    if (op->code == OP_GROUP)
        return RC_OK;
    struct node *node = node_add(b, STEP_OPERATION, op);
    node->in[0] = ref_of(b, op->in[0]);
    node->out = ref_of(b, op->out[0]);
    return RC_OK;
}

static void emit(struct planner *b, const struct op *op)
{
    struct node *node = node_add(b, STEP_OPERATION, op);
    for (int i = 0; i < OP_INPUTS; i++)
        node->in[i] = ref_of(b, op->in[i]);
    node->out = ref_of(b, op->out[0]);
    node->mid = ref_of(b, op->out[1]);
    absorb_neighbours(b);
}

/* A reader must be emitted before the operations that it absorbs. So the loop runs backwards, and the nodes are reversed at the
 * end. */
enum rc patterns_apply(struct planner *b, struct err *err)
{
    enum rc rc = RC_OK;
    for (uint32_t i = b->p->n_ops; i-- > 0 && !rc;) {
        const struct op *op = &b->p->ops[i];
        if (b->absorbed[i])
            continue;
        if (op->code == OP_ROPE)
            rc = emit_rope(b, op, err);
        else if (op->code == OP_SPLICE || op->code == OP_GROUP)
            rc = emit_in_place(b, op, err);
        else if (op->code == OP_ATTENTION)
            emit_attention(b, op);
        else
            emit(b, op);
    }
    for (uint32_t i = 0; i < b->n_nodes; i++)
        note_rows(b, &b->nodes[i].step, b->nodes[i].step.ops[ROLE_MAIN]);
    for (uint32_t i = 0, j = b->n_nodes - 1; !rc && i < j; i++, j--) {
        struct node node = b->nodes[i];
        b->nodes[i] = b->nodes[j];
        b->nodes[j] = node;
    }
    return rc;
}
