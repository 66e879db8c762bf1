/* Integer arithmetic on AVX2. Activations: 32 columns of a row become int8 with one float32 scale, s = max|x| / 127, rounded
 * to nearest even (unbiased). The error is 0.5 % of a row's norm (1.3 % with channels 50 times the others), whatever the
 * weight type. The sum over a sub of 32 columns is integer and exact in any order. The only float chain, subs ascending, is
 *   y = fma(float(isum), scale * s, y), then y = fma(addend, s * sum(x), y) if the type has an addend
 *   isum = sum of (q - offset) x
 * With integer scales for each 16 columns:
 *   isum = sc0 * isum0 + sc1 * isum1 (below 2^24), y = fma(float(sum of minimums * sums of x), addend * s, y)
 * vpmaddubsw multiplies unsigned weights by signed activations into pairs of 16 bits. The sums start at -offset * sum(x), so
 * that a lane's final sum fits 16 bits; intermediate sums may wrap, which loses nothing. Q8_0 multiplies pairs of 16 bits.
 * Bound: multiplications with many rows (655 GOP/s for vpmaddubsw on a 2-core Zen 3, three times float32's peak), bytes of the
 * weights with one row. */
#include "linear_group.h"
#include "linear_quants_avx2.h"

#include <string.h>

/* ---- strips: a sub is int8 quads [8][rows], float s[rows], then what the kind adds; Q8_0: int16 pairs [16][rows], s ---- */

enum strip_kind {
    STRIP_OFFSET,     /* c: pair of int16, -offset * sum */
    STRIP_ADDEND,     /* m: float s * sum */
    STRIP_FIVE_BITS,  /* c with offset 16, int 16 * sum, m: 31 * 127 * 16 exceeds 16 bits, so the sums run with the offset */
    STRIP_SC,         /* c of columns 0..15, c of 16..31 */
    STRIP_SC_ADDEND,  /* pair of int16: sum of columns 0..15, of 16..31 */
};
#define STRIP_DWORDS(kind) ((kind) == STRIP_FIVE_BITS ? 12u : (kind) == STRIP_SC ? 11u : 10u)
#define ADDEND_DWORDS STRIP_DWORDS(STRIP_ADDEND)
#define PAIRS_DWORDS 17u

/* q[32] = x / s rounded; returns s. A NaN makes s NaN and an infinity makes s infinite, so that the row's sums show it. */
V_INLINE float quantize_32(const float *x, __m256i *q)
{
    __m256 v[4];
    __m256i magnitude = _mm256_set1_epi32(0x7fffffff), most = _mm256_setzero_si256();
    UNROLL for (int j = 0; j < 4; j++) {
        v[j] = _mm256_loadu_ps(x + 8 * j);
        most = _mm256_max_epu32(most, _mm256_and_si256(_mm256_castps_si256(v[j]), magnitude)); /* NaN is the greatest */
    }
    __m128i m = _mm_max_epu32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    m = _mm_max_epu32(m, _mm_unpackhi_epi64(m, m));
    m = _mm_max_epu32(m, _mm_srli_epi64(m, 32));
    float largest = _mm_cvtss_f32(_mm_castsi128_ps(m));
    __m256 inverse = _mm256_set1_ps(largest > 0x1p-100f ? 127.0f / largest : 0.0f);
    __m256i t[4];
    UNROLL for (int j = 0; j < 4; j++)
        t[j] = _mm256_cvtps_epi32(_mm256_mul_ps(inverse, v[j]));
    __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(t[0], t[1]), _mm256_packs_epi32(t[2], t[3]));
    *q = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    return largest / 127.0f;
}

/* (sum of even columns, sum of odd columns) of 16 columns as a pair of int16 in the low dword */
V_INLINE __m128i pair_of_sums(__m128i h)
{
    h = _mm_add_epi16(h, _mm_unpackhi_epi64(h, h));
    return _mm_add_epi16(h, _mm_srli_epi64(h, 32));
}

V_INLINE int32_t sum_of_pair(__m128i pair)
{
    return _mm_cvtsi128_si32(_mm_madd_epi16(pair, _mm_set1_epi16(1)));
}

V_INLINE int32_t times(__m128i pair, int factor)
{
    return _mm_cvtsi128_si32(_mm_mullo_epi16(pair, _mm_set1_epi16((short)factor)));
}

