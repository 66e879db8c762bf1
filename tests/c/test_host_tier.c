/* The slots of host memory under random traces. Copies run as late, and in as odd an order, as the numbers of the moves allow;
 * whoever uses a page waits only for the moves that the tier names. What comes back must be what went out. */
#include "check.h"

#include "../../csrc/base/mem.h"
#include "../../csrc/engine/host_tier.h"

#define N_PAGES 40u
#define N_SLOTS 13u
#define BUNDLE 3u
#define N_KEYS 30u
#define N_FLUSHES 64u /* most that have not ended */

struct flushed {
    struct page_move moves[2][N_PAGES + N_SLOTS];
    uint32_t n[2];
    uint64_t after[2];
};

struct world {
    struct host_tier *tier;
    uint64_t random, pages[N_PAGES], slots[N_SLOTS], number; /* number: of flushes so far */
    uint64_t ended[2];
    struct flushed flushed[N_FLUSHES];
    struct { uint32_t slot; uint64_t value; } swapped[N_SLOTS];
    uint32_t n_swapped, n_loads, n_stores, n_swaps, n_refused;
    bool is_taken[N_PAGES]; /* used by this flush */
    uint64_t wanted[N_PAGES]; /* what this flush brings to a page; 0: nothing */
};

static struct hash key_of(uint32_t i)
{
    return (struct hash){.lo = i * 64, .hi = i}; /* all in one bucket */
}

static uint64_t value_of(uint32_t key, uint32_t part)
{
    return 1000 + key * 10 + part;
}

static void run(struct world *w, enum move_way way)
{
    struct flushed *f = &w->flushed[(w->ended[way] + 1) % N_FLUSHES];
    CHECK(f->after[way] <= w->ended[!way] + N_FLUSHES);
    while (w->ended[!way] < f->after[way]) /* a cycle would recurse for ever */
        run(w, !way);
    for (uint32_t i = 0; i < f->n[way]; i++) {
        struct page_move move = f->moves[way][i];
        if (way == MOVE_OUT)
            w->slots[move.slot] = w->pages[move.page];
        else
            w->pages[move.page] = w->slots[move.slot];
    }
    w->ended[way]++;
}

static void flush(struct world *w)
{
    struct move_args args;
    struct move_list *lists = args.lists;
    host_tier_flush(w->tier, &args);
    struct flushed *f = &w->flushed[++w->number % N_FLUSHES];
    for (uint32_t way = 0; way < 2; way++) {
        CHECK_EQ(lists[way].number, w->number);
        CHECK(lists[way].after < w->number || way == MOVE_IN); /* moves out never wait for this flush's moves in */
        memcpy(f->moves[way], lists[way].moves, lists[way].n_moves * sizeof *lists[way].moves);
        f->n[way] = lists[way].n_moves;
        f->after[way] = lists[way].after;
    }
    memset(w->is_taken, 0, sizeof w->is_taken);
    for (uint32_t way = 0; way < 2; way++) /* late, but not so late that the ring wraps */
        while (w->number - w->ended[way] >= N_FLUSHES - 2 || (w->ended[way] < w->number && check_below(&w->random, 3) == 0))
            run(w, way);
    for (uint32_t page = 0; page < N_PAGES; page++)
        if (w->wanted[page]) {
            while (w->ended[MOVE_IN] < w->number)
                run(w, MOVE_IN);
            CHECK_EQ(w->pages[page], w->wanted[page]);
            w->wanted[page] = 0;
        }
}

/* A page that no other move of this flush uses. To write it, moves in flight must have ended; to copy into it, they need not. */
static int32_t take(struct world *w, bool is_written)
{
    uint32_t page = check_below(&w->random, N_PAGES);
    while (w->is_taken[page])
        page = (page + 1) % N_PAGES;
    w->is_taken[page] = true;
    for (uint32_t way = 0; is_written && way < 2; way++)
        while (w->ended[way] < host_tier_last_move(w->tier, (int32_t)page, way))
            run(w, way);
    return (int32_t)page;
}

static void store(struct world *w, uint32_t key, uint32_t n)
{
    struct hash hash = key_of(key);
    int32_t pages[BUNDLE];
    for (uint32_t i = 0; i < n; i++) {
        pages[i] = take(w, true);
        w->pages[pages[i]] = value_of(key, i);
    }
    bool is_there = host_tier_find(w->tier, &hash, n == BUNDLE), is_stored = host_tier_store(w->tier, &hash, n == BUNDLE, pages, n);
    CHECK(!(is_there && is_stored));
    CHECK_EQ(host_tier_find(w->tier, &hash, n == BUNDLE) != 0, is_there || is_stored);
    w->n_stores += is_stored;
    w->n_refused += !is_stored && !is_there;
}

