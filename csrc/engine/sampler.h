/* sampler.h: turns a scheduled step into the arrays of a struct batch. Rows are in the order of slots. Each row whose logits
 * are wanted gets tasks to draw or score, with the current penalty counts, biases and bans. The kernels draw; this file only
 * describes the draws. Driver's thread only. */
#ifndef LLMPY_SAMPLER_H
#define LLMPY_SAMPLER_H

#include "scheduler.h"

/* The sequence that gets a task's result. */
struct task_owner {
    struct sequence *sequence;
    uint32_t position; /* position of the token drawn or scored */
};

/* The sequence that gets the batch's state rows first .. first + n. */
struct states_owner {
    struct sequence *sequence;
    uint32_t first, n;
};

/* Describes the draw behind n_before tokens that are not known yet, n_ahead of them drafts: all or none. Fills the sequence's
 * lists for the draw. The task still needs its row and its place for alternatives. */
void sampler_describe(struct sequence *sequence, uint32_t n_before, uint32_t n_ahead, struct sample_task *task);
/* Fills the scheduler's batch from its slots. owners: [max_tasks], states: [max_seqs]. Each draw adds a pending token to its
 * sequence. Returns the number of entries in `states`. */
uint32_t sampler_fill(struct scheduler *scheduler, struct task_owner *owners, struct states_owner *states);

#endif
