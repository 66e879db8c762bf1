/* linear_int8_avx512.h: y[r] = sum over k of w[r][k] * x[k] for quantised weights, in integers, as templates over the form.
 * Activations are int8 q with one float32 scale dx = max|x| / 127 per 32 columns (to nearest). For each scale of the weights
 * (32 or 16 columns), ascending:
 *   isum = sum of (u - offset) * q, exact in int32
 *   y = fma(float(isum), dw * dx, y)
 *   y = fma(minimum, dx * sum(q), y) if the form has minimums
 * The strip of a block of 32 columns:
 *   [8][n_rows]  quads of q
 *   [n_rows]     dx
 *   [n_rows]     for each scale: -offset * sum(q) as int32, from which the sum starts, or dx * sum(q) as float32
 * Bound: one row by the bytes of the weights; more rows by vpdpbusd, 2 of 64 products a cycle. The scales (a multiplication
 * and an FMA per 8 vpdpbusd on the same ports) leave 80 % of that, 73 % with minimums, 67 % with two scales. */
#ifndef LLMPY_LINEAR_INT8_AVX512_H
#define LLMPY_LINEAR_INT8_AVX512_H

#include "linear_quants_avx512.h"

/* Multiplies one block of 32 columns: c += strip block x panels. */
INLINE void int8_block(const uint8_t *w, const uint8_t *tail, size_t panel_stride, const char *x, __m512 c[INT8_ROWS][2],
                       const enum form f, const int n_panels, const int n_rows)
{
    const int n_scales = FORM_SCALES(f), n_quads = 8 / n_scales;
    const int32_t *quads = (const int32_t *)(const void *)x;
    const float *dx = (const float *)(const void *)(quads + 8 * n_rows), *sums = dx + n_rows;
    UNROLL for (int s = 0; s < n_scales; s++)
    {
        __m512i sum[INT8_ROWS][2];
        __m512 dw[2];
        UNROLL for (int i = 0; i < n_rows; i++) UNROLL for (int q = 0; q < n_panels; q++) sum[i][q] =
            FORM_HAS_MIN(f) ? _mm512_setzero_si512() : _mm512_set1_epi32(quads[(9 + s) * n_rows + i]);
        UNROLL for (int p = s * n_quads; p < (s + 1) * n_quads; p++)
        {
            __m512i u[2];
            UNROLL for (int q = 0; q < n_panels; q++) u[q] = form_quad(w + q * panel_stride, p, f);
            UNROLL for (int i = 0; i < n_rows; i++) UNROLL for (int q = 0; q < n_panels; q++) sum[i][q] =
                _mm512_dpbusd_epi32(sum[i][q], u[q], _mm512_set1_epi32(quads[p * n_rows + i]));
        }
        UNROLL for (int q = 0; q < n_panels; q++) dw[q] = form_scale(w + q * panel_stride, tail + q * panel_stride, s, f);
        UNROLL for (int i = 0; i < n_rows; i++) UNROLL for (int q = 0; q < n_panels; q++) c[i][q] =
            _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[i][q]), _mm512_mul_ps(dw[q], _mm512_set1_ps(dx[i])), c[i][q]);
        if (FORM_HAS_MIN(f)) {
            UNROLL for (int q = 0; q < n_panels; q++)
            {
                __m512 minimum = form_min(w + q * panel_stride, tail + q * panel_stride, s, f);
                UNROLL for (int i = 0; i < n_rows; i++) c[i][q] =
                    _mm512_fmadd_ps(minimum, _mm512_set1_ps(sums[s * n_rows + i]), c[i][q]);
            }
        }
    }
}

INLINE void int8_tile(TILE_ARGS, const enum form f, const int n_panels, const int n_rows)
{
    __m512 c[INT8_ROWS][2];
    UNROLL for (int i = 0; i < n_rows; i++) UNROLL for (int q = 0; q < n_panels; q++) c[i][q] =
        _mm512_load_ps(acc + (i * n_panels + q) * 16);
    for (uint32_t b = 0; b < n_blocks; b++, w += FORM_BYTES(f), next += (size_t)next_lines * 64) {
        const uint8_t *tail = w + FORM_BLOCKS(f) * FORM_BLOCK_BYTES(f);
        prefetch_lines(next, next_lines);
        for (int j = 0; j < FORM_BLOCKS(f); j++, x += FORM_STRIP_BYTES(f) * n_rows)
            int8_block(w + j * FORM_BLOCK_BYTES(f), tail, panel_stride, x, c, f, n_panels, n_rows);
    }
    UNROLL for (int i = 0; i < n_rows; i++) UNROLL for (int q = 0; q < n_panels; q++)
        _mm512_store_ps(acc + (i * n_panels + q) * 16, c[i][q]);
}

INLINE void int8_gemv(const uint8_t *w, const char *x, float *acc, uint32_t n_blocks, uint32_t n_panels, const enum form f)
{
    for (; n_panels; n_panels--, acc += 16) {
        __m512 c[INT8_ROWS][2] = {{_mm512_setzero_ps()}};
        const char *xb = x;
        for (uint32_t b = 0; b < n_blocks; b++, w += FORM_BYTES(f))
            for (int j = 0; j < FORM_BLOCKS(f); j++, xb += FORM_STRIP_BYTES(f)) {
                const uint8_t *block = w + j * FORM_BLOCK_BYTES(f);
                prefetch_lines((const char *)block + GEMV_AHEAD, (FORM_BLOCK_BYTES(f) + 63) / 64);
                int8_block(block, w + FORM_BLOCKS(f) * FORM_BLOCK_BYTES(f), 0, xb, c, f, 1, 1);
            }
        _mm512_storeu_ps(acc, c[0][0]);
    }
}

