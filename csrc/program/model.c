#include "running.h"

#include "../base/mem.h"
#include "backend_library.h"
#include "rank_check.h"
#include "settle.h"

#include <stdio.h>
#include <string.h>

/* Reserves of fill_device. CONTEXT_BYTES of the device's share are left for the driver's context, kernels and graphs.
 * GRAPHS_BYTES of the memory that is free once the context exists are left for graphs. */
#define CONTEXT_BYTES ((uint64_t)1 << 30)
#define GRAPHS_BYTES ((uint64_t)256 << 20)
#define NO_CACHE_BYTES 16 /* of a page of a model without a cache; the engine still counts pages */
#define READ_BYTES ((size_t)256 << 10) /* of states downloaded at once; more if a row is longer */

static enum rc out_of_memory(struct err *err)
{
    return err_set(err, RC_MEMORY, "model: out of memory");
}

static enum rc open_backend(struct model *m, struct err *err)
{
    const struct model_options *o = &m->options;
    enum rc rc = backend_find(o->device, o->library, &m->backend, err);
    if (rc)
        return rc;
    uint32_t max_cols = 1;
    for (uint32_t w = 0; w < m->program->n_weights; w++)
        max_cols = m->program->weights[w].cols > max_cols ? m->program->weights[w].cols : max_cols;
    m->max_logits_rows = o->max_num_seqs > o->max_draft_rows ? o->max_num_seqs : o->max_draft_rows;
    uint32_t tower_rows = m->program->tower ? o->max_encoder_rows * program_row_room(m->program->tower) : 0;
    struct backend_options options = {
        .device = o->device, .isa = o->isa, .n_threads = o->n_threads,
        .max_rows = tower_rows > o->max_num_batched_tokens ? tower_rows : o->max_num_batched_tokens,
        .max_logits_rows = m->max_logits_rows, .max_cols = max_cols, .vocab_size = m->program->vocab_size,
        .dtype = o->weights.dtype == DTYPE_NONE ? DTYPE_F32 : o->weights.dtype, .max_model_len = o->max_model_len,
        .cublaslt = o->cublaslt, .n_ranks = o->n_here ? o->n_here : o->n_ranks,
        .max_loras = o->max_loras,
    };
    for (uint32_t l = 0; l < m->program->n_layers; l++) {
        const struct cache_layer *layer = &m->program->layers[l];
        uint32_t group = layer->n_kv_heads ? layer->n_heads / layer->n_kv_heads : layer->n_heads;
        options.max_group = group > options.max_group ? group : options.max_group;
        options.max_head_dim = layer->head_dim > options.max_head_dim ? layer->head_dim : options.max_head_dim;
    }
    rc = m->backend->open(&options, &m->ctx, err);
    if (!rc)
        m->item_bytes = dtype_info(m->backend->activations(m->ctx))->block_bytes;
    return rc;
}

/* ---- the cache --------------------------------------------------------------------------------------------------------- */

size_t model_needs(const struct model *m, struct kv_need *needs)
{
    const struct program *p = m->program;
    size_t layer_bytes = p->n_layers + p->n_states ? 0 : NO_CACHE_BYTES;
    for (uint32_t l = 0; l < p->n_layers; l++) {
        const struct cache_layer *layer = &p->layers[l];
        size_t size = m->backend->kv_layer_bytes(m->ctx, layer->n_kv_heads, layer->head_dim, m->options.kv_dtype,
                                                 m->options.block_tokens);
        layer_bytes = size > layer_bytes ? size : layer_bytes;
        needs[l] = (struct kv_need){.window = m->options.has_one_group ? 0 : layer->window};
    }
    for (uint32_t i = 0; i < p->n_states; i++)
        needs[p->n_layers + i] = (struct kv_need){0, p->states[i].n_units, p->states[i].unit_floats * sizeof(float)};
    return layer_bytes;
}

