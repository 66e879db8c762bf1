/* Decisions of policy, which do not affect correctness: admission, preemption, and the order of evicted pages. Outputs are the same
 * for any decision, but docs/develop/engine.md promises these. */
#include "bench.h"

#include "../../csrc/engine/block_manager.h"

static const struct setup PAGES_25 = {.block_tokens = 4, .n_pages = 26, .max_num_seqs = 8, .max_num_batched_tokens = 96, .caches = true};
static const struct setup HYBRID = {.block_tokens = 4, .n_pages = 40, .max_num_seqs = 8, .max_num_batched_tokens = 96, .caches = true,
                                    .states = {{0, 3, 32}, {0, 2, 64}}, .n_states = 2, .snapshot_tokens = 32};

/* ---- admission ---- */

/* Of 200 pages 2 stay free while others run. */
TEST(a_watermark_stays_free_at_admission)
{
    const struct setup setup = {.block_tokens = 1, .n_pages = 201, .max_num_seqs = 8, .max_num_batched_tokens = 200, .caches = true};
    for (uint32_t n_prompt = 18; n_prompt < 20; n_prompt++) {
        struct bench b;
        REQUIRE(bench_open(&b, &setup));
        struct job *jobs[3] = {stream_job(&b.fake, 1, 90, 2), stream_job(&b.fake, 2, 90, 2), stream_job(&b.fake, 3, n_prompt, 2)};
        for (uint32_t i = 0; i < 3; i++)
            submit(&b, jobs[i]);
        step(&b, 1);
        CHECK_EQ(stats_of(&b).num_running, n_prompt == 18 ? 3 : 2);
        bench_close(&b, jobs, 3);
    }
}

/* A sequence that takes every page is served when it is alone. */
TEST(no_watermark_is_kept_from_a_sequence_that_is_alone)
{
    const struct setup setup = {.block_tokens = 2, .n_pages = 193, .max_num_seqs = 2, .max_num_batched_tokens = 96, .caches = true,
                                .windows = {0, 93, 94, 95}, .n_layers = 4};
    struct bench b;
    REQUIRE(bench_open(&b, &setup));
    struct job *job = stream_job(&b.fake, 1, 95, 1);
    submit(&b, job);
    bench_close(&b, &job, 1);
}

/* The first prompt stops at a snapshot with rows left; what it still owes is not given to the second. */
TEST(pages_still_owed_to_a_running_prompt_are_kept_for_it)
{
    struct bench b;
    REQUIRE(bench_open(&b, &HYBRID));
    struct job *jobs[2] = {stream_job(&b.fake, 1, 90, 1), stream_job(&b.fake, 2, 40, 1)};
    submit(&b, jobs[0]);
    submit(&b, jobs[1]);
    step(&b, 1);
    CHECK_EQ(stats_of(&b).prompt_rows, 32);
    CHECK_EQ(stats_of(&b).num_running, 1); /* 8 + 4 of 39 pages are taken, 15 owed; the second prompt takes 10 + 4 */
    bench_close(&b, jobs, 2);
}

/* Three pages are left beside the first request: one for the prompt of the second, one for each of two samples beside its first. */
TEST(a_sample_comes_in_with_room_for_its_next_row)
{
    struct bench b;
    REQUIRE(bench_open(&b, &PAGES_25));
    struct job *jobs[2] = {stream_job(&b.fake, 1, 85, 3), stream_job(&b.fake, 2, 4, 3)};
    jobs[1]->spec.n = 4;
    submit(&b, jobs[0]);
    submit(&b, jobs[1]);
    step(&b, 1);
    CHECK_EQ(stats_of(&b).num_running, 4);
    CHECK_EQ(stats_of(&b).num_waiting, 1);
    bench_close(&b, jobs, 2);
}

/* What did not fit comes in when enough pages are free again, while another request goes on. */
TEST(a_waiting_sequence_is_tried_again)
{
    struct bench b;
    REQUIRE(bench_open(&b, &PAGES_25));
    struct job *jobs[3] = {stream_job(&b.fake, 1, 40, 20), stream_job(&b.fake, 2, 40, 2), stream_job(&b.fake, 3, 36, 2)};
    for (uint32_t i = 0; i < 3; i++)
        submit(&b, jobs[i]);
    step(&b, 1);
    CHECK_EQ(stats_of(&b).num_running, 2);
    step(&b, 2);
    CHECK_EQ(stats_of(&b).num_running, 2);
    CHECK_EQ(stats_of(&b).num_waiting, 0);
    CHECK(!jobs[0]->is_done);
    bench_close(&b, jobs, 3);
}

/* ---- rows ---- */

/* A request behind in rank has begun to generate when one ahead of it comes with a long prompt. It goes on with a token a step,
 * until the last pages are wanted for the prompt; what it got in that step does not count. */
TEST(tokens_come_before_prompts_and_a_victim_is_counted_once)
{
    struct bench b;
    struct setup setup = PAGES_25;
    setup.max_num_batched_tokens = 16;
    setup.policy = POLICY_PRIORITY;
    REQUIRE(bench_open(&b, &setup));
    struct job *jobs[2] = {stream_job(&b.fake, 1, 16, 20), stream_job(&b.fake, 2, 80, 2)};
    jobs[0]->spec.priority = 1;
    submit(&b, jobs[0]);
    step(&b, 2);
    CHECK_EQ(stats_of(&b).generation_tokens, 2);
    submit(&b, jobs[1]);
    for (uint32_t i = 0; i < 4; i++) {
        step(&b, 1);
        CHECK_EQ(stats_of(&b).num_running, 2);
        CHECK_EQ(stats_of(&b).generation_tokens, 3 + i);
    }
    while (engine_has_unfinished(b.engine) && !check_failures)
        step(&b, 1);
    struct engine_stats stats = stats_of(&b);
    CHECK(stats.num_preemptions > 0);
    CHECK_EQ(stats.prompt_rows, 16 + 80);
    CHECK_EQ(stats.decode_rows, 19 + 1);
    CHECK_EQ(stats.prompt_rows + stats.decode_rows + stats.redone_rows, b.fake.n_rows);
    bench_close(&b, jobs, 2);
}

