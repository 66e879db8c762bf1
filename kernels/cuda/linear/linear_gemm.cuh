/* linear_gemm.cuh: y[r][n] = sum over k of x[r][k] * W[n][k] for many rows of x. W and x have one two-byte type, n_cols is a
 * multiple of 64. Every output is one float32 accumulator over the k16 steps 0, 1, 2, ..., the chain of every kernel of
 * linear.cu. So the bits do not depend on the tile, and the number of rows chooses the tile freely.
 *
 * A block of one or two consumer warpgroups holds a tile of 64 or 128 rows of x by WIDTH rows of W in registers. One warp
 * streams W and one x, in stages of 64 columns through a ring that fills shared memory. The blocks of a cluster form a
 * rectangle of tiles: blocks beside each other share x, blocks below each other share W. Each block fetches one slice of the
 * shared rows for all blocks that share them, so L2 is read once. W does not wait for the kernel before. Where W is gate | up,
 * a tile alternates between eight rows of gate and eight of up, and the block computes act(gate) * up of its sums, each
 * rounded first. A tile of 128 by 256 is stored while the block multiplies its next one (gemm_late).
 *
 * Bound on an H200, us: by the tensor cores 2 n_rows n_out n_cols / 800e6 (some 760e6 are reached), by the bytes of W
 * 2 n_out n_cols / 4.5e6: for 256 rows and 28,672 x 4,096 75 and 52. Small tiles are bound by the 64 bytes a cycle that a
 * processor loads: (64 groups + WIDTH) * 2 cycles a stage, which multiplies in groups * WIDTH * 2 cycles. */
#ifndef LLMPY_CUDA_LINEAR_GEMM_CUH
#define LLMPY_CUDA_LINEAR_GEMM_CUH

#include "../core/launch.cuh"
#include "../core/ring.cuh"
#include "../core/tensor_map.cuh"
#include "../core/wgmma_wide.cuh"
#include "gemm_tiles.cuh"
#include "tile_store.cuh"

#include <math.h>

/* ---- the kernel ---------------------------------------------------------------------------------------------------------- */

/* Shared memory: the ring of stages, rows of x then rows of W; the warps' pieces for results; two barriers a stage. */
static constexpr __host__ __device__ uint32_t gemm_stages(uint32_t groups, uint32_t width)
{
    return (SHARED_BYTES - groups * 64 * gemm_pitch(width)) / ((groups * 64 + width) * 128 + 16);
}

/* One thread streams a block's slices of W or of x. The rows of the last tile are divided into smaller slices. The rest of
 * that tile keeps old bytes, because its sums are not stored and the copy engine is slow at filling zeros. */
template <uint32_t GROUPS, uint32_t WIDTH>
static __device__ __forceinline__ void gemm_load(const struct gemm_maps &maps, const struct gemm_shape &s,
                                                 const struct output &out, const struct ring &ring, bool is_weight)
{
    const uint32_t rank = cluster_rank(), down = rank & (s.down - 1), across = rank >> s.down_log2;
    const uint32_t tile_rows = is_weight ? WIDTH : GROUPS * 64;
    const uint32_t n_rows = is_weight ? out.n_out << s.is_product : out.n_rows;
    const bool is_pairs = is_weight && s.is_product;
    const uint32_t mask = is_weight ? s.w_blocks << (across << s.down_log2) : s.x_blocks << down;
    struct ring_place at = RING_FETCH;
    uint64_t policy = is_weight && s.is_read_once ? policy_read_once() : policy_keep();
    map_prefetch(is_weight ? &maps.w : &maps.x);
    if (!is_weight)
        wait_for_input();
    for (uint32_t turn = cluster_first(); turn < s.n_clusters; turn += cluster_step()) {
        struct gemm_place place = gemm_place_of(s, turn, GROUPS * 64, WIDTH, down, across);
        uint32_t first = is_weight ? place.column : place.row, left = n_rows - min(first, n_rows);
        bool is_edge = left < tile_rows;
        uint32_t slice = is_weight ? (is_edge ? s.w_edge_rows : s.w_box_rows) : is_edge ? s.x_edge_rows : s.x_box_rows;
        uint32_t n_bytes = (is_edge ? (left + slice - 1) / slice * slice : tile_rows) * 128;
        uint32_t begin = (is_weight ? down : across) * slice, offset = (is_weight ? GROUPS * 64 * 128 : 0) + begin * 128;
        const CUtensorMap *map = is_weight ? (is_edge ? &maps.w_edge : &maps.w) : is_edge ? &maps.x_edge : &maps.x;
        for (uint32_t block = 0; block < s.n_blocks; block++, ring.next(at)) {
            const uint32_t full = ring.expect(at, n_bytes), target = ring.data_of(at) + offset;
            if (begin < left && is_pairs)
                copy_pairs_to(mask, target, map, (first + begin) / 16, block, full, policy);
            else if (begin < left)
                copy_box_to(mask, target, map, first + begin, block, full, policy);
        }
    }
    /* Do not exit while another block of the cluster may still signal our barriers. */
    ring.drain(at);
}

