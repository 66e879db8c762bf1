/* out = act(gate) * up, out = a + b, out row i = x row rows[i]: element by element in float32, rounded once to the type of
 * activations. Bound by bytes: three values an element. In place is fine: an element is read and written by one thread. */
#include "activation.cuh"

#define THREADS 256u

template <class T> static __global__ void gated_rows(rows<T> gate, rows<T> up, rows<T> out, uint32_t act)
{
    start_next();
    wait_for_input();
    uint32_t c = blockIdx.y * THREADS + threadIdx.x, r = blockIdx.x;
    if (c < out.width)
        *out.at(r, c) = round_to<T>(act_value(to_float(*gate.at(r, c)), act) * to_float(*up.at(r, c)));
}

template <class T> static __global__ void add_rows(rows<T> a, rows<T> b, rows<T> out)
{
    start_next();
    wait_for_input();
    uint32_t c = blockIdx.y * THREADS + threadIdx.x, r = blockIdx.x;
    if (c < out.width)
        *out.at(r, c) = round_to<T>(to_float(*a.at(r, c)) + to_float(*b.at(r, c)));
}

template <class T> static __global__ void select_rows(rows<T> x, const int32_t *chosen, rows<T> out)
{
    start_next();
    wait_for_input();
    uint32_t c = blockIdx.y * THREADS + threadIdx.x, r = blockIdx.x;
    if (c < out.width)
        *out.at(r, c) = *x.at((uint32_t)chosen[r], c);
}

enum rc cuda_gated(void *ctx, const struct gated_args *args, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    if (!args->n_rows)
        return RC_OK;
    dim3 grid(args->n_rows, ceil_div(args->out.width, THREADS));
    visit_type(cuda->dtype, [&](auto value) {
        using T = decltype(value);
        launch(cuda, gated_rows<T>, grid, THREADS, 0, rows<T>(args->gate), rows<T>(args->up), rows<T>(args->out), args->act);
    });
    return launched(err, "gated");
}

enum rc cuda_add(void *ctx, const struct add_args *args, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    if (!args->n_rows)
        return RC_OK;
    dim3 grid(args->n_rows, ceil_div(args->out.width, THREADS));
    visit_type(cuda->dtype, [&](auto value) {
        using T = decltype(value);
        launch(cuda, add_rows<T>, grid, THREADS, 0, rows<T>(args->a), rows<T>(args->b), rows<T>(args->out));
    });
    return launched(err, "add");
}

enum rc cuda_select(void *ctx, const struct select_args *args, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    if (!args->n_selected)
        return RC_OK;
    dim3 grid(args->n_selected, ceil_div(args->out.width, THREADS));
    visit_type(cuda->dtype, [&](auto value) {
        using T = decltype(value);
        launch(cuda, select_rows<T>, grid, THREADS, 0, rows<T>(args->x), args->rows, rows<T>(args->out));
    });
    return launched(err, "select");
}
