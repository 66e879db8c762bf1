/* ops_attention.c: attention, and what prepares its queries and keys. */
#include "ops.h"

const char *check_rope(const struct program *p, const struct op *op)
{
    const struct rope_attributes *rope = &op->rope;
    if (p->values[op->in[0]].list || p->values[op->in[0]].per != 1)
        return "a tower's rope turns rows of whole pieces";
    if (rope->rope >= p->n_ropes || !rope->head_dim || 2 * p->ropes[rope->rope].n_freqs > rope->head_dim)
        return "the rope exists and turns at most a head's dimensions";
    if (rope->k_head_dim &&
        (2 * p->ropes[rope->rope].n_freqs > rope->k_head_dim || width_of(p, op->in[1]) % rope->k_head_dim))
        return "keys are heads, of at least the turned dimensions";
    return width_of(p, op->in[0]) == width_of(p, op->out[0]) && width_of(p, op->in[1]) == width_of(p, op->out[1])
               ? NULL
               : "widths stay the same";
}

static struct rope_args rope_of(const struct running *run, const struct op *op, uint32_t head_dim, const struct views *v)
{
    const struct model *m = run->m;
    struct rope_args rope = {.n_rows = run->view.n_rows, .head_dim = head_dim, .q = v->in[0], .k = v->in[1]};
    if (op) {
        const struct rope *table = &m->program->ropes[op->rope.rope];
        rope.k_head_dim = op->rope.k_head_dim;
        rope.is_tail = op->rope.is_tail;
        rope.n_freqs = table->n_freqs;
        rope.interleaved = table->interleaved;
        rope.table = m->rope_tables[op->rope.rope];
    }
    return rope;
}

enum rc run_rope(struct running *run, const struct step *step, const struct views *v)
{
    const struct op *op = step->ops[ROLE_MAIN];
    struct rope_args args = rope_of(run, op, op->rope.head_dim, v);
    return run->m->backend->rope(run->m->ctx, &args, run->err);
}

const char *check_attention(const struct program *p, const struct op *op)
{
    if (op->attention.layer >= p->n_layers)
        return "the cache layer exists";
    const struct cache_layer *layer = &p->layers[op->attention.layer];
    uint32_t q = layer->n_heads * layer->head_dim, kv = layer->n_kv_heads * layer->head_dim;
    if (width_of(p, op->in[0]) != q || width_of(p, op->out[0]) != q || width_of(p, op->in[1]) != kv ||
        width_of(p, op->in[2]) != kv)
        return "q, k and v are heads * head_dim wide";
    for (uint32_t i = 0; i < 2; i++)
        if (op->weight[i] != NO_INDEX && !is_vector(p, op->weight[i], layer->n_heads))
            return "slopes and sinks are vectors of one number a head";
    if (op->attention.spans && op->attention.chunk)
        return "an attention has chunks or spans";
    return op->attention.chunk && op->attention.chunk != layer->window ? "a chunk is the layer's window" : NULL;
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
        .table_stride = m->table_stride,
        .n_kv_heads = l->n_kv_heads,
        .head_dim = l->head_dim,
        .dtype = m->options.kv_dtype,
    };
}

static struct kv_write_args kv_write_of(const struct running *run, const struct step *step, const struct views *v)
{
    return (struct kv_write_args){&run->view, kv_of(run, step->ops[ROLE_MAIN]->attention.layer), v->in[1], v->in[2]};
}

/* The norms of q and k, their rope, and the write to the cache. */
static struct qkv_args qkv_of(const struct running *run, const struct step *step, const struct views *v)
{
    const struct model *m = run->m;
    const struct op *q = step->ops[ROLE_Q_NORM], *k = step->ops[ROLE_K_NORM];
    uint32_t head_dim = m->program->layers[step->ops[ROLE_MAIN]->attention.layer].head_dim;
    const struct weight *weights = m->program->weights;
    bool has_own_norms = q && (weights[q->weight[0]].rows > head_dim || weights[k->weight[0]].rows > head_dim);
    return (struct qkv_args){vector_of(m, q, 0), vector_of(m, k, 0), q ? q->rms_norm.eps : 0,
                             rope_of(run, step->ops[ROLE_ROPE], head_dim, v), kv_write_of(run, step, v),
                             has_own_norms ? head_dim : 0};
}

