/* py_backend_encoder.c: what encoders need of _core.Backend: act, layer_norm, row_attention; scale_logits and
 * position_scale. */
#include "py_stage.h"

#include <string.h>

PyObject *py_backend_act(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"x", "out", "act", "limit", "weights", NULL};
    PyObject *x, *out, *weights = Py_None;
    struct act_args a = {0};
    struct stage s;
    stage_open(&s, object);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|IfO", names, &x, &out, &a.act, &a.limit, &weights))
        return NULL;
    stage_view(&s, "x", x, false, &a.x);
    stage_view(&s, "out", out, true, &a.out);
    stage_array(&s, "weights", weights, 'f', false, &a.weights);
    a.n_rows = s.n_rows;
    STAGE_RUN(&s, act, &a);
}

PyObject *py_backend_layer_norm(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"x", "weight", "bias", "out", "eps", "n_heads", "weight_stride", NULL};
    PyObject *x, *weight, *bias, *out;
    struct layer_norm_args a = {.n_heads = 1};
    struct stage s;
    stage_open(&s, object);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOf|II", names, &x, &weight, &bias, &out, &a.eps, &a.n_heads,
                                     &a.weight_stride))
        return NULL;
    stage_view(&s, "x", x, false, &a.x);
    stage_array(&s, "weight", weight, 'f', false, &a.weight);
    stage_array(&s, "bias", bias, 'f', false, &a.bias);
    stage_view(&s, "out", out, true, &a.out);
    a.n_rows = s.n_rows;
    STAGE_RUN(&s, layer_norm, &a);
}

PyObject *py_backend_scale_logits(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"logits", "scale", "softcap", NULL};
    PyObject *logits;
    struct scale_logits_args a = {0};
    struct stage s;
    stage_open(&s, object);
    s.item_bytes = sizeof(float);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Off", names, &logits, &a.scale, &a.softcap))
        return NULL;
    stage_view(&s, "logits", logits, true, &a.logits);
    a.n_rows = s.n_rows;
    STAGE_RUN(&s, scale_logits, &a);
}

PyObject *py_backend_position_scale(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"x", "positions", "out", "every", "slope", "first", NULL};
    PyObject *x, *positions, *out;
    struct position_scale_args a = {0};
    struct stage s;
    stage_open(&s, object);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOIfI", names, &x, &positions, &out, &a.every, &a.slope, &a.first))
        return NULL;
    stage_view(&s, "x", x, false, &a.x);
    size_t n = stage_array(&s, "positions", positions, 'i', false, &a.positions);
    stage_view(&s, "out", out, true, &a.out);
    if (!s.failed && (n != s.n_rows || !a.every))
        stage_fail(&s, "positions", "one for each row, and steps of at least 1");
    a.n_rows = s.n_rows;
    STAGE_RUN(&s, position_scale, &a);
}

PyObject *py_backend_row_attention(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"seq_first_row", "q", "k", "v", "out", "n_heads", "n_kv_heads", "scale", NULL};
    PyObject *starts, *q, *k, *v, *out;
    struct batch_view batch = {0};
    struct row_attention_args a = {.batch = &batch};
    int32_t host[64];
    struct stage s;
    stage_open(&s, object);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOIIf", names, &starts, &q, &k, &v, &out, &a.n_heads, &a.n_kv_heads,
                                     &a.scale))
        return NULL;
    stage_view(&s, "q", q, false, &a.q);
    stage_view(&s, "k", k, false, &a.k);
    stage_view(&s, "v", v, false, &a.v);
    stage_view(&s, "out", out, true, &a.out);
    uint32_t i = s.n_buffers;
    size_t n = stage_array(&s, "seq_first_row", starts, 'i', false, &batch.seq_first_row);
    if (!s.failed && (n < 2 || n > sizeof host / sizeof *host || !a.n_heads))
        stage_fail(&s, "seq_first_row", "the starts of 1 to 63 sequences and the end of the last");
    if (!s.failed) {
        memcpy(host, s.buffers[i].buf, n * sizeof *host);
        batch.host_seq_first_row = host;
        batch.n_seqs = (uint32_t)n - 1;
        batch.n_rows = s.n_rows;
        a.head_dim = a.q.width / a.n_heads;
    }
    STAGE_RUN(&s, row_attention, &a);
}
