/* Engines with a host tier: random traces whose tokens must be those of the oracle, with moves carried out as late as the engine
 * allows; and what the tier finds again. */
#include "trace.h"

static void look_at_trace(const struct setup *setup, const struct engine_stats *stats)
{
    (void)setup;
    CHECK(stats->evictions > 0);
    CHECK(stats->host_cache_hits > 0);
    CHECK(stats->host_stored_bytes > 0 && stats->host_loaded_bytes > 0);
}

TEST(random_traces_with_a_host_tier)
{
    struct setup setups[] = {
        {.block_tokens = 4, .n_pages = 26, .max_num_seqs = 6, .max_num_batched_tokens = 16, .n_host_slots = 40},
        {.block_tokens = 4, .n_pages = 26, .max_num_seqs = 6, .max_num_batched_tokens = 40, .n_host_slots = 7, .policy = POLICY_PRIORITY},
        {.block_tokens = 1, .n_pages = 110, .max_num_seqs = 5, .max_num_batched_tokens = 64, .n_host_slots = 200},
        {.block_tokens = 2, .n_pages = 40, .max_num_seqs = 5, .max_num_batched_tokens = 9, .windows = {3, 7}, .n_layers = 2, .n_host_slots = 40},
        {.block_tokens = 4, .n_pages = 60, .max_num_seqs = 6, .max_num_batched_tokens = 12, .windows = {0, 6}, .n_layers = 2, .n_host_slots = 90,
         .has_nan = true},
        {.block_tokens = 4, .n_pages = 50, .max_num_seqs = 6, .max_num_batched_tokens = 40, .states = {{0, 3, 32}, {0, 2, 64}}, .n_states = 2,
         .snapshot_tokens = 24, .n_host_slots = 60},
        {.block_tokens = 2, .n_pages = 60, .max_num_seqs = 5, .max_num_batched_tokens = 30, .windows = {3, 7}, .n_layers = 2,
         .states = {{0, 5, 32}}, .n_states = 1, .snapshot_tokens = 16, .policy = POLICY_PRIORITY, .n_host_slots = 100},
        {.block_tokens = 4, .n_pages = 40, .max_num_seqs = 8, .max_num_batched_tokens = 24, .states = {{0, 3, 256}, {0, 1, 256}}, .n_states = 2,
         .snapshot_tokens = 16, .has_no_attention = true, .n_host_slots = 50},
    };
    for (uint32_t i = 0; i < sizeof setups / sizeof *setups; i++)
        setups[i].caches = true;
    trace_run_all(setups, sizeof setups / sizeof *setups, 24000, look_at_trace);
}

static void look_at_loads(const struct setup *setup, const struct engine_stats *stats)
{
    look_at_trace(setup, stats);
    CHECK(stats->skipped_loads > 0 && stats->skipped_load_tokens >= stats->skipped_loads * setup->block_tokens);
}

/* Copies take nothing, or an hour a page. */
static void change_times(struct trace *t)
{
    if (check_below(&t->random, 20) == 0)
        t->fake.move_s = check_below(&t->random, 2) * 3600.0;
}

TEST(random_traces_in_which_loads_are_dear_at_times)
{
    struct setup setups[] = {
        {.block_tokens = 4, .n_pages = 30, .max_num_seqs = 6, .max_num_batched_tokens = 64, .n_host_slots = 40},
        {.block_tokens = 4, .n_pages = 60, .max_num_seqs = 6, .max_num_batched_tokens = 64, .windows = {0, 6}, .n_layers = 2,
         .n_host_slots = 90},
        {.block_tokens = 4, .n_pages = 50, .max_num_seqs = 6, .max_num_batched_tokens = 64, .states = {{0, 3, 32}, {0, 2, 64}},
         .n_states = 2, .snapshot_tokens = 24, .n_host_slots = 60},
    };
    for (uint32_t i = 0; i < sizeof setups / sizeof *setups; i++) {
        setups[i].caches = setups[i].loads_by_cost = true;
        setups[i].between = change_times;
    }
    trace_run_all(setups, sizeof setups / sizeof *setups, 2000, look_at_loads);
}

static void run_steps(struct engine *engine, uint32_t n)
{
    struct err err;
    bool progressed;
    for (uint32_t i = 0; i < n; i++) {
        CHECK_OK(engine_step(engine, &progressed, &err));
        CHECK_OK(engine_check(engine, &err));
    }
}

