/* out_t[c] = act(bias_c + sum over k of weight[c][k] x_{t - n_taps + 1 + k}[c]), one chain of float32 over k ascending,
 * rounded once. An act other than silu is a separate operation, so the sum is rounded before it, too. Channels are
 * independent. A unit of the state is a channel's last n_taps - 1 inputs, oldest first. A thread has eight channels of some
 * consecutive rows of the batch, whose inputs it keeps in registers. The thread that has the first row of a sequence takes all
 * rows that read its state, and writes the new state, so no thread waits for another. Bound by bytes: 8192 rows of 4096
 * bfloat16 channels take 31 us at 4.3 TB/s; one row of each of 256 sequences, whose states of 12 bytes a channel are read and
 * written, 8 us; few rows by latency, about 2 us. */
#include "../core/launch.cuh"
#include "state.cuh"

#define THREADS 128u
#define RUN 16u /* rows of a thread, where sequences have several */
#define MAX_TAPS 8u

template <class T> struct conv_job {
    struct sequences batch;
    struct state_pool state;
    rows<T> x, out;
    const float *weight, *bias;
    uint32_t n_rows, n_seqs, n_taps;
    bool is_silu;
    bool has_quads; /* eight units are six aligned fours of floats */
};

/* Inputs before a row, the oldest first: [i] is the one TAPS - 1 - i rows ago. */
template <uint32_t TAPS> struct history {
    float x[TAPS - 1][8];
};

/* Reads or writes the eight channels' units. */
template <uint32_t TAPS, bool IS_STORE, class T>
static __device__ __forceinline__ void move_state(struct history<TAPS> &h, const conv_job<T> &job, uint32_t seq,
                                                  uint32_t channel)
{
    uint32_t page = channel / job.state.units_per_page, u = channel - page * job.state.units_per_page;
    float *unit = job.state.in_page(seq, page, u);
    if (TAPS == 4 && job.has_quads) {
#pragma unroll
        for (uint32_t q = 0; q < 6; q++) {
            float4 *at = (float4 *)unit + q;
            float *of[4] = {&h.x[4 * q % 3][4 * q / 3], &h.x[(4 * q + 1) % 3][(4 * q + 1) / 3],
                            &h.x[(4 * q + 2) % 3][(4 * q + 2) / 3], &h.x[(4 * q + 3) % 3][(4 * q + 3) / 3]};
            if (IS_STORE) {
                *at = make_float4(*of[0], *of[1], *of[2], *of[3]);
            } else {
                float4 four = *at;
                *of[0] = four.x;
                *of[1] = four.y;
                *of[2] = four.z;
                *of[3] = four.w;
            }
        }
        return;
    }
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) {
        if (channel + i < job.x.width)
#pragma unroll
            for (uint32_t k = 0; k < TAPS - 1; k++)
                if (k + job.n_taps >= TAPS) {
                    float *at = unit + (k + job.n_taps - TAPS);
                    if (IS_STORE)
                        *at = h.x[k][i];
                    else
                        h.x[k][i] = *at;
                }
        unit += job.state.unit_bytes / sizeof *unit;
        if (++u == job.state.units_per_page && channel + i + 1 < job.x.width) {
            u = 0;
            unit = job.state.in_page(seq, ++page, 0);
        }
    }
}

template <uint32_t TAPS> static __device__ __forceinline__ void push(struct history<TAPS> &h, const float (&x)[8])
{
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) {
#pragma unroll
        for (uint32_t k = 0; k + 2 < TAPS; k++)
            h.x[k][i] = h.x[k + 1][i];
        h.x[TAPS - 2][i] = x[i];
    }
}

/* The last inputs of the sequence, which come from its rows here or, where these are few, from the state as it was. */
template <uint32_t TAPS, bool IS_ALIGNED, class T>
static __device__ __forceinline__ void leave_state(struct history<TAPS> h, const conv_job<T> &job, const struct span &span,
                                                   uint32_t channel)
{
    for (uint32_t i = span.n - min(span.n, TAPS - 1); i < span.n; i++) {
        float x[8];
        load_part<IS_ALIGNED>(job.x.at(span.first + i, 0), channel, job.x.width, x);
        push(h, x);
    }
    move_state<TAPS, true>(h, job, span.seq, channel);
}

