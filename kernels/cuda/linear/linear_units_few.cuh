/* linear_units_few.cuh: the linears of linear_units.cuh for 1 to 16 rows of x. A block owns tiles of two or three panels of W.
 * A stage is eight slabs of a tile, and each warp multiplies one unit of it, by mma.sync. Two stages make a turn. What a warp
 * has summed in a turn goes through shared memory to the threads that own outputs. They add it in order while the next turn is
 * multiplied. One more warp streams W, one x.
 *
 * Bound by instructions: unpacking 8 weights of 4 bits takes 11, a processor issues those of 18 bytes of W a cycle at 70 % of
 * its rate. 28672 x 4096 takes 21 us on an H200, its bytes 14. */
#ifndef LLMPY_CUDA_LINEAR_UNITS_FEW_CUH
#define LLMPY_CUDA_LINEAR_UNITS_FEW_CUH

#include "../core/tensor_map.cuh"
#include "activation.cuh"
#include "linear_units.cuh"

#define UNITS_SLABS 8u       /* of a stage */
#define UNITS_TURN_STAGES 2u /* the rings have whole turns */
#define UNITS_TURN_SLABS (UNITS_SLABS * UNITS_TURN_STAGES)
#define UNITS_X_BLOCKS (2 * UNITS_SLABS) /* a stage of x, in blocks of 64 columns */
#define UNITS_MAX_STAGES 16u
#define UNITS_AHEAD_BYTES (64u << 10) /* of W under way at most until x has come */
#define UNITS_HELD_BYTES (36u << 10)  /* the same of a block's only tile that its shared memory holds: there in time */

struct units_few {
    struct matrix_units w;
    uint32_t n_tiles, x_rows; /* x_rows: that are fetched */
    uint32_t w_stages, x_stages, n_ahead;
    bool x_stays; /* all of x fits: it is fetched once for all tiles */
    bool is_product;
};

static constexpr __host__ __device__ uint32_t units_few_threads(uint32_t panels)
{
    return UNITS_SLABS * panels * 32;
}

/* Sums of a slab of a tile. */
static constexpr __host__ __device__ uint32_t units_few_sums(uint32_t eights, uint32_t panels)
{
    return panels * eights * 128;
}

static constexpr __host__ __device__ uint32_t units_few_stage_bytes(uint32_t dtype, uint32_t panels)
{
    return panels * UNITS_SLABS * unit_bytes(dtype);
}

/* Bytes of two turns: sums, and scales of groups of 128. */
static constexpr __host__ __device__ uint32_t units_few_turns_bytes(uint32_t dtype, uint32_t eights, uint32_t panels)
{
    const uint32_t scales = unit_groups(dtype) == 1 ? panels * 16 : 0;
    return 2 * UNITS_TURN_SLABS * (units_few_sums(eights, panels) + scales) * 4;
}

/* A block's shared memory. x comes first, on a multiple of 1024 bytes. given: a turn's sums are there. taken: they have been
 * added. */
struct units_few_room {
    struct ring x, w;
    uint32_t sums, scales, given, taken;
};

template <uint32_t DTYPE, uint32_t EIGHTS, uint32_t PANELS>
static __device__ __forceinline__ struct units_few_room units_few_place(uint32_t shared, const struct units_few &f)
{
    const uint32_t w_bytes = units_few_stage_bytes(DTYPE, PANELS), x_bytes = f.x_rows * UNITS_X_BLOCKS * 128;
    struct units_few_room room;
    const uint32_t w_data = shared + f.x_stages * x_bytes;
    room.sums = w_data + f.w_stages * w_bytes;
    room.scales = room.sums + 2 * UNITS_TURN_SLABS * units_few_sums(EIGHTS, PANELS) * 4;
    const uint32_t w_full = room.sums + units_few_turns_bytes(DTYPE, EIGHTS, PANELS), w_empty = w_full + 8 * f.w_stages;
    const uint32_t x_full = w_empty + 8 * f.w_stages, x_empty = x_full + 8 * f.x_stages;
    room.w = {w_data, w_full, w_empty, f.w_stages, w_bytes};
    room.x = {shared, x_full, x_empty, f.x_stages, x_bytes};
    room.given = x_empty + 8 * f.x_stages;
    room.taken = room.given + 8;
    return room;
}

