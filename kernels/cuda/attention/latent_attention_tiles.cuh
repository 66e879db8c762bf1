/* latent_attention_tiles.cuh: latent attention on wgmma, for latents of 512 values and rope keys of 64 in the 16-bit type of
 * activations, in the canonical order of attention.cuh (s: one chain over the latent, then the rope key). Operands are swapped,
 * S^T = K Q^T and O^T = C^T P^T, as a head's query is one of a few columns and all heads share the keys.
 * Cache: a page is [token / 8][9 slabs][token % 8][64], the 16-byte chunk c of 128 bytes at c ^ (token % 8), as in kv.cuh.
 *
 * Packed row (token, head) of a sequence is token * n_heads + head. A block has N of them: a warp streams tiles of 64 tokens,
 * 74 KB each, through two places; a warpgroup scores a tile while two others add the one before, half the latent each, with the
 * sums of the split and of all splits in registers. Sequences with one row are cut into items of one split, shared out by
 * attention_share.cuh; splits of a run that does not start at its unit's first one, and a unit left unfinished, go to
 * `partials`, and a second kernel folds them in order. Sequences of several rows: a block for every 32 packed rows. A step of
 * single rows stores their tokens as it meets them; otherwise a kernel before does.
 * One row of 16 heads is bound by the bytes of its keys, 1152 a token: 32 sequences of 1,024 tokens, 38 MB, 8.3 us at 4.55
 * TB/s. Prompts are bound by operations, 2176 for every visible pair and head: 8,192 tokens, 16 heads, 1.2 TFLOP, 1.5 ms at 790
 * TFLOP/s, of which operands in shared memory allow 64 %. */
#ifndef LLMPY_CUDA_LATENT_ATTENTION_TILES_CUH
#define LLMPY_CUDA_LATENT_ATTENTION_TILES_CUH

#include "../core/eight.cuh"
#include "../core/launch.cuh"
#include "attention_decode.cuh"
#include "attention_prefill.cuh"

#define LATENT 512u
#define LATENT_DIM 576u
#define LATENT_TILE (TILE * LATENT_DIM * 2) /* bytes */
#define LATENT_PLACES 2u
#define LATENT_THREADS 512u /* a warpgroup that fetches, one that scores, two that add */
#define QUERY_THREADS 96u /* of the first, which fetch queries */
#define SCORERS 128u
#define ADDERS 256u
#define FEW_ROWS 16u  /* packed rows of a block of sequences with one row */
#define MANY_ROWS 32u /* of sequences with several rows */

template <class T, class C> struct latents {
    rows<T> q, q_rope, latent, rope_key, out;
    char *layer; /* of page 0 */
    size_t page_bytes;
    const int32_t *table, *positions, *row_seq, *seq_first_row;
    uint32_t table_stride, block_tokens, block_shift, n_heads, n_latent, dim, n_seqs;
    bool is_single, shares_new_keys;
    bool is_stored; /* have the rows' tokens been, by a kernel before? */
    float factor; /* scale log2 e */
    latents(const struct latent_attention_args &args)
        : q(args.q), q_rope(args.q_rope), latent(args.latent), rope_key(args.rope_key), out(args.out),
          layer((char *)args.kv.pool + args.kv.layer_offset), page_bytes(args.kv.page_bytes), table(args.kv.table),
          positions(args.batch->positions), row_seq(args.batch->row_seq), seq_first_row(args.batch->seq_first_row),
          table_stride(args.kv.table_stride), block_tokens(args.batch->block_tokens),
          block_shift(__builtin_ctz(args.batch->block_tokens)), n_heads(args.n_heads), n_latent(args.latent.width),
          dim(args.latent.width + args.rope_key.width), n_seqs(args.batch->n_seqs), is_single(false),
          shares_new_keys(args.batch->shares_new_keys), is_stored(true), factor(args.scale * 1.44269504f)
    {
    }
    __device__ __forceinline__ char *page_of(uint32_t seq, uint32_t position) const
    {
        return layer + (size_t)table[(size_t)seq * table_stride + (position >> block_shift)] * page_bytes;
    }
    /* Plain: a token's values. */
    __device__ __forceinline__ C *token(uint32_t seq, uint32_t position) const
    {
        return (C *)page_of(seq, position) + (size_t)(position & (block_tokens - 1)) * dim;
    }
    /* Eight values of a packed row's query, at 8 * chunk. */
    __device__ __forceinline__ const T *query(uint32_t row, uint32_t head, uint32_t chunk) const
    {
        const uint32_t part = q_rope.width / n_heads;
        return chunk < LATENT / 8 ? q.at(row, head * LATENT + chunk * 8)
                                  : q_rope.at(row, (head + 1) * part + (chunk * 8 - LATENT_DIM));
    }
    __device__ __forceinline__ uint32_t first_seen(uint32_t) const { return 0; }
};

/* Does the configuration lay its cache in tiles? Kernels of sm_90a alone read them. */
static inline bool latents_are_tiled(const struct cuda *cuda, const struct latent_attention_args *args)
{
    return !cuda->is_portable && args->kv.dtype == cuda->dtype && cuda->dtype != DTYPE_F32 && args->latent.width == LATENT &&
           args->rope_key.width == LATENT_DIM - LATENT;
}

