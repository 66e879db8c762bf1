/* lora.cuh: what lora.cu tells other operations about the rows of a step that have adapters. */
#ifndef LLMPY_CUDA_LORA_CUH
#define LLMPY_CUDA_LORA_CUH

#include "../core/common.cuh"

/* The slots of the step's rows, -1: none; or of its wanted rows. */
const int32_t *cuda_lora_row_slots(const struct cuda *cuda, bool of_wanted);

/* What a bias of an adapter adds to a row of a matrix (kind: enum lora_bias, not LORA_BIAS_NONE). */
static __device__ __forceinline__ float lora_bias_of(uint32_t kind, float bias, const float *base_bias, uint32_t row)
{
    return kind == LORA_BIAS_REPLACES && base_bias ? bias - base_bias[row] : bias;
}

#endif
