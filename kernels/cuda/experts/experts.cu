/* y[r] = sum over r's routes, in their order, of weight * (W_down(e) form(W_up(e) x[r] + bias) + bias): one chain of float32
 * from 0, rounded once. form is act(gate) * up, the clamped product, or act(up). The products have the chains of linear.cu, so
 * a row gets the bits of its experts' linears alone, for any number of rows and in any batch.
 *
 * EXPERTS_WAYS has the ways of the whole operation, EXPERTS_LINEAR_WAYS those of up and down where each is a launch. The host
 * does not know the routes, so a graph can contain the operation. For more than 8 rows experts_sort has a block an expert,
 * which sorts the expert's routes (stable); for up to 8 rows each block of the products sorts all routes itself. The block of
 * an expert also gathers the rows of x for its routes, unless there can be many: then a launch more, experts_gather, has a
 * block a place, because most rows may go to a few experts (experts_places.cuh).
 *
 * FP8 and INT8 weights whose products round x have the arithmetic of linear_fp8.cuh: a launch before up and one before down
 * round the rows (experts_fp8.cuh). Weights in units have that of linear_units.cuh.
 *
 * A rank holds some of the experts, or a part of every expert. Routes of experts that it does not hold have no places; what the
 * held ones make goes to the routes' parts of y (experts_routes.cuh).
 *
 * Few rows an expert are bound by the bytes of the experts that have rows, many rows by the tensor cores, plain tiles by
 * latency. */
#include "../core/eight.cuh"
#include "../core/launch.cuh"
#include "../core/units.cuh"
#include "../core/ways.cuh"
#include "../core/weight_format.cuh"
#include "experts_fp8_grouped.cuh"
#include "experts_fp8_plain.cuh"
#include "experts_fp8_streamed.cuh"
#include "experts_grouped.cuh"
#include "experts_places.cuh"
#include "experts_plain.cuh"
#include "experts_routes.cuh"
#include "experts_row_2byte.cuh"
#include "experts_row_mxfp4.cuh"
#include "experts_rows8_mxfp4.cuh"
#include "experts_streamed.cuh"

/* ---- one operation ------------------------------------------------------------------------------------------------------- */

/* What adapters add to a linear. */
static experts_added added_to(const struct running_mixture *run, const struct expert_linear *linear)
{
    const struct experts_lora *lora = run->args->lora;
    experts_added added = {};
    if (linear->added)
        added = {(const char *)lora->slots, lora->slot_bytes, cuda_lora_row_slots(run->cuda, lora->rows), lora->scratch,
                 lora->max_rank, *linear->added};
    return added;
}

template <class T, uint32_t N> static void launch_plain(const struct running_mixture *run, const struct expert_linear *linear)
{
    const struct cuda_part *part = &linear->w->parts[0];
    struct plain_weights w = {part->data, part->row_bytes, linear->rows_each, linear->w->n_cols};
    struct output out = output_of(linear);
    dim3 grid(ceil_div(out.n_out, 16), run->m.n_experts);
    const experts_added added = added_to(run, linear);
    if (added.slots)
        launch(run->cuda, experts_shrink<T>, dim3(run->m.n_routes, added.given.n_parts), 32 * ADDED_WARPS, 0, run->m,
               rows<T>(linear->x), linear->w->n_cols, added);
    if constexpr (sizeof(T) == 2)
        if (part->dtype == run->cuda->dtype) {
            bool is_aligned = (uintptr_t)linear->x.data % 4 == 0 && linear->x.stride % 2 == 0;
            launch(run->cuda, experts_plain_tiles<T, N>, grid, 32, 0, run->m, w, rows<T>(linear->x), is_aligned, out,
                   run->product, added);
            return;
        }
    visit_weight(part->dtype, [&](auto weight) {
        launch(run->cuda, experts_plain_values<T, decltype(weight), N>, grid, PLAIN_THREADS, 0, run->m, w, rows<T>(linear->x),
               out, run->product, added);
    });
}

static enum rc run_plain(const struct running_mixture *run, const struct expert_linear *linear, struct err *)
{
    visit_type(run->cuda->dtype, [&](auto value) {
        using T = decltype(value);
        if (linear->is_product)
            launch_plain<T, 2>(run, linear);
        else
            launch_plain<T, 1>(run, linear);
    });
    return RC_OK;
}

/* Rows of x, in eights, that units of the few have; 0: experts have too many. */
static uint32_t eights_of(const struct mixture *m)
{
    float mean = (float)m->n_routes / (float)m->n_experts, most = mean + 2 * sqrtf(mean);
    if (m->n_rows <= 8)
        return 1;
    return most <= 8 ? 1 : most <= 16 ? 2 : most <= 32 ? 4 : most <= 64 ? 8 : 0;
}

