#include "weights.h"

#include "../base/dummy.h"
#include "../base/hash.h"
#include "../base/mem.h"
#include "../base/quantise.h"
#include "layout.h"

#include <string.h>

#define CHUNK_BYTES ((size_t)1 << 20) /* converted at a time, so a load holds no second copy of a tensor */
#define PANEL_ROWS 64
#define WINDOW_BYTES ((size_t)64 << 20) /* of a transposed tensor in host memory at once; filled by one read for each column */

struct stored {
    struct matrix *matrix;
    float *vector;
    float *kept;      /* [rows] last values of a vector with constant parts, in host memory */
    uint32_t *dtypes; /* [n_parts] */
};

struct weights {
    const struct program *program;
    const struct backend *backend;
    void *ctx;
    struct stored *stored; /* [n_weights] */
    size_t vector_bytes;
};

/* A load in progress. */
struct loader {
    struct weights *weights;
    const struct checkpoint *checkpoint;
    const struct weights_options *options;
    float *floats;          /* [PANEL_ROWS or more rows][cols] */
    void *converted;
    char *gathered;         /* room for as many rows of any type */
    size_t floats_bytes;
    uint64_t done_bytes, all_bytes;
};

static bool is_float(uint32_t dtype)
{
    return dtype == DTYPE_F32 || dtype == DTYPE_F16 || dtype == DTYPE_BF16;
}

/* The key of a tensor's dummy values: a hash of the seed and the tensor's name, independent of its place in the program. */
static uint64_t dummy_key(const struct loader *l, const struct weight_part *part)
{
    return hash_bytes(&(struct hash){l->options->seed, 0}, part->source, strlen(part->source)).lo;
}

/* The tensor that a part is loaded from. NULL: the weights are dummies, or the checkpoint lacks the tensor. */
static const struct checkpoint_tensor *tensor_of(const struct loader *l, const struct weight_part *part)
{
    return l->options->is_dummy ? NULL : checkpoint_find(l->checkpoint, part->source);
}

static uint64_t part_bytes(const struct weight *weight, uint32_t part, const struct checkpoint_tensor *tensor)
{
    return weight->parts[part].rows * dtype_row_bytes(tensor ? tensor->dtype : DTYPE_F32, weight->cols);
}

static enum rc check_tensor(const struct loader *l, const struct weight *weight, const struct weight_part *part,
                            const struct checkpoint_tensor *tensor, struct err *err)
{
    if (!tensor) {
        err_set(err, RC_CHECKPOINT, "%s: wanted a tensor of this name, have none", part->source);
        err_name(err, checkpoint_path(l->checkpoint, 0), part->source);
        return RC_CHECKPOINT;
    }
    uint64_t values = 1, wanted_values = 1, last = tensor->n_dims ? tensor->shape[tensor->n_dims - 1] : 1;
    for (uint32_t i = 0; i < tensor->n_dims; i++)
        values *= tensor->shape[i];
    for (uint32_t i = 0; i < part->n_dims; i++)
        wanted_values *= part->dims[i];
    const struct dtype_info *info = dtype_info(tensor->dtype);
    bool is_plain = info && (is_float(tensor->dtype) || tensor->dtype == DTYPE_F64);
    const char *wanted = NULL;
    uint32_t wanted_last = part->n_dims ? part->dims[part->n_dims - 1] : 1;
    if (values != wanted_values || (weight->kind == WEIGHT_MATRIX && last != wanted_last))
        wanted = "shape";
    else if (!info || (weight->kind == WEIGHT_VECTOR && !is_plain))
        wanted = "a float type";
    if (!wanted && part->is_transposed && !is_plain && !checkpoint_joins_columns(tensor)) {
        err_set(err, RC_UNSUPPORTED, "%s: a matrix of type %s cannot be transposed; convert the checkpoint to floats",
                part->source, info->name);
        return RC_UNSUPPORTED;
    }
    if (!wanted)
        return RC_OK;
    err_set(err, RC_CHECKPOINT, "%s: wanted %s of %llu values in rows of %u, have %llu of type %s in rows of %llu",
            part->source, wanted, (unsigned long long)wanted_values, wanted_last, (unsigned long long)values,
            info ? info->name : "?", (unsigned long long)last);
    err_name(err, checkpoint_path(l->checkpoint, tensor->file), part->source);
    return RC_CHECKPOINT;
}

