#define _GNU_SOURCE
#include "disk.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

static atomic_int_least64_t calls_left = -1;
static atomic_int failing_code;
static atomic_uint_least64_t n_calls;

void disk_fail_after(int64_t n, int code)
{
    atomic_store(&failing_code, code);
    atomic_store(&calls_left, n);
}

uint64_t disk_n_calls(void)
{
    return atomic_load(&n_calls);
}

/* Counts a call; true if it is the one that fails. */
static bool is_failing(void)
{
    atomic_fetch_add(&n_calls, 1);
    return atomic_load(&calls_left) >= 0 && atomic_fetch_sub(&calls_left, 1) == 0;
}

/* The code of the failure that is due; 0: none. */
static int fails(void)
{
    return is_failing() ? atomic_load(&failing_code) : 0;
}

int disk_open_folder(int parent, const char *name, int *folder)
{
    int code = fails();
    if (code)
        return code;
    if (mkdirat(parent, name, 0777) < 0 && errno != EEXIST)
        return errno;
    *folder = openat(parent, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return *folder < 0 ? errno : 0;
}

int disk_open(int folder, const char *name, uint64_t *size_bytes, int *file)
{
    struct stat status;
    int code = fails(), opened = code ? -1 : openat(folder, name, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW);
    if (opened < 0)
        return code ? code : errno;
    code = fstat(opened, &status) < 0 ? errno : S_ISREG(status.st_mode) ? 0 : EINVAL;
    if (code) {
        close(opened);
        return code;
    }
    *size_bytes = (uint64_t)status.st_size;
    *file = opened;
    return 0;
}

int disk_create(int folder, const char *name, int *file)
{
    int code = fails();
    if (code)
        return code;
    *file = openat(folder, name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0666);
    return *file < 0 ? errno : 0;
}

void disk_go_direct(int file)
{
    int flags = fcntl(file, F_GETFL);
    if (flags >= 0)
        (void)!fcntl(file, F_SETFL, flags | O_DIRECT);
}

/* Lets a file go through the page cache; false if it does already. */
static bool leave_direct(int file)
{
    int flags = fcntl(file, F_GETFL);
    return flags >= 0 && flags & O_DIRECT && !fcntl(file, F_SETFL, flags & ~O_DIRECT);
}

/* Leaves out the first n bytes of the buffers. */
static void skip(struct iovec **buffers, int *n, size_t n_bytes)
{
    while (*n && n_bytes >= (*buffers)->iov_len) {
        n_bytes -= (*buffers)->iov_len;
        ++*buffers;
        --*n;
    }
    if (*n) {
        (*buffers)->iov_base = (char *)(*buffers)->iov_base + n_bytes;
        (*buffers)->iov_len -= n_bytes;
    }
}

static int transfer(int file, struct iovec *buffers, int n, ssize_t (*call)(int, const struct iovec *, int, off_t))
{
    off_t at = 0;
    while (n) {
        bool is_due = is_failing();
        int code = is_due ? atomic_load(&failing_code) : 0, n_now = n < 64 ? n : 64;
        size_t whole = buffers->iov_len;
        if (code && code != EINTR)
            return code;
        if (is_due && whole > 1) {
            buffers->iov_len = whole / 2;
            n_now = 1;
        }
        ssize_t moved = code ? -1 : call(file, buffers, n_now, at);
        code = code ? code : errno;
        buffers->iov_len = whole;
        if (moved < 0 && (code == EINTR || (code == EINVAL && leave_direct(file))))
            continue;
        if (moved < 0)
            return code;
        if (moved == 0)
            return ENODATA;
        at += moved;
        skip(&buffers, &n, (size_t)moved);
    }
    return 0;
}

int disk_read(int file, struct iovec *buffers, int n)
{
    return transfer(file, buffers, n, preadv);
}

int disk_write(int file, struct iovec *buffers, int n)
{
    return transfer(file, buffers, n, pwritev);
}

int disk_rename(int folder, const char *from, const char *to)
{
    int code = fails();
    return code ? code : renameat(folder, from, folder, to) < 0 ? errno : 0;
}

int disk_remove(int folder, const char *name, bool is_folder)
{
    int code = fails();
    return code ? code : unlinkat(folder, name, is_folder ? AT_REMOVEDIR : 0) < 0 ? errno : 0;
}

int disk_lock(int file)
{
    int code = fails();
    return code ? code : flock(file, LOCK_EX | LOCK_NB) < 0 ? errno : 0;
}

void disk_touch(int file)
{
    futimens(file, NULL);
}

void disk_close(int file)
{
    close(file);
}
