/* rows.h: functions of the CPU backend on one row of float32. The separate operation and every fused form call the same
 * function, so their bits are equal. A result depends on the row and its width alone. */
#ifndef LLMPY_ROWS_H
#define LLMPY_ROWS_H

#include "cpu.h"
#include "simd.h"

/* Sum of x[i]^2: four chains of LANES columns each, then ((0 + 1) + (2 + 3)), then v_hsum's tree. */
static inline float row_square_sum(const float *x, uint32_t n)
{
    vf sum[4] = {v_zero(), v_zero(), v_zero(), v_zero()};
    uint32_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        for (uint32_t j = 0; j < 4; j++) {
            vf v = v_load(x + i + j * LANES);
            sum[j] = v_fma(v, v, sum[j]);
        }
    for (uint32_t j = 0; i < n; j++, i += LANES) {
        vf v = v_load_n(x + i, n - i < LANES ? n - i : LANES);
        sum[j] = v_fma(v, v, sum[j]);
    }
    return v_hsum(v_add(v_add(sum[0], sum[1]), v_add(sum[2], sum[3])));
}

/* out = weight * (x * 1/sqrt(mean(x^2) + eps)), weight NULL: ones; out may be x. */
static inline void row_rms_norm(const float *x, const float *weight, float eps, uint32_t n, float *out)
{
    vf mean = v_add(v_div(v_set1(row_square_sum(x, n)), v_set1((float)n)), v_set1(eps));
    vf scale = v_div(v_set1(1.0f), v_sqrt(mean));
    uint32_t i = 0;
    for (; !weight && i < n; i += LANES) {
        uint32_t lanes = n - i < LANES ? n - i : LANES;
        v_store_n(out + i, v_mul(v_load_n(x + i, lanes), scale), lanes);
    }
    for (; i + LANES <= n; i += LANES)
        v_store(out + i, v_mul(v_load(weight + i), v_mul(v_load(x + i), scale)));
    if (i < n)
        v_store_n(out + i, v_mul(v_load_n(weight + i, n - i), v_mul(v_load_n(x + i, n - i), scale)), n - i);
}

/* erf within 2 ulp: x p(x^2) below 1, else 1 - e^(-x^2) q(|x|) with the sign of x (1 from 4 on); NaN stays. */
V_INLINE vf v_erf(vf x)
{
    vf size = v_min(v_set1(4.0f), v_abs(x)), square = v_mul(size, size);
    vf p = v_set1(0x1.496a32p-14f);
    p = v_fma(p, square, v_set1(-0x1.a3f700p-11f));
    p = v_fma(p, square, v_set1(0x1.5405b2p-8f));
    p = v_fma(p, square, v_set1(-0x1.b7f90ep-6f));
    p = v_fma(p, square, v_set1(0x1.ce2cf8p-4f));
    p = v_fma(p, square, v_set1(-0x1.81273ep-2f));
    p = v_fma(p, square, v_set1(0x1.20dd74p+0f));
    vf q = v_set1(0x1.c5ce76p-14f);
    q = v_fma(q, size, v_set1(-0x1.fa5f6cp-10f));
    q = v_fma(q, size, v_set1(0x1.f98392p-7f));
    q = v_fma(q, size, v_set1(-0x1.2bd154p-4f));
    q = v_fma(q, size, v_set1(0x1.da23b8p-3f));
    q = v_fma(q, size, v_set1(-0x1.0a4e84p-1f));
    q = v_fma(q, size, v_set1(0x1.ba3fd8p-1f));
    q = v_fma(q, size, v_set1(-0x1.14906ap+0f));
    q = v_fma(q, size, v_set1(0x1.fc15eep-1f));
    vf far = v_fnma(v_exp(v_neg(square)), q, v_set1(1.0f));
    vi sign = vi_and(v_bits(x), vi_set1(0x80000000u));
    return v_select(v_lt(v_abs(x), v_set1(1.0f)), v_mul(x, p), v_from_bits(vi_or(v_bits(far), sign)));
}

