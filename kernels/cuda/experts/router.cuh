/* router.cuh: the linear that computes the logits of a row's experts. It is little work on the critical path of every row, so
 * its order of sums is designed for one row:
 *
 *   part    256 columns: two halves; adds the sums of the four chains in their order; parts are added pairwise
 *   half    128 columns of a part: two chains
 *   chain   four mma.sync m16n8k16, one for every 32 columns; the first chain takes columns 0, 1, 4, 5 of every eight, the
 *           second columns 2, 3, 6, 7, so a lane's operands are 16 consecutive bytes
 *
 * A warp has a part of 16 experts, whose weights stay in registers. */
#ifndef LLMPY_CUDA_ROUTER_CUH
#define LLMPY_CUDA_ROUTER_CUH

#include "../core/eight.cuh"
#include "../core/mma.cuh"
#include "../linear/linear.cuh"

#define ROUTER_TILE 16u /* experts of a warp */
#define ROUTER_PART 256u
#define ROUTER_STEPS (ROUTER_PART / 32)
#define ROUTER_PARTS 16u /* at most */

struct router {
    const char *w;
    size_t row_bytes;
    const float *bias;
    uint32_t n_experts, n_cols;
};

/* The eight values from `column` on; zeros beyond n_columns. */
template <bool IS_ALIGNED, class T>
static __device__ __forceinline__ uint4 words_of(const T *row, uint32_t column, uint32_t n_columns)
{
    if (IS_ALIGNED)
        return column < n_columns ? *(const uint4 *)(row + column) : uint4{};
    eight<T> values = part_of<false>(row, column, n_columns);
    return *(const uint4 *)&values;
}

/* Lane l has rows l / 4 and l / 4 + 8 of the tile and columns l % 4 * 8 .. + 7 of every 32; for missing rows it has other
 * rows, and their sums are not used. */
struct router_weights {
    uint4 low[ROUTER_STEPS], high[ROUTER_STEPS];
};

template <class T>
static __device__ __forceinline__ void fetch_weights(const struct router &router, uint32_t tile, uint32_t part,
                                                     struct router_weights &w)
{
    uint32_t lane = threadIdx.x % 32, expert = tile * ROUTER_TILE + lane / 4, first = part * ROUTER_PART + lane % 4 * 8;
    const T *low = (const T *)(router.w + min(expert, router.n_experts - 1) * router.row_bytes);
    const T *high = (const T *)(router.w + min(expert + 8, router.n_experts - 1) * router.row_bytes);
#pragma unroll
    for (uint32_t i = 0; i < ROUTER_STEPS; i++) {
        w.low[i] = words_of<true>(low, first + 32 * i, router.n_cols);
        w.high[i] = words_of<true>(high, first + 32 * i, router.n_cols);
    }
}

/* The four chains of a part: sum[j] and sum[2 + j] are those of rows lane / 4 and lane / 4 + 8 of W and row lane % 4 * 2 + j of
 * x, of which the lane gives row lane / 4. */
template <class T>
static __device__ __forceinline__ void multiply_eight(const struct router_weights &w, const uint4 (&x)[ROUTER_STEPS],
                                                      float (&sum)[4])
{
    float first[2][4] = {}, second[2][4] = {};
#pragma unroll
    for (uint32_t i = 0; i < ROUTER_STEPS / 2; i++)
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            const uint4 low = w.low[i + half * ROUTER_STEPS / 2], high = w.high[i + half * ROUTER_STEPS / 2];
            const uint4 from = x[i + half * ROUTER_STEPS / 2];
            mma(first[half], {low.x, high.x, low.z, high.z}, {from.x, from.z}, T());
            mma(second[half], {low.y, high.y, low.w, high.w}, {from.y, from.w}, T());
        }
#pragma unroll
    for (uint32_t j = 0; j < 4; j++)
        sum[j] = first[0][j] + second[0][j] + first[1][j] + second[1][j];
}

/* The same for one row, whose words lie as split() has them: eight rows of W are sixteen, those of the first chains and those
 * of the second, for columns of x of either kind. sum[j]: of row lane / 4 + 8 * j of W. */
template <class T>
static __device__ __forceinline__ void multiply_one(const struct router_weights &w, const uint4 *x, float (&sum)[2])
{
    const uint2 *own = (const uint2 *)(x + threadIdx.x % 4) + threadIdx.x / 4 % 2;
    float low[2][4] = {}, high[2][4] = {};
#pragma unroll
    for (uint32_t i = 0; i < ROUTER_STEPS / 2; i++)
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            const uint32_t at = i + half * ROUTER_STEPS / 2;
            const uint2 from = own[8 * at];
            mma(low[half], {w.low[at].x, w.low[at].y, w.low[at].z, w.low[at].w}, {from.x, from.y}, T());
            mma(high[half], {w.high[at].x, w.high[at].y, w.high[at].z, w.high[at].w}, {from.x, from.y}, T());
        }
    sum[0] = low[0][0] + low[0][3] + low[1][0] + low[1][3];
    sum[1] = high[0][0] + high[0][3] + high[1][0] + high[1][3];
}

static __device__ __forceinline__ uint4 split(uint4 words)
{
    return {words.x, words.z, words.y, words.w};
}

/* Adds pairwise, in the tree of the full number of parts. */
static __device__ __forceinline__ float sum_parts(const float *first, uint32_t stride, uint32_t n_parts)
{
    float parts[ROUTER_PARTS];
#pragma unroll
    for (uint32_t i = 0; i < ROUTER_PARTS; i++)
        parts[i] = i < n_parts ? first[i * stride] : 0;
    return sum_pairs<ROUTER_PARTS>(parts);
}

/* True if a router's matrix is multiplied in this chain. */
static inline bool router_fits(const struct cuda *cuda, const struct matrix *matrix)
{
    return cuda->dtype != DTYPE_F32 && matrix->is_whole && matrix->parts[0].dtype == cuda->dtype && matrix->n_rows &&
           matrix->n_cols % 64 == 0 && matrix->n_cols <= ROUTER_PARTS * ROUTER_PART;
}

static inline struct router router_of(const struct linear_args *args)
{
    const struct matrix *matrix = args->matrix;
    return {matrix->data, matrix->parts[0].row_bytes, args->bias, matrix->n_rows, matrix->n_cols};
}

#endif
