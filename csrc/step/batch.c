#include "batch.h"

#include "../base/mem.h"

#include <string.h>

/* ---- page tables ---- */

enum rc page_tables_create(struct page_tables *t, uint32_t n_groups, uint32_t max_seqs, uint32_t stride, struct err *err)
{
    size_t n_rows = (size_t)n_groups * (max_seqs + 1);
    *t = (struct page_tables){.n_groups = n_groups, .max_seqs = max_seqs, .stride = stride};
    t->pages = mem_calloc(n_rows * stride, sizeof *t->pages);
    t->runs = mem_calloc(n_rows, sizeof *t->runs);
    t->run_of = mem_calloc(n_rows, sizeof *t->run_of);
    if (t->pages && t->runs && t->run_of)
        return RC_OK;
    page_tables_destroy(t);
    return err_set(err, RC_MEMORY, "batch: out of memory for %u page tables of %u entries; lower max_num_seqs", max_seqs,
                   stride);
}

void page_tables_destroy(struct page_tables *t)
{
    mem_free(t->pages);
    mem_free(t->runs);
    mem_free(t->run_of);
    *t = (struct page_tables){0};
}

int32_t *page_tables_row(const struct page_tables *t, uint32_t group, uint32_t slot)
{
    return t->pages + ((size_t)group * (t->max_seqs + 1) + slot) * t->stride;
}

void page_tables_note(struct page_tables *t, uint32_t group, uint32_t slot, uint32_t first, uint32_t end)
{
    uint32_t row = group * (t->max_seqs + 1) + slot, base = row * t->stride;
    if (first >= end)
        return;
    if (!t->run_of[row]) {
        t->runs[t->n_runs] = (struct table_run){base + first, end - first};
        t->run_of[row] = ++t->n_runs;
        return;
    }
    struct table_run *run = &t->runs[t->run_of[row] - 1];
    uint32_t before = run->first, before_end = before + run->count;
    run->first = base + first < before ? base + first : before;
    run->count = (base + end > before_end ? base + end : before_end) - run->first;
}

void page_tables_settle(struct page_tables *t)
{
    for (uint32_t i = 0; i < t->n_runs; i++)
        t->run_of[t->runs[i].first / t->stride] = 0;
    t->n_runs = 0;
}

/* ---- batches ---- */

enum rc batch_create(struct batch *b, const struct page_tables *tables, uint32_t max_rows, size_t n_top,
                     uint32_t max_copies, struct err *err)
{
    uint32_t max_seqs = tables->max_seqs, max_tasks = max_rows + max_seqs;
    *b = (struct batch){.max_rows = max_rows, .max_seqs = max_seqs, .tables = tables, .max_tasks = max_tasks,
                        .max_copies = max_copies};
    b->token_ids = mem_calloc(max_rows, sizeof *b->token_ids);
    b->positions = mem_calloc(max_rows, sizeof *b->positions);
    b->token_types = mem_calloc(max_rows, sizeof *b->token_types);
    b->row_seq = mem_calloc(max_rows, sizeof *b->row_seq);
    b->row_adapter = mem_calloc(max_rows, sizeof *b->row_adapter);
    b->source_rows = mem_calloc(max_rows, sizeof *b->source_rows);
    b->seq_first_row = mem_calloc((size_t)max_seqs + 1, sizeof *b->seq_first_row);
    b->copies = mem_calloc(max_copies, sizeof *b->copies);
    b->logits_rows = mem_calloc(max_rows, sizeof *b->logits_rows);
    b->state_rows = mem_calloc(max_rows, sizeof *b->state_rows);
    b->tasks = mem_calloc(max_tasks, sizeof *b->tasks);
    b->results = mem_calloc(max_tasks, sizeof *b->results);
    b->top_ids = mem_calloc(n_top, sizeof *b->top_ids);
    b->top_values = mem_calloc(n_top, sizeof *b->top_values);
    b->top_ranks = mem_calloc(n_top, sizeof *b->top_ranks);
    if (b->token_ids && b->positions && b->token_types && b->row_seq && b->row_adapter && b->source_rows && b->seq_first_row &&
        b->copies && b->logits_rows && b->state_rows && b->tasks && b->results && b->top_ids && b->top_values && b->top_ranks)
        return RC_OK;
    batch_destroy(b);
    return err_set(err, RC_MEMORY, "batch: out of memory for %u rows and %u sequences; lower max_num_batched_tokens", max_rows,
                   max_seqs);
}