/* The same for packed weights: a tile has eights of rows beside each other, a tile of a product pairs of eights. */
static enum rc map_packed(const struct running_mixture *run, const struct expert_linear *linear, uint32_t n_each,
                          uint32_t stage_blocks, struct tensor_map *map, struct err *err)
{
    const uint32_t n_blocks = linear->w->n_cols / 64, half = linear->rows_each / 16, n_eights = linear->w->n_rows / 8;
    const uint64_t block_bytes = (uint64_t)n_eights * PACKED_BYTES;
    struct map_dims plain = {2, {n_eights, n_blocks}, {PACKED_BYTES, block_bytes}, {n_each, stage_blocks}};
    struct map_dims pairs = {4,
                             {1, 2, n_eights - half, n_blocks},
                             {PACKED_BYTES, half * PACKED_BYTES, PACKED_BYTES, block_bytes},
                             {1, 2, n_each, stage_blocks}};
    const struct map_form form = {CU_TENSOR_MAP_DATA_TYPE_UINT16, PACKED_BYTES / 2, CU_TENSOR_MAP_SWIZZLE_NONE};
    return map_make_as(run->cuda->experts->encode, form, linear->w->data, linear->is_product ? &pairs : &plain, map, err);
}

typedef void (*streamed_kernel)(CUtensorMap, CUtensorMap, struct streamed_shape, struct mixture, bool, struct output,
                                expert_product);

template <class T> static streamed_kernel streamed_kernel_of(uint32_t eights, bool is_product)
{
    switch (eights) {
    case 1: return is_product ? experts_streamed<T, 1, true> : experts_streamed<T, 1, false>;
    case 2: return is_product ? experts_streamed<T, 2, true> : experts_streamed<T, 2, false>;
    case 4: return is_product ? experts_streamed<T, 4, true> : experts_streamed<T, 4, false>;
    default: return is_product ? experts_streamed<T, 8, true> : experts_streamed<T, 8, false>;
    }
}

static enum rc run_streamed(const struct running_mixture *run, const struct expert_linear *linear, struct err *err)
{
    struct cuda *cuda = run->cuda;
    const uint32_t eights = run->eights;
    const uint32_t max_units = min(run->m.n_experts, run->m.n_routes) + run->m.n_routes / (8 * eights);
    const uint32_t n_rows = linear->is_place ? run->m.n_routes : run->m.n_rows, stage_blocks = skinny_stage_blocks(eights);
    struct streamed_shape s = {tiles_of(run, linear), expert_step(linear), 0, max_units, linear->is_behind};
    struct tensor_map w, x;
    uint32_t bytes = streamed_cut_memory(&s, eights);
    enum rc rc = map_weights(run, linear, s.w.tile_rows, stage_blocks, &w, err);
    rc = rc ? rc : map_rows(run, linear, n_rows, 8 * eights, stage_blocks, &x, err);
    if (rc)
        return rc;
    streamed_kernel kernel = cuda->dtype == DTYPE_F16 ? streamed_kernel_of<__half>(eights, linear->is_product)
                                                      : streamed_kernel_of<__nv_bfloat16>(eights, linear->is_product);
    launch(cuda, kernel, min(max_units * s.w.n_tiles, cuda->n_processors), SKINNY_THREADS, bytes, map_of(&w), map_of(&x), s,
           run->m, linear->is_place, output_of(linear), run->product);
    return RC_OK;
}

/* Places of a unit of packed weights. Packed weights stay bound by bytes for more rows than others, so a unit has as few
 * columns as most experts fill. */
static uint32_t unit_of(const struct mixture *m)
{
    float mean = (float)m->n_routes / (float)m->n_experts, most = mean + 2 * sqrtf(mean);
    return min(((uint32_t)most / GROUPED_BOX + 1) * GROUPED_BOX, grouped_weights<true>::unit);
}

