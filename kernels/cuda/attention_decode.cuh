/* attention_decode.cuh: attention of sequences that have one row in the step, on mma.sync with swapped operands (S^T = K Q^T,
 * O^T = V^T P^T, so that up to 8 query heads of a kv head are one narrow operand). Bound by the bytes of the keys and values:
 * 256 sequences of 1,536 tokens, 8 kv heads of 128, 1.6 GB, 354 us at 4.55 TB/s.
 *
 * Items (sequence, unit, split) are shared out by attention_share.cuh. A unit is a kv head with up to 8 * BLOCKS of its query
 * heads. Two groups of four warps take the items of a block by turns: whole units that are short, each group folding its own in
 * registers, and single splits of long ones, which the first group folds. Splits of a run that does not start at a unit's first
 * one, and a unit left unfinished, go to `partials`, and the last block to arrive folds them in order. Warp w of a group scores
 * tile w of a split, then adds a quarter of the columns over all tiles. For each group a warp streams tiles of keys and values
 * through a ring. What earlier steps wrote is fetched before the predecessor ends (unless sequences share what this step
 * writes); only the page that holds the row's own position waits for it.
 *
 * At small batches a launch is bound by latency, and a block runs most of this code once or twice: what comes for the first
 * time takes about twice as long as what comes again, so short code wins over unrolled copies. */
#ifndef LLMPY_CUDA_ATTENTION_DECODE_CUH
#define LLMPY_CUDA_ATTENTION_DECODE_CUH

#include "attention_share.cuh"
#include "mma.cuh"

#define DECODE_WORKERS 128u       /* of a group */
#define P_STRIDE (SPLIT * 2 + 16) /* bytes of a head's p, apart so that no banks collide */

struct decode_place {
    float *partials;    /* [blocks][slots][stride]: splits of a block's first unit, and last what its last unit has so far */
    uint32_t *arrivals; /* [blocks] splits that have arrived of the unit that the block began; zero between launches */
    uint32_t slots, stride, depth;
};

template <uint32_t D, uint32_t BLOCKS> struct decode_shape {
    static const uint32_t heads = 8 * BLOCKS, chunk_bytes = TILE * D * 2, steps = D / 16;
    static const uint32_t octet_bytes = D / 64 * SLAB_BYTES; /* of 8 tokens */
    static const uint32_t columns = D / 64;                  /* blocks of 16 columns of a warp */
    static const uint32_t p_bytes = heads * P_STRIDE, state_bytes = 2 * TILES * heads * 4;
    static const uint32_t mail_floats = columns * BLOCKS * 4 + BLOCKS * 4; /* of a thread: o, m, l of a split */
    static const uint32_t fixed_bytes = 2 * (p_bytes + state_bytes) + mail_floats * DECODE_WORKERS * 4 + 64 + 2 * 8;
    static const uint32_t fetch_registers = BLOCKS == 1 ? 72 : 56; /* of a thread; those that compute get what is left */
    static const uint32_t place_bytes = chunk_bytes + 3 * 8;       /* of a place in a ring and its barriers */
};

/* ---- the ring ----------------------------------------------------------------------------------------------------------- */

/* A place in a group's ring, and how often it came round. */
struct ring_place {
    uint32_t slot, round;
    __device__ ring_place after(uint32_t n, uint32_t depth) const
    {
        ring_place next = {slot + n, round};
        while (next.slot >= depth) {
            next.slot -= depth;
            next.round++;
        }
        return next;
    }
};

/* Where a group's ring lies in shared memory. A barrier tells a round from the one before, not from the one before that, and a
 * warp asks for the keys of its tile, up to the fourth chunk of a split, before it has seen the first: rounds take two barriers
 * by turns, so places for half a split's keys are enough. Every thread says itself that it is done with a place: where a lane
 * speaks for its warp behind a __syncwarp, racecheck reports the reads of the others. */
struct decode_ring {
    uint32_t data, full, empty, depth;
    __device__ __forceinline__ uint32_t full_of(struct ring_place place) const
    {
        return full + (place.round % 2 * depth + place.slot) * 8;
    }
};

/* ---- the warps that fetch ----------------------------------------------------------------------------------------------- */

