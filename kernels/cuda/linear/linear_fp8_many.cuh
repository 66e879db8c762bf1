/* linear_fp8_many.cuh: the linears of linear_fp8.cuh for many rows of x. Tiles, clusters, their walk and the store of results
 * are those of linear_gemm.cuh; a stage is a slab of x and W with the scales of its rows. A warpgroup has two slabs under way
 * and folds one while the tensor cores make the other. Two warpgroups of a block issue their products in turn, so that they do
 * not fold at the same time.
 *
 * Bound on an H200, us: by the tensor cores 2 n_rows n_out n_cols / 1.2e9 (at the clock that they hold), by the bytes of W
 * 1.03 n_out n_cols / 4.5e6. */
#ifndef LLMPY_CUDA_LINEAR_FP8_MANY_CUH
#define LLMPY_CUDA_LINEAR_FP8_MANY_CUH

#include "../core/wgmma_fp8.cuh"
#include "gemm_tiles.cuh"
#include "linear_fp8.h"
#include "tile_store.cuh"

#include <math.h>

/* Which scales of W differ: those of each row and slab; or 64 rows have equal ones, as in blocks of 128 by 128, and a tile has
 * rows that follow each other, or eights of gate and of up in turn; or all slabs of a row have equal ones. The products of the
 * scales are equal in all, so the bits are, too. Shared memory binds: reading a scale for each slab from there takes more than
 * a quarter of its time. */
enum fp8_scales { EACH_ROW, SHARED, SHARED_PAIRS, OF_ROWS };
#define FP8_SHARED 64u
/* How a warpgroup folds: one of two slabs while the tensor cores make the other; or two together while they make those of the
 * other warpgroup, so that one read of shared memory brings the scales of both. */
enum fp8_folds { IN_PAIRS, JOINTLY };

/* gemm.n_blocks are slabs; the rest as in struct fp8_few. */
struct fp8_many {
    struct gemm_shape gemm;
    uint32_t n_chunks, n_padded;
    const float *x_scales; /* [slab][n_padded] */
    const char *w;         /* the numbers of W, for its shared scales */
    size_t w_row_bytes;
};

/* gemm: of numbers; of the scales of rows of W, in the same slices. */
struct fp8_maps {
    struct gemm_maps gemm;
    CUtensorMap scales, scales_edge;
};

/* Bytes of the scales of W in a stage. */
static constexpr __host__ __device__ uint32_t fp8_scale_bytes(enum fp8_scales kind, uint32_t width)
{
    return kind == EACH_ROW || kind == OF_ROWS ? width * FP8_CHUNK * 4 : 0;
}

static constexpr __host__ __device__ uint32_t fp8_many_stages(enum fp8_scales kind, uint32_t groups, uint32_t width)
{
    const uint32_t numbers = (groups * 64 + width) * FP8_SLAB, scales = groups * 64 * 4 + fp8_scale_bytes(kind, width);
    return (SHARED_BYTES - groups * 64 * gemm_pitch(64)) / (numbers + scales + 16);
}

/* A block's shared memory: the stages, the warps' pieces for results, the scales of the stages, and barriers. */
struct fp8_many_room {
    struct ring ring;
    uint32_t pieces, w_scales, x_scales;
};

template <enum fp8_scales KIND, uint32_t GROUPS, uint32_t WIDTH>
static __device__ __forceinline__ struct fp8_many_room fp8_many_place(uint32_t shared)
{
    const uint32_t n = fp8_many_stages(KIND, GROUPS, WIDTH), stage_bytes = (GROUPS * 64 + WIDTH) * FP8_SLAB;
    struct fp8_many_room room;
    room.w_scales = shared + n * stage_bytes;
    room.x_scales = room.w_scales + n * fp8_scale_bytes(KIND, WIDTH);
    room.pieces = room.x_scales + n * GROUPS * 64 * 4;
    const uint32_t full = room.pieces + GROUPS * 64 * gemm_pitch(64);
    room.ring = {shared, full, full + 8 * n, n, stage_bytes};
    return room;
}

/* As gemm_load: one thread streams a block's slices of W and their scales, or of x. The scales of a tile of x are fetched by
 * every block for itself. */
