/* model.h: a model ready to run on one backend: compiled program, weights, arena, page pool (model.c). model_start (executor.c)
 * runs the steps of the plan once per batch, one backend call a step, or replays a captured graph. Then it passes the logits of
 * the wanted rows to the sampler in slices. A team (team.h) makes models, one for each rank, and is the engine's runner; one
 * thread at a time. Nothing is allocated after a model is made. */
#ifndef LLMPY_MODEL_H
#define LLMPY_MODEL_H

#include "../step/runner.h"
#include "checkpoint.h"
#include "program.h"
#include "weights.h"

#define MOST_GRAPH_ROWS 64u /* of a captured step with drafts */

struct model;
struct lora;

struct model_options {
    const char *device, *isa;
    uint32_t rank, n_ranks;       /* of all ranks of the model */
    uint32_t n_here;              /* ranks of this process; 0: all */
    const char *library;          /* path of the backend's shared library; unused on the CPU */
    const char *cublaslt;         /* as in struct backend_options */
    uint32_t n_threads;
    uint32_t kv_dtype;            /* as in struct kv_view; DTYPE_NONE: the first matrix's if F16 or BF16, else of activations */
    uint32_t block_tokens, max_num_seqs, max_num_batched_tokens;
    uint32_t max_model_len;
    uint32_t max_draft_rows;      /* most rows of a captured step with drafts; 0: none is captured */
    bool fits_model_len;          /* if the pool is too small, lower max_model_len instead of failing */
    bool has_one_group;           /* all layers keep all positions in one group of pages, windows or not */
    uint64_t beside_bytes, beside_page_bytes; /* of a drafter: its memory, and its bytes for each page of this model's pool */
    uint64_t kv_cache_bytes;      /* 0: use what is left of memory_share of the device's memory */
    double memory_share;
    uint64_t host_cache_bytes;    /* host memory for pages outside the pool; 0: none */
    uint32_t max_loras;           /* most adapters of a step; 0: the model serves none */
    uint32_t max_lora_rank;
    bool has_lora_experts;        /* adapters may change experts */
    bool has_lora_embeddings;     /* adapters may change embeddings and the head */
    bool has_lora_bfloat16;       /* adapters' factors have values of bfloat16 */
    uint32_t max_encoder_rows;    /* most rows of a piece that a tower computes */
    uint32_t encoder_cache_tokens; /* features that the pool holds */
    bool is_eager;                /* no captured graphs */
    bool is_synchronous;          /* no captured graphs, and wait for each operation, so that a fault names it */
    bool checks_ranks;            /* the same without fusions, and compare what all ranks compute alike (rank_check.h) */
    struct weights_options weights;
};

struct model_memory {
    uint64_t weights_bytes, kv_bytes, activations_bytes, sampler_bytes, staging_bytes;
    uint64_t host_cache_bytes;
    uint64_t tower_weights_bytes, tower_bytes, features_bytes; /* of weights; of activations; of tower_bytes */
    uint64_t workspaces_bytes, graphs_bytes, pinned_bytes; /* other memory of the backend; pinned is host memory */
    uint64_t device_total_bytes, device_free_bytes;       /* 0: the device uses host memory */
};

void model_destroy(struct model *model);
/* Opens the backend for a program alone, to learn the bytes of a page of its pool. Takes ownership of the program. */
enum rc model_page_bytes(struct program *program, const struct model_options *options, uint64_t *page_bytes, struct err *err);
/* Functions of struct runner for one rank; ctx is the model. */
enum rc model_start(void *ctx, struct batch *batch, struct err *err);
enum rc model_finish(void *ctx, struct batch *batch, struct err *err);
enum rc model_read_states(void *ctx, const struct batch *batch, uint32_t first, uint32_t n, float *rows, struct err *err);
uint64_t model_allocations(void *ctx);
bool model_is_async(const struct model *model);

/* The rows that steps keep, in device memory; NULL: none. width and stride: in items of activations. */
const void *model_kept(const struct model *model, uint32_t *width, uint32_t *stride);
const struct lora *model_lora(const struct model *model); /* without adapters if the model serves none */
const struct kv_layout *model_layout(const struct model *model);
const struct program *model_program(const struct model *model);
const struct weights *model_weights(const struct model *model);
uint32_t model_n_pages(const struct model *model);
uint32_t model_n_host_slots(const struct model *model); /* pages that the host memory holds */
size_t model_slot_bytes(const struct model *model);     /* a page of each rank of this process */
void *model_host_slots(const struct model *model);      /* [n][slot_bytes] that memory; NULL: none */
uint32_t model_max_len(const struct model *model);
uint32_t model_n_graphs(const struct model *model);
uint32_t model_kv_dtype(const struct model *model);
uint32_t model_arithmetic(const struct model *model); /* of quantised matrices; ARITHMETIC_AUTO: the model has none */
const char *model_description(const struct model *model);
const char *model_on_host(const struct model *model); /* as entries_on_host (composed.h) */
enum rc model_memory(const struct model *model, struct model_memory *memory, struct err *err);
/* Writes a one-line description of step `index`; false if there is no such step. */
bool model_step_text(const struct model *model, uint32_t index, char *text, size_t size_bytes);

#endif
