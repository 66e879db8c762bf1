/* state.cuh: shared by the recurrent operations: the address of a unit of a sequence's state (struct state_view), the rows of
 * a sequence, and sums over groups of lanes in one order for every number of tokens taken at once. A state is read before
 * wait_for_input(): within a step only its own operation writes it, and copies of pages end before the first kernel begins.
 * Each file describes the layout of a unit. */
#ifndef LLMPY_CUDA_STATE_CUH
#define LLMPY_CUDA_STATE_CUH

#include "../core/eight.cuh"
#include "../core/launch.cuh"
#include "../linear/activation.cuh"

struct state_pool {
    char *data;
    size_t page_bytes;
    const int32_t *table;
    uint32_t table_stride, first_entry, unit_bytes, units_per_page;
    explicit state_pool(const struct state_view &s)
        : data((char *)s.pool), page_bytes(s.page_bytes), table(s.table), table_stride(s.table_stride),
          first_entry(s.first_entry), unit_bytes(s.unit_bytes), units_per_page(s.units_per_page)
    {
    }
    __device__ __forceinline__ float *unit(uint32_t seq, uint32_t u) const
    {
        uint32_t page = u / units_per_page;
        return in_page(seq, page, u - page * units_per_page);
    }
    __device__ __forceinline__ float *in_page(uint32_t seq, uint32_t page, uint32_t u) const
    {
        size_t number = (size_t)table[(size_t)seq * table_stride + first_entry + page];
        return (float *)(data + number * page_bytes + (size_t)u * unit_bytes);
    }
};

/* A batch; first_row is NULL where every sequence has one row, which is known on the host. */
struct sequences {
    const int32_t *positions, *row_seq, *first_row;
    explicit sequences(const struct batch_view *b)
        : positions(b->positions), row_seq(b->row_seq), first_row(b->n_seqs == b->n_rows ? NULL : b->seq_first_row)
    {
    }
};

struct span {
    uint32_t first, n, seq; /* rows; row of the page tables */
    bool is_new;            /* begins with zeros */
};

static __device__ __forceinline__ struct span span_of(const struct sequences &batch, uint32_t s)
{
    struct span span = {s, 1, 0, false};
    if (batch.first_row) {
        span.first = (uint32_t)batch.first_row[s];
        span.n = (uint32_t)batch.first_row[s + 1] - span.first;
    }
    span.seq = (uint32_t)batch.row_seq[span.first];
    span.is_new = batch.positions[span.first] == 0;
    return span;
}

static __device__ __forceinline__ float softplus(float x)
{
    return x > 20.0f ? x : log1pf(expf(x));
}

/* Sums of N values over groups of LANES lanes, pairwise over lanes 1, 2, 4, ... apart. A lane gets the sum of value number
 * sum_index. */
template <uint32_t LANES, uint32_t N> static __device__ __forceinline__ float group_sums(float (&x)[N])
{
    uint32_t n = N;
#pragma unroll
    for (uint32_t apart = 1; apart < LANES; apart *= 2) {
        if (n > 1)
            n /= 2;
        bool is_upper = N > 1 && apart < N && threadIdx.x & apart;
#pragma unroll
        for (uint32_t i = 0; i < N; i++)
            if (i < n) {
                float mine = x[i], other = x[i];
                if (apart < N) {
                    mine = is_upper ? x[n + i] : x[i];
                    other = is_upper ? x[i] : x[n + i];
                }
                x[i] = mine + __shfl_xor_sync(~0u, other, apart);
            }
    }
    return x[0];
}

/* N a power of two, at most LANES. */
template <uint32_t N> static __device__ __forceinline__ uint32_t sum_index(void)
{
    uint32_t index = 0;
    for (uint32_t apart = 1, half = N / 2; half; apart *= 2, half /= 2)
        index += threadIdx.x & apart ? half : 0;
    return index;
}

/* Four floats of a unit's row of n, from `column` on; zeros beyond. */
template <bool IS_ALIGNED> static __device__ __forceinline__ float4 load_quad(const float *row, uint32_t column, uint32_t n)
{
    float4 x = make_float4(0, 0, 0, 0);
    if (IS_ALIGNED && column < n)
        return *(const float4 *)(row + column);
    if (!IS_ALIGNED) {
        x.x = column < n ? row[column] : 0.0f;
        x.y = column + 1 < n ? row[column + 1] : 0.0f;
        x.z = column + 2 < n ? row[column + 2] : 0.0f;
        x.w = column + 3 < n ? row[column + 3] : 0.0f;
    }
    return x;
}

