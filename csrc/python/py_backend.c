/* py_backend.c: what kernels/binding.py needs from the core to call a backend's functions directly: the address of the
 * backend's table, and a function that writes the dummy values of csrc/base/dummy.h to a matrix. */
#include "py.h"

#include "../program/backend_library.h"
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
