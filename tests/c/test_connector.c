#define _GNU_SOURCE
/* Engines with a connector that has to be asked: random traces whose tokens must be those of the oracle, while the connector
 * says what is not so, fails, or does not come back. */
#include "trace.h"

#include "../../csrc/base/clock.h"

#include <pthread.h>
#include <time.h>

#define N_KEPT 512u
#define MOST_BYTES 2048u
#define BUSY_S 60.0  /* most that a test waits for the store's threads */
#define DEADLINE_S 1 /* on a busy machine, calls before the one that hangs are slow, too */

struct kept {
    struct hash key;
    uint32_t group, n_bytes;
    char bytes[MOST_BYTES];
};

/* A store in memory. n_refs: itself and the test, because an engine may leave a store that hangs to its thread. */
struct store {
    struct kept kept[N_KEPT];
    uint32_t next, slot_bytes;
    uint64_t random;
    uint32_t lie_in, fail_in;      /* one answer in so many is wrong, one call in so many fails; 0: none */
    uint64_t n_loaded, n_lies, n_failures;
    bool hangs, has_hung, is_closed;
    pthread_mutex_t lock;
    pthread_cond_t changed;
};

static bool is_one_in(struct store *store, uint32_t n)
{
    return n && check_below(&store->random, n) == 0;
}

static struct kept *find(struct store *store, const struct hash *key, uint32_t group)
{
    for (uint32_t i = 0; i < N_KEPT; i++)
        if (store->kept[i].n_bytes && store->kept[i].group == group && hash_equal(&store->kept[i].key, key))
            return &store->kept[i];
    return NULL;
}

static bool store_match(void *ctx, const struct hash *keys, uint32_t n_keys, const uint32_t *groups, uint32_t n_groups, bool *found)
{
    struct store *store = ctx;
    pthread_mutex_lock(&store->lock);
    for (uint32_t g = 0; g < n_groups; g++)
        for (uint32_t i = 0; i < n_keys; i++) {
            bool is_lie = is_one_in(store, store->lie_in);
            found[g * n_keys + i] = (find(store, &keys[i], groups[g]) != NULL) != is_lie;
            store->n_lies += is_lie;
        }
    bool fails = is_one_in(store, store->fail_in);
    store->n_failures += fails;
    pthread_mutex_unlock(&store->lock);
    return !fails;
}

static bool store_load(void *ctx, const struct outer_block *block)
{
    struct store *store = ctx;
    pthread_mutex_lock(&store->lock);
    store->has_hung |= store->hangs;
    while (store->hangs)
        pthread_cond_wait(&store->changed, &store->lock);
    const struct kept *kept = find(store, &block->key, block->group);
    bool is_good = kept && !is_one_in(store, store->fail_in);
    for (uint32_t i = 0; i < block->n_parts; i++) /* parts are undefined after a failure */
        memcpy(block->parts[i], kept ? kept->bytes + (size_t)i * store->slot_bytes : store->kept[0].bytes, store->slot_bytes);
    store->n_loaded += is_good;
    pthread_mutex_unlock(&store->lock);
    return is_good;
}

static bool store_save(void *ctx, const struct outer_block *block)
{
    struct store *store = ctx;
    pthread_mutex_lock(&store->lock);
    struct kept *kept = find(store, &block->key, block->group);
    kept = kept ? kept : &store->kept[store->next++ % N_KEPT];
    bool fails = is_one_in(store, store->fail_in);
    kept->key = block->key;
    kept->group = block->group;
    kept->n_bytes = fails ? 0 : block->n_parts * store->slot_bytes;
    CHECK(kept->n_bytes <= MOST_BYTES);
    for (uint32_t i = 0; i < block->n_parts; i++)
        memcpy(kept->bytes + (size_t)i * store->slot_bytes, block->parts[i], store->slot_bytes);
    pthread_mutex_unlock(&store->lock);
    return !fails;
}

static void store_clear(void *ctx)
{
    struct store *store = ctx;
    pthread_mutex_lock(&store->lock);
    for (uint32_t i = 0; i < N_KEPT; i++)
        store->kept[i].n_bytes = 0;
    pthread_mutex_unlock(&store->lock);
}

static void store_stats(void *ctx, struct connector_stats *stats)
{
    (void)ctx;
    *stats = (struct connector_stats){0};
}

static void store_close(void *ctx)
{
    struct store *store = ctx;
    pthread_mutex_lock(&store->lock);
    store->is_closed = true;
    pthread_cond_broadcast(&store->changed);
    pthread_mutex_unlock(&store->lock);
}

static struct connector connector_of(struct store *store, uint32_t block_tokens)
{
    pthread_condattr_t attributes;
    memset(store, 0, sizeof *store);
    pthread_mutex_init(&store->lock, NULL);
    pthread_condattr_init(&attributes);
    pthread_cond_init(&store->changed, &attributes);
    store->slot_bytes = block_tokens * (uint32_t)sizeof(struct cell);
    return (struct connector){store, NULL, store_match, store_load, store_save, store_clear, store_stats, store_close,
                              .deadline_s = DEADLINE_S};
}

static uint64_t n_tokens_found;

static void look_at_trace(const struct setup *setup, const struct engine_stats *stats)
{
    struct store *store = setup->connector->ctx;
    n_tokens_found += stats->disk_cache_hits;
    CHECK(store->is_closed);
    store->is_closed = false;
}

