/* py_backend.c: _core.Backend, one backend's operations on host arrays, for kernel tests and benchmarks. Matrices and pools of
 * pages are capsules that keep their backend alive. */
#include "py_stage.h"

#include "../base/mem.h"
#include "../program/backend_library.h"
#include "../program/weights.h"

#include <string.h>

/* ---- the object ------------------------------------------------------------------------------------------------------- */

static PyObject *backend_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"device", "isa", "num_threads", "max_rows", "max_cols", "vocab_size", "dtype",
                            "library", "cublaslt", NULL};
    struct backend_options options = {.device = "cpu", .isa = "auto", .max_rows = 512, .max_cols = 16384};
    const char *dtype = "float32", *library = "";
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|ssIIIIsss", names, &options.device, &options.isa, &options.n_threads,
                                     &options.max_rows, &options.max_cols, &options.vocab_size, &dtype, &library,
                                     &options.cublaslt))
        return NULL;
    options.max_logits_rows = options.max_rows;
    options.dtype = dtype_from_name(dtype);
    struct err err = {0};
    const struct backend *table;
    if (backend_find(options.device, library, &table, &err))
        return py_raise(&err);
    struct backend_object *self = py_allocate(type);
    if (!self)
        return NULL;
    self->table = table;
    if (self->table->open(&options, &self->ctx, &err)) {
        self->ctx = NULL;
        Py_DECREF(self);
        return py_raise(&err);
    }
    return (PyObject *)self;
}

static void backend_dealloc(PyObject *object)
{
    struct backend_object *self = (struct backend_object *)object;
    if (self->ctx)
        self->table->close(self->ctx);
    py_deallocate(object);
}

static PyObject *get_description(PyObject *object, void *closure)
{
    (void)closure;
    struct backend_object *self = (struct backend_object *)object;
    return PyUnicode_FromString(self->table->describe(self->ctx));
}

static PyObject *get_fusions(PyObject *object, void *closure)
{
    (void)closure;
    struct backend_object *self = (struct backend_object *)object;
    return PyLong_FromUnsignedLong(self->table->fusions(self->ctx));
}

static PyObject *get_seconds(PyObject *object, void *closure)
{
    (void)closure;
    return PyFloat_FromDouble(((struct backend_object *)object)->seconds);
}

static PyObject *get_allocations(PyObject *object, void *closure)
{
    (void)closure;
    return PyLong_FromUnsignedLongLong(((struct backend_object *)object)->allocations);
}

/* ---- matrices: capsules that keep their backend alive ------------------------------------------------------------------ */

#define MATRIX_NAME "llmpy.matrix"
#define MAX_PARTS 512

static void matrix_free(PyObject *capsule)
{
    struct backend_object *self = PyCapsule_GetContext(capsule);
    self->table->matrix_destroy(self->ctx, PyCapsule_GetPointer(capsule, MATRIX_NAME));
    Py_DECREF(self);
}

struct matrix *py_matrix_get(PyObject *capsule)
{
    return PyCapsule_GetPointer(capsule, MATRIX_NAME);
}

/* Parses [(dtype name, rows, bytes)] into parts; the number of parts, or -1. */
static Py_ssize_t matrix_parts(PyObject *list, struct matrix_part *parts, Py_ssize_t max)
{
    Py_ssize_t n = PySequence_Size(list);
    if (n < 1 || n > max) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "parts: wanted 1 to 512 of them");
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *item = PySequence_GetItem(list, i), *data;
        const char *name;
        int ok = item && PyArg_ParseTuple(item, "sIO", &name, &parts[i].n_rows, &data);
        if (ok)
            parts[i].dtype = dtype_from_name(name);
        Py_XDECREF(item);
        if (!ok)
            return -1;
    }
    return n;
}

static int matrix_fill(struct backend_object *self, struct matrix *matrix, PyObject *list, Py_ssize_t n)
{
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *item = PySequence_GetItem(list, i), *data;
        const char *name;
        uint32_t rows;
        Py_buffer buffer;
        if (!item || !PyArg_ParseTuple(item, "sIO", &name, &rows, &data) ||
            PyObject_GetBuffer(data, &buffer, PyBUF_SIMPLE) < 0) {
            Py_XDECREF(item);
            return -1;
        }
        struct err err = {0};
        enum rc rc = self->table->matrix_write(self->ctx, matrix, (uint32_t)i, 0, rows, buffer.buf, &err);
        PyBuffer_Release(&buffer);
        Py_DECREF(item);
        if (rc) {
            py_raise(&err);
            return -1;
        }
    }
    return 0;
}

