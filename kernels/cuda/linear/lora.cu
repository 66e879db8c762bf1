/* Adapters: delta[r][n] = scale * sum over j of t[r][j] * B[n][j], t[r][j] = sum over k of A[j][k] * x[r][k], part by part of
 * a matrix; -0.0 for rows without an adapter. linear.cuh adds delta to the sums of the linear. A and B are float32, x has the
 * type of activations. Orders, the same for every number of rows:
 *   t      thread i of T has a chain over the columns 4 i .. 4 i + 3, 4 (i + T) .. of x; then pairwise over lanes 16, 8, 4,
 *          2, 1 apart, then over warps 1, 2, 4, .. apart. T: 256, or 1024 for more than 4096 columns
 *   delta  one chain over j, then times scale
 * Once a step lora_sort puts the rows in the order of their slots, in tiles of up to eight rows of one slot; a block of
 * lora_shrink or lora_expand takes one tile, so it reads A or B once for eight rows. A and B come in before the wait. Bound by
 * latency for few rows (two kernels, while the linear behind them fetches its weights), else by the bytes of delta: 256 rows of
 * 28672 columns are 29 MB. */
#include "../core/launch.cuh"
#include "../core/eight.cuh"
#include "lora.cuh"

#define TILE 8u              /* rows */
#define SHRINK_LONG 4096u    /* more columns take more threads */
#define EXPAND_THREADS 128u
#define EXPAND_COLUMNS (4 * EXPAND_THREADS)
#define EXPAND_RANKS 16u     /* rows of B that a block holds at a time */
#define MAX_SLOTS 1024u
#define PARTS 8u             /* of a launch */

/* A list on the device: LORA_ROWS rows in the order of their slots, the number of tiles, the tiles. */
#define LIST_TILES (LORA_ROWS + 4)

struct lora_rows {
    int32_t *lists; /* [2: rows, wanted rows][n_chunks][list_values] */
    int32_t *slots; /* [2][n_chunks][LORA_ROWS] of the rows as they lie */
    uint32_t n_chunks, list_values, n_slots;
};

struct lora_tile {
    int32_t slot; /* -1: no adapter */
    uint32_t first, n_rows, unused;
};

struct lora_place {
    uint32_t first_row, n_rows, first_block; /* of lora_expand */
    uint32_t number;                         /* in the matrix */
    size_t head, a, b;
};

struct lora_work {
    const char *slots;
    size_t slot_bytes;
    const int32_t *list;
    float *t, *delta;
    uint32_t delta_stride, n_cols, max_rank, n_parts, n_here; /* n_here: in places */
    struct lora_place places[PARTS];
    __device__ __forceinline__ bool has_tile(uint32_t i) const { return i < (uint32_t)list[LORA_ROWS]; }
    __device__ __forceinline__ lora_tile tile(uint32_t i) const { return *(const lora_tile *)(list + LIST_TILES + 4 * i); }
    __device__ __forceinline__ const char *slot(const lora_tile &tile) const
    {
        return slots + (size_t)(uint32_t)tile.slot * slot_bytes;
    }
    __device__ __forceinline__ float *t_of(uint32_t row, uint32_t part) const
    {
        return t + ((size_t)row * n_parts + part) * max_rank;
    }
};

/* ---- the rows' order ----------------------------------------------------------------------------------------------------- */

enum rc cuda_lora_open(struct cuda *cuda, struct err *err)
{
    const uint32_t n_slots = cuda->options.max_loras;
    if (!n_slots)
        return RC_OK;
    if (n_slots > MAX_SLOTS)
        return err_set(err, RC_CONFIG, "max_loras: wanted at most %u, have %u", MAX_SLOTS, n_slots);
    struct lora_rows *rows = (struct lora_rows *)mem_calloc(1, sizeof *rows);
    if (!rows)
        return err_set(err, RC_MEMORY, "cuda: no memory for the context");
    cuda->lora_rows = rows;
    rows->n_slots = n_slots;
    rows->n_chunks = ceil_div(cuda->options.max_rows, LORA_ROWS);
    rows->list_values = LIST_TILES + 4 * (LORA_ROWS / TILE + n_slots + 1);
    enum rc rc = cuda_take(cuda, MEMORY_WORK, (size_t)2 * rows->n_chunks * LORA_ROWS * sizeof(int32_t), &rows->slots, err);
    return rc ? rc : cuda_take(cuda, MEMORY_WORK, (size_t)2 * rows->n_chunks * rows->list_values * sizeof(int32_t),
                               &rows->lists, err);
}

