#include "running.h"

#include "../base/mem.h"

#define ALIGNMENT 64u
#define HEAD_BYTES ALIGNMENT /* rank and scale */

static size_t aligned(size_t size_bytes, size_t to)
{
    return (size_bytes + to - 1) & ~(to - 1);
}

/* Appends a place with n_rows rows of B. */
static void lay_part(struct lora *l, struct lora_place place, uint32_t first_row, uint32_t n_rows)
{
    place.item_bytes = place.use == LORA_LINEAR && l->is_bfloat16 ? sizeof(uint16_t) : sizeof(float);
    size_t rank_bytes = (size_t)l->max_rank * place.item_bytes;
    place.at = (struct lora_part){first_row, n_rows, l->slot_bytes, l->slot_bytes + HEAD_BYTES, 0};
    place.at.b = place.at.a + aligned(rank_bytes * place.n_cols, ALIGNMENT);
    place.bias = place.at.b + aligned(rank_bytes * n_rows, sizeof(float));
    l->slot_bytes = aligned(place.bias + (l->has_biases ? n_rows * sizeof(float) : 0), ALIGNMENT);
    l->parts[l->n_places] = place.at;
    l->places[l->n_places++] = place;
}

/* The place of an embedding; NULL: adapters do not change it. */
static const struct lora_place *embedding_of(const struct lora *l, uint32_t weight)
{
    for (uint32_t i = l->n_places; i && l->places[i - 1].use == LORA_EMBEDDING; i--)
        if (l->places[i - 1].weight == weight)
            return &l->places[i - 1];
    return NULL;
}

struct held_experts lora_held(const struct op *op)
{
    const struct experts_attributes *given = &op->experts;
    if (op->code == OP_EXPERTS)
        return (struct held_experts){given->n_experts, given->first, given->n_local ? given->n_local : given->n_experts,
                                     given->n_chosen};
    if (op->code == OP_EXPERTS_UP)
        return (struct held_experts){op->experts_up.n_experts, 0, op->experts_up.n_experts, op->experts_up.n_chosen};
    if (op->code == OP_EXPERTS_DOWN)
        return (struct held_experts){op->experts_down.n_experts, 0, op->experts_down.n_experts, op->experts_down.n_chosen};
    return (struct held_experts){0};
}

/* How the linears of a program use a weight, if adapters may change them. */
static bool use_of(const struct lora *l, const struct op *op, uint32_t weight, enum lora_use *use)
{
    bool has_experts = lora_held(op).n;
    *use = op->code == OP_LOGITS ? LORA_HEAD : has_experts ? LORA_EXPERTS : LORA_LINEAR;
    if (op->code == OP_EXPERTS && op->weight[1] == weight)
        return l->has_experts;
    if (op->weight[0] != weight)
        return false;
    return op->code == OP_LINEAR || (op->code == OP_LOGITS ? l->has_embeddings : l->has_experts && has_experts);
}

static bool is_embedding(const struct lora *l, const struct op *op, const struct program *p)
{
    return l->has_embeddings && op->code == OP_EMBED && op->embed.source == EMBED_TOKENS && !op->embed.first_row &&
           p->weights[op->weight[0]].n_parts == 1;
}

/* Token ids of an embedding's factors; a rank that has the rows of some ids has the factors of all. */
static uint32_t n_ids_of(const struct op *op, const struct weight *weight)
{
    return op->embed.end_id ? weight->parts[0].dims[0] : weight->rows;
}

/* Lays out a slot: the weights of all linears and, if there is room for them, of experts and of the head, each once; then those
 * of embeddings. */