static enum rc run_grouped(const struct running_mixture *run, const struct expert_linear *linear, struct err *err)
{
    struct cuda *cuda = run->cuda;
    const bool is_packed = linear->w->is_packed;
    struct grouped_shape s = {};
    struct tensor_map w, x;
    s.n_blocks = linear->w->n_cols / 64;
    s.n_tiles = ceil_div(linear->rows_each, GROUPED_ROWS);
    s.n_tiles += is_packed && cuda->experts->n_pairs ? s.n_tiles % 2 : 0; /* rather a tile of nothing than rows of x twice */
    s.across = s.n_tiles % 2 == 0 && cuda->experts->n_pairs ? 2 : 1;
    s.expert_step = linear->is_product || is_packed ? linear->rows_each / 8 : linear->rows_each;
    s.is_product = linear->is_product;
    s.is_wide = map_fits(linear->y.data, (size_t)linear->y.stride * 2) && linear->y.width % 8 == 0;
    s.is_behind = linear->is_behind;
    is_packed ? grouped_cut_memory<true>(&s, unit_of(&run->m)) : grouped_cut_memory<false>(&s, grouped_weights<false>::unit);
    enum rc rc = is_packed ? map_packed(run, linear, GROUPED_ROWS / (linear->is_product ? 16 : 8), 1, &w, err)
                           : map_weights(run, linear, GROUPED_ROWS, 1, &w, err);
    rc = rc ? rc : map_rows(run, linear, run->m.n_routes, GROUPED_BOX, 1, &x, err);
    if (rc)
        return rc;
    uint32_t n_units = run->m.n_routes / s.unit + min(run->m.n_experts, run->m.n_routes);
    uint32_t n_clusters = min(n_units * (s.n_tiles / s.across), s.across == 2 ? cuda->experts->n_pairs : cuda->n_processors);
    launch_clusters(cuda,
                    is_packed                  ? experts_grouped<__nv_bfloat16, true>
                    : cuda->dtype == DTYPE_F16 ? experts_grouped<__half, false>
                                               : experts_grouped<__nv_bfloat16, false>,
                    dim3(n_clusters * s.across), s.across, GROUPED_THREADS, SHARED_BYTES,
                    grouped_maps{map_of(&w), map_of(&x)}, run->m, s, output_of(linear), run->product);
    return RC_OK;
}

/* ---- before and behind the products -------------------------------------------------------------------------------------- */

/* Computes the places of the routes and gathers their rows of x: those that go up into `outer`, those that go down into
 * `middle`. */
static void sort_all(struct running_mixture *run)
{
    const struct experts_args *args = run->args;
    const bool is_down = args->half == EXPERTS_DOWN;
    const struct view &to = is_down ? run->middle : run->outer;
    const struct sort_input input = {{run->first, run->m.n_experts}, is_down ? run->inner : 0,
                                     run->m.is_input_scaled && !is_down, run->m.n_rows > SORTERS_GATHER_ROWS};
    run->m.is_sorted = true;
    visit_type(run->cuda->dtype, [&](auto value) {
        using T = decltype(value);
        bool is_aligned = has_eights<T>(args->x) && (uintptr_t)to.data % 16 == 0 && to.width % 8 == 0;
        launch(run->cuda, is_aligned ? experts_sort<T, true> : experts_sort<T, false>, run->m.n_experts, SORTERS, 0, run->m,
               input, rows<T>(args->x), to.width, (T *)to.data);
        if (input.is_late)
            launch(run->cuda, is_aligned ? experts_gather<T, true> : experts_gather<T, false>,
                   dim3(run->m.n_routes, ceil_div(to.width, 8 * COMBINERS)), COMBINERS, 0, run->m, input, rows<T>(args->x),
                   to.width, (T *)to.data);
    });
}

/* Puts the results, by places, into their routes' parts of y. */
static void scatter_all(const struct running_mixture *run, const struct view &results)
{
    const struct held_experts held = {run->first, run->m.n_experts};
    const uint32_t first_column = run->args->half == EXPERTS_UP ? run->args->first_column : 0;
    struct part_mirrors mirrors = {};
    mirrors.n = run->args->is_mirrored ? cuda_mirrors(run->cuda, mirrors.to) : 0;
    visit_type(run->cuda->dtype, [&](auto value) {
        using T = decltype(value);
        const struct view &y = run->args->y;
        bool is_aligned = has_eights<T>(results) && has_eights<T>(y) && run->part_columns % 8 == 0 && first_column % 8 == 0;
        launch(run->cuda, is_aligned ? experts_scatter<T, true> : experts_scatter<T, false>,
               dim3(run->m.n_routes, ceil_div(results.width, 8 * ROUTE_THREADS)), ROUTE_THREADS, 0, run->m, held,
               rows<T>(results), rows<T>(y), run->part_columns, first_column, mirrors);
    });
}

static void combine_all(const struct running_mixture *run, const struct view &results)
{
    visit_type(run->cuda->dtype, [&](auto value) {
        using T = decltype(value);
        const struct view &y = run->args->y;
        bool is_aligned = has_eights<T>(results) && has_eights<T>(y);
        launch(run->cuda, is_aligned ? experts_combine<T, true> : experts_combine<T, false>,
               dim3(run->m.n_rows, ceil_div(y.width, 8 * COMBINERS)), COMBINERS, 0, run->m, rows<T>(results), rows<T>(y));
    });
}

