/* linear_fp8.cu: the kernels of linear_fp8.cuh, apart from linear.cu because they take as long to compile. */
#include "linear_fp8.h"
#include "linear_fp8_few.cuh"
#include "linear_fp8_many.cuh"
#include "linear_fp8_norm.cuh"
#include "linear_fp8_plain.cuh"
#include "linear_fp8_row.cuh"

/* Calls f with a value of the activations' type and one of the numbers' type. */
template <class F> static void visit_fp8(const struct fp8_product &p, F f)
{
    visit_numbers(p.matrix, [&](auto number) {
        if (p.cuda->dtype == DTYPE_F16)
            f(__half(), number);
        else
            f(__nv_bfloat16(), number);
    });
}

template <class T> static cudaError_t open_rings(void)
{
    cudaError_t code = cudaSuccess;
    for (uint32_t i = 0; i < 8 && code == cudaSuccess; i++) {
        code = allow_shared(fp8_few_of<T, e4m3>(1u << i / 2, i % 2));
        code = code ? code : allow_shared(fp8_few_of<T, s8>(1u << i / 2, i % 2));
    }
    code = code ? code : fp8_row_open<T, e4m3>();
    return code ? code : fp8_row_open<T, s8>();
}

cudaError_t fp8_open(const struct cuda *cuda)
{
    const cudaError_t code = cuda->dtype == DTYPE_F16 ? open_rings<__half>() : open_rings<__nv_bfloat16>();
    return code ? code : fp8_many_open(cuda->dtype);
}

/* Gate | up: eights of their rows alternate in a tile. */
static bool has_eights_of_pairs(const struct fp8_product &p)
{
    return !p.is_product || p.matrix->n_rows % 16 == 0;
}

bool fp8_fits(const struct fp8_product &p)
{
    return has_eights_of_pairs(p) && (!p.norm || fp8_norm_fits(p.norm));
}

bool fp8_row_fits(const struct fp8_product &p)
{
    return has_eights_of_pairs(p) && (!p.norm || fp8_row_norms(p.norm)) && fp8_row_has_room(p.matrix, p.is_product);
}

void fp8_row_multiply(const struct fp8_product &p)
{
    visit_fp8(p, [&](auto value, auto number) { fp8_row_launch<decltype(value), decltype(number)>(p); });
}

struct fp8_rows fp8_rounded(const struct fp8_product &p, uint32_t n_padded)
{
    return p.norm ? fp8_norm(p.cuda, p.memory, p.norm, n_padded)
                  : fp8_quantise(p.cuda, p.memory, p.matrix, p.x, p.n_rows, n_padded);
}

uint32_t fp8_few_slabs(uint32_t eights)
{
    return fp8_stage_slabs(eights);
}

void fp8_plain_multiply(const struct fp8_product &p, const struct fp8_rows &x)
{
    const struct cuda_part *part = &p.matrix->parts[0];
    const dim3 grid(ceil_div(p.out.n_out, 16), ceil_div(p.out.n_rows, 8));
    visit_fp8(p, [&](auto value, auto number) {
        launch(p.cuda, linear_fp8_plain<decltype(value), decltype(number)>, grid, 32, 0, part->data, part->row_bytes, x,
               fp8_slabs(p.matrix->n_cols), p.out);
    });
}
