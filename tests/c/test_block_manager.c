/* The block manager against a plain model that keeps the free pages in a sorted array; the cache's layout; the hash. */
#include "../../csrc/engine/block_manager.h"
#include "../../csrc/base/mem.h"
#include "../../csrc/step/kv_layout.h"
#include "check.h"

#define N_PAGES 24u
#define N_KEYS 12u
#define N_GROUPS 2u

static struct err err;

static struct hash key_of(uint32_t number)
{
    return (struct hash){number * 64, number}; /* the low bits are equal: all fall into few buckets */
}

/* ---- the plain model ---- */

struct plain_page {
    uint32_t refs, holds, key, group; /* key 0: none */
    int64_t freed;                    /* the smallest goes first; what holds nothing: the last released */
};
struct plain {
    struct plain_page pages[N_PAGES];
    int64_t time;
    uint64_t n_evictions;
};

static bool plain_is_free(const struct plain_page *page)
{
    return !page->refs && !page->holds;
}

static uint32_t plain_n_free(const struct plain *p)
{
    uint32_t n = 0;
    for (uint32_t i = 1; i < N_PAGES; i++)
        n += plain_is_free(&p->pages[i]);
    return n;
}

static uint32_t plain_take(struct plain *p)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < N_PAGES; i++) {
        const struct plain_page *page = &p->pages[i], *other = &p->pages[best];
        if (!plain_is_free(page))
            continue;
        if (!best || (!page->key && other->key) || (!page->key == !other->key && page->freed < other->freed))
            best = i;
    }
    p->n_evictions += p->pages[best].key != 0;
    p->pages[best] = (struct plain_page){.refs = 1};
    return best;
}

static bool plain_has(const struct plain *p, uint32_t key, uint32_t group, uint32_t page)
{
    bool any = false;
    for (uint32_t i = 1; i < N_PAGES; i++)
        if (p->pages[i].key == key && p->pages[i].group == group) {
            any = true;
            if (i == page)
                return true;
        }
    return !any && !page;
}

struct world {
    struct block_manager *manager;
    struct plain plain;
    uint64_t random;
};

static void compare(struct world *w)
{
    uint32_t refs[N_PAGES], holds[N_PAGES];
    for (uint32_t i = 0; i < N_PAGES; i++) {
        refs[i] = w->plain.pages[i].refs;
        holds[i] = w->plain.pages[i].holds;
    }
    CHECK_OK(block_manager_check(w->manager, refs, holds, &err));
    CHECK_EQ(block_manager_n_free(w->manager), plain_n_free(&w->plain));
    CHECK_EQ(block_manager_n_evictions(w->manager), w->plain.n_evictions);
    for (uint32_t i = 1; i < N_PAGES; i++) {
        struct plain_page *page = &w->plain.pages[i];
        CHECK_EQ(block_manager_is_free(w->manager, (int32_t)i), plain_is_free(page));
        CHECK_EQ(block_manager_is_writable(w->manager, (int32_t)i), page->refs == 1 && !page->key);
    }
}

static void find_and_share(struct world *w)
{
    uint32_t number = 1 + check_below(&w->random, N_KEYS), group = check_below(&w->random, N_GROUPS);
    struct hash key = key_of(number);
    int32_t page = block_manager_find(w->manager, &key, group);
    CHECK(plain_has(&w->plain, number, group, (uint32_t)page));
    if (page && w->plain.pages[page].refs < 3) {
        block_manager_share(w->manager, page);
        w->plain.pages[page].refs++;
    }
}

static void give_back(struct world *w, uint32_t page, bool hold)
{
    struct plain_page *plain = &w->plain.pages[page];
    if (hold) {
        block_manager_unhold(w->manager, (int32_t)page);
        plain->holds--;
    } else {
        block_manager_release(w->manager, (int32_t)page);
        plain->refs--;
    }
    w->plain.time++;
    if (plain_is_free(plain))
        plain->freed = plain->key ? w->plain.time : -w->plain.time;
}

static void reset(struct world *w)
{
    block_manager_reset(w->manager);
    /* What was findable goes behind what was not, in its own order. */
    struct plain old = w->plain;
    for (uint32_t i = 1; i < N_PAGES; i++) {
        const struct plain_page *page = &old.pages[i];
        w->plain.pages[i].freed = 0;
        for (uint32_t j = 1; j < N_PAGES; j++) {
            const struct plain_page *other = &old.pages[j];
            w->plain.pages[i].freed += !other->key == !page->key ? other->freed < page->freed : !other->key;
        }
        w->plain.pages[i].key = 0;
    }
    w->plain.time = N_PAGES;
}