static enum rc run_rows8_mxfp4(struct running_mixture *run, struct err *err)
{
    struct cuda *cuda = run->cuda;
    const struct expert_linear up = up_of(run, false), down = down_of(run);
    struct rows8_shape s = {};
    struct tensor_map maps[2];
    s.n_panels = streamed_tile_rows(up.rows_each, wanted_experts(&run->m), PANEL_ROWS, ROWS8_WARPS * PANEL_ROWS,
                                    cuda->n_processors) / PANEL_ROWS;
    s.up = {up.w->n_cols / 64, ceil_div(up.rows_each, s.n_panels * PANEL_ROWS), up.rows_each / 8, s.n_panels, 0, 0, 0, 0};
    s.down = {down.w->n_cols / 64, ceil_div(down.rows_each, DOWN_COLUMNS), down.rows_each / 8, DOWN_EIGHTS, 0, 0, 0, 0};
    const uint32_t bytes = rows8_cut_memory(&s, run->m.n_rows);
    enum rc rc = map_packed(run, &up, s.n_panels, STAGE_BLOCKS, &maps[0], err);
    rc = rc ? rc : map_packed(run, &down, DOWN_EIGHTS, STAGE_BLOCKS, &maps[1], err);
    if (rc)
        return rc;
    const uint32_t n_items = min(run->m.n_experts, run->m.n_routes) * s.up.n_tiles + s.down.n_tiles;
    struct output y = output_of(&down);
    y.y = (char *)run->args->y.data;
    y.y_stride = run->args->y.stride;
    launch(cuda, experts_rows8_mxfp4, min(n_items, cuda->n_processors), ROWS8_THREADS, bytes,
           rows8_maps{map_of(&maps[0]), map_of(&maps[1])}, s, run->m,
           rows8_rows{(const char *)up.x.data, up.x.stride * 2}, output_of(&up), y, run->product, cuda->experts->rows8_counts);
    return RC_OK;
}

static enum rc run_row_mxfp4(struct running_mixture *run, struct err *)
{
    struct cuda *cuda = run->cuda;
    const struct expert_linear up = up_of(run, false), down = down_of(run);
    struct row4_shape s = row4_cut(run->m, run->inner, up.w->n_cols, down.rows_each, cuda->n_processors);
    s.parity = cuda->experts->n_row_launches++ % 2;
    struct output y = output_of(&down);
    y.y = (char *)run->args->y.data;
    const struct row4_input in = {up.w->data, down.w->data, (const char *)up.x.data};
    launch(cuda, experts_row_mxfp4, min(max(s.n_up, s.n_down), cuda->n_processors), ROW4_THREADS,
           s.tables_at + sizeof(struct row4_tables), in, s, run->m, output_of(&up), y, run->product, cuda->experts->row4);
    return RC_OK;
}

static enum rc run_row_2byte(struct running_mixture *run, struct err *err)
{
    struct cuda *cuda = run->cuda;
    const struct expert_linear up = up_of(run, false), down = down_of(run);
    const uint32_t n = run->m.n_chosen;
    const struct row16_shape s = row16_cut(n, run->inner, up.w->n_cols, down.rows_each, cuda->n_processors);
    struct expert_linear eights = up;
    eights.is_product = false;
    struct tensor_map maps[4];
    enum rc rc = map_weights(run, &eights, 8, ROW16_BLOCKS, &maps[0], err);
    rc = rc ? rc : map_weights(run, &down, 8, ROW16_BLOCKS, &maps[1], err);
    rc = rc ? rc : map_rows(run, &up, 1, 8, s.up_blocks, &maps[2], err);
    rc = rc ? rc : map_rows(run, &down, n, 8, s.down_blocks, &maps[3], err);
    if (rc)
        return rc;
    const struct row16_maps all = {map_of(&maps[0]), map_of(&maps[1]), map_of(&maps[2]), map_of(&maps[3])};
    struct output y = output_of(&down);
    y.y = (char *)run->args->y.data;
    launch(cuda, cuda->dtype == DTYPE_F16 ? experts_row_2byte<__half> : experts_row_2byte<__nv_bfloat16>,
           min(max(s.n_up, s.n_down), cuda->n_processors), ROW16_THREADS, s.tables_at + sizeof(struct row16_tables), all, s,
           run->m, output_of(&up), y, run->product, cuda->experts->row16_counts + cuda->experts->n_row_launches++ % 2);
    return RC_OK;
}

/* ---- the ways ------------------------------------------------------------------------------------------------------------ */

/* The layout of a linear's weights, or of both linears': the activations' two-byte type with whole 64s of columns;
 * packed.cuh's order; FP8 or INT8 whose products round x to it; units (units.cuh); or any other layout, or two different ones.
 * The copy engine reads all but the last. */
enum experts_weights { TWO_BYTE = 1, PACKED = 2, OTHER = 4, ROUNDED = 8, IN_UNITS = 16 };

static enum experts_weights weights_of(const struct cuda *cuda, const struct matrix *w)
{
    const bool is_streamed = cuda->dtype != DTYPE_F32 && w->parts[0].dtype == cuda->dtype && w->n_cols % 64 == 0;
    const enum experts_weights packed = lies_in_units(w->parts[0].dtype) ? IN_UNITS : PACKED;
    return w->is_packed ? packed : rounds_to_bytes(w) ? ROUNDED : is_streamed ? TWO_BYTE : OTHER;
}

static bool is_scratch_aligned(const struct running_mixture *run)
{
    return map_fits(run->args->scratch.data, 16);
}

