#include "quantise.h"

#include "dtype.h"
#include "quantise_gguf.h"
#include "round_number.h"

#include <string.h>

#define HEADER_BYTES 4

/* Bits of the largest magnitude. Comparing bits orders NaNs last, and the compiler vectorises it. */
static uint32_t largest(const float *values, size_t n)
{
    uint32_t most = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t magnitude = round_bits(values[i]) & 0x7fffffffu;
        most = magnitude > most ? magnitude : most;
    }
    return most;
}

static void fp8_numbers(const float *values, size_t n, float scale, uint8_t *to)
{
    for (size_t i = 0; i < n; i++)
        to[i] = round_e4m3(values[i] / scale);
}

static void int8_numbers(const float *values, size_t n, float scale, uint8_t *to)
{
    for (size_t i = 0; i < n; i++)
        to[i] = round_int8(values[i] / scale);
}

static uint32_t int4_header(const float *values, size_t n)
{
    int32_t low = 0, high = 0;
    for (size_t i = 0; i < n; i++) {
        int32_t value = round_ordered(round_bits(values[i]));
        low = value < low ? value : low;
        high = value > high ? value : high;
    }
    return round_int4_header(low, high);
}

static void int4_numbers(const float *values, size_t n, uint32_t header, uint8_t *to)
{
    uint8_t q[128] = {0};
    for (size_t i = 0; i < n; i++)
        q[i] = round_int4(values[i], header);
    for (size_t i = 0; i < (n + 1) / 2; i++)
        to[i] = (uint8_t)(q[2 * i] | q[2 * i + 1] << 4);
}

/* The nearest of 16 values, the lower of two that are as near. */
static void nf4_numbers(const float *values, size_t n, float scale, uint8_t *to)
{
    static const uint8_t all[HEADER_BYTES + 32] = {0, 0, 0x80, 0x3f, 0x10, 0x32, 0x54, 0x76, 0x98, 0xba, 0xdc, 0xfe};
    float codes[64];
    dtype_to_float(DTYPE_NF4, all, codes, 64);
    for (size_t i = 0; i < n; i++) {
        uint8_t q = 0;
        for (int k = 0; k < 15; k++)
            q += values[i] / scale > (codes[k] + codes[k + 1]) / 2;
        to[i / 2] |= (uint8_t)(q << i % 2 * 4);
    }
}

/* ---- the types ------------------------------------------------------------------------------------------------------- */

enum kind { NONE, FP8, INT8, INT4, NF4, GGUF };

static enum kind kind_of(uint32_t dtype)
{
    return dtype == DTYPE_FP8                                  ? FP8
           : dtype == DTYPE_INT8_G128 || dtype == DTYPE_INT8_G32 ? INT8
           : dtype == DTYPE_INT4_G128 || dtype == DTYPE_INT4_G32 ? INT4
           : dtype == DTYPE_NF4                                  ? NF4
           : quantise_gguf_has(dtype)                            ? GGUF
                                                                 : NONE;
}

bool quantise_has(uint32_t dtype)
{
    return kind_of(dtype) != NONE;
}

bool quantise_on_devices(uint32_t dtype)
{
    return quantise_has(dtype) && kind_of(dtype) < NF4;
}

bool quantise_row(uint32_t dtype, const float *row, size_t n, void *to)
{
    const struct dtype_info *info = dtype_info(dtype);
    enum kind kind = kind_of(dtype);
    uint32_t most = largest(row, n);
    if (most > ROUND_MOST)
        return false;
    float of_row = round_scale(most, 448);
    uint8_t *block = to;
    memset(to, 0, dtype_row_bytes(dtype, n));
    if (kind == GGUF)
        return quantise_gguf_row(dtype, row, n, to);
    for (size_t first = 0, left; first < n; first += info->block_values, block += info->block_bytes) {
        left = n - first < info->block_values ? n - first : info->block_values;
        const float *values = row + first;
        float scale = kind == FP8 ? of_row : round_scale(largest(values, left), kind == NF4 ? 1 : 127);
        uint32_t header = kind == INT4 ? int4_header(values, left) : round_bits(scale);
        memcpy(block, &header, HEADER_BYTES);
        if (kind == INT4)
            int4_numbers(values, left, header, block + HEADER_BYTES);
        else
            (kind == FP8 ? fp8_numbers : kind == NF4 ? nf4_numbers : int8_numbers)(values, left, scale, block + HEADER_BYTES);
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