/* A barrier of the room by its number: those that a fetching thread fills count one arrival. */
static __device__ __forceinline__ void units_few_barrier(const struct units_few_room &room, const struct units_few &f,
                                                         uint32_t i, uint32_t n_warps)
{
    const uint32_t from_x = i - 2 * f.w_stages;
    const bool is_filled = i < f.w_stages || (i >= 2 * f.w_stages && from_x < f.x_stages);
    barrier_init(room.w.full + 8 * i, is_filled ? 1 : n_warps);
}

/* One thread streams W. The ring's first stages need no wait; of a turn's stages some may be beyond the last slab. */
template <uint32_t DTYPE, uint32_t PANELS> struct units_few_weights {
    const struct units_few &f;
    const struct units_few_room &room;
    uint64_t policy;
    uint32_t n_asked, tile, slab, last_slab; /* last_slab: the first one behind a tile's turns */

    __device__ __forceinline__ bool has_more(void) const { return tile < f.n_tiles; }
    __device__ __forceinline__ void ask(uint32_t stage)
    {
        const uint32_t full = room.w.full + 8 * stage, to = room.w.data + stage * room.w.stage_bytes;
        if (slab >= f.w.n_slabs) {
            barrier_arrive(full);
        } else {
            const uint32_t n_bytes = min(UNITS_SLABS, f.w.n_slabs - slab) * unit_bytes(DTYPE);
            barrier_expect(full, PANELS * n_bytes);
#pragma unroll
            for (uint32_t i = 0; i < PANELS; i++) {
                const uint32_t panel = min(tile * PANELS + i, f.w.n_panels() - 1);
                copy_bytes(to + i * UNITS_SLABS * unit_bytes(DTYPE),
                           f.w.data + ((size_t)panel * f.w.n_slabs + slab) * unit_bytes(DTYPE), n_bytes, full, policy);
            }
        }
        n_asked++;
        slab += UNITS_SLABS;
        if (slab == last_slab) {
            slab = 0;
            tile += gridDim.x;
        }
    }
    /* Before the block has met: a barrier takes some 65 cycles to make, so each stage is asked for behind its own. */
    __device__ __forceinline__ void begin(uint32_t n_early)
    {
        start_next();
        while (n_asked < n_early) {
            barrier_init(room.w.full + 8 * n_asked, 1);
            barriers_made();
            shared_written();
            ask(n_asked);
        }
    }
    __device__ __forceinline__ void stream(void)
    {
        struct ring_place at = {n_asked % f.w_stages, n_asked == f.w_stages ? 0u : 1u}, there = RING_READ;
        bool is_paced = true;
        while (has_more()) {
            is_paced = is_paced && n_asked < f.w_stages && !barrier_test(room.x.full, 0);
            if (is_paced) {
                room.w.wait_full(there);
                room.w.next(there);
            }
            room.w.wait_empty(at);
            ask(at.stage);
            room.w.next(at);
        }
    }
};

static __device__ __forceinline__ void units_few_load_x(const CUtensorMap *map, const struct units_few &f,
                                                        const struct units_few_room &room, uint32_t n_tiles, uint32_t last_slab)
{
    struct ring_place at = RING_FETCH;
    map_prefetch(map);
    wait_for_input();
    for (uint32_t i = 0; i < (f.x_stays ? 1 : n_tiles); i++)
        for (uint32_t slab = 0; slab < last_slab; slab += UNITS_SLABS, room.x.next(at)) {
            room.x.wait_empty(at);
            if (slab >= f.w.n_slabs) {
                barrier_arrive(room.x.full_of(at));
                continue;
            }
            barrier_expect(room.x.full_of(at), room.x.stage_bytes);
            copy_box(room.x.data_of(at), map, 0, slab * 2, room.x.full_of(at));
        }
}

/* The output that a thread owns. A slab's sums lie as [panel][eight][chunk][lane]: chunk 2 c + b and lane 16 (a ^ c) + d have
 * register 2 a + b of lane 16 c + d. So a row of the first half and its row of the second are 16 lanes apart. */
struct units_owned {
    uint32_t panel, r, x_row;
    bool is_second;
    __device__ __forceinline__ explicit units_owned(uint32_t eights)
    {
        const uint32_t chunk = threadIdx.x / 32 % 4, c = chunk / 2, b = chunk % 2, lane = threadIdx.x % 32, d = lane % 16;
        is_second = lane / 16 != c;
        panel = threadIdx.x / (eights * 128);
        r = 8 * is_second + 4 * c + d / 4;
        x_row = threadIdx.x / 128 % eights * 8 + 2 * (d % 4) + b;
    }
};

