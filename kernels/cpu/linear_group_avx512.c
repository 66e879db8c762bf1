/* Integers in groups with float32 scales on AVX-512: layout and value in linear_group.h, y[r] = one chain of fused
 * multiply-adds over k, as on AVX2. Many rows go through the tiles of F32. Bound: one row by the bytes of the weights;
 * unpacking takes 3 or 4 instructions for 16 weights beside the multiply-add. */
#include "linear_avx512.h"
#include "linear_group.h"

struct scales {
    __m512 scale, zero;
};

INLINE struct scales scales_of(const uint8_t *dwords, const int bits)
{
    __m512i both = _mm512_loadu_si512(dwords);
    if (bits == 8)
        return (struct scales){_mm512_castsi512_ps(both), _mm512_setzero_ps()};
    __m512i zero = _mm512_and_si512(both, _mm512_set1_epi32(255));
    /* 2^23 + zero, the base of the numbers */
    return (struct scales){_mm512_castsi512_ps(_mm512_andnot_si512(_mm512_set1_epi32(255), both)),
                           _mm512_castsi512_ps(_mm512_or_si512(zero, _mm512_set1_epi32(0x4b000000)))};
}

/* The values of 16 rows of column k of a sub. At 4 bits 2^23 + q and 2^23 + zero are exact, and so is their difference. */
INLINE __m512 values_of(const uint8_t *sub, const struct scales *s, const int bits, const int k)
{
    __m512i dwords = _mm512_loadu_si512(sub + 64 * GROUP_VECTOR(bits, k));
    const unsigned shift = (unsigned)GROUP_SHIFT(bits, k);
    if (bits == 8)
        return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(dwords, 24 - shift), 24)), s->scale);
    __m512i q = _mm512_ternarylogic_epi32(_mm512_srli_epi32(dwords, shift), _mm512_set1_epi32(15),
                                          _mm512_set1_epi32(0x4b000000), 0xea); /* (a & b) | c */
    return _mm512_mul_ps(_mm512_sub_ps(_mm512_castsi512_ps(q), s->zero), s->scale);
}

INLINE void unpack(const uint8_t *w, uint32_t n_blocks, float *values, const int bits, const int columns)
{
    const size_t block_bytes = GROUP_BLOCK_BYTES((unsigned)bits, (unsigned)columns);
    for (; n_blocks; n_blocks--, w += block_bytes) {
        struct scales s = scales_of(w + block_bytes - 64, bits);
        for (int sub = 0; sub < columns / 32; sub++, values += 32 * 16)
            UNROLL for (int k = 0; k < 32; k++)
                _mm512_storeu_ps(values + 16 * k, values_of(w + (size_t)sub * GROUP_SUB_BYTES((unsigned)bits), &s, bits, k));
    }
}

/* Scales of a panel's block for the product with one row. */
struct row_scales {
    __m512 scale, addend;
};

INLINE struct row_scales row_scales_of(const uint8_t *dwords, const int bits)
{
    __m512i both = _mm512_loadu_si512(dwords);
    if (bits == 8)
        return (struct row_scales){_mm512_castsi512_ps(both), _mm512_setzero_ps()};
    __m512 scale = _mm512_castsi512_ps(_mm512_andnot_si512(_mm512_set1_epi32(255), both));
    __m512 zero = _mm512_cvtepi32_ps(_mm512_and_si512(both, _mm512_set1_epi32(255)));
    return (struct row_scales){scale, _mm512_mul_ps(_mm512_sub_ps(_mm512_set1_ps(-16), zero), scale)};
}

/* As values_of. At 4 bits the number lies in the upper bits of a fraction, which gives 16 + q; (16 + q) * scale - (16 + zero) *
 * scale is exact, since a scale has 16 significant bits and is below 2^120. */
INLINE __m512 row_values_of(const uint8_t *sub, const struct row_scales *s, const int bits, const int k)
{
    const int shift = GROUP_SHIFT(bits, k);
    if (bits == 8)
        return values_of(sub, &(struct scales){s->scale, s->addend}, bits, k);
    __m512i dwords = _mm512_loadu_si512(sub + 64 * GROUP_VECTOR(bits, k));
    dwords = shift > 19 ? _mm512_srli_epi32(dwords, (unsigned)(shift - 19)) : _mm512_slli_epi32(dwords, (unsigned)(19 - shift));
    __m512i q = _mm512_ternarylogic_epi32(dwords, _mm512_set1_epi32(15 << 19), _mm512_set1_epi32(0x41800000), 0xea);
    return _mm512_fmadd_ps(_mm512_castsi512_ps(q), s->scale, s->addend);
}