enum rc model_lay_cache(struct model *m, const struct kv_need *needs, size_t layer_bytes, struct err *err)
{
    uint32_t n = m->program->n_layers + m->program->n_states;
    m->places = mem_calloc(n + 1, sizeof *m->places);
    if (!m->places)
        return out_of_memory(err);
    return kv_layout_make(needs, n ? n : 1, m->options.block_tokens, layer_bytes, &m->layout, m->places, err);
}

enum rc model_page_bytes(struct program *program, const struct model_options *options, uint64_t *page_bytes, struct err *err)
{
    struct model *m;
    enum rc rc = model_new(program, options, &m, err);
    if (!rc)
        rc = model_open(m, err);
    struct kv_need *needs = rc ? NULL : mem_calloc((size_t)program->n_layers + program->n_states + 1, sizeof *needs);
    if (!rc)
        rc = needs ? model_lay_cache(m, needs, model_needs(m, needs), err) : out_of_memory(err);
    *page_bytes = rc ? 0 : m->layout.page_bytes;
    mem_free(needs);
    model_destroy(m);
    return rc;
}

/* Bytes for a page of the pool, those of a drafter included. */
static uint64_t page_cost(const struct model *m)
{
    return m->layout.page_bytes + m->options.beside_page_bytes;
}

/* The number of pages that one sequence of n tokens needs, including the reserved page 0. */
static uint64_t pages_for(const struct model *m, uint32_t n_tokens)
{
    return 1 + kv_layout_pages(&m->layout, n_tokens, m->options.max_num_batched_tokens);
}

/* The length of one array of the batch: max_num_batched_tokens + 1, rounded up to whole 128-byte lines. */
static size_t array_values(const struct model *m)
{
    return ((size_t)m->options.max_num_batched_tokens + 1 + 31) & ~(size_t)31;
}

static void size_buffers(struct model *m)
{
    const struct model_options *o = &m->options;
    m->vocab_stride = (m->program->vocab_size + 15) & ~15u;
    m->logits_bytes = !program_has_logits(m->program) ? 0 : (size_t)m->max_logits_rows * m->vocab_stride * sizeof(float);
    m->table_stride = kv_layout_stride(&m->layout, o->max_model_len);
    if (m->backend->begin || !m->backend->traits->has_host_memory)
        m->staged_bytes = sizeof(int32_t) *
                          (8 * array_values(m) +
                           (size_t)kv_layout_n_tables(&m->layout) * (o->max_num_seqs + 1) * m->table_stride);
}

static void lay_arrays(struct model *m)
{
    int32_t *at = (int32_t *)m->staged;
    int32_t **arrays[] = {&m->arrays.token_ids,     &m->arrays.positions,   &m->arrays.row_seq,
                          &m->arrays.seq_first_row, &m->arrays.logits_rows, &m->token_types,
                          &m->source_rows,      &m->row_part,           &m->arrays.tables};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++, at += array_values(m))
        *arrays[i] = at;
}

/* The error for a device that has less free memory than the share needs. */
static enum rc refuse_share(const struct model *m, const struct backend_memory *have, uint64_t planned, uint64_t pool,
                            struct err *err)
{
    uint64_t weights = have->held_bytes[MEMORY_WEIGHTS], work = have->held_bytes[MEMORY_WORK] + planned,
             most = have->free_bytes + weights + have->held_bytes[MEMORY_WORK] + CONTEXT_BYTES;
    uint64_t percent = most > GRAPHS_BYTES ? 100 * (most - GRAPHS_BYTES) / have->total_bytes : 0;
    err_set(err, RC_DEVICE_MEMORY,
            "gpu_memory_utilization=%g of %llu bytes: wanted %llu for the KV cache beside %llu of weights and %llu of "
            "activations and workspaces, have %llu free with the weights loaded. 0.%02u would fit, or set "
            "kv_cache_memory_bytes, or close() another engine",
            m->options.memory_share, (unsigned long long)have->total_bytes, (unsigned long long)pool,
            (unsigned long long)weights, (unsigned long long)work, (unsigned long long)have->free_bytes,
            percent < 99 ? (unsigned)percent : 99u);
    if (err) {
        err->code = (int64_t)(pool + planned);
        err->free_bytes = (int64_t)have->free_bytes;
    }
    return RC_DEVICE_MEMORY;
}

