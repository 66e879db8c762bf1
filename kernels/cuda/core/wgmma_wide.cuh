/* wgmma_wide.cuh: wgmma of wgmma.cuh for 72 to 256 columns, and for 32 to 160 with the rows of A in registers. */
#ifndef LLMPY_CUDA_WGMMA_WIDE_CUH
#define LLMPY_CUDA_WGMMA_WIDE_CUH

#include "common.cuh"

#define SUMS4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS16(i) SUMS4(i), SUMS4(i + 4), SUMS4(i + 8), SUMS4(i + 12)
#define NAMES2 \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES3 NAMES2 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define NAMES4 NAMES3 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define NAMES5 NAMES4 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define NAMES6 NAMES5 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define NAMES7 NAMES6 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define NAMES8 NAMES7 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define SUMS2 SUMS16(0), SUMS16(16)
#define SUMS3 SUMS16(0), SUMS16(16), SUMS16(32)
#define SUMS4_ SUMS3, SUMS16(48)
#define SUMS5 SUMS4_, SUMS16(64)
#define SUMS6 SUMS5, SUMS16(80)
#define SUMS7 SUMS6, SUMS16(96)
#define SUMS8 SUMS7, SUMS16(112)
#define WGMMA(n, names, a_name, b_name, ctype, type, ...)                                                                     \
    static __device__ __forceinline__ void wgmma(float (&d)[n / 2], uint64_t a, uint64_t b, ctype)                            \
    {                                                                                                                         \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" names "},%" #a_name ",%" #b_name    \
                     ",1,1,1,0,0;"                                                                                            \
                     : __VA_ARGS__                                                                                            \
                     : "l"(a), "l"(b));                                                                                       \
    }
#define WGMMA_OF(n, names, a_name, b_name, ...)                                                                               \
    WGMMA(n, names, a_name, b_name, __nv_bfloat16, "bf16", __VA_ARGS__)                                                       \
    WGMMA(n, names, a_name, b_name, __half, "f16", __VA_ARGS__)
WGMMA_OF(72, NAMES2 ",%32,%33,%34,%35", 36, 37, SUMS2, SUMS4(32))
WGMMA_OF(80, NAMES2 ",%32,%33,%34,%35,%36,%37,%38,%39", 40, 41, SUMS2, SUMS4(32), SUMS4(36))
WGMMA_OF(96, NAMES3, 48, 49, SUMS3)
WGMMA_OF(104, NAMES3 ",%48,%49,%50,%51", 52, 53, SUMS3, SUMS4(48))
WGMMA_OF(112, NAMES3 ",%48,%49,%50,%51,%52,%53,%54,%55", 56, 57, SUMS3, SUMS4(48), SUMS4(52))
WGMMA_OF(128, NAMES4, 64, 65, SUMS4_)
WGMMA_OF(144, NAMES4 ",%64,%65,%66,%67,%68,%69,%70,%71", 72, 73, SUMS4_, SUMS4(64), SUMS4(68))
WGMMA_OF(160, NAMES5, 80, 81, SUMS5)
WGMMA_OF(192, NAMES6, 96, 97, SUMS6)
WGMMA_OF(224, NAMES7, 112, 113, SUMS7)
WGMMA_OF(256, NAMES8, 128, 129, SUMS8)
/* From zero, unless ADDS. */
#define WGMMA_ROWS(n, names, a0, a1, a2, a3, b_name, adds_name, ...)                                                          \
    template <bool ADDS = true>                                                                                               \
    static __device__ __forceinline__ void wgmma(float (&d)[n / 2], const uint32_t (&a)[4], uint64_t b, __nv_bfloat16)        \
    {                                                                                                                         \
        asm volatile("{.reg .pred p; setp.ne.b32 p,%" #adds_name ",0; wgmma.mma_async.sync.aligned.m64n" #n                   \
                     "k16.f32.bf16.bf16 {" names "},{%" #a0 ",%" #a1 ",%" #a2 ",%" #a3 "},%" #b_name ",p,1,1,0;}"              \
                     : __VA_ARGS__                                                                                            \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ADDS));                                        \
    }
WGMMA_ROWS(32, "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15", 16, 17, 18, 19, 20, 21, SUMS16(0))
WGMMA_ROWS(64, NAMES2, 32, 33, 34, 35, 36, 37, SUMS2)
WGMMA_ROWS(96, NAMES3, 48, 49, 50, 51, 52, 53, SUMS3)
WGMMA_ROWS(128, NAMES4, 64, 65, 66, 67, 68, 69, SUMS4_)
WGMMA_ROWS(160, NAMES5, 80, 81, 82, 83, 84, 85, SUMS5)
#undef WGMMA_ROWS
#undef WGMMA_OF
#undef WGMMA
#undef SUMS8
#undef SUMS7
#undef SUMS6
#undef SUMS5
#undef SUMS4_
#undef SUMS3
#undef SUMS2
#undef NAMES8
#undef NAMES7
#undef NAMES6
#undef NAMES5
#undef NAMES4
#undef NAMES3
#undef NAMES2
#undef SUMS16
#undef SUMS4

#endif
