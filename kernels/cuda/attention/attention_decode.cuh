/* attention_decode.cuh: attention of sequences that have one row in the step, on mma.sync with swapped operands (S^T = K Q^T,
 * O^T = V^T P^T, so that up to 8 query heads of a kv head are one narrow operand). Bound by the bytes of the keys and values:
 * 256 sequences of 1,536 tokens, 8 kv heads of 128, 1.6 GB, 354 us at 4.55 TB/s.
 *
 * attention_share.cuh divides the items (sequence, unit, split) among the blocks. A unit is a kv head with up to 8 * BLOCKS of
 * its query heads. Two groups of four warps take the items of a block in turn: short units as a whole, which each group folds
 * in registers, and single splits of long units, which the first group folds. Splits of a run that does not start at a unit's
 * first one, and a unit left unfinished, go to `partials`, and the last block to arrive folds them in order.
 * attention_worker.cuh computes a split, from pages of 16 bits or of e4m3 (C). For each group a warp streams tiles of keys and
 * values through a ring, after the wait for the predecessor. With the pages of earlier steps read before that wait,
 * test_a_crowd_again_and_again finds other bits within a few hundred rounds
 * (benchmarks/notebook/2026-11-23-early-reads-of-keys.md).
 *
 * For few sequences it does the work of qkv, too. Blocks with items then start under the linear before, on the processors that
 * the linear leaves free, and fetch the data of earlier steps: after the wait only the row's own q, key and value are missing.
 *
 * At small batches a launch is bound by latency, and a block runs most of this code once or twice. Code takes about twice as
 * long the first time as later, so short code wins over unrolled copies. */
#ifndef LLMPY_CUDA_ATTENTION_DECODE_CUH
#define LLMPY_CUDA_ATTENTION_DECODE_CUH

#include "../core/launch.cuh"
#include "attention_worker.cuh"

struct decode_place {
    float *partials;    /* [blocks][slots][stride]: splits of a block's first unit; in the last slot its last unit so far */
    uint32_t *arrivals; /* [blocks] splits that have arrived of the unit that the block began; zero between launches */
    uint32_t slots, stride, depth;
};

/* ---- the warps that fetch ------------------------------------------------------------------------------------------------ */

template <class T, class C, uint32_t D>
static __device__ void fetch_items(const attended<T, C> &x, struct decode_walk walk, const struct decode_run &run,
                                   const struct decode_ring &ring, uint32_t group, uint32_t parts)
{
    const uint32_t lane = threadIdx.x % 32, shift = x.kv.block_shift, n_pages = SPLIT >> shift;
    const uint32_t run_bytes = D * sizeof(C) << shift;
    const uint32_t tile_shift = 6 - shift, page_mask = (1 << tile_shift) - 1, chunk_bytes = TILE * D * sizeof(C);
    const uint32_t scales_run = scale_bytes_of<C>() ? 8 << shift : 0; /* bytes of a page's scales of a head */
    const uint64_t policy = policy_read_once();
    auto page = [&] {
        uint32_t p = (walk.key() >> shift) + lane, first = p << shift;
        bool is_seen = lane < n_pages && first < walk.len && first + x.kv.block_tokens > walk.seen;
        return is_seen ? x.kv.table[(size_t)walk.list[walk.seq].table_row * x.kv.table_stride + p] : -1;
    };
    struct decode_chunk place = {0, 0};
    struct decode_turns turns(run);
    run.start(walk);
    turns.pass_to(group, walk);
    int32_t id = turns.left ? page() : -1;
    while (turns.left) {
        const uint32_t low = walk.low_tile(), high = walk.high_tile();
        const uint32_t kv_head = parts == 1 ? walk.unit : walk.unit / parts;
        const char *scales = x.kv.layer + (size_t)id * x.kv.page_bytes + (size_t)kv_head * (2 * run_bytes + scales_run);
        const char *source = scales + scales_run;
        const bool is_page = id >= 0;
        for (uint32_t values = 0; values < 2; values++) {
            if (values) {
                turns.next(walk);
                turns.pass_to(group, walk);
                if (turns.left)
                    id = page();
            }
            for (uint32_t tile = low; tile < high; tile++, place = place.after(1, ring.depth)) {
                uint32_t barrier = ring.full_of(place), target = ring.data + place.slot * chunk_bytes;
                bool is_mine = is_page && lane >> tile_shift == tile;
                barrier_wait(ring.empty + place.slot * 8, (place.round & 1) ^ 1);
                uint32_t n_runs = __popc(__ballot_sync(~0u, is_mine));
                if (lane == 0)
                    barrier_expect(barrier, n_runs * (run_bytes + (values ? 0 : scales_run)));
                __syncwarp();
                if (is_mine)
                    copy_bytes(target + (lane & page_mask) * run_bytes, source + values * run_bytes, run_bytes, barrier,
                               policy);
                if (scales_run && is_mine && !values)
                    copy_bytes(ring.scales + place.slot * TILE_SCALES + (lane & page_mask) * scales_run, scales, scales_run,
                               barrier, policy);
            }
        }
    }
}

