/* attention: out = softmax(scale q k^T) v of the batch's rows over the paged cache, causal but for spans of rows that see each
 * other, with window or chunk, soft cap, slopes and sinks. Shapes: q, out [n_rows][n_heads * head_dim] in the type of
 * activations; pages as kv.cuh lays them, in any float type, e4m3 or int8. With int8 q and p are multiplied by the integers: s
 * is then multiplied by its key's scale, and in the chain of O p by its value's.
 *
 * Order of the sums, from positions alone: keys in tiles of 64 at absolute positions, ascending, four tiles a split of 256 with
 * fresh (m, l, O). Per tile s = chain of fused multiply-adds over d, u = s scale log2 e (with a soft cap: cap log2 e tanh(s
 * scale / cap)); with a slope u = fma(slope log2 e, j - i, u)), m' = max(m, max u), p = 2^(u - m'), a = 2^(m - m'), O = a O
 * then the chain of p v over the visible keys, l = a l + a fixed tree of the 64 p. Splits are folded left, 0, 1, 2, ...: M' =
 * max(M, m), O = O 2^(M - M') + O_split 2^(m - M'), l alike; out = O / l, with a sink O / (l + 2^(sink log2 e - M)). A hidden
 * key is neither read nor multiplied.
 *
 * In the plain kernel a block is one head of one row: 64 threads score a tile's keys, then all threads own columns of O. Every
 * head of a group reads the same keys again, from the caches. */
#include "../core/launch.cuh"
#include "../core/ways.cuh"
#include "attention_bytes.cuh"
#include "attention_decode.cuh"
#include "attention_few.cuh"
#include "attention_prefill.cuh"
#include "attention_sync.h"

#include <type_traits>

#define THREADS 128u
#define MAX_DIM 256u
#define COLUMNS (MAX_DIM / THREADS)

