/* companions.h: weights that safetensors files store in two tensors, numbers and their scales. A table has one row for each
 * way; checkpoint.c joins the rows of both into blocks of one type. Immutable after checkpoint_open, so any thread may read. */
#ifndef LLMPY_COMPANIONS_H
#define LLMPY_COMPANIONS_H

#include "tensor_list.h"

enum companion_fault { COMPANION_FINE, COMPANION_BAD_SCALE, COMPANION_BAD_NUMBER };

/* Pairs the tensors of a list. Numbers whose scales are absent or of another shape keep their type. */
enum rc companions_pair(struct tensor_list *list, const struct file_view *files, struct err *err);
/* Bytes of a row of numbers, without scales. */
size_t companion_row_bytes(const struct companion *companion, uint64_t cols);
/* Joins a row of numbers and its scales into blocks of the tensor's type. */
enum companion_fault companion_join(const struct checkpoint_tensor *tensor, const uint8_t *scales, const uint8_t *numbers,
                                    uint8_t *to);

#endif
