/* rope_table   table[r][i] = {m cos(a), m sin(a)}, a = (float)positions[r] * inv_freq[i], a product of float32; frequencies
 *              may have positions of their own axes
 * rope         pairs (x, y) of every head become (x cos - y sin, y cos + x sin), in place, each product and sum rounded in
 *              float32 and the result once more to the type of activations
 * kv_write     stores keys and values of every row in their pages, rounded to the pages' type; in int8 x becomes x / scale,
 *              scale = max|x| / 127 of the head's key or value, and a NaN if one of them is not finite
 * qkv          per-head rms_norm of q and k, rope and kv_write in one launch, with the roundings of the separate operations;
 *              q is changed in place, k and v go to the pages
 * All are bound by bytes: qkv of 8,192 rows of 48 heads of 128 values reads 101 MB and writes them again, 47 us at 4.3 TB/s. */
#include "../core/launch.cuh"
#include "heads.cuh"
#include "kv.cuh"

#include <type_traits>

#define THREADS 128u
#define SHARED_ROWS 128u /* from here on a thread of qkv takes several heads of its row, for more bytes in flight */
#define MANY_HEADS 3u

static __global__ void rope_table(struct rope_table_args args)
{
    start_next();
    wait_for_input();
    uint32_t r = blockIdx.x;
    for (uint32_t i = threadIdx.x; i < args.n_freqs; i += THREADS) {
        size_t at = (args.axes ? (size_t)args.axes[i] * args.axis_stride : 0) + r;
        float angle = (float)args.positions[at] * args.inv_freq[i], *to = args.table + 2 * ((size_t)r * args.n_freqs + i);
        to[0] = args.magnitude * cosf(angle);
        to[1] = args.magnitude * sinf(angle);
    }
}

enum rc cuda_rope_table(void *ctx, const struct rope_table_args *args, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    if (!args->n_rows)
        return RC_OK;
    launch(cuda, rope_table, args->n_rows, THREADS, 0, *args);
    return launched(err, "rope_table");
}

template <class T>
static __global__ void rope_heads(rows<T> x, const float *table, uint32_t n_freqs, uint32_t head_dim, uint32_t skipped,
                                  bool interleaved)
{
    start_next();
    wait_for_input();
    uint32_t r = blockIdx.x;
    T *head = x.at(r, blockIdx.y * head_dim + skipped);
    for (uint32_t i = threadIdx.x; i < n_freqs; i += THREADS) {
        const float *turn = table + 2 * ((size_t)r * n_freqs + i);
        T *first = head + (interleaved ? 2 * i : i), *second = head + (interleaved ? 2 * i + 1 : i + n_freqs);
        float a = to_float(*first), b = to_float(*second);
        *first = round_to<T>(a * turn[0] - b * turn[1]);
        *second = round_to<T>(b * turn[0] + a * turn[1]);
    }
}

enum rc cuda_rope(void *ctx, const struct rope_args *args, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    if (!args->n_rows || !args->n_freqs)
        return RC_OK;
    const struct view *views[2] = {&args->q, &args->k};
    const uint32_t sizes[2] = {args->head_dim, args->k_head_dim ? args->k_head_dim : args->head_dim};
    for (uint32_t i = 0; i < 2; i++)
        visit_type(cuda->dtype, [&](auto value) {
            using T = decltype(value);
            dim3 grid(args->n_rows, views[i]->width / sizes[i]);
            launch(cuda, rope_heads<T>, grid, THREADS, 0, rows<T>(*views[i]), args->table, args->n_freqs, sizes[i],
                   args->is_tail ? sizes[i] - 2 * args->n_freqs : 0, args->interleaved);
        });
    return launched(err, "rope");
}

