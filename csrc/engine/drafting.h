/* drafting.h: speculation inside a step. Once the scheduler has chosen the rows of a step, the drafter adds rows for
 * drafts. The drafts of a sequence stand behind its known tokens, in output[n_output ...]. Every row from the last known
 * token on draws a token of its own, with the penalties, bans and mask that hold if the drafts before it are accepted. A
 * draft is accepted if it equals the token drawn in its place and all drafts before it are accepted. Results behind the
 * first draft that is not accepted are dropped. Driver's thread only. Semantics: docs/develop/engine.md, Drafts. */
#ifndef LLMPY_DRAFTING_H
#define LLMPY_DRAFTING_H

#include "draft.h"
#include "draft_pace.h"
#include "scheduler.h"
#include "statistics.h"

/* Sums over the steps so far, in which older steps count less. */
struct step_costs {
    bool has_begun; /* the first step with so many sequences has passed; it is not learnt from, because it may load kernels */
    double n, seqs, rows, us, rows_rows, rows_us, tokens;
};

#define N_BATCH_SIZES 16u /* size i: batches of 2^i sequences or more, but fewer than 2^(i + 1) */

struct drafter {
    const struct draft_source *source; /* NULL: no speculation */
    struct draft_source *own;          /* the same, if the engine made it */
    bool adapts, is_recurrent;
    bool overlaps;                     /* a step without drafts is scheduled while the step before is computed; a head reads
                                        * the states of every step before the next one overwrites them */
    struct step_costs costs;
    struct draft_pace paces[N_BATCH_SIZES];
    uint32_t batch_size;               /* of the last step, as in N_BATCH_SIZES */
};

enum rc drafter_create(struct drafter *drafter, const struct engine_config *config, struct err *err);
void drafter_destroy(struct drafter *drafter);

/* The sequence enters the scheduler. */
void drafter_enter(const struct drafter *drafter, struct sequence *sequence);
/* Adds rows for drafts to the step being built. No other step may be in flight. */
enum rc drafter_schedule(const struct drafter *drafter, struct scheduler *scheduler, struct err *err);
/* Takes up the next result of a sequence with drafts; results: this one and those behind it. The first call returns the rows of
 * drafts that are not accepted. Returns false if the result is to be dropped. */
bool drafter_takes(struct scheduler *scheduler, struct sequence *sequence, const struct sample_result *results,
                   struct engine_stats *stats);
/* Learns from a step in which n_accepted of the sequence's n drafts are accepted; draft_counts has them already. */
void drafter_learn(struct sequence *sequence, uint32_t n, uint32_t n_accepted);
/* Notes a sequence's new token, after its stop rules. */
void drafter_note(const struct drafter *drafter, struct sequence *sequence, int32_t id);
void drafter_end(const struct drafter *drafter, struct sequence *sequence); /* the sequence has finished */
/* Learns from a step. us: time from the results of the step before, or from the step's beginning if the engine was idle. */
void drafter_observe(struct drafter *drafter, const struct step_record *record, double us);

/* The number of drafts that pay. rates[i]: estimated share of the drafts at place i that are accepted if those before them are.
 * cost: time of one more row, in tokens that the engine draws in that time. */
uint32_t drafts_worth(const float *rates, uint32_t most, float cost);
/* That cost, from the steps observed. */
float step_costs_of_row(const struct step_costs *costs);

#endif
