/* FP8 weights on AVX-512: layout and value as on AVX2 (linear_fp8_avx2.c). Many rows go through the tiles of F32. Bound: one
 * row by the bytes of the weights, 8.25 bits each. */
#include "linear_avx512.h"

#define COLUMNS 128u
#define SCALES (COLUMNS * 16u)
#define BLOCK_BYTES (SCALES + 64u)

linear_repack linear_fp8_repack_avx2; /* linear_fp8_avx2.c */

/* The values of columns k and k + 1. The bits of e4m3 moved to float16 are the value times 2^-8. */
INLINE void columns(const uint8_t *w, __m512 scale, __m512 *even, __m512 *odd)
{
    const __m512 shift = _mm512_set1_ps(256);
    __m512i halves = _mm512_slli_epi16(_mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)w)), 7);
    halves = _mm512_and_si512(halves, _mm512_set1_epi16((short)0xbf80));
    __m512 low = _mm512_cvtph_ps(_mm512_castsi512_si256(halves)), high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
    *even = _mm512_mul_ps(_mm512_mul_ps(low, shift), scale);
    *odd = _mm512_mul_ps(_mm512_mul_ps(high, shift), scale);
}

static void unpack(const uint8_t *w, uint32_t n_blocks, float *values)
{
    for (; n_blocks; n_blocks--, w += BLOCK_BYTES, values += COLUMNS * 16) {
        __m512 scale = _mm512_loadu_ps(w + SCALES), even, odd;
        for (uint32_t k = 0; k < COLUMNS; k += 2) {
            columns(w + 16 * k, scale, &even, &odd);
            _mm512_storeu_ps(values + 16 * k, even);
            _mm512_storeu_ps(values + 16 * k + 16, odd);
        }
    }
}

static void expand(const uint8_t *w, uint32_t n_blocks, uint8_t *expanded)
{
    unpack(w, n_blocks, (float *)(void *)expanded);
}

/* One row times 1 or 4 panels; four hide the latency of the additions. */
INLINE void panels(const uint8_t *w, const float *x, float *acc, uint32_t n_blocks, const int n_panels)
{
    const size_t panel_bytes = (size_t)n_blocks * BLOCK_BYTES;
    __m512 c[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()}, scale[4];
    for (uint32_t block = 0; block < n_blocks; block++, w += BLOCK_BYTES, x += COLUMNS) {
        /* behind the end of a panel follow the next panels, not those that run along */
        bool ends = block * (size_t)BLOCK_BYTES + GEMV_AHEAD >= panel_bytes;
        size_t ahead = GEMV_AHEAD + (ends ? (size_t)(n_panels - 1) * panel_bytes : 0);
        UNROLL for (int q = 0; q < n_panels; q++) scale[q] = _mm512_loadu_ps(w + (size_t)q * panel_bytes + SCALES);
        for (uint32_t k = 0; k < COLUMNS; k += 4) {
            UNROLL for (int q = 0; q < n_panels; q++)
                prefetch_lines((const char *)w + (size_t)q * panel_bytes + 16 * k + ahead, 1);
            UNROLL for (uint32_t j = 0; j < 4; j += 2)
                UNROLL for (int q = 0; q < n_panels; q++)
                {
                    __m512 even, odd;
                    columns(w + (size_t)q * panel_bytes + 16 * (k + j), scale[q], &even, &odd);
                    c[q] = _mm512_fmadd_ps(even, _mm512_set1_ps(x[k + j]), c[q]);
                    c[q] = _mm512_fmadd_ps(odd, _mm512_set1_ps(x[k + j + 1]), c[q]);
                }
        }
    }
    UNROLL for (int q = 0; q < n_panels; q++) _mm512_storeu_ps(acc + q * 16, c[q]);
}

static void gemv(const uint8_t *w, const char *x, float *acc, uint32_t n_blocks, uint32_t n_panels)
{
    const float *xk = (const float *)(const void *)x;
    const size_t panel_bytes = (size_t)n_blocks * BLOCK_BYTES;
    for (; n_panels >= 4; n_panels -= 4, w += 4 * panel_bytes, acc += 64)
        panels(w, xk, acc, n_blocks, 4);
    for (; n_panels; n_panels--, w += panel_bytes, acc += 16)
        panels(w, xk, acc, n_blocks, 1);
}

const struct linear_type linear_fp8_float_avx512 = {
    .name = "fp8 float",
    .dtype = DTYPE_FP8,
    .arithmetic = ARITHMETIC_FLOAT,
    .block_values = COLUMNS,
    .panel_block_bytes = BLOCK_BYTES,
    .strip_block_bytes = 4 * COLUMNS,
    .expanded_block_bytes = 64 * COLUMNS,
    .slab_blocks = 1,
    .max_rows = FLOAT_ROWS,
    .max_panels = 2,
    .tile = FLOAT_TILE_TABLE(f32_avx512_tile_128),
    .gemv = gemv,
    .prepare = K(prepare_128),
    .repack = linear_fp8_repack_avx2,
    .unpack = unpack,
    .expand = expand,
};