static void lay(struct lora *l, const struct program *p)
{
    for (uint32_t w = 0; w < p->n_weights; w++) {
        const struct weight *weight = &p->weights[w];
        enum lora_use use = LORA_LINEAR;
        bool is_changed = false;
        for (uint32_t i = 0; i < p->n_ops && !is_changed; i++)
            is_changed = use_of(l, &p->ops[i], w, &use);
        l->first[w] = l->n_places;
        for (uint32_t i = 0, first_row = 0; is_changed && i < weight->n_parts; first_row += weight->parts[i++].rows)
            lay_part(l, (struct lora_place){.weight = w, .part = i, .use = use, .n_cols = weight->cols}, first_row,
                     weight->parts[i].rows);
    }
    l->first[p->n_weights] = l->n_places;
    for (uint32_t i = 0; i < p->n_ops; i++) {
        uint32_t w = p->ops[i].weight[0];
        if (is_embedding(l, &p->ops[i], p) && !embedding_of(l, w))
            lay_part(l, (struct lora_place){
                .weight = w, .use = LORA_EMBEDDING, .n_cols = n_ids_of(&p->ops[i], &p->weights[w])}, 0, p->weights[w].cols);
    }
}

/* Columns of the widest linear, as whole 32s. */
static uint32_t widest_of(const struct program *p)
{
    uint32_t most = 1;
    for (uint32_t i = 0; i < p->n_ops; i++)
        if (p->ops[i].code == OP_LINEAR && p->weights[p->ops[i].weight[0]].rows > most)
            most = p->weights[p->ops[i].weight[0]].rows;
    return (most + 31) & ~31u;
}

/* Values of the scratch for a row: of linears, and of experts. */
static uint32_t linears_width(const struct lora *l, const struct program *p)
{
    uint32_t most = 1;
    for (uint32_t i = 0; i < p->n_ops; i++) {
        if (p->ops[i].code != OP_LINEAR)
            continue;
        const struct weight *weight = &p->weights[p->ops[i].weight[0]];
        uint32_t n = weight->n_parts * ((weight->cols + LORA_CHUNK - 1) / LORA_CHUNK);
        most = n > most ? n : most;
    }
    return most * l->max_rank;
}

static uint32_t experts_width(const struct lora *l, const struct program *p)
{
    uint32_t n_chosen = 0;
    for (uint32_t i = 0; i < p->n_ops && l->has_experts; i++)
        if (lora_held(&p->ops[i]).n_chosen > n_chosen)
            n_chosen = lora_held(&p->ops[i]).n_chosen;
    return n_chosen * 2 * l->max_rank;
}

/* The same for embeddings and the head. */
static uint32_t vocabulary_width(const struct lora *l, const struct program *p)
{
    uint32_t most = l->has_embeddings;
    for (uint32_t i = 0; i < p->n_ops && l->has_embeddings; i++)
        if (p->ops[i].code == OP_LOGITS && p->weights[p->ops[i].weight[0]].n_parts > most)
            most = p->weights[p->ops[i].weight[0]].n_parts;
    return most * l->max_rank;
}

/* n_rows: of linears at a time. */
static size_t scratch_values(const struct model *m, uint32_t n_rows)
{
    const struct lora *l = &m->lora;
    size_t n_of_step = m->options.max_num_batched_tokens,
           n_of_vocabulary = m->max_logits_rows > n_of_step ? m->max_logits_rows : n_of_step,
           each[] = {n_rows * (size_t)linears_width(l, m->program), n_of_step * experts_width(l, m->program),
                     n_of_vocabulary * vocabulary_width(l, m->program)}, most = 0;
    for (uint32_t i = 0; i < 3; i++)
        most = each[i] > most ? each[i] : most;
    return most;
}

uint32_t lora_fusions(const struct model_options *options, uint32_t fusions)
{
    uint32_t hide = FUSION_NORM_LINEAR | FUSION_GATED_LINEAR | FUSION_SSM_INPUTS;
    if (!(fusions & FUSION_LINEAR_DELTA))
        hide |= FUSION_LINEAR_ADD | FUSION_LINEAR_ADD_GATHER | FUSION_LINEAR_GATED | FUSION_ADD_NORM_LINEAR;
    return options->max_loras ? fusions & ~hide : fusions;
}

