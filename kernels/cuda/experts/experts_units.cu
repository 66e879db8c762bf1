/* experts_units.cu: experts whose weights lie in units (units.cuh), with bfloat16 activations. Tiles, units of places, their
 * walk and the store of results are those of experts_grouped.cuh; the sums are those of linear_units.cuh, so a row gets the
 * bits of its experts' linears. W is copied as it lies, and unpacked by the warps that multiply it. A stage is a slab of W and
 * x. Bound by the bytes of W for few rows an expert, else by unpacking: 8 experts of 3 x 768 x 2048 have 21 MB of int4_g128, 5
 * us at the 4.5 TB/s that an H200 reads. */
#include "../linear/unit_sums.cuh"
#include "experts_grouped.cuh"
#include "experts_linear.cuh"
#include "experts_units_plain.cuh"

#define UNITS_PANELS (GROUPED_ROWS / 16)
#define UNITS_PLACES 64u /* of a unit of places, at most; it is computed with so many columns or half of them */

struct experts_units {
    struct grouped_shape s; /* n_blocks are slabs */
    struct matrix_units w;
};

/* A block's shared memory: x of the stages, then W of the stages, the warps' pieces, tables, barriers. */
template <uint32_t DTYPE>
static __device__ __forceinline__ struct units_many_room units_place_of(uint32_t shared, uint32_t n_stages)
{
    const uint32_t x_bytes = UNITS_PLACES * UNIT_COLUMNS * 2, w_bytes = UNITS_PANELS * unit_bytes(DTYPE);
    struct units_many_room room;
    room.pieces = shared + n_stages * (x_bytes + w_bytes);
    const uint32_t full = room.pieces + 8 * GROUPED_PIECE_BYTES + (uint32_t)sizeof(struct grouped_tables);
    room.x = {shared, full, full + 8 * n_stages, n_stages, x_bytes};
    room.w = {shared + n_stages * x_bytes, full, full + 8 * n_stages, n_stages, w_bytes};
    return room;
}

static __device__ __forceinline__ uint32_t units_columns(const struct grouped_place &p)
{
    return p.n_rows <= UNITS_PLACES / 2 ? UNITS_PLACES / 2 : UNITS_PLACES;
}

/* One thread streams W, or x. */
template <uint32_t DTYPE>
static __device__ __forceinline__ void units_load(const CUtensorMap *map, const struct mixture &m,
                                                  const struct experts_units &f, const struct grouped_tables *t,
                                                  const struct units_many_room &room, bool is_weight)
{
    struct ring_place at = RING_FETCH;
    const uint64_t policy = policy_keep();
    const uint32_t panels_each = f.w.rows_each / 16;
    map_prefetch(map);
    if (!is_weight)
        wait_for_input();
    for (uint32_t turn = blockIdx.x; turn < grouped_turns(m, f.s, t); turn += gridDim.x) {
        const struct grouped_place p = grouped_place_of(m, f.s, t, turn, 0);
        const uint32_t columns = units_columns(p);
        for (uint32_t slab = 0; slab < f.s.n_blocks; slab++, room.w.next(at)) {
            const uint32_t full = room.w.expect(at, is_weight ? room.w.stage_bytes : columns * UNIT_COLUMNS * 2);
            if (is_weight) {
                for (uint32_t i = 0; i < UNITS_PANELS; i++) {
                    const uint32_t own = min(p.tile * UNITS_PANELS + i, panels_each - 1), panel = p.expert * panels_each + own;
                    copy_bytes(room.w.data_of(at) + i * unit_bytes(DTYPE),
                               f.w.data + ((size_t)panel * f.w.n_slabs + slab) * unit_bytes(DTYPE), unit_bytes(DTYPE), full,
                               policy);
                }
                continue;
            }
            for (uint32_t block = 0; block < 2; block++)
                for (uint32_t c = 0; c < columns; c += GROUPED_BOX)
                    copy_box(room.x.data_of(at) + (block * columns + c) * 128, map, p.first + c, slab * 2 + block, full);
        }
    }
}

