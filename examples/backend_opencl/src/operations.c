/* operations.c: one launcher an operation, and the table of the backend. What is NULL in the table the core composes, or it
 * refuses models that need it. */
#include "device.h"

const struct backend_host *host;

/* ---- rows ---------------------------------------------------------------------------------------------------------------- */

static enum rc embed(void *ctx, const struct embed_args *args, struct err *err)
{
    const struct matrix *m = args->matrix;
    const struct block *last = &m->blocks[m->n_blocks - 1];
    enum rc rc = RC_OK;
    for (uint32_t i = 0; i < m->n_blocks && !rc; i++) {
        const struct block *b = &m->blocks[i];
        rc = launch(ctx, KERNEL_embed, m->n_cols, args->n_rows, GROUP, err, "puuuuupuuuufpu", b->items, b->dtype, b->first_row,
                    b->n_rows, last->first_row + last->n_rows, m->n_cols, args->token_ids, args->token_ids != NULL,
                    args->first_id, args->end_id, args->first_row, args->scale, args->out.data, args->out.stride);
    }
    return rc;
}

static enum kernel linear_kernel(uint32_t dtype, bool is_row)
{
    if (dtype == DTYPE_F16)
        return is_row ? KERNEL_linear_row_f16 : KERNEL_linear_rows_f16;
    if (dtype == DTYPE_BF16)
        return is_row ? KERNEL_linear_row_bf16 : KERNEL_linear_rows_bf16;
    return is_row ? KERNEL_linear_row_f32 : KERNEL_linear_rows_f32;
}

/* Kernels for one row and for more rows have one order of sums. */
static enum rc linear(void *ctx, const struct linear_args *args, struct err *err)
{
    struct device *d = ctx;
    const struct matrix *m = args->matrix;
    bool is_row = args->n_rows == 1;
    size_t n_groups = is_row ? 1 : (args->n_rows + LINEAR_ROWS - 1) / LINEAR_ROWS;
    enum rc rc = RC_OK;
    if (args->input != LINEAR_PLAIN || args->output != LINEAR_SUM || args->add || args->delta)
        return host->err_set(err, RC_UNSUPPORTED, "opencl: wanted a linear that is not fused");
    for (uint32_t i = 0; i < m->n_blocks && args->n_rows && !rc; i++) {
        const struct block *b = &m->blocks[i];
        rc = launch(d, linear_kernel(b->dtype, is_row), (b->n_rows + PANEL - 1) / PANEL, n_groups, d->linear_group, err,
                    "puppupuuuu", args->x.data, args->x.stride, b->items, args->bias ? args->bias + b->first_row : NULL,
                    args->bias != NULL, (float *)args->y.data + b->first_row, args->y.stride, args->n_rows, b->n_rows,
                    m->n_cols);
    }
    return rc;
}

static enum rc rms_norm(void *ctx, const struct rms_norm_args *args, struct err *err)
{
    return launch(ctx, KERNEL_rms_norm, (size_t)args->n_heads * GROUP, args->n_rows, GROUP, err, "pupuupuuf", args->x.data,
                  args->x.stride, args->weight, args->weight != NULL, args->weight_stride, args->out.data, args->out.stride,
                  args->x.width / args->n_heads, args->eps);
}

static enum rc layer_norm(void *ctx, const struct layer_norm_args *args, struct err *err)
{
    return launch(ctx, KERNEL_layer_norm, (size_t)args->n_heads * GROUP, args->n_rows, GROUP, err, "pupupuupuuf",
                  args->x.data, args->x.stride, args->weight, args->weight != NULL, args->bias, args->bias != NULL,
                  args->weight_stride, args->out.data, args->out.stride, args->x.width / args->n_heads, args->eps);
}

static enum rc gated(void *ctx, const struct gated_args *args, struct err *err)
{
    bool has_one = args->gate.width == 1;
    return launch(ctx, KERNEL_gated, has_one ? GROUP : args->out.width, args->n_rows, GROUP, err, "puuupupuu", args->gate.data,
                  args->gate.stride, has_one, args->act, args->up.data, args->up.stride, args->out.data, args->out.stride,
                  args->out.width);
}

