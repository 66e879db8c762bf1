/* State space with one decay a head (Mamba-2, PLaMo 2), token by token; head h, channel p, column n, float32:
 *   d = clamp(softplus(dt_h + dt_bias_h)), S[p][n] = exp(-exp(a_log_h) d) S[p][n] + (d x_p) B_n,
 *   y_p = sum over n of S[p][n] C_n + skip_h x_p, rounded to the type of activations; with a gate z act(z) y of the rounded y,
 *   rounded again.
 * A unit of the state is [head_dim][n_state]. A block has 32 channels of a head, 16 lanes 4 of them, of prompts 2, a lane the
 * columns 4 (lane + 16 i) .. + 4 of each: a sum is a chain over these, i ascending, then pairwise over lanes 1, 2, 4, 8 apart.
 * Whether one token or thousands: the same operations in the same order, with the state in registers meanwhile.
 * One row a sequence is bound by the state, read and written: 256 sequences of 32 heads of 128 x 64 move 537 MB, 136 us at the
 * 3.94 TB/s of a copy; the state is on its way before the wait. A prompt is bound by operations: 3 for every value of the state
 * and about as much again for the sums, 0.36 ms for 8192 tokens of one such sequence; what comes before and after them is done
 * a chunk of tokens ahead and behind (walk_chunks). */
#include "../core/launch.cuh"
#include "../core/mma.cuh"
#include "../norm/head_norm.cuh"
#include "state.cuh"

#define THREADS 128u
#define LANES 16u
#define OWN 4u                        /* channels of a group of lanes in a step */
#define SLICE (THREADS / LANES * OWN) /* channels of a block */
#define SCAN_THREADS 256u             /* of a block with any rows */
#define SCAN_OWN (SLICE / (SCAN_THREADS / LANES))
#define MOST_QUADS 4u
#define MAX_STATE (4 * LANES * MOST_QUADS)
#define NORM_QUADS 2u /* the most QUADS for which a step's kernel norms its inputs */
#define MAX_RANK 256u /* columns of dt_matrix that are multiplied here */
#define NORM_ROWS 64u /* from this number on, a separate kernel norms the inputs once for all blocks */

template <class T> struct ssm_job {
    struct sequences batch;
    struct state_pool state;
    rows<T> x, dt, b, c, z, out;
    const float *a_log, *dt_bias, *skip;
    float dt_min, dt_max;
    uint32_t head_dim, n_state, heads_a_group, n_slices;
    bool has_gate; /* silu(z) */
    const float *b_norm, *c_norm, *dt_norm; /* work of a step's kernel if the inputs are not ready: dt has rank columns */
    float eps;
    const char *dt_rows;
    size_t dt_row_bytes;
    uint32_t rank;
};

/* The task of a block. */
struct place {
    uint32_t head, slice, group, first; /* first: of the lane's channels, in the head */
};

template <uint32_t N, class T> static __device__ __forceinline__ struct place place_of(const ssm_job<T> &job)
{
    uint32_t head = blockIdx.x / job.n_slices, slice = blockIdx.x % job.n_slices;
    return {head, slice, head / job.heads_a_group, slice * SLICE + threadIdx.x / LANES * N};
}

/* One token: the lane's columns of its channels, and their part of y. */
template <uint32_t N, uint32_t QUADS>
static __device__ __forceinline__ void advance(float4 (&s)[N][QUADS], const float *b, const float *c, const float *dx,
                                               float decay, float *sums)
{
#pragma unroll
    for (uint32_t q = 0; q < QUADS; q++) {
        const uint32_t quad = threadIdx.x % LANES + LANES * q;
        float4 bq = ((const float4 *)b)[quad], cq = ((const float4 *)c)[quad];
#pragma unroll
        for (uint32_t r = 0; r < N; r++) {
            s[r][q].x = fmaf(dx[r], bq.x, decay * s[r][q].x);
            s[r][q].y = fmaf(dx[r], bq.y, decay * s[r][q].y);
            s[r][q].z = fmaf(dx[r], bq.z, decay * s[r][q].z);
            s[r][q].w = fmaf(dx[r], bq.w, decay * s[r][q].w);
            float sum = q ? fmaf(s[r][q].x, cq.x, sums[r]) : s[r][q].x * cq.x;
            sums[r] = fmaf(s[r][q].w, cq.w, fmaf(s[r][q].z, cq.z, fmaf(s[r][q].y, cq.y, sum)));
        }
    }
}