static enum rc progress(struct loader *l, const struct weight *weight, uint32_t part, const struct checkpoint_tensor *tensor,
                        struct err *err)
{
    l->done_bytes += part_bytes(weight, part, tensor);
    if (l->options->progress && !l->options->progress(l->options->progress_ctx, l->done_bytes, l->all_bytes))
        return err_set(err, RC_INVALID, "loading was interrupted");
    return RC_OK;
}

/* The error for values that a quantised type cannot hold. */
static enum rc not_finite(const struct loader *l, const char *source, struct err *err)
{
    const struct checkpoint_tensor *tensor = checkpoint_find(l->checkpoint, source);
    const char *file = checkpoint_path(l->checkpoint, tensor ? tensor->file : 0);
    err_set(err, RC_CHECKPOINT, "%s: tensor %.160s: quantization: wanted " QUANTISE_WANTED ", have others", file, source);
    err_name(err, file, source);
    return RC_CHECKPOINT;
}

/* Converts rows from the file's type to the stored type and writes them to the backend. */
static enum rc write_rows(struct loader *l, uint32_t w, uint32_t part, uint32_t dtype, uint32_t first_row, uint32_t n_rows,
                          const void *rows, struct err *err)
{
    const struct weight *weight = &l->weights->program->weights[w];
    struct stored *stored = &l->weights->stored[w];
    if (dtype != stored->dtypes[part]) {
        if (!quantise_rows(stored->dtypes[part], dtype, rows, n_rows, weight->cols, l->floats, l->converted))
            return not_finite(l, weight->parts[part].source, err);
        rows = l->converted;
    }
    return l->weights->backend->matrix_write(l->weights->ctx, stored->matrix, part, first_row, n_rows, rows, err);
}

/* Writes a run of rows of a transposed part. Each window takes one read for each column, so a window holds many rows to make
 * the reads long. */
static enum rc write_columns(struct loader *l, uint32_t w, uint32_t part, const struct checkpoint_tensor *tensor,
                             const struct row_run *run, uint32_t most, struct err *err)
{
    const struct weight *weight = &l->weights->program->weights[w];
    struct element_steps steps = layout_steps(weight, &weight->parts[part], run);
    size_t item = tensor->companion ? 1 : dtype_info(tensor->dtype)->block_bytes, bytes = weight->cols * item;
    uint32_t at_once = bytes * run->n_rows > WINDOW_BYTES ? (uint32_t)(WINDOW_BYTES / bytes) : run->n_rows;
    at_once = at_once < most ? most : at_once;
    char *window = mem_alloc(bytes * at_once);
    enum rc rc = window ? RC_OK : err_set(err, RC_MEMORY, "weights: out of memory");
    for (uint32_t row = 0, n_window; row < run->n_rows && !rc; row += n_window) {
        n_window = run->n_rows - row < at_once ? run->n_rows - row : at_once;
        for (uint32_t c = 0; c < weight->cols && !rc; c++)
            rc = checkpoint_items(l->checkpoint, tensor, item, steps.first + c * steps.col + row * steps.row, steps.row,
                                   n_window, window + (size_t)c * n_window * item, err);
        for (uint32_t at = 0, n; at < n_window && !rc; at += n) {
            n = n_window - at < most ? n_window - at : most;
            for (uint32_t c = 0; c < weight->cols; c++)
                for (uint32_t r = 0; r < n; r++)
                    memcpy(l->gathered + r * bytes + c * item, window + ((size_t)c * n_window + at + r) * item, item);
            char *rows = l->gathered;
            if (tensor->companion) {
                rows = l->converted;
                rc = checkpoint_join_columns(l->checkpoint, tensor, run->source_row + (row + at) * run->step, run->step, n,
                                             (const uint8_t *)l->gathered, (uint8_t *)rows, err);
            }
            rc = rc ? rc : write_rows(l, w, part, tensor->dtype, run->first_row + row + at, n, rows, err);
        }
    }
    mem_free(window);
    return rc;
}

