/* y[r] = sum over r's routes, in their order, of weight * (W_down(e) form(W_up(e) x[r] + bias) + bias): one chain of float32
 * from 0, rounded once; form is act(gate) * up, the clamped product, or act(up). The products are those of a linear of the
 * expert alone, bit for bit (linear.cu's chains), whatever the number of rows and whoever else is in the batch.
 *
 * A block an expert sorts the routes by experts, stable, and gathers the rows of x (sort_routes); up to 8 rows each block of
 * the products sorts for itself. Then up, down, and the sum, by the number of rows an expert has on the average:
 * - few: experts_few.cuh, bound by the bytes of the experts that are wanted. All in one launch: one row,
 *   experts_one.cuh; up to 8 rows of packed MXFP4 (packed.cuh), whose few these are, experts_whole.cuh, one experts_lone.cuh.
 * - many: experts_many.cuh, bound by the tensor cores.
 * - where the copy engine cannot read the weights (float32, quantised types, odd columns): plain tiles, latency bound.
 * Everything that depends on the routes is worked out on the device; so a graph can hold it. Sorting 65,536 routes of 128
 * experts and gathering rows of 4 KB moves 0.3 GB, 80 us on an H200. */
#include "eight.cuh"
#include "experts_few.cuh"
#include "experts_lone.cuh"
#include "experts_many.cuh"
#include "experts_one.cuh"
#include "experts_whole.cuh"
#include "weight.cuh"

#include <math.h>

#define SORTERS 1024u
#define COMBINERS 128u

/* ---- the places of routes ------------------------------------------------------------------------------------------------ */

/* How many of a warp's routes, first to end, are before expert e's and its own. */
static __device__ __forceinline__ void count_routes(const struct mixture &m, uint32_t e, uint32_t first, uint32_t end,
                                                    uint32_t *n_before, uint32_t *n_own)
{
#pragma unroll 4
    for (uint32_t i = first; i < end; i += 32) {
        uint32_t at = i + threadIdx.x % 32, expert = at < end ? (uint32_t)route_at(m, at)->expert : EXPERTS_MAX;
        *n_before += __popc(__ballot_sync(~0u, expert < e));
        *n_own += __popc(__ballot_sync(~0u, expert == e));
    }
}

/* Block e: the places of expert e's routes, and their rows of x. A warp has some of all routes. */
template <class T, bool IS_ALIGNED>
static __global__ void __launch_bounds__(SORTERS) sort_routes(struct mixture m, rows<T> x, T *gathered)
{
    __shared__ uint32_t before[32], own[32];
    const uint32_t e = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t per_warp = (m.n_routes + SORTERS - 1) / SORTERS * 32;
    const uint32_t begin = min(warp * per_warp, m.n_routes), end = min(begin + per_warp, m.n_routes);
    start_next();
    wait_for_input();
    uint32_t n_before = 0, n_own = 0;
    count_routes(m, e, begin, end, &n_before, &n_own);
    if (lane == 0) {
        before[warp] = n_before;
        own[warp] = n_own;
    }
    __syncthreads();
    const uint32_t first = __reduce_add_sync(~0u, before[lane]), n = __reduce_add_sync(~0u, own[lane]);
    uint32_t place = first + __reduce_add_sync(~0u, lane < warp ? own[lane] : 0);
#pragma unroll 4
    for (uint32_t i = begin; i < end; i += 32) {
        bool is_own = i + lane < end && (uint32_t)route_at(m, i + lane)->expert == e;
        uint32_t mask = __ballot_sync(~0u, is_own), at = place + __popc(mask & ((1u << lane) - 1));
        if (is_own) {
            m.places[i + lane] = at;
            m.entries[at] = i + lane;
        }
        place += __popc(mask);
    }
    if (threadIdx.x == 0) {
        m.offsets[e] = first;
        if (e == m.n_experts - 1)
            m.offsets[m.n_experts] = m.n_routes;
    }
    __syncthreads();
    for (uint32_t p = first + warp; p < first + n; p += SORTERS / 32) {
        uint32_t i = m.entries[p], row = i / m.n_chosen;
        float weight = m.is_input_scaled ? route_at(m, i)->weight : 1.0f;
#pragma unroll 4
        for (uint32_t column = 8 * lane; column < x.width; column += 8 * 32) {
            float values[8];
            load_part<IS_ALIGNED>(x.at(row, 0), column, x.width, values);
#pragma unroll
            for (uint32_t c = 0; c < 8; c++)
                values[c] *= weight;
            store_part<IS_ALIGNED>(gathered + (size_t)p * x.width, column, x.width, values);
        }
    }
}

