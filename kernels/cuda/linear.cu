/* y[r][n] = sum over k of x[r][k] * W[n][k] (+ bias[n]), rounded once to the type of activations (float32 for logits); then
 * (+ add[r][n]), rounded again, as the separate operation does it. Float32 accumulators, one chain for every output, the same
 * for every number of rows:
 * - W and x of one two-byte type: mma.sync m16n8k16 over the k16 steps 0, 1, 2, ..., 16 rows of W by 8 rows of x; the tail of
 *   k and rows that are not there are zeros. A warp holds one tile of W and 8 or 64 rows of x.
 * - anything else: the exact float32 value of W (weight.cuh) times that of x in fused multiply-adds, k ascending. A block
 *   unpacks 16 rows of W by 64 columns into shared memory for 8 or 64 rows of x.
 * One row is bound by the bytes of W; this plain form is latency bound and reaches a part of that. */
#include "weight.cuh"

struct output {
    char *y;
    const char *add;
    const float *bias;
    uint32_t y_stride, add_stride, n_rows, n_out;
    bool is_float;
};

template <class T> static __device__ __forceinline__ void put(const struct output &out, uint32_t r, uint32_t n, float sum)
{
    if (r >= out.n_rows || n >= out.n_out)
        return;
    if (out.bias)
        sum += out.bias[n];
    if (out.is_float) {
        ((float *)out.y)[(size_t)r * out.y_stride + n] = sum;
        return;
    }
    T value = round_to<T>(sum);
    if (out.add)
        value = round_to<T>(to_float(value) + to_float(((const T *)out.add)[(size_t)r * out.add_stride + n]));
    ((T *)out.y)[(size_t)r * out.y_stride + n] = value;
}

/* ---- tensor cores ------------------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], __nv_bfloat16)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], __half)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* Elements k and k + 1 of a row of x; zeros from n_cols on. */
static __device__ __forceinline__ uint32_t pair_at(const uint16_t *row, uint32_t k, uint32_t n_cols, bool is_aligned)
{
    if (is_aligned && k + 1 < n_cols)
        return *(const uint32_t *)(row + k);
    uint32_t low = k < n_cols ? row[k] : 0, high = k + 1 < n_cols ? row[k + 1] : 0;
    return low | high << 16;
}

/* Lane g = lane / 4, t = lane % 4 holds rows g and g + 8 of the tile of W, row g of each eight of x, columns 2t and 2t + 8. */
template <class T, uint32_t EIGHTS>
static __global__ void __launch_bounds__(32)
multiply_tiles(const char *w, size_t w_row_bytes, rows<T> x, uint32_t n_cols, bool is_aligned, struct output out)
{
    uint32_t g = threadIdx.x / 4, t = threadIdx.x % 4, n = blockIdx.x * 16 + g, r = blockIdx.y * 8 * EIGHTS + g;
    /* Rows beyond the last read the last one; their sums are not stored. */
    const uint32_t *low = (const uint32_t *)(w + min(n, out.n_out - 1) * w_row_bytes) + t;
    const uint32_t *high = (const uint32_t *)(w + min(n + 8, out.n_out - 1) * w_row_bytes) + t;
    const uint16_t *x_rows[EIGHTS];
    float c[EIGHTS][4] = {};
    for (uint32_t i = 0; i < EIGHTS; i++)
        x_rows[i] = (const uint16_t *)x.at(min(r + 8 * i, out.n_rows - 1), 0);
#pragma unroll 4
    for (uint32_t k = 0; k < n_cols; k += 16) {
        uint32_t a[4] = {low[k / 2], high[k / 2], low[k / 2 + 4], high[k / 2 + 4]};
#pragma unroll
        for (uint32_t i = 0; i < EIGHTS; i++) {
            uint32_t b[2] = {pair_at(x_rows[i], k + 2 * t, n_cols, is_aligned),
                             pair_at(x_rows[i], k + 2 * t + 8, n_cols, is_aligned)};
            mma(c[i], a, b, T());
        }
    }
    for (uint32_t i = 0; i < EIGHTS; i++) {
        uint32_t row = blockIdx.y * 8 * EIGHTS + 8 * i + 2 * t;
        put<T>(out, row, n, c[i][0]);
        put<T>(out, row + 1, n, c[i][1]);
        put<T>(out, row, n + 8, c[i][2]);
        put<T>(out, row + 1, n + 8, c[i][3]);
    }
}

template <class T>
static void launch_tiles(const struct cuda *cuda, const struct cuda_part *part, const struct linear_args *args,
                         const struct output &out)
{
    uint32_t n_cols = args->matrix->n_cols;
    bool is_aligned = (uintptr_t)args->x.data % 4 == 0 && args->x.stride % 2 == 0;
    if (args->n_rows <= 8) {
        dim3 grid(ceil_div(part->n_rows, 16), 1);
        multiply_tiles<T, 1>
            <<<grid, 32, 0, cuda->stream>>>(part->data, part->row_bytes, rows<T>(args->x), n_cols, is_aligned, out);
    } else {
        dim3 grid(ceil_div(part->n_rows, 16), ceil_div(args->n_rows, 64));
        multiply_tiles<T, 8>
            <<<grid, 32, 0, cuda->stream>>>(part->data, part->row_bytes, rows<T>(args->x), n_cols, is_aligned, out);
    }
}

