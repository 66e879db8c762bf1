/* experts_grouped.cuh: products of experts that have many rows each. W is the operand of 64 rows; a block's two warpgroups
 * have 128. The columns are a unit: up to 256 places of one expert, in steps of 32, so few computed columns are unused. The
 * host does not know the units: every block computes their list from the experts' first places. The grid has as many clusters
 * as the device holds, and walks the list. The blocks of a cluster have tiles of W beside each other. Each block fetches its
 * share of the unit's rows of x for all of them. The chain of every output is that of linear.cu.
 *
 * The kernel starts the next one when it has read the places, as experts_streamed.cuh does, so the next one fetches weights
 * before it waits. Bound by the tensor cores, 2 n_routes n_out n_cols / 800e6 us on an H200; below some 200 rows an expert by
 * the bytes of W. */
#ifndef LLMPY_CUDA_EXPERTS_GROUPED_CUH
#define LLMPY_CUDA_EXPERTS_GROUPED_CUH

#include "../core/launch.cuh"
#include "../core/mma.cuh"
#include "../core/packed.cuh"
#include "../core/ring.cuh"
#include "../core/tensor_map.cuh"
#include "../core/wgmma_wide.cuh"
#include "../linear/tile_store.cuh"
#include "experts.cuh"

#define GROUPED_ROWS 128u /* of W, a tile */
#define GROUPED_BOX 32u   /* places that are fetched at once */
#define GROUPED_THREADS 384u
#define GROUPED_STAGES 32u /* at most */
#define GROUPED_PITCH 48u /* of a place in a warp's piece of shared memory: 16 results, and no bank twice */
#define GROUPED_PIECE_BYTES (32 * GROUPED_PITCH)

struct grouped_shape {
    uint32_t n_blocks;      /* of 64 columns */
    uint32_t n_tiles;       /* of an expert's weights, beside each other */
    uint32_t across;        /* tiles of a cluster; divides n_tiles */
    uint32_t expert_step;   /* from one expert to the next: rows, or pairs of eight */
    bool is_product;        /* of gate and up: eights of their rows alternate in W, so out.n_out is half of W's rows */
    bool is_wide;           /* y lies on multiples of 16 bytes, in eights of columns */
    bool is_behind;         /* the product before has started this kernel, so the places are written already */
    uint32_t unit;          /* places of a unit, at most, a multiple of GROUPED_BOX */
    uint32_t n_stages, stage_bytes;
};

/* W of a stage: bytes that come, and where the rows of x are behind them. */
template <bool IS_PACKED> struct grouped_weights {
    static const uint32_t bytes = IS_PACKED ? GROUPED_ROWS / 8 * PACKED_BYTES : GROUPED_ROWS * 128;
    static const uint32_t room = (bytes + 1023) / 1024 * 1024, least_columns = IS_PACKED ? 32 : 64;
    static const uint32_t unit = IS_PACKED ? 160 : 256; /* places, at most: weights in registers leave fewer to the sums */
};

struct grouped_maps {
    CUtensorMap w, x;
};

struct grouped_tables {
    uint32_t offsets[EXPERTS_MAX + 1]; /* first places */
    uint32_t units[EXPERTS_MAX + 1];   /* first units */
};

/* One warp. */
static __device__ void grouped_count(const struct mixture &m, struct grouped_tables *t, uint32_t unit)
{
    uint32_t lane = threadIdx.x % 32, n_units = 0;
    for (uint32_t e = lane; e < lane + m.n_experts; e += 32) {
        uint32_t first = e < m.n_experts ? __ldcg(m.offsets + e) : 0, end = e < m.n_experts ? __ldcg(m.offsets + e + 1) : 0;
        uint32_t n = (end - first + unit - 1) / unit, at = n;
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
        t->offsets[m.n_experts] = __ldcg(m.offsets + m.n_experts);
        t->units[m.n_experts] = n_units;
    }
}

