#include "host_tier.h"

#include "../base/mem.h"
#include "key_table.h"

/* A coming entry has a key that host_tier_find does not give. The entry in SLOT_GONE was reset while it was pinned. */
enum slot_state { SLOT_FREE, SLOT_ENTRY, SLOT_PART, SLOT_SWAPPED, SLOT_COMING, SLOT_GONE };

struct slot {
    uint64_t touched;           /* number of the flush that last used the slot */
    uint64_t moves[2];          /* numbers of its last moves, by way */
    uint64_t load;              /* of a coming entry: number of its load */
    uint8_t state;              /* enum slot_state */
    /* Of an entry: the outer tier has it, or has refused it; it stands on the list `leaving`; on the list `pinned`. */
    bool is_saved, is_leaving, is_pinned;
};

struct host_tier {
    struct key_table table;     /* its items are the slots; slot 0 is none */
    struct slot *slots;         /* [n_slots + 1] */
    uint64_t (*pages)[2];       /* [n_pages] numbers of the last moves, by way */
    struct page_move *moves[2]; /* [n_slots], [2 * n_pages] of this flush */
    uint32_t n_moves[2];
    uint64_t after[2], awaited[2], flush;
    uint64_t n_ordered;         /* moves of all flushes so far */
    uint64_t last[2], ended[2]; /* numbers of the last moves, by way, and of those up to which all have ended */
    uint32_t n_slots, n_pages, bundle_pages, n_free, n_swapped, n_findable, n_coming;
    uint32_t n_leaving;         /* slots of the entries that leave */
    uint32_t free;              /* list of free slots, those used by this flush last */
    uint32_t leaving, used;     /* lists of entries, the least recently used first; those that leave are saved, and go first */
    uint32_t pinned;            /* list of entries that are pinned */
    uint32_t n_groups;
    struct kv_events *events;   /* NULL: nobody is told */
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
        key_table_create(&tier->table, n_slots + 1, 4, err)) {
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
    tier->leaving = n_slots + 3;
    tier->pinned = n_slots + 4;
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

void host_tier_tell(struct host_tier *tier, struct kv_events *events, uint32_t n_groups)
{
    tier->events = events;
    tier->n_groups = n_groups;
}

/* Notes that an entry can be found from now on, or no longer. */
static void note(struct host_tier *tier, uint32_t entry, enum kv_event_kind kind)
{
    const struct keyed *item = &tier->table.items[entry];
    if (tier->events && item->group < tier->n_groups)
        kv_events_note(tier->events, &(struct kv_event){.kind = kind, .hash = item->key.lo, .group = item->group}, NULL);
}

/* The entry, also if it is still coming. */
static uint32_t entry_of(const struct host_tier *tier, const struct hash *key, uint32_t group)
{
    return key_table_match(&tier->table, *key_table_bucket(&tier->table, key, group), key, group);
}

uint32_t host_tier_find(struct host_tier *tier, const struct hash *key, uint32_t group)
{
    uint32_t entry = entry_of(tier, key, group);
    return entry && tier->slots[entry].state == SLOT_ENTRY ? entry : 0;
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

static uint32_t n_slots_of(const struct host_tier *tier, uint32_t first)
{
    uint32_t n = 0;
    for (uint32_t at = first; at; at = tier->table.items[at].next_part)
        n++;
    return n;
}

/* Frees an entry that is not pinned. */
static void entry_free(struct host_tier *tier, uint32_t number)
{
    uint32_t n = n_slots_of(tier, number);
    note(tier, number, KV_HOST_REMOVED);
    key_table_drop(&tier->table, number);
    list_remove(&tier->table, number);
    chain_free(tier, number);
    tier->n_findable -= n;
    tier->n_leaving -= tier->slots[number].is_leaving ? n : 0;
    tier->slots[number].is_leaving = false;
}

/* Frees the oldest entry of a list; false if there is none, or if this flush uses it. */
static bool oldest_free(struct host_tier *tier, uint32_t head)
{
    uint32_t oldest = tier->table.items[head].next;
    if (oldest == head || tier->slots[oldest].touched == tier->flush)
        return false;
    entry_free(tier, oldest);
    return true;
}

/* Takes a slot that this flush has not used; 0: there is none. */
static uint32_t slot_take(struct host_tier *tier)
{
    const struct keyed *items = tier->table.items;
    uint32_t number = items[tier->free].next;
    if (number == tier->free || tier->slots[number].touched == tier->flush) {
        if (!oldest_free(tier, tier->leaving) && !oldest_free(tier, tier->used))
            return 0;
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
    slot->moves[way] = tier->pages[page][way] = slot->touched = tier->last[way] = tier->flush;
    tier->moves[way][tier->n_moves[way]++] = (struct page_move){page, number - 1};
}

/* ---- entries ---- */

/* Takes n slots for an entry, linked one behind the other; 0: there are not as many. */
static uint32_t chain_take(struct host_tier *tier, uint32_t n)
{
    struct keyed *items = tier->table.items;
    uint32_t first = 0, last = 0, n_taken = 0;
    for (uint32_t number; n_taken < n && (number = slot_take(tier)); last = number, n_taken++) {
        tier->slots[number].state = first ? SLOT_PART : SLOT_ENTRY;
        tier->slots[number].is_saved = false;
        if (last)
            items[last].next_part = number;
        else
            first = number;
    }
    if (n_taken == n)
        return first;
    chain_free(tier, first);
    return 0;
}

bool host_tier_store(struct host_tier *tier, const struct hash *key, uint32_t group, const int32_t *pages, uint32_t n)
{
    uint32_t first = entry_of(tier, key, group) ? 0 : chain_take(tier, n), i = 0;
    if (!first)
        return false;
    for (uint32_t at = first; at; at = tier->table.items[at].next_part)
        move_add(tier, MOVE_OUT, pages[i++], at);
    tier->n_findable += n;
    key_table_add(&tier->table, first, key, group);
    note(tier, first, KV_HOST_STORED);
    list_push(&tier->table, tier->used, first);
    return true;
}

void host_tier_touch(struct host_tier *tier, uint32_t entry)
{
    for (uint32_t at = entry; at; at = tier->table.items[at].next_part)
        tier->slots[at].touched = tier->flush;
    if (tier->slots[entry].is_pinned)
        return;
    tier->n_leaving -= tier->slots[entry].is_leaving ? n_slots_of(tier, entry) : 0;
    tier->slots[entry].is_leaving = false;
    list_remove(&tier->table, entry);
    list_push(&tier->table, tier->used, entry);
}

bool host_tier_has_loads(const struct host_tier *tier)
{
    return tier->n_moves[MOVE_IN] > 0;
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

void host_tier_receive(struct host_tier *tier, int32_t page, uint32_t source_page)
{
    later(&tier->after[MOVE_IN], tier->pages[page][MOVE_OUT]);
    tier->pages[page][MOVE_IN] = tier->last[MOVE_IN] = tier->flush;
    tier->moves[MOVE_IN][tier->n_moves[MOVE_IN]++] = (struct page_move){page, source_page};
}

void host_tier_reset(struct host_tier *tier)
{
    const uint32_t heads[] = {tier->used, tier->leaving};
    struct kv_events *events = tier->events; /* who resets the tier tells that everything is gone */
    tier->events = NULL;
    for (uint32_t i = 0; i < 2; i++)
        while (!list_is_empty(&tier->table, heads[i]))
            entry_free(tier, tier->table.items[heads[i]].next);
    for (uint32_t at = tier->table.items[tier->pinned].next; at != tier->pinned; at = tier->table.items[at].next) {
        if (tier->slots[at].state == SLOT_GONE)
            continue;
        uint32_t n = tier->slots[at].state == SLOT_ENTRY ? n_slots_of(tier, at) : 0;
        tier->n_findable -= n;
        tier->n_coming += n;
        tier->slots[at].state = SLOT_GONE;
        key_table_drop(&tier->table, at);
    }
    tier->events = events;
}

/* ---- the outer tier ---- */

void host_tier_note_ended(struct host_tier *tier, const uint64_t ended[2])
{
    for (uint32_t way = MOVE_OUT; way <= MOVE_IN; way++)
        later(&tier->ended[way], ended[way]);
}

bool host_tier_is_settled(const struct host_tier *tier)
{
    return tier->ended[MOVE_OUT] >= tier->last[MOVE_OUT] && tier->ended[MOVE_IN] >= tier->last[MOVE_IN];
}

/* True if all moves of one way that name the slots of an entry have ended. */
static bool has_ended(const struct host_tier *tier, uint32_t entry, enum move_way way)
{
    for (uint32_t at = entry; at; at = tier->table.items[at].next_part)
        if (tier->slots[at].moves[way] > tier->ended[way])
            return false;
    return true;
}

static void pin(struct host_tier *tier, uint32_t entry)
{
    tier->slots[entry].is_pinned = true;
    list_push(&tier->table, tier->pinned, entry);
}

/* Lets a saved entry leave, in the order in which it was used. */
static void leave(struct host_tier *tier, uint32_t entry)
{
    tier->slots[entry].is_leaving = true;
    tier->n_leaving += n_slots_of(tier, entry);
    list_push(&tier->table, tier->leaving, entry);
}

uint32_t host_tier_begin_save(struct host_tier *tier, bool all)
{
    for (;;) {
        uint32_t oldest = tier->table.items[tier->used].next;
        bool is_enough = !all && tier->n_free + tier->n_leaving >= (tier->n_slots + 7) / 8;
        if (is_enough || oldest == tier->used || tier->slots[oldest].touched == tier->flush ||
            !has_ended(tier, oldest, MOVE_OUT))
            return 0;
        list_remove(&tier->table, oldest);
        if (!tier->slots[oldest].is_saved) {
            pin(tier, oldest);
            return oldest;
        }
        leave(tier, oldest);
    }
}

bool host_tier_is_copied(const struct host_tier *tier, uint32_t entry)
{
    return has_ended(tier, entry, MOVE_OUT);
}

bool host_tier_begin_save_of(struct host_tier *tier, uint32_t entry)
{
    struct slot *slot = &tier->slots[entry];
    if (slot->is_pinned || !has_ended(tier, entry, MOVE_OUT))
        return false;
    tier->n_leaving -= slot->is_leaving ? n_slots_of(tier, entry) : 0;
    slot->is_leaving = false;
    list_remove(&tier->table, entry);
    pin(tier, entry);
    return true;
}

void host_tier_end_save(struct host_tier *tier, uint32_t entry)
{
    list_remove(&tier->table, entry);
    tier->slots[entry].is_pinned = false;
    if (tier->slots[entry].state == SLOT_GONE) {
        tier->n_coming -= n_slots_of(tier, entry);
        chain_free(tier, entry);
        return;
    }
    tier->slots[entry].is_saved = true;
    if (tier->slots[entry].touched == tier->flush)
        list_push(&tier->table, tier->used, entry);
    else
        leave(tier, entry);
}

uint32_t host_tier_begin_fill(struct host_tier *tier, const struct hash *key, uint32_t group, uint32_t n, uint64_t number)
{
    uint32_t first = entry_of(tier, key, group) ? 0 : chain_take(tier, n);
    if (!first)
        return 0;
    if (!has_ended(tier, first, MOVE_OUT) || !has_ended(tier, first, MOVE_IN)) {
        chain_free(tier, first);
        return 0;
    }
    tier->slots[first].state = SLOT_COMING;
    tier->slots[first].load = number;
    tier->n_coming += n;
    key_table_add(&tier->table, first, key, group);
    pin(tier, first);
    return first;
}

void host_tier_end_fill(struct host_tier *tier, uint32_t entry, bool is_good)
{
    uint32_t n = n_slots_of(tier, entry);
    list_remove(&tier->table, entry);
    tier->slots[entry].is_pinned = false;
    tier->n_coming -= n;
    if (is_good && tier->slots[entry].state == SLOT_COMING) {
        tier->slots[entry].state = SLOT_ENTRY;
        tier->slots[entry].is_saved = true;
        tier->n_findable += n;
        note(tier, entry, KV_HOST_STORED);
        for (uint32_t at = entry; at; at = tier->table.items[at].next_part)
            tier->slots[at].touched = tier->flush;
        list_push(&tier->table, tier->used, entry);
        return;
    }
    if (tier->slots[entry].state == SLOT_COMING)
        key_table_drop(&tier->table, entry);
    chain_free(tier, entry);
}

uint64_t host_tier_coming(struct host_tier *tier, const struct hash *key, uint32_t group)
{
    uint32_t entry = entry_of(tier, key, group);
    return entry && tier->slots[entry].state == SLOT_COMING ? tier->slots[entry].load : 0;
}

const struct hash *host_tier_key(const struct host_tier *tier, uint32_t entry, uint32_t *group)
{
    *group = tier->table.items[entry].group;
    return &tier->table.items[entry].key;
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
        tier->n_ordered += tier->n_moves[way];
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

uint32_t host_tier_n_coming(const struct host_tier *tier)
{
    return tier->n_coming;
}

uint64_t host_tier_last(const struct host_tier *tier, enum move_way way)
{
    return tier->last[way];
}

uint64_t host_tier_n_ordered(const struct host_tier *tier)
{
    return tier->n_ordered;
}

/* ---- invariants ---- */

/* The state of a list's items: of the list `pinned`, one that is like the first's. */
static bool belongs(const struct host_tier *tier, uint32_t head, uint32_t first, uint32_t part)
{
    uint8_t state = tier->slots[part].state;
    if (part != first)
        return state == SLOT_PART;
    if (head == tier->pinned)
        return tier->slots[part].is_pinned && (state == SLOT_ENTRY || state == SLOT_COMING || state == SLOT_GONE);
    return state == (head == tier->free ? SLOT_FREE : SLOT_ENTRY) && !tier->slots[part].is_pinned &&
           tier->slots[part].is_leaving == (head == tier->leaving);
}

static enum rc check_list(const struct host_tier *tier, uint32_t head, uint32_t *n, uint32_t *n_coming, struct err *err)
{
    const struct keyed *items = tier->table.items;
    bool is_used_now = false, is_free = head == tier->free;
    for (uint32_t at = items[head].next; at != head; at = items[at].next) {
        uint32_t n_parts = 0;
        for (uint32_t part = at; part && n_parts <= tier->n_slots; part = items[part].next_part, n_parts++)
            if (!belongs(tier, head, at, part))
                return err_set(err, RC_INTERNAL, "invariant 20: slot %u has state %u on the wrong list", part,
                               tier->slots[part].state);
        *(head == tier->pinned && tier->slots[at].state != SLOT_ENTRY ? n_coming : n) += n_parts;
        if (items[items[at].next].prev != at || *n + *n_coming > tier->n_slots || (is_free && n_parts != 1))
            return err_set(err, RC_INTERNAL, "invariant 20: the list of slot %u is torn", at);
        if (head != tier->pinned && is_used_now && tier->slots[at].touched != tier->flush)
            return err_set(err, RC_INTERNAL, "invariant 20: slot %u stands behind one that this flush uses", at);
        is_used_now = tier->slots[at].touched == tier->flush;
        if (!is_free && items[at].has_key == (tier->slots[at].state == SLOT_GONE))
            return err_set(err, RC_INTERNAL, "invariant 20: entry %u cannot be found", at);
    }
    return RC_OK;
}

enum rc host_tier_check(const struct host_tier *tier, struct err *err)
{
    const struct keyed *items = tier->table.items;
    uint32_t n_free = 0, n_leaving = 0, n_findable = 0, n_coming = 0, n_swapped = 0, n_keys = 0, n_entries = 0;
    enum rc rc = check_list(tier, tier->free, &n_free, &n_coming, err);
    if (!rc)
        rc = check_list(tier, tier->leaving, &n_leaving, &n_coming, err);
    n_findable = n_leaving;
    if (!rc)
        rc = check_list(tier, tier->used, &n_findable, &n_coming, err);
    if (!rc)
        rc = check_list(tier, tier->pinned, &n_findable, &n_coming, err);
    if (rc)
        return rc;
    for (uint32_t i = 1; i <= tier->n_slots; i++) {
        n_swapped += tier->slots[i].state == SLOT_SWAPPED;
        bool has_key = tier->slots[i].state == SLOT_ENTRY || tier->slots[i].state == SLOT_COMING;
        n_entries += has_key;
        if (items[i].has_key && !has_key)
            return err_set(err, RC_INTERNAL, "invariant 20: slot %u has a key and state %u", i, tier->slots[i].state);
    }
    for (uint32_t b = 0; b <= tier->table.mask; b++)
        for (uint32_t at = tier->table.buckets[b]; at && n_keys <= tier->n_slots; at = items[at].chain_next)
            n_keys++;
    if (n_keys != n_entries)
        return err_set(err, RC_INTERNAL, "invariant 20: %u keys, %u entries", n_keys, n_entries);
    if (n_free != tier->n_free || n_findable != tier->n_findable || n_swapped != tier->n_swapped ||
        n_coming != tier->n_coming || n_leaving != tier->n_leaving ||
        n_free + n_findable + n_swapped + n_coming != tier->n_slots)
        return err_set(err, RC_INTERNAL, "invariant 20: %u free, %u findable, %u leaving, %u swapped, %u coming of %u slots; "
                       "counted %u, %u, %u, %u, %u", n_free, n_findable, n_leaving, n_swapped, n_coming, tier->n_slots,
                       tier->n_free, tier->n_findable, tier->n_leaving, tier->n_swapped, tier->n_coming);
    return RC_OK;
}
