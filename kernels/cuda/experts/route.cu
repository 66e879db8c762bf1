/* Chooses the experts of a row: the scores from float32 logits, the n_chosen best by score + selection bias (of equal ones the
 * lowest expert), in the best groups if there are groups, and their weights. logits [n_rows][n_experts], routes
 * [n_rows][n_chosen]; all in float32. A block has a row, a thread an expert, as route.cuh has it. Bound by latency: 1 to 2 us
 * for 8 of 128.
 *
 * Also computes the logits of any number of rows, with a router's weights in router.cuh's order: a block keeps the weights of
 * 16 or 32 experts in registers and reads row after row. Bound by the L2 cache, which gives every row to each of these blocks.
 */
#include "../core/launch.cuh"
#include "../core/wgmma.cuh"
#include "route.cuh"
#include "router.cuh"

#define MAX_EXPERTS 512u
#define ROUTER_THREADS (32 * ROUTER_PARTS)
#define ROUTER_STAGES 3u /* of a warp's ring; one where so many do not fit shared memory */

/* ---- logits -------------------------------------------------------------------------------------------------------------- */

/* Copies eight rows of a part to shared memory: 16 bytes a lane of each row, zeros behind the last column. In every other row
 * the halves of 128 bytes are swapped, so that lanes that read different rows use different banks. */
