/* attention_sync.cuh: attention of sequences that have one row in the step, with mma.sync and cp.async alone, for every device
 * of compute capability 8.0 or later. Bits, shares and partials are those of attention_decode.cuh.
 *
 * A block takes its splits one after the other. All its threads copy pieces of keys, then of values, into a ring. Two pieces
 * are a step. Each of eight warps (of four with heads of 256) scores 16 keys of a step; where all keys of a split are scored, p
 * of all goes to shared memory, and each warp adds a block of 16 columns, or two. Bound by the bytes of the keys and values. */
#ifndef LLMPY_CUDA_ATTENTION_SYNC_CUH
#define LLMPY_CUDA_ATTENTION_SYNC_CUH

#include "../core/copies.cuh"
#include "attention_decode.cuh"

#define SYNC_THREADS 256u
#define SYNC_WARPS (SYNC_THREADS / 32)

template <uint32_t D> struct sync_shape {
    static const uint32_t heads = 8, keys = D == 256 ? 32 : TILE; /* of a unit; of a piece */
    static const uint32_t piece_bytes = keys * D * 2, octet_bytes = 8 * D * 2, tile_pieces = TILE / keys;
    static const uint32_t pieces = SPLIT / keys, steps = pieces / 2; /* of a split */
    static const uint32_t columns = D == 256 ? 2 : 1;                /* blocks of 16 columns of a warp */
    static const uint32_t groups = 2 * keys / 16;                    /* of 16 keys, of a step */
    static const uint32_t p_bytes = heads * P_STRIDE, part_bytes = SPLIT / 16 * 32 * 8, most_bytes = SPLIT / 16 * heads * 4;
    static const uint32_t fixed_bytes = p_bytes + part_bytes + most_bytes + 64;
};

/* Copies the pieces of a block's splits, one a call, in the order in which they are read. */
template <class T, uint32_t D> struct sync_fetcher {
    typedef sync_shape<D> shape;
    const attended<T, T> &x;
    const struct decode_run &run;
    struct decode_walk walk;
    uint32_t item, left, piece, values, parts, ring;
    int32_t id; /* page `lane` of the split at hand; -1: no row sees it */

    __device__ __forceinline__ sync_fetcher(const attended<T, T> &of, const struct decode_run &to, const struct decode_walk &w,
                                            uint32_t n_parts, uint32_t data)
        : x(of), run(to), walk(w), item(to.start_item()), left(to.end - to.begin), values(0), parts(n_parts), ring(data)
    {
        run.start(walk);
        enter();
    }
    __device__ __forceinline__ void enter(void)
    {
        const uint32_t shift = x.kv.block_shift, lane = threadIdx.x % 32, p = (walk.key() >> shift) + lane, first = p << shift;
        const bool is_seen = lane < SPLIT >> shift && first < walk.len && first + x.kv.block_tokens > walk.seen;
        id = is_seen ? x.kv.table[(size_t)walk.list[walk.seq].table_row * x.kv.table_stride + p] : -1;
        piece = walk.low_tile() * shape::tile_pieces;
    }
    /* Starts the copy of the next piece, if there is one, and closes its group. */
    __device__ __forceinline__ void start(uint32_t slot)
    {
        if (left) {
            const uint32_t shift = x.kv.block_shift, head = parts == 1 ? walk.unit : walk.unit / parts;
            const char *layer = x.kv.layer + ((size_t)head * 2 + values) * ((size_t)D * 2 << shift);
#pragma unroll
            for (uint32_t i = 0; i < shape::piece_bytes / (SYNC_THREADS * 16); i++) {
                const uint32_t at = (i * SYNC_THREADS + threadIdx.x) * 16;
                const uint32_t token = piece * shape::keys + at / shape::octet_bytes * 8;
                const int32_t page = __shfl_sync(~0u, id, token >> shift);
                const uint32_t octet = (token & (x.kv.block_tokens - 1)) / 8;
                if (page >= 0)
                    copy_16(ring + slot * shape::piece_bytes + at,
                            layer + (size_t)page * x.kv.page_bytes + octet * shape::octet_bytes + at % shape::octet_bytes);
            }
            if (++piece == walk.high_tile() * shape::tile_pieces) {
                piece = walk.low_tile() * shape::tile_pieces;
                values ^= 1;
                if (!values && --left) {
                    item = run.next(walk, item);
                    enter();
                }
            }
        }
        copies_close();
    }
};

