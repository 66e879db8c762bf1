/* tensor_list.h: the tensors that the readers find, in the order of the files, and what both readers check alike. Private to
 * checkpoint.c, safetensors.c and gguf.c. Nothing is allocated by a count that a file merely claims: the list grows as entries
 * are really read. */
#ifndef LLMPY_TENSOR_LIST_H
#define LLMPY_TENSOR_LIST_H

#include "../base/name_table.h"
#include "checkpoint.h"

struct tensor_list {
    struct checkpoint_tensor *tensors; /* [capacity], numbered as in names */
    uint32_t n, capacity;
    struct name_table names;
};

/* One file as the readers see it: its first n_bytes lie in memory. */
struct file_view {
    const char *path;
    uint8_t *bytes;
    uint64_t n_bytes, size_bytes;
    uint32_t index;
    int descriptor;
};

/* Brings at least the first n_bytes of the file, which has so many, into memory; `bytes` may move. */
enum rc file_view_need(struct file_view *file, uint64_t n_bytes, struct err *err);

/* A zeroed struct is an empty list. */
void tensor_list_destroy(struct tensor_list *list);
/* Adds a tensor of this name with no more than name and file set. The pointer is good until the next add. */
enum rc tensor_list_add(struct tensor_list *list, const struct file_view *file, const char *name, size_t n_bytes,
                        struct checkpoint_tensor **tensor, struct err *err);
/* Bytes of dtype (one that we read) and shape; false when the product overflows or a row is no whole number of blocks. */
bool tensor_size(uint32_t dtype, uint32_t n_dims, const uint64_t *shape, uint64_t *size_bytes);
/* Tensors from number `first` on must not overlap; with `dense` they must also fill [begin, end) of the file without a hole. */
enum rc tensor_list_check_places(const struct tensor_list *list, uint32_t first, const struct file_view *file, uint64_t begin,
                                 uint64_t end, bool dense, struct err *err);

/* RC_CHECKPOINT about a file, and a tensor or NULL: "<file>: tensor <name>: <text>". */
enum rc file_error(struct err *err, const struct file_view *file, const char *tensor, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* "[2, 3]" into text, for messages. */
const char *shape_text(uint32_t n_dims, const uint64_t *shape, char *text, size_t n_bytes);
/* Bytes of a file made fit for a message: at most 60, with '?' for what is not printable ASCII. */
struct quoted {
    char text[64];
};
struct quoted quote(const char *bytes, size_t n_bytes);

#endif
