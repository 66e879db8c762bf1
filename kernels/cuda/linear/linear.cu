/* y[r][n] = sum over k of x[r][k] * W[n][k] (+ bias[n]), rounded once to the type of activations (float32 for logits); then
 * (+ add[r][n]), rounded again, as the separate operation does it. LINEAR_WAYS has the ways. Every output is one chain of
 * float32, the same for every number of rows:
 * - W and x of one two-byte type: mma.sync m16n8k16 over the k16 steps 0, 1, 2, ..., 16 rows of W by 8 rows of x. The tail of k
 *   and missing rows are zeros. linear_plain.cuh has any of them; where the copy engine can read both, linear_row.cuh,
 *   linear_skinny.cuh and linear_gemm.cuh use wgmma in the same order.
 * - FP8 or INT8 weights, and activations that are rounded to their type: the order of linear_fp8.cuh.
 * - weights in units (units.cuh), and bfloat16 activations: the order of linear_units.cuh.
 * - anything else: the exact float32 value of W (weight_format.cuh) times that of x in fused multiply-adds, k ascending, by
 *   linear_plain.cuh. */
#include "../core/ways.cuh"
#include "linear_fp8.h"
#include "linear_gemm.cuh"
#include "linear_library.cuh"
#include "linear_plain.cuh"
#include "linear_row.cuh"
#include "linear_sync.h"
#include "linear_units.h"

/* ---- skinny -------------------------------------------------------------------------------------------------------------- */

#define N_X_MAPS 64u /* a model has some 5 places that linears read, each with a few numbers of rows */

struct x_map {
    const void *data;
    uint32_t stride, n_rows, n_cols, box_rows, box_blocks;
    struct tensor_map map;
};

struct linear_state {
    map_encoder encode;
    struct gemm_device gemm;
    struct x_map x_maps[N_X_MAPS];
    struct fp8_memory fp8;
    struct library library;
};

template <class T> static cudaError_t allow_rings(void)
{
    cudaError_t code = cudaSuccess;
    for (uint32_t i = 0; i < 4 && code == cudaSuccess; i++)
        code = allow_shared(row_kernel<T>(i % 2, i / 2));
    for (uint32_t i = 0; i < 8 && code == cudaSuccess; i++)
        code = allow_shared(skinny_kernel<T>(1u << i / 2, i % 2));
    return code;
}

/* The kernels of sm_90a. */
static cudaError_t open_kernels(struct cuda *cuda)
{
    cudaError_t code = cudaSuccess;
    if (cuda->dtype == DTYPE_BF16)
        code = allow_rings<__nv_bfloat16>();
    if (code == cudaSuccess && cuda->dtype == DTYPE_BF16)
        code = units_open();
    if (cuda->dtype == DTYPE_F16)
        code = allow_rings<__half>();
    if (code == cudaSuccess && cuda->dtype != DTYPE_F32)
        code = gemm_open(cuda->dtype, cuda->n_processors, &cuda->linear->gemm);
    if (code == cudaSuccess && cuda->dtype != DTYPE_F32)
        code = fp8_open(cuda);
    return code;
}

enum rc linear_open(struct cuda *cuda, struct err *err)
{
    cuda->linear = (struct linear_state *)mem_calloc(1, sizeof *cuda->linear);
    if (!cuda->linear)
        return err_set(err, RC_MEMORY, "cuda: no memory for the context");
    cudaError_t code = cuda->is_portable ? cudaSuccess : open_kernels(cuda);
    code = code ? code : sync_open(cuda);
    const char *library = cuda->options.cublaslt;
    if (code == cudaSuccess && cuda->dtype != DTYPE_F32 && cuda->options.max_rows > SKINNY_ROWS && library && library[0])
        cuda->linear->library.lt = lt_open(cuda, library);
    return code == cudaSuccess ? map_encoder_find(&cuda->linear->encode, err) : cuda_fail(err, code, "open");
}

void linear_close(struct cuda *cuda)
{
    if (cuda->linear)
        lt_close(cuda->linear->library.lt);
    mem_free(cuda->linear);
}

