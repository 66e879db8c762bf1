#define _GNU_SOURCE
#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

int file_open(const char *path, int *descriptor, uint64_t *size_bytes)
{
    struct stat status;
    int opened = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (opened < 0)
        return errno;
    int code = fstat(opened, &status) < 0 ? errno : S_ISREG(status.st_mode) ? 0 : S_ISDIR(status.st_mode) ? EISDIR : EINVAL;
    if (code) {
        close(opened);
        return code;
    }
    *descriptor = opened;
    *size_bytes = (uint64_t)status.st_size;
    return 0;
}

int file_size(int descriptor, uint64_t *size_bytes)
{
    struct stat status;
    if (fstat(descriptor, &status) < 0)
        return errno;
    *size_bytes = (uint64_t)status.st_size;
    return 0;
}

void file_close(int descriptor)
{
    close(descriptor);
}

int file_read(int descriptor, uint64_t offset, void *to, size_t n, size_t *n_read)
{
    *n_read = 0;
    if (offset > INT64_MAX)
        return EINVAL;
    while (*n_read < n) {
        ssize_t now = pread(descriptor, (char *)to + *n_read, n - *n_read, (off_t)(offset + *n_read));
        if (now < 0 && errno == EINTR)
            continue;
        if (now < 0)
            return errno;
        if (now == 0)
            return 0;
        *n_read += (size_t)now;
    }
    return 0;
}
