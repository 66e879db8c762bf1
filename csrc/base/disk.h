/* disk.h: the calls to the operating system by which the disk tier writes, reads and removes files, over descriptors of
 * folders. Each gives 0 or an errno. Interrupted and short calls go on where they stopped. Tests can let a call fail. Any
 * thread. */
#ifndef LLMPY_DISK_H
#define LLMPY_DISK_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/uio.h>

/* Opens a folder, which is made if it is missing; its parent must exist. */
int disk_open_folder(int parent, const char *name, int *folder);
int disk_open(int folder, const char *name, uint64_t *size_bytes, int *file);
/* Creates an empty file, or empties one. */
int disk_create(int folder, const char *name, int *file);
/* Reads or writes all buffers from the start of the file on. The buffers' descriptions change. ENODATA: the file ends first. */
int disk_read(int file, struct iovec *buffers, int n);
int disk_write(int file, struct iovec *buffers, int n);
/* From now on reads and writes go past the system's page cache, where the file system can. Places, sizes and memory are then
 * multiples of DISK_UNIT; a call that the file system refuses goes through the page cache after all, as do all behind it. */
#define DISK_UNIT 4096u
void disk_go_direct(int file);
int disk_rename(int folder, const char *from, const char *to);
int disk_remove(int folder, const char *name, bool is_folder);
/* Locks a file or folder for this opening of it, until it is closed or the process ends. EWOULDBLOCK: it is locked. */
int disk_lock(int file);
void disk_touch(int file); /* the file was used now */
void disk_close(int file);

/* The n-th next call (0 = the next one) of those above fails with the code, or with code 0 it moves half of the bytes of its
 * first buffer and then goes on; negative = none. Calls of other threads count, too. */
void disk_fail_after(int64_t n_calls, int code);
uint64_t disk_n_calls(void);

#endif
