#include "checkpoint.h"

#include "../base/file.h"
#include "../base/mem.h"
#include "companions.h"
#include "gguf.h"
#include "packed.h"
#include "safetensors.h"
#include "tables.h"

#include <inttypes.h>
#include <string.h>

#define SPAN_BYTES ((size_t)1 << 20) /* of items with gaps between them, read at once */
#define GAP_BYTES ((size_t)64 << 10) /* items further apart than this are read one by one */

struct checkpoint {
    struct file_view *files; /* [n_files] */
    uint32_t n_files;
    struct tensor_list list;
    struct gguf *gguf; /* of the first file; NULL: safetensors */
};

static enum rc io_error(struct err *err, const char *path, int code)
{
    err_set(err, RC_IO, "%s", strerror(code));
    err_name(err, path, NULL);
    err->code = code;
    return RC_IO;
}

static enum rc view_file(const char *path, uint32_t index, struct file_view *file, struct err *err)
{
    *file = (struct file_view){.path = path, .index = index};
    int code = file_open(path, &file->descriptor, &file->size_bytes);
    return code ? io_error(err, path, code) : RC_OK;
}

/* Reads one of n_parts GGUF files. The key-values of the first are the model's. */
static enum rc read_part(struct checkpoint *checkpoint, struct file_view *file, uint32_t n_parts, struct err *err)
{
    struct gguf *part = NULL;
    enum rc rc = gguf_read(&checkpoint->list, file, n_parts, &part, err);
    if (file->index)
        gguf_destroy(part);
    else
        checkpoint->gguf = part;
    return rc || file->index + 1 < n_parts ? rc : gguf_check_total(checkpoint->gguf, &checkpoint->list, err);
}

static enum rc read_file(struct checkpoint *checkpoint, struct file_view *file, uint32_t n_paths, struct err *err)
{
    uint32_t n_magic = file->size_bytes < 4 ? 0 : 4;
    enum rc rc = file_view_need(file, n_magic, err);
    if (rc != RC_OK)
        return rc;
    bool is_gguf = n_magic && memcmp(file->bytes, "GGUF", n_magic) == 0;
    if (file->index && is_gguf != (checkpoint->gguf != NULL))
        return file_error(err, file, NULL, "wanted files of one format, have safetensors and GGUF");
    return is_gguf ? read_part(checkpoint, file, n_paths, err) : safetensors_read(&checkpoint->list, file, err);
}

static enum rc open_file(struct checkpoint *checkpoint, const char *path, uint32_t n_paths, struct err *err)
{
    struct file_view *file = &checkpoint->files[checkpoint->n_files];
    const char *copy = name_table_copy(&checkpoint->list.names, path, strlen(path));
    if (!copy)
        return err_set(err, RC_MEMORY, "checkpoint: out of memory");
    enum rc rc = view_file(copy, checkpoint->n_files, file, err);
    if (rc != RC_OK)
        return rc;
    checkpoint->n_files++;
    return read_file(checkpoint, file, n_paths, err);
}

/* ---- reading ---------------------------------------------------------------------------------------------------------- */

/* Where the bytes of a tensor begin. tensor: its name, for messages. */
struct source {
    const struct file_view *file;
    uint64_t offset;
    const char *tensor;
};

static struct source source_of(const struct checkpoint *checkpoint, const struct checkpoint_tensor *tensor)
{
    return (struct source){&checkpoint->files[tensor->file], tensor->offset, tensor->name};
}

/* The error for a file that has become shorter than `wanted` bytes. */
static enum rc cut_off(const struct source *source, uint64_t wanted, struct err *err)
{
    uint64_t have;
    int code = file_size(source->file->descriptor, &have);
    if (code)
        return io_error(err, source->file->path, code);
    return file_error(err, source->file, source->tensor,
                      "data: wanted a file of %" PRIu64 " bytes, have %" PRIu64 "; it was cut off while it was read",
                      wanted, have);
}

static enum rc read_bytes(const struct source *source, uint64_t first, size_t n_bytes, void *to, struct err *err)
{
    size_t n_read;
    uint64_t offset = source->offset + first;
    int code = file_read(source->file->descriptor, offset, to, n_bytes, &n_read);
    if (code)
        return io_error(err, source->file->path, code);
    return n_read == n_bytes ? RC_OK : cut_off(source, offset + n_bytes, err);
}

