/* name_table.h: names numbered in the order of their arrival and found again by hash. Owns copies of the names, which stay
 * where they are until the table is destroyed. The readers use it for tensors and keys; finding is safe from any thread as long
 * as nothing is added. */
#ifndef LLMPY_NAME_TABLE_H
#define LLMPY_NAME_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define NAME_ABSENT UINT32_MAX

struct name_table {
    const char **names;     /* [capacity], NUL-terminated */
    uint32_t n, capacity;
    uint32_t *slots;        /* [n_slots], a power of two: number + 1, or 0 */
    uint32_t n_slots;
    struct name_chunk *chunks;
};

/* A zeroed struct is an empty table. */
void name_table_destroy(struct name_table *table);
/* A copy that lives as long as the table, NUL-terminated; NULL when memory is out. */
char *name_table_copy(struct name_table *table, const char *bytes, size_t n_bytes);
/* The number of the name, new or old (was_new says which); false when memory is out. A name holds no NUL. */
bool name_table_add(struct name_table *table, const char *bytes, size_t n_bytes, uint32_t *number, bool *was_new);
uint32_t name_table_find(const struct name_table *table, const char *bytes, size_t n_bytes); /* NAME_ABSENT: none */

#endif
