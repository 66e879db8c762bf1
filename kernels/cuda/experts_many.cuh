/* experts_many.cuh: products of experts that have many rows each: gemm.cuh's tiles over units of 64 * GROUPS places of one
 * expert by WIDTH rows of its weights. The list of units is worked out by every block from the experts' first places, as the
 * host does not know them; a grid of as many clusters as the device holds walks it. A cluster's blocks have tiles beside each
 * other: each fetches its slice of the rows of x for all of them. The chain of every output is gemm.cuh's.
 *
 * As in experts_few.cuh the product with gate and up starts its successor when it has seen the places, so that weights of the
 * way down are fetched before it waits. Bound by the tensor cores, 2 n_routes n_out n_cols / 800e6 us on an H200, and what units
 * that are not full waste: half a unit an expert. */
#ifndef LLMPY_CUDA_EXPERTS_MANY_CUH
#define LLMPY_CUDA_EXPERTS_MANY_CUH

#include "experts.cuh"
#include "tensor_map.cuh"
#include "tile_store.cuh"
#include "wgmma_wide.cuh"

struct many_shape {
    uint32_t n_blocks;      /* of 64 columns */
    uint32_t n_tiles;       /* of an expert's weights, beside each other */
    uint32_t across;        /* tiles of a cluster; divides n_tiles */
    uint32_t expert_step;   /* from one expert to the next: rows, or pairs of eight */
    bool is_product;        /* of gate and up: rows of W come by turns, so out.n_out is half of them */
    bool is_wide;           /* y lies on multiples of 16 bytes, in eights of columns */
    bool is_behind;         /* the product before has started this kernel: the places are there already */
};

struct many_maps {
    CUtensorMap w, x;
};

struct many_tables {
    uint32_t offsets[EXPERTS_MAX + 1]; /* first places */
    uint32_t units[EXPERTS_MAX + 1];   /* first units */
};

static constexpr __host__ __device__ uint32_t many_stages(uint32_t groups, uint32_t width)
{
    return (SHARED_BYTES - groups * 64 * gemm_pitch(width) - (uint32_t)sizeof(struct many_tables)) /
           ((groups * 64 + width) * 128 + 16);
}

/* One warp. */
static __device__ void many_count(const struct mixture &m, struct many_tables *t, uint32_t unit_rows)
{
    uint32_t lane = threadIdx.x % 32, n_units = 0;
    for (uint32_t e = lane; e < lane + m.n_experts; e += 32) {
        uint32_t first = e < m.n_experts ? __ldcg(m.offsets + e) : 0, end = e < m.n_experts ? __ldcg(m.offsets + e + 1) : 0;
        uint32_t n = (end - first + unit_rows - 1) / unit_rows, at = n;
        for (uint32_t step = 1; step < 32; step *= 2) {
            uint32_t other = __shfl_up_sync(~0u, at, step);
            at += lane >= step ? other : 0;
        }
        if (e < m.n_experts) {
            t->offsets[e] = first;
            t->units[e] = n_units + at - n;
        }
        n_units += __shfl_sync(~0u, at, 31);
    }
    if (lane == 0) {
        t->offsets[m.n_experts] = m.n_routes;
        t->units[m.n_experts] = n_units;
    }
}

/* A cluster's turn: an expert, its places from first to end of which this block has a tile, and the tile's number. */
struct many_place {
    uint32_t expert, first, end, tile;
};
static __device__ __forceinline__ struct many_place many_place_of(const struct mixture &m, const struct many_shape &s,
                                                                  const struct many_tables *t, uint32_t unit_rows,
                                                                  uint32_t turn, uint32_t rank)
{
    uint32_t per_unit = s.n_tiles / s.across, unit = turn / per_unit, low = 0, high = m.n_experts;
    while (high - low > 1) { /* the last expert whose first unit is not behind: those without units have none of their own */
        uint32_t middle = (low + high) / 2;
        if (t->units[middle] <= unit)
            low = middle;
        else
            high = middle;
    }
    struct many_place p;
    p.expert = low;
    p.first = t->offsets[low] + (unit - t->units[low]) * unit_rows;
    p.end = t->offsets[low + 1];
    p.tile = turn % per_unit * s.across + rank;
    return p;
}

static __device__ __forceinline__ uint32_t many_turns(const struct mixture &m, const struct many_shape &s,
                                                      const struct many_tables *t)
{
    return t->units[m.n_experts] * (s.n_tiles / s.across);
}