const int32_t *cuda_lora_row_slots(const struct cuda *cuda, bool of_wanted)
{
    return cuda->lora_rows->slots + (of_wanted ? (size_t)cuda->lora_rows->n_chunks * LORA_ROWS : 0);
}

void cuda_lora_close(struct cuda *cuda)
{
    mem_free(cuda->lora_rows);
}

/* A block sorts a chunk of the step's rows, or of its wanted rows. It lets no later kernel begin before its end, so kernels may
 * read the lists before their wait. slots: NULL: no row has an adapter. */
static __global__ void __launch_bounds__(LORA_ROWS)
lora_sort(const int32_t *slots, const int32_t *wanted, uint32_t n_rows, uint32_t n_wanted, uint32_t n_pad, uint32_t n_slots,
          uint32_t list_values, int32_t *lists, int32_t *slots_of)
{
    __shared__ uint32_t counts[MAX_SLOTS + 1], first_row[MAX_SLOTS + 1], first_tile[MAX_SLOTS + 1];
    const uint32_t t = threadIdx.x, row = blockIdx.x * LORA_ROWS + t, n_own = blockIdx.y ? n_wanted : n_rows;
    const bool is_row = row < n_own + n_pad;
    int32_t slot = -1;
    if (slots && row < n_own)
        slot = slots[blockIdx.y ? wanted[row] : row];
    for (uint32_t s = t; s <= n_slots; s += LORA_ROWS)
        counts[s] = 0;
    __syncthreads();
    const uint32_t place = is_row ? atomicAdd(&counts[slot + 1], 1) : 0;
    __syncthreads();
    for (uint32_t s = t; s <= n_slots; s += LORA_ROWS) {
        uint32_t n = 0, n_tiles = 0;
        for (uint32_t i = 0; i < s; i++) {
            n += counts[i];
            n_tiles += (counts[i] + TILE - 1) / TILE;
        }
        first_row[s] = n;
        first_tile[s] = n_tiles;
    }
    __syncthreads();
    wait_for_input(); /* the step before reads the lists */
    int32_t *list = lists + (size_t)(blockIdx.y * gridDim.x + blockIdx.x) * list_values;
    if (is_row) {
        list[first_row[slot + 1] + place] = (int32_t)t;
        slots_of[(blockIdx.y * gridDim.x + blockIdx.x) * LORA_ROWS + t] = slot;
    }
    for (uint32_t s = t; s <= n_slots; s += LORA_ROWS)
        for (uint32_t i = 0; i < counts[s]; i += TILE)
            *(lora_tile *)(list + LIST_TILES + 4 * (first_tile[s] + i / TILE)) =
                lora_tile{(int32_t)s - 1, first_row[s] + i, min(TILE, counts[s] - i), 0};
    if (t == 0)
        list[LORA_ROWS] = (int32_t)(first_tile[n_slots] + (counts[n_slots] + TILE - 1) / TILE);
    __threadfence(); /* the next kernel's blocks begin when these have ended */
}

enum rc cuda_lora_begin(struct cuda *cuda, const int32_t *slots, const int32_t *wanted, uint32_t n_rows, uint32_t n_wanted,
                        uint32_t n_pad, struct err *err)
{
    const struct lora_rows *rows = cuda->lora_rows;
    if (!rows)
        return err_set(err, RC_INTERNAL, "begin: wanted max_loras above 0 for rows with adapters, have 0");
    launch(cuda, lora_sort, dim3(rows->n_chunks, 2), LORA_ROWS, 0, slots, wanted, n_rows, n_wanted, n_pad, rows->n_slots,
           rows->list_values, rows->lists, rows->slots);
    return launched(err, "begin");
}

/* ---- t ------------------------------------------------------------------------------------------------------------------- */

template <bool IS_ALIGNED, class T>
static __device__ __forceinline__ void load_four(const T *from, uint32_t column, uint32_t n_columns, float (&x)[4])
{
    if constexpr (IS_ALIGNED) {
        struct alignas(4 * sizeof(T)) four {
            T values[4];
        } v = *(const four *)(from + column);
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            x[i] = to_float(v.values[i]);
    } else {
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            x[i] = column + i < n_columns ? to_float(from[column + i]) : 0.0f;
    }
}

/* The sums of N values over the warp's lanes, pairwise over lanes 16, 8, 4, 2, 1 apart. Returns that of value sum_number(). */
template <uint32_t N> static __device__ __forceinline__ float sum_lanes(float (&v)[N])
{
    const uint32_t lane = threadIdx.x % 32;
    uint32_t apart = 16;
#pragma unroll
    for (uint32_t n = N / 2; n; n /= 2, apart /= 2)
#pragma unroll
        for (uint32_t i = 0; i < n; i++) {
            const float keep = lane & apart ? v[i + n] : v[i], give = lane & apart ? v[i] : v[i + n];
            v[i] = keep + __shfl_xor_sync(~0u, give, apart);
        }
    for (; apart; apart /= 2)
        v[0] = v[0] + __shfl_xor_sync(~0u, v[0], apart);
    return v[0];
}

