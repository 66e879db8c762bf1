/* py_connector.c: a connector (csrc/engine/connector.h) whose methods are those of a Python object, llmpy.kv.Connector. The
 * outer tier's threads take the GIL for each call. An exception, or an answer of the wrong form, is a call that failed. */
#define PY_SSIZE_T_CLEAN
#include "py_connector.h"

#include "../base/mem.h"

#include <stdatomic.h>
#include <string.h>

#define NAME_BYTES (PY_FINGERPRINT + sizeof(struct hash) + 2)

struct bridge {
    PyObject *object;              /* NULL once closed */
    uint8_t fingerprint[PY_FINGERPRINT];
    size_t page_bytes;
    atomic_uint_least64_t n_bad, n_errors;
    bool has_warned;               /* guarded by the GIL */
    bool is_kept;                  /* py_connector_release has not been called */
};

/* The name of a block: fingerprint, key and group. */
static PyObject *name_of(const struct bridge *b, const struct hash *key, uint32_t group)
{
    char name[NAME_BYTES];
    const uint8_t low_first[2] = {(uint8_t)group, (uint8_t)(group >> 8)};
    memcpy(name, b->fingerprint, PY_FINGERPRINT);
    memcpy(name + PY_FINGERPRINT, key, sizeof *key);
    memcpy(name + PY_FINGERPRINT + sizeof *key, low_first, 2);
    return PyBytes_FromStringAndSize(name, NAME_BYTES);
}

/* Counts a failed call. The first exception is printed. */
static bool fail(struct bridge *b, atomic_uint_least64_t *count)
{
    atomic_fetch_add(count, 1);
    if (PyErr_Occurred() && !b->has_warned) {
        b->has_warned = true;
        PyErr_WriteUnraisable(b->object);
    }
    PyErr_Clear();
    return false;
}

static PyObject *names_of(const struct bridge *b, const struct hash *keys, uint32_t n_keys, const uint32_t *groups,
                          uint32_t n_groups)
{
    PyObject *names = PyList_New((Py_ssize_t)n_keys * n_groups);
    for (uint32_t g = 0; names && g < n_groups; g++)
        for (uint32_t i = 0; names && i < n_keys; i++) {
            PyObject *name = name_of(b, &keys[i], groups[g]);
            if (!name || PyList_SetItem(names, (Py_ssize_t)g * n_keys + i, name) < 0)
                Py_CLEAR(names);
        }
    return names;
}

static bool bridge_match(void *ctx, const struct hash *keys, uint32_t n_keys, const uint32_t *groups, uint32_t n_groups,
                         bool *found)
{
    struct bridge *b = ctx;
    PyGILState_STATE gil = PyGILState_Ensure();
    Py_ssize_t n = (Py_ssize_t)n_keys * n_groups, at = 0;
    PyObject *names = names_of(b, keys, n_keys, groups, n_groups),
             *answer = names ? PyObject_CallMethod(b->object, "match", "O", names) : NULL;
    bool is_good = answer && PySequence_Check(answer) && PySequence_Size(answer) == n;
    for (; is_good && at < n; at++) {
        PyObject *one = PySequence_GetItem(answer, at);
        int truth = one ? PyObject_IsTrue(one) : -1;
        Py_XDECREF(one);
        is_good = truth >= 0;
        found[at] = truth > 0;
    }
    if (!is_good)
        fail(b, &b->n_errors);
    Py_XDECREF(answer);
    Py_XDECREF(names);
    PyGILState_Release(gil);
    return is_good;
}

/* Copies an answer into the parts of a block. */
static bool take_bytes(struct bridge *b, PyObject *answer, const struct outer_block *block)
{
    Py_buffer buffer;
    if (PyObject_GetBuffer(answer, &buffer, PyBUF_SIMPLE) < 0)
        return fail(b, &b->n_errors);
    bool fits = (size_t)buffer.len == block->n_parts * b->page_bytes;
    for (uint32_t i = 0; fits && i < block->n_parts; i++)
        memcpy(block->parts[i], (const char *)buffer.buf + i * b->page_bytes, b->page_bytes);
    PyBuffer_Release(&buffer);
    return fits || fail(b, &b->n_bad);
}

