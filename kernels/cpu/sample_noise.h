/* sample_noise.h: Gumbel noise from counter-based random numbers (Philox4x32-10). The noise of an id depends on (seed,
 * position, sample index, id) alone: key = seed, counter = (id / 4, position, sample index, 0), output id % 4. Included by
 * sample.c. */
#ifndef LLMPY_SAMPLE_NOISE_H
#define LLMPY_SAMPLE_NOISE_H

#include "simd.h"

struct noise {
    uint64_t seed;
    uint32_t position, sample_index;
};

/* The four outputs of LANES counters. */
V_INLINE void noise_block(const struct noise *noise, vi block, vi out[4])
{
    vi x = block, y = vi_set1(noise->position), z = vi_set1(noise->sample_index), w = vi_set1(0);
    uint32_t key0 = (uint32_t)noise->seed, key1 = (uint32_t)(noise->seed >> 32);
    vi m0 = vi_set1(0xD2511F53u), m1 = vi_set1(0xCD9E8D57u);
    for (int round = 0; round < 10; round++, key0 += 0x9E3779B9u, key1 += 0xBB67AE85u) {
        vi high0 = vi_mul_hi(m0, x), low0 = vi_mul_lo(m0, x), high1 = vi_mul_hi(m1, z), low1 = vi_mul_lo(m1, z);
        x = vi_xor(vi_xor(high1, y), vi_set1(key0));
        z = vi_xor(vi_xor(high0, w), vi_set1(key1));
        y = low1;
        w = low0;
    }
    out[0] = x;
    out[1] = y;
    out[2] = z;
    out[3] = w;
}

/* -log(-log1p(-v)), v = (u + 1/2) 2^-32 rounded, at most the greatest float below 1. So 0 < v < 1 for any rounding, and v is
 * finest near 0, where the winners lie. log1p(-v) is log of the rounded 1 - v plus a correction for that rounding. */
V_INLINE vf noise_gumbel(vi u)
{
    vf one = v_set1(1.0f);
    vf whole = v_fma(v_from_int(vi_shr(u, 16)), v_set1(65536.0f), v_from_int(vi_and(u, vi_set1(0xffff))));
    vf v = v_min(v_add(v_mul(whole, v_set1(0x1p-32f)), v_set1(0x1p-33f)), v_set1(0x1.fffffep-1f));
    vf rest = v_sub(one, v), lost = v_sub(v_sub(one, rest), v);
    vf exponential = v_neg(v_add(v_log(rest), v_div(lost, rest)));
    return v_neg(v_log(exponential));
}

/* Noise of the 4 * LANES ids from id on (a multiple of 4 * LANES), in the order of the ids. */
V_INLINE void noise_run(const struct noise *noise, uint32_t id, vf out[4])
{
    /* Lane 4 L + k takes the counter whose ids the transposition puts into lane group L of vector k. */
    vi lane = vi_lane(), group = vi_shr(lane, 2), k = vi_and(lane, vi_set1(3));
    vi block = vi_add(vi_set1(id / 4), vi_add(vi_mul_lo(k, vi_set1(LANES / 4)), group));
    vi u[4];
    noise_block(noise, block, u);
#if LANES == 16
    vi a = _mm512_unpacklo_epi32(u[0], u[1]), b = _mm512_unpackhi_epi32(u[0], u[1]);
    vi c = _mm512_unpacklo_epi32(u[2], u[3]), d = _mm512_unpackhi_epi32(u[2], u[3]);
    vi t[4] = {_mm512_unpacklo_epi64(a, c), _mm512_unpackhi_epi64(a, c), _mm512_unpacklo_epi64(b, d),
               _mm512_unpackhi_epi64(b, d)};
#else
    vi a = _mm256_unpacklo_epi32(u[0], u[1]), b = _mm256_unpackhi_epi32(u[0], u[1]);
    vi c = _mm256_unpacklo_epi32(u[2], u[3]), d = _mm256_unpackhi_epi32(u[2], u[3]);
    vi t[4] = {_mm256_unpacklo_epi64(a, c), _mm256_unpackhi_epi64(a, c), _mm256_unpacklo_epi64(b, d),
               _mm256_unpackhi_epi64(b, d)};
#endif
    for (int i = 0; i < 4; i++)
        out[i] = noise_gumbel(t[i]);
}

/* Noise of LANES arbitrary ids. */
V_INLINE vf noise_ids(const struct noise *noise, vi id)
{
    vi u[4], at = vi_and(id, vi_set1(3));
    noise_block(noise, vi_shr(id, 2), u);
    vi picked = vi_set1(0);
    for (uint32_t i = 0; i < 4; i++) {
        vm is_here = v_eq(v_from_int(at), v_set1((float)i));
        picked = v_bits(v_select(is_here, v_from_bits(u[i]), v_from_bits(picked)));
    }
    return noise_gumbel(picked);
}

#endif