template <class T> static __device__ __forceinline__ float step_of(const ssm_job<T> &job, float dt, float bias)
{
    return fminf(job.dt_max, fmaxf(job.dt_min, softplus(dt + bias)));
}

/* ---- one row a sequence -------------------------------------------------------------------------------------------------- */

/* Inputs of a row that all its block's threads use. */
template <class T, uint32_t QUADS> struct shared_inputs {
    __align__(16) float b[4 * LANES * QUADS], c[4 * LANES * QUADS];
    __align__(16) T dt[MAX_RANK], dt_row[MAX_RANK];
    float step, decay;
};

/* Reads weights before the wait: the lane's part of its warp's norm. Warp 3 reads the row of dt_matrix. */
template <class T, uint32_t QUADS>
static __device__ __forceinline__ void read_weights(shared_inputs<T, QUADS> &m, const ssm_job<T> &job, uint32_t head,
                                                    float (&weight)[8])
{
    uint32_t warp = threadIdx.x / 32, column = threadIdx.x % 32 * 8;
    const float *norm = warp == 0 ? job.b_norm : warp == 1 ? job.c_norm : job.dt_norm;
    if (warp < 3)
        load_part<true>(norm, column, warp < 2 ? job.n_state : job.rank, weight);
    else if (column < job.rank)
        *(eight<T> *)&m.dt_row[column] = *(const eight<T> *)(job.dt_rows + head * job.dt_row_bytes + column * sizeof(T));
}

/* The sum of the products of dt and the head's row of dt_matrix in the order of a linear, in a warp's first lane. */
template <class T> static __device__ __forceinline__ float multiply_dt(const T *dt, const T *dt_row, uint32_t rank)
{
    const uint32_t *x = (const uint32_t *)dt + threadIdx.x % 4, *w = (const uint32_t *)dt_row + threadIdx.x % 4;
    const bool is_first = threadIdx.x % 32 < 4; /* the row of W and the row of x that are used; the others are zeros */
    float sums[4] = {};
    for (uint32_t k = 0; k < rank / 2; k += 8) {
        const uint32_t rows_of_w[4] = {is_first ? w[k] : 0, 0, is_first ? w[k + 4] : 0, 0};
        const uint32_t rows_of_x[2] = {is_first ? x[k] : 0, is_first ? x[k + 4] : 0};
        mma(sums, rows_of_w, rows_of_x, T());
    }
    return sums[0];
}

/* Warps 0 and 1 norm B and C, warp 2 norms dt and makes the step. */
template <class T, uint32_t QUADS>
static __device__ __forceinline__ void norm_inputs(shared_inputs<T, QUADS> &m, const ssm_job<T> &job, uint32_t row, float rate,
                                                   float bias, const float (&weight)[8])
{
    uint32_t warp = threadIdx.x / 32, column = threadIdx.x % 32 * 8, n = warp < 2 ? job.n_state : job.rank;
    if (warp > 2)
        return;
    float x[8];
    load_part<true>((warp == 0 ? job.b : warp == 1 ? job.c : job.dt).at(row, 0), column, n, x);
    float scale = norm_scale(head_squares<32>(x), n, job.eps);
#pragma unroll
    for (uint32_t i = 0; i < 8; i++)
        x[i] = to_float(round_to<T>(weight[i] * (x[i] * scale)));
    if (warp < 2 && column < 4 * LANES * QUADS)
        store_eight(&(warp ? m.c : m.b)[column], x);
    if (warp < 2)
        return;
    store_eight(&m.dt[column], x);
    __syncwarp();
    float d = step_of(job, to_float(round_to<T>(multiply_dt(m.dt, m.dt_row, job.rank))), bias);
    if (threadIdx.x % 32 == 0) {
        m.step = d;
        m.decay = expf(rate * d);
    }
}

