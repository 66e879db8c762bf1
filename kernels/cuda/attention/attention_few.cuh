/* attention_few.cuh: attention of few sequences that have one row in the step and see at most two splits of keys, qkv's work
 * inside, with the bits of attention_decode.cuh. Bound by latency: a block is a kv head of a sequence with its query heads, and
 * when the kernel before ends it holds all that earlier steps wrote, the keys in registers, the values in shared memory.
 *
 * A team of D / 16 warps takes a split. For the scores a warp has the keys of a tile, for heads of 128 those of them whose
 * numbers have the same bit 2, the last that the sum of p joins; for the values it has 16 columns. q, the row's own key and its
 * value are brought by the team that has no split, or by the first; the own key is scored by itself, the own value put among
 * the others. The second team's sums go to the first, which folds and writes. */
#ifndef LLMPY_CUDA_ATTENTION_FEW_CUH
#define LLMPY_CUDA_ATTENTION_FEW_CUH

#include "../core/launch.cuh"
#include "../core/mma.cuh"
#include "attention_share.cuh"
#include "heads.cuh"

#define FEW_MAX_DIM 128u

template <uint32_t D> struct few_shape {
    static const uint32_t warps = D / 16, team = warps * 32, threads = 2 * team; /* warps, team: of a split */
    static const uint32_t per_tile = warps / TILES;                              /* warps that score a tile ... */
    static const uint32_t steps = D / 16, blocks = 4 / per_tile;                 /* ... in blocks of 16 keys */
    static const uint32_t octet_bytes = D / 64 * SLAB_BYTES, tile_bytes = TILE * D * 2, split_bytes = TILES * tile_bytes;
    static const uint32_t q_stride = D * 2 + 16, p_stride = SPLIT * 2 + 16;
    static const uint32_t lanes = D / 8;                          /* of a head */
    static const uint32_t bringing = (10 * lanes + 31) / 32 * 32; /* threads: 8 heads of q, key, value */
};

/* Of a block: keys of both splits, values of the first; those of the second come where its keys were. */
template <uint32_t D> struct few_memory {
    typedef few_shape<D> shape;
    char data[3 * shape::split_bytes];
    char p[2][8 * shape::p_stride], q[8 * shape::q_stride], key[D * 2];
    float most[2][shape::warps][8], sums[2][shape::warps][8]; /* of what a warp scores, by heads */
    float factors[2][TILES][8], maxima[2][TILES][8];          /* of O at a tile; up to a tile */
    float4 sums_o[shape::team], states[shape::team];          /* of the second team's threads */
    uint64_t full[2][2];                                      /* keys, values of a team */

    __device__ uint32_t keys_of(uint32_t team) const
    {
        return shared_address(data) + team * shape::split_bytes;
    }
    __device__ uint32_t values_of(uint32_t team) const
    {
        return shared_address(data) + (team ? 1 : 2) * shape::split_bytes;
    }
    __device__ uint32_t keys_there(uint32_t team) const
    {
        return shared_address(&full[team][0]);
    }
    __device__ uint32_t values_there(uint32_t team) const
    {
        return shared_address(&full[team][1]);
    }
    /* The 8 values from 8 * chunk on of a key in a team's split. */
    __device__ void put_value(uint32_t team, uint32_t key, uint32_t chunk, uint4 x) const
    {
        const uint32_t slab = values_of(team) + key / 8 * shape::octet_bytes + chunk / 8 * SLAB_BYTES;
        asm volatile("st.shared.v4.b32 [%0],{%1,%2,%3,%4};" ::"r"(slab + key % 8 * 128 + (chunk ^ key) % 8 * 16), "r"(x.x),
                     "r"(x.y), "r"(x.z), "r"(x.w)
                     : "memory");
    }
};

/* ---- q, the row's key and value ------------------------------------------------------------------------------------------ */

