/* py_backend_attention.c: what attention needs of _core.Backend: rope_table, rope, qkv, attention. */
#include "py_stage.h"

PyObject *py_backend_rope_table(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"positions", "inv_freq", "out", "magnitude", NULL};
    PyObject *positions, *inv_freq, *out;
    struct rope_table_args a = {.magnitude = 1.0f};
    struct stage s;
    stage_open(&s, object);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO|f", names, &positions, &inv_freq, &out, &a.magnitude))
        return NULL;
    a.n_rows = (uint32_t)stage_array(&s, "positions", positions, 'i', false, &a.positions);
    a.n_freqs = (uint32_t)stage_array(&s, "inv_freq", inv_freq, 'f', false, &a.inv_freq);
    if (stage_array(&s, "out", out, 'f', true, &a.table) != 2ul * a.n_rows * a.n_freqs)
        stage_fail(&s, "out", "positions x inv_freq x 2 items");
    STAGE_RUN(&s, rope_table, &a);
}

/* The rope table [n_rows][n_freqs][2], or None. */
static void stage_rope(struct stage *s, PyObject *table, PyObject *q, PyObject *k, struct rope_args *a)
{
    stage_view(s, "q", q, true, &a->q);
    stage_view(s, "k", k, true, &a->k);
    a->n_rows = s->n_rows;
    size_t n = stage_array(s, "table", table, 'f', false, &a->table);
    if (a->n_rows)
        a->n_freqs = (uint32_t)(n / 2 / a->n_rows);
    if (!s->failed && n != 2ul * a->n_rows * a->n_freqs)
        stage_fail(s, "table", "rows x frequencies x 2 items");
}

PyObject *py_backend_rope(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"table", "q", "k", "head_dim", "interleaved", NULL};
    PyObject *table, *q, *k;
    int interleaved = 0;
    struct rope_args a = {0};
    struct stage s;
    stage_open(&s, object);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOI|p", names, &table, &q, &k, &a.head_dim, &interleaved))
        return NULL;
    a.interleaved = interleaved;
    stage_rope(&s, table, q, k, &a);
    STAGE_RUN(&s, rope, &a);
}

/* What qkv takes beside batch, pool and eps. */
struct heads {
    PyObject *q, *k, *v, *q_norm, *k_norm, *rope; /* the last three may be None */
    int interleaved;
};

static void stage_heads(struct stage *s, const struct heads *heads, struct qkv_args *a)
{
    stage_rope(s, heads->rope, heads->q, heads->k, &a->rope);
    stage_view(s, "k", heads->k, true, &a->write.k);
    stage_view(s, "v", heads->v, false, &a->write.v);
    bool is_shared = stage_array(s, "q_norm", heads->q_norm, 'f', false, &a->q_norm) <= a->write.kv.head_dim;
    stage_array(s, "k_norm", heads->k_norm, 'f', false, &a->k_norm);
    a->norm_stride = is_shared ? 0 : a->write.kv.head_dim;
    a->rope.head_dim = a->write.kv.head_dim;
    a->rope.interleaved = heads->interleaved;
}

PyObject *py_backend_attention(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"pool", "batch", "table", "q", "out",   "scale", "window",
                            "softcap", "layer", "slopes", "sinks", "chunk", "heads", NULL};
    PyObject *pool, *batch, *table, *q, *out, *slopes = Py_None, *sinks = Py_None;
    struct heads joint = {.q_norm = Py_None, .k_norm = Py_None, .rope = Py_None};
    uint32_t layer = 0;
    struct batch_view view;
    struct qkv_args heads = {.write.batch = &view};
    struct attention_args a = {.batch = &view};
    struct stage s;
    stage_open(&s, object);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOf|IfIOOI(OOOOOfp)", names, &pool, &batch, &table, &q, &out, &a.scale,
                                     &a.window, &a.softcap, &layer, &slopes, &sinks, &a.chunk, &joint.k, &joint.v,
                                     &joint.q_norm, &joint.k_norm, &joint.rope, &heads.eps, &joint.interleaved))
        return NULL;
    if (joint.k && !(s.self->table->fusions(s.self->ctx) & FUSION_QKV_ATTENTION))
        return PyErr_Format(PyExc_NotImplementedError, "this backend's attention does no qkv");
    stage_batch(&s, batch, &view);
    stage_kv(&s, pool, table, layer, &view, &a.kv);
    stage_view(&s, "q", q, false, &a.q);
    stage_view(&s, "out", out, true, &a.out);
    if (joint.k) {
        joint.q = q;
        stage_kv(&s, pool, table, layer, &view, &heads.write.kv);
        stage_heads(&s, &joint, &heads);
        a.heads = &heads;
    }
    if (!s.failed)
        a.n_heads = a.q.width / a.kv.head_dim;
    for (int i = 0; i < 2; i++) {
        const char *name = i ? "sinks" : "slopes";
        size_t n = stage_array(&s, name, i ? sinks : slopes, 'f', false, i ? &a.sinks : &a.slopes);
        if (!s.failed && n && n != a.n_heads)
            stage_fail(&s, name, "one number a head");
    }
    STAGE_RUN(&s, attention, &a);
}

PyObject *py_backend_qkv(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"pool",   "batch", "table", "q",           "k",     "v", "q_norm",
                            "k_norm", "eps",   "rope",  "interleaved", "layer", NULL};
    PyObject *pool, *batch, *table;
    struct heads heads = {.q_norm = Py_None, .k_norm = Py_None, .rope = Py_None};
    uint32_t layer = 0;
    struct batch_view view;
    struct qkv_args a = {.write.batch = &view};
    struct stage s;
    stage_open(&s, object);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOO|OOfOpI", names, &pool, &batch, &table, &heads.q, &heads.k,
                                     &heads.v, &heads.q_norm, &heads.k_norm, &a.eps, &heads.rope, &heads.interleaved, &layer))
        return NULL;
    if (!s.self->table->qkv)
        return PyErr_Format(PyExc_NotImplementedError, "this backend has no fused qkv");
    stage_batch(&s, batch, &view);
    stage_kv(&s, pool, table, layer, &view, &a.write.kv);
    stage_heads(&s, &heads, &a);
    STAGE_RUN(&s, qkv, &a);
}
