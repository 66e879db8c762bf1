/* attention_sync_prefill.cuh: attention of sequences that have several rows in the step, with mma.sync and cp.async alone.
 * Bits, tasks and the arithmetic of rows are those of attention_prefill.cuh.
 *
 * Each of eight warps has 16 packed rows of a task, with heads of 256 two warps half of the columns of O each. q lies in shared
 * memory. All threads copy tiles of keys and values into a ring, the next ones under the products of these. */
#ifndef LLMPY_CUDA_ATTENTION_SYNC_PREFILL_CUH
#define LLMPY_CUDA_ATTENTION_SYNC_PREFILL_CUH

#include "../core/copies.cuh"
#include "../core/mma.cuh"
#include "attention_prefill.cuh"

#define SYNC_PREFILL_THREADS 256u

template <uint32_t D> struct sync_prefill_shape {
    static const uint32_t tile_bytes = TILE * D * 2, octet_bytes = 8 * D * 2, q_bytes = prefill_shape<D>::rows * D * 2;
    static const uint32_t depth = D == 128 ? 4 : D == 64 ? 6 : 2; /* keys, values, keys, ... */
    static const uint32_t shared_bytes = q_bytes + depth * tile_bytes;
};

/* Copies tiles of keys and values in turn, one a call. */
template <class T, uint32_t D> struct sync_tiles_fetcher {
    typedef sync_prefill_shape<D> shape;
    const attended<T, T> &x;
    const struct prefill_task &task;
    uint32_t head, ring, tile, values;
    int32_t id, next_id;

    __device__ __forceinline__ int32_t look_up(uint32_t of) const
    {
        const uint32_t shift = x.kv.block_shift, lane = threadIdx.x % 32, p = (of * TILE >> shift) + lane, first = p << shift;
        const bool is_seen = lane < TILE >> shift && first < task.len && first + x.kv.block_tokens > task.seen;
        return is_seen ? x.kv.table[(size_t)task.table_row * x.kv.table_stride + p] : -1;
    }
    __device__ __forceinline__ void start(uint32_t slot)
    {
        if (tile < task.n_tiles) {
            const uint32_t shift = x.kv.block_shift;
            const char *layer = x.kv.layer + ((size_t)head * 2 + values) * ((size_t)D * 2 << shift);
#pragma unroll
            for (uint32_t i = 0; i < shape::tile_bytes / (SYNC_PREFILL_THREADS * 16); i++) {
                const uint32_t at = i * SYNC_PREFILL_THREADS * 16 + threadIdx.x * 16, token = at / shape::octet_bytes * 8;
                const int32_t page = __shfl_sync(~0u, id, token >> shift);
                const uint32_t octet = (token & (x.kv.block_tokens - 1)) / 8;
                if (page >= 0)
                    copy_16(ring + slot * shape::tile_bytes + at,
                            layer + (size_t)page * x.kv.page_bytes + octet * shape::octet_bytes + at % shape::octet_bytes);
            }
            values ^= 1;
            if (!values) {
                tile++;
                id = next_id;
                next_id = look_up(tile + 1);
            }
        }
        copies_close();
    }
};

/* Copies the task's rows of q, in 64s of columns: rows of 128 bytes, the 16-byte chunk c of row r at c ^ (r % 8). */
template <class T, uint32_t D>
static __device__ __forceinline__ void sync_copy_q(const attended<T, T> &x, const struct prefill_task &task, uint32_t head,
                                                   uint32_t q)
{
    const uint32_t rows = prefill_shape<D>::rows;
    for (uint32_t i = threadIdx.x; i < rows * (D / 8); i += SYNC_PREFILL_THREADS) {
        const uint32_t r = i / (D / 8), piece = i % (D / 8), row = min(task.packed + r, task.n_packed - 1);
        copy_16(q + piece / 8 * rows * 128 + r * 128 + ((piece % 8) ^ (r % 8)) * 16,
                x.q.at(task.first_row + row / x.group, (head * x.group + row % x.group) * D + piece * 8));
    }
}

/* s = q k^T of the warp's 16 rows and a tile of keys. */
template <class T, uint32_t D>
static __device__ __forceinline__ void sync_multiply_keys(float (&s)[32], uint32_t q, uint32_t keys)
{
    const uint32_t lane = threadIdx.x % 32, turn = lane % 8, octet_bytes = sync_prefill_shape<D>::octet_bytes;
    const uint32_t row = lane / 16 * octet_bytes + lane % 8 * 128;
    float c[8][4] = {};
#pragma unroll
    for (uint32_t k = 0; k < D / 16; k++) {
        uint32_t a[4];
        load_matrices(a, q + k / 4 * prefill_shape<D>::rows * 128 + lane % 16 * 128 + ((k % 4 * 2 + lane / 16) ^ turn) * 16);
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            uint32_t b[4];
            load_matrices(b, keys + i * 2 * octet_bytes + k / 4 * SLAB_BYTES + row + ((k % 4 * 2 + lane / 8 % 2) ^ turn) * 16);
            const uint32_t low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
            mma(c[2 * i], a, low, T());
            mma(c[2 * i + 1], a, high, T());
        }
    }
