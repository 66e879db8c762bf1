/* disk_cache.h: a folder of files, one for each block, as a connector. A file is written under a temporary name and renamed,
 * and its header has a checksum, so a process that dies at any instant leaves whole files, and one temporary file that the next
 * engine removes. Anything wrong with a file is a miss, is counted, and removes the file. Engines may share the folder of one
 * fingerprint; each keeps the set of its files in memory. Without is_shared the folder is the engine's own and goes with it. If
 * that engine is killed, the next one over the same path removes its folder. */
#ifndef LLMPY_DISK_CACHE_H
#define LLMPY_DISK_CACHE_H

#include "connector.h"

#include <stddef.h>

#define DISK_FINGERPRINT 16u

struct disk_options {
    const char *path;              /* a folder; made if its parent exists */
    uint64_t bytes;                /* most bytes of the files of one fingerprint; the least recently used go first */
    uint8_t fingerprint[DISK_FINGERPRINT]; /* of weights, layout, types and whatever else the bytes depend on */
    bool is_shared;
};

/* bundle_pages: pages of a snapshot; 0: there are none. */
enum rc disk_cache_open(const struct disk_options *options, size_t page_bytes, uint32_t bundle_pages, uint32_t block_tokens,
                        struct connector *connector, struct err *err);

#endif
