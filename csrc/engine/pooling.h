/* pooling.h: requests that want hidden states of their prompt instead of tokens: chooses their rows and collects the states.
 * The rows of a sequence arrive in the order of their positions, however the prompt is chunked. A mean sums them in float64 in
 * this order, so its bits do not depend on chunks, cache or batch. pooling_plan runs on the submitting thread, the other
 * functions on the driver's. */
#ifndef LLMPY_POOLING_H
#define LLMPY_POOLING_H

#include "sequence.h"

/* Sets the rows that the request wants; call it before the request's memory is laid out. */
void pooling_plan(struct request *request);
bool pooling_wants(const struct sequence *sequence, uint32_t position);
/* Reads the batch's state rows first .. first + n: the next ones that the sequence wants. */
enum rc pooling_take(struct sequence *sequence, const struct batch *batch, uint32_t first, uint32_t n, bool *is_finite,
                     struct err *err);

#endif
