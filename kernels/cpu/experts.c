/* y[r] = sum over j of w_rj * (down_e(form(up_e(x[r]) + up_bias_e)) + down_bias_e), e = the expert of route j of row r. Pairs
 * (row, route) are sorted by expert, so that an expert's weights are read once for all of its rows. The rows are packed like
 * those of any linear and multiplied by linear.c's tiles; their bits depend neither on the number of rows nor on neighbouring
 * rows. Products are float32, [n_pairs][2 * inner] and [n_pairs][width] in the operation's scratch. The sum over the routes is
 * one chain of fused multiply-adds from 0, in the order of the routes, not in the order in which experts are computed. Few
 * rows are bound by the bytes of their experts: (2 * inner * width + width * inner) weights each. The pairs of a wave fit the
 * backend's shared scratch; more pairs take several waves, expert by expert. A rank holds some of the experts and leaves out
 * the routes of the others; by route, float32 results stay as they are, and `combine` sums them by the same chain. Adapters add
 * to a product behind its multiplication, pair by pair. */
#include "gather.h"
#include "linear_run.h"
#include "ops.h"
#include "rows.h"

#include <string.h>

#define PANEL_COST 4u     /* cost of reading a panel, in rows multiplied by it */
#define COMBINE_COLS 256u /* columns that a thread sums at a time */
#define ALONE_VALUES 2048u /* up to this size of sums waking the other threads costs more than the work */
#define NO_PLACE UINT32_MAX

struct experts_job {
    struct cpu *cpu;
    const struct experts_args *args;
    uint32_t n_experts; /* that the matrices hold */
    uint32_t n_pairs, inner, up_width, width; /* width: of a result */
    uint32_t *first;  /* [n_experts + 1] pairs of expert e are [first[e], first[e + 1]) */
    uint32_t *rows;   /* [n_pairs] of a sorted pair */
    float *weights;   /* [n_pairs] */
    uint32_t *parts;  /* [n_pairs] the number of a sorted pair's route in its row */
    uint32_t *places; /* [n_rows][n_chosen] of a route among the sorted pairs; NO_PLACE: its expert is not held */
    float *up, *down; /* [n_pairs][up_width], [n_pairs][width] */
};

/* One of the two products of all experts. */
struct product {
    const struct matrix *matrix;
    const float *bias;
    float *out;
    uint32_t width, n_parts; /* of an expert */
    bool is_up;
    size_t pair_bytes;       /* of a packed row, at most */
};

/* The number of a route's expert among the experts that are held; at least n_experts: the expert is not held. */
static uint32_t held_expert(const struct experts_job *job, uint32_t row, uint32_t j)
{
    const struct experts_args *args = job->args;
    return (uint32_t)args->routes[(size_t)row * args->route_stride + j].expert - args->first;
}

/* Counting sort by expert; a row's pairs of one expert keep their order. */
static void sort_pairs(struct experts_job *job)
{
    const struct experts_args *args = job->args;
    memset(job->first, 0, (job->n_experts + 1) * sizeof *job->first);
    for (uint32_t r = 0; r < args->n_rows; r++)
        for (uint32_t j = 0; j < args->n_chosen; j++)
            if (held_expert(job, r, j) < job->n_experts)
                job->first[held_expert(job, r, j) + 1]++;
    for (uint32_t e = 0; e < job->n_experts; e++)
        job->first[e + 1] += job->first[e];
    for (uint32_t r = 0; r < args->n_rows; r++)
        for (uint32_t j = 0; j < args->n_chosen; j++) {
            uint32_t expert = held_expert(job, r, j), *place = &job->places[r * args->n_chosen + j];
            *place = expert < job->n_experts ? job->first[expert]++ : NO_PLACE;
            if (*place == NO_PLACE)
                continue;
            job->rows[*place] = r;
            job->parts[*place] = j;
            job->weights[*place] = args->routes[(size_t)r * args->route_stride + j].weight;
        }
    for (uint32_t e = job->n_experts; e > 0; e--)
        job->first[e] = job->first[e - 1];
    job->first[0] = 0;
}

static uint32_t pairs_of(const struct experts_job *job, uint32_t expert)
{
    return job->first[expert + 1] - job->first[expert];
}

