/* linear_sync.cu: the linears that every device of compute capability 8.0 or later can run, apart from linear.cu because they
 * take as long to compile. */
#include "linear_sync_many.cuh"
#include "linear_sync_units_many.cuh"

cudaError_t sync_open(const struct cuda *cuda)
{
    cudaError_t code = cudaSuccess;
    visit_type(cuda->dtype, [&](auto value) {
        using T = decltype(value);
        if constexpr (sizeof(T) == 2) {
            code = sync_few_open<T>(cuda);
            code = code ? code : sync_many_open<T>();
        }
    });
    if (cuda->dtype != DTYPE_BF16)
        return code;
    code = code ? code : sync_units_open(cuda);
    return code ? code : sync_units_many_open();
}

static struct sync_product product_of(const struct matrix *matrix, const struct view *x, bool is_product)
{
    const size_t x_row_bytes = (size_t)x->stride * 2;
    return {matrix->data, (const char *)x->data, matrix->parts[0].row_bytes, x_row_bytes, matrix->n_rows,
            ceil_div(matrix->n_cols, 64), is_product, matrix->n_cols % 64 * 2};
}

void sync_few(const struct cuda *cuda, const struct matrix *matrix, const struct view *x, bool is_product,
              const struct output &out)
{
    const struct sync_product product = product_of(matrix, x, is_product);
    if (cuda->dtype == DTYPE_F16)
        sync_few_multiply<__half>(cuda, product, out);
    else
        sync_few_multiply<__nv_bfloat16>(cuda, product, out);
}

void sync_many(const struct cuda *cuda, const struct matrix *matrix, const struct view *x, bool is_product,
               const struct output &out)
{
    const struct sync_product product = product_of(matrix, x, is_product);
    if (cuda->dtype == DTYPE_F16)
        sync_many_multiply<__half>(cuda, product, out);
    else
        sync_many_multiply<__nv_bfloat16>(cuda, product, out);
}

void sync_units_few(const struct cuda *cuda, const struct matrix *matrix, const struct view *x, bool is_product,
                    const struct output &out)
{
    sync_units_multiply(cuda, matrix, x, is_product, out);
}

void sync_units_many(const struct cuda *cuda, const struct matrix *matrix, const struct view *x, bool is_product,
                     const struct output &out)
{
    sync_units_many_multiply(cuda, matrix, x, is_product, out);
}