template <class T, uint32_t D, bool HAS_EXTRAS> struct sync_worker {
    typedef sync_shape<D> shape;
    struct sync_fetcher<T, D> &fetcher;
    char *p;
    float *most;  /* [SPLIT / 16][heads]: of 16 keys */
    float2 *part; /* [SPLIT / 16][32]: of a lane's two heads, p of keys g and g + 8 of sixteen */
    uint32_t data, depth, slot, n_freed, n_under_way; /* n_freed: places read in the step before */
    uint32_t warp, lane, g, t;
    float c, cap_factor;
    uint32_t q[D / 16][2];
    float s[shape::steps][4], o[shape::columns][4], a[TILES][2], m[2], l[2], slope[2];
    float all[shape::columns][4], all_m[2], all_l[2]; /* sums of the unit */

    __device__ __forceinline__ uint32_t column(uint32_t f) const { return (warp + f * SYNC_WARPS) * 16; }

    /* Waits for the next n pieces, and asks for more where the step before has been read. Returns the first one's place. */
    __device__ __forceinline__ uint32_t step(uint32_t n)
    {
        const uint32_t first = slot;
        n_under_way -= n;
        copies_wait(n_under_way);
        __syncthreads();
        for (uint32_t i = 0; i < n_freed; i++) {
            const uint32_t back = n_freed - i;
            fetcher.start(first >= back ? first - back : first + depth - back);
        }
        n_under_way += n_freed;
        n_freed = n;
        slot = first + n >= depth ? first + n - depth : first + n;
        return first;
    }
    __device__ __forceinline__ uint32_t place(uint32_t first, uint32_t i) const
    {
        return data + (first + i >= depth ? first + i - depth : first + i) * shape::piece_bytes;
    }

    __device__ void load_q(const T *first, uint32_t n_heads)
    {
        const uint32_t *from = (const uint32_t *)(first + (size_t)g * D) + t;
#pragma unroll
        for (uint32_t k = 0; k < D / 16; k++) {
            q[k][0] = g < n_heads ? from[k * 8] : 0;
            q[k][1] = g < n_heads ? from[k * 8 + 4] : 0;
        }
    }
    __device__ void load_slopes(const float *slopes, uint32_t n_heads, float factor)
    {
        for (uint32_t e = 0; e < 2; e++)
            slope[e] = slopes && t * 2 + e < n_heads ? slopes[t * 2 + e] * factor : 0;
    }

    /* Scores 16 keys, the first of which is key `first` of the split; those outside [seen, end) are hidden. */
    __device__ __forceinline__ void score(float (&score)[4], uint32_t keys, uint32_t first, int32_t seen, int32_t end)
    {
        const uint32_t row = lane / 8 % 2 * shape::octet_bytes + lane % 8 * 128, chunk = lane / 16, turn = lane % 8;
        for (uint32_t i = 0; i < 4; i++)
            score[i] = 0;
#pragma unroll
        for (uint32_t k = 0; k < D / 16; k++) {
            uint32_t of[4];
            load_matrices(of, keys + k / 4 * SLAB_BYTES + row + ((k % 4 * 2 + chunk) ^ turn) * 16);
            mma(score, of, q[k], T());
        }
        float high[2] = {MINUS_INFINITY, MINUS_INFINITY};
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            const int32_t key = (int32_t)(first + g + i / 2 * 8);
            if (cap_factor != 0)
                score[i] = capped(score[i], cap_factor);
            if (HAS_EXTRAS)
                score[i] = fmaf(slope[i % 2], (float)(key - (end - 1)), score[i]);
            if (key < seen || key >= end)
                score[i] = MINUS_INFINITY;
            high[i % 2] = fmaxf(high[i % 2], score[i]);
        }
        for (uint32_t apart = 4; apart < 32; apart *= 2)
            for (uint32_t e = 0; e < 2; e++)
                high[e] = fmaxf(high[e], __shfl_xor_sync(~0u, high[e], apart));
        if (lane < 4)
            *(float2 *)(most + first / 16 * shape::heads + t * 2) = make_float2(high[0], high[1]);
    }

    /* p of 16 keys; n: the maxima up to their tile. */
    __device__ __forceinline__ void weigh(const float (&score)[4], uint32_t first, const float (&n)[2])
    {
        float w[4];
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            w[i] = power_of_2(fmaf(score[i], c, -(anchor(n[i % 2]) * c)));
            *(T *)(p + (t * 2 + i % 2) * P_STRIDE + (first + g + i / 2 * 8) * 2) = round_to<T>(w[i]);
        }
        part[first / 16 * 32 + lane] = make_float2(w[0] + w[2], w[1] + w[3]);
    }

    /* Maxima and factors of tiles [low, high), and p of this warp's keys. */
    __device__ __forceinline__ void soften(uint32_t low, uint32_t high)
    {
        m[0] = m[1] = MINUS_INFINITY;
#pragma unroll
        for (uint32_t tile = 0; tile < TILES; tile++) {
            if (tile < low || tile >= high)
                continue;
            float n[2] = {m[0], m[1]};
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                const float2 of = *(const float2 *)(most + (tile * 4 + i) * shape::heads + t * 2);
                n[0] = fmaxf(n[0], of.x);
                n[1] = fmaxf(n[1], of.y);
            }
            for (uint32_t e = 0; e < 2; e++) {
                a[tile][e] = rescale(m[e], anchor(n[e]), c);
                m[e] = n[e];
            }
            const uint32_t step = tile * 4 / shape::groups, group = warp + step * shape::groups;
            if (warp < shape::groups && group / 4 == tile)
                weigh(s[step], group * 16, n);
        }
    }

    /* The sum of p of a tile, of both heads: a tree that joins bits 3, 4, 5, 0, 1, 2 of the key's number. */
    __device__ __forceinline__ void add_weights(uint32_t tile)
    {
        float2 r[4];
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            r[i] = part[(tile * 4 + i) * 32 + lane];
        float sum[2] = {(r[0].x + r[1].x) + (r[2].x + r[3].x), (r[0].y + r[1].y) + (r[2].y + r[3].y)};
        for (uint32_t apart = 4; apart < 32; apart *= 2)
            for (uint32_t e = 0; e < 2; e++)
                sum[e] = sum[e] + __shfl_xor_sync(~0u, sum[e], apart);
        for (uint32_t e = 0; e < 2; e++)
            l[e] = fmaf(a[tile][e], l[e], sum[e]);
    }

    /* Adds the warp's columns of a piece's values; keys outside [seen, end) of the split are zeros. first: the piece's key. */
    template <bool IS_CUT>
    __device__ __forceinline__ void add_values(uint32_t values, uint32_t first, int32_t seen, int32_t end)
    {
        const uint32_t row = lane / 16 * shape::octet_bytes + lane % 8 * 128, turn = lane % 8, half = lane / 8 % 2;
#pragma unroll
        for (uint32_t k = 0; k < shape::keys / 16; k++) {
            const uint32_t *from = (const uint32_t *)(p + g * P_STRIDE + (first + k * 16) * 2) + t;
            const uint32_t weights[2] = {from[0], from[4]};
            uint32_t keep[2];
            int32_t key = (int32_t)(first + k * 16 + t * 2);
            for (uint32_t i = 0; i < 2 && IS_CUT; i++, key += 8)
                keep[i] = (key >= seen && key < end ? 0xffffu : 0) | (key + 1 >= seen && key + 1 < end ? 0xffff0000u : 0);
#pragma unroll
            for (uint32_t f = 0; f < shape::columns; f++) {
                uint32_t of[4];
                load_transposed(of, values + k * 2 * shape::octet_bytes + column(f) / 64 * SLAB_BYTES + row +
                                        ((column(f) % 64 / 8 + half) ^ turn) * 16);
                for (uint32_t i = 0; i < 4 && IS_CUT; i++)
                    of[i] &= keep[i / 2];
                mma(o[f], of, weights, T());
            }
        }
    }

    /* m, l and o of a split; low, high: its tiles that hold keys in [seen, end). */
    __device__ __forceinline__ void split(uint32_t low, uint32_t high, int32_t seen, int32_t end)
    {
        const uint32_t first_piece = low * shape::tile_pieces, end_piece = high * shape::tile_pieces;
#pragma unroll
        for (uint32_t i = 0; i < shape::steps; i++) {
            const uint32_t begin = max(2 * i, first_piece), stop = min(2 * i + 2, end_piece);
            if (begin >= stop)
                continue;
            const uint32_t first = step(stop - begin), group = warp + i * shape::groups, piece = group * 16 / shape::keys;
            if (warp < shape::groups && piece >= begin && piece < stop)
                score(s[i], place(first, piece - begin) + group * 16 % shape::keys / 8 * shape::octet_bytes, group * 16, seen,
                      end);
        }
        __syncthreads();
        soften(low, high);
        for (uint32_t i = 0; i < shape::columns * 4; i++)
            o[i / 4][i % 4] = 0;
        l[0] = l[1] = 0;
#pragma unroll
        for (uint32_t i = 0; i < shape::steps; i++) {
            const uint32_t begin = max(2 * i, first_piece), stop = min(2 * i + 2, end_piece);
            if (begin >= stop)
                continue;
            const uint32_t first = step(stop - begin);
#pragma unroll
            for (uint32_t j = 0; j < 2; j++) {
                const uint32_t piece = 2 * i + j, tile = piece / shape::tile_pieces, key = piece * shape::keys;
                if (piece < begin || piece >= stop)
                    continue;
                if (piece % shape::tile_pieces == 0) {
                    add_weights(tile);
                    for (uint32_t f = 0; f < shape::columns * 4; f++)
                        o[f / 4][f % 4] *= a[tile][f % 2];
                }
                if (D < 128 && warp * 16 >= D)
                    continue;
                if ((int32_t)key < seen || (int32_t)(key + shape::keys) > end)
                    add_values<true>(place(first, piece - begin), key, seen, end);
                else
                    add_values<false>(place(first, piece - begin), key, seen, end);
            }
        }
    }

    __device__ __forceinline__ void begin_unit(void)
    {
        for (uint32_t e = 0; e < 2; e++) {
            all_m[e] = MINUS_INFINITY;
            all_l[e] = 0;
        }
        for (uint32_t i = 0; i < shape::columns * 4; i++)
            all[i / 4][i % 4] = 0;
    }
    /* Folds a split on; a split of a run that starts later stands for itself. */
    __device__ __forceinline__ void fold_split(bool is_alone)
    {
#pragma unroll
        for (uint32_t e = 0; e < 2; e++) {
            const float high = fmaxf(all_m[e], m[e]), before = rescale(all_m[e], anchor(high), c);
            const float now = rescale(m[e], anchor(high), c);
            all_m[e] = is_alone ? m[e] : high;
            all_l[e] = is_alone ? l[e] : fold(all_l[e], before, l[e], now);
            for (uint32_t f = 0; f < shape::columns; f++)
                for (uint32_t y = e; y < 4; y += 2)
                    all[f][y] = is_alone ? o[f][y] : fold(all[f][y], before, o[f][y], now);
        }
    }
    __device__ __forceinline__ void write(uint32_t n_heads, const float *sinks, T *out)
    {
#pragma unroll
        for (uint32_t e = 0; e < 2 && HAS_EXTRAS; e++)
            if (sinks && t * 2 + e < n_heads)
                all_l[e] = with_sink(all_l[e], sinks[t * 2 + e], all_m[e], c);
#pragma unroll
        for (uint32_t i = 0; i < shape::columns * 4; i++) {
            const uint32_t head = t * 2 + i % 2, d = column(i / 4) + g + i % 4 / 2 * 8;
            if (head < n_heads && d < D)
                out[head * D + d] = round_to<T>(all[i / 4][i % 4] * __frcp_rn(all_l[i % 2]));
        }
    }
    __device__ __forceinline__ void store(uint32_t n_heads, float *to) const
    {
#pragma unroll
        for (uint32_t i = 0; i < shape::columns * 4; i++) {
            const uint32_t head = t * 2 + i % 2, d = column(i / 4) + g + i % 4 / 2 * 8;
            if (head < n_heads && d < D)
                __stcg(to + head * D + d, all[i / 4][i % 4]);
        }
        if (warp == 0 && g == 0)
            for (uint32_t e = 0; e < 2; e++)
                if (t * 2 + e < n_heads) {
                    __stcg(to + n_heads * D + t * 2 + e, all_m[e]);
                    __stcg(to + n_heads * D + n_heads + t * 2 + e, all_l[e]);
                }
    }
};

