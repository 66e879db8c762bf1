/* py_backend_recurrent.c: the recurrent operations of _core.Backend: conv, ssm, selective_scan, delta. */
#include "py_stage.h"

/* state = (pool, table, first_entry, units_per_page): float32 [pages][floats of a page], int32 [table rows][table_stride]. */
static void stage_state(struct stage *s, PyObject *state, uint32_t n_units, uint32_t unit_floats, struct state_view *view)
{
    PyObject *pool, *table;
    if (s->failed)
        return;
    if (!PyArg_ParseTuple(state, "OOII", &pool, &table, &view->first_entry, &view->units_per_page)) {
        s->failed = true;
        return;
    }
    uint32_t i = s->n_buffers;
    stage_array(s, "pool", pool, 'f', true, &view->pool);
    stage_array(s, "table", table, 'i', false, &view->table);
    if (s->failed)
        return;
    const Py_buffer *pages = &s->buffers[i], *entries = &s->buffers[i + 1];
    if (pages->ndim != 2 || entries->ndim != 2 || !view->units_per_page) {
        stage_fail(s, "state", "pages and a table, both with two dimensions");
        return;
    }
    view->page_bytes = (size_t)pages->shape[1] * sizeof(float);
    view->table_stride = (uint32_t)entries->shape[1];
    view->n_units = n_units;
    view->unit_bytes = unit_floats * (uint32_t)sizeof(float);
    uint32_t n_pages = (n_units + view->units_per_page - 1) / view->units_per_page;
    if ((size_t)view->units_per_page * view->unit_bytes > view->page_bytes || view->first_entry + n_pages > view->table_stride)
        stage_fail(s, "state", "pages with room for their units, and a table with room for the pages");
}

/* A vector of n items, or None where that is allowed. */
static void stage_vector(struct stage *s, const char *name, PyObject *object, size_t n, bool is_optional, const float **target)
{
    size_t have = stage_array(s, name, object, 'f', false, target);
    if (!s->failed && have != n && !(is_optional && object == Py_None))
        stage_fail(s, name, "as many items as the other arrays ask for");
}

/* x, dt, b, c and out, which ssm and selective_scan share, and the gate where there is one. */
static void stage_mixed(struct stage *s, PyObject *const objects[6], struct view *const views[6])
{
    static const char *const names[6] = {"x", "dt", "b", "c", "out", "gate"};
    for (uint32_t i = 0; i < 6; i++)
        if (i < 5 || objects[i] != Py_None)
            stage_view(s, names[i], objects[i], i == 4, views[i]);
}

PyObject *py_backend_conv(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"state", "batch", "x", "weight", "bias", "out", "n_taps", "act", NULL};
    PyObject *state, *batch, *x, *weight, *bias, *out;
    struct batch_view view;
    struct conv_args a = {.batch = &view};
    int act = -1;
    struct stage s;
    stage_open(&s, object);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOOI|i", names, &state, &batch, &x, &weight, &bias, &out, &a.n_taps,
                                     &act))
        return NULL;
    a.has_act = act >= 0;
    a.act = act >= 0 ? (uint32_t)act : 0;
    stage_batch(&s, batch, &view);
    stage_view(&s, "x", x, false, &a.x);
    stage_view(&s, "out", out, true, &a.out);
    stage_vector(&s, "weight", weight, (size_t)a.x.width * a.n_taps, false, &a.weight);
    stage_vector(&s, "bias", bias, a.x.width, true, &a.bias);
    stage_state(&s, state, a.x.width, a.n_taps - 1, &a.state);
    STAGE_RUN(&s, conv, &a);
}

/* norms = (weight of b, of c, of dt, eps, matrix of dt, scratch) */
static void stage_norms(struct stage *s, PyObject *norms, struct ssm_args *a)
{
    PyObject *b, *c, *dt, *matrix, *scratch;
    if (s->failed)
        return;
    if (!PyArg_ParseTuple(norms, "OOOfOO", &b, &c, &dt, &a->norm_eps, &matrix, &scratch) ||
        !(a->dt_matrix = py_matrix_get(matrix))) {
        s->failed = true;
        return;
    }
    stage_vector(s, "b_norm", b, a->b.width, false, &a->b_norm);
    stage_vector(s, "c_norm", c, a->c.width, false, &a->c_norm);
    stage_vector(s, "dt_norm", dt, a->dt.width, false, &a->dt_norm);
    stage_view(s, "scratch", scratch, true, &a->scratch);
}

