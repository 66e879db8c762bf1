/* Recurrent state, rule by rule on the fake model: bundles of pages, their layout, when snapshots are made and what they serve.
 * Random traces over such models are in test_scheduler.c, updates and sleep in test_hold.c. */
#include "bench.h"

#include "../../csrc/engine/block_manager.h"

/* ---- bundles ---- */

#define N_PAGES 64u
#define N_BUNDLES 8u
#define BUNDLE 5u

struct held {
    int32_t pages[BUNDLE];
    uint32_t refs, holds, key; /* key 0: none */
};

static struct hash key_of(uint32_t number)
{
    return (struct hash){number * 64, number};
}

static void check_held(const struct block_manager *manager, const struct held *held, const struct held *alone)
{
    uint32_t refs[N_PAGES] = {0}, holds[N_PAGES] = {0}, n_free = N_PAGES - 1;
    for (uint32_t i = 0; i < N_BUNDLES; i++)
        if (held[i].refs || held[i].holds) {
            refs[held[i].pages[0]] = held[i].refs;
            holds[held[i].pages[0]] = held[i].holds;
            n_free -= BUNDLE;
            CHECK(block_manager_is_bundle(manager, held[i].pages));
            CHECK_EQ(block_manager_is_writable(manager, held[i].pages[0]), held[i].refs == 1 && !held[i].key);
        }
    for (uint32_t i = 0; i < N_BUNDLES; i++)
        if (alone[i].refs) {
            refs[alone[i].pages[0]] = 1;
            n_free--;
        }
    CHECK_OK(block_manager_check(manager, refs, holds, &err));
    CHECK_EQ(block_manager_n_free(manager), n_free);
}

/* The key finds the bundle that is in use under it, or an unused bundle. */
static void find_bundle(struct block_manager *manager, struct held *held, uint32_t number, struct held *free_one)
{
    struct hash key = key_of(number);
    int32_t found = block_manager_find(manager, &key, BUNDLE_GROUP);
    bool is_used = false, is_ours = !found;
    for (uint32_t i = 0; i < N_BUNDLES; i++)
        if ((held[i].refs || held[i].holds) && held[i].key == number) {
            is_used = true;
            is_ours |= found == held[i].pages[0];
        }
    CHECK(!is_used || found);
    if (found && !is_ours) {
        CHECK(block_manager_is_free(manager, found));
        if (free_one->refs || free_one->holds)
            return;
        block_manager_share(manager, found);
        *free_one = (struct held){.refs = 1, .key = number};
        block_manager_list_bundle(manager, found, free_one->pages);
    }
}

static void one_operation(struct block_manager *manager, struct held *held, struct held *alone, uint64_t *random)
{
    struct held *h = &held[check_below(random, N_BUNDLES)], *page = &alone[check_below(random, N_BUNDLES)];
    uint32_t what = check_below(random, 100), number = 1 + check_below(random, 12);
    struct hash key = key_of(number);
    bool is_used = h->refs || h->holds;
    if (what < 20 && !is_used && block_manager_n_free(manager) >= BUNDLE) {
        *h = (struct held){.refs = 1};
        block_manager_take_bundle(manager, h->pages);
    } else if (what < 30) {
        find_bundle(manager, held, number, h);
    } else if (what < 45 && h->refs && !h->key) {
        block_manager_publish(manager, h->pages[0], &key, BUNDLE_GROUP);
        h->key = number;
    } else if (what < 50 && h->refs) {
        block_manager_share(manager, h->pages[0]);
        h->refs++;
    } else if (what < 70 && h->refs) {
        block_manager_release(manager, h->pages[0]);
        h->refs--;
    } else if (what < 75 && h->refs) {
        block_manager_hold(manager, h->pages[0]);
        h->holds++;
    } else if (what < 83 && h->holds) {
        block_manager_unhold(manager, h->pages[0]);
        h->holds--;
    } else if (what < 86) {
        int32_t found = block_manager_find(manager, &key, BUNDLE_GROUP);
        for (uint32_t i = 0; found && i < N_BUNDLES; i++)
            if ((held[i].refs || held[i].holds) && held[i].pages[0] == found)
                held[i].key = 0;
        if (found)
            block_manager_withdraw(manager, found);
    } else if (what < 89) {
        int32_t found = block_manager_find(manager, &key, BUNDLE_GROUP);
        if (found)
            block_manager_touch(manager, found);
    } else if (what < 94 && !page->refs && block_manager_n_free(manager)) {
        *page = (struct held){.refs = 1, .pages = {block_manager_take(manager)}};
        block_manager_publish(manager, page->pages[0], &key, 0);
    } else if (what < 99 && page->refs) {
        block_manager_release(manager, page->pages[0]);
        page->refs = 0;
    } else if (what == 99 && check_below(random, 5) == 0) {
        block_manager_reset(manager);
        for (uint32_t i = 0; i < N_BUNDLES; i++)
            held[i].key = 0;
    }
}

