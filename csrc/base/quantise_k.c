#include "quantise_k.h"

#include "dtype.h"
#include "round_number.h"

#include <math.h>
#include <string.h>

#define VALUES 256
#define SUBS 16 /* at most */

#define LEAST 0x1p-100f /* a divisor; float16 has no scale as small */
#define MOST 0x1p40f    /* a value; float16 has no scale as large, and no sum overflows */

static float divide(float a, float b)
{
    return fabsf(b) < LEAST ? 0 : a / b;
}

static bool is_small(const float *values)
{
    bool fits = true;
    for (int i = 0; i < VALUES; i++)
        fits = fits && fabsf(values[i]) < MOST;
    return fits;
}

/* To nearest even; the value is clamped first, so any is fine. */
static float nearest(float value, float least, float most)
{
    value = value < least ? least : value > most ? most : value;
    return value + ROUND_TO_INTEGER - ROUND_TO_INTEGER;
}

static float step_of(int i)
{
    return (float)(i - 10) / 10;
}

/* ---- one sub-block ----------------------------------------------------------------------------------------------------- */

struct fit {
    float scale, minimum, error;
};

/* The best scale and minimum m, both at least 0, of the numbers that x gives with a step: x is about scale * q - m. */
static struct fit fit_step(const float *x, int n, float low, float by, float largest)
{
    float q[32], sum_x = 0, sum_q = 0, sum_qq = 0, sum_qx = 0;
    for (int i = 0; i < n; i++) {
        q[i] = nearest((x[i] - low) * by, 0, largest);
        sum_x += x[i];
        sum_q += q[i];
        sum_qq += q[i] * q[i];
        sum_qx += q[i] * x[i];
    }
    struct fit fit = {divide((float)n * sum_qx - sum_q * sum_x, (float)n * sum_qq - sum_q * sum_q), 0, 0};
    fit.minimum = (fit.scale * sum_q - sum_x) / (float)n;
    if (fit.minimum < 0) {
        fit.scale = divide(sum_qx, sum_qq);
        fit.minimum = 0;
    }
    fit.scale = fit.scale < 0 ? 0 : fit.scale;
    for (int i = 0; i < n; i++) {
        float off = fit.scale * q[i] - fit.minimum - x[i];
        fit.error += off * off;
    }
    return fit;
}

static struct fit fit_with_minimum(const float *x, int n, float largest)
{
    float low = 0, high = x[0];
    for (int i = 0; i < n; i++) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
    }
    struct fit best = fit_step(x, n, low, divide(largest + step_of(0), high - low), largest);
    for (int i = 1; i <= 20; i++) {
        struct fit fit = fit_step(x, n, low, divide(largest + step_of(i), high - low), largest);
        best = fit.error < best.error ? fit : best;
    }
    return best;
}

/* The best scale, of either sign, for numbers from -32 to 31. */
static float fit_signed(const float *x, int n)
{
    float peak = x[0], best = 0, least = INFINITY;
    for (int i = 1; i < n; i++)
        peak = fabsf(x[i]) > fabsf(peak) ? x[i] : peak;
    for (int k = 0; k <= 20; k++) {
        float q[32], by = divide(-32 - step_of(k), peak), sum_qx = 0, sum_qq = 0, error = 0;
        for (int i = 0; i < n; i++) {
            q[i] = nearest(x[i] * by, -32, 31);
            sum_qx += q[i] * x[i];
            sum_qq += q[i] * q[i];
        }
        float scale = divide(sum_qx, sum_qq);
        for (int i = 0; i < n; i++)
            error += (scale * q[i] - x[i]) * (scale * q[i] - x[i]);
        best = error < least ? scale : best;
        least = error < least ? error : least;
    }
    return best;
}

/* ---- a block ------------------------------------------------------------------------------------------------------------- */

/* A float16 factor, and whole numbers of which the one of the largest magnitude is `largest`: products are about the values.
 * Returns false if float16 has no such factor. */
static bool share(const float *values, int n, float largest, uint8_t *half, float *factor, float *wholes)
{
    float peak = values[0];
    for (int i = 1; i < n; i++)
        peak = fabsf(values[i]) > fabsf(peak) ? values[i] : peak;
    float exact = peak / largest;
    dtype_from_float(DTYPE_F16, &exact, half, 1);
    dtype_to_float(DTYPE_F16, half, factor, 1);
    for (int i = 0; i < n && isfinite(*factor); i++)
        wholes[i] = nearest(divide(values[i], *factor), largest < 0 ? largest : 0, largest < 0 ? -largest - 1 : largest);
    return isfinite(*factor);
}

