/* linear_quants_avx512.h: layout of quantised weights in AVX-512 panels, and the loads that unpack them. 32 columns of a panel
 * are a block of 8 quads: vector p of 64 bytes = column 4p + j of row r in byte 4r + j. Weights are unsigned, value = scale *
 * (u - offset) [+ minimum], and cut into bit planes that lie one after the other:
 *   8 bits: 8 vectors, a quad each (Q8_0: the stored int8 + 128)
 *   4 bits: 4 vectors, quad p in the low and quad p + 4 in the high nibbles
 *   2 bits: 2 vectors, quads 0..3 and 4..7, quad p in bits 2 * (p % 4) and up
 *   1 bit:  1 vector, quad p in bit p
 * Q5_* have 4 + 1, Q6_K 4 + 2, Q3_K 2 + 1 bits. Then follow the scales as in the file, per row:
 *   32-blocks   one float16, and one float16 minimum if the type has one
 *   Q6_K, Q3_K  2 x int8
 *   Q4_K, Q5_K  6-bit scale, 6-bit minimum
 *   Q2_K        2 x (scale | minimum << 4)
 *   IQ4_XS      int8, a byte unused
 * Eight blocks of a K type make a super-block, which ends with its float16 d (and dmin). All-zero bytes are zero weights.
 * Groups have the layout of linear_group.h: blocks without scales, of signed bytes at 8 bits, then the group's scales. */
#ifndef LLMPY_LINEAR_QUANTS_AVX512_H
#define LLMPY_LINEAR_QUANTS_AVX512_H

#include "linear_avx512.h"
#include "linear_group.h"

enum form {
    Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL,     /* blocks of 32 */
    Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS,     /* K types */
    INT4_G128, INT4_G32, INT8_G128, INT8_G32, /* groups */
};

/* Constant expressions of a form, for tables too. */
#define FORM_IS_GROUP(f) ((f) >= INT4_G128)
#define FORM_IS_K(f) ((f) >= Q2_K && !FORM_IS_GROUP(f))
#define FORM_IS_INT4(f) ((f) == INT4_G128 || (f) == INT4_G32)
#define FORM_IS_INT8(f) ((f) == INT8_G128 || (f) == INT8_G32)
#define FORM_HAS_MIN(f) ((f) == Q4_1 || (f) == Q5_1 || (f) == Q2_K || (f) == Q4_K || (f) == Q5_K || FORM_IS_INT4(f))
#define FORM_SCALES(f) ((f) == Q2_K || (f) == Q3_K || (f) == Q6_K ? 2 : 1) /* of a block of 32 */
#define FORM_IS_IQ4(f) ((f) == IQ4_NL || (f) == IQ4_XS) /* 4 bits select one of 16 levels */
#define FORM_OFFSET(f)                                                                                                         \
    ((f) == Q8_0 || FORM_IS_INT8(f) || FORM_IS_IQ4(f) ? 128                                                                    \
     : (f) == Q4_0                                    ? 8                                                                      \
     : (f) == Q5_0                                    ? 16                                                                     \
     : (f) == Q6_K                                    ? 32                                                                     \
     : (f) == Q3_K                                    ? 4                                                                      \
                                                      : 0)
#define FORM_BITS(f)                                                                                                           \
    ((f) == Q8_0 || FORM_IS_INT8(f)                  ? 8                                                                       \
     : (f) == Q6_K                                   ? 6                                                                       \
     : (f) == Q5_0 || (f) == Q5_1 || (f) == Q5_K     ? 5                                                                       \
     : (f) == Q3_K                                   ? 3                                                                       \
     : (f) == Q2_K                                   ? 2                                                                       \
                                                     : 4)
#define FORM_BLOCKS(f) /* blocks of 32 in a block of the type */                                                               \
    (FORM_IS_K(f) ? 8 : (f) == INT4_G128 || (f) == INT8_G128 ? 4 : 1)
#define FORM_WEIGHT_BYTES(f) (64 * FORM_BITS(f)) /* of a block of 32 x 16 */
#define FORM_BLOCK_BYTES(f) /* with its scales */                                                                              \
    (FORM_WEIGHT_BYTES(f) + (FORM_IS_GROUP(f) ? 0 : FORM_HAS_MIN(f) && !FORM_IS_K(f) ? 64 : 32))
#define FORM_TAIL_BYTES(f) (FORM_IS_GROUP(f) ? 64 : !FORM_IS_K(f) ? 0 : FORM_HAS_MIN(f) ? 64 : 32)
#define FORM_BYTES(f) (FORM_BLOCKS(f) * FORM_BLOCK_BYTES(f) + FORM_TAIL_BYTES(f))
#define FORM_STRIP_BYTES(f) (36 + 4 * FORM_SCALES(f)) /* of one prepared row, 32 columns */

INLINE __m512i quad_nibble(const uint8_t *w, const int p)
{
    __m512i v = _mm512_loadu_si512(w + 64 * (p % 4));
    return _mm512_and_si512(p < 4 ? v : _mm512_srli_epi16(v, 4), _mm512_set1_epi8(15));
}

/* Moves the bits at `from` of every byte to `to`, and the neighbouring bits with them; the caller masks the result. */
INLINE __m512i shift_bits(__m512i v, const int from, const int to)
{
    return from > to   ? _mm512_srli_epi16(v, (unsigned)(from - to))
           : to > from ? _mm512_slli_epi16(v, (unsigned)(to - from))
                       : v;
}

