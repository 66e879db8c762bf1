/* adapter_slots.h: which adapter each slot of the model's memory holds. The adapters of running sequences are in slots. A slot
 * that no running sequence uses keeps its adapter until another one needs the slot; the one used least recently goes first, a
 * pinned one never. Driver's thread only. */
#ifndef LLMPY_ADAPTER_SLOTS_H
#define LLMPY_ADAPTER_SLOTS_H

#include "../step/adapters.h"
#include "../step/batch.h"

#include <stdbool.h>

struct adapter_slot {
    struct adapter *adapter;  /* held; NULL: none */
    bool is_loading;          /* beside the steps: no sequence may run with it yet, and no other adapter take the slot */
    uint32_t n_running;       /* sequences */
    uint64_t last_used;
};

struct adapter_slots {
    struct adapters *adapters; /* NULL: the engine serves none */
    uint32_t n;
    struct adapter_slot *slots; /* [n] */
    const void **images;       /* [n] to load before the step being built; NULL: the slot keeps its contents */
    uint64_t n_used;           /* a clock for last_used */
    bool loads_beside;         /* until a load fails */
};

enum rc adapter_slots_create(struct adapter_slots *slots, struct adapters *adapters, struct err *err);
void adapter_slots_destroy(struct adapter_slots *slots);
/* Whether a sequence with this adapter can run: the adapter is in a slot, or the step may load it into one that is not in use.
 * If other sequences run, the step may not: then the load begins beside the steps, and the answer is no until it has ended. */
bool adapter_slots_admit(struct adapter_slots *slots, struct adapter *adapter, bool others_run);
/* A sequence that is admitted begins to run; returns its slot. */
uint32_t adapter_slots_enter(struct adapter_slots *slots, struct adapter *adapter);
void adapter_slots_leave(struct adapter_slots *slots, uint32_t slot); /* it runs no longer */
void adapter_slots_settle(struct adapter_slots *slots); /* the step that loads the images has been started */

#endif
