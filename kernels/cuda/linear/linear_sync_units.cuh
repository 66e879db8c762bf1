/* linear_sync_units.cuh: the linears of linear_units.cuh for 1 to 16 rows of x, with mma.sync and cp.async alone. Two warps of
 * a block copy units of its panels, and x, into a ring of stages, each some slabs. SPLIT warps share a panel and divide the
 * slabs of a stage among them. One warp adds what it has multiplied itself. Where four share a panel, because a weight has few,
 * their sums pass through shared memory to the threads that own the outputs, which add them in order one stage later. Bound by
 * instructions on an H200. */
#ifndef LLMPY_CUDA_LINEAR_SYNC_UNITS_CUH
#define LLMPY_CUDA_LINEAR_SYNC_UNITS_CUH

#include "../core/units.cuh"
#include "linear_sync.cuh"
#include "unit_chain.cuh"

#define SYNC_PANEL_WARPS 4u  /* that share a panel, where a weight has few; else each has one */
#define SYNC_UNITS_STAGES 3u

struct sync_units {
    struct matrix_units w;
    const char *x;
    size_t x_row_bytes;
    bool is_product;
    uint32_t n_cols, n_stages;
};

/* Units of a warp in a stage. */
static constexpr __host__ __device__ uint32_t sync_warp_units(uint32_t eights, uint32_t split)
{
    return eights == 2 && split > 1 ? 1 : 2;
}

/* Bytes of a unit's sums and scales on their way. */
static constexpr __host__ __device__ uint32_t sync_mail_bytes(uint32_t eights)
{
    return eights * 512 + 64;
}

/* A loader's part of the launch. A stage: x as linear_sync.cuh has it, then the slabs of each panel. */
template <uint32_t DTYPE, uint32_t SLABS> struct sync_unit_copier {
    const struct sync_units &f;
    uint32_t data, stage_bytes, first, n_panels, x_rows;

    __device__ __forceinline__ void start(uint32_t slot, uint32_t slab) const
    {
        const uint32_t stage = data + slot * stage_bytes, units = stage + SLABS * x_rows * 256, t = threadIdx.x % SYNC_LOADERS;
        const uint32_t n = slab < f.w.n_slabs ? min(SLABS, f.w.n_slabs - slab) : 0, c = t % 16;
        for (uint32_t i = 0; i < n_panels; i++) {
            const uint32_t panel = min(first + i, f.w.n_panels() - 1);
            const uint8_t *from = f.w.data + ((size_t)panel * f.w.n_slabs + slab) * unit_bytes(DTYPE);
            for (uint32_t j = t; j < n * unit_bytes(DTYPE) / 16; j += SYNC_LOADERS)
                copy_16(units + i * SLABS * unit_bytes(DTYPE) + j * 16, from + j * 16);
        }
        for (uint32_t s = 0; s < n; s++)
            for (uint32_t r = t / 16; r < x_rows; r += SYNC_LOADERS / 16) {
                const uint32_t k = (slab + s) * UNIT_COLUMNS + c * 8;
                copy_16_if(sync_chunk(stage + (s * 2 + c / 8) * x_rows * 128, r, c % 8),
                           f.x + r * f.x_row_bytes + (k < f.n_cols ? k * 2 : 0), k < f.n_cols);
            }
        copies_close();
    }
    __device__ __forceinline__ void run(void) const
    {
        uint32_t ahead = f.n_stages - 1;
        for (uint32_t i = 0; i + 1 < f.n_stages; i++)
            start(i, i * SLABS);
        for (uint32_t slab = 0; slab < f.w.n_slabs; slab += SLABS) {
            copies_wait(f.n_stages - 2);
            __syncthreads();
            start(ahead, slab + (f.n_stages - 1) * SLABS);
            ahead = ahead + 1 == f.n_stages ? 0 : ahead + 1;
        }
        copies_wait<0>();
        __syncthreads(); /* the last sums have been given */
    }
};

/* The sums of UNITS units of a warp, step by step in turn, and of groups of 128 the scales of both rows. unit: their addresses;
 * x: those of their slabs. */
