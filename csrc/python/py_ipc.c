/* py_ipc.c: memory of other processes (_core.ImportedMemory), groups of processes (_core.NcclGroup), and the functions that
 * make their arguments. One thread at a time may use an object. Calls that wait release the GIL. */
#define PY_SSIZE_T_CLEAN
#include "py.h"

#include "../program/backend_library.h"

#include <string.h>

#define HANDLE_BYTES 64

static const struct peers *find_peers(const char *device, const char *library, struct err *err)
{
    const struct backend *backend;
    if (backend_find(device, library, &backend, err))
        return NULL;
    if (!backend->peers)
        err_set(err, RC_UNSUPPORTED, "memory of other processes: wanted a CUDA device, have %s", device);
    return backend->peers;
}

/* ---- imported memory ---------------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    const struct peers *peers;
    struct imported *imported;
    void *memory;
} ImportedMemory;

/* ImportedMemory(device, library, handle: bytes | int, size_bytes, event: bytes | None) */
static PyObject *imported_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    const char *event = NULL;
    Py_ssize_t n_event = 0;
    const char *library;
    unsigned long long size_bytes;
    PyObject *handle;
    struct import_args a = {.descriptor = -1};
    if (kwargs && PyDict_Size(kwargs))
        return PyErr_Format(PyExc_TypeError, "ImportedMemory() takes no arguments by name");
    if (!PyArg_ParseTuple(args, "ssOK|z#", &a.device, &library, &handle, &size_bytes, &event, &n_event))
        return NULL;
    if ((PyBytes_Check(handle) && PyBytes_Size(handle) != HANDLE_BYTES) || (event && n_event != HANDLE_BYTES))
        return PyErr_Format(PyExc_ValueError, "handle, event: wanted 64 bytes");
    if (PyBytes_Check(handle)) {
        a.handle = (const uint8_t *)PyBytes_AsString(handle);
    } else {
        a.descriptor = (int)PyLong_AsLong(handle);
        if (PyErr_Occurred())
            return NULL;
    }
    a.event = (const uint8_t *)event;
    a.size_bytes = size_bytes;
    struct err err = {0};
    ImportedMemory *self = py_allocate(type);
    if (!self)
        return NULL;
    self->peers = find_peers(a.device, library, &err);
    PyThreadState *gil = PyEval_SaveThread();
    if (self->peers && self->peers->import_memory(&a, &self->imported, &self->memory, &err))
        self->imported = NULL;
    PyEval_RestoreThread(gil);
    if (self->imported)
        return (PyObject *)self;
    Py_DECREF(self);
    return py_raise(&err);
}

static PyObject *imported_close(PyObject *object, PyObject *args)
{
    (void)args;
    ImportedMemory *self = (ImportedMemory *)object;
    struct imported *imported = self->imported;
    self->imported = NULL;
    self->memory = NULL;
    if (imported) {
        PyThreadState *gil = PyEval_SaveThread();
        self->peers->release_memory(imported);
        PyEval_RestoreThread(gil);
    }
    Py_RETURN_NONE;
}

static void imported_dealloc(PyObject *object)
{
    ImportedMemory *self = (ImportedMemory *)object;
    if (self->imported)
        self->peers->release_memory(self->imported);
    py_deallocate(object);
}

static PyObject *imported_address(PyObject *object, void *closure)
{
    (void)closure;
    return PyLong_FromVoidPtr(((ImportedMemory *)object)->memory);
}

