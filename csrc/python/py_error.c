/* py_error.c: turns an enum rc into a Python exception; no other file does. */
#include "py.h"

#include <string.h>

static const struct {
    const char *name;  /* class in llmpy.errors, or NULL for a builtin */
    const char *what, *code; /* attribute names, or NULL */
} CLASSES[] = {
    [RC_INVALID] = {"InvalidRequestError", "parameter", NULL},
    [RC_CONFIG] = {"ConfigError", "option", NULL},
    [RC_CHECKPOINT] = {"CheckpointError", "file", NULL},
    [RC_UNSUPPORTED] = {"UnsupportedError", NULL, NULL},
    [RC_DEVICE] = {"DeviceError", "operation", "code"},
    [RC_DEVICE_MEMORY] = {"DeviceMemoryError", NULL, "wanted_bytes"},
    [RC_DEAD] = {"EngineDeadError", "operation", "code"},
    [RC_BUSY] = {"EngineBusyError", NULL, NULL},
    [RC_CLOSED] = {"EngineClosedError", NULL, NULL},
    [RC_QUEUE_FULL] = {"QueueFullError", NULL, "num_waiting"},
    [RC_ASLEEP] = {"EngineAsleepError", NULL, NULL},
    [RC_WEIGHTS_MISSING] = {"WeightsMissingError", NULL, NULL},
    [RC_WEIGHTS] = {"WeightUpdateError", NULL, NULL},
};

PyObject *py_error_class(const char *name)
{
    PyObject *module = PyImport_ImportModule("llmpy.errors");
    if (!module)
        return NULL;
    PyObject *class = PyObject_GetAttrString(module, name);
    Py_DECREF(module);
    return class;
}

/* Messages may quote bytes of a file or end inside a character, so invalid UTF-8 is replaced, not raised. */
static PyObject *decode(const char *text)
{
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

static int set_text(PyObject *error, const char *attribute, const char *text)
{
    PyObject *value = *text ? decode(text) : Py_NewRef(Py_None);
    int result = value ? PyObject_SetAttrString(error, attribute, value) : -1;
    Py_XDECREF(value);
    return result;
}

static int set_number(PyObject *error, const char *attribute, int64_t number)
{
    PyObject *value = PyLong_FromLongLong(number);
    int result = value ? PyObject_SetAttrString(error, attribute, value) : -1;
    Py_XDECREF(value);
    return result;
}

/* Sets the list of the WeightUpdateError that matches err->code to the weight's name. */
static int set_weight(PyObject *error, const struct err *err)
{
    static const char *const lists[] = {
        [WEIGHTS_UNKNOWN] = "unknown", [WEIGHTS_MISMATCHED] = "mismatched", [WEIGHTS_MISSING] = "missing"};
    PyObject *names = Py_BuildValue("[N]", decode(err->what));
    int result = names ? PyObject_SetAttrString(error, lists[err->code], names) : -1;
    Py_XDECREF(names);
    return result;
}

static void raise_class(const struct err *err, const char *name)
{
    PyObject *class = py_error_class(name);
    PyObject *error = class ? PyObject_CallFunction(class, "N", decode(err->message)) : NULL;
    int bad = !error;
    if (!bad && CLASSES[err->rc].what)
        bad = set_text(error, CLASSES[err->rc].what, err->what) < 0;
    if (!bad && err->rc == RC_CHECKPOINT)
        bad = set_text(error, "tensor", err->tensor) < 0;
    if (!bad && CLASSES[err->rc].code)
        bad = set_number(error, CLASSES[err->rc].code, err->code) < 0;
    if (!bad && err->rc == RC_DEVICE_MEMORY)
        bad = set_number(error, "free_bytes", err->free_bytes) < 0;
    if (!bad && err->rc == RC_WEIGHTS)
        bad = set_weight(error, err) < 0;
    if (!bad)
        PyErr_SetObject(class, error);
    Py_XDECREF(error);
    Py_XDECREF(class);
}

PyObject *py_raise(const struct err *err)
{
    if (err->rc == RC_MEMORY)
        return PyErr_NoMemory();
    if (err->rc == RC_IO) {
        PyObject *error = PyObject_CallFunction(PyExc_OSError, "LNN", (long long)err->code, decode(err->message),
                                                PyUnicode_DecodeFSDefault(err->what));
        if (error)
            PyErr_SetObject((PyObject *)Py_TYPE(error), error);
        Py_XDECREF(error);
        return NULL;
    }
    if (err->rc < sizeof CLASSES / sizeof *CLASSES && CLASSES[err->rc].name)
        raise_class(err, CLASSES[err->rc].name);
    else
        PyErr_Format(PyExc_RuntimeError, "%s", err->message);
    return NULL;
}