/* The linears on one way. */
struct experts_linear_way {
    const char *name;
    uint32_t devices;  /* enum way_devices */
    uint32_t weights;  /* that it takes: enum experts_weights, or-ed */
    bool adds;         /* what adapters add */
    bool shows_routes; /* it starts the next kernel when the routes are written, so that one may read them before it waits */
    bool (*fits)(const struct running_mixture *run);
    enum rc (*run)(const struct running_mixture *run, const struct expert_linear *linear, struct err *err);
};

struct experts_linear_problem {
    const struct running_mixture *run;
    enum experts_weights weights;
};

static bool takes(const struct experts_linear_way &way, const struct experts_linear_problem &p)
{
    return way.weights & p.weights && (way.adds || !p.run->args->lora) && way.fits(p.run);
}

static bool fits_streamed(const struct running_mixture *run)
{
    return run->eights && is_scratch_aligned(run);
}

static bool fits_grouped(const struct running_mixture *run)
{
    return run->m.is_sorted && is_scratch_aligned(run);
}

static bool fits_plain(const struct running_mixture *run)
{
    return run->m.is_sorted;
}

static const struct experts_linear_way EXPERTS_LINEAR_WAYS[] = {
    /* name          devices   weights            adds   shows_routes  fits           run */
    {"streamed",     SM_90A,   TWO_BYTE,          false, true,         fits_streamed, run_streamed},
    {"grouped",      SM_90A,   TWO_BYTE | PACKED, false, true,         fits_grouped,  run_grouped},
    {"fp8_streamed", SM_90A,   ROUNDED,           false, true,         fits_streamed, run_fp8_streamed},
    {"fp8_grouped",  SM_90A,   ROUNDED,           false, true,         fits_grouped,  run_fp8_grouped},
    {"fp8_plain",    PORTABLE, ROUNDED,           false, false,        fits_grouped,  run_fp8_plain},
    {"units",        SM_90A,   IN_UNITS,          false, true,         fits_grouped,  run_units},
    {"units_plain",  PORTABLE, IN_UNITS,          false, false,        fits_plain,    run_units_plain},
    {"plain",        ANY_GPU,  TWO_BYTE | OTHER,  true,  false,        fits_plain,    run_plain},
};

struct way_name cuda_experts_linear_way(uint32_t row)
{
    return name_of_way(EXPERTS_LINEAR_WAYS, row);
}

/* is_behind: was the kernel before one that shows the routes? Set to what holds for the next. */
static enum rc multiply_linear(const struct running_mixture *run, struct expert_linear linear, bool *is_behind, struct err *err)
{
    const struct experts_linear_problem problem = {run, weights_of(run->cuda, linear.w)};
    const struct experts_linear_way *way = find_way<WAYS_EXPERTS_LINEAR>(run->cuda, EXPERTS_LINEAR_WAYS, problem);
    if (!way && run->args->lora)
        return err_set(err, RC_UNSUPPORTED, "lora_experts: adapters of experts in packed, FP8 or INT8 weights are not "
                       "supported yet on cuda; use lora_experts=False");
    if (!way)
        return err_set(err, RC_INTERNAL, "experts: wanted scratch on a multiple of 16 bytes for packed or FP8 weights");
    linear.is_behind = *is_behind;
    *is_behind = way->shows_routes;
    return way->run(run, &linear, err);
}

static enum rc multiply_up(const struct running_mixture *run, bool is_gathered, bool *is_behind, struct err *err)
{
    enum rc rc = multiply_linear(run, up_of(run, is_gathered), is_behind, err);
    if (rc || run->is_product)
        return rc;
    struct act_args act = {};
    act.n_rows = run->m.n_routes;
    act.act = run->args->act;
    act.x = act.out = run->middle;
    return cuda_act(run->cuda, &act, err);
}

/* Up, down and what becomes of the results, a launch each. */
static enum rc multiply_linears(const struct running_mixture *run, bool is_gathered, struct err *err)
{
    const struct experts_args *args = run->args;
    bool is_behind = false;
    struct view results = run->middle;
    enum rc rc = args->up ? multiply_up(run, is_gathered, &is_behind, err) : RC_OK;
    if (!rc && args->down) {
        struct expert_linear down = down_of(run);
        if (run->m.keeps_places)
            down.y.data = args->y.data;
        results = down.y;
        rc = multiply_linear(run, down, &is_behind, err);
    }
    if (!rc && !run->m.keeps_places)
        run->part_columns ? scatter_all(run, results) : combine_all(run, results);
    return rc;
}

/* The whole operation. */
enum experts_form { GATED = 1, UNGATED = 2, SCALED = 4, SHARED = 8, ADDED = 16 }; /* act(gate) * up or act(up); is the input
                                                     * scaled? Do ranks share the experts? Do adapters add to the products? */
