#include "settle.h"

#include "../base/mem.h"

#include <math.h>

#define CHUNK_BYTES ((size_t)1 << 20) /* of rows copied to the host at a time */
#define LEAST_LENGTH 1e-12            /* a shorter row is divided by this instead of its length */

/* The weight's row at which a part begins. */
static uint32_t first_row_of(const struct weight *weight, uint32_t part)
{
    uint32_t row = 0;
    for (uint32_t i = 0; i < part; i++)
        row += weight->parts[i].rows;
    return row;
}

static void divide_by_lengths(float *row, uint32_t n_rows, uint32_t n_cols)
{
    for (float *end = row + (size_t)n_rows * n_cols; row < end; row += n_cols) {
        double squares = 0;
        for (uint32_t c = 0; c < n_cols; c++)
            squares += (double)row[c] * row[c];
        double length = sqrt(squares) < LEAST_LENGTH ? LEAST_LENGTH : sqrt(squares);
        for (uint32_t c = 0; c < n_cols; c++)
            row[c] = (float)(row[c] / length);
    }
}

static enum rc make_unit_rows(struct model *m, uint32_t w, uint32_t part, struct err *err)
{
    const struct weight *weight = &m->program->weights[w];
    const struct weight_part *p = &weight->parts[part];
    struct matrix *matrix = weights_matrix(m->weights, w);
    uint32_t dtype = weights_stored(m->weights, w, part), cols = weight->cols, first = first_row_of(weight, part);
    if (dtype != DTYPE_F32 && dtype != DTYPE_F16 && dtype != DTYPE_BF16)
        return err_set(err, RC_UNSUPPORTED, "%s: rows of type %s cannot be scaled to length 1; load a checkpoint of floats",
                       p->source, dtype_info(dtype)->name);
    uint32_t at_once = 1 + (uint32_t)(CHUNK_BYTES / sizeof(float) / cols);
    float *rows = mem_alloc(2 * (size_t)at_once * cols * sizeof *rows), *rounded = rows ? rows + (size_t)at_once * cols : NULL;
    enum rc rc = rows ? RC_OK : err_set(err, RC_MEMORY, "weights: out of memory");
    for (uint32_t row = 0, n; row < p->rows && !rc; row += n) {
        n = p->rows - row < at_once ? p->rows - row : at_once;
        rc = m->backend->matrix_read(m->ctx, matrix, first + row, n, rows, err);
        if (rc)
            break;
        divide_by_lengths(rows, n, cols);
        dtype_from_float(dtype, rows, rounded, (size_t)n * cols);
        rc = m->backend->matrix_write(m->ctx, matrix, part, row, n, rounded, err);
    }
    mem_free(rows);
    return rc;
}

enum rc settle_part(struct model *m, uint32_t w, uint32_t part, bool is_written, struct err *err)
{
    const struct weight *weight = &m->program->weights[w];
    if (weight->has_unit_rows)
        return is_written ? make_unit_rows(m, w, part, err) : RC_OK;
    float *kept = weights_kept(m->weights, w), *held = (float *)weights_vector(m->weights, w);
    if (!kept || !weight->parts[part].is_constant)
        return RC_OK;
    size_t first = first_row_of(weight, part), size_bytes = weight->parts[part].rows * sizeof *kept;
    return is_written ? m->backend->download(m->ctx, kept + first, held + first, size_bytes, err)
                      : m->backend->upload(m->ctx, held + first, kept + first, size_bytes, err);
}

enum rc settle_values(struct model *m, struct err *err)
{
    enum rc rc = RC_OK;
    for (uint32_t w = 0; w < m->program->n_weights && !rc; w++) {
        const struct weight *weight = &m->program->weights[w];
        if (weight->values)
            rc = m->backend->upload(m->ctx, (float *)weights_vector(m->weights, w), weight->values,
                                    weight->rows * sizeof *weight->values, err);
    }
    return rc;
}

enum rc settle_all(struct model *m, struct err *err)
{
    enum rc rc = RC_OK;
    for (uint32_t w = 0; w < m->program->n_weights && !rc; w++)
        for (uint32_t part = 0; part < m->program->weights[w].n_parts && !rc; part++)
            rc = settle_part(m, w, part, true, err);
    return rc;
}
