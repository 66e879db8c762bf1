/* block_manager.h: the pages of the KV pool. Counts references, finds full blocks by their key, and decides which page is
 * reused first: those that hold nothing findable (of them the last released), then the least recently released. It knows
 * neither sequences nor tables; the scheduler, on the driver's thread, is its only caller. No operation costs more than the
 * pages it touches, and none allocates. Page 0 is reserved and never handed out.
 *
 * A bundle is so many pages that one recurrent state fills: taken, shared, held, published and released as one, under the
 * number of the first of them. Where it is reused, it is reused as a whole. */
#ifndef LLMPY_BLOCK_MANAGER_H
#define LLMPY_BLOCK_MANAGER_H

#include "../base/hash.h"
#include "../base/status.h"
#include "kv_events.h"

struct block_manager;

#define BUNDLE_GROUP UINT16_MAX /* of published bundles; no group of blocks has this number */

/* bundle_pages: of a bundle; 0: there are none. */
enum rc block_manager_create(uint32_t n_pages, uint32_t bundle_pages, struct block_manager **manager, struct err *err);
void block_manager_destroy(struct block_manager *manager);
/* Where it notes that keys of blocks went; NULL: nowhere. Not its own. */
void block_manager_tell(struct block_manager *manager, struct kv_events *events);

uint32_t block_manager_n_free(const struct block_manager *manager);
/* Of the free pages, those that can still be found. */
uint32_t block_manager_n_cached(const struct block_manager *manager);
uint64_t block_manager_n_evictions(const struct block_manager *manager);
/* The page to be reused first, with one reference and no key. The caller has checked n_free. */
int32_t block_manager_take(struct block_manager *manager);
/* The same for a bundle. pages: [bundle_pages], filled; the first one's number is the bundle's. */
void block_manager_take_bundle(struct block_manager *manager, int32_t *pages);
void block_manager_list_bundle(const struct block_manager *manager, int32_t bundle, int32_t *pages);
bool block_manager_is_bundle(const struct block_manager *manager, const int32_t *pages); /* exactly these, in this order */
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
bool block_manager_is_shared(const struct block_manager *manager, int32_t page); /* several tables name it */

/* The page of a group that carries the key, or 0. */
int32_t block_manager_find(struct block_manager *manager, const struct hash *key, uint32_t group);
void block_manager_publish(struct block_manager *manager, int32_t page, const struct hash *key, uint32_t group);
/* Marks a step boundary: what is published from here on will be computed with the step that is built now. */
void block_manager_begin_step(struct block_manager *manager);
/* False for a page that was published since the last boundary: a copy made before the step would miss its content. */
bool block_manager_is_settled(const struct block_manager *manager, int32_t page);
/* Nobody finds it any more; a free one is reused before those that can be found. */
void block_manager_withdraw(struct block_manager *manager, int32_t page);
/* A free page that can be found becomes the last of them to be reused. */
void block_manager_touch(struct block_manager *manager, int32_t page);
/* A mark on a published bundle: its owner withdraws it when it publishes the next. Published without it. */
void block_manager_mark_passing(struct block_manager *manager, int32_t bundle, bool is_passing);
bool block_manager_is_passing(const struct block_manager *manager, int32_t bundle);
/* Published bundles, in use or not. */
uint32_t block_manager_n_bundles(const struct block_manager *manager);
/* From here on nothing published before can be found, pages in use included. O(1). */
void block_manager_reset(struct block_manager *manager);

/* Walks everything. refs, holds: [n_pages] as the tables and copies have them, of a bundle those of its first page. RC_INTERNAL
 * names the broken invariant. */
enum rc block_manager_check(const struct block_manager *manager, const uint32_t *refs, const uint32_t *holds, struct err *err);

#endif
