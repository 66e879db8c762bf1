/* py_program.c: makes a struct program from the spec dictionary that llmpy/models writes. */
#include "py_program.h"

#include "../base/mem.h"
#include "../base/quantise.h"

#include <string.h>

/* The value under a key as a list. Allocates *array for its *n records. */
static PyObject *take_list(PyObject *spec, const char *key, size_t record_bytes, void *array, uint32_t *n)
{
    PyObject *item = PyMapping_GetItemString(spec, key);
    PyObject *list = item ? PySequence_List(item) : NULL;
    Py_XDECREF(item);
    if (!list)
        return NULL;
    void *records = mem_calloc((size_t)PyList_Size(list) + 1, record_bytes);
    if (!records) {
        Py_DECREF(list);
        return PyErr_NoMemory();
    }
    memcpy(array, &records, sizeof records);
    *n = (uint32_t)PyList_Size(list);
    return list;
}

/* Fills at most n unsigned numbers from d[key]. -1 becomes NO_INDEX. Numbers that d[key] lacks are unchanged. */
static int numbers(PyObject *d, const char *key, uint32_t *out, Py_ssize_t n)
{
    PyObject *list = PyMapping_GetItemString(d, key);
    if (!list) {
        PyErr_Clear();
        return 0;
    }
    Py_ssize_t size = PySequence_Size(list);
    if (size > n)
        PyErr_Format(PyExc_ValueError, "program: wanted at most %zd of %s, have %zd", n, key, size);
    for (Py_ssize_t i = 0; i < size && i < n && !PyErr_Occurred(); i++) {
        PyObject *item = PySequence_GetItem(list, i);
        long long value = item ? PyLong_AsLongLong(item) : -1;
        Py_XDECREF(item);
        out[i] = value < 0 ? NO_INDEX : (uint32_t)value;
    }
    Py_DECREF(list);
    return PyErr_Occurred() ? -1 : 0;
}

/* Sets *word to the index of a name among an attribute's choices. -1 with an exception set. */
static int parse_choice(uint32_t code, const struct attribute *attribute, PyObject *value, uint32_t *word)
{
    const char *name = PyUnicode_Check(value) ? PyUnicode_AsUTF8AndSize(value, NULL) : "";
    if (!name)
        return -1;
    for (*word = 0; attribute->choices[*word]; ++*word)
        if (strcmp(attribute->choices[*word], name) == 0)
            return 0;
    PyErr_Format(PyExc_ValueError, "%s: wanted the name of a known %s, have %R", op_name(code), attribute->name, value);
    return -1;
}

/* Parses one attribute into its word. -1 with an exception set. */
static int parse_attribute(const struct op *op, const char *name, PyObject *value, uint32_t *words)
{
    const struct attribute *attributes = op_attributes(op->code);
    uint32_t i = 0;
    while (attributes[i].name && strcmp(attributes[i].name, name) != 0)
        i++;
    if (!attributes[i].name) {
        PyErr_Format(PyExc_ValueError, "%s: has no attribute %s", op_name(op->code), name);
        return -1;
    }
    if (attributes[i].choices)
        return parse_choice(op->code, &attributes[i], value, &words[i]);
    if (attributes[i].kind == ATTRIBUTE_REAL) {
        float real = (float)PyFloat_AsDouble(value);
        memcpy(&words[i], &real, sizeof real);
    } else {
        words[i] = (uint32_t)PyLong_AsUnsignedLong(value);
    }
    return PyErr_Occurred() ? -1 : 0;
}

static int parse_attributes(PyObject *d, struct op *op)
{
    PyObject *given = PyMapping_GetItemString(d, "attributes"), *key, *value;
    if (!given || !PyDict_Check(given)) {
        Py_XDECREF(given);
        PyErr_Format(PyExc_TypeError, "%s: wanted a dict of attributes", op_name(op->code));
        return -1;
    }
    int code = 0;
    for (Py_ssize_t place = 0; !code && PyDict_Next(given, &place, &key, &value);) {
        const char *name = PyUnicode_AsUTF8AndSize(key, NULL);
        code = name ? parse_attribute(op, name, value, op->words) : -1;
    }
    Py_DECREF(given);
    return code;
}

