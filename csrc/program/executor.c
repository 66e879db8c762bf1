#include "rank_check.h"

#include "../base/mem.h"

#include <stdio.h>

/* ---- the batch in device memory -------------------------------------------------------------------------------------- */

static void use_arrays(struct running *run, const struct batch_arrays *arrays, uint32_t n_rows, uint32_t n_seqs,
                       uint32_t n_logits_rows, uint32_t n_state_rows)
{
    const struct model *m = run->m;
    run->view.n_rows = n_rows;
    run->view.n_seqs = n_seqs;
    run->view.token_ids = arrays->token_ids;
    run->view.positions = arrays->positions;
    run->view.row_seq = arrays->row_seq;
    run->view.seq_first_row = arrays->seq_first_row;
    run->view.block_tokens = m->layout.block_tokens;
    run->wanted_rows = arrays->logits_rows;
    run->n_logits_rows = n_logits_rows;
    run->n_wanted_rows = n_logits_rows + n_state_rows;
    for (uint32_t g = 0; g < kv_layout_n_tables(&m->layout); g++)
        run->tables[g] = arrays->tables + (size_t)g * (m->options.max_num_seqs + 1) * m->table_stride;
}

/* The first position behind all rows of a batch with prompts; 0 for a batch without. */
static uint32_t end_of_prompts(const struct batch *b)
{
    int32_t most = -1;
    for (uint32_t i = 0; i < b->n_rows && b->n_seqs < b->n_rows; i++)
        most = b->positions[i] > most ? b->positions[i] : most;
    return (uint32_t)(most + 1);
}

/* Copies the batch to the device, unless the device uses host memory and reads the batch there. For a graph it is padded to the
 * graph's rows. captured: NULL: no graph. */
static enum rc begin_batch(struct running *run, const struct captured *captured)
{
    struct model *m = run->m;
    struct batch *b = run->batch;
    const struct page_tables *t = b->tables;
    if (t->stride != m->table_stride || t->max_seqs != m->options.max_num_seqs || t->n_groups != kv_layout_n_tables(&m->layout))
        return err_set(run->err, RC_INTERNAL, "batch: wanted %u groups of %u page tables of %u entries, have %u of %u of %u",
                       kv_layout_n_tables(&m->layout), m->options.max_num_seqs, m->table_stride, t->n_groups, t->max_seqs,
                       t->stride);
    run->view.host_seq_first_row = b->seq_first_row;
    run->view.shares_new_keys = b->shares_new_keys;
    run->view.max_tokens = end_of_prompts(b);
    run->has_adapters = b->has_adapters;
    run->is_carried = b->is_carried;
    run->source_rows = b->source_rows;
    if (!m->staged) {
        run->row_adapter = b->row_adapter;
        struct batch_arrays host = {b->token_ids,     b->positions,   b->row_seq,
                                    b->seq_first_row, b->logits_rows, b->tables->pages};
        use_arrays(run, &host, b->n_rows, b->n_seqs, b->n_logits_rows, b->n_state_rows);
        run->token_types = b->has_types ? b->token_types : NULL;
        return RC_OK;
    }
    use_arrays(run, &m->arrays, b->n_rows, b->n_seqs, b->n_logits_rows, b->n_state_rows);
    uint32_t n_rows = captured ? captured->n_rows : b->n_rows;
    enum rc rc = RC_OK;
    if (m->program->is_by_data) {
        rc = m->backend->upload(m->ctx, m->row_part, run->row_part, run->n_all_rows * sizeof *run->row_part, run->err);
        run->row_part = m->row_part;
    }
    if (rc)
        return rc;
    struct begin_args args = {
        .slot = b->slot, .n_rows = b->n_rows, .n_seqs = captured ? b->n_rows : b->n_seqs, .n_logits_rows = run->n_wanted_rows,
        .n_pad_rows = n_rows - b->n_rows, .pad_row_seq = m->options.max_num_seqs, .token_ids = b->token_ids,
        .positions = b->positions, .row_seq = b->row_seq,
        .seq_first_row = captured ? m->each_row : b->seq_first_row, .logits_rows = b->logits_rows,
        .tables = t->pages, .runs = t->runs, .n_runs = t->n_runs, .to = m->arrays,
        .row_adapters = b->has_adapters ? b->row_adapter : NULL, .has_adapters = b->has_adapters,
    };
    rc = RUN_ENTRY(m, begin, &args, run->err);
    if (!rc && program_is_head(m->program)) {
        run->source_rows = m->source_rows;
        rc = m->backend->upload(m->ctx, m->source_rows, b->source_rows, b->n_rows * sizeof *b->source_rows, run->err);
    }
    if (rc || !b->has_types)
        return rc;
    run->token_types = m->token_types;
    return m->backend->upload(m->ctx, m->token_types, b->token_types, b->n_rows * sizeof *b->token_types, run->err);
}