/* out = min(gate, limit) * sigmoid(1.702 min(gate, limit)) * (clamp(up, -limit, limit) + 1) */
static void row_clamped(const float *gate, const float *up, float limit, uint32_t n, float *out)
{
    vf high = v_set1(limit), low = v_set1(-limit), one = v_set1(1.0f);
    for (uint32_t i = 0; i < n; i += LANES) {
        uint32_t lanes = n - i < LANES ? n - i : LANES;
        vf g = v_min(high, v_load_n(gate + i, lanes)), u = v_max(low, v_min(high, v_load_n(up + i, lanes)));
        vf swish = v_div(g, v_add(one, v_exp(v_mul(v_set1(-1.702f), g))));
        v_store_n(out + i, v_mul(swish, v_add(u, one)), lanes);
    }
}

/* What goes down of a sorted pair's product. */
static void form_pair(const struct experts_job *job, uint32_t pair, float *out)
{
    const struct experts_args *args = job->args;
    const float *product = job->up + (size_t)pair * job->up_width;
    if (args->form == EXPERT_GATED)
        row_act(args->act, product, product + job->inner, job->inner, out);
    else if (args->form == EXPERT_CLAMPED)
        row_clamped(product, product + job->inner, args->limit, job->inner, out);
    else
        row_act(args->act, product, NULL, job->inner, out);
}

/* The input of a product for a sorted pair. */
static void pair_input(const struct experts_job *job, bool is_up, uint32_t pair, float *out)
{
    const struct experts_args *args = job->args;
    const float *x = (const float *)args->x.data + (size_t)job->rows[pair] * args->x.stride;
    if (is_up && args->is_input_scaled)
        for (uint32_t c = 0; c < args->x.width; c++)
            out[c] = x[c] * job->weights[pair];
    else if (is_up)
        memcpy(out, x, args->x.width * sizeof *out);
    else if (args->half == EXPERTS_DOWN)
        memcpy(out, x + (size_t)job->parts[pair] * job->inner, job->inner * sizeof *out);
    else
        form_pair(job, pair, out);
}

/* The run of an expert's parts from `part` on; it has no panels if an earlier run contains them. */
static struct run run_of(const struct experts_job *job, const struct product *product, uint32_t expert, uint32_t part)
{
    uint32_t begin = expert * product->n_parts, end = begin + product->n_parts;
    struct run run = K(linear_next_run)(product->matrix, begin, end, pairs_of(job, expert));
    if (part >= run.n_parts)
        run = K(linear_next_run)(product->matrix, begin + part, end, pairs_of(job, expert));
    else if (part)
        run.n_panels = run.n_strips = 0;
    run.first_row = product->matrix->parts[begin].first_row;
    return run;
}

/* Start of an expert's packed rows in a wave, given the wave's first expert. */
static char *strips_of(const struct experts_job *job, const struct product *product, uint32_t first, uint32_t expert)
{
    return (char *)job->cpu->shared + (job->first[expert] - job->first[first]) * product->pair_bytes;
}

/* Packs a thread's share of the strips of experts [first, end). */
static void pack(const struct experts_job *job, const struct product *product, uint32_t first, uint32_t end, uint32_t part,
                 uint32_t thread, const struct lane_scratch *s)
{
    uint32_t n_strips = 0, before = 0, n_cols = product->matrix->n_cols, n_threads = job->cpu->n_threads;
    for (uint32_t e = first; e < end; e++)
        n_strips += run_of(job, product, e, part).n_strips;
    uint32_t from = share_first(n_strips, thread, n_threads), to = share_first(n_strips, thread + 1, n_threads);
    for (uint32_t e = first; e < end && before < to; e++) {
        struct run run = run_of(job, product, e, part);
        size_t row_bytes = (size_t)run.parts->n_blocks * run.type->strip_block_bytes;
        for (uint32_t i = 0; i < run.n_strips; i++, before++) {
            if (before < from || before >= to)
                continue;
            uint32_t row = share_first(pairs_of(job, e), i, run.n_strips);
            uint32_t n = share_first(pairs_of(job, e), i + 1, run.n_strips) - row;
            for (uint32_t k = 0; k < n; k++)
                pair_input(job, product->is_up, job->first[e] + row + k, s->rows + (size_t)k * n_cols);
            run.type->prepare(s->rows, n_cols, n, n_cols, strips_of(job, product, first, e) + row * row_bytes);
        }
    }
}

/* A panel's share of the work of a wave. */
static uint32_t panel_cost(const struct experts_job *job, uint32_t expert)
{
    return pairs_of(job, expert) + PANEL_COST;
}

/* The first of `n_panels` panels that starts at or after `from`. The panels start at `before` and cost `cost` each. */
static uint32_t first_panel(uint64_t before, uint64_t from, uint32_t cost, uint32_t n_panels)
{
    uint64_t panel = from <= before ? 0 : (from - before + cost - 1) / cost;
    return panel < n_panels ? (uint32_t)panel : n_panels;
}

