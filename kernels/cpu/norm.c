/* out[r][h] = weight (shared by all heads, or [h]) * x[r][h] / sqrt(mean(x[r][h]^2) + eps), each head h of size columns
 * separately; float32, in the order of rows.h. Bound by bytes: x is read twice (the second time from the first-level cache)
 * and out is written once. */
#include "ops.h"
#include "rows.h"

#define ALONE_VALUES 4096u /* up to this size waking the other threads costs more than the work */

struct norm_job {
    uint32_t n_threads;
    const struct rms_norm_args *args;
};

static void norm_heads(void *job_args, uint32_t thread)
{
    const struct norm_job *job = job_args;
    const struct rms_norm_args *args = job->args;
    uint32_t size = args->x.width / args->n_heads, n = args->n_rows * args->n_heads;
    uint32_t end = share_first(n, thread + 1, job->n_threads);
    for (uint32_t i = share_first(n, thread, job->n_threads); i < end; i++) {
        size_t row = i / args->n_heads, head = i % args->n_heads, column = head * size;
        row_rms_norm((const float *)args->x.data + row * args->x.stride + column,
                     args->weight ? args->weight + head * args->weight_stride : NULL, args->eps, size,
                     (float *)args->out.data + row * args->out.stride + column);
    }
}

enum rc K(rms_norm)(struct cpu *cpu, const struct rms_norm_args *args, struct err *err)
{
    (void)err;
    struct norm_job job = {pool_threads_for(cpu->pool, (uint64_t)args->n_rows * args->x.width > ALONE_VALUES), args};
    pool_run_on(cpu->pool, job.n_threads, norm_heads, &job);
    return RC_OK;
}