/* y[r] = the sum of r's routes, whose results lie by places. */
template <class T, bool IS_ALIGNED>
static __global__ void __launch_bounds__(COMBINERS) combine_rows(struct mixture m, rows<T> results, rows<T> y)
{
    const uint32_t row = blockIdx.x, column = 8 * (blockIdx.y * COMBINERS + threadIdx.x), lane = threadIdx.x % 32;
    float sum[8] = {};
    start_next();
    wait_for_input();
    uint32_t route = row * m.n_chosen + min(lane, m.n_chosen - 1), place = m.places[route];
    float weight = route_weight(m, route);
#pragma unroll 8
    for (uint32_t i = 0; i < m.n_chosen; i++) {
        float values[8], weight_i = __shfl_sync(~0u, weight, i);
        load_part<IS_ALIGNED>(results.at(__shfl_sync(~0u, place, i), 0), column, y.width, values);
#pragma unroll
        for (uint32_t c = 0; c < 8; c++)
            sum[c] = fmaf(weight_i, values[c], sum[c]);
    }
    store_part<IS_ALIGNED>(y.at(row, 0), column, y.width, sum);
}

/* ---- plain products ------------------------------------------------------------------------------------------------------ */

/* A matrix of all experts, rows_each rows of W one after the other. */
struct plain_weights {
    const char *data;
    size_t row_bytes;
    uint32_t rows_each, n_cols;
};

template <class T>
static __device__ __forceinline__ void plain_store(const struct output &out, const expert_product &product, bool is_product,
                                                   uint32_t expert, uint32_t place, uint32_t n, float sum, float up)
{
    const float *bias = out.bias ? out.bias + ((size_t)expert * out.n_out << is_product) + n : NULL;
    T value = round_to<T>(bias ? sum + bias[0] : sum);
    if (is_product)
        value = round_to<T>(product(to_float(value), to_float(round_to<T>(bias ? up + bias[out.n_out] : up))));
    ((T *)out.y)[(size_t)place * out.y_stride + n] = value;
}

/* As linear.cu's multiply_tiles: 16 rows of W by 8 places of expert blockIdx.y at a time; of gate and of up, if N is 2. */
template <class T, uint32_t N>
static __global__ void __launch_bounds__(32)
multiply_places(struct mixture m, struct plain_weights w, rows<T> x, bool is_aligned, struct output out, expert_product product)
{
    start_next();
    wait_for_input();
    const uint32_t g = threadIdx.x / 4, t = threadIdx.x % 4, n = blockIdx.x * 16 + g, e = blockIdx.y;
    const uint32_t *low[N], *high[N];
    for (uint32_t i = 0; i < N; i++) {
        const char *from = w.data + ((size_t)e * w.rows_each + i * out.n_out) * w.row_bytes;
        low[i] = (const uint32_t *)(from + min(n, out.n_out - 1) * w.row_bytes) + t;
        high[i] = (const uint32_t *)(from + min(n + 8, out.n_out - 1) * w.row_bytes) + t;
    }
    for (uint32_t place = m.offsets[e], end = m.offsets[e + 1]; place < end; place += 8) {
        const uint16_t *row = (const uint16_t *)x.at(min(place + g, end - 1), 0);
        float c[N][4] = {};
#pragma unroll 4
        for (uint32_t k = 0; k < w.n_cols; k += 16) {
            uint32_t b[2] = {pair_at(row, k + 2 * t, w.n_cols, is_aligned), pair_at(row, k + 2 * t + 8, w.n_cols, is_aligned)};
#pragma unroll
            for (uint32_t i = 0; i < N; i++) {
                uint32_t a[4] = {low[i][k / 2], high[i][k / 2], low[i][k / 2 + 4], high[i][k / 2 + 4]};
                mma(c[i], a, b, T());
            }
        }
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            uint32_t p = place + 2 * t + i % 2, row_of_w = n + i / 2 * 8;
            if (p < end && row_of_w < out.n_out)
                plain_store<T>(out, product, N == 2, e, p, row_of_w, c[0][i], c[N - 1][i]);
        }
    }
}

#define THREADS 128u
#define W_ROWS 16u
#define CHUNK 64u
#define X_ROWS 8u