/* Chooses the pool's size if the options give none: the device's share less all other memory of this engine. Memory of other
 * processes does not change the size, so the same options give the same pool; if too little is free, this fails. */
static enum rc fill_device(struct model *m, struct err *err)
{
    struct backend_memory have;
    if (!m->backend->memory) {
        err_set(err, RC_CONFIG, "the backend %s does not tell its device's memory; set kv_cache_memory_bytes",
                m->backend->name);
        err_name(err, "kv_cache_memory_bytes", NULL);
        return RC_CONFIG;
    }
    enum rc rc = m->backend->memory(m->ctx, &have, err);
    if (rc)
        return rc;
    uint64_t planned = m->plan.arena_values * m->item_bytes + m->logits_bytes + m->staged_bytes +
                       (uint64_t)m->options.max_num_batched_tokens * program_kept_width(m->program) * m->item_bytes;
    for (uint32_t r = 0; r < m->program->n_ropes; r++)
        planned += m->program->ropes[r].n_freqs * sizeof(float) * (1 + 2 * (uint64_t)m->options.max_num_batched_tokens);
    planned += m->options.beside_bytes + tower_planned_bytes(m);
    uint64_t others = have.held_bytes[MEMORY_WEIGHTS] + have.held_bytes[MEMORY_WORK] + planned + CONTEXT_BYTES,
             share = (uint64_t)(m->options.memory_share * (double)have.total_bytes), pool = share > others ? share - others : 0;
    if (pool && planned + pool + GRAPHS_BYTES > have.free_bytes)
        return refuse_share(m, &have, planned, pool, err);
    m->options.kv_cache_bytes = pool;
    return RC_OK;
}

/* The pool's size for a model without a cache. Its pages hold nothing; there are enough for twice the longest sequence and
 * twice the rows of a step. */
static uint64_t empty_pool_bytes(const struct model *m)
{
    const struct model_options *o = &m->options;
    uint64_t longest = pages_for(m, o->max_model_len), rows = pages_for(m, o->max_num_batched_tokens) + o->max_num_seqs;
    return 2 * (longest + rows) * page_cost(m);
}

enum rc model_size_pool(struct model *m, struct err *err)
{
    size_buffers(m);
    if (!m->program->n_layers && !m->program->n_states)
        m->options.kv_cache_bytes = empty_pool_bytes(m);
    enum rc rc = m->options.kv_cache_bytes ? RC_OK : fill_device(m, err);
    uint64_t pages = m->options.kv_cache_bytes / page_cost(m);
    m->n_pages = pages > INT32_MAX ? INT32_MAX : (uint32_t)pages;
    return rc;
}

/* Lowers max_model_len to what the pages hold, or refuses it. */
static enum rc fit_model_len(struct model *m, struct err *err)
{
    struct model_options *o = &m->options;
    uint32_t fits = 0;
    for (uint32_t step = o->max_model_len; step; step /= 2)
        while ((uint64_t)fits + step <= o->max_model_len && pages_for(m, fits + step) <= m->n_pages)
            fits += step;
    if (fits >= o->max_model_len)
        return RC_OK;
    if (o->fits_model_len && fits) {
        o->max_model_len = fits;
        return RC_OK;
    }
    err_set(err, RC_CONFIG,
            "max_model_len=%u needs %llu bytes of KV cache, %llu available. %u tokens would fit; raise "
            "kv_cache_memory_bytes or lower max_model_len.",
            o->max_model_len, (unsigned long long)(pages_for(m, o->max_model_len) * page_cost(m)),
            (unsigned long long)o->kv_cache_bytes, fits);
    err_name(err, "max_model_len", NULL);
    return RC_CONFIG;
}

