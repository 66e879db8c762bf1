#include "plan.h"

#include "../base/mem.h"

#include <string.h>

/* A range of columns of a root value, which is a value that is no range of another one. width 0: no value. */
struct ref {
    uint32_t root, offset, width;
};

/* A step whose tensors do not have places in the arena yet. */
struct node {
    struct step step;
    struct ref in[OP_INPUTS], add, mid, out, normed;
};

struct planner {
    const struct program *p;
    uint32_t fusions;
    bool has_qkv;
    uint32_t *absorbed;   /* [n_ops] 1: the node of another operation computes this one */
    struct node *nodes;   /* at most two for each operation, and the selections */
    uint32_t n_nodes;
    uint32_t *widths;     /* [n_roots]; selections and scratch append roots */
    uint32_t n_roots;
    uint32_t *first, *last, *column; /* [n_roots] lifetime in nodes; column in the arena */
    struct ref *alias;               /* [n_roots] columns of another root that hold this one */
};

static const char *const NAMES[STEP_COUNT] = {
    [STEP_EMBED] = "embed",       [STEP_LINEAR] = "linear",   [STEP_RMS_NORM] = "rms_norm", [STEP_ROPE] = "rope",
    [STEP_QKV] = "qkv",           [STEP_KV_WRITE] = "kv_write", [STEP_ATTENTION] = "attention", [STEP_GATED] = "gated",
    [STEP_ADD] = "add",           [STEP_ADD_NORM] = "add_norm", [STEP_SELECT] = "select", [STEP_LOGITS] = "logits",
    [STEP_STATES] = "states",     [STEP_OP] = "op",
};

const char *step_name(uint32_t code)
{
    return code < STEP_COUNT ? NAMES[code] : "?";
}

static struct ref ref_of(const struct program *p, uint32_t value)
{
    if (value == NO_INDEX)
        return (struct ref){NO_INDEX, 0, 0};
    struct ref ref = {value, 0, p->values[value].width};
    while (p->values[ref.root].of != NO_INDEX) {
        ref.offset += p->values[ref.root].offset;
        ref.root = p->values[ref.root].of;
    }
    return ref;
}

static bool overlaps(struct ref a, struct ref b)
{
    return a.width && b.width && a.root == b.root && a.offset < b.offset + b.width && b.offset < a.offset + a.width;
}

/* The number of inputs in the whole program that read any column of a value. */
static uint32_t readers(const struct program *p, uint32_t value)
{
    struct ref ref = ref_of(p, value);
    uint32_t n = 0;
    for (uint32_t i = 0; i < p->n_ops; i++)
        for (uint32_t j = 0; j < OP_INPUTS; j++)
            n += overlaps(ref, ref_of(p, p->ops[i].in[j]));
    return n;
}

/* The operation of this code that writes exactly this value, if the value has a single reader; else NO_INDEX. */
static uint32_t sole_producer(const struct planner *b, uint32_t value, uint32_t code)
{
    for (uint32_t i = 0; i < b->p->n_ops; i++)
        for (uint32_t j = 0; j < OP_OUTPUTS; j++)
            if (b->p->ops[i].out[j] == value)
                return b->p->ops[i].code == code && !b->absorbed[i] && readers(b->p, value) == 1 ? i : NO_INDEX;
    return NO_INDEX;
}

static struct node *node_init(struct node *node, enum step_code code)
{
    memset(node, 0, sizeof *node);
    struct step *step = &node->step;
    step->code = code;
    step->weight = step->bias = step->rope = step->layer = NO_INDEX;
    step->norm[0] = step->norm[1] = step->norm[2] = NO_INDEX;
    for (int i = 0; i < OP_INPUTS; i++)
        node->in[i].root = NO_INDEX;
    node->add.root = node->mid.root = node->out.root = node->normed.root = NO_INDEX;
    for (int i = 0; i < OP_OUTPUTS; i++)
        step->made[i] = NO_INDEX;
    return node;
}

