/* py_values.c: parses values of Python into fields of C structs. */
#define PY_SSIZE_T_CLEAN
#include "py_values.h"

#include "py.h"

#include "../base/mem.h"

#include <string.h>

struct py_block {
    struct py_block *next;
    max_align_t data[];
};

void *py_scratch_alloc(struct py_scratch *scratch, size_t count, size_t size_bytes)
{
    struct py_block *block = mem_alloc(sizeof *block + count * size_bytes);
    if (!block) {
        PyErr_NoMemory();
        return NULL;
    }
    block->next = scratch->first;
    scratch->first = block;
    return block->data;
}

void py_scratch_free(struct py_scratch *scratch)
{
    while (scratch->first) {
        struct py_block *block = scratch->first;
        scratch->first = block->next;
        mem_free(block);
    }
}

int parse_refuse(const struct py_item *item, const char *wanted)
{
    struct err err;
    PyObject *text = PyObject_Repr(item->value), *bytes = text ? PyUnicode_AsUTF8String(text) : NULL;
    if (bytes) {
        err_set(&err, RC_INVALID, "%s must be %s, got %s.", item->name, wanted, PyBytes_AsString(bytes));
        err_name(&err, item->name, NULL);
        py_raise(&err);
    }
    Py_XDECREF(bytes);
    Py_XDECREF(text);
    return -1;
}

int parse_integer(const struct py_item *item, long long *number)
{
    int overflow;
    *number = PyLong_AsLongLongAndOverflow(item->value, &overflow);
    if (overflow)
        return parse_refuse(item, "in [-2**63, 2**63)");
    return *number == -1 && PyErr_Occurred() ? -1 : 0;
}

int parse_count(const struct py_item *item, void *place)
{
    uint32_t *target = place;
    long long number;
    if (parse_integer(item, &number) < 0)
        return -1;
    if (number < 0 || number > UINT32_MAX)
        return parse_refuse(item, "in [0, 2**32)");
    *target = (uint32_t)number;
    return 0;
}

int parse_float(const struct py_item *item, void *place)
{
    float *target = place;
    double number = PyFloat_AsDouble(item->value);
    if (number == -1 && PyErr_Occurred())
        return -1;
    *target = (float)number;
    return 0;
}

int parse_bool(const struct py_item *item, void *place)
{
    bool *target = place;
    int truth = PyObject_IsTrue(item->value);
    *target = truth > 0;
    return truth < 0 ? -1 : 0;
}

int parse_bytes(const struct py_item *item, const char **bytes, uint32_t *n_bytes)
{
    char *start;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(item->value, &start, &size) < 0)
        return -1;
    if ((size_t)size > UINT32_MAX)
        return parse_refuse(item, "shorter than 2**32 bytes");
    *bytes = start;
    *n_bytes = (uint32_t)size;
    return 0;
}

int parse_int32_bytes(const struct py_item *item, void *place)
{
    struct id_list *list = place;
    const char *bytes = NULL;
    if (parse_bytes(item, &bytes, &list->n) < 0)
        return -1;
    if (list->n % sizeof(int32_t))
        return parse_refuse(item, "int32 values");
    list->n /= sizeof(int32_t);
    int32_t *ids = py_scratch_alloc(item->scratch, list->n, sizeof *ids);
    if (!ids)
        return -1;
    memcpy(ids, bytes, list->n * sizeof *ids); /* the bytes object need not be aligned */
    list->ids = ids;
    return 0;
}

int parse_id(const struct py_item *item, void *place)
{
    int32_t *id = place;
    long long number;
    if (parse_integer(item, &number) < 0)
        return -1;
    *id = number >= INT32_MIN && number <= INT32_MAX ? (int32_t)number : -1; /* -1 is outside every vocabulary */
    return 0;
}

int parse_sequence(const struct py_item *item, size_t size_bytes, int (*parse_element)(const struct py_item *, void *),
                   void **array, uint32_t *n)
{
    Py_ssize_t size = PySequence_Size(item->value);
    char *places = size < 0 ? NULL : py_scratch_alloc(item->scratch, (size_t)size, size_bytes);
    if (!places)
        return -1;
    for (Py_ssize_t i = 0; i < size; i++) {
        struct py_item element = {item->name, PySequence_GetItem(item->value, i), item->scratch};
        int bad = !element.value || parse_element(&element, places + (size_t)i * size_bytes) < 0;
        Py_XDECREF(element.value);
        if (bad)
            return -1;
    }
    *array = places;
    *n = (uint32_t)size;
    return 0;
}

int parse_ids(const struct py_item *item, void *place)
{
    struct id_list *list = place;
    void *ids = NULL;
    if (parse_sequence(item, sizeof(int32_t), parse_id, &ids, &list->n) < 0)
        return -1;
    list->ids = ids;
    return 0;
}

int parse_byte_string(const struct py_item *item, void *place)
{
    struct byte_string *string = place;
    const char *bytes = NULL;
    if (parse_bytes(item, &bytes, &string->n) < 0)
        return -1;
    char *copy = py_scratch_alloc(item->scratch, string->n, 1); /* a computed element dies with the caller's reference */
    string->bytes = copy;
    return copy ? (memcpy(copy, bytes, string->n), 0) : -1;
}

uint32_t parse_name(PyObject *name, const char *const *names, uint32_t n)
{
    uint32_t i = 0;
    while (i < n && !(PyUnicode_Check(name) && PyUnicode_CompareWithASCIIString(name, names[i]) == 0))
        i++;
    return i;
}

static int parse_field(const struct py_item *item, const struct py_field *rows, size_t n, void *target, const char *unknown)
{
    for (size_t i = 0; i < n; i++)
        if (strcmp(item->name, rows[i].name) == 0)
            return item->value == Py_None ? 0 : rows[i].parse(item, (char *)target + rows[i].offset);
    PyErr_Format(PyExc_TypeError, "%s '%s'", unknown, item->name);
    return -1;
}

int parse_fields(PyObject *dictionary, const struct py_field *rows, size_t n, void *target, struct py_scratch *scratch,
                 const char *unknown)
{
    PyObject *key, *value;
    Py_ssize_t at = 0;
    while (PyDict_Next(dictionary, &at, &key, &value)) {
        PyObject *name = PyUnicode_AsUTF8String(key);
        int bad = !name || parse_field(&(struct py_item){PyBytes_AsString(name), value, scratch}, rows, n, target, unknown) < 0;
        Py_XDECREF(name);
        if (bad)
            return -1;
    }
    return 0;
}