/* Bytes from a tile's begin, or a page's, to a token's 16-byte chunk. */
static __device__ __forceinline__ uint32_t chunk_at(uint32_t token, uint32_t chunk)
{
    return (token / 8 * (LATENT_DIM / 64) + chunk / 8) * SLAB_BYTES + token % 8 * 128 + (chunk % 8 ^ token % 8) * 16;
}

/* Eight values of a row's own token. */
template <class T> static __device__ __forceinline__ eight<T> own_chunk(const latents<T, T> &x, uint32_t row, uint32_t chunk)
{
    const T *from = chunk < LATENT / 8 ? x.latent.at(row, chunk * 8) : x.rope_key.at(row, chunk * 8 - LATENT);
    eight<T> values;
#pragma unroll
    for (uint32_t i = 0; i < 8; i++)
        values.values[i] = from[i];
    return values;
}

/* A block a row, a thread 8 values. */
#define STORE_THREADS 96u
template <class T> static __global__ void __launch_bounds__(STORE_THREADS) latent_attention_store_tiles(const latents<T, T> x)
{
    start_next();
    wait_for_input();
    const uint32_t r = blockIdx.x, chunk = threadIdx.x, position = (uint32_t)x.positions[r];
    if (chunk < LATENT_DIM / 8)
        *(eight<T> *)(x.page_of((uint32_t)x.row_seq[r], position) + chunk_at(position & (x.block_tokens - 1), chunk)) =
            own_chunk(x, r, chunk);
}

/* ---- the task of a block ------------------------------------------------------------------------------------------------- */

/* Splits [split, end) of the n_splits that N packed rows see. */
struct latent_part {
    uint32_t table_row, first_row, start, len; /* of the sequence: rows of the step, position of the first one, keys */
    uint32_t packed, n_packed;                 /* first packed row; all of the sequence */
    uint32_t seen;                             /* keys up to the last one that a row sees */
    uint32_t split, end, n_splits, slot;       /* slot: the first split's among the block's */
    __device__ uint32_t end_tile(void) const
    {
        return min(end * TILES, (seen + TILE - 1) / TILE);
    }
};

/* A block's run of items of sequences with one row. */
struct latent_run {
    const struct decode_span *list;
    uint32_t n_units, n_heads, begin, item, end, seq;
    __device__ latent_run(const struct decode_span *of, uint32_t n_seqs, uint32_t units, uint32_t heads, uint32_t i0,
                          uint32_t i1)
        : list(of), n_units(units), n_heads(heads), begin(i0), item(i0), end(i1), seq(0)
    {
        uint32_t high = n_seqs - 1;
        while (seq < high) {
            const uint32_t middle = (seq + high) / 2;
            if (list[middle + 1].before * n_units <= i0)
                seq = middle + 1;
            else
                high = middle;
        }
    }
    __device__ bool next(struct latent_part *part)
    {
        if (item == end)
            return false;
        while (list[seq + 1].before * n_units <= item)
            seq++;
        const struct decode_span &span = list[seq];
        const uint32_t n = list[seq + 1].before - span.before, in_seq = item - span.before * n_units, unit = in_seq / n;
        const uint32_t split = in_seq - unit * n, count = min(n - split, end - item);
        *part = {span.table_row, span.row, span.len - 1, span.len, unit * FEW_ROWS, n_heads, span.len,
                 split, split + count, n, item - begin};
        item += count;
        return true;
    }
};

/* The one unit of a block of a sequence with several rows. */
struct latent_unit {
    struct latent_part part;
    bool is_left;
    template <class T> __device__ latent_unit(const latents<T, T> &x, const struct prefill_list &list, uint32_t tile)
    {
        const uint32_t i = prefill_entry(list, tile), seq = list.seq[i], first = (uint32_t)x.seq_first_row[seq];
        const uint32_t n_rows = (uint32_t)x.seq_first_row[seq + 1] - first, start = (uint32_t)x.positions[first];
        const uint32_t packed = (list.tile_end[i] - 1 - tile) * MANY_ROWS, n_packed = n_rows * x.n_heads; /* longest first */
        const uint32_t seen = start + (min(packed + MANY_ROWS, n_packed) - 1) / x.n_heads + 1, n = (seen + SPLIT - 1) / SPLIT;
        part = {(uint32_t)x.row_seq[first], first, start, start + n_rows, packed, n_packed, seen, 0, n, n, 0};
        is_left = true;
    }
    __device__ bool next(struct latent_part *to)
    {
        *to = part;
        const bool was_left = is_left;
        is_left = false;
        return was_left;
    }
};

/* ---- shared memory ------------------------------------------------------------------------------------------------------- */

/* The data beside p that the scorers pass to the adders for a tile: the factor of O, and at a split's end the factors of the
 * fold, and m and l of the splits folded so far. */
template <uint32_t N> struct latent_note {
    float a[N], before[N], now[N], m[N], l[N];
};