/* Writes the kind's extra dwords of a row of a sub: out[0], out[n_rows], ... */
V_INLINE void put_extras(const enum strip_kind kind, const int offset, __m256i q, float s, uint32_t n_rows, int32_t *out)
{
    __m256i two = _mm256_maddubs_epi16(_mm256_set1_epi8(1), q);
    __m128i low = pair_of_sums(_mm256_castsi256_si128(two)), high = pair_of_sums(_mm256_extracti128_si256(two, 1));
    __m128i whole = _mm_add_epi16(low, high);
    float m = s * (float)sum_of_pair(whole);
    switch (kind) {
    case STRIP_OFFSET:
        out[0] = times(whole, -offset);
        return;
    case STRIP_ADDEND:
        memcpy(out, &m, 4);
        return;
    case STRIP_FIVE_BITS:
        out[0] = times(whole, -16);
        out[n_rows] = 16 * sum_of_pair(whole);
        memcpy(out + 2 * n_rows, &m, 4);
        return;
    case STRIP_SC:
        out[0] = times(low, -offset);
        out[n_rows] = times(high, -offset);
        return;
    case STRIP_SC_ADDEND:
        out[0] = (int32_t)(((uint32_t)sum_of_pair(low) & 0xffff) | (uint32_t)sum_of_pair(high) << 16);
    }
}

V_INLINE void prepare_quads(const enum strip_kind kind, const int offset, const float *x, uint32_t stride, uint32_t n_rows,
                            uint32_t n_cols, char *strip)
{
    int32_t *out = (int32_t *)strip;
    for (uint32_t k = 0; k < n_cols; k += 32, out += STRIP_DWORDS(kind) * n_rows)
        for (uint32_t i = 0; i < n_rows; i++) {
            __m256i q;
            _Alignas(32) int32_t quads[8];
            float s = quantize_32(x + (size_t)i * stride + k, &q);
            _mm256_store_si256((void *)quads, q);
            UNROLL for (uint32_t j = 0; j < 8; j++)
                out[j * n_rows + i] = quads[j];
            memcpy(out + 8 * n_rows + i, &s, 4);
            put_extras(kind, offset, q, s, n_rows, out + 9 * n_rows + i);
        }
}

#define PREPARE(name, kind, offset)                                                                                            \
    static void prepare_##name(const float *x, uint32_t stride, uint32_t n_rows, uint32_t n_cols, char *strip)                 \
    {                                                                                                                          \
        prepare_quads(kind, offset, x, stride, n_rows, n_cols, strip);                                                         \
    }
PREPARE(offset_8, STRIP_OFFSET, 8)
PREPARE(offset_16, STRIP_OFFSET, 16)
PREPARE(addend, STRIP_ADDEND, 0)
PREPARE(five_bits, STRIP_FIVE_BITS, 16)
PREPARE(sc_32, STRIP_SC, 32)
PREPARE(sc_4, STRIP_SC, 4)
PREPARE(sc_addend, STRIP_SC_ADDEND, 0)

static void prepare_pairs(const float *x, uint32_t stride, uint32_t n_rows, uint32_t n_cols, char *strip)
{
    int32_t *out = (int32_t *)strip;
    for (uint32_t k = 0; k < n_cols; k += 32, out += PAIRS_DWORDS * n_rows)
        for (uint32_t i = 0; i < n_rows; i++) {
            __m256i q;
            _Alignas(32) int32_t pairs[16];
            float s = quantize_32(x + (size_t)i * stride + k, &q);
            _mm256_store_si256((void *)pairs, _mm256_cvtepi8_epi16(_mm256_castsi256_si128(q)));
            _mm256_store_si256((void *)(pairs + 8), _mm256_cvtepi8_epi16(_mm256_extracti128_si256(q, 1)));
            UNROLL for (uint32_t j = 0; j < 16; j++)
                out[j * n_rows + i] = pairs[j];
            memcpy(out + 16 * n_rows + i, &s, 4);
        }
}

/* ---- tiles: spelled out with named registers, a<row> for weights 0..7 and b<row> for 8..15, because gcc 12 leaves arrays of
 * vectors on the stack at these sizes; one asm per activation, so that only two temporaries are ever live ---- */

#define ROWS_1(S) S(0)
#define ROWS_2(S) ROWS_1(S) S(1)
#define ROWS_3(S) ROWS_2(S) S(2)
#define ROWS_4(S) ROWS_3(S) S(3)

#define START_ZERO(i) __m256i a##i = _mm256_setzero_si256(), b##i = a##i;
#define START_OFFSET(i) __m256i a##i = _mm256_set1_epi32(c[i]), b##i = a##i;
#define RESTART_ZERO(i) a##i = b##i = _mm256_setzero_si256();
#define RESTART_OFFSET(i) a##i = b##i = _mm256_set1_epi32(c[i]);
#ifdef __aarch64__
#define DOT(i, multiply, add)                                                                                                  \
    {                                                                                                                          \
        __m256i v = _mm256_set1_epi32(xq[i]);                                                                                  \
        a##i = add(a##i, multiply(w0, v));                                                                                     \
        b##i = add(b##i, multiply(w1, v));                                                                                     \
    }