/* One thread streams the block's weights, or its slices of x to all blocks of the cluster. */
template <uint32_t GROUPS, uint32_t WIDTH>
static __device__ __forceinline__ void many_load(const struct many_maps &maps, const struct mixture &m,
                                                 const struct many_shape &s, const struct many_tables *t, uint32_t ring,
                                                 uint32_t full, uint32_t empty, bool is_weight)
{
    const uint32_t x_bytes = GROUPS * 64 * 128, w_bytes = WIDTH * 128, n_stages = many_stages(GROUPS, WIDTH);
    const uint32_t rank = cluster_rank(), slice = GROUPS * 64 / s.across, mask = (1u << s.across) - 1;
    uint32_t stage = 0, phase = 1; /* 1: the first round finds every stage empty */
    uint64_t policy = policy_keep();
    if (!is_weight)
        wait_for_input();
    for (uint32_t turn = cluster_first(); turn < many_turns(m, s, t); turn += cluster_step()) {
        struct many_place p = many_place_of(m, s, t, GROUPS * 64, turn, rank);
        for (uint32_t block = 0; block < s.n_blocks; block++) {
            uint32_t target = ring + stage * (x_bytes + w_bytes), barrier = full + 8 * stage;
            barrier_wait(empty + 8 * stage, phase);
            barrier_expect(barrier, is_weight ? w_bytes : x_bytes);
            if (!is_weight)
                copy_box_to(mask, target + rank * slice * 128, &maps.x, p.first + rank * slice, block, barrier, policy);
            else if (s.is_product)
                copy_pairs(target + x_bytes, &maps.w, p.expert * s.expert_step + p.tile * (WIDTH / 16), block, barrier, policy);
            else
                copy_box(target + x_bytes, &maps.w, p.expert * s.expert_step + p.tile * WIDTH, block, barrier, policy);
            if (++stage == n_stages) {
                stage = 0;
                phase ^= 1;
            }
        }
    }
    /* Nobody leaves before the others' last word has come. */
    for (uint32_t i = 0; i < n_stages; i++) {
        barrier_wait(empty + 8 * stage, phase);
        if (++stage == n_stages) {
            stage = 0;
            phase ^= 1;
        }
    }
}

template <class T, uint32_t GROUPS, uint32_t WIDTH>
static __device__ __forceinline__ void many_consume(const struct mixture &m, const struct many_shape &s,
                                                    const struct many_tables *t, const struct output &out,
                                                    const expert_product &product, uint32_t ring, uint32_t pieces,
                                                    uint32_t full, uint32_t empty)
{
    const uint32_t x_bytes = GROUPS * 64 * 128, stage_bytes = x_bytes + WIDTH * 128, n_stages = many_stages(GROUPS, WIDTH);
    const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, rank = cluster_rank();
    uint32_t free_in = lane < s.across ? address_in(empty, lane) : 0, stage = 0, phase = 0, before = 0;
    wait_for_input();
    for (uint32_t turn = cluster_first(); turn < many_turns(m, s, t); turn += cluster_step()) {
        float sum[WIDTH / 2];
#pragma unroll
        for (uint32_t i = 0; i < WIDTH / 2; i++)
            sum[i] = 0;
        uint32_t block = 0;
        do {
            barrier_wait(full + 8 * stage, phase);
            uint64_t a = wgmma_rows(ring + stage * stage_bytes + warp / 4 * 64 * 128);
            uint64_t b = wgmma_rows(ring + stage * stage_bytes + x_bytes);
            wgmma_begin();
#pragma unroll
            for (uint32_t i = 0; i < 4; i++)
                wgmma(sum, a + 2 * i, b + 2 * i, T());
            wgmma_commit();
            wgmma_wait<1>();
            if (block && free_in)
                barrier_arrive_in(free_in + 8 * before);
            before = stage;
            if (++stage == n_stages) {
                stage = 0;
                phase ^= 1;
            }
        } while (++block < s.n_blocks);
        wgmma_wait<0>();
        if (free_in)
            barrier_arrive_in(free_in + 8 * before);
#pragma unroll
        for (uint32_t i = 0; i < WIDTH / 2; i++)
            asm volatile("" : "+f"(sum[i]));
        struct many_place p = many_place_of(m, s, t, GROUPS * 64, turn, rank);
        struct output here = out;
        here.n_rows = p.end;
        if (out.bias) {
            here.bias = out.bias + ((size_t)p.expert * out.n_out << s.is_product);
            add_bias(sum, here, s.is_product, p.tile * WIDTH);
        }
        store_lines<T>(sum, here, s.is_product, s.is_wide, product, p.first + warp * 16, p.tile * WIDTH,
                       pieces + warp * 16 * gemm_pitch(WIDTH));
    }
}

template <class T, uint32_t GROUPS, uint32_t WIDTH>
static __global__ void __launch_bounds__((GROUPS + 1) * 128, 1)
multiply_many(const __grid_constant__ struct many_maps maps, const __grid_constant__ struct mixture m,
              const __grid_constant__ struct many_shape s, const __grid_constant__ struct output out,
              const __grid_constant__ expert_product product)
{
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t n_stages = many_stages(GROUPS, WIDTH), ring = shared_address(shared);
    const uint32_t tables_at = n_stages * (GROUPS * 64 + WIDTH) * 128 + GROUPS * 64 * gemm_pitch(WIDTH);
    const uint32_t pieces = ring + n_stages * (GROUPS * 64 + WIDTH) * 128;
    const uint32_t full = ring + tables_at + (uint32_t)sizeof(struct many_tables), empty = full + 8 * n_stages;
    const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    struct many_tables *t = (struct many_tables *)(shared + tables_at);
    if (threadIdx.x < n_stages) {
        barrier_init(full + 8 * threadIdx.x, 2);
        barrier_init(empty + 8 * threadIdx.x, GROUPS * 4 * s.across);
    }
    barriers_made();
    if (!s.is_behind)
        wait_for_input();
    if (threadIdx.x == 0)
        start_next();
    if (warp == 0)
        many_count(m, t, GROUPS * 64);
    __syncthreads();
    cluster_meet();
    /* Two warpgroups of 232 registers and the loading one fill the processor's. */
    if (warp >= GROUPS * 4) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (warp < GROUPS * 4 + 2 && threadIdx.x % 32 == 0)
            many_load<GROUPS, WIDTH>(maps, m, s, t, ring, full, empty, warp == GROUPS * 4);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        many_consume<T, GROUPS, WIDTH>(m, s, t, out, product, ring, pieces, full, empty);
    }
}

#endif
