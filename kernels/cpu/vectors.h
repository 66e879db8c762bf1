/* vectors.h: the vectors of x86, from the compiler; on aarch64 those of AVX2 from neon.h. */
#ifndef LLMPY_VECTORS_H
#define LLMPY_VECTORS_H

#ifdef __aarch64__
#include "neon.h"
#define IN_REGISTERS(a, b) ((void)0)
#else
#include <immintrin.h>
#define IN_REGISTERS(a, b) __asm__("" : "+x"(a), "+x"(b)) /* the compiler does not compute these vectors again */
#endif

#endif