#define DOT_QUAD(i) DOT(i, _mm256_maddubs_epi16, _mm256_add_epi16)
#define DOT_PAIR(i) DOT(i, _mm256_madd_epi16, _mm256_add_epi32)
#else
#define DOT(i, multiply, add)                                                                                                  \
    {                                                                                                                          \
        __m256i v, t;                                                                                                          \
        __asm__("vpbroadcastd %6,%2\n\t" multiply " %2,%4,%3\n\t" multiply " %2,%5,%2\n\t" add " %3,%0,%0\n\t" add " %2,%1,%1" \
                : "+x"(a##i), "+x"(b##i), "=&x"(v), "=&x"(t)                                                                   \
                : "x"(w0), "x"(w1), "m"(xq[i]));                                                                               \
    }
#define DOT_QUAD(i) DOT(i, "vpmaddubsw", "vpaddw")
#define DOT_PAIR(i) DOT(i, "vpmaddwd", "vpaddd")
#endif

/* quads first .. first + 3 of every row; QUAD(q, half) reads the weights */
#define FOUR_QUADS(rows, QUAD, first)                                                                                          \
    UNROLL for (uint32_t q = first; q < first + 4; q++, xq += rows)                                                            \
    {                                                                                                                          \
        __m256i w0 = QUAD(q, 0), w1 = QUAD(q, 1);                                                                              \
        ROWS_##rows(DOT_QUAD)                                                                                                  \
    }

#define ACCUMULATE(i, half, isum)                                                                                              \
    {                                                                                                                          \
        float *y = acc + 16 * i + 8 * half;                                                                                    \
        __m256 factor = _mm256_mul_ps(scale, _mm256_broadcast_ss(s + i));                                                      \
        _mm256_store_ps(y, _mm256_fmadd_ps(_mm256_cvtepi32_ps(isum), factor, _mm256_load_ps(y)));                              \
    }
#define FINISH_WIDE_LOW(i) ACCUMULATE(i, 0, _mm256_madd_epi16(a##i, one))
#define FINISH_WIDE_HIGH(i) ACCUMULATE(i, 1, _mm256_madd_epi16(b##i, one))
#define FINISH_FIVE_LOW(i) ACCUMULATE(i, 0, _mm256_add_epi32(_mm256_madd_epi16(a##i, one), _mm256_set1_epi32(back[i])))
#define FINISH_FIVE_HIGH(i) ACCUMULATE(i, 1, _mm256_add_epi32(_mm256_madd_epi16(b##i, one), _mm256_set1_epi32(back[i])))
#define FINISH_PAIRS_LOW(i) ACCUMULATE(i, 0, a##i)
#define FINISH_PAIRS_HIGH(i) ACCUMULATE(i, 1, b##i)
#define KEEP_SC(i)                                                                                                             \
    kept[2 * i] = _mm256_madd_epi16(a##i, sc0);                                                                                \
    kept[2 * i + 1] = _mm256_madd_epi16(b##i, sc1);
#define FINISH_SC_LOW(i) ACCUMULATE(i, 0, _mm256_add_epi32(kept[2 * i], _mm256_madd_epi16(a##i, sc)))
#define FINISH_SC_HIGH(i) ACCUMULATE(i, 1, _mm256_add_epi32(kept[2 * i + 1], _mm256_madd_epi16(b##i, sc)))

#define ADD_ADDEND(i, half)                                                                                                    \
    {                                                                                                                          \
        float *y = acc + 16 * i + 8 * half;                                                                                    \
        _mm256_store_ps(y, _mm256_fmadd_ps(addend, _mm256_broadcast_ss(m + i), _mm256_load_ps(y)));                            \
    }
#define ADDEND_LOW(i) ADD_ADDEND(i, 0)
#define ADDEND_HIGH(i) ADD_ADDEND(i, 1)
#define ADD_MINS(i, half)                                                                                                      \
    {                                                                                                                          \
        float *y = acc + 16 * i + 8 * half;                                                                                    \
        __m256 sum = _mm256_cvtepi32_ps(_mm256_madd_epi16(mins, _mm256_set1_epi32(c[i])));                                     \
        __m256 factor = _mm256_mul_ps(addend, _mm256_broadcast_ss(s + i));                                                     \
        _mm256_store_ps(y, _mm256_fmadd_ps(sum, factor, _mm256_load_ps(y)));                                                   \
    }
#define MINS_LOW(i) ADD_MINS(i, 0)
#define MINS_HIGH(i) ADD_MINS(i, 1)

/* The bodies of one sub. SCALE(half), ADDEND(half): 8 floats. c follows s in the strip; so does m. */
#define FINISH_BY_HALF(rows, SCALE, LOW, HIGH)                                                                                 \
    {                                                                                                                          \
        __m256 scale = SCALE(0);                                                                                               \
        ROWS_##rows(LOW)                                                                                                       \
    }                                                                                                                          \
    {                                                                                                                          \
        __m256 scale = SCALE(1);                                                                                               \
        ROWS_##rows(HIGH)                                                                                                      \
    }
#define ADDEND_BY_HALF(rows, ADDEND)                                                                                           \
    {                                                                                                                          \
        __m256 addend = ADDEND(0);                                                                                             \
        ROWS_##rows(ADDEND_LOW)                                                                                                \
    }                                                                                                                          \
    {                                                                                                                          \
        __m256 addend = ADDEND(1);                                                                                             \
        ROWS_##rows(ADDEND_HIGH)                                                                                               \
    }
#define BODY_OFFSET(rows, QUAD, SCALE, ADDEND)                                                                                 \
    const int32_t *c = (const int32_t *)s + rows;                                                                              \
    ROWS_##rows(START_OFFSET) FOUR_QUADS(rows, QUAD, 0) FOUR_QUADS(rows, QUAD, 4)                                              \
    FINISH_BY_HALF(rows, SCALE, FINISH_WIDE_LOW, FINISH_WIDE_HIGH)
#define BODY_ADDEND(rows, QUAD, SCALE, ADDEND)                                                                                 \
    const float *m = s + rows;                                                                                                 \
    ROWS_##rows(START_ZERO) FOUR_QUADS(rows, QUAD, 0) FOUR_QUADS(rows, QUAD, 4)                                                \
    FINISH_BY_HALF(rows, SCALE, FINISH_WIDE_LOW, FINISH_WIDE_HIGH) ADDEND_BY_HALF(rows, ADDEND)
#define BODY_FIVE_BITS(rows, QUAD, SCALE, ADDEND)                                                                              \
    const int32_t *c = (const int32_t *)s + rows, *back = c + rows;                                                            \
    const float *m = s + 3 * rows;                                                                                             \
    ROWS_##rows(START_OFFSET) FOUR_QUADS(rows, QUAD, 0) FOUR_QUADS(rows, QUAD, 4)                                              \
    FINISH_BY_HALF(rows, SCALE, FINISH_FIVE_LOW, FINISH_FIVE_HIGH) ADDEND_BY_HALF(rows, ADDEND)
#define SC_SUMS(rows, QUAD, SCALE, START, RESTART, advance)                                                                    \
    __m256i kept[2 * rows];                                                                                                    \
    ROWS_##rows(START) FOUR_QUADS(rows, QUAD, 0)                                                                               \
    {                                                                                                                          \
        __m256i sc0 = load_256(w + EXPANDED_SC), sc1 = load_256(w + EXPANDED_SC + 32);                                         \
        ROWS_##rows(KEEP_SC)                                                                                                   \
    }                                                                                                                          \
    advance;                                                                                                                   \
    ROWS_##rows(RESTART) FOUR_QUADS(rows, QUAD, 4)                                                                             \
    {                                                                                                                          \
        __m256 scale = SCALE(0);                                                                                               \
        __m256i sc = load_256(w + EXPANDED_SC + 64);                                                                           \
        ROWS_##rows(FINISH_SC_LOW)                                                                                             \
    }                                                                                                                          \
    {                                                                                                                          \
        __m256 scale = SCALE(1);                                                                                               \
        __m256i sc = load_256(w + EXPANDED_SC + 96);                                                                           \
        ROWS_##rows(FINISH_SC_HIGH)                                                                                            \
    }
#define BODY_SC(rows, QUAD, SCALE, ADDEND)                                                                                     \
    const int32_t *c = (const int32_t *)s + rows;                                                                              \
    SC_SUMS(rows, QUAD, SCALE, START_OFFSET, RESTART_OFFSET, c += rows)
#define BODY_SC_ADDEND(rows, QUAD, SCALE, ADDEND)                                                                              \
    const int32_t *c = (const int32_t *)s + rows;                                                                              \
    SC_SUMS(rows, QUAD, SCALE, START_ZERO, RESTART_ZERO, (void)0)                                                              \
    {                                                                                                                          \
        __m256 addend = ADDEND(0);                                                                                             \
        __m256i mins = load_256(w + EXPANDED_MINS);                                                                            \
        ROWS_##rows(MINS_LOW)                                                                                                  \
    }                                                                                                                          \
    {                                                                                                                          \
        __m256 addend = ADDEND(1);                                                                                             \
        __m256i mins = load_256(w + EXPANDED_MINS + 32);                                                                       \
        ROWS_##rows(MINS_HIGH)                                                                                                 \
    }
#define BODY_PAIRS(rows, QUAD, SCALE, ADDEND)                                                                                  \
    ROWS_##rows(START_ZERO) UNROLL for (uint32_t p = 0; p < 16; p++, xq += rows)                                               \
    {                                                                                                                          \
        __m256i w0 = QUAD(p, 0), w1 = QUAD(p, 1);                                                                              \
        ROWS_##rows(DOT_PAIR)                                                                                                  \
    }                                                                                                                          \
    FINISH_BY_HALF(rows, SCALE, FINISH_PAIRS_LOW, FINISH_PAIRS_HIGH)

/* Addresses of weights and scales: in Q4_0's and Q4_1's panels, in expanded subs, in Q8_0's panels. */
#define NIBBLE_QUAD(q, half) nibble_quad(w, q, half)
#define NIBBLE_SCALE(half) load_halves(w + 256 + 16 * (half))
#define NIBBLE_ADDEND(half) load_halves(w + 288 + 16 * (half))
#define BYTE_QUAD(q, half) load_256(w + 64 * (q) + 32 * (half))
#define BYTE_SCALE(half) _mm256_load_ps((const float *)(w + EXPANDED_SCALE + 32 * (half)))
#define BYTE_ADDEND(half) _mm256_load_ps((const float *)(w + EXPANDED_ADDEND + 32 * (half)))
#define PAIR_WEIGHTS(p, half) _mm256_cvtepi8_epi16(load_16(w + 32 + 32 * (p) + 16 * (half)))
#define PAIR_SCALE(half) load_halves(w + 16 * (half))
#define WORD_WEIGHTS(p, half) load_256(w + 64 * (p) + 32 * (half))
#define WORD_SCALE(half) _mm256_load_ps((const float *)(w + WORDS_SCALE + 32 * (half)))

#define TILE(name, rows, n_subs, sub_bytes, strip_dwords, s_dword, BODY, QUAD, SCALE, ADDEND)                                  \
    static void name##_tile_##rows(const uint8_t *w, size_t panel_stride, const char *x, float *acc, uint32_t n_blocks,        \
                                   const char *next, uint32_t next_lines)                                                      \
    {                                                                                                                          \
        const __m256i one = _mm256_set1_epi16(1);                                                                              \
        (void)panel_stride, (void)one;                                                                                         \
        for (uint32_t sub = 0; sub < n_blocks * n_subs; sub++, w += sub_bytes, x += strip_dwords * 4 * rows) {                 \
            const int32_t *xq = (const int32_t *)x;                                                                            \
            const float *s = (const float *)x + s_dword * rows;                                                                \
            if (sub % n_subs == 0) {                                                                                           \
                prefetch_lines(next, next_lines);                                                                              \
                next += (size_t)64 * next_lines;                                                                               \
            }                                                                                                                  \
            BODY(rows, QUAD, SCALE, ADDEND)                                                                                    \
        }                                                                                                                      \
    }
#define TILES(name, ...)                                                                                                       \
    TILE(name, 1, __VA_ARGS__) TILE(name, 2, __VA_ARGS__) TILE(name, 3, __VA_ARGS__) TILE(name, 4, __VA_ARGS__)
#define BYTE_TILES(name, n_subs, kind)                                                                                         \
    TILES(name, n_subs, EXPANDED_SUB_BYTES, STRIP_DWORDS(STRIP_##kind), 8, BODY_##kind, BYTE_QUAD, BYTE_SCALE, BYTE_ADDEND)

TILES(nibbles_offset, 1, 288, 10, 8, BODY_OFFSET, NIBBLE_QUAD, NIBBLE_SCALE, NIBBLE_ADDEND)
TILES(nibbles_addend, 1, 320, 10, 8, BODY_ADDEND, NIBBLE_QUAD, NIBBLE_SCALE, NIBBLE_ADDEND)
TILES(pairs, 1, 544, PAIRS_DWORDS, 16, BODY_PAIRS, PAIR_WEIGHTS, PAIR_SCALE, PAIR_SCALE)
TILES(words, 1, WORDS_SUB_BYTES, PAIRS_DWORDS, 16, BODY_PAIRS, WORD_WEIGHTS, WORD_SCALE, WORD_SCALE)
TILES(words_4, 4, WORDS_SUB_BYTES, PAIRS_DWORDS, 16, BODY_PAIRS, WORD_WEIGHTS, WORD_SCALE, WORD_SCALE)
TILES(words_k, 8, WORDS_SUB_BYTES, PAIRS_DWORDS, 16, BODY_PAIRS, WORD_WEIGHTS, WORD_SCALE, WORD_SCALE)
BYTE_TILES(offset, 1, OFFSET)
BYTE_TILES(five_bits, 1, FIVE_BITS)
BYTE_TILES(addend_k, 8, ADDEND)
BYTE_TILES(addend, 1, ADDEND)
BYTE_TILES(addend_4, 4, ADDEND)
BYTE_TILES(five_bits_k, 8, FIVE_BITS)
BYTE_TILES(sc_k, 8, SC)
BYTE_TILES(sc_addend_k, 8, SC_ADDEND)

/* ---- one row: straight from the packed panels; the same sums and the same chain ---- */

/* a, b: lanes of 16 bits after quads first .. first + 3 */
V_INLINE void row_quads(const struct quant *type, const uint8_t *sub, const int32_t *xq, const uint32_t first, __m256i sum[2])
{
    UNROLL for (uint32_t q = first; q < first + 4; q++) {
        __m256i x = _mm256_set1_epi32(xq[q]);
        UNROLL for (uint32_t half = 0; half < 2; half++)
            sum[half] = _mm256_add_epi16(sum[half], _mm256_maddubs_epi16(type->quad(sub, q, half), x));
    }
}

V_INLINE void row_sub(const struct quant *type, const enum strip_kind kind, const uint8_t *block, uint32_t sub,
                      const int32_t *xq, __m256 y[2])
{
    const __m256i one = _mm256_set1_epi16(1);
    const float *s = (const float *)xq + 8;
    const uint8_t *w = block + sub * type->sub_bytes;
    struct sub_scales scales;
    __m256i sum[2], kept[2];
    const bool has_start = kind == STRIP_OFFSET || kind == STRIP_FIVE_BITS || kind == STRIP_SC;
    sum[0] = sum[1] = has_start ? _mm256_set1_epi32(xq[9]) : _mm256_setzero_si256();
    row_quads(type, w, xq, 0, sum);
    type->scales(block, sub, &scales);
    if (type->has_sc) {
        UNROLL for (uint32_t half = 0; half < 2; half++) {
            kept[half] = _mm256_madd_epi16(sum[half], scales.sc[0][half]);
            sum[half] = kind == STRIP_SC ? _mm256_set1_epi32(xq[10]) : _mm256_setzero_si256();
        }
    }
    row_quads(type, w, xq, 4, sum);
    __m256 factor = _mm256_broadcast_ss(s);
    UNROLL for (uint32_t half = 0; half < 2; half++) {
        __m256i isum = _mm256_madd_epi16(sum[half], type->has_sc ? scales.sc[1][half] : one);
        if (type->has_sc)
            isum = _mm256_add_epi32(isum, kept[half]);
        if (kind == STRIP_FIVE_BITS)
            isum = _mm256_add_epi32(isum, _mm256_set1_epi32(xq[10]));
        y[half] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(isum), _mm256_mul_ps(scales.scale[half], factor), y[half]);
        if (kind == STRIP_ADDEND)
            y[half] = _mm256_fmadd_ps(scales.addend[half], _mm256_broadcast_ss(s + 1), y[half]);
        if (kind == STRIP_FIVE_BITS)
            y[half] = _mm256_fmadd_ps(scales.addend[half], _mm256_broadcast_ss(s + 3), y[half]);
        if (kind == STRIP_SC_ADDEND) {
            __m256 mins = _mm256_cvtepi32_ps(_mm256_madd_epi16(scales.mins[half], _mm256_set1_epi32(xq[9])));
            y[half] = _mm256_fmadd_ps(mins, _mm256_mul_ps(scales.addend[half], factor), y[half]);
        }
    }
}

#define GEMV_AHEAD 8192 /* bytes that the stream of weights is fetched ahead; 2048 loses up to a third on a Zen 5 */

V_INLINE void row_gemv(const struct quant *type, const enum strip_kind kind, const uint8_t *w, const char *x, float *acc,
                       uint32_t n_blocks, uint32_t n_panels)
{
    for (uint32_t p = 0; p < n_panels; p++) {
        const int32_t *xq = (const int32_t *)x;
        __m256 y[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
        for (uint32_t block = 0; block < n_blocks; block++, w += type->block_bytes)
            for (uint32_t sub = 0; sub < type->n_subs; sub++, xq += STRIP_DWORDS(kind)) {
                uint32_t lines = (type->block_bytes / type->n_subs + 63) / 64;
                prefetch_lines((const char *)w + sub * (type->block_bytes / type->n_subs) + GEMV_AHEAD, lines);
                row_sub(type, kind, w, sub, xq, y);
            }
        _mm256_store_ps(acc + 16 * p, y[0]);
        _mm256_store_ps(acc + 16 * p + 8, y[1]);
    }
}

static void q8_0_gemv(const uint8_t *w, const char *x, float *acc, uint32_t n_blocks, uint32_t n_panels)
{
    for (uint32_t p = 0; p < n_panels; p++) {
        const int32_t *xq = (const int32_t *)x;
        __m256 y[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
        for (uint32_t block = 0; block < n_blocks; block++, w += 544, xq += PAIRS_DWORDS) {
            __m256i sum[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
            UNROLL for (uint32_t pair = 0; pair < 16; pair++) {
                __m256i xp = _mm256_set1_epi32(xq[pair]);
                _mm_prefetch((const char *)w + 32 * pair + GEMV_AHEAD, _MM_HINT_T0);
                UNROLL for (uint32_t half = 0; half < 2; half++)
                    sum[half] = _mm256_add_epi32(sum[half], _mm256_madd_epi16(PAIR_WEIGHTS(pair, half), xp));
            }
            __m256 s = _mm256_broadcast_ss((const float *)xq + 16);
            UNROLL for (uint32_t half = 0; half < 2; half++)
                y[half] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[half]), _mm256_mul_ps(PAIR_SCALE(half), s), y[half]);
        }
        _mm256_store_ps(acc + 16 * p, y[0]);
        _mm256_store_ps(acc + 16 * p + 8, y[1]);
    }
}

/* ---- groups ---- */

#define PREPARE_GROUPS(name, columns, preparation, dwords)                                                                     \
    static void prepare_##name(const float *x, uint32_t stride, uint32_t n_rows, uint32_t n_cols, char *strip)                 \
    {                                                                                                                          \
        group_prepare(prepare_##preparation, columns, 4 * dwords, x, stride, n_rows, n_cols, strip);                           \
    }
PREPARE_GROUPS(addend_g128, 128, addend, ADDEND_DWORDS)
PREPARE_GROUPS(addend_g32, 32, addend, ADDEND_DWORDS)
PREPARE_GROUPS(pairs_g128, 128, pairs, PAIRS_DWORDS)
PREPARE_GROUPS(pairs_g32, 32, pairs, PAIRS_DWORDS)

/* One row times panels of 8 bits. */
V_INLINE void group_gemv(const uint8_t *w, const char *x, float *acc, uint32_t n_blocks, uint32_t n_panels,
                         const uint32_t columns)
{
    for (uint32_t p = 0; p < n_panels; p++) {
        const int32_t *xq = (const int32_t *)x;
        __m256 y[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
        for (uint32_t block = 0; block < n_blocks; block++, w += GROUP_BLOCK_BYTES(8, columns)) {
            const float *scales = (const float *)(w + columns / 32 * GROUP_SUB_BYTES(8));
            for (uint32_t sub = 0; sub < columns / 32; sub++, xq += PAIRS_DWORDS) {
                __m256i sum[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
                const uint8_t *from = w + sub * GROUP_SUB_BYTES(8);
                UNROLL for (uint32_t pair = 0; pair < 16; pair++) {
                    __m256i xp = _mm256_set1_epi32(xq[pair]);
                    _mm_prefetch((const char *)from + 34 * pair + GEMV_AHEAD, _MM_HINT_T0);
                    UNROLL for (uint32_t half = 0; half < 2; half++)
                        sum[half] = _mm256_add_epi32(sum[half], _mm256_madd_epi16(group_pair(from, pair, half), xp));
                }
                __m256 s = _mm256_broadcast_ss((const float *)xq + 16);
                UNROLL for (uint32_t half = 0; half < 2; half++) {
                    __m256 factor = _mm256_mul_ps(_mm256_loadu_ps(scales + 8 * half), s);
                    y[half] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[half]), factor, y[half]);
                }
            }
        }
        _mm256_store_ps(acc + 16 * p, y[0]);
        _mm256_store_ps(acc + 16 * p + 8, y[1]);
    }
}

/* ---- the types ---- */

#define INT8_TYPE(type, label, number, subs, bytes, dwords, expanded, slab, tiles, first_row, preparation, expansion)          \
    const struct linear_type linear_##type##_int8_avx2 = {                                                                     \
        .name = label " int8",                                                                                                 \
        .dtype = number,                                                                                                       \
        .arithmetic = ARITHMETIC_INT8,                                                                                         \
        .block_values = 32 * (subs),                                                                                           \
        .panel_block_bytes = bytes,                                                                                            \
        .strip_block_bytes = 4 * (dwords) * (subs),                                                                            \
        .expanded_block_bytes = (expanded) * (subs),                                                                           \
        .slab_blocks = slab,                                                                                                   \
        .max_rows = INT8_ROWS,                                                                                                 \
        .max_panels = 1,                                                                                                       \
        .tile = {{NULL, tiles##_tile_1, tiles##_tile_2, tiles##_tile_3, tiles##_tile_4}},                                      \
        .gemv = first_row,                                                                                                     \
        .prepare = prepare_##preparation,                                                                                      \
        .repack = linear_##type##_repack_avx2,                                                                                 \
        .unpack = linear_##type##_unpack_avx2,                                                                                 \
        .expand = expansion,                                                                                                   \
    }
/* One row goes through the tiles, too. */
#define WORDS_TYPE(type, label, number, subs, bytes, tiles)                                                                    \
    INT8_TYPE(type, label, number, subs, bytes, PAIRS_DWORDS, WORDS_SUB_BYTES, 16 / (subs), tiles, NULL, pairs,                \
              linear_##type##_expand_avx2)
#define ROW_GEMV(type, kind)                                                                                                   \
    static void type##_gemv(const uint8_t *w, const char *x, float *acc, uint32_t n_blocks, uint32_t n_panels)                 \
    {                                                                                                                          \
        row_gemv(&type, STRIP_##kind, w, x, acc, n_blocks, n_panels);                                                          \
    }
#define NIBBLE_TYPE(type, label, number, bytes, kind, tiles, preparation)                                                      \
    ROW_GEMV(type, kind)                                                                                                       \
    INT8_TYPE(type, label, number, 1, bytes, 10, 0, 32, tiles, type##_gemv, preparation, NULL)
#define BYTE_TYPE(type, label, number, subs, bytes, kind, tiles, preparation)                                                  \
    ROW_GEMV(type, kind)                                                                                                       \
    INT8_TYPE(type, label, number, subs, bytes, STRIP_DWORDS(STRIP_##kind), EXPANDED_SUB_BYTES, 16 / (subs), tiles,            \
              type##_gemv, preparation, linear_##type##_expand_avx2)

#define BYTES_TYPE(type, label, number, columns, tiles)                                                                        \
    static void type##_gemv(const uint8_t *w, const char *x, float *acc, uint32_t n_blocks, uint32_t n_panels)                 \
    {                                                                                                                          \
        group_gemv(w, x, acc, n_blocks, n_panels, columns);                                                                    \
    }                                                                                                                          \
    INT8_TYPE(type, label, number, (columns) / 32, GROUP_BLOCK_BYTES(8, columns), PAIRS_DWORDS, WORDS_SUB_BYTES,               \
              16 / ((columns) / 32), tiles, type##_gemv, pairs_g##columns, linear_##type##_expand_avx2)

NIBBLE_TYPE(q4_0, "q4_0", DTYPE_Q4_0, 288, OFFSET, nibbles_offset, offset_8);
NIBBLE_TYPE(q4_1, "q4_1", DTYPE_Q4_1, 320, ADDEND, nibbles_addend, addend);
INT8_TYPE(q8_0, "q8_0", DTYPE_Q8_0, 1, 544, PAIRS_DWORDS, 0, 16, pairs, q8_0_gemv, pairs, NULL);
BYTE_TYPE(q5_0, "q5_0", DTYPE_Q5_0, 1, 352, OFFSET, offset, offset_16);
BYTE_TYPE(q5_1, "q5_1", DTYPE_Q5_1, 1, 384, FIVE_BITS, five_bits, five_bits);
BYTE_TYPE(q4_k, "q4_k", DTYPE_Q4_K, 8, 2304, ADDEND, addend_k, addend);
BYTE_TYPE(q5_k, "q5_k", DTYPE_Q5_K, 8, 2816, FIVE_BITS, five_bits_k, five_bits);
BYTE_TYPE(q6_k, "q6_k", DTYPE_Q6_K, 8, 3360, SC, sc_k, sc_32);
BYTE_TYPE(q3_k, "q3_k", DTYPE_Q3_K, 8, 1760, SC, sc_k, sc_4);
BYTE_TYPE(q2_k, "q2_k", DTYPE_Q2_K, 8, 1344, SC_ADDEND, sc_addend_k, sc_addend);
BYTE_TYPE(int4_g128, "int4_g128", DTYPE_INT4_G128, 4, GROUP_BLOCK_BYTES(4, 128), ADDEND, addend_4, addend_g128);
BYTE_TYPE(int4_g32, "int4_g32", DTYPE_INT4_G32, 1, GROUP_BLOCK_BYTES(4, 32), ADDEND, addend, addend_g32);
BYTES_TYPE(int8_g128, "int8_g128", DTYPE_INT8_G128, 128, words_4);
BYTES_TYPE(int8_g32, "int8_g32", DTYPE_INT8_G32, 32, words);
WORDS_TYPE(iq4_nl, "iq4_nl", DTYPE_IQ4_NL, 1, 288, words);
WORDS_TYPE(iq4_xs, "iq4_xs", DTYPE_IQ4_XS, 8, 2176, words_k);
WORDS_TYPE(iq3_xxs, "iq3_xxs", DTYPE_IQ3_XXS, 8, 1568, words_k);
WORDS_TYPE(iq3_s, "iq3_s", DTYPE_IQ3_S, 8, 1760, words_k);
WORDS_TYPE(iq2_xxs, "iq2_xxs", DTYPE_IQ2_XXS, 8, 1056, words_k);
WORDS_TYPE(iq2_xs, "iq2_xs", DTYPE_IQ2_XS, 8, 1184, words_k);
WORDS_TYPE(iq2_s, "iq2_s", DTYPE_IQ2_S, 8, 1312, words_k);
WORDS_TYPE(iq1_s, "iq1_s", DTYPE_IQ1_S, 8, 800, words_k);
WORDS_TYPE(iq1_m, "iq1_m", DTYPE_IQ1_M, 8, 896, words_k);
WORDS_TYPE(tq1_0, "tq1_0", DTYPE_TQ1_0, 8, 864, words_k);
WORDS_TYPE(tq2_0, "tq2_0", DTYPE_TQ2_0, 8, 1056, words_k);
