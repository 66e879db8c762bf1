/* out[h] = W_h x[h] or W_h^T x[h] for every head h, W_h being some rows of one matrix: the two products that latent
 * attention absorbs, both from the matrix as the checkpoint has it. Every output is one chain of fused multiply-adds in
 * float32 over W_h's columns (or rows, transposed), of the exact values of its type, rounded once. A block is up to 8 rows
 * of x and 128 outputs of a head, a thread one output of each row, so a weight is read once for 8 rows. Bound by the bytes
 * of the matrix for few rows (16 heads of 256 x 512 in bfloat16: 4 MB, 1 us at 4.5 TB/s; the chain's latency is some 20
 * times that), for many by the loads.
 *
 * Where weights have the 16-bit type of activations, a sum has 64 to 512 terms, in whole steps of 16, and a head's outputs
 * come in whole 64s, a sum is a chain of matrix instructions over 16 terms instead, as a linear's: a block brings 64 outputs'
 * weights and up to 64 rows of x into shared memory, all at once, the weights before the wait. */
#include "../core/launch.cuh"
#include "../core/mma.cuh"
#include "../core/weight_format.cuh"

#define THREADS 128u
#define ROWS 8u
#define STEP 64u

struct head_matrix {
    const uint8_t *data;
    size_t row_bytes;
    uint32_t n_cols, head_rows, first_row, used_rows;
};

template <class T, class W, bool IS_TRANSPOSED>
static __global__ void __launch_bounds__(THREADS)
head_linear_values(struct head_matrix w, rows<T> x, rows<T> out, uint32_t n_rows, uint32_t part, uint32_t width)
{
    __shared__ float shared[STEP][ROWS];
    start_next();
    const uint32_t head = blockIdx.y, n = blockIdx.x * THREADS + threadIdx.x, first = blockIdx.z * ROWS;
    const uint32_t n_sum = IS_TRANSPOSED ? w.used_rows : w.n_cols;
    const uint8_t *base = w.data + ((size_t)head * w.head_rows + w.first_row) * w.row_bytes;
    float sum[ROWS] = {};
    wait_for_input();
    for (uint32_t k = 0; k < n_sum; k += STEP) {
        for (uint32_t i = threadIdx.x; i < STEP * ROWS; i += THREADS) {
            uint32_t row = first + i / STEP, at = k + i % STEP;
            shared[i % STEP][i / STEP] = row < n_rows && at < n_sum ? to_float(*x.at(row, head * part + at)) : 0.0f;
        }
        __syncthreads();
        const uint32_t last = min(STEP, n_sum - k);
        for (uint32_t i = 0; i < last && n < width; i++) {
            float value = IS_TRANSPOSED ? W::value(base + (size_t)(k + i) * w.row_bytes, n)
                                        : W::value(base + (size_t)n * w.row_bytes, k + i);
#pragma unroll
            for (uint32_t r = 0; r < ROWS; r++)
                sum[r] = fmaf(value, shared[i][r], sum[r]);
        }
        __syncthreads();
    }
#pragma unroll
    for (uint32_t r = 0; r < ROWS; r++)
        if (first + r < n_rows && n < width)
            *out.at(first + r, head * width + n) = round_to<T>(sum[r]);
}

/* ---- on tensor cores ----------------------------------------------------------------------------------------------------- */

#define TILE 64u    /* outputs of a block */
#define MAX_SUM 512u
#define PAD 8u      /* values between rows in shared memory, so that matrices meet no bank twice */

static __device__ __forceinline__ void copy_chunk(void *to, const void *from, bool is_there)
{
    asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"((uint32_t)__cvta_generic_to_shared(to)), "l"(from),
                 "r"(is_there ? 16 : 0)
                 : "memory");
}

