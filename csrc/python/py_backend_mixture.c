/* py_backend_mixture.c: mixtures of experts in _core.Backend: route, norm_route, experts; and norm_linear. Routes are int32
 * [rows][2 * chosen]: pairs of an expert and the bits of its weight (struct route). */
#include "py_stage.h"

#include "../base/mem.h"

/* An array of routes; how many a row has. */
static uint32_t stage_routes(struct stage *s, PyObject *object, bool is_written, void *target, uint32_t *n_rows)
{
    uint32_t i = s->n_buffers;
    stage_array(s, "routes", object, 'i', is_written, target);
    if (s->failed)
        return 0;
    const Py_buffer *buffer = &s->buffers[i];
    if (buffer->ndim != 2 || buffer->shape[1] < 2 || buffer->shape[1] % 2) {
        stage_fail(s, "routes", "a two-dimensional array of pairs");
        return 0;
    }
    *n_rows = (uint32_t)buffer->shape[0];
    return (uint32_t)(buffer->shape[1] / 2);
}

PyObject *py_backend_route(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"logits", "routes", "score", "bias", "n_groups", "chosen_groups", "sums_two", "normalised",
                            "sum_eps", "scale", NULL};
    PyObject *logits, *routes, *bias = Py_None;
    struct route_args a = {.n_groups = 1, .chosen_groups = 1, .scale = 1.0f};
    int sums_two = 0, is_normalised = 0;
    struct stage s;
    stage_open(&s, object);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|IOIIppff", names, &logits, &routes, &a.score, &bias, &a.n_groups,
                                     &a.chosen_groups, &sums_two, &is_normalised, &a.sum_eps, &a.scale))
        return NULL;
    if (!s.self->table->route)
        return PyErr_Format(PyExc_NotImplementedError, "this backend has no route");
    a.sums_two = sums_two;
    a.is_normalised = is_normalised;
    a.route_stride = a.n_chosen = stage_routes(&s, routes, true, &a.routes, &a.n_rows);
    size_t n_logits = stage_array(&s, "logits", logits, 'f', false, &a.logits);
    if (!s.failed && (!a.n_rows || n_logits % a.n_rows))
        stage_fail(&s, "logits", "as many rows as routes");
    if (!s.failed)
        a.n_experts = a.logits_stride = (uint32_t)(n_logits / a.n_rows);
    if (stage_array(&s, "bias", bias, 'f', false, &a.selection_bias) != a.n_experts && bias != Py_None)
        stage_fail(&s, "bias", "one for each expert");
    STAGE_RUN(&s, route, &a);
}

static void stage_sum(struct stage *s, PyObject *left, PyObject *right, PyObject *sum, PyObject *out,
                      struct add_rms_norm_args *a)
{
    stage_view(s, "a", left, false, &a->a);
    stage_view(s, "b", right, false, &a->b);
    stage_view(s, "sum", sum, true, &a->sum);
    stage_view(s, "out", out, true, &a->out);
}

/* add_rms_norm with a router and a route. */
PyObject *py_backend_norm_route(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"a", "b", "sum", "weight", "out", "eps", "router", "router_bias", "logits", "routes", "score",
                            "bias", "normalised", NULL};
    PyObject *left, *right, *sum, *weight, *out, *matrix, *router_bias, *logits, *routes, *bias = Py_None;
    struct route_args route = {.n_groups = 1, .chosen_groups = 1, .scale = 1.0f};
    struct linear_args router = {.is_float_out = true};
    struct add_rms_norm_args a = {.router = &router, .route = &route};
    int is_normalised = 0;
    struct stage s;
    stage_open(&s, object);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOfOOOO|IOp", names, &left, &right, &sum, &weight, &out, &a.eps, &matrix,
                                     &router_bias, &logits, &routes, &route.score, &bias, &is_normalised))
        return NULL;
    if (!(s.self->table->fusions(s.self->ctx) & FUSION_NORM_ROUTE))
        return PyErr_Format(PyExc_NotImplementedError, "this backend has no fused norm and route");
    if (!(router.matrix = py_matrix_get(matrix)))
        return NULL;
    route.is_normalised = is_normalised;
    stage_sum(&s, left, right, sum, out, &a);
    stage_array(&s, "weight", weight, 'f', false, &a.weight);
    stage_array(&s, "router_bias", router_bias, 'f', false, &router.bias);
    route.n_experts = (uint32_t)stage_array(&s, "logits", logits, 'f', true, &router.y.data) / (s.n_rows ? s.n_rows : 1);
    route.route_stride = route.n_chosen = stage_routes(&s, routes, true, &route.routes, &route.n_rows);
    stage_array(&s, "bias", bias, 'f', false, &route.selection_bias);
    a.n_rows = router.n_rows = s.n_rows;
    router.y.width = router.y.stride = route.logits_stride = route.n_experts;
    if (stage_begin(&s)) { /* what lies on the device has its address now */
        router.x = a.out;
        route.logits = router.y.data;
        stage_done(&s, s.self->table->add_rms_norm(s.self->ctx, &a, &s.err));
    }
    return stage_end(&s);
}