TEST(random_operations_on_bundles)
{
    struct block_manager *manager;
    struct held held[N_BUNDLES] = {{{0}, 0, 0, 0}}, alone[N_BUNDLES] = {{{0}, 0, 0, 0}};
    uint64_t random = 11;
    REQUIRE_OK(block_manager_create(N_PAGES, BUNDLE, &manager, &err));
    for (uint32_t i = 0; i < 50000 && !check_failures; i++) {
        one_operation(manager, held, alone, &random);
        check_held(manager, held, alone);
    }
    CHECK(block_manager_n_evictions(manager) > 100);
    block_manager_destroy(manager);
}

TEST(a_state_goes_as_a_whole_and_with_its_block)
{
    struct block_manager *manager;
    struct hash key = key_of(1), other = key_of(2);
    int32_t bundle[3], page, pages[9];
    REQUIRE_OK(block_manager_create(10, 3, &manager, &err));
    block_manager_take_bundle(manager, bundle);
    block_manager_publish(manager, bundle[0], &key, BUNDLE_GROUP);
    block_manager_release(manager, bundle[0]);
    page = block_manager_take(manager);
    block_manager_publish(manager, page, &key, 0);
    block_manager_release(manager, page);
    CHECK_EQ(block_manager_n_cached(manager), 4);
    CHECK_EQ(block_manager_n_bundles(manager), 1);
    block_manager_touch(manager, bundle[0]); /* from now on the block is older */
    for (uint32_t i = 0; i < 6; i++)
        pages[i] = block_manager_take(manager);
    CHECK_EQ(pages[5], page);
    CHECK_EQ(block_manager_find(manager, &key, BUNDLE_GROUP), 0);
    CHECK_EQ(block_manager_n_free(manager), 3);
    CHECK_EQ(block_manager_n_cached(manager), 0);
    block_manager_take_bundle(manager, bundle);
    block_manager_publish(manager, bundle[0], &other, BUNDLE_GROUP);
    block_manager_release(manager, bundle[0]);
    CHECK_EQ(block_manager_n_free(manager), 3);
    pages[6] = block_manager_take(manager); /* of three pages one is wanted */
    CHECK_EQ(block_manager_find(manager, &other, BUNDLE_GROUP), 0);
    CHECK_EQ(block_manager_n_free(manager), 2);
    CHECK_EQ(block_manager_n_cached(manager), 0);
    CHECK_EQ(block_manager_n_bundles(manager), 0);
    block_manager_destroy(manager);
}

/* ---- layouts ---- */