static enum rc read_apart(const struct source *source, size_t item_bytes, uint64_t first, uint64_t step, uint64_t n_items,
                          char *to, struct err *err)
{
    size_t pitch = item_bytes * step;
    uint64_t at_once = pitch > GAP_BYTES ? 1 : (SPAN_BYTES - item_bytes) / pitch + 1;
    char *span = at_once == 1 ? NULL : mem_alloc(SPAN_BYTES);
    enum rc rc = span || at_once == 1 ? RC_OK : err_set(err, RC_MEMORY, "checkpoint: out of memory");
    for (uint64_t i = 0, n; i < n_items && !rc; i += n) {
        n = n_items - i < at_once ? n_items - i : at_once;
        rc = read_bytes(source, (first + i * step) * item_bytes, (n - 1) * pitch + item_bytes,
                        span ? span : to + i * item_bytes, err);
        for (uint64_t j = 0; span && j < n && !rc; j++)
            memcpy(to + (i + j) * item_bytes, span + j * pitch, item_bytes);
    }
    mem_free(span);
    return rc;
}

static enum rc read_items(const struct source *source, size_t item_bytes, uint64_t first, uint64_t step, uint64_t n_items,
                          void *to, struct err *err)
{
    if (step == 1 || n_items < 2)
        return read_bytes(source, first * item_bytes, n_items * item_bytes, to, err);
    return read_apart(source, item_bytes, first, step, n_items, to, err);
}

enum rc checkpoint_read(const struct checkpoint *checkpoint, const struct checkpoint_tensor *tensor, uint64_t first,
                        size_t n_bytes, void *to, struct err *err)
{
    struct source source = source_of(checkpoint, tensor);
    return read_bytes(&source, first, n_bytes, to, err);
}

enum rc checkpoint_items(const struct checkpoint *checkpoint, const struct checkpoint_tensor *tensor, size_t item_bytes,
                         uint64_t first, uint64_t step, uint64_t n_items, void *to, struct err *err)
{
    struct source source = source_of(checkpoint, tensor);
    return read_items(&source, item_bytes, first, step, n_items, to, err);
}

/* Reads the scales of rows first, first + step, ... to [n_rows][row_bytes]; adjacent rows may share a row of scales. */
static enum rc read_scales(const struct checkpoint *checkpoint, const struct checkpoint_tensor *tensor, size_t row_bytes,
                           uint64_t first, uint64_t step, uint64_t n_rows, uint8_t *to, struct err *err)
{
    const struct checkpoint_scales *scales = &tensor->scales;
    struct source source = {&checkpoint->files[scales->file], scales->offset, scales->name};
    if (scales->rows_each == 1)
        return read_items(&source, row_bytes, first, step, n_rows, to, err);
    enum rc rc = RC_OK;
    uint64_t last = UINT64_MAX;
    for (uint64_t i = 0; i < n_rows && !rc; i++, to += row_bytes) {
        uint64_t row = (first + i * step) / scales->rows_each;
        if (row == last)
            memcpy(to, to - row_bytes, row_bytes);
        else
            rc = read_bytes(&source, row * row_bytes, row_bytes, to, err);
        last = row;
    }
    return rc;
}

/* The error for a row whose values have no meaning. */
static enum rc bad_row(const struct checkpoint *checkpoint, const struct checkpoint_tensor *tensor, enum companion_fault fault,
                       uint64_t row, struct err *err)
{
    if (fault == COMPANION_BAD_SCALE)
        return file_error(err, &checkpoint->files[tensor->scales.file], tensor->scales.name,
                          "row %" PRIu64 ": wanted finite scales below 2^118", row / tensor->scales.rows_each);
    return file_error(err, &checkpoint->files[tensor->file], tensor->name, "row %" PRIu64 ": wanted numbers, have a NaN", row);
}

