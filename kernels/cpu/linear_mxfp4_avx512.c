/* MXFP4 on AVX-512: panels, values and every output's chain are those of linear_mxfp4_avx2.c, so the bits are the same. Many
 * rows go through the tiles of F32. One row: 4-bit floats select one of 16 floats of a register, five instructions for
 * 16 weights. */
#include "linear_avx512.h"

#define BLOCK_BYTES 288u

linear_repack linear_mxfp4_repack_avx2;

/* 2^(e - 128) of the 16 rows. */
INLINE __m512 scales_of(const uint8_t *block)
{
    __m512i e = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)(block + 256)));
    __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23);
    __mmask16 is_small = _mm512_cmplt_epi32_mask(e, _mm512_set1_epi32(2));
    return _mm512_castsi512_ps(_mm512_mask_sllv_epi32(normal, is_small, _mm512_set1_epi32(0x00200000), e));
}

/* 16 rows of a column of the block, from its low (shift 0) or high halves (shift 4). */
INLINE __m512 column(const uint8_t *w, const unsigned shift, __m512 scale)
{
    const __m512 floats = _mm512_setr_ps(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    __m512i bits = _mm512_srli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)w)), shift);
    return _mm512_mul_ps(_mm512_permutexvar_ps(bits, floats), scale); /* by the low 4 bits */
}

static void unpack(const uint8_t *w, uint32_t n_blocks, float *values)
{
    for (; n_blocks; n_blocks--, w += BLOCK_BYTES, values += 32 * 16) {
        __m512 scale = scales_of(w);
        UNROLL for (int j = 0; j < 16; j++)
        {
            _mm512_storeu_ps(values + 16 * j, column(w + 16 * j, 0, scale));
            _mm512_storeu_ps(values + 16 * (j + 16), column(w + 16 * j, 4, scale));
        }
    }
}

static void expand(const uint8_t *w, uint32_t n_blocks, uint8_t *values)
{
    unpack(w, n_blocks, (float *)(void *)values);
}

/* Adds columns 0..15 (their bits: the low halves) or 16..31 of a block of n_panels panels to the sums c. */
INLINE void add_half(const uint8_t *w, size_t panel_bytes, const int n_panels, const unsigned shift, const float *x,
                     const __m512 *scale, __m512 *c)
{
    UNROLL for (int j = 0; j < 16; j++) UNROLL for (int q = 0; q < n_panels; q++)
        c[q] = _mm512_fmadd_ps(column(w + q * panel_bytes + 16 * j, shift, scale[q]), _mm512_set1_ps(x[j]), c[q]);
}

INLINE void panels(const uint8_t *w, const int n_panels, const float *x, float *acc, uint32_t n_blocks)
{
    size_t panel_bytes = (size_t)n_blocks * BLOCK_BYTES;
    __m512 c[4], scale[4];
    UNROLL for (int q = 0; q < n_panels; q++) c[q] = _mm512_setzero_ps();
    for (uint32_t block = 0; block < n_blocks; block++, w += BLOCK_BYTES, x += 32) {
        UNROLL for (int q = 0; q < n_panels; q++)
        {
            prefetch_lines((const char *)w + q * panel_bytes + GEMV_AHEAD, 5);
            scale[q] = scales_of(w + q * panel_bytes);
        }
        add_half(w, panel_bytes, n_panels, 0, x, scale, c);
        add_half(w, panel_bytes, n_panels, 4, x + 16, scale, c);
    }
    UNROLL for (int q = 0; q < n_panels; q++) _mm512_storeu_ps(acc + 16 * q, c[q]);
}

/* Four panels hide the latency of the additions. */
static void gemv(const uint8_t *w, const char *x, float *acc, uint32_t n_blocks, uint32_t n_panels)
{
    const float *row = (const float *)(const void *)x;
    size_t panel_bytes = (size_t)n_blocks * BLOCK_BYTES;
    for (; n_panels >= 4; n_panels -= 4, w += 4 * panel_bytes, acc += 64)
        panels(w, 4, row, acc, n_blocks);
    for (; n_panels; n_panels--, w += panel_bytes, acc += 16)
        panels(w, 1, row, acc, n_blocks);
}

const struct linear_type linear_mxfp4_float_avx512 = {
    .name = "mxfp4 float",
    .dtype = DTYPE_MXFP4,
    .arithmetic = ARITHMETIC_FLOAT,
    .block_values = 32,
    .panel_block_bytes = BLOCK_BYTES,
    .strip_block_bytes = 128,
    .expanded_block_bytes = 2048,
    .slab_blocks = 4,
    .max_rows = FLOAT_ROWS,
    .max_panels = 2,
    .tile = FLOAT_TILE_TABLE(f32_avx512_tile),
    .gemv = gemv,
    .prepare = K(prepare_float),
    .repack = linear_mxfp4_repack_avx2,
    .unpack = unpack,
    .expand = expand,
};
