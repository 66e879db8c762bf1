/* attention.c: out = softmax(scale q k^T) v of the batch's rows over the paged cache, causal, with window or chunk, soft cap,
 * slopes and sinks. Shapes: q, out [n_rows][n_heads * head_dim] float32; pages in kv.h's layout, in float32, float16,
 * bfloat16, e4m3 or int8.
 *
 * Order of the sums, the same for every row count, chunk, page size, tile and thread: keys in tiles of 64 at absolute
 * positions, ascending, four tiles a split of 256. Each split starts with a fresh (m, l, O).
 *   score  u = chain over d of (c q_d) k_d, c = scale log2 e; int8: then u = u times the key's scale
 *   cap    c = scale / cap, then u = cap log2 e tanh u
 *   slope  u = fma(slope log2 e, j - i, u)
 *   tile   m' = max(m, max u), p = 2^(u - m'), a = 2^(m - m'), O = a O, then the chain of p v over the visible keys,
 *          l = a l + p by lane, in a fixed tree of the tile's vectors; int8: v is the integer, and p is multiplied by the
 *          value's scale after it has joined l
 *   fold   splits from the left, 0, 1, 2, ...: M' = max(M, m), O = O 2^(M - M') + O_split 2^(m - M'), l alike
 *   out    O / l, l summed by v_hsum; with a sink O / (l + 2^(sink log2 e - M))
 * The value row of a hidden key is never multiplied, so stale data there (such as NaN) has no effect.
 *
 * A task is up to tile_rows consecutive rows of one sequence and one kv head, where a row is (query row, head of the group),
 * so the heads of a group share every key that is read. A task with few rows but many keys is cut into its splits; the states
 * of the splits go to shared memory and are folded by the same code. Decode is bound by the bytes of the cache, a long prompt
 * by 4 head_dim operations a key and row: 512 tokens of 16 heads x 128 are 1.1 GFLOP, 4 ms at 256 GFLOP/s. */
#include "attention.h"
#include "attention_tile.h"
#include "ops.h"

#include <stdatomic.h>

#define SPLIT_KEYS 256u
#define LOG2_E 0x1.715476p+0f
#define STATE_PAD 32u /* floats beside O in a row's state: l by lane at 0, m at LANES */

/* Rows [first, first + n_rows) of a sequence, counted over query rows and heads of a group, for every kv head. A cut task has
 * n_splits > 0 and n_kv_heads * n_splits units, numbered from `unit` on. Other tasks have one unit a kv head. */
struct attention_task {
    uint32_t seq, first, n_rows, first_split, n_splits, unit;
};

struct attention_job {
    struct cpu *cpu;
    const struct attention_args *args;
    struct attention_task *tasks; /* cut ones first */
    uint32_t n_tasks, n_cut;
    uint32_t n_cut_units, n_units; /* all units; those of cut tasks come first */
    uint32_t group, value_dim, tile_rows;
    char *slots;                   /* states of a round of cut units, then two slots that carry sums to the next round */
    size_t slot_bytes;
    uint32_t n_slots;
    float q_factor, cap;
    atomic_uint next;
};

/* One thread's working memory; every array has ATTENTION_TILE_ROWS rows. */
struct attention_scratch {
    float *q;                /* [QUERY_STRIDE], scaled */
    float *s;                /* [TILE_KEYS] */
    float *o, *l, *m;        /* the split's state: [value_dim], [LANES], 1 */
    float *sum_o, *sum_l, *sum_m; /* the sums of the folded splits */
    float *a;                /* the tile's factor */
};

_Static_assert(sizeof(struct attention_task) == ATTENTION_TASK_BYTES, "attention.h sizes the list of tasks");

static float *scratch_take(char **at, size_t n_floats)
{
    float *taken = (float *)*at;
    *at += (n_floats * sizeof(float) + 63) / 64 * 64;
    return taken;
}