/* A backend may lack a type of pages, or have it for some kinds of attention only. */
static enum rc check_pages(const struct model *m, struct err *err)
{
    const char *type = dtype_info(m->options.kv_dtype)->name;
    for (uint32_t l = 0; l < m->program->n_layers; l++) {
        const struct cache_layer *layer = &m->program->layers[l];
        if (m->backend->kv_layer_bytes(m->ctx, layer->n_kv_heads, layer->head_dim, m->options.kv_dtype,
                                       m->options.block_tokens))
            continue;
        err_set(err, RC_UNSUPPORTED, "kv_cache_dtype='%s': the backend %s cannot store %s of %u values so; use 'auto'", type,
                m->backend->name, layer->n_kv_heads ? "heads" : "latents (MLA)", layer->head_dim);
        err_name(err, "kv_cache_dtype", NULL);
        return RC_UNSUPPORTED;
    }
    return RC_OK;
}

static uint32_t default_kv_dtype(const struct model *m)
{
    for (uint32_t w = 0; w < m->program->n_weights; w++)
        if (m->program->weights[w].kind == WEIGHT_MATRIX) {
            uint32_t dtype = weights_stored(m->weights, w, 0);
            if (dtype == DTYPE_F16 || dtype == DTYPE_BF16)
                return dtype;
            break;
        }
    return m->backend->activations(m->ctx);
}

/* ---- buffers ----------------------------------------------------------------------------------------------------------- */

static enum rc buffer(struct model *m, size_t size_bytes, void *pointer, struct err *err)
{
    void *made = NULL;
    enum rc rc = m->backend->buffer_create(m->ctx, size_bytes, &made, err);
    memcpy(pointer, &made, sizeof made);
    return rc;
}

enum rc model_make_ropes(struct model *m, struct err *err)
{
    const struct program *p = m->program;
    m->rope_freqs = mem_calloc(p->n_ropes + 1, sizeof *m->rope_freqs);
    m->rope_tables = mem_calloc(p->n_ropes + 1, sizeof *m->rope_tables);
    m->rope_axes = mem_calloc(p->n_ropes + 1, sizeof *m->rope_axes);
    if (!m->rope_freqs || !m->rope_tables || !m->rope_axes)
        return out_of_memory(err);
    for (uint32_t r = 0; r < p->n_ropes; r++) {
        size_t freqs_bytes = p->ropes[r].n_freqs * sizeof(float),
               table_bytes = 2 * freqs_bytes * m->options.max_num_batched_tokens;
        enum rc rc = buffer(m, freqs_bytes, &m->rope_freqs[r], err);
        if (!rc)
            rc = buffer(m, table_bytes, &m->rope_tables[r], err);
        if (!rc)
            rc = m->backend->upload(m->ctx, m->rope_freqs[r], p->ropes[r].inv_freq, freqs_bytes, err);
        if (!rc && p->ropes[r].n_axes)
            rc = buffer(m, freqs_bytes, &m->rope_axes[r], err);
        if (!rc && p->ropes[r].n_axes)
            rc = m->backend->upload(m->ctx, m->rope_axes[r], p->ropes[r].axes, freqs_bytes, err);
        if (rc)
            return rc;
        m->ropes_bytes += freqs_bytes + table_bytes;
    }
    return RC_OK;
}

void model_free_ropes(struct model *m)
{
    for (uint32_t r = 0; m->rope_freqs && m->rope_tables && m->rope_axes && r < m->program->n_ropes; r++) {
        size_t freqs_bytes = m->program->ropes[r].n_freqs * sizeof(float);
        m->backend->buffer_destroy(m->ctx, m->rope_freqs[r], freqs_bytes);
        m->backend->buffer_destroy(m->ctx, m->rope_axes[r], freqs_bytes);
        m->backend->buffer_destroy(m->ctx, m->rope_tables[r], 2 * freqs_bytes * m->options.max_num_batched_tokens);
    }
    mem_free(m->rope_freqs);
    mem_free(m->rope_tables);
    mem_free(m->rope_axes);
}

