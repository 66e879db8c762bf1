#define _GNU_SOURCE
#include "peer_store.h"

#include "../base/mem.h"
#include "key_table.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define PAGE_BYTES 4096u
#define MAX_SLOTS (1u << 24)
#define NEXT_PART 0x9e3779b97f4a7c15u

/* The head of a slot. */
struct head {
    atomic_uint_least64_t number;  /* odd: the slot is being written */
    struct hash key;
    uint32_t group, unused;
    uint64_t checksum;             /* of the whole block */
    char rest[24];
};
_Static_assert(sizeof(struct head) == 64, "processes share heads of slots");

struct peer_store {
    struct peer_memory memory;
    int descriptor;
    pthread_mutex_t lock;          /* guards what follows */
    struct key_table table;        /* its items are the slots, from 1 on */
    uint32_t free, used;           /* lists; used: the least recently used first */
    uint32_t n_used;
    uint64_t n_evicted;
};

/* ---- memory ---- */

static size_t heads_bytes(uint32_t n_slots)
{
    return (n_slots * sizeof(struct head) + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
}

static size_t memory_bytes(size_t part_bytes, uint32_t n_slots)
{
    return heads_bytes(n_slots) + n_slots * part_bytes;
}

static struct head *head_of(const struct peer_memory *m, uint32_t slot)
{
    return (struct head *)(void *)m->base + slot;
}

static char *bytes_of(const struct peer_memory *m, uint32_t slot)
{
    return m->base + heads_bytes(m->n_slots) + slot * m->part_bytes;
}

/* The key of a part: each part of a block has its own. */
static struct hash part_key(const struct connector_key *key, uint32_t part)
{
    return (struct hash){.lo = key->low + part * NEXT_PART, .hi = key->high};
}

static bool map(struct peer_memory *m, int descriptor, int protection, size_t part_bytes, uint32_t n_slots)
{
    *m = (struct peer_memory){NULL, memory_bytes(part_bytes, n_slots), part_bytes, n_slots};
    void *base = mmap(NULL, m->n_bytes, protection, MAP_SHARED, descriptor, 0);
    m->base = base == MAP_FAILED ? NULL : base;
    return m->base;
}

bool peer_memory_map(struct peer_memory *m, int descriptor, size_t part_bytes, uint32_t n_slots)
{
    struct stat status;
    int seals = fcntl(descriptor, F_GET_SEALS); /* memory that shrinks would kill its readers */
    return n_slots && n_slots <= MAX_SLOTS && !fstat(descriptor, &status) && seals >= 0 && seals & F_SEAL_SHRINK &&
           (size_t)status.st_size == memory_bytes(part_bytes, n_slots) && map(m, descriptor, PROT_READ, part_bytes, n_slots);
}

void peer_memory_unmap(struct peer_memory *m)
{
    if (m->base)
        munmap(m->base, m->n_bytes);
    *m = (struct peer_memory){0};
}

bool peer_memory_read(const struct peer_memory *m, const uint32_t *slots, struct connector_block *block)
{
    for (uint32_t part = 0; part < block->n_parts; part++) {
        if (slots[part] >= m->n_slots)
            return false;
        struct head *head = head_of(m, slots[part]);
        struct hash wanted = part_key(&block->key, part);
        uint64_t number = atomic_load_explicit(&head->number, memory_order_acquire);
        bool is_it = number % 2 == 0 && hash_equal(&head->key, &wanted) && head->group == block->key.group;
        if (!is_it)
            return false;
        block->checksum = head->checksum;
        memcpy(block->parts[part], bytes_of(m, slots[part]), m->part_bytes);
        atomic_signal_fence(memory_order_acquire); /* enough on x86; elsewhere the checksum tells what this does not */
        if (atomic_load_explicit(&head->number, memory_order_relaxed) != number)
            return false;
    }
    return true;
}

static void slot_write(const struct peer_memory *m, uint32_t slot, const struct connector_block *block, uint32_t part)
{
    struct head *head = head_of(m, slot);
    uint64_t number = atomic_load_explicit(&head->number, memory_order_relaxed);
    atomic_exchange_explicit(&head->number, number + 1, memory_order_acq_rel);
    head->key = part_key(&block->key, part);
    head->group = block->key.group;
    head->checksum = block->checksum;
    memcpy(bytes_of(m, slot), block->parts[part], m->part_bytes);
    atomic_store_explicit(&head->number, number + 2, memory_order_release);
}

/* ---- life ---- */

enum rc peer_store_create(uint64_t most_bytes, size_t part_bytes, struct peer_store **result, struct err *err)
{
    struct peer_store *s = mem_calloc(1, sizeof *s);
    uint64_t n = most_bytes / (part_bytes + sizeof(struct head));
    uint32_t n_slots = n > MAX_SLOTS ? MAX_SLOTS : n ? (uint32_t)n : 1;
    if (!s)
        return err_set(err, RC_MEMORY, "peer: out of memory");
    pthread_mutex_init(&s->lock, NULL);
    s->descriptor = memfd_create("llmpy-peer", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    bool is_made = s->descriptor >= 0 && !ftruncate(s->descriptor, (off_t)memory_bytes(part_bytes, n_slots)) &&
                   !fcntl(s->descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) &&
                   map(&s->memory, s->descriptor, PROT_READ | PROT_WRITE, part_bytes, n_slots);
    if (!is_made || key_table_create(&s->table, n_slots + 1, 2, err)) {
        peer_store_destroy(s);
        return err_set(err, RC_MEMORY, "peer: out of memory for %llu bytes; lower bytes", (unsigned long long)most_bytes);
    }
    s->free = n_slots + 1;
    s->used = n_slots + 2;
    for (uint32_t item = 1; item <= n_slots; item++)
        list_push(&s->table, s->free, item);
    *result = s;
    return RC_OK;
}

void peer_store_destroy(struct peer_store *s)
{
    if (!s)
        return;
    peer_memory_unmap(&s->memory);
    if (s->descriptor >= 0)
        close(s->descriptor);
    key_table_destroy(&s->table);
    pthread_mutex_destroy(&s->lock);
    mem_free(s);
}

/* ---- blocks ---- */

static uint32_t find(const struct peer_store *s, const struct connector_key *key, uint32_t part)
{
    struct hash own = part_key(key, part);
    return key_table_match(&s->table, *key_table_bucket(&s->table, &own, key->group), &own, key->group);
}

static void move_to(struct peer_store *s, uint32_t item, uint32_t list)
{
    list_remove(&s->table, item);
    list_push(&s->table, list, item);
}

/* Takes an item off all lists, so that no search finds it. 0: other threads are writing all of them. */
static uint32_t take(struct peer_store *s)
{
    bool is_full = list_is_empty(&s->table, s->free);
    if (is_full && list_is_empty(&s->table, s->used))
        return 0;
    uint32_t item = s->table.items[is_full ? s->used : s->free].next;
    list_remove(&s->table, item);
    if (is_full)
        key_table_drop(&s->table, item);
    s->n_used -= is_full;
    s->n_evicted += is_full;
    return item;
}

void peer_store_save(struct peer_store *s, const struct connector_block *block)
{
    for (uint32_t part = 0; part < block->n_parts; part++) {
        pthread_mutex_lock(&s->lock);
        uint32_t item = find(s, &block->key, part);
        bool is_new = !item;
        if (is_new)
            item = take(s);
        else
            move_to(s, item, s->used);
        pthread_mutex_unlock(&s->lock);
        if (!is_new || !item)
            continue;
        slot_write(&s->memory, item - 1, block, part);
        struct hash own = part_key(&block->key, part);
        pthread_mutex_lock(&s->lock);
        bool was_first = !find(s, &block->key, part); /* another thread may have saved the same block meanwhile */
        if (was_first)
            key_table_add(&s->table, item, &own, block->key.group);
        list_push(&s->table, was_first ? s->used : s->free, item);
        s->n_used += was_first;
        pthread_mutex_unlock(&s->lock);
    }
}

void peer_store_clear(struct peer_store *s)
{
    pthread_mutex_lock(&s->lock);
    while (!list_is_empty(&s->table, s->used)) {
        uint32_t item = s->table.items[s->used].next;
        key_table_drop(&s->table, item);
        move_to(s, item, s->free);
    }
    s->n_used = 0;
    pthread_mutex_unlock(&s->lock);
}

bool peer_store_has(struct peer_store *s, const struct connector_key *key)
{
    pthread_mutex_lock(&s->lock);
    bool has = find(s, key, 0);
    pthread_mutex_unlock(&s->lock);
    return has;
}

bool peer_store_find(struct peer_store *s, const struct connector_key *key, uint32_t n_parts, uint32_t *slots)
{
    uint32_t item = 1;
    pthread_mutex_lock(&s->lock);
    for (uint32_t part = 0; part < n_parts && (item = find(s, key, part)); part++) {
        move_to(s, item, s->used);
        slots[part] = item - 1;
    }
    pthread_mutex_unlock(&s->lock);
    return item;
}

void peer_store_counts(struct peer_store *s, struct connector_counts *counts)
{
    pthread_mutex_lock(&s->lock);
    *counts = (struct connector_counts){.n_blocks = s->n_used, .n_bytes = s->n_used * (uint64_t)s->memory.part_bytes,
                                        .n_evicted = s->n_evicted};
    pthread_mutex_unlock(&s->lock);
}

const struct peer_memory *peer_store_memory(const struct peer_store *s)
{
    return &s->memory;
}

int peer_store_descriptor(const struct peer_store *s)
{
    return s->descriptor;
}
