/* own_part.cuh: what a rank has of a gathered value, taken in eights: as it lies there, or as a sum that the gather makes. */
#ifndef LLMPY_CUDA_OWN_PART_CUH
#define LLMPY_CUDA_OWN_PART_CUH

#include "../core/eight.cuh"
#include "meeting.cuh"

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
    bool has_owners;          /* a row goes to its owner alone: to has all ranks, NULL where the part is in place */
};

static inline bool is_of_logits(const struct gather_args *args)
{
    return args->kind == GATHER_TO_FIRST || args->kind == GATHER_TO_OWNERS;
}

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

/* The norm of the gathered rows. */
template <class T> struct whole_norm {
    rows<T> x, out;
    const float *weight;
    uint32_t n_rows, size;
    float eps;
};

#define OWN_AHEAD 4u /* eights that a thread has read before it stores the first of them */

template <class T> static __device__ __forceinline__ void store_own(const own_part &own)
{
    const uint32_t first = own.is_by_rows ? blockIdx.x : 0, apart = own.is_by_rows ? gridDim.x : 1;
    const uint32_t lane = threadIdx.x + (own.is_by_rows ? 0 : blockIdx.x * blockDim.x);
    const uint32_t lanes = own.is_by_rows ? blockDim.x : gridDim.x * blockDim.x;
    const uint32_t n_eights = (own.n_columns + 7) / 8, n = (own.n_rows + apart - 1 - first) / apart * n_eights;
    const auto owner_of = [&](uint32_t row) { return ((row + 1) * own.n_to - 1) / own.n_rows; };
    const auto has = [&](uint32_t i) {
        if (i >= n)
            return false;
        const uint32_t row = first + i / n_eights * apart;
        const int32_t id = own.token_ids ? own.token_ids[row] : 0;
        return own.token_ids ? id >= own.first_id && id < own.end_id : !own.has_owners || own.to[owner_of(row)];
    };
    for (uint32_t i = lane; i < n; i += OWN_AHEAD * lanes) {
        eight<T> x[OWN_AHEAD];
#pragma unroll
        for (uint32_t k = 0; k < OWN_AHEAD; k++)
            if (const uint32_t at = i + k * lanes; has(at))
                x[k] = own_eight<T>(own, first + at / n_eights * apart, at % n_eights * 8);
#pragma unroll
        for (uint32_t k = 0; k < OWN_AHEAD; k++) {
            const uint32_t at = i + k * lanes, row = first + at / n_eights * apart;
            if (!has(at))
                continue;
            const uint32_t owner = own.has_owners ? owner_of(row) : 0;
            for (uint32_t r = owner; r < (own.has_owners ? owner + 1 : own.n_to); r++)
                put_eight((T *)own.to[r] + (size_t)row * own.to_stride, at % n_eights * 8, own.n_columns, own.is_aligned, x[k]);
        }
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

/* ---- on the host --------------------------------------------------------------------------------------------------------- */

template <class T> static bool is_aligned(const void *data, uint32_t stride)
{
    return (uintptr_t)data % 16 == 0 && stride * sizeof(T) % 16 == 0;
}

/* Where a rank's own columns lie in the whole value; whole rows and parts begin with it. */
template <class T> static T *own_values(const struct gather_args *args)
{
    return (T *)args->whole.data + (args->kind == GATHER_ROWS || args->kind == GATHER_ROUTES ? 0 : args->first);
}

/* What a rank gives to a gather; the caller adds where it goes. */
template <class T> static struct own_part part_of_args(const struct gather_args *args)
{
    const bool has_terms = args->a.width, has_rows = args->kind == GATHER_ROWS, has_routes = args->kind == GATHER_ROUTES;
    T *own = own_values<T>(args);
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
    return part;
}

#endif
