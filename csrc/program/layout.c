#include "layout.h"

const char *layout_fault(const struct weight *weight, const struct weight_part *part)
{
    uint64_t values = 1, most = UINT32_MAX;
    uint32_t least = weight->kind == WEIGHT_VECTOR ? 0 : 1;
    if (part->n_dims > PART_MAX_DIMS || part->n_dims < least + part->is_transposed)
        return "a matrix's tensor has 1 to 5 dimensions, a transposed one 2";
    for (uint32_t i = 0; i < part->n_dims; i++) {
        if (!part->dims[i] || values > most * weight->cols / part->dims[i])
            return "a tensor's rows can be counted";
        values *= part->dims[i];
    }
    uint64_t cols = weight->kind == WEIGHT_VECTOR ? 1 : part->dims[part->n_dims - 1 - part->is_transposed];
    bool is_plain = weight->kind == WEIGHT_MATRIX && !part->is_transposed;
    for (uint32_t i = part->n_dims; is_plain && i > 1 && cols < weight->cols; i--)
        cols *= part->dims[i - 2]; /* such as the columns of a convolution, [channels][height][width] */
    if (cols != weight->cols || (weight->kind == WEIGHT_VECTOR && part->is_transposed))
        return "a tensor has the matrix's columns";
    if (!part->inner || part->inner > part->stride)
        return "rows that a part takes in turn do not overlap";
    uint64_t last = part->rows ? part->base + (uint64_t)((part->rows - 1) / part->inner) * part->stride +
                                     (part->rows - 1) % part->inner : 0;
    return last >= values / cols ? "a part's rows lie inside of its tensor" : NULL;
}

struct row_run layout_run(const struct weight_part *part, uint32_t first_row, uint64_t slice_rows)
{
    struct row_run run = {first_row, part->rows - first_row, 0, 1};
    uint32_t in_group = first_row % part->inner;
    run.source_row = part->base + (uint64_t)(first_row / part->inner) * part->stride + in_group;
    if (part->inner == 1)
        run.step = part->stride;
    else if (part->inner < part->stride && part->inner - in_group < run.n_rows)
        run.n_rows = part->inner - in_group;
    uint64_t left = (slice_rows - 1 - run.source_row % slice_rows) / run.step + 1;
    if (left < run.n_rows)
        run.n_rows = (uint32_t)left;
    return run;
}

uint64_t layout_slice(const struct weight_part *part)
{
    return part->is_transposed ? part->dims[part->n_dims - 1] : UINT64_MAX;
}

struct element_steps layout_steps(const struct weight *weight, const struct weight_part *part, const struct row_run *run)
{
    uint64_t cols = weight->cols, slice = layout_slice(part);
    if (part->is_transposed)
        return (struct element_steps){run->source_row / slice * slice * cols + run->source_row % slice, run->step, slice};
    return (struct element_steps){run->source_row * cols, run->step * cols, 1};
}
