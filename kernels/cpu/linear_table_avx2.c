/* NF4, FP4 and TABLE4 weights (the last at the end). NF4 and FP4 have 64 columns of 4 bits that choose one of 16 values, and a
 * float32 scale. A panel's block is 576 bytes, [32 pairs of adjacent columns][16 rows] bytes, the first column in the low half,
 * then the scales of the 16 rows. The file's bits are moved, never changed. A value is one product, rounded once, as in
 * dtype.c. Bound: 3 instructions for 8 lookups. */
#include "linear_quants_avx2.h"

#include <string.h>

#define COLUMNS 64u
#define PAIRS (COLUMNS / 2)
#define SCALES (PAIRS * 16u)
#define BLOCK_BYTES (SCALES + 64u)
#define FILE_BYTES (4u + PAIRS)

/* The 16 values of dtype.c. */
static const float NF4[16] = {
    -1, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f, -0.18477343022823334f,
    -0.09105003625154495f, 0, 0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1};
static const float FP4[16] = {0, 0.0625f / 12,  8.0f / 12,  1,  4.0f / 12,  0.5f,  2.0f / 12,  0.25f,
                              0, -0.0625f / 12, -8.0f / 12, -1, -4.0f / 12, -0.5f, -2.0f / 12, -0.25f};

static void repack(const uint8_t *rows, size_t row_bytes, uint32_t first_lane, uint32_t n_lanes, uint32_t n_cols,
                   uint8_t *panel)
{
    for (uint32_t block = 0; block * COLUMNS < n_cols; block++, panel += BLOCK_BYTES)
        for (uint32_t i = 0; i < n_lanes; i++) {
            const uint8_t *b = rows + i * row_bytes + (size_t)block * FILE_BYTES;
            for (uint32_t j = 0; j < PAIRS; j++)
                panel[16 * j + first_lane + i] = b[4 + j];
            memcpy(panel + SCALES + 4 * (first_lane + i), b, 4);
        }
}

struct table {
    __m256 low, high;
};

V_INLINE struct table load_table(const float *values)
{
    return (struct table){_mm256_loadu_ps(values), _mm256_loadu_ps(values + 8)};
}

/* The values of 8 rows of a column; q: their numbers, in the low 4 bits of dwords whose other bits do not matter. */
V_INLINE __m256 values_of(const struct table *table, __m256i q, __m256 scale)
{
    __m256 low = _mm256_permutevar8x32_ps(table->low, q), high = _mm256_permutevar8x32_ps(table->high, q);
    return _mm256_mul_ps(_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(q, 28))), scale);
}

/* Bytes of 8 rows as dwords. */
V_INLINE __m256i eight_bytes(const uint8_t *w)
{
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)w));
}

V_INLINE void unpack(const float *values_of_type, const uint8_t *w, uint32_t n_blocks, float *values)
{
    const struct table table = load_table(values_of_type);
    for (; n_blocks > 0; n_blocks--, w += BLOCK_BYTES)
        for (uint32_t j = 0; j < PAIRS; j++, values += 32)
            UNROLL for (uint32_t half = 0; half < 2; half++) {
                __m256i both = eight_bytes(w + 16 * j + 8 * half);
                __m256 scale = _mm256_loadu_ps((const float *)(w + SCALES) + 8 * half);
                _mm256_storeu_ps(values + 8 * half, values_of(&table, both, scale));
                _mm256_storeu_ps(values + 16 + 8 * half, values_of(&table, _mm256_srli_epi32(both, 4), scale));
            }
}

/* One row: the weights become values in registers, in the chain of the tiles. Two panels hide the latency of the additions. */
V_INLINE void panels(const float *values, const uint8_t *w, const uint32_t n_panels, const float *x, float *acc,
                     uint32_t n_blocks)
{
    const struct table table = load_table(values);
    const size_t panel_bytes = (size_t)n_blocks * BLOCK_BYTES;
    __m256 c[2][2];
    UNROLL for (uint32_t q = 0; q < n_panels; q++)
        c[q][0] = c[q][1] = _mm256_setzero_ps();
    for (uint32_t block = 0; block < n_blocks; block++, w += BLOCK_BYTES)
        for (uint32_t j = 0; j < PAIRS; j++, x += 2) {
            __m256 first = _mm256_broadcast_ss(x), second = _mm256_broadcast_ss(x + 1);
            UNROLL for (uint32_t q = 0; q < n_panels; q++)
                UNROLL for (uint32_t half = 0; half < 2; half++) {
                    const uint8_t *b = w + q * panel_bytes;
                    __m256i both = eight_bytes(b + 16 * j + 8 * half);
                    __m256 scale = _mm256_loadu_ps((const float *)(b + SCALES) + 8 * half);
                    c[q][half] = _mm256_fmadd_ps(first, values_of(&table, both, scale), c[q][half]);
                    c[q][half] = _mm256_fmadd_ps(second, values_of(&table, _mm256_srli_epi32(both, 4), scale), c[q][half]);
                }
        }
    UNROLL for (uint32_t q = 0; q < n_panels; q++) {
        _mm256_storeu_ps(acc + 16 * q, c[q][0]);
        _mm256_storeu_ps(acc + 16 * q + 8, c[q][1]);
    }
}