struct visible {
    uint32_t first, last, position; /* keys seen by the row, and its own */
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
template <enum kv_layout L, class C>
static __device__ float score_tile(const cache<C> &kv, uint32_t seq, uint32_t head, uint32_t tile, struct visible seen,
                                   struct scoring how, const float *q, float *p, float *tree, struct soft *state)
{
    uint32_t t = threadIdx.x, position = tile + t;
    if (t < TILE) {
        float u = -INFINITY;
        if (position >= seen.first && position <= seen.last) {
            char *page = kv.page_of(seq, position);
            float s = 0;
            for (uint32_t d = 0; d < kv.head_dim; d++)
                s = fmaf(q[d], to_float(*kv.template one_in<L>(page, position, head, d)), s);
            if constexpr (std::is_same_v<C, int8_t>)
                s = s * *kv.scale_in(page, position, head);
            u = score_of(s, how, (int32_t)(position - seen.position));
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

template <enum kv_layout L, class C>
static __device__ void add_values(const cache<C> &kv, uint32_t seq, uint32_t head, uint32_t tile, struct visible seen,
                                  const float *p, float factor, struct soft *state)
{
    uint32_t first = tile < seen.first ? seen.first - tile : 0, last = seen.last - tile < TILE ? seen.last - tile : TILE - 1;
    const size_t values = L == KV_PLAIN ? kv.values() : kv.tiled_values();
    for (uint32_t c = 0; c < COLUMNS; c++)
        state->o[c] *= factor;
    for (uint32_t j = first; j <= last; j++) {
        char *page = kv.page_of(seq, tile + j);
        float weight = p[j];
        if constexpr (std::is_same_v<C, int8_t>)
            weight = weight * kv.scale_in(page, tile + j, head)[kv.scales()];
        for (uint32_t c = 0, d = threadIdx.x; c < COLUMNS && d < kv.head_dim; c++, d += THREADS)
            state->o[c] = fmaf(weight, to_float(kv.template one_in<L>(page, tile + j, head, d)[values]), state->o[c]);
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

template <class T, class C, enum kv_layout L>
static __global__ void __launch_bounds__(THREADS)
attention_plain(rows<T> q, rows<T> out, cache<C> kv, const int32_t *positions, const int32_t *row_seq, uint32_t group,
                uint32_t window, uint32_t chunk, const float *slopes, const float *sinks, const int32_t *visible_end,
                struct scoring how)
{
    __shared__ float shared_q[MAX_DIM], p[TILE], tree[TILE];
    start_next();
    wait_for_input();
    uint32_t r = blockIdx.x, h = blockIdx.y, head = h / group, seq = (uint32_t)row_seq[r];
    struct visible seen = {0, visible_end ? (uint32_t)visible_end[r] - 1 : (uint32_t)positions[r], (uint32_t)positions[r]};
    if (chunk)
        seen.first = seen.position - seen.position % chunk;
    else if (window && seen.position >= window)
        seen.first = seen.position - window + 1;
    how.slope = slopes ? slopes[h] * LOG2_E : 0;
    for (uint32_t d = threadIdx.x; d < kv.head_dim; d += THREADS)
        shared_q[d] = to_float(*q.at(r, h * kv.head_dim + d));
    __syncthreads();
    struct soft sum = {-INFINITY, 0, {}}, split = sum;
    for (uint32_t tile = seen.first / TILE * TILE; tile <= seen.last; tile += TILE) {
        float factor = score_tile<L>(kv, seq, head, tile, seen, how, shared_q, p, tree, &split);
        add_values<L>(kv, seq, head, tile, seen, p, factor, &split);
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

/* ---- the ways ------------------------------------------------------------------------------------------------------------ */

/* Sequences by their rows in the step. */
enum attention_sequences { ONE_ROW = 1, SEVERAL_ROWS = 2, ALL_SEQS = 3 };
/* Features of a call beside causal keys or a window. QKV: the call wants qkv's work, too. */
enum attention_use { QKV = 1, SOFTCAP = 2, SLOPES = 4, SINKS = 8, CHUNK = 16, SPANS = 32, SCORES = 62 };

struct attention_problem {
    struct cuda *cuda;
    const struct attention_args *args;
    enum kv_layout pages;
    uint32_t group, n_single; /* query heads of a kv head; sequences with one row, unless pages are plain */
    uint32_t uses, left;      /* enum attention_use; enum attention_sequences that have no way yet */
    attention_problem(struct cuda *c, const struct attention_args *a)
        : cuda(c), args(a), pages(kv_layout_of(c, a->kv.dtype, a->kv.head_dim)),
          group(a->n_heads / a->kv.n_kv_heads), n_single(pages == KV_PLAIN ? 0 : count_single(a->batch)), left(ALL_SEQS)
    {
        uses = (a->heads ? QKV : 0) | (a->softcap ? SOFTCAP : 0) | (a->slopes ? SLOPES : 0) | (a->sinks ? SINKS : 0) |
               (a->chunk ? CHUNK : 0) | (a->visible_end ? SPANS : 0);
        if (pages != KV_PLAIN)
            left = (n_single ? ONE_ROW : 0) | (n_single < a->batch->n_rows ? SEVERAL_ROWS : 0);
    }
};

struct attention_way {
    const char *name;
    uint32_t devices;          /* enum way_devices */
    uint32_t sequences, pages; /* that it takes, or-ed; pages: enum kv_layout */
    uint32_t head_dim, group;  /* that it takes at most */
    uint32_t uses;             /* that it takes, or-ed */
    bool (*fits)(const struct attention_problem &p); /* a further condition, or NULL */
    enum rc (*run)(const struct attention_problem &p, struct err *err);
};

static bool takes(const struct attention_way &way, const struct attention_problem &p)
{
    return way.sequences & p.left && way.pages & p.pages && p.args->kv.head_dim <= way.head_dim && p.group <= way.group &&
           !(p.uses & ~way.uses) && (p.uses & QKV) == (way.uses & QKV) && (!way.fits || way.fits(p));
}

/* Can the kernels for one row a sequence do qkv's work, too? That saves a launch, which is most of the latency that bounds few
 * sequences. */
static bool fits_qkv(const struct attention_problem &p)
{
    const struct batch_view *batch = p.args->batch;
    return batch->n_seqs == batch->n_rows && p.n_single == batch->n_rows && batch->n_rows <= FEW_SEQS &&
           !batch->shares_new_keys && heads_fit(p.cuda, p.args->heads);
}

static bool fits_few(const struct attention_problem &p)
{
    return fits_qkv(p) && few_fits(p.cuda, p.args);
}

/* Calls f with a value of the type of activations, the size of heads, and whether there are slopes, sinks or spans; the last
 * two are types with a constant `value`. */
template <class F> static enum rc visit_tiled(const struct attention_problem &p, F f)
{
    auto with_size = [&](auto value, auto size) {
        return p.uses & (SLOPES | SINKS | SPANS) ? f(value, size, std::true_type()) : f(value, size, std::false_type());
    };
    return visit_heads(p.cuda, p.args, with_size);
}

static enum rc run_few(const struct attention_problem &p, struct err *)
{
    return visit_tiled(p, [&](auto value, auto size, auto has_extras) {
        if constexpr (size.value <= FEW_MAX_DIM)
            launch_few<decltype(value), size.value, has_extras.value>(p.cuda, p.args);
        return RC_OK;
    });
}

static enum rc run_prefill(const struct attention_problem &p, struct err *)
{
    return visit_tiled(p, [&](auto value, auto size, auto has_extras) {
        using T = decltype(value);
        launch_prefill<T, T, size.value, has_extras.value>(p.cuda, p.args, [&](auto &, auto &, uint32_t) {
            return prefill_wide{0, p.args->kv.n_kv_heads, NULL, NULL, 0};
        });
        return RC_OK;
    });
}

template <uint32_t BLOCKS> static enum rc run_decode(const struct attention_problem &p, struct err *err)
{
    return visit_tiled(p, [&](auto value, auto size, auto has_extras) {
        using T = decltype(value);
        return launch_decode<T, T, size.value, BLOCKS, has_extras.value>(p.cuda, p.args, p.n_single, err);
    });
}

static enum rc run_sync_prefill(const struct attention_problem &p, struct err *)
{
    attend_sync_prefill(p.cuda, p.args);
    return RC_OK;
}

static enum rc run_sync_decode(const struct attention_problem &p, struct err *err)
{
    return attend_sync_decode(p.cuda, p.args, p.n_single, err);
}

static enum rc run_prefill_bytes(const struct attention_problem &p, struct err *)
{
    (p.args->kv.dtype == DTYPE_I8 ? attend_prefill_int8 : attend_prefill_e4m3)(p.cuda, p.args);
    return RC_OK;
}

static enum rc run_decode_bytes(const struct attention_problem &p, struct err *err)
{
    return (p.args->kv.dtype == DTYPE_I8 ? attend_decode_int8 : attend_decode_e4m3)(p.cuda, p.args, p.n_single, err);
}

/* Calls f with a value of the type of pages that lie so, for activations of a type. */
template <enum kv_layout L, class T, class F> static void visit_pages(uint32_t dtype, T, F f)
{
    if constexpr (L == KV_PLAIN)
        visit_cached(dtype, f);
    else if constexpr (sizeof(T) == 2)
        f(__nv_fp8_e4m3());
}

/* All sequences, whatever rows they have. */
template <enum kv_layout L> static enum rc run_plain(const struct attention_problem &p, struct err *)
{
    const struct attention_args *args = p.args;
    const struct batch_view *batch = args->batch;
    struct scoring how = {args->scale, args->softcap, 0};
    visit_type(p.cuda->dtype, [&](auto value) {
        visit_pages<L>(args->kv.dtype, value, [&](auto cached) {
            using T = decltype(value);
            using C = decltype(cached);
            launch(p.cuda, attention_plain<T, C, L>, dim3(batch->n_rows, args->n_heads), THREADS, 0, rows<T>(args->q),
                   rows<T>(args->out), cache<C>(args->kv, batch->block_tokens), batch->positions, batch->row_seq, p.group,
                   args->window, args->chunk, args->slopes, args->sinks, args->visible_end, how);
        });
    });
    return RC_OK;
}

#define ANY_GROUP UINT32_MAX
/* Sequences with several rows are served first. */
static const struct attention_way ATTENTION_WAYS[] = {
    /* name           devices   sequences     pages     head_dim     group      uses          fits      run */
    {"few",           SM_90A,   ONE_ROW,      KV_TILED, FEW_MAX_DIM, 8,         QKV | SINKS,  fits_few, run_few},
    {"decode_qkv",    SM_90A,   ONE_ROW,      KV_TILED, MAX_DIM,     8,         QKV | SCORES, fits_qkv, run_decode<1>},
    {"prefill",       SM_90A,   SEVERAL_ROWS, KV_TILED, MAX_DIM,     ANY_GROUP, SCORES,       NULL,     run_prefill},
    {"decode",        SM_90A,   ONE_ROW,      KV_TILED, MAX_DIM,     8,         SCORES,       NULL,     run_decode<1>},
    {"decode_wide",   SM_90A,   ONE_ROW,      KV_TILED, MAX_DIM,     ANY_GROUP, SCORES,       NULL,     run_decode<2>},
    {"prefill_bytes", SM_90A,   SEVERAL_ROWS, KV_BYTES, MAX_DIM,     ANY_GROUP, SCORES,       NULL,     run_prefill_bytes},
    {"decode_bytes",  SM_90A,   ONE_ROW,      KV_BYTES, MAX_DIM,     ANY_GROUP, SCORES,       NULL,     run_decode_bytes},
    {"sync_prefill",  ANY_GPU,  SEVERAL_ROWS, KV_TILED, MAX_DIM,     ANY_GROUP, SCORES,       NULL,     run_sync_prefill},
    {"sync_decode",   ANY_GPU,  ONE_ROW,      KV_TILED, MAX_DIM,     ANY_GROUP, SCORES,       NULL,     run_sync_decode},
    {"plain_bytes",   PORTABLE, ALL_SEQS,     KV_BYTES, MAX_DIM,     ANY_GROUP, SCORES,       NULL,     run_plain<KV_BYTES>},
    {"plain",         ANY_GPU,  ALL_SEQS,     KV_PLAIN, MAX_DIM,     ANY_GROUP, SCORES,       NULL,     run_plain<KV_PLAIN>},
};

struct way_name cuda_attention_way(uint32_t row)
{
    return name_of_way(ATTENTION_WAYS, row);
}

/* ---- the call ------------------------------------------------------------------------------------------------------------ */

static enum rc check(const struct attention_problem &p, struct err *err)
{
    const struct attention_args *args = p.args;
    if (p.pages == KV_PLAIN)
        return RC_OK;
    if (!(args->scale > 0))
        return err_set(err, RC_UNSUPPORTED, "attention: wanted a scale above 0, have %g", (double)args->scale);
    if ((uintptr_t)args->q.data % 16 || args->q.stride % 8 || (uintptr_t)args->out.data % 4 || args->out.stride % 2)
        return err_set(err, RC_UNSUPPORTED, "attention: wanted q on multiples of 16 bytes and out on 4, have strides %u and %u",
                       args->q.stride, args->out.stride);
    return RC_OK;
}

static const struct attention_way *way_of(const struct attention_problem &p)
{
    return find_way<WAYS_ATTENTION>(p.cuda, ATTENTION_WAYS, p);
}

/* Each of the batch's kinds of sequences by the first way that takes it. */
static enum rc attend(struct attention_problem &p, const struct attention_way *way, struct err *err)
{
    enum rc rc = check(p, err);
    while (!rc && p.left) {
        if (!way)
            return err_set(err, RC_INTERNAL, "attention: wanted a way for heads of %u values, have none", p.args->kv.head_dim);
        rc = way->run(p, err);
        p.left &= ~way->sequences;
        way = way_of(p);
    }
    return rc;
}

enum rc cuda_attention(void *ctx, const struct attention_args *args, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    struct attention_args own = *args;
    enum rc rc = RC_OK;
    if (!args->batch->n_rows)
        return RC_OK;
    struct attention_problem problem(cuda, &own);
    const struct attention_way *way = way_of(problem);
    if (!way && own.heads) { /* no way does qkv's work */
        rc = cuda_qkv(ctx, own.heads, err);
        own.heads = NULL;
        problem.uses &= ~QKV;
        way = way_of(problem);
    }
    rc = rc ? rc : attend(problem, way, err);
    return rc ? rc : launched(err, "attention");
}
