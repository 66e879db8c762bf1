#include "block_manager.h"

#include "../base/mem.h"

struct page {
    struct hash key;
    uint32_t refs, holds;
    uint32_t generation;             /* of the key; an older one than the manager's: stale, as good as none */
    uint32_t step;                   /* boundary behind which it was published */
    uint32_t prev, next;             /* free list */
    uint32_t chain_prev, chain_next; /* pages in the same bucket of the key table; 0 ends */
    uint16_t group;
    bool has_key;
};

struct block_manager {
    struct page *pages;  /* [n_pages + 2]: the last two are the heads of the free lists */
    uint32_t *buckets;   /* [mask + 1] first page of the chain, or 0 */
    uint32_t n_pages, n_free, n_cached, n_keys, mask, generation, step;
    uint32_t blank;      /* list of free pages that hold nothing findable, most recently released first */
    uint32_t cached;     /* list of free pages that can be found, least recently released first */
    uint64_t n_evictions;
};

/* ---- free lists ---- */

static void list_clear(struct page *pages, uint32_t head)
{
    pages[head].prev = pages[head].next = head;
}

/* Between two neighbours: (last, head) makes it the list's last, (head, first) its first. */
static void list_insert(struct page *pages, uint32_t before, uint32_t behind, uint32_t page)
{
    pages[page].prev = before;
    pages[page].next = behind;
    pages[before].next = pages[behind].prev = page;
}

static void list_push(struct page *pages, uint32_t head, uint32_t page)
{
    list_insert(pages, pages[head].prev, head, page);
}

static void list_remove(struct page *pages, uint32_t page)
{
    pages[pages[page].prev].next = pages[page].next;
    pages[pages[page].next].prev = pages[page].prev;
}

/* Moves all of `from` behind the last of `to`. */
static void list_append(struct page *pages, uint32_t to, uint32_t from)
{
    uint32_t first = pages[from].next, last = pages[from].prev;
    if (first == from)
        return;
    pages[first].prev = pages[to].prev;
    pages[pages[to].prev].next = first;
    pages[last].next = to;
    pages[to].prev = last;
    list_clear(pages, from);
}

/* ---- key table ---- */

static uint32_t *bucket_of(const struct block_manager *manager, const struct hash *key, uint32_t group)
{
    return &manager->buckets[(key->lo ^ group * 0x9e3779b97f4a7c15u) & manager->mask];
}

static bool is_findable(const struct block_manager *manager, const struct page *page)
{
    return page->has_key && page->generation == manager->generation;
}

static void key_drop(struct block_manager *manager, uint32_t number)
{
    struct page *page = &manager->pages[number];
    if (!page->has_key)
        return;
    if (page->chain_prev)
        manager->pages[page->chain_prev].chain_next = page->chain_next;
    else
        *bucket_of(manager, &page->key, page->group) = page->chain_next;
    if (page->chain_next)
        manager->pages[page->chain_next].chain_prev = page->chain_prev;
    page->has_key = false;
    manager->n_keys--;
}

int32_t block_manager_find(struct block_manager *manager, const struct hash *key, uint32_t group)
{
    for (uint32_t number = *bucket_of(manager, key, group), next; number; number = next) {
        struct page *page = &manager->pages[number];
        next = page->chain_next;
        if (page->generation != manager->generation)
            key_drop(manager, number);
        else if (page->group == group && hash_equal(&page->key, key))
            return (int32_t)number;
    }
    return 0;
}

void block_manager_publish(struct block_manager *manager, int32_t number, const struct hash *key, uint32_t group)
{
    struct page *page = &manager->pages[number];
    uint32_t *bucket = bucket_of(manager, key, group);
    key_drop(manager, (uint32_t)number);
    page->key = *key;
    page->group = (uint16_t)group;
    page->generation = manager->generation;
    page->step = manager->step;
    page->has_key = true;
    page->chain_prev = 0;
    page->chain_next = *bucket;
    if (*bucket)
        manager->pages[*bucket].chain_prev = (uint32_t)number;
    *bucket = (uint32_t)number;
    manager->n_keys++;
}

void block_manager_begin_step(struct block_manager *manager)
{
    manager->step++;
}

bool block_manager_is_settled(const struct block_manager *manager, int32_t page)
{
    return manager->pages[page].step != manager->step;
}

void block_manager_withdraw(struct block_manager *manager, int32_t page)
{
    key_drop(manager, (uint32_t)page);
}

void block_manager_reset(struct block_manager *manager)
{
    /* Stale keys stay in the table until somebody meets them. */
    manager->generation++;
    list_append(manager->pages, manager->blank, manager->cached);
    manager->n_cached = 0;
}

/* ---- references ---- */

enum rc block_manager_create(uint32_t n_pages, struct block_manager **result, struct err *err)
{
    uint32_t n_buckets = 64;
    while (n_buckets < n_pages)
        n_buckets *= 2;
    struct block_manager *manager = mem_calloc(1, sizeof *manager);
    if (!manager)
        return err_set(err, RC_MEMORY, "block manager: out of memory");
    manager->pages = mem_calloc((size_t)n_pages + 2, sizeof *manager->pages);
    manager->buckets = mem_calloc(n_buckets, sizeof *manager->buckets);
    if (!manager->pages || !manager->buckets) {
        block_manager_destroy(manager);
        return err_set(err, RC_MEMORY, "block manager: out of memory for %u pages", n_pages);
    }
    manager->n_pages = n_pages;
    manager->mask = n_buckets - 1;
    manager->blank = n_pages;
    manager->cached = n_pages + 1;
    list_clear(manager->pages, manager->blank);
    list_clear(manager->pages, manager->cached);
    for (uint32_t page = 1; page < n_pages; page++)
        list_push(manager->pages, manager->blank, page);
    manager->n_free = n_pages - 1;
    *result = manager;
    return RC_OK;
}

