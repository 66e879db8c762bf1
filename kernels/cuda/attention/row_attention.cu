/* out[i][h] = sum over all rows j of i's sequence of p[j] v[j][h'], p = softmax of scale * (q[i][h] . k[j][h']), h' the head
 * of k and v that head h reads; float32, rounded once. Types of two bytes with heads of up to 128 values go to the tensor
 * cores (row_attention_tiles.cuh); here a block has a row and head. A score is one chain over head_dim; thread t has the rows
 * t, t + THREADS, ...; the sum of the p is a chain over these, then block_reduce's tree; a column of out is one chain over j,
 * divided by that sum at the end. So a row's bits depend on its sequence alone. The scores of a row lie in shared memory,
 * which bounds a sequence's length. Bound by operations: 4 n^2 heads head_dim for n rows, which is little for the short texts
 * that encoders take: 256 rows of 12 heads of 32 are 0.1 GFLOP, some us; not tuned. grid_attention adds what depends on the
 * distances in a square (tower_args.h), a chain over head_dim for each line and column. */
#include "../core/launch.cuh"
#include "row_attention_tiles.cuh"

#define THREADS 128u
#define MAX_ROWS 49152u  /* scores of a row, at most */
#define SPARED_BYTES 8192u /* of a block's shared memory, for its largest score and its sum */

/* Room for n floats that are loaded in fours. */
static __host__ __device__ __forceinline__ uint32_t in_fours(uint32_t n)
{
    return (n + 3) & ~3u;
}