template <class T, class C>
static __global__ void kv_write_rows(rows<T> k, rows<T> v, cache<C> kv, const int32_t *positions, const int32_t *row_seq)
{
    start_next();
    uint32_t r = blockIdx.x, head = blockIdx.y;
    C *key = kv.key((uint32_t)row_seq[r], (uint32_t)positions[r], head), *value = key + kv.values();
    wait_for_input();
    for (uint32_t d = threadIdx.x; d < kv.head_dim; d += THREADS) {
        key[d] = round_to<C>(to_float(*k.at(r, head * kv.head_dim + d)));
        value[d] = round_to<C>(to_float(*v.at(r, head * kv.head_dim + d)));
    }
}

static __device__ __forceinline__ int8_t sign_and_magnitude(int8_t x)
{
    return (int8_t)(x < 0 ? 0x80 | -x : x);
}

/* The scale in int8 of values of which the largest magnitude has these bits. In bits infinities and NaN are largest. */
static __device__ __forceinline__ float scale_of(uint32_t most)
{
    return most < 0x7f800000u ? __uint_as_float(most) / 127.0f : __uint_as_float(0x7fc00000u);
}

/* The scale of a head's key or value in int8, by all threads of the block. */
template <class T> static __device__ float int8_scale(const T *x, uint32_t n)
{
    uint32_t most = 0;
    for (uint32_t d = threadIdx.x; d < n; d += THREADS)
        most = max(most, __float_as_uint(fabsf(to_float(x[d]))));
    most = block_reduce(most, [](uint32_t a, uint32_t b) { return max(a, b); });
    return scale_of(most);
}

template <class T>
static __global__ void kv_write_int8(rows<T> k, rows<T> v, cache<int8_t> kv, bool is_bytes, const int32_t *positions,
                                     const int32_t *row_seq)
{
    start_next();
    uint32_t r = blockIdx.x, head = blockIdx.y, position = (uint32_t)positions[r];
    char *page = kv.page_of((uint32_t)row_seq[r], position);
    wait_for_input();
    for (uint32_t i = 0; i < 2; i++) {
        const T *x = (i ? v : k).at(r, head * kv.head_dim);
        int8_t *to = kv.key_in(page, position, head) + i * kv.values();
        const float scale = int8_scale(x, kv.head_dim), divisor = scale > 0 ? scale : 1;
        for (uint32_t d = threadIdx.x; d < kv.head_dim; d += THREADS) {
            const int8_t rounded = round_to<int8_t>(to_float(x[d]) / divisor);
            if (is_bytes)
                kv.bytes_in(page, position, head, d / 8)[i * kv.tiled_values() + d % 8 * 2] = sign_and_magnitude(rounded);
            else
                to[d] = rounded;
        }
        if (threadIdx.x == 0 && is_bytes)
            kv.scales_in(page, head)[i * kv.block_tokens + (position & (kv.block_tokens - 1))] = scale;
        else if (threadIdx.x == 0)
            kv.scale_in(page, position, head)[i * kv.scales()] = scale;
    }
}

/* Pages in the layouts tiled and bytes. In e4m3 a NaN in a head's key or value makes all of the key NaN. */
template <class T, class C>
static __global__ void kv_write_tiles(rows<T> k, rows<T> v, cache<C> kv, const int32_t *positions, const int32_t *row_seq)
{
    start_next();
    uint32_t r = blockIdx.x, head = blockIdx.y, position = (uint32_t)positions[r];
    char *page = kv.page_of((uint32_t)row_seq[r], position);
    wait_for_input();
    bool has_nan = false;
    for (uint32_t d = threadIdx.x; d < kv.head_dim && !std::is_same_v<C, T>; d += THREADS)
        has_nan |= isnan(to_float(*k.at(r, head * kv.head_dim + d))) || isnan(to_float(*v.at(r, head * kv.head_dim + d)));
    if (!std::is_same_v<C, T>)
        has_nan = __syncthreads_or(has_nan);
    for (uint32_t d = threadIdx.x; d < kv.head_dim; d += THREADS) {
        C *key = std::is_same_v<C, T> ? kv.tiled_in(page, position, head, d / 8) + d % 8
                                      : kv.bytes_in(page, position, head, d / 8) + d % 8 * 2;
        *key = round_to<C>(has_nan ? NAN : to_float(*k.at(r, head * kv.head_dim + d)));
        key[kv.tiled_values()] = round_to<C>(to_float(*v.at(r, head * kv.head_dim + d)));
    }
}

