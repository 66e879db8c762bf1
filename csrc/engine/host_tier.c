#include "host_tier.h"

#include "../base/mem.h"
#include "key_table.h"

enum slot_state { SLOT_FREE, SLOT_ENTRY, SLOT_PART, SLOT_SWAPPED };

struct slot {
    uint64_t touched;           /* number of the flush that last used the slot */
    uint64_t moves[2];          /* numbers of its last moves, by way */
    uint8_t state;              /* enum slot_state */
};

struct host_tier {
    struct key_table table;     /* its items are the slots; slot 0 is none */
    struct slot *slots;         /* [n_slots + 1] */
    uint64_t (*pages)[2];       /* [n_pages] numbers of the last moves, by way */
    struct page_move *moves[2]; /* [n_slots], [2 * n_pages] of this flush */
    uint32_t n_moves[2];
    uint64_t after[2], awaited[2], flush;
    uint32_t n_slots, n_pages, bundle_pages, n_free, n_swapped, n_findable;
    uint32_t free, used;        /* lists: free slots, those used by this flush last; entries, the least recently used first */
};

enum rc host_tier_create(uint32_t n_slots, uint32_t n_pages, uint32_t bundle_pages, struct host_tier **result, struct err *err)
{
    struct host_tier *tier = *result = mem_calloc(1, sizeof *tier);
    if (!tier)
        return err_set(err, RC_MEMORY, "host cache: out of memory");
    tier->slots = mem_calloc((size_t)n_slots + 1, sizeof *tier->slots);
    tier->pages = mem_calloc(n_pages, sizeof *tier->pages);
    tier->moves[MOVE_OUT] = mem_calloc(n_slots, sizeof(struct page_move));
    tier->moves[MOVE_IN] = mem_calloc((size_t)2 * n_pages, sizeof(struct page_move));
    if (!tier->slots || !tier->pages || !tier->moves[MOVE_OUT] || !tier->moves[MOVE_IN] ||
        key_table_create(&tier->table, n_slots + 1, 2, err)) {
        host_tier_destroy(tier);
        *result = NULL;
        return err_set(err, RC_MEMORY, "host cache: out of memory for %u slots; lower host_cache_bytes", n_slots);
    }
    tier->n_slots = tier->n_free = n_slots;
    tier->n_pages = n_pages;
    tier->bundle_pages = bundle_pages;
    tier->flush = 1;
    tier->free = n_slots + 1;
    tier->used = n_slots + 2;
    for (uint32_t slot = 1; slot <= n_slots; slot++)
        list_push(&tier->table, tier->free, slot);
    return RC_OK;
}

void host_tier_destroy(struct host_tier *tier)
{
    if (!tier)
        return;
    key_table_destroy(&tier->table);
    mem_free(tier->slots);
    mem_free(tier->pages);
    mem_free(tier->moves[MOVE_OUT]);
    mem_free(tier->moves[MOVE_IN]);
    mem_free(tier);
}

uint32_t host_tier_find(struct host_tier *tier, const struct hash *key, uint32_t group)
{
    return key_table_match(&tier->table, *key_table_bucket(&tier->table, key, group), key, group);
}

/* ---- slots ---- */

/* Puts a slot on the free list: behind all others if this flush uses it, else before them. */
static void slot_free(struct host_tier *tier, uint32_t number)
{
    tier->slots[number].state = SLOT_FREE;
    tier->table.items[number].next_part = 0;
    if (tier->slots[number].touched == tier->flush)
        list_push(&tier->table, tier->free, number);
    else
        list_push_first(&tier->table, tier->free, number);
    tier->n_free++;
}

/* Frees the slots of a chain. */
static void chain_free(struct host_tier *tier, uint32_t first)
{
    for (uint32_t at = first, next; at; at = next) {
        next = tier->table.items[at].next_part;
        slot_free(tier, at);
    }
}

static void entry_free(struct host_tier *tier, uint32_t number)
{
    uint32_t n_before = tier->n_free;
    key_table_drop(&tier->table, number);
    list_remove(&tier->table, number);
    chain_free(tier, number);
    tier->n_findable -= tier->n_free - n_before;
}

