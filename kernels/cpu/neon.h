/* neon.h: the vectors of AVX2 that the kernels use, on aarch64. Each function has the name and, bit for bit, the result of the
 * instruction of x86, so files for AVX2 compile unchanged and give the same bits. Vectors are pairs of NEON registers. Most
 * functions are loops over lanes, of which the compiler makes NEON's instructions. vectors.h includes this. */
#ifndef LLMPY_NEON_H
#define LLMPY_NEON_H

#include <arm_neon.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#pragma GCC diagnostic ignored "-Wpsabi" /* vectors are passed between inlined functions only */

typedef float __m256 __attribute__((vector_size(32), may_alias));
typedef long long __m256i __attribute__((vector_size(32), may_alias));
typedef float __m128 __attribute__((vector_size(16), may_alias));
typedef long long __m128i __attribute__((vector_size(16), may_alias));

typedef union {
    __m256 f;
    __m256i v;
    float ps[8];
    float32x4_t quad[2];
    uint8_t u8[32];
    int8_t i8[32];
    uint16_t u16[16];
    int16_t i16[16];
    uint32_t u32[8];
    int32_t i32[8];
    uint64_t u64[4];
    int64_t i64[4];
    __m128i half[2];
    __m128 half_ps[2];
} w256;
typedef union {
    __m128 f;
    __m128i v;
    float ps[4];
    uint8_t u8[16];
    int8_t i8[16];
    uint16_t u16[8];
    int16_t i16[8];
    uint32_t u32[4];
    int32_t i32[4];
    uint64_t u64[2];
} w128;

#define N_INLINE static inline __attribute__((always_inline, unused))
#define EACH(n) for (int i = 0; i < (n); i++)

#define _MM_FROUND_TO_NEAREST_INT 0
#define _MM_FROUND_NO_EXC 8
#define _MM_HINT_T0 3
#define _MM_HINT_T1 2
#define _mm_prefetch(p, hint) __builtin_prefetch((const void *)(p), 0, hint)
enum { _CMP_EQ_OQ, _CMP_LT_OQ, _CMP_LE_OQ, _CMP_UNORD_Q };

/* ---- shapes of functions: r[i] is the result, a[i] and b[i] are the arguments ------------------------------------------- */

#define FLOATS1(name, value) \
    N_INLINE __m256 name(__m256 x) { w256 a = {.f = x}, r; EACH(8) r.ps[i] = (value); return r.f; }
#define FLOATS2(name, value) \
    N_INLINE __m256 name(__m256 x, __m256 y) { w256 a = {.f = x}, b = {.f = y}, r; EACH(8) r.ps[i] = (value); return r.f; }
#define BITS2(name, value) \
    N_INLINE __m256 name(__m256 x, __m256 y) { w256 a = {.f = x}, b = {.f = y}, r; EACH(8) r.u32[i] = (value); return r.f; }
#define WIDE1(name, field, n, value) \
    N_INLINE __m256i name(__m256i x) { w256 a = {.v = x}, r; EACH(n) r.field[i] = (value); return r.v; }
#define WIDE2(name, field, n, value) \
    N_INLINE __m256i name(__m256i x, __m256i y) \
    { \
        w256 a = {.v = x}, b = {.v = y}, r; \
        EACH(n) r.field[i] = (value); \
        return r.v; \
    }
#define WIDE_BY(name, field, n, value) \
    N_INLINE __m256i name(__m256i x, int by) { w256 a = {.v = x}, r; EACH(n) r.field[i] = (value); return r.v; }
#define SHORT2(name, field, n, value) \
    N_INLINE __m128i name(__m128i x, __m128i y) \
    { \
        w128 a = {.v = x}, b = {.v = y}, r; \
        EACH(n) r.field[i] = (value); \
        return r.v; \
    }
#define SHORT_BY(name, field, n, value) \
    N_INLINE __m128i name(__m128i x, int by) { w128 a = {.v = x}, r; EACH(n) r.field[i] = (value); return r.v; }
#define WIDEN(name, from, to, n) \
    N_INLINE __m256i name(__m128i x) { w128 a = {.v = x}; w256 r; EACH(n) r.to[i] = a.from[i]; return r.v; }
#define CAST(name, from, to) \
    N_INLINE to name(from x) { return (to)x; }