template <class T, uint32_t QUADS>
static __device__ __forceinline__ void take_inputs(shared_inputs<T, QUADS> &m, const ssm_job<T> &job, uint32_t row,
                                                   const struct place &at, float rate, float bias)
{
    for (uint32_t i = threadIdx.x; i < 4 * LANES * QUADS; i += THREADS) {
        m.b[i] = i < job.n_state ? to_float(*job.b.at(row, at.group * job.n_state + i)) : 0.0f;
        m.c[i] = i < job.n_state ? to_float(*job.c.at(row, at.group * job.n_state + i)) : 0.0f;
    }
    if (threadIdx.x == THREADS - 1) {
        m.step = step_of(job, to_float(*job.dt.at(row, at.head)), bias);
        m.decay = expf(rate * m.step);
    }
}

template <class T, uint32_t QUADS, bool IS_ALIGNED, bool HAS_NORMS>
static __global__ void __launch_bounds__(THREADS) ssm_step(const ssm_job<T> job)
{
    __shared__ shared_inputs<T, QUADS> m;
    float4 s[OWN][QUADS];
    float weight[8] = {}, dx[OWN], sums[OWN];
    start_next();
    const struct place at = place_of<OWN>(job);
    const uint32_t row = blockIdx.y, t = threadIdx.x;
    const struct span span = span_of(job.batch, row);
    float *unit = job.state.unit(span.seq, at.head);
    load_rows<IS_ALIGNED, LANES>(s, unit, at.first, job.head_dim, job.n_state, span.is_new);
    float rate = -expf(job.a_log[at.head]), bias = job.dt_bias[at.head], skip = job.skip[at.head];
    if constexpr (HAS_NORMS) {
        read_weights(m, job, at.head, weight);
        __syncthreads();
    }
    wait_for_input();
    const uint32_t own = t % LANES < OWN ? sum_index<OWN>() : OWN, p = at.first + own; /* a lane ends one channel at most */
    const bool is_mine = own < OWN && p < job.head_dim;
    float x = 0, z = 0;
    for (uint32_t r = 0; r < OWN; r++)
        dx[r] = at.first + r < job.head_dim ? to_float(*job.x.at(row, at.head * job.head_dim + at.first + r)) : 0.0f;
    if (is_mine) {
        x = to_float(*job.x.at(row, at.head * job.head_dim + p));
        z = job.has_gate ? to_float(*job.z.at(row, at.head * job.head_dim + p)) : 0.0f;
    }
    if constexpr (HAS_NORMS)
        norm_inputs(m, job, row, rate, bias, weight);
    else
        take_inputs(m, job, row, at, rate, bias);
    __syncthreads();
    for (uint32_t r = 0; r < OWN; r++)
        dx[r] = m.step * dx[r];
    advance(s, m.b, m.c, dx, m.decay, sums);
    float y = fmaf(skip, x, group_sums<LANES>(sums));
    if (is_mine) {
        T value = round_to<T>(y);
        if (job.has_gate)
            value = round_to<T>(act_value(z, ACT_SILU) * to_float(value));
        *job.out.at(row, at.head * job.head_dim + p) = value;
    }
    store_rows<IS_ALIGNED, LANES>(s, unit, at.first, job.head_dim, job.n_state);
}

/* ---- any rows ------------------------------------------------------------------------------------------------------------ */

#define AT_ONCE (LANES / SCAN_OWN) /* tokens whose sums are computed together */

/* The part of a chunk of tokens that a thread reads, of B, C, x, z and dt. */
template <class T> struct inputs {
    eight<T> b, c, x, z;
    float dt;
};

/* Inputs of some tokens; y takes the place of dx. */
template <uint32_t QUADS> struct chunk {
    static const uint32_t TOKENS = 32 / QUADS, PARTS = SLICE / 8; /* eights of x in a slice */
    __align__(16) float b[TOKENS][4 * LANES * QUADS], c[TOKENS][4 * LANES * QUADS], dx[TOKENS][SLICE];
    float decay[TOKENS];
};

/* A thread's part in chunks: eight columns of B and C of one token, and of the first threads eight channels of one. */
template <uint32_t QUADS> struct part {
    uint32_t token, column, x_token, x_column;
    bool has_x;
    __device__ part(void)
        : token(threadIdx.x / (8 * QUADS)), column(threadIdx.x % (8 * QUADS) * 8), x_token(threadIdx.x / chunk<QUADS>::PARTS),
          x_column(threadIdx.x % chunk<QUADS>::PARTS * 8), has_x(threadIdx.x < chunk<QUADS>::TOKENS * chunk<QUADS>::PARTS)
    {
    }
};

