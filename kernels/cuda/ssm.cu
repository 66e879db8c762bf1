/* State space with one decay a head (Mamba-2, PLaMo 2), token by token; head h, channel p, column n, float32:
 *   d = clamp(softplus(dt_h + dt_bias_h)), S[p][n] = exp(-exp(a_log_h) d) S[p][n] + (d x_p) B_n,
 *   y_p = sum over n of S[p][n] C_n + skip_h x_p, rounded to the type of activations; with a gate z act(z) y of the rounded y,
 *   rounded again.
 * A unit of the state is [head_dim][n_state]. A block has 32 channels of a head, 16 lanes 4 of them, a lane the columns
 * 4 (lane + 16 i) .. + 4 of each: a sum is a chain over these, i ascending, then pairwise over lanes 1, 2, 4, 8 apart. Whether
 * one token or thousands: the same operations in the same order, with the state in registers meanwhile.
 * One row a sequence is bound by the state, read and written: 256 sequences of 32 heads of 128 x 64 move 537 MB, 136 us at the
 * 3.94 TB/s of a copy; the state is on its way before the wait. A prompt is bound by operations: 3 for every value of the state
 * and about as much again for the sums, 75 to a warp and token, so 8192 tokens of one such sequence, one warp to a scheduler,
 * take 0.36 ms; inputs of the next chunk of tokens are read while one is computed. */
#include "state.cuh"

#define THREADS 128u
#define LANES 16u
#define OWN 4u                        /* channels of a group of lanes */
#define SLICE (THREADS / LANES * OWN) /* channels of a block */
#define MAX_STATE 256u

template <class T> struct ssm_job {
    struct sequences batch;
    struct state_pool state;
    rows<T> x, dt, b, c, z, out;
    const float *a_log, *dt_bias, *skip;
    float dt_min, dt_max;
    uint32_t head_dim, n_state, heads_a_group, n_slices;
    bool has_gate;
    uint32_t act;
};

/* What a block works on. */
struct place {
    uint32_t head, slice, group, first; /* first: of the lane's channels, in the head */
};

template <class T> static __device__ __forceinline__ struct place place_of(const ssm_job<T> &job)
{
    uint32_t head = blockIdx.x / job.n_slices, slice = blockIdx.x % job.n_slices;
    return {head, slice, head / job.heads_a_group, slice * SLICE + threadIdx.x / LANES * OWN};
}

template <bool IS_ALIGNED, uint32_t QUADS, class T>
static __device__ __forceinline__ void load_state(float4 (&s)[OWN][QUADS], const ssm_job<T> &job, const float *unit,
                                                  uint32_t first, bool is_new)
{
#pragma unroll
    for (uint32_t r = 0; r < OWN; r++)
#pragma unroll
        for (uint32_t q = 0; q < QUADS; q++)
            s[r][q] = is_new || first + r >= job.head_dim
                          ? make_float4(0, 0, 0, 0)
                          : load_quad<IS_ALIGNED>(unit + (size_t)(first + r) * job.n_state,
                                                  4 * (threadIdx.x % LANES + LANES * q), job.n_state);
}

template <bool IS_ALIGNED, uint32_t QUADS, class T>
static __device__ __forceinline__ void store_state(const float4 (&s)[OWN][QUADS], const ssm_job<T> &job, float *unit,
                                                   uint32_t first)
{
#pragma unroll
    for (uint32_t r = 0; r < OWN; r++)
#pragma unroll
        for (uint32_t q = 0; q < QUADS; q++)
            if (first + r < job.head_dim)
                store_quad<IS_ALIGNED>(unit + (size_t)(first + r) * job.n_state, 4 * (threadIdx.x % LANES + LANES * q),
                                       job.n_state, s[r][q]);
}

