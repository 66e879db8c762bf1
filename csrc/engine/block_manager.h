/* block_manager.h: the pages of the KV pool. Counts references, finds full blocks by their key, and decides which page is
 * reused first: those that hold nothing findable (of them the last released), then the least recently released. It knows
 * neither sequences nor tables; the scheduler, on the driver's thread, is its only caller. No operation costs more than the
 * pages it touches, and none allocates. Page 0 is reserved and never handed out. */
#ifndef LLMPY_BLOCK_MANAGER_H
#define LLMPY_BLOCK_MANAGER_H

#include "../base/hash.h"
#include "../base/status.h"

struct block_manager;

enum rc block_manager_create(uint32_t n_pages, struct block_manager **manager, struct err *err);
void block_manager_destroy(struct block_manager *manager);

uint32_t block_manager_n_free(const struct block_manager *manager);
/* Of the free pages, those that can still be found. */
uint32_t block_manager_n_cached(const struct block_manager *manager);
uint64_t block_manager_n_evictions(const struct block_manager *manager);
/* The page to be reused first, with one reference and no key. The caller has checked n_free. */
int32_t block_manager_take(struct block_manager *manager);
/* One more reference to a page that was found or is in use. */
void block_manager_share(struct block_manager *manager, int32_t page);
/* One reference less. Callers release a chain from its tail, so that suffixes are reused before their prefixes. */
void block_manager_release(struct block_manager *manager, int32_t page);
/* A copy in flight reads the page: it is not handed out meanwhile, though it may be written after the copies. */
void block_manager_hold(struct block_manager *manager, int32_t page);
void block_manager_unhold(struct block_manager *manager, int32_t page);
bool block_manager_is_free(const struct block_manager *manager, int32_t page);
/* Exactly one table names the page, and nobody else can find it. */
bool block_manager_is_writable(const struct block_manager *manager, int32_t page);

/* The page of a group that carries the key, or 0. */
int32_t block_manager_find(struct block_manager *manager, const struct hash *key, uint32_t group);
void block_manager_publish(struct block_manager *manager, int32_t page, const struct hash *key, uint32_t group);
/* Marks a step boundary: what is published from here on will be computed with the step that is built now. */
void block_manager_begin_step(struct block_manager *manager);
/* False for a page that was published since the last boundary: a copy made before the step would miss its content. */
bool block_manager_is_settled(const struct block_manager *manager, int32_t page);
void block_manager_withdraw(struct block_manager *manager, int32_t page);
/* From here on nothing published before can be found, pages in use included. O(1). */
void block_manager_reset(struct block_manager *manager);

/* Walks everything. refs, holds: [n_pages] as the tables and copies have them. RC_INTERNAL names the broken invariant. */
enum rc block_manager_check(const struct block_manager *manager, const uint32_t *refs, const uint32_t *holds, struct err *err);

#endif