static enum rc make_form(struct cuda *cuda, const struct matrix *matrix, bool is_pairs, enum skinny_rows few,
                         struct skinny_form *form, struct err *err)
{
    uint32_t half = matrix->n_rows / 2, n_blocks = matrix->n_cols / 64, stage_blocks = few == SKINNY_MANY ? 2 : 4;
    uint64_t row_bytes = matrix->parts[0].row_bytes;
    const auto tile_rows = few == SKINNY_ONE ? skinny_tile_rows : skinny_few_tile_rows;
    form->tile_rows = tile_rows(matrix->n_rows, matrix->n_cols, is_pairs, stage_blocks, cuda->n_processors);
    form->n_tiles = ceil_div(matrix->n_rows, form->tile_rows);
    if (cuda->is_portable) /* the form says which products fit; nothing is copied by maps */
        return RC_OK;
    struct map_dims rows = {2, {matrix->n_rows, n_blocks}, {row_bytes, 128}, {form->tile_rows, stage_blocks}};
    struct map_dims pairs = {4,
                             {8, 2, half / 8, n_blocks},
                             {row_bytes, half * row_bytes, 8 * row_bytes, 128},
                             {8, 2, form->tile_rows / 16, stage_blocks}};
    return map_make(cuda->linear->encode, cuda->dtype, matrix->data, is_pairs ? &pairs : &rows, &form->map, err);
}

void linear_changed(struct matrix *matrix)
{
    if (matrix->fp8)
        matrix->fp8->is_shared = matrix->fp8->is_of_rows = matrix->fp8->is_compared = false;
}

void linear_drop(struct cuda *cuda, const struct matrix *matrix)
{
    if (matrix->fp8)
        fp8_drop(&cuda->linear->fp8, matrix);
    library_drop(&cuda->linear->library, matrix);
}

enum rc linear_take(struct cuda *cuda, struct matrix *matrix, struct err *err)
{
    if (rounds_to_bytes(matrix))
        return fp8_take(cuda, cuda->linear->encode, &cuda->linear->fp8, matrix, err);
    if (cuda->dtype == DTYPE_F32 || !matrix->is_whole || matrix->parts[0].dtype != cuda->dtype || !matrix->n_rows ||
        matrix->n_cols % 64)
        return RC_OK;
    enum rc rc = RC_OK;
    for (uint32_t i = 0; i < SKINNY_FORMS && !rc; i++) {
        rc = make_form(cuda, matrix, false, (enum skinny_rows)i, &matrix->skinny[i], err);
        if (!rc && matrix->n_rows % 16 == 0)
            rc = make_form(cuda, matrix, true, (enum skinny_rows)i, &matrix->skinny_pairs[i], err);
    }
    if (!rc)
        library_take(&cuda->linear->library, matrix);
    return rc;
}

/* The map of rows of x; made where the cache has another in its place. */
static enum rc find_x_map(struct cuda *cuda, const struct view *x, uint32_t n_rows, uint32_t n_cols, uint32_t box_rows,
                          uint32_t box_blocks, const struct tensor_map **map, struct err *err)
{
    uint64_t key = ((uintptr_t)x->data >> 4) * 0x9E3779B97F4A7C15u;
    key = (key ^ ((uint64_t)n_cols << 32 | n_rows * 2 + box_blocks)) * 0x9E3779B97F4A7C15u;
    struct x_map *found = &cuda->linear->x_maps[key >> 32 & (N_X_MAPS - 1)];
    *map = &found->map;
    if (found->data == x->data && found->stride == x->stride && found->n_rows == n_rows && found->n_cols == n_cols &&
        found->box_rows == box_rows && found->box_blocks == box_blocks)
        return RC_OK;
    struct map_dims dims = {2, {n_rows, n_cols / 64}, {(uint64_t)x->stride * 2, 128}, {box_rows, box_blocks}};
    enum rc rc = map_make(cuda->linear->encode, cuda->dtype, x->data, &dims, &found->map, err);
    found->data = rc ? NULL : x->data;
    found->stride = x->stride;
    found->n_rows = n_rows;
    found->n_cols = n_cols;
    found->box_rows = box_rows;
    found->box_blocks = box_blocks;
    return rc;
}

