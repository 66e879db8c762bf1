/* y[r][n] = sum over k of f(x)[r][k] * W[n][k] (+ bias[n]) (+ add[r][n]), float32 rows, W in panels of 16 rows (matrix.h).
 * Each output is one chain over k in the order of its weight type. A small accumulator carries the chain from slab to slab of
 * k, so tiles, slabs, threads and row counts change no bit. f is computed row by row with the functions of rows.h while the
 * strips are packed; bias and add are added to the finished sum, so the fused operation equals the separate operations. One
 * row is bound by the bytes of W: every thread streams its panels once. Many rows are bound by multiplications: the strips of
 * X that fit half of the second-level cache stay there, a slab of W stays in the first-level cache while it is multiplied by
 * all of these strips, and each tile prefetches its share of the weights that come next. */
#include "gather.h"
#include "linear_run.h"
#include "ops.h"
#include "rows.h"

#include <string.h>

struct linear_job {
    struct cpu *cpu;
    const struct linear_args *args;
};

struct lane_scratch K(linear_scratch)(const struct cpu *cpu, uint32_t thread, uint32_t n_cols)
{
    struct lane_scratch s;
    char *base = cpu->scratch + thread * cpu->scratch_bytes;
    s.expanded = (uint8_t *)base;
    s.acc = (float *)(base + EXPANDED_MAX_BYTES);
    s.rows = s.acc + (size_t)(cpu->options.max_rows + GEMV_PANELS) * TILE_MAX_PANELS * PANEL_ROWS;
    s.strip = (char *)(s.rows + (size_t)STRIP_MAX_ROWS * n_cols);
    return s;
}

struct run K(linear_next_run)(const struct matrix *matrix, uint32_t first_part, uint32_t end_part, uint32_t n_rows)
{
    struct run run = {.parts = &matrix->parts[first_part], .type = matrix->parts[first_part].type};
    for (uint32_t i = first_part; i < end_part && matrix->parts[i].type == run.type &&
                                  !matrix->parts[i].rows == !run.parts->rows; i++, run.n_parts++)
        run.n_panels += matrix->parts[i].n_panels;
    run.n_strips = (n_rows + run.type->max_rows - 1) / run.type->max_rows;
    return run;
}

/* Packs rows first .. first + n - 1 of f(x) into a strip. */
static void prepare_strip(const struct linear_args *args, const struct linear_type *type, uint32_t first, uint32_t n,
                          float *rows, char *strip)
{
    uint32_t n_cols = args->matrix->n_cols;
    const float *x = (const float *)args->x.data + (size_t)first * args->x.stride;
    if (args->input == LINEAR_PLAIN) {
        type->prepare(x, args->x.stride, n, n_cols, strip);
        return;
    }
    for (uint32_t i = 0; i < n; i++, x += args->x.stride) {
        if (args->input == LINEAR_RMS_NORM)
            row_rms_norm(x, args->norm_weight, args->norm_eps, n_cols, rows + (size_t)i * n_cols);
        else
            row_act(args->act, x, x + n_cols, n_cols, rows + (size_t)i * n_cols);
    }
    type->prepare(rows, n_cols, n, n_cols, strip);
}

/* y = acc (+ bias) (+ add) for rows [first, first + n) and the real rows of n_panels panels of a part; acc rows are acc_width
 * floats apart. */
static void finish(const struct linear_args *args, const struct run *run, const struct cpu_part *part, uint32_t panel,
                   uint32_t n_panels, const float *acc, uint32_t acc_width, uint32_t first, uint32_t n)
{
    uint32_t in_part = panel * PANEL_ROWS, width = n_panels * PANEL_ROWS;
    uint32_t row = part->first_row + in_part, column = row - run->first_row;
    if (width > part->n_rows - in_part)
        width = part->n_rows - in_part;
    for (uint32_t i = 0; i < n; i++, acc += acc_width) {
        float *y = (float *)args->y.data + (size_t)(first + i) * args->y.stride + column;
        const float *add = args->add ? (const float *)args->add->data + (size_t)(first + i) * args->add->stride + column : NULL;
        for (uint32_t j = 0; j < width; j += LANES) {
            uint32_t lanes = width - j < LANES ? width - j : LANES;
            vf v = v_load(acc + j); /* acc is padded to whole panels */
            if (args->bias)
                v = v_add(v, v_load_n(args->bias + row + j, lanes));
            if (add)
                v = v_add(v, v_load_n(add + j, lanes));
            if (lanes == LANES)
                v_store(y + j, v);
            else
                v_store_n(y + j, v, lanes);
        }
    }
}

