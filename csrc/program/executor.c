#include "model_state.h"

/* One step's batch as the device sees it. */
struct running {
    struct model *m;
    struct batch *batch;
    struct batch_view view;
    const int32_t *tables[BATCH_MAX_GROUPS], *logits_rows;
    struct err *err;
};

/* ---- the batch in device memory -------------------------------------------------------------------------------------- */

static enum rc stage(struct running *run, size_t *used, const int32_t *host, size_t count, const int32_t **device)
{
    struct model *m = run->m;
    size_t size_bytes = (count * sizeof *host + 63) & ~(size_t)63;
    if (*used + size_bytes > m->staged_bytes)
        return err_set(run->err, RC_INTERNAL, "batch: wanted at most %zu bytes, have more", m->staged_bytes);
    *device = (const int32_t *)(m->staged + *used);
    enum rc rc = m->backend->upload(m->ctx, m->staged + *used, host, count * sizeof *host, run->err);
    *used += size_bytes;
    return rc;
}

static enum rc stage_batch(struct running *run)
{
    struct batch *b = run->batch;
    size_t used = 0;
    run->view.n_rows = b->n_rows;
    run->view.n_seqs = b->n_seqs;
    run->view.block_tokens = run->m->layout.block_tokens;
    run->view.host_seq_first_row = b->seq_first_row;
    enum rc rc = stage(run, &used, b->token_ids, b->n_rows, &run->view.token_ids);
    if (!rc)
        rc = stage(run, &used, b->positions, b->n_rows, &run->view.positions);
    if (!rc)
        rc = stage(run, &used, b->row_seq, b->n_rows, &run->view.row_seq);
    if (!rc)
        rc = stage(run, &used, b->seq_first_row, b->n_seqs + 1, &run->view.seq_first_row);
    if (!rc)
        rc = stage(run, &used, b->logits_rows, b->n_logits_rows, &run->logits_rows);
    for (uint32_t g = 0; g < run->m->layout.n_groups && !rc; g++)
        rc = stage(run, &used, b->tables + (size_t)g * b->max_seqs * b->table_stride, (size_t)b->max_seqs * b->table_stride,
                   &run->tables[g]);
    return rc;
}

/* ---- steps ------------------------------------------------------------------------------------------------------------- */

static struct view view_of(const struct model *m, struct place place)
{
    return (struct view){place.width ? m->arena + place.offset * m->item_bytes : NULL, place.width, place.stride};
}

static struct kv_view kv_of(const struct running *run, uint32_t layer)
{
    const struct model *m = run->m;
    const struct cache_layer *l = &m->program->layers[layer];
    return (struct kv_view){
        .pool = m->pool,
        .page_bytes = m->layout.page_bytes,
        .layer_offset = m->places[layer].index * m->layout.layer_bytes,
        .table = run->tables[m->places[layer].group],
        .table_stride = run->batch->table_stride,
        .n_kv_heads = l->n_kv_heads,
        .head_dim = l->head_dim,
        .dtype = m->options.kv_dtype,
    };
}

static enum rc run_linear(struct running *run, const struct step *step, uint32_t n_rows, struct view x, struct view y)
{
    struct model *m = run->m;
    struct view add = view_of(m, step->add);
    struct linear_args args = {
        .matrix = weights_matrix(m->weights, step->weight),
        .n_rows = n_rows,
        .x = x,
        .y = y,
        .bias = weights_vector(m->weights, step->bias),
        .add = add.width ? &add : NULL,
        .input = step->input,
        .norm_weight = weights_vector(m->weights, step->norm[0]),
        .norm_eps = step->eps,
        .act = step->act,
        .is_float_out = step->code == STEP_LOGITS,
        .output = step->output,
        .mid = view_of(m, step->mid),
    };
    return m->backend->linear(m->ctx, &args, run->err);
}

static struct rope_args rope_of(const struct running *run, const struct step *step, uint32_t head_dim)
{
    const struct model *m = run->m;
    struct rope_args rope = {run->batch->n_rows, 0, head_dim, false, NULL, view_of(m, step->in[0]), view_of(m, step->in[1])};
    if (step->rope != NO_INDEX) {
        rope.n_freqs = m->program->ropes[step->rope].n_freqs;
        rope.interleaved = m->program->ropes[step->rope].interleaved;
        rope.table = m->rope_tables[step->rope];
    }
    return rope;
}

static enum rc run_cache_step(struct running *run, const struct step *step)
{
    struct model *m = run->m;
    const struct cache_layer *layer = &m->program->layers[step->layer];
    if (step->code == STEP_ATTENTION) {
        struct attention_args args = {&run->view,  kv_of(run, step->layer), layer->n_heads,          layer->window,
                                      step->scale, step->softcap,           view_of(m, step->in[0]), view_of(m, step->out)};
        return m->backend->attention(m->ctx, &args, run->err);
    }
    struct kv_write_args write = {&run->view, kv_of(run, step->layer), view_of(m, step->in[1]), view_of(m, step->in[2])};
    if (step->code == STEP_KV_WRITE)
        return m->backend->kv_write(m->ctx, &write, run->err);
    struct qkv_args args = {weights_vector(m->weights, step->norm[0]), weights_vector(m->weights, step->norm[1]), step->eps,
                            rope_of(run, step, layer->head_dim), write};
    return m->backend->qkv(m->ctx, &args, run->err);
}