/* Takes a slot that this flush has not used; 0: there is none. */
static uint32_t slot_take(struct host_tier *tier)
{
    const struct keyed *items = tier->table.items;
    uint32_t number = items[tier->free].next, oldest = items[tier->used].next;
    if (number == tier->free || tier->slots[number].touched == tier->flush) {
        if (oldest == tier->used || tier->slots[oldest].touched == tier->flush)
            return 0;
        entry_free(tier, oldest);
        number = items[tier->free].next;
    }
    list_remove(&tier->table, number);
    tier->n_free--;
    return number;
}

static void later(uint64_t *number, uint64_t other)
{
    *number = *number > other ? *number : other;
}

static void move_add(struct host_tier *tier, enum move_way way, int32_t page, uint32_t number)
{
    struct slot *slot = &tier->slots[number];
    later(&tier->after[way], slot->moves[!way]);
    later(&tier->after[way], tier->pages[page][!way]);
    slot->moves[way] = tier->pages[page][way] = slot->touched = tier->flush;
    tier->moves[way][tier->n_moves[way]++] = (struct page_move){page, number - 1};
}

/* ---- entries ---- */

bool host_tier_store(struct host_tier *tier, const struct hash *key, uint32_t group, const int32_t *pages, uint32_t n)
{
    struct keyed *items = tier->table.items;
    uint32_t first = 0, last = 0, n_taken = 0;
    if (host_tier_find(tier, key, group))
        return false;
    for (uint32_t number; n_taken < n && (number = slot_take(tier)); last = number, n_taken++) {
        if (last)
            items[last].next_part = number;
        else
            first = number;
    }
    if (n_taken < n) {
        chain_free(tier, first);
        return false;
    }
    for (uint32_t at = first, i = 0; at; at = items[at].next_part, i++) {
        tier->slots[at].state = i ? SLOT_PART : SLOT_ENTRY;
        move_add(tier, MOVE_OUT, pages[i], at);
    }
    tier->n_findable += n;
    key_table_add(&tier->table, first, key, group);
    list_push(&tier->table, tier->used, first);
    return true;
}

void host_tier_touch(struct host_tier *tier, uint32_t entry)
{
    for (uint32_t at = entry; at; at = tier->table.items[at].next_part)
        tier->slots[at].touched = tier->flush;
    list_remove(&tier->table, entry);
    list_push(&tier->table, tier->used, entry);
}

bool host_tier_may_load(const struct host_tier *tier)
{
    return tier->n_moves[MOVE_IN] < tier->n_pages;
}

void host_tier_load(struct host_tier *tier, uint32_t entry, const int32_t *pages)
{
    uint32_t i = 0;
    host_tier_touch(tier, entry);
    for (uint32_t at = entry; at; at = tier->table.items[at].next_part)
        move_add(tier, MOVE_IN, pages[i++], at);
}

void host_tier_reset(struct host_tier *tier)
{
    while (!list_is_empty(&tier->table, tier->used))
        entry_free(tier, tier->table.items[tier->used].next);
}

/* ---- swapped slots ---- */

uint32_t host_tier_swap_out(struct host_tier *tier, int32_t page, uint32_t last)
{
    uint32_t number = slot_take(tier);
    if (!number)
        return 0;
    tier->slots[number].state = SLOT_SWAPPED;
    tier->n_swapped++;
    if (last)
        tier->table.items[last].next_part = number;
    move_add(tier, MOVE_OUT, page, number);
    return number;
}

uint32_t host_tier_next(const struct host_tier *tier, uint32_t slot)
{
    return tier->table.items[slot].next_part;
}

void host_tier_drop(struct host_tier *tier, uint32_t slot)
{
    tier->n_swapped--;
    slot_free(tier, slot);
}

void host_tier_swap_in(struct host_tier *tier, uint32_t slot, int32_t page)
{
    move_add(tier, MOVE_IN, page, slot);
    host_tier_drop(tier, slot);
}

/* ---- flushes ---- */

bool host_tier_is_coming(const struct host_tier *tier, int32_t page)
{
    return tier->pages[page][MOVE_IN] == tier->flush;
}

uint64_t host_tier_last_move(const struct host_tier *tier, int32_t page, enum move_way way)
{
    return tier->pages[page][way];
}

void host_tier_await_number(struct host_tier *tier, uint64_t number, enum move_way way)
{
    later(&tier->awaited[way], number);
}