template <uint32_t N> struct latent_memory {
    static const uint32_t Q_PLACES = N == FEW_ROWS ? 2 : 1; /* as many as a block has parts at once */
    char ring[LATENT_PLACES][LATENT_TILE];
    char q[Q_PLACES][N * LATENT_DIM * 2];
    char p[LATENT_PLACES][N * TILE * 2];
    struct latent_note<N> notes[LATENT_PLACES];
    float most[4][N], sums[4][N];
    uint64_t full[LATENT_PLACES], empty[LATENT_PLACES], there[LATENT_PLACES], taken[LATENT_PLACES];
    uint64_t q_full[Q_PLACES], q_empty[Q_PLACES];
    uint32_t counts[LATENT_THREADS / 32];
};

/* The place of a tile, or of a part's queries, and the phase of its barriers. */
template <uint32_t PLACES> struct latent_turn {
    uint32_t n;
    __device__ uint32_t place(void) const { return n % PLACES; }
    __device__ uint32_t phase(void) const { return n / PLACES & 1; }
};

/* ---- the warps that fetch ------------------------------------------------------------------------------------------------ */

template <class T, uint32_t N, class Run>
static __device__ void fetch_latents(const latents<T, T> &x, Run run, latent_memory<N> &memory)
{
    const uint32_t lane = threadIdx.x % 32, shift = x.block_shift, n_pages = TILE >> shift, run_bytes = LATENT_DIM * 2 << shift;
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0,1.0;" : "=l"(policy));
    latent_turn<LATENT_PLACES> turn = {0};
    bool is_free = false; /* has the kernel before ended? data of earlier steps are read without waiting for it */
    for (struct latent_part part; run.next(&part);)
        for (uint32_t tile = part.split * TILES; tile < part.end_tile(); tile++, turn.n++) {
            const uint32_t first = tile * TILE + (lane << shift), place = turn.place();
            const bool is_mine = lane < n_pages && first < part.len;
            const char *from = is_mine ? x.page_of(part.table_row, first) : NULL;
            if (!is_free && x.is_stored && (x.shares_new_keys || tile * TILE + TILE > (part.start >> shift << shift))) {
                wait_for_input();
                is_free = true;
            }
            const uint32_t full = shared_address(&memory.full[place]), to = shared_address(memory.ring[place]);
            barrier_wait(shared_address(&memory.empty[place]), turn.phase() ^ 1);
            const uint32_t n_runs = __popc(__ballot_sync(~0u, is_mine));
            if (lane == 0)
                barrier_expect(full, n_runs * run_bytes);
            __syncwarp();
            if (is_mine)
                copy_bytes(to + lane * run_bytes, from, run_bytes, full, policy);
        }
    if (!is_free)
        wait_for_input();
}

/* Queries of N packed rows as operands; missing rows are zeros. */
template <class T, uint32_t N, class Run>
static __device__ void fetch_queries(const latents<T, T> &x, Run run, latent_memory<N> &memory)
{
    const uint32_t chunks = LATENT_DIM / 8;
    latent_turn<latent_memory<N>::Q_PLACES> turn = {0};
    wait_for_input();
    for (struct latent_part part; run.next(&part); turn.n++) {
        const uint32_t to = shared_address(memory.q[turn.place()]);
        barrier_wait(shared_address(&memory.q_empty[turn.place()]), turn.phase() ^ 1);
        for (uint32_t i = threadIdx.x - 32; i < N * chunks; i += QUERY_THREADS) {
            const uint32_t r = i / chunks, chunk = i % chunks, packed = part.packed + r;
            const uint32_t there = min(packed, part.n_packed - 1), row = there / x.n_heads;
            asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(to + chunk_at(r, chunk)),
                         "l"(x.query(part.first_row + row, there - row * x.n_heads, chunk)), "r"(packed == there ? 16 : 0)
                         : "memory");
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
        shared_written();
        barrier_arrive(shared_address(&memory.q_full[turn.place()]));
    }
}

/* ---- the warpgroup that scores ------------------------------------------------------------------------------------------- */

/* Describes an operand of octets of rows, 9 slabs apart; 16 columns are 2 further on, a slab 64. */
static __device__ __forceinline__ uint64_t latent_rows(uint32_t address)
{
    return (uint64_t)1 << 62 | (uint64_t)(LATENT_DIM / 64 * 64) << 32 | (uint64_t)64 << 16 | address >> 4;
}

