/* model_state.h: the inside of a model, shared by model.c (which makes and inspects it) and executor.c (which runs it). */
#ifndef LLMPY_MODEL_STATE_H
#define LLMPY_MODEL_STATE_H

#include "../step/kv_layout.h"
#include "model.h"
#include "plan.h"

/* A step of so many rows, one a sequence, up to the logits. */
struct captured {
    uint32_t n_rows, max_tokens; /* as in struct batch_view */
    void *graph; /* the backend's */
};

struct model {
    struct program *program;
    struct plan plan;
    struct weights *weights;
    const struct backend *backend;
    void *ctx;
    struct model_options options;
    struct kv_layout layout;
    struct kv_place *places;      /* [n_layers + n_states] */
    uint32_t n_pages;
    char *arena;                  /* items of the type of activations */
    uint32_t item_bytes;          /* one of them */
    float *logits;                /* [max_logits_rows][vocab_stride] */
    float **rope_freqs, **rope_tables; /* [n_ropes] */
    void *pool;
    char *staged;                 /* the batch's integers in device memory; NULL where the backend has no `begin` */
    struct batch_arrays arrays;   /* in there */
    int32_t *token_types;         /* there, too */
    uint32_t table_stride;
    struct captured *graphs;      /* [n_graphs] by size, of one size the short ones first */
    uint32_t n_graphs;
    size_t logits_bytes, staged_bytes, ropes_bytes;
    uint32_t vocab_stride, max_logits_rows;
    uint64_t graphs_bytes;
    char *read;                   /* host memory: states on their way from the arena */
    size_t read_bytes;
    uint32_t asleep;              /* of enum sleep_part */
    bool has_copy;                /* of sleeping weights, on the host */
};

/* Captures steps of every size at which a backend replays them; nothing where it does not. */
enum rc model_capture(struct model *model, struct err *err);

#endif