/* One token: the lane's columns of its channels, and their part of y. */
template <uint32_t QUADS>
static __device__ __forceinline__ void advance(float4 (&s)[OWN][QUADS], const float *b, const float *c, const float *dx,
                                               float decay, float *sums)
{
    float4 x = *(const float4 *)dx;
    const float own[OWN] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (uint32_t q = 0; q < QUADS; q++) {
        float4 bq = ((const float4 *)b)[threadIdx.x % LANES + LANES * q], cq = ((const float4 *)c)[threadIdx.x % LANES + LANES * q];
#pragma unroll
        for (uint32_t r = 0; r < OWN; r++) {
            s[r][q].x = fmaf(own[r], bq.x, decay * s[r][q].x);
            s[r][q].y = fmaf(own[r], bq.y, decay * s[r][q].y);
            s[r][q].z = fmaf(own[r], bq.z, decay * s[r][q].z);
            s[r][q].w = fmaf(own[r], bq.w, decay * s[r][q].w);
            float sum = q ? fmaf(s[r][q].x, cq.x, sums[r]) : s[r][q].x * cq.x;
            sums[r] = fmaf(s[r][q].w, cq.w, fmaf(s[r][q].z, cq.z, fmaf(s[r][q].y, cq.y, sum)));
        }
    }
}

template <class T> static __device__ __forceinline__ float step_of(const ssm_job<T> &job, float dt, float bias)
{
    return fminf(job.dt_max, fmaxf(job.dt_min, softplus(dt + bias)));
}

/* ---- one row a sequence ------------------------------------------------------------------------------------------------- */

template <class T, uint32_t QUADS, bool IS_ALIGNED>
static __global__ void __launch_bounds__(THREADS) step_heads(const ssm_job<T> job)
{
    __shared__ __align__(16) float b[4 * LANES * QUADS], c[4 * LANES * QUADS], dx[SLICE];
    float4 s[OWN][QUADS];
    start_next();
    const struct place at = place_of(job);
    uint32_t row = blockIdx.y, t = threadIdx.x;
    const struct span span = span_of(job.batch, row);
    float *unit = job.state.unit(span.seq, at.head);
    load_state<IS_ALIGNED>(s, job, unit, at.first, span.is_new);
    float rate = -expf(job.a_log[at.head]), bias = job.dt_bias[at.head], skip = job.skip[at.head];
    wait_for_input();
    for (uint32_t i = t; i < 4 * LANES * QUADS; i += THREADS) {
        b[i] = i < job.n_state ? to_float(*job.b.at(row, at.group * job.n_state + i)) : 0.0f;
        c[i] = i < job.n_state ? to_float(*job.c.at(row, at.group * job.n_state + i)) : 0.0f;
    }
    float d = step_of(job, to_float(*job.dt.at(row, at.head)), bias), decay = expf(rate * d);
    if (t < SLICE) {
        uint32_t p = at.slice * SLICE + t;
        dx[t] = p < job.head_dim ? d * to_float(*job.x.at(row, at.head * job.head_dim + p)) : 0.0f;
    }
    const uint32_t own = t % LANES < OWN ? sum_index<OWN>() : OWN, p = at.first + own; /* a lane ends one channel at most */
    const bool is_mine = own < OWN && p < job.head_dim;
    float x = 0, z = 0;
    if (is_mine) {
        x = to_float(*job.x.at(row, at.head * job.head_dim + p));
        z = job.has_gate ? to_float(*job.z.at(row, at.head * job.head_dim + p)) : 0.0f;
    }
    __syncthreads();
    float sums[OWN];
    advance(s, b, c, dx + t / LANES * OWN, decay, sums);
    float y = fmaf(skip, x, group_sums<LANES>(sums));
    if (is_mine) {
        T value = round_to<T>(y);
        if (job.has_gate)
            value = round_to<T>(act_value(z, job.act) * to_float(value));
        *job.out.at(row, at.head * job.head_dim + p) = value;
    }
    store_state<IS_ALIGNED>(s, job, unit, at.first);
}

/* ---- any rows ----------------------------------------------------------------------------------------------------------- */