static enum rc create_pool(struct model *m, struct err *err)
{
    size_t size_bytes = (size_t)m->n_pages * m->layout.page_bytes;
    if (m->backend->pool_create)
        return m->backend->pool_create(m->ctx, MEMORY_KV, size_bytes, &m->pool, err);
    return m->backend->buffer_create(m->ctx, size_bytes, &m->pool, err);
}

enum rc model_choose_entries(struct model *m, struct err *err)
{
    const struct composed_sizes sizes = {m->options.max_num_batched_tokens, m->max_logits_rows, m->vocab_stride,
                                         m->layout.page_bytes};
    return entries_choose(m->backend, m->ctx, m->program, &sizes, &m->entries, err);
}

static bool spreads_logits(const struct program *p)
{
    for (uint32_t i = 0; i < p->n_ops; i++)
        if (op_spreads_logits(&p->ops[i]))
            return true;
    return false;
}

static size_t kept_bytes(const struct model *m)
{
    return (size_t)m->options.max_num_batched_tokens * m->kept_stride * m->item_bytes;
}

static enum rc create_buffers(struct model *m, struct err *err)
{
    enum rc rc = buffer(m, m->plan.arena_values * m->item_bytes, &m->arena, err);
    if (!rc)
        rc = m->logits_bytes ? buffer(m, m->logits_bytes, &m->logits, err) : RC_OK;
    m->least_shared_rows = ranks_least_shared_rows(m);
    if (!rc && spreads_logits(m->program))
        rc = buffer(m, m->logits_bytes, &m->head_logits, err);
    if (!rc && m->staged_bytes)
        rc = buffer(m, m->staged_bytes, &m->staged, err);
    m->kept_stride = (program_kept_width(m->program) + 15) & ~15u;
    if (!rc && m->kept_stride)
        rc = buffer(m, kept_bytes(m), &m->kept, err);
    if (!rc)
        rc = model_make_ropes(m, err);
    if (!rc)
        rc = create_pool(m, err);
    if (!rc)
        rc = model_make_slots(m, err);
    if (!rc && m->tower)
        rc = tower_make_buffers(m, err);
    if (!rc && program_states_width(m->program)) {
        size_t row_bytes = (size_t)m->plan.steps[m->plan.n_steps - 1].in[0].stride * m->item_bytes;
        m->read_bytes = row_bytes > READ_BYTES ? row_bytes : READ_BYTES;
        if (!(m->read = mem_alloc(m->read_bytes)))
            rc = out_of_memory(err);
    }
    return rc;
}

/* Graph memory is measured as the drop in free device memory, so allocations by other processes meanwhile are counted too. */
static enum rc capture(struct model *m, struct err *err)
{
    struct backend_memory before, after;
    bool is_measured = m->backend->memory && m->backend->memory(m->ctx, &before, NULL) == RC_OK;
    enum rc rc = graphs_capture(m, err);
    if (!rc && is_measured && m->backend->memory(m->ctx, &after, NULL) == RC_OK && after.free_bytes < before.free_bytes)
        m->graphs_bytes = before.free_bytes - after.free_bytes;
    return rc;
}

/* A backend may lack operations that are newer than the backend. */
static enum rc check_operations(const struct model *m, struct err *err)
{
    const struct backend *b = m->backend;
    if (m->program->is_of_rank && m->options.n_ranks < 2)
        return err_set(err, RC_INVALID, "program: wanted the programs of all ranks, have that of one");
    for (const struct program *p = m->program; p; p = p->tower)
        for (uint32_t i = 0; i < p->n_ops; i++)
            if (!operation_is_known(b, &p->ops[i]))
                return err_set(err, RC_UNSUPPORTED, "%s: wanted the operation %s, the backend has none", b->name,
                               op_name(p->ops[i].code));
    return tower_check_backend(m, err);
}