/* ---- fused multiply-adds ------------------------------------------------------------------------------------------------ */

#define THREADS 128u
#define W_ROWS 16u
#define CHUNK 64u

template <class T, class W, uint32_t X_ROWS>
static __global__ void __launch_bounds__(THREADS)
multiply_values(const char *w, size_t w_row_bytes, rows<T> x, uint32_t n_cols, struct output out)
{
    const uint32_t per_thread = X_ROWS * W_ROWS / THREADS;
    __shared__ float w_values[W_ROWS][CHUNK + 1], x_values[X_ROWS][CHUNK + 1];
    uint32_t n = threadIdx.x % W_ROWS, first = threadIdx.x / W_ROWS;
    uint32_t w_base = blockIdx.x * W_ROWS, x_base = blockIdx.y * X_ROWS;
    float sum[per_thread] = {};
    for (uint32_t k = 0; k < n_cols; k += CHUNK) {
        uint32_t n_here = min(CHUNK, n_cols - k);
        for (uint32_t i = threadIdx.x; i < W_ROWS * CHUNK; i += THREADS) {
            uint32_t row = i / CHUNK, c = i % CHUNK;
            if (c < n_here && w_base + row < out.n_out)
                w_values[row][c] = weight_value(W(), (const uint8_t *)w + (w_base + row) * w_row_bytes, k + c);
        }
        for (uint32_t i = threadIdx.x; i < X_ROWS * CHUNK; i += THREADS) {
            uint32_t row = i / CHUNK, c = i % CHUNK;
            if (c < n_here && x_base + row < out.n_rows)
                x_values[row][c] = to_float(*x.at(x_base + row, k + c));
        }
        __syncthreads();
        for (uint32_t c = 0; c < n_here; c++)
#pragma unroll
            for (uint32_t i = 0; i < per_thread; i++)
                sum[i] = fmaf(w_values[n][c], x_values[first + i * (THREADS / W_ROWS)][c], sum[i]);
        __syncthreads();
    }
    for (uint32_t i = 0; i < per_thread; i++)
        put<T>(out, x_base + first + i * (THREADS / W_ROWS), w_base + n, sum[i]);
}

template <class T>
static void launch_values(const struct cuda *cuda, const struct cuda_part *part, const struct linear_args *args,
                          const struct output &out)
{
    visit_weight(part->dtype, [&](auto weight) {
        using W = decltype(weight);
        if (args->n_rows <= 8) {
            dim3 grid(ceil_div(part->n_rows, W_ROWS), 1);
            multiply_values<T, W, 8><<<grid, THREADS, 0, cuda->stream>>>(part->data, part->row_bytes, rows<T>(args->x),
                                                                         args->matrix->n_cols, out);
        } else {
            dim3 grid(ceil_div(part->n_rows, W_ROWS), ceil_div(args->n_rows, 64));
            multiply_values<T, W, 64><<<grid, THREADS, 0, cuda->stream>>>(part->data, part->row_bytes, rows<T>(args->x),
                                                                          args->matrix->n_cols, out);
        }
    });
}

/* ---- the call ----------------------------------------------------------------------------------------------------------- */

static void launch_part(const struct cuda *cuda, const struct cuda_part *part, const struct linear_args *args,
                        const struct output &out, float)
{
    launch_values<float>(cuda, part, args, out);
}

template <class T>
static void launch_part(const struct cuda *cuda, const struct cuda_part *part, const struct linear_args *args,
                        const struct output &out, T)
{
    if (part->dtype == cuda->dtype)
        launch_tiles<T>(cuda, part, args, out);
    else
        launch_values<T>(cuda, part, args, out);
}

enum rc cuda_linear(void *ctx, const struct linear_args *args, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    if (!args->n_rows || args->n_rows > cuda->options.max_rows)
        return err_set(err, RC_INTERNAL, "linear: wanted 1 to %u rows (the backend's max_rows), have %u",
                       cuda->options.max_rows, args->n_rows);
    if (args->input != LINEAR_PLAIN)
        return err_set(err, RC_INTERNAL, "linear: wanted plain input, have a fused form that fusions() does not name");
    uint32_t item = cuda->dtype == DTYPE_F32 ? 4 : 2, y_item = args->is_float_out ? 4 : item;
    for (uint32_t i = 0; i < args->matrix->n_parts; i++) {
        const struct cuda_part *part = &args->matrix->parts[i];
        if (!part->n_rows)
            continue;
        struct output out = {};
        out.y = (char *)args->y.data + (size_t)part->first_row * y_item;
        out.add = args->add ? (const char *)args->add->data + (size_t)part->first_row * item : NULL;
        out.bias = args->bias ? args->bias + part->first_row : NULL;
        out.y_stride = args->y.stride;
        out.add_stride = args->add ? args->add->stride : 0;
        out.n_rows = args->n_rows;
        out.n_out = part->n_rows;
        out.is_float = args->is_float_out;
        visit_type(cuda->dtype, [&](auto value) { launch_part(cuda, part, args, out, value); });
    }
    return launched(err, "linear");
}
