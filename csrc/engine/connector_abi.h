/* connector_abi.h: the interface of a store for blocks of the prefix cache that another package brings as a shared library. A
 * connector is one struct connector_table, a table of functions. llmpy ships this header as llmpy_connector.h. The engine's
 * side is connector_library.h.
 *
 * Threads. The engine calls match and load from one thread of its own, save and clear from a second one, and counts from a
 * third; one call of each thread at a time, never inside a step. open comes before all other calls and close behind them. A
 * call may take long, but the engine waits no longer than the option deadline_s (10 seconds) for one: it goes on
 * without the store until it has come back, and calls nothing meanwhile on that thread. If the engine closes before that, close
 * comes from that thread. No exception of C++ may leave a function.
 *
 * Failures. A function that fails returns another enum rc than RC_OK and may fill err; the engine counts it, and computes what
 * it did not get. A block that comes back with other bytes than were saved is found by its checksum and computed. A store may
 * lose any block at any time.
 *
 * Growth. Fields are appended to structs, never inserted, removed or changed. A release that appends some raises
 * CONNECTOR_REVISION and leaves CONNECTOR_ABI as it is, so older libraries still load: the core reads the fields that a
 * library's size_bytes covers and takes the others for zero. A library that needs fields of a newer core sees an older revision
 * in struct connector_host and returns NULL. Structs that lie in arrays do not grow. tests/c/test_connector_abi.c holds all
 * offsets. */
#ifndef LLMPY_CONNECTOR_ABI_H
#define LLMPY_CONNECTOR_ABI_H

#include "../base/status.h"

#include <stdint.h>

#define CONNECTOR_ABI 1u
#define CONNECTOR_REVISION 1u /* of CONNECTOR_ABI */
#define CONNECTOR_SYMBOL "llmpy_connector"

/* Names a block among those of one fingerprint. Equal prefixes have equal keys in engines with one prefix_cache_seed; a key
 * tells nothing of the tokens to who lacks the seed. */
struct connector_key {
    uint64_t low, high;
    uint32_t group;                /* of layers; 65535: a snapshot of recurrent states */
    uint32_t unused;
};

/* A block in host memory that is valid during the call. */
struct connector_block {
    struct connector_key key;
    void *const *parts;            /* [n_parts] each has part_bytes of struct connector_options */
    uint32_t n_parts;              /* 1, or most_parts for a snapshot */
    uint32_t unused;
    uint64_t checksum;             /* of the bytes: keep it with them; load gives it back */
};

struct connector_pair {
    const char *name, *value;
};

/* What open gets; all of it is valid during the call. */
struct connector_options {
    uint32_t size_bytes;
    uint32_t n_pairs;
    const struct connector_pair *pairs; /* [n_pairs] the options that the user gave */
    /* Stands for weights, program, types, device and llmpy's version. Blocks of another fingerprint are of no use. */
    uint8_t fingerprint[16];
    uint64_t part_bytes;
    uint32_t most_parts;
    uint32_t block_tokens;
};

struct connector_counts {
    uint64_t n_blocks, n_bytes;    /* held now */
    uint64_t n_evicted;            /* removed to make room */
    uint64_t n_failures;           /* that did not fail a call, such as one of several places that did not answer */
};

struct connector_table {
    uint32_t abi;                  /* CONNECTOR_ABI */
    uint32_t size_bytes;
    uint32_t lasts;                /* 1: blocks outlive the engine, so that the engine saves all that it has when it closes */
    uint32_t unused;
    enum rc (*open)(const struct connector_options *options, void **ctx, struct err *err);
    void (*close)(void *ctx);
    /* found[i] is to be 1 if the store has the block of keys[i], else 0. Keys of one group come in the order of a prompt. */
    enum rc (*match)(void *ctx, const struct connector_key *keys, uint32_t n, uint8_t *found, struct err *err);
    /* Fills the parts and the checksum of blocks; loaded[i] is to be 1 for those that are whole, else 0. */
    enum rc (*load)(void *ctx, struct connector_block *blocks, uint32_t n, uint8_t *loaded, struct err *err);
    /* Keeps copies of blocks. */
    enum rc (*save)(void *ctx, const struct connector_block *blocks, uint32_t n, struct err *err);
    /* Removes the blocks of this fingerprint, after a reset of the prefix cache. NULL: they stay. */
    enum rc (*clear)(void *ctx, struct err *err);
    /* Quick. NULL: all are 0. */
    void (*counts)(void *ctx, struct connector_counts *counts);
};

/* What the core brings. */
struct connector_host {
    uint32_t abi, revision, size_bytes, unused;
    /* Fills err (which may be NULL) with a printf-style message and returns rc. */
    enum rc (*err_set)(struct err *err, enum rc rc, const char *format, ...);
};

/* CONNECTOR_SYMBOL of a library. NULL: the library needs a newer llmpy. */
typedef const struct connector_table *(*connector_entry)(const struct connector_host *host);

#endif