/* A thread that multiplies: its place in the ring, and the barrier at which it releases stages. */
struct gemm_worker {
    struct ring ring;
    struct ring_place at;
    uint32_t group, free_in, before;

    /* This block releases a stage in every block that fetches for it; lane i in the i-th. */
    __device__ __forceinline__ gemm_worker(const struct gemm_shape &s, const struct ring &of)
        : ring(of), at(RING_READ), group(__shfl_sync(~0u, threadIdx.x / 128, 0)), before(0)
    {
        const uint32_t lane = threadIdx.x % 32, rank = cluster_rank(), down = rank & (s.down - 1), across = rank >> s.down_log2;
        uint32_t beside = lane - s.down, owner = lane + (across << s.down_log2);
        if (lane >= s.down)
            owner = down + ((beside + (beside >= across)) << s.down_log2);
        free_in = lane < s.down + s.across - 1 ? address_in(ring.empty, owner) : 0;
    }
    /* Issues the products of a stage. */
    template <class T, uint32_t GROUPS, uint32_t N> __device__ __forceinline__ void multiply(float (&sum)[N])
    {
        ring.wait_full(at);
        uint64_t a = wgmma_rows(ring.data_of(at) + group * 64 * 128);
        uint64_t b = wgmma_rows(ring.data_of(at) + GROUPS * 64 * 128);
        wgmma_begin();
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            wgmma(sum, a + 2 * i, b + 2 * i, T());
        wgmma_commit();
    }
    /* Releases the stage before the one whose products were issued last. */
    __device__ __forceinline__ void move_on(bool is_first)
    {
        wgmma_wait<1>();
        if (!is_first && free_in)
            barrier_arrive_in(free_in + 8 * before);
        before = at.stage;
        ring.next(at);
    }
    template <uint32_t N> __device__ __forceinline__ void finish(float (&sum)[N])
    {
        wgmma_wait<0>();
        if (free_in)
            barrier_arrive_in(free_in + 8 * before);
        wgmma_made(sum);
    }
};

template <class T, uint32_t GROUPS, uint32_t WIDTH>
static __device__ __forceinline__ void gemm_consume(const struct gemm_shape &s, const struct output &out,
                                                    const struct ring &ring, uint32_t pieces)
{
    const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const uint32_t rank = cluster_rank(), down = rank & (s.down - 1), across = rank >> s.down_log2;
    gemm_worker w(s, ring);
    for (uint32_t turn = cluster_first(); turn < s.n_clusters; turn += cluster_step()) {
        float sum[WIDTH / 2];
#pragma unroll
        for (uint32_t i = 0; i < WIDTH / 2; i++)
            sum[i] = 0;
        uint32_t block = 0;
        do {
            w.multiply<T, GROUPS>(sum);
            w.move_on(block == 0);
        } while (++block < s.n_blocks);
        w.finish(sum);
        struct gemm_place place = gemm_place_of(s, turn, GROUPS * 64, WIDTH, down, across);
        uint32_t row = place.row + warp * 16;
        wait_for_input(); /* before reading the rows that the sums are added to; x has waited already */
        if (out.bias)
            add_bias(sum, out, s.is_product, place.column);
        if (out.delta)
            add_delta(sum, out, s.is_product, row, place.column);
        if (out.is_float)
            store_floats(sum, out, s.is_wide, row, place.column);
        else
            store_lines<T>(sum, out, s.is_product, s.is_wide, act_product{out.act}, row, place.column,
                           pieces + warp * 16 * gemm_pitch(WIDTH));
    }
}

/* The rounded sums of a thread's last tile, which it multiplies and stores while the next tile's products run: a part behind
 * each of the first stages. So the tensor cores do not wait for the stores, and blocks do not store all at once. */
