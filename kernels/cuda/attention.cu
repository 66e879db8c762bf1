/* attention: out = softmax(scale q k^T) v of the batch's rows over the paged cache, causal, with window or chunk, soft cap,
 * slopes and sinks. Shapes: q, out [n_rows][n_heads * head_dim] in the type of activations; pages as kv.cuh lays them, in any
 * float type.
 *
 * Order of the sums, from positions alone: keys in tiles of 64 at absolute positions, ascending, four tiles a split of 256 with
 * fresh (m, l, O). Per tile s = chain of fused multiply-adds over d, u = s scale log2 e (with a soft cap: cap log2 e tanh(s
 * scale / cap)); with a slope u = fma(slope log2 e, j - i, u)), m' = max(m, max u), p = 2^(u - m'), a = 2^(m - m'), O = a O
 * then the chain of p v over the visible keys, l = a l + a fixed tree of the 64 p. Splits are folded left, 0, 1, 2, ...: M' =
 * max(M, m), O = O 2^(M - M') + O_split 2^(m - M'), l alike; out = O / l, with a sink O / (l + 2^(sink log2 e - M)). A hidden
 * key is neither read nor multiplied.
 *
 * A block is one head of one row: 64 threads score a tile's keys, then all threads own columns of O. Plain: every head of a
 * group reads the same keys again, from the caches. */
#include "attention_decode.cuh"
#include "attention_few.cuh"
#include "attention_prefill.cuh"

#define THREADS 128u
#define MAX_DIM 256u
#define COLUMNS (MAX_DIM / THREADS)

struct visible {
    uint32_t first, last; /* keys seen by the row */
};

/* One online softmax over some keys: O by thread, the same m and l in all. */
struct soft {
    float m, l, o[COLUMNS];
};

struct scoring {
    float scale, softcap, slope; /* the head's, times log2 e */
};

#define LOG2_E 1.44269504f

/* distance: from the row to the key, at most 0. */
static __device__ __forceinline__ float score_of(float s, struct scoring how, int32_t distance)
{
    s = s * how.scale;
    if (how.softcap > 0)
        s = how.softcap * tanhf(s / how.softcap);
    s = s * LOG2_E;
    return how.slope != 0 ? fmaf(how.slope, (float)distance, s) : s;
}

/* p[0..64) of a tile into shared memory; the state's m and l move on. Returns the factor of O. */
template <class C>
static __device__ float score_tile(const cache<C> &kv, uint32_t seq, uint32_t head, uint32_t tile, struct visible seen,
                                   struct scoring how, const float *q, float *p, float *tree, struct soft *state)
{
    uint32_t t = threadIdx.x, position = tile + t;
    if (t < TILE) {
        float u = -INFINITY;
        if (position >= seen.first && position <= seen.last) {
            const C *key = kv.key(seq, position, head);
            float s = 0;
            for (uint32_t d = 0; d < kv.head_dim; d++)
                s = fmaf(q[d], to_float(key[d]), s);
            u = score_of(s, how, (int32_t)(position - seen.last));
        }
        p[t] = tree[t] = u;
    }
    __syncthreads();
    for (uint32_t half = TILE / 2; half; half /= 2) {
        if (t < half)
            tree[t] = fmaxf(tree[t], tree[t + half]);
        __syncthreads();
    }
    float m = fmaxf(state->m, tree[0]), factor = state->m == m ? 1.0f : exp2f(state->m - m);
    __syncthreads();
    if (t < TILE) {
        float u = p[t];
        p[t] = tree[t] = u == -INFINITY ? 0.0f : u == m ? 1.0f : exp2f(u - m);
    }
    __syncthreads();
    for (uint32_t half = TILE / 2; half; half /= 2) {
        if (t < half)
            tree[t] = tree[t] + tree[t + half];
        __syncthreads();
    }
    state->m = m;
    state->l = fmaf(factor, state->l, tree[0]);
    return factor;
}

