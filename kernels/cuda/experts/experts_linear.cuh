/* experts_linear.cuh: the host's side of one operation of experts.cu and of its linears: their arguments, sizes and maps. */
#ifndef LLMPY_CUDA_EXPERTS_LINEAR_CUH
#define LLMPY_CUDA_EXPERTS_LINEAR_CUH

#include "../core/fp8_rows.cuh"
#include "experts_streamed.cuh"

#include <math.h>

/* A running operation: its arguments, and its scratch between its kernels: the rows that go down, by place; the rows gathered
 * to go up (later the experts' results); the places. */
struct running_mixture {
    struct cuda *cuda;
    const struct experts_args *args;
    struct mixture m;
    expert_product product;
    bool is_product;
    uint32_t inner, width; /* columns of down and of up */
    uint32_t first;        /* expert that is held; m.n_experts are */
    uint32_t part_columns; /* of y, for a route; 0: y gets the sum of the routes */
    uint32_t eights;       /* of rows of x in a unit of streamed products; 0: experts have too many rows for them */
    struct view middle, outer;
    char *rounded; /* rows of x or of the middle in FP8 or INT8, and their scales, if a linear rounds them */
};

/* The linears of all experts on the way up, or down. */
struct expert_linear {
    const struct matrix *w;
    struct view x, y;
    const float *bias;
    const struct experts_lora_parts *added; /* by adapters; NULL: nothing */
    bool is_product, is_place; /* x by places, or the batch's rows */
    bool is_behind;            /* the kernel before starts this one once it has seen the routes */
    uint32_t rows_each;        /* of w, an expert */
};

static inline struct output output_of(const struct expert_linear *linear)
{
    struct output out = {};
    out.y = (char *)linear->y.data;
    out.bias = linear->bias;
    out.y_stride = linear->y.stride;
    out.n_out = linear->y.width;
    return out;
}

/* is_gathered: the rows of x lie by places, in `outer`. */
static inline struct expert_linear up_of(const struct running_mixture *run, bool is_gathered)
{
    const struct experts_args *args = run->args;
    return {args->up, is_gathered ? run->outer : args->x, run->middle, args->up_bias, args->lora ? &args->lora->up : NULL,
            run->is_product, is_gathered, false, args->up->n_rows / run->m.n_experts};
}

static inline struct expert_linear down_of(const struct running_mixture *run)
{
    const struct experts_args *args = run->args;
    struct view results = run->outer;
    results.width = results.stride = run->part_columns ? run->part_columns : args->y.width;
    return {args->down, run->middle, results, args->down_bias, args->lora ? &args->lora->down : NULL, false, true, false,
            results.width};
}

/* Experts that have a route, on the average of random ones. */
static inline float wanted_experts(const struct mixture *m)
{
    float n = (float)m->n_experts;
    float wanted = n * (1 - powf(1 - (float)m->n_chosen / n, (float)m->n_rows));
    return wanted < (float)m->n_chosen ? (float)m->n_chosen : wanted;
}

/* A map of something in the experts' rows of weights from `data` on, in blocks block_bytes apart and tiles of tile_rows. In
 * tiles of a product, gate and up alternate. */
static inline enum rc map_rows_of(const struct running_mixture *run, const struct expert_linear *linear, struct map_form form,
                                  const char *data, uint32_t n_blocks, uint32_t block_bytes, uint32_t tile_rows,
                                  uint32_t stage_blocks, struct tensor_map *map, struct err *err)
{
    const uint32_t half = linear->rows_each / 2;
    const uint64_t row_bytes = linear->w->parts[0].row_bytes;
    struct map_dims sums = {2, {linear->w->n_rows, n_blocks}, {row_bytes, block_bytes}, {tile_rows, stage_blocks}};
    struct map_dims pairs = {4,
                             {8, 2, (linear->w->n_rows - half) / 8, n_blocks},
                             {row_bytes, half * row_bytes, 8 * row_bytes, block_bytes},
                             {8, 2, tile_rows / 16, stage_blocks}};
    return map_make_as(run->cuda->experts->encode, form, data, linear->is_product ? &pairs : &sums, map, err);
}

/* Of weights, in blocks of 128 bytes. */
static inline enum rc map_weights(const struct running_mixture *run, const struct expert_linear *linear, uint32_t tile_rows,
                                  uint32_t stage_blocks, struct tensor_map *map, struct err *err)
{
    const struct cuda_part *part = &linear->w->parts[0];
    const uint32_t n_blocks = has_fp8_rows(part->dtype) ? fp8_slabs(linear->w->n_cols) : linear->w->n_cols / 64;
    return map_rows_of(run, linear, {map_type(run->cuda->dtype), 64, CU_TENSOR_MAP_SWIZZLE_128B}, part->data, n_blocks, 128,
                       tile_rows, stage_blocks, map, err);
}

/* From one expert's weights to the next in their map. */
static inline uint32_t expert_step(const struct expert_linear *linear)
{
    return linear->is_product ? linear->rows_each / 8 : linear->rows_each;
}

static inline struct skinny_shape tiles_of(const struct running_mixture *run, const struct expert_linear *linear)
{
    struct skinny_shape w = {};
    w.n_blocks = rounds_to_bytes(linear->w) ? fp8_slabs(linear->w->n_cols) : linear->w->n_cols / 64;
    w.tile_rows = streamed_tile_rows(linear->rows_each, wanted_experts(&run->m), linear->is_product ? 16 : 8, 64,
                                     run->cuda->n_processors);
    w.n_tiles = ceil_div(linear->rows_each, w.tile_rows);
    return w;
}

static inline enum rc map_rows(const struct running_mixture *run, const struct expert_linear *linear, uint32_t n_rows,
                               uint32_t box_rows, uint32_t stage_blocks, struct tensor_map *map, struct err *err)
{
    const uint64_t row_bytes = (uint64_t)linear->x.stride * 2;
    struct map_dims rows = {2, {n_rows, linear->w->n_cols / 64}, {row_bytes, 128}, {box_rows, stage_blocks}};
    return map_make(run->cuda->experts->encode, run->cuda->dtype, linear->x.data, &rows, map, err);
}

/* experts_units.cu. */
cudaError_t experts_units_open(void);
enum rc run_units(const struct running_mixture *run, const struct expert_linear *linear, struct err *err);
enum rc run_units_plain(const struct running_mixture *run, const struct expert_linear *linear, struct err *err);

#endif