/* What a thread reads of a chunk of tokens: eight values of B, C, x and z each, dt of a token. */
struct inputs {
    float b[8], c[8], x[8], z[8], dt;
};

template <class T, uint32_t QUADS> struct chunk {
    static const uint32_t TOKENS = 16 / QUADS, PARTS = SLICE / 8; /* eights of x in a slice */
    __align__(16) float b[TOKENS][4 * LANES * QUADS], c[TOKENS][4 * LANES * QUADS], dx[TOKENS][SLICE], y[TOKENS][SLICE];
    float step[TOKENS], decay[TOKENS];
};

template <uint32_t QUADS, bool IS_ALIGNED, class T>
static __device__ __forceinline__ void read_inputs(struct inputs &in, const ssm_job<T> &job, const struct place &at,
                                                   uint32_t row, uint32_t n)
{
    typedef chunk<T, QUADS> chunk;
    uint32_t t = threadIdx.x, token = t / (8 * QUADS), column = t % (8 * QUADS) * 8;
    uint32_t x_token = t / chunk::PARTS, x_column = at.slice * SLICE + t % chunk::PARTS * 8, dt_token = t - THREADS / 2;
    if (token < n) {
        load_part<IS_ALIGNED>(job.b.at(row + token, at.group * job.n_state), column, job.n_state, in.b);
        load_part<IS_ALIGNED>(job.c.at(row + token, at.group * job.n_state), column, job.n_state, in.c);
    }
    if (t < chunk::TOKENS * chunk::PARTS && x_token < n) {
        load_part<IS_ALIGNED>(job.x.at(row + x_token, at.head * job.head_dim), x_column, job.head_dim, in.x);
        if (job.has_gate)
            load_part<IS_ALIGNED>(job.z.at(row + x_token, at.head * job.head_dim), x_column, job.head_dim, in.z);
    }
    if (dt_token < chunk::TOKENS && dt_token < n)
        in.dt = to_float(*job.dt.at(row + dt_token, at.head));
}

template <class T, uint32_t QUADS, bool IS_ALIGNED>
static __global__ void __launch_bounds__(THREADS, 2) scan_heads(const ssm_job<T> job)
{
    typedef chunk<T, QUADS> chunk;
    __shared__ chunk m;
    float4 s[OWN][QUADS];
    struct inputs next = {};
    start_next();
    const struct place at = place_of(job);
    const struct span span = span_of(job.batch, blockIdx.y);
    const uint32_t t = threadIdx.x, lanes = t / LANES * OWN, x_token = t / chunk::PARTS, x_part = t % chunk::PARTS * 8;
    float *unit = job.state.unit(span.seq, at.head);
    load_state<IS_ALIGNED>(s, job, unit, at.first, span.is_new);
    float rate = -expf(job.a_log[at.head]), bias = job.dt_bias[at.head], skip = job.skip[at.head];
    wait_for_input();
    read_inputs<QUADS, IS_ALIGNED>(next, job, at, span.first, span.n);
    for (uint32_t done = 0; done < span.n; done += chunk::TOKENS) {
        uint32_t n = min(chunk::TOKENS, span.n - done);
        const struct inputs now = next;
        store_eight(&m.b[t / (8 * QUADS)][t % (8 * QUADS) * 8], now.b);
        store_eight(&m.c[t / (8 * QUADS)][t % (8 * QUADS) * 8], now.c);
        if (t - THREADS / 2 < chunk::TOKENS) {
            float d = step_of(job, now.dt, bias);
            m.step[t - THREADS / 2] = d;
            m.decay[t - THREADS / 2] = expf(rate * d);
        }
        if (done + chunk::TOKENS < span.n)
            read_inputs<QUADS, IS_ALIGNED>(next, job, at, span.first + done + chunk::TOKENS, span.n - done - chunk::TOKENS);
        __syncthreads();
        if (t < chunk::TOKENS * chunk::PARTS) {
            float dx[8];
            for (uint32_t i = 0; i < 8; i++)
                dx[i] = m.step[x_token] * now.x[i];
            store_eight(&m.dx[x_token][x_part], dx);
        }
        __syncthreads();
        uint32_t token = 0;
        for (; token + 4 <= n; token += 4) {
            float sums[4 * OWN];
#pragma unroll
            for (uint32_t i = 0; i < 4; i++)
                advance(s, m.b[token + i], m.c[token + i], &m.dx[token + i][lanes], m.decay[token + i], sums + OWN * i);
            float sum = group_sums<LANES>(sums);
            uint32_t own = sum_index<4 * OWN>();
            m.y[token + own / OWN][lanes + own % OWN] = sum;
        }
        for (; token < n; token++) {
            float sums[OWN];
            advance(s, m.b[token], m.c[token], &m.dx[token][lanes], m.decay[token], sums);
            float sum = group_sums<LANES>(sums);
            if (t % LANES < OWN)
                m.y[token][lanes + sum_index<OWN>()] = sum;
        }
        __syncthreads();
        if (t < chunk::TOKENS * chunk::PARTS && x_token < n) {
            float y[8];
            for (uint32_t i = 0; i < 8; i++) {
                y[i] = fmaf(skip, now.x[i], m.y[x_token][x_part + i]);
                if (job.has_gate)
                    y[i] = act_value(now.z[i], job.act) * to_float(round_to<T>(y[i]));
            }
            store_part<IS_ALIGNED>(job.out.at(span.first + done + x_token, at.head * job.head_dim), at.slice * SLICE + x_part,
                                   job.head_dim, y);
        }
    }
    store_state<IS_ALIGNED>(s, job, unit, at.first);
}