static enum rc read_scaled(const struct checkpoint *checkpoint, const struct checkpoint_tensor *tensor, uint64_t first,
                           uint64_t step, uint64_t n_rows, uint8_t *rows, struct err *err)
{
    uint64_t cols = tensor->shape[tensor->n_dims - 1];
    size_t stored = companion_row_bytes(tensor->companion, cols), row_bytes = dtype_row_bytes(tensor->dtype, cols);
    size_t scale_bytes = tensor->scales.cols * dtype_info(tensor->scales.dtype)->block_bytes;
    uint64_t at_once = stored + scale_bytes < SPAN_BYTES ? SPAN_BYTES / (stored + scale_bytes) : 1;
    at_once = at_once < n_rows ? at_once : n_rows;
    struct source source = source_of(checkpoint, tensor);
    uint8_t *both = mem_alloc(at_once * (stored + scale_bytes)), *scales = both + at_once * stored;
    enum rc rc = both ? RC_OK : err_set(err, RC_MEMORY, "checkpoint: out of memory");
    for (uint64_t i = 0, n; i < n_rows && !rc; i += n) {
        n = n_rows - i < at_once ? n_rows - i : at_once;
        rc = read_items(&source, stored, first + i * step, step, n, both, err);
        if (!rc)
            rc = read_scales(checkpoint, tensor, scale_bytes, first + i * step, step, n, scales, err);
        for (uint64_t j = 0; j < n && !rc; j++) {
            uint64_t row = first + (i + j) * step;
            enum companion_fault fault = companion_join(tensor, row, scales + j * scale_bytes, both + j * stored,
                                                        rows + (i + j) * row_bytes);
            rc = fault ? bad_row(checkpoint, tensor, fault, row, err) : RC_OK;
        }
    }
    mem_free(both);
    return rc;
}

bool checkpoint_joins_columns(const struct checkpoint_tensor *tensor)
{
    const struct checkpoint_scales *scales = &tensor->scales;
    bool is_bytes = tensor->companion && tensor->n_dims == 3 && companion_row_bytes(tensor->companion, 1) == 1;
    bool is_of_matrices = scales->cols == 1 && (scales->rows_each == UINT64_MAX || scales->rows_each == tensor->shape[1]);
    bool is_square = scales->rows_each == 1 && tensor->shape[1] == tensor->shape[2]; /* rows or columns: a scale for each */
    return is_bytes && (scales->by_columns || is_of_matrices || is_square);
}

enum rc checkpoint_join_columns(const struct checkpoint *checkpoint, const struct checkpoint_tensor *tensor, uint64_t first,
                                uint64_t step, uint64_t n_rows, const uint8_t *numbers, uint8_t *rows, struct err *err)
{
    struct checkpoint_tensor turned = *tensor;
    size_t scale_bytes = dtype_info(tensor->scales.dtype)->block_bytes;
    turned.n_dims = 2;
    turned.shape[1] = tensor->shape[1];
    if (tensor->scales.rows_each == tensor->shape[1] && !tensor->scales.by_columns)
        turned.scales.rows_each = tensor->shape[2];
    uint8_t *scales = mem_alloc(n_rows * scale_bytes);
    enum rc rc = scales ? RC_OK : err_set(err, RC_MEMORY, "checkpoint: out of memory");
    rc = rc ? rc : read_scales(checkpoint, &turned, scale_bytes, first, step, n_rows, scales, err);
    for (uint64_t i = 0; i < n_rows && !rc; i++) {
        uint64_t row = first + i * step;
        enum companion_fault fault = companion_join(&turned, row, scales + i * scale_bytes, numbers + i * turned.shape[1],
                                                    rows + i * dtype_row_bytes(tensor->dtype, turned.shape[1]));
        rc = fault ? bad_row(checkpoint, &turned, fault, row, err) : RC_OK;
    }
    mem_free(scales);
    return rc;
}

enum rc checkpoint_rows(const struct checkpoint *checkpoint, const struct checkpoint_tensor *tensor, uint64_t first,
                        uint64_t step, uint64_t n_rows, void *rows, struct err *err)
{
    size_t row_bytes = dtype_row_bytes(tensor->dtype, tensor->shape[tensor->n_dims - 1]);
    if (!row_bytes || !n_rows)
        return RC_OK;
    if (tensor->packing)
        return packed_rows(checkpoint, tensor, first, step, n_rows, rows, err);
    if (tensor->companion && tensor->scales.by_columns)
        return file_error(err, &checkpoint->files[tensor->scales.file], tensor->scales.name,
                          "wanted a scale for each row of its weight, have one for each column");
    if (tensor->companion)
        return read_scaled(checkpoint, tensor, first, step, n_rows, rows, err);
    return checkpoint_items(checkpoint, tensor, row_bytes, first, step, n_rows, rows, err);
}

