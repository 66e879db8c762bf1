#include "../base/mem.h"
#include "planner.h"

#include <stdio.h>
#include <string.h>

/* ---- selection of the rows whose logits are wanted ------------------------------------------------------------------ */

#define N_READ (OP_INPUTS + 1u)   /* tensors that a node reads: node_ref(node, 0 .. N_READ) */
#define N_REFS (N_READ + 4u)      /* and those that it writes: node_ref(node, N_READ .. N_REFS) */

static struct ref *node_ref(struct node *node, uint32_t i)
{
    struct ref *others[] = {&node->add, &node->mid, &node->out, &node->normed, &node->next};
    return i < OP_INPUTS ? &node->in[i] : others[i - OP_INPUTS];
}

/* Whether the node reads (writes: false) or writes (writes: true) any column of a root. */
static bool uses(struct node *node, uint32_t root, bool writes)
{
    for (uint32_t i = writes ? N_READ : 0; i < (writes ? N_REFS : N_READ); i++)
        if (node_ref(node, i)->root == root)
            return true;
    return false;
}

static bool crosses_rows(const struct step *step)
{
    return step->code == STEP_OPERATION && op_crosses_rows(step->ops[ROLE_MAIN]->code);
}

static bool is_gather(const struct step *step)
{
    return step->code == STEP_OPERATION && step->ops[ROLE_MAIN]->code == OP_GATHER;
}

/* By data, experts and what brings their inputs and results work on the rows of all ranks. */
static bool is_of_all_ranks(const struct planner *b, const struct step *step)
{
    const struct op *op = step->ops[ROLE_MAIN];
    return b->p->is_by_data && step->code == STEP_OPERATION &&
           (op->code == OP_GATHER || op->code == OP_ROUTE || op->code == OP_EXPERTS);
}

/* Whether the step goes by the batch's token ids, which are not selected. */
static bool gathers_rows(const struct step *step)
{
    return is_gather(step) && step->ops[ROLE_MAIN]->gather.kind == GATHER_ROWS;
}

/* Whether the step keeps a value of all rows. */
static bool keeps_all_rows(const struct step *step)
{
    const struct op *op = step->ops[ROLE_MAIN];
    return step->code == STEP_OPERATION && op->code == OP_KEEP && op->keep.of_all;
}

/* After the last operation that crosses rows, all steps work row by row. So the wanted rows of each value that is read from
 * there on are selected, and the steps compute the wanted rows only. */
