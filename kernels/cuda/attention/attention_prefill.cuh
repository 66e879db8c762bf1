/* attention_prefill.cuh: attention of sequences that have several rows in the step, on wgmma. Bound by operations: 4 *
 * head_dim for every visible pair of a row and a key and head; 8,192 tokens, 32 heads of 128, 550 GFLOP, 0.7 ms at 790
 * TFLOP/s.
 *
 * The query heads of a kv head are packed: row (token, head of the group) of a sequence is token * group + head. A block takes
 * 128 such rows: two warpgroups of 64 rows (head_dim 256: one of 64, each warpgroup with half the columns of O). A ninth warp
 * streams tiles of keys and values through a ring, each slab an operand in the 128-byte swizzle. Of pages of bytes it streams
 * the operands that attention_widen.cuh has made; where there are none, four warps widen the pages on their way into the ring.
 * S of tile j + 1 is issued before P V of tile j, and its softmax runs at the same time; P, the sums of the split and the sums
 * of all splits stay in registers.
 *
 * The ring is not that of ring.cuh: with its places the compiler orders the loop in another way, which costs 2 to 4 % from 512
 * rows on. */
#ifndef LLMPY_CUDA_ATTENTION_PREFILL_CUH
#define LLMPY_CUDA_ATTENTION_PREFILL_CUH

#include "../core/launch.cuh"
#include "../core/wgmma.cuh"
#include "attention.cuh"

#include <type_traits>

#define PREFILL_THREADS 384u /* 12 warps, so that setmaxnreg has whole warpgroups */
#define PREFILL_SEQS 256u    /* of a launch */
#define WIDENERS 64u         /* threads that widen a tile of bytes */

/* Sequences of a launch. Their tiles of rows are numbered consecutively; the tiles of entry i end before tile_end[i]. */
struct prefill_list {
    uint32_t n;
    uint32_t tile_end[PREFILL_SEQS], seq[PREFILL_SEQS];
};

/* The kv heads of a launch, and their keys and values as operands: [tile of a sequence][head][keys, values, scales of INT8]. */
struct prefill_wide {
    uint32_t first_head, n_heads;
    uint32_t *places; /* [PREFILL_SEQS] number of an entry's first tile that is seen, or NOT_WIDE; NULL: all are NOT_WIDE */
    char *chunks;
    uint32_t n_tiles; /* that there is room for */
};
#define NOT_WIDE UINT32_MAX

template <uint32_t D, uint32_t SCALE_BYTES = 0> struct prefill_shape {
    static const bool is_wide = D == 256;
    static const uint32_t rows = is_wide ? 64 : 128, columns = is_wide ? 128 : D;           /* of O in a warpgroup */
    static const uint32_t q_bytes = is_wide ? rows * D * 2 : 0, chunk_bytes = TILE * D * 2; /* q lies in registers or here */
    /* Keys, values, keys, ...; behind them the scales of each pair. */
    static const uint32_t depth = (SHARED_BYTES - q_bytes - 1024) / (chunk_bytes + SCALE_BYTES / 2) / 2 * 2;
    static const uint32_t ring_bytes = depth * (chunk_bytes + SCALE_BYTES / 2), tile_bytes = 2 * chunk_bytes + SCALE_BYTES;
    static const uint32_t shared_bytes = q_bytes + ring_bytes + 2 * depth * 8;
};

/* ---- instructions -------------------------------------------------------------------------------------------------------- */

/* Returns a value that is equal in all lanes, so that the compiler knows that it is. */
static __device__ __forceinline__ uint32_t uniform(uint32_t x)
{
    return __shfl_sync(~0u, x, 0);
}

/* Keeps the compiler from moving accumulators across a wait. */
template <uint32_t N> static __device__ __forceinline__ void pin(float (&d)[N])
{
#pragma unroll
    for (uint32_t i = 0; i < N; i++)
        asm volatile("" : "+f"(d[i]));
}

/* A descriptor of an operand in shared memory: its low half counts 16 bytes, and moves on without a carry. */
#define SUMS8(i)                                                                                                          \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define NAMES_32                                                                                                          \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES_64                                                                                                          \
    NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,"  \
             "%58,%59,%60,%61,%62,%63"