/* As linear.cu's multiply_values, by experts and places likewise. */
template <class T, class W, uint32_t N>
static __global__ void __launch_bounds__(THREADS)
multiply_place_values(struct mixture m, struct plain_weights w, rows<T> x, struct output out, expert_product product)
{
    start_next();
    wait_for_input();
    __shared__ float w_values[N][W_ROWS][CHUNK + 1], x_values[X_ROWS][CHUNK + 1];
    const uint32_t n = threadIdx.x % W_ROWS, r = threadIdx.x / W_ROWS, base = blockIdx.x * W_ROWS, e = blockIdx.y;
    for (uint32_t place = m.offsets[e], end = m.offsets[e + 1]; place < end; place += X_ROWS) {
        float sum[N] = {};
        for (uint32_t k = 0; k < w.n_cols; k += CHUNK) {
            uint32_t n_here = min(CHUNK, w.n_cols - k);
            for (uint32_t i = threadIdx.x; i < N * W_ROWS * CHUNK; i += THREADS) {
                uint32_t part = i / (W_ROWS * CHUNK), row = i / CHUNK % W_ROWS, c = i % CHUNK;
                if (c < n_here && base + row < out.n_out) {
                    size_t at = (size_t)e * w.rows_each + part * out.n_out + base + row;
                    w_values[part][row][c] = weight_value(W(), (const uint8_t *)w.data + at * w.row_bytes, k + c);
                }
            }
            for (uint32_t i = threadIdx.x; i < X_ROWS * CHUNK; i += THREADS) {
                uint32_t row = i / CHUNK, c = i % CHUNK;
                if (c < n_here && place + row < end)
                    x_values[row][c] = to_float(*x.at(place + row, k + c));
            }
            __syncthreads();
            for (uint32_t c = 0; c < n_here; c++)
#pragma unroll
                for (uint32_t i = 0; i < N; i++)
                    sum[i] = fmaf(w_values[i][n][c], x_values[r][c], sum[i]);
            __syncthreads();
        }
        if (place + r < end && base + n < out.n_out)
            plain_store<T>(out, product, N == 2, e, place + r, base + n, sum[0], sum[N - 1]);
    }
}

/* ---- one operation ------------------------------------------------------------------------------------------------------- */

/* An operation on its way: its arguments, and what lies between its kernels, in its scratch: rows by places that go down, rows
 * that were gathered to go up (later the experts' results), the places. */
struct running_mixture {
    struct cuda *cuda;
    const struct experts_args *args;
    struct mixture m;
    expert_product product;
    bool is_product;
    uint32_t inner, width; /* columns of down and of up */
    struct view middle, outer;
};

/* Half of an operation. */
struct way {
    const struct matrix *w;
    struct view x, y;
    const float *bias;
    bool is_product, is_place; /* x by places, or the batch's rows */
    bool is_behind;
    uint32_t rows_each;
};

static struct output output_of(const struct way *way)
{
    struct output out = {};
    out.y = (char *)way->y.data;
    out.bias = way->bias;
    out.y_stride = way->y.stride;
    out.n_out = way->y.width;
    return out;
}

template <class T, uint32_t N> static void launch_plain(const struct running_mixture *run, const struct way *way)
{
    const struct cuda_part *part = &way->w->parts[0];
    struct plain_weights w = {part->data, part->row_bytes, way->rows_each, way->w->n_cols};
    struct output out = output_of(way);
    dim3 grid(ceil_div(out.n_out, 16), run->m.n_experts);
    if constexpr (sizeof(T) == 2)
        if (part->dtype == run->cuda->dtype) {
            bool is_aligned = (uintptr_t)way->x.data % 4 == 0 && way->x.stride % 2 == 0;
            launch(run->cuda, multiply_places<T, N>, grid, 32, 0, run->m, w, rows<T>(way->x), is_aligned, out, run->product);
            return;
        }
    visit_weight(part->dtype, [&](auto weight) {
        launch(run->cuda, multiply_place_values<T, decltype(weight), N>, grid, THREADS, 0, run->m, w, rows<T>(way->x), out,
               run->product);
    });
}

static enum rc run_plain(const struct running_mixture *run, const struct way *way, struct err *err)
{
    if (way->w->is_packed)
        return err_set(err, RC_INTERNAL, "experts: wanted scratch on a multiple of 16 bytes for packed weights");
    visit_type(run->cuda->dtype, [&](auto value) {
        using T = decltype(value);
        if (way->is_product)
            launch_plain<T, 2>(run, way);
        else
            launch_plain<T, 1>(run, way);
    });
    return RC_OK;
}

/* Experts that have a route, on the average of random ones. */
static float wanted_experts(const struct mixture *m)
{
    float n = (float)m->n_experts;
    float wanted = n * (1 - powf(1 - (float)m->n_chosen / n, (float)m->n_rows));
    return wanted < (float)m->n_chosen ? (float)m->n_chosen : wanted;
}

/* Rows of x, in eights, that units of the few have; 0: experts have too many. */
static uint32_t eights_of(const struct mixture *m)
{
    float mean = (float)m->n_routes / (float)m->n_experts, most = mean + 2 * sqrtf(mean);
    if (m->n_rows <= 8)
        return 1;
    return most <= 8 ? 1 : most <= 16 ? 2 : most <= 32 ? 4 : most <= 64 ? 8 : 0;
}

