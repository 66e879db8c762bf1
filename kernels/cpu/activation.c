/* out = act(gate) * up, out = act(x), out = a + b, out row i = x row rows[i]: element by element on float32, so any division
 * of the work gives the same bits. Bound by bytes (12 a value) but for the exponentials of act. Rows are cut into chunks of
 * columns, so that one wide row is shared by all threads. */
#include "ops.h"
#include "rows.h"

#include <string.h>

#define CHUNK_COLUMNS 1024u

#define ALONE_VALUES 2048u /* up to here waking the other threads costs more than the work */

struct rows_job {
    uint32_t n_threads;
    const void *args;
    uint32_t n_rows, width;
    void (*chunk)(const void *args, uint32_t row, uint32_t column, uint32_t n);
};

static void share_chunks(void *job_args, uint32_t thread)
{
    const struct rows_job *job = job_args;
    uint32_t per_row = (job->width + CHUNK_COLUMNS - 1) / CHUNK_COLUMNS, n = job->n_rows * per_row;
    uint32_t end = share_first(n, thread + 1, job->n_threads);
    for (uint32_t i = share_first(n, thread, job->n_threads); i < end; i++) {
        uint32_t column = i % per_row * CHUNK_COLUMNS, left = job->width - column;
        job->chunk(job->args, i / per_row, column, left < CHUNK_COLUMNS ? left : CHUNK_COLUMNS);
    }
}

static enum rc run_chunks(struct cpu *cpu, struct rows_job job)
{
    job.n_threads = pool_threads_for(cpu->pool, (uint64_t)job.n_rows * job.width > ALONE_VALUES);
    pool_run_on(cpu->pool, job.n_threads, share_chunks, &job);
    return RC_OK;
}

static float *element(const struct view *view, uint32_t row, uint32_t column)
{
    return (float *)view->data + (size_t)row * view->stride + column;
}

static void gated_chunk(const void *job_args, uint32_t row, uint32_t column, uint32_t n)
{
    const struct gated_args *args = job_args;
    row_act(args->act, element(&args->gate, row, column), element(&args->up, row, column), n,
            element(&args->out, row, column));
}

static void act_chunk(const void *job_args, uint32_t row, uint32_t column, uint32_t n)
{
    const struct act_args *args = job_args;
    row_act(args->act, element(&args->x, row, column), NULL, n, element(&args->out, row, column));
}

static void add_chunk(const void *job_args, uint32_t row, uint32_t column, uint32_t n)
{
    const struct add_args *args = job_args;
    row_add(element(&args->a, row, column), element(&args->b, row, column), n, element(&args->out, row, column));
}

static void select_chunk(const void *job_args, uint32_t row, uint32_t column, uint32_t n)
{
    const struct select_args *args = job_args;
    memcpy(element(&args->out, row, column), element(&args->x, (uint32_t)args->rows[row], column), n * sizeof(float));
}

enum rc K(gated)(struct cpu *cpu, const struct gated_args *args, struct err *err)
{
    (void)err;
    return run_chunks(cpu, (struct rows_job){0, args, args->n_rows, args->out.width, gated_chunk});
}

enum rc K(act)(struct cpu *cpu, const struct act_args *args, struct err *err)
{
    (void)err;
    return run_chunks(cpu, (struct rows_job){0, args, args->n_rows, args->out.width, act_chunk});
}

enum rc K(add)(struct cpu *cpu, const struct add_args *args, struct err *err)
{
    (void)err;
    return run_chunks(cpu, (struct rows_job){0, args, args->n_rows, args->out.width, add_chunk});
}

enum rc K(select)(struct cpu *cpu, const struct select_args *args, struct err *err)
{
    (void)err;
    return run_chunks(cpu, (struct rows_job){0, args, args->n_selected, args->out.width, select_chunk});
}
