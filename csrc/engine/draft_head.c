/* draft_head.c: drafts of a head. The head's row at position t has the token at t + 1 and the model's hidden state at t, which
 * the model's step has kept. So a first pass after every step computes the rows of that step whose next token is known by now.
 * The last of them draws the first draft. Each further pass goes on from the head's own state and the draft before.
 * Of DRAFT_HEADS each head reads the last state alone and draws the draft at its own place. */
#include "draft_program.h"

static uint32_t min(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* Notes which slots have rows in the step that is being built, whose states the next call finds. */
static void note_rows(struct draft_program *d, const struct scheduler *s)
{
    for (uint32_t slot = 0; slot < d->tables.max_seqs; slot++)
        d->rows[slot] = (struct slot_rows){0};
    for (uint32_t slot = 0; slot < d->tables.max_seqs; slot++) {
        const struct sequence *q = s->slots[slot];
        if (!q || !q->n_rows)
            continue;
        d->rows[slot] = (struct slot_rows){q, slot, false};
        for (const struct sequence *fork = q->next_fork; fork; fork = fork->next_fork)
            d->rows[fork->slot] = (struct slot_rows){fork, slot, true};
    }
    d->last = s->batch;
}

static void find_places(struct draft_program *d)
{
    for (uint32_t i = 0; i < d->last->n_seqs; i++)
        d->place[d->last->row_seq[d->last->seq_first_row[i]]] = i;
}

/* Adds the rows of the last step whose next token is known. True if the row before the last known token is among them. */
static bool add_known(struct draft_program *d, const struct scheduler *s, struct sequence *q)
{
    const struct batch *last = d->last;
    const struct slot_rows *rows = &d->rows[q->slot];
    if (rows->owner != q)
        return false;
    uint32_t block_tokens = d->config->layout.block_tokens, n_known = sequence_n_known(q), place = d->place[rows->slot];
    uint32_t row = (uint32_t)last->seq_first_row[place], from = (uint32_t)last->positions[row],
             end = min(from + (uint32_t)last->seq_first_row[place + 1] - row, n_known - 1),
             first = q->drafts.n_computed > from ? q->drafts.n_computed : from;
    if (rows->is_fork) { /* the blocks before the last are shared, and the first sample computes their rows */
        first = (n_known - 1) % block_tokens ? (n_known - 1) / block_tokens * block_tokens : end;
        first = first > from ? first : from;
    }
    first = q->drafts.n && first >= end && end > from && !rows->is_fork ? end - 1 : first;
    if (first >= end)
        return false;
    uint32_t at = d->batch->n_rows, n = pass_add_rows(d, s, q, first, end - first, 1);
    for (uint32_t i = 0; i < n; i++)
        d->batch->source_rows[at + i] = (int32_t)(row + first - from + i);
    q->drafts.n_computed = first + n;
    return first + n == n_known - 1;
}

static void go_on(struct draft_program *d, const struct scheduler *s, uint32_t n)
{
    const struct batch *before = d->batch;
    uint32_t n_before = before->n_tasks;
    pass_begin(d);
    d->batch->is_carried = true;
    for (uint32_t t = 0; t < n_before; t++) {
        struct sequence *q = d->drawing[t];
        if (q->drafts.n <= n || q->drafts.n_drawn != n || !pass_has_mask(q, n) ||
            !pass_add_rows(d, s, q, sequence_n_known(q) + n - 2, 1, 1))
            continue;
        d->batch->source_rows[d->batch->n_rows - 1] = (int32_t)before->tasks[t].logits_row;
        pass_add_draw(d, q, n); /* fills drawing up to place t at most */
    }
}

/* Brings the pages that are copied in the step being built, as far as earlier passes have filled them. */
static void copy_pages(struct draft_program *d, const struct batch *step)
{
    for (d->batch->n_copies = 0; d->batch->n_copies < step->n_copies; d->batch->n_copies++)
        d->batch->copies[d->batch->n_copies] = step->copies[d->batch->n_copies];
}

enum rc draft_by_head(void *ctx, struct scheduler *s, struct err *err)
{
    struct draft_program *d = ctx;
    const struct runner *runner = &d->config->drafter.runners[0];
    uint32_t most = 0;
    pass_begin(d);
    copy_pages(d, s->batch);
    d->batch->shares_new_keys = true; /* rows may read keys of the last block before them, which this pass writes again */
    if (d->last)
        find_places(d);
    for (uint32_t slot = 0; slot < d->tables.max_seqs; slot++) {
        struct sequence *q = s->slots[slot];
        if (!q || !q->drafts.memory)
            continue;
        q->drafts.n_drawn = 0;
        if (!d->last || !add_known(d, s, q) || !q->drafts.n || !pass_has_mask(q, 0))
            continue;
        pass_add_draw(d, q, 0);
        most = q->drafts.n > most ? q->drafts.n : most;
    }
    enum rc rc = pass_run(d, runner, err);
    for (uint32_t n = 1; n < most && !rc; n++) {
        go_on(d, s, n);
        rc = pass_run(d, runner, err);
    }
    note_rows(d, s);
    return rc;
}

/* The row of the last step that has the state before a sequence's last known token. False: the step has none. */
static bool find_last_row(const struct draft_program *d, const struct sequence *q, uint32_t *row)
{
    const struct slot_rows *rows = &d->rows[q->slot];
    if (!d->last || rows->owner != q)
        return false;
    uint32_t place = d->place[rows->slot], first = (uint32_t)d->last->seq_first_row[place],
             from = (uint32_t)d->last->positions[first], position = sequence_n_known(q) - 2;
    *row = first + position - from;
    return position >= from && *row < (uint32_t)d->last->seq_first_row[place + 1];
}

enum rc draft_by_heads(void *ctx, struct scheduler *s, struct err *err)
{
    struct draft_program *d = ctx;
    const struct drafter_model *drafter = &d->config->drafter;
    enum rc rc = RC_OK;
    if (d->last)
        find_places(d);
    for (uint32_t n = 0; n < drafter->n_runners && !rc; n++) {
        pass_begin(d);
        for (uint32_t slot = 0; slot < d->tables.max_seqs; slot++) {
            struct sequence *q = s->slots[slot];
            uint32_t row;
            if (!q || !q->drafts.memory)
                continue;
            q->drafts.n_drawn = n ? q->drafts.n_drawn : 0;
            if (q->drafts.n <= n || q->drafts.n_drawn != n || !find_last_row(d, q, &row) || !pass_has_mask(q, n))
                continue;
            pass_add_rows(d, s, q, sequence_n_known(q) - 2, 1, 1);
            d->batch->source_rows[d->batch->n_rows - 1] = (int32_t)row;
            pass_add_draw(d, q, n);
        }
        rc = pass_run(d, &drafter->runners[n], err);
    }
    note_rows(d, s);
    return rc;
}
