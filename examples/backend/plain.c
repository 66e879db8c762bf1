/* plain.c: a backend of llmpy in plain C, with one thread and no vectors. It has the entries that every backend needs, and
 * `experts`. The core composes the others: it uploads the batch, copies pages, computes rope tables and routes and samples on
 * the host. Replace one function after the other by that of a device.
 *
 * Each output element is one chain of sums in a fixed order, so a row does not depend on the other rows of a call. The device's
 * memory is the host's, but its addresses are shifted: an address that is used on the wrong side crashes at once. */
#include <llmpy_backend.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SHIFT ((uintptr_t)1 << 47)
#define ALIGNMENT 256u
#define MAX_HEAD_DIM 1024u

static const struct backend_host *host;

struct plain {
    uint32_t dtype; /* of activations */
    char description[64];
};

/* Element (row, column) is values[row * n_cols + column]. */
struct matrix {
    uint32_t n_rows, n_cols, n_parts;
    struct matrix_part *parts;
    float *values;
};

/* ---- memory -------------------------------------------------------------------------------------------------------------- */

/* The host's address of device memory. */
static void *at(const void *address)
{
    return address ? (char *)(uintptr_t)address - SHIFT : NULL;
}

static float load(const void *address, uint32_t dtype, size_t i)
{
    float value;
    if (dtype == DTYPE_F32)
        return ((const float *)address)[i];
    host->dtype_to_float(dtype, (const uint16_t *)address + i, &value, 1);
    return value;
}

static void store(void *address, uint32_t dtype, size_t i, float value)
{
    if (dtype == DTYPE_F32)
        ((float *)address)[i] = value;
    else
        host->dtype_from_float(dtype, &value, (uint16_t *)address + i, 1);
}

static float get(const struct plain *p, struct view v, uint32_t row, uint32_t column)
{
    return load(at(v.data), p->dtype, (size_t)row * v.stride + column);
}

static void put(const struct plain *p, struct view v, uint32_t row, uint32_t column, float value)
{
    store(at(v.data), p->dtype, (size_t)row * v.stride + column, value);
}

static enum rc buffer_create(void *ctx, size_t size_bytes, void **buffer, struct err *err)
{
    (void)ctx;
    size_t rounded = (size_bytes + ALIGNMENT) / ALIGNMENT * ALIGNMENT;
    char *made = aligned_alloc(ALIGNMENT, rounded);
    if (!made)
        return host->err_set(err, RC_DEVICE_MEMORY, "plain: no memory for %zu bytes", size_bytes);
    memset(made, 0, rounded);
    *buffer = made + SHIFT;
    return RC_OK;
}

static void buffer_destroy(void *ctx, void *buffer, size_t size_bytes)
{
    (void)ctx;
    (void)size_bytes;
    free(at(buffer));
}

static enum rc upload(void *ctx, void *target, const void *from, size_t size_bytes, struct err *err)
{
    (void)ctx;
    (void)err;
    memcpy(at(target), from, size_bytes);
    return RC_OK;
}

static enum rc download(void *ctx, void *to, const void *source, size_t size_bytes, struct err *err)
{
    (void)ctx;
    (void)err;
    memcpy(to, at(source), size_bytes);
    return RC_OK;
}

static enum rc synchronize(void *ctx, struct err *err)
{
    (void)ctx;
    (void)err;
    return RC_OK;
}

/* ---- the device ---------------------------------------------------------------------------------------------------------- */

static enum rc plain_open(const struct backend_options *options, void **ctx, struct err *err)
{
    if (strcmp(options->device, "plain") != 0 && strcmp(options->device, "plain:0") != 0)
        return host->err_set(err, RC_DEVICE, "device '%.60s': there is plain:0 alone", options->device);
    if (options->max_head_dim > MAX_HEAD_DIM)
        return host->err_set(err, RC_UNSUPPORTED, "plain: wanted heads of at most %u, have %u", MAX_HEAD_DIM,
                             options->max_head_dim);
    struct plain *p = calloc(1, sizeof *p);
    if (!p)
        return host->err_set(err, RC_MEMORY, "plain: no memory for the context");
    p->dtype = options->dtype;
    snprintf(p->description, sizeof p->description, "plain %s", host->dtype_info(p->dtype)->name);
    *ctx = p;
    return RC_OK;
}

static void plain_close(void *ctx)
{
    free(ctx);
}

static const char *describe(void *ctx)
{
    return ((struct plain *)ctx)->description;
}

