/* py_update.c: the class _core.WeightUpdate: a transaction over the weights of a _core.Model. It holds the steps of the
 * _core.Engine or _core.EngineThread that runs the model. All tensors of a list are checked before the first is written; checks
 * and writes release the GIL. One thread at a time, which llmpy/weights/updates.py ensures. */
#include "py_engine.h"
#include "py_tensor.h"
#include "py_update_lists.h"

#include "../base/file.h"
#include "../base/mem.h"
#include "../program/checkpoint.h"
#include "../program/team.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

typedef struct {
    PyObject_HEAD PyObject *model, *engine;
    struct update *update;
    int ordinal; /* of the CUDA device; -1: CPU */
    bool is_held, is_over;
    bool drafts; /* the model is the engine's drafter */
} Update;

/* Where a tensor lies that update_write reads piece by piece: in a checkpoint, or in a file that another process shares. */
struct item_file {
    const struct checkpoint *checkpoint; /* NULL: the shared file of `descriptor` */
    const struct checkpoint_tensor *stored;
    int descriptor;
    uint64_t offset;
    size_t n_bytes;
};

/* One tensor of a list. */
struct item {
    PyObject *name;
    const char *text; /* the name as UTF-8, owned by `name` */
    struct py_tensor tensor;
    struct item_file file; /* used if tensor.tensor.read is set */
    enum update_fate fate;
    bool is_held; /* by the model's dict of lent tensors */
};
struct batch_of {
    struct item *items;
    Py_ssize_t n, n_taken;
    bool wants_finite, lends;
};

/* ---- life ------------------------------------------------------------------------------------------------------------ */

static int update_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"model", "engine", "ordinal", "drafts", NULL};
    Update *self = (Update *)object;
    PyObject *model, *engine;
    int ordinal, drafts = 0;
    struct err err;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOi|p:WeightUpdate", names, &model, &engine, &ordinal, &drafts))
        return -1;
    if (self->model) {
        PyErr_SetString(PyExc_RuntimeError, "WeightUpdate: initialised twice");
        return -1;
    }
    struct team *borrowed = py_model_borrow(model);
    if (!borrowed)
        return -1;
    enum rc rc = team_check_one_process(borrowed, "an update or a checksum of the weights", &err);
    if (!rc)
        rc = update_begin(team_models(borrowed), team_n_ranks(borrowed), &self->update, &err);
    py_model_return(model);
    if (rc) {
        py_raise(&err);
        return -1;
    }
    self->model = Py_NewRef(model);
    self->engine = Py_NewRef(engine);
    self->ordinal = ordinal;
    self->drafts = drafts;
    return 0;
}

static void update_dealloc(PyObject *object)
{
    Update *self = (Update *)object;
    update_end(self->update);
    Py_XDECREF(self->model);
    Py_XDECREF(self->engine);
    py_deallocate(object);
}

/* Borrows the model for one call. The call must end with py_model_return. */
static bool begin(Update *self)
{
    if (!self->update || self->is_over) {
        PyErr_SetString(PyExc_RuntimeError, "WeightUpdate: it is over");
        return false;
    }
    return py_model_borrow(self->model) != NULL;
}

/* ---- the engine's side ----------------------------------------------------------------------------------------------- */

static enum rc hold(struct engine *engine, void *ctx, struct err *err)
{
    (void)ctx;
    return engine_hold_steps(engine, err);
}

static int hold_steps(Update *self)
{
    if (self->is_held)
        return 0;
    if (py_engine_call(self->engine, hold, NULL) < 0)
        return -1;
    self->is_held = true;
    return 0;
}

struct commit {
    bool recomputes, drafts;
    uint32_t epoch;
};

static enum rc commit(struct engine *engine, void *ctx, struct err *err)
{
    struct commit *c = ctx;
    if (c->drafts)
        return engine_commit_drafter(engine, &c->epoch, err);
    return engine_commit_weights(engine, c->recomputes, &c->epoch, err);
}

static enum rc give_up(struct engine *engine, void *ctx, struct err *err)
{
    const Update *self = ctx;
    (void)err;
    engine_abort_update(engine, !self->drafts && update_has_written(self->update));
    return RC_OK;
}