/* Multiplies one row by panels [first, end) of the run, in calls of up to GEMV_PANELS. */
static void one_row(const struct linear_args *args, const struct run *run, uint32_t first, uint32_t end, const char *x,
                    float *acc)
{
    uint32_t before = 0;
    for (const struct cpu_part *part = run->parts; part < run->parts + run->n_parts; before += part++->n_panels) {
        uint32_t p = first > before ? first - before : 0, last = end < before ? 0 : end - before;
        if (last > part->n_panels)
            last = part->n_panels;
        for (uint32_t n; p < last; p += n) {
            n = last - p < GEMV_PANELS ? last - p : GEMV_PANELS;
            run->type->gemv(part->panels + p * part->panel_bytes, x, acc, part->n_blocks, n);
            finish(args, run, part, p, n, acc, 0, 0, 1);
        }
    }
}

/* Prefetches the lines of y that finish will write, so that finish does not wait for each of them. */
static void touch(const struct linear_args *args, const struct run *run, const struct cpu_part *part, uint32_t panel,
                  uint32_t n_panels, uint32_t first, uint32_t n)
{
    uint32_t column = part->first_row - run->first_row + panel * PANEL_ROWS;
    float *y = (float *)args->y.data + (size_t)first * args->y.stride + column;
    for (uint32_t i = 0; i < n; i++, y += args->y.stride)
        for (uint32_t q = 0; q < n_panels; q++)
            __builtin_prefetch(y + q * PANEL_ROWS, 1);
}

/* Divides the prefetches of each panel's next slab among the tiles that multiply the current slab: tile i of n fetches some
 * lines per block, or none. */
struct fetch_plan {
    uint32_t n_tiles, n_calls, lines;
};

static struct fetch_plan plan_fetch(const struct linear_type *type, uint32_t n_tiles)
{
    struct fetch_plan plan = {n_tiles ? n_tiles : 1, 0, 0};
    plan.lines = (type->panel_block_bytes + 64 * plan.n_tiles - 1) / (64 * plan.n_tiles);
    plan.n_calls = (type->panel_block_bytes + 64 * plan.lines - 1) / (64 * plan.lines);
    return plan;
}

/* Packs a slab of n_panels panels of a borrowed part, `bytes` each, as matrix_write would. */
static void pack_slab(const struct cpu_part *part, uint32_t n_cols, uint32_t panel, uint32_t n_panels, uint32_t block,
                      uint32_t n_blocks, size_t bytes, uint8_t *out)
{
    const struct linear_type *type = part->type;
    uint32_t first_col = block * type->block_values, n = n_blocks * type->block_values;
    if (n > n_cols - first_col)
        n = n_cols - first_col;
    for (uint32_t p = panel; p < panel + n_panels; p++, out += bytes) {
        uint32_t row = p * PANEL_ROWS, lanes = part->n_rows - row < PANEL_ROWS ? part->n_rows - row : PANEL_ROWS;
        if (lanes < PANEL_ROWS || n < n_blocks * type->block_values)
            memset(out, 0, bytes);
        type->repack(part->rows + row * part->row_bytes + dtype_row_bytes(type->dtype, first_col), part->row_bytes, 0, lanes, n,
                     out);
    }
}

/* Multiplies strips [strip, end_strip) of the rows by one group of panels. Sums over several slabs are kept in acc [rows of
 * the strips][16 * n_panels]; sums over a single slab go straight to y. */