template <uint32_t DTYPE, uint32_t EIGHTS, uint32_t PANELS> struct units_few_worker {
    static const uint32_t n_sums = units_few_sums(EIGHTS, PANELS), groups = unit_groups(DTYPE);
    typedef unit_reader<DTYPE> reader;
    const struct units_few &f;
    const struct output &out;
    const struct units_few_room &room;
    struct units_owned own;
    uint32_t unit, x_at[2], to[2], from, scale_at; /* addresses: of this warp's unit in the first stage, ... */
    uint32_t tile, n_taken;                        /* turns of the tile that have been added */
    float sum;

    __device__ __forceinline__ units_few_worker(const struct units_few &few, const struct output &o,
                                                const struct units_few_room &place)
        : f(few), out(o), room(place), own(EIGHTS), tile(blockIdx.x), n_taken(0), sum(0)
    {
        const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, slab = warp % UNITS_SLABS, panel = warp / UNITS_SLABS;
        const uint32_t c = lane / 16, first = slab * n_sums + panel * EIGHTS * 128 + 64 * c + lane % 16;
        unit = room.w.data + (panel * UNITS_SLABS + slab) * unit_bytes(DTYPE);
        to[0] = room.sums + (first + 16 * c) * 4;
        to[1] = room.sums + (first + 16 * (c ^ 1)) * 4;
        from = room.sums + threadIdx.x * 4;
        scale_at = room.scales + (own.panel * 16 + own.r) * 4;
        for (uint32_t i = 0; i < 2; i++) { /* row lane % 8 of matrix lane / 8, of 32 columns; the rows that exist */
            const uint32_t line = (2 * slab + i) * f.x_rows + min(lane % 8, f.x_rows - 1);
            x_at[i] = room.x.data + line * 128 + ((lane / 8 ^ line % 8) << 4);
            asm volatile("" : "+r"(x_at[i]), "+r"(to[i]));
        }
        asm volatile("" : "+r"(unit), "+r"(from), "+r"(scale_at));
    }
    /* Has this thread an output? True for whole warps. */
    __device__ __forceinline__ bool owns(void) const { return threadIdx.x < n_sums; }

    /* x of four steps of a unit. */
    __device__ __forceinline__ void load_x(uint32_t (&b)[2][EIGHTS][4], uint32_t half, uint32_t x_offset) const
    {
#pragma unroll
        for (uint32_t i = 0; i < 2; i++)
#pragma unroll
            for (uint32_t j = 0; j < EIGHTS; j++)
                load_matrices(b[i][j], (i ? x_at[half] ^ 64 : x_at[half]) + x_offset + j * 1024);
    }
    /* Adds a group's sums of x times the numbers, and of x, and begins new ones. */
    __device__ __forceinline__ void end_group(float (&v)[EIGHTS][4], float (&p)[EIGHTS][4], float (&total)[EIGHTS][4],
                                              const reader &w) const
    {
        const float low = w.scale(false), high = w.scale(true), first = -w.minimum(false), second = -w.minimum(true);
#pragma unroll
        for (uint32_t j = 0; j < EIGHTS; j++) {
            units_add(v[j], p[j], low, high);
            if (reader::has_minima)
                units_add(v[j], total[j], first, second);
#pragma unroll
            for (uint32_t q = 0; q < 4; q++)
                p[j][q] = total[j][q] = 0;
        }
    }
    /* This warp's units of both stages, step by step in turn. p: sums of groups of 128; v: of smaller groups, scaled. */
    __device__ __forceinline__ void multiply(float (&p)[2][EIGHTS][4], float (&v)[2][EIGHTS][4], uint32_t w_at,
                                             uint32_t x_offset) const
    {
        reader w[2];
        float total[2][EIGHTS][4] = {};
        uint32_t ones[4];
        units_ones(ones);
#pragma unroll
        for (uint32_t s = 0; s < 2; s++)
            w[s].begin(w_at + s * room.w.stage_bytes);
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            uint32_t b[2][2][EIGHTS][4];
#pragma unroll
            for (uint32_t s = 0; s < 2; s++) {
                w[s].load(w_at + s * room.w.stage_bytes, half);
                load_x(b[s], half, x_offset + s * room.x.stage_bytes);
            }
#pragma unroll
            for (uint32_t i = 0; i < 4; i++)
#pragma unroll
                for (uint32_t s = 0; s < 2; s++) {
                    const uint32_t step = half * 4 + i;
                    uint32_t a[4];
                    if (step * groups % 8 == 0)
                        w[s].enter(w_at + s * room.w.stage_bytes, step * groups / 8);
                    w[s].unpack(i, a);
#pragma unroll
                    for (uint32_t j = 0; j < EIGHTS; j++) {
                        const uint32_t both[2] = {b[s][i / 2][j][i % 2 * 2], b[s][i / 2][j][i % 2 * 2 + 1]};
                        mma(p[s][j], a, both, __nv_bfloat16());
                        if (reader::has_minima)
                            mma(total[s][j], ones, both, __nv_bfloat16());
                    }
                    if (groups > 1 && (step + 1) * groups % 8 == 0)
                        end_group(v[s], p[s], total[s], w[s]);
                }
        }
    }
    /* Hands on the sums of a turn. */
    __device__ __forceinline__ void give(const float (&p)[2][EIGHTS][4], const uint32_t (&headers)[2], uint32_t turn) const
    {
        const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, offset = turn % 2 * UNITS_TURN_SLABS;
#pragma unroll
        for (uint32_t s = 0; s < 2; s++) {
#pragma unroll
            for (uint32_t j = 0; j < EIGHTS; j++)
#pragma unroll
                for (uint32_t q = 0; q < 4; q++)
                    store_float(to[q / 2] + ((offset + s * UNITS_SLABS) * n_sums + j * 128 + q % 2 * 32) * 4, p[s][j][q]);
            const uint32_t slab = offset + s * UNITS_SLABS + warp % UNITS_SLABS;
            if constexpr (groups == 1)
                if (lane < 16)
                    store_float(room.scales + (slab * PANELS * 16 + warp / UNITS_SLABS * 16 + lane) * 4,
                                reader::scale_of(headers[s]));
        }
        __syncwarp();
        if (lane == 0)
            barrier_arrive(room.given);
    }
    __device__ __forceinline__ void add_slab(uint32_t from_turn, uint32_t scales, uint32_t i)
    {
        const float p = load_float(from_turn + i * n_sums * 4);
        sum = groups == 1 ? fmaf(p, load_float(scales + i * PANELS * 64), sum) : sum + p;
    }
    /* Adds the n_slabs slabs of a turn to the output of this thread. */
    __device__ __forceinline__ void take(uint32_t turn, uint32_t n_slabs)
    {
        const uint32_t offset = turn % 2 * UNITS_TURN_SLABS;
        barrier_wait(room.given, turn % 2);
        if (owns()) {
            const uint32_t from_turn = from + offset * n_sums * 4, scales = scale_at + offset * PANELS * 64;
            if (n_slabs >= UNITS_TURN_SLABS)
#pragma unroll
                for (uint32_t i = 0; i < UNITS_TURN_SLABS; i++)
                    add_slab(from_turn, scales, i);
            else
                for (uint32_t i = 0; i < n_slabs; i++)
                    add_slab(from_turn, scales, i);
        }
        if (turn)
            barrier_wait(room.taken, (turn - 1) % 2);
        __syncwarp();
        if (threadIdx.x % 32 == 0)
            barrier_arrive(room.taken);
    }
    /* Stores a finished output. */
    __device__ __forceinline__ void store(void)
    {
        const uint32_t panel = tile * PANELS + own.panel;
        if (!owns())
            return;
        if (!f.is_product) {
            if (panel < f.w.n_panels())
                put<__nv_bfloat16, false>(out, own.x_row, f.w.row_of(panel, own.r), sum);
        } else {
            const uint32_t n = panel * 8 + own.r % 8;
            if (out.bias && n < out.n_out)
                sum += out.bias[n + (own.is_second ? out.n_out : 0)];
            const float value = to_float(__float2bfloat16_rn(sum)), up = __shfl_xor_sync(~0u, value, 16);
            if (!own.is_second && n < out.n_out && own.x_row < out.n_rows)
                ((__nv_bfloat16 *)out.y)[(size_t)own.x_row * out.y_stride + n] =
                    __float2bfloat16_rn(act_value(value, out.act) * up);
        }
        sum = 0;
    }
    /* Multiplies all tiles. A tile has n_turns turns, the last of them rest slabs. */
    __device__ __forceinline__ void run(uint32_t n_tiles, uint32_t n_turns)
    {
        const uint32_t rest = f.w.n_slabs - (n_turns - 1) * UNITS_TURN_SLABS, lane = threadIdx.x % 32, n = n_tiles * n_turns;
        struct ring_place w_at = RING_READ, x_from = RING_READ;
        for (uint32_t turn = 0; turn < n; turn++) {
            float p[2][EIGHTS][4] = {}, v[2][EIGHTS][4] = {};
            uint32_t headers[2] = {};
            for (uint32_t s = 0; s < UNITS_TURN_STAGES; s++) {
                barrier_wait(room.w.full + 8 * (w_at.stage + s), w_at.phase);
                barrier_wait(room.x.full + 8 * (x_from.stage + s), x_from.phase);
            }
            const uint32_t w_now = unit + w_at.stage * room.w.stage_bytes;
            multiply(p, v, w_now, x_from.stage * room.x.stage_bytes);
            for (uint32_t s = 0; s < 2 && groups == 1; s++)
                headers[s] = load_word(w_now + s * room.w.stage_bytes + unit_numbers_bytes(DTYPE) + lane % 16 * 4);
            __syncwarp();
            if (lane < UNITS_TURN_STAGES) {
                room.w.release(w_at.stage + lane);
                if (!f.x_stays)
                    room.x.release(x_from.stage + lane);
            }
            if (turn)
                end_turn(turn - 1, n_turns, rest);
            give(groups == 1 ? p : v, headers, turn);
            w_at.stage += UNITS_TURN_STAGES - 1;
            room.w.next(w_at);
            x_from.stage += UNITS_TURN_STAGES - 1;
            room.x.next(x_from);
            if (f.x_stays)
                x_from.phase = 0;
        }
        end_turn(n - 1, n_turns, rest);
    }
    /* Adds a turn, and stores the tile that it ends. */
    __device__ __forceinline__ void end_turn(uint32_t turn, uint32_t n_turns, uint32_t rest)
    {
        const bool is_last = ++n_taken == n_turns;
        take(turn, is_last ? rest : UNITS_TURN_SLABS);
        if (!is_last)
            return;
        store();
        tile += gridDim.x;
        n_taken = 0;
    }
};