static PyObject *backend_matrix(PyObject *object, PyObject *args, PyObject *kwargs)
{
    struct backend_object *self = (struct backend_object *)object;
    static char *names[] = {"parts", "cols", "use", "arithmetic", NULL};
    struct matrix_part parts[MAX_PARTS];
    struct matrix_desc desc = {.parts = parts, .use = MATRIX_LINEAR};
    PyObject *list;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OI|II", names, &list, &desc.n_cols, &desc.use, &desc.arithmetic))
        return NULL;
    Py_ssize_t n = matrix_parts(list, parts, MAX_PARTS);
    if (n < 0)
        return NULL;
    desc.n_parts = (uint32_t)n;
    struct matrix *matrix = NULL;
    struct err err = {0};
    if (self->table->matrix_create(self->ctx, &desc, &matrix, &err))
        return py_raise(&err);
    PyObject *capsule = matrix_fill(self, matrix, list, n) < 0 ? NULL : PyCapsule_New(matrix, MATRIX_NAME, matrix_free);
    if (!capsule) {
        self->table->matrix_destroy(self->ctx, matrix);
        return NULL;
    }
    PyCapsule_SetContext(capsule, Py_NewRef(object));
    return capsule;
}

static PyObject *backend_matrix_info(PyObject *object, PyObject *args)
{
    struct backend_object *self = (struct backend_object *)object;
    PyObject *capsule;
    uint32_t part;
    if (!PyArg_ParseTuple(args, "OI", &capsule, &part))
        return NULL;
    struct matrix *matrix = py_matrix_get(capsule);
    if (!matrix)
        return NULL;
    return Py_BuildValue("nI", (Py_ssize_t)self->table->matrix_bytes(matrix), self->table->matrix_arithmetic(matrix, part));
}

static PyObject *backend_matrix_write(PyObject *object, PyObject *args)
{
    struct backend_object *self = (struct backend_object *)object;
    PyObject *capsule, *data;
    uint32_t part, first_row, n_rows;
    if (!PyArg_ParseTuple(args, "OIIIO", &capsule, &part, &first_row, &n_rows, &data))
        return NULL;
    struct matrix *matrix = py_matrix_get(capsule);
    Py_buffer buffer;
    if (!matrix || PyObject_GetBuffer(data, &buffer, PyBUF_SIMPLE) < 0)
        return NULL;
    struct err err = {0};
    enum rc rc = self->table->matrix_write(self->ctx, matrix, part, first_row, n_rows, buffer.buf, &err);
    PyBuffer_Release(&buffer);
    return rc ? py_raise(&err) : Py_NewRef(Py_None);
}

/* ---- memory ------------------------------------------------------------------------------------------------------------ */

static PyObject *backend_memory(PyObject *object, PyObject *args)
{
    (void)args;
    struct backend_object *self = (struct backend_object *)object;
    struct backend_memory m;
    struct err err = {0};
    if (!self->table->memory)
        Py_RETURN_NONE;
    if (self->table->memory(self->ctx, &m, &err))
        return py_raise(&err);
    return Py_BuildValue("{sKsKsKsKsKsK}", "weights", m.held_bytes[MEMORY_WEIGHTS], "kv", m.held_bytes[MEMORY_KV], "work",
                         m.held_bytes[MEMORY_WORK], "pinned", m.held_bytes[MEMORY_PINNED], "total", m.total_bytes, "free",
                         m.free_bytes);
}

static PyObject *backend_pool_release(PyObject *object, PyObject *args)
{
    struct backend_object *self = (struct backend_object *)object;
    uint32_t use;
    struct err err = {0};
    if (!PyArg_ParseTuple(args, "I", &use))
        return NULL;
    if (self->table->pool_release && self->table->pool_release(self->ctx, use, &err))
        return py_raise(&err);
    Py_RETURN_NONE;
}

static PyObject *backend_pool_restore(PyObject *object, PyObject *args)
{
    struct backend_object *self = (struct backend_object *)object;
    uint32_t use;
    struct err err = {0};
    if (!PyArg_ParseTuple(args, "I", &use))
        return NULL;
    if (self->table->pool_restore && self->table->pool_restore(self->ctx, use, &err))
        return py_raise(&err);
    Py_RETURN_NONE;
}

