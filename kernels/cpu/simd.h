/* simd.h: one vector of LANES floats, for both instruction sets, and the elementary functions that the kernels share. Every
 * function works lane by lane. A lane's result depends on its inputs alone, not on its index or on the number of lanes in use,
 * so a tail (v_load_n, v_store_n) has the bits of a full vector. Only v_hsum and v_hmax cross lanes, in one fixed tree.
 * Polynomials are our own least-maximum fits; each function states its error bound. */
#ifndef LLMPY_SIMD_H
#define LLMPY_SIMD_H

#include "vectors.h"
#include <math.h>
#include <stdint.h>
#include <string.h>

#define V_INLINE static inline __attribute__((always_inline))

#ifdef __AVX512F__

#define LANES 16
typedef __m512 vf;   /* LANES floats */
typedef __m512i vi;  /* LANES 32-bit integers */
typedef __mmask16 vm; /* LANES booleans */

V_INLINE vf v_zero(void) { return _mm512_setzero_ps(); }
V_INLINE vf v_set1(float x) { return _mm512_set1_ps(x); }
V_INLINE vf v_load(const float *p) { return _mm512_loadu_ps(p); }
V_INLINE void v_store(float *p, vf x) { _mm512_storeu_ps(p, x); }
V_INLINE vm v_first(uint32_t n) { return (vm)((1u << n) - 1u); } /* the first n lanes, n <= LANES */
V_INLINE vf v_load_n(const float *p, uint32_t n) { return _mm512_maskz_loadu_ps(v_first(n), p); }
V_INLINE void v_store_n(float *p, vf x, uint32_t n) { _mm512_mask_storeu_ps(p, v_first(n), x); }
V_INLINE vf v_add(vf a, vf b) { return _mm512_add_ps(a, b); }
V_INLINE vf v_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
V_INLINE vf v_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
V_INLINE vf v_div(vf a, vf b) { return _mm512_div_ps(a, b); }
V_INLINE vf v_sqrt(vf a) { return _mm512_sqrt_ps(a); }
V_INLINE vf v_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }   /* a * b + c */
V_INLINE vf v_fnma(vf a, vf b, vf c) { return _mm512_fnmadd_ps(a, b, c); } /* c - a * b */
V_INLINE vf v_max(vf a, vf b) { return _mm512_max_ps(a, b); } /* b if a or b is NaN */
V_INLINE vf v_min(vf a, vf b) { return _mm512_min_ps(a, b); }
V_INLINE vf v_abs(vf a) { return _mm512_abs_ps(a); }
V_INLINE vf v_round(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
V_INLINE vi v_bits(vf a) { return _mm512_castps_si512(a); }
V_INLINE vf v_from_bits(vi a) { return _mm512_castsi512_ps(a); }
V_INLINE vm v_lt(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
V_INLINE vm v_le(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ); }
V_INLINE vm v_eq(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
V_INLINE vf v_select(vm m, vf a, vf b) { return _mm512_mask_blend_ps(m, b, a); } /* m ? a : b */
V_INLINE uint32_t v_mask(vm m) { return m; }                                    /* bit i = lane i */
V_INLINE float v_first_lane(vf x) { return _mm512_cvtss_f32(x); }

V_INLINE vi vi_set1(uint32_t x) { return _mm512_set1_epi32((int)x); }
V_INLINE vi vi_lane(void) { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
V_INLINE vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
V_INLINE vi vi_sub(vi a, vi b) { return _mm512_sub_epi32(a, b); }
V_INLINE vi vi_and(vi a, vi b) { return _mm512_and_si512(a, b); }
V_INLINE vi vi_or(vi a, vi b) { return _mm512_or_si512(a, b); }
V_INLINE vi vi_xor(vi a, vi b) { return _mm512_xor_si512(a, b); }
V_INLINE vi vi_shl(vi a, int n) { return _mm512_slli_epi32(a, (unsigned)n); }
V_INLINE vi vi_shr(vi a, int n) { return _mm512_srli_epi32(a, (unsigned)n); }
V_INLINE vi vi_sar(vi a, int n) { return _mm512_srai_epi32(a, (unsigned)n); }
V_INLINE vi vi_mul_lo(vi a, vi b) { return _mm512_mullo_epi32(a, b); }
V_INLINE vi vi_mul_hi(vi a, vi b) /* high 32 bits of the unsigned product */
{
    __m512i even = _mm512_srli_epi64(_mm512_mul_epu32(a, b), 32);
    __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), _mm512_srli_epi64(b, 32));
    return _mm512_mask_blend_epi32(0xAAAA, even, odd);
}
V_INLINE vf v_from_int(vi a) { return _mm512_cvtepi32_ps(a); }
V_INLINE vi v_to_int(vf a) { return _mm512_cvtps_epi32(a); } /* to nearest even */

V_INLINE vf v_load_bf16(const uint16_t *p)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)), 16));
}
V_INLINE vf v_load_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)p)); }
V_INLINE vf v_load_bf16_n(const uint16_t *p, uint32_t n)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(v_first(n), p)), 16));
}
V_INLINE vf v_load_f16_n(const uint16_t *p, uint32_t n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(v_first(n), p)); }
V_INLINE __m256i v_round_bf16(vf x)
{
    __m512i u = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    r = _mm512_mask_or_epi32(r, nan, u, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16));
}
V_INLINE __m256i v_round_f16(vf x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
V_INLINE void v_store_bf16(uint16_t *p, vf x) { _mm256_storeu_si256((void *)p, v_round_bf16(x)); }
V_INLINE vi vi_load_u8(const uint8_t *p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)p)); }
V_INLINE vi vi_load_i8(const int8_t *p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p)); }
V_INLINE void vi_store_u8(uint8_t *p, vi x) { _mm_storeu_si128((void *)p, _mm512_cvtepi32_epi8(x)); } /* of 0 to 255 */
V_INLINE vf v_from_f16(vi bits) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(bits)); }
V_INLINE void v_store_f16(uint16_t *p, vf x) { _mm256_storeu_si256((void *)p, v_round_f16(x)); }
V_INLINE void v_store_bf16_n(uint16_t *p, vf x, uint32_t n) { _mm256_mask_storeu_epi16(p, v_first(n), v_round_bf16(x)); }
V_INLINE void v_store_f16_n(uint16_t *p, vf x, uint32_t n) { _mm256_mask_storeu_epi16(p, v_first(n), v_round_f16(x)); }

