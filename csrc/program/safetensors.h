/* safetensors.h: reads the header of one safetensors file (8 bytes of length, JSON, then the tensors' bytes).
 * Strict as the format demands: the data are covered by the tensors once, without holes. Called by checkpoint.c, the fuzzer. */
#ifndef LLMPY_SAFETENSORS_H
#define LLMPY_SAFETENSORS_H

#include "tensor_list.h"

/* Appends the file's tensors to the list. On failure the list holds a part of them and is only good to be destroyed. */
enum rc safetensors_read(struct tensor_list *list, struct file_view *file, struct err *err);

#endif
