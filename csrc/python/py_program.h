/* py_program.h: makes a struct program from the spec dictionary. The caller owns the program. NULL with an exception set. */
#ifndef LLMPY_PY_PROGRAM_H
#define LLMPY_PY_PROGRAM_H

#include "py.h"

#include "../program/program.h"

struct program *py_program_parse(PyObject *spec);
/* A dictionary from each operation's name to a tuple of its attributes' names. */
PyObject *py_operations(PyObject *module, PyObject *unused);
PyObject *py_operations_by_column(PyObject *module, PyObject *unused);
PyObject *py_plan(PyObject *module, PyObject *args); /* py_plan.c */

#endif
