/* What a row goes to: scores of its experts from float32 logits, the n_chosen best by score + selection bias (ties by the
 * lowest expert), of the best groups where there are groups, and their weights. logits [n_rows][n_experts], routes
 * [n_rows][n_chosen]; all in float32. A warp has a row, a lane experts lane, lane + 32, ...; sums over experts run in a lane
 * first and meet in a tree, sums over the chosen run in their order. Bound by latency: 1 to 2 us for 8 of 128. */
#include "common.cuh"

#define WARPS 4u
#define MAX_EXPERTS 512u
#define MAX_CHOSEN 16u
#define ALL 0xffffffffu

static __device__ __forceinline__ float sum_lanes(float x)
{
    for (uint32_t step = 16; step; step /= 2)
        x += __shfl_xor_sync(ALL, x, step);
    return x;
}

static __device__ __forceinline__ float max_lanes(float x)
{
    for (uint32_t step = 16; step; step /= 2)
        x = fmaxf(x, __shfl_xor_sync(ALL, x, step));
    return x;
}

/* Orders as floats do, a NaN before all; 0 is left for what is out of the choice. */
static __device__ __forceinline__ uint32_t key_of(float x)
{
    uint32_t bits = __float_as_uint(x + 0.0f); /* -0 is 0 */
    return x == x ? bits ^ (bits >> 31 ? ~0u : 1u << 31) : 1;
}

template <uint32_t N> static __device__ __forceinline__ float pick(const float (&values)[N], uint32_t i)
{
    float value = values[0];
#pragma unroll
    for (uint32_t j = 1; j < N; j++)
        value = i == j ? values[j] : value;
    return value;
}

/* The expert of the greatest key, the lowest of equal ones; it is out of the choice then. */
template <uint32_t N> static __device__ __forceinline__ uint32_t take_best(uint32_t (&keys)[N], uint32_t lane)
{
    uint32_t key = keys[0], at = 0;
#pragma unroll
    for (uint32_t i = 1; i < N; i++)
        if (keys[i] > key) {
            key = keys[i];
            at = i;
        }
    uint32_t best = __reduce_max_sync(ALL, key);
    uint32_t expert = __reduce_min_sync(ALL, key == best ? lane + 32 * at : ALL);
#pragma unroll
    for (uint32_t i = 0; i < N; i++)
        keys[i] = expert == lane + 32 * i ? 0 : keys[i];
    return expert;
}

/* Takes the experts of all but the best groups out of the choice; lane g has group g. */
template <uint32_t N>
static __device__ void keep_groups(const struct route_args &a, const float (&choices)[N], uint32_t (&keys)[N], float *shared,
                                   uint32_t lane)
{
    uint32_t size = a.n_experts / a.n_groups, group_keys[1] = {}, kept = 0;
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
    for (uint32_t i = 0; i < a.chosen_groups; i++)
        kept |= 1u << take_best(group_keys, lane);
#pragma unroll
    for (uint32_t i = 0; i < N; i++)
        keys[i] = kept >> min((lane + 32 * i) / size, 31u) & 1 ? keys[i] : 0;
}

template <uint32_t N>
static __device__ __forceinline__ void score_experts(const struct route_args &a, const float (&logits)[N], float (&scores)[N])
{
    float most = logits[0], sum = 0;
#pragma unroll
    for (uint32_t i = 0; i < N; i++)
        most = fmaxf(most, logits[i]);
    if (a.score == ROUTE_SOFTMAX)
        most = max_lanes(most);
#pragma unroll
    for (uint32_t i = 0; i < N; i++) {
        scores[i] = a.score == ROUTE_SOFTMAX   ? expf(logits[i] - most)
                    : a.score == ROUTE_SIGMOID ? 1.0f / (1.0f + expf(-logits[i]))
                                               : logits[i];
        sum += scores[i];
    }
    if (a.score == ROUTE_SOFTMAX) {
        sum = sum_lanes(sum);
#pragma unroll
        for (uint32_t i = 0; i < N; i++)
            scores[i] /= sum;
    }
}