/* Rows of a span, joined by the backend's threads or here. */
struct span_source {
    const struct checkpoint_span *span;
    uint64_t first, step;
};

static enum rc read_span(void *ctx, uint32_t first, uint32_t n_rows, void *to, struct err *err)
{
    const struct span_source *source = ctx;
    return checkpoint_span_read(source->span, source->first + first * source->step, source->step, n_rows, to, err);
}

/* Writes a run of rows of a tensor that is stored by columns, span by span. */
static enum rc write_spans(struct loader *l, uint32_t w, uint32_t part, const struct checkpoint_tensor *tensor,
                           const struct row_run *run, uint32_t most, struct err *err)
{
    const struct backend *backend = l->weights->backend;
    struct stored *stored = &l->weights->stored[w];
    uint64_t at_once = checkpoint_span_rows(tensor) / run->step;
    enum rc rc = RC_OK;
    at_once = at_once ? at_once : 1;
    if (!backend->matrix_load)
        at_once = at_once < most ? at_once : most;
    for (uint32_t row = 0, n; row < run->n_rows && !rc; row += n) {
        struct checkpoint_span *span = NULL;
        struct span_source from = {NULL, run->source_row + row * run->step, run->step};
        struct row_source source = {read_span, &from, false};
        n = run->n_rows - row < at_once ? run->n_rows - row : (uint32_t)at_once;
        rc = checkpoint_span_open(l->checkpoint, tensor, from.first, (n - 1) * run->step + 1, &span, err);
        from.span = span;
        if (!rc && backend->matrix_load)
            rc = backend->matrix_load(l->weights->ctx, stored->matrix, part, run->first_row + row, n, &source, err);
        else if (!rc)
            rc = read_span(&from, 0, n, l->gathered, err);
        if (!rc && !backend->matrix_load)
            rc = write_rows(l, w, part, tensor->dtype, run->first_row + row, n, l->gathered, err);
        checkpoint_span_close(span);
    }
    return rc;
}

/* A run of rows that the backend reads through read_run or read_quantised. */
struct run_source {
    const struct loader *loader;
    const struct checkpoint_tensor *tensor;
    uint64_t first, step;
    uint32_t dtype, cols; /* of the stored rows */
};

static enum rc read_run(void *ctx, uint32_t first, uint32_t n_rows, void *to, struct err *err)
{
    const struct run_source *run = ctx;
    return checkpoint_rows(run->loader->checkpoint, run->tensor, run->first + first * run->step, run->step, n_rows, to, err);
}

static enum rc read_quantised(void *ctx, uint32_t first, uint32_t n_rows, void *to, struct err *err)
{
    const struct run_source *run = ctx;
    size_t floats_bytes = (size_t)n_rows * run->cols * sizeof(float);
    float *floats = mem_alloc(floats_bytes + n_rows * dtype_row_bytes(run->tensor->dtype, run->cols));
    void *rows = (char *)floats + floats_bytes;
    enum rc rc = floats ? read_run(ctx, first, n_rows, rows, err) : err_set(err, RC_MEMORY, "weights: out of memory");
    if (!rc && !quantise_rows(run->dtype, run->tensor->dtype, rows, n_rows, run->cols, floats, to))
        rc = not_finite(run->loader, run->tensor->name, err);
    mem_free(floats);
    return rc;
}

/* Writes a part of a matrix run by run. If the rows are quantised, or if the stored type is the file's and the rows are
 * adjacent, the backend's matrix_load reads them. Other rows are gathered and converted here, some at a time. */
