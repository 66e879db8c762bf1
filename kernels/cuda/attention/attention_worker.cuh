/* attention_worker.cuh: the computing warps of attention_decode.cuh. A group of four warps takes a split: each warp scores one
 * tile, the group computes the softmax, then each warp adds a quarter of the columns over all tiles. Where attention does the
 * work of qkv, a group norms and rotates its unit's q, and stores the row's own key and value in the fetched tile and in their
 * page. */
#ifndef LLMPY_CUDA_ATTENTION_WORKER_CUH
#define LLMPY_CUDA_ATTENTION_WORKER_CUH

#include "../core/launch.cuh"
#include "../core/mma.cuh"
#include "attention_share.cuh"
#include "heads.cuh"

#include <type_traits>

#define P_STRIDE (SPLIT * 2 + 16) /* bytes of a head's p, apart so that no banks collide */

/* AT_ONCE: blocks that a processor holds. Two hide more of the time that warps wait, with fewer registers each. */
template <class C, uint32_t D, uint32_t BLOCKS, uint32_t AT_ONCE = 1> struct decode_shape {
    static const uint32_t heads = 8 * BLOCKS, chunk_bytes = TILE * D * sizeof(C), steps = D / 16;
    static const uint32_t octet_bytes = 8 * D * sizeof(C); /* of 8 tokens */
    static const uint32_t columns = D / 64;                  /* blocks of 16 columns of a warp */
    static const uint32_t p_bytes = heads * P_STRIDE, state_bytes = 4 * TILES * heads * 4;
    static const uint32_t mail_floats = columns * BLOCKS * 4 + BLOCKS * 4; /* of a thread: o, m, l of a split */
    static const uint32_t q_stride = D * 2 + 16; /* bytes of a head's q, apart so that no banks collide */
    static const uint32_t q_bytes = sizeof(C) == 1 ? heads * q_stride : 0; /* of 16-bit pages q lies in registers */
    static const uint32_t fixed_bytes = 2 * (p_bytes + q_bytes + state_bytes) + mail_floats * DECODE_WORKERS * 4 + 64 + 2 * 8;
    static const uint32_t fetch_registers = AT_ONCE == 2 ? 48 : BLOCKS == 1 ? 72 : 56; /* of a thread */
    static const uint32_t registers = (AT_ONCE == 2 ? 120 : 252) - fetch_registers / 2; /* of a computing thread */
    static const uint32_t scale_bytes = scale_bytes_of<C>();
    static const uint32_t place_bytes = chunk_bytes + scale_bytes + 3 * 8; /* of a place in a ring and its barriers */
};

/* ---- the ring ------------------------------------------------------------------------------------------------------------ */

/* The place of a chunk of keys or values in a group's ring, and the number of its round. */
struct decode_chunk {
    uint32_t slot, round;
    __device__ decode_chunk after(uint32_t n, uint32_t depth) const
    {
        decode_chunk next = {slot + n, round};
        while (next.slot >= depth) {
            next.slot -= depth;
            next.round++;
        }
        return next;
    }
};

/* Where a group's ring lies in shared memory. It is not the ring of ring.cuh, because the reading side jumps: a warp waits for
 * the keys of its tile, up to the fourth chunk of a split, before it has seen the first. A barrier tells a round only from the
 * round before. So rounds alternate between two barriers a place, and a ring for half of a split's keys is enough. Every thread
 * releases a place itself: where one lane does that for its warp behind a __syncwarp, racecheck reports the reads of the other
 * lanes. */
struct decode_ring {
    uint32_t data, full, empty, depth, scales; /* scales: of a place of keys, as they lie in pages */
    __device__ __forceinline__ uint32_t full_of(struct decode_chunk place) const
    {
        return full + (place.round % 2 * depth + place.slot) * 8;
    }
};