template <class T, uint32_t D>
static __device__ void fetch_items(const attended<T> &x, struct decode_walk walk, const struct decode_run &run,
                                   const struct decode_ring &ring, uint32_t group, uint32_t parts)
{
    const uint32_t lane = threadIdx.x % 32, shift = x.kv.block_shift, n_pages = SPLIT >> shift, run_bytes = D * 2 << shift;
    const uint32_t tile_shift = 6 - shift, page_mask = (1 << tile_shift) - 1, chunk_bytes = TILE * D * 2;
    const uint64_t policy = policy_read_once();
    auto page = [&] {
        uint32_t p = (walk.key() >> shift) + lane, first = p << shift;
        bool is_seen = lane < n_pages && first < walk.len && first + x.kv.block_tokens > walk.seen;
        return is_seen ? x.kv.table[(size_t)walk.list[walk.seq].table_row * x.kv.table_stride + p] : -1;
    };
    struct ring_place place = {0, 0};
    uint32_t n_late = 0, late_target = 0, late_barrier = 0;
    const char *late_source = NULL;
    bool is_free = false; /* has the predecessor ended? */
    auto wait_and_fetch_late = [&] {
        wait_for_input();
        if (lane < n_late)
            copy_run(late_target, late_source, run_bytes, late_barrier, policy);
        is_free = true;
    };
    if (x.shares_new_keys)
        wait_and_fetch_late();
    struct decode_turns turns(run);
    run.start(walk);
    turns.pass_to(group, walk);
    int32_t id = turns.left ? page() : -1;
    while (turns.left) {
        const uint32_t low = walk.low_tile(), high = walk.high_tile(), own = ((walk.len - 1) >> shift) - (walk.key() >> shift);
        const char *source =
            x.kv.layer + (size_t)id * x.kv.page_bytes + (size_t)(parts == 1 ? walk.unit : walk.unit / parts) * 2 * run_bytes;
        const bool is_page = id >= 0;
        for (uint32_t values = 0; values < 2; values++) {
            if (values) {
                turns.next(walk);
                turns.pass_to(group, walk);
                if (turns.left)
                    id = page();
            }
            for (uint32_t tile = low; tile < high; tile++, place = place.after(1, ring.depth)) {
                if (!is_free && (place.round || n_late == 32))
                    wait_and_fetch_late();
                uint32_t barrier = ring.full_of(place), target = ring.data + place.slot * chunk_bytes;
                bool is_mine = is_page && lane >> tile_shift == tile;
                barrier_wait(ring.empty + place.slot * 8, (place.round & 1) ^ 1);
                uint32_t n_runs = __popc(__ballot_sync(~0u, is_mine));
                if (lane == 0)
                    barrier_expect(barrier, n_runs * run_bytes);
                __syncwarp();
                const char *from = source + values * run_bytes;
                if (is_mine && (is_free || lane != own))
                    copy_run(target + (lane & page_mask) * run_bytes, from, run_bytes, barrier, policy);
                if (!is_free && own >> tile_shift == tile) {
                    uint64_t address = __shfl_sync(~0u, (uint64_t)from, own);
                    if (lane == n_late) {
                        late_source = (const char *)address;
                        late_target = target + (own & page_mask) * run_bytes;
                        late_barrier = barrier;
                    }
                    n_late++;
                }
            }
        }
    }
    if (!is_free)
        wait_and_fetch_late();
}

/* ---- the warps that compute --------------------------------------------------------------------------------------------- */