/* ---- steps ------------------------------------------------------------------------------------------------------------- */

/* By data a rank may have no rows, and then works on those of other ranks alone. */
static bool has_no_rows(const struct running *run)
{
    return run->m->program->is_by_data && !run->view.n_rows;
}

enum rc rope_tables_run(struct running *run)
{
    struct model *m = run->m;
    enum rc rc = RC_OK;
    for (uint32_t r = 0; r < m->program->n_ropes && !has_no_rows(run) && !rc; r++) {
        const struct rope *rope = &m->program->ropes[r];
        struct rope_table_args args = {run->view.n_rows, rope->n_freqs, run->view.positions, m->rope_freqs[r], rope->magnitude,
                                       m->rope_tables[r], .axes = m->rope_axes[r], .axis_stride = run->axis_stride};
        if (rope->n_axes && run->rope_positions)
            args.positions = run->rope_positions;
        else
            args.axis_stride = 0; /* all axes have the row's position, as in a text without images */
        rc = RUN_ENTRY(m, rope_table, &args, run->err);
    }
    return rc;
}

/* Waits until step i has ended, so that an error names the step that faulted. */
static enum rc wait_for(struct running *run, uint32_t i)
{
    char text[256] = "", reason[sizeof run->err->message];
    enum rc rc = run->m->backend->synchronize(run->m->ctx, run->err);
    if (!rc)
        return RC_OK;
    struct err fault = *run->err;
    plan_step_text(&run->m->plan, run->m->program, i, text, sizeof text);
    snprintf(reason, sizeof reason, "%s", fault.message);
    err_set(run->err, rc, "operation %u (%s): %.240s", i, text, reason);
    run->err->code = fault.code;
    err_name(run->err, fault.what, NULL);
    return rc;
}

enum rc program_run(struct running *run)
{
    struct model *m = run->m;
    uint32_t first = run->is_carried ? m->plan.first_carried : run->first_step;
    uint32_t end = run->end_step ? run->end_step : m->plan.n_steps;
    enum rc rc = run->first_step ? RC_OK : rope_tables_run(run);
    for (uint32_t i = first; i < end && !rc; i++) {
        const struct step *step = &m->plan.steps[i];
        if (!run->n_wanted_rows && (step->on_selected || step->code == STEP_SELECT))
            continue;
        if (has_no_rows(run) && !step->of_all_ranks)
            continue;
        rc = step_run(run, step);
        if (!rc && m->options.is_synchronous)
            rc = wait_for(run, i);
        if (!rc && m->step_sums)
            rc = rank_check_note(run, i);
    }
    return rc;
}

/* ---- graphs ------------------------------------------------------------------------------------------------------------ */

