/* Weight matrices: rows of the checkpoint's types, repacked losslessly into the instruction set's panels, and read back
 * exactly. Writing and reading are bound by memory: 2 bytes moved for each byte of weights. */
#include "matrix.h"
#include "ops.h"
#include "../../csrc/base/mem.h"

#include <stdatomic.h>
#include <string.h>

#define RUN_ALIGNMENT 64u

static enum rc part_type(const struct matrix_desc *desc, uint32_t i, const struct linear_type **type, struct err *err)
{
    const struct matrix_part *part = &desc->parts[i];
    const struct dtype_info *info = dtype_info(part->dtype);
    const char *name = info ? info->name : "an unknown type";
    const bool is_gguf = part->dtype < DTYPE_COUNT; /* others have blocks that may be cut, and float activations by default */
    *type = NULL;
    if (desc->arithmetic == ARITHMETIC_FP8)
        return err_set(err, RC_UNSUPPORTED, "cpu: wanted float or int8 activations, have fp8; set activation_dtype to 'auto'");
    if (info && desc->arithmetic == ARITHMETIC_AUTO)
        *type = K(linear_type)(part->dtype, ARITHMETIC_BF16);
    if (info && !*type && (desc->arithmetic == ARITHMETIC_INT8 || (desc->arithmetic == ARITHMETIC_AUTO && is_gguf)))
        *type = K(linear_type)(part->dtype, ARITHMETIC_INT8);
    if (info && !*type)
        *type = K(linear_type)(part->dtype, ARITHMETIC_FLOAT);
    if (!*type)
        return err_set(err, RC_UNSUPPORTED, "matrix: wanted a float or GGUF quantised type of the CPU backend, have %s (%u)",
                       name, part->dtype);
    if (is_gguf && desc->n_cols % info->block_values)
        return err_set(err, RC_UNSUPPORTED, "matrix: %s wants columns in multiples of %u, have %u", name, info->block_values,
                       desc->n_cols);
    return RC_OK;
}

enum rc K(matrix_create)(struct cpu *cpu, const struct matrix_desc *desc, struct matrix **out, struct err *err)
{
    if (!desc->n_cols || desc->n_cols > cpu->options.max_cols)
        return err_set(err, RC_INTERNAL, "matrix: wanted 1 to %u columns (the backend's max_cols), have %u",
                       cpu->options.max_cols, desc->n_cols);
    struct matrix *matrix = mem_calloc(1, sizeof *matrix + desc->n_parts * sizeof *matrix->parts);
    if (!matrix)
        return err_set(err, RC_MEMORY, "matrix: no memory for %u parts", desc->n_parts);
    matrix->n_parts = desc->n_parts;
    matrix->n_cols = desc->n_cols;
    for (uint32_t i = 0; i < desc->n_parts; i++) {
        struct cpu_part *part = &matrix->parts[i];
        enum rc rc = part_type(desc, i, &part->type, err);
        if (rc) {
            mem_free(matrix);
            return rc;
        }
        part->first_row = matrix->n_rows;
        part->n_rows = desc->parts[i].n_rows;
        part->n_panels = (part->n_rows + PANEL_ROWS - 1) / PANEL_ROWS;
        part->n_blocks = (desc->n_cols + part->type->block_values - 1) / part->type->block_values;
        part->panel_bytes = (size_t)part->n_blocks * part->type->panel_block_bytes;
        matrix->n_rows += part->n_rows;
        if (i && part->type != part[-1].type) /* a new run */
            matrix->bytes = (matrix->bytes + RUN_ALIGNMENT - 1) / RUN_ALIGNMENT * RUN_ALIGNMENT;
        part->panels = (uint8_t *)matrix->bytes; /* an offset until the memory is allocated */
        matrix->bytes += part->n_panels * part->panel_bytes;
    }
    uint8_t *memory = cpu_weights_take(cpu, matrix->bytes, &matrix->chunk);
    if (!memory) {
        size_t bytes = matrix->bytes;
        mem_free(matrix);
        return err_set(err, RC_MEMORY, "matrix: no memory for %zu bytes of weights", bytes);
    }
    for (uint32_t i = 0; i < matrix->n_parts; i++)
        matrix->parts[i].panels = memory + (size_t)matrix->parts[i].panels;
    *out = matrix;
    return RC_OK;
}

struct write_job {
    struct cpu *cpu;
    const struct cpu_part *part;
    uint32_t n_cols, first_row, n_rows;
    size_t row_bytes;
    const uint8_t *rows;             /* NULL: `source` reads the rows */
    const struct row_source *source;
    uint8_t *read;                   /* [n_threads][PANEL_ROWS][row_bytes] */
    atomic_bool has_failed;          /* the thread that sets it fills err and rc */
    struct err *err;
    enum rc rc;
};

/* Rows of one panel; NULL once a read has failed. */
static const uint8_t *panel_rows(struct write_job *job, uint32_t thread, uint32_t row, uint32_t n_rows)
{
    struct err err;
    if (job->rows)
        return job->rows + (row - job->first_row) * job->row_bytes;
    if (atomic_load(&job->has_failed))
        return NULL;
    uint8_t *rows = job->read + thread * PANEL_ROWS * job->row_bytes;
    enum rc rc = job->source->read(job->source->ctx, row - job->first_row, n_rows, rows, &err);
    if (!rc)
        return rows;
    if (!atomic_exchange(&job->has_failed, true)) {
        job->rc = rc;
        if (job->err)
            *job->err = err;
    }
    return NULL;
}