/* ---- sums ---------------------------------------------------------------------------------------------------------------- */

/* Folds the splits of one unit, of which the blocks from `first` on have left partials, and writes its rows: by WARPS warps. A
 * thread reads AHEAD values before it folds the first. */
template <class T, uint32_t D, bool HAS_EXTRAS, uint32_t WARPS = DECODE_WORKERS / 32, uint32_t AHEAD = 32>
static __device__ void fold_partials(const struct decode_place &place, const struct decode_shares &shares, uint32_t first,
                                     uint32_t end, uint32_t n_heads, float c, const float *sinks, T *out)
{
    const uint32_t warp = threadIdx.x / 32 % WARPS, lane = threadIdx.x % 32, n = D / 32, ahead = AHEAD / n;
    for (uint32_t head = warp; head < n_heads; head += WARPS) {
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
template <class T, class C, uint32_t D, uint32_t BLOCKS, bool HAS_EXTRAS, uint32_t AT_ONCE> struct decode_sum {
    typedef decode_worker<T, C, D, BLOCKS, HAS_EXTRAS, AT_ONCE> worker;
    typedef decode_shape<C, D, BLOCKS, AT_ONCE> shape;
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

/* The exchange between the groups in shared memory: the thread's own floats, and the barriers "there" and "taken". */
struct decode_mail {
    float *floats;
    uint32_t there, taken;
};

/* One pass over the items of a block by one of its two groups. flag: the group's own. */
template <class T, class C, uint32_t D, uint32_t BLOCKS, bool HAS_EXTRAS, uint32_t AT_ONCE>
static __device__ __forceinline__ void work_items(const attended<T, C> &x, const qkv_rows<T> &heads,
                                                  const struct decode_place &place,
                                                  decode_worker<T, C, D, BLOCKS, HAS_EXTRAS, AT_ONCE> &w,
                                                  struct decode_walk walk, const struct decode_run &run,
                                                  const struct decode_shares &shares, uint32_t parts,
                                                  const struct decode_mail &mail, uint32_t *flag)
{
    typedef decode_shape<C, D, BLOCKS, AT_ONCE> shape;
    struct decode_chunk ring = {0, 0};
    uint32_t in_q = ~0u, letter_phase = 0; /* the unit whose q is loaded */
    constexpr bool has_bytes = !std::is_same_v<C, T>;
    const bool does_qkv = BLOCKS == 1 && !has_bytes && heads.q.data;
    decode_sum<T, C, D, BLOCKS, HAS_EXTRAS, AT_ONCE> sum;
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
            const bool is_newest = does_qkv && walk.split + 1 == walk.n_splits;
            w.newest = is_newest ? (walk.len - 1) % SPLIT / TILE : TILES;
            w.token = (walk.len - 1) % TILE;
            if constexpr (has_bytes) {
                if (in_q != begin)
                    w.share_q(x.q.at(row, head * D), D, n_heads);
            } else if (does_qkv && (in_q != begin || is_newest))
                w.prepare(heads, x.kv, walk.list[walk.seq], head, n_heads, kv_head);
            else if (in_q != begin)
                w.load_q(x.q.at(row, head * D), D, n_heads);
            if (w.leans && in_q != begin)
                w.load_slopes(x.slopes + head, n_heads, x.slope_factor);
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
                fold_partials<T, D, HAS_EXTRAS, DECODE_WORKERS / 32, AT_ONCE == 1 ? 32 : 8>(
                    place, shares, starter, begin + walk.n_splits, n_heads, w.c, sinks, x.out.at(row, head * D));
        }
    }
}

/* How a block's shared memory is laid out: the ring, its scales, p, q and the states of both groups, the exchange, flags ([16]:
 * sums of warps, first, last, done), the barriers of the exchange and of the ring, and the list. */
template <class C, uint32_t D, uint32_t BLOCKS> struct decode_memory {
    typedef decode_shape<C, D, BLOCKS> shape;
    char *data, *p;
    float *tile_max, *mail;
    uint32_t *flag;
    struct decode_span *list;
    uint32_t letters, empty, depth;
    __device__ decode_memory(char *shared, uint32_t depth)
        : data(shared), p(shared + depth * (shape::chunk_bytes + shape::scale_bytes)),
          tile_max((float *)(p + 2 * (shape::p_bytes + shape::q_bytes))), mail(tile_max + 2 * shape::state_bytes / 4),
          flag((uint32_t *)(mail + shape::mail_floats * DECODE_WORKERS)),
          list((struct decode_span *)(flag + 20 + depth * 6)), letters(shared_address(flag + 16)),
          empty(shared_address(flag + 20)), depth(depth)
    {
    }
    __device__ void make_barriers(void) const
    {
        barriers_init(empty, depth, DECODE_WORKERS);
        barriers_init(empty + depth * 8, 2 * depth, 1);
        barriers_init(letters, 2, DECODE_WORKERS);
        barriers_made();
    }
    /* A group's part of the ring, or all of it for a single item. */
    __device__ struct decode_ring ring(uint32_t group, uint32_t n_items) const
    {
        const uint32_t half = depth / 2, slot = n_items > 1 ? group * half : 0;
        return {shared_address(data) + slot * shape::chunk_bytes, empty + (depth + 2 * slot) * 8, empty + slot * 8,
                n_items > 1 ? half : depth,
                shared_address(data) + depth * shape::chunk_bytes + slot * shape::scale_bytes};
    }
};

template <class T, class C, uint32_t D, uint32_t BLOCKS, bool HAS_EXTRAS, uint32_t AT_ONCE>
static __global__ void __launch_bounds__(DECODE_THREADS, AT_ONCE)
attention_decode(const __grid_constant__ attended<T, C> x, const __grid_constant__ qkv_rows<T> heads,
                 const __grid_constant__ struct decode_place place, uint32_t n_units, uint32_t parts, uint32_t n_single)
{
    only_sm_90a();
    typedef decode_shape<C, D, BLOCKS, AT_ONCE> shape;
    extern __shared__ __align__(1024) char shared[];
    const decode_memory<C, D, BLOCKS> memory(shared, place.depth);
    const bool has_heads = heads.q.data != NULL, is_few = x.n_seqs <= FEW_SEQS;
    start_next();
    if (!has_heads)
        wait_for_input();
    struct decode_span span;
    const uint32_t n_splits = is_few ? few_splits(x, &span) : list_spans<DECODE_THREADS>(x, memory.list, memory.flag);
    const struct decode_shares shares(n_splits, n_single, n_units, gridDim.x);
    if (blockIdx.x >= shares.n) {
        wait_for_input();
        return;
    }
    memory.make_barriers();
    const uint32_t i0 = shares.begin(blockIdx.x), i1 = shares.begin(blockIdx.x + 1);
    const struct decode_ends ends = is_few ? few_ends(memory.list, span, x.n_seqs, n_splits, n_units, i0, i1)
                                           : many_ends(memory.list, x.n_seqs, n_units, i0, i1, memory.flag + 12);
    const struct decode_walk walk = {memory.list, x.n_seqs, n_units};
    const struct decode_run run(walk, i0, i1, ends.first, ends.last);
    if (threadIdx.x >= 2 * DECODE_WORKERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(shape::fetch_registers));
        const uint32_t group = threadIdx.x / 32 - 2 * DECODE_WORKERS / 32;
        if (group < 2)
            fetch_items<T, C, D>(x, walk, run, memory.ring(group, i1 - i0), group, parts);
        wait_for_input();
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(shape::registers));
    decode_worker<T, C, D, BLOCKS, HAS_EXTRAS, AT_ONCE> worker(memory.p, memory.tile_max, x.factor, x.cap_factor);
    worker.ring = memory.ring(worker.group, i1 - i0);
    worker.block_shift = x.kv.block_shift;
    worker.leans = HAS_EXTRAS && x.slopes;
    const struct decode_mail letter = {memory.mail + threadIdx.x % DECODE_WORKERS, memory.letters, memory.letters + 8};
    work_items(x, heads, place, worker, walk, run, shares, parts, letter, memory.flag + 14 + worker.group);
}