/* ---- floats -------------------------------------------------------------------------------------------------------------- */

N_INLINE __m256 _mm256_set1_ps(float x) { w256 r; EACH(8) r.ps[i] = x; return r.f; }
N_INLINE __m256 _mm256_setzero_ps(void) { return _mm256_set1_ps(0); }
N_INLINE __m256 _mm256_broadcast_ss(const float *p) { return _mm256_set1_ps(*p); }
N_INLINE __m256 _mm256_loadu_ps(const float *p) { w256 r; memcpy(&r, p, 32); return r.f; }
N_INLINE __m256 _mm256_load_ps(const float *p) { return _mm256_loadu_ps(p); }
N_INLINE void _mm256_storeu_ps(float *p, __m256 x) { memcpy(p, &x, 32); }
N_INLINE void _mm256_store_ps(float *p, __m256 x) { memcpy(p, &x, 32); }
N_INLINE __m256 _mm256_add_ps(__m256 x, __m256 y) { return x + y; }
N_INLINE __m256 _mm256_sub_ps(__m256 x, __m256 y) { return x - y; }
N_INLINE __m256 _mm256_mul_ps(__m256 x, __m256 y) { return x * y; }
N_INLINE __m256 _mm256_div_ps(__m256 x, __m256 y) { return x / y; }
FLOATS1(_mm256_sqrt_ps, sqrtf(a.ps[i]))
FLOATS2(_mm256_max_ps, a.ps[i] > b.ps[i] ? a.ps[i] : b.ps[i])
FLOATS2(_mm256_min_ps, a.ps[i] < b.ps[i] ? a.ps[i] : b.ps[i])
BITS2(_mm256_andnot_ps, ~a.u32[i] & b.u32[i])
BITS2(_mm256_xor_ps, a.u32[i] ^ b.u32[i])
FLOATS1(_mm256_movehdup_ps, a.ps[i | 1])
FLOATS1(_mm256_moveldup_ps, a.ps[i & ~1])

