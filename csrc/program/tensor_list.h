/* tensor_list.h: the list of tensors that the safetensors and GGUF readers fill, in file order, and the checks that both share.
 * Private to checkpoint.c, safetensors.c and gguf.c. No allocation trusts a count in a file: the list grows as entries are
 * read. */
#ifndef LLMPY_TENSOR_LIST_H
#define LLMPY_TENSOR_LIST_H

#include "../base/name_table.h"
#include "checkpoint.h"

struct tensor_list {
    struct checkpoint_tensor *tensors; /* [capacity], numbered as in names */
    uint32_t n, capacity;
    struct name_table names;
};

/* A file whose first n_bytes are in memory. */
struct file_view {
    const char *path;
    uint8_t *bytes;
    uint64_t n_bytes, size_bytes;
    uint32_t index;
    int descriptor;
};

/* Reads at least the first n_bytes of the file into memory. The file must have that many; `bytes` may move. */
enum rc file_view_need(struct file_view *file, uint64_t n_bytes, struct err *err);

/* A zeroed struct is an empty list. */
void tensor_list_destroy(struct tensor_list *list);
/* Adds a tensor and sets its name and file only. The pointer is valid until the next add. */
enum rc tensor_list_add(struct tensor_list *list, const struct file_view *file, const char *name, size_t n_bytes,
                        struct checkpoint_tensor **tensor, struct err *err);
/* The bytes of a tensor of dtype (not DTYPE_NONE) and shape. False if the product overflows or a row is no whole number of
 * blocks. */
bool tensor_size(uint32_t dtype, uint32_t n_dims, const uint64_t *shape, uint64_t *size_bytes);
/* Checks that the tensors from number `first` on do not overlap. With `dense` they must also fill [begin, end) of the file. */
enum rc tensor_list_check_places(const struct tensor_list *list, uint32_t first, const struct file_view *file, uint64_t begin,
                                 uint64_t end, bool dense, struct err *err);

/* RC_CHECKPOINT with the text "<file>: tensor <name>: <text>"; tensor may be NULL. */
enum rc file_error(struct err *err, const struct file_view *file, const char *tensor, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* Writes a shape as "[2, 3]" to text, for messages. */
const char *shape_text(uint32_t n_dims, const uint64_t *shape, char *text, size_t n_bytes);
/* Bytes of a file for a message: at most 60, with '?' in place of bytes that are not printable ASCII. */
struct quoted {
    char text[64];
};
struct quoted quote(const char *bytes, size_t n_bytes);

#endif
