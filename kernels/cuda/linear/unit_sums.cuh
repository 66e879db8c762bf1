/* unit_sums.cuh: the sums of linear_units.cuh by wgmma: W is the operand of 64 rows, which a warpgroup unpacks into registers,
 * x that of WIDTH columns in shared memory. While the tensor cores multiply some steps, a warpgroup unpacks the next ones. */
#ifndef LLMPY_CUDA_UNIT_SUMS_CUH
#define LLMPY_CUDA_UNIT_SUMS_CUH

#include "../core/ring.cuh"
#include "../core/wgmma_wide.cuh"
#include "unit_reader.cuh"

/* A block's shared memory: x of the stages, then W of the stages, the warps' pieces for results, barriers. */
struct units_many_room {
    struct ring x, w;
    uint32_t pieces;
};

/* One warpgroup's side of the ring. A part is the steps that are unpacked together: of small groups, one group. */
template <uint32_t DTYPE, uint32_t GROUPS, uint32_t WIDTH> struct units_many_worker {
    typedef unit_reader<DTYPE> reader;
    static const uint32_t groups = unit_groups(DTYPE), n_parts = groups == 1 ? 2 : groups, n_steps = 8 / n_parts;
    static const uint32_t n_totals = reader::has_minima ? WIDTH / 2 : 1, n_v = groups > 1 ? WIDTH / 2 : 1;
    const struct units_many_room &room;
    uint32_t unit; /* address of the warp's unit at hand */
    reader w;
    uint32_t a[2][n_steps][4];

    /* Goes on to the unit of a stage that is there. */
    __device__ __forceinline__ void enter(const struct ring_place &at)
    {
        unit = room.w.data_of(at) + threadIdx.x / 32 * unit_bytes(DTYPE);
        w.begin(unit);
    }
    /* Unpacks a part of the unit at hand. */
    __device__ __forceinline__ void unpack(uint32_t part)
    {
        const uint32_t first = part * n_steps;
        if (first * groups % 8 == 0)
            w.enter(unit, first * groups / 8);
        if (first % 4 == 0)
            w.load(unit, first / 4);
#pragma unroll
        for (uint32_t i = 0; i < n_steps; i++)
            w.unpack(first % 4 + i, a[part % 2][i]);
    }
    /* Starts the products of a part, from zero at a group's first step; of minima the sums of x, too. */
    __device__ __forceinline__ void multiply(float (&p)[WIDTH / 2], float (&total)[n_totals], uint32_t part, uint64_t x) const
    {
        uint32_t ones[4];
        units_ones(ones);
        wgmma_begin();
#pragma unroll
        for (uint32_t i = 0; i < n_steps; i++) {
            const uint32_t step = part * n_steps + i;
            const uint64_t b = x + step / 4 * (WIDTH * 8) + step % 4 * 2;
            if (step * groups % 8 == 0)
                wgmma<false>(p, a[part % 2][i], b, __nv_bfloat16());
            else
                wgmma<true>(p, a[part % 2][i], b, __nv_bfloat16());
            if constexpr (reader::has_minima) {
                if (step * groups % 8 == 0)
                    wgmma<false>(total, ones, b, __nv_bfloat16());
                else
                    wgmma<true>(total, ones, b, __nv_bfloat16());
            }
        }
        wgmma_commit();
    }
    /* Adds a finished group to the slab's sums, or a whole slab to the tile's. */
    __device__ __forceinline__ void add(float (&sum)[WIDTH / 2], const float (&p)[WIDTH / 2], float low, float high,
                                        bool is_first) const
    {
#pragma unroll
        for (uint32_t i = 0; i < WIDTH / 2; i++)
            sum[i] = fmaf(p[i], i & 2 ? high : low, is_first ? 0.0f : sum[i]);
    }
    /* The sums of a tile. */
    __device__ __forceinline__ void sum_tile(float (&sum)[WIDTH / 2], float (&p)[WIDTH / 2], float (&total)[n_totals],
                                             struct ring_place &at, uint32_t n_slabs)
    {
        float v[n_v];
        room.w.wait_full(at);
        enter(at);
        unpack(0);
        for (uint32_t slab = 0; slab < n_slabs; slab++) {
            const uint64_t x = wgmma_rows(room.x.data_of(at));
            struct ring_place next = at;
            room.w.next(next);
#pragma unroll
            for (uint32_t part = 0; part < n_parts; part++) {
                const bool is_last = part + 1 == n_parts, ends = groups > 1 || is_last;
                multiply(p, total, part, x);
                const float low = w.scale(false), high = w.scale(true);
                const float first = -w.minimum(false), second = -w.minimum(true);
                if (!is_last) {
                    unpack(part + 1);
                } else {
                    if (groups == 1)
                        wgmma_wait<1>(); /* the part before has been read */
                    if (slab + 1 < n_slabs) {
                        room.w.wait_full(next);
                        enter(next);
                        unpack(0);
                    }
                }
                if (!ends)
                    continue;
                wgmma_wait<0>();
                wgmma_made(p);
                if (is_last) {
                    __syncwarp();
                    if (threadIdx.x % 32 == 0)
                        room.w.release(at.stage);
                }
                if constexpr (groups == 1)
                    add(sum, p, low, high, false);
                else
                    add(v, p, low, high, part == 0);
                if constexpr (reader::has_minima) {
                    wgmma_made(total);
                    add(v, total, first, second, false);
                }
            }
            if constexpr (groups > 1)
#pragma unroll
                for (uint32_t i = 0; i < WIDTH / 2; i++)
                    sum[i] = sum[i] + v[i];
            at = next;
        }
    }
};

#endif
