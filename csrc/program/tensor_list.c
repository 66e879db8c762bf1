#include "tensor_list.h"

#include "../base/file.h"
#include "../base/json.h"
#include "../base/mem.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define READ_BYTES ((uint64_t)64 << 10) /* least number of header bytes read at once */

struct quoted quote(const char *bytes, size_t n_bytes)
{
    struct quoted result = {{0}};
    size_t n = n_bytes < 60 ? n_bytes : 57;
    for (size_t i = 0; i < n; i++)
        result.text[i] = bytes[i] >= ' ' && bytes[i] <= '~' ? bytes[i] : '?';
    if (n < n_bytes)
        memcpy(result.text + n, "...", 4);
    return result;
}

const char *shape_text(uint32_t n_dims, const uint64_t *shape, char *text, size_t n_bytes)
{
    size_t used = 0;
    for (uint32_t i = 0; i < n_dims && used < n_bytes; i++) {
        int n = snprintf(text + used, n_bytes - used, "%s%" PRIu64, i ? ", " : "[", shape[i]);
        used += n > 0 ? (size_t)n : 0;
    }
    if (used < n_bytes)
        snprintf(text + used, n_bytes - used, "%s", n_dims ? "]" : "[]");
    return text;
}

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

enum rc file_error(struct err *err, const struct file_view *file, const char *tensor, const char *format, ...)
{
    char text[320];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    const char *name = base_name(file->path);
    if (tensor)
        err_set(err, RC_CHECKPOINT, "%.80s: tensor %s: %s", name, quote(tensor, strlen(tensor)).text, text);
    else
        err_set(err, RC_CHECKPOINT, "%.80s: %s", name, text);
    err_name(err, file->path, tensor);
    return RC_CHECKPOINT;
}

enum rc file_view_need(struct file_view *file, uint64_t n_bytes, struct err *err)
{
    if (n_bytes <= file->n_bytes)
        return RC_OK;
    uint64_t most = n_bytes > 2 * file->n_bytes ? n_bytes : 2 * file->n_bytes;
    most = most < READ_BYTES ? READ_BYTES : most;
    most = most < file->size_bytes ? most : file->size_bytes;
    uint8_t *bytes = mem_resize(file->bytes, file->n_bytes, most);
    size_t n_read = 0;
    if (!bytes)
        return err_set(err, RC_MEMORY, "checkpoint: out of memory for %" PRIu64 " bytes of a header", most);
    file->bytes = bytes;
    int code = file_read(file->descriptor, file->n_bytes, bytes + file->n_bytes, most - file->n_bytes, &n_read);
    file->n_bytes += n_read;
    if (file->n_bytes >= n_bytes)
        return RC_OK;
    return file_error(err, file, NULL, "header: wanted %" PRIu64 " bytes, have %" PRIu64 "%s%s", n_bytes, file->n_bytes,
                      code ? ": " : "; the file was cut off while it was read", code ? strerror(code) : "");
}

void tensor_list_destroy(struct tensor_list *list)
{
    name_table_destroy(&list->names);
    for (uint32_t i = 0; i < list->n; i++) {
        mem_free(list->tensors[i].order);
        mem_free(list->tensors[i].nested);
    }
    mem_free(list->tensors);
    *list = (struct tensor_list){0};
}

static enum rc out_of_memory(struct err *err)
{
    return err_set(err, RC_MEMORY, "checkpoint: out of memory for the table of tensors");
}

static bool grow(struct tensor_list *list)
{
    if (list->n < list->capacity)
        return true;
    uint32_t capacity = list->capacity ? 2 * list->capacity : 64;
    if (capacity > UINT32_MAX / 4)
        return false;
    struct checkpoint_tensor *tensors =
        mem_resize(list->tensors, list->n * sizeof *tensors, (size_t)capacity * sizeof *tensors);
    if (!tensors)
        return false;
    list->tensors = tensors;
    list->capacity = capacity;
    return true;
}

