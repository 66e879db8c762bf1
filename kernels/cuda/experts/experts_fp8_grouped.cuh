/* experts_fp8_grouped.cuh: experts_grouped.cuh for FP8 and INT8: experts that have many rows each. Tiles, units, clusters,
 * their walk and the store of results are the same; a stage is a slab of W and of x with the scales of their rows. A warpgroup
 * has two slabs under way and folds one while the tensor cores make the other. The two warpgroups issue their products in
 * turn, so that they do not fold at the same time. Bound by the tensor cores, 2 n_routes n_out n_cols / 1200e6 us on an H200;
 * below some 150 rows an expert by the bytes of W. */
#ifndef LLMPY_CUDA_EXPERTS_FP8_GROUPED_CUH
#define LLMPY_CUDA_EXPERTS_FP8_GROUPED_CUH

#include "experts_fp8.cuh"
#include "experts_grouped.cuh"

#define FP8_GROUPED_UNIT 128u /* places, at most: two slabs under way leave no more to the sums */
#define FP8_GROUPED_LEAST 32u /* columns that a unit is computed with, at least; others twice and four times as many */
#define FP8_GROUPED_W_BYTES (GROUPED_ROWS * FP8_SLAB)
#define FP8_ROW_SCALES (FP8_CHUNK * 4u) /* bytes of a row's scales in a stage */

/* s.n_blocks are slabs. */
struct fp8_grouped_shape {
    struct grouped_shape s;
    uint32_t n_chunks; /* as in struct fp8_streamed_shape */
};

/* A block's shared memory: the stages, and the scales of the stages; of W and behind them of x. */
struct fp8_grouped_room {
    struct ring ring;
    uint32_t scales, scales_bytes;
};

static __host__ __device__ constexpr uint32_t fp8_grouped_scales(uint32_t unit)
{
    return (GROUPED_ROWS + unit) * FP8_ROW_SCALES;
}

/* Columns that a unit is computed with, as the kernel is made for. */
static __device__ __forceinline__ uint32_t fp8_grouped_columns(const struct grouped_place &p)
{
    return p.n_rows <= FP8_GROUPED_LEAST       ? FP8_GROUPED_LEAST
           : p.n_rows <= 2 * FP8_GROUPED_LEAST ? 2 * FP8_GROUPED_LEAST
                                               : 4 * FP8_GROUPED_LEAST;
}

/* One thread streams the block's weights, or its share of x to all blocks of the cluster. */
static __device__ __forceinline__ void fp8_grouped_load(const struct fp8_expert_maps &maps, const struct mixture &m,
                                                        const struct fp8_grouped_shape &f, const struct grouped_tables *t,
                                                        const struct fp8_grouped_room &room, bool is_weight)
{
    const struct grouped_shape &s = f.s;
    const struct ring &ring = room.ring;
    const uint32_t rank = cluster_rank(), mask = (1u << s.across) - 1;
    struct ring_place at = RING_FETCH;
    const uint64_t policy = policy_keep();
    if (!is_weight)
        wait_for_input();
    for (uint32_t turn = cluster_first(); turn < grouped_turns(m, s, t); turn += cluster_step()) {
        const struct grouped_place p = grouped_place_of(m, s, t, turn, rank);
        const uint32_t columns = fp8_grouped_columns(p), from = p.expert * s.expert_step;
        const uint32_t n_bytes = (is_weight ? GROUPED_ROWS : columns) * (FP8_SLAB + FP8_ROW_SCALES);
        for (uint32_t slab = 0; slab < s.n_blocks; slab++, ring.next(at)) {
            const uint32_t barrier = ring.expect(at, n_bytes), target = ring.data_of(at);
            const uint32_t scales = room.scales + at.stage * room.scales_bytes, chunk = f.n_chunks - 1 - slab / FP8_CHUNK;
            if (is_weight && s.is_product) {
                copy_pairs(target, &maps.w, from + p.tile * (GROUPED_ROWS / 16), slab, barrier, policy);
                copy_pairs(scales, &maps.w_scales, from + p.tile * (GROUPED_ROWS / 16), chunk, barrier, policy);
            } else if (is_weight) {
                copy_box(target, &maps.w, from + p.tile * GROUPED_ROWS, slab, barrier, policy);
                copy_box(scales, &maps.w_scales, from + p.tile * GROUPED_ROWS, chunk, barrier, policy);
            } else {
                for (uint32_t c = rank * GROUPED_BOX; c < columns; c += s.across * GROUPED_BOX) {
                    copy_box_to(mask, target + FP8_GROUPED_W_BYTES + c * FP8_SLAB, &maps.x, p.first + c, slab, barrier, policy);
                    copy_box_to(mask, scales + (GROUPED_ROWS + c) * FP8_ROW_SCALES, &maps.x_scales, p.first + c,
                                slab / FP8_CHUNK, barrier, policy);
                }
            }
        }
    }
    /* Do not exit while another block of the cluster may still signal our barriers. */
    ring.drain(at);
}

