/* py_tensor.c: fills a struct update_tensor from DLPack (https://dmlc.github.io/dlpack; version 0 of the structures, which
 * every producer supports) or from NumPy's array interface. */
#include "py_tensor.h"

#include <stdio.h>
#include <string.h>

enum { DL_CPU = 1, DL_CUDA = 2, DL_CUDA_HOST = 3, DL_CUDA_MANAGED = 13 };
enum { DL_INT = 0, DL_UINT = 1, DL_FLOAT = 2, DL_BFLOAT = 4, DL_COMPLEX = 5, DL_BOOL = 6 };

struct dl_tensor {
    void *data;
    struct {
        int32_t type, id;
    } device;
    int32_t n_dims;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides; /* strides NULL: C-contiguous */
    uint64_t byte_offset;
};
struct dl_managed {
    struct dl_tensor tensor;
    void *context;
    void (*deleter)(struct dl_managed *self);
};

/* The number of the default stream in both DLPack and the CUDA runtime. */
#define DEFAULT_STREAM 1

void py_tensor_release(struct py_tensor *t)
{
    if (t->keeps && PyCapsule_IsValid(t->keeps, "dltensor")) {
        struct dl_managed *managed = PyCapsule_GetPointer(t->keeps, "dltensor");
        PyCapsule_SetName(t->keeps, "used_dltensor");
        if (managed->deleter)
            managed->deleter(managed);
    }
    Py_CLEAR(t->keeps);
    Py_CLEAR(t->kept);
}

static void fill_strides(struct update_tensor *t)
{
    int64_t step = 1;
    for (uint32_t i = t->n_dims; i-- > 0; step *= t->shape[i])
        t->strides[i] = step;
}

static int check_dims(long n_dims)
{
    if (n_dims >= 0 && n_dims <= UPDATE_MAX_DIMS)
        return 0;
    PyErr_Format(PyExc_ValueError, "wanted at most %d dimensions, have %ld", UPDATE_MAX_DIMS, n_dims);
    return -1;
}

/* ---- DLPack ------------------------------------------------------------------------------------------------------------- */