static enum rc refuse(const struct model *m, const char *what, struct err *err)
{
    err_set(err, RC_UNSUPPORTED, "enable_lora: %s not supported yet on %s; merge the adapter into the checkpoint", what,
            m->backend->name);
    err_name(err, "enable_lora", NULL);
    return RC_UNSUPPORTED;
}

/* Whether struct experts_lora_parts has room for the parts of an expert. */
static bool has_few_parts(const struct program *p)
{
    for (uint32_t i = 0; i < p->n_ops; i++) {
        const struct op *op = &p->ops[i];
        uint32_t n_held = lora_held(op).n_held, n_matrices = op->code == OP_EXPERTS ? 2 : 1;
        for (uint32_t j = 0; n_held && j < n_matrices; j++)
            if (p->weights[op->weight[j]].n_parts > 2 * n_held)
                return false;
    }
    return true;
}

/* Refuses adapters of experts where they cannot be served. */
static enum rc check_experts_of(const struct model *m, struct err *err)
{
    uint32_t fusions = m->backend->fusions(m->ctx);
    if (!(fusions & FUSION_EXPERTS_LORA))
        return refuse(m, "adapters of experts (lora_experts=True) are", err);
    if (m->options.n_ranks > 1 && !(fusions & FUSION_EXPERTS_LORA_RANKS))
        return refuse(m, "adapters of experts (lora_experts=True) with several ranks (tensor_parallel_size) are", err);
    return has_few_parts(m->program) ? RC_OK : refuse(m, "adapters of experts of more than two tensors are", err);
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
    if (m->options.n_here && m->options.n_here < m->options.n_ranks)
        return refuse(m, "adapters of a model on several hosts (nnodes) are", err);
    enum rc rc = m->options.has_lora_experts ? check_experts_of(m, err) : RC_OK;
    if (rc)
        return rc;
    l->has_biases = m->backend->fusions(m->ctx) & FUSION_LORA_BIASES;
    l->has_whole = m->backend->fusions(m->ctx) & FUSION_LORA_WHOLE;
    l->is_bfloat16 = m->options.has_lora_bfloat16 && (m->backend->fusions(m->ctx) & FUSION_LORA_BFLOAT16);
    l->has_embeddings = m->options.has_lora_embeddings;
    if (l->has_embeddings && !l->has_biases)
        return refuse(m, "adapters of embeddings and of the head (lora_embeddings=True) are", err);
    for (uint32_t w = 0; w < p->n_weights; w++)
        n += p->weights[w].n_parts;
    n += p->n_ops; /* embeddings */
    l->n_slots = m->options.max_loras;
    l->max_rank = m->options.max_lora_rank;
    l->has_experts = m->options.has_lora_experts;
    l->places = mem_calloc(n + 1, sizeof *l->places);
    l->parts = mem_calloc(n + 1, sizeof *l->parts);
    l->first = mem_calloc(p->n_weights + 1, sizeof *l->first);
    if (!l->places || !l->parts || !l->first)
        return err_set(err, RC_MEMORY, "adapters: out of memory");
    uint32_t n_rows = m->options.max_num_batched_tokens;
    lay(l, p);
    void *slots = NULL, *scratch = NULL, *delta = NULL;
    rc = m->backend->buffer_create(m->ctx, l->n_slots * l->slot_bytes, &slots, err);
    l->slots = slots;
    if (m->backend->fusions(m->ctx) & FUSION_LINEAR_DELTA) {
        l->delta_rows = n_rows = n_rows < LORA_ROWS ? n_rows : LORA_ROWS;
        l->delta_stride = widest_of(p);
        l->delta_bytes = (size_t)n_rows * l->delta_stride * sizeof(float);
        rc = rc ? rc : m->backend->buffer_create(m->ctx, l->delta_bytes, &delta, err);
        l->delta = delta;
    }
    l->scratch_bytes = scratch_values(m, n_rows) * sizeof(float);
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
    if (l->delta)
        m->backend->buffer_destroy(m->ctx, l->delta, l->delta_bytes);
    adapters_destroy(l->adapters);
    mem_free(l->places);
    mem_free(l->parts);
    mem_free(l->first);
}