template <enum fp8_scales KIND, uint32_t GROUPS, uint32_t WIDTH>
static __device__ __forceinline__ void fp8_many_load(const struct fp8_maps &maps, const struct fp8_many &f,
                                                     const struct output &out, const struct fp8_many_room &room, bool is_weight)
{
    const struct gemm_shape &s = f.gemm;
    const struct ring &ring = room.ring;
    const uint32_t rank = cluster_rank(), down = rank & (s.down - 1), across = rank >> s.down_log2;
    const uint32_t tile_rows = is_weight ? WIDTH : GROUPS * 64;
    const uint32_t n_rows = is_weight ? out.n_out << s.is_product : out.n_rows;
    const bool is_pairs = is_weight && s.is_product;
    const uint32_t mask = is_weight ? s.w_blocks << (across << s.down_log2) : s.x_blocks << down;
    struct ring_place at = RING_FETCH;
    uint32_t slot = 0; /* of the next chunk of scales of W */
    uint64_t policy = is_weight && s.is_read_once ? policy_read_once() : policy_keep();
    map_prefetch(is_weight ? &maps.gemm.w : &maps.gemm.x);
    if (!is_weight)
        wait_for_input();
    for (uint32_t turn = cluster_first(); turn < s.n_clusters; turn += cluster_step()) {
        struct gemm_place place = gemm_place_of(s, turn, GROUPS * 64, WIDTH, down, across);
        uint32_t first = is_weight ? place.column : place.row, left = n_rows - min(first, n_rows);
        bool is_edge = left < tile_rows;
        uint32_t slice = is_weight ? (is_edge ? s.w_edge_rows : s.w_box_rows) : is_edge ? s.x_edge_rows : s.x_box_rows;
        uint32_t n_fetched = is_edge ? (left + slice - 1) / slice * slice : tile_rows;
        uint32_t n_bytes = n_fetched * FP8_SLAB + (is_weight ? 0 : GROUPS * 64 * 4);
        uint32_t begin = (is_weight ? down : across) * slice, offset = (is_weight ? GROUPS * 64 * 128 : 0) + begin * 128;
        const CUtensorMap *map = is_weight ? (is_edge ? &maps.gemm.w_edge : &maps.gemm.w)
                                           : is_edge ? &maps.gemm.x_edge : &maps.gemm.x;
        const CUtensorMap *scales = is_edge ? &maps.scales_edge : &maps.scales;
        for (uint32_t slab = 0; slab < s.n_blocks; slab++, ring.next(at)) {
            const bool has_scales = is_weight && (KIND == EACH_ROW ? slab % FP8_CHUNK == 0 : KIND == OF_ROWS && slab == 0);
            const uint32_t n_scales = has_scales ? fp8_scale_bytes(KIND, n_fetched) : 0;
            const uint32_t full = ring.expect(at, n_bytes + n_scales), target = ring.data_of(at) + offset;
            const uint32_t to = room.w_scales + (slot * WIDTH + begin) * FP8_CHUNK * 4;
            const uint32_t chunk = f.n_chunks - 1 - slab / FP8_CHUNK;
            if (begin < left && is_pairs) {
                copy_pairs_to(mask, target, map, (first + begin) / 16, slab, full, policy);
                if (has_scales)
                    copy_pairs_to(mask, to, scales, (first + begin) / 16, chunk, full, policy);
            } else if (begin < left) {
                copy_box_to(mask, target, map, first + begin, slab, full, policy);
                if (has_scales)
                    copy_box_to(mask, to, scales, first + begin, chunk, full, policy);
            }
            if (has_scales)
                slot = slot + 1 == ring.n_stages ? 0 : slot + 1;
            if (!is_weight)
                copy_bytes(room.x_scales + at.stage * GROUPS * 256, f.x_scales + (size_t)slab * f.n_padded + first,
                           GROUPS * 256, full);
        }
    }
    /* Do not exit while another block of the cluster may still signal our barriers. */
    ring.drain(at);
}

/* The sums of a slab, and the scales that a thread needs before they are made: shared ones of W. */
template <class N, uint32_t WIDTH> struct fp8_many_sums {
    typename N::sum p[WIDTH / 2];
    float first, second;
};

/* Between the products of one warpgroup and those of the next. */
template <uint32_t GROUPS> struct fp8_turns {
    uint32_t group;
    __device__ __forceinline__ void take(void) const
    {
        if (GROUPS > 1)
            meet(2 + group, 256);
    }
    __device__ __forceinline__ void pass(void) const
    {
        if (GROUPS > 1)
            reach(2 + (group + 1) % GROUPS, 256);
    }
};