static enum rc write_part(struct loader *l, uint32_t w, uint32_t part, const struct checkpoint_tensor *tensor, struct err *err)
{
    const struct weight *weight = &l->weights->program->weights[w];
    const struct weight_part *p = &weight->parts[part];
    struct stored *stored = &l->weights->stored[w];
    const struct backend *backend = l->weights->backend;
    size_t row_bytes = dtype_row_bytes(tensor->dtype, weight->cols), widest = sizeof(double) * weight->cols;
    uint32_t most = (uint32_t)(l->floats_bytes / (row_bytes > widest ? row_bytes : widest));
    bool is_same = tensor->dtype == stored->dtypes[part], is_quantised = !is_same && quantise_has(stored->dtypes[part]);
    struct row_run run = {0};
    enum rc rc = RC_OK;
    struct checkpoint_tensor flat = *tensor; /* whose last dimension are all columns, such as those of a convolution */
    if (!p->is_transposed && !tensor->packing && !tensor->companion && tensor->n_dims > 2)
        flat.shape[flat.n_dims - 1] = weight->cols;
    tensor = &flat;
    for (uint32_t row = 0; row < p->rows && !rc; row += run.n_rows) {
        run = layout_run(p, row, layout_slice(p));
        if (p->is_transposed) {
            rc = write_columns(l, w, part, tensor, &run, most, err);
        } else if (checkpoint_span_rows(tensor)) {
            rc = write_spans(l, w, part, tensor, &run, most, err);
        } else if (((is_same && run.step == 1) || is_quantised) && backend->matrix_load) {
            struct run_source from = {l, tensor, run.source_row, run.step, stored->dtypes[part], weight->cols};
            struct row_source source = {is_same ? read_run : read_quantised, &from, !is_same};
            rc = backend->matrix_load(l->weights->ctx, stored->matrix, part, row, run.n_rows, &source, err);
        } else {
            run.n_rows = run.n_rows < most ? run.n_rows : most;
            rc = checkpoint_rows(l->checkpoint, tensor, run.source_row, run.step, run.n_rows, l->gathered, err);
            rc = rc ? rc : write_rows(l, w, part, tensor->dtype, row, run.n_rows, l->gathered, err);
        }
    }
    return rc;
}

/* Writes dummy values to a part of a matrix. */
static enum rc fill_part(struct loader *l, uint32_t w, uint32_t part, struct err *err)
{
    const struct weight *weight = &l->weights->program->weights[w];
    const struct weight_part *p = &weight->parts[part];
    const struct stored *stored = &l->weights->stored[w];
    enum rc rc = RC_OK;
    struct row_run run = {0};
    for (uint32_t row = 0; row < p->rows && !rc; row += run.n_rows) {
        run = layout_run(p, row, UINT64_MAX);
        rc = weights_fill(l->weights->backend, l->weights->ctx, stored->matrix, part, stored->dtypes[part], &run, weight->cols,
                          dummy_key(l, p), err);
    }
    return rc;
}

/* Dummy rows of a tensor, of any type that dummies can have. */
struct dummy_source {
    uint64_t key, first, step;
    uint32_t dtype, cols;
};

static void make_dummies(const struct dummy_source *from, uint64_t row, float *floats, void *to)
{
    uint64_t row_key = dummy_row(from->key, (uint32_t)(from->first + row * from->step));
    if (from->dtype == DTYPE_MXFP4) {
        for (uint32_t i = 0; i < from->cols / 32; i++)
            dummy_mxfp4(row_key, i, (uint8_t *)to + i * 17);
        return;
    }
    for (uint32_t c = 0; c < from->cols; c++)
        floats[c] = dummy_value(row_key, c);
    if (quantise_has(from->dtype))
        quantise_row(from->dtype, floats, from->cols, to);
    else
        dtype_from_float(from->dtype, floats, to, from->cols);
}

static enum rc read_dummies(void *ctx, uint32_t first, uint32_t n_rows, void *to, struct err *err)
{
    const struct dummy_source *from = ctx;
    float *floats = mem_alloc(from->cols * sizeof *floats);
    if (!floats)
        return err_set(err, RC_MEMORY, "weights: out of memory");
    for (uint32_t i = 0; i < n_rows; i++)
        make_dummies(from, first + i, floats, (char *)to + i * dtype_row_bytes(from->dtype, from->cols));
    mem_free(floats);
    return RC_OK;
}