static void multiply_group(const struct linear_args *args, const struct run *run, const struct cpu_part *part, uint32_t panel,
                           uint32_t n_panels, uint32_t strip, uint32_t end_strip, const char *strips, struct lane_scratch *s)
{
    const struct linear_type *type = run->type;
    uint32_t first_row = share_first(args->n_rows, strip, run->n_strips), width = n_panels * PANEL_ROWS;
    bool is_one_slab = part->n_blocks <= type->slab_blocks;
    struct fetch_plan plan = plan_fetch(type, (end_strip - strip) / n_panels);
    if (part->rows)
        plan.n_calls = 0; /* rows are read in order, which the processor foresees */
    for (uint32_t block = 0; block < part->n_blocks; block += type->slab_blocks) {
        uint32_t n = part->n_blocks - block < type->slab_blocks ? part->n_blocks - block : type->slab_blocks;
        const uint8_t *w = part->panels + panel * part->panel_bytes + (size_t)block * type->panel_block_bytes;
        const char *next = (const char *)w + (size_t)n * type->panel_block_bytes;
        size_t stride = part->panel_bytes;
        bool is_last = block + n == part->n_blocks;
        if (is_last)
            next += (n_panels - 1) * stride; /* the first slab of the next group */
        if (part->rows) {
            stride = (size_t)n * type->panel_block_bytes;
            pack_slab(part, args->matrix->n_cols, panel, n_panels, block, n, stride, s->expanded);
            w = s->expanded;
        } else if (type->expand) {
            size_t expanded = (size_t)n * type->expanded_block_bytes;
            for (uint32_t q = 0; q < n_panels; q++)
                type->expand(w + q * stride, n, s->expanded + q * expanded);
            w = s->expanded;
            stride = expanded;
        }
        for (uint32_t i = strip; i < end_strip; i++) {
            uint32_t row = share_first(args->n_rows, i, run->n_strips);
            uint32_t rows = share_first(args->n_rows, i + 1, run->n_strips) - row;
            const char *x = strips + ((size_t)row * part->n_blocks + (size_t)block * rows) * type->strip_block_bytes;
            uint32_t tile = (i - strip) / n_panels, call = share_first(plan.n_calls, tile, plan.n_tiles);
            uint32_t lines = share_first(plan.n_calls, tile + 1, plan.n_tiles) > call ? plan.lines : 0;
            const char *fetch = next + (i - strip) % n_panels * part->panel_bytes + (size_t)call * plan.lines * 64 * n;
            float *acc = s->acc + (is_one_slab ? 0 : (size_t)(row - first_row) * width);
            if (!block)
                memset(acc, 0, (size_t)rows * width * sizeof *acc);
            if (is_last)
                touch(args, run, part, panel, n_panels, row, rows);
            type->tile[n_panels - 1][rows](w, stride, x, acc, n, fetch, lines);
            if (is_last)
                finish(args, run, part, panel, n_panels, acc, width, row, rows);
        }
    }
}

/* Threads divide the panels, so that each thread reads only its own weights. If that gives some threads much more work than
 * others (few panels, many threads), bands of strips are divided too. */
static struct share share_of(const struct run *run, uint32_t thread, uint32_t n_threads)
{
    uint32_t n_bands = 1, n_columns = n_threads;
    uint64_t least = UINT64_MAX;
    for (uint32_t bands = 1; bands <= n_threads && bands <= run->n_strips; bands++) {
        uint32_t columns = n_threads / bands;
        uint64_t tiles = (uint64_t)((run->n_panels + columns - 1) / columns) * ((run->n_strips + bands - 1) / bands);
        if (tiles < least - least / 8) { /* every band reads the weights again */
            least = tiles;
            n_bands = bands;
            n_columns = columns;
        }
    }
    uint32_t band = thread / n_columns, column = thread % n_columns;
    if (band >= n_bands)
        return (struct share){0};
    return (struct share){share_first(run->n_panels, column, n_columns), share_first(run->n_panels, column + 1, n_columns),
                          share_first(run->n_strips, band, n_bands), share_first(run->n_strips, band + 1, n_bands)};
}

