/* streams.cuh: loads of data that a launch reads once, from global memory to registers. The compiler leaves them where they
 * are, so that they run ahead of their use. */
#ifndef LLMPY_CUDA_STREAMS_CUH
#define LLMPY_CUDA_STREAMS_CUH

#include "common.cuh"

#define STREAM "ld.global.nc.L1::no_allocate.L2::128B"

static __device__ __forceinline__ void stream_16(uint32_t (&words)[4], const uint8_t *from)
{
    asm volatile(STREAM ".v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(from));
}

static __device__ __forceinline__ void stream_8(uint32_t (&words)[2], const uint8_t *from)
{
    asm volatile(STREAM ".v2.u32 {%0,%1},[%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(from));
}

static __device__ __forceinline__ uint32_t stream_4(const uint8_t *from)
{
    uint32_t word;
    asm volatile(STREAM ".u32 %0,[%1];" : "=r"(word) : "l"(from));
    return word;
}

#undef STREAM

/* The same value, of which the compiler does not know how it was made. So it keeps it in a register, where it would make it
 * anew in each round of a loop. All lanes of a warp call it. */
static __device__ __forceinline__ uint32_t kept(uint32_t v)
{
    return __shfl_sync(~0u, v, threadIdx.x % 32);
}

template <class T> static __device__ __forceinline__ const T *kept(const T *p)
{
    const size_t address = (size_t)p;
    return (const T *)((size_t)kept((uint32_t)(address >> 32)) << 32 | kept((uint32_t)address));
}

#endif