static const struct skinny_form *form_of(const struct matrix *matrix, bool is_product, enum skinny_rows rows)
{
    return &(is_product ? matrix->skinny_pairs : matrix->skinny)[rows];
}

static struct skinny_shape shape_of(const struct matrix *matrix, const struct skinny_form *form, uint32_t stage_blocks,
                                    uint32_t n_stages, bool is_held, uint32_t ahead_bytes)
{
    return {matrix->n_cols / 64, n_stages, form->tile_rows, form->n_tiles,
            skinny_ahead(n_stages, stage_blocks, form->tile_rows, ahead_bytes), is_held};
}

/* Blocks of a launch, with near equal shares of the tiles. */
static uint32_t skinny_grid(const struct cuda *cuda, const struct skinny_form *form)
{
    return ceil_div(form->n_tiles, ceil_div(form->n_tiles, cuda->n_processors));
}

static void launch_row(const struct cuda *cuda, const struct matrix *matrix, bool is_product, bool is_normed,
                       const struct skinny_row &row, const struct output &out)
{
    const uint32_t n_blocks = matrix->n_cols / 64, stage_blocks = skinny_stage_blocks(1);
    const struct skinny_form *form = form_of(matrix, is_product, SKINNY_ONE);
    const bool is_held = skinny_is_held(matrix, form, cuda->n_processors);
    const uint32_t n_stages = row_stages(form->tile_rows, n_blocks, skinny_room(is_held));
    const struct skinny_shape shape = shape_of(matrix, form, stage_blocks, n_stages, is_held,
                                               is_held && !is_normed ? SKINNY_HELD_BYTES : SKINNY_AHEAD_BYTES);
    const auto kernel = cuda->dtype == DTYPE_F16 ? row_kernel<__half>(is_product, is_normed)
                                                 : row_kernel<__nv_bfloat16>(is_product, is_normed);
    launch(cuda, kernel, skinny_grid(cuda, form), SKINNY_THREADS, row_bytes(n_stages, form->tile_rows, n_blocks),
           map_of(&form->map), shape, out, row);
}

static enum rc launch_skinny(struct cuda *cuda, const struct matrix *matrix, bool is_product, const struct view *x,
                             const struct output &out, struct err *err)
{
    const uint32_t eights = skinny_eights(out.n_rows), stage_blocks = skinny_stage_blocks(eights);
    const struct skinny_form *form = form_of(matrix, is_product, eights <= 4 ? SKINNY_FEW : SKINNY_MANY);
    const struct tensor_map *x_map;
    enum rc rc = find_x_map(cuda, x, out.n_rows, matrix->n_cols, 8 * eights, stage_blocks, &x_map, err);
    if (rc)
        return rc;
    const bool is_held = eights == 1 && skinny_is_held(matrix, form, cuda->n_processors);
    const uint32_t n_stages = skinny_stages(stage_blocks, form->tile_rows, eights, skinny_room(is_held));
    const struct skinny_shape shape =
        shape_of(matrix, form, stage_blocks, n_stages, is_held, is_held ? SKINNY_HELD_BYTES : SKINNY_AHEAD_BYTES);
    skinny_function kernel = cuda->dtype == DTYPE_F16 ? skinny_kernel<__half>(eights, is_product)
                                                      : skinny_kernel<__nv_bfloat16>(eights, is_product);
    launch(cuda, kernel, skinny_grid(cuda, form), SKINNY_THREADS, skinny_bytes(n_stages, stage_blocks, form->tile_rows, eights),
           map_of(&form->map), map_of(x_map), shape, out);
    return RC_OK;
}

/* ---- parts --------------------------------------------------------------------------------------------------------------- */

