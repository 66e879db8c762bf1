/* dummy.h: dummy values of weights, for models without a checkpoint. A value is an odd 24-bit number from a counter's hash,
 * times 0.0692 / 2^24: never zero, uniform, standard deviation 0.02. The value of row r and column c depends on (key, r, c)
 * only and is rounded once, so a backend that generates values gets the same bits as the host. The key comes from the seed and
 * the tensor's name (weights.c). MXFP4 blocks have random 4-bit floats and one fixed exponent; standard deviation 0.023. */
#ifndef LLMPY_DUMMY_H
#define LLMPY_DUMMY_H

#include <stdint.h>

#ifdef __CUDACC__
#define DUMMY_EVERYWHERE static __host__ __device__ __forceinline__
#else
#define DUMMY_EVERYWHERE static inline
#endif

/* The key of a row: one round of splitmix64. */
DUMMY_EVERYWHERE uint64_t dummy_row(uint64_t key, uint32_t row)
{
    uint64_t z = key + (row + (uint64_t)1) * 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

DUMMY_EVERYWHERE uint32_t dummy_bits(uint64_t row_key, uint32_t column)
{
    uint32_t h = (uint32_t)row_key + column * 0x9E3779B9u;
    h = (h ^ h >> 16) * 0x21F0AAADu;
    h ^= (uint32_t)(row_key >> 32);
    h = (h ^ h >> 15) * 0x735A2D97u;
    return h ^ h >> 15;
}

DUMMY_EVERYWHERE float dummy_value(uint64_t row_key, uint32_t column)
{
    return (float)((int32_t)(dummy_bits(row_key, column) >> 8 | 1) - (1 << 23)) * (0.0692f * 0x1p-24f);
}

/* Block i of a row: 17 bytes. */
DUMMY_EVERYWHERE void dummy_mxfp4(uint64_t row_key, uint32_t i, uint8_t *block)
{
    block[0] = 120;
    for (uint32_t j = 0; j < 16; j++)
        block[1 + j] = (uint8_t)(dummy_bits(row_key, 16 * i + j) >> 24);
}

#endif
