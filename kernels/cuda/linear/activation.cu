/* out = act(gate) * up, out = act(x), out = a + b, out row i = x row rows[i], out column i = x column columns[i],
 * out = x * (1 + slope * log1p((position + first) / every)): element by element in float32, rounded once to the type of
 * activations; logits = cap * tanh(scale * logits / cap), in float32; eight elements a thread. Bound by bytes: 8192 rows of
 * 14336 bfloat16 products move 0.7 GB, 165 us at 4.3 TB/s. In place is fine, but not for columns by number: an element is read
 * and written by one thread. */
#include "../core/eight.cuh"
#include "../core/launch.cuh"
#include "activation.cuh"

#include <type_traits>

#define THREADS 256u

/* The first of the eight columns that a thread has. */
static __device__ __forceinline__ uint32_t own_column(void)
{
    return 8 * (blockIdx.y * THREADS + threadIdx.x);
}

template <class T, uint32_t ACT, bool IS_ALIGNED>
static __global__ void __launch_bounds__(THREADS) gated_rows(rows<T> gate, rows<T> up, rows<T> out)
{
    float x[8], y[8];
    uint32_t row = blockIdx.x, column = own_column();
    start_next();
    wait_for_input();
    if (gate.width == 1) /* for all columns */
#pragma unroll
        for (uint32_t i = 0; i < 8; i++)
            x[i] = to_float(*gate.at(row, 0));
    else
        load_part<IS_ALIGNED>(gate.at(row, 0), column, out.width, x);
    load_part<IS_ALIGNED>(up.at(row, 0), column, out.width, y);
#pragma unroll
    for (uint32_t i = 0; i < 8; i++)
        x[i] = act_value(x[i], ACT) * y[i];
    store_part<IS_ALIGNED>(out.at(row, 0), column, out.width, x);
}

struct xielu_curve {
    float above, below, beta, eps;
};

static __device__ __forceinline__ float softplus(float x)
{
    return x > 20 ? x : log1pf(expf(x));
}

static __device__ __forceinline__ xielu_curve xielu_of(const float *weights)
{
    return {softplus(weights[0]), weights[2] + softplus(weights[1]), weights[2], weights[3]};
}

static __device__ __forceinline__ float xielu_value(float x, const xielu_curve &curve)
{
    float bent = (expm1f(x < curve.eps ? x : curve.eps) - x) * curve.below;
    return (x > 0 ? curve.above * x * x : bent) + curve.beta * x;
}

template <class T, uint32_t ACT, bool IS_ALIGNED>
static __global__ void __launch_bounds__(THREADS) act_rows(rows<T> from, rows<T> out, float limit, const float *weights)
{
    float x[8];
    uint32_t row = blockIdx.x, column = own_column();
    start_next();
    wait_for_input();
    load_part<IS_ALIGNED>(from.at(row, 0), column, out.width, x);
    struct xielu_curve curve = ACT == ACT_XIELU ? xielu_of(weights) : xielu_curve();
#pragma unroll
    for (uint32_t i = 0; i < 8; i++)
        if (ACT != ACT_SCALE || column + i < out.width)
            x[i] = ACT == ACT_XIELU   ? xielu_value(x[i], curve)
                   : ACT == ACT_SCALE ? x[i] * weights[column + i]
                   : ACT == ACT_CLIP  ? (x[i] > limit ? limit : x[i] < -limit ? -limit : x[i]) /* a NaN stays */
                                      : act_value(x[i], ACT);
    store_part<IS_ALIGNED>(out.at(row, 0), column, out.width, x);
}

template <class T, bool IS_ALIGNED>
static __global__ void __launch_bounds__(THREADS) add_rows(rows<T> a, rows<T> b, rows<T> out)
{
    float x[8], y[8];
    uint32_t row = blockIdx.x, column = own_column();
    start_next();
    wait_for_input();
    load_part<IS_ALIGNED>(a.at(row, 0), column, out.width, x);
    load_part<IS_ALIGNED>(b.at(row, 0), column, out.width, y);
#pragma unroll
    for (uint32_t i = 0; i < 8; i++)
        x[i] = x[i] + y[i];
    store_part<IS_ALIGNED>(out.at(row, 0), column, out.width, x);
}

template <class T, bool IS_ALIGNED>
static __global__ void __launch_bounds__(THREADS)
select_rows(rows<T> x, const int32_t *chosen, const float *other, rows<T> out)
{
    float values[8] = {0};
    uint32_t row = blockIdx.x, column = own_column();
    start_next();
    wait_for_input();
    int32_t number = chosen ? chosen[row] : (int32_t)row;
    if (number >= 0)
        load_part<IS_ALIGNED>(x.at((uint32_t)number, 0), column, out.width, values);
    else if (number < -1)
#pragma unroll
        for (uint32_t i = 0; i < 8; i++)
            values[i] = column + i < out.width ? other[(size_t)(-2 - number) * out.width + column + i] : 0.0f;
    store_part<IS_ALIGNED>(out.at(row, 0), column, out.width, values);
}

