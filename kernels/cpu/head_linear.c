/* out[h] = W_h x[h] or W_h^T x[h] for every head h, where W_h is a range of rows of one matrix: the two products of absorbed
 * latent attention, both from the matrix as the checkpoint has it. Shapes: x, out [n_rows][n_heads * ...] float32, the matrix
 * of any type as exact float32 values, 16 rows at a time. Order of the sums: W_h x is a dot product in four chains of vectors
 * over the columns, joined as a fixed tree; W_h^T x is one chain over W_h's rows for every output. Bound by the bytes of the
 * matrix for few rows (16 heads of 256 x 512 in bfloat16: 4 MB, 0.13 ms at 32 GB/s), else by 2 operations a weight and row. */
#include "matrix.h"
#include "ops.h"
#include "simd.h"

#include <stdatomic.h>

struct head_job {
    struct cpu *cpu;
    const struct head_linear_args *args;
    uint32_t blocks;   /* units of a head */
    atomic_uint next;
};

static const float *operand(const struct head_linear_args *args, uint32_t row, uint32_t head)
{
    return (const float *)args->x.data + (size_t)row * args->x.stride + (size_t)head * (args->x.width / args->n_heads);
}

static float *result(const struct head_linear_args *args, uint32_t row, uint32_t head, uint32_t width)
{
    return (float *)args->out.data + (size_t)row * args->out.stride + (size_t)head * width;
}

/* Outputs of 16 rows of one head's matrix. */
static void multiply(const struct head_linear_args *args, uint32_t head, uint32_t block, float *w, float *scratch)
{
    uint32_t cols = args->matrix->n_cols, first = block * PANEL_ROWS, n = args->used_rows - first;
    n = n < PANEL_ROWS ? n : PANEL_ROWS;
    K(matrix_rows)(args->matrix, head * args->head_rows + args->first_row + first, n, w, scratch);
    for (uint32_t r = 0; r < args->n_rows; r++) {
        const float *x = operand(args, r, head);
        float *out = result(args, r, head, args->used_rows) + first;
        for (uint32_t i = 0; i < n; i++)
            out[i] = v_dot(w + (size_t)i * cols, x, cols);
    }
}

/* All outputs of one head; takes 16 rows of the head's matrix at a time. */
static void multiply_transposed(const struct head_linear_args *args, uint32_t head, float *w, float *scratch)
{
    uint32_t cols = args->matrix->n_cols;
    for (uint32_t first = 0; first < args->used_rows; first += PANEL_ROWS) {
        uint32_t n = args->used_rows - first < PANEL_ROWS ? args->used_rows - first : PANEL_ROWS;
        K(matrix_rows)(args->matrix, head * args->head_rows + args->first_row + first, n, w, scratch);
        for (uint32_t r = 0; r < args->n_rows; r++) {
            const float *x = operand(args, r, head) + first;
            float *out = result(args, r, head, cols);
            for (uint32_t c = 0; c < cols; c += LANES) {
                uint32_t left = cols - c < LANES ? cols - c : LANES;
                vf sum = first ? v_load_n(out + c, left) : v_zero();
                for (uint32_t i = 0; i < n; i++)
                    sum = v_fma(v_set1(x[i]), v_load_n(w + (size_t)i * cols + c, left), sum);
                v_store_n(out + c, sum, left);
            }
        }
    }
}

static void run_heads(void *job_args, uint32_t thread)
{
    struct head_job *job = job_args;
    const struct head_linear_args *args = job->args;
    float *scratch = (float *)(job->cpu->scratch + thread * job->cpu->scratch_bytes);
    float *w = scratch + EXPANDED_MAX_BYTES / sizeof(float);
    for (uint32_t unit; (unit = atomic_fetch_add(&job->next, 1)) < args->n_heads * job->blocks;)
        if (args->is_transposed)
            multiply_transposed(args, unit, w, scratch);
        else
            multiply(args, unit / job->blocks, unit % job->blocks, w, scratch);
}

enum rc K(head_linear)(struct cpu *cpu, const struct head_linear_args *args, struct err *err)
{
    uint32_t part = args->n_heads ? args->x.width / args->n_heads : 0, width = args->is_transposed ? args->used_rows
                                                                                                  : args->matrix->n_cols;
    if (!part || part < width || args->matrix->n_rows != args->n_heads * args->head_rows ||
        args->first_row + args->used_rows > args->head_rows)
        return err_set(err, RC_INTERNAL, "head_linear: wanted %u heads of %u rows, have a matrix of %u and %u columns of x",
                       args->n_heads, args->head_rows, args->matrix->n_rows, args->x.width);
    struct head_job job = {.cpu = cpu, .args = args};
    job.blocks = args->is_transposed ? 1 : (args->used_rows + PANEL_ROWS - 1) / PANEL_ROWS;
    pool_run(cpu->pool, run_heads, &job);
    return RC_OK;
}
