/* Preemption into host memory: random traces whose tokens must be those of the oracle, what comes back instead of being computed
 * again, and that every slot of host memory comes back. */
#include "bench.h"
#include "trace.h"

static void look_at_trace(const struct setup *setup, const struct engine_stats *stats)
{
    (void)setup;
    CHECK(stats->num_swaps > 0 && stats->num_swaps <= stats->num_preemptions);
    CHECK(stats->blocks_swapped_in > 0 && stats->blocks_swapped_in <= stats->blocks_swapped_out);
    CHECK_EQ(stats->host_blocks_swapped, 0);
    CHECK_EQ(stats->allocations_since_warmup, 0);
}

TEST(random_traces_with_swapping)
{
    struct setup setups[] = {
        {.block_tokens = 4, .n_pages = 26, .max_num_seqs = 6, .max_num_batched_tokens = 16, .n_host_slots = 60},
        {.block_tokens = 4, .n_pages = 26, .max_num_seqs = 6, .max_num_batched_tokens = 40, .n_host_slots = 23, .policy = POLICY_PRIORITY,
         .caches = true},
        {.block_tokens = 1, .n_pages = 110, .max_num_seqs = 5, .max_num_batched_tokens = 64, .n_host_slots = 200, .caches = true},
        {.block_tokens = 2, .n_pages = 31, .max_num_seqs = 8, .max_num_batched_tokens = 9, .windows = {6, 14}, .n_layers = 2,
         .n_host_slots = 60, .caches = true},
        {.block_tokens = 4, .n_pages = 60, .max_num_seqs = 6, .max_num_batched_tokens = 12, .windows = {0, 6}, .n_layers = 2,
         .n_host_slots = 90, .has_nan = true},
        {.block_tokens = 4, .n_pages = 50, .max_num_seqs = 6, .max_num_batched_tokens = 40, .states = {{0, 3, 32}, {0, 2, 64}},
         .n_states = 2, .snapshot_tokens = 24, .n_host_slots = 60, .caches = true},
        {.block_tokens = 2, .n_pages = 60, .max_num_seqs = 5, .max_num_batched_tokens = 30, .windows = {3, 7}, .n_layers = 2,
         .states = {{0, 5, 32}}, .n_states = 1, .snapshot_tokens = 16, .policy = POLICY_PRIORITY, .n_host_slots = 100},
        {.block_tokens = 4, .n_pages = 40, .max_num_seqs = 8, .max_num_batched_tokens = 24, .states = {{0, 3, 256}, {0, 1, 256}},
         .n_states = 2, .snapshot_tokens = 16, .has_no_attention = true, .n_host_slots = 50, .caches = true},
        {.block_tokens = 4, .n_pages = 30, .max_num_seqs = 8, .max_num_batched_tokens = 48, .states = {{0, 3, 32}}, .n_states = 1,
         .n_host_slots = 60, .no_beams = true},
    };
    for (uint32_t i = 0; i < sizeof setups / sizeof *setups; i++)
        setups[i].preemption = PREEMPTION_SWAP;
    trace_run_all(setups, sizeof setups / sizeof *setups, 24000, look_at_trace);
}

/* Two sequences that do not fit the pool together. Returns the rows computed twice. */
static uint64_t crowd(const struct setup *setup, struct engine_stats *stats)
{
    struct bench b;
    if (!bench_open(&b, setup))
        return 0;
    struct job *jobs[2] = {stream_job(&b.fake, 1, 30, 50), stream_job(&b.fake, 2, 30, 50)};
    run_jobs(&b, jobs, 2);
    *stats = stats_of(&b);
    free_jobs(jobs, 2);
    fake_close(b.engine, &b.fake);
    return stats->redone_rows;
}

TEST(a_swapped_sequence_computes_nothing_again)
{
    const struct setup SETUPS[] = {
        {.block_tokens = 4, .n_pages = 1 + MAX_LENGTH / 4, .max_num_seqs = 4, .max_num_batched_tokens = 32, .n_host_slots = 60},
        {.block_tokens = 4, .n_pages = 1 + MAX_LENGTH / 2, .max_num_seqs = 4, .max_num_batched_tokens = 32, .windows = {0, 64},
         .n_layers = 2, .n_host_slots = 60},
        {.block_tokens = 4, .n_pages = 12 + MAX_LENGTH / 4, .max_num_seqs = 4, .max_num_batched_tokens = 32, .states = {{0, 3, 32}},
         .n_states = 1, .n_host_slots = 60},
    };
    for (uint32_t i = 0; i < 2 * sizeof SETUPS / sizeof *SETUPS; i++) {
        struct setup setup = SETUPS[i / 2];
        struct engine_stats swapped, recomputed;
        setup.is_async = i % 2;
        setup.preemption = PREEMPTION_SWAP;
        CHECK_EQ(crowd(&setup, &swapped), 0);
        CHECK(swapped.num_swaps > 0 && swapped.num_swaps == swapped.num_preemptions);
        CHECK_EQ(swapped.blocks_swapped_in, swapped.blocks_swapped_out);
        setup.preemption = PREEMPTION_RECOMPUTE;
        CHECK(crowd(&setup, &recomputed) > 30);
        CHECK_EQ(recomputed.num_swaps, 0);
        if (check_failures)
            fprintf(stderr, "in setup %u\n", i);
    }
}