#pragma unroll
    for (uint32_t i = 0; i < 32; i++)
        s[i] = c[i / 4][i % 4];
}

/* o += p v; column: the warp's first one. */
template <class T, uint32_t D, uint32_t N>
static __device__ __forceinline__ void sync_multiply_values(float (&o)[N], const uint32_t (&p)[16], uint32_t values,
                                                            uint32_t column)
{
    const uint32_t lane = threadIdx.x % 32, turn = lane % 8, octet_bytes = sync_prefill_shape<D>::octet_bytes;
    const uint32_t row = lane / 8 % 2 * octet_bytes + lane % 8 * 128;
#pragma unroll
    for (uint32_t f = 0; f < N / 8; f++) { /* 16 columns */
        float c[2][4];
#pragma unroll
        for (uint32_t i = 0; i < 8; i++)
            c[i / 4][i % 4] = o[f * 8 + i];
#pragma unroll
        for (uint32_t k = 0; k < 4; k++) {
            const uint32_t a[4] = {p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3]}, first = column + f * 16;
            uint32_t b[4];
            load_transposed(b, values + k * 2 * octet_bytes + first / 64 * SLAB_BYTES + row +
                                   ((first % 64 / 8 + lane / 16) ^ turn) * 16);
            const uint32_t low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
            mma(c[0], a, low, T());
            mma(c[1], a, high, T());
        }
#pragma unroll
        for (uint32_t i = 0; i < 8; i++)
            o[f * 8 + i] = c[i / 4][i % 4];
    }
}

/* Zeros rows [from, to) of a tile of values, by the block. */
template <uint32_t D> static __device__ void sync_clear_values(char *tile, uint32_t from, uint32_t to)
{
    for (uint32_t i = threadIdx.x; i < (to - from) * (D / 8); i += SYNC_PREFILL_THREADS) {
        const uint32_t row = from + i / (D / 8), piece = i % (D / 8);
        *(uint4 *)(tile + (row / 8 * (D / 64) + piece / 8) * SLAB_BYTES + row % 8 * 128 + piece % 8 * 16) =
            make_uint4(0, 0, 0, 0);
    }
}

/* A thread's two rows of a task, and what they see. */
template <class T, uint32_t D, bool HAS_EXTRAS> struct sync_rows_of {
    const attended<T, T> &x;
    const struct prefill_task &task;
    uint32_t head, first; /* first: packed row of the warp */
    float slope[2];

    __device__ __forceinline__ uint32_t row(uint32_t e) const { return first + threadIdx.x % 32 / 4 + e * 8; }
    __device__ __forceinline__ uint32_t token(uint32_t e) const { return min(row(e) / x.group, task.n_rows - 1); }
    __device__ __forceinline__ bool has_rows(void) const { return first < task.n_packed; }
    /* Last key that a token of the sequence sees. */
    __device__ __forceinline__ uint32_t last_seen(uint32_t of) const
    {
        return x.template last_seen<HAS_EXTRAS>(task.first_row + of, task.start + of);
    }
    __device__ __forceinline__ uint32_t high_token(void) const { return (min(first + 16, task.n_packed) - 1) / x.group; }
    __device__ __forceinline__ uint32_t lowest(void) const { return last_seen(first / x.group); }
    __device__ __forceinline__ uint32_t highest(void) const { return last_seen(high_token()); }
    __device__ __forceinline__ void load_slopes(void)
    {
        for (uint32_t e = 0; e < 2; e++)
            slope[e] = HAS_EXTRAS && x.slopes ? x.slopes[head * x.group + row(e) % x.group] * x.slope_factor : 0;
    }
    /* Turns s of a tile into p. */
    __device__ __forceinline__ void soften(struct prefill_rows<T, D> &rows, uint32_t j) const
    {
        if (x.cap_factor != 0)
            rows.cap(x.cap_factor);
        int32_t from[2], to[2], at[2];
        for (uint32_t e = 0; e < 2; e++) {
            const uint32_t position = task.start + token(e);
            from[e] = (int32_t)(x.first_seen(position) - j * TILE);
            to[e] = (int32_t)(last_seen(token(e)) - j * TILE);
            at[e] = (int32_t)(position - j * TILE);
        }
        if (HAS_EXTRAS && x.slopes)
            rows.lean(slope, at);
        if (j * TILE + TILE - 1 > lowest() || j * TILE < x.first_seen(task.start + high_token()))
            rows.hide(from, to);
        rows.soften();
        rows.pack_p();
    }
    __device__ __forceinline__ void write(struct prefill_rows<T, D> &rows, uint32_t column) const
    {
#pragma unroll
        for (uint32_t e = 0; e < 2; e++) {
            if (HAS_EXTRAS && x.sinks)
                rows.all_l[e] = with_sink(rows.all_l[e], x.sinks[head * x.group + row(e) % x.group], rows.all_m[e], x.factor);
            const float scale = __frcp_rn(rows.all_l[e]);
            if (row(e) >= task.n_packed)
                continue;
            const uint32_t first = (head * x.group + row(e) % x.group) * D + column + threadIdx.x % 4 * 2;
            T *out = x.out.at(task.first_row + token(e), first);
#pragma unroll
            for (uint32_t f = 0; f < prefill_shape<D>::columns / 8; f++)
                *(uint32_t *)(out + f * 8) = pack(rows.all[f * 4 + e * 2] * scale, rows.all[f * 4 + e * 2 + 1] * scale, T());
        }
    }
};

