/* py_module.c: the module llmpy._core. */
#include "py_program.h"

#include "../../kernels/cpu/backend_cpu.h"
#include "../base/mem.h"
#include "../engine/driver.h"
#include "../program/backend_library.h"
#include "../program/model.h"

#include <stdio.h>

#ifndef LLMPY_COMPILER
#define LLMPY_COMPILER "unknown"
#endif
#ifndef LLMPY_VERSION
#define LLMPY_VERSION "0"
#endif

#ifdef __aarch64__
#define ISAS "neon"
#else
#define ISAS "avx2, avx512"
#endif

static PyObject *build_info(PyObject *self, PyObject *args)
{
    (void)self;
    (void)args;
    return Py_BuildValue("{ssssss}", "version", LLMPY_VERSION, "compiler", LLMPY_COMPILER, "isas", ISAS);
}

static PyObject *cpu_isas(PyObject *self, PyObject *args)
{
    (void)self;
    (void)args;
    PyObject *list = PyList_New(0);
    static const char *const NAMES[] = {"neon", "avx2", "avx512"};
    for (size_t i = 0; list && i < sizeof NAMES / sizeof *NAMES; i++) {
        if (!cpu_has_isa(NAMES[i]))
            continue;
        PyObject *name = PyUnicode_FromString(NAMES[i]);
        if (!name || PyList_Append(list, name) < 0)
            Py_CLEAR(list);
        Py_XDECREF(name);
    }
    return list;
}

static PyObject *cpu_threads(PyObject *self, PyObject *args)
{
    (void)self;
    (void)args;
    return PyLong_FromUnsignedLong(backend_cpu_threads());
}

/* device_info(device, library, wants_free=False) -> (name, UUID, total bytes, free bytes, kernels); the backend's name and
 * zeros if it does not describe devices. Raises the reason if the device cannot be used. */
static PyObject *device_info(PyObject *self, PyObject *args)
{
    (void)self;
    const char *device, *library;
    int wants_free = 0;
    if (!PyArg_ParseTuple(args, "ss|p", &device, &library, &wants_free))
        return NULL;
    const struct backend *backend;
    struct device_info info = {0};
    struct err err = {0};
    enum rc rc = backend_find(device, library, &backend, &err);
    if (!rc && backend->device_info)
        rc = backend->device_info(device, wants_free, &info, &err);
    else if (!rc)
        snprintf(info.name, sizeof info.name, "%s", backend->name);
    if (rc)
        return py_raise(&err);
    return Py_BuildValue("ssKKs", info.name, info.uuid, info.total_bytes, info.free_bytes, info.kernels);
}

/* device_traits(device, library) -> dict of struct device_traits */
static PyObject *device_traits(PyObject *self, PyObject *args)
{
    (void)self;
    const char *device, *library;
    if (!PyArg_ParseTuple(args, "ss", &device, &library))
        return NULL;
    const struct backend *backend;
    struct err err = {0};
    if (backend_find(device, library, &backend, &err))
        return py_raise(&err);
    const struct device_traits *t = backend->traits;
    return Py_BuildValue("{sOsIsIsssI}", "has_host_memory", t->has_host_memory ? Py_True : Py_False, "default_tokens",
                         t->default_tokens, "default_seqs", t->default_seqs, "quantised_dtype",
                         dtype_info(t->quantised_dtype)->name, "library_rows", t->library_rows);
}

static PyObject *allocation_count(PyObject *self, PyObject *args)
{
    (void)self;
    (void)args;
    return PyLong_FromUnsignedLongLong(mem_count());
}

static PyObject *held_count(PyObject *self, PyObject *args)
{
    (void)self;
    (void)args;
    return PyLong_FromUnsignedLongLong(mem_n_held());
}

static PyObject *fail_allocation_after(PyObject *self, PyObject *number)
{
    (void)self;
    long long n = PyLong_AsLongLong(number);
    if (n == -1 && PyErr_Occurred())
        return NULL;
    mem_fail_after(n);
    Py_RETURN_NONE;
}

