/* lora.cuh: what lora.cu tells other operations about the rows of a step that have adapters. */
#ifndef LLMPY_CUDA_LORA_CUH
#define LLMPY_CUDA_LORA_CUH

#include "../core/common.cuh"

/* The slots of the step's rows, -1: none; or of its wanted rows. */
const int32_t *cuda_lora_row_slots(const struct cuda *cuda, bool of_wanted);

#endif
