/* linear_quants_avx2.h: layout of quantised weights in AVX2 panels, lossless and as small as in the file. A block is n_subs
 * pieces ("subs") of 32 columns, then the scales of its 16 rows. In a sub the unsigned weights q of 4 columns (a quad: columns
 * 4Q .. 4Q + 3, Q = 0..7) of one row share a dword, low column in the low byte; rows 0..7 and 8..15 are the two halves, a
 * vector each. Planes of a sub:
 *   nibbles  4 x 64 bytes  quads Q | Q + 4 << 4
 *   2 bits   2 x 64 bytes  quad Q in plane Q % 2, bit 2 (Q / 2)
 *   1 bit    64 bytes      quad Q in bit Q
 * A weight is (q - offset) * scale + addend, where K types scale every 16 or 32 columns by a small integer. Scale and addend
 * of K types are exact products of a float16 and that integer. */
#ifndef LLMPY_LINEAR_QUANTS_AVX2_H
#define LLMPY_LINEAR_QUANTS_AVX2_H

#include "linear_avx2.h"

#define NIBBLE_PLANE 256u
#define TWO_BIT_PLANE 128u
#define ONE_BIT_PLANE 64u

/* The scales of one sub, by half. For types with integer scales for each 16 columns: sc[h] and mins as pairs of int16 in a
 * dword. */
struct sub_scales {
    __m256 scale[2], addend[2];
    __m256i sc[2][2]; /* [columns 16h ..][half]: (s, s) */
    __m256i mins[2];  /* [half]: (minimum of columns 0..15, of 16..31) */
};

/* One type's parameters for the templates, all known at compile time. */
struct quant {
    uint32_t n_subs, sub_bytes, block_bytes; /* of the panel */
    uint32_t offset;
    bool has_addend;  /* scale * q + addend */
    bool has_sc;      /* integer scales for each 16 columns; with has_addend also integer minimums, times addend */
    __m256i (*quad)(const uint8_t *sub, uint32_t q, uint32_t half);
    void (*scales)(const uint8_t *block, uint32_t sub, struct sub_scales *s);
};

/* ---- quads: 32 bytes = 4 columns of 8 rows ---- */

V_INLINE __m256i bytes_and(__m256i v, int mask)
{
    return _mm256_and_si256(v, _mm256_set1_epi8((char)mask));
}

/* Moves bit `from` of every byte to bit `to`, and the neighbouring bits with it; the caller masks the result. */
V_INLINE __m256i shift_bits(__m256i v, const uint32_t from, const uint32_t to)
{
    if (from > to)
        return _mm256_srli_epi16(v, (int)(from - to));
    return to > from ? _mm256_slli_epi16(v, (int)(to - from)) : v;
}

V_INLINE __m256i nibble_quad(const uint8_t *sub, uint32_t q, uint32_t half)
{
    return bytes_and(shift_bits(load_256(sub + 64 * (q & 3) + 32 * half), q & 4, 0), 15);
}

V_INLINE __m256i two_bit_quad(const uint8_t *plane, uint32_t q, uint32_t half, uint32_t to)
{
    return bytes_and(shift_bits(load_256(plane + 64 * (q & 1) + 32 * half), q / 2 * 2, to), 3 << to);
}

V_INLINE __m256i one_bit_quad(const uint8_t *plane, uint32_t q, uint32_t half, uint32_t to)
{
    return bytes_and(shift_bits(load_256(plane + 32 * half), q, to), 1 << to);
}

V_INLINE __m256i q5_quad(const uint8_t *sub, uint32_t q, uint32_t half)
{
    return _mm256_or_si256(nibble_quad(sub, q, half), one_bit_quad(sub + NIBBLE_PLANE, q, half, 4));
}

V_INLINE __m256i q6_quad(const uint8_t *sub, uint32_t q, uint32_t half)
{
    return _mm256_or_si256(nibble_quad(sub, q, half), two_bit_quad(sub + NIBBLE_PLANE, q, half, 4));
}

V_INLINE __m256i q2_quad(const uint8_t *sub, uint32_t q, uint32_t half)
{
    return two_bit_quad(sub, q, half, 0);
}

