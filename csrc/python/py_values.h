/* py_values.h: parses the values of a dictionary into the fields of a C struct, by a table with a row for each name. */
#ifndef LLMPY_PY_VALUES_H
#define LLMPY_PY_VALUES_H

#include "py_engine.h"

/* One value of a dictionary. name: the key, for error texts. scratch: owns what parsing allocates. */
struct py_item {
    const char *name;
    PyObject *value;
    struct py_scratch *scratch;
};

/* A row of a table. parse gets a pointer to the field, or to the whole struct (offset 0). */
struct py_field {
    const char *name;
    int (*parse)(const struct py_item *item, void *place);
    size_t offset;
};

/* Memory that lives as long as the scratch; NULL with an exception set. */
void *py_scratch_alloc(struct py_scratch *scratch, size_t count, size_t size_bytes);

/* Each function below that returns an int returns 0, or -1 with an exception set. */

/* Sets "<name> must be <wanted>, got <value>."; returns -1. */
int parse_refuse(const struct py_item *item, const char *wanted);
int parse_integer(const struct py_item *item, long long *number);
/* The bytes of a bytes object, which must outlive their use. */
int parse_bytes(const struct py_item *item, const char **bytes, uint32_t *n_bytes);

/* These store a value at `place`: a uint32_t, a float, a bool, an int32_t, a struct id_list (of the bytes of an array, or of a
 * sequence), a struct byte_string. An id outside of int32 becomes -1, which is outside of every vocabulary. */
int parse_count(const struct py_item *item, void *place);
int parse_float(const struct py_item *item, void *place);
int parse_bool(const struct py_item *item, void *place);
int parse_id(const struct py_item *item, void *place);
int parse_int32_bytes(const struct py_item *item, void *place);
int parse_ids(const struct py_item *item, void *place);
int parse_byte_string(const struct py_item *item, void *place);

/* Calls parse_element for each element of a sequence, with a pointer to element i of *array. */
int parse_sequence(const struct py_item *item, size_t size_bytes, int (*parse_element)(const struct py_item *, void *),
                   void **array, uint32_t *n);
/* The place of a name among n names; n: it is none of them. */
uint32_t parse_name(PyObject *name, const char *const *names, uint32_t n);
/* Parses the items of a dictionary, each as its row says; None leaves the target's default. unknown: error for other names. */
int parse_fields(PyObject *dictionary, const struct py_field *rows, size_t n, void *target, struct py_scratch *scratch,
                 const char *unknown);

#endif
