/* out[r] = scale * row first_row + token_ids[r] - first_id of the matrix: the exact values of its type, one product, rounded
 * once to the type of activations; eight elements a thread. Rows of ids outside of [first_id, end_id) are left to other ranks.
 * Bound by bytes, 31 us for 8192 rows of 4096 bfloat16 values; a single row by the latency of two reads. An id outside of the
 * matrix gives NaN, which the sampler reports. */
#include "../core/eight.cuh"
#include "../core/launch.cuh"
#include "../core/weight_format.cuh"

#define THREADS 256u

/* Eight values of a row from k on, as far as there are n. */
template <bool IS_ALIGNED, class W>
static __device__ __forceinline__ void weight_part(W weight, const uint8_t *row, uint32_t k, uint32_t n, float (&x)[8])
{
    if (IS_ALIGNED && W::dtype == DTYPE_F32)
        load_part<true>((const float *)row, k, n, x);
    else if (IS_ALIGNED && W::dtype == DTYPE_F16)
        load_part<true>((const __half *)row, k, n, x);
    else if (IS_ALIGNED && W::dtype == DTYPE_BF16)
        load_part<true>((const __nv_bfloat16 *)row, k, n, x);
    else
#pragma unroll
        for (uint32_t i = 0; i < 8; i++)
            x[i] = k + i < n ? weight.value(row, k + i) : 0.0f;
}

/* The ids may be the work of the step's first kernels. */
template <class T, class W, bool IS_ALIGNED>
static __global__ void __launch_bounds__(THREADS)
embed_rows(struct cuda_part part, const int32_t *token_ids, uint32_t first_row, int32_t first_id, int32_t end_id, float scale,
           uint32_t n_rows_all, rows<T> out)
{
    float x[8];
    start_next();
    wait_for_input();
    const int32_t token_id = token_ids ? token_ids[blockIdx.x] : 0;
    if (end_id && (token_id < first_id || token_id >= end_id))
        return;
    uint32_t id = first_row + (uint32_t)token_id - (uint32_t)first_id;
    uint32_t column = 8 * (blockIdx.y * THREADS + threadIdx.x);
    bool is_known = id < n_rows_all;
    if (is_known && id - part.first_row >= part.n_rows)
        return;
    const uint8_t *row = (const uint8_t *)part.data + (is_known ? id - part.first_row : 0) * part.row_bytes;
    weight_part<IS_ALIGNED>(W(), row, column, out.width, x);
#pragma unroll
    for (uint32_t i = 0; i < 8; i++)
        x[i] = is_known ? x[i] * scale : NAN;
    store_part<IS_ALIGNED>(out.at(blockIdx.x, 0), column, out.width, x);
}

enum rc cuda_embed(void *ctx, const struct embed_args *args, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    if (!args->n_rows)
        return RC_OK;
    for (uint32_t i = 0; i < args->matrix->n_parts; i++)
        visit_weight(args->matrix->parts[i].dtype, [&](auto weight) {
            visit_type(cuda->dtype, [&](auto value) {
                using T = decltype(value);
                using W = decltype(weight);
                const struct cuda_part &part = args->matrix->parts[i];
                bool is_aligned = has_eights<T>(args->out) && part.row_bytes % 16 == 0;
                launch(cuda, is_aligned ? embed_rows<T, W, true> : embed_rows<T, W, false>,
                       dim3(args->n_rows, ceil_div(args->out.width, 8 * THREADS)), THREADS, 0, part, args->token_ids,
                       args->first_row, args->first_id, args->end_id, args->scale, args->matrix->n_rows, rows<T>(args->out));
            });
        });
    return launched(err, "embed");
}
