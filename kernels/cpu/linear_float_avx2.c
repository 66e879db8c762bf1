/* Float arithmetic on AVX2: y[i] = one chain of fused multiply-adds over k = 0, 1, 2, ... from 0, of the weight's exact value
 * as float32 times the float32 activation. Panels are [k][16 rows] in the file's type (bfloat16: dword r of 8 = row r | row r
 * + 8 << 16, so that one shift and one mask widen 16 weights). Strips are [k][n_rows] floats. The tiles multiply the exact
 * values of quantised types too (value tiles). A tile is 6 rows x 16 weights. A 2-core Zen 3 reaches 96 to 99 % of its read
 * bandwidth with one row of bfloat16 and 70 to 80 % of its multiply peak with many. */
#include "linear_group.h"
#include "linear_quants_avx2.h"

#include <string.h>

/* block_values: columns of a block, up to which a row is padded with zeros. */
V_INLINE void prepare_blocks(const float *x, uint32_t stride, uint32_t n_rows, uint32_t n_cols, const uint32_t block_values,
                             char *strip)
{
    float *out = (float *)strip;
    uint32_t n_whole = n_cols / 8 * 8;
    if (n_rows == 1)
        memcpy(out, x, n_cols * sizeof *x);
    else
        for (uint32_t k = 0; k < n_cols; k += 8)
            for (uint32_t i = 0; i < n_rows; i++)
                for (uint32_t j = 0; j < (k < n_whole ? 8 : n_cols - k); j++)
                    out[(size_t)(k + j) * n_rows + i] = x[(size_t)i * stride + k + j];
    uint32_t padded = (n_cols + block_values - 1) / block_values * block_values;
    memset(out + (size_t)n_cols * n_rows, 0, (size_t)(padded - n_cols) * n_rows * sizeof *out);
}

static void prepare(const float *x, uint32_t stride, uint32_t n_rows, uint32_t n_cols, char *strip)
{
    prepare_blocks(x, stride, n_rows, n_cols, 32, strip);
}

static void prepare_64(const float *x, uint32_t stride, uint32_t n_rows, uint32_t n_cols, char *strip)
{
    prepare_blocks(x, stride, n_rows, n_cols, 64, strip);
}

static void prepare_128(const float *x, uint32_t stride, uint32_t n_rows, uint32_t n_cols, char *strip)
{
    prepare_blocks(x, stride, n_rows, n_cols, 128, strip);
}

static void prepare_512(const float *x, uint32_t stride, uint32_t n_rows, uint32_t n_cols, char *strip)
{
    prepare_blocks(x, stride, n_rows, n_cols, 512, strip);
}

/* ---- 16 weights of one k as floats ---- */

typedef void weights(const uint8_t *w, size_t k, __m256 *low, __m256 *high);

V_INLINE void f32_weights(const uint8_t *w, size_t k, __m256 *low, __m256 *high)
{
    *low = _mm256_load_ps((const float *)w + k * 16);
    *high = _mm256_load_ps((const float *)w + k * 16 + 8);
}

V_INLINE void f16_weights(const uint8_t *w, size_t k, __m256 *low, __m256 *high)
{
    *low = load_halves(w + k * 32);
    *high = load_halves(w + k * 32 + 16);
}

V_INLINE void bf16_weights(const uint8_t *w, size_t k, __m256 *low, __m256 *high)
{
    __m256i pairs = load_256(w + k * 32);
    *low = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
    *high = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32((int)0xffff0000)));
}

/* ---- tiles and gemv ---- */

V_INLINE void float_tile(weights *load, const uint32_t n_rows, const uint32_t block_values, const uint8_t *w, const float *x,
                         float *acc, uint32_t n_blocks, const char *next, uint32_t next_lines)
{
    __m256 c[FLOAT_ROWS][2];
    UNROLL for (uint32_t i = 0; i < n_rows; i++) {
        c[i][0] = _mm256_load_ps(acc + 16 * i);
        c[i][1] = _mm256_load_ps(acc + 16 * i + 8);
    }
    for (uint32_t block = 0; block < n_blocks; block++, next += (size_t)64 * next_lines) {
        prefetch_lines(next, next_lines);
        for (size_t k = (size_t)block * block_values, end = k + block_values; k < end; k++, x += n_rows) {
            __m256 low, high;
            load(w, k, &low, &high);
            IN_REGISTERS(low, high); /* widened once, not once a row */
            UNROLL for (uint32_t i = 0; i < n_rows; i++) {
                __m256 xi = _mm256_broadcast_ss(x + i);
                c[i][0] = _mm256_fmadd_ps(xi, low, c[i][0]);
                c[i][1] = _mm256_fmadd_ps(xi, high, c[i][1]);
            }
        }
    }
    UNROLL for (uint32_t i = 0; i < n_rows; i++) {
        _mm256_store_ps(acc + 16 * i, c[i][0]);
        _mm256_store_ps(acc + 16 * i + 8, c[i][1]);
    }
}

