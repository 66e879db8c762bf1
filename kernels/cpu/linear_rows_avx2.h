/* linear_rows_avx2.h: quantised types whose blocks stay as the file has them: a panel's block is the blocks of its 16 rows, one
 * after the other. A type gives one function, which reads 32 columns (a "sub") of one row's block. The templates here turn the
 * 16 rows of a sub into columns:
 *   values  [32 columns][16 rows] float32: (d * s) * q, two exact products
 *   words   [16 pairs of columns][16 rows][2] int16 s * q, then d of the 16 rows: what the integer tiles of pairs multiply
 * Bound by instructions: about 0.7 a weight, once for all rows of a slab. */
#ifndef LLMPY_LINEAR_ROWS_AVX2_H
#define LLMPY_LINEAR_ROWS_AVX2_H

#include "linear_quants_avx2.h"

#include <string.h>

/* 32 columns of a row: (d * s[h]) * q, h = column / 16. For the integer tiles s is an integer, and |s * q| * 127 * 32 is below
 * 2^24, so that a sub's sum is exact in float32. */
struct row_sub {
    __m256i q;
    float d, s[2];
};

typedef struct row_sub row_reader(const uint8_t *block, uint32_t sub);

/* The same of 16 rows. quad[Q][half]: columns 4Q .. 4Q + 3 of 8 rows, a dword a row. */
struct panel_sub {
    __m256i quad[8][2];
    __m256 d[2], s[2][2]; /* [half]; s: [columns 16h ..][half] */
};

V_INLINE float half_float(const uint8_t *p)
{
    uint16_t bits;
    memcpy(&bits, p, 2);
    return _cvtsh_ss(bits);
}

