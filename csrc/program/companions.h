/* companions.h: weights that safetensors files store in several tensors, numbers and their scales. A table has one row for each
 * way; checkpoint.c joins the rows of both into blocks of one type. Immutable after checkpoint_open, so any thread may read. */
#ifndef LLMPY_COMPANIONS_H
#define LLMPY_COMPANIONS_H

#include "tensor_list.h"

enum companion_fault { COMPANION_FINE, COMPANION_BAD_SCALE, COMPANION_BAD_NUMBER };

struct companion {
    const char *numbers, *scales; /* endings of both names */
    const char *name;             /* ending of the joined tensor's name; as `numbers`: it takes their place in the list */
    const char *file_type;        /* of the numbers */
    const char *type;             /* of the joined tensor */
    uint32_t dtype;
    uint32_t values, bytes;       /* a row of numbers takes `bytes` for every so many values */
    /* Whether the scales' shape and type fit. Sets the joined shape, and cols and rows_each of the scales. */
    bool (*fits)(const struct checkpoint_tensor *scales, struct checkpoint_tensor *joined);
    enum companion_fault (*join)(const struct checkpoint_tensor *tensor, uint64_t row, const uint8_t *scales,
                                 const uint8_t *numbers, uint8_t *to);
};

/* Pairs the tensors of a list. Numbers whose scales are absent or of another shape keep their type. */
enum rc companions_pair(struct tensor_list *list, const struct file_view *files, struct err *err);
/* Sets what `joined` needs to be read by a row of the table. */
void companion_take(const struct companion *way, const struct checkpoint_tensor *scales, struct checkpoint_tensor *joined);
/* Whether a scale is finite, and its products with numbers of a byte are (448 at most). */
bool companion_scale_fits(float scale);
/* Bytes of a row of numbers, without scales. */
size_t companion_row_bytes(const struct companion *companion, uint64_t cols);
/* Joins a row of numbers and its scales into blocks of the tensor's type. */
enum companion_fault companion_join(const struct checkpoint_tensor *tensor, uint64_t row, const uint8_t *scales,
                                    const uint8_t *numbers, uint8_t *to);

#endif