static void operation(struct world *w)
{
    uint32_t page = 1 + check_below(&w->random, N_PAGES - 1), what = check_below(&w->random, 100);
    struct plain_page *plain = &w->plain.pages[page];
    if (what < 30 && plain_n_free(&w->plain))
        CHECK_EQ(block_manager_take(w->manager), plain_take(&w->plain));
    else if (what < 45)
        find_and_share(w);
    else if (what < 60 && plain->refs) {
        uint32_t number = 1 + check_below(&w->random, N_KEYS), group = check_below(&w->random, N_GROUPS);
        struct hash key = key_of(number);
        block_manager_publish(w->manager, (int32_t)page, &key, group);
        plain->key = number;
        plain->group = group;
    } else if (what < 63 && plain->refs) {
        block_manager_withdraw(w->manager, (int32_t)page);
        plain->key = 0;
    } else if (what < 68 && plain->refs && plain->holds < 2) {
        block_manager_hold(w->manager, (int32_t)page);
        plain->holds++;
    } else if (what < 75 && plain->holds)
        give_back(w, page, true);
    else if (what < 99 && plain->refs)
        give_back(w, page, false);
    else if (what == 99 && check_below(&w->random, 5) == 0)
        reset(w);
}

TEST(random_operations)
{
    struct world w = {.random = 1};
    REQUIRE_OK(block_manager_create(N_PAGES, 0, &w.manager, &err));
    for (uint32_t i = 1; i < N_PAGES; i++)
        w.plain.pages[i].freed = ++w.plain.time;
    for (uint32_t i = 0; i < 100000 && !check_failures; i++) {
        operation(&w);
        compare(&w);
    }
    CHECK(w.plain.n_evictions > 100);
    block_manager_destroy(w.manager);
}

TEST(a_chain_is_eaten_from_its_tail)
{
    struct block_manager *manager;
    int32_t pages[4];
    REQUIRE_OK(block_manager_create(5, 0, &manager, &err));
    for (uint32_t i = 0; i < 4; i++) {
        struct hash key = key_of(i + 1);
        pages[i] = block_manager_take(manager);
        block_manager_publish(manager, pages[i], &key, 0);
    }
    for (int i = 3; i >= 0; i--)
        block_manager_release(manager, pages[i]);
    for (int i = 3; i >= 0; i--) {
        struct hash key = key_of((uint32_t)i + 1), parent = key_of((uint32_t)i);
        CHECK_EQ(block_manager_take(manager), pages[i]);
        CHECK_EQ(block_manager_find(manager, &key, 0), 0);
        CHECK(i == 0 || block_manager_find(manager, &parent, 0) == pages[i - 1]);
    }
    block_manager_destroy(manager);
}

TEST(broken_invariants_are_named)
{
    struct block_manager *manager;
    uint32_t refs[5] = {0}, holds[5] = {0};
    REQUIRE_OK(block_manager_create(5, 0, &manager, &err));
    CHECK_OK(block_manager_check(manager, refs, holds, &err));
    refs[block_manager_take(manager)] = 2;
    CHECK_EQ(block_manager_check(manager, refs, holds, &err), RC_INTERNAL);
    CHECK_CONTAINS(err.message, "invariant 2");
    block_manager_destroy(manager);
}

TEST(failed_allocations)
{
    struct block_manager *manager;
    for (int64_t i = 0; i < 3; i++) {
        mem_fail_after(i);
        CHECK_EQ(block_manager_create(8, 0, &manager, &err), RC_MEMORY);
    }
    mem_fail_after(-1);
}

/* ---- layouts ---- */

static void layout_case(const char *kinds, uint32_t n_groups, uint32_t layers_a_page)
{
    struct kv_layout layout;
    struct kv_place places[64];
    struct kv_need needs[64] = {{0}};
    uint32_t n_layers = (uint32_t)strlen(kinds), used[BATCH_MAX_GROUPS][64] = {{0}};
    for (uint32_t l = 0; l < n_layers; l++)
        needs[l].window = kinds[l] == 'f' ? 0 : (uint32_t)kinds[l];
    REQUIRE_OK(kv_layout_make(needs, n_layers, 16, 100, &layout, places, &err));
    CHECK_EQ(layout.n_groups, n_groups);
    CHECK_EQ(layout.page_bytes, 100 * layers_a_page);
    for (uint32_t l = 0; l < n_layers; l++) {
        REQUIRE(places[l].group < layout.n_groups && places[l].index < layers_a_page);
        CHECK_EQ(layout.groups[places[l].group].window, needs[l].window);
        CHECK(!used[places[l].group][places[l].index]++);
    }
    for (uint32_t g = 0, n = 0; g < layout.n_groups; g++) {
        n += layout.groups[g].n_layers;
        CHECK(g + 1 < layout.n_groups || n == n_layers);
    }
}