template <bool IS_ALIGNED, uint32_t QUADS, class T>
static __device__ __forceinline__ void read_inputs(struct inputs<T> &in, const ssm_job<T> &job, const struct place &at,
                                                   const struct part<QUADS> &my, uint32_t row, uint32_t n)
{
    if (my.token < n) {
        in.b = part_of<IS_ALIGNED>(job.b.at(row + my.token, at.group * job.n_state), my.column, job.n_state);
        in.c = part_of<IS_ALIGNED>(job.c.at(row + my.token, at.group * job.n_state), my.column, job.n_state);
    }
    if (my.has_x && my.x_token < n) {
        const uint32_t channel = at.slice * SLICE + my.x_column;
        in.x = part_of<IS_ALIGNED>(job.x.at(row + my.x_token, at.head * job.head_dim), channel, job.head_dim);
        if (job.has_gate)
            in.z = part_of<IS_ALIGNED>(job.z.at(row + my.x_token, at.head * job.head_dim), channel, job.head_dim);
        in.dt = to_float(*job.dt.at(row + my.x_token, at.head));
    }
}

template <uint32_t QUADS, class T>
static __device__ __forceinline__ void stage_inputs(struct chunk<QUADS> &m, const struct inputs<T> &in, const ssm_job<T> &job,
                                                    const struct part<QUADS> &my, float rate, float bias)
{
    float x[8];
    to_floats(in.b, x);
    store_eight(&m.b[my.token][my.column], x);
    to_floats(in.c, x);
    store_eight(&m.c[my.token][my.column], x);
    if (!my.has_x)
        return;
    const float d = step_of(job, in.dt, bias);
    if (my.x_column == 0)
        m.decay[my.x_token] = expf(rate * d);
    to_floats(in.x, x);
#pragma unroll
    for (uint32_t i = 0; i < 8; i++)
        x[i] = d * x[i];
    store_eight(&m.dx[my.x_token][my.x_column], x);
}

/* y of the thread's token, of n. */
template <bool IS_ALIGNED, uint32_t QUADS, class T>
static __device__ __forceinline__ void finish_outputs(const struct chunk<QUADS> &m, const eight<T> &x, const eight<T> &z,
                                                      const ssm_job<T> &job, const struct place &at,
                                                      const struct part<QUADS> &my, uint32_t row, uint32_t n, float skip)
{
    if (!my.has_x || my.x_token >= n)
        return;
    float y[8];
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) {
        y[i] = fmaf(skip, to_float(x.values[i]), m.dx[my.x_token][my.x_column + i]);
        if (job.has_gate)
            y[i] = act_value(to_float(z.values[i]), ACT_SILU) * to_float(round_to<T>(y[i]));
    }
    store_part<IS_ALIGNED>(job.out.at(row + my.x_token, at.head * job.head_dim), at.slice * SLICE + my.x_column, job.head_dim,
                           y);
}

/* N tokens from `token` on; a lane ends one sum. */
template <uint32_t N, uint32_t QUADS>
static __device__ __forceinline__ void take_tokens(float4 (&s)[SCAN_OWN][QUADS], struct chunk<QUADS> &m, uint32_t token)
{
    const uint32_t lanes = threadIdx.x / LANES * SCAN_OWN, own = sum_index<N * SCAN_OWN>();
    float sums[N * SCAN_OWN];
#pragma unroll
    for (uint32_t i = 0; i < N; i++) {
        float dx[SCAN_OWN];
#pragma unroll
        for (uint32_t r = 0; r < SCAN_OWN; r++)
            dx[r] = m.dx[token + i][lanes + r];
        advance(s, m.b[token + i], m.c[token + i], dx, m.decay[token + i], sums + SCAN_OWN * i);
    }
    const float sum = group_sums<LANES>(sums);
    __syncwarp();
    if (N * SCAN_OWN == LANES || threadIdx.x % LANES < N * SCAN_OWN)
        m.dx[token + own / SCAN_OWN][lanes + own % SCAN_OWN] = sum;
}