/* Multiplies a thread's share of many rows, in chunks of strips that stay in the second-level cache. */
static void many_rows(const struct cpu *cpu, const struct linear_args *args, const struct run *run, const struct share *share,
                      const char *strips, struct lane_scratch *s)
{
    const struct linear_type *type = run->type;
    size_t strip_bytes = (size_t)run->parts->n_blocks * type->strip_block_bytes * type->max_rows;
    uint32_t n_strips = share->end_strip - share->strip, per_chunk = (uint32_t)(cpu->cache_bytes * 9 / 16 / strip_bytes);
    uint32_t n_chunks = per_chunk ? (n_strips + per_chunk - 1) / per_chunk : n_strips;
    uint32_t max_panels = n_strips > 1 ? type->max_panels : 1; /* one strip: bound by W's bytes, one stream is fastest */
    for (uint32_t c = 0; c < n_chunks; c++) {
        uint32_t before = 0, strip = share->strip + share_first(n_strips, c, n_chunks);
        uint32_t end_strip = share->strip + share_first(n_strips, c + 1, n_chunks);
        for (const struct cpu_part *part = run->parts; part < run->parts + run->n_parts; before += part++->n_panels) {
            uint32_t p = share->panel > before ? share->panel - before : 0;
            uint32_t last = share->end_panel < before ? 0 : share->end_panel - before;
            if (last > part->n_panels)
                last = part->n_panels;
            for (uint32_t n; p < last; p += n) {
                n = last - p < max_panels ? last - p : max_panels;
                multiply_group(args, run, part, p, n, strip, end_strip, strips, s);
            }
        }
    }
}

void K(linear_share)(const struct cpu *cpu, const struct linear_args *args, const struct run *run, const struct share *share,
                     const char *strips, struct lane_scratch *s)
{
    if (args->n_rows == 1 && run->type->gemv && !run->parts->rows)
        one_row(args, run, share->panel, share->end_panel, strips, s->acc);
    else
        many_rows(cpu, args, run, share, strips, s);
}

/* Packs a thread's share of the rows; all strips are complete after the barrier. */
static void prepare_shared(struct cpu *cpu, const struct linear_args *args, const struct run *run, uint32_t thread, float *rows)
{
    size_t row_bytes = (size_t)run->parts->n_blocks * run->type->strip_block_bytes;
    uint32_t end = share_first(run->n_strips, thread + 1, cpu->n_threads);
    for (uint32_t i = share_first(run->n_strips, thread, cpu->n_threads); i < end; i++) {
        uint32_t row = share_first(args->n_rows, i, run->n_strips), next = share_first(args->n_rows, i + 1, run->n_strips);
        prepare_strip(args, run->type, row, next - row, rows, (char *)cpu->shared + row * row_bytes);
    }
    pool_barrier(cpu->pool);
}

static void linear_run(void *job_args, uint32_t thread)
{
    const struct linear_job *job = job_args;
    struct cpu *cpu = job->cpu;
    const struct linear_args *args = job->args;
    struct lane_scratch s = K(linear_scratch)(cpu, thread, args->matrix->n_cols);
    for (uint32_t part = 0; part < args->matrix->n_parts;) {
        struct run run = K(linear_next_run)(args->matrix, part, args->matrix->n_parts, args->n_rows);
        struct share share = share_of(&run, thread, cpu->n_threads);
        part += run.n_parts;
        if (run.n_strips > 1) {
            prepare_shared(cpu, args, &run, thread, s.rows);
            many_rows(cpu, args, &run, &share, cpu->shared, &s);
            if (part < args->matrix->n_parts)
                pool_barrier(cpu->pool); /* the next run's strips overwrite these */
            continue;
        }
        if (share.panel == share.end_panel)
            continue;
        /* One strip: each thread packs a private copy, which is cheaper than a barrier. */
        prepare_strip(args, run.type, 0, args->n_rows, s.rows, s.strip);
        K(linear_share)(cpu, args, &run, &share, s.strip, &s);
    }
}

enum rc K(linear)(struct cpu *cpu, const struct linear_args *args, struct err *err)
{
    if (!args->n_rows || args->n_rows > cpu->options.max_rows)
        return err_set(err, RC_INTERNAL, "linear: wanted 1 to %u rows (the backend's max_rows), have %u", cpu->options.max_rows,
                       args->n_rows);
    struct linear_job job = {cpu, args};
    pool_run(cpu->pool, linear_run, &job);
    return args->is_mirrored ? cpu_mirror(cpu, &args->y, args->n_rows, err) : RC_OK;
}
