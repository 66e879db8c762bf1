/* attention_share.cuh: how attention_decode.cuh shares its work out. Items (sequence, unit, split), flattened in that order, go
 * to the blocks in equal contiguous runs; every block reads the batch itself, so no list is made on the host. A block lists all
 * sequences' splits, takes its run, and walks it item by item. */
#ifndef LLMPY_CUDA_ATTENTION_SHARE_CUH
#define LLMPY_CUDA_ATTENTION_SHARE_CUH

#include "attention.cuh"

#define FEW_SEQS 32u        /* a lane each */
#define DECODE_WORKERS 128u /* of a group */
#define DECODE_THREADS 384u /* whole warpgroups, for setmaxnreg */

struct decode_span {
    uint32_t before, len, seen, row, table_row; /* before: splits of the sequences before it; seen: the first key that is */
};

/* a / b, where that is less than 2^20. */
static __device__ __forceinline__ uint32_t quotient(uint32_t a, uint32_t b)
{
    uint32_t q = (uint32_t)__fdividef((float)a, (float)b);
    if (q * b > a)
        q--;
    else if (a - q * b >= b)
        q++;
    return q;
}

/* The items of each block: the first `extra` blocks have one more than the others. */
struct decode_shares {
    uint32_t each, extra, n;
    /* If sequences have two or three splits on average, a block takes that many items, where so few items allow it: that costs
     * less than folding through memory. */
    __device__ decode_shares(uint32_t n_splits, uint32_t n_single, uint32_t n_units, uint32_t n_blocks)
    {
        uint32_t n_items = n_splits * n_units;
        n = n_items;
        if (n_splits > n_single && n_splits <= 3 * n_single)
            n = n_splits <= 2 * n_single ? (n_items + 1) / 2 : (n_items + 2) / 3;
        n = min(n, n_blocks);
        each = n ? quotient(n_items, n) : 0;
        extra = n_items - each * n;
    }
    __device__ uint32_t begin(uint32_t block) const
    {
        return block * each + min(block, extra);
    }
    __device__ uint32_t owner(uint32_t item) const
    {
        uint32_t large = extra * (each + 1);
        return item < large ? quotient(item, each + 1) : extra + quotient(item - large, each);
    }
};

/* The span of sequence b, without the splits before it. Returns its splits; 0 if the sequence has several rows or none. */
template <class X>
static __device__ __forceinline__ uint32_t span_of(const X &x, uint32_t b, struct decode_span *span)
{
    *span = {};
    if (b >= x.n_seqs)
        return 0;
    span->row = x.is_single ? b : (uint32_t)x.seq_first_row[b];
    if (!x.is_single && (uint32_t)x.seq_first_row[b + 1] != span->row + 1)
        return 0;
    span->len = (uint32_t)x.positions[span->row] + 1;
    span->table_row = (uint32_t)x.row_seq[span->row];
    span->seen = x.first_seen(span->len - 1);
    return (span->len + SPLIT - 1) / SPLIT - span->seen / SPLIT;
}

/* The sum of n over the lanes up to this one. */
static __device__ __forceinline__ uint32_t sum_up_to(uint32_t n)
{
    for (uint32_t apart = 1; apart < 32; apart *= 2) {
        uint32_t other = __shfl_up_sync(~0u, n, apart);
        n += threadIdx.x % 32 >= apart ? other : 0;
    }
    return n;
}

/* Fills list[0 .. n_seqs], by all THREADS threads of the block; returns the number of splits. sums: [THREADS / 32]. */
template <uint32_t THREADS, class X>
static __device__ uint32_t list_spans(const X &x, struct decode_span *list, uint32_t *sums)
{
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, total = 0;
    for (uint32_t base = 0; base < x.n_seqs; base += THREADS) {
        struct decode_span span;
        uint32_t b = base + threadIdx.x, n = span_of(x, b, &span), upto = sum_up_to(n);
        if (lane == 31)
            sums[warp] = upto;
        __syncthreads();
        span.before = total + upto - n;
        for (uint32_t w = 0; w < THREADS / 32; w++) {
            span.before += w < warp ? sums[w] : 0;
            total += sums[w];
        }
        if (b < x.n_seqs)
            list[b] = span;
        __syncthreads();
    }
    if (threadIdx.x == 0)
        list[x.n_seqs] = {total, 0, 0, 0, 0};
    return total;
}

/* The number of splits of few sequences, which every warp sums alone; span: the lane's. */
template <class X>
static __device__ __forceinline__ uint32_t few_splits(const X &x, struct decode_span *span)
{
    const uint32_t n = span_of(x, threadIdx.x % 32, span), upto = sum_up_to(n);
    span->before = upto - n;
    return __shfl_sync(~0u, upto, 31);
}