enum rc tensor_list_add(struct tensor_list *list, const struct file_view *file, const char *name, size_t n_bytes,
                        struct checkpoint_tensor **tensor, struct err *err)
{
    struct quoted shown = quote(name, n_bytes);
    if (memchr(name, 0, n_bytes) || !utf8_valid(name, n_bytes))
        return file_error(err, file, shown.text, "name: wanted valid UTF-8 without NUL, have other bytes");
    uint32_t number;
    bool was_new;
    if (!grow(list) || !name_table_add(&list->names, name, n_bytes, &number, &was_new))
        return out_of_memory(err);
    if (!was_new) {
        uint32_t other = list->tensors[number].file;
        if (other == file->index)
            return file_error(err, file, shown.text, "name: wanted once, have it twice");
        return file_error(err, file, shown.text, "name: wanted in one file, have it in file %" PRIu32 " too", other + 1);
    }
    *tensor = &list->tensors[list->n++];
    memset(*tensor, 0, sizeof **tensor);
    (*tensor)->name = list->names.names[number];
    (*tensor)->file = file->index;
    return RC_OK;
}

bool tensor_size(uint32_t dtype, uint32_t n_dims, const uint64_t *shape, uint64_t *size_bytes)
{
    const struct dtype_info *info = dtype_info(dtype);
    uint64_t columns = n_dims ? shape[n_dims - 1] : 1, rows = 1, least;
    /* A dimension of 0 counts as 1 here, so that callers may multiply any subset of the dimensions without overflow. */
    bool empty = !columns;
    for (uint32_t i = 0; i + 1 < n_dims; i++) {
        empty = empty || !shape[i];
        if (__builtin_mul_overflow(rows, shape[i] ? shape[i] : 1, &rows))
            return false;
    }
    if (columns % info->block_values || __builtin_mul_overflow(rows, columns ? columns : 1, &least) ||
        __builtin_mul_overflow(rows, columns / info->block_values, size_bytes) ||
        __builtin_mul_overflow(*size_bytes, info->block_bytes, size_bytes))
        return false;
    if (empty)
        *size_bytes = 0;
    return true;
}

struct place {
    uint64_t begin, end;
    uint32_t number;
};

static int compare_places(const void *left, const void *right)
{
    const struct place *a = left, *b = right;
    if (a->begin != b->begin)
        return a->begin < b->begin ? -1 : 1;
    return (a->end > b->end) - (a->end < b->end);
}

static enum rc check_sorted(const struct tensor_list *list, const struct place *places, uint32_t n,
                            const struct file_view *file, uint64_t begin, uint64_t end, bool dense, struct err *err)
{
    uint64_t reached = begin;
    for (uint32_t i = 0; i < n; i++) {
        const char *name = list->tensors[places[i].number].name;
        if (places[i].begin < reached && places[i].end > places[i].begin) {
            const char *before = i ? list->tensors[places[i - 1].number].name : "header";
            return file_error(err, file, name, "data: wanted at byte %" PRIu64 " or later, behind %s, have byte %" PRIu64,
                              reached, quote(before, strlen(before)).text, places[i].begin);
        }
        if (dense && places[i].begin != reached)
            return file_error(err, file, name, "data: wanted at byte %" PRIu64 " without a hole, have byte %" PRIu64, reached,
                              places[i].begin);
        if (places[i].end > reached)
            reached = places[i].end;
    }
    if (dense && reached != end)
        return file_error(err, file, NULL, "size: wanted %" PRIu64 " bytes, have %" PRIu64, reached, end);
    return RC_OK;
}

enum rc tensor_list_check_places(const struct tensor_list *list, uint32_t first, const struct file_view *file, uint64_t begin,
                                 uint64_t end, bool dense, struct err *err)
{
    uint32_t n = list->n - first;
    struct place *places = mem_alloc(n * sizeof *places);
    if (!places)
        return out_of_memory(err);
    for (uint32_t i = 0; i < n; i++) {
        const struct checkpoint_tensor *tensor = &list->tensors[first + i];
        places[i] = (struct place){tensor->offset, tensor->offset + tensor->size_bytes, first + i};
    }
    qsort(places, n, sizeof *places, compare_places);
    enum rc rc = check_sorted(list, places, n, file, begin, end, dense, err);
    mem_free(places);
    return rc;
}
