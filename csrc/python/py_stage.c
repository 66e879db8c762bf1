/* py_stage.c: host arrays through device buffers. */
#include "py_stage.h"

#include "../base/mem.h"

#include <string.h>

void stage_open(struct stage *s, PyObject *self)
{
    memset(s, 0, sizeof *s);
    s->self = (struct backend_object *)self;
    s->item_bytes = s->self->table->activations(s->self->ctx) == DTYPE_F32 ? 4 : 2;
}

bool stage_fail(struct stage *s, const char *name, const char *wanted)
{
    if (!s->failed)
        PyErr_Format(PyExc_ValueError, "%s: wanted %s", name, wanted);
    s->failed = true;
    return false;
}

static Py_buffer *stage_take(struct stage *s, const char *name, PyObject *object, bool is_written)
{
    if (s->failed)
        return NULL;
    if (s->n_buffers == STAGE_MAX) {
        stage_fail(s, name, "fewer arrays in one call");
        return NULL;
    }
    Py_buffer *buffer = &s->buffers[s->n_buffers];
    int flags = PyBUF_STRIDES | PyBUF_FORMAT | (is_written ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object, buffer, flags) < 0) {
        s->failed = true;
        return NULL;
    }
    s->n_buffers++;
    return buffer;
}

/* Joins [low, low + n_bytes) with the ranges it touches. */
static void stage_join(struct stage *s, char *low, size_t n_bytes, bool is_written)
{
    struct stage_range joined = {.low = low, .high = low + n_bytes, .is_written = is_written};
    uint32_t kept = 0;
    for (uint32_t i = 0; i < s->n_ranges; i++) {
        struct stage_range *r = &s->ranges[i];
        if (r->high <= joined.low || r->low >= joined.high) {
            s->ranges[kept++] = *r;
            continue;
        }
        joined.low = r->low < joined.low ? r->low : joined.low;
        joined.high = r->high > joined.high ? r->high : joined.high;
        joined.is_written |= r->is_written;
    }
    s->ranges[kept] = joined;
    s->n_ranges = kept + 1;
}

size_t stage_array(struct stage *s, const char *name, PyObject *object, char format, bool is_written, void *target)
{
    *(void **)target = NULL;
    if (object == Py_None)
        return 0;
    Py_buffer *buffer = stage_take(s, name, object, is_written);
    if (!buffer)
        return 0;
    bool is_format = buffer->format && buffer->format[0] == format && !buffer->format[1];
    if (!is_format || !PyBuffer_IsContiguous(buffer, 'C')) {
        stage_fail(s, name, format == 'f' ? "a contiguous float32 array" : "a contiguous int32 array");
        return 0;
    }
    stage_join(s, buffer->buf, (size_t)buffer->len, is_written);
    s->targets[s->n_buffers - 1] = target;
    return (size_t)(buffer->len / buffer->itemsize);
}

void stage_any_view(struct stage *s, const char *name, PyObject *object, bool is_written, struct view *view, uint32_t *rows)
{
    memset(view, 0, sizeof *view);
    Py_buffer *buffer = stage_take(s, name, object, is_written);
    if (!buffer)
        return;
    Py_ssize_t item = s->item_bytes;
    bool is_type = item == 4 ? buffer->format && !strcmp(buffer->format, "f") : buffer->itemsize == item;
    bool is_fine = is_type && buffer->ndim == 2 && buffer->strides[0] % item == 0 &&
                   (buffer->strides[1] == item || buffer->shape[1] <= 1) &&
                   (buffer->strides[0] >= buffer->shape[1] * item || buffer->shape[0] <= 1);
    if (!is_fine) {
        stage_fail(s, name, "a two-dimensional array of the backend's activations with contiguous rows");
        return;
    }
    view->width = (uint32_t)buffer->shape[1];
    view->stride = buffer->shape[0] > 1 ? (uint32_t)(buffer->strides[0] / item) : view->width;
    *rows = (uint32_t)buffer->shape[0];
    size_t items = *rows ? (size_t)(*rows - 1) * view->stride + view->width : 0;
    stage_join(s, buffer->buf, items * s->item_bytes, is_written);
    s->targets[s->n_buffers - 1] = &view->data;
}

void stage_view(struct stage *s, const char *name, PyObject *object, bool is_written, struct view *view)
{
    uint32_t rows = 0;
    stage_any_view(s, name, object, is_written, view, &rows);
    if (!s->failed && s->has_rows && rows != s->n_rows)
        stage_fail(s, name, "as many rows as the other arrays");
    s->n_rows = rows;
    s->has_rows = true;
}

bool stage_begin(struct stage *s)
{
    const struct backend *table = s->self->table;
    for (uint32_t i = 0; !s->failed && i < s->n_ranges; i++) {
        struct stage_range *r = &s->ranges[i];
        size_t shift = (uintptr_t)r->low % 64, n_bytes = (size_t)(r->high - r->low);
        if (table->buffer_create(s->self->ctx, n_bytes + 64, &r->buffer, &s->err) ||
            table->upload(s->self->ctx, (char *)r->buffer + shift, r->low, n_bytes, &s->err)) {
            py_raise(&s->err);
            s->failed = true;
        } else {
            r->device = (char *)r->buffer + shift;
        }
    }
    for (uint32_t b = 0; !s->failed && b < s->n_buffers; b++)
        for (uint32_t i = 0; s->targets[b] && i < s->n_ranges; i++) {
            const struct stage_range *r = &s->ranges[i];
            char *host = s->buffers[b].buf;
            if (host == r->low || (host > r->low && host < r->high))
                *s->targets[b] = r->device + (host - r->low);
        }
    clock_gettime(CLOCK_MONOTONIC, &s->start);
    s->allocations = mem_count();
    return !s->failed;
}

void stage_done(struct stage *s, enum rc rc)
{
    if (!rc)
        rc = s->self->table->synchronize(s->self->ctx, &s->err);
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    s->self->seconds = (double)(now.tv_sec - s->start.tv_sec) + 1e-9 * (double)(now.tv_nsec - s->start.tv_nsec);
    s->self->allocations = mem_count() - s->allocations;
    for (uint32_t i = 0; !rc && i < s->n_ranges; i++) {
        struct stage_range *r = &s->ranges[i];
        if (r->is_written)
            rc = s->self->table->download(s->self->ctx, r->low, r->device, (size_t)(r->high - r->low), &s->err);
    }
    if (rc) {
        py_raise(&s->err);
        s->failed = true;
    }
}

PyObject *stage_end(struct stage *s)
{
    for (uint32_t i = 0; i < s->n_ranges; i++) {
        const struct stage_range *r = &s->ranges[i];
        if (r->buffer)
            s->self->table->buffer_destroy(s->self->ctx, r->buffer, (size_t)(r->high - r->low) + 64);
    }
    for (uint32_t i = 0; i < s->n_buffers; i++)
        PyBuffer_Release(&s->buffers[i]);
    return s->failed ? NULL : Py_NewRef(Py_None);
}
