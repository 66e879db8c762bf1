/* key_table.h: numbered items (pages of the pool, slots of host memory) that stand on lists and can be found by a key. Both the
 * block manager and the host tier are made of it. Several items may have the same key. An item has at most one list; heads of
 * lists are items, too. Item 0 is none. No function allocates after key_table_create. */
#ifndef LLMPY_KEY_TABLE_H
#define LLMPY_KEY_TABLE_H

#include "../base/hash.h"
#include "../base/status.h"

#include <stdbool.h>

struct keyed {
    struct hash key;
    uint32_t prev, next;             /* of its list */
    uint32_t chain_prev, chain_next; /* items in the same bucket; 0 ends */
    uint32_t next_part;              /* next item of the same bundle; 0 ends */
    uint16_t group;
    bool has_key;
};

struct key_table {
    struct keyed *items; /* [n + n_lists], the last ones are the heads of the lists */
    uint32_t *buckets;   /* [mask + 1] first item of the chain, or 0 */
    uint32_t mask;
};

enum rc key_table_create(struct key_table *table, uint32_t n, uint32_t n_lists, struct err *err);
void key_table_destroy(struct key_table *table);

static inline uint32_t *key_table_bucket(const struct key_table *table, const struct hash *key, uint32_t group)
{
    return &table->buckets[(key->lo ^ group * 0x9e3779b97f4a7c15u) & table->mask];
}

static inline bool keyed_is(const struct keyed *item, const struct hash *key, uint32_t group)
{
    return item->group == group && hash_equal(&item->key, key);
}

/* The first item in the chain of the key from `item` on; 0: none. Begin with *key_table_bucket, go on with chain_next. */
uint32_t key_table_match(const struct key_table *table, uint32_t item, const struct hash *key, uint32_t group);
void key_table_add(struct key_table *table, uint32_t item, const struct hash *key, uint32_t group);
void key_table_drop(struct key_table *table, uint32_t item);

static inline bool list_is_empty(const struct key_table *table, uint32_t head)
{
    return table->items[head].next == head;
}

/* Inserts an item between two neighbours: (last, head) makes it the list's last item, (head, first) its first. */
static inline void list_insert(struct key_table *table, uint32_t before, uint32_t behind, uint32_t item)
{
    struct keyed *items = table->items;
    items[item].prev = before;
    items[item].next = behind;
    items[before].next = items[behind].prev = item;
}

static inline void list_push(struct key_table *table, uint32_t head, uint32_t item)
{
    list_insert(table, table->items[head].prev, head, item);
}

static inline void list_push_first(struct key_table *table, uint32_t head, uint32_t item)
{
    list_insert(table, head, table->items[head].next, item);
}

static inline void list_remove(struct key_table *table, uint32_t item)
{
    struct keyed *items = table->items;
    items[items[item].prev].next = items[item].next;
    items[items[item].next].prev = items[item].prev;
}

/* Moves all items of the list `from` to the end of the list `to`. */
void list_append(struct key_table *table, uint32_t to, uint32_t from);

#endif
