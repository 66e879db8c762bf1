/* kv_events.h: a ring of events, in order: the prefix cache has stored or removed a block, or was cleared; the host tier has
 * stored or removed a copy of a block. Outside readers are
 * routers, which send a prompt to the server that has its beginning cached. The driver's thread writes and any thread reads;
 * the writer holds a leaf mutex O(1). A reader that falls behind sees a gap in the numbers. Events of a step become visible
 * with the step's results. Writing to a NULL ring does nothing. No function allocates after kv_events_create. */
#ifndef LLMPY_KV_EVENTS_H
#define LLMPY_KV_EVENTS_H

#include "../base/hash.h"
#include "../base/status.h"

#define KV_EVENT_SALT 64u
#define KV_EVENT_IMAGES 4u

enum kv_event_kind { KV_STORED = 0, KV_REMOVED = 1, KV_CLEARED = 2, KV_HOST_STORED = 3, KV_HOST_REMOVED = 4 };

struct kv_event {
    uint64_t number;         /* counts from 0 */
    uint64_t hash, parent;   /* of the block, and of the previous block */
    uint32_t kind, group, pool; /* pool: that has the block; blocks of several pools have other hashes than each other */
    uint64_t adapter;        /* number of the request's adapter; 0: none */
    bool has_parent;         /* false: the first block of a chain; salt holds the request's cache salt */
    uint32_t n_salt;
    char salt[KV_EVENT_SALT];
    uint32_t n_images;       /* the first images that the block holds tokens of, by their content */
    struct hash images[KV_EVENT_IMAGES];
};

struct kv_events;

enum rc kv_events_create(uint32_t capacity, uint32_t block_tokens, struct kv_events **events, struct err *err);
void kv_events_destroy(struct kv_events *events);
/* Adds a copy of the event and assigns its number. ids: [block_tokens] for KV_STORED, else NULL. */
void kv_events_note(struct kv_events *events, const struct kv_event *event, const int32_t *ids);
/* Number of events so far, visible or not. */
uint64_t kv_events_count(const struct kv_events *events);
/* Makes events with numbers below `upto` visible to readers. */
void kv_events_show(struct kv_events *events, uint64_t upto);
/* Copies visible events from number *next on, or from the oldest that is still in the ring, and moves *next behind them.
 * copies: [max]; ids: [max][block_tokens]. Returns how many. */
uint32_t kv_events_read(struct kv_events *events, uint64_t *next, struct kv_event *copies, int32_t *ids, uint32_t max);

#endif