/* Logits of the wanted rows and their sampling tasks, as many rows at a time as the buffers hold. */
static enum rc run_logits(struct running *run, const struct step *step)
{
    struct model *m = run->m;
    struct batch *b = run->batch;
    uint32_t task = 0;
    for (uint32_t row = 0; row < b->n_logits_rows; row += m->max_logits_rows) {
        uint32_t n = b->n_logits_rows - row < m->max_logits_rows ? b->n_logits_rows - row : m->max_logits_rows, first = task;
        struct view x = view_of(m, step->in[0]), y = {m->logits, m->program->vocab_size, m->vocab_stride};
        x.data = (char *)x.data + (size_t)row * x.stride * m->item_bytes;
        enum rc rc = run_linear(run, step, n, x, y);
        if (rc)
            return rc;
        for (; task < b->n_tasks && b->tasks[task].logits_row < row + n; task++)
            b->tasks[task].logits_row -= row;
        struct sample_args args = {
            .logits = m->logits, .vocab_size = m->program->vocab_size, .vocab_stride = m->vocab_stride,
            .vocab_limit = b->vocab_limit, .banned = b->banned, .n_banned = b->n_banned,
            .tasks = b->tasks + first, .n_tasks = task - first, .n_logits_rows = n, .results = b->results + first,
            .top_ids = b->top_ids, .top_values = b->top_values, .top_ranks = b->top_ranks,
        };
        rc = m->backend->sample(m->ctx, &args, run->err);
        if (rc)
            return rc;
    }
    return RC_OK;
}

static enum rc run_step(struct running *run, const struct step *step)
{
    struct model *m = run->m;
    uint32_t n_rows = step->on_selected ? run->batch->n_logits_rows : run->batch->n_rows;
    struct view in0 = view_of(m, step->in[0]), in1 = view_of(m, step->in[1]), out = view_of(m, step->out);
    switch (step->code) {
    case STEP_EMBED:
        return m->backend->embed(
            m->ctx,
            &(struct embed_args){weights_matrix(m->weights, step->weight), run->view.token_ids, n_rows, step->scale, out},
            run->err);
    case STEP_LINEAR:
        return run_linear(run, step, n_rows, in0, out);
    case STEP_RMS_NORM:
        return m->backend->rms_norm(
            m->ctx,
            &(struct rms_norm_args){n_rows, step->n_heads, in0, out, weights_vector(m->weights, step->weight), step->eps},
            run->err);
    case STEP_ROPE: {
        struct rope_args args = rope_of(run, step, step->n_heads);
        return m->backend->rope(m->ctx, &args, run->err);
    }
    case STEP_GATED:
        return m->backend->gated(m->ctx, &(struct gated_args){n_rows, step->act, in0, in1, out}, run->err);
    case STEP_ADD:
        return m->backend->add(m->ctx, &(struct add_args){n_rows, in0, in1, out}, run->err);
    case STEP_SELECT:
        return m->backend->select(m->ctx, &(struct select_args){run->batch->n_logits_rows, run->logits_rows, in0, out},
                                  run->err);
    case STEP_LOGITS:
        return run_logits(run, step);
    default:
        return run_cache_step(run, step);
    }
}

static enum rc run_rope_tables(struct running *run)
{
    struct model *m = run->m;
    enum rc rc = RC_OK;
    for (uint32_t r = 0; r < m->program->n_ropes && !rc; r++) {
        struct rope_table_args args = {run->batch->n_rows, m->program->ropes[r].n_freqs, run->view.positions, m->rope_freqs[r],
                                       m->program->ropes[r].magnitude, m->rope_tables[r]};
        rc = m->backend->rope_table(m->ctx, &args, run->err);
    }
    return rc;
}

enum rc model_run(void *ctx, struct batch *batch, struct err *err)
{
    struct model *m = ctx;
    struct running run = {.m = m, .batch = batch, .err = err};
    enum rc rc = stage_batch(&run);
    if (!rc && batch->n_copies)
        rc = m->backend->copy_pages(
            m->ctx, &(struct copy_pages_args){m->pool, m->layout.page_bytes, batch->copies, batch->n_copies}, err);
    if (!rc)
        rc = run_rope_tables(&run);
    for (uint32_t i = 0; i < m->plan.n_steps && !rc; i++) {
        const struct step *step = &m->plan.steps[i];
        if (batch->n_logits_rows || !(step->on_selected || step->code == STEP_SELECT))
            rc = run_step(&run, step);
    }
    return rc ? rc : m->backend->synchronize(m->ctx, err);
}
