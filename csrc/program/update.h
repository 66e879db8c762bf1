/* update.h: writes new weights to a model, by the tensor names of its checkpoint: update_begin, update_check and update_write
 * of each tensor, update_finish, update_settle, update_end. A tensor is checked before its first byte is written. Writes are in
 * place, so the model must not run between the first update_write and update_settle. Names in program->ignored, such as
 * aliases of tied weights, are accepted and skipped. py_update.c calls these functions and pauses the engine meanwhile; one
 * thread at a time. */
#ifndef LLMPY_UPDATE_H
#define LLMPY_UPDATE_H

#include "model.h"

#define UPDATE_MAX_DIMS 8

struct update;

/* A tensor as the caller describes it; this module knows no framework. */
struct update_tensor {
    const void *data;            /* of the first item */
    /* Used if `data` is not set: reads n_bytes from byte `first` of the tensor. The update reads window by window into a buffer
     * that it owns. No stride may be negative then. */
    enum rc (*read)(void *ctx, uint64_t first, size_t n_bytes, void *to, struct err *err);
    void *read_ctx;
    uint32_t dtype;              /* DTYPE_NONE: llmpy has no such type; messages call it `type` */
    char type[24];
    uint32_t n_dims;
    int64_t shape[UPDATE_MAX_DIMS], strides[UPDATE_MAX_DIMS]; /* outermost first; strides in items, of either sign */
    bool is_host;
    void *stream;                /* as in struct tensor_write_args */
    bool is_lent;                /* the model may read the tensor in place from now on (matrix_borrow in backend.h) */
};

enum update_fate { UPDATE_FRESH, UPDATE_REPEATED, UPDATE_SKIPPED };

/* A tensor name of the model, and what was written to it. Several parts of weights may come from one tensor. */
struct update_entry {
    const char *name;
    uint32_t piece; /* index of the first piece */
    uint32_t n_writes;
    uint64_t lent_bytes; /* of its last write: bytes of weights that the model reads in place */
    bool is_constant; /* if no tensor is written to it, it keeps its values */
};

/* models [n_ranks]: of a team. Each rank takes its rows of a tensor. RC_UNSUPPORTED: the backend has no tensor_write, or the
 * model's GGUF file has another order of rows. */
enum rc update_begin(struct model *const *models, uint32_t n_ranks, struct update **update, struct err *err);
/* The same of ranks on several hosts. models: NULL where a rank is on another host, programs [n_ranks]: those of these ranks.
 * Names are those of all ranks; checks, writes and sums cover the ranks of this host, sums without the rows that ranks before
 * them have. */
enum rc update_begin_of(struct model *const *models, const struct program *const *programs, uint32_t n_ranks,
                        struct update **update, struct err *err);
/* Checks the name and the tensor without writing; with is_finite, or if the tensor will be quantised, also that all values are
 * finite. *fate: what update_write would do. Errors:
 *   RC_WEIGHTS      code is of enum weights_fault, what is the name
 *   RC_UNSUPPORTED  the file stores the weight quantised, or it is quantised here and the tensor is in device memory, or the
 *                   tensor is lent and the backend borrows none */
enum rc update_check(struct update *update, const char *name, const struct update_tensor *tensor, bool is_finite,
                     enum update_fate *fate, struct err *err);
/* update_check without the values, which are not read: the tensor has no address yet, for example. */
enum rc update_check_form(struct update *update, const char *name, const struct update_tensor *tensor, enum update_fate *fate,
                          struct err *err);
/* Whether update_check reads values with the device also without is_finite, so that no step may run meanwhile. */
bool update_reads_values(const struct update *update);
/* Checks as update_check_form does, then enqueues the write; update_check has checked the values. The caller must not change a
 * tensor in host memory until update_finish. Work that is enqueued later on the stream of a tensor in device memory may change
 * that tensor. */
enum rc update_write(struct update *update, const char *name, const struct update_tensor *tensor, enum update_fate *fate,
                     struct err *err);
/* The entry of a name; NULL if the model has no such weight. */
const struct update_entry *update_find(const struct update *update, const char *name);
/* Waits until all writes have completed. */
enum rc update_finish(struct update *update, struct err *err);
/* Completes the weights (settle.h), and lets backends choose kernels anew. Called after update_finish and before the model
 * runs. */
enum rc update_settle(struct update *update, struct err *err);
bool update_takes(uint32_t dtype); /* whether floats can be written to weights that are stored as this type */
bool update_knows(const struct update *update, const char *name); /* the name of a weight, or a name that is skipped */
bool update_skips(const struct update *update, const char *name); /* the name is skipped, whatever the tensor */
uint32_t update_n_entries(const struct update *update);
const struct update_entry *update_entry(const struct update *update, uint32_t index);
/* Where the tensor of an entry lies in the memory of the only rank's device: [n_rows][n_cols], row_bytes apart. */
struct update_rows {
    void *rows; /* NULL: it is no matrix of floats in rows, or not one whole part of a matrix */
    uint32_t dtype, n_rows, n_cols;
    size_t row_bytes;
};
enum rc update_rows(const struct update *update, uint32_t index, struct update_rows *rows, struct err *err);
uint32_t update_n_written(const struct update *update); /* names with at least one write */
bool update_is_missing(const struct update_entry *entry); /* it has no write and is no constant */
bool update_has_written(const struct update *update);   /* whether a weight may have changed */
uint64_t update_bytes(const struct update *update);     /* total size of the tensors written so far */
/* The checksum of the weights under a name, over all ranks; a row that several ranks have counts once. With a tensor: the
 * checksum that the weights would have after writing it. If *fate is UPDATE_SKIPPED, there is no sum. */
enum rc update_sum(struct update *update, const char *name, const struct update_tensor *tensor, struct tensor_sum *sum,
                   enum update_fate *fate, struct err *err);
void update_end(struct update *update); /* NULL is allowed; does not undo writes */

#endif