/* Multiplies experts [first, end) by their packed rows. Each thread takes the panels that begin in its share of the cost. */
static void multiply(const struct experts_job *job, const struct product *product, uint32_t first, uint32_t end, uint32_t part,
                     uint32_t thread, struct lane_scratch *s)
{
    uint64_t total = 0, before = 0;
    for (uint32_t e = first; e < end; e++)
        if (pairs_of(job, e))
            total += (uint64_t)run_of(job, product, e, part).n_panels * panel_cost(job, e);
    uint64_t from = total * thread / job->cpu->n_threads, to = total * (thread + 1) / job->cpu->n_threads;
    for (uint32_t e = first; e < end && before < to; e++) {
        if (!pairs_of(job, e))
            continue;
        struct run run = run_of(job, product, e, part);
        uint32_t cost = panel_cost(job, e);
        struct share share = {first_panel(before, from, cost, run.n_panels), first_panel(before, to, cost, run.n_panels), 0,
                              run.n_strips};
        before += (uint64_t)run.n_panels * cost;
        if (share.panel == share.end_panel)
            continue;
        struct linear_args args = {
            .matrix = product->matrix,
            .n_rows = pairs_of(job, e),
            .y = {product->out + (size_t)job->first[e] * product->width, product->width, product->width},
            .bias = product->bias,
        };
        K(linear_share)(job->cpu, &args, &run, &share, strips_of(job, product, first, e), s);
    }
}

/* True if an expert's parts differ in type. The parts are then packed and multiplied one after the other. */
static bool is_mixed(const struct product *product)
{
    for (uint32_t p = 0; p < product->matrix->n_parts; p++)
        if (p % product->n_parts && product->matrix->parts[p].type != product->matrix->parts[p - 1].type)
            return true;
    return false;
}

static void run_product(const struct experts_job *job, const struct product *product, uint32_t thread, struct lane_scratch *s)
{
    uint32_t capacity = (uint32_t)(job->cpu->shared_bytes / product->pair_bytes);
    uint32_t n_passes = is_mixed(product) ? product->n_parts : 1;
    for (uint32_t first = 0, end; first < job->n_experts; first = end) {
        for (end = first + 1; end < job->n_experts && job->first[end + 1] - job->first[first] <= capacity; end++)
            ;
        for (uint32_t part = 0; part < n_passes; part++) {
            pack(job, product, first, end, part, thread, s);
            pool_barrier(job->cpu->pool);
            multiply(job, product, first, end, part, thread, s);
            pool_barrier(job->cpu->pool);
        }
    }
}

/* Adds what an expert's adapter adds to the product of a sorted pair. */
static void add_adapter(const struct experts_job *job, const struct product *product, uint32_t expert, uint32_t pair, float *x)
{
    const struct experts_lora *lora = job->args->lora;
    const struct experts_lora_parts *given = product->is_up ? &lora->up : &lora->down;
    uint32_t row = job->rows[pair];
    int32_t slot = lora->row_slots[lora->rows ? lora->rows[row] : (int32_t)row];
    if (slot < 0)
        return;
    pair_input(job, product->is_up, pair, x);
    for (uint32_t p = 0; p < given->n_parts; p++) {
        struct lora_part part = given->parts[p];
        part.head += expert * given->step;
        part.a += expert * given->step;
        part.b += expert * given->step;
        K(lora_row)(&part, (const char *)lora->slots + (size_t)slot * lora->slot_bytes, x, product->matrix->n_cols,
                    lora->scratch + (size_t)pair * 2 * lora->max_rank, product->out + (size_t)pair * product->width);
    }
}

/* Adds what adapters add to a thread's share of the pairs. */
static void add_adapters(const struct experts_job *job, const struct product *product, uint32_t thread,
                         const struct lane_scratch *s)
{
    uint32_t n = job->first[job->n_experts], end = share_first(n, thread + 1, job->cpu->n_threads), expert = 0;
    for (uint32_t pair = share_first(n, thread, job->cpu->n_threads); pair < end; pair++) {
        while (job->first[expert + 1] <= pair)
            expert++;
        add_adapter(job, product, expert, pair, s->rows);
    }
    pool_barrier(job->cpu->pool);
}

