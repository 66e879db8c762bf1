#include "block_manager.h"

#include "../base/mem.h"
#include "key_table.h"

/* The last two belong to a bundle; its first page has the bundle's counts and key. */
enum page_kind { PAGE_ALONE, PAGE_FIRST, PAGE_PART };

struct page {
    uint32_t refs, holds;
    uint32_t generation;             /* of the key; if older than the manager's, the key is stale and counts as none */
    uint32_t step;                   /* step in which the page was published */
    uint8_t kind;                    /* enum page_kind */
    bool is_temporary;
    bool is_clean;                   /* stands on the list `clean`, unless a reset has made its key stale */
};

struct block_manager {
    struct key_table table; /* its items are the pages */
    struct page *pages;     /* [n_pages] */
    uint32_t n_pages, n_free, n_cached, n_keys, generation, step;
    uint32_t bundle_pages, n_bundles;
    uint32_t blank;         /* list of free pages without a findable key, most recently released first */
    uint32_t clean, cached; /* lists of free pages that can be found, least recently released first; all of `clean`, which have
                             * been copied to the host tier, are older than those of `cached` */
    uint32_t n_clean;
    struct host_tier *tier; /* NULL: there is none */
    int32_t *parts;         /* [bundle_pages] */
    uint32_t *new_pages;    /* [n_pages] a ring: pages published since block_manager_store_new looked; only with a tier */
    uint64_t first_new, end_new;
    uint64_t n_evictions;
    struct kv_events *events;
    uint32_t pool; /* in events */
};

/* ---- key table ---- */

static bool is_findable(const struct block_manager *manager, uint32_t number)
{
    return manager->table.items[number].has_key && manager->pages[number].generation == manager->generation;
}

/* Number of pages that an entry of a free list stands for: of the whole bundle for its first page. */
static uint32_t n_pages_of(const struct block_manager *manager, uint32_t number)
{
    return manager->pages[number].kind == PAGE_FIRST ? manager->bundle_pages : 1;
}

/* Notes that a key of a block is no longer findable, if no other page has the key. */
static void note_removed(struct block_manager *manager, const struct keyed *item)
{
    struct kv_event event = {.kind = KV_REMOVED, .hash = item->key.lo, .group = item->group,
                             .pool = manager->pool};
    if (manager->events && item->group != BUNDLE_GROUP && !block_manager_find(manager, &item->key, item->group))
        kv_events_note(manager->events, &event, NULL);
}

static void key_drop(struct block_manager *manager, uint32_t number)
{
    struct keyed *item = &manager->table.items[number];
    if (!item->has_key)
        return;
    bool was_findable = is_findable(manager, number);
    manager->n_bundles -= manager->pages[number].kind == PAGE_FIRST && was_findable;
    key_table_drop(&manager->table, number);
    manager->n_keys--;
    if (was_findable)
        note_removed(manager, item);
}

int32_t block_manager_find(struct block_manager *manager, const struct hash *key, uint32_t group)
{
    for (uint32_t number = *key_table_bucket(&manager->table, key, group), next; number; number = next) {
        next = manager->table.items[number].chain_next;
        if (manager->pages[number].generation != manager->generation)
            key_drop(manager, number);
        else if (keyed_is(&manager->table.items[number], key, group))
            return (int32_t)number;
    }
    return 0;
}

void block_manager_publish(struct block_manager *manager, int32_t number, const struct hash *key, uint32_t group)
{
    struct page *page = &manager->pages[number];
    key_drop(manager, (uint32_t)number);
    key_table_add(&manager->table, (uint32_t)number, key, group);
    page->generation = manager->generation;
    page->step = manager->step;
    page->is_temporary = false;
    manager->new_pages[manager->end_new++ % manager->n_pages] = (uint32_t)number;
    if (manager->end_new - manager->first_new > manager->n_pages)
        manager->first_new++;
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
    kv_events_note(manager->events, &(struct kv_event){.kind = KV_CLEARED, .pool = manager->pool}, NULL);
    list_append(&manager->table, manager->blank, manager->clean);
    list_append(&manager->table, manager->blank, manager->cached);
    manager->n_cached = manager->n_clean = manager->n_bundles = 0;
}

/* ---- references ---- */

