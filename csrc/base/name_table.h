/* name_table.h: a hash table that numbers names in the order of insertion. It owns copies of the names, whose addresses stay
 * the same until the table is destroyed. Used for tensor names and GGUF keys. Any thread may call name_table_find while no
 * thread adds a name. */
#ifndef LLMPY_NAME_TABLE_H
#define LLMPY_NAME_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define NAME_ABSENT UINT32_MAX

struct name_table {
    const char **names;     /* [capacity], NUL-terminated */
    uint32_t n, capacity;
    uint32_t *slots;        /* [n_slots] number + 1, or 0: empty; n_slots is a power of two */
    uint32_t n_slots;
    struct name_chunk *chunks;
};

/* A zeroed struct is an empty table. */
void name_table_destroy(struct name_table *table);
/* A NUL-terminated copy that lives as long as the table; NULL: out of memory. */
char *name_table_copy(struct name_table *table, const char *bytes, size_t n_bytes);
/* Adds a name that is not in the table yet (*was_new: it was not) and gives its number. False: out of memory. A name must not
 * contain NUL. */
bool name_table_add(struct name_table *table, const char *bytes, size_t n_bytes, uint32_t *number, bool *was_new);
uint32_t name_table_find(const struct name_table *table, const char *bytes, size_t n_bytes); /* or NAME_ABSENT */

#endif
