#define _GNU_SOURCE
#include "checkpoint.h"

#include "../base/mem.h"
#include "gguf.h"
#include "safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

struct checkpoint {
    struct file_view *files; /* [n_files], mapped */
    uint32_t n_files;
    struct tensor_list list;
    struct gguf *gguf; /* NULL: safetensors */
};

static enum rc io_error(struct err *err, const char *path, int code)
{
    err_set(err, RC_IO, "%s", strerror(code));
    err_name(err, path, NULL);
    err->code = code;
    return RC_IO;
}

static enum rc map_file(const char *path, uint32_t index, struct file_view *file, struct err *err)
{
    enum rc rc = RC_OK;
    struct stat status;
    /* O_NONBLOCK: a pipe must be refused, not waited for. */
    int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (descriptor < 0)
        return io_error(err, path, errno);
    *file = (struct file_view){.path = path, .index = index};
    if (fstat(descriptor, &status) < 0) {
        rc = io_error(err, path, errno);
    } else if (!S_ISREG(status.st_mode)) {
        rc = io_error(err, path, S_ISDIR(status.st_mode) ? EISDIR : EINVAL);
    } else if (status.st_size > 0) {
        void *bytes = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_PRIVATE, descriptor, 0);
        if (bytes == MAP_FAILED)
            rc = io_error(err, path, errno);
        else {
            file->bytes = bytes;
            file->size_bytes = (uint64_t)status.st_size;
        }
    }
    close(descriptor);
    return rc;
}

static bool has_gguf_magic(const struct file_view *file)
{
    return file->size_bytes >= 4 && memcmp(file->bytes, "GGUF", 4) == 0;
}

static enum rc read_file(struct checkpoint *checkpoint, const struct file_view *file, uint32_t n_paths, struct err *err)
{
    if (!has_gguf_magic(file))
        return safetensors_read(&checkpoint->list, file, err);
    if (n_paths > 1)
        return err_set(err, RC_UNSUPPORTED, "GGUF: wanted one file, have %u; merge them first (llama-gguf-split --merge)",
                       n_paths);
    return gguf_read(&checkpoint->list, file, &checkpoint->gguf, err);
}

static enum rc open_file(struct checkpoint *checkpoint, const char *path, uint32_t n_paths, struct err *err)
{
    struct file_view *file = &checkpoint->files[checkpoint->n_files];
    const char *copy = name_table_copy(&checkpoint->list.names, path, strlen(path));
    if (!copy)
        return err_set(err, RC_MEMORY, "checkpoint: out of memory");
    enum rc rc = map_file(copy, checkpoint->n_files, file, err);
    if (rc != RC_OK)
        return rc;
    checkpoint->n_files++;
    return read_file(checkpoint, file, n_paths, err);
}

/* Tensors NAME_blocks [..., n, 16] and NAME_scales [..., n] of bytes are one more, NAME [..., 32 n] in MXFP4. */
static enum rc pair_blocks(struct checkpoint *checkpoint, struct err *err)
{
    struct tensor_list *list = &checkpoint->list;
    enum rc rc = RC_OK;
    for (uint32_t i = 0, n = list->n; i < n && rc == RC_OK; i++) {
        struct checkpoint_tensor blocks = list->tensors[i], *made;
        size_t stem = strlen(blocks.name) > 7 ? strlen(blocks.name) - 7 : 0;
        bool fits = stem && strcmp(blocks.name + stem, "_blocks") == 0 && blocks.dtype == DTYPE_U8 && blocks.n_dims > 1 &&
                    blocks.shape[blocks.n_dims - 1] == 16;
        char *name = fits ? mem_alloc(stem + 8) : NULL;
        if (!fits)
            continue;
        if (!name)
            return err_set(err, RC_MEMORY, "checkpoint: out of memory");
        memcpy(name, blocks.name, stem);
        memcpy(name + stem, "_scales", 8);
        const struct checkpoint_tensor *scales = checkpoint_find(checkpoint, name);
        fits = scales && scales->dtype == DTYPE_U8 && scales->n_dims == blocks.n_dims - 1 &&
               memcmp(scales->shape, blocks.shape, scales->n_dims * sizeof *scales->shape) == 0;
        const uint8_t *exponents = fits ? scales->data : NULL;
        if (fits)
            rc = tensor_list_add(list, &checkpoint->files[blocks.file], name, stem, &made, err);
        mem_free(name);
        if (!fits || rc != RC_OK)
            continue;
        const char *own_name = made->name;
        *made = blocks;
        made->name = own_name;
        made->type = "MXFP4";
        made->dtype = DTYPE_MXFP4;
        made->n_dims--;
        made->shape[made->n_dims - 1] *= 32;
        made->scales = exponents;
    }
    return rc;
}