void block_manager_destroy(struct block_manager *manager)
{
    if (!manager)
        return;
    mem_free(manager->pages);
    mem_free(manager->buckets);
    mem_free(manager);
}

uint32_t block_manager_n_free(const struct block_manager *manager)
{
    return manager->n_free;
}

uint32_t block_manager_n_cached(const struct block_manager *manager)
{
    return manager->n_cached;
}

uint64_t block_manager_n_evictions(const struct block_manager *manager)
{
    return manager->n_evictions;
}

int32_t block_manager_take(struct block_manager *manager)
{
    uint32_t number = manager->pages[manager->blank].next;
    if (number == manager->blank)
        number = manager->pages[manager->cached].next;
    struct page *page = &manager->pages[number];
    manager->n_evictions += is_findable(manager, page);
    manager->n_cached -= is_findable(manager, page);
    key_drop(manager, number);
    list_remove(manager->pages, number);
    manager->n_free--;
    page->refs = 1;
    return (int32_t)number;
}

static bool is_unused(const struct page *page)
{
    return page->refs == 0 && page->holds == 0;
}

void block_manager_share(struct block_manager *manager, int32_t number)
{
    struct page *page = &manager->pages[number];
    if (is_unused(page)) {
        list_remove(manager->pages, (uint32_t)number);
        manager->n_free--;
        manager->n_cached -= is_findable(manager, page);
    }
    page->refs++;
}

static void free_if_unused(struct block_manager *manager, uint32_t number)
{
    struct page *page = &manager->pages[number];
    if (!is_unused(page))
        return;
    if (!is_findable(manager, page))
        key_drop(manager, number);
    if (page->has_key)
        list_push(manager->pages, manager->cached, number);
    else /* the page touched last is the cheapest to write again, and one never touched the dearest */
        list_insert(manager->pages, manager->blank, manager->pages[manager->blank].next, number);
    manager->n_free++;
    manager->n_cached += page->has_key;
}

void block_manager_release(struct block_manager *manager, int32_t page)
{
    manager->pages[page].refs--;
    free_if_unused(manager, (uint32_t)page);
}

void block_manager_hold(struct block_manager *manager, int32_t page)
{
    manager->pages[page].holds++;
}

void block_manager_unhold(struct block_manager *manager, int32_t page)
{
    manager->pages[page].holds--;
    free_if_unused(manager, (uint32_t)page);
}

bool block_manager_is_free(const struct block_manager *manager, int32_t page)
{
    return is_unused(&manager->pages[page]);
}

bool block_manager_is_writable(const struct block_manager *manager, int32_t page)
{
    return manager->pages[page].refs == 1 && !is_findable(manager, &manager->pages[page]);
}

/* ---- invariants ---- */

/* Counts a free list, or returns n_pages + 1 for one that is torn, holds a used page, or a page of the other list. */
static uint32_t list_count(const struct block_manager *manager, uint32_t head)
{
    const struct page *pages = manager->pages;
    uint32_t n = 0;
    for (uint32_t at = pages[head].next; at != head; at = pages[at].next, n++) {
        bool belongs = is_findable(manager, &pages[at]) == (head == manager->cached);
        if (n > manager->n_pages || at == 0 || pages[pages[at].next].prev != at || !is_unused(&pages[at]) || !belongs)
            return manager->n_pages + 1;
    }
    return n;
}

static enum rc check_keys(const struct block_manager *manager, struct err *err)
{
    uint32_t n_chained = 0, n_keys = 0;
    for (uint32_t b = 0; b <= manager->mask; b++) {
        uint32_t prev = 0;
        for (uint32_t at = manager->buckets[b]; at; prev = at, at = manager->pages[at].chain_next) {
            const struct page *page = &manager->pages[at];
            bool fits = page->has_key && page->chain_prev == prev &&
                        bucket_of(manager, &page->key, page->group) == &manager->buckets[b];
            if (!fits || n_chained++ > manager->n_pages)
                return err_set(err, RC_INTERNAL, "invariant 3: key table and page %u disagree", at);
        }
    }
    for (uint32_t i = 0; i < manager->n_pages; i++)
        n_keys += manager->pages[i].has_key;
    if (n_chained != n_keys || n_keys != manager->n_keys)
        return err_set(err, RC_INTERNAL, "invariant 3: %u keys in the table, %u on pages, %u counted", n_chained, n_keys,
                       manager->n_keys);
    return RC_OK;
}

enum rc block_manager_check(const struct block_manager *manager, const uint32_t *refs, const uint32_t *holds, struct err *err)
{
    uint32_t n_blank = list_count(manager, manager->blank), n_cached = list_count(manager, manager->cached), n_used = 0;
    if (n_blank > manager->n_pages || n_cached > manager->n_pages)
        return err_set(err, RC_INTERNAL, "invariant 2: a free list is torn or holds a page that does not belong there");
    for (uint32_t i = 0; i < manager->n_pages; i++) {
        const struct page *page = &manager->pages[i];
        n_used += !is_unused(page);
        if (page->refs != refs[i] || page->holds != holds[i])
            return err_set(err, RC_INTERNAL, "invariant 2: page %u counts %u references and %u copies, tables have %u and %u",
                           i, page->refs, page->holds, refs[i], holds[i]);
    }
    if (n_cached != manager->n_cached || n_blank + n_cached != manager->n_free ||
        manager->n_free + n_used + 1 != manager->n_pages)
        return err_set(err, RC_INTERNAL, "invariant 1: %u + %u on the lists, %u counted free, %u used of %u pages", n_blank,
                       n_cached, manager->n_free, n_used, manager->n_pages);
    return check_keys(manager, err);
}
