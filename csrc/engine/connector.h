/* connector.h: a store that keeps blocks of the prefix cache outside the engine, behind the host tier. The outer tier
 * (outer_tier.h) owns it and calls it: `has` and `stats` from the driver's thread, which they must not keep; match and load
 * from n_threads threads of its own, save and clear from as many others, and they may take long. A failure costs a computation,
 * never a request. What a store gives back must be the bytes that were saved under the same key and group. */
#ifndef LLMPY_CONNECTOR_H
#define LLMPY_CONNECTOR_H

#include "../base/hash.h"
#include "../base/status.h"

#include <stdbool.h>

#define CONNECTOR_MOST_THREADS 8u

/* A block, or a snapshot of several pages (BUNDLE_GROUP of block_manager.h), in memory. */
struct outer_block {
    struct hash key;
    uint32_t group, n_parts;
    void *const *parts;            /* [n_parts] each has the bytes of a page */
};

struct connector_stats {
    uint64_t n_blocks, n_bytes;    /* held now */
    uint64_t n_evicted;            /* removed to make room */
    uint64_t n_bad;                /* found damaged, and removed */
    uint64_t n_errors;             /* calls that failed */
};

/* A quick store knows at once what it has (has); one that must ask another process is asked on the loading thread (match). */
struct connector {
    void *ctx;
    /* Quick stores: driver's thread, at once; else NULL. */
    bool (*has)(void *ctx, const struct hash *key, uint32_t group);
    /* Other stores: found[g * n_keys + i] is to say whether the block of keys[i] and groups[g] is there. False: it failed. */
    bool (*match)(void *ctx, const struct hash *keys, uint32_t n_keys, const uint32_t *groups, uint32_t n_groups, bool *found);
    bool (*load)(void *ctx, const struct outer_block *block); /* false: it is not there; the parts are undefined then */
    bool (*save)(void *ctx, const struct outer_block *block);
    void (*clear)(void *ctx);      /* removes every block */
    void (*stats)(void *ctx, struct connector_stats *stats);
    void (*close)(void *ctx);      /* no other call runs */
    bool is_lasting;               /* outlives the engine, so that what the pool and the host have is saved at the end */
    double deadline_s;             /* the engine waits no longer for a call */
    bool ends_itself;              /* no call takes much longer than the deadline: it may work on slots, and is waited for */
    uint32_t n_threads;            /* of each kind, at most CONNECTOR_MOST_THREADS; 0: one */
};

#endif
