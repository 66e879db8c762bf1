/* activation.cuh: the value of an activation, the same bits wherever it is computed. */
#ifndef LLMPY_CUDA_ACTIVATION_CUH
#define LLMPY_CUDA_ACTIVATION_CUH

#include "../core/common.cuh"

static __device__ __forceinline__ float act_value(float x, uint32_t act)
{
    switch (act) {
    case ACT_SILU:
        return __fdividef(x, 1.0f + expf(-x)); /* within 2 units of the last place, no slow path */
    case ACT_GELU:
        return 0.5f * x * (1.0f + erff(x * 0x1.6a09e6p-1f));
    case ACT_GELU_TANH:
        return 0.5f * x * (1.0f + tanhf(0x1.988454p-1f * fmaf(x * x * x, 0.044715f, x)));
    case ACT_RELU:
        return x < 0 ? 0.0f : x; /* a NaN stays */
    case ACT_TANH:
        return tanhf(x);
    case ACT_IDENTITY:
        return x;
    case ACT_SIGMOID:
        return __fdividef(1.0f, 1.0f + expf(-x));
    case ACT_QUICK_GELU:
        return __fdividef(x, 1.0f + expf(-1.702f * x));
    default:
        x = x < 0 ? 0.0f : x;
        return x * x;
    }
}

#endif