/* Rows of n values, `stride` apart in memory, to rows of n + PAD. */
template <class T>
static __device__ __forceinline__ void copy_rows(T *to, const T *from, size_t stride, uint32_t n_rows, uint32_t n_there,
                                                 uint32_t n)
{
    for (uint32_t i = threadIdx.x; i < n_rows * (n / 8); i += THREADS) {
        const uint32_t r = i / (n / 8), c = i % (n / 8) * 8;
        copy_chunk(to + r * (n + PAD) + c, from + (r < n_there ? r * stride : 0) + c, r < n_there);
    }
}

/* ROWS of x by 64 outputs; a warp has 16 of them: d[b][2 y + e] is of output g + 8 y and row 8 b + 2 t + e. */
template <class T, uint32_t X_ROWS, bool IS_TRANSPOSED>
static __global__ void __launch_bounds__(THREADS)
head_linear_tiles(struct head_matrix w, rows<T> x, rows<T> out, uint32_t n_rows, uint32_t part, uint32_t width)
{
    extern __shared__ __align__(16) char memory[];
    const uint32_t n_sum = IS_TRANSPOSED ? w.used_rows : w.n_cols, head = blockIdx.y, first = blockIdx.z * X_ROWS;
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = blockIdx.x * TILE;
    const uint32_t w_stride = (IS_TRANSPOSED ? TILE : n_sum) + PAD, x_stride = n_sum + PAD;
    T *weights = (T *)memory, *values = weights + (IS_TRANSPOSED ? n_sum : TILE) * w_stride;
    const T *base = (const T *)(w.data + ((size_t)head * w.head_rows + w.first_row) * w.row_bytes);
    const size_t stride = w.row_bytes / sizeof(T);
    start_next();
    if (IS_TRANSPOSED)
        copy_rows(weights, base + column, stride, n_sum, n_sum, TILE);
    else
        copy_rows(weights, base + column * stride, stride, TILE, TILE, n_sum);
    wait_for_input();
    copy_rows(values, x.at(first, head * part), x.stride, X_ROWS, min(X_ROWS, n_rows - first), n_sum);
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    float d[X_ROWS / 8][4] = {};
    const uint32_t low = lane % 8, middle = lane / 8 % 2 * 8, high = lane / 16 * 8;
    const T *a_at = IS_TRANSPOSED ? weights + (high + low) * w_stride + warp * 16 + middle
                                  : weights + (warp * 16 + middle + low) * w_stride + high;
    for (uint32_t k = 0; k < n_sum; k += 16) {
        uint32_t a[4];
        if (IS_TRANSPOSED)
            load_transposed(a, (uint32_t)__cvta_generic_to_shared(a_at + k * w_stride));
        else
            load_matrices(a, (uint32_t)__cvta_generic_to_shared(a_at + k));
#pragma unroll
        for (uint32_t b = 0; b < X_ROWS / 8; b += 2) {
            uint32_t r[4];
            load_matrices(r, (uint32_t)__cvta_generic_to_shared(values + (b * 8 + high + low) * x_stride + k + middle));
            const uint32_t even[2] = {r[0], r[1]}, odd[2] = {r[2], r[3]};
            mma(d[b], a, even, T());
            mma(d[b + 1], a, odd, T());
        }
    }
    __syncthreads();
#pragma unroll
    for (uint32_t b = 0; b < X_ROWS / 8; b++)
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            values[(b * 8 + lane % 4 * 2 + i % 2) * (TILE + PAD) + warp * 16 + lane / 4 + i / 2 * 8] = round_to<T>(d[b][i]);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < X_ROWS * TILE / 8; i += THREADS) {
        const uint32_t r = i / (TILE / 8), c = i % (TILE / 8) * 8;
        if (first + r < n_rows)
            *(uint4 *)out.at(first + r, head * width + column + c) = *(const uint4 *)(values + r * (TILE + PAD) + c);
    }
}

static bool is_tiled(const struct cuda *cuda, const struct head_linear_args *args, const struct cuda_part *part, uint32_t n_sum,
                     uint32_t width)
{
    const uint32_t x_part = args->x.width / args->n_heads;
    return cuda->dtype != DTYPE_F32 && part->dtype == cuda->dtype && n_sum % 16 == 0 && n_sum >= TILE && n_sum <= MAX_SUM &&
           width % TILE == 0 && part->row_bytes % 16 == 0 && x_part % 8 == 0 && args->x.stride % 8 == 0 &&
           args->out.stride % 8 == 0 && (uintptr_t)args->x.data % 16 == 0 && (uintptr_t)args->out.data % 16 == 0;
}

