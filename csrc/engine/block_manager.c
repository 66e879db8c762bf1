#include "block_manager.h"

#include "../base/mem.h"

/* The last two belong to a bundle; its first page has the bundle's counts and key. */
enum page_kind { PAGE_ALONE, PAGE_FIRST, PAGE_PART };

struct page {
    struct hash key;
    uint32_t refs, holds;
    uint32_t generation;             /* of the key; if older than the manager's, the key is stale and counts as none */
    uint32_t step;                   /* step in which the page was published */
    uint32_t prev, next;             /* free list */
    uint32_t chain_prev, chain_next; /* pages in the same bucket of the key table; 0 ends */
    uint32_t next_part;              /* next page of the same bundle; 0 ends */
    uint16_t group;
    uint8_t kind;                    /* enum page_kind */
    bool has_key, is_temporary;
};

struct block_manager {
    struct page *pages;  /* [n_pages + 2]: the last two are the heads of the free lists */
    uint32_t *buckets;   /* [mask + 1] first page of the chain, or 0 */
    uint32_t n_pages, n_free, n_cached, n_keys, mask, generation, step;
    uint32_t bundle_pages, n_bundles;
    uint32_t blank;      /* list of free pages without a findable key, most recently released first */
    uint32_t cached;     /* list of free pages that can be found, least recently released first */
    uint64_t n_evictions;
    struct kv_events *events;
};

/* ---- free lists ---- */

static void list_clear(struct page *pages, uint32_t head)
{
    pages[head].prev = pages[head].next = head;
}

/* Inserts a page between two neighbours: (last, head) makes it the list's last page, (head, first) its first. */
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

/* Moves all pages of the list `from` to the end of the list `to`. */
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

/* Number of pages that an entry of a free list stands for: of the whole bundle for its first page. */
static uint32_t n_pages_of(const struct block_manager *manager, const struct page *page)
{
    return page->kind == PAGE_FIRST ? manager->bundle_pages : 1;
}

/* Notes that a key of a block is no longer findable, if no other page has the key. */
static void note_removed(struct block_manager *manager, const struct page *page)
{
    struct kv_event event = {.kind = KV_REMOVED, .hash = page->key.lo, .group = page->group};
    if (manager->events && page->group != BUNDLE_GROUP && !block_manager_find(manager, &page->key, page->group))
        kv_events_note(manager->events, &event, NULL);
}

static void key_drop(struct block_manager *manager, uint32_t number)
{
    struct page *page = &manager->pages[number];
    if (!page->has_key)
        return;
    bool was_findable = is_findable(manager, page);
    manager->n_bundles -= page->kind == PAGE_FIRST && was_findable;
    if (page->chain_prev)
        manager->pages[page->chain_prev].chain_next = page->chain_next;
    else
        *bucket_of(manager, &page->key, page->group) = page->chain_next;
    if (page->chain_next)
        manager->pages[page->chain_next].chain_prev = page->chain_prev;
    page->has_key = false;
    manager->n_keys--;
    if (was_findable)
        note_removed(manager, page);
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
    page->is_temporary = false;
    page->chain_prev = 0;
    page->chain_next = *bucket;
    if (*bucket)
        manager->pages[*bucket].chain_prev = (uint32_t)number;
    *bucket = (uint32_t)number;
    manager->n_keys++;
    manager->n_bundles += page->kind == PAGE_FIRST;
}

void block_manager_begin_step(struct block_manager *manager)
{
    manager->step++;
}

bool block_manager_is_settled(const struct block_manager *manager, int32_t page)
{
    return manager->pages[page].step != manager->step;
}


void block_manager_reset(struct block_manager *manager)
{
    /* Stale keys stay in the table until a lookup meets them or their page is reused. */
    manager->generation++;
    kv_events_note(manager->events, &(struct kv_event){.kind = KV_CLEARED}, NULL);
    list_append(manager->pages, manager->blank, manager->cached);
    manager->n_cached = manager->n_bundles = 0;
}

/* ---- references ---- */

enum rc block_manager_create(uint32_t n_pages, uint32_t bundle_pages, struct block_manager **result, struct err *err)
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
    manager->bundle_pages = bundle_pages;
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

void block_manager_tell(struct block_manager *manager, struct kv_events *events)
{
    manager->events = events;
}

uint32_t block_manager_n_free(const struct block_manager *manager)
{
    return manager->n_free;
}

uint32_t block_manager_n_cached(const struct block_manager *manager)
{
    return manager->n_cached;
}

uint32_t block_manager_n_bundles(const struct block_manager *manager)
{
    return manager->n_bundles;
}

uint64_t block_manager_n_evictions(const struct block_manager *manager)
{
    return manager->n_evictions;
}

static bool is_unused(const struct page *page)
{
    return page->refs == 0 && page->holds == 0;
}

