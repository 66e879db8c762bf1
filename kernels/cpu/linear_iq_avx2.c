/* GGUF's IQ and TQ weights: how 32 columns of one row are read from a block (linear_rows_avx2.h has the rest, dtype.c the
 * definition of the values). Numbers are found by byte shuffles: 4-bit indices of IQ4 select one of 16 levels; an entry of a
 * grid (iq_grids.def) is spread into bytes of 2 or 4 bits, which select a level. Half units and eighths of the formats go into
 * the scale d, so that s and q are integers. */
#include "linear_rows_avx2.h"

#include "../../csrc/base/iq_grids.h"

V_INLINE uint32_t load_u32(const uint8_t *p)
{
    uint32_t v;
    memcpy(&v, p, 4);
    return v;
}

V_INLINE uint32_t load_u16(const uint8_t *p)
{
    return (uint32_t)(p[0] | p[1] << 8);
}

V_INLINE __m256i both_lanes(__m128i v)
{
    return _mm256_broadcastsi128_si256(v);
}

/* ---- IQ4 ---- */

V_INLINE __m256i iq4_numbers(const uint8_t *qs)
{
    const __m128i levels = _mm_setr_epi8(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113);
    __m128i bytes = _mm_loadu_si128((const void *)qs);
    __m256i index = _mm256_set_m128i(_mm_srli_epi16(bytes, 4), bytes);
    return _mm256_shuffle_epi8(both_lanes(levels), bytes_and(index, 15));
}

V_INLINE struct row_sub iq4_nl_row(const uint8_t *b, uint32_t sub)
{
    (void)sub;
    return (struct row_sub){iq4_numbers(b + 2), half_float(b), {1, 1}};
}

V_INLINE struct row_sub iq4_xs_row(const uint8_t *b, uint32_t sub)
{
    uint32_t low = b[4 + sub / 2] >> (4 * (sub % 2)) & 15, high = load_u16(b + 2) >> (2 * sub) & 3;
    float s = (float)((int)(low | high << 4) - 32);
    return (struct row_sub){iq4_numbers(b + 8 + 16 * sub), half_float(b), {s, s}};
}

/* ---- signs: bit k negates column k ---- */

V_INLINE __m256i negate(__m256i q, uint32_t signs)
{
    const __m256i byte_of = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3,
                                             3, 3, 3, 3);
    const __m256i bit_of = _mm256_set1_epi64x((long long)0x8040201008040201);
    __m256i bits = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32((int)signs), byte_of), bit_of);
    __m256i is_negative = _mm256_cmpeq_epi8(bits, bit_of);
    return _mm256_sub_epi8(_mm256_xor_si256(q, is_negative), is_negative);
}

/* Four bytes, each of 7 bits and an eighth that makes the number of set bits even. sevens: the bytes with bit 7 clear. */
V_INLINE uint32_t even_signs(uint32_t sevens)
{
    uint32_t parity = sevens ^ sevens >> 4;
    parity ^= parity >> 2;
    return sevens | ((parity ^ parity >> 1) & 0x01010101u) << 7;
}

/* Four groups of 7 bits that follow each other. */
V_INLINE uint32_t packed_signs(uint32_t packed)
{
    return even_signs((packed & 0x7f) | (packed << 1 & 0x7f00) | (packed << 2 & 0x7f0000) | (packed << 3 & 0x7f000000));
}

/* ---- IQ2: 4 entries of 8 numbers ---- */

/* Four entries of 16 bits as 32 bytes of 2 bits. */
V_INLINE __m256i spread_two_bits(uint64_t entries)
{
    __m256i v = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)entries));
    v = _mm256_or_si256(v, _mm256_slli_epi32(v, 12));
    return bytes_and(_mm256_or_si256(v, _mm256_slli_epi32(v, 6)), 3);
}

V_INLINE uint64_t four_entries(const uint16_t *grid, uint32_t i0, uint32_t i1, uint32_t i2, uint32_t i3)
{
    return grid[i0] | (uint64_t)grid[i1] << 16 | (uint64_t)grid[i2] << 32 | (uint64_t)grid[i3] << 48;
}

V_INLINE __m256i iq2_numbers(uint64_t entries, uint32_t signs)
{
    const __m256i levels = _mm256_set1_epi32(43 << 16 | 25 << 8 | 8);
    return negate(_mm256_shuffle_epi8(levels, spread_two_bits(entries)), signs);
}

/* d * (s + 1/2) / 4 = (d / 8) * (2 s + 1); scales: s of columns 0..15 | s of 16..31 << 4 */
V_INLINE struct row_sub iq2_row(__m256i q, const uint8_t *d, uint32_t scales)
{
    return (struct row_sub){q, half_float(d) * 0.125f, {(float)(2 * (scales & 15) + 1), (float)(2 * (scales >> 4) + 1)}};
}