enum rc block_manager_create(uint32_t n_pages, uint32_t bundle_pages, struct block_manager **result, struct err *err)
{
    struct block_manager *manager = mem_calloc(1, sizeof *manager);
    if (!manager)
        return err_set(err, RC_MEMORY, "block manager: out of memory");
    manager->pages = mem_calloc(n_pages, sizeof *manager->pages);
    manager->parts = mem_calloc((size_t)bundle_pages + 1, sizeof *manager->parts);
    manager->new_pages = mem_calloc(n_pages, sizeof *manager->new_pages);
    if (!manager->pages || !manager->parts || !manager->new_pages || key_table_create(&manager->table, n_pages, 3, err)) {
        block_manager_destroy(manager);
        return err_set(err, RC_MEMORY, "block manager: out of memory for %u pages", n_pages);
    }
    manager->n_pages = n_pages;
    manager->bundle_pages = bundle_pages;
    manager->blank = n_pages;
    manager->clean = n_pages + 1;
    manager->cached = n_pages + 2;
    for (uint32_t page = 1; page < n_pages; page++)
        list_push(&manager->table, manager->blank, page);
    manager->n_free = n_pages - 1;
    *result = manager;
    return RC_OK;
}

void block_manager_destroy(struct block_manager *manager)
{
    if (!manager)
        return;
    mem_free(manager->pages);
    mem_free(manager->parts);
    mem_free(manager->new_pages);
    key_table_destroy(&manager->table);
    mem_free(manager);
}

void block_manager_tell(struct block_manager *manager, struct kv_events *events, uint32_t pool)
{
    manager->events = events;
    manager->pool = pool;
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
    list_push_first(&manager->table, manager->blank, number);
}

/* Splits a bundle: its other parts become single free pages; the caller handles the first page. */
static void bundle_dissolve(struct block_manager *manager, uint32_t first)
{
    struct keyed *items = manager->table.items;
    for (uint32_t part = items[first].next_part, next; part; part = next) {
        next = items[part].next_part;
        manager->pages[part].kind = PAGE_ALONE;
        items[part].next_part = 0;
        blank_insert(manager, part);
    }
    manager->pages[first].kind = PAGE_ALONE;
    items[first].next_part = 0;
}

/* Takes a page off its list. */
static void free_remove(struct block_manager *manager, uint32_t number)
{
    struct page *page = &manager->pages[number];
    list_remove(&manager->table, number);
    manager->n_clean -= page->is_clean && is_findable(manager, number) ? n_pages_of(manager, number) : 0;
    page->is_clean = false;
}

/* ---- the host tier ---- */

/* Has a findable page or bundle copied to the host tier, unless the tier has it. False if there is no slot, or if moves in of
 * this flush, which come behind all moves out, fill it. */
static bool keep_copy(struct block_manager *manager, uint32_t number)
{
    const struct keyed *item = &manager->table.items[number];
    if (host_tier_find(manager->tier, &item->key, item->group))
        return true;
    if (host_tier_is_coming(manager->tier, (int32_t)number))
        return false;
    block_manager_list_bundle(manager, (int32_t)number, manager->parts);
    return host_tier_store(manager->tier, &item->key, item->group, manager->parts, n_pages_of(manager, number));
}

/* The step waits for the last move of a page, or of each page of a bundle. */
static void await(struct block_manager *manager, uint32_t number, enum move_way way)
{
    for (uint32_t part = number; part && manager->tier; part = manager->table.items[part].next_part)
        host_tier_await(manager->tier, (int32_t)part, way);
}

void block_manager_add_tier(struct block_manager *manager, struct host_tier *tier)
{
    manager->tier = tier;
}

void block_manager_store_new(struct block_manager *manager, uint32_t n_most)
{
    for (uint32_t n = 0; n < n_most && manager->first_new < manager->end_new; n++, manager->first_new++) {
        uint32_t number = manager->new_pages[manager->first_new % manager->n_pages];
        if (!is_findable(manager, number) || manager->pages[number].is_temporary)
            continue;
        if (!block_manager_is_settled(manager, (int32_t)number) || !keep_copy(manager, number))
            return;
    }
}