static struct attention_scratch scratch_lay(const struct attention_job *job, uint32_t thread)
{
    char *at = job->cpu->scratch + thread * job->cpu->scratch_bytes;
    uint32_t n = ATTENTION_TILE_ROWS, width = job->value_dim;
    struct attention_scratch s;
    s.q = scratch_take(&at, n * QUERY_STRIDE);
    s.s = scratch_take(&at, n * TILE_KEYS);
    s.o = scratch_take(&at, n * width);
    s.l = scratch_take(&at, n * LANES);
    s.m = scratch_take(&at, n);
    s.sum_o = scratch_take(&at, n * width);
    s.sum_l = scratch_take(&at, n * LANES);
    s.sum_m = scratch_take(&at, n);
    s.a = scratch_take(&at, n);
    return s;
}

/* ---- one task, one kv head, a range of splits -------------------------------------------------------------------------- */

struct attention_unit {
    const struct attention_job *job;
    const struct attention_task *task;
    struct attention_scratch s;
    uint32_t head;            /* kv head */
    uint32_t n_tiles;         /* register tiles, of near equal size */
    uint32_t type;            /* TILE_F32, ... */
    size_t key_scales, value_scales; /* their places in a group; 0: the type has none */
    const char *keys[TILE_GROUPS], *values[TILE_GROUPS];
    uint32_t positions[ATTENTION_TILE_ROWS], ends[ATTENTION_TILE_ROWS];
    float slopes[ATTENTION_TILE_ROWS]; /* times log2 e */
    const char *next_keys[TILE_GROUPS], *next_values[TILE_GROUPS]; /* to prefetch: the next tile's, if there is one */
};

static uint32_t tile_first(const struct attention_unit *u, uint32_t tile)
{
    return share_first(u->task->n_rows, tile, u->n_tiles);
}

static uint32_t row_position(const struct attention_job *job, const struct attention_task *task, uint32_t row)
{
    const struct batch_view *batch = job->args->batch;
    return (uint32_t)batch->positions[batch->seq_first_row[task->seq]] + (task->first + row) / job->group;
}

/* The end of the keys that a row sees. It ascends with the rows. */
static uint32_t visible_to(const struct attention_job *job, const struct attention_task *task, uint32_t row)
{
    const struct batch_view *batch = job->args->batch;
    uint32_t at = (uint32_t)batch->seq_first_row[task->seq] + (task->first + row) / job->group;
    return job->args->visible_end ? (uint32_t)job->args->visible_end[at] : row_position(job, task, row) + 1;
}

static uint32_t visible_from(const struct attention_job *job, uint32_t position)
{
    uint32_t window = job->args->window, chunk = job->args->chunk;
    if (chunk)
        return position - position % chunk;
    return window && position + 1 > window ? position + 1 - window : 0;
}

static uint32_t row_head(const struct attention_job *job, const struct attention_task *task, uint32_t head, uint32_t row)
{
    return head * job->group + (task->first + row) % job->group;
}

static const float *row_query(const struct attention_job *job, const struct attention_task *task, uint32_t head, uint32_t row,
                              float **out)
{
    const struct attention_args *args = job->args;
    uint32_t x = task->first + row, at = (uint32_t)args->batch->seq_first_row[task->seq] + x / job->group;
    size_t column = (size_t)row_head(job, task, head, row) * args->kv.head_dim;
    *out = (float *)args->out.data + (size_t)at * args->out.stride + column;
    return (const float *)args->q.data + (size_t)at * args->q.stride + column;
}

static void scale_queries(const struct attention_unit *u)
{
    uint32_t head_dim = u->job->args->kv.head_dim;
    vf factor = v_set1(u->job->q_factor);
    float *out;
    for (uint32_t r = 0; r < u->task->n_rows; r++) {
        const float *q = row_query(u->job, u->task, u->head, r, &out);
        for (uint32_t d = 0; d < head_dim; d += LANES) {
            uint32_t n = head_dim - d < LANES ? head_dim - d : LANES;
            v_store_n(u->s.q + (size_t)r * QUERY_STRIDE + d, v_mul(v_load_n(q + d, n), factor), n);
        }
    }
}

/* Finds the groups of the tile at position start, and of the next tile for prefetching. Only positions from..to - 1 are looked
 * up in the table; the other groups repeat a valid group, and their scores are hidden. */