static enum rc act(void *ctx, const struct act_args *args, struct err *err)
{
    return launch(ctx, KERNEL_act, args->out.width, args->n_rows, GROUP, err, "puufppuu", args->x.data, args->x.stride,
                  args->act, args->limit, args->weights, args->out.data, args->out.stride, args->out.width);
}

static enum rc add(void *ctx, const struct add_args *args, struct err *err)
{
    return launch(ctx, KERNEL_add, args->out.width, args->n_rows, GROUP, err, "pupupuu", args->a.data, args->a.stride,
                  args->b.data, args->b.stride, args->out.data, args->out.stride, args->out.width);
}

static enum rc select_rows(void *ctx, const struct select_args *args, struct err *err)
{
    return launch(ctx, KERNEL_select_rows, args->out.width, args->n_selected, GROUP, err, "pupupuu", args->x.data,
                  args->x.stride, args->rows, (uint32_t)!args->rows, args->out.data, args->out.stride, args->out.width);
}

static enum rc take(void *ctx, const struct take_args *args, struct err *err)
{
    return launch(ctx, KERNEL_take, args->out.width, args->n_rows, GROUP, err, "puppuu", args->x.data, args->x.stride,
                  args->columns, args->out.data, args->out.stride, args->out.width);
}

static enum rc position_scale(void *ctx, const struct position_scale_args *args, struct err *err)
{
    return launch(ctx, KERNEL_position_scale, args->out.width, args->n_rows, GROUP, err, "pupuufpuu", args->x.data,
                  args->x.stride, args->positions, args->every, args->first, args->slope, args->out.data, args->out.stride,
                  args->out.width);
}

static enum rc scale_logits(void *ctx, const struct scale_logits_args *args, struct err *err)
{
    return launch(ctx, KERNEL_scale_logits, args->logits.width, args->n_rows, GROUP, err, "puffu", args->logits.data,
                  args->logits.stride, args->scale, args->softcap, args->logits.width);
}

/* ---- positions and the cache --------------------------------------------------------------------------------------------- */

static enum rc rope_table(void *ctx, const struct rope_table_args *args, struct err *err)
{
    return launch(ctx, KERNEL_rope_table, args->n_freqs, args->n_rows, GROUP, err, "ppfpu", args->positions, args->inv_freq,
                  args->magnitude, args->table, args->n_freqs);
}

static enum rc rotate(void *ctx, const struct rope_args *args, struct view x, uint32_t head_dim, struct err *err)
{
    uint32_t n_pairs = x.width / head_dim * args->n_freqs, first = args->is_tail ? head_dim - 2 * args->n_freqs : 0;
    return launch(ctx, KERNEL_rope, n_pairs, args->n_rows, GROUP, err, "puuuuuup", x.data, x.stride, head_dim, n_pairs,
                  args->n_freqs, first, args->interleaved, args->table);
}

static enum rc rope(void *ctx, const struct rope_args *args, struct err *err)
{
    enum rc rc = rotate(ctx, args, args->q, args->head_dim, err);
    return rc ? rc : rotate(ctx, args, args->k, args->k_head_dim ? args->k_head_dim : args->head_dim, err);
}

static bool is_cached_type(uint32_t dtype)
{
    return dtype == DTYPE_F32 || dtype == DTYPE_F16 || dtype == DTYPE_BF16;
}

static size_t kv_layer_bytes(void *ctx, uint32_t n_kv_heads, uint32_t head_dim, uint32_t dtype, uint32_t block_tokens)
{
    (void)ctx;
    return is_cached_type(dtype) ? (size_t)2 * block_tokens * n_kv_heads * head_dim * host->dtype_info(dtype)->block_bytes : 0;
}

