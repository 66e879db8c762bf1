#include "host_tier.h"

#include "../base/mem.h"

#include <string.h>

enum slot_state { SLOT_FREE, SLOT_ENTRY, SLOT_PART, SLOT_SWAPPED };

struct slot {
    struct hash key;
    uint32_t prev, next;             /* free list, or list of entries */
    uint32_t chain_prev, chain_next; /* entries in the same bucket; 0 ends */
    uint32_t next_part;              /* next slot of the same entry; 0 ends */
    uint64_t touched;                /* number of the flush that last used the slot */
    uint64_t moves[2];               /* numbers of its last moves, by way */
    uint16_t group;
    uint8_t state;
    bool has_key;
};

struct host_tier {
    struct slot *slots;      /* [n_slots + 3]: slot 0 is none; the last two are the heads of the lists */
    uint32_t *buckets;       /* [mask + 1] */
    uint64_t (*pages)[2];    /* [n_pages] numbers of the last moves, by way */
    struct page_move *moves[2]; /* [n_slots], [n_pages] of this flush */
    uint32_t n_moves[2];
    uint64_t after[2], flush;
    uint32_t n_slots, n_pages, bundle_pages, mask, n_free, n_swapped, n_findable;
    uint32_t free, used;     /* heads: free slots, those used by this flush last; entries, the least recently used first */
};

static void list_insert(struct slot *slots, uint32_t before, uint32_t behind, uint32_t slot)
{
    slots[slot].prev = before;
    slots[slot].next = behind;
    slots[before].next = slots[behind].prev = slot;
}

static void list_push(struct slot *slots, uint32_t head, uint32_t slot)
{
    list_insert(slots, slots[head].prev, head, slot);
}

static void list_remove(struct slot *slots, uint32_t slot)
{
    slots[slots[slot].prev].next = slots[slot].next;
    slots[slots[slot].next].prev = slots[slot].prev;
}

enum rc host_tier_create(uint32_t n_slots, uint32_t n_pages, uint32_t bundle_pages, struct host_tier **result, struct err *err)
{
    uint32_t n_buckets = 64;
    while (n_buckets < n_slots)
        n_buckets *= 2;
    struct host_tier *tier = *result = mem_calloc(1, sizeof *tier);
    if (!tier)
        return err_set(err, RC_MEMORY, "host cache: out of memory");
    tier->slots = mem_calloc((size_t)n_slots + 3, sizeof *tier->slots);
    tier->buckets = mem_calloc(n_buckets, sizeof *tier->buckets);
    tier->pages = mem_calloc(n_pages, sizeof *tier->pages);
    tier->moves[MOVE_OUT] = mem_calloc(n_slots, sizeof(struct page_move));
    tier->moves[MOVE_IN] = mem_calloc(n_pages, sizeof(struct page_move));
    if (!tier->slots || !tier->buckets || !tier->pages || !tier->moves[MOVE_OUT] || !tier->moves[MOVE_IN]) {
        host_tier_destroy(tier);
        *result = NULL;
        return err_set(err, RC_MEMORY, "host cache: out of memory for %u slots; lower host_cache_bytes", n_slots);
    }
    tier->n_slots = tier->n_free = n_slots;
    tier->n_pages = n_pages;
    tier->bundle_pages = bundle_pages;
    tier->mask = n_buckets - 1;
    tier->flush = 1;
    tier->free = n_slots + 1;
    tier->used = n_slots + 2;
    for (uint32_t head = tier->free; head <= tier->used; head++)
        tier->slots[head].prev = tier->slots[head].next = head;
    for (uint32_t slot = 1; slot <= n_slots; slot++)
        list_push(tier->slots, tier->free, slot);
    return RC_OK;
}

void host_tier_destroy(struct host_tier *tier)
{
    if (!tier)
        return;
    mem_free(tier->slots);
    mem_free(tier->buckets);
    mem_free(tier->pages);
    mem_free(tier->moves[MOVE_OUT]);
    mem_free(tier->moves[MOVE_IN]);
    mem_free(tier);
}

/* ---- keys ---- */

static uint32_t *bucket_of(const struct host_tier *tier, const struct hash *key, uint32_t group)
{
    return &tier->buckets[(key->lo ^ group * 0x9e3779b97f4a7c15u) & tier->mask];
}

