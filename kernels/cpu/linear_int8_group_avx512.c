/* The integer kernels of groups on AVX-512: formula and bound in linear_int8_avx512.h, layout in linear_group.h. A group of 128
 * columns has four scales of activations. */
#include "linear_int8_avx512.h"

#define GROUP_TYPE(type, FORM, SLAB)                                                                                           \
    static linear_prepare type##_prepare_groups;                                                                               \
    INT8_TYPE_OF(type, #type, FORM, SLAB, type##_prepare_groups, linear_##type##_repack_avx2, linear_##type##_unpack_avx2)     \
    static void type##_prepare_groups(const float *x, uint32_t stride, uint32_t n_rows, uint32_t n_cols, char *strip)          \
    {                                                                                                                          \
        group_prepare(type##_prepare, 32 * FORM_BLOCKS(FORM), FORM_STRIP_BYTES(FORM), x, stride, n_rows, n_cols, strip);       \
    }

GROUP_TYPE(int4_g128, INT4_G128, 8)
GROUP_TYPE(int4_g32, INT4_G32, 32)
GROUP_TYPE(int8_g128, INT8_G128, 4)
GROUP_TYPE(int8_g32, INT8_G32, 16)