static PyObject *attribute_names(uint32_t code)
{
    const struct attribute *attributes = op_attributes(code);
    Py_ssize_t n = 0;
    while (attributes[n].name)
        n++;
    PyObject *names = PyTuple_New(n);
    for (Py_ssize_t i = 0; names && i < n; i++) {
        PyObject *name = PyUnicode_FromString(attributes[i].name);
        if (!name || PyTuple_SetItem(names, i, name))
            Py_CLEAR(names);
    }
    return names;
}

PyObject *py_operations(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    PyObject *found = PyDict_New();
    for (uint32_t code = 0; found && code < OP_COUNT; code++) {
        PyObject *names = attribute_names(code);
        if (!names || PyDict_SetItemString(found, op_name(code), names))
            Py_CLEAR(found);
        Py_XDECREF(names);
    }
    return found;
}

PyObject *py_operations_by_column(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    PyObject *found = PyList_New(0);
    for (uint32_t code = 0; found && code < OP_COUNT; code++) {
        PyObject *name = op_is_by_column(code) ? PyUnicode_FromString(op_name(code)) : Py_NewRef(Py_None);
        if (!name || (name != Py_None && PyList_Append(found, name) < 0))
            Py_CLEAR(found);
        Py_XDECREF(name);
    }
    return found;
}

static int parse_op(PyObject *item, struct op *op)
{
    const char *name;
    PyObject *d;
    if (!PyArg_ParseTuple(item, "sO", &name, &d))
        return -1;
    memset(op, 0, sizeof *op);
    memset(op->in, 0xff, sizeof op->in);
    memset(op->out, 0xff, sizeof op->out);
    memset(op->weight, 0xff, sizeof op->weight);
    while (op->code < OP_COUNT && strcmp(op_name(op->code), name) != 0)
        op->code++;
    if (op->code == OP_COUNT) {
        PyErr_Format(PyExc_ValueError, "program: wanted a known operation, have %s", name);
        return -1;
    }
    return numbers(d, "in", op->in, OP_INPUTS) || numbers(d, "out", op->out, OP_OUTPUTS) ||
                   numbers(d, "weights", op->weight, OP_WEIGHTS) || parse_attributes(d, op)
               ? -1 : 0;
}

static int parse_value(PyObject *item, struct value *value)
{
    long long of;
    unsigned width, offset;
    if (!PyArg_ParseTuple(item, "ILI", &width, &of, &offset))
        return -1;
    *value = (struct value){width, of < 0 ? NO_INDEX : (uint32_t)of, offset, width, 0, 1};
    return 0;
}

/* Reads the room of every value, which the program of a rank has. */
static int parse_rooms(PyObject *spec, struct program *p)
{
    uint32_t *rooms = mem_calloc((size_t)p->n_values + 1, sizeof *rooms);
    if (!rooms) {
        PyErr_NoMemory();
        return -1;
    }
    int code = numbers(spec, "rooms", rooms, (Py_ssize_t)p->n_values);
    for (uint32_t v = 0; v < p->n_values; v++)
        p->values[v].room = rooms[v];
    mem_free(rooms);
    p->is_of_rank = true;
    return code;
}

/* Reads which operations give equal values on all ranks. */
static int parse_equal(PyObject *spec, struct program *p)
{
    uint32_t *equal = mem_calloc((size_t)p->n_ops + 1, sizeof *equal);
    if (!equal) {
        PyErr_NoMemory();
        return -1;
    }
    int code = numbers(spec, "equal", equal, (Py_ssize_t)p->n_ops);
    for (uint32_t i = 0; i < p->n_ops; i++)
        p->ops[i].is_equal = equal[i];
    mem_free(equal);
    return code;
}

/* Reads (list, per) of every value, which the program of a tower has. */
static int parse_rows(PyObject *spec, struct program *p)
{
    PyObject *rows = PyMapping_GetItemString(spec, "rows");
    for (uint32_t v = 0; rows && v < p->n_values; v++) {
        PyObject *item = PySequence_GetItem(rows, (Py_ssize_t)v);
        bool is_read = item && PyArg_ParseTuple(item, "II", &p->values[v].list, &p->values[v].per);
        Py_XDECREF(item);
        if (!is_read)
            Py_CLEAR(rows);
    }
    Py_XDECREF(rows);
    return rows ? 0 : -1;
}

