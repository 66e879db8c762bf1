/* seek.h: waiting sequences look into the outer tier. Before a sequence is admitted, the blocks of its longest hit over all
 * tiers are ordered into the host tier, and it is passed over until they have come; then it is admitted as ever, with what is
 * there. Driver's thread only; only with an outer tier. */
#ifndef LLMPY_SEEK_H
#define LLMPY_SEEK_H

#include "scheduler.h"

/* True while blocks of a waiting sequence come from the outer tier. The first call orders them. limit: most blocks that the
 * cache may serve. */
bool seek_is_on(struct scheduler *scheduler, struct sequence *sequence, uint32_t limit);

#endif
