/* What towers and the text models behind them need beside the other operations; sums in float32, rounded once to the type of
 * activations, eight elements a thread:
 *   pixels      out[r][(c * n_frames + t) * n + i] = table[c][bytes[r][c * n + i]]
 *   embed_taps  out[r] = sum over t of weights[r][t] * row rows[r][t] of a table, one chain in the order of t
 *   place_rows  out row rows[i] = x row i
 *   mean_rows   out row i = sum of n neighbouring rows, one chain, times 1 / n
 *   splice      x row = a feature, or its sum with the feature, for the rows that stand for features
 * Bound by bytes: 4096 rows of 1152 bfloat16 values are 9 MB each way, 5 us at 4.3 TB/s. */
#include "../core/eight.cuh"
#include "../core/launch.cuh"

#define THREADS 128u

static __device__ __forceinline__ uint32_t own_column(void)
{
    return 8 * (blockIdx.y * THREADS + threadIdx.x);
}

template <class T, bool IS_ALIGNED>
static __global__ void __launch_bounds__(THREADS)
pixels_rows(const uint8_t *bytes, const float *table, uint32_t n_frames, rows<T> out)
{
    float x[8];
    uint32_t row = blockIdx.x, column = own_column(), n = out.width / (3 * n_frames);
    start_next();
    wait_for_input();
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) {
        uint32_t at = column + i, channel = at / (n * n_frames), pixel = at % n;
        x[i] = at < out.width ? table[256 * channel + bytes[((size_t)row * 3 + channel) * n + pixel]] : 0.0f;
    }
    store_part<IS_ALIGNED>(out.at(row, 0), column, out.width, x);
}

template <class T, bool IS_ALIGNED>
static __global__ void __launch_bounds__(THREADS)
embed_taps_rows(const float *table, const int32_t *taps, const float *weights, uint32_t n_taps, rows<T> out)
{
    float x[8] = {0};
    uint32_t row = blockIdx.x, column = own_column();
    start_next();
    wait_for_input();
    for (uint32_t t = 0; t < n_taps; t++) {
        float weight = weights[(size_t)row * n_taps + t];
        const float *from = table + (size_t)taps[(size_t)row * n_taps + t] * out.width;
#pragma unroll
        for (uint32_t i = 0; i < 8; i++)
            if (column + i < out.width)
                x[i] = t ? x[i] + weight * from[column + i] : weight * from[column + i];
    }
    store_part<IS_ALIGNED>(out.at(row, 0), column, out.width, x);
}

template <class T, bool IS_ALIGNED>
static __global__ void __launch_bounds__(THREADS) place_rows_copy(rows<T> from, const int32_t *places, rows<T> out)
{
    float x[8];
    uint32_t row = blockIdx.x, column = own_column();
    start_next();
    wait_for_input();
    load_part<IS_ALIGNED>(from.at(row, 0), column, from.width, x);
    store_part<IS_ALIGNED>(out.at((uint32_t)places[row], 0), column, from.width, x);
}

template <class T, bool IS_ALIGNED>
static __global__ void __launch_bounds__(THREADS) mean_rows_sums(rows<T> from, uint32_t n, rows<T> out)
{
    float x[8], y[8];
    uint32_t row = blockIdx.x, column = own_column();
    start_next();
    wait_for_input();
    load_part<IS_ALIGNED>(from.at(row * n, 0), column, out.width, x);
    for (uint32_t i = 1; i < n; i++) {
        load_part<IS_ALIGNED>(from.at(row * n + i, 0), column, out.width, y);
#pragma unroll
        for (uint32_t j = 0; j < 8; j++)
            x[j] = x[j] + y[j];
    }
#pragma unroll
    for (uint32_t j = 0; j < 8; j++)
        x[j] = x[j] * (1.0f / (float)n);
    store_part<IS_ALIGNED>(out.at(row, 0), column, out.width, x);
}

template <class T, bool IS_ALIGNED>
static __global__ void __launch_bounds__(THREADS)
splice_rows(rows<T> x, const int32_t *visual, rows<T> features, bool is_sum)
{
    float a[8], b[8];
    uint32_t row = blockIdx.x, column = own_column();
    start_next();
    wait_for_input();
    if (visual[row] < 0)
        return;
    load_part<IS_ALIGNED>(features.at((uint32_t)visual[row], 0), column, x.width, b);
    if (is_sum) {
        load_part<IS_ALIGNED>(x.at(row, 0), column, x.width, a);
#pragma unroll
        for (uint32_t i = 0; i < 8; i++)
            b[i] = a[i] + b[i];
    }
    store_part<IS_ALIGNED>(x.at(row, 0), column, x.width, b);
}

static dim3 grid_of(uint32_t n_rows, uint32_t width)
{
    return dim3(n_rows, ceil_div(width, 8 * THREADS));
}

enum rc cuda_pixels(void *ctx, const struct pixels_args *args, struct err *err)
{
    return run_rows(ctx, args->n_rows, "pixels", err, [&](struct cuda *cuda, auto value) {
        using T = decltype(value);
        launch(cuda, has_eights<T>(args->out) ? pixels_rows<T, true> : pixels_rows<T, false>,
               grid_of(args->n_rows, args->out.width), THREADS, 0, args->bytes, args->table, args->n_frames,
               rows<T>(args->out));
    });
}

enum rc cuda_embed_taps(void *ctx, const struct embed_taps_args *args, struct err *err)
{
    return run_rows(ctx, args->n_rows, "embed_taps", err, [&](struct cuda *cuda, auto value) {
        using T = decltype(value);
        launch(cuda, has_eights<T>(args->out) ? embed_taps_rows<T, true> : embed_taps_rows<T, false>,
               grid_of(args->n_rows, args->out.width), THREADS, 0, args->table, args->rows, args->weights, args->n_taps,
               rows<T>(args->out));
    });
}

enum rc cuda_place_rows(void *ctx, const struct place_rows_args *args, struct err *err)
{
    return run_rows(ctx, args->n_rows, "place_rows", err, [&](struct cuda *cuda, auto value) {
        using T = decltype(value);
        bool is_aligned = has_eights<T>(args->x) && has_eights<T>(args->out);
        launch(cuda, is_aligned ? place_rows_copy<T, true> : place_rows_copy<T, false>, grid_of(args->n_rows, args->x.width),
               THREADS, 0, rows<T>(args->x), args->rows, rows<T>(args->out));
    });
}

enum rc cuda_mean_rows(void *ctx, const struct mean_rows_args *args, struct err *err)
{
    return run_rows(ctx, args->n_rows, "mean_rows", err, [&](struct cuda *cuda, auto value) {
        using T = decltype(value);
        bool is_aligned = has_eights<T>(args->x) && has_eights<T>(args->out);
        launch(cuda, is_aligned ? mean_rows_sums<T, true> : mean_rows_sums<T, false>, grid_of(args->n_rows, args->out.width),
               THREADS, 0, rows<T>(args->x), args->n, rows<T>(args->out));
    });
}

enum rc cuda_splice(void *ctx, const struct splice_args *args, struct err *err)
{
    return run_rows(ctx, args->n_rows, "splice", err, [&](struct cuda *cuda, auto value) {
        using T = decltype(value);
        bool is_aligned = has_eights<T>(args->x) && has_eights<T>(args->features);
        launch(cuda, is_aligned ? splice_rows<T, true> : splice_rows<T, false>, grid_of(args->n_rows, args->x.width), THREADS,
               0, rows<T>(args->x), args->visual, rows<T>(args->features), args->is_sum);
    });
}
