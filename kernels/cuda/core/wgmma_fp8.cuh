/* wgmma_fp8.cuh: wgmma m64nNk32 of e4m3, whose sums are float32, and of signed bytes, whose sums are exact in int32. Both
 * operands are in shared memory, described as in wgmma.cuh: 32 columns of bytes lie as 16 columns of two bytes. d = A B^T, or
 * d += A B^T where ADDS. */
#ifndef LLMPY_CUDA_WGMMA_FP8_CUH
#define LLMPY_CUDA_WGMMA_FP8_CUH

#include "common.cuh"

#define SUMS4(i, c) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3])
#define SUMS16(i, c) SUMS4(i, c), SUMS4(i + 4, c), SUMS4(i + 8, c), SUMS4(i + 12, c)
#define NAMES16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define NAMES32 NAMES16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES64                                                                                                               \
    NAMES32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,"   \
            "%59,%60,%61,%62,%63"
#define NAMES48 NAMES32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define WGMMA_BYTES(n, sum, types, ends, names, a_name, b_name, adds_name, ...)                                              \
    template <bool ADDS> static __device__ __forceinline__ void wgmma_bytes(sum(&d)[n / 2], uint64_t a, uint64_t b)           \
    {                                                                                                                         \
        asm volatile("{.reg .pred p; setp.ne.b32 p,%" #adds_name ",0; wgmma.mma_async.sync.aligned.m64n" #n "k32." types      \
                     " {" names "},%" #a_name ",%" #b_name ",p" ends ";}"                                                     \
                     : __VA_ARGS__                                                                                            \
                     : "l"(a), "l"(b), "n"(ADDS));                                                                            \
    }
#define WGMMA_OF(sum, types, ends, c)                                                                                         \
    WGMMA_BYTES(8, sum, types, ends, "%0,%1,%2,%3", 4, 5, 6, SUMS4(0, c))                                                     \
    WGMMA_BYTES(16, sum, types, ends, "%0,%1,%2,%3,%4,%5,%6,%7", 8, 9, 10, SUMS4(0, c), SUMS4(4, c))                          \
    WGMMA_BYTES(32, sum, types, ends, NAMES16, 16, 17, 18, SUMS16(0, c))                                                      \
    WGMMA_BYTES(64, sum, types, ends, NAMES32, 32, 33, 34, SUMS16(0, c), SUMS16(16, c))                                       \
    WGMMA_BYTES(96, sum, types, ends, NAMES48, 48, 49, 50, SUMS16(0, c), SUMS16(16, c), SUMS16(32, c))                        \
    WGMMA_BYTES(128, sum, types, ends, NAMES64, 64, 65, 66, SUMS16(0, c), SUMS16(16, c), SUMS16(32, c), SUMS16(48, c))
WGMMA_OF(float, "f32.e4m3.e4m3", ",1,1", "+f")
WGMMA_OF(int32_t, "s32.s8.s8", "", "+r")
#undef WGMMA_OF
#undef WGMMA_BYTES
#undef NAMES64
#undef NAMES48
#undef NAMES32
#undef NAMES16
#undef SUMS16
#undef SUMS4

/* The products of a slab of 128 columns, from zero. */
template <class SUM, uint32_t N>
static __device__ __forceinline__ void wgmma_fp8_slab(SUM (&d)[N], uint64_t a, uint64_t b)
{
    wgmma_bytes<false>(d, a, b);
    wgmma_bytes<true>(d, a + 2, b + 2);
    wgmma_bytes<true>(d, a + 4, b + 4);
    wgmma_bytes<true>(d, a + 6, b + 6);
}

#endif