/* ---- the call ----------------------------------------------------------------------------------------------------------- */

template <uint32_t QUADS, class T>
static void launch_ssm(const struct cuda *cuda, const ssm_job<T> &job, const struct ssm_args *args, bool is_aligned)
{
    const struct batch_view *batch = args->batch;
    dim3 grid(args->n_heads * job.n_slices, batch->n_seqs);
    auto kernel = job.batch.first_row ? is_aligned ? scan_heads<T, QUADS, true> : scan_heads<T, QUADS, false>
                                      : is_aligned ? step_heads<T, QUADS, true> : step_heads<T, QUADS, false>;
    launch(cuda, kernel, grid, THREADS, 0, job);
}

enum rc cuda_ssm(void *ctx, const struct ssm_args *args, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    if (!args->batch->n_rows)
        return RC_OK;
    if (args->n_state > MAX_STATE)
        return err_set(err, RC_UNSUPPORTED, "ssm: wanted a state of at most %u columns, have %u", MAX_STATE, args->n_state);
    visit_type(cuda->dtype, [&](auto value) {
        using T = decltype(value);
        const struct view &gate = args->gate.data ? args->gate : args->x;
        ssm_job<T> job = {sequences(args->batch), state_pool(args->state), rows<T>(args->x), rows<T>(args->dt),
                          rows<T>(args->b), rows<T>(args->c), rows<T>(gate), rows<T>(args->out), args->a_log, args->dt_bias,
                          args->skip, args->dt_min, args->dt_max, args->head_dim, args->n_state,
                          args->n_heads / args->n_groups, ceil_div(args->head_dim, SLICE), args->gate.data != NULL, args->act};
        bool is_aligned = has_eights<T>(args->x) && has_eights<T>(args->b) && has_eights<T>(args->c) && has_eights<T>(gate) &&
                          has_eights<T>(args->out) && args->head_dim % 8 == 0 && args->n_state % 8 == 0 &&
                          state_is_aligned(&args->state, args->n_state);
        args->n_state <= 64 ? launch_ssm<1>(cuda, job, args, is_aligned) :
        args->n_state <= 128 ? launch_ssm<2>(cuda, job, args, is_aligned) : launch_ssm<4>(cuda, job, args, is_aligned);
    });
    return launched(err, "ssm");
}
