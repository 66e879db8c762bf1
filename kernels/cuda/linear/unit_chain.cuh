/* unit_chain.cuh: the sums of linear_units.cuh by mma.sync of any device: a warp has a panel by 8 rows of x. Bound by latency.
 * */
#ifndef LLMPY_CUDA_UNIT_CHAIN_CUH
#define LLMPY_CUDA_UNIT_CHAIN_CUH

#include "../core/mma.cuh"
#include "unit_reader.cuh"

/* Adds the sums of a group, or of a slab, of four outputs: rows lane / 4, twice, then 8 further on, twice. */
static __device__ __forceinline__ void units_add(float (&sum)[4], const float (&p)[4], float low, float high)
{
    sum[0] = fmaf(p[0], low, sum[0]);
    sum[1] = fmaf(p[1], low, sum[1]);
    sum[2] = fmaf(p[2], high, sum[2]);
    sum[3] = fmaf(p[3], high, sum[3]);
}

/* from: the panel's first unit. unit: shared memory of the warp, for one of them. row: the row lane / 4 of x. */
template <uint32_t DTYPE>
static __device__ __forceinline__ void units_chain(float (&sum)[4], uint8_t *unit, const uint8_t *from, uint32_t n_slabs,
                                                   const uint16_t *row, uint32_t n_cols)
{
    typedef unit_reader<DTYPE> reader;
    const uint32_t lane = threadIdx.x % 32, t = lane % 4, groups = unit_groups(DTYPE);
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(unit);
    for (uint32_t slab = 0; slab < n_slabs; slab++, from += unit_bytes(DTYPE)) {
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
}

#endif