static PyObject *backend_pool_save(PyObject *object, PyObject *args)
{
    struct backend_object *self = (struct backend_object *)object;
    uint32_t use;
    struct err err = {0};
    if (!PyArg_ParseTuple(args, "I", &use))
        return NULL;
    if (self->table->pool_save && self->table->pool_save(self->ctx, use, &err))
        return py_raise(&err);
    Py_RETURN_NONE;
}

static PyObject *backend_matrix_fill(PyObject *object, PyObject *args)
{
    struct backend_object *self = (struct backend_object *)object;
    PyObject *capsule;
    uint32_t part, cols;
    unsigned long long key, source_row = 0, step = 1;
    const char *dtype;
    struct row_run rows = {0};
    if (!PyArg_ParseTuple(args, "OIKsII|IKK", &capsule, &part, &key, &dtype, &rows.n_rows, &cols, &rows.first_row, &source_row,
                          &step))
        return NULL;
    struct matrix *matrix = py_matrix_get(capsule);
    if (!matrix)
        return NULL;
    struct err err = {0};
    rows.source_row = source_row;
    rows.step = step;
    enum rc rc = weights_fill(self->table, self->ctx, matrix, part, dtype_from_name(dtype), &rows, cols, key, &err);
    return rc ? py_raise(&err) : Py_NewRef(Py_None);
}

static PyObject *backend_matrix_read(PyObject *object, PyObject *args)
{
    struct backend_object *self = (struct backend_object *)object;
    PyObject *capsule, *out;
    uint32_t first_row, n_rows;
    if (!PyArg_ParseTuple(args, "OIIO", &capsule, &first_row, &n_rows, &out))
        return NULL;
    struct matrix *matrix = py_matrix_get(capsule);
    Py_buffer buffer;
    if (!matrix || PyObject_GetBuffer(out, &buffer, PyBUF_CONTIG) < 0)
        return NULL;
    struct err err = {0};
    enum rc rc = self->table->matrix_read(self->ctx, matrix, first_row, n_rows, buffer.buf, &err);
    PyBuffer_Release(&buffer);
    return rc ? py_raise(&err) : Py_NewRef(Py_None);
}

static PyObject *backend_prepare(PyObject *object, PyObject *args)
{
    (void)args;
    struct backend_object *self = (struct backend_object *)object;
    struct err err = {0};
    enum rc rc = self->table->prepare ? self->table->prepare(self->ctx, &err) : RC_OK;
    return rc ? py_raise(&err) : Py_NewRef(Py_None);
}

static PyObject *backend_supports(PyObject *object, PyObject *args)
{
    struct backend_object *self = (struct backend_object *)object;
    const char *name;
    uint32_t use = MATRIX_LINEAR;
    if (!PyArg_ParseTuple(args, "s|I", &name, &use))
        return NULL;
    return PyBool_FromLong(self->table->supports(self->ctx, dtype_from_name(name), use));
}

/* ---- operations on rows ------------------------------------------------------------------------------------------------ */

static PyObject *backend_embed(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"matrix", "token_ids", "out", "scale", "first_row", NULL};
    PyObject *matrix, *ids, *out;
    struct embed_args a = {.scale = 1.0f};
    struct stage s;
    stage_open(&s, object);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO|fI", names, &matrix, &ids, &out, &a.scale, &a.first_row))
        return NULL;
    if (!(a.matrix = py_matrix_get(matrix)))
        return NULL;
    stage_any_view(&s, "out", out, true, &a.out, &a.n_rows);
    if (ids != Py_None && stage_array(&s, "token_ids", ids, 'i', false, &a.token_ids) != a.n_rows)
        stage_fail(&s, "token_ids", "one id for each row of out");
    STAGE_RUN(&s, embed, &a);
}

