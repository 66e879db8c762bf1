/* draft_program.h: sources of drafts that run a program of their own: a second, smaller model (draft_model.c), or a head on the
 * hidden states of the model (draft_head.c). The drafter has batches and a pool of its own. A block of a sequence lies in the
 * page of the same number in both pools: the number that the target's first group of full attention has for it. So hits, forks
 * and preemption need no second block manager. sequence->drafts.n_computed is the number of leading positions that the drafter
 * has computed. What it has not computed costs drafts, never correctness. The drafter draws with the seed, position, penalties
 * and mask of the target's row, so that equal distributions accept every draft. Driver's thread only. */
#ifndef LLMPY_DRAFT_PROGRAM_H
#define LLMPY_DRAFT_PROGRAM_H

#include "engine.h"
#include "scheduler.h"

/* Whose rows a slot had in the last step. A sample that was forked in that step has the rows of another slot. */
struct slot_rows {
    const struct sequence *owner; /* NULL: none */
    uint32_t slot;
    bool is_fork;
};

struct draft_program {
    struct draft_source source;
    const struct engine_config *config; /* the engine's */
    uint32_t group;                     /* of the target, whose page numbers the drafter uses */
    struct page_tables tables;
    struct batch batches[2];            /* used alternately, as runners expect */
    struct batch *batch;                /* the one being filled */
    uint64_t n_started;
    struct sequence **drawing;          /* [max_seqs] sequences of the batch's tasks */
    /* Of heads. */
    struct slot_rows *rows;             /* [max_seqs] by slot */
    const struct batch *last;           /* the last step; NULL: none yet */
    uint32_t *place;                    /* [max_seqs] by slot: the index of its sequence in `last` */
};

/* config: the engine's copy, whose drafter has a runner. The error of RC_UNSUPPORTED or RC_CONFIG names what does not fit. */
enum rc draft_program_create(const struct engine_config *config, struct draft_source **source, struct err *err);
void draft_program_destroy(struct draft_source *source);

/* A pass is one batch of the drafter's program. */
void pass_begin(struct draft_program *drafter);
/* Adds rows of a sequence at positions from `first` on, as far as the batch has room, with the tokens `ahead` positions later.
 * Returns how many. */
uint32_t pass_add_rows(struct draft_program *drafter, const struct scheduler *scheduler, const struct sequence *sequence,
                       uint32_t first, uint32_t n, uint32_t ahead);
/* Draws the draft behind n_ahead others from the row that was added last. */
void pass_add_draw(struct draft_program *drafter, struct sequence *sequence, uint32_t n_ahead);
/* Fills in the mask of the place behind n drafts. False if the grammar ends there or refuses a draft. */
bool pass_has_mask(struct sequence *sequence, uint32_t n);
/* Computes the batch and appends the drawn ids to their sequences' drafts. */
enum rc pass_run(struct draft_program *drafter, const struct runner *runner, struct err *err);

/* struct draft_source: draft */
enum rc draft_by_model(void *ctx, struct scheduler *scheduler, struct err *err);
enum rc draft_by_head(void *ctx, struct scheduler *scheduler, struct err *err);
enum rc draft_by_heads(void *ctx, struct scheduler *scheduler, struct err *err);

#endif