static struct node *node_add(struct planner *b, enum step_code code)
{
    return node_init(&b->nodes[b->n_nodes++], code);
}

/* ---- patterns ---------------------------------------------------------------------------------------------------- */

/* Pattern 1: a linear computes the norm or gated product of its input if no other operation reads that input. */
static void absorb_input(struct planner *b, struct node *node, const struct op *op)
{
    node->in[0] = ref_of(b->p, op->in[0]);
    uint32_t i = b->fusions & FUSION_NORM_LINEAR ? sole_producer(b, op->in[0], OP_RMS_NORM) : NO_INDEX;
    if (i != NO_INDEX && b->p->ops[i].rms_norm.n_heads == 1) {
        const struct op *norm = &b->p->ops[i];
        node->step.input = LINEAR_RMS_NORM;
        node->step.norm[0] = norm->weight[0];
        node->step.eps = norm->rms_norm.eps;
        node->in[0] = ref_of(b->p, norm->in[0]);
        b->absorbed[i] = 1;
        return;
    }
    i = b->fusions & FUSION_GATED_LINEAR ? sole_producer(b, op->in[0], OP_GATED) : NO_INDEX;
    if (i == NO_INDEX)
        return;
    const struct op *gated = &b->p->ops[i];
    struct ref gate = ref_of(b->p, gated->in[0]), up = ref_of(b->p, gated->in[1]);
    if (gate.root != up.root || up.offset != gate.offset + gate.width || gate.width != up.width)
        return;
    node->step.input = LINEAR_GATED;
    node->step.act = gated->gated.act;
    node->in[0] = (struct ref){gate.root, gate.offset, 2 * gate.width};
    b->absorbed[i] = 1;
}

/* Whether both norms have weights of a form that the fused qkv takes. *is_own: each head has separate weights. */
static bool norms_fit(const struct program *p, const struct cache_layer *layer, const struct op *q, const struct op *k,
                      bool *is_own)
{
    if (q->weight[0] == NO_INDEX || k->weight[0] == NO_INDEX)
        return false;
    uint32_t q_rows = p->weights[q->weight[0]].rows, k_rows = p->weights[k->weight[0]].rows, size = layer->head_dim;
    *is_own = q_rows > size || k_rows > size;
    return q_rows == (*is_own ? layer->n_heads * size : size) && k_rows == (*is_own ? layer->n_kv_heads * size : size);
}

/* Pattern 2: fuses the per-head norms of q and k, rope and the write to the cache. */
static void absorb_qkv(struct planner *b, struct node *node, const struct op *op)
{
    const struct cache_layer *layer = &b->p->layers[op->attention.layer];
    uint32_t q = op->in[0], k = op->in[1];
    uint32_t rope = sole_producer(b, q, OP_ROPE);
    if (rope != NO_INDEX && rope == sole_producer(b, k, OP_ROPE) && b->p->ops[rope].out[0] == q &&
        b->p->ops[rope].rope.head_dim == layer->head_dim && !b->p->ops[rope].rope.k_head_dim && !b->p->ops[rope].rope.is_tail) {
        node->step.rope = b->p->ops[rope].rope.rope;
        q = b->p->ops[rope].in[0];
        k = b->p->ops[rope].in[1];
        b->absorbed[rope] = 1;
    }
    uint32_t q_norm = sole_producer(b, q, OP_RMS_NORM), k_norm = sole_producer(b, k, OP_RMS_NORM);
    bool fits = q_norm != NO_INDEX && k_norm != NO_INDEX && b->p->ops[q_norm].rms_norm.n_heads == layer->n_heads &&
                b->p->ops[k_norm].rms_norm.n_heads == layer->n_kv_heads &&
                b->p->ops[q_norm].rms_norm.eps == b->p->ops[k_norm].rms_norm.eps &&
                readers(b->p, b->p->ops[q_norm].in[0]) == 1 && readers(b->p, b->p->ops[k_norm].in[0]) == 1;
    if (fits && norms_fit(b->p, layer, &b->p->ops[q_norm], &b->p->ops[k_norm], &node->step.has_own_norms)) {
        node->step.norm[0] = b->p->ops[q_norm].weight[0];
        node->step.norm[1] = b->p->ops[k_norm].weight[0];
        node->step.eps = b->p->ops[q_norm].rms_norm.eps;
        q = b->p->ops[q_norm].in[0];
        k = b->p->ops[k_norm].in[0];
        b->absorbed[q_norm] = b->absorbed[k_norm] = 1;
    }
    node->in[0] = ref_of(b->p, q);
    node->in[1] = ref_of(b->p, k);
}

