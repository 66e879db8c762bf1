/* linear_group.h: layout of int4_g128, int4_g32, int8_g128 and int8_g32, the same on AVX2 and AVX-512. A panel's block is
 * pieces ("subs") of 32 columns, then a dword for each of 16 rows. A vector of 64 bytes has a dword for each row, with 4
 * columns, the lowest first:
 *   4 bits  4 vectors a sub: columns 4p .. 4p + 3 in the low halves of the bytes, 16 columns later in the high halves
 *   8 bits  8 vectors a sub: columns 4p .. 4p + 3, signed
 * The last dwords are the scales. At 4 bits their lowest byte is the zero. A weight is (q - zero) * scale, rounded once. */
#ifndef LLMPY_LINEAR_GROUP_H
#define LLMPY_LINEAR_GROUP_H

#include "linear_type.h"

#include <string.h>

#define GROUP_HEADER 4u /* bytes before the numbers in a block of the file */
#define GROUP_SUB_BYTES(bits) (64u * (bits))
#define GROUP_BLOCK_BYTES(bits, columns) ((columns) / 32 * GROUP_SUB_BYTES(bits) + 64u)

/* The vector of a sub that holds column k, and the bits below it in its dword. */
#define GROUP_VECTOR(bits, k) ((bits) == 4 ? (k) % 16 / 4 : (k) / 4)
#define GROUP_SHIFT(bits, k) ((k) % 4 * 8 + ((bits) == 4 ? (k) / 16 * 4 : 0))

/* A strip of groups of any number of columns: what the last group lacks counts as zero. prepare makes strips of whole 32s, in
 * sub_bytes bytes a row. */
static inline void group_prepare(linear_prepare *prepare, uint32_t group_columns, size_t sub_bytes, const float *x,
                                 uint32_t stride, uint32_t n_rows, uint32_t n_cols, char *strip)
{
    const uint32_t whole = n_cols / 32 * 32, missing = (n_cols + group_columns - 1) / group_columns * group_columns - whole;
    float last[STRIP_MAX_ROWS][32] = {{0}};
    prepare(x, stride, n_rows, whole, strip);
    memset(strip += whole / 32 * sub_bytes * n_rows, 0, missing / 32 * sub_bytes * n_rows);
    if (n_cols == whole)
        return;
    for (uint32_t i = 0; i < n_rows; i++)
        memcpy(last[i], x + (size_t)i * stride + whole, (n_cols - whole) * sizeof *x);
    prepare(last[0], 32, n_rows, 32, strip);
}

#define EACH_GROUP_TYPE(X) X(int4_g128, 4, 128) X(int4_g32, 4, 32) X(int8_g128, 8, 128) X(int8_g32, 8, 32)

/* linear_group_avx2.c */
#define GROUP_DECLARE(type, bits, columns)                                                                                     \
    linear_repack linear_##type##_repack_avx2;                                                                                 \
    linear_unpack linear_##type##_unpack_avx2;                                                                                 \
    linear_expand linear_##type##_values_avx2;                                                                                 \
    linear_gemv linear_##type##_gemv_avx2;                                                                                     \
    extern const struct linear_type linear_##type##_float_avx2, linear_##type##_float_avx512;                                  \
    extern const struct linear_type linear_##type##_int8_avx2, linear_##type##_int8_avx512;
EACH_GROUP_TYPE(GROUP_DECLARE)
#undef GROUP_DECLARE

#endif
