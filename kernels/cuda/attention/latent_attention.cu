/* Multi-head latent attention, absorbed, over the paged cache: out[h] = softmax(scale (q_h . c_j + q'_h . k_j)) of c, causal,
 * where a token's latent c and its rope key k are one run of values that all heads share.
 * Shapes: q, out [n_rows][n_heads * latent] in the type of activations; pages [token][latent + rope] in any float type.
 *
 * Order of the sums as in attention.cu's plain kernel, from positions alone: tiles of 64 keys, four a split of 256 with
 * fresh (m, l, O); s = chain of fused multiply-adds over the latent, then over the rope key, u = s scale log2 e, m' = max(m,
 * max u), p = 2^(u - m'), O = O 2^(m - m') then the chain of p c over the visible keys, l alike by a fixed tree of the 64 p;
 * splits folded left; out = O / l. A hidden token is neither read nor multiplied.
 *
 * A block is up to 16 heads of one row: a tile's tokens go to shared memory as float32, once for its heads; then a thread
 * scores one key for four heads, and adds two columns of O for all. Where a tile does not fit shared memory, 16 tokens are
 * there at a time, to be scored and again to be added; a thread then scores one key for one head. Bound by the loads from
 * shared memory, some 6 us a tile on an SM of an H200: 16 heads and 1,024 keys are 0.1 ms for up to 132 rows.
 *
 * For latents of 512 with rope keys of 64 in the 16-bit type of activations, as in all DeepSeek models, the kernels are in
 * latent_attention_tiles.cuh. */
#include "../core/launch.cuh"
#include "latent_attention_tiles.cuh"

#define THREADS 256u
#define HEADS 16u
#define COLUMNS 2u /* of a thread */
#define MAX_LATENT (COLUMNS * THREADS)

template <class T, class C> static __global__ void __launch_bounds__(THREADS) latent_attention_store(const latents<T, C> x)
{
    start_next();
    wait_for_input();
    const uint32_t r = blockIdx.x;
    C *to = x.token((uint32_t)x.row_seq[r], (uint32_t)x.positions[r]);
    for (uint32_t d = threadIdx.x; d < x.dim; d += THREADS)
        to[d] = round_to<C>(to_float(d < x.n_latent ? *x.latent.at(r, d) : *x.rope_key.at(r, d - x.n_latent)));
}

#define FEW_TOKENS 16u /* in shared memory, where a tile does not fit */

/* Shared memory: tokens [STAGED][dim + 1], queries [dim][HEADS], then p [TILE][HEADS], the heads' factors and sums. */
struct latent_shared {
    float *tokens, *q, *p, *factors, *sums;
    uint32_t stride;
    __device__ latent_shared(float *base, uint32_t dim) : stride(dim + 1)
    {
        q = base;
        p = q + dim * HEADS;
        factors = p + TILE * HEADS;
        sums = factors + 2 * HEADS;
        tokens = sums + HEADS;
    }
};

static size_t shared_bytes(uint32_t dim, uint32_t n_staged)
{
    return ((size_t)n_staged * (dim + 1) + (size_t)dim * HEADS + TILE * HEADS + 3 * HEADS) * sizeof(float);
}

/* O of a split and of all before it, [column][head], and for the warp's two heads m and l of both. */
struct latent_sums {
    float o[COLUMNS][HEADS], all[COLUMNS][HEADS], m[2], l[2], all_m[2], all_l[2];
    __device__ void begin_split(void)
    {
        for (uint32_t e = 0; e < 2; e++) {
            m[e] = -INFINITY;
            l[e] = 0;
        }
#pragma unroll
        for (uint32_t i = 0; i < COLUMNS * HEADS; i++)
            o[i / HEADS][i % HEADS] = 0;
    }
};

/* The tokens first, first + 1, ... of a tile, as many as are staged and seen. */
template <uint32_t STAGED, class T, class C>
static __device__ void stage_tokens(const latent_shared &at, const latents<T, C> &x, uint32_t seq, uint32_t tile,
                                    uint32_t first, uint32_t n)
{
    for (uint32_t j = threadIdx.x / 32; j < STAGED && first + j < n; j += THREADS / 32) {
        const C *from = x.token(seq, tile + first + j);
        for (uint32_t d = threadIdx.x % 32; d < x.dim; d += 32)
            at.tokens[j * at.stride + d] = to_float(from[d]);
    }
    __syncthreads();
}

/* u of the keys from `first` on of a tile, of which the first n are seen, for the block's heads: a thread has one key and some
 * heads. */