/* Pattern 3: a linear adds the other term of the sum that follows it. Returns the linear's index; *other: the other term. */
static uint32_t linear_before_add(struct planner *b, uint32_t index, uint32_t *other)
{
    const struct op *add = &b->p->ops[index];
    if (!(b->fusions & FUSION_LINEAR_ADD) || index == 0 || add->in[0] == add->in[1])
        return NO_INDEX;
    for (uint32_t side = 0; side < 2; side++) {
        uint32_t i = sole_producer(b, add->in[side], OP_LINEAR);
        if (i != NO_INDEX && i + 1 == index) {
            *other = add->in[1 - side];
            return i;
        }
    }
    return NO_INDEX;
}

/* Pattern 4: a linear computes the gated product of its output's halves. Returns the linear's index. */
static uint32_t linear_before_gated(const struct planner *b, uint32_t index)
{
    const struct op *gated = &b->p->ops[index];
    struct ref gate = ref_of(b->p, gated->in[0]), up = ref_of(b->p, gated->in[1]);
    bool is_pair = gate.root == up.root && gate.offset == 0 && up.offset == gate.width && up.width == gate.width &&
                   b->p->values[gate.root].width == 2 * gate.width && readers(b->p, gate.root) == 2;
    /* A linear has one act, so it cannot have gated products at both its input and its output. */
    bool is_alone = b->fusions & FUSION_LINEAR_GATED && !(b->fusions & FUSION_GATED_LINEAR);
    if (!is_pair || !is_alone || index == 0 || b->absorbed[index - 1])
        return NO_INDEX;
    const struct op *linear = &b->p->ops[index - 1];
    return linear->code == OP_LINEAR && linear->out[0] == gate.root ? index - 1 : NO_INDEX;
}

/* Pattern 5: fuses a sum and the norm right after it; the sum stays readable. Returns the sum's index or NO_INDEX. */
static uint32_t add_before_norm(struct planner *b, uint32_t index)
{
    const struct op *norm = &b->p->ops[index];
    bool fits = b->fusions & FUSION_ADD_NORM && index > 0 && norm->rms_norm.n_heads == 1 && norm[-1].code == OP_ADD &&
                norm[-1].out[0] == norm->in[0];
    return fits ? index - 1 : NO_INDEX;
}

/* The norm that writes a value, if it is over whole rows, has a weight and has a single reader; else NO_INDEX. */
static uint32_t sole_norm(const struct planner *b, uint32_t value)
{
    uint32_t i = sole_producer(b, value, OP_RMS_NORM);
    return i != NO_INDEX && b->p->ops[i].rms_norm.n_heads == 1 && b->p->ops[i].weight[0] != NO_INDEX ? i : NO_INDEX;
}

/* Pattern 6: the fused sum and norm of pattern 5 also computes the norm of the sum's second term. */
static void absorb_term(struct planner *b, struct node *node, const struct op *add)
{
    for (uint32_t side = 0; side < 2 && b->fusions & FUSION_NORM_ADD_NORM && add->in[0] != add->in[1]; side++) {
        uint32_t i = sole_norm(b, add->in[1 - side]);
        if (i == NO_INDEX)
            continue;
        node->in[0] = ref_of(b->p, add->in[side]);
        node->in[1] = ref_of(b->p, b->p->ops[i].in[0]);
        node->step.norm[0] = b->p->ops[i].weight[0];
        node->step.norm_eps = b->p->ops[i].rms_norm.eps;
        b->absorbed[i] = 1;
        return;
    }
}