N_INLINE __m256 _mm256_fmadd_ps(__m256 x, __m256 y, __m256 z)
{
    w256 a = {.f = x}, b = {.f = y}, c = {.f = z};
    EACH(2) c.quad[i] = vfmaq_f32(c.quad[i], a.quad[i], b.quad[i]);
    return c.f;
}
N_INLINE __m256 _mm256_fnmadd_ps(__m256 x, __m256 y, __m256 z)
{
    w256 a = {.f = x}, b = {.f = y}, c = {.f = z};
    EACH(2) c.quad[i] = vfmsq_f32(c.quad[i], a.quad[i], b.quad[i]);
    return c.f;
}
N_INLINE __m256 _mm256_fmaddsub_ps(__m256 x, __m256 y, __m256 z) /* subtracts in even lanes */
{
    w256 c = {.f = z};
    EACH(8) c.u32[i] ^= i & 1 ? 0 : 0x80000000u;
    return _mm256_fmadd_ps(x, y, c.f);
}
N_INLINE __m256 _mm256_round_ps(__m256 x, int mode) /* to nearest even alone */
{
    w256 a = {.f = x};
    (void)mode;
    EACH(2) a.quad[i] = vrndnq_f32(a.quad[i]);
    return a.f;
}
N_INLINE __m256 _mm256_cmp_ps(__m256 x, __m256 y, int how)
{
    w256 a = {.f = x}, b = {.f = y}, r;
    EACH(8)
    {
        float p = a.ps[i], q = b.ps[i];
        int is_true = how == _CMP_EQ_OQ ? p == q : how == _CMP_LT_OQ ? p < q : how == _CMP_LE_OQ ? p <= q : p != p || q != q;
        r.u32[i] = -(uint32_t)is_true;
    }
    return r.f;
}
N_INLINE __m256 _mm256_blendv_ps(__m256 x, __m256 y, __m256 mask)
{
    w256 a = {.f = x}, b = {.f = y}, m = {.f = mask}, r;
    EACH(8) r.u32[i] = m.i32[i] < 0 ? b.u32[i] : a.u32[i];
    return r.f;
}
N_INLINE int _mm256_movemask_ps(__m256 x)
{
    w256 a = {.f = x};
    uint32_t bits = 0;
    EACH(8) bits |= (a.u32[i] >> 31) << i;
    return (int)bits;
}
N_INLINE __m256 _mm256_maskload_ps(const float *p, __m256i mask)
{
    w256 m = {.v = mask}, r;
    EACH(8) r.ps[i] = m.i32[i] < 0 ? p[i] : 0;
    return r.f;
}
N_INLINE void _mm256_maskstore_ps(float *p, __m256i mask, __m256 x)
{
    w256 a = {.f = x}, m = {.v = mask};
    EACH(8) if (m.i32[i] < 0) p[i] = a.ps[i];
}
N_INLINE __m256 _mm256_permutevar8x32_ps(__m256 x, __m256i at)
{
    w256 a = {.f = x}, b = {.v = at}, r;
    EACH(8) r.ps[i] = a.ps[b.u32[i] & 7];
    return r.f;
}
N_INLINE __m256 _mm256_permute_ps(__m256 x, int how)
{
    w256 a = {.f = x}, r;
    EACH(8) r.ps[i] = a.ps[(i & 4) + (how >> 2 * (i & 3) & 3)];
    return r.f;
}
N_INLINE __m256 _mm256_shuffle_ps(__m256 x, __m256 y, int how)
{
    w256 a = {.f = x}, b = {.f = y}, r;
    EACH(8) r.ps[i] = (i & 2 ? b.ps : a.ps)[(i & 4) + (how >> 2 * (i & 3) & 3)];
    return r.f;
}
N_INLINE __m256i _mm256_permute2x128_si256(__m256i x, __m256i y, int how)
{
    w256 a = {.v = x}, b = {.v = y}, r;
    EACH(2) r.half[i] = (how >> 4 * i & 2 ? b.half : a.half)[how >> 4 * i & 1];
    return r.v;
}
N_INLINE __m256 _mm256_permute2f128_ps(__m256 x, __m256 y, int how)
{
    return (__m256)_mm256_permute2x128_si256((__m256i)x, (__m256i)y, how);
}
N_INLINE float _mm256_cvtss_f32(__m256 x) { return x[0]; }
N_INLINE __m128 _mm256_castps256_ps128(__m256 x) { w256 a = {.f = x}; return a.half_ps[0]; }
N_INLINE __m128 _mm256_extractf128_ps(__m256 x, int n) { w256 a = {.f = x}; return a.half_ps[n]; }
CAST(_mm256_castps_si256, __m256, __m256i)
CAST(_mm256_castsi256_ps, __m256i, __m256)

N_INLINE __m128 _mm_add_ps(__m128 x, __m128 y) { return x + y; }
N_INLINE __m128 _mm_add_ss(__m128 x, __m128 y) { x[0] += y[0]; return x; }
N_INLINE __m128 _mm_max_ps(__m128 x, __m128 y)
{
    w128 a = {.f = x}, b = {.f = y}, r;
    EACH(4) r.ps[i] = a.ps[i] > b.ps[i] ? a.ps[i] : b.ps[i];
    return r.f;
}
N_INLINE __m128 _mm_max_ss(__m128 x, __m128 y) { x[0] = x[0] > y[0] ? x[0] : y[0]; return x; }
N_INLINE __m128 _mm_movehl_ps(__m128 x, __m128 y) { return (__m128){y[2], y[3], x[2], x[3]}; }
N_INLINE __m128 _mm_movehdup_ps(__m128 x) { return (__m128){x[1], x[1], x[3], x[3]}; }
N_INLINE float _mm_cvtss_f32(__m128 x) { return x[0]; }

/* ---- conversions --------------------------------------------------------------------------------------------------------- */