void checkpoint_rows(const struct checkpoint_tensor *tensor, uint64_t first, uint64_t step, uint64_t n_rows, void *rows)
{
    const struct dtype_info *info = dtype_info(tensor->dtype);
    uint64_t n_blocks = tensor->shape[tensor->n_dims - 1] / info->block_values;
    uint8_t *to = rows;
    for (uint64_t r = 0; r < n_rows; r++) {
        uint64_t block = (first + r * step) * n_blocks;
        const uint8_t *from = (const uint8_t *)tensor->data + block * (tensor->scales ? 16 : info->block_bytes);
        if (!tensor->scales) {
            memcpy(to, from, n_blocks * info->block_bytes);
            to += n_blocks * info->block_bytes;
            continue;
        }
        for (uint64_t b = 0; b < n_blocks; b++, from += 16, to += 17) {
            to[0] = tensor->scales[block + b];
            for (uint32_t j = 0; j < 16; j++) /* values j and j + 16 share a byte there, 2j and 2j + 1 here */
                to[1 + j] = (uint8_t)((from[j / 2] >> j % 2 * 4 & 15) | (from[8 + j / 2] >> j % 2 * 4 & 15) << 4);
        }
    }
}

enum rc checkpoint_open(const char *const *paths, uint32_t n_paths, struct checkpoint **result, struct err *err)
{
    enum rc rc = RC_OK;
    *result = NULL;
    if (!n_paths)
        return err_set(err, RC_CHECKPOINT, "checkpoint: wanted at least one file, have none");
    struct checkpoint *checkpoint = mem_calloc(1, sizeof *checkpoint);
    if (checkpoint)
        checkpoint->files = mem_calloc(n_paths, sizeof *checkpoint->files);
    if (!checkpoint || !checkpoint->files)
        rc = err_set(err, RC_MEMORY, "checkpoint: out of memory");
    for (uint32_t i = 0; rc == RC_OK && i < n_paths; i++)
        rc = open_file(checkpoint, paths[i], n_paths, err);
    if (rc == RC_OK)
        rc = pair_blocks(checkpoint, err);
    if (rc == RC_OK)
        *result = checkpoint;
    else
        checkpoint_close(checkpoint);
    return rc;
}

void checkpoint_close(struct checkpoint *checkpoint)
{
    if (!checkpoint)
        return;
    for (uint32_t i = 0; i < checkpoint->n_files; i++)
        if (checkpoint->files[i].size_bytes)
            munmap((void *)(uintptr_t)checkpoint->files[i].bytes, checkpoint->files[i].size_bytes);
    gguf_destroy(checkpoint->gguf);
    tensor_list_destroy(&checkpoint->list);
    mem_free(checkpoint->files);
    mem_free(checkpoint);
}

int checkpoint_is_gguf(const struct checkpoint *checkpoint)
{
    return checkpoint->gguf != NULL;
}

const struct gguf *checkpoint_gguf(const struct checkpoint *checkpoint)
{
    return checkpoint->gguf;
}

const char *checkpoint_path(const struct checkpoint *checkpoint, uint32_t file)
{
    return checkpoint->files[file].path;
}

uint32_t checkpoint_n_tensors(const struct checkpoint *checkpoint)
{
    return checkpoint->list.n;
}

const struct checkpoint_tensor *checkpoint_tensor(const struct checkpoint *checkpoint, uint32_t index)
{
    return &checkpoint->list.tensors[index];
}

const struct checkpoint_tensor *checkpoint_find(const struct checkpoint *checkpoint, const char *name)
{
    uint32_t index = name_table_find(&checkpoint->list.names, name, strlen(name));
    return index == NAME_ABSENT ? NULL : &checkpoint->list.tensors[index];
}

enum rc checkpoint_need(const struct checkpoint *checkpoint, const char *name, const struct checkpoint_tensor **tensor,
                        struct err *err)
{
    struct quoted shown = quote(name, strlen(name));
    *tensor = checkpoint_find(checkpoint, name);
    if (!*tensor) {
        err_set(err, RC_CHECKPOINT, "tensor %s: wanted in the checkpoint, have %u tensors without it", shown.text,
                checkpoint->list.n);
        err_name(err, checkpoint->files[0].path, name);
        return RC_CHECKPOINT;
    }
    if ((*tensor)->dtype == DTYPE_NONE)
        return err_set(err, RC_UNSUPPORTED, "tensor %s: wanted a type that this build reads, have %s", shown.text,
                       (*tensor)->type);
    return RC_OK;
}

void checkpoint_drop(const struct checkpoint *checkpoint, const struct checkpoint_tensor *tensor)
{
    (void)checkpoint;
    /* Whole pages inside the tensor only: its neighbours keep theirs. */
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t begin = ((uintptr_t)tensor->data + page - 1) & ~(page - 1);
    uintptr_t end = ((uintptr_t)tensor->data + tensor->size_bytes) & ~(page - 1);
    if (begin < end)
        madvise((void *)begin, end - begin, MADV_DONTNEED);
}