/* Pattern 7: a recurrence computes the norms of b, c and dt, and the linear of dt that follows dt's norm. */
static void absorb_inputs(struct planner *b, struct node *node, const struct op *op)
{
    const struct op *ops = b->p->ops;
    uint32_t linear = sole_producer(b, op->in[1], OP_LINEAR), norms[3];
    if (!(b->fusions & FUSION_SSM_INPUTS) || op->ssm.n_groups != 1 || linear == NO_INDEX || ops[linear].weight[1] != NO_INDEX)
        return;
    for (uint32_t i = 0; i < 3; i++) {
        norms[i] = sole_norm(b, i < 2 ? op->in[2 + i] : ops[linear].in[0]);
        if (norms[i] == NO_INDEX || ops[norms[i]].rms_norm.eps != ops[norms[0]].rms_norm.eps)
            return;
    }
    for (uint32_t i = 0; i < 3; i++) {
        node->in[i < 2 ? 2 + i : 1] = ref_of(b->p, ops[norms[i]].in[0]);
        node->step.norm[i] = ops[norms[i]].weight[0];
        b->absorbed[norms[i]] = 1;
    }
    node->step.norm_eps = ops[norms[0]].rms_norm.eps;
    node->step.weight = ops[linear].weight[0];
    b->absorbed[linear] = 1;
    uint32_t n_heads = b->p->values[op->in[1]].width, dt_width = node->in[1].width;
    b->widths[b->n_roots] = ssm_scratch_width(node->in[2].width, dt_width, n_heads);
    node->mid = (struct ref){b->n_roots, 0, b->widths[b->n_roots]};
    b->n_roots++;
}

/* ---- operations to nodes ------------------------------------------------------------------------------------------ */

static struct node *emit_plain(struct planner *b, const struct op *op, enum step_code code)
{
    struct node *node = node_add(b, code);
    for (int i = 0; i < OP_INPUTS; i++)
        node->in[i] = ref_of(b->p, op->in[i]);
    node->out = ref_of(b->p, op->out[0]);
    node->mid = ref_of(b->p, op->out[1]);
    memcpy(node->step.made, op->out, sizeof op->out);
    node->step.op = op;
    node->step.weight = op->weight[0];
    node->step.bias = op->weight[1];
    return node;
}

static struct node *emit_linear(struct planner *b, const struct op *op, uint32_t add, uint32_t out)
{
    struct node *node = node_add(b, op->code == OP_LOGITS ? STEP_LOGITS : STEP_LINEAR);
    absorb_input(b, node, op);
    node->step.weight = op->weight[0];
    node->step.bias = op->weight[1];
    node->step.op = op;
    node->add = ref_of(b->p, add);
    node->out = ref_of(b->p, out);
    node->step.made[0] = out;
    return node;
}

/* Emits a recurrence with the gated product of its output, if there is one (else NULL). */
static void emit_recurrence(struct planner *b, const struct op *op, const struct op *gated)
{
    struct node *node = emit_plain(b, op, STEP_OP);
    node->step.weight = NO_INDEX;
    if (op->code == OP_SSM)
        absorb_inputs(b, node, op);
    if (!gated)
        return;
    node->in[4] = ref_of(b->p, gated->in[0]);
    node->out = ref_of(b->p, gated->out[0]);
    node->step.made[0] = gated->out[0];
    node->step.act = gated->gated.act;
}

