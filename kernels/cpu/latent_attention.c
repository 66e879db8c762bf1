/* Multi-head latent attention, absorbed, over the paged cache: out[h] = softmax(scale (q_h . c_j + q'_h . k_j)) of c, causal,
 * where a token's latent c and its rope key k are one run of values that all heads share.
 * Shapes: q, out [n_rows][n_heads * latent] float32; pages [token][latent + rope] in float32, float16 or bfloat16.
 *
 * Order of the sums as in attention.c: tiles of 64 keys at absolute positions, four a split of 256 with fresh (m, l, O), u =
 * chain over the latent, then over the rope key, of (scale log2 e q_d) k_d; splits folded left; out = O / l. So a row's bits
 * depend on its position alone. A task is a range of (row, head) pairs of a sequence; it converts a tile's tokens to float32
 * keys and values once for all of its pairs. Bound by 2 (2 latent + rope) operations for every pair and key: 16 heads of
 * 512 + 64 over 4,096 keys are 143 MFLOP, 0.6 ms at 256 GFLOP/s. */
#include "attention.h"
#define QUERY_STRIDE LATENT_QUERY_STRIDE
#include "attention_tile.h"
#include "ops.h"

#include <stdatomic.h>

#define SPLIT_KEYS 256u
#define LOG2_E 0x1.715476p+0f

struct latent_job {
    struct cpu *cpu;
    const struct latent_attention_args *args;
    uint32_t dim, latent, width, task_rows; /* width: latent rounded up to whole vectors */
    atomic_uint next;
};

/* One task, pairs [first, first + n_rows) of a sequence with pair = row * n_heads + head, and the memory of its thread. */
struct latent_task {
    const struct latent_job *job;
    uint32_t seq, first, n_rows;
    float *q, *s, *o, *l, *m, *sum_o, *sum_l, *sum_m, *a; /* as in attention.c's scratch */
    float *keys, *values;                                 /* [4 groups][dim][16], [64][width] */
    const char *key_groups[TILE_GROUPS], *value_groups[TILE_GROUPS];
};

/* ---- the cache ---------------------------------------------------------------------------------------------------------- */

static char *token_of(const struct latent_attention_args *args, uint32_t seq, uint32_t position)
{
    const struct kv_view *kv = &args->kv;
    uint32_t block_tokens = args->batch->block_tokens;
    size_t page = (size_t)kv->table[(size_t)seq * kv->table_stride + position / block_tokens];
    return (char *)kv->pool + page * kv->page_bytes + kv->layer_offset +
           (size_t)(position % block_tokens) * kv->head_dim * kv_item_bytes(kv->dtype);
}

static void store_values(const float *x, uint32_t n, uint32_t dtype, char *to)
{
    for (uint32_t i = 0; i < n; i += LANES) {
        uint32_t part = n - i < LANES ? n - i : LANES;
        vf v = v_load_n(x + i, part);
        if (dtype == DTYPE_F32)
            v_store_n((float *)to + i, v, part);
        else if (dtype == DTYPE_F16)
            v_store_f16_n((uint16_t *)to + i, v, part);
        else
            v_store_bf16_n((uint16_t *)to + i, v, part);
    }
}

static void store_rows(const struct latent_job *job, uint32_t thread)
{
    const struct latent_attention_args *args = job->args;
    uint32_t dtype = args->kv.dtype, n_rows = args->batch->n_rows;
    uint32_t end = share_first(n_rows, thread + 1, job->cpu->n_threads);
    for (uint32_t r = share_first(n_rows, thread, job->cpu->n_threads); r < end; r++) {
        char *to = token_of(args, (uint32_t)args->batch->row_seq[r], (uint32_t)args->batch->positions[r]);
        store_values((const float *)args->latent.data + (size_t)r * args->latent.stride, job->latent, dtype, to);
        store_values((const float *)args->rope_key.data + (size_t)r * args->rope_key.stride, job->dim - job->latent, dtype,
                     to + (size_t)job->latent * kv_item_bytes(dtype));
    }
}

static void load_values(const char *from, uint32_t n, uint32_t dtype, float *x)
{
    for (uint32_t i = 0; i < n; i += LANES) {
        uint32_t part = n - i < LANES ? n - i : LANES;
        if (dtype == DTYPE_F32)
            v_store_n(x + i, v_load_n((const float *)from + i, part), part);
        else if (dtype == DTYPE_F16)
            v_store_n(x + i, v_load_f16_n((const uint16_t *)from + i, part), part);
        else
            v_store_n(x + i, v_load_bf16_n((const uint16_t *)from + i, part), part);
    }
}