template <class C>
static __device__ void add_values(const cache<C> &kv, uint32_t seq, uint32_t head, uint32_t tile, struct visible seen,
                                  const float *p, float factor, struct soft *state)
{
    uint32_t first = tile < seen.first ? seen.first - tile : 0, last = seen.last - tile < TILE ? seen.last - tile : TILE - 1;
    for (uint32_t c = 0; c < COLUMNS; c++)
        state->o[c] *= factor;
    for (uint32_t j = first; j <= last; j++) {
        const C *value = kv.key(seq, tile + j, head) + kv.values();
        for (uint32_t c = 0, d = threadIdx.x; c < COLUMNS && d < kv.head_dim; c++, d += THREADS)
            state->o[c] = fmaf(p[j], to_float(value[d]), state->o[c]);
    }
}

static __device__ void fold_soft(struct soft *sum, const struct soft *split)
{
    float m = fmaxf(sum->m, split->m), before = sum->m == m ? 1.0f : exp2f(sum->m - m);
    float now = split->m == m ? 1.0f : exp2f(split->m - m);
    sum->l = sum->l * before + split->l * now;
    for (uint32_t c = 0; c < COLUMNS; c++)
        sum->o[c] = sum->o[c] * before + split->o[c] * now;
    sum->m = m;
}

template <class T, class C>
static __global__ void __launch_bounds__(THREADS)
attend_rows(rows<T> q, rows<T> out, cache<C> kv, const int32_t *positions, const int32_t *row_seq, uint32_t group,
            uint32_t window, uint32_t chunk, const float *slopes, const float *sinks, struct scoring how)
{
    __shared__ float shared_q[MAX_DIM], p[TILE], tree[TILE];
    start_next();
    wait_for_input();
    uint32_t r = blockIdx.x, h = blockIdx.y, head = h / group, seq = (uint32_t)row_seq[r];
    struct visible seen = {0, (uint32_t)positions[r]};
    if (chunk)
        seen.first = seen.last - seen.last % chunk;
    else if (window && seen.last >= window)
        seen.first = seen.last - window + 1;
    how.slope = slopes ? slopes[h] * LOG2_E : 0;
    for (uint32_t d = threadIdx.x; d < kv.head_dim; d += THREADS)
        shared_q[d] = to_float(*q.at(r, h * kv.head_dim + d));
    __syncthreads();
    struct soft sum = {-INFINITY, 0, {}}, split = sum;
    for (uint32_t tile = seen.first / TILE * TILE; tile <= seen.last; tile += TILE) {
        float factor = score_tile(kv, seq, head, tile, seen, how, shared_q, p, tree, &split);
        add_values(kv, seq, head, tile, seen, p, factor, &split);
        __syncthreads();
        if ((tile + TILE) % SPLIT == 0 || tile + TILE > seen.last) {
            fold_soft(&sum, &split);
            split = {-INFINITY, 0, {}};
        }
    }
    if (sinks)
        sum.l += exp2f(fmaf(sinks[h], LOG2_E, -sum.m));
    for (uint32_t c = 0, d = threadIdx.x; c < COLUMNS && d < kv.head_dim; c++, d += THREADS)
        *out.at(r, h * kv.head_dim + d) = round_to<T>(sum.o[c] / sum.l + 0.0f); /* as on the CPU, no zero is negative */
}

/* ---- which kernel ------------------------------------------------------------------------------------------------------- */

static void attend_plain(const struct cuda *cuda, const struct attention_args *args)
{
    const struct batch_view *batch = args->batch;
    struct scoring how = {args->scale, args->softcap, 0};
    visit_type(cuda->dtype, [&](auto value) {
        visit_type(args->kv.dtype, [&](auto cached) {
            using T = decltype(value);
            using C = decltype(cached);
            launch(cuda, attend_rows<T, C>, dim3(batch->n_rows, args->n_heads), THREADS, 0, rows<T>(args->q),
                   rows<T>(args->out), cache<C>(args->kv, batch->block_tokens), batch->positions, batch->row_seq,
                   args->n_heads / args->kv.n_kv_heads, args->window, args->chunk, args->slopes, args->sinks, how);
        });
    });
}