/* low | (bits & mask) */
INLINE __m512i merge_bits(__m512i low, __m512i bits, const int mask)
{
    return _mm512_ternarylogic_epi32(low, bits, _mm512_set1_epi8((char)mask), 0xf8);
}

/* The levels of IQ4 plus 128. */
INLINE __m512i iq4_levels(__m512i index)
{
    const __m128i levels = _mm_setr_epi8(1, 24, 45, 63, 79, 93, 106, 118, -127, -115, -103, -90, -75, -59, -39, -15);
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(levels), index);
}

/* Quad p of a block as unsigned bytes. */
INLINE __m512i form_quad(const uint8_t *w, const int p, const enum form f)
{
    switch (f) {
    case Q8_0:
        return _mm512_loadu_si512(w + 64 * p);
    case INT8_G128:
    case INT8_G32:
        return _mm512_xor_si512(_mm512_loadu_si512(w + 64 * p), _mm512_set1_epi8(-128));
    case Q4_0:
    case Q4_1:
    case Q4_K:
    case INT4_G128:
    case INT4_G32:
        return quad_nibble(w, p);
    case IQ4_NL:
    case IQ4_XS:
        return iq4_levels(quad_nibble(w, p));
    case Q5_0:
    case Q5_1:
    case Q5_K:
        return merge_bits(quad_nibble(w, p), shift_bits(_mm512_loadu_si512(w + 256), p, 4), 0x10);
    case Q6_K:
        return merge_bits(quad_nibble(w, p), shift_bits(_mm512_loadu_si512(w + 256 + 64 * (p / 4)), 2 * (p % 4), 4), 0x30);
    default: {
        __m512i low = _mm512_and_si512(shift_bits(_mm512_loadu_si512(w + 64 * (p / 4)), 2 * (p % 4), 0), _mm512_set1_epi8(3));
        return f == Q2_K ? low : merge_bits(low, shift_bits(_mm512_loadu_si512(w + 128), p, 2), 4);
    }
    }
}

INLINE __m512 load_half(const uint8_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)p));
}
INLINE __m512i load_bytes(const uint8_t *p)
{
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)p));
}

/* The scales of a group. At 4 bits their lowest byte is the zero. */
INLINE __m512 group_scale(const uint8_t *dwords, const enum form f)
{
    return _mm512_castsi512_ps(_mm512_andnot_si512(_mm512_set1_epi32(FORM_IS_INT4(f) ? 255 : 0), _mm512_loadu_si512(dwords)));
}

/* Scale s of the 16 rows of a block: exact products. tail: the super-block's d and dmin, or the group's scales. */
INLINE __m512 form_scale(const uint8_t *w, const uint8_t *tail, const int s, const enum form f)
{
    const uint8_t *scales = w + FORM_WEIGHT_BYTES(f);
    if (FORM_IS_GROUP(f))
        return group_scale(tail, f);
    if (!FORM_IS_K(f))
        return load_half(scales);
    __m512i integer = load_bytes(scales + 16 * s);
    if (f == Q6_K || f == Q3_K || f == IQ4_XS)
        integer = _mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)(scales + 16 * s)));
    if (f == Q2_K)
        integer = _mm512_and_si512(integer, _mm512_set1_epi32(15));
    return _mm512_mul_ps(_mm512_cvtepi32_ps(integer), load_half(tail));
}

/* The minimum that is added to every weight of scale s; of groups -zero * scale. */
INLINE __m512 form_min(const uint8_t *w, const uint8_t *tail, const int s, const enum form f)
{
    const uint8_t *scales = w + FORM_WEIGHT_BYTES(f);
    if (FORM_IS_GROUP(f)) {
        __m512i zero = _mm512_and_si512(_mm512_loadu_si512(tail), _mm512_set1_epi32(255));
        return _mm512_mul_ps(group_scale(tail, f), _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_setzero_si512(), zero)));
    }
    if (!FORM_IS_K(f))
        return load_half(scales + 32);
    __m512i integer = f == Q2_K ? _mm512_srli_epi32(load_bytes(scales + 16 * s), 4) : load_bytes(scales + 16);
    return _mm512_mul_ps(_mm512_cvtepi32_ps(integer), _mm512_xor_ps(load_half(tail + 32), _mm512_set1_ps(-0.0f)));
}

/* linear_quants_avx512.c */
#define DECLARE_FORM(NAME)                                                                                                     \
    linear_repack NAME##_avx512_repack;                                                                                        \
    linear_unpack NAME##_avx512_unpack;                                                                                        \
    extern const struct linear_type linear_##NAME##_float_avx512, linear_##NAME##_int8_avx512
DECLARE_FORM(q8_0);
DECLARE_FORM(q4_0);
DECLARE_FORM(q4_1);
DECLARE_FORM(q5_0);
DECLARE_FORM(q5_1);
DECLARE_FORM(q2_k);
DECLARE_FORM(q3_k);
DECLARE_FORM(q4_k);
DECLARE_FORM(q5_k);
DECLARE_FORM(q6_k);
DECLARE_FORM(iq4_nl);
DECLARE_FORM(iq4_xs);

#endif