/* One launch a part, or one for all parts of one type. */
static void launch_parts(const struct cuda *cuda, const struct linear_args *args)
{
    const struct matrix *matrix = args->matrix;
    uint32_t item = cuda->dtype == DTYPE_F32 ? 4 : 2;
    for (uint32_t i = 0; i < (matrix->is_whole ? 1 : matrix->n_parts); i++) {
        struct cuda_part part = matrix->parts[i];
        part.n_rows = matrix->is_whole ? matrix->n_rows : part.n_rows;
        if (!part.n_rows)
            continue;
        struct output out = output_of(args, part.first_row, part.n_rows, item);
        visit_type(cuda->dtype, [&](auto value) { launch_part(cuda, &part, args, out, value); });
    }
}

/* ---- the ways ------------------------------------------------------------------------------------------------------------ */

/* How a matrix lies: in the order of router.cuh's chain; as the copy engine and wgmma read it, whole and of the activations'
 * two-byte type; whole and of FP8 or INT8, with activations that are rounded to it, too; as units.cuh has them; runs of
 * parts of several types; anything else. */
enum linear_weights { OF_ROUTER = 1, STREAMED = 2, IN_PARTS = 4, OF_FP8 = 8, IN_UNITS = 16, IN_RUNS = 32, ALL_WEIGHTS = 63 };
/* What a linear computes: the sums, act(gate) * up of them, or either for a row that is first added to another row and normed.
 */
enum linear_form { SUM = 1, PRODUCT = 2, NORMED_SUM = 4, NORMED_PRODUCT = 8, NORMED = NORMED_SUM | NORMED_PRODUCT,
                   ANY_FORM = SUM | PRODUCT | NORMED };

struct linear_problem {
    struct cuda *cuda;
    const struct linear_args *args;
    const struct add_rms_norm_args *norm; /* NULL: x is given */
    uint32_t n_rows;
    enum linear_weights weights;
    enum linear_form form;
    linear_problem(struct cuda *c, const struct linear_args *a, const struct add_rms_norm_args *n = NULL)
        : cuda(c), args(a), norm(n), n_rows(n ? n->n_rows : a->n_rows),
          weights(a->matrix->is_router             ? OF_ROUTER
                  : a->matrix->runs                ? IN_RUNS
                  : a->matrix->skinny[0].tile_rows ? STREAMED
                  : a->matrix->fp8                 ? OF_FP8
                  : a->matrix->is_packed           ? IN_UNITS
                                                   : IN_PARTS),
          form(a->output == LINEAR_PRODUCT ? (n ? NORMED_PRODUCT : PRODUCT) : n ? NORMED_SUM : SUM)
    {
    }
    bool is_product(void) const { return form & (PRODUCT | NORMED_PRODUCT); }
    const struct skinny_form *of_one_row(void) const { return form_of(args->matrix, is_product(), SKINNY_ONE); }
    struct output output(void) const
    {
        struct output out = output_of(args, 0, is_product() ? args->matrix->n_rows / 2 : args->matrix->n_rows, 2);
        out.n_mirrors = args->is_mirrored ? cuda_mirrors(cuda, out.mirrors) : 0;
        return out;
    }
};

struct linear_way {
    const char *name;
    uint32_t devices;                                 /* enum way_devices */
    uint32_t min_rows, max_rows;
    uint32_t weights, forms;                          /* that it takes: enum linear_weights, enum linear_form, or-ed */
    bool (*fits)(const struct linear_problem &p);     /* a further condition, or NULL */
    enum rc (*run)(const struct linear_problem &p, struct err *err);
};

static bool takes(const struct linear_way &way, const struct linear_problem &p)
{
    return p.n_rows >= way.min_rows && p.n_rows <= way.max_rows && way.weights & p.weights && way.forms & p.form &&
           (!way.fits || way.fits(p));
}

/* Can the copy engine read x, and the matrix as the form wants it? */
static bool fits_stream(const struct linear_problem &p)
{
    return map_fits(p.args->x.data, (size_t)p.args->x.stride * 2) && p.of_one_row()->tile_rows;
}

static bool fits_row(const struct linear_problem &p)
{
    return fits_stream(p) && row_fits(p.args->matrix, p.of_one_row());
}

