/* tap_images.h: the images of a prompt that is tapped. They have a tower with buffers apart from the engine's, so that its cache
 * of features stays unchanged; the weights are the model's. */
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
/* Computes the features before the first chunk, and gives the rows of each chunk theirs. */
enum rc tap_images_begin(struct tap_images *images, const struct tap_prompt *prompt, struct running *run, uint32_t first,
                         uint32_t n);

#endif