template <uint32_t STAGED>
static __device__ void score_keys(const latent_shared &at, uint32_t dim, uint32_t first, uint32_t n, float factor)
{
    constexpr uint32_t n_own = HEADS * STAGED / THREADS;
    const uint32_t staged = threadIdx.x % STAGED, key = first + staged, head = threadIdx.x / STAGED * n_own;
    const float *token = at.tokens + staged * at.stride;
    float s[n_own] = {};
    if (key < n)
        for (uint32_t d = 0; d < dim; d++) {
            const float k = token[d];
            float q[n_own];
            if constexpr (n_own == 4)
                *(float4 *)q = *(const float4 *)(at.q + d * HEADS + head);
            else
                q[0] = at.q[d * HEADS + head];
#pragma unroll
            for (uint32_t i = 0; i < n_own; i++)
                s[i] = fmaf(q[i], k, s[i]);
        }
    for (uint32_t i = 0; i < n_own; i++)
        at.p[key * HEADS + head + i] = key < n ? s[i] * factor : -INFINITY;
    __syncthreads();
}

/* u becomes p, by a warp for its two heads; m and l move on, and the factor of O goes to all. */
static __device__ void soften_keys(const latent_shared &at, latent_sums *sum)
{
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (uint32_t e = 0; e < 2; e++) {
        const uint32_t head = warp * 2 + e;
        float *low = at.p + lane * HEADS + head, *high = low + 32 * HEADS, most = fmaxf(*low, *high);
        for (uint32_t apart = 16; apart; apart /= 2)
            most = fmaxf(most, __shfl_xor_sync(~0u, most, apart));
        const float m = fmaxf(sum->m[e], most), a = sum->m[e] == m ? 1.0f : exp2f(sum->m[e] - m);
        *low = *low == m ? 1.0f : exp2f(*low - m);
        *high = *high == m ? 1.0f : exp2f(*high - m);
        float total = *low + *high;
        for (uint32_t apart = 16; apart; apart /= 2)
            total += __shfl_xor_sync(~0u, total, apart);
        sum->l[e] = fmaf(a, sum->l[e], total);
        sum->m[e] = m;
        if (lane == 0)
            at.factors[head] = a;
    }
}

static __device__ void scale_sums(const latent_shared &at, latent_sums *sum)
{
#pragma unroll
    for (uint32_t i = 0; i < COLUMNS * HEADS; i++)
        sum->o[i / HEADS][i % HEADS] *= at.factors[i % HEADS];
}

/* The n staged tokens, whose first is the tile's token `first`. */
static __device__ void add_tokens(const latent_shared &at, uint32_t n_latent, uint32_t first, uint32_t n, latent_sums *sum)
{
    for (uint32_t j = 0; j < n; j++) {
        float p[HEADS];
#pragma unroll
        for (uint32_t h = 0; h < HEADS; h += 4)
            *(float4 *)(p + h) = *(const float4 *)(at.p + (first + j) * HEADS + h);
#pragma unroll
        for (uint32_t c = 0; c < COLUMNS; c++) {
            const uint32_t column = threadIdx.x + c * THREADS;
            const float value = column < n_latent ? at.tokens[j * at.stride + column] : 0.0f;
#pragma unroll
            for (uint32_t h = 0; h < HEADS; h++)
                sum->o[c][h] = fmaf(p[h], value, sum->o[c][h]);
        }
    }
}

/* Folds the split into the splits before it; all threads call it. */
static __device__ void fold_latents(const latent_shared &at, latent_sums *sum)
{
    const uint32_t warp = threadIdx.x / 32;
    for (uint32_t e = 0; e < 2; e++) {
        const float m = fmaxf(sum->all_m[e], sum->m[e]), before = sum->all_m[e] == m ? 1.0f : exp2f(sum->all_m[e] - m);
        const float now = sum->m[e] == m ? 1.0f : exp2f(sum->m[e] - m);
        sum->all_l[e] = sum->all_l[e] * before + sum->l[e] * now;
        sum->all_m[e] = m;
        if (threadIdx.x % 32 == 0) {
            at.factors[warp * 2 + e] = before;
            at.factors[HEADS + warp * 2 + e] = now;
            at.sums[warp * 2 + e] = sum->all_l[e];
        }
    }
    __syncthreads();
#pragma unroll
    for (uint32_t i = 0; i < COLUMNS * HEADS; i++) {
        const uint32_t c = i / HEADS, h = i % HEADS;
        sum->all[c][h] = sum->all[c][h] * at.factors[h] + sum->o[c][h] * at.factors[HEADS + h];
    }
    __syncthreads();
}

