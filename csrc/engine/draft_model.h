/* draft_model.h: the source of drafts that asks a second, smaller model. The drafter has a batch and a pool of its own. A
 * block of a sequence lies in the page of the same number in both pools: the number that the target's first group of full
 * attention has for it. So hits, forks, copies and preemption need no second block manager. sequence->drafts.n_computed is the
 * number of leading positions that the drafter has computed; where it lags behind, the drafter catches up before it drafts.
 * What it has not computed costs drafts, never correctness. The drafter draws with the seed, position, penalties and mask of
 * the target's row, so that equal distributions accept every draft. Driver's thread only. */
#ifndef LLMPY_DRAFT_MODEL_H
#define LLMPY_DRAFT_MODEL_H

#include "engine.h"

/* config: the engine's copy, whose drafter has a runner. The error of RC_UNSUPPORTED or RC_CONFIG names what does not fit. */
enum rc draft_model_create(const struct engine_config *config, struct draft_source **source, struct err *err);
void draft_model_destroy(struct draft_source *source);

#endif
