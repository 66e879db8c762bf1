/* The weight types of AVX-512: those without kernels of their own are served by AVX2's, which run on the same machines. */
#include "linear_type.h"

const struct linear_type *linear_type_avx512(uint32_t dtype, uint32_t arithmetic)
{
    return linear_type_avx2(dtype, arithmetic);
}
