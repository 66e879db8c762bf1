/* linear_units_many.cuh: the linears of linear_units.cuh for many rows of x. W is the operand of 64 rows, which a warpgroup
 * unpacks into registers, x that of WIDTH columns in shared memory. A block of GROUPS warpgroups owns tiles of 64 GROUPS rows
 * of W by WIDTH rows of x; a stage is a slab of both. While the tensor cores multiply some steps, a warpgroup unpacks the next
 * ones.
 *
 * Bound on an H200 by the tensor cores and the sums that are added every group: some 680 TFLOP/s with groups of 128, 410 with
 * groups of 32. */
#ifndef LLMPY_CUDA_LINEAR_UNITS_MANY_CUH
#define LLMPY_CUDA_LINEAR_UNITS_MANY_CUH

#include "../core/tensor_map.cuh"
#include "linear_units.cuh"
#include "tile_store.cuh"
#include "unit_sums.cuh"

#include <math.h>

#define UNITS_PITCH 48u       /* bytes of 16 results of a row of x in a warp's piece */
#define UNITS_BAND_ROWS 2048u /* of x that blocks walk before they go on to the next rows of W */

struct units_many {
    struct matrix_units w;
    uint32_t n_down, n_across, n_tiles; /* tiles of x, of W, and both */
    bool is_product, is_wide;           /* is_wide: y and what is added lie on multiples of 16 bytes, in eights of columns */
};

static constexpr __host__ __device__ uint32_t units_many_stage_bytes(uint32_t dtype, uint32_t groups, uint32_t width)
{
    return width * UNIT_COLUMNS * 2 + groups * 4 * unit_bytes(dtype);
}

static constexpr __host__ __device__ uint32_t units_many_pieces(uint32_t groups)
{
    return groups * 4 * 32 * UNITS_PITCH;
}

static constexpr __host__ __device__ uint32_t units_many_stages(uint32_t dtype, uint32_t groups, uint32_t width)
{
    return (SHARED_BYTES - units_many_pieces(groups)) / (units_many_stage_bytes(dtype, groups, width) + 16);
}

/* The tile of x and of W that a block has in its turn: bands of x, each walked along W. */
struct units_place {
    uint32_t x_row, panel;
};
template <uint32_t GROUPS, uint32_t WIDTH>
static __device__ __forceinline__ struct units_place units_place_of(const struct units_many &f, uint32_t turn)
{
    const uint32_t band = UNITS_BAND_ROWS / WIDTH, per_band = band * f.n_across, top = turn / per_band * band;
    const uint32_t rest = turn % per_band, height = min(band, f.n_down - top);
    return {(top + rest % height) * WIDTH, rest / height * 4 * GROUPS};
}

template <uint32_t DTYPE, uint32_t GROUPS, uint32_t WIDTH>
static __device__ __forceinline__ struct units_many_room units_many_place(uint32_t shared)
{
    const uint32_t n = units_many_stages(DTYPE, GROUPS, WIDTH), x_bytes = WIDTH * UNIT_COLUMNS * 2;
    const uint32_t w_bytes = GROUPS * 4 * unit_bytes(DTYPE);
    struct units_many_room room;
    room.pieces = shared + n * (x_bytes + w_bytes);
    const uint32_t full = room.pieces + units_many_pieces(GROUPS);
    room.x = {shared, full, full + 8 * n, n, x_bytes};
    room.w = {shared + n * x_bytes, full, full + 8 * n, n, w_bytes};
    return room;
}

/* One thread streams W, or x. */
template <uint32_t DTYPE, uint32_t GROUPS, uint32_t WIDTH>
static __device__ __forceinline__ void units_many_load(const CUtensorMap *map, const struct units_many &f,
                                                       const struct units_many_room &room, bool is_weight)
{
    struct ring_place at = RING_FETCH;
    map_prefetch(map);
    if (!is_weight)
        wait_for_input();
    for (uint32_t turn = blockIdx.x; turn < f.n_tiles; turn += gridDim.x) {
        const struct units_place place = units_place_of<GROUPS, WIDTH>(f, turn);
        for (uint32_t slab = 0; slab < f.w.n_slabs; slab++, room.w.next(at)) {
            const uint32_t full = room.w.expect(at, is_weight ? room.w.stage_bytes : room.x.stage_bytes);
            if (!is_weight)
                copy_box(room.x.data_of(at), map, place.x_row, slab * 2, full);
            else
                for (uint32_t i = 0; i < 4 * GROUPS; i++)
                    copy_bytes(room.w.data_of(at) + i * unit_bytes(DTYPE),
                               f.w.data +
                                   ((size_t)min(place.panel + i, f.w.n_panels() - 1) * f.w.n_slabs + slab) * unit_bytes(DTYPE),
                               unit_bytes(DTYPE), full);
        }
    }
}

