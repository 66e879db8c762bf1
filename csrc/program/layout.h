/* layout.h: where the rows of a weight's part lie in the tensor of the checkpoint that it is taken from. The rows of a tensor
 * are counted over all of its dimensions but the columns: the last one, or the last but one where the part says that it is
 * transposed; the rows of a vector's tensor are its elements. Loads, updates, checksums and made-up values all go through
 * layout_run, so there is one truth about the order. */
#ifndef LLMPY_LAYOUT_H
#define LLMPY_LAYOUT_H

#include "program.h"

/* What is wrong with a part's layout, or NULL. */
const char *layout_fault(const struct weight *weight, const struct weight_part *part);
/* The longest run of rows from first_row of the part on that lie evenly spaced in the tensor and inside of one slice of so many
 * rows of it. */
struct row_run layout_run(const struct weight_part *part, uint32_t first_row, uint64_t slice_rows);
/* Rows of the tensor that lie evenly spaced in it as it is stored: those of a transposed one do in its last dimension. */
uint64_t layout_slice(const struct weight_part *part);
/* Number of element (0, 0) of a run, and what the next row and column add to it, in the tensor's own order. */
struct element_steps {
    uint64_t first, row, col;
};
struct element_steps layout_steps(const struct weight *weight, const struct weight_part *part, const struct row_run *run);

#endif