/* Pattern 8: a recurrence computes the gated product of its output. Returns the recurrence's index or NO_INDEX. */
static uint32_t recurrence_before_gated(const struct planner *b, const struct op *gated)
{
    uint32_t i = sole_producer(b, gated->in[1], OP_SSM);
    i = i == NO_INDEX ? sole_producer(b, gated->in[1], OP_SELECTIVE_SCAN) : i;
    return b->fusions & FUSION_SSM_GATED ? i : NO_INDEX;
}

/* Emits a gated product: fused with the recurrence or linear before it, or alone. */
static void emit_gated(struct planner *b, uint32_t index)
{
    const struct op *op = &b->p->ops[index];
    uint32_t linear = linear_before_gated(b, index), recurrence = recurrence_before_gated(b, op);
    if (recurrence != NO_INDEX) {
        b->absorbed[recurrence] = 1;
        emit_recurrence(b, &b->p->ops[recurrence], op);
        return;
    }
    if (linear == NO_INDEX) {
        emit_plain(b, op, STEP_GATED)->step.act = op->gated.act;
        return;
    }
    b->absorbed[linear] = 1;
    struct node *node = emit_linear(b, &b->p->ops[linear], NO_INDEX, op->out[0]);
    node->step.output = LINEAR_PRODUCT;
    node->step.act = op->gated.act;
    node->mid = ref_of(b->p, b->p->ops[linear].out[0]);
}

static void emit_attention(struct planner *b, const struct op *op)
{
    bool is_joint = b->has_qkv && b->fusions & FUSION_QKV_ATTENTION;
    struct node *node = node_add(b, STEP_ATTENTION);
    struct node *write = is_joint ? node : node_add(b, b->has_qkv ? STEP_QKV : STEP_KV_WRITE);
    write->in[0] = ref_of(b->p, op->in[0]);
    write->in[1] = ref_of(b->p, op->in[1]);
    write->in[2] = ref_of(b->p, op->in[2]);
    write->step.layer = node->step.layer = op->attention.layer;
    if (b->has_qkv)
        absorb_qkv(b, write, op);
    node->in[0] = write->in[0];
    node->out = ref_of(b->p, op->out[0]);
    node->step.made[0] = op->out[0];
    node->step.op = op;
}

static enum rc emit_rope(struct planner *b, const struct op *op, struct err *err)
{
    if (readers(b->p, op->in[0]) != 1 || readers(b->p, op->in[1]) != 1)
        return err_set(err, RC_UNSUPPORTED, "rope: wanted inputs that nothing else reads; it turns them in place");
    struct node *node = node_add(b, STEP_ROPE);
    node->step.rope = op->rope.rope;
    memcpy(node->step.made, op->out, sizeof op->out);
    node->step.op = op;
    for (int i = 0; i < 2; i++) {
        node->in[i] = ref_of(b->p, op->in[i]);
        b->alias[op->out[i]] = node->in[i];
    }
    return RC_OK;
}

/* Pattern 9: the call of a sum and its norm also computes the route right after the norm. */
static bool joins_route(const struct planner *b, const struct op *norm)
{
    return b->fusions & FUSION_NORM_ROUTE && norm + 1 < b->p->ops + b->p->n_ops && norm[1].code == OP_ROUTE &&
           norm[1].in[0] == norm->out[0];
}

/* Pattern 10: the call of a sum and its norm also computes the linear that is the norm's only reader. Nodes are emitted
 * backwards, so the linear's node is node[-1]. */
static bool joins_linear(const struct planner *b, const struct op *norm, const struct node *node)
{
    return b->fusions & FUSION_ADD_NORM_LINEAR && norm + 1 < b->p->ops + b->p->n_ops && node[-1].step.code == STEP_LINEAR &&
           node[-1].in[0].root == norm->out[0] && node[-1].in[0].width == b->widths[norm->out[0]] &&
           readers(b->p, norm->out[0]) == 1;
}

