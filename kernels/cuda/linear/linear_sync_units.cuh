/* linear_sync_units.cuh: the linears of linear_units.cuh for 1 to 16 rows of x, with mma.sync and cp.async alone. The words of
 * a unit go from global memory to the registers of the lane that multiplies them, two units ahead. x comes to shared memory,
 * all of it or in parts of some slabs that alternate between two places. SPLIT warps of a block share a panel and take its
 * slabs in turn. One warp adds what it has multiplied itself. Where several share a panel, because a weight has few, the sums
 * of their slabs pass through shared memory to the threads that own the outputs, which add them in order, a part of x later. */
#ifndef LLMPY_CUDA_LINEAR_SYNC_UNITS_CUH
#define LLMPY_CUDA_LINEAR_SYNC_UNITS_CUH

#include "linear_sync.cuh"
#include "unit_chain.cuh"
#include "unit_held.cuh"

#define SYNC_UNIT_WARPS 8u /* of a block */

struct sync_units {
    struct matrix_units w;
    const char *x;
    size_t x_row_bytes;
    bool is_product;
    uint32_t n_cols;
    uint32_t part_shift, n_parts; /* slabs of a part of x: 1 << part_shift; parts in shared memory: 2, or 1 for all of x */
};

/* Bytes of a unit's sums and scales on their way. */
static constexpr __host__ __device__ uint32_t sync_mail_bytes(uint32_t eights)
{
    return eights * 512 + 64;
}

/* The sums of UNITS units, step by step in turn, and of groups of 128 the scales of both rows. x: the address of the first
 * unit's slab, `apart` bytes before the next one's; x_at: what a lane reads of a slab, of each eight of rows. */
template <uint32_t DTYPE, uint32_t EIGHTS, uint32_t UNITS>
static __device__ __forceinline__ void sync_multiply_units(float (&v)[UNITS][EIGHTS][4], float (&scales)[UNITS][2],
                                                           const unit_held<DTYPE> *units, uint32_t x, uint32_t apart,
                                                           const uint32_t (&x_at)[EIGHTS])
{
    const uint32_t groups = unit_groups(DTYPE);
    unit_reader<DTYPE> w[UNITS];
    float p[UNITS][EIGHTS][4] = {}, total[UNITS][EIGHTS][4] = {};
    uint32_t ones[4], b[UNITS][EIGHTS][2][4];
    units_ones(ones);
#pragma unroll
    for (uint32_t i = 0; i < 8 * UNITS; i++) {
        const uint32_t step = i / UNITS, u = i % UNITS;
        uint32_t a[4];
        if (step == 0)
            units[u].begin(w[u]);
        if (step % 4 == 0) {
            units[u].load(w[u], step / 4);
#pragma unroll
            for (uint32_t j = 0; j < EIGHTS * 2; j++)
                load_matrices(b[u][j / 2][j % 2], x + u * apart + step / 4 * 128 + (x_at[j / 2] ^ j % 2 * 64));
        }
        if (step * groups % 8 == 0)
            units[u].enter(w[u], step * groups / 8);
        w[u].unpack(step % 4, a);
        scales[u][0] = w[u].scale(false);
        scales[u][1] = w[u].scale(true);
#pragma unroll
        for (uint32_t e = 0; e < EIGHTS; e++) {
            const uint32_t *both = &b[u][e][step % 4 / 2][step % 2 * 2], pair[2] = {both[0], both[1]};
            mma(groups == 1 ? v[u][e] : p[u][e], a, pair, __nv_bfloat16());
            if (w[u].has_minima)
                mma(total[u][e], ones, pair, __nv_bfloat16());
            if (groups == 1 || (step + 1) * groups % 8)
                continue;
            units_add(v[u][e], p[u][e], scales[u][0], scales[u][1]);
            if (w[u].has_minima)
                units_add(v[u][e], total[u][e], -w[u].minimum(false), -w[u].minimum(true));
#pragma unroll
            for (uint32_t q = 0; q < 4; q++)
                p[u][e][q] = total[u][e][q] = 0;
        }
    }
}

/* The outputs of a panel that a thread owns, where SPLIT warps share it: thread t of theirs has numbers t, t + 32 SPLIT, ...,
 * of sums as they lie in the warp that made them. */