static struct job *expected_job(const struct fake *fake, uint32_t stream, uint32_t n_prompt, uint32_t n_new)
{
    struct job *job = stream_job(fake, stream, n_prompt, n_new);
    expect(job);
    return job;
}

/* Two sequences run and one has ended when the pool loses its contents. With copies at level 1, all of them go on from there. */
static uint64_t sleep_amid(const struct setup *setup, uint32_t level, uint64_t *n_rows)
{
    struct fake fake;
    struct err err;
    struct engine_stats stats;
    struct engine *engine = fake_engine(setup, &fake, &err);
    struct job *jobs[4] = {expected_job(&fake, 1, 60, 4), expected_job(&fake, 2, 50, 30), expected_job(&fake, 3, 40, 30),
                           expected_job(&fake, 1, 61, 4)};
    submit_job(engine, jobs[0]);
    while (engine_has_unfinished(engine) && !check_failures)
        run_steps(engine, 1);
    submit_job(engine, jobs[1]);
    submit_job(engine, jobs[2]);
    run_steps(engine, 12);
    uint64_t before = fake.n_rows;
    CHECK_OK(engine_sleep(engine, level, PART_POOL, &err));
    CHECK_OK(engine_check(engine, &err));
    CHECK_OK(engine_wake(engine, PART_POOL, &err));
    submit_job(engine, jobs[3]);
    drain(engine, jobs, 4);
    *n_rows = fake.n_rows - before;
    engine_stats(engine, &stats);
    for (uint32_t i = 0; i < 4; i++) {
        CHECK(jobs[i]->is_done);
        free(jobs[i]);
    }
    fake_close(engine, &fake);
    return stats.host_cache_hits;
}

TEST(the_cache_outlives_sleep)
{
    const struct setup SETUPS[] = {
        {.block_tokens = 4, .n_pages = 80, .max_num_seqs = 4, .max_num_batched_tokens = 32, .caches = true, .n_host_slots = 80},
        {.block_tokens = 4, .n_pages = 120, .max_num_seqs = 4, .max_num_batched_tokens = 32, .caches = true, .n_host_slots = 120,
         .windows = {0, 6}, .n_layers = 2},
        {.block_tokens = 4, .n_pages = 120, .max_num_seqs = 4, .max_num_batched_tokens = 32, .caches = true, .n_host_slots = 120,
         .states = {{0, 3, 32}}, .n_states = 1, .snapshot_tokens = 16},
    };
    for (uint32_t i = 0; i < 2 * sizeof SETUPS / sizeof *SETUPS; i++) {
        struct setup setup = SETUPS[i / 2];
        uint64_t n_kept, n_lost;
        setup.is_async = i % 2;
        setup.preemption = PREEMPTION_RECOMPUTE; /* only findable blocks outlive the pool */
        CHECK(sleep_amid(&setup, 1, &n_kept) > 60);
        CHECK_EQ(sleep_amid(&setup, 2, &n_lost), 0);
        CHECK(n_kept + 100 < n_lost);
        if (check_failures)
            fprintf(stderr, "in setup %u: %llu rows, %llu without copies\n", i, (unsigned long long)n_kept, (unsigned long long)n_lost);
    }
}

/* What a reset makes unfindable stays so in the tier, too. */
TEST(a_reset_empties_the_tier)
{
    const struct setup setup = {.block_tokens = 4, .n_pages = 80, .max_num_seqs = 4, .max_num_batched_tokens = 32, .caches = true,
                                .n_host_slots = 80};
    for (uint32_t resets = 0; resets < 2; resets++) {
        struct fake fake;
        struct err err;
        struct engine_stats stats;
        struct engine *engine = fake_engine(&setup, &fake, &err);
        struct job *jobs[2] = {expected_job(&fake, 1, 60, 4), expected_job(&fake, 1, 60, 4)};
        submit_job(engine, jobs[0]);
        while (engine_has_unfinished(engine) && !check_failures)
            run_steps(engine, 1);
        CHECK_OK(engine_sleep(engine, 1, PART_POOL, &err));
        CHECK_OK(engine_wake(engine, PART_POOL, &err));
        if (resets)
            CHECK_OK(engine_reset_prefix_cache(engine, false, &err));
        submit_job(engine, jobs[1]);
        drain(engine, jobs, 2);
        engine_stats(engine, &stats);
        CHECK_EQ(stats.host_cache_hits, resets ? 0 : 60);
        free(jobs[0]);
        free(jobs[1]);
        fake_close(engine, &fake);
    }
}
