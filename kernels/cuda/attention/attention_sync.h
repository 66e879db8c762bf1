/* attention_sync.h: what attention.cu asks of attention_sync.cu, whose kernels run on every device. */
#ifndef LLMPY_CUDA_ATTENTION_SYNC_H
#define LLMPY_CUDA_ATTENTION_SYNC_H

#include "../core/common.cuh"

void attend_sync_prefill(const struct cuda *cuda, const struct attention_args *args);
/* n_single: sequences with one row. */
enum rc attend_sync_decode(const struct cuda *cuda, const struct attention_args *args, uint32_t n_single, struct err *err);

#endif
