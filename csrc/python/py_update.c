/* py_update.c: the class _core.WeightUpdate: a transaction over the weights of a _core.Model. It holds the steps of the
 * _core.Engine or _core.EngineThread that runs the model. All tensors of a list are checked before the first is written; checks
 * and writes release the GIL. One thread at a time, which llmpy/weights/updates.py ensures. */
#include "py_engine.h"
#include "py_update_batch.h"
#include "py_update_lists.h"

#include "../program/team_state.h"

#include <string.h>

typedef struct {
    PyObject_HEAD PyObject *model, *engine;
    struct update *update;
    struct team *team; /* the model's; used while it is borrowed */
    int ordinal;       /* of the CUDA device; -1: CPU */
    bool is_held, is_over;
    bool drafts; /* the model is the engine's drafter */
} Update;

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
    enum rc rc = team_update_begin(borrowed, &self->update, &err);
    self->team = borrowed;
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

/* The commit of another model's update lets steps run, so a drafter's update holds them anew before each write. */
static int hold_steps(Update *self)
{
    if (self->is_held && !self->drafts)
        return 0;
    if (py_engine_call(self->engine, hold, NULL) < 0)
        return -1;
    self->is_held = true;
    return 0;
}

struct commit {
    struct update *update;
    bool recomputes, drafts;
    uint32_t epoch;
};

/* A digest of all weights: a chain over their names and checksums. */
static enum rc digest(struct update *update, struct hash *weights, struct err *err)
{
    struct tensor_sum sum;
    enum update_fate fate;
    enum rc rc = RC_OK;
    *weights = (struct hash){0};
    for (uint32_t i = 0; i < update_n_entries(update) && !rc; i++) {
        const char *name = update_entry(update, i)->name;
        rc = update_sum(update, name, NULL, &sum, &fate, err);
        *weights = hash_bytes(weights, name, strlen(name));
        *weights = hash_bytes(weights, &sum.sum, sizeof sum.sum);
    }
    return rc;
}

static enum rc commit(struct engine *engine, void *ctx, struct err *err)
{
    struct commit *c = ctx;
    struct hash weights;
    if (c->drafts)
        return engine_commit_drafter(engine, &c->epoch, err);
    bool is_known = engine_wants_digest(engine) && digest(c->update, &weights, err) == RC_OK;
    return engine_commit_weights(engine, c->recomputes, is_known ? &weights : NULL, &c->epoch, err);
}

static enum rc give_up(struct engine *engine, void *ctx, struct err *err)
{
    const Update *self = ctx;
    (void)err;
    engine_abort_update(engine, !self->drafts && update_has_written(self->update));
    return RC_OK;
}

/* ---- lent tensors ---------------------------------------------------------------------------------------------------- */

/* Keeps the tensors of a batch alive before they are written. */
static int hold_lent(Update *self, struct py_batch *batch)
{
    for (Py_ssize_t i = 0; i < batch->n; i++) {
        struct py_batch_item *item = &batch->items[i];
        if (item->tensor.keeps && py_model_keep(self->model, NULL, item->tensor.keeps) < 0)
            return -1;
        item->is_held = item->tensor.keeps != NULL;
    }
    return 0;
}

/* After a batch is written: forgets tensors that the model no longer reads. */
static int settle_lent(Update *self, struct py_batch *batch)
{
    for (Py_ssize_t i = 0; i < batch->n; i++) {
        struct py_batch_item *item = &batch->items[i];
        const struct update_entry *entry = update_find(self->update, item->text);
        if (entry && py_model_keep(self->model, item->name, entry->lent_bytes ? item->tensor.keeps : NULL) < 0)
            return -1;
    }
    return py_model_keep(self->model, NULL, NULL);
}

/* Checks the whole batch, then writes it. A check of values uses the device, so it holds the engine's steps first. */
static PyObject *put(Update *self, struct py_batch *batch)
{
    struct err err;
    enum rc rc;
    bool uses_device = batch->wants_finite || update_reads_values(self->update);
    if ((uses_device || team_hosts(self->team)) && hold_steps(self) < 0) /* other hosts are told between steps */
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    rc = py_batch_check(batch, self->update, &err);
    Py_END_ALLOW_THREADS
    if (rc)
        return py_raise(&err);
    PyObject *skipped = py_batch_skipped(batch);
    if (!skipped || PyList_Size(skipped) == batch->n)
        return skipped;
    if (hold_steps(self) < 0 || (batch->lends && hold_lent(self, batch) < 0))
        return Py_DECREF(skipped), NULL;
    Py_BEGIN_ALLOW_THREADS
    rc = py_batch_write(batch, self->update, &err);
    Py_END_ALLOW_THREADS
    if (rc)
        py_raise(&err);
    else if (settle_lent(self, batch) == 0)
        return skipped;
    Py_DECREF(skipped);
    return NULL;
}

/* Ends a call that began with `begin`. */
static PyObject *put_taken(Update *self, struct py_batch *batch, bool is_taken)
{
    PyObject *skipped = is_taken ? put(self, batch) : NULL;
    py_batch_free(batch);
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
    struct py_batch batch = {.wants_finite = wants_finite, .lends = lends, .team = self->team};
    const struct py_memory memory = {.ordinal = self->ordinal, .stream = (uintptr_t)stream};
    return put_taken(self, &batch, py_batch_take_tensors(&batch, self->update, list, &memory));
}

