/* py_checkpoint.c: the class _core.Checkpoint: the tensors of an opened checkpoint, and a GGUF file's key-values. */
#include "py.h"

#include "../base/mem.h"
#include "../base/quantise.h"
#include "../program/gguf.h"

#include <ctype.h>
#include <string.h>

struct checkpoint_object {
    PyObject_HEAD struct checkpoint *checkpoint;
    PyObject *metadata; /* made on first use */
};

/* ---- opening ---------------------------------------------------------------------------------------------------------- */

/* Fills *paths with n pointers into bytes objects, which the returned list owns. */
static PyObject *encode_paths(PyObject *sequence, const char ***paths, uint32_t *n)
{
    Py_ssize_t length = PySequence_Size(sequence);
    if (length < 0 || length > INT32_MAX)
        return NULL;
    PyObject *owners = PyList_New(0);
    *paths = PyMem_Malloc((size_t)(length + 1) * sizeof **paths);
    if (!owners || !*paths) {
        Py_XDECREF(owners);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < length; i++) {
        PyObject *item = PySequence_GetItem(sequence, i), *bytes = NULL;
        int bad = !item || !PyUnicode_FSConverter(item, &bytes) || PyList_Append(owners, bytes) < 0;
        if (!bad)
            (*paths)[i] = PyBytes_AsString(bytes);
        Py_XDECREF(item);
        Py_XDECREF(bytes);
        if (bad) {
            Py_DECREF(owners);
            return NULL;
        }
    }
    *n = (uint32_t)length;
    return owners;
}

static PyObject *checkpoint_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"", "scheme", NULL};
    PyObject *sequence;
    const char *scheme = "";
    const char **paths = NULL;
    uint32_t n = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|s:Checkpoint", names, &sequence, &scheme))
        return NULL;
    if (PyUnicode_Check(sequence) || PyBytes_Check(sequence))
        return PyErr_Format(PyExc_TypeError, "Checkpoint: wanted a sequence of paths, have one %R", sequence);
    struct checkpoint_object *self = NULL;
    PyObject *owners = encode_paths(sequence, &paths, &n);
    if (!owners)
        goto out;
    self = py_allocate(type);
    if (!self)
        goto out;
    struct err err;
    enum rc rc;
    Py_BEGIN_ALLOW_THREADS
    rc = checkpoint_open(paths, n, &self->checkpoint, &err);
    rc = rc ? rc : checkpoint_join(self->checkpoint, scheme, &err);
    Py_END_ALLOW_THREADS
    if (rc != RC_OK) {
        py_raise(&err);
        Py_CLEAR(self);
    }
out:
    PyMem_Free(paths);
    Py_XDECREF(owners);
    return (PyObject *)self;
}

static void checkpoint_dealloc(PyObject *object)
{
    struct checkpoint_object *self = (struct checkpoint_object *)object;
    checkpoint_close(self->checkpoint);
    Py_XDECREF(self->metadata);
    py_deallocate(object);
}

struct checkpoint *py_checkpoint_get(PyObject *object)
{
    /* The type is final, so no other type has its deallocator. */
    if (PyType_GetSlot(Py_TYPE(object), Py_tp_dealloc) == (void *)checkpoint_dealloc)
        return ((struct checkpoint_object *)object)->checkpoint;
    PyErr_Format(PyExc_TypeError, "checkpoint: wanted a _core.Checkpoint, have %R", (PyObject *)Py_TYPE(object));
    return NULL;
}

/* ---- key-values ------------------------------------------------------------------------------------------------------- */

static PyObject *value_object(uint32_t type, const uint8_t **at);

/* A string may have any encoding. Bytes that are not UTF-8 become lone surrogates, so no information is lost. */
static PyObject *string_object(const uint8_t **at)
{
    Py_ssize_t n = (Py_ssize_t)gguf_load_u64(*at);
    const char *bytes = (const char *)*at + 8;
    *at += 8 + n;
    return PyUnicode_DecodeUTF8(bytes, n, "surrogateescape");
}