TEST(states_fill_pages)
{
    struct kv_layout layout;
    struct kv_place places[16];
    /* 8 layers of attention of 16 KiB a page; 8 of 32 heads of 32 KiB, and 4096 channels of 12 bytes each. */
    struct kv_need needs[16] = {{0}};
    for (uint32_t i = 8; i < 16; i++)
        needs[i] = i % 2 ? (struct kv_need){0, 32, 32768} : (struct kv_need){0, 4096, 12};
    REQUIRE_OK(kv_layout_make(needs, 16, 16, 16384, &layout, places, &err));
    CHECK_EQ(layout.n_groups, 1);
    CHECK_EQ(layout.page_bytes, 8 * 16384);
    CHECK_EQ(layout.n_state_pages, 4 * 8 + 4 * 1);
    CHECK_EQ(layout.state_bytes, 4 * 32 * 32768 + 4 * 4096 * 12);
    CHECK_EQ(places[8].group, 1);
    CHECK_EQ(places[8].index, 0);
    CHECK_EQ(places[9].index, 1);
    CHECK_EQ(places[10].index, 9);
    CHECK_EQ(kv_layout_pages(&layout, 33, 16), 3 + 36);
    CHECK_EQ(kv_layout_stride(&layout, 33), 36);
    CHECK_EQ(kv_layout_stride(&layout, 1600), 100);
    /* A page holds at least one piece; without attention it fits them. */
    needs[0] = (struct kv_need){0, 3, 70000};
    REQUIRE_OK(kv_layout_make(needs, 2, 16, 16384, &layout, places, &err));
    CHECK_EQ(layout.page_bytes, 70144);
    CHECK_EQ(layout.n_state_pages, 3);
    CHECK(kv_layout_padding(&layout) > 0.75); /* of the layer's keys and values */
    for (uint32_t i = 0; i < 16; i++)
        needs[i] = i % 2 ? (struct kv_need){0, 1536, 64} : (struct kv_need){0, 1536, 12};
    REQUIRE_OK(kv_layout_make(needs, 16, 16, 0, &layout, places, &err));
    CHECK_EQ(layout.n_groups, 0);
    CHECK_EQ(kv_layout_n_tables(&layout), 1);
    CHECK(kv_layout_padding(&layout) < 0.06);
    CHECK_EQ(layout.n_state_pages, 8 * (4 + 1));
    CHECK_EQ(kv_layout_pages(&layout, 100000, 16), layout.n_state_pages);
}

/* ---- rules ---- */

static const struct setup HYBRID = {.block_tokens = 4, .n_pages = 120, .max_num_seqs = 8, .max_num_batched_tokens = 96, .caches = true,
                                    .states = {{0, 3, 32}, {0, 2, 64}}, .n_states = 2, .snapshot_tokens = 32};
static const struct setup PURE = {.block_tokens = 4, .n_pages = 120, .max_num_seqs = 8, .max_num_batched_tokens = 96, .caches = true,
                                  .states = {{0, 3, 256}, {0, 1, 256}}, .n_states = 2, .snapshot_tokens = 32, .has_no_attention = true};
#define STATE_PAGES 4u /* of either */

/* n_prompt tokens, of which the first n_shared are those of a stream that all share. */
static struct job *shared_job(const struct fake *fake, uint32_t stream, uint32_t n_shared, uint32_t n_prompt, uint32_t n_new)
{
    struct job *job = stream_job(fake, stream, n_prompt, n_new);
    for (uint32_t i = 0; i < n_shared; i++)
        job->prompt[i] = (int32_t)(mix(77, i) % VOCAB);
    return job;
}

/* Runs jobs together, checks them against the oracle, frees them; returns the rows that were computed. */
static uint64_t count_rows(struct bench *b, struct job **jobs, uint32_t n)
{
    uint64_t before = b->fake.n_rows;
    run_jobs(b, jobs, n);
    free_jobs(jobs, n);
    return b->fake.n_rows - before;
}

static uint64_t run_one(struct bench *b, struct job *job)
{
    return count_rows(b, &job, 1);
}

/* The same prompt again finds the state of its last boundary; one row at least is computed. */
TEST(a_prompt_is_found_again)
{
    for (int pure = 0; pure < 2; pure++) {
        struct bench b;
        REQUIRE(bench_open(&b, pure ? &PURE : &HYBRID));
        for (uint32_t n = 1; n < 30; n++) {
            CHECK_EQ(run_one(&b, shared_job(&b.fake, n, 0, n, 3)), n + 2);
            CHECK_EQ(run_one(&b, shared_job(&b.fake, n, 0, n, 3)), n - (n - 1) / 4 * 4 + 2);
        }
        fake_close(b.engine, &b.fake);
    }
}