template <uint32_t DTYPE, uint32_t EIGHTS, uint32_t UNITS>
static __device__ __forceinline__ void sync_multiply_units(float (&v)[UNITS][EIGHTS][4], float (&scales)[UNITS][2],
                                                           const uint32_t (&unit)[UNITS], const uint32_t (&x)[UNITS],
                                                           uint32_t x_rows)
{
    typedef unit_reader<DTYPE> reader;
    const uint32_t groups = unit_groups(DTYPE), lane = threadIdx.x % 32;
    reader w[UNITS];
    float p[UNITS][EIGHTS][4] = {}, total[UNITS][EIGHTS][4] = {};
    uint32_t ones[4], x_at[EIGHTS];
    units_ones(ones);
#pragma unroll
    for (uint32_t e = 0; e < EIGHTS; e++)
        x_at[e] = sync_chunk(0, min(e * 8 + lane % 8, x_rows - 1), lane / 8);
#pragma unroll
    for (uint32_t s = 0; s < UNITS; s++)
        w[s].begin(unit[s]);
#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
        uint32_t b[UNITS][EIGHTS][2][4];
#pragma unroll
        for (uint32_t s = 0; s < UNITS; s++) {
            w[s].load(unit[s], half);
#pragma unroll
            for (uint32_t e = 0; e < EIGHTS; e++)
#pragma unroll
                for (uint32_t i = 0; i < 2; i++)
                    load_matrices(b[s][e][i], x[s] + half * x_rows * 128 + (i ? x_at[e] ^ 64 : x_at[e]));
        }
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
#pragma unroll
            for (uint32_t s = 0; s < UNITS; s++) {
                const uint32_t step = half * 4 + i;
                uint32_t a[4];
                if (step * groups % 8 == 0)
                    w[s].enter(unit[s], step * groups / 8);
                w[s].unpack(i, a);
                const float low = w[s].scale(false), high = w[s].scale(true);
#pragma unroll
                for (uint32_t e = 0; e < EIGHTS; e++) {
                    const uint32_t both[2] = {b[s][e][i / 2][i % 2 * 2], b[s][e][i / 2][i % 2 * 2 + 1]};
                    mma(groups == 1 ? v[s][e] : p[s][e], a, both, __nv_bfloat16());
                    if (reader::has_minima)
                        mma(total[s][e], ones, both, __nv_bfloat16());
                    if (groups == 1 || (step + 1) * groups % 8)
                        continue;
                    units_add(v[s][e], p[s][e], low, high);
                    if (reader::has_minima)
                        units_add(v[s][e], total[s][e], -w[s].minimum(false), -w[s].minimum(true));
#pragma unroll
                    for (uint32_t q = 0; q < 4; q++)
                        p[s][e][q] = total[s][e][q] = 0;
                }
                scales[s][0] = low;
                scales[s][1] = high;
            }
    }
}

/* Adds the n slabs of a stage, whose sums lie in `mail`, to the outputs that thread q of a panel's owns. */
template <uint32_t DTYPE, uint32_t EIGHTS>
static __device__ __forceinline__ void sync_add_mail(float (&sum)[EIGHTS], const uint8_t *mail, uint32_t q, uint32_t n)
{
    const uint32_t row = q / 16 + q % 4 / 2 * 8, stride = sync_mail_bytes(EIGHTS) / 4;
    const float *p = (const float *)mail + q, *scale = (const float *)mail + EIGHTS * 128 + row;
#pragma unroll 4
    for (uint32_t c = 0; c < n; c++, p += stride, scale += stride)
#pragma unroll
        for (uint32_t e = 0; e < EIGHTS; e++)
            sum[e] = unit_groups(DTYPE) == 1 ? fmaf(p[e * 128], *scale, sum[e]) : sum[e] + p[e * 128];
}