template <uint32_t DTYPE, uint32_t EIGHTS, uint32_t PANELS>
static __global__ void __launch_bounds__(units_few_threads(PANELS) + 64, 1)
linear_units_few(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ struct units_few f,
                 const __grid_constant__ struct output out)
{
    only_sm_90a();
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, n_warps = UNITS_SLABS * PANELS;
    const struct units_few_room room = units_few_place<DTYPE, EIGHTS, PANELS>(shared_address(shared), f);
    const uint32_t n_tiles = (f.n_tiles - blockIdx.x + gridDim.x - 1) / gridDim.x;
    const uint32_t n_turns = (f.w.n_slabs + UNITS_TURN_SLABS - 1) / UNITS_TURN_SLABS, last_slab = n_turns * UNITS_TURN_SLABS;
    const uint32_t n_early = min(f.n_ahead, n_tiles * n_turns * UNITS_TURN_STAGES);
    struct units_few_weights<DTYPE, PANELS> weights = {
        f, room, policy_read_once(), 0, blockIdx.x, 0, last_slab
    };
    if (lane == 0) {
        if (warp == n_warps)
            weights.begin(n_early);
        else
            for (uint32_t i = n_early + min(warp, n_warps); i < 2 * (f.w_stages + f.x_stages) + 2; i += n_warps + 1)
                units_few_barrier(room, f, i, n_warps);
        barriers_made();
    }
    __syncthreads();
    if (warp >= n_warps) {
        if (warp == n_warps && lane == 0)
            weights.stream();
        if (warp > n_warps && lane == 0)
            units_few_load_x(&x_map, f, room, n_tiles, last_slab);
        return;
    }
    wait_for_input();
    units_few_worker<DTYPE, EIGHTS, PANELS>(f, out, room).run(n_tiles, n_turns);
}