V_INLINE struct row_sub iq2_xxs_row(const uint8_t *b, uint32_t sub)
{
    const uint8_t *index = b + 2 + 8 * sub;
    uint32_t packed = load_u32(index + 4), scale = packed >> 28;
    uint64_t entries = four_entries(grid_iq2_xxs, index[0], index[1], index[2], index[3]);
    return iq2_row(iq2_numbers(entries, packed_signs(packed)), b, scale | scale << 4);
}

V_INLINE struct row_sub iq2_xs_row(const uint8_t *b, uint32_t sub)
{
    const uint8_t *words = b + 2 + 8 * sub;
    uint32_t w0 = load_u16(words), w1 = load_u16(words + 2), w2 = load_u16(words + 4), w3 = load_u16(words + 6);
    uint64_t entries = four_entries(grid_iq2_xs, w0 & 511, w1 & 511, w2 & 511, w3 & 511);
    uint32_t signs = even_signs(w0 >> 9 | w1 >> 9 << 8 | w2 >> 9 << 16 | w3 >> 9 << 24);
    return iq2_row(iq2_numbers(entries, signs), b, b[66 + sub]);
}

V_INLINE struct row_sub iq2_s_row(const uint8_t *b, uint32_t sub)
{
    const uint8_t *low = b + 2 + 4 * sub;
    uint32_t high = b[66 + sub];
    uint64_t entries = four_entries(grid_iq2_s, low[0] | (high & 3) << 8, low[1] | (high >> 2 & 3) << 8,
                                    low[2] | (high >> 4 & 3) << 8, low[3] | (high >> 6) << 8);
    return iq2_row(iq2_numbers(entries, load_u32(b + 34 + 4 * sub)), b, b[74 + sub]);
}

/* ---- IQ3: 8 entries of 4 numbers; high: the ninth bits of their indices ---- */

V_INLINE __m256i iq3_numbers(const uint16_t *grid, const uint8_t *index, uint32_t high, __m128i levels, uint32_t signs)
{
    _Alignas(16) uint16_t entries[8];
    UNROLL for (uint32_t i = 0; i < 8; i++)
        entries[i] = grid[index[i] | (high >> i & 1) << 8];
    __m128i bytes = _mm_load_si128((const void *)entries);
    __m128i even = and_16(bytes, 15), odd = and_16(_mm_srli_epi16(bytes, 4), 15);
    __m256i number = _mm256_set_m128i(_mm_unpackhi_epi8(even, odd), _mm_unpacklo_epi8(even, odd));
    return negate(_mm256_shuffle_epi8(both_lanes(levels), number), signs);
}

/* d * (s + 1/2) / 2 = (d / 4) * (2 s + 1) */
V_INLINE struct row_sub iq3_xxs_row(const uint8_t *b, uint32_t sub)
{
    const __m128i levels = _mm_setr_epi8(4, 12, 20, 28, 36, 44, 52, 62, 0, 0, 0, 0, 0, 0, 0, 0);
    uint32_t packed = load_u32(b + 66 + 4 * sub);
    float s = (float)(2 * (packed >> 28) + 1);
    __m256i q = iq3_numbers(grid_iq3_xxs, b + 2 + 8 * sub, 0, levels, packed_signs(packed));
    return (struct row_sub){q, half_float(b) * 0.25f, {s, s}};
}

V_INLINE struct row_sub iq3_s_row(const uint8_t *b, uint32_t sub)
{
    const __m128i levels = _mm_setr_epi8(1, 3, 5, 7, 9, 11, 13, 15, 0, 0, 0, 0, 0, 0, 0, 0);
    float s = (float)(2 * (b[106 + sub / 2] >> (4 * (sub % 2)) & 15) + 1);
    __m256i q = iq3_numbers(grid_iq3_s, b + 2 + 8 * sub, b[66 + sub], levels, load_u32(b + 74 + 4 * sub));
    return (struct row_sub){q, half_float(b), {s, s}};
}

/* ---- IQ1: 4 entries of 8 numbers -1, 0, 1, in eighths, each 8 of them moved by an eighth ---- */

/* down: byte g is 0xff to move entry g down, 0 to move it up. */
V_INLINE __m256i iq1_numbers(uint64_t entries, uint32_t down)
{
    const __m256i eighths = _mm256_set1_epi32(8 << 16 | 0 << 8 | 0xf8);
    __m256i move = _mm256_or_si256(_mm256_cvtepi8_epi64(_mm_cvtsi32_si128((int)down)), _mm256_set1_epi8(1)); /* -1 or 1 */
    return _mm256_add_epi8(_mm256_shuffle_epi8(eighths, spread_two_bits(entries)), move);
}

