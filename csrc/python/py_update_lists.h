/* py_update_lists.h: lists of an update's weights, for py_update.c. NULL as the update gives an empty list. */
#ifndef LLMPY_PY_UPDATE_LISTS_H
#define LLMPY_PY_UPDATE_LISTS_H

#include <Python.h>

#include "../program/update.h"

/* Names that are "missing" (without a write, except constants), "repeated" (written more than once) or "lent" (read in place
 * since this update). */
PyObject *py_update_names(const struct update *update, PyObject *which);
/* [(name, address, type, (rows, columns), bytes between rows)] of the weights whose memory can be shared. */
PyObject *py_update_rows(const struct update *update);

#endif