N_INLINE __m256 _mm256_cvtepi32_ps(__m256i x) { w256 a = {.v = x}, r; EACH(8) r.ps[i] = (float)a.i32[i]; return r.f; }
/* To nearest even; what int32 cannot hold, and NaN, becomes INT32_MIN. */
N_INLINE __m256i _mm256_cvtps_epi32(__m256 x)
{
    w256 a = {.f = x}, r;
    EACH(2)
    {
        int32x4_t whole = vcvtnq_s32_f32(a.quad[i]);
        uint32x4_t fits = vandq_u32(vcltq_f32(a.quad[i], vdupq_n_f32(0x1p31f)), vceqq_f32(a.quad[i], a.quad[i]));
        r.half[i] = (__m128i)vbslq_s32(fits, whole, vdupq_n_s32(INT32_MIN));
    }
    return r.v;
}
N_INLINE __m256 _mm256_cvtph_ps(__m128i x)
{
    __fp16 halves[8];
    w256 r;
    memcpy(halves, &x, 16);
    EACH(8) r.ps[i] = halves[i];
    return r.f;
}
N_INLINE __m128i _mm256_cvtps_ph(__m256 x, int mode)
{
    __fp16 halves[8];
    w256 a = {.f = x};
    __m128i r;
    (void)mode;
    EACH(8) halves[i] = (__fp16)a.ps[i];
    memcpy(&r, halves, 16);
    return r;
}
N_INLINE float _cvtsh_ss(uint16_t bits)
{
    __fp16 half;
    memcpy(&half, &bits, 2);
    return half;
}
WIDEN(_mm256_cvtepi8_epi16, i8, i16, 16)
WIDEN(_mm256_cvtepu8_epi16, u8, i16, 16)
WIDEN(_mm256_cvtepu8_epi32, u8, i32, 8)
WIDEN(_mm256_cvtepi8_epi32, i8, i32, 8)
WIDEN(_mm256_cvtepu16_epi32, u16, i32, 8)
WIDEN(_mm256_cvtepi8_epi64, i8, i64, 4)

/* ---- integers, 256 bits -------------------------------------------------------------------------------------------------- */

N_INLINE __m256i _mm256_setzero_si256(void) { return (__m256i){0}; }
N_INLINE __m256i _mm256_set1_epi8(char x) { w256 r; EACH(32) r.u8[i] = (uint8_t)x; return r.v; }
N_INLINE __m256i _mm256_set1_epi16(short x) { w256 r; EACH(16) r.i16[i] = x; return r.v; }
N_INLINE __m256i _mm256_set1_epi32(int x) { w256 r; EACH(8) r.i32[i] = x; return r.v; }
N_INLINE __m256i _mm256_set1_epi64x(long long x) { return (__m256i){x, x, x, x}; }
#define _mm256_setr_epi32(...) ((w256){.i32 = {__VA_ARGS__}}.v)
#define _mm256_setr_epi8(...) ((w256){.i8 = {__VA_ARGS__}}.v)
N_INLINE __m256i _mm256_loadu_si256(const void *p) { __m256i r; memcpy(&r, p, 32); return r; }
N_INLINE __m256i _mm256_load_si256(const void *p) { return _mm256_loadu_si256(p); }
N_INLINE void _mm256_storeu_si256(void *p, __m256i x) { memcpy(p, &x, 32); }
N_INLINE void _mm256_store_si256(void *p, __m256i x) { memcpy(p, &x, 32); }
N_INLINE __m256i _mm256_set_m128i(__m128i high, __m128i low) { w256 r = {.half = {low, high}}; return r.v; }
N_INLINE __m256i _mm256_broadcastsi128_si256(__m128i x) { return _mm256_set_m128i(x, x); }
N_INLINE __m128i _mm256_castsi256_si128(__m256i x) { w256 a = {.v = x}; return a.half[0]; }
N_INLINE __m128i _mm256_extracti128_si256(__m256i x, int n) { w256 a = {.v = x}; return a.half[n]; }
N_INLINE __m256i _mm256_and_si256(__m256i x, __m256i y) { return x & y; }
N_INLINE __m256i _mm256_or_si256(__m256i x, __m256i y) { return x | y; }
N_INLINE __m256i _mm256_xor_si256(__m256i x, __m256i y) { return x ^ y; }
N_INLINE __m256i _mm256_andnot_si256(__m256i x, __m256i y) { return ~x & y; }
WIDE2(_mm256_add_epi8, u8, 32, a.u8[i] + b.u8[i])
WIDE2(_mm256_sub_epi8, u8, 32, a.u8[i] - b.u8[i])
WIDE2(_mm256_add_epi16, u16, 16, a.u16[i] + b.u16[i])
WIDE2(_mm256_add_epi32, u32, 8, a.u32[i] + b.u32[i])
WIDE2(_mm256_sub_epi32, u32, 8, a.u32[i] - b.u32[i])
WIDE2(_mm256_mullo_epi16, i16, 16, (int16_t)(a.i16[i] * b.i16[i]))
WIDE2(_mm256_mullo_epi32, u32, 8, a.u32[i] * b.u32[i])
WIDE2(_mm256_mul_epu32, u64, 4, (uint64_t)a.u32[2 * i] * b.u32[2 * i])
WIDE2(_mm256_max_epu32, u32, 8, a.u32[i] > b.u32[i] ? a.u32[i] : b.u32[i])
WIDE2(_mm256_cmpgt_epi32, i32, 8, -(a.i32[i] > b.i32[i]))
WIDE2(_mm256_cmpeq_epi8, i8, 32, -(a.i8[i] == b.i8[i]))
WIDE2(_mm256_madd_epi16, u32, 8,
      (uint32_t)(a.i16[2 * i] * b.i16[2 * i]) + (uint32_t)(a.i16[2 * i + 1] * b.i16[2 * i + 1]))
