/* Selective scan (Mamba), token by token; channel c, column n, float32:
 *   d = softplus(dt_c + dt_bias_c), S[n] = exp(-exp(a_log[c][n]) d) S[n] + (d x_c) B_n,
 *   y_c = sum over n of S[n] C_n + skip_c x_c, rounded to the type of activations; with a gate z act(z) y of the rounded y,
 *   rounded again.
 * A unit of the state is a channel's [n_state]. Four lanes share a channel, a lane has the columns 4 (lane + 4 i) .. + 4: a sum
 * is a chain over these, i ascending, then pairwise over lanes 1, 2 apart. One token or thousands: the same operations in the
 * same order, with the state in registers meanwhile.
 * One row a sequence is bound by the state, read and written: 256 sequences of 5120 channels of 16 columns move 168 MB, 43 us
 * at the 3.94 TB/s of a copy. A prompt is bound by the exponentials, 4 lanes a cycle and scheduler: 8192 tokens of 5120
 * channels of 16 columns take 0.19 ms on 132 processors if all of them are busy. */
#include "../core/launch.cuh"
#include "state.cuh"

#define THREADS 128u
#define LANES 4u
#define CHANNELS (THREADS / LANES) /* of a block */
#define TOKENS 16u                 /* of a chunk */
#define PARTS (CHANNELS / 8)       /* eights of a block's channels */
#define MOST_QUADS 4u
#define MAX_STATE (4 * LANES * MOST_QUADS)

template <class T> struct scan_job {
    struct sequences batch;
    struct state_pool state;
    rows<T> x, dt, b, c, z, out;
    const float *a_log, *dt_bias, *skip;
    uint32_t n_state;
    bool has_gate; /* silu(z) */
};