static PyMethodDef imported_methods[] = {
    {"close", imported_close, METH_NOARGS, "Closes the memory; may be called twice."},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef imported_getset[] = {
    {"address", imported_address, NULL, "The memory's address on the device; 0 after close.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot imported_slots[] = {
    {Py_tp_new, (void *)imported_new},
    {Py_tp_dealloc, (void *)imported_dealloc},
    {Py_tp_methods, imported_methods},
    {Py_tp_getset, imported_getset},
    {Py_tp_doc, (void *)"Device memory that another process exported."},
    {0, NULL},
};
static PyType_Spec imported_spec = {
    "llmpy._core.ImportedMemory", sizeof(ImportedMemory), 0, Py_TPFLAGS_DEFAULT, imported_slots,
};

/* export_memory(device, library, address) -> (handle, offset, size of the allocation) */
static PyObject *export_memory(PyObject *module, PyObject *args)
{
    (void)module;
    const char *device, *library;
    unsigned long long address;
    if (!PyArg_ParseTuple(args, "ssK", &device, &library, &address))
        return NULL;
    struct err err = {0};
    uint8_t handle[HANDLE_BYTES];
    size_t offset = 0, size_bytes = 0;
    const struct peers *peers = find_peers(device, library, &err);
    if (!peers || peers->export_memory(device, (const void *)(uintptr_t)address, handle, &offset, &size_bytes, &err))
        return py_raise(&err);
    return Py_BuildValue("y#nn", (const char *)handle, (Py_ssize_t)HANDLE_BYTES, (Py_ssize_t)offset, (Py_ssize_t)size_bytes);
}

/* ---- groups ------------------------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    const struct peers *peers;
    struct process_group *group;
} NcclGroup;

/* nccl_id(library, nccl) -> bytes. Rank 0 calls this for a new group and sends the id to the other ranks. */
static PyObject *nccl_id(PyObject *module, PyObject *args)
{
    (void)module;
    const char *library, *nccl;
    if (!PyArg_ParseTuple(args, "ss", &library, &nccl))
        return NULL;
    struct err err = {0};
    uint8_t id[GROUP_ID_BYTES];
    const struct peers *peers = find_peers("cuda", library, &err);
    if (!peers || peers->group_id(nccl, id, &err))
        return py_raise(&err);
    return PyBytes_FromStringAndSize((const char *)id, sizeof id);
}

/* NcclGroup(device, library, nccl, id, rank, n_ranks) */
static PyObject *group_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    struct group_options options = {0};
    const char *library, *id;
    Py_ssize_t n_id;
    if (kwargs && PyDict_Size(kwargs))
        return PyErr_Format(PyExc_TypeError, "NcclGroup() takes no arguments by name");
    if (!PyArg_ParseTuple(args, "sssy#II", &options.device, &library, &options.nccl, &id, &n_id, &options.rank,
                          &options.n_ranks))
        return NULL;
    if (n_id != GROUP_ID_BYTES)
        return PyErr_Format(PyExc_ValueError, "id: wanted 128 bytes, have %zd", n_id);
    options.id = (const uint8_t *)id;
    struct err err = {0};
    NcclGroup *self = py_allocate(type);
    if (!self)
        return NULL;
    self->peers = find_peers(options.device, library, &err);
    PyThreadState *gil = PyEval_SaveThread();
    if (self->peers && self->peers->group_open(&options, &self->group, &err))
        self->group = NULL;
    PyEval_RestoreThread(gil);
    if (self->group)
        return (PyObject *)self;
    Py_DECREF(self);
    return py_raise(&err);
}

static struct process_group *opened(PyObject *object)
{
    struct process_group *group = ((NcclGroup *)object)->group;
    struct err err;
    if (!group) {
        err_set(&err, RC_DEVICE, "NCCL: the group has ended; make another with init_weight_group()");
        err_name(&err, "group", NULL);
        err.code = 0;
        py_raise(&err);
    }
    return group;
}

static int get_slot(unsigned int slot)
{
    if (slot < GROUP_SLOTS)
        return 0;
    PyErr_Format(PyExc_ValueError, "slot: wanted one below %u, have %u", GROUP_SLOTS, slot);
    return -1;
}

static PyObject *group_settle(PyObject *object, PyObject *args)
{
    double seconds;
    struct process_group *group = opened(object);
    if (!group || !PyArg_ParseTuple(args, "d", &seconds))
        return NULL;
    struct err err = {0};
    bool is_done = false;
    PyThreadState *gil = PyEval_SaveThread();
    enum rc rc = ((NcclGroup *)object)->peers->group_settle(group, seconds, &is_done, &err);
    PyEval_RestoreThread(gil);
    return rc ? py_raise(&err) : PyBool_FromLong(is_done);
}

static PyObject *group_wait(PyObject *object, PyObject *args)
{
    double seconds;
    unsigned int slot;
    struct process_group *group = opened(object);
    if (!group || !PyArg_ParseTuple(args, "Id", &slot, &seconds) || get_slot(slot))
        return NULL;
    struct err err = {0};
    bool is_done = false;
    PyThreadState *gil = PyEval_SaveThread();
    enum rc rc = ((NcclGroup *)object)->peers->group_wait(group, slot, seconds, &is_done, &err);
    PyEval_RestoreThread(gil);
    return rc ? py_raise(&err) : PyBool_FromLong(is_done);
}

static PyObject *group_buffer(PyObject *object, PyObject *args)
{
    unsigned int slot;
    unsigned long long size_bytes;
    struct process_group *group = opened(object);
    if (!group || !PyArg_ParseTuple(args, "IK", &slot, &size_bytes) || get_slot(slot))
        return NULL;
    struct err err = {0};
    void *memory = NULL;
    PyThreadState *gil = PyEval_SaveThread();
    enum rc rc = ((NcclGroup *)object)->peers->group_buffer(group, slot, size_bytes, &memory, &err);
    PyEval_RestoreThread(gil);
    return rc ? py_raise(&err) : PyLong_FromVoidPtr(memory);
}

static PyObject *group_copy(PyObject *object, PyObject *args)
{
    unsigned int slot;
    unsigned long long address, size_bytes;
    struct process_group *group = opened(object);
    if (!group || !PyArg_ParseTuple(args, "IKK", &slot, &address, &size_bytes) || get_slot(slot))
        return NULL;
    struct err err = {0};
    void *copy = NULL;
    PyThreadState *gil = PyEval_SaveThread();
    enum rc rc = ((NcclGroup *)object)->peers->group_copy(group, slot, (void *)(uintptr_t)address, size_bytes, &copy, &err);
    PyEval_RestoreThread(gil);
    return rc ? py_raise(&err) : PyLong_FromVoidPtr(copy);
}

static PyObject *group_greet(PyObject *object, PyObject *args)
{
    (void)args;
    struct process_group *group = opened(object);
    if (!group)
        return NULL;
    struct err err = {0};
    PyThreadState *gil = PyEval_SaveThread();
    enum rc rc = ((NcclGroup *)object)->peers->group_greet(group, &err);
    PyEval_RestoreThread(gil);
    return rc ? py_raise(&err) : Py_NewRef(Py_None);
}

static PyObject *group_broadcast(PyObject *object, PyObject *args)
{
    unsigned int slot;
    unsigned long long address, size_bytes;
    struct process_group *group = opened(object);
    if (!group || !PyArg_ParseTuple(args, "IKK", &slot, &address, &size_bytes) || get_slot(slot))
        return NULL;
    struct err err = {0};
    PyThreadState *gil = PyEval_SaveThread();
    enum rc rc = ((NcclGroup *)object)->peers->group_broadcast(group, slot, (void *)(uintptr_t)address, size_bytes, &err);
    PyEval_RestoreThread(gil);
    return rc ? py_raise(&err) : Py_NewRef(Py_None);
}

static PyObject *group_close(PyObject *object, PyObject *args)
{
    (void)args;
    NcclGroup *self = (NcclGroup *)object;
    struct process_group *group = self->group;
    self->group = NULL;
    if (group) {
        PyThreadState *gil = PyEval_SaveThread();
        self->peers->group_close(group);
        PyEval_RestoreThread(gil);
    }
    Py_RETURN_NONE;
}

static void group_dealloc(PyObject *object)
{
    NcclGroup *self = (NcclGroup *)object;
    if (self->group)
        self->peers->group_close(self->group);
    py_deallocate(object);
}

static PyMethodDef group_methods[] = {
    {"settle", group_settle, METH_VARARGS, "Waits up to n seconds; True if the last call has been enqueued."},
    {"buffer", group_buffer, METH_VARARGS, "Address of a slot's memory, of at least n bytes."},
    {"greet", group_greet, METH_NOARGS, "Sums one float over all ranks, in slot 0."},
    {"broadcast", group_broadcast, METH_VARARGS, "Broadcasts from rank 0's memory to all other ranks."},
    {"wait", group_wait, METH_VARARGS, "Waits up to n seconds; True if the slot's broadcast has completed."},
    {"copy", group_copy, METH_VARARGS, "Copies memory into a slot and returns the slot's address."},
    {"close", group_close, METH_NOARGS, "Ends the group; may be called twice."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot group_slots[] = {
    {Py_tp_new, (void *)group_new},
    {Py_tp_dealloc, (void *)group_dealloc},
    {Py_tp_methods, group_methods},
    {Py_tp_doc, (void *)"Processes that broadcast to each other over NCCL."},
    {0, NULL},
};
static PyType_Spec group_spec = {"llmpy._core.NcclGroup", sizeof(NcclGroup), 0, Py_TPFLAGS_DEFAULT, group_slots};

/* ---- the module --------------------------------------------------------------------------------------------------------- */

static PyMethodDef functions[] = {
    {"export_memory", export_memory, METH_VARARGS, "Handle, offset and size of the allocation that an address lies in."},
    {"nccl_id", nccl_id, METH_VARARGS, "The id of a new group."},
    {NULL, NULL, 0, NULL},
};

int py_ipc_register(PyObject *module)
{
    if (py_add_type(module, &imported_spec) < 0 || py_add_type(module, &group_spec) < 0)
        return -1;
    return PyModule_AddFunctions(module, functions);
}