template <class T, class C, uint32_t STAGED>
static __global__ void __launch_bounds__(THREADS, 1) latent_attention_plain(const latents<T, C> x)
{
    extern __shared__ __align__(16) float floats[];
    const latent_shared at(floats, x.dim);
    const uint32_t r = blockIdx.x, first_head = blockIdx.y * HEADS, n_heads = min(HEADS, x.n_heads - first_head);
    const uint32_t n_rope = x.dim - x.n_latent, part = x.q_rope.width / x.n_heads;
    start_next();
    wait_for_input();
    const uint32_t seq = (uint32_t)x.row_seq[r], n_keys = (uint32_t)x.positions[r] + 1;
    for (uint32_t i = threadIdx.x; i < x.dim * HEADS; i += THREADS) {
        const uint32_t h = i / x.dim, d = i % x.dim, head = first_head + h;
        float value = 0;
        if (h < n_heads)
            value = to_float(d < x.n_latent ? *x.q.at(r, head * x.n_latent + d)
                                            : *x.q_rope.at(r, (head + 1) * part - n_rope + d - x.n_latent));
        at.q[d * HEADS + h] = value;
    }
    latent_sums sum = {};
    for (uint32_t e = 0; e < 2; e++)
        sum.all_m[e] = -INFINITY;
    sum.begin_split();
    for (uint32_t tile = 0; tile < n_keys; tile += TILE) {
        const uint32_t n = min(TILE, n_keys - tile);
        for (uint32_t first = 0; first < TILE; first += STAGED) {
            stage_tokens<STAGED>(at, x, seq, tile, first, n);
            score_keys<STAGED>(at, x.dim, first, n, x.factor);
        }
        soften_keys(at, &sum);
        __syncthreads();
        scale_sums(at, &sum);
        for (uint32_t first = 0; first < n; first += STAGED) {
            if (STAGED < TILE)
                stage_tokens<STAGED>(at, x, seq, tile, first, n);
            add_tokens(at, x.n_latent, first, min(STAGED, n - first), &sum);
            __syncthreads();
        }
        if ((tile + TILE) % SPLIT == 0 || tile + TILE >= n_keys) {
            fold_latents(at, &sum);
            sum.begin_split();
        }
    }
#pragma unroll
    for (uint32_t i = 0; i < COLUMNS * HEADS; i++) {
        const uint32_t column = threadIdx.x + i / HEADS * THREADS, h = i % HEADS;
        if (column < x.n_latent && h < n_heads)
            *x.out.at(r, (first_head + h) * x.n_latent + column) =
                round_to<T>(sum.all[i / HEADS][h] / at.sums[h] + 0.0f); /* as on the CPU, no zero is negative */
    }
}

static void attend_plain(const struct cuda *cuda, const struct latent_attention_args *args)
{
    const uint32_t n_rows = args->batch->n_rows;
    visit_type(cuda->dtype, [&](auto value) {
        visit_type(args->kv.dtype, [&](auto cached) {
            using T = decltype(value);
            using C = decltype(cached);
            const latents<T, C> x(*args);
            const bool is_whole = shared_bytes(x.dim, TILE) <= cuda->shared_bytes;
            const auto kernel = is_whole ? latent_attention_plain<T, C, TILE> : latent_attention_plain<T, C, FEW_TOKENS>;
            launch(cuda, latent_attention_store<T, C>, n_rows, THREADS, 0, x);
            allow_shared(kernel, cuda->shared_bytes);
            launch(cuda, kernel, dim3(n_rows, ceil_div(args->n_heads, HEADS)), THREADS,
                   shared_bytes(x.dim, is_whole ? TILE : FEW_TOKENS), x);
        });
    });
}

enum rc cuda_latent_attention(void *ctx, const struct latent_attention_args *args, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    const uint32_t latent = args->latent.width, dim = latent + args->rope_key.width;
    enum rc rc = RC_OK;
    if (!args->batch->n_rows)
        return RC_OK;
    if (latent > MAX_LATENT || shared_bytes(dim, TILE) > SHARED_BYTES || dim != args->kv.head_dim || args->kv.n_kv_heads)
        return err_set(err, RC_UNSUPPORTED,
                       "latent_attention: wanted latents of at most %u values and rope keys of at most 128, have %u + %u",
                       MAX_LATENT, latent, args->rope_key.width);
    if (!latents_are_tiled(cuda, args))
        attend_plain(cuda, args);
    else
        rc = cuda->dtype == DTYPE_BF16 ? attend_latent_tiles<__nv_bfloat16>(cuda, args, err)
                                       : attend_latent_tiles<__half>(cuda, args, err);
    return rc ? rc : launched(err, "latent_attention");
}
