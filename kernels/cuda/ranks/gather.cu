/* gather.cu: meet and gather. Each rank stores what it has of a value into all ranks' memory, 16 bytes a thread and turn, and
 * meets them (meeting.cuh). Values are final: they are copied, never added, so all bits are kept, also of -0 and of a NaN.
 *
 * Without a norm all threads of the grid share the rank's part evenly. A norm of the whole rows runs in the same launch: a
 * block has the same rows on all ranks, and norms them as soon as its own flags have come. It has the threads of rms_norm for
 * rows of this size and that operation's functions (row_norm.cuh), so its bits are equal. Heads, rows at odd addresses and rows
 * of more than 16,384 columns are normed by a second launch.
 *
 * Bound by a flag's way to the other device, 1.3 us, and from 1 MB on by the link, 360 GB/s a direction. */
#include "gather.cuh"
#include "../norm/row_norm.cuh"

#define PLAIN_BLOCKS 32u /* saturate the link */
#define SHARED_BLOCKS 8u /* of ranks that share a device: all their grids and clusters of 8 blocks fit beside each other */
#define MAX_PARTS 4u     /* chains of a thread */

/* A rank's own part: some columns of all rows, or of all equal parts of the rows; rows of some token ids; or parts of some
 * experts' routes. */
struct own_part {
    const void *a, *b;  /* row 0, first own column; b: NULL, or added to a */
    void *to[MAX_RANKS];
    uint32_t a_stride, b_stride, to_stride, n_to, n_rows, n_columns;
    const int32_t *token_ids; /* NULL: all rows */
    const struct route *routes; /* [n_rows][route_stride], or NULL: all parts */
    uint32_t route_stride, n_parts, part_columns; /* n_parts 0: rows have no parts */
    int32_t first_id, end_id;
    bool is_aligned;          /* everything is taken in eights */
    bool is_by_rows;          /* a block has rows blockIdx.x, blockIdx.x + gridDim.x, ... */
};

template <class T>
static __device__ __forceinline__ void put_eight(T *row, uint32_t column, uint32_t n, bool is_aligned, const eight<T> &x)
{
    if (is_aligned)
        *(eight<T> *)(row + column) = x;
    else
#pragma unroll
        for (uint32_t i = 0; i < 8; i++)
            if (column + i < n)
                row[column + i] = x.values[i];
}

template <class T>
static __device__ __forceinline__ eight<T> get_eight(const T *row, uint32_t column, uint32_t n, bool is_aligned)
{
    return is_aligned ? part_of<true>(row, column, n) : part_of<false>(row, column, n);
}

/* a, or a + b as the operation `add` rounds it. */
template <class T> static __device__ __forceinline__ eight<T> own_eight(const own_part &own, uint32_t row, uint32_t column)
{
    const T *a = (const T *)own.a + (size_t)row * own.a_stride, *b = (const T *)own.b + (size_t)row * own.b_stride;
    eight<T> x = get_eight(a, column, own.n_columns, own.is_aligned);
    if (!own.b)
        return x;
    float sum[8], other[8];
    to_floats(x, sum);
    to_floats(get_eight(b, column, own.n_columns, own.is_aligned), other);
#pragma unroll
    for (uint32_t i = 0; i < 8; i++)
        sum[i] = sum[i] + other[i];
    return to_eight<T>(sum);
}

template <class T> static __device__ __forceinline__ void store_own(const own_part &own)
{
    const uint32_t first = own.is_by_rows ? blockIdx.x : 0, apart = own.is_by_rows ? gridDim.x : 1;
    const uint32_t lane = threadIdx.x + (own.is_by_rows ? 0 : blockIdx.x * blockDim.x);
    const uint32_t lanes = own.is_by_rows ? blockDim.x : gridDim.x * blockDim.x;
    const uint32_t n_eights = (own.n_columns + 7) / 8, n = (own.n_rows + apart - 1 - first) / apart * n_eights;
    for (uint32_t i = lane; i < n; i += lanes) {
        const uint32_t row = first + i / n_eights * apart, column = i % n_eights * 8;
        if (own.token_ids && (own.token_ids[row] < own.first_id || own.token_ids[row] >= own.end_id))
            continue;
        const eight<T> x = own_eight<T>(own, row, column);
        for (uint32_t r = 0; r < own.n_to; r++)
            put_eight((T *)own.to[r] + (size_t)row * own.to_stride, column, own.n_columns, own.is_aligned, x);
    }
}

