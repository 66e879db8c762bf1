/* tile_store.cuh: copies to several blocks of a cluster, and the store of a tile's sums from registers to memory, for
 * linear_gemm.cuh and experts_grouped.cuh. A thread's sums are those of wgmma.cuh. */
#ifndef LLMPY_CUDA_TILE_STORE_CUH
#define LLMPY_CUDA_TILE_STORE_CUH

#include "../core/cluster.cuh"
#include "../core/wgmma.cuh"
#include "activation.cuh"
#include "linear.cuh"

/* ---- clusters that fetch for each other ---------------------------------------------------------------------------------- */

/* The box at (row, block), into the same place of every block of the mask. */
static __device__ __forceinline__ void copy_box_to(uint32_t mask, uint32_t target, const CUtensorMap *map, uint32_t row,
                                                   uint32_t block, uint32_t barrier, uint64_t policy)
{
    if (mask & (mask - 1))
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                     ".L2::cache_hint [%0],[%1,{%2,%3,%4}],[%5],%6,%7;" ::"r"(target),
                     "l"(map), "r"(0), "r"(row), "r"(block), "r"(barrier), "h"((uint16_t)mask), "l"(policy)
                     : "memory");
    else
        copy_box(target, map, row, block, barrier, policy);
}

/* Likewise the box of pairs of eight rows. */
static __device__ __forceinline__ void copy_pairs_to(uint32_t mask, uint32_t target, const CUtensorMap *map, uint32_t pair,
                                                     uint32_t block, uint32_t barrier, uint64_t policy)
{
    if (mask & (mask - 1))
        asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                     ".L2::cache_hint [%0],[%1,{%2,%2,%2,%3,%4}],[%5],%6,%7;" ::"r"(target),
                     "l"(map), "r"(0), "r"(pair), "r"(block), "r"(barrier), "h"((uint16_t)mask), "l"(policy)
                     : "memory");
    else
        copy_pairs(target, map, pair, block, barrier, policy);
}

static __device__ __forceinline__ uint64_t policy_keep(void)
{
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_normal.b64 %0,1.0;" : "=l"(policy));
    return policy;
}

/* ---- the results --------------------------------------------------------------------------------------------------------- */

template <class T> static __device__ __forceinline__ uint32_t add_pairs(uint32_t a, uint32_t b)
{
    const T *x = (const T *)&a, *y = (const T *)&b;
    return pack(to_float(x[0]) + to_float(y[0]), to_float(x[1]) + to_float(y[1]), T());
}

/* A warp's piece of shared memory for results: 16 rows of a small tile, or of 64 or 32 of its columns at a time. */
static constexpr __host__ __device__ uint32_t gemm_chunk(uint32_t width)
{
    return width <= 128 ? width : width % 64 ? 48 : 64;
}
/* No two of eight rows share banks: an odd number of 16 bytes. */
static constexpr __host__ __device__ uint32_t gemm_pitch(uint32_t width)
{
    return (gemm_chunk(width) / 8 | 1) * 16;
}

template <uint32_t N>
static __device__ __forceinline__ void add_bias(float (&sum)[N], const struct output &out, bool is_product, uint32_t first)
{
#pragma unroll
    for (uint32_t i = 0; i < N; i += 4) {
        uint32_t eight = first / 8 + i / 4, n = (is_product ? eight / 2 : eight) * 8 + threadIdx.x % 4 * 2;
        const float *bias = is_product && eight % 2 ? out.bias + out.n_out : out.bias;
        float low = n < out.n_out ? bias[n] : 0, high = n + 1 < out.n_out ? bias[n + 1] : 0;
        sum[i] += low;
        sum[i + 1] += high;
        sum[i + 2] += low;
        sum[i + 3] += high;
    }
}

/* Adds what adapters add to a warp's 16 rows from row on. */
template <uint32_t N>
static __device__ __forceinline__ void add_delta(float (&sum)[N], const struct output &out, bool is_product, uint32_t row,
                                                 uint32_t first)
{
    const uint32_t r = row + threadIdx.x % 32 / 4;
    const bool has_pairs = out.n_out % 2 == 0 && out.delta_stride % 2 == 0;
    const float *rows[2] = {out.delta + (size_t)r * out.delta_stride, out.delta + (size_t)(r + 8) * out.delta_stride};
#pragma unroll
    for (uint32_t i = 0; i < N; i += 2) {
        const uint32_t eight = first / 8 + i / 4, n = (is_product ? eight / 2 : eight) * 8 + threadIdx.x % 4 * 2;
        const float *from = rows[i / 2 % 2] + (is_product && eight % 2 ? n + out.n_out : n);
        if (r + i / 2 % 2 * 8 >= out.n_rows || n >= out.n_out)
            continue;
        const float2 both = has_pairs ? *(const float2 *)from : make_float2(from[0], n + 1 < out.n_out ? from[1] : 0);
        sum[i] += both.x;
        sum[i + 1] += both.y;
    }
}

/* A warp's 16 rows from row on, columns from first on, as they are. */
template <uint32_t N>
static __device__ __forceinline__ void store_floats(const float (&sum)[N], const struct output &out, bool is_wide, uint32_t row,
                                                    uint32_t first)
{
    uint32_t r = row + threadIdx.x % 32 / 4, n = first + threadIdx.x % 4 * 2;
    float *low = (float *)out.y + (size_t)r * out.y_stride + n, *high = low + (size_t)8 * out.y_stride;
    int n_columns = n < out.n_out ? (int)(out.n_out - n) : 0;
    int n_low = r < out.n_rows ? n_columns : 0, n_high = r + 8 < out.n_rows ? n_columns : 0;
#pragma unroll
    for (int i = 0; i < (int)N; i += 2) {
        float *y = (i / 2 % 2 ? high : low) + i / 4 * 8;
        int left = (i / 2 % 2 ? n_high : n_low) - i / 4 * 8;
        if (is_wide && left > 0)
            *(float2 *)y = make_float2(sum[i], sum[i + 1]);
        if (!is_wide && left > 0)
            y[0] = sum[i];
        if (!is_wide && left > 1)
            y[1] = sum[i + 1];
    }
}

