#include "quantise.h"

#include "dtype.h"

#include <string.h>

#define HEADER_BYTES 4
#define MOST_BITS 0x71800000u /* of 2^100 */
#define LEAST_SCALE 0x1p-100f /* of numbers that are all 0 */
#define ROUND_TO_INTEGER 0x1.8p23f /* added to a float below 2^22, it leaves the nearest integer in the lowest bits */

static uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Bits of the largest magnitude. Comparing bits orders NaNs last, and the compiler vectorises it. */
static uint32_t largest(const float *values, size_t n)
{
    uint32_t most = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t magnitude = bits_of(values[i]) & 0x7fffffffu;
        most = magnitude > most ? magnitude : most;
    }
    return most;
}

static float scale_of(uint32_t largest_bits, float most)
{
    float scale = float_of(largest_bits) / most;
    return scale < LEAST_SCALE ? LEAST_SCALE : scale;
}

/* For magnitudes of at most 448. Adding 2^14 leaves multiples of 2^-9 in the lowest bits. */
static uint8_t e4m3_of(float value)
{
    uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffffu;
    uint32_t normal = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120u << 3);
    uint32_t subnormal = bits_of(float_of(magnitude) + 0x1p14f) - 0x46800000u;
    return (uint8_t)((bits >> 24 & 0x80) | (magnitude < 0x3c800000u ? subnormal : normal));
}

static void fp8_numbers(const float *values, size_t n, float scale, uint8_t *to)
{
    for (size_t i = 0; i < n; i++)
        to[i] = e4m3_of(values[i] / scale);
}

static void int8_numbers(const float *values, size_t n, float scale, uint8_t *to)
{
    for (size_t i = 0; i < n; i++)
        to[i] = (uint8_t)bits_of(values[i] / scale + ROUND_TO_INTEGER);
}

/* For magnitudes below 2^22. */
static int32_t nearest(float value)
{
    return (int32_t)(bits_of(value + ROUND_TO_INTEGER) - bits_of(ROUND_TO_INTEGER));
}

/* Maps bits of floats to integers of the same order, and such integers to bits. */
static int32_t ordered(uint32_t bits)
{
    return (int32_t)(bits >> 31 ? bits ^ 0x7fffffffu : bits);
}

static uint32_t int4_header(const float *values, size_t n)
{
    int32_t low = 0, high = 0;
    for (size_t i = 0; i < n; i++) {
        int32_t value = ordered(bits_of(values[i]));
        low = value < low ? value : low;
        high = value > high ? value : high;
    }
    float least = float_of((uint32_t)ordered((uint32_t)low)), exact = (float_of((uint32_t)high) - least) / 15;
    uint16_t upper;
    exact = exact < LEAST_SCALE ? LEAST_SCALE : exact;
    dtype_from_float(DTYPE_BF16, &exact, &upper, 1);
    int32_t zero = nearest(-least / float_of((uint32_t)upper << 16));
    return (uint32_t)upper << 16 | (uint32_t)(zero > 15 ? 15 : zero);
}

static void int4_numbers(const float *values, size_t n, uint32_t header, uint8_t *to)
{
    float scale = float_of(header & 0xffffff00u);
    int32_t zero = (int32_t)(header & 0xff);
    uint8_t q[128] = {0};
    for (size_t i = 0; i < n; i++) {
        int32_t number = nearest(values[i] / scale) + zero;
        q[i] = (uint8_t)(number < 0 ? 0 : number > 15 ? 15 : number);
    }
    for (size_t i = 0; i < (n + 1) / 2; i++)
        to[i] = (uint8_t)(q[2 * i] | q[2 * i + 1] << 4);
}

/* ---- the types ------------------------------------------------------------------------------------------------------- */

enum kind { NONE, FP8, INT8, INT4 };

static enum kind kind_of(uint32_t dtype)
{
    return dtype == DTYPE_FP8                                  ? FP8
           : dtype == DTYPE_INT8_G128 || dtype == DTYPE_INT8_G32 ? INT8
           : dtype == DTYPE_INT4_G128 || dtype == DTYPE_INT4_G32 ? INT4
                                                                 : NONE;
}

bool quantise_has(uint32_t dtype)
{
    return kind_of(dtype) != NONE;
}

bool quantise_row(uint32_t dtype, const float *row, size_t n, void *to)
{
    const struct dtype_info *info = dtype_info(dtype);
    enum kind kind = kind_of(dtype);
    uint32_t most = largest(row, n);
    if (most > MOST_BITS)
        return false;
    float of_row = scale_of(most, 448);
    uint8_t *block = to;
    memset(to, 0, dtype_row_bytes(dtype, n));
    for (size_t first = 0, left; first < n; first += info->block_values, block += info->block_bytes) {
        left = n - first < info->block_values ? n - first : info->block_values;
        const float *values = row + first;
        float scale = kind == FP8 ? of_row : scale_of(largest(values, left), 127);
        uint32_t header = kind == INT4 ? int4_header(values, left) : bits_of(scale);
        memcpy(block, &header, HEADER_BYTES);
        if (kind == INT4)
            int4_numbers(values, left, header, block + HEADER_BYTES);
        else
            (kind == FP8 ? fp8_numbers : int8_numbers)(values, left, scale, block + HEADER_BYTES);
    }
    return true;
}

bool quantise_rows(uint32_t dtype, uint32_t from, const void *rows, size_t n_rows, size_t n_cols, float *floats, void *to)
{
    size_t row_bytes = dtype_row_bytes(dtype, n_cols);
    bool fits = true;
    dtype_to_float(from, rows, floats, n_rows * n_cols);
    if (!quantise_has(dtype))
        return dtype_from_float(dtype, floats, to, n_rows * n_cols);
    for (size_t i = 0; i < n_rows && fits; i++)
        fits = quantise_row(dtype, floats + i * n_cols, n_cols, (uint8_t *)to + i * row_bytes);
    return fits;
}
