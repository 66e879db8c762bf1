/* route.cuh: the routes of a row, by a team of warps, a thread an expert. The choice goes in rounds: of every 32 experts the
 * n_chosen best stay, until there are no more than 32; an expert's place is the number of better ones. Sums over all experts
 * run over l, l + 32, ... for each lane l first and meet in a tree, sums over the chosen run in their order. */
#ifndef LLMPY_CUDA_ROUTE_CUH
#define LLMPY_CUDA_ROUTE_CUH

#include "../core/common.cuh"

#define ROUTE_MAX_CHOSEN 16u
#define ALL_LANES 0xffffffffu

/* Shared memory of a team of at most WARPS warps. */
template <uint32_t WARPS> struct route_room {
    double keys[64 * WARPS]; /* of all rounds */
    double groups[32];
    float powers[32 * WARPS], scores[32 * WARPS], choices[32 * WARPS], most[WARPS];
    __align__(16) float terms[ROUTE_MAX_CHOSEN]; /* of the weights, by places */
    uint32_t experts[ROUTE_MAX_CHOSEN], kept_groups;
};

static __device__ __forceinline__ float sum_lanes(float x)
{
#pragma unroll 1
    for (uint32_t step = 16; step; step /= 2)
        x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

/* Orders keys as floats, with a NaN before all others. 0 stands for an expert that cannot be chosen. */
static __device__ __forceinline__ uint32_t key_of(float x)
{
    uint32_t bits = __float_as_uint(x + 0.0f); /* -0 is 0 */
    return x == x ? bits ^ (bits >> 31 ? ~0u : 1u << 31) : 1;
}

/* Of equal ones the lowest number is the best; no two are equal. Bits of doubles, for which the order is the same and one
 * instruction compares. */
static __device__ __forceinline__ double numbered(uint32_t key, uint32_t number)
{
    return __longlong_as_double((long long)key << 20 | (0xfffff - number));
}

static __device__ __forceinline__ uint32_t number_of(double numbered)
{
    return 0xfffff - ((uint32_t)__double_as_longlong(numbered) & 0xfffff);
}

/* A NaN if all are. */
static __device__ __forceinline__ float max_lanes(float x)
{
    uint32_t key = __reduce_max_sync(ALL_LANES, key_of(x));
    return __uint_as_float(key ^ (key >> 31 ? 1u << 31 : ~0u));
}

static __device__ __forceinline__ void count_better(uint32_t &n, double other, double key)
{
    asm("{.reg .pred p; setp.gt.f64 p,%1,%2; @p add.u32 %0,%0,1; }" : "+r"(n) : "d"(other), "d"(key));
}

/* How many of 32 are better. */
static __device__ __forceinline__ uint32_t place_of(const double *keys, double key)
{
    uint32_t n[4] = {};
#pragma unroll
    for (uint32_t i = 0; i < 32; i += 2) {
        double2 two = *(const double2 *)(keys + i);
        count_better(n[i % 4], two.x, key);
        count_better(n[i % 4 + 1], two.y, key);
    }
    return n[0] + n[1] + n[2] + n[3];
}

/* All rounds but the last. Afterwards the first warp has keys that include the n best; the other warps are done. */
static __device__ __forceinline__ bool narrow(double *&keys, double &key, uint32_t t, uint32_t n_warps, uint32_t n)
{
    const uint32_t warp = __shfl_sync(ALL_LANES, t / 32, 0);
    keys[t] = key;
    __syncwarp();
    while (n_warps > 1) {
        const uint32_t place = place_of(keys + 32 * warp, key), n_left = n_warps * n, n_next = (n_left + 31) / 32;
        keys += 32 * n_warps;
        if (place < n)
            keys[warp * n + place] = key;
        if (t >= n_left && t < 32 * n_next)
            keys[t] = __longlong_as_double(t); /* no expert */
        meet(1, 32 * n_warps);
        n_warps = n_next;
        if (warp >= n_warps)
            return false;
        key = keys[t];
    }
    return true;
}

/* True if the group is among the best groups. Lane g of the first warp has group g. */
template <uint32_t WARPS>
static __device__ bool is_kept(const struct route_args &a, float choice, struct route_room<WARPS> &room, uint32_t t,
                           uint32_t n_warps)
{
    uint32_t size = a.n_experts / a.n_groups;
    room.choices[t] = choice;
    meet(1, 32 * n_warps);
    if (t < 32) {
        float first = -INFINITY, second = -INFINITY;
        for (uint32_t i = 0; i < size && t < a.n_groups; i++) {
            float x = room.choices[t * size + i];
            second = fmaxf(second, fminf(first, x));
            first = fmaxf(first, x);
        }
        double key = numbered(t < a.n_groups ? key_of(a.sums_two && size > 1 ? first + second : first) : 0, t);
        room.groups[t] = key;
        __syncwarp();
        uint32_t kept = __ballot_sync(ALL_LANES, place_of(room.groups, key) < a.chosen_groups);
        room.kept_groups = kept;
    }
    meet(1, 32 * n_warps);
    return room.kept_groups >> min(t / size, 31u) & 1;
}

static __device__ __noinline__ float sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

/* Of all experts, -INFINITY where there is none. */
template <uint32_t WARPS>
static __device__ float softmax(float logit, struct route_room<WARPS> &room, uint32_t t, uint32_t n_warps)
{
    float most = max_lanes(logit), sum = 0;
    room.most[t / 32] = most;
    meet(1, 32 * n_warps);
#pragma unroll 1
    for (uint32_t i = 0; i < n_warps; i++)
        most = fmaxf(most, room.most[i]);
    float power = expf(logit - most);
    room.powers[t] = power;
    meet(1, 32 * n_warps);
#pragma unroll 1
    for (uint32_t i = 0; i < n_warps; i++)
        sum += room.powers[32 * i + t % 32];
    return power / sum_lanes(sum);
}

/* The value from which the weight of one of the last 32 is computed. */
static __device__ __forceinline__ float term_of(const struct route_args &a, float score, bool is_choice)
{
    if (a.score == ROUTE_CHOSEN_SIGMOID)
        return sigmoid(score);
    if (a.score == ROUTE_CHOSEN_SOFTMAX)
        return expf(score - max_lanes(is_choice ? score : -INFINITY));
    return score;
}

static __device__ __forceinline__ float sum_eight(const float *from, float sum)
{
    float x[8];
    memcpy(x, __builtin_assume_aligned(from, 16), sizeof x);
#pragma unroll
    for (uint32_t i = 0; i < 8; i++)
        sum += x[i];
    return sum;
}

/* Stores both values at once, because kernels may read them before this launch has ended. */
static __device__ __forceinline__ void store_route(struct route *to, uint32_t expert, float weight)
{
    asm volatile("st.relaxed.gpu.global.v2.b32 [%0],{%1,%2};" ::"l"(to), "r"(expert), "r"(__float_as_uint(weight)) : "memory");
}

/* The last round, by the first warp: while places are counted the terms of all 32 are made. */
template <uint32_t WARPS>
static __device__ __forceinline__ void finish_routes(const struct route_args &a, const double *keys, double key, uint32_t lane,
                                                     struct route *routes, struct route_room<WARPS> &room)
{
    const uint32_t expert = min(number_of(key), a.n_experts - 1);
    const float term = term_of(a, room.scores[expert], __double_as_longlong(key) >> 20);
    const uint32_t place = place_of(keys, key);
    if (place < a.n_chosen) {
        room.terms[place] = term;
        room.experts[place] = expert;
    }
    if (lane >= a.n_chosen && lane < ROUTE_MAX_CHOSEN)
        room.terms[lane] = 0;
    __syncwarp();
    float weight = room.terms[min(lane, a.n_chosen - 1)], sum = sum_eight(room.terms, 0);
    if (a.n_chosen > 8)
        sum = sum_eight(room.terms + 8, sum);
    if (a.score == ROUTE_CHOSEN_SOFTMAX || a.is_normalised)
        weight /= a.score == ROUTE_CHOSEN_SOFTMAX ? sum : sum + a.sum_eps;
    if (lane < a.n_chosen)
        store_route(routes + lane, room.experts[lane], weight * a.scale);
}

/* Writes the routes of a row, from the logit of expert t and its selection bias; t is the thread's number in the team. */
template <bool HAS_GROUPS, uint32_t WARPS>
static __device__ __forceinline__ void route_row(const struct route_args &a, float logit, float choice_bias, uint32_t t,
                                                 struct route *routes, struct route_room<WARPS> &room)
{
    const uint32_t n_warps = (a.n_experts + 31) / 32;
    float score = t < a.n_experts ? logit : -INFINITY;
    double *keys = room.keys;
    if (a.score == ROUTE_SOFTMAX)
        score = softmax(score, room, t, n_warps);
    if (a.score == ROUTE_SIGMOID)
        score = sigmoid(score);
    room.scores[t] = score;
    uint32_t order = key_of(score + choice_bias);
    if (HAS_GROUPS && a.n_groups > 1 && !is_kept(a, score + choice_bias, room, t, n_warps))
        order = 0;
    double key = numbered(t < a.n_experts ? order : 0, t);
    if (narrow(keys, key, t, n_warps, a.n_chosen))
        finish_routes(a, keys, key, t, routes, room);
}

/* A softmax over all experts that the chosen ones' sum divides again is one over the chosen; it keeps the logits' order. */
static inline struct route_args route_wanted(const struct route_args *args)
{
    struct route_args wanted = *args;
    if (args->score == ROUTE_SOFTMAX && args->is_normalised && !args->sum_eps && !args->selection_bias && args->n_groups <= 1)
        wanted.score = ROUTE_CHOSEN_SOFTMAX;
    return wanted;
}

#endif
