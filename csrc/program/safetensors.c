#include "safetensors.h"

#include "../base/json.h"

#include <inttypes.h>
#include <string.h>

#define MAX_HEADER_BYTES 100000000 /* limit of the format */

static const struct {
    const char *name;
    uint32_t dtype;
} TYPES[] = {
    {"F64", DTYPE_F64}, {"F32", DTYPE_F32}, {"F16", DTYPE_F16}, {"BF16", DTYPE_BF16}, {"I64", DTYPE_I64},
    {"I32", DTYPE_I32}, {"I16", DTYPE_I16}, {"I8", DTYPE_I8},   {"U8", DTYPE_U8},     {"BOOL", DTYPE_BOOL},
};

struct reader {
    struct tensor_list *list;
    const struct file_view *file;
    struct json json;
    uint64_t data, data_bytes; /* offset and size of the data after the header */
    struct err *err;
};

static enum rc json_error(struct reader *reader, const char *tensor)
{
    char text[128];
    json_problem(&reader->json, text, sizeof text);
    if (reader->json.out_of_memory)
        return err_set(reader->err, RC_MEMORY, "checkpoint: out of memory for the header");
    return file_error(reader->err, reader->file, tensor, "header, %s", text);
}

static enum rc read_type(struct reader *reader, struct checkpoint_tensor *tensor)
{
    struct json_string text;
    if (!json_text(&reader->json, &text))
        return json_error(reader, tensor->name);
    tensor->dtype = DTYPE_NONE;
    for (size_t i = 0; i < sizeof TYPES / sizeof *TYPES; i++)
        if (json_string_is(text, TYPES[i].name)) {
            tensor->dtype = TYPES[i].dtype;
            tensor->type = TYPES[i].name;
        }
    if (!tensor->type) {
        struct quoted shown = quote(text.bytes, text.n);
        tensor->type = name_table_copy(&reader->list->names, shown.text, strlen(shown.text));
    }
    return tensor->type ? RC_OK : err_set(reader->err, RC_MEMORY, "checkpoint: out of memory for a type's name");
}

static enum rc read_shape(struct reader *reader, struct checkpoint_tensor *tensor)
{
    struct json *json = &reader->json;
    uint64_t length;
    tensor->n_dims = 0;
    json_open_array(json);
    while (json_element(json) && json_u64(json, &length)) {
        if (tensor->n_dims == CHECKPOINT_MAX_DIMS)
            return file_error(reader->err, reader->file, tensor->name, "shape: wanted at most %d dimensions, have more",
                              CHECKPOINT_MAX_DIMS);
        tensor->shape[tensor->n_dims++] = length;
    }
    return json->wanted ? json_error(reader, tensor->name) : RC_OK;
}

static enum rc read_offsets(struct reader *reader, struct checkpoint_tensor *tensor)
{
    struct json *json = &reader->json;
    uint64_t offsets[2] = {0, 0}, value;
    uint32_t n = 0;
    json_open_array(json);
    while (json_element(json) && json_u64(json, &value)) {
        if (n < 2)
            offsets[n] = value;
        n += n < 3;
    }
    if (json->wanted)
        return json_error(reader, tensor->name);
    if (n != 2 || offsets[0] > offsets[1] || offsets[1] > reader->data_bytes)
        return file_error(reader->err, reader->file, tensor->name,
                          "data_offsets: wanted begin <= end <= %" PRIu64 " bytes, have %s[%" PRIu64 ", %" PRIu64 "]",
                          reader->data_bytes, n == 2 ? "" : "another number of them, ", offsets[0], offsets[1]);
    tensor->offset = reader->data + offsets[0];
    tensor->size_bytes = offsets[1] - offsets[0];
    return RC_OK;
}

static enum rc check_size(struct reader *reader, const struct checkpoint_tensor *tensor)
{
    char shape[160];
    uint64_t wanted;
    if (tensor->dtype == DTYPE_NONE)
        return RC_OK;
    shape_text(tensor->n_dims, tensor->shape, shape, sizeof shape);
    if (!tensor_size(tensor->dtype, tensor->n_dims, tensor->shape, &wanted))
        return file_error(reader->err, reader->file, tensor->name, "shape: wanted a size below 2^64 bytes, have %s", shape);
    if (wanted != tensor->size_bytes)
        return file_error(reader->err, reader->file, tensor->name, "data: wanted %" PRIu64 " bytes for %s %s, have %" PRIu64,
                          wanted, tensor->type, shape, tensor->size_bytes);
    return RC_OK;
}