/* ---- preemption ---- */

/* How often each request was preempted, by number - 1, once all have ended. */
static void count_preemptions(struct bench *b, uint32_t *counts)
{
    struct output output[4];
    uint32_t n;
    do {
        CHECK_OK(engine_take(b->engine, true, output, 4, &n, &err));
        for (uint32_t i = 0; i < n; i++)
            counts[output[i].request - 1] = output[i].n_preemptions;
    } while (n);
}

/* Three requests grow until the pages of two do; the last two pay, the last one first. */
TEST(the_sequence_furthest_behind_is_preempted)
{
    struct bench b;
    uint32_t counts[3] = {9, 9, 9};
    REQUIRE(bench_open(&b, &PAGES_25));
    struct job *jobs[3];
    for (uint32_t i = 0; i < 3; i++) {
        jobs[i] = stream_job(&b.fake, i + 1, 20, 28);
        submit(&b, jobs[i]);
    }
    while (!stats_of(&b).num_preemptions && !check_failures)
        step(&b, 1);
    CHECK_EQ(stats_of(&b).num_running, 2);
    while (engine_has_unfinished(b.engine) && !check_failures)
        step(&b, 1);
    count_preemptions(&b, counts);
    CHECK_EQ(counts[0], 0);
    CHECK_EQ(counts[1], 0);
    CHECK_EQ(counts[2], 1);
    for (uint32_t i = 0; i < 3; i++)
        free(jobs[i]);
    fake_close(b.engine, &b.fake);
}

/* How often a crowd of five is preempted in a pool of so many pages. */
static uint64_t crowd_preemptions(uint32_t n_pages, bool caches)
{
    struct bench b;
    struct job *jobs[5];
    struct setup setup = HYBRID;
    setup.caches = caches;
    setup.n_pages = n_pages;
    if (!bench_open(&b, &setup))
        return 0;
    for (uint32_t i = 0; i < 5; i++) {
        jobs[i] = stream_job(&b.fake, i + 1, 6 + i, 24);
        submit(&b, jobs[i]);
    }
    while (engine_has_unfinished(b.engine) && !check_failures)
        step(&b, 1);
    uint64_t n = stats_of(&b).num_preemptions;
    CHECK_EQ(stats_of(&b).state_snapshots_taken > 0, caches);
    bench_close(&b, jobs, 5);
    return n;
}

/* With snapshots as often as without any, in pools that are tight in many ways. */
TEST(no_sequence_is_preempted_for_a_snapshot)
{
    for (uint32_t n_pages = 32; n_pages < 66; n_pages++)
        CHECK_EQ(crowd_preemptions(n_pages, true), crowd_preemptions(n_pages, false));
}

/* ---- pages ---- */

TEST(without_a_prefix_cache_nothing_is_kept)
{
    struct bench b;
    struct setup setup = PAGES_25;
    setup.caches = false;
    REQUIRE(bench_open(&b, &setup));
    struct job *job = stream_job(&b.fake, 1, 40, 8);
    submit(&b, job);
    while (engine_has_unfinished(b.engine) && !check_failures) {
        step(&b, 1);
        CHECK_EQ(stats_of(&b).kv_blocks_cached, 0);
    }
    CHECK_EQ(stats_of(&b).evictions, 0);
    bench_close(&b, &job, 1);
}

TEST(the_page_released_last_is_taken_first)
{
    struct block_manager *manager;
    int32_t pages[3];
    REQUIRE_OK(block_manager_create(10, 0, &manager, &err));
    for (uint32_t i = 0; i < 3; i++)
        pages[i] = block_manager_take(manager);
    for (uint32_t i = 0; i < 3; i++)
        block_manager_release(manager, pages[i]);
    for (uint32_t i = 3; i-- > 0;)
        CHECK_EQ(block_manager_take(manager), pages[i]);
    block_manager_destroy(manager);
}

/* A request goes on from a snapshot that another one made while it generated. From then on the other one's next snapshot does
 * not replace it. */
TEST(a_snapshot_that_was_hit_is_kept)
{
    struct bench b;
    struct setup setup = HYBRID;
    setup.n_pages = 120;
    REQUIRE(bench_open(&b, &setup));
    struct job *first = stream_job(&b.fake, 1, 8, 60), *jobs[3] = {first};
    submit(&b, first);
    step(&b, 11); /* 17 positions are computed: the newest snapshot stands behind 16 */
    CHECK_EQ(stats_of(&b).decode_rows, 9);
    for (uint32_t i = 1; i < 3; i++) {
        jobs[i] = stream_job(&b.fake, 1, 17, 1);
        for (uint32_t at = 8; at < 17; at++)
            jobs[i]->prompt[at] = first->expected[0].ids[at - 8];
    }
    submit(&b, jobs[1]);
    step(&b, 30);
    uint64_t n_hits = stats_of(&b).prefix_cache_hits;
    CHECK_EQ(n_hits, 16);
    submit(&b, jobs[2]);
    step(&b, 1);
    CHECK_EQ(stats_of(&b).prefix_cache_hits - n_hits, 16);
    bench_close(&b, jobs, 3);
}