V_INLINE __m256i q3_quad(const uint8_t *sub, uint32_t q, uint32_t half)
{
    return _mm256_or_si256(two_bit_quad(sub, q, half, 0), one_bit_quad(sub + TWO_BIT_PLANE, q, half, 2));
}

/* Groups of 8 bits: columns 2 * pair and the next of 8 rows of a sub as pairs of int16. */
V_INLINE __m256i group_pair(const uint8_t *sub, uint32_t pair, uint32_t half)
{
    const char b = (char)(pair % 2 * 2);
    const __m256i places = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(-1, b, -1, (char)(b + 1), -1, (char)(b + 4), -1, (char)(b + 5), -1, (char)(b + 8), -1, (char)(b + 9), -1,
                      (char)(b + 12), -1, (char)(b + 13)));
    return _mm256_srai_epi16(_mm256_shuffle_epi8(load_256(sub + 64 * (pair / 2) + 32 * half), places), 8);
}

/* ---- scales; p: start of the block's scales ---- */

V_INLINE void halves_of(const uint8_t *p, __m256 *v)
{
    v[0] = load_halves(p);
    v[1] = load_halves(p + 16);
}

V_INLINE __m256i half_bytes(__m128i bytes, uint32_t half)
{
    return _mm256_cvtepu8_epi32(half ? _mm_srli_si128(bytes, 8) : bytes);
}

V_INLINE void d_scales(const uint8_t *p, struct sub_scales *s)
{
    halves_of(p, s->scale);
}

V_INLINE void d_m_scales(const uint8_t *p, struct sub_scales *s)
{
    halves_of(p, s->scale);
    halves_of(p + 32, s->addend);
}

V_INLINE __m128i load_16(const uint8_t *p)
{
    return _mm_load_si128((const void *)p);
}

V_INLINE __m128i and_16(__m128i v, int mask)
{
    return _mm_and_si128(v, _mm_set1_epi8((char)mask));
}

/* Q4_K, Q5_K: [12][16 rows] packed 6-bit scales and minimums, d[16], dmin[16] */
V_INLINE void k_scales(const uint8_t *p, uint32_t sub, struct sub_scales *s)
{
    __m128i scale, minimum;
    if (sub < 4) {
        scale = and_16(load_16(p + 16 * sub), 63);
        minimum = and_16(load_16(p + 16 * (sub + 4)), 63);
    } else {
        __m128i low = load_16(p + 16 * (sub + 4));
        scale = _mm_or_si128(and_16(low, 15), and_16(_mm_srli_epi16(load_16(p + 16 * (sub - 4)), 2), 48));
        minimum = _mm_or_si128(and_16(_mm_srli_epi16(low, 4), 15), and_16(_mm_srli_epi16(load_16(p + 16 * sub), 2), 48));
    }
    __m256 d[2], dmin[2];
    halves_of(p + 192, d);
    halves_of(p + 224, dmin);
    UNROLL for (uint32_t half = 0; half < 2; half++) {
        s->scale[half] = _mm256_mul_ps(d[half], _mm256_cvtepi32_ps(half_bytes(scale, half)));
        __m256 product = _mm256_mul_ps(dmin[half], _mm256_cvtepi32_ps(half_bytes(minimum, half)));
        s->addend[half] = _mm256_xor_ps(product, _mm256_set1_ps(-0.0f));
    }
}

/* dword r = (a_r, b_r) as int16, rows of one half */
V_INLINE __m256i byte_pairs(__m128i a, __m128i b, uint32_t half)
{
    return _mm256_cvtepi8_epi16(half ? _mm_unpackhi_epi8(a, b) : _mm_unpacklo_epi8(a, b));
}

/* Q6_K: [16][16 rows] int8, d[16] */
V_INLINE void q6_k_scales(const uint8_t *p, uint32_t sub, struct sub_scales *s)
{
    UNROLL for (uint32_t h = 0; h < 2; h++) {
        __m128i sc = load_16(p + 16 * (2 * sub + h));
        s->sc[h][0] = byte_pairs(sc, sc, 0);
        s->sc[h][1] = byte_pairs(sc, sc, 1);
    }
    halves_of(p + 256, s->scale);
}

