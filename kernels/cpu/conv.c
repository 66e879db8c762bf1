/* out_t[c] = act(bias[c] + sum over k < K of weight[c][k] * x_{t-K+1+k}[c]) along each sequence: [rows][channels] float32, one
 * fused chain from the bias over k upward. The state, [channel][K - 1], is the last inputs, oldest first. Bound at one row a
 * sequence by bytes (2 (K - 1) + K + 2 floats a channel), in a prompt by the activation's exponential: some 25 instructions
 * for LANES channels of a row. out may be x. */
#include "recurrent.h"

#define MAX_TAPS 16u

V_INLINE void conv_rows_as(const struct conv_args *args, const struct span *span, uint32_t first, uint32_t n, uint32_t n_taps)
{
    float tile[MAX_TAPS][LANES] = {{0}};
    vf weight[MAX_TAPS], window[MAX_TAPS];
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t k = 0; k < n_taps; k++)
            tile[k][i] = args->weight[(size_t)(first + i) * n_taps + k];
    for (uint32_t k = 0; k < n_taps; k++)
        weight[k] = v_load(tile[k]);
    state_load(&args->state, span, first, n, n_taps - 1, tile);
    for (uint32_t k = 0; k + 1 < n_taps; k++)
        window[k] = v_load(tile[k]);
    vf bias = args->bias ? v_load_n(args->bias + first, n) : v_zero();
    for (uint32_t row = span->first_row, end = row + span->n_rows; row < end; row++) {
        window[n_taps - 1] = v_load_n(row_at(&args->x, row, first), n);
        vf sum = bias;
        for (uint32_t k = 0; k < n_taps; k++)
            sum = v_fma(weight[k], window[k], sum);
        for (uint32_t k = 0; k + 1 < n_taps; k++)
            window[k] = window[k + 1];
        v_store_n(row_at(&args->out, row, first), args->has_act ? v_act(sum, args->act) : sum, n);
    }
    for (uint32_t k = 0; k + 1 < n_taps; k++)
        v_store(tile[k], window[k]);
    state_store(&args->state, span, first, n, n_taps - 1, tile);
}

static void conv_rows(const void *job_args, struct span span, uint32_t block)
{
    const struct conv_args *args = job_args;
    uint32_t first = block * LANES, left = args->x.width - first, n = left < LANES ? left : LANES;
    if (args->n_taps == 4)
        conv_rows_as(args, &span, first, n, 4);
    else if (args->n_taps == 3)
        conv_rows_as(args, &span, first, n, 3);
    else
        conv_rows_as(args, &span, first, n, args->n_taps);
}

enum rc K(conv)(struct cpu *cpu, const struct conv_args *args, struct err *err)
{
    if (args->n_taps > MAX_TAPS)
        return err_set(err, RC_UNSUPPORTED, "conv: wanted at most %u taps, have %u", MAX_TAPS, args->n_taps);
    struct recurrent_job job = {.n_blocks = (args->x.width + LANES - 1) / LANES, .batch = args->batch, .state = &args->state,
                                .args = args, .run = conv_rows};
    return run_blocks(cpu, job, 4 * args->x.width);
}
