/* Adapters: y += scale * B (A x) + bias for the rows that have one. Shapes: x [n_rows][n_cols], y [n_rows][...] float32, A and
 * the transpose of B float32, one of each for every part of the matrix. Order of the sums: an element of A x is a dot product
 * in four chains of vectors over the columns, joined as a fixed tree; an element of B (A x) is one chain over the rank. So
 * neither the number of threads nor other rows change a bit. Bound by the bytes of A and B for one row (rank 16, 4096 x 4096:
 * 0.5 MB), else by 4 operations a rank, row and column. */
#include "ops.h"
#include "simd.h"

#include <string.h>

struct lora_job {
    struct cpu *cpu;
    const struct lora_args *args;
};

struct lora_head {
    uint32_t rank;
    float scale;
    uint32_t bias; /* enum lora_bias */
    uint32_t unused;
    uint64_t whole; /* address of the matrix that stands in place of the linear's; 0: none */
};

/* The slot of a row's adapter; NULL: the row has none, or an id of another rank. */
static const char *slot_of(const struct lora_args *args, uint32_t row)
{
    bool has_range = args->token_ids && args->end_id;
    if (has_range && (args->token_ids[row] < args->first_id || args->token_ids[row] >= args->end_id))
        return NULL;
    int32_t slot = args->row_slots[args->rows ? args->rows[row] : (int32_t)row];
    return slot < 0 ? NULL : (const char *)args->slots + (size_t)slot * args->slot_bytes;
}

static struct lora_head head_of(const struct lora_part *part, const char *slot)
{
    struct lora_head head;
    memcpy(&head, slot + part->head, sizeof head);
    return head;
}

/* y += scale * B t, or y = scale * B t, for rows first .. end of a part. */
static void add_part(const struct lora_part *part, const char *slot, const float *t, bool is_delta, uint32_t first,
                     uint32_t end, float *y)
{
    struct lora_head head = slot ? head_of(part, slot) : (struct lora_head){0};
    for (uint32_t i = first; is_delta && !head.rank && i < end; i++)
        y[i] = -0.0f;
    for (uint32_t i = first; head.rank && i < end; i += LANES) {
        uint32_t lanes = end - i < LANES ? end - i : LANES;
        const float *b = (const float *)(slot + part->b) + i;
        vf sum = v_zero();
        for (uint32_t j = 0; j < head.rank; j++, b += part->n_rows)
            sum = v_fma(v_set1(t[j]), v_load_n(b, lanes), sum);
        vf before = is_delta ? v_set1(-0.0f) : v_load_n(y + i, lanes);
        v_store_n(y + i, v_fma(v_set1(head.scale), sum, before), lanes);
    }
}

/* Rows first .. end of the adapter's own matrix times x, or of the column that belongs to the row's token, in place of what the
 * base matrix gave. */
static void replace(const struct lora_args *args, const struct lora_part *part, const char *slot, uint32_t row,
                    uint32_t first, uint32_t end, float *y)
{
    const float *w = slot ? (const float *)(uintptr_t)head_of(part, slot).whole : NULL;
    const float *x = (const float *)args->x.data + (args->token_ids ? 0 : (size_t)row * args->x.stride);
    uint32_t id = args->token_ids ? (uint32_t)args->token_ids[row] : 0, n_cols = args->x.width;
    const float *bias = args->base_bias ? args->base_bias + part->first_row : NULL;
    for (uint32_t i = first; w && i < end && id < n_cols; i++)
        y[i] = args->token_ids ? args->factor * w[(size_t)id * part->n_rows + i]
                               : v_dot(w + (size_t)i * n_cols, x, n_cols) + (bias ? bias[i] : 0);
}

/* What a bias of the adapter adds to rows first .. end of a part. */
static void add_bias(const struct lora_args *args, const struct lora_part *part, const char *slot, uint32_t first,
                     uint32_t end, float *y)
{
    uint32_t kind = slot ? head_of(part, slot).bias : LORA_BIAS_NONE;
    const float *bias = kind ? (const float *)(slot + part->b) + (size_t)args->max_rank * part->n_rows : NULL;
    const float *base = kind == LORA_BIAS_REPLACES && args->base_bias ? args->base_bias + part->first_row : NULL;
    for (uint32_t i = first; bias && i < end; i++)
        y[i] += base ? bias[i] - base[i] : bias[i];
}

void K(lora_row)(const struct lora_part *part, const char *slot, const float *x, uint32_t n_cols, float *t, float *y)
{
    const float *a = (const float *)(slot + part->a);
    for (uint32_t j = 0; j < head_of(part, slot).rank; j++, a += n_cols)
        t[j] = v_dot(a, x, n_cols);
    add_part(part, slot, t, false, 0, part->n_rows, y + part->first_row);
}

/* An element of A x, or of A's column of the row's token. */
static float product(const struct lora_args *args, uint32_t row, const float *a)
{
    uint32_t id = args->token_ids ? (uint32_t)args->token_ids[row] : 0;
    if (args->token_ids)
        return id < args->x.width ? args->factor * a[id] : 0;
    return v_dot(a, (const float *)args->x.data + (size_t)row * args->x.stride, args->x.width);
}

/* One element of t = A x; nothing if the adapter's rank is lower. */
static void shrink(const struct lora_args *args, uint32_t row, uint32_t part_idx, uint32_t element)
{
    const struct lora_part *part = &args->parts[part_idx];
    const char *slot = slot_of(args, row);
    if (!slot || element >= head_of(part, slot).rank)
        return;
    const float *a = (const float *)(slot + part->a) + (size_t)element * args->x.width;
    args->scratch[((size_t)row * args->n_parts + part_idx) * args->max_rank + element] = product(args, row, a);
}

/* Rows first .. end of a part of y. */
static void expand(const struct lora_args *args, uint32_t row, uint32_t part_idx, uint32_t first, uint32_t end)
{
    const struct lora_part *part = &args->parts[part_idx];
    const float *t = args->scratch + ((size_t)row * args->n_parts + part_idx) * args->max_rank;
    float *y = (float *)args->y.data + (size_t)row * args->y.stride + part->first_row;
    replace(args, part, slot_of(args, row), row, first, end, y);
    add_part(part, slot_of(args, row), t, args->is_delta, first, end, y);
    add_bias(args, part, slot_of(args, row), first, end, y);
}

static void lora_run(void *job_args, uint32_t thread)
{
    const struct lora_job *job = job_args;
    const struct lora_args *args = job->args;
    uint32_t n_threads = job->cpu->n_threads, per_row = args->n_parts * args->max_rank, n = args->n_rows * per_row;
    for (uint32_t i = share_first(n, thread, n_threads); i < share_first(n, thread + 1, n_threads); i++)
        shrink(args, i / per_row, i % per_row / args->max_rank, i % args->max_rank);
    pool_barrier(job->cpu->pool);
    for (uint32_t row = 0; row < args->n_rows; row++)
        for (uint32_t p = 0; p < args->n_parts; p++)
            expand(args, row, p, share_first(args->parts[p].n_rows, thread, n_threads),
                   share_first(args->parts[p].n_rows, thread + 1, n_threads));
}

enum rc K(lora)(struct cpu *cpu, const struct lora_args *args, struct err *err)
{
    (void)err;
    struct lora_job job = {cpu, args};
    pool_run(cpu->pool, lora_run, &job);
    return RC_OK;
}