/* One tile; N columns. */
template <uint32_t DTYPE, uint32_t N>
static __device__ __forceinline__ void units_tile(const struct units_many_room &room, const struct experts_units &f,
                                                  const struct output &out, const expert_product &product,
                                                  const struct grouped_place &p, struct grouped_worker &w)
{
    typedef units_many_worker<DTYPE, 2, N> worker_of;
    worker_of worker = {room, 0, {}, {}};
    float sum[N / 2] = {}, part[N / 2] = {}, total[worker_of::n_totals] = {};
    worker.sum_tile(sum, part, total, w.at, f.s.n_blocks);
    grouped_store<__nv_bfloat16, true>(sum, f.s, out, product, p, w);
}

template <uint32_t DTYPE>
static __global__ void __launch_bounds__(GROUPED_THREADS, 1)
experts_units(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ struct mixture m,
              const __grid_constant__ struct experts_units f, const __grid_constant__ struct output out,
              const __grid_constant__ expert_product product)
{
    only_sm_90a();
    extern __shared__ __align__(1024) uint8_t shared[];
    const struct units_many_room room = units_place_of<DTYPE>(shared_address(shared), f.s.n_stages);
    struct grouped_tables *t =
        (struct grouped_tables *)(shared + (room.pieces - shared_address(shared)) + 8 * GROUPED_PIECE_BYTES);
    const auto load = [&](bool is_weight) { units_load<DTYPE>(&x_map, m, f, t, room, is_weight); };
    if (!grouped_begin(m, f.s, t, room.w, load))
        return;
    struct grouped_worker w = grouped_worker_at(room.w, room.pieces, 1);
    for (uint32_t turn = blockIdx.x; turn < grouped_turns(m, f.s, t); turn += gridDim.x) {
        const struct grouped_place p = grouped_place_of(m, f.s, t, turn, 0);
        if (units_columns(p) == UNITS_PLACES)
            units_tile<DTYPE, UNITS_PLACES>(room, f, out, product, p, w);
        else
            units_tile<DTYPE, UNITS_PLACES / 2>(room, f, out, product, p, w);
    }
}

/* ---- the host's side ----------------------------------------------------------------------------------------------------- */

cudaError_t experts_units_open(void)
{
    cudaError_t code = cudaSuccess;
    for (uint32_t row = 0; row < N_UNIT_TYPES; row++)
        visit_unit_type(unit_type_at(row).dtype, [&](auto type) { code = code ? code : allow_shared(experts_units<type()>); });
    return code;
}

enum rc run_units(const struct running_mixture *run, const struct expert_linear *linear, struct err *err)
{
    const uint32_t dtype = linear->w->parts[0].dtype, fixed = 8 * GROUPED_PIECE_BYTES + (uint32_t)sizeof(struct grouped_tables);
    struct experts_units f = {};
    struct tensor_map x;
    f.w = units_of(linear->w);
    f.s.n_blocks = f.w.n_slabs;
    f.s.n_tiles = ceil_div(linear->rows_each, GROUPED_ROWS);
    f.s.across = 1;
    f.s.is_product = linear->is_product;
    f.s.is_wide = map_fits(linear->y.data, (size_t)linear->y.stride * 2) && linear->y.width % 8 == 0;
    f.s.is_behind = linear->is_behind;
    f.s.unit = UNITS_PLACES;
    f.s.stage_bytes = UNITS_PLACES * UNIT_COLUMNS * 2 + UNITS_PANELS * unit_bytes(dtype);
    f.s.n_stages = min((SHARED_BYTES - fixed) / (f.s.stage_bytes + 16), GROUPED_STAGES);
    enum rc rc = map_rows(run, linear, run->m.n_routes, GROUPED_BOX, 1, &x, err);
    if (rc)
        return rc;
    const uint32_t n_units = run->m.n_routes / f.s.unit + min(run->m.n_experts, run->m.n_routes);
    visit_unit_type(dtype, [&](auto type) {
        launch(run->cuda, experts_units<type()>, min(n_units * f.s.n_tiles, run->cuda->n_processors), GROUPED_THREADS,
               SHARED_BYTES, map_of(&x), run->m, f, output_of(linear), run->product);
    });
    return RC_OK;
}