template <uint32_t N> static __device__ __forceinline__ uint32_t sum_number(void)
{
    return threadIdx.x % 32 / (32 / N);
}

template <bool IS_ALIGNED, uint32_t RANKS>
static __device__ __forceinline__ void load_a(const float *const (&a)[RANKS], uint32_t column, uint32_t n_cols,
                                              float (&m)[RANKS][4])
{
    if (column < n_cols)
#pragma unroll
        for (uint32_t j = 0; j < RANKS; j++)
            load_four<IS_ALIGNED>(a[j], column, n_cols, m[j]);
}

/* Adds the products of four columns; rows beyond n_rows have the first row's values. */
template <bool IS_ALIGNED, class T, uint32_t ROWS, uint32_t RANKS>
static __device__ __forceinline__ void add_products(const T *const (&from)[ROWS], uint32_t column, uint32_t n_cols,
                                                    const float (&m)[RANKS][4], float (&sum)[ROWS * RANKS])
{
    if (column < n_cols)
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r++) {
            float v[4];
            load_four<IS_ALIGNED>(from[r], column, n_cols, v);
#pragma unroll
            for (uint32_t j = 0; j < RANKS; j++)
#pragma unroll
                for (uint32_t i = 0; i < 4; i++)
                    sum[r * RANKS + j] = fmaf(m[j][i], v[i], sum[r * RANKS + j]);
        }
}

/* A block has RANKS elements of t for a tile of up to ROWS rows. */
template <class T, uint32_t ROWS, uint32_t THREADS, uint32_t RANKS, bool IS_ALIGNED>
static __global__ void __launch_bounds__(THREADS) lora_shrink(const __grid_constant__ lora_work w, rows<T> x)
{
    constexpr uint32_t N = ROWS * RANKS, N_WARPS = THREADS / 32;
    constexpr uint32_t HELD = ROWS > 1 && THREADS > 256 ? 2 : 4; /* turns of A that come in before the wait */
    __shared__ float sums[N_WARPS][N];
    const lora_place &place = w.places[blockIdx.y];
    const uint32_t first = blockIdx.x * RANKS;
    start_next();
    const bool is_tile = w.has_tile(blockIdx.z);
    const lora_tile tile = is_tile ? w.tile(blockIdx.z) : lora_tile{-1, 0, 0, 0};
    const char *slot = tile.slot < 0 ? NULL : w.slot(tile);
    const uint32_t rank = slot ? *(const uint32_t *)(slot + place.head) : 0;
    if (first >= rank) {
        wait_for_input();
        return;
    }
    const float *a[RANKS];
    const T *from[ROWS];
#pragma unroll
    for (uint32_t j = 0; j < RANKS; j++)
        a[j] = (const float *)(slot + place.a) + (size_t)min(first + j, rank - 1) * w.n_cols;
#pragma unroll
    for (uint32_t r = 0; r < ROWS; r++)
        from[r] = x.at((uint32_t)w.list[tile.first + min(r, tile.n_rows - 1)], 0);
    const uint32_t begin = 4 * threadIdx.x, step = 4 * THREADS;
    float held[HELD][RANKS][4], sum[N] = {};
#pragma unroll
    for (uint32_t i = 0; i < HELD; i++)
        load_a<IS_ALIGNED>(a, begin + i * step, w.n_cols, held[i]);
    wait_for_input();
#pragma unroll
    for (uint32_t i = 0; i < HELD; i++)
        add_products<IS_ALIGNED>(from, begin + i * step, w.n_cols, held[i], sum);
    for (uint32_t column = begin + HELD * step; column < w.n_cols; column += step) {
        float m[RANKS][4];
        load_a<IS_ALIGNED>(a, column, w.n_cols, m);
        add_products<IS_ALIGNED>(from, column, w.n_cols, m, sum);
    }
    const float total = sum_lanes<N>(sum);
    if (threadIdx.x % 32 % (32 / N) == 0)
        sums[threadIdx.x / 32][sum_number<N>()] = total;
    __syncthreads();
    const uint32_t r = threadIdx.x / RANKS, j = first + threadIdx.x % RANKS;
    if (r >= tile.n_rows || j >= rank)
        return;
    float parts[N_WARPS];
#pragma unroll
    for (uint32_t i = 0; i < N_WARPS; i++)
        parts[i] = sums[i][threadIdx.x];
    w.t_of((uint32_t)w.list[tile.first + r], place.number)[j] = sum_pairs<N_WARPS>(parts);
}