/* A thread's packed rows 8 i + 2 t + e are number 2 i + e; its s[4 i + 2 y + e] is of key 16 warp + g + 8 y. */
template <class T, uint32_t N> struct latent_scorer {
    static const uint32_t n = N / 4;
    float s[N / 2], a[n], m[n], l[n], all_m[n], all_l[n];
    int32_t last[n]; /* positions */
    float c;

    static __device__ __forceinline__ uint32_t row_of(uint32_t i)
    {
        return i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
    }

    __device__ __forceinline__ void begin(const struct latent_part &part, uint32_t n_heads)
    {
#pragma unroll
        for (uint32_t i = 0; i < n; i++) {
            last[i] = (int32_t)(part.start + min(part.packed + row_of(i), part.n_packed - 1) / n_heads);
            m[i] = all_m[i] = MINUS_INFINITY;
            l[i] = all_l[i] = 0;
        }
    }

    __device__ __forceinline__ void multiply(const char *tile, const char *q)
    {
        const uint64_t keys = latent_rows(shared_address(tile)), queries = latent_rows(shared_address(q));
#pragma unroll
        for (uint32_t i = 0; i < N / 2; i++)
            s[i] = 0;
        wgmma_begin();
#pragma unroll
        for (uint32_t k = 0; k < LATENT_DIM / 16; k++)
            wgmma(s, keys + k / 4 * 64 + k % 4 * 2, queries + k / 4 * 64 + k % 4 * 2, T());
        wgmma_commit();
        wgmma_wait<0>();
        pin(s);
    }

    __device__ __forceinline__ void hide(uint32_t first_key)
    {
        const int32_t key = (int32_t)(first_key + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4);
#pragma unroll
        for (uint32_t i = 0; i < N / 2; i++)
            if (key + (int32_t)(i / 2 % 2 * 8) > last[i / 4 * 2 + i % 2])
                s[i] = MINUS_INFINITY;
    }

    /* Values of a row, joined over the lanes of a warp, to all four warps. */
    template <class F> static __device__ __forceinline__ void share(float (&x)[n], float (*all)[N], F join)
    {
#pragma unroll
        for (uint32_t i = 0; i < n; i++)
            for (uint32_t apart = 4; apart < 32; apart *= 2)
                x[i] = join(x[i], __shfl_xor_sync(~0u, x[i], apart));
        if (threadIdx.x % 32 < 4)
#pragma unroll
            for (uint32_t i = 0; i < n; i++)
                all[threadIdx.x / 32 % 4][row_of(i)] = x[i];
    }

    /* s becomes p; m and a move on, and the sums of p go to all. */
    __device__ __forceinline__ void soften(latent_memory<N> &memory)
    {
        float x[n];
#pragma unroll
        for (uint32_t i = 0; i < n; i++)
            x[i] = fmaxf(s[i / 2 * 4 + i % 2], s[i / 2 * 4 + 2 + i % 2]);
        share(x, memory.most, max_of());
        meet(1, SCORERS);
#pragma unroll
        for (uint32_t i = 0; i < n; i++) {
            const uint32_t row = row_of(i);
            float most = m[i];
            for (uint32_t w = 0; w < 4; w++)
                most = fmaxf(most, memory.most[w][row]);
            const float z = anchor(most), minus = -(z * c);
            a[i] = rescale(m[i], z, c);
            m[i] = most;
            for (uint32_t y = 0; y < 4; y += 2)
                s[i / 2 * 4 + y + i % 2] = power_of_2(fmaf(s[i / 2 * 4 + y + i % 2], c, minus));
            x[i] = s[i / 2 * 4 + i % 2] + s[i / 2 * 4 + 2 + i % 2];
        }
        share(x, memory.sums, add_of());
    }

    /* p as an operand [packed row][key]. */
    __device__ __forceinline__ void store_p(char *p) const
    {
        const uint32_t warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, r = lane % 8;
        const uint32_t to = shared_address(p) + lane / 16 * SLAB_BYTES + r * 128 + ((warp * 2 + lane / 8 % 2) ^ r) * 16;
#pragma unroll
        for (uint32_t i = 0; i < N / 2; i += 8)
            store_transposed(to + i / 4 * SLAB_BYTES, pack(s[i], s[i + 1], T()), pack(s[i + 2], s[i + 3], T()),
                             pack(s[i + 4], s[i + 5], T()), pack(s[i + 6], s[i + 7], T()));
    }

    __device__ __forceinline__ void add_sums(float (*sums)[N])
    {
#pragma unroll
        for (uint32_t i = 0; i < n; i++) {
            const uint32_t row = row_of(i);
            l[i] = fmaf(a[i], l[i], (sums[0][row] + sums[1][row]) + (sums[2][row] + sums[3][row]));
        }
    }

    /* Ends a split. Splits of a part that does not start at the unit's first split are stored unfolded. */
    __device__ __forceinline__ void close(bool is_alone, latent_note<N> &note)
    {
#pragma unroll
        for (uint32_t i = 0; i < n; i++) {
            const float most = fmaxf(all_m[i], m[i]), before = rescale(all_m[i], anchor(most), c);
            const float now = rescale(m[i], anchor(most), c);
            all_m[i] = is_alone ? m[i] : most;
            all_l[i] = is_alone ? l[i] : fold(all_l[i], before, l[i], now);
            m[i] = MINUS_INFINITY;
            l[i] = 0;
            if (threadIdx.x % SCORERS >= 4)
                continue;
            const uint32_t row = row_of(i);
            note.before[row] = before;
            note.now[row] = now;
            note.m[row] = all_m[i];
            note.l[row] = all_l[i];
        }
    }
};

