/* FP8 weights: 128 columns of e4m3 bytes and a float32 scale. A panel's block is 2112 bytes, [128 columns][16 rows] bytes, then
 * the scales of the 16 rows. The file's bits are moved, never changed. A value is one product e4m3 * scale, rounded once, as
 * in dtype.c. NaN bytes do not occur, because the checkpoint's reader refuses them. Bound by bytes: 8.25 bits a weight. */
#include "linear_quants_avx2.h"

#include <string.h>

#define COLUMNS 128u
#define SCALES (COLUMNS * 16u)
#define BLOCK_BYTES (SCALES + 64u)
#define FILE_BYTES (4u + COLUMNS)

void linear_fp8_repack_avx2(const uint8_t *rows, size_t row_bytes, uint32_t first_lane, uint32_t n_lanes, uint32_t n_cols,
                            uint8_t *panel)
{
    for (uint32_t block = 0; block * COLUMNS < n_cols; block++, panel += BLOCK_BYTES)
        for (uint32_t i = 0; i < n_lanes; i++) {
            const uint8_t *b = rows + i * row_bytes + (size_t)block * FILE_BYTES;
            for (uint32_t j = 0; j < COLUMNS; j++)
                panel[16 * j + first_lane + i] = b[4 + j];
            memcpy(panel + SCALES + 4 * (first_lane + i), b, 4);
        }
}

/* The values of 16 rows of a column. The bits of e4m3 moved to float16 are the value times 2^-8, also if it is subnormal. */
V_INLINE void column(const uint8_t *w, const __m256 *scale, __m256 *low, __m256 *high)
{
    __m256i halves = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)w)), 7);
    halves = _mm256_and_si256(halves, _mm256_set1_epi16((short)0xbf80));
    __m256 shift = _mm256_set1_ps(256);
    *low = _mm256_mul_ps(_mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), shift), scale[0]);
    *high = _mm256_mul_ps(_mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)), shift), scale[1]);
}

V_INLINE void scales_of(const uint8_t *w, __m256 *scale)
{
    scale[0] = _mm256_loadu_ps((const float *)(w + SCALES));
    scale[1] = _mm256_loadu_ps((const float *)(w + SCALES) + 8);
}

void linear_fp8_unpack_avx2(const uint8_t *w, uint32_t n_blocks, float *values)
{
    for (; n_blocks > 0; n_blocks--, w += BLOCK_BYTES, values += COLUMNS * 16) {
        __m256 scale[2], low, high;
        scales_of(w, scale);
        for (uint32_t j = 0; j < COLUMNS; j++) {
            column(w + 16 * j, scale, &low, &high);
            _mm256_storeu_ps(values + 16 * j, low);
            _mm256_storeu_ps(values + 16 * j + 8, high);
        }
    }
}

void linear_fp8_values_avx2(const uint8_t *w, uint32_t n_blocks, uint8_t *values)
{
    linear_fp8_unpack_avx2(w, n_blocks, (float *)values);
}

/* One row: the weights become values in registers, in the chain of the tiles. Two panels hide the latency of the additions. */
V_INLINE void panels(const uint8_t *w, const uint32_t n_panels, const float *x, float *acc, uint32_t n_blocks)
{
    size_t panel_bytes = (size_t)n_blocks * BLOCK_BYTES;
    __m256 c[2][2], scale[2][2];
    UNROLL for (uint32_t q = 0; q < n_panels; q++)
        c[q][0] = c[q][1] = _mm256_setzero_ps();
    for (uint32_t block = 0; block < n_blocks; block++, w += BLOCK_BYTES, x += COLUMNS) {
        UNROLL for (uint32_t q = 0; q < n_panels; q++)
            scales_of(w + q * panel_bytes, scale[q]);
        for (uint32_t j = 0; j < COLUMNS; j++) {
            __m256 xj = _mm256_broadcast_ss(x + j), low, high;
            UNROLL for (uint32_t q = 0; q < n_panels; q++) {
                column(w + q * panel_bytes + 16 * j, scale[q], &low, &high);
                c[q][0] = _mm256_fmadd_ps(xj, low, c[q][0]);
                c[q][1] = _mm256_fmadd_ps(xj, high, c[q][1]);
            }
        }
    }
    UNROLL for (uint32_t q = 0; q < n_panels; q++) {
        _mm256_storeu_ps(acc + 16 * q, c[q][0]);
        _mm256_storeu_ps(acc + 16 * q + 8, c[q][1]);
    }
}

void linear_fp8_gemv_avx2(const uint8_t *w, const char *x, float *acc, uint32_t n_blocks, uint32_t n_panels)
{
    size_t panel_bytes = (size_t)n_blocks * BLOCK_BYTES;
    for (; n_panels >= 2; n_panels -= 2, w += 2 * panel_bytes, acc += 32)
        panels(w, 2, (const float *)x, acc, n_blocks);
    if (n_panels)
        panels(w, 1, (const float *)x, acc, n_blocks);
}