/* The map of an expert's weights, in tiles of tile_rows; gate and up take turns in those of a product. */
static enum rc map_weights(const struct running_mixture *run, const struct way *way, uint32_t tile_rows, uint32_t stage_blocks,
                           struct tensor_map *map, struct err *err)
{
    uint32_t n_blocks = way->w->n_cols / 64, half = way->rows_each / 2;
    uint64_t row_bytes = way->w->parts[0].row_bytes;
    struct map_dims plain = {2, {way->w->n_rows, n_blocks}, {row_bytes, 128}, {tile_rows, stage_blocks}};
    struct map_dims pairs = {4,
                             {8, 2, (way->w->n_rows - half) / 8, n_blocks},
                             {row_bytes, half * row_bytes, 8 * row_bytes, 128},
                             {8, 2, tile_rows / 16, stage_blocks}};
    return map_make(run->cuda->experts->encode, run->cuda->dtype, way->w->data, way->is_product ? &pairs : &plain, map, err);
}

/* The same for weights that are packed: eights of rows beside each other in a tile, or pairs of them in one of a product. */
static enum rc map_packed(const struct running_mixture *run, const struct way *way, uint32_t n_each, uint32_t stage_blocks,
                          struct tensor_map *map, struct err *err)
{
    const uint32_t n_blocks = way->w->n_cols / 64, half = way->rows_each / 16, n_eights = way->w->n_rows / 8;
    const uint64_t block_bytes = (uint64_t)n_eights * PACKED_BYTES;
    struct map_dims plain = {2, {n_eights, n_blocks}, {PACKED_BYTES, block_bytes}, {n_each, stage_blocks}};
    struct map_dims pairs = {4,
                             {1, 2, n_eights - half, n_blocks},
                             {PACKED_BYTES, half * PACKED_BYTES, PACKED_BYTES, block_bytes},
                             {1, 2, n_each, stage_blocks}};
    const struct map_form form = {CU_TENSOR_MAP_DATA_TYPE_UINT16, PACKED_BYTES / 2, CU_TENSOR_MAP_SWIZZLE_NONE};
    return map_make_as(run->cuda->experts->encode, form, way->w->data, way->is_product ? &pairs : &plain, map, err);
}

static enum rc map_rows(const struct running_mixture *run, const struct way *way, uint32_t n_rows, uint32_t box_rows,
                        uint32_t stage_blocks, struct tensor_map *map, struct err *err)
{
    struct map_dims rows = {2, {n_rows, way->w->n_cols / 64}, {(uint64_t)way->x.stride * 2, 128}, {box_rows, stage_blocks}};
    return map_make(run->cuda->experts->encode, run->cuda->dtype, way->x.data, &rows, map, err);
}

/* From one expert's weights to the next in their map. */
static uint32_t expert_step(const struct way *way)
{
    return way->is_product ? way->rows_each / 8 : way->rows_each;
}

static struct skinny_shape tiles_of(const struct running_mixture *run, const struct way *way)
{
    struct skinny_shape w = {};
    w.n_blocks = way->w->n_cols / 64;
    w.tile_rows = few_tile_rows(way->rows_each, wanted_experts(&run->m), way->is_product ? 16 : 8, 64,
                                run->cuda->n_processors);
    w.n_tiles = ceil_div(way->rows_each, w.tile_rows);
    return w;
}

/* All of it in one launch. */
static enum rc run_whole(const struct running_mixture *run, const struct way *up, const struct way *down, struct err *err)
{
    struct cuda *cuda = run->cuda;
    struct whole_shape s = {};
    struct tensor_map maps[2];
    s.n_panels = few_tile_rows(up->rows_each, wanted_experts(&run->m), PANEL_ROWS, WHOLE_WARPS * PANEL_ROWS,
                               cuda->n_processors) / PANEL_ROWS;
    s.up = {up->w->n_cols / 64, ceil_div(up->rows_each, s.n_panels * PANEL_ROWS), up->rows_each / 8, s.n_panels, 0, 0, 0, 0};
    s.down = {down->w->n_cols / 64, ceil_div(down->rows_each, DOWN_COLUMNS), down->rows_each / 8, DOWN_EIGHTS, 0, 0, 0, 0};
    const uint32_t bytes = whole_cut_memory(&s, run->m.n_rows);
    enum rc rc = map_packed(run, up, s.n_panels, STAGE_BLOCKS, &maps[0], err);
    rc = rc ? rc : map_packed(run, down, DOWN_EIGHTS, STAGE_BLOCKS, &maps[1], err);
    if (rc)
        return rc;
    const uint32_t n_items = min(run->m.n_experts, run->m.n_routes) * s.up.n_tiles + s.down.n_tiles;
    struct output y = output_of(down);
    y.y = (char *)run->args->y.data;
    y.y_stride = run->args->y.stride;
    launch(cuda, mix_packed, min(n_items, cuda->n_processors), WHOLE_THREADS, bytes,
           whole_maps{map_of(&maps[0]), map_of(&maps[1])}, s, run->m,
           whole_rows{(const char *)up->x.data, up->x.stride * 2}, output_of(up), y, run->product, cuda->experts->counts);
    return RC_OK;
}