static PyObject *array_object(const uint8_t **at)
{
    uint32_t type = gguf_load_u32(*at);
    Py_ssize_t n = (Py_ssize_t)gguf_load_u64(*at + 4);
    *at += 12;
    PyObject *list = PyList_New(n);
    for (Py_ssize_t i = 0; list && i < n; i++) {
        PyObject *item = value_object(type, at);
        if (!item || PyList_SetItem(list, i, item) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *number_object(uint32_t type, const uint8_t *at)
{
    uint64_t bits = 0;
    for (uint32_t i = 0; i < gguf_type_bytes(type); i++)
        bits |= (uint64_t)at[i] << 8 * i;
    uint32_t bits32 = (uint32_t)bits;
    float single;
    double twice;
    switch (type) {
    case GGUF_BOOL:
        return PyBool_FromLong(at[0]);
    case GGUF_F32:
        memcpy(&single, &bits32, sizeof single);
        return PyFloat_FromDouble((double)single);
    case GGUF_F64:
        memcpy(&twice, &bits, sizeof twice);
        return PyFloat_FromDouble(twice);
    case GGUF_I8:
        return PyLong_FromLong((int8_t)bits);
    case GGUF_I16:
        return PyLong_FromLong((int16_t)bits);
    case GGUF_I32:
        return PyLong_FromLong((int32_t)bits);
    case GGUF_I64:
        return PyLong_FromLongLong((int64_t)bits);
    default:
        return PyLong_FromUnsignedLongLong(bits);
    }
}

/* Makes an object of the value at *at and advances *at past it. gguf.c has validated every length and the nesting. */
static PyObject *value_object(uint32_t type, const uint8_t **at)
{
    if (type == GGUF_STRING)
        return string_object(at);
    if (type == GGUF_ARRAY)
        return array_object(at);
    PyObject *number = number_object(type, *at);
    *at += gguf_type_bytes(type);
    return number;
}

static PyObject *metadata_dict(const struct gguf *gguf)
{
    PyObject *dict = PyDict_New();
    for (uint32_t i = 0; dict && gguf && i < gguf_n_keys(gguf); i++) {
        struct gguf_value value = gguf_value(gguf, i);
        PyObject *object = value_object(value.type, &value.at);
        if (!object || PyDict_SetItemString(dict, gguf_key(gguf, i), object) < 0)
            Py_CLEAR(dict);
        Py_XDECREF(object);
    }
    return dict;
}

static PyObject *get_metadata(PyObject *object, void *closure)
{
    (void)closure;
    struct checkpoint_object *self = (struct checkpoint_object *)object;
    if (!self->metadata) {
        PyObject *dict = metadata_dict(checkpoint_gguf(self->checkpoint));
        if (self->metadata)
            Py_XDECREF(dict); /* another thread has set it meanwhile */
        else
            self->metadata = dict;
    }
    return Py_XNewRef(self->metadata);
}

/* ---- tensors ---------------------------------------------------------------------------------------------------------- */

static PyObject *get_format(PyObject *object, void *closure)
{
    (void)closure;
    int is_gguf = checkpoint_is_gguf(((struct checkpoint_object *)object)->checkpoint);
    return PyUnicode_FromString(is_gguf ? "gguf" : "safetensors");
}

/* The name of the tensor's dtype; of an unsupported type the file's name in lower case. */
static PyObject *type_object(const struct checkpoint_tensor *tensor)
{
    char lower[64] = {0};
    const struct dtype_info *info = dtype_info(tensor->dtype);
    if (info)
        return PyUnicode_FromString(info->name);
    for (size_t i = 0; tensor->type[i] && i + 1 < sizeof lower; i++)
        lower[i] = (char)tolower((unsigned char)tensor->type[i]);
    return PyUnicode_FromString(lower);
}

static PyObject *shape_object(const struct checkpoint_tensor *tensor)
{
    PyObject *shape = PyTuple_New(tensor->n_dims);
    for (uint32_t i = 0; shape && i < tensor->n_dims; i++) {
        PyObject *length = PyLong_FromUnsignedLongLong(tensor->shape[i]);
        if (!length || PyTuple_SetItem(shape, i, length) < 0)
            Py_CLEAR(shape);
    }
    return shape;
}

static PyObject *tensors(PyObject *object, PyObject *unused)
{
    (void)unused;
    const struct checkpoint *checkpoint = ((struct checkpoint_object *)object)->checkpoint;
    PyObject *dict = PyDict_New();
    for (uint32_t i = 0; dict && i < checkpoint_n_tensors(checkpoint); i++) {
        const struct checkpoint_tensor *tensor = checkpoint_tensor(checkpoint, i);
        PyObject *path = PyUnicode_DecodeFSDefault(checkpoint_path(checkpoint, tensor->file));
        PyObject *entry = path ? Py_BuildValue("(NNN)", type_object(tensor), shape_object(tensor), path) : NULL;
        if (!entry || PyDict_SetItemString(dict, tensor->name, entry) < 0)
            Py_CLEAR(dict);
        Py_XDECREF(entry);
    }
    return dict;
}

/* The tensor of this name, or NULL with an exception set if it is absent or of an unsupported type. */
static const struct checkpoint_tensor *find_tensor(PyObject *object, PyObject *name)
{
    struct err err;
    const struct checkpoint_tensor *tensor = NULL;
    PyObject *bytes = PyUnicode_Check(name) ? PyUnicode_AsEncodedString(name, "utf-8", "backslashreplace") : NULL;
    if (!bytes) {
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_TypeError, "name: wanted a str, have %R", name);
        return NULL;
    }
    if (checkpoint_need(((struct checkpoint_object *)object)->checkpoint, PyBytes_AsString(bytes), &tensor, &err) != RC_OK) {
        py_raise(&err);
        tensor = NULL;
    }
    Py_DECREF(bytes);
    return tensor;
}

static uint64_t row_values(const struct checkpoint_tensor *tensor)
{
    return tensor->n_dims ? tensor->shape[tensor->n_dims - 1] : 1;
}

/* Number of rows, as checkpoint_rows gives them. */
static uint64_t n_rows_of(const struct checkpoint_tensor *tensor)
{
    size_t row_bytes = dtype_row_bytes(tensor->dtype, row_values(tensor));
    return row_bytes ? checkpoint_bytes(tensor) / row_bytes : 0;
}

/* Reads a whole tensor, joined if several tensors hold it. Called without the GIL. */
static enum rc read_whole(const struct checkpoint *checkpoint, const struct checkpoint_tensor *tensor, void *to,
                          struct err *err)
{
    if (!tensor->companion && !tensor->packing)
        return checkpoint_read(checkpoint, tensor, 0, tensor->size_bytes, to, err);
    return checkpoint_rows(checkpoint, tensor, 0, 1, n_rows_of(tensor), to, err);
}

/* Converts row by row, since the last block of a row may be partly used. */
static int all_to_float(const struct checkpoint_tensor *tensor, const char *stored, float *values)
{
    uint64_t n = row_values(tensor), n_rows = n_rows_of(tensor);
    size_t row_bytes = dtype_row_bytes(tensor->dtype, n);
    int has_value = dtype_to_float(tensor->dtype, stored, values, 0);
    for (uint64_t i = 0; i < n_rows && has_value; i++)
        dtype_to_float(tensor->dtype, stored + i * row_bytes, values + i * n, n);
    return has_value;
}

static PyObject *read_stored(PyObject *object, PyObject *name)
{
    const struct checkpoint *checkpoint = ((struct checkpoint_object *)object)->checkpoint;
    const struct checkpoint_tensor *tensor = find_tensor(object, name);
    PyObject *result = tensor ? PyBytes_FromStringAndSize(NULL, (Py_ssize_t)checkpoint_bytes(tensor)) : NULL;
    struct err err;
    enum rc rc;
    if (!result)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    rc = read_whole(checkpoint, tensor, PyBytes_AsString(result), &err);
    Py_END_ALLOW_THREADS
    if (rc == RC_OK)
        return result;
    Py_DECREF(result);
    return py_raise(&err);
}

static PyObject *read_float32(PyObject *object, PyObject *name)
{
    const struct checkpoint_tensor *tensor = find_tensor(object, name);
    if (!tensor)
        return NULL;
    const struct dtype_info *info = dtype_info(tensor->dtype);
    uint64_t n = n_rows_of(tensor) * row_values(tensor);
    if (n > PY_SSIZE_T_MAX / sizeof(float))
        return PyErr_NoMemory();
    PyObject *result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(n * sizeof(float)));
    PyObject *stored = result ? read_stored(object, name) : NULL;
    if (!stored) {
        Py_XDECREF(result);
        return NULL;
    }
    int has_value;
    Py_BEGIN_ALLOW_THREADS
    has_value = all_to_float(tensor, PyBytes_AsString(stored), (float *)PyBytes_AsString(result));
    Py_END_ALLOW_THREADS
    Py_DECREF(stored);
    if (has_value)
        return result;
    Py_DECREF(result);
    struct err err;
    err_set(&err, RC_UNSUPPORTED, "tensor %.100s: wanted a type with float values, have %s; use read()", tensor->name,
            info->name);
    return py_raise(&err);
}

static PyObject *column_order(PyObject *object, PyObject *name)
{
    const struct checkpoint_tensor *tensor = find_tensor(object, name);
    size_t size_bytes = tensor && tensor->order ? row_values(tensor) * sizeof *tensor->order : 0;
    return tensor ? PyBytes_FromStringAndSize((const char *)tensor->order, (Py_ssize_t)size_bytes) : NULL;
}

#define ROUNDED_AT_ONCE ((uint64_t)1 << 20) /* values */

/* Rounds all rows to a type that quantise_has. Called without the GIL. */
static enum rc round_all(const struct checkpoint *checkpoint, const struct checkpoint_tensor *tensor, uint32_t dtype, char *to,
                         struct err *err)
{
    uint64_t cols = row_values(tensor), n_rows = n_rows_of(tensor), at_once = ROUNDED_AT_ONCE / cols + 1;
    size_t row_bytes = dtype_row_bytes(dtype, cols), floats_bytes = at_once * cols * sizeof(float);
    float *floats = mem_alloc(floats_bytes + at_once * dtype_row_bytes(tensor->dtype, cols));
    char *rows = (char *)floats + floats_bytes;
    enum rc rc = floats ? RC_OK : err_set(err, RC_MEMORY, "checkpoint: out of memory");
    for (uint64_t i = 0, n; i < n_rows && !rc; i += n) {
        n = n_rows - i < at_once ? n_rows - i : at_once;
        rc = checkpoint_rows(checkpoint, tensor, i, 1, n, rows, err);
        if (!rc && !quantise_rows(dtype, tensor->dtype, rows, n, cols, floats, to + i * row_bytes))
            rc = err_set(err, RC_CHECKPOINT, "tensor %.160s: quantization: wanted " QUANTISE_WANTED ", have others",
                         tensor->name);
    }
    mem_free(floats);
    return rc;
}

static PyObject *read_rounded(PyObject *object, PyObject *args)
{
    const struct checkpoint *checkpoint = ((struct checkpoint_object *)object)->checkpoint;
    PyObject *name;
    const char *type;
    if (!PyArg_ParseTuple(args, "Os:read_rounded", &name, &type))
        return NULL;
    const struct checkpoint_tensor *tensor = find_tensor(object, name);
    if (!tensor)
        return NULL;
    uint32_t dtype = dtype_from_name(type);
    if (!quantise_has(dtype) || !dtype_to_float(tensor->dtype, NULL, NULL, 0) || !row_values(tensor))
        return PyErr_Format(PyExc_ValueError, "read_rounded: wanted values and a type that llmpy quantises to, have %s and %s",
                            tensor->type, type);
    size_t size_bytes = n_rows_of(tensor) * dtype_row_bytes(dtype, row_values(tensor));
    PyObject *result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size_bytes);
    if (!result)
        return NULL;
    struct err err;
    enum rc rc;
    Py_BEGIN_ALLOW_THREADS
    rc = round_all(checkpoint, tensor, dtype, PyBytes_AsString(result), &err);
    Py_END_ALLOW_THREADS
    if (rc == RC_OK)
        return result;
    Py_DECREF(result);
    return py_raise(&err);
}

/* ---- the type --------------------------------------------------------------------------------------------------------- */

static PyMethodDef methods[] = {
    {"tensors", tensors, METH_NOARGS, "By name: type, shape, file."},
    {"read", read_stored, METH_O, "A tensor's bytes as stored."},
    {"read_float32", read_float32, METH_O, "A tensor's exact values as float32 bytes."},
    {"column_order", column_order, METH_O, "uint32 numbers in the file of a tensor's columns; empty: the file's order."},
    {"read_rounded", read_rounded, METH_VARARGS, "A tensor of floats, its rows rounded to blocks of a type as at load."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef properties[] = {
    {"format", get_format, NULL, "gguf or safetensors", NULL},
    {"metadata", get_metadata, NULL, "a GGUF file's key-values; empty for safetensors", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc,
     (void *)"Checkpoint(paths, /, scheme='')\n--\n\nOne GGUF file, or the safetensors files of a model, open and validated."},
    {Py_tp_new, (void *)checkpoint_new},
    {Py_tp_dealloc, (void *)checkpoint_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "llmpy._core.Checkpoint",
    .basicsize = sizeof(struct checkpoint_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

int py_checkpoint_register(PyObject *module)
{
    return py_add_type(module, &spec);
}
