/* out[r][h] = weight * ((x[r][h] - mean) * 1/sqrt(variance + eps)) + bias, the mean and the variance (mean of (x - mean)^2)
 * over each head of the row; float32, one rounding to the type of activations. A block a head of a row: thread t adds columns
 * t, t + THREADS, ... in this order, then block_reduce's tree. Bound by bytes, 32 us for 8192 rows of 4096 bfloat16 values at
 * 4.25 TB/s if the second and third reading of a row come from the caches; not tuned. */
#include "../core/launch.cuh"

#define THREADS 256u

template <class T>
static __global__ void __launch_bounds__(THREADS)
layer_norm_heads(rows<T> x, rows<T> out, const float *weight, const float *bias, float eps, uint32_t weight_stride)
{
    uint32_t row = blockIdx.x, n = x.width / gridDim.y, first = blockIdx.y * n;
    float sum = 0, squares = 0;
    start_next();
    wait_for_input();
    const T *from = x.at(row, first);
    weight += weight ? blockIdx.y * weight_stride : 0;
    bias += bias ? blockIdx.y * weight_stride : 0;
    for (uint32_t i = threadIdx.x; i < n; i += THREADS)
        sum = sum + to_float(from[i]);
    float mean = block_reduce(sum, add_of()) / (float)n;
    for (uint32_t i = threadIdx.x; i < n; i += THREADS) {
        float value = to_float(from[i]) - mean;
        squares = fmaf(value, value, squares);
    }
    float scale = 1.0f / sqrtf(block_reduce(squares, add_of()) / (float)n + eps);
    for (uint32_t i = threadIdx.x; i < n; i += THREADS)
        *out.at(row, first + i) =
            round_to<T>(fmaf(weight ? weight[i] : 1.0f, (to_float(from[i]) - mean) * scale, bias ? bias[i] : 0.0f));
}

enum rc cuda_layer_norm(void *ctx, const struct layer_norm_args *args, struct err *err)
{
    return run_rows(ctx, args->n_rows, "layer_norm", err, [&](struct cuda *cuda, auto value) {
        using T = decltype(value);
        launch(cuda, layer_norm_heads<T>, dim3(args->n_rows, args->n_heads), THREADS, 0, rows<T>(args->x), rows<T>(args->out),
               args->weight, args->bias, args->eps, args->weight_stride);
    });
}
