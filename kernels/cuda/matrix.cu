/* Weight matrices that are made up on the device: element (r, c) of a part is csrc/base/dummy.h's value of (key, s, c), s the
 * row of the checkpoint's tensor that r is, rounded once to the part's type. Bound by the hash, some 20 instructions a value:
 * the 8.0e9 weights of Llama-3-8B take 8 ms on an H200, behind which their 16 GB of writes (4 ms) hide. */
#include "common.cuh"

extern "C" {
#include "../../csrc/base/dummy.h"
}

template <class T>
static __global__ void fill_rows(char *data, size_t row_bytes, uint32_t n_cols, struct row_run rows, uint64_t key)
{
    uint64_t row_key = dummy_row(key, (uint32_t)(rows.source_row + blockIdx.x * rows.step));
    T *row = (T *)(data + blockIdx.x * row_bytes);
    for (uint32_t c = threadIdx.x; c < n_cols; c += blockDim.x)
        row[c] = round_to<T>(dummy_value(row_key, c));
}

enum rc cuda_matrix_fill(void *ctx, struct matrix *matrix, uint32_t part, const struct row_run *rows, uint64_t key,
                         struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    const struct cuda_part *p = &matrix->parts[part];
    if (p->dtype != DTYPE_F32 && p->dtype != DTYPE_F16 && p->dtype != DTYPE_BF16)
        return err_set(err, RC_UNSUPPORTED, "matrix_fill: wanted floats, have %s", dtype_info(p->dtype)->name);
    if (!rows->n_rows)
        return RC_OK;
    visit_type(p->dtype, [&](auto type) {
        fill_rows<decltype(type)><<<rows->n_rows, 256, 0, cuda->stream>>>(p->data + rows->first_row * p->row_bytes,
                                                                        p->row_bytes, matrix->n_cols, *rows, key);
    });
    return launched(err, "matrix_fill");
}