/* 8 values of a head of q, of the key or of the value, as the linear before left them. */
template <class T, uint32_t D> struct few_piece {
    typedef few_shape<D> shape;
    const qkv_rows<T> &heads;
    const struct decode_span &span;
    uint32_t own, first; /* head of q, or 8: key, 9: value */
    uint32_t kv_head;
    bool is_there;
    float weights[8];
    const float *norm;
    const T *from;
    char *page;
    uint4 values;

    __device__ few_piece(const attended<T, T> &x, const qkv_rows<T> &of, const struct decode_span &row, uint32_t in_kv_head)
        : heads(of), span(row), own(threadIdx.x % shape::team / shape::lanes), first(threadIdx.x % shape::lanes * 8),
          kv_head(in_kv_head), is_there(own < x.group || own == 8 || own == 9), weights(),
          norm(own < 8 ? of.q_norm : of.k_norm), page(NULL), values()
    {
        const uint32_t head = kv_head * x.group + own;
        const rows<T> &its = own < 8 ? of.q : own == 8 ? of.k : of.v;
        from = its.at(span.row, (own < 8 ? head : kv_head) * D + first);
        if (norm && is_there)
            load_weights(norm, of.norm_stride * (own < 8 ? head : kv_head) + first, weights);
        if (own >= 8 && is_there)
            page = x.kv.page_of(span.table_row, span.len - 1);
        if (is_there)
            asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
        if (heads.table)
            asm volatile("prefetch.global.L2 [%0];" ::"l"(turns()));
    }

    __device__ const float4 *turns(void) const
    {
        return (const float4 *)(heads.table + (size_t)span.row * (D / 2) + first % (D / 2));
    }

    __device__ __forceinline__ void bring(few_memory<D> &memory, uint32_t last_team)
    {
        float4 turn[4] = {};
        if (is_there)
            values = __ldcg((const uint4 *)from);
        if (heads.table)
            for (uint32_t i = 0; i < 4; i++)
                turn[i] = __ldcg(turns() + i);
        const uint4 mine = turned(normed(values), turn);
        if (own == 9) {
            barrier_wait(memory.values_there(last_team), 0);
            memory.put_value(last_team, (span.len - 1) % SPLIT, first / 8, values);
            return;
        }
        values = mine;
        if (own < 8)
            *(uint4 *)(memory.q + own * shape::q_stride + first * 2) = values;
        else if (own == 8)
            *(uint4 *)(memory.key + first * 2) = values;
    }

    /* Key and value to their page. */
    __device__ __forceinline__ void store(const cache<T> &kv) const
    {
        if (page)
            *(uint4 *)(kv.tiled_in(page, span.len - 1, kv_head, first / 8) + (own == 9 ? kv.tiled_values() : 0)) = values;
    }

  private:
    static __device__ __forceinline__ void widen(uint4 words, float (&wide)[8])
    {
        eight<T> x;
        *(uint4 *)&x = words;
        to_floats(x, wide);
    }
    static __device__ __forceinline__ uint4 narrow(const float (&x)[8])
    {
        return make_uint4(pack(x[0], x[1], T()), pack(x[2], x[3], T()), pack(x[4], x[5], T()), pack(x[6], x[7], T()));
    }

    __device__ __forceinline__ uint4 normed(uint4 words) const
    {
        float x[8];
        if (!norm)
            return words;
        widen(words, x);
        const float scale = norm_scale(head_squares<shape::lanes>(x), D, heads.eps);
        for (uint32_t i = 0; i < 8; i++)
            x[i] = weights[i] * (x[i] * scale);
        return narrow(x);
    }

    /* Pairs lie half a head apart. */
    __device__ __forceinline__ uint4 turned(uint4 words, const float4 (&turn)[4]) const
    {
        if (!heads.table)
            return words;
        uint4 others;
        float x[8], other[8];
        others.x = __shfl_xor_sync(~0u, words.x, shape::lanes / 2);
        others.y = __shfl_xor_sync(~0u, words.y, shape::lanes / 2);
        others.z = __shfl_xor_sync(~0u, words.z, shape::lanes / 2);
        others.w = __shfl_xor_sync(~0u, words.w, shape::lanes / 2);
        widen(words, x);
        widen(others, other);
        for (uint32_t i = 0; i < 8; i++) {
            const float along = i % 2 ? turn[i / 2].z : turn[i / 2].x, across = i % 2 ? turn[i / 2].w : turn[i / 2].y;
            x[i] = x[i] * along + other[i] * (first < D / 2 ? -across : across);
        }
        return narrow(x);
    }
};