template <uint32_t DTYPE, uint32_t EIGHTS, uint32_t SPLIT> struct sync_owned {
    static const uint32_t n_threads = SPLIT * 32, n = (EIGHTS * 128 + n_threads - 1) / n_threads;
    float sum[n];

    static __device__ __forceinline__ uint32_t number(uint32_t j) { return threadIdx.x % n_threads + j * n_threads; }
    static __device__ __forceinline__ uint32_t row(uint32_t j) { return number(j) % 128 / 16 + number(j) % 4 / 2 * 8; }
    static __device__ __forceinline__ uint32_t x_row(uint32_t j)
    {
        return number(j) / 128 * 8 + number(j) / 4 % 4 * 2 + number(j) % 2;
    }
    /* Adds n_slabs slabs, whose sums lie in `mail`. */
    __device__ __forceinline__ void add(const uint8_t *mail, uint32_t n_slabs)
    {
#pragma unroll
        for (uint32_t j = 0; j < n; j++) {
            const float *p = (const float *)mail + number(j), *scale = (const float *)mail + EIGHTS * 128 + row(j);
            if (number(j) >= EIGHTS * 128)
                continue;
#pragma unroll 8
            for (uint32_t s = 0; s < n_slabs; s++, p += sync_mail_bytes(EIGHTS) / 4, scale += sync_mail_bytes(EIGHTS) / 4)
                sum[j] = unit_groups(DTYPE) == 1 ? fmaf(*p, *scale, sum[j]) : sum[j] + *p;
        }
    }
    __device__ __forceinline__ void store(const struct sync_units &f, const struct output &out, uint32_t panel) const
    {
#pragma unroll
        for (uint32_t j = 0; j < n; j++) {
            const float up = __shfl_xor_sync(~0u, sum[j], 2);
            if (number(j) >= EIGHTS * 128 || panel >= f.w.n_panels())
                continue;
            if (!f.is_product)
                put<__nv_bfloat16>(out, x_row(j), f.w.row_of(panel, row(j)), sum[j]);
            else if (row(j) < 8)
                sync_put_product<__nv_bfloat16>(out, x_row(j), panel * 8 + row(j), sum[j], up);
        }
    }
};

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

/* Starts the copy of the part of x that begins at a slab: rows of slabs, each two rows of sync_chunk's. */
static __device__ __forceinline__ void sync_copy_part(const struct sync_units &f, uint32_t x_rows, uint32_t to, uint32_t slab)
{
    const uint32_t shift = f.part_shift + 4; /* of a row's 16-byte chunks */
    for (uint32_t i = threadIdx.x; i < x_rows << shift; i += SYNC_UNIT_WARPS * 32) {
        const uint32_t r = i >> shift, c = i & ((1u << shift) - 1), k = slab * UNIT_COLUMNS + c * 8;
        copy_16_if(to + (r << (shift + 4)) + c / 8 * 128 + ((c ^ r) % 8 << 4),
                   f.x + r * f.x_row_bytes + (k < f.n_cols ? k * 2 : 0), k < f.n_cols);
    }
    copies_close();
}