#define TABLE_TYPE(type, values_of_type)                                                                                       \
    void linear_##type##_repack_avx2(const uint8_t *rows, size_t row_bytes, uint32_t first_lane, uint32_t n_lanes,             \
                                     uint32_t n_cols, uint8_t *panel)                                                          \
    {                                                                                                                          \
        repack(rows, row_bytes, first_lane, n_lanes, n_cols, panel);                                                           \
    }                                                                                                                          \
    void linear_##type##_unpack_avx2(const uint8_t *w, uint32_t n_blocks, float *values)                                       \
    {                                                                                                                          \
        unpack(values_of_type, w, n_blocks, values);                                                                           \
    }                                                                                                                          \
    void linear_##type##_values_avx2(const uint8_t *w, uint32_t n_blocks, uint8_t *values)                                     \
    {                                                                                                                          \
        unpack(values_of_type, w, n_blocks, (float *)values);                                                                  \
    }                                                                                                                          \
    void linear_##type##_gemv_avx2(const uint8_t *w, const char *x, float *acc, uint32_t n_blocks, uint32_t n_panels)          \
    {                                                                                                                          \
        const size_t panel_bytes = (size_t)n_blocks * BLOCK_BYTES;                                                             \
        for (; n_panels >= 2; n_panels -= 2, w += 2 * panel_bytes, acc += 32)                                                  \
            panels(values_of_type, w, 2, (const float *)x, acc, n_blocks);                                                     \
        if (n_panels)                                                                                                          \
            panels(values_of_type, w, 1, (const float *)x, acc, n_blocks);                                                     \
    }
TABLE_TYPE(nf4, NF4)
TABLE_TYPE(fp4, FP4)

/* ---- TABLE4: 512 columns and 16 values for each row. A panel's block is 5120 bytes, [256 pairs of adjacent columns][16 rows]
 * bytes, then the values of the 16 rows. Right, not fast: a value is a load of its own. ---- */

#define TABLE4_PAIRS 256u
#define TABLE4_VALUES (TABLE4_PAIRS * 16u)
#define TABLE4_BLOCK_BYTES (TABLE4_VALUES + 16u * 64u)
#define TABLE4_FILE_BYTES (64u + TABLE4_PAIRS)

void linear_table4_repack_avx2(const uint8_t *rows, size_t row_bytes, uint32_t first_lane, uint32_t n_lanes, uint32_t n_cols,
                               uint8_t *panel)
{
    for (uint32_t block = 0; block * 2 * TABLE4_PAIRS < n_cols; block++, panel += TABLE4_BLOCK_BYTES)
        for (uint32_t i = 0, lane = first_lane; i < n_lanes; i++, lane++) {
            const uint8_t *b = rows + i * row_bytes + (size_t)block * TABLE4_FILE_BYTES;
            memcpy(panel + TABLE4_VALUES + 64 * lane, b, 64);
            for (uint32_t j = 0; j < TABLE4_PAIRS; j++)
                panel[16 * j + lane] = b[64 + j];
        }
}

void linear_table4_unpack_avx2(const uint8_t *w, uint32_t n_blocks, float *values)
{
    for (; n_blocks > 0; n_blocks--, w += TABLE4_BLOCK_BYTES) {
        const float *of_rows = (const float *)(w + TABLE4_VALUES);
        for (uint32_t j = 0; j < TABLE4_PAIRS; j++, values += 32)
            for (uint32_t row = 0; row < 16; row++) {
                values[row] = of_rows[16 * row + (w[16 * j + row] & 15)];
                values[16 + row] = of_rows[16 * row + (w[16 * j + row] >> 4)];
            }
    }
}

void linear_table4_values_avx2(const uint8_t *w, uint32_t n_blocks, uint8_t *values)
{
    linear_table4_unpack_avx2(w, n_blocks, (float *)values);
}
