/* out[r][h] = weight * ((x[r][h] - mean) * 1/sqrt(variance + eps)) + bias, the mean and the variance (mean of (x - mean)^2)
 * over each head of the row; float32, sums in the order of rows.h's square sum. Bound by bytes: x is read three times (the
 * second and third time from the first-level cache) and out is written once, 8 bytes a value from memory. */
#include "ops.h"
#include "rows.h"

#define ALONE_VALUES 4096u /* up to this size waking the other threads costs more than the work */

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

static void norm_head(const struct layer_norm_args *args, uint32_t head, const float *x, float *out)
{
    uint32_t n = args->x.width / args->n_heads;
    float middle = row_sum(x, n, 0, false) / (float)n, variance = row_sum(x, n, middle, true) / (float)n;
    vf mean = v_set1(middle), scale = v_div(v_set1(1.0f), v_sqrt(v_set1(variance + args->eps)));
    size_t first = (size_t)head * args->weight_stride;
    for (uint32_t i = 0; i < n; i += LANES) {
        uint32_t lanes = n - i < LANES ? n - i : LANES;
        vf bias = args->bias ? v_load_n(args->bias + first + i, lanes) : v_zero();
        vf weight = args->weight ? v_load_n(args->weight + first + i, lanes) : v_set1(1.0f);
        v_store_n(out + i, v_fma(weight, v_mul(v_sub(v_load_n(x + i, lanes), mean), scale), bias), lanes);
    }
}

static void norm_heads(void *job_args, uint32_t thread)
{
    const struct norm_job *job = job_args;
    const struct layer_norm_args *args = job->args;
    uint32_t size = args->x.width / args->n_heads, n = args->n_rows * args->n_heads;
    uint32_t end = share_first(n, thread + 1, job->n_threads);
    for (uint32_t i = share_first(n, thread, job->n_threads); i < end; i++) {
        size_t row = i / args->n_heads, head = i % args->n_heads, column = head * size;
        norm_head(args, (uint32_t)head, (const float *)args->x.data + row * args->x.stride + column,
                  (float *)args->out.data + row * args->out.stride + column);
    }
}

enum rc K(layer_norm)(struct cpu *cpu, const struct layer_norm_args *args, struct err *err)
{
    (void)err;
    struct norm_job job = {pool_threads_for(cpu->pool, (uint64_t)args->n_rows * args->x.width > ALONE_VALUES), args};
    pool_run_on(cpu->pool, job.n_threads, norm_heads, &job);
    return RC_OK;
}