void block_manager_store_ahead(struct block_manager *manager, uint32_t n_most)
{
    uint32_t n_wanted = manager->n_pages / 8, n_ready = manager->n_free - manager->n_cached + manager->n_clean;
    for (uint32_t n = 0, n_parts; n < n_most && n_ready < n_wanted; n += n_parts, n_ready += n_parts) {
        uint32_t oldest = manager->table.items[manager->cached].next;
        if (oldest == manager->cached || !block_manager_is_settled(manager, (int32_t)oldest) || !keep_copy(manager, oldest))
            return;
        n_parts = n_pages_of(manager, oldest);
        list_remove(&manager->table, oldest);
        list_push(&manager->table, manager->clean, oldest);
        manager->pages[oldest].is_clean = true;
        manager->n_clean += n_parts;
    }
}

/* Copies a findable page; an entry that is there already stays. */
static void store(struct block_manager *manager, uint32_t number)
{
    const struct keyed *item = &manager->table.items[number];
    uint32_t entry = host_tier_find(manager->tier, &item->key, item->group);
    if (entry)
        host_tier_touch(manager->tier, entry);
    else
        keep_copy(manager, number);
}

void block_manager_store_all(struct block_manager *manager)
{
    for (uint32_t number = 1; number < manager->n_pages; number++)
        if (is_findable(manager, number) && !is_unused(&manager->pages[number]))
            store(manager, number);
    const uint32_t heads[] = {manager->cached, manager->clean}; /* the most recent first, and so beginnings before ends */
    for (uint32_t i = 0; i < 2; i++)
        for (uint32_t at = manager->table.items[heads[i]].prev; at != heads[i]; at = manager->table.items[at].prev)
            store(manager, at);
}

void block_manager_store_key(struct block_manager *manager, const struct hash *key, uint32_t group)
{
    int32_t page = block_manager_find(manager, key, group);
    if (page)
        store(manager, (uint32_t)page);
}

int32_t block_manager_look(struct block_manager *manager, const struct hash *key, uint32_t group)
{
    int32_t page = block_manager_find(manager, key, group);
    if (page || !manager->tier || !host_tier_may_load(manager->tier))
        return page;
    return -(int32_t)host_tier_find(manager->tier, key, group);
}

/* ---- taking pages ---- */

/* Withdraws the free snapshot with the key of an evicted block: a snapshot is useless without the block that ends there. */
static void evict_state_of(struct block_manager *manager, const struct hash *key, uint32_t group)
{
    int32_t bundle = block_manager_find(manager, key, BUNDLE_GROUP);
    if (!bundle || !is_unused(&manager->pages[bundle]) || block_manager_find(manager, key, group))
        return;
    if (manager->tier)
        keep_copy(manager, (uint32_t)bundle);
    block_manager_withdraw(manager, bundle);
}

/* Takes a page that may have moves in flight. */
static uint32_t page_take(struct block_manager *manager)
{
    const uint32_t heads[] = {manager->blank, manager->clean, manager->cached};
    uint32_t which = 0;
    while (list_is_empty(&manager->table, heads[which]))
        which++;
    uint32_t number = manager->table.items[heads[which]].next;
    struct page *page = &manager->pages[number];
    const struct keyed *item = &manager->table.items[number];
    bool was_findable = is_findable(manager, number);
    if (was_findable && manager->tier)
        keep_copy(manager, number);
    manager->n_evictions += was_findable;
    manager->n_cached -= was_findable ? n_pages_of(manager, number) : 0;
    free_remove(manager, number);
    key_drop(manager, number);
    if (page->kind == PAGE_FIRST)
        bundle_dissolve(manager, number);
    else if (was_findable && manager->bundle_pages)
        evict_state_of(manager, &item->key, item->group);
    manager->n_free--;
    page->refs = 1;
    return number;
}

int32_t block_manager_take(struct block_manager *manager)
{
    uint32_t number = page_take(manager);
    await(manager, number, MOVE_OUT);
    await(manager, number, MOVE_IN);
    return (int32_t)number;
}

/* Makes a bundle of pages that were taken one by one. */
static void bundle_join(struct block_manager *manager, const int32_t *pages)
{
    for (uint32_t i = 0; i < manager->bundle_pages; i++) {
        struct page *page = &manager->pages[pages[i]];
        page->kind = i ? PAGE_PART : PAGE_FIRST;
        page->refs = !i;
        if (i)
            manager->table.items[pages[i - 1]].next_part = (uint32_t)pages[i];
    }
}