/* Weights and bias of eight channels. */
template <uint32_t TAPS> struct taps {
    float w[TAPS][8], bias[8];
    template <class T> __device__ __forceinline__ taps(const conv_job<T> &job, uint32_t channel)
    {
#pragma unroll
        for (uint32_t i = 0; i < 8; i++) {
            bool is_there = channel + i < job.x.width;
            bias[i] = job.bias && is_there ? job.bias[channel + i] : 0.0f;
#pragma unroll
            for (uint32_t k = 0; k < TAPS; k++)
                w[k][i] = is_there && k + job.n_taps >= TAPS
                              ? job.weight[(size_t)(channel + i) * job.n_taps + k + job.n_taps - TAPS]
                              : 0.0f;
        }
    }
};

/* Takes the next row's inputs; h moves on by a row. */
template <uint32_t TAPS, bool IS_ALIGNED, class T>
static __device__ __forceinline__ void take_row(struct history<TAPS> &h, const struct taps<TAPS> &w, const conv_job<T> &job,
                                                const float (&x)[8], uint32_t row, uint32_t channel)
{
    float y[8];
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) {
        y[i] = w.bias[i];
#pragma unroll
        for (uint32_t k = 0; k + 1 < TAPS; k++)
            if (k + job.n_taps >= TAPS)
                y[i] = fmaf(w.w[k][i], h.x[k][i], y[i]);
        y[i] = fmaf(w.w[TAPS - 1][i], x[i], y[i]);
        y[i] = job.is_silu ? act_value(y[i], ACT_SILU) : y[i];
    }
    store_part<IS_ALIGNED>(job.out.at(row, 0), channel, job.out.width, y);
    push(h, x);
}

/* One row a sequence. */
template <class T, uint32_t TAPS, bool IS_ALIGNED>
static __global__ void __launch_bounds__(THREADS) conv_step(const conv_job<T> job)
{
    uint32_t channel = 8 * (blockIdx.x * THREADS + threadIdx.x), row = blockIdx.y;
    start_next();
    const struct span span = span_of(job.batch, row);
    struct history<TAPS> h = {};
    if (channel < job.x.width && !span.is_new)
        move_state<TAPS, false>(h, job, span.seq, channel);
    const struct taps<TAPS> w(job, channel);
    wait_for_input();
    if (channel >= job.x.width)
        return;
    float x[8];
    load_part<IS_ALIGNED>(job.x.at(row, 0), channel, job.x.width, x);
    take_row<TAPS, IS_ALIGNED>(h, w, job, x, row, channel);
    move_state<TAPS, true>(h, job, span.seq, channel);
}