enum rc batch_add_tower(struct batch *b, uint32_t n_axes, uint32_t n_features, struct err *err)
{
    b->n_axes = n_axes;
    b->visual = mem_calloc(b->max_rows, sizeof *b->visual);
    b->visible_end = mem_calloc(b->max_rows, sizeof *b->visible_end);
    b->rope_positions = mem_calloc((size_t)b->max_rows * n_axes, sizeof *b->rope_positions);
    b->encodings = mem_calloc(n_features, sizeof *b->encodings);
    b->feature_rows = mem_calloc(n_features, sizeof *b->feature_rows);
    if (b->visual && b->visible_end && b->encodings && b->feature_rows && (b->rope_positions || !n_axes))
        return RC_OK;
    return err_set(err, RC_MEMORY, "batch: out of memory for %u features; lower encoder_cache_tokens", n_features);
}

enum rc batch_add_parts(struct batch *b, uint32_t n_parts, struct err *err)
{
    b->n_parts = n_parts;
    mem_free(b->seq_first_row);
    b->seq_first_row = mem_calloc((size_t)b->max_seqs + n_parts, sizeof *b->seq_first_row);
    b->parts = mem_calloc(n_parts, sizeof *b->parts);
    b->row_part = mem_calloc(b->max_rows, sizeof *b->row_part);
    return b->seq_first_row && b->parts && b->row_part ? RC_OK : err_set(err, RC_MEMORY, "batch: out of memory");
}

struct batch batch_part_of(const struct batch *b, uint32_t number)
{
    const struct batch_part *at = &b->parts[number];
    struct batch part = *b;
    part.n_parts = 0;
    part.n_rows = at->n_rows;
    part.n_seqs = at->n_seqs;
    part.n_logits_rows = at->n_logits_rows;
    part.n_state_rows = at->n_state_rows;
    part.n_tasks = at->n_tasks;
    part.n_copies = at->n_copies;
    part.token_ids += at->first_row;
    part.positions += at->first_row;
    part.token_types += at->first_row;
    part.row_seq += at->first_row;
    part.row_adapter += at->first_row;
    part.source_rows += at->first_row;
    part.seq_first_row += at->first_seq_row;
    part.logits_rows += at->first_wanted;
    part.state_rows += at->first_state;
    part.tasks += at->first_task;
    part.results += at->first_task;
    part.copies += at->first_copy;
    return part;
}

uint32_t batch_find_state(const struct batch *b, uint32_t *row)
{
    uint32_t part = 0;
    while (part + 1 < b->n_parts && *row >= b->parts[part].first_state + b->parts[part].n_state_rows)
        part++;
    *row -= b->n_parts ? b->parts[part].first_state : 0;
    return part;
}

void batch_destroy(struct batch *b)
{
    void *arrays[] = {b->token_ids, b->positions, b->token_types, b->row_seq, b->row_adapter, b->source_rows, b->seq_first_row,
                      b->copies, b->logits_rows, b->state_rows, b->tasks, b->results, b->top_ids, b->top_values, b->top_ranks,
                      b->visual, b->visible_end, b->rope_positions, b->encodings, b->feature_rows, b->parts, b->row_part};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        mem_free(arrays[i]);
    *b = (struct batch){0};
}

uint32_t batch_n_pieces(const struct batch *b)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < b->n_encodings && !b->tower_first; i++)
        n += b->encodings[i].item->n_pieces;
    return n;
}

uint32_t batch_n_piece_rows(const struct batch *b)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < b->n_encodings && !b->tower_first; i++)
        for (uint32_t piece = 0; piece < b->encodings[i].item->n_pieces; piece++)
            n += b->encodings[i].item->pieces[piece].n_rows;
    return n;
}
