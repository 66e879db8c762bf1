/* weights.h: a program's weights on a backend: matrices in the backend's layout, vectors as float32. weights_load loads them
 * part by part from a checkpoint, or generates dummy values from a seed, and converts them to `dtype`. The model owns the
 * weights. Every step reads them; only weights_load, update.c and settle.c write them. */
#ifndef LLMPY_WEIGHTS_H
#define LLMPY_WEIGHTS_H

#include "checkpoint.h"
#include "program.h"

struct weights;

struct weights_options {
    uint32_t dtype;       /* unquantised matrices are converted to this type; DTYPE_NONE: as in the file */
    uint32_t arithmetic;  /* enum arithmetic */
    bool is_dummy;        /* no checkpoint: seeded, non-zero values */
    bool is_mxfp4;        /* dummy weights of experts are MXFP4 */
    uint64_t seed;
    const struct weights *lender; /* has the weights that the program borrows; NULL: it borrows none */
    /* Called after every part; false stops the load with RC_INVALID. May be NULL. */
    bool (*progress)(void *ctx, uint64_t done_bytes, uint64_t total_bytes);
    void *progress_ctx;
};

enum rc weights_load(const struct program *program, const struct checkpoint *checkpoint, const struct weights_options *options,
                     const struct backend *backend, void *backend_ctx, struct weights **weights, struct err *err);
void weights_destroy(struct weights *weights);
struct matrix *weights_matrix(const struct weights *weights, uint32_t weight);      /* of a WEIGHT_MATRIX */
const float *weights_vector(const struct weights *weights, uint32_t weight);        /* of a WEIGHT_VECTOR, device memory */
/* For settle.c: the last values of a vector with constant parts, in host memory; NULL for other weights. */
float *weights_kept(const struct weights *weights, uint32_t weight);
/* Where rows of a part lie, for the backend's tensor_write and tensor_sum. */
struct tensor_place weights_place(const struct weights *weights, uint32_t weight, uint32_t part, const struct row_run *rows);
uint32_t weights_stored(const struct weights *weights, uint32_t weight, uint32_t part); /* enum dtype */
size_t weights_bytes(const struct weights *weights);
size_t weights_tower_bytes(const struct weights *weights); /* of the matrices of the tower */
/* Writes dummy values (dummy.h) to rows of a matrix's part. For weights_load and for tests of backends. */
enum rc weights_fill(const struct backend *backend, void *backend_ctx, struct matrix *matrix, uint32_t part, uint32_t dtype,
                     const struct row_run *rows, uint32_t cols, uint64_t key, struct err *err);

#endif
