/* sampler.h: turns a scheduled step into the arrays of a struct batch: rows in the order of slots, and for each row whose
 * logits are wanted the tasks of drawing or scoring, with the penalties' counts, biases and bans of that moment. The kernels
 * draw; this file only asks. Driver's thread only. */
#ifndef LLMPY_SAMPLER_H
#define LLMPY_SAMPLER_H

#include "scheduler.h"

/* Whom a task's result goes to. */
struct task_owner {
    struct sequence *sequence;
    uint32_t position; /* of the token drawn or scored */
};

/* Whose a batch's state rows are: first .. first + n of them. */
struct states_owner {
    struct sequence *sequence;
    uint32_t first, n;
};

/* Fills the scheduler's batch from its slots; owners: [max_tasks], states: [max_seqs]. Each draw leaves its sequence with a
 * pending token. Returns how many sequences pool states. */
uint32_t sampler_fill(const struct scheduler *scheduler, struct task_owner *owners, struct states_owner *states);

#endif