/* ---- the host's side ----------------------------------------------------------------------------------------------------- */

typedef void (*units_few_kernel)(CUtensorMap, struct units_few, struct output);

/* Panels of a tile at most: three of other types take more registers or stages than a block has. */
static constexpr uint32_t units_few_most_panels(uint32_t dtype)
{
    return unit_type_of(dtype).bits == 4 && dtype != DTYPE_Q4_K ? 3 : 2;
}

static inline units_few_kernel units_few_of(uint32_t dtype, uint32_t eights, uint32_t panels)
{
    units_few_kernel kernel = NULL;
    visit_unit_type(dtype, [&](auto type) {
        constexpr uint32_t most = units_few_most_panels(type());
        if (panels < most)
            kernel = eights == 1 ? linear_units_few<type(), 1, 2> : linear_units_few<type(), 2, 2>;
        else
            kernel = eights == 1 ? linear_units_few<type(), 1, most> : linear_units_few<type(), 2, most>;
    });
    return kernel;
}

static cudaError_t units_few_open(void)
{
    cudaError_t code = cudaSuccess;
    for (uint32_t i = 0; i < 4 * N_UNIT_TYPES && code == cudaSuccess; i++)
        code = allow_shared(units_few_of(unit_type_at(i / 4).dtype, 1 + i % 2, 2 + i / 2 % 2));
    return code;
}

