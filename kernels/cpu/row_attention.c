/* out[i][h] = sum over all rows j of i's sequence of p[j] v[j][h'], p = softmax of scale * (q[i][h] . k[j][h']), h' the kv
 * head of query head h; float32. A unit of work is up to 66 rows of a sequence and a head. Keys come in tiles of 64 from the
 * sequence's first row on, with the sums of attention_tile.h: a score is a chain over head_dim, a column of out one over the
 * keys, rescaled where a tile has a larger score than those before. So a row's bits depend on its sequence alone. Bound by
 * operations: 4 n^2 heads head_dim for n rows; 577 rows of 16 heads of 64 are 1.4 GFLOP.
 *
 * Heads of more than 256 values, and grid_attention, take a row at a time. A score is one chain over head_dim in vectors,
 * joined by v_hsum's tree; the sum of the p is four chains of vectors over j, like rows.h's square sum; a column of out is one
 * chain over j. grid_attention adds what depends on the distances in a square (tower_args.h): 8 n^1.5 heads head_dim
 * operations more. */
#include "row_attention.h"
#include "attention_tile.h"
#include "ops.h"
#include "rows.h"

struct attend_job {
    struct cpu *cpu;
    const struct row_attention_args *args;
    const struct grid_attention_args *grid; /* NULL: scores do not depend on distances */
};

static const float *head_of(const struct view *view, uint32_t row, uint32_t head, uint32_t head_dim)
{
    return (const float *)view->data + (size_t)row * view->stride + (size_t)head * head_dim;
}

static float dot(const float *a, const float *b, uint32_t n)
{
    vf sum = v_zero();
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES)
        sum = v_fma(v_load(a + i), v_load(b + i), sum);
    if (i < n)
        sum = v_fma(v_load_n(a + i, n - i), v_load_n(b + i, n - i), sum);
    return v_hsum(sum);
}

/* Replaces the scores by e^(score - largest) and returns their sum. */
static float exponentials(float *scores, uint32_t n)
{
    vf most = v_set1(-3.4e38f), sum[4] = {v_zero(), v_zero(), v_zero(), v_zero()};
    for (uint32_t i = 0; i < n; i += LANES) {
        uint32_t left = n - i < LANES ? n - i : LANES;
        most = v_max(most, v_select(v_first(left), v_load_n(scores + i, left), most));
    }
    vf largest = v_set1(v_hmax(most));
    for (uint32_t i = 0, j = 0; i < n; i += LANES, j = (j + 1) % 4) {
        uint32_t left = n - i < LANES ? n - i : LANES;
        vf p = v_select(v_first(left), v_exp(v_sub(v_load_n(scores + i, left), largest)), v_zero());
        v_store_n(scores + i, p, left);
        sum[j] = v_add(sum[j], p);
    }
    return v_hsum(v_add(v_add(sum[0], sum[1]), v_add(sum[2], sum[3])));
}

/* Products of a row's query with a table for its distances from the lines (or columns) 0, 1, ... of its square. */
static void distances(const struct grid_attention_args *grid, const float *table, const float *q, uint32_t place,
                      float *products)
{
    for (uint32_t other = 0; other < grid->side; other++) {
        uint32_t d = place + grid->side - 1 - other;
        const float *a = table + (size_t)grid->rows[2 * d] * grid->head_dim;
        const float *b = table + (size_t)grid->rows[2 * d + 1] * grid->head_dim;
        float sum = 0;
        for (uint32_t c = 0; c < grid->head_dim; c++)
            sum += q[c] * (grid->shares[2 * d] * a[c] + grid->shares[2 * d + 1] * b[c]);
        products[other] = sum;
    }
}

/* Adds what depends on distances to the scores of row `place` of a square; the products lie behind the scores. */
static void add_distances(const struct grid_attention_args *grid, const float *q, uint32_t place, float *scores)
{
    float *lines = scores + grid->side * grid->side, *columns = lines + grid->side;
    distances(grid, grid->lines, q, place / grid->side, lines);
    distances(grid, grid->columns, q, place % grid->side, columns);
    for (uint32_t j = 0; j < grid->side * grid->side; j++)
        scores[j] = scores[j] + lines[j / grid->side] + columns[j % grid->side];
}