/* One warpgroup's side of the ring. */
template <class N, enum fp8_scales KIND, uint32_t GROUPS, uint32_t WIDTH, enum fp8_folds FOLDS> struct fp8_many_worker {
    typedef struct fp8_many_sums<N, WIDTH> sums;
    const struct fp8_many_room &room;
    uint32_t free_in, group, row_of_x; /* row_of_x: of the block's tile, this thread's first of two, eight apart */
    const float *shared[2];            /* of a tile, the scales before the numbers of its first row and of its second kind */
    uint32_t slot;                     /* of the chunk of scales of W at hand; chunks have as many slots as there are stages */
    float of_rows[KIND == OF_ROWS ? WIDTH / 4 : 1]; /* of a tile, the scales of this thread's columns */

    __device__ __forceinline__ void next_slot(void) { slot = slot + 1 == room.ring.n_stages ? 0 : slot + 1; }
    /* The scales of a tile, which come with its first slab. */
    __device__ __forceinline__ void read_scales(const struct ring_place &at)
    {
        const uint32_t w_at = room.w_scales + (slot * WIDTH + threadIdx.x % 4 * 2) * FP8_CHUNK * 4 + (FP8_CHUNK - 1) * 4;
        room.ring.wait_full(at);
#pragma unroll
        for (uint32_t i = 0; i < WIDTH / 4; i++)
            of_rows[i] = load_float(w_at + (i / 2 * 8 + i % 2) * FP8_CHUNK * 4);
        next_slot();
    }
    /* column: the first row of W of a tile; n_rows: of W. */
    __device__ __forceinline__ void begin_tile(const struct fp8_many &f, uint32_t column, uint32_t n_rows)
    {
        const uint32_t half = n_rows / 2, first = KIND == SHARED_PAIRS ? column / 2 : column;
        const uint32_t second = KIND == SHARED_PAIRS ? half + first : WIDTH > FP8_SHARED ? first + FP8_SHARED : first;
        shared[0] = (const float *)(f.w + min(first, n_rows - 1) * f.w_row_bytes) - 1;
        shared[1] = (const float *)(f.w + min(second, n_rows - 1) * f.w_row_bytes) - 1;
    }
    /* Starts the products of a slab. */
    __device__ __forceinline__ void multiply(sums &made, const struct ring_place &at, uint32_t slab) const
    {
        room.ring.wait_full(at);
        const uint64_t a = wgmma_rows(room.ring.data_of(at) + group * 64 * FP8_SLAB);
        const uint64_t b = wgmma_rows(room.ring.data_of(at) + GROUPS * 64 * FP8_SLAB);
        wgmma_begin();
        wgmma_fp8_slab(made.p, a, b);
        wgmma_commit();
        if (KIND == EACH_ROW || KIND == OF_ROWS)
            return;
        made.first = __ldg(shared[0] - slab);
        made.second = __ldg(shared[1] - slab);
    }
    /* Adds a finished slab. */
    __device__ __forceinline__ void add_shared(float (&sum)[WIDTH / 2], const sums &made, float low, float high) const
    {
        const float factors[2][2] = {{low * made.first, high * made.first}, {low * made.second, high * made.second}};
#pragma unroll
        for (uint32_t i = 0; i < WIDTH / 2; i++)
            sum[i] = fmaf((float)made.p[i], factors[KIND == SHARED_PAIRS ? i / 4 % 2 : i / 32][i / 2 % 2], sum[i]);
    }
    __device__ __forceinline__ void add_each(float (&sum)[WIDTH / 2], const sums &made, uint32_t w_at, float low,
                                             float high) const
    {
#pragma unroll
        for (uint32_t i = 0; i < WIDTH / 2; i += 4) {
            const float even = load_float(w_at + i / 4 * 8 * FP8_CHUNK * 4);
            const float odd = load_float(w_at + (i / 4 * 8 + 1) * FP8_CHUNK * 4);
            sum[i] = fmaf((float)made.p[i], low * even, sum[i]);
            sum[i + 1] = fmaf((float)made.p[i + 1], low * odd, sum[i + 1]);
            sum[i + 2] = fmaf((float)made.p[i + 2], high * even, sum[i + 2]);
            sum[i + 3] = fmaf((float)made.p[i + 3], high * odd, sum[i + 3]);
        }
    }
    __device__ __forceinline__ void add_of_rows(float (&sum)[WIDTH / 2], const sums &made, float low, float high) const
    {
#pragma unroll
        for (uint32_t i = 0; i < WIDTH / 2; i++) {
            const float w = of_rows[KIND == OF_ROWS ? i / 4 * 2 + i % 2 : 0];
            sum[i] = fmaf((float)made.p[i], (i / 2 % 2 ? high : low) * w, sum[i]);
        }
    }
    /* Adds a finished slab and gives its stage back. */
    __device__ __forceinline__ void fold(float (&sum)[WIDTH / 2], sums &made, const struct ring_place &at, uint32_t slab,
                                         uint32_t n_slabs)
    {
        const uint32_t x_at = room.x_scales + at.stage * GROUPS * 256 + row_of_x * 4;
        const uint32_t w_at = room.w_scales + (slot * WIDTH + threadIdx.x % 4 * 2) * FP8_CHUNK * 4 +
                              (FP8_CHUNK - 1 - slab % FP8_CHUNK) * 4;
        const float low = load_float(x_at), high = load_float(x_at + 32);
        wgmma_made(made.p);
        if (KIND == EACH_ROW)
            add_each(sum, made, w_at, low, high);
        __syncwarp();
        if (free_in)
            barrier_arrive_in(free_in + 8 * at.stage);
        if (KIND == OF_ROWS)
            add_of_rows(sum, made, low, high);
        else if (KIND != EACH_ROW)
            add_shared(sum, made, low, high);
        else if (slab % FP8_CHUNK == FP8_CHUNK - 1 || slab + 1 == n_slabs)
            next_slot();
    }
    /* The same of two slabs, of EACH_ROW; slab is even. */
    __device__ __forceinline__ void fold_both(float (&sum)[WIDTH / 2], sums &even, sums &odd, const struct ring_place &at,
                                              const struct ring_place &next, uint32_t slab, uint32_t n_slabs)
    {
        const uint32_t x_at = room.x_scales + at.stage * GROUPS * 256 + row_of_x * 4;
        const uint32_t x_next = room.x_scales + next.stage * GROUPS * 256 + row_of_x * 4;
        const uint32_t w_at = room.w_scales + (slot * WIDTH + threadIdx.x % 4 * 2) * FP8_CHUNK * 4 +
                              (FP8_CHUNK - 2 - slab % FP8_CHUNK) * 4;
        const float low[2] = {load_float(x_at), load_float(x_next)}, high[2] = {load_float(x_at + 32), load_float(x_next + 32)};
        wgmma_made(even.p);
        wgmma_made(odd.p);
#pragma unroll
        for (uint32_t i = 0; i < WIDTH / 2; i += i % 4 ? 3 : 1) { /* two columns of a row, then the next four sums */
            const float2 w = load_two_floats(w_at + (i / 4 * 8 + i % 2) * FP8_CHUNK * 4);
            sum[i] = fmaf((float)even.p[i], low[0] * w.y, sum[i]);
            sum[i + 2] = fmaf((float)even.p[i + 2], high[0] * w.y, sum[i + 2]);
            sum[i] = fmaf((float)odd.p[i], low[1] * w.x, sum[i]);
            sum[i + 2] = fmaf((float)odd.p[i + 2], high[1] * w.x, sum[i + 2]);
        }
        __syncwarp();
        if (free_in) {
            barrier_arrive_in(free_in + 8 * at.stage);
            barrier_arrive_in(free_in + 8 * next.stage);
        }
        if (slab % FP8_CHUNK || slab + 2 >= n_slabs)
            next_slot();
    }
    __device__ __forceinline__ void sum_tile(float (&sum)[WIDTH / 2], sums &even, sums &odd, struct ring_place &at,
                                             uint32_t n_slabs)
    {
        const auto begin = [&](sums &p, const struct ring_place &from, uint32_t slab) { multiply(p, from, slab); };
        const auto end = [&](sums &p, const struct ring_place &from, uint32_t slab) { fold(sum, p, from, slab, n_slabs); };
        if (KIND == OF_ROWS)
            read_scales(at);
        const struct fp8_turns<GROUPS> turns = {group};
        if constexpr (FOLDS == JOINTLY)
            fp8_sum_jointly(even, odd, room.ring, at, n_slabs, begin, end,
                            [&](sums &p, sums &q, const struct ring_place &from, const struct ring_place &next, uint32_t slab) {
                                fold_both(sum, p, q, from, next, slab, n_slabs);
                            },
                            turns);
        else
            fp8_sum_stages<1>(even, odd, room.ring, at, n_slabs, begin, end, turns);
    }
};

