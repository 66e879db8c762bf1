/* dtype.c: the table of storage types and their exact values, in plain portable C. Kernels are tested against it, so it is
 * readable rather than fast. Each product and sum rounds once, in the order of the format's reference: (scale * s) * q, then
 * the offset. The results therefore need the build's -ffp-contract=off. */
#include "dtype.h"

#include "iq_grids.h"

#include <string.h>

#define GRID(name, n) const uint16_t grid_##name[n] = {
#define GRID_END };
#include "iq_grids.def"
#undef GRID
#undef GRID_END

static float f32_from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint32_t bits_of_f32(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static uint16_t load_u16(const uint8_t *p)
{
    return (uint16_t)(p[0] | p[1] << 8);
}

static uint32_t load_u32(const uint8_t *p)
{
    return load_u16(p) | (uint32_t)load_u16(p + 2) << 16;
}

/* A NaN becomes quiet and keeps its payload, as in the processors' conversion instructions. The code computes all cases and
 * selects one, so that the compiler can vectorise it. */
static float f32_from_f16(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, magnitude = half & 0x7fff;
    uint32_t normal = (magnitude << 13) + (112u << 23), subnormal = bits_of_f32((float)(int32_t)magnitude * 0x1p-24f);
    uint32_t special = magnitude << 13 | 0x7f800000u | (magnitude > 0x7c00 ? 0x400000u : 0);
    return f32_from_bits(sign | (magnitude < 0x400 ? subnormal : magnitude < 0x7c00 ? normal : special));
}

static uint16_t f16_from_f32(float value)
{
    uint32_t bits = bits_of_f32(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
    if (magnitude >= 0x477ff000u) /* 65520 and more round to infinity */
        return (uint16_t)(sign | 0x7c00);
    if (magnitude >= 0x38800000u) { /* normal: a carry out of the fraction increments the exponent */
        uint32_t rebased = magnitude - (112u << 23);
        return (uint16_t)(sign | (rebased + 0xfff + (rebased >> 13 & 1)) >> 13);
    }
    /* Subnormal: adding 0.5 leaves multiples of 2^-24 in the fraction, rounded to nearest even by the addition. */
    return (uint16_t)(sign | (bits_of_f32(f32_from_bits(magnitude) + 0.5f) - 0x3f000000u));
}

static uint16_t bf16_from_f32(float value)
{
    uint32_t bits = bits_of_f32(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float load_f16(const uint8_t *p)
{
    return f32_from_f16(load_u16(p));
}

/* ---- plain types: n values at a time ---- */

static void f32_values(const uint8_t *b, float *y, size_t n)
{
    memmove(y, b, n * sizeof *y);
}

static void f64_values(const uint8_t *b, float *y, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        double value;
        memcpy(&value, b + 8 * i, sizeof value);
        y[i] = (float)value;
    }
}

static void f16_values(const uint8_t *b, float *y, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] = load_f16(b + 2 * i);
}

static void bf16_values(const uint8_t *b, float *y, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] = f32_from_bits((uint32_t)load_u16(b + 2 * i) << 16);
}

/* ---- quantised types: b is one block, y its values ---- */

static void q4_0_block(const uint8_t *b, float *y)
{
    float d = load_f16(b);
    for (int j = 0; j < 16; j++) {
        y[j] = d * (float)((b[2 + j] & 15) - 8);
        y[j + 16] = d * (float)((b[2 + j] >> 4) - 8);
    }
}

static void q4_1_block(const uint8_t *b, float *y)
{
    float d = load_f16(b), m = load_f16(b + 2);
    for (int j = 0; j < 16; j++) {
        y[j] = d * (float)(b[4 + j] & 15) + m;
        y[j + 16] = d * (float)(b[4 + j] >> 4) + m;
    }
}

static void q5_0_block(const uint8_t *b, float *y)
{
    float d = load_f16(b);
    uint32_t high = load_u32(b + 2);
    for (int j = 0; j < 16; j++) {
        y[j] = d * (float)((int)((b[6 + j] & 15) | (high >> j & 1) << 4) - 16);
        y[j + 16] = d * (float)((int)((b[6 + j] >> 4) | (high >> (j + 16) & 1) << 4) - 16);
    }
}

static void q5_1_block(const uint8_t *b, float *y)
{
    float d = load_f16(b), m = load_f16(b + 2);
    uint32_t high = load_u32(b + 4);
    for (int j = 0; j < 16; j++) {
        y[j] = d * (float)((b[8 + j] & 15) | (high >> j & 1) << 4) + m;
        y[j + 16] = d * (float)((b[8 + j] >> 4) | (high >> (j + 16) & 1) << 4) + m;
    }
}

static void q8_0_block(const uint8_t *b, float *y)
{
    float d = load_f16(b);
    for (int j = 0; j < 32; j++)
        y[j] = d * (float)(int8_t)b[2 + j];
}

static void q2_k_block(const uint8_t *b, float *y)
{
    const uint8_t *scales = b, *qs = b + 16;
    float d = load_f16(b + 80), dmin = load_f16(b + 82);
    for (int v = 0; v < 256; v++) {
        int q = qs[v / 128 * 32 + v % 32] >> (v % 128 / 32 * 2) & 3, s = scales[v / 16];
        y[v] = d * (float)(s & 15) * (float)q - dmin * (float)(s >> 4);
    }
}

static void q3_k_block(const uint8_t *b, float *y)
{
    const uint8_t *high_mask = b, *qs = b + 32, *scales = b + 96;
    float d = load_f16(b + 108);
    for (int v = 0; v < 256; v++) {
        int j = v / 16;
        int low = j < 8 ? scales[j] & 15 : scales[j - 8] >> 4;
        int s = (low | (scales[8 + j % 4] >> (j / 4 * 2) & 3) << 4) - 32;
        int q = (qs[v / 128 * 32 + v % 32] >> (v % 128 / 32 * 2) & 3) - (high_mask[v % 32] >> (v / 32) & 1 ? 0 : 4);
        y[v] = d * (float)s * (float)q;
    }
}

/* Unpacks the 6-bit scale and minimum of sub-block j (0..7) from the 12 bytes that Q4_K and Q5_K have in common. */
static void k_scale(const uint8_t *packed, int j, float *scale, float *minimum)
{
    if (j < 4) {
        *scale = (float)(packed[j] & 63);
        *minimum = (float)(packed[j + 4] & 63);
    } else {
        *scale = (float)((packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4);
        *minimum = (float)(packed[j + 4] >> 4 | (packed[j] >> 6) << 4);
    }
}

static void q4_k_block(const uint8_t *b, float *y)
{
    const uint8_t *qs = b + 16;
    float d = load_f16(b), dmin = load_f16(b + 2);
    for (int j = 0; j < 8; j++) {
        float scale, minimum;
        k_scale(b + 4, j, &scale, &minimum);
        for (int l = 0; l < 32; l++) {
            int q = qs[j / 2 * 32 + l] >> (j % 2 * 4) & 15;
            y[j * 32 + l] = d * scale * (float)q - dmin * minimum;
        }
    }
}

static void q5_k_block(const uint8_t *b, float *y)
{
    const uint8_t *high = b + 16, *qs = b + 48;
    float d = load_f16(b), dmin = load_f16(b + 2);
    for (int j = 0; j < 8; j++) {
        float scale, minimum;
        k_scale(b + 4, j, &scale, &minimum);
        for (int l = 0; l < 32; l++) {
            int q = (qs[j / 2 * 32 + l] >> (j % 2 * 4) & 15) | (high[l] >> j & 1) << 4;
            y[j * 32 + l] = d * scale * (float)q - dmin * minimum;
        }
    }
}

static void q6_k_block(const uint8_t *b, float *y)
{
    float d = load_f16(b + 208);
    for (int half = 0; half < 2; half++) {
        const uint8_t *low = b + 64 * half, *high = b + 128 + 32 * half;
        const int8_t *scales = (const int8_t *)(b + 192 + 8 * half);
        for (int part = 0; part < 4; part++)
            for (int l = 0; l < 32; l++) {
                int q = low[part % 2 * 32 + l] >> (part / 2 * 4) & 15;
                q |= (high[l] >> (part * 2) & 3) << 4;
                y[128 * half + 32 * part + l] = d * (float)scales[part * 2 + l / 16] * (float)(q - 32);
            }
    }
}

/* ---- IQ types: a number is one of a few levels; IQ2, IQ3 and IQ1 take 4 or 8 numbers at a time from a grid ---- */

static const float IQ4_LEVELS[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

static void iq4_values(float scale, const uint8_t *qs, float *y)
{
    for (int j = 0; j < 16; j++) {
        y[j] = scale * IQ4_LEVELS[qs[j] & 15];
        y[j + 16] = scale * IQ4_LEVELS[qs[j] >> 4];
    }
}

static void iq4_nl_block(const uint8_t *b, float *y)
{
    iq4_values(load_f16(b), b + 2, y);
}

static void iq4_xs_block(const uint8_t *b, float *y)
{
    float d = load_f16(b);
    uint32_t high = load_u16(b + 2);
    for (int j = 0; j < 8; j++) {
        int s = (b[4 + j / 2] >> (j % 2 * 4) & 15) | (int)(high >> (2 * j) & 3) << 4;
        iq4_values(d * (float)(s - 32), b + 8 + 16 * j, y + 32 * j);
    }
}

/* 8 signs from 7 bits: the eighth bit makes the number of negative signs even. */
static uint32_t even_signs(uint32_t bits)
{
    uint32_t parity = bits ^ bits >> 4;
    parity ^= parity >> 2;
    return bits | ((parity ^ parity >> 1) & 1) << 7;
}

/* Four groups of 7 bits, in the order of the groups. */
static uint32_t even_signs_of(uint32_t packed, int group)
{
    return even_signs(packed >> (7 * group) & 127);
}

static void iq2_group(float scale, uint32_t entry, uint32_t signs, float *y)
{
    static const float levels[4] = {8, 25, 43};
    for (int j = 0; j < 8; j++) {
        float value = scale * levels[entry >> (2 * j) & 3];
        y[j] = signs >> j & 1 ? -value : value;
    }
}

static void iq2_xxs_block(const uint8_t *b, float *y)
{
    float d = load_f16(b);
    for (int j = 0; j < 8; j++) {
        const uint8_t *index = b + 2 + 8 * j;
        uint32_t packed = load_u32(index + 4);
        float scale = d * (0.5f + (float)(packed >> 28)) * 0.25f;
        for (int g = 0; g < 4; g++)
            iq2_group(scale, grid_iq2_xxs[index[g]], even_signs_of(packed, g), y + 32 * j + 8 * g);
    }
}

static void iq2_xs_block(const uint8_t *b, float *y)
{
    float d = load_f16(b);
    for (int g = 0; g < 32; g++) {
        uint32_t index = load_u16(b + 2 + 2 * g), s = b[66 + g / 4] >> (g / 2 % 2 * 4) & 15;
        iq2_group(d * (0.5f + (float)s) * 0.25f, grid_iq2_xs[index & 511], even_signs(index >> 9), y + 8 * g);
    }
}

static void iq2_s_block(const uint8_t *b, float *y)
{
    const uint8_t *qs = b + 2, *signs = b + 34, *high = b + 66, *scales = b + 74;
    float d = load_f16(b);
    for (int g = 0; g < 32; g++) {
        uint32_t index = qs[g] | (uint32_t)(high[g / 4] >> (g % 4 * 2) & 3) << 8, s = scales[g / 4] >> (g / 2 % 2 * 4) & 15;
        iq2_group(d * (0.5f + (float)s) * 0.25f, grid_iq2_s[index], signs[g], y + 8 * g);
    }
}

/* 8 numbers: two entries of 4. */
static void iq3_group(float scale, const float *levels, uint32_t first, uint32_t second, uint32_t signs, float *y)
{
    uint32_t entries = first | second << 16;
    for (int j = 0; j < 8; j++) {
        float value = scale * levels[entries >> (4 * j) & 7];
        y[j] = signs >> j & 1 ? -value : value;
    }
}

static void iq3_xxs_block(const uint8_t *b, float *y)
{
    static const float levels[8] = {4, 12, 20, 28, 36, 44, 52, 62};
    float d = load_f16(b);
    for (int j = 0; j < 8; j++) {
        const uint8_t *index = b + 2 + 8 * j;
        uint32_t packed = load_u32(b + 66 + 4 * j);
        float scale = d * (0.5f + (float)(packed >> 28)) * 0.5f;
        for (int g = 0; g < 4; g++)
            iq3_group(scale, levels, grid_iq3_xxs[index[2 * g]], grid_iq3_xxs[index[2 * g + 1]], even_signs_of(packed, g),
                      y + 32 * j + 8 * g);
    }
}

static void iq3_s_block(const uint8_t *b, float *y)
{
    static const float levels[8] = {1, 3, 5, 7, 9, 11, 13, 15};
    const uint8_t *qs = b + 2, *signs = b + 74;
    float d = load_f16(b);
    for (int g = 0; g < 32; g++) {
        uint32_t high = b[66 + g / 4] >> (g % 4 * 2), s = b[106 + g / 8] >> (g / 4 % 2 * 4) & 15;
        uint32_t first = qs[2 * g] | (high & 1) << 8, second = qs[2 * g + 1] | (high >> 1 & 1) << 8;
        iq3_group(d * (float)(1 + 2 * s), levels, grid_iq3_s[first], grid_iq3_s[second], signs[g], y + 8 * g);
    }
}

/* 8 numbers of -1, 0 and 1, all moved by 1/8 up or down. */
static void iq1_group(float scale, uint32_t entry, int is_down, float *y)
{
    float delta = is_down ? -0.125f : 0.125f;
    for (int j = 0; j < 8; j++)
        y[j] = scale * ((float)((int)(entry >> (2 * j) & 3) - 1) + delta);
}

static void iq1_s_block(const uint8_t *b, float *y)
{
    float d = load_f16(b);
    for (int g = 0; g < 32; g++) {
        uint32_t high = load_u16(b + 34 + g / 4 * 2), index = b[2 + g] | (high >> (g % 4 * 3) & 7) << 8;
        iq1_group(d * (float)(2 * (high >> 12 & 7) + 1), grid_iq1[index], high >> 15 & 1, y + 8 * g);
    }
}

/* The float16 scale is the highest 4 bits of the four words that hold the 3-bit scales of 16 columns. */
static void iq1_m_block(const uint8_t *b, float *y)
{
    uint32_t words[4], half = 0;
    for (int i = 0; i < 4; i++) {
        words[i] = load_u16(b + 48 + 2 * i);
        half |= words[i] >> 12 << (4 * i);
    }
    float d = f32_from_f16((uint16_t)half);
    for (int g = 0; g < 32; g++) {
        uint32_t high = b[32 + g / 2] >> (g % 2 * 4), index = b[g] | (high & 7) << 8, s = words[g / 8] >> (g / 2 % 4 * 3) & 7;
        iq1_group(d * (float)(2 * s + 1), grid_iq1[index], high >> 3 & 1, y + 8 * g);
    }
}

/* ---- TQ types: -1, 0 or 1 times the scale ---- */

/* Digit n of a byte that holds base-3 digits as a fraction of 256. */
static float ternary(uint8_t byte, int n)
{
    static const uint8_t powers[5] = {1, 3, 9, 27, 81};
    return (float)((uint8_t)(byte * powers[n]) * 3 / 256 - 1);
}

static void tq1_0_block(const uint8_t *b, float *y)
{
    float d = load_f16(b + 52);
    for (int n = 0; n < 5; n++)
        for (int j = 0; j < 48; j++)
            y[j < 32 ? 32 * n + j : 160 + 16 * n + j - 32] = d * ternary(b[j], n);
    for (int n = 0; n < 4; n++)
        for (int j = 0; j < 4; j++)
            y[240 + 4 * n + j] = d * ternary(b[48 + j], n);
}

static void tq2_0_block(const uint8_t *b, float *y)
{
    float d = load_f16(b + 64);
    for (int v = 0; v < 256; v++)
        y[v] = d * (float)((b[v / 128 * 32 + v % 32] >> (v % 128 / 32 * 2) & 3) - 1);
}

/* Microscaling: an exponent, then 4-bit floats (e2m1). The table has twice their values; the scale has the factor 1/2. */
static void mxfp4_block(const uint8_t *b, float *y)
{
    static const float values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    float scale = f32_from_bits(b[0] < 2 ? 0x00200000u << b[0] : (uint32_t)(b[0] - 1) << 23); /* 2^(b[0] - 128) */
    for (int j = 0; j < 16; j++) {
        y[j] = values[b[1 + j] & 15] * scale;
        y[j + 16] = values[b[1 + j] >> 4] * scale;
    }
}

/* e4m3: no infinity, bits 0x7f and 0xff are NaN. A value is rounded once, in the product with the scale. */
static void fp8_block(const uint8_t *b, float *y)
{
    float scale = f32_from_bits(load_u32(b));
    for (int j = 0; j < 128; j++) {
        uint32_t bits = b[4 + j], sign = (bits & 0x80) << 24, magnitude = bits & 0x7f;
        uint32_t subnormal = bits_of_f32((float)magnitude * 0x1p-9f), normal = (magnitude << 20) + (120u << 23);
        uint32_t value = magnitude == 0x7f ? 0x7fc00000u : magnitude < 8 ? subnormal : normal;
        y[j] = f32_from_bits(sign | value) * scale;
    }
}

/* (q - zero) * scale. The scale has the upper 24 bits of the header: all of a float16 or a bfloat16. */
static void int4_values(const uint8_t *b, int n, float *y)
{
    uint32_t header = load_u32(b);
    float scale = f32_from_bits(header & 0xffffff00u);
    for (int j = 0; j < n; j++)
        y[j] = (float)((b[4 + j / 2] >> j % 2 * 4 & 15) - (int)(header & 0xff)) * scale;
}

static void int8_values(const uint8_t *b, int n, float *y)
{
    float scale = f32_from_bits(load_u32(b));
    for (int j = 0; j < n; j++)
        y[j] = (float)(int8_t)b[4 + j] * scale;
}

static void int4_g128_block(const uint8_t *b, float *y)
{
    int4_values(b, 128, y);
}

static void int4_g32_block(const uint8_t *b, float *y)
{
    int4_values(b, 32, y);
}

static void int8_g128_block(const uint8_t *b, float *y)
{
    int8_values(b, 128, y);
}

static void int8_g32_block(const uint8_t *b, float *y)
{
    int8_values(b, 32, y);
}

static void table_values(const float *table, const uint8_t *b, float *y)
{
    float scale = f32_from_bits(load_u32(b));
    for (int j = 0; j < 64; j++)
        y[j] = table[b[4 + j / 2] >> j % 2 * 4 & 15] * scale;
}

/* Quantiles of a normal distribution, of bitsandbytes. */
static void nf4_block(const uint8_t *b, float *y)
{
    static const float table[16] = {
        -1, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f, -0.18477343022823334f,
        -0.09105003625154495f, 0, 0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
        0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1};
    table_values(table, b, y);
}

/* 4-bit floats of bitsandbytes: 0, 1/16, 8, 12, 4, 6, 2, 3, all divided by 12, then their negatives. */
static void fp4_block(const uint8_t *b, float *y)
{
    static const float table[16] = {
        0, 0.0625f / 12, 8.0f / 12, 1, 4.0f / 12, 0.5f, 2.0f / 12, 0.25f,
        0, -0.0625f / 12, -8.0f / 12, -1, -4.0f / 12, -0.5f, -2.0f / 12, -0.25f};
    table_values(table, b, y);
}

static void table4_block(const uint8_t *b, float *y)
{
    for (int j = 0; j < 512; j++)
        y[j] = f32_from_bits(load_u32(b + 4 * (b[64 + j / 2] >> j % 2 * 4 & 15)));
}

typedef void (*values_reader)(const uint8_t *stored, float *values, size_t n);
typedef void (*block_reader)(const uint8_t *block, float *values);

static const struct {
    struct dtype_info info;
    values_reader values; /* NULL: read block by block */
    block_reader block;   /* both NULL: no float value */
} TYPES[] = {
    [DTYPE_F32] = {{"float32", 1, 4}, f32_values, NULL},
    [DTYPE_F16] = {{"float16", 1, 2}, f16_values, NULL},
    [DTYPE_Q4_0] = {{"q4_0", 32, 18}, NULL, q4_0_block},
    [DTYPE_Q4_1] = {{"q4_1", 32, 20}, NULL, q4_1_block},
    [DTYPE_Q5_0] = {{"q5_0", 32, 22}, NULL, q5_0_block},
    [DTYPE_Q5_1] = {{"q5_1", 32, 24}, NULL, q5_1_block},
    [DTYPE_Q8_0] = {{"q8_0", 32, 34}, NULL, q8_0_block},
    [DTYPE_Q2_K] = {{"q2_k", 256, 84}, NULL, q2_k_block},
    [DTYPE_Q3_K] = {{"q3_k", 256, 110}, NULL, q3_k_block},
    [DTYPE_Q4_K] = {{"q4_k", 256, 144}, NULL, q4_k_block},
    [DTYPE_Q5_K] = {{"q5_k", 256, 176}, NULL, q5_k_block},
    [DTYPE_Q6_K] = {{"q6_k", 256, 210}, NULL, q6_k_block},
    [DTYPE_IQ2_XXS] = {{"iq2_xxs", 256, 66}, NULL, iq2_xxs_block},
    [DTYPE_IQ2_XS] = {{"iq2_xs", 256, 74}, NULL, iq2_xs_block},
    [DTYPE_IQ3_XXS] = {{"iq3_xxs", 256, 98}, NULL, iq3_xxs_block},
    [DTYPE_IQ1_S] = {{"iq1_s", 256, 50}, NULL, iq1_s_block},
    [DTYPE_IQ4_NL] = {{"iq4_nl", 32, 18}, NULL, iq4_nl_block},
    [DTYPE_IQ3_S] = {{"iq3_s", 256, 110}, NULL, iq3_s_block},
    [DTYPE_IQ2_S] = {{"iq2_s", 256, 82}, NULL, iq2_s_block},
    [DTYPE_IQ4_XS] = {{"iq4_xs", 256, 136}, NULL, iq4_xs_block},
    [DTYPE_I8] = {{"int8", 1, 1}, NULL, NULL},
    [DTYPE_I16] = {{"int16", 1, 2}, NULL, NULL},
    [DTYPE_I32] = {{"int32", 1, 4}, NULL, NULL},
    [DTYPE_I64] = {{"int64", 1, 8}, NULL, NULL},
    [DTYPE_F64] = {{"float64", 1, 8}, f64_values, NULL},
    [DTYPE_IQ1_M] = {{"iq1_m", 256, 56}, NULL, iq1_m_block},
    [DTYPE_BF16] = {{"bfloat16", 1, 2}, bf16_values, NULL},
    [DTYPE_TQ1_0] = {{"tq1_0", 256, 54}, NULL, tq1_0_block},
    [DTYPE_TQ2_0] = {{"tq2_0", 256, 66}, NULL, tq2_0_block},
    [DTYPE_MXFP4] = {{"mxfp4", 32, 17}, NULL, mxfp4_block},
    [DTYPE_U8] = {{"uint8", 1, 1}, NULL, NULL},
    [DTYPE_BOOL] = {{"bool", 1, 1}, NULL, NULL},
    [DTYPE_FP8] = {{"fp8", 128, 132}, NULL, fp8_block},
    [DTYPE_INT4_G128] = {{"int4_g128", 128, 68}, NULL, int4_g128_block},
    [DTYPE_INT4_G32] = {{"int4_g32", 32, 20}, NULL, int4_g32_block},
    [DTYPE_INT8_G128] = {{"int8_g128", 128, 132}, NULL, int8_g128_block},
    [DTYPE_INT8_G32] = {{"int8_g32", 32, 36}, NULL, int8_g32_block},
    [DTYPE_NF4] = {{"nf4", 64, 36}, NULL, nf4_block},
    [DTYPE_FP4] = {{"fp4", 64, 36}, NULL, fp4_block},
    [DTYPE_TABLE4] = {{"table4", 512, 320}, NULL, table4_block},
};
#define N_TYPES (sizeof TYPES / sizeof *TYPES)

const struct dtype_info *dtype_info(uint32_t dtype)
{
    return dtype < N_TYPES && TYPES[dtype].info.name ? &TYPES[dtype].info : NULL;
}

uint32_t dtype_from_name(const char *name)
{
    for (uint32_t dtype = 0; dtype < N_TYPES; dtype++)
        if (TYPES[dtype].info.name && strcmp(TYPES[dtype].info.name, name) == 0)
            return dtype;
    return DTYPE_NONE;
}

size_t dtype_row_bytes(uint32_t dtype, size_t n_values)
{
    const struct dtype_info *info = dtype_info(dtype);
    return (n_values + info->block_values - 1) / info->block_values * info->block_bytes;
}

static void read_blocks(block_reader read, const struct dtype_info *info, const uint8_t *block, float *target, size_t n)
{
    float last[512];
    for (; n >= info->block_values; n -= info->block_values, block += info->block_bytes, target += info->block_values)
        read(block, target);
    if (!n)
        return;
    read(block, last);
    memcpy(target, last, n * sizeof *last);
}

int dtype_to_float(uint32_t dtype, const void *source, float *target, size_t n)
{
    const struct dtype_info *info = dtype_info(dtype);
    if (!info || (!TYPES[dtype].values && !TYPES[dtype].block))
        return 0;
    const uint8_t *block = source;
    if (TYPES[dtype].values)
        TYPES[dtype].values(block, target, n);
    else
        read_blocks(TYPES[dtype].block, info, block, target, n);
    return 1;
}

int dtype_from_float(uint32_t dtype, const float *source, void *target, size_t n)
{
    if (dtype == DTYPE_F32) {
        memmove(target, source, n * sizeof *source);
        return 1;
    }
    if (dtype != DTYPE_F16 && dtype != DTYPE_BF16)
        return 0;
    uint8_t *bytes = target;
    for (size_t i = 0; i < n; i++) {
        uint16_t bits = dtype == DTYPE_F16 ? f16_from_f32(source[i]) : bf16_from_f32(source[i]);
        bytes[2 * i] = (uint8_t)bits;
        bytes[2 * i + 1] = (uint8_t)(bits >> 8);
    }
    return 1;
}
