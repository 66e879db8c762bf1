/* Quantised types on AVX-512: from the file into panels (repack), from panels to exact float32 values (unpack), and float
 * arithmetic: y[r] = sum over k of w[r][k] * x[k], one FMA chain per output, k ascending, w the exact float32 value of the
 * weight. Slabs of weights are unpacked to float32 in L1 and multiplied by the tiles of F32 (linear_float_avx512.c), for a
 * single row too. Every product scale * (u - offset) is exact in float32, so unpack has the bits of dtype_to_float. Bound: the
 * FMA units; unpacking adds about 5 instructions per 16 weights and slab. */
#include "linear_quants_avx512.h"

/* ---- from the file ---------------------------------------- */

/* A block of 32 columns of one row, as in the file. */
struct block {
    uint8_t u[32];    /* value = scale * (u - offset) [+ min] */
    uint8_t scale[4]; /* in the panel's form: 2 or 4 bytes of float16 scale and minimum; for K types 2 bytes */
    uint8_t tail[4];  /* K types: d, dmin */
};

static void read_nibbles(const uint8_t *qs, const uint8_t *high, uint8_t *u)
{
    uint32_t bits = 0;
    if (high)
        memcpy(&bits, high, 4);
    for (int j = 0; j < 16; j++) {
        u[j] = (uint8_t)((qs[j] & 15) | (bits >> j & 1) << 4);
        u[j + 16] = (uint8_t)(qs[j] >> 4 | (bits >> (j + 16) & 1) << 4);
    }
}

INLINE void read_block(const uint8_t *b, struct block *block, const enum form f)
{
    const int header = FORM_HAS_MIN(f) ? 4 : 2;
    memcpy(block->scale, b, (size_t)header);
    if (f == Q8_0)
        for (int j = 0; j < 32; j++)
            block->u[j] = b[2 + j] ^ 0x80;
    else if (FORM_BITS(f) == 5)
        read_nibbles(b + header + 4, b + header, block->u);
    else
        read_nibbles(b + header, NULL, block->u);
}

/* 6-bit scale and minimum j of Q4_K and Q5_K */
static void read_scale_min(const uint8_t *sc, int j, uint8_t *scale)
{
    if (j < 4) {
        scale[0] = sc[j] & 63;
        scale[1] = sc[j + 4] & 63;
    } else {
        scale[0] = (uint8_t)((sc[j + 4] & 15) | sc[j - 4] >> 6 << 4);
        scale[1] = (uint8_t)(sc[j + 4] >> 4 | sc[j] >> 6 << 4);
    }
}

/* Scale j (of 16) of Q3_K */
static uint8_t read_scale_q3(const uint8_t *sc, int j)
{
    int low = j < 8 ? sc[j] & 15 : sc[j - 8] >> 4;
    return (uint8_t)((low | (sc[8 + j % 4] >> (2 * (j / 4)) & 3) << 4) - 32);
}

static void read_q4_k(const uint8_t *b, int j, struct block *block)
{
    read_scale_min(b + 4, j, block->scale);
    memcpy(block->tail, b, 4);
    for (int l = 0; l < 32; l++)
        block->u[l] = b[16 + 32 * (j / 2) + l] >> (4 * (j % 2)) & 15;
}

static void read_q5_k(const uint8_t *b, int j, struct block *block)
{
    read_scale_min(b + 4, j, block->scale);
    memcpy(block->tail, b, 4);
    for (int l = 0; l < 32; l++)
        block->u[l] = (uint8_t)((b[48 + 32 * (j / 2) + l] >> (4 * (j % 2)) & 15) | (b[16 + l] >> j & 1) << 4);
}

static void read_q6_k(const uint8_t *b, int j, struct block *block)
{
    const uint8_t *low = b + 64 * (j / 4) + 32 * (j % 2), *high = b + 128 + 32 * (j / 4);
    memcpy(block->scale, b + 192 + 2 * j, 2);
    memcpy(block->tail, b + 208, 2);
    for (int l = 0; l < 32; l++)
        block->u[l] = (uint8_t)((low[l] >> (4 * (j % 4 / 2)) & 15) | (high[l] >> (2 * (j % 4)) & 3) << 4);
}

static void read_q2_k(const uint8_t *b, int j, struct block *block)
{
    memcpy(block->scale, b + 2 * j, 2);
    memcpy(block->tail, b + 80, 4);
    for (int l = 0; l < 32; l++)
        block->u[l] = b[16 + 32 * (j / 4) + l] >> (2 * (j % 4)) & 3;
}

