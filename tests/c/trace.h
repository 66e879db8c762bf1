/* trace.h: random traces of an engine: submissions, steps, aborts, resets and takes in any order. The invariants are walked after
 * every operation, and every token, logprob and finish is compared with the oracle. */
#ifndef LLMPY_TRACE_H
#define LLMPY_TRACE_H

#include "fake_model.h"

#define N_LIVE 24

struct trace {
    struct setup setup;
    struct fake fake;
    struct engine *engine;
    struct job *jobs[N_LIVE];
    uint64_t random;
};

static void trace_submit(struct trace *t)
{
    for (uint32_t i = 0; i < N_LIVE; i++)
        if (!t->jobs[i]) {
            t->jobs[i] = malloc(sizeof **t->jobs);
            random_job(t->jobs[i], &t->fake, t->setup.policy, &t->random);
            if (t->setup.is_apart) {
                t->jobs[i]->spec.saves_early = check_below(&t->random, 2);
                t->jobs[i]->spec.awaits_s = check_below(&t->random, 3) ? 0 : 0.004f;
            }
            submit_job(t->engine, t->jobs[i]);
            return;
        }
}

static void trace_abort(struct trace *t)
{
    uint64_t numbers[3];
    uint32_t n = 0;
    struct err err;
    bool all = check_below(&t->random, 10) == 0;
    for (uint32_t i = 0; i < N_LIVE; i++)
        if (t->jobs[i] && (all || (n < 2 && check_below(&t->random, 8) == 0))) {
            if (!all)
                numbers[n++] = t->jobs[i]->number;
            t->jobs[i]->may_abort = true;
        }
    numbers[n++] = 123456789; /* unknown: ignored */
    CHECK_OK(engine_abort(t->engine, all ? NULL : numbers, n, &err));
}

static void trace_end_waits(struct trace *t)
{
    for (uint32_t i = 0; i < N_LIVE; i++)
        if (t->jobs[i] && check_below(&t->random, 4) == 0)
            engine_end_wait(t->engine, t->jobs[i]->number);
    engine_end_wait(t->engine, 123456789); /* unknown: ignored */
}

static void trace_free_done(struct trace *t)
{
    for (uint32_t i = 0; i < N_LIVE; i++)
        if (t->jobs[i] && t->jobs[i]->is_done) {
            free(t->jobs[i]);
            t->jobs[i] = NULL;
        }
}

static void trace_operation(struct trace *t)
{
    struct err err;
    bool progressed;
    uint32_t what = check_below(&t->random, 100);
    if (what < 22)
        trace_submit(t);
    else if (what < 80)
        CHECK_OK(engine_step(t->engine, &progressed, &err));
    else if (what < 83)
        trace_abort(t);
    else if (what < 85)
        CHECK_OK(engine_reset_prefix_cache(t->engine, check_below(&t->random, 2), &err));
    else if (t->setup.is_apart && what < 88)
        trace_end_waits(t);
    else
        take_all(t->engine, check_below(&t->random, 2), t->jobs, N_LIVE);
    CHECK_OK(engine_check(t->engine, &err));
    trace_free_done(t);
}

/* Runs one kind of engine; returns how often it preempted and hit. */
static void trace_run(const struct setup *setup, uint32_t n_operations, struct engine_stats *stats)
{
    struct err err;
    struct trace *t = calloc(1, sizeof *t);
    t->setup = *setup;
    t->random = mix(setup->block_tokens, setup->n_pages) ^ setup->max_num_batched_tokens;
    t->engine = fake_engine(setup, &t->fake, &err);
    if (!t->engine) {
        CHECK_FAIL("%s", err.message);
        free(t);
        return;
    }
    for (uint32_t i = 0; i < n_operations && !check_failures; i++) {
        if (setup->between)
            setup->between(t);
        trace_operation(t);
    }
    if (!check_failures)
        drain(t->engine, t->jobs, N_LIVE);
    trace_free_done(t);
    engine_stats(t->engine, stats);
    for (uint32_t i = 0; i < N_LIVE; i++) {
        CHECK(check_failures || !t->jobs[i]); /* every request has ended */
        free(t->jobs[i]);
    }
    fake_close(t->engine, &t->fake);
    free(t);
}

/* Runs n_operations, or as many as TRACE_OPERATIONS says, shared out to the set-ups, of each with one and with two steps in
 * flight. `look` checks that a trace has gone where it should. */
UNUSED static void trace_run_all(const struct setup *setups, uint32_t n_setups, uint32_t n_operations,
                                 void (*look)(const struct setup *setup, const struct engine_stats *stats))
{
    const char *wanted = getenv("TRACE_OPERATIONS");
    n_operations = wanted ? (uint32_t)atoi(wanted) : n_operations;
    for (uint32_t i = 0; i < 2 * n_setups && !check_failures; i++) {
        struct setup setup = setups[i / 2];
        struct engine_stats stats = {0};
        setup.is_async = i % 2;
        trace_run(&setup, n_operations / n_setups, &stats);
        CHECK_EQ(stats.max_steps_in_flight, 1 + i % 2);
        look(&setup, &stats);
        if (check_failures)
            fprintf(stderr, "in setup %u, %u steps in flight\n", i / 2, 1 + i % 2);
    }
}

#endif
