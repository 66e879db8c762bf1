/* Random traces: submissions, steps, aborts, resets and takes in any order over many kinds of engines, the invariants walked
 * after every operation, every token, logprob and finish compared with the oracle. */
#include "trace.h"

/* The trace has gone where it should. */
static void look_at_trace(const struct setup *setup, const struct engine_stats *stats)
{
    CHECK((stats->wasted_rows > 0) == setup->is_async);
    CHECK(setup->has_no_attention || stats->num_preemptions > 0);
    CHECK(!setup->caches || stats->prefix_cache_hits > 0);
    CHECK(!setup->caches || stats->evictions > 0);
}

TEST(random_traces)
{
    const struct setup SETUPS[] = {
        {.block_tokens = 4, .n_pages = 26, .max_num_seqs = 6, .max_num_batched_tokens = 16, .caches = true},
        {.block_tokens = 16, .n_pages = 12, .max_num_seqs = 4, .max_num_batched_tokens = 7, .caches = true, .has_nan = true},
        {.block_tokens = 1, .n_pages = 110, .max_num_seqs = 5, .max_num_batched_tokens = 64, .caches = true},
        {.block_tokens = 4, .n_pages = 40, .max_num_seqs = 8, .max_num_batched_tokens = 8, .caches = false},
        {.block_tokens = 4, .n_pages = 60, .max_num_seqs = 6, .max_num_batched_tokens = 12, .windows = {0, 6}, .n_layers = 2, .caches = true},
        {.block_tokens = 2, .n_pages = 40, .max_num_seqs = 5, .max_num_batched_tokens = 9, .windows = {3, 7}, .n_layers = 2, .caches = true},
        {.block_tokens = 3, .n_pages = 105, .max_num_seqs = 6, .max_num_batched_tokens = 200, .windows = {1, 0, 10}, .n_layers = 3,
         .caches = true, .policy = POLICY_PRIORITY, .has_nan = true},
        {.block_tokens = 1, .n_pages = 104, .max_num_seqs = 7, .max_num_batched_tokens = 7, .caches = true, .policy = POLICY_PRIORITY},
        {.block_tokens = 8, .n_pages = 13, .max_num_seqs = 8, .max_num_batched_tokens = 8, .caches = true, .policy = POLICY_PRIORITY},
        {.block_tokens = 4, .n_pages = 30, .max_num_seqs = 8, .max_num_batched_tokens = 10, .caches = true, .policy = POLICY_PRIORITY},
        {.block_tokens = 4, .n_pages = 50, .max_num_seqs = 6, .max_num_batched_tokens = 40, .states = {{0, 3, 32}, {0, 2, 64}}, .n_states = 2,
         .snapshot_tokens = 24, .caches = true},
        {.block_tokens = 4, .n_pages = 30, .max_num_seqs = 6, .max_num_batched_tokens = 16, .states = {{0, 3, 32}, {0, 2, 64}}, .n_states = 2,
         .snapshot_tokens = 32, .caches = true, .has_nan = true},
        {.block_tokens = 2, .n_pages = 60, .max_num_seqs = 5, .max_num_batched_tokens = 30, .windows = {3, 7}, .n_layers = 2,
         .states = {{0, 5, 32}}, .n_states = 1, .snapshot_tokens = 16, .caches = true, .policy = POLICY_PRIORITY},
        {.block_tokens = 3, .n_pages = 90, .max_num_seqs = 6, .max_num_batched_tokens = 200, .windows = {0, 10}, .n_layers = 2,
         .states = {{0, 1, 64}}, .n_states = 1, .snapshot_tokens = 20, .caches = true, .policy = POLICY_PRIORITY},
        {.block_tokens = 4, .n_pages = 40, .max_num_seqs = 8, .max_num_batched_tokens = 24, .states = {{0, 3, 256}, {0, 1, 256}}, .n_states = 2,
         .snapshot_tokens = 16, .caches = true, .has_no_attention = true},
        {.block_tokens = 4, .n_pages = 14, .max_num_seqs = 8, .max_num_batched_tokens = 24, .states = {{0, 3, 256}, {0, 1, 256}}, .n_states = 2,
         .snapshot_tokens = 16, .caches = true, .has_no_attention = true},
        {.block_tokens = 4, .n_pages = 40, .max_num_seqs = 6, .max_num_batched_tokens = 16, .states = {{0, 3, 32}}, .n_states = 1,
         .caches = false},
    };
    trace_run_all(SETUPS, sizeof SETUPS / sizeof *SETUPS, 100000, look_at_trace);
}