template <class T, bool IS_ALIGNED>
static __global__ void __launch_bounds__(THREADS)
position_scale_rows(rows<T> from, rows<T> out, const int32_t *positions, uint32_t first, uint32_t every, float slope)
{
    float x[8];
    uint32_t row = blockIdx.x, column = own_column();
    start_next();
    wait_for_input();
    float factor = 1.0f + slope * log1pf((float)(((uint32_t)positions[row] + first) / every));
    load_part<IS_ALIGNED>(from.at(row, 0), column, out.width, x);
#pragma unroll
    for (uint32_t i = 0; i < 8; i++)
        x[i] = factor * x[i];
    store_part<IS_ALIGNED>(out.at(row, 0), column, out.width, x);
}

template <class T, bool IS_ALIGNED>
static __global__ void __launch_bounds__(THREADS) take_rows(rows<T> from, rows<T> out, const float *columns)
{
    float x[8];
    uint32_t row = blockIdx.x, column = own_column();
    start_next();
    wait_for_input();
#pragma unroll
    for (uint32_t i = 0; i < 8; i++)
        x[i] = column + i < out.width ? to_float(*from.at(row, (uint32_t)columns[column + i])) : 0.0f;
    store_part<IS_ALIGNED>(out.at(row, 0), column, out.width, x);
}

template <bool HAS_CAP, bool IS_ALIGNED>
static __global__ void __launch_bounds__(THREADS) scale_logits_rows(rows<float> logits, float scale, float cap)
{
    float x[8];
    uint32_t row = blockIdx.x, column = own_column();
    start_next();
    wait_for_input();
    load_part<IS_ALIGNED>(logits.at(row, 0), column, logits.width, x);
#pragma unroll
    for (uint32_t i = 0; i < 8; i++)
        x[i] = HAS_CAP ? cap * tanhf(x[i] * scale / cap) : x[i] * scale;
    store_part<IS_ALIGNED>(logits.at(row, 0), column, logits.width, x);
}

template <bool IS_ALIGNED>
static __global__ void __launch_bounds__(THREADS) spread_logits_rows(rows<float> from, rows<float> out, const float *sources)
{
    float x[8];
    uint32_t row = blockIdx.x, column = own_column();
    start_next();
    wait_for_input();
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) {
        float source = column + i < out.width ? sources[column + i] : -1.0f;
        x[i] = source < 0 ? NO_LOGIT : *from.at(row, (uint32_t)source);
    }
    store_part<IS_ALIGNED>(out.at(row, 0), column, out.width, x);
}

static dim3 grid_of(uint32_t n_rows, uint32_t width)
{
    return dim3(n_rows, ceil_div(width, 8 * THREADS));
}

/* f(the activation as a type). */
template <class F> static void visit_act(uint32_t act, F f)
{
    switch (act) {
    case ACT_SILU: f(std::integral_constant<uint32_t, ACT_SILU>()); break;
    case ACT_GELU: f(std::integral_constant<uint32_t, ACT_GELU>()); break;
    case ACT_GELU_TANH: f(std::integral_constant<uint32_t, ACT_GELU_TANH>()); break;
    case ACT_RELU: f(std::integral_constant<uint32_t, ACT_RELU>()); break;
    case ACT_TANH: f(std::integral_constant<uint32_t, ACT_TANH>()); break;
    case ACT_SIGMOID: f(std::integral_constant<uint32_t, ACT_SIGMOID>()); break;
    case ACT_IDENTITY: f(std::integral_constant<uint32_t, ACT_IDENTITY>()); break;
    case ACT_QUICK_GELU: f(std::integral_constant<uint32_t, ACT_QUICK_GELU>()); break;
    default: f(std::integral_constant<uint32_t, ACT_RELU2>());
    }
}

enum rc cuda_gated(void *ctx, const struct gated_args *args, struct err *err)
{
    return run_rows(ctx, args->n_rows, "gated", err, [&](struct cuda *cuda, auto value) {
        using T = decltype(value);
        bool is_aligned = has_eights<T>(args->up) && has_eights<T>(args->out);
        is_aligned = is_aligned && (args->gate.width == 1 || has_eights<T>(args->gate));
        visit_act(args->act, [&](auto act) {
            constexpr uint32_t ACT = decltype(act)::value;
            launch(cuda, is_aligned ? gated_rows<T, ACT, true> : gated_rows<T, ACT, false>,
                   grid_of(args->n_rows, args->out.width), THREADS, 0, rows<T>(args->gate), rows<T>(args->up),
                   rows<T>(args->out));
        });
    });
}