static void read_q3_k(const uint8_t *b, int j, struct block *block)
{
    block->scale[0] = read_scale_q3(b + 96, 2 * j);
    block->scale[1] = read_scale_q3(b + 96, 2 * j + 1);
    memcpy(block->tail, b + 108, 2);
    for (int l = 0; l < 32; l++)
        block->u[l] = (uint8_t)((b[32 + 32 * (j / 4) + l] >> (2 * (j % 4)) & 3) | (b[l] >> j & 1) << 2);
}

static void read_iq4_xs(const uint8_t *b, int j, struct block *block)
{
    block->scale[0] = (uint8_t)(((b[4 + j / 2] >> (4 * (j % 2)) & 15) | (b[2 + j / 4] >> (2 * (j % 4)) & 3) << 4) - 32);
    block->scale[1] = 0;
    memcpy(block->tail, b, 2);
    read_nibbles(b + 8 + 16 * j, NULL, block->u);
}

/* ---- into panels ---------------------------------------- */

/* Writes row r's bytes of the planes of `bits` bits, taken from bit `from` of u on. */
INLINE void write_plane(const uint8_t *u, const int bits, const int from, uint32_t r, uint8_t *plane)
{
    const int apart = bits == 4 ? 4 : 1, n_fields = 8 / bits; /* quads of a vector: p, p + apart, ... */
    for (int v = 0; v < bits; v++) {
        uint8_t dword[4] = {0};
        for (int t = 0; t < n_fields; t++) {
            int p = bits == 2 ? 4 * v + t : v + t * apart;
            for (int j = 0; j < 4; j++)
                dword[j] |= (uint8_t)((u[4 * p + j] >> from & ((1 << bits) - 1)) << (bits * t));
        }
        memcpy(plane + 64 * v + 4 * r, dword, 4);
    }
}

INLINE void write_block(const struct block *block, uint32_t r, uint8_t *w, const enum form f)
{
    const int bits = FORM_BITS(f), base = bits == 3 ? 2 : bits >= 4 && bits < 8 ? 4 : bits;
    uint8_t *scales = w + FORM_WEIGHT_BYTES(f);
    write_plane(block->u, base, 0, r, w);
    if (bits > base)
        write_plane(block->u, bits - base == 2 ? 2 : 1, base, r, w + 64 * base);
    if (FORM_IS_K(f)) {
        scales[r] = block->scale[0];
        scales[16 + r] = block->scale[1];
        return;
    }
    memcpy(scales + 2 * r, block->scale, 2);
    if (FORM_HAS_MIN(f))
        memcpy(scales + 32 + 2 * r, block->scale + 2, 2);
}

INLINE void repack(const uint8_t *rows, size_t row_bytes, uint32_t first_lane, uint32_t n_lanes, uint32_t n_cols,
                   uint8_t *panel, const enum form f, const size_t file_bytes,
                   void (*read)(const uint8_t *, int, struct block *))
{
    struct block block;
    for (uint32_t r = first_lane; r < first_lane + n_lanes; r++, rows += row_bytes) {
        const uint8_t *b = rows;
        uint8_t *w = panel;
        for (uint32_t k = 0; k < n_cols; k += 32 * FORM_BLOCKS(f), b += file_bytes, w += FORM_BYTES(f)) {
            if (!FORM_IS_K(f)) {
                read_block(b, &block, f);
                write_block(&block, r, w, f);
                continue;
            }
            for (int j = 0; j < 8; j++) {
                read(b, j, &block);
                write_block(&block, r, w + j * FORM_BLOCK_BYTES(f), f);
            }
            memcpy(w + 8 * FORM_BLOCK_BYTES(f) + 2 * r, block.tail, 2);
            if (FORM_HAS_MIN(f))
                memcpy(w + 8 * FORM_BLOCK_BYTES(f) + 32 + 2 * r, block.tail + 2, 2);
        }
    }
}

/* ---- from panels ---------------------------------------- */

INLINE void unpack_block(const uint8_t *w, const uint8_t *tail, float *values, const enum form f)
{
    __m512 scale[2], minimum[2];
    for (int s = 0; s < FORM_SCALES(f); s++) {
        scale[s] = form_scale(w, tail, s, f);
        minimum[s] = FORM_HAS_MIN(f) ? form_min(w, tail, s, f) : _mm512_setzero_ps();
    }
    UNROLL for (int p = 0; p < 8; p++)
    {
        const int s = p * FORM_SCALES(f) / 8;
        __m512i u = form_quad(w, p, f);
        UNROLL for (int j = 0; j < 4; j++)
        {
            __m512i one = _mm512_and_si512(_mm512_srli_epi32(u, (unsigned)(8 * j)), _mm512_set1_epi32(255));
            __m512 q = _mm512_cvtepi32_ps(_mm512_sub_epi32(one, _mm512_set1_epi32(FORM_OFFSET(f))));
            __m512 value = FORM_HAS_MIN(f) ? _mm512_fmadd_ps(scale[s], q, minimum[s]) : _mm512_mul_ps(scale[s], q);
            _mm512_storeu_ps(values + (4 * p + j) * 16, value);
        }
    }
}