uint64_t checkpoint_bytes(const struct checkpoint_tensor *tensor)
{
    if (tensor->packing)
        return tensor->shape[0] * dtype_row_bytes(tensor->dtype, tensor->shape[1]);
    if (!tensor->companion)
        return tensor->size_bytes;
    uint64_t cols = tensor->shape[tensor->n_dims - 1], row_bytes = companion_row_bytes(tensor->companion, cols);
    return row_bytes ? tensor->size_bytes / row_bytes * dtype_row_bytes(tensor->dtype, cols) : 0;
}

enum rc checkpoint_has(const struct checkpoint *checkpoint, const struct checkpoint_tensor *tensor, struct err *err)
{
    struct source source = source_of(checkpoint, tensor);
    uint64_t size_bytes, wanted = tensor->offset + tensor->size_bytes;
    int code = file_size(source.file->descriptor, &size_bytes);
    if (code)
        return io_error(err, source.file->path, code);
    return size_bytes >= wanted ? RC_OK : cut_off(&source, wanted, err);
}

/* ---- opening ---------------------------------------------------------------------------------------------------------- */

enum rc checkpoint_open(const char *const *paths, uint32_t n_paths, struct checkpoint **result, struct err *err)
{
    enum rc rc = RC_OK;
    *result = NULL;
    if (!n_paths)
        return err_set(err, RC_CHECKPOINT, "checkpoint: wanted at least one file, have none");
    struct checkpoint *checkpoint = mem_calloc(1, sizeof *checkpoint);
    if (checkpoint)
        checkpoint->files = mem_calloc(n_paths, sizeof *checkpoint->files);
    if (!checkpoint || !checkpoint->files)
        rc = err_set(err, RC_MEMORY, "checkpoint: out of memory");
    for (uint32_t i = 0; rc == RC_OK && i < n_paths; i++)
        rc = open_file(checkpoint, paths[i], n_paths, err);
    if (rc == RC_OK)
        rc = companions_pair(&checkpoint->list, checkpoint->files, err);
    if (rc == RC_OK)
        rc = tables_pair(&checkpoint->list, checkpoint->files, err);
    if (rc == RC_OK)
        *result = checkpoint;
    else
        checkpoint_close(checkpoint);
    return rc;
}

enum rc checkpoint_join(struct checkpoint *checkpoint, const char *scheme, struct err *err)
{
    return packed_pair(&checkpoint->list, checkpoint->files, scheme, err);
}

void checkpoint_close(struct checkpoint *checkpoint)
{
    if (!checkpoint)
        return;
    for (uint32_t i = 0; i < checkpoint->n_files; i++) {
        file_close(checkpoint->files[i].descriptor);
        mem_free(checkpoint->files[i].bytes);
    }
    gguf_destroy(checkpoint->gguf);
    tensor_list_destroy(&checkpoint->list);
    mem_free(checkpoint->files);
    mem_free(checkpoint);
}

int checkpoint_is_gguf(const struct checkpoint *checkpoint)
{
    return checkpoint->gguf != NULL;
}

const struct gguf *checkpoint_gguf(const struct checkpoint *checkpoint)
{
    return checkpoint->gguf;
}

const char *checkpoint_path(const struct checkpoint *checkpoint, uint32_t file)
{
    return checkpoint->files[file].path;
}

uint32_t checkpoint_n_tensors(const struct checkpoint *checkpoint)
{
    return checkpoint->list.n;
}

const struct checkpoint_tensor *checkpoint_tensor(const struct checkpoint *checkpoint, uint32_t index)
{
    return &checkpoint->list.tensors[index];
}

const struct checkpoint_tensor *checkpoint_find(const struct checkpoint *checkpoint, const char *name)
{
    uint32_t index = name_table_find(&checkpoint->list.names, name, strlen(name));
    return index == NAME_ABSENT ? NULL : &checkpoint->list.tensors[index];
}

enum rc checkpoint_need(const struct checkpoint *checkpoint, const char *name, const struct checkpoint_tensor **tensor,
                        struct err *err)
{
    struct quoted shown = quote(name, strlen(name));
    *tensor = checkpoint_find(checkpoint, name);
    if (!*tensor) {
        err_set(err, RC_CHECKPOINT, "tensor %s: wanted in the checkpoint, have %u tensors without it", shown.text,
                checkpoint->list.n);
        err_name(err, checkpoint->files[0].path, name);
        return RC_CHECKPOINT;
    }
    if ((*tensor)->dtype == DTYPE_NONE)
        return err_set(err, RC_UNSUPPORTED, "tensor %s: wanted a type that this build reads, have %s", shown.text,
                       (*tensor)->type);
    return RC_OK;
}