struct experts_way {
    const char *name;
    uint32_t devices; /* enum way_devices */
    uint32_t min_rows, max_rows;
    uint32_t weights; /* that it takes: enum experts_weights, or-ed */
    uint32_t forms;   /* enum experts_form, or-ed */
    bool (*fits)(const struct running_mixture *run); /* a further condition, or NULL */
    enum rc (*run)(struct running_mixture *run, struct err *err);
};

struct experts_problem {
    const struct running_mixture *run;
    uint32_t weights, form;
    explicit experts_problem(const struct running_mixture *r) : run(r)
    {
        const struct experts_args *args = r->args;
        const enum experts_weights up = weights_of(r->cuda, args->up ? args->up : args->down),
                                   down = weights_of(r->cuda, args->down ? args->down : args->up);
        weights = up == down ? up : OTHER;
        form = (r->is_product ? GATED : UNGATED) | (args->is_input_scaled ? SCALED : 0) |
               (args->n_local || r->part_columns || args->half != EXPERTS_WHOLE ? SHARED : 0) |
               (args->lora ? ADDED : 0);
    }
};

static bool takes(const struct experts_way &way, const struct experts_problem &p)
{
    const uint32_t n_rows = p.run->m.n_rows;
    return n_rows >= way.min_rows && n_rows <= way.max_rows && way.weights & p.weights && !(p.form & ~way.forms) &&
           (!way.fits || way.fits(p.run));
}

/* Can the copy engine read the rows of x where they are? */
static bool fits_in_place(const struct running_mixture *run)
{
    return is_scratch_aligned(run) && map_fits(run->args->x.data, (size_t)run->args->x.stride * 2);
}

static bool fits_row_mxfp4(const struct running_mixture *run)
{
    return fits_in_place(run) && run->m.n_chosen <= ROW4_UNITS && max(run->args->x.width, run->inner) <= ROW4_MAX_COLS;
}

static bool fits_row_2byte(const struct running_mixture *run)
{
    return fits_in_place(run) && run->m.n_chosen <= ROW16_UNITS && max(run->args->x.width, run->inner) <= ROW16_MAX_COLS;
}

/* Rows that are rounded are read where they were rounded to. Rows that go down alone are parts. */
static bool fits_unsorted(const struct running_mixture *run)
{
    const bool is_rounded = run->args->up && rounds_to_bytes(run->args->up);
    return run->args->half != EXPERTS_DOWN && (is_rounded ? is_scratch_aligned(run) : fits_in_place(run));
}

/* The results of one row go into the parts of y at once. */
static enum rc run_unsorted(struct running_mixture *run, struct err *err)
{
    run->m.keeps_places = run->m.n_rows == 1 && run->args->is_by_route && !run->args->is_mirrored;
    return multiply_linears(run, false, err);
}

static enum rc run_sorted(struct running_mixture *run, struct err *err)
{
    sort_all(run);
    return multiply_linears(run, true, err);
}

#define ANY_WEIGHTS (TWO_BYTE | PACKED | OTHER | ROUNDED | IN_UNITS)
#define ANY_FORM (GATED | UNGATED | SCALED | SHARED | ADDED)
#define UNSORTED_FORMS (GATED | UNGATED | SHARED)
static const struct experts_way EXPERTS_WAYS[] = {
    /* name         devices   rows              weights             forms            fits            run */
    {"row_mxfp4",   SM_90A,   1, 1,             PACKED,             GATED,           fits_row_mxfp4, run_row_mxfp4},
    {"rows8_mxfp4", SM_90A,   1, UNSORTED_ROWS, PACKED,             GATED,           fits_in_place,  run_rows8_mxfp4},
    {"row_2byte",   SM_90A,   1, 1,             TWO_BYTE,           GATED,           fits_row_2byte, run_row_2byte},
    {"unsorted",    SM_90A,   1, UNSORTED_ROWS, TWO_BYTE | ROUNDED, UNSORTED_FORMS,  fits_unsorted,  run_unsorted},
    {"sorted",      ANY_GPU,  1, ANY_ROWS,      ANY_WEIGHTS,        ANY_FORM,        NULL,           run_sorted},
};

struct way_name cuda_experts_way(uint32_t row)
{
    return name_of_way(EXPERTS_WAYS, row);
}

static enum rc multiply_all(struct running_mixture *run, struct err *err)
{
    const struct experts_way *way = find_way<WAYS_EXPERTS>(run->cuda, EXPERTS_WAYS, experts_problem(run));
    return way ? way->run(run, err) : err_set(err, RC_INTERNAL, "experts: wanted a way that takes the weights, have none");
}

/* ---- the call ------------------------------------------------------------------------------------------------------------ */