WIDE2(_mm256_shuffle_epi8, u8, 32, b.u8[i] & 128 ? 0 : a.u8[(i & 16) + (b.u8[i] & 15)])
WIDE2(_mm256_permutevar8x32_epi32, u32, 8, a.u32[b.u32[i] & 7])
WIDE2(_mm256_sllv_epi32, u32, 8, b.u32[i] < 32 ? a.u32[i] << b.u32[i] : 0)
WIDE2(_mm256_unpacklo_epi32, u32, 8, (i & 1 ? b.u32 : a.u32)[(i & 4) + (i & 3) / 2])
WIDE2(_mm256_unpackhi_epi32, u32, 8, (i & 1 ? b.u32 : a.u32)[(i & 4) + (i & 3) / 2 + 2])
WIDE2(_mm256_unpacklo_epi64, u64, 4, (i & 1 ? b.u64 : a.u64)[i & 2])
WIDE2(_mm256_unpackhi_epi64, u64, 4, (i & 1 ? b.u64 : a.u64)[(i & 2) + 1])
WIDE_BY(_mm256_slli_epi16, u16, 16, (uint16_t)(a.u16[i] << by))
WIDE_BY(_mm256_srli_epi16, u16, 16, a.u16[i] >> by)
WIDE_BY(_mm256_srai_epi16, i16, 16, a.i16[i] >> by)
WIDE_BY(_mm256_slli_epi32, u32, 8, a.u32[i] << by)
WIDE_BY(_mm256_srli_epi32, u32, 8, a.u32[i] >> by)
WIDE_BY(_mm256_srai_epi32, i32, 8, a.i32[i] >> by)
WIDE_BY(_mm256_srli_epi64, u64, 4, a.u64[i] >> by)

N_INLINE int16_t n_saturated16(int32_t x) { return x > INT16_MAX ? INT16_MAX : x < INT16_MIN ? INT16_MIN : (int16_t)x; }
N_INLINE int8_t n_saturated8(int16_t x) { return x > INT8_MAX ? INT8_MAX : x < INT8_MIN ? INT8_MIN : (int8_t)x; }
WIDE2(_mm256_maddubs_epi16, i16, 16,
      n_saturated16(a.u8[2 * i] * b.i8[2 * i] + a.u8[2 * i + 1] * b.i8[2 * i + 1]))
WIDE2(_mm256_packs_epi32, i16, 16, n_saturated16((i & 4 ? b.i32 : a.i32)[(i & 8) / 2 + (i & 3)]))
WIDE2(_mm256_packs_epi16, i8, 32, n_saturated8((i & 8 ? b.i16 : a.i16)[(i & 16) / 2 + (i & 7)]))

N_INLINE __m256i _mm256_srl_epi16(__m256i x, __m128i by)
{
    w256 a = {.v = x};
    w128 n = {.v = by};
    EACH(16) a.u16[i] = n.u64[0] < 16 ? a.u16[i] >> n.u64[0] : 0;
    return a.v;
}
N_INLINE __m256i _mm256_blendv_epi8(__m256i x, __m256i y, __m256i mask)
{
    w256 a = {.v = x}, b = {.v = y}, m = {.v = mask}, r;
    EACH(32) r.u8[i] = m.i8[i] < 0 ? b.u8[i] : a.u8[i];
    return r.v;
}
N_INLINE __m256i _mm256_blend_epi32(__m256i x, __m256i y, int mask)
{
    w256 a = {.v = x}, b = {.v = y}, r;
    EACH(8) r.u32[i] = mask >> i & 1 ? b.u32[i] : a.u32[i];
    return r.v;
}