static void take_tile(struct attention_unit *u, uint32_t start, uint32_t from, uint32_t to)
{
    const struct attention_args *args = u->job->args;
    const struct kv_view *kv = &args->kv;
    const struct batch_view *batch = args->batch;
    uint32_t seq = (uint32_t)batch->row_seq[batch->seq_first_row[u->task->seq]]; /* row of the sequence in the page table */
    uint32_t first = (from > start ? from - start : 0) / KV_GROUP, block_tokens = batch->block_tokens;
    size_t key_bytes = (size_t)KV_GROUP * kv->head_dim * kv_item_bytes(kv->dtype);
    for (uint32_t i = 0; i < TILE_GROUPS; i++) {
        uint32_t g = (first + i) % TILE_GROUPS, position = start + g * KV_GROUP, next = position + TILE_KEYS;
        bool is_there = g >= first && position < to;
        u->keys[g] = is_there ? kv_group(kv, block_tokens, seq, position, u->head) : u->keys[first];
        u->values[g] = u->keys[g] + key_bytes;
        u->next_keys[g] = next < to ? kv_group(kv, block_tokens, seq, next, u->head) : u->keys[g];
        u->next_values[g] = u->next_keys[g] + key_bytes;
    }
}

/* The keys that a row sees in the tile at start: [*lo, *hi) within the tile. Returns false if there are none. */
static bool row_range(const struct attention_unit *u, uint32_t row, uint32_t start, uint32_t *lo, uint32_t *hi)
{
    uint32_t from = visible_from(u->job, u->positions[row]), to = u->ends[row];
    *lo = from > start ? from - start : 0;
    *hi = to < start + TILE_KEYS ? (to > start ? to - start : 0) : TILE_KEYS;
    return *lo < *hi;
}

/* The keys [*lo, *hi) of the tile that all rows first..last see. Returns the end of the keys that any of these rows sees.
 * Positions ascend with the rows. */
static uint32_t tile_range(const struct attention_unit *u, uint32_t first, uint32_t last, uint32_t start, uint32_t *lo,
                           uint32_t *hi)
{
    uint32_t unused, end;
    row_range(u, first, start, &unused, hi);
    row_range(u, last, start, lo, &end);
    return end;
}

static void score_tile(struct attention_unit *u, uint32_t t, uint32_t start)
{
    uint32_t first = tile_first(u, t), n = tile_first(u, t + 1) - first, head_dim = u->job->args->kv.head_dim, lo, hi;
    uint32_t end = tile_range(u, first, first + n - 1, start, &lo, &hi);
    bool is_full = lo == 0 && hi == TILE_KEYS;
    if (end == 0) /* the range of every row ends before this tile */
        return;
    SCORES[u->type][n - 1](u->s.q + (size_t)first * QUERY_STRIDE, u->keys, t == 0 ? u->next_keys : u->keys, head_dim, end,
                           u->s.s + (size_t)first * TILE_KEYS);
    for (uint32_t r = first; r < first + n; r++) {
        float *s = u->s.s + (size_t)r * TILE_KEYS;
        if (!is_full && !row_range(u, r, start, &lo, &hi))
            continue;
        if (u->key_scales)
            scale_tile(s, u->keys, u->key_scales);
        u->s.a[r] = softmax_step(s, lo, hi, u->job->cap, u->slopes[r], (float)start - (float)u->positions[r], &u->s.m[r],
                                 u->s.l + r * LANES);
        if (u->value_scales)
            scale_tile(s, u->keys, u->value_scales);
    }
}

static const float ONES[TILE_ROWS] = {1, 1, 1, 1, 1, 1};

/* One row's values over keys lo..hi - 1 of the tile. */
static void value_row(const struct attention_unit *u, uint32_t row, const float *a, uint32_t lo, uint32_t hi)
{
    uint32_t width = u->job->value_dim;
    if (lo < hi)
        VALUES[u->type][0](u->s.s + (size_t)row * TILE_KEYS, a, u->values, u->values, width, lo, hi,
                           u->s.o + (size_t)row * width);
}

