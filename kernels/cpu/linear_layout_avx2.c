/* Quantised weights on AVX2: from the file's blocks to panels (linear_quants_avx2.h), and from panels to exact values or to
 * the bytes that the integer tiles read. Weights' bits are moved, never changed. Values are computed like dtype_to_float's:
 * ((scale * s) * (q - offset)) + addend, every product exact. Bound by bytes: a slab is expanded once for all rows. */
#include "linear_quants_avx2.h"

#include <string.h>

static uint32_t load_u32(const uint8_t *p)
{
    uint32_t v;
    memcpy(&v, p, 4);
    return v;
}

static void store_u32(uint8_t *p, uint32_t v)
{
    memcpy(p, &v, 4);
}

/* ---- planes of one row of a sub, q[32] unsigned; out: the row's dword in the sub's first vector ---- */

static void put_nibbles(const uint8_t *q, uint8_t *out)
{
    for (uint32_t p = 0; p < 4; p++)
        store_u32(out + 64 * p, (load_u32(q + 4 * p) & 0x0f0f0f0fu) | (load_u32(q + 16 + 4 * p) & 0x0f0f0f0fu) << 4);
}

static void put_two_bits(const uint8_t *q, uint32_t from, uint8_t *out)
{
    for (uint32_t p = 0; p < 2; p++) {
        uint32_t bits = 0;
        for (uint32_t t = 0; t < 4; t++)
            bits |= (load_u32(q + 4 * (p + 2 * t)) >> from & 0x03030303u) << (2 * t);
        store_u32(out + 64 * p, bits);
    }
}

static void put_one_bit(const uint8_t *q, uint32_t from, uint8_t *out)
{
    uint32_t bits = 0;
    for (uint32_t quad = 0; quad < 8; quad++)
        bits |= (load_u32(q + 4 * quad) >> from & 0x01010101u) << quad;
    store_u32(out, bits);
}

static void put_q5(const uint8_t *q, uint8_t *out)
{
    put_nibbles(q, out);
    put_one_bit(q, 4, out + NIBBLE_PLANE);
}

static void put_q6(const uint8_t *q, uint8_t *out)
{
    put_nibbles(q, out);
    put_two_bits(q, 4, out + NIBBLE_PLANE);
}

static void put_q2(const uint8_t *q, uint8_t *out)
{
    put_two_bits(q, 0, out);
}

static void put_q3(const uint8_t *q, uint8_t *out)
{
    put_two_bits(q, 0, out);
    put_one_bit(q, 2, out + TWO_BIT_PLANE);
}

/* ---- reads one block of the file: q, and the scales into the panel (p: the row's place in the panel's scales) ---- */

static void split_nibbles(const uint8_t *qs, uint8_t *q)
{
    for (uint32_t j = 0; j < 16; j++) {
        q[j] = qs[j] & 15;
        q[j + 16] = qs[j] >> 4;
    }
}

static void add_fifth_bits(const uint8_t *qh, uint8_t *q)
{
    uint32_t high = load_u32(qh);
    for (uint32_t j = 0; j < 32; j++)
        q[j] |= (uint8_t)((high >> j & 1) << 4);
}

/* Scales of one byte: byte i of every row lies at p + 16 i. */
static void put_bytes(const uint8_t *bytes, uint32_t n, uint32_t lane, uint8_t *p)
{
    for (uint32_t i = 0; i < n; i++)
        p[16 * i + lane] = bytes[i];
}

static void put_half(const uint8_t *half, uint32_t lane, uint8_t *p)
{
    memcpy(p + 2 * lane, half, 2);
}

static void q4_0_read(const uint8_t *b, uint8_t *q, uint32_t lane, uint8_t *p)
{
    split_nibbles(b + 2, q);
    put_half(b, lane, p);
}

static void q4_1_read(const uint8_t *b, uint8_t *q, uint32_t lane, uint8_t *p)
{
    split_nibbles(b + 4, q);
    put_half(b, lane, p);
    put_half(b + 2, lane, p + 32);
}