/* act(gate) * up */
struct act_product {
    uint32_t act;
    __device__ __forceinline__ bool is_common() const { return act == ACT_SILU; }
    __device__ __forceinline__ float common(float gate, float up) const { return act_value(gate, ACT_SILU) * up; }
    __device__ __forceinline__ float operator()(float gate, float up) const { return act_value(gate, act) * up; }
};

template <class T, class F> static __device__ __forceinline__ uint32_t multiply_pairs(uint32_t gate, uint32_t up, F product)
{
    const T *g = (const T *)&gate, *u = (const T *)&up;
    return pack(product(to_float(g[0]), to_float(u[0])), product(to_float(g[1]), to_float(u[1])), T());
}

/* The products of eight rounded sums each; the common one without a choice inside. */
template <class T, class F> static __device__ __forceinline__ uint4 multiply_eight(uint4 gate, uint4 up, const F &product)
{
    if (product.is_common()) {
        auto common = [&](float g, float u) { return product.common(g, u); };
        return make_uint4(multiply_pairs<T>(gate.x, up.x, common), multiply_pairs<T>(gate.y, up.y, common),
                          multiply_pairs<T>(gate.z, up.z, common), multiply_pairs<T>(gate.w, up.w, common));
    }
#pragma unroll 1
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t both = multiply_pairs<T>(gate.x, up.x, product);
        gate = make_uint4(gate.y, gate.z, gate.w, both);
        up = make_uint4(up.y, up.z, up.w, 0);
    }
    return gate;
}

static __device__ __forceinline__ uint4 load_shared(uint32_t address)
{
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3},[%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

/* Eight rounded sums. */
template <class T>
static __device__ __forceinline__ void store_eight(const struct output &out, bool is_wide, uint32_t r, uint32_t n, uint4 v)
{
    T *y = (T *)out.y + (size_t)r * out.y_stride + n;
    const T *add = out.add ? (const T *)out.add + (size_t)r * out.add_stride + n : NULL;
    if (is_wide) {
        if (add) {
            uint4 other = *(const uint4 *)add;
            v = make_uint4(add_pairs<T>(v.x, other.x), add_pairs<T>(v.y, other.y), add_pairs<T>(v.z, other.z),
                           add_pairs<T>(v.w, other.w));
        }
        *(uint4 *)y = v;
#pragma unroll 1
        for (uint32_t i = 0; i < out.n_mirrors; i++)
            *(uint4 *)((char *)y + out.mirrors[i]) = v;
        return;
    }
    uint64_t low = (uint64_t)v.y << 32 | v.x, high = (uint64_t)v.w << 32 | v.z;
#pragma unroll 1
    for (uint32_t i = 0; i < 8 && n + i < out.n_out; i++) {
        uint16_t bits = (uint16_t)((i < 4 ? low : high) >> i % 4 * 16);
        T value = *(const T *)&bits;
        y[i] = add ? round_to<T>(to_float(value) + to_float(add[i])) : value;
    }
}

/* Rounds the sums and stores them through the warp's piece of shared memory, so that whole lines are written. Of gate and up
 * it stores the product. */
template <class T, uint32_t N, class F>
static __device__ __forceinline__ void store_lines(const float (&sum)[N], const struct output &out, bool is_product,
                                                   bool is_wide, const F &product, uint32_t row, uint32_t first,
                                                   uint32_t piece)
{
    const uint32_t width = 2 * N, chunk = gemm_chunk(width), pitch = gemm_pitch(width);
    uint32_t lane = threadIdx.x % 32, corner = piece + lane % 16 * pitch + lane / 16 * 16;
#pragma unroll
    for (uint32_t c = 0; c < width; c += chunk) {
        const uint32_t n_vectors = (width - c < chunk ? width - c : chunk) / 8;
#pragma unroll
        for (uint32_t i = 0; i < n_vectors; i += 2) {
            const float *v = sum + c / 2 + i * 4;
            uint32_t low = pack(v[0], v[1], T()), high = pack(v[2], v[3], T());
            if (i + 1 < n_vectors)
                asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0],{%1,%2,%3,%4};" ::"r"(corner + 16 * i), "r"(low),
                             "r"(high), "r"(pack(v[4], v[5], T())), "r"(pack(v[6], v[7], T()))
                             : "memory");
            else
                asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0],{%1,%2};" ::"r"(corner + 16 * i), "r"(low),
                             "r"(high)
                             : "memory");
        }
        __syncwarp();
#pragma unroll 1
        for (uint32_t i = lane; i < 16 * (n_vectors >> is_product); i += 32) {
            uint32_t r = is_product ? i / (n_vectors / 2) : i / n_vectors;
            uint32_t v = is_product ? i % (n_vectors / 2) : i % n_vectors;
            uint32_t from = piece + r * pitch + (v << is_product) * 16, n = ((first + c) >> is_product) + v * 8;
            uint4 value = load_shared(from);
            if (is_product)
                value = multiply_eight<T>(value, load_shared(from + 16), product);
            if (row + r < out.n_rows && n < out.n_out)
                store_eight<T>(out, is_wide, row + r, n, value);
        }
        __syncwarp();
    }
}

#endif
