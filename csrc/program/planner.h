/* planner.h: a plan in the making, shared by patterns.c (operations to nodes) and plan.c (nodes to steps with places). */
#ifndef LLMPY_PLANNER_H
#define LLMPY_PLANNER_H

#include "plan.h"

/* A range of columns of a root value, which is a value that is no range of another one. width 0: no value. */
struct ref {
    uint32_t root, offset, width;
};

/* A step whose tensors do not have places in the arena yet. */
struct node {
    struct step step;
    struct ref in[OP_INPUTS], add, mid, out, normed, next;
};

struct planner {
    const struct program *p;
    uint32_t fusions;     /* enum fusion, and FUSION_QKV */
    uint32_t *absorbed;   /* [n_ops] 1: the node of another operation computes this one */
    struct node *nodes;   /* at most two for each operation, and the selections */
    uint32_t n_nodes;
    uint32_t *widths, *rooms; /* [n_roots]; selections and scratch append roots */
    uint32_t *per;            /* [n_roots] how many rows of a tower's piece or list a row stands for; 1 in other programs */
    uint32_t *times;          /* [n_roots] how many entries the list may have for each row of the arena; 1 in other programs */
    uint32_t n_roots;
    uint32_t *first, *last, *column; /* [n_roots] lifetime in nodes; column in the arena */
    struct ref *alias;               /* [n_roots] columns of another root that hold this one */
};

#define FUSION_QKV (1u << 31) /* the backend has qkv */

uint32_t root_add(struct planner *b, uint32_t width, uint32_t room);
void node_init(struct node *node, enum step_code code);
bool overlaps(struct ref a, struct ref b);

/* patterns.c: makes the nodes of all operations. */
enum rc patterns_apply(struct planner *b, struct err *err);

#endif