template <class T, class N, enum fp8_scales KIND, uint32_t GROUPS, uint32_t WIDTH, enum fp8_folds FOLDS>
static __device__ __forceinline__ void fp8_many_consume(const struct fp8_many &f, const struct output &out,
                                                        const struct fp8_many_room &room)
{
    const struct gemm_shape &s = f.gemm;
    const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const uint32_t rank = cluster_rank(), down = rank & (s.down - 1), across = rank >> s.down_log2;
    /* This block releases a stage in every block that fetches for it; lane i in the i-th. */
    uint32_t beside = lane - s.down, owner = lane + (across << s.down_log2);
    if (lane >= s.down)
        owner = down + ((beside + (beside >= across)) << s.down_log2);
    const uint32_t free_in = lane < s.down + s.across - 1 ? address_in(room.ring.empty, owner) : 0;
    struct fp8_many_worker<N, KIND, GROUPS, WIDTH, FOLDS> worker = {room, free_in, warp / 4, warp * 16 + lane / 4, {}, 0, {}};
    struct ring_place at = RING_READ;
    struct fp8_many_sums<N, WIDTH> even = {}, odd = {};
    if (warp / 4 == GROUPS - 1)
        fp8_turns<GROUPS>{GROUPS - 1}.pass();
    for (uint32_t turn = cluster_first(); turn < s.n_clusters; turn += cluster_step()) {
        float sum[WIDTH / 2] = {};
        struct gemm_place place = gemm_place_of(s, turn, GROUPS * 64, WIDTH, down, across);
        if (KIND == SHARED || KIND == SHARED_PAIRS)
            worker.begin_tile(f, place.column, out.n_out << s.is_product);
        worker.sum_tile(sum, even, odd, at, s.n_blocks);
        uint32_t row = place.row + warp * 16;
        wait_for_input(); /* before reading the rows that the sums are added to; x has waited already */
        if (out.bias)
            add_bias(sum, out, s.is_product, place.column);
        if (out.delta)
            add_delta(sum, out, s.is_product, row, place.column);
        if (out.is_float)
            store_floats(sum, out, s.is_wide, row, place.column);
        else {
            const uint32_t piece = room.pieces + warp * 16 * gemm_pitch(64), rest = WIDTH % 64;
#pragma unroll
            for (uint32_t i = 0; i + 64 <= WIDTH; i += 64) /* in turn, so that results take little of the room of stages */
                store_lines<T>(*(const float(*)[32])(sum + i / 2), out, s.is_product, s.is_wide, act_product{out.act}, row,
                               place.column + i, piece);
            if constexpr (rest > 0)
                store_lines<T>(*(const float(*)[rest / 2])(sum + (WIDTH - rest) / 2), out, s.is_product, s.is_wide,
                               act_product{out.act}, row, place.column + WIDTH - rest, piece);
        }
    }
}