/* Puts a row's own token into its tile, by the scorers, and its first unit's into the cache. */
template <class T>
static __device__ void store_own(const latents<T, T> &x, const struct latent_part &part, const eight<T> &own, char *tile)
{
    const uint32_t chunk = threadIdx.x % SCORERS, position = part.len - 1;
    if (chunk < LATENT_DIM / 8) {
        *(eight<T> *)(tile + chunk_at(position % TILE, chunk)) = own;
        if (part.packed == 0)
            *(eight<T> *)(x.page_of(part.table_row, position) + chunk_at(position & (x.block_tokens - 1), chunk)) = own;
    }
    shared_written();
    meet(1, SCORERS);
}

template <class T, uint32_t N, class Run>
static __device__ void score_latents(const latents<T, T> &x, Run run, latent_memory<N> &memory)
{
    latent_scorer<T, N> scorer;
    scorer.c = x.factor;
    latent_turn<LATENT_PLACES> turn = {0};
    latent_turn<latent_memory<N>::Q_PLACES> q_turn = {0};
    wait_for_input();
    for (struct latent_part part; run.next(&part); q_turn.n++) {
        const uint32_t lowest = part.start + part.packed / x.n_heads, end = part.end_tile();
        const bool has_own = !x.is_stored && part.end == part.n_splits;
        eight<T> own;
        if (has_own && threadIdx.x % SCORERS < LATENT_DIM / 8)
            own = own_chunk(x, part.first_row, threadIdx.x % SCORERS);
        scorer.begin(part, x.n_heads);
        barrier_wait(shared_address(&memory.q_full[q_turn.place()]), q_turn.phase());
        for (uint32_t tile = part.split * TILES; tile < end; tile++, turn.n++) {
            const uint32_t place = turn.place();
            latent_note<N> &note = memory.notes[place];
            barrier_wait(shared_address(&memory.full[place]), turn.phase());
            if (has_own && tile + 1 == end)
                store_own(x, part, own, memory.ring[place]);
            scorer.multiply(memory.ring[place], memory.q[q_turn.place()]);
            if (tile * TILE + TILE - 1 > lowest)
                scorer.hide(tile * TILE);
            scorer.soften(memory);
            if (tile * TILE + TILE > part.len) /* data behind the sequence may be anything */
                clear_values<LATENT_DIM>(memory.ring[place], part.len - tile * TILE, TILE, 0);
            barrier_wait(shared_address(&memory.taken[place]), turn.phase() ^ 1);
            scorer.store_p(memory.p[place]);
            meet(1, SCORERS);
            scorer.add_sums(memory.sums);
            if (threadIdx.x % SCORERS < 4)
                for (uint32_t i = 0; i < scorer.n; i++)
                    note.a[scorer.row_of(i)] = scorer.a[i];
            if ((tile + 1) % TILES == 0 || tile + 1 == end)
                scorer.close(part.split > 0, note);
            shared_written();
            barrier_arrive(shared_address(&memory.there[place]));
        }
        barrier_arrive(shared_address(&memory.q_empty[q_turn.place()]));
    }
}

/* ---- the warpgroups that add --------------------------------------------------------------------------------------------- */

/* d += A^T B^T: A is [16 keys][64 columns], B [N packed rows][16 keys]. */
#define SUMS4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_ADD(ctype, type)                                                                                              \
    static __device__ __forceinline__ void wgmma_add(float (&d)[8], uint64_t a, uint64_t b, ctype)                          \
    {                                                                                                                       \
        asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32." type "." type " {%0,%1,%2,%3,%4,%5,%6,%7},%8,%9,"        \
                     "1,1,1,1,0;"                                                                                           \
                     : SUMS4(0), SUMS4(4)                                                                                   \
                     : "l"(a), "l"(b));                                                                                     \
    }                                                                                                                       \
    static __device__ __forceinline__ void wgmma_add(float (&d)[16], uint64_t a, uint64_t b, ctype)                         \
    {                                                                                                                       \
        asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11," \
                     "%12,%13,%14,%15},%16,%17,1,1,1,1,0;"                                                                  \
                     : SUMS4(0), SUMS4(4), SUMS4(8), SUMS4(12)                                                              \
                     : "l"(a), "l"(b));                                                                                     \
    }
WGMMA_ADD(__nv_bfloat16, "bf16")
WGMMA_ADD(__half, "f16")
#undef WGMMA_ADD
#undef SUMS4

struct latent_place {
    float *partials;  /* [blocks][slots][stride]: splits of a block's first unit; in the last slot its last unit so far */
    uint32_t *before; /* [n_seqs + 1] splits of the sequences before one, for the kernel that folds */
    uint32_t slots, stride;
    __device__ __forceinline__ float *at(uint32_t block, uint32_t slot) const
    {
        return partials + ((size_t)block * slots + slot) * stride;
    }
};

/* Sums of a split and of all before it: o[i][4 b + 2 y + e] is of latent column 64 i + 16 warp + g + 8 y of the warpgroup's
 * 256, and of packed row 8 b + 2 t + e. */
