/* py.h: declarations shared by the files of csrc/python. Only these C files use Python's API: they parse arguments, release the
 * GIL and turn errors into exceptions. Limited API of CPython 3.11. */
#ifndef LLMPY_PY_H
#define LLMPY_PY_H

#include <Python.h>

#include "../base/status.h"
#include "../engine/engine.h"
#include "../program/checkpoint.h"

/* Raises the exception of an err (classes of llmpy.errors); returns NULL. */
PyObject *py_raise(const struct err *err);
/* The class llmpy.errors.<name>, or NULL with an exception set. */
PyObject *py_error_class(const char *name);

/* py_type.c. py_add_type adds a type to the module under the last part of its name. py_allocate makes a zeroed object of a heap
 * type, and py_deallocate frees it. */
int py_add_type(PyObject *module, PyType_Spec *spec);
void *py_allocate(PyTypeObject *type);
void py_deallocate(PyObject *object);

/* Each file adds its type to the module; 0 or -1 with an exception set. */
int py_checkpoint_register(PyObject *module);
PyObject *py_backend_operations(PyObject *module, PyObject *args); /* py_backend.c */
PyObject *py_backend_table(PyObject *module, PyObject *args);
PyObject *py_weights_fill(PyObject *module, PyObject *args);
PyObject *py_quantise(PyObject *module, PyObject *args);
PyObject *py_image_resize(PyObject *module, PyObject *args); /* py_image.c */
PyObject *py_image_patches(PyObject *module, PyObject *args);
int py_model_register(PyObject *module);
PyObject *py_page_bytes(PyObject *module, PyObject *args);
int py_engine_register(PyObject *module);
int py_async_engine_register(PyObject *module);
int py_update_register(PyObject *module);
int py_ipc_register(PyObject *module);

/* The checkpoint of a _core.Checkpoint, or NULL with TypeError. Borrowed: it lives as long as the object. */
struct checkpoint *py_checkpoint_get(PyObject *object);
/* What an engine needs from a _core.Model. All of it lives as long as the object. 0, or -1 with an exception set. */
struct model_parts {
    struct kv_layout layout;
    uint32_t n_pages, vocab_size, max_num_seqs, max_num_batched_tokens, max_model_len;
    struct runner runner;
};
int py_model_get(PyObject *object, struct model_parts *parts);
/* The team of a _core.Model, or NULL with an exception set. The team cannot be closed before py_model_return. */
struct team;
struct team *py_model_borrow(PyObject *object);
void py_model_return(PyObject *object);
/* Keeps alive what weights are read from (matrix_borrow). With a name: `what` replaces what the weight of that name had; NULL:
 * nothing. Without a name: adds `what` to those that any weight may be read from; NULL: forgets them. 0, or -1 with an
 * exception set. */
int py_model_keep(PyObject *object, PyObject *name, PyObject *what);
/* py_adapters.c: methods of _core.Model. */
PyObject *py_adapter_places(PyObject *model, PyObject *unused);
PyObject *py_lend_adapter(PyObject *model, PyObject *args);
PyObject *py_holds_adapter(PyObject *model, PyObject *number);
PyObject *py_remove_adapter(PyObject *model, PyObject *number);
PyObject *py_running_adapters(PyObject *model, PyObject *unused);
PyObject *py_tap(PyObject *model, PyObject *args); /* py_tap.c */

#endif