static enum rc kv_write(void *ctx, const struct kv_write_args *args, struct err *err)
{
    const struct kv_view *kv = &args->kv;
    return launch(ctx, KERNEL_kv_write, args->k.width, args->batch->n_rows, GROUP, err, "pzpuuuupppupuu",
                  (char *)kv->pool + kv->layer_offset, kv->page_bytes, kv->table, kv->table_stride, kv->dtype,
                  host->dtype_info(kv->dtype)->block_bytes, args->batch->block_tokens, args->batch->positions,
                  args->batch->row_seq, args->k.data, args->k.stride, args->v.data, args->v.stride, args->k.width);
}

static enum rc copy_pages(void *ctx, const struct copy_pages_args *args, struct err *err)
{
    struct device *d = ctx;
    int32_t code = 0;
    for (uint32_t i = 0; i < args->n_copies && !code; i++) {
        char *source = (char *)args->pool + (size_t)args->copies[i].source * args->page_bytes;
        char *target = (char *)args->pool + (size_t)args->copies[i].target * args->page_bytes;
        code = d->cl.clEnqueueSVMMemcpy(d->queue, 0, target, source, args->page_bytes, 0, NULL, NULL);
    }
    return check(code, "clEnqueueSVMMemcpy", err);
}

static enum rc attention(void *ctx, const struct attention_args *args, struct err *err)
{
    const struct kv_view *kv = &args->kv;
    return launch(ctx, KERNEL_attention, (size_t)args->n_heads * GROUP, args->batch->n_rows, GROUP, err,
                  "pzpuuuupppupuuuuuuffpupupu", (char *)kv->pool + kv->layer_offset, kv->page_bytes, kv->table, kv->table_stride,
                  kv->dtype, host->dtype_info(kv->dtype)->block_bytes, args->batch->block_tokens, args->batch->positions,
                  args->batch->row_seq, args->q.data, args->q.stride, args->out.data, args->out.stride, kv->n_kv_heads,
                  kv->head_dim, args->n_heads / kv->n_kv_heads, args->window, args->chunk, args->scale, args->softcap,
                  args->slopes, args->slopes != NULL, args->sinks, args->sinks != NULL, args->visible_end,
                  args->visible_end != NULL);
}

/* ---- the table ----------------------------------------------------------------------------------------------------------- */

static const char *describe(void *ctx)
{
    return ((struct device *)ctx)->description;
}

static uint32_t fusions(void *ctx)
{
    (void)ctx;
    return FUSION_VISIBLE_END;
}

static uint32_t activations(void *ctx)
{
    (void)ctx;
    return DTYPE_F32;
}

static const struct device_traits TRAITS = {
    .size_bytes = sizeof TRAITS, .default_tokens = 256, .default_seqs = 16, .quantised_dtype = DTYPE_F32};

static const struct backend TABLE = {
    .abi = BACKEND_ABI, .size_bytes = sizeof TABLE, .name = "opencl", .traits = &TRAITS,
    .open = device_open, .close = device_close, .describe = describe, .fusions = fusions, .supports = supports,
    .activations = activations, .device_info = device_describe, .buffer_create = buffer_create,
    .buffer_destroy = buffer_destroy, .upload = upload, .download = download, .synchronize = synchronize,
    .matrix_create = matrix_create, .matrix_destroy = matrix_destroy, .matrix_bytes = matrix_bytes,
    .matrix_arithmetic = matrix_arithmetic, .matrix_write = matrix_write, .matrix_read = matrix_read,
    .kv_layer_bytes = kv_layer_bytes, .embed = embed, .linear = linear, .rms_norm = rms_norm, .layer_norm = layer_norm,
    .gated = gated, .act = act, .add = add, .select = select_rows, .take = take, .position_scale = position_scale,
    .scale_logits = scale_logits, .rope_table = rope_table, .rope = rope, .kv_write = kv_write, .copy_pages = copy_pages,
    .attention = attention,
};

__attribute__((visibility("default"))) const struct backend *llmpy_backend(const struct backend_host *given)
{
    host = given;
    return given->revision < BACKEND_REVISION ? NULL : &TABLE;
}
