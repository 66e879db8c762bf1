/* scheduler.h: decides which rows a step computes and in which pages they lie. The scheduler owns the waiting queue, the
 * running sequences with their slots and page tables, and the block manager. There are no phases: a step spends its budget of
 * rows on running sequences in their order, decodes first, and then admits waiting sequences in their order. Driver's
 * thread only. No function allocates after scheduler_create. Semantics: docs/develop/engine.md.
 *
 * No state is needed to hold back later prompts with the same prefix. If a prompt still owes rows after its turn, it has
 * taken the last row of the step, so no sequence is admitted that would have to wait for the prompt's blocks. The exception is
 * a prompt cut for a snapshot of recurrent state: rows are left then, and waiting sequences that await this snapshot are passed
 * over.
 *
 * A step may be scheduled while the previous one is still being computed, because scheduling depends on lengths alone. All
 * device work of an engine runs in the order in which it was enqueued. So a page is free as soon as no later step reads it,
 * even if a step in flight still does. */
#ifndef LLMPY_SCHEDULER_H
#define LLMPY_SCHEDULER_H

#include "adapter_slots.h"
#include "block_manager.h"
#include "features.h"
#include "outer_tier.h"
#include "queue.h"

#define N_SEEN_KEYS 65536u
#define N_SEEN_PLACES 8u /* places of seen_keys where a key may stand, so that few keys do not evict each other */

/* The sequence for which the step being built makes a copy. */
struct copy_owner {
    struct sequence *sequence;
    int32_t held;                    /* page held until the step is started; 0: the bundle's first copy holds it */
    uint32_t pool;                   /* of both pages */
};

/* Pages that have numbers of their own. A sequence has all its pages in one pool, and finds only blocks of that one. */
struct pool {
    struct block_manager *blocks;
    uint32_t n_running;              /* sequences */
    uint32_t n_promised;             /* pages kept for unfinished prompts and for the first rows of new forks of this step */
};

struct page_counts {
    uint64_t n_free, n_cached, n_bundles, n_evictions;
};

struct scheduler {
    const struct sequence_context *context;
    struct page_tables tables;
    struct batch *batch;             /* of the step being built; the scheduler fills its copies */
    struct pool *pools;              /* [n_pools] each of n_pages */
    uint32_t n_pools;                /* several: there is no tier, and drafts come from texts alone */
    struct host_tier *tier;          /* NULL: the model has no host cache */
    struct outer_tier *outer;        /* NULL: there is none */
    bool looks_outside;              /* lookups go on in the outer tier */
    uint32_t n_seeking;              /* sequences that this step passed over because blocks come from the outer tier */
    uint64_t outer_queries, outer_hits; /* tokens of sequences that looked there, and tokens whose blocks were ordered */
    uint64_t loads_ended;            /* the engine sets it: the host tier's moves in up to this number have ended */
    double page_move_s[2], row_s;    /* measured: seconds of a page's move, by way, and of a prompt's row; 0: not known */
    double page_load_s;              /* the same of a page from the outer tier to the host tier */
    uint64_t n_dear_hits, n_skipped_loads, n_skipped_tokens; /* load_cost.c: hits dearer than rows, and those not loaded */
    uint32_t n_store_ahead;          /* most pages that a step copies to the host tier before they are wanted */
    struct kv_events *events;        /* NULL: no events are kept */
    struct statistics *statistics;   /* the engine's; observes admissions */
    struct queue waiting;
    struct sequence **running;       /* [max_num_seqs] in their order */
    uint32_t n_running, n_parked;
    uint32_t n_state_pages;          /* pages of a recurrent state; 0: the model has none, and recurrent.c is not called */
    struct sequence **slots;         /* [max_num_seqs], NULL: free */
    struct adapter_slots adapters;
    struct features *features;       /* NULL: the model has no tower */
    bool others_run;                 /* sequences ran before the step admits more */
    bool holds_images;               /* the step computes no image before the prompts without images that wait */
    double last_text;                /* seconds; the last step in front of which a sequence without images waited or ran */
    bool awaits_features;            /* a sequence has fewer rows in the step than it owes, because its image is not computed */
    struct copy_owner *copy_owners;  /* [scheduler_max_copies] owner of each of batch->copies */
    struct hash *seen_keys;          /* [N_SEEN_KEYS] keys of recently published blocks; NULL without recurrent state */
    uint32_t *scratch;               /* [2 * n_pools * n_pages] for scheduler_check */

    /* The step being built. */
    uint64_t n_steps;                /* number of this step */
    uint32_t rows_left;
    uint32_t n_preempted, n_admitted;
    struct order last_victim, last_admitted;
    uint32_t last_victim_pool;
    bool has_stalled;                /* the last step had no row, although sequences waited or ran and no step was in flight */

    uint64_t n_swaps, n_pages_swapped_out, n_pages_swapped_in;
    uint64_t n_snapshots, n_preemptions, n_mixed_preemptions, n_redone_rows, n_prompt_rows, n_decode_rows, n_draft_rows,
        prompt_tokens, cached_tokens, cache_queries, cache_hits, host_hits;
};

enum rc scheduler_create(struct scheduler *scheduler, const struct sequence_context *context, struct statistics *statistics,
                         struct err *err);
