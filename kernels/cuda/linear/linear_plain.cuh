/* linear_plain.cuh: the plain kernels of linear.cu, which read any W and x. linear_tiles has one tile of W and 8 or 64 rows of
 * x a warp, on tensor cores. A block of linear_values unpacks 16 rows of W by 64 columns into shared memory for 8 or 64 rows of
 * x. Both are bound by latency. */
#ifndef LLMPY_CUDA_LINEAR_PLAIN_CUH
#define LLMPY_CUDA_LINEAR_PLAIN_CUH

#include "../core/launch.cuh"
#include "../core/mma.cuh"
#include "../core/weight_format.cuh"
#include "linear.cuh"

/* ---- tensor cores -------------------------------------------------------------------------------------------------------- */

/* Lane g = lane / 4, t = lane % 4 holds rows g and g + 8 of the tile of W, row g of each eight of x, columns 2t and 2t + 8. */
template <class T, uint32_t EIGHTS>
static __global__ void __launch_bounds__(32)
linear_tiles(const char *w, size_t w_row_bytes, rows<T> x, uint32_t n_cols, bool is_aligned, struct output out)
{
    start_next();
    wait_for_input();
    uint32_t g = threadIdx.x / 4, t = threadIdx.x % 4, n = blockIdx.x * 16 + g, r = blockIdx.y * 8 * EIGHTS + g;
    /* Rows beyond the last read the last row; their sums are not stored. */
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
    bool is_few = args->n_rows <= 8;
    dim3 grid(ceil_div(part->n_rows, 16), ceil_div(args->n_rows, is_few ? 8 : 64));
    launch(cuda, is_few ? linear_tiles<T, 1> : linear_tiles<T, 8>, grid, 32, 0, part->data, part->row_bytes,
           rows<T>(args->x), n_cols, is_aligned, out);
}

/* ---- fused multiply-adds ------------------------------------------------------------------------------------------------- */

#define THREADS 128u
#define W_ROWS 16u
#define CHUNK 64u

template <class T, class W, uint32_t X_ROWS>
static __global__ void __launch_bounds__(THREADS)
linear_values(const char *w, size_t w_row_bytes, rows<T> x, uint32_t n_cols, struct output out)
{
    start_next();
    wait_for_input();
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
                w_values[row][c] = W::value((const uint8_t *)w + (w_base + row) * w_row_bytes, k + c);
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
        bool is_few = args->n_rows <= 8;
        dim3 grid(ceil_div(part->n_rows, W_ROWS), ceil_div(args->n_rows, is_few ? 8 : 64));
        launch(cuda, is_few ? linear_values<T, W, 8> : linear_values<T, W, 64>, grid, THREADS, 0, part->data,
               part->row_bytes, rows<T>(args->x), args->matrix->n_cols, out);
    });
}

/* ---- either -------------------------------------------------------------------------------------------------------------- */

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

#endif
