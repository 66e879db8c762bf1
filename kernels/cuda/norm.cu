/* out[r][h] = weight * (x[r][h] * 1/sqrt(mean(x[r][h]^2) + eps)), each head h of size columns by itself; float32, one rounding.
 * Sum of squares: 128 chains of every 128th column, then a fixed tree, so it depends on the size alone. A block a head of a
 * row; bound by bytes: the second read of x comes from the caches. */
#include "common.cuh"

#define THREADS 128u

template <class T>
static __global__ void __launch_bounds__(THREADS)
norm_rows(rows<T> x, rows<T> out, const float *weight, uint32_t size, float eps)
{
    start_next();
    wait_for_input();
    const T *from = x.at(blockIdx.x, blockIdx.y * size);
    T *to = out.at(blockIdx.x, blockIdx.y * size);
    float sum = 0;
    for (uint32_t i = threadIdx.x; i < size; i += THREADS)
        sum = fmaf(to_float(from[i]), to_float(from[i]), sum);
    sum = block_reduce(sum, add_of());
    float scale = 1.0f / sqrtf(sum / (float)size + eps);
    for (uint32_t i = threadIdx.x; i < size; i += THREADS)
        to[i] = round_to<T>(weight[i] * (to_float(from[i]) * scale));
}

enum rc cuda_rms_norm(void *ctx, const struct rms_norm_args *args, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    if (!args->n_rows)
        return RC_OK;
    dim3 grid(args->n_rows, args->n_heads);
    visit_type(cuda->dtype, [&](auto value) {
        using T = decltype(value);
        launch(cuda, norm_rows<T>, grid, THREADS, 0, rows<T>(args->x), rows<T>(args->out), args->weight,
               args->x.width / args->n_heads, args->eps);
    });
    return launched(err, "rms_norm");
}