enum rc cuda_kv_write(void *ctx, const struct kv_write_args *args, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    const struct batch_view *batch = args->batch;
    if (!batch->n_rows)
        return RC_OK;
    dim3 grid(batch->n_rows, args->kv.n_kv_heads);
    const enum kv_layout layout = kv_layout_of(cuda, args->kv.dtype, args->kv.head_dim);
    visit_type(cuda->dtype, [&](auto value) {
        using T = decltype(value);
        auto write_tiles = [&](auto cached) {
            using C = decltype(cached);
            launch(cuda, kv_write_tiles<T, C>, grid, THREADS, 0, rows<T>(args->k), rows<T>(args->v),
                   cache<C>(args->kv, batch->block_tokens), batch->positions, batch->row_seq);
        };
        if (layout == KV_TILED)
            write_tiles(value);
        else if (layout == KV_BYTES && args->kv.dtype == DTYPE_FP8)
            write_tiles(__nv_fp8_e4m3());
        else
            visit_cached(args->kv.dtype, [&](auto cached) {
                using C = decltype(cached);
                if constexpr (std::is_same_v<C, int8_t>)
                    launch(cuda, kv_write_int8<T>, grid, THREADS, 0, rows<T>(args->k), rows<T>(args->v),
                           cache<C>(args->kv, batch->block_tokens), layout == KV_BYTES, batch->positions, batch->row_seq);
                else
                    launch(cuda, kv_write_rows<T, C>, grid, THREADS, 0, rows<T>(args->k), rows<T>(args->v),
                           cache<C>(args->kv, batch->block_tokens), batch->positions, batch->row_seq);
            });
    });
    return launched(err, "kv_write");
}

/* ---- all of it ----------------------------------------------------------------------------------------------------------- */

/* Stores values from 8 * c on of a position's key, or of its value. */
template <class T>
static __device__ __forceinline__ void store_eight(const cache<T> &kv, char *page, bool is_tiled, uint32_t position,
                                                   uint32_t head, uint32_t c, bool is_value, float, const eight<T> &values)
{
    T *key = is_tiled ? kv.tiled_in(page, position, head, c) : kv.key_in(page, position, head) + c * 8;
    *(eight<T> *)(key + (!is_value ? 0 : is_tiled ? kv.tiled_values() : kv.values())) = values;
}

template <class T>
static __device__ __forceinline__ void store_eight(const cache<__nv_fp8_e4m3> &kv, char *page, bool, uint32_t position,
                                                   uint32_t head, uint32_t c, bool is_value, float mark, const eight<T> &values)
{
    __nv_fp8_e4m3 *to = kv.bytes_in(page, position, head, c) + (is_value ? kv.tiled_values() : 0);
    for (uint32_t i = 0; i < 8; i++)
        to[i * 2] = round_to<__nv_fp8_e4m3>(mark != 0 ? mark : to_float(values.values[i]));
}

template <class T>
static __device__ __forceinline__ void store_eight(const cache<int8_t> &kv, char *page, bool, uint32_t position, uint32_t head,
                                                   uint32_t c, bool is_value, float scale, const eight<T> &values)
{
    int8_t *to = kv.bytes_in(page, position, head, c) + (is_value ? kv.tiled_values() : 0);
    const float divisor = scale > 0 ? scale : 1;
    for (uint32_t i = 0; i < 8; i++)
        to[i * 2] = sign_and_magnitude(round_to<int8_t>(to_float(values.values[i]) / divisor));
    if (c == 0)
        kv.scales_in(page, head)[(is_value ? kv.block_tokens : 0) + (position & (kv.block_tokens - 1))] = scale;
}

template <class T> static __device__ __forceinline__ bool any_nan(const eight<T> &values)
{
    bool is_nan = false;
    for (uint32_t i = 0; i < 8; i++)
        is_nan |= isnan(to_float(values.values[i]));
    return is_nan;
}