static void q5_0_read(const uint8_t *b, uint8_t *q, uint32_t lane, uint8_t *p)
{
    split_nibbles(b + 6, q);
    add_fifth_bits(b + 2, q);
    put_half(b, lane, p);
}

static void q5_1_read(const uint8_t *b, uint8_t *q, uint32_t lane, uint8_t *p)
{
    split_nibbles(b + 8, q);
    add_fifth_bits(b + 4, q);
    put_half(b, lane, p);
    put_half(b + 2, lane, p + 32);
}

static void k_nibbles(const uint8_t *qs, uint8_t *q)
{
    for (uint32_t c = 0; c < 4; c++)
        for (uint32_t l = 0; l < 32; l++) {
            q[64 * c + l] = qs[32 * c + l] & 15;
            q[64 * c + 32 + l] = qs[32 * c + l] >> 4;
        }
}

static void k_read_scales(const uint8_t *b, uint32_t lane, uint8_t *p)
{
    put_bytes(b + 4, 12, lane, p);
    put_half(b, lane, p + 192);
    put_half(b + 2, lane, p + 224);
}

static void q4_k_read(const uint8_t *b, uint8_t *q, uint32_t lane, uint8_t *p)
{
    k_nibbles(b + 16, q);
    k_read_scales(b, lane, p);
}

static void q5_k_read(const uint8_t *b, uint8_t *q, uint32_t lane, uint8_t *p)
{
    k_nibbles(b + 48, q);
    for (uint32_t j = 0; j < 8; j++)
        for (uint32_t l = 0; l < 32; l++)
            q[32 * j + l] |= (uint8_t)((b[16 + l] >> j & 1) << 4);
    k_read_scales(b, lane, p);
}

static void q6_k_read(const uint8_t *b, uint8_t *q, uint32_t lane, uint8_t *p)
{
    for (uint32_t half = 0; half < 2; half++) {
        const uint8_t *low = b + 64 * half, *high = b + 128 + 32 * half;
        for (uint32_t piece = 0; piece < 4; piece++)
            for (uint32_t l = 0; l < 32; l++)
                q[128 * half + 32 * piece + l] =
                    (uint8_t)((low[piece % 2 * 32 + l] >> (piece / 2 * 4) & 15) | (high[l] >> (piece * 2) & 3) << 4);
    }
    put_bytes(b + 192, 16, lane, p);
    put_half(b + 208, lane, p + 256);
}

static void k_two_bits(const uint8_t *qs, uint8_t *q)
{
    for (uint32_t j = 0; j < 8; j++)
        for (uint32_t l = 0; l < 32; l++)
            q[32 * j + l] = qs[j / 4 * 32 + l] >> (j % 4 * 2) & 3;
}

static void q3_k_read(const uint8_t *b, uint8_t *q, uint32_t lane, uint8_t *p)
{
    k_two_bits(b + 32, q);
    for (uint32_t j = 0; j < 8; j++)
        for (uint32_t l = 0; l < 32; l++)
            q[32 * j + l] |= (uint8_t)((b[l] >> j & 1) << 2);
    put_bytes(b + 96, 12, lane, p);
    put_half(b + 108, lane, p + 192);
}

static void q2_k_read(const uint8_t *b, uint8_t *q, uint32_t lane, uint8_t *p)
{
    k_two_bits(b + 16, q);
    put_bytes(b, 16, lane, p);
    put_half(b + 80, lane, p + 256);
    put_half(b + 82, lane, p + 288);
}

/* ---- the templates ---- */

typedef void block_reader(const uint8_t *block, uint8_t *q, uint32_t lane, uint8_t *scales);
typedef void plane_writer(const uint8_t *q, uint8_t *out);