/* Reuses the page released last first: a page touched recently is the cheapest to write, a page never touched the dearest. */
static void blank_insert(struct block_manager *manager, uint32_t number)
{
    list_insert(manager->pages, manager->blank, manager->pages[manager->blank].next, number);
}

/* Splits a bundle: its other parts become single free pages; the caller handles the first page. */
static void bundle_dissolve(struct block_manager *manager, uint32_t first)
{
    struct page *pages = manager->pages;
    for (uint32_t part = pages[first].next_part, next; part; part = next) {
        next = pages[part].next_part;
        pages[part].kind = PAGE_ALONE;
        pages[part].next_part = 0;
        blank_insert(manager, part);
    }
    pages[first].kind = PAGE_ALONE;
    pages[first].next_part = 0;
}

/* Withdraws the free snapshot with the key of an evicted block: a snapshot is useless without the block that ends there. */
static void evict_state_of(struct block_manager *manager, const struct hash *key, uint32_t group)
{
    int32_t bundle = block_manager_find(manager, key, BUNDLE_GROUP);
    if (bundle && is_unused(&manager->pages[bundle]) && !block_manager_find(manager, key, group))
        block_manager_withdraw(manager, bundle);
}

int32_t block_manager_take(struct block_manager *manager)
{
    uint32_t number = manager->pages[manager->blank].next;
    if (number == manager->blank)
        number = manager->pages[manager->cached].next;
    struct page *page = &manager->pages[number];
    bool was_findable = is_findable(manager, page);
    manager->n_evictions += was_findable;
    manager->n_cached -= was_findable ? n_pages_of(manager, page) : 0;
    key_drop(manager, number);
    list_remove(manager->pages, number);
    if (page->kind == PAGE_FIRST)
        bundle_dissolve(manager, number);
    else if (was_findable && manager->bundle_pages)
        evict_state_of(manager, &page->key, page->group);
    manager->n_free--;
    page->refs = 1;
    return (int32_t)number;
}

void block_manager_take_bundle(struct block_manager *manager, int32_t *pages)
{
    for (uint32_t i = 0; i < manager->bundle_pages; i++) {
        pages[i] = block_manager_take(manager);
        struct page *page = &manager->pages[pages[i]];
        page->kind = i ? PAGE_PART : PAGE_FIRST;
        page->refs = !i;
        if (i)
            manager->pages[pages[i - 1]].next_part = (uint32_t)pages[i];
    }
}

void block_manager_list_bundle(const struct block_manager *manager, int32_t bundle, int32_t *pages)
{
    uint32_t n = 0;
    for (uint32_t at = (uint32_t)bundle; at; at = manager->pages[at].next_part)
        pages[n++] = (int32_t)at;
}

bool block_manager_is_bundle(const struct block_manager *manager, const int32_t *pages)
{
    const struct page *first = &manager->pages[pages[0]];
    uint32_t at = first->kind == PAGE_FIRST ? first->next_part : 0;
    for (uint32_t i = 1; i < manager->bundle_pages; at = manager->pages[at].next_part, i++)
        if (!at || pages[i] != (int32_t)at)
            return false;
    return first->kind == PAGE_FIRST && !at;
}

void block_manager_share(struct block_manager *manager, int32_t number)
{
    struct page *page = &manager->pages[number];
    if (is_unused(page)) {
        list_remove(manager->pages, (uint32_t)number);
        manager->n_free -= n_pages_of(manager, page);
        manager->n_cached -= is_findable(manager, page) ? n_pages_of(manager, page) : 0;
    }
    page->refs++;
}

static void free_if_unused(struct block_manager *manager, uint32_t number)
{
    struct page *page = &manager->pages[number];
    if (!is_unused(page) || page->kind == PAGE_PART)
        return;
    if (!is_findable(manager, page))
        key_drop(manager, number);
    manager->n_free += n_pages_of(manager, page);
    if (page->has_key) {
        list_push(manager->pages, manager->cached, number);
        manager->n_cached += n_pages_of(manager, page);
    } else {
        bundle_dissolve(manager, number);
        blank_insert(manager, number);
    }
}

void block_manager_release(struct block_manager *manager, int32_t page)
{
    manager->pages[page].refs--;
    free_if_unused(manager, (uint32_t)page);
}

void block_manager_withdraw(struct block_manager *manager, int32_t number)
{
    struct page *page = &manager->pages[number];
    bool is_cached = is_unused(page) && is_findable(manager, page);
    key_drop(manager, (uint32_t)number);
    if (!is_cached)
        return;
    list_remove(manager->pages, (uint32_t)number);
    manager->n_cached -= n_pages_of(manager, page);
    manager->n_free -= n_pages_of(manager, page);
    free_if_unused(manager, (uint32_t)number);
}

