/* tables.h: 4-bit weights of bitsandbytes. A matrix NAME lies in several tensors:
 *
 *   NAME                                     the numbers, flattened
 *   NAME.quant_state.bitsandbytes__TYPE      a small JSON text with the matrix's shape
 *   NAME.absmax                              a scale for each 64 numbers
 *
 * A scale is a float32. In a "nested" file it is 8 bits that choose a value of a table; the value is multiplied by a second
 * scale, one for each 256 scales. */
#ifndef LLMPY_TABLES_H
#define LLMPY_TABLES_H

#include "tensor_list.h"

/* Joins such tensors. Tensors that do not fit together stay apart. */
enum rc tables_pair(struct tensor_list *list, const struct file_view *files, struct err *err);

#endif