static void key_drop(struct host_tier *tier, uint32_t number)
{
    struct slot *slots = tier->slots, *slot = &slots[number];
    if (!slot->has_key)
        return;
    if (slot->chain_prev)
        slots[slot->chain_prev].chain_next = slot->chain_next;
    else
        *bucket_of(tier, &slot->key, slot->group) = slot->chain_next;
    if (slot->chain_next)
        slots[slot->chain_next].chain_prev = slot->chain_prev;
    slot->has_key = false;
}

static void key_add(struct host_tier *tier, uint32_t number, const struct hash *key, uint32_t group)
{
    struct slot *slot = &tier->slots[number];
    uint32_t *bucket = bucket_of(tier, key, group);
    slot->key = *key;
    slot->group = (uint16_t)group;
    slot->has_key = true;
    slot->chain_prev = 0;
    slot->chain_next = *bucket;
    if (*bucket)
        tier->slots[*bucket].chain_prev = number;
    *bucket = number;
}

uint32_t host_tier_find(struct host_tier *tier, const struct hash *key, uint32_t group)
{
    for (uint32_t number = *bucket_of(tier, key, group); number; number = tier->slots[number].chain_next) {
        const struct slot *slot = &tier->slots[number];
        if (slot->group == group && hash_equal(&slot->key, key))
            return number;
    }
    return 0;
}

/* ---- slots ---- */

/* Frees the slots of an entry. Those that this flush uses go behind all others. */
static void entry_free(struct host_tier *tier, uint32_t number)
{
    struct slot *slots = tier->slots;
    key_drop(tier, number);
    list_remove(slots, number);
    for (uint32_t at = number, next; at; at = next) {
        next = slots[at].next_part;
        slots[at].state = SLOT_FREE;
        slots[at].next_part = 0;
        if (slots[at].touched == tier->flush)
            list_push(slots, tier->free, at);
        else
            list_insert(slots, tier->free, slots[tier->free].next, at);
        tier->n_free++;
        tier->n_findable--;
    }
}

/* Takes a slot that this flush has not used; 0: there is none. */
static uint32_t slot_take(struct host_tier *tier)
{
    struct slot *slots = tier->slots;
    uint32_t number = slots[tier->free].next, oldest = slots[tier->used].next;
    if (number == tier->free || slots[number].touched == tier->flush) {
        if (oldest == tier->used || slots[oldest].touched == tier->flush)
            return 0;
        entry_free(tier, oldest);
        number = slots[tier->free].next;
    }
    list_remove(slots, number);
    tier->n_free--;
    return number;
}

static void slot_free(struct host_tier *tier, uint32_t number)
{
    struct slot *slots = tier->slots;
    slots[number].state = SLOT_FREE;
    if (slots[number].touched == tier->flush)
        list_push(slots, tier->free, number);
    else
        list_insert(slots, tier->free, slots[tier->free].next, number);
    tier->n_free++;
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
    struct slot *slots = tier->slots;
    uint32_t first = 0, last = 0, n_taken = 0;
    if (host_tier_find(tier, key, group))
        return false;
    for (uint32_t number; n_taken < n && (number = slot_take(tier)); last = number, n_taken++) {
        slots[number].next_part = 0;
        if (last)
            slots[last].next_part = number;
        else
            first = number;
    }
    if (n_taken < n) {
        for (uint32_t at = first, next; at; at = next) {
            next = slots[at].next_part;
            slots[at].next_part = 0;
            slot_free(tier, at);
        }
        return false;
    }
    for (uint32_t at = first, i = 0; at; at = slots[at].next_part, i++) {
        slots[at].state = i ? SLOT_PART : SLOT_ENTRY;
        move_add(tier, MOVE_OUT, pages[i], at);
    }
    tier->n_findable += n;
    key_add(tier, first, key, group);
    list_push(slots, tier->used, first);
    return true;
}

void host_tier_touch(struct host_tier *tier, uint32_t entry)
{
    for (uint32_t at = entry; at; at = tier->slots[at].next_part)
        tier->slots[at].touched = tier->flush;
    list_remove(tier->slots, entry);
    list_push(tier->slots, tier->used, entry);
}

