/* py_stage.h: how _core.Backend, the kernel tests' door to a backend, hands host arrays to an operation. They go through device
 * buffers, so the same tests run on every device: arrays that overlap in host memory share one buffer (in place works, and a
 * stray write comes back to the guard bytes that the test laid), and alignment modulo 64 is kept.
 * A failed call leaves a Python exception and makes every later call of the same stage do nothing. */
#ifndef LLMPY_PY_STAGE_H
#define LLMPY_PY_STAGE_H

#include "py.h"

#include <time.h>

struct backend_object {
    PyObject_HEAD
    const struct backend *table;
    void *ctx;
    double seconds;       /* the last operation alone, staging left out */
    uint64_t allocations; /* made inside the last operation */
};

#define STAGE_MAX 24

struct stage_range {
    char *low, *high; /* host bytes [low, high) */
    bool is_written;
    void *buffer;
    char *device;
};
struct stage {
    struct backend_object *self;
    Py_buffer buffers[STAGE_MAX];
    void **targets[STAGE_MAX]; /* where the device address of buffers[i] goes */
    uint32_t n_buffers;
    struct stage_range ranges[STAGE_MAX];
    uint32_t n_ranges;
    uint32_t n_rows;           /* of the views, once one is known */
    bool has_rows, failed;
    uint32_t item_bytes;       /* of an element of the views */
    struct timespec start;
    uint64_t allocations;
    struct err err;
};

void stage_open(struct stage *s, PyObject *self);
bool stage_fail(struct stage *s, const char *name, const char *wanted);
/* A contiguous array of one-letter format ('f', 'i'); None leaves *target NULL. Returns the number of items. target is the
 * address of the pointer that the operation reads. */
size_t stage_array(struct stage *s, const char *name, PyObject *object, char format, bool is_written, void *target);
/* A two-dimensional array of the backend's activations (float32, or any two-byte items) whose rows may lie apart. stage_view
 * wants the same number of rows from all of them. */
void stage_any_view(struct stage *s, const char *name, PyObject *object, bool is_written, struct view *view, uint32_t *rows);
void stage_view(struct stage *s, const char *name, PyObject *object, bool is_written, struct view *view);
/* py_backend.c: batch = (positions, row_seq, seq_first_row); a pool of kv_pool with its table. */
void stage_batch(struct stage *s, PyObject *batch, struct batch_view *view);
void stage_kv(struct stage *s, PyObject *capsule, PyObject *table, uint32_t layer, struct batch_view *batch,
              struct kv_view *view);
bool stage_begin(struct stage *s);              /* uploads everything and starts the clock */
void stage_done(struct stage *s, enum rc rc);   /* waits, stops the clock and downloads what was written */
PyObject *stage_end(struct stage *s);           /* releases everything; None, or NULL with an exception set */

#define STAGE_RUN(s, operation, args)                                                    \
    do {                                                                                 \
        if (stage_begin(s))                                                              \
            stage_done(s, (s)->self->table->operation((s)->self->ctx, args, &(s)->err)); \
        return stage_end(s);                                                             \
    } while (0)

/* The matrix of a capsule that Backend.matrix made; NULL with an exception. */
struct matrix *py_matrix_get(PyObject *capsule);
/* py_backend_tensor.c: Backend.tensor_write and tensor_sum */
PyObject *py_backend_tensor_write(PyObject *object, PyObject *args, PyObject *kwargs);
PyObject *py_backend_tensor_sum(PyObject *object, PyObject *args, PyObject *kwargs);
/* py_backend_encoder.c: Backend.act, .layer_norm, .scale_logits, .position_scale, .row_attention */
PyObject *py_backend_act(PyObject *object, PyObject *args, PyObject *kwargs);
PyObject *py_backend_layer_norm(PyObject *object, PyObject *args, PyObject *kwargs);
PyObject *py_backend_scale_logits(PyObject *object, PyObject *args, PyObject *kwargs);
PyObject *py_backend_position_scale(PyObject *object, PyObject *args, PyObject *kwargs);
PyObject *py_backend_row_attention(PyObject *object, PyObject *args, PyObject *kwargs);
/* py_backend_recurrent.c: Backend.conv, .ssm, .selective_scan, .delta */
PyObject *py_backend_conv(PyObject *object, PyObject *args, PyObject *kwargs);
PyObject *py_backend_ssm(PyObject *object, PyObject *args, PyObject *kwargs);
PyObject *py_backend_selective_scan(PyObject *object, PyObject *args, PyObject *kwargs);
PyObject *py_backend_delta(PyObject *object, PyObject *args, PyObject *kwargs);
/* py_backend_mixture.c: Backend.route, .norm_route, .norm_linear, .experts */
PyObject *py_backend_route(PyObject *object, PyObject *args, PyObject *kwargs);
PyObject *py_backend_norm_route(PyObject *object, PyObject *args, PyObject *kwargs);
PyObject *py_backend_norm_linear(PyObject *object, PyObject *args, PyObject *kwargs);
PyObject *py_backend_experts(PyObject *object, PyObject *args, PyObject *kwargs);
/* py_backend_attention.c: Backend.rope_table, .rope, .qkv, .attention */
PyObject *py_backend_rope_table(PyObject *object, PyObject *args, PyObject *kwargs);
PyObject *py_backend_rope(PyObject *object, PyObject *args, PyObject *kwargs);
PyObject *py_backend_qkv(PyObject *object, PyObject *args, PyObject *kwargs);
PyObject *py_backend_attention(PyObject *object, PyObject *args, PyObject *kwargs);
/* py_backend_latent.c: Backend.head_linear, .latent_attention */
PyObject *py_backend_head_linear(PyObject *object, PyObject *args, PyObject *kwargs);
PyObject *py_backend_latent_attention(PyObject *object, PyObject *args, PyObject *kwargs);
/* py_backend_begin.c: Backend.begin */
PyObject *py_backend_begin(PyObject *object, PyObject *args, PyObject *kwargs);
/* py_backend_sample.c: Backend.sample */
PyObject *py_backend_sample(PyObject *object, PyObject *args, PyObject *kwargs);

#endif