V_INLINE struct row_sub iq1_s_row(const uint8_t *b, uint32_t sub)
{
    const uint8_t *low = b + 2 + 4 * sub;
    uint32_t high = load_u16(b + 34 + 2 * sub);
    uint64_t entries = four_entries(grid_iq1, low[0] | (high & 7) << 8, low[1] | (high >> 3 & 7) << 8,
                                    low[2] | (high >> 6 & 7) << 8, low[3] | (high >> 9 & 7) << 8);
    float s = (float)(2 * (high >> 12 & 7) + 1);
    return (struct row_sub){iq1_numbers(entries, high >> 15 ? UINT32_MAX : 0), half_float(b) * 0.125f, {s, s}};
}

V_INLINE struct row_sub iq1_m_row(const uint8_t *b, uint32_t sub)
{
    const uint8_t *low = b + 4 * sub, *words = b + 48;
    uint32_t high = load_u16(b + 32 + 2 * sub), scales = load_u16(words + sub / 2 * 2) >> (6 * (sub % 2));
    uint32_t d = words[1] >> 4 | (words[3] & 0xf0u) | (words[5] & 0xf0u) << 4 | (words[7] & 0xf0u) << 8;
    uint64_t entries = four_entries(grid_iq1, low[0] | (high & 7) << 8, low[1] | (high >> 4 & 7) << 8,
                                    low[2] | (high >> 8 & 7) << 8, low[3] | (high >> 12 & 7) << 8);
    uint32_t down = (high >> 3 & 1) | (high >> 7 & 1) << 8 | (high >> 11 & 1) << 16 | high >> 15 << 24;
    return (struct row_sub){iq1_numbers(entries, down * 255), _cvtsh_ss((uint16_t)d) * 0.125f,
                            {(float)(2 * (scales & 7) + 1), (float)(2 * (scales >> 3 & 7) + 1)}};
}

/* ---- TQ: digits 0, 1, 2 that stand for -1, 0, 1 ---- */

/* Digit n of 16 bytes, by the power 3^n: the highest digit of the fraction byte * 3^n / 256. */
V_INLINE __m128i ternary_digits(__m128i bytes, uint32_t power)
{
    __m256i v = _mm256_mullo_epi16(_mm256_cvtepu8_epi16(bytes), _mm256_set1_epi16((short)power));
    v = _mm256_srli_epi16(_mm256_mullo_epi16(_mm256_and_si256(v, _mm256_set1_epi16(255)), _mm256_set1_epi16(3)), 8);
    return _mm_packus_epi16(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
}

V_INLINE struct row_sub tq_row(__m256i digits, const uint8_t *d)
{
    return (struct row_sub){_mm256_sub_epi8(digits, _mm256_set1_epi8(1)), half_float(d), {1, 1}};
}

V_INLINE struct row_sub tq1_0_row(const uint8_t *b, uint32_t sub)
{
    static const uint8_t powers[5] = {1, 3, 9, 27, 81};
    __m128i first = _mm_loadu_si128((const void *)b), second = _mm_loadu_si128((const void *)(b + 16));
    if (sub < 5)
        return tq_row(_mm256_set_m128i(ternary_digits(second, powers[sub]), ternary_digits(first, powers[sub])), b + 52);
    __m128i rest = _mm_loadu_si128((const void *)(b + 32));
    uint32_t n = 2 * sub - 10; /* of the first 16 columns */
    if (sub < 7)
        return tq_row(_mm256_set_m128i(ternary_digits(rest, powers[n + 1]), ternary_digits(rest, powers[n])), b + 52);
    _Alignas(16) uint8_t last[16];
    for (uint32_t j = 0; j < 16; j++)
        last[j] = (uint8_t)((uint8_t)(b[48 + j % 4] * powers[j / 4]) * 3 >> 8);
    return tq_row(_mm256_set_m128i(load_16(last), ternary_digits(rest, powers[n])), b + 52);
}

V_INLINE struct row_sub tq2_0_row(const uint8_t *b, uint32_t sub)
{
    __m256i bytes = _mm256_loadu_si256((const void *)(b + sub / 4 * 32));
    return tq_row(bytes_and(_mm256_srl_epi16(bytes, _mm_cvtsi32_si128((int)(sub % 4 * 2))), 3), b + 64);
}

#define TYPE(name, subs, file_bytes) ROWS_LAYOUT(name, subs, file_bytes) ROWS_WORDS(name, subs, file_bytes)
TYPE(iq4_nl, 1, 18)
TYPE(iq4_xs, 8, 136)
TYPE(iq3_xxs, 8, 98)
TYPE(iq3_s, 8, 110)
TYPE(iq2_xxs, 8, 66)
TYPE(iq2_xs, 8, 74)
TYPE(iq2_s, 8, 82)
TYPE(iq1_s, 8, 50)
TYPE(iq1_m, 8, 56)
TYPE(tq1_0, 8, 54)
TYPE(tq2_0, 8, 66)
