#include "name_table.h"

#include "mem.h"

#include <string.h>

#define CHUNK_BYTES 65536

struct name_chunk {
    struct name_chunk *next;
    size_t used_bytes, size_bytes;
    char bytes[];
};

void name_table_destroy(struct name_table *table)
{
    for (struct name_chunk *chunk = table->chunks, *next; chunk; chunk = next) {
        next = chunk->next;
        mem_free(chunk);
    }
    mem_free(table->names);
    mem_free(table->slots);
    *table = (struct name_table){0};
}

char *name_table_copy(struct name_table *table, const char *bytes, size_t n_bytes)
{
    struct name_chunk *chunk = table->chunks;
    if (!chunk || chunk->size_bytes - chunk->used_bytes <= n_bytes) {
        if (n_bytes > SIZE_MAX / 2)
            return NULL;
        size_t size_bytes = n_bytes + 1 > CHUNK_BYTES ? n_bytes + 1 : CHUNK_BYTES;
        chunk = mem_alloc(sizeof *chunk + size_bytes);
        if (!chunk)
            return NULL;
        *chunk = (struct name_chunk){.next = table->chunks, .size_bytes = size_bytes};
        table->chunks = chunk;
    }
    char *copy = chunk->bytes + chunk->used_bytes;
    chunk->used_bytes += n_bytes + 1;
    if (n_bytes)
        memcpy(copy, bytes, n_bytes);
    copy[n_bytes] = 0;
    return copy;
}

/* FNV-1a with a final mixing step, since the low bits select the slot. */
static uint64_t hash_name(const char *bytes, size_t n_bytes)
{
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < n_bytes; i++)
        hash = (hash ^ (uint8_t)bytes[i]) * 0x100000001b3u;
    return hash ^ hash >> 29 ^ hash >> 47;
}

/* The slot that holds the name, or the empty slot where it belongs. The table always has an empty slot. */
static uint32_t *find_slot(const struct name_table *table, const char *bytes, size_t n_bytes)
{
    uint32_t mask = table->n_slots - 1, at = (uint32_t)hash_name(bytes, n_bytes) & mask;
    for (;; at = (at + 1) & mask) {
        uint32_t *slot = &table->slots[at];
        if (!*slot)
            return slot;
        const char *name = table->names[*slot - 1];
        if (strncmp(name, bytes, n_bytes) == 0 && !name[n_bytes])
            return slot;
    }
}

static bool grow(struct name_table *table)
{
    uint32_t capacity = table->capacity ? 2 * table->capacity : 64;
    if (capacity > UINT32_MAX / 4)
        return false;
    uint32_t *slots = mem_calloc((size_t)capacity * 2, sizeof *slots);
    const char **names = mem_resize(table->names, table->n * sizeof *names, capacity * sizeof *names);
    if (!slots || !names) {
        mem_free(slots);
        if (names)
            table->names = names;
        return false;
    }
    mem_free(table->slots);
    table->slots = slots;
    table->n_slots = 2 * capacity;
    table->names = names;
    table->capacity = capacity;
    for (uint32_t i = 0; i < table->n; i++)
        *find_slot(table, names[i], strlen(names[i])) = i + 1;
    return true;
}

bool name_table_add(struct name_table *table, const char *bytes, size_t n_bytes, uint32_t *number, bool *was_new)
{
    if (table->n == table->capacity && !grow(table))
        return false;
    uint32_t *slot = find_slot(table, bytes, n_bytes);
    *was_new = !*slot;
    if (!*slot) {
        char *copy = name_table_copy(table, bytes, n_bytes);
        if (!copy)
            return false;
        table->names[table->n++] = copy;
        *slot = table->n;
    }
    *number = *slot - 1;
    return true;
}

uint32_t name_table_find(const struct name_table *table, const char *bytes, size_t n_bytes)
{
    return table->n ? *find_slot(table, bytes, n_bytes) - 1 : NAME_ABSENT;
}
