#include "kv_events.h"

#include "../base/mem.h"

#include <pthread.h>
#include <string.h>

struct kv_events {
    uint32_t capacity, block_tokens;
    uint64_t n_noted;           /* used by the driver's thread only */
    struct kv_event *ring;      /* [capacity] */
    int32_t *ids;               /* [capacity][block_tokens] */
    pthread_mutex_t lock;       /* guards the ring and what follows */
    uint64_t n_visible, oldest; /* numbers of events: visible ones are below n_visible; the ring has those from `oldest` on */
};

enum rc kv_events_create(uint32_t capacity, uint32_t block_tokens, struct kv_events **result, struct err *err)
{
    struct kv_events *e = *result = mem_calloc(1, sizeof *e);
    if (!e)
        return err_set(err, RC_MEMORY, "KV events: out of memory");
    pthread_mutex_init(&e->lock, NULL);
    e->capacity = capacity;
    e->block_tokens = block_tokens;
    e->ring = mem_calloc(capacity, sizeof *e->ring);
    e->ids = mem_calloc((size_t)capacity * block_tokens, sizeof *e->ids);
    if (e->ring && e->ids)
        return RC_OK;
    kv_events_destroy(e);
    *result = NULL;
    return err_set(err, RC_MEMORY, "KV events: out of memory for %u events; lower kv_event_capacity", capacity);
}

void kv_events_destroy(struct kv_events *e)
{
    if (!e)
        return;
    pthread_mutex_destroy(&e->lock);
    mem_free(e->ring);
    mem_free(e->ids);
    mem_free(e);
}

static uint64_t hash_of_pool(uint32_t pool)
{
    return pool * 0x9E3779B97F4A7C15u; /* odd, so all are different */
}

void kv_events_note(struct kv_events *e, const struct kv_event *event, const int32_t *ids)
{
    if (!e)
        return;
    pthread_mutex_lock(&e->lock);
    uint64_t number = e->n_noted++;
    uint32_t place = (uint32_t)(number % e->capacity);
    e->ring[place] = *event;
    e->ring[place].number = number;
    e->ring[place].hash ^= hash_of_pool(event->pool);
    e->ring[place].parent ^= hash_of_pool(event->pool);
    if (ids)
        memcpy(&e->ids[(size_t)place * e->block_tokens], ids, e->block_tokens * sizeof *ids);
    if (number >= e->capacity)
        e->oldest = number - e->capacity + 1;
    pthread_mutex_unlock(&e->lock);
}

uint64_t kv_events_count(const struct kv_events *e)
{
    return e ? e->n_noted : 0;
}

void kv_events_show(struct kv_events *e, uint64_t upto)
{
    if (!e)
        return;
    pthread_mutex_lock(&e->lock);
    e->n_visible = upto > e->n_visible ? upto : e->n_visible;
    pthread_mutex_unlock(&e->lock);
}

uint32_t kv_events_read(struct kv_events *e, uint64_t *next, struct kv_event *copies, int32_t *ids, uint32_t max)
{
    uint32_t n = 0;
    pthread_mutex_lock(&e->lock);
    *next = *next > e->oldest ? *next : e->oldest;
    for (; n < max && *next < e->n_visible; n++, (*next)++) {
        uint32_t place = (uint32_t)(*next % e->capacity);
        copies[n] = e->ring[place];
        memcpy(&ids[(size_t)n * e->block_tokens], &e->ids[(size_t)place * e->block_tokens], e->block_tokens * sizeof *ids);
    }
    pthread_mutex_unlock(&e->lock);
    return n;
}
