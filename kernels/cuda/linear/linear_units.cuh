/* linear_units.cuh: linears of weights in units (units.cuh) and bfloat16 activations: what linear_units_few.cuh and
 * linear_units_many.cuh share, and the plain kernel for x that the copy engine cannot read.
 *
 * A slab is 128 columns. The tensor cores multiply x by the numbers of the weights, less their zeros, which bfloat16 holds
 * exactly:
 *
 *   groups of 128:      sum = fmaf(p, scale, sum) for each slab, ascending, from 0
 *   groups of 32 or 16: v = fmaf(p, scale, v) for each group of a slab, from 0; sum = sum + v for each slab, from 0
 *   with minima:        v = fmaf(p, scale, v), then v = fmaf(total, -minimum, v)
 *
 * where p is a group's chain of k16 steps from zero, and total that of x times one. Scales and minima are exact in float32.
 * This order is the definition: all kernels and numbers of rows follow it, and mma.sync gives the bits of wgmma, so they give
 * equal bits. Slabs are independent until they are added, so warps share them out. Weights are exact, unlike in bfloat16,
 * which rounds them by 2e-3. */
#ifndef LLMPY_CUDA_LINEAR_UNITS_CUH
#define LLMPY_CUDA_LINEAR_UNITS_CUH

#include "../core/launch.cuh"
#include "../core/mma.cuh"
#include "../core/ring.cuh"
#include "linear.cuh"
#include "linear_units.h"
#include "unit_chain.cuh"

/* ---- any x --------------------------------------------------------------------------------------------------------------- */

/* A warp has a panel by 8 rows of x. Blocks: [panels][eights of rows]. Bound by latency. */
template <uint32_t DTYPE>
static __global__ void __launch_bounds__(32)
linear_units_plain(const struct matrix_units w, rows<__nv_bfloat16> x, uint32_t n_cols, struct output out)
{
    __shared__ __align__(16) uint8_t unit[unit_bytes(DTYPE)];
    const uint32_t g = threadIdx.x / 4, t = threadIdx.x % 4;
    const uint16_t *row = (const uint16_t *)x.at(min(blockIdx.y * 8 + g, out.n_rows - 1), 0);
    const uint8_t *from = w.data + (size_t)blockIdx.x * w.n_slabs * unit_bytes(DTYPE);
    float sum[4] = {};
    start_next();
    wait_for_input();
    units_chain<DTYPE>(sum, unit, from, w.n_slabs, row, n_cols);
    for (uint32_t i = 0; i < 4; i++)
        put<__nv_bfloat16>(out, blockIdx.y * 8 + 2 * t + i % 2, w.row_of(blockIdx.x, g + i / 2 * 8), sum[i]);
}

void units_plain_multiply(const struct cuda *cuda, const struct matrix *matrix, const struct view *x, const struct output &out)
{
    visit_unit_type(matrix->parts[0].dtype, [&](auto type) {
        const struct matrix_units w = units_of(matrix);
        launch(cuda, linear_units_plain<type()>, dim3(w.n_panels(), ceil_div(out.n_rows, 8)), 32, 0, w, rows<__nv_bfloat16>(*x),
               matrix->n_cols, out);
    });
}

#endif
