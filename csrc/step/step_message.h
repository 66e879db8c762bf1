/* step_message.h: a batch as bytes, for a process that computes it without sampling (csrc/program/follower.h). The message has
 * the batch's arrays, the entries of the page tables that have changed, and the page copies; it has no sampling tasks. Reading
 * checks every size and every index, so a message of unknown origin cannot make a step read or write out of bounds. */
#ifndef LLMPY_STEP_MESSAGE_H
#define LLMPY_STEP_MESSAGE_H

#include "batch.h"

struct step_limits {
    uint32_t max_rows, max_seqs, max_copies, n_pages, vocab_size, max_model_len, n_token_types;
    uint32_t n_tables, stride; /* of the page tables */
};

size_t step_message_most_bytes(const struct step_limits *limits);
/* Returns the number of bytes written. */
size_t step_message_write(const struct batch *batch, uint64_t step, void *bytes);
/* Fills the batch, which has no tasks, and the page tables, whose changes it notes. RC_INVALID: nothing is changed. */
enum rc step_message_read(const void *bytes, size_t n_bytes, const struct step_limits *limits, struct page_tables *tables,
                          struct batch *batch, uint64_t *step, struct err *err);

#endif