/* Checks the items of a later write_memory without writing. */
static PyObject *check_memory(PyObject *object, PyObject *list)
{
    Update *self = (Update *)object;
    if (!PyList_Check(list))
        return PyErr_Format(PyExc_TypeError, "check_memory: wanted a list");
    if (!begin(self))
        return NULL;
    struct py_batch batch = {.has_no_values = true};
    struct err err;
    bool is_taken = py_batch_take_memory(&batch, list, &(struct py_memory){.on_device = false});
    if (is_taken && py_batch_check(&batch, self->update, &err)) {
        py_raise(&err);
        is_taken = false;
    }
    py_batch_free(&batch);
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
    struct py_batch batch = {.wants_finite = wants_finite, .team = self->team};
    const struct py_memory memory = {.on_device = on_device, .stream = (uintptr_t)stream};
    return put_taken(self, &batch, py_batch_take_memory(&batch, list, &memory));
}

static PyObject *write_shared(PyObject *object, PyObject *args)
{
    Update *self = (Update *)object;
    PyObject *list;
    int wants_finite = 0;
    if (!PyArg_ParseTuple(args, "O!|p:write_shared", &PyList_Type, &list, &wants_finite) || !begin(self))
        return NULL;
    struct py_batch batch = {.wants_finite = wants_finite, .team = self->team};
    return put_taken(self, &batch, py_batch_take_shared(&batch, list));
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
    struct commit c = {self->update, PyObject_IsTrue(recomputes) == 1, self->drafts, 0};
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
    if (is_held && !rc)
        rc = team_weights_elsewhere(self->team, &(struct weight_call){.call = TEAM_SETTLE, .name = ""}, NULL, &err);
    Py_END_ALLOW_THREADS
    if (rc)
        py_raise(&err);
    self->is_over = is_held && !rc && py_engine_call(self->engine, commit, &c) == 0;
    py_model_return(self->model);
    return self->is_over ? PyLong_FromUnsignedLong(c.epoch) : NULL;
}

static PyObject *abort_all(PyObject *object, PyObject *args)
{
    (void)args;
    Update *self = (Update *)object;
    if (self->is_over || !self->update)
        Py_RETURN_NONE;
    self->is_over = true;
    if (self->is_held && py_model_borrow(self->model)) {
        team_weights_elsewhere(self->team, &(struct weight_call){.call = TEAM_END_UPDATE, .name = ""}, NULL, NULL);
        py_model_return(self->model);
    }
    PyErr_Clear(); /* the model is closed */
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
    const Update *self;
    struct py_batch_item *item;
    bool has_tensor;
    struct tensor_sum sum;
};

static enum rc add_up(struct engine *engine, void *ctx, struct err *err)
{
    struct sum_of *s = ctx;
    enum rc rc = refuse_sleep(engine, NULL, err);
    if (!rc)
        rc = engine_settle(engine, err);
    uint64_t others = 0;
    if (!rc)
        rc = update_sum(s->self->update, s->item->text, s->has_tensor ? &s->item->tensor.tensor : NULL, &s->sum, &s->item->fate,
                        err);
    if (!rc && s->item->fate != UPDATE_SKIPPED)
        rc = py_batch_tell(s->self->team, (struct weight_call){.call = TEAM_SUM}, s->item, s->has_tensor, &others, err);
    s->sum.sum += others;
    return rc;
}

/* checksum(name, tensor=None, stream=0) -> the checksum, or None if the name is skipped. */
static PyObject *checksum(PyObject *object, PyObject *args)
{
    Update *self = (Update *)object;
    PyObject *name, *tensor = Py_None, *result = NULL;
    unsigned long long stream = 0;
    if (!PyArg_ParseTuple(args, "U|OK:checksum", &name, &tensor, &stream) || !begin(self))
        return NULL;
    struct py_batch_item item = {.text = PyUnicode_AsUTF8AndSize(name, NULL)};
    struct sum_of s = {self, &item, tensor != Py_None, {0, 0}};
    const struct py_memory memory = {.ordinal = self->ordinal, .stream = (uintptr_t)stream};
    bool is_taken = item.text && (!s.has_tensor || py_batch_take_tensor(&item, self->update, tensor, &memory));
    if (is_taken && py_engine_call(self->engine, add_up, &s) == 0)
        result = item.fate == UPDATE_SKIPPED ? Py_NewRef(Py_None) : PyLong_FromUnsignedLongLong(s.sum.sum);
    py_tensor_release(&item.tensor);
    py_model_return(self->model);
    return result;
}

static PyObject *takes(PyObject *none, PyObject *name)
{
    (void)none;
    const char *text = PyUnicode_AsUTF8AndSize(name, NULL);
    return text ? PyBool_FromLong(update_takes(dtype_from_name(text))) : NULL;
}

static PyMethodDef methods[] = {
    {"takes", takes, METH_O | METH_STATIC, "Whether floats can be written to weights that are stored as this type."},
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