static char *copy_text(const char *text)
{
    size_t size = strlen(text) + 1;
    char *copy = mem_alloc(size);
    if (!copy) {
        PyErr_NoMemory();
        return NULL;
    }
    return memcpy(copy, text, size);
}

/* (name, source, rows, shape of the tensor, base, inner, stride, is transposed, value of a constant or None) */
static int parse_part(PyObject *item, struct weight_part *part)
{
    const char *name, *source;
    PyObject *shape, *constant;
    int is_transposed;
    if (!PyArg_ParseTuple(item, "ssIO!IIIpO", &name, &source, &part->rows, &PyTuple_Type, &shape, &part->base, &part->inner,
                          &part->stride, &is_transposed, &constant))
        return -1;
    part->is_transposed = is_transposed;
    part->is_constant = constant != Py_None;
    part->constant = part->is_constant ? (float)PyFloat_AsDouble(constant) : 0;
    part->n_dims = (uint32_t)PyTuple_Size(shape);
    for (uint32_t i = 0; i < part->n_dims && i < PART_MAX_DIMS; i++)
        part->dims[i] = (uint32_t)PyLong_AsUnsignedLong(PyTuple_GetItem(shape, i));
    if (PyErr_Occurred())
        return -1;
    part->name = copy_text(name);
    part->source = part->name ? copy_text(source) : NULL;
    return part->source ? 0 : -1;
}

/* The float32 values of a constant, as bytes. */
static int parse_values(PyObject *item, struct weight *weight)
{
    PyObject *values = PyMapping_HasKeyString(item, "values") ? PyMapping_GetItemString(item, "values") : Py_NewRef(Py_None);
    char *bytes;
    Py_ssize_t size = 0;
    if (values && values != Py_None && PyBytes_AsStringAndSize(values, &bytes, &size) == 0) {
        if (size != (Py_ssize_t)(weight->rows * sizeof(float)))
            PyErr_Format(PyExc_ValueError, "program: wanted %u values of a constant, have %zd bytes", weight->rows, size);
        else if (!(weight->values = mem_alloc((size_t)size + 1)))
            PyErr_NoMemory();
        else
            memcpy(weight->values, bytes, (size_t)size);
    }
    Py_XDECREF(values);
    return PyErr_Occurred() ? -1 : 0;
}

static int parse_quantised(PyObject *item, struct weight *weight)
{
    PyObject *name = PyDict_Check(item) ? PyDict_GetItemString(item, "quantised") : NULL;
    if (!name || name == Py_None)
        return 0;
    const char *text = PyUnicode_AsUTF8AndSize(name, NULL);
    weight->quantised = text ? dtype_from_name(text) : (uint32_t)DTYPE_NONE;
    if (text && (weight->kind != WEIGHT_MATRIX || !quantise_has(weight->quantised)))
        PyErr_Format(PyExc_ValueError, "program: wanted a matrix and a type that llmpy quantises to, have %s", text);
    return PyErr_Occurred() ? -1 : 0;
}

/* The number of the weight in the model that lends it. */
static int parse_lent(PyObject *item, struct weight *weight)
{
    PyObject *number = PyDict_Check(item) ? PyDict_GetItemString(item, "lent") : NULL;
    weight->lent = number && number != Py_None ? 1 + (uint32_t)PyLong_AsUnsignedLong(number) : 0;
    return PyErr_Occurred() ? -1 : 0;
}