enum rc weights_fill(const struct backend *backend, void *ctx, struct matrix *matrix, uint32_t part, uint32_t dtype,
                     const struct row_run *rows, uint32_t cols, uint64_t key, struct err *err)
{
    struct dummy_source from = {key, rows->source_row, rows->step, dtype, cols};
    struct row_source source = {read_dummies, &from, true};
    if (backend->matrix_fill && !quantise_has(dtype))
        return backend->matrix_fill(ctx, matrix, part, rows, key, err);
    if (backend->matrix_load)
        return backend->matrix_load(ctx, matrix, part, rows->first_row, rows->n_rows, &source, err);
    uint32_t at_once = (uint32_t)(CHUNK_BYTES / dtype_row_bytes(dtype, cols)) + 1;
    void *made = mem_alloc(at_once * dtype_row_bytes(dtype, cols));
    enum rc rc = made ? RC_OK : err_set(err, RC_MEMORY, "weights: out of memory");
    for (uint32_t row = 0, n; row < rows->n_rows && !rc; row += n) {
        n = rows->n_rows - row < at_once ? rows->n_rows - row : at_once;
        rc = read_dummies(&from, row, n, made, err);
        rc = rc ? rc : backend->matrix_write(ctx, matrix, part, rows->first_row + row, n, made, err);
    }
    mem_free(made);
    return rc;
}

static bool is_of_experts(uint32_t code)
{
    return code == OP_EXPERTS || code == OP_EXPERTS_UP || code == OP_EXPERTS_DOWN;
}

static uint32_t uses_of(const struct program *p, uint32_t weight)
{
    uint32_t use = p->tower ? uses_of(p->tower, weight) : 0;
    for (uint32_t i = 0; i < p->n_ops; i++)
        for (uint32_t j = 0; j < OP_WEIGHTS; j++)
            if (p->ops[i].weight[j] == weight)
                use |= p->ops[i].code == OP_EMBED         ? MATRIX_EMBED
                       : is_of_experts(p->ops[i].code)    ? MATRIX_LINEAR | MATRIX_EXPERTS
                       : p->ops[i].code == OP_ROUTE       ? MATRIX_LINEAR | MATRIX_ROUTER
                       : p->ops[i].code == OP_LOGITS      ? MATRIX_LINEAR | MATRIX_LOGITS
                       : p->ops[i].code == OP_LINEAR      ? MATRIX_LINEAR
                                                          : MATRIX_LINEAR | MATRIX_ROWS;
    return use;
}

/* Of a weight of experts, those that this rank holds; 0: it is none. */
static uint32_t n_experts_of(const struct program *p, uint32_t weight)
{
    for (uint32_t i = 0; i < p->n_ops; i++) {
        const struct op *op = &p->ops[i];
        if (is_of_experts(op->code) && (op->weight[0] == weight || op->weight[1] == weight))
            return op->code == OP_EXPERTS_UP     ? op->experts_up.n_experts
                   : op->code == OP_EXPERTS_DOWN ? op->experts_down.n_experts
                   : op->experts.n_local         ? op->experts.n_local
                                                 : op->experts.n_experts;
    }
    return 0;
}

/* A router is small and its result decides which experts run, so it is computed in float without rounding its inputs. */
static uint32_t arithmetic_of(const struct program *p, uint32_t weight, uint32_t wanted)
{
    for (uint32_t i = 0; i < p->n_ops; i++)
        if (p->ops[i].code == OP_ROUTE && p->ops[i].weight[0] == weight)
            return ARITHMETIC_FLOAT;
    return wanted;
}

static enum rc create_matrix(struct loader *l, uint32_t w, struct err *err)
{
    const struct program *p = l->weights->program;
    const struct weight *weight = &p->weights[w];
    struct stored *stored = &l->weights->stored[w];
    struct matrix_part *parts = mem_calloc(weight->n_parts, sizeof *parts);
    if (!parts)
        return err_set(err, RC_MEMORY, "weights: out of memory");
    struct matrix_desc desc = {parts, weight->n_parts, weight->cols, uses_of(p, w),
                               arithmetic_of(p, w, l->options->arithmetic), n_experts_of(p, w)};
    enum rc rc = RC_OK;
    for (uint32_t i = 0; i < weight->n_parts && !rc; i++) {
        parts[i] = (struct matrix_part){weight->parts[i].rows, stored->dtypes[i]};
        if (!l->weights->backend->supports(l->weights->ctx, stored->dtypes[i], desc.use))
            rc = err_set(err, RC_UNSUPPORTED, "%s: type %s on %s; convert the checkpoint, or choose another device",
                         weight->parts[i].source, dtype_info(stored->dtypes[i])->name, l->weights->backend->name);
    }
    if (!rc)
        rc = l->weights->backend->matrix_create(l->weights->ctx, &desc, &stored->matrix, err);
    mem_free(parts);
    return rc;
}