template <class T, bool IS_PRODUCT> struct gemm_late {
    static const uint32_t products = IS_PRODUCT ? 8 : 0, chunks = IS_PRODUCT ? 2 : 4, parts = products + chunks;
    static const uint32_t pitch = 144; /* gemm_pitch(256) */
    uint32_t kept[64], row, column, piece; /* column of y */

    __device__ __forceinline__ void keep(const float (&sum)[128], const struct gemm_place &place, uint32_t warp)
    {
        row = place.row + warp * 16;
        column = place.column >> IS_PRODUCT;
#pragma unroll
        for (uint32_t i = 0; i < 64; i++)
            kept[i] = pack(sum[2 * i], sum[2 * i + 1], T());
    }
    __device__ __forceinline__ void store(uint32_t chunk, const struct output &out, bool is_wide) const
    {
        const uint32_t lane = threadIdx.x % 32, corner = piece + lane % 16 * pitch + lane / 16 * 16;
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            const uint32_t *v = kept + chunk * 16 + i * 4;
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0],{%1,%2,%3,%4};" ::"r"(corner + 32 * i), "r"(v[0]),
                         "r"(v[1]), "r"(v[2]), "r"(v[3])
                         : "memory");
        }
        __syncwarp();
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            const uint32_t r = i * 4 + lane / 8, n = column + chunk * 64 + lane % 8 * 8;
            const uint4 value = load_shared(piece + r * pitch + lane % 8 * 16);
            if (row + r < out.n_rows && n < out.n_out)
                store_eight<T>(out, is_wide, row + r, n, value);
        }
        __syncwarp();
    }
    __device__ __forceinline__ void part(uint32_t i, const struct output &out, bool is_wide)
    {
        if (i + 1 > products)
            return store(i - products, out, is_wide);
        const act_product product = {ACT_SILU};
        auto common = [&](float g, float u) { return product.common(g, u); };
#pragma unroll
        for (uint32_t h = 4 * i; h < 4 * i + 4; h++)
            kept[h] = multiply_pairs<T>(kept[h / 2 * 4 + h % 2], kept[h / 2 * 4 + 2 + h % 2], common);
    }
};

/* Tiles of 128 by 256 of at least gemm_late::parts stages; no floats, and no activation but SiLU. */
template <class T, bool IS_PRODUCT>
static __device__ __forceinline__ void gemm_consume_late(const struct gemm_shape &s, const struct output &out,
                                                         const struct ring &ring, uint32_t pieces)
{
    const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const uint32_t rank = cluster_rank(), down = rank & (s.down - 1), across = rank >> s.down_log2;
    gemm_worker w(s, ring);
    gemm_late<T, IS_PRODUCT> late;
    late.row = out.n_rows; /* none yet */
    late.column = 0;
    late.piece = pieces + warp * 16 * gemm_pitch(256);
#pragma unroll
    for (uint32_t i = 0; i < 64; i++)
        late.kept[i] = 0;
    wait_for_input();
    for (uint32_t turn = cluster_first(); turn < s.n_clusters; turn += cluster_step()) {
        float sum[128];
#pragma unroll
        for (uint32_t i = 0; i < 128; i++)
            sum[i] = 0;
#pragma unroll
        for (uint32_t i = 0; i < late.parts; i++) {
            w.multiply<T, 2>(sum);
            late.part(i, out, s.is_wide);
            w.move_on(i == 0);
        }
        for (uint32_t block = late.parts; block < s.n_blocks; block++) {
            w.multiply<T, 2>(sum);
            w.move_on(false);
        }
        w.finish(sum);
        struct gemm_place place = gemm_place_of(s, turn, 128, 256, down, across);
        if (out.bias)
            add_bias(sum, out, IS_PRODUCT, place.column);
        if (out.delta)
            add_delta(sum, out, IS_PRODUCT, place.row + warp * 16, place.column);
        late.keep(sum, place, warp);
    }
#pragma unroll
    for (uint32_t i = 0; i < late.parts; i++)
        late.part(i, out, s.is_wide);
}

/* consume(ring, pieces) runs in the warps that multiply. */
template <uint32_t GROUPS, uint32_t WIDTH, class F>
static __device__ __forceinline__ void gemm_run(const struct gemm_maps &maps, const struct gemm_shape &s,
                                                const struct output &out, F consume)
{
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t n_stages = gemm_stages(GROUPS, WIDTH), stage_bytes = (GROUPS * 64 + WIDTH) * 128;
    const uint32_t data = shared_address(shared), pieces = data + n_stages * stage_bytes;
    const uint32_t full = pieces + GROUPS * 64 * gemm_pitch(WIDTH);
    const struct ring ring = {data, full, full + 8 * n_stages, n_stages, stage_bytes};
    const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    start_next();
    ring.make_barriers(2, GROUPS * 4 * (s.down + s.across - 1));
    barriers_made();
    cluster_meet();
    /* Two warpgroups of 232 registers and the loading one fill the processor's. */
    if (warp >= GROUPS * 4) {
        if (GROUPS > 1)
            asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (warp < GROUPS * 4 + 2 && threadIdx.x % 32 == 0)
            gemm_load<GROUPS, WIDTH>(maps, s, out, ring, warp == GROUPS * 4);
    } else {
        if (GROUPS > 1)
            asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        consume(ring, pieces);
    }
}

