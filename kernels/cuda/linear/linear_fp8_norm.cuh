/* linear_fp8_norm.cuh: the sum of two rows and its norm, rounded for the linear of linear_fp8.cuh behind it, by one launch: the
 * bits of norm.cu's sum and norm and of linear_fp8_quantise. The normed rows themselves are not stored. A block has a row, in
 * the order of row_norm.cuh. Bound by bytes; of few rows by latency, about 1 us. */
#ifndef LLMPY_CUDA_LINEAR_FP8_NORM_CUH
#define LLMPY_CUDA_LINEAR_FP8_NORM_CUH

#include "../norm/row_norm.cuh"
#include "linear_fp8.cuh"

#define FP8_NORM_PARTS 2u /* of a row, a thread's, at most */

template <class T, class N, uint32_t PARTS>
static __global__ void __launch_bounds__(ROW_NORM_THREADS / 2)
linear_fp8_norm(norm_source<T> x, const float *weight, uint32_t size, float eps, struct fp8_rows to)
{
    const uint32_t row = blockIdx.x, column = 8 * threadIdx.x, step = 8 * blockDim.x;
    const uint32_t n_slabs = (size + FP8_SLAB - 1) / FP8_SLAB;
    float w[PARTS][8], values[PARTS][8], sum = 0;
    start_next();
#pragma unroll
    for (uint32_t i = 0; i < PARTS; i++)
        weight_part<true>(weight, 0, column + i * step, size, w[i]);
    wait_for_input();
#pragma unroll
    for (uint32_t i = 0; i < PARTS; i++)
        take_part<true, true>(x, row, 0, column + i * step, size, values[i]);
#pragma unroll
    for (uint32_t i = 0; i < PARTS; i++) {
        store_part<true>(x.sum.at(row, 0), column + i * step, size, values[i]);
        for (uint32_t j = 0; j < 8; j++)
            sum = fmaf(values[i][j], values[i][j], sum);
    }
    const float scale = norm_scale(block_squares(sum, 0, blockDim.x / 32), size, eps);
#pragma unroll
    for (uint32_t i = 0; i < PARTS; i++) {
        const uint32_t slab = (column + i * step) / FP8_SLAB;
        scale_part(values[i], w[i], scale);
        round_eight<T>(values[i]);
        if (slab < n_slabs)
            fp8_round_slab<N>(values[i], row, slab, to);
    }
}

/* True if linear_fp8_norm takes the sum and norm, whose rows no other operation reads. */
static inline bool fp8_norm_fits(const struct add_rms_norm_args *args)
{
    const uint32_t size = args->out.width, chains = ceil_div(size, 8);
    bool fits = !args->inner_weight && size > HEAD_NORM_MAX && chains <= FP8_NORM_PARTS * row_threads(chains) &&
                row_threads(chains) <= ROW_NORM_THREADS / 2 && args->linear->matrix->n_cols == size;
    for (const struct view *view : {&args->a, &args->b, &args->sum})
        fits = fits && has_eights<__half>(*view);
    return fits && (uintptr_t)args->weight % 16 == 0;
}

/* As fp8_quantise, of the norms. */
static inline struct fp8_rows fp8_norm(const struct cuda *cuda, const struct fp8_memory *memory,
                                       const struct add_rms_norm_args *args, uint32_t n_padded)
{
    const uint32_t size = args->out.width, chains = ceil_div(size, 8), threads = row_threads(chains);
    const struct fp8_rows to = {memory->numbers, memory->scales, fp8_slabs(size) * FP8_SLAB, n_padded};
    const auto start = [&](auto value, auto number) {
        using T = decltype(value);
        using N = decltype(number);
        const norm_source<T> x = {rows<T>(args->a), rows<T>(args->b), rows<T>(args->sum)};
        launch(cuda, chains <= threads ? linear_fp8_norm<T, N, 1> : linear_fp8_norm<T, N, 2>, args->n_rows, threads, 0, x,
               args->weight, size, args->eps, to);
    };
    visit_numbers(args->linear->matrix, [&](auto number) {
        cuda->dtype == DTYPE_F16 ? start(__half(), number) : start(__nv_bfloat16(), number);
    });
    return to;
}

#endif