/* n_single: sequences with one row. */
template <class T, class C, uint32_t D, uint32_t BLOCKS, bool HAS_EXTRAS, uint32_t AT_ONCE = 1>
static enum rc launch_decode(const struct cuda *cuda, const struct attention_args *args, uint32_t n_single, struct err *err)
{
    typedef decode_shape<C, D, BLOCKS, AT_ONCE> shape;
    const struct qkv_args nothing = {};
    const uint32_t n_blocks = cuda->n_processors * AT_ONCE;
    attended<T, C> x(*args);
    x.is_single = n_single == x.n_seqs;
    const uint32_t parts = ceil_div(x.group, shape::heads), n_heads = x.group < shape::heads ? x.group : shape::heads;
    const uint32_t most = ceil_div(args->kv.table_stride * args->batch->block_tokens, SPLIT);
    const uint32_t list_bytes = (uint32_t)sizeof(struct decode_span) * (x.n_seqs + 1);
    const uint32_t other_bytes = shape::fixed_bytes + list_bytes;
    /* A block takes 1 KB of a processor's 228 itself. */
    const uint32_t room = (SHARED_BYTES + 1024) / AT_ONCE - 1024;
    const uint32_t depth = other_bytes < room ? (room - other_bytes) / shape::place_bytes : 0;
    struct decode_place place = {cuda->partials, cuda->arrivals, most + 1, (n_heads * (D + 2) + 3) & ~3u, depth};
    size_t wanted = (size_t)n_blocks * place.slots * place.stride * sizeof(float);
    if (AT_ONCE == 2 && (wanted > cuda->partials_bytes || depth < 2 * TILES))
        return launch_decode<T, C, D, BLOCKS, HAS_EXTRAS>(cuda, args, n_single, err);
    if (wanted > cuda->partials_bytes)
        return err_set(err, RC_CONFIG, "attention: wanted %zu bytes for the splits of long sequences, have %zu; lower "
                       "max_model_len", wanted, cuda->partials_bytes);
    if (depth < TILES)
        return err_set(err, RC_CONFIG, "attention: wanted fewer sequences in a step, have %u; lower max_num_seqs", x.n_seqs);
    uint32_t shared_bytes = depth * shape::place_bytes + other_bytes;
    allow_shared(attention_decode<T, C, D, BLOCKS, HAS_EXTRAS, AT_ONCE>);
    launch(cuda, attention_decode<T, C, D, BLOCKS, HAS_EXTRAS, AT_ONCE>, n_blocks, DECODE_THREADS, shared_bytes, x,
           qkv_rows<T>(args->heads ? *args->heads : nothing), place, args->kv.n_kv_heads * parts, parts, n_single);
    return RC_OK;
}

#endif