template <class T, uint32_t D, bool HAS_EXTRAS>
static __global__ void __launch_bounds__(SYNC_PREFILL_THREADS, 1)
attention_sync_prefill(const __grid_constant__ attended<T, T> x, const __grid_constant__ struct prefill_list list)
{
    typedef sync_prefill_shape<D> shape;
    extern __shared__ __align__(1024) char shared[];
    const uint32_t warp = threadIdx.x / 32, head = blockIdx.x, own = prefill_shape<D>::is_wide ? warp % 4 : warp;
    const uint32_t q = shared_address(shared), ring = q + shape::q_bytes;
    const uint32_t column = prefill_shape<D>::is_wide ? warp / 4 * 128 : 0;
    start_next();
    wait_for_input();
    const struct prefill_task task = find_task<D, HAS_EXTRAS>(x, list, blockIdx.y);
    struct sync_tiles_fetcher<T, D> fetcher = {x, task, head, ring, task.seen / TILE, 0, -1, -1};
    fetcher.id = fetcher.look_up(fetcher.tile);
    fetcher.next_id = fetcher.look_up(fetcher.tile + 1);
    sync_copy_q<T, D>(x, task, head, q); /* in the first tile's group */
    for (uint32_t i = 0; i < shape::depth; i++)
        fetcher.start(i);
    struct sync_rows_of<T, D, HAS_EXTRAS> seen = {x, task, head, task.packed + own * 16, {}};
    struct prefill_rows<T, D> rows;
    rows.c = x.factor;
    rows.begin();
    seen.load_slopes();
    const uint32_t j0 = task.seen / TILE, n = seen.has_rows() ? seen.highest() / TILE + 1 : 0;
    uint32_t slot = 0;
    /* Waits for the next tile of the ring. The one before has been read: the next copy goes there. Depth - 1 tiles are under
     * way, so all but depth - 2 groups have to end; the first step starts no copy. */
    auto next = [&](bool is_first) {
        const uint32_t at = slot;
        if (is_first)
            copies_wait<shape::depth - 1>();
        else
            copies_wait<shape::depth - 2>();
        __syncthreads();
        if (!is_first)
            fetcher.start(at ? at - 1 : shape::depth - 1);
        slot = at + 1 == shape::depth ? 0 : at + 1;
        return ring + at * shape::tile_bytes;
    };
    for (uint32_t j = j0; j < task.n_tiles; j++) {
        const uint32_t keys = next(j == j0);
        if (j < n) {
            sync_multiply_keys<T, D>(rows.s, q + own * 16 * 128, keys);
            if (j % TILES == 0 && j != j0)
                rows.close();
            seen.soften(rows, j);
        }
        const uint32_t values = next(false);
        if (j * TILE < task.seen || j * TILE + TILE > task.len) { /* values that no row of the block sees may be anything */
            char *const tile = shared + (values - q);
            if (j * TILE < task.seen)
                sync_clear_values<D>(tile, 0, task.seen - j * TILE);
            if (j * TILE + TILE > task.len)
                sync_clear_values<D>(tile, task.len - j * TILE, TILE);
            __syncthreads();
        }
        if (j < n) {
            rows.move_on(j % TILES == 0);
            sync_multiply_values<T, D>(rows.o, rows.p, values, column);
        }
    }
    if (n == 0)
        return;
    rows.close();
    rows.fold_split();
    seen.write(rows, column);
}

/* Starts the kernel for the sequences with several rows. */
template <class T, uint32_t D, bool HAS_EXTRAS>
static void launch_sync_prefill(const struct cuda *cuda, const struct attention_args *args)
{
    typedef sync_prefill_shape<D> shape;
    const attended<T, T> x(*args);
    allow_shared(attention_sync_prefill<T, D, HAS_EXTRAS>, shape::shared_bytes);
    list_prompts(args->batch, x.group, prefill_shape<D>::rows, [&](const struct prefill_list &list, uint32_t n_tiles) {
        launch(cuda, attention_sync_prefill<T, D, HAS_EXTRAS>, dim3(args->kv.n_kv_heads, n_tiles), SYNC_PREFILL_THREADS,
               shape::shared_bytes, x, list);
    });
}

#endif
