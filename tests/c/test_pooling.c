/* Requests for states, beside others that generate, on the fake model: what comes is the oracle's affair (fake_model.h). Random
 * traces hold some, too (test_engine_random.c). */
#include "fake_model.h"

#define N_JOBS 24

static struct err err;

static struct job *pooling_job(const struct fake *fake, uint32_t stream, uint32_t n_prompt, uint32_t kind)
{
    struct job *job = calloc(1, sizeof *job);
    job->layout = &fake->layout;
    job->recurrent = &fake->states;
    job->has_nan = fake->has_nan;
    for (uint32_t i = 0; i < n_prompt; i++)
        job->prompt[i] = (int32_t)(mix(stream, i) % VOCAB);
    job->spec = (struct request_spec){.prompt = {job->prompt, n_prompt}, .n = 1, .temperature = 1, .top_p = 1, .repetition_penalty = 1,
                                      .max_tokens = 25, .ignore_eos = true};
    if (kind)
        pool_job(job, kind);
    return job;
}

static void give_types(struct job *job, uint32_t n_types, uint32_t stream)
{
    for (uint32_t i = 0; i < job->spec.prompt.n; i++)
        job->types[i] = (int32_t)(mix(stream, i) % n_types);
    job->spec.types = (struct id_list){job->types, job->spec.prompt.n};
}

/* Every kind, at every length around blocks and chunks; few streams, so that prompts share blocks. */
static void run_all(const struct setup *setup, bool generates, uint64_t *n_preemptions)
{
    struct fake fake;
    struct job *jobs[N_JOBS];
    struct engine_stats stats;
    struct engine *engine = fake_engine(setup, &fake, &err);
    REQUIRE(engine);
    for (uint32_t round = 0; round < 12; round++) {
        for (uint32_t i = 0; i < N_JOBS; i++) {
            uint32_t kind = (i + round) % (generates ? 5 : 4) + !generates;
            jobs[i] = pooling_job(&fake, i % 3, 1 + (i * 7 + round * 5) % 40, kind);
            if (setup->n_token_types && i % 4)
                give_types(jobs[i], setup->n_token_types, i);
            expect(jobs[i]);
            submit_job(engine, jobs[i]);
        }
        drain(engine, jobs, N_JOBS);
        for (uint32_t i = 0; i < N_JOBS; i++) {
            CHECK(jobs[i]->is_done);
            free(jobs[i]);
        }
    }
    engine_stats(engine, &stats);
    *n_preemptions = stats.num_preemptions;
    fake_close(engine, &fake);
}

TEST(states_come_whatever_runs_beside_them)
{
    uint64_t n_preemptions;
    for (int i = 0; i < 8; i++) {
        struct setup setup = {.block_tokens = 4, .n_pages = 32, .max_num_seqs = 6, .max_num_batched_tokens = 11, .caches = i & 1,
                              .is_async = i & 2, .has_nan = i & 4};
        run_all(&setup, true, &n_preemptions);
        CHECK(n_preemptions > 0);
    }
}

TEST(prompts_that_are_taken_whole)
{
    uint64_t n_preemptions;
    for (int i = 0; i < 4; i++) {
        struct setup setup = {.block_tokens = 4, .n_pages = 60, .max_num_seqs = i & 1 ? 3 : 16, .max_num_batched_tokens = 40 + 9 * (uint32_t)i,
                              .caches = true, .is_async = i & 2, .takes_whole_prompts = true, .n_token_types = i ? 3 : 0};
        run_all(&setup, false, &n_preemptions);
        CHECK_EQ(n_preemptions, 0);
    }
}

TEST(what_is_refused)
{
    struct setup setup = {.block_tokens = 4, .n_pages = 60, .max_num_seqs = 4, .max_num_batched_tokens = 16, .takes_whole_prompts = true,
                          .n_token_types = 2};
    struct fake fake;
    struct engine *engine = fake_engine(&setup, &fake, &err);
    REQUIRE(engine);
    uint64_t number;
    struct job *job = pooling_job(&fake, 1, 17, POOLING_LAST);
    CHECK_EQ(engine_submit(engine, &job->spec, &number, &err), RC_INVALID);
    CHECK(strstr(err.message, "length 17) is longer than max_num_batched_tokens=16"));
    job->spec.prompt.n = 16;
    job->spec.n = 2;
    CHECK_EQ(engine_submit(engine, &job->spec, &number, &err), RC_INVALID);
    job->spec.n = 1;
    give_types(job, 3, 1);
    CHECK_EQ(engine_submit(engine, &job->spec, &number, &err), RC_INVALID);
    CHECK(strstr(err.message, "token_type_ids must be below 2, the model's number of types, got 2."));
    job->spec.types.n = 15;
    CHECK_EQ(engine_submit(engine, &job->spec, &number, &err), RC_INVALID);
    CHECK(strstr(err.message, "token_type_ids must be as many as the prompt's 16 tokens, got 15."));
    job->spec.types.n = 0;
    job->spec.pooling = POOLING_ALL + 1;
    CHECK_EQ(engine_submit(engine, &job->spec, &number, &err), RC_INVALID);
    job->spec.pooling = POOLING_NONE;
    CHECK_EQ(engine_submit(engine, &job->spec, &number, &err), RC_UNSUPPORTED);
    CHECK(strstr(err.message, "LLM.generate() is only supported for generative models."));
    free(job);
    fake_close(engine, &fake);
}