static uint32_t fusions(void *ctx)
{
    (void)ctx;
    return 0;
}

static uint32_t activations(void *ctx)
{
    return ((struct plain *)ctx)->dtype;
}

/* Every type that has float values: matrices are expanded to float32. */
static bool supports(void *ctx, uint32_t dtype, uint32_t use)
{
    static const char zeros[512];
    float values[256];
    const struct dtype_info *info = host->dtype_info(dtype);
    (void)ctx;
    (void)use;
    return info && info->block_values <= 256 && host->dtype_to_float(dtype, zeros, values, info->block_values);
}

static size_t kv_layer_bytes(void *ctx, uint32_t n_kv_heads, uint32_t head_dim, uint32_t dtype, uint32_t block_tokens)
{
    (void)ctx;
    return (size_t)2 * block_tokens * n_kv_heads * head_dim * host->dtype_info(dtype)->block_bytes;
}

/* ---- matrices ------------------------------------------------------------------------------------------------------------ */

static void matrix_destroy(void *ctx, struct matrix *m)
{
    (void)ctx;
    if (!m)
        return;
    free(m->parts);
    free(m->values);
    free(m);
}

static size_t matrix_bytes(const struct matrix *m)
{
    return (size_t)m->n_rows * m->n_cols * sizeof(float);
}

static enum rc matrix_create(void *ctx, const struct matrix_desc *desc, struct matrix **matrix, struct err *err)
{
    struct matrix *m = calloc(1, sizeof *m);
    if (!m)
        return host->err_set(err, RC_MEMORY, "plain: no memory for a matrix");
    m->n_cols = desc->n_cols;
    m->n_parts = desc->n_parts;
    for (uint32_t i = 0; i < desc->n_parts; i++)
        m->n_rows += desc->parts[i].n_rows;
    m->parts = calloc(m->n_parts, sizeof *m->parts);
    m->values = calloc(m->n_rows, (size_t)m->n_cols * sizeof(float));
    if (!m->parts || !m->values) {
        size_t size_bytes = matrix_bytes(m);
        matrix_destroy(ctx, m);
        return host->err_set(err, RC_DEVICE_MEMORY, "plain: no memory for %zu bytes of weights", size_bytes);
    }
    memcpy(m->parts, desc->parts, m->n_parts * sizeof *m->parts);
    *matrix = m;
    return RC_OK;
}

static uint32_t matrix_arithmetic(const struct matrix *m, uint32_t part)
{
    (void)m;
    (void)part;
    return ARITHMETIC_FLOAT;
}

static enum rc matrix_write(void *ctx, struct matrix *m, uint32_t part, uint32_t first_row, uint32_t n_rows, const void *rows,
                            struct err *err)
{
    size_t first = first_row;
    (void)ctx;
    (void)err;
    for (uint32_t i = 0; i < part; i++)
        first += m->parts[i].n_rows;
    host->dtype_to_float(m->parts[part].dtype, rows, m->values + first * m->n_cols, (size_t)n_rows * m->n_cols);
    return RC_OK;
}

static enum rc matrix_read(void *ctx, const struct matrix *m, uint32_t first_row, uint32_t n_rows, float *rows, struct err *err)
{
    (void)ctx;
    (void)err;
    memcpy(rows, m->values + (size_t)first_row * m->n_cols, (size_t)n_rows * m->n_cols * sizeof *rows);
    return RC_OK;
}

static const float *row_of(const struct matrix *m, size_t row)
{
    return m->values + row * m->n_cols;
}

/* ---- operations on rows -------------------------------------------------------------------------------------------------- */

static enum rc embed(void *ctx, const struct embed_args *args, struct err *err)
{
    const int32_t *ids = at(args->token_ids);
    (void)err;
    for (uint32_t r = 0; r < args->n_rows; r++)
        for (uint32_t c = 0; c < args->out.width; c++)
            put(ctx, args->out, r, c, args->scale * row_of(args->matrix, args->first_row + (ids ? (uint32_t)ids[r] : 0))[c]);
    return RC_OK;
}

static float product(const struct plain *p, struct view x, uint32_t row, const float *weights, uint32_t n)
{
    float sum = 0;
    for (uint32_t k = 0; k < n; k++)
        sum += get(p, x, row, k) * weights[k];
    return sum;
}