/* The sequence of a row: the last one that begins at it or before. */
static __device__ __forceinline__ uint32_t sequence_of(const int32_t *first_row, uint32_t n_seqs, uint32_t row)
{
    uint32_t low = 0, high = n_seqs - 1;
    while (low < high) {
        uint32_t middle = (low + high + 1) / 2;
        if ((uint32_t)first_row[middle] <= row)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* The inputs before a row; at the first of its sequence also the state behind the last. */
template <uint32_t TAPS, bool IS_ALIGNED, class T>
static __device__ __forceinline__ void enter(struct history<TAPS> &h, const conv_job<T> &job, const struct span &span,
                                             uint32_t row, uint32_t channel)
{
    h = {};
    if (row == span.first) {
        if (!span.is_new)
            move_state<TAPS, false>(h, job, span.seq, channel);
        leave_state<TAPS, IS_ALIGNED>(h, job, span, channel);
        return;
    }
#pragma unroll
    for (uint32_t k = 0; k + 1 < TAPS; k++)
        load_part<IS_ALIGNED>(job.x.at(row - (TAPS - 1) + k, 0), channel, job.x.width, h.x[k]);
}

template <class T, uint32_t TAPS, bool IS_ALIGNED>
static __global__ void __launch_bounds__(THREADS) conv_prompt(const conv_job<T> job)
{
    uint32_t channel = 8 * (blockIdx.x * THREADS + threadIdx.x), row = blockIdx.y * RUN, end = min(row + RUN, job.n_rows);
    start_next();
    const struct taps<TAPS> w(job, channel);
    wait_for_input();
    if (channel >= job.x.width)
        return;
    for (uint32_t s = sequence_of(job.batch.first_row, job.n_seqs, row); row < end; s++) {
        const struct span span = span_of(job.batch, s);
        uint32_t own = span.first + min(span.n, TAPS - 1); /* end of the rows that the first row's thread takes */
        uint32_t last = min(span.first + span.n, end);
        if (row == span.first)
            last = max(last, own);
        else
            row = max(row, own);
        struct history<TAPS> h;
        if (row < last)
            enter<TAPS, IS_ALIGNED>(h, job, span, row, channel);
        float x[8], next[8];
        if (row < last)
            load_part<IS_ALIGNED>(job.x.at(row, 0), channel, job.x.width, next);
        for (; row < last; row++) {
            for (uint32_t i = 0; i < 8; i++)
                x[i] = next[i];
            if (row + 1 < last)
                load_part<IS_ALIGNED>(job.x.at(row + 1, 0), channel, job.x.width, next);
            take_row<TAPS, IS_ALIGNED>(h, w, job, x, row, channel);
        }
    }
}

/* ---- the call ------------------------------------------------------------------------------------------------------------ */

template <uint32_t TAPS, class T> static void launch_conv(const struct cuda *cuda, const conv_job<T> &job, bool is_aligned)
{
    bool is_step = !job.batch.first_row;
    dim3 grid(ceil_div(job.x.width, 8 * THREADS), is_step ? job.n_rows : ceil_div(job.n_rows, RUN));
    auto kernel = is_step      ? is_aligned && TAPS == 4 ? conv_step<T, 4, true> : conv_step<T, TAPS, false>
                  : is_aligned && TAPS == 4 ? conv_prompt<T, 4, true> : conv_prompt<T, TAPS, false>;
    launch(cuda, kernel, grid, THREADS, 0, job);
}

enum rc cuda_conv(void *ctx, const struct conv_args *args, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    const struct batch_view *batch = args->batch;
    if (!batch->n_rows)
        return RC_OK;
    if (args->n_taps < 2 || args->n_taps > MAX_TAPS)
        return err_set(err, RC_UNSUPPORTED, "conv: wanted 2 to %u taps, have %u", MAX_TAPS, args->n_taps);
    visit_type(cuda->dtype, [&](auto value) {
        using T = decltype(value);
        const struct state_view *state = &args->state;
        bool is_aligned = has_eights<T>(args->x) && has_eights<T>(args->out);
        bool is_whole = state->units_per_page % 8 == 0 || state->units_per_page >= args->x.width;
        bool has_quads = is_aligned && is_whole && args->n_taps == 4 && (uintptr_t)state->pool % 16 == 0 &&
                         state->page_bytes % 16 == 0;
        conv_job<T> job = {sequences(batch), state_pool(*state), rows<T>(args->x), rows<T>(args->out), args->weight, args->bias,
                           batch->n_rows, batch->n_seqs, args->n_taps, args->has_act && args->act == ACT_SILU, has_quads};
        args->n_taps <= 4 ? launch_conv<4>(cuda, job, is_aligned) : launch_conv<MAX_TAPS>(cuda, job, is_aligned);
    });
    enum rc rc = launched(err, "conv");
    struct act_args act = {};
    act.n_rows = batch->n_rows;
    act.act = args->act;
    act.x = act.out = args->out;
    return rc || !args->has_act || args->act == ACT_SILU ? rc : cuda_act(cuda, &act, err);
}