static void insert_selection(struct planner *b)
{
    uint32_t at = 0;
    for (uint32_t i = 0; i < b->n_nodes; i++)
        if (crosses_rows(&b->nodes[i].step) || gathers_rows(&b->nodes[i].step) || keeps_all_rows(&b->nodes[i].step) ||
            is_of_all_ranks(b, &b->nodes[i].step))
            at = i;
    uint32_t first = ++at, n_roots = b->n_roots;
    for (uint32_t root = 0; root < n_roots; root++) {
        bool written = false, read = false;
        for (uint32_t i = 0; i < first; i++)
            written |= uses(&b->nodes[i], root, true);
        for (uint32_t i = at; i < b->n_nodes; i++)
            read |= uses(&b->nodes[i], root, false);
        if (!written || !read)
            continue;
        memmove(&b->nodes[at + 1], &b->nodes[at], (b->n_nodes++ - at) * sizeof *b->nodes);
        struct node *select = &b->nodes[at];
        node_init(select, STEP_SELECT);
        select->in[0] = (struct ref){root, 0, b->widths[root]};
        select->out = (struct ref){root_add(b, b->widths[root], b->rooms[root]), 0, b->widths[root]};
        at++;
        for (uint32_t i = at; i < b->n_nodes; i++)
            for (uint32_t j = 0; j < N_READ; j++)
                if (node_ref(&b->nodes[i], j)->root == root)
                    node_ref(&b->nodes[i], j)->root = select->out.root;
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

/* Extends the lifetime of a gathered value back to the meeting before its gather, because other ranks store into the value as
 * soon as they have passed that meeting. The meeting is that of the gather before, or the one that opens the step. */
static void live_for_stores(struct planner *b)
{
    for (uint32_t i = 0, before = 0; i < b->n_nodes; i++) {
        if (!is_gather(&b->nodes[i].step))
            continue;
        uint32_t root = resolve(b, b->nodes[i].out).root;
        b->first[root] = before < b->first[root] ? before : b->first[root];
        before = i;
    }
}

static void find_lives(struct planner *b)
{
    for (uint32_t i = 0; i < b->n_roots; i++)
        b->first[i] = b->last[i] = NO_INDEX;
    for (uint32_t i = 0; i < b->n_nodes; i++)
        for (uint32_t j = 0; j < N_REFS; j++)
            live(b, *node_ref(&b->nodes[i], j), i);
    live_for_stores(b);
}

/* Places a rank's own columns or rows inside the gathered value, so that they are written there. */
static enum rc alias_gathers(struct planner *b, struct err *err)
{
    for (uint32_t i = 0; i < b->n_nodes; i++) {
        struct node *node = &b->nodes[i];
        if (!is_gather(&node->step))
            continue;
        const struct gather_attributes *given = &node->step.ops[ROLE_MAIN]->gather;
        struct ref own = node->step.ops[ROLE_SUM] ? node->mid : node->in[0], out = resolve(b, node->out);
        bool is_range = given->kind == GATHER_COLUMNS && !given->n_chosen;
        uint32_t first = is_range ? given->first : 0;
        if (own.width == b->widths[own.root] && b->alias[own.root].root == NO_INDEX && out.root != own.root)
            b->alias[own.root] = (struct ref){out.root, out.offset + first, own.width};
        else if (!is_range)
            return err_set(err, RC_UNSUPPORTED, "gather: wanted rows or results of a value that no other gather reads");
    }
    return RC_OK;
}

/* Writes a sum over one of its terms if no later step reads the term. Not in a step with ROLE_NEXT: some of its blocks may read
 * the terms when another block has written the sum. */
static void alias_sums(struct planner *b)
{
    for (uint32_t i = 0; i < b->n_nodes; i++) {
        struct node *node = &b->nodes[i];
        bool is_add = node->step.ops[ROLE_MAIN] && node->step.ops[ROLE_MAIN]->code == OP_ADD;
        struct ref own = resolve(b, is_add ? node->in[0] : node->add);
        bool whole = own.root != NO_INDEX && own.offset == 0 && own.width == b->widths[own.root];
        bool is_free = node->out.root != NO_INDEX && b->alias[node->out.root].root == NO_INDEX;
        if (!is_free || !whole || node->step.ops[ROLE_NEXT] || b->last[own.root] != i)
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

/* The columns of the arena that hold a root; a root of fewer rows than the arena takes fewer, one of more rows takes more. */
static uint32_t columns_of(const struct planner *b, uint32_t root)
{
    return padded((padded(b->rooms[root]) * b->times[root] + b->per[root] - 1) / b->per[root]);
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
            uint32_t column = 0, width = columns_of(b, root);
            for (bool moved = true; moved;) {
                moved = false;
                for (uint32_t other = 0; other < b->n_roots; other++) {
                    uint32_t taken = b->column[other];
                    if (taken != NO_INDEX && share_time(b, root, other) && column < taken + columns_of(b, other) &&
                        taken < column + width) {
                        column = taken + columns_of(b, other);
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
    uint32_t per = ref.root == NO_INDEX ? 1 : b->per[ref.root];
    ref = resolve(b, ref);
    if (ref.root == NO_INDEX)
        return (struct place){0, 0, 0};
    uint32_t n_joined = per / b->per[ref.root]; /* rows of the root that a group reads as one */
    return (struct place){(size_t)b->column[ref.root] * max_rows + ref.offset, ref.width,
                          n_joined * padded(b->rooms[ref.root])};
}

/* Whether the step gathers what the step before makes, where it lies. Of a linear all ranks have eights of columns: the unit
 * says so. Of experts each rank has some parts, or some columns of each part. */
static bool gathers(const struct step *step, const struct step *before)
{
    const struct op *op = step->ops[ROLE_MAIN];
    const struct place *own = &before->out;
    if (!is_gather(step) || step->ops[ROLE_SUM] || before->code != STEP_OPERATION)
        return false;
    const uint32_t maker = before->ops[ROLE_MAIN]->code;
    if (maker == OP_EXPERTS || maker == OP_EXPERTS_UP)
        return op->gather.n_chosen && own->width == step->out.width && own->offset == step->out.offset;
    if (op->gather.kind != GATHER_COLUMNS || op->gather.n_chosen)
        return false;
    return op->gather.unit && op->gather.unit % 8 == 0 && own->width == step->in[0].width &&
           own->offset == step->in[0].offset && own->offset == step->out.offset + op->gather.first;
}

static enum rc finish(struct planner *b, uint32_t max_rows, struct plan *plan, struct err *err)
{
    enum rc rc = alias_gathers(b, err);
    if (rc)
        return rc;
    find_lives(b);
    alias_sums(b);
    plan->arena_values = (size_t)place_roots(b) * max_rows;
    plan->steps = mem_calloc(b->n_nodes, sizeof *plan->steps);
    if (!plan->steps)
        return err_set(err, RC_MEMORY, "plan: out of memory");
    plan->n_steps = b->n_nodes;
    for (uint32_t i = 0; i < b->n_nodes; i++)
        if (b->nodes[i].step.ops[ROLE_MAIN] && b->nodes[i].step.ops[ROLE_MAIN]->code == OP_CARRY)
            plan->first_carried = i;
    for (uint32_t i = 0; i < b->n_nodes; i++) {
        struct node *node = &b->nodes[i];
        for (uint32_t j = 0; j < OP_INPUTS; j++)
            node->step.in[j] = place_of(b, node->in[j], max_rows);
        node->step.add = place_of(b, node->add, max_rows);
        node->step.mid = place_of(b, node->mid, max_rows);
        node->step.out = place_of(b, node->out, max_rows);
        node->step.normed = place_of(b, node->normed, max_rows);
        node->step.next = place_of(b, node->next, max_rows);
        node->step.of_all_ranks = is_of_all_ranks(b, &node->step);
        plan->steps[i] = node->step;
        if (i)
            plan->steps[i - 1].is_gathered_next = gathers(&plan->steps[i], &plan->steps[i - 1]);
    }
    return RC_OK;
}

enum rc plan_make(const struct program *program, uint32_t fusions, bool has_qkv, uint32_t max_rows, struct plan *plan,
                  struct err *err)
{
    memset(plan, 0, sizeof *plan);
    uint32_t max_roots = 2 * program->n_values + 1, max_nodes = 2 * program->n_ops + program->n_values + 1;
    struct planner b = {.p = program, .fusions = fusions | (has_qkv ? FUSION_QKV : 0), .n_roots = program->n_values};
    enum rc rc = err_set(err, RC_MEMORY, "plan: out of memory");
    b.absorbed = mem_calloc(program->n_ops, sizeof *b.absorbed);
    b.nodes = mem_calloc(max_nodes, sizeof *b.nodes);
    b.widths = mem_calloc(max_roots, 7 * sizeof *b.widths);
    b.alias = mem_calloc(max_roots, sizeof *b.alias);
    if (!b.absorbed || !b.nodes || !b.widths || !b.alias)
        goto out;
    b.rooms = b.widths + max_roots;
    b.first = b.rooms + max_roots;
    b.last = b.first + max_roots;
    b.column = b.last + max_roots;
    b.per = b.column + max_roots;
    b.times = b.per + max_roots;
    for (uint32_t v = 0; v < max_roots; v++) {
        b.alias[v].root = NO_INDEX;
        b.widths[v] = v < program->n_values ? program->values[v].width : 0;
        b.rooms[v] = v < program->n_values ? program->values[v].room : 0;
        b.per[v] = v < program->n_values ? program->values[v].per : 1;
        b.times[v] = v < program->n_values ? row_list_room(program->values[v].list) : 1;
    }
    rc = patterns_apply(&b, err);
    if (!rc) {
        if (!program->is_tower) /* whose rows all become features */
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

/* ---- words --------------------------------------------------------------------------------------------------------------- */

static const char *step_name(const struct step *step)
{
    static const char *const names[] = {[STEP_QKV] = "qkv", [STEP_KV_WRITE] = "kv_write", [STEP_SELECT] = "select"};
    return step->code == STEP_OPERATION ? op_name(step->ops[ROLE_MAIN]->code) : names[step->code];
}

bool plan_step_text(const struct plan *plan, const struct program *p, uint32_t index, char *text, size_t size_bytes)
{
    if (index >= plan->n_steps)
        return false;
    const struct step *step = &plan->steps[index];
    const struct op *const *ops = step->ops, *of = ops[ROLE_NORM] ? ops[ROLE_NORM] : ops[ROLE_MAIN];
    const struct weight *weight = of && of->weight[0] != NO_INDEX ? &p->weights[of->weight[0]] : NULL;
    const struct op *gathered = is_gather(step) ? ops[ROLE_SUM] : NULL;
    const struct {
        const char *text;
        const struct op *op;
    } others[] = {{" of ", ops[ROLE_INPUT]}, {" of ", gathered},         {", ", ops[ROLE_NORM]},
                  {", ", ops[ROLE_NEXT]},    {", ", ops[ROLE_OUTPUT]}};
    int n = snprintf(text, size_bytes, "%s", step_name(step));
    for (uint32_t i = 0; i < sizeof others / sizeof *others; i++)
        if (others[i].op && (size_t)n < size_bytes)
            n += snprintf(text + n, size_bytes - n, "%s%s", others[i].text, op_name(others[i].op->code));
    if ((size_t)n < size_bytes)
        snprintf(text + n, size_bytes - n, " %s%s%s", weight && weight->n_parts ? weight->parts[0].name : "",
                 step->add.width ? " + residual" : "", step->on_selected ? " [wanted rows]" : "");
    return true;
}
