/* py_tensor.h: a look at anybody's tensor, without a framework: whatever has __dlpack__ and __dlpack_device__, or NumPy's
 * __array_interface__. What is looked at stays alive until it is released. */
#ifndef LLMPY_PY_TENSOR_H
#define LLMPY_PY_TENSOR_H

#include "py.h"

#include "../program/update.h"

/* A tensor as it was found. */
struct py_tensor {
    struct update_tensor tensor;
    PyObject *keeps; /* the object, or its DLPack capsule */
    PyObject *kept;  /* what `keeps` was made from */
};

/* ordinal: of the CUDA device that tensors may lie on besides host memory; below 0: none.
 * stream: of that device, on which the tensor was produced, which then lies there; 0: it may lie anywhere, and its producer is
 * asked to make the default stream wait for it.
 * A tensor of a type that we do not have is taken all the same, with dtype DTYPE_NONE. 0, or -1 with an exception. */
int py_tensor_take(PyObject *object, int ordinal, uintptr_t stream, struct py_tensor *tensor);
void py_tensor_release(struct py_tensor *tensor);

#endif
