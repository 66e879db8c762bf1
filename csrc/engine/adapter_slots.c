#include "adapter_slots.h"

#include "../base/mem.h"

#include <string.h>

enum rc adapter_slots_create(struct adapter_slots *s, struct adapters *adapters, struct err *err)
{
    *s = (struct adapter_slots){.adapters = adapters, .n = adapters ? adapters_n_slots(adapters) : 0,
                                .loads_beside = true};
    if (!adapters)
        return RC_OK;
    s->slots = mem_calloc(s->n, sizeof *s->slots);
    s->images = mem_calloc(s->n, sizeof *s->images);
    return s->slots && s->images ? RC_OK : err_set(err, RC_MEMORY, "adapters: out of memory for %u slots", s->n);
}

/* Takes note of the end of a slot's load. If it has failed, steps load from now on, and say why they cannot. */
static void look(struct adapter_slots *s, struct adapter_slot *slot, bool waits)
{
    if (!slot->is_loading)
        return;
    enum load_state state = adapters_load_state(s->adapters, (uint32_t)(slot - s->slots), waits);
    slot->is_loading = state == LOAD_IS_ON;
    if (state != LOAD_HAS_FAILED)
        return;
    adapters_release(s->adapters, slot->adapter);
    slot->adapter = NULL;
    s->loads_beside = false;
}

void adapter_slots_destroy(struct adapter_slots *s)
{
    for (uint32_t i = 0; s->slots && i < s->n; i++)
        look(s, &s->slots[i], true);
    for (uint32_t i = 0; s->slots && i < s->n; i++)
        if (s->slots[i].adapter)
            adapters_release(s->adapters, s->slots[i].adapter);
    mem_free(s->slots);
    mem_free(s->images);
}

/* The slot with the adapter, else the unused slot whose last use is oldest; s->n: all are in use, pinned, or being loaded. */
static uint32_t find(const struct adapter_slots *s, const struct adapter *adapter)
{
    uint32_t oldest = s->n;
    for (uint32_t i = 0; i < s->n; i++) {
        if (s->slots[i].adapter == adapter)
            return i;
        const struct adapter *held = s->slots[i].adapter;
        if (s->slots[i].n_running || s->slots[i].is_loading || (held && __atomic_load_n(&held->keeps_slot, __ATOMIC_RELAXED)))
            continue;
        if (oldest == s->n || s->slots[i].last_used < s->slots[oldest].last_used)
            oldest = i;
    }
    return oldest;
}

static void hold(struct adapter_slots *s, struct adapter_slot *slot, struct adapter *adapter)
{
    struct adapter *before = slot->adapter;
    slot->adapter = adapters_hold(s->adapters, adapter);
    if (before)
        adapters_release(s->adapters, before);
}

bool adapter_slots_admit(struct adapter_slots *s, struct adapter *adapter, bool others_run)
{
    for (uint32_t i = 0; i < s->n; i++)
        look(s, &s->slots[i], !others_run);
    uint32_t i = find(s, adapter);
    if (i == s->n)
        return false;
    struct adapter_slot *slot = &s->slots[i];
    if (slot->adapter == adapter || !others_run || !s->loads_beside || !adapters_load_beside(s->adapters, i, adapter))
        return !slot->is_loading;
    hold(s, slot, adapter);
    slot->is_loading = true;
    slot->last_used = ++s->n_used;
    return false;
}

uint32_t adapter_slots_enter(struct adapter_slots *s, struct adapter *adapter)
{
    uint32_t i = find(s, adapter);
    struct adapter_slot *slot = &s->slots[i];
    if (slot->adapter != adapter) {
        hold(s, slot, adapter);
        s->images[i] = adapter->image;
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