#define GEMV_AHEAD 4096 /* bytes that a gemv prefetches ahead of each stream of weights */

/* Two panels at a time: four chains hide the latency of the additions, and the hardware prefetcher follows two streams best. */
V_INLINE void float_gemv(weights *load, const size_t k_bytes, const uint32_t n_panels, const uint8_t *w, const float *x,
                         float *acc, uint32_t n_blocks)
{
    size_t panel_bytes = (size_t)n_blocks * 32 * k_bytes;
    __m256 c[4];
    UNROLL for (uint32_t i = 0; i < 2 * n_panels; i++)
        c[i] = _mm256_setzero_ps();
    for (size_t k = 0; k < (size_t)n_blocks * 32; k += 2)
        UNROLL for (uint32_t u = 0; u < 2; u++) {
            __m256 xk = _mm256_broadcast_ss(x + k + u);
            UNROLL for (uint32_t q = 0; q < n_panels; q++) {
                __m256 low, high;
                load(w + q * panel_bytes, k + u, &low, &high);
                if (k_bytes == 64 || u == 0)
                    _mm_prefetch((const char *)w + q * panel_bytes + (k + u) * k_bytes + GEMV_AHEAD, _MM_HINT_T0);
                c[2 * q] = _mm256_fmadd_ps(xk, low, c[2 * q]);
                c[2 * q + 1] = _mm256_fmadd_ps(xk, high, c[2 * q + 1]);
            }
        }
    UNROLL for (uint32_t i = 0; i < 2 * n_panels; i++)
        _mm256_store_ps(acc + 8 * i, c[i]);
}

#define TILE(name, load, block_values, rows)                                                                                   \
    static void name##_tile_##rows(const uint8_t *w, size_t panel_stride, const char *x, float *acc, uint32_t n_blocks,        \
                                   const char *next, uint32_t next_lines)                                                      \
    {                                                                                                                          \
        (void)panel_stride;                                                                                                    \
        float_tile(load, rows, block_values, w, (const float *)x, acc, n_blocks, next, next_lines);                            \
    }
#define TILES(name, load, block_values)                                                                                        \
    TILE(name, load, block_values, 1)                                                                                          \
    TILE(name, load, block_values, 2)                                                                                          \
    TILE(name, load, block_values, 3)                                                                                          \
    TILE(name, load, block_values, 4)                                                                                          \
    TILE(name, load, block_values, 5)                                                                                          \
    TILE(name, load, block_values, 6)