/* Says that `done` more splits of a unit lie in memory; true in all threads of the block that brings the last. */
static __device__ __forceinline__ bool sync_arrive_last(uint32_t *arrivals, uint32_t done, uint32_t all, uint32_t *flag)
{
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        const bool is_last = atomicAdd(arrivals, done) + done == all;
        if (is_last)
            *arrivals = 0;
        *flag = is_last;
        __threadfence();
    }
    __syncthreads();
    return *flag;
}

template <class T, uint32_t D, bool HAS_EXTRAS>
static __global__ void __launch_bounds__(SYNC_THREADS, 2)
attention_sync(const __grid_constant__ attended<T, T> x, const __grid_constant__ struct decode_place place, uint32_t n_units,
               uint32_t parts, uint32_t n_single)
{
    typedef sync_shape<D> shape;
    extern __shared__ __align__(1024) char shared[];
    char *const p = shared + place.depth * shape::piece_bytes;
    float2 *const part = (float2 *)(p + shape::p_bytes);
    float *const most = (float *)((char *)part + shape::part_bytes);
    uint32_t *const flag = (uint32_t *)((char *)most + shape::most_bytes);
    struct decode_span *const list = (struct decode_span *)(flag + 16), span;
    const bool is_few = x.n_seqs <= FEW_SEQS;
    start_next();
    wait_for_input();
    const uint32_t n_splits = is_few ? few_splits(x, &span) : list_spans<SYNC_THREADS>(x, list, flag);
    const struct decode_shares shares(n_splits, n_single, n_units, gridDim.x);
    if (blockIdx.x >= shares.n)
        return;
    const uint32_t i0 = shares.begin(blockIdx.x), i1 = shares.begin(blockIdx.x + 1);
    const struct decode_ends ends = is_few ? few_ends(list, span, x.n_seqs, n_splits, n_units, i0, i1)
                                           : many_ends<SYNC_THREADS>(list, x.n_seqs, n_units, i0, i1, flag + 12);
    struct decode_walk walk = {list, x.n_seqs, n_units};
    const struct decode_run run(walk, i0, i1, ends.first, ends.last);
    sync_fetcher<T, D> fetcher(x, run, walk, parts, shared_address(shared));
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    sync_worker<T, D, HAS_EXTRAS> w = {fetcher, p, most, part, shared_address(shared), place.depth, 0, 0, place.depth,
                                       warp, lane, lane / 4, lane % 4, x.factor, x.cap_factor};
    for (uint32_t i = 0; i < place.depth; i++)
        fetcher.start(i);
    uint32_t in_q = ~0u, first = 0; /* the unit whose q is loaded; the split where this run of the unit starts */
    bool is_new = true;
    run.start(walk);
    for (uint32_t item = run.start_item(), left = i1 - i0; left; left--, item = run.next(walk, item)) {
        const uint32_t kv_head = parts == 1 ? walk.unit : walk.unit / parts, of_group = walk.unit - kv_head * parts;
        const uint32_t head = kv_head * x.group + of_group * shape::heads;
        const uint32_t n_heads = min(shape::heads, x.group - of_group * shape::heads);
        const uint32_t row = walk.list[walk.seq].row, begin = walk.unit_begin();
        const float *const sinks = HAS_EXTRAS && x.sinks ? x.sinks + head : NULL;
        if (in_q != begin) {
            w.load_q(x.q.at(row, head * D), n_heads);
            if (HAS_EXTRAS)
                w.load_slopes(x.slopes ? x.slopes + head : NULL, n_heads, x.slope_factor);
        }
        in_q = begin;
        w.split(walk.low_tile(), walk.high_tile(), (int32_t)(walk.seen - walk.key()), (int32_t)(walk.len - walk.key()));
        const bool is_last = walk.split + 1 == walk.n_splits, is_end = is_last || item + 1 == run.end;
        if (is_new) {
            first = walk.split;
            w.begin_unit();
        }
        w.fold_split(first != 0);
        is_new = is_end;
        if (first == 0 && is_last) {
            w.write(n_heads, sinks, x.out.at(row, head * D));
        } else if (first || is_end) {
            const uint32_t slot = first ? item - run.begin : place.slots - 1, starter = shares.owner(begin);
            w.store(n_heads, place.partials + ((size_t)blockIdx.x * place.slots + slot) * place.stride);
            if (is_end && sync_arrive_last(place.arrivals + starter, walk.split + 1 - first, walk.n_splits, flag))
                fold_partials<T, D, HAS_EXTRAS, SYNC_WARPS>(place, shares, starter, begin + walk.n_splits, n_heads, w.c, sinks,
                                                            x.out.at(row, head * D));
        }
    }
}

