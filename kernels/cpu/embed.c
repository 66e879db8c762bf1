/* out[r] = scale * row first_row + token_ids[r] - first_id of the matrix: the exact values of its type, rounded once by the
 * product. The matrix may be a tied head, so a row is read from its panel: unpacking one row unpacks 16 rows, in cache. Takes a
 * few microseconds a row. */
#include "matrix.h"
#include "ops.h"
#include "rows.h"

static int32_t id_of(const struct embed_args *args, uint32_t i)
{
    return args->token_ids ? args->token_ids[i] : 0;
}

/* Whether the matrix has the rows of the id; another rank has them otherwise. */
static bool is_own(const struct embed_args *args, int32_t id)
{
    return !args->end_id || (id >= args->first_id && id < args->end_id);
}

static uint32_t row_of(const struct embed_args *args, int32_t id)
{
    return args->first_row + (uint32_t)id - (uint32_t)args->first_id;
}

struct embed_job {
    struct cpu *cpu;
    const struct embed_args *args;
};

static void embed_rows(void *job_args, uint32_t thread)
{
    const struct embed_job *job = job_args;
    const struct embed_args *args = job->args;
    const struct matrix *matrix = args->matrix;
    float *scratch = (float *)(job->cpu->scratch + thread * job->cpu->scratch_bytes);
    uint32_t end = share_first(args->n_rows, thread + 1, job->cpu->n_threads);
    for (uint32_t i = share_first(args->n_rows, thread, job->cpu->n_threads); i < end; i++) {
        int32_t id = id_of(args, i);
        if (!is_own(args, id))
            continue;
        uint32_t row = row_of(args, id);
        const struct cpu_part *part = matrix_part_of(matrix, row);
        float *out = (float *)args->out.data + (size_t)i * args->out.stride;
        row -= part->first_row;
        K(panel_read)(part, row / PANEL_ROWS, row % PANEL_ROWS, 1, matrix->n_cols, out, 0, scratch);
        if (args->scale != 1.0f)
            for (uint32_t k = 0; k < matrix->n_cols; k++)
                out[k] *= args->scale;
    }
}

enum rc K(embed)(struct cpu *cpu, const struct embed_args *args, struct err *err)
{
    for (uint32_t i = 0; i < args->n_rows; i++) {
        int32_t id = id_of(args, i);
        if (is_own(args, id) && (id < 0 || row_of(args, id) >= args->matrix->n_rows))
            return err_set(err, RC_INTERNAL, "embed: token id %d, from row %u on, is outside of the matrix's %u rows", id,
                           args->first_row, args->matrix->n_rows);
    }
    struct embed_job job = {cpu, args};
    pool_run(cpu->pool, embed_rows, &job);
    return RC_OK;
}