/* Adds the biases of the warp's rows of W. */
template <uint32_t N>
static __device__ __forceinline__ void units_add_bias(float (&sum)[N], const struct output &out, const struct units_many &f,
                                                      uint32_t panel)
{
    const uint32_t r = threadIdx.x % 32 / 4, low = f.w.row_of(panel, r), high = f.w.row_of(panel, r + 8);
    const float biases[2] = {low < f.w.n_rows ? out.bias[low] : 0, high < f.w.n_rows ? out.bias[high] : 0};
#pragma unroll
    for (uint32_t i = 0; i < N; i++)
        sum[i] += biases[i / 2 % 2];
}

/* Adds what adapters add to the warp's rows of W, for rows of x from x_row on. */
template <uint32_t N>
static __device__ __forceinline__ void units_add_delta(float (&sum)[N], const struct output &out, const struct units_many &f,
                                                       uint32_t x_row, uint32_t panel)
{
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t columns[2] = {f.w.row_of(panel, lane / 4), f.w.row_of(panel, lane / 4 + 8)};
#pragma unroll
    for (uint32_t i = 0; i < N; i++) {
        const uint32_t row = x_row + i / 4 * 8 + lane % 4 * 2 + i % 2, n = columns[i / 2 % 2];
        if (row < out.n_rows && n < f.w.n_rows)
            sum[i] += out.delta[(size_t)row * out.delta_stride + n];
    }
}

template <uint32_t N>
static __device__ __forceinline__ void units_store_floats(const float (&sum)[N], const struct output &out,
                                                          const struct units_many &f, uint32_t x_row, uint32_t panel)
{
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (uint32_t i = 0; i < N; i++) {
        const uint32_t row = x_row + i / 4 * 8 + lane % 4 * 2 + i % 2, n = f.w.row_of(panel, lane / 4 + i / 2 % 2 * 8);
        if (row < out.n_rows && n < out.n_out)
            ((float *)out.y)[(size_t)row * out.y_stride + n] = sum[i];
    }
}

/* Rounds the sums of a panel and stores them through the warp's piece: of a row of x two times eight results, or their
 * products. */
template <uint32_t N>
static __device__ __forceinline__ void units_store_lines(const float (&sum)[N], const struct output &out,
                                                         const struct units_many &f, uint32_t x_row, uint32_t panel,
                                                         uint32_t piece)
{
    typedef __nv_bfloat16 T;
    const uint32_t lane = threadIdx.x % 32, corner = piece + (lane / 16 * 8 + lane % 8) * UNITS_PITCH + lane / 8 % 2 * 16;
    const uint32_t first = f.w.row_of(panel, 0), second = f.w.row_of(panel, 8), from = piece + lane * UNITS_PITCH;
#pragma unroll
    for (uint32_t c = 0; c < 2 * N; c += 32) {
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            const float *v = sum + c / 2 + i * 8;
            store_transposed(corner + i * 16 * UNITS_PITCH, pack(v[0], v[1], T()), pack(v[2], v[3], T()), pack(v[4], v[5], T()),
                             pack(v[6], v[7], T()));
        }
        __syncwarp();
        const uint32_t row = x_row + c + lane;
        const uint4 low = load_shared(from), high = load_shared(from + 16);
        if (row < out.n_rows && f.is_product) {
            store_eight<T>(out, f.is_wide, row, first, multiply_eight<T>(low, high, act_product{out.act}));
        } else if (row < out.n_rows) {
            store_eight<T>(out, f.is_wide, row, first, low);
            if (second < out.n_out)
                store_eight<T>(out, f.is_wide, row, second, high);
        }
        __syncwarp();
    }
}

template <uint32_t DTYPE, uint32_t GROUPS, uint32_t WIDTH>
static __device__ __forceinline__ void units_many_consume(const struct units_many &f, const struct output &out,
                                                          const struct units_many_room &room)
{
    const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    typedef units_many_worker<DTYPE, GROUPS, WIDTH> worker_of;
    worker_of worker = {room, 0, {}, {}};
    struct ring_place at = RING_READ;
    float p[WIDTH / 2] = {}, total[worker_of::n_totals] = {};
    wait_for_input();
    for (uint32_t turn = blockIdx.x; turn < f.n_tiles; turn += gridDim.x) {
        const struct units_place place = units_place_of<GROUPS, WIDTH>(f, turn);
        const uint32_t panel = place.panel + warp;
        float sum[WIDTH / 2] = {};
        worker.sum_tile(sum, p, total, at, f.w.n_slabs);
        if (panel >= f.w.n_panels())
            continue;
        if (out.bias)
            units_add_bias(sum, out, f, panel);
        if (out.delta)
            units_add_delta(sum, out, f, place.x_row, panel);
        if (out.is_float)
            units_store_floats(sum, out, f, place.x_row, panel);
        else
            units_store_lines(sum, out, f, place.x_row, panel, room.pieces + warp * 32 * UNITS_PITCH);
    }
}

