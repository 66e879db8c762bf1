/* mma.cuh: mma.sync m16n8k16, of bytes m16n8k32, and matrices of 8 x 8 values between its registers and shared memory. */
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

/* Of signed bytes, exactly. */
static __device__ __forceinline__ void mma(int32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2])
{
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* Four matrices of 8 x 8 two-byte values; lane l gives the place of row l % 8 of matrix l / 8. */
static __device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t place)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(place)
                 : "memory");
}

static __device__ __forceinline__ void load_transposed(uint32_t (&r)[4], uint32_t place)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(place)
                 : "memory");
}

static __device__ __forceinline__ void store_transposed(uint32_t place, uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0],{%1,%2,%3,%4};" ::"r"(place), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
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
