/* peer_store.h: blocks in memory that other processes of the host may map. The owner writes, and knows which slot has which
 * block; a reader is told the slots and copies from them, while the owner may already put another block there: a slot has a
 * number that is odd while it is written, and the key of its block, so a copy of the wrong bytes is noticed. A block of
 * several parts has a slot for each. The least recently used parts make room. Any thread. */
#ifndef LLMPY_PEER_STORE_H
#define LLMPY_PEER_STORE_H

#include "connector_abi.h"

#include <stdbool.h>
#include <stddef.h>

/* Memory with slots, mapped by its owner or by a reader. */
struct peer_memory {
    char *base;                    /* NULL: not mapped */
    size_t n_bytes, part_bytes;
    uint32_t n_slots;
};

struct peer_store;

/* most_bytes: of the parts; at least one fits. */
enum rc peer_store_create(uint64_t most_bytes, size_t part_bytes, struct peer_store **store, struct err *err);
void peer_store_destroy(struct peer_store *store); /* NULL is allowed */
void peer_store_save(struct peer_store *store, const struct connector_block *block);
void peer_store_clear(struct peer_store *store);
bool peer_store_has(struct peer_store *store, const struct connector_key *key);
/* The slots of all parts of a block; false if one is missing. */
bool peer_store_find(struct peer_store *store, const struct connector_key *key, uint32_t n_parts, uint32_t *slots);
void peer_store_counts(struct peer_store *store, struct connector_counts *counts);
const struct peer_memory *peer_store_memory(const struct peer_store *store);
int peer_store_descriptor(const struct peer_store *store); /* of the memory, for readers */

/* Maps the memory of another owner for reading; false if it cannot be, or has another size. */
bool peer_memory_map(struct peer_memory *memory, int descriptor, size_t part_bytes, uint32_t n_slots);
void peer_memory_unmap(struct peer_memory *memory);
/* Copies a block's parts and checksum out of slots. False: another block is there by now. */
bool peer_memory_read(const struct peer_memory *memory, const uint32_t *slots, struct connector_block *block);

#endif