template <bool IS_ALIGNED> static __device__ __forceinline__ void store_quad(float *row, uint32_t column, uint32_t n, float4 x)
{
    const float values[4] = {x.x, x.y, x.z, x.w};
    if (IS_ALIGNED && column < n)
        *(float4 *)(row + column) = x;
#pragma unroll
    for (uint32_t i = 0; i < 4 && !IS_ALIGNED; i++)
        if (column + i < n)
            row[column + i] = values[i];
}

/* N rows of a unit from `first` on, of n_rows of n_columns: of a group of GROUP lanes a lane has the columns 4 (lane + GROUP q)
 * .. + 4. */
template <bool IS_ALIGNED, uint32_t GROUP, uint32_t N, uint32_t QUADS>
static __device__ __forceinline__ void load_rows(float4 (&s)[N][QUADS], const float *unit, uint32_t first, uint32_t n_rows,
                                                 uint32_t n_columns, bool is_new)
{
#pragma unroll
    for (uint32_t r = 0; r < N; r++)
#pragma unroll
        for (uint32_t q = 0; q < QUADS; q++)
            s[r][q] = is_new || first + r >= n_rows ? make_float4(0, 0, 0, 0)
                                                    : load_quad<IS_ALIGNED>(unit + (size_t)(first + r) * n_columns,
                                                                            4 * (threadIdx.x % GROUP + GROUP * q), n_columns);
}

template <bool IS_ALIGNED, uint32_t GROUP, uint32_t N, uint32_t QUADS>
static __device__ __forceinline__ void store_rows(const float4 (&s)[N][QUADS], float *unit, uint32_t first, uint32_t n_rows,
                                                  uint32_t n_columns)
{
#pragma unroll
    for (uint32_t r = 0; r < N; r++)
#pragma unroll
        for (uint32_t q = 0; q < QUADS; q++)
            if (first + r < n_rows)
                store_quad<IS_ALIGNED>(unit + (size_t)(first + r) * n_columns, 4 * (threadIdx.x % GROUP + GROUP * q), n_columns,
                                       s[r][q]);
}

/* Walks n tokens in chunks, by a block, with two places for them in shared memory: while a chunk is computed, the one before it
 * ends, the next one is staged, and the one behind that is read. read(first token) into registers, which stage(place) puts
 * into a place; many(place, token) computes AT_ONCE tokens of it, and one(place, token) a single one; finish(place, first
 * token, tokens) takes the results from where the same thread staged. */
template <uint32_t TOKENS, uint32_t AT_ONCE, class Read, class Stage, class Many, class One, class Finish>
static __device__ __forceinline__ void walk_chunks(uint32_t n, Read read, Stage stage, Many many, One one, Finish finish)
{
    read(0);
    stage(0);
    read(TOKENS);
    for (uint32_t done = 0, place = 0; done < n; done += TOKENS, place ^= 1) {
        __syncthreads();
        if (done)
            finish(place ^ 1, done - TOKENS, TOKENS);
        if (done + TOKENS < n)
            stage(place ^ 1);
        read(done + 2 * TOKENS);
        const uint32_t end = min(TOKENS, n - done);
        uint32_t token = 0;
        for (; token + AT_ONCE <= end; token += AT_ONCE)
            many(place, token);
        for (; token < end; token++)
            one(place, token);
    }
    __syncthreads();
    const uint32_t last = (n - 1) / TOKENS;
    finish(last % 2, last * TOKENS, n - last * TOKENS);
}

/* The recurrence, then the product with its gate: an act other than silu. */
template <class A>
static enum rc gate_apart(struct cuda *cuda, A args, enum rc (*run)(void *, const A *, struct err *), struct err *err)
{
    struct gated_args gated = {args.batch->n_rows, args.act, args.gate, args.out, args.out};
    args.gate.data = NULL;
    enum rc rc = run(cuda, &args, err);
    return rc ? rc : cuda_gated(cuda, &gated, err);
}

/* True if rows of n floats in units start and end on multiples of 16 bytes. */
static inline bool state_is_aligned(const struct state_view *s, uint32_t n)
{
    return (uintptr_t)s->pool % 16 == 0 && s->page_bytes % 16 == 0 && s->unit_bytes % 16 == 0 && n % 4 == 0;
}

#endif
