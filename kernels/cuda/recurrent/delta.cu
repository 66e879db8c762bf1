/* Gated delta rule, token by token; value head h with key head h / (n_heads / n_key_heads), key i, value column j, float32:
 *   k = k / sqrt(sum k^2 + 1e-6), q likewise times key_dim^-0.5, S = exp(-exp(a_log_h) softplus(a_h + dt_bias_h)) S,
 *   e_j = sigmoid(b_h) (v_j - sum over i of S_ij k_i), S_ij = S_ij + k_i e_j, out_j = sum over i of S_ij q_i, rounded once.
 * A unit of the state is [value_dim][key_dim]. A block has 32 columns of a head, 8 lanes 2 of them, of prompts 1, a lane the
 * keys 4 (lane + 8 n) .. + 4: a sum is a chain over these, n ascending, then pairwise over lanes 1, 2, 4 apart. One token or
 * thousands: the same operations in the same order, with the state in registers meanwhile.
 * One row a sequence is bound by the state, read and written: 256 sequences of 32 heads of 128 x 128 move 1.07 GB, 272 us at
 * the 3.94 TB/s of a copy. A prompt of one sequence is bound by the way through two dependent sums, some 250 cycles a token,
 * 1.2 ms for 8192; several sequences by operations, 4 for every value of the state. */
#include "../core/launch.cuh"
#include "../norm/head_norm.cuh"
#include "state.cuh"

#define THREADS 128u
#define LANES 8u
#define OWN 2u                        /* columns of a group of lanes in a step */
#define SLICE (THREADS / LANES * OWN) /* columns of a block */
#define SCAN_THREADS 256u             /* of a block with any rows: a group has one column */
#define AT_ONCE 4u                    /* tokens of a prompt whose sums are computed together */
#define MOST_QUADS 8u
#define MAX_KEY (4 * LANES * MOST_QUADS)

template <class T> struct delta_job {
    struct sequences batch;
    struct state_pool state;
    rows<T> q, k, v, a, b, out;
    const float *a_log, *dt_bias;
    uint32_t key_dim, value_dim, heads_a_key, n_slices;
    float q_scale;
};

/* The task of a block. */
struct place {
    uint32_t head, slice, key_column, first; /* first: of the lane's columns, in the head */
};

template <uint32_t N, class T> static __device__ __forceinline__ struct place place_of(const delta_job<T> &job)
{
    uint32_t head = blockIdx.x / job.n_slices, slice = blockIdx.x % job.n_slices;
    return {head, slice, head / job.heads_a_key * job.key_dim, slice * SLICE + threadIdx.x / LANES * N};
}

/* Adds the lane's part of the product of a column and a vector. */
static __device__ __forceinline__ float add_product(float sum, float4 s, float4 x)
{
    return fmaf(s.w, x.w, fmaf(s.z, x.z, fmaf(s.y, x.y, fmaf(s.x, x.x, sum))));
}

static __device__ __forceinline__ float4 add_scaled(float4 s, float4 k, float e)
{
    return make_float4(fmaf(k.x, e, s.x), fmaf(k.y, e, s.y), fmaf(k.z, e, s.z), fmaf(k.w, e, s.w));
}

/* One token; v: of the lane's columns. */
template <uint32_t N, uint32_t QUADS>
static __device__ __forceinline__ void advance(float4 (&s)[N][QUADS], const float *q, const float *k, const float *v,
                                               float decay, float beta, float *sums)
{
    float found[N] = {}, error[N];
    float4 keys[QUADS];
#pragma unroll
    for (uint32_t i = 0; i < QUADS; i++) {
        keys[i] = ((const float4 *)k)[threadIdx.x % LANES + LANES * i];
#pragma unroll
        for (uint32_t r = 0; r < N; r++) {
            s[r][i] = make_float4(decay * s[r][i].x, decay * s[r][i].y, decay * s[r][i].z, decay * s[r][i].w);
            found[r] = add_product(found[r], s[r][i], keys[i]);
        }
    }
#pragma unroll
    for (uint32_t r = 0; r < N; r++) {
        for (uint32_t apart = 1; apart < LANES; apart *= 2)
            found[r] = found[r] + __shfl_xor_sync(~0u, found[r], apart);
        error[r] = beta * (v[r] - found[r]);
        sums[r] = 0;
    }
#pragma unroll
    for (uint32_t i = 0; i < QUADS; i++) {
        float4 query = ((const float4 *)q)[threadIdx.x % LANES + LANES * i];
#pragma unroll
        for (uint32_t r = 0; r < N; r++) {
            s[r][i] = add_scaled(s[r][i], keys[i], error[r]);
            sums[r] = add_product(sums[r], s[r][i], query);
        }
    }
}

