/* Integers in groups with float32 scales (linear_group.h): from the file into panels, from panels to exact values, and the
 * product with one row, y[r] = one chain of fused multiply-adds over k of the weight's value times x[k]. Bound: one row by the
 * bytes of the weights, 4.25 bits a weight with groups of 128 and 5 with 32; on AVX2 also by some 5 instructions for 8. */
#include "linear_group.h"
#include "linear_quants_avx2.h"

#include <string.h>

#define GEMV_AHEAD 4096 /* bytes that a gemv prefetches ahead of each stream of weights */

/* Moves a row's numbers of one sub. */
V_INLINE void repack_sub(const uint8_t *b, const uint32_t bits, uint32_t row, uint8_t *sub)
{
    for (uint32_t v = 0; v < bits; v++)
        for (uint32_t j = 0; j < 4; j++) {
            uint32_t k = 4 * v + j;
            uint8_t low = b[k / 2] >> k % 2 * 4 & 15, high = (uint8_t)(b[8 + k / 2] >> k % 2 * 4 << 4);
            sub[64 * v + 4 * row + j] = bits == 8 ? b[k] : (uint8_t)(low | high);
        }
}

V_INLINE void repack(const uint8_t *rows, size_t row_bytes, uint32_t first_lane, uint32_t n_lanes, uint32_t n_cols,
                     uint8_t *panel, const uint32_t bits, const uint32_t columns)
{
    const size_t file_bytes = GROUP_HEADER + columns * bits / 8, block_bytes = GROUP_BLOCK_BYTES(bits, columns);
    for (uint32_t i = 0; i < n_lanes; i++) {
        const uint8_t *b = rows + i * row_bytes;
        uint8_t *w = panel;
        for (uint32_t col = 0; col < n_cols; col += columns, b += file_bytes, w += block_bytes) {
            for (uint32_t s = 0; s < columns / 32; s++)
                repack_sub(b + GROUP_HEADER + s * 4 * bits, bits, first_lane + i, w + s * GROUP_SUB_BYTES(bits));
            memcpy(w + block_bytes - 64 + 4 * (first_lane + i), b, GROUP_HEADER);
        }
    }
}

struct scales {
    __m256 scale[2], zero[2];
};

V_INLINE struct scales scales_of(const uint8_t *dwords, const uint32_t bits)
{
    struct scales s;
    UNROLL for (uint32_t half = 0; half < 2; half++) {
        __m256i both = load_256(dwords + 32 * half), low = _mm256_set1_epi32(bits == 4 ? 255 : 0);
        s.scale[half] = _mm256_castsi256_ps(_mm256_andnot_si256(low, both));
        s.zero[half] = _mm256_cvtepi32_ps(_mm256_and_si256(low, both));
    }
    return s;
}

/* The values of 8 rows of column k of a sub. */
V_INLINE __m256 values_of(const uint8_t *sub, const struct scales *s, const uint32_t bits, const uint32_t k, uint32_t half)
{
    const int shift = (int)GROUP_SHIFT(bits, k);
    __m256i dwords = load_256(sub + 64 * GROUP_VECTOR(bits, k) + 32 * half);
    if (bits == 8)
        return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(dwords, 24 - shift), 24)), s->scale[half]);
    __m256i q = _mm256_and_si256(_mm256_srli_epi32(dwords, shift), _mm256_set1_epi32(15));
    return _mm256_mul_ps(_mm256_sub_ps(_mm256_cvtepi32_ps(q), s->zero[half]), s->scale[half]);
}

V_INLINE void unpack(const uint8_t *w, uint32_t n_blocks, float *values, const uint32_t bits, const uint32_t columns)
{
    const size_t block_bytes = GROUP_BLOCK_BYTES(bits, columns);
    for (; n_blocks > 0; n_blocks--, w += block_bytes) {
        struct scales s = scales_of(w + block_bytes - 64, bits);
        for (uint32_t sub = 0; sub < columns / 32; sub++, values += 32 * 16)
            UNROLL for (uint32_t k = 0; k < 32; k++)
                UNROLL for (uint32_t half = 0; half < 2; half++)
                    _mm256_storeu_ps(values + 16 * k + 8 * half,
                                     values_of(w + sub * GROUP_SUB_BYTES(bits), &s, bits, k, half));
    }
}