TEST(random_traces_with_a_connector_that_lies_and_fails)
{
    const struct setup SETUPS[] = {
        {.block_tokens = 4, .n_pages = 26, .max_num_seqs = 6, .max_num_batched_tokens = 16, .n_host_slots = 30},
        {.block_tokens = 4, .n_pages = 60, .max_num_seqs = 6, .max_num_batched_tokens = 12, .windows = {0, 6}, .n_layers = 2,
         .n_host_slots = 50, .policy = POLICY_PRIORITY},
        {.block_tokens = 4, .n_pages = 50, .max_num_seqs = 6, .max_num_batched_tokens = 40, .states = {{0, 3, 32}, {0, 2, 64}}, .n_states = 2,
         .snapshot_tokens = 24, .n_host_slots = 60},
    };
    static struct store store;
    uint64_t n_lies = 0, n_failures = 0;
    const double end = seconds_now() + BUSY_S;
    /* On a busy machine a trace may be over before the store has anything. */
    for (uint32_t i = 0; (i < 9 || ((n_tokens_found <= 100 || !n_lies || !n_failures) && seconds_now() < end)) && !check_failures; i++) {
        struct setup setup = SETUPS[i % 3];
        struct connector connector = connector_of(&store, setup.block_tokens);
        store.lie_in = i / 3 % 3 == 1 ? 20 : 0;
        store.fail_in = i / 3 % 3 == 2 ? 10 : 0;
        connector.n_threads = 1 + i % 3;
        connector.deadline_s = 10; /* also on a busy machine nothing is late */
        setup.caches = true;
        setup.is_apart = i % 2;
        setup.connector = &connector;
        trace_run_all(&setup, 1, 1200, look_at_trace);
        CHECK((store.lie_in || !store.n_lies) && (store.fail_in || !store.n_failures));
        n_lies += store.n_lies;
        n_failures += store.n_failures;
    }
    CHECK(n_tokens_found > 100 && n_lies && n_failures);
}

static void step(struct engine *engine, struct job **job)
{
    struct err err;
    bool progressed;
    REQUIRE_OK(engine_step(engine, &progressed, &err));
    REQUIRE_OK(engine_check(engine, &err));
    take_all(engine, false, job, 1);
}

static uint64_t n_loaded(struct store *store)
{
    pthread_mutex_lock(&store->lock);
    uint64_t n = store->n_loaded;
    pthread_mutex_unlock(&store->lock);
    return n;
}

/* One engine computes a prompt block by block; another one has its first blocks before the last step. */
TEST(blocks_are_awaited_while_later_ones_are_computed)
{
    static struct store store;
    struct connector connector = connector_of(&store, 4);
    const struct setup setup = {.block_tokens = 4, .n_pages = 26, .max_num_seqs = 4, .max_num_batched_tokens = 4, .caches = true,
                                .n_host_slots = 60, .connector = &connector, .has_cache_seed = true};
    struct fake fakes[2];
    struct engine *engines[2];
    struct job *jobs[2];
    struct engine_stats stats;
    struct err err;
    uint32_t n_saved;
    connector.deadline_s = 10;
    for (uint32_t i = 0; i < 2; i++) {
        engines[i] = fake_engine(&setup, &fakes[i], &err);
        jobs[i] = stream_job(&fakes[i], 1, 94, 4);
        jobs[i]->spec.saves_early = !i;
        jobs[i]->spec.awaits_s = i ? 60 : 0;
        expect(jobs[i]);
        submit_job(engines[i], jobs[i]);
    }
    const double end = seconds_now() + BUSY_S;
    for (stats.num_steps = 0; stats.num_steps < 20 && seconds_now() < end; engine_stats(engines[0], &stats))
        step(engines[0], &jobs[0]);
    while (n_loaded(&store) < 4 && seconds_now() < end)
        step(engines[1], &jobs[1]);
    CHECK(n_loaded(&store) >= 4 && !jobs[0]->is_done && !jobs[1]->is_done);
    engine_stats(engines[1], &stats);
    CHECK_EQ(stats.num_running + stats.num_steps, 0);
    while (!jobs[0]->is_done && !check_failures)
        step(engines[0], &jobs[0]);
    CHECK_OK(engine_save_prompt(engines[0], &jobs[0]->spec, &n_saved, &err));
    CHECK_EQ(n_saved, 92);
    drain(engines[1], &jobs[1], 1); /* it finds every block, and so needs no engine_end_wait */
    engine_stats(engines[1], &stats);
    CHECK_EQ(stats.disk_cache_hits, 92);
    CHECK_EQ(n_loaded(&store), 23);
    for (uint32_t i = 0; i < 2; i++) {
        free(jobs[i]);
        fake_close(engines[i], &fakes[i]);
    }
}

/* Nobody waits for a call behind its deadline, and closing the engine leaves the store to its thread. */
TEST(a_connector_may_hang)
{
    static struct store store;
    struct connector connector = connector_of(&store, 4);
    const struct setup setup = {.block_tokens = 4, .n_pages = 26, .max_num_seqs = 4, .max_num_batched_tokens = 32, .caches = true,
                                .n_host_slots = 12, .connector = &connector};
    struct fake fake;
    struct err err;
    struct engine *engine = fake_engine(&setup, &fake, &err);
    for (uint32_t round = 0, n_after = 0; round < 1000 && n_after < 10 && !check_failures; round++) {
        struct job *job = stream_job(&fake, round % 4, 60, 4);
        expect(job);
        submit_job(engine, job);
        drain(engine, &job, 1);
        CHECK(job->is_done);
        free(job);
        pthread_mutex_lock(&store.lock);
        store.hangs = store.n_loaded > 0;
        n_after += store.has_hung;
        pthread_mutex_unlock(&store.lock);
    }
    fake_close(engine, &fake);
    pthread_mutex_lock(&store.lock);
    CHECK(store.has_hung && !store.is_closed);
    store.hangs = false;
    pthread_cond_broadcast(&store.changed);
    while (!store.is_closed)
        pthread_cond_wait(&store.changed, &store.lock);
    pthread_mutex_unlock(&store.lock);
}
