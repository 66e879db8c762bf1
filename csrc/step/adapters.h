/* adapters.h: the adapters (LoRA) of a model, by number. A number is never used twice, so keys of the prefix
 * cache that have it stay right. Any thread may call these functions. An image is what a slot of the model's memory holds
 * (csrc/program/lora.h). */
#ifndef LLMPY_ADAPTERS_H
#define LLMPY_ADAPTERS_H

#include "../base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct adapters;

struct adapter {
    uint64_t number;
    const void *image;       /* its owner keeps it until adapters_hold_number says no */
    uint32_t keeps_slot;     /* 1: no other adapter takes its slot, until it is removed; atomic */
    uint32_t n_holders;      /* requests and slots; guarded by the lock, as are the fields below */
    uint32_t is_removed;     /* 1: freed with its last holder */
    uint32_t n_running;      /* sequences that run with it */
    struct adapter *next;
};

enum rc adapters_create(uint32_t n_slots, size_t image_bytes, struct adapters **adapters, struct err *err);
void adapters_set_image_bytes(struct adapters *adapters, size_t image_bytes); /* before the first adapter */
void adapters_destroy(struct adapters *adapters); /* all holders are gone */
uint32_t adapters_n_slots(const struct adapters *adapters); /* most adapters of a step */
size_t adapters_image_bytes(const struct adapters *adapters);
/* Borrows the image, which may lie in memory of the device. */
enum rc adapters_add(struct adapters *adapters, uint64_t number, const void *image, bool is_pinned, struct err *err);
bool adapters_hold_number(struct adapters *adapters, uint64_t number); /* false once the adapter is removed and has no holder */
/* No later request finds the adapter; requests that have it keep it. */
void adapters_remove(struct adapters *adapters, uint64_t number);
struct adapter *adapters_find(struct adapters *adapters, uint64_t number); /* a new holder's; NULL: there is none */
struct adapter *adapters_hold(struct adapters *adapters, struct adapter *adapter); /* for one more holder */
void adapters_release(struct adapters *adapters, struct adapter *adapter);
void adapters_run(struct adapters *adapters, struct adapter *adapter); /* one more sequence runs with it */
void adapters_rest(struct adapters *adapters, struct adapter *adapter); /* one fewer */
/* Fills numbers [most] with the adapters that sequences run with; returns their count, which may be larger than `most`. */
uint32_t adapters_running(struct adapters *adapters, uint64_t *numbers, uint32_t most);

/* Copies an image into a slot beside the steps, on a thread that may call nothing else of the model. */
typedef enum rc (*adapter_load)(void *ctx, uint32_t slot, const void *image, struct err *err);
void adapters_set_load(struct adapters *adapters, adapter_load load, void *ctx); /* before the first load */
/* Orders a load; no step may read or write the slot until it has ended, and the caller holds the adapter. False: it cannot be
 * done beside the steps. The driver's thread calls these. */
bool adapters_load_beside(struct adapters *adapters, uint32_t slot, const struct adapter *adapter);
enum load_state { LOAD_IS_ON, LOAD_HAS_ENDED, LOAD_HAS_FAILED };
enum load_state adapters_load_state(struct adapters *adapters, uint32_t slot, bool waits); /* of the slot's last load */

#endif