/* One warpgroup's side of the ring and of the turns; w.ring is room.ring. */
template <class TYPE> struct fp8_grouped_worker {
    typedef typename TYPE::sum part; /* of a slab */
    const struct fp8_grouped_room &room;
    struct grouped_worker &w;

    /* Starts the products of a slab. */
    template <uint32_t N> __device__ __forceinline__ void multiply(part (&p)[N], const struct ring_place &at) const
    {
        room.ring.wait_full(at);
        const uint32_t stage = room.ring.data_of(at);
        const uint64_t a = wgmma_rows(stage + w.group * 64 * FP8_SLAB), b = wgmma_rows(stage + FP8_GROUPED_W_BYTES);
        wgmma_begin();
        wgmma_fp8_slab(p, a, b);
        wgmma_commit();
    }
    /* Adds a finished slab and gives its stage back. */
    template <uint32_t N>
    __device__ __forceinline__ void fold(float (&sum)[N], part (&p)[N], const struct ring_place &at, uint32_t slab) const
    {
        const uint32_t scales = room.scales + at.stage * room.scales_bytes, row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
        const uint32_t w_at = scales + row * FP8_ROW_SCALES + (FP8_CHUNK - 1 - slab % FP8_CHUNK) * 4;
        const uint32_t x_at = scales + (GROUPED_ROWS + threadIdx.x % 4 * 2) * FP8_ROW_SCALES + slab % FP8_CHUNK * 4;
        const float low = load_float(w_at), high = load_float(w_at + 8 * FP8_ROW_SCALES);
        wgmma_made(p);
#pragma unroll
        for (uint32_t i = 0; i < N; i += 4) {
            const float even = load_float(x_at + i * 2 * FP8_ROW_SCALES), odd = load_float(x_at + (i * 2 + 1) * FP8_ROW_SCALES);
            sum[i] = fmaf((float)p[i], even * low, sum[i]);
            sum[i + 1] = fmaf((float)p[i + 1], odd * low, sum[i + 1]);
            sum[i + 2] = fmaf((float)p[i + 2], even * high, sum[i + 2]);
            sum[i + 3] = fmaf((float)p[i + 3], odd * high, sum[i + 3]);
        }
        __syncwarp();
        if (w.empty)
            barrier_arrive_in(w.empty + 8 * at.stage);
    }
    /* Between the products of one warpgroup and those of the other. */
    __device__ __forceinline__ void take(void) const { meet(2 + w.group, 256); }
    __device__ __forceinline__ void pass(void) const { reach(3 - w.group, 256); }

    template <uint32_t N>
    __device__ __forceinline__ void sum_tile(float (&sum)[N], part (&p)[N], part (&q)[N], uint32_t n_slabs) const
    {
        typedef part sums[N];
        fp8_sum_stages<1>(
            p, q, room.ring, w.at, n_slabs, [&](sums &made, const struct ring_place &at, uint32_t) { multiply(made, at); },
            [&](sums &made, const struct ring_place &at, uint32_t slab) { fold(sum, made, at, slab); }, *this);
    }
};

/* One tile; N columns. */
template <class T, uint32_t N, class TYPE>
static __device__ __forceinline__ void fp8_grouped_tile(const struct fp8_grouped_worker<TYPE> &worker,
                                                        const struct grouped_shape &s, const struct output &out,
                                                        const expert_product &product, const struct grouped_place &place)
{
    float sum[N / 2] = {};
    typename TYPE::sum p[N / 2] = {}, q[N / 2] = {};
    worker.sum_tile(sum, p, q, s.n_blocks);
    grouped_store<T>(sum, s, out, product, place, worker.w);
}