static bool fits_row_normed(const struct linear_problem &p)
{
    return p.of_one_row()->tile_rows && normed_fits(p.norm);
}

static bool fits_library(const struct linear_problem &p)
{
    const struct linear_args *args = p.args;
    const struct library *library = &p.cuda->linear->library;
    return find_algorithm(library, args->matrix, args->n_rows) && fits_stream(p) && !args->bias && !args->delta && !args->add &&
           !args->is_mirrored && map_fits(args->y.data, (size_t)args->y.stride * (args->is_float_out ? 4 : 2)) &&
           args->is_float_out == library->shapes[args->matrix->shape - 1].is_float;
}

/* A weight that fits_stream would take but for its columns, which are no whole 64s. */
static bool fits_ragged(const struct linear_problem &p)
{
    const struct matrix *matrix = p.args->matrix;
    return p.cuda->dtype != DTYPE_F32 && matrix->is_whole && matrix->parts[0].dtype == p.cuda->dtype && matrix->n_rows &&
           map_fits(p.args->x.data, (size_t)p.args->x.stride * 2) && (!p.is_product() || matrix->n_rows % 16 == 0);
}

static enum rc run_row(const struct linear_problem &p, struct err *)
{
    struct skinny_row row = {};
    row.a = p.args->x.data;
    launch_row(p.cuda, p.args->matrix, p.is_product(), false, row, p.output());
    return RC_OK;
}

static enum rc run_row_normed(const struct linear_problem &p, struct err *)
{
    const struct add_rms_norm_args *norm = p.norm;
    const struct skinny_row row = {norm->a.data, norm->b.data, norm->sum.data, norm->weight, norm->eps,
                                   row_threads(norm->out.width / 8)};
    launch_row(p.cuda, p.args->matrix, p.is_product(), true, row, p.output());
    return RC_OK;
}

static enum rc run_skinny(const struct linear_problem &p, struct err *err)
{
    return launch_skinny(p.cuda, p.args->matrix, p.is_product(), &p.args->x, p.output(), err);
}

static enum rc run_gemm(const struct linear_problem &p, struct err *err)
{
    const struct matrix *matrix = p.args->matrix;
    const size_t row_bytes = matrix->parts[0].row_bytes;
    struct gemm_args product = {matrix->data, row_bytes, p.args->x, matrix->n_cols, p.is_product(), p.output()};
    return gemm_multiply(p.cuda, p.cuda->linear->encode, &p.cuda->linear->gemm, &product, err);
}

static enum rc run_parts(const struct linear_problem &p, struct err *)
{
    launch_parts(p.cuda, p.args);
    return RC_OK;
}

static enum rc run_sync_few(const struct linear_problem &p, struct err *)
{
    sync_few(p.cuda, p.args->matrix, &p.args->x, p.is_product(), p.output());
    return RC_OK;
}

static enum rc run_sync_many(const struct linear_problem &p, struct err *)
{
    sync_many(p.cuda, p.args->matrix, &p.args->x, p.is_product(), p.output());
    return RC_OK;
}

/* Where the library refuses, our own kernel multiplies. */
static enum rc run_library(const struct linear_problem &p, struct err *err)
{
    struct lt_product product = product_of(p.args);
    const struct lt_algorithm *algorithm = find_algorithm(&p.cuda->linear->library, p.args->matrix, p.args->n_rows);
    const bool is_done = lt_multiply(p.cuda->linear->library.lt, &product, p.cuda->dtype, algorithm, p.cuda->stream);
    return is_done ? RC_OK : p.cuda->is_portable ? run_sync_many(p, err) : run_gemm(p, err);
}

static struct fp8_product fp8_product_of(const struct linear_problem &p)
{
    return {p.cuda, &p.cuda->linear->fp8, p.args->matrix, p.is_product(), &p.args->x, p.norm, p.n_rows, p.output()};
}

static bool fits_fp8(const struct linear_problem &p)
{
    return fp8_fits(fp8_product_of(p));
}

