#include "adapter_slots.h"

#include "../base/mem.h"

#include <string.h>

enum rc adapter_slots_create(struct adapter_slots *s, struct adapters *adapters, struct err *err)
{
    *s = (struct adapter_slots){.adapters = adapters, .n = adapters ? adapters_n_slots(adapters) : 0};
    if (!adapters)
        return RC_OK;
    s->slots = mem_calloc(s->n, sizeof *s->slots);
    s->images = mem_calloc(s->n, sizeof *s->images);
    return s->slots && s->images ? RC_OK : err_set(err, RC_MEMORY, "adapters: out of memory for %u slots", s->n);
}

void adapter_slots_destroy(struct adapter_slots *s)
{
    for (uint32_t i = 0; s->slots && i < s->n; i++)
        if (s->slots[i].adapter)
            adapters_release(s->adapters, s->slots[i].adapter);
    mem_free(s->slots);
    mem_free(s->images);
}

/* The slot with the adapter, else the unused slot whose last use is oldest; s->n: all are in use. */
static uint32_t find(const struct adapter_slots *s, const struct adapter *adapter)
{
    uint32_t oldest = s->n;
    for (uint32_t i = 0; i < s->n; i++) {
        if (s->slots[i].adapter == adapter)
            return i;
        if (!s->slots[i].n_running && (oldest == s->n || s->slots[i].last_used < s->slots[oldest].last_used))
            oldest = i;
    }
    return oldest;
}

bool adapter_slots_have_room(const struct adapter_slots *s, const struct adapter *adapter)
{
    return find(s, adapter) < s->n;
}

uint32_t adapter_slots_enter(struct adapter_slots *s, struct adapter *adapter)
{
    uint32_t i = find(s, adapter);
    struct adapter_slot *slot = &s->slots[i];
    if (slot->adapter != adapter) {
        struct adapter *before = slot->adapter;
        slot->adapter = adapters_hold(s->adapters, adapter);
        s->images[i] = adapter->image;
        if (before)
            adapters_release(s->adapters, before);
    }
    slot->n_running++;
    adapters_run(s->adapters, adapter);
    slot->last_used = ++s->n_used;
    return i;
}

void adapter_slots_leave(struct adapter_slots *s, uint32_t slot)
{
    s->slots[slot].n_running--;
    adapters_rest(s->adapters, s->slots[slot].adapter);
    s->slots[slot].last_used = ++s->n_used;
}

void adapter_slots_settle(struct adapter_slots *s)
{
    if (s->n)
        memset(s->images, 0, s->n * sizeof *s->images);
}