static enum rc choose_types(struct loader *l, uint32_t w, struct err *err)
{
    const struct weight *weight = &l->weights->program->weights[w];
    for (uint32_t i = 0; i < weight->n_parts; i++) {
        const struct checkpoint_tensor *tensor = tensor_of(l, &weight->parts[i]);
        enum rc rc = l->options->is_dummy ? RC_OK : check_tensor(l, weight, &weight->parts[i], tensor, err);
        if (rc)
            return rc;
        uint32_t own = tensor ? tensor->dtype : DTYPE_F32;
        bool is_plain = is_float(own) || own == DTYPE_F64, converts = l->options->dtype != DTYPE_NONE && is_plain;
        if (weight->quantised && is_plain)
            l->weights->stored[w].dtypes[i] = weight->quantised;
        else if (!tensor && l->options->is_mxfp4 && uses_of(l->weights->program, w) & MATRIX_EXPERTS)
            l->weights->stored[w].dtypes[i] = DTYPE_MXFP4;
        else
            l->weights->stored[w].dtypes[i] = converts ? l->options->dtype : own == DTYPE_F64 ? DTYPE_F32 : own;
        l->all_bytes += part_bytes(weight, i, tensor);
    }
    return RC_OK;
}

static enum rc load_matrix(struct loader *l, uint32_t w, struct err *err)
{
    const struct weight *weight = &l->weights->program->weights[w];
    enum rc rc = create_matrix(l, w, err);
    for (uint32_t i = 0; i < weight->n_parts && !rc; i++) {
        const struct checkpoint_tensor *tensor = tensor_of(l, &weight->parts[i]);
        rc = tensor ? write_part(l, w, i, tensor, err) : fill_part(l, w, i, err);
        if (!rc)
            rc = progress(l, weight, i, tensor, err);
    }
    return rc;
}

static bool has_constants(const struct weight *weight)
{
    for (uint32_t i = 0; i < weight->n_parts; i++)
        if (weight->parts[i].is_constant)
            return true;
    return false;
}

/* Reads the values of a vector's part, or generates dummies, without the weight's offset. `items` has room for part->rows items
 * of any type. */
static enum rc read_values(const struct loader *l, const struct weight *weight, const struct weight_part *part, void *items,
                           float *to, struct err *err)
{
    const struct checkpoint_tensor *tensor = tensor_of(l, part);
    uint64_t row_key = dummy_row(dummy_key(l, part), 0);
    struct row_run run = {0};
    enum rc rc = RC_OK;
    for (uint32_t row = 0; row < part->rows && !rc; row += run.n_rows, to += run.n_rows) {
        run = layout_run(part, row, UINT64_MAX);
        if (tensor) {
            rc = checkpoint_items(l->checkpoint, tensor, dtype_info(tensor->dtype)->block_bytes, run.source_row, run.step,
                                  run.n_rows, items, err);
            if (!rc)
                dtype_to_float(tensor->dtype, items, to, run.n_rows);
            continue;
        }
        for (uint32_t j = 0; j < run.n_rows; j++)
            to[j] = (part->is_constant ? part->constant : 1 + dummy_value(row_key, (uint32_t)(run.source_row + j * run.step))) -
                    weight->offset;
    }
    return rc;
}

