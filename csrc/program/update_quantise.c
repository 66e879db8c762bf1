#include "update_quantise.h"

#include "../base/mem.h"
#include "../base/quantise.h"

#include <string.h>

static enum rc out_of_memory(struct err *err)
{
    return err_set(err, RC_MEMORY, "weight update: out of memory");
}

/* The items of a view's row, one after the other. */
static void gather(const struct tensor_view *view, uint32_t row, char *to)
{
    size_t item = dtype_info(view->dtype)->block_bytes;
    const char *from = (const char *)view->data + (ptrdiff_t)item * view->row_stride * row;
    for (uint32_t c = 0; c < view->n_cols; c++)
        memcpy(to + c * item, from + (ptrdiff_t)item * view->col_stride * c, item);
}

enum rc update_quantise(const struct tensor_view *view, uint32_t dtype, void **rows, struct err *err)
{
    size_t row_bytes = dtype_row_bytes(dtype, view->n_cols);
    float *floats = mem_alloc(2 * view->n_cols * sizeof *floats);
    *rows = mem_alloc(row_bytes * view->n_rows + 1);
    enum rc rc = floats && *rows ? RC_OK : out_of_memory(err);
    for (uint32_t i = 0; i < view->n_rows && !rc; i++) {
        gather(view, i, (char *)(floats + view->n_cols));
        if (!quantise_rows(dtype, view->dtype, floats + view->n_cols, 1, view->n_cols, floats, (char *)*rows + i * row_bytes))
            rc = err_set(err, RC_WEIGHTS, "weight update: quantization: wanted " QUANTISE_WANTED ", have others");
    }
    mem_free(floats);
    if (rc) {
        mem_free(*rows);
        *rows = NULL;
    }
    return rc;
}

enum rc update_write_rows(const struct backend *backend, void *ctx, const struct tensor_place *place, const void *rows,
                          struct err *err)
{
    enum rc rc = backend->matrix_write(ctx, place->matrix, place->part, place->first_row, place->n_rows, rows, err);
    return rc ? rc : backend->synchronize(ctx, err); /* the caller frees the rows */
}

enum rc update_sum_rows(const struct backend *backend, void *ctx, const struct tensor_sum_args *args, uint32_t dtype,
                        const void *rows, struct err *err)
{
    uint32_t n_rows = args->from->n_rows, n_cols = args->from->n_cols;
    float *floats = mem_alloc((size_t)n_rows * n_cols * sizeof *floats + 1);
    if (!floats)
        return out_of_memory(err);
    for (uint32_t i = 0; i < n_rows; i++)
        dtype_to_float(dtype, (const char *)rows + i * dtype_row_bytes(dtype, n_cols), floats + (size_t)i * n_cols, n_cols);
    struct tensor_view exact = {floats, DTYPE_F32, n_rows, n_cols, n_cols, 1, true};
    struct tensor_sum_args of_exact = *args;
    of_exact.from = &exact;
    enum rc rc = backend->tensor_sum(ctx, &of_exact, err);
    mem_free(floats);
    return rc;
}
