#include "adapters.h"

#include "../base/mem.h"

#include <pthread.h>
#include <string.h>

struct adapters {
    pthread_mutex_t lock;
    struct adapter *first;
    uint32_t n_slots;
    size_t image_bytes;
};

enum rc adapters_create(uint32_t n_slots, size_t image_bytes, struct adapters **adapters, struct err *err)
{
    struct adapters *a = *adapters = mem_calloc(1, sizeof *a);
    if (!a)
        return err_set(err, RC_MEMORY, "adapters: out of memory");
    pthread_mutex_init(&a->lock, NULL);
    a->n_slots = n_slots;
    a->image_bytes = image_bytes;
    return RC_OK;
}

void adapters_set_image_bytes(struct adapters *a, size_t image_bytes)
{
    a->image_bytes = image_bytes;
}

void adapters_destroy(struct adapters *a)
{
    if (!a)
        return;
    for (struct adapter *one = a->first, *next; one; one = next) {
        next = one->next;
        mem_free(one->image);
        mem_free(one);
    }
    pthread_mutex_destroy(&a->lock);
    mem_free(a);
}

uint32_t adapters_n_slots(const struct adapters *a)
{
    return a->n_slots;
}

size_t adapters_image_bytes(const struct adapters *a)
{
    return a->image_bytes;
}

enum rc adapters_add(struct adapters *a, uint64_t number, const void *image, struct err *err)
{
    struct adapter *one = mem_calloc(1, sizeof *one);
    void *copy = one ? mem_alloc(a->image_bytes) : NULL;
    if (!copy) {
        mem_free(one);
        return err_set(err, RC_MEMORY, "adapters: no memory for an adapter of %zu bytes; remove_adapter() frees one",
                       a->image_bytes);
    }
    memcpy(copy, image, a->image_bytes);
    *one = (struct adapter){.number = number, .image = copy};
    pthread_mutex_lock(&a->lock);
    one->next = a->first;
    a->first = one;
    pthread_mutex_unlock(&a->lock);
    return RC_OK;
}

/* Frees an adapter that is removed and has no holder. Call it with the lock. */
static void sweep(struct adapters *a, struct adapter *adapter)
{
    struct adapter **place = &a->first;
    if (adapter->n_holders || !adapter->is_removed)
        return;
    while (*place != adapter)
        place = &(*place)->next;
    *place = adapter->next;
    mem_free(adapter->image);
    mem_free(adapter);
}

static struct adapter *find(struct adapters *a, uint64_t number)
{
    struct adapter *one = a->first;
    while (one && (one->number != number || one->is_removed))
        one = one->next;
    return one;
}

void adapters_remove(struct adapters *a, uint64_t number)
{
    pthread_mutex_lock(&a->lock);
    struct adapter *one = find(a, number);
    if (one) {
        one->is_removed = 1;
        sweep(a, one);
    }
    pthread_mutex_unlock(&a->lock);
}

struct adapter *adapters_find(struct adapters *a, uint64_t number)
{
    pthread_mutex_lock(&a->lock);
    struct adapter *one = find(a, number);
    if (one)
        one->n_holders++;
    pthread_mutex_unlock(&a->lock);
    return one;
}

struct adapter *adapters_hold(struct adapters *a, struct adapter *adapter)
{
    pthread_mutex_lock(&a->lock);
    adapter->n_holders++;
    pthread_mutex_unlock(&a->lock);
    return adapter;
}

void adapters_release(struct adapters *a, struct adapter *adapter)
{
    pthread_mutex_lock(&a->lock);
    adapter->n_holders--;
    sweep(a, adapter);
    pthread_mutex_unlock(&a->lock);
}

void adapters_run(struct adapters *a, struct adapter *adapter)
{
    pthread_mutex_lock(&a->lock);
    adapter->n_running++;
    pthread_mutex_unlock(&a->lock);
}

void adapters_rest(struct adapters *a, struct adapter *adapter)
{
    pthread_mutex_lock(&a->lock);
    adapter->n_running--;
    pthread_mutex_unlock(&a->lock);
}

uint32_t adapters_running(struct adapters *a, uint64_t *numbers, uint32_t most)
{
    uint32_t n = 0;
    pthread_mutex_lock(&a->lock);
    for (const struct adapter *one = a->first; one; one = one->next) {
        if (one->n_running && n < most)
            numbers[n] = one->number;
        n += one->n_running > 0;
    }
    pthread_mutex_unlock(&a->lock);
    return n;
}
