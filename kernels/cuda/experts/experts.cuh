/* experts.cuh: the arguments that the kernels of experts.cu share. A route is a row's i-th choice. Sorted by expert, then by
 * row, routes have the places 0, 1, 2, ...; tensors between the operation's kernels have one row for each place. */
#ifndef LLMPY_CUDA_EXPERTS_CUH
#define LLMPY_CUDA_EXPERTS_CUH

#include "../core/launch.cuh"
#include "../core/tensor_map.cuh"
#include "../linear/activation.cuh"
#include "../linear/linear.cuh"

#define EXPERTS_MAX 512u
#define EXPERTS_MAX_CHOSEN 16u

struct rows8_counts;
struct row16_counts;
struct row4_state;

struct experts_state {
    map_encoder encode;
    uint32_t n_pairs; /* clusters of two blocks that the device holds */
    struct rows8_counts *rows8_counts;
    struct row16_counts *row16_counts; /* [2] */
    struct row4_state *row4;
    uint32_t n_row_launches; /* of experts_row_2byte and experts_row_mxfp4, which use two sets of counts in turn */
    char *packing;           /* matrix.cu: rows to be packed; allocated for the first of them */
};

struct mixture {
    uint32_t n_rows, n_experts, n_chosen, n_routes; /* n_routes = n_rows * n_chosen */
    const struct route *routes;
    uint32_t route_stride;
    bool is_input_scaled;
    bool is_awaited;   /* one row's routes, by the launch before this one, norm_route.cuh */
    uint32_t first;    /* expert of the routes that is number 0 here */
    bool keeps_places; /* of one row, if it is not is_sorted: the place of a route is its number */
    bool is_sorted;    /* experts_sort has sorted the routes; otherwise each block sorts them itself */
    uint32_t *offsets; /* [n_experts + 1] first place of each expert, if it is_sorted */
    uint32_t *places;  /* [n_routes] */
    uint32_t *entries; /* [n_routes] the route at a place, if it is_sorted */
};

static __device__ __forceinline__ const struct route *route_at(const struct mixture &m, uint32_t i)
{
    if (m.route_stride == m.n_chosen)
        return m.routes + i;
    return m.routes + (size_t)(i / m.n_chosen) * m.route_stride + i % m.n_chosen;
}

/* The expert of one row's route; a whole warp calls it. For an awaited route it returns as soon as the route is written,
 * possibly before the input is complete. */
static __device__ __forceinline__ uint32_t expert_soon(const struct mixture &m, uint32_t i)
{
    const struct route *route = m.routes + i;
    int32_t expert;
    if (!m.is_awaited)
        wait_for_input();
    do
        asm volatile("ld.relaxed.gpu.global.s32 %0,[%1];" : "=r"(expert) : "l"(&route->expert) : "memory");
    while (__any_sync(~0u, expert < 0));
    return (uint32_t)expert;
}

/* The weight of a route's result. */
static __device__ __forceinline__ float route_weight(const struct mixture &m, uint32_t i)
{
    return m.is_input_scaled ? 1.0f : __ldcg(&route_at(m, i)->weight);
}

/* A step of the chain over a row's routes. */
static __device__ __forceinline__ void add_result(float (&sum)[8], float weight, const float (&values)[8])
{
#pragma unroll
    for (uint32_t c = 0; c < 8; c++)
        sum[c] = fmaf(weight, values[c], sum[c]);
}

/* Of gate and up, rounded before. */
struct expert_product {
    uint32_t form, act;
    float limit;
    __device__ __forceinline__ bool is_common() const { return form == EXPERT_GATED && act == ACT_SILU; }
    __device__ __forceinline__ float common(float gate, float up) const { return act_value(gate, ACT_SILU) * up; }
    __device__ __forceinline__ float operator()(float gate, float up) const
    {
        if (form == EXPERT_GATED)
            return act_value(gate, act) * up;
        gate = gate > limit ? limit : gate; /* a NaN stays */
        up = up > limit ? limit : up < -limit ? -limit : up;
        return __fdividef(gate, 1.0f + expf(-1.702f * gate)) * (up + 1.0f);
    }
};

#endif
