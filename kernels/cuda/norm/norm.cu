/* out[r][h] = weight (of all heads, or [h]) * (x[r][h] * 1/sqrt(mean(x[r][h]^2) + eps)), each head h of size columns by
 * itself; float32, one rounding. With a sum: x = a + b, rounded once to the type of activations, is stored and normed in the
 * same pass. Sum of squares: chains of 8 consecutive columns; thread t of T adds those of columns 8 t, 8 (t + T), ... in this
 * order, then pairwise over threads 1, 2, 4, ... apart. T depends on the size alone; up to 256 columns this is head_norm.cuh's
 * order, and a group of lanes norms a head. The row stays in registers. Bound by bytes: 8192 rows of 4096 bfloat16 values,
 * read and written, take 32 us at 4.25 TB/s (with a sum 63 us); a single row by latency, about 1 us, the weight read ahead of
 * the wait. The sum's second term may be normed first, in the same pass. */
#include "../core/launch.cuh"
#include "norm_route.cuh"
#include "row_norm.cuh"

#define WARP_THREADS 128u /* of a block that norms heads */
#define MAX_PARTS 4u

/* A block a head of a row, PARTS chains a thread. */
template <class T, uint32_t PARTS, bool HAS_SUM, bool IS_ALIGNED>
static __global__ void __launch_bounds__(PARTS <= 2 ? 512 : ROW_NORM_THREADS)
norm_rows(norm_source<T> x, rows<T> out, const float *weight, uint32_t weight_stride, uint32_t size, float eps)
{
    float w[PARTS][8], values[PARTS][8], sum = 0;
    uint32_t row = blockIdx.x, first = blockIdx.y * size, column = 8 * threadIdx.x, step = 8 * blockDim.x;
    size_t own = (size_t)blockIdx.y * weight_stride;
    start_next();
#pragma unroll
    for (uint32_t i = 0; i < PARTS && PARTS <= 2; i++)
        weight_part<IS_ALIGNED>(weight, own, column + i * step, size, w[i]);
    wait_for_input();
#pragma unroll
    for (uint32_t i = 0; i < PARTS; i++)
        take_part<HAS_SUM, IS_ALIGNED>(x, row, first, column + i * step, size, values[i]);
#pragma unroll
    for (uint32_t i = 0; i < PARTS; i++) {
        if (HAS_SUM)
            store_part<IS_ALIGNED>(x.sum.at(row, first), column + i * step, size, values[i]);
        for (uint32_t j = 0; j < 8; j++)
            sum = fmaf(values[i][j], values[i][j], sum);
    }
    float scale = norm_scale(block_squares(sum, 0, blockDim.x / 32), size, eps);
#pragma unroll
    for (uint32_t i = 0; i < PARTS; i++) {
        if (PARTS > 2) /* no registers to hold it any earlier */
            weight_part<IS_ALIGNED>(weight, own, column + i * step, size, w[i]);
        scale_part(values[i], w[i], scale);
        store_part<IS_ALIGNED>(out.at(row, first), column + i * step, size, values[i]);
    }
}

/* A block a row: the norm of b, the sum of a and this, and the norm of the sum, rounded as three operations round. */
template <class T, uint32_t PARTS>
static __global__ void __launch_bounds__(ROW_NORM_THREADS / 2)
norm_sums(norm_source<T> x, rows<T> out, const float *inner_weight, float inner_eps, const float *weight, uint32_t size,
          float eps)
{
    float inner[PARTS][8], w[PARTS][8], values[PARTS][8], terms[PARTS][8], squares = 0, sum = 0;
    uint32_t row = blockIdx.x, column = 8 * threadIdx.x, step = 8 * blockDim.x;
    start_next();
#pragma unroll
    for (uint32_t i = 0; i < PARTS; i++) {
        weight_part<true>(inner_weight, 0, column + i * step, size, inner[i]);
        weight_part<true>(weight, 0, column + i * step, size, w[i]);
    }
    wait_for_input();
#pragma unroll
    for (uint32_t i = 0; i < PARTS; i++) {
        load_part<true>(x.b.at(row, 0), column + i * step, size, terms[i]);
        load_part<true>(x.a.at(row, 0), column + i * step, size, values[i]);
    }
#pragma unroll
    for (uint32_t i = 0; i < PARTS; i++)
        for (uint32_t j = 0; j < 8; j++)
            squares = fmaf(terms[i][j], terms[i][j], squares);
    float scale = norm_scale(block_squares(squares, 0, blockDim.x / 32), size, inner_eps);
#pragma unroll
    for (uint32_t i = 0; i < PARTS; i++) {
        scale_part(terms[i], inner[i], scale);
        for (uint32_t j = 0; j < 8; j++) {
            values[i][j] = to_float(round_to<T>(values[i][j] + to_float(round_to<T>(terms[i][j]))));
            sum = fmaf(values[i][j], values[i][j], sum);
        }
        store_part<true>(x.sum.at(row, 0), column + i * step, size, values[i]);
    }
    scale = norm_scale(block_squares(sum, 1, blockDim.x / 32), size, eps);
#pragma unroll
    for (uint32_t i = 0; i < PARTS; i++) {
        scale_part(values[i], w[i], scale);
        store_part<true>(out.at(row, 0), column + i * step, size, values[i]);
    }
}

