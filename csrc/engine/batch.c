#include "batch.h"

#include "../base/mem.h"

enum rc batch_create(struct batch *b, uint32_t n_groups, uint32_t max_rows, uint32_t max_seqs, uint32_t table_stride,
                     uint32_t max_logprobs, struct err *err)
{
    uint32_t max_tasks = max_rows + max_seqs;
    size_t n_top = (size_t)max_tasks * max_logprobs;
    *b = (struct batch){.max_rows = max_rows, .max_seqs = max_seqs, .table_stride = table_stride, .max_tasks = max_tasks};
    b->token_ids = mem_calloc(max_rows, sizeof *b->token_ids);
    b->positions = mem_calloc(max_rows, sizeof *b->positions);
    b->row_seq = mem_calloc(max_rows, sizeof *b->row_seq);
    b->seq_first_row = mem_calloc((size_t)max_seqs + 1, sizeof *b->seq_first_row);
    b->tables = mem_calloc((size_t)n_groups * max_seqs * table_stride, sizeof *b->tables);
    b->copies = mem_calloc((size_t)n_groups * max_seqs, sizeof *b->copies);
    b->logits_rows = mem_calloc(max_rows, sizeof *b->logits_rows);
    b->tasks = mem_calloc(max_tasks, sizeof *b->tasks);
    b->results = mem_calloc(max_tasks, sizeof *b->results);
    b->top_ids = mem_calloc(n_top, sizeof *b->top_ids);
    b->top_values = mem_calloc(n_top, sizeof *b->top_values);
    b->top_ranks = mem_calloc(n_top, sizeof *b->top_ranks);
    if (b->token_ids && b->positions && b->row_seq && b->seq_first_row && b->tables && b->copies && b->logits_rows &&
        b->tasks && b->results && b->top_ids && b->top_values && b->top_ranks)
        return RC_OK;
    batch_destroy(b);
    return err_set(err, RC_MEMORY, "batch: out of memory for %u rows and %u sequences; max_num_batched_tokens", max_rows,
                   max_seqs);
}

void batch_destroy(struct batch *b)
{
    void *arrays[] = {b->token_ids, b->positions, b->row_seq, b->seq_first_row, b->tables, b->copies,
                      b->logits_rows, b->tasks, b->results, b->top_ids, b->top_values, b->top_ranks};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        mem_free(arrays[i]);
    *b = (struct batch){0};
}
