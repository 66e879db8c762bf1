/* fuzz_joined.c: weights that safetensors files store in several tensors. Byte 0 chooses the scheme, the rest is the file. The
 * reader leaves tensors apart, joins them, or refuses the file; each joined row can be read, alone with the bits that it has
 * among others, or fails with a tensor's name. */
#define _GNU_SOURCE
#include "fuzz.h"

#include "../../csrc/program/checkpoint.h"

#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#define MOST_VALUES 65536u /* of a tensor that is read */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void check_failure(enum rc rc, const struct err *err)
{
    PROMISED(rc == err->rc && (rc == RC_CHECKPOINT || rc == RC_UNSUPPORTED));
    PROMISED(strlen(err->message) > 8);
    for (const char *c = err->message; *c; c++)
        PROMISED(*c >= ' ' && *c <= '~');
}

static void read_rows(const struct checkpoint *checkpoint, const struct checkpoint_tensor *tensor)
{
    uint64_t n_rows = 1, cols = tensor->shape[tensor->n_dims - 1];
    for (uint32_t i = 0; i + 1 < tensor->n_dims; i++)
        if (__builtin_mul_overflow(n_rows, tensor->shape[i], &n_rows))
            return;
    if (!n_rows || !cols || cols > MOST_VALUES || n_rows > MOST_VALUES / cols)
        return;
    size_t row_bytes = dtype_row_bytes(tensor->dtype, cols);
    PROMISED(checkpoint_bytes(tensor) == n_rows * row_bytes);
    uint8_t *all = malloc(n_rows * row_bytes), *one = malloc(row_bytes);
    float *values = malloc(cols * sizeof *values);
    struct err err = {0};
    enum rc rc = checkpoint_rows(checkpoint, tensor, 0, 1, n_rows, all, &err);
    if (rc) {
        check_failure(rc, &err);
        PROMISED(err.tensor[0]);
    }
    for (uint64_t row = 0; row < n_rows && !rc; row++) {
        PROMISED(!checkpoint_rows(checkpoint, tensor, row, 2, 1, one, &err));
        PROMISED(memcmp(one, all + row * row_bytes, row_bytes) == 0);
        PROMISED(dtype_to_float(tensor->dtype, one, values, cols));
    }
    free(all);
    free(one);
    free(values);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static const char *const SCHEMES[] = {"", "compressed-tensors", "gptq", "gptq_v2", "awq", "squeezellm"};
    char path[64];
    const char *paths[] = {path};
    struct checkpoint *checkpoint = NULL;
    struct err err = {0};
    if (n < 2 || (n > 5 && memcmp(data + 1, "GGUF", 4) == 0))
        return 0;
    int file = memfd_create("model", 0);
    PROMISED(file >= 0 && write(file, data + 1, n - 1) == (ssize_t)(n - 1));
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    enum rc rc = checkpoint_open(paths, 1, &checkpoint, &err);
    rc = rc ? rc : checkpoint_join(checkpoint, SCHEMES[data[0] % 6], &err);
    if (rc)
        check_failure(rc, &err);
    for (uint32_t i = 0; !rc && i < checkpoint_n_tensors(checkpoint); i++) {
        const struct checkpoint_tensor *tensor = checkpoint_tensor(checkpoint, i);
        if (tensor->packing || tensor->companion)
            read_rows(checkpoint, tensor);
    }
    checkpoint_close(checkpoint);
    close(file);
    return 0;
}