void host_tier_load(struct host_tier *tier, uint32_t entry, const int32_t *pages)
{
    uint32_t i = 0;
    host_tier_touch(tier, entry);
    for (uint32_t at = entry; at; at = tier->slots[at].next_part)
        move_add(tier, MOVE_IN, pages[i++], at);
}

void host_tier_reset(struct host_tier *tier)
{
    while (tier->slots[tier->used].next != tier->used)
        entry_free(tier, tier->slots[tier->used].next);
}

/* ---- swapped slots ---- */

uint32_t host_tier_swap_out(struct host_tier *tier, int32_t page)
{
    uint32_t number = slot_take(tier);
    if (!number)
        return 0;
    tier->slots[number].state = SLOT_SWAPPED;
    tier->n_swapped++;
    move_add(tier, MOVE_OUT, page, number);
    return number;
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

void host_tier_flush(struct host_tier *tier, struct move_list *lists)
{
    for (uint32_t way = MOVE_OUT; way <= MOVE_IN; way++) {
        lists[way] = (struct move_list){tier->moves[way], tier->n_moves[way], way, tier->flush, tier->after[way]};
        tier->n_moves[way] = 0;
        tier->after[way] = 0;
    }
    tier->flush++;
}

void host_tier_page_moves(const struct host_tier *tier, int32_t page, uint64_t *numbers)
{
    memcpy(numbers, tier->pages[page], sizeof tier->pages[page]);
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
    const struct slot *slots = tier->slots;
    bool is_used_now = false, is_free = head == tier->free;
    *n = 0;
    for (uint32_t at = slots[head].next; at != head; at = slots[at].next) {
        uint32_t n_parts = 0;
        for (uint32_t part = at; part && n_parts <= tier->n_slots; part = slots[part].next_part, n_parts++)
            if (slots[part].state != (is_free ? SLOT_FREE : part == at ? SLOT_ENTRY : SLOT_PART))
                return err_set(err, RC_INTERNAL, "invariant 20: slot %u has state %u on the wrong list", part,
                               slots[part].state);
        if (slots[slots[at].next].prev != at || (*n += n_parts) > tier->n_slots || (is_free && n_parts != 1))
            return err_set(err, RC_INTERNAL, "invariant 20: the list of slot %u is torn", at);
        if (is_used_now && slots[at].touched != tier->flush)
            return err_set(err, RC_INTERNAL, "invariant 20: slot %u stands behind one that this flush uses", at);
        is_used_now = slots[at].touched == tier->flush;
        if (!is_free && !slots[at].has_key)
            return err_set(err, RC_INTERNAL, "invariant 20: entry %u cannot be found", at);
    }
    return RC_OK;
}

enum rc host_tier_check(const struct host_tier *tier, struct err *err)
{
    uint32_t n_free = 0, n_findable = 0, n_swapped = 0, n_keys = 0, n_entries = 0;
    enum rc rc = check_list(tier, tier->free, &n_free, err);
    if (!rc)
        rc = check_list(tier, tier->used, &n_findable, err);
    if (rc)
        return rc;
    for (uint32_t i = 1; i <= tier->n_slots; i++) {
        n_swapped += tier->slots[i].state == SLOT_SWAPPED;
        n_entries += tier->slots[i].state == SLOT_ENTRY;
        if (tier->slots[i].has_key && tier->slots[i].state != SLOT_ENTRY)
            return err_set(err, RC_INTERNAL, "invariant 20: slot %u has a key and state %u", i, tier->slots[i].state);
    }
    for (uint32_t b = 0; b <= tier->mask; b++)
        for (uint32_t at = tier->buckets[b]; at && n_keys <= tier->n_slots; at = tier->slots[at].chain_next)
            n_keys++;
    if (n_keys != n_entries)
        return err_set(err, RC_INTERNAL, "invariant 20: %u keys, %u entries", n_keys, n_entries);
    if (n_free != tier->n_free || n_findable != tier->n_findable || n_swapped != tier->n_swapped ||
        n_free + n_findable + n_swapped != tier->n_slots)
        return err_set(err, RC_INTERNAL, "invariant 20: %u free, %u findable, %u swapped of %u slots; counted %u, %u, %u",
                       n_free, n_findable, n_swapped, tier->n_slots, tier->n_free, tier->n_findable, tier->n_swapped);
    return RC_OK;
}
