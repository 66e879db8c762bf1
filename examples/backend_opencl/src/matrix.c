/* matrix.c: weights. Rows of float32, float16 and bfloat16 are stored as they are, rows of all other types as float32. Parts that
 * follow each other with one stored type share a block, so that one launch multiplies them. */
#include "device.h"

#include <stdlib.h>
#include <string.h>

static uint32_t stored_type(uint32_t dtype)
{
    return dtype == DTYPE_F16 || dtype == DTYPE_BF16 ? dtype : (uint32_t)DTYPE_F32;
}

static size_t item_bytes(const struct block *block)
{
    return host->dtype_info(block->dtype)->block_bytes;
}

static size_t block_bytes(const struct matrix *m, const struct block *block)
{
    return (size_t)(block->n_rows + PANEL - 1) / PANEL * PANEL * m->n_cols * item_bytes(block);
}

/* Every type that has float values. */
bool supports(void *ctx, uint32_t dtype, uint32_t use)
{
    static const char zeros[512];
    float values[256];
    const struct dtype_info *info = host->dtype_info(dtype);
    (void)ctx;
    (void)use;
    return info && info->block_values <= 256 && host->dtype_to_float(dtype, zeros, values, info->block_values);
}

void matrix_destroy(void *ctx, struct matrix *m)
{
    if (!m)
        return;
    for (uint32_t i = 0; m->blocks && i < m->n_blocks; i++)
        buffer_destroy(ctx, m->blocks[i].items, block_bytes(m, &m->blocks[i]));
    free(m->blocks);
    free(m->parts);
    free(m);
}

size_t matrix_bytes(const struct matrix *m)
{
    return m->size_bytes;
}

uint32_t matrix_arithmetic(const struct matrix *m, uint32_t part)
{
    (void)m;
    (void)part;
    return ARITHMETIC_FLOAT;
}

static void divide(struct matrix *m)
{
    struct block *block = NULL;
    uint32_t first_row = 0;
    for (uint32_t i = 0; i < m->n_parts; i++) {
        uint32_t dtype = stored_type(m->parts[i].dtype);
        if (!block || block->dtype != dtype) {
            block = &m->blocks[m->n_blocks++];
            *block = (struct block){.first_row = first_row, .dtype = dtype};
        }
        block->n_rows += m->parts[i].n_rows;
        first_row += m->parts[i].n_rows;
    }
}

enum rc matrix_create(void *ctx, const struct matrix_desc *desc, struct matrix **matrix, struct err *err)
{
    struct matrix *m = calloc(1, sizeof *m);
    if (!m)
        return host->err_set(err, RC_MEMORY, "opencl: no memory for a matrix");
    *m = (struct matrix){.device = ctx, .n_cols = desc->n_cols, .n_parts = desc->n_parts};
    m->parts = calloc(m->n_parts, sizeof *m->parts);
    m->blocks = calloc(m->n_parts, sizeof *m->blocks);
    enum rc rc = m->parts && m->blocks ? RC_OK : host->err_set(err, RC_MEMORY, "opencl: no memory for a matrix");
    for (uint32_t i = 0; i < desc->n_parts && !rc; i++)
        if (supports(ctx, desc->parts[i].dtype, desc->use))
            m->parts[i] = desc->parts[i];
        else
            rc = host->err_set(err, RC_UNSUPPORTED, "opencl: wanted a type with float values, have type %u",
                               desc->parts[i].dtype);
    if (!rc)
        divide(m);
    for (uint32_t i = 0; i < m->n_blocks && !rc; i++) {
        rc = buffer_create(ctx, block_bytes(m, &m->blocks[i]), &m->blocks[i].items, err);
        m->size_bytes += block_bytes(m, &m->blocks[i]);
    }
    if (rc)
        matrix_destroy(ctx, m);
    else
        *matrix = m;
    return rc;
}

/* ---- rows ---------------------------------------------------------------------------------------------------------------- */