static void emit_norm(struct planner *b, uint32_t index)
{
    const struct op *norm = &b->p->ops[index];
    uint32_t add = add_before_norm(b, index);
    if (add == NO_INDEX) {
        struct node *alone = emit_plain(b, norm, STEP_RMS_NORM);
        alone->step.eps = norm->rms_norm.eps;
        return;
    }
    struct node *node = emit_plain(b, &b->p->ops[add], STEP_ADD_NORM);
    node->normed = ref_of(b->p, norm->out[0]);
    node->step.weight = norm->weight[0];
    node->step.eps = norm->rms_norm.eps;
    absorb_term(b, node, &b->p->ops[add]);
    b->absorbed[add] = 1;
    if (joins_route(b, norm) || joins_linear(b, norm, node))
        node->step.is_joined = node[-1].step.is_joined = true;
}

/* Emits the node of one operation and of the operations that it absorbs. */
static enum rc emit(struct planner *b, uint32_t index, struct err *err)
{
    const struct op *op = &b->p->ops[index];
    uint32_t other = NO_INDEX, linear;
    switch (op->code) {
    case OP_EMBED: emit_plain(b, op, STEP_EMBED); return RC_OK;
    case OP_RMS_NORM: emit_norm(b, index); return RC_OK;
    case OP_GATED: emit_gated(b, index); return RC_OK;
    case OP_ROPE: return emit_rope(b, op, err);
    case OP_ATTENTION: emit_attention(b, op); return RC_OK;
    case OP_LINEAR:
    case OP_LOGITS: emit_linear(b, op, NO_INDEX, op->out[0]); return RC_OK;
    case OP_STATES: node_add(b, STEP_STATES)->in[0] = ref_of(b->p, op->in[0]); return RC_OK;
    case OP_ADD:
        linear = linear_before_add(b, index, &other);
        if (linear == NO_INDEX) {
            emit_plain(b, op, STEP_ADD);
        } else {
            b->absorbed[linear] = 1;
            emit_linear(b, &b->p->ops[linear], other, op->out[0]);
        }
        return RC_OK;
    case OP_SSM:
    case OP_SELECTIVE_SCAN: emit_recurrence(b, op, NULL); return RC_OK;
    default: emit_plain(b, op, STEP_OP); return RC_OK;
    }
}

/* A reader must be emitted before the operations that it absorbs. So the loop runs backwards, and the nodes are reversed at the
 * end. */
static enum rc emit_all(struct planner *b, struct err *err)
{
    for (uint32_t i = b->p->n_ops; i-- > 0;)
        if (!b->absorbed[i]) {
            enum rc rc = emit(b, i, err);
            if (rc)
                return rc;
        }
    for (uint32_t i = 0, j = b->n_nodes - 1; i < j; i++, j--) {
        struct node node = b->nodes[i];
        b->nodes[i] = b->nodes[j];
        b->nodes[j] = node;
    }
    return RC_OK;
}

/* ---- selection of the rows whose logits are wanted ------------------------------------------------------------------ */

static struct ref *node_ref(struct node *node, uint32_t i)
{
    return i < OP_INPUTS ? &node->in[i] : &node->add;
}

static bool crosses_rows(const struct step *step)
{
    return step->code == STEP_ATTENTION || (step->code == STEP_OP && op_crosses_rows(step->op->code));
}

/* After the last operation that crosses rows, all steps work row by row. So the wanted rows of each value that is read from
 * there on are selected, and the steps compute the wanted rows only. */