/* Loads tokens start.. of a tile, up to `to`, as float32 keys (16 tokens beside each other) and values. */
static void take_tile(struct latent_task *t, uint32_t start, uint32_t to)
{
    const struct latent_job *job = t->job;
    uint32_t seq = (uint32_t)job->args->batch->row_seq[job->args->batch->seq_first_row[t->seq]];
    float row[LATENT_MAX_DIM];
    for (uint32_t j = 0; j < TILE_KEYS && start + j < to; j++) {
        float *keys = t->keys + (size_t)(j / KV_GROUP) * job->dim * KV_GROUP + j % KV_GROUP;
        float *values = t->values + (size_t)j * job->width;
        load_values(token_of(job->args, seq, start + j), job->dim, job->args->kv.dtype, row);
        for (uint32_t d = 0; d < job->dim; d++)
            keys[(size_t)d * KV_GROUP] = row[d];
        for (uint32_t c = 0; c < job->width; c++)
            values[c] = c < job->latent ? row[c] : 0;
    }
}

/* ---- a task ------------------------------------------------------------------------------------------------------------- */

static uint32_t pair_position(const struct latent_task *t, uint32_t pair)
{
    const struct batch_view *batch = t->job->args->batch;
    return (uint32_t)batch->positions[batch->seq_first_row[t->seq]] + (t->first + pair) / t->job->args->n_heads;
}

static float *pair_place(const struct latent_task *t, const struct view *view, uint32_t pair)
{
    const struct latent_attention_args *args = t->job->args;
    uint32_t row = (uint32_t)args->batch->seq_first_row[t->seq] + (t->first + pair) / args->n_heads;
    return (float *)view->data + (size_t)row * view->stride +
           (size_t)((t->first + pair) % args->n_heads) * (view->width / args->n_heads);
}

static void load_queries(const struct latent_task *t)
{
    const struct latent_job *job = t->job;
    const struct latent_attention_args *args = job->args;
    uint32_t rope = job->dim - job->latent, part = args->q_rope.width / args->n_heads;
    float factor = args->scale * LOG2_E;
    for (uint32_t r = 0; r < t->n_rows; r++) {
        const float *q = pair_place(t, &args->q, r), *tail = pair_place(t, &args->q_rope, r) + part - rope;
        for (uint32_t d = 0; d < job->dim; d++)
            t->q[(size_t)r * QUERY_STRIDE + d] = factor * (d < job->latent ? q[d] : tail[d - job->latent]);
    }
}

/* Scores and values of a tile for rows first..first + n - 1, n <= TILE_ROWS (one register tile). */
static void run_tile(struct latent_task *t, uint32_t first, uint32_t n, uint32_t start)
{
    uint32_t width = t->job->width, last = pair_position(t, first + n - 1);
    float *s = t->s + (size_t)first * TILE_KEYS, *o = t->o + (size_t)first * width;
    if (last < start)
        return;
    uint32_t end = last - start < TILE_KEYS ? last - start + 1 : TILE_KEYS;
    SCORES[TILE_F32][n - 1](t->q + (size_t)first * QUERY_STRIDE, t->key_groups, t->key_groups, t->job->dim, end, s);
    uint32_t lowest = TILE_KEYS;
    for (uint32_t r = 0; r < n; r++) {
        uint32_t position = pair_position(t, first + r), hi = position < start ? 0 : position - start + 1;
        hi = hi < TILE_KEYS ? hi : TILE_KEYS;
        lowest = hi < lowest ? hi : lowest;
        if (hi)
            t->a[first + r] =
                softmax_step(s + (size_t)r * TILE_KEYS, 0, hi, 0, 0, 0, &t->m[first + r], t->l + (size_t)(first + r) * LANES);
    }
    if (lowest == TILE_KEYS) {
        VALUES[TILE_F32][n - 1](s, t->a + first, t->value_groups, t->value_groups, width, 0, TILE_KEYS, o);
        return;
    }
    for (uint32_t r = 0; r < n; r++) {
        uint32_t position = pair_position(t, first + r), hi = position < start ? 0 : position - start + 1;
        if (hi)
            VALUES[TILE_F32][0](s + (size_t)r * TILE_KEYS, t->a + first + r, t->value_groups, t->value_groups, width, 0,
                                hi < TILE_KEYS ? hi : TILE_KEYS, o + (size_t)r * width);
    }
}

static void run_split(struct latent_task *t, uint32_t split, uint32_t to)
{
    for (uint32_t r = 0; r < t->n_rows; r++) {
        t->m[r] = -INFINITY; /* so the first factor is 0 and the contents of o are ignored */
        v_store(t->l + (size_t)r * LANES, v_zero());
    }
    for (uint32_t start = split * SPLIT_KEYS; start < (split + 1) * SPLIT_KEYS && start < to; start += TILE_KEYS) {
        take_tile(t, start, to);
        for (uint32_t first = 0; first < t->n_rows; first += TILE_ROWS)
            run_tile(t, first, t->n_rows - first < TILE_ROWS ? t->n_rows - first : TILE_ROWS, start);
    }
}