#define WGMMA(shape, type) "wgmma.mma_async.sync.aligned." shape ".f32." type "." type " "
#define WGMMA_OF(ctype, type)                                                                                             \
    /* d (+)= A B^T, both in shared memory, rows along k. */                                                              \
    template <uint32_t A, uint32_t B>                                                                                     \
    static __device__ __forceinline__ void wgmma_qk(float(&d)[32], uint32_t a, uint32_t b, int is_sum, ctype)             \
    {                                                                                                                     \
        asm volatile("{.reg .pred p; .reg .b64 a, b; setp.ne.b32 p,%34,0; mov.b64 a,{%32,%35}; mov.b64 b,{%33,%36}; "     \
                     WGMMA("m64n64k16", type) "{" NAMES_32 "},a,b,p,1,1,0,0;}"                                            \
                     : SUMS8(0), SUMS8(8), SUMS8(16), SUMS8(24)                                                           \
                     : "r"(a), "r"(b), "r"(is_sum), "n"(A), "n"(B));                                                      \
    }                                                                                                                     \
    /* The same, A in registers. */                                                                                       \
    template <uint32_t B>                                                                                                 \
    static __device__ __forceinline__ void wgmma_qk(float(&d)[32], const uint32_t *a, uint32_t b, int is_sum, ctype)      \
    {                                                                                                                     \
        asm volatile("{.reg .pred p; .reg .b64 b; setp.ne.b32 p,%37,0; mov.b64 b,{%36,%38}; " WGMMA("m64n64k16", type)    \
                     "{" NAMES_32 "},{%32,%33,%34,%35},b,p,1,1,0;}"                                                       \
                     : SUMS8(0), SUMS8(8), SUMS8(16), SUMS8(24)                                                           \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(is_sum), "n"(B));                          \
    }                                                                                                                     \
    /* d += A B, A in registers, B's rows across k. */                                                                    \
    template <uint32_t B>                                                                                                 \
    static __device__ __forceinline__ void wgmma_pv(float(&d)[32], const uint32_t *a, uint32_t b, ctype)                  \
    {                                                                                                                     \
        asm volatile("{.reg .b64 b; mov.b64 b,{%36,%37}; " WGMMA("m64n64k16", type) "{" NAMES_32                          \
                     "},{%32,%33,%34,%35},b,1,1,1,1;}"                                                                    \
                     : SUMS8(0), SUMS8(8), SUMS8(16), SUMS8(24)                                                           \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(B));                                       \
    }                                                                                                                     \
    template <uint32_t B>                                                                                                 \
    static __device__ __forceinline__ void wgmma_pv(float(&d)[64], const uint32_t *a, uint32_t b, ctype)                  \
    {                                                                                                                     \
        asm volatile("{.reg .b64 b; mov.b64 b,{%68,%69}; " WGMMA("m64n128k16", type) "{" NAMES_64                         \
                     "},{%64,%65,%66,%67},b,1,1,1,1;}"                                                                    \
                     : SUMS8(0), SUMS8(8), SUMS8(16), SUMS8(24), SUMS8(32), SUMS8(40), SUMS8(48), SUMS8(56)               \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(B));                                       \
    }
WGMMA_OF(__nv_bfloat16, "bf16")
WGMMA_OF(__half, "f16")
#undef WGMMA_OF
#undef WGMMA
#undef NAMES_64
#undef NAMES_32
#undef SUMS8

/* ---- the task of a block ------------------------------------------------------------------------------------------------- */

struct prefill_task {
    uint32_t table_row, first_row, n_rows; /* of the sequence: rows of the step */
    uint32_t start, len;                   /* position of its first row; keys that it has */
    uint32_t packed, n_packed;             /* first packed row of the block; all packed rows */
    uint32_t entry;                        /* of the list */
    uint32_t seen, n_tiles;                /* first key that a row of the block sees; tiles up to the last one seen */
};

