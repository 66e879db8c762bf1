/* The gated delta rule, token by token, each value head with a state S [K][V] in float32:
 *   g = e^(-e^(a_log) softplus(a + dt_bias)), the decay
 *   q, k divided by sqrt(their sum of squares + 1e-6), q then times K^-1/2
 *   e[v] = sigmoid(b) (v[v] - sum over i of k[i] (g S[i][v]))  (the product with g rounded, one fused chain over i from 0)
 *   S[i][v] = g S[i][v] + k[i] e[v]  (one fma), out[v] = sum over i of q[i] S[i][v]  (one fused chain over i from 0)
 * Sums of squares are 16 chains, joined in v_hsum's order. Lanes are value channels. Bound at one row a sequence by the bytes
 * of the state (Qwen3-Next: 2 MiB a layer and sequence, some 120 us at 35 GB/s). Bound in a prompt by two passes over the
 * state in the first-level cache, 2 K V / LANES cycles for a row and head: 20 us a row of 32 heads of 128 x 128 on one core
 * with AVX-512. */
#include "recurrent.h"

#define MAX_KEY 512u

static float square_sum(const float *x, uint32_t n)
{
    float sum[16] = {0};
    for (uint32_t i = 0; i < n; i += 16)
        for (uint32_t j = 0; j < 16; j += LANES) {
            uint32_t left = i + j < n ? n - i - j : 0;
            vf v = v_load_n(x + i + j, left < LANES ? left : LANES);
            v_store(sum + j, v_fma(v, v, v_load(sum + j)));
        }
    vf joined = v_load(sum);
    if (LANES < 16)
        joined = v_add(joined, v_load(sum + 16 - LANES));
    return v_hsum(joined);
}

/* out = x / sqrt(sum of squares + 1e-6) * scale */
static void unit_length(const float *x, uint32_t n, vf scale, float *out)
{
    vf length = v_sqrt(v_add(v_set1(square_sum(x, n)), v_set1(1e-6f)));
    for (uint32_t i = 0; i < n; i += LANES) {
        uint32_t left = n - i < LANES ? n - i : LANES;
        v_store_n(out + i, v_mul(v_div(v_load_n(x + i, left), length), scale), left);
    }
}

V_INLINE void delta_channels(const void *job_args, const struct span *span, uint32_t head, uint32_t first, uint32_t n_vectors,
                           uint32_t n, float *state)
{
    const struct delta_args *args = job_args;
    uint32_t n_keys = args->key_dim, key = head / (args->n_heads / args->n_key_heads) * n_keys;
    uint32_t column = head * args->value_dim + first;
    vf rate = v_neg(v_exp(v_set1(args->a_log[head]))), bias = v_set1(args->dt_bias[head]), one = v_set1(1.0f);
    vf scale = v_div(one, v_sqrt(v_set1((float)n_keys)));
    float q[MAX_KEY], k[MAX_KEY];
    for (uint32_t row = span->first_row, end = row + span->n_rows; row < end; row++) {
        vf decay = v_exp(v_mul(rate, v_softplus(v_add(head_value(&args->a, row, head), bias))));
        vf beta = v_div(one, v_add(one, v_exp(v_neg(head_value(&args->b, row, head)))));
        vf error[WIDE], out[WIDE];
        unit_length(row_at(&args->q, row, key), n_keys, scale, q);
        unit_length(row_at(&args->k, row, key), n_keys, one, k);
        for (uint32_t i = 0; i < n_vectors; i++)
            error[i] = out[i] = v_zero();
        for (uint32_t j = 0; j < n_keys; j++)
            for (uint32_t i = 0; i < n_vectors; i++) {
                vf old = v_load_n(state + (size_t)j * args->value_dim + first + i * LANES, n);
                error[i] = v_fma(v_set1(k[j]), v_mul(decay, old), error[i]);
            }
        for (uint32_t i = 0; i < n_vectors; i++)
            error[i] = v_mul(beta, v_sub(v_load_n(row_at(&args->v, row, column + i * LANES), n), error[i]));
        for (uint32_t j = 0; j < n_keys; j++)
            for (uint32_t i = 0; i < n_vectors; i++) {
                float *at = state + (size_t)j * args->value_dim + first + i * LANES;
                vf now = v_fma(v_set1(k[j]), error[i], v_mul(decay, v_load_n(at, n)));
                v_store_n(at, now, n);
                out[i] = v_fma(v_set1(q[j]), now, out[i]);
            }
        for (uint32_t i = 0; i < n_vectors; i++)
            v_store_n(row_at(&args->out, row, column + i * LANES), out[i], n);
    }
}

static void delta_rows(const void *job_args, struct span span, uint32_t head)
{
    const struct delta_args *args = job_args;
    run_channels(delta_channels, args, &args->state, &span, head, args->value_dim);
}

enum rc K(delta)(struct cpu *cpu, const struct delta_args *args, struct err *err)
{
    if (args->key_dim > MAX_KEY)
        return err_set(err, RC_UNSUPPORTED, "delta: wanted key heads of at most %u, have %u", MAX_KEY, args->key_dim);
    struct recurrent_job job = {.n_blocks = args->n_heads, .batch = args->batch, .state = &args->state, .args = args,
                                .run = delta_rows};
    return run_blocks(cpu, job, 2 * args->v.width * args->key_dim);
}
