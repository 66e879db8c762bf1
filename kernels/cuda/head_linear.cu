/* out[h] = W_h x[h] or W_h^T x[h] for every head h, W_h being some rows of one matrix: the two products that latent
 * attention absorbs, both from the matrix as the checkpoint has it. Every output is one chain of fused multiply-adds in
 * float32 over W_h's columns (or rows, transposed), of the exact values of its type, rounded once. A block is up to 8 rows
 * of x and 128 outputs of a head, a thread one output of each row, so a weight is read once for 8 rows. Bound by the bytes
 * of the matrix for few rows (16 heads of 256 x 512 in bfloat16: 4 MB, 1 us at 4.5 TB/s; the chain's latency is some 20
 * times that), for many by the loads. */
#include "weight.cuh"

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
multiply_heads(struct head_matrix w, rows<T> x, rows<T> out, uint32_t n_rows, uint32_t part, uint32_t width)
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
            float value = IS_TRANSPOSED ? weight_value(W(), base + (size_t)(k + i) * w.row_bytes, n)
                                        : weight_value(W(), base + (size_t)n * w.row_bytes, k + i);
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
    const dim3 grid(ceil_div(width, THREADS), args->n_heads, ceil_div(args->n_rows, ROWS));
    visit_weight(part->dtype, [&](auto weight) {
        visit_type(cuda->dtype, [&](auto value) {
            using T = decltype(value);
            using W = decltype(weight);
            launch(cuda, args->is_transposed ? multiply_heads<T, W, true> : multiply_heads<T, W, false>, grid, THREADS, 0, w,
                   rows<T>(args->x), rows<T>(args->out), args->n_rows, args->x.width / args->n_heads, width);
        });
    });
    return launched(err, "head_linear");
}
