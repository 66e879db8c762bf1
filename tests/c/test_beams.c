/* Random traces of beam searches: forks, drops, preemptions, aborts and resets in tight pools and with fewer slots than beams. The
 * invariants are walked after every operation, and every text is compared with that of a plain search that copies whole beams. */
#include "trace.h"

/* The trace has gone where it should. */
static void look_at_trace(const struct setup *setup, const struct engine_stats *stats)
{
    CHECK(stats->num_preemptions > 0);
    CHECK(!setup->caches || stats->prefix_cache_hits > 0);
    CHECK(!setup->has_nan || stats->finished[FINISH_ERROR] > 0);
}

TEST(random_traces_of_beams)
{
    struct setup setups[] = {
        {.block_tokens = 4, .n_pages = 26, .max_num_seqs = 6, .max_num_batched_tokens = 16, .caches = true},
        {.block_tokens = 16, .n_pages = 9, .max_num_seqs = 3, .max_num_batched_tokens = 7, .caches = true, .has_nan = true},
        {.block_tokens = 1, .n_pages = 98, .max_num_seqs = 5, .max_num_batched_tokens = 64, .caches = true, .policy = POLICY_PRIORITY},
        {.block_tokens = 4, .n_pages = 26, .max_num_seqs = 1, .max_num_batched_tokens = 8, .caches = false},
        {.block_tokens = 2, .n_pages = 40, .max_num_seqs = 5, .max_num_batched_tokens = 9, .windows = {3, 7}, .n_layers = 2, .caches = true},
        {.block_tokens = 4, .n_pages = 60, .max_num_seqs = 6, .max_num_batched_tokens = 12, .windows = {0, 6}, .n_layers = 2, .caches = true,
         .policy = POLICY_PRIORITY, .has_nan = true},
        {.block_tokens = 4, .n_pages = 30, .max_num_seqs = 6, .max_num_batched_tokens = 16, .states = {{0, 3, 32}, {0, 2, 64}}, .n_states = 2,
         .snapshot_tokens = 32, .caches = true},
        {.block_tokens = 4, .n_pages = 14, .max_num_seqs = 8, .max_num_batched_tokens = 24, .states = {{0, 3, 256}, {0, 1, 256}}, .n_states = 2,
         .snapshot_tokens = 16, .caches = true, .has_no_attention = true},
    };
    for (uint32_t i = 0; i < sizeof setups / sizeof *setups; i++)
        setups[i].only_beams = true;
    trace_run_all(setups, sizeof setups / sizeof *setups, 24000, look_at_trace);
}

static struct job *beams_of(const struct fake *fake, uint32_t n_prompt, uint32_t n_new, uint32_t width)
{
    struct job *job = stream_job(fake, 3, n_prompt, n_new);
    struct request_spec *spec = &job->spec;
    spec->is_beam_search = spec->wants_logprobs = true;
    spec->n = width;
    spec->n_logprobs = 2 * width;
    spec->mode = LOGPROB_PROCESSED;
    spec->temperature = 0;
    spec->seed = 0;
    spec->length_penalty = 1;
    expect(job);
    return job;
}

/* Steps, rows and copies of a search alone in a roomy pool. Returns the number of preemptions. */
static uint64_t run_alone(uint32_t n_pages, uint32_t max_num_seqs, uint32_t width, uint64_t *n_rows, uint64_t *n_copies)
{
    const struct setup setup = {.block_tokens = 16, .n_pages = n_pages, .max_num_seqs = max_num_seqs, .max_num_batched_tokens = 64,
                                .caches = true};
    struct fake fake;
    struct err err;
    struct engine_stats stats = {0};
    struct engine *engine = fake_engine(&setup, &fake, &err);
    if (!engine) {
        CHECK_FAIL("%s", err.message);
        return 0;
    }
    struct job *job = beams_of(&fake, 40, 20, width);
    submit_job(engine, job);
    drain(engine, &job, 1);
    engine_stats(engine, &stats);
    *n_rows = fake.n_rows;
    *n_copies = fake.n_copies;
    CHECK_EQ(fake.n_most_in_flight, 1);
    free(job);
    fake_close(engine, &fake);
    return stats.num_preemptions;
}

/* A search computes a prompt once and then one row a beam and length; forks copy at most a page each. */
TEST(beams_share_their_pages)
{
    uint64_t n_rows, n_copies;
    CHECK_EQ(run_alone(64, 8, 4, &n_rows, &n_copies), 0);
    CHECK_EQ(n_rows, 40 + 4 * 19);
    CHECK(n_copies > 0 && n_copies <= 3 * 19);
    CHECK_EQ(run_alone(64, 8, 1, &n_rows, &n_copies), 0);
    CHECK_EQ(n_rows, 40 + 19);
    CHECK_EQ(n_copies, 0);
}

/* In a pool of one sequence, or with one slot, beams take turns. */
TEST(beams_take_turns_where_room_is_short)
{
    uint64_t n_rows, n_copies;
    CHECK(run_alone(7, 8, 4, &n_rows, &n_copies) > 10);
    CHECK(n_rows > 40 + 4 * 19);
    CHECK(run_alone(64, 1, 4, &n_rows, &n_copies) > 10);
}
