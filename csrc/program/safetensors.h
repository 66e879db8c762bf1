/* safetensors.h: reads the header of one safetensors file (8 bytes of length, JSON, then the tensors' bytes). As the format
 * demands, the tensors must cover the data without holes or overlaps. Called by checkpoint.c and the fuzzer. */
#ifndef LLMPY_SAFETENSORS_H
#define LLMPY_SAFETENSORS_H

#include "tensor_list.h"

/* Appends the file's tensors to the list. After a failure the list is incomplete and may only be destroyed. */
enum rc safetensors_read(struct tensor_list *list, struct file_view *file, struct err *err);

#endif
