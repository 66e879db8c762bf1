/* The recurrence of Mamba, token by token, each channel c with a state of N floats:
 *   d = softplus(dt_c + dt_bias_c)
 *   S[n] = e^(-e^(a_log[c][n]) d) S[n] + (d x_c) B[n]  (the first product rounded, then one fma)
 *   y_c = skip_c x_c + sum over n of S[n] C[n]  (one fused chain over n from 0, then one fma)
 * Lanes are channels. States and rates of LANES channels stay in local arrays while the rows of a sequence are processed.
 * Bound by the exponentials: N for a channel and row, some 20 instructions for LANES of them; 8192 channels of 16 take 50 us a
 * row on one core with AVX-512. out may be x. */
#include "recurrent.h"

#define MAX_STATE 256u

static void scan_rows(const void *job_args, struct span span, uint32_t block)
{
    const struct selective_scan_args *args = job_args;
    uint32_t first = block * LANES, left = args->x.width - first, n = left < LANES ? left : LANES, n_state = args->n_state;
    float state[MAX_STATE][LANES], rate[MAX_STATE][LANES];
    for (uint32_t k = 0; k < n_state; k++)
        v_store(rate[k], v_zero());
    memset(state, 0, n_state * sizeof *state);
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t k = 0; k < n_state; k++)
            rate[k][i] = args->a_log[(size_t)(first + i) * n_state + k];
    for (uint32_t k = 0; k < n_state; k++)
        v_store(rate[k], v_neg(v_exp(v_load(rate[k]))));
    state_load(&args->state, &span, first, n, n_state, state);
    vf bias = args->dt_bias ? v_load_n(args->dt_bias + first, n) : v_zero(), skip = v_load_n(args->skip + first, n);
    for (uint32_t row = span.first_row, end = row + span.n_rows; row < end; row++) {
        vf step = v_softplus(v_add(v_load_n(row_at(&args->dt, row, first), n), bias));
        vf x = v_load_n(row_at(&args->x, row, first), n), input = v_mul(step, x), y = v_zero();
        const float *b = row_at(&args->b, row, 0), *c = row_at(&args->c, row, 0);
        for (uint32_t k = 0; k < n_state; k++) {
            vf decay = v_exp(v_mul(v_load(rate[k]), step));
            vf now = v_fma(input, v_set1(b[k]), v_mul(decay, v_load(state[k])));
            v_store(state[k], now);
            y = v_fma(now, v_set1(c[k]), y);
        }
        v_store_n(row_at(&args->out, row, first), v_fma(skip, x, y), n);
    }
    state_store(&args->state, &span, first, n, n_state, state);
}

enum rc K(selective_scan)(struct cpu *cpu, const struct selective_scan_args *args, struct err *err)
{
    if (args->n_state > MAX_STATE)
        return err_set(err, RC_UNSUPPORTED, "selective_scan: wanted a state of at most %u, have %u", MAX_STATE, args->n_state);
    struct recurrent_job job = {.n_blocks = (args->x.width + LANES - 1) / LANES, .batch = args->batch, .state = &args->state,
                                .args = args, .run = scan_rows};
    return run_blocks(cpu, job, 8 * args->x.width * args->n_state);
}
