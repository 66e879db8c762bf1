/* py_backend_latent.c: what latent attention needs of _core.Backend: head_linear, latent_attention. */
#include "py_stage.h"

PyObject *py_backend_head_linear(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"matrix", "x", "out", "n_heads", "head_rows", "first_row", "used_rows", "is_transposed", NULL};
    PyObject *matrix, *x, *out;
    struct head_linear_args a = {0};
    int is_transposed = 0;
    struct stage s;
    stage_open(&s, object);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOIIII|p", names, &matrix, &x, &out, &a.n_heads, &a.head_rows,
                                     &a.first_row, &a.used_rows, &is_transposed))
        return NULL;
    if (!s.self->table->head_linear)
        return PyErr_Format(PyExc_NotImplementedError, "this backend has no head_linear");
    a.matrix = py_matrix_get(matrix);
    if (!a.matrix)
        return NULL;
    a.is_transposed = is_transposed;
    stage_view(&s, "x", x, false, &a.x);
    stage_view(&s, "out", out, true, &a.out);
    a.n_rows = s.n_rows;
    STAGE_RUN(&s, head_linear, &a);
}

PyObject *py_backend_latent_attention(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"pool",     "batch", "table",   "q",     "q_rope", "latent",
                            "rope_key", "out",   "n_heads", "scale", "layer",  NULL};
    PyObject *pool, *batch, *table, *q, *q_rope, *latent, *rope_key, *out;
    uint32_t layer = 0;
    struct batch_view view;
    struct latent_attention_args a = {.batch = &view};
    struct stage s;
    stage_open(&s, object);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOOOOIf|I", names, &pool, &batch, &table, &q, &q_rope, &latent,
                                     &rope_key, &out, &a.n_heads, &a.scale, &layer))
        return NULL;
    if (!s.self->table->latent_attention)
        return PyErr_Format(PyExc_NotImplementedError, "this backend has no latent_attention");
    stage_batch(&s, batch, &view);
    stage_kv(&s, pool, table, layer, &view, &a.kv);
    stage_view(&s, "q", q, false, &a.q);
    stage_view(&s, "q_rope", q_rope, false, &a.q_rope);
    stage_view(&s, "latent", latent, false, &a.latent);
    stage_view(&s, "rope_key", rope_key, false, &a.rope_key);
    stage_view(&s, "out", out, true, &a.out);
    STAGE_RUN(&s, latent_attention, &a);
}
