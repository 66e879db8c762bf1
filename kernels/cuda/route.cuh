/* route.cuh: the routes of a row, by one warp: lane l has experts l, l + 32, ...; sums over experts run in a lane first and
 * meet in a tree, sums over the chosen run in their order. */
#ifndef LLMPY_CUDA_ROUTE_CUH
#define LLMPY_CUDA_ROUTE_CUH

#include "common.cuh"

#define ROUTE_MAX_CHOSEN 16u
#define ALL_LANES 0xffffffffu
#define BEST_UNUSED 32u /* of BEST_PLACES, from here on one a lane: what is written there is not read */
#define BEST_PLACES 64u

static __device__ __forceinline__ float sum_lanes(float x)
{
    for (uint32_t step = 16; step; step /= 2)
        x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

/* Orders as floats do, a NaN before all; 0 is left for what is out of the choice. */
static __device__ __forceinline__ uint32_t key_of(float x)
{
    uint32_t bits = __float_as_uint(x + 0.0f); /* -0 is 0 */
    return x == x ? bits ^ (bits >> 31 ? ~0u : 1u << 31) : 1;
}

/* A NaN if all are. */
static __device__ __forceinline__ float max_lanes(float x)
{
    uint32_t key = __reduce_max_sync(ALL_LANES, key_of(x));
    return __uint_as_float(key ^ (key >> 31 ? 1u << 31 : ~0u));
}

/* best[i], i below n: the expert of the i-th greatest key, and its score. Where several lanes have the greatest key each of
 * them takes the place, and the careful form lets the lowest expert have it. Gives how many were taken. */
template <bool IS_CAREFUL, uint32_t N>
static __device__ __forceinline__ uint32_t take_turns(const uint32_t (&keys)[N], const float (&scores)[N], uint32_t n,
                                                      struct route *best, uint32_t lane)
{
    uint32_t left[N], n_taken = 0;
#pragma unroll
    for (uint32_t i = 0; i < N; i++)
        left[i] = keys[i];
#pragma unroll(IS_CAREFUL ? 1 : 4)
    for (uint32_t turn = 0; turn < n; turn++) {
        uint32_t key = left[0], at = 0;
        float score = scores[0];
#pragma unroll
        for (uint32_t i = 1; i < N; i++) {
            bool is_more = left[i] > key;
            key = is_more ? left[i] : key;
            at = is_more ? i : at;
            score = is_more ? scores[i] : score;
        }
        uint32_t expert = lane + 32 * at;
        bool is_best = key == __reduce_max_sync(ALL_LANES, key);
        if (IS_CAREFUL)
            is_best = expert == __reduce_min_sync(ALL_LANES, is_best ? expert : ALL_LANES);
        best[is_best ? turn : BEST_UNUSED + lane] = {(int32_t)expert, score};
        n_taken += is_best;
#pragma unroll
        for (uint32_t i = 0; i < N; i++)
            left[i] = is_best && i == at ? 0 : left[i];
    }
    __syncwarp();
    return __reduce_add_sync(ALL_LANES, n_taken);
}

/* The n best, of equal ones that of the lowest expert, which is rare. */
template <uint32_t N>
static __device__ __forceinline__ void take_best(const uint32_t (&keys)[N], const float (&scores)[N], uint32_t n,
                                                 struct route *best, uint32_t lane)
{
    if (take_turns<false>(keys, scores, n, best, lane) != n)
        take_turns<true>(keys, scores, n, best, lane);
}

/* Takes the experts of all but the best groups out of the choice; lane g has group g. */
template <uint32_t N>
static __device__ void keep_groups(const struct route_args &a, const float (&choices)[N], uint32_t (&keys)[N], float *shared,
                                   struct route *best, uint32_t lane)
{
    uint32_t size = a.n_experts / a.n_groups, group_keys[1] = {};
    const float none[1] = {};
#pragma unroll
    for (uint32_t i = 0; i < N; i++)
        if (lane + 32 * i < a.n_experts)
            shared[lane + 32 * i] = choices[i];
    __syncwarp();
    if (lane < a.n_groups) {
        float first = -INFINITY, second = -INFINITY;
        for (uint32_t i = 0; i < size; i++) {
            float x = shared[lane * size + i];
            second = fmaxf(second, fminf(first, x));
            first = fmaxf(first, x);
        }
        group_keys[0] = key_of(a.sums_two && size > 1 ? first + second : first);
    }
    take_best(group_keys, none, a.chosen_groups, best, lane);
    uint32_t kept = __reduce_or_sync(ALL_LANES, lane < a.chosen_groups ? 1u << best[lane].expert : 0);
#pragma unroll
    for (uint32_t i = 0; i < N; i++)
        keys[i] = kept >> min((lane + 32 * i) / size, 31u) & 1 ? keys[i] : 0;
}

static __device__ __noinline__ float sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

template <uint32_t N>
static __device__ __forceinline__ void score_experts(const struct route_args &a, const float (&logits)[N], float (&scores)[N])
{
    float most = logits[0], sum = 0;
#pragma unroll
    for (uint32_t i = 0; i < N; i++) {
        most = fmaxf(most, logits[i]);
        scores[i] = a.score == ROUTE_SIGMOID ? sigmoid(logits[i]) : logits[i];
    }
    if (a.score != ROUTE_SOFTMAX)
        return;
    most = max_lanes(most);
#pragma unroll
    for (uint32_t i = 0; i < N; i++) {
        scores[i] = expf(logits[i] - most);
        sum += scores[i];
    }
    sum = sum_lanes(sum);
#pragma unroll
    for (uint32_t i = 0; i < N; i++)
        scores[i] /= sum;
}

/* The weight of the lane's chosen expert; lanes from n_chosen on have none. */
static __device__ __forceinline__ float weight_of(const struct route_args &a, float score, uint32_t lane)
{
    if (a.score == ROUTE_CHOSEN_SIGMOID)
        score = sigmoid(score);
    if (a.score == ROUTE_CHOSEN_SOFTMAX)
        score = expf(score - max_lanes(lane < a.n_chosen ? score : -INFINITY));
    score = lane < a.n_chosen ? score : 0;
    float sum = 0;
    for (uint32_t first = 0; first < a.n_chosen; first += 8)
#pragma unroll
        for (uint32_t i = 0; i < 8; i++)
            sum += __shfl_sync(ALL_LANES, score, first + i);
    if (a.score == ROUTE_CHOSEN_SOFTMAX || a.is_normalised)
        score /= a.score == ROUTE_CHOSEN_SOFTMAX ? sum : sum + a.sum_eps;
    return score * a.scale;
}

/* The routes of a row from its lane's logits, -INFINITY where there is no expert, and what is added for the choice. best:
 * BEST_PLACES; shared: for all experts' choices, where there are groups. */
template <uint32_t N, bool HAS_GROUPS>
static __device__ __forceinline__ void route_row(const struct route_args &a, const float (&logits)[N], float (&choices)[N],
                                                 struct route *routes, struct route *best, float *shared, uint32_t lane)
{
    float scores[N];
    uint32_t keys[N];
    score_experts(a, logits, scores);
#pragma unroll
    for (uint32_t i = 0; i < N; i++) {
        choices[i] += scores[i];
        keys[i] = lane + 32 * i < a.n_experts ? key_of(choices[i]) : 0;
    }
    if (HAS_GROUPS && a.n_groups > 1) {
        keep_groups(a, choices, keys, shared, best, lane);
        __syncwarp();
    }
    take_best(keys, scores, a.n_chosen, best, lane);
    struct route route = best[lane < a.n_chosen ? lane : 0];
    route.weight = weight_of(a, route.weight, lane);
    if (lane < a.n_chosen)
        routes[lane] = route;
}

/* What is added to the lane's scores for the choice. */
template <uint32_t N>
static __device__ __forceinline__ void read_choice_bias(const struct route_args &a, float (&choices)[N], uint32_t lane)
{
#pragma unroll
    for (uint32_t i = 0; i < N; i++)
        choices[i] = a.selection_bias && lane + 32 * i < a.n_experts ? a.selection_bias[lane + 32 * i] : 0;
}

/* The lane's logits of a row. */
template <uint32_t N>
static __device__ __forceinline__ void read_logits(const float *from, uint32_t n_experts, float (&logits)[N], uint32_t lane)
{
#pragma unroll
    for (uint32_t i = 0; i < N; i++)
        logits[i] = lane + 32 * i < n_experts ? from[lane + 32 * i] : -INFINITY;
}

#endif
