#include "linear_avx2.h"

static const struct linear_type *const TYPES[] = {
    &linear_f32_avx2,
    &linear_f16_avx2,
    &linear_bf16_avx2,
};

const struct linear_type *linear_type_avx2(uint32_t dtype, uint32_t arithmetic)
{
    for (size_t i = 0; i < sizeof TYPES / sizeof *TYPES; i++)
        if (TYPES[i]->dtype == dtype && TYPES[i]->arithmetic == arithmetic)
            return TYPES[i];
    return NULL;
}