/* The same of rows that have equal parts. */
template <class T> static __device__ __forceinline__ void store_parts(const own_part &own)
{
    const uint32_t n_eights = (own.n_columns + 7) / 8, n = own.n_rows * own.n_parts * n_eights;
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        const uint32_t part = i / n_eights % own.n_parts, row = i / n_eights / own.n_parts, column = i % n_eights * 8;
        const struct route *route = own.routes ? own.routes + (size_t)row * own.route_stride + part : NULL;
        if (route && (route->expert < own.first_id || route->expert >= own.end_id))
            continue;
        const size_t at = (size_t)row * own.to_stride + part * own.part_columns;
        const eight<T> x = get_eight((const T *)own.a + at, column, own.n_columns, own.is_aligned);
        for (uint32_t r = 0; r < own.n_to; r++)
            put_eight((T *)own.to[r] + at, column, own.n_columns, own.is_aligned, x);
    }
}

template <class T> struct whole_norm {
    rows<T> x, out;
    const float *weight;
    uint32_t n_rows, size;
    float eps;
};

template <class T>
static __global__ void __launch_bounds__(MEETING_THREADS)
gather_push(const __grid_constant__ struct meeting meeting, const __grid_constant__ own_part own)
{
    start_next_if_alone(meeting);
    wait_for_input();
    const uint32_t number = next_number(meeting);
    store_own<T>(own);
    meet_ranks(meeting, number);
}

template <class T>
static __global__ void __launch_bounds__(MEETING_THREADS)
gather_push_parts(const __grid_constant__ struct meeting meeting, const __grid_constant__ own_part own)
{
    start_next_if_alone(meeting);
    wait_for_input();
    const uint32_t number = next_number(meeting);
    store_parts<T>(own);
    meet_ranks(meeting, number);
}

/* PARTS chains a thread. */
template <class T, uint32_t PARTS>
static __global__ void __launch_bounds__(MEETING_THREADS)
gather_push_norm(const __grid_constant__ struct meeting meeting, const __grid_constant__ own_part own,
                 const __grid_constant__ whole_norm<T> norm)
{
    const uint32_t column = 8 * threadIdx.x, step = 8 * blockDim.x;
    float w[PARTS][8];
    start_next_if_alone(meeting);
#pragma unroll
    for (uint32_t i = 0; i < PARTS; i++)
        weight_part<true>(norm.weight, 0, column + i * step, norm.size, w[i]);
    wait_for_input();
    const uint32_t number = next_number(meeting);
    store_own<T>(own);
    meet_ranks(meeting, number);
    for (uint32_t row = blockIdx.x, use = 0; row < norm.n_rows; row += gridDim.x, use ^= 1) {
        float values[PARTS][8], sum = 0;
#pragma unroll
        for (uint32_t i = 0; i < PARTS; i++)
            load_part<true>(norm.x.at(row, 0), column + i * step, norm.size, values[i]);
#pragma unroll
        for (uint32_t i = 0; i < PARTS; i++)
            for (uint32_t j = 0; j < 8; j++)
                sum = fmaf(values[i][j], values[i][j], sum);
        const float scale = norm_scale(block_squares(sum, use, blockDim.x / 32), norm.size, norm.eps);
#pragma unroll
        for (uint32_t i = 0; i < PARTS; i++) {
            scale_part(values[i], w[i], scale);
            store_part<true>(norm.out.at(row, 0), column + i * step, norm.size, values[i]);
        }
    }
}

/* Rank 0's drawn ids. The kernel that resolves ids below 0 (staging.cu) reads those of the other slot, so a rank that is still
 * in the step before is not disturbed. */
struct drawn_ids {
    const int32_t *from;
    int32_t *to[MAX_RANKS];
    uint32_t n_to, n;
};

static __global__ void __launch_bounds__(MEETING_THREADS)
meet_step(const __grid_constant__ struct meeting meeting, const __grid_constant__ drawn_ids ids)
{
    start_next_if_alone(meeting);
    wait_for_input();
    const uint32_t number = next_number(meeting);
    for (uint32_t i = threadIdx.x; i < ids.n; i += blockDim.x) {
        const int32_t id = ids.from[i];
        for (uint32_t r = 0; r < ids.n_to; r++)
            ids.to[r][i] = id;
    }
    meet_ranks(meeting, number);
    if (!threadIdx.x)
        meeting.state->step = number;
}

/* ---- what a rank stores -------------------------------------------------------------------------------------------------- */

