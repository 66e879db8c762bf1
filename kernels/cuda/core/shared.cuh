/* shared.cuh: loads and stores of shared memory by its 32-bit address. */
#ifndef LLMPY_CUDA_SHARED_CUH
#define LLMPY_CUDA_SHARED_CUH

#include "common.cuh"

static __device__ __forceinline__ uint32_t load_word(uint32_t address)
{
    uint32_t v;
    asm volatile("ld.shared.u32 %0,[%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}

static __device__ __forceinline__ float load_float(uint32_t address)
{
    float v;
    asm volatile("ld.shared.f32 %0,[%1];" : "=f"(v) : "r"(address) : "memory");
    return v;
}

static __device__ __forceinline__ float2 load_two_floats(uint32_t address)
{
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0,%1},[%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
    return v;
}

static __device__ __forceinline__ float4 load_four_floats(uint32_t address)
{
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3},[%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address) : "memory");
    return v;
}

static __device__ __forceinline__ void store_float(uint32_t address, float v)
{
    asm volatile("st.shared.f32 [%0],%1;" ::"r"(address), "f"(v) : "memory");
}

#endif