template <class T, class TYPE>
static __global__ void __launch_bounds__(GROUPED_THREADS, 1)
experts_fp8_grouped(const __grid_constant__ struct fp8_expert_maps maps, const __grid_constant__ struct mixture m,
                    const __grid_constant__ struct fp8_grouped_shape f, const __grid_constant__ struct output out,
                    const __grid_constant__ expert_product product)
{
    only_sm_90a();
    extern __shared__ __align__(1024) uint8_t shared[];
    const struct grouped_shape &s = f.s;
    const uint32_t data = shared_address(shared), scales_at = s.n_stages * s.stage_bytes;
    const uint32_t pieces_at = scales_at + s.n_stages * fp8_grouped_scales(s.unit);
    const uint32_t tables_at = pieces_at + 8 * GROUPED_PIECE_BYTES;
    const uint32_t full = data + tables_at + (uint32_t)sizeof(struct grouped_tables);
    const struct fp8_grouped_room room = {
        {data, full, full + 8 * s.n_stages, s.n_stages, s.stage_bytes}, data + scales_at, fp8_grouped_scales(s.unit)};
    struct grouped_tables *t = (struct grouped_tables *)(shared + tables_at);
    const auto load = [&](bool is_weight) { fp8_grouped_load(maps, m, f, t, room, is_weight); };
    if (!grouped_begin(m, s, t, room.ring, load))
        return;
    struct grouped_worker w = grouped_worker_at(room.ring, data + pieces_at, s.across);
    const struct fp8_grouped_worker<TYPE> worker = {
        room, w
    };
    if (w.group == 1)
        worker.pass();
    for (uint32_t turn = cluster_first(); turn < grouped_turns(m, s, t); turn += cluster_step()) {
        const struct grouped_place p = grouped_place_of(m, s, t, turn, cluster_rank());
        switch (fp8_grouped_columns(p)) {
        case FP8_GROUPED_LEAST:
            fp8_grouped_tile<T, FP8_GROUPED_LEAST>(worker, s, out, product, p);
            break;
        case 2 * FP8_GROUPED_LEAST:
            fp8_grouped_tile<T, 2 * FP8_GROUPED_LEAST>(worker, s, out, product, p);
            break;
        default:
            fp8_grouped_tile<T, 4 * FP8_GROUPED_LEAST>(worker, s, out, product, p);
        }
    }
}

/* ---- the host's side ----------------------------------------------------------------------------------------------------- */

/* Fills in the ring, for units of so many places. */
static inline void fp8_grouped_cut_memory(struct grouped_shape *s, uint32_t unit)
{
    const uint32_t fixed = 8 * GROUPED_PIECE_BYTES + (uint32_t)sizeof(struct grouped_tables);
    s->unit = unit;
    s->stage_bytes = FP8_GROUPED_W_BYTES + unit * FP8_SLAB;
    s->n_stages = min((SHARED_BYTES - fixed) / (s->stage_bytes + fp8_grouped_scales(unit) + 16), GROUPED_STAGES);
}

static enum rc run_fp8_grouped(const struct running_mixture *run, const struct expert_linear *linear, struct err *err)
{
    struct cuda *cuda = run->cuda;
    struct fp8_grouped_shape f = {};
    struct grouped_shape *s = &f.s;
    s->n_blocks = fp8_slabs(linear->w->n_cols);
    s->n_tiles = ceil_div(linear->rows_each, GROUPED_ROWS);
    s->across = s->n_tiles % 2 == 0 && cuda->experts->n_pairs ? 2 : 1;
    s->expert_step = expert_step(linear);
    s->is_product = linear->is_product;
    s->is_wide = map_fits(linear->y.data, (size_t)linear->y.stride * 2) && linear->y.width % 8 == 0;
    s->is_behind = true;
    f.n_chunks = linear->w->parts[0].lead_bytes / (FP8_CHUNK * 4);
    fp8_grouped_cut_memory(s, FP8_GROUPED_UNIT);
    struct fp8_expert_maps maps;
    enum rc rc = round_and_map(run, linear, GROUPED_ROWS, GROUPED_BOX, 1, &maps, err);
    if (rc)
        return rc;
    const uint32_t n_units = run->m.n_routes / s->unit + min(run->m.n_experts, run->m.n_routes);
    const uint32_t n_clusters =
        min(n_units * (s->n_tiles / s->across), s->across == 2 ? cuda->experts->n_pairs : cuda->n_processors);
    visit_both(cuda, linear->w, [&](auto value, auto number) {
        launch_clusters(cuda, experts_fp8_grouped<decltype(value), decltype(number)>, dim3(n_clusters * s->across), s->across,
                        GROUPED_THREADS, SHARED_BYTES, maps, run->m, f, output_of(linear), run->product);
    });
    return RC_OK;
}

#endif