static enum rc refuse_place(const struct gather_args *args, const struct cuda_team *team, uint32_t purpose, struct err *err)
{
    return err_set(err, RC_INTERNAL, "gather: %u rows of %u columns do not lie in the rank's shared %s of %zu bytes",
                   args->n_rows, args->whole.width, purpose == COMM_LOGITS ? "logits" : "arena", team->size_bytes[purpose]);
}

static enum rc check_args(const struct cuda *cuda, const struct gather_args *args, struct err *err)
{
    const bool has_columns = args->kind == GATHER_COLUMNS || args->kind == GATHER_TO_FIRST;
    const uint32_t a = args->a.width, b = args->b.width, part_columns = args->whole.width / max(args->n_chosen, 1u);
    if (args->kind > GATHER_TO_FIRST)
        return err_set(err, RC_INTERNAL, "gather: there is no kind %u", args->kind);
    if (has_columns && (uint64_t)args->first + args->n_columns > part_columns)
        return err_set(err, RC_INTERNAL, "gather: columns %u to %llu do not lie in %u columns", args->first,
                       (unsigned long long)args->first + args->n_columns, part_columns);
    if (a | b && (args->n_chosen || args->kind != GATHER_COLUMNS || a != args->n_columns || (b && b != a)))
        return err_set(err, RC_INTERNAL, "gather: terms of %u and %u columns do not fit %u columns of kind %u", a, b,
                       args->n_columns, args->kind);
    if (args->kind == GATHER_ROWS && !args->token_ids)
        return err_set(err, RC_INTERNAL, "gather: rows have no token ids");
    if (args->kind == GATHER_ROUTES && (!args->routes || !args->n_chosen || args->whole.width % args->n_chosen))
        return err_set(err, RC_INTERNAL, "gather: %u columns are not %u equal parts with routes", args->whole.width,
                       args->n_chosen);
    const uint32_t purpose = args->kind == GATHER_TO_FIRST ? COMM_LOGITS : COMM_ARENA;
    const size_t item = args->kind == GATHER_TO_FIRST || cuda->dtype == DTYPE_F32 ? 4 : 2;
    const char *base = cuda->team->memory[purpose][cuda->rank], *data = (const char *)args->whole.data;
    const size_t n_bytes = ((size_t)(args->n_rows - 1) * args->whole.stride + args->whole.width) * item;
    const size_t size = cuda->team->size_bytes[purpose];
    if (!base || data < base || (size_t)(data - base) > size || n_bytes > size - (size_t)(data - base))
        return refuse_place(args, cuda->team, purpose, err);
    return RC_OK;
}

template <class T> static bool is_aligned(const void *data, uint32_t stride)
{
    return (uintptr_t)data % 16 == 0 && stride * sizeof(T) % 16 == 0;
}

template <class T> static struct own_part part_of_rank(const struct cuda *cuda, const struct gather_args *args)
{
    const struct cuda_team *team = cuda->team;
    const uint32_t purpose = args->kind == GATHER_TO_FIRST ? COMM_LOGITS : COMM_ARENA;
    const uint32_t n_targets = args->kind == GATHER_TO_FIRST ? 1 : team->n_ranks;
    const bool has_terms = args->a.width, has_rows = args->kind == GATHER_ROWS, has_routes = args->kind == GATHER_ROUTES;
    T *own = (T *)args->whole.data + (has_rows || has_routes ? 0 : args->first);
    struct own_part part = {};
    part.a = has_terms ? args->a.data : own;
    part.a_stride = has_terms ? args->a.stride : args->whole.stride;
    part.b = args->b.width ? args->b.data : NULL;
    part.b_stride = args->b.stride;
    part.to_stride = args->whole.stride;
    part.n_rows = args->n_rows;
    part.n_parts = args->n_chosen;
    part.part_columns = args->whole.width / max(args->n_chosen, 1u);
    part.n_columns = args->is_stored ? 0 : has_rows || has_routes ? part.part_columns : args->n_columns;
    part.token_ids = has_rows ? args->token_ids : NULL;
    part.routes = has_routes ? args->routes : NULL;
    part.route_stride = args->route_stride;
    part.first_id = args->first_id;
    part.end_id = args->end_id;
    part.is_by_rows = args->norm != NULL;
    part.is_aligned = part.n_columns % 8 == 0 && (!part.n_parts || part.part_columns % 8 == 0) &&
                      is_aligned<T>(own, part.to_stride) && is_aligned<T>(part.a, part.a_stride) &&
                      (!part.b || is_aligned<T>(part.b, part.b_stride));
    const size_t offset = (size_t)((char *)own - team->memory[purpose][cuda->rank]);
    const bool is_in_place = part.a == own && !part.b && (args->n_rows == 1 || part.a_stride == part.to_stride);
    for (uint32_t i = 0; i < team->n_ranks; i++) { /* from this rank on: not all ranks store to the same one at a time */
        const uint32_t r = (cuda->rank + i) % team->n_ranks;
        if (r < n_targets && (r != cuda->rank || !is_in_place))
            part.to[part.n_to++] = team->memory[purpose][r] + offset;
    }
    return part;
}

