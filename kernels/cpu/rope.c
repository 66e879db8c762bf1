/* rope.c: rotary positions, and the cache writes that follow them.
 *   rope_table  table[r][i] = {m cos a, m sin a}, a = (float)position_r * inv_freq_i, libm's cosf and sinf, once a step;
 *               frequencies may have positions of their own axes
 *   rope        (x0, x1) -> (fma(x0, cos, -(x1 sin)), fma(x1, cos, x0 sin)) for the pairs (i, i + n_freqs), or (2i, 2i + 1)
 *               if interleaved; elements from 2 n_freqs of a head on stay
 *   kv_write    rounds to the page's type, to nearest even; e4m3 to at most 448; int8 in units of (largest magnitude) / 127
 *   qkv         norm, rotation and cache write of one head while it lies in the first-level cache
 * qkv calls the functions of the separate operations, so its bits equal theirs. All of these operations are bound by bytes:
 * 512 rows of 32 heads x 128 are 8 MB. */
#include "kv.h"
#include "ops.h"
#include "rows.h"

#include <math.h>

struct rows_job {
    struct cpu *cpu;
    const void *args;
};

/* ---- the table ---------------------------------------------------------------------------------------------------------- */

static void fill_table(void *job_args, uint32_t thread)
{
    const struct rows_job *job = job_args;
    const struct rope_table_args *args = job->args;
    uint32_t end = share_first(args->n_rows, thread + 1, job->cpu->n_threads);
    for (uint32_t r = share_first(args->n_rows, thread, job->cpu->n_threads); r < end; r++) {
        float *row = args->table + (size_t)r * args->n_freqs * 2;
        for (uint32_t i = 0; i < args->n_freqs; i++) {
            size_t at = (args->axes ? (size_t)args->axes[i] * args->axis_stride : 0) + r;
            float angle = (float)args->positions[at] * args->inv_freq[i];
            row[2 * i] = args->magnitude * cosf(angle);
            row[2 * i + 1] = args->magnitude * sinf(angle);
        }
    }
}

enum rc K(rope_table)(struct cpu *cpu, const struct rope_table_args *args, struct err *err)
{
    (void)err;
    struct rows_job job = {cpu, args};
    pool_run(cpu->pool, fill_table, &job);
    return RC_OK;
}

/* ---- the rotation ------------------------------------------------------------------------------------------------------- */

/* Loads n <= LANES pairs {cos, sin} as two vectors. */
V_INLINE void load_pairs(const float *p, uint32_t n, vf *cosine, vf *sine)
{
    uint32_t first = 2 * n < LANES ? 2 * n : LANES;
    vf a = v_load_n(p, first), b = first < 2 * n ? v_load_n(p + LANES, 2 * n - LANES) : v_zero();
#if LANES == 16
    __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    *cosine = _mm512_permutex2var_ps(a, even, b);
    *sine = _mm512_permutex2var_ps(a, _mm512_add_epi32(even, _mm512_set1_epi32(1)), b);
#else
    __m256 low = _mm256_permute2f128_ps(a, b, 0x20), high = _mm256_permute2f128_ps(a, b, 0x31);
    *cosine = _mm256_shuffle_ps(low, high, 0x88);
    *sine = _mm256_shuffle_ps(low, high, 0xdd);
#endif
}

static void rotate_halves(float *x, const float *table, uint32_t n_freqs)
{
    for (uint32_t i = 0; i < n_freqs; i += LANES) {
        uint32_t n = n_freqs - i < LANES ? n_freqs - i : LANES;
        vf cosine, sine, x0 = v_load_n(x + i, n), x1 = v_load_n(x + n_freqs + i, n);
        load_pairs(table + 2 * i, n, &cosine, &sine);
        v_store_n(x + i, v_fma(x0, cosine, v_neg(v_mul(x1, sine))), n);
        v_store_n(x + n_freqs + i, v_fma(x1, cosine, v_mul(x0, sine)), n);
    }
}

