/* scheduler.h: which rows a step computes, and in which pages. Owns the waiting queue, the running sequences with their slots
 * and page tables, and the block manager. There are no phases: a step spends a budget of rows on running
 * sequences in rank, decodes first, then admits waiting ones in rank. Driver's thread only; nothing here allocates after
 * scheduler_create. Semantics: docs/develop/engine.md.
 *
 * BLOCKED(prefix) needs no state: a prompt that still owes rows when its turn is over has taken the last row of the step, so
 * nobody is admitted who would have to wait for blocks that it has yet to compute. Only where it was cut for a snapshot of
 * recurrent state is there room for others, and those who await that snapshot are passed over.
 *
 * A step may be scheduled while the one before is still computed: lengths alone decide it. All device work of an engine runs in
 * the order in which it was enqueued, so a page is free as soon as no later step reads it, whatever is still in flight. */
#ifndef LLMPY_SCHEDULER_H
#define LLMPY_SCHEDULER_H

#include "block_manager.h"
#include "queue.h"

#define N_SEEN_KEYS 65536u
#define N_SEEN_PLACES 8u /* of a key among them, so that few keys do not push each other out */

/* Of a copy of the step being built. */
struct copy_owner {
    struct sequence *sequence;
    int32_t held;                    /* page that stays until the step is started; 0: another copy's */
};

struct scheduler {
    const struct sequence_context *context;
    struct page_tables tables;
    struct batch *batch;             /* of the step being built: its copies are the scheduler's */
    struct block_manager *blocks;
    struct kv_events *events;        /* NULL: nobody wants them */
    struct statistics *statistics;   /* the engine's, for what happens at an admission */
    struct queue waiting;
    struct sequence **running;       /* [max_num_seqs] in rank */
    uint32_t n_running;
    uint32_t n_state_pages;          /* of a recurrent state; 0: the model has none, and recurrent.c is never entered */
    struct sequence **slots;         /* [max_num_seqs], NULL: free */
    struct copy_owner *copy_owners;  /* [scheduler_max_copies], of batch->copies */
    struct hash *seen_keys;          /* [N_SEEN_KEYS] of blocks published lately; NULL without recurrent state */
    uint32_t *scratch;               /* [2 * n_pages], of scheduler_check */

    /* The step being built. */
    uint32_t rows_left, n_promised;  /* n_promised: pages for unfinished prompts, and for the first rows of fresh forks */
    uint32_t n_preempted, n_admitted;
    struct rank last_victim, last_admitted;
    bool has_stalled;                /* the last step scheduled nothing though sequences waited */

    uint64_t n_snapshots, n_preemptions, n_mixed_preemptions, n_redone_rows, n_prompt_rows, n_decode_rows, prompt_tokens,
        cached_tokens, cache_queries, cache_hits;
};

enum rc scheduler_create(struct scheduler *scheduler, const struct sequence_context *context, struct statistics *statistics,
                         struct err *err);
void scheduler_destroy(struct scheduler *scheduler);

void scheduler_add(struct scheduler *scheduler, struct sequence *sequence);
/* Whether a step can be built while another is in flight. */
bool scheduler_can_overlap(const struct scheduler *scheduler);
/* Chooses the rows of a step: n_rows and draws of running sequences, n_computed moved on, tables and copies filled. With
 * another step in flight there may be no row left to enqueue though sequences run. */
void scheduler_begin_step(struct scheduler *scheduler, struct batch *batch, bool is_in_flight, double now);
/* The step has been started, or never will be. */
void scheduler_end_step(struct scheduler *scheduler);
/* A running sequence has accepted a token: blocks that it completes can be found from here on. */
void scheduler_publish(struct scheduler *scheduler, struct sequence *sequence);
/* Takes a waiting or running sequence out and frees its pages; at a step boundary, or once its results are applied. */
void scheduler_remove(struct scheduler *scheduler, struct sequence *sequence);
/* Nothing published so far can be found any more; recompute also preempts everyone. */
void scheduler_reset_cache(struct scheduler *scheduler, bool recompute);
/* The same when the weights are new; and what must come of one epoch starts over. */
void scheduler_new_epoch(struct scheduler *scheduler, bool recompute);

uint32_t scheduler_max_copies(const struct engine_config *config); /* of a step */
int32_t *scheduler_table(const struct scheduler *scheduler, uint32_t group, uint32_t slot);
enum rc scheduler_check(const struct scheduler *scheduler, struct err *err);

#endif
