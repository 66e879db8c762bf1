/* attention_bytes.cuh: attention over pages of e4m3 in kv.cuh's layout `bytes`, by the kernels of attention_decode.cuh and
 * attention_prefill.cuh. They widen the values to the type of activations, which is exact, and then compute in the canonical
 * order of attention.cuh. This file is separate so that both halves compile at the same time. */
#ifndef LLMPY_CUDA_ATTENTION_BYTES_CUH
#define LLMPY_CUDA_ATTENTION_BYTES_CUH

#include "../core/common.cuh"

/* The sequences with several rows. */
void attend_prefill_bytes(const struct cuda *cuda, const struct attention_args *args);
/* The n_single sequences with one row. */
enum rc attend_decode_bytes(const struct cuda *cuda, const struct attention_args *args, uint32_t n_single, struct err *err);

#endif
