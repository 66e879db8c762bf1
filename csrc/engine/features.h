/* features.h: which rows of the model's feature pool hold the features of which item. The pool is a cache by content: an
 * item of a later prompt finds the features of an equal one. A step uses the entries of all items whose rows it computes.
 * All other entries may be evicted, the least recently used first. An evicted entry is computed again when a step needs it,
 * with the same bits. So no sequence keeps an entry, and a preemption has nothing to give back. A large item is computed in
 * parts, one a step, so that what arrives meanwhile does not wait for all of it; its entry is of use behind the last part.
 * Only the driver's thread calls these functions. Nothing is allocated after features_create. */
#ifndef LLMPY_FEATURES_H
#define LLMPY_FEATURES_H

#include "../step/runner.h"
#include "sequence.h"

struct features;

struct features_counts {
    uint64_t n_items, n_pieces, n_rows; /* computed items, their pieces and rows */
    uint64_t n_again;                   /* of n_items: computed once more for the same request, whose features were evicted */
    uint64_t n_hits, n_evictions;       /* items that a request's first look found; evictions */
};

enum rc features_create(const struct runner *runner, struct features **features, struct err *err);
void features_destroy(struct features *features);
/* holds: the step computes no item and no row of a prompt with items, until features_release. yields: it computes few of these
 * rows. Rows of new tokens are not concerned. */
void features_begin_step(struct features *features, struct batch *batch, bool holds, bool yields);
void features_release(struct features *features);
/* How many of the next n rows of a sequence the step can compute: its items are in the pool, or the step computes them. */
uint32_t features_take(struct features *features, const struct sequence *sequence, uint32_t n);
/* Fills the pool's row of each position first .. first + n; -1: it stands for no feature. Returns whether one does. */
bool features_fill(const struct features *features, const struct sequence *sequence, uint32_t first, uint32_t n,
                   int32_t *visual);
/* The sequence has ended, and with it the memory of its items: none of them goes on. */
void features_forget(struct features *features, const struct sequence *sequence);
/* The features are of weights that no longer are. */
void features_reset(struct features *features);
const struct features_counts *features_counts(const struct features *features);

#endif
