/* sample_select.h: exact thresholds and best-of lists without sorting the vocabulary. Included by sample.c. */
#ifndef LLMPY_SAMPLE_SELECT_H
#define LLMPY_SAMPLE_SELECT_H

#include "simd.h"

#include <math.h>
#include <stdbool.h>

/* A candidate's logit and its weight: 1 if candidates are counted, exp(z - greatest) 2^40 if their mass is summed. Masses are
 * summed as integers, so that sums do not depend on the order of the selection. */
struct candidate {
    float z, w;
};

static inline int64_t candidate_mass(const struct candidate *c, bool is_count)
{
    return is_count ? 1 : (int64_t)(c->w * 0x1p40f);
}

static inline void candidate_swap(struct candidate *a, struct candidate *b)
{
    struct candidate kept = *a;
    *a = *b;
    *b = kept;
}

/* The greatest z such that the candidates at or above it weigh `need` or more together, or the least z if all candidates weigh
 * less. n >= 1. Reorders the candidates. Expected time is linear; the pivots come from a fixed sequence. */
static float candidates_threshold(struct candidate *c, uint32_t n, int64_t need, bool is_count)
{
    uint32_t state = 0x9E3779B9u;
    for (;;) {
        state = state * 1664525u + 1013904223u;
        float pivot = c[(uint64_t)state * n >> 32].z;
        uint32_t above = 0, i = 0, below = n; /* [0, above) > pivot, [above, i) == pivot, [below, n) < pivot */
        int64_t mass_above = 0, mass_equal = 0;
        while (i < below) {
            if (c[i].z > pivot) {
                mass_above += candidate_mass(&c[i], is_count);
                candidate_swap(&c[above++], &c[i++]);
            } else if (c[i].z < pivot) {
                candidate_swap(&c[i], &c[--below]);
            } else {
                mass_equal += candidate_mass(&c[i++], is_count);
            }
        }
        if (above && mass_above >= need) {
            n = above;
        } else if (mass_above + mass_equal >= need || below == n) {
            return pivot;
        } else {
            need -= mass_above + mass_equal;
            c += below;
            n -= below;
        }
    }
}

/* The n_top best so far, descending, ties in the order of arrival; unused places hold id `none` and -inf. */
struct best_list {
    int32_t *ids;
    float *values;
    uint32_t n_top;
};

static void best_clear(struct best_list *best, int32_t none)
{
    for (uint32_t i = 0; i < best->n_top; i++) {
        best->ids[i] = none;
        best->values[i] = -INFINITY;
    }
}

static void best_offer(struct best_list *best, int32_t id, float z)
{
    uint32_t i = best->n_top;
    if (!i || !(z > best->values[i - 1]))
        return;
    for (i--; i > 0 && z > best->values[i - 1]; i--) {
        best->values[i] = best->values[i - 1];
        best->ids[i] = best->ids[i - 1];
    }
    best->values[i] = z;
    best->ids[i] = id;
}

/* Offers z[0..n) with their indices as ids. */
static void best_scan(struct best_list *best, const float *z, uint32_t n)
{
    if (!best->n_top)
        return;
    const float *least = &best->values[best->n_top - 1];
    for (uint32_t i = 0; i < n; i += LANES) {
        uint32_t part = n - i < LANES ? n - i : LANES;
        uint32_t larger = v_mask(v_lt(v_set1(*least), v_load_n(z + i, part))) & v_mask(v_first(part));
        for (; larger; larger &= larger - 1) {
            uint32_t id = i + (uint32_t)__builtin_ctz(larger);
            best_offer(best, (int32_t)id, z[id]);
        }
    }
}

static uint32_t count_larger(const float *z, uint32_t n, float than)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < n; i += LANES) {
        uint32_t part = n - i < LANES ? n - i : LANES;
        vm larger = v_lt(v_set1(than), v_load_n(z + i, part));
        count += (uint32_t)__builtin_popcount(v_mask(larger) & v_mask(v_first(part)));
    }
    return count;
}

/* The lowest index whose value is `value`; n if there is none. */
static uint32_t find_equal(const float *z, uint32_t n, float value)
{
    for (uint32_t i = 0; i < n; i += LANES) {
        uint32_t part = n - i < LANES ? n - i : LANES;
        uint32_t equal = v_mask(v_eq(v_set1(value), v_load_n(z + i, part))) & v_mask(v_first(part));
        if (equal)
            return i + (uint32_t)__builtin_ctz(equal);
    }
    return n;
}

#endif