/* Attention of one row and head over rows first .. first + n - 1. */
static void attend(const struct attend_job *job, uint32_t row, uint32_t head, uint32_t first, uint32_t n, float *scores)
{
    const struct row_attention_args *args = job->args;
    uint32_t size = args->head_dim, kv_head = head / (args->n_heads / args->n_kv_heads);
    const float *q = head_of(&args->q, row, head, size);
    float *out = (float *)head_of(&args->out, row, head, size);
    for (uint32_t j = 0; j < n; j++)
        scores[j] = args->scale * dot(q, head_of(&args->k, first + j, kv_head, size), size);
    if (job->grid)
        add_distances(job->grid, q, row - first, scores);
    vf total = v_set1(exponentials(scores, n));
    for (uint32_t c = 0; c < size; c += LANES) {
        uint32_t left = size - c < LANES ? size - c : LANES;
        vf sum = v_zero();
        for (uint32_t j = 0; j < n; j++)
            sum = v_fma(v_set1(scores[j]), v_load_n(head_of(&args->v, first + j, kv_head, size) + c, left), sum);
        v_store_n(out + c, v_div(sum, total), left);
    }
}

static void attend_rows(void *job_args, uint32_t thread)
{
    const struct attend_job *job = job_args;
    const struct row_attention_args *args = job->args;
    const struct batch_view *batch = args->batch;
    float *scores = (float *)(job->cpu->scratch + thread * job->cpu->scratch_bytes);
    uint32_t n = batch->n_rows * args->n_heads, s = 0;
    uint32_t end = share_first(n, thread + 1, job->cpu->n_threads);
    for (uint32_t i = share_first(n, thread, job->cpu->n_threads); i < end; i++) {
        uint32_t row = i / args->n_heads;
        while ((uint32_t)batch->seq_first_row[s + 1] <= row)
            s++;
        uint32_t first = (uint32_t)batch->seq_first_row[s];
        attend(job, row, i % args->n_heads, first, (uint32_t)batch->seq_first_row[s + 1] - first, scores);
    }
}

/* ---- tiles ------------------------------------------------------------------------------------------------------------- */

/* Arrays of a thread: queries times scale log2 e; a tile of keys, [groups][head_dim][16]; its values, [64][width]; and of each
 * row its scores, sums, factors. width: head_dim, in whole vectors. */
struct tile_rows {
    float q[ROW_BLOCK * QUERY_STRIDE], k[TILE_KEYS * ROW_TILE_DIM], v[TILE_KEYS * ROW_TILE_DIM], s[ROW_BLOCK * TILE_KEYS];
    float o[ROW_BLOCK * ROW_TILE_DIM], l[ROW_BLOCK * LANES], m[ROW_BLOCK], a[ROW_BLOCK];
};
_Static_assert(sizeof(struct tile_rows) <= ROW_TILE_BYTES, "room for a thread's tiles");

static uint32_t row_width(uint32_t head_dim)
{
    return (head_dim + LANES - 1) / LANES * LANES;
}

static void begin_rows(struct tile_rows *t, const struct row_attention_args *args, uint32_t head, uint32_t row, uint32_t n)
{
    const uint32_t dim = args->head_dim;
    const vf factor = v_set1(args->scale * 1.44269504f);
    for (uint32_t r = 0; r < n; r++) {
        const float *q = head_of(&args->q, row + r, head, dim);
        for (uint32_t d = 0; d < dim; d += LANES) {
            uint32_t left = dim - d < LANES ? dim - d : LANES;
            v_store_n(t->q + r * QUERY_STRIDE + d, v_mul(v_load_n(q + d, left), factor), left);
        }
        state_clear(t->o + r * row_width(dim), t->l + r * LANES, t->m + r, row_width(dim));
    }
}

/* Brings n keys from `row` on, and their values; keys that fill a group are zeros. */
static void bring_tile(struct tile_rows *t, const struct row_attention_args *args, uint32_t head, uint32_t row, uint32_t n)
{
    const uint32_t dim = args->head_dim, width = row_width(dim);
    for (uint32_t j = 0; j < (n + KV_GROUP - 1) / KV_GROUP * KV_GROUP; j++) {
        const float *k = j < n ? head_of(&args->k, row + j, head, dim) : NULL;
        float *to = t->k + j / KV_GROUP * KV_GROUP * dim + j % KV_GROUP;
        for (uint32_t d = 0; d < dim; d++)
            to[d * KV_GROUP] = k ? k[d] : 0;
    }
    for (uint32_t j = 0; j < n; j++) {
        const float *v = head_of(&args->v, row + j, head, dim);
        for (uint32_t d = 0; d < dim; d += LANES)
            v_store(t->v + j * width + d, v_load_n(v + d, dim - d < LANES ? dim - d : LANES));
    }
}

