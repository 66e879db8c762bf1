/* lora.h: adapters (LoRA) on a backend. A slot of the model's memory holds one adapter: for each part of each linear's matrix
 * the rank, the scale, A, and B transposed. All slots have the same layout, for ranks of up to max_rank, so loading an adapter
 * is one copy. Python writes the images by `places`. */
#ifndef LLMPY_LORA_H
#define LLMPY_LORA_H

#include "../step/adapters.h"
#include "program.h"

struct model;
struct running;
struct step;
struct views;

/* Where a part of a linear's weight lies in a slot. */
struct lora_place {
    uint32_t weight, part;
    struct lora_part at;
};

struct lora {
    uint32_t max_rank, n_slots;
    size_t slot_bytes;
    uint32_t n_places;
    struct lora_place *places;   /* [n_places] ordered by weight, then by part */
    struct lora_part *parts;     /* [n_places] their `at` */
    uint32_t *first;             /* [n_weights + 1] first place of a weight */
    char *slots;                 /* device memory */
    float *scratch;              /* device memory */
    size_t scratch_bytes;
    struct adapters *adapters;   /* what the engine may load */
};

#define LORA_FUSIONS \
    (FUSION_NORM_LINEAR | FUSION_GATED_LINEAR | FUSION_LINEAR_ADD | FUSION_LINEAR_GATED | FUSION_SSM_INPUTS | \
     FUSION_ADD_NORM_LINEAR) /* that a model with adapters does without: they hide the input or the output of a linear */

/* Lays out the slots, allocates them and the adapters in host memory. */
enum rc lora_create(struct model *model, struct err *err);
void lora_destroy(struct model *model);
/* Loads the adapters that the batch brings. */
enum rc lora_load(struct running *run);
/* Adds the rows' adapters to the output of a linear. */
enum rc lora_add(struct running *run, const struct step *step, const struct views *views);

#endif