template <class T, uint32_t GROUPS, uint32_t WIDTH>
static __global__ void __launch_bounds__((GROUPS + 1) * 128, 1)
linear_gemm(const __grid_constant__ struct gemm_maps maps, const __grid_constant__ struct gemm_shape s,
            const __grid_constant__ struct output out)
{
    only_sm_90a();
    gemm_run<GROUPS, WIDTH>(maps, s, out, [&](const struct ring &ring, uint32_t pieces) {
        gemm_consume<T, GROUPS, WIDTH>(s, out, ring, pieces);
    });
}

template <class T, bool IS_PRODUCT>
static __global__ void __launch_bounds__(384, 1)
linear_gemm_late(const __grid_constant__ struct gemm_maps maps, const __grid_constant__ struct gemm_shape s,
                 const __grid_constant__ struct output out)
{
    only_sm_90a();
    gemm_run<2, 256>(maps, s, out, [&](const struct ring &ring, uint32_t pieces) {
        gemm_consume_late<T, IS_PRODUCT>(s, out, ring, pieces);
    });
}

/* ---- the host's side ----------------------------------------------------------------------------------------------------- */

typedef void (*gemm_kernel)(struct gemm_maps, struct gemm_shape, struct output);

/* Tiles of 64 * groups rows of x by width rows of W. */
struct gemm_form {
    uint32_t groups, width;
    gemm_kernel bf16, f16;
};
#define GEMM_FORM(groups, width)                                                                                              \
    {groups, width, linear_gemm<__nv_bfloat16, groups, width>, linear_gemm<__half, groups, width>}
static const struct gemm_form GEMM_FORMS[] = {GEMM_FORM(1, 64),  GEMM_FORM(1, 72),  GEMM_FORM(1, 80),  GEMM_FORM(1, 104),
                                              GEMM_FORM(1, 128), GEMM_FORM(1, 144), GEMM_FORM(2, 72),  GEMM_FORM(2, 104),
                                              GEMM_FORM(2, 128), GEMM_FORM(2, 192), GEMM_FORM(2, 224), GEMM_FORM(2, 256)};
#undef GEMM_FORM

template <class T> static gemm_kernel late_of(bool is_product)
{
    return is_product ? linear_gemm_late<T, true> : linear_gemm_late<T, false>;
}

/* The kernel that stores late, if it can make the product in tiles of this form; else NULL. */
static gemm_kernel gemm_late_kernel(uint32_t dtype, const struct gemm_form *form, uint32_t n_blocks, bool is_product,
                                    const struct output *out)
{
    const uint32_t parts = is_product ? gemm_late<__nv_bfloat16, true>::parts : gemm_late<__nv_bfloat16, false>::parts;
    if (form->groups != 2 || form->width != 256 || n_blocks < parts || out->is_float || (is_product && out->act != ACT_SILU))
        return NULL;
    return dtype == DTYPE_F16 ? late_of<__half>(is_product) : late_of<__nv_bfloat16>(is_product);
}

static const struct gemm_cluster GEMM_CLUSTERS[] = {{1, 1}, {2, 1}, {1, 2}, {2, 2}, {4, 1}, {1, 4}};

static cudaError_t gemm_open(uint32_t dtype, uint32_t n_processors, struct gemm_device *device)
{
    cudaError_t code = cudaSuccess;
    for (const struct gemm_form &form : GEMM_FORMS)
        if (code == cudaSuccess)
            code = allow_shared(dtype == DTYPE_F16 ? form.f16 : form.bf16);
    for (uint32_t i = 0; i < 2 && code == cudaSuccess; i++)
        code = allow_shared(dtype == DTYPE_F16 ? late_of<__half>(i) : late_of<__nv_bfloat16>(i));
    for (uint32_t n = 1; n <= GEMM_MAX_CLUSTER && code == cudaSuccess; n *= 2)
        code = count_clusters(dtype == DTYPE_F16 ? GEMM_FORMS[0].f16 : GEMM_FORMS[0].bf16, n_processors, n,
                              (GEMM_FORMS[0].groups + 1) * 128, &device->n_clusters[n]);
    return code;
}

