/* tap_images.h: the images of a prompt that is tapped. They have a tower with buffers apart from the engine's, so that its
 * cache of features stays unchanged; the weights are the model's. */
#ifndef LLMPY_TAP_IMAGES_H
#define LLMPY_TAP_IMAGES_H

#include "running.h"
#include "tap.h"

struct tap_images {
    struct batch batch; /* of the rows of a chunk: what a tower reads of it */
    int32_t *features;  /* [n_tokens] the feature of each token among those of all images, -1: none; NULL: there is no tower */
};

/* Gives a copy of a model a tower, if the prompt wants one. n_rows: most rows of a chunk. tap_images_close also follows a
 * failure. */
enum rc tap_images_open(struct tap_images *images, struct model *model, const struct tap_prompt *prompt, uint32_t n_rows,
                        struct err *err);
void tap_images_close(struct tap_images *images, struct model *model);
/* Computes the features, and reads the tower's values that are wanted. */
enum rc tap_images_compute(struct tap_images *images, const struct tap_prompt *prompt, const struct tapped *wanted,
                           uint32_t n_wanted, struct running *run);
/* Gives the rows of a chunk their features. */
enum rc tap_images_begin(struct tap_images *images, const struct tap_prompt *prompt, struct running *run, uint32_t first,
                         uint32_t n);

/* tap.c. Finds where a value lies after a step. False: the step does not compute this value. A tap's plan has no fused
 * steps. */
bool tap_find(const struct program *program, const struct step *step, uint32_t value, struct place *place);
/* Reads n rows of a value as float32. */
enum rc tap_read(const struct model *model, struct place place, uint32_t n, float *rows, struct err *err);

#endif