void block_manager_touch(struct block_manager *manager, int32_t number)
{
    struct page *page = &manager->pages[number];
    if (!is_unused(page) || !is_findable(manager, page))
        return;
    list_remove(manager->pages, (uint32_t)number);
    list_push(manager->pages, manager->cached, (uint32_t)number);
}

void block_manager_mark_temporary(struct block_manager *manager, int32_t bundle, bool is_temporary)
{
    manager->pages[bundle].is_temporary = is_temporary;
}

bool block_manager_is_temporary(const struct block_manager *manager, int32_t bundle)
{
    return manager->pages[bundle].is_temporary;
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

bool block_manager_is_shared(const struct block_manager *manager, int32_t page)
{
    return manager->pages[page].refs > 1;
}

/* ---- invariants ---- */

/* Counts a free list. Returns n_pages + 1 if its links are broken, or if it has a used page or a page of the other list. */
static uint32_t list_count(const struct block_manager *manager, uint32_t head)
{
    const struct page *pages = manager->pages;
    uint32_t n = 0;
    for (uint32_t at = pages[head].next; at != head; n += n_pages_of(manager, &pages[at]), at = pages[at].next) {
        bool belongs = is_findable(manager, &pages[at]) == (head == manager->cached);
        belongs &= is_unused(&pages[at]) && pages[at].kind != PAGE_PART;
        if (n > manager->n_pages || at == 0 || pages[pages[at].next].prev != at || !belongs)
            return manager->n_pages + 1;
    }
    return n;
}

static enum rc check_keys(const struct block_manager *manager, struct err *err)
{
    uint32_t n_chained = 0, n_keys = 0, n_bundles = 0;
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
    for (uint32_t i = 0; i < manager->n_pages; i++) {
        const struct page *page = &manager->pages[i];
        n_keys += page->has_key;
        n_bundles += page->kind == PAGE_FIRST && is_findable(manager, page);
    }
    if (n_chained != n_keys || n_keys != manager->n_keys || n_bundles != manager->n_bundles)
        return err_set(err, RC_INTERNAL, "invariant 3: %u keys in the table, %u on pages, %u counted; of states %u, %u counted",
                       n_chained, n_keys, manager->n_keys, n_bundles, manager->n_bundles);
    return RC_OK;
}

/* Checks that every bundle is whole and that every part belongs to exactly one bundle. */
static enum rc check_bundles(const struct block_manager *manager, struct err *err)
{
    uint32_t n_parts = 0, n_reached = 0;
    for (uint32_t i = 0; i < manager->n_pages; i++) {
        const struct page *page = &manager->pages[i];
        uint32_t n = 1;
        n_parts += page->kind == PAGE_PART;
        if (page->kind != PAGE_FIRST)
            continue;
        for (uint32_t at = page->next_part; at && n <= manager->bundle_pages; at = manager->pages[at].next_part, n++)
            if (manager->pages[at].kind != PAGE_PART || manager->pages[at].refs || manager->pages[at].has_key)
                return err_set(err, RC_INTERNAL, "invariant 2: page %u is no part of bundle %u", at, i);
        if (n != manager->bundle_pages)
            return err_set(err, RC_INTERNAL, "invariant 2: bundle %u has not %u pages", i, manager->bundle_pages);
        n_reached += n - 1;
    }
    if (n_parts != n_reached)
        return err_set(err, RC_INTERNAL, "invariant 2: %u parts of bundles, %u in bundles", n_parts, n_reached);
    return RC_OK;
}

enum rc block_manager_check(const struct block_manager *manager, const uint32_t *refs, const uint32_t *holds, struct err *err)
{
    uint32_t n_blank = list_count(manager, manager->blank), n_cached = list_count(manager, manager->cached), n_used = 0;
    if (n_blank > manager->n_pages || n_cached > manager->n_pages)
        return err_set(err, RC_INTERNAL, "invariant 2: a free list is torn or holds a page that does not belong there");
    for (uint32_t i = 0; i < manager->n_pages; i++) {
        const struct page *page = &manager->pages[i];
        n_used += is_unused(page) || page->kind == PAGE_PART ? 0 : n_pages_of(manager, page);
        if (page->refs != refs[i] || page->holds != holds[i])
            return err_set(err, RC_INTERNAL, "invariant 2: page %u counts %u references and %u copies, tables have %u and %u",
                           i, page->refs, page->holds, refs[i], holds[i]);
    }
    if (n_cached != manager->n_cached || n_blank + n_cached != manager->n_free ||
        manager->n_free + n_used + 1 != manager->n_pages)
        return err_set(err, RC_INTERNAL, "invariant 1: %u + %u on the lists, %u counted free, %u used of %u pages", n_blank,
                       n_cached, manager->n_free, n_used, manager->n_pages);
    enum rc rc = check_bundles(manager, err);
    return rc ? rc : check_keys(manager, err);
}
