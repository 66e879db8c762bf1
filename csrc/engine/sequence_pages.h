/* sequence_pages.h: the pages in which a running sequence's keys and values lie, one table a group. The scheduler decides when;
 * these functions take, share, publish and release. Driver's thread only. */
#ifndef LLMPY_SEQUENCE_PAGES_H
#define LLMPY_SEQUENCE_PAGES_H

#include "scheduler.h"

static inline const struct engine_config *config_of(const struct scheduler *s)
{
    return s->context->config;
}

static inline uint32_t block_tokens(const struct scheduler *s)
{
    return config_of(s)->layout.block_tokens;
}

static inline uint32_t n_groups(const struct scheduler *s)
{
    return config_of(s)->layout.n_groups;
}

static inline uint32_t blocks_of(const struct scheduler *s, uint32_t n_positions)
{
    return (n_positions + block_tokens(s) - 1) / block_tokens(s);
}

/* The pages among which those of the sequence are. */
static inline struct block_manager *blocks_for(const struct scheduler *s, const struct sequence *q)
{
    return s->pools[q->pool].blocks;
}

#define PAGE_OUTSIDE INT32_MIN /* in place of a page: the outer tier has it */
/* block_manager_look for a block of the sequence; with looks_outside, PAGE_OUTSIDE if only the outer tier has it. */
int32_t pages_look(struct scheduler *scheduler, struct sequence *sequence, uint32_t block, uint32_t group);
/* Free pages of a pool that are promised to no sequence; while sequences run, one in a hundred is kept for them. */
uint64_t pages_room(const struct scheduler *scheduler, uint32_t pool);
/* Takes all pages for the next n rows, or none. */
bool pages_take(struct scheduler *scheduler, struct sequence *sequence, uint32_t n_rows);
/* Takes positions from n_left on back; releases the pages wholly behind the rest. */
void pages_give_back(struct scheduler *scheduler, struct sequence *sequence, uint32_t n_left);
/* First block that a row at `position` or later can see. */
uint32_t pages_first_seen_block(const struct scheduler *scheduler, uint32_t group, uint32_t position);
/* Releases the blocks that have left their window. */
void pages_advance_windows(struct scheduler *scheduler, struct sequence *sequence);
/* The fork shares every block of the lead, also the unfilled tail. Both have slots. */
void pages_share(struct scheduler *scheduler, struct sequence *lead, struct sequence *fork);
/* Publishes full blocks whose tokens are known, even before they are computed: device work runs in order, so they are computed
 * before a later step reads them. Call it after scheduling rows and after accepting a token. */
void pages_publish(struct scheduler *scheduler, struct sequence *sequence);
/* Notes that a block has become findable. Chains with a salt too long for an event have no events. */
void pages_note_stored(struct scheduler *scheduler, struct sequence *sequence, uint32_t block, uint32_t group);
/* Cancels the copies that the step being built makes for the sequence; false if there are none. */
bool pages_cancel_copies(struct scheduler *scheduler, const struct sequence *sequence);
/* The sequence, which has no pages, will compute every position again, or find it in the cache. */
void pages_forget(struct sequence *sequence);
/* Releases every page, suffix before prefix. */
void pages_release(struct scheduler *scheduler, struct sequence *sequence);

#endif