/* Stores the outputs that thread q of a panel's owns. */
template <uint32_t EIGHTS>
static __device__ __forceinline__ void sync_store_owned(const struct sync_units &f, const struct output &out, uint32_t panel,
                                                        const float (&sum)[EIGHTS], uint32_t q)
{
    const uint32_t r = q / 16 + q % 4 / 2 * 8, x_row = q / 4 % 4 * 2 + q % 2;
#pragma unroll
    for (uint32_t e = 0; e < EIGHTS; e++) {
        const float up = __shfl_xor_sync(~0u, sum[e], 2);
        if (panel >= f.w.n_panels())
            continue;
        if (!f.is_product)
            put<__nv_bfloat16>(out, e * 8 + x_row, f.w.row_of(panel, r), sum[e]);
        else if (r < 8)
            sync_put_product<__nv_bfloat16>(out, e * 8 + x_row, panel * 8 + r, sum[e], up);
    }
}

/* Stores the sums of a warp's panels from `panel` on by rows of x from x_first on. */
template <uint32_t PANELS, uint32_t EIGHTS>
static __device__ __forceinline__ void sync_store_panels(const struct sync_units &f, const struct output &out, uint32_t x_first,
                                                         uint32_t panel, const float (&sum)[PANELS][EIGHTS][4])
{
    const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (uint32_t i = 0; i < PANELS * EIGHTS * 2; i++) {
        const uint32_t which = i / (EIGHTS * 2), e = i / 2 % EIGHTS, r = x_first + e * 8 + t * 2 + i % 2;
        const float low = sum[which][e][i % 2], high = sum[which][e][2 + i % 2];
        if (panel + which >= f.w.n_panels())
            continue;
        if (f.is_product) {
            sync_put_product<__nv_bfloat16>(out, r, (panel + which) * 8 + g, low, high);
        } else {
            put<__nv_bfloat16>(out, r, f.w.row_of(panel + which, g), low);
            put<__nv_bfloat16>(out, r, f.w.row_of(panel + which, g + 8), high);
        }
    }
}

template <uint32_t DTYPE, uint32_t EIGHTS, uint32_t SPLIT>
static __global__ void __launch_bounds__(SYNC_MAX_WARPS * 32 + SYNC_LOADERS, 2)
linear_sync_units(const __grid_constant__ struct sync_units f, const __grid_constant__ struct output out)
{
    extern __shared__ __align__(1024) uint8_t shared[];
    constexpr uint32_t units = sync_warp_units(EIGHTS, SPLIT), slabs = SPLIT * units, groups = unit_groups(DTYPE);
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, n_panels = (blockDim.x - SYNC_LOADERS) / (32 * SPLIT);
    const uint32_t x_rows = min(out.n_rows, 8 * EIGHTS), first = blockIdx.x * n_panels, data = shared_address(shared);
    const uint32_t stage_bytes = slabs * (x_rows * 256 + n_panels * unit_bytes(DTYPE));
    start_next();
    wait_for_input();
    if (warp >= n_panels * SPLIT) {
        const struct sync_unit_copier<DTYPE, slabs> copier = {f, data, stage_bytes, first, n_panels, x_rows};
        copier.run();
        return;
    }
    const uint32_t own = warp / SPLIT, part = warp % SPLIT, mail_bytes = sync_mail_bytes(EIGHTS);
    uint8_t *const mail = shared + f.n_stages * stage_bytes + own * slabs * mail_bytes;
    float sum[1][EIGHTS][4] = {}, owned[EIGHTS] = {};
    uint32_t slot = 0, buffer = 0;
    for (uint32_t slab = 0; slab < f.w.n_slabs; slab += slabs) {
        const uint32_t stage = data + slot * stage_bytes;
        uint32_t unit[units], x_at[units];
        float v[units][EIGHTS][4] = {}, scales[units][2];
        __syncthreads(); /* the stage is there; the one before has been read, and its sums given */
        if (SPLIT > 1 && slab)
            sync_add_mail<DTYPE, EIGHTS>(owned, mail + (buffer ^ 1) * n_panels * slabs * mail_bytes, part * 32 + lane, slabs);
#pragma unroll
        for (uint32_t s = 0; s < units; s++) {
            unit[s] = stage + slabs * x_rows * 256 + (own * slabs + part * units + s) * unit_bytes(DTYPE);
            x_at[s] = stage + (part * units + s) * x_rows * 256;
        }
        sync_multiply_units<DTYPE, EIGHTS, units>(v, scales, unit, x_at, x_rows);
#pragma unroll
        for (uint32_t s = 0; s < units; s++) {
            uint8_t *const to = mail + buffer * n_panels * slabs * mail_bytes + (part * units + s) * mail_bytes;
            if (SPLIT == 1 && slab + s >= f.w.n_slabs)
                continue;
#pragma unroll
            for (uint32_t e = 0; e < EIGHTS; e++)
                if constexpr (SPLIT > 1)
                    *(float4 *)(to + e * 512 + lane * 16) = make_float4(v[s][e][0], v[s][e][1], v[s][e][2], v[s][e][3]);
                else if constexpr (groups == 1)
                    units_add(sum[0][e], v[s][e], scales[s][0], scales[s][1]);
                else
                    for (uint32_t q = 0; q < 4; q++)
                        sum[0][e][q] = sum[0][e][q] + v[s][e][q];
            if (SPLIT > 1 && groups == 1 && lane % 4 < 2)
                *(float *)(to + EIGHTS * 512 + (lane / 4 + lane % 4 * 8) * 4) = lane % 4 ? scales[s][1] : scales[s][0];
        }
        slot = slot + 1 == f.n_stages ? 0 : slot + 1;
        buffer ^= 1;
    }
    __syncthreads();
    if (SPLIT > 1) {
        const uint32_t n = (f.w.n_slabs - 1) % slabs + 1;
        sync_add_mail<DTYPE, EIGHTS>(owned, mail + (buffer ^ 1) * n_panels * slabs * mail_bytes, part * 32 + lane, n);
        sync_store_owned(f, out, first + own, owned, part * 32 + lane);
    } else {
        sync_store_panels(f, out, 0, first + own, sum);
    }
}