static enum rc load_beside(void *ctx, uint32_t slot, const void *image, struct err *err)
{
    const struct lora *first = ctx;
    enum rc rc = RC_OK;
    for (uint32_t rank = 0; rank < first->n_ranks && !rc; rank++) {
        const struct model *m = first->ranks[rank];
        const struct lora *l = &m->lora;
        struct upload_beside_args args = {l->slots + slot * l->slot_bytes, (const char *)image + l->image_offset,
                                          l->slot_bytes};
        rc = m->backend->upload_beside(m->ctx, &args, err);
    }
    return rc;
}

void lora_join(struct model *const *ranks, uint32_t n_ranks)
{
    size_t n_bytes = 0;
    for (uint32_t rank = 0; rank < n_ranks; n_bytes += ranks[rank++]->lora.slot_bytes)
        ranks[rank]->lora.image_offset = n_bytes;
    struct lora *first = &ranks[0]->lora;
    if (!first->adapters)
        return;
    first->ranks = ranks;
    first->n_ranks = n_ranks;
    adapters_set_image_bytes(first->adapters, n_bytes);
    if (ranks[0]->backend->upload_beside)
        adapters_set_load(first->adapters, load_beside, first);
}

enum rc lora_load(struct running *run)
{
    struct model *m = run->m;
    enum rc rc = RC_OK;
    for (uint32_t i = 0; i < run->batch->n_adapter_slots && !rc; i++)
        if (run->batch->adapter_images[i])
            rc = m->backend->upload(m->ctx, m->lora.slots + i * m->lora.slot_bytes,
                                    (const char *)run->batch->adapter_images[i] + m->lora.image_offset, m->lora.slot_bytes,
                                    run->err);
    return rc;
}

/* The arguments for a linear's weight, of rows from first_row on. */
static struct lora_args args_of(const struct running *run, const struct step *step, uint32_t weight, uint32_t first_row)
{
    const struct lora *l = &run->m->lora;
    return (struct lora_args){
        .n_parts = l->first[weight + 1] - l->first[weight], .max_rank = l->max_rank, .parts = l->parts + l->first[weight],
        .slots = l->slots, .slot_bytes = l->slot_bytes, .row_slots = run->row_adapter,
        .rows = step->on_selected ? run->wanted_rows : NULL, .scratch = l->scratch, .is_delta = l->delta != NULL,
        .is_bfloat16 = l->is_bfloat16, .first_row = first_row};
}

/* The rows of a view from `row` on. */
static struct view view_from(const struct model *m, struct view view, uint32_t row)
{
    if (view.width)
        view.data = (char *)view.data + (size_t)row * view.stride * m->item_bytes;
    return view;
}

/* Computes what the adapters of some rows add, then the linear of these rows. */
static enum rc add_in_linear(struct running *run, const struct step *step, uint32_t weight, const struct linear_args *whole,
                             uint32_t first, uint32_t n)
{
    const struct model *m = run->m;
    const struct lora *l = &m->lora;
    struct lora_args lora = args_of(run, step, weight, first);
    struct linear_args linear = *whole;
    struct view add;
    linear.n_rows = lora.n_rows = n;
    linear.x = lora.x = view_from(m, whole->x, first);
    lora.y = (struct view){l->delta, m->program->weights[weight].rows, l->delta_stride};
    lora.base_bias = whole->bias;
    enum rc rc = m->backend->lora(m->ctx, &lora, run->err);
    linear.y = view_from(m, whole->y, first);
    linear.mid = view_from(m, whole->mid, first);
    if (whole->add) {
        add = view_from(m, *whole->add, first);
        linear.add = &add;
    }
    linear.delta = l->delta;
    linear.delta_stride = l->delta_stride;
    return rc ? rc : m->backend->linear(m->ctx, &linear, run->err);
}