PyObject *py_backend_ssm(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"state", "batch", "x",        "dt",     "b",      "c",    "a_log", "dt_bias",
                            "skip",  "out",   "n_groups", "dt_min", "dt_max", "gate", "act",   "norms", NULL};
    PyObject *state, *batch, *x, *dt, *b, *c, *a_log, *dt_bias, *skip, *out, *gate = Py_None, *norms = Py_None;
    struct batch_view view;
    struct ssm_args a = {.batch = &view, .n_groups = 1, .dt_max = 3.4e38f};
    struct stage s;
    stage_open(&s, object);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOOOOOO|IffOIO", names, &state, &batch, &x, &dt, &b, &c, &a_log,
                                     &dt_bias, &skip, &out, &a.n_groups, &a.dt_min, &a.dt_max, &gate, &a.act, &norms))
        return NULL;
    stage_batch(&s, batch, &view);
    stage_mixed(&s, (PyObject *const[]){x, dt, b, c, out, gate},
                (struct view *const[]){&a.x, &a.dt, &a.b, &a.c, &a.out, &a.gate});
    if (norms != Py_None)
        stage_norms(&s, norms, &a);
    size_t n_heads = stage_array(&s, "a_log", a_log, 'f', false, &a.a_log);
    a.n_heads = (uint32_t)n_heads;
    if (!s.failed && (!a.n_groups || !a.n_heads || a.x.width % a.n_heads || a.n_heads % a.n_groups || a.b.width % a.n_groups ||
                      (norms == Py_None && a.dt.width != a.n_heads)))
        stage_fail(&s, "x", "heads in groups");
    if (s.failed)
        return stage_end(&s);
    a.head_dim = a.x.width / a.n_heads;
    a.n_state = a.b.width / a.n_groups;
    stage_vector(&s, "dt_bias", dt_bias, a.n_heads, false, &a.dt_bias);
    stage_vector(&s, "skip", skip, a.n_heads, false, &a.skip);
    stage_state(&s, state, a.n_heads, a.head_dim * a.n_state, &a.state);
    STAGE_RUN(&s, ssm, &a);
}

PyObject *py_backend_selective_scan(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"state", "batch", "x", "dt", "b", "c", "a_log", "dt_bias", "skip", "out", "gate", "act", NULL};
    PyObject *state, *batch, *x, *dt, *b, *c, *a_log, *dt_bias, *skip, *out, *gate = Py_None;
    struct batch_view view;
    struct selective_scan_args a = {.batch = &view};
    struct stage s;
    stage_open(&s, object);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOOOOOO|OI", names, &state, &batch, &x, &dt, &b, &c, &a_log, &dt_bias,
                                     &skip, &out, &gate, &a.act))
        return NULL;
    stage_batch(&s, batch, &view);
    stage_mixed(&s, (PyObject *const[]){x, dt, b, c, out, gate},
                (struct view *const[]){&a.x, &a.dt, &a.b, &a.c, &a.out, &a.gate});
    a.n_state = a.b.width;
    stage_vector(&s, "a_log", a_log, (size_t)a.x.width * a.n_state, false, &a.a_log);
    stage_vector(&s, "dt_bias", dt_bias, a.x.width, true, &a.dt_bias);
    stage_vector(&s, "skip", skip, a.x.width, false, &a.skip);
    stage_state(&s, state, a.x.width, a.n_state, &a.state);
    STAGE_RUN(&s, selective_scan, &a);
}

PyObject *py_backend_delta(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"state", "batch", "q", "k", "v", "a", "b", "a_log", "dt_bias", "out", "n_key_heads", NULL};
    PyObject *state, *batch, *q, *k, *v, *decay, *beta, *a_log, *dt_bias, *out;
    struct batch_view view;
    struct delta_args a = {.batch = &view};
    struct stage s;
    stage_open(&s, object);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOOOOOOI", names, &state, &batch, &q, &k, &v, &decay, &beta, &a_log,
                                     &dt_bias, &out, &a.n_key_heads))
        return NULL;
    stage_batch(&s, batch, &view);
    stage_view(&s, "q", q, false, &a.q);
    stage_view(&s, "k", k, false, &a.k);
    stage_view(&s, "v", v, false, &a.v);
    stage_view(&s, "a", decay, false, &a.a);
    stage_view(&s, "b", beta, false, &a.b);
    stage_view(&s, "out", out, true, &a.out);
    a.n_heads = a.a.width;
    if (!s.failed && (!a.n_key_heads || !a.n_heads || a.n_heads % a.n_key_heads || a.q.width % a.n_key_heads ||
                      a.v.width % a.n_heads))
        stage_fail(&s, "v", "value heads, a multiple of the key heads");
    if (s.failed)
        return stage_end(&s);
    a.key_dim = a.q.width / a.n_key_heads;
    a.value_dim = a.v.width / a.n_heads;
    stage_vector(&s, "a_log", a_log, a.n_heads, false, &a.a_log);
    stage_vector(&s, "dt_bias", dt_bias, a.n_heads, false, &a.dt_bias);
    stage_state(&s, state, a.n_heads, a.key_dim * a.value_dim, &a.state);
    STAGE_RUN(&s, delta, &a);
}
