/* attention_tile.h: the register tiles of attention: up to TILE_ROWS rows (a row is a query row of one head) against one tile
 * of 64 keys. A tile is four groups of kv.h, each with a separate address. Every sum is one chain in a fixed order for each
 * element, so neither the number of rows in a register tile nor the number of columns in a pass changes a bit. Included by
 * attention.c and latent_attention.c. */
#ifndef LLMPY_ATTENTION_TILE_H
#define LLMPY_ATTENTION_TILE_H

#include "kv.h"
#include "simd.h"

#include <math.h>
#include <string.h>

#define TILE_KEYS 64u
#define TILE_GROUPS (TILE_KEYS / KV_GROUP)
#define TILE_ROWS 6u                      /* of a register tile */
#define TILE_VECTORS (TILE_KEYS / LANES)
#ifndef QUERY_STRIDE
#define QUERY_STRIDE 272u                 /* floats from query to query: a constant, and no power of two */
#endif

V_INLINE vf kv_load(const char *p, uint32_t dtype)
{
    switch (dtype) {
    case DTYPE_F32: return v_load((const float *)p);
    case DTYPE_F16: return v_load_f16((const uint16_t *)p);
    case DTYPE_FP8: return v_load_e4m3((const uint8_t *)p);
    case DTYPE_I8: return v_load_i8((const int8_t *)p);
    default: return v_load_bf16((const uint16_t *)p);
    }
}

/* s[r][64] = chain over d of q[r][d] * k[d][j], for nv vectors of keys at a time. Meanwhile prefetches the same part of the
 * groups at `next`, which come after these. */
