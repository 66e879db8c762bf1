#include "running.h"

#include "../base/mem.h"

#define HEAD_BYTES 64u /* rank and scale; what follows stays aligned */

static size_t aligned(size_t size_bytes)
{
    return (size_bytes + 63) & ~(size_t)63;
}

/* Appends the parts of a weight to the layout. */
static void lay_weight(struct lora *l, const struct program *p, uint32_t w, uint32_t *widest)
{
    const struct weight *weight = &p->weights[w];
    uint32_t first_row = 0;
    for (uint32_t i = 0; i < weight->n_parts; first_row += weight->parts[i++].rows) {
        struct lora_part at = {first_row, weight->parts[i].rows, l->slot_bytes, l->slot_bytes + HEAD_BYTES, 0};
        at.b = at.a + aligned((size_t)l->max_rank * weight->cols * sizeof(float));
        l->slot_bytes = at.b + aligned((size_t)l->max_rank * at.n_rows * sizeof(float));
        l->places[l->n_places] = (struct lora_place){w, i, at};
        l->parts[l->n_places++] = at;
    }
    *widest = weight->n_parts > *widest ? weight->n_parts : *widest;
}

/* Lays out a slot: the weights of all linears, each once. Returns the most parts of a weight. */
static uint32_t lay(struct lora *l, const struct program *p)
{
    uint32_t widest = 1;
    for (uint32_t w = 0; w < p->n_weights; w++) {
        bool is_linear = false;
        for (uint32_t i = 0; i < p->n_ops; i++)
            is_linear |= p->ops[i].code == OP_LINEAR && p->ops[i].weight[0] == w;
        l->first[w] = l->n_places;
        if (is_linear)
            lay_weight(l, p, w, &widest);
    }
    l->first[p->n_weights] = l->n_places;
    return widest;
}

static enum rc refuse(const struct model *m, const char *what, struct err *err)
{
    err_set(err, RC_UNSUPPORTED, "enable_lora: %s not supported yet on %s; merge the adapter into the checkpoint", what,
            m->backend->name);
    err_name(err, "enable_lora", NULL);
    return RC_UNSUPPORTED;
}

enum rc lora_create(struct model *m, struct err *err)
{
    const struct program *p = m->program;
    struct lora *l = &m->lora;
    uint32_t n = 0;
    if (!m->options.max_loras)
        return RC_OK;
    if (!m->backend->lora)
        return refuse(m, "adapters are", err);
    if (m->options.n_ranks > 1)
        return refuse(m, "adapters of a model with several ranks (tensor_parallel_size) are", err);
    for (uint32_t w = 0; w < p->n_weights; w++)
        n += p->weights[w].n_parts;
    l->n_slots = m->options.max_loras;
    l->max_rank = m->options.max_lora_rank;
    l->places = mem_calloc(n + 1, sizeof *l->places);
    l->parts = mem_calloc(n + 1, sizeof *l->parts);
    l->first = mem_calloc(p->n_weights + 1, sizeof *l->first);
    if (!l->places || !l->parts || !l->first)
        return err_set(err, RC_MEMORY, "adapters: out of memory");
    uint32_t widest = lay(l, p);
    l->scratch_bytes = (size_t)m->options.max_num_batched_tokens * widest * l->max_rank * sizeof(float);
    void *slots = NULL, *scratch = NULL;
    enum rc rc = m->backend->buffer_create(m->ctx, l->n_slots * l->slot_bytes, &slots, err);
    l->slots = slots;
    if (!rc)
        rc = m->backend->buffer_create(m->ctx, l->scratch_bytes, &scratch, err);
    l->scratch = scratch;
    return rc ? rc : adapters_create(l->n_slots, l->slot_bytes, &l->adapters, err);
}

void lora_destroy(struct model *m)
{
    struct lora *l = &m->lora;
    if (l->slots)
        m->backend->buffer_destroy(m->ctx, l->slots, l->n_slots * l->slot_bytes);
    if (l->scratch)
        m->backend->buffer_destroy(m->ctx, l->scratch, l->scratch_bytes);
    adapters_destroy(l->adapters);
    mem_free(l->places);
    mem_free(l->parts);
    mem_free(l->first);
}

enum rc lora_load(struct running *run)
{
    struct model *m = run->m;
    enum rc rc = RC_OK;
    for (uint32_t i = 0; i < run->batch->n_adapter_slots && !rc; i++)
        if (run->batch->adapter_images[i])
            rc = m->backend->upload(m->ctx, m->lora.slots + i * m->lora.slot_bytes, run->batch->adapter_images[i],
                                    m->lora.slot_bytes, run->err);
    return rc;
}

enum rc lora_add(struct running *run, const struct step *step, const struct views *v)
{
    const struct model *m = run->m;
    const struct lora *l = &m->lora;
    uint32_t w = step->ops[ROLE_MAIN]->weight[0];
    struct lora_args args = {
        .n_rows = v->n_rows, .n_parts = l->first[w + 1] - l->first[w], .max_rank = l->max_rank,
        .parts = l->parts + l->first[w], .slots = l->slots, .slot_bytes = l->slot_bytes, .row_slots = run->row_adapter,
        .rows = step->on_selected ? run->wanted_rows : NULL, .x = v->in[0], .y = v->out, .scratch = l->scratch};
    return m->backend->lora(m->ctx, &args, run->err);
}
