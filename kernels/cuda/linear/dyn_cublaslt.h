/* dyn_cublaslt.h: the part of cuBLASLt that the CUDA backend uses, opened at run time. Own declarations: opaque handles are
 * void pointers, constants stand by value, structures have the library's sizes; all is the same in versions 12 and 13. */
#ifndef LLMPY_CUDA_DYN_CUBLASLT_H
#define LLMPY_CUDA_DYN_CUBLASLT_H

#include <stddef.h>
#include <stdint.h>

enum {
    LT_TYPE_F32 = 0, LT_TYPE_F16 = 2, LT_TYPE_BF16 = 14,        /* cudaDataType_t */
    LT_COMPUTE_F32 = 68,                                        /* cublasComputeType_t */
    LT_TRANSPOSED = 1,                                          /* cublasOperation_t */
    LT_DESC_TRANSPOSE_A = 3,                                    /* cublasLtMatmulDescAttributes_t */
    LT_LAYOUT_ROWS = 2, LT_LAYOUT_COLS = 3, LT_LAYOUT_LD = 4,   /* cublasLtMatrixLayoutAttribute_t */
    LT_LAYOUT_TYPE = 0,
    LT_PREF_WORKSPACE_BYTES = 1, LT_PREF_REDUCTION_MASK = 3,    /* cublasLtMatmulPreferenceAttributes_t */
    LT_PREF_ALIGNMENT_A = 5,                                    /* then B, C, D */
    LT_CONFIG_SPLIT_K = 2, LT_CONFIG_REDUCTION = 3,             /* cublasLtMatmulAlgoConfigAttributes_t */
};

struct lt_algorithm {
    uint64_t words[8];
};
struct lt_found {
    struct lt_algorithm algorithm;
    size_t workspace_bytes;
    int status;
    float waves;
    int reserved[4];
};

/* Status 0 is success. A matrix is stored by columns, ld elements apart. */
struct lt_functions {
    size_t (*version)(void);
    int (*create)(void **handle);
    int (*destroy)(void *handle);
    int (*desc_create)(void **desc, int compute_type, int scale_type);
    int (*desc_destroy)(void *desc);
    int (*desc_set)(void *desc, int attribute, const void *value, size_t size_bytes);
    int (*layout_create)(void **layout, int type, uint64_t rows, uint64_t cols, int64_t ld);
    int (*layout_destroy)(void *layout);
    int (*layout_set)(void *layout, int attribute, const void *value, size_t size_bytes);
    int (*preference_create)(void **preference);
    int (*preference_destroy)(void *preference);
    int (*preference_set)(void *preference, int attribute, const void *value, size_t size_bytes);
    int (*find)(void *handle, void *desc, void *a, void *b, void *c, void *d, void *preference, int n_wanted,
                struct lt_found *found, int *n_found);
    int (*config_get)(const struct lt_algorithm *algorithm, int attribute, void *value, size_t size_bytes, size_t *written);
    int (*multiply)(void *handle, void *desc, const void *alpha, const void *a_data, void *a, const void *b_data, void *b,
                    const void *beta, const void *c_data, void *c, void *d_data, void *d, const struct lt_algorithm *algorithm,
                    void *workspace, size_t workspace_bytes, void *stream);
};

/* Where the functions go, in the order above. */
static const char *const LT_NAMES[] = {
    "cublasLtGetVersion",
    "cublasLtCreate",
    "cublasLtDestroy",
    "cublasLtMatmulDescCreate",
    "cublasLtMatmulDescDestroy",
    "cublasLtMatmulDescSetAttribute",
    "cublasLtMatrixLayoutCreate",
    "cublasLtMatrixLayoutDestroy",
    "cublasLtMatrixLayoutSetAttribute",
    "cublasLtMatmulPreferenceCreate",
    "cublasLtMatmulPreferenceDestroy",
    "cublasLtMatmulPreferenceSetAttribute",
    "cublasLtMatmulAlgoGetHeuristic",
    "cublasLtMatmulAlgoConfigGetAttribute",
    "cublasLtMatmul",
};

#endif
