/* MXFP4 weights: 32 columns of 4-bit floats (e2m1) with an exponent of 8 bits. A panel's block is 288 bytes with its padding:
 * [16 pairs of columns (j, j + 16)][16 rows] bytes, column j in the low half, then the exponents of the 16 rows. The file's
 * bits are moved, never changed. Values are (twice the 4-bit float, an integer up to 12) * 2^(exponent - 128), one exact
 * product, as in dtype.c. Bound by bytes: 4.5 bits a weight with the padding. */
#include "linear_quants_avx2.h"

#define BLOCK_BYTES 288u
#define FILE_BYTES 17u

void linear_mxfp4_repack_avx2(const uint8_t *rows, size_t row_bytes, uint32_t first_lane, uint32_t n_lanes, uint32_t n_cols,
                              uint8_t *panel)
{
    for (uint32_t block = 0; block < n_cols / 32; block++, panel += BLOCK_BYTES)
        for (uint32_t i = 0; i < n_lanes; i++) {
            const uint8_t *b = rows + i * row_bytes + (size_t)block * FILE_BYTES;
            for (uint32_t j = 0; j < 16; j++)
                panel[16 * j + first_lane + i] = b[1 + j];
            panel[256 + first_lane + i] = b[0];
        }
}

/* 2^(e - 128) of 8 rows. */
V_INLINE __m256 power_of_two(__m256i e)
{
    __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
    __m256i small = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
    return _mm256_castsi256_ps(_mm256_blendv_epi8(normal, small, _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e)));
}

/* Values of 8 rows of a column; q: their 4-bit floats. */
V_INLINE __m256 values_of(__m128i q, __m256 scale)
{
    const __m128i table = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_shuffle_epi8(table, q))), scale);
}

void linear_mxfp4_unpack_avx2(const uint8_t *w, uint32_t n_blocks, float *values)
{
    const __m128i low_bits = _mm_set1_epi8(15);
    for (; n_blocks > 0; n_blocks--, w += BLOCK_BYTES, values += 32 * 16) {
        __m128i exponents = load_16(w + 256);
        __m256 scale[2] = {power_of_two(half_bytes(exponents, 0)), power_of_two(half_bytes(exponents, 1))};
        for (uint32_t j = 0; j < 16; j++) {
            __m128i both = load_16(w + 16 * j), low = _mm_and_si128(both, low_bits);
            __m128i high = _mm_and_si128(_mm_srli_epi16(both, 4), low_bits);
            _mm256_storeu_ps(values + 16 * j, values_of(low, scale[0]));
            _mm256_storeu_ps(values + 16 * j + 8, values_of(_mm_srli_si128(low, 8), scale[1]));
            _mm256_storeu_ps(values + 16 * (j + 16), values_of(high, scale[0]));
            _mm256_storeu_ps(values + 16 * (j + 16) + 8, values_of(_mm_srli_si128(high, 8), scale[1]));
        }
    }
}

void linear_mxfp4_values_avx2(const uint8_t *w, uint32_t n_blocks, uint8_t *values)
{
    linear_mxfp4_unpack_avx2(w, n_blocks, (float *)values);
}

/* Adds columns 0..15 (their bits: the low halves) or 16..31 of a block of n_panels panels to the sums c. */
V_INLINE void add_half(const uint8_t *w, size_t panel_bytes, const uint32_t n_panels, const int shift, const float *x,
                       __m256 (*scale)[2], __m256 (*c)[2])
{
    for (uint32_t j = 0; j < 16; j++) {
        __m256 xj = _mm256_broadcast_ss(x + j);
        UNROLL for (uint32_t q = 0; q < n_panels; q++) {
            __m128i bits = and_16(_mm_srli_epi16(load_16(w + q * panel_bytes + 16 * j), shift), 15);
            c[q][0] = _mm256_fmadd_ps(xj, values_of(bits, scale[q][0]), c[q][0]);
            c[q][1] = _mm256_fmadd_ps(xj, values_of(_mm_srli_si128(bits, 8), scale[q][1]), c[q][1]);
        }
    }
}

/* One row: the weights become values in registers, in the chain of the tiles. Two panels hide the latency of the additions. */
V_INLINE void panels(const uint8_t *w, const uint32_t n_panels, const float *x, float *acc, uint32_t n_blocks)
{
    size_t panel_bytes = (size_t)n_blocks * BLOCK_BYTES;
    __m256 c[2][2], scale[2][2];
    UNROLL for (uint32_t q = 0; q < n_panels; q++)
        c[q][0] = c[q][1] = _mm256_setzero_ps();
    for (uint32_t block = 0; block < n_blocks; block++, w += BLOCK_BYTES, x += 32) {
        UNROLL for (uint32_t q = 0; q < n_panels; q++) {
            __m128i exponents = load_16(w + q * panel_bytes + 256);
            scale[q][0] = power_of_two(half_bytes(exponents, 0));
            scale[q][1] = power_of_two(half_bytes(exponents, 1));
        }
        add_half(w, panel_bytes, n_panels, 0, x, scale, c);
        add_half(w, panel_bytes, n_panels, 4, x + 16, scale, c);
    }
    UNROLL for (uint32_t q = 0; q < n_panels; q++) {
        _mm256_storeu_ps(acc + 16 * q, c[q][0]);
        _mm256_storeu_ps(acc + 16 * q + 8, c[q][1]);
    }
}

void linear_mxfp4_gemv_avx2(const uint8_t *w, const char *x, float *acc, uint32_t n_blocks, uint32_t n_panels)
{
    size_t panel_bytes = (size_t)n_blocks * BLOCK_BYTES;
    for (; n_panels >= 2; n_panels -= 2, w += 2 * panel_bytes, acc += 32)
        panels(w, 2, (const float *)x, acc, n_blocks);
    if (n_panels)
        panels(w, 1, (const float *)x, acc, n_blocks);
}