/* The second request that leaves a chain makes the state there, from which the third goes on. */
TEST(shared_prefixes_hit_from_the_third_on)
{
    for (int pure = 0; pure < 2; pure++) {
        struct bench b;
        REQUIRE(bench_open(&b, pure ? &PURE : &HYBRID));
        CHECK_EQ(run_one(&b, shared_job(&b.fake, 1, 42, 60, 1)), 60);
        CHECK_EQ(run_one(&b, shared_job(&b.fake, 2, 42, 60, 1)), 60 - 32); /* of every 32 tokens there is one */
        for (uint32_t i = 3; i < 6; i++)
            CHECK_EQ(run_one(&b, shared_job(&b.fake, i, 42, 60, 1)), 60 - 40);
        /* After a reset all wait for the first one's, where the chain was left before. */
        struct job *jobs[6];
        CHECK_OK(engine_reset_prefix_cache(b.engine, false, &err));
        for (uint32_t i = 0; i < 6; i++)
            jobs[i] = shared_job(&b.fake, 10 + i, 22, 30, 2);
        CHECK_EQ(count_rows(&b, jobs, 6), 30 + 5 * 10 + 6);
        fake_close(b.engine, &b.fake);
        /* Else the second waits for none, the others for its state. */
        REQUIRE(bench_open(&b, pure ? &PURE : &HYBRID));
        for (uint32_t i = 0; i < 6; i++)
            jobs[i] = shared_job(&b.fake, 10 + i, 22, 30, 2);
        CHECK_EQ(count_rows(&b, jobs, 6), 2 * 30 + 4 * 10 + 6);
        fake_close(b.engine, &b.fake);
    }
}

/* Two thousand other blocks in between, under ten keys of the hash, do not hide where a chain was left before. */
TEST(a_shared_prefix_is_remembered)
{
    for (uint32_t round = 0; round < 10; round++) {
        struct bench b;
        REQUIRE(bench_open(&b, &HYBRID));
        run_one(&b, shared_job(&b.fake, 1, 42, 60, 1));
        for (uint32_t i = 0; i < 90; i++)
            run_one(&b, shared_job(&b.fake, 100 + i, 0, 90, 1));
        run_one(&b, shared_job(&b.fake, 2, 42, 60, 1));
        CHECK_EQ(run_one(&b, shared_job(&b.fake, 3, 42, 60, 1)), 60 - 40);
        fake_close(b.engine, &b.fake);
    }
}

TEST(equal_prompts_are_computed_once)
{
    for (int pure = 0; pure < 4; pure++) {
        struct bench b;
        struct setup setup = pure % 2 ? PURE : HYBRID;
        setup.is_async = pure / 2;
        REQUIRE(bench_open(&b, &setup));
        struct job *jobs[8];
        for (uint32_t i = 0; i < 8; i++) {
            jobs[i] = shared_job(&b.fake, 3, 0, i == 4 ? 20 : 70, 5); /* one of them is a beginning of the others */
            jobs[i]->spec.seed = i;
        }
        CHECK_EQ(count_rows(&b, jobs, 8) - stats_of(&b).wasted_rows, 70 + 4 + 6 * (2 + 4) + 20 + 4);
        fake_close(b.engine, &b.fake);
    }
}

