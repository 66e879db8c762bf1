/* attention_widen.cuh: writes the keys and values of prompts, from pages of bytes, as the 16-bit operands that
 * attention_prefill.cuh copies into its ring. A tile of a prompt serves all blocks of the prompt's rows, so it is widened once
 * here instead of in every block. Bound by bytes: 8,192 tokens of 8 heads of 128 values, 17 MB read and 34 MB written, 11 us at
 * 4.55 TB/s.
 *
 * The operands lie in `partials`, which no other kernel uses at that time. Sequences of few rows, and those that find no more
 * room, are not widened; their blocks widen the pages themselves. */
#ifndef LLMPY_CUDA_ATTENTION_WIDEN_CUH
#define LLMPY_CUDA_ATTENTION_WIDEN_CUH

#include "attention_prefill.cuh"

#define WIDEN_THREADS PREFILL_SEQS
#define WIDEN_BLOCKS 8u /* of a processor */
#define WIDEN_ROWS 3u   /* tiles of rows that make widening worth it */

/* The tiles [low, high) of keys of entry i that rows of the step see; none if the entry is not worth widening. */
template <class X>
static __device__ void widened_tiles(const X &x, const struct prefill_list &list, uint32_t i, uint32_t *low, uint32_t *high)
{
    *low = *high = 0;
    if (i >= list.n || list.tile_end[i] - (i ? list.tile_end[i - 1] : 0) < WIDEN_ROWS)
        return;
    const uint32_t first = (uint32_t)x.seq_first_row[list.seq[i]], end = (uint32_t)x.seq_first_row[list.seq[i] + 1];
    const uint32_t start = (uint32_t)x.positions[first];
    *low = x.first_seen(start) / TILE;
    *high = (start + end - first + TILE - 1) / TILE;
}

/* Widens the tokens of a tile of keys or values, as far as pages hold them; with the keys come the scales. */
template <class T, class C, uint32_t D>
static __device__ void widen_tile(const attended<T, C> &x, uint32_t seq, uint32_t tile, uint32_t head, uint32_t values,
                                  char *operands)
{
    char *chunk = operands + values * prefill_shape<D>::chunk_bytes;
    const uint32_t first_row = (uint32_t)x.seq_first_row[seq], table_row = (uint32_t)x.row_seq[first_row];
    const uint32_t start = (uint32_t)x.positions[first_row], len = start + (uint32_t)x.seq_first_row[seq + 1] - first_row;
    const uint32_t seen = x.first_seen(start), shift = x.kv.block_shift;
#pragma unroll
    for (uint32_t at = threadIdx.x; at < TILE * D / 16; at += WIDEN_THREADS) {
        const uint32_t token = at / (D / 16), position = tile * TILE + token, page = position >> shift;
        if (page << shift >= len || (page + 1) << shift <= seen)
            continue;
        const uint32_t c = at % (D / 16);
        const uint4 bytes = __ldcg(x.template byte_chunk<D>(table_row, position, head, values, c));
        if (values)
            widen_chunk<weight_of<T, C>, C, D>(bytes, false, chunk, token, c);
        else
            widen_chunk<T, C, D>(bytes, true, chunk, token, c);
    }
    if (scale_bytes_of<C>() && !values && threadIdx.x < 2 * TILE)
        copy_scales(x, table_row, tile, head, seen, len, threadIdx.x, (float *)(operands + 2 * prefill_shape<D>::chunk_bytes));
}

template <class T, class C, uint32_t D>
static __global__ void __launch_bounds__(WIDEN_THREADS)
attention_widen(const __grid_constant__ attended<T, C> x, const __grid_constant__ struct prefill_list list,
              const struct prefill_wide wide)
{
    only_sm_90a();
    __shared__ uint32_t low[PREFILL_SEQS], end[PREFILL_SEQS + 1];
    start_next();
    wait_for_input();
    uint32_t high, own;
    widened_tiles(x, list, threadIdx.x, &low[threadIdx.x], &high);
    own = high - low[threadIdx.x];
    end[threadIdx.x + 1] = own;
    if (threadIdx.x == 0)
        end[0] = 0;
    __syncthreads();
    for (uint32_t apart = 1; apart < list.n; apart *= 2) {
        const uint32_t before = threadIdx.x + 1 > apart ? end[threadIdx.x + 1 - apart] : 0;
        __syncthreads();
        end[threadIdx.x + 1] += before;
        __syncthreads();
    }
    if (blockIdx.x == 0 && threadIdx.x < list.n)
        wide.places[threadIdx.x] = own && end[threadIdx.x + 1] <= wide.n_tiles ? end[threadIdx.x] : NOT_WIDE;
    const uint32_t parts = 2 * wide.n_heads, n = end[list.n] * parts;
    for (uint32_t item = blockIdx.x, i = 0; item < n; item += gridDim.x) {
        const uint32_t at = item / parts, part = item % parts;
        while (end[i + 1] <= at)
            i++;
        if (end[i + 1] <= wide.n_tiles)
            widen_tile<T, C, D>(x, list.seq[i], low[i] + at - end[i], wide.first_head + part / 2, part % 2,
                                wide.chunks + (size_t)(item / 2) * prefill_shape<D, scale_bytes_of<C>()>::tile_bytes);
    }
}

/* Starts the kernel for heads from `first` on, if an entry of the list is worth it. As many heads as find room are widened at a
 * time, if one sequence is as long as the batch allows and no other has earlier tokens. Whatever else finds no room is right,
 * too, but slower. */
template <class T, class C, uint32_t D>
static struct prefill_wide launch_widen(const struct cuda *cuda, const struct batch_view *batch, const attended<T, C> &x,
                                        const struct prefill_list &list, uint32_t first)
{
    const size_t places_bytes = 1024, tile_bytes = prefill_shape<D, scale_bytes_of<C>()>::tile_bytes;
    const uint32_t n_heads = x.kv.n_kv_heads - first, reach = x.kv.table_stride * x.kv.block_tokens;
    const uint32_t most = batch->max_tokens && batch->max_tokens < reach ? batch->max_tokens : reach;
    struct prefill_wide wide = {first, n_heads, NULL, NULL, 0};
    bool is_worth = false;
    for (uint32_t i = 0; i < list.n; i++)
        is_worth |= list.tile_end[i] - (i ? list.tile_end[i - 1] : 0) >= WIDEN_ROWS;
    if (!is_worth)
        return wide;
    const size_t room = (cuda->partials_bytes - places_bytes) / tile_bytes; /* tiles of one head */
    const uint32_t fitting = (uint32_t)(room / (ceil_div(most + batch->n_rows, TILE) + list.n));
    if (fitting && fitting < n_heads)
        wide.n_heads = fitting;
    wide.places = (uint32_t *)cuda->partials;
    wide.chunks = (char *)cuda->partials + places_bytes;
    wide.n_tiles = (uint32_t)(room / wide.n_heads);
    launch(cuda, attention_widen<T, C, D>, cuda->n_processors * WIDEN_BLOCKS, WIDEN_THREADS, 0, x, list, wide);
    return wide;
}

#endif
