/* The integer kernels of the types with blocks of 32 on AVX-512: formula, layouts and bound in linear_int8_avx512.h. */
#include "linear_int8_avx512.h"

INT8_TYPE(q8_0, "q8_0", Q8_0, 16)
INT8_TYPE(q4_0, "q4_0", Q4_0, 32)
INT8_TYPE(q4_1, "q4_1", Q4_1, 32)
INT8_TYPE(q5_0, "q5_0", Q5_0, 24)
INT8_TYPE(q5_1, "q5_1", Q5_1, 24)
INT8_TYPE(iq4_nl, "iq4_nl", IQ4_NL, 32)
