/* settle.h: completes the weights after a load or an update has written tensors. It divides rows by their lengths if the
 * weight has has_unit_rows. It restores the values that an update may leave out (constant parts, vectors from the program), as
 * deep sleep has discarded them. Called by model.c and update.c while no step runs. */
#ifndef LLMPY_SETTLE_H
#define LLMPY_SETTLE_H

#include "model_state.h"

/* is_written: a tensor was written to the part since the last call. RC_UNSUPPORTED: rows of a quantised type. */
enum rc settle_part(struct model *model, uint32_t weight, uint32_t part, bool is_written, struct err *err);
enum rc settle_values(struct model *model, struct err *err); /* uploads the vectors whose values are in the program */
enum rc settle_all(struct model *model, struct err *err); /* after a load */

#endif