static enum rc check_numbers(const struct experts_args *args, struct err *err)
{
    if (!args->n_experts || args->n_experts > EXPERTS_MAX || !args->n_chosen || args->n_chosen > EXPERTS_MAX_CHOSEN)
        return err_set(err, RC_UNSUPPORTED, "experts: wanted 1 to %u of at most %u experts, have %u of %u", EXPERTS_MAX_CHOSEN,
                       EXPERTS_MAX, args->n_chosen, args->n_experts);
    if (!args->up != (args->half == EXPERTS_DOWN) || !args->down != (args->half == EXPERTS_UP))
        return err_set(err, RC_INTERNAL, "experts: wanted the matrices of half %u alone", args->half);
    if ((args->up && !args->up->is_whole) || (args->down && !args->down->is_whole))
        return err_set(err, RC_UNSUPPORTED,
                       "experts: wanted one type for all experts' weights of a kind, have several; convert the checkpoint");
    return RC_OK;
}

static enum rc check_widths(const struct running_mixture *run, struct err *err)
{
    const struct experts_args *args = run->args;
    const uint32_t n = run->m.n_experts, per_expert = args->form == EXPERT_PLAIN ? 1 : 2, n_chosen = args->n_chosen;
    const uint32_t x = args->x.width / (args->up ? 1 : n_chosen);
    const uint32_t y = run->part_columns ? run->part_columns : args->y.width;
    if (args->up && (args->up->n_rows != n * per_expert * run->inner || args->up->n_cols != x))
        return err_set(err, RC_INTERNAL, "experts: wanted up [%u][%u], have [%u][%u]", n * per_expert * run->inner, x,
                       args->up->n_rows, args->up->n_cols);
    if (args->down && (args->down->n_rows != n * y || (!args->up && args->x.width != n_chosen * run->inner)))
        return err_set(err, RC_INTERNAL, "experts: wanted down [%u][%u], have [%u][%u]", n * y, args->up ? run->inner : x,
                       args->down->n_rows, args->down->n_cols);
    if (!args->down && args->first_column + run->inner > y)
        return err_set(err, RC_INTERNAL, "experts: wanted %u columns of each part of y, have %u",
                       args->first_column + run->inner, y);
    return RC_OK;
}

/* Bytes of a linear's rounded rows; 0: it rounds none. */
static size_t rounded_bytes(const struct matrix *w, uint32_t n_rows)
{
    return w && rounds_to_bytes(w) ? n_rows * fp8_place_bytes(w->n_cols) : 0;
}

/* Cuts the scratch; the tables lie behind the rows, rounded rows behind the tables. */
static enum rc place_all(struct running_mixture *run, struct err *err)
{
    const struct experts_args *args = run->args;
    uint32_t item = run->cuda->dtype == DTYPE_F32 ? 4 : 2, n = run->m.n_routes;
    size_t middle = (size_t)n * run->inner * item, outer = (size_t)n * run->width * item;
    size_t tables = (middle + outer + 15) / 16 * 16, n_table = (size_t)2 * n + run->m.n_experts + 1;
    size_t rounded = (tables + n_table * sizeof(uint32_t) + 15) / 16 * 16;
    size_t end = rounded + max(rounded_bytes(args->up, n), rounded_bytes(args->down, n));
    if (end > (size_t)args->n_rows * args->scratch.stride * item)
        return err_set(err, RC_INTERNAL, "experts: wanted %zu bytes of scratch, have %u x %u items of %u", end, args->n_rows,
                       args->scratch.stride, item);
    char *scratch = (char *)args->scratch.data;
    run->middle = {scratch, run->inner, run->inner};
    run->outer = {scratch + middle, args->x.width, args->x.width};
    run->m.offsets = (uint32_t *)(scratch + tables);
    run->m.places = run->m.offsets + run->m.n_experts + 1;
    run->m.entries = run->m.places + n;
    run->rounded = scratch + rounded;
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
    enum rc rc = check_numbers(args, err);
    if (rc)
        return rc;
    run.first = args->first;
    run.m.n_experts = args->n_local ? args->n_local : args->n_experts;
    run.m.first = args->first;
    run.inner = args->down ? args->down->n_cols : args->up->n_rows / run.m.n_experts / (args->form == EXPERT_PLAIN ? 1 : 2);
    run.part_columns = args->is_by_route || args->half == EXPERTS_UP ? args->y.width / args->n_chosen : 0;
    run.width = max(args->up ? args->x.width : 0, run.part_columns ? run.part_columns : args->y.width);
    run.is_product = args->form != EXPERT_PLAIN;
    run.product = {args->form, args->act, args->limit};
    run.m.n_rows = args->n_rows;
    run.m.n_chosen = args->n_chosen;
    run.m.n_routes = args->n_rows * args->n_chosen;
    run.m.routes = args->routes;
    run.m.is_awaited = args->n_rows == 1 && cuda->awaited_routes == args->routes;
    cuda->awaited_routes = NULL;
    run.eights = eights_of(&run.m);
    run.m.route_stride = args->route_stride;
    run.m.is_input_scaled = args->is_input_scaled;
    rc = check_widths(&run, err);
    if (!rc)
        rc = place_all(&run, err);
    if (!rc)
        rc = multiply_all(&run, err);
    return rc ? rc : launched(err, "experts");
}

