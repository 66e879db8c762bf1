/* settle.h: what is left to do once tensors have been written to a model's weights, by a load or by an update: rows are divided
 * by their lengths where a weight says so, and what no update has to bring (constants, values of the program) gets what it held
 * before, which deep sleep has taken away. Called by model.c and by update.c while no step runs. */
#ifndef LLMPY_SETTLE_H
#define LLMPY_SETTLE_H

#include "model_state.h"

/* is_written: a tensor was written to the part since the last call. RC_UNSUPPORTED: rows of a quantised type. */
enum rc settle_part(struct model *model, uint32_t weight, uint32_t part, bool is_written, struct err *err);
enum rc settle_values(struct model *model, struct err *err); /* of weights that are no tensors of a checkpoint */
enum rc settle_all(struct model *model, struct err *err); /* behind a load */

#endif
