/* cublaslt.cuh: products by cuBLASLt, if the process can open it: y = x W^T with a given algorithm, and the algorithms for a
 * shape that do not split k. The caller compares their bits with the plain chain's. The library stays open. */
#ifndef LLMPY_CUDA_CUBLASLT_CUH
#define LLMPY_CUDA_CUBLASLT_CUH

#include "../core/common.cuh"
#include "dyn_cublaslt.h"

#include <dlfcn.h>
#include <string.h>

#define LT_WORKSPACE_BYTES ((size_t)32 << 20)

struct lt {
    struct lt_functions call;
    void *handle, *desc, *preference;
    void *w, *x, *y; /* layouts: by columns, so W is n_cols x n_out and transposed, x n_cols x n_rows, y n_out x n_rows */
    void *workspace;
};

/* y [n_rows][n_out] of x [n_rows][n_cols] and W [n_out][n_cols]; strides in elements. */
struct lt_product {
    const void *w, *x;
    void *y;
    int64_t w_stride, x_stride, y_stride;
    uint64_t n_rows, n_out, n_cols;
    bool is_float; /* y */
};

static inline void lt_close(struct lt *lt)
{
    if (!lt)
        return;
    for (void *layout : {lt->w, lt->x, lt->y})
        if (layout)
            lt->call.layout_destroy(layout);
    if (lt->preference)
        lt->call.preference_destroy(lt->preference);
    if (lt->desc)
        lt->call.desc_destroy(lt->desc);
    if (lt->handle)
        lt->call.destroy(lt->handle);
    mem_free(lt);
}

static inline bool lt_prepare(struct cuda *cuda, struct lt *lt, int type)
{
    const int transposed = LT_TRANSPOSED;
    const uint32_t no_reduction = 0, alignment = 16;
    const size_t workspace_bytes = LT_WORKSPACE_BYTES;
    const struct lt_functions *call = &lt->call;
    int failed = call->create(&lt->handle) || call->desc_create(&lt->desc, LT_COMPUTE_F32, LT_TYPE_F32) ||
                 call->desc_set(lt->desc, LT_DESC_TRANSPOSE_A, &transposed, sizeof transposed) ||
                 call->layout_create(&lt->w, type, 64, 64, 64) || call->layout_create(&lt->x, type, 64, 64, 64) ||
                 call->layout_create(&lt->y, type, 64, 64, 64) || call->preference_create(&lt->preference) ||
                 call->preference_set(lt->preference, LT_PREF_WORKSPACE_BYTES, &workspace_bytes, sizeof workspace_bytes) ||
                 call->preference_set(lt->preference, LT_PREF_REDUCTION_MASK, &no_reduction, sizeof no_reduction);
    for (int i = 0; i < 4 && !failed; i++)
        failed = call->preference_set(lt->preference, LT_PREF_ALIGNMENT_A + i, &alignment, sizeof alignment);
    return !failed && cuda_take(cuda, MEMORY_WORK, LT_WORKSPACE_BYTES, &lt->workspace, NULL) == RC_OK;
}

/* NULL if the library is missing or too old. */
static inline struct lt *lt_open(struct cuda *cuda, const char *path)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    struct lt *lt = library ? (struct lt *)mem_calloc(1, sizeof *lt) : NULL;
    if (!lt)
        return NULL;
    const size_t n = sizeof LT_NAMES / sizeof *LT_NAMES;
    static_assert(sizeof lt->call == n * sizeof(void *), "a name for every function");
    void *found[n];
    bool has_all = true;
    for (size_t i = 0; i < n; i++)
        has_all &= (found[i] = dlsym(library, LT_NAMES[i])) != NULL;
    memcpy(&lt->call, found, sizeof lt->call);
    if (has_all && lt_prepare(cuda, lt, cuda->dtype == DTYPE_F16 ? LT_TYPE_F16 : LT_TYPE_BF16))
        return lt;
    if (has_all)
        lt_close(lt);
    else
        mem_free(lt);
    cudaGetLastError();
    return NULL;
}

static inline int lt_shape(const struct lt *lt, void *layout, uint64_t rows, uint64_t cols, int64_t ld)
{
    return lt->call.layout_set(layout, LT_LAYOUT_ROWS, &rows, sizeof rows) ||
           lt->call.layout_set(layout, LT_LAYOUT_COLS, &cols, sizeof cols) ||
           lt->call.layout_set(layout, LT_LAYOUT_LD, &ld, sizeof ld);
}

static inline bool lt_describe(const struct lt *lt, const struct lt_product *p, uint32_t dtype)
{
    int type = p->is_float ? LT_TYPE_F32 : dtype == DTYPE_F16 ? LT_TYPE_F16 : LT_TYPE_BF16;
    return !(lt->call.layout_set(lt->y, LT_LAYOUT_TYPE, &type, sizeof type) ||
             lt_shape(lt, lt->w, p->n_cols, p->n_out, p->w_stride) || lt_shape(lt, lt->x, p->n_cols, p->n_rows, p->x_stride) ||
             lt_shape(lt, lt->y, p->n_out, p->n_rows, p->y_stride));
}

/* Enqueues the product; false: the library refuses. */
static inline bool lt_multiply(const struct lt *lt, const struct lt_product *p, uint32_t dtype,
                               const struct lt_algorithm *algorithm, cudaStream_t stream)
{
    const float one = 1, zero = 0;
    return lt_describe(lt, p, dtype) &&
           !lt->call.multiply(lt->handle, lt->desc, &one, p->w, lt->w, p->x, lt->x, &zero, p->y, lt->y, p->y, lt->y, algorithm,
                              lt->workspace, LT_WORKSPACE_BYTES, stream);
}

/* Lists the algorithms that the library proposes, best first, without those that split k. Returns their number. */
static inline uint32_t lt_find(const struct lt *lt, const struct lt_product *p, uint32_t dtype, struct lt_algorithm *algorithms,
                               uint32_t n_max)
{
    struct lt_found found[16];
    int n_found = 0;
    uint32_t n = 0;
    if (!lt_describe(lt, p, dtype) ||
        lt->call.find(lt->handle, lt->desc, lt->w, lt->x, lt->y, lt->y, lt->preference, 16, found, &n_found))
        return 0;
    for (int i = 0; i < n_found && n < n_max; i++) {
        uint32_t split = 1, reduction = 0;
        size_t written;
        const struct lt_algorithm *algorithm = &found[i].algorithm;
        bool is_known =
            !found[i].status &&
            !lt->call.config_get(algorithm, LT_CONFIG_SPLIT_K, &split, sizeof split, &written) &&
            !lt->call.config_get(algorithm, LT_CONFIG_REDUCTION, &reduction, sizeof reduction, &written);
        if (is_known && split <= 1 && !reduction && found[i].workspace_bytes <= LT_WORKSPACE_BYTES)
            algorithms[n++] = *algorithm;
    }
    return n;
}

#endif