/* The smallest graph size above n rows. */
static uint32_t next_size(uint32_t n)
{
    static const uint32_t sizes[] = {1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256};
    for (uint32_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (sizes[i] > n)
            return sizes[i];
    return n + 64;
}

static struct batch_view view_of_graph(const struct model *m, const struct captured *graph)
{
    return (struct batch_view){.host_seq_first_row = m->each_row, .max_tokens = graph->max_tokens,
                               .shares_new_keys = graph->shares_new_keys};
}

static enum rc warm(struct model *m, struct captured *graph, struct err *err)
{
    const uint32_t n = graph->n_rows;
    struct running run = {.m = m, .err = err, .view = view_of_graph(m, graph), .has_adapters = graph->has_adapters,
                          .source_rows = m->source_rows, .is_carried = program_is_head(m->program),
                          .is_drawn_at_once = true};
    struct begin_args args = {.n_pad_rows = n, .pad_row_seq = m->options.max_num_seqs, .seq_first_row = m->each_row,
                              .to = m->arrays, .has_adapters = graph->has_adapters};
    use_arrays(&run, &m->arrays, n, n, n, 0);
    tower_use(&run);
    enum rc rc = ranks_meet(&run, (struct meet_args){0});
    if (!rc)
        rc = m->backend->begin(m->ctx, &args, err);
    return rc ? rc : program_run(&run);
}

static enum rc capture(struct model *m, struct captured *graph, struct err *err)
{
    const uint32_t n = graph->n_rows;
    struct running run = {.m = m, .err = err, .view = view_of_graph(m, graph), .has_adapters = graph->has_adapters,
                          .source_rows = m->source_rows, .is_carried = program_is_head(m->program),
                          .is_drawn_at_once = true};
    use_arrays(&run, &m->arrays, n, n, n, 0);
    tower_use(&run);
    enum rc rc = m->backend->graph_begin(m->ctx, err);
    if (rc)
        return rc;
    rc = program_run(&run);
    enum rc end = m->backend->graph_end(m->ctx, &graph->graph, rc ? NULL : err);
    if (rc && graph->graph) { /* the core refused an operation, of which the recording does not know */
        m->backend->graph_destroy(m->ctx, graph->graph);
        graph->graph = NULL;
    }
    return rc ? rc : end;
}

typedef enum rc (*graph_function)(struct model *m, struct captured *graph, struct err *err);

/* Calls a function for every graph, and waits for its work. */
static enum rc for_graphs(struct model *m, graph_function call, struct err *err)
{
    enum rc rc = RC_OK;
    if (!m->n_graphs)
        return RC_OK;
    for (uint32_t i = 0; i < m->n_graphs && !rc; i++)
        rc = call(m, &m->graphs[i], err);
    return rc ? rc : m->backend->synchronize(m->ctx, err);
}

/* Rows of the graphs of steps with drafts: one to eight sequences of two to eight rows fit closely. */
static const uint32_t DRAFT_ROWS[] = {2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, MOST_GRAPH_ROWS};
#define N_DRAFT_ROWS (sizeof DRAFT_ROWS / sizeof *DRAFT_ROWS)

/* Lists the graphs of steps with drafts. The rows of a sequence run side by side, so a recurrent state has none. */
static void list_draft_graphs(struct model *m)
{
    bool can_split = !m->program->n_states && !program_takes_whole_prompts(m->program);
    for (uint32_t i = 0; can_split && i < N_DRAFT_ROWS && DRAFT_ROWS[i] <= m->options.max_draft_rows; i++)
        m->graphs[m->n_graphs++] = (struct captured){.n_rows = DRAFT_ROWS[i], .shares_new_keys = true};
}

/* Lists each graph once more for batches with adapters. */
static void list_adapter_graphs(struct model *m)
{
    uint32_t n = m->options.max_loras ? m->n_graphs : 0;
    for (uint32_t i = 0; i < n; i++) {
        m->graphs[m->n_graphs] = m->graphs[i];
        m->graphs[m->n_graphs++].has_adapters = true;
    }
}

enum rc graphs_warm(struct model *m, struct err *err)
{
    uint32_t most = m->options.max_num_seqs, n_sizes = N_DRAFT_ROWS;
    /* A process group that has ended cannot be freed while a graph holds its calls. */
    bool has_group = m->options.n_here && m->options.n_here < m->options.n_ranks;
    if (program_is_head(m->program) && !m->plan.first_carried)
        return RC_OK; /* every batch of such a head reads rows of its model */
    if (!m->backend->graph_begin || !m->backend->begin || !entries_allow_graphs(&m->entries) || m->options.is_eager ||
        m->options.is_synchronous || has_group || m->program->is_by_data)
        return RC_OK;
    for (uint32_t n = 0; n < most; n = next_size(n))
        n_sizes++;
    m->graphs = mem_calloc((size_t)4 * n_sizes, sizeof *m->graphs);
    m->each_row = mem_alloc(((size_t)m->max_logits_rows + 1) * sizeof *m->each_row);
    if (!m->graphs || !m->each_row)
        return err_set(err, RC_MEMORY, "graphs: out of memory");
    for (uint32_t i = 0; i <= m->max_logits_rows; i++)
        m->each_row[i] = (int32_t)i;
    for (uint32_t n = 0; n < most;) {
        n = next_size(n) < most ? next_size(n) : most;
        for (uint32_t is_any = n > m->backend->traits->short_rows; is_any < 2; is_any++)
            m->graphs[m->n_graphs++] =
                (struct captured){.n_rows = n, .max_tokens = is_any ? 0 : m->backend->traits->short_tokens};
    }
    list_draft_graphs(m);
    list_adapter_graphs(m);
    enum rc rc = for_graphs(m, warm, err);
    return rc || m->options.n_ranks == 1 ? rc : m->backend->comm->check(m->ctx, err);
}

enum rc graphs_capture(struct model *m, struct err *err)
{
    return for_graphs(m, capture, err);
}

void graphs_destroy(struct model *m)
{
    for (uint32_t i = 0; i < m->n_graphs && m->graphs[i].graph; i++) {
        m->backend->graph_destroy(m->ctx, m->graphs[i].graph);
        m->graphs[i].graph = NULL;
    }
}

enum rc graphs_refresh(struct model *m, struct err *err)
{
    bool is_stale = false;
    if (!m->backend->refresh)
        return RC_OK;
    enum rc rc = m->backend->refresh(m->ctx, &(struct refresh_args){&is_stale}, err);
    if (rc || !is_stale)
        return rc;
    graphs_destroy(m);
    rc = graphs_capture(m, err);
    if (rc) { /* no step replays a graph that is not there */
        graphs_destroy(m);
        m->n_graphs = 0;
    }
    return rc;
}

static bool is_within(const struct batch *b, uint32_t max_tokens)
{
    for (uint32_t i = 0; i < b->n_rows; i++)
        if ((uint32_t)b->positions[i] >= max_tokens)
            return false;
    return true;
}

/* The first graph that fits a batch, or NULL. Every row must want its logits. Without shares_new_keys, a graph fits only
 * batches where every sequence has one row, and no row reads keys that this step writes for another. */
static const struct captured *graph_for(const struct model *m, const struct batch *b)
{
    bool shares = b->n_seqs != b->n_rows || b->shares_new_keys;
    if (b->n_logits_rows != b->n_rows || b->is_carried != program_is_head(m->program) || b->has_visual)
        return NULL;
    for (uint32_t i = 0; i < m->n_graphs; i++)
        if (m->graphs[i].n_rows >= b->n_rows && m->graphs[i].shares_new_keys == shares &&
            m->graphs[i].has_adapters == b->has_adapters &&
            (!m->graphs[i].max_tokens || is_within(b, m->graphs[i].max_tokens)))
            return &m->graphs[i];
    return NULL;
}

bool model_replays(const struct model *m, const struct batch *batch)
{
    return graph_for(m, batch);
}

/* ---- the runner --------------------------------------------------------------------------------------------------------- */

/* n_rows: of the logits that were computed. */
static enum rc end_start(struct running *run, uint32_t n_rows)
{
    struct model *m = run->m;
    struct batch *b = run->batch;
    m->n_undrawn = 0;
    if (!run->is_drawn_at_once) {
        m->sampled = (struct meet_args){b->slot, model_draws(m) ? b->n_tasks : 0, 0};
        return model_draws(m) ? RC_OK : logits_end(run);
    }
    if (b->has_masks && n_rows >= m->least_shared_rows) {
        m->n_undrawn = n_rows;
        return RC_OK;
    }
    if (b->has_masks && model_draws(m))
        b->await_masks(b->masks_ctx);
    return logits_draw(run, n_rows);
}

enum rc model_start(void *ctx, struct batch *whole, struct err *err)
{
    struct model *m = ctx;
    struct batch own, *batch = whole;
    if (whole->n_parts) {
        own = batch_part_of(whole, m->options.rank);
        batch = &own;
    }
    struct running run = {.m = m, .batch = batch, .err = err, .is_drawn_at_once = batch->n_logits_rows <= m->max_logits_rows,
                          .own_row = whole->n_parts ? whole->parts[m->options.rank].first_row : 0, .n_all_rows = whole->n_rows,
                          .row_part = whole->row_part};
    bool has_rows = whole->n_rows; /* else a tower runs alone, and the next step brings changes of the page tables */
    const struct captured *captured = has_rows ? graph_for(m, batch) : NULL;
    if (!m->options.rank && !whole->n_parts) /* the ranks share the batch; steps by data are not replayed */
        whole->is_replayed = captured != NULL;
    enum rc rc = ranks_meet(&run, m->program->is_by_data ? (struct meet_args){m->sampled.slot, 0, 0} : m->sampled);
    if (!rc && has_rows)
        rc = begin_batch(&run, captured);
    if (!rc && m->tower)
        rc = tower_begin(&run);
    if (!rc)
        rc = lora_load(&run);
    struct copy_pages_args copies = {m->pool, m->layout.page_bytes, batch->copies, batch->n_copies};
    if (!rc && batch->n_copies)
        rc = RUN_ENTRY(m, copy_pages, &copies, err);
    if (!rc && has_rows)
        rc = captured ? m->backend->graph_launch(m->ctx, captured->graph, err) : program_run(&run);
    return rc ? rc : end_start(&run, captured ? captured->n_rows : batch->n_logits_rows);
}

enum rc model_draw(struct model *m, struct batch *batch, struct err *err)
{
    struct running run = {.m = m, .batch = batch, .err = err};
    return logits_draw(&run, m->n_undrawn);
}

enum rc model_finish(void *ctx, struct batch *batch, struct err *err)
{
    struct model *m = ctx;
    if (m->backend->sample_finish)
        return m->backend->sample_finish(m->ctx, batch->slot, err);
    return m->backend->synchronize(m->ctx, err);
}

enum rc model_read_states(void *ctx, const struct batch *batch, uint32_t first, uint32_t n, float *rows, struct err *err)
{
    struct model *m = ctx;
    const struct place *place = &m->plan.steps[m->plan.n_steps - 1].in[0];
    size_t row_bytes = (size_t)place->stride * m->item_bytes;
    uint32_t dtype = m->backend->activations(m->ctx), most = (uint32_t)(m->read_bytes / row_bytes);
    const char *source = m->arena + place->offset * m->item_bytes + (batch->n_logits_rows + first) * row_bytes;
    enum rc rc = RC_OK;
    for (uint32_t row = 0; row < n && !rc; row += most) {
        uint32_t count = n - row < most ? n - row : most; /* without the padding of the last row */
        rc = m->backend->download(m->ctx, m->read, source + row * row_bytes,
                                  (count - 1) * row_bytes + (size_t)place->width * m->item_bytes, err);
        for (uint32_t i = 0; i < count && !rc; i++)
            dtype_to_float(dtype, m->read + i * row_bytes, rows + (size_t)(row + i) * place->width, place->width);
    }
    return rc;
}

bool model_is_async(const struct model *m)
{
    return m->backend->begin && m->backend->sample_finish;
}