/* Shared memory of a block, for values of two bytes. */
static uint32_t tiles_bytes(bool is_transposed, uint32_t n_sum, uint32_t x_rows)
{
    return ((is_transposed ? n_sum * (TILE + PAD) : TILE * (n_sum + PAD)) + x_rows * (n_sum + PAD)) * 2;
}

template <class T, uint32_t X_ROWS, bool IS_TRANSPOSED>
static void launch_tiles(const struct cuda *cuda, const struct head_linear_args *args, const struct head_matrix &w,
                         uint32_t n_sum, uint32_t width)
{
    const dim3 grid(width / TILE, args->n_heads, ceil_div(args->n_rows, X_ROWS));
    allow_shared(head_linear_tiles<T, X_ROWS, IS_TRANSPOSED>, cuda->shared_bytes);
    launch(cuda, head_linear_tiles<T, X_ROWS, IS_TRANSPOSED>, grid, THREADS, tiles_bytes(IS_TRANSPOSED, n_sum, X_ROWS), w,
           rows<T>(args->x), rows<T>(args->out), args->n_rows, args->x.width / args->n_heads, width);
}

template <class T>
static void multiply_tiled(const struct cuda *cuda, const struct head_linear_args *args, const struct head_matrix &w,
                           uint32_t n_sum, uint32_t width)
{
    if (args->n_rows <= 16 || tiles_bytes(args->is_transposed, n_sum, 64) > cuda->shared_bytes)
        args->is_transposed ? launch_tiles<T, 16, true>(cuda, args, w, n_sum, width)
                            : launch_tiles<T, 16, false>(cuda, args, w, n_sum, width);
    else
        args->is_transposed ? launch_tiles<T, 64, true>(cuda, args, w, n_sum, width)
                            : launch_tiles<T, 64, false>(cuda, args, w, n_sum, width);
}

enum rc cuda_head_linear(void *ctx, const struct head_linear_args *args, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    const struct matrix *matrix = args->matrix;
    if (!args->n_rows)
        return RC_OK;
    if (matrix->n_parts != 1 || matrix->n_rows != args->n_heads * args->head_rows)
        return err_set(err, RC_UNSUPPORTED, "head_linear: wanted one part of %u rows, have %u parts of %u",
                       args->n_heads * args->head_rows, matrix->n_parts, matrix->n_rows);
    const struct cuda_part *part = &matrix->parts[0];
    const struct head_matrix w = {(const uint8_t *)part->data, part->row_bytes,  matrix->n_cols,
                                  args->head_rows,             args->first_row,  args->used_rows};
    const uint32_t width = args->is_transposed ? matrix->n_cols : args->used_rows;
    const uint32_t n_sum = args->is_transposed ? args->used_rows : matrix->n_cols;
    if (is_tiled(cuda, args, part, n_sum, width)) {
        cuda->dtype == DTYPE_BF16 ? multiply_tiled<__nv_bfloat16>(cuda, args, w, n_sum, width)
                                  : multiply_tiled<__half>(cuda, args, w, n_sum, width);
        return launched(err, "head_linear");
    }
    const dim3 grid(ceil_div(width, THREADS), args->n_heads, ceil_div(args->n_rows, ROWS));
    visit_weight(part->dtype, [&](auto weight) {
        visit_type(cuda->dtype, [&](auto value) {
            using T = decltype(value);
            using W = decltype(weight);
            launch(cuda, args->is_transposed ? head_linear_values<T, W, true> : head_linear_values<T, W, false>, grid, THREADS,
                   0, w, rows<T>(args->x), rows<T>(args->out), args->n_rows, args->x.width / args->n_heads, width);
        });
    });
    return launched(err, "head_linear");
}