static enum rc linear(void *ctx, const struct linear_args *args, struct err *err)
{
    const struct plain *p = ctx;
    const struct matrix *m = args->matrix;
    const float *bias = at(args->bias);
    if (args->input != LINEAR_PLAIN || args->output != LINEAR_SUM || args->add)
        return host->err_set(err, RC_UNSUPPORTED, "plain: wanted a linear that is not fused");
    for (uint32_t r = 0; r < args->n_rows; r++)
        for (uint32_t c = 0; c < m->n_rows; c++) {
            float sum = product(p, args->x, r, row_of(m, c), m->n_cols) + (bias ? bias[c] : 0);
            store(at(args->y.data), args->is_float_out ? (uint32_t)DTYPE_F32 : p->dtype, (size_t)r * args->y.stride + c, sum);
        }
    return RC_OK;
}

static enum rc rms_norm(void *ctx, const struct rms_norm_args *args, struct err *err)
{
    const struct plain *p = ctx;
    const float *weight = at(args->weight);
    uint32_t size = args->x.width / args->n_heads;
    (void)err;
    for (uint32_t r = 0; r < args->n_rows; r++)
        for (uint32_t h = 0; h < args->n_heads; h++) {
            float sum = 0, scale;
            for (uint32_t c = 0; c < size; c++)
                sum += get(p, args->x, r, h * size + c) * get(p, args->x, r, h * size + c);
            scale = 1 / sqrtf(sum / (float)size + args->eps);
            for (uint32_t c = 0; c < size; c++) {
                float value = get(p, args->x, r, h * size + c) * scale;
                put(p, args->out, r, h * size + c, weight ? value * weight[h * args->weight_stride + c] : value);
            }
        }
    return RC_OK;
}

