/* Commands and parameters at their bounds: requests held by a pause, requests ended by an abort of all, greedy sampling, and the
 * counters. */
#define _GNU_SOURCE
#include "bench.h"

#include "../../csrc/engine/statistics.h"

#include <time.h>

static const struct setup SMALL = {.block_tokens = 4, .n_pages = 60, .max_num_seqs = 8, .max_num_batched_tokens = 16, .caches = true};

static struct job *made(struct bench *b, uint32_t stream, uint32_t n, uint32_t n_new)
{
    struct job *job = stream_job(&b->fake, stream, 10, n_new);
    job->spec.n = n;
    return job;
}

static struct job *submitted(struct bench *b, uint32_t stream, uint32_t n, uint32_t n_new)
{
    struct job *job = made(b, stream, n, n_new);
    submit(b, job);
    return job;
}

/* Submitted before the pause and not taken in yet: it runs. Submitted after it: it waits. */
TEST(a_pause_keeps_out_what_comes_behind_it_alone)
{
    struct bench b;
    REQUIRE(bench_open(&b, &SMALL));
    struct job *jobs[2] = {submitted(&b, 1, 1, 3)};
    engine_hold_new(b.engine, true);
    jobs[1] = submitted(&b, 2, 1, 3);
    step(&b, 1);
    CHECK_EQ(stats_of(&b).num_running, 1);
    CHECK_EQ(stats_of(&b).num_held, 1);
    step(&b, 4);
    CHECK_EQ(stats_of(&b).num_unfinished, 1);
    engine_hold_new(b.engine, false);
    bench_close(&b, jobs, 2);
}

TEST(what_a_pause_holds_is_counted_by_samples)
{
    struct bench b;
    REQUIRE(bench_open(&b, &SMALL));
    engine_hold_new(b.engine, true);
    struct job *jobs[2] = {submitted(&b, 1, 3, 3), submitted(&b, 2, 1, 3)};
    step(&b, 1);
    CHECK_EQ(stats_of(&b).num_held, 4);
    engine_hold_new(b.engine, false);
    step(&b, 1);
    CHECK_EQ(stats_of(&b).num_held, 0);
    bench_close(&b, jobs, 2);
}

/* The newest one, too, whether it runs or waits; not one that comes behind the abort. */
TEST(an_abort_of_all_ends_what_came_before_it)
{
    for (uint32_t n_steps = 0; n_steps < 3; n_steps++) {
        struct bench b;
        REQUIRE(bench_open(&b, &SMALL));
        struct job *jobs[3] = {submitted(&b, 1, 1, 9), submitted(&b, 2, 2, 9)};
        step(&b, n_steps);
        jobs[0]->may_abort = jobs[1]->may_abort = true;
        CHECK_OK(engine_abort(b.engine, NULL, 0, &err));
        jobs[2] = submitted(&b, 3, 1, 2);
        step(&b, 1);
        CHECK_EQ(stats_of(&b).finished[FINISH_ABORT], 3);
        CHECK_EQ(stats_of(&b).num_unfinished, 1);
        bench_close(&b, jobs, 3);
    }
}

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* A request waits 0.2 s before its first step; that is no time between its tokens. */
TEST(the_time_between_tokens_begins_with_a_token)
{
    static struct histogram histograms[N_HISTOGRAMS];
    struct bench b;
    REQUIRE(bench_open(&b, &SMALL));
    struct job *job = submitted(&b, 1, 1, 2);
    nanosleep(&(struct timespec){.tv_nsec = 200000000}, NULL);
    double begun = seconds();
    step(&b, 2);
    double longest = seconds() - begun;
    engine_histograms(b.engine, histograms);
    CHECK(histograms[HISTOGRAM_INTER_TOKEN].sum > 0);
    CHECK(histograms[HISTOGRAM_INTER_TOKEN].sum <= longest);
    CHECK(histograms[HISTOGRAM_FIRST_TOKEN].sum >= 0.2);
    bench_close(&b, &job, 1);
}

/* The oracle draws without random numbers below 1e-5, and with them from there on. */
TEST(a_temperature_below_the_threshold_is_greedy)
{
    const float TEMPERATURES[] = {0, 1e-9f, 9.9e-6f, 1e-5f, 1.1e-5f};
    for (uint32_t i = 0; i < sizeof TEMPERATURES / sizeof *TEMPERATURES; i++) {
        struct bench b;
        REQUIRE(bench_open(&b, &SMALL));
        struct job *job = made(&b, 1, 1, 6);
        job->spec.temperature = TEMPERATURES[i];
        submit(&b, job);
        bench_close(&b, &job, 1);
    }
}
