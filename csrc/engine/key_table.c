#include "key_table.h"

#include "../base/mem.h"

enum rc key_table_create(struct key_table *table, uint32_t n, uint32_t n_lists, struct err *err)
{
    uint32_t n_buckets = 64;
    while (n_buckets < n)
        n_buckets *= 2;
    table->items = mem_calloc((size_t)n + n_lists, sizeof *table->items);
    table->buckets = mem_calloc(n_buckets, sizeof *table->buckets);
    table->mask = n_buckets - 1;
    if (!table->items || !table->buckets) {
        key_table_destroy(table);
        return err_set(err, RC_MEMORY, "key table: out of memory for %u items", n);
    }
    for (uint32_t head = n; head < n + n_lists; head++)
        table->items[head].prev = table->items[head].next = head;
    return RC_OK;
}

void key_table_destroy(struct key_table *table)
{
    mem_free(table->items);
    mem_free(table->buckets);
    *table = (struct key_table){0};
}

uint32_t key_table_match(const struct key_table *table, uint32_t item, const struct hash *key, uint32_t group)
{
    while (item && !keyed_is(&table->items[item], key, group))
        item = table->items[item].chain_next;
    return item;
}

void key_table_add(struct key_table *table, uint32_t item, const struct hash *key, uint32_t group)
{
    struct keyed *items = table->items, *added = &items[item];
    uint32_t *bucket = key_table_bucket(table, key, group);
    added->key = *key;
    added->group = (uint16_t)group;
    added->has_key = true;
    added->chain_prev = 0;
    added->chain_next = *bucket;
    if (*bucket)
        items[*bucket].chain_prev = item;
    *bucket = item;
}

void key_table_drop(struct key_table *table, uint32_t item)
{
    struct keyed *items = table->items, *dropped = &items[item];
    if (dropped->chain_prev)
        items[dropped->chain_prev].chain_next = dropped->chain_next;
    else
        *key_table_bucket(table, &dropped->key, dropped->group) = dropped->chain_next;
    if (dropped->chain_next)
        items[dropped->chain_next].chain_prev = dropped->chain_prev;
    dropped->has_key = false;
}

void list_append(struct key_table *table, uint32_t to, uint32_t from)
{
    struct keyed *items = table->items;
    uint32_t first = items[from].next, last = items[from].prev;
    if (first == from)
        return;
    items[first].prev = items[to].prev;
    items[items[to].prev].next = first;
    items[last].next = to;
    items[to].prev = last;
    items[from].prev = items[from].next = from;
}