static enum rc load_vector(struct loader *l, uint32_t w, struct err *err)
{
    const struct weight *weight = &l->weights->program->weights[w];
    struct stored *stored = &l->weights->stored[w];
    float *host = mem_alloc((size_t)weight->rows * sizeof *host), *to = host;
    double *items = mem_alloc((size_t)weight->rows * sizeof *items);
    void *made = NULL;
    enum rc rc = host && items ? RC_OK : err_set(err, RC_MEMORY, "weights: out of memory");
    for (uint32_t i = 0; i < weight->n_parts && !rc; to += weight->parts[i++].rows)
        rc = read_values(l, weight, &weight->parts[i], items, to, err);
    mem_free(items);
    if (rc) {
        mem_free(host);
        return rc;
    }
    for (uint32_t i = 0; i < weight->rows; i++)
        host[i] = weight->values ? weight->values[i] : host[i] + weight->offset;
    const struct backend *backend = l->weights->backend;
    size_t size_bytes = weight->rows * sizeof *host;
    rc = backend->pool_create ? backend->pool_create(l->weights->ctx, MEMORY_WEIGHTS, size_bytes, &made, err)
                              : backend->buffer_create(l->weights->ctx, size_bytes, &made, err);
    stored->vector = made;
    if (!rc)
        rc = backend->upload(l->weights->ctx, stored->vector, host, size_bytes, err);
    l->weights->vector_bytes += size_bytes;
    if (has_constants(weight))
        stored->kept = host;
    else
        mem_free(host);
    return rc;
}

/* Uses a matrix of the lender, which outlives these weights. */
static enum rc borrow(struct loader *l, uint32_t w, struct err *err)
{
    const struct weight *weight = &l->weights->program->weights[w];
    const struct weights *lender = l->options->lender;
    const struct weight *lent = lender && weight->lent <= lender->program->n_weights
                                    ? &lender->program->weights[weight->lent - 1] : NULL;
    if (!lent || lent->kind != WEIGHT_MATRIX || lent->rows != weight->rows || lent->cols != weight->cols)
        return err_set(err, RC_INVALID, "weight %u: wanted a lender with a matrix of %u rows and %u columns, have none", w,
                       weight->rows, weight->cols);
    l->weights->stored[w].matrix = lender->stored[weight->lent - 1].matrix;
    l->weights->stored[w].dtypes[0] = lender->stored[weight->lent - 1].dtypes[0];
    return RC_OK;
}

static enum rc load_weight(struct loader *l, uint32_t w, struct err *err)
{
    const struct weight *weight = &l->weights->program->weights[w];
    if (weight->lent)
        return borrow(l, w, err);
    return weight->kind == WEIGHT_MATRIX ? load_matrix(l, w, err) : load_vector(l, w, err);
}

/* Fails before anything is allocated if the weights do not fit the device's free memory. */
static enum rc check_room(const struct loader *l, struct err *err)
{
    const struct program *p = l->weights->program;
    const struct backend *backend = l->weights->backend;
    struct backend_memory have;
    if (!backend->memory)
        return RC_OK;
    enum rc rc = backend->memory(l->weights->ctx, &have, err);
    uint64_t wanted = 0;
    for (uint32_t w = 0; w < p->n_weights; w++)
        for (uint32_t i = 0; i < p->weights[w].n_parts; i++)
            wanted += p->weights[w].parts[i].rows *
                      (uint64_t)dtype_row_bytes(l->weights->stored[w].dtypes[i], p->weights[w].cols);
    if (rc || wanted <= have.free_bytes)
        return rc;
    err_set(err, RC_DEVICE_MEMORY,
            "weights: wanted %llu bytes, have %llu free of %llu; choose a smaller or quantised checkpoint, or close() another "
            "engine",
            (unsigned long long)wanted, (unsigned long long)have.free_bytes, (unsigned long long)have.total_bytes);
    if (err) {
        err->code = (int64_t)wanted;
        err->free_bytes = (int64_t)have.free_bytes;
    }
    return RC_DEVICE_MEMORY;
}

