/* Two steps in flight: rows that may be enqueued before the previous step's results arrive, and their fate if those results
 * end a sequence. The traces of test_scheduler.c check that every token is the same. */
#include "bench.h"

static const struct setup SETUP = {.block_tokens = 4, .n_pages = 60, .max_num_seqs = 8, .max_num_batched_tokens = 16, .caches = true,
                                   .is_async = true};

TEST(no_row_behind_max_tokens_is_enqueued)
{
    struct bench b;
    REQUIRE(bench_open(&b, &SETUP));
    for (uint32_t n_new = 1; n_new < 6; n_new++) {
        struct job *job = plain_job(&b.fake, n_new, 9, n_new);
        uint64_t rows = b.fake.n_rows;
        run_jobs(&b, &job, 1);
        CHECK_EQ(b.fake.n_rows - rows, 9 + n_new - 1);
        free(job);
    }
    struct job *job = plain_job(&b.fake, 9, MAX_LENGTH - 3, UINT32_MAX); /* max_model_len ends it */
    uint64_t rows = b.fake.n_rows;
    run_jobs(&b, &job, 1);
    CHECK_EQ(b.fake.n_rows - rows, MAX_LENGTH - 1);
    CHECK_EQ(stats_of(&b).wasted_rows, 0);
    CHECK_EQ(b.fake.n_most_in_flight, 2);
    free(job);
    fake_close(b.engine, &b.fake);
}

TEST(a_row_too_many_is_dropped_and_counted)
{
    struct bench b;
    REQUIRE(bench_open(&b, &SETUP));
    struct job *job = plain_job(&b.fake, 1, 7, 20), *again = plain_job(&b.fake, 1, 7, 20);
    expect(job);
    job->stop_ids[0] = job->expected[0].ids[4]; /* the first of its kind, or an earlier one ends it */
    job->spec.stop_ids = (struct id_list){job->stop_ids, 1};
    expect(job);
    REQUIRE(job->expected[0].finish == FINISH_STOP_ID);
    submit_job(b.engine, job);
    drain(b.engine, &job, 1);
    struct engine_stats stats = stats_of(&b);
    CHECK_EQ(b.fake.n_rows, 7 + job->expected[0].n);
    CHECK_EQ(stats.wasted_rows, 1);
    CHECK_EQ(stats.generation_tokens, job->expected[0].n);
    CHECK_EQ(stats.prompt_rows + stats.decode_rows + stats.redone_rows + stats.wasted_rows, b.fake.n_rows);
    /* What the dropped row completed is not in the cache. */
    for (uint32_t i = 0; i < job->expected[0].n; i++)
        again->prompt[7 + i] = job->expected[0].ids[i];
    again->prompt[7 + job->expected[0].n] = 1;
    again->spec.prompt.n = 7 + job->expected[0].n + 1;
    run_jobs(&b, &again, 1);
    CHECK_EQ(stats_of(&b).prefix_cache_hits, (7 + job->expected[0].n - 1) / 4 * 4);
    free(job);
    free(again);
    fake_close(b.engine, &b.fake);
}

TEST(draws_that_need_values_wait_for_them)
{
    struct bench b;
    REQUIRE(bench_open(&b, &SETUP));
    for (int kind = 0; kind < 3; kind++) {
        struct job *job = plain_job(&b.fake, (uint32_t)kind, 30, 10);
        job->words[0][0] = 3;
        job->bad_words[0] = (struct id_list){job->words[0], 1};
        if (kind == 0)
            job->spec.presence_penalty = 0.5f;
        else if (kind == 1)
            job->spec.bad_words = job->bad_words, job->spec.n_bad_words = 1;
        else
            job->spec.is_score = true, job->spec.score_start = 1;
        submit(&b, job);
        b.fake.n_most_in_flight = 0;
        step(&b, 2); /* the prompt in two chunks: nothing is drawn yet, but scores are */
        CHECK_EQ(b.fake.n_most_in_flight, kind == 2 ? 1 : 2);
        b.fake.n_most_in_flight = 0;
        drain(b.engine, &job, 1);
        CHECK(b.fake.n_most_in_flight <= 1);
        free(job);
    }
    fake_close(b.engine, &b.fake);
}

