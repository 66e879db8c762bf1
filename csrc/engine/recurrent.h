/* recurrent.h: the scheduler's part for models with recurrent state. It manages the live state of each running sequence and the
 * snapshots. A live state is a bundle of pages, listed in the table behind the groups' tables. A snapshot is a published
 * bundle; its key is that of the block that ends at the snapshot's position.
 *
 * A live state is written in place. When a snapshot is due, the live state itself is published. A published state, and one that
 * forks share, is not written: the next sequence to write takes a fresh bundle, which a copy fills before the step, as for a
 * shared last block of keys. No sequence is preempted for a snapshot: if pages are short, the snapshot is withdrawn and its
 * pages are written in place. Only for models with recurrent state (n_state_pages is not 0). Driver's thread only. */
#ifndef LLMPY_RECURRENT_H
#define LLMPY_RECURRENT_H

#include "scheduler.h"

int32_t *recurrent_table(const struct scheduler *scheduler, uint32_t slot);

/* Cuts n rows at the next snapshot. */
uint32_t recurrent_cut(const struct scheduler *scheduler, const struct sequence *sequence, uint32_t n_rows);
/* Number of pages that the live state must take before the next row. */
uint32_t recurrent_needed(const struct scheduler *scheduler, const struct sequence *sequence);
/* Makes the live state writable. n_spare: free pages beyond those that the sequence's rows need. */
void recurrent_take(struct scheduler *scheduler, struct sequence *sequence, uint32_t n_spare);
/* Publishes the live state if a snapshot is due at n_computed, the position after all scheduled steps. */
void recurrent_publish(struct scheduler *scheduler, struct sequence *sequence);
/* Withdraws a snapshot published in the step being built, because the sequence gives back its rows. */
void recurrent_withdraw(struct scheduler *scheduler, const struct sequence *sequence);
void recurrent_release(struct scheduler *scheduler, struct sequence *sequence);

/* Drafts. The rows of a step with drafts write a copy of the live state, and the state before them is kept. If a draft is not
 * accepted, the kept state becomes the live one again. */
/* True if the step being built can copy the live state: no other copy fills it in this step. */
bool recurrent_can_keep(const struct scheduler *scheduler, const struct sequence *sequence);
/* Number of rows from n_computed to the next position at which a snapshot is due: drafts must not pass it. */
uint32_t recurrent_draft_limit(const struct scheduler *scheduler, const struct sequence *sequence);
/* Keeps the live state and takes a copy as the new one. The step's rows up to now are n_rows. */
void recurrent_keep(struct scheduler *scheduler, struct sequence *sequence);
/* Releases the kept state, or with is_back the live one in its place. */
void recurrent_settle(struct scheduler *scheduler, struct sequence *sequence, bool is_back);
/* Call it before releasing the block: moves the block's snapshot right before it in the order of reuse. */
void recurrent_touch(struct scheduler *scheduler, struct sequence *sequence, uint32_t block);

/* The largest n <= n_blocks such that a snapshot from before this step stands at the end of block n - 1; 0: none. */
uint32_t recurrent_find(struct scheduler *scheduler, struct sequence *sequence, uint32_t n_blocks);
/* Starts the sequence behind n_hit cached blocks: their snapshot goes into its slot's table. limit: most blocks that a later
 * hit of the prompt could use. */
void recurrent_start(struct scheduler *scheduler, struct sequence *sequence, uint32_t n_hit, uint32_t limit);
/* The fork shares the lead's state until one of them writes. */
void recurrent_fork(struct scheduler *scheduler, const struct sequence *lead, struct sequence *fork);
/* True if a running prompt is about to make a snapshot that serves the sequence and does not exist yet. limit: most blocks that
 * the sequence can use. */
bool recurrent_is_awaited(struct scheduler *scheduler, struct sequence *sequence, uint32_t limit);
/* Remembers the key of a published block: a later prompt that shares the block and then diverges gets a snapshot there. */
void recurrent_note_key(struct scheduler *scheduler, const struct hash *key);

#endif
