/* py_program.h: from the spec dictionary to a struct program, which the caller owns. NULL with an exception set. */
#ifndef LLMPY_PY_PROGRAM_H
#define LLMPY_PY_PROGRAM_H

#include "py.h"

#include "../program/program.h"

struct program *py_program_parse(PyObject *spec);
/* A dict of every operation's name and a tuple of its attributes' names. */
PyObject *py_operations(PyObject *module, PyObject *unused);

#endif