/* Adds the numbers that Python needs, under their names in C. */
static int add_numbers(PyObject *module)
{
#define NUMBER(name) {#name, name}
    static const struct {
        const char *name;
        long number;
    } numbers[] = {
        NUMBER(PAUSE_WAIT), NUMBER(PAUSE_KEEP), NUMBER(PAUSE_ABORT), NUMBER(PART_WEIGHTS), NUMBER(PART_POOL),
        NUMBER(PART_SCHEDULING), NUMBER(HOLD_UPDATE), NUMBER(HOLD_TORN), NUMBER(HOLD_SCHEDULING), NUMBER(HOLD_WEIGHTS),
        NUMBER(HOLD_POOL), NUMBER(DRIVER_IDLE), NUMBER(DRIVER_HAS_ROOM), NUMBER(DRIVER_PAUSED), NUMBER(DRIVER_DEAD),
        NUMBER(DRIVER_CLOSED), NUMBER(DRIVER_BOUNDARY), NUMBER(ADAPTIVE_DRAFTS), NUMBER(MOST_GRAPH_ROWS),
    };
#undef NUMBER
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (PyModule_AddIntConstant(module, numbers[i].name, numbers[i].number) < 0)
            return -1;
    return 0;
}

static int module_exec(PyObject *module)
{
    int (*const registers[])(PyObject *) = {py_checkpoint_register, py_model_register, py_engine_register,
                                                 py_async_engine_register, py_update_register, py_ipc_register};
    for (size_t i = 0; i < sizeof registers / sizeof *registers; i++)
        if (registers[i](module) < 0)
            return -1;
    return add_numbers(module);
}

static PyMethodDef methods[] = {
    {"build_info", build_info, METH_NOARGS, "Compiler, version and the CPU's instruction sets of this build."},
    {"cpu_threads", cpu_threads, METH_NOARGS, "Threads of an engine on the CPU: the physical cores that it may use."},
    {"cpu_isas", cpu_isas, METH_NOARGS, "Instruction sets of this processor that have kernels, the best last."},
    {"device_info", device_info, METH_VARARGS, "Name, UUID and total bytes of a device, and its free bytes on request."},
    {"device_traits", device_traits, METH_VARARGS, "The traits of a backend's devices."},
    {"operations", py_operations, METH_NOARGS, "Names of the operations of programs, and of the attributes of each."},
    {"operations_by_column", py_operations_by_column, METH_NOARGS, "Names of the operations whose columns ranks may share."},
    {"plan", py_plan, METH_VARARGS, "The steps of a program's plan, and where their tensors lie."},
    {"page_bytes", py_page_bytes, METH_VARARGS, "Bytes of a page of a program's pool, from the options of its model."},
    {"backend_operations", py_backend_operations, METH_VARARGS, "Where a backend runs each operation."},
    {"backend_table", py_backend_table, METH_VARARGS, "Address of the struct backend of a device and its library."},
    {"weights_fill", py_weights_fill, METH_VARARGS, "Fills rows of a backend's matrix with the values of load_format 'dummy'."},
    {"quantise", py_quantise, METH_VARARGS, "Rows of float32, rounded to blocks of a type as at load."},
    {"image_resize", py_image_resize, METH_VARARGS, "An image resized with Pillow's filter of a number: its bytes."},
    {"image_patches", py_image_patches, METH_VARARGS, "Cuts an image to patches, their channels apart, in merge order."},
    {"allocation_count", allocation_count, METH_NOARGS, "Host allocations made so far by the core."},
    {"held_count", held_count, METH_NOARGS, "Host allocations of the core that have not been freed."},
    {"fail_allocation_after", fail_allocation_after, METH_O, "Makes the n-th next host allocation fail; negative: none."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)module_exec},
    {0, NULL},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "llmpy._core", "The C core of llmpy.", 0, methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__core(void)
{
    return PyModuleDef_Init(&definition);
}
