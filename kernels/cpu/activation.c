/* Operations on float32, element by element, so any division of the work gives the same bits:
 *   gated           out = act(gate) * up
 *   act             out = act(x)
 *   add             out = a + b
 *   select          out row i = x row rows[i], zeros or one other row
 *   take            out column i = x column columns[i]
 *   position_scale  out = x * (1 + slope * log1p((position + first) / every))
 *   spread_logits   out column i = x column sources[i], or NO_LOGIT
 *   scale_logits    logits = cap * tanh(scale * logits / cap), or scale * logits if cap is 0
 * Bound by bytes (12 a value), except for the exponentials of act. Rows are cut into chunks of columns, so that all threads
 * share one wide row. */
#include "ops.h"
#include "rows.h"

#include <math.h>
#include <string.h>

#define CHUNK_COLUMNS 1024u

#define ALONE_VALUES 2048u /* up to this size waking the other threads costs more than the work */

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
    const float *up = element(&args->up, row, column);
    if (args->gate.width == 1)
        row_scaled(args->act, *element(&args->gate, row, 0), up, n, element(&args->out, row, column));
    else
        row_act(args->act, element(&args->gate, row, column), up, n, element(&args->out, row, column));
}

static void row_clip(float limit, const float *x, uint32_t n, float *out)
{
    vf low = v_set1(-limit), high = v_set1(limit);
    for (uint32_t i = 0; i < n; i += LANES) {
        uint32_t lanes = n - i < LANES ? n - i : LANES;
        v_store_n(out + i, v_max(low, v_min(high, v_load_n(x + i, lanes))), lanes); /* a NaN stays */
    }
}

static float softplus(float x)
{
    return x > 20 ? x : log1pf(expf(x));
}

static void row_xielu(const float *weights, const float *x, uint32_t n, float *out)
{
    vf above = v_set1(softplus(weights[0])), below = v_set1(weights[2] + softplus(weights[1]));
    vf beta = v_set1(weights[2]), eps = v_set1(weights[3]), one = v_set1(1.0f);
    for (uint32_t i = 0; i < n; i += LANES) {
        uint32_t lanes = n - i < LANES ? n - i : LANES;
        vf v = v_load_n(x + i, lanes), line = v_mul(beta, v);
        vf bent = v_mul(v_sub(v_sub(v_exp(v_min(eps, v)), one), v), below);
        vf curve = v_select(v_lt(v_zero(), v), v_mul(v_mul(above, v), v), bent);
        v_store_n(out + i, v_add(curve, line), lanes);
    }
}

static void act_chunk(const void *job_args, uint32_t row, uint32_t column, uint32_t n)
{
    const struct act_args *args = job_args;
    const float *x = element(&args->x, row, column);
    float *out = element(&args->out, row, column);
    if (args->act == ACT_CLIP)
        row_clip(args->limit, x, n, out);
    else if (args->act == ACT_XIELU)
        row_xielu(args->weights, x, n, out);
    else if (args->act == ACT_SCALE)
        row_act(ACT_IDENTITY, x, args->weights + column, n, out);
    else
        row_act(args->act, x, NULL, n, out);
}

static void add_chunk(const void *job_args, uint32_t row, uint32_t column, uint32_t n)
{
    const struct add_args *args = job_args;
    row_add(element(&args->a, row, column), element(&args->b, row, column), n, element(&args->out, row, column));
}

static void select_chunk(const void *job_args, uint32_t row, uint32_t column, uint32_t n)
{
    const struct select_args *args = job_args;
    int32_t from = args->rows ? args->rows[row] : (int32_t)row;
    float *out = element(&args->out, row, column);
    if (from == -1)
        memset(out, 0, n * sizeof *out);
    else if (from < -1)
        memcpy(out, args->other + (size_t)(-2 - from) * args->out.width + column, n * sizeof *out);
    else
        memcpy(out, element(&args->x, (uint32_t)from, column), n * sizeof *out);
}

static void position_chunk(const void *job_args, uint32_t row, uint32_t column, uint32_t n)
{
    const struct position_scale_args *args = job_args;
    float n_steps = (float)(((uint32_t)args->positions[row] + args->first) / args->every);
    float factor = 1.0f + args->slope * log1pf(n_steps);
    row_scaled(ACT_IDENTITY, factor, element(&args->x, row, column), n, element(&args->out, row, column));
}

static void take_chunk(const void *job_args, uint32_t row, uint32_t column, uint32_t n)
{
    const struct take_args *args = job_args;
    const float *x = element(&args->x, row, 0);
    float *out = element(&args->out, row, column);
    for (uint32_t i = 0; i < n; i++)
        out[i] = x[(uint32_t)args->columns[column + i]];
}

static void spread_chunk(const void *job_args, uint32_t row, uint32_t column, uint32_t n)
{
    const struct spread_logits_args *args = job_args;
    const float *x = element(&args->x, row, 0), *sources = args->sources + column;
    float *out = element(&args->out, row, column);
    for (uint32_t i = 0; i < n; i++)
        out[i] = sources[i] < 0 ? NO_LOGIT : x[(uint32_t)sources[i]];
}

static void scale_chunk(const void *job_args, uint32_t row, uint32_t column, uint32_t n)
{
    const struct scale_logits_args *args = job_args;
    float *x = element(&args->logits, row, column);
    vf scale = v_set1(args->scale), cap = v_set1(args->softcap);
    for (uint32_t i = 0; i < n; i += LANES) {
        uint32_t lanes = n - i < LANES ? n - i : LANES;
        vf value = v_mul(v_load_n(x + i, lanes), scale);
        v_store_n(x + i, args->softcap == 0 ? value : v_mul(cap, v_tanh(v_div(value, cap))), lanes);
    }
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

enum rc K(position_scale)(struct cpu *cpu, const struct position_scale_args *args, struct err *err)
{
    (void)err;
    return run_chunks(cpu, (struct rows_job){0, args, args->n_rows, args->out.width, position_chunk});
}

enum rc K(take)(struct cpu *cpu, const struct take_args *args, struct err *err)
{
    (void)err;
    return run_chunks(cpu, (struct rows_job){0, args, args->n_rows, args->out.width, take_chunk});
}

enum rc K(scale_logits)(struct cpu *cpu, const struct scale_logits_args *args, struct err *err)
{
    (void)err;
    return run_chunks(cpu, (struct rows_job){0, args, args->n_rows, args->logits.width, scale_chunk});
}

enum rc K(spread_logits)(struct cpu *cpu, const struct spread_logits_args *args, struct err *err)
{
    (void)err;
    return run_chunks(cpu, (struct rows_job){0, args, args->n_rows, args->out.width, spread_chunk});
}
