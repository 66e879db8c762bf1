/* linear_avx512.h: declarations that the AVX-512 kernels of the linears share. A lane of a vector is a row of a panel (an
 * output). Every output is one chain over k, so tiles of any size, the gemv and any slabs of k give the same bits. Tiles are
 * inline functions of the number of rows and panels. Both numbers are constant where a tile is instantiated, so its
 * accumulators stay in registers. Two panels times 12 rows (floats) or 6 rows (integers) leave room for two weight vectors and
 * one broadcast activation. */
#ifndef LLMPY_LINEAR_AVX512_H
#define LLMPY_LINEAR_AVX512_H

#include "linear_type.h"

#include <immintrin.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")
#define TILE_ARGS                                                                                                              \
    const uint8_t *w, size_t panel_stride, const char *x, float *acc, uint32_t n_blocks, const char *next, uint32_t next_lines

#define FLOAT_ROWS 12
#define INT8_ROWS 6

/* Bytes that a gemv prefetches ahead. A gemv reads its panels one by one, as a single stream from memory; two streams are 10 %
 * slower. */
#define GEMV_AHEAD 4096

INLINE void prefetch_lines(const char *next, uint32_t n_lines)
{
    for (uint32_t i = 0; i < n_lines; i++)
        _mm_prefetch(next + (size_t)i * 64, _MM_HINT_T0);
}

/* Transposes 16 vectors, of which the first n_rows are used, of n_columns (16, or the low 8) dwords, and writes the n_rows
 * dwords of each column. */
INLINE void store_transposed(__m512i rows[16], const int n_columns, uint32_t n_rows, char *target, size_t column_bytes)
{
    __mmask16 mask = (__mmask16)((1u << n_rows) - 1);
    __m512i t[16];
    UNROLL for (int i = 0; i < 16; i += 2)
    {
        t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    UNROLL for (int i = 0; i < 16; i += 4)
    { /* rows[i + c]: dword c of each 128-bit lane, of rows i to i + 3 */
        rows[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        rows[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        rows[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        rows[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    UNROLL for (int c = 0; c < 4; c++)
    {
        __m512i a = _mm512_shuffle_i32x4(rows[c], rows[4 + c], 0x44), b = _mm512_shuffle_i32x4(rows[8 + c], rows[12 + c], 0x44);
        _mm512_mask_storeu_epi32(target + c * column_bytes, mask, _mm512_shuffle_i32x4(a, b, 0x88));
        _mm512_mask_storeu_epi32(target + (4 + c) * column_bytes, mask, _mm512_shuffle_i32x4(a, b, 0xdd));
        if (n_columns == 16) {
            a = _mm512_shuffle_i32x4(rows[c], rows[4 + c], 0xee);
            b = _mm512_shuffle_i32x4(rows[8 + c], rows[12 + c], 0xee);
            _mm512_mask_storeu_epi32(target + (8 + c) * column_bytes, mask, _mm512_shuffle_i32x4(a, b, 0x88));
            _mm512_mask_storeu_epi32(target + (12 + c) * column_bytes, mask, _mm512_shuffle_i32x4(a, b, 0xdd));
        }
    }
}

/* Repacks 16 rows into a panel [n_dwords][16], 16 dwords at a time; returns how many dwords of each row. */
INLINE uint32_t repack_dwords(const uint8_t *rows, size_t row_bytes, uint32_t n_dwords, uint8_t *panel)
{
    uint32_t k = 0;
    for (; k + 16 <= n_dwords; k += 16) {
        __m512i row[16];
        UNROLL for (uint32_t i = 0; i < 16; i++) row[i] = _mm512_loadu_si512(rows + i * row_bytes + (size_t)k * 4);
        store_transposed(row, 16, 16, (char *)panel + (size_t)k * 64, 64);
    }
    return k;
}

/* The tiles of float32 panels: for F32 itself and for every expanded type in float arithmetic. */
#define DECLARE_TILES(NAME)                                                                                                    \
    linear_tile NAME##_1_1, NAME##_1_2, NAME##_1_3, NAME##_1_4, NAME##_1_5, NAME##_1_6, NAME##_1_7, NAME##_1_8, NAME##_1_9,    \
        NAME##_1_10, NAME##_1_11, NAME##_1_12, NAME##_2_1, NAME##_2_2, NAME##_2_3, NAME##_2_4, NAME##_2_5, NAME##_2_6,         \
        NAME##_2_7, NAME##_2_8, NAME##_2_9, NAME##_2_10, NAME##_2_11, NAME##_2_12
#define FLOAT_TILE_TABLE(NAME)                                                                                                 \
    {                                                                                                                          \
        {NULL,       NAME##_1_1, NAME##_1_2, NAME##_1_3,  NAME##_1_4,  NAME##_1_5, NAME##_1_6,                                 \
         NAME##_1_7, NAME##_1_8, NAME##_1_9, NAME##_1_10, NAME##_1_11, NAME##_1_12},                                           \
        {                                                                                                                      \
            NULL, NAME##_2_1, NAME##_2_2, NAME##_2_3, NAME##_2_4, NAME##_2_5, NAME##_2_6, NAME##_2_7, NAME##_2_8, NAME##_2_9,  \
                NAME##_2_10, NAME##_2_11, NAME##_2_12                                                                          \
        }                                                                                                                      \
    }
#define INT8_TILE_TABLE(NAME)                                                                                                  \
    {                                                                                                                          \
        {NULL, NAME##_1_1, NAME##_1_2, NAME##_1_3, NAME##_1_4, NAME##_1_5, NAME##_1_6},                                        \
        {                                                                                                                      \
            NULL, NAME##_2_1, NAME##_2_2, NAME##_2_3, NAME##_2_4, NAME##_2_5, NAME##_2_6                                       \
        }                                                                                                                      \
    }

/* linear_float_avx512.c */
DECLARE_TILES(f32_avx512_tile);
linear_prepare K(prepare_float);
/* linear_group_avx512.c: the same for blocks of 128 columns */
DECLARE_TILES(f32_avx512_tile_128);
linear_prepare K(prepare_128);
linear_repack K(repack_bf16);
linear_unpack bf16_avx512_unpack;

extern const struct linear_type linear_f32_avx512, linear_f16_avx512, linear_bf16_avx512;
extern const struct linear_type linear_bf16_pairs_avx512; /* linear_bf16_avx512.c */
extern const struct linear_type linear_fp8_float_avx512;  /* linear_fp8_avx512.c */
extern const struct linear_type linear_mxfp4_float_avx512; /* linear_mxfp4_avx512.c */

#endif
