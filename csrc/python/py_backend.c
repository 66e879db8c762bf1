/* py_backend.c: which operations a backend has. And what kernels/binding needs to call a backend's functions directly: the
 * address of the backend's table, and a function that writes the dummy values of csrc/base/dummy.h to a matrix. */
#include "py.h"

#include "../program/backend_library.h"
#include "../program/composed.h"
#include "../program/weights.h"

PyObject *py_backend_table(PyObject *module, PyObject *args)
{
    (void)module;
    const char *device, *library;
    const struct backend *table;
    struct err err = {0};
    if (!PyArg_ParseTuple(args, "ss", &device, &library))
        return NULL;
    if (backend_find(device, library, &table, &err))
        return py_raise(&err);
    return PyLong_FromVoidPtr((void *)table);
}

/* found[name] = where the backend's devices run an operation that needs an entry: "device", "host", or "refused". */
static int note_operation(PyObject *found, const struct backend *backend, const char *name, size_t entry)
{
    const char *where = backend_has(backend, entry) ? "device" : entry_is_composed(entry) ? "host" : "refused";
    PyObject *text = PyUnicode_FromString(where);
    int failed = !text || PyDict_SetItemString(found, name, text);
    Py_XDECREF(text);
    return failed;
}

/* backend_operations(device, library) -> dict of the operations of programs, and of the three that steps add */
PyObject *py_backend_operations(PyObject *module, PyObject *args)
{
    (void)module;
    const char *device, *library;
    const struct backend *backend;
    struct err err = {0};
    if (!PyArg_ParseTuple(args, "ss", &device, &library))
        return NULL;
    if (backend_find(device, library, &backend, &err))
        return py_raise(&err);
    PyObject *found = PyDict_New();
    for (uint32_t code = 0; found && code < OP_COUNT; code++)
        if (note_operation(found, backend, op_name(code), op_entry(code)))
            Py_CLEAR(found);
#define ROW(name) \
    if (found && note_operation(found, backend, #name, offsetof(struct backend, name))) \
        Py_CLEAR(found);
    ROW(rope_table)
    ROW(scale_logits)
    ROW(spread_logits)
    ROW(sample)
#undef ROW
    return found;
}

PyObject *py_weights_fill(PyObject *module, PyObject *args)
{
    (void)module;
    unsigned long long table, ctx, matrix, source_row, step, key;
    uint32_t part, dtype, cols;
    struct row_run rows;
    struct err err = {0};
    if (!PyArg_ParseTuple(args, "KKKII(IIKK)IK", &table, &ctx, &matrix, &part, &dtype, &rows.first_row, &rows.n_rows,
                          &source_row, &step, &cols, &key))
        return NULL;
    rows.source_row = source_row;
    rows.step = step;
    enum rc rc = weights_fill((const struct backend *)(uintptr_t)table, (void *)(uintptr_t)ctx,
                              (struct matrix *)(uintptr_t)matrix, part, dtype, &rows, cols, key, &err);
    return rc ? py_raise(&err) : Py_NewRef(Py_None);
}
