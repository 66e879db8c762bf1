/* packed.h: weights whose numbers lie several to a word, with scales and zeros in other tensors: GPTQ, AWQ, and the packed
 * format of compressed-tensors; SqueezeLLM has 16 values for each row in place of scales. A table has one row for each way.
 * Some ways store the transposed matrix, so rows are read in spans. The columns of a joined weight are sorted by their groups.
 * Immutable after checkpoint_join, so any thread may read. */
#ifndef LLMPY_PACKED_H
#define LLMPY_PACKED_H

#include "tensor_list.h"

/* Adds a tensor NAME.weight for each packed weight of the scheme. Weights whose tensors do not fit together stay apart. */
enum rc packed_pair(struct tensor_list *list, const struct file_view *files, const char *scheme, struct err *err);
/* checkpoint_rows of a packed tensor. */
enum rc packed_rows(const struct checkpoint *checkpoint, const struct checkpoint_tensor *tensor, uint64_t first, uint64_t step,
                    uint64_t n_rows, uint8_t *rows, struct err *err);

#endif
