/* The recurrence of Mamba-2 and PLaMo 2, token by token, each head h of P channels with a state [N][P] in float32:
 *   d = clamp(softplus(dt_h + dt_bias_h), dt_min, dt_max), decay = e^(-e^(a_log_h) d)
 *   S[n][p] = decay S[n][p] + (d x[p]) B[n]  (the product with decay rounded, then one fma)
 *   y[p] = skip_h x[p] + sum over n of S[n][p] C[n]  (one fused chain over n from 0, then one fma)
 * Lanes are channels p. Bound at one row a sequence by the state's bytes, read and written once (PLaMo-2-1B: 1 MiB a layer and
 * sequence, some 60 us at 35 GB/s), in a prompt by the stores of the state: N P / LANES cycles for a row and head. So 64 heads
 * of 64 x 128 take 10 us a row on one core with AVX-512. out may be x. */
#include "recurrent.h"

V_INLINE void ssm_channels(const void *job_args, const struct span *span, uint32_t head, uint32_t first, uint32_t n_vectors,
                           uint32_t n, float *state)
{
    const struct ssm_args *args = job_args;
    uint32_t group = head / (args->n_heads / args->n_groups) * args->n_state, column = head * args->head_dim + first;
    vf rate = v_neg(v_exp(v_set1(args->a_log[head]))), skip = v_set1(args->skip[head]);
    vf bias = v_set1(args->dt_bias[head]), low = v_set1(args->dt_min), high = v_set1(args->dt_max);
    for (uint32_t row = span->first_row, end = row + span->n_rows; row < end; row++) {
        vf step = v_softplus(v_add(head_value(&args->dt, row, head), bias));
        step = v_min(high, v_max(low, step));
        vf decay = v_exp(v_mul(rate, step)), x[WIDE], input[WIDE], y[WIDE];
        for (uint32_t i = 0; i < n_vectors; i++) {
            x[i] = v_load_n(row_at(&args->x, row, column + i * LANES), n);
            input[i] = v_mul(step, x[i]);
            y[i] = v_zero();
        }
        const float *b = row_at(&args->b, row, group), *c = row_at(&args->c, row, group);
        for (uint32_t k = 0; k < args->n_state; k++) {
            float *at = state + (size_t)k * args->head_dim + first;
            vf bk = v_set1(b[k]), ck = v_set1(c[k]);
            for (uint32_t i = 0; i < n_vectors; i++, at += LANES) {
                vf old = n == LANES ? v_load(at) : v_load_n(at, n);
                vf now = v_fma(input[i], bk, v_mul(decay, old));
                if (n == LANES)
                    v_store(at, now);
                else
                    v_store_n(at, now, n);
                y[i] = v_fma(now, ck, y[i]);
            }
        }
        for (uint32_t i = 0; i < n_vectors; i++)
            v_store_n(row_at(&args->out, row, column + i * LANES), v_fma(skip, x[i], y[i]), n);
    }
}

static void ssm_rows(const void *job_args, struct span span, uint32_t head)
{
    const struct ssm_args *args = job_args;
    run_channels(ssm_channels, args, &args->state, &span, head, args->head_dim);
}

enum rc K(ssm)(struct cpu *cpu, const struct ssm_args *args, struct err *err)
{
    (void)err;
    struct recurrent_job job = {.n_blocks = args->n_heads, .batch = args->batch, .state = &args->state, .args = args,
                                .run = ssm_rows};
    return run_blocks(cpu, job, args->x.width * args->n_state);
}
