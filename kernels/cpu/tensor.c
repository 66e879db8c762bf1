/* Writes and sums of named weights. tensor_write: y = round(x), or for vectors y = x + offset, x a tensor of any strides in
 * f32, f16 or bf16. tensor_sum: the sum of mix64(i, bits of y[i]) over a weight. Threads take the rows of a matrix panel by
 * panel. Values are exact except for the one rounding. The sum is modulo 2^64, so the order does not matter. Bound by memory:
 * the tensor is read, panels are written. */
#include "matrix.h"
#include "ops.h"
#include "../../csrc/base/mem.h"
#include "../../csrc/base/mix.h"

#include <string.h>

static bool is_float(uint32_t dtype)
{
    return dtype == DTYPE_F32 || dtype == DTYPE_F16 || dtype == DTYPE_BF16;
}

/* The items of a row as an array. Items that are not adjacent are copied to `packed`. */
static const void *row_items(const struct tensor_view *view, uint32_t row, void *packed)
{
    size_t item = dtype_info(view->dtype)->block_bytes;
    const char *first = (const char *)view->data + (ptrdiff_t)item * view->row_stride * row;
    if (view->col_stride == 1 || view->n_cols == 1)
        return first;
    if (item == 4)
        for (uint32_t c = 0; c < view->n_cols; c++)
            memcpy((char *)packed + 4 * (size_t)c, first + 4 * view->col_stride * (ptrdiff_t)c, 4);
    else
        for (uint32_t c = 0; c < view->n_cols; c++)
            memcpy((char *)packed + 2 * (size_t)c, first + 2 * view->col_stride * (ptrdiff_t)c, 2);
    return packed;
}

/* A row in the form of a type. packed and floats: [n_cols] floats each; the result lies in one of them or in the tensor. */
static const void *row_as(const struct tensor_view *view, uint32_t row, uint32_t dtype, void *packed, float *floats)
{
    const void *items = row_items(view, row, packed);
    if (view->dtype == dtype)
        return items;
    dtype_to_float(view->dtype, items, floats, view->n_cols);
    if (dtype == DTYPE_F32)
        return floats;
    dtype_from_float(dtype, floats, packed, view->n_cols);
    return packed;
}

struct tensor_job {
    struct cpu *cpu;
    const struct tensor_place *place;
    const struct tensor_view *view; /* NULL: sum the weight itself */
    char *rows;                     /* [n_threads][2][n_cols] floats */
    uint32_t n_cols;
    struct tensor_sum *sums;        /* [n_threads] */
};

static float *rows_of(const struct tensor_job *job, uint32_t thread)
{
    return (float *)job->rows + (size_t)thread * 2 * job->n_cols;
}

static void write_panels(void *args, uint32_t thread)
{
    const struct tensor_job *job = args;
    const struct cpu_part *part = &job->place->matrix->parts[job->place->part];
    float *floats = rows_of(job, thread);
    uint32_t first_row = job->place->first_row, end_row = first_row + job->place->n_rows, first = first_row / PANEL_ROWS;
    uint32_t n_panels = (end_row + PANEL_ROWS - 1) / PANEL_ROWS - first;
    uint32_t end = first + share_first(n_panels, thread + 1, job->cpu->n_threads);
    for (uint32_t p = first + share_first(n_panels, thread, job->cpu->n_threads); p < end; p++)
        for (uint32_t row = p * PANEL_ROWS; row < (p + 1) * PANEL_ROWS && row < end_row; row++) {
            if (row < first_row)
                continue;
            const void *items = row_as(job->view, row - first_row, part->type->dtype, floats + job->n_cols, floats);
            part->type->repack(items, 0, row % PANEL_ROWS, 1, job->n_cols, part->panels + p * part->panel_bytes);
        }
}

static void add_values(struct tensor_sum *sum, uint64_t first, uint64_t step, const void *items, uint32_t dtype, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        uint32_t bits = 0, infinity = dtype == DTYPE_F16 ? 0x7c00 : dtype == DTYPE_BF16 ? 0x7f80 : 0x7f800000u;
        if (dtype == DTYPE_F32)
            memcpy(&bits, (const char *)items + 4 * (size_t)i, 4);
        else
            memcpy(&bits, (const char *)items + 2 * (size_t)i, 2);
        sum->sum += mix64(first + i * step, bits);
        sum->n_non_finite += (bits & infinity) == infinity;
    }
}