/* ---- delta --------------------------------------------------------------------------------------------------------------- */

template <bool IS_ALIGNED>
static __device__ __forceinline__ void store_four(float *row, uint32_t column, uint32_t n_columns, const float (&v)[4])
{
    if constexpr (IS_ALIGNED) {
        *(float4 *)(row + column) = make_float4(v[0], v[1], v[2], v[3]);
    } else {
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            if (column + i < n_columns)
                row[column + i] = v[i];
    }
}

/* Rows first .. first + EXPAND_RANKS of the transpose of B; zeros beyond the rank. */
template <bool IS_ALIGNED>
static __device__ __forceinline__ void load_b(const float *b, uint32_t first, uint32_t rank, uint32_t column, uint32_t n_rows,
                                              float (&m)[EXPAND_RANKS][4])
{
#pragma unroll
    for (uint32_t j = 0; j < EXPAND_RANKS; j++)
        if (column < n_rows && first + j < rank)
            load_four<IS_ALIGNED>(b + (size_t)(first + j) * n_rows, column, n_rows, m[j]);
        else
            m[j][0] = m[j][1] = m[j][2] = m[j][3] = 0;
}

/* A block has EXPAND_COLUMNS columns of a part for a tile of up to ROWS rows. */
template <uint32_t ROWS, bool IS_ALIGNED>
static __global__ void __launch_bounds__(EXPAND_THREADS) lora_expand(const __grid_constant__ lora_work w)
{
    __shared__ float4 t[ROWS][EXPAND_RANKS / 4];
    __shared__ uint32_t row_of[ROWS];
    start_next();
    const bool is_tile = w.has_tile(blockIdx.y);
    const lora_tile tile = is_tile ? w.tile(blockIdx.y) : lora_tile{-1, 0, 0, 0};
    uint32_t p = 0;
    while (p + 1 < w.n_here && w.places[p + 1].first_block <= blockIdx.x)
        p++;
    const lora_place &place = w.places[p];
    const uint32_t column = (blockIdx.x - place.first_block) * EXPAND_COLUMNS + 4 * threadIdx.x;
    const char *slot = tile.slot < 0 ? NULL : w.slot(tile);
    const uint32_t rank = slot ? *(const uint32_t *)(slot + place.head) : 0;
    const float scale = rank ? *(const float *)(slot + place.head + 4) : -0.0f;
    const float *b = rank ? (const float *)(slot + place.b) : NULL;
    float m[EXPAND_RANKS][4], sum[ROWS][4];
    load_b<IS_ALIGNED>(b, 0, rank, column, place.n_rows, m);
    if (threadIdx.x < tile.n_rows)
        row_of[threadIdx.x] = (uint32_t)w.list[tile.first + threadIdx.x];
#pragma unroll
    for (uint32_t r = 0; r < ROWS; r++)
        for (uint32_t i = 0; i < 4; i++)
            sum[r][i] = rank ? 0.0f : 1.0f; /* 1 * -0.0 */
    __syncthreads();
    wait_for_input();
    for (uint32_t first = 0; first < rank; first += EXPAND_RANKS) {
        if (first) {
            load_b<IS_ALIGNED>(b, first, rank, column, place.n_rows, m);
            __syncthreads();
        }
        for (uint32_t i = threadIdx.x; i < tile.n_rows * EXPAND_RANKS; i += EXPAND_THREADS) {
            const uint32_t j = i % EXPAND_RANKS, r = i / EXPAND_RANKS;
            ((float *)t[r])[j] = first + j < rank ? w.t_of(row_of[r], place.number)[first + j] : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r++) {
            if (ROWS > 1 && r >= tile.n_rows)
                break;
#pragma unroll
            for (uint32_t j = 0; j < EXPAND_RANKS; j += 4) {
                const float4 v = t[r][j / 4];
#pragma unroll
                for (uint32_t i = 0; i < 4; i++) {
                    sum[r][i] = fmaf(v.x, m[j][i], sum[r][i]);
                    sum[r][i] = fmaf(v.y, m[j + 1][i], sum[r][i]);
                    sum[r][i] = fmaf(v.z, m[j + 2][i], sum[r][i]);
                    sum[r][i] = fmaf(v.w, m[j + 3][i], sum[r][i]);
                }
            }
        }
    }
    if (!is_tile || column >= place.n_rows)
        return;
#pragma unroll
    for (uint32_t r = 0; r < ROWS; r++) {
        if (r >= tile.n_rows)
            break;
        float v[4];
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            v[i] = scale * sum[r][i];
        store_four<IS_ALIGNED>(w.delta + (size_t)row_of[r] * w.delta_stride + place.first_row, column, place.n_rows, v);
    }
}