#define MMA(ctype, type)                                                                                                       \
    static __device__ __forceinline__ void mma(float(&c)[4], const uint32_t(&a)[4], uint32_t b0, uint32_t b1, ctype)           \
    {                                                                                                                          \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"        \
                     "{%0,%1,%2,%3};"                                                                                          \
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                          \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                          \
    }
MMA(__nv_bfloat16, "bf16")
MMA(__half, "f16")
#undef MMA

/* What the workers of a block know: places in shared memory, and the lane's part in the fragments. */
template <class T, uint32_t D, uint32_t BLOCKS, bool HAS_EXTRAS> struct decode_worker {
    typedef decode_shape<D, BLOCKS> shape;
    struct decode_ring ring;
    char *p;
    float *tile_max, *tile_sum;       /* [TILES][heads] */
    uint32_t group, warp, lane, g, t; /* g = lane / 4, t = lane % 4 */
    float c, cap_factor;

    uint32_t q[shape::steps][BLOCKS][2];
    float s[4][BLOCKS][4];              /* keys 16 i + g + j / 2 * 8, heads 8 b + 2 t + j % 2 of the warp's tile */
    float o[shape::columns][BLOCKS][4]; /* columns alike */
    float a[TILES][BLOCKS][2], m[BLOCKS][2], l[BLOCKS][2];
    float slope[BLOCKS][2]; /* of heads 8 b + 2 t + j, if HAS_EXTRAS */

    __device__ __forceinline__ void wait_for(struct ring_place place)
    {
        barrier_wait(ring.full_of(place), place.round / 2 & 1);
    }

    __device__ void load_q(const T *row, uint32_t n_heads)
    {
        for (uint32_t b = 0; b < BLOCKS; b++) {
            const uint32_t *from = (const uint32_t *)(row + (size_t)(b * 8 + g) * D) + t;
            bool is_head = b * 8 + g < n_heads;
#pragma unroll
            for (uint32_t k = 0; k < shape::steps; k++) {
                q[k][b][0] = is_head ? from[k * 8] : 0;
                q[k][b][1] = is_head ? from[k * 8 + 4] : 0;
            }
        }
    }

    __device__ void load_slopes(const float *slopes, uint32_t n_heads, float factor)
    {
        for (uint32_t b = 0; b < BLOCKS; b++)
            for (uint32_t e = 0; e < 2; e++) {
                uint32_t head = b * 8 + t * 2 + e;
                slope[b][e] = slopes && head < n_heads ? slopes[head] * factor : 0;
            }
    }

    /* Adds what a key's distance from the row does; position: the row's, counted from the tile's first key. */
    __device__ void lean(int32_t position)
    {
#pragma unroll
        for (uint32_t x = 0; x < BLOCKS * 16; x++) {
            int32_t key = (int32_t)(x / 4 % 4 * 16 + g + x / 2 % 2 * 8);
            s[x / 4 % 4][x / 16][x % 4] = fmaf(slope[x / 16][x % 2], (float)(key - position), s[x / 4 % 4][x / 16][x % 4]);
        }
    }

    __device__ void cap(void)
    {
#pragma unroll
        for (uint32_t x = 0; x < BLOCKS * 16; x++)
            s[x / 4 % 4][x / 16][x % 4] = capped(s[x / 4 % 4][x / 16][x % 4], cap_factor);
    }

    __device__ void hide(int32_t seen, int32_t end)
    {
#pragma unroll
        for (uint32_t x = 0; x < BLOCKS * 16; x++) {
            int32_t key = (int32_t)(x / 4 % 4 * 16 + g + x / 2 % 2 * 8);
            if (key < seen || key >= end)
                s[x / 4 % 4][x / 16][x % 4] = MINUS_INFINITY;
        }
    }

    /* S of the warp's tile, keys outside [seen, end) of the tile hidden, and its maxima to all. */
    __device__ void score(struct ring_place place, int32_t seen, int32_t end)
    {
        const uint32_t row = lane / 8 % 2 * shape::octet_bytes + lane % 8 * 128, chunk = lane / 16, turn = lane % 8;
        uint32_t data = ring.data + place.slot * shape::chunk_bytes;
        wait_for(place);
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            for (uint32_t x = 0; x < BLOCKS * 4; x++)
                s[i][x / 4][x % 4] = 0;
#pragma unroll
        for (uint32_t k = 0; k < shape::steps; k++)
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                uint32_t keys[4];
                load_matrices(keys,
                              data + i * 2 * shape::octet_bytes + k / 4 * SLAB_BYTES + row + ((k % 4 * 2 + chunk) ^ turn) * 16);
                for (uint32_t b = 0; b < BLOCKS; b++)
                    mma(s[i][b], keys, q[k][b][0], q[k][b][1], T());
            }
        barrier_arrive(ring.empty + place.slot * 8, DECODE_WORKERS / 32);
        if (cap_factor != 0)
            cap();
        if (HAS_EXTRAS)
            lean(end - 1);
        if (seen > 0 || end < (int32_t)TILE)
            hide(seen, end);
#pragma unroll
        for (uint32_t b = 0; b < BLOCKS; b++) {
            float most[2] = {MINUS_INFINITY, MINUS_INFINITY};
#pragma unroll
            for (uint32_t x = 0; x < 16; x++)
                most[x % 2] = fmaxf(most[x % 2], s[x / 4][b][x % 4]);
            for (uint32_t apart = 4; apart < 32; apart *= 2)
                for (uint32_t e = 0; e < 2; e++)
                    most[e] = fmaxf(most[e], __shfl_xor_sync(~0u, most[e], apart));
            if (lane < 4)
                for (uint32_t e = 0; e < 2; e++)
                    tile_max[warp * shape::heads + b * 8 + t * 2 + e] = most[e];
        }
    }

    /* The p of the warp's tile for heads b and their sum, n being the maximum up to it. */
    __device__ __forceinline__ void weigh(uint32_t b, uint32_t e, float n)
    {
        float minus = -(anchor(n) * c), r[4];
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            for (uint32_t y = 0; y < 2; y++)
                s[i][b][y * 2 + e] = power_of_2(fmaf(s[i][b][y * 2 + e], c, minus));
            r[i] = s[i][b][e] + s[i][b][2 + e];
        }
        float sum = (r[0] + r[1]) + (r[2] + r[3]);
        for (uint32_t apart = 4; apart < 32; apart *= 2)
            sum = sum + __shfl_xor_sync(~0u, sum, apart);
        if (lane < 4)
            tile_sum[warp * shape::heads + b * 8 + t * 2 + e] = sum;
    }

    /* Maxima and factors of tiles [low, high); the warp's own p goes to all. */
    __device__ void soften(uint32_t low, uint32_t high)
    {
        float own[BLOCKS][2]; /* the maximum up to the warp's tile */
#pragma unroll
        for (uint32_t b = 0; b < BLOCKS; b++)
            for (uint32_t e = 0; e < 2; e++)
                m[b][e] = own[b][e] = MINUS_INFINITY;
#pragma unroll
        for (uint32_t tile = 0; tile < TILES; tile++)
            if (tile >= low && tile < high)
#pragma unroll
                for (uint32_t b = 0; b < BLOCKS; b++)
                    for (uint32_t e = 0; e < 2; e++) {
                        float n = fmaxf(m[b][e], tile_max[tile * shape::heads + b * 8 + t * 2 + e]);
                        a[tile][b][e] = rescale(m[b][e], anchor(n), c);
                        m[b][e] = n;
                        own[b][e] = tile == warp ? n : own[b][e];
                    }
        if (warp < low || warp >= high)
            return;
#pragma unroll
        for (uint32_t i = 0; i < BLOCKS * 2; i++)
            weigh(i / 2, i % 2, own[i / 2][i % 2]);
        uint32_t to = shared_address(p) + lane % 8 * P_STRIDE + warp * TILE * 2 + lane / 8 * 16;
#pragma unroll
        for (uint32_t b = 0; b < BLOCKS; b++)
            for (uint32_t i = 0; i < 4; i += 2)
                store_transposed(to + b * 8 * P_STRIDE + i * 32, pack(s[i][b][0], s[i][b][1], T()),
                                 pack(s[i][b][2], s[i][b][3], T()), pack(s[i + 1][b][0], s[i + 1][b][1], T()),
                                 pack(s[i + 1][b][2], s[i + 1][b][3], T()));
    }

    /* Adds the warp's columns of a tile's values; if it is cut, keys outside [seen, end) of the split are zeros. */
    template <bool IS_CUT> __device__ __forceinline__ void add_tile(uint32_t data, uint32_t tile, int32_t seen, int32_t end)
    {
        const uint32_t row = lane / 16 * shape::octet_bytes + lane % 8 * 128, turn = lane % 8, half = lane / 8 % 2;
#pragma unroll
        for (uint32_t k = 0; k < 4; k++) {
            uint32_t weights[BLOCKS][2], keep[2];
            for (uint32_t b = 0; b < BLOCKS; b++) {
                const uint32_t *from = (const uint32_t *)(p + (b * 8 + g) * P_STRIDE + tile * TILE * 2 + k * 32) + t;
                weights[b][0] = from[0];
                weights[b][1] = from[4];
            }
            int32_t key = (int32_t)(tile * TILE + k * 16 + t * 2);
            for (uint32_t i = 0; i < 2 && IS_CUT; i++, key += 8)
                keep[i] = (key >= seen && key < end ? 0xffffu : 0) | (key + 1 >= seen && key + 1 < end ? 0xffff0000u : 0);
#pragma unroll
            for (uint32_t f = 0; f < shape::columns; f++) {
                uint32_t column = warp * (D / 4) + f * 16, chunk = column % 64 / 8 + half, values[4];
                load_transposed(values,
                                data + k * 2 * shape::octet_bytes + column / 64 * SLAB_BYTES + row + (chunk ^ turn) * 16);
                for (uint32_t i = 0; i < 4 && IS_CUT; i++)
                    values[i] &= keep[i / 2];
                for (uint32_t b = 0; b < BLOCKS; b++)
                    mma(o[f][b], values, weights[b][0], weights[b][1], T());
            }
        }
    }

    /* o = the warp's columns of a split whose first chunk of values lies at `place`; keys outside [seen, end) are zeros. */
    __device__ void add_values(struct ring_place place, uint32_t low, uint32_t high, int32_t seen, int32_t end)
    {
#pragma unroll
        for (uint32_t b = 0; b < BLOCKS; b++) {
            l[b][0] = l[b][1] = 0;
            for (uint32_t f = 0; f < shape::columns; f++)
                for (uint32_t x = 0; x < 4; x++)
                    o[f][b][x] = 0;
        }
#pragma unroll 1
        for (uint32_t tile = 0; tile < high; tile++) {
            float factor[BLOCKS][2];
#pragma unroll
            for (uint32_t i = 0; i < BLOCKS * 2; i++) {
                factor[i / 2][i % 2] = a[0][i / 2][i % 2];
                for (uint32_t next = 1; next < TILES; next++)
                    a[next - 1][i / 2][i % 2] = a[next][i / 2][i % 2];
            }
            if (tile < low)
                continue;
#pragma unroll
            for (uint32_t b = 0; b < BLOCKS; b++) {
                for (uint32_t e = 0; e < 2; e++)
                    l[b][e] = fmaf(factor[b][e], l[b][e], tile_sum[tile * shape::heads + b * 8 + t * 2 + e]);
                for (uint32_t f = 0; f < shape::columns; f++)
                    for (uint32_t x = 0; x < 4; x++)
                        o[f][b][x] = o[f][b][x] * factor[b][x % 2];
            }
            uint32_t data = ring.data + place.slot * shape::chunk_bytes;
            wait_for(place);
            if ((int32_t)(tile * TILE) < seen || (int32_t)(tile * TILE + TILE) > end)
                add_tile<true>(data, tile, seen, end);
            else
                add_tile<false>(data, tile, seen, end);
            barrier_arrive(ring.empty + place.slot * 8, 1);
            place = place.after(1, ring.depth);
        }
    }

    /* m, l and o of a split whose first chunk lies at `place`. */
    __device__ void split(struct ring_place place, uint32_t low, uint32_t high, int32_t seen, int32_t end)
    {
        if (warp >= low && warp < high)
            score(place.after(warp - low, ring.depth), seen - (int32_t)(warp * TILE), end - (int32_t)(warp * TILE));
        meet(1 + group, DECODE_WORKERS);
        soften(low, high);
        meet(1 + group, DECODE_WORKERS);
        add_values(place.after(high - low, ring.depth), low, high, seen, end);
    }

    /* A split's sums on their way from the second group's thread to the first group's. */
    __device__ void put(float *mail) const
    {
#pragma unroll
        for (uint32_t i = 0; i < shape::columns * BLOCKS * 4; i++)
            mail[i * DECODE_WORKERS] = o[i / (BLOCKS * 4)][i / 4 % BLOCKS][i % 4];
        mail += shape::columns * BLOCKS * 4 * DECODE_WORKERS;
#pragma unroll
        for (uint32_t i = 0; i < BLOCKS * 2; i++) {
            mail[2 * i * DECODE_WORKERS] = m[i / 2][i % 2];
            mail[(2 * i + 1) * DECODE_WORKERS] = l[i / 2][i % 2];
        }
    }
    __device__ void take(const float *mail)
    {
#pragma unroll
        for (uint32_t i = 0; i < shape::columns * BLOCKS * 4; i++)
            o[i / (BLOCKS * 4)][i / 4 % BLOCKS][i % 4] = mail[i * DECODE_WORKERS];
        mail += shape::columns * BLOCKS * 4 * DECODE_WORKERS;
#pragma unroll
        for (uint32_t i = 0; i < BLOCKS * 2; i++) {
            m[i / 2][i % 2] = mail[2 * i * DECODE_WORKERS];
            l[i / 2][i % 2] = mail[(2 * i + 1) * DECODE_WORKERS];
        }
    }

    __device__ uint32_t column_of(uint32_t f, uint32_t x) const
    {
        return warp * (D / 4) + f * 16 + g + x / 2 * 8;
    }
    __device__ uint32_t head_of(uint32_t b, uint32_t x) const
    {
        return b * 8 + t * 2 + x % 2;
    }
};