/* The parts of an expert's matrix. */
static struct experts_lora_parts parts_of(const struct lora *l, uint32_t weight, uint32_t n_held)
{
    if (weight == NO_INDEX)
        return (struct experts_lora_parts){0};
    const struct lora_part *parts = l->parts + l->first[weight];
    uint32_t n = (l->first[weight + 1] - l->first[weight]) / n_held;
    struct experts_lora_parts found = {.n_parts = n, .step = n_held > 1 ? parts[n].head - parts[0].head : 0};
    for (uint32_t p = 0; p < n; p++)
        found.parts[p] = parts[p];
    return found;
}

const struct experts_lora *lora_experts(const struct running *run, const struct step *step, uint32_t up, uint32_t down,
                                        uint32_t n_held, struct experts_lora *args)
{
    const struct lora *l = &run->m->lora;
    *args = (struct experts_lora){
        .up = parts_of(l, up, n_held), .down = parts_of(l, down, n_held), .max_rank = l->max_rank, .slots = l->slots,
        .slot_bytes = l->slot_bytes, .row_slots = run->row_adapter, .rows = step->on_selected ? run->wanted_rows : NULL,
        .scratch = l->scratch};
    return args;
}

enum rc lora_linear(struct running *run, const struct step *step, uint32_t weight, const struct linear_args *linear)
{
    const struct model *m = run->m;
    const struct lora *l = &m->lora;
    enum rc rc = RC_OK;
    if (l->delta) {
        for (uint32_t first = 0; first < linear->n_rows && !rc; first += l->delta_rows) {
            uint32_t left = linear->n_rows - first;
            rc = add_in_linear(run, step, weight, linear, first, left < l->delta_rows ? left : l->delta_rows);
        }
        return rc;
    }
    struct lora_args args = args_of(run, step, weight, 0);
    args.n_rows = linear->n_rows;
    args.x = linear->x;
    args.y = linear->y;
    args.base_bias = linear->bias;
    rc = m->backend->linear(m->ctx, linear, run->err);
    return rc ? rc : m->backend->lora(m->ctx, &args, run->err);
}

enum rc lora_embedding(struct running *run, uint32_t weight, const struct embed_args *embed)
{
    const struct model *m = run->m;
    const struct lora *l = &m->lora;
    const struct lora_place *place = embedding_of(l, weight);
    if (!place)
        return RC_OK;
    struct lora_args args = {
        .n_rows = embed->n_rows, .n_parts = 1, .max_rank = l->max_rank, .parts = &place->at, .slots = l->slots,
        .slot_bytes = l->slot_bytes, .row_slots = run->row_adapter, .x = {NULL, place->n_cols, 0}, .y = embed->out,
        .scratch = l->scratch, .token_ids = embed->token_ids, .factor = embed->scale,
        .first_id = embed->first_id, .end_id = embed->end_id};
    return m->backend->lora(m->ctx, &args, run->err);
}

enum rc lora_head(struct running *run, const struct step *step, uint32_t row, const struct linear_args *linear)
{
    const struct lora *l = &run->m->lora;
    uint32_t weight = step->ops[ROLE_MAIN]->weight[0];
    struct lora_args args = args_of(run, step, weight, row);
    if (!l->has_embeddings || l->first[weight] == l->first[weight + 1])
        return RC_OK;
    args.is_delta = args.is_bfloat16 = false;
    args.n_rows = linear->n_rows;
    args.x = linear->x;
    args.y = linear->y;
    args.rows = run->wanted_rows + row;
    args.base_bias = linear->bias;
    return run->m->backend->lora(run->m->ctx, &args, run->err);
}
