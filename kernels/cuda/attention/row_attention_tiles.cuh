/* row_attention_tiles.cuh: row_attention on the tensor cores, for activations of two bytes and heads of up to 128 values. A
 * block has up to 128 rows of a segment and one head; a warp has 16 or 32 of them. Keys and values come in tiles of 64 from the
 * segment's first row on, the next tile under the products of this one. Per tile S = Q K^T is a chain over head_dim in steps of
 * 16, m' = max(m, max S), p = 2^((S - m') c), O = O a + P V with P rounded to the type of activations, l = l a + a thread's p
 * in the order of the keys; a = 2^((m - m') c), c = scale log2 e. The sums of four threads are joined in one tree at the end,
 * out = O / l. So a row's bits depend on its segment alone, and not on its place in a block.
 *
 * Bound by operations: 4 n^2 heads head_dim for n rows; 5,476 rows, 16 heads of 80: 0.15 TFLOP, 0.2 ms at 790 TFLOP/s. A block
 * reads all keys and values of its head, from the caches; a warp of 32 rows reads them from shared memory half as often as two
 * of 16. */
#ifndef LLMPY_CUDA_ROW_ATTENTION_TILES_CUH
#define LLMPY_CUDA_ROW_ATTENTION_TILES_CUH

#include "../core/copies.cuh"
#include "../core/launch.cuh"
#include "../core/mma.cuh"
#include "../core/wgmma.cuh"

#define ROW_KEYS 64u      /* of a tile */
#define ROW_THREADS 128u
#define ROW_SEGMENTS 256u /* of a launch */
#define ROW_MAX_DIM 128u

/* Segments of a launch; their tiles of rows are numbered consecutively, and those of segment i end before tile_end[i]. */
struct row_segments {
    uint32_t n;
    uint32_t tile_end[ROW_SEGMENTS], first[ROW_SEGMENTS], n_rows[ROW_SEGMENTS];
};

/* A row in shared memory has 16 bytes more than its values, so that eight rows lie in different banks. */
template <uint32_t D> struct row_shape {
    static const uint32_t parts = D == 128 ? 1 : 2; /* of 16 rows, of a warp */
    static const uint32_t warp_rows = 16 * parts, rows = ROW_THREADS / 32 * warp_rows;
    static const uint32_t pitch = D * 2 + 16, tile_bytes = ROW_KEYS * pitch, shared_bytes = rows * pitch + 4 * tile_bytes;
};

static __device__ __forceinline__ uint32_t segment_of_tile(const struct row_segments &list, uint32_t tile)
{
    uint32_t low = 0, high = list.n - 1;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (tile < list.tile_end[middle])
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

static __device__ __forceinline__ float two_to_the(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
    return y;
}

/* Starts to copy rows begin .. begin + N - 1 of a segment, one head of them; rows from n on, and columns from dim on, are
 * zeros. */
template <class T, uint32_t D, uint32_t N>
static __device__ __forceinline__ void fetch_rows(const rows<T> &x, uint32_t to, uint32_t first, uint32_t begin, uint32_t n,
                                                  uint32_t column, uint32_t dim)
{
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < N * (D / 8); i += ROW_THREADS) {
        const uint32_t row = i / (D / 8), c = i % (D / 8) * 8;
        const bool is_there = begin + row < n && c < dim;
        copy_16_if(to + row * row_shape<D>::pitch + c * 2,
                   is_there ? x.at(first + begin + row, column + c) : x.at(first, column), is_there);
    }
}