static bool fits_fp8_row(const struct linear_problem &p)
{
    return fp8_row_fits(fp8_product_of(p));
}

static enum rc run_fp8_row(const struct linear_problem &p, struct err *)
{
    fp8_row_multiply(fp8_product_of(p));
    return RC_OK;
}

static enum rc run_fp8_few(const struct linear_problem &p, struct err *err)
{
    const uint32_t eights = skinny_eights(p.n_rows);
    const struct fp8_product product = fp8_product_of(p);
    const struct fp8_rows x = fp8_rounded(product, 8 * eights);
    const struct view numbers = {x.numbers, x.row_bytes / 2, x.row_bytes / 2}; /* the copy engine counts two bytes as one */
    const struct tensor_map *x_map;
    enum rc rc = find_x_map(p.cuda, &numbers, p.n_rows, x.row_bytes / 2, 8 * eights, fp8_few_slabs(eights), &x_map, err);
    if (!rc)
        fp8_few_multiply(product, *x_map, x, eights);
    return rc;
}

static enum rc run_fp8_many(const struct linear_problem &p, struct err *err)
{
    const struct fp8_product product = fp8_product_of(p);
    const struct fp8_rows x = fp8_rounded(product, ceil_div(p.n_rows, FP8_PADDED) * FP8_PADDED);
    return fp8_many_multiply(product, p.cuda->linear->encode, &p.cuda->linear->gemm, x, err);
}

static enum rc run_fp8_plain(const struct linear_problem &p, struct err *)
{
    const struct fp8_product product = fp8_product_of(p);
    fp8_plain_multiply(product, fp8_rounded(product, ceil_div(p.n_rows, 8) * 8));
    return RC_OK;
}

static bool fits_units(const struct linear_problem &p)
{
    const struct view &x = p.args->x;
    return map_fits(x.data, (size_t)x.stride * 2) && (!p.is_product() || units_of(p.args->matrix).is_paired());
}

static bool fits_units_few(const struct linear_problem &p)
{
    return fits_units(p) && !p.args->delta;
}

static enum rc find_units_map(const struct linear_problem &p, const struct units_box &box, const struct tensor_map **map,
                              struct err *err)
{
    return find_x_map(p.cuda, &p.args->x, p.n_rows, p.args->matrix->n_cols, box.rows, box.blocks, map, err);
}

static enum rc run_units_few(const struct linear_problem &p, struct err *err)
{
    const struct tensor_map *x_map;
    enum rc rc = find_units_map(p, units_few_box(p.n_rows), &x_map, err);
    if (!rc)
        units_few_multiply(p.cuda, p.args->matrix, *x_map, p.is_product(), p.output());
    return rc;
}

static enum rc run_units_many(const struct linear_problem &p, struct err *err)
{
    const struct tensor_map *x_map;
    enum rc rc = find_units_map(p, units_many_box(p.cuda, p.args->matrix, p.n_rows), &x_map, err);
    if (!rc)
        units_many_multiply(p.cuda, p.args->matrix, *x_map, p.is_product(), p.output());
    return rc;
}

static enum rc run_units_plain(const struct linear_problem &p, struct err *)
{
    units_plain_multiply(p.cuda, p.args->matrix, &p.args->x, p.output());
    return RC_OK;
}

static enum rc run_sync_units(const struct linear_problem &p, struct err *)
{
    sync_units_few(p.cuda, p.args->matrix, &p.args->x, p.is_product(), p.output());
    return RC_OK;
}

static enum rc run_sync_panels(const struct linear_problem &p, struct err *)
{
    sync_units_many(p.cuda, p.args->matrix, &p.args->x, p.is_product(), p.output());
    return RC_OK;
}

static enum rc run_router(const struct linear_problem &p, struct err *err)
{
    return cuda_router(p.cuda, p.args, err);
}

static enum rc multiply(const struct linear_problem &problem, struct err *err);

