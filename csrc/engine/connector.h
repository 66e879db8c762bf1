/* connector.h: a store that keeps blocks of the prefix cache outside the engine, behind the host tier. The outer tier
 * (outer_tier.h) owns it and calls it: `has` and `stats` from the driver's thread, which they must not keep; load, save, clear
 * and look from threads of its own, one call of each thread at a time, and they may take long. A failure costs a computation,
 * never a request. What a store gives back must be the bytes that were saved under the same key and group. */
#ifndef LLMPY_CONNECTOR_H
#define LLMPY_CONNECTOR_H

#include "../base/hash.h"
#include "../base/status.h"

#include <stdbool.h>

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

struct connector {
    void *ctx;
    bool (*has)(void *ctx, const struct hash *key, uint32_t group);
    bool (*load)(void *ctx, const struct outer_block *block); /* false: it is not there; the parts are undefined then */
    bool (*save)(void *ctx, const struct outer_block *block);
    void (*clear)(void *ctx);      /* removes every block */
    void (*look)(void *ctx);       /* learns what others have stored meanwhile */
    void (*stats)(void *ctx, struct connector_stats *stats);
    void (*close)(void *ctx);      /* no other call runs */
    bool is_lasting;               /* outlives the engine, so that what the pool and the host have is saved at the end */
};

#endif