/* Skips an unknown member, which a later version of the format may have. */
static enum rc skip_member(struct reader *reader, const char *tensor)
{
    return json_skip(&reader->json) ? RC_OK : json_error(reader, tensor);
}

static enum rc read_tensor(struct reader *reader, struct json_string name)
{
    static const struct {
        const char *name;
        enum rc (*read)(struct reader *reader, struct checkpoint_tensor *tensor);
    } MEMBERS[] = {{"dtype", read_type}, {"shape", read_shape}, {"data_offsets", read_offsets}};
    struct checkpoint_tensor *tensor;
    enum rc rc = tensor_list_add(reader->list, reader->file, name.bytes, name.n, &tensor, reader->err);
    if (rc != RC_OK)
        return rc;
    bool seen[3] = {false, false, false};
    struct json_string key;
    json_open_object(&reader->json);
    while (rc == RC_OK && json_key(&reader->json, &key)) {
        uint32_t i = 0;
        while (i < 3 && !json_string_is(key, MEMBERS[i].name))
            i++;
        if (i < 3 && seen[i])
            return file_error(reader->err, reader->file, tensor->name, "%s: wanted once, have it twice", MEMBERS[i].name);
        rc = i < 3 ? MEMBERS[i].read(reader, tensor) : skip_member(reader, tensor->name);
        if (i < 3)
            seen[i] = true;
    }
    if (rc != RC_OK)
        return rc;
    if (reader->json.wanted)
        return json_error(reader, tensor->name);
    for (uint32_t i = 0; i < 3; i++)
        if (!seen[i])
            return file_error(reader->err, reader->file, tensor->name, "%s: wanted in the header, have none", MEMBERS[i].name);
    return check_size(reader, tensor);
}

/* "__metadata__" is an object of strings. It is checked and discarded. */
static enum rc read_metadata(struct reader *reader)
{
    struct json_string text;
    json_open_object(&reader->json);
    while (json_key(&reader->json, &text))
        json_text(&reader->json, &text);
    return reader->json.wanted ? json_error(reader, NULL) : RC_OK;
}

static enum rc read_header(struct reader *reader)
{
    struct json_string key;
    enum rc rc = RC_OK;
    json_open_object(&reader->json);
    while (rc == RC_OK && json_key(&reader->json, &key))
        rc = json_string_is(key, "__metadata__") ? read_metadata(reader) : read_tensor(reader, key);
    if (rc == RC_OK && !json_end(&reader->json))
        rc = json_error(reader, NULL);
    return rc;
}

enum rc safetensors_read(struct tensor_list *list, struct file_view *file, struct err *err)
{
    if (file->size_bytes < 8)
        return file_error(err, file, NULL, "size: wanted at least 8 bytes, have %" PRIu64, file->size_bytes);
    uint64_t header_bytes = 0;
    enum rc rc = file_view_need(file, 8, err);
    if (rc != RC_OK)
        return rc;
    for (int i = 0; i < 8; i++)
        header_bytes |= (uint64_t)file->bytes[i] << 8 * i;
    uint64_t most = file->size_bytes - 8 < MAX_HEADER_BYTES ? file->size_bytes - 8 : MAX_HEADER_BYTES;
    if (header_bytes > most)
        return file_error(err, file, NULL,
                          "header length: wanted at most %" PRIu64 " bytes, have %" PRIu64
                          "; cut off, or neither safetensors nor GGUF",
                          most, header_bytes);
    struct reader reader = {
        .list = list,
        .file = file,
        .data = 8 + header_bytes,
        .data_bytes = file->size_bytes - 8 - header_bytes,
        .err = err,
    };
    uint32_t first = list->n;
    if ((rc = file_view_need(file, 8 + header_bytes, err)) != RC_OK)
        return rc;
    json_begin(&reader.json, (const char *)file->bytes + 8, header_bytes);
    rc = read_header(&reader);
    json_release(&reader.json);
    if (rc == RC_OK)
        rc = tensor_list_check_places(list, first, file, 8 + header_bytes, file->size_bytes, true, err);
    return rc;
}
