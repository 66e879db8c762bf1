/* weight_format.cuh: weight_format<DTYPE>, one struct a type of weights: the values and bytes of a block, and value(), the
 * exact float32 of element k of a row that lies in memory as in its file, or as fp8_rows.cuh says. The formulas and
 * their roundings are those of csrc/base/dtype.c, the definition of the types. The plain kernels read weights through
 * value(). */
#ifndef LLMPY_CUDA_WEIGHT_FORMAT_CUH
#define LLMPY_CUDA_WEIGHT_FORMAT_CUH

#include "types.cuh"

#include <cuda_fp8.h>

template <uint32_t DTYPE> struct weight_format;

template <uint32_t DTYPE, uint32_t VALUES, uint32_t BYTES> struct weight_block {
    static const uint32_t dtype = DTYPE, n_values = VALUES, n_bytes = BYTES;
};

static __device__ __forceinline__ float half_at(const uint8_t *p)
{
    return __half2float(__ushort_as_half((unsigned short)(p[0] | p[1] << 8)));
}

/* Nibble v of 32: the low halves of 16 bytes, then the high ones. */
static __device__ __forceinline__ int nibble(const uint8_t *p, uint32_t v)
{
    return v < 16 ? p[v] & 15 : p[v - 16] >> 4;
}

template <uint32_t DTYPE, class T> struct float_format : weight_block<DTYPE, 1, sizeof(T)> {
    static __device__ __forceinline__ float value(const uint8_t *row, uint32_t k)
    {
        return to_float(((const T *)row)[k]);
    }
};
template <> struct weight_format<DTYPE_F32> : float_format<DTYPE_F32, float> {};
template <> struct weight_format<DTYPE_F16> : float_format<DTYPE_F16, __half> {};
template <> struct weight_format<DTYPE_BF16> : float_format<DTYPE_BF16, __nv_bfloat16> {};

template <> struct weight_format<DTYPE_Q8_0> : weight_block<DTYPE_Q8_0, 32, 34> {
    static __device__ __forceinline__ float value(const uint8_t *row, uint32_t k)
    {
        const uint8_t *b = row + (size_t)(k / n_values) * n_bytes;
        return half_at(b) * (float)(int8_t)b[2 + k % 32];
    }
};

template <> struct weight_format<DTYPE_Q4_0> : weight_block<DTYPE_Q4_0, 32, 18> {
    static __device__ __forceinline__ float value(const uint8_t *row, uint32_t k)
    {
        const uint8_t *b = row + (size_t)(k / n_values) * n_bytes;
        return half_at(b) * (float)(nibble(b + 2, k % 32) - 8);
    }
};

template <> struct weight_format<DTYPE_Q4_1> : weight_block<DTYPE_Q4_1, 32, 20> {
    static __device__ __forceinline__ float value(const uint8_t *row, uint32_t k)
    {
        const uint8_t *b = row + (size_t)(k / n_values) * n_bytes;
        return half_at(b) * (float)nibble(b + 4, k % 32) + half_at(b + 2);
    }
};

template <> struct weight_format<DTYPE_Q5_0> : weight_block<DTYPE_Q5_0, 32, 22> {
    static __device__ __forceinline__ float value(const uint8_t *row, uint32_t k)
    {
        const uint8_t *b = row + (size_t)(k / n_values) * n_bytes;
        uint32_t v = k % 32, high = b[2 + v / 8] >> (v % 8) & 1;
        return half_at(b) * (float)((nibble(b + 6, v) | (int)high << 4) - 16);
    }
};

template <> struct weight_format<DTYPE_Q5_1> : weight_block<DTYPE_Q5_1, 32, 24> {
    static __device__ __forceinline__ float value(const uint8_t *row, uint32_t k)
    {
        const uint8_t *b = row + (size_t)(k / n_values) * n_bytes;
        uint32_t v = k % 32, high = b[4 + v / 8] >> (v % 8) & 1;
        return half_at(b) * (float)(nibble(b + 8, v) | (int)high << 4) + half_at(b + 2);
    }
};

/* 2 bits of value v of 256. */
static __device__ __forceinline__ int two_bits(const uint8_t *p, uint32_t v)
{
    return p[v / 128 * 32 + v % 32] >> (v % 128 / 32 * 2) & 3;
}

template <> struct weight_format<DTYPE_Q2_K> : weight_block<DTYPE_Q2_K, 256, 84> {
    static __device__ __forceinline__ float value(const uint8_t *row, uint32_t k)
    {
        const uint8_t *b = row + (size_t)(k / n_values) * n_bytes;
        uint32_t v = k % 256;
        int s = b[v / 16];
        return half_at(b + 80) * (float)(s & 15) * (float)two_bits(b + 16, v) - half_at(b + 82) * (float)(s >> 4);
    }
};

