/* py_update_batch.h: a list of tensors for py_update.c. */
#ifndef LLMPY_PY_UPDATE_BATCH_H
#define LLMPY_PY_UPDATE_BATCH_H

#include "py_tensor.h"

#include "../program/team_weights.h"

/* Where a tensor lies that update_write reads piece by piece: in a checkpoint, or in a file that another process shares. */
struct py_batch_file {
    const struct checkpoint *checkpoint; /* NULL: the shared file of `descriptor` */
    const struct checkpoint_tensor *stored;
    int descriptor;
    uint64_t offset;
    size_t n_bytes;
};

/* One tensor of a list. */
struct py_batch_item {
    PyObject *name;
    const char *text; /* the name as UTF-8, owned by `name` */
    struct py_tensor tensor;
    struct py_batch_file file; /* used if tensor.tensor.read is set */
    enum update_fate fate;
    bool is_held; /* by the model's dict of lent tensors */
};

/* A list of tensors that an update checks as a whole, then writes. */
struct py_batch {
    struct py_batch_item *items;
    Py_ssize_t n, n_taken;
    bool wants_finite, lends, has_no_values;
    struct team *team; /* its other hosts check and write the tensors, too; NULL: only this host checks them */
};

/* Where the tensors of a list lie. */
struct py_memory {
    int ordinal; /* of the CUDA device of Python's tensors; -1: CPU */
    bool on_device;
    uintptr_t stream; /* on which the caller writes them */
};

/* Views a Python tensor (py_tensor.h), or (checkpoint, name) of a _core.Checkpoint, which must outlive the call. Ignores the
 * tensor if the update skips the item's name. False with an exception set. */
bool py_batch_take_tensor(struct py_batch_item *item, const struct update *update, PyObject *tensor,
                          const struct py_memory *memory);
/* Each of these three makes the batch of a list's items. False with an exception set; py_batch_free frees it in any case. */

/* (name, tensor), as py_batch_take_tensor. */
bool py_batch_take_tensors(struct py_batch *batch, const struct update *update, PyObject *list, const struct py_memory *memory);
/* (name, address, type, shape, strides or None) */
bool py_batch_take_memory(struct py_batch *batch, PyObject *list, const struct py_memory *memory);
/* (name, descriptor, offset, type, shape, strides or None) */
bool py_batch_take_shared(struct py_batch *batch, PyObject *list);
void py_batch_free(struct py_batch *batch);

/* These three need no GIL. py_batch_tell: the call about an item on the team's other hosts; sum: as team_weights_elsewhere. */
enum rc py_batch_tell(struct team *team, struct weight_call call, const struct py_batch_item *item, bool has_tensor,
                      uint64_t *sum, struct err *err);
enum rc py_batch_check(struct py_batch *batch, struct update *update, struct err *err);
enum rc py_batch_write(struct py_batch *batch, struct update *update, struct err *err);
/* The list of the names that the update skipped. */
PyObject *py_batch_skipped(const struct py_batch *batch);

#endif