template <class T, class N, enum fp8_scales KIND, uint32_t GROUPS, uint32_t WIDTH, enum fp8_folds FOLDS>
static __global__ void __launch_bounds__((GROUPS + 1) * 128, 1)
linear_fp8_many(const __grid_constant__ struct fp8_maps maps, const __grid_constant__ struct fp8_many f,
                const __grid_constant__ struct output out)
{
    only_sm_90a();
    extern __shared__ __align__(1024) uint8_t shared[];
    const struct fp8_many_room room = fp8_many_place<KIND, GROUPS, WIDTH>(shared_address(shared));
    const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    start_next();
    room.ring.make_barriers(2, GROUPS * 4 * (f.gemm.down + f.gemm.across - 1));
    barriers_made();
    cluster_meet();
    if (warp >= GROUPS * 4) {
        if (GROUPS > 1)
            asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (warp < GROUPS * 4 + 2 && threadIdx.x % 32 == 0)
            fp8_many_load<KIND, GROUPS, WIDTH>(maps, f, out, room, warp == GROUPS * 4);
    } else {
        if (GROUPS > 1)
            asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        fp8_many_consume<T, N, KIND, GROUPS, WIDTH, FOLDS>(f, out, room);
    }
}

/* ---- the host's side ----------------------------------------------------------------------------------------------------- */