enum rc run_attention(struct running *run, const struct step *step, const struct views *v)
{
    const struct model *m = run->m;
    const struct op *op = step->ops[ROLE_MAIN];
    const struct attention_attributes *given = &op->attention;
    const struct cache_layer *layer = &m->program->layers[given->layer];
    struct qkv_args heads;
    struct attention_args args = {
        .batch = &run->view, .kv = kv_of(run, given->layer), .n_heads = layer->n_heads, .window = layer->window,
        .scale = given->scale, .softcap = given->softcap, .q = v->in[0], .out = v->out, .slopes = vector_of(m, op, 0),
        .sinks = vector_of(m, op, 1), .chunk = given->chunk, .visible_end = given->spans ? run->visible_end : NULL,
    };
    if (v->in[1].width) { /* the step writes the keys and values, too */
        heads = qkv_of(run, step, v);
        args.heads = &heads;
    }
    return m->backend->attention(m->ctx, &args, run->err);
}

enum rc qkv_run(struct running *run, const struct step *step, const struct views *v)
{
    const struct model *m = run->m;
    if (step->code == STEP_KV_WRITE) {
        struct kv_write_args write = kv_write_of(run, step, v);
        return m->backend->kv_write(m->ctx, &write, run->err);
    }
    struct qkv_args heads = qkv_of(run, step, v);
    return m->backend->qkv(m->ctx, &heads, run->err);
}

const char *check_row_attention(const struct program *p, const struct op *op)
{
    uint32_t n_heads = op->row_attention.n_heads, n_kv_heads = op->row_attention.n_kv_heads;
    uint32_t q = width_of(p, op->in[0]), k = width_of(p, op->in[1]);
    if (!n_heads || !n_kv_heads || n_heads % n_kv_heads || q % n_heads)
        return "query heads are a multiple of key heads";
    if (p->n_layers)
        return "no layer has a cache where rows see later ones";
    if (op->row_attention.segments > 2 || p->values[op->in[0]].per != 1)
        return "segments are those of three tables";
    return k == width_of(p, op->in[2]) && k == q / n_heads * n_kv_heads && width_of(p, op->out[0]) == q
               ? NULL
               : "q, k and v are heads * head_dim wide";
}

enum rc run_row_attention(struct running *run, const struct step *step, const struct views *v)
{
    const struct model *m = run->m;
    const struct row_attention_attributes *given = &step->ops[ROLE_MAIN]->row_attention;
    struct batch_view view = run->piece ? tower_segments(run, given->segments, v->n_rows) : run->view;
    struct row_attention_args args = {&view, given->n_heads, given->n_kv_heads, v->in[0].width / given->n_heads,
                                      given->scale, v->in[0], v->in[1], v->in[2], v->out};
    return m->backend->row_attention(m->ctx, &args, run->err);
}

const char *check_latent_attention(const struct program *p, const struct op *op)
{
    uint32_t number = op->latent_attention.layer;
    if (number >= p->n_layers || p->layers[number].n_kv_heads)
        return "the cache layer exists, for latents";
    const struct cache_layer *layer = &p->layers[number];
    uint32_t latent = width_of(p, op->in[2]), rope = width_of(p, op->in[3]), tails = width_of(p, op->in[1]);
    if (layer->head_dim != latent + rope || tails % layer->n_heads || tails / layer->n_heads < rope)
        return "a layer's row is latent and rope key, and every head has the latter at its end";
    return width_of(p, op->in[0]) == layer->n_heads * latent && width_of(p, op->out[0]) == layer->n_heads * latent
               ? NULL
               : "queries and the output are heads * latent wide";
}

enum rc run_latent_attention(struct running *run, const struct step *step, const struct views *v)
{
    const struct model *m = run->m;
    const struct op *op = step->ops[ROLE_MAIN];
    uint32_t layer = op->latent_attention.layer;
    struct latent_attention_args args = {
        &run->view, kv_of(run, layer), m->program->layers[layer].n_heads, op->latent_attention.scale,
        v->in[0], v->in[1], v->in[2], v->in[3], v->out};
    return m->backend->latent_attention(m->ctx, &args, run->err);
}
