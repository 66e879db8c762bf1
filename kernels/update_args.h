/* update_args.h: weight updates from the caller's tensors, and memory and groups that processes share for them. A part of
 * backend.h, which includes it behind struct view. */
#ifndef LLMPY_UPDATE_ARGS_H
#define LLMPY_UPDATE_ARGS_H

/* ---- weight updates from the caller's tensors -------------------------------------------------------------------------- */

/* A tensor of the caller: element (r, c) is item r * row_stride + c * col_stride of data. A vector has one row. */
struct tensor_view {
    const void *data;
    uint32_t dtype;                  /* DTYPE_F32, DTYPE_F16, DTYPE_BF16 */
    uint32_t n_rows, n_cols;
    int64_t row_stride, col_stride;  /* in items; may be negative */
    bool is_host;                    /* data is in host memory, else in device memory; the CPU backend makes no difference */
};

/* Where a checkpoint tensor, or a piece of it, is stored: rows of a part of a matrix, or (matrix NULL) a piece of a vector. A
 * vector stores x + offset for element x. Element (r, c) is element first_index + r * row_step + c * col_step of the
 * checkpoint's tensor. */
struct tensor_place {
    struct matrix *matrix;
    uint32_t part;
    float *vector;
    uint32_t n_values;               /* length of the vector's piece */
    float offset;
    uint32_t first_row, n_rows;      /* rows of the matrix part */
    uint64_t first_index, row_step, col_step;
};

/* stream: the device stream that produced `from`; the write is enqueued on the same stream. NULL: the device's default. */
struct tensor_write_args {
    struct tensor_place to;
    struct tensor_view from;         /* same shape as the place */
    void *stream;
};

/* From now on the backend reads a part of a matrix from the caller's memory, and gives back its own memory of the part as far
 * as it can. Rows [rows of the part][n_cols] are in the part's type, a float type, row_bytes apart. They stay where they are
 * until tensor_write or matrix_write writes the part again, which ends the loan, or until the matrix is destroyed. The caller
 * may change their values while no operation runs. Every operation gives the same bits as if the part had been written. */
struct matrix_borrow_args {
    struct matrix *matrix;
    uint32_t part;
    const void *rows;
    size_t row_bytes;
};

/* Where a part of a matrix lies in the device's memory: *rows [rows of the part][n_cols] in the part's type, a float type,
 * *row_bytes apart, until the matrix is destroyed. *rows is NULL if the backend orders the values otherwise. The caller may
 * change the values while no operation runs, and may give these rows to tensor_write, which then has nothing to copy. */
struct matrix_rows_args {
    struct matrix *matrix;
    uint32_t part;
    void **rows;
    size_t *row_bytes;
};

/* Checksum: the sum over a weight's elements of mix64(index in the checkpoint's tensor, stored bits) (csrc/base/mix.h) modulo
 * 2^64. For a quantised type the stored bits are those of the element's float32 value. */
struct tensor_sum {
    uint64_t sum, n_non_finite;
};
struct tensor_sum_args {
    struct tensor_place of;
    const struct tensor_view *from;  /* sum what `of` would hold after a write of this; NULL: sum what `of` holds now */
    void *stream;
    struct tensor_sum *result;
    bool is_check;                   /* with `from`: only n_non_finite is wanted. A backend that rounds_tensors counts values
                                      * beyond 2^100, too, where `of` is quantised */
};

/* ---- other processes -------------------------------------------------------------------------------------------------- */

/* Memory that another process exported. */
struct import_args {
    const char *device;
    const uint8_t *handle; /* [64] from export_memory; NULL: use descriptor */
    int descriptor;        /* file descriptor of an allocation (cuMemExportToShareableHandle); the caller keeps and closes it */
    size_t size_bytes;     /* bytes to map, from the start of the allocation */
    const uint8_t *event;  /* [64] handle of an event to wait for, or NULL */
};
struct imported;           /* each backend defines it */

/* Processes that broadcast to each other over NCCL. When a function of a group fails, the group is aborted and all later calls
 * fail. */
#define GROUP_SLOTS 8u
#define GROUP_ID_BYTES 128u
struct group_options {
    const char *device, *nccl; /* nccl: path of the library */
    const uint8_t *id;         /* [GROUP_ID_BYTES] */
    uint32_t rank, n_ranks;
};
struct process_group;

/* These functions take no backend context, because a trainer's process has none. */
struct peers {
    enum rc (*import_memory)(const struct import_args *args, struct imported **imported, void **memory, struct err *err);
    void (*release_memory)(struct imported *imported);
    /* Returns the handle and size of the allocation that contains `memory`, and the offset of `memory` in it. */
    enum rc (*export_memory)(const char *device, const void *memory, uint8_t *handle, size_t *offset, size_t *size_bytes,
                             struct err *err);
    enum rc (*group_id)(const char *nccl, uint8_t *id, struct err *err);
    /* Returns before the other processes have connected; group_settle waits for them. */
    enum rc (*group_open)(const struct group_options *options, struct process_group **group, struct err *err);
    /* Waits at most `seconds` until the last call on the group has been enqueued on the device. Make the next call only when
     * *is_done is true. */
    enum rc (*group_settle)(struct process_group *group, double seconds, bool *is_done, struct err *err);
    /* Returns the slot's memory, at least size_bytes large. The group owns it; a call with a larger size reallocates it. */
    enum rc (*group_buffer)(struct process_group *group, uint32_t slot, size_t size_bytes, void **memory, struct err *err);
    /* Sums one float over all ranks, in slot 0. This makes the first connection, in the same way as vLLM does. */
    enum rc (*group_greet)(struct process_group *group, struct err *err);
    /* Broadcasts rank 0's memory into the memory of the other ranks. */
    enum rc (*group_broadcast)(struct process_group *group, uint32_t slot, void *memory, size_t size_bytes, struct err *err);
    /* Waits at most `seconds` until the slot's broadcast is complete. Call it after group_settle. */
    enum rc (*group_wait)(struct process_group *group, uint32_t slot, double seconds, bool *is_done, struct err *err);
    /* Copies device memory into the slot's memory and waits for the copy, but not for broadcasts. */
    enum rc (*group_copy)(struct process_group *group, uint32_t slot, const void *memory, size_t size_bytes, void **copy,
                          struct err *err);
    void (*group_close)(struct process_group *group);
};

#endif