static void load(struct world *w, uint32_t key, uint32_t n)
{
    struct hash hash = key_of(key);
    int32_t pages[BUNDLE];
    uint32_t entry = host_tier_find(w->tier, &hash, n == BUNDLE);
    if (!entry)
        return;
    for (uint32_t i = 0; i < n; i++) {
        pages[i] = take(w, false);
        w->wanted[pages[i]] = value_of(key, i);
    }
    host_tier_load(w->tier, entry, pages);
    w->n_loads++;
}

static void swap_out(struct world *w)
{
    int32_t page = take(w, true);
    uint64_t value = w->pages[page] = check_random(&w->random);
    uint32_t slot = host_tier_swap_out(w->tier, page, 0);
    if (!slot)
        return;
    w->swapped[w->n_swapped].slot = slot;
    w->swapped[w->n_swapped++].value = value;
    w->n_swaps++;
}

static void swap_in(struct world *w)
{
    uint32_t i = check_below(&w->random, w->n_swapped), slot = w->swapped[i].slot;
    uint64_t value = w->swapped[i].value;
    w->swapped[i] = w->swapped[--w->n_swapped];
    if (check_below(&w->random, 4) == 0) {
        host_tier_drop(w->tier, slot);
        return;
    }
    int32_t page = take(w, false);
    w->wanted[page] = value;
    host_tier_swap_in(w->tier, slot, page);
}

TEST(what_comes_back_is_what_went_out)
{
    struct err err;
    struct world *w = calloc(1, sizeof *w);
    w->random = 7;
    REQUIRE_OK(host_tier_create(N_SLOTS, N_PAGES, BUNDLE, &w->tier, &err));
    for (uint32_t i = 0, n_since = 0; i < 100000 && !check_failures; i++, n_since++) {
        uint32_t what = check_below(&w->random, 100), key = check_below(&w->random, N_KEYS);
        uint32_t n = check_below(&w->random, 4) ? 1 : BUNDLE;
        if (what < 35)
            store(w, key, n);
        else if (what < 65)
            load(w, key, n);
        else if (what < 75)
            swap_out(w);
        else if (what < 85 && w->n_swapped)
            swap_in(w);
        else if (what == 99)
            host_tier_reset(w->tier);
        else
            flush(w);
        if (n_since == 5) { /* a flush uses at most 18 pages */
            flush(w);
            n_since = 0;
        }
        CHECK_OK(host_tier_check(w->tier, &err));
        CHECK_EQ(host_tier_n_swapped(w->tier), w->n_swapped);
        CHECK_EQ(host_tier_n_free(w->tier) + host_tier_n_findable(w->tier) + w->n_swapped, N_SLOTS);
    }
    CHECK(w->n_loads > 1000 && w->n_stores > 1000 && w->n_swaps > 1000 && w->n_refused > 100);
    host_tier_destroy(w->tier);
    free(w);
}

TEST(the_least_recently_used_entry_goes_first)
{
    struct err err;
    struct move_args args;
    struct host_tier *tier;
    REQUIRE_OK(host_tier_create(3, N_PAGES, 0, &tier, &err));
    for (uint32_t i = 0; i < 3; i++) {
        struct hash key = key_of(i);
        CHECK(host_tier_store(tier, &key, 0, (int32_t[]){(int32_t)i + 1}, 1));
    }
    struct hash first = key_of(0), second = key_of(1), fourth = key_of(3);
    CHECK(!host_tier_store(tier, &fourth, 0, (int32_t[]){4}, 1)); /* all are used by this flush */
    host_tier_flush(tier, &args);
    host_tier_touch(tier, host_tier_find(tier, &first, 0));
    CHECK(host_tier_store(tier, &fourth, 0, (int32_t[]){4}, 1));
    CHECK(host_tier_find(tier, &first, 0) && !host_tier_find(tier, &second, 0) && host_tier_find(tier, &fourth, 0));
    CHECK_OK(host_tier_check(tier, &err));
    host_tier_destroy(tier);
}

TEST(no_memory_leaves_nothing)
{
    struct err err;
    struct host_tier *tier = NULL;
    uint64_t held = mem_n_held();
    for (int64_t i = 0; i < 7; i++) {
        mem_fail_after(i);
        CHECK_EQ(host_tier_create(N_SLOTS, N_PAGES, BUNDLE, &tier, &err), RC_MEMORY);
        CHECK_EQ(mem_n_held(), held);
    }
    mem_fail_after(-1);
    CHECK_OK(host_tier_create(N_SLOTS, N_PAGES, BUNDLE, &tier, &err));
    host_tier_destroy(tier);
    CHECK_EQ(mem_n_held(), held);
}