static void read_type(const struct dl_tensor *dl, struct update_tensor *t)
{
    static const char *const kinds[] = {"int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
    t->dtype = dl->dtype.lanes != 1                                       ? DTYPE_NONE
               : dl->dtype.code == DL_BFLOAT && dl->dtype.bits == 16 ? DTYPE_BF16
               : dl->dtype.code != DL_FLOAT                               ? DTYPE_NONE
               : dl->dtype.bits == 32                                     ? DTYPE_F32
               : dl->dtype.bits == 16                                     ? DTYPE_F16
                                                                          : DTYPE_NONE;
    const char *kind = dl->dtype.code < sizeof kinds / sizeof *kinds ? kinds[dl->dtype.code] : "type";
    if (dl->dtype.code == DL_BOOL)
        snprintf(t->type, sizeof t->type, "bool");
    else
        snprintf(t->type, sizeof t->type, "%s%u", kind, dl->dtype.bits);
}

static int read_device(const struct dl_tensor *dl, int ordinal, struct update_tensor *t)
{
    bool is_cuda = dl->device.type == DL_CUDA || dl->device.type == DL_CUDA_MANAGED;
    t->is_host = dl->device.type == DL_CPU || dl->device.type == DL_CUDA_HOST;
    if (t->is_host || (is_cuda && ordinal >= 0 && (dl->device.id == ordinal || dl->device.type == DL_CUDA_MANAGED)))
        return 0;
    struct err err;
    char own[24] = "the CPU";
    if (ordinal >= 0)
        snprintf(own, sizeof own, "cuda:%d", ordinal);
    if (is_cuda)
        err_set(&err, RC_UNSUPPORTED, "a tensor on cuda:%d, while the engine is on %s; copy it to %s first", dl->device.id, own,
                ordinal >= 0 ? "that device" : "host memory");
    else
        err_set(&err, RC_UNSUPPORTED, "a tensor on a device of DLPack type %d, the engine is on %s", dl->device.type, own);
    py_raise(&err);
    return -1;
}

static int read_capsule(PyObject *capsule, int ordinal, struct update_tensor *t)
{
    const struct dl_managed *managed = PyCapsule_GetPointer(capsule, "dltensor");
    const struct dl_tensor *dl = managed ? &managed->tensor : NULL;
    if (!dl || check_dims(dl->n_dims) < 0 || read_device(dl, ordinal, t) < 0)
        return -1;
    read_type(dl, t);
    t->data = (const char *)dl->data + dl->byte_offset;
    t->n_dims = (uint32_t)dl->n_dims;
    for (uint32_t i = 0; i < t->n_dims; i++)
        t->shape[i] = dl->shape[i];
    fill_strides(t);
    for (uint32_t i = 0; dl->strides && i < t->n_dims; i++)
        t->strides[i] = dl->strides[i];
    bool is_empty = false;
    for (uint32_t i = 0; i < t->n_dims; i++)
        is_empty |= t->shape[i] == 0;
    if (dl->data || is_empty)
        return 0;
    PyErr_SetString(PyExc_ValueError, "a wrapper around other tensors, without memory of its own; pass what it stands for");
    return -1;
}

/* 1 if the tensor is on a CUDA device, else 0; -1 with an exception set. */
static int is_on_cuda(PyObject *object)
{
    PyObject *device = PyObject_CallMethod(object, "__dlpack_device__", NULL);
    PyObject *type = device ? PySequence_GetItem(device, 0) : NULL;
    long number = type ? PyLong_AsLong(type) : -1;
    Py_XDECREF(type);
    Py_XDECREF(device);
    return PyErr_Occurred() ? -1 : number == DL_CUDA || number == DL_CUDA_MANAGED;
}

static PyObject *call_dlpack(PyObject *object, bool on_cuda, uintptr_t stream)
{
    PyObject *method = on_cuda ? PyObject_GetAttrString(object, "__dlpack__") : NULL;
    if (!on_cuda)
        return PyObject_CallMethod(object, "__dlpack__", NULL);
    PyObject *none = method ? PyTuple_New(0) : NULL;
    PyObject *options = none ? Py_BuildValue("{si}", "stream", stream ? -1 : DEFAULT_STREAM) : NULL;
    PyObject *capsule = options ? PyObject_Call(method, none, options) : NULL;
    Py_XDECREF(options);
    Py_XDECREF(none);
    Py_XDECREF(method);
    return capsule;
}

/* A new reference to the object, detached if it requires a gradient, since such tensors refuse an export. */
static PyObject *detached(PyObject *object)
{
    PyObject *requires_grad = PyObject_GetAttrString(object, "requires_grad");
    if (!requires_grad) {
        PyErr_Clear();
        return Py_NewRef(object);
    }
    int truth = PyObject_IsTrue(requires_grad);
    Py_DECREF(requires_grad);
    return truth < 0 ? NULL : truth ? PyObject_CallMethod(object, "detach", NULL) : Py_NewRef(object);
}

/* ---- NumPy -------------------------------------------------------------------------------------------------------------- */

static int read_numbers(PyObject *tuple, uint32_t n, int64_t *numbers)
{
    for (uint32_t i = 0; i < n; i++) {
        PyObject *item = PySequence_GetItem(tuple, (Py_ssize_t)i);
        numbers[i] = item ? PyLong_AsLongLong(item) : 0;
        Py_XDECREF(item);
        if (PyErr_Occurred())
            return -1;
    }
    return 0;
}

/* Reads the type by its name, since the typestr of ml_dtypes' "bfloat16" says only that an item has two bytes. */
static int read_numpy_type(PyObject *array, PyObject *interface, struct update_tensor *t)
{
    PyObject *typestr = PyDict_GetItemString(interface, "typestr");
    const char *code = typestr ? PyUnicode_AsUTF8AndSize(typestr, NULL) : NULL;
    PyObject *dtype = code ? PyObject_GetAttrString(array, "dtype") : NULL;
    PyObject *name = dtype ? PyObject_GetAttrString(dtype, "name") : NULL;
    const char *text = name ? PyUnicode_AsUTF8AndSize(name, NULL) : NULL;
    if (text) {
        t->dtype = strcmp(text, "bfloat16") == 0 ? DTYPE_BF16
                   : strcmp(code, "<f4") == 0    ? DTYPE_F32
                   : strcmp(code, "<f2") == 0    ? DTYPE_F16
                                                 : DTYPE_NONE;
        snprintf(t->type, sizeof t->type, "%s%.16s", *code == '>' ? "big " : "", text);
    }
    Py_XDECREF(name);
    Py_XDECREF(dtype);
    return text ? 0 : -1;
}

static int read_array(PyObject *array, PyObject *interface, struct update_tensor *t)
{
    PyObject *shape = PyDict_GetItemString(interface, "shape"), *strides = PyDict_GetItemString(interface, "strides");
    PyObject *data = PyDict_GetItemString(interface, "data");
    PyObject *address = data && PyTuple_Check(data) ? PyTuple_GetItem(data, 0) : NULL;
    if (!shape || !address) {
        PyErr_SetString(PyExc_ValueError, "__array_interface__ without shape or address");
        return -1;
    }
    Py_ssize_t n_dims = PySequence_Size(shape);
    if (n_dims < 0 || check_dims(n_dims) < 0 || read_numpy_type(array, interface, t) < 0)
        return -1;
    t->n_dims = (uint32_t)n_dims;
    t->is_host = true;
    t->data = PyLong_AsVoidPtr(address);
    if (PyErr_Occurred() || read_numbers(shape, t->n_dims, t->shape) < 0)
        return -1;
    fill_strides(t);
    if (!strides || strides == Py_None || t->dtype == DTYPE_NONE)
        return 0;
    if (read_numbers(strides, t->n_dims, t->strides) < 0)
        return -1;
    int64_t item_bytes = dtype_info(t->dtype)->block_bytes;
    for (uint32_t i = 0; i < t->n_dims; i++) {
        if (t->strides[i] % item_bytes) {
            PyErr_SetString(PyExc_ValueError, "wanted strides of whole items");
            return -1;
        }
        t->strides[i] /= item_bytes;
    }
    return 0;
}

/* ---- either -------------------------------------------------------------------------------------------------------------- */

int py_tensor_take(PyObject *object, int ordinal, uintptr_t stream, struct py_tensor *t)
{
    *t = (struct py_tensor){0};
    PyObject *interface = PyObject_GetAttrString(object, "__array_interface__");
    if (interface) {
        t->keeps = Py_NewRef(object);
        int result = PyDict_Check(interface) ? read_array(object, interface, &t->tensor) : -1;
        if (result < 0 && !PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "__array_interface__ is no dict");
        Py_DECREF(interface);
        if (result < 0)
            py_tensor_release(t);
        return result;
    }
    PyErr_Clear();
    if (PyObject_HasAttrString(object, "full_tensor")) {
        PyErr_SetString(PyExc_TypeError, "wanted a whole tensor, have a DTensor; use full_tensor()");
        return -1;
    }
    t->kept = detached(object);
    int on_cuda = !t->kept ? -1 : stream ? 1 : is_on_cuda(t->kept); /* a tensor with a stream is on the device */
    if (on_cuda >= 0)
        t->keeps = call_dlpack(t->kept, on_cuda, stream);
    if (!t->keeps || read_capsule(t->keeps, ordinal, &t->tensor) < 0) {
        py_tensor_release(t);
        return -1;
    }
    t->tensor.stream = on_cuda ? (void *)(stream ? stream : DEFAULT_STREAM) : NULL;
    return 0;
}
