/* linear_sync_units_many.cuh: the linears of linear_units.cuh for many rows of x, with mma.sync and cp.async alone. A block of
 * four warps has 4 * PANELS panels of W by 8 * EIGHTS rows of x: each warp unpacks PANELS panels of its own and multiplies them
 * by all rows. A stage is a slab of both. */
#ifndef LLMPY_CUDA_LINEAR_SYNC_UNITS_MANY_CUH
#define LLMPY_CUDA_LINEAR_SYNC_UNITS_MANY_CUH

#include "linear_sync_many.cuh"
#include "linear_sync_units.cuh"

/* Panels of a warp: of small groups, a warp has the sums of a group, a slab and a tile. */
static constexpr __host__ __device__ uint32_t sync_panels(uint32_t dtype)
{
    return unit_groups(dtype) == 1 ? 2 : 1;
}

static constexpr __host__ __device__ uint32_t sync_slab_bytes(uint32_t dtype, uint32_t eights)
{
    return 4 * sync_panels(dtype) * unit_bytes(dtype) + eights * 8 * 256;
}

template <uint32_t DTYPE, uint32_t EIGHTS>
static __global__ void __launch_bounds__(SYNC_MANY_THREADS, 2)
linear_sync_units_many(const __grid_constant__ struct sync_units f, const struct sync_tiles tiles,
                       const __grid_constant__ struct output out)
{
    typedef unit_reader<DTYPE> reader;
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, groups = unit_groups(DTYPE), panels = sync_panels(DTYPE);
    const uint32_t data = shared_address(shared), stage_bytes = sync_slab_bytes(DTYPE, EIGHTS), x_rows = 8 * EIGHTS;
    const uint2 tile = sync_tile_of<8 * EIGHTS>(tiles, blockIdx.x);
    const uint32_t x_first = tile.x * x_rows, panel = tile.y * 4 * panels + warp * panels;
    start_next();
    wait_for_input();
    auto start = [&](uint32_t slot, uint32_t slab) {
        const uint32_t x = data + slot * stage_bytes, units = x + x_rows * 256 + warp * panels * unit_bytes(DTYPE);
        if (slab < f.w.n_slabs) {
#pragma unroll
            for (uint32_t i = 0; i < EIGHTS; i++) { /* rows of 256 bytes, eight at a time */
                const uint32_t row = i * 8 + threadIdx.x / 16, c = threadIdx.x % 16, k = slab * 128 + c * 8;
                const char *from = f.x + min(x_first + row, out.n_rows - 1) * f.x_row_bytes;
                copy_16_if(sync_chunk(x + c / 8 * x_rows * 128, row, c % 8), from + (k < f.n_cols ? k * 2 : 0), k < f.n_cols);
            }
#pragma unroll
            for (uint32_t i = 0; i < panels; i++) {
                const uint8_t *from = f.w.data +
                                      ((size_t)min(panel + i, f.w.n_panels() - 1) * f.w.n_slabs + slab) * unit_bytes(DTYPE);
                for (uint32_t j = lane; j < unit_bytes(DTYPE) / 16; j += 32)
                    copy_16(units + i * unit_bytes(DTYPE) + j * 16, from + j * 16);
            }
        }
        copies_close();
    };
    for (uint32_t i = 0; i + 1 < SYNC_MANY_STAGES; i++)
        start(i, i);
    float sum[panels][EIGHTS][4] = {};
    uint32_t slot = 0, ahead = SYNC_MANY_STAGES - 1, ones[4];
    units_ones(ones);
    for (uint32_t slab = 0; slab < f.w.n_slabs; slab++) {
        copies_wait<SYNC_MANY_STAGES - 2>();
        __syncthreads();
        start(ahead, slab + SYNC_MANY_STAGES - 1);
        const uint32_t x = data + slot * stage_bytes, units = x + x_rows * 256 + warp * panels * unit_bytes(DTYPE);
        reader w[panels];
        float p[panels][EIGHTS][4] = {}, total[EIGHTS][4] = {}, v[panels][EIGHTS][4] = {};
#pragma unroll
        for (uint32_t i = 0; i < panels; i++)
            w[i].begin(units + i * unit_bytes(DTYPE));
#pragma unroll
        for (uint32_t step = 0; step < 8; step++) {
            uint32_t b[EIGHTS / 2][4];
#pragma unroll
            for (uint32_t e = 0; e < EIGHTS / 2; e++)
                load_matrices(b[e], sync_chunk(x + step / 4 * x_rows * 128, e * 16 + lane / 16 * 8 + lane % 8,
                                               step % 4 * 2 + lane / 8 % 2));
#pragma unroll
            for (uint32_t i = 0; i < panels; i++) {
                const uint32_t unit = units + i * unit_bytes(DTYPE);
                uint32_t a[4];
                if (step % 4 == 0)
                    w[i].load(unit, step / 4);
                if (step * groups % 8 == 0)
                    w[i].enter(unit, step * groups / 8);
                w[i].unpack(step % 4, a);
#pragma unroll
                for (uint32_t e = 0; e < EIGHTS; e++) {
                    const uint32_t both[2] = {b[e / 2][e % 2 * 2], b[e / 2][e % 2 * 2 + 1]};
                    mma(p[i][e], a, both, __nv_bfloat16());
                    if (reader::has_minima)
                        mma(total[e], ones, both, __nv_bfloat16());
                }
                if ((step + 1) * groups % 8)
                    continue;
                const float low = w[i].scale(false), high = w[i].scale(true);
#pragma unroll
                for (uint32_t e = 0; e < EIGHTS; e++) {
                    units_add(groups == 1 ? sum[i][e] : v[i][e], p[i][e], low, high);
                    if (reader::has_minima)
                        units_add(v[i][e], total[e], -w[i].minimum(false), -w[i].minimum(true));
#pragma unroll
                    for (uint32_t q = 0; q < 4; q++)
                        p[i][e][q] = total[e][q] = 0;
                }
            }
        }
        if (groups > 1)
#pragma unroll
            for (uint32_t i = 0; i < panels * EIGHTS * 4; i++)
                sum[i / (EIGHTS * 4)][i / 4 % EIGHTS][i % 4] += v[i / (EIGHTS * 4)][i / 4 % EIGHTS][i % 4];
        slot = slot + 1 == SYNC_MANY_STAGES ? 0 : slot + 1;
        ahead = ahead + 1 == SYNC_MANY_STAGES ? 0 : ahead + 1;
    }
    sync_store_panels(f, out, x_first, panel, sum);
}