/* The sequence that a row belongs to: the last one that begins at it or before. */
static __device__ __forceinline__ uint32_t sequence_of(const int32_t *seq_first_row, uint32_t n_seqs, int32_t row)
{
    uint32_t low = 0, high = n_seqs - 1;
    while (low < high) {
        uint32_t middle = (low + high + 1) / 2;
        if (seq_first_row[middle] <= row)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* What grid_attention_args has beside row_attention_args; side 0: scores do not depend on distances. */
struct square {
    uint32_t side;
    const float *lines, *columns, *shares;
    const int32_t *rows;
};

/* The product of a query with a table of distances at the distance of `place` from `other`. */
static __device__ float distance_product(const square &grid, const float *table, const float *own, uint32_t head_dim,
                                         uint32_t place, uint32_t other)
{
    uint32_t d = place + grid.side - 1 - other;
    const float *a = table + (size_t)grid.rows[2 * d] * head_dim, *b = table + (size_t)grid.rows[2 * d + 1] * head_dim;
    float sum = 0;
    for (uint32_t c = 0; c < head_dim; c++)
        sum = fmaf(own[c], fmaf(grid.shares[2 * d], a[c], grid.shares[2 * d + 1] * b[c]), sum);
    return sum;
}

template <class T>
static __global__ void __launch_bounds__(THREADS)
row_attention_heads(rows<T> q, rows<T> k, rows<T> v, rows<T> out, const int32_t *seq_first_row, uint32_t n_seqs, uint32_t group,
                    uint32_t head_dim, float scale, square grid)
{
    extern __shared__ float memory[]; /* head_dim values of q, a grid's products with lines and columns, then the scores */
    float *own = memory, *products = memory + in_fours(head_dim), *scores = products + in_fours(2 * grid.side);
    uint32_t row = blockIdx.x, column = blockIdx.y * head_dim, kv_column = blockIdx.y / group * head_dim;
    start_next();
    wait_for_input();
    uint32_t s = sequence_of(seq_first_row, n_seqs, (int32_t)row);
    uint32_t first = (uint32_t)seq_first_row[s], n = (uint32_t)seq_first_row[s + 1] - first;
    for (uint32_t c = threadIdx.x; c < head_dim; c += THREADS)
        own[c] = to_float(*q.at(row, column + c));
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < 2 * grid.side; i += THREADS) {
        uint32_t place = row - first, other = i % grid.side;
        products[i] = i < grid.side ? distance_product(grid, grid.lines, own, head_dim, place / grid.side, other)
                                    : distance_product(grid, grid.columns, own, head_dim, place % grid.side, other);
    }
    if (grid.side)
        __syncthreads();
    float most = -INFINITY, sum = 0;
    for (uint32_t j = threadIdx.x; j < n; j += THREADS) {
        const T *key = k.at(first + j, kv_column);
        float score = 0;
        for (uint32_t c = 0; c < head_dim; c++)
            score = fmaf(own[c], to_float(key[c]), score);
        scores[j] = score * scale;
        if (grid.side)
            scores[j] = scores[j] + products[j / grid.side] + products[grid.side + j % grid.side];
        most = fmaxf(most, scores[j]);
    }
    most = block_reduce(most, max_of());
    for (uint32_t j = threadIdx.x; j < n; j += THREADS) {
        scores[j] = expf(scores[j] - most);
        sum = sum + scores[j];
    }
    sum = block_reduce(sum, add_of());
    for (uint32_t c = threadIdx.x; c < head_dim; c += THREADS) {
        float value = 0;
        for (uint32_t j = 0; j < n; j++)
            value = fmaf(scores[j], to_float(*v.at(first + j, kv_column + c)), value);
        *out.at(row, column + c) = round_to<T>(value / sum);
    }
}

static enum rc attend(void *ctx, const struct row_attention_args *args, square grid, const char *name, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    const struct batch_view *batch = args->batch;
    const uint32_t begin = in_fours(args->head_dim) + in_fours(2 * grid.side);
    uint32_t longest = 0;
    if (!batch->n_rows)
        return RC_OK;
    for (uint32_t s = 0; s < batch->n_seqs; s++) {
        uint32_t n = (uint32_t)(batch->host_seq_first_row[s + 1] - batch->host_seq_first_row[s]);
        longest = n > longest ? n : longest;
    }
    const uint32_t room = (cuda->shared_bytes - SPARED_BYTES) / (uint32_t)sizeof(float);
    const uint32_t most = room < MAX_ROWS ? room : MAX_ROWS;
    if (in_fours(longest) + begin > most)
        return err_set(err, RC_UNSUPPORTED, "%s: wanted at most %u rows of a sequence, have %u; lower max_model_len", name,
                       most - begin, longest);
    visit_type(cuda->dtype, [&](auto value) {
        using T = decltype(value);
        size_t shared_bytes = (in_fours(longest) + begin) * sizeof(float);
        /* The same for all threads with a rank of this device. */
        allow_shared(row_attention_heads<T>, cuda->shared_bytes - SPARED_BYTES);
        launch(cuda, row_attention_heads<T>, dim3(batch->n_rows, args->n_heads), THREADS, shared_bytes, rows<T>(args->q),
               rows<T>(args->k), rows<T>(args->v), rows<T>(args->out), batch->seq_first_row, batch->n_seqs,
               args->n_heads / args->n_kv_heads, args->head_dim, args->scale, grid);
    });
    return launched(err, name);
}

/* On the tensor cores, for a type of two bytes. */
template <class T> static void attend_tiles(const struct cuda *cuda, const struct row_attention_args *args)
{
    if (args->head_dim <= 64)
        launch_row_tiles<T, 64>(cuda, args);
    else if (args->head_dim <= 80)
        launch_row_tiles<T, 80>(cuda, args);
    else if (args->head_dim <= 96)
        launch_row_tiles<T, 96>(cuda, args);
    else
        launch_row_tiles<T, 128>(cuda, args);
}

/* The way depends on the type, the heads and where they lie, not on the rows. */
enum rc cuda_row_attention(void *ctx, const struct row_attention_args *args, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    if (cuda->dtype == DTYPE_F32 || !row_tiles_fit(args))
        return attend(ctx, args, square{}, "row_attention", err);
    device_scope scope(cuda->device);
    if (cuda->dtype == DTYPE_BF16)
        attend_tiles<__nv_bfloat16>(cuda, args);
    else
        attend_tiles<__half>(cuda, args);
    return launched(err, "row_attention");
}

enum rc cuda_grid_attention(void *ctx, const struct grid_attention_args *grid, struct err *err)
{
    struct row_attention_args args = {grid->batch, grid->n_heads, grid->n_heads, grid->head_dim, grid->scale, grid->q, grid->k,
                                      grid->v, grid->out};
    square own = {grid->side, grid->lines, grid->columns, grid->shares, grid->rows};
    return attend(ctx, &args, own, "grid_attention", err);
}