/* add_rms_norm with a linear; a product where there is mid. */
PyObject *py_backend_norm_linear(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"a", "b", "sum", "weight", "out", "eps", "matrix", "y", "bias", "mid", "act", NULL};
    PyObject *left, *right, *sum, *weight, *out, *matrix, *y, *bias = Py_None, *mid = Py_None;
    struct linear_args linear = {0};
    struct add_rms_norm_args a = {.linear = &linear};
    struct stage s;
    stage_open(&s, object);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOfOO|OOI", names, &left, &right, &sum, &weight, &out, &a.eps, &matrix,
                                     &y, &bias, &mid, &linear.act))
        return NULL;
    if (!(s.self->table->fusions(s.self->ctx) & FUSION_ADD_NORM_LINEAR))
        return PyErr_Format(PyExc_NotImplementedError, "this backend has no fused norm and linear");
    if (!(linear.matrix = py_matrix_get(matrix)))
        return NULL;
    stage_sum(&s, left, right, sum, out, &a);
    stage_view(&s, "y", y, true, &linear.y);
    stage_array(&s, "weight", weight, 'f', false, &a.weight);
    stage_array(&s, "bias", bias, 'f', false, &linear.bias);
    if (mid != Py_None) {
        stage_view(&s, "mid", mid, true, &linear.mid);
        linear.output = LINEAR_PRODUCT;
    }
    a.n_rows = linear.n_rows = s.n_rows;
    if (stage_begin(&s)) { /* what lies on the device has its address now */
        linear.x = a.out;
        stage_done(&s, s.self->table->add_rms_norm(s.self->ctx, &a, &s.err));
    }
    return stage_end(&s);
}

PyObject *py_backend_experts(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"up", "down", "routes", "x", "y", "n_experts", "inner", "form", "act", "limit", "up_bias",
                            "down_bias", "input_scaled", NULL};
    PyObject *up, *down, *routes, *x, *y, *up_bias = Py_None, *down_bias = Py_None;
    struct experts_args a = {0};
    int is_input_scaled = 0;
    uint32_t inner = 0, n_rows = 0;
    struct stage s;
    stage_open(&s, object);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOII|IIfOOp", names, &up, &down, &routes, &x, &y, &a.n_experts, &inner,
                                     &a.form, &a.act, &a.limit, &up_bias, &down_bias, &is_input_scaled))
        return NULL;
    if (!s.self->table->experts)
        return PyErr_Format(PyExc_NotImplementedError, "this backend has no experts");
    if (!(a.up = py_matrix_get(up)) || !(a.down = py_matrix_get(down)))
        return NULL;
    a.is_input_scaled = is_input_scaled;
    stage_view(&s, "x", x, false, &a.x);
    stage_view(&s, "y", y, true, &a.y);
    a.n_rows = s.n_rows;
    a.route_stride = a.n_chosen = stage_routes(&s, routes, false, &a.routes, &n_rows);
    if (!s.failed && n_rows != a.n_rows)
        stage_fail(&s, "routes", "as many rows as x");
    stage_array(&s, "up_bias", up_bias, 'f', false, &a.up_bias);
    stage_array(&s, "down_bias", down_bias, 'f', false, &a.down_bias);
    uint32_t widest = inner > a.y.width ? inner : a.y.width;
    a.scratch.width = a.scratch.stride = (a.n_chosen * 4 * widest + 2 * a.n_experts + 16 + 15) / 16 * 16;
    size_t size_bytes = (size_t)a.scratch.stride * a.n_rows * s.item_bytes;
    if (stage_begin(&s)) {
        const struct backend *table = s.self->table;
        enum rc rc = table->buffer_create(s.self->ctx, size_bytes, &a.scratch.data, &s.err);
        s.allocations = mem_count();
        clock_gettime(CLOCK_MONOTONIC, &s.start);
        if (!rc)
            rc = table->experts(s.self->ctx, &a, &s.err);
        stage_done(&s, rc);
        if (a.scratch.data)
            table->buffer_destroy(s.self->ctx, a.scratch.data, size_bytes);
    }
    return stage_end(&s);
}
