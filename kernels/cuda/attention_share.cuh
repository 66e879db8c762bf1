/* attention_share.cuh: how attention_decode.cuh shares its work out. Items (sequence, unit, split), flattened in that order, go
 * to the blocks in equal contiguous runs; every block reads the batch itself, so no list is made on the host. A block lists all
 * sequences' splits, takes its run, and walks it item by item. */
#ifndef LLMPY_CUDA_ATTENTION_SHARE_CUH
#define LLMPY_CUDA_ATTENTION_SHARE_CUH

#include "attention.cuh"

#define DECODE_THREADS 384u /* 12 warps, so that setmaxnreg has whole warpgroups */

struct decode_span {
    uint32_t before, len, row, table_row; /* splits of the sequences before it */
};

/* How items are shared out: the first `extra` blocks take one more than the others. */
struct decode_shares {
    uint32_t each, extra, n;
    /* least: items of a block, where they are so few; two at once cost less than folding through memory. */
    __device__ decode_shares(uint32_t n_items, uint32_t n_blocks, uint32_t least)
    {
        n = n_items ? min(n_blocks, (n_items + least - 1) / least) : 0;
        each = n ? n_items / n : 0;
        extra = n ? n_items % n : 0;
    }
    __device__ uint32_t begin(uint32_t block) const
    {
        return block * each + min(block, extra);
    }
    __device__ uint32_t owner(uint32_t item) const
    {
        uint32_t large = extra * (each + 1);
        return item < large ? item / (each + 1) : extra + (item - large) / each;
    }
};

/* Fills list[0 .. n_seqs], by all threads; returns the number of splits. */
template <class T> static __device__ uint32_t list_spans(const attended<T> &x, struct decode_span *list, uint32_t *sums)
{
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, total = 0;
    for (uint32_t base = 0; base < x.n_seqs; base += DECODE_THREADS) {
        uint32_t b = base + threadIdx.x, len = 0, row = 0, table_row = 0, n = 0;
        if (b < x.n_seqs) {
            row = x.is_single ? b : (uint32_t)x.seq_first_row[b];
            if (x.is_single || (uint32_t)x.seq_first_row[b + 1] == row + 1) {
                len = (uint32_t)x.positions[row] + 1;
                table_row = (uint32_t)x.row_seq[row];
                n = (len + SPLIT - 1) / SPLIT - x.first_seen(len - 1) / SPLIT;
            }
        }
        uint32_t upto = n;
        for (uint32_t apart = 1; apart < 32; apart *= 2) {
            uint32_t other = __shfl_up_sync(~0u, upto, apart);
            upto += lane >= apart ? other : 0;
        }
        if (lane == 31)
            sums[warp] = upto;
        __syncthreads();
        uint32_t before = total;
        for (uint32_t w = 0; w < DECODE_THREADS / 32; w++) {
            before += w < warp ? sums[w] : 0;
            total += sums[w];
        }
        if (b < x.n_seqs)
            list[b] = {before + upto - n, len, row, table_row};
        __syncthreads();
    }
    if (threadIdx.x == 0)
        list[x.n_seqs] = {total, 0, 0, 0};
    return total;
}

/* Walks the items of a block. */
struct decode_walk {
    const struct decode_span *list;
    uint32_t n_seqs, n_units, window;
    uint32_t seq, unit, split, n_splits, first_split, len, seen; /* seen: the first key that is */
    __device__ void enter(void)
    {
        len = list[seq].len;
        n_splits = list[seq + 1].before - list[seq].before;
        seen = window && len > window ? len - window : 0;
        first_split = seen / SPLIT;
    }
    __device__ void start(uint32_t item, uint32_t in_seq)
    {
        seq = in_seq;
        enter();
        item -= list[seq].before * n_units;
        unit = item / n_splits;
        split = item % n_splits;
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

/* A block's items [begin, end). Those from `tail` on, a unit left unfinished, come first, so that other blocks need not wait
 * for them at the end. */
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
    /* The item after one, and the walk there; past the last one the walk means nothing. */
    __device__ uint32_t next(struct decode_walk &walk, uint32_t item) const
    {
        if (++item == end && tail < end)
            walk.start(item = begin, first_seq);
        else
            walk.next();
        return item;
    }
};

#endif