/* The entry that a tile belongs to. */
static __device__ uint32_t prefill_entry(const struct prefill_list &list, uint32_t tile)
{
    uint32_t low = 0, high = list.n - 1;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (tile < list.tile_end[middle])
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

template <uint32_t D, bool HAS_EXTRAS, class X>
static __device__ struct prefill_task find_task(const X &x, const struct prefill_list &list, uint32_t tile)
{
    const uint32_t low = prefill_entry(list, tile);
    struct prefill_task task;
    const uint32_t seq = list.seq[low];
    task.entry = low;
    task.first_row = (uint32_t)x.seq_first_row[seq];
    task.n_rows = (uint32_t)x.seq_first_row[seq + 1] - task.first_row;
    task.table_row = (uint32_t)x.row_seq[task.first_row];
    task.start = (uint32_t)x.positions[task.first_row];
    task.len = task.start + task.n_rows;
    task.n_packed = task.n_rows * x.group;
    task.packed = (list.tile_end[low] - 1 - tile) * prefill_shape<D>::rows; /* the longest first */
    task.seen = x.first_seen(task.start + task.packed / x.group);
    const uint32_t last = (min(task.packed + prefill_shape<D>::rows, task.n_packed) - 1) / x.group;
    task.n_tiles = x.template last_seen<HAS_EXTRAS>(task.first_row + last, task.start + last) / TILE + 1;
    return task;
}

/* ---- the warp that fetches ----------------------------------------------------------------------------------------------- */

template <class T, uint32_t D>
static __device__ void fetch_tiles(const attended<T, T> &x, const struct prefill_task &task, uint32_t head, uint32_t ring,
                                   uint32_t full, uint32_t empty)
{
    typedef prefill_shape<D> shape;
    const uint32_t lane = threadIdx.x % 32, shift = x.kv.block_shift, run_bytes = D * 2 << shift;
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0,1.0;" : "=l"(policy));
    auto look_up = [&](uint32_t tile) {
        uint32_t p = (tile * TILE >> shift) + lane, first = p << shift;
        bool is_seen = lane < TILE >> shift && first < task.len && first + x.kv.block_tokens > task.seen;
        return is_seen ? x.kv.table[(size_t)task.table_row * x.kv.table_stride + p] : -1;
    };
    uint32_t slot = 0, phase = 1;
    int32_t id = look_up(task.seen / TILE);
    for (uint32_t tile = task.seen / TILE; tile < task.n_tiles; tile++) {
        const char *source = x.kv.layer + (size_t)id * x.kv.page_bytes + (size_t)head * 2 * run_bytes;
        bool is_mine = id >= 0;
        uint32_t n_bytes = __popc(__ballot_sync(~0u, is_mine)) * run_bytes;
        if (tile + 1 < task.n_tiles)
            id = look_up(tile + 1);
        for (uint32_t values = 0; values < 2; values++) {
            barrier_wait(empty + slot * 8, phase);
            if (lane == 0)
                barrier_expect(full + slot * 8, n_bytes);
            __syncwarp();
            if (is_mine)
                copy_bytes(ring + slot * shape::chunk_bytes + lane * run_bytes, source + values * run_bytes, run_bytes,
                           full + slot * 8, policy);
            if (++slot == shape::depth) {
                slot = 0;
                phase ^= 1;
            }
        }
    }
}

/* The same of operands, by one thread. place: the number of the sequence's tile of keys 0, as if it were there. */
template <class C, uint32_t D>
static __device__ void fetch_wide(const struct prefill_wide &wide, const struct prefill_task &task, uint32_t ring,
                                  uint32_t full, uint32_t empty, uint32_t place)
{
    const uint32_t scale_bytes = scale_bytes_of<C>();
    typedef prefill_shape<D, scale_bytes> shape;
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0,1.0;" : "=l"(policy));
    uint32_t slot = 0, phase = 1;
    for (uint32_t tile = task.seen / TILE; tile < task.n_tiles; tile++) {
        const char *source = wide.chunks + ((size_t)(place + tile) * wide.n_heads + blockIdx.x) * shape::tile_bytes;
        for (uint32_t values = 0; values < 2; values++) {
            const uint32_t n_scales = values ? 0 : scale_bytes;
            barrier_wait(empty + slot * 8, phase);
            barrier_expect(full + slot * 8, shape::chunk_bytes + n_scales);
            copy_bytes(ring + slot * shape::chunk_bytes, source + values * shape::chunk_bytes, shape::chunk_bytes,
                       full + slot * 8, policy);
            if (n_scales)
                copy_bytes(ring + shape::depth * shape::chunk_bytes + slot / 2 * scale_bytes, source + 2 * shape::chunk_bytes,
                           scale_bytes, full + slot * 8, policy);
            if (++slot == shape::depth) {
                slot = 0;
                phase ^= 1;
            }
        }
    }
}

/* Widens chunk c of a token's key or value into a tile's operand. */
template <class T, class C, uint32_t D>
static __device__ __forceinline__ void widen_chunk(uint4 bytes, bool is_key, char *tile, uint32_t token, uint32_t c)
{
    char *row = tile + (token / 8 * (D / 64) + c / 4) * SLAB_BYTES + token % 8 * 128;
    const uint2 x0 = widen_bytes(bytes.x, T(), C()), x1 = widen_bytes(bytes.y, T(), C());
    const uint2 x2 = widen_bytes(bytes.z, T(), C()), x3 = widen_bytes(bytes.w, T(), C());
    uint4 low = make_uint4(x0.x, x1.x, x2.x, x3.x), high = make_uint4(x0.y, x1.y, x2.y, x3.y);
    if (!std::is_same_v<C, int8_t> && is_key && bytes.x == E4M3_NANS)
        low = high = make_uint4(TWO_NANS, TWO_NANS, TWO_NANS, TWO_NANS);
    *(uint4 *)(row + (c * 2 % 8 ^ token % 8) * 16) = low;
    *(uint4 *)(row + ((c * 2 + 1) % 8 ^ token % 8) * 16) = high;
}

/* A tile's scales of INT8, times the unit: of keys, then of values, by two threads a token. Where [seen, len) does not reach
 * they are zeros, because a page may hold anything there. */
template <class T, class C>
static __device__ __forceinline__ void copy_scales(const attended<T, C> &x, uint32_t table_row, uint32_t tile, uint32_t head,
                                                   uint32_t seen, uint32_t len, uint32_t i, float *to)
{
    const uint32_t token = i % TILE, position = tile * TILE + token, at = position & (x.kv.block_tokens - 1);
    const float unit = i < TILE ? int8_unit<T>() : int8_unit<weight_of<T, C>>();
    to[i] = 0;
    if (position >= seen && position < len)
        to[i] = unit * __ldcg(x.kv.scales_in(x.kv.page_of(table_row, position), head) + i / TILE * x.kv.block_tokens + at);
}

/* Of pages of bytes: two warps widen the tiles of keys, and two those of values. */
template <class T, class C, uint32_t D>
static __device__ void widen_tiles(const attended<T, C> &x, const struct prefill_task &task, uint32_t head,
                                   char *ring, uint32_t full, uint32_t empty)
{
    typedef prefill_shape<D, scale_bytes_of<C>()> shape;
    const uint32_t values = threadIdx.x / WIDENERS % 2, thread = threadIdx.x % WIDENERS, at_once = 4;
    const uint32_t shift = x.kv.block_shift, chunks = D / 16; /* of a token */
    uint32_t slot = values, phase = 1;
    for (uint32_t tile = task.seen / TILE; tile < task.n_tiles; tile++) {
#pragma unroll 1
        for (uint32_t first = thread; first < TILE * chunks; first += at_once * WIDENERS) {
            uint4 bytes[at_once];
            bool is_seen[at_once];
#pragma unroll
            for (uint32_t i = 0; i < at_once; i++) {
                const uint32_t at = first + i * WIDENERS, position = tile * TILE + at / chunks, page = position >> shift;
                is_seen[i] = page << shift < task.len && (page + 1) << shift > task.seen;
                if (is_seen[i])
                    bytes[i] = __ldcg(x.template byte_chunk<D>(task.table_row, position, head, values, at % chunks));
            }
            if (first == thread)
                barrier_wait(empty + slot * 8, phase);
#pragma unroll
            for (uint32_t i = 0; i < at_once; i++) {
                const uint32_t at = first + i * WIDENERS;
                if (!is_seen[i])
                    continue;
                char *tile_of = ring + slot * shape::chunk_bytes;
                if (values)
                    widen_chunk<weight_of<T, C>, C, D>(bytes[i], false, tile_of, at / chunks, at % chunks);
                else
                    widen_chunk<T, C, D>(bytes[i], true, tile_of, at / chunks, at % chunks);
            }
        }
        if (scale_bytes_of<C>() && !values)
            for (uint32_t i = thread; i < 2 * TILE; i += WIDENERS)
                copy_scales(x, task.table_row, tile, head, task.seen, task.len, i,
                            (float *)(ring + shape::depth * shape::chunk_bytes + slot / 2 * TILE_SCALES));
        shared_written();
        barrier_arrive(full + slot * 8);
        slot += 2;
        if (slot >= shape::depth) {
            slot = values;
            phase ^= 1;
        }
    }
}

/* ---- the warpgroups that compute ----------------------------------------------------------------------------------------- */

/* Two rows of a thread: sums of a split (o, m, l) and of all splits before it. */
template <class T, uint32_t D> struct prefill_rows {
    static const uint32_t n = prefill_shape<D>::columns / 2;
    float s[32], o[n], all[n], m[2], l[2], all_m[2], all_l[2], a[2], before[2], now[2];
    uint32_t p[16];
    float c;

    __device__ __forceinline__ void begin(void)
    {
#pragma unroll
        for (uint32_t i = 0; i < n; i++)
            o[i] = all[i] = 0;
        for (uint32_t e = 0; e < 2; e++) {
            m[e] = all_m[e] = MINUS_INFINITY;
            l[e] = all_l[e] = before[e] = now[e] = 0;
        }
    }

    /* Ends a split: factors of the sums, and a fresh state. */
    __device__ __forceinline__ void close(void)
    {
        for (uint32_t e = 0; e < 2; e++) {
            float most = fmaxf(all_m[e], m[e]);
            before[e] = rescale(all_m[e], anchor(most), c);
            now[e] = rescale(m[e], anchor(most), c);
            all_m[e] = most;
            all_l[e] = fold(all_l[e], before[e], l[e], now[e]);
            m[e] = MINUS_INFINITY;
            l[e] = 0;
        }
    }

    __device__ __forceinline__ void fold_split(void)
    {
#pragma unroll
        for (uint32_t i = 0; i < n; i++) {
            all[i] = fold(all[i], before[i / 2 % 2], o[i], now[i / 2 % 2]);
            o[i] = 0;
        }
    }

    /* Rescales o before the values of a tile are added. At the first tile of a split it folds the split before. */
    __device__ __forceinline__ void move_on(bool is_first)
    {
        if (is_first)
            fold_split();
        else
#pragma unroll
            for (uint32_t i = 0; i < n; i++)
                o[i] = o[i] * a[i / 2 % 2];
    }

    __device__ __forceinline__ void cap(float cap_factor)
    {
#pragma unroll
        for (uint32_t i = 0; i < 32; i++)
            s[i] = capped(s[i], cap_factor);
    }

    /* Adds the slope times a key's distance from the row. position[e]: the row's, counted from the tile's first key. */
    __device__ __forceinline__ void lean(const float (&slope)[2], const int32_t (&position)[2])
    {
        const int32_t t = threadIdx.x % 4;
#pragma unroll
        for (int32_t i = 0; i < 32; i++)
            s[i] = fmaf(slope[i / 2 % 2], (float)(i / 4 * 8 + t * 2 + i % 2 - position[i / 2 % 2]), s[i]);
    }

    /* Hides the keys of the tile outside [first[e], last[e]]. */
    __device__ __forceinline__ void hide(const int32_t (&first)[2], const int32_t (&last)[2])
    {
        const int32_t t = threadIdx.x % 4;
#pragma unroll
        for (int32_t i = 0; i < 32; i++) {
            int32_t key = i / 4 * 8 + t * 2 + i % 2;
            if (key < first[i / 2 % 2] || key > last[i / 2 % 2])
                s[i] = MINUS_INFINITY;
        }
    }

    /* s becomes p; m, l and a move on. */
    __device__ __forceinline__ void soften(void)
    {
        float most[2], minus[2], sum[2];
#pragma unroll
        for (uint32_t e = 0; e < 2; e++) {
            float part[4]; /* a maximum has no order */
            for (uint32_t f = 0; f < 4; f++)
                part[f] =
                    fmaxf(fmaxf(s[f * 8 + e * 2], s[f * 8 + e * 2 + 1]), fmaxf(s[f * 8 + 4 + e * 2], s[f * 8 + 5 + e * 2]));
            most[e] = fmaxf(fmaxf(fmaxf(part[0], part[1]), fmaxf(part[2], part[3])), m[e]);
        }
#pragma unroll
        for (uint32_t apart = 1; apart < 4; apart *= 2)
            for (uint32_t e = 0; e < 2; e++)
                most[e] = fmaxf(most[e], __shfl_xor_sync(~0u, most[e], apart));
#pragma unroll
        for (uint32_t e = 0; e < 2; e++) {
            float z = anchor(most[e]);
            minus[e] = -(z * c);
            a[e] = rescale(m[e], z, c);
            m[e] = most[e];
        }
#pragma unroll
        for (uint32_t i = 0; i < 32; i++)
            s[i] = power_of_2(fmaf(s[i], c, minus[i / 2 % 2]));
#pragma unroll
        for (uint32_t e = 0; e < 2; e++) {
            float u[2];
            for (uint32_t y = 0; y < 2; y++) {
                float r[4];
                for (uint32_t f = 0; f < 4; f++)
                    r[f] = s[f * 8 + e * 2 + y] + s[f * 8 + 4 + e * 2 + y];
                u[y] = (r[0] + r[1]) + (r[2] + r[3]);
            }
            sum[e] = u[0] + u[1];
        }
#pragma unroll
        for (uint32_t apart = 1; apart < 4; apart *= 2)
            for (uint32_t e = 0; e < 2; e++)
                sum[e] = sum[e] + __shfl_xor_sync(~0u, sum[e], apart);
        for (uint32_t e = 0; e < 2; e++)
            l[e] = fmaf(a[e], l[e], sum[e]);
    }

    /* An accumulator's order is that of the next product's operand. */
    __device__ __forceinline__ void pack_p(void)
    {
#pragma unroll
        for (uint32_t i = 0; i < 16; i++)
            p[i] = pack(s[2 * i], s[2 * i + 1], T());
    }

    /* The same of INT8, times the scales of the tile's values; they lie behind those of the keys. */
    __device__ __forceinline__ void pack_scaled(const float *scales)
    {
#pragma unroll
        for (uint32_t i = 0; i < 16; i++) {
            const float2 pair = *(const float2 *)(scales + TILE + i / 2 * 8 + threadIdx.x % 4 * 2);
            p[i] = pack(s[2 * i] * pair.x, s[2 * i + 1] * pair.y, __nv_bfloat16());
        }
    }

    __device__ __forceinline__ void scale_keys(const float *scales)
    {
#pragma unroll
        for (uint32_t i = 0; i < 16; i++) {
            const float2 pair = *(const float2 *)(scales + i / 2 * 8 + threadIdx.x % 4 * 2);
            s[2 * i] *= pair.x;
            s[2 * i + 1] *= pair.y;
        }
    }
};

/* Zeros rows [from, to) of a tile of values, by a warpgroup. */
template <uint32_t D> static __device__ void clear_values(char *chunk, uint32_t from, uint32_t to, uint32_t group)
{
    const uint32_t pieces = D / 8;
    for (uint32_t i = threadIdx.x % 128; i < (to - from) * pieces; i += 128) {
        uint32_t row = from + i / pieces, piece = i % pieces;
        *(uint4 *)(chunk + (row / 8 * (D / 64) + piece / 8) * SLAB_BYTES + row % 8 * 128 + piece % 8 * 16) =
            make_uint4(0, 0, 0, 0);
    }
    shared_written();
    meet(1 + group, 128);
}

/* long: the loop over tiles, two products in flight; a conditional product would be serialised, so the last tile is peeled. */
template <class T, class C, uint32_t D, bool HAS_EXTRAS>
static __device__ void attend_tiles(const attended<T, C> &x, const struct prefill_task &task, uint32_t head, char *shared,
                                    uint32_t full, uint32_t empty)
{
    typedef prefill_shape<D, scale_bytes_of<C>()> shape;
    typedef weight_of<T, C> W;
    const bool is_int8 = std::is_same_v<C, int8_t>;
    const uint32_t group = uniform(threadIdx.x / 128), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const uint32_t g = lane / 4, t = lane % 4;
    const uint32_t first = task.packed + (shape::is_wide ? 0 : group * 64), depth = shape::depth;
    char *const ring = shared + shape::q_bytes;
    if (shape::is_wide) {
        for (uint32_t i = threadIdx.x; i < 64 * D / 8; i += 256) {
            uint32_t r = i / (D / 8), piece = i % (D / 8), row = first + r;
            uint4 v = make_uint4(0, 0, 0, 0);
            if (row < task.n_packed)
                v = *(const uint4 *)x.q.at(task.first_row + row / x.group, (head * x.group + row % x.group) * D + piece * 8);
            *(uint4 *)(shared + piece / 8 * 8192 + r * 128 + ((piece % 8) ^ (r % 8)) * 16) = v;
        }
        shared_written();
        meet(3, 256);
    }
    prefill_rows<T, D> rows;
    rows.c = x.factor;
    auto token = [&](uint32_t e) { return min((first + warp * 16 + g + e * 8) / x.group, task.n_rows - 1); };
    auto last_seen = [&](uint32_t row) {
        return x.template last_seen<HAS_EXTRAS>(task.first_row + row, task.start + row);
    };
    const uint32_t lowest = uniform(last_seen(first / x.group)); /* last keys of the warpgroup's rows */
    const uint32_t high_row = (min(first + 64, task.n_packed) - 1) / x.group, highest = uniform(last_seen(high_row));
    const uint32_t high_seen = x.first_seen(uniform(task.start + high_row));
    /* Spans may end many tiles apart; then both warpgroups take all tiles, so that the ring goes on. */
    const uint32_t n_seen = highest / TILE + 1, n = HAS_EXTRAS ? uniform(x.visible_end ? task.n_tiles : n_seen) : n_seen;
    const uint32_t seen = uniform(task.seen), j0 = seen / TILE;
    /* Low halves of descriptors (octets of keys lie `slabs` slabs apart) and their constant high ones. */
    const uint32_t slabs = D / 64, unit = SLAB_BYTES / 16, high = 1u << 30 | slabs * unit, q_high = 1u << 30 | unit;
    const uint32_t q = 1u << 16 | shared_address(shared) >> 4, tiles = shared_address(ring) >> 4;
    const uint32_t column = shape::is_wide ? group * shape::columns : 0; /* the warpgroup's first one of O */
    uint32_t q_rows[shape::is_wide ? 1 : D / 16][4];
    if (!shape::is_wide)
        for (uint32_t e = 0; e < 2; e++) {
            uint32_t row = first + warp * 16 + g + e * 8;
            const uint32_t *from =
                (const uint32_t *)x.q.at(task.first_row + token(e), (head * x.group + row % x.group) * D) + t;
#pragma unroll
            for (uint32_t i = 0; i < D / 16; i++) {
                q_rows[i][e] = row < task.n_packed ? from[i * 8] : 0;
                q_rows[i][2 + e] = row < task.n_packed ? from[i * 8 + 4] : 0;
            }
        }
    rows.begin();
    auto issue_qk = [&](uint32_t slot) {
        uint32_t k = 1u << 16 | (tiles + slot * (shape::chunk_bytes / 16));
#pragma unroll
        for (uint32_t i = 0; i < D / 16; i++)
            if (shape::is_wide)
                wgmma_qk<q_high, high>(rows.s, q + i / 4 * 512 + i % 4 * 2, k + i / 4 * unit + i % 4 * 2, i != 0, T());
            else
                wgmma_qk<high>(rows.s, q_rows[i], k + i / 4 * unit + i % 4 * 2, i != 0, T());
        wgmma_commit();
    };
    auto issue_pv = [&](uint32_t slot) {
        uint32_t v = unit << 16 | (tiles + slot * (shape::chunk_bytes / 16) + column / 64 * unit);
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            wgmma_pv<high>(rows.o, rows.p + i * 4, v + i * 2 * slabs * unit, W());
        wgmma_commit();
    };
    float slope[2] = {0, 0};
    for (uint32_t e = 0; e < 2 && HAS_EXTRAS; e++)
        if (x.slopes)
            slope[e] = x.slopes[head * x.group + (first + warp * 16 + g + e * 8) % x.group] * x.slope_factor;
    auto scales = [&](uint32_t slot) { return (const float *)(ring + depth * shape::chunk_bytes + slot / 2 * TILE_SCALES); };
    /* A place of keys is free: of INT8 only when p is made, because the scales of the values lie there. */
    auto release = [&](uint32_t slot) {
        if (is_int8)
            __syncwarp();
        if (lane == 0)
            barrier_arrive(empty + slot * 8, 1);
    };
    auto soften = [&](uint32_t j, uint32_t slot) {
        if (is_int8)
            rows.scale_keys(scales(slot));
        if (x.cap_factor != 0)
            rows.cap(x.cap_factor);
        if (HAS_EXTRAS && x.slopes) {
            int32_t position[2];
            for (uint32_t e = 0; e < 2; e++)
                position[e] = (int32_t)(task.start + token(e) - j * TILE);
            rows.lean(slope, position);
        }
        if (j * TILE + TILE - 1 > lowest || j * TILE < high_seen) {
            int32_t from[2], to[2]; /* keys of the tile that the thread's rows see */
            for (uint32_t e = 0; e < 2; e++) {
                uint32_t position = task.start + token(e);
                from[e] = (int32_t)(x.first_seen(position) - j * TILE);
                to[e] = (int32_t)(last_seen(token(e)) - j * TILE);
            }
            rows.hide(from, to);
        }
        rows.soften();
    };
    auto pack_p = [&](uint32_t slot) {
        if (!is_int8) {
            rows.pack_p();
            return;
        }
        rows.pack_scaled(scales(slot));
        release(slot);
    };
    /* Values that no row of the block sees may be anything. */
    auto clear = [&](uint32_t j, uint32_t slot) {
        if (j * TILE < seen)
            clear_values<D>(ring + slot * shape::chunk_bytes, 0, seen - j * TILE, group);
        if (j * TILE + TILE > task.len)
            clear_values<D>(ring + slot * shape::chunk_bytes, task.len - j * TILE, TILE, group);
    };

    barrier_wait(full, 0);
    wgmma_begin();
    issue_qk(0);
    wgmma_wait<0>();
    pin(rows.s);
    if (!is_int8)
        release(0);
    soften(j0, 0);
    pack_p(0);
    uint32_t k_slot = 0, k_phase = 0, v_slot = 1, v_phase = 0;
    for (uint32_t j = j0; j + 1 < n; j++) {
        k_slot += 2;
        if (k_slot == depth) {
            k_slot = 0;
            k_phase ^= 1;
        }
        barrier_wait(full + k_slot * 8, k_phase);
        wgmma_begin();
        issue_qk(k_slot);
        rows.move_on(j % TILES == 0);
        barrier_wait(full + v_slot * 8, v_phase);
        if (j * TILE < seen)
            clear(j, v_slot);
        wgmma_begin();
        issue_pv(v_slot);
        wgmma_wait<1>();
        pin(rows.s);
        if (!is_int8)
            release(k_slot);
        if ((j + 1) % TILES == 0)
            rows.close();
        soften(j + 1, k_slot);
        wgmma_wait<0>();
        pin(rows.s);
        pin(rows.o);
        if (lane == 0)
            barrier_arrive(empty + v_slot * 8, 1);
        v_slot = k_slot + 1;
        v_phase = k_phase;
        pack_p(k_slot);
    }
    rows.move_on((n - 1) % TILES == 0);
    barrier_wait(full + v_slot * 8, v_phase);
    clear(n - 1, v_slot);
    wgmma_begin();
    issue_pv(v_slot);
    wgmma_wait<0>();
    pin(rows.o);
    rows.close();
    rows.fold_split();
#pragma unroll
    for (uint32_t e = 0; e < 2; e++) {
        uint32_t row = first + warp * 16 + g + e * 8;
        if (HAS_EXTRAS && x.sinks)
            rows.all_l[e] = with_sink(rows.all_l[e], x.sinks[head * x.group + row % x.group], rows.all_m[e], x.factor);
        float scale = __frcp_rn(rows.all_l[e]);
        if (row >= task.n_packed)
            continue;
        T *out = x.out.at(task.first_row + token(e), (head * x.group + row % x.group) * D + column + t * 2);
#pragma unroll
        for (uint32_t f = 0; f < shape::columns / 8; f++)
            *(uint32_t *)(out + f * 8) = pack(rows.all[f * 4 + e * 2] * scale, rows.all[f * 4 + e * 2 + 1] * scale, T());
    }
}

template <class T, class C, uint32_t D, bool HAS_EXTRAS>
static __global__ void __launch_bounds__(PREFILL_THREADS, 1)
    attention_prefill(const __grid_constant__ attended<T, C> x, const __grid_constant__ struct prefill_list list,
                      const struct prefill_wide wide)
{
    only_sm_90a();
    typedef prefill_shape<D, scale_bytes_of<C>()> shape;
    extern __shared__ __align__(1024) char shared[];
    const uint32_t ring = shared_address(shared) + shape::q_bytes, full = ring + shape::ring_bytes;
    const uint32_t empty = full + shape::depth * 8, head = wide.first_head + blockIdx.x;
    start_next();
    const struct prefill_task task = find_task<D, HAS_EXTRAS>(x, list, blockIdx.y);
    const bool is_half = !shape::is_wide && task.packed + 64 >= task.n_packed; /* the second warpgroup has no rows */
    const bool has_bytes = !std::is_same_v<C, T>;
    uint32_t place = NOT_WIDE;
    if (has_bytes && wide.places) {
        wait_for_input();
        place = __ldcg(wide.places + task.entry);
    }
    barriers_init(full, shape::depth, has_bytes && place == NOT_WIDE ? WIDENERS : 1);
    barriers_init(empty, shape::depth, is_half ? 4 : 8);
    barriers_made();
    __syncthreads();
    wait_for_input();
    if (threadIdx.x >= 256) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(has_bytes ? 40 : 24));
        if constexpr (has_bytes) {
            if (place == NOT_WIDE)
                widen_tiles<T, C, D>(x, task, head, shared + shape::q_bytes, full, empty);
            else if (threadIdx.x == 256)
                fetch_wide<C, D>(wide, task, ring, full, empty, place - x.first_seen(task.start) / TILE);
        } else if (threadIdx.x < 288)
            fetch_tiles<T, D>(x, task, head, ring, full, empty);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(has_bytes ? 232 : 240));
    if (threadIdx.x < 128 || !is_half)
        attend_tiles<T, C, D, HAS_EXTRAS>(x, task, head, shared, full, empty);
}