TEST(an_abort_keeps_the_tokens_in_flight)
{
    struct bench b;
    struct output output[4];
    uint32_t n;
    REQUIRE(bench_open(&b, &SETUP));
    struct job *job = plain_job(&b.fake, 1, 5, 40);
    submit(&b, job);
    step(&b, 3);
    CHECK_EQ(b.fake.n_in_flight, 1);
    CHECK_OK(engine_abort(b.engine, &job->number, 1, &err));
    CHECK_OK(engine_take(b.engine, true, output, 4, &n, &err));
    CHECK_EQ(b.fake.n_in_flight, 0);
    REQUIRE(n == 1);
    CHECK_EQ(output[0].finish, FINISH_ABORT);
    CHECK_EQ(output[0].n_new, 4);
    CHECK(!memcmp(output[0].ids, job->expected[0].ids, 4 * sizeof *output[0].ids));
    CHECK_EQ(stats_of(&b).wasted_rows, 0);
    free(job);
    fake_close(b.engine, &b.fake);
}

TEST(memory_of_a_sequence_outlives_its_row_in_flight)
{
    struct bench b;
    struct output output[4];
    uint32_t n;
    REQUIRE(bench_open(&b, &SETUP));
    struct job *job = plain_job(&b.fake, 1, 7, 20);
    expect(job);
    job->stop_ids[0] = job->expected[0].ids[0];
    job->spec.stop_ids = (struct id_list){job->stop_ids, 1};
    submit_job(b.engine, job);
    step(&b, 1);
    CHECK_EQ(b.fake.n_in_flight, 1); /* its row is for nothing */
    for (int i = 0; i < 3; i++) {
        CHECK_OK(engine_take(b.engine, false, output, 4, &n, &err));
        CHECK_EQ(n, i == 0);
    }
    step(&b, 1);
    CHECK_EQ(b.fake.n_in_flight, 0);
    CHECK_OK(engine_take(b.engine, false, output, 4, &n, &err));
    free(job);
    fake_close(b.engine, &b.fake);
}

TEST(a_fault_ends_what_is_in_flight)
{
    for (uint64_t fails_at = 1; fails_at < 7; fails_at++) {
        struct bench b;
        bool progressed;
        struct output output[4];
        uint32_t n;
        enum rc rc = RC_OK;
        REQUIRE(bench_open(&b, &SETUP));
        struct job *jobs[2] = {plain_job(&b.fake, 1, 20, 20), plain_job(&b.fake, 2, 5, 20)};
        for (int i = 0; i < 2; i++)
            submit_job(b.engine, jobs[i]);
        b.fake.fails_at = fails_at;
        for (int i = 0; i < 10 && !rc; i++)
            rc = engine_step(b.engine, &progressed, &err);
        CHECK_EQ(rc, RC_DEVICE);
        CHECK_EQ(engine_step(b.engine, &progressed, &err), RC_DEAD);
        CHECK(!engine_has_unfinished(b.engine));
        CHECK_OK(engine_check(b.engine, &err));
        CHECK_OK(engine_take(b.engine, true, output, 4, &n, &err));
        CHECK_EQ(n, 2);
        CHECK_OK(engine_take(b.engine, true, output, 4, &n, &err));
        for (int i = 0; i < 2; i++)
            free(jobs[i]);
        fake_close(b.engine, &b.fake);
    }
}

TEST(settling_and_closing_wait_for_what_is_in_flight)
{
    for (int settles = 0; settles < 2; settles++) {
        struct bench b;
        REQUIRE(bench_open(&b, &SETUP));
        struct job *job = plain_job(&b.fake, 1, 9, 30);
        submit(&b, job);
        step(&b, 4);
        CHECK_EQ(b.fake.n_in_flight, 1);
        if (settles) {
            CHECK_OK(engine_settle(b.engine, &err));
            CHECK_EQ(b.fake.n_in_flight, 0);
            CHECK_EQ(stats_of(&b).generation_tokens, 5);
            drain(b.engine, &job, 1);
            CHECK(job->is_done);
        }
        free(job);
        fake_close(b.engine, &b.fake); /* which checks it */
    }
}