static void run_task(struct latent_task *t)
{
    uint32_t width = t->job->width, to = pair_position(t, t->n_rows - 1) + 1;
    load_queries(t);
    for (uint32_t r = 0; r < t->n_rows; r++)
        state_clear(t->sum_o + (size_t)r * width, t->sum_l + (size_t)r * LANES, &t->sum_m[r], width);
    for (uint32_t split = 0; split * SPLIT_KEYS < to; split++) {
        run_split(t, split, to);
        for (uint32_t r = 0; r < t->n_rows; r++)
            if (pair_position(t, r) >= split * SPLIT_KEYS)
                state_fold(t->sum_o + (size_t)r * width, t->sum_l + (size_t)r * LANES, &t->sum_m[r], t->o + (size_t)r * width,
                           t->l + (size_t)r * LANES, t->m[r], width);
    }
    for (uint32_t r = 0; r < t->n_rows; r++) {
        float *out = pair_place(t, &t->job->args->out, r);
        vf sum = v_set1(v_hsum(v_load(t->sum_l + (size_t)r * LANES)));
        for (uint32_t i = 0; i < t->job->latent; i += LANES) {
            uint32_t n = t->job->latent - i < LANES ? t->job->latent - i : LANES;
            v_store_n(out + i, v_add(v_div(v_load(t->sum_o + (size_t)r * width + i), sum), v_zero()), n); /* no -0 */
        }
    }
}

/* ---- a call ------------------------------------------------------------------------------------------------------------- */

static float *take(char **at, size_t n_floats)
{
    float *taken = (float *)*at;
    *at += (n_floats * sizeof(float) + 63) / 64 * 64;
    return taken;
}

static struct latent_task lay_task(const struct latent_job *job, uint32_t thread)
{
    char *at = job->cpu->scratch + thread * job->cpu->scratch_bytes;
    struct latent_task t = {.job = job};
    t.q = take(&at, LATENT_ROWS * QUERY_STRIDE);
    t.s = take(&at, LATENT_ROWS * TILE_KEYS);
    t.o = take(&at, (size_t)LATENT_ROWS * job->width);
    t.sum_o = take(&at, (size_t)LATENT_ROWS * job->width);
    t.l = take(&at, LATENT_ROWS * LANES);
    t.sum_l = take(&at, LATENT_ROWS * LANES);
    t.m = take(&at, LATENT_ROWS);
    t.sum_m = take(&at, LATENT_ROWS);
    t.a = take(&at, LATENT_ROWS);
    t.keys = take(&at, (size_t)TILE_KEYS * job->dim);
    t.values = take(&at, (size_t)TILE_KEYS * job->width);
    for (uint32_t g = 0; g < TILE_GROUPS; g++) {
        t.key_groups[g] = (const char *)(t.keys + (size_t)g * job->dim * KV_GROUP);
        t.value_groups[g] = (const char *)(t.values + (size_t)g * KV_GROUP * job->width);
    }
    return t;
}

static void run_job(void *job_args, uint32_t thread)
{
    struct latent_job *job = job_args;
    const struct batch_view *batch = job->args->batch;
    store_rows(job, thread);
    pool_barrier(job->cpu->pool);
    struct latent_task t = lay_task(job, thread);
    uint32_t before = 0; /* tasks of the sequences before t.seq */
    for (uint32_t task; task = atomic_fetch_add(&job->next, 1), true;) {
        uint32_t pairs = 0, n = 0;
        for (; t.seq < batch->n_seqs; t.seq++, before += n) {
            pairs = (uint32_t)(batch->seq_first_row[t.seq + 1] - batch->seq_first_row[t.seq]) * job->args->n_heads;
            n = (pairs + job->task_rows - 1) / job->task_rows;
            if (task < before + n)
                break;
        }
        if (t.seq == batch->n_seqs)
            return;
        t.first = (n - 1 - (task - before)) * job->task_rows; /* tasks with the most keys first */
        t.n_rows = pairs - t.first < job->task_rows ? pairs - t.first : job->task_rows;
        run_task(&t);
    }
}

enum rc K(latent_attention)(struct cpu *cpu, const struct latent_attention_args *args, struct err *err)
{
    uint32_t latent = args->latent.width, dim = latent + args->rope_key.width;
    if (dim > LATENT_MAX_DIM || dim != args->kv.head_dim || args->kv.n_kv_heads)
        return err_set(err, RC_UNSUPPORTED, "latent_attention: wanted latents and rope keys of at most %u values, have %u + %u",
                       LATENT_MAX_DIM, latent, args->rope_key.width);
    struct latent_job job = {.cpu = cpu, .args = args, .dim = dim, .latent = latent, .width = kv_value_dim(latent)};
    uint64_t rows = ((uint64_t)args->batch->n_rows * args->n_heads + cpu->n_threads - 1) / cpu->n_threads;
    job.task_rows = rows < LATENT_ROWS ? (uint32_t)(rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS : LATENT_ROWS;
    if (args->batch->n_rows)
        pool_run(cpu->pool, run_job, &job);
    return RC_OK;
}
