// cuda_quantise.cc: the kernel that rounds tensors on a device, run on the host (cuda_threads.h), beside quantise.c.
#include "cuda_threads.h"

extern "C" {
#include "../../csrc/base/dtype.h"
#include "../../csrc/base/quantise.h"
}

static float to_float(float value)
{
    return value;
}

template <class T, class F> static T block_reduce(T value, F join)
{
    static T shared[1024];
    const uint32_t own = threadIdx.x;
    shared[own] = value;
    __syncthreads();
    value = shared[0];
    for (uint32_t i = 1; i < blockDim.x; i++)
        value = join(value, shared[i]);
    __syncthreads();
    return value;
}

struct add_of {
    uint32_t operator()(uint32_t a, uint32_t b) const { return a + b; }
};

#include "../../kernels/cuda/memory/tensor_quantise.cuh"

// Returns whether the rows are dense.
template <uint32_t DTYPE> static bool quantise(const float_rows<float> &from, uint32_t n_rows, const block_rows &to)
{
    const bool is_dense = are_dense<rounding<DTYPE>::n_each>(from);
    auto *kernel = is_dense ? tensor_write_rounded<float, DTYPE, true> : tensor_write_rounded<float, DTYPE, false>;
    run_blocks(n_rows, QUANTISE_THREADS, [&] { kernel(from, to); });
    return is_dense;
}

// UINT64_MAX: the rows are not dense.
extern "C" uint64_t count_by_kernel(const float *x, int64_t row_stride, uint32_t n_rows, uint32_t n_cols, uint32_t n_blocks)
{
    const float_rows<float> from = {x, row_stride, 1, n_cols};
    unsigned long long count = 0;
    if (!are_dense<8>(from))
        return UINT64_MAX;
    run_blocks(n_blocks, QUANTISE_THREADS, [&] { tensor_sum_beyond(from, n_rows, ROUND_MOST, &count); });
    return count;
}

extern "C" bool quantise_by_kernel(uint32_t dtype, const float *x, int64_t row_stride, int64_t col_stride, uint32_t n_rows,
                                   uint32_t n_cols, uint8_t *to, uint64_t row_bytes, bool is_split)
{
    const float_rows<float> from = {x, row_stride, col_stride, n_cols};
    const block_rows blocks = {to, row_bytes, is_split};
    switch (dtype) {
    case DTYPE_FP8: return quantise<DTYPE_FP8>(from, n_rows, blocks);
    case DTYPE_INT8_G128: return quantise<DTYPE_INT8_G128>(from, n_rows, blocks);
    case DTYPE_INT8_G32: return quantise<DTYPE_INT8_G32>(from, n_rows, blocks);
    case DTYPE_INT4_G128: return quantise<DTYPE_INT4_G128>(from, n_rows, blocks);
    default: return quantise<DTYPE_INT4_G32>(from, n_rows, blocks);
    }
}