/* Each run of parts of one type multiplies x into its own columns of y, in the way that the run alone has. */
static enum rc run_runs(const struct linear_problem &p, struct err *err)
{
    const struct linear_args *args = p.args;
    const size_t item = p.cuda->dtype == DTYPE_F32 ? 4 : 2;
    enum rc rc = RC_OK;
    uint32_t first = 0;
    for (const struct matrix *run = args->matrix->runs; run && !rc; first += run->n_rows, run = run->next) {
        struct linear_args own = *args;
        struct view add = args->add ? *args->add : args->y;
        add.data = (char *)add.data + first * item;
        own.matrix = run;
        own.y.data = (char *)args->y.data + first * (args->is_float_out ? 4 : item);
        own.y.width = run->n_rows;
        own.bias = args->bias ? args->bias + first : NULL;
        own.delta = args->delta ? args->delta + first : NULL;
        own.add = args->add ? &add : NULL;
        rc = run->n_rows ? multiply(linear_problem(p.cuda, &own), err) : RC_OK;
    }
    return rc;
}

/* Computes gate | up into mid, then their product. */
static enum rc run_twice(const struct linear_problem &p, struct err *err)
{
    const struct linear_args *args = p.args;
    struct linear_args first = *args;
    first.output = LINEAR_SUM;
    first.y = args->mid;
    enum rc rc = args->mid.data ? cuda_linear(p.cuda, &first, err)
                                : err_set(err, RC_INTERNAL, "linear: wanted mid for a gated product, have none");
    if (rc)
        return rc;
    uint32_t width = args->y.width, item = p.cuda->dtype == DTYPE_F32 ? 4 : 2;
    struct gated_args gated = {args->n_rows, args->act, {args->mid.data, width, args->mid.stride}, {}, args->y};
    gated.up = gated.gate;
    gated.up.data = (char *)gated.gate.data + (size_t)width * item;
    return cuda_gated(p.cuda, &gated, err);
}

#define LIBRARY_ROWS (SKINNY_ROWS + 1)
static const struct linear_way LINEAR_WAYS[] = {
    /* name            devices   rows                    weights              forms          fits             run */
    {"row_normed",      SM_90A,   1, 1,                   STREAMED,            NORMED,        fits_row_normed, run_row_normed},
    {"router",          ANY_GPU,  1, ANY_ROWS,            OF_ROUTER,           SUM,           NULL,            run_router},
    {"library",         ANY_GPU,  LIBRARY_ROWS, ANY_ROWS, STREAMED,            SUM,           fits_library,    run_library},
    {"row",             SM_90A,   1, 1,                   STREAMED,            SUM | PRODUCT, fits_row,        run_row},
    {"skinny",          SM_90A,   1, SKINNY_ROWS,         STREAMED,            SUM | PRODUCT, fits_stream,     run_skinny},
    {"gemm",            SM_90A,   1, ANY_ROWS,            STREAMED,            SUM | PRODUCT, fits_stream,     run_gemm},
    {"sync_few",        ANY_GPU,  1, SYNC_FEW_ROWS,       STREAMED,            SUM | PRODUCT, fits_stream,     run_sync_few},
    {"sync_many",       ANY_GPU,  1, ANY_ROWS,            STREAMED,            SUM | PRODUCT, fits_stream,     run_sync_many},
    {"sync_ragged",     ANY_GPU,  SYNC_FEW_ROWS + 1, ANY_ROWS, IN_PARTS,       SUM | PRODUCT, fits_ragged,     run_sync_many},
    {"fp8_row",         SM_90A,   1, 1,                   OF_FP8,              ANY_FORM,      fits_fp8_row,    run_fp8_row},
    {"fp8_few",         SM_90A,   1, SKINNY_ROWS,         OF_FP8,              ANY_FORM,      fits_fp8,        run_fp8_few},
    {"fp8_many",        SM_90A,   1, ANY_ROWS,            OF_FP8,              ANY_FORM,      fits_fp8,        run_fp8_many},
    {"fp8_plain",       PORTABLE, 1, ANY_ROWS,            OF_FP8,              SUM,           NULL,            run_fp8_plain},
    {"units_few",       SM_90A,   1, UNITS_FEW_ROWS,      IN_UNITS,            SUM | PRODUCT, fits_units_few,  run_units_few},
    {"units_many",      SM_90A,   1, ANY_ROWS,            IN_UNITS,            SUM | PRODUCT, fits_units,      run_units_many},
    {"sync_units_few",  ANY_GPU,  1, UNITS_FEW_ROWS,      IN_UNITS,            SUM | PRODUCT, fits_units,      run_sync_units},
    {"sync_units_many", ANY_GPU,  1, ANY_ROWS,            IN_UNITS,            SUM | PRODUCT, fits_units,      run_sync_panels},
    {"units_plain",     ANY_GPU,  1, ANY_ROWS,            IN_UNITS,            SUM,           NULL,            run_units_plain},
    {"twice",           ANY_GPU,  1, ANY_ROWS,            ALL_WEIGHTS,         PRODUCT,       NULL,            run_twice},
    {"runs",            ANY_GPU,  1, ANY_ROWS,            IN_RUNS,             SUM,           NULL,            run_runs},
    {"parts",           ANY_GPU,  1, ANY_ROWS,            STREAMED | IN_PARTS, SUM,           NULL,            run_parts},
};