/* UNITS: of a warp that are multiplied in turn, AHEAD: that are on their way, BLOCKS: of a processor. */
template <uint32_t DTYPE, uint32_t EIGHTS, uint32_t SPLIT, uint32_t UNITS, uint32_t AHEAD, uint32_t BLOCKS>
static __global__ void __launch_bounds__(SYNC_UNIT_WARPS * 32, BLOCKS)
linear_sync_units(const __grid_constant__ struct sync_units f, const __grid_constant__ struct output out)
{
    extern __shared__ __align__(1024) uint8_t shared[];
    constexpr uint32_t panels = SYNC_UNIT_WARPS / SPLIT;
    constexpr uint32_t mail_bytes = sync_mail_bytes(EIGHTS), step_bytes = SPLIT * unit_bytes(DTYPE);
    const uint32_t lane = threadIdx.x % 32, own = threadIdx.x / 32 / SPLIT, turn = threadIdx.x / 32 % SPLIT;
    const uint32_t panel = blockIdx.x * panels + own, n_slabs = f.w.n_slabs, part_slabs = 1u << f.part_shift;
    const uint32_t x_rows = min(out.n_rows, 8 * EIGHTS), part_bytes = (x_rows * 256) << f.part_shift;
    const uint32_t data = shared_address(shared), boxes = panels << f.part_shift; /* of a part's sums */
    uint8_t *const mail = shared + f.n_parts * part_bytes + (own << f.part_shift) * mail_bytes;
    const uint8_t *unit = f.w.data + ((size_t)min(panel, f.w.n_panels() - 1) * n_slabs + turn) * unit_bytes(DTYPE);
    const uint8_t *header = kept(unit + unit_held<DTYPE>::header_of(lane)), *numbers = kept(unit + lane * 16);
    unit_held<DTYPE> held[AHEAD];
    start_next();
#pragma unroll
    for (uint32_t i = 0; i < AHEAD; i++, numbers += step_bytes, header += step_bytes)
        if (turn + i * SPLIT < n_slabs)
            held[i].fetch(numbers, header);
    wait_for_input();
    float sum[1][EIGHTS][4] = {};
    sync_owned<DTYPE, EIGHTS, SPLIT> owned = {};
    uint32_t x_at[EIGHTS], x = 0, place = 1, left = 0, part = 0; /* left: slabs of the part at hand, which begins at `part` */
#pragma unroll
    for (uint32_t e = 0; e < EIGHTS; e++) {
        const uint32_t row = min(e * 8 + lane % 8, x_rows - 1);
        x_at[e] = kept((row * 256 << f.part_shift) + ((lane / 8 ^ row % 8) << 4));
    }
    auto enter = [&](uint32_t slab) {
        copies_wait<0>();
        __syncthreads(); /* the part is there; the one before has been read, and its sums given */
        if (slab + part_slabs < n_slabs)
            sync_copy_part(f, x_rows, data + place * part_bytes, slab + part_slabs);
        if (SPLIT > 1 && slab)
            owned.add(mail + place * boxes * mail_bytes, part_slabs);
        place ^= 1;
        x = data + place * part_bytes + turn * 256;
        left = part_slabs;
        part = slab;
    };
    sync_copy_part(f, x_rows, data, 0);
    for (uint32_t first = 0; first < n_slabs; first += AHEAD * SPLIT) {
#pragma unroll
        for (uint32_t i = 0; i < AHEAD; i += UNITS) {
            const uint32_t slab = first + i * SPLIT;
            float v[UNITS][EIGHTS][4] = {}, scales[UNITS][2];
            if (slab >= n_slabs)
                break;
            if (left == 0)
                enter(slab);
            uint8_t *const to = mail + (place * boxes + part_slabs - left + turn) * mail_bytes;
            left -= UNITS * SPLIT;
            sync_multiply_units<DTYPE, EIGHTS, UNITS>(v, scales, held + i, x, SPLIT * 256, x_at);
            x += UNITS * SPLIT * 256;
#pragma unroll
            for (uint32_t u = 0; u < UNITS; u++, numbers += step_bytes, header += step_bytes) {
                if (slab + turn + (u + AHEAD) * SPLIT < n_slabs)
                    held[i + u].fetch(numbers, header);
                if (slab + turn + u * SPLIT >= n_slabs)
                    continue;
#pragma unroll
                for (uint32_t e = 0; e < EIGHTS; e++)
                    if constexpr (SPLIT > 1)
                        *(float4 *)(to + u * SPLIT * mail_bytes + e * 512 + lane * 16) =
                            make_float4(v[u][e][0], v[u][e][1], v[u][e][2], v[u][e][3]);
                    else if constexpr (unit_groups(DTYPE) == 1)
                        units_add(sum[0][e], v[u][e], scales[u][0], scales[u][1]);
                    else
                        for (uint32_t q = 0; q < 4; q++)
                            sum[0][e][q] = sum[0][e][q] + v[u][e][q];
                if (SPLIT > 1 && unit_groups(DTYPE) == 1 && lane % 4 < 2)
                    *(float *)(to + u * SPLIT * mail_bytes + EIGHTS * 512 + (lane / 4 + lane % 4 * 8) * 4) =
                        lane % 4 ? scales[u][1] : scales[u][0];
            }
        }
    }
    if (SPLIT > 1) {
        __syncthreads();
        owned.add(mail + place * boxes * mail_bytes, n_slabs - part);
        owned.store(f, out, panel);
    } else {
        sync_store_panels(f, out, 0, panel, sum);
    }
}

