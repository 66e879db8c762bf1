/* py_backend.c: which operations a backend has, and rounding to stored types. And what kernels/binding needs to call a
 * backend's functions directly: the address of the backend's table, and a function that writes the dummy values of
 * csrc/base/dummy.h to a matrix. */
#include "py.h"

#include "../base/quantise.h"
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

/* quantise(values, cols, dtype) -> bytes: rows of float32, rounded to a type */
PyObject *py_quantise(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer values;
    Py_ssize_t cols;
    const char *name;
    if (!PyArg_ParseTuple(args, "y*ns", &values, &cols, &name))
        return NULL;
    uint32_t dtype = dtype_from_name(name);
    size_t n = (size_t)values.len / sizeof(float), rows = cols > 0 ? n / (size_t)cols : 0;
    bool is_known = quantise_has(dtype) && rows * (size_t)cols * sizeof(float) == (size_t)values.len, fits = true;
    size_t row_bytes = is_known ? dtype_row_bytes(dtype, (size_t)cols) : 0;
    PyObject *result = is_known ? PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(rows * row_bytes)) : NULL;
    if (result) {
        char *to = PyBytes_AsString(result);
        Py_BEGIN_ALLOW_THREADS
        for (size_t i = 0; i < rows && fits; i++)
            fits = quantise_row(dtype, (const float *)values.buf + i * (size_t)cols, (size_t)cols, to + i * row_bytes);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&values);
    if (result && fits)
        return result;
    Py_XDECREF(result);
    return PyErr_Format(PyExc_ValueError, fits ? "quantise: wanted rows of float32 and a type that llmpy rounds to, have %s"
                                               : "%s: wanted " QUANTISE_WANTED ", have others", name);
}