/* Result j of a row: sorted by expert if there are places, else part j of the row. */
static const float *result_at(const struct combine_args *args, const uint32_t *places, uint32_t row, uint32_t j)
{
    const float *results = args->results.data;
    if (places)
        return results + (size_t)places[(size_t)row * args->n_chosen + j] * args->results.stride;
    return results + (size_t)row * args->results.stride + (size_t)j * args->y.width;
}

/* Sums columns [column, column + width) of a row. */
static void combine_row(const struct combine_args *args, const uint32_t *places, uint32_t row, uint32_t column, uint32_t width)
{
    const struct route *routes = args->routes + (size_t)row * args->route_stride;
    float *y = (float *)args->y.data + (size_t)row * args->y.stride + column;
    for (uint32_t c = 0; c < width; c += LANES) {
        uint32_t lanes = width - c < LANES ? width - c : LANES;
        vf sum = v_zero();
        for (uint32_t j = 0; j < args->n_chosen; j++) {
            vf value = v_load_n(result_at(args, places, row, j) + column + c, lanes);
            sum = v_fma(v_set1(args->is_input_scaled ? 1.0f : routes[j].weight), value, sum);
        }
        v_store_n(y + c, sum, lanes);
    }
}

/* Sums a thread's share of the rows, in blocks of columns. */
static void combine_share(const struct combine_args *args, const uint32_t *places, uint32_t thread, uint32_t n_threads)
{
    uint32_t width = args->y.width, n_blocks = (width + COMBINE_COLS - 1) / COMBINE_COLS;
    uint32_t n = args->n_rows * n_blocks, end = share_first(n, thread + 1, n_threads);
    for (uint32_t i = share_first(n, thread, n_threads); i < end; i++) {
        uint32_t column = i % n_blocks * COMBINE_COLS;
        combine_row(args, places, i / n_blocks, column, width - column < COMBINE_COLS ? width - column : COMBINE_COLS);
    }
}

/* Puts a thread's share of the sorted results, or of what goes down, where their routes want them. */
static void store_by_route(const struct experts_job *job, uint32_t thread)
{
    const struct experts_args *args = job->args;
    uint32_t n = args->n_rows * args->n_chosen, end = share_first(n, thread + 1, job->cpu->n_threads);
    size_t part_width = args->y.width / args->n_chosen;
    for (uint32_t i = share_first(n, thread, job->cpu->n_threads); i < end; i++) {
        float *y = (float *)args->y.data + (size_t)(i / args->n_chosen) * args->y.stride;
        float *part = y + (size_t)(i % args->n_chosen) * part_width + args->first_column;
        if (job->places[i] == NO_PLACE)
            continue;
        if (args->half == EXPERTS_UP)
            form_pair(job, job->places[i], part);
        else
            memcpy(part, job->down + (size_t)job->places[i] * job->width, job->width * sizeof *y);
    }
}

static void combine(const struct experts_job *job, uint32_t thread)
{
    const struct experts_args *args = job->args;
    struct view results = {job->down, job->width, job->width};
    struct combine_args sum = {args->n_rows, args->n_chosen, args->is_input_scaled, args->routes, args->route_stride, results,
                               args->y};
    combine_share(&sum, job->places, thread, job->cpu->n_threads);
}

static size_t pair_bytes(const struct matrix *matrix)
{
    return (size_t)STRIP_VALUE_BYTES * ((matrix->n_cols + MAX_BLOCK_VALUES - 1) / MAX_BLOCK_VALUES * MAX_BLOCK_VALUES);
}

static void run_up(const struct experts_job *job, uint32_t thread, struct lane_scratch *s)
{
    const struct matrix *up = job->args->up;
    struct product product = {up, job->args->up_bias, job->up, job->up_width, up->n_parts / job->n_experts, true,
                              pair_bytes(up)};
    run_product(job, &product, thread, s);
    if (job->args->lora)
        add_adapters(job, &product, thread, s);
}

static void run_down(const struct experts_job *job, uint32_t thread, struct lane_scratch *s)
{
    const struct matrix *down = job->args->down;
    struct product product = {down, job->args->down_bias, job->down, job->width, down->n_parts / job->n_experts, false,
                              pair_bytes(down)};
    run_product(job, &product, thread, s);
    if (job->args->lora)
        add_adapters(job, &product, thread, s);
}