/* ---- integers, 128 bits -------------------------------------------------------------------------------------------------- */

N_INLINE __m128i _mm_setzero_si128(void) { return (__m128i){0}; }
N_INLINE __m128i _mm_set1_epi8(char x) { w128 r; EACH(16) r.u8[i] = (uint8_t)x; return r.v; }
N_INLINE __m128i _mm_set1_epi16(short x) { w128 r; EACH(8) r.i16[i] = x; return r.v; }
#define _mm_setr_epi8(...) ((w128){.i8 = {__VA_ARGS__}}.v)
N_INLINE __m128i _mm_loadu_si128(const void *p) { __m128i r; memcpy(&r, p, 16); return r; }
N_INLINE __m128i _mm_load_si128(const void *p) { return _mm_loadu_si128(p); }
N_INLINE __m128i _mm_loadl_epi64(const void *p) { __m128i r = {0}; memcpy(&r, p, 8); return r; }
N_INLINE void _mm_storeu_si128(void *p, __m128i x) { memcpy(p, &x, 16); }
N_INLINE void _mm_storel_epi64(void *p, __m128i x) { memcpy(p, &x, 8); }
N_INLINE __m128i _mm_cvtsi32_si128(int x) { w128 r = {.i32 = {x}}; return r.v; }
N_INLINE __m128i _mm_cvtsi64_si128(long long x) { return (__m128i){x, 0}; }
N_INLINE int _mm_cvtsi128_si32(__m128i x) { w128 a = {.v = x}; return a.i32[0]; }
CAST(_mm_castsi128_ps, __m128i, __m128)
N_INLINE __m128i _mm_and_si128(__m128i x, __m128i y) { return x & y; }
N_INLINE __m128i _mm_or_si128(__m128i x, __m128i y) { return x | y; }
SHORT2(_mm_sub_epi8, u8, 16, a.u8[i] - b.u8[i])
SHORT2(_mm_add_epi16, u16, 8, a.u16[i] + b.u16[i])
SHORT2(_mm_mullo_epi16, i16, 8, (int16_t)(a.i16[i] * b.i16[i]))
SHORT2(_mm_madd_epi16, u32, 4,
       (uint32_t)(a.i16[2 * i] * b.i16[2 * i]) + (uint32_t)(a.i16[2 * i + 1] * b.i16[2 * i + 1]))
SHORT2(_mm_max_epu32, u32, 4, a.u32[i] > b.u32[i] ? a.u32[i] : b.u32[i])
SHORT2(_mm_shuffle_epi8, u8, 16, b.u8[i] & 128 ? 0 : a.u8[b.u8[i] & 15])
SHORT2(_mm_unpacklo_epi8, u8, 16, (i & 1 ? b.u8 : a.u8)[i / 2])
SHORT2(_mm_unpackhi_epi8, u8, 16, (i & 1 ? b.u8 : a.u8)[8 + i / 2])
SHORT2(_mm_unpackhi_epi64, u64, 2, (i ? b.u64 : a.u64)[1])
SHORT2(_mm_srl_epi16, u16, 8, b.u64[0] < 16 ? a.u16[i] >> b.u64[0] : 0)
SHORT_BY(_mm_slli_epi16, u16, 8, (uint16_t)(a.u16[i] << by))
SHORT_BY(_mm_srli_epi16, u16, 8, a.u16[i] >> by)
SHORT_BY(_mm_srli_epi64, u64, 2, a.u64[i] >> by)
SHORT_BY(_mm_srli_si128, u8, 16, i + by < 16 ? a.u8[i + by] : 0)
N_INLINE uint8_t n_saturated_u8(int16_t x) { return x > 255 ? 255 : x < 0 ? 0 : (uint8_t)x; }
N_INLINE uint16_t n_saturated_u16(int32_t x) { return x > 65535 ? 65535 : x < 0 ? 0 : (uint16_t)x; }
SHORT2(_mm_packus_epi32, u16, 8, n_saturated_u16((i & 4 ? b.i32 : a.i32)[i & 3]))
SHORT2(_mm_packus_epi16, u8, 16, n_saturated_u8((i & 8 ? b.i16 : a.i16)[i & 7]))

#endif
