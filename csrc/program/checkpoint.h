/* checkpoint.h: an opened checkpoint: one or more safetensors files, or all parts of one GGUF model. checkpoint_open validates
 * every offset, count and size. Reads go to the file and check only that it has not been truncated since. Used by weights.c,
 * py_checkpoint.c and py_update.c. An open checkpoint is immutable, so any thread may read it. */
#ifndef LLMPY_CHECKPOINT_H
#define LLMPY_CHECKPOINT_H

#include "../base/dtype.h"
#include "../base/status.h"

#include <stdbool.h>

#define CHECKPOINT_MAX_DIMS 8

struct checkpoint;
struct gguf;

struct companion; /* companions.h */

struct checkpoint_scales {
    const char *name;    /* owned by the checkpoint */
    uint32_t file, dtype;
    uint64_t offset;
    uint64_t cols;       /* items of a row of scales; 1: one scale for all columns of a row */
    uint64_t rows_each;  /* rows of the tensor that share a row of scales */
    bool by_columns;     /* a scale for each column, of stacked matrices: checkpoint_join_columns alone reads the tensor */
};

struct packing; /* packed.h */

/* A tensor of two dimensions that holds one part of packed weights. */
struct checkpoint_piece {
    const char *name; /* owned by the checkpoint */
    uint32_t file, dtype;
    uint64_t offset, rows, cols;
};

struct checkpoint_tensor {
    const char *name;                     /* NUL-terminated UTF-8, owned by the checkpoint */
    const char *type;                     /* the type as the file names it: "BF16", "Q4_K", "F8_E4M3" */
    uint32_t dtype;                       /* enum dtype; DTYPE_NONE: llmpy cannot read the type (checkpoint_need refuses it) */
    uint32_t n_dims;
    uint64_t shape[CHECKPOINT_MAX_DIMS];  /* outermost first, as in safetensors and NumPy (the reverse of GGUF's order) */
    uint64_t offset;                      /* of the tensor's data in the file */
    uint64_t size_bytes;                  /* of a GGUF type that llmpy cannot read: bytes up to the next tensor */
    uint32_t file;                        /* index into the paths */
    /* Not NULL: this tensor holds only the numbers of quantised blocks, and `scales` says where another tensor holds their
     * scales. checkpoint_rows joins both into blocks of `dtype`. */
    const struct companion *companion;
    struct checkpoint_scales scales;
    struct nested_scales *nested;         /* of 8-bit scales (tables.c); NULL: none */
    /* Not NULL: numbers, scales and zeros lie packed in the pieces. checkpoint_rows joins them into blocks of `dtype`. */
    const struct packing *packing;
    struct checkpoint_piece pieces[3];    /* numbers, scales, zeros; a piece without a name is absent */
    uint32_t bits;                        /* of a number */
    uint64_t n_groups, group;             /* of a row; columns of a group */
    uint32_t *order;                      /* [columns] number in the file of each joined column; NULL: the file's order */
};

/* Recognises the file format by the first bytes. A file opens even if it has tensors of types that llmpy cannot read, since
 * the model may not use them. Errors:
 *   RC_IO           a file cannot be opened; what = path
 *   RC_CHECKPOINT   a file is malformed; what = file, tensor
 *   RC_UNSUPPORTED  a GGUF of another version or byte order */
enum rc checkpoint_open(const char *const *paths, uint32_t n_paths, struct checkpoint **checkpoint, struct err *err);
/* Adds the weights that a quantisation scheme packs into several tensors: "gptq", "gptq_v2", "awq", "compressed-tensors",
 * "squeezellm". Call it once, before anything else reads the checkpoint. */
enum rc checkpoint_join(struct checkpoint *checkpoint, const char *scheme, struct err *err);
void checkpoint_close(struct checkpoint *checkpoint);
int checkpoint_is_gguf(const struct checkpoint *checkpoint);
const struct gguf *checkpoint_gguf(const struct checkpoint *checkpoint); /* key-values (gguf.h); NULL for safetensors */
const char *checkpoint_path(const struct checkpoint *checkpoint, uint32_t file);
uint32_t checkpoint_n_tensors(const struct checkpoint *checkpoint);
const struct checkpoint_tensor *checkpoint_tensor(const struct checkpoint *checkpoint, uint32_t index);
/* Finds a tensor by a hash lookup. NULL: the checkpoint has no tensor of this name. */
const struct checkpoint_tensor *checkpoint_find(const struct checkpoint *checkpoint, const char *name);
/* Finds a tensor that the caller needs: RC_CHECKPOINT if it is absent, RC_UNSUPPORTED if llmpy cannot read its type. */
enum rc checkpoint_need(const struct checkpoint *checkpoint, const char *name, const struct checkpoint_tensor **tensor,
                        struct err *err);
/* The functions below read from the files. Errors: RC_CHECKPOINT if the file was truncated after checkpoint_open, RC_IO if it
 * cannot be read. */
/* Reads n_bytes of the tensor's data, unchanged, from byte `first` on. */
enum rc checkpoint_read(const struct checkpoint *checkpoint, const struct checkpoint_tensor *tensor, uint64_t first,
                        size_t n_bytes, void *to, struct err *err);
/* Reads the items first, first + step, ... of item_bytes each and writes them to `to` without gaps. */
enum rc checkpoint_items(const struct checkpoint *checkpoint, const struct checkpoint_tensor *tensor, size_t item_bytes,
                         uint64_t first, uint64_t step, uint64_t n_items, void *to, struct err *err);
/* Reads the rows first, first + step, ... of the last dimension without gaps, as blocks of the tensor's type. */
enum rc checkpoint_rows(const struct checkpoint *checkpoint, const struct checkpoint_tensor *tensor, uint64_t first,
                        uint64_t step, uint64_t n_rows, void *rows, struct err *err);
/* Whether checkpoint_join_columns reads the tensor. */
bool checkpoint_joins_columns(const struct checkpoint_tensor *tensor);
/* Joins rows first, first + step, ... of the transposed matrices of a tensor [n][columns][rows] into blocks of its type. The
 * caller has read their numbers, [n_rows][columns]. */
enum rc checkpoint_join_columns(const struct checkpoint *checkpoint, const struct checkpoint_tensor *tensor, uint64_t first,
                                uint64_t step, uint64_t n_rows, const uint8_t *numbers, uint8_t *rows, struct err *err);
/* A span holds a range of rows of a packed tensor in memory, which any thread may then join. Tensors that are stored by columns
 * are read in spans of checkpoint_span_rows rows; 0: checkpoint_rows reads a few rows as fast. */
struct checkpoint_span;
uint64_t checkpoint_span_rows(const struct checkpoint_tensor *tensor);
enum rc checkpoint_span_open(const struct checkpoint *checkpoint, const struct checkpoint_tensor *tensor, uint64_t first,
                             uint64_t n_rows, struct checkpoint_span **span, struct err *err);
/* As checkpoint_rows; first counts the rows of the tensor. */
enum rc checkpoint_span_read(const struct checkpoint_span *span, uint64_t first, uint64_t step, uint64_t n_rows, uint8_t *rows,
                             struct err *err);
void checkpoint_span_close(struct checkpoint_span *span);
/* Checks that the file still has all bytes of the tensor. */
enum rc checkpoint_has(const struct checkpoint *checkpoint, const struct checkpoint_tensor *tensor, struct err *err);
uint64_t checkpoint_bytes(const struct checkpoint_tensor *tensor); /* of all rows, as checkpoint_rows gives them */

#endif