/* Microseconds that a product takes, by a model fitted to an H200 (most of its choices are the best measured, the rest within
 * some 5 %): a stage is bound by the tensor cores or by the copies from L2, a launch by its sequence of tiles or by the bytes
 * of W. */
static float gemm_cost(const struct gemm_device *device, const struct gemm_form *form, const struct gemm_cluster *cluster,
                       uint32_t n_rows, uint32_t n_out, uint32_t n_cols)
{
    uint32_t tile_rows = form->groups * 64, n_tiles = cluster->down * cluster->across, n_fit = device->n_clusters[n_tiles];
    uint32_t n_clusters = ceil_div(n_rows, tile_rows * cluster->down) * ceil_div(n_out, form->width * cluster->across);
    float n_blocks = (float)(min(n_clusters, n_fit) * n_tiles), area = (float)(form->groups * form->width);
    float own_rows = (float)tile_rows / cluster->across + (float)form->width / cluster->down;
    float multiply = area * 1.22e-3f, fetch = own_rows * n_blocks * 128 / 9.6e6f + (tile_rows + form->width) * 1.17e-4f;
    float stage = fmaxf(multiply, fetch) + 0.14f * fminf(multiply, fetch);
    float tiles = 1.94f + 0.2f * n_tiles + ceil_div(n_clusters, n_fit) * (n_cols / 64 * stage + area * 1.24e-3f);
    float bytes = 2.48f + (float)n_out * n_cols * 2 / 4.03e6f;
    return fmaxf(tiles, bytes) + 0.112f * fminf(tiles, bytes);
}

struct gemm_args {
    const void *w; /* [out.n_out][w_row_bytes] */
    size_t w_row_bytes;
    struct view x; /* [out.n_rows][n_cols] */
    uint32_t n_cols;
    bool is_product; /* w is gate | up, [2 * out.n_out][w_row_bytes] */
    struct output out;
};

static enum rc gemm_launch(const struct cuda *cuda, map_encoder encode, const struct gemm_device *device,
                           const struct gemm_args *args, const struct gemm_form *form, const struct gemm_cluster *cluster,
                           struct err *err)
{
    const struct output *out = &args->out;
    uint32_t tile_rows = form->groups * 64, n_tiles = cluster->down * cluster->across;
    uint32_t n_weights = out->n_out << args->is_product;
    struct gemm_shape shape = gemm_shape_of({tile_rows, form->width}, *cluster, args->n_cols / 64, args->is_product, *out);
    struct gemm_maps maps;
    enum rc rc = gemm_map(cuda, encode, args->w, args->w_row_bytes, n_weights, shape.n_blocks, args->is_product,
                          form->width, cluster->down, &maps.w, &maps.w_edge, &shape.w_edge_rows, err);
    if (!rc)
        rc = gemm_map(cuda, encode, args->x.data, (size_t)args->x.stride * 2, out->n_rows, shape.n_blocks, false, tile_rows,
                      cluster->across, &maps.x, &maps.x_edge, &shape.x_edge_rows, err);
    if (rc)
        return rc;
    gemm_kernel late = gemm_late_kernel(cuda->dtype, form, shape.n_blocks, args->is_product, out);
    launch_clusters(cuda, late ? late : cuda->dtype == DTYPE_F16 ? form->f16 : form->bf16,
                    dim3(min(shape.n_clusters, device->n_clusters[n_tiles]) * n_tiles), n_tiles, (form->groups + 1) * 128,
                    SHARED_BYTES, maps, shape, *out);
    return RC_OK;
}

/* Any number of rows; x and W where the copy engine reads them (map_fits). */
static enum rc gemm_multiply(const struct cuda *cuda, map_encoder encode, const struct gemm_device *device,
                             const struct gemm_args *args, struct err *err)
{
    const struct gemm_form *form = NULL;
    const struct gemm_cluster *cluster = NULL;
    float least = INFINITY;
    for (const struct gemm_form &f : GEMM_FORMS)
        for (const struct gemm_cluster &c : GEMM_CLUSTERS) {
            if (!device->n_clusters[c.down * c.across] || (c.down > 1 && args->out.n_rows <= f.groups * 64 * (c.down - 1)) ||
                (args->is_product && f.width / c.down % 16))
                continue;
            float cost = gemm_cost(device, &f, &c, args->out.n_rows, args->out.n_out << args->is_product, args->n_cols);
            if (cost < least) {
                least = cost;
                form = &f;
                cluster = &c;
            }
        }
    return gemm_launch(cuda, encode, device, args, form, cluster, err);
}

#endif
