/* linear_sync.h: what linear.cu asks of linear_sync.cu, whose kernels run on every device. */
#ifndef LLMPY_CUDA_LINEAR_SYNC_H
#define LLMPY_CUDA_LINEAR_SYNC_H

#include "linear.cuh"

#define SYNC_FEW_ROWS 32u /* of x, at most, of the kernel for few */

cudaError_t sync_open(const struct cuda *cuda);
/* A weight of the activations' type with whole 64s of columns (sync_many: any columns), or in units; x on multiples of 16
 * bytes. */
void sync_few(const struct cuda *cuda, const struct matrix *matrix, const struct view *x, bool is_product,
              const struct output &out);
void sync_many(const struct cuda *cuda, const struct matrix *matrix, const struct view *x, bool is_product,
               const struct output &out);
void sync_units_few(const struct cuda *cuda, const struct matrix *matrix, const struct view *x, bool is_product,
                    const struct output &out);
void sync_units_many(const struct cuda *cuda, const struct matrix *matrix, const struct view *x, bool is_product,
                     const struct output &out);

#endif
