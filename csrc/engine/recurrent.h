/* recurrent.h: the scheduler's part for models with recurrent state: the live state of each running sequence, a bundle of pages
 * in the table behind the groups' tables, and snapshots, bundles under the key of the block that ends where they stand.
 *
 * A live state is written in place. Where a snapshot is due it is published as it lies; then, or when forks share it, whoever
 * writes next takes a fresh bundle and has it filled by a copy before the step, as for the last block of shared keys. Nobody is
 * preempted for a snapshot: where pages are short it is given up, and written on in place. Only for models with such state:
 * scheduler->n_state_pages is not 0. Driver's thread only. */
#ifndef LLMPY_RECURRENT_H
#define LLMPY_RECURRENT_H

#include "scheduler.h"

int32_t *recurrent_table(const struct scheduler *scheduler, uint32_t slot);

/* Of n rows those up to the next snapshot. */
uint32_t recurrent_cut(const struct scheduler *scheduler, const struct sequence *sequence, uint32_t n_rows);
/* Pages that must be taken before the next row. */
uint32_t recurrent_needed(const struct scheduler *scheduler, const struct sequence *sequence);
/* Makes the live state one that may be written; n_spare pages are free beside what its rows need. */
void recurrent_take(struct scheduler *scheduler, struct sequence *sequence, uint32_t n_spare);
/* Publishes the live state if a snapshot is due where it stands, or will stand after the steps that are scheduled. */
void recurrent_publish(struct scheduler *scheduler, struct sequence *sequence);
/* The rows of the step being built are given back. */
void recurrent_withdraw(struct scheduler *scheduler, const struct sequence *sequence);
void recurrent_release(struct scheduler *scheduler, struct sequence *sequence);
/* The block is about to be released: its snapshot is reused right before it. */
void recurrent_touch(struct scheduler *scheduler, struct sequence *sequence, uint32_t block);

/* The most blocks, at most n_blocks, at whose end there is a snapshot that was there before this step. */
uint32_t recurrent_find(struct scheduler *scheduler, struct sequence *sequence, uint32_t n_blocks);
/* The sequence starts behind so many blocks of at most `limit` that a later hit could use; into its slot's table. */
void recurrent_start(struct scheduler *scheduler, struct sequence *sequence, uint32_t n_hit, uint32_t limit);
/* The fork shares the lead's state until one of them writes. */
void recurrent_fork(struct scheduler *scheduler, const struct sequence *lead, struct sequence *fork);
/* Whether a running prompt is about to make a snapshot that serves it further than what there is. */
bool recurrent_is_awaited(struct scheduler *scheduler, struct sequence *sequence, uint32_t limit);
/* Somebody has published the block: from here on a prompt that leaves the chain behind it is noticed. */
void recurrent_note_key(struct scheduler *scheduler, const struct hash *key);

#endif
