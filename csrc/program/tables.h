/* tables.h: 4-bit weights of bitsandbytes. NAME holds the numbers of a matrix, flattened; a small JSON text in
 * NAME.quant_state.bitsandbytes__TYPE says the matrix's shape; NAME.absmax has a scale for each 64 numbers, as float32, or as
 * 8 bits that choose a value of a table, times a second scale for each 256 ("nested"). */
#ifndef LLMPY_TABLES_H
#define LLMPY_TABLES_H

#include "tensor_list.h"

/* Joins such tensors. Tensors that do not fit together stay apart. */
enum rc tables_pair(struct tensor_list *list, const struct file_view *files, struct err *err);

#endif