V_INLINE void repack_lanes(const struct quant *type, uint32_t file_bytes, block_reader *read, plane_writer *put,
                           const uint8_t *rows, size_t row_bytes, uint32_t first_lane, uint32_t n_lanes, uint32_t n_cols,
                           uint8_t *panel)
{
    uint8_t q[256];
    for (uint32_t block = 0; block < n_cols / 32 / type->n_subs; block++, panel += type->block_bytes)
        for (uint32_t i = 0; i < n_lanes; i++) {
            uint32_t lane = first_lane + i;
            read(rows + i * row_bytes + (size_t)block * file_bytes, q, lane, panel + type->n_subs * type->sub_bytes);
            for (uint32_t sub = 0; sub < type->n_subs; sub++)
                put(q + 32 * sub, panel + sub * type->sub_bytes + 4 * lane);
        }
}

/* The scale and the addend of columns 16h .. 16h + 15. */
V_INLINE void values_scale(const struct quant *type, const struct sub_scales *s, uint32_t h, uint32_t half, __m256 *scale,
                           __m256 *addend)
{
    *scale = s->scale[half];
    *addend = type->has_addend ? s->addend[half] : _mm256_setzero_ps();
    if (type->has_sc) {
        *scale = _mm256_mul_ps(*scale, _mm256_cvtepi32_ps(_mm256_srai_epi32(s->sc[h][half], 16)));
        if (type->has_addend) {
            __m256i minimum = h ? _mm256_srli_epi32(s->mins[half], 16) : _mm256_and_si256(s->mins[half], _mm256_set1_epi32(15));
            *addend = _mm256_mul_ps(*addend, _mm256_cvtepi32_ps(minimum));
        }
    }
}

V_INLINE void unpack_blocks(const struct quant *type, const uint8_t *w, uint32_t n_blocks, float *values)
{
    const __m256i byte = _mm256_set1_epi32(255);
    const __m256 offset = _mm256_set1_ps((float)type->offset);
    for (; n_blocks > 0; n_blocks--, w += type->block_bytes)
        for (uint32_t sub = 0; sub < type->n_subs; sub++, values += 32 * 16) {
            struct sub_scales s;
            type->scales(w, sub, &s);
            UNROLL for (uint32_t quad = 0; quad < 8; quad++)
                UNROLL for (uint32_t half = 0; half < 2; half++) {
                    __m256 scale, addend;
                    values_scale(type, &s, quad / 4, half, &scale, &addend);
                    __m256i q = type->quad(w + sub * type->sub_bytes, quad, half);
                    UNROLL for (uint32_t i = 0; i < 4; i++) {
                        __m256 v = _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(q, (int)(8 * i)), byte));
                        v = _mm256_mul_ps(scale, _mm256_sub_ps(v, offset));
                        if (type->has_addend)
                            v = _mm256_add_ps(v, addend);
                        _mm256_storeu_ps(values + (4 * quad + i) * 16 + 8 * half, v);
                    }
                }
        }
}

V_INLINE void expand_blocks(const struct quant *type, const uint8_t *w, uint32_t n_blocks, uint8_t *out)
{
    for (; n_blocks > 0; n_blocks--, w += type->block_bytes)
        for (uint32_t sub = 0; sub < type->n_subs; sub++, out += EXPANDED_SUB_BYTES) {
            struct sub_scales s;
            type->scales(w, sub, &s);
            UNROLL for (uint32_t half = 0; half < 2; half++) {
                UNROLL for (uint32_t quad = 0; quad < 8; quad++)
                    _mm256_store_si256((void *)(out + 64 * quad + 32 * half),
                                       type->quad(w + sub * type->sub_bytes, quad, half));
                _mm256_store_ps((float *)(out + EXPANDED_SCALE + 32 * half), s.scale[half]);
                if (type->has_addend)
                    _mm256_store_ps((float *)(out + EXPANDED_ADDEND + 32 * half), s.addend[half]);
                if (type->has_sc) {
                    _mm256_store_si256((void *)(out + EXPANDED_SC + 32 * half), s.sc[0][half]);
                    _mm256_store_si256((void *)(out + EXPANDED_SC + 64 + 32 * half), s.sc[1][half]);
                }
                if (type->has_sc && type->has_addend)
                    _mm256_store_si256((void *)(out + EXPANDED_MINS + 32 * half), s.mins[half]);
            }
        }
}

