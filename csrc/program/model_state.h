/* model_state.h: the inside of a model, shared by model.c (which makes and inspects it) and executor.c (which runs it). */
#ifndef LLMPY_MODEL_STATE_H
#define LLMPY_MODEL_STATE_H

#include "../step/kv_layout.h"
#include "composed.h"
#include "model.h"
#include "plan.h"

/* A captured graph of a step up to the logits, for n_rows sequences of one row each. */
struct captured {
    uint32_t n_rows, max_tokens; /* as in struct batch_view */
    void *graph;
};

struct model {
    struct program *program;
    struct plan plan;
    struct weights *weights;
    const struct backend *backend;
    void *ctx;
    struct entries entries;
    struct model_options options;
    struct kv_layout layout;
    struct kv_place *places;      /* [n_layers + n_states] */
    uint32_t n_pages;
    char *arena;                  /* items have the type of activations */
    uint32_t item_bytes;          /* of one item of the arena */
    float *logits;                /* [max_logits_rows][vocab_stride] */
    float **rope_freqs, **rope_tables; /* [n_ropes] */
    void *pool;
    char *staged;                 /* the batch's integers in device memory; NULL if steps read them in host memory */
    struct batch_arrays arrays;   /* inside `staged` */
    int32_t *token_types;         /* inside `staged` */
    uint32_t table_stride;
    struct captured *graphs;      /* [n_graphs] sorted by n_rows; at equal n_rows, graphs with a max_tokens limit come first */
    uint32_t n_graphs;
    size_t logits_bytes, staged_bytes, ropes_bytes;
    uint32_t vocab_stride, max_logits_rows;
    uint64_t graphs_bytes;
    char *read;                   /* host buffer for states that are copied from the arena */
    size_t read_bytes;
    uint32_t asleep;              /* of enum sleep_part */
    bool has_copy;                /* the host holds a copy of the sleeping weights */
};

/* Captures a graph for each batch size that is replayed. Does nothing if the backend cannot capture or graphs are off. */
enum rc model_capture(struct model *model, struct err *err);

#endif