/* Panels of a tile: three where that makes the largest share of a block smaller. */
static inline uint32_t units_few_panels(uint32_t dtype, uint32_t n_panels, uint32_t n_processors)
{
    if (units_few_most_panels(dtype) == 2)
        return 2;
    const uint32_t of_two = ceil_div(ceil_div(n_panels, 2), n_processors) * 2;
    return ceil_div(ceil_div(n_panels, 3), n_processors) * 3 < of_two ? 3 : 2;
}

/* Rows of x that are fetched: of up to eight only those that exist, because the copy engine is slow at filling zeros. */
static inline uint32_t units_few_x_rows(uint32_t n_rows)
{
    return n_rows <= 8 ? n_rows : UNITS_FEW_ROWS;
}

/* Divides the shared memory into stages of x and of W. */
static inline void units_few_divide(struct units_few *f, uint32_t dtype, uint32_t eights, uint32_t panels, bool has_many_tiles)
{
    const uint32_t w_bytes = units_few_stage_bytes(dtype, panels), x_bytes = f->x_rows * UNITS_X_BLOCKS * 128;
    const uint32_t n_all = ceil_div(f->w.n_slabs, UNITS_TURN_SLABS) * UNITS_TURN_STAGES;
    const uint32_t room = SHARED_BYTES - units_few_turns_bytes(dtype, eights, panels) - 16;
    const uint32_t x_room = (eights == 2 && has_many_tiles ? 128u : 64u) << 10;
    f->x_stages = min(n_all, x_room / x_bytes / UNITS_TURN_STAGES * UNITS_TURN_STAGES);
    for (;; f->x_stages -= UNITS_TURN_STAGES) {
        f->w_stages = min(UNITS_MAX_STAGES, (room - f->x_stages * (x_bytes + 16)) / (w_bytes + 16));
        f->w_stages -= f->w_stages % UNITS_TURN_STAGES;
        if (f->x_stages == UNITS_TURN_STAGES || f->w_stages >= 2 * UNITS_TURN_STAGES)
            break;
    }
    f->x_stays = f->x_stages == n_all;
    const uint32_t ahead = !has_many_tiles && f->w_stages >= n_all ? UNITS_HELD_BYTES : UNITS_AHEAD_BYTES;
    f->n_ahead = min(f->w_stages, ahead / w_bytes > 1 ? ahead / w_bytes : 1);
}

struct units_box units_few_box(uint32_t n_rows)
{
    return {units_few_x_rows(n_rows), UNITS_X_BLOCKS};
}

void units_few_multiply(const struct cuda *cuda, const struct matrix *matrix, const struct tensor_map &x_map, bool is_product,
                        const struct output &out)
{
    const uint32_t dtype = matrix->parts[0].dtype, eights = out.n_rows <= 8 ? 1 : 2;
    struct units_few f = {};
    f.w = units_of(matrix);
    const uint32_t panels = units_few_panels(dtype, f.w.n_panels(), cuda->n_processors);
    f.n_tiles = ceil_div(f.w.n_panels(), panels);
    f.x_rows = units_few_x_rows(out.n_rows);
    f.is_product = is_product;
    const uint32_t n_rounds = ceil_div(f.n_tiles, cuda->n_processors);
    units_few_divide(&f, dtype, eights, panels, n_rounds > 1);
    launch(cuda, units_few_of(dtype, eights, panels), dim3(ceil_div(f.n_tiles, n_rounds)), units_few_threads(panels) + 64,
           SHARED_BYTES, map_of(&x_map), f, out);
}

#endif