/* ---- launches ------------------------------------------------------------------------------------------------------------ */

/* Blocks of a meeting; equal on all ranks, so only of what is equal there. */
static uint32_t grid_of(const struct cuda_team *team, const struct gather_args *args)
{
    const uint32_t most = team->shares_device ? SHARED_BLOCKS : args->norm ? MEETING_BLOCKS : PLAIN_BLOCKS;
    const uint64_t eights = args->is_stored ? 1 : (uint64_t)args->n_rows * ceil_div(args->whole.width, 8) / team->n_ranks;
    const uint64_t wanted = args->norm ? args->n_rows : (eights + MEETING_THREADS - 1) / MEETING_THREADS;
    return wanted < 1 ? 1 : wanted < most ? (uint32_t)wanted : most;
}

template <class T> static bool norms_in_place(const struct rms_norm_args *norm)
{
    return norm && norm->n_heads == 1 && has_eights<T>(norm->x) && has_eights<T>(norm->out) &&
           (uintptr_t)norm->weight % 16 == 0 && norm->x.width <= 8 * MEETING_THREADS * MAX_PARTS;
}

template <class T> static void launch_norm(struct cuda *cuda, const struct gather_args *args)
{
    const struct rms_norm_args *norm = args->norm;
    const uint32_t chains = ceil_div(args->whole.width, 8), threads = row_threads(chains), parts = ceil_div(chains, threads);
    const whole_norm<T> whole = {rows<T>(args->whole), rows<T>(norm->out), norm->weight,
                                 args->n_rows, args->whole.width, norm->eps};
    const auto kernel = parts == 1   ? gather_push_norm<T, 1>
                        : parts == 2 ? gather_push_norm<T, 2>
                                     : gather_push_norm<T, MAX_PARTS>;
    launch(cuda, kernel, grid_of(cuda->team, args), threads, 0, meeting_of(cuda, false), part_of_rank<T>(cuda, args), whole);
}

template <class T> static enum rc launch_gather(struct cuda *cuda, const struct gather_args *args, struct err *err)
{
    const bool is_fused = norms_in_place<T>(args->norm);
    if (is_fused)
        launch_norm<T>(cuda, args);
    else
        launch(cuda, args->n_chosen ? gather_push_parts<T> : gather_push<T>, grid_of(cuda->team, args), MEETING_THREADS, 0,
               meeting_of(cuda, false), part_of_rank<T>(cuda, args));
    const enum rc rc = launched(err, "gather");
    return rc || !args->norm || is_fused ? rc : cuda_rms_norm(cuda, args->norm, err);
}

enum rc cuda_gather(void *ctx, const struct gather_args *args, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    if (!cuda->team)
        return err_set(err, RC_INTERNAL, "gather: the context is not connected to other ranks");
    if (!args->n_rows)
        return RC_OK;
    enum rc rc = check_args(cuda, args, err);
    if (!rc && args->kind == GATHER_TO_FIRST)
        return launch_gather<float>(cuda, args, err);
    if (!rc)
        visit_type(cuda->dtype, [&](auto value) { rc = launch_gather<decltype(value)>(cuda, args, err); });
    return rc;
}

enum rc cuda_meet(void *ctx, const struct meet_args *args, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    const struct cuda_team *team = cuda->team;
    if (!team)
        return err_set(err, RC_INTERNAL, "meet: the context is not connected to other ranks");
    if (args->n_tasks > cuda->max_tasks)
        return err_set(err, RC_INTERNAL, "meet: wanted at most %u drawn ids, have %u", cuda->max_tasks, args->n_tasks);
    const size_t first = (size_t)(args->slot & 1) * cuda->max_tasks;
    struct drawn_ids ids = {};
    ids.from = cuda->sampled + first;
    ids.n = cuda->rank ? 0 : args->n_tasks;
    for (uint32_t r = 1; r < team->n_ranks; r++)
        ids.to[ids.n_to++] = team->ranks[r]->sampled + first;
    launch(cuda, meet_step, 1, MEETING_THREADS, 0, meeting_of(cuda, true), ids);
    return launched(err, "meet");
}
