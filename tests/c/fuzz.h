/* fuzz.h: what a reader promised about every tensor that it took, checked byte by byte; shared by the fuzz targets, which
 * tests/unit/test_fuzz.py builds with clang's libFuzzer, ASan and UBSan. A broken promise traps. */
#ifndef LLMPY_FUZZ_H
#define LLMPY_FUZZ_H

#include "../../csrc/program/gguf.h"
#include "../../csrc/program/safetensors.h"

#include <stdlib.h>
#include <string.h>

#define PROMISED(condition)                                                                                                    \
    do {                                                                                                                       \
        if (!(condition))                                                                                                      \
            __builtin_trap();                                                                                                  \
    } while (0)

/* Reads every byte, so that ASan sees one that is not there. */
static inline void touch(const void *bytes, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        (void)((const volatile uint8_t *)bytes)[i];
}

static inline void check_tensor(const struct tensor_list *list, uint32_t index, const struct file_view *file)
{
    const struct checkpoint_tensor *tensor = &list->tensors[index];
    const struct dtype_info *info = dtype_info(tensor->dtype);
    uint64_t n_values = 1;
    PROMISED(name_table_find(&list->names, tensor->name, strlen(tensor->name)) == index);
    PROMISED(tensor->type && tensor->n_dims <= CHECKPOINT_MAX_DIMS);
    PROMISED(tensor->offset <= file->size_bytes && tensor->size_bytes <= file->size_bytes - tensor->offset);
    touch(file->bytes + tensor->offset, tensor->size_bytes);
    PROMISED(info || tensor->dtype == DTYPE_NONE);
    if (!info)
        return;
    for (uint32_t i = 0; i < tensor->n_dims; i++)
        n_values *= tensor->shape[i];
    PROMISED(n_values % info->block_values == 0 && tensor->size_bytes == n_values / info->block_values * info->block_bytes);
    float *values = malloc(n_values * sizeof *values + 1);
    if (values)
        dtype_to_float(tensor->dtype, file->bytes + tensor->offset, values, n_values);
    free(values);
}

static inline void check_list(const struct tensor_list *list, const struct file_view *file)
{
    uint64_t total = 0;
    for (uint32_t i = 0; i < list->n; i++) {
        check_tensor(list, i, file);
        total += list->tensors[i].size_bytes;
    }
    PROMISED(total <= file->size_bytes); /* so nothing overlaps */
}

/* An error says what it is about and can be shown. */
static inline void check_error(enum rc rc, const struct err *err, const struct file_view *file)
{
    PROMISED(rc == err->rc && (rc == RC_CHECKPOINT || rc == RC_UNSUPPORTED));
    PROMISED(strlen(err->message) > 8 && (rc == RC_UNSUPPORTED || strcmp(err->what, file->path) == 0));
    for (const char *c = err->message; *c; c++)
        PROMISED(*c >= ' ' && *c <= '~');
}

#endif
