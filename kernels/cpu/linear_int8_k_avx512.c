/* The integer kernels of the K types (super-blocks of 256) on AVX-512: formula, layouts and bound in linear_int8_avx512.h. */
#include "linear_int8_avx512.h"

INT8_TYPE(q2_k, "q2_k", Q2_K, 6)
INT8_TYPE(q3_k, "q3_k", Q3_K, 6)
INT8_TYPE(q4_k, "q4_k", Q4_K, 4)
INT8_TYPE(q5_k, "q5_k", Q5_K, 3)
INT8_TYPE(q6_k, "q6_k", Q6_K, 3)
INT8_TYPE(iq4_xs, "iq4_xs", IQ4_XS, 4)
