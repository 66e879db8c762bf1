/* linear_avx2.h: declarations that the AVX2 files of the linear share:
 *   linear_float_avx2.c   float arithmetic
 *   linear_int8_avx2.c    integer arithmetic
 *   linear_layout_avx2.c  moves weights between the file's layout, panels and exact values
 *   linear_mxfp4_avx2.c   the same for MXFP4, and its product with one row
 *   linear_fp8_avx2.c     the same for FP8, and its product with one row
 *   linear_iq_avx2.c      the same for GGUF's IQ and TQ types, by the templates of linear_rows_avx2.h
 *   linear_types_avx2.c   the table of weight types */
#ifndef LLMPY_LINEAR_AVX2_H
#define LLMPY_LINEAR_AVX2_H

#include "linear_type.h"
#include "simd.h"

#define UNROLL _Pragma("GCC unroll 64")
#define FLOAT_ROWS 6u /* 12 sums, 2 weights, 1 activation: 15 registers of 16 */
#define INT8_ROWS 4u  /* 8 sums, 2 weights, 2 temporaries */

/* linear_float_avx2.c */
extern const struct linear_type linear_f32_avx2, linear_f16_avx2, linear_bf16_avx2;

V_INLINE void prefetch_lines(const char *next, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        _mm_prefetch(next + (size_t)64 * i, _MM_HINT_T0);
}

V_INLINE __m256i load_256(const void *p)
{
    return _mm256_load_si256(p);
}

/* 8 float16 as 8 floats, exact */
V_INLINE __m256 load_halves(const uint8_t *p)
{
    return _mm256_cvtph_ps(_mm_load_si128((const void *)p));
}

#endif
