/* update.h: new weights for a model, under the names of its checkpoint: begin, write in any order, commit or abort. Names are
 * resolved through the program's table of weights, a tensor is checked completely before its first byte is written, and writes
 * go in place, so the model must not run between the first write and update_commit. Aliases of tied weights and other names
 * that a checkpoint may have without a place here (program->ignored) are accepted and passed over. py_update.c calls it and
 * holds the engine's steps meanwhile; one thread at a time. */
#ifndef LLMPY_UPDATE_H
#define LLMPY_UPDATE_H

#include "model.h"

#define UPDATE_MAX_DIMS 8

struct update;

/* A tensor as whoever brings it describes it; no framework is known here. */
struct update_tensor {
    const void *data;            /* of the first item */
    /* Where there is no data: bytes from the first item on are read in pieces as they are wanted, into memory of the update's;
     * then no stride is negative. */
    enum rc (*read)(void *ctx, uint64_t first, size_t n_bytes, void *to, struct err *err);
    void *read_ctx;
    uint32_t dtype;              /* DTYPE_NONE: one that we do not have, called `type` in messages */
    char type[24];
    uint32_t n_dims;
    int64_t shape[UPDATE_MAX_DIMS], strides[UPDATE_MAX_DIMS]; /* outermost first; strides in items, of either sign */
    bool is_host;
    void *stream;                /* as in struct tensor_write_args */
};

enum update_fate { UPDATE_FRESH, UPDATE_REPEATED, UPDATE_SKIPPED };

/* One name of the table, and what has become of it. Several parts of weights may come from its tensor. */
struct update_entry {
    const char *name;
    uint32_t piece; /* the first one */
    uint32_t n_writes;
    bool is_constant; /* it keeps its values where no tensor is written to it */
};

/* RC_UNSUPPORTED: the backend takes no tensors. */
enum rc update_begin(struct model *model, struct update **update, struct err *err);
/* Checks the name and the tensor, and with is_finite its values too, without writing. RC_WEIGHTS: code is of enum
 * weights_fault, what is the name. RC_UNSUPPORTED: the weight is quantised. *fate: what a write would do. */
enum rc update_check(struct update *update, const char *name, const struct update_tensor *tensor, bool is_finite,
                     enum update_fate *fate, struct err *err);
/* The same, and enqueues the write. A tensor in host memory stays unchanged until update_finish; one in device memory may be
 * changed by what its stream runs later. */
enum rc update_write(struct update *update, const char *name, const struct update_tensor *tensor, bool is_finite,
                     enum update_fate *fate, struct err *err);
/* Waits until all that was written has arrived. */
enum rc update_finish(struct update *update, struct err *err);
/* Behind update_finish, before the model runs: what follows from the tensors that were written and from those that were not. */
enum rc update_settle(struct update *update, struct err *err);
bool update_knows(const struct update *update, const char *name); /* a weight's, or one that is passed over */
bool update_skips(const struct update *update, const char *name); /* it is passed over, whatever the tensor */
uint32_t update_n_entries(const struct update *update);
const struct update_entry *update_entry(const struct update *update, uint32_t index);
uint32_t update_n_written(const struct update *update); /* names that something was written to */
bool update_is_missing(const struct update_entry *entry); /* nothing was written, and it is no constant */
bool update_has_written(const struct update *update);   /* whether a weight may have changed */
uint64_t update_bytes(const struct update *update);     /* read from the tensors written so far */
/* Checksums: of what the model holds under a name, or (tensor not NULL) of what it would hold had the tensor been written.
 * *fate may be UPDATE_SKIPPED; then there is no sum. */
enum rc update_sum(struct update *update, const char *name, const struct update_tensor *tensor, struct tensor_sum *sum,
                   enum update_fate *fate, struct err *err);
void update_end(struct update *update); /* NULL is fine; what was written stays */

#endif