static bool bridge_load(void *ctx, const struct outer_block *block)
{
    struct bridge *b = ctx;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *name = name_of(b, &block->key, block->group),
             *answer = name ? PyObject_CallMethod(b->object, "load", "O", name) : NULL;
    bool is_good = answer ? answer != Py_None && take_bytes(b, answer, block) : fail(b, &b->n_errors);
    Py_XDECREF(answer);
    Py_XDECREF(name);
    PyGILState_Release(gil);
    return is_good;
}

static bool bridge_save(void *ctx, const struct outer_block *block)
{
    struct bridge *b = ctx;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *name = name_of(b, &block->key, block->group), *answer = NULL,
             *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(block->n_parts * b->page_bytes));
    for (uint32_t i = 0; bytes && i < block->n_parts; i++)
        memcpy(PyBytes_AsString(bytes) + i * b->page_bytes, block->parts[i], b->page_bytes);
    if (name && bytes)
        answer = PyObject_CallMethod(b->object, "save", "OO", name, bytes);
    bool is_good = answer || fail(b, &b->n_errors);
    Py_XDECREF(answer);
    Py_XDECREF(bytes);
    Py_XDECREF(name);
    PyGILState_Release(gil);
    return is_good;
}

static void bridge_clear(void *ctx)
{
    struct bridge *b = ctx;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *answer = PyObject_CallMethod(b->object, "clear", "y#", (const char *)b->fingerprint, (Py_ssize_t)PY_FINGERPRINT);
    if (!answer)
        fail(b, &b->n_errors);
    Py_XDECREF(answer);
    PyGILState_Release(gil);
}

static void bridge_stats(void *ctx, struct connector_stats *stats)
{
    struct bridge *b = ctx;
    *stats = (struct connector_stats){.n_bad = atomic_load(&b->n_bad), .n_errors = atomic_load(&b->n_errors)};
}

/* Frees the bridge once both its owners are done. The GIL is held. */
static void bridge_let_go(struct bridge *b)
{
    if (!b->object && !b->is_kept)
        mem_free(b);
}

static void bridge_close(void *ctx)
{
    struct bridge *b = ctx;
    PyGILState_STATE gil = PyGILState_Ensure();
    Py_CLEAR(b->object);
    bridge_let_go(b);
    PyGILState_Release(gil);
}

int py_connector_make(PyObject *tuple, size_t page_bytes, struct connector *connector)
{
    PyObject *object;
    const char *fingerprint;
    Py_ssize_t n_fingerprint;
    int is_lasting;
    double deadline_s;
    if (!PyArg_ParseTuple(tuple, "Oy#pd", &object, &fingerprint, &n_fingerprint, &is_lasting, &deadline_s))
        return -1;
    struct bridge *b = n_fingerprint == PY_FINGERPRINT ? mem_calloc(1, sizeof *b) : NULL;
    if (!b) {
        PyErr_SetString(PyExc_ValueError, "kv_connector: wanted a fingerprint of 16 bytes, and memory");
        return -1;
    }
    memcpy(b->fingerprint, fingerprint, PY_FINGERPRINT);
    b->object = Py_NewRef(object);
    b->page_bytes = page_bytes;
    b->is_kept = true;
    *connector = (struct connector){b, NULL, bridge_match, bridge_load, bridge_save, bridge_clear, bridge_stats,
                                    bridge_close, is_lasting, deadline_s, false, 1};
    return 0;
}

void py_connector_release(struct connector *connector, bool is_used)
{
    struct bridge *b = connector->ctx;
    b->is_kept = false;
    if (!is_used)
        Py_CLEAR(b->object);
    bridge_let_go(b);
}