/* log(1 + e^x) = max(x, 0) + log1p(e^-|x|) within 3 ulp: log of the rounded sum and what the rounding lost; NaN stays. */
V_INLINE vf v_softplus(vf x)
{
    vf part = v_exp(v_neg(v_abs(x))), sum = v_add(v_set1(1.0f), part);
    vf lost = v_sub(part, v_sub(sum, v_set1(1.0f)));
    return v_add(v_max(v_zero(), x), v_add(v_log(sum), v_div(lost, sum)));
}

V_INLINE vf v_act(vf x, uint32_t act)
{
    vf one = v_set1(1.0f);
    switch (act) {
    case ACT_SILU:
        return v_div(x, v_add(one, v_exp(v_neg(x))));
    case ACT_GELU:
        return v_mul(v_mul(v_set1(0.5f), x), v_add(one, v_erf(v_mul(x, v_set1(0x1.6a09e6p-1f)))));
    case ACT_GELU_TANH: {
        vf inner = v_fma(v_mul(v_mul(x, x), x), v_set1(0.044715f), x);
        return v_mul(v_mul(v_set1(0.5f), x), v_add(one, v_tanh(v_mul(v_set1(0x1.988454p-1f), inner))));
    }
    case ACT_RELU:
        return v_max(v_zero(), x); /* a NaN stays */
    case ACT_TANH:
        return v_tanh(x);
    case ACT_IDENTITY:
        return x;
    case ACT_SIGMOID:
        return v_div(one, v_add(one, v_exp(v_neg(x))));
    case ACT_QUICK_GELU:
        return v_div(x, v_add(one, v_exp(v_mul(v_set1(-1.702f), x))));
    default: {
        vf positive = v_max(v_zero(), x);
        return v_mul(positive, positive);
    }
    }
}

V_INLINE void row_act_as(uint32_t act, const float *x, const float *up, uint32_t n, float *out)
{
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        vf y = v_act(v_load(x + i), act);
        v_store(out + i, up ? v_mul(y, v_load(up + i)) : y);
    }
    if (i < n) {
        vf y = v_act(v_load_n(x + i, n - i), act);
        v_store_n(out + i, up ? v_mul(y, v_load_n(up + i, n - i)) : y, n - i);
    }
}

/* out = act(x), times up if up is not NULL; out may be x or up. */
static inline void row_act(uint32_t act, const float *x, const float *up, uint32_t n, float *out)
{
    switch (act) {
    case ACT_SILU: row_act_as(ACT_SILU, x, up, n, out); return;
    case ACT_GELU: row_act_as(ACT_GELU, x, up, n, out); return;
    case ACT_GELU_TANH: row_act_as(ACT_GELU_TANH, x, up, n, out); return;
    case ACT_RELU: row_act_as(ACT_RELU, x, up, n, out); return;
    case ACT_TANH: row_act_as(ACT_TANH, x, up, n, out); return;
    case ACT_SIGMOID: row_act_as(ACT_SIGMOID, x, up, n, out); return;
    case ACT_IDENTITY: row_act_as(ACT_IDENTITY, x, up, n, out); return;
    case ACT_QUICK_GELU: row_act_as(ACT_QUICK_GELU, x, up, n, out); return;
    default: row_act_as(ACT_RELU2, x, up, n, out);
    }
}

/* out = act(gate) * up, one gate for the whole row; out may be up. */
static inline void row_scaled(uint32_t act, float gate, const float *up, uint32_t n, float *out)
{
    vf factor = v_act(v_set1(gate), act);
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES)
        v_store(out + i, v_mul(factor, v_load(up + i)));
    if (i < n)
        v_store_n(out + i, v_mul(factor, v_load_n(up + i, n - i)), n - i);
}

/* out = a + b; out may be either. */
static inline void row_add(const float *a, const float *b, uint32_t n, float *out)
{
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES)
        v_store(out + i, v_add(v_load(a + i), v_load(b + i)));
    if (i < n)
        v_store_n(out + i, v_add(v_load_n(a + i, n - i), v_load_n(b + i, n - i)), n - i);
}

#endif
