/* dtype.c: the table of storage types and their exact values, in plain portable C. Kernels are tested against it, so it is
 * readable rather than fast. Each product and sum rounds once, in the order of the format's reference: (scale * s) * q, then
 * the offset. The results therefore need the build's -ffp-contract=off. */
#include "dtype.h"

#include <string.h>

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
    [DTYPE_I8] = {{"int8", 1, 1}, NULL, NULL},
    [DTYPE_I16] = {{"int16", 1, 2}, NULL, NULL},
    [DTYPE_I32] = {{"int32", 1, 4}, NULL, NULL},
    [DTYPE_I64] = {{"int64", 1, 8}, NULL, NULL},
    [DTYPE_F64] = {{"float64", 1, 8}, f64_values, NULL},
    [DTYPE_BF16] = {{"bfloat16", 1, 2}, bf16_values, NULL},
    [DTYPE_MXFP4] = {{"mxfp4", 32, 17}, NULL, mxfp4_block},
    [DTYPE_U8] = {{"uint8", 1, 1}, NULL, NULL},
    [DTYPE_BOOL] = {{"bool", 1, 1}, NULL, NULL},
    [DTYPE_FP8] = {{"fp8", 128, 132}, NULL, fp8_block},
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
    float last[256];
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