typedef void (*fp8_many_kernel)(struct fp8_maps, struct fp8_many, struct output);

/* Tiles of 64 * groups rows of x by width rows of W. */
struct fp8_many_form {
    uint32_t groups, width;
    fp8_many_kernel kernels[2][2][4]; /* of bfloat16 or float16; of e4m3 or s8; by enum fp8_scales */
    fp8_many_kernel kernel(uint32_t dtype, uint32_t numbers, enum fp8_scales kind) const
    {
        return kernels[dtype == DTYPE_F16][numbers == DTYPE_INT8_G128][kind];
    }
};
/* The kernel of a kind of scales; NULL: tiles of this width do not begin on rows that share them. 128 rows by 128 leave no
 * registers for the scales of rows. Signed bytes are converted, too, so that folding binds: together they are read once. */
template <class T, class N, enum fp8_scales KIND, uint32_t GROUPS, uint32_t WIDTH>
static constexpr fp8_many_kernel fp8_many_of(void)
{
    constexpr bool is_full = GROUPS == 2 && WIDTH == 128;
    if constexpr (KIND == EACH_ROW || (KIND == OF_ROWS && is_full))
        return linear_fp8_many<T, N, EACH_ROW, GROUPS, WIDTH, is_full && N::largest == 127 ? JOINTLY : IN_PAIRS>;
    else if constexpr (KIND == OF_ROWS || WIDTH % FP8_SHARED == 0)
        return linear_fp8_many<T, N, KIND, GROUPS, WIDTH, IN_PAIRS>;
    else
        return NULL;
}
#define FP8_KINDS(type, numbers, groups, width)                                                                               \
    {fp8_many_of<type, numbers, EACH_ROW, groups, width>(), fp8_many_of<type, numbers, SHARED, groups, width>(),              \
     fp8_many_of<type, numbers, SHARED_PAIRS, groups, width>(), fp8_many_of<type, numbers, OF_ROWS, groups, width>()}
#define FP8_NUMBERS(type, groups, width) {FP8_KINDS(type, e4m3, groups, width), FP8_KINDS(type, s8, groups, width)}
#define FP8_FORM(groups, width) {groups, width, {FP8_NUMBERS(__nv_bfloat16, groups, width), FP8_NUMBERS(__half, groups, width)}}
static const struct fp8_many_form FP8_FORMS[] = {FP8_FORM(1, 64), FP8_FORM(1, 128), FP8_FORM(2, 64), FP8_FORM(2, 96),
                                                 FP8_FORM(2, 128)};
#undef FP8_FORM
#undef FP8_NUMBERS
#undef FP8_KINDS
static const struct gemm_cluster FP8_CLUSTERS[] = {{1, 1}, {2, 1}, {1, 2}}; /* clusters of four blocks are slower */

static cudaError_t fp8_many_open(uint32_t dtype)
{
    cudaError_t code = cudaSuccess;
    for (const struct fp8_many_form &form : FP8_FORMS)
        for (const auto &kernels : form.kernels[dtype == DTYPE_F16])
            for (const fp8_many_kernel kernel : kernels)
                code = code || !kernel ? code : allow_shared(kernel);
    return code;
}

/* Microseconds of a slab of a tile, for each row of W and 64 rows of x. */
static float fp8_many_rate(enum fp8_scales kind, uint32_t groups, uint32_t width)
{
    const float each = kind == EACH_ROW && groups * width < 256 ? 1.1f : 1;
    return each * (groups == 2 ? (width == 64 ? 2.1e-3f : 1.92e-3f) : width == 64 ? 3.3e-3f : 2.3e-3f);
}