/* x * 2^n for integral n; exact except for the rounding of results below the normal range. */
V_INLINE vf v_scale2(vf x, vf n) { return _mm512_scalef_ps(x, n); }

V_INLINE __m256 v_low(vf x) { return _mm512_castps512_ps256(x); }
V_INLINE __m256 v_high(vf x) { return _mm512_extractf32x8_ps(x, 1); }
#define V_FOLD(op, x) op(v_low(x), v_high(x))

#else

#define LANES 8
typedef __m256 vf;
typedef __m256i vi;
typedef __m256 vm;

V_INLINE vf v_zero(void) { return _mm256_setzero_ps(); }
V_INLINE vf v_set1(float x) { return _mm256_set1_ps(x); }
V_INLINE vf v_load(const float *p) { return _mm256_loadu_ps(p); }
V_INLINE void v_store(float *p, vf x) { _mm256_storeu_ps(p, x); }
V_INLINE vm v_first(uint32_t n)
{
    return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)));
}
V_INLINE vf v_load_n(const float *p, uint32_t n) { return _mm256_maskload_ps(p, _mm256_castps_si256(v_first(n))); }
V_INLINE void v_store_n(float *p, vf x, uint32_t n) { _mm256_maskstore_ps(p, _mm256_castps_si256(v_first(n)), x); }
V_INLINE vf v_add(vf a, vf b) { return _mm256_add_ps(a, b); }
V_INLINE vf v_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
V_INLINE vf v_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
V_INLINE vf v_div(vf a, vf b) { return _mm256_div_ps(a, b); }
V_INLINE vf v_sqrt(vf a) { return _mm256_sqrt_ps(a); }
V_INLINE vf v_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
V_INLINE vf v_fnma(vf a, vf b, vf c) { return _mm256_fnmadd_ps(a, b, c); }
V_INLINE vf v_max(vf a, vf b) { return _mm256_max_ps(a, b); }
V_INLINE vf v_min(vf a, vf b) { return _mm256_min_ps(a, b); }
V_INLINE vf v_abs(vf a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
V_INLINE vf v_round(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
V_INLINE vi v_bits(vf a) { return _mm256_castps_si256(a); }
V_INLINE vf v_from_bits(vi a) { return _mm256_castsi256_ps(a); }
V_INLINE vm v_lt(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
V_INLINE vm v_le(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_LE_OQ); }
V_INLINE vm v_eq(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
V_INLINE vf v_select(vm m, vf a, vf b) { return _mm256_blendv_ps(b, a, m); }
V_INLINE uint32_t v_mask(vm m) { return (uint32_t)_mm256_movemask_ps(m); }
V_INLINE float v_first_lane(vf x) { return _mm256_cvtss_f32(x); }

V_INLINE vi vi_set1(uint32_t x) { return _mm256_set1_epi32((int)x); }
V_INLINE vi vi_lane(void) { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
V_INLINE vi vi_add(vi a, vi b) { return _mm256_add_epi32(a, b); }
V_INLINE vi vi_sub(vi a, vi b) { return _mm256_sub_epi32(a, b); }
V_INLINE vi vi_and(vi a, vi b) { return _mm256_and_si256(a, b); }
V_INLINE vi vi_or(vi a, vi b) { return _mm256_or_si256(a, b); }
V_INLINE vi vi_xor(vi a, vi b) { return _mm256_xor_si256(a, b); }
V_INLINE vi vi_shl(vi a, int n) { return _mm256_slli_epi32(a, n); }
V_INLINE vi vi_shr(vi a, int n) { return _mm256_srli_epi32(a, n); }
V_INLINE vi vi_sar(vi a, int n) { return _mm256_srai_epi32(a, n); }
V_INLINE vi vi_mul_lo(vi a, vi b) { return _mm256_mullo_epi32(a, b); }
V_INLINE vi vi_mul_hi(vi a, vi b)
{
    __m256i even = _mm256_srli_epi64(_mm256_mul_epu32(a, b), 32);
    __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), _mm256_srli_epi64(b, 32));
    return _mm256_blend_epi32(even, odd, 0xAA);
}
V_INLINE vf v_from_int(vi a) { return _mm256_cvtepi32_ps(a); }
V_INLINE vi v_to_int(vf a) { return _mm256_cvtps_epi32(a); }

V_INLINE vf v_load_bf16(const uint16_t *p)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p)), 16));
}
V_INLINE vf v_load_f16(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const void *)p)); }
V_INLINE __m128i v_load_half_n(const uint16_t *p, uint32_t n)
{
    uint16_t part[LANES] = {0};
    memcpy(part, p, n * sizeof *p);
    return _mm_loadu_si128((const void *)part);
}
V_INLINE vf v_load_bf16_n(const uint16_t *p, uint32_t n)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v_load_half_n(p, n)), 16));
}
V_INLINE vf v_load_f16_n(const uint16_t *p, uint32_t n) { return _mm256_cvtph_ps(v_load_half_n(p, n)); }
V_INLINE __m128i v_round_bf16(vf x)
{
    __m256i u = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    __m256i r = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
    r = _mm256_blendv_epi8(r, quiet, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
    r = _mm256_srli_epi32(r, 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
}
V_INLINE __m128i v_round_f16(vf x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
V_INLINE void v_store_bf16(uint16_t *p, vf x) { _mm_storeu_si128((void *)p, v_round_bf16(x)); }
V_INLINE __m128i vi_pack_u16(vi x) { return _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)); }
V_INLINE vi vi_load_u8(const uint8_t *p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)p)); }
V_INLINE vi vi_load_i8(const int8_t *p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)p)); }
V_INLINE void vi_store_u8(uint8_t *p, vi x) /* of 0 to 255 */
{
    _mm_storel_epi64((void *)p, _mm_packus_epi16(vi_pack_u16(x), _mm_setzero_si128()));
}
V_INLINE vf v_from_f16(vi bits) { return _mm256_cvtph_ps(vi_pack_u16(bits)); }
V_INLINE void v_store_f16(uint16_t *p, vf x) { _mm_storeu_si128((void *)p, v_round_f16(x)); }
V_INLINE void v_store_bf16_n(uint16_t *p, vf x, uint32_t n)
{
    __m128i r = v_round_bf16(x);
    memcpy(p, &r, n * sizeof *p);
}
V_INLINE void v_store_f16_n(uint16_t *p, vf x, uint32_t n)
{
    __m128i r = v_round_f16(x);
    memcpy(p, &r, n * sizeof *p);
}

