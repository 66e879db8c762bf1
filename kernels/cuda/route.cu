/* What a row goes to: scores of its experts from float32 logits, the n_chosen best by score + selection bias (ties by the
 * lowest expert), of the best groups where there are groups, and their weights. logits [n_rows][n_experts], routes
 * [n_rows][n_chosen]; all in float32. A warp has a row, a lane experts lane, lane + 32, ...; sums over experts run in a lane
 * first and meet in a tree, sums over the chosen run in their order. Bound by latency: 1 to 2 us for 8 of 128. */
#include "route.cuh"

#define WARPS 4u
#define MAX_EXPERTS 512u

template <uint32_t N> static __global__ void __launch_bounds__(32 * WARPS) route_rows(struct route_args a)
{
    __shared__ float shared[WARPS][32 * N];
    __shared__ struct route best[WARPS][BEST_PLACES];
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = blockIdx.x * WARPS + warp;
    start_next();
    float logits[N], choices[N];
    read_choice_bias(a, choices, lane);
    wait_for_input();
    if (row >= a.n_rows)
        return;
    read_logits(a.logits + (size_t)row * a.logits_stride, a.n_experts, logits, lane);
    struct route *routes = a.routes + (size_t)row * a.route_stride;
    route_row<N, true>(a, logits, choices, routes, best[warp], shared[warp], lane);
}

enum rc cuda_route(void *ctx, const struct route_args *args, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    if (!args->n_rows)
        return RC_OK;
    uint32_t n = args->n_experts, n_groups = args->n_groups ? args->n_groups : 1;
    if (!n || n > MAX_EXPERTS || !args->n_chosen || args->n_chosen > ROUTE_MAX_CHOSEN || args->n_chosen > n)
        return err_set(err, RC_UNSUPPORTED, "route: wanted 1 to %u of at most %u experts, have %u of %u",
                       ROUTE_MAX_CHOSEN, MAX_EXPERTS, args->n_chosen, n);
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
