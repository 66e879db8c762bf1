/* The weight types of AVX2. */
#include "linear_group.h"
#include "linear_quants_avx2.h"

#define GROUP(type, bits, columns) &linear_##type##_float_avx2, &linear_##type##_int8_avx2,
#define TABLE(type) &linear_##type##_float_avx2,
#define BOTH(type) &linear_##type##_float_avx2, &linear_##type##_int8_avx2,

static const struct linear_type *const TYPES[] = {
    &linear_f32_avx2,
    &linear_f16_avx2,
    &linear_bf16_avx2,
    &linear_mxfp4_float_avx2,
    &linear_fp8_float_avx2,
    EACH_GROUP_TYPE(GROUP)
    EACH_TABLE_TYPE(TABLE)
    BOTH(q8_0) EACH_QUANT(BOTH) EACH_ROW_TYPE(BOTH)
};

const struct linear_type *linear_type_avx2(uint32_t dtype, uint32_t arithmetic)
{
    for (size_t i = 0; i < sizeof TYPES / sizeof *TYPES; i++)
        if (TYPES[i]->dtype == dtype && TYPES[i]->arithmetic == arithmetic)
            return TYPES[i];
    return NULL;
}