void block_manager_take_bundle(struct block_manager *manager, int32_t *pages)
{
    for (uint32_t i = 0; i < manager->bundle_pages; i++)
        pages[i] = block_manager_take(manager);
    bundle_join(manager, pages);
}

void block_manager_take_to_fill(struct block_manager *manager, int32_t *pages, bool is_bundle)
{
    for (uint32_t i = 0; i < (is_bundle ? manager->bundle_pages : 1); i++)
        pages[i] = (int32_t)page_take(manager);
    if (is_bundle)
        bundle_join(manager, pages);
}

void block_manager_publish_filled(struct block_manager *manager, int32_t page, const struct hash *key, uint32_t group)
{
    block_manager_publish(manager, page, key, group);
    manager->pages[page].step--;
}

void block_manager_load(struct block_manager *manager, uint32_t entry, const struct hash *key, uint32_t group, int32_t *pages)
{
    host_tier_touch(manager->tier, entry); /* taking pages may store others in place of the oldest entry */
    block_manager_take_to_fill(manager, pages, group == BUNDLE_GROUP);
    block_manager_publish_filled(manager, pages[0], key, group);
    host_tier_load(manager->tier, entry, pages);
}

void block_manager_list_bundle(const struct block_manager *manager, int32_t bundle, int32_t *pages)
{
    uint32_t n = 0;
    for (uint32_t at = (uint32_t)bundle; at; at = manager->table.items[at].next_part)
        pages[n++] = (int32_t)at;
}

bool block_manager_is_bundle(const struct block_manager *manager, const int32_t *pages)
{
    const struct page *first = &manager->pages[pages[0]];
    uint32_t at = first->kind == PAGE_FIRST ? manager->table.items[pages[0]].next_part : 0;
    for (uint32_t i = 1; i < manager->bundle_pages; at = manager->table.items[at].next_part, i++)
        if (!at || pages[i] != (int32_t)at)
            return false;
    return first->kind == PAGE_FIRST && !at;
}

void block_manager_share(struct block_manager *manager, int32_t number)
{
    struct page *page = &manager->pages[number];
    if (is_unused(page)) {
        uint32_t n = n_pages_of(manager, (uint32_t)number);
        free_remove(manager, (uint32_t)number);
        manager->n_free -= n;
        manager->n_cached -= is_findable(manager, (uint32_t)number) ? n : 0;
    }
    page->refs++;
    await(manager, (uint32_t)number, MOVE_OUT); /* the page may be withdrawn and written */
}