/* Sequences with one row, then those with several: two kernels with equal bits. */
template <class T, uint32_t D, bool HAS_EXTRAS>
static enum rc attend_tiled(const struct cuda *cuda, const struct attention_args *args, struct err *err)
{
    const uint32_t n_single = count_single(args->batch);
    if (args->batch->n_rows > n_single)
        launch_prefill<T, D, HAS_EXTRAS>(cuda, args);
    if (!n_single)
        return RC_OK;
    if constexpr (D <= 128)
        if (is_few(cuda, args, n_single)) {
            launch_few<T, D, HAS_EXTRAS>(cuda, args);
            return RC_OK;
        }
    return args->n_heads / args->kv.n_kv_heads <= 8 ? launch_decode<T, D, 1, HAS_EXTRAS>(cuda, args, n_single, err)
                                                    : launch_decode<T, D, 2, HAS_EXTRAS>(cuda, args, n_single, err);
}

template <class T, uint32_t D>
static enum rc attend_size(const struct cuda *cuda, const struct attention_args *args, struct err *err)
{
    return args->slopes || args->sinks ? attend_tiled<T, D, true>(cuda, args, err) : attend_tiled<T, D, false>(cuda, args, err);
}

template <class T> static enum rc attend_type(const struct cuda *cuda, const struct attention_args *args, struct err *err)
{
    switch (args->kv.head_dim) {
    case 64:
        return attend_size<T, 64>(cuda, args, err);
    case 128:
        return attend_size<T, 128>(cuda, args, err);
    default:
        return attend_size<T, 256>(cuda, args, err);
    }
}

/* By the kernels that the cache's layout and the batch allow. */
static enum rc attend(const struct cuda *cuda, const struct attention_args *args, struct err *err)
{
    if (!kv_is_tiled(cuda, args->kv.dtype, args->kv.head_dim)) {
        attend_plain(cuda, args);
        return RC_OK;
    }
    if (!(args->scale > 0))
        return err_set(err, RC_UNSUPPORTED, "attention: wanted a scale above 0, have %g", (double)args->scale);
    if ((uintptr_t)args->q.data % 16 || args->q.stride % 8 || (uintptr_t)args->out.data % 4 || args->out.stride % 2)
        return err_set(err, RC_UNSUPPORTED, "attention: wanted q on multiples of 16 bytes and out on 4, have strides %u and %u",
                       args->q.stride, args->out.stride);
    return cuda->dtype == DTYPE_BF16 ? attend_type<__nv_bfloat16>(cuda, args, err) : attend_type<__half>(cuda, args, err);
}

/* Does attend_decode do what qkv would? Few sequences are bound by latency, and a launch less is most of it. */
static bool takes_heads(const struct cuda *cuda, const struct attention_args *args)
{
    const struct batch_view *batch = args->batch;
    const bool is_single = batch->n_seqs == batch->n_rows && count_single(batch) == batch->n_rows;
    return is_single && batch->n_rows <= FEW_SEQS && !batch->shares_new_keys && args->n_heads / args->kv.n_kv_heads <= 8 &&
           kv_is_tiled(cuda, args->kv.dtype, args->kv.head_dim) && heads_fit(cuda, args->heads);
}

enum rc cuda_attention(void *ctx, const struct attention_args *args, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    struct attention_args own = *args;
    enum rc rc = RC_OK;
    if (!args->batch->n_rows)
        return RC_OK;
    if (args->heads && !takes_heads(cuda, args)) {
        rc = cuda_qkv(ctx, args->heads, err);
        own.heads = NULL;
    }
    if (!rc)
        rc = attend(cuda, &own, err);
    return rc ? rc : launched(err, "attention");
}