template <class T, uint32_t N> struct latent_adder {
    static const uint32_t n = N / 2;
    float o[4][n], all[4][n];
    uint32_t column; /* 256 group + 16 warp + g */

    /* The factors of a thread's packed rows. */
    static __device__ __forceinline__ float2 factors(const float *of, uint32_t b)
    {
        return *(const float2 *)(of + b * 8 + threadIdx.x % 4 * 2);
    }

    __device__ __forceinline__ void begin(void)
    {
#pragma unroll
        for (uint32_t x = 0; x < 4 * n; x++)
            all[x / n][x % n] = 0;
    }

    __device__ __forceinline__ void move_on(bool is_first, const latent_note<N> &note)
    {
#pragma unroll
        for (uint32_t b = 0; b < N / 8; b++) {
            const float2 a = factors(note.a, b);
#pragma unroll
            for (uint32_t x = 0; x < 16; x++) {
                float &sum = o[x / 4][b * 4 + x % 4];
                sum = is_first ? 0 : sum * (x % 2 ? a.y : a.x);
            }
        }
    }

    __device__ __forceinline__ void multiply(const char *tile, const char *p)
    {
        const uint64_t values = latent_rows(shared_address(tile) + column / 256 * 4 * SLAB_BYTES);
        const uint64_t weights = wgmma_rows(shared_address(p));
        wgmma_begin();
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
#pragma unroll
            for (uint32_t k = 0; k < 4; k++)
                wgmma_add(o[i], values + i * 64 + k * 2 * (LATENT_DIM / 64 * 64), weights + k * 2, T());
        wgmma_commit();
        wgmma_wait<0>();
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            pin(o[i]);
    }

    __device__ __forceinline__ void close(bool is_alone, const latent_note<N> &note)
    {
#pragma unroll
        for (uint32_t b = 0; b < N / 8; b++) {
            const float2 before = factors(note.before, b), now = factors(note.now, b);
#pragma unroll
            for (uint32_t x = 0; x < 16; x++) {
                const float split = o[x / 4][b * 4 + x % 4];
                float &sum = all[x / 4][b * 4 + x % 4];
                sum = is_alone ? split : fold(sum, x % 2 ? before.y : before.x, split, x % 2 ? now.y : now.x);
            }
        }
    }

    /* Lanes of neighbouring columns swap, so that each writes two columns of one row. */
    __device__ __forceinline__ void write(const latents<T, T> &x, const struct latent_part &part, const latent_note<N> &note)
    {
        const uint32_t is_odd = threadIdx.x / 4 % 2;
#pragma unroll
        for (uint32_t b = 0; b < N / 8; b++) {
            const float2 l = factors(note.l, b);
            const float scale[2] = {__frcp_rn(l.x), __frcp_rn(l.y)};
            const uint32_t packed = part.packed + b * 8 + threadIdx.x % 4 * 2 + is_odd, row = packed / x.n_heads;
#pragma unroll
            for (uint32_t i = 0; i < 8; i++) {
                const float *pair = &all[i / 2][b * 4 + i % 2 * 2];
                const float even = pair[0] * scale[0], odd = pair[1] * scale[1];
                const float other = __shfl_xor_sync(~0u, is_odd ? even : odd, 4);
                const uint32_t value = is_odd ? pack(other, odd, T()) : pack(even, other, T());
                if (packed < part.n_packed)
                    *(uint32_t *)x.out.at(part.first_row + row, (packed - row * x.n_heads) * LATENT + column - is_odd +
                                                                    i / 2 * 64 + i % 2 * 8) = value;
            }
        }
    }

    /* To [n_rows][512], then m and l of the rows. */
    __device__ __forceinline__ void store(float *to, uint32_t n_rows, const latent_note<N> &note) const
    {
#pragma unroll
        for (uint32_t i = 0; i < 4 * n; i++) {
            const uint32_t y = i % n, row = y / 4 * 8 + threadIdx.x % 4 * 2 + y % 2;
            if (row < n_rows)
                __stcg(to + row * LATENT + column + i / n * 64 + y / 2 % 2 * 8, all[i / n][y]);
        }
        if (threadIdx.x % ADDERS < n_rows) {
            __stcg(to + n_rows * LATENT + threadIdx.x % ADDERS, note.m[threadIdx.x % ADDERS]);
            __stcg(to + n_rows * (LATENT + 1) + threadIdx.x % ADDERS, note.l[threadIdx.x % ADDERS]);
        }
    }
};

template <class T, uint32_t N, class Run>
static __device__ void add_latents(const latents<T, T> &x, Run run, const struct latent_place &to, latent_memory<N> &memory)
{
    latent_adder<T, N> adder;
    adder.column = threadIdx.x % ADDERS / 128 * 256 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    latent_turn<LATENT_PLACES> turn = {0};
    wait_for_input();
    for (struct latent_part part; run.next(&part);) {
        const uint32_t end = part.end_tile(), n_rows = min(N, part.n_packed - part.packed);
        adder.begin();
        for (uint32_t tile = part.split * TILES; tile < end; tile++, turn.n++) {
            const uint32_t place = turn.place();
            const latent_note<N> &note = memory.notes[place];
            barrier_wait(shared_address(&memory.full[place]), turn.phase());
            barrier_wait(shared_address(&memory.there[place]), turn.phase());
            adder.move_on(tile % TILES == 0, note);
            adder.multiply(memory.ring[place], memory.p[place]);
            barrier_arrive(shared_address(&memory.empty[place]));
            if ((tile + 1) % TILES == 0 || tile + 1 == end) {
                const uint32_t split = tile / TILES;
                adder.close(part.split > 0, note);
                if (part.split == 0 && split + 1 == part.n_splits)
                    adder.write(x, part, note);
                else if (part.split > 0 || split + 1 == part.end)
                    adder.store(to.at(blockIdx.x, part.split ? part.slot + split - part.split : to.slots - 1), n_rows, note);
            }
            barrier_arrive(shared_address(&memory.taken[place]));
        }
    }
}