enum rc model_new(struct program *program, const struct model_options *options, struct model **model, struct err *err)
{
    struct model *m = *model = mem_calloc(1, sizeof *m);
    if (!m) {
        program_destroy(program);
        return out_of_memory(err);
    }
    m->program = program;
    m->options = *options;
    return RC_OK;
}

enum rc model_open(struct model *m, struct err *err)
{
    enum rc rc = program_check(m->program, err);
    if (!rc)
        rc = open_backend(m, err);
    return rc ? rc : check_operations(m, err);
}

enum rc model_load(struct model *m, const struct checkpoint *checkpoint, struct err *err)
{
    const bool is_checked = rank_check_is_on(m);
    uint32_t fusions = is_checked ? 0 : lora_fusions(&m->options, m->backend->fusions(m->ctx));
    bool has_qkv = m->backend->qkv && !is_checked;
    enum rc rc = plan_make(m->program, fusions, has_qkv, m->options.max_num_batched_tokens, &m->plan, err);
    if (!rc && m->program->tower)
        rc = tower_plan(m, fusions, err);
    if (!rc)
        rc = weights_load(m->program, checkpoint, &m->options.weights, m->backend, m->ctx, &m->weights, err);
    if (!rc)
        rc = settle_all(m, err);
    if (!rc && m->backend->prepare)
        rc = m->backend->prepare(m->ctx, err);
    if (!rc)
        rc = lora_create(m, err);
    if (!rc && m->options.kv_dtype == DTYPE_NONE)
        m->options.kv_dtype = default_kv_dtype(m);
    return rc ? rc : check_pages(m, err);
}

enum rc model_make_buffers(struct model *m, struct err *err)
{
    enum rc rc = fit_model_len(m, err);
    m->table_stride = kv_layout_stride(&m->layout, m->options.max_model_len);
    if (!rc)
        rc = model_choose_entries(m, err);
    if (!rc)
        rc = create_buffers(m, err);
    if (!rc && m->staged)
        lay_arrays(m);
    if (!rc && rank_check_is_on(m) && !(m->step_sums = mem_calloc(m->plan.n_steps + 1, sizeof *m->step_sums)))
        rc = err_set(err, RC_MEMORY, "LLMPY_SYNC: out of memory");
    return rc;
}

enum rc model_warm(struct model *m, struct err *err)
{
    return program_has_logits(m->program) ? graphs_warm(m, err) : RC_OK;
}

enum rc model_capture(struct model *m, struct err *err)
{
    m->options.device = m->options.isa = m->options.library = m->options.cublaslt = NULL;
    return capture(m, err);
}

void model_destroy(struct model *m)
{
    if (!m)
        return;
    if (m->ctx) {
        m->backend->synchronize(m->ctx, NULL);
        graphs_destroy(m);
        tower_destroy(m);
        weights_destroy(m->weights);
        lora_destroy(m);
        m->backend->buffer_destroy(m->ctx, m->arena, m->plan.arena_values * m->item_bytes);
        if (m->logits)
            m->backend->buffer_destroy(m->ctx, m->logits, m->logits_bytes);
        if (m->head_logits)
            m->backend->buffer_destroy(m->ctx, m->head_logits, m->logits_bytes);
        if (m->kept)
            m->backend->buffer_destroy(m->ctx, m->kept, kept_bytes(m));
        if (m->staged)
            m->backend->buffer_destroy(m->ctx, m->staged, m->staged_bytes);
        m->backend->buffer_destroy(m->ctx, m->pool, (size_t)m->n_pages * m->layout.page_bytes);
        model_free_ropes(m);
        entries_clear(&m->entries);
        m->backend->close(m->ctx);
    }
    plan_clear(&m->plan);
    mem_free(m->step_sums);
    mem_free(m->read);
    mem_free(m->graphs);
    mem_free(m->each_row);
    mem_free(m->places);
    program_destroy(m->program);
    mem_free(m);
}