template <> struct weight_format<DTYPE_Q3_K> : weight_block<DTYPE_Q3_K, 256, 110> {
    static __device__ __forceinline__ float value(const uint8_t *row, uint32_t k)
    {
        const uint8_t *b = row + (size_t)(k / n_values) * n_bytes, *scales = b + 96;
        uint32_t v = k % 256, j = v / 16;
        int low = j < 8 ? scales[j] & 15 : scales[j - 8] >> 4, s = (low | (scales[8 + j % 4] >> (j / 4 * 2) & 3) << 4) - 32;
        int q = two_bits(b + 32, v) - (b[v % 32] >> (v / 32) & 1 ? 0 : 4);
        return half_at(b + 108) * (float)s * (float)q;
    }
};

/* The 6-bit scale and minimum of sub-block j from the 12 bytes that Q4_K and Q5_K have in common. */
static __device__ __forceinline__ void k_scale(const uint8_t *packed, uint32_t j, int *scale, int *minimum)
{
    if (j < 4) {
        *scale = packed[j] & 63;
        *minimum = packed[j + 4] & 63;
    } else {
        *scale = (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4;
        *minimum = packed[j + 4] >> 4 | (packed[j] >> 6) << 4;
    }
}

template <> struct weight_format<DTYPE_Q4_K> : weight_block<DTYPE_Q4_K, 256, 144> {
    static __device__ __forceinline__ float value(const uint8_t *row, uint32_t k)
    {
        const uint8_t *b = row + (size_t)(k / n_values) * n_bytes;
        uint32_t v = k % 256, j = v / 32;
        int q = b[16 + j / 2 * 32 + v % 32] >> (j % 2 * 4) & 15, scale, minimum;
        k_scale(b + 4, j, &scale, &minimum);
        return half_at(b) * (float)scale * (float)q - half_at(b + 2) * (float)minimum;
    }
};

template <> struct weight_format<DTYPE_Q5_K> : weight_block<DTYPE_Q5_K, 256, 176> {
    static __device__ __forceinline__ float value(const uint8_t *row, uint32_t k)
    {
        const uint8_t *b = row + (size_t)(k / n_values) * n_bytes;
        uint32_t v = k % 256, j = v / 32;
        int q = (b[48 + j / 2 * 32 + v % 32] >> (j % 2 * 4) & 15) | (b[16 + v % 32] >> j & 1) << 4, scale, minimum;
        k_scale(b + 4, j, &scale, &minimum);
        return half_at(b) * (float)scale * (float)q - half_at(b + 2) * (float)minimum;
    }
};

template <> struct weight_format<DTYPE_Q6_K> : weight_block<DTYPE_Q6_K, 256, 210> {
    static __device__ __forceinline__ float value(const uint8_t *row, uint32_t k)
    {
        const uint8_t *b = row + (size_t)(k / n_values) * n_bytes;
        uint32_t v = k % 256, half = v / 128, part = v % 128 / 32, l = v % 32;
        int q = b[64 * half + part % 2 * 32 + l] >> (part / 2 * 4) & 15;
        q |= (b[128 + 32 * half + l] >> (part * 2) & 3) << 4;
        return half_at(b + 208) * (float)(int8_t)b[192 + 8 * half + part * 2 + l / 16] * (float)(q - 32);
    }
};

/* The 16 levels of IQ4. */
static __device__ __forceinline__ float iq4_level(int q)
{
    const uint64_t low = 0xf6eaddcfbfad9881, high = 0x7159453526190d01; /* a byte a level, the first lowest */
    return (float)(int8_t)((q < 8 ? low : high) >> (q % 8 * 8));
}

template <> struct weight_format<DTYPE_IQ4_NL> : weight_block<DTYPE_IQ4_NL, 32, 18> {
    static __device__ __forceinline__ float value(const uint8_t *row, uint32_t k)
    {
        const uint8_t *b = row + (size_t)(k / n_values) * n_bytes;
        return half_at(b) * iq4_level(nibble(b + 2, k % 32));
    }
};

template <> struct weight_format<DTYPE_IQ4_XS> : weight_block<DTYPE_IQ4_XS, 256, 136> {
    static __device__ __forceinline__ float value(const uint8_t *row, uint32_t k)
    {
        const uint8_t *b = row + (size_t)(k / n_values) * n_bytes;
        uint32_t j = k % 256 / 32;
        int s = (b[4 + j / 2] >> (j % 2 * 4) & 15) | (b[2 + j / 4] >> (j % 4 * 2) & 3) << 4;
        return half_at(b) * (float)(s - 32) * iq4_level(nibble(b + 8 + 16 * j, k % 32));
    }
};

/* Twice the 4-bit float (e2m1), times 2^(exponent - 128). */
template <> struct weight_format<DTYPE_MXFP4> : weight_block<DTYPE_MXFP4, 32, 17> {
    static __device__ __forceinline__ float value(const uint8_t *row, uint32_t k)
    {
        const uint8_t *b = row + (size_t)(k / n_values) * n_bytes;
        int q = nibble(b + 1, k % 32), rest = q & 7, twice = rest < 4 ? rest : (2 + rest % 2) << (rest / 2 - 1);
        float scale = __uint_as_float(b[0] < 2 ? 0x00200000u << b[0] : (uint32_t)(b[0] - 1) << 23);
        return (float)(q & 8 ? -twice : twice) * scale;
    }
};

/* row: its numbers, which follow its scales (fp8_rows.cuh). */
template <> struct weight_format<DTYPE_FP8> : weight_block<DTYPE_FP8, 128, 132> {
    static __device__ __forceinline__ float value(const uint8_t *row, uint32_t k)
    {
        const float scale = ((const float *)row)[-1 - (int)(k / n_values)];
        return __half2float(__half(__nv_cvt_fp8_to_halfraw(row[k], __NV_E4M3))) * scale;
    }
};

/* (number - zero) * scale. A block's first word is the scale, and its lowest byte the zero. */
template <uint32_t DTYPE, uint32_t VALUES, uint32_t BYTES> struct int4_format : weight_block<DTYPE, VALUES, BYTES> {
    static __device__ __forceinline__ float value(const uint8_t *row, uint32_t k)
    {
        const uint8_t *b = row + (size_t)(k / VALUES) * BYTES;
        const uint32_t header = *(const uint32_t *)b, v = k % VALUES;
        return (float)((b[4 + v / 2] >> v % 2 * 4 & 15) - (int)(header & 0xff)) * __uint_as_float(header & 0xffffff00u);
    }
};
template <> struct weight_format<DTYPE_INT4_G128> : int4_format<DTYPE_INT4_G128, 128, 68> {};
template <> struct weight_format<DTYPE_INT4_G32> : int4_format<DTYPE_INT4_G32, 32, 20> {};

/* number * scale, which is a block's first word. */
template <uint32_t DTYPE, uint32_t VALUES, uint32_t BYTES> struct int8_format : weight_block<DTYPE, VALUES, BYTES> {
    static __device__ __forceinline__ float value(const uint8_t *row, uint32_t k)
    {
        const uint8_t *b = row + (size_t)(k / VALUES) * BYTES;
        return (float)(int8_t)b[4 + k % VALUES] * *(const float *)b;
    }
};
template <> struct weight_format<DTYPE_INT8_G32> : int8_format<DTYPE_INT8_G32, 32, 36> {};

/* row: its numbers, which follow its scales (fp8_rows.cuh). */
template <> struct weight_format<DTYPE_INT8_G128> : weight_block<DTYPE_INT8_G128, 128, 132> {
    static __device__ __forceinline__ float value(const uint8_t *row, uint32_t k)
    {
        return (float)(int8_t)row[k] * ((const float *)row)[-1 - (int)(k / n_values)];
    }
};

/* One of 16 values times a block's first word. */
template <> struct weight_format<DTYPE_NF4> : weight_block<DTYPE_NF4, 64, 36> {
    static __device__ __forceinline__ float value(const uint8_t *row, uint32_t k)
    {
        static const float table[16] = {
            -1, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
            -0.18477343022823334f, -0.09105003625154495f, 0, 0.07958029955625534f, 0.16093020141124725f,
            0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1};
        const uint8_t *b = row + (size_t)(k / n_values) * n_bytes;
        return table[b[4 + k % 64 / 2] >> k % 2 * 4 & 15] * *(const float *)b;
    }
};
template <> struct weight_format<DTYPE_FP4> : weight_block<DTYPE_FP4, 64, 36> {
    static __device__ __forceinline__ float value(const uint8_t *row, uint32_t k)
    {
        static const float table[16] = {
            0, 0.0625f / 12, 8.0f / 12, 1, 4.0f / 12, 0.5f, 2.0f / 12, 0.25f,
            0, -0.0625f / 12, -8.0f / 12, -1, -4.0f / 12, -0.5f, -2.0f / 12, -0.25f};
        const uint8_t *b = row + (size_t)(k / n_values) * n_bytes;
        return table[b[4 + k % 64 / 2] >> k % 2 * 4 & 15] * *(const float *)b;
    }
};

/* A block begins with the 16 values of its row. */
template <> struct weight_format<DTYPE_TABLE4> : weight_block<DTYPE_TABLE4, 512, 320> {
    static __device__ __forceinline__ float value(const uint8_t *row, uint32_t k)
    {
        const uint8_t *b = row + (size_t)(k / n_values) * n_bytes;
        return ((const float *)b)[b[64 + k % 512 / 2] >> k % 2 * 4 & 15];
    }
};

/* The other types of GGUF. */
#include "weight_format_iq.cuh"

/* Calls f with the format of a type, by the rows of CUDA_TYPES; does nothing for other types. */
template <size_t ROW = 0, class F> static void visit_weight(uint32_t dtype, F f)
{
    if constexpr (ROW < N_CUDA_TYPES) {
        if (CUDA_TYPES[ROW].dtype == dtype)
            f(weight_format<CUDA_TYPES[ROW].dtype>());
        else
            visit_weight<ROW + 1>(dtype, f);
    }
}

#endif