/* quads[Q] = dword Q of 8 rows of 32 bytes */
V_INLINE void transpose_dwords(const int8_t (*rows)[32], __m256i (*quads)[2], uint32_t half)
{
    __m256i r[8], t[8];
    UNROLL for (uint32_t i = 0; i < 8; i++)
        r[i] = load_256(rows[8 * half + i]);
    UNROLL for (uint32_t i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    }
    UNROLL for (uint32_t i = 0; i < 8; i += 4) { /* r[i + c]: dword c of each 128-bit lane, of rows i to i + 3 */
        r[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    UNROLL for (uint32_t c = 0; c < 4; c++) {
        quads[c][half] = _mm256_permute2x128_si256(r[c], r[4 + c], 0x20);
        quads[4 + c][half] = _mm256_permute2x128_si256(r[c], r[4 + c], 0x31);
    }
}

V_INLINE void read_panel_sub(row_reader *read, const uint8_t *block, const uint32_t row_bytes, uint32_t sub,
                             struct panel_sub *panel)
{
    _Alignas(32) int8_t q[16][32];
    _Alignas(32) float d[16], s[2][16];
    for (uint32_t row = 0; row < 16; row++) {
        struct row_sub one = read(block + row * row_bytes, sub);
        _mm256_store_si256((void *)q[row], one.q);
        d[row] = one.d;
        s[0][row] = one.s[0];
        s[1][row] = one.s[1];
    }
    UNROLL for (uint32_t half = 0; half < 2; half++) {
        transpose_dwords(q, panel->quad, half);
        panel->d[half] = _mm256_load_ps(d + 8 * half);
        panel->s[0][half] = _mm256_load_ps(s[0] + 8 * half);
        panel->s[1][half] = _mm256_load_ps(s[1] + 8 * half);
    }
}

V_INLINE void rows_values(row_reader *read, const uint32_t n_subs, const uint32_t row_bytes, const uint8_t *w,
                          uint32_t n_blocks, float *values)
{
    for (; n_blocks > 0; n_blocks--, w += 16 * row_bytes)
        for (uint32_t sub = 0; sub < n_subs; sub++, values += 32 * 16) {
            struct panel_sub panel;
            read_panel_sub(read, w, row_bytes, sub, &panel);
            UNROLL for (uint32_t half = 0; half < 2; half++)
                UNROLL for (uint32_t quad = 0; quad < 8; quad++) {
                    __m256 scale = _mm256_mul_ps(panel.d[half], panel.s[quad / 4][half]);
                    UNROLL for (uint32_t i = 0; i < 4; i++) {
                        __m256i q = _mm256_srai_epi32(_mm256_slli_epi32(panel.quad[quad][half], (int)(24 - 8 * i)), 24);
                        _mm256_storeu_ps(values + (4 * quad + i) * 16 + 8 * half,
                                         _mm256_mul_ps(scale, _mm256_cvtepi32_ps(q)));
                    }
                }
        }
}

V_INLINE void rows_words(row_reader *read, const uint32_t n_subs, const uint32_t row_bytes, const uint8_t *w,
                         uint32_t n_blocks, uint8_t *words)
{
    const __m256i low = _mm256_setr_epi8(-1, 0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13, -1, 0, -1, 1, -1, 4, -1, 5,
                                         -1, 8, -1, 9, -1, 12, -1, 13);
    const __m256i high = _mm256_setr_epi8(-1, 2, -1, 3, -1, 6, -1, 7, -1, 10, -1, 11, -1, 14, -1, 15, -1, 2, -1, 3, -1, 6, -1,
                                          7, -1, 10, -1, 11, -1, 14, -1, 15);
    for (; n_blocks > 0; n_blocks--, w += 16 * row_bytes)
        for (uint32_t sub = 0; sub < n_subs; sub++, words += WORDS_SUB_BYTES) {
            struct panel_sub panel;
            read_panel_sub(read, w, row_bytes, sub, &panel);
            UNROLL for (uint32_t half = 0; half < 2; half++) {
                _mm256_store_ps((float *)(words + WORDS_SCALE + 32 * half), panel.d[half]);
                UNROLL for (uint32_t quad = 0; quad < 8; quad++) {
                    __m256i s = _mm256_cvtps_epi32(panel.s[quad / 4][half]), q = panel.quad[quad][half];
                    s = _mm256_or_si256(_mm256_slli_epi32(s, 16), _mm256_and_si256(s, _mm256_set1_epi32(0xffff)));
                    __m256i first = _mm256_srai_epi16(_mm256_shuffle_epi8(q, low), 8);
                    __m256i second = _mm256_srai_epi16(_mm256_shuffle_epi8(q, high), 8);
                    _mm256_store_si256((void *)(words + 128 * quad + 32 * half), _mm256_mullo_epi16(first, s));
                    _mm256_store_si256((void *)(words + 128 * quad + 64 + 32 * half), _mm256_mullo_epi16(second, s));
                }
            }
        }
}

/* The functions of a type for its struct linear_type. */
#define ROWS_LAYOUT(type, subs, file_bytes)                                                                                    \
    void linear_##type##_repack_avx2(const uint8_t *rows, size_t row_bytes, uint32_t first_lane, uint32_t n_lanes,             \
                                     uint32_t n_cols, uint8_t *panel)                                                          \
    {                                                                                                                          \
        for (uint32_t block = 0; block < n_cols / (32 * (subs)); block++, panel += 16 * (file_bytes))                          \
            for (uint32_t i = 0; i < n_lanes; i++)                                                                             \
                memcpy(panel + (first_lane + i) * (file_bytes), rows + i * row_bytes + (size_t)block * (file_bytes),           \
                       file_bytes);                                                                                            \
    }                                                                                                                          \
    void linear_##type##_unpack_avx2(const uint8_t *w, uint32_t n_blocks, float *values)                                       \
    {                                                                                                                          \
        rows_values(type##_row, subs, file_bytes, w, n_blocks, values);                                                        \
    }                                                                                                                          \
    void linear_##type##_values_avx2(const uint8_t *w, uint32_t n_blocks, uint8_t *values)                                     \
    {                                                                                                                          \
        rows_values(type##_row, subs, file_bytes, w, n_blocks, (float *)values);                                               \
    }
#define ROWS_WORDS(type, subs, file_bytes)                                                                                     \
    void linear_##type##_expand_avx2(const uint8_t *w, uint32_t n_blocks, uint8_t *words)                                      \
    {                                                                                                                          \
        rows_words(type##_row, subs, file_bytes, w, n_blocks, words);                                                          \
    }

#endif