INLINE void unpack(const uint8_t *w, uint32_t n_blocks, float *values, const enum form f)
{
    for (; n_blocks; n_blocks--, w += FORM_BYTES(f))
        for (int j = 0; j < FORM_BLOCKS(f); j++, values += 512)
            unpack_block(w + j * FORM_BLOCK_BYTES(f), w + 8 * FORM_BLOCK_BYTES(f), values, f);
}

/* The tiles of F32 count blocks of 32 columns; these tiles count super-blocks of 256. */
#define K_TILE(P, R)                                                                                                           \
    static void k_tile_##P##_##R(TILE_ARGS)                                                                                    \
    {                                                                                                                          \
        f32_avx512_tile_##P##_##R(w, panel_stride, x, acc, n_blocks * 8, next, (next_lines + 7) / 8);                          \
    }
#define K_TILES(P)                                                                                                             \
    K_TILE(P, 1)                                                                                                               \
    K_TILE(P, 2)                                                                                                               \
    K_TILE(P, 3)                                                                                                               \
    K_TILE(P, 4) K_TILE(P, 5) K_TILE(P, 6) K_TILE(P, 7) K_TILE(P, 8) K_TILE(P, 9) K_TILE(P, 10) K_TILE(P, 11) K_TILE(P, 12)
K_TILES(1)
K_TILES(2)

#define FORM(NAME, TEXT, F, FILE_BYTES, READ, TILE)                                                                            \
    void NAME##_avx512_repack(const uint8_t *rows, size_t row_bytes, uint32_t first_lane, uint32_t n_lanes, uint32_t n_cols,   \
                              uint8_t *panel)                                                                                  \
    {                                                                                                                          \
        repack(rows, row_bytes, first_lane, n_lanes, n_cols, panel, F, FILE_BYTES, READ);                                      \
    }                                                                                                                          \
    void NAME##_avx512_unpack(const uint8_t *w, uint32_t n_blocks, float *values)                                              \
    {                                                                                                                          \
        unpack(w, n_blocks, values, F);                                                                                        \
    }                                                                                                                          \
    static void NAME##_expand(const uint8_t *w, uint32_t n_blocks, uint8_t *expanded)                                          \
    {                                                                                                                          \
        unpack(w, n_blocks, (float *)(void *)expanded, F);                                                                     \
    }                                                                                                                          \
    const struct linear_type linear_##NAME##_float_avx512 = {                                                                  \
        .name = TEXT " float",                                                                                                 \
        .dtype = DTYPE_##F,                                                                                                    \
        .arithmetic = ARITHMETIC_FLOAT,                                                                                        \
        .block_values = 32 * FORM_BLOCKS(F),                                                                                   \
        .panel_block_bytes = FORM_BYTES(F),                                                                                    \
        .strip_block_bytes = 128 * FORM_BLOCKS(F),                                                                             \
        .expanded_block_bytes = 2048 * FORM_BLOCKS(F),                                                                         \
        .slab_blocks = FORM_IS_K(F) ? 1 : 4,                                                                                   \
        .max_rows = FLOAT_ROWS,                                                                                                \
        .max_panels = 2,                                                                                                       \
        .tile = FLOAT_TILE_TABLE(TILE),                                                                                        \
        .prepare = K(prepare_float),                                                                                           \
        .repack = NAME##_avx512_repack,                                                                                        \
        .unpack = NAME##_avx512_unpack,                                                                                        \
        .expand = NAME##_expand,                                                                                               \
    };

FORM(q8_0, "q8_0", Q8_0, 34, NULL, f32_avx512_tile)
FORM(q4_0, "q4_0", Q4_0, 18, NULL, f32_avx512_tile)
FORM(q4_1, "q4_1", Q4_1, 20, NULL, f32_avx512_tile)
FORM(q5_0, "q5_0", Q5_0, 22, NULL, f32_avx512_tile)
FORM(q5_1, "q5_1", Q5_1, 24, NULL, f32_avx512_tile)
FORM(q2_k, "q2_k", Q2_K, 84, read_q2_k, k_tile)
FORM(q3_k, "q3_k", Q3_K, 110, read_q3_k, k_tile)
FORM(q4_k, "q4_k", Q4_K, 144, read_q4_k, k_tile)
FORM(q5_k, "q5_k", Q5_K, 176, read_q5_k, k_tile)
FORM(q6_k, "q6_k", Q6_K, 210, read_q6_k, k_tile)
FORM(iq4_nl, "iq4_nl", IQ4_NL, 18, NULL, f32_avx512_tile)
FORM(iq4_xs, "iq4_xs", IQ4_XS, 136, read_iq4_xs, k_tile)