/* ---- a split ------------------------------------------------------------------------------------------------------------- */

template <class T, uint32_t D, bool HAS_SINKS> struct few_worker {
    typedef few_shape<D> shape;
    few_memory<D> &memory;
    uint32_t team, warp, lane, g, t; /* g = lane / 4, t = lane % 4 */
    uint32_t tile;                   /* that the warp scores */
    uint32_t low, high;              /* tiles of the split that are seen */
    uint32_t key0, len;              /* the split's first key; keys of the sequence */
    int32_t seen, end;               /* keys, from the split's first on */
    uint32_t hidden, newest;         /* bits by row / 8 of the blocks that the warp scores */
    float c;
    uint32_t keys[shape::blocks][shape::steps][4];
    float s[shape::blocks][4], most[2];
    float o[4], m[2], l[2], sink[2];

    __device__ few_worker(few_memory<D> &of, const struct decode_span &span, float factor)
        : memory(of), team(threadIdx.x / shape::team), warp(threadIdx.x / 32 % shape::warps), lane(threadIdx.x % 32),
          g(lane / 4), t(lane % 4), tile(warp / shape::per_tile), key0((span.seen / SPLIT + team) * SPLIT), len(span.len),
          seen((int32_t)(span.seen - key0)), end((int32_t)min(span.len - key0, SPLIT)), hidden(0), newest(0), c(factor), sink()
    {
        low = seen > 0 ? (uint32_t)seen / TILE : 0;
        high = ((uint32_t)end + TILE - 1) / TILE;
#pragma unroll
        for (uint32_t i = 0; i < 2 * shape::blocks; i++) {
            const int32_t key = (int32_t)(tile * TILE + key_of(i / 2, g + i % 2 * 8));
            hidden |= (key < seen || key >= end) << i;
            newest |= (key0 + (uint32_t)key == len - 1) << i;
        }
    }

    /* The number in its tile of the key in a row of a block that the warp scores. */
    __device__ uint32_t key_of(uint32_t block, uint32_t row) const
    {
        if (shape::per_tile == 1)
            return block * 16 + row;
        return row % 4 + warp % 2 * 4 + row / 8 * 8 + block * 16 + row / 4 % 2 * 32;
    }
    __device__ bool has_tile(void) const
    {
        return tile >= low && tile < high;
    }
    __device__ void meet_team(void) const
    {
        meet(2 + team, shape::team);
    }

    /* Asks for the split's keys or values: by a warp. */
    __device__ void fetch(const cache<T> &kv, uint32_t table_row, uint32_t kv_head, bool is_values)
    {
        const uint32_t shift = kv.block_shift, run_bytes = D * 2 << shift, page = (key0 >> shift) + lane, first = page << shift;
        const uint32_t barrier = is_values ? memory.values_there(team) : memory.keys_there(team);
        const bool is_seen = lane < SPLIT >> shift && first < len && (int32_t)(first + kv.block_tokens - key0) > seen;
        const uint32_t n_runs = __popc(__ballot_sync(~0u, is_seen));
        if (lane == 0)
            barrier_expect(barrier, n_runs * run_bytes);
        __syncwarp();
        if (is_seen)
            copy_bytes((is_values ? memory.values_of(team) : memory.keys_of(team)) + lane * run_bytes,
                       kv.layer + (size_t)kv.table[(size_t)table_row * kv.table_stride + page] * kv.page_bytes +
                           (size_t)(kv_head * 2 + is_values) * run_bytes,
                       run_bytes, barrier, policy_read_once());
    }

    /* Brings what earlier steps wrote: keys to registers, values to their place. */
    __device__ __forceinline__ void take(const cache<T> &kv, uint32_t table_row, uint32_t kv_head)
    {
        if (warp == 0)
            fetch(kv, table_row, kv_head, false);
        if (warp == 1 && team == 0)
            fetch(kv, table_row, kv_head, true);
        if (has_tile())
            load_keys();
        meet_team(); /* the first team, too: see benchmarks/racecheck_teams.cu */
        if (warp == 1 && team == 1)
            fetch(kv, table_row, kv_head, true);
        clear_values();
    }

    __device__ void load_keys(void)
    {
        barrier_wait(memory.keys_there(team), 0);
        const uint32_t data = memory.keys_of(team) + tile * shape::tile_bytes;
#pragma unroll
        for (uint32_t i = 0; i < shape::blocks; i++) {
            const uint32_t key = key_of(i, lane % 16), row = data + key / 8 * shape::octet_bytes + key % 8 * 128;
#pragma unroll
            for (uint32_t k = 0; k < shape::steps; k++)
                load_matrices(keys[i][k], row + k / 4 * SLAB_BYTES + ((k % 4 * 2 + lane / 16) ^ (key % 8)) * 16);
        }
    }

    /* Zeros for the values of keys that are not seen, in tiles of which others are: by the team. */
    __device__ void clear_values(void)
    {
        const uint32_t begin = low * TILE, n_before = seen > 0 ? (uint32_t)seen - begin : 0;
        const uint32_t n = n_before + high * TILE - (uint32_t)end;
        barrier_wait(memory.values_there(team), 0);
#pragma unroll 1
        for (uint32_t i = threadIdx.x % shape::team; i < n * shape::lanes; i += shape::team) {
            const uint32_t key = i / shape::lanes;
            memory.put_value(team, key < n_before ? begin + key : (uint32_t)end + key - n_before, i % shape::lanes,
                             make_uint4(0, 0, 0, 0));
        }
    }

    /* S of the warp's keys and its maxima. */
    __device__ __forceinline__ void score(void)
    {
        const bool has_newest = __any_sync(~0u, newest != 0);
        const uint32_t from = shared_address(memory.q) + lane % 8 * shape::q_stride + lane / 8 * 16;
        uint32_t q[shape::steps / 2][4], key[shape::steps / 2][4];
        float own[4] = {};
#pragma unroll
        for (uint32_t k = 0; k < shape::steps / 2; k++)
            load_matrices(q[k], from + k * 64);
        if (has_newest)
#pragma unroll
            for (uint32_t k = 0; k < shape::steps / 2; k++)
                load_matrices(key[k], shared_address(memory.key) + lane / 8 * 16 + k * 64);
#pragma unroll
        for (uint32_t i = 0; i < shape::blocks * 4; i++)
            s[i / 4][i % 4] = 0;
#pragma unroll
        for (uint32_t k = 0; k < shape::steps; k++) {
            const uint32_t b[2] = {q[k / 2][k % 2 * 2], q[k / 2][k % 2 * 2 + 1]};
#pragma unroll
            for (uint32_t i = 0; i < shape::blocks; i++)
                mma(s[i], keys[i][k], b, T());
            if (has_newest) {
                const uint32_t a0 = key[k / 2][k % 2 * 2], a1 = key[k / 2][k % 2 * 2 + 1], a[4] = {a0, a0, a1, a1};
                mma(own, a, b, T());
            }
        }
        if (__any_sync(~0u, hidden != 0))
#pragma unroll
            for (uint32_t i = 0; i < shape::blocks * 4; i++)
                s[i / 4][i % 4] = hidden >> i / 2 & 1 ? MINUS_INFINITY : s[i / 4][i % 4];
        if (has_newest)
#pragma unroll
            for (uint32_t i = 0; i < shape::blocks * 4; i++)
                s[i / 4][i % 4] = newest >> i / 2 & 1 ? own[i % 2] : s[i / 4][i % 4];
        most[0] = s[0][0];
        most[1] = s[0][1];
#pragma unroll
        for (uint32_t i = 2; i < shape::blocks * 4; i++)
            most[i % 2] = fmaxf(most[i % 2], s[i / 4][i % 4]);
        for (uint32_t apart = 4; apart < 32; apart *= 2)
            for (uint32_t e = 0; e < 2; e++)
                most[e] = fmaxf(most[e], __shfl_xor_sync(~0u, most[e], apart));
        if (lane < 4)
            *(float2 *)&memory.most[team][warp][t * 2] = make_float2(most[0], most[1]);
    }

    /* The warp's p, their sums, and what its tile multiplies O by, to all. */
    __device__ __forceinline__ void soften(void)
    {
        float before[2] = {MINUS_INFINITY, MINUS_INFINITY}, n[2], a[2], sum[2];
#pragma unroll
        for (uint32_t i = 0; i < (TILES - 1) * shape::per_tile; i++) {
            const float2 other = *(const float2 *)&memory.most[team][i][t * 2];
            const bool is_before = i / shape::per_tile >= low && i / shape::per_tile < tile;
            before[0] = is_before ? fmaxf(before[0], other.x) : before[0];
            before[1] = is_before ? fmaxf(before[1], other.y) : before[1];
        }
        if (shape::per_tile == 2) {
            const float2 other = *(const float2 *)&memory.most[team][warp ^ 1][t * 2];
            most[0] = fmaxf(most[0], other.x);
            most[1] = fmaxf(most[1], other.y);
        }
        for (uint32_t e = 0; e < 2; e++) {
            n[e] = fmaxf(before[e], most[e]);
            const float minus = -(anchor(n[e]) * c);
            float r[shape::blocks];
#pragma unroll
            for (uint32_t i = 0; i < shape::blocks; i++) {
                for (uint32_t y = e; y < 4; y += 2)
                    s[i][y] = power_of_2(fmaf(s[i][y], c, minus));
                r[i] = s[i][e] + s[i][2 + e];
            }
            sum[e] = r[0] + r[1];
            if (shape::per_tile == 1)
                sum[e] = sum[e] + (r[2 % shape::blocks] + r[3 % shape::blocks]);
            a[e] = rescale(before[e], anchor(n[e]), c);
        }
        store_p(memory.p[team] + tile * TILE * 2);
        for (uint32_t i = 0; i < 3; i++)
            for (uint32_t e = 0; e < 2; e++)
                sum[e] = sum[e] + __shfl_xor_sync(~0u, sum[e], shape::per_tile == 1 ? 4 << i : i ? 2 << i : 16);
        if (lane < 4)
            *(float2 *)&memory.sums[team][warp][t * 2] = make_float2(sum[0], sum[1]);
        if (lane < 4 && warp % shape::per_tile == 0) {
            *(float2 *)&memory.factors[team][tile][t * 2] = make_float2(a[0], a[1]);
            *(float2 *)&memory.maxima[team][tile][t * 2] = make_float2(n[0], n[1]);
        }
    }

    __device__ __forceinline__ void store_p(char *p)
    {
        if constexpr (shape::per_tile == 1) {
            const uint32_t to = shared_address(p) + lane % 8 * shape::p_stride + lane / 8 * 16;
#pragma unroll
            for (uint32_t i = 0; i < shape::blocks; i += 2)
                store_transposed(to + i * 32, pack(s[i][0], s[i][1], T()), pack(s[i][2], s[i][3], T()),
                                 pack(s[i + 1][0], s[i + 1][1], T()), pack(s[i + 1][2], s[i + 1][3], T()));
        } else {
            p += t * 2 * shape::p_stride;
#pragma unroll
            for (uint32_t i = 0; i < shape::blocks * 2; i++) {
                const uint32_t pair = pack(s[i / 2][i % 2 * 2], s[i / 2][i % 2 * 2 + 1], T());
                uint16_t *const to = (uint16_t *)p + key_of(i / 2, g + i % 2 * 8);
                to[0] = (uint16_t)pair;
                to[shape::p_stride / 2] = (uint16_t)(pair >> 16);
            }
        }
    }

    /* The warp's columns of a tile's values, for four k16 steps. */
    __device__ __forceinline__ void load_values(uint32_t (&values)[4][4], uint32_t of) const
    {
        const uint32_t row = lane / 16 * shape::octet_bytes + lane % 8 * 128, chunk = warp % 4 * 2 + lane / 8 % 2;
        const uint32_t data = memory.values_of(team) + of * shape::tile_bytes + warp / 4 * SLAB_BYTES;
#pragma unroll
        for (uint32_t k = 0; k < 4; k++)
            load_transposed(values[k], data + k * 2 * shape::octet_bytes + row + (chunk ^ lane % 8) * 16);
    }

    __device__ __forceinline__ void load_p(uint32_t (&p)[2][4], uint32_t of) const
    {
        const uint32_t from = shared_address(memory.p[team]) + lane % 8 * shape::p_stride + lane / 8 * 16 + of * TILE * 2;
        load_matrices(p[0], from);
        load_matrices(p[1], from + 64);
    }

    /* o = the warp's columns of the split, m and l. values[0]: those of the first tile that is seen. */
    __device__ __forceinline__ void add_values(uint32_t (&values)[2][4][4])
    {
        uint32_t p[2][2][4];
        o[0] = o[1] = o[2] = o[3] = l[0] = l[1] = 0;
        load_p(p[0], low);
#pragma unroll
        for (uint32_t i = 0; i < TILES; i++) {
            const uint32_t at = low + i, now = i % 2;
            if (at >= high)
                break;
            const float2 a = *(const float2 *)&memory.factors[team][at][t * 2];
            float2 sum = *(const float2 *)&memory.sums[team][at * shape::per_tile][t * 2];
            if (shape::per_tile == 2) {
                const float2 other = *(const float2 *)&memory.sums[team][at * 2 + 1][t * 2];
                sum = make_float2(sum.x + other.x, sum.y + other.y);
            }
            if (at + 1 < high) {
                load_p(p[!now], at + 1);
                load_values(values[!now], at + 1);
            }
            for (uint32_t x = 0; x < 4; x++)
                o[x] *= x % 2 ? a.y : a.x;
#pragma unroll
            for (uint32_t k = 0; k < 4; k++) {
                const uint32_t b[2] = {p[now][k / 2][k % 2 * 2], p[now][k / 2][k % 2 * 2 + 1]};
                mma(o, values[now][k], b, T());
            }
            l[0] = fmaf(a.x, l[0], sum.x);
            l[1] = fmaf(a.y, l[1], sum.y);
        }
        const float2 last = *(const float2 *)&memory.maxima[team][high - 1][t * 2];
        m[0] = last.x;
        m[1] = last.y;
    }

    /* The second team's sums: by a thread of it, and by the one in the same place of the first. */
    __device__ __forceinline__ void send(void)
    {
        memory.sums_o[threadIdx.x % shape::team] = make_float4(o[0], o[1], o[2], o[3]);
        memory.states[threadIdx.x % shape::team] = make_float4(m[0], m[1], l[0], l[1]);
    }
    __device__ __forceinline__ void fold_sent(void)
    {
        const float4 sums = memory.sums_o[threadIdx.x], states = memory.states[threadIdx.x];
        const float other_o[4] = {sums.x, sums.y, sums.z, sums.w}, other_m[2] = {states.x, states.y};
        const float other_l[2] = {states.z, states.w};
        for (uint32_t e = 0; e < 2; e++) {
            const float n = fmaxf(m[e], other_m[e]), before = rescale(m[e], anchor(n), c);
            const float now = rescale(other_m[e], anchor(n), c);
            m[e] = n;
            l[e] = fold(l[e], before, other_l[e], now);
            for (uint32_t y = e; y < 4; y += 2)
                o[y] = fold(o[y], before, other_o[y], now);
        }
    }

    __device__ __forceinline__ void load_sinks(const float *sinks, uint32_t n_heads)
    {
        for (uint32_t e = 0; e < 2; e++)
            sink[e] = t * 2 + e < n_heads ? sinks[t * 2 + e] : 0;
    }

    __device__ __forceinline__ void write(T *out, uint32_t n_heads)
    {
        for (uint32_t e = 0; e < 2; e++) {
            if (HAS_SINKS)
                l[e] = with_sink(l[e], sink[e], m[e], c);
            l[e] = __frcp_rn(l[e]);
        }
        for (uint32_t half = 0; half < 2; half++) {
            uint32_t pair = pack(o[half * 2] * l[0], o[half * 2 + 1] * l[1], T()); /* of a column and two heads ... */
            asm("movmatrix.sync.aligned.m8n8.trans.b16 %0,%1;" : "=r"(pair) : "r"(pair)); /* ... of a head and two columns */
            if (g < n_heads)
                *(uint32_t *)(out + g * D + warp * 16 + half * 8 + t * 2) = pair;
        }
    }
};