/* Without slots enough the sequence is computed again. */
TEST(a_victim_without_slots_is_computed_again)
{
    const struct setup setup = {.block_tokens = 4, .n_pages = 1 + MAX_LENGTH / 4, .max_num_seqs = 4, .max_num_batched_tokens = 32,
                                .n_host_slots = 5, .preemption = PREEMPTION_SWAP};
    struct engine_stats stats;
    CHECK(crowd(&setup, &stats) > 30);
    CHECK(stats.num_preemptions > 0);
    CHECK_EQ(stats.num_swaps, 0);
}

/* A sequence is swapped when a reset, an abort or a sleep comes. */
TEST(commands_meet_swapped_sequences)
{
    enum { RESET, RESET_RECOMPUTE, ABORT, SLEEP_1, SLEEP_2, N_COMMANDS };
    const struct setup setup = {.block_tokens = 4, .n_pages = 1 + MAX_LENGTH / 4, .max_num_seqs = 4, .max_num_batched_tokens = 32,
                                .n_host_slots = 60, .preemption = PREEMPTION_SWAP, .caches = true};
    for (uint32_t what = 0; what < N_COMMANDS; what++) {
        struct bench b;
        REQUIRE(bench_open(&b, &setup));
        struct job *jobs[2] = {stream_job(&b.fake, 1, 30, 50), stream_job(&b.fake, 2, 30, 50)};
        for (uint32_t i = 0; i < 2; i++)
            submit(&b, jobs[i]);
        for (uint32_t i = 0; i < 60 && !stats_of(&b).host_blocks_swapped; i++)
            step(&b, 1);
        CHECK(stats_of(&b).host_blocks_swapped > 0);
        if (what == RESET || what == RESET_RECOMPUTE)
            CHECK_OK(engine_reset_prefix_cache(b.engine, what == RESET_RECOMPUTE, &err));
        if (what == ABORT) {
            jobs[1]->may_abort = true;
            CHECK_OK(engine_abort(b.engine, &jobs[1]->number, 1, &err));
        }
        if (what >= SLEEP_1) {
            CHECK_OK(engine_sleep(b.engine, what == SLEEP_1 ? 1 : 2, PART_POOL, &err));
            CHECK_OK(engine_wake(b.engine, PART_POOL, &err));
        }
        step(&b, 1);
        bool stays = what == RESET || what == SLEEP_1, is_there = stats_of(&b).host_blocks_swapped > 0;
        CHECK(is_there == stays || stats_of(&b).blocks_swapped_in);
        drain(b.engine, jobs, 2);
        CHECK_EQ(stats_of(&b).host_blocks_swapped, 0);
        CHECK((stats_of(&b).blocks_swapped_in > 0) == stays);
        if (what == RESET) { /* neither sequence may have published a block */
            uint64_t n_hits = stats_of(&b).prefix_cache_hits;
            struct job *again = stream_job(&b.fake, 2, 31, 4);
            run_jobs(&b, &again, 1);
            CHECK_EQ(stats_of(&b).prefix_cache_hits, n_hits);
            free(again);
        }
        if (check_failures)
            fprintf(stderr, "at command %u\n", what);
        free_jobs(jobs, 2);
        fake_close(b.engine, &b.fake);
    }
}

/* With swapping, blocks without a key outlive the pool, too: here there is no prefix cache. */
TEST(running_sequences_outlive_sleep)
{
    for (uint32_t i = 0; i < 4; i++) {
        struct setup setup = {.block_tokens = 4, .n_pages = 60, .max_num_seqs = 4, .max_num_batched_tokens = 32, .n_host_slots = 60,
                              .preemption = PREEMPTION_SWAP, .is_async = i % 2, .states = {{0, 3, 32}}, .n_states = i / 2};
        struct bench b;
        REQUIRE(bench_open(&b, &setup));
        struct job *jobs[2] = {stream_job(&b.fake, 1, 30, 50), stream_job(&b.fake, 2, 30, 50)};
        for (uint32_t n = 0; n < 2; n++)
            submit(&b, jobs[n]);
        step(&b, 10);
        CHECK_OK(engine_sleep(b.engine, 1, PART_POOL, &err));
        CHECK_OK(engine_check(b.engine, &err));
        CHECK_EQ(stats_of(&b).num_running, 0);
        CHECK_OK(engine_wake(b.engine, PART_POOL, &err));
        drain(b.engine, jobs, 2);
        CHECK_EQ(stats_of(&b).num_swaps, 2);
        CHECK_EQ(stats_of(&b).redone_rows, 0);
        if (check_failures)
            fprintf(stderr, "in case %u\n", i);
        free_jobs(jobs, 2);
        fake_close(b.engine, &b.fake);
    }
}

/* Copies that take no time always win; of those that take an hour a page, only the first, which measures. */
TEST(the_cheaper_way_is_chosen)
{
    const struct setup setup = {.block_tokens = 4, .n_pages = 1 + MAX_LENGTH / 4, .max_num_seqs = 4, .max_num_batched_tokens = 64,
                                .n_host_slots = 60};
    for (uint32_t i = 0; i < 2; i++) {
        struct bench b;
        REQUIRE(bench_open(&b, &setup));
        b.fake.move_s = i * 3600.0;
        struct job *jobs[3] = {stream_job(&b.fake, 1, 30, 50), stream_job(&b.fake, 2, 30, 50), stream_job(&b.fake, 3, 30, 50)};
        run_jobs(&b, jobs, 3);
        struct engine_stats stats = stats_of(&b);
        CHECK(stats.num_preemptions > 1);
        CHECK_EQ(stats.num_swaps, i ? 1 : stats.num_preemptions);
        CHECK_EQ(stats.redone_rows > 0, i);
        free_jobs(jobs, 3);
        fake_close(b.engine, &b.fake);
    }
}