/* O of a register tile. Positions ascend with the rows, so all rows see the keys [lo of the last row, hi of the first row).
 * Keys outside this range are added row by row. */
static void value_tile(struct attention_unit *u, uint32_t t, uint32_t start)
{
    uint32_t first = tile_first(u, t), n = tile_first(u, t + 1) - first, width = u->job->value_dim, lo, hi, unused;
    tile_range(u, first, first + n - 1, start, &lo, &hi);
    if (lo == 0 && hi == TILE_KEYS) {
        VALUES[u->type][n - 1](u->s.s + (size_t)first * TILE_KEYS, u->s.a + first, u->values,
                               t == 0 ? u->next_values : u->values, width, 0, TILE_KEYS, u->s.o + (size_t)first * width);
        return;
    }
    for (uint32_t r = first; r < first + n; r++) {
        uint32_t row_lo, row_hi;
        if (!row_range(u, r, start, &row_lo, &row_hi))
            continue;
        if (lo >= hi) {
            value_row(u, r, &u->s.a[r], row_lo, row_hi);
            continue;
        }
        value_row(u, r, &u->s.a[r], row_lo, lo);
        if (row_lo < lo)
            u->s.a[r] = 1;
    }
    if (lo >= hi)
        return;
    VALUES[u->type][n - 1](u->s.s + (size_t)first * TILE_KEYS, u->s.a + first, u->values, u->values, width, lo, hi,
                           u->s.o + (size_t)first * width);
    for (uint32_t r = first; r < first + n; r++) {
        row_range(u, r, start, &unused, &unused);
        value_row(u, r, ONES, hi, unused);
    }
}

/* The sink's term in a row's l. */
static float sink_weight(const struct attention_job *job, const struct attention_task *task, uint32_t head, uint32_t row,
                         float m)
{
    const float *sinks = job->args->sinks;
    return sinks ? v_first_lane(v_exp2(v_set1(fmaf(sinks[row_head(job, task, head, row)], LOG2_E, -m)))) : 0;
}

/* out = O / (l + sink). Adding +0 makes every zero positive; without it a zero's sign could depend on the number of hidden
 * keys that were skipped. */
static void state_write(const float *o, const float *l, float sink, uint32_t head_dim, float *out)
{
    vf sum = v_set1(v_hsum(v_load(l)) + sink);
    uint32_t i = 0;
    for (; i + LANES <= head_dim; i += LANES)
        v_store(out + i, v_add(v_div(v_load(o + i), sum), v_zero()));
    if (i < head_dim)
        v_store_n(out + i, v_add(v_div(v_load(o + i), sum), v_zero()), head_dim - i);
}

/* Computes the states of all rows of the unit over one split. The state of a row that sees no key of the split is not used. */
static void run_split(struct attention_unit *u, uint32_t split, uint32_t from, uint32_t to)
{
    for (uint32_t r = 0; r < u->task->n_rows; r++) {
        u->s.m[r] = -INFINITY; /* so the first factor is 0 and the contents of o are ignored */
        v_store(u->s.l + r * LANES, v_zero());
    }
    for (uint32_t start = split * SPLIT_KEYS; start < (split + 1) * SPLIT_KEYS && start < to; start += TILE_KEYS) {
        if (start + TILE_KEYS <= from)
            continue;
        take_tile(u, start, from, to);
        for (uint32_t t = 0; t < u->n_tiles; t++)
            score_tile(u, t, start);
        for (uint32_t t = 0; t < u->n_tiles; t++)
            value_tile(u, t, start);
    }
}

/* True if the row sees a key of this split. */
static bool row_sees(const struct attention_job *job, const struct attention_task *task, uint32_t row, uint32_t split)
{
    uint32_t from = visible_from(job, row_position(job, task, row));
    return visible_to(job, task, row) > split * SPLIT_KEYS && from < (split + 1) * SPLIT_KEYS;
}