#define LAYOUT(type, file_bytes, put)                                                                                          \
    void linear_##type##_repack_avx2(const uint8_t *rows, size_t row_bytes, uint32_t first_lane, uint32_t n_lanes,             \
                                     uint32_t n_cols, uint8_t *panel)                                                          \
    {                                                                                                                          \
        repack_lanes(&type, file_bytes, type##_read, put, rows, row_bytes, first_lane, n_lanes, n_cols, panel);                \
    }                                                                                                                          \
    void linear_##type##_unpack_avx2(const uint8_t *w, uint32_t n_blocks, float *values)                                       \
    {                                                                                                                          \
        unpack_blocks(&type, w, n_blocks, values);                                                                             \
    }                                                                                                                          \
    void linear_##type##_values_avx2(const uint8_t *w, uint32_t n_blocks, uint8_t *values)                                     \
    {                                                                                                                          \
        unpack_blocks(&type, w, n_blocks, (float *)values);                                                                    \
    }                                                                                                                          \
    EXPAND(type)
#define EXPAND(type)                                                                                                           \
    void linear_##type##_expand_avx2(const uint8_t *w, uint32_t n_blocks, uint8_t *expanded)                                   \
    {                                                                                                                          \
        expand_blocks(&type, w, n_blocks, expanded);                                                                           \
    }
LAYOUT(q4_0, 18, put_nibbles)
LAYOUT(q4_1, 20, put_nibbles)
LAYOUT(q5_0, 22, put_q5)
LAYOUT(q5_1, 24, put_q5)
LAYOUT(q4_k, 144, put_nibbles)
LAYOUT(q5_k, 176, put_q5)
LAYOUT(q6_k, 210, put_q6)
LAYOUT(q3_k, 110, put_q3)
LAYOUT(q2_k, 84, put_q2)
EACH_INT4_GROUP(EXPAND)

/* ---- Q8_0 ---- */

void linear_q8_0_repack_avx2(const uint8_t *rows, size_t row_bytes, uint32_t first_lane, uint32_t n_lanes, uint32_t n_cols,
                             uint8_t *panel)
{
    for (uint32_t block = 0; block < n_cols / 32; block++, panel += 544)
        for (uint32_t i = 0; i < n_lanes; i++) {
            const uint8_t *b = rows + i * row_bytes + (size_t)block * 34;
            put_half(b, first_lane + i, panel);
            for (uint32_t pair = 0; pair < 16; pair++)
                memcpy(panel + 32 + 32 * pair + 2 * (first_lane + i), b + 2 + 2 * pair, 2);
        }
}

void linear_q8_0_unpack_avx2(const uint8_t *w, uint32_t n_blocks, float *values)
{
    for (; n_blocks > 0; n_blocks--, w += 544, values += 32 * 16) {
        __m256 d[2];
        halves_of(w, d);
        for (uint32_t pair = 0; pair < 16; pair++)
            for (uint32_t half = 0; half < 2; half++) {
                __m256i both = _mm256_cvtepi8_epi16(load_16(w + 32 + 32 * pair + 16 * half)); /* dword: k | k + 1 << 16 */
                __m256i low = _mm256_srai_epi32(_mm256_slli_epi32(both, 16), 16), high = _mm256_srai_epi32(both, 16);
                _mm256_storeu_ps(values + 32 * pair + 8 * half, _mm256_mul_ps(d[half], _mm256_cvtepi32_ps(low)));
                _mm256_storeu_ps(values + 32 * pair + 16 + 8 * half, _mm256_mul_ps(d[half], _mm256_cvtepi32_ps(high)));
            }
    }
}

void linear_q8_0_values_avx2(const uint8_t *w, uint32_t n_blocks, uint8_t *values)
{
    linear_q8_0_unpack_avx2(w, n_blocks, (float *)values);
}