/* ---- the host's side ----------------------------------------------------------------------------------------------------- */

/* Tiles of n rows, at most. */
static uint32_t most_tiles(const struct lora_rows *rows, uint32_t n)
{
    const uint32_t some = n / TILE + (n < rows->n_slots + 1 ? n : rows->n_slots + 1);
    return some < n ? some : n;
}

/* Fills the places of parts first, first + 1, ...; returns the blocks of their columns. */
static uint32_t fill_places(const struct lora_args *args, uint32_t first, struct lora_work *w)
{
    uint32_t n_blocks = 0;
    w->n_here = args->n_parts - first < PARTS ? args->n_parts - first : PARTS;
    for (uint32_t i = 0; i < w->n_here; i++) {
        const struct lora_part *part = &args->parts[first + i];
        w->places[i] = {part->first_row, part->n_rows, n_blocks, first + i, part->head, part->a, part->b};
        n_blocks += ceil_div(part->n_rows, EXPAND_COLUMNS);
    }
    return n_blocks;
}

/* Can rows of B and delta be read and written in fours? */
static bool has_fours(const struct lora_work *w)
{
    bool fits = w->delta_stride % 4 == 0 && (uintptr_t)w->delta % 16 == 0;
    for (uint32_t i = 0; i < w->n_here; i++)
        fits = fits && w->places[i].n_rows % 4 == 0 && w->places[i].first_row % 4 == 0;
    return fits;
}

template <class T, uint32_t THREADS, uint32_t RANKS>
static void launch_shrink(const struct cuda *cuda, const struct lora_args *args, const lora_work &w, bool is_aligned,
                          uint32_t n_tiles)
{
    const auto kernel = args->n_rows == 1
                            ? (is_aligned ? lora_shrink<T, 1, THREADS, RANKS, true> : lora_shrink<T, 1, THREADS, RANKS, false>)
                            : (is_aligned ? lora_shrink<T, TILE, THREADS, RANKS, true>
                                          : lora_shrink<T, TILE, THREADS, RANKS, false>);
    launch(cuda, kernel, dim3(ceil_div(args->max_rank, RANKS), w.n_here, n_tiles), THREADS, 0, w, rows<T>(args->x));
}

static auto expand_kernel(uint32_t n_rows, bool is_aligned)
{
    if (n_rows == 1)
        return is_aligned ? lora_expand<1, true> : lora_expand<1, false>;
    return is_aligned ? lora_expand<TILE, true> : lora_expand<TILE, false>;
}

enum rc cuda_lora(void *ctx, const struct lora_args *args, struct err *err)
{
    const struct lora_rows *sorted = ((struct cuda *)ctx)->lora_rows;
    if (!sorted || !args->is_delta || args->row_slots || args->first_row % LORA_ROWS || args->n_rows > LORA_ROWS ||
        args->first_row >= sorted->n_chunks * LORA_ROWS)
        return err_set(err, RC_INTERNAL, "lora: wanted is_delta and at most %u rows that begin has sorted", LORA_ROWS);
    const uint32_t chunk = (args->rows ? sorted->n_chunks : 0) + args->first_row / LORA_ROWS;
    return run_rows(ctx, args->n_rows, "lora", err, [&](struct cuda *cuda, auto value) {
        using T = decltype(value);
        struct lora_work w = {(const char *)args->slots, args->slot_bytes,
                              sorted->lists + (size_t)chunk * sorted->list_values, args->scratch, (float *)args->y.data,
                              args->y.stride, args->x.width, args->max_rank, args->n_parts, 0, {}};
        const bool has_x_fours = (uintptr_t)args->x.data % (4 * sizeof(T)) == 0 && args->x.stride % 4 == 0 && w.n_cols % 4 == 0;
        const uint32_t n_tiles = most_tiles(sorted, args->n_rows);
        for (uint32_t first = 0; first < args->n_parts; first += PARTS) {
            const uint32_t n_blocks = fill_places(args, first, &w);
            if (w.n_cols > SHRINK_LONG)
                launch_shrink<T, 1024, 2>(cuda, args, w, has_x_fours, n_tiles);
            else
                launch_shrink<T, 256, 4>(cuda, args, w, has_x_fours, n_tiles);
            launch(cuda, expand_kernel(args->n_rows, has_fours(&w)), dim3(n_blocks, n_tiles), EXPAND_THREADS, 0, w);
        }
    });
}
