/* adapters.h: the adapters (LoRA) of a model in host memory, by number. A number is never used twice, so keys of the prefix
 * cache that have it stay right. Any thread may call these functions. An image is what a slot of the model's memory holds
 * (csrc/program/lora.h). */
#ifndef LLMPY_ADAPTERS_H
#define LLMPY_ADAPTERS_H

#include "../base/status.h"

#include <stddef.h>
#include <stdint.h>

struct adapters;

struct adapter {
    uint64_t number;
    void *image;
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
/* Copies the image. */
enum rc adapters_add(struct adapters *adapters, uint64_t number, const void *image, struct err *err);
/* No later request finds the adapter; requests that have it keep it. */
void adapters_remove(struct adapters *adapters, uint64_t number);
struct adapter *adapters_find(struct adapters *adapters, uint64_t number); /* a new holder's; NULL: there is none */
struct adapter *adapters_hold(struct adapters *adapters, struct adapter *adapter); /* for one more holder */
void adapters_release(struct adapters *adapters, struct adapter *adapter);
void adapters_run(struct adapters *adapters, struct adapter *adapter); /* one more sequence runs with it */
void adapters_rest(struct adapters *adapters, struct adapter *adapter); /* one fewer */
/* Fills numbers [most] with the adapters that sequences run with; returns their count, which may be larger than `most`. */
uint32_t adapters_running(struct adapters *adapters, uint64_t *numbers, uint32_t most);

#endif
