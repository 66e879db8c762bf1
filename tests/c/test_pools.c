/* Several pools of pages, as ranks with sequences of their own have them: random traces as in test_scheduler.c, and where
 * sequences go. */
#include "trace.h"
#include "../../csrc/engine/engine_state.h"

static void look_at_trace(const struct setup *setup, const struct engine_stats *stats)
{
    CHECK(setup->has_no_attention || stats->num_preemptions > 0);
    CHECK(!setup->caches || stats->prefix_cache_hits > 0);
    CHECK(!setup->caches || stats->evictions > 0);
    CHECK_EQ(stats->kv_blocks_total, setup->n_pools * (setup->n_pages - 1));
}

TEST(random_traces)
{
    const struct setup SETUPS[] = {
        {.block_tokens = 4, .n_pages = 26, .n_pools = 2, .max_num_seqs = 8, .max_num_batched_tokens = 16, .caches = true},
        {.block_tokens = 16, .n_pages = 8, .n_pools = 3, .max_num_seqs = 9, .max_num_batched_tokens = 40, .caches = true, .has_nan = true},
        {.block_tokens = 1, .n_pages = 110, .n_pools = 2, .max_num_seqs = 6, .max_num_batched_tokens = 64, .caches = true},
        {.block_tokens = 2, .n_pages = 40, .n_pools = 3, .max_num_seqs = 8, .max_num_batched_tokens = 9, .windows = {3, 7}, .n_layers = 2,
         .caches = true},
        {.block_tokens = 4, .n_pages = 30, .n_pools = 2, .max_num_seqs = 8, .max_num_batched_tokens = 10, .caches = true,
         .policy = POLICY_PRIORITY},
        {.block_tokens = 8, .n_pages = 13, .n_pools = 4, .max_num_seqs = 12, .max_num_batched_tokens = 30, .caches = true,
         .policy = POLICY_PRIORITY},
        {.block_tokens = 4, .n_pages = 40, .n_pools = 2, .max_num_seqs = 12, .max_num_batched_tokens = 40, .states = {{0, 3, 32}, {0, 2, 64}},
         .n_states = 2, .snapshot_tokens = 24, .caches = true},
        {.block_tokens = 2, .n_pages = 60, .n_pools = 2, .max_num_seqs = 7, .max_num_batched_tokens = 30, .windows = {3, 7}, .n_layers = 2,
         .states = {{0, 5, 32}}, .n_states = 1, .snapshot_tokens = 16, .caches = true, .policy = POLICY_PRIORITY},
        {.block_tokens = 4, .n_pages = 28, .n_pools = 2, .max_num_seqs = 8, .max_num_batched_tokens = 16, .caches = true, .only_beams = true},
        {.block_tokens = 4, .n_pages = 28, .n_pools = 2, .max_num_seqs = 10, .max_num_batched_tokens = 20, .caches = false},
    };
    trace_run_all(SETUPS, sizeof SETUPS / sizeof *SETUPS, 40000, look_at_trace);
}

struct bench {
    struct fake fake;
    struct engine *engine;
    struct job *jobs[16];
    uint32_t n_jobs;
};

static void open_bench(struct bench *b, uint32_t n_pages, uint32_t max_num_batched_tokens)
{
    const struct setup setup = {.block_tokens = 4, .n_pages = n_pages, .n_pools = 2, .max_num_seqs = 16,
                                .max_num_batched_tokens = max_num_batched_tokens, .caches = true};
    struct err err;
    *b = (struct bench){0};
    b->engine = fake_engine(&setup, &b->fake, &err);
    if (!b->engine)
        CHECK_FAIL("%s", err.message);
}

static void add(struct bench *b, uint32_t stream, uint32_t n_prompt, uint32_t n_new)
{
    struct job *job = b->jobs[b->n_jobs++] = plain_job(&b->fake, stream, n_prompt, n_new);
    expect(job);
    submit_job(b->engine, job);
}

static void step(struct bench *b)
{
    struct err err;
    bool progressed;
    CHECK_OK(engine_step(b->engine, &progressed, &err));
    CHECK_OK(engine_check(b->engine, &err));
}

static uint32_t n_in_pool(const struct bench *b, uint32_t pool)
{
    return b->engine->scheduler.pools[pool].n_running;
}

static void close_bench(struct bench *b)
{
    drain(b->engine, b->jobs, b->n_jobs);
    for (uint32_t i = 0; i < b->n_jobs; i++)
        free(b->jobs[i]);
    fake_close(b->engine, &b->fake);
}

TEST(sequences_are_spread_over_the_pools)
{
    struct bench b;
    open_bench(&b, 60, 64);
    for (uint32_t i = 0; i < 6; i++)
        add(&b, i, 5, 8);
    step(&b);
    CHECK_EQ(n_in_pool(&b, 0), 3);
    CHECK_EQ(n_in_pool(&b, 1), 3);
    close_bench(&b);
}

/* The pool with the beginning of a prompt gets it, up to some more sequences than the other pool has. */
TEST(a_prompt_goes_where_its_beginning_is)
{
    struct bench b;
    struct engine_stats stats;
    open_bench(&b, 90, 96);
    add(&b, 1, 4, 40);
    add(&b, 7, 40, 12);
    step(&b);
    CHECK(n_in_pool(&b, 0) == 1 && n_in_pool(&b, 1) == 1);
    for (uint32_t i = 0; i < 7; i++)
        add(&b, 7, 40, 12);
    step(&b);
    CHECK_EQ(n_in_pool(&b, 0), 3); /* the first of them computes the beginning once more */
    CHECK_EQ(n_in_pool(&b, 1), 6);
    engine_stats(b.engine, &stats);
    CHECK_EQ(stats.prefix_cache_hits, 5 * 39 + 36);
    close_bench(&b);
}

/* The long prompt at the head of the queue does not fit beside what runs in the pool with fewer sequences: it takes the other. */
TEST(a_full_pool_gives_way_to_another)
{
    struct bench b;
    open_bench(&b, 26, 96);
    add(&b, 1, 80, 8);
    add(&b, 2, 4, 60);
    add(&b, 3, 4, 60);
    step(&b);
    CHECK(n_in_pool(&b, 0) == 1 && n_in_pool(&b, 1) == 2);
    add(&b, 4, 40, 4);
    step(&b);
    CHECK_EQ(n_in_pool(&b, 1), 3);
    close_bench(&b);
}

/* Only pages of its own pool help a sequence, so only sequences of that pool are preempted for it. */
TEST(a_victim_is_of_the_same_pool)
{
    struct bench b;
    open_bench(&b, 26, 64);
    add(&b, 1, 8, 80); /* pool 0, then in turns */
    add(&b, 2, 8, 4);
    add(&b, 3, 8, 80);
    add(&b, 4, 8, 80);
    step(&b);
    struct engine_stats stats;
    do {
        step(&b);
        engine_stats(b.engine, &stats);
    } while (!stats.num_preemptions && !check_failures);
    CHECK_EQ(b.engine->scheduler.last_victim.number, b.jobs[2]->number);
    CHECK(n_in_pool(&b, 0) == 1 && n_in_pool(&b, 1) == 1);
    close_bench(&b);
}
