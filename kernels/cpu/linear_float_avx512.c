/* y[r] = sum over k of w[r][k] * x[k] in float32: one fused multiply-add chain per output, k ascending. Weights F32, F16 or
 * BF16 in panels of 16 rows, converted exactly in registers; F32 panels [k][16], F16 [k][16], BF16 [k / 2][16][2] (the layout
 * of linear_bf16_avx512.c). Activations float32, strips [k][n_rows]. Bound: one row by the bytes of the weights; from 8 rows
 * on by 2 FMA of 16 floats a cycle. Measured on one Zen 5 core at 3.7 GHz, weights in L1: 237 GFLOP/s, 99 % of the peak, from
 * 6 rows on. */
#include "linear_avx512.h"

enum { F32, F16, BF16 };

/* Weights of columns k (and k + 1 for BF16) of one block. */
INLINE __m512 load_even(const uint8_t *w, const int type)
{
    if (type == F32)
        return _mm512_loadu_ps((const float *)(const void *)w);
    if (type == F16)
        return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)w));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(w), 16));
}

INLINE __m512 load_odd(const uint8_t *w, const int type)
{
    if (type == F32)
        return _mm512_loadu_ps((const float *)(const void *)(w + 64));
    if (type == F16)
        return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(w + 32)));
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(w), _mm512_set1_epi32((int)0xffff0000u)));
}

INLINE void tile(TILE_ARGS, const int type, const int n_panels, const int n_rows)
{
    const size_t pair_bytes = type == F32 ? 128 : 64;
    const float *xk = (const float *)(const void *)x;
    __m512 c[FLOAT_ROWS][2];
    UNROLL for (int i = 0; i < n_rows; i++) UNROLL for (int q = 0; q < n_panels; q++) c[i][q] =
        _mm512_load_ps(acc + (i * n_panels + q) * 16);
    for (uint32_t b = 0; b < n_blocks; b++, next += (size_t)next_lines * 64) {
        prefetch_lines(next, next_lines);
        for (int k = 0; k < 32; k += 2, w += pair_bytes, xk += 2 * n_rows) {
            __m512 even[2], odd[2];
            UNROLL for (int q = 0; q < n_panels; q++) even[q] = load_even(w + q * panel_stride, type);
            UNROLL for (int i = 0; i < n_rows; i++) UNROLL for (int q = 0; q < n_panels; q++) c[i][q] =
                _mm512_fmadd_ps(even[q], _mm512_set1_ps(xk[i]), c[i][q]);
            UNROLL for (int q = 0; q < n_panels; q++) odd[q] = load_odd(w + q * panel_stride, type);
            UNROLL for (int i = 0; i < n_rows; i++) UNROLL for (int q = 0; q < n_panels; q++) c[i][q] =
                _mm512_fmadd_ps(odd[q], _mm512_set1_ps(xk[n_rows + i]), c[i][q]);
        }
    }
    UNROLL for (int i = 0; i < n_rows; i++) UNROLL for (int q = 0; q < n_panels; q++)
        _mm512_store_ps(acc + (i * n_panels + q) * 16, c[i][q]);
}