void scheduler_destroy(struct scheduler *scheduler);
uint32_t scheduler_max_copies(const struct engine_config *config); /* the most copies of a step */
enum rc scheduler_create_batch(const struct scheduler *scheduler, size_t n_top, struct batch *batch, struct err *err);

void scheduler_add(struct scheduler *scheduler, struct sequence *sequence);
void scheduler_add_parked(struct scheduler *scheduler, struct sequence *sequence);
/* Takes a running sequence's pages and slot; it waits outside the queue. */
void scheduler_park(struct scheduler *scheduler, struct sequence *sequence);
/* Lets a parked sequence wait in the queue. */
void scheduler_unpark(struct scheduler *scheduler, struct sequence *sequence);
/* Lets a parked sequence with the same tokens as a running one run on the same pages. Without a slot, or if the other one does
 * not run, the sequence stays parked. Call it between two steps. */
void scheduler_fork(struct scheduler *scheduler, struct sequence *running, struct sequence *parked);
/* True if a step can be built while another is in flight. */
bool scheduler_can_overlap(const struct scheduler *scheduler);
/* True if the next step waits for results because it may have drafts. */
bool scheduler_awaits_drafts(const struct scheduler *scheduler);
/* Chooses the rows of a step: sets n_rows and draws of running sequences, advances n_computed, and fills tables and copies.
 * While another step is in flight, there may be no row to enqueue although sequences run. */
void scheduler_begin_step(struct scheduler *scheduler, struct batch *batch, bool is_in_flight, double now);
/* Part of it, in engine_save.c: orders copies and saves of what earlier steps have computed for requests with saves_early. */
void scheduler_save_early(struct scheduler *scheduler);
/* The number of rows, at most `most`, that drafts of the sequence can have in the step being built: of the rows that are left,
 * and in its last pages and free pages that no waiting sequence needs. With recurrent state a copy needs pages, too. */
uint32_t scheduler_draft_room(const struct scheduler *scheduler, const struct sequence *sequence, uint32_t most);
/* Gives the sequence n rows for drafts; scheduler_draft_room must allow them. */
void scheduler_take_drafts(struct scheduler *scheduler, struct sequence *sequence, uint32_t n);
/* Takes the last n rows of drafts back before the step is started. With recurrent state at least one must stay. */
void scheduler_return_drafts(struct scheduler *scheduler, struct sequence *sequence, uint32_t n);
/* Takes the last n rows of drafts back, because the drafts are not accepted: releases the pages wholly behind the rest. A
 * recurrent state goes back to before the step, so that the step's other rows are computed again. */
void scheduler_roll_back(struct scheduler *scheduler, struct sequence *sequence, uint32_t n);
/* Ends the building of a step; call it when the step has been started, or will not be. */
void scheduler_end_step(struct scheduler *scheduler);
/* Removes a waiting or running sequence and frees its pages. Call it at a step boundary, or once its results are processed. */
void scheduler_remove(struct scheduler *scheduler, struct sequence *sequence);
/* Makes every block published so far unfindable in the pool and the host tier; `recompute` also preempts all running sequences.
 * scheduler_reset_cache also removes what the outer tier has. */
void scheduler_drop_cache(struct scheduler *scheduler, bool recompute);
void scheduler_reset_cache(struct scheduler *scheduler, bool recompute);
/* Preempts all running sequences, by a swap where that is the way: the pool will lose its contents. */
void scheduler_leave_pages(struct scheduler *scheduler);
/* The pool loses its contents: all running sequences are preempted. What the host tier has can still be found. */
void scheduler_lose_pages(struct scheduler *scheduler);
/* A running sequence waits again. may_swap is false if its pages have lost their value. */
void scheduler_preempt(struct scheduler *scheduler, struct sequence *sequence, bool may_swap);
/* Requests with an adapter, but searches, go on with another one; their keys and values are computed again. */
void scheduler_move_adapter(struct scheduler *scheduler, uint64_t from, struct adapter *to);
/* Resets the cache after a commit of weights. Scores and pooled states, which must come from one epoch, start over. weights: as
 * in outer_tier_renew. */
void scheduler_new_epoch(struct scheduler *scheduler, bool recompute, const struct hash *weights);

/* The largest number of leading cached blocks that serve the sequence, at most `limit`; their pages go into the tables of a
 * free slot. In place of a page that only the host tier has stands minus the number of the tier's entry; with looks_outside,
 * PAGE_OUTSIDE in place of one that only the outer tier has. */
uint32_t scheduler_find_hit(struct scheduler *scheduler, struct sequence *sequence, uint32_t slot, uint32_t limit);
/* scheduler_pools.c: the pool to try first for a waiting sequence: the one with most of its first `limit` blocks, else the one
 * in which the fewest run. */
uint32_t scheduler_choose_pool(const struct scheduler *scheduler, struct sequence *sequence, uint32_t limit);
/* Puts the copies of the step being built in the order of their pools. */
void scheduler_sort_copies(struct scheduler *scheduler);
struct page_counts scheduler_count_pages(const struct scheduler *scheduler); /* sums over the pools */
int32_t *scheduler_table(const struct scheduler *scheduler, uint32_t group, uint32_t slot);
enum rc scheduler_check(const struct scheduler *scheduler, struct err *err);

#endif