/* A cluster's turn: an expert, some of its places (its units are of near equal size), and the tile of W of this block. */
struct grouped_place {
    uint32_t expert, first, n_rows, tile;
};
static __device__ __forceinline__ struct grouped_place grouped_place_of(const struct mixture &m, const struct grouped_shape &s,
                                                                        const struct grouped_tables *t, uint32_t turn,
                                                                        uint32_t rank)
{
    uint32_t per_unit = s.n_tiles / s.across, unit = turn / per_unit, low = 0, high = m.n_experts;
    while (high - low > 1) { /* the last expert whose first unit is at most `unit`: experts without places have no unit */
        uint32_t middle = (low + high) / 2;
        if (t->units[middle] <= unit)
            low = middle;
        else
            high = middle;
    }
    uint32_t n_units = t->units[low + 1] - t->units[low], n = t->offsets[low + 1] - t->offsets[low];
    uint32_t step = (n + n_units - 1) / n_units, first = (unit - t->units[low]) * step;
    struct grouped_place p;
    p.expert = low;
    p.first = t->offsets[low] + first;
    p.n_rows = min(step, n - first);
    p.tile = turn % per_unit * s.across + rank;
    return p;
}

/* Columns that a unit is computed with. */
static __device__ __forceinline__ uint32_t grouped_columns(const struct grouped_place &p, uint32_t least)
{
    return max((p.n_rows + 31) / 32 * 32, least);
}

static __device__ __forceinline__ uint32_t grouped_turns(const struct mixture &m, const struct grouped_shape &s,
                                                         const struct grouped_tables *t)
{
    return t->units[m.n_experts] * (s.n_tiles / s.across);
}

/* One thread streams the block's weights, or its share of x to all blocks of the cluster. */
template <bool IS_PACKED>
static __device__ __forceinline__ void grouped_load(const struct grouped_maps &maps, const struct mixture &m,
                                                    const struct grouped_shape &s, const struct grouped_tables *t,
                                                    const struct ring &ring, bool is_weight)
{
    const uint32_t rank = cluster_rank(), mask = (1u << s.across) - 1;
    struct ring_place at = RING_FETCH;
    uint64_t policy = policy_keep();
    if (!is_weight)
        wait_for_input();
    for (uint32_t turn = cluster_first(); turn < grouped_turns(m, s, t); turn += cluster_step()) {
        struct grouped_place p = grouped_place_of(m, s, t, turn, rank);
        const uint32_t columns = grouped_columns(p, grouped_weights<IS_PACKED>::least_columns);
        for (uint32_t block = 0; block < s.n_blocks; block++, ring.next(at)) {
            const uint32_t barrier = ring.expect(at, is_weight ? grouped_weights<IS_PACKED>::bytes : columns * 128);
            const uint32_t target = ring.data_of(at);
            if (is_weight && s.is_product)
                copy_pairs(target, &maps.w, p.expert * s.expert_step + p.tile * (GROUPED_ROWS / 16), block, barrier, policy);
            else if (is_weight)
                copy_box(target, &maps.w, p.expert * s.expert_step + p.tile * (GROUPED_ROWS / (IS_PACKED ? 8 : 1)), block,
                         barrier, policy);
            else
                for (uint32_t c = rank * GROUPED_BOX; c < columns; c += s.across * GROUPED_BOX)
                    copy_box_to(mask, target + grouped_weights<IS_PACKED>::room + c * 128, &maps.x, p.first + c, block, barrier,
                                policy);
        }
    }
    /* Do not exit while another block of the cluster may still signal our barriers. */
    ring.drain(at);
}

/* The state of a thread that multiplies. */
struct grouped_worker {
    struct ring ring;
    struct ring_place at;
    uint32_t piece, empty; /* addresses; empty: of the block in which this lane releases stages, or 0 */
    uint32_t group;
};

/* The sums of 32 places from column c on, rounded, through the warp's piece of shared memory: its rows are places, of 16
 * results, or of 8 gates and 8 ups. */
template <class T, uint32_t N>
static __device__ __forceinline__ void grouped_turn_over(const float (&sum)[N], uint32_t c, uint32_t piece)
{
    const uint32_t lane = threadIdx.x % 32, corner = piece + (lane / 16 * 8 + lane % 8) * GROUPED_PITCH + lane / 8 % 2 * 16;
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
        const float *v = sum + c / 2 + i * 8;
        store_transposed(corner + i * 16 * GROUPED_PITCH, pack(v[0], v[1], T()), pack(v[2], v[3], T()), pack(v[4], v[5], T()),
                         pack(v[6], v[7], T()));
    }
    __syncwarp();
}