/* Folds the splits of one unit, of which the blocks from `first` on have left partials, and writes its rows: by a group. */
template <class T, uint32_t D, bool HAS_EXTRAS>
static __device__ void fold_partials(const struct decode_place &place, const struct decode_shares &shares, uint32_t first,
                                     uint32_t end, uint32_t n_heads, float c, const float *sinks, T *out)
{
    const uint32_t warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, n = D / 32, ahead = 32 / n;
    for (uint32_t head = warp; head < n_heads; head += DECODE_WORKERS / 32) {
        const float *base = place.partials + head * D + lane * n, *states = place.partials + n_heads * D + head;
        size_t at = ((size_t)first * place.slots + place.slots - 1) * place.stride;
        float o[n], m = __ldcg(states + at), l = __ldcg(states + at + n_heads);
        for (uint32_t i = 0; i < n; i++)
            o[i] = __ldcg(base + at + i);
        uint32_t block = first + 1, begin = shares.begin(block), next = shares.begin(block + 1);
        for (uint32_t item = begin; item < end;) {
            float split[ahead][n], ms[ahead], ls[ahead]; /* a missing one changes no bit */
#pragma unroll
            for (uint32_t k = 0; k < ahead; k++, item++) {
                if (item == next) {
                    begin = next;
                    block++;
                    next = shares.begin(block + 1);
                }
                bool is_there = item < end;
                at = ((size_t)block * place.slots + item - begin) * place.stride;
                ms[k] = is_there ? __ldcg(states + at) : MINUS_INFINITY;
                ls[k] = is_there ? __ldcg(states + at + n_heads) : 0;
                for (uint32_t i = 0; i < n; i += 2) {
                    float2 pair = is_there ? __ldcg((const float2 *)(base + at + i)) : make_float2(0, 0);
                    split[k][i] = pair.x;
                    split[k][i + 1] = pair.y;
                }
            }
#pragma unroll
            for (uint32_t k = 0; k < ahead; k++) {
                float most = fmaxf(m, ms[k]), before = rescale(m, anchor(most), c), now = rescale(ms[k], anchor(most), c);
                m = most;
                l = fold(l, before, ls[k], now);
                for (uint32_t i = 0; i < n; i++)
                    o[i] = fold(o[i], before, split[k][i], now);
            }
        }
        if (HAS_EXTRAS && sinks)
            l = with_sink(l, sinks[head], m, c);
        float scale = __frcp_rn(l);
        for (uint32_t i = 0; i < n; i += 2)
            *(uint32_t *)(out + head * D + lane * n + i) = pack(o[i] * scale, o[i + 1] * scale, T());
    }
}