static int parse_weight(PyObject *item, struct weight *weight)
{
    uint32_t size[2] = {0, 1};
    PyObject *kind = PyMapping_GetItemString(item, "kind");
    if (!kind)
        return -1;
    weight->kind = PyUnicode_CompareWithASCIIString(kind, "matrix") == 0 ? WEIGHT_MATRIX : WEIGHT_VECTOR;
    Py_DECREF(kind);
    static const char *const keys[] = {"rows", "cols"};
    for (int i = 0; i < 2; i++) {
        PyObject *number = PyMapping_GetItemString(item, keys[i]);
        size[i] = number ? (uint32_t)PyLong_AsUnsignedLong(number) : 0;
        Py_XDECREF(number);
        if (PyErr_Occurred())
            return -1;
    }
    weight->rows = size[0];
    weight->cols = weight->kind == WEIGHT_MATRIX ? size[1] : 1;
    PyObject *offset = PyMapping_GetItemString(item, "offset");
    if (offset)
        weight->offset = (float)PyFloat_AsDouble(offset);
    else
        PyErr_Clear();
    Py_XDECREF(offset);
    if (PyErr_Occurred() || parse_values(item, weight) < 0 || parse_quantised(item, weight) < 0 ||
        parse_lent(item, weight) < 0)
        return -1;
    if (PyMapping_HasKeyString(item, "unit_rows")) {
        PyObject *unit_rows = PyMapping_GetItemString(item, "unit_rows");
        weight->has_unit_rows = unit_rows && PyObject_IsTrue(unit_rows) == 1;
        Py_XDECREF(unit_rows);
    }
    PyObject *parts = take_list(item, "parts", sizeof *weight->parts, &weight->parts, &weight->n_parts);
    for (uint32_t i = 0; parts && i < weight->n_parts; i++)
        if (parse_part(PyList_GetItem(parts, i), &weight->parts[i]) < 0)
            Py_CLEAR(parts);
    Py_XDECREF(parts);
    return parts ? 0 : -1;
}

/* The axis of each frequency, int32 as bytes; absent: the rope has none. */
static int parse_axes(PyObject *item, struct rope *rope)
{
    PyObject *axes = PyDict_Check(item) ? PyDict_GetItemString(item, "axes") : NULL;
    char *bytes;
    Py_ssize_t size;
    if (!axes || axes == Py_None)
        return 0;
    if (PyBytes_AsStringAndSize(axes, &bytes, &size) < 0)
        return -1;
    if ((size_t)size != rope->n_freqs * sizeof *rope->axes) {
        PyErr_Format(PyExc_ValueError, "program: wanted the axes of %u frequencies, have %zd bytes", rope->n_freqs, size);
        return -1;
    }
    if (!(rope->axes = mem_alloc((size_t)size + 1))) {
        PyErr_NoMemory();
        return -1;
    }
    memcpy(rope->axes, bytes, (size_t)size);
    for (uint32_t i = 0; i < rope->n_freqs; i++)
        if (rope->axes[i] >= 0 && (uint32_t)rope->axes[i] >= rope->n_axes)
            rope->n_axes = (uint32_t)rope->axes[i] + 1;
    return 0;
}

static int parse_rope(PyObject *item, struct rope *rope)
{
    PyObject *freqs = PyMapping_GetItemString(item, "inv_freq"), *magnitude = PyMapping_GetItemString(item, "magnitude");
    PyObject *interleaved = PyMapping_GetItemString(item, "interleaved");
    char *bytes;
    Py_ssize_t size;
    int result = -1;
    if (!freqs || !magnitude || !interleaved || PyBytes_AsStringAndSize(freqs, &bytes, &size) < 0)
        goto out;
    rope->n_freqs = (uint32_t)((size_t)size / sizeof(float));
    rope->magnitude = (float)PyFloat_AsDouble(magnitude);
    rope->interleaved = PyObject_IsTrue(interleaved) == 1;
    rope->inv_freq = mem_alloc((size_t)size);
    if (!rope->inv_freq)
        PyErr_NoMemory();
    else
        memcpy(rope->inv_freq, bytes, (size_t)size);
    result = PyErr_Occurred() || parse_axes(item, rope) < 0 ? -1 : 0;
out:
    Py_XDECREF(freqs);
    Py_XDECREF(magnitude);
    Py_XDECREF(interleaved);
    return result;
}

static int parse_layer(PyObject *item, struct cache_layer *layer)
{
    unsigned n_heads, n_kv_heads, head_dim, window;
    if (!PyArg_ParseTuple(item, "IIII", &n_heads, &n_kv_heads, &head_dim, &window))
        return -1;
    *layer = (struct cache_layer){n_heads, n_kv_heads, head_dim, window};
    return 0;
}

static int parse_state(PyObject *item, struct state_layer *state)
{
    unsigned n_units, unit_floats;
    if (!PyArg_ParseTuple(item, "II", &n_units, &unit_floats))
        return -1;
    *state = (struct state_layer){n_units, unit_floats};
    return 0;
}