static PyObject *backend_linear(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"matrix", "x", "y", "bias", "add", "input", "norm_weight", "norm_eps",
                            "act", "is_float_out", "mid", NULL};
    PyObject *matrix, *x, *y, *bias = Py_None, *add = Py_None, *norm = Py_None, *mid = Py_None;
    int is_float_out = 0;
    struct linear_args a = {0};
    struct view added;
    struct stage s;
    stage_open(&s, object);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO|OOIOfIpO", names, &matrix, &x, &y, &bias, &add, &a.input, &norm,
                                     &a.norm_eps, &a.act, &is_float_out, &mid))
        return NULL;
    if (!(a.matrix = py_matrix_get(matrix)))
        return NULL;
    a.is_float_out = is_float_out;
    stage_view(&s, "x", x, false, &a.x);
    uint32_t item_bytes = s.item_bytes;
    s.item_bytes = is_float_out ? sizeof(float) : item_bytes;
    stage_view(&s, "y", y, true, &a.y);
    s.item_bytes = item_bytes;
    stage_array(&s, "bias", bias, 'f', false, &a.bias);
    stage_array(&s, "norm_weight", norm, 'f', false, &a.norm_weight);
    if (add != Py_None) {
        stage_view(&s, "add", add, false, &added);
        a.add = &added;
    }
    if (mid != Py_None) {
        stage_view(&s, "mid", mid, true, &a.mid);
        a.output = a.mid.width == 2 * a.y.width ? LINEAR_PRODUCT : LINEAR_SUM;
    }
    a.n_rows = s.n_rows;
    STAGE_RUN(&s, linear, &a);
}

static PyObject *backend_rms_norm(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"x", "weight", "out", "eps", "n_heads", "weight_stride", NULL};
    PyObject *x, *weight, *out;
    struct rms_norm_args a = {.n_heads = 1};
    struct stage s;
    stage_open(&s, object);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOf|II", names, &x, &weight, &out, &a.eps, &a.n_heads,
                                     &a.weight_stride))
        return NULL;
    stage_view(&s, "x", x, false, &a.x);
    stage_array(&s, "weight", weight, 'f', false, &a.weight);
    stage_view(&s, "out", out, true, &a.out);
    a.n_rows = s.n_rows;
    STAGE_RUN(&s, rms_norm, &a);
}

static PyObject *backend_gated(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"gate", "up", "out", "act", NULL};
    PyObject *gate, *up, *out;
    struct gated_args a = {0};
    struct stage s;
    stage_open(&s, object);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO|I", names, &gate, &up, &out, &a.act))
        return NULL;
    stage_view(&s, "gate", gate, false, &a.gate);
    stage_view(&s, "up", up, false, &a.up);
    stage_view(&s, "out", out, true, &a.out);
    a.n_rows = s.n_rows;
    STAGE_RUN(&s, gated, &a);
}

static PyObject *backend_add(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"a", "b", "out", NULL};
    PyObject *left, *right, *out;
    struct add_args a = {0};
    struct stage s;
    stage_open(&s, object);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO", names, &left, &right, &out))
        return NULL;
    stage_view(&s, "a", left, false, &a.a);
    stage_view(&s, "b", right, false, &a.b);
    stage_view(&s, "out", out, true, &a.out);
    a.n_rows = s.n_rows;
    STAGE_RUN(&s, add, &a);
}

static PyObject *backend_add_rms_norm(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"a", "b", "sum", "weight", "out", "eps", "inner_weight", "inner_eps", NULL};
    PyObject *left, *right, *sum, *weight, *out, *inner = Py_None;
    struct add_rms_norm_args a = {0};
    struct stage s;
    stage_open(&s, object);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOf|Of", names, &left, &right, &sum, &weight, &out, &a.eps, &inner,
                                     &a.inner_eps))
        return NULL;
    if (!s.self->table->add_rms_norm)
        return PyErr_Format(PyExc_NotImplementedError, "this backend has no fused add_rms_norm");
    stage_view(&s, "a", left, false, &a.a);
    stage_view(&s, "b", right, false, &a.b);
    stage_view(&s, "sum", sum, true, &a.sum);
    stage_array(&s, "weight", weight, 'f', false, &a.weight);
    stage_array(&s, "inner_weight", inner, 'f', false, &a.inner_weight);
    stage_view(&s, "out", out, true, &a.out);
    a.n_rows = s.n_rows;
    STAGE_RUN(&s, add_rms_norm, &a);
}

static PyObject *backend_select(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"x", "rows", "out", NULL};
    PyObject *x, *rows, *out;
    struct select_args a = {0};
    struct stage s;
    stage_open(&s, object);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO", names, &x, &rows, &out))
        return NULL;
    uint32_t x_rows;
    stage_any_view(&s, "x", x, false, &a.x, &x_rows);
    a.n_selected = (uint32_t)stage_array(&s, "rows", rows, 'i', false, &a.rows);
    s.n_rows = a.n_selected;
    s.has_rows = true;
    stage_view(&s, "out", out, true, &a.out);
    STAGE_RUN(&s, select, &a);
}