/* The weight of the lane's chosen expert; lanes from n_chosen on have none. */
static __device__ __forceinline__ float weight_of(const struct route_args &a, float score, uint32_t lane)
{
    if (a.score == ROUTE_CHOSEN_SIGMOID)
        score = 1.0f / (1.0f + expf(-score));
    float most = a.score == ROUTE_CHOSEN_SOFTMAX ? max_lanes(lane < a.n_chosen ? score : -INFINITY) : 0, sum = 0;
    if (a.score == ROUTE_CHOSEN_SOFTMAX)
        score = expf(score - most);
    for (uint32_t i = 0; i < a.n_chosen; i++)
        sum += __shfl_sync(ALL, score, i);
    if (a.score == ROUTE_CHOSEN_SOFTMAX)
        score /= sum;
    else if (a.is_normalised)
        score /= sum + a.sum_eps;
    return score * a.scale;
}

template <uint32_t N> static __global__ void __launch_bounds__(32 * WARPS) route_rows(struct route_args a)
{
    __shared__ float shared[WARPS][32 * N];
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = blockIdx.x * WARPS + warp;
    start_next();
    float logits[N], scores[N], choices[N], score = 0;
    uint32_t keys[N], expert = 0;
#pragma unroll
    for (uint32_t i = 0; i < N; i++)
        choices[i] = a.selection_bias && lane + 32 * i < a.n_experts ? a.selection_bias[lane + 32 * i] : 0;
    wait_for_input();
    if (row >= a.n_rows)
        return;
#pragma unroll
    for (uint32_t i = 0; i < N; i++)
        logits[i] = lane + 32 * i < a.n_experts ? a.logits[(size_t)row * a.logits_stride + lane + 32 * i] : -INFINITY;
    score_experts(a, logits, scores);
#pragma unroll
    for (uint32_t i = 0; i < N; i++) {
        choices[i] += scores[i];
        keys[i] = lane + 32 * i < a.n_experts ? key_of(choices[i]) : 0;
    }
    if (a.n_groups > 1)
        keep_groups(a, choices, keys, shared[warp], lane);
    for (uint32_t i = 0; i < a.n_chosen; i++) {
        uint32_t best = take_best(keys, lane);
        float value = __shfl_sync(ALL, pick(scores, best / 32), best % 32);
        expert = lane == i ? best : expert;
        score = lane == i ? value : score;
    }
    score = weight_of(a, score, lane);
    if (lane < a.n_chosen)
        a.routes[(size_t)row * a.route_stride + lane] = {(int32_t)expert, score};
}

enum rc cuda_route(void *ctx, const struct route_args *args, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    if (!args->n_rows)
        return RC_OK;
    uint32_t n = args->n_experts, n_groups = args->n_groups ? args->n_groups : 1;
    if (!n || n > MAX_EXPERTS || !args->n_chosen || args->n_chosen > MAX_CHOSEN || args->n_chosen > n)
        return err_set(err, RC_UNSUPPORTED, "route: wanted 1 to %u of at most %u experts, have %u of %u", MAX_CHOSEN,
                       MAX_EXPERTS, args->n_chosen, n);
    if (n_groups > 32 || n % n_groups ||
        (n_groups > 1 && (args->chosen_groups > n_groups || args->chosen_groups * (n / n_groups) < args->n_chosen)))
        return err_set(err, RC_UNSUPPORTED, "route: wanted at most 32 equal groups that hold the choice, have %u of %u groups",
                       args->chosen_groups, n_groups);
    void (*kernel)(struct route_args) = n <= 32    ? route_rows<1>
                                        : n <= 64  ? route_rows<2>
                                        : n <= 128 ? route_rows<4>
                                        : n <= 256 ? route_rows<8>
                                                   : route_rows<16>;
    launch(cuda, kernel, ceil_div(args->n_rows, WARPS), 32 * WARPS, 0, *args);
    return launched(err, "route");
}