/* ---- lists of tensors ------------------------------------------------------------------------------------------------ */

static void batch_free(struct batch_of *batch)
{
    for (Py_ssize_t i = 0; i < batch->n_taken; i++) {
        if (batch->items[i].is_held)
            Py_CLEAR(batch->items[i].tensor.keeps);
        py_tensor_release(&batch->items[i].tensor);
        Py_XDECREF(batch->items[i].name);
    }
    mem_free(batch->items);
}

static bool batch_make(struct batch_of *batch, PyObject *list)
{
    batch->n = PyList_Size(list);
    batch->items = mem_calloc((size_t)batch->n + 1, sizeof *batch->items);
    if (!batch->items)
        PyErr_NoMemory();
    return batch->items != NULL;
}

/* Adds an item of this name to a batch; NULL with an exception set. */
static struct item *batch_add(struct batch_of *batch, PyObject *name)
{
    struct item *item = &batch->items[batch->n_taken];
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

/* ---- tensors in files ------------------------------------------------------------------------------------------------ */

static enum rc bucket_is_short(const struct item *item, uint64_t have, struct err *err)
{
    err_set(err, RC_DEVICE, "weight '%.160s': wanted bytes %" PRIu64 " to %" PRIu64 " of the bucket, have %" PRIu64
            "; do not change the bucket before the update has ended", item->text, item->file.offset,
            item->file.offset + item->file.n_bytes, have);
    err_name(err, "ipc_open", NULL);
    return RC_DEVICE;
}

/* Checks that the file has the tensor's bytes. Called before the first weight is written. */
static enum rc check_file(const struct item *item, struct err *err)
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
    const struct item *item = ctx;
    const struct item_file *file = &item->file;
    size_t n_read;
    if (file->checkpoint)
        return checkpoint_read(file->checkpoint, file->stored, first, n_bytes, to, err);
    int code = file_read(file->descriptor, file->offset + first, to, n_bytes, &n_read);
    return code || n_read < n_bytes ? bucket_is_short(item, file->offset + first + n_read, err) : RC_OK;
}

static void read_from(struct item *item, struct item_file file)
{
    item->file = file;
    item->tensor.tensor.read = read_item;
    item->tensor.tensor.read_ctx = item;
}

static void view_stored(const struct checkpoint_tensor *stored, struct update_tensor *t)
{
    t->dtype = stored->dtype;
    snprintf(t->type, sizeof t->type, "%.20s", stored->type);
    t->n_dims = stored->n_dims < UPDATE_MAX_DIMS ? stored->n_dims : UPDATE_MAX_DIMS;
    t->is_host = true;
    int64_t step = 1;
    for (uint32_t i = t->n_dims; i-- > 0; step *= t->shape[i]) {
        t->shape[i] = (int64_t)stored->shape[i];
        t->strides[i] = step;
    }
}

static int take_stored(PyObject *tuple, struct item *item)
{
    PyObject *file;
    const char *name;
    if (!PyArg_ParseTuple(tuple, "Os", &file, &name))
        return -1;
    const struct checkpoint *checkpoint = py_checkpoint_get(file);
    const struct checkpoint_tensor *stored = checkpoint ? checkpoint_find(checkpoint, name) : NULL;
    if (stored) {
        view_stored(stored, &item->tensor.tensor);
        read_from(item, (struct item_file){.checkpoint = checkpoint, .stored = stored, .n_bytes = stored->size_bytes});
    } else if (checkpoint) {
        PyErr_Format(PyExc_KeyError, "%s", name);
    }
    return stored ? 0 : -1;
}

/* Views a Python tensor (py_tensor.h), or (checkpoint, name) of a _core.Checkpoint, which must outlive the call. Ignores the
 * tensor if its name is skipped. False with an exception set. */
static bool take_tensor(const Update *self, struct item *item, PyObject *tensor, uintptr_t stream)
{
    if (update_skips(self->update, item->text))
        return true;
    if (PyTuple_Check(tensor) ? take_stored(tensor, item) == 0
                              : py_tensor_take(tensor, self->ordinal, stream, &item->tensor) == 0)
        return true;
    raise_unreadable(item->text);
    return false;
}