struct way_name cuda_linear_way(uint32_t row)
{
    return name_of_way(LINEAR_WAYS, row);
}

static enum rc multiply(const struct linear_problem &problem, struct err *err)
{
    const struct linear_way *way = find_way<WAYS_LINEAR>(problem.cuda, LINEAR_WAYS, problem);
    return way ? way->run(problem, err) : err_set(err, RC_INTERNAL, "linear: wanted a way that takes the matrix, have none");
}

/* The stores to other ranks hide behind the products of later tiles; fewer bytes arrive sooner in packets. The library's way
 * does not store so, and each rank chooses it for itself. y's stride is that of the whole value, and equal on all ranks. */
bool cuda_linear_mirrors(void *ctx, const struct linear_args *args)
{
    struct cuda *cuda = (struct cuda *)ctx;
    if (cuda_n_ranks(cuda) < 2 || args->is_float_out || (size_t)args->n_rows * args->y.stride * 2 < MIRRORED_BYTES)
        return false;
    struct linear_args mirrored = *args;
    mirrored.is_mirrored = true;
    const struct linear_problem problem(cuda, &mirrored);
    const struct linear_way *way = find_way<WAYS_LINEAR>(cuda, LINEAR_WAYS, problem);
    return way && way->run == run_gemm;
}

bool linear_normed(struct cuda *cuda, const struct add_rms_norm_args *args)
{
    const struct linear_problem problem(cuda, args->linear, args);
    const struct linear_way *way = find_way<WAYS_LINEAR>(cuda, LINEAR_WAYS, problem);
    return way && way->run(problem, NULL) == RC_OK;
}

enum rc cuda_linear(void *ctx, const struct linear_args *args, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    if (!args->n_rows || args->n_rows > cuda->options.max_rows)
        return err_set(err, RC_INTERNAL, "linear: wanted 1 to %u rows (the backend's max_rows), have %u",
                       cuda->options.max_rows, args->n_rows);
    if (args->input != LINEAR_PLAIN)
        return err_set(err, RC_INTERNAL, "linear: wanted plain input, have a fused form that fusions() does not name");
    enum rc rc = multiply(linear_problem(cuda, args), err);
    return rc ? rc : launched(err, "linear");
}

static enum rc multiply_own(struct cuda *cuda, const struct linear_args *args)
{
    return multiply(linear_problem(cuda, args), NULL);
}

enum rc cuda_refresh(void *ctx, const struct refresh_args *args, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    return fp8_compare_scales(cuda, cuda->linear->fp8.first, args->is_stale, err);
}

enum rc cuda_prepare(void *ctx, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    bool is_stale = false; /* nothing has been recorded */
    const enum rc rc = fp8_compare_scales(cuda, cuda->linear->fp8.first, &is_stale, err);
    return rc ? rc : library_prepare(cuda, &cuda->linear->library, multiply_own, err);
}
