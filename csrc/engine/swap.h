/* swap.h: preemption without recomputation. The pages of a preempted sequence are copied to slots of the host tier that are its
 * own while it waits, and copied back when it is admitted again. What it has published stays findable meanwhile; blocks that
 * the pool still has are shared instead of copied. Only with a host tier. Driver's thread only; nothing here allocates. */
#ifndef LLMPY_SWAP_H
#define LLMPY_SWAP_H

#include "scheduler.h"

/* Copies the pages of a running sequence out, if the engine's option or the cost says so and there are slots. The sequence owns
 * the slots then, and n_swapped is the number of its positions in them; its pages are still to be released. Rows of the step
 * being built must have been given back; are_filled is false if copies that should have filled pages were cancelled. */
bool swap_out(struct scheduler *scheduler, struct sequence *sequence, bool are_filled);
/* Lists the pages of a waiting, swapped sequence in the tables of a free slot: those that the pool still has, and -1 for those
 * to be copied back. */
void swap_look(struct scheduler *scheduler, struct sequence *sequence, uint32_t slot);
/* Copies back what swap_look marked. The sequence has the slot and gives its slots of host memory up. */
void swap_in(struct scheduler *scheduler, struct sequence *sequence);
/* Gives the slots of a waiting sequence up; it will be computed again. Nothing happens without slots. */
void swap_drop(struct scheduler *scheduler, struct sequence *sequence);

#endif
