/* update_quantise.h: tensors of floats that an update writes to quantised weights. They are rounded on the host, by the
 * function that loads use (quantise.h). */
#ifndef LLMPY_UPDATE_QUANTISE_H
#define LLMPY_UPDATE_QUANTISE_H

#include "../../kernels/backend.h"

#define QUANTISED_BYTES ((size_t)8 << 20) /* of float32 that are rounded at once; more if a row is longer */

/* Rounds a view in host memory to rows of `dtype`, which *rows owns afterwards. RC_WEIGHTS: values are not finite. */
enum rc update_quantise(const struct tensor_view *view, uint32_t dtype, void **rows, struct err *err);
/* Writes such rows to their place, and waits. */
enum rc update_write_rows(const struct backend *backend, void *ctx, const struct tensor_place *place, const void *rows,
                          struct err *err);
/* The checksum of such rows. */
enum rc update_sum_rows(const struct backend *backend, void *ctx, const struct tensor_sum_args *args, uint32_t dtype,
                        const void *rows, struct err *err);

#endif
