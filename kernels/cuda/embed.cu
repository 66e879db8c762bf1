/* out[r] = scale * row token_ids[r] of the matrix: the exact values of its type, one product, rounded once to the type of
 * activations. A block a row; bound by the latency of one read. An id outside of the matrix gives NaN, which the sampler
 * reports. */
#include "weight.cuh"

template <class T, class W>
static __global__ void embed_rows(struct cuda_part part, const int32_t *token_ids, float scale, uint32_t n_rows_all,
                                  rows<T> out)
{
    start_next();
    wait_for_input();
    uint32_t id = (uint32_t)token_ids[blockIdx.x];
    if (id >= n_rows_all) {
        for (uint32_t k = threadIdx.x; k < out.width; k += blockDim.x)
            *out.at(blockIdx.x, k) = round_to<T>(NAN);
        return;
    }
    if (id - part.first_row >= part.n_rows)
        return;
    const uint8_t *row = (const uint8_t *)part.data + (id - part.first_row) * part.row_bytes;
    for (uint32_t k = threadIdx.x; k < out.width; k += blockDim.x)
        *out.at(blockIdx.x, k) = round_to<T>(weight_value(W(), row, k) * scale);
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
                launch(cuda, embed_rows<decltype(value), decltype(weight)>, args->n_rows, 256, 0, args->matrix->parts[i],
                       args->token_ids, args->scale, args->matrix->n_rows, rows<decltype(value)>(args->out));
            });
        });
    return launched(err, "embed");
}
