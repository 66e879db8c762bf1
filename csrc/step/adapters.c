#include "adapters.h"

#include "../base/mem.h"

#include <pthread.h>
#include <string.h>

struct load {
    const void *image; /* NULL: no load of the slot was ordered */
    uint64_t number;   /* the smallest is next */
    enum load_state state;
};

struct adapters {
    pthread_mutex_t lock;
    struct adapter *first;
    uint32_t n_slots;
    size_t image_bytes;
    adapter_load load;   /* NULL: slots are loaded by the steps */
    void *load_ctx;
    struct load *loads;  /* [n_slots] guarded by the lock, as are the fields below */
    uint64_t n_loads;
    bool has_thread, is_ending;
    pthread_t thread;
    pthread_cond_t changed;
};

enum rc adapters_create(uint32_t n_slots, size_t image_bytes, struct adapters **adapters, struct err *err)
{
    struct adapters *a = *adapters = mem_calloc(1, sizeof *a);
    if (!a)
        return err_set(err, RC_MEMORY, "adapters: out of memory");
    pthread_mutex_init(&a->lock, NULL);
    pthread_cond_init(&a->changed, NULL);
    a->n_slots = n_slots;
    a->image_bytes = image_bytes;
    a->loads = mem_calloc(n_slots, sizeof *a->loads);
    return a->loads ? RC_OK : err_set(err, RC_MEMORY, "adapters: out of memory");
}

void adapters_set_image_bytes(struct adapters *a, size_t image_bytes)
{
    a->image_bytes = image_bytes;
}

void adapters_destroy(struct adapters *a)
{
    if (!a)
        return;
    pthread_mutex_lock(&a->lock);
    a->is_ending = true;
    pthread_cond_broadcast(&a->changed);
    pthread_mutex_unlock(&a->lock);
    if (a->has_thread)
        pthread_join(a->thread, NULL);
    for (struct adapter *one = a->first, *next; one; one = next) {
        next = one->next;
        mem_free(one);
    }
    pthread_cond_destroy(&a->changed);
    pthread_mutex_destroy(&a->lock);
    mem_free(a->loads);
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

enum rc adapters_add(struct adapters *a, uint64_t number, const void *image, bool is_pinned, struct err *err)
{
    struct adapter *one = mem_calloc(1, sizeof *one);
    if (!one)
        return err_set(err, RC_MEMORY, "adapters: out of memory");
    *one = (struct adapter){.number = number, .image = image, .keeps_slot = is_pinned};
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
    mem_free(adapter);
}

static struct adapter *find(struct adapters *a, uint64_t number)
{
    struct adapter *one = a->first;
    while (one && (one->number != number || one->is_removed))
        one = one->next;
    return one;
}

bool adapters_hold_number(struct adapters *a, uint64_t number)
{
    pthread_mutex_lock(&a->lock);
    const struct adapter *one = a->first;
    while (one && one->number != number)
        one = one->next;
    pthread_mutex_unlock(&a->lock);
    return one;
}

void adapters_remove(struct adapters *a, uint64_t number)
{
    pthread_mutex_lock(&a->lock);
    struct adapter *one = find(a, number);
    if (one) {
        one->is_removed = 1;
        __atomic_store_n(&one->keeps_slot, 0, __ATOMIC_RELAXED);
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

/* ---- loads beside the steps ---- */

/* The slot whose load was ordered first; n_slots: none is on. Call it with the lock. */
static uint32_t next_load(const struct adapters *a)
{
    uint32_t next = a->n_slots;
    for (uint32_t i = 0; i < a->n_slots; i++)
        if (a->loads[i].image && a->loads[i].state == LOAD_IS_ON &&
            (next == a->n_slots || a->loads[i].number < a->loads[next].number))
            next = i;
    return next;
}

static void *run_loads(void *argument)
{
    struct adapters *a = argument;
    struct err err = {0};
    pthread_mutex_lock(&a->lock);
    while (!a->is_ending) {
        uint32_t slot = next_load(a);
        if (slot == a->n_slots) {
            pthread_cond_wait(&a->changed, &a->lock);
            continue;
        }
        pthread_mutex_unlock(&a->lock);
        enum rc rc = a->load(a->load_ctx, slot, a->loads[slot].image, &err);
        pthread_mutex_lock(&a->lock);
        a->loads[slot].state = rc ? LOAD_HAS_FAILED : LOAD_HAS_ENDED;
        pthread_cond_broadcast(&a->changed);
    }
    pthread_mutex_unlock(&a->lock);
    return NULL;
}

void adapters_set_load(struct adapters *a, adapter_load load, void *ctx)
{
    a->load = load;
    a->load_ctx = ctx;
}

bool adapters_load_beside(struct adapters *a, uint32_t slot, const struct adapter *adapter)
{
    if (a->load && !a->has_thread)
        a->has_thread = pthread_create(&a->thread, NULL, run_loads, a) == 0;
    if (!a->has_thread)
        return false;
    pthread_mutex_lock(&a->lock);
    a->loads[slot] = (struct load){adapter->image, a->n_loads++, LOAD_IS_ON};
    pthread_cond_broadcast(&a->changed);
    pthread_mutex_unlock(&a->lock);
    return true;
}

enum load_state adapters_load_state(struct adapters *a, uint32_t slot, bool waits)
{
    pthread_mutex_lock(&a->lock);
    while (waits && a->loads[slot].state == LOAD_IS_ON)
        pthread_cond_wait(&a->changed, &a->lock);
    enum load_state state = a->loads[slot].state;
    pthread_mutex_unlock(&a->lock);
    return state;
}