/* The sums of the unit at hand, in the group that folds it. */
template <class T, uint32_t D, uint32_t BLOCKS, bool HAS_EXTRAS> struct decode_sum {
    typedef decode_worker<T, D, BLOCKS, HAS_EXTRAS> worker;
    typedef decode_shape<D, BLOCKS> shape;
    float o[shape::columns][BLOCKS][4], m[BLOCKS][2], l[BLOCKS][2];
    bool is_new;
    uint32_t first; /* the split where this run of the unit starts */

    __device__ __forceinline__ void begin(uint32_t split)
    {
        first = split;
#pragma unroll
        for (uint32_t i = 0; i < BLOCKS * 2; i++) {
            m[i / 2][i % 2] = MINUS_INFINITY;
            l[i / 2][i % 2] = 0;
            for (uint32_t f = 0; f < shape::columns; f++)
                o[f][i / 2][i % 2] = o[f][i / 2][2 + i % 2] = 0;
        }
    }

    /* Folds a split on in registers; a split of a run that starts later stands for itself. */
    __device__ __forceinline__ void add(const worker &w)
    {
#pragma unroll
        for (uint32_t i = 0; i < BLOCKS * 2; i++) {
            const uint32_t b = i / 2, e = i % 2;
            float most = fmaxf(m[b][e], w.m[b][e]), before = rescale(m[b][e], anchor(most), w.c);
            float now = rescale(w.m[b][e], anchor(most), w.c);
            m[b][e] = first ? w.m[b][e] : most;
            l[b][e] = first ? w.l[b][e] : fold(l[b][e], before, w.l[b][e], now);
            for (uint32_t f = 0; f < shape::columns; f++)
                for (uint32_t y = e; y < 4; y += 2)
                    o[f][b][y] = first ? w.o[f][b][y] : fold(o[f][b][y], before, w.o[f][b][y], now);
        }
    }

    __device__ __forceinline__ void write(const worker &w, uint32_t n_heads, const float *sinks, T *out)
    {
#pragma unroll
        for (uint32_t i = 0; i < BLOCKS * 2 && HAS_EXTRAS; i++) {
            const uint32_t head = w.head_of(i / 2, i % 2);
            if (sinks && head < n_heads)
                l[i / 2][i % 2] = with_sink(l[i / 2][i % 2], sinks[head], m[i / 2][i % 2], w.c);
        }
#pragma unroll
        for (uint32_t i = 0; i < shape::columns * BLOCKS * 4; i++) {
            const uint32_t f = i / (BLOCKS * 4), b = i / 4 % BLOCKS, head = w.head_of(b, i % 4);
            if (head < n_heads)
                out[head * D + w.column_of(f, i % 4)] = round_to<T>(o[f][b][i % 4] * __frcp_rn(l[b][i % 2]));
        }
    }

    __device__ __forceinline__ void store(const worker &w, uint32_t n_heads, float *to) const
    {
#pragma unroll
        for (uint32_t i = 0; i < shape::columns * BLOCKS * 4; i++) {
            const uint32_t f = i / (BLOCKS * 4), b = i / 4 % BLOCKS, head = w.head_of(b, i % 4), column = w.column_of(f, i % 4);
            if (head >= n_heads)
                continue;
            __stcg(to + head * D + column, o[f][b][i % 4]);
            if (column == 0) {
                __stcg(to + n_heads * D + head, m[b][i % 2]);
                __stcg(to + n_heads * D + n_heads + head, l[b][i % 2]);
            }
        }
    }
};