template <class T, bool IS_ALIGNED>
static __device__ __forceinline__ void fetch_rows(const rows<T> &x, uint32_t first, uint32_t n_rows, uint32_t column,
                                                  uint32_t n_cols, uint4 *to)
{
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (uint32_t r = 0; r < 8 && first < n_rows; r++) {
        const T *row = x.at(min(first + r, n_rows - 1), 0);
        uint4 *place = to + 32 * r + (lane ^ r % 2 * 4);
        if (IS_ALIGNED)
            asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(shared_address(place)),
                         "l"(row + min(column, n_cols - 8)), "r"(column < n_cols ? 16 : 0)
                         : "memory");
        else
            *place = words_of<false>(row, column, n_cols);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Block (i, j): TILES tiles of experts by the eights of rows j, j + gridDim.y, ...; a warp a part of them, whose rows come
 * through its ring of STAGES eights. */
template <class T, bool IS_ALIGNED, uint32_t TILES, uint32_t STAGES>
static __global__ void __launch_bounds__(ROUTER_THREADS / TILES)
linear_router(struct router router, rows<T> x, struct output out)
{
    extern __shared__ uint4 rings[];
    __shared__ float2 sums[2][TILES][ROUTER_PARTS / TILES][ROUTER_TILE][4];
    const uint32_t part = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, n_parts = blockDim.x / 32;
    const uint32_t first = blockIdx.x * TILES, n_eights = (out.n_rows + 7) / 8, column = part * ROUTER_PART + 8 * lane;
    uint4 *ring = rings + part * STAGES * ROUTER_PART;
    struct router_weights w[TILES];
    start_next();
#pragma unroll
    for (uint32_t tile = 0; tile < TILES; tile++)
        fetch_weights<T>(router, first + tile, part, w[tile]);
    wait_for_input();
    for (uint32_t s = 0; s + 1 < STAGES; s++)
        fetch_rows<T, IS_ALIGNED>(x, 8 * (blockIdx.y + s * gridDim.y), out.n_rows, column, router.n_cols,
                                  ring + s * ROUTER_PART);
    for (uint32_t i = blockIdx.y, n = 0; i < n_eights; i += gridDim.y, n++) {
        const uint32_t ahead = STAGES - 1;
        fetch_rows<T, IS_ALIGNED>(x, 8 * (i + ahead * gridDim.y), out.n_rows, column, router.n_cols,
                                  ring + (n + ahead) % STAGES * ROUTER_PART);
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
        __syncwarp();
        const uint4 *own = ring + n % STAGES * ROUTER_PART + 32 * g;
        uint4 values[ROUTER_STEPS];
#pragma unroll
        for (uint32_t step = 0; step < ROUTER_STEPS; step++)
            values[step] = own[4 * step + t ^ g % 2 * 4];
#pragma unroll
        for (uint32_t tile = 0; tile < TILES; tile++) {
            float sum[4];
            multiply_eight<T>(w[tile], values, sum);
            sums[n % 2][tile][part][g][t] = {sum[0], sum[1]};
            sums[n % 2][tile][part][g + 8][t] = {sum[2], sum[3]};
        }
        __syncthreads();
        for (uint32_t j = threadIdx.x; j < TILES * ROUTER_TILE * 8; j += blockDim.x) {
            const float *from = (const float *)sums[n % 2][j / (ROUTER_TILE * 8)] + j % (ROUTER_TILE * 8);
            put<T>(out, 8 * i + j % 8, first * ROUTER_TILE + j / 8, sum_parts(from, ROUTER_TILE * 8, n_parts));
        }
    }
}

static uint32_t router_stages(const struct cuda *cuda)
{
    return cuda->shared_bytes < SHARED_BYTES ? 1 : ROUTER_STAGES;
}

static uint32_t ring_bytes(const struct cuda *cuda, uint32_t n_parts)
{
    return n_parts * router_stages(cuda) * ROUTER_PART * (uint32_t)sizeof(uint4);
}

template <class T, uint32_t STAGES> static auto staged_kernel(bool is_aligned, uint32_t n_tiles)
{
    return n_tiles == 2 ? (is_aligned ? linear_router<T, true, 2, STAGES> : linear_router<T, false, 2, STAGES>)
                        : (is_aligned ? linear_router<T, true, 1, STAGES> : linear_router<T, false, 1, STAGES>);
}

template <class T> static auto router_kernel(const struct cuda *cuda, bool is_aligned, uint32_t n_tiles)
{
    return router_stages(cuda) == 1 ? staged_kernel<T, 1>(is_aligned, n_tiles)
                                    : staged_kernel<T, ROUTER_STAGES>(is_aligned, n_tiles);
}

template <class T> static void launch_rows(const struct cuda *cuda, const struct linear_args *args)
{
    const uint32_t n_parts = ceil_div(args->matrix->n_cols, ROUTER_PART), n_tiles = n_parts <= ROUTER_PARTS / 2 ? 2 : 1;
    const uint32_t n_columns = ceil_div(args->matrix->n_rows, n_tiles * ROUTER_TILE);
    dim3 grid(n_columns, min(ceil_div(args->n_rows, 8), ceil_div(cuda->n_processors, n_columns)));
    launch(cuda, router_kernel<T>(cuda, has_eights<T>(args->x), n_tiles), grid, 32 * n_parts, ring_bytes(cuda, n_parts),
           router_of(args), rows<T>(args->x), output_of(args, 0, args->matrix->n_rows, 2));
}

template <class T> static cudaError_t allow_rings(const struct cuda *cuda)
{
    cudaError_t code = cudaSuccess;
    for (uint32_t i = 0; i < 4 && code == cudaSuccess; i++)
        code = allow_shared(router_kernel<T>(cuda, i % 2, 1 + i / 2), ring_bytes(cuda, ROUTER_PARTS));
    return code;
}

enum rc cuda_router_open(struct cuda *cuda, struct err *err)
{
    cudaError_t code = cuda->dtype == DTYPE_BF16  ? allow_rings<__nv_bfloat16>(cuda)
                       : cuda->dtype == DTYPE_F16 ? allow_rings<__half>(cuda)
                                                  : cudaSuccess;
    return code == cudaSuccess ? RC_OK : cuda_fail(err, code, "open");
}

enum rc cuda_router(struct cuda *cuda, const struct linear_args *args, struct err *err)
{
    if (cuda->dtype == DTYPE_BF16)
        launch_rows<__nv_bfloat16>(cuda, args);
    else
        launch_rows<__half>(cuda, args);
    return launched(err, "linear");
}

/* ---- routes -------------------------------------------------------------------------------------------------------------- */

template <uint32_t WARPS> static __global__ void __launch_bounds__(32 * WARPS) route_rows(struct route_args a)
{
    __shared__ struct route_room<WARPS> room;
    const uint32_t t = threadIdx.x, row = blockIdx.x;
    const bool is_expert = t < a.n_experts;
    start_next();
    float choice_bias = a.selection_bias && is_expert ? a.selection_bias[t] : 0;
    wait_for_input();
    float logit = is_expert ? a.logits[(size_t)row * a.logits_stride + t] : 0;
    route_row<true>(a, logit, choice_bias, t, a.routes + (size_t)row * a.route_stride, room);
}

enum rc cuda_route(void *ctx, const struct route_args *args, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    cuda->awaited_routes = NULL;
    if (!args->n_rows)
        return RC_OK;
    uint32_t n = args->n_experts, n_groups = args->n_groups ? args->n_groups : 1;
    if (!n || n > MAX_EXPERTS || !args->n_chosen || args->n_chosen > ROUTE_MAX_CHOSEN || args->n_chosen > n)
        return err_set(err, RC_UNSUPPORTED, "route: wanted 1 to %u of at most %u experts, have %u of %u",
                       ROUTE_MAX_CHOSEN, MAX_EXPERTS, args->n_chosen, n);
    if (n_groups > 32 || n % n_groups ||
        (n_groups > 1 && (args->chosen_groups > n_groups || args->chosen_groups * (n / n_groups) < args->n_chosen)))
        return err_set(err, RC_UNSUPPORTED,
                       "route: wanted at most 32 equal groups that contain the chosen experts, have %u of %u groups",
                       args->chosen_groups, n_groups);
    launch(cuda, n <= 128 ? route_rows<4> : route_rows<16>, args->n_rows, 32 * ceil_div(n, 32), 0, route_wanted(args));
    return launched(err, "route");
}