/* The panels of rows [first, first + n) of a block, for the host until clEnqueueSVMUnmap. */
static enum rc map_rows(const struct matrix *m, const struct block *block, uint32_t first, uint32_t n, char **mapped,
                        struct err *err)
{
    struct device *d = m->device;
    size_t panel_bytes = (size_t)PANEL * m->n_cols * item_bytes(block), panel = first / PANEL, end = (first + n - 1) / PANEL + 1;
    *mapped = (char *)block->items + panel * panel_bytes;
    return check(d->cl.clEnqueueSVMMap(d->queue, CL_TRUE, CL_MAP_READ | CL_MAP_WRITE, *mapped, (end - panel) * panel_bytes, 0,
                                       NULL, NULL), "clEnqueueSVMMap", err);
}

static enum rc unmap_rows(const struct matrix *m, char *mapped, struct err *err)
{
    struct device *d = m->device;
    return check(d->cl.clEnqueueSVMUnmap(d->queue, mapped, 0, NULL, NULL), "clEnqueueSVMUnmap", err);
}

/* Copies one row between its panel and `row`, whose items lie together. mapped: the panel of row `first` of the block. */
static void copy_row(const struct matrix *m, size_t item, char *mapped, uint32_t first, uint32_t row, char *items, bool is_write)
{
    char *start = mapped + ((size_t)(row / PANEL - first / PANEL) * m->n_cols * PANEL + row % PANEL) * item;
    for (size_t k = 0; k < m->n_cols; k++)
        if (is_write)
            memcpy(start + k * PANEL * item, items + k * item, item);
        else
            memcpy(items + k * item, start + k * PANEL * item, item);
}

static const struct block *block_of(const struct matrix *m, uint32_t row)
{
    uint32_t i = 0;
    while (row - m->blocks[i].first_row >= m->blocks[i].n_rows)
        i++;
    return &m->blocks[i];
}

enum rc matrix_write(void *ctx, struct matrix *m, uint32_t part, uint32_t first_row, uint32_t n_rows, const void *rows,
                     struct err *err)
{
    uint32_t first = first_row, dtype = m->parts[part].dtype;
    const struct dtype_info *info = host->dtype_info(dtype);
    size_t n_units = (m->n_cols + info->block_values - 1) / info->block_values;
    (void)ctx;
    if (!n_rows)
        return RC_OK;
    for (uint32_t i = 0; i < part; i++)
        first += m->parts[i].n_rows;
    const struct block *block = block_of(m, first);
    bool is_stored = block->dtype == dtype;
    char *mapped, *values = malloc(n_units * info->block_values * sizeof(float));
    if (!values)
        return host->err_set(err, RC_MEMORY, "opencl: no memory for a row of weights");
    first -= block->first_row;
    enum rc rc = map_rows(m, block, first, n_rows, &mapped, err);
    for (uint32_t i = 0; i < n_rows && !rc; i++) {
        const char *row = (const char *)rows + i * n_units * info->block_bytes;
        if (is_stored)
            memcpy(values, row, n_units * info->block_bytes);
        else
            host->dtype_to_float(dtype, row, (float *)(void *)values, n_units * info->block_values);
        copy_row(m, item_bytes(block), mapped, first, first + i, values, true);
    }
    free(values);
    return rc ? rc : unmap_rows(m, mapped, err);
}

enum rc matrix_read(void *ctx, const struct matrix *m, uint32_t first_row, uint32_t n_rows, float *rows, struct err *err)
{
    enum rc rc = RC_OK;
    (void)ctx;
    char *items = malloc(m->n_cols * sizeof(float));
    if (!items)
        return host->err_set(err, RC_MEMORY, "opencl: no memory for a row of weights");
    for (uint32_t i = 0; i < n_rows && !rc; i++) {
        const struct block *block = block_of(m, first_row + i);
        uint32_t row = first_row + i - block->first_row;
        char *mapped;
        rc = map_rows(m, block, row, 1, &mapped, err);
        if (rc)
            break;
        copy_row(m, item_bytes(block), mapped, row, row, items, false);
        host->dtype_to_float(block->dtype, items, rows + (size_t)i * m->n_cols, m->n_cols);
        rc = unmap_rows(m, mapped, err);
    }
    free(items);
    return rc;
}