/* Quantises a block of 32 values of one row into 32 bytes. Returns their scale, NaN if a value is NaN. */
INLINE float quantise_block(const float *x, __m256i *q)
{
    __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
    /* the bits of |x| as integers have the order of the floats, NaN above all */
    __m512i size = _mm512_max_epi32(_mm512_castps_si512(_mm512_abs_ps(a)), _mm512_castps_si512(_mm512_abs_ps(b)));
    float most = _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(_mm512_reduce_max_epi32(size))));
    __m512 inverse = _mm512_set1_ps(most > 0x1p-100f ? 127.0f / most : 0.0f);
    __m128i low = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(a, inverse)));
    __m128i high = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(b, inverse)));
    *q = _mm256_set_m128i(high, low);
    return most / 127.0f;
}

INLINE void int8_prepare(const float *x, uint32_t stride, uint32_t n_rows, uint32_t n_cols, char *strip, const enum form f)
{
    const int n_scales = FORM_SCALES(f);
    for (uint32_t k = 0; k < n_cols; k += 32, strip += (size_t)FORM_STRIP_BYTES(f) * n_rows) {
        __m512i rows[16];
        float *dx = (float *)(void *)strip + 8 * n_rows, *sums = dx + n_rows;
        UNROLL for (uint32_t i = 0; i < 16; i++) rows[i] = _mm512_setzero_si512();
        UNROLL for (uint32_t i = 0; i < INT8_ROWS; i++)
        {
            if (i >= n_rows)
                break;
            __m256i q;
            float scale = quantise_block(x + (size_t)i * stride + k, &q);
            __m256i fours = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), q);
            __m128i low = _mm256_castsi256_si128(fours), high = _mm256_extracti128_si256(fours, 1);
            __m128i sum[2] = {n_scales == 1 ? _mm_add_epi32(low, high) : low, high};
            rows[i] = _mm512_castsi256_si512(q);
            dx[i] = scale;
            for (int s = 0; s < n_scales; s++) {
                __m128i pairs = _mm_add_epi32(sum[s], _mm_shuffle_epi32(sum[s], 0x4e));
                int32_t total = _mm_cvtsi128_si32(_mm_add_epi32(pairs, _mm_shuffle_epi32(pairs, 0xb1)));
                int32_t start = -FORM_OFFSET(f) * total;
                float product = scale * (float)total;
                memcpy(sums + s * n_rows + i, FORM_HAS_MIN(f) ? (const void *)&product : (const void *)&start, 4);
            }
        }
        if (n_rows == 1)
            _mm256_storeu_si256((void *)strip, _mm512_castsi512_si256(rows[0]));
        else
            store_transposed(rows, 8, n_rows, strip, (size_t)n_rows * 4);
    }
}

#define INT8_TILE(NAME, FORM, P, R)                                                                                            \
    static void NAME##_tile_##P##_##R(TILE_ARGS)                                                                               \
    {                                                                                                                          \
        int8_tile(w, panel_stride, x, acc, n_blocks, next, next_lines, FORM, P, R);                                            \
    }
#define INT8_TILES(NAME, FORM, P)                                                                                              \
    INT8_TILE(NAME, FORM, P, 1)                                                                                                \
    INT8_TILE(NAME, FORM, P, 2)                                                                                                \
    INT8_TILE(NAME, FORM, P, 3) INT8_TILE(NAME, FORM, P, 4) INT8_TILE(NAME, FORM, P, 5) INT8_TILE(NAME, FORM, P, 6)

/* The kernels and the table of a form: linear_##NAME##_int8_avx512. */
#define INT8_TYPE(NAME, TEXT, FORM, SLAB)                                                                                      \
    INT8_TYPE_OF(NAME, TEXT, FORM, SLAB, NAME##_prepare, NAME##_avx512_repack, NAME##_avx512_unpack)
#define INT8_TYPE_OF(NAME, TEXT, FORM, SLAB, PREPARE, REPACK, UNPACK)                                                          \
    INT8_TILES(NAME, FORM, 1)                                                                                                  \
    INT8_TILES(NAME, FORM, 2)                                                                                                  \
    static void NAME##_gemv(const uint8_t *w, const char *x, float *acc, uint32_t n_blocks, uint32_t n_panels)                 \
    {                                                                                                                          \
        int8_gemv(w, x, acc, n_blocks, n_panels, FORM);                                                                        \
    }                                                                                                                          \
    static void NAME##_prepare(const float *x, uint32_t stride, uint32_t n_rows, uint32_t n_cols, char *strip)                 \
    {                                                                                                                          \
        int8_prepare(x, stride, n_rows, n_cols, strip, FORM);                                                                  \
    }                                                                                                                          \
    const struct linear_type linear_##NAME##_int8_avx512 = {                                                                   \
        .name = TEXT " int8",                                                                                                  \
        .dtype = DTYPE_##FORM,                                                                                                 \
        .arithmetic = ARITHMETIC_INT8,                                                                                         \
        .block_values = 32 * FORM_BLOCKS(FORM),                                                                                \
        .panel_block_bytes = FORM_BYTES(FORM),                                                                                 \
        .strip_block_bytes = FORM_BLOCKS(FORM) * FORM_STRIP_BYTES(FORM),                                                       \
        .slab_blocks = SLAB,                                                                                                   \
        .max_rows = INT8_ROWS,                                                                                                 \
        .max_panels = 2,                                                                                                       \
        .tile = INT8_TILE_TABLE(NAME##_tile),                                                                                  \
        .gemv = NAME##_gemv,                                                                                                   \
        .prepare = PREPARE,                                                                                                    \
        .repack = REPACK,                                                                                                      \
        .unpack = UNPACK,                                                                                                      \
    };

#endif