/* One row times 1 or 2 panels; each panel is one chain and one stream from memory. */
INLINE void gemv_panels(const uint8_t *w, size_t panel_bytes, const float *x, float *acc, uint32_t n_cols, const int type,
                        const int n_panels)
{
    const size_t pair_bytes = type == F32 ? 128 : 64;
    __m512 c[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (uint32_t k = 0; k < n_cols; k += 2, w += pair_bytes)
        UNROLL for (int q = 0; q < n_panels; q++)
        {
            const uint8_t *wq = w + q * panel_bytes;
            prefetch_lines((const char *)wq + GEMV_AHEAD, type == F32 ? 2 : 1);
            c[q] = _mm512_fmadd_ps(load_even(wq, type), _mm512_set1_ps(x[k]), c[q]);
            c[q] = _mm512_fmadd_ps(load_odd(wq, type), _mm512_set1_ps(x[k + 1]), c[q]);
        }
    UNROLL for (int q = 0; q < n_panels; q++) _mm512_storeu_ps(acc + q * 16, c[q]);
}

/* A chain takes 4 cycles a column. That reads 16 bytes a cycle of F32, enough for any memory, but only 8 of 16-bit types; so
 * panels of 16-bit types go in pairs. */
INLINE void gemv(const uint8_t *w, const char *x, float *acc, uint32_t n_blocks, uint32_t n_panels, const int type)
{
    const float *xk = (const float *)(const void *)x;
    const uint32_t n_cols = n_blocks * 32;
    const size_t panel_bytes = (size_t)n_cols * (type == F32 ? 64 : 32);
    for (; type != F32 && n_panels >= 2; n_panels -= 2, w += 2 * panel_bytes, acc += 32)
        gemv_panels(w, panel_bytes, xk, acc, n_cols, type, 2);
    for (; n_panels; n_panels--, w += panel_bytes, acc += 16)
        gemv_panels(w, panel_bytes, xk, acc, n_cols, type, 1);
}

void K(prepare_float)(const float *x, uint32_t stride, uint32_t n_rows, uint32_t n_cols, char *strip)
{
    for (uint32_t k = 0; k < (n_cols + 31) / 32 * 32; k += 16, strip += (size_t)n_rows * 64) {
        __mmask16 mask = k + 16 <= n_cols ? 0xffff : k < n_cols ? (__mmask16)((1u << (n_cols - k)) - 1) : 0;
        if (n_rows == 1) {
            _mm512_storeu_ps(strip, _mm512_maskz_loadu_ps(mask, x + k));
            continue;
        }
        __m512i rows[16];
        UNROLL for (uint32_t i = 0; i < 16; i++) rows[i] =
            i < n_rows ? _mm512_maskz_loadu_epi32(mask, x + (size_t)i * stride + k) : _mm512_setzero_si512();
        store_transposed(rows, 16, n_rows, strip, (size_t)n_rows * 4);
    }
}

static void repack_f32(const uint8_t *rows, size_t row_bytes, uint32_t first_lane, uint32_t n_lanes, uint32_t n_cols,
                       uint8_t *panel)
{
    uint32_t first = n_lanes == 16 ? repack_dwords(rows, row_bytes, n_cols, panel) : 0;
    for (uint32_t r = 0; r < n_lanes; r++)
        for (uint32_t k = first; k < n_cols; k++)
            memcpy(panel + ((size_t)k * 16 + first_lane + r) * 4, rows + r * row_bytes + (size_t)k * 4, 4);
}

static void repack_f16(const uint8_t *rows, size_t row_bytes, uint32_t first_lane, uint32_t n_lanes, uint32_t n_cols,
                       uint8_t *panel)
{
    for (uint32_t r = 0; r < n_lanes; r++)
        for (uint32_t k = 0; k < n_cols; k++)
            memcpy(panel + ((size_t)k * 16 + first_lane + r) * 2, rows + r * row_bytes + (size_t)k * 2, 2);
}

void K(repack_bf16)(const uint8_t *rows, size_t row_bytes, uint32_t first_lane, uint32_t n_lanes, uint32_t n_cols,
                    uint8_t *panel)
{
    uint32_t first = n_lanes == 16 ? 2 * repack_dwords(rows, row_bytes, n_cols / 2, panel) : 0;
    for (uint32_t r = 0; r < n_lanes; r++)
        for (uint32_t k = first; k < n_cols; k++)
            memcpy(panel + ((size_t)(k / 2 * 16 + first_lane + r) * 2 + k % 2) * 2, rows + r * row_bytes + (size_t)k * 2, 2);
}

INLINE void unpack(const uint8_t *w, uint32_t n_blocks, float *values, const int type)
{
    const size_t pair_bytes = type == F32 ? 128 : 64;
    for (uint32_t k = 0; k < n_blocks * 32; k += 2, w += pair_bytes, values += 32) {
        _mm512_storeu_ps(values, load_even(w, type));
        _mm512_storeu_ps(values + 16, load_odd(w, type));
    }
}

#define TILE(NAME, TYPE, P, R)                                                                                                 \
    void NAME##_##P##_##R(TILE_ARGS)                                                                                           \
    {                                                                                                                          \
        tile(w, panel_stride, x, acc, n_blocks, next, next_lines, TYPE, P, R);                                                 \
    }
#define TILES(NAME, TYPE, P)                                                                                                   \
    TILE(NAME, TYPE, P, 1)                                                                                                     \
    TILE(NAME, TYPE, P, 2)                                                                                                     \
    TILE(NAME, TYPE, P, 3)                                                                                                     \
    TILE(NAME, TYPE, P, 4) TILE(NAME, TYPE, P, 5) TILE(NAME, TYPE, P, 6) TILE(NAME, TYPE, P, 7) TILE(NAME, TYPE, P, 8)         \
        TILE(NAME, TYPE, P, 9) TILE(NAME, TYPE, P, 10) TILE(NAME, TYPE, P, 11) TILE(NAME, TYPE, P, 12)
#define KERNELS(NAME, TYPE)                                                                                                    \
    DECLARE_TILES(NAME##_tile);                                                                                                \
    TILES(NAME##_tile, TYPE, 1)                                                                                                \
    TILES(NAME##_tile, TYPE, 2)                                                                                                \
    static void NAME##_gemv(const uint8_t *w, const char *x, float *acc, uint32_t n_blocks, uint32_t n_panels)                 \
    {                                                                                                                          \
        gemv(w, x, acc, n_blocks, n_panels, TYPE);                                                                             \
    }                                                                                                                          \
    void NAME##_unpack(const uint8_t *w, uint32_t n_blocks, float *values)                                                     \
    {                                                                                                                          \
        unpack(w, n_blocks, values, TYPE);                                                                                     \
    }

KERNELS(f32_avx512, F32)
KERNELS(f16_avx512, F16)
KERNELS(bf16_avx512, BF16)

#define FLOAT_TYPE(NAME, DTYPE, BLOCK_BYTES, SLAB, KERNEL, REPACK)                                                             \
    {                                                                                                                          \
        .name = NAME, .dtype = DTYPE, .arithmetic = ARITHMETIC_FLOAT, .block_values = 32, .panel_block_bytes = BLOCK_BYTES,    \
        .strip_block_bytes = 128, .slab_blocks = SLAB, .max_rows = FLOAT_ROWS, .max_panels = 2,                                \
        .tile = FLOAT_TILE_TABLE(KERNEL##_tile), .gemv = KERNEL##_gemv, .prepare = K(prepare_float), .repack = REPACK,         \
        .unpack = KERNEL##_unpack                                                                                              \
    }

const struct linear_type linear_f32_avx512 = FLOAT_TYPE("f32 float", DTYPE_F32, 2048, 4, f32_avx512, repack_f32);
const struct linear_type linear_f16_avx512 = FLOAT_TYPE("f16 float", DTYPE_F16, 1024, 8, f16_avx512, repack_f16);
const struct linear_type linear_bf16_avx512 = FLOAT_TYPE("bf16 float", DTYPE_BF16, 1024, 8, bf16_avx512, K(repack_bf16));