/* ---- introspection ------------------------------------------------------------------------------------------------------- */

const void *model_kept(const struct model *m, uint32_t *width, uint32_t *stride)
{
    *width = program_kept_width(m->program);
    *stride = m->kept_stride;
    return m->kept;
}

const struct lora *model_lora(const struct model *m)
{
    return &m->lora;
}

const struct kv_layout *model_layout(const struct model *m)
{
    return &m->layout;
}

const struct program *model_program(const struct model *m)
{
    return m->program;
}

const struct weights *model_weights(const struct model *m)
{
    return m->weights;
}

uint32_t model_n_pages(const struct model *m)
{
    return m->n_pages;
}

uint32_t model_max_len(const struct model *m)
{
    return m->options.max_model_len;
}

uint32_t model_n_graphs(const struct model *m)
{
    return m->n_graphs;
}

uint32_t model_kv_dtype(const struct model *m)
{
    return m->options.kv_dtype;
}

uint32_t model_arithmetic(const struct model *m)
{
    for (uint32_t i = 0; i < m->program->n_ops; i++) {
        uint32_t w = m->program->ops[i].code == OP_LINEAR ? m->program->ops[i].weight[0] : NO_INDEX;
        uint32_t dtype = w == NO_INDEX ? DTYPE_F32 : weights_stored(m->weights, w, 0);
        if (dtype != DTYPE_F32 && dtype != DTYPE_F16 && dtype != DTYPE_BF16)
            return m->backend->matrix_arithmetic(weights_matrix(m->weights, w), 0);
    }
    return ARITHMETIC_AUTO;
}

const char *model_description(const struct model *m)
{
    return m->backend->describe(m->ctx);
}

const char *model_on_host(const struct model *m)
{
    return entries_on_host(&m->entries);
}

enum rc model_memory(const struct model *m, struct model_memory *memory, struct err *err)
{
    *memory = (struct model_memory){
        .weights_bytes = weights_bytes(m->weights),
        .kv_bytes = (uint64_t)m->n_pages * m->layout.page_bytes,
        .activations_bytes = m->plan.arena_values * m->item_bytes + m->ropes_bytes + tower_bytes(m),
        .sampler_bytes = m->logits_bytes,
        .staging_bytes = m->staged_bytes,
        .tower_weights_bytes = weights_tower_bytes(m->weights),
        .tower_bytes = tower_bytes(m),
        .features_bytes = tower_features_bytes(m),
        .host_cache_bytes = (uint64_t)m->n_slots * m->layout.page_bytes,
    };
    if ((m->asleep & PART_WEIGHTS) && !m->has_copy) /* if the device uses host memory, the copy is the weights */
        memory->weights_bytes = memory->tower_weights_bytes = 0;
    if (m->asleep & PART_POOL)
        memory->kv_bytes = 0;
    if (!m->backend->memory)
        return RC_OK;
    struct backend_memory have;
    enum rc rc = m->backend->memory(m->ctx, &have, err);
    if (rc)
        return rc;
    memory->weights_bytes = have.held_bytes[MEMORY_WEIGHTS];
    memory->kv_bytes = have.held_bytes[MEMORY_KV];
    memory->workspaces_bytes =
        have.held_bytes[MEMORY_WORK] - memory->activations_bytes - memory->sampler_bytes - memory->staging_bytes;
    memory->graphs_bytes = m->graphs_bytes;
    memory->pinned_bytes = have.held_bytes[MEMORY_PINNED];
    memory->device_total_bytes = have.total_bytes;
    memory->device_free_bytes = have.free_bytes;
    return RC_OK;
}

uint64_t model_allocations(void *ctx)
{
    const struct model *m = ctx;
    return m->backend->allocations ? m->backend->allocations(m->ctx) : 0;
}

bool model_step_text(const struct model *m, uint32_t index, char *text, size_t size_bytes)
{
    return plan_step_text(&m->plan, m->program, index, text, size_bytes);
}