/* The state of a computing thread: addresses in shared memory, and the lane's part of the fragments. */
template <class T, class C, uint32_t D, uint32_t BLOCKS, bool HAS_EXTRAS, uint32_t AT_ONCE> struct decode_worker {
    typedef decode_shape<C, D, BLOCKS, AT_ONCE> shape;
    typedef weight_of<T, C> W;
    static const bool has_bytes = !std::is_same_v<C, T>, is_int8 = std::is_same_v<C, int8_t>;
    struct decode_ring ring;
    char *p;
    float *tile_max, *tile_sum;     /* [TILES][heads] */
    float *tile_most, *tile_factor; /* alike: the maximum of the split up to a tile, and the factor of the sums before it */
    uint32_t group, warp, lane, g, t; /* g = lane / 4, t = lane % 4 */
    float c, cap_factor;

    uint32_t q[has_bytes ? 1 : shape::steps][BLOCKS][2], shared_q;
    float s[4][BLOCKS][4];              /* keys 16 i + g + j / 2 * 8, heads 8 b + 2 t + j % 2 of the warp's tile */
    float o[shape::columns][BLOCKS][4]; /* columns alike */
    float m[BLOCKS][2], l[BLOCKS][2];
    float value_scales[4][2]; /* of INT8, times the unit: of keys 16 i + g + 8 y of the warp's tile */
    uint32_t block_shift;
    float slope[BLOCKS][2]; /* of heads 8 b + 2 t + j, if it leans */
    bool leans;

    uint32_t newest, token; /* the split's tile that this launch brings the row's own key and value for, or TILES; the place */
    eight<T> key, value;    /* the lane's part of it, of the value that of the warp's columns */

    __device__ decode_worker(char *p_of_both, float *states_of_both, float factor, float cap)
        : p(p_of_both), tile_max(states_of_both), group(threadIdx.x / DECODE_WORKERS), warp(threadIdx.x / 32 % 4),
          lane(threadIdx.x % 32), g(lane / 4), t(lane % 4), c(factor), cap_factor(cap),
          shared_q(shared_address(p) + 2 * shape::p_bytes + group * shape::q_bytes)
    {
        p += group * shape::p_bytes;
        tile_max += group * (shape::state_bytes / 4);
        tile_sum = tile_max + TILES * shape::heads;
        tile_most = tile_sum + TILES * shape::heads;
        tile_factor = tile_most + TILES * shape::heads;
    }

    /* Reads the lane's number again, so that the compiler keeps no address that it has computed from that: with two blocks a
     * processor registers are dear. */
    __device__ __forceinline__ void find_lane(void)
    {
        if (AT_ONCE == 1)
            return;
        asm volatile("mov.u32 %0,%%laneid;" : "=r"(lane));
        g = lane / 4;
        t = lane % 4;
    }

    __device__ __forceinline__ void wait_for(struct decode_chunk place)
    {
        barrier_wait(ring.full_of(place), place.round / 2 & 1);
    }

    __device__ void load_q(const T *first, uint32_t stride, uint32_t n_heads)
    {
        for (uint32_t b = 0; b < BLOCKS; b++) {
            const uint32_t *from = (const uint32_t *)(first + (size_t)(b * 8 + g) * stride) + t;
            bool is_head = b * 8 + g < n_heads;
#pragma unroll
            for (uint32_t k = 0; k < shape::steps; k++) {
                q[k][b][0] = is_head ? from[k * 8] : 0;
                q[k][b][1] = is_head ? from[k * 8 + 4] : 0;
            }
        }
    }

    /* The same through shared memory, by the group. */
    __device__ void share_q(const T *first, uint32_t stride, uint32_t n_heads)
    {
        for (uint32_t i = threadIdx.x % DECODE_WORKERS; i < shape::heads * D / 8; i += DECODE_WORKERS) {
            const uint32_t head = i / (D / 8), chunk = i % (D / 8);
            const T *from = first + (size_t)head * stride + chunk * 8;
            const uint4 x = head < n_heads ? *(const uint4 *)from : make_uint4(0, 0, 0, 0);
            asm volatile("st.shared.v4.b32 [%0],{%1,%2,%3,%4};" ::"r"(shared_q + head * shape::q_stride + chunk * 16), "r"(x.x),
                         "r"(x.y), "r"(x.z), "r"(x.w)
                         : "memory");
        }
        meet(1 + group, DECODE_WORKERS);
    }

    /* Prepares the unit's row from the output of the linear before: norms and rotates heads of q, through p; for the newest
     * tile also key and value, which are stored in their page, too. */
    __device__ void prepare(const qkv_rows<T> &x, const cache<C> &kv, const struct decode_span &span, uint32_t head,
                            uint32_t n_heads, uint32_t kv_head)
    {
        const uint32_t lanes = D / 8, first = lane % lanes * 8, n_passes = (D + 127) / 128;
        const uint32_t piece = (warp * (D / 32) + lane) * 8; /* of the value */
        const bool has_key = newest == warp, has_value = newest < TILES && lane < D / 32;
        uint32_t own = threadIdx.x % DECODE_WORKERS / lanes;
        float weights[2][8] = {};
        if (x.q_norm && own < n_heads)
            load_weights(x.q_norm, x.norm_stride * (head + own) + first, weights[0]);
        if (x.k_norm && has_key)
            load_weights(x.k_norm, x.norm_stride * kv_head + first, weights[1]);
        if (x.table)
            asm volatile("prefetch.global.L2 [%0];" ::"l"(x.table + (size_t)span.row * x.n_freqs + lane * x.n_freqs / 32));
        char *page = newest < TILES ? kv.page_of(span.table_row, span.len - 1) : NULL;
        meet(1 + group, DECODE_WORKERS);
        wait_for_input();
        float2 turns[8];
        load_turns(x, span.row, first, turns);
        if (has_key)
            key = fresh_eight(x.k.at(span.row, kv_head * D + first));
        if (has_value)
            value = fresh_eight(x.v.at(span.row, kv_head * D + piece));
        for (uint32_t pass = 0; pass < n_passes; pass++, own += DECODE_WORKERS / lanes) {
            eight<T> heads = {};
            if (own < n_heads)
                heads = fresh_eight(x.q.at(span.row, (head + own) * D + first));
            if (pass && x.q_norm && own < n_heads)
                load_weights(x.q_norm, x.norm_stride * (head + own) + first, weights[0]);
            if (x.q_norm)
                norm_eight<lanes>(&heads, weights[0], D, x.eps);
            if (x.table)
                turn_eight<lanes>(&heads, turns, x.n_freqs, x.interleaved);
            if (own < shape::heads)
                *(eight<T> *)(p + own * P_STRIDE + first * 2) = heads;
        }
        meet(1 + group, DECODE_WORKERS);
        load_q((const T *)p, P_STRIDE / sizeof(T), shape::heads);
        if (has_key && x.k_norm)
            norm_eight<lanes>(&key, weights[1], D, x.eps);
        if (has_key && x.table)
            turn_eight<lanes>(&key, turns, x.n_freqs, x.interleaved);
        if (has_key && lane < lanes)
            *(eight<T> *)kv.tiled_in(page, span.len - 1, kv_head, lane) = key;
        if (has_value)
            *(eight<T> *)(kv.tiled_in(page, span.len - 1, kv_head, piece / 8) + kv.tiled_values()) = value;
    }

    /* Stores eight of the row's own values, from 8 * c on, at its place in a tile. */
    __device__ __forceinline__ void put_newest(uint32_t data, const eight<T> &of, uint32_t c) const
    {
        const uint32_t slab = token / 8 * (D / 64) + c / 8;
        const uint32_t to = data + slab * SLAB_BYTES + token % 8 * 128 + (c ^ token) % 8 * 16;
        const uint4 words = *(const uint4 *)&of;
        asm volatile("st.shared.v4.b32 [%0],{%1,%2,%3,%4};" ::"r"(to), "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w)
                     : "memory");
    }

    __device__ void load_slopes(const float *slopes, uint32_t n_heads, float factor)
    {
        for (uint32_t b = 0; b < BLOCKS; b++)
            for (uint32_t e = 0; e < 2; e++) {
                uint32_t head = b * 8 + t * 2 + e;
                slope[b][e] = head < n_heads ? slopes[head] * factor : 0;
            }
    }

    /* Adds the slope times a key's distance from the row. position: the row's, counted from the tile's first key. */
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

    __device__ __forceinline__ void multiply_keys(uint32_t data)
    {
        const uint32_t row = lane / 8 % 2 * shape::octet_bytes + lane % 8 * 128, chunk = lane / 16, turn = lane % 8;
#pragma unroll
        for (uint32_t k = 0; k < shape::steps; k++)
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                uint32_t keys[4];
                load_matrices(keys,
                              data + i * 2 * shape::octet_bytes + k / 4 * SLAB_BYTES + row + ((k % 4 * 2 + chunk) ^ turn) * 16);
                for (uint32_t b = 0; b < BLOCKS; b++)
                    mma(s[i][b], keys, q[k][b], T());
            }
    }

    /* The same of bytes: a chunk has the values of a step, and a matrix of 8 x 8 pairs has those of 8 keys. */
    __device__ __forceinline__ void multiply_byte_keys(uint32_t data)
    {
        const uint32_t row = lane / 8 % 2 * shape::octet_bytes;
#pragma unroll
        for (uint32_t k = 0; k < shape::steps; k += 2) {
            uint32_t heads[BLOCKS][4];
            for (uint32_t b = 0; b < BLOCKS; b++)
                load_matrices(heads[b], shared_q + (b * 8 + lane % 8) * shape::q_stride + (k * 2 + lane / 8) * 16);
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                uint32_t bytes[4];
                load_matrices(bytes, data + i * 2 * shape::octet_bytes + row + kv_byte_chunk(D, lane % 8, k + lane / 16));
#pragma unroll
                for (uint32_t step = 0; step < 2; step++) {
                    uint2 low = widen_bytes(bytes[step * 2], T(), C()), high = widen_bytes(bytes[step * 2 + 1], T(), C());
                    if (k + step == 0 && !is_int8) {
                        low.x = bytes[0] == E4M3_NANS ? TWO_NANS : low.x;
                        high.x = bytes[1] == E4M3_NANS ? TWO_NANS : high.x;
                    }
                    const uint32_t keys[4] = {low.x, high.x, low.y, high.y};
                    for (uint32_t b = 0; b < BLOCKS; b++)
                        mma(s[i][b], keys, {heads[b][step * 2], heads[b][step * 2 + 1]}, T());
                }
            }
        }
    }

    /* Multiplies S by the scales of the keys of [seen, end), and keeps the scales of their values. */
    __device__ __forceinline__ void scale_keys(uint32_t scales, int32_t seen, int32_t end)
    {
        const uint32_t block = 1u << block_shift; /* a page has those of its keys, then those of its values */
        scales += g * 4;
#pragma unroll
        for (uint32_t i = 0; i < 8; i++) {
            const uint32_t token = i * 8 + g, at = scales + (i * 8 + (i * 8 & -block)) * 4;
            float key, value;
            asm volatile("ld.shared.f32 %0,[%1];" : "=f"(key) : "r"(at) : "memory");
            asm volatile("ld.shared.f32 %0,[%1];" : "=f"(value) : "r"(at + block * 4) : "memory");
            for (uint32_t x = 0; x < BLOCKS * 2; x++)
                s[i / 2][x / 2][i % 2 * 2 + x % 2] *= key * int8_unit<T>();
            value_scales[i / 2][i % 2] = (int32_t)token >= seen && (int32_t)token < end ? value * int8_unit<W>() : 0;
        }
    }

    /* A p as the operand of the values has it, not rounded yet. */
    __device__ __forceinline__ float weight(uint32_t i, uint32_t b, uint32_t x) const
    {
        return is_int8 ? s[i][b][x] * value_scales[i][x / 2] : s[i][b][x];
    }

    /* Computes S of the warp's tile, with keys outside [seen, end) of the tile hidden, and shares its maxima. */
    __device__ void score(struct decode_chunk place, int32_t seen, int32_t end)
    {
        uint32_t data = ring.data + place.slot * shape::chunk_bytes;
        wait_for(place);
        if (!has_bytes && newest == warp) {
            if (lane < D / 8)
                put_newest(data, key, lane);
            __syncwarp();
        }
        if constexpr (has_bytes)
            multiply_byte_keys(data);
        else
            multiply_keys(data);
        if constexpr (is_int8)
            scale_keys(ring.scales + place.slot * TILE_SCALES, seen, end);
        barrier_arrive(ring.empty + place.slot * 8, DECODE_WORKERS / 32);
        if (cap_factor != 0)
            cap();
        if (HAS_EXTRAS && leans)
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

    /* Computes p of the warp's tile for heads b, and its sum; before is the maximum of the tiles before. */
    __device__ __forceinline__ void weigh(uint32_t b, uint32_t e, float before)
    {
        const uint32_t at = warp * shape::heads + b * 8 + t * 2 + e;
        const float n = fmaxf(before, tile_max[at]);
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
        if (lane < 4) {
            tile_sum[at] = sum;
            tile_most[at] = n;
            tile_factor[at] = rescale(before, anchor(n), c);
        }
    }

    /* Shares p of the warp's tile, which is in [low, high). */
    __device__ void soften(uint32_t low)
    {
        float before[BLOCKS][2];
#pragma unroll
        for (uint32_t i = 0; i < BLOCKS * 2; i++)
            before[i / 2][i % 2] = MINUS_INFINITY;
#pragma unroll
        for (uint32_t tile = 0; tile < TILES - 1; tile++)
            for (uint32_t i = 0; i < BLOCKS * 2 && tile >= low && tile < warp; i++)
                before[i / 2][i % 2] = fmaxf(before[i / 2][i % 2], tile_max[tile * shape::heads + i / 2 * 8 + t * 2 + i % 2]);
#pragma unroll
        for (uint32_t i = 0; i < BLOCKS * 2; i++)
            weigh(i / 2, i % 2, before[i / 2][i % 2]);
        uint32_t to = shared_address(p) + lane % 8 * P_STRIDE + warp * TILE * 2 + lane / 8 * 16;
#pragma unroll
        for (uint32_t b = 0; b < BLOCKS; b++)
            for (uint32_t i = 0; i < 4; i += 2)
                store_transposed(to + b * 8 * P_STRIDE + i * 32, pack(weight(i, b, 0), weight(i, b, 1), W()),
                                 pack(weight(i, b, 2), weight(i, b, 3), W()),
                                 pack(weight(i + 1, b, 0), weight(i + 1, b, 1), W()),
                                 pack(weight(i + 1, b, 2), weight(i + 1, b, 3), W()));
    }

    /* Adds the warp's columns of a tile's values to o times factor; if it is cut, keys outside [seen, end) of the split are
     * zeros. */
    template <bool IS_CUT>
    __device__ __forceinline__ void add_tile(uint32_t data, uint32_t tile, const float (&factor)[BLOCKS][2], int32_t seen,
                                             int32_t end)
    {
#pragma unroll
        for (uint32_t i = 0; i < shape::columns * BLOCKS * 4; i++)
            o[i / (BLOCKS * 4)][i / 4 % BLOCKS][i % 4] *= factor[i / 4 % BLOCKS][i % 2];
        if constexpr (has_bytes)
            multiply_byte_values<IS_CUT>(data, tile, seen, end);
        else
            multiply_values<IS_CUT>(data, tile, seen, end);
    }

    /* p of the 16 keys of a step, and masks of those in [seen, end), if the tile is cut. */
    template <bool IS_CUT>
    __device__ __forceinline__ void load_p(uint32_t tile, uint32_t k, int32_t seen, int32_t end, uint32_t (&weights)[BLOCKS][2],
                                           uint32_t (&keep)[2])
    {
        for (uint32_t b = 0; b < BLOCKS; b++) {
            const uint32_t *from = (const uint32_t *)(p + (b * 8 + g) * P_STRIDE + tile * TILE * 2 + k * 32) + t;
            weights[b][0] = from[0];
            weights[b][1] = from[4];
        }
        mask_keys<IS_CUT>(tile, k, seen, end, keep);
    }

    template <bool IS_CUT>
    __device__ __forceinline__ void mask_keys(uint32_t tile, uint32_t k, int32_t seen, int32_t end, uint32_t (&keep)[2])
    {
        int32_t key = (int32_t)(tile * TILE + k * 16 + t * 2);
        for (uint32_t i = 0; i < 2 && IS_CUT; i++, key += 8)
            keep[i] = (key >= seen && key < end ? 0xffffu : 0) | (key + 1 >= seen && key + 1 < end ? 0xffff0000u : 0);
    }

    template <bool IS_CUT>
    __device__ __forceinline__ void add_columns(uint32_t f, uint32_t (&values)[4], const uint32_t (&weights)[BLOCKS][2],
                                                const uint32_t (&keep)[2])
    {
        for (uint32_t i = 0; i < 4 && IS_CUT; i++)
            values[i] &= keep[i / 2];
        for (uint32_t b = 0; b < BLOCKS; b++)
            mma(o[f][b], values, weights[b], W());
    }

    template <bool IS_CUT>
    __device__ __forceinline__ void multiply_values(uint32_t data, uint32_t tile, int32_t seen, int32_t end)
    {
        const uint32_t row = lane / 16 * shape::octet_bytes + lane % 8 * 128, turn = lane % 8, half = lane / 8 % 2;
#pragma unroll
        for (uint32_t k = 0; k < 4; k++) {
            uint32_t weights[BLOCKS][2], keep[2];
            load_p<IS_CUT>(tile, k, seen, end, weights, keep);
#pragma unroll
            for (uint32_t f = 0; f < shape::columns; f++) {
                uint32_t column = warp * (D / 4) + f * 16, chunk = column % 64 / 8 + half, values[4];
                load_transposed(values,
                                data + k * 2 * shape::octet_bytes + column / 64 * SLAB_BYTES + row + (chunk ^ turn) * 16);
                add_columns<IS_CUT>(f, values, weights, keep);
            }
        }
    }

    /* The same of bytes, 32 keys at a time: a transposed matrix of pairs has 16 columns of 8 keys. */
    template <bool IS_CUT>
    __device__ __forceinline__ void multiply_byte_values(uint32_t data, uint32_t tile, int32_t seen, int32_t end)
    {
#pragma unroll
        for (uint32_t k = 0; k < 4; k += 2) {
            uint32_t weights[2][BLOCKS][2], keep[2][2];
            for (uint32_t b = 0; b < BLOCKS; b++) {
                uint32_t four[4];
                load_matrices(four, shared_address(p) + (b * 8 + lane % 8) * P_STRIDE + (tile * 4 + k) * 32 + lane / 8 * 16);
                for (uint32_t i = 0; i < 4; i++)
                    weights[i / 2][b][i % 2] = four[i];
            }
            for (uint32_t step = 0; step < 2; step++)
                mask_keys<IS_CUT>(tile, k + step, seen, end, keep[step]);
#pragma unroll
            for (uint32_t f = 0; f < shape::columns; f++) {
                const uint32_t chunk = kv_byte_chunk(D, lane % 8, warp * (D / 64) + f);
                uint32_t bytes[4];
                load_transposed(bytes, data + (k * 2 + lane / 8) * shape::octet_bytes + chunk);
#pragma unroll
                for (uint32_t step = 0; step < 2; step++) {
                    const uint2 low = widen_bytes(bytes[step * 2], W(), C());
                    const uint2 high = widen_bytes(bytes[step * 2 + 1], W(), C());
                    uint32_t values[4] = {low.x, low.y, high.x, high.y};
                    add_columns<IS_CUT>(f, values, weights[step], keep[step]);
                }
            }
        }
    }

    /* m, l, and o = the warp's columns of a split whose first chunk of values lies at `place`; keys outside [seen, end) are
     * zeros. */
    __device__ void add_values(struct decode_chunk place, uint32_t low, uint32_t high, int32_t seen, int32_t end)
    {
#pragma unroll
        for (uint32_t b = 0; b < BLOCKS; b++) {
            l[b][0] = l[b][1] = 0;
            m[b][0] = m[b][1] = MINUS_INFINITY;
            for (uint32_t f = 0; f < shape::columns; f++)
                for (uint32_t x = 0; x < 4; x++)
                    o[f][b][x] = 0;
        }
#pragma unroll 1
        for (uint32_t tile = low; tile < high; tile++) {
            float factor[BLOCKS][2];
#pragma unroll
            for (uint32_t i = 0; i < BLOCKS * 2; i++) {
                const uint32_t b = i / 2, e = i % 2, at = tile * shape::heads + b * 8 + t * 2 + e;
                factor[b][e] = tile_factor[at];
                m[b][e] = tile_most[at];
                l[b][e] = fmaf(factor[b][e], l[b][e], tile_sum[at]);
            }
            uint32_t data = ring.data + place.slot * shape::chunk_bytes;
            wait_for(place);
            if (!has_bytes && tile == newest) {
                if (lane < D / 32)
                    put_newest(data, value, warp * (D / 32) + lane);
                shared_written();
                __syncwarp();
            }
            if ((int32_t)(tile * TILE) < seen || (int32_t)(tile * TILE + TILE) > end)
                add_tile<true>(data, tile, factor, seen, end);
            else
                add_tile<false>(data, tile, factor, seen, end);
            barrier_arrive(ring.empty + place.slot * 8, 1);
            place = place.after(1, ring.depth);
        }
    }

    /* m, l and o of a split whose first chunk lies at `place`. */
    __device__ void split(struct decode_chunk place, uint32_t low, uint32_t high, int32_t seen, int32_t end)
    {
        find_lane();
#pragma unroll
        for (uint32_t i = 0; i < BLOCKS * 16; i++) /* also where they are not used, or they would be kept from split to split */
            s[i % 4][i / 16][i / 4 % 4] = 0;
        for (uint32_t i = 0; i < 8; i++)
            value_scales[i / 2][i % 2] = 0;
        if (warp >= low && warp < high)
            score(place.after(warp - low, ring.depth), seen - (int32_t)(warp * TILE), end - (int32_t)(warp * TILE));
        meet(1 + group, DECODE_WORKERS);
        find_lane();
        if (warp >= low && warp < high)
            soften(low);
        meet(1 + group, DECODE_WORKERS);
        find_lane();
        add_values(place.after(high - low, ring.depth), low, high, seen, end);
    }

    /* Passes a split's sums from a thread of the second group to a thread of the first. */
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

#endif
