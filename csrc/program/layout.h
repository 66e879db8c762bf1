/* layout.h: maps the rows of a weight's part to rows of the checkpoint tensor that the part is taken from. The rows of a
 * tensor are counted over all of its dimensions but the columns. The columns are the last dimension (or the last ones, whose
 * product they are), or the last but one if the part is transposed. The rows of a vector's tensor are its elements. Loads,
 * updates, checksums and dummy values all use layout_run. */
#ifndef LLMPY_LAYOUT_H
#define LLMPY_LAYOUT_H

#include "program.h"

/* The requirement that a part's layout does not meet, or NULL. */
const char *layout_fault(const struct weight *weight, const struct weight_part *part);
/* The longest run of rows, from first_row of the part on, that lie evenly spaced in the tensor and inside one slice of
 * slice_rows rows of the tensor. */
struct row_run layout_run(const struct weight_part *part, uint32_t first_row, uint64_t slice_rows);
/* The number of consecutive tensor rows that lie evenly spaced in storage. For a transposed part that is the size of the last
 * dimension. */
uint64_t layout_slice(const struct weight_part *part);
/* The index of element (0, 0) of a run in the tensor as stored, and the steps from one row and one column to the next. */
struct element_steps {
    uint64_t first, row, col;
};
struct element_steps layout_steps(const struct weight *weight, const struct weight_part *part, const struct row_run *run);

#endif