static void unit_open(struct attention_unit *u, const struct attention_job *job, const struct attention_task *task,
                      uint32_t head, uint32_t thread)
{
    uint32_t dtype = job->args->kv.dtype;
    u->job = job;
    u->task = task;
    u->head = head;
    u->s = scratch_lay(job, thread);
    u->n_tiles = (task->n_rows + TILE_ROWS - 1) / TILE_ROWS;
    u->type = tile_type(dtype);
    u->key_scales = kv_has_scales(dtype) ? kv_scales_at(job->args->kv.head_dim, dtype) : 0;
    u->value_scales = u->key_scales ? u->key_scales + KV_GROUP * sizeof(float) : 0;
    for (uint32_t r = 0; r < task->n_rows; r++) {
        u->positions[r] = row_position(job, task, r);
        u->ends[r] = visible_to(job, task, r);
        u->slopes[r] = job->args->slopes ? job->args->slopes[row_head(job, task, head, r)] * LOG2_E : 0;
    }
    scale_queries(u);
}

/* Positions [*from, *to) that any row of the task sees. */
static void task_range(const struct attention_job *job, const struct attention_task *task, uint32_t *from, uint32_t *to)
{
    *from = visible_from(job, row_position(job, task, 0));
    *to = visible_to(job, task, task->n_rows - 1);
}

static void run_whole(const struct attention_job *job, const struct attention_task *task, uint32_t head, uint32_t thread)
{
    struct attention_unit u;
    uint32_t from, to, width = job->value_dim;
    unit_open(&u, job, task, head, thread);
    task_range(job, task, &from, &to);
    for (uint32_t r = 0; r < task->n_rows; r++)
        state_clear(u.s.sum_o + (size_t)r * width, u.s.sum_l + r * LANES, &u.s.sum_m[r], width);
    for (uint32_t split = from / SPLIT_KEYS; split * SPLIT_KEYS < to; split++) {
        run_split(&u, split, from, to);
        for (uint32_t r = 0; r < task->n_rows; r++)
            if (row_sees(job, task, r, split))
                state_fold(u.s.sum_o + (size_t)r * width, u.s.sum_l + r * LANES, &u.s.sum_m[r], u.s.o + (size_t)r * width,
                           u.s.l + r * LANES, u.s.m[r], width);
    }
    for (uint32_t r = 0; r < task->n_rows; r++) {
        float *out;
        row_query(job, task, head, r, &out);
        state_write(u.s.sum_o + (size_t)r * width, u.s.sum_l + r * LANES, sink_weight(job, task, head, r, u.s.sum_m[r]),
                    job->args->kv.head_dim, out);
    }
}

/* ---- cut tasks: rounds of as many units as there are slots --------------------------------------------------------------- */

static float *slot_state(const struct attention_job *job, uint32_t slot, uint32_t row)
{
    return (float *)(job->slots + slot * job->slot_bytes) + (size_t)row * (job->value_dim + STATE_PAD);
}

static void run_cut(const struct attention_job *job, const struct attention_task *task, uint32_t unit, uint32_t slot,
                    uint32_t thread)
{
    struct attention_unit u;
    uint32_t from, to, width = job->value_dim, split = task->first_split + (unit - task->unit) % task->n_splits;
    unit_open(&u, job, task, (unit - task->unit) / task->n_splits, thread);
    task_range(job, task, &from, &to);
    run_split(&u, split, from, to);
    for (uint32_t r = 0; r < task->n_rows; r++) {
        float *state = slot_state(job, slot, r);
        memcpy(state, u.s.l + r * LANES, LANES * sizeof *state);
        state[LANES] = u.s.m[r];
        memcpy(state + STATE_PAD, u.s.o + (size_t)r * width, width * sizeof *state);
    }
}

static const struct attention_task *find_task(const struct attention_job *job, uint32_t unit)
{
    uint32_t low = 0, high = job->n_tasks - 1;
    while (low < high) {
        uint32_t middle = (low + high + 1) / 2;
        if (job->tasks[middle].unit <= unit)
            low = middle;
        else
            high = middle - 1;
    }
    return &job->tasks[low];
}

/* Folds units [begin, end) of one kv head of a cut task. All are in this round, which starts at unit `round`. Sums of earlier
 * rounds lie in the last round's carry slot; incomplete sums go to this round's carry slot. */