static void insert_selection(struct planner *b)
{
    uint32_t at = 0;
    for (uint32_t i = 0; i < b->n_nodes; i++)
        if (crosses_rows(&b->nodes[i].step))
            at = i;
    uint32_t first = ++at, n_roots = b->n_roots;
    for (uint32_t root = 0; root < n_roots; root++) {
        bool written = false, read = false;
        for (uint32_t i = 0; i < first; i++)
            written |= b->nodes[i].out.root == root || b->nodes[i].normed.root == root || b->nodes[i].mid.root == root;
        for (uint32_t i = at; i < b->n_nodes; i++)
            for (uint32_t j = 0; j <= OP_INPUTS; j++)
                read |= node_ref(&b->nodes[i], j)->root == root;
        if (!written || !read)
            continue;
        memmove(&b->nodes[at + 1], &b->nodes[at], (b->n_nodes++ - at) * sizeof *b->nodes);
        struct node *select = node_init(&b->nodes[at], STEP_SELECT);
        select->in[0] = (struct ref){root, 0, b->widths[root]};
        select->out = (struct ref){b->n_roots, 0, b->widths[root]};
        b->alias[b->n_roots].root = NO_INDEX;
        b->widths[b->n_roots] = b->widths[root];
        at++;
        for (uint32_t i = at; i < b->n_nodes; i++)
            for (uint32_t j = 0; j <= OP_INPUTS; j++)
                if (node_ref(&b->nodes[i], j)->root == root)
                    node_ref(&b->nodes[i], j)->root = b->n_roots;
        b->n_roots++;
    }
    for (uint32_t i = at; i < b->n_nodes; i++)
        b->nodes[i].step.on_selected = true;
}

/* ---- places ---------------------------------------------------------------------------------------------------------- */

static struct ref resolve(const struct planner *b, struct ref ref)
{
    while (ref.root != NO_INDEX && b->alias[ref.root].root != NO_INDEX) {
        ref.offset += b->alias[ref.root].offset;
        ref.root = b->alias[ref.root].root;
    }
    return ref;
}

static void live(struct planner *b, struct ref ref, uint32_t node)
{
    ref = resolve(b, ref);
    if (ref.root == NO_INDEX)
        return;
    if (b->first[ref.root] == NO_INDEX)
        b->first[ref.root] = node;
    b->last[ref.root] = node;
}

/* Extends the lifetimes of a node's inputs and outputs to step i. */
static void live_all(struct planner *b, struct node *node, uint32_t i)
{
    for (uint32_t j = 0; j <= OP_INPUTS; j++)
        live(b, *node_ref(node, j), i);
    live(b, node->mid, i);
    live(b, node->out, i);
    live(b, node->normed, i);
}

static void find_lives(struct planner *b)
{
    for (uint32_t i = 0; i < b->n_roots; i++)
        b->first[i] = b->last[i] = NO_INDEX;
    for (uint32_t i = 0; i < b->n_nodes; i++) {
        if (step_is_made(&b->nodes[i].step)) {
            live_all(b, &b->nodes[i], i - 1);
            live_all(b, &b->nodes[i - 1], i);
        }
        live_all(b, &b->nodes[i], i);
    }
}

/* Writes a sum over one of its terms if no later step reads the term. */
static void alias_sums(struct planner *b)
{
    for (uint32_t i = 0; i < b->n_nodes; i++) {
        struct node *node = &b->nodes[i];
        bool is_add = node->step.code == STEP_ADD || node->step.code == STEP_ADD_NORM;
        struct ref own = resolve(b, is_add ? node->in[0] : node->add);
        bool whole = own.root != NO_INDEX && own.offset == 0 && own.width == b->widths[own.root];
        if (node->out.root == NO_INDEX || !whole || b->last[own.root] != i)
            continue;
        bool read_twice = !is_add && overlaps(resolve(b, node->in[0]), own);
        if (!read_twice) {
            b->alias[node->out.root] = own;
            find_lives(b);
        }
    }
}

static uint32_t padded(uint32_t width)
{
    return (width + 15) & ~15u;
}

static bool share_time(const struct planner *b, uint32_t x, uint32_t y)
{
    return b->first[x] <= b->last[y] && b->first[y] <= b->last[x];
}