/* The rows of a warp: two of each thread in every part. */
template <class T, uint32_t D> struct row_sums {
    static const uint32_t parts = row_shape<D>::parts, pitch = row_shape<D>::pitch;
    float s[parts][ROW_KEYS / 8][4], o[parts][D / 8][4], m[parts][2], l[parts][2];

    __device__ __forceinline__ void begin(void)
    {
#pragma unroll
        for (uint32_t p = 0; p < parts; p++) {
#pragma unroll
            for (uint32_t i = 0; i < D / 8; i++)
                for (uint32_t e = 0; e < 4; e++)
                    o[p][i][e] = 0;
            for (uint32_t e = 0; e < 2; e++) {
                m[p][e] = -INFINITY;
                l[p][e] = 0;
            }
        }
    }

    /* s = the products of the queries that begin at `queries` with a tile of keys. */
    __device__ __forceinline__ void score(uint32_t queries, uint32_t keys)
    {
        const uint32_t lane = threadIdx.x % 32, own = queries + lane % 16 * pitch + lane / 16 * 16;
        const uint32_t other = keys + (lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * 16;
#pragma unroll
        for (uint32_t p = 0; p < parts; p++)
#pragma unroll
            for (uint32_t i = 0; i < ROW_KEYS / 8; i++)
                for (uint32_t e = 0; e < 4; e++)
                    s[p][i][e] = 0;
#pragma unroll
        for (uint32_t k = 0; k < D / 16; k++) {
            uint32_t q[parts][4];
#pragma unroll
            for (uint32_t p = 0; p < parts; p++)
                load_matrices(q[p], own + p * 16 * pitch + k * 32);
#pragma unroll
            for (uint32_t i = 0; i < ROW_KEYS / 16; i++) {
                uint32_t r[4];
                load_matrices(r, other + i * 16 * pitch + k * 32);
                const uint32_t low[2] = {r[0], r[1]}, high[2] = {r[2], r[3]};
#pragma unroll
                for (uint32_t p = 0; p < parts; p++) {
                    mma(s[p][2 * i], q[p], low, T());
                    mma(s[p][2 * i + 1], q[p], high, T());
                }
            }
        }
    }

    /* Hides the keys of the tile from `n` on. */
    __device__ __forceinline__ void hide(uint32_t n)
    {
#pragma unroll
        for (uint32_t p = 0; p < parts; p++)
#pragma unroll
            for (uint32_t i = 0; i < ROW_KEYS / 8; i++)
#pragma unroll
                for (uint32_t e = 0; e < 4; e++)
                    if (i * 8 + threadIdx.x % 4 * 2 + e % 2 >= n)
                        s[p][i][e] = -INFINITY;
    }

    __device__ __forceinline__ void soften(uint32_t p, uint32_t e, float factor)
    {
        float most = m[p][e], sum = 0;
#pragma unroll
        for (uint32_t i = 0; i < ROW_KEYS / 8; i++)
            most = fmaxf(most, fmaxf(s[p][i][2 * e], s[p][i][2 * e + 1]));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        const float before = two_to_the((m[p][e] - most) * factor), least = -most * factor;
#pragma unroll
        for (uint32_t i = 0; i < ROW_KEYS / 8; i++)
#pragma unroll
            for (uint32_t c = 2 * e; c < 2 * e + 2; c++) {
                s[p][i][c] = two_to_the(fmaf(s[p][i][c], factor, least));
                sum = sum + s[p][i][c];
            }
        l[p][e] = fmaf(l[p][e], before, sum);
        m[p][e] = most;
#pragma unroll
        for (uint32_t i = 0; i < D / 8; i++) {
            o[p][i][2 * e] = o[p][i][2 * e] * before;
            o[p][i][2 * e + 1] = o[p][i][2 * e + 1] * before;
        }
    }

    /* o += p v of a tile of values. */
    __device__ __forceinline__ void add(uint32_t values)
    {
        const uint32_t lane = threadIdx.x % 32, own = values + lane % 16 * pitch + lane / 16 * 16;
#pragma unroll
        for (uint32_t k = 0; k < ROW_KEYS / 16; k++) {
            uint32_t a[parts][4];
#pragma unroll
            for (uint32_t p = 0; p < parts; p++)
#pragma unroll
                for (uint32_t i = 0; i < 4; i++)
                    a[p][i] = pack(s[p][2 * k + i / 2][i % 2 * 2], s[p][2 * k + i / 2][i % 2 * 2 + 1], T());
#pragma unroll
            for (uint32_t i = 0; i < D / 16; i++) {
                uint32_t r[4];
                load_transposed(r, own + k * 16 * pitch + i * 32);
                const uint32_t low[2] = {r[0], r[1]}, high[2] = {r[2], r[3]};
#pragma unroll
                for (uint32_t p = 0; p < parts; p++) {
                    mma(o[p][2 * i], a[p], low, T());
                    mma(o[p][2 * i + 1], a[p], high, T());
                }
            }
        }
    }

    /* Takes in a tile of keys and values that lie behind each other; n: its keys. */
    __device__ __forceinline__ void take(uint32_t queries, uint32_t keys, uint32_t n, float factor)
    {
        score(queries, keys);
        if (n < ROW_KEYS)
            hide(n);
#pragma unroll
        for (uint32_t p = 0; p < parts; p++)
#pragma unroll
            for (uint32_t e = 0; e < 2; e++)
                soften(p, e, factor);
        add(keys + row_shape<D>::tile_bytes);
    }

    /* place: first row of the warp in its segment, which has n; dim: columns of a head. */
    __device__ __forceinline__ void write(const rows<T> &out, uint32_t first, uint32_t place, uint32_t n, uint32_t column,
                                          uint32_t dim) const
    {
#pragma unroll
        for (uint32_t p = 0; p < parts; p++)
#pragma unroll
            for (uint32_t e = 0; e < 2; e++) {
                const uint32_t row = place + p * 16 + threadIdx.x % 32 / 4 + e * 8;
                float sum = l[p][e] + __shfl_xor_sync(~0u, l[p][e], 1);
                sum = sum + __shfl_xor_sync(~0u, sum, 2);
                if (row >= n)
                    continue;
#pragma unroll
                for (uint32_t i = 0; i < D / 8; i++) {
                    const uint32_t c = i * 8 + threadIdx.x % 4 * 2;
                    if (c < dim)
                        *(uint32_t *)out.at(first + row, column + c) =
                            pack(o[p][i][2 * e] / sum, o[p][i][2 * e + 1] / sum, T());
                }
            }
    }
};

template <class T, uint32_t D>
static __global__ void __launch_bounds__(ROW_THREADS, 2)
row_attention_tiles(rows<T> q, rows<T> k, rows<T> v, rows<T> out, const __grid_constant__ struct row_segments list,
                    uint32_t group, uint32_t dim, float factor)
{
    typedef row_shape<D> shape;
    extern __shared__ __align__(16) char row_memory[]; /* queries; keys, values, keys, values */
    const uint32_t queries = shared_address(row_memory), ring = queries + shape::rows * shape::pitch;
    const uint32_t entry = segment_of_tile(list, blockIdx.x), first = list.first[entry], n = list.n_rows[entry];
    const uint32_t begin = (blockIdx.x - (entry ? list.tile_end[entry - 1] : 0)) * shape::rows;
    const uint32_t column = blockIdx.y * dim, kv_column = blockIdx.y / group * dim, n_tiles = (n + ROW_KEYS - 1) / ROW_KEYS;
    const uint32_t own = threadIdx.x / 32 * shape::warp_rows;
    start_next();
    wait_for_input();
    auto fetch = [&](uint32_t tile) {
        const uint32_t to = ring + tile % 2 * 2 * shape::tile_bytes;
        fetch_rows<T, D, ROW_KEYS>(k, to, first, tile * ROW_KEYS, n, kv_column, dim);
        fetch_rows<T, D, ROW_KEYS>(v, to + shape::tile_bytes, first, tile * ROW_KEYS, n, kv_column, dim);
    };
    row_sums<T, D> sums;
    sums.begin();
    fetch_rows<T, D, shape::rows>(q, queries, first, begin, n, column, dim);
    fetch(0);
    copies_close();
    for (uint32_t tile = 0; tile < n_tiles; tile++) {
        if (tile + 1 < n_tiles)
            fetch(tile + 1);
        copies_close();
        copies_wait<1>();
        __syncthreads();
        if (begin + own < n)
            sums.take(queries + own * shape::pitch, ring + tile % 2 * 2 * shape::tile_bytes, n - tile * ROW_KEYS, factor);
        __syncthreads();
    }
    sums.write(out, first, begin + own, n, column, dim);
}

/* Whether heads lie so that 16 bytes of them can be copied at a time. */
static inline bool row_tiles_fit(const struct row_attention_args *args)
{
    const struct view *views[] = {&args->q, &args->k, &args->v};
    for (const struct view *view : views)
        if ((uintptr_t)view->data % 16 || view->stride % 8)
            return false;
    return args->head_dim % 8 == 0 && args->head_dim <= ROW_MAX_DIM && args->scale > 0 && (uintptr_t)args->out.data % 4 == 0 &&
           args->out.stride % 2 == 0;
}

/* Starts the kernel for all segments, a list at a time. */
template <class T, uint32_t D> static void launch_row_tiles(const struct cuda *cuda, const struct row_attention_args *args)
{
    typedef row_shape<D> shape;
    const struct batch_view *batch = args->batch;
    const float factor = args->scale * 1.44269504f;
    allow_shared(row_attention_tiles<T, D>, shape::shared_bytes);
    for (uint32_t s = 0; s < batch->n_seqs;) {
        struct row_segments list = {};
        uint32_t n_tiles = 0;
        for (; s < batch->n_seqs && list.n < ROW_SEGMENTS; s++, list.n++) {
            list.first[list.n] = (uint32_t)batch->host_seq_first_row[s];
            list.n_rows[list.n] = (uint32_t)(batch->host_seq_first_row[s + 1] - batch->host_seq_first_row[s]);
            n_tiles += ceil_div(list.n_rows[list.n], shape::rows);
            list.tile_end[list.n] = n_tiles;
        }
        if (n_tiles)
            launch(cuda, row_attention_tiles<T, D>, dim3(n_tiles, args->n_heads), ROW_THREADS, shape::shared_bytes,
                   rows<T>(args->q), rows<T>(args->k), rows<T>(args->v), rows<T>(args->out), list,
                   args->n_heads / args->n_kv_heads, args->head_dim, factor);
    }
}

#endif
