/* lora.h: adapters (LoRA) on a backend. A slot of the model's memory holds one adapter: for each part of each linear's matrix
 * the rank, the scale, A, and B transposed. All slots have the same layout, for ranks of up to max_rank, so loading an adapter
 * is one copy. Python writes the images by `places`. */
#ifndef LLMPY_LORA_H
#define LLMPY_LORA_H

#include "../step/adapters.h"
#include "model.h"
#include "program.h"

struct model;
struct running;
struct step;
struct views;

/* What an adapter changes: a linear, what an embedding reads, the head, experts. One matrix can be an embedding and a head. */
enum lora_use { LORA_LINEAR, LORA_EMBEDDING, LORA_HEAD, LORA_EXPERTS };

/* Where a part of a weight lies in a slot. */
struct lora_place {
    uint32_t weight, part;
    enum lora_use use;
    uint32_t n_cols;     /* of A */
    uint32_t item_bytes; /* of A and B */
    size_t bias;         /* where it is in a slot, if the slot has room for it */
    struct lora_part at;
};

struct lora {
    uint32_t max_rank, n_slots;
    bool has_experts;            /* slots have room for experts */
    bool has_embeddings;         /* and for embeddings and the head */
    bool has_biases;             /* and for a bias of each part */
    bool has_whole;              /* an adapter's matrix may stand in place of a part's */
    bool is_bfloat16;            /* A and B of linears are stored as bfloat16, others as float32 */
    size_t slot_bytes;
    size_t image_offset;         /* of this rank's slot in an image, which has a slot of each rank */
    uint32_t n_places;
    struct lora_place *places;   /* [n_places] of linears and heads by weight, then by part; then those of embeddings */
    struct lora_part *parts;     /* [n_places] their `at` */
    uint32_t *first;             /* [n_weights + 1] first place of a weight */
    char *slots;                 /* device memory */
    float *scratch;              /* device memory */
    size_t scratch_bytes;
    float *delta;                /* device memory; NULL: adapters are added to the linears' results */
    size_t delta_bytes;
    uint32_t delta_rows, delta_stride;
    struct adapters *adapters;   /* what the engine may load */
    struct model *const *ranks;  /* [n_ranks] of the first rank's */
    uint32_t n_ranks;
};

/* The experts of an operation: all of them, the first that is held here, how many are, how many a row has. */
struct held_experts {
    uint32_t n, first, n_held, n_chosen;
};
struct held_experts lora_held(const struct op *op); /* zeros: it has none */

/* The fusions that a model with adapters can have: no fusion hides the input of a linear, and none its output unless linears
 * add `delta`. A step with FUSION_ADD_NORM_LINEAR runs in two parts if rows have adapters (ops_rows.c). */
uint32_t lora_fusions(const struct model_options *options, uint32_t fusions);
/* Lays out the slots, allocates them and the adapters in host memory. */
enum rc lora_create(struct model *model, struct err *err);
void lora_destroy(struct model *model);
/* Lets images have a slot of each rank, and be loaded beside steps. `ranks` stays. */
void lora_join(struct model *const *ranks, uint32_t n_ranks);
/* Loads the adapters that the batch brings. */
enum rc lora_load(struct running *run);
/* What the adapters of some rows add to the experts that are held; has_experts. up, down: weights, of which one may be
 * NO_INDEX. Fills `args` and returns it. */
const struct experts_lora *lora_experts(const struct running *run, const struct step *step, uint32_t up, uint32_t down,
                                        uint32_t n_held, struct experts_lora *args);
/* What adapters add to the rows of an embedding of tokens. */
enum rc lora_embedding(struct running *run, uint32_t weight, const struct embed_args *embed);
/* What adapters add to logits that the head has computed for the wanted rows from `row` on. */
enum rc lora_head(struct running *run, const struct step *step, uint32_t row, const struct linear_args *linear);
/* A linear for rows with adapters. Where linears add `delta`, it takes LORA_ROWS rows at a time. weight: of the linear. */
enum rc lora_linear(struct running *run, const struct step *step, uint32_t weight, const struct linear_args *linear);

#endif