V_INLINE vf v_power2(__m256i n)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
V_INLINE vf v_scale2(vf x, vf n) /* in two steps, so that |n| up to 250 works and a tiny result is rounded once */
{
    __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1);
    return _mm256_mul_ps(_mm256_mul_ps(x, v_power2(half)), v_power2(_mm256_sub_epi32(whole, half)));
}

#define V_FOLD(op, x) (x)

#endif

V_INLINE vf v_neg(vf a) { return v_from_bits(vi_xor(v_bits(a), vi_set1(0x80000000u))); }

V_INLINE vf v_load_i8(const int8_t *p) { return v_from_int(vi_load_i8(p)); }
/* e4m3. Its bits moved to float16 are the value times 2^-8, also if it is subnormal; 0x7f is NaN. */
V_INLINE vf v_load_e4m3(const uint8_t *p)
{
    vi bits = vi_load_u8(p), magnitude = vi_and(bits, vi_set1(0x7f));
    vf x = v_mul(v_from_f16(vi_or(vi_shl(magnitude, 7), vi_shl(vi_and(bits, vi_set1(0x80)), 8))), v_set1(256));
    return v_select(v_lt(v_set1(126.5f), v_from_int(magnitude)), v_set1(NAN), x);
}
/* Rounds to e4m3, to nearest even and to at most 448; NaN stays. */
V_INLINE void v_store_e4m3(uint8_t *p, vf x)
{
    vf size = v_min(v_set1(448), v_abs(x)); /* NaN if x is */
    vi u = v_bits(size), odd = vi_and(vi_shr(u, 20), vi_set1(1));
    vi normal = vi_sub(vi_shr(vi_add(u, vi_add(odd, vi_set1(0x7ffff))), 20), vi_set1(120 << 3));
    vi small = v_to_int(v_mul(size, v_set1(512))), sign = vi_and(vi_shr(v_bits(x), 24), vi_set1(0x80));
    vf chosen = v_select(v_lt(size, v_set1(0x1p-6f)), v_from_bits(small), v_from_bits(normal));
    chosen = v_select(v_eq(x, x), chosen, v_from_bits(vi_set1(0x7f)));
    vi_store_u8(p, vi_or(v_bits(chosen), sign));
}
/* Rounds to integers of at most 127, to nearest even. */
V_INLINE void v_store_i8(int8_t *p, vf x)
{
    vi whole = v_to_int(v_max(v_min(x, v_set1(127)), v_set1(-127)));
    vi_store_u8((uint8_t *)p, vi_and(whole, vi_set1(0xff)));
}