static void fold_cut(const struct attention_job *job, const struct attention_task *task, uint32_t begin, uint32_t end,
                     uint32_t round, uint32_t thread)
{
    struct attention_scratch s = scratch_lay(job, thread);
    uint32_t width = job->value_dim, head = (begin - task->unit) / task->n_splits;
    uint32_t parity = round / job->n_slots % 2;
    bool is_start = (begin - task->unit) % task->n_splits == 0, is_end = (end - task->unit) % task->n_splits == 0;
    for (uint32_t r = 0; r < task->n_rows; r++) {
        const float *before = slot_state(job, job->n_slots + !parity, r);
        float *after = slot_state(job, job->n_slots + parity, r), *out;
        state_clear(s.sum_o, s.sum_l, s.sum_m, width);
        if (!is_start) {
            memcpy(s.sum_l, before, LANES * sizeof *before);
            *s.sum_m = before[LANES];
            memcpy(s.sum_o, before + STATE_PAD, width * sizeof *before);
        }
        for (uint32_t unit = begin; unit < end; unit++) {
            const float *state = slot_state(job, unit - round, r);
            if (row_sees(job, task, r, task->first_split + (unit - task->unit) % task->n_splits))
                state_fold(s.sum_o, s.sum_l, s.sum_m, state + STATE_PAD, state, state[LANES], width);
        }
        row_query(job, task, head, r, &out);
        if (is_end) {
            state_write(s.sum_o, s.sum_l, sink_weight(job, task, head, r, *s.sum_m), job->args->kv.head_dim, out);
            continue;
        }
        memcpy(after, s.sum_l, LANES * sizeof *after);
        after[LANES] = *s.sum_m;
        memcpy(after + STATE_PAD, s.sum_o, width * sizeof *after);
    }
}

static void run_round(struct attention_job *job, uint32_t round, uint32_t thread)
{
    uint32_t end = round + job->n_slots < job->n_cut_units ? round + job->n_slots : job->n_cut_units;
    for (uint32_t unit; (unit = atomic_fetch_add(&job->next, 1)) < end;)
        run_cut(job, find_task(job, unit), unit, unit - round, thread);
    pool_barrier(job->cpu->pool);
    if (thread == 0)
        atomic_store(&job->next, end);
    uint32_t n_done = 0;
    for (uint32_t unit = round; unit < end; n_done++) {
        const struct attention_task *task = find_task(job, unit);
        uint32_t next = task->unit + ((unit - task->unit) / task->n_splits + 1) * task->n_splits;
        next = next < end ? next : end;
        if (n_done % job->cpu->n_threads == thread)
            fold_cut(job, task, unit, next, round, thread);
        unit = next;
    }
    pool_barrier(job->cpu->pool);
}

static void run_tasks(void *job_args, uint32_t thread)
{
    struct attention_job *job = job_args;
    for (uint32_t round = 0; round < job->n_cut_units; round += job->n_slots)
        run_round(job, round, thread);
    for (uint32_t unit; (unit = atomic_fetch_add(&job->next, 1)) < job->n_units;) {
        const struct attention_task *task = find_task(job, unit);
        run_whole(job, task, unit - task->unit, thread);
    }
}

/* ---- the plan of a call -------------------------------------------------------------------------------------------------- */

/* Rows of a task: fewer in a small call, so that every thread has work, but at least a group, up to the limit. */
static uint32_t choose_tile_rows(const struct attention_job *job)
{
    const struct attention_args *args = job->args;
    uint64_t rows = (uint64_t)args->batch->n_rows * args->n_heads / (4 * job->cpu->n_threads);
    uint64_t least = job->group < 8 * TILE_ROWS ? 8 * TILE_ROWS : job->group;
    rows = rows / TILE_ROWS * TILE_ROWS;
    rows = rows > least ? rows : least;
    return rows < ATTENTION_TILE_ROWS ? (uint32_t)rows : ATTENTION_TILE_ROWS;
}