/* Walks the items of a block. */
struct decode_walk {
    const struct decode_span *list;
    uint32_t n_seqs, n_units;
    uint32_t seq, unit, split, n_splits, first_split, len, seen;
    __device__ void enter(void)
    {
        len = list[seq].len;
        n_splits = list[seq + 1].before - list[seq].before;
        seen = list[seq].seen;
        first_split = seen / SPLIT;
    }
    __device__ void start(uint32_t item, uint32_t in_seq)
    {
        seq = in_seq;
        enter();
        item -= list[seq].before * n_units;
        unit = n_splits == 1 ? item : quotient(item, n_splits);
        split = item - unit * n_splits;
    }
    __device__ void next(void)
    {
        if (++split < n_splits)
            return;
        split = 0;
        if (++unit < n_units)
            return;
        unit = 0;
        do
            seq++;
        while (seq < n_seqs && list[seq + 1].before == list[seq].before);
        if (seq < n_seqs)
            enter();
    }
    __device__ uint32_t key(void) const
    {
        return (first_split + split) * SPLIT;
    }
    /* Item of the unit's first split. */
    __device__ uint32_t unit_begin(void) const
    {
        return list[seq].before * n_units + unit * n_splits;
    }
    /* Tiles [low, high) of the split hold keys that are seen. */
    __device__ uint32_t low_tile(void) const
    {
        return seen > key() ? (seen - key()) / TILE : 0;
    }
    __device__ uint32_t high_tile(void) const
    {
        return min(TILES, (len - key() + TILE - 1) / TILE);
    }
};

/* A block's items [begin, end). The items from `tail` on belong to an unfinished unit and come first, so that other blocks do
 * not wait for them at the end. */
struct decode_run {
    uint32_t begin, tail, end, first_seq, last_seq;
    __device__ decode_run(struct decode_walk walk, uint32_t i0, uint32_t i1, uint32_t seq0, uint32_t seq1)
        : begin(i0), tail(i1), end(i1), first_seq(seq0), last_seq(seq1)
    {
        walk.start(i1 - 1, seq1);
        uint32_t unit = walk.unit_begin();
        if (walk.split + 1 < walk.n_splits && unit > i0)
            tail = unit;
    }
    __device__ uint32_t start_item(void) const
    {
        return tail < end ? tail : begin;
    }
    __device__ void start(struct decode_walk &walk) const
    {
        walk.start(start_item(), tail < end ? last_seq : first_seq);
    }
    /* Moves to the next item. Past the last item the walk is meaningless. */
    __device__ uint32_t next(struct decode_walk &walk, uint32_t item) const
    {
        if (++item == end && tail < end)
            walk.start(item = begin, first_seq);
        else
            walk.next();
        return item;
    }
};

/* The sequences that a block's items [begin, end) start and end in. */
struct decode_ends {
    uint32_t first, last;
};

/* Of few sequences every warp finds them by its lanes' spans, and the first one makes the list. By all threads of the block. */
static __device__ __forceinline__ struct decode_ends few_ends(struct decode_span *list, const struct decode_span &span,
                                                              uint32_t n_seqs, uint32_t n_splits, uint32_t n_units, uint32_t i0,
                                                              uint32_t i1)
{
    if (threadIdx.x < n_seqs)
        list[threadIdx.x] = span;
    if (threadIdx.x == 0)
        list[n_seqs] = {n_splits, 0, 0, 0, 0};
    const uint32_t begin = span.before * n_units, next = __shfl_down_sync(~0u, begin, 1);
    const uint32_t end = threadIdx.x % 32 == 31 ? n_splits * n_units : next;
    const struct decode_ends ends = {__ffs(__ballot_sync(~0u, begin <= i0 && i0 < end)) - 1u,
                                     __ffs(__ballot_sync(~0u, begin < i1 && i1 <= end)) - 1u};
    __syncthreads();
    return ends;
}

/* Of many they are in the list. found: [2]. By all THREADS threads of the block. */
template <uint32_t THREADS = DECODE_THREADS>
static __device__ __forceinline__ struct decode_ends many_ends(const struct decode_span *list, uint32_t n_seqs,
                                                               uint32_t n_units, uint32_t i0, uint32_t i1, uint32_t *found)
{
    __syncthreads();
    for (uint32_t b = threadIdx.x; b < n_seqs; b += THREADS) {
        uint32_t begin = list[b].before * n_units, end = list[b + 1].before * n_units;
        if (begin <= i0 && i0 < end)
            found[0] = b;
        if (begin < i1 && i1 <= end)
            found[1] = b;
    }
    __syncthreads();
    return {found[0], found[1]};
}

/* Chooses the group of a block that takes an item, and the group that folds the item's unit. The groups alternate by whole
 * units if these are short, so that nothing passes between the groups; else by items, and the first group folds. */
struct decode_turns {
    const struct decode_run &run;
    uint32_t item, left, owner;
    __device__ explicit decode_turns(const struct decode_run &of)
        : run(of), item(of.start_item()), left(of.end - of.begin), owner(0)
    {
    }
    __device__ bool is_whole(const struct decode_walk &walk) const
    {
        return walk.n_splits == 1 || (walk.n_splits == 2 && run.end - run.begin > 2);
    }
    __device__ uint32_t folder(const struct decode_walk &walk) const
    {
        return is_whole(walk) ? owner : 0;
    }
    __device__ void next(struct decode_walk &walk)
    {
        owner ^= !is_whole(walk) || walk.split + 1 == walk.n_splits || item + 1 == run.end;
        item = run.next(walk, item);
        left--;
    }
    __device__ void pass_to(uint32_t group, struct decode_walk &walk)
    {
        while (left && owner != group)
            next(walk);
    }
};

#endif