/* A group of LANES lanes a head of at most 8 * LANES columns. */
template <class T, uint32_t LANES, bool HAS_SUM, bool IS_ALIGNED>
static __global__ void __launch_bounds__(WARP_THREADS)
norm_heads(norm_source<T> x, rows<T> out, const float *weight, uint32_t weight_stride, uint32_t size, float eps, uint32_t n,
           uint32_t n_heads)
{
    float w[8], values[8] = {};
    uint32_t head = (blockIdx.x * WARP_THREADS + threadIdx.x) / LANES, column = threadIdx.x % LANES * 8;
    uint32_t row = head / n_heads, first = head % n_heads * size;
    start_next();
    weight_part<IS_ALIGNED>(weight, (size_t)(head % n_heads) * weight_stride, column, size, w);
    wait_for_input();
    if (head < n) {
        take_part<HAS_SUM, IS_ALIGNED>(x, row, first, column, size, values);
        if (HAS_SUM)
            store_part<IS_ALIGNED>(x.sum.at(row, first), column, size, values);
    }
    float scale = norm_scale(head_squares<LANES>(values), size, eps);
    scale_part(values, w, scale);
    if (head < n)
        store_part<IS_ALIGNED>(out.at(row, first), column, size, values);
}

/* ---- launches ------------------------------------------------------------------------------------------------------------ */

template <class T> struct norm_job {
    const struct cuda *cuda;
    norm_source<T> x;
    rows<T> out;
    const float *weight;
    uint32_t n_rows, n_heads, size, weight_stride;
    float eps;
    bool is_aligned;
};

template <uint32_t LANES, bool HAS_SUM, class T> static void launch_heads(const norm_job<T> &job)
{
    uint32_t n = job.n_rows * job.n_heads, n_blocks = ceil_div(n, WARP_THREADS / LANES);
    auto kernel = job.is_aligned ? norm_heads<T, LANES, HAS_SUM, true> : norm_heads<T, LANES, HAS_SUM, false>;
    launch(job.cuda, kernel, n_blocks, WARP_THREADS, 0, job.x, job.out, job.weight, job.weight_stride, job.size,
           job.eps, n, job.n_heads);
}

template <uint32_t PARTS, bool HAS_SUM, class T> static void launch_rows(const norm_job<T> &job, uint32_t threads)
{
    dim3 grid(job.n_rows, job.n_heads);
    auto kernel = job.is_aligned ? norm_rows<T, PARTS, HAS_SUM, true> : norm_rows<T, PARTS, HAS_SUM, false>;
    launch(job.cuda, kernel, grid, threads, 0, job.x, job.out, job.weight, job.weight_stride, job.size, job.eps);
}

template <bool HAS_SUM, class T> static enum rc launch_norm(const norm_job<T> &job, struct err *err)
{
    uint32_t chains = ceil_div(job.size, 8), threads;
    if (job.size > 8 * ROW_NORM_THREADS * MAX_PARTS)
        return err_set(err, RC_UNSUPPORTED, "rms_norm: wanted at most %u columns, have %u", 8 * ROW_NORM_THREADS * MAX_PARTS,
                       job.size);
    if (job.size <= HEAD_NORM_MAX) {
        chains <= 4 ? launch_heads<4, HAS_SUM>(job) :
        chains <= 8 ? launch_heads<8, HAS_SUM>(job) :
        chains <= 16 ? launch_heads<16, HAS_SUM>(job) : launch_heads<32, HAS_SUM>(job);
        return launched(err, "rms_norm");
    }
    threads = row_threads(chains);
    switch (ceil_div(chains, threads)) {
    case 1: launch_rows<1, HAS_SUM>(job, threads); break;
    case 2: launch_rows<2, HAS_SUM>(job, threads); break;
    default: launch_rows<MAX_PARTS, HAS_SUM>(job, threads);
    }
    return launched(err, "rms_norm");
}

