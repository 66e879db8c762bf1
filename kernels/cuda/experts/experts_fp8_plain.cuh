/* experts_fp8_plain.cuh: experts of FP8 or INT8 weights with the sums of linear_fp8_plain.cuh, for devices that run the code
 * for compute_80. As experts_plain_tiles of experts_plain.cuh: a warp has 16 rows of W by 8 places of expert blockIdx.y at a
 * time. Bound by latency. */
#ifndef LLMPY_CUDA_EXPERTS_FP8_PLAIN_CUH
#define LLMPY_CUDA_EXPERTS_FP8_PLAIN_CUH

#include "../linear/linear_fp8_plain.cuh"
#include "experts_fp8.cuh"
#include "experts_plain.cuh"

/* N: 2: of gate and of up. */
template <class T, class NUMBER, uint32_t N>
static __global__ void __launch_bounds__(32) experts_fp8_plain(struct mixture m, struct plain_weights w, struct fp8_places x,
                                                               struct output out, expert_product product)
{
    const uint32_t g = threadIdx.x / 4, t = threadIdx.x % 4, n = blockIdx.x * 16 + g, e = blockIdx.y;
    const uint32_t n_slabs = (w.n_cols + FP8_SLAB - 1) / FP8_SLAB;
    const uint8_t *low[N], *high[N];
    for (uint32_t i = 0; i < N; i++) {
        const uint8_t *from = (const uint8_t *)w.data + ((size_t)e * w.rows_each + i * out.n_out) * w.row_bytes;
        low[i] = from + min(n, out.n_out - 1) * w.row_bytes;
        high[i] = from + min(n + 8, out.n_out - 1) * w.row_bytes;
    }
    start_next();
    wait_for_input();
    for (uint32_t place = m.offsets[e], end = m.offsets[e + 1]; place < end; place += 8) {
        const uint8_t *row = x.numbers + (size_t)min(place + g, end - 1) * x.row_bytes;
        const float *scales[2];
        for (uint32_t i = 0; i < 2; i++)
            scales[i] = (const float *)((const char *)x.scales + (size_t)min(place + 2 * t + i, end - 1) * x.chunk_bytes);
        float sum[N][4] = {};
#pragma unroll
        for (uint32_t i = 0; i < N; i++)
            fp8_plain_sums<NUMBER>(sum[i], low[i], high[i], row, n_slabs,
                                   [&](uint32_t slab, uint32_t j) { return scales[j % 2][slab]; });
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            uint32_t p = place + 2 * t + i % 2, row_of_w = n + i / 2 * 8;
            if (p < end && row_of_w < out.n_out)
                plain_store<T>(out, product, N == 2, e, p, row_of_w, sum[0][i], sum[N - 1][i]);
        }
    }
}

static enum rc run_fp8_plain(const struct running_mixture *run, const struct expert_linear *linear, struct err *)
{
    const struct cuda_part *part = &linear->w->parts[0];
    const uint32_t n_cols = linear->w->n_cols;
    const struct plain_weights w = {part->data, part->row_bytes, linear->rows_each, n_cols};
    const struct fp8_places x = fp8_places_at(run->rounded, run->m.n_routes, n_cols);
    const struct output out = output_of(linear);
    fp8_round_places(run->cuda, linear->w, &linear->x, run->m.n_routes, x);
    visit_both(run->cuda, linear->w, [&](auto value, auto number) {
        using T = decltype(value);
        using N = decltype(number);
        launch(run->cuda, linear->is_product ? experts_fp8_plain<T, N, 2> : experts_fp8_plain<T, N, 1>,
               dim3(ceil_div(out.n_out, 16), run->m.n_experts), 32, 0, run->m, w, x, out, run->product);
    });
    return RC_OK;
}

#endif