template <class T, uint32_t QUADS, bool IS_ALIGNED>
static __global__ void __launch_bounds__(SCAN_THREADS, 2) ssm_prompt(const ssm_job<T> job)
{
    typedef chunk<QUADS> chunk;
    __shared__ chunk m[2];
    float4 s[SCAN_OWN][QUADS];
    struct inputs<T> in = {};
    start_next();
    const struct place at = place_of<SCAN_OWN>(job);
    const struct span span = span_of(job.batch, blockIdx.y);
    const struct part<QUADS> my;
    float *unit = job.state.unit(span.seq, at.head);
    load_rows<IS_ALIGNED, LANES>(s, unit, at.first, job.head_dim, job.n_state, span.is_new);
    const float rate = -expf(job.a_log[at.head]), bias = job.dt_bias[at.head], skip = job.skip[at.head];
    eight<T> x = {}, z = {}, last_x = {}, last_z = {}; /* of the chunk that is staged next, and of the one before it */
    wait_for_input();
    walk_chunks<chunk::TOKENS, AT_ONCE>(
        span.n,
        [&](uint32_t first) {
            last_x = x;
            last_z = z;
            x = in.x;
            z = in.z;
            if (first < span.n)
                read_inputs<IS_ALIGNED>(in, job, at, my, span.first + first, span.n - first);
        },
        [&](uint32_t place) { stage_inputs(m[place], in, job, my, rate, bias); },
        [&](uint32_t place, uint32_t token) { take_tokens<AT_ONCE>(s, m[place], token); },
        [&](uint32_t place, uint32_t token) { take_tokens<1>(s, m[place], token); },
        [&](uint32_t place, uint32_t first, uint32_t n) {
            finish_outputs<IS_ALIGNED>(m[place], last_x, last_z, job, at, my, span.first + first, n, skip);
        });
    store_rows<IS_ALIGNED, LANES>(s, unit, at.first, job.head_dim, job.n_state);
}

/* ---- inputs apart -------------------------------------------------------------------------------------------------------- */

#define TILE 8u /* rows of a block */

/* Norms b, c and dt into the scratch and multiplies dt, as rms_norm and linear do: sources and targets. */
template <class T> struct input_job {
    rows<T> b, c, low, b_out, c_out, dt_out;
    const float *b_norm, *c_norm, *dt_norm;
    float eps;
    const char *dt_rows;
    size_t dt_row_bytes;
    uint32_t rank, n_rows, n_heads;
};

/* The lane's eight values of a row, normed by its warp. */
template <class T>
static __device__ __forceinline__ void norm_part(const rows<T> &from, uint32_t row, bool is_there, const float (&weight)[8],
                                                 float eps, float (&x)[8])
{
    uint32_t column = threadIdx.x % 32 * 8, n = from.width;
    load_part<true>(from.at(row, 0), is_there ? column : n, n, x);
    float scale = norm_scale(head_squares<32>(x), n, eps);
#pragma unroll
    for (uint32_t i = 0; i < 8; i++)
        x[i] = weight[i] * (x[i] * scale);
}

template <class T> static __global__ void __launch_bounds__(THREADS) ssm_norm(const input_job<T> job)
{
    __shared__ __align__(16) T dt[TILE][MAX_RANK + 8];
    float weights[3][8], x[8], sums[4] = {};
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = lane * 8, first = blockIdx.x * TILE;
    start_next();
    load_part<true>(job.b_norm, column, job.b.width, weights[0]);
    load_part<true>(job.c_norm, column, job.c.width, weights[1]);
    load_part<true>(job.dt_norm, column, job.rank, weights[2]);
    wait_for_input();
    for (uint32_t r = warp; r < TILE; r += THREADS / 32) {
        const bool is_there = first + r < job.n_rows;
        norm_part(job.b, first + r, is_there, weights[0], job.eps, x);
        if (is_there)
            store_part<true>(job.b_out.at(first + r, 0), column, job.b.width, x);
        norm_part(job.c, first + r, is_there, weights[1], job.eps, x);
        if (is_there)
            store_part<true>(job.c_out.at(first + r, 0), column, job.c.width, x);
        norm_part(job.low, first + r, is_there, weights[2], job.eps, x);
        store_part<true>(dt[r], column, MAX_RANK, x);
    }
    __syncthreads();
    for (uint32_t head = 16 * warp + lane / 4; head - lane / 4 < job.n_heads; head += THREADS / 2) {
        const uint32_t *low = (const uint32_t *)(job.dt_rows + min(head, job.n_heads - 1) * job.dt_row_bytes) + lane % 4;
        const uint32_t *high = (const uint32_t *)(job.dt_rows + min(head + 8, job.n_heads - 1) * job.dt_row_bytes) + lane % 4;
        const uint32_t *row = (const uint32_t *)dt[lane / 4] + lane % 4;
        for (uint32_t i = 0; i < 4; i++)
            sums[i] = 0;
        for (uint32_t k = 0; k < job.rank / 2; k += 8) {
            const uint32_t rows_of_w[4] = {low[k], high[k], low[k + 4], high[k + 4]}, rows_of_x[2] = {row[k], row[k + 4]};
            mma(sums, rows_of_w, rows_of_x, T());
        }
        for (uint32_t i = 0; i < 4; i++) {
            uint32_t r = first + lane % 4 * 2 + i % 2, h = head + i / 2 * 8;
            if (r < job.n_rows && h < job.n_heads)
                *job.dt_out.at(r, h) = round_to<T>(sums[i]);
        }
    }
}