TEST(layouts)
{
    layout_case("f", 1, 1);
    layout_case("ffffffff", 1, 8);
    layout_case("fwfwfwfw", 2, 4);
    layout_case("wwfwwfwwf", 3, 3);
    layout_case("wwwwwf", 6, 1);                             /* no padding at all */
    layout_case("wwwwwfwwwwwfwwww", 8, 2);                   /* 14 and 2 */
    layout_case("wwwwwwwwwwwwwwwwwwwwwwwwwwwwwwff", 16, 2);  /* 30 and 2: sixteen groups at most */
    layout_case("wwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwf", 13, 3); /* 35 and 1: singles would be 36 groups */
    struct kv_layout layout;
    struct kv_place places[17];
    struct kv_need needs[17] = {{0}};
    for (uint32_t i = 0; i < 17; i++)
        needs[i].window = i;
    CHECK_EQ(kv_layout_make(needs, 17, 16, 100, &layout, places, &err), RC_UNSUPPORTED);
    CHECK_EQ(kv_layout_make(needs, 0, 16, 100, &layout, places, &err), RC_UNSUPPORTED);
}

TEST(pages_of_a_sequence)
{
    struct kv_layout layout = {.n_groups = 2, .groups = {{0, 1}, {9, 1}}, .block_tokens = 4};
    CHECK_EQ(kv_layout_pages(&layout, 0, 1), 0);
    CHECK_EQ(kv_layout_pages(&layout, 5, 1), 2 + 2);
    CHECK_EQ(kv_layout_pages(&layout, 100, 1), 25 + 3);  /* 9 positions touch at most 3 blocks */
    CHECK_EQ(kv_layout_pages(&layout, 100, 8), 25 + 5);
    layout.groups[1].window = 1;
    CHECK_EQ(kv_layout_pages(&layout, 100, 1), 25 + 1);
    CHECK_EQ(kv_layout_pages(&layout, 100, 2), 25 + 2);
}

/* ---- keys ---- */

/* Blocks with keys that differ only in the upper half, or only in the group, are in one bucket and are distinguished. */
TEST(a_block_is_found_by_all_of_its_key_and_by_its_group)
{
    const struct hash key = {5, 1}, other = {5, 2};
    struct block_manager *manager;
    REQUIRE_OK(block_manager_create(20, 0, &manager, &err));
    int32_t page = block_manager_take(manager);
    block_manager_publish(manager, page, &key, 0);
    CHECK_EQ(block_manager_find(manager, &key, 0), page);
    CHECK_EQ(block_manager_find(manager, &other, 0), 0);
    CHECK_EQ(block_manager_find(manager, &key, 64), 0);
    int32_t second = block_manager_take(manager), third = block_manager_take(manager);
    block_manager_publish(manager, second, &other, 0);
    block_manager_publish(manager, third, &key, 64);
    CHECK_EQ(block_manager_find(manager, &key, 0), page);
    CHECK_EQ(block_manager_find(manager, &other, 0), second);
    CHECK_EQ(block_manager_find(manager, &key, 64), third);
    block_manager_destroy(manager);
}

/* ---- the hash ---- */

TEST(hash_vectors)
{
    /* The reference implementation's first three vectors: key 00 .. 0f, input 00, 01, .. of each length. */
    const struct hash key = {0x0706050403020100, 0x0f0e0d0c0b0a0908};
    const struct hash wanted[] = {{0xe6a825ba047f81a3, 0x930255c71472f66d}, {0x44af996bd8c187da, 0x45fc229b11597634}};
    unsigned char input[40];
    struct hash all[40];
    for (uint32_t n = 0; n < 40; n++) {
        input[n] = (unsigned char)n;
        all[n] = hash_bytes(&key, input, n);
        if (n < sizeof wanted / sizeof *wanted)
            CHECK(hash_equal(&all[n], &wanted[n]));
        for (uint32_t i = 0; i < n; i++)
            CHECK(!hash_equal(&all[i], &all[n]));
    }
}
