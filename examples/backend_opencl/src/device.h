/* device.h: one opened device. device.c opens it and owns its memory and queue; matrix.c and operations.c use it. The queue is
 * in order, so an operation needs no events. Device memory is coarse-grained shared virtual memory: an address plus an offset
 * is an address, as the core wants it. */
#ifndef LLMPY_OPENCL_DEVICE_H
#define LLMPY_OPENCL_DEVICE_H

#include "opencl.h"

#include <llmpy_backend.h>

#define GROUP 64u          /* work items of a group */
#define PANEL 16u          /* rows of a matrix that lie together, column by column */
#define LINEAR_ROWS 4u     /* rows of x that a work item multiplies, if there are that many */
#define MAX_HEAD_DIM 512u

#define KERNELS(F) \
    F(embed) F(linear_row_f32) F(linear_row_f16) F(linear_row_bf16) F(linear_rows_f32) F(linear_rows_f16) F(linear_rows_bf16) \
    F(rms_norm) F(layer_norm) F(gated) F(act) F(add) F(select_rows) F(take) F(position_scale) F(scale_logits) F(rope_table) \
    F(rope) F(kv_write) F(attention)
enum kernel {
#define NAME(name) KERNEL_##name,
    KERNELS(NAME)
#undef NAME
    N_KERNELS
};

struct device {
    struct opencl cl;
    handle id, context, queue, program, kernels[N_KERNELS];
    void *nothing; /* device memory for pointers that are NULL */
    uint32_t linear_group; /* work items of a group of a linear */
    char description[160];
};

/* Rows first_row, first_row + 1, .. of a matrix, in panels of PANEL rows: element (r, k) is item (r / PANEL * n_cols + k) * PANEL
 * + r % PANEL. All rows have one stored type: float32, float16 or bfloat16. */
struct block {
    uint32_t first_row, n_rows, dtype;
    void *items;
};
struct matrix {
    struct device *device;
    uint32_t n_cols, n_parts, n_blocks;
    struct matrix_part *parts;
    struct block *blocks;
    size_t size_bytes;
};

extern const struct backend_host *host;

/* RC_DEVICE with the call's name and code, if the code is not 0. */
enum rc check(int32_t code, const char *call, struct err *err);

/* Enqueues a kernel over `columns` x `rows` work items, in groups of `group` columns. One letter of `types` an argument: p an
 * address, u a uint32_t, f a float, z a size_t. */
enum rc launch(struct device *d, enum kernel kernel, size_t columns, size_t rows, uint32_t group, struct err *err,
               const char *types, ...);

enum rc device_open(const struct backend_options *options, void **ctx, struct err *err);
void device_close(void *ctx);
enum rc device_describe(const char *device, bool wants_free, struct device_info *info, struct err *err);
enum rc buffer_create(void *ctx, size_t size_bytes, void **buffer, struct err *err);
void buffer_destroy(void *ctx, void *buffer, size_t size_bytes);
enum rc upload(void *ctx, void *target, const void *from, size_t size_bytes, struct err *err);
enum rc download(void *ctx, void *to, const void *source, size_t size_bytes, struct err *err);
enum rc synchronize(void *ctx, struct err *err);

bool supports(void *ctx, uint32_t dtype, uint32_t use);
enum rc matrix_create(void *ctx, const struct matrix_desc *desc, struct matrix **matrix, struct err *err);
void matrix_destroy(void *ctx, struct matrix *matrix);
size_t matrix_bytes(const struct matrix *matrix);
uint32_t matrix_arithmetic(const struct matrix *matrix, uint32_t part);
enum rc matrix_write(void *ctx, struct matrix *matrix, uint32_t part, uint32_t first_row, uint32_t n_rows, const void *rows,
                     struct err *err);
enum rc matrix_read(void *ctx, const struct matrix *matrix, uint32_t first_row, uint32_t n_rows, float *rows, struct err *err);

#endif