void host_tier_await(struct host_tier *tier, int32_t page, enum move_way way)
{
    later(&tier->awaited[way], tier->pages[page][way]);
}

bool host_tier_flush(struct host_tier *tier, struct move_args *args)
{
    bool has_work = false;
    for (uint32_t way = MOVE_OUT; way <= MOVE_IN; way++) {
        args->lists[way] = (struct move_list){tier->moves[way], tier->n_moves[way], tier->flush, tier->after[way]};
        args->awaited[way] = tier->awaited[way];
        has_work |= tier->n_moves[way] || tier->awaited[way];
        tier->n_moves[way] = 0;
        tier->after[way] = tier->awaited[way] = 0;
    }
    tier->flush++;
    return has_work;
}

uint32_t host_tier_n_free(const struct host_tier *tier)
{
    return tier->n_free;
}

uint32_t host_tier_n_swapped(const struct host_tier *tier)
{
    return tier->n_swapped;
}

uint32_t host_tier_n_findable(const struct host_tier *tier)
{
    return tier->n_findable;
}

/* ---- invariants ---- */

static enum rc check_list(const struct host_tier *tier, uint32_t head, uint32_t *n, struct err *err)
{
    const struct keyed *items = tier->table.items;
    bool is_used_now = false, is_free = head == tier->free;
    *n = 0;
    for (uint32_t at = items[head].next; at != head; at = items[at].next) {
        uint32_t n_parts = 0;
        for (uint32_t part = at; part && n_parts <= tier->n_slots; part = items[part].next_part, n_parts++)
            if (tier->slots[part].state != (is_free ? SLOT_FREE : part == at ? SLOT_ENTRY : SLOT_PART))
                return err_set(err, RC_INTERNAL, "invariant 20: slot %u has state %u on the wrong list", part,
                               tier->slots[part].state);
        if (items[items[at].next].prev != at || (*n += n_parts) > tier->n_slots || (is_free && n_parts != 1))
            return err_set(err, RC_INTERNAL, "invariant 20: the list of slot %u is torn", at);
        if (is_used_now && tier->slots[at].touched != tier->flush)
            return err_set(err, RC_INTERNAL, "invariant 20: slot %u stands behind one that this flush uses", at);
        is_used_now = tier->slots[at].touched == tier->flush;
        if (!is_free && !items[at].has_key)
            return err_set(err, RC_INTERNAL, "invariant 20: entry %u cannot be found", at);
    }
    return RC_OK;
}

enum rc host_tier_check(const struct host_tier *tier, struct err *err)
{
    const struct keyed *items = tier->table.items;
    uint32_t n_free = 0, n_findable = 0, n_swapped = 0, n_keys = 0, n_entries = 0;
    enum rc rc = check_list(tier, tier->free, &n_free, err);
    if (!rc)
        rc = check_list(tier, tier->used, &n_findable, err);
    if (rc)
        return rc;
    for (uint32_t i = 1; i <= tier->n_slots; i++) {
        n_swapped += tier->slots[i].state == SLOT_SWAPPED;
        n_entries += tier->slots[i].state == SLOT_ENTRY;
        if (items[i].has_key && tier->slots[i].state != SLOT_ENTRY)
            return err_set(err, RC_INTERNAL, "invariant 20: slot %u has a key and state %u", i, tier->slots[i].state);
    }
    for (uint32_t b = 0; b <= tier->table.mask; b++)
        for (uint32_t at = tier->table.buckets[b]; at && n_keys <= tier->n_slots; at = items[at].chain_next)
            n_keys++;
    if (n_keys != n_entries)
        return err_set(err, RC_INTERNAL, "invariant 20: %u keys, %u entries", n_keys, n_entries);
    if (n_free != tier->n_free || n_findable != tier->n_findable || n_swapped != tier->n_swapped ||
        n_free + n_findable + n_swapped != tier->n_slots)
        return err_set(err, RC_INTERNAL, "invariant 20: %u free, %u findable, %u swapped of %u slots; counted %u, %u, %u",
                       n_free, n_findable, n_swapped, tier->n_slots, tier->n_free, tier->n_findable, tier->n_swapped);
    return RC_OK;
}