static void rotate_pairs(float *x, const float *table, uint32_t n_freqs)
{
    for (uint32_t i = 0; i < 2 * n_freqs; i += LANES) {
        uint32_t n = 2 * n_freqs - i < LANES ? 2 * n_freqs - i : LANES;
        vf pair = v_load_n(x + i, n), turn = v_load_n(table + i, n);
#if LANES == 16
        vf other = v_mul(_mm512_permute_ps(pair, 0xb1), _mm512_movehdup_ps(turn));
        v_store_n(x + i, _mm512_fmaddsub_ps(pair, _mm512_moveldup_ps(turn), other), n);
#else
        vf other = v_mul(_mm256_permute_ps(pair, 0xb1), _mm256_movehdup_ps(turn));
        v_store_n(x + i, _mm256_fmaddsub_ps(pair, _mm256_moveldup_ps(turn), other), n);
#endif
    }
}

/* Rotates one head of row r; the head has head_dim elements. */
static void rotate_head(const struct rope_args *args, uint32_t r, float *x, uint32_t head_dim)
{
    if (args->is_tail)
        x += head_dim - 2 * args->n_freqs;
    const float *table = args->table + (size_t)r * args->n_freqs * 2;
    if (args->interleaved)
        rotate_pairs(x, table, args->n_freqs);
    else
        rotate_halves(x, table, args->n_freqs);
}

static float *head_of(const struct view *view, uint32_t row, uint32_t head, uint32_t head_dim)
{
    return (float *)view->data + (size_t)row * view->stride + (size_t)head * head_dim;
}

static void rotate_rows(void *job_args, uint32_t thread)
{
    const struct rows_job *job = job_args;
    const struct rope_args *args = job->args;
    uint32_t end = share_first(args->n_rows, thread + 1, job->cpu->n_threads);
    uint32_t k_head_dim = args->k_head_dim ? args->k_head_dim : args->head_dim;
    for (uint32_t r = share_first(args->n_rows, thread, job->cpu->n_threads); r < end; r++) {
        for (uint32_t h = 0; h < args->q.width / args->head_dim; h++)
            rotate_head(args, r, head_of(&args->q, r, h, args->head_dim), args->head_dim);
        for (uint32_t h = 0; h < args->k.width / k_head_dim; h++)
            rotate_head(args, r, head_of(&args->k, r, h, k_head_dim), k_head_dim);
    }
}

enum rc K(rope)(struct cpu *cpu, const struct rope_args *args, struct err *err)
{
    (void)err;
    struct rows_job job = {cpu, args};
    pool_run(cpu->pool, rotate_rows, &job);
    return RC_OK;
}

/* ---- the cache ---------------------------------------------------------------------------------------------------------- */

/* Stores a vector in the page's type; `divisor` is for int8. */
V_INLINE void store_items(char *items, uint32_t i, vf x, uint32_t dtype, vf divisor)
{
    switch (dtype) {
    case DTYPE_F32: v_store((float *)items + i, x); return;
    case DTYPE_F16: v_store_f16((uint16_t *)items + i, x); return;
    case DTYPE_FP8: v_store_e4m3((uint8_t *)items + i, x); return;
    case DTYPE_I8: v_store_i8((int8_t *)items + i, v_div(x, divisor)); return;
    default: v_store_bf16((uint16_t *)items + i, x);
    }
}

/* items[0..width) = x in the page's type, zeros from n on; width is a multiple of 16. scale: of int8. */
static void store_padded(const float *x, uint32_t n, uint32_t dtype, float scale, char *items, uint32_t width)
{
    vf divisor = v_set1(scale > 0 ? scale : 1);
    for (uint32_t i = 0; i < width; i += LANES) {
        uint32_t part = i >= n ? 0 : n - i < LANES ? n - i : LANES;
        store_items(items, i, v_load_n(x + i, part), dtype, divisor);
    }
}

/* Item i * KV_GROUP of `items` = x[i] in the page's type. */
static void store_apart(const float *x, uint32_t n, uint32_t dtype, float scale, char *items)
{
    char rounded[256 * sizeof(float)];
    store_padded(x, n, dtype, scale, rounded, kv_value_dim(n));
    size_t item = kv_item_bytes(dtype);
    for (size_t i = 0; i < n; i++)
        switch (item) {
        case 4: memcpy(items + i * KV_GROUP * 4, rounded + i * 4, 4); break;
        case 2: memcpy(items + i * KV_GROUP * 2, rounded + i * 2, 2); break;
        default: items[i * KV_GROUP] = rounded[i];
        }
}

