/* file.h: reads files that other processes may write, cut off or replace meanwhile. Bytes are read into memory and never
 * mapped: touching a mapped page that the file has lost ends the process by a signal. Any thread may read. */
#ifndef LLMPY_FILE_H
#define LLMPY_FILE_H

#include <stddef.h>
#include <stdint.h>

/* Opens a regular file: 0, or an errno. A pipe is refused, not waited for. */
int file_open(const char *path, int *descriptor, uint64_t *size_bytes);
int file_size(int descriptor, uint64_t *size_bytes); /* of now */
void file_close(int descriptor);
/* Reads n bytes from an offset on: 0, or an errno. *n_read is less than n where the file ends. */
int file_read(int descriptor, uint64_t offset, void *to, size_t n, size_t *n_read);

#endif
