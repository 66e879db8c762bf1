/* weight_format_iq.cuh: the weight_format of GGUF's IQ2, IQ3, IQ1 and TQ types, 256 values in a block. A value takes its place
 * in a grid (iq_grids.def), its level, and its sign. Right, not fast: each value reads its index and scale again. */
#ifndef LLMPY_CUDA_WEIGHT_FORMAT_IQ_CUH
#define LLMPY_CUDA_WEIGHT_FORMAT_IQ_CUH

#define GRID(name, n) static __device__ const uint16_t device_grid_##name[n] = {
#define GRID_END };
#include "../../../csrc/base/iq_grids.def"
#undef GRID
#undef GRID_END

static __device__ __forceinline__ uint32_t u16_at(const uint8_t *p)
{
    return p[0] | p[1] << 8;
}

static __device__ __forceinline__ uint32_t u32_at(const uint8_t *p)
{
    return u16_at(p) | u16_at(p + 2) << 16;
}

/* 4 bits: the low half of a byte, or the high one. */
static __device__ __forceinline__ uint32_t half_byte(uint8_t byte, bool is_high)
{
    return is_high ? byte >> 4 : byte & 15;
}

/* Whether number j of 8 is negative. 7 bits; an eighth makes the number of negative signs even. */
static __device__ __forceinline__ bool even_sign(uint32_t bits, uint32_t j)
{
    uint32_t parity = bits ^ bits >> 4;
    parity ^= parity >> 2;
    return (bits | ((parity ^ parity >> 1) & 1) << 7) >> j & 1;
}

/* Number j of an entry of 2 bits each: 8, 25 or 43 times a scale. */
static __device__ __forceinline__ float iq2_value(float scale, uint32_t entry, uint32_t j, bool is_negative)
{
    const uint32_t level = entry >> (2 * j) & 3;
    const float value = scale * (level == 0 ? 8.0f : level == 1 ? 25.0f : 43.0f);
    return is_negative ? -value : value;
}

template <> struct weight_format<DTYPE_IQ2_XXS> : weight_block<DTYPE_IQ2_XXS, 256, 66> {
    static __device__ __forceinline__ float value(const uint8_t *row, uint32_t k)
    {
        const uint8_t *b = row + (size_t)(k / n_values) * n_bytes, *index = b + 2 + 8 * (k % 256 / 32);
        const uint32_t group = k % 32 / 8, packed = u32_at(index + 4);
        const float scale = half_at(b) * (0.5f + (float)(packed >> 28)) * 0.25f;
        return iq2_value(scale, device_grid_iq2_xxs[index[group]], k % 8, even_sign(packed >> (7 * group) & 127, k % 8));
    }
};

template <> struct weight_format<DTYPE_IQ2_XS> : weight_block<DTYPE_IQ2_XS, 256, 74> {
    static __device__ __forceinline__ float value(const uint8_t *row, uint32_t k)
    {
        const uint8_t *b = row + (size_t)(k / n_values) * n_bytes;
        const uint32_t group = k % 256 / 8, index = u16_at(b + 2 + 2 * group), s = half_byte(b[66 + group / 4], group / 2 % 2);
        const float scale = half_at(b) * (0.5f + (float)s) * 0.25f;
        return iq2_value(scale, device_grid_iq2_xs[index & 511], k % 8, even_sign(index >> 9, k % 8));
    }
};

template <> struct weight_format<DTYPE_IQ2_S> : weight_block<DTYPE_IQ2_S, 256, 82> {
    static __device__ __forceinline__ float value(const uint8_t *row, uint32_t k)
    {
        const uint8_t *b = row + (size_t)(k / n_values) * n_bytes;
        const uint32_t group = k % 256 / 8, s = half_byte(b[74 + group / 4], group / 2 % 2);
        const uint32_t index = b[2 + group] | (b[66 + group / 4] >> (group % 4 * 2) & 3) << 8;
        const float scale = half_at(b) * (0.5f + (float)s) * 0.25f;
        return iq2_value(scale, device_grid_iq2_s[index], k % 8, b[34 + group] >> (k % 8) & 1);
    }
};

template <> struct weight_format<DTYPE_IQ3_XXS> : weight_block<DTYPE_IQ3_XXS, 256, 98> {
    static __device__ __forceinline__ float value(const uint8_t *row, uint32_t k)
    {
        const uint8_t *b = row + (size_t)(k / n_values) * n_bytes;
        const uint32_t packed = u32_at(b + 66 + 4 * (k % 256 / 32));
        const uint32_t level = device_grid_iq3_xxs[b[2 + k % 256 / 4]] >> (4 * (k % 4)) & 7;
        const float scale = half_at(b) * (0.5f + (float)(packed >> 28)) * 0.5f;
        const float value = scale * (level < 7 ? 4.0f + 8.0f * (float)level : 62.0f);
        return even_sign(packed >> (7 * (k % 32 / 8)) & 127, k % 8) ? -value : value;
    }
};

