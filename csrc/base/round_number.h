/* round_number.h: how a float32 becomes a number of a quantised type (quantise.h has the formulas). The host and the CUDA
 * backend compile this text, so both give the same bits: every operation is one IEEE operation, and products and sums stay
 * apart. Magnitudes are at most ROUND_MOST. */
#ifndef LLMPY_ROUND_NUMBER_H
#define LLMPY_ROUND_NUMBER_H

#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define ROUND_EVERYWHERE static __host__ __device__ __forceinline__
#else
#define ROUND_EVERYWHERE static inline
#endif

#define ROUND_MOST 0x71800000u           /* bits of 2^100 */
#define ROUND_LEAST_SCALE 0x1p-100f      /* of numbers that are all 0 */
#define ROUND_TO_INTEGER 0x1.8p23f       /* added to a float below 2^22, it leaves the nearest integer in the lowest bits */
#define ROUND_TO_INTEGER_BITS 0x4b400000u

ROUND_EVERYWHERE uint32_t round_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

ROUND_EVERYWHERE float round_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The scale of numbers up to `most` for values whose largest magnitude has these bits. */
ROUND_EVERYWHERE float round_scale(uint32_t largest_bits, float most)
{
    float scale = round_float(largest_bits) / most;
    return scale < ROUND_LEAST_SCALE ? ROUND_LEAST_SCALE : scale;
}

/* For magnitudes of at most 448. Adding 2^14 leaves multiples of 2^-9 in the lowest bits. */
ROUND_EVERYWHERE uint8_t round_e4m3(float value)
{
    uint32_t bits = round_bits(value), magnitude = bits & 0x7fffffffu;
    uint32_t normal = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120u << 3);
    uint32_t subnormal = round_bits(round_float(magnitude) + 0x1p14f) - 0x46800000u;
    return (uint8_t)((bits >> 24 & 0x80) | (magnitude < 0x3c800000u ? subnormal : normal));
}

/* For magnitudes below 2^22. */
ROUND_EVERYWHERE int32_t round_nearest(float value)
{
    return (int32_t)(round_bits(value + ROUND_TO_INTEGER) - ROUND_TO_INTEGER_BITS);
}

ROUND_EVERYWHERE uint8_t round_int8(float value)
{
    return (uint8_t)round_bits(value + ROUND_TO_INTEGER);
}

/* Maps bits of floats to integers of the same order, and such integers to bits. */
ROUND_EVERYWHERE int32_t round_ordered(uint32_t bits)
{
    return (int32_t)(bits >> 31 ? bits ^ 0x7fffffffu : bits);
}

/* A bfloat16 scale and a zero from the smallest and the largest value, as round_ordered has them; low <= 0 <= high. */
ROUND_EVERYWHERE uint32_t round_int4_header(int32_t low, int32_t high)
{
    float least = round_float((uint32_t)round_ordered((uint32_t)low));
    float exact = (round_float((uint32_t)high) - least) / 15;
    exact = exact < ROUND_LEAST_SCALE ? ROUND_LEAST_SCALE : exact;
    uint32_t bits = round_bits(exact), upper = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    int32_t zero = round_nearest(-least / round_float(upper));
    return upper | (uint32_t)(zero > 15 ? 15 : zero);
}

ROUND_EVERYWHERE uint8_t round_int4(float value, uint32_t header)
{
    int32_t number = round_nearest(value / round_float(header & 0xffffff00u)) + (int32_t)(header & 0xff);
    return (uint8_t)(number < 0 ? 0 : number > 15 ? 15 : number);
}

#endif
