/* head_norm.cuh: the root mean square of rows of at most 256 values, in one order for every kernel that needs it: chains of 8
 * consecutive values, a lane each; the lanes' sums are added pairwise over lanes 1, 2, 4, ... apart. Lanes past the row hold
 * zeros, which change no bit, so groups of lanes just large enough for a row and whole warps agree. */
#ifndef LLMPY_CUDA_HEAD_NORM_CUH
#define LLMPY_CUDA_HEAD_NORM_CUH

#include "../core/common.cuh"

#define HEAD_NORM_MAX 256u

/* The sum of squares, in every lane of a group of LANES (a power of two) that holds values [8 * lane, 8 * lane + 8) each. */
template <uint32_t LANES> static __device__ __forceinline__ float head_squares(const float (&x)[8])
{
    float sum = 0;
    for (uint32_t i = 0; i < 8; i++)
        sum = fmaf(x[i], x[i], sum);
    for (uint32_t apart = 1; apart < LANES; apart *= 2)
        sum = sum + __shfl_xor_sync(~0u, sum, apart);
    return sum;
}

/* The factor of x, before the weight: the processor's reciprocal square root and one Newton step. A root that is zero or
 * infinite is kept. */
static __device__ __forceinline__ float norm_scale(float squares, float inverse_size, float eps)
{
    float mean = fmaf(squares, inverse_size, eps), root;
    asm("rsqrt.approx.f32 %0,%1;" : "=f"(root) : "f"(mean));
    float closer = fmaf(0.5f * root, fmaf(-mean * root, root, 1.0f), root);
    return closer == closer ? closer : root;
}

static __device__ __forceinline__ float norm_scale(float squares, uint32_t size, float eps)
{
    return norm_scale(squares, __frcp_rn((float)size), eps);
}

#endif
