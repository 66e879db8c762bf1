/* block_manager.h: the pages of the KV pool. The block manager counts references, finds full blocks by their key, and decides
 * which free page is reused first: pages without a findable key come first (the last released of them first), then cached pages
 * (the least recently released first). It knows neither sequences nor page tables. Its only caller is the scheduler, on the
 * driver's thread. The cost of an operation is proportional to the pages it touches, and none allocates. Page 0 is reserved and
 * never handed out.
 *
 * A bundle is the group of pages that holds one recurrent state. The number of its first page stands for the bundle: its pages
 * are taken, shared, held, published, released and evicted together. */
#ifndef LLMPY_BLOCK_MANAGER_H
#define LLMPY_BLOCK_MANAGER_H

#include "../base/hash.h"
#include "../base/status.h"
#include "host_tier.h"
#include "kv_events.h"

struct block_manager;

#define BUNDLE_GROUP UINT16_MAX /* the group under which bundles are published; no group of blocks has this number */

/* bundle_pages: pages of a bundle; 0: there are no bundles. */
enum rc block_manager_create(uint32_t n_pages, uint32_t bundle_pages, struct block_manager **manager, struct err *err);
void block_manager_destroy(struct block_manager *manager);
/* Sets the ring in which the manager notes removed keys of blocks; NULL: none. The manager does not own the ring. */
void block_manager_tell(struct block_manager *manager, struct kv_events *events, uint32_t pool);

/* Findable pages are copied to the tier before they are reused, and lookups continue in it. The manager does not own it. */
void block_manager_add_tier(struct block_manager *manager, struct host_tier *tier);
/* Copies pages that have been published since, in use or not, at most n_most. Only with a tier. */
void block_manager_store_new(struct block_manager *manager, uint32_t n_most);
/* Copies the findable pages that are next to be reused, at most n_most and as many as make an eighth of the pool free without
 * another copy. Only with a tier. */
void block_manager_store_ahead(struct block_manager *manager, uint32_t n_most);
/* Copies every findable page, also those in use, as far as there are slots: the pool is about to lose its contents. */
void block_manager_store_all(struct block_manager *manager);

/* Copies the page, or bundle, with the key as far as there are slots, unless the tier has it. */
void block_manager_store_key(struct block_manager *manager, const struct hash *key, uint32_t group);

uint32_t block_manager_n_free(const struct block_manager *manager);
/* Number of free pages that can still be found by their key. */
uint32_t block_manager_n_cached(const struct block_manager *manager);
uint64_t block_manager_n_evictions(const struct block_manager *manager);
/* Takes the page to be reused first; it then has one reference and no key. The caller must have checked n_free. */
int32_t block_manager_take(struct block_manager *manager);
/* Takes a bundle. pages: [bundle_pages], filled; pages[0] is the bundle's number. */
void block_manager_take_bundle(struct block_manager *manager, int32_t *pages);
void block_manager_list_bundle(const struct block_manager *manager, int32_t bundle, int32_t *pages);
/* True if these pages, in this order, are exactly one bundle. */
bool block_manager_is_bundle(const struct block_manager *manager, const int32_t *pages);
/* Adds a reference to a page that was found or is in use. */
void block_manager_share(struct block_manager *manager, int32_t page);
/* Drops a reference. Callers release a chain from its tail, so that suffixes are reused before their prefixes. */
void block_manager_release(struct block_manager *manager, int32_t page);
/* Holds a page that a copy of the step being built reads: until block_manager_unhold it is not handed out. Rows of the step may
 * still write the page, because they run after the copies. */
void block_manager_hold(struct block_manager *manager, int32_t page);
void block_manager_unhold(struct block_manager *manager, int32_t page);
bool block_manager_is_free(const struct block_manager *manager, int32_t page);
/* True if exactly one page table has the page and no lookup can find it. */
bool block_manager_is_writable(const struct block_manager *manager, int32_t page);
bool block_manager_is_shared(const struct block_manager *manager, int32_t page); /* several tables have it */

/* Returns the page of the group that has the key, or 0. */
int32_t block_manager_find(struct block_manager *manager, const struct hash *key, uint32_t group);
/* The same; if only the host tier has the key, minus the number of the tier's entry. */
int32_t block_manager_look(struct block_manager *manager, const struct hash *key, uint32_t group);
/* Takes a page, or for BUNDLE_GROUP a bundle, publishes it under the key of the tier's entry and has the entry copied into it.
 * pages: [1] or [bundle_pages], filled. */
void block_manager_load(struct block_manager *manager, uint32_t entry, const struct hash *key, uint32_t group, int32_t *pages);
/* Takes a page, or a bundle, that only moves in of the coming flush fill. pages: [1] or [bundle_pages], filled. */
void block_manager_take_to_fill(struct block_manager *manager, int32_t *pages, bool is_bundle);
/* Publishes such a page: moves run before the step's copies, so it counts as one from an earlier step. */
void block_manager_publish_filled(struct block_manager *manager, int32_t page, const struct hash *key, uint32_t group);
void block_manager_publish(struct block_manager *manager, int32_t page, const struct hash *key, uint32_t group);
/* Marks a step boundary: pages published from here on are computed by the step that is being built. */
void block_manager_begin_step(struct block_manager *manager);
/* False for a page published since the last boundary: copies run before the step's rows, so a copy would miss its content. */
bool block_manager_is_settled(const struct block_manager *manager, int32_t page);
/* Removes the page's key: no lookup finds the page any more. If it is free, it is reused before pages that can be found. */
void block_manager_withdraw(struct block_manager *manager, int32_t page);
/* Moves a free page that can be found to the end of the order of reuse. */
void block_manager_touch(struct block_manager *manager, int32_t page);
/* Marks a published bundle as temporary: the sequence that published it withdraws it when its next snapshot replaces
 * it. A newly published bundle is not temporary. */
void block_manager_mark_temporary(struct block_manager *manager, int32_t bundle, bool is_temporary);
bool block_manager_is_temporary(const struct block_manager *manager, int32_t bundle);
/* Number of published bundles, in use or free. */
uint32_t block_manager_n_bundles(const struct block_manager *manager);
/* Makes every key published so far unfindable, also those of pages in use. O(1). */
void block_manager_reset(struct block_manager *manager);

/* Checks all invariants. refs, holds: [n_pages] the references by page tables and the holds by copies, for a bundle at its
 * first page. The error of RC_INTERNAL names the broken invariant. */
enum rc block_manager_check(const struct block_manager *manager, const uint32_t *refs, const uint32_t *holds, struct err *err);

#endif
