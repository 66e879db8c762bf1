/* host_tier.h: the slots of host memory that hold pages outside the pool. A slot is free, part of a findable entry, or swapped:
 * a sequence's own until it comes back. An entry is a copy of a published block (one slot) or of a snapshot (a bundle of slots)
 * under the same key. The tier decides where copies go and in which order they may run; it copies nothing itself: flush hands
 * the moves of a step to their owner. Driver's thread only; no function allocates after host_tier_create.
 *
 * Moves have the number of their flush. Within a flush all moves out come before the moves in. A page or slot may have moves
 * that have not ended: the numbers of the last ones are kept, and a later move, or the step that uses the page, waits for them
 * on the device. A slot that a flush touches is not given to another entry before the next flush. */
#ifndef LLMPY_HOST_TIER_H
#define LLMPY_HOST_TIER_H

#include "../base/hash.h"
#include "../base/status.h"

#include <stdbool.h>

enum move_way { MOVE_OUT = 0, MOVE_IN = 1 };

struct page_move {
    int32_t page;
    uint32_t slot;  /* from 0 on */
};

/* The moves of one way in a flush. They begin after the moves of the other way with numbers up to `after`. */
struct move_list {
    const struct page_move *moves;
    uint32_t n, way;
    uint64_t number, after;
};

struct host_tier;

/* bundle_pages: slots of a snapshot; 0: there are none. */
enum rc host_tier_create(uint32_t n_slots, uint32_t n_pages, uint32_t bundle_pages, struct host_tier **tier, struct err *err);
void host_tier_destroy(struct host_tier *tier);

/* The entry of the group with the key: the number of its first slot, from 1 on; 0: none. */
uint32_t host_tier_find(struct host_tier *tier, const struct hash *key, uint32_t group);
/* Copies n pages out as one entry, in place of the least recently used ones. False if the key is there already, or if every
 * slot is swapped or in use by this flush; entries that were to make room may be gone then. */
bool host_tier_store(struct host_tier *tier, const struct hash *key, uint32_t group, const int32_t *pages, uint32_t n);
/* Keeps an entry's slots until the next flush, and makes it the most recently used. */
void host_tier_touch(struct host_tier *tier, uint32_t entry);
/* Copies an entry into pages. */
void host_tier_load(struct host_tier *tier, uint32_t entry, const int32_t *pages);
/* Copies a page out into a slot of its own; 0: there is no slot. */
uint32_t host_tier_swap_out(struct host_tier *tier, int32_t page);
/* Copies a swapped slot into a page and frees the slot; host_tier_drop only frees it. */
void host_tier_swap_in(struct host_tier *tier, uint32_t slot, int32_t page);
void host_tier_drop(struct host_tier *tier, uint32_t slot);
/* Frees every entry; swapped slots stay. */
void host_tier_reset(struct host_tier *tier);

/* The moves since the last flush, [2] by way; they stay valid until the next move. Begins the next flush. */
void host_tier_flush(struct host_tier *tier, struct move_list *lists);
/* Numbers of the last moves of a page; [2] by way, 0: none. */
void host_tier_page_moves(const struct host_tier *tier, int32_t page, uint64_t *numbers);

uint32_t host_tier_n_free(const struct host_tier *tier);
uint32_t host_tier_n_swapped(const struct host_tier *tier);
uint32_t host_tier_n_findable(const struct host_tier *tier); /* slots of findable entries */
/* Checks the invariants; the error of RC_INTERNAL names the broken one. */
enum rc host_tier_check(const struct host_tier *tier, struct err *err);

#endif