/* What all lanes of a head must know to store it: of 16 bits nothing; of a key in e4m3 a NaN if a lane has one, there or in the
 * value beside; of int8 the scale. */
template <uint32_t LANES, class T> static __device__ __forceinline__ float mark_of(const eight<T> &, bool, bool, T)
{
    return 0;
}

template <uint32_t LANES, class T>
static __device__ __forceinline__ float mark_of(const eight<T> &values, bool is_key, bool has_nan_beside, __nv_fp8_e4m3)
{
    const uint32_t found = __ballot_sync(~0u, is_key && (has_nan_beside || any_nan(values)));
    return found >> threadIdx.x % 32 / LANES * LANES & (~0u >> (32 - LANES)) ? NAN : 0;
}

template <uint32_t LANES, class T>
static __device__ __forceinline__ float mark_of(const eight<T> &values, bool, bool, int8_t)
{
    uint32_t most = 0;
    for (uint32_t i = 0; i < 8; i++)
        most = max(most, __float_as_uint(fabsf(to_float(values.values[i]))));
    for (uint32_t apart = 1; apart < LANES; apart *= 2)
        most = max(most, __shfl_xor_sync(~0u, most, apart));
    return scale_of(most);
}

/* A group of LANES lanes, 8 values each, takes HEADS heads of a row, all read before the first is turned. */
template <class T, class C, uint32_t LANES, uint32_t HEADS>
static __global__ void __launch_bounds__(THREADS)
qkv_heads(struct qkv_rows<T> x, cache<C> kv, bool is_tiled, const int32_t *positions, const int32_t *row_seq)
{
    start_next();
    const uint32_t groups = THREADS / LANES, lane = threadIdx.x % LANES, first = lane * 8, dim = kv.head_dim, r = blockIdx.x;
    const uint32_t n_q = x.q.width / dim, n_k = n_q + kv.n_kv_heads, seq = (uint32_t)row_seq[r];
    const uint32_t position = (uint32_t)positions[r], head0 = blockIdx.y * groups * HEADS + threadIdx.x / LANES;
    const bool is_mine = first < dim;
    float weights[2][8]; /* of q, of k */
    for (uint32_t i = 0; i < 8; i++) {
        weights[0][i] = is_mine && x.q_norm ? x.q_norm[first + i] : 0;
        weights[1][i] = is_mine && x.k_norm ? x.k_norm[first + i] : 0;
    }
    char *page = kv.page_of(seq, position);
    wait_for_input();
    eight<T> values[HEADS];
    bool has_nan_beside[HEADS];
#pragma unroll
    for (uint32_t h = 0; h < HEADS; h++) {
        uint32_t head = head0 + h * groups;
        *(uint4 *)&values[h] = make_uint4(0, 0, 0, 0);
        if (is_mine && head < n_k + kv.n_kv_heads)
            values[h] = *(const eight<T> *)(head < n_q   ? x.q.at(r, head * dim + first)
                                            : head < n_k ? x.k.at(r, (head - n_q) * dim + first)
                                                         : x.v.at(r, (head - n_k) * dim + first));
        has_nan_beside[h] = false;
        if (std::is_same_v<C, __nv_fp8_e4m3> && is_mine && head >= n_q && head < n_k)
            has_nan_beside[h] = any_nan(*(const eight<T> *)x.v.at(r, (head - n_q) * dim + first));
    }
    float2 turns[8];
    load_turns(x, r, first, turns);
#pragma unroll
    for (uint32_t h = 0; h < HEADS; h++) {
        uint32_t head = head0 + h * groups;
        bool is_q = head < n_q, is_k = !is_q && head < n_k;
        if (x.q_norm || x.k_norm) {
            const float *own = !x.norm_stride ? NULL : is_q ? x.q_norm : is_k ? x.k_norm : NULL;
            own += own ? (size_t)(is_q ? head : head - n_q) * x.norm_stride + first : 0;
            for (uint32_t i = 0; i < 8 && own && is_mine; i++)
                weights[!is_q][i] = own[i];
            eight<T> normed = values[h];
            norm_eight<LANES>(&normed, is_q ? weights[0] : weights[1], dim, x.eps);
            if (is_q ? x.q_norm != NULL : is_k && x.k_norm)
                values[h] = normed;
        }
        if (x.table) {
            eight<T> turned = values[h];
            turn_eight<LANES>(&turned, turns, x.n_freqs, x.interleaved);
            if (is_q || is_k)
                values[h] = turned;
        }
        const float mark = mark_of<LANES>(values[h], is_k, has_nan_beside[h], C());
        if (!is_mine || head >= n_k + kv.n_kv_heads)
            continue;
        if (is_q)
            *(eight<T> *)x.q.at(r, head * dim + first) = values[h];
        else
            store_eight(kv, page, is_tiled, position, head - (is_k ? n_q : n_k), lane, !is_k, mark, values[h]);
    }
}

