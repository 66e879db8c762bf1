/* experts_plain.cuh: products of experts whose weights the copy engine cannot read: other types, odd columns or addresses. They
 * are the plain kernels of linear.cu over the places of each expert, with the same chains. Bound by latency. */
#ifndef LLMPY_CUDA_EXPERTS_PLAIN_CUH
#define LLMPY_CUDA_EXPERTS_PLAIN_CUH

#include "../core/launch.cuh"
#include "../core/mma.cuh"
#include "../core/weight_format.cuh"
#include "experts_lora.cuh"

/* A matrix of all experts, rows_each rows of W one after the other. */
struct plain_weights {
    const char *data;
    size_t row_bytes;
    uint32_t rows_each, n_cols;
};

template <class T>
static __device__ __forceinline__ void plain_store(const struct output &out, const expert_product &product, bool is_product,
                                                   uint32_t expert, uint32_t place, uint32_t n, float sum, float up)
{
    const float *bias = out.bias ? out.bias + ((size_t)expert * out.n_out << is_product) + n : NULL;
    T value = round_to<T>(bias ? sum + bias[0] : sum);
    if (is_product)
        value = round_to<T>(product(to_float(value), to_float(round_to<T>(bias ? up + bias[out.n_out] : up))));
    ((T *)out.y)[(size_t)place * out.y_stride + n] = value;
}

/* As linear.cu's linear_tiles: 16 rows of W by 8 places of expert blockIdx.y at a time; of gate and of up, if N is 2. */
template <class T, uint32_t N>
static __global__ void __launch_bounds__(32) experts_plain_tiles(struct mixture m, struct plain_weights w, rows<T> x,
                                                                 bool is_aligned, struct output out, expert_product product,
                                                                 const __grid_constant__ experts_added added)
{
    start_next();
    wait_for_input();
    const uint32_t g = threadIdx.x / 4, t = threadIdx.x % 4, n = blockIdx.x * 16 + g, e = blockIdx.y;
    const uint32_t *low[N], *high[N];
    for (uint32_t i = 0; i < N; i++) {
        const char *from = w.data + ((size_t)e * w.rows_each + i * out.n_out) * w.row_bytes;
        low[i] = (const uint32_t *)(from + min(n, out.n_out - 1) * w.row_bytes) + t;
        high[i] = (const uint32_t *)(from + min(n + 8, out.n_out - 1) * w.row_bytes) + t;
    }
    for (uint32_t place = m.offsets[e], end = m.offsets[e + 1]; place < end; place += 8) {
        const uint16_t *row = (const uint16_t *)x.at(min(place + g, end - 1), 0);
        float c[N][4] = {};
#pragma unroll 4
        for (uint32_t k = 0; k < w.n_cols; k += 16) {
            uint32_t b[2] = {pair_at(row, k + 2 * t, w.n_cols, is_aligned), pair_at(row, k + 2 * t + 8, w.n_cols, is_aligned)};
#pragma unroll
            for (uint32_t i = 0; i < N; i++) {
                uint32_t a[4] = {low[i][k / 2], high[i][k / 2], low[i][k / 2 + 4], high[i][k / 2 + 4]};
                mma(c[i], a, b, T());
            }
        }
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            uint32_t p = place + 2 * t + i % 2, row_of_w = n + i / 2 * 8;
            if (p >= end || row_of_w >= out.n_out)
                continue;
            if (added.slots)
#pragma unroll
                for (uint32_t half = 0; half < N; half++)
                    c[half][i] += added.value(m, e, p, half * out.n_out + row_of_w);
            plain_store<T>(out, product, N == 2, e, p, row_of_w, c[0][i], c[N - 1][i]);
        }
    }
}

#define PLAIN_THREADS 128u
#define PLAIN_W_ROWS 16u
#define PLAIN_CHUNK 64u
#define PLAIN_X_ROWS 8u

/* As linear.cu's linear_values, by experts and places likewise. */
template <class T, class W, uint32_t N>
static __global__ void __launch_bounds__(PLAIN_THREADS)
experts_plain_values(struct mixture m, struct plain_weights w, rows<T> x, struct output out, expert_product product,
                     const __grid_constant__ experts_added added)
{
    start_next();
    wait_for_input();
    __shared__ float w_values[N][PLAIN_W_ROWS][PLAIN_CHUNK + 1], x_values[PLAIN_X_ROWS][PLAIN_CHUNK + 1];
    const uint32_t n = threadIdx.x % PLAIN_W_ROWS, r = threadIdx.x / PLAIN_W_ROWS, base = blockIdx.x * PLAIN_W_ROWS;
    const uint32_t e = blockIdx.y;
    for (uint32_t place = m.offsets[e], end = m.offsets[e + 1]; place < end; place += PLAIN_X_ROWS) {
        float sum[N] = {};
        for (uint32_t k = 0; k < w.n_cols; k += PLAIN_CHUNK) {
            uint32_t n_here = min(PLAIN_CHUNK, w.n_cols - k);
            for (uint32_t i = threadIdx.x; i < N * PLAIN_W_ROWS * PLAIN_CHUNK; i += PLAIN_THREADS) {
                uint32_t part = i / (PLAIN_W_ROWS * PLAIN_CHUNK), row = i / PLAIN_CHUNK % PLAIN_W_ROWS, c = i % PLAIN_CHUNK;
                if (c < n_here && base + row < out.n_out) {
                    size_t at = (size_t)e * w.rows_each + part * out.n_out + base + row;
                    w_values[part][row][c] = W::value((const uint8_t *)w.data + at * w.row_bytes, k + c);
                }
            }
            for (uint32_t i = threadIdx.x; i < PLAIN_X_ROWS * PLAIN_CHUNK; i += PLAIN_THREADS) {
                uint32_t row = i / PLAIN_CHUNK, c = i % PLAIN_CHUNK;
                if (c < n_here && place + row < end)
                    x_values[row][c] = to_float(*x.at(place + row, k + c));
            }
            __syncthreads();
            for (uint32_t c = 0; c < n_here; c++)
#pragma unroll
                for (uint32_t i = 0; i < N; i++)
                    sum[i] = fmaf(w_values[i][n][c], x_values[r][c], sum[i]);
            __syncthreads();
        }
        if (place + r >= end || base + n >= out.n_out)
            continue;
        if (added.slots)
#pragma unroll
            for (uint32_t half = 0; half < N; half++)
                sum[half] += added.value(m, e, place + r, half * out.n_out + base + n);
        plain_store<T>(out, product, N == 2, e, place + r, base + n, sum[0], sum[N - 1]);
    }
}

#endif
