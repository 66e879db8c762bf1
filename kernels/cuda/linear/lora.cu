/* Adapters: delta[r][n] = scale * sum over j of t[r][j] * B[n][j], t[r][j] = sum over k of A[j][k] * x[r][k], part by part of
 * a matrix, and a bias; -0.0 for rows without an adapter. linear.cuh adds delta to the sums of the linear. A and B are float32
 * or bfloat16, x has the type of activations. lora_shrink.cuh (t) and lora_expand.cuh (delta) tell the orders, the same for
 * every number of rows; lora_plain.cuh has embeddings and the head.
 * Once a step lora_sort puts the rows in the order of their slots, in tiles of up to TILE rows of one slot; a block of
 * lora_shrink or lora_expand takes one tile, so it reads A or B once for them. Bound by latency for few rows (two kernels,
 * while the linear behind them fetches its weights), else by the bytes of delta: 256 rows of 28672 columns are 29 MB. */
#include "lora.cuh"
#include "lora_expand.cuh"
#include "lora_plain.cuh"
#include "lora_shrink.cuh"

#define MAX_SLOTS 1024u

struct lora_rows {
    int32_t *lists; /* [2: rows, wanted rows][n_chunks][list_values] */
    int32_t *slots; /* [2][n_chunks][LORA_ROWS] of the rows as they lie */
    uint32_t n_chunks, list_values, n_slots;
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

template <class T, class W, uint32_t THREADS, uint32_t RANKS>
static void launch_chains(const struct cuda *cuda, const struct lora_args *args, const lora_work &w, bool is_aligned,
                          uint32_t n_tiles)
{
    const auto kernel = args->n_rows == 1
                            ? (is_aligned ? lora_shrink<T, W, 1, THREADS, RANKS, true>
                                          : lora_shrink<T, W, 1, THREADS, RANKS, false>)
                            : (is_aligned ? lora_shrink<T, W, TILE, THREADS, RANKS, true>
                                          : lora_shrink<T, W, TILE, THREADS, RANKS, false>);
    launch(cuda, kernel, dim3(ceil_div(args->max_rank, RANKS), w.n_here, n_tiles), THREADS, 0, w, rows<T>(args->x));
}

template <class W>
static void launch_chunks(const struct cuda *cuda, const struct lora_args *args, const lora_work &w, bool is_aligned,
                          uint32_t n_tiles)
{
    const auto kernel = args->n_rows == 1
                            ? (is_aligned ? lora_shrink_chunk<W, 1, true> : lora_shrink_chunk<W, 1, false>)
                            : (is_aligned ? lora_shrink_chunk<W, TILE, true> : lora_shrink_chunk<W, TILE, false>);
    launch(cuda, kernel, dim3(w.n_chunks * ceil_div(args->max_rank, CHUNK_RANKS), w.n_here, n_tiles), CHUNK_THREADS, 0, w,
           rows<__nv_bfloat16>(args->x));
}

template <class T, class W>
static void launch_shrink(const struct cuda *cuda, const struct lora_args *args, const lora_work &w, uint32_t n_tiles)
{
    const uint32_t fits = sizeof(T) == 2 ? 8 : 4; /* values of 16 bytes */
    const bool is_aligned = (uintptr_t)args->x.data % 16 == 0 && args->x.stride % fits == 0 && w.n_cols % 8 == 0;
    if constexpr (std::is_same<T, __nv_bfloat16>::value)
        launch_chunks<W>(cuda, args, w, is_aligned, n_tiles);
    else if (w.n_cols > SHRINK_LONG)
        launch_chains<T, W, 1024, 2>(cuda, args, w, is_aligned, n_tiles);
    else
        launch_chains<T, W, 256, 4>(cuda, args, w, is_aligned, n_tiles);
}

template <class W> static auto expand_kernel(uint32_t n_rows, bool is_aligned)
{
    if (n_rows == 1)
        return is_aligned ? lora_expand<W, 1, true> : lora_expand<W, 1, false>;
    return is_aligned ? lora_expand<W, TILE, true> : lora_expand<W, TILE, false>;
}

/* Launches the kernels for all parts; A and B are of type W. */
template <class T, class W>
static void launch_parts(const struct cuda *cuda, const struct lora_args *args, struct lora_work *w, uint32_t n_tiles)
{
    for (uint32_t first = 0; first < args->n_parts; first += PARTS) {
        const uint32_t n_blocks = fill_places(args, first, w);
        launch_shrink<T, W>(cuda, args, *w, n_tiles);
        launch(cuda, expand_kernel<W>(args->n_rows, has_fours(w)), dim3(n_blocks, n_tiles), EXPAND_THREADS, 0, *w);
    }
}

/* Adds to y where it lies. */
static enum rc run_plain(void *ctx, const struct lora_args *args, struct err *err)
{
    return run_rows(ctx, args->n_rows, "lora", err, [&](struct cuda *cuda, auto value) {
        using T = decltype(value);
        struct lora_plain w = {(const char *)args->slots, args->slot_bytes,
                               cuda_lora_row_slots(cuda, args->rows) + args->first_row, args->token_ids, args->scratch,
                               args->base_bias, args->factor, args->first_id, args->end_id, args->x.width, args->n_parts,
                               args->max_rank, 0, {}};
        for (uint32_t i = 0; i < args->n_parts; i++) {
            const dim3 grid(args->n_rows, ceil_div(args->parts[i].n_rows, PLAIN_THREADS));
            w.number = i;
            w.part = args->parts[i];
            if (args->token_ids) {
                launch(cuda, lora_plain_expand<T>, grid, PLAIN_THREADS, 0, w, rows<T>(args->y));
                continue;
            }
            launch(cuda, lora_plain_shrink<T>, dim3(args->n_rows, ceil_div(args->max_rank, PLAIN_WARPS)), 32 * PLAIN_WARPS, 0,
                   w, rows<T>(args->x));
            launch(cuda, lora_plain_expand<float>, grid, PLAIN_THREADS, 0, w, rows<float>(args->y));
        }
    });
}

enum rc cuda_lora(void *ctx, const struct lora_args *args, struct err *err)
{
    const struct lora_rows *sorted = ((struct cuda *)ctx)->lora_rows;
    if (!sorted || args->row_slots || args->first_row >= sorted->n_chunks * LORA_ROWS)
        return err_set(err, RC_INTERNAL, "lora: wanted rows that begin has sorted");
    if (!args->is_delta)
        return run_plain(ctx, args, err);
    if (args->first_row % LORA_ROWS || args->n_rows > LORA_ROWS)
        return err_set(err, RC_INTERNAL, "lora: wanted at most %u rows from a multiple of that on", LORA_ROWS);
    const uint32_t chunk = (args->rows ? sorted->n_chunks : 0) + args->first_row / LORA_ROWS;
    return run_rows(ctx, args->n_rows, "lora", err, [&](struct cuda *cuda, auto value) {
        using T = decltype(value);
        const uint32_t n_of_x = std::is_same<T, __nv_bfloat16>::value ? ceil_div(args->x.width, LORA_CHUNK) : 1;
        struct lora_work w = {(const char *)args->slots, args->slot_bytes,
                              sorted->lists + (size_t)chunk * sorted->list_values, args->scratch, (float *)args->y.data,
                              args->base_bias, args->y.stride, args->x.width, n_of_x, args->max_rank, args->n_parts, 0, {}};
        const uint32_t n_tiles = most_tiles(sorted, args->n_rows);
        (args->is_bfloat16 ? launch_parts<T, __nv_bfloat16> : launch_parts<T, float>)(cuda, args, &w, n_tiles);
    });
}