static enum rc prepare_composed(void *ctx, const struct qkv_args *args, struct err *err)
{
    const struct rope_args *rope = &args->rope;
    uint32_t n_rows = args->write.batch->n_rows, head_dim = args->write.kv.head_dim;
    struct rms_norm_args q = {n_rows, rope->q.width / head_dim, rope->q, rope->q, args->q_norm, args->eps, args->norm_stride};
    struct rms_norm_args k = {n_rows, rope->k.width / head_dim, rope->k, rope->k, args->k_norm, args->eps, args->norm_stride};
    enum rc rc = args->q_norm ? cuda_rms_norm(ctx, &q, err) : RC_OK;
    if (!rc && args->k_norm)
        rc = cuda_rms_norm(ctx, &k, err);
    if (!rc && rope->table)
        rc = cuda_rope(ctx, rope, err);
    return rc ? rc : cuda_kv_write(ctx, &args->write, err);
}

template <class T, class C, uint32_t LANES> static void launch_prepare(const struct cuda *cuda, const struct qkv_args *args)
{
    const struct batch_view *batch = args->write.batch;
    const struct kv_view *kv = &args->write.kv;
    const struct rope_args *rope = &args->rope;
    uint32_t n_all = rope->q.width / kv->head_dim + 2 * kv->n_kv_heads, slices = ceil_div(n_all, THREADS / LANES);
    bool is_many = batch->n_rows >= SHARED_ROWS;
    launch(cuda, is_many ? qkv_heads<T, C, LANES, MANY_HEADS> : qkv_heads<T, C, LANES, 1>,
           dim3(batch->n_rows, is_many ? ceil_div(slices, MANY_HEADS) : slices), THREADS, 0, qkv_rows<T>(*args),
           cache<C>(*kv, batch->block_tokens), kv_layout_of(cuda, kv->dtype, kv->head_dim) == KV_TILED,
           batch->positions, batch->row_seq);
}

enum rc cuda_qkv(void *ctx, const struct qkv_args *args, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    if (!args->write.batch->n_rows)
        return RC_OK;
    if (!heads_fit(cuda, args))
        return prepare_composed(ctx, args, err);
    uint32_t eights = args->write.kv.head_dim / 8;
    auto prepare = [&](auto value, auto cached) {
        using T = decltype(value);
        using C = decltype(cached);
        if (eights <= 8)
            launch_prepare<T, C, 8>(cuda, args);
        else if (eights <= 16)
            launch_prepare<T, C, 16>(cuda, args);
        else
            launch_prepare<T, C, 32>(cuda, args);
    };
    auto prepare_for = [&](auto value) {
        if (args->write.kv.dtype == DTYPE_FP8)
            prepare(value, __nv_fp8_e4m3());
        else if (args->write.kv.dtype == DTYPE_I8)
            prepare(value, int8_t());
        else
            prepare(value, value);
    };
    if (cuda->dtype == DTYPE_BF16)
        prepare_for(__nv_bfloat16());
    else
        prepare_for(__half());
    return launched(err, "qkv");
}
