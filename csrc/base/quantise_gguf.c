#include "quantise_gguf.h"

#include "dtype.h"
#include "quantise_k.h"

#include <math.h>

#define VALUES 32
#define LEAST_SCALE 0x1p-100f /* float16 has none as small: all values of the block are 0 */

static bool put_half(float value, uint8_t *to)
{
    dtype_from_float(DTYPE_F16, &value, to, 1);
    return (to[1] & 0x7c) != 0x7c;
}

static float inverse(float scale)
{
    return fabsf(scale) < LEAST_SCALE ? 0 : 1 / scale;
}

static float peak_of(const float *values)
{
    float peak = values[0];
    for (int i = 1; i < VALUES; i++)
        peak = fabsf(values[i]) > fabsf(peak) ? values[i] : peak;
    return peak;
}

static bool q8_0_block(const float *values, uint8_t *to)
{
    float scale = fabsf(peak_of(values)) / 127, by = inverse(scale);
    for (int i = 0; i < VALUES; i++) {
        float value = values[i] * by, magnitude = fabsf(value);
        int whole = (int)magnitude;
        whole += magnitude - (float)whole >= 0.5f;
        to[2 + i] = (uint8_t)(value < 0 ? -whole : whole);
    }
    return put_half(scale, to);
}

static void pack_nibbles(const uint8_t *q, uint8_t *to)
{
    for (int i = 0; i < VALUES / 2; i++)
        to[i] = (uint8_t)((q[i] & 15) | (q[i + VALUES / 2] & 15) << 4);
}

/* Products are exact in float64; a sum is rounded to float32. */
static bool peak_block(const float *values, int zero, uint8_t *to, uint8_t *q)
{
    float scale = peak_of(values) / (float)-zero;
    double by = inverse(scale);
    for (int i = 0; i < VALUES; i++) {
        int whole = (int)(float)(values[i] * by + (zero + 0.5));
        q[i] = (uint8_t)(whole < 2 * zero - 1 ? whole : 2 * zero - 1);
    }
    return put_half(scale, to);
}

static bool q4_0_block(const float *values, uint8_t *to)
{
    uint8_t q[VALUES];
    bool fits = peak_block(values, 8, to, q);
    pack_nibbles(q, to + 2);
    return fits;
}

static bool q5_0_block(const float *values, uint8_t *to)
{
    uint8_t q[VALUES];
    bool fits = peak_block(values, 16, to, q);
    for (int i = 0; i < VALUES; i++)
        to[2 + i / 8] |= (uint8_t)(q[i] >> 4 << i % 8);
    pack_nibbles(q, to + 6);
    return fits;
}

static bool q4_1_block(const float *values, uint8_t *to)
{
    uint8_t q[VALUES];
    float low = values[0], high = values[0];
    for (int i = 1; i < VALUES; i++) {
        low = values[i] < low ? values[i] : low;
        high = values[i] > high ? values[i] : high;
    }
    float scale = (high - low) / 15, by = inverse(scale);
    for (int i = 0; i < VALUES; i++) {
        int whole = (int)((values[i] - low) * by + 0.5f);
        q[i] = (uint8_t)(whole < 15 ? whole : 15);
    }
    pack_nibbles(q, to + 4);
    return put_half(scale, to) && put_half(low, to + 2);
}

typedef bool (*block_rounder)(const float *values, uint8_t *to);

static block_rounder rounder_of(uint32_t dtype)
{
    return dtype == DTYPE_Q8_0   ? q8_0_block
           : dtype == DTYPE_Q5_0 ? q5_0_block
           : dtype == DTYPE_Q4_1 ? q4_1_block
           : dtype == DTYPE_Q4_0 ? q4_0_block
           : dtype == DTYPE_Q6_K ? quantise_q6_k
           : dtype == DTYPE_Q5_K ? quantise_q5_k
           : dtype == DTYPE_Q4_K ? quantise_q4_k
           : dtype == DTYPE_Q2_K ? quantise_q2_k
                                 : NULL;
}

bool quantise_gguf_has(uint32_t dtype)
{
    return rounder_of(dtype) != NULL;
}

bool quantise_gguf_row(uint32_t dtype, const float *row, size_t n, uint8_t *to)
{
    block_rounder round = rounder_of(dtype);
    const struct dtype_info *info = dtype_info(dtype);
    bool fits = true;
    for (size_t i = 0; i < n && fits; i += info->block_values, to += info->block_bytes)
        fits = round(row + i, to);
    return fits;
}