/* IS_PAIRED: a warp's rows of W are eight of an expert's first half and eight of its second, as in units.cuh. */
template <class T, bool IS_PAIRED = false, uint32_t N>
static __device__ __forceinline__ void grouped_store(float (&sum)[N], const struct grouped_shape &s, const struct output &out,
                                                     const expert_product &product, const struct grouped_place &p,
                                                     const struct grouped_worker &w)
{
    const uint32_t lane = threadIdx.x % 32, own = p.tile * GROUPED_ROWS + w.group * 64 + threadIdx.x % 128 / 32 * 16;
    const uint32_t n = s.is_product || IS_PAIRED ? own / 2 : own, second_n = IS_PAIRED ? n + out.n_out / 2 : n + 8;
    if (out.bias) {
        const float *bias = out.bias + ((size_t)p.expert * out.n_out << s.is_product);
        uint32_t low = n + lane / 4, high = s.is_product ? low : second_n + lane / 4;
        float first = low < out.n_out ? bias[low] : 0;
        float second = high < out.n_out ? bias[s.is_product ? high + out.n_out : high] : 0;
#pragma unroll
        for (uint32_t i = 0; i < N; i++)
            sum[i] += i % 4 < 2 ? first : second;
    }
#pragma unroll
    for (uint32_t c = 0; c < 2 * N; c += 32) {
        grouped_turn_over<T>(sum, c, w.piece);
        if (s.is_product) {
            uint32_t from = w.piece + lane * GROUPED_PITCH;
            uint4 value = multiply_eight<T>(load_shared(from), load_shared(from + 16), product);
            if (c + lane < p.n_rows && n < out.n_out)
                store_eight<T>(out, s.is_wide, p.first + c + lane, n, value);
        } else {
#pragma unroll
            for (uint32_t i = 0; i < 2; i++) {
                uint32_t row = i * 16 + lane / 2, at = lane % 2 ? second_n : n;
                if (c + row < p.n_rows && (IS_PAIRED ? n < out.n_out / 2 : at < out.n_out))
                    store_eight<T>(out, s.is_wide, p.first + c + row, at,
                                   load_shared(w.piece + row * GROUPED_PITCH + lane % 2 * 16));
            }
        }
        __syncwarp();
    }
}

/* The products of a stage, of weights in shared memory, or in registers as they are unpacked. */
template <class T, uint32_t N>
static __device__ __forceinline__ void grouped_multiply(float (&sum)[N], uint32_t weights, uint64_t b, uint32_t group)
{
    uint64_t a = wgmma_rows(weights + group * 64 * 128);
    wgmma_begin();
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
        wgmma(sum, a + 2 * i, b + 2 * i, T());
}

template <class T, uint32_t N>
static __device__ __forceinline__ void grouped_multiply(float (&sum)[N], const uint32_t (&a)[4][4], uint64_t b)
{
    wgmma_begin();
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
        wgmma(sum, a[i], b + 2 * i, T());
}

/* Called when the stage's products are issued. Waits for the products of the stage before and releases it. */
static __device__ __forceinline__ void grouped_move_on(struct grouped_worker &w, bool is_first, uint32_t *before)
{
    wgmma_commit();
    wgmma_wait<1>();
    if (!is_first && w.empty)
        barrier_arrive_in(w.empty + 8 * *before);
    *before = w.at.stage;
    w.ring.next(w.at);
}

/* One tile; N columns. */
template <class T, bool IS_PACKED, uint32_t N>
static __device__ __forceinline__ void grouped_tile(const struct grouped_shape &s, const struct output &out,
                                                    const expert_product &product, const struct grouped_place &p,
                                                    struct grouped_worker &w)
{
    float sum[N / 2];
#pragma unroll
    for (uint32_t i = 0; i < N / 2; i++)
        sum[i] = 0;
    uint32_t block = 0, before = 0;
    uint32_t even[4][4], odd[4][4]; /* registers of the stage that is under way, and of the next */
    auto step = [&](uint32_t (&a)[4][4]) {
        const uint32_t stage = w.ring.data_of(w.at);
        w.ring.wait_full(w.at);
        uint64_t b = wgmma_rows(stage + grouped_weights<IS_PACKED>::room);
        if constexpr (IS_PACKED) {
            packed_panel::load(stage + (w.group * 4 + threadIdx.x % 128 / 32) * packed_panel::bytes, a);
            grouped_multiply<T>(sum, a, b);
        } else {
            grouped_multiply<T>(sum, stage, b, w.group);
        }
        grouped_move_on(w, block == 0, &before);
        return ++block < s.n_blocks;
    };
    while (step(even) && step(odd))
        ;
    wgmma_wait<0>();
    if (w.empty)
        barrier_arrive_in(w.empty + 8 * before);
#pragma unroll
    for (uint32_t i = 0; i < N / 2; i++)
        asm volatile("" : "+f"(sum[i]));
    grouped_store<T>(sum, s, out, product, p, w);
}