/* From when q is there: S, p and O of the team's split. brings: the piece goes to the cache, too. */
template <class T, uint32_t D, bool HAS_SINKS>
static __device__ __forceinline__ void few_attend(few_worker<T, D, HAS_SINKS> &w, const few_piece<T, D> &piece,
                                                  const cache<T> &kv, bool brings)
{
    uint32_t values[2][4][4];
    if (w.has_tile())
        w.score();
    if (brings)
        piece.store(kv);
    w.meet_team();
    if (w.has_tile())
        w.soften();
    w.load_values(values[0], w.low);
    w.meet_team();
    w.add_values(values);
}

template <class T, uint32_t D, bool HAS_SINKS>
static __global__ void __launch_bounds__(few_shape<D>::threads, 128 / D)
attention_few(const __grid_constant__ attended<T, T> x, const __grid_constant__ qkv_rows<T> heads)
{
    only_sm_90a();
    typedef few_shape<D> shape;
    extern __shared__ __align__(1024) char shared[];
    few_memory<D> &memory = *(few_memory<D> *)shared;
    const uint32_t kv_head = blockIdx.x, n_heads = x.group;
    start_next();
    struct decode_span span;
    span_of(x, blockIdx.y, &span);
    const uint32_t last_team = (span.len - 1) / SPLIT - span.seen / SPLIT, bringing_team = 1 - last_team;
    const uint32_t n_meeting = last_team ? shape::threads : shape::team + shape::bringing;
    barriers_init(shared_address(memory.full), 4, 1);
    barriers_made();
    __syncthreads();
    few_worker<T, D, HAS_SINKS> w(memory, span, x.factor);
    few_piece<T, D> piece(x, heads, span, kv_head);
    const bool brings = w.team == bringing_team && threadIdx.x % shape::team < shape::bringing;
    if (w.team > last_team) {
        wait_for_input();
        if (brings) {
            piece.bring(memory, last_team);
            meet(1, n_meeting);
            piece.store(x.kv);
        }
        return;
    }
    if (HAS_SINKS)
        w.load_sinks(x.sinks + kv_head * n_heads, n_heads);
    w.take(x.kv, span.table_row, kv_head);
    wait_for_input();
    if (brings)
        piece.bring(memory, last_team);
    meet(1, n_meeting);
    few_attend(w, piece, x.kv, brings);
    if (w.team == 1) {
        w.send();
        meet(1, shape::threads);
        return;
    }
    for (uint32_t i = 0; i < 4; i++)
        w.o[i] = w.o[i] + 0.0f; /* as after a fold: no zero is negative */
    if (last_team) {
        meet(1, shape::threads);
        w.fold_sent();
    }
    w.write(x.out.at(span.row, kv_head * n_heads * D), n_heads);
}

