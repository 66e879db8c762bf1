/* experts_units_plain.cuh: experts whose weights lie in units, with the sums of unit_chain.cuh, for devices that run the code
 * for compute_80. A warp has a panel of an expert by 8 of its places at a time: eight outputs of a product, or eight of each
 * half of the expert's rows. Bound by latency. */
#ifndef LLMPY_CUDA_EXPERTS_UNITS_PLAIN_CUH
#define LLMPY_CUDA_EXPERTS_UNITS_PLAIN_CUH

#include "../linear/unit_chain.cuh"
#include "experts_linear.cuh"
#include "experts_plain.cuh"

/* Blocks: [panels of an expert][experts]. */
template <uint32_t DTYPE>
static __global__ void __launch_bounds__(32)
experts_units_plain(struct mixture m, struct matrix_units w, rows<__nv_bfloat16> x, uint32_t n_cols, bool is_product,
                    struct output out, expert_product product)
{
    __shared__ __align__(16) uint8_t unit[unit_bytes(DTYPE)];
    const uint32_t g = threadIdx.x / 4, t = threadIdx.x % 4, e = blockIdx.y, n = blockIdx.x * 8 + g;
    const uint8_t *from = w.data + ((size_t)e * (w.rows_each / 16) + blockIdx.x) * w.n_slabs * unit_bytes(DTYPE);
    start_next();
    wait_for_input();
    for (uint32_t place = m.offsets[e], end = m.offsets[e + 1]; place < end; place += 8) {
        float sum[4] = {};
        units_chain<DTYPE>(sum, unit, from, w.n_slabs, (const uint16_t *)x.at(min(place + g, end - 1), 0), n_cols);
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            const uint32_t p = place + 2 * t + i;
            if (p >= end)
                continue;
            plain_store<__nv_bfloat16>(out, product, is_product, e, p, n, sum[i], sum[i + 2]);
            if (!is_product)
                plain_store<__nv_bfloat16>(out, product, false, e, p, w.rows_each / 2 + n, sum[i + 2], 0);
        }
    }
}

enum rc run_units_plain(const struct running_mixture *run, const struct expert_linear *linear, struct err *)
{
    const struct matrix_units w = units_of(linear->w);
    visit_unit_type(linear->w->parts[0].dtype, [&](auto type) {
        launch(run->cuda, experts_units_plain<type()>, dim3(w.rows_each / 16, run->m.n_experts), 32, 0, run->m, w,
               rows<__nv_bfloat16>(linear->x), linear->w->n_cols, linear->is_product, output_of(linear), run->product);
    });
    return RC_OK;
}

#endif
