/* types.cuh: CUDA_TYPES, one row for each type of numbers that the backend supports. `supports`, the layout of matrices,
 * packing, pages, matrix_fill, tensor_write and visit_weight (weight_format.cuh) ask this table alone. A new type is a row
 * here and a weight_format in weight_format.cuh; a row without its weight_format does not compile. */
#ifndef LLMPY_CUDA_TYPES_CUH
#define LLMPY_CUDA_TYPES_CUH

#include "common.cuh"

struct cuda_type {
    uint32_t dtype;
    bool is_float;       /* a type of activations and of pages; tensor_write stores it */
    bool is_fillable;    /* matrix_fill makes its values */
    uint32_t row_step;   /* rows of a matrix begin on multiples of so many bytes: 32 are a k16 step of two-byte values */
    uint32_t packed_for; /* type of activations for which experts' matrices lie in packed.cuh's order; DTYPE_NONE: never */
};

static constexpr struct cuda_type CUDA_TYPES[] = {
    /* dtype          float  fillable  row_step  packed_for */
    {DTYPE_F32,        true,  true,     1,        DTYPE_NONE},
    {DTYPE_F16,        true,  true,     32,       DTYPE_NONE},
    {DTYPE_BF16,       true,  true,     32,       DTYPE_NONE},
    {DTYPE_Q8_0,       false, false,    1,        DTYPE_NONE},
    {DTYPE_Q4_0,       false, false,    1,        DTYPE_NONE},
    {DTYPE_Q4_1,       false, false,    1,        DTYPE_NONE},
    {DTYPE_Q5_0,       false, false,    1,        DTYPE_NONE},
    {DTYPE_Q5_1,       false, false,    1,        DTYPE_NONE},
    {DTYPE_Q2_K,       false, false,    1,        DTYPE_NONE},
    {DTYPE_Q3_K,       false, false,    1,        DTYPE_NONE},
    {DTYPE_Q4_K,       false, false,    1,        DTYPE_NONE},
    {DTYPE_Q5_K,       false, false,    1,        DTYPE_NONE},
    {DTYPE_Q6_K,       false, false,    1,        DTYPE_NONE},
    {DTYPE_IQ4_NL,     false, false,    1,        DTYPE_NONE},
    {DTYPE_IQ4_XS,     false, false,    1,        DTYPE_NONE},
    {DTYPE_IQ2_XXS,    false, false,    1,        DTYPE_NONE},
    {DTYPE_IQ2_XS,     false, false,    1,        DTYPE_NONE},
    {DTYPE_IQ2_S,      false, false,    1,        DTYPE_NONE},
    {DTYPE_IQ3_XXS,    false, false,    1,        DTYPE_NONE},
    {DTYPE_IQ3_S,      false, false,    1,        DTYPE_NONE},
    {DTYPE_IQ1_S,      false, false,    1,        DTYPE_NONE},
    {DTYPE_IQ1_M,      false, false,    1,        DTYPE_NONE},
    {DTYPE_TQ1_0,      false, false,    1,        DTYPE_NONE},
    {DTYPE_TQ2_0,      false, false,    1,        DTYPE_NONE},
    {DTYPE_MXFP4,      false, true,     1,        DTYPE_BF16},
    {DTYPE_FP8,        false, false,    1,        DTYPE_NONE},
    {DTYPE_INT4_G128,  false, false,    1,        DTYPE_NONE},
    {DTYPE_INT4_G32,   false, false,    1,        DTYPE_NONE},
    {DTYPE_INT8_G128,  false, false,    1,        DTYPE_NONE},
    {DTYPE_INT8_G32,   false, false,    1,        DTYPE_NONE},
    {DTYPE_NF4,        false, false,    1,        DTYPE_NONE},
    {DTYPE_FP4,        false, false,    1,        DTYPE_NONE},
    {DTYPE_TABLE4,     false, false,    1,        DTYPE_NONE},
};
#define N_CUDA_TYPES (sizeof CUDA_TYPES / sizeof *CUDA_TYPES)

/* NULL: the backend does not have the type. */
static inline const struct cuda_type *cuda_type_of(uint32_t dtype)
{
    for (const struct cuda_type &type : CUDA_TYPES)
        if (type.dtype == dtype)
            return &type;
    return NULL;
}

static inline bool is_float_type(uint32_t dtype)
{
    const struct cuda_type *type = cuda_type_of(dtype);
    return type && type->is_float;
}

#endif