/* Q3_K: [12][16 rows] packed 6-bit scales plus 32, d[16] */
V_INLINE void q3_k_scales(const uint8_t *p, uint32_t sub, struct sub_scales *s)
{
    UNROLL for (uint32_t h = 0; h < 2; h++) {
        uint32_t j = 2 * sub + h;
        __m128i low = load_16(p + 16 * (j & 7)), high = load_16(p + 16 * (8 + j % 4));
        low = and_16(j < 8 ? low : _mm_srli_epi16(low, 4), 15);
        high = and_16(_mm_srl_epi16(high, _mm_cvtsi32_si128((int)(j / 4 * 2))), 3);
        __m128i sc = _mm_sub_epi8(_mm_or_si128(low, _mm_slli_epi16(high, 4)), _mm_set1_epi8(32));
        s->sc[h][0] = byte_pairs(sc, sc, 0);
        s->sc[h][1] = byte_pairs(sc, sc, 1);
    }
    halves_of(p + 192, s->scale);
}

/* Q2_K: [16][16 rows] scale | minimum << 4, d[16], dmin[16] */
V_INLINE void q2_k_scales(const uint8_t *p, uint32_t sub, struct sub_scales *s)
{
    __m128i sc[2], minimum[2];
    __m256 dmin[2];
    UNROLL for (uint32_t h = 0; h < 2; h++) {
        __m128i packed = load_16(p + 32 * sub + 16 * h);
        sc[h] = and_16(packed, 15);
        minimum[h] = and_16(_mm_srli_epi16(packed, 4), 15);
    }
    halves_of(p + 256, s->scale);
    halves_of(p + 288, dmin);
    UNROLL for (uint32_t half = 0; half < 2; half++) {
        s->sc[0][half] = byte_pairs(sc[0], sc[0], half);
        s->sc[1][half] = byte_pairs(sc[1], sc[1], half);
        s->mins[half] = byte_pairs(minimum[0], minimum[1], half);
        s->addend[half] = _mm256_xor_ps(dmin[half], _mm256_set1_ps(-0.0f));
    }
}

/* Groups (linear_group.h) of 4 bits: [16 rows] float32 scale, its lowest byte the zero */
V_INLINE void group_scales(const uint8_t *p, struct sub_scales *s)
{
    UNROLL for (uint32_t half = 0; half < 2; half++) {
        __m256i both = load_256(p + 32 * half), low = _mm256_set1_epi32(255);
        __m256i minus_zero = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_and_si256(low, both));
        s->scale[half] = _mm256_castsi256_ps(_mm256_andnot_si256(low, both));
        s->addend[half] = _mm256_mul_ps(s->scale[half], _mm256_cvtepi32_ps(minus_zero));
    }
}

/* ---- the types ---- */

