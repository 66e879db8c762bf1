/* mma.cuh: mma.sync m16n8k16 of the plain kernels, which read rows at any address. */
#ifndef LLMPY_CUDA_MMA_CUH
#define LLMPY_CUDA_MMA_CUH

#include "common.cuh"

static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], __nv_bfloat16)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], __half)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* Elements k and k + 1 of a row of x; zeros from n_cols on. */
static __device__ __forceinline__ uint32_t pair_at(const uint16_t *row, uint32_t k, uint32_t n_cols, bool is_aligned)
{
    if (is_aligned && k + 1 < n_cols)
        return *(const uint32_t *)(row + k);
    uint32_t low = k < n_cols ? row[k] : 0, high = k + 1 < n_cols ? row[k + 1] : 0;
    return low | high << 16;
}

#endif
