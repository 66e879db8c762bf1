/* checkpoint.h: an opened checkpoint: one or more safetensors files, or one GGUF v3 file, completely validated (every offset,
 * count and size) before the first byte of a tensor can be asked for. Tensors are read from the files as they are asked for; a
 * file that others have cut off meanwhile is an error. Used by weights.c, py_checkpoint.c and py_update.c; immutable once it is
 * open, so any thread may read. */
#ifndef LLMPY_CHECKPOINT_H
#define LLMPY_CHECKPOINT_H

#include "../base/dtype.h"
#include "../base/status.h"

#include <stdbool.h>

#define CHECKPOINT_MAX_DIMS 8

struct checkpoint;
struct gguf;

struct checkpoint_tensor {
    const char *name;                     /* NUL-terminated UTF-8, owned by the checkpoint */
    const char *type;                     /* the type as the file names it: "BF16", "Q4_K", "F8_E4M3" */
    uint32_t dtype;                       /* enum dtype; DTYPE_NONE: a type that we do not read (checkpoint_need refuses it) */
    uint32_t n_dims;
    uint64_t shape[CHECKPOINT_MAX_DIMS];  /* outermost first, as safetensors and NumPy have it (GGUF's order reversed) */
    uint64_t offset;                      /* of its data in the file */
    uint64_t size_bytes;                  /* of a GGUF type that we do not read: up to the next tensor */
    uint32_t file;                        /* index into the paths */
    /* MXFP4 of safetensors: its data are nibbles alone, 16 bytes a block in the order of the values, and the blocks' exponents
     * lie elsewhere; checkpoint_rows gives what DTYPE_MXFP4 is. */
    bool has_scales;
    uint32_t scales_file;
    uint64_t scales_offset;
};

/* Files are told apart by their first bytes. Errors: RC_IO (cannot open, what = path), RC_CHECKPOINT (what = file, tensor),
 * RC_UNSUPPORTED (a GGUF of another version or byte order, or split over several files). A tensor of a type that we do not read
 * does not keep a file from being opened: it may be one that the model does not use. */
enum rc checkpoint_open(const char *const *paths, uint32_t n_paths, struct checkpoint **checkpoint, struct err *err);
void checkpoint_close(struct checkpoint *checkpoint);
int checkpoint_is_gguf(const struct checkpoint *checkpoint);
const struct gguf *checkpoint_gguf(const struct checkpoint *checkpoint); /* key-values (gguf.h); NULL for safetensors */
const char *checkpoint_path(const struct checkpoint *checkpoint, uint32_t file);
uint32_t checkpoint_n_tensors(const struct checkpoint *checkpoint);
const struct checkpoint_tensor *checkpoint_tensor(const struct checkpoint *checkpoint, uint32_t index);
/* NULL: absent. Hashed. */
const struct checkpoint_tensor *checkpoint_find(const struct checkpoint *checkpoint, const char *name);
/* The same for a tensor that must be there and readable: RC_CHECKPOINT when absent, RC_UNSUPPORTED for its type. */
enum rc checkpoint_need(const struct checkpoint *checkpoint, const char *name, const struct checkpoint_tensor **tensor,
                        struct err *err);
/* All that follows reads; RC_CHECKPOINT where the file has fewer bytes than when it was opened, RC_IO where it cannot be read.
 * n_bytes of a tensor's data from byte `first` on, as they lie in the file. */
enum rc checkpoint_read(const struct checkpoint *checkpoint, const struct checkpoint_tensor *tensor, uint64_t first,
                        size_t n_bytes, void *to, struct err *err);
/* Items of so many bytes, step apart, the first of them number `first`, one after the other. */
enum rc checkpoint_items(const struct checkpoint *checkpoint, const struct checkpoint_tensor *tensor, size_t item_bytes,
                         uint64_t first, uint64_t step, uint64_t n_items, void *to, struct err *err);
/* Rows of the last dimension, step apart, one after the other, as blocks of the tensor's type. */
enum rc checkpoint_rows(const struct checkpoint *checkpoint, const struct checkpoint_tensor *tensor, uint64_t first,
                        uint64_t step, uint64_t n_rows, void *rows, struct err *err);
/* Whether the file still has all of the tensor's bytes. */
enum rc checkpoint_has(const struct checkpoint *checkpoint, const struct checkpoint_tensor *tensor, struct err *err);
uint64_t checkpoint_bytes(const struct checkpoint_tensor *tensor); /* of all its rows, as blocks of its type */

#endif