/* ---- the kernels --------------------------------------------------------------------------------------------------------- */

template <uint32_t N> static __device__ __forceinline__ void make_barriers(latent_memory<N> &memory)
{
    if (threadIdx.x < LATENT_PLACES) {
        barrier_init(shared_address(&memory.full[threadIdx.x]), 1);
        barrier_init(shared_address(&memory.empty[threadIdx.x]), ADDERS);
        barrier_init(shared_address(&memory.there[threadIdx.x]), SCORERS);
        barrier_init(shared_address(&memory.taken[threadIdx.x]), ADDERS);
    }
    if (threadIdx.x < memory.Q_PLACES) {
        barrier_init(shared_address(&memory.q_full[threadIdx.x]), QUERY_THREADS);
        barrier_init(shared_address(&memory.q_empty[threadIdx.x]), SCORERS);
    }
    barriers_made();
}

template <class T, uint32_t N, class Run>
static __device__ __forceinline__ void work_latents(const latents<T, T> &x, const Run &run, const struct latent_place &to,
                                                    latent_memory<N> &memory)
{
    const uint32_t group = uniform(threadIdx.x / 128);
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        if (threadIdx.x < 32)
            fetch_latents<T, N>(x, run, memory);
        else
            fetch_queries<T, N>(x, run, memory);
    } else if (group == 1) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 104;");
        score_latents<T, N>(x, run, memory);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 176;");
        add_latents<T, N>(x, run, to, memory);
    }
}

/* n_single: sequences with one row. */
template <class T>
static __global__ void __launch_bounds__(LATENT_THREADS, 1)
    latent_attention_single(const __grid_constant__ latents<T, T> x, const __grid_constant__ struct latent_place place,
                            uint32_t n_units, uint32_t n_single)
{
    only_sm_90a();
    extern __shared__ __align__(1024) char shared[];
    latent_memory<FEW_ROWS> &memory = *(latent_memory<FEW_ROWS> *)shared;
    struct decode_span *list = (struct decode_span *)(shared + sizeof memory);
    start_next();
    make_barriers(memory);
    const uint32_t n_splits = list_spans<LATENT_THREADS>(x, list, memory.counts);
    const struct decode_shares shares(n_splits, n_single, n_units, gridDim.x);
    __syncthreads();
    if (blockIdx.x == gridDim.x - 1) { /* the likeliest to have nothing else to do */
        wait_for_input();
        for (uint32_t s = threadIdx.x; s <= x.n_seqs; s += LATENT_THREADS)
            place.before[s] = list[s].before;
    }
    if (blockIdx.x >= shares.n) {
        wait_for_input();
        return;
    }
    const uint32_t begin = shares.begin(blockIdx.x), end = shares.begin(blockIdx.x + 1);
    const struct latent_run run(list, x.n_seqs, n_units, x.n_heads, begin, end);
    work_latents<T, FEW_ROWS>(x, run, place, memory);
}

template <class T>
static __global__ void __launch_bounds__(LATENT_THREADS, 1)
    latent_attention_prefill(const __grid_constant__ latents<T, T> x, const __grid_constant__ struct prefill_list list)
{
    only_sm_90a();
    extern __shared__ __align__(1024) char shared[];
    latent_memory<MANY_ROWS> &memory = *(latent_memory<MANY_ROWS> *)shared;
    start_next();
    make_barriers(memory);
    const struct latent_unit unit(x, list, blockIdx.x);
    __syncthreads();
    work_latents<T, MANY_ROWS>(x, unit, {}, memory);
}

#define FOLD_AHEAD 8u /* splits that are loaded at once */

