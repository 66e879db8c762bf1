/* What towers and the text models behind them need beside the other operations, in float32:
 *   pixels      out[r][(c * n_frames + t) * n + i] = table[c][bytes[r][c * n + i]]
 *   embed_taps  out[r] = sum over t of weights[r][t] * row rows[r][t] of a table, one chain in the order of t
 *   place_rows  out row rows[i] = x row i
 *   mean_rows   out row i = sum of n neighbouring rows, one chain, times 1 / n
 *   splice      x row = a feature, or its sum with the feature, for the rows that stand for features
 * A row is computed by one thread and depends on nothing but its own inputs. Bound by bytes: 4096 rows of 1152 values are 19 MB
 * each way. */
#include "ops.h"
#include "rows.h"

#include <string.h>

struct rows_job {
    const void *args;
    uint32_t n_rows, n_threads;
    void (*row)(const void *args, uint32_t row);
};

static void share_rows(void *job_args, uint32_t thread)
{
    const struct rows_job *job = job_args;
    uint32_t end = share_first(job->n_rows, thread + 1, job->n_threads);
    for (uint32_t r = share_first(job->n_rows, thread, job->n_threads); r < end; r++)
        job->row(job->args, r);
}

static enum rc run_rows(struct cpu *cpu, const void *args, uint32_t n_rows, void (*row)(const void *args, uint32_t row))
{
    struct rows_job job = {args, n_rows, cpu->n_threads, row};
    pool_run(cpu->pool, share_rows, &job);
    return RC_OK;
}

static float *row_of(const struct view *view, uint32_t row)
{
    return (float *)view->data + (size_t)row * view->stride;
}

static void pixels_row(const void *job_args, uint32_t row)
{
    const struct pixels_args *args = job_args;
    uint32_t n = args->out.width / (3 * args->n_frames);
    const uint8_t *bytes = args->bytes + (size_t)row * 3 * n;
    float *out = row_of(&args->out, row);
    for (uint32_t c = 0; c < 3; c++)
        for (uint32_t t = 0; t < args->n_frames; t++)
            for (uint32_t i = 0; i < n; i++)
                *out++ = args->table[256 * c + bytes[c * n + i]];
}

enum rc K(pixels)(struct cpu *cpu, const struct pixels_args *args, struct err *err)
{
    (void)err;
    return run_rows(cpu, args, args->n_rows, pixels_row);
}

static void embed_taps_row(const void *job_args, uint32_t row)
{
    const struct embed_taps_args *args = job_args;
    const int32_t *rows = args->rows + (size_t)row * args->n_taps;
    const float *weights = args->weights + (size_t)row * args->n_taps;
    float *out = row_of(&args->out, row);
    uint32_t width = args->out.width;
    for (uint32_t c = 0; c < width; c++) {
        float sum = weights[0] * args->table[(size_t)rows[0] * width + c];
        for (uint32_t t = 1; t < args->n_taps; t++)
            sum += weights[t] * args->table[(size_t)rows[t] * width + c];
        out[c] = sum;
    }
}

enum rc K(embed_taps)(struct cpu *cpu, const struct embed_taps_args *args, struct err *err)
{
    (void)err;
    return run_rows(cpu, args, args->n_rows, embed_taps_row);
}

static void place_row(const void *job_args, uint32_t row)
{
    const struct place_rows_args *args = job_args;
    memcpy(row_of(&args->out, (uint32_t)args->rows[row]), row_of(&args->x, row), args->x.width * sizeof(float));
}

enum rc K(place_rows)(struct cpu *cpu, const struct place_rows_args *args, struct err *err)
{
    (void)err;
    return run_rows(cpu, args, args->n_rows, place_row);
}

static void mean_row(const void *job_args, uint32_t row)
{
    const struct mean_rows_args *args = job_args;
    float *out = row_of(&args->out, row), share = 1.0f / (float)args->n;
    memcpy(out, row_of(&args->x, row * args->n), args->out.width * sizeof(float));
    for (uint32_t i = 1; i < args->n; i++)
        row_add(out, row_of(&args->x, row * args->n + i), args->out.width, out);
    for (uint32_t c = 0; c < args->out.width; c++)
        out[c] *= share;
}

enum rc K(mean_rows)(struct cpu *cpu, const struct mean_rows_args *args, struct err *err)
{
    (void)err;
    return run_rows(cpu, args, args->n_rows, mean_row);
}

static void splice_row(const void *job_args, uint32_t row)
{
    const struct splice_args *args = job_args;
    float *x = row_of(&args->x, row);
    if (args->visual[row] < 0)
        return;
    const float *feature = row_of(&args->features, (uint32_t)args->visual[row]);
    if (args->is_sum)
        row_add(x, feature, args->x.width, x);
    else
        memcpy(x, feature, args->x.width * sizeof(float));
}

enum rc K(splice)(struct cpu *cpu, const struct splice_args *args, struct err *err)
{
    (void)err;
    return run_rows(cpu, args, args->n_rows, splice_row);
}
