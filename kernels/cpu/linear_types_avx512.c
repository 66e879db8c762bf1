/* The weight types of AVX-512. */
#include "linear_group.h"
#include "linear_quants_avx512.h"

extern const struct linear_type linear_fp8_float_avx2; /* the same on AVX2 */
#define DECLARE(type) extern const struct linear_type linear_##type##_float_avx2, linear_##type##_int8_avx2;
EACH_GRID_TYPE(DECLARE)
#define DECLARE_TABLE(type) extern const struct linear_type linear_##type##_float_avx2;
EACH_TABLE_TYPE(DECLARE_TABLE)
#define TABLE(type) &linear_##type##_float_avx2,
#define BOTH(type) &linear_##type##_float_avx2, &linear_##type##_int8_avx2,

#define GROUP(type, bits, columns) &linear_##type##_float_avx512, &linear_##type##_int8_avx512,

static const struct linear_type *const TYPES[] = {
    &linear_f32_avx512,        &linear_f16_avx512,        &linear_bf16_avx512,       &linear_bf16_pairs_avx512,
    &linear_q8_0_int8_avx512,  &linear_q4_0_int8_avx512,  &linear_q4_1_int8_avx512,  &linear_q5_0_int8_avx512,
    &linear_q5_1_int8_avx512,  &linear_q2_k_int8_avx512,  &linear_q3_k_int8_avx512,  &linear_q4_k_int8_avx512,
    &linear_q5_k_int8_avx512,  &linear_q6_k_int8_avx512,  &linear_q8_0_float_avx512, &linear_q4_0_float_avx512,
    &linear_q4_1_float_avx512, &linear_q5_0_float_avx512, &linear_q5_1_float_avx512, &linear_q2_k_float_avx512,
    &linear_q3_k_float_avx512, &linear_q4_k_float_avx512, &linear_q5_k_float_avx512, &linear_q6_k_float_avx512,
    &linear_iq4_nl_int8_avx512, &linear_iq4_nl_float_avx512, &linear_iq4_xs_int8_avx512, &linear_iq4_xs_float_avx512,
    &linear_mxfp4_float_avx512,
    &linear_fp8_float_avx512,
    EACH_GRID_TYPE(BOTH)
    EACH_GROUP_TYPE(GROUP)
    EACH_TABLE_TYPE(TABLE)
};

const struct linear_type *linear_type_avx512(uint32_t dtype, uint32_t arithmetic)
{
    for (size_t i = 0; i < sizeof TYPES / sizeof *TYPES; i++)
        if (TYPES[i]->dtype == dtype && TYPES[i]->arithmetic == arithmetic)
            return TYPES[i];
    return NULL;
}
