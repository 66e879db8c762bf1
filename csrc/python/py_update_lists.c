/* py_update_lists.c: see py_update_lists.h. */
#include "py_update_lists.h"

#include "../base/dtype.h"
#include "py.h"

static bool is_any(const struct update_entry *entry) { return entry->name != NULL; }
static bool is_lent(const struct update_entry *entry) { return entry->lent_bytes > 0; }
static bool is_repeated(const struct update_entry *entry) { return entry->n_writes > 1; }

static int append(PyObject *list, PyObject *item)
{
    int result = item ? PyList_Append(list, item) : -1;
    Py_XDECREF(item);
    return result;
}

PyObject *py_update_names(const struct update *update, PyObject *which)
{
    static const struct {
        const char *name;
        bool (*is_wanted)(const struct update_entry *entry);
    } LISTS[] = {{"missing", update_is_missing}, {"repeated", is_repeated}, {"lent", is_lent}, {"all", is_any}};
    PyObject *list = PyList_New(0);
    for (size_t l = 0; l < sizeof LISTS / sizeof *LISTS; l++)
        for (uint32_t i = 0; list && update && i < update_n_entries(update); i++)
            if (PyUnicode_CompareWithASCIIString(which, LISTS[l].name) == 0 && LISTS[l].is_wanted(update_entry(update, i)) &&
                append(list, PyUnicode_FromString(update_entry(update, i)->name)) < 0)
                Py_CLEAR(list);
    return list;
}

PyObject *py_update_rows(const struct update *update)
{
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list && update && i < update_n_entries(update); i++) {
        struct err err = {0};
        struct update_rows rows;
        if (update_rows(update, i, &rows, &err)) {
            Py_DECREF(list);
            return py_raise(&err);
        }
        if (rows.rows && append(list, Py_BuildValue("(sKs(II)K)", update_entry(update, i)->name,
                                                       (unsigned long long)(uintptr_t)rows.rows, dtype_info(rows.dtype)->name,
                                                       rows.n_rows, rows.n_cols, (unsigned long long)rows.row_bytes)) < 0)
            Py_CLEAR(list);
    }
    return list;
}
