/* bench.h: an engine on the fake model, and the calls that most tests of the engine make. */
#ifndef LLMPY_BENCH_H
#define LLMPY_BENCH_H

#include "fake_model.h"

static struct err err;

struct bench {
    struct fake fake;
    struct engine *engine;
};

static bool bench_open(struct bench *b, const struct setup *setup)
{
    b->engine = fake_engine(setup, &b->fake, &err);
    if (!b->engine)
        CHECK_FAIL("%s", err.message);
    return b->engine != NULL;
}

UNUSED static void submit(struct bench *b, struct job *job)
{
    expect(job);
    submit_job(b->engine, job);
}

/* Runs jobs together and compares them with the oracle. */
UNUSED static void run_jobs(struct bench *b, struct job **jobs, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        submit(b, jobs[i]);
    drain(b->engine, jobs, n);
    for (uint32_t i = 0; i < n; i++)
        CHECK(jobs[i]->is_done);
}

UNUSED static void step(struct bench *b, uint32_t n)
{
    bool progressed;
    while (n--) {
        CHECK_OK(engine_step(b->engine, &progressed, &err));
        CHECK_OK(engine_check(b->engine, &err));
    }
}

UNUSED static struct engine_stats stats_of(struct bench *b)
{
    struct engine_stats stats;
    engine_stats(b->engine, &stats);
    return stats;
}

UNUSED static void free_jobs(struct job **jobs, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        free(jobs[i]);
}

/* Runs submitted jobs to the end, compares them with the oracle, frees everything. */
UNUSED static void bench_close(struct bench *b, struct job **jobs, uint32_t n)
{
    drain(b->engine, jobs, n);
    for (uint32_t i = 0; i < n; i++)
        CHECK(jobs[i]->is_done);
    free_jobs(jobs, n);
    fake_close(b->engine, &b->fake);
}

#endif