/* ---- the host's side ----------------------------------------------------------------------------------------------------- */

typedef void (*sync_units_kernel)(struct sync_units, struct output);

static inline sync_units_kernel sync_units_of(uint32_t dtype, uint32_t eights, bool is_split)
{
    sync_units_kernel kernel = NULL;
    visit_unit_type(dtype, [&](auto type) {
        constexpr uint32_t split = SYNC_PANEL_WARPS;
        if (is_split)
            kernel = eights == 1 ? linear_sync_units<type(), 1, split> : linear_sync_units<type(), 2, split>;
        else
            kernel = eights == 1 ? linear_sync_units<type(), 1, 1> : linear_sync_units<type(), 2, 1>;
    });
    return kernel;
}

static cudaError_t sync_units_open(const struct cuda *cuda)
{
    cudaError_t code = cudaSuccess;
    for (uint32_t i = 0; i < 4 * N_UNIT_TYPES && code == cudaSuccess; i++)
        code = allow_shared(sync_units_of(unit_type_at(i / 4).dtype, 1 + i % 2, i / 2 % 2), cuda->shared_bytes);
    return code;
}

static void sync_units_multiply(const struct cuda *cuda, const struct matrix *matrix, const struct view *x, bool is_product,
                                const struct output &out)
{
    const uint32_t dtype = matrix->parts[0].dtype, eights = out.n_rows <= 8 ? 1 : 2;
    struct sync_units f = {units_of(matrix), (const char *)x->data, (size_t)x->stride * 2, is_product, matrix->n_cols, 0};
    const bool is_split = f.w.n_panels() < 6 * cuda->n_processors;
    const uint32_t split = is_split ? SYNC_PANEL_WARPS : 1, n_panels = SYNC_PANEL_WARPS / split;
    const uint32_t slabs = split * sync_warp_units(eights, split);
    const uint32_t stage_bytes = slabs * (out.n_rows * 256 + n_panels * unit_bytes(unit_type_of(dtype).as));
    const uint32_t mail_bytes = is_split ? 2 * slabs * sync_mail_bytes(eights) : 0;
    f.n_stages = min(SYNC_UNITS_STAGES, (cuda->shared_bytes - mail_bytes) / stage_bytes);
    launch(cuda, sync_units_of(dtype, eights, is_split), dim3(ceil_div(f.w.n_panels(), n_panels)),
           SYNC_PANEL_WARPS * 32 + SYNC_LOADERS, f.n_stages * stage_bytes + mail_bytes, f, out);
}

#endif
