/* pooling.h: requests that want states of their prompt instead of tokens: which rows they want, and what becomes of them. The
 * rows of a sequence come in the order of their positions however the prompt was cut, and a mean is their float64 sum in this
 * order, so its bits do not depend on chunks, cache or batch. pooling_plan runs on the submitting thread, the rest on the
 * driver's. */
#ifndef LLMPY_POOLING_H
#define LLMPY_POOLING_H

#include "sequence.h"

/* Which rows, before the request's memory is laid out. */
void pooling_plan(struct request *request);
bool pooling_wants(const struct sequence *sequence, uint32_t position);
/* Takes the batch's state rows first .. first + n, which are the next that the sequence wants. */
enum rc pooling_take(struct sequence *sequence, const struct batch *batch, uint32_t first, uint32_t n, bool *is_finite,
                     struct err *err);

#endif