/* Eight values of q or k of a token, LANES lanes a token. */
template <uint32_t LANES_A_KEY> static __device__ __forceinline__ void normalise(float (&x)[8], float scale)
{
    float factor = scale / sqrtf(head_squares<LANES_A_KEY>(x) + 1e-6f);
    for (uint32_t i = 0; i < 8; i++)
        x[i] = x[i] * factor;
}

template <class T> static __device__ __forceinline__ float decay_of(const delta_job<T> &job, float a, float rate, float bias)
{
    return expf(rate * softplus(a + bias));
}

static __device__ __forceinline__ float sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

/* ---- one row a sequence -------------------------------------------------------------------------------------------------- */

template <class T, uint32_t QUADS, bool IS_ALIGNED>
static __global__ void __launch_bounds__(THREADS) delta_step(const delta_job<T> job)
{
    const uint32_t parts = LANES * QUADS / 2; /* eights of a key */
    __shared__ __align__(16) float vectors[2][4 * LANES * QUADS];
    float4 s[OWN][QUADS];
    start_next();
    const struct place at = place_of<OWN>(job);
    const uint32_t row = blockIdx.y, t = threadIdx.x;
    const struct span span = span_of(job.batch, row);
    float *unit = job.state.unit(span.seq, at.head);
    load_rows<IS_ALIGNED, LANES>(s, unit, at.first, job.value_dim, job.key_dim, span.is_new);
    float rate = -expf(job.a_log[at.head]), bias = job.dt_bias[at.head];
    wait_for_input();
    float x[8] = {}, v[OWN], sums[OWN];
    if (t / parts < 2)
        load_part<IS_ALIGNED>((t / parts ? job.k : job.q).at(row, at.key_column), t % parts * 8, job.key_dim, x);
    normalise<LANES * QUADS / 2>(x, t / parts ? 1.0f : job.q_scale);
    if (t / parts < 2)
        store_eight(&vectors[t / parts][t % parts * 8], x);
    for (uint32_t r = 0; r < OWN; r++)
        v[r] = at.first + r < job.value_dim ? to_float(*job.v.at(row, at.head * job.value_dim + at.first + r)) : 0.0f;
    float decay = decay_of(job, to_float(*job.a.at(row, at.head)), rate, bias);
    float beta = sigmoid(to_float(*job.b.at(row, at.head)));
    __syncthreads();
    advance(s, vectors[0], vectors[1], v, decay, beta, sums);
    float sum = group_sums<LANES>(sums);
    uint32_t column = at.first + sum_index<OWN>();
    if (t % LANES < OWN && column < job.value_dim)
        *job.out.at(row, at.head * job.value_dim + column) = round_to<T>(sum);
    store_rows<IS_ALIGNED, LANES>(s, unit, at.first, job.value_dim, job.key_dim);
}

/* ---- any rows ------------------------------------------------------------------------------------------------------------ */

/* The part of a chunk that a thread reads: eight values each of q, k and v, and a and b of a token. */
template <class T> struct inputs {
    eight<T> q, k, v;
    float a, b;
};

/* Inputs of some tokens; out takes the place of v. */
template <uint32_t QUADS> struct chunk {
    static const uint32_t TOKENS = 64 / QUADS, KEY_PARTS = LANES * QUADS / 2, PARTS = SLICE / 8;
    __align__(16) float q[TOKENS][4 * LANES * QUADS], k[TOKENS][4 * LANES * QUADS], v[TOKENS][SLICE];
    float decay[TOKENS], beta[TOKENS];
};