template <> struct weight_format<DTYPE_IQ3_S> : weight_block<DTYPE_IQ3_S, 256, 110> {
    static __device__ __forceinline__ float value(const uint8_t *row, uint32_t k)
    {
        const uint8_t *b = row + (size_t)(k / n_values) * n_bytes;
        const uint32_t four = k % 256 / 4, index = b[2 + four] | (b[66 + four / 8] >> (four % 8) & 1) << 8;
        const uint32_t s = half_byte(b[106 + four / 16], four / 8 % 2), level = device_grid_iq3_s[index] >> (4 * (k % 4)) & 7;
        const float value = half_at(b) * (float)(1 + 2 * s) * (float)(1 + 2 * level);
        return b[74 + four / 2] >> (k % 8) & 1 ? -value : value;
    }
};

/* Number j of an entry, -1, 0 or 1, moved by 1/8 up or down. */
static __device__ __forceinline__ float iq1_value(float scale, uint32_t entry, uint32_t j, bool is_down)
{
    return scale * ((float)((int)(entry >> (2 * j) & 3) - 1) + (is_down ? -0.125f : 0.125f));
}

template <> struct weight_format<DTYPE_IQ1_S> : weight_block<DTYPE_IQ1_S, 256, 50> {
    static __device__ __forceinline__ float value(const uint8_t *row, uint32_t k)
    {
        const uint8_t *b = row + (size_t)(k / n_values) * n_bytes;
        const uint32_t group = k % 256 / 8, high = u16_at(b + 34 + group / 4 * 2);
        const uint32_t index = b[2 + group] | (high >> (group % 4 * 3) & 7) << 8;
        return iq1_value(half_at(b) * (float)(2 * (high >> 12 & 7) + 1), device_grid_iq1[index], k % 8, high >> 15);
    }
};

/* The scale is the highest 4 bits of the four words that hold the 3-bit scales of 16 columns. */
template <> struct weight_format<DTYPE_IQ1_M> : weight_block<DTYPE_IQ1_M, 256, 56> {
    static __device__ __forceinline__ float value(const uint8_t *row, uint32_t k)
    {
        const uint8_t *b = row + (size_t)(k / n_values) * n_bytes;
        const uint32_t group = k % 256 / 8, high = half_byte(b[32 + group / 2], group % 2);
        const uint32_t index = b[group] | (high & 7) << 8, s = u16_at(b + 48 + group / 8 * 2) >> (group / 2 % 4 * 3) & 7;
        const uint8_t bits[2] = {(uint8_t)(b[49] >> 4 | (b[51] & 0xf0)), (uint8_t)(b[53] >> 4 | (b[55] & 0xf0))};
        return iq1_value(half_at(bits) * (float)(2 * s + 1), device_grid_iq1[index], k % 8, high >> 3);
    }
};

/* Five digits of -1, 0 and 1 in a byte, as a fraction of 256 in base 3. */
template <> struct weight_format<DTYPE_TQ1_0> : weight_block<DTYPE_TQ1_0, 256, 54> {
    static __device__ __forceinline__ float value(const uint8_t *row, uint32_t k)
    {
        const uint8_t *b = row + (size_t)(k / n_values) * n_bytes;
        const uint32_t v = k % 256, digit = v < 160 ? v / 32 : v < 240 ? (v - 160) / 16 : (v - 240) / 4;
        const uint32_t byte = b[v < 160 ? v % 32 : v < 240 ? 32 + v % 16 : 48 + v % 4];
        const uint32_t power = digit == 0 ? 1 : digit == 1 ? 3 : digit == 2 ? 9 : digit == 3 ? 27 : 81;
        return half_at(b + 52) * (float)((int)((byte * power & 255) * 3 / 256) - 1);
    }
};

template <> struct weight_format<DTYPE_TQ2_0> : weight_block<DTYPE_TQ2_0, 256, 66> {
    static __device__ __forceinline__ float value(const uint8_t *row, uint32_t k)
    {
        const uint8_t *b = row + (size_t)(k / n_values) * n_bytes;
        return half_at(b + 64) * (float)(two_bits(b, k % 256) - 1);
    }
};

#endif