/* ---- the host's side ----------------------------------------------------------------------------------------------------- */

/* For sequences of one row each, and with qkv's work: do all of them see at most two splits, do they all fit on the device at
 * once, and are their heads turned as attention_few turns them? */
static bool few_fits(const struct cuda *cuda, const struct attention_args *args)
{
    const struct batch_view *batch = args->batch;
    const struct kv_view *kv = &args->kv;
    const uint32_t reach = kv->table_stride * batch->block_tokens;
    const uint32_t most = batch->max_tokens && batch->max_tokens < reach ? batch->max_tokens : reach;
    const bool is_short = most <= 2 * SPLIT || (args->window && args->window <= SPLIT + 1);
    const struct rope_args *rope = &args->heads->rope;
    return is_short && batch->n_seqs * kv->n_kv_heads <= cuda->n_processors && !rope->interleaved &&
           (!rope->table || rope->n_freqs == kv->head_dim / 2);
}

template <class T, uint32_t D, bool HAS_SINKS>
static void launch_few(const struct cuda *cuda, const struct attention_args *args)
{
    const uint32_t bytes = sizeof(few_memory<D>);
    attended<T, T> x(*args);
    x.is_single = true;
    allow_shared(attention_few<T, D, HAS_SINKS>, bytes);
    launch(cuda, attention_few<T, D, HAS_SINKS>, dim3(args->kv.n_kv_heads, args->batch->n_seqs), few_shape<D>::threads, bytes,
           x, qkv_rows<T>(*args->heads));
}

#endif