/* A thread's part in chunks: eight keys of one token, of the first threads eight columns of one, of some a token's scalars. */
template <uint32_t QUADS> struct part {
    uint32_t token, key, v_token, v_column, scalar_token;
    bool has_v, has_scalars;
    __device__ part(void)
        : token(threadIdx.x / chunk<QUADS>::KEY_PARTS), key(threadIdx.x % chunk<QUADS>::KEY_PARTS * 8),
          v_token(threadIdx.x / chunk<QUADS>::PARTS), v_column(threadIdx.x % chunk<QUADS>::PARTS * 8),
          scalar_token(threadIdx.x - SCAN_THREADS / 2), has_v(threadIdx.x < chunk<QUADS>::TOKENS * chunk<QUADS>::PARTS),
          has_scalars(scalar_token < chunk<QUADS>::TOKENS)
    {
    }
};

template <bool IS_ALIGNED, uint32_t QUADS, class T>
static __device__ __forceinline__ void read_inputs(struct inputs<T> &in, const delta_job<T> &job, const struct place &at,
                                                   const struct part<QUADS> &my, uint32_t row, uint32_t n)
{
    if (my.token < n) {
        in.q = part_of<IS_ALIGNED>(job.q.at(row + my.token, at.key_column), my.key, job.key_dim);
        in.k = part_of<IS_ALIGNED>(job.k.at(row + my.token, at.key_column), my.key, job.key_dim);
    }
    if (my.has_v && my.v_token < n)
        in.v = part_of<IS_ALIGNED>(job.v.at(row + my.v_token, at.head * job.value_dim), at.slice * SLICE + my.v_column,
                                   job.value_dim);
    if (my.has_scalars && my.scalar_token < n) {
        in.a = to_float(*job.a.at(row + my.scalar_token, at.head));
        in.b = to_float(*job.b.at(row + my.scalar_token, at.head));
    }
}

template <uint32_t QUADS, class T>
static __device__ __forceinline__ void stage_inputs(struct chunk<QUADS> &m, const struct inputs<T> &in, const delta_job<T> &job,
                                                    const struct part<QUADS> &my, float rate, float bias)
{
    float x[8];
    to_floats(in.q, x);
    normalise<chunk<QUADS>::KEY_PARTS>(x, job.q_scale);
    store_eight(&m.q[my.token][my.key], x);
    to_floats(in.k, x);
    normalise<chunk<QUADS>::KEY_PARTS>(x, 1.0f);
    store_eight(&m.k[my.token][my.key], x);
    if (my.has_v) {
        to_floats(in.v, x);
        store_eight(&m.v[my.v_token][my.v_column], x);
    }
    if (my.has_scalars) {
        m.decay[my.scalar_token] = decay_of(job, in.a, rate, bias);
        m.beta[my.scalar_token] = sigmoid(in.b);
    }
}

/* The thread's eight columns of a token, of n. */
template <bool IS_ALIGNED, uint32_t QUADS, class T>
static __device__ __forceinline__ void finish_outputs(const struct chunk<QUADS> &m, const delta_job<T> &job,
                                                      const struct place &at, const struct part<QUADS> &my, uint32_t row,
                                                      uint32_t n)
{
    if (!my.has_v || my.v_token >= n)
        return;
    float y[8];
#pragma unroll
    for (uint32_t i = 0; i < 8; i++)
        y[i] = m.v[my.v_token][my.v_column + i];
    store_part<IS_ALIGNED>(job.out.at(row + my.v_token, at.head * job.value_dim), at.slice * SLICE + my.v_column, job.value_dim,
                           y);
}

/* N tokens from `token` on; a lane ends one sum. */
template <uint32_t N, uint32_t QUADS>
static __device__ __forceinline__ void take_tokens(float4 (&s)[1][QUADS], struct chunk<QUADS> &m, uint32_t token)
{
    const uint32_t own = threadIdx.x / LANES;
    float sums[N];
#pragma unroll
    for (uint32_t i = 0; i < N; i++)
        advance(s, m.q[token + i], m.k[token + i], &m.v[token + i][own], m.decay[token + i], m.beta[token + i], sums + i);
    const float sum = group_sums<LANES>(sums);
    __syncwarp();
    if (threadIdx.x % LANES < N)
        m.v[token + sum_index<N>()][own] = sum;
}

