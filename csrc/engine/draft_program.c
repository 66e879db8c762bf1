#include "draft_program.h"

#include "../base/mem.h"
#include "grammar.h"
#include "sampler.h"

#include <string.h>

static uint32_t vocab_size(const struct draft_program *d)
{
    return d->config->drafter.vocab_size;
}

/* ---- sequences ---- */

static bool are_known(const struct draft_program *d, const int32_t *ids, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if ((uint32_t)ids[i] >= vocab_size(d))
            return false;
    return true;
}

static void leave_out(struct sequence *q)
{
    q->drafts.n_wanted = q->drafts.most = 0;
}

static size_t memory_bytes(void *ctx, uint32_t n_known, uint32_t n_most)
{
    (void)ctx;
    (void)n_known;
    (void)n_most;
    return 1; /* the memory only says that the sequence may have drafts */
}

/* A sequence with an id outside the drafter's vocabulary gets no drafts. */
static void begin(void *ctx, struct sequence *q)
{
    const struct draft_program *d = ctx;
    const struct request_spec *spec = &q->request->spec;
    bool fits = are_known(d, spec->prompt.ids, spec->prompt.n) && are_known(d, q->output, q->n_output) &&
                are_known(d, spec->stop_ids.ids, spec->stop_ids.n) && are_known(d, spec->allowed.ids, spec->allowed.n);
    for (uint32_t i = 0; i < spec->n_bias; i++)
        fits &= (uint32_t)spec->bias[i].id < vocab_size(d);
    for (uint32_t i = 0; i < spec->n_bad_words; i++)
        fits &= are_known(d, spec->bad_words[i].ids, spec->bad_words[i].n);
    if (!fits)
        leave_out(q);
}

static void accept(void *ctx, struct sequence *q, const int32_t *ids, uint32_t n)
{
    if (!are_known(ctx, ids, n))
        leave_out(q);
}

/* ---- passes ---- */

/* Takes over the page numbers of a sequence's first n positions. */
static void sync_table(struct draft_program *d, const struct scheduler *s, const struct sequence *q, uint32_t n)
{
    const int32_t *from = scheduler_table(s, d->group, q->slot);
    int32_t *to = page_tables_row(&d->tables, 0, q->slot);
    uint32_t block_tokens = d->config->layout.block_tokens, end = (n + block_tokens - 1) / block_tokens, first = 0;
    while (first < end && from[first] == to[first])
        first++;
    for (; end > first && from[end - 1] == to[end - 1];)
        end--;
    memcpy(to + first, from + first, (end - first) * sizeof *to);
    page_tables_note(&d->tables, 0, q->slot, first, end);
}

void pass_begin(struct draft_program *d)
{
    struct batch *b = d->batch = &d->batches[d->n_started % 2];
    b->n_rows = b->n_seqs = b->n_logits_rows = b->n_state_rows = b->n_tasks = b->n_copies = 0;
    b->has_types = b->has_adapters = b->has_masks = b->shares_new_keys = b->is_carried = false;
    b->seq_first_row[0] = 0;
}

uint32_t pass_add_rows(struct draft_program *d, const struct scheduler *s, const struct sequence *q, uint32_t first, uint32_t n,
                       uint32_t ahead)
{
    struct batch *b = d->batch;
    n = n < b->max_rows - b->n_rows ? n : b->max_rows - b->n_rows;
    if (!n)
        return 0;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t row = b->n_rows++;
        b->token_ids[row] = sequence_token(q, first + ahead + i);
        b->positions[row] = (int32_t)(first + i);
        b->row_seq[row] = (int32_t)q->slot;
    }
    b->seq_first_row[++b->n_seqs] = (int32_t)b->n_rows;
    sync_table(d, s, q, first + n);
    return n;
}

void pass_add_draw(struct draft_program *d, struct sequence *q, uint32_t n_ahead)
{
    struct batch *b = d->batch;
    struct sample_task *task = &b->tasks[b->n_tasks];
    b->logits_rows[b->n_logits_rows] = (int32_t)b->n_rows - 1;
    d->drawing[b->n_tasks++] = q;
    sampler_describe(q, n_ahead, n_ahead, task);
    task->logits_row = b->n_logits_rows++;
    task->wants_logprobs = false;
    task->n_top = task->top_offset = 0;
}

bool pass_has_mask(struct sequence *q, uint32_t n)
{
    return !q->matcher || matcher_look_ahead(q->matcher, q->output + q->n_output, n, n) == n;
}