/* ---- the host's side ----------------------------------------------------------------------------------------------------- */

typedef void (*sync_units_kernel)(struct sync_units, struct output);

/* A kernel, and what it was made with. */
struct sync_units_form {
    sync_units_kernel kernel;
    uint32_t split, units, blocks;
};

template <uint32_t DTYPE, uint32_t EIGHTS, uint32_t SPLIT, uint32_t UNITS, uint32_t AHEAD, uint32_t BLOCKS>
static struct sync_units_form sync_units_form_of(void)
{
    return {linear_sync_units<DTYPE, EIGHTS, SPLIT, UNITS, AHEAD, BLOCKS>, SPLIT, UNITS, BLOCKS};
}

static inline struct sync_units_form sync_units_of(uint32_t dtype, uint32_t eights, bool is_split)
{
    struct sync_units_form form = {};
    visit_unit_type(dtype, [&](auto type) {
        constexpr uint32_t as = type(), split = SYNC_UNIT_WARPS, blocks = as == DTYPE_INT4_G128 ? 3 : 2;
        constexpr uint32_t units = as == DTYPE_INT4_G128 ? 1 : 2; /* of a panel's warp: the fastest on an H200 */
        if (eights == 1)
            form = is_split ? sync_units_form_of<as, 1, split, units, 2, blocks>()
                            : sync_units_form_of<as, 1, 1, 2, 2, blocks>();
        else
            form = is_split ? sync_units_form_of<as, 2, split, 1, 2, blocks>() : sync_units_form_of<as, 2, 1, 1, 2, blocks>();
    });
    return form;
}

static cudaError_t sync_units_open(const struct cuda *cuda)
{
    cudaError_t code = cudaSuccess;
    for (uint32_t i = 0; i < 4 * N_UNIT_TYPES && code == cudaSuccess; i++)
        code = allow_shared(sync_units_of(unit_type_at(i / 4).dtype, 1 + i % 2, i / 2 % 2).kernel, cuda->shared_bytes);
    return code;
}

static struct sync_units sync_units_args(const struct matrix *matrix, const struct view *x, bool is_product)
{
    return {units_of(matrix), (const char *)x->data, (size_t)x->stride * 2, is_product, matrix->n_cols, 0, 1};
}

/* Parts of x are as large as shared memory allows. */
static void sync_units_start(const struct cuda *cuda, const struct sync_units_form &form, struct sync_units f,
                             const struct output &out)
{
    const uint32_t panels = SYNC_UNIT_WARPS / form.split, n_blocks = ceil_div(f.w.n_panels(), panels);
    const uint32_t room = sync_room(cuda, min(ceil_div(n_blocks, cuda->n_processors), form.blocks));
    const uint32_t mail_bytes = form.split > 1 ? panels * sync_mail_bytes(out.n_rows <= 8 ? 1 : 2) : 0;
    const uint32_t slab_bytes = out.n_rows * 256 + mail_bytes;
    auto parts = [&](uint32_t shift) { return (1u << shift) < f.w.n_slabs ? 2u : 1u; };
    f.part_shift = (uint32_t)__builtin_ctz(form.split * form.units);
    while (parts(f.part_shift) > 1 && parts(f.part_shift + 1) * slab_bytes << (f.part_shift + 1) <= room)
        f.part_shift++;
    f.n_parts = parts(f.part_shift);
    launch(cuda, form.kernel, dim3(n_blocks), SYNC_UNIT_WARPS * 32, f.n_parts * slab_bytes << f.part_shift, f, out);
}

static void sync_units_multiply(const struct cuda *cuda, const struct matrix *matrix, const struct view *x, bool is_product,
                                const struct output &out)
{
    const struct sync_units f = sync_units_args(matrix, x, is_product);
    const bool is_split = f.w.n_panels() < 6 * cuda->n_processors;
    sync_units_start(cuda, sync_units_of(matrix->parts[0].dtype, out.n_rows <= 8 ? 1 : 2, is_split), f, out);
}

#endif