/* 2^x, tiny results 0. */
static __device__ __forceinline__ float power_of_two(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* The lane's columns of its channel. */
template <uint32_t QUADS> struct columns {
    alignas(16) float s[4 * QUADS], rate[4 * QUADS]; /* the state; -exp(a_log) / ln 2 */
};

static __device__ __forceinline__ uint32_t column_of(uint32_t i)
{
    return 4 * (threadIdx.x % LANES + LANES * (i / 4)) + i % 4;
}

template <bool IS_ALIGNED, uint32_t QUADS, class T>
static __device__ __forceinline__ void load_columns(struct columns<QUADS> &own, const scan_job<T> &job, const struct span &span,
                                                    uint32_t channel)
{
    const bool is_there = channel < job.x.width;
    const float *unit = is_there && !span.is_new ? job.state.unit(span.seq, channel) : NULL;
#pragma unroll
    for (uint32_t q = 0; q < QUADS; q++) {
        uint32_t n = column_of(4 * q);
        *(float4 *)(own.s + 4 * q) = unit ? load_quad<IS_ALIGNED>(unit, n, job.n_state) : make_float4(0, 0, 0, 0);
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            own.rate[4 * q + i] = is_there && n + i < job.n_state
                                      ? -expf(job.a_log[(size_t)channel * job.n_state + n + i]) * 0x1.715476p+0f
                                      : 0.0f;
    }
}

template <bool IS_ALIGNED, uint32_t QUADS, class T>
static __device__ __forceinline__ void store_columns(const struct columns<QUADS> &own, const scan_job<T> &job,
                                                     const struct span &span, uint32_t channel)
{
    if (channel >= job.x.width)
        return;
    float *unit = job.state.unit(span.seq, channel);
#pragma unroll
    for (uint32_t q = 0; q < QUADS; q++)
        store_quad<IS_ALIGNED>(unit, column_of(4 * q), job.n_state, *(const float4 *)(own.s + 4 * q));
}

/* One token; b and c: of all columns. */
template <uint32_t QUADS>
static __device__ __forceinline__ float advance(struct columns<QUADS> &own, const float *b, const float *c, float d, float x)
{
    float dx = d * x, sum = 0;
#pragma unroll
    for (uint32_t q = 0; q < QUADS; q++) {
        float4 bq = *(const float4 *)(b + column_of(4 * q)), cq = *(const float4 *)(c + column_of(4 * q));
        const float bs[4] = {bq.x, bq.y, bq.z, bq.w}, cs[4] = {cq.x, cq.y, cq.z, cq.w};
#pragma unroll
        for (uint32_t j = 0; j < 4; j++) {
            uint32_t i = 4 * q + j;
            own.s[i] = fmaf(dx, bs[j], power_of_two(own.rate[i] * d) * own.s[i]);
            sum = fmaf(own.s[i], cs[j], sum);
        }
    }
    return sum;
}

template <class T> static __device__ __forceinline__ T ended(const scan_job<T> &job, float sum, float skip, float x, float z)
{
    T value = round_to<T>(fmaf(skip, x, sum));
    return job.has_gate ? round_to<T>(act_value(z, ACT_SILU) * to_float(value)) : value;
}

template <class T, uint32_t QUADS, bool IS_ALIGNED>
static __global__ void __launch_bounds__(THREADS) selective_scan_step(const scan_job<T> job)
{
    __shared__ __align__(16) float b[4 * LANES * QUADS], c[4 * LANES * QUADS];
    struct columns<QUADS> own;
    start_next();
    uint32_t row = blockIdx.y, t = threadIdx.x, channel = blockIdx.x * CHANNELS + t / LANES;
    const struct span span = span_of(job.batch, row);
    const bool is_there = channel < job.x.width;
    load_columns<IS_ALIGNED>(own, job, span, channel);
    float bias = is_there && job.dt_bias ? job.dt_bias[channel] : 0.0f, skip = is_there ? job.skip[channel] : 0.0f;
    wait_for_input();
    if (t < 4 * LANES * QUADS) {
        b[t] = t < job.n_state ? to_float(*job.b.at(row, t)) : 0.0f;
        c[t] = t < job.n_state ? to_float(*job.c.at(row, t)) : 0.0f;
    }
    float d = is_there ? softplus(to_float(*job.dt.at(row, channel)) + bias) : 0.0f;
    float x = is_there ? to_float(*job.x.at(row, channel)) : 0.0f, z = 0;
    if (is_there && job.has_gate)
        z = to_float(*job.z.at(row, channel));
    __syncthreads();
    float sums[1] = {advance(own, b, c, d, x)};
    float sum = group_sums<LANES>(sums);
    if (is_there && t % LANES == 0)
        *job.out.at(row, channel) = ended(job, sum, skip, x, z);
    store_columns<IS_ALIGNED>(own, job, span, channel);
}

/* ---- any rows ------------------------------------------------------------------------------------------------------------ */

/* The part of a chunk that a thread reads: eight values each of B, C, x, dt and z. */
template <class T> struct inputs {
    eight<T> b, c, x, dt, z;
};

/* Inputs of some tokens; the sums take the place of x. */
template <uint32_t QUADS> struct chunk {
    __align__(16) float b[TOKENS][4 * LANES * QUADS], c[TOKENS][4 * LANES * QUADS];
    __align__(16) float x[TOKENS][CHANNELS], d[TOKENS][CHANNELS];
};

/* A thread's part in chunks: threads below 32 QUADS read B and C (with 4 QUADS all do), the upper half x, dt and z. */
template <uint32_t QUADS> struct part {
    uint32_t token, column, x_token, x_column;
    bool has_columns, has_x;
    __device__ part(void)
        : token(threadIdx.x / (2 * QUADS)), column(threadIdx.x % (2 * QUADS) * 8),
          x_token((threadIdx.x - THREADS / 2) / PARTS), x_column(threadIdx.x % PARTS * 8), has_columns(token < TOKENS),
          has_x(threadIdx.x >= THREADS / 2)
    {
    }
};

template <bool IS_ALIGNED, uint32_t QUADS, class T>
static __device__ __forceinline__ void read_inputs(struct inputs<T> &in, const scan_job<T> &job, const struct part<QUADS> &my,
                                                   uint32_t row, uint32_t n)
{
    const uint32_t channel = blockIdx.x * CHANNELS + my.x_column;
    if (my.has_columns && my.token < n) {
        in.b = part_of<IS_ALIGNED>(job.b.at(row + my.token, 0), my.column, job.n_state);
        in.c = part_of<IS_ALIGNED>(job.c.at(row + my.token, 0), my.column, job.n_state);
    }
    if (my.has_x && my.x_token < n) {
        in.x = part_of<IS_ALIGNED>(job.x.at(row + my.x_token, 0), channel, job.x.width);
        in.dt = part_of<IS_ALIGNED>(job.dt.at(row + my.x_token, 0), channel, job.x.width);
        if (job.has_gate)
            in.z = part_of<IS_ALIGNED>(job.z.at(row + my.x_token, 0), channel, job.x.width);
    }
}

template <uint32_t QUADS, class T>
static __device__ __forceinline__ void stage_inputs(struct chunk<QUADS> &m, const struct inputs<T> &in,
                                                    const struct part<QUADS> &my, const float (&bias)[8])
{
    float x[8];
    if (my.has_columns) {
        to_floats(in.b, x);
        store_eight(&m.b[my.token][my.column], x);
        to_floats(in.c, x);
        store_eight(&m.c[my.token][my.column], x);
    }
    if (my.has_x) {
        to_floats(in.x, x);
        store_eight(&m.x[my.x_token][my.x_column], x);
        to_floats(in.dt, x);
#pragma unroll
        for (uint32_t i = 0; i < 8; i++)
            x[i] = softplus(x[i] + bias[i]);
        store_eight(&m.d[my.x_token][my.x_column], x);
    }
}

/* N times LANES tokens from `token` on; a lane ends N sums. */
template <uint32_t N, uint32_t QUADS>
static __device__ __forceinline__ void take_tokens(struct columns<QUADS> &own, struct chunk<QUADS> &m, uint32_t token)
{
    const uint32_t group = threadIdx.x / LANES;
    float sums[N][LANES], sum[N];
#pragma unroll
    for (uint32_t i = 0; i < N * LANES; i++)
        sums[i / LANES][i % LANES] =
            advance(own, m.b[token + i], m.c[token + i], m.d[token + i][group], m.x[token + i][group]);
#pragma unroll
    for (uint32_t i = 0; i < N; i++)
        sum[i] = group_sums<LANES>(sums[i]);
    __syncwarp();
#pragma unroll
    for (uint32_t i = 0; i < N; i++)
        m.x[token + i * LANES + sum_index<LANES>()][group] = sum[i];
}

template <uint32_t QUADS>
static __device__ __forceinline__ void take_token(struct columns<QUADS> &own, struct chunk<QUADS> &m, uint32_t token)
{
    const uint32_t group = threadIdx.x / LANES;
    float sums[1] = {advance(own, m.b[token], m.c[token], m.d[token][group], m.x[token][group])};
    const float sum = group_sums<LANES>(sums);
    __syncwarp();
    if (threadIdx.x % LANES == 0)
        m.x[token][group] = sum;
}

template <class T, uint32_t QUADS, bool IS_ALIGNED>
static __global__ void __launch_bounds__(THREADS) selective_scan_prompt(const scan_job<T> job)
{
    const uint32_t at_once = QUADS == 1 ? 2 : 1; /* times LANES tokens */
    __shared__ struct chunk<QUADS> m[2];
    struct columns<QUADS> own;
    struct inputs<T> in = {};
    float bias[8], skip[8];
    start_next();
    const uint32_t first_channel = blockIdx.x * CHANNELS, channel = first_channel + threadIdx.x / LANES;
    const struct part<QUADS> my;
    const struct span span = span_of(job.batch, blockIdx.y);
    load_columns<IS_ALIGNED>(own, job, span, channel);
    for (uint32_t i = 0; i < 8; i++) {
        uint32_t c = first_channel + my.x_column + i;
        bias[i] = job.dt_bias && c < job.x.width ? job.dt_bias[c] : 0.0f;
        skip[i] = c < job.x.width ? job.skip[c] : 0.0f;
    }
    eight<T> x = {}, z = {}, last_x = {}, last_z = {}; /* of the chunk that is staged next, and of the one before it */
    wait_for_input();
    walk_chunks<TOKENS, at_once * LANES>(
        span.n,
        [&](uint32_t first) {
            last_x = x;
            last_z = z;
            x = in.x;
            z = in.z;
            if (first < span.n)
                read_inputs<IS_ALIGNED>(in, job, my, span.first + first, span.n - first);
        },
        [&](uint32_t place) { stage_inputs(m[place], in, my, bias); },
        [&](uint32_t place, uint32_t token) { take_tokens<at_once>(own, m[place], token); },
        [&](uint32_t place, uint32_t token) { take_token(own, m[place], token); },
        [&](uint32_t place, uint32_t first, uint32_t n) {
            if (!my.has_x || my.x_token >= n)
                return;
            float y[8];
#pragma unroll
            for (uint32_t i = 0; i < 8; i++)
                y[i] = to_float(ended(job, m[place].x[my.x_token][my.x_column + i], skip[i], to_float(last_x.values[i]),
                                      to_float(last_z.values[i])));
            store_part<IS_ALIGNED>(job.out.at(span.first + first + my.x_token, 0), first_channel + my.x_column, job.out.width,
                                   y);
        });
    store_columns<IS_ALIGNED>(own, job, span, channel);
}

/* ---- the call ------------------------------------------------------------------------------------------------------------ */

template <uint32_t QUADS, class T>
static void launch_scan(const struct cuda *cuda, const scan_job<T> &job, uint32_t n_seqs, bool is_aligned)
{
    dim3 grid(ceil_div(job.x.width, CHANNELS), n_seqs);
    auto kernel = job.batch.first_row
                      ? is_aligned ? selective_scan_prompt<T, QUADS, true> : selective_scan_prompt<T, MOST_QUADS, false>
                  : is_aligned ? selective_scan_step<T, QUADS, true>
                               : selective_scan_step<T, MOST_QUADS, false>;
    launch(cuda, kernel, grid, THREADS, 0, job);
}

enum rc cuda_selective_scan(void *ctx, const struct selective_scan_args *args, struct err *err)
{
    if (args->gate.data && args->act != ACT_SILU)
        return gate_apart((struct cuda *)ctx, *args, cuda_selective_scan, err);
    if (args->n_state > MAX_STATE)
        return err_set(err, RC_UNSUPPORTED, "selective_scan: wanted a state of at most %u columns, have %u", MAX_STATE,
                       args->n_state);
    return run_rows(ctx, args->batch->n_rows, "selective_scan", err, [&](struct cuda *cuda, auto value) {
        using T = decltype(value);
        const struct view &gate = args->gate.data ? args->gate : args->x;
        scan_job<T> job = {sequences(args->batch), state_pool(args->state), rows<T>(args->x), rows<T>(args->dt),
                           rows<T>(args->b), rows<T>(args->c), rows<T>(gate), rows<T>(args->out), args->a_log, args->dt_bias,
                           args->skip, args->n_state, args->gate.data != NULL};
        bool is_aligned = has_eights<T>(args->x) && has_eights<T>(args->dt) && has_eights<T>(args->b) &&
                          has_eights<T>(args->c) && has_eights<T>(gate) && has_eights<T>(args->out) &&
                          state_is_aligned(&args->state, args->n_state);
        uint32_t n_seqs = args->batch->n_seqs;
        args->n_state <= 4 * LANES ? launch_scan<1>(cuda, job, n_seqs, is_aligned)
                                   : launch_scan<MOST_QUADS>(cuda, job, n_seqs, is_aligned);
    });
}
