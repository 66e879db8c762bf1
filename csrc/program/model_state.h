/* model_state.h: the inside of a model, shared by model.c (which makes and inspects it) and executor.c (which runs it). */
#ifndef LLMPY_MODEL_STATE_H
#define LLMPY_MODEL_STATE_H

#include "../engine/kv_cache.h"
#include "model.h"
#include "plan.h"

struct model {
    struct program *program;
    struct plan plan;
    struct weights *weights;
    const struct backend *backend;
    void *ctx;
    struct model_options options;
    struct kv_layout layout;
    struct kv_place *places;      /* [n_layers] */
    uint32_t n_pages;
    char *arena;                  /* items of the type of activations */
    uint32_t item_bytes;          /* one of them */
    float *logits;                /* [max_logits_rows][vocab_stride] */
    float **rope_freqs, **rope_tables; /* [n_ropes] */
    void *pool;
    char *staged;                 /* the batch's integers in device memory */
    size_t logits_bytes, staged_bytes, ropes_bytes;
    uint32_t vocab_stride, max_logits_rows;
};

#endif