static enum rc load_all(struct loader *l, struct err *err)
{
    const struct program *p = l->weights->program;
    uint32_t widest = 1;
    enum rc rc = RC_OK;
    for (uint32_t w = 0; w < p->n_weights && !rc; w++) {
        widest = p->weights[w].cols > widest ? p->weights[w].cols : widest;
        l->weights->stored[w].dtypes = mem_calloc(p->weights[w].n_parts + 1, sizeof(uint32_t));
        rc = l->weights->stored[w].dtypes ? choose_types(l, w, err) : err_set(err, RC_MEMORY, "weights: out of memory");
    }
    if (!rc)
        rc = check_room(l, err);
    if (rc)
        return rc;
    l->floats_bytes = (size_t)widest * 8 * PANEL_ROWS > CHUNK_BYTES ? (size_t)widest * 8 * PANEL_ROWS : CHUNK_BYTES;
    l->floats = mem_alloc(3 * l->floats_bytes);
    if (!l->floats)
        return err_set(err, RC_MEMORY, "weights: out of memory");
    l->converted = (char *)l->floats + l->floats_bytes;
    l->gathered = (char *)l->converted + l->floats_bytes;
    for (uint32_t w = 0; w < p->n_weights && !rc; w++)
        rc = load_weight(l, w, err);
    mem_free(l->floats);
    return rc;
}

enum rc weights_load(const struct program *program, const struct checkpoint *checkpoint, const struct weights_options *options,
                     const struct backend *backend, void *backend_ctx, struct weights **weights, struct err *err)
{
    struct weights *w = mem_calloc(1, sizeof *w);
    if (!w)
        return err_set(err, RC_MEMORY, "weights: out of memory");
    *w = (struct weights){program, backend, backend_ctx, mem_calloc(program->n_weights + 1, sizeof *w->stored), 0};
    struct loader loader = {.weights = w, .checkpoint = checkpoint, .options = options};
    enum rc rc = w->stored ? load_all(&loader, err) : err_set(err, RC_MEMORY, "weights: out of memory");
    if (rc)
        weights_destroy(w);
    else
        *weights = w;
    return rc;
}

void weights_destroy(struct weights *w)
{
    if (!w)
        return;
    for (uint32_t i = 0; w->stored && i < w->program->n_weights; i++) {
        if (w->stored[i].matrix && !w->program->weights[i].lent)
            w->backend->matrix_destroy(w->ctx, w->stored[i].matrix);
        if (w->stored[i].vector)
            w->backend->buffer_destroy(w->ctx, w->stored[i].vector, w->program->weights[i].rows * sizeof(float));
        mem_free(w->stored[i].kept);
        mem_free(w->stored[i].dtypes);
    }
    mem_free(w->stored);
    mem_free(w);
}

struct matrix *weights_matrix(const struct weights *w, uint32_t weight)
{
    return w->stored[weight].matrix;
}

const float *weights_vector(const struct weights *w, uint32_t weight)
{
    return weight == NO_INDEX ? NULL : w->stored[weight].vector;
}

float *weights_kept(const struct weights *w, uint32_t weight)
{
    return w->stored[weight].kept;
}

struct tensor_place weights_place(const struct weights *w, uint32_t weight, uint32_t part, const struct row_run *rows)
{
    const struct weight *of = &w->program->weights[weight];
    struct element_steps steps = layout_steps(of, &of->parts[part], rows);
    struct tensor_place place = {
        .matrix = w->stored[weight].matrix, .part = part, .vector = w->stored[weight].vector, .n_values = rows->n_rows,
        .offset = of->offset, .first_row = rows->first_row, .n_rows = rows->n_rows, .first_index = steps.first,
        .row_step = steps.row, .col_step = steps.col};
    for (uint32_t i = 0; place.vector && i < part; i++)
        place.vector += of->parts[i].rows;
    if (place.vector) { /* a vector is one row of elements */
        place.vector += rows->first_row;
        place.col_step = steps.row;
    }
    return place;
}

uint32_t weights_stored(const struct weights *w, uint32_t weight, uint32_t part)
{
    return w->stored[weight].dtypes[part];
}

size_t weights_bytes(const struct weights *w)
{
    size_t bytes = w->vector_bytes;
    for (uint32_t i = 0; i < w->program->n_weights; i++)
        bytes += w->stored[i].matrix ? w->backend->matrix_bytes(w->stored[i].matrix) : 0;
    return bytes;
}

size_t weights_tower_bytes(const struct weights *w)
{
    size_t bytes = 0;
    for (uint32_t i = 0; w->program->tower && i < w->program->n_weights; i++)
        if (w->stored[i].matrix && uses_of(w->program->tower, i))
            bytes += w->backend->matrix_bytes(w->stored[i].matrix);
    return bytes;
}