/* The scale of one token's int8: the largest magnitude becomes 127. NaN if an element is not finite. */
static float int8_scale(const float *x, uint32_t n)
{
    vf most = v_zero(), finite = v_zero(); /* 0, or NaN */
    for (uint32_t i = 0; i < n; i += LANES) {
        vf part = v_load_n(x + i, n - i < LANES ? n - i : LANES);
        most = v_max(most, v_abs(part));
        finite = v_fma(part, v_zero(), finite);
    }
    return v_hmax(most) / 127 + v_hsum(finite);
}

static void write_head(const struct kv_write_args *args, uint32_t r, uint32_t head)
{
    const struct kv_view *kv = &args->kv;
    const struct batch_view *batch = args->batch;
    uint32_t position = (uint32_t)batch->positions[r], token = position % KV_GROUP, width = kv_value_dim(kv->head_dim);
    size_t item = kv_item_bytes(kv->dtype);
    char *group = kv_group(kv, batch->block_tokens, (uint32_t)batch->row_seq[r], position, head);
    const float *key = head_of(&args->k, r, head, kv->head_dim), *value = head_of(&args->v, r, head, kv->head_dim);
    float scales[2] = {1, 1};
    if (kv_has_scales(kv->dtype)) {
        float *to = (float *)(group + kv_scales_at(kv->head_dim, kv->dtype)) + token;
        to[0] = scales[0] = int8_scale(key, kv->head_dim);
        to[KV_GROUP] = scales[1] = int8_scale(value, kv->head_dim);
    }
    store_apart(key, kv->head_dim, kv->dtype, scales[0], group + token * item);
    store_padded(value, kv->head_dim, kv->dtype, scales[1],
                 group + ((size_t)KV_GROUP * kv->head_dim + (size_t)token * width) * item, width);
}

/* Head by head, so that the tokens of a group are written by one thread while its lines are near. */
static void write_rows(void *job_args, uint32_t thread)
{
    const struct rows_job *job = job_args;
    const struct kv_write_args *args = job->args;
    uint32_t n_rows = args->batch->n_rows, n = n_rows * args->kv.n_kv_heads;
    uint32_t end = share_first(n, thread + 1, job->cpu->n_threads);
    for (uint32_t i = share_first(n, thread, job->cpu->n_threads); i < end; i++)
        write_head(args, i % n_rows, i / n_rows);
}

enum rc K(kv_write)(struct cpu *cpu, const struct kv_write_args *args, struct err *err)
{
    (void)err;
    struct rows_job job = {cpu, args};
    pool_run(cpu->pool, write_rows, &job);
    return RC_OK;
}

/* ---- norm, rotation and cache write together ------------------------------------------------------------------------- */

static void prepare_head(const struct qkv_args *args, const struct view *view, const float *norm, uint32_t r, uint32_t head)
{
    uint32_t head_dim = args->write.kv.head_dim;
    float *x = head_of(view, r, head, head_dim);
    if (norm)
        row_rms_norm(x, norm + (size_t)head * args->norm_stride, args->eps, head_dim, x);
    if (args->rope.table)
        rotate_head(&args->rope, r, x, head_dim);
}

/* A unit is a row's kv head with its query heads. */
static void prepare_rows(void *job_args, uint32_t thread)
{
    const struct rows_job *job = job_args;
    const struct qkv_args *args = job->args;
    uint32_t n_rows = args->write.batch->n_rows, n_heads = args->write.kv.n_kv_heads, n = n_rows * n_heads;
    uint32_t group = args->rope.q.width / args->write.kv.head_dim / n_heads;
    uint32_t end = share_first(n, thread + 1, job->cpu->n_threads);
    for (uint32_t i = share_first(n, thread, job->cpu->n_threads); i < end; i++) {
        uint32_t r = i % n_rows, head = i / n_rows;
        for (uint32_t h = head * group; h < (head + 1) * group; h++)
            prepare_head(args, &args->rope.q, args->q_norm, r, h);
        prepare_head(args, &args->rope.k, args->k_norm, r, head);
        write_head(&args->write, r, head);
    }
}

enum rc K(qkv)(struct cpu *cpu, const struct qkv_args *args, struct err *err)
{
    (void)err;
    struct rows_job job = {cpu, args};
    pool_run(cpu->pool, prepare_rows, &job);
    return RC_OK;
}