template <class T, uint32_t QUADS, bool IS_ALIGNED>
static __global__ void __launch_bounds__(SCAN_THREADS, 2) delta_prompt(const delta_job<T> job)
{
    typedef chunk<QUADS> chunk;
    __shared__ chunk m[2];
    float4 s[1][QUADS];
    struct inputs<T> in = {};
    start_next();
    const struct place at = place_of<1>(job);
    const struct span span = span_of(job.batch, blockIdx.y);
    const struct part<QUADS> my;
    float *unit = job.state.unit(span.seq, at.head);
    load_rows<IS_ALIGNED, LANES>(s, unit, at.first, job.value_dim, job.key_dim, span.is_new);
    const float rate = -expf(job.a_log[at.head]), bias = job.dt_bias[at.head];
    wait_for_input();
    walk_chunks<chunk::TOKENS, AT_ONCE>(
        span.n,
        [&](uint32_t first) {
            if (first < span.n)
                read_inputs<IS_ALIGNED>(in, job, at, my, span.first + first, span.n - first);
        },
        [&](uint32_t place) { stage_inputs(m[place], in, job, my, rate, bias); },
        [&](uint32_t place, uint32_t token) { take_tokens<AT_ONCE>(s, m[place], token); },
        [&](uint32_t place, uint32_t token) { take_tokens<1>(s, m[place], token); },
        [&](uint32_t place, uint32_t first, uint32_t n) {
            finish_outputs<IS_ALIGNED>(m[place], job, at, my, span.first + first, n);
        });
    store_rows<IS_ALIGNED, LANES>(s, unit, at.first, job.value_dim, job.key_dim);
}

/* ---- the call ------------------------------------------------------------------------------------------------------------ */

template <uint32_t QUADS, class T>
static void launch_delta(const struct cuda *cuda, const delta_job<T> &job, const struct delta_args *args, bool is_aligned)
{
    dim3 grid(args->n_heads * job.n_slices, args->batch->n_seqs);
    auto kernel = job.batch.first_row ? is_aligned ? delta_prompt<T, QUADS, true> : delta_prompt<T, MOST_QUADS, false>
                                      : is_aligned ? delta_step<T, QUADS, true> : delta_step<T, MOST_QUADS, false>;
    launch(cuda, kernel, grid, job.batch.first_row ? SCAN_THREADS : THREADS, 0, job);
}

enum rc cuda_delta(void *ctx, const struct delta_args *args, struct err *err)
{
    if (args->key_dim > MAX_KEY)
        return err_set(err, RC_UNSUPPORTED, "delta: wanted keys of at most %u values, have %u", MAX_KEY, args->key_dim);
    return run_rows(ctx, args->batch->n_rows, "delta", err, [&](struct cuda *cuda, auto value) {
        using T = decltype(value);
        delta_job<T> job = {sequences(args->batch), state_pool(args->state), rows<T>(args->q), rows<T>(args->k),
                            rows<T>(args->v), rows<T>(args->a), rows<T>(args->b), rows<T>(args->out), args->a_log,
                            args->dt_bias, args->key_dim, args->value_dim, args->n_heads / args->n_key_heads,
                            ceil_div(args->value_dim, SLICE), 1.0f / sqrtf((float)args->key_dim)};
        bool is_aligned = has_eights<T>(args->q) && has_eights<T>(args->k) && has_eights<T>(args->v) &&
                          has_eights<T>(args->out) && args->key_dim % 8 == 0 && args->value_dim % 8 == 0 &&
                          state_is_aligned(&args->state, args->key_dim);
        args->key_dim <= 128 ? launch_delta<4>(cuda, job, args, is_aligned)
                             : launch_delta<MOST_QUADS>(cuda, job, args, is_aligned);
    });
}
