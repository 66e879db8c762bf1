/* py_update_batch.c: takes the tensors of an update from Python's objects, from memory, from checkpoints and from shared files;
 * checks and writes them. */
#include "py_update_batch.h"

#include "py.h"

#include "../base/file.h"
#include "../base/mem.h"
#include "../program/team_state.h"

#include <inttypes.h>
#include <stdio.h>

void py_batch_free(struct py_batch *batch)
{
    for (Py_ssize_t i = 0; i < batch->n_taken; i++) {
        if (batch->items[i].is_held)
            Py_CLEAR(batch->items[i].tensor.keeps);
        py_tensor_release(&batch->items[i].tensor);
        Py_XDECREF(batch->items[i].name);
    }
    mem_free(batch->items);
}

static bool batch_make(struct py_batch *batch, PyObject *list)
{
    batch->n = PyList_Size(list);
    batch->items = mem_calloc((size_t)batch->n + 1, sizeof *batch->items);
    if (!batch->items)
        PyErr_NoMemory();
    return batch->items != NULL;
}

/* Adds an item of this name to a batch; NULL with an exception set. */
static struct py_batch_item *batch_add(struct py_batch *batch, PyObject *name)
{
    struct py_batch_item *item = &batch->items[batch->n_taken];
    item->text = PyUnicode_AsUTF8AndSize(name, NULL);
    if (!item->text)
        return NULL;
    item->name = Py_NewRef(name);
    batch->n_taken++;
    return item;
}

/* Makes the error for a tensor that cannot be read; NULL if out of memory. */
static PyObject *unreadable(PyObject *class, const char *name, PyObject *cause)
{
    PyObject *error = PyObject_CallFunction(class, "N", PyUnicode_FromFormat("weight '%s': cannot be read: %S", name, cause));
    PyObject *names = error ? Py_BuildValue("[s]", name) : NULL;
    if (!names || PyObject_SetAttrString(error, "mismatched", names) < 0)
        Py_CLEAR(error);
    Py_XDECREF(names);
    return error;
}

/* Replaces the current exception by one that names the tensor. The current one becomes the cause; if it is an UnsupportedError,
 * so is the new one. */
static void raise_unreadable(const char *name)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    PyObject *unsupported = py_error_class("UnsupportedError");
    bool is_unsupported = unsupported && value && PyObject_IsInstance(value, unsupported) == 1;
    PyObject *class = is_unsupported ? Py_NewRef(unsupported) : py_error_class("WeightUpdateError");
    PyObject *error = class && value ? unreadable(class, name, value) : NULL;
    if (error && PyObject_IsInstance(value, PyExc_Exception) == 1) {
        PyException_SetCause(error, Py_NewRef(value));
        PyErr_SetObject(class, error);
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(trace);
    } else {
        PyErr_Restore(type, value, trace);
    }
    Py_XDECREF(error);
    Py_XDECREF(class);
    Py_XDECREF(unsupported);
}

static enum rc bucket_is_short(const struct py_batch_item *item, uint64_t have, struct err *err)
{
    err_set(err, RC_DEVICE, "weight '%.160s': wanted bytes %" PRIu64 " to %" PRIu64 " of the bucket, have %" PRIu64
            "; do not change the bucket before the update has ended", item->text, item->file.offset,
            item->file.offset + item->file.n_bytes, have);
    err_name(err, "ipc_open", NULL);
    return RC_DEVICE;
}

/* Checks that the file has the tensor's bytes. Called before the first weight is written. */
static enum rc check_file(const struct py_batch_item *item, struct err *err)
{
    uint64_t size_bytes;
    if (item->file.checkpoint)
        return checkpoint_has(item->file.checkpoint, item->file.stored, err);
    if (file_size(item->file.descriptor, &size_bytes))
        size_bytes = 0;
    if (size_bytes >= item->file.offset + item->file.n_bytes)
        return RC_OK;
    return bucket_is_short(item, size_bytes, err);
}

/* The `read` of struct update_tensor; ctx: the item. */
static enum rc read_item(void *ctx, uint64_t first, size_t n_bytes, void *to, struct err *err)
{
    const struct py_batch_item *item = ctx;
    const struct py_batch_file *file = &item->file;
    size_t n_read;
    if (file->checkpoint)
        return checkpoint_read(file->checkpoint, file->stored, first, n_bytes, to, err);
    int code = file_read(file->descriptor, file->offset + first, to, n_bytes, &n_read);
    return code || n_read < n_bytes ? bucket_is_short(item, file->offset + first + n_read, err) : RC_OK;
}

static void read_from(struct py_batch_item *item, struct py_batch_file file)
{
    item->file = file;
    item->tensor.tensor.read = read_item;
    item->tensor.tensor.read_ctx = item;
}