/* Adds each (name, tensor) of a list to the batch. False with an exception set. */
static bool take_tensors(Update *self, struct batch_of *batch, PyObject *list, uintptr_t stream)
{
    if (!batch_make(batch, list))
        return false;
    for (Py_ssize_t i = 0; i < batch->n; i++) {
        PyObject *name, *tensor;
        if (!PyArg_ParseTuple(PyList_GetItem(list, i), "UO", &name, &tensor))
            return false;
        struct item *item = batch_add(batch, name);
        if (!item || !take_tensor(self, item, tensor, stream))
            return false;
        item->tensor.tensor.is_lent = batch->lends && !item->tensor.tensor.read;
    }
    return true;
}

static enum rc check_item(struct update *update, const struct batch_of *batch, struct item *item, struct err *err)
{
    const struct update_tensor *tensor = &item->tensor.tensor;
    enum rc rc = update_check(update, item->text, tensor, batch->wants_finite, &item->fate, err);
    return rc || !tensor->read || item->fate == UPDATE_SKIPPED ? rc : check_file(item, err);
}

static enum rc check_all(struct update *update, struct batch_of *batch, struct err *err)
{
    enum rc rc = RC_OK;
    for (Py_ssize_t i = 0; i < batch->n && !rc; i++)
        rc = check_item(update, batch, &batch->items[i], err);
    return rc;
}

static enum rc write_all(struct update *update, struct batch_of *batch, struct err *err)
{
    enum rc rc = RC_OK;
    bool waits = false;
    for (Py_ssize_t i = 0; i < batch->n && !rc; i++) {
        struct item *item = &batch->items[i];
        rc = update_write(update, item->text, &item->tensor.tensor, false, &item->fate, err);
        waits |= item->tensor.tensor.is_host && !item->tensor.tensor.read && item->fate != UPDATE_SKIPPED;
    }
    if (waits) { /* the caller may change host memory after this call, also after an error */
        enum rc end = update_finish(update, rc ? NULL : err);
        rc = rc ? rc : end;
    }
    return rc;
}

/* The list of skipped names. */
static PyObject *skipped_of(const struct batch_of *batch)
{
    PyObject *list = PyList_New(0);
    for (Py_ssize_t i = 0; list && i < batch->n; i++)
        if (batch->items[i].fate == UPDATE_SKIPPED && PyList_Append(list, batch->items[i].name) < 0)
            Py_CLEAR(list);
    return list;
}

/* ---- lent tensors ---------------------------------------------------------------------------------------------------- */

/* Keeps the tensors of a batch alive before they are written. */
static int hold_lent(Update *self, struct batch_of *batch)
{
    for (Py_ssize_t i = 0; i < batch->n; i++) {
        struct item *item = &batch->items[i];
        if (item->tensor.keeps && py_model_keep(self->model, NULL, item->tensor.keeps) < 0)
            return -1;
        item->is_held = item->tensor.keeps != NULL;
    }
    return 0;
}

/* After a batch is written: forgets tensors that the model no longer reads. */
static int settle_lent(Update *self, struct batch_of *batch)
{
    for (Py_ssize_t i = 0; i < batch->n; i++) {
        struct item *item = &batch->items[i];
        const struct update_entry *entry = update_find(self->update, item->text);
        if (entry && py_model_keep(self->model, item->name, entry->lent_bytes ? item->tensor.keeps : NULL) < 0)
            return -1;
    }
    return py_model_keep(self->model, NULL, NULL);
}