static enum rc run_lone(const struct running_mixture *run, const struct way *up, const struct way *down)
{
    struct cuda *cuda = run->cuda;
    struct lone_shape s = lone_cut(run->m, run->inner, up->w->n_cols, down->rows_each, cuda->n_processors);
    s.parity = cuda->experts->n_ones++ % 2;
    struct output y = output_of(down);
    y.y = (char *)run->args->y.data;
    const struct lone_input in = {up->w->data, down->w->data, (const char *)up->x.data};
    launch(cuda, mix_lone, min(max(s.n_up, s.n_down), cuda->n_processors), LONE_THREADS,
           s.tables_at + sizeof(struct lone_tables), in, s, run->m, output_of(up), y, run->product, cuda->experts->lone);
    return RC_OK;
}

/* The same for one row. */
static enum rc run_one(const struct running_mixture *run, const struct way *up, const struct way *down, struct err *err)
{
    struct cuda *cuda = run->cuda;
    const uint32_t n = run->m.n_chosen;
    const struct one_shape s = one_cut(n, run->inner, up->w->n_cols, down->rows_each, cuda->n_processors);
    struct way eights = *up;
    eights.is_product = false;
    struct tensor_map maps[4];
    enum rc rc = map_weights(run, &eights, 8, ONE_BLOCKS, &maps[0], err);
    rc = rc ? rc : map_weights(run, down, 8, ONE_BLOCKS, &maps[1], err);
    rc = rc ? rc : map_rows(run, up, 1, 8, s.up_blocks, &maps[2], err);
    rc = rc ? rc : map_rows(run, down, n, 8, s.down_blocks, &maps[3], err);
    if (rc)
        return rc;
    const struct one_maps all = {map_of(&maps[0]), map_of(&maps[1]), map_of(&maps[2]), map_of(&maps[3])};
    struct output y = output_of(down);
    y.y = (char *)run->args->y.data;
    launch(cuda, cuda->dtype == DTYPE_F16 ? mix_one<__half> : mix_one<__nv_bfloat16>,
           min(max(s.n_up, s.n_down), cuda->n_processors), ONE_THREADS, s.tables_at + sizeof(struct one_tables), all, s, run->m,
           output_of(up), y, run->product, cuda->experts->one_counts + cuda->experts->n_ones++ % 2);
    return RC_OK;
}

typedef void (*few_kernel)(CUtensorMap, CUtensorMap, struct few_shape, struct mixture, bool, struct output, expert_product);

template <class T> static few_kernel few_kernel_of(uint32_t eights, bool is_product)
{
    switch (eights) {
    case 1: return is_product ? multiply_few<T, 1, true> : multiply_few<T, 1, false>;
    case 2: return is_product ? multiply_few<T, 2, true> : multiply_few<T, 2, false>;
    case 4: return is_product ? multiply_few<T, 4, true> : multiply_few<T, 4, false>;
    default: return is_product ? multiply_few<T, 8, true> : multiply_few<T, 8, false>;
    }
}

static enum rc run_few(const struct running_mixture *run, const struct way *way, uint32_t eights, struct err *err)
{
    struct cuda *cuda = run->cuda;
    const uint32_t max_units = min(run->m.n_experts, run->m.n_routes) + run->m.n_routes / (8 * eights);
    const uint32_t n_rows = way->is_place ? run->m.n_routes : run->m.n_rows, stage_blocks = skinny_stage_blocks(eights);
    struct few_shape s = {tiles_of(run, way), expert_step(way), 0, max_units, way->is_behind};
    struct tensor_map w, x;
    uint32_t bytes = few_cut_memory(&s, eights);
    enum rc rc = map_weights(run, way, s.w.tile_rows, stage_blocks, &w, err);
    rc = rc ? rc : map_rows(run, way, n_rows, 8 * eights, stage_blocks, &x, err);
    if (rc)
        return rc;
    few_kernel kernel = cuda->dtype == DTYPE_F16 ? few_kernel_of<__half>(eights, way->is_product)
                                                 : few_kernel_of<__nv_bfloat16>(eights, way->is_product);
    launch(cuda, kernel, min(max_units * s.w.n_tiles, cuda->n_processors), SKINNY_THREADS, bytes, map_of(&w), map_of(&x), s,
           run->m, way->is_place, output_of(way), run->product);
    return RC_OK;
}