struct block {
    uint8_t d[2], dmin[2], q[VALUES];
    float scales[SUBS], minima[SUBS]; /* whole */
};

static bool with_minima(const float *x, int n_subs, float largest, float largest_scale, struct block *block)
{
    int n = VALUES / n_subs;
    float scales[SUBS], minima[SUBS], d, dmin;
    if (!is_small(x))
        return false;
    for (int s = 0; s < n_subs; s++) {
        struct fit fit = fit_with_minimum(x + s * n, n, largest);
        scales[s] = fit.scale;
        minima[s] = fit.minimum;
    }
    bool fits = share(scales, n_subs, largest_scale, block->d, &d, block->scales);
    fits = share(minima, n_subs, largest_scale, block->dmin, &dmin, block->minima) && fits;
    for (int i = 0; i < VALUES && fits; i++) {
        float step = d * block->scales[i / n], least = dmin * block->minima[i / n];
        block->q[i] = (uint8_t)nearest(divide(x[i] + least, step), 0, largest);
    }
    return fits;
}

bool quantise_q2_k(const float *values, uint8_t *to)
{
    struct block block;
    if (!with_minima(values, 16, 3, 15, &block))
        return false;
    for (int s = 0; s < 16; s++)
        to[s] = (uint8_t)((int)block.scales[s] | (int)block.minima[s] << 4);
    memset(to + 16, 0, 64);
    for (int i = 0; i < VALUES; i++)
        to[16 + i / 128 * 32 + i % 32] |= (uint8_t)(block.q[i] << i % 128 / 32 * 2);
    memcpy(to + 80, block.d, 2);
    memcpy(to + 82, block.dmin, 2);
    return true;
}

/* d, dmin, 8 scales and 8 minima of 6 bits, and at `low` the numbers' low four bits. */
static void put_six_bits(const struct block *block, uint8_t *to, uint8_t *low)
{
    memcpy(to, block->d, 2);
    memcpy(to + 2, block->dmin, 2);
    for (int s = 0; s < 4; s++) {
        int scale = (int)block->scales[s], minimum = (int)block->minima[s];
        int later_scale = (int)block->scales[s + 4], later_minimum = (int)block->minima[s + 4];
        to[4 + s] = (uint8_t)(scale | later_scale >> 4 << 6);
        to[8 + s] = (uint8_t)(minimum | later_minimum >> 4 << 6);
        to[12 + s] = (uint8_t)((later_scale & 15) | (later_minimum & 15) << 4);
    }
    for (int i = 0; i < VALUES / 2; i++) {
        const uint8_t *pair = block->q + i / 32 * 64 + i % 32;
        low[i] = (uint8_t)((pair[0] & 15) | (pair[32] & 15) << 4);
    }
}

bool quantise_q4_k(const float *values, uint8_t *to)
{
    struct block block;
    if (!with_minima(values, 8, 15, 63, &block))
        return false;
    put_six_bits(&block, to, to + 16);
    return true;
}

bool quantise_q5_k(const float *values, uint8_t *to)
{
    struct block block;
    if (!with_minima(values, 8, 31, 63, &block))
        return false;
    put_six_bits(&block, to, to + 48);
    memset(to + 16, 0, 32);
    for (int i = 0; i < VALUES; i++)
        to[16 + i % 32] |= (uint8_t)(block.q[i] >> 4 << i / 32);
    return true;
}

bool quantise_q6_k(const float *values, uint8_t *to)
{
    float scales[SUBS], wholes[SUBS], d;
    if (!is_small(values))
        return false;
    for (int s = 0; s < SUBS; s++)
        scales[s] = fit_signed(values + s * 16, 16);
    if (!share(scales, SUBS, -128, to + 208, &d, wholes))
        return false;
    memset(to, 0, 192);
    for (int i = 0; i < VALUES; i++) {
        uint8_t q = (uint8_t)(nearest(divide(values[i], d * wholes[i / 16]), -32, 31) + 32);
        int half = i / 128, part = i % 128 / 32, l = i % 32;
        to[half * 64 + part % 2 * 32 + l] |= (uint8_t)((q & 15) << part / 2 * 4);
        to[128 + half * 32 + l] |= (uint8_t)(q >> 4 << part * 2);
    }
    for (int s = 0; s < SUBS; s++)
        to[192 + s] = (uint8_t)(int8_t)wholes[s];
    return true;
}
