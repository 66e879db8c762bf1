/* experts_fp8.cuh: experts of FP8 or INT8 weights and activations rounded to them. Each product has the definition of
 * linear_fp8.cuh: the same rounding of activations, the same sums of 128 columns by the tensor cores, added in the same order.
 * So a row gets the bits of its experts' linears.
 *
 * experts_fp8_round rounds rows before up and before down. It waits for its input before the next kernel may start, so that
 * one finds the routes written and fetches weights at once. Bound by the launch, of many rows by the bytes of x.
 *
 * A rounded row has its numbers in whole slabs, and beside them its scales in chunks of FP8_CHUNK, as rows of weights have
 * theirs: the copy engine brings both with boxes of rows that begin anywhere. */
#ifndef LLMPY_CUDA_EXPERTS_FP8_CUH
#define LLMPY_CUDA_EXPERTS_FP8_CUH

#include "../core/eight.cuh"
#include "../core/wgmma_fp8.cuh"
#include "../linear/linear_fp8.cuh"
#include "experts_linear.cuh"

/* Rounded rows, by places or the batch's. */
struct fp8_places {
    uint8_t *numbers; /* row_bytes apart, a multiple of 128 */
    float *scales;    /* chunk_bytes apart, a multiple of 16; that of slab 0 first */
    uint32_t row_bytes, chunk_bytes;
};

/* Of weights and of rounded rows: numbers and the chunks of their scales. */
struct fp8_expert_maps {
    CUtensorMap w, w_scales, x, x_scales;
};

static inline uint32_t fp8_chunks(uint32_t n_cols)
{
    return ceil_div(fp8_slabs(n_cols), FP8_CHUNK);
}

/* Bytes of a rounded row with its scales. */
static inline size_t fp8_place_bytes(uint32_t n_cols)
{
    return (size_t)fp8_slabs(n_cols) * FP8_SLAB + fp8_chunks(n_cols) * FP8_CHUNK * sizeof(float);
}

/* Room for n rounded rows, on a multiple of 16 bytes. */
static inline struct fp8_places fp8_places_at(char *room, uint32_t n, uint32_t n_cols)
{
    const uint32_t row_bytes = fp8_slabs(n_cols) * FP8_SLAB;
    return {(uint8_t *)room, (float *)(room + (size_t)n * row_bytes), row_bytes,
            fp8_chunks(n_cols) * FP8_CHUNK * (uint32_t)sizeof(float)};
}

/* Blocks: [rows][parts of a row]; FP8_LANES threads have a slab. */
template <class T, class N, bool IS_ALIGNED>
static __global__ void __launch_bounds__(FP8_QUANTISERS) experts_fp8_round(rows<T> x, uint32_t n_slabs, struct fp8_places to)
{
    const uint32_t row = blockIdx.x, step = gridDim.y * (FP8_QUANTISERS / FP8_LANES), lane = threadIdx.x % FP8_LANES;
    const struct fp8_rows own = {to.numbers + (size_t)row * to.row_bytes,
                                 (float *)((char *)to.scales + (size_t)row * to.chunk_bytes), to.row_bytes, 1};
    wait_for_input();
    start_next();
    for (uint32_t slab = (blockIdx.y * FP8_QUANTISERS + threadIdx.x) / FP8_LANES; slab < n_slabs; slab += step) {
        float values[8];
        load_part<IS_ALIGNED>(x.at(row, 0), slab * FP8_SLAB + lane * 8, x.width, values);
        fp8_round_slab<N>(values, 0, slab, own);
    }
}

/* Calls f with a value of the activations' type and one of the numbers' type. */
template <class F> static auto visit_both(const struct cuda *cuda, const struct matrix *matrix, F f)
{
    return visit_numbers(
        matrix, [&](auto number) { return cuda->dtype == DTYPE_F16 ? f(__half(), number) : f(__nv_bfloat16(), number); });
}

/* Rounds n_rows rows of x to the numbers of a matrix. Of few rows many blocks have a part each. */
static inline void fp8_round_places(const struct cuda *cuda, const struct matrix *matrix, const struct view *x, uint32_t n_rows,
                                    const struct fp8_places &to)
{
    const uint32_t n_slabs = fp8_slabs(x->width);
    const uint32_t n_parts = n_rows < cuda->n_processors ? ceil_div(n_slabs, FP8_QUANTISERS / FP8_LANES) : 1;
    visit_both(cuda, matrix, [&](auto value, auto number) {
        using T = decltype(value);
        using N = decltype(number);
        launch(cuda, has_eights<T>(*x) ? experts_fp8_round<T, N, true> : experts_fp8_round<T, N, false>, dim3(n_rows, n_parts),
               FP8_QUANTISERS, 0, rows<T>(*x), n_slabs, to);
    });
}

/* Rounds the rows of x, and makes the maps of weights, rounded rows and the scales of both. */
static enum rc round_and_map(const struct running_mixture *run, const struct expert_linear *linear, uint32_t tile_rows,
                             uint32_t box_rows, uint32_t stage_slabs, struct fp8_expert_maps *maps, struct err *err)
{
    const map_encoder encode = run->cuda->experts->encode;
    const struct cuda_part *part = &linear->w->parts[0];
    const uint32_t n_rows = linear->is_place ? run->m.n_routes : run->m.n_rows, n_cols = linear->w->n_cols;
    const struct fp8_places x = fp8_places_at(run->rounded, n_rows, n_cols);
    const struct map_form scales = {map_type(run->cuda->dtype), FP8_CHUNK * 2, CU_TENSOR_MAP_SWIZZLE_NONE};
    const struct map_dims rows = {2, {n_rows, fp8_slabs(n_cols)}, {x.row_bytes, FP8_SLAB}, {box_rows, stage_slabs}};
    const struct map_dims chunks = {2, {n_rows, fp8_chunks(n_cols)}, {x.chunk_bytes, FP8_CHUNK * 4}, {box_rows, 1}};
    struct tensor_map made[4];
    enum rc rc = map_weights(run, linear, tile_rows, stage_slabs, &made[0], err);
    rc = rc ? rc
            : map_rows_of(run, linear, scales, part->data - part->lead_bytes, part->lead_bytes / (FP8_CHUNK * 4), FP8_CHUNK * 4,
                          tile_rows, 1, &made[1], err);
    rc = rc ? rc : map_make(encode, run->cuda->dtype, x.numbers, &rows, &made[2], err);
    rc = rc ? rc : map_make_as(encode, scales, x.scales, &chunks, &made[3], err);
    if (rc)
        return rc;
    *maps = {map_of(&made[0]), map_of(&made[1]), map_of(&made[2]), map_of(&made[3])};
    fp8_round_places(run->cuda, linear->w, &linear->x, n_rows, x);
    return RC_OK;
}

#endif