/* Places of a unit of packed weights, which are bound by bytes longer than others: as few columns as most experts fill. */
static uint32_t unit_of(const struct mixture *m)
{
    float mean = (float)m->n_routes / (float)m->n_experts, most = mean + 2 * sqrtf(mean);
    return min(((uint32_t)most / MANY_BOX + 1) * MANY_BOX, many_weights<true>::unit);
}

static enum rc run_many(const struct running_mixture *run, const struct way *way, struct err *err)
{
    struct cuda *cuda = run->cuda;
    const bool is_packed = way->w->is_packed;
    struct many_shape s = {};
    struct tensor_map w, x;
    s.n_blocks = way->w->n_cols / 64;
    s.n_tiles = ceil_div(way->rows_each, MANY_ROWS);
    s.n_tiles += is_packed && cuda->experts->n_pairs ? s.n_tiles % 2 : 0; /* rather a tile of nothing than rows of x twice */
    s.across = s.n_tiles % 2 == 0 && cuda->experts->n_pairs ? 2 : 1;
    s.expert_step = way->is_product || is_packed ? way->rows_each / 8 : way->rows_each;
    s.is_product = way->is_product;
    s.is_wide = map_fits(way->y.data, (size_t)way->y.stride * 2) && way->y.width % 8 == 0;
    s.is_behind = way->is_behind;
    is_packed ? many_cut_memory<true>(&s, unit_of(&run->m)) : many_cut_memory<false>(&s, many_weights<false>::unit);
    enum rc rc = is_packed ? map_packed(run, way, MANY_ROWS / (way->is_product ? 16 : 8), 1, &w, err)
                           : map_weights(run, way, MANY_ROWS, 1, &w, err);
    rc = rc ? rc : map_rows(run, way, run->m.n_routes, MANY_BOX, 1, &x, err);
    if (rc)
        return rc;
    uint32_t n_units = run->m.n_routes / s.unit + min(run->m.n_experts, run->m.n_routes);
    uint32_t n_clusters = min(n_units * (s.n_tiles / s.across), s.across == 2 ? cuda->experts->n_pairs : cuda->n_processors);
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = s.across;
    attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(n_clusters * s.across);
    config.blockDim = dim3(MANY_THREADS);
    config.dynamicSmemBytes = SHARED_BYTES;
    config.stream = cuda->stream;
    config.attrs = attributes;
    config.numAttrs = 2;
    cudaLaunchKernelEx(&config,
                       is_packed                   ? multiply_many<__nv_bfloat16, true>
                       : cuda->dtype == DTYPE_F16 ? multiply_many<__half, false>
                                                  : multiply_many<__nv_bfloat16, false>,
                       many_maps{map_of(&w), map_of(&x)}, run->m, s, output_of(way), run->product);
    return RC_OK;
}

/* ---- the call ------------------------------------------------------------------------------------------------------------ */

/* Where the routes go, and their rows of x into `outer`. */
static void sort_all(struct running_mixture *run)
{
    run->m.is_sorted = true;
    visit_type(run->cuda->dtype, [&](auto value) {
        using T = decltype(value);
        bool is_aligned = has_eights<T>(run->args->x) && (uintptr_t)run->outer.data % 16 == 0;
        launch(run->cuda, is_aligned ? sort_routes<T, true> : sort_routes<T, false>, run->m.n_experts, SORTERS, 0, run->m,
               rows<T>(run->args->x), (T *)run->outer.data);
    });
}

static void combine_all(const struct running_mixture *run, const struct view &results)
{
    visit_type(run->cuda->dtype, [&](auto value) {
        using T = decltype(value);
        const struct view &y = run->args->y;
        bool is_aligned = has_eights<T>(results) && has_eights<T>(y);
        launch(run->cuda, is_aligned ? combine_rows<T, true> : combine_rows<T, false>,
               dim3(run->m.n_rows, ceil_div(y.width, 8 * COMBINERS)), COMBINERS, 0, run->m, rows<T>(results), rows<T>(y));
    });
}

/* Can the copy engine read the experts' weights, and rows of them be cut into tiles? */
static bool is_streamed(const struct cuda *cuda, const struct matrix *w)
{
    return w->is_packed || (cuda->dtype != DTYPE_F32 && w->parts[0].dtype == cuda->dtype && w->n_cols % 64 == 0);
}