/* Microseconds of a product, as gemm_cost. */
static float fp8_many_cost(const struct gemm_device *device, const struct fp8_many_form *form,
                           const struct gemm_cluster *cluster, enum fp8_scales kind, uint32_t n_rows, uint32_t n_out,
                           uint32_t n_slabs)
{
    uint32_t tile_rows = form->groups * 64, n_tiles = cluster->down * cluster->across, n_fit = device->n_clusters[n_tiles];
    uint32_t n_clusters = ceil_div(n_rows, tile_rows * cluster->down) * ceil_div(n_out, form->width * cluster->across);
    float n_blocks = (float)(min(n_clusters, n_fit) * n_tiles), area = (float)(form->groups * form->width);
    float own_rows = (float)tile_rows / cluster->across + (float)form->width / cluster->down;
    float multiply = area * fp8_many_rate(kind, form->groups, form->width);
    float fetch = own_rows * n_blocks * 128 / 9.6e6f + (tile_rows + form->width) * 1.17e-4f;
    float slab = fmaxf(multiply, fetch) + 0.14f * fminf(multiply, fetch);
    float tiles = 1.94f + 0.2f * n_tiles + ceil_div(n_clusters, n_fit) * (n_slabs * slab + area * 1.24e-3f);
    float bytes = 2.48f + (float)n_out * n_slabs * FP8_SLAB / 4.03e6f;
    return fmaxf(tiles, bytes) + 0.112f * fminf(tiles, bytes);
}

static enum fp8_scales fp8_kind_of(const struct matrix *matrix, bool is_product)
{
    if (matrix->fp8->is_of_rows)
        return OF_ROWS;
    if (!matrix->fp8->is_shared || (is_product && matrix->n_rows % (2 * FP8_SHARED)))
        return EACH_ROW;
    return is_product ? SHARED_PAIRS : SHARED;
}

/* The best tiles and clusters for a product. */
static void fp8_many_choose(const struct fp8_product &p, const struct gemm_device *device, const struct fp8_many_form **form,
                            const struct gemm_cluster **cluster)
{
    const enum fp8_scales kind = fp8_kind_of(p.matrix, p.is_product);
    const uint32_t n_slabs = fp8_slabs(p.matrix->n_cols), n_weights = p.out.n_out << p.is_product;
    float least = INFINITY;
    for (const struct fp8_many_form &f : FP8_FORMS)
        for (const struct gemm_cluster &c : FP8_CLUSTERS) {
            if (!f.kernel(p.cuda->dtype, p.matrix->parts[0].dtype, kind) || !device->n_clusters[c.down * c.across] ||
                (c.down > 1 && p.out.n_rows <= f.groups * 64))
                continue;
            const float cost = fp8_many_cost(device, &f, &c, kind, p.out.n_rows, n_weights, n_slabs);
            if (cost < least) {
                least = cost;
                *form = &f;
                *cluster = &c;
            }
        }
}

/* ---- shared scales ------------------------------------------------------------------------------------------------------- */

/* Sets differs[0] where scales of a slab differ among 64 rows, and differs[1] where those of a row do. Blocks: [rows]. */
static __global__ void linear_fp8_compare(const char *w, size_t row_bytes, uint32_t n_slabs, uint32_t *differs)
{
    const uint32_t row = blockIdx.x, first = row / FP8_SHARED * FP8_SHARED;
    const uint32_t *own = (const uint32_t *)(w + row * row_bytes), *shared = (const uint32_t *)(w + first * row_bytes);
    for (uint32_t slab = threadIdx.x; slab < n_slabs; slab += blockDim.x) {
        if (own[-1 - (int)slab] != shared[-1 - (int)slab])
            differs[0] = 1;
        if (own[-1 - (int)slab] != own[-1])
            differs[1] = 1;
    }
}

/* Finds out which matrices have shared scales, of those that have been written since the last call. Sets *is_stale if one
 * differs from what it was then. Blocks of 128 by 128 that happen to have one scale in a row are shared ones. Runs outside of a
 * step. */