static void experts_run(void *job_args, uint32_t thread)
{
    const struct experts_job *job = job_args;
    const struct experts_args *args = job->args;
    uint32_t up_cols = args->up ? args->up->n_cols : 0, down_cols = args->down ? args->down->n_cols : 0;
    struct lane_scratch s = K(linear_scratch)(job->cpu, thread, up_cols > down_cols ? up_cols : down_cols);
    if (args->up)
        run_up(job, thread, &s);
    if (args->down)
        run_down(job, thread, &s);
    if (args->is_by_route || args->half == EXPERTS_UP)
        store_by_route(job, thread);
    else
        combine(job, thread);
}

/* Places the job's arrays in the scratch. Returns their total size in values. */
static size_t lay_out(struct experts_job *job)
{
    const struct experts_args *args = job->args;
    float *at = args->scratch.data;
    job->up = at;
    job->down = job->up + (size_t)job->n_pairs * job->up_width;
    job->weights = job->down + (size_t)job->n_pairs * job->width;
    job->rows = (uint32_t *)(job->weights + job->n_pairs);
    job->parts = job->rows + job->n_pairs;
    job->places = job->parts + job->n_pairs;
    job->first = job->places + job->n_pairs;
    return (size_t)(job->first + job->n_experts + 1 - (uint32_t *)at);
}

static enum rc check_widths(const struct experts_job *job, struct err *err)
{
    const struct experts_args *args = job->args;
    if (args->half == EXPERTS_UP ? args->down || !args->up : args->half == EXPERTS_DOWN ? args->up || !args->down : false)
        return err_set(err, RC_INTERNAL, "experts: wanted the matrix of half %u alone", args->half);
    uint32_t width = args->is_by_route ? args->n_chosen * job->width : job->width;
    if (args->half == EXPERTS_UP && args->y.width / args->n_chosen < args->first_column + job->inner)
        return err_set(err, RC_INTERNAL, "experts: wanted %u columns of each part of y, have %u",
                       args->first_column + job->inner, args->y.width / args->n_chosen);
    if (args->half != EXPERTS_UP && args->y.width != width)
        return err_set(err, RC_INTERNAL, "experts: wanted %u columns of y, have %u", width, args->y.width);
    return RC_OK;
}

enum rc K(experts)(struct cpu *cpu, const struct experts_args *args, struct err *err)
{
    if (args->n_rows > cpu->options.max_rows)
        return err_set(err, RC_INTERNAL, "experts: wanted at most %u rows (the backend's max_rows), have %u",
                       cpu->options.max_rows, args->n_rows);
    uint32_t n_experts = args->n_local ? args->n_local : args->n_experts, n_halves = args->form == EXPERT_PLAIN ? 1 : 2;
    const struct matrix *up = args->up, *down = args->down;
    if ((up && up->n_parts % n_experts) || (down && down->n_parts % n_experts))
        return err_set(err, RC_INTERNAL, "experts: wanted parts for each of %u experts, have %u and %u", n_experts,
                       up ? up->n_parts : 0, down ? down->n_parts : 0);
    struct experts_job job = {.cpu = cpu, .args = args, .n_experts = n_experts, .n_pairs = args->n_rows * args->n_chosen,
                              .up_width = up ? up->n_rows / n_experts : 0, .width = down ? down->n_rows / n_experts : 0};
    job.inner = down ? down->n_cols : job.up_width / n_halves;
    enum rc rc = check_widths(&job, err);
    if (rc)
        return rc;
    if (lay_out(&job) > (size_t)args->n_rows * args->scratch.stride)
        return err_set(err, RC_INTERNAL, "experts: wanted a scratch of %zu values, have %u rows of %u", lay_out(&job),
                       args->n_rows, args->scratch.stride);
    sort_pairs(&job);
    pool_run(cpu->pool, experts_run, &job);
    return args->is_mirrored ? cpu_mirror_parts(cpu, args, job.inner, err) : RC_OK;
}

struct combine_job {
    const struct combine_args *args;
    uint32_t n_threads;
};

static void combine_run(void *job_args, uint32_t thread)
{
    const struct combine_job *job = job_args;
    combine_share(job->args, NULL, thread, job->n_threads);
}

enum rc K(combine)(struct cpu *cpu, const struct combine_args *args, struct err *err)
{
    if (args->results.width != args->n_chosen * args->y.width)
        return err_set(err, RC_INTERNAL, "combine: wanted %u results of %u columns, have %u columns", args->n_chosen,
                       args->y.width, args->results.width);
    bool is_large = (uint64_t)args->n_rows * args->results.width > ALONE_VALUES;
    struct combine_job job = {args, pool_threads_for(cpu->pool, is_large)};
    pool_run_on(cpu->pool, job.n_threads, combine_run, &job);
    return RC_OK;
}
