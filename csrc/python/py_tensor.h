/* py_tensor.h: a view of a Python tensor that needs no framework: of any object with __dlpack__ and __dlpack_device__, or with
 * NumPy's __array_interface__. The view keeps the object alive until py_tensor_release. */
#ifndef LLMPY_PY_TENSOR_H
#define LLMPY_PY_TENSOR_H

#include "py.h"

#include "../program/update.h"

/* A view of a tensor, and the references that keep its memory alive. */
struct py_tensor {
    struct update_tensor tensor;
    PyObject *keeps; /* the object, or its DLPack capsule */
    PyObject *kept;  /* the object that `keeps` was made from */
};

/* Makes a view of a tensor in host memory or on one CUDA device. 0, or -1 with an exception set.
 * ordinal: the CUDA device; below 0: host memory only.
 * stream: the stream of the device that produced the tensor; the tensor must then be on the device. 0: the tensor may be in
 * either memory, and the producer is asked to make the default stream wait for it.
 * A tensor of an unsupported type is accepted, with dtype DTYPE_NONE. */
int py_tensor_take(PyObject *object, int ordinal, uintptr_t stream, struct py_tensor *tensor);
void py_tensor_release(struct py_tensor *tensor);

#endif