/* One way, of sorted routes unless its rows are few. */
static enum rc multiply_way(const struct running_mixture *run, const struct way *way, struct err *err)
{
    uint32_t eights = way->w->is_packed ? 0 : eights_of(&run->m);
    if (!is_streamed(run->cuda, way->w) || !map_fits(run->args->scratch.data, 16))
        return run_plain(run, way, err);
    return eights ? run_few(run, way, eights, err) : run_many(run, way, err);
}

/* Up, down and the sum. */
static enum rc multiply_ways(const struct running_mixture *run, const struct way *up, const struct way *down, struct err *err)
{
    enum rc rc = multiply_way(run, up, err);
    if (!rc && !run->is_product) {
        struct act_args act = {};
        act.n_rows = run->m.n_routes;
        act.act = run->args->act;
        act.x = act.out = run->middle;
        rc = cuda_act(run->cuda, &act, err);
    }
    rc = rc ? rc : multiply_way(run, down, err);
    if (!rc)
        combine_all(run, down->y);
    return rc;
}

/* Is this what experts_one.cuh does? */
static bool is_one(const struct running_mixture *run)
{
    return run->m.n_rows == 1 && run->m.n_chosen <= ONE_UNITS && run->is_product &&
           max(run->args->x.width, run->inner) <= ONE_MAX_COLS;
}

/* Is this what experts_lone.cuh does? */
static bool is_lone(const struct running_mixture *run)
{
    return run->m.n_rows == 1 && run->m.n_chosen <= LONE_UNITS && max(run->args->x.width, run->inner) <= LONE_MAX_COLS;
}

static enum rc multiply_all(struct running_mixture *run, struct err *err)
{
    const struct experts_args *args = run->args;
    bool streams = is_streamed(run->cuda, args->up) && is_streamed(run->cuda, args->down) && map_fits(args->scratch.data, 16);
    bool is_packed = args->up->is_packed && args->down->is_packed;
    bool is_direct = streams && run->m.n_rows <= FEW_ROWS && !args->is_input_scaled &&
                     map_fits(args->x.data, (size_t)args->x.stride * 2) &&
                     (is_packed ? run->is_product : !args->up->is_packed && !args->down->is_packed);
    struct view results = run->outer;
    results.width = results.stride = args->y.width;
    struct way up = {args->up, is_direct ? args->x : run->outer, run->middle, args->up_bias, run->is_product, !is_direct, false,
                     args->up->n_rows / run->m.n_experts};
    struct way down = {args->down, run->middle, results, args->down_bias, false, true, streams, args->y.width};
    if (is_direct && is_packed && is_lone(run))
        return run_lone(run, &up, &down);
    if (is_direct && is_packed)
        return run_whole(run, &up, &down, err);
    if (is_direct && is_one(run))
        return run_one(run, &up, &down, err);
    if (!is_direct)
        sort_all(run);
    return multiply_ways(run, &up, &down, err);
}

static enum rc check(const struct experts_args *args, uint32_t inner, struct err *err)
{
    uint32_t n = args->n_experts, per_expert = args->form == EXPERT_PLAIN ? 1 : 2;
    if (!n || n > EXPERTS_MAX || !args->n_chosen || args->n_chosen > EXPERTS_MAX_CHOSEN)
        return err_set(err, RC_UNSUPPORTED, "experts: wanted 1 to %u of at most %u experts, have %u of %u", EXPERTS_MAX_CHOSEN,
                       EXPERTS_MAX, args->n_chosen, n);
    if (!args->up->is_whole || !args->down->is_whole)
        return err_set(err, RC_UNSUPPORTED,
                       "experts: wanted one type for all experts' weights of a kind, have several; convert the checkpoint");
    if (args->up->n_rows != n * per_expert * inner || args->up->n_cols != args->x.width ||
        args->down->n_rows != n * args->y.width)
        return err_set(err, RC_INTERNAL, "experts: wanted up [%u][%u] and down [%u][%u], have [%u][%u] and [%u][%u]",
                       n * per_expert * inner, args->x.width, n * args->y.width, inner, args->up->n_rows, args->up->n_cols,
                       args->down->n_rows, args->down->n_cols);
    return RC_OK;
}