/* Checks the whole batch, then writes it. The check for finite values uses the device, so it holds the engine's steps first. */
static PyObject *put(Update *self, struct batch_of *batch)
{
    struct err err;
    enum rc rc;
    if (batch->wants_finite && hold_steps(self) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    rc = check_all(self->update, batch, &err);
    Py_END_ALLOW_THREADS
    if (rc)
        return py_raise(&err);
    PyObject *skipped = skipped_of(batch);
    if (!skipped || PyList_Size(skipped) == batch->n)
        return skipped;
    if (hold_steps(self) < 0 || (batch->lends && hold_lent(self, batch) < 0))
        return Py_DECREF(skipped), NULL;
    Py_BEGIN_ALLOW_THREADS
    rc = write_all(self->update, batch, &err);
    Py_END_ALLOW_THREADS
    if (rc)
        py_raise(&err);
    else if (settle_lent(self, batch) == 0)
        return skipped;
    Py_DECREF(skipped);
    return NULL;
}

/* Ends a call that began with `begin`. */
static PyObject *put_taken(Update *self, struct batch_of *batch, bool is_taken)
{
    PyObject *skipped = is_taken ? put(self, batch) : NULL;
    batch_free(batch);
    py_model_return(self->model);
    return skipped;
}

/* ---- methods --------------------------------------------------------------------------------------------------------- */

static PyObject *write_tensors(PyObject *object, PyObject *args)
{
    Update *self = (Update *)object;
    PyObject *list;
    unsigned long long stream = 0;
    int wants_finite = 0, lends = 0;
    if (!PyArg_ParseTuple(args, "O!|Kpp:write", &PyList_Type, &list, &stream, &wants_finite, &lends) || !begin(self))
        return NULL;
    struct batch_of batch = {.wants_finite = wants_finite, .lends = lends};
    return put_taken(self, &batch, take_tensors(self, &batch, list, (uintptr_t)stream));
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
static bool take_memory(struct batch_of *batch, PyObject *tuple, bool on_device, uintptr_t stream)
{
    PyObject *name, *shape, *strides;
    unsigned long long address;
    const char *type;
    if (!PyArg_ParseTuple(tuple, "UKsOO", &name, &address, &type, &shape, &strides))
        return false;
    struct item *item = batch_add(batch, name);
    if (!item)
        return false;
    struct update_tensor *t = &item->tensor.tensor;
    t->data = (const void *)(uintptr_t)address;
    t->is_host = !on_device;
    t->stream = (void *)stream;
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
static bool take_shared(struct batch_of *batch, PyObject *tuple)
{
    PyObject *name, *shape, *strides;
    unsigned long long offset;
    int descriptor;
    const char *type;
    if (!PyArg_ParseTuple(tuple, "UiKsOO", &name, &descriptor, &offset, &type, &shape, &strides))
        return false;
    struct item *item = batch_add(batch, name);
    if (!item || !take_form(&item->tensor.tensor, type, shape, strides))
        return false;
    item->tensor.tensor.is_host = true;
    read_from(item, (struct item_file){.descriptor = descriptor, .offset = offset});
    if (span_of(&item->tensor.tensor, &item->file.n_bytes) && offset <= INT64_MAX - item->file.n_bytes)
        return true;
    PyErr_Format(PyExc_ValueError, "weight '%U': its shape and strides are no tensor in a file", name);
    return false;
}

/* Checks the items of a later write_memory without writing. */
static PyObject *check_memory(PyObject *object, PyObject *list)
{
    Update *self = (Update *)object;
    if (!PyList_Check(list))
        return PyErr_Format(PyExc_TypeError, "check_memory: wanted a list");
    if (!begin(self))
        return NULL;
    struct batch_of batch = {.wants_finite = false};
    struct err err;
    bool is_taken = batch_make(&batch, list);
    for (Py_ssize_t i = 0; i < batch.n && is_taken; i++)
        is_taken = take_memory(&batch, PyList_GetItem(list, i), false, 0);
    if (is_taken && check_all(self->update, &batch, &err)) {
        py_raise(&err);
        is_taken = false;
    }
    batch_free(&batch);
    py_model_return(self->model);
    return is_taken ? Py_NewRef(Py_None) : NULL;
}

static PyObject *write_memory(PyObject *object, PyObject *args)
{
    Update *self = (Update *)object;
    PyObject *list;
    unsigned long long stream = 0;
    int on_device, wants_finite = 0;
    if (!PyArg_ParseTuple(args, "O!p|Kp:write_memory", &PyList_Type, &list, &on_device, &stream, &wants_finite) ||
        !begin(self))
        return NULL;
    struct batch_of batch = {.wants_finite = wants_finite};
    bool is_taken = batch_make(&batch, list);
    for (Py_ssize_t i = 0; i < batch.n && is_taken; i++)
        is_taken = take_memory(&batch, PyList_GetItem(list, i), on_device, (uintptr_t)stream);
    return put_taken(self, &batch, is_taken);
}

static PyObject *write_shared(PyObject *object, PyObject *args)
{
    Update *self = (Update *)object;
    PyObject *list;
    int wants_finite = 0;
    if (!PyArg_ParseTuple(args, "O!|p:write_shared", &PyList_Type, &list, &wants_finite) || !begin(self))
        return NULL;
    struct batch_of batch = {.wants_finite = wants_finite};
    bool is_taken = batch_make(&batch, list);
    for (Py_ssize_t i = 0; i < batch.n && is_taken; i++)
        is_taken = take_shared(&batch, PyList_GetItem(list, i));
    return put_taken(self, &batch, is_taken);
}

static PyObject *finish(PyObject *object, PyObject *args)
{
    (void)args;
    Update *self = (Update *)object;
    struct err err;
    enum rc rc;
    if (!begin(self))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    rc = update_finish(self->update, &err);
    Py_END_ALLOW_THREADS
    py_model_return(self->model);
    if (rc)
        return py_raise(&err);
    Py_RETURN_NONE;
}

static PyObject *commit_all(PyObject *object, PyObject *recomputes)
{
    Update *self = (Update *)object;
    struct commit c = {PyObject_IsTrue(recomputes) == 1, self->drafts, 0};
    struct err err;
    enum rc rc = RC_OK;
    if (!begin(self))
        return NULL;
    bool is_held = hold_steps(self) == 0;
    Py_BEGIN_ALLOW_THREADS
    if (is_held)
        rc = update_finish(self->update, &err);
    if (is_held && !rc)
        rc = update_settle(self->update, &err);
    Py_END_ALLOW_THREADS
    py_model_return(self->model);
    if (rc)
        return py_raise(&err);
    if (!is_held || py_engine_call(self->engine, commit, &c) < 0)
        return NULL;
    self->is_over = true;
    return PyLong_FromUnsignedLong(c.epoch);
}

static PyObject *abort_all(PyObject *object, PyObject *args)
{
    (void)args;
    Update *self = (Update *)object;
    if (self->is_over || !self->update)
        Py_RETURN_NONE;
    self->is_over = true;
    if (self->is_held && py_engine_call(self->engine, give_up, self) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static enum rc look(struct engine *engine, void *holds, struct err *err)
{
    (void)err;
    *(uint32_t *)holds = engine_holds(engine);
    return RC_OK;
}

static PyObject *wants_all(PyObject *object, PyObject *args)
{
    (void)args;
    uint32_t holds;
    const Update *self = (Update *)object;
    return py_engine_call(self->engine, look, &holds) < 0 ? NULL : PyBool_FromLong(!self->drafts && (holds & HOLD_TORN));
}

static enum rc refuse_sleep(struct engine *engine, void *ctx, struct err *err)
{
    (void)ctx;
    return engine_holds(engine) & HOLD_WEIGHTS ? engine_refusal(engine, err) : RC_OK;
}

static PyObject *check_awake(PyObject *object, PyObject *args)
{
    (void)args;
    if (py_engine_call(((Update *)object)->engine, refuse_sleep, NULL) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static enum rc read_epoch(struct engine *engine, void *epoch, struct err *err)
{
    (void)err;
    *(uint32_t *)epoch = engine_epoch(engine);
    return RC_OK;
}

static PyObject *epoch_now(PyObject *object, PyObject *args)
{
    (void)args;
    uint32_t epoch;
    return py_engine_call(((Update *)object)->engine, read_epoch, &epoch) < 0 ? NULL : PyLong_FromUnsignedLong(epoch);
}

static PyObject *names(PyObject *object, PyObject *which)
{
    return py_update_names(((Update *)object)->update, which);
}

static PyObject *rows(PyObject *object, PyObject *args)
{
    (void)args;
    return py_update_rows(((Update *)object)->update);
}

static PyObject *knows(PyObject *object, PyObject *name)
{
    const char *text = PyUnicode_AsUTF8AndSize(name, NULL);
    const struct update *update = ((Update *)object)->update;
    return text ? PyBool_FromLong(update && update_knows(update, text)) : NULL;
}

static PyObject *progress(PyObject *object, PyObject *args)
{
    (void)args;
    const struct update *update = ((Update *)object)->update;
    return Py_BuildValue("(IIKN)", update ? update_n_entries(update) : 0, update ? update_n_written(update) : 0,
                         (unsigned long long)(update ? update_bytes(update) : 0),
                         PyBool_FromLong(update && update_has_written(update)));
}

/* ---- checksums ------------------------------------------------------------------------------------------------------- */

struct sum_of {
    struct update *update;
    struct item *item;
    bool has_tensor;
    struct tensor_sum sum;
};

static enum rc add_up(struct engine *engine, void *ctx, struct err *err)
{
    struct sum_of *s = ctx;
    enum rc rc = refuse_sleep(engine, NULL, err);
    if (!rc)
        rc = engine_settle(engine, err);
    return rc ? rc : update_sum(s->update, s->item->text, s->has_tensor ? &s->item->tensor.tensor : NULL, &s->sum,
                                &s->item->fate, err);
}

/* checksum(name, tensor=None, stream=0) -> the checksum, or None if the name is skipped. */
static PyObject *checksum(PyObject *object, PyObject *args)
{
    Update *self = (Update *)object;
    PyObject *name, *tensor = Py_None, *result = NULL;
    unsigned long long stream = 0;
    if (!PyArg_ParseTuple(args, "U|OK:checksum", &name, &tensor, &stream) || !begin(self))
        return NULL;
    struct item item = {.text = PyUnicode_AsUTF8AndSize(name, NULL)};
    struct sum_of s = {self->update, &item, tensor != Py_None, {0, 0}};
    bool is_taken = item.text && (!s.has_tensor || take_tensor(self, &item, tensor, (uintptr_t)stream));
    if (is_taken && py_engine_call(self->engine, add_up, &s) == 0)
        result = item.fate == UPDATE_SKIPPED ? Py_NewRef(Py_None) : PyLong_FromUnsignedLongLong(s.sum.sum);
    py_tensor_release(&item.tensor);
    py_model_return(self->model);
    return result;
}

static PyMethodDef methods[] = {
    {"write", write_tensors, METH_VARARGS, "write([(name, tensor), ...], stream=0, wants_finite=False, lends=False)"},
    {"write_memory", write_memory, METH_VARARGS,
     "write_memory([(name, address, type, shape, strides or None), ...], on_device, stream=0, wants_finite=False)"},
    {"write_shared", write_shared, METH_VARARGS,
     "write_shared([(name, descriptor, offset, type, shape, strides or None), ...], wants_finite=False), read from files"},
    {"check_memory", check_memory, METH_O, "check_memory([as for write_memory, ...]): checks without writing"},
    {"finish", finish, METH_NOARGS, "Waits until all writes have completed."},
    {"commit", commit_all, METH_O, "Commits the weights and returns the new epoch; with True caches are recomputed."},
    {"abort", abort_all, METH_NOARGS, "Aborts the update."},
    {"names", names, METH_O, "Names 'missing': without a write, except constants; 'repeated': written more than once; 'lent': "
                             "that the model reads in place since this update."},
    {"rows", rows, METH_NOARGS, "[(name, address, type, (rows, columns), bytes between rows)] of what can be shared."},
    {"check_awake", check_awake, METH_NOARGS, "Raises EngineAsleepError if the weights sleep."},
    {"wants_all", wants_all, METH_NOARGS, "True if the engine's weights are torn, so that an update must write all names."},
    {"epoch", epoch_now, METH_NOARGS, "The epoch of the engine's weights."},
    {"knows", knows, METH_O, "True if a name is a weight, or one that updates skip."},
    {"progress", progress, METH_NOARGS, "Number of names, names written, bytes read, and whether a weight may have changed."},
    {"checksum", checksum, METH_VARARGS, "checksum(name, tensor=None, stream=0), as if the tensor were written."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_init, (void *)update_init},
    {Py_tp_new, (void *)PyType_GenericNew},
    {Py_tp_dealloc, (void *)update_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_doc, (void *)"New weights for a Model, as one transaction."},
    {0, NULL},
};

static PyType_Spec spec = {"llmpy._core.WeightUpdate", sizeof(Update), 0, Py_TPFLAGS_DEFAULT, slots};

int py_update_register(PyObject *module)
{
    return py_add_type(module, &spec);
}
