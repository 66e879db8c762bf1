/* out[r] = weight * ((x[r] - mean) * 1/sqrt(variance + eps)) + bias, the mean and the variance (mean of (x - mean)^2) over the
 * whole row; float32, sums in the order of rows.h's square sum. Bound by bytes: x is read three times (from the first-level
 * cache but for the first) and out written once, 8 bytes a value from memory. */
#include "ops.h"
#include "rows.h"

#define ALONE_VALUES 4096u /* up to here waking the other threads costs more than the work */

struct norm_job {
    uint32_t n_threads;
    const struct layer_norm_args *args;
};

/* Sums of x - middle, or of its square: four chains of LANES columns each, then ((0 + 1) + (2 + 3)), then v_hsum's tree. */
static float row_sum(const float *x, uint32_t n, float middle, bool of_squares)
{
    vf sum[4] = {v_zero(), v_zero(), v_zero(), v_zero()}, shift = v_set1(middle);
    uint32_t i = 0;
    for (uint32_t j = 0; i + LANES <= n; j = (j + 1) % 4, i += LANES) {
        vf v = v_sub(v_load(x + i), shift);
        sum[j] = of_squares ? v_fma(v, v, sum[j]) : v_add(v, sum[j]);
    }
    if (i < n) {
        vf v = v_select(v_first(n - i), v_sub(v_load_n(x + i, n - i), shift), v_zero());
        uint32_t j = i / LANES % 4;
        sum[j] = of_squares ? v_fma(v, v, sum[j]) : v_add(v, sum[j]);
    }
    return v_hsum(v_add(v_add(sum[0], sum[1]), v_add(sum[2], sum[3])));
}

static vf value(vf x, vf mean, vf scale, vf weight, vf bias)
{
    return v_fma(weight, v_mul(v_sub(x, mean), scale), bias);
}

static void norm_row(const struct layer_norm_args *args, const float *x, float *out)
{
    uint32_t n = args->x.width, i = 0;
    float middle = row_sum(x, n, 0, false) / (float)n, variance = row_sum(x, n, middle, true) / (float)n;
    vf mean = v_set1(middle), scale = v_div(v_set1(1.0f), v_sqrt(v_set1(variance + args->eps)));
    for (; i + LANES <= n; i += LANES) {
        vf bias = args->bias ? v_load(args->bias + i) : v_zero();
        v_store(out + i, value(v_load(x + i), mean, scale, v_load(args->weight + i), bias));
    }
    if (i < n) {
        vf bias = args->bias ? v_load_n(args->bias + i, n - i) : v_zero();
        v_store_n(out + i, value(v_load_n(x + i, n - i), mean, scale, v_load_n(args->weight + i, n - i), bias), n - i);
    }
}

static void norm_rows(void *job_args, uint32_t thread)
{
    const struct norm_job *job = job_args;
    const struct layer_norm_args *args = job->args;
    uint32_t end = share_first(args->n_rows, thread + 1, job->n_threads);
    for (uint32_t row = share_first(args->n_rows, thread, job->n_threads); row < end; row++)
        norm_row(args, (const float *)args->x.data + (size_t)row * args->x.stride,
                 (float *)args->out.data + (size_t)row * args->out.stride);
}

enum rc K(layer_norm)(struct cpu *cpu, const struct layer_norm_args *args, struct err *err)
{
    (void)err;
    struct norm_job job = {pool_threads_for(cpu->pool, (uint64_t)args->n_rows * args->x.width > ALONE_VALUES), args};
    pool_run_on(cpu->pool, job.n_threads, norm_rows, &job);
    return RC_OK;
}