/* ---- the cache: capsules of one pool ------------------------------------------------------------------------------------ */

#define POOL_NAME "llmpy.kv_pool"

struct kv_pool {
    struct kv_view view; /* without table */
    size_t layer_bytes;
    uint32_t n_pages, n_layers, block_tokens;
};

static void pool_free(PyObject *capsule)
{
    struct backend_object *self = PyCapsule_GetContext(capsule);
    struct kv_pool *pool = PyCapsule_GetPointer(capsule, POOL_NAME);
    self->table->buffer_destroy(self->ctx, pool->view.pool, pool->n_pages * pool->view.page_bytes);
    mem_free(pool);
    Py_DECREF(self);
}

static enum rc pool_write(struct backend_object *self, struct kv_pool *pool, int fill, struct err *err)
{
    size_t n_bytes = pool->view.page_bytes;
    void *page = mem_alloc(n_bytes);
    if (!page)
        return err_set(err, RC_MEMORY, "kv_pool: no memory");
    memset(page, fill, n_bytes);
    enum rc rc = RC_OK;
    for (uint32_t i = 0; !rc && i < pool->n_pages; i++)
        rc = self->table->upload(self->ctx, (char *)pool->view.pool + i * n_bytes, page, n_bytes, err);
    mem_free(page);
    return rc;
}

static PyObject *backend_kv_pool(PyObject *object, PyObject *args, PyObject *kwargs)
{
    struct backend_object *self = (struct backend_object *)object;
    static char *names[] = {"n_pages", "n_kv_heads", "head_dim", "dtype", "block_tokens", "n_layers", "fill", NULL};
    struct kv_pool made = {.n_layers = 1, .block_tokens = 16};
    const char *dtype = "float32";
    int fill = 0xff;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "III|sIIi", names, &made.n_pages, &made.view.n_kv_heads, &made.view.head_dim,
                                     &dtype, &made.block_tokens, &made.n_layers, &fill))
        return NULL;
    made.view.dtype = dtype_from_name(dtype);
    made.layer_bytes = self->table->kv_layer_bytes(self->ctx, made.view.n_kv_heads, made.view.head_dim, made.view.dtype,
                                                   made.block_tokens);
    made.view.page_bytes = made.layer_bytes * made.n_layers;
    struct err err = {0};
    if (!made.view.page_bytes)
        return PyErr_Format(PyExc_ValueError, "kv_pool: no pages of %s", dtype);
    size_t size_bytes = made.n_pages * made.view.page_bytes;
    if (self->table->pool_create ? self->table->pool_create(self->ctx, MEMORY_KV, size_bytes, &made.view.pool, &err)
                                 : self->table->buffer_create(self->ctx, size_bytes, &made.view.pool, &err))
        return py_raise(&err);
    struct kv_pool *pool = mem_alloc(sizeof *pool);
    if (pool)
        *pool = made;
    enum rc rc = pool ? pool_write(self, pool, fill, &err) : err_set(&err, RC_MEMORY, "kv_pool: no memory");
    PyObject *capsule = rc ? py_raise(&err) : PyCapsule_New(pool, POOL_NAME, pool_free);
    if (!capsule) {
        self->table->buffer_destroy(self->ctx, made.view.pool, size_bytes);
        mem_free(pool);
        return NULL;
    }
    PyCapsule_SetContext(capsule, Py_NewRef(object));
    return capsule;
}

static PyObject *backend_kv_read(PyObject *object, PyObject *capsule)
{
    struct backend_object *self = (struct backend_object *)object;
    struct kv_pool *pool = PyCapsule_GetPointer(capsule, POOL_NAME);
    if (!pool)
        return NULL;
    size_t n_bytes = pool->n_pages * pool->view.page_bytes;
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)n_bytes);
    struct err err = {0};
    if (bytes && self->table->download(self->ctx, PyBytes_AsString(bytes), pool->view.pool, n_bytes, &err)) {
        Py_DECREF(bytes);
        return py_raise(&err);
    }
    return bytes;
}

