/* linear_units.h: what linear.cu asks of linear_units.cu. */
#ifndef LLMPY_CUDA_LINEAR_UNITS_H
#define LLMPY_CUDA_LINEAR_UNITS_H

#include "../core/tensor_map.cuh"
#include "../core/units.cuh"
#include "linear.cuh"

#define UNITS_FEW_ROWS 16u /* of x, at most, of the kernel for few */

/* The box in which a kernel reads x: rows, and blocks of 64 columns. */
struct units_box {
    uint32_t rows, blocks;
};

cudaError_t units_open(void);
struct units_box units_few_box(uint32_t n_rows);
struct units_box units_many_box(const struct cuda *cuda, const struct matrix *matrix, uint32_t n_rows);
/* x_map: boxes as said by the functions above. */
void units_few_multiply(const struct cuda *cuda, const struct matrix *matrix, const struct tensor_map &x_map, bool is_product,
                        const struct output &out);
void units_many_multiply(const struct cuda *cuda, const struct matrix *matrix, const struct tensor_map &x_map, bool is_product,
                         const struct output &out);
void units_plain_multiply(const struct cuda *cuda, const struct matrix *matrix, const struct view *x, const struct output &out);

#endif