/* ---- the host's side ----------------------------------------------------------------------------------------------------- */

typedef void (*sync_units_many_kernel)(struct sync_units, struct sync_tiles, struct output);

/* Eights of rows of x in a tile. */
static inline uint32_t sync_units_eights(uint32_t n_rows)
{
    return n_rows <= 32 ? 4 : 8;
}

static inline sync_units_many_kernel sync_units_many_of(uint32_t dtype, uint32_t eights)
{
    sync_units_many_kernel kernel = NULL;
    visit_unit_type(dtype, [&](auto type) {
        kernel = eights == 4 ? linear_sync_units_many<type(), 4> : linear_sync_units_many<type(), 8>;
    });
    return kernel;
}

static inline uint32_t sync_units_many_bytes(uint32_t dtype, uint32_t eights)
{
    return SYNC_MANY_STAGES * sync_slab_bytes(unit_type_of(dtype).as, eights);
}

static cudaError_t sync_units_many_open(void)
{
    cudaError_t code = cudaSuccess;
    for (uint32_t i = 0; i < 2 * N_UNIT_TYPES && code == cudaSuccess; i++) {
        const uint32_t dtype = unit_type_at(i / 2).dtype, eights = i % 2 ? 8 : 4;
        code = allow_shared(sync_units_many_of(dtype, eights), sync_units_many_bytes(dtype, eights));
    }
    return code;
}

static void sync_units_many_multiply(const struct cuda *cuda, const struct matrix *matrix, const struct view *x,
                                     bool is_product, const struct output &out)
{
    const uint32_t dtype = matrix->parts[0].dtype, eights = sync_units_eights(out.n_rows);
    const struct sync_units f = sync_units_args(matrix, x, is_product);
    const struct sync_tiles tiles = {ceil_div(out.n_rows, 8 * eights),
                                     ceil_div(f.w.n_panels(), 4 * sync_panels(unit_type_of(dtype).as))};
    launch(cuda, sync_units_many_of(dtype, eights), dim3(tiles.n_down * tiles.n_across), SYNC_MANY_THREADS,
           sync_units_many_bytes(dtype, eights), f, tiles, out);
}

#endif