#define QUANT(type, subs, bytes_of_sub, bytes_of_scales, off, addend, sc, quad_function, read_scales)                          \
    V_INLINE void type##_sub_scales(const uint8_t *block, uint32_t sub, struct sub_scales *s)                                  \
    {                                                                                                                          \
        const uint8_t *p = block + (subs) * (bytes_of_sub);                                                                    \
        (void)sub;                                                                                                             \
        read_scales;                                                                                                           \
    }                                                                                                                          \
    static const struct quant type = {subs,   bytes_of_sub, (subs) * (bytes_of_sub) + (bytes_of_scales), off, addend, sc,      \
                                      quad_function, type##_sub_scales}

QUANT(q4_0, 1, NIBBLE_PLANE, 32, 8, false, false, nibble_quad, d_scales(p, s));
QUANT(q4_1, 1, NIBBLE_PLANE, 64, 0, true, false, nibble_quad, d_m_scales(p, s));
QUANT(q5_0, 1, NIBBLE_PLANE + ONE_BIT_PLANE, 32, 16, false, false, q5_quad, d_scales(p, s));
QUANT(q5_1, 1, NIBBLE_PLANE + ONE_BIT_PLANE, 64, 0, true, false, q5_quad, d_m_scales(p, s));
QUANT(q4_k, 8, NIBBLE_PLANE, 256, 0, true, false, nibble_quad, k_scales(p, sub, s));
QUANT(q5_k, 8, NIBBLE_PLANE + ONE_BIT_PLANE, 256, 0, true, false, q5_quad, k_scales(p, sub, s));
QUANT(q6_k, 8, NIBBLE_PLANE + TWO_BIT_PLANE, 288, 32, false, true, q6_quad, q6_k_scales(p, sub, s));
QUANT(q3_k, 8, TWO_BIT_PLANE + ONE_BIT_PLANE, 224, 4, false, true, q3_quad, q3_k_scales(p, sub, s));
QUANT(int4_g128, 4, NIBBLE_PLANE, 64, 0, true, false, nibble_quad, group_scales(p, s));
QUANT(int4_g32, 1, NIBBLE_PLANE, 64, 0, true, false, nibble_quad, group_scales(p, s));
QUANT(q2_k, 8, TWO_BIT_PLANE, 320, 0, true, true, q2_quad, q2_k_scales(p, sub, s));

#define EACH_QUANT(X) X(q4_0) X(q4_1) X(q5_0) X(q5_1) X(q4_k) X(q5_k) X(q6_k) X(q3_k) X(q2_k)

#define EACH_INT4_GROUP(X) X(int4_g128) X(int4_g32)
#define EACH_INT8_GROUP(X) X(int8_g128) X(int8_g32)

/* The expanded form of a sub that the tiles of linear_int8_avx2.c read: bytes q of quad Q at 64 Q + 32 half, then dwords of
 * the 16 rows. */
#define EXPANDED_SCALE 512u
#define EXPANDED_ADDEND 576u
#define EXPANDED_SC 640u /* columns 0..15, then 16..31 */
#define EXPANDED_MINS 768u
#define EXPANDED_SUB_BYTES 832u
/* The same of types of linear_rows_avx2.h: [16 pairs of columns][16 rows][2] int16, then the 16 rows' scales. */
#define WORDS_SCALE 1024u
#define WORDS_SUB_BYTES 1088u

/* In linear_layout_avx2.c. The layout of Q8_0: 16 float16 d, then [16 pairs of k][16 rows][2] int8. */
#define LAYOUT(type)                                                                                                           \
    linear_repack linear_##type##_repack_avx2;                                                                                 \
    linear_unpack linear_##type##_unpack_avx2;                                                                                 \
    linear_expand linear_##type##_values_avx2;                                                                                 \
    extern const struct linear_type linear_##type##_float_avx2, linear_##type##_int8_avx2;
#define EXPAND(type) linear_expand linear_##type##_expand_avx2;
EACH_QUANT(LAYOUT)
EACH_QUANT(EXPAND)
EACH_INT4_GROUP(EXPAND)
EACH_INT8_GROUP(EXPAND) /* linear_group_avx2.c */
LAYOUT(q8_0)
EACH_ROW_TYPE(LAYOUT) /* linear_iq_avx2.c */
EACH_ROW_TYPE(EXPAND)
linear_repack linear_mxfp4_repack_avx2; /* linear_mxfp4_avx2.c */
linear_unpack linear_mxfp4_unpack_avx2;
linear_expand linear_mxfp4_values_avx2;
linear_gemv linear_mxfp4_gemv_avx2;
extern const struct linear_type linear_mxfp4_float_avx2;
linear_repack linear_fp8_repack_avx2; /* linear_fp8_avx2.c */
linear_unpack linear_fp8_unpack_avx2;
linear_expand linear_fp8_values_avx2;
linear_gemv linear_fp8_gemv_avx2;
extern const struct linear_type linear_fp8_float_avx2;
#define TABLE_DECLARE(type) /* linear_table_avx2.c; no gemv of table4 */                                                       \
    linear_repack linear_##type##_repack_avx2;                                                                                 \
    linear_unpack linear_##type##_unpack_avx2;                                                                                 \
    linear_expand linear_##type##_values_avx2;                                                                                 \
    linear_gemv linear_##type##_gemv_avx2;                                                                                     \
    extern const struct linear_type linear_##type##_float_avx2;
EACH_TABLE_TYPE(TABLE_DECLARE)
#undef TABLE_DECLARE
#undef LAYOUT
#undef EXPAND

#endif
