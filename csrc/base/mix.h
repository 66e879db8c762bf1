/* mix.h: the term that one element adds to a weight's checksum. It depends on the element's index in the checkpoint's tensor
 * and on the stored bits. A checksum is a sum, so it does not depend on the order of the elements, and the host and every
 * device compute the same one. The finaliser is that of splitmix64. */
#ifndef LLMPY_MIX_H
#define LLMPY_MIX_H

#include <stdint.h>

#ifdef __CUDACC__
#define MIX_EVERYWHERE static __host__ __device__ __forceinline__
#else
#define MIX_EVERYWHERE static inline
#endif

MIX_EVERYWHERE uint64_t mix64(uint64_t index, uint32_t bits)
{
    uint64_t z = (index + 1) * 0x9E3779B97F4A7C15u + bits * (uint64_t)0xD1B54A32D192ED03u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

#endif