template <class T> static bool are_heads_aligned(const struct view &v, uint32_t n_heads)
{
    return has_eights<T>(v) && v.width / n_heads % 8 == 0;
}

enum rc cuda_rms_norm(void *ctx, const struct rms_norm_args *args, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    if (!args->n_rows)
        return RC_OK;
    enum rc rc = RC_OK;
    visit_type(cuda->dtype, [&](auto value) {
        using T = decltype(value);
        rows<T> x(args->x);
        bool is_aligned = are_heads_aligned<T>(args->x, args->n_heads) && are_heads_aligned<T>(args->out, args->n_heads) &&
                          (uintptr_t)args->weight % 16 == 0;
        norm_job<T> job = {cuda, {x, x, x}, rows<T>(args->out), args->weight, args->n_rows, args->n_heads,
                           args->x.width / args->n_heads, args->weight_stride, args->eps, is_aligned};
        rc = launch_norm<false>(job, err);
    });
    return rc;
}

/* One launch where a row's parts fit the registers, else b is normed apart. */
template <class T>
static enum rc norm_terms(struct cuda *cuda, const struct add_rms_norm_args *args, bool is_aligned, struct err *err)
{
    uint32_t size = args->out.width, chains = ceil_div(size, 8), threads = row_threads(chains);
    uint32_t parts = ceil_div(chains, threads);
    if (is_aligned && (uintptr_t)args->inner_weight % 16 == 0 && size > HEAD_NORM_MAX && parts <= 2) {
        norm_source<T> x = {rows<T>(args->a), rows<T>(args->b), rows<T>(args->sum)};
        launch(cuda, parts == 1 ? norm_sums<T, 1> : norm_sums<T, 2>, args->n_rows, threads, 0, x, rows<T>(args->out),
               args->inner_weight, args->inner_eps, args->weight, size, args->eps);
        return launched(err, "add_rms_norm");
    }
    struct rms_norm_args inner = {args->n_rows, 1, args->b, args->out, args->inner_weight, args->inner_eps, 0};
    struct add_rms_norm_args rest = *args;
    rest.b = args->out;
    rest.inner_weight = NULL;
    rest.route = NULL;
    rest.linear = NULL;
    enum rc rc = cuda_rms_norm(cuda, &inner, err);
    return rc ? rc : cuda_add_rms_norm(cuda, &rest, err);
}

/* The routes of the normed rows. */
static enum rc route_normed(struct cuda *cuda, const struct add_rms_norm_args *args, struct err *err)
{
    enum rc rc = cuda_linear(cuda, args->router, err);
    return rc ? rc : cuda_route(cuda, args->route, err);
}

template <class T> static bool are_rows_aligned(const struct add_rms_norm_args *args)
{
    return has_eights<T>(args->a) && has_eights<T>(args->b) && has_eights<T>(args->sum) && has_eights<T>(args->out) &&
           (uintptr_t)args->weight % 16 == 0;
}

/* Sum, norm and routes in one launch; false: nothing was done. */
static bool norm_routed(struct cuda *cuda, const struct add_rms_norm_args *args)
{
    bool is_done = false;
    if (cuda->is_portable) /* it has no clusters */
        return false;
    visit_type(cuda->dtype, [&](auto value) {
        using T = decltype(value);
        if constexpr (sizeof(T) == 2)
            if ((is_done = norm_route_fits(args, are_rows_aligned<T>(args))))
                launch_norm_route<T>(cuda, args);
    });
    if (is_done)
        cuda->awaited_routes = args->route->routes;
    return is_done;
}

enum rc cuda_add_rms_norm(void *ctx, const struct add_rms_norm_args *args, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    if (!args->n_rows || (args->linear && linear_normed(cuda, args)) || (args->route && norm_routed(cuda, args)))
        return launched(err, "add_rms_norm");
    enum rc rc = RC_OK;
    visit_type(cuda->dtype, [&](auto value) {
        using T = decltype(value);
        bool is_aligned = are_rows_aligned<T>(args);
        norm_job<T> job = {cuda, {rows<T>(args->a), rows<T>(args->b), rows<T>(args->sum)}, rows<T>(args->out), args->weight,
                           args->n_rows, 1, args->out.width, 0, args->eps, is_aligned};
        rc = args->inner_weight ? norm_terms<T>(cuda, args, is_aligned, err) : launch_norm<true>(job, err);
    });
    if (!rc && args->linear)
        return cuda_linear(cuda, args->linear, err);
    return rc || !args->route ? rc : route_normed(cuda, args, err);
}