enum rc cuda_act(void *ctx, const struct act_args *args, struct err *err)
{
    return run_rows(ctx, args->n_rows, "act", err, [&](struct cuda *cuda, auto value) {
        using T = decltype(value);
        bool is_aligned = has_eights<T>(args->x) && has_eights<T>(args->out);
        auto start = [&](auto act) {
            constexpr uint32_t ACT = decltype(act)::value;
            launch(cuda, is_aligned ? act_rows<T, ACT, true> : act_rows<T, ACT, false>, grid_of(args->n_rows, args->out.width),
                   THREADS, 0, rows<T>(args->x), rows<T>(args->out), args->limit, args->weights);
        };
        if (args->act == ACT_CLIP)
            start(std::integral_constant<uint32_t, ACT_CLIP>());
        else if (args->act == ACT_XIELU)
            start(std::integral_constant<uint32_t, ACT_XIELU>());
        else if (args->act == ACT_SCALE)
            start(std::integral_constant<uint32_t, ACT_SCALE>());
        else
            visit_act(args->act, start);
    });
}

enum rc cuda_add(void *ctx, const struct add_args *args, struct err *err)
{
    return run_rows(ctx, args->n_rows, "add", err, [&](struct cuda *cuda, auto value) {
        using T = decltype(value);
        bool is_aligned = has_eights<T>(args->a) && has_eights<T>(args->b) && has_eights<T>(args->out);
        launch(cuda, is_aligned ? add_rows<T, true> : add_rows<T, false>, grid_of(args->n_rows, args->out.width), THREADS, 0,
               rows<T>(args->a), rows<T>(args->b), rows<T>(args->out));
    });
}

enum rc cuda_select(void *ctx, const struct select_args *args, struct err *err)
{
    return run_rows(ctx, args->n_selected, "select", err, [&](struct cuda *cuda, auto value) {
        using T = decltype(value);
        bool is_aligned = has_eights<T>(args->x) && has_eights<T>(args->out);
        launch(cuda, is_aligned ? select_rows<T, true> : select_rows<T, false>, grid_of(args->n_selected, args->out.width),
               THREADS, 0, rows<T>(args->x), args->rows, args->other, rows<T>(args->out));
    });
}

enum rc cuda_take(void *ctx, const struct take_args *args, struct err *err)
{
    return run_rows(ctx, args->n_rows, "take", err, [&](struct cuda *cuda, auto value) {
        using T = decltype(value);
        launch(cuda, has_eights<T>(args->out) ? take_rows<T, true> : take_rows<T, false>,
               grid_of(args->n_rows, args->out.width), THREADS, 0, rows<T>(args->x), rows<T>(args->out), args->columns);
    });
}

enum rc cuda_position_scale(void *ctx, const struct position_scale_args *args, struct err *err)
{
    return run_rows(ctx, args->n_rows, "position_scale", err, [&](struct cuda *cuda, auto value) {
        using T = decltype(value);
        bool is_aligned = has_eights<T>(args->x) && has_eights<T>(args->out);
        launch(cuda, is_aligned ? position_scale_rows<T, true> : position_scale_rows<T, false>,
               grid_of(args->n_rows, args->out.width), THREADS, 0, rows<T>(args->x), rows<T>(args->out), args->positions,
               args->first, args->every, args->slope);
    });
}

enum rc cuda_scale_logits(void *ctx, const struct scale_logits_args *args, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    if (!args->n_rows)
        return RC_OK;
    bool is_aligned = has_eights<float>(args->logits);
    auto plain = is_aligned ? scale_logits_rows<false, true> : scale_logits_rows<false, false>;
    auto capped = is_aligned ? scale_logits_rows<true, true> : scale_logits_rows<true, false>;
    launch(cuda, args->softcap != 0 ? capped : plain, grid_of(args->n_rows, args->logits.width), THREADS, 0,
           rows<float>(args->logits), args->scale, args->softcap);
    return launched(err, "scale_logits");
}

enum rc cuda_spread_logits(void *ctx, const struct spread_logits_args *args, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    if (!args->n_rows)
        return RC_OK;
    launch(cuda, has_eights<float>(args->out) ? spread_logits_rows<true> : spread_logits_rows<false>,
           grid_of(args->n_rows, args->out.width), THREADS, 0, rows<float>(args->x), rows<float>(args->out), args->sources);
    return launched(err, "spread_logits");
}