static void sum_panels(void *args, uint32_t thread)
{
    const struct tensor_job *job = args;
    const struct cpu_part *part = &job->place->matrix->parts[job->place->part];
    float *floats = rows_of(job, thread), *scratch = (float *)(job->cpu->scratch + thread * job->cpu->scratch_bytes);
    uint32_t dtype = is_float(part->type->dtype) ? part->type->dtype : DTYPE_F32;
    const struct tensor_place *place = job->place;
    uint32_t end = share_first(place->n_rows, thread + 1, job->cpu->n_threads);
    struct tensor_sum sum = {0, 0};
    for (uint32_t i = share_first(place->n_rows, thread, job->cpu->n_threads); i < end; i++) {
        uint32_t row = place->first_row + i;
        const void *items = floats + job->n_cols;
        if (job->view) {
            items = row_as(job->view, i, dtype, floats + job->n_cols, floats);
        } else {
            K(panel_read)(part, row / PANEL_ROWS, row % PANEL_ROWS, 1, job->n_cols, floats, job->n_cols, scratch);
            dtype_from_float(dtype, floats, floats + job->n_cols, job->n_cols);
        }
        add_values(&sum, place->first_index + i * place->row_step, place->col_step, items, dtype, job->n_cols);
    }
    job->sums[thread] = sum;
}

static enum rc take_rows(struct tensor_job *job, struct err *err)
{
    job->rows = mem_alloc((size_t)job->cpu->n_threads * (2 * sizeof(float) * job->n_cols + sizeof *job->sums));
    if (!job->rows)
        return err_set(err, RC_MEMORY, "tensor: no memory for rows of %u columns", job->n_cols);
    job->sums = (struct tensor_sum *)(job->rows + (size_t)job->cpu->n_threads * 2 * sizeof(float) * job->n_cols);
    return RC_OK;
}

/* A vector's values as stored. memory: [2 n_cols] floats. */
static const float *vector_values(const struct tensor_place *place, const struct tensor_view *view, float *memory)
{
    uint32_t n = view->n_cols;
    const float *values = row_as(view, 0, DTYPE_F32, memory + n, memory);
    if (values != memory)
        memmove(memory, values, n * sizeof *memory);
    for (uint32_t i = 0; i < n; i++)
        memory[i] += place->offset;
    return memory;
}

enum rc K(tensor_write)(struct cpu *cpu, const struct tensor_write_args *args, struct err *err)
{
    struct tensor_job job = {cpu, &args->to, &args->from, NULL, args->from.n_cols, NULL};
    enum rc rc = take_rows(&job, err);
    if (rc)
        return rc;
    if (args->to.matrix && !is_float(args->to.matrix->parts[args->to.part].type->dtype))
        rc = err_set(err, RC_UNSUPPORTED, "tensor_write: wanted a weight of floats");
    else if (args->to.matrix) {
        args->to.matrix->parts[args->to.part].rows = NULL; /* no longer borrowed */
        pool_run(cpu->pool, write_panels, &job);
    } else
        memcpy(args->to.vector, vector_values(&args->to, &args->from, rows_of(&job, 0)), args->from.n_cols * sizeof(float));
    mem_free(job.rows);
    return rc;
}

enum rc K(tensor_sum)(struct cpu *cpu, const struct tensor_sum_args *args, struct err *err)
{
    const struct matrix *matrix = args->of.matrix;
    struct tensor_job job = {cpu, &args->of, args->from, NULL, matrix ? matrix->n_cols : args->of.n_values, NULL};
    enum rc rc = take_rows(&job, err);
    if (rc)
        return rc;
    *args->result = (struct tensor_sum){0, 0};
    if (matrix) {
        pool_run(cpu->pool, sum_panels, &job);
        for (uint32_t i = 0; i < cpu->n_threads; i++) {
            args->result->sum += job.sums[i].sum;
            args->result->n_non_finite += job.sums[i].n_non_finite;
        }
    } else {
        const float *values = args->from ? vector_values(&args->of, args->from, rows_of(&job, 0)) : args->of.vector;
        add_values(args->result, args->of.first_index, args->of.col_step, values, DTYPE_F32, job.n_cols);
    }
    mem_free(job.rows);
    return RC_OK;
}