void stage_batch(struct stage *s, PyObject *batch, struct batch_view *view)
{
    PyObject *positions, *row_seq, *first;
    memset(view, 0, sizeof *view);
    if (s->failed)
        return;
    if (!PyArg_ParseTuple(batch, "OOO", &positions, &row_seq, &first)) {
        s->failed = true;
        return;
    }
    view->n_rows = (uint32_t)stage_array(s, "positions", positions, 'i', false, &view->positions);
    size_t n = stage_array(s, "row_seq", row_seq, 'i', false, &view->row_seq);
    view->n_seqs = (uint32_t)stage_array(s, "seq_first_row", first, 'i', false, &view->seq_first_row) - 1;
    view->host_seq_first_row = s->failed ? NULL : s->buffers[s->n_buffers - 1].buf;
    if (!s->failed && n != view->n_rows)
        stage_fail(s, "row_seq", "as many items as positions");
    s->n_rows = view->n_rows;
    s->has_rows = true;
}

void stage_kv(struct stage *s, PyObject *capsule, PyObject *table, uint32_t layer, struct batch_view *batch,
              struct kv_view *view)
{
    memset(view, 0, sizeof *view);
    struct kv_pool *pool = s->failed ? NULL : PyCapsule_GetPointer(capsule, POOL_NAME);
    if (!pool) {
        s->failed = true;
        return;
    }
    *view = pool->view;
    view->layer_offset = layer * pool->layer_bytes;
    batch->block_tokens = pool->block_tokens;
    size_t n = stage_array(s, "table", table, 'i', false, &view->table);
    view->table_stride = batch->n_seqs ? (uint32_t)(n / batch->n_seqs) : 0;
    if (!s->failed && (layer >= pool->n_layers || n != (size_t)view->table_stride * batch->n_seqs))
        stage_fail(s, "table", "one row a sequence, and a layer of the pool");
}

static PyObject *backend_kv_write(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"pool", "batch", "table", "k", "v", "layer", NULL};
    PyObject *pool, *batch, *table, *k, *v;
    uint32_t layer = 0;
    struct batch_view view;
    struct kv_write_args a = {.batch = &view};
    struct stage s;
    stage_open(&s, object);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOO|I", names, &pool, &batch, &table, &k, &v, &layer))
        return NULL;
    stage_batch(&s, batch, &view);
    stage_kv(&s, pool, table, layer, &view, &a.kv);
    stage_view(&s, "k", k, false, &a.k);
    stage_view(&s, "v", v, false, &a.v);
    STAGE_RUN(&s, kv_write, &a);
}

static PyObject *backend_copy_pages(PyObject *object, PyObject *args)
{
    PyObject *capsule, *copies;
    struct stage s;
    stage_open(&s, object);
    if (!PyArg_ParseTuple(args, "OO", &capsule, &copies))
        return NULL;
    struct kv_pool *pool = PyCapsule_GetPointer(capsule, POOL_NAME);
    if (!pool)
        return NULL;
    struct copy_pages_args a = {.pool = pool->view.pool, .page_bytes = pool->view.page_bytes};
    Py_buffer list;
    if (PyObject_GetBuffer(copies, &list, PyBUF_SIMPLE) < 0)
        return NULL;
    a.copies = list.buf;
    a.n_copies = (uint32_t)((size_t)list.len / sizeof *a.copies);
    if (stage_begin(&s))
        stage_done(&s, s.self->table->copy_pages(s.self->ctx, &a, &s.err));
    PyBuffer_Release(&list);
    return stage_end(&s);
}

/* ---- the type ----------------------------------------------------------------------------------------------------------- */

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))backend_##name, METH_VARARGS | METH_KEYWORDS, NULL}