/* Sum and maximum of all lanes: first lanes i and i + LANES / 2, then halves of the result, down to one. */
V_INLINE float v_hsum(vf x)
{
    __m256 a = V_FOLD(_mm256_add_ps, x);
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
V_INLINE float v_hmax(vf x)
{
    __m256 a = V_FOLD(_mm256_max_ps, x);
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}

/* Sum of a[i] b[i]: four chains of LANES columns each, then ((0 + 1) + (2 + 3)), then v_hsum's tree. */
V_INLINE float v_dot(const float *a, const float *b, uint32_t n)
{
    vf sum[4] = {v_zero(), v_zero(), v_zero(), v_zero()};
    uint32_t i = 0, j = 0;
    for (; i + LANES <= n; i += LANES, j = (j + 1) % 4)
        sum[j] = v_fma(v_load(a + i), v_load(b + i), sum[j]);
    if (i < n)
        sum[j] = v_fma(v_load_n(a + i, n - i), v_load_n(b + i, n - i), sum[j]);
    return v_hsum(v_add(v_add(sum[0], sum[1]), v_add(sum[2], sum[3])));
}

/* 2^x within 1 ulp: 2^n (1 + r q(r)), n = round(x), |r| <= 1/2. 2^0 = 1 and 2^-inf = 0 exactly, 2^128 and above = inf, NaN
 * stays; the result below the normal range is rounded once. */
V_INLINE vf v_exp2(vf x)
{
    x = v_min(v_set1(129.0f), v_max(v_set1(-151.0f), x));
    vf n = v_round(x), r = v_sub(x, n);
    vf q = v_set1(0x1.41fb2cp-13f);
    q = v_fma(q, r, v_set1(0x1.5f3f32p-10f));
    q = v_fma(q, r, v_set1(0x1.3b2d50p-7f));
    q = v_fma(q, r, v_set1(0x1.c6aee6p-5f));
    q = v_fma(q, r, v_set1(0x1.ebfbdcp-3f));
    q = v_fma(q, r, v_set1(0x1.62e430p-1f));
    return v_scale2(v_fma(q, r, v_set1(1.0f)), n);
}

/* e^x within 1.1 ulp: 2^n (1 + (r + r^2 q(r))), r = x - n ln 2. e^0 = 1 and e^-inf = 0 exactly, above 88.73 inf, NaN stays. */
V_INLINE vf v_exp(vf x)
{
    x = v_min(v_set1(90.0f), v_max(v_set1(-105.0f), x));
    vf n = v_round(v_mul(x, v_set1(0x1.715476p+0f)));
    vf r = v_fnma(n, v_set1(0x1.62e400p-1f), x); /* ln 2 in two parts: the product with the first is exact */
    r = v_fnma(n, v_set1(0x1.7f7d1cp-20f), r);
    vf q = v_set1(0x1.6a234ep-10f);
    q = v_fma(q, r, v_set1(0x1.123a6cp-7f));
    q = v_fma(q, r, v_set1(0x1.5558f4p-5f));
    q = v_fma(q, r, v_set1(0x1.555490p-3f));
    q = v_fma(q, r, v_set1(0x1.fffffcp-2f));
    return v_scale2(v_add(v_fma(v_mul(r, r), q, r), v_set1(1.0f)), n);
}

/* Natural logarithm of a positive normal number, within 1 ulp: n ln 2 + log1p(f), x = 2^n (1 + f), sqrt(1/2) <= 1 + f. */
V_INLINE vf v_log(vf x)
{
    vi shifted = vi_sub(v_bits(x), vi_set1(0x3f3504f3u)); /* sqrt(1/2) */
    vf n = v_from_int(vi_sar(shifted, 23));
    vf f = v_sub(v_from_bits(vi_sub(v_bits(x), vi_and(shifted, vi_set1(0xff800000u)))), v_set1(1.0f));
    vf q = v_set1(0x1.1462aep-4f);
    q = v_fma(q, f, v_set1(-0x1.de4f84p-4f));
    q = v_fma(q, f, v_set1(0x1.e6f626p-4f));
    q = v_fma(q, f, v_set1(-0x1.fc1f72p-4f));
    q = v_fma(q, f, v_set1(0x1.2336e0p-3f));
    q = v_fma(q, f, v_set1(-0x1.555c5ap-3f));
    q = v_fma(q, f, v_set1(0x1.99a4bcp-3f));
    q = v_fma(q, f, v_set1(-0x1.000006p-2f));
    q = v_fma(q, f, v_set1(0x1.555548p-2f));
    vf square = v_mul(f, f);
    vf low = v_fma(v_mul(square, f), q, v_mul(n, v_set1(0x1.7f7d1cp-20f)));
    low = v_fma(square, v_set1(-0.5f), low);
    return v_fma(n, v_set1(0x1.62e400p-1f), v_add(f, low));
}

/* tanh within 1.5 ulp: x (1 + x^2 q(x^2)) below 0.625, else 1 - 2 / (e^2|x| + 1) with the sign of x; NaN stays. */
V_INLINE vf v_tanh(vf x)
{
    vf size = v_abs(x), square = v_mul(x, x);
    vf q = v_set1(-0x1.75d774p-8f);
    q = v_fma(q, square, v_set1(0x1.522460p-6f));
    q = v_fma(q, square, v_set1(-0x1.b83c06p-5f));
    q = v_fma(q, square, v_set1(0x1.110724p-3f));
    q = v_fma(q, square, v_set1(-0x1.555532p-2f));
    vf near = v_fma(v_mul(x, square), q, x);
    vf far = v_sub(v_set1(1.0f), v_div(v_set1(2.0f), v_add(v_exp(v_add(size, size)), v_set1(1.0f))));
    vi sign = vi_and(v_bits(x), vi_set1(0x80000000u));
    return v_select(v_lt(size, v_set1(0.625f)), near, v_from_bits(vi_or(v_bits(far), sign)));
}

#endif
