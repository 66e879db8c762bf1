/* py_backend_tensor.c: Backend.tensor_write and Backend.tensor_sum. A place is (matrix, part, first row, rows, index of the
 * first element, what a row and a column add to it), or a float32 array that stands for a vector; a tensor is an array of
 * 4-byte items that holds its elements, of whatever type. */
#include "py_stage.h"

/* Rows of a part, or a vector with its offset. */
static void stage_place(struct stage *s, PyObject *object, float offset, bool is_written, struct tensor_place *place)
{
    PyObject *matrix;
    if (s->failed)
        return;
    if (PyTuple_Check(object)) {
        unsigned long long first, row_step, col_step;
        s->failed = !PyArg_ParseTuple(object, "OIIIKKK", &matrix, &place->part, &place->first_row, &place->n_rows, &first,
                                      &row_step, &col_step) ||
                    !(place->matrix = py_matrix_get(matrix));
        place->first_index = first;
        place->row_step = row_step;
        place->col_step = col_step;
        return;
    }
    place->n_values = (uint32_t)stage_array(s, "place", object, 'f', is_written, &place->vector);
    place->offset = offset;
    place->col_step = 1;
}

/* Where the first item lies in the array, in bytes. */
static Py_ssize_t stage_tensor(struct stage *s, PyObject *data, PyObject *shape, const char *dtype, struct tensor_view *view)
{
    Py_ssize_t first;
    long long row_stride, col_stride;
    if (s->failed || !PyArg_ParseTuple(shape, "nIILL", &first, &view->n_rows, &view->n_cols, &row_stride, &col_stride)) {
        s->failed = true;
        return 0;
    }
    view->dtype = dtype_from_name(dtype);
    view->row_stride = row_stride;
    view->col_stride = col_stride;
    stage_array(s, "data", data, 'i', false, &view->data);
    if (s->failed)
        return 0;
    if (view->is_host) {
        s->targets[s->n_buffers - 1] = NULL;
        view->data = s->buffers[s->n_buffers - 1].buf;
    }
    return first * (Py_ssize_t)dtype_info(view->dtype)->block_bytes;
}

/* Everything is on the device before another stream than the backend's own looks at it. */
static bool begin(struct stage *s)
{
    if (!stage_begin(s))
        return false;
    if (!s->self->table->synchronize(s->self->ctx, &s->err))
        return true;
    stage_done(s, s->err.rc);
    return false;
}

/* tensor_write(place, data, shape, dtype, on_device=True, offset=0.0); shape: first item, rows, columns, strides of both */
PyObject *py_backend_tensor_write(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"place", "data", "shape", "dtype", "on_device", "offset", NULL};
    PyObject *place, *data, *shape;
    const char *dtype;
    int on_device = 1;
    float offset = 0;
    struct tensor_write_args a = {0};
    struct stage s;
    stage_open(&s, object);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOs|pf", names, &place, &data, &shape, &dtype, &on_device, &offset))
        return NULL;
    a.from.is_host = !on_device;
    stage_place(&s, place, offset, true, &a.to);
    Py_ssize_t first = stage_tensor(&s, data, shape, dtype, &a.from);
    if (begin(&s)) {
        a.from.data = (const char *)a.from.data + first;
        enum rc rc = s.self->table->tensor_write(s.self->ctx, &a, &s.err);
        stage_done(&s, rc ? rc : s.self->table->tensor_finish(s.self->ctx, &s.err));
    }
    return stage_end(&s);
}

/* tensor_sum(place, data=None, shape=None, dtype=None, on_device=True, offset=0.0): sum, values that are not finite */
PyObject *py_backend_tensor_sum(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"place", "data", "shape", "dtype", "on_device", "offset", NULL};
    PyObject *place, *data = Py_None, *shape = Py_None;
    const char *dtype = NULL;
    int on_device = 1;
    float offset = 0;
    struct tensor_view view = {0};
    struct tensor_sum sum = {0, 0};
    struct tensor_sum_args a = {.result = &sum};
    struct stage s;
    stage_open(&s, object);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|OOzpf", names, &place, &data, &shape, &dtype, &on_device, &offset))
        return NULL;
    view.is_host = !on_device;
    stage_place(&s, place, offset, false, &a.of);
    Py_ssize_t first = data == Py_None ? 0 : stage_tensor(&s, data, shape, dtype, &view);
    if (begin(&s)) {
        view.data = (const char *)view.data + first;
        a.from = data == Py_None ? NULL : &view;
        stage_done(&s, s.self->table->tensor_sum(s.self->ctx, &a, &s.err));
    }
    PyObject *none = stage_end(&s);
    Py_XDECREF(none);
    return none ? Py_BuildValue("KK", (unsigned long long)sum.sum, (unsigned long long)sum.n_non_finite) : NULL;
}