static PyMethodDef methods[] = {
    METHOD(matrix),
    {"matrix_info", backend_matrix_info, METH_VARARGS, NULL},
    {"matrix_write", backend_matrix_write, METH_VARARGS, NULL},
    {"memory", backend_memory, METH_NOARGS, NULL},
    {"pool_release", backend_pool_release, METH_VARARGS, NULL},
    {"pool_restore", backend_pool_restore, METH_VARARGS, NULL},
    {"pool_save", backend_pool_save, METH_VARARGS, NULL},
    {"matrix_fill", backend_matrix_fill, METH_VARARGS, NULL},
    {"matrix_read", backend_matrix_read, METH_VARARGS, NULL},
    {"prepare", backend_prepare, METH_NOARGS, NULL},
    {"supports", backend_supports, METH_VARARGS, NULL},
    METHOD(embed),
    METHOD(linear),
    METHOD(rms_norm),
    METHOD(gated),
    METHOD(add),
    METHOD(add_rms_norm),
    METHOD(select),
    {"rope_table", (PyCFunction)(void (*)(void))py_backend_rope_table, METH_VARARGS | METH_KEYWORDS, NULL},
    {"rope", (PyCFunction)(void (*)(void))py_backend_rope, METH_VARARGS | METH_KEYWORDS, NULL},
    METHOD(kv_pool),
    {"kv_read", backend_kv_read, METH_O, NULL},
    METHOD(kv_write),
    {"attention", (PyCFunction)(void (*)(void))py_backend_attention, METH_VARARGS | METH_KEYWORDS, NULL},
    {"qkv", (PyCFunction)(void (*)(void))py_backend_qkv, METH_VARARGS | METH_KEYWORDS, NULL},
    {"copy_pages", backend_copy_pages, METH_VARARGS, NULL},
    {"tensor_write", (PyCFunction)(void (*)(void))py_backend_tensor_write, METH_VARARGS | METH_KEYWORDS, NULL},
    {"tensor_sum", (PyCFunction)(void (*)(void))py_backend_tensor_sum, METH_VARARGS | METH_KEYWORDS, NULL},
    {"act", (PyCFunction)(void (*)(void))py_backend_act, METH_VARARGS | METH_KEYWORDS, NULL},
    {"layer_norm", (PyCFunction)(void (*)(void))py_backend_layer_norm, METH_VARARGS | METH_KEYWORDS, NULL},
    {"scale_logits", (PyCFunction)(void (*)(void))py_backend_scale_logits, METH_VARARGS | METH_KEYWORDS, NULL},
    {"position_scale", (PyCFunction)(void (*)(void))py_backend_position_scale, METH_VARARGS | METH_KEYWORDS, NULL},
    {"row_attention", (PyCFunction)(void (*)(void))py_backend_row_attention, METH_VARARGS | METH_KEYWORDS, NULL},
    {"conv", (PyCFunction)(void (*)(void))py_backend_conv, METH_VARARGS | METH_KEYWORDS, NULL},
    {"ssm", (PyCFunction)(void (*)(void))py_backend_ssm, METH_VARARGS | METH_KEYWORDS, NULL},
    {"selective_scan", (PyCFunction)(void (*)(void))py_backend_selective_scan, METH_VARARGS | METH_KEYWORDS, NULL},
    {"delta", (PyCFunction)(void (*)(void))py_backend_delta, METH_VARARGS | METH_KEYWORDS, NULL},
    {"route", (PyCFunction)(void (*)(void))py_backend_route, METH_VARARGS | METH_KEYWORDS, NULL},
    {"norm_route", (PyCFunction)(void (*)(void))py_backend_norm_route, METH_VARARGS | METH_KEYWORDS, NULL},
    {"norm_linear", (PyCFunction)(void (*)(void))py_backend_norm_linear, METH_VARARGS | METH_KEYWORDS, NULL},
    {"experts", (PyCFunction)(void (*)(void))py_backend_experts, METH_VARARGS | METH_KEYWORDS, NULL},
    {"head_linear", (PyCFunction)(void (*)(void))py_backend_head_linear, METH_VARARGS | METH_KEYWORDS, NULL},
    {"latent_attention", (PyCFunction)(void (*)(void))py_backend_latent_attention, METH_VARARGS | METH_KEYWORDS, NULL},
    {"begin", (PyCFunction)(void (*)(void))py_backend_begin, METH_VARARGS | METH_KEYWORDS, NULL},
    {"sample", (PyCFunction)(void (*)(void))py_backend_sample, METH_VARARGS | METH_KEYWORDS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef getters[] = {
    {"description", get_description, NULL, NULL, NULL},
    {"fusions", get_fusions, NULL, NULL, NULL},
    {"seconds", get_seconds, NULL, NULL, NULL},
    {"allocations", get_allocations, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, (void *)backend_new},
    {Py_tp_dealloc, (void *)backend_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, getters},
    {Py_tp_doc, (void *)"One backend's operations on host arrays, for kernel tests and benchmarks."},
    {0, NULL},
};

static PyType_Spec spec = {"llmpy._core.Backend", sizeof(struct backend_object), 0, Py_TPFLAGS_DEFAULT, slots};

int py_backend_register(PyObject *module)
{
    return py_add_type(module, &spec);
}
