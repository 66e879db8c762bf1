#include "composed.h"

#include "../../kernels/cpu/backend_cpu.h"
#include "../base/mem.h"

#include <stdio.h>
#include <string.h>

#define ALIGNMENT 64u

struct composed {
    const struct backend *backend;
    void *ctx;             /* of the backend */
    const struct backend *cpu;
    void *cpu_ctx;
    uint32_t dtype;        /* of activations */
    size_t item_bytes;
    char *scratch;         /* host memory for one call */
    size_t scratch_bytes, used;
    char names[96];        /* of the entries that run on the host */
    bool is_in_steps;      /* one of them runs before sampling, so that no graph can record the step */
};

/* ---- memory of one call ----------------------------------------------------------------------------------------------- */

/* Host memory until the next call; NULL: the sizes given to entries_choose were too small. */
static void *room(struct composed *c, size_t size_bytes, struct err *err)
{
    size_t first = (c->used + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (first + size_bytes > c->scratch_bytes) {
        err_set(err, RC_INTERNAL, "composed: wanted %zu bytes, have %zu", first + size_bytes, c->scratch_bytes);
        return NULL;
    }
    c->used = first + size_bytes;
    return c->scratch + first;
}

/* Replaces a pointer to device memory by one to a copy in host memory. */
static enum rc fetch(struct composed *c, void *pointer, size_t size_bytes, struct err *err)
{
    void *device, *host = room(c, size_bytes, err);
    if (!host)
        return RC_INTERNAL;
    memcpy(&device, pointer, sizeof device);
    memcpy(pointer, &host, sizeof host);
    return size_bytes ? c->backend->download(c->ctx, host, device, size_bytes, err) : RC_OK;
}

static size_t span(uint32_t n_rows, uint32_t stride, uint32_t width)
{
    return n_rows ? (size_t)(n_rows - 1) * stride + width : 0;
}

/* Replaces a view of activations by a copy in host memory, float32 without gaps. */
static enum rc fetch_rows(struct composed *c, struct view *view, uint32_t n_rows, struct err *err)
{
    char *rows = view->data;
    float *values = room(c, (size_t)n_rows * view->width * sizeof *values, err);
    enum rc rc = values ? fetch(c, &rows, span(n_rows, view->stride, view->width) * c->item_bytes, err) : RC_INTERNAL;
    for (uint32_t r = 0; r < n_rows && !rc; r++)
        dtype_to_float(c->dtype, rows + (size_t)r * view->stride * c->item_bytes, values + (size_t)r * view->width,
                       view->width);
    *view = (struct view){values, view->width, view->width};
    return rc;
}

/* Rounds rows that fetch_rows made and uploads them. */
static enum rc store_rows(struct composed *c, const struct view *from, const struct view *to, uint32_t n_rows, struct err *err)
{
    size_t row_bytes = from->width * c->item_bytes;
    char *rounded = room(c, row_bytes, err);
    enum rc rc = rounded ? RC_OK : RC_INTERNAL;
    for (uint32_t r = 0; r < n_rows && !rc; r++) {
        dtype_from_float(c->dtype, (const float *)from->data + (size_t)r * from->stride, rounded, from->width);
        rc = c->backend->upload(c->ctx, (char *)to->data + (size_t)r * to->stride * c->item_bytes, rounded, row_bytes, err);
    }
    return rc;
}

/* ---- entries on the host ---------------------------------------------------------------------------------------------- */

static enum rc composed_rope_table(void *ctx, const struct rope_table_args *args, struct err *err)
{
    struct composed *c = ctx;
    struct rope_table_args host = *args;
    size_t table_bytes = (size_t)args->n_rows * args->n_freqs * 2 * sizeof(float);
    c->used = 0;
    host.table = room(c, table_bytes, err);
    if (args->axes)
        return err_set(err, RC_UNSUPPORTED, "rope_table: the backend has none, and positions with axes are not composed");
    enum rc rc = host.table ? fetch(c, &host.positions, args->n_rows * sizeof(int32_t), err) : RC_INTERNAL;
    if (!rc)
        rc = fetch(c, &host.inv_freq, args->n_freqs * sizeof(float), err);
    if (!rc)
        rc = c->cpu->rope_table(c->cpu_ctx, &host, err);
    return rc ? rc : c->backend->upload(c->ctx, args->table, host.table, table_bytes, err);
}

static enum rc composed_scale_logits(void *ctx, const struct scale_logits_args *args, struct err *err)
{
    struct composed *c = ctx;
    struct scale_logits_args host = *args;
    size_t size_bytes = span(args->n_rows, args->logits.stride, args->logits.width) * sizeof(float);
    c->used = 0;
    enum rc rc = fetch(c, &host.logits.data, size_bytes, err);
    if (!rc)
        rc = c->cpu->scale_logits(c->cpu_ctx, &host, err);
    return rc ? rc : c->backend->upload(c->ctx, args->logits.data, host.logits.data, size_bytes, err);
}

static enum rc composed_spread_logits(void *ctx, const struct spread_logits_args *args, struct err *err)
{
    struct composed *c = ctx;
    struct spread_logits_args host = *args;
    size_t size_bytes = span(args->n_rows, args->out.stride, args->out.width) * sizeof(float);
    c->used = 0;
    enum rc rc = fetch(c, &host.x.data, span(args->n_rows, args->x.stride, args->x.width) * sizeof(float), err);
    if (!rc)
        rc = fetch(c, &host.sources, args->out.width * sizeof(float), err);
    if (!rc && !(host.out.data = room(c, size_bytes, err)))
        rc = RC_INTERNAL;
    if (!rc)
        rc = c->cpu->spread_logits(c->cpu_ctx, &host, err);
    return rc ? rc : c->backend->upload(c->ctx, args->out.data, host.out.data, size_bytes, err);
}

static enum rc composed_position_scale(void *ctx, const struct position_scale_args *args, struct err *err)
{
    struct composed *c = ctx;
    struct position_scale_args host = *args;
    c->used = 0;
    enum rc rc = fetch(c, &host.positions, args->n_rows * sizeof(int32_t), err);
    if (!rc)
        rc = fetch_rows(c, &host.x, args->n_rows, err);
    host.out = host.x;
    if (!rc)
        rc = c->cpu->position_scale(c->cpu_ctx, &host, err);
    return rc ? rc : store_rows(c, &host.out, &args->out, args->n_rows, err);
}

static enum rc composed_route(void *ctx, const struct route_args *args, struct err *err)
{
    struct composed *c = ctx;
    struct route_args host = *args;
    size_t row_bytes = args->n_chosen * sizeof *args->routes;
    c->used = 0;
    host.route_stride = args->n_chosen;
    host.routes = room(c, args->n_rows * row_bytes, err);
    size_t logits_bytes = span(args->n_rows, args->logits_stride, args->n_experts) * sizeof(float);
    enum rc rc = host.routes ? fetch(c, &host.logits, logits_bytes, err) : RC_INTERNAL;
    if (!rc && args->selection_bias)
        rc = fetch(c, &host.selection_bias, args->n_experts * sizeof(float), err);
    if (!rc)
        rc = c->cpu->route(c->cpu_ctx, &host, err);
    for (uint32_t r = 0; r < args->n_rows && !rc; r++)
        rc = c->backend->upload(c->ctx, args->routes + (size_t)r * args->route_stride,
                                host.routes + (size_t)r * host.route_stride, row_bytes, err);
    return rc;
}

/* Samples before it returns, as the contract is without sample_finish. */
static enum rc composed_sample(void *ctx, const struct sample_args *args, struct err *err)
{
    struct composed *c = ctx;
    struct sample_args host = *args;
    c->used = 0;
    enum rc rc = fetch(c, &host.logits, span(args->n_logits_rows, args->vocab_stride, args->vocab_size) * sizeof(float), err);
    return rc ? rc : c->cpu->sample(c->cpu_ctx, &host, err);
}

/* ---- entries that copy ------------------------------------------------------------------------------------------------ */

static enum rc composed_copy_pages(void *ctx, const struct copy_pages_args *args, struct err *err)
{
    struct composed *c = ctx;
    enum rc rc = RC_OK;
    for (uint32_t i = 0; i < args->n_copies && !rc; i++) {
        char *page = (char *)args->pool + (size_t)args->copies[i].source * args->page_bytes;
        c->used = 0;
        rc = fetch(c, &page, args->page_bytes, err);
        if (!rc)
            rc = c->backend->upload(c->ctx, (char *)args->pool + (size_t)args->copies[i].target * args->page_bytes, page,
                                    args->page_bytes, err);
    }
    return rc;
}

/* Only for steps that no graph runs: without padding rows, and with token ids that the host knows. */
static enum rc composed_begin(void *ctx, const struct begin_args *args, struct err *err)
{
    const struct composed *c = ctx;
    const struct {
        int32_t *to;
        const int32_t *from;
        uint32_t n;
    } lists[] = {
        {args->to.token_ids, args->token_ids, args->n_rows},
        {args->to.positions, args->positions, args->n_rows},
        {args->to.row_seq, args->row_seq, args->n_rows},
        {args->to.seq_first_row, args->seq_first_row, args->n_seqs + 1},
        {args->to.logits_rows, args->logits_rows, args->n_logits_rows},
    };
    enum rc rc = RC_OK;
    for (size_t i = 0; i < sizeof lists / sizeof *lists && !rc; i++)
        if (lists[i].n)
            rc = c->backend->upload(c->ctx, lists[i].to, lists[i].from, lists[i].n * sizeof(int32_t), err);
    for (uint32_t i = 0; i < args->n_runs && !rc; i++)
        rc = c->backend->upload(c->ctx, args->to.tables + args->runs[i].first, args->tables + args->runs[i].first,
                                args->runs[i].count * sizeof(int32_t), err);
    return rc;
}

/* ---- the choice ------------------------------------------------------------------------------------------------------- */

bool entry_is_composed(size_t offset)
{
#define ROW(name) || offset == offsetof(struct backend, name)
    return false COMPOSED_ENTRIES(ROW);
#undef ROW
}

/* True if steps of the program call one of the entries that run on the host. */
static bool runs(const struct program *p, size_t entry)
{
    if (entry == offsetof(struct backend, sample))
        return program_has_logits(p);
    if (entry == offsetof(struct backend, rope_table))
        return p->n_ropes;
    for (uint32_t i = 0; i < p->n_ops; i++)
        if (op_entry(p->ops[i].code) == entry ||
            (op_scales_logits(&p->ops[i]) && entry == offsetof(struct backend, scale_logits)) ||
            (op_spreads_logits(&p->ops[i]) && entry == offsetof(struct backend, spread_logits)))
            return true;
    return false;
}

/* Adds an entry to the names if the program runs it on the host. */
static void note(struct composed *c, const struct program *program, size_t entry, const char *name)
{
    size_t used = strlen(c->names);
    if (!runs(program, entry))
        return;
    snprintf(c->names + used, sizeof c->names - used, "%s%s", used ? ", " : "", name);
    c->is_in_steps = c->is_in_steps || entry != offsetof(struct backend, sample);
}

/* An upper bound of what one call takes. */
static size_t scratch_bytes(const struct program *p, const struct composed_sizes *sizes)
{
    size_t rows = sizes->max_rows, widest = 0, n_freqs = 0;
    for (uint32_t v = 0; v < p->n_values; v++)
        widest = p->values[v].width > widest ? p->values[v].width : widest;
    for (uint32_t r = 0; r < p->n_ropes; r++)
        n_freqs = p->ropes[r].n_freqs > n_freqs ? p->ropes[r].n_freqs : n_freqs;
    size_t values = 4 * (rows + 1) * (widest + ALIGNMENT), table = (rows + 1) * (2 * n_freqs + 1),
           logits = (2 * (size_t)sizes->max_logits_rows + 1) * sizes->vocab_stride;
    return (values + table + logits) * sizeof(float) + sizes->page_bytes + 8 * ALIGNMENT;
}

static enum rc compose(const struct backend *backend, void *ctx, const struct program *program,
                       const struct composed_sizes *sizes, struct composed **made, struct err *err)
{
    struct composed *c = *made = mem_calloc(1, sizeof *c);
    if (!c)
        return err_set(err, RC_MEMORY, "composed: out of memory");
    c->backend = backend;
    c->ctx = ctx;
    c->cpu = backend_cpu();
    c->dtype = backend->activations(ctx);
    c->item_bytes = dtype_info(c->dtype)->block_bytes;
    c->scratch_bytes = scratch_bytes(program, sizes);
    c->scratch = mem_map(c->scratch_bytes);
    if (!c->scratch)
        return err_set(err, RC_MEMORY, "composed: no memory for %zu bytes; lower max_num_batched_tokens", c->scratch_bytes);
    struct backend_options options = {.device = "cpu", .isa = "auto", .n_threads = 1, .max_rows = 1, .max_logits_rows = 1,
                                      .max_cols = 1, .vocab_size = program->vocab_size, .dtype = DTYPE_F32};
    return c->cpu->open(&options, &c->cpu_ctx, err);
}

enum rc entries_choose(const struct backend *backend, void *ctx, const struct program *program,
                       const struct composed_sizes *sizes, struct entries *entries, struct err *err)
{
    bool composes_begin = !backend->begin && !backend->traits->has_host_memory, is_whole = !composes_begin;
#define ROW(name) \
    entries->name.run = backend->name; \
    entries->name.ctx = ctx;
    COMPOSED_ENTRIES(ROW)
    ROW(begin)
#undef ROW
#define ROW(name) is_whole = is_whole && backend->name;
    COMPOSED_ENTRIES(ROW)
#undef ROW
    if (is_whole)
        return RC_OK;
    enum rc rc = compose(backend, ctx, program, sizes, &entries->composed, err);
    if (rc)
        return rc;
#define ROW(name) \
    if (!backend->name) { \
        entries->name.run = composed_##name; \
        entries->name.ctx = entries->composed; \
        note(entries->composed, program, offsetof(struct backend, name), #name); \
    }
    COMPOSED_ENTRIES(ROW)
    if (composes_begin)
        ROW(begin)
#undef ROW
    return RC_OK;
}

bool entries_allow_graphs(const struct entries *entries)
{
    return !entries->composed || !entries->composed->is_in_steps;
}

void entries_clear(struct entries *entries)
{
    struct composed *c = entries->composed;
    if (!c)
        return;
    if (c->cpu_ctx)
        c->cpu->close(c->cpu_ctx);
    if (c->scratch)
        mem_unmap(c->scratch, c->scratch_bytes);
    mem_free(c);
    entries->composed = NULL;
}

const char *entries_on_host(const struct entries *entries)
{
    return entries->composed ? entries->composed->names : "";
}