/* One row times 1 or 2 panels; two hide the latency of the additions. */
V_INLINE void panels(const uint8_t *w, const uint32_t n_panels, const float *x, float *acc, uint32_t n_blocks,
                     const uint32_t bits, const uint32_t columns)
{
    const size_t block_bytes = GROUP_BLOCK_BYTES(bits, columns), panel_bytes = n_blocks * block_bytes;
    __m256 c[2][2];
    struct scales s[2];
    UNROLL for (uint32_t q = 0; q < n_panels; q++)
        c[q][0] = c[q][1] = _mm256_setzero_ps();
    for (uint32_t block = 0; block < n_blocks; block++, w += block_bytes) {
        UNROLL for (uint32_t q = 0; q < n_panels; q++)
            s[q] = scales_of(w + q * panel_bytes + block_bytes - 64, bits);
        for (uint32_t sub = 0; sub < columns / 32; sub++, x += 32) {
            const uint8_t *from = w + sub * GROUP_SUB_BYTES(bits);
            UNROLL for (uint32_t q = 0; q < n_panels; q++)
                prefetch_lines((const char *)from + q * panel_bytes + GEMV_AHEAD, bits + 1);
            UNROLL for (uint32_t k = 0; k < 32; k++) {
                __m256 xk = _mm256_broadcast_ss(x + k);
                UNROLL for (uint32_t q = 0; q < n_panels; q++)
                    UNROLL for (uint32_t half = 0; half < 2; half++)
                        c[q][half] = _mm256_fmadd_ps(xk, values_of(from + q * panel_bytes, &s[q], bits, k, half), c[q][half]);
            }
        }
    }
    UNROLL for (uint32_t q = 0; q < n_panels; q++) {
        _mm256_storeu_ps(acc + 16 * q, c[q][0]);
        _mm256_storeu_ps(acc + 16 * q + 8, c[q][1]);
    }
}

#define GROUP_TYPE(type, bits, columns)                                                                                        \
    void linear_##type##_repack_avx2(const uint8_t *rows, size_t row_bytes, uint32_t first_lane, uint32_t n_lanes,             \
                                     uint32_t n_cols, uint8_t *panel)                                                          \
    {                                                                                                                          \
        repack(rows, row_bytes, first_lane, n_lanes, n_cols, panel, bits, columns);                                            \
    }                                                                                                                          \
    void linear_##type##_unpack_avx2(const uint8_t *w, uint32_t n_blocks, float *values)                                       \
    {                                                                                                                          \
        unpack(w, n_blocks, values, bits, columns);                                                                            \
    }                                                                                                                          \
    void linear_##type##_values_avx2(const uint8_t *w, uint32_t n_blocks, uint8_t *values)                                     \
    {                                                                                                                          \
        unpack(w, n_blocks, (float *)values, bits, columns);                                                                   \
    }                                                                                                                          \
    void linear_##type##_gemv_avx2(const uint8_t *w, const char *x, float *acc, uint32_t n_blocks, uint32_t n_panels)          \
    {                                                                                                                          \
        const size_t panel_bytes = (size_t)n_blocks * GROUP_BLOCK_BYTES(bits, columns);                                        \
        for (; n_panels >= 2; n_panels -= 2, w += 2 * panel_bytes, acc += 32)                                                  \
            panels(w, 2, (const float *)x, acc, n_blocks, bits, columns);                                                      \
        if (n_panels)                                                                                                          \
            panels(w, 1, (const float *)x, acc, n_blocks, bits, columns);                                                      \
    }
EACH_GROUP_TYPE(GROUP_TYPE)

V_INLINE void expand_words(const uint8_t *w, uint32_t n_blocks, const uint32_t columns, uint8_t *words)
{
    for (; n_blocks > 0; n_blocks--, w += GROUP_BLOCK_BYTES(8, columns))
        for (uint32_t sub = 0; sub < columns / 32; sub++, words += WORDS_SUB_BYTES) {
            UNROLL for (uint32_t pair = 0; pair < 16; pair++)
                UNROLL for (uint32_t half = 0; half < 2; half++)
                    _mm256_store_si256((void *)(words + 64 * pair + 32 * half),
                                       group_pair(w + sub * GROUP_SUB_BYTES(8), pair, half));
            memcpy(words + WORDS_SCALE, w + GROUP_BLOCK_BYTES(8, columns) - 64, 64);
        }
}
void linear_int8_g128_expand_avx2(const uint8_t *w, uint32_t n_blocks, uint8_t *words)
{
    expand_words(w, n_blocks, 128, words);
}
void linear_int8_g32_expand_avx2(const uint8_t *w, uint32_t n_blocks, uint8_t *words)
{
    expand_words(w, n_blocks, 32, words);
}