/* Folds the splits of units that several blocks have had: a block is four heads of one, a thread four columns. */
template <class T>
static __global__ void __launch_bounds__(512) latent_attention_fold(const latents<T, T> x, const struct latent_place place,
                                                                    uint32_t n_units, uint32_t n_single, uint32_t n_blocks)
{
    const uint32_t seq = blockIdx.x / n_units, unit = blockIdx.x % n_units, n_rows = min(FEW_ROWS, x.n_heads - unit * FEW_ROWS);
    const uint32_t head = blockIdx.y * 4 + threadIdx.x / 128, column = threadIdx.x % 128 * 4;
    start_next();
    wait_for_input();
    const uint32_t before = place.before[seq], n = place.before[seq + 1] - before, begin = before * n_units + unit * n;
    if (n < 2 || head >= n_rows)
        return;
    const struct decode_shares shares(place.before[x.n_seqs], n_single, n_units, n_blocks);
    uint32_t block = shares.owner(begin), item = shares.begin(block + 1), first = item;
    if (item >= begin + n)
        return;
    const float *from = place.at(block, place.slots - 1);
    const uint32_t at_m = n_rows * LATENT + head, at_l = at_m + n_rows;
    float m = __ldcg(from + at_m), l = __ldcg(from + at_l);
    float4 o = __ldcg((const float4 *)(from + head * LATENT + column));
    for (uint32_t next = shares.begin(++block + 1); item < begin + n;) {
        float4 split[FOLD_AHEAD];
        float ms[FOLD_AHEAD], ls[FOLD_AHEAD]; /* a missing one changes no bit */
#pragma unroll
        for (uint32_t k = 0; k < FOLD_AHEAD; k++, item++) {
            if (item == next) {
                first = next;
                next = shares.begin(++block + 1);
            }
            const bool is_there = item < begin + n;
            from = place.at(block, item - first);
            ms[k] = is_there ? __ldcg(from + at_m) : MINUS_INFINITY;
            ls[k] = is_there ? __ldcg(from + at_l) : 0;
            split[k] = is_there ? __ldcg((const float4 *)(from + head * LATENT + column)) : make_float4(0, 0, 0, 0);
        }
#pragma unroll
        for (uint32_t k = 0; k < FOLD_AHEAD; k++) {
            const float most = fmaxf(m, ms[k]), then = rescale(m, anchor(most), x.factor);
            const float now = rescale(ms[k], anchor(most), x.factor);
            m = most;
            l = fold(l, then, ls[k], now);
            o = make_float4(fold(o.x, then, split[k].x, now), fold(o.y, then, split[k].y, now),
                            fold(o.z, then, split[k].z, now), fold(o.w, then, split[k].w, now));
        }
    }
    const float scale = __frcp_rn(l);
    const uint32_t row = x.is_single ? seq : (uint32_t)x.seq_first_row[seq];
    *(uint2 *)x.out.at(row, (unit * FEW_ROWS + head) * LATENT + column) =
        make_uint2(pack(o.x * scale, o.y * scale, T()), pack(o.z * scale, o.w * scale, T()));
}

/* ---- the call ------------------------------------------------------------------------------------------------------------ */

template <class T>
static enum rc attend_single(const struct cuda *cuda, const struct latent_attention_args *args, uint32_t n_single,
                             bool is_stored, struct err *err)
{
    latents<T, T> x(*args);
    x.is_single = n_single == x.n_seqs;
    x.is_stored = is_stored;
    const uint32_t most = ceil_div(x.table_stride * x.block_tokens, SPLIT), n_units = ceil_div(x.n_heads, FEW_ROWS);
    const uint32_t n_rows = x.n_heads < FEW_ROWS ? x.n_heads : FEW_ROWS, n_blocks = cuda->n_processors;
    const size_t list_floats = (x.n_seqs + 1 + 3) & ~3u;
    struct latent_place place = {cuda->partials + list_floats, (uint32_t *)cuda->partials, most + 1,
                                 (n_rows * (LATENT + 2) + 3) & ~3u};
    const size_t wanted = (list_floats + (size_t)n_blocks * place.slots * place.stride) * sizeof(float);
    const size_t shared_bytes = sizeof(latent_memory<FEW_ROWS>) + (x.n_seqs + 1) * sizeof(struct decode_span);
    if (wanted > cuda->partials_bytes)
        return err_set(err, RC_CONFIG, "latent_attention: wanted %zu bytes for the splits of long sequences, have %zu; "
                       "lower max_model_len", wanted, cuda->partials_bytes);
    if (shared_bytes > SHARED_BYTES)
        return err_set(err, RC_CONFIG, "latent_attention: wanted fewer sequences in a step, have %u; lower max_num_seqs",
                       x.n_seqs);
    allow_shared(latent_attention_single<T>);
    launch(cuda, latent_attention_single<T>, n_blocks, LATENT_THREADS, shared_bytes, x, place, n_units, n_single);
    if (most > 1)
        launch(cuda, latent_attention_fold<T>, dim3(x.n_seqs * n_units, ceil_div(n_rows, 4)), 512, 0, x, place, n_units,
               n_single, n_blocks);
    return RC_OK;
}

/* Runs sequences with one row, then sequences with several, on kernels with equal bits. */
template <class T>
static enum rc attend_latent_tiles(const struct cuda *cuda, const struct latent_attention_args *args, struct err *err)
{
    const struct batch_view *batch = args->batch;
    const latents<T, T> x(*args);
    const uint32_t n_single = count_single(batch);
    const bool is_stored = n_single < batch->n_rows || batch->shares_new_keys;
    if (is_stored)
        launch(cuda, latent_attention_store_tiles<T>, batch->n_rows, STORE_THREADS, 0, x);
    allow_shared(latent_attention_prefill<T>);
    list_prompts(batch, x.n_heads, MANY_ROWS, [&](const struct prefill_list &list, uint32_t n_tiles) {
        launch(cuda, latent_attention_prefill<T>, n_tiles, LATENT_THREADS, sizeof(latent_memory<MANY_ROWS>), x, list);
    });
    return n_single ? attend_single<T>(cuda, args, n_single, is_stored, err) : RC_OK;
}

#endif
