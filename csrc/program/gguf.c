#include "gguf.h"

#include "../base/json.h"
#include "../base/mem.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define MAX_NESTING 4
#define MAX_TENSOR_DIMS 4
#define LEAST_KEY_BYTES 13    /* an empty key, its type and one byte of value */
#define LEAST_TENSOR_BYTES 24 /* an empty name, no dimension, type, offset */
#define DEFAULT_ALIGNMENT 32
#define MAX_HEADER_BYTES ((uint64_t)1 << 30)

static const uint8_t TYPE_BYTES[GGUF_TYPE_COUNT] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

static const char *const TENSOR_TYPES[] = {
    "F32",        "F16",        "Q4_0",       "Q4_1",  "Q4_2",     "Q4_3",     "Q5_0",     "Q5_1",    "Q8_0",
    "Q8_1",       "Q2_K",       "Q3_K",       "Q4_K",  "Q5_K",     "Q6_K",     "Q8_K",     "IQ2_XXS", "IQ2_XS",
    "IQ3_XXS",    "IQ1_S",      "IQ4_NL",     "IQ3_S", "IQ2_S",    "IQ4_XS",   "I8",       "I16",     "I32",
    "I64",        "F64",        "IQ1_M",      "BF16",  "Q4_0_4_4", "Q4_0_4_8", "Q4_0_8_8", "TQ1_0",   "TQ2_0",
    "IQ4_NL_4_4", "IQ4_NL_4_8", "IQ4_NL_8_8", "MXFP4", "NVFP4",    "Q1_0",
};

struct value_place {
    uint32_t type;
    uint64_t offset;
};

struct gguf {
    const struct file_view *file;
    struct name_table keys;
    struct value_place *values; /* [capacity], numbered as in keys */
    uint32_t n, capacity;
};

struct reader {
    struct tensor_list *list;
    struct file_view *file;
    struct gguf *gguf;
    uint64_t at;      /* offset in the file */
    const char *item; /* what is being read, for messages */
    struct err *err;
};

uint32_t gguf_type_bytes(uint32_t type)
{
    return type < GGUF_TYPE_COUNT ? TYPE_BYTES[type] : 0;
}