static struct job *greedy_job(const struct fake *fake, uint32_t stream, uint32_t n_prompt, uint32_t n_new, int64_t priority)
{
    struct job *job = stream_job(fake, stream, n_prompt, n_new);
    job->spec.temperature = 0;
    job->spec.priority = priority;
    expect(job);
    return job;
}

/* Two twins decode the same tokens, and an urgent prompt, which is computed in pieces, takes the pages of the second. Later a
 * prompt that goes on behind the twins' text looks for their blocks. Returns how many blocks' ends the victim lost in its last
 * step: those were published, and were never computed. */
static uint32_t preempt_a_twin(uint32_t n_pages, uint32_t n_steps, uint32_t n_urgent)
{
    const struct setup setup = {.block_tokens = 4, .n_pages = n_pages, .max_num_seqs = 5, .max_num_batched_tokens = 9,
                                .windows = {0, 24}, .n_layers = 2, .caches = true, .policy = POLICY_PRIORITY};
    struct fake fake;
    struct err err;
    struct engine_stats stats = {0};
    bool progressed = true;
    struct engine *engine = fake_engine(&setup, &fake, &err);
    if (!engine) {
        CHECK_FAIL("%s", err.message);
        return 0;
    }
    struct job *jobs[4] = {greedy_job(&fake, 1, 9, 60, 1), greedy_job(&fake, 1, 9, 60, 1), greedy_job(&fake, 2, n_urgent, 1, 0),
                           greedy_job(&fake, 1, 9, 3, 0)};
    submit_job(engine, jobs[0]);
    submit_job(engine, jobs[1]);
    for (uint32_t i = 0; i < n_steps; i++)
        CHECK_OK(engine_step(engine, &progressed, &err));
    submit_job(engine, jobs[2]);
    while (!stats.num_preemptions && progressed && !check_failures) {
        CHECK_OK(engine_step(engine, &progressed, &err));
        take_all(engine, false, jobs, 4);
        engine_stats(engine, &stats);
    }
    uint32_t n_known = 9 + jobs[1]->n_received[0], lost = stats.num_preemptions && !jobs[1]->is_done && n_known % 4 == 0;
    memcpy(jobs[3]->prompt + 9, jobs[1]->expected[0].ids, 60 * sizeof(int32_t)); /* the prompt and its continuation */
    jobs[3]->spec.prompt.n = n_known + 1 < 69 ? n_known + 1 : 69;
    expect(jobs[3]);
    submit_job(engine, jobs[3]);
    drain(engine, jobs, 4);
    for (uint32_t i = 0; i < 4; i++)
        free(jobs[i]);
    fake_close(engine, &fake);
    return lost;
}

/* Blocks that a victim has published in the step of its preemption were not computed: no request may find them. */
TEST(a_victim_withdraws_the_block_of_its_last_step)
{
    uint32_t n_lost = 0;
    for (uint32_t n_pages = 40; n_pages <= 56; n_pages++)
        for (uint32_t n_steps = 4; n_steps <= 24 && !check_failures; n_steps += 2)
            for (uint32_t n_urgent = 36; n_urgent <= 92 && !check_failures; n_urgent += 8)
                n_lost += preempt_a_twin(n_pages, n_steps, n_urgent);
    CHECK(n_lost > 100);
}
