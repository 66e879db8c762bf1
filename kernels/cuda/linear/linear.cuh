/* linear.cuh: the end of a linear, equal in every kernel of linear.cu: the float32 sums get the bias and what adapters add, are
 * rounded once to the type of activations (logits are not), and are added to other rows, rounded again. */
#ifndef LLMPY_CUDA_LINEAR_CUH
#define LLMPY_CUDA_LINEAR_CUH

#include "../core/common.cuh"

#include <stddef.h>

#define MAX_MIRRORS 7u
#define MIRRORED_BYTES (128u << 10) /* of the whole value, at least, for stores to all ranks */

struct output {
    char *y;
    const char *add;
    const float *bias;
    const float *delta; /* of adapters, or NULL */
    uint32_t delta_stride;
    uint32_t y_stride, add_stride, n_rows, n_out;
    bool is_float;
    uint32_t act; /* of the product of gate and up, for the kernels that make it; n_out is its width */
    uint32_t n_mirrors;
    ptrdiff_t mirrors[MAX_MIRRORS]; /* bytes from y to the same place on other ranks, for linear_gemm */
};

/* Of the rank's arena; returns their number. */
uint32_t cuda_mirrors(const struct cuda *cuda, ptrdiff_t mirrors[MAX_MIRRORS]);

/* The output of the rows of a matrix from first_row on. */
static inline struct output output_of(const struct linear_args *args, uint32_t first_row, uint32_t n_out, uint32_t item)
{
    struct output out = {};
    out.y = (char *)args->y.data + (size_t)first_row * (args->is_float_out ? 4 : item);
    out.add = args->add ? (const char *)args->add->data + (size_t)first_row * item : NULL;
    out.bias = args->bias ? args->bias + first_row : NULL;
    out.delta = args->delta ? args->delta + first_row : NULL;
    out.delta_stride = args->delta_stride;
    out.y_stride = args->y.stride;
    out.add_stride = args->add ? args->add->stride : 0;
    out.n_rows = args->n_rows;
    out.n_out = n_out;
    out.is_float = args->is_float_out;
    out.act = args->act;
    return out;
}

/* CAN_ADD: false: the kernel takes no delta, for want of registers. */
template <class T, bool CAN_ADD = true>
static __device__ __forceinline__ void put(const struct output &out, uint32_t r, uint32_t n, float sum)
{
    if (r >= out.n_rows || n >= out.n_out)
        return;
    if (out.bias)
        sum += out.bias[n];
    if (CAN_ADD && out.delta)
        sum += out.delta[(size_t)r * out.delta_stride + n];
    if (out.is_float) {
        ((float *)out.y)[(size_t)r * out.y_stride + n] = sum;
        return;
    }
    T value = round_to<T>(sum);
    if (out.add)
        value = round_to<T>(to_float(value) + to_float(((const T *)out.add)[(size_t)r * out.add_stride + n]));
    ((T *)out.y)[(size_t)r * out.y_stride + n] = value;
}

/* Whether a linear, or experts, store to all ranks, if they are told to; for struct comm. */
bool cuda_linear_mirrors(void *ctx, const struct linear_args *args);
bool cuda_experts_mirror(void *ctx, const struct experts_args *args);

#endif