static int take_stored(PyObject *tuple, struct py_batch_item *item)
{
    PyObject *file;
    const char *name;
    if (!PyArg_ParseTuple(tuple, "Os", &file, &name))
        return -1;
    const struct checkpoint *checkpoint = py_checkpoint_get(file);
    const struct checkpoint_tensor *stored = checkpoint ? checkpoint_find(checkpoint, name) : NULL;
    if (stored) {
        team_view_stored(stored, &item->tensor.tensor);
        read_from(item, (struct py_batch_file){.checkpoint = checkpoint, .stored = stored, .n_bytes = stored->size_bytes});
    } else if (checkpoint) {
        PyErr_Format(PyExc_KeyError, "%s", name);
    }
    return stored ? 0 : -1;
}

bool py_batch_take_tensor(struct py_batch_item *item, const struct update *update, PyObject *tensor,
                          const struct py_memory *memory)
{
    if (update_skips(update, item->text))
        return true;
    if (PyTuple_Check(tensor) ? take_stored(tensor, item) == 0
                              : py_tensor_take(tensor, memory->ordinal, memory->stream, &item->tensor) == 0)
        return true;
    raise_unreadable(item->text);
    return false;
}

bool py_batch_take_tensors(struct py_batch *batch, const struct update *update, PyObject *list, const struct py_memory *memory)
{
    if (!batch_make(batch, list))
        return false;
    for (Py_ssize_t i = 0; i < batch->n; i++) {
        PyObject *name, *tensor;
        if (!PyArg_ParseTuple(PyList_GetItem(list, i), "UO", &name, &tensor))
            return false;
        struct py_batch_item *item = batch_add(batch, name);
        if (!item || !py_batch_take_tensor(item, update, tensor, memory))
            return false;
        item->tensor.tensor.is_lent = batch->lends && !item->tensor.tensor.read;
    }
    return true;
}

static int parse_dims(PyObject *sequence, uint32_t *n_dims, int64_t *numbers)
{
    Py_ssize_t n = PySequence_Size(sequence);
    if (n < 0 || n > UPDATE_MAX_DIMS) {
        if (n > 0)
            PyErr_Format(PyExc_ValueError, "wanted at most %d dimensions, have %zd", UPDATE_MAX_DIMS, n);
        return -1;
    }
    *n_dims = (uint32_t)n;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *number = PySequence_GetItem(sequence, i);
        numbers[i] = number ? PyLong_AsLongLong(number) : 0;
        Py_XDECREF(number);
        if (PyErr_Occurred())
            return -1;
    }
    return 0;
}

/* Sets type, shape and strides of a tensor from an item's tuple. False with an exception set. */
static bool take_form(struct update_tensor *t, const char *type, PyObject *shape, PyObject *strides)
{
    uint32_t n_strides;
    t->dtype = dtype_from_name(type);
    snprintf(t->type, sizeof t->type, "%.20s", type);
    if (parse_dims(shape, &t->n_dims, t->shape) < 0)
        return false;
    int64_t step = 1;
    for (uint32_t i = t->n_dims; i-- > 0; step *= t->shape[i])
        t->strides[i] = step;
    if (strides == Py_None)
        return true;
    if (parse_dims(strides, &n_strides, t->strides) < 0)
        return false;
    if (n_strides == t->n_dims)
        return true;
    PyErr_Format(PyExc_ValueError, "wanted %u strides, have %u", t->n_dims, n_strides);
    return false;
}

/* (name, address, type, shape, strides or None) */
static bool take_memory(struct py_batch *batch, PyObject *tuple, const struct py_memory *memory)
{
    PyObject *name, *shape, *strides;
    unsigned long long address;
    const char *type;
    if (!PyArg_ParseTuple(tuple, "UKsOO", &name, &address, &type, &shape, &strides))
        return false;
    struct py_batch_item *item = batch_add(batch, name);
    if (!item)
        return false;
    struct update_tensor *t = &item->tensor.tensor;
    t->data = (const void *)(uintptr_t)address;
    t->is_host = !memory->on_device;
    t->stream = (void *)memory->stream;
    return take_form(t, type, shape, strides);
}

/* The bytes from a tensor's first item to the end of its last. False: a size or stride is negative, or the bytes overflow. If
 * the type is unsupported, *n_bytes stays unchanged. */
static bool span_of(const struct update_tensor *t, size_t *n_bytes)
{
    const struct dtype_info *info = dtype_info(t->dtype);
    int64_t last = 0, step;
    bool is_empty = false;
    for (uint32_t i = 0; i < t->n_dims; i++) {
        is_empty |= t->shape[i] == 0;
        if (t->shape[i] < 0 || t->strides[i] < 0 ||
            (t->shape[i] && (__builtin_mul_overflow(t->shape[i] - 1, t->strides[i], &step) ||
                             __builtin_add_overflow(last, step, &last))))
            return false;
    }
    if (!info || last > INT64_MAX / 16 - 1)
        return !info;
    *n_bytes = is_empty ? 0 : (size_t)(last + 1) * info->block_bytes;
    return true;
}

