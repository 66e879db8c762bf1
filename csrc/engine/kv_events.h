/* kv_events.h: a ring of what the prefix cache gains and loses, in order, for a reader outside: routers that send a prompt to
 * where its beginning is cached. The driver's thread notes, any thread reads; a leaf mutex, held O(1) by the writer. A reader
 * that falls behind finds that numbers are missing. Events of a step become visible when its results are there. NULL instead
 * of a ring notes nothing. Nothing allocates after kv_events_create. */
#ifndef LLMPY_KV_EVENTS_H
#define LLMPY_KV_EVENTS_H

#include "../base/hash.h"
#include "../base/status.h"

#define KV_EVENT_SALT 64u

enum kv_event_kind { KV_STORED = 0, KV_REMOVED = 1, KV_CLEARED = 2 };

struct kv_event {
    uint64_t number;         /* counts from 0 */
    uint64_t hash, parent;   /* of the block, and of the one before it */
    uint32_t kind, group;
    bool has_parent;         /* false: the first block, whose salt is in here */
    uint32_t n_salt;
    char salt[KV_EVENT_SALT];
};

struct kv_events;

enum rc kv_events_create(uint32_t capacity, uint32_t block_tokens, struct kv_events **events, struct err *err);
void kv_events_destroy(struct kv_events *events);
/* event->number is given here. ids: [block_tokens] of KV_STORED, else NULL. */
void kv_events_note(struct kv_events *events, const struct kv_event *event, const int32_t *ids);
/* Events so far, visible or not. */
uint64_t kv_events_count(const struct kv_events *events);
/* Those below this number can be read from now on. */
void kv_events_show(struct kv_events *events, uint64_t upto);
/* Copies visible events, none older than *next that are still there, and moves *next behind them. events: [max];
 * ids: [max][block_tokens]. */
uint32_t kv_events_read(struct kv_events *events, uint64_t *next, struct kv_event *copies, int32_t *ids, uint32_t max);

#endif