/* Sequences with one row. */
static inline uint32_t count_single(const struct batch_view *batch)
{
    uint32_t n = 0;
    for (uint32_t s = 0; s < batch->n_seqs; s++)
        n += batch->host_seq_first_row[s + 1] - batch->host_seq_first_row[s] == 1;
    return n;
}

/* Calls run(list, its tiles) for the sequences with several rows, a list at a time; a row is `packed` rows of the tiles'. */
template <class F> static void list_prompts(const struct batch_view *batch, uint32_t packed, uint32_t tile_rows, F run)
{
    const int32_t *rows = batch->host_seq_first_row;
    for (uint32_t seq = 0; seq < batch->n_seqs;) {
        struct prefill_list list = {};
        uint32_t n_tiles = 0;
        for (; seq < batch->n_seqs && list.n < PREFILL_SEQS; seq++) {
            const uint32_t n = (uint32_t)(rows[seq + 1] - rows[seq]);
            if (n < 2)
                continue;
            n_tiles += ceil_div(n * packed, tile_rows);
            list.seq[list.n] = seq;
            list.tile_end[list.n++] = n_tiles;
        }
        if (list.n)
            run(list, n_tiles);
    }
}

/* Starts the kernel for the sequences with several rows, for heads in turn. widen(x, list, first) says which come next, and
 * makes their operands of pages of bytes. */
template <class T, class C, uint32_t D, bool HAS_EXTRAS, class F>
static void launch_prefill(const struct cuda *cuda, const struct attention_args *args, F widen)
{
    typedef prefill_shape<D, scale_bytes_of<C>()> shape;
    const attended<T, C> x(*args);
    allow_shared(attention_prefill<T, C, D, HAS_EXTRAS>, shape::shared_bytes);
    list_prompts(args->batch, x.group, shape::rows, [&](const struct prefill_list &list, uint32_t n_tiles) {
        for (uint32_t head = 0; head < args->kv.n_kv_heads;) {
            const struct prefill_wide wide = widen(x, list, head);
            launch(cuda, attention_prefill<T, C, D, HAS_EXTRAS>, dim3(wide.n_heads, n_tiles), PREFILL_THREADS,
                   shape::shared_bytes, x, list, wide);
            head += wide.n_heads;
        }
    });
}

#endif