#define TILE_LIST(name)                                                                                                        \
    {NULL, name##_tile_1, name##_tile_2, name##_tile_3, name##_tile_4, name##_tile_5, name##_tile_6}
#define GEMV(name, k_bytes)                                                                                                    \
    static void name##_gemv(const uint8_t *w, const char *x, float *acc, uint32_t n_blocks, uint32_t n_panels)                 \
    {                                                                                                                          \
        size_t panel_bytes = (size_t)n_blocks * 32 * (k_bytes);                                                                \
        uint32_t p = 0;                                                                                                        \
        for (; p + 2 <= n_panels; p += 2)                                                                                      \
            float_gemv(name##_weights, k_bytes, 2, w + p * panel_bytes, (const float *)x, acc + 16 * p, n_blocks);             \
        if (p < n_panels)                                                                                                      \
            float_gemv(name##_weights, k_bytes, 1, w + p * panel_bytes, (const float *)x, acc + 16 * p, n_blocks);             \
    }

TILES(f32, f32_weights, 32)
TILES(f32_64, f32_weights, 64)
TILES(f32_128, f32_weights, 128)
TILES(f32_k, f32_weights, 256)
TILES(f32_512, f32_weights, 512)
TILES(f16, f16_weights, 32)
TILES(bf16, bf16_weights, 32)
GEMV(f32, 64)
GEMV(f16, 32)
GEMV(bf16, 32)

/* ---- layouts: 32 columns at a time, so that the lines being written stay in cache ---- */

static void f32_repack(const uint8_t *rows, size_t row_bytes, uint32_t first_lane, uint32_t n_lanes, uint32_t n_cols,
                       uint8_t *panel)
{
    float *out = (float *)panel;
    for (uint32_t first = 0; first < n_cols; first += 32)
        for (uint32_t i = 0; i < n_lanes; i++)
            for (uint32_t k = first; k < n_cols && k < first + 32; k++)
                memcpy(out + (size_t)k * 16 + first_lane + i, rows + i * row_bytes + (size_t)k * 4, 4);
}

/* place(lane): index of a row's 16 bits among the 16 rows of one k */
V_INLINE void repack_16_bits(uint32_t (*place)(uint32_t lane), const uint8_t *rows, size_t row_bytes, uint32_t first_lane,
                             uint32_t n_lanes, uint32_t n_cols, uint8_t *panel)
{
    for (uint32_t first = 0; first < n_cols; first += 32)
        for (uint32_t i = 0; i < n_lanes; i++) {
            uint8_t *out = panel + 2 * place(first_lane + i);
            for (uint32_t k = first; k < n_cols && k < first + 32; k++)
                memcpy(out + (size_t)k * 32, rows + i * row_bytes + (size_t)k * 2, 2);
        }
}

static uint32_t place_in_order(uint32_t lane)
{
    return lane;
}

static uint32_t place_in_pairs(uint32_t lane)
{
    return lane < 8 ? 2 * lane : 2 * (lane - 8) + 1;
}

static void f16_repack(const uint8_t *rows, size_t row_bytes, uint32_t first_lane, uint32_t n_lanes, uint32_t n_cols,
                       uint8_t *panel)
{
    repack_16_bits(place_in_order, rows, row_bytes, first_lane, n_lanes, n_cols, panel);
}

static void bf16_repack(const uint8_t *rows, size_t row_bytes, uint32_t first_lane, uint32_t n_lanes, uint32_t n_cols,
                        uint8_t *panel)
{
    repack_16_bits(place_in_pairs, rows, row_bytes, first_lane, n_lanes, n_cols, panel);
}

V_INLINE void float_unpack(weights *load, const uint8_t *w, uint32_t n_blocks, float *values)
{
    for (size_t k = 0; k < (size_t)n_blocks * 32; k++) {
        __m256 low, high;
        load(w, k, &low, &high);
        _mm256_storeu_ps(values + k * 16, low);
        _mm256_storeu_ps(values + k * 16 + 8, high);
    }
}

static void f32_unpack(const uint8_t *w, uint32_t n_blocks, float *values)
{
    float_unpack(f32_weights, w, n_blocks, values);
}

static void f16_unpack(const uint8_t *w, uint32_t n_blocks, float *values)
{
    float_unpack(f16_weights, w, n_blocks, values);
}

static void bf16_unpack(const uint8_t *w, uint32_t n_blocks, float *values)
{
    float_unpack(bf16_weights, w, n_blocks, values);
}

#define FLOAT_TYPE(type, label, number, k_bytes, slab)                                                                         \
    const struct linear_type linear_##type##_avx2 = {                                                                          \
        .name = label,                                                                                                         \
        .dtype = number,                                                                                                       \
        .arithmetic = ARITHMETIC_FLOAT,                                                                                        \
        .block_values = 32,                                                                                                    \
        .panel_block_bytes = 32 * (k_bytes),                                                                                   \
        .strip_block_bytes = 128,                                                                                              \
        .slab_blocks = slab,                                                                                                   \
        .max_rows = FLOAT_ROWS,                                                                                                \
        .max_panels = 1,                                                                                                       \
        .tile = {TILE_LIST(type)},                                                                                             \
        .gemv = type##_gemv,                                                                                                   \
        .prepare = prepare,                                                                                                    \
        .repack = type##_repack,                                                                                               \
        .unpack = type##_unpack,                                                                                               \
    }
FLOAT_TYPE(f32, "float32", DTYPE_F32, 64, 8);
FLOAT_TYPE(f16, "float16", DTYPE_F16, 32, 16);
FLOAT_TYPE(bf16, "bfloat16", DTYPE_BF16, 32, 16);

/* Quantised types: the tiles multiply exact values, unpacked a slab at a time. */
#define UNPACKED_TYPE(type, label, number, subs, bytes, tiles, first_row, pack)                                                \
    const struct linear_type linear_##type##_float_avx2 = {                                                                    \
        .name = label " float",                                                                                                \
        .dtype = number,                                                                                                       \
        .arithmetic = ARITHMETIC_FLOAT,                                                                                        \
        .block_values = 32 * (subs),                                                                                           \
        .panel_block_bytes = bytes,                                                                                            \
        .strip_block_bytes = 128 * (subs),                                                                                     \
        .expanded_block_bytes = 2048 * (subs),                                                                                 \
        .slab_blocks = (subs) < 8 ? 8 / (subs) : 1,                                                                            \
        .max_rows = FLOAT_ROWS,                                                                                                \
        .max_panels = 1,                                                                                                       \
        .tile = {TILE_LIST(tiles)},                                                                                            \
        .gemv = first_row,                                                                                                     \
        .prepare = pack,                                                                                                       \
        .repack = linear_##type##_repack_avx2,                                                                                 \
        .unpack = linear_##type##_unpack_avx2,                                                                                 \
        .expand = linear_##type##_values_avx2,                                                                                 \
    }
#define VALUES_TYPE(type, label, number, subs, bytes, tiles)                                                                   \
    UNPACKED_TYPE(type, label, number, subs, bytes, tiles, NULL, prepare)
VALUES_TYPE(q8_0, "q8_0", DTYPE_Q8_0, 1, 544, f32);
UNPACKED_TYPE(mxfp4, "mxfp4", DTYPE_MXFP4, 1, 288, f32, linear_mxfp4_gemv_avx2, prepare);
VALUES_TYPE(q4_0, "q4_0", DTYPE_Q4_0, 1, 288, f32);
VALUES_TYPE(q4_1, "q4_1", DTYPE_Q4_1, 1, 320, f32);
VALUES_TYPE(q5_0, "q5_0", DTYPE_Q5_0, 1, 352, f32);
VALUES_TYPE(q5_1, "q5_1", DTYPE_Q5_1, 1, 384, f32);
VALUES_TYPE(q2_k, "q2_k", DTYPE_Q2_K, 8, 1344, f32_k);
VALUES_TYPE(q3_k, "q3_k", DTYPE_Q3_K, 8, 1760, f32_k);
VALUES_TYPE(q4_k, "q4_k", DTYPE_Q4_K, 8, 2304, f32_k);
VALUES_TYPE(q5_k, "q5_k", DTYPE_Q5_K, 8, 2816, f32_k);
VALUES_TYPE(q6_k, "q6_k", DTYPE_Q6_K, 8, 3360, f32_k);
VALUES_TYPE(iq4_nl, "iq4_nl", DTYPE_IQ4_NL, 1, 288, f32);
VALUES_TYPE(iq4_xs, "iq4_xs", DTYPE_IQ4_XS, 8, 2176, f32_k);
VALUES_TYPE(iq3_xxs, "iq3_xxs", DTYPE_IQ3_XXS, 8, 1568, f32_k);
VALUES_TYPE(iq3_s, "iq3_s", DTYPE_IQ3_S, 8, 1760, f32_k);
VALUES_TYPE(iq2_xxs, "iq2_xxs", DTYPE_IQ2_XXS, 8, 1056, f32_k);
VALUES_TYPE(iq2_xs, "iq2_xs", DTYPE_IQ2_XS, 8, 1184, f32_k);
VALUES_TYPE(iq2_s, "iq2_s", DTYPE_IQ2_S, 8, 1312, f32_k);
VALUES_TYPE(iq1_s, "iq1_s", DTYPE_IQ1_S, 8, 800, f32_k);
VALUES_TYPE(iq1_m, "iq1_m", DTYPE_IQ1_M, 8, 896, f32_k);
VALUES_TYPE(tq1_0, "tq1_0", DTYPE_TQ1_0, 8, 864, f32_k);
VALUES_TYPE(tq2_0, "tq2_0", DTYPE_TQ2_0, 8, 1056, f32_k);
UNPACKED_TYPE(fp8, "fp8", DTYPE_FP8, 4, 2112, f32_128, linear_fp8_gemv_avx2, prepare_128);
UNPACKED_TYPE(nf4, "nf4", DTYPE_NF4, 2, 576, f32_64, linear_nf4_gemv_avx2, prepare_64);
UNPACKED_TYPE(fp4, "fp4", DTYPE_FP4, 2, 576, f32_64, linear_fp4_gemv_avx2, prepare_64);
UNPACKED_TYPE(table4, "table4", DTYPE_TABLE4, 16, 5120, f32_512, NULL, prepare_512);
UNPACKED_TYPE(int4_g128, "int4_g128", DTYPE_INT4_G128, 4, GROUP_BLOCK_BYTES(4, 128), f32_128, linear_int4_g128_gemv_avx2,
              prepare_128);
UNPACKED_TYPE(int4_g32, "int4_g32", DTYPE_INT4_G32, 1, GROUP_BLOCK_BYTES(4, 32), f32, linear_int4_g32_gemv_avx2, prepare);
UNPACKED_TYPE(int8_g128, "int8_g128", DTYPE_INT8_G128, 4, GROUP_BLOCK_BYTES(8, 128), f32_128, linear_int8_g128_gemv_avx2,
              prepare_128);
UNPACKED_TYPE(int8_g32, "int8_g32", DTYPE_INT8_G32, 1, GROUP_BLOCK_BYTES(8, 32), f32, linear_int8_g32_gemv_avx2, prepare);