enum rc pass_run(struct draft_program *d, const struct runner *runner, struct err *err)
{
    struct batch *b = d->batch;
    if (!b->n_rows)
        return RC_OK;
    d->n_started++;
    enum rc rc = runner->start(runner->ctx, b, err);
    page_tables_settle(&d->tables);
    if (!rc)
        rc = runner->finish(runner->ctx, b, err);
    for (uint32_t t = 0; t < b->n_tasks && !rc; t++) {
        struct sequence *q = d->drawing[t];
        if (b->results[t].status == SAMPLE_OK && are_known(d, &b->results[t].id, 1))
            q->output[q->n_output + q->drafts.n_drawn++] = b->results[t].id;
    }
    return rc;
}

/* ---- life ---- */

static enum rc check(const struct engine_config *c, uint32_t *group, struct err *err)
{
    const struct drafter_model *drafter = &c->drafter;
    for (*group = 0; *group < c->layout.n_groups && c->layout.groups[*group].window;)
        ++*group;
    if (*group == c->layout.n_groups)
        return err_set(err, RC_UNSUPPORTED, "speculative_config: a drafter with layers of its own wants a model with layers of "
                       "full attention, whose cached blocks it shares; use the method 'ngram' or 'suffix'");
    if (drafter->layout.n_groups != 1 || drafter->layout.n_state_pages || drafter->runners[0].lacks_logits ||
        drafter->runners[0].takes_whole_prompts)
        return err_set(err, RC_UNSUPPORTED, "speculative_config: wanted a drafter that generates tokens by "
                       "attention alone, without recurrent layers; choose another model");
    bool has_pages = c->drafts.method != DRAFT_HEADS; /* such heads cache nothing */
    if (drafter->layout.block_tokens != c->layout.block_tokens || (has_pages && drafter->n_pages < c->n_pages) ||
        drafter->max_model_len != c->max_model_len)
        return err_set(err, RC_INTERNAL, "drafter: wanted %u pages of %u tokens and max_model_len %u, have %u of %u and %u",
                       c->n_pages, c->layout.block_tokens, c->max_model_len, drafter->n_pages, drafter->layout.block_tokens,
                       drafter->max_model_len);
    for (uint32_t i = 0; i < c->n_eos + c->n_banned; i++) {
        int32_t id = i < c->n_eos ? c->eos_ids[i] : c->banned_ids[i - c->n_eos];
        if ((uint32_t)id >= drafter->vocab_size)
            return err_set(err, RC_CONFIG, "speculative_config: wanted a drafter with the token id %d, have %u ids; "
                           "choose one with the model's vocabulary", id, drafter->vocab_size);
    }
    return RC_OK;
}

enum rc draft_program_create(const struct engine_config *config, struct draft_source **source, struct err *err)
{
    uint32_t group = 0;
    *source = NULL;
    enum rc rc = check(config, &group, err);
    if (rc)
        return rc;
    struct draft_program *d = mem_calloc(1, sizeof *d);
    if (!d)
        return err_set(err, RC_MEMORY, "speculative_config: out of memory");
    *d = (struct draft_program){.config = config, .group = group};
    static enum rc (*const draft[])(void *ctx, struct scheduler *scheduler, struct err *err) = {
        [DRAFT_MODEL] = draft_by_model, [DRAFT_HEAD] = draft_by_head, [DRAFT_HEADS] = draft_by_heads};
    d->source = (struct draft_source){d, memory_bytes, begin, NULL, accept, NULL, draft[config->drafts.method]};
    *source = &d->source;
    d->drawing = mem_calloc(config->max_num_seqs, sizeof *d->drawing);
    d->rows = mem_calloc(config->max_num_seqs, sizeof *d->rows);
    d->place = mem_calloc(config->max_num_seqs, sizeof *d->place);
    rc = d->drawing && d->rows && d->place ? RC_OK : err_set(err, RC_MEMORY, "speculative_config: out of memory");
    if (!rc)
        rc = page_tables_create(&d->tables, 1, config->max_num_seqs,
                                kv_layout_stride(&config->drafter.layout, config->max_model_len), err);
    for (uint32_t slot = 0; slot < 2 && !rc; slot++) {
        struct batch *b = &d->batches[slot];
        rc = batch_create(b, &d->tables, config->max_num_batched_tokens, 0, scheduler_max_copies(config), err);
        b->slot = slot;
        b->kept = config->runner.kept;
        b->kept_stride = config->runner.kept_stride;
        b->vocab_limit = config->vocab_limit < vocab_size(d) ? config->vocab_limit : vocab_size(d);
        b->banned = config->banned_ids;
        b->n_banned = config->n_banned;
    }
    if (rc) {
        draft_program_destroy(*source);
        *source = NULL;
    }
    return rc;
}

void draft_program_destroy(struct draft_source *source)
{
    struct draft_program *d = source ? source->ctx : NULL;
    if (!d)
        return;
    page_tables_destroy(&d->tables);
    batch_destroy(&d->batches[0]);
    batch_destroy(&d->batches[1]);
    mem_free(d->drawing);
    mem_free(d->rows);
    mem_free(d->place);
    mem_free(d);
}