template <uint32_t DTYPE, uint32_t GROUPS, uint32_t WIDTH>
static __global__ void __launch_bounds__((GROUPS + 1) * 128, 1)
linear_units_many(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ struct units_many f,
                  const __grid_constant__ struct output out)
{
    only_sm_90a();
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const struct units_many_room room = units_many_place<DTYPE, GROUPS, WIDTH>(shared_address(shared));
    start_next();
    room.w.make_barriers(2, GROUPS * 4);
    barriers_made();
    __syncthreads();
    if (warp >= GROUPS * 4) {
        if (GROUPS > 1)
            asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (warp < GROUPS * 4 + 2 && threadIdx.x % 32 == 0)
            units_many_load<DTYPE, GROUPS, WIDTH>(&x_map, f, room, warp == GROUPS * 4);
    } else {
        if (GROUPS > 1)
            asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        units_many_consume<DTYPE, GROUPS, WIDTH>(f, out, room);
    }
}

/* ---- the host's side ----------------------------------------------------------------------------------------------------- */

typedef void (*units_many_kernel)(CUtensorMap, struct units_many, struct output);

/* Tiles of 64 * groups rows of W by width rows of x, and the microseconds that a slab of one takes. */
struct units_form {
    uint32_t dtype, groups, width;
    float slab_us;
    units_many_kernel kernel;
};
#define UNITS_FORM(dtype, groups, width, slab_us) {dtype, groups, width, slab_us, linear_units_many<dtype, groups, width>}
static const struct units_form UNITS_FORMS[] = {
    UNITS_FORM(DTYPE_INT4_G128, 1, 32, 0.285f), UNITS_FORM(DTYPE_INT4_G128, 1, 64, 0.325f),
    UNITS_FORM(DTYPE_INT4_G128, 1, 128, 0.44f), UNITS_FORM(DTYPE_INT4_G128, 2, 64, 0.49f),
    UNITS_FORM(DTYPE_INT4_G128, 2, 128, 0.72f), UNITS_FORM(DTYPE_INT4_G32, 1, 32, 0.42f),
    UNITS_FORM(DTYPE_INT4_G32, 1, 64, 0.51f),   UNITS_FORM(DTYPE_INT4_G32, 2, 64, 0.76f),
    UNITS_FORM(DTYPE_INT4_G32, 2, 96, 0.96f),   UNITS_FORM(DTYPE_Q8_0, 1, 32, 0.46f),
    UNITS_FORM(DTYPE_Q8_0, 1, 64, 0.56f),       UNITS_FORM(DTYPE_Q8_0, 2, 64, 0.85f),
    UNITS_FORM(DTYPE_Q8_0, 2, 96, 1.05f),       UNITS_FORM(DTYPE_Q4_K, 1, 32, 0.60f),
    UNITS_FORM(DTYPE_Q4_K, 1, 64, 0.80f),       UNITS_FORM(DTYPE_Q4_K, 2, 64, 1.20f),
    UNITS_FORM(DTYPE_Q6_K, 1, 32, 0.70f),       UNITS_FORM(DTYPE_Q6_K, 1, 64, 0.90f),
    UNITS_FORM(DTYPE_Q6_K, 2, 64, 1.40f),
};
#undef UNITS_FORM

static cudaError_t units_many_open(void)
{
    cudaError_t code = cudaSuccess;
    for (const struct units_form &form : UNITS_FORMS)
        if (code == cudaSuccess)
            code = allow_shared(form.kernel);
    return code;
}

static inline uint32_t units_tiles(const struct units_form *form, uint32_t n_rows, uint32_t n_panels)
{
    return ceil_div(n_rows, form->width) * ceil_div(n_panels, form->groups * 4);
}

/* The form that takes the least time for a number of rows of x. */
static const struct units_form *units_many_choose(const struct cuda *cuda, const struct matrix *matrix, uint32_t n_rows)
{
    const struct matrix_units w = units_of(matrix);
    const struct units_form *best = NULL;
    float least = INFINITY;
    for (const struct units_form &form : UNITS_FORMS) {
        const float us = ceil_div(units_tiles(&form, n_rows, w.n_panels()), cuda->n_processors) * form.slab_us;
        if (form.dtype == unit_type_of(matrix->parts[0].dtype).as && us < least) {
            least = us;
            best = &form;
        }
    }
    return best;
}

struct units_box units_many_box(const struct cuda *cuda, const struct matrix *matrix, uint32_t n_rows)
{
    return {units_many_choose(cuda, matrix, n_rows)->width, 2};
}

void units_many_multiply(const struct cuda *cuda, const struct matrix *matrix, const struct tensor_map &x_map, bool is_product,
                         const struct output &out)
{
    const struct units_form *form = units_many_choose(cuda, matrix, out.n_rows);
    struct units_many f = {};
    f.w = units_of(matrix);
    f.n_down = ceil_div(out.n_rows, form->width);
    f.n_across = ceil_div(f.w.n_panels(), form->groups * 4);
    f.n_tiles = f.n_down * f.n_across;
    f.is_product = is_product;
    f.is_wide = map_fits(out.y, (size_t)out.y_stride * 2) && out.n_out % 8 == 0 &&
                (!out.add || map_fits(out.add, (size_t)out.add_stride * 2));
    launch(cuda, form->kernel, dim3(min(f.n_tiles, cuda->n_processors)), (form->groups + 1) * 128, SHARED_BYTES, map_of(&x_map),
           f, out);
}

#endif