/* A request that waits for another request's state is overtaken by requests that do not wait. */
TEST(others_overtake_who_waits)
{
    struct bench b;
    bool progressed;
    REQUIRE(bench_open(&b, &HYBRID));
    struct job *jobs[3] = {shared_job(&b.fake, 1, 0, 30, 4), shared_job(&b.fake, 1, 0, 30, 4), shared_job(&b.fake, 2, 0, 9, 4)};
    for (uint32_t i = 0; i < 3; i++) {
        submit(&b, jobs[i]);
    }
    CHECK_OK(engine_step(b.engine, &progressed, &err));
    CHECK_OK(engine_check(b.engine, &err));
    CHECK_EQ(stats_of(&b).num_running, 2);
    CHECK_EQ(b.fake.n_rows, 28 + 8);
    drain(b.engine, jobs, 3);
    for (uint32_t i = 0; i < 3; i++) {
        CHECK(jobs[i]->is_done);
        free(jobs[i]);
    }
    fake_close(b.engine, &b.fake);
}

/* A new request can continue from generated text: from where it ended, less the distance between two of its temporary states. */
TEST(the_next_turn_goes_on)
{
    for (int pure = 0; pure < 2; pure++) {
        struct bench b;
        REQUIRE(bench_open(&b, pure ? &PURE : &HYBRID));
        struct job *first = shared_job(&b.fake, 5, 0, 30, 31), *second = shared_job(&b.fake, 6, 0, 70, 2);
        expect(first);
        memcpy(second->prompt, first->prompt, 30 * sizeof *second->prompt);
        memcpy(second->prompt + 30, first->expected[0].ids, 31 * sizeof *second->prompt);
        run_one(&b, first);
        CHECK_EQ(stats_of(&b).state_snapshots, 3); /* at 28 and 32; at 60, for which those of 36 to 56 have gone */
        CHECK_EQ(run_one(&b, second), 70 - 60 + 1);
        fake_close(b.engine, &b.fake);
    }
}

TEST(forks_take_a_copy_each)
{
    for (int way = 0; way < 4; way++) {
        struct bench b;
        struct setup setup = way % 2 ? PURE : HYBRID;
        setup.is_async = way / 2;
        setup.snapshot_tokens = 256;
        REQUIRE(bench_open(&b, &setup));
        struct job *job = shared_job(&b.fake, 4, 0, 11, 4);
        job->spec.n = 4;
        CHECK_EQ(run_one(&b, job) - stats_of(&b).wasted_rows, 11 + 4 * 3);
        /* One at the prompt's snapshot, three of the forks; the tails of four hybrids, of which one is the last. */
        CHECK_EQ(b.fake.n_copies, 4 * STATE_PAGES + (way % 2 ? 0 : 3));
        job = shared_job(&b.fake, 5, 0, 11, 1); /* forks that end with their first token never write */
        job->spec.n = 4;
        CHECK_EQ(run_one(&b, job), 11);
        fake_close(b.engine, &b.fake);
    }
}

/* In a pool for a single sequence, snapshots are evicted instead of preempting a request, and a hit continues in place. */
TEST(a_tight_pool_keeps_what_it_can)
{
    for (int pure = 0; pure < 2; pure++) {
        struct bench b;
        struct setup setup = pure ? PURE : HYBRID;
        setup.n_pages = 1 + STATE_PAGES + (pure ? 0 : MAX_LENGTH / 4);
        REQUIRE(bench_open(&b, &setup));
        for (uint32_t i = 0; i < 3; i++) {
            CHECK_EQ(run_one(&b, shared_job(&b.fake, 1, 0, 30, 1)), 30);
            CHECK_EQ(run_one(&b, shared_job(&b.fake, 1, 0, 90, 1)), 90 - (pure ? 0 : 28));
        }
        CHECK_EQ(stats_of(&b).num_preemptions, 0);
        fake_close(b.engine, &b.fake);
    }
}

TEST(nothing_is_kept_without_the_cache)
{
    struct bench b;
    struct setup setup = HYBRID;
    setup.caches = false;
    REQUIRE(bench_open(&b, &setup));
    for (uint32_t i = 0; i < 2; i++)
        CHECK_EQ(run_one(&b, shared_job(&b.fake, 1, 0, 90, 5)), 94);
    CHECK_EQ(stats_of(&b).num_steps, 2 * 5); /* no chunk was cut */
    CHECK_EQ(b.fake.n_copies, 0);
    fake_close(b.engine, &b.fake);
}
