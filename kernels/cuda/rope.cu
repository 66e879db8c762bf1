/* rope_table: table[r][i] = {m cos(a), m sin(a)}, a = (float)positions[r] * inv_freq[i], a product of float32.
 * rope: pairs (x, y) of every head become (x cos - y sin, y cos + x sin), in place, each product and sum rounded in float32 and
 * the result once more to the type of activations. kv_write: keys and values of every row into their pages, rounded to the
 * pages' type. All of it element by element and bound by bytes. */
#include "kv.cuh"

#define THREADS 128u

static __global__ void make_table(struct rope_table_args args)
{
    start_next();
    wait_for_input();
    uint32_t r = blockIdx.x;
    for (uint32_t i = threadIdx.x; i < args.n_freqs; i += THREADS) {
        float angle = (float)args.positions[r] * args.inv_freq[i], *to = args.table + 2 * ((size_t)r * args.n_freqs + i);
        to[0] = args.magnitude * cosf(angle);
        to[1] = args.magnitude * sinf(angle);
    }
}

enum rc cuda_rope_table(void *ctx, const struct rope_table_args *args, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    if (!args->n_rows)
        return RC_OK;
    launch(cuda, make_table, args->n_rows, THREADS, 0, *args);
    return launched(err, "rope_table");
}

template <class T>
static __global__ void rotate_heads(rows<T> x, const float *table, uint32_t n_freqs, uint32_t head_dim, bool interleaved)
{
    start_next();
    wait_for_input();
    uint32_t r = blockIdx.x;
    T *head = x.at(r, blockIdx.y * head_dim);
    for (uint32_t i = threadIdx.x; i < n_freqs; i += THREADS) {
        const float *turn = table + 2 * ((size_t)r * n_freqs + i);
        T *first = head + (interleaved ? 2 * i : i), *second = head + (interleaved ? 2 * i + 1 : i + n_freqs);
        float a = to_float(*first), b = to_float(*second);
        *first = round_to<T>(a * turn[0] - b * turn[1]);
        *second = round_to<T>(b * turn[0] + a * turn[1]);
    }
}

enum rc cuda_rope(void *ctx, const struct rope_args *args, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    if (!args->n_rows || !args->n_freqs)
        return RC_OK;
    const struct view *views[2] = {&args->q, &args->k};
    for (const struct view *view : views)
        visit_type(cuda->dtype, [&](auto value) {
            using T = decltype(value);
            dim3 grid(args->n_rows, view->width / args->head_dim);
            launch(cuda, rotate_heads<T>, grid, THREADS, 0, rows<T>(*view), args->table, args->n_freqs, args->head_dim,
                   args->interleaved);
        });
    return launched(err, "rope");
}

template <class T, class C>
static __global__ void write_rows(rows<T> k, rows<T> v, cache<C> kv, const int32_t *positions, const int32_t *row_seq)
{
    start_next();
    wait_for_input();
    uint32_t r = blockIdx.x, head = blockIdx.y;
    C *key = kv.key((uint32_t)row_seq[r], (uint32_t)positions[r], head), *value = key + kv.values();
    for (uint32_t d = threadIdx.x; d < kv.head_dim; d += THREADS) {
        key[d] = round_to<C>(to_float(*k.at(r, head * kv.head_dim + d)));
        value[d] = round_to<C>(to_float(*v.at(r, head * kv.head_dim + d)));
    }
}

enum rc cuda_kv_write(void *ctx, const struct kv_write_args *args, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    const struct batch_view *batch = args->batch;
    if (!batch->n_rows)
        return RC_OK;
    dim3 grid(batch->n_rows, args->kv.n_kv_heads);
    visit_type(cuda->dtype, [&](auto value) {
        visit_type(args->kv.dtype, [&](auto cached) {
            using T = decltype(value);
            using C = decltype(cached);
            launch(cuda, write_rows<T, C>, grid, THREADS, 0, rows<T>(args->k), rows<T>(args->v),
                   cache<C>(args->kv, batch->block_tokens), batch->positions, batch->row_seq);
        });
    });
    return launched(err, "kv_write");
}