/* ---- the call ------------------------------------------------------------------------------------------------------------ */

template <uint32_t QUADS, class T>
static void launch_ssm(const struct cuda *cuda, const ssm_job<T> &job, const struct ssm_args *args, bool is_aligned)
{
    dim3 grid(args->n_heads * job.n_slices, args->batch->n_seqs);
    auto kernel = job.batch.first_row ? is_aligned ? ssm_prompt<T, QUADS, true> : ssm_prompt<T, MOST_QUADS, false>
                  : is_aligned        ? ssm_step<T, QUADS, true, false>
                                      : ssm_step<T, MOST_QUADS, false, false>;
    if constexpr (sizeof(T) == 2 && QUADS <= NORM_QUADS)
        kernel = job.b_norm ? ssm_step<T, QUADS, true, true> : kernel;
    launch(cuda, kernel, grid, job.batch.first_row ? SCAN_THREADS : THREADS, 0, job);
}

template <class T> static bool is_ssm_aligned(const struct ssm_args *args)
{
    return has_eights<T>(args->x) && has_eights<T>(args->b) && has_eights<T>(args->c) && has_eights<T>(args->out) &&
           (!args->gate.data || has_eights<T>(args->gate)) && args->head_dim % 8 == 0 && args->n_state % 8 == 0 &&
           state_is_aligned(&args->state, args->n_state);
}

/* Can inputs be normed here? */
template <class T> static bool can_norm(const struct cuda *cuda, const struct ssm_args *args)
{
    const struct matrix *matrix = args->dt_matrix;
    bool is_matrix = matrix && matrix->is_whole && matrix->parts[0].dtype == cuda->dtype && matrix->n_cols % 16 == 0 &&
                     matrix->n_cols <= MAX_RANK && matrix->parts[0].row_bytes % 16 == 0;
    uintptr_t norms = (uintptr_t)args->b_norm | (uintptr_t)args->c_norm | (uintptr_t)args->dt_norm;
    return cuda->dtype != DTYPE_F32 && is_matrix && norms % 16 == 0 && has_eights<T>(args->dt) && is_ssm_aligned<T>(args) &&
           has_eights<T>(args->scratch);
}

static bool is_normed_in_steps(const struct ssm_args *args)
{
    const struct batch_view *batch = args->batch;
    return batch->n_seqs == batch->n_rows && batch->n_rows < NORM_ROWS && args->n_state <= 4 * LANES * NORM_QUADS;
}

/* Places of the scratch: b, c, dt before and behind its matrix. */
struct scratch_places {
    struct view b, c, low, dt;
    scratch_places(const struct ssm_args *args, uint32_t item)
    {
        const uint32_t widths[4] = {args->b.width, args->c.width, args->dt.width, args->n_heads};
        struct view *const views[4] = {&b, &c, &low, &dt};
        char *at = (char *)args->scratch.data;
        for (uint32_t i = 0; i < 4; i++) {
            *views[i] = {at, widths[i], args->scratch.stride};
            at += (size_t)((widths[i] + 15) & ~15u) * item;
        }
    }
};

