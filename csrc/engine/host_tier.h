/* host_tier.h: the slots of host memory that hold pages outside the pool. A slot is free, part of a findable entry, swapped (a
 * sequence's own until it comes back), or pinned: the outer tier (outer_tier.h) reads it or writes it. An entry is a copy of a
 * published block (one slot) or of a snapshot (a bundle of slots) under the same key. The tier decides where copies go and in
 * which order they may run; it copies nothing itself: flush hands the moves of a step to their owner. Driver's thread only; no
 * function allocates after host_tier_create.
 *
 * Moves have the number of their flush. Within a flush all moves out come before the moves in. A page or slot may have moves
 * that have not ended: the numbers of the last ones are kept, and a later move, or the step that uses the page, waits for them
 * on the device. A slot that a flush touches is not given to another entry before the next flush. */
#ifndef LLMPY_HOST_TIER_H
#define LLMPY_HOST_TIER_H

#include "../../kernels/backend.h"
#include "../base/hash.h"
#include "../base/status.h"
#include "kv_events.h"

#include <stdbool.h>

struct host_tier;

/* bundle_pages: slots of a snapshot; 0: there are none. */
enum rc host_tier_create(uint32_t n_slots, uint32_t n_pages, uint32_t bundle_pages, struct host_tier **tier, struct err *err);
void host_tier_destroy(struct host_tier *tier);
/* From now on, notes which blocks can be found and which no longer can, but for a reset; groups from n_groups on are none. */
void host_tier_tell(struct host_tier *tier, struct kv_events *events, uint32_t n_groups);

/* The entry of the group with the key: the number of its first slot, from 1 on; 0: none. */
uint32_t host_tier_find(struct host_tier *tier, const struct hash *key, uint32_t group);
bool host_tier_has_loads(const struct host_tier *tier); /* moves in of this flush */
/* False if this flush has as many moves in as there are pages; then entries cannot be loaded before the next one. */
bool host_tier_may_load(const struct host_tier *tier);
/* Copies n pages out as one entry, in place of the least recently used ones. False if the key is there already, or if every
 * slot is swapped or in use by this flush; entries that were to make room may be gone then. */
bool host_tier_store(struct host_tier *tier, const struct hash *key, uint32_t group, const int32_t *pages, uint32_t n);
/* Keeps an entry's slots until the next flush, and makes it the most recently used. */
void host_tier_touch(struct host_tier *tier, uint32_t entry);
/* Copies an entry into pages. */
void host_tier_load(struct host_tier *tier, uint32_t entry, const int32_t *pages);
/* Copies a page out into a slot of its own, linked behind the swapped slot `last` (0: behind none); 0: there is no slot. The
 * page must have no move in of this flush. host_tier_next gives the slot behind, or 0. */
uint32_t host_tier_swap_out(struct host_tier *tier, int32_t page, uint32_t last);
uint32_t host_tier_next(const struct host_tier *tier, uint32_t slot);
/* Copies a swapped slot into a page and frees the slot; host_tier_drop only frees it. */
void host_tier_swap_in(struct host_tier *tier, uint32_t slot, int32_t page);
void host_tier_drop(struct host_tier *tier, uint32_t slot);
/* Copies a page of another pool, the source of this flush, into a page. The flush has no other moves in then. */
void host_tier_receive(struct host_tier *tier, int32_t page, uint32_t source_page);
/* Frees every entry; swapped slots stay, and pinned ones until they are no longer used. */
void host_tier_reset(struct host_tier *tier);

/* The outer tier reads and writes slots outside of all flushes, so moves of theirs must have ended: `ended` by way, the moves
 * up to these numbers. */
void host_tier_note_ended(struct host_tier *tier, const uint64_t ended[2]);
bool host_tier_is_settled(const struct host_tier *tier); /* every move so far has ended */
/* The entry that leaves next of those that are not saved, as long as less than an eighth of the slots is free or saved; with
 * `all` in any case. Its slots are pinned until host_tier_end_save. 0: none, or its copy has not ended. */
uint32_t host_tier_begin_save(struct host_tier *tier, bool all);
bool host_tier_is_copied(const struct host_tier *tier, uint32_t entry); /* all moves out into it have ended */
/* The same for one entry; false if it is pinned already or its copy has not ended. */
bool host_tier_begin_save_of(struct host_tier *tier, uint32_t entry);
void host_tier_end_save(struct host_tier *tier, uint32_t entry);
/* Takes n slots for an entry that is coming from outside: it can be found once host_tier_end_fill has said that it is good.
 * `number` identifies the load. 0: the key is there, or there are not enough slots without moves. */
uint32_t host_tier_begin_fill(struct host_tier *tier, const struct hash *key, uint32_t group, uint32_t n, uint64_t number);
void host_tier_end_fill(struct host_tier *tier, uint32_t entry, bool is_good);
/* Number of the load that brings the entry; 0: none. */
uint64_t host_tier_coming(struct host_tier *tier, const struct hash *key, uint32_t group);
const struct hash *host_tier_key(const struct host_tier *tier, uint32_t entry, uint32_t *group);

/* True for a page that a move in of this flush fills. */
bool host_tier_is_coming(const struct host_tier *tier, int32_t page);
/* Number of the page's last move of one way; 0: none. */
uint64_t host_tier_last_move(const struct host_tier *tier, int32_t page, enum move_way way);
/* The work that follows the next flush waits for the page's last move of one way; host_tier_await_number for the moves of one
 * way up to a number. */
void host_tier_await(struct host_tier *tier, int32_t page, enum move_way way);
void host_tier_await_number(struct host_tier *tier, uint64_t number, enum move_way way);
/* The moves since the last flush and what to wait for; the moves stay valid until the next one. Begins the next flush. False if
 * there is nothing to move and nothing to wait for. */
bool host_tier_flush(struct host_tier *tier, struct move_args *args);

uint32_t host_tier_n_free(const struct host_tier *tier);
uint32_t host_tier_n_swapped(const struct host_tier *tier);
uint32_t host_tier_n_findable(const struct host_tier *tier); /* slots of findable entries */
uint32_t host_tier_n_coming(const struct host_tier *tier);   /* slots of entries that come, or were reset while they are read */
uint64_t host_tier_last(const struct host_tier *tier, enum move_way way); /* number of the last move of one way; 0: none */
uint64_t host_tier_n_ordered(const struct host_tier *tier); /* moves of all flushes so far */
/* Checks the invariants; the error of RC_INTERNAL names the broken one. */
enum rc host_tier_check(const struct host_tier *tier, struct err *err);

#endif