/* n_single: sequences with one row. */
template <class T, uint32_t D, bool HAS_EXTRAS>
static enum rc launch_sync(const struct cuda *cuda, const struct attention_args *args, uint32_t n_single, struct err *err)
{
    typedef sync_shape<D> shape;
    attended<T, T> x(*args);
    x.is_single = n_single == x.n_seqs;
    const uint32_t parts = ceil_div(x.group, shape::heads), n_heads = x.group < shape::heads ? x.group : shape::heads;
    const uint32_t most = ceil_div(args->kv.table_stride * args->batch->block_tokens, SPLIT);
    const uint32_t other_bytes = shape::fixed_bytes + (uint32_t)sizeof(struct decode_span) * (x.n_seqs + 1);
    struct decode_place place = {cuda->partials, cuda->arrivals, most + 1, (n_heads * (D + 2) + 3) & ~3u, 0};
    const size_t block_partials = (size_t)place.slots * place.stride * sizeof(float);
    /* Two blocks a processor hide each other's waits. */
    const bool is_two = cuda->processor_bytes >= 2 * (other_bytes + 4 * shape::piece_bytes + 1024) &&
                        2 * cuda->n_processors * block_partials <= cuda->partials_bytes;
    const uint32_t n_blocks = cuda->n_processors * (is_two ? 2 : 1);
    const uint32_t half = cuda->processor_bytes / 2 - 1024;
    const uint32_t limit = is_two && half < cuda->shared_bytes ? half : cuda->shared_bytes;
    place.depth = limit > other_bytes ? (limit - other_bytes) / shape::piece_bytes : 0;
    place.depth = place.depth < COPIES_MOST ? place.depth : COPIES_MOST;
    if (n_blocks * block_partials > cuda->partials_bytes)
        return err_set(err, RC_CONFIG, "attention: wanted %zu bytes for the splits of long sequences, have %zu; lower "
                       "max_model_len", n_blocks * block_partials, cuda->partials_bytes);
    if (place.depth < 2)
        return err_set(err, RC_CONFIG, "attention: wanted fewer sequences in a step, have %u; lower max_num_seqs", x.n_seqs);
    allow_shared(attention_sync<T, D, HAS_EXTRAS>, cuda->shared_bytes);
    launch(cuda, attention_sync<T, D, HAS_EXTRAS>, n_blocks, SYNC_THREADS, place.depth * shape::piece_bytes + other_bytes, x,
           place, args->kv.n_kv_heads * parts, parts, n_single);
    return RC_OK;
}

#endif