/* Computes norms and dt's product as separate operations. */
static enum rc norm_apart(struct cuda *cuda, const struct ssm_args *args, const struct scratch_places &to, struct err *err)
{
    uint32_t n_rows = args->batch->n_rows;
    struct rms_norm_args norms[3] = {{n_rows, 1, args->b, to.b, args->b_norm, args->norm_eps, 0},
                                     {n_rows, 1, args->c, to.c, args->c_norm, args->norm_eps, 0},
                                     {n_rows, 1, args->dt, to.low, args->dt_norm, args->norm_eps, 0}};
    struct linear_args linear = {};
    linear.matrix = args->dt_matrix;
    linear.n_rows = n_rows;
    linear.x = to.low;
    linear.y = to.dt;
    enum rc rc = RC_OK;
    for (uint32_t i = 0; i < 3 && !rc; i++)
        rc = cuda_rms_norm(cuda, &norms[i], err);
    return rc ? rc : cuda_linear(cuda, &linear, err);
}

template <class T>
static void norm_together(const struct cuda *cuda, const struct ssm_args *args, const struct scratch_places &to)
{
    input_job<T> job = {rows<T>(args->b), rows<T>(args->c), rows<T>(args->dt), rows<T>(to.b), rows<T>(to.c), rows<T>(to.dt),
                        args->b_norm, args->c_norm, args->dt_norm, args->norm_eps, args->dt_matrix->data,
                        args->dt_matrix->parts[0].row_bytes, args->dt_matrix->n_cols, args->batch->n_rows, args->n_heads};
    if constexpr (sizeof(T) == 2)
        launch(cuda, ssm_norm<T>, ceil_div(job.n_rows, TILE), THREADS, 0, job);
}

template <class T> static enum rc run_ssm(struct cuda *cuda, struct ssm_args args, struct err *err)
{
    if (args.b_norm && !(can_norm<T>(cuda, &args) && is_normed_in_steps(&args))) {
        const struct scratch_places to(&args, sizeof(T));
        enum rc rc = RC_OK;
        if (can_norm<T>(cuda, &args))
            norm_together<T>(cuda, &args, to);
        else
            rc = norm_apart(cuda, &args, to, err);
        if (rc)
            return rc;
        args.b = to.b;
        args.c = to.c;
        args.dt = to.dt;
        args.b_norm = NULL;
    }
    ssm_job<T> job = {sequences(args.batch), state_pool(args.state), rows<T>(args.x), rows<T>(args.dt), rows<T>(args.b),
                      rows<T>(args.c), rows<T>(args.gate), rows<T>(args.out), args.a_log, args.dt_bias, args.skip, args.dt_min,
                      args.dt_max, args.head_dim, args.n_state, args.n_heads / args.n_groups, ceil_div(args.head_dim, SLICE),
                      args.gate.data != NULL,
                      args.b_norm, args.c_norm, args.dt_norm, args.norm_eps, NULL, 0, 0};
    if (args.b_norm) {
        job.dt_rows = args.dt_matrix->data;
        job.dt_row_bytes = args.dt_matrix->parts[0].row_bytes;
        job.rank = args.dt_matrix->n_cols;
    }
    bool is_aligned = is_ssm_aligned<T>(&args);
    args.n_state <= 64 ? launch_ssm<1>(cuda, job, &args, is_aligned) :
    args.n_state <= 128 ? launch_ssm<2>(cuda, job, &args, is_aligned) : launch_ssm<MOST_QUADS>(cuda, job, &args, is_aligned);
    return launched(err, "ssm");
}

enum rc cuda_ssm(void *ctx, const struct ssm_args *args, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    if (!args->batch->n_rows)
        return RC_OK;
    if (args->gate.data && args->act != ACT_SILU)
        return gate_apart(cuda, *args, cuda_ssm, err);
    if (args->n_state > MAX_STATE)
        return err_set(err, RC_UNSUPPORTED, "ssm: wanted a state of at most %u columns, have %u", MAX_STATE, args->n_state);
    enum rc rc = RC_OK;
    visit_type(cuda->dtype, [&](auto value) { rc = run_ssm<decltype(value)>(cuda, *args, err); });
    return rc;
}
