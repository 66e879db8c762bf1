/* wgmma_fp8.cuh: wgmma m64nNk32 of e4m3 with both operands in shared memory, described as in wgmma.cuh: 32 columns of bytes lie
 * as 16 columns of two bytes. d = A B^T, or d += A B^T where ADDS. */
#ifndef LLMPY_CUDA_WGMMA_FP8_CUH
#define LLMPY_CUDA_WGMMA_FP8_CUH

#include "common.cuh"

#define SUMS4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS16(i) SUMS4(i), SUMS4(i + 4), SUMS4(i + 8), SUMS4(i + 12)
#define NAMES16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define NAMES32 NAMES16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES64                                                                                                               \
    NAMES32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,"   \
            "%59,%60,%61,%62,%63"
#define WGMMA_FP8(n, names, a_name, b_name, adds_name, ...)                                                                   \
    template <bool ADDS> static __device__ __forceinline__ void wgmma_fp8(float (&d)[n / 2], uint64_t a, uint64_t b)          \
    {                                                                                                                         \
        asm volatile("{.reg .pred p; setp.ne.b32 p,%" #adds_name ",0; wgmma.mma_async.sync.aligned.m64n" #n                   \
                     "k32.f32.e4m3.e4m3 {" names "},%" #a_name ",%" #b_name ",p,1,1;}"                                        \
                     : __VA_ARGS__                                                                                            \
                     : "l"(a), "l"(b), "n"(ADDS));                                                                            \
    }
WGMMA_FP8(8, "%0,%1,%2,%3", 4, 5, 6, SUMS4(0))
WGMMA_FP8(16, "%0,%1,%2,%3,%4,%5,%6,%7", 8, 9, 10, SUMS4(0), SUMS4(4))
WGMMA_FP8(32, NAMES16, 16, 17, 18, SUMS16(0))
WGMMA_FP8(64, NAMES32, 32, 33, 34, SUMS16(0), SUMS16(16))
WGMMA_FP8(128, NAMES64, 64, 65, 66, SUMS16(0), SUMS16(16), SUMS16(32), SUMS16(48))
#undef WGMMA_FP8
#undef NAMES64
#undef NAMES32
#undef NAMES16
#undef SUMS16
#undef SUMS4

/* The products of a slab of 128 columns, from zero. */
template <uint32_t N>
static __device__ __forceinline__ void wgmma_fp8_slab(float (&d)[N], uint64_t a, uint64_t b)
{
    wgmma_fp8<false>(d, a, b);
    wgmma_fp8<true>(d, a + 2, b + 2);
    wgmma_fp8<true>(d, a + 4, b + 4);
    wgmma_fp8<true>(d, a + 6, b + 6);
}

#endif