/* Says that `done` more splits of a unit lie in memory; true in all threads of the group that brings the last. */
static __device__ __forceinline__ bool arrive_last(uint32_t *arrivals, uint32_t done, uint32_t all, uint32_t group,
                                                   uint32_t *flag)
{
    meet(1 + group, DECODE_WORKERS);
    if (threadIdx.x % DECODE_WORKERS == 0) {
        __threadfence();
        bool is_last = atomicAdd(arrivals, done) + done == all;
        if (is_last)
            *arrivals = 0;
        *flag = is_last;
        __threadfence();
    }
    meet(1 + group, DECODE_WORKERS);
    return *flag;
}

/* The letters' place in shared memory: a thread's own floats, and the barriers of "there" and "taken". */
struct decode_mail {
    float *floats;
    uint32_t there, taken;
};

/* One pass over the items of a block by one of its two groups. flag: the group's own. */
template <class T, uint32_t D, uint32_t BLOCKS, bool HAS_EXTRAS>
static __device__ __forceinline__ void work_items(const attended<T> &x, const struct decode_place &place,
                                                  decode_worker<T, D, BLOCKS, HAS_EXTRAS> &w, struct decode_walk walk,
                                                  const struct decode_run &run, const struct decode_shares &shares,
                                                  uint32_t parts, const struct decode_mail &mail, uint32_t *flag)
{
    typedef decode_shape<D, BLOCKS> shape;
    struct ring_place ring = {0, 0};
    uint32_t in_q = ~0u, letter_phase = 0; /* the unit whose q is loaded */
    decode_sum<T, D, BLOCKS, HAS_EXTRAS> sum;
    sum.is_new = true;
    run.start(walk);
    for (struct decode_turns turns(run); turns.left; turns.next(walk)) {
        const uint32_t folder = turns.folder(walk);
        if (turns.owner != w.group && folder != w.group)
            continue;
        const uint32_t kv_head = parts == 1 ? walk.unit : walk.unit / parts, part = walk.unit - kv_head * parts;
        const uint32_t head = kv_head * x.group + part * shape::heads;
        const uint32_t n_heads = min(shape::heads, x.group - part * shape::heads), row = walk.list[walk.seq].row;
        const float *const sinks = HAS_EXTRAS && x.sinks ? x.sinks + head : NULL;
        const uint32_t begin = walk.unit_begin(), low = walk.low_tile(), high = walk.high_tile();
        if (turns.owner == w.group) {
            if (in_q != begin)
                w.load_q(x.q.at(row, head * D), n_heads);
            if (HAS_EXTRAS && in_q != begin)
                w.load_slopes(x.slopes ? x.slopes + head : NULL, n_heads, x.slope_factor);
            in_q = begin;
            w.split(ring, low, high, (int32_t)(walk.seen - walk.key()), (int32_t)(walk.len - walk.key()));
            ring = ring.after(2 * (high - low), w.ring.depth);
        }
        if (folder != turns.owner) {
            barrier_wait(w.group == folder ? mail.there : mail.taken, w.group == folder ? letter_phase : letter_phase ^ 1);
            if (w.group == folder)
                w.take(mail.floats);
            else
                w.put(mail.floats);
            barrier_arrive(w.group == folder ? mail.taken : mail.there);
            letter_phase ^= 1;
        }
        if (folder != w.group)
            continue;
        const bool is_last = walk.split + 1 == walk.n_splits, is_end = is_last || turns.item + 1 == run.end;
        if (sum.is_new)
            sum.begin(walk.split);
        sum.add(w);
        sum.is_new = is_end;
        if (sum.first == 0 && is_last) {
            sum.write(w, n_heads, sinks, x.out.at(row, head * D));
        } else if (sum.first || is_end) {
            uint32_t slot = sum.first ? turns.item - run.begin : place.slots - 1, starter = shares.owner(begin);
            sum.store(w, n_heads, place.partials + ((size_t)blockIdx.x * place.slots + slot) * place.stride);
            if (is_end && arrive_last(place.arrivals + starter, walk.split + 1 - sum.first, walk.n_splits, w.group, flag))
                fold_partials<T, D, HAS_EXTRAS>(place, shares, starter, begin + walk.n_splits, n_heads, w.c, sinks,
                                                x.out.at(row, head * D));
        }
    }
}

