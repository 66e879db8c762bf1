/* seek.h: waiting sequences look into the outer tier. Before a sequence is admitted, the blocks of its longest hit over all
 * tiers are ordered into the host tier, and it is passed over until they have come; then it is admitted as ever, with what is
 * there. A sequence whose prompt another engine still computes (awaits_s) looks again and again meanwhile. Driver's thread
 * only; only with an outer tier. */
#ifndef LLMPY_SEEK_H
#define LLMPY_SEEK_H

#include "scheduler.h"

/* True while blocks of a waiting sequence come from the outer tier, or are to come. The first call orders those that are
 * there. limit: most blocks that the cache may serve. */
bool seek_is_on(struct scheduler *scheduler, struct sequence *sequence, uint32_t limit, double now);
/* True for a sequence whose blocks another engine still computes. */
bool seek_awaits(const struct sequence *sequence);

#endif