static void free_if_unused(struct block_manager *manager, uint32_t number)
{
    struct page *page = &manager->pages[number];
    if (!is_unused(page) || page->kind == PAGE_PART)
        return;
    if (!is_findable(manager, number))
        key_drop(manager, number);
    manager->n_free += n_pages_of(manager, number);
    if (manager->table.items[number].has_key) {
        list_push(&manager->table, manager->cached, number);
        manager->n_cached += n_pages_of(manager, number);
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
    uint32_t n = n_pages_of(manager, (uint32_t)number);
    bool is_cached = is_unused(&manager->pages[number]) && is_findable(manager, (uint32_t)number);
    if (is_cached)
        free_remove(manager, (uint32_t)number);
    key_drop(manager, (uint32_t)number);
    if (!is_cached)
        return;
    manager->n_cached -= n;
    manager->n_free -= n;
    free_if_unused(manager, (uint32_t)number);
}

void block_manager_touch(struct block_manager *manager, int32_t number)
{
    if (!is_unused(&manager->pages[number]) || !is_findable(manager, (uint32_t)number))
        return;
    free_remove(manager, (uint32_t)number);
    list_push(&manager->table, manager->cached, (uint32_t)number);
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
    return manager->pages[page].refs == 1 && !is_findable(manager, (uint32_t)page);
}

bool block_manager_is_shared(const struct block_manager *manager, int32_t page)
{
    return manager->pages[page].refs > 1;
}

/* ---- invariants ---- */

/* Counts a free list. Returns n_pages + 1 if its links are broken, or if it has a used page or a page of another list. */
static uint32_t list_count(const struct block_manager *manager, uint32_t head)
{
    const struct keyed *items = manager->table.items;
    uint32_t n = 0;
    for (uint32_t at = items[head].next; at != head; n += n_pages_of(manager, at), at = items[at].next) {
        const struct page *page = &manager->pages[at];
        bool belongs = is_findable(manager, at) == (head != manager->blank);
        belongs &= head == manager->blank || page->is_clean == (head == manager->clean);
        belongs &= is_unused(page) && page->kind != PAGE_PART;
        if (n > manager->n_pages || at == 0 || items[items[at].next].prev != at || !belongs)
            return manager->n_pages + 1;
    }
    return n;
}

static enum rc check_keys(const struct block_manager *manager, struct err *err)
{
    const struct keyed *items = manager->table.items;
    uint32_t n_chained = 0, n_keys = 0, n_bundles = 0;
    for (uint32_t b = 0; b <= manager->table.mask; b++) {
        uint32_t prev = 0;
        for (uint32_t at = manager->table.buckets[b]; at; prev = at, at = items[at].chain_next) {
            bool fits = items[at].has_key && items[at].chain_prev == prev &&
                        key_table_bucket(&manager->table, &items[at].key, items[at].group) == &manager->table.buckets[b];
            if (!fits || n_chained++ > manager->n_pages)
                return err_set(err, RC_INTERNAL, "invariant 3: key table and page %u disagree", at);
        }
    }
    for (uint32_t i = 0; i < manager->n_pages; i++) {
        n_keys += items[i].has_key;
        n_bundles += manager->pages[i].kind == PAGE_FIRST && is_findable(manager, i);
    }
    if (n_chained != n_keys || n_keys != manager->n_keys || n_bundles != manager->n_bundles)
        return err_set(err, RC_INTERNAL, "invariant 3: %u keys in the table, %u on pages, %u counted; of states %u, %u counted",
                       n_chained, n_keys, manager->n_keys, n_bundles, manager->n_bundles);
    return RC_OK;
}

/* Checks that every bundle is whole and that every part belongs to exactly one bundle. */
static enum rc check_bundles(const struct block_manager *manager, struct err *err)
{
    const struct keyed *items = manager->table.items;
    uint32_t n_parts = 0, n_reached = 0;
    for (uint32_t i = 0; i < manager->n_pages; i++) {
        const struct page *page = &manager->pages[i];
        uint32_t n = 1;
        n_parts += page->kind == PAGE_PART;
        if (page->kind != PAGE_FIRST)
            continue;
        for (uint32_t at = items[i].next_part; at && n <= manager->bundle_pages; at = items[at].next_part, n++)
            if (manager->pages[at].kind != PAGE_PART || manager->pages[at].refs || items[at].has_key)
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
    uint32_t n_blank = list_count(manager, manager->blank), n_clean = list_count(manager, manager->clean),
             n_cached = list_count(manager, manager->cached), n_used = 0;
    if (n_blank > manager->n_pages || n_clean > manager->n_pages || n_cached > manager->n_pages)
        return err_set(err, RC_INTERNAL, "invariant 2: a free list is torn or holds a page that does not belong there");
    for (uint32_t i = 0; i < manager->n_pages; i++) {
        const struct page *page = &manager->pages[i];
        n_used += is_unused(page) || page->kind == PAGE_PART ? 0 : n_pages_of(manager, i);
        if (page->refs != refs[i] || page->holds != holds[i])
            return err_set(err, RC_INTERNAL, "invariant 2: page %u counts %u references and %u copies, tables have %u and %u",
                           i, page->refs, page->holds, refs[i], holds[i]);
    }
    if (n_clean != manager->n_clean)
        return err_set(err, RC_INTERNAL, "invariant 1: %u copied pages on the list, %u counted", n_clean, manager->n_clean);
    n_cached += n_clean;
    if (n_cached != manager->n_cached || n_blank + n_cached != manager->n_free ||
        manager->n_free + n_used + 1 != manager->n_pages)
        return err_set(err, RC_INTERNAL, "invariant 1: %u + %u on the lists, %u counted free, %u used of %u pages", n_blank,
                       n_cached, manager->n_free, n_used, manager->n_pages);
    enum rc rc = check_bundles(manager, err);
    return rc ? rc : check_keys(manager, err);
}