template <class T, uint32_t D, uint32_t BLOCKS, bool HAS_EXTRAS>
static __global__ void __launch_bounds__(DECODE_THREADS, 1)
attend_decode(const __grid_constant__ attended<T> x, const __grid_constant__ struct decode_place place, uint32_t n_units,
              uint32_t parts, uint32_t n_single)
{
    typedef decode_shape<D, BLOCKS> shape;
    extern __shared__ __align__(1024) char shared[];
    char *p = shared + place.depth * shape::chunk_bytes;
    float *tile_max = (float *)(p + 2 * shape::p_bytes), *mail = tile_max + 2 * shape::state_bytes / 4;
    uint32_t *flag = (uint32_t *)(mail + shape::mail_floats * DECODE_WORKERS); /* [16]: sums of warps, first, last, done */
    struct decode_span *list = (struct decode_span *)(flag + 20);
    const uint32_t letters = shared_address(flag + 16), empty = shared_address(list + x.n_seqs + 1);
    start_next();
    for (uint32_t i = threadIdx.x; i < 3 * place.depth; i += DECODE_THREADS)
        barrier_init(empty + i * 8, i < place.depth ? DECODE_WORKERS : 1);
    if (threadIdx.x < 2)
        barrier_init(letters + threadIdx.x * 8, DECODE_WORKERS);
    barriers_made();
    const bool is_few = x.n_seqs <= 32;
    struct decode_span span;
    const uint32_t n_splits = is_few ? list_few_spans(x, list, &span) : list_spans<DECODE_THREADS>(x, list, flag);
    const struct decode_shares shares(n_splits, n_single, n_units, gridDim.x);
    if (blockIdx.x >= shares.n) {
        wait_for_input();
        return;
    }
    const uint32_t i0 = shares.begin(blockIdx.x), i1 = shares.begin(blockIdx.x + 1);
    uint32_t first_seq, last_seq;
    if (is_few) {
        uint32_t begin = span.before * n_units, next = __shfl_down_sync(~0u, begin, 1);
        uint32_t end = threadIdx.x % 32 == 31 ? n_splits * n_units : next;
        first_seq = __ffs(__ballot_sync(~0u, begin <= i0 && i0 < end)) - 1;
        last_seq = __ffs(__ballot_sync(~0u, begin < i1 && i1 <= end)) - 1;
        __syncthreads();
    } else {
        __syncthreads();
        for (uint32_t b = threadIdx.x; b < x.n_seqs; b += DECODE_THREADS) {
            uint32_t begin = list[b].before * n_units, end = list[b + 1].before * n_units;
            if (begin <= i0 && i0 < end)
                flag[12] = b;
            if (begin < i1 && i1 <= end)
                flag[13] = b;
        }
        __syncthreads();
        first_seq = flag[12];
        last_seq = flag[13];
    }
    struct decode_walk walk = {list, x.n_seqs, n_units, x.window, x.chunk};
    const struct decode_run run(walk, i0, i1, first_seq, last_seq);
    const uint32_t is_fetching = threadIdx.x >= 2 * DECODE_WORKERS;
    const uint32_t group = is_fetching ? threadIdx.x / 32 - 2 * DECODE_WORKERS / 32 : threadIdx.x / DECODE_WORKERS;
    const uint32_t half = place.depth / 2, slot = i1 - i0 > 1 ? group * half : 0;
    const struct decode_ring ring = {shared_address(shared) + slot * shape::chunk_bytes, empty + (place.depth + 2 * slot) * 8,
                                     empty + slot * 8, i1 - i0 > 1 ? half : place.depth};
    if (is_fetching) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(shape::fetch_registers));
        if (group < 2)
            fetch_items<T, D>(x, walk, run, ring, group, parts);
        else
            wait_for_input();
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(252 - shape::fetch_registers / 2));
    decode_worker<T, D, BLOCKS, HAS_EXTRAS> worker;
    worker.ring = ring;
    worker.group = group;
    worker.p = p + worker.group * shape::p_bytes;
    worker.tile_max = tile_max + worker.group * (shape::state_bytes / 4);
    worker.tile_sum = worker.tile_max + TILES * shape::heads;
    worker.lane = threadIdx.x % 32;
    worker.warp = threadIdx.x / 32 % 4;
    worker.g = worker.lane / 4;
    worker.t = worker.lane % 4;
    worker.c = x.factor;
    worker.cap_factor = x.cap_factor;
    wait_for_input();
    const struct decode_mail letter = {mail + threadIdx.x % DECODE_WORKERS, letters, letters + 8};
    work_items(x, place, worker, walk, run, shares, parts, letter, flag + 14 + group);
}