/* With so many columns. */
template <class T, bool IS_PACKED, uint32_t N = grouped_weights<IS_PACKED>::least_columns>
static __device__ __forceinline__ void grouped_tile_of(uint32_t columns, const struct grouped_shape &s,
                                                       const struct output &out, const expert_product &product,
                                                       const struct grouped_place &p, struct grouped_worker &w)
{
    if constexpr (N < grouped_weights<IS_PACKED>::unit)
        if (columns > N)
            return grouped_tile_of<T, IS_PACKED, N + 32>(columns, s, out, product, p, w);
    grouped_tile<T, IS_PACKED, N>(s, out, product, p, w);
}

/* What a kernel does before its tiles: the ring, and the list of units. load(is weight) runs in the two threads that fetch.
 * Returns true in the threads that multiply. */
template <class LOAD>
static __device__ __forceinline__ bool grouped_begin(const struct mixture &m, const struct grouped_shape &s,
                                                     struct grouped_tables *t, const struct ring &ring, LOAD load)
{
    const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    ring.make_barriers(2, 8 * s.across);
    barriers_made();
    if (!s.is_behind)
        wait_for_input();
    if (threadIdx.x == 0)
        start_next();
    if (warp == 0)
        grouped_count(m, t, s.unit);
    __syncthreads();
    cluster_meet();
    /* Two warpgroups of 232 registers and the loading one fill the processor's. */
    if (warp >= 8) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (warp < 10 && threadIdx.x % 32 == 0)
            load(warp == 8);
        return false;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    wait_for_input();
    return true;
}

/* pieces: address of the warps' pieces. */
static __device__ __forceinline__ struct grouped_worker grouped_worker_at(const struct ring &ring, uint32_t pieces,
                                                                          uint32_t across)
{
    const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    struct grouped_worker w = {};
    w.ring = ring;
    w.piece = pieces + warp * GROUPED_PIECE_BYTES;
    w.empty = lane < across ? address_in(ring.empty, lane) : 0;
    w.group = warp / 4;
    return w;
}

template <class T, bool IS_PACKED>
static __global__ void __launch_bounds__(GROUPED_THREADS, 1)
experts_grouped(const __grid_constant__ struct grouped_maps maps, const __grid_constant__ struct mixture m,
                const __grid_constant__ struct grouped_shape s, const __grid_constant__ struct output out,
                const __grid_constant__ expert_product product)
{
    only_sm_90a();
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t tables_at = s.n_stages * s.stage_bytes + 8 * GROUPED_PIECE_BYTES, data = shared_address(shared);
    const uint32_t full = data + tables_at + (uint32_t)sizeof(struct grouped_tables);
    const struct ring ring = {data, full, full + 8 * s.n_stages, s.n_stages, s.stage_bytes};
    struct grouped_tables *t = (struct grouped_tables *)(shared + tables_at);
    const auto load = [&](bool is_weight) { grouped_load<IS_PACKED>(maps, m, s, t, ring, is_weight); };
    if (!grouped_begin(m, s, t, ring, load))
        return;
    struct grouped_worker w = grouped_worker_at(ring, data + s.n_stages * s.stage_bytes, s.across);
    for (uint32_t turn = cluster_first(); turn < grouped_turns(m, s, t); turn += cluster_step()) {
        const struct grouped_place p = grouped_place_of(m, s, t, turn, cluster_rank());
        grouped_tile_of<T, IS_PACKED>(grouped_columns(p, grouped_weights<IS_PACKED>::least_columns), s, out, product, p, w);
    }
}

/* ---- the host's side ----------------------------------------------------------------------------------------------------- */

/* Fills in the ring, for units of so many places. */
template <bool IS_PACKED> static inline void grouped_cut_memory(struct grouped_shape *s, uint32_t unit)
{
    const uint32_t fixed = 8 * GROUPED_PIECE_BYTES + (uint32_t)sizeof(struct grouped_tables);
    s->unit = unit;
    s->stage_bytes = grouped_weights<IS_PACKED>::room + unit * 128;
    s->n_stages = min((SHARED_BYTES - fixed) / (s->stage_bytes + 16), GROUPED_STAGES);
}

#endif
