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
#include "unit_reader.cuh"

/* Adds the sums of a group, or of a slab, of four outputs: rows lane / 4, twice, then 8 further on, twice. */
static __device__ __forceinline__ void units_add(float (&sum)[4], const float (&p)[4], float low, float high)
{
    sum[0] = fmaf(p[0], low, sum[0]);
    sum[1] = fmaf(p[1], low, sum[1]);
    sum[2] = fmaf(p[2], high, sum[2]);
    sum[3] = fmaf(p[3], high, sum[3]);
}

/* ---- any x --------------------------------------------------------------------------------------------------------------- */

/* A warp has a panel by 8 rows of x. Blocks: [panels][eights of rows]. Bound by latency. */
template <uint32_t DTYPE>
static __global__ void __launch_bounds__(32)
linear_units_plain(const struct matrix_units w, rows<__nv_bfloat16> x, uint32_t n_cols, struct output out)
{
    __shared__ __align__(16) uint8_t unit[unit_bytes(DTYPE)];
    typedef unit_reader<DTYPE> reader;
    const uint32_t lane = threadIdx.x, g = lane / 4, t = lane % 4, groups = unit_groups(DTYPE), at = shared_address(unit);
    const uint16_t *row = (const uint16_t *)x.at(min(blockIdx.y * 8 + g, out.n_rows - 1), 0);
    const uint8_t *from = w.data + (size_t)blockIdx.x * w.n_slabs * unit_bytes(DTYPE);
    start_next();
    wait_for_input();
    float sum[4] = {};
    for (uint32_t slab = 0; slab < w.n_slabs; slab++, from += unit_bytes(DTYPE)) {
        float v[4] = {}, p[4] = {}, total[4] = {};
        reader r;
        for (uint32_t i = lane; i < unit_bytes(DTYPE) / 16; i += 32)
            ((uint4 *)unit)[i] = ((const uint4 *)from)[i];
        __syncwarp();
        r.begin(at);
#pragma unroll
        for (uint32_t step = 0; step < 8; step++) {
            const uint32_t k = slab * UNIT_COLUMNS + step * 16 + 2 * t;
            const uint32_t b[2] = {pair_at(row, k, n_cols, false), pair_at(row, k + 8, n_cols, false)};
            uint32_t a[4], ones[4];
            if (step % 4 == 0)
                r.load(at, step / 4);
            if (step * groups % 8 == 0)
                r.enter(at, step * groups / 8);
            r.unpack(step % 4, a);
            mma(p, a, b, __nv_bfloat16());
            units_ones(ones);
            if (reader::has_minima)
                mma(total, ones, b, __nv_bfloat16());
            if ((step + 1) * groups % 8)
                continue;
            units_add(groups == 1 ? sum : v, p, r.scale(false), r.scale(true));
            if (reader::has_minima)
                units_add(v, total, -r.minimum(false), -r.minimum(true));
            for (uint32_t i = 0; i < 4; i++)
                p[i] = total[i] = 0;
        }
        for (uint32_t i = 0; i < 4 && groups > 1; i++)
            sum[i] = sum[i] + v[i];
        __syncwarp();
    }
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