/* First fit: gives each root the lowest columns that no root with an overlapping lifetime occupies. */
static uint32_t place_roots(struct planner *b)
{
    uint32_t columns = 0;
    for (uint32_t root = 0; root < b->n_roots; root++)
        b->column[root] = NO_INDEX;
    for (uint32_t node = 0; node < b->n_nodes; node++)
        for (uint32_t root = 0; root < b->n_roots; root++) {
            if (b->first[root] != node)
                continue;
            uint32_t column = 0, width = padded(b->widths[root]);
            for (bool moved = true; moved;) {
                moved = false;
                for (uint32_t other = 0; other < b->n_roots; other++) {
                    uint32_t taken = b->column[other];
                    if (taken != NO_INDEX && share_time(b, root, other) && column < taken + padded(b->widths[other]) &&
                        taken < column + width) {
                        column = taken + padded(b->widths[other]);
                        moved = true;
                    }
                }
            }
            b->column[root] = column;
            columns = column + width > columns ? column + width : columns;
        }
    return columns;
}

static struct place place_of(const struct planner *b, struct ref ref, uint32_t max_rows)
{
    ref = resolve(b, ref);
    if (ref.root == NO_INDEX)
        return (struct place){0, 0, 0};
    return (struct place){(size_t)b->column[ref.root] * max_rows + ref.offset, ref.width, padded(b->widths[ref.root])};
}

static enum rc finish(struct planner *b, uint32_t max_rows, struct plan *plan, struct err *err)
{
    find_lives(b);
    alias_sums(b);
    plan->arena_values = (size_t)place_roots(b) * max_rows;
    plan->steps = mem_calloc(b->n_nodes, sizeof *plan->steps);
    if (!plan->steps)
        return err_set(err, RC_MEMORY, "plan: out of memory");
    plan->n_steps = b->n_nodes;
    for (uint32_t i = 0; i < b->n_nodes; i++) {
        struct node *node = &b->nodes[i];
        for (uint32_t j = 0; j < OP_INPUTS; j++)
            node->step.in[j] = place_of(b, node->in[j], max_rows);
        node->step.add = place_of(b, node->add, max_rows);
        node->step.mid = place_of(b, node->mid, max_rows);
        node->step.out = place_of(b, node->out, max_rows);
        node->step.normed = place_of(b, node->normed, max_rows);
        plan->steps[i] = node->step;
    }
    return RC_OK;
}

enum rc plan_make(const struct program *program, uint32_t fusions, bool has_qkv, uint32_t max_rows, struct plan *plan,
                  struct err *err)
{
    memset(plan, 0, sizeof *plan);
    uint32_t max_roots = 2 * program->n_values + 1, max_nodes = 2 * program->n_ops + program->n_values + 1;
    struct planner b = {.p = program, .fusions = fusions, .has_qkv = has_qkv, .n_roots = program->n_values};
    enum rc rc = err_set(err, RC_MEMORY, "plan: out of memory");
    b.absorbed = mem_calloc(program->n_ops, sizeof *b.absorbed);
    b.nodes = mem_calloc(max_nodes, sizeof *b.nodes);
    b.widths = mem_calloc(max_roots, 4 * sizeof *b.widths);
    b.alias = mem_calloc(max_roots, sizeof *b.alias);
    if (!b.absorbed || !b.nodes || !b.widths || !b.alias)
        goto out;
    b.first = b.widths + max_roots;
    b.last = b.first + max_roots;
    b.column = b.last + max_roots;
    for (uint32_t v = 0; v < max_roots; v++) {
        b.alias[v].root = NO_INDEX;
        b.widths[v] = v < program->n_values ? program->values[v].width : 0;
    }
    rc = emit_all(&b, err);
    if (!rc) {
        insert_selection(&b);
        rc = finish(&b, max_rows, plan, err);
    }
out:
    mem_free(b.absorbed);
    mem_free(b.nodes);
    mem_free(b.widths);
    mem_free(b.alias);
    return rc;
}

void plan_clear(struct plan *plan)
{
    mem_free(plan->steps);
    memset(plan, 0, sizeof *plan);
}
