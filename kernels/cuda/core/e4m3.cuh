/* e4m3.cuh: four e4m3 values as float16, exactly. */
#ifndef LLMPY_CUDA_E4M3_CUH
#define LLMPY_CUDA_E4M3_CUH

#include "common.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
static __device__ __forceinline__ uint2 widen_e4m3(uint32_t bytes)
{
    uint2 pairs;
    asm("{.reg .b16 low, high; mov.b32 {low,high},%2; cvt.rn.f16x2.e4m3x2 %0,low; cvt.rn.f16x2.e4m3x2 %1,high;}"
        : "=r"(pairs.x), "=r"(pairs.y)
        : "r"(bytes));
    return pairs;
}
#else
/* Two values, in the upper bytes of both halves of a word. A byte's exponent and mantissa, one bit lower, are those of a
 * float16 that is 2^8 times smaller, subnormal ones, too. All bits of both set are a NaN. */
static __device__ __forceinline__ uint32_t widen_two_e4m3(uint32_t word)
{
    const uint32_t size = word & 0x7f007f00u, is_nan = __vcmpeq2(size, 0x7f007f00u);
    const uint32_t small = (word & 0x80008000u) | size >> 1, by = 0x5c005c00u; /* 2^8, twice */
    const __half2 wide = __hmul2(*(const __half2 *)&small, *(const __half2 *)&by);
    return *(const uint32_t *)&wide | (is_nan & 0x7fff7fffu);
}

static __device__ __forceinline__ uint2 widen_e4m3(uint32_t bytes)
{
    return make_uint2(widen_two_e4m3(__byte_perm(bytes, 0, 0x1404)), widen_two_e4m3(__byte_perm(bytes, 0, 0x3424)));
}
#endif

#endif
