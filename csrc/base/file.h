/* file.h: reads files that other processes may write, truncate or replace meanwhile. Bytes are read into memory and never
 * mapped, since an access to a mapped page beyond the end of a truncated file kills the process. Any thread may read. */
#ifndef LLMPY_FILE_H
#define LLMPY_FILE_H

#include <stddef.h>
#include <stdint.h>

/* Opens a regular file: 0, or an errno. Refuses a pipe without waiting for it. */
int file_open(const char *path, int *descriptor, uint64_t *size_bytes);
int file_size(int descriptor, uint64_t *size_bytes); /* the current size: 0, or an errno */
void file_close(int descriptor);
/* Reads n bytes from an offset on: 0, or an errno. *n_read is less than n if the file ends first. */
int file_read(int descriptor, uint64_t offset, void *to, size_t n, size_t *n_read);

#endif