/* Cuts the scratch; the tables lie behind the rows. */
static enum rc place_all(struct running_mixture *run, struct err *err)
{
    const struct experts_args *args = run->args;
    uint32_t item = run->cuda->dtype == DTYPE_F32 ? 4 : 2, n = run->m.n_routes;
    size_t middle = (size_t)n * run->inner * item, outer = (size_t)n * run->width * item;
    size_t tables = (middle + outer + 15) / 16 * 16, end = tables + ((size_t)2 * n + run->m.n_experts + 1) * sizeof(uint32_t);
    if (end > (size_t)args->n_rows * args->scratch.stride * item)
        return err_set(err, RC_INTERNAL, "experts: wanted %zu bytes of scratch, have %u x %u items of %u", end, args->n_rows,
                       args->scratch.stride, item);
    char *scratch = (char *)args->scratch.data;
    run->middle = {scratch, run->inner, run->inner};
    run->outer = {scratch + middle, args->x.width, args->x.width};
    run->m.offsets = (uint32_t *)(scratch + tables);
    run->m.places = run->m.offsets + run->m.n_experts + 1;
    run->m.entries = run->m.places + n;
    return RC_OK;
}

enum rc cuda_experts(void *ctx, const struct experts_args *args, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    if (!args->n_rows)
        return RC_OK;
    struct running_mixture run = {};
    run.cuda = cuda;
    run.args = args;
    run.inner = args->down->n_cols;
    run.width = args->x.width > args->y.width ? args->x.width : args->y.width;
    run.is_product = args->form != EXPERT_PLAIN;
    run.product = {args->form, args->act, args->limit};
    run.m.n_rows = args->n_rows;
    run.m.n_experts = args->n_experts;
    run.m.n_chosen = args->n_chosen;
    run.m.n_routes = args->n_rows * args->n_chosen;
    run.m.routes = args->routes;
    run.m.is_awaited = args->n_rows == 1 && cuda->awaited_routes == args->routes;
    cuda->awaited_routes = NULL;
    run.m.route_stride = args->route_stride;
    run.m.is_input_scaled = args->is_input_scaled;
    enum rc rc = check(args, run.inner, err);
    if (!rc)
        rc = place_all(&run, err);
    if (!rc)
        rc = multiply_all(&run, err);
    return rc ? rc : launched(err, "experts");
}

template <class T> static cudaError_t allow_shared(uint32_t *n_pairs, uint32_t n_processors)
{
    cudaError_t code = cudaSuccess;
    const void *many = (const void *)multiply_many<T, false>;
    for (uint32_t i = 0; i < 8 && !code; i++)
        code = cudaFuncSetAttribute(few_kernel_of<T>(1u << i / 2, i % 2), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    SHARED_BYTES);
    for (const void *kernel :
         {many, (const void *)mix_one<T>, (const void *)multiply_many<__nv_bfloat16, true>, (const void *)mix_packed,
          (const void *)mix_lone})
        code = code ? code : cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES);
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = 2;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(n_processors / 2 * 2);
    config.blockDim = dim3(MANY_THREADS);
    config.dynamicSmemBytes = SHARED_BYTES;
    config.attrs = &attribute;
    config.numAttrs = 1;
    int n = 0;
    code = code ? code : cudaOccupancyMaxActiveClusters(&n, many, &config);
    *n_pairs = (uint32_t)n;
    return code;
}

enum rc cuda_experts_open(struct cuda *cuda, struct err *err)
{
    cuda->experts = (struct experts_state *)mem_calloc(1, sizeof *cuda->experts);
    if (!cuda->experts)
        return err_set(err, RC_MEMORY, "cuda: no memory for the context");
    if (cuda->dtype == DTYPE_F32)
        return RC_OK;
    enum rc rc = cuda_take(cuda, MEMORY_WORK, sizeof *cuda->experts->counts, &cuda->experts->counts, err);
    rc = rc ? rc : cuda_take(cuda, MEMORY_WORK, 2 * sizeof *cuda->experts->one_counts, &cuda->experts->one_counts, err);
    rc = rc ? rc : cuda_take(cuda, MEMORY_WORK, sizeof *cuda->experts->lone, &cuda->experts->lone, err);
    if (rc)
        return rc;
    cudaError_t code = cudaMemsetAsync(cuda->experts->counts, 0, sizeof *cuda->experts->counts, cuda->stream);
    if (!code)
        code = cudaMemsetAsync(cuda->experts->one_counts, 0, 2 * sizeof *cuda->experts->one_counts, cuda->stream);
    if (!code)
        code = cudaMemsetAsync(cuda->experts->lone, 0, sizeof *cuda->experts->lone, cuda->stream);
    if (!code)
        code = cuda->dtype == DTYPE_BF16 ? allow_shared<__nv_bfloat16>(&cuda->experts->n_pairs, cuda->n_processors)
                                         : allow_shared<__half>(&cuda->experts->n_pairs, cuda->n_processors);
    return code == cudaSuccess ? map_encoder_find(&cuda->experts->encode, err) : cuda_fail(err, code, "open");
}

void cuda_experts_close(struct cuda *cuda)
{
    mem_free(cuda->experts);
}