V_INLINE void scores_pass(uint32_t rows, uint32_t nv, uint32_t dtype, const float *q, const char *const *keys,
                          const char *const *next, uint32_t first, uint32_t head_dim, float *s)
{
    const uint32_t item = (uint32_t)kv_item_bytes(dtype);
    const char *k[8], *ahead[8];
    vf sum[TILE_ROWS][8];
#pragma GCC unroll 8
    for (uint32_t v = 0; v < nv; v++) {
        uint32_t key = (first + v) * LANES;
        k[v] = keys[key / KV_GROUP] + key % KV_GROUP * item;
        ahead[v] = next[key / KV_GROUP] + key % KV_GROUP * item;
    }
#pragma GCC unroll 8
    for (uint32_t r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (uint32_t v = 0; v < nv; v++)
            sum[r][v] = v_zero();
    for (size_t d = 0; d < head_dim; d++) {
        vf key[8];
#pragma GCC unroll 8
        for (uint32_t v = 0; v < nv; v++) {
            key[v] = kv_load(k[v] + d * KV_GROUP * item, dtype);
            _mm_prefetch(ahead[v] + d * KV_GROUP * item, _MM_HINT_T1);
        }
#pragma GCC unroll 8
        for (uint32_t r = 0; r < rows; r++) {
            vf x = v_set1(q[r * QUERY_STRIDE + d]);
#pragma GCC unroll 8
            for (uint32_t v = 0; v < nv; v++)
                sum[r][v] = v_fma(x, key[v], sum[r][v]);
        }
    }
#pragma GCC unroll 8
    for (uint32_t r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (uint32_t v = 0; v < nv; v++)
            v_store(s + r * TILE_KEYS + (first + v) * LANES, sum[r][v]);
}

/* o[r][c] = a[r] * o[r][c], then the chain over keys j0 <= j < j1 of p[r][j] * v[j][c], for nc vectors of columns from c on.
 * If a[r] is 0, the chain starts from 0 and the contents of o are ignored. */
V_INLINE void values_pass(uint32_t rows, uint32_t nc, uint32_t dtype, const float *p, const float *a, const char *const *values,
                          const char *const *next, uint32_t c, uint32_t value_dim, uint32_t j0, uint32_t j1, float *o)
{
    const size_t item = kv_item_bytes(dtype), stride = value_dim * item;
    vf sum[TILE_ROWS][8];
#pragma GCC unroll 8
    for (uint32_t r = 0; r < rows; r++) {
        vf factor = v_set1(a[r]);
        vm is_fresh = v_eq(factor, v_zero());
#pragma GCC unroll 8
        for (uint32_t v = 0; v < nc; v++)
            sum[r][v] = v_select(is_fresh, v_zero(), v_mul(factor, v_load(o + r * value_dim + c + v * LANES)));
    }
    for (uint32_t j = j0; j < j1;) {
        uint32_t end = (j / KV_GROUP + 1) * KV_GROUP;
        const char *row = values[j / KV_GROUP] + (j % KV_GROUP) * stride + c * item;
        ptrdiff_t ahead = next[j / KV_GROUP] - values[j / KV_GROUP];
        for (end = end < j1 ? end : j1; j < end; j++, row += stride) {
            vf value[8];
#pragma GCC unroll 8
            for (uint32_t v = 0; v < nc; v++) {
                value[v] = kv_load(row + v * LANES * item, dtype);
                _mm_prefetch(row + ahead + v * LANES * item, _MM_HINT_T1);
            }
#pragma GCC unroll 8
            for (uint32_t r = 0; r < rows; r++) {
                vf x = v_set1(p[r * TILE_KEYS + j]);
#pragma GCC unroll 8
                for (uint32_t v = 0; v < nc; v++)
                    sum[r][v] = v_fma(x, value[v], sum[r][v]);
            }
        }
    }
#pragma GCC unroll 8
    for (uint32_t r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (uint32_t v = 0; v < nc; v++)
            v_store(o + r * value_dim + c + v * LANES, sum[r][v]);
}

/* Vectors of a pass: as many as fit into the registers beside the operands. */
#if LANES == 16
#define SCORES_VECTORS(rows) 4u
#define VALUES_VECTORS(rows) ((rows) > 3 ? 4u : 8u)
#else
#define SCORES_VECTORS(rows) ((rows) > 3 ? 2u : (rows) > 1 ? 4u : 8u)
#define VALUES_VECTORS(rows) ((rows) > 3 ? 2u : (rows) > 1 ? 4u : 8u)
#endif

/* Computes the scores of at least the first n_keys keys. */
V_INLINE void scores_any(uint32_t rows, uint32_t dtype, const float *q, const char *const *keys, const char *const *next,
                         uint32_t head_dim, uint32_t n_keys, float *s)
{
    if (n_keys <= 2 * LANES) {
        scores_pass(rows, 2, dtype, q, keys, next, 0, head_dim, s);
        return;
    }
    for (uint32_t first = 0; first * LANES < n_keys; first += SCORES_VECTORS(rows))
        scores_pass(rows, SCORES_VECTORS(rows), dtype, q, keys, next, first, head_dim, s);
}

V_INLINE void values_any(uint32_t rows, uint32_t dtype, const float *p, const float *a, const char *const *values,
                         const char *const *next, uint32_t value_dim, uint32_t j0, uint32_t j1, float *o)
{
    const uint32_t step = VALUES_VECTORS(rows);
    uint32_t c = 0;
    for (; c + step * LANES <= value_dim; c += step * LANES)
        values_pass(rows, step, dtype, p, a, values, next, c, value_dim, j0, j1, o);
    for (; c + 2 * LANES <= value_dim; c += 2 * LANES)
        values_pass(rows, 2, dtype, p, a, values, next, c, value_dim, j0, j1, o);
    if (c < value_dim)
        values_pass(rows, 1, dtype, p, a, values, next, c, value_dim, j0, j1, o);
}

typedef void scores_tile(const float *q, const char *const *keys, const char *const *next, uint32_t head_dim, uint32_t n_keys,
                         float *s);
typedef void values_tile(const float *p, const float *a, const char *const *values, const char *const *next, uint32_t value_dim,
                         uint32_t j0, uint32_t j1, float *o);

#define TILE(type, dtype, rows)                                                                                      \
    static void scores_##type##_##rows(const float *q, const char *const *keys, const char *const *next,             \
                                       uint32_t head_dim, uint32_t n_keys, float *s)                                 \
    {                                                                                                                \
        scores_any(rows, dtype, q, keys, next, head_dim, n_keys, s);                                                 \
    }                                                                                                                \
    static void values_##type##_##rows(const float *p, const float *a, const char *const *values,                    \
                                       const char *const *next, uint32_t value_dim, uint32_t j0, uint32_t j1,        \
                                       float *o)                                                                     \
    {                                                                                                                \
        values_any(rows, dtype, p, a, values, next, value_dim, j0, j1, o);                                           \
    }
#define TILES(type, dtype) \
    TILE(type, dtype, 1) TILE(type, dtype, 2) TILE(type, dtype, 3) TILE(type, dtype, 4) TILE(type, dtype, 5) \
    TILE(type, dtype, 6)
TILES(f32, DTYPE_F32)
TILES(f16, DTYPE_F16)
TILES(bf16, DTYPE_BF16)
TILES(e4m3, DTYPE_FP8)
TILES(i8, DTYPE_I8)

#define TILE_ROW(name, type) {name##_##type##_1, name##_##type##_2, name##_##type##_3, name##_##type##_4, name##_##type##_5, \
                              name##_##type##_6}
enum { TILE_F32, TILE_F16, TILE_BF16, TILE_E4M3, TILE_I8 };
static scores_tile *const SCORES[][TILE_ROWS] = {TILE_ROW(scores, f32), TILE_ROW(scores, f16), TILE_ROW(scores, bf16),
                                                 TILE_ROW(scores, e4m3), TILE_ROW(scores, i8)};
static values_tile *const VALUES[][TILE_ROWS] = {TILE_ROW(values, f32), TILE_ROW(values, f16), TILE_ROW(values, bf16),
                                                 TILE_ROW(values, e4m3), TILE_ROW(values, i8)};

static inline uint32_t tile_type(uint32_t dtype)
{
    switch (dtype) {
    case DTYPE_F32: return TILE_F32;
    case DTYPE_F16: return TILE_F16;
    case DTYPE_FP8: return TILE_E4M3;
    case DTYPE_I8: return TILE_I8;
    default: return TILE_BF16;
    }
}

/* Multiplies a row's 64 scores or weights by the keys' scales, 16 from the place `at` of each group on. */
static inline void scale_tile(float *s, const char *const *groups, size_t at)
{
    for (uint32_t j = 0; j < TILE_KEYS; j += LANES) {
        const float *scales = (const float *)(groups[j / KV_GROUP] + at) + j % KV_GROUP;
        v_store(s + j, v_mul(v_load(s + j), v_load(scales)));
    }
}

/* Mask of the tile's keys lo <= i < hi in vector v. */
V_INLINE vm tile_visible(uint32_t v, uint32_t lo, uint32_t hi)
{
    uint32_t first = v * LANES, from = lo > first ? lo - first : 0, to = hi > first ? hi - first : 0;
    vf lane = v_from_int(vi_lane());
    vf low = v_set1((float)from), high = v_set1((float)to);
    return v_lt(v_select(v_lt(lane, low), high, lane), high); /* lane >= low and lane < high */
}

/* One row's softmax step over the keys lo <= j < hi of a tile. s becomes p (0 for hidden keys), m the new maximum, l the sums
 * of p by lane. Returns the factor for the earlier sums.
 *   cap       0, or the soft cap times log2 e
 *   slope     0, or the row's slope times log2 e
 *   distance  position of the tile's first key minus the row's position */
static inline float softmax_step(float *s, uint32_t lo, uint32_t hi, float cap, float slope, float distance, float *m, float *l)
{
    vf u[TILE_VECTORS];
    bool is_full = lo == 0 && hi == TILE_KEYS;
    for (uint32_t v = 0; v < TILE_VECTORS; v++) {
        u[v] = v_load(s + v * LANES);
        if (cap > 0)
            u[v] = v_mul(v_set1(cap), v_tanh(u[v]));
        if (slope != 0)
            u[v] = v_fma(v_set1(slope), v_add(v_set1(distance + (float)(v * LANES)), v_from_int(vi_lane())), u[v]);
        if (!is_full)
            u[v] = v_select(tile_visible(v, lo, hi), u[v], v_set1(-INFINITY));
    }
    vf top = v_max(v_max(u[0], u[1]), v_max(u[2], u[3]));
#if LANES == 8
    top = v_max(top, v_max(v_max(u[4], u[5]), v_max(u[6], u[7])));
#endif
    float old = *m, tile_top = v_hmax(top), next = old > tile_top ? old : tile_top;
    float a = 1.0f;
    if (old != next)
        a = v_first_lane(v_exp2(v_set1(old - next)));
    for (uint32_t v = 0; v < TILE_VECTORS; v++) {
        u[v] = v_exp2(v_sub(u[v], v_set1(next)));
        v_store(s + v * LANES, u[v]);
    }
    vf sum = v_add(v_add(u[0], u[1]), v_add(u[2], u[3]));
#if LANES == 8
    sum = v_add(sum, v_add(v_add(u[4], u[5]), v_add(u[6], u[7])));
#endif
    v_store(l, v_fma(v_set1(a), v_load(l), sum));
    *m = next;
    return a;
}

static inline void state_clear(float *o, float *l, float *m, uint32_t width)
{
    memset(o, 0, width * sizeof *o);
    memset(l, 0, LANES * sizeof *l);
    *m = -INFINITY;
}

/* Folds the next split into the sums of the earlier splits (a left fold). */
static inline void state_fold(float *sum_o, float *sum_l, float *sum_m, const float *o, const float *l, float m, uint32_t width)
{
    float top = *sum_m > m ? *sum_m : m;
    vf old = v_exp2(v_set1(*sum_m - top)), new = v_exp2(v_set1(m - top));
    for (uint32_t i = 0; i < width; i += LANES)
        v_store(sum_o + i, v_fma(v_load(o + i), new, v_mul(v_load(sum_o + i), old)));
    v_store(sum_l, v_fma(v_load(l), new, v_mul(v_load(sum_l), old)));
    *sum_m = top;
}

#endif