/* Takes in the n keys of a tile. */
static void take_tile(struct tile_rows *t, uint32_t dim, uint32_t n_rows, uint32_t n)
{
    const uint32_t width = row_width(dim), n_groups = (n + KV_GROUP - 1) / KV_GROUP;
    const char *keys[TILE_GROUPS], *values[TILE_GROUPS];
    for (uint32_t g = 0; g < TILE_GROUPS; g++) { /* groups that are not there repeat the first one, and are hidden */
        keys[g] = (const char *)(t->k + (g < n_groups ? g : 0) * KV_GROUP * dim);
        values[g] = (const char *)(t->v + (g < n_groups ? g : 0) * KV_GROUP * width);
    }
    for (uint32_t first = 0, count; first < n_rows; first += count) {
        count = n_rows - first < TILE_ROWS ? n_rows - first : TILE_ROWS;
        float *s = t->s + first * TILE_KEYS;
        SCORES[TILE_F32][count - 1](t->q + first * QUERY_STRIDE, keys, keys, dim, n, s);
        for (uint32_t r = first; r < first + count; r++)
            t->a[r] = softmax_step(t->s + r * TILE_KEYS, 0, n, 0, 0, 0, t->m + r, t->l + r * LANES);
        VALUES[TILE_F32][count - 1](s, t->a + first, values, values, width, 0, n, t->o + first * width);
    }
}

/* Attention of n rows from `row` on and a head over the sequence's rows first .. first + n_keys - 1. */
static void attend_block(struct tile_rows *t, const struct row_attention_args *args, uint32_t head, uint32_t row, uint32_t n,
                         uint32_t first, uint32_t n_keys)
{
    const uint32_t dim = args->head_dim, kv_head = head / (args->n_heads / args->n_kv_heads);
    begin_rows(t, args, head, row, n);
    for (uint32_t j = 0; j < n_keys; j += TILE_KEYS) {
        uint32_t count = n_keys - j < TILE_KEYS ? n_keys - j : TILE_KEYS;
        bring_tile(t, args, kv_head, first + j, count);
        take_tile(t, dim, n, count);
    }
    for (uint32_t r = 0; r < n; r++) {
        float *out = (float *)head_of(&args->out, row + r, head, dim);
        const vf total = v_set1(v_hsum(v_load(t->l + r * LANES)));
        for (uint32_t d = 0; d < dim; d += LANES)
            v_store_n(out + d, v_div(v_load(t->o + r * row_width(dim) + d), total), dim - d < LANES ? dim - d : LANES);
    }
}

/* The blocks of all sequences and heads, shared out to the threads. */
static void attend_blocks(void *job_args, uint32_t thread)
{
    const struct attend_job *job = job_args;
    const struct row_attention_args *args = job->args;
    const struct batch_view *batch = args->batch;
    struct tile_rows *t = (struct tile_rows *)(void *)(job->cpu->scratch + thread * job->cpu->scratch_bytes);
    for (uint32_t s = 0, unit = 0; s < batch->n_seqs; s++) {
        uint32_t first = (uint32_t)batch->seq_first_row[s], n = (uint32_t)batch->seq_first_row[s + 1] - first;
        for (uint32_t row = 0; row < n; row += ROW_BLOCK)
            for (uint32_t head = 0; head < args->n_heads; head++, unit++)
                if (unit % job->cpu->n_threads == thread)
                    attend_block(t, args, head, first + row, n - row < ROW_BLOCK ? n - row : ROW_BLOCK, first, n);
    }
}

enum rc K(row_attention)(struct cpu *cpu, const struct row_attention_args *args, struct err *err)
{
    (void)err;
    struct attend_job job = {cpu, args, NULL};
    pool_run(cpu->pool, args->head_dim <= ROW_TILE_DIM ? attend_blocks : attend_rows, &job);
    return RC_OK;
}

enum rc K(grid_attention)(struct cpu *cpu, const struct grid_attention_args *grid, struct err *err)
{
    (void)err;
    struct row_attention_args args = {grid->batch, grid->n_heads, grid->n_heads, grid->head_dim, grid->scale, grid->q, grid->k,
                                      grid->v, grid->out};
    struct attend_job job = {cpu, &args, grid};
    pool_run(cpu->pool, attend_rows, &job);
    return RC_OK;
}