/* (name, descriptor, offset, type, shape, strides or None) */
static bool take_shared(struct py_batch *batch, PyObject *tuple)
{
    PyObject *name, *shape, *strides;
    unsigned long long offset;
    int descriptor;
    const char *type;
    if (!PyArg_ParseTuple(tuple, "UiKsOO", &name, &descriptor, &offset, &type, &shape, &strides))
        return false;
    struct py_batch_item *item = batch_add(batch, name);
    if (!item || !take_form(&item->tensor.tensor, type, shape, strides))
        return false;
    item->tensor.tensor.is_host = true;
    read_from(item, (struct py_batch_file){.descriptor = descriptor, .offset = offset});
    if (span_of(&item->tensor.tensor, &item->file.n_bytes) && offset <= INT64_MAX - item->file.n_bytes)
        return true;
    PyErr_Format(PyExc_ValueError, "weight '%U': its shape and strides are no tensor in a file", name);
    return false;
}

bool py_batch_take_memory(struct py_batch *batch, PyObject *list, const struct py_memory *memory)
{
    bool is_taken = batch_make(batch, list);
    for (Py_ssize_t i = 0; i < batch->n && is_taken; i++)
        is_taken = take_memory(batch, PyList_GetItem(list, i), memory);
    return is_taken;
}

bool py_batch_take_shared(struct py_batch *batch, PyObject *list)
{
    bool is_taken = batch_make(batch, list);
    for (Py_ssize_t i = 0; i < batch->n && is_taken; i++)
        is_taken = take_shared(batch, PyList_GetItem(list, i));
    return is_taken;
}

static enum rc check_item(struct update *update, const struct py_batch *batch, struct py_batch_item *item, struct err *err)
{
    const struct update_tensor *tensor = &item->tensor.tensor;
    enum rc rc = batch->has_no_values ? update_check_form(update, item->text, tensor, &item->fate, err)
                                      : update_check(update, item->text, tensor, batch->wants_finite, &item->fate, err);
    return rc || !tensor->read || item->fate == UPDATE_SKIPPED ? rc : check_file(item, err);
}

enum rc py_batch_tell(struct team *team, struct weight_call call, const struct py_batch_item *item, bool has_tensor,
                      uint64_t *sum, struct err *err)
{
    const struct py_batch_file *file = &item->file;
    if (!team_hosts(team))
        return RC_OK;
    bool is_stored = has_tensor && file->checkpoint;
    call.name = item->text;
    call.path = is_stored ? checkpoint_path(file->checkpoint, file->stored->file) : NULL;
    call.stored = is_stored ? file->stored->name : NULL;
    call.tensor = has_tensor ? &item->tensor.tensor : NULL;
    return team_weights_elsewhere(team, &call, sum, err);
}

enum rc py_batch_check(struct py_batch *batch, struct update *update, struct err *err)
{
    const struct weight_call call = {.call = TEAM_CHECK, .is_finite = batch->wants_finite};
    enum rc rc = RC_OK;
    for (Py_ssize_t i = 0; i < batch->n && !rc; i++) {
        struct py_batch_item *item = &batch->items[i];
        rc = check_item(update, batch, item, err);
        if (!rc && batch->team && item->fate != UPDATE_SKIPPED)
            rc = py_batch_tell(batch->team, call, item, true, NULL, err);
    }
    return rc;
}

enum rc py_batch_write(struct py_batch *batch, struct update *update, struct err *err)
{
    enum rc rc = RC_OK;
    bool waits = false;
    for (Py_ssize_t i = 0; i < batch->n && !rc; i++) {
        struct py_batch_item *item = &batch->items[i];
        rc = update_write(update, item->text, &item->tensor.tensor, &item->fate, err);
        if (!rc && item->fate != UPDATE_SKIPPED)
            rc = py_batch_tell(batch->team, (struct weight_call){.call = TEAM_WRITE}, item, true, NULL, err);
        waits |= item->tensor.tensor.is_host && !item->tensor.tensor.read && item->fate != UPDATE_SKIPPED;
    }
    if (waits) { /* the caller may change host memory after this call, also after an error */
        enum rc end = update_finish(update, rc ? NULL : err);
        rc = rc ? rc : end;
    }
    return rc;
}

PyObject *py_batch_skipped(const struct py_batch *batch)
{
    PyObject *list = PyList_New(0);
    for (Py_ssize_t i = 0; list && i < batch->n; i++)
        if (batch->items[i].fate == UPDATE_SKIPPED && PyList_Append(list, batch->items[i].name) < 0)
            Py_CLEAR(list);
    return list;
}