uint32_t gguf_load_u32(const uint8_t *at)
{
    return at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

uint64_t gguf_load_u64(const uint8_t *at)
{
    return gguf_load_u32(at) | (uint64_t)gguf_load_u32(at + 4) << 32;
}

uint32_t gguf_n_keys(const struct gguf *gguf)
{
    return gguf->n;
}

const char *gguf_key(const struct gguf *gguf, uint32_t index)
{
    return gguf->keys.names[index];
}

struct gguf_value gguf_value(const struct gguf *gguf, uint32_t index)
{
    return (struct gguf_value){gguf->values[index].type, gguf->file->bytes + gguf->values[index].offset};
}

bool gguf_find(const struct gguf *gguf, const char *key, struct gguf_value *value)
{
    uint32_t index = name_table_find(&gguf->keys, key, strlen(key));
    if (index == NAME_ABSENT)
        return false;
    *value = gguf_value(gguf, index);
    return true;
}

void gguf_destroy(struct gguf *gguf)
{
    if (!gguf)
        return;
    name_table_destroy(&gguf->keys);
    mem_free(gguf->values);
    mem_free(gguf);
}

static enum rc out_of_memory(struct err *err)
{
    return err_set(err, RC_MEMORY, "checkpoint: out of memory for the key-values");
}

/* ---- bytes ---- */

static uint64_t left(const struct reader *reader)
{
    return reader->file->size_bytes - reader->at;
}

/* Advances by n_bytes. *bytes: where they begin; valid until the next call. */
static enum rc take(struct reader *reader, uint64_t n_bytes, const uint8_t **bytes)
{
    if (n_bytes > left(reader)) {
        file_error(reader->err, reader->file, NULL,
                   "%s: wanted %" PRIu64 " more bytes, have %" PRIu64 "; the file is cut off or torn", reader->item, n_bytes,
                   left(reader));
        return RC_CHECKPOINT;
    }
    if (n_bytes > MAX_HEADER_BYTES - reader->at) {
        file_error(reader->err, reader->file, NULL, "%s: wanted a header of at most %" PRIu64 " bytes, have more", reader->item,
                   MAX_HEADER_BYTES);
        return RC_CHECKPOINT;
    }
    enum rc rc = file_view_need(reader->file, reader->at + n_bytes, reader->err);
    if (rc != RC_OK)
        return rc;
    *bytes = reader->file->bytes + reader->at;
    reader->at += n_bytes;
    return RC_OK;
}

static enum rc take_u32(struct reader *reader, uint32_t *value)
{
    const uint8_t *bytes;
    enum rc rc = take(reader, 4, &bytes);
    if (rc == RC_OK)
        *value = gguf_load_u32(bytes);
    return rc;
}

static enum rc take_u64(struct reader *reader, uint64_t *value)
{
    const uint8_t *bytes;
    enum rc rc = take(reader, 8, &bytes);
    if (rc == RC_OK)
        *value = gguf_load_u64(bytes);
    return rc;
}

static enum rc take_string(struct reader *reader, const char **text, uint64_t *n_bytes)
{
    const uint8_t *bytes;
    enum rc rc = take_u64(reader, n_bytes);
    if (rc == RC_OK)
        rc = take(reader, *n_bytes, &bytes);
    if (rc == RC_OK)
        *text = (const char *)bytes;
    return rc;
}

/* ---- key-values ---- */

static enum rc check_bools(const struct reader *reader, const uint8_t *bytes, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        if (bytes[i] > 1)
            return file_error(reader->err, reader->file, NULL, "%s: wanted a bool of 0 or 1, have %d", reader->item, bytes[i]);
    return RC_OK;
}

/* Advances over `count` values of one type. Each value has at least one byte, so the size of the file bounds the loops. */
static enum rc skip_values(struct reader *reader, uint32_t type, uint64_t count, uint32_t depth)
{
    const uint8_t *bytes;
    const char *text;
    uint64_t n, total;
    uint32_t inner;
    enum rc rc = RC_OK;
    if (type >= GGUF_TYPE_COUNT)
        return file_error(reader->err, reader->file, NULL, "%s: wanted a type below %d, have %" PRIu32, reader->item,
                          GGUF_TYPE_COUNT, type);
    if (TYPE_BYTES[type]) {
        if (__builtin_mul_overflow(count, TYPE_BYTES[type], &total))
            total = UINT64_MAX;
        rc = take(reader, total, &bytes);
        return rc == RC_OK && type == GGUF_BOOL ? check_bools(reader, bytes, count) : rc;
    }
    if (type == GGUF_ARRAY && depth == MAX_NESTING)
        return file_error(reader->err, reader->file, NULL, "%s: wanted at most %d nested arrays, have more", reader->item,
                          MAX_NESTING);
    for (uint64_t i = 0; i < count && rc == RC_OK; i++) {
        if (type == GGUF_STRING) {
            rc = take_string(reader, &text, &n);
            continue;
        }
        rc = take_u32(reader, &inner);
        if (rc == RC_OK)
            rc = take_u64(reader, &n);
        if (rc == RC_OK)
            rc = skip_values(reader, inner, n, depth + 1);
    }
    return rc;
}

static bool grow(struct gguf *gguf)
{
    if (gguf->n < gguf->capacity)
        return true;
    uint32_t capacity = gguf->capacity ? 2 * gguf->capacity : 64;
    if (capacity > UINT32_MAX / 4)
        return false;
    struct value_place *values = mem_resize(gguf->values, gguf->n * sizeof *values, (size_t)capacity * sizeof *values);
    if (!values)
        return false;
    gguf->values = values;
    gguf->capacity = capacity;
    return true;
}

static enum rc read_key_value(struct reader *reader)
{
    const char *key;
    uint64_t n_bytes;
    uint32_t type, number;
    bool was_new;
    reader->item = "key-values";
    enum rc rc = take_string(reader, &key, &n_bytes);
    if (rc != RC_OK)
        return rc;
    struct quoted shown = quote(key, n_bytes);
    if (memchr(key, 0, n_bytes) || !utf8_valid(key, n_bytes))
        return file_error(reader->err, reader->file, NULL, "key %s: wanted valid UTF-8 without NUL, have other bytes",
                          shown.text);
    if (!grow(reader->gguf) || !name_table_add(&reader->gguf->keys, key, n_bytes, &number, &was_new))
        return out_of_memory(reader->err);
    if (!was_new)
        return file_error(reader->err, reader->file, NULL, "key %s: wanted once, have it twice", shown.text);
    reader->item = shown.text;
    rc = take_u32(reader, &type);
    if (rc != RC_OK)
        return rc;
    reader->gguf->values[reader->gguf->n++] = (struct value_place){type, reader->at};
    rc = skip_values(reader, type, 1, 0);
    reader->item = "key-values";
    return rc;
}

/* Reads a number under a key. RC_CHECKPOINT if its type is not `type`; *value is unchanged if the key is absent. */
static enum rc find_number(const struct gguf *gguf, const char *key, uint32_t type, uint32_t *value, struct err *err)
{
    struct gguf_value found;
    if (!gguf_find(gguf, key, &found))
        return RC_OK;
    if (found.type != type)
        return file_error(err, gguf->file, NULL, "%s: wanted type %" PRIu32 ", have type %" PRIu32, key, type, found.type);
    *value = type == GGUF_U16 ? (uint32_t)(found.at[0] | found.at[1] << 8) : gguf_load_u32(found.at);
    return RC_OK;
}

/* ---- tensors ---- */

static enum rc name_type(struct reader *reader, struct checkpoint_tensor *tensor, uint32_t type)
{
    tensor->dtype = type < DTYPE_COUNT && dtype_info(type) ? type : DTYPE_NONE;
    if (type < sizeof TENSOR_TYPES / sizeof *TENSOR_TYPES) {
        tensor->type = TENSOR_TYPES[type];
        return RC_OK;
    }
    char text[32];
    int n = snprintf(text, sizeof text, "type %" PRIu32, type);
    tensor->type = name_table_copy(&reader->list->names, text, (size_t)n);
    return tensor->type ? RC_OK : out_of_memory(reader->err);
}

static enum rc read_shape(struct reader *reader, struct checkpoint_tensor *tensor)
{
    enum rc rc = take_u32(reader, &tensor->n_dims);
    if (rc == RC_OK && tensor->n_dims > MAX_TENSOR_DIMS)
        return file_error(reader->err, reader->file, tensor->name, "shape: wanted at most %d dimensions, have %" PRIu32,
                          MAX_TENSOR_DIMS, tensor->n_dims);
    for (uint32_t i = 0; rc == RC_OK && i < tensor->n_dims; i++)
        rc = take_u64(reader, &tensor->shape[tensor->n_dims - 1 - i]);
    return rc;
}

/* Stores the tensor's relative offset in size_bytes for now, since the start of the data is known only after the last info. */
static enum rc read_tensor(struct reader *reader)
{
    const char *name;
    uint64_t n_bytes;
    uint32_t type;
    struct checkpoint_tensor *tensor;
    reader->item = "tensor infos";
    enum rc rc = take_string(reader, &name, &n_bytes);
    if (rc == RC_OK)
        rc = tensor_list_add(reader->list, reader->file, name, n_bytes, &tensor, reader->err);
    if (rc == RC_OK)
        rc = read_shape(reader, tensor);
    if (rc == RC_OK)
        rc = take_u32(reader, &type);
    if (rc == RC_OK)
        rc = name_type(reader, tensor, type);
    if (rc == RC_OK)
        rc = take_u64(reader, &tensor->size_bytes);
    return rc;
}

/* Sets the tensor's offset and size from the relative offset that read_tensor stored. */
static enum rc place_tensor(const struct reader *reader, struct checkpoint_tensor *tensor, uint32_t alignment)
{
    char shape[128];
    uint64_t offset = tensor->size_bytes, size_bytes = 0, data_bytes = left(reader);
    shape_text(tensor->n_dims, tensor->shape, shape, sizeof shape);
    if (tensor->dtype != DTYPE_NONE && !tensor_size(tensor->dtype, tensor->n_dims, tensor->shape, &size_bytes))
        return file_error(reader->err, reader->file, tensor->name,
                          "shape: wanted rows of whole blocks of %" PRIu32 " and a size below 2^64 bytes for %s, have %s",
                          dtype_info(tensor->dtype)->block_values, tensor->type, shape);
    if (offset % alignment)
        return file_error(reader->err, reader->file, tensor->name, "offset: wanted a multiple of %" PRIu32 ", have %" PRIu64,
                          alignment, offset);
    if (offset > data_bytes || size_bytes > data_bytes - offset)
        return file_error(reader->err, reader->file, tensor->name,
                          "data: wanted %" PRIu64 " bytes for %s %s at offset %" PRIu64 ", have %" PRIu64
                          " in all; the file is cut off or torn",
                          size_bytes, tensor->type, shape, offset, data_bytes);
    tensor->offset = reader->at + offset;
    tensor->size_bytes = size_bytes;
    return RC_OK;
}

static enum rc place_tensors(struct reader *reader, uint32_t first)
{
    uint32_t alignment = DEFAULT_ALIGNMENT, n = reader->list->n;
    enum rc rc = find_number(reader->gguf, "general.alignment", GGUF_U32, &alignment, reader->err);
    if (rc != RC_OK)
        return rc;
    if (!alignment || alignment & (alignment - 1))
        return file_error(reader->err, reader->file, NULL, "general.alignment: wanted a power of two, have %" PRIu32,
                          alignment);
    if (first == n)
        return RC_OK;
    uint64_t header_bytes = reader->at, padding = -header_bytes & (alignment - 1);
    if (padding > left(reader))
        return file_error(reader->err, reader->file, reader->list->tensors[first].name,
                          "data: wanted to start at byte %" PRIu64 ", have %" PRIu64 " bytes; the file is cut off",
                          header_bytes + padding, reader->file->size_bytes);
    reader->at += padding;
    for (uint32_t i = first; i < n; i++) {
        rc = place_tensor(reader, &reader->list->tensors[i], alignment);
        if (rc != RC_OK)
            return rc;
    }
    return tensor_list_check_places(reader->list, first, reader->file, reader->at, reader->file->size_bytes, false,
                                    reader->err);
}

/* ---- the file ---- */

static enum rc check_version(struct reader *reader)
{
    uint32_t magic, version;
    enum rc rc = take_u32(reader, &magic);
    if (rc == RC_OK)
        rc = take_u32(reader, &version);
    if (rc != RC_OK || version == 2 || version == 3)
        return rc;
    if (version == 2u << 24 || version == 3u << 24)
        err_set(reader->err, RC_UNSUPPORTED, "GGUF: wanted a little-endian file, have a big-endian one: %s",
                reader->file->path);
    else
        err_set(reader->err, RC_UNSUPPORTED, "GGUF: wanted version 2 or 3, have version %" PRIu32 ": %s", version,
                reader->file->path);
    return RC_UNSUPPORTED;
}

static enum rc read_counts(struct reader *reader, uint64_t *n_tensors, uint64_t *n_keys)
{
    enum rc rc = take_u64(reader, n_tensors);
    if (rc == RC_OK)
        rc = take_u64(reader, n_keys);
    if (rc != RC_OK)
        return rc;
    if (*n_keys > left(reader) / LEAST_KEY_BYTES || *n_tensors > left(reader) / LEAST_TENSOR_BYTES)
        return file_error(reader->err, reader->file, NULL,
                          "header: wanted counts that fit in %" PRIu64 " bytes, have %" PRIu64 " keys and %" PRIu64 " tensors",
                          left(reader), *n_keys, *n_tensors);
    return RC_OK;
}

/* Checks that the file is the part that its place among the n_parts files says. */
static enum rc check_part(const struct reader *reader, uint32_t n_parts)
{
    uint32_t number = 0, count = 1;
    enum rc rc = find_number(reader->gguf, "split.no", GGUF_U16, &number, reader->err);
    if (rc == RC_OK)
        rc = find_number(reader->gguf, "split.count", GGUF_U16, &count, reader->err);
    count = count ? count : 1;
    if (rc != RC_OK || (count == n_parts && number == reader->file->index))
        return rc;
    return file_error(reader->err, reader->file, NULL,
                      "split.no, split.count: wanted part %" PRIu32 " of %" PRIu32 ", have part %" PRIu32 " of %" PRIu32
                      "; give all parts of one model", reader->file->index + 1, n_parts, number + 1, count);
}

static enum rc read_file(struct reader *reader, uint32_t n_parts)
{
    uint64_t n_tensors, n_keys;
    uint32_t first = reader->list->n;
    enum rc rc = check_version(reader);
    if (rc == RC_OK)
        rc = read_counts(reader, &n_tensors, &n_keys);
    for (uint64_t i = 0; rc == RC_OK && i < n_keys; i++)
        rc = read_key_value(reader);
    if (rc == RC_OK)
        rc = check_part(reader, n_parts);
    for (uint64_t i = 0; rc == RC_OK && i < n_tensors; i++)
        rc = read_tensor(reader);
    return rc == RC_OK ? place_tensors(reader, first) : rc;
}

enum rc gguf_check_total(const struct gguf *gguf, const struct tensor_list *list, struct err *err)
{
    uint32_t n = list->n;
    enum rc rc = find_number(gguf, "split.tensors.count", GGUF_I32, &n, err);
    if (rc != RC_OK || n == list->n)
        return rc;
    return file_error(err, gguf->file, NULL, "split.tensors.count: wanted %" PRIu32 " tensors in all parts, have %" PRIu32, n,
                      list->n);
}

enum rc gguf_read(struct tensor_list *list, struct file_view *file, uint32_t n_parts, struct gguf **gguf, struct err *err)
{
    struct reader reader = {
        .list = list,
        .file = file,
        .gguf = mem_calloc(1, sizeof *reader.gguf),
        .item = "header",
        .err = err,
    };
    if (!reader.gguf)
        return out_of_memory(err);
    reader.gguf->file = file;
    enum rc rc = read_file(&reader, n_parts);
    if (rc != RC_OK) {
        gguf_destroy(reader.gguf);
        reader.gguf = NULL;
    }
    *gguf = reader.gguf;
    return rc;
}