enum rc fp8_compare_scales(struct cuda *cuda, struct fp8_matrix *first, bool *is_stale, struct err *err)
{
    uint32_t n = 0, i = 0, *flags = NULL;
    for (struct fp8_matrix *fp8 = first; fp8; fp8 = fp8->next)
        n += !fp8->is_compared;
    if (!n)
        return RC_OK;
    const size_t size_bytes = n * 2 * sizeof *flags;
    uint32_t *differs = (uint32_t *)mem_calloc(1, size_bytes);
    enum rc rc = differs ? cuda_take(cuda, MEMORY_WORK, size_bytes, &flags, err)
                         : err_set(err, RC_MEMORY, "cuda: no memory to compare scales");
    cudaError_t code = rc ? cudaSuccess : cudaMemsetAsync(flags, 0, size_bytes, cuda->stream);
    for (struct fp8_matrix *fp8 = first; fp8 && !rc; fp8 = fp8->next)
        if (!fp8->is_compared) {
            const struct matrix *matrix = fp8->matrix;
            linear_fp8_compare<<<matrix->n_rows, 128, 0, cuda->stream>>>(matrix->parts[0].data, matrix->parts[0].row_bytes,
                                                                         fp8_slabs(matrix->n_cols), flags + 2 * i++);
        }
    if (!rc) {
        code = code ? code : cudaMemcpyAsync(differs, flags, size_bytes, cudaMemcpyDeviceToHost, cuda->stream);
        code = code ? code : cudaStreamSynchronize(cuda->stream);
        rc = code == cudaSuccess ? RC_OK : cuda_fail(err, code, "compare scales");
    }
    i = 0;
    for (struct fp8_matrix *fp8 = first; fp8 && !rc; fp8 = fp8->next)
        if (!fp8->is_compared) {
            fp8->is_shared = !differs[2 * i];
            fp8->is_of_rows = !fp8->is_shared && !differs[2 * i + 1];
            const uint32_t now = fp8->is_shared | fp8->is_of_rows << 1;
            *is_stale |= now != fp8->was;
            fp8->was = now;
            fp8->is_compared = true;
            i++;
        }
    cuda_give(cuda, flags);
    mem_free(differs);
    return rc;
}

/* ---- a product ----------------------------------------------------------------------------------------------------------- */

static enum rc fp8_many_launch(const struct cuda *cuda, map_encoder encode, const struct gemm_device *device,
                               const struct matrix *matrix, const struct fp8_rows &x, bool is_product,
                               const struct output &out, const struct fp8_many_form *form,
                               const struct gemm_cluster *cluster, struct err *err)
{
    const struct cuda_part *part = &matrix->parts[0];
    const uint32_t n_slabs = fp8_slabs(matrix->n_cols), n_weights = out.n_out << is_product;
    struct fp8_many f = {};
    f.gemm = gemm_shape_of({form->groups * 64, form->width}, *cluster, n_slabs, is_product, out);
    f.n_chunks = part->lead_bytes / 16;
    f.n_padded = x.n_padded;
    f.x_scales = x.scales;
    f.w = part->data;
    f.w_row_bytes = part->row_bytes;
    struct fp8_maps maps;
    /* The scales of a slice begin on a multiple of 128 bytes, those of eight rows. */
    enum rc rc = gemm_map(cuda, encode, part->data, part->row_bytes, n_weights, n_slabs, is_product, form->width, cluster->down,
                          &maps.gemm.w, &maps.gemm.w_edge, &f.gemm.w_edge_rows, err, 8);
    if (!rc)
        rc = gemm_map(cuda, encode, x.numbers, x.row_bytes, out.n_rows, n_slabs, false, form->groups * 64, cluster->across,
                      &maps.gemm.x, &maps.gemm.x_edge, &f.gemm.x_edge_rows, err);
    for (uint32_t i = 0; i < 2 && !rc; i++) {
        struct tensor_map made;
        rc = fp8_scale_map(encode, cuda->dtype, part->data - part->lead_bytes, part->row_bytes, n_weights, f.n_chunks,
                           is_product, i ? f.gemm.w_edge_rows : f.gemm.w_box_rows, &made, err);
        if (!rc)
            *(i ? &maps.scales_edge : &maps.scales) = map_of(&made);
    }
    if (rc)
        return rc;
    const uint32_t n_tiles = cluster->down * cluster->across;
    launch_clusters(cuda, form->kernel(cuda->dtype, part->dtype, fp8_kind_of(matrix, is_product)),
                    dim3(min(f.gemm.n_clusters, device->n_clusters[n_tiles]) * n_tiles), n_tiles, (form->groups + 1) * 128,
                    SHARED_BYTES, maps, f, out);
    return RC_OK;
}

enum rc fp8_many_multiply(const struct fp8_product &p, map_encoder encode, const struct gemm_device *device,
                          const struct fp8_rows &x, struct err *err)
{
    const struct fp8_many_form *form = NULL;
    const struct gemm_cluster *cluster = NULL;
    fp8_many_choose(p, device, &form, &cluster);
    return fp8_many_launch(p.cuda, encode, device, p.matrix, x, p.is_product, p.out, form, cluster, err);
}

#endif