/* One row times 1 or 4 panels; four hide the latency of the additions. */
INLINE void panels(const uint8_t *w, const float *x, float *acc, uint32_t n_blocks, const int bits, const int columns,
                   const int n_panels)
{
    const size_t block_bytes = GROUP_BLOCK_BYTES((unsigned)bits, (unsigned)columns), panel_bytes = n_blocks * block_bytes;
    __m512 c[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
    struct row_scales s[4];
    for (uint32_t block = 0; block < n_blocks; block++, w += block_bytes) {
        /* behind the end of a panel follow the next panels, not those that run along */
        bool ends = block * block_bytes + GEMV_AHEAD >= panel_bytes;
        size_t ahead = GEMV_AHEAD + (ends ? (size_t)(n_panels - 1) * panel_bytes : 0);
        UNROLL for (int q = 0; q < n_panels; q++) s[q] = row_scales_of(w + (size_t)q * panel_bytes + block_bytes - 64, bits);
        for (int sub = 0; sub < columns / 32; sub++, x += 32) {
            const uint8_t *from = w + (size_t)sub * GROUP_SUB_BYTES((unsigned)bits);
            UNROLL for (int q = 0; q < n_panels; q++)
                prefetch_lines((const char *)from + (size_t)q * panel_bytes + ahead, (uint32_t)bits + 1);
            UNROLL for (int k = 0; k < 32; k++)
                UNROLL for (int q = 0; q < n_panels; q++)
                    c[q] = _mm512_fmadd_ps(row_values_of(from + (size_t)q * panel_bytes, &s[q], bits, k), _mm512_set1_ps(x[k]),
                                           c[q]);
        }
    }
    UNROLL for (int q = 0; q < n_panels; q++) _mm512_storeu_ps(acc + q * 16, c[q]);
}

/* Pads a row to whole blocks of 128 with zeros. */
void K(prepare_128)(const float *x, uint32_t stride, uint32_t n_rows, uint32_t n_cols, char *strip)
{
    uint32_t written = (n_cols + 31) / 32 * 32, padded = (n_cols + 127) / 128 * 128;
    K(prepare_float)(x, stride, n_rows, n_cols, strip);
    memset(strip + (size_t)written * n_rows * sizeof *x, 0, (size_t)(padded - written) * n_rows * sizeof *x);
}

/* The tiles of F32 count blocks of 32 columns; these tiles count blocks of 128. */
#define TILE_128(P, R)                                                                                                         \
    void f32_avx512_tile_128_##P##_##R(TILE_ARGS)                                                                              \
    {                                                                                                                          \
        f32_avx512_tile_##P##_##R(w, panel_stride, x, acc, n_blocks * 4, next, (next_lines + 3) / 4);                          \
    }
#define TILES_128(P)                                                                                                           \
    TILE_128(P, 1)                                                                                                             \
    TILE_128(P, 2)                                                                                                             \
    TILE_128(P, 3)                                                                                                             \
    TILE_128(P, 4) TILE_128(P, 5) TILE_128(P, 6) TILE_128(P, 7) TILE_128(P, 8) TILE_128(P, 9) TILE_128(P, 10)                  \
        TILE_128(P, 11) TILE_128(P, 12)
TILES_128(1)
TILES_128(2)

#define GROUP_TYPE(type, TEXT, DTYPE, bits, columns, TILE, PREPARE)                                                            \
    static void type##_unpack(const uint8_t *w, uint32_t n_blocks, float *values)                                              \
    {                                                                                                                          \
        unpack(w, n_blocks, values, bits, columns);                                                                            \
    }                                                                                                                          \
    static void type##_expand(const uint8_t *w, uint32_t n_blocks, uint8_t *expanded)                                          \
    {                                                                                                                          \
        unpack(w, n_blocks, (float *)(void *)expanded, bits, columns);                                                         \
    }                                                                                                                          \
    static void type##_gemv(const uint8_t *w, const char *x, float *acc, uint32_t n_blocks, uint32_t n_panels)                 \
    {                                                                                                                          \
        const float *xk = (const float *)(const void *)x;                                                                      \
        const size_t panel_bytes = (size_t)n_blocks * GROUP_BLOCK_BYTES(bits##u, columns##u);                                  \
        for (; n_panels >= 4; n_panels -= 4, w += 4 * panel_bytes, acc += 64)                                                  \
            panels(w, xk, acc, n_blocks, bits, columns, 4);                                                                    \
        for (; n_panels; n_panels--, w += panel_bytes, acc += 16)                                                              \
            panels(w, xk, acc, n_blocks, bits, columns, 1);                                                                    \
    }                                                                                                                          \
    const struct linear_type linear_##type##_float_avx512 = {                                                                  \
        .name = TEXT " float",                                                                                                 \
        .dtype = DTYPE,                                                                                                        \
        .arithmetic = ARITHMETIC_FLOAT,                                                                                        \
        .block_values = columns,                                                                                               \
        .panel_block_bytes = GROUP_BLOCK_BYTES(bits##u, columns##u),                                                           \
        .strip_block_bytes = 4 * (columns),                                                                                    \
        .expanded_block_bytes = 64 * (columns),                                                                                \
        .slab_blocks = 128 / (columns),                                                                                        \
        .max_rows = FLOAT_ROWS,                                                                                                \
        .max_panels = 2,                                                                                                       \
        .tile = FLOAT_TILE_TABLE(TILE),                                                                                        \
        .gemv = type##_gemv,                                                                                                   \
        .prepare = PREPARE,                                                                                                    \
        .repack = linear_##type##_repack_avx2,                                                                                 \
        .unpack = type##_unpack,                                                                                               \
        .expand = type##_expand,                                                                                               \
    };

GROUP_TYPE(int4_g128, "int4_g128", DTYPE_INT4_G128, 4, 128, f32_avx512_tile_128, K(prepare_128))
GROUP_TYPE(int4_g32, "int4_g32", DTYPE_INT4_G32, 4, 32, f32_avx512_tile, K(prepare_float))
GROUP_TYPE(int8_g128, "int8_g128", DTYPE_INT8_G128, 8, 128, f32_avx512_tile_128, K(prepare_128))
GROUP_TYPE(int8_g32, "int8_g32", DTYPE_INT8_G32, 8, 32, f32_avx512_tile, K(prepare_float))
