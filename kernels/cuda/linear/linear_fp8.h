/* linear_fp8.h: what linear.cu asks of linear_fp8.cu. */
#ifndef LLMPY_CUDA_LINEAR_FP8_H
#define LLMPY_CUDA_LINEAR_FP8_H

#include "gemm_tiles.cuh"
#include "linear_fp8.cuh"

/* A product of a matrix that rounds its activations to the type of its numbers. */
struct fp8_product {
    const struct cuda *cuda;
    const struct fp8_memory *memory;
    const struct matrix *matrix;
    bool is_product;                      /* act(gate) * up */
    const struct view *x;
    const struct add_rms_norm_args *norm; /* NULL, or what makes x */
    uint32_t n_rows;
    struct output out;
};

cudaError_t fp8_open(const struct cuda *cuda);
/* Completes a matrix whose products round their activations, and takes it from the list. */
enum rc fp8_take(struct cuda *cuda, map_encoder encode, struct fp8_memory *memory, struct matrix *matrix, struct err *err);
void fp8_drop(struct fp8_memory *memory, const struct matrix *matrix);
/* Finds out which matrices have shared scales. Runs outside of a step. */
enum rc fp8_compare_scales(struct cuda *cuda, struct fp8_matrix *first, bool *is_stale, struct err *err);

/* Does a kernel take the product? */
bool fp8_fits(const struct fp8_product &p);
bool fp8_row_fits(const struct fp8_product &p);
/* One row, which the kernel rounds itself. */
void fp8_row_multiply(const struct fp8_product &p);
/* The rounded rows of x. */
struct fp8_rows fp8_rounded(const struct fp8_product &p, uint32_t n_padded);
/* Up to SKINNY_ROWS rows, padded to 8 * eights. x_map: boxes of so many rows and of fp8_few_slabs slabs. */
uint32_t fp8_few_slabs(uint32_t eights);
void fp8_few_multiply(const struct fp8_product &p, const struct tensor_map &x_map, const struct fp8_rows &x, uint32_t eights);
/* Any number of rows, padded to FP8_PADDED. */
enum rc fp8_many_multiply(const struct fp8_product &p, map_encoder encode, const struct gemm_device *device,
                          const struct fp8_rows &x, struct err *err);
/* The same on every device, padded to whole eights. */
void fp8_plain_multiply(const struct fp8_product &p, const struct fp8_rows &x);

#endif