/* n_single: sequences with one row. */
template <class T, uint32_t D, uint32_t BLOCKS, bool HAS_EXTRAS>
static enum rc launch_decode(const struct cuda *cuda, const struct attention_args *args, uint32_t n_single, struct err *err)
{
    typedef decode_shape<D, BLOCKS> shape;
    const uint32_t n_blocks = cuda->n_processors;
    attended<T> x(*args);
    x.is_single = n_single == x.n_seqs;
    const uint32_t parts = ceil_div(x.group, shape::heads), n_heads = x.group < shape::heads ? x.group : shape::heads;
    const uint32_t most = ceil_div(args->kv.table_stride * args->batch->block_tokens, SPLIT);
    const uint32_t list_bytes = (uint32_t)sizeof(struct decode_span) * (x.n_seqs + 1);
    const uint32_t other_bytes = shape::fixed_bytes + list_bytes;
    const uint32_t depth = other_bytes < SHARED_BYTES ? (SHARED_BYTES - other_bytes) / shape::place_bytes : 0;
    struct decode_place place = {cuda->partials, cuda->arrivals, most + 1, (n_heads * (D + 2) + 3) & ~3u, depth};
    size_t wanted = (size_t)n_blocks * place.slots * place.stride * sizeof(float);
    if (wanted > cuda->partials_bytes)
        return err_set(err, RC_CONFIG, "attention: wanted %zu bytes for the splits of long sequences, have %zu; max_model_len",
                       wanted, cuda->partials_bytes);
    if (depth < TILES)
        return err_set(err, RC_CONFIG, "attention: wanted fewer sequences in a step, have %u; max_num_seqs", x.n_seqs);
    uint32_t shared_bytes = depth * shape::place_bytes + other_bytes;
    cudaFuncSetAttribute(attend_decode<T, D, BLOCKS, HAS_EXTRAS>, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES);
    launch(cuda, attend_decode<T, D, BLOCKS, HAS_EXTRAS>, n_blocks, DECODE_THREADS, shared_bytes, x, place,
           args->kv.n_kv_heads * parts, parts, n_single);
    return RC_OK;
}

#endif