static void write_rows(void *args, uint32_t thread)
{
    struct write_job *job = args;
    const struct cpu_part *part = job->part;
    uint32_t first_panel = job->first_row / PANEL_ROWS, end_row = job->first_row + job->n_rows;
    uint32_t n_panels = (end_row + PANEL_ROWS - 1) / PANEL_ROWS - first_panel;
    uint32_t end = first_panel + share_first(n_panels, thread + 1, job->cpu->n_threads);
    for (uint32_t p = first_panel + share_first(n_panels, thread, job->cpu->n_threads); p < end; p++) {
        uint32_t row = p * PANEL_ROWS < job->first_row ? job->first_row : p * PANEL_ROWS;
        uint32_t next = (p + 1) * PANEL_ROWS < end_row ? (p + 1) * PANEL_ROWS : end_row;
        const uint8_t *rows = panel_rows(job, thread, row, next - row);
        if (!rows)
            return;
        part->type->repack(rows, job->row_bytes, row % PANEL_ROWS, next - row, job->n_cols,
                           part->panels + p * part->panel_bytes);
    }
}

static enum rc begin_write(struct cpu *cpu, struct matrix *matrix, uint32_t part_idx, uint32_t first_row, uint32_t n_rows,
                           struct write_job *job, struct err *err)
{
    if (part_idx >= matrix->n_parts || (uint64_t)first_row + n_rows > matrix->parts[part_idx].n_rows)
        return err_set(err, RC_INTERNAL, "matrix: rows %u + %u of part %u are outside of the matrix", first_row, n_rows,
                       part_idx);
    struct cpu_part *part = &matrix->parts[part_idx];
    part->rows = NULL;
    *job = (struct write_job){.cpu = cpu, .part = part, .n_cols = matrix->n_cols, .first_row = first_row, .n_rows = n_rows,
                              .row_bytes = dtype_row_bytes(part->type->dtype, matrix->n_cols), .err = err};
    return RC_OK;
}

enum rc K(matrix_write)(struct cpu *cpu, struct matrix *matrix, uint32_t part_idx, uint32_t first_row, uint32_t n_rows,
                        const void *rows, struct err *err)
{
    struct write_job job;
    enum rc rc = begin_write(cpu, matrix, part_idx, first_row, n_rows, &job, err);
    if (rc)
        return rc;
    job.rows = rows;
    pool_run(cpu->pool, write_rows, &job);
    return RC_OK;
}

enum rc K(matrix_load)(struct cpu *cpu, struct matrix *matrix, uint32_t part_idx, uint32_t first_row, uint32_t n_rows,
                       const struct row_source *source, struct err *err)
{
    struct write_job job;
    enum rc rc = begin_write(cpu, matrix, part_idx, first_row, n_rows, &job, err);
    if (rc)
        return rc;
    job.source = source;
    job.read = mem_alloc(cpu->n_threads * PANEL_ROWS * job.row_bytes);
    if (!job.read)
        return err_set(err, RC_MEMORY, "matrix: no memory for rows of %zu bytes", job.row_bytes);
    pool_run(cpu->pool, write_rows, &job);
    mem_free(job.read);
    return job.rc;
}

void K(panel_read)(const struct cpu_part *part, uint32_t panel, uint32_t first_lane, uint32_t n_lanes, uint32_t n_cols,
                   float *rows, size_t stride, float *scratch)
{
    const struct linear_type *type = part->type;
    const uint8_t *w = part->panels + panel * part->panel_bytes;
    if (part->rows) {
        const uint8_t *row = part->rows + ((size_t)panel * PANEL_ROWS + first_lane) * part->row_bytes;
        for (uint32_t i = 0; i < n_lanes; i++, row += part->row_bytes)
            dtype_to_float(type->dtype, row, rows + i * stride, n_cols);
        return;
    }
    uint32_t slab = EXPANDED_MAX_BYTES / (PANEL_ROWS * sizeof(float)) / type->block_values;
    for (uint32_t block = 0; block < part->n_blocks; block += slab) {
        uint32_t n_blocks = part->n_blocks - block < slab ? part->n_blocks - block : slab;
        uint32_t first_col = block * type->block_values, n = n_blocks * type->block_values;
        type->unpack(w + (size_t)block * type->panel_block_bytes, n_blocks, scratch);
        if (n > n_cols - first_col)
            n = n_cols - first_col;
        for (uint32_t i = 0; i < n_lanes; i++)
            for (uint32_t k = 0; k < n; k++)
                rows[i * stride + first_col + k] = scratch[(size_t)k * PANEL_ROWS + first_lane + i];
    }
}

void K(matrix_rows)(const struct matrix *matrix, uint32_t first_row, uint32_t n_rows, float *rows, float *scratch)
{
    for (uint32_t row = first_row, end = first_row + n_rows; row < end;) {
        const struct cpu_part *part = matrix_part_of(matrix, row);
        uint32_t in_part = row - part->first_row, lane = in_part % PANEL_ROWS, n = PANEL_ROWS - lane;
        if (n > part->n_rows - in_part)
            n = part->n_rows - in_part;
        if (n > end - row)
            n = end - row;
        K(panel_read)(part, in_part / PANEL_ROWS, lane, n, matrix->n_cols, rows + (size_t)(row - first_row) * matrix->n_cols,
                      matrix->n_cols, scratch);
        row += n;
    }
}

enum rc K(matrix_read)(struct cpu *cpu, const struct matrix *matrix, uint32_t first_row, uint32_t n_rows, float *rows,
                       struct err *err)
{
    if ((uint64_t)first_row + n_rows > matrix->n_rows)
        return err_set(err, RC_INTERNAL, "matrix: rows %u + %u are outside of its %u rows", first_row, n_rows, matrix->n_rows);
    K(matrix_rows)(matrix, first_row, n_rows, rows, (float *)cpu->scratch);
    return RC_OK;
}