static float activate(uint32_t act, float x)
{
    switch (act) {
    case ACT_SILU: return x / (1 + expf(-x));
    case ACT_GELU: return x * 0.5f * (1 + erff(x * 0.70710678f));
    case ACT_GELU_TANH: return x * 0.5f * (1 + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
    case ACT_RELU: return x > 0 ? x : 0;
    case ACT_RELU2: return x > 0 ? x * x : 0;
    case ACT_TANH: return tanhf(x);
    case ACT_SIGMOID: return 1 / (1 + expf(-x));
    default: return x; /* ACT_IDENTITY */
    }
}

static enum rc gated(void *ctx, const struct gated_args *args, struct err *err)
{
    (void)err;
    for (uint32_t r = 0; r < args->n_rows; r++)
        for (uint32_t c = args->out.width; c-- > 0;) { /* downwards, as a gate of one column may lie in column 0 of out */
            float gate = get(ctx, args->gate, r, args->gate.width == 1 ? 0 : c);
            put(ctx, args->out, r, c, activate(args->act, gate) * get(ctx, args->up, r, c));
        }
    return RC_OK;
}

static enum rc add(void *ctx, const struct add_args *args, struct err *err)
{
    (void)err;
    for (uint32_t r = 0; r < args->n_rows; r++)
        for (uint32_t c = 0; c < args->out.width; c++)
            put(ctx, args->out, r, c, get(ctx, args->a, r, c) + get(ctx, args->b, r, c));
    return RC_OK;
}

static enum rc select_rows(void *ctx, const struct select_args *args, struct err *err)
{
    const int32_t *rows = args->rows ? at(args->rows) : NULL;
    (void)err;
    for (uint32_t i = 0; i < args->n_selected; i++)
        for (uint32_t c = 0; c < args->out.width; c++)
            put(ctx, args->out, i, c, get(ctx, args->x, rows ? (uint32_t)rows[i] : i, c));
    return RC_OK;
}

/* ---- positions and the cache --------------------------------------------------------------------------------------------- */

/* Rotates one row of q or of k; angles: [n_freqs] {cos, sin}. */
static void rotate(const struct plain *p, const struct rope_args *args, struct view v, uint32_t head_dim, uint32_t row,
                   const float *angles)
{
    uint32_t apart = args->interleaved ? 1 : args->n_freqs, tail = args->is_tail ? head_dim - 2 * args->n_freqs : 0;
    for (uint32_t head = 0; head < v.width; head += head_dim)
        for (uint32_t i = 0; i < args->n_freqs; i++) {
            uint32_t c = head + tail + (args->interleaved ? 2 * i : i);
            float a = get(p, v, row, c), b = get(p, v, row, c + apart), cosine = angles[2 * i], sine = angles[2 * i + 1];
            put(p, v, row, c, a * cosine - b * sine);
            put(p, v, row, c + apart, b * cosine + a * sine);
        }
}

static enum rc rope(void *ctx, const struct rope_args *args, struct err *err)
{
    const float *table = at(args->table);
    (void)err;
    for (uint32_t r = 0; r < args->n_rows; r++) {
        const float *angles = table + (size_t)r * args->n_freqs * 2;
        rotate(ctx, args, args->q, args->head_dim, r, angles);
        rotate(ctx, args, args->k, args->k_head_dim ? args->k_head_dim : args->head_dim, r, angles);
    }
    return RC_OK;
}

/* The keys of a position of a sequence; is_value: its values. A layer of a page is [keys | values][block_tokens][width]. */
static void *cached(const struct kv_view *kv, const struct batch_view *batch, int32_t seq, uint32_t position, bool is_value)
{
    const int32_t *table = at(kv->table);
    size_t width = (size_t)kv->n_kv_heads * kv->head_dim;
    size_t page = (size_t)table[(size_t)seq * kv->table_stride + position / batch->block_tokens];
    size_t row = (is_value ? batch->block_tokens : 0) + position % batch->block_tokens;
    size_t row_bytes = width * host->dtype_info(kv->dtype)->block_bytes;
    return (char *)at(kv->pool) + page * kv->page_bytes + kv->layer_offset + row * row_bytes;
}

static enum rc kv_write(void *ctx, const struct kv_write_args *args, struct err *err)
{
    const int32_t *positions = at(args->batch->positions), *seqs = at(args->batch->row_seq);
    const struct kv_view *kv = &args->kv;
    (void)err;
    for (uint32_t r = 0; r < args->batch->n_rows; r++)
        for (uint32_t c = 0; c < args->k.width; c++) {
            uint32_t position = (uint32_t)positions[r];
            store(cached(kv, args->batch, seqs[r], position, false), kv->dtype, c, get(ctx, args->k, r, c));
            store(cached(kv, args->batch, seqs[r], position, true), kv->dtype, c, get(ctx, args->v, r, c));
        }
    return RC_OK;
}

/* One head of one row: q [head_dim] attends to the visible positions up to its own, in ascending order. */
struct query {
    float values[MAX_HEAD_DIM], out[MAX_HEAD_DIM];
    uint32_t head, position;
    int32_t seq;
};

static float score_of(const struct attention_args *args, const struct query *q, uint32_t kv_head, uint32_t j)
{
    const struct kv_view *kv = &args->kv;
    const void *key = cached(kv, args->batch, q->seq, j, false);
    const float *slopes = at(args->slopes);
    float score = 0;
    for (uint32_t c = 0; c < kv->head_dim; c++)
        score += q->values[c] * load(key, kv->dtype, (size_t)kv_head * kv->head_dim + c);
    score *= args->scale;
    if (args->softcap > 0)
        score = args->softcap * tanhf(score / args->softcap);
    return slopes ? score + slopes[q->head] * ((float)j - (float)q->position) : score;
}

static void attend(const struct attention_args *args, struct query *q)
{
    const struct kv_view *kv = &args->kv;
    const float *sinks = at(args->sinks);
    uint32_t kv_head = q->head / (args->n_heads / kv->n_kv_heads), first = 0;
    if (args->chunk)
        first = q->position / args->chunk * args->chunk;
    else if (args->window && q->position >= args->window)
        first = q->position - args->window + 1;
    float most = sinks ? sinks[q->head] : -INFINITY, sum;
    for (uint32_t j = first; j <= q->position; j++)
        most = fmaxf(most, score_of(args, q, kv_head, j));
    sum = sinks ? expf(sinks[q->head] - most) : 0;
    memset(q->out, 0, sizeof q->out);
    for (uint32_t j = first; j <= q->position; j++) {
        const void *value = cached(kv, args->batch, q->seq, j, true);
        float weight = expf(score_of(args, q, kv_head, j) - most);
        sum += weight;
        for (uint32_t c = 0; c < kv->head_dim; c++)
            q->out[c] += weight * load(value, kv->dtype, (size_t)kv_head * kv->head_dim + c);
    }
    for (uint32_t c = 0; c < kv->head_dim; c++)
        q->out[c] /= sum;
}

static enum rc attention(void *ctx, const struct attention_args *args, struct err *err)
{
    const int32_t *positions = at(args->batch->positions), *seqs = at(args->batch->row_seq);
    uint32_t head_dim = args->kv.head_dim;
    struct query q;
    (void)err;
    for (uint32_t r = 0; r < args->batch->n_rows; r++)
        for (q.head = 0; q.head < args->n_heads; q.head++) {
            q.position = (uint32_t)positions[r];
            q.seq = seqs[r];
            for (uint32_t c = 0; c < head_dim; c++)
                q.values[c] = get(ctx, args->q, r, q.head * head_dim + c);
            attend(args, &q);
            for (uint32_t c = 0; c < head_dim; c++)
                put(ctx, args->out, r, q.head * head_dim + c, q.out[c]);
        }
    return RC_OK;
}

/* ---- mixtures of experts: not needed by other models --------------------------------------------------------------------- */

static float rounded(const struct plain *p, float value)
{
    float space;
    store(&space, p->dtype, 0, value);
    return load(&space, p->dtype, 0);
}

/* inner[i] = act(gate_i) * up_i of one expert. */
static void expand(const struct plain *p, const struct experts_args *args, uint32_t row, uint32_t expert, float *inner)
{
    uint32_t n = args->down->n_cols, n_cols = args->up->n_cols;
    const float *bias = at(args->up_bias);
    for (uint32_t i = 0; i < n; i++) {
        size_t gate = (size_t)expert * 2 * n + i, up = gate + n;
        float g = rounded(p, product(p, args->x, row, row_of(args->up, gate), n_cols) + (bias ? bias[gate] : 0));
        float u = rounded(p, product(p, args->x, row, row_of(args->up, up), n_cols) + (bias ? bias[up] : 0));
        inner[i] = rounded(p, activate(args->act, g) * u);
    }
}

/* The scratch has room for the floats of `inner` in each row: 4 * inner values a route. */
static enum rc experts(void *ctx, const struct experts_args *args, struct err *err)
{
    const struct plain *p = ctx;
    const float *bias = at(args->down_bias);
    uint32_t n = args->down->n_cols, width = args->y.width;
    float *inner = at(args->scratch.data);
    if (args->form != EXPERT_GATED || args->is_input_scaled)
        return host->err_set(err, RC_UNSUPPORTED, "plain: wanted experts that are gated, with weights for their outputs");
    for (uint32_t r = 0; r < args->n_rows; r++) {
        const struct route *routes = (const struct route *)at(args->routes) + (size_t)r * args->route_stride;
        for (uint32_t j = 0; j < args->n_chosen; j++)
            expand(p, args, r, (uint32_t)routes[j].expert, inner + (size_t)j * n);
        for (uint32_t c = 0; c < width; c++) {
            float sum = 0;
            for (uint32_t j = 0; j < args->n_chosen; j++) {
                size_t row = (size_t)routes[j].expert * width + c;
                float out = bias ? bias[row] : 0;
                for (uint32_t i = 0; i < n; i++)
                    out += inner[(size_t)j * n + i] * row_of(args->down, row)[i];
                sum += routes[j].weight * rounded(p, out);
            }
            put(p, args->y, r, c, sum);
        }
    }
    return RC_OK;
}

/* ---- the table ----------------------------------------------------------------------------------------------------------- */

static const struct device_traits TRAITS = {
    .size_bytes = sizeof TRAITS, .default_tokens = 64, .default_seqs = 8, .quantised_dtype = DTYPE_F32};

static const struct backend TABLE = {
    .abi = BACKEND_ABI, .size_bytes = sizeof TABLE, .name = "plain", .traits = &TRAITS,
    .open = plain_open, .close = plain_close, .describe = describe, .fusions = fusions, .supports = supports,
    .activations = activations, .buffer_create = buffer_create, .buffer_destroy = buffer_destroy, .upload = upload,
    .download = download, .synchronize = synchronize, .kv_layer_bytes = kv_layer_bytes,
    .matrix_create = matrix_create, .matrix_destroy = matrix_destroy, .matrix_bytes = matrix_bytes,
    .matrix_arithmetic = matrix_arithmetic, .matrix_write = matrix_write, .matrix_read = matrix_read,
    .embed = embed, .linear = linear, .rms_norm = rms_norm, .gated = gated, .add = add, .select = select_rows,
    .rope = rope, .kv_write = kv_write, .attention = attention, .experts = experts,
};

__attribute__((visibility("default"))) const struct backend *llmpy_backend(const struct backend_host *given)
{
    host = given;
    return given->revision < BACKEND_REVISION ? NULL : &TABLE;
}