/* Cost of a task for each kv head: register tiles times keys. */
static uint64_t task_cost(const struct attention_job *job, const struct attention_task *task)
{
    uint32_t from, to;
    task_range(job, task, &from, &to);
    return (uint64_t)(to - from) * ((task->n_rows + TILE_ROWS - 1) / TILE_ROWS);
}

/* Lists the tasks of every sequence, those with the most keys first, and returns their cost. */
static uint64_t list_tasks(struct attention_job *job)
{
    const struct batch_view *batch = job->args->batch;
    uint64_t cost = 0;
    job->n_tasks = 0;
    for (uint32_t seq = 0; seq < batch->n_seqs; seq++) {
        uint32_t n = (uint32_t)(batch->seq_first_row[seq + 1] - batch->seq_first_row[seq]) * job->group;
        for (uint32_t i = (n + job->tile_rows - 1) / job->tile_rows; i-- > 0;) {
            struct attention_task *task = &job->tasks[job->n_tasks++];
            uint32_t first = i * job->tile_rows;
            *task = (struct attention_task){.seq = seq, .first = first};
            task->n_rows = n - first < job->tile_rows ? n - first : job->tile_rows;
            cost += task_cost(job, task);
        }
    }
    return cost;
}

/* Cuts the tasks that would keep one thread busy while the other threads wait, moves these tasks to the front and numbers the
 * units. */
static void cut_tasks(struct attention_job *job, uint64_t cost)
{
    uint32_t n_heads = job->args->kv.n_kv_heads, most_rows = 1;
    uint64_t limit = cost * n_heads / (4 * job->cpu->n_threads);
    job->n_cut = 0;
    for (uint32_t i = 0; i < job->n_tasks && job->cpu->n_threads > 1; i++) {
        struct attention_task task = job->tasks[i];
        uint32_t from, to;
        task_range(job, &task, &from, &to);
        if (task_cost(job, &task) <= limit || to - from <= SPLIT_KEYS)
            continue;
        task.first_split = from / SPLIT_KEYS;
        task.n_splits = (to + SPLIT_KEYS - 1) / SPLIT_KEYS - task.first_split;
        most_rows = task.n_rows > most_rows ? task.n_rows : most_rows;
        job->tasks[i] = job->tasks[job->n_cut];
        job->tasks[job->n_cut++] = task;
    }
    uint32_t unit = 0;
    for (uint32_t i = 0; i < job->n_tasks; i++) {
        job->tasks[i].unit = unit;
        unit += n_heads * (i < job->n_cut ? job->tasks[i].n_splits : 1);
        if (i + 1 == job->n_cut)
            job->n_cut_units = unit;
    }
    job->n_units = unit;
    job->slot_bytes = (size_t)most_rows * (job->value_dim + STATE_PAD) * sizeof(float);
    job->n_slots = (uint32_t)(ATTENTION_SLOT_BYTES / job->slot_bytes) - 2;
}

enum rc K(attention)(struct cpu *cpu, const struct attention_args *args, struct err *err)
{
    const struct kv_view *kv = &args->kv;
    uint32_t group = args->n_heads / kv->n_kv_heads;
    if (kv->head_dim > 256 || args->n_heads % kv->n_kv_heads || group > ATTENTION_MAX_GROUP)
        return err_set(err, RC_UNSUPPORTED, "attention: wanted head_dim <= 256, groups of <= %u whole heads; have %u, %u / %u",
                       ATTENTION_MAX_GROUP, kv->head_dim, args->n_heads, kv->n_kv_heads);
    struct attention_job job = {.cpu = cpu, .args = args, .group = group, .value_dim = kv_value_dim(kv->head_dim)};
    job.q_factor = args->softcap > 0 ? args->scale / args->softcap : args->scale * LOG2_E;
    job.cap = args->softcap > 0 ? args->softcap * LOG2_E : 0;
    job.tasks = cpu->shared;
    job.slots = (char *)cpu->shared + attention_task_bytes(&cpu->options);
    job.tile_rows = choose_tile_rows(&job);
    cut_tasks(&job, list_tasks(&job));
    if (job.n_units)
        pool_run(cpu->pool, run_tasks, &job);
    return RC_OK;
}