#define MIRRORED_PARTS (512u << 10) /* bytes; fewer travel in packets, and are summed where they arrive */

bool cuda_experts_mirror(void *ctx, const struct experts_args *args)
{
    const struct cuda *cuda = (const struct cuda *)ctx;
    const size_t item = cuda->dtype == DTYPE_F32 ? 4 : 2;
    return cuda_n_ranks(cuda) > 1 && args->n_rows * args->y.stride * item > MIRRORED_PARTS;
}

enum rc cuda_combine(void *ctx, const struct combine_args *args, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    struct mixture m = {};
    if (!args->n_rows)
        return RC_OK;
    if (args->results.width != args->n_chosen * args->y.width)
        return err_set(err, RC_INTERNAL, "combine: wanted %u results of %u columns, have %u columns", args->n_chosen,
                       args->y.width, args->results.width);
    m.n_chosen = args->n_chosen;
    m.routes = args->routes;
    m.route_stride = args->route_stride;
    m.is_input_scaled = args->is_input_scaled;
    visit_type(cuda->dtype, [&](auto value) {
        using T = decltype(value);
        bool is_aligned = has_eights<T>(args->results) && has_eights<T>(args->y);
        launch(cuda, is_aligned ? experts_combine_parts<T, true> : experts_combine_parts<T, false>,
               dim3(args->n_rows, ceil_div(args->y.width, 8 * ROUTE_THREADS)), ROUTE_THREADS, 0, m, rows<T>(args->results),
               rows<T>(args->y));
    });
    return launched(err, "combine");
}

template <class T> static cudaError_t allow_rings(uint32_t *n_pairs, uint32_t n_processors)
{
    cudaError_t code = cudaSuccess;
    const void *grouped = (const void *)experts_grouped<T, false>;
    for (uint32_t i = 0; i < 8 && !code; i++) {
        code = allow_shared(streamed_kernel_of<T>(1u << i / 2, i % 2));
        code = code ? code : allow_shared(fp8_streamed_of<T, e4m3>(1u << i / 2, i % 2));
        code = code ? code : allow_shared(fp8_streamed_of<T, s8>(1u << i / 2, i % 2));
    }
    for (const void *kernel : {grouped, (const void *)experts_fp8_grouped<T, e4m3>, (const void *)experts_fp8_grouped<T, s8>,
                               (const void *)experts_row_2byte<T>, (const void *)experts_grouped<__nv_bfloat16, true>,
                               (const void *)experts_rows8_mxfp4, (const void *)experts_row_mxfp4})
        code = code ? code : allow_shared(kernel);
    return code ? code : count_clusters(grouped, n_processors, 2, GROUPED_THREADS, n_pairs);
}

enum rc cuda_experts_open(struct cuda *cuda, struct err *err)
{
    cuda->experts = (struct experts_state *)mem_calloc(1, sizeof *cuda->experts);
    if (!cuda->experts)
        return err_set(err, RC_MEMORY, "cuda: no memory for the context");
    if (cuda->dtype == DTYPE_F32 || cuda->is_portable)
        return RC_OK;
    enum rc rc = cuda_take(cuda, MEMORY_WORK, sizeof *cuda->experts->rows8_counts, &cuda->experts->rows8_counts, err);
    rc = rc ? rc : cuda_take(cuda, MEMORY_WORK, 2 * sizeof *cuda->experts->row16_counts, &cuda->experts->row16_counts, err);
    rc = rc ? rc : cuda_take(cuda, MEMORY_WORK, sizeof *cuda->experts->row4, &cuda->experts->row4, err);
    if (rc)
        return rc;
    cudaError_t code = cudaMemsetAsync(cuda->experts->rows8_counts, 0, sizeof *cuda->experts->rows8_counts, cuda->stream);
    if (!code)
        code = cudaMemsetAsync(cuda->experts->row16_counts, 0, 2 * sizeof *cuda->experts->row16_counts, cuda->stream);
    if (!code)
        code = cudaMemsetAsync(cuda->experts->row4, 0, sizeof *cuda->experts->row4, cuda->stream);
    if (!code)
        code = cuda->dtype == DTYPE_BF16 ? allow_rings<__nv_bfloat16>(&cuda->experts->n_pairs, cuda->n_processors)
                                         : allow_rings<__half>(&cuda->experts->n_pairs, cuda->n_processors);
    if (!code && cuda->dtype == DTYPE_BF16)
        code = experts_units_open();
    return code == cudaSuccess ? map_encoder_find(&cuda->experts->encode, err) : cuda_fail(err, code, "open");
}

void cuda_experts_close(struct cuda *cuda)
{
    mem_free(cuda->experts);
}
