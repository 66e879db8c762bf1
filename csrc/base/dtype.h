/* dtype.h: the types that a tensor can be stored in. All of llmpy numbers them as GGUF does. Part of the public backend ABI:
 * append only. dtype.c has the table and the exact conversion to float32, against which every kernel is tested (formulas:
 * docs/use/quantization.md). */
#ifndef LLMPY_DTYPE_H
#define LLMPY_DTYPE_H

#include <stddef.h>
#include <stdint.h>

enum dtype {
    DTYPE_F32 = 0,
    DTYPE_F16 = 1,
    DTYPE_Q4_0 = 2,
    DTYPE_Q4_1 = 3,
    DTYPE_Q5_0 = 6,
    DTYPE_Q5_1 = 7,
    DTYPE_Q8_0 = 8,
    DTYPE_Q2_K = 10,
    DTYPE_Q3_K = 11,
    DTYPE_Q4_K = 12,
    DTYPE_Q5_K = 13,
    DTYPE_Q6_K = 14,
    DTYPE_IQ2_XXS = 16,
    DTYPE_IQ2_XS = 17,
    DTYPE_IQ3_XXS = 18,
    DTYPE_IQ1_S = 19,
    DTYPE_IQ4_NL = 20,
    DTYPE_IQ3_S = 21,
    DTYPE_IQ2_S = 22,
    DTYPE_IQ4_XS = 23,
    DTYPE_I8 = 24,
    DTYPE_I16 = 25,
    DTYPE_I32 = 26,
    DTYPE_I64 = 27,
    DTYPE_F64 = 28,
    DTYPE_IQ1_M = 29,
    DTYPE_BF16 = 30,
    DTYPE_TQ1_0 = 34,
    DTYPE_TQ2_0 = 35,
    DTYPE_MXFP4 = 39,
    DTYPE_COUNT = 42, /* GGUF's numbers are below; types that GGUF lacks are above */
    DTYPE_U8 = 64,
    DTYPE_BOOL = 65,
    /* The last block of a row of these types may hold fewer columns. */
    DTYPE_FP8 = 66,       /* a float32 scale, then 128 bytes of e4m3 */
    DTYPE_INT4_G128 = 67, /* a float32 scale whose lowest byte is the zero, then 128 nibbles, the first in the low half */
    DTYPE_INT4_G32 = 68,  /* the same with 32 nibbles */
    DTYPE_INT8_G128 = 69, /* a float32 scale, then 128 signed bytes */
    DTYPE_INT8_G32 = 70,  /* the same with 32 bytes */
    DTYPE_NF4 = 71,       /* a float32 scale, then 64 nibbles, the first in the low half, that choose one of 16 values */
    DTYPE_FP4 = 72,       /* the same with other values */
    DTYPE_TABLE4 = 73,    /* 16 float32 values, then 512 nibbles, the first in the low half, that choose one of them */
    DTYPE_NONE = 255
};

struct dtype_info {
    const char *name;      /* "float32", "bfloat16", "q4_0", ...; NULL: an unsupported type */
    uint32_t block_values; /* values in a block */
    uint32_t block_bytes;
};

/* ---- functions of the core: the header for other packages ends here (csrc/compiling.py) ---- */

const struct dtype_info *dtype_info(uint32_t dtype); /* NULL for an unsupported type */
uint32_t dtype_from_name(const char *name);          /* DTYPE_NONE when unknown */
size_t dtype_row_bytes(uint32_t dtype, size_t n_values); /* of a row of whole blocks; the last may be partly used */
/* Converts n values of one or more rows of whole blocks, or of one row whose last block is partly used, to float32, exactly as
 * the format defines them. Returns 0 and writes nothing for types without a float value (integers). */
int dtype_to_float(uint32_t dtype, const void *source, float *target, size_t n);
/* Converts float32 to DTYPE_F32, DTYPE_F16 or DTYPE_BF16, rounded to nearest even. Returns 0 for other types. */
int dtype_from_float(uint32_t dtype, const float *source, void *target, size_t n);

#endif