static int parse_text(PyObject *item, char **text)
{
    const char *borrowed = PyUnicode_AsUTF8AndSize(item, NULL);
    *text = borrowed ? copy_text(borrowed) : NULL;
    return *text ? 0 : -1;
}

/* Parses each element of the list under key into a record with `parse`. */
#define PARSE_LIST(key, records, count, parse)                                                                                 \
    do {                                                                                                                       \
        PyObject *list = take_list(spec, key, sizeof *(records), &(records), &(count));                                        \
        for (uint32_t i = 0; list && i < (count); i++)                                                                         \
            if (parse(PyList_GetItem(list, (Py_ssize_t)i), &(records)[i]) < 0)                                                 \
                Py_CLEAR(list);                                                                                                \
        if (!list)                                                                                                             \
            goto failed;                                                                                                       \
        Py_DECREF(list);                                                                                                       \
    } while (0)

/* Reads the tower of a program, which uses the program's weights. */
static int parse_tower(PyObject *towers, struct program *text)
{
    PyObject *spec = PyMapping_GetItemString(towers, "image");
    struct program *p = spec ? mem_calloc(1, sizeof *p) : NULL;
    if (!p) {
        Py_XDECREF(spec);
        return -1;
    }
    text->tower = p;
    p->is_tower = true;
    p->weights = text->weights;
    p->n_weights = text->n_weights;
    PARSE_LIST("values", p->values, p->n_values, parse_value);
    PARSE_LIST("ops", p->ops, p->n_ops, parse_op);
    PARSE_LIST("ropes", p->ropes, p->n_ropes, parse_rope);
    if (parse_rows(spec, p) < 0)
        goto failed;
    PyObject *id = PyMapping_GetItemString(spec, "feature_id");
    text->feature_id = id ? (uint32_t)PyLong_AsUnsignedLong(id) : 0;
    Py_XDECREF(id);
failed:
    Py_DECREF(spec);
    return PyErr_Occurred() ? -1 : 0;
}

struct program *py_program_parse(PyObject *spec)
{
    struct program *p = mem_calloc(1, sizeof *p);
    if (!p) {
        PyErr_NoMemory();
        return NULL;
    }
    PARSE_LIST("values", p->values, p->n_values, parse_value);
    PARSE_LIST("ops", p->ops, p->n_ops, parse_op);
    for (uint32_t i = 0; i < p->n_ops; i++)
        p->is_by_data |= p->ops[i].code == OP_GATHER && p->ops[i].gather.by_rank;
    PARSE_LIST("weights", p->weights, p->n_weights, parse_weight);
    PARSE_LIST("ropes", p->ropes, p->n_ropes, parse_rope);
    PyObject *towers = PyDict_Check(spec) ? PyDict_GetItemString(spec, "towers") : NULL;
    if (towers && PyMapping_Size(towers) && parse_tower(towers, p) < 0)
        goto failed;
    PARSE_LIST("layers", p->layers, p->n_layers, parse_layer);
    if (PyMapping_HasKeyString(spec, "rooms") && (parse_rooms(spec, p) < 0 || parse_equal(spec, p) < 0))
        goto failed;
    if (PyMapping_HasKeyString(spec, "states"))
        PARSE_LIST("states", p->states, p->n_states, parse_state);
    if (PyMapping_HasKeyString(spec, "reordered")) {
        PyObject *reordered = PyMapping_GetItemString(spec, "reordered");
        p->is_reordered = reordered && PyObject_IsTrue(reordered) == 1;
        Py_XDECREF(reordered);
    }
    if (PyMapping_HasKeyString(spec, "ignored"))
        PARSE_LIST("ignored", p->ignored, p->n_ignored, parse_text);
    PyObject *architecture = PyMapping_HasKeyString(spec, "architecture")
                                 ? PyMapping_GetItemString(spec, "architecture") : NULL;
    if (architecture)
        parse_text(architecture, &p->architecture);
    Py_XDECREF(architecture);
    PyObject *vocab = PyErr_Occurred() ? NULL : PyMapping_GetItemString(spec, "vocab_size");
    p->vocab_size = vocab ? (uint32_t)PyLong_AsUnsignedLong(vocab) : 0;
    Py_XDECREF(vocab);
    if (!PyErr_Occurred())
        return p;
failed:
    program_destroy(p);
    return NULL;
}
