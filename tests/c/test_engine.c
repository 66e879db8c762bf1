/* The engine's rules one by one, on the fake model. The oracle in fake_model.h knows every expected token. */
#include "bench.h"

#include "../../csrc/base/mem.h"

#include <pthread.h>

static const struct setup SMALL = {.block_tokens = 4, .n_pages = 60, .max_num_seqs = 8, .max_num_batched_tokens = 16, .caches = true};

TEST(a_hit_leaves_at_least_one_row)
{
    struct bench b;
    REQUIRE(bench_open(&b, &SMALL));
    for (uint32_t n_prompt = 1; n_prompt < 14; n_prompt++) {
        uint64_t hits[2], rows[2];
        for (int i = 0; i < 2; i++) {
            struct job *job = plain_job(&b.fake, n_prompt, n_prompt, 1);
            uint64_t hits_before = stats_of(&b).prefix_cache_hits, rows_before = b.fake.n_rows;
            run_jobs(&b, &job, 1);
            hits[i] = stats_of(&b).prefix_cache_hits - hits_before;
            rows[i] = b.fake.n_rows - rows_before;
            free_jobs(&job, 1);
        }
        CHECK_EQ(hits[0], 0);
        CHECK_EQ(rows[0], n_prompt);
        CHECK_EQ(hits[1], n_prompt % 4 ? n_prompt / 4 * 4 : n_prompt - 1);
        CHECK_EQ(rows[1], n_prompt - hits[1]);
    }
    fake_close(b.engine, &b.fake);
}

TEST(a_prompt_that_is_all_cached_computes_one_row)
{
    struct bench b;
    struct setup setup = SMALL;
    REQUIRE(bench_open(&b, &setup));
    struct job *jobs[4];
    for (uint32_t i = 0; i < 4; i++) {
        jobs[i] = plain_job(&b.fake, 1, 12, 6);
        jobs[i]->spec.seed = i;
    }
    run_jobs(&b, jobs, 1);
    CHECK_EQ(b.fake.n_copies, 0);
    run_jobs(&b, jobs + 1, 3);
    CHECK_EQ(stats_of(&b).prefix_cache_hits, 3 * 11);
    CHECK_EQ(b.fake.n_copies, 3); /* each writes its own last block */
    CHECK_EQ(b.fake.n_rows, 12 + 3 * 1 + 4 * 5);
    free_jobs(jobs, 4);
    fake_close(b.engine, &b.fake);
    /* Equal prompts in one step: what is not computed yet cannot be copied. A pool without room for the copy does without. */
    setup.n_pages = 1 + MAX_LENGTH / 4;
    setup.max_num_batched_tokens = 200;
    REQUIRE(bench_open(&b, &setup));
    for (uint32_t i = 0; i < 4; i++)
        jobs[i] = plain_job(&b.fake, 2, i < 2 ? 12 : MAX_LENGTH - 4, i < 2 ? 3 : 1);
    run_jobs(&b, jobs, 2);
    CHECK_EQ(stats_of(&b).prefix_cache_hits, 8);
    run_jobs(&b, jobs + 2, 1);
    run_jobs(&b, jobs + 3, 1);
    CHECK_EQ(stats_of(&b).prefix_cache_hits, 8 + 12 + MAX_LENGTH - 4 - 1);
    free_jobs(jobs, 4);
    fake_close(b.engine, &b.fake);
}

TEST(salts_part_the_cache)
{
    struct bench b;
    REQUIRE(bench_open(&b, &SMALL));
    struct job *jobs[3];
    for (int i = 0; i < 3; i++) {
        jobs[i] = plain_job(&b.fake, 1, 20, 2);
        jobs[i]->spec.salt = i == 1 ? (struct byte_string){"x", 1} : (struct byte_string){0};
        run_jobs(&b, &jobs[i], 1);
        CHECK_EQ(stats_of(&b).prefix_cache_hits, i == 2 ? 19 : 0);
    }
    free_jobs(jobs, 3);
    fake_close(b.engine, &b.fake);
}

TEST(equal_prompts_in_flight_are_computed_once)
{
    for (uint32_t budget = 8; budget <= 96; budget *= 2) {
        struct bench b;
        struct setup setup = SMALL;
        setup.max_num_batched_tokens = budget;
        REQUIRE(bench_open(&b, &setup));
        struct job *jobs[8];
        for (int i = 0; i < 8; i++) {
            jobs[i] = plain_job(&b.fake, 1, 42, 5);
            jobs[i]->spec.seed = (uint64_t)i;
        }
        run_jobs(&b, jobs, 8);
        CHECK_EQ(b.fake.n_rows, 42 + 7 * 2 + 8 * 4); /* 40 tokens are whole blocks; the last token drawn is never computed */
        CHECK_EQ(stats_of(&b).num_preemptions, 0);
        free_jobs(jobs, 8);
        fake_close(b.engine, &b.fake);
    }
}

TEST(samples_share_one_prefill)
{
    for (uint32_t n_prompt = 7; n_prompt <= 8; n_prompt++)
        for (uint32_t n_slots = 1; n_slots <= 5; n_slots++) {
            struct bench b;
            struct setup setup = SMALL;
            setup.max_num_seqs = n_slots;
            REQUIRE(bench_open(&b, &setup));
            struct job *job = plain_job(&b.fake, 1, n_prompt, 5);
            job->spec.n = 4;
            job->spec.wants_prompt_logprobs = true;
            run_jobs(&b, &job, 1);
            uint32_t n_late = n_slots < 4 ? 4 - n_slots : 0;
            CHECK_EQ(b.fake.n_rows, n_prompt + n_late * (n_prompt == 8 ? 1 : 3) + 4 * 4);
            free_jobs(&job, 1);
            fake_close(b.engine, &b.fake);
        }
}

TEST(scores_use_the_cache_up_to_the_first_row_wanted)
{
    struct bench b;
    REQUIRE(bench_open(&b, &SMALL));
    const uint32_t STARTS[] = {1, 1, 17, 18, 40, 41}, CACHED[] = {0, 0, 16, 16, 36, 40};
    for (uint32_t i = 0; i < 6; i++) {
        struct job *job = plain_job(&b.fake, 1, 41, 1);
        job->spec.is_score = true;
        job->spec.score_start = STARTS[i];
        job->spec.n_logprobs = 2;
        uint64_t hits = stats_of(&b).prefix_cache_hits, rows = b.fake.n_rows;
        run_jobs(&b, &job, 1);
        CHECK_EQ(job->has_scores, STARTS[i] < 41);
        CHECK_EQ(stats_of(&b).prefix_cache_hits - hits, STARTS[i] < 41 ? CACHED[i] : 0);
        CHECK_EQ(b.fake.n_rows - rows, STARTS[i] < 41 ? 40 - CACHED[i] : 0);
        free_jobs(&job, 1);
    }
    fake_close(b.engine, &b.fake);
}

TEST(a_satisfied_stop_rule_ends_at_once)
{
    struct bench b;
    REQUIRE(bench_open(&b, &SMALL));
    struct {
        int32_t prior[3];
        uint32_t max_tokens;
        enum finish finish;
        int32_t stop;
    } cases[] = {
        {{1, 2, 35}, 9, FINISH_EOS, 0},
        {{1, 2, 3}, 3, FINISH_LENGTH, 0},
        {{1, 2, 30}, 9, FINISH_STOP_ID, 30},
        {{1, 0, 1}, 9, FINISH_STOP_STRING, 1},
    };
    for (uint32_t i = 0; i < 4; i++) {
        struct job *job = plain_job(&b.fake, 1, 9, cases[i].max_tokens);
        int32_t stop_id = 30;
        struct byte_string stops[2] = {{"zzz", 3}, {"bab", 3}};
        job->spec.prior = (struct id_list){cases[i].prior, 3};
        job->spec.ignore_eos = false;
        job->spec.stop_ids = (struct id_list){&stop_id, 1};
        job->spec.stop_strings = stops;
        job->spec.n_stop_strings = 2;
        run_jobs(&b, &job, 1);
        CHECK_EQ(job->finish[0], cases[i].finish);
        CHECK_EQ(job->expected[0].stop, cases[i].stop);
        CHECK_EQ(job->n_received[0], 0);
        free_jobs(&job, 1);
    }
    CHECK_EQ(b.fake.n_rows, 0);
    fake_close(b.engine, &b.fake);
}

/* A rule that the prior output satisfies ends the request, but not before its prompt is scored. */
TEST(prompt_logprobs_come_although_prior_output_ends_the_request)
{
    static int32_t prior[3] = {1, 2, 35};
    for (uint32_t is_last = 0; is_last < 2; is_last++) {
        struct bench b;
        REQUIRE(bench_open(&b, &SMALL));
        struct job *jobs[2] = {plain_job(&b.fake, 1, 41, is_last ? 3 : 9), plain_job(&b.fake, 2, 10, 9)};
        jobs[0]->spec.prior = (struct id_list){prior, 3};
        jobs[0]->spec.ignore_eos = is_last;
        jobs[0]->spec.wants_prompt_logprobs = true;
        jobs[0]->spec.n_prompt_logprobs = 2;
        run_jobs(&b, jobs, 2);
        CHECK_EQ(jobs[0]->finish[0], is_last ? FINISH_LENGTH : FINISH_EOS);
        CHECK_EQ(jobs[0]->n_scores, 40);
        CHECK(jobs[0]->has_scores);
        CHECK_EQ(jobs[0]->n_received[0], 0);
        free_jobs(jobs, 2);
        fake_close(b.engine, &b.fake);
    }
}

/* "\xc3" ends the prompt, "\xa9" begins the output: their character is the first of the text. */
TEST(a_stop_string_may_begin_with_a_character_that_the_prompt_opens)
{
    static const struct byte_string STOPS[] = {{"\xc3\xa9", 2}, {"\xc3\xa9" "a", 3}, {"\xa9", 1}, {"b\xc3\xa9", 3}, {"a\xc3\xa9" "a", 4}};
    static const bool IS_FOUND[] = {true, true, true, false, false}; /* whole characters of the prompt are no text */
    static int32_t prior[2] = {17, 0};
    for (uint32_t i = 0; i < 5; i++)
        for (uint32_t hidden = 0; hidden < 2; hidden++) {
            struct bench b;
            REQUIRE(bench_open(&b, &SMALL));
            struct job *job = plain_job(&b.fake, 1, 9, 9);
            struct byte_string stop = STOPS[i];
            job->prompt[6 + !hidden] = 1;
            job->prompt[7 + !hidden] = 16;
            job->prompt[8] = hidden ? 34 : 16; /* a special token without text, or the open character */
            job->spec.hide_special = true;
            job->spec.prior = (struct id_list){prior, 2};
            job->spec.stop_strings = &stop;
            job->spec.n_stop_strings = 1;
            run_jobs(&b, &job, 1);
            CHECK_EQ(job->finish[0] == FINISH_STOP_STRING && !job->n_received[0], IS_FOUND[i]);
            free_jobs(&job, 1);
            fake_close(b.engine, &b.fake);
        }
}

/* None of the first min_tokens tokens ends the output, whatever the rule. */
TEST(the_first_tokens_end_nothing)
{
    static int32_t prior[3] = {0, 1, 35};
    static const struct byte_string STOP = {"</s>", 4};
    for (uint32_t rule = 0; rule < 3; rule++)
        for (uint32_t min_tokens = 0; min_tokens < 6; min_tokens++) {
            struct bench b;
            REQUIRE(bench_open(&b, &SMALL));
            struct job *job = plain_job(&b.fake, 1, 9, 9);
            job->spec.prior = (struct id_list){prior, 3};
            job->spec.ignore_eos = rule > 0;
            job->spec.stop_ids = (struct id_list){&prior[2], rule == 1};
            job->spec.stop_strings = &STOP;
            job->spec.n_stop_strings = rule == 2;
            job->spec.min_tokens = min_tokens;
            run_jobs(&b, &job, 1);
            CHECK_EQ(!job->n_received[0], min_tokens < 3);
            free_jobs(&job, 1);
            fake_close(b.engine, &b.fake);
        }
}

TEST(aborted_requests_end_once)
{
    struct bench b;
    bool progressed;
    REQUIRE(bench_open(&b, &SMALL));
    struct job *jobs[4];
    for (int i = 0; i < 4; i++) {
        jobs[i] = plain_job(&b.fake, (uint32_t)i, 10, 30);
        jobs[i]->spec.n = i == 1 ? 3 : 1;
        jobs[i]->may_abort = i < 3;
        submit(&b, jobs[i]);
    }
    uint64_t unknown[] = {jobs[0]->number, jobs[0]->number, 99999};
    CHECK_OK(engine_abort(b.engine, unknown, 3, &err)); /* before it ever ran */
    take_all(b.engine, true, jobs, 4);                    /* a boundary too */
    CHECK_EQ(jobs[0]->finish[0], FINISH_ABORT);
    for (int i = 0; i < 4; i++)
        CHECK_OK(engine_step(b.engine, &progressed, &err));
    CHECK_OK(engine_abort(b.engine, &jobs[1]->number, 1, &err));
    CHECK_OK(engine_abort(b.engine, &jobs[2]->number, 1, &err));
    CHECK_OK(engine_abort(b.engine, &jobs[2]->number, 1, &err));
    drain(b.engine, jobs, 4);
    CHECK_EQ(jobs[1]->n_finals, 3);
    CHECK(jobs[1]->n_received[0] > 0); /* what was made is kept */
    CHECK_EQ(jobs[3]->finish[0], FINISH_LENGTH);
    CHECK_OK(engine_abort(b.engine, NULL, 0, &err)); /* no request is left */
    free_jobs(jobs, 4);

    struct job *late = plain_job(&b.fake, 9, 10, 3); /* comes after the abort of all: runs */
    run_jobs(&b, &late, 1);
    free_jobs(&late, 1);
    fake_close(b.engine, &b.fake);
}

TEST(a_fault_poisons)
{
    struct bench b;
    bool progressed;
    uint64_t number;
    REQUIRE(bench_open(&b, &SMALL));
    struct job *jobs[3];
    for (int i = 0; i < 3; i++) {
        jobs[i] = plain_job(&b.fake, (uint32_t)i, 10, 20);
        submit(&b, jobs[i]);
    }
    b.fake.fails_at = 4;
    for (int i = 0; i < 3; i++)
        CHECK_OK(engine_step(b.engine, &progressed, &err));
    CHECK_EQ(engine_step(b.engine, &progressed, &err), RC_DEVICE);
    CHECK_STR(err.message, "the device is on fire");
    CHECK_EQ(engine_step(b.engine, &progressed, &err), RC_DEAD);
    CHECK_STR(err.message, "the device is on fire");
    CHECK_EQ(engine_submit(b.engine, &jobs[0]->spec, &number, &err), RC_DEAD);
    CHECK_EQ(engine_reset_prefix_cache(b.engine, true, &err), RC_DEAD);
    CHECK(!engine_has_unfinished(b.engine));
    CHECK_EQ(engine_n_finished(b.engine), 3);
    struct output output[8];
    uint32_t n;
    CHECK_OK(engine_take(b.engine, true, output, 8, &n, &err));
    CHECK_EQ(n, 3);
    for (uint32_t i = 0; i < n; i++)
        CHECK_EQ(output[i].finish, FINISH_ERROR);
    CHECK_EQ(output[0].n_new, 3);
    CHECK_EQ(output[0].ids[2], jobs[0]->expected[0].ids[2]);
    CHECK_OK(engine_check(b.engine, &err));
    free_jobs(jobs, 3);
    fake_close(b.engine, &b.fake);
}

TEST(non_finite_logits_end_one_request)
{
    struct bench b;
    struct setup setup = SMALL;
    setup.has_nan = true;
    REQUIRE(bench_open(&b, &setup));
    struct job *jobs[40];
    uint32_t n_errors = 0;
    for (uint32_t i = 0; i < 40; i++)
        jobs[i] = plain_job(&b.fake, i, 10 + i % 5, 20);
    run_jobs(&b, jobs, 40);
    for (uint32_t i = 0; i < 40; i++)
        n_errors += jobs[i]->finish[0] == FINISH_ERROR;
    CHECK(n_errors > 0 && n_errors < 40);
    CHECK_EQ(stats_of(&b).nonfinite_rows, n_errors);
    free_jobs(jobs, 40);
    fake_close(b.engine, &b.fake);
}

TEST(a_second_driver_is_refused)
{
    struct bench b;
    bool progressed;
    REQUIRE(bench_open(&b, &SMALL));
    struct job *job = plain_job(&b.fake, 1, 5, 1);
    submit(&b, job);
    b.fake.engine = b.engine;
    CHECK_OK(engine_step(b.engine, &progressed, &err));
    CHECK_EQ(b.fake.busy, RC_BUSY);
    b.fake.engine = NULL;
    drain(b.engine, &job, 1);
    free_jobs(&job, 1);
    fake_close(b.engine, &b.fake);
}

TEST(a_reset_forgets_and_harms_nobody)
{
    struct bench b;
    bool progressed;
    REQUIRE(bench_open(&b, &SMALL));
    for (int recompute = 0; recompute < 2; recompute++) {
        struct job *jobs[2] = {plain_job(&b.fake, 5, 30, 20), plain_job(&b.fake, 5, 30, 20)};
        submit(&b, jobs[0]);
        for (int i = 0; i < 5; i++)
            CHECK_OK(engine_step(b.engine, &progressed, &err));
        uint64_t hits = stats_of(&b).prefix_cache_hits, preemptions = stats_of(&b).num_preemptions;
        CHECK_OK(engine_reset_prefix_cache(b.engine, recompute, &err));
        CHECK_OK(engine_step(b.engine, &progressed, &err));
        CHECK_EQ(stats_of(&b).num_preemptions - preemptions, recompute);
        submit(&b, jobs[1]);
        drain(b.engine, jobs, 2);
        CHECK_EQ(stats_of(&b).prefix_cache_hits - hits, recompute ? 28 : 0); /* only what was computed after the reset */
        CHECK_OK(engine_reset_prefix_cache(b.engine, false, &err));
        free_jobs(jobs, 2);
    }
    fake_close(b.engine, &b.fake);
}

TEST(what_began_before_a_reset_is_offered_to_nobody)
{
    struct bench b;
    bool progressed;
    REQUIRE(bench_open(&b, &SMALL));
    struct job *old = plain_job(&b.fake, 5, 20, 20), *again = plain_job(&b.fake, 5, 20, 1), *longer = plain_job(&b.fake, 5, 20, 1);
    old->spec.n = 2;
    submit(&b, old);
    CHECK_OK(engine_step(b.engine, &progressed, &err)); /* 16 rows of the prompt; the second sample forks later */
    CHECK_OK(engine_reset_prefix_cache(b.engine, false, &err));
    drain(b.engine, &old, 1);
    run_jobs(&b, &again, 1); /* publishes the prompt's five blocks anew */
    memcpy(longer->prompt + 20, old->expected[1].ids, 19 * sizeof *longer->prompt);
    longer->spec.prompt.n = 39;
    run_jobs(&b, &longer, 1);
    CHECK_EQ(stats_of(&b).prefix_cache_hits, 20);
    free_jobs((struct job *[]){old, again, longer}, 3);
    fake_close(b.engine, &b.fake);
}

TEST(lower_priority_goes_first)
{
    struct bench b;
    struct setup setup = SMALL;
    struct output output[8];
    bool progressed;
    uint32_t n_done = 0, n;
    setup.policy = POLICY_PRIORITY;
    setup.max_num_seqs = 1;
    REQUIRE(bench_open(&b, &setup));
    const int64_t PRIORITIES[] = {0, 3, -2, 3, 1, -2};
    const uint64_t ORDER[] = {3, 6, 1, 5, 2, 4}; /* request numbers */
    for (uint32_t i = 0; i < 6; i++) {
        struct job *job = plain_job(&b.fake, i, 5, 3);
        job->spec.priority = PRIORITIES[i];
        submit_job(b.engine, job);
        free(job);
    }
    while (engine_has_unfinished(b.engine)) {
        REQUIRE_OK(engine_step(b.engine, &progressed, &err));
        REQUIRE_OK(engine_take(b.engine, true, output, 8, &n, &err));
        for (uint32_t i = 0; i < n; i++)
            CHECK_EQ(output[i].request, ORDER[n_done++]);
    }
    CHECK_EQ(n_done, 6);
    fake_close(b.engine, &b.fake);
}

/* A fork copies its tail, then a prompt ahead of it wants its pages in the same step: the copy is taken back with the row. */
TEST(a_victim_takes_its_copy_back)
{
    struct bench b;
    struct setup setup = {.block_tokens = 4, .n_pages = 32, .max_num_seqs = 4, .max_num_batched_tokens = 40, .caches = true,
                          .policy = POLICY_PRIORITY};
    bool progressed;
    REQUIRE(bench_open(&b, &setup));
    struct job *jobs[3] = {plain_job(&b.fake, 1, 7, 20), plain_job(&b.fake, 2, 38, 10), plain_job(&b.fake, 3, 70, 5)};
    jobs[0]->spec.priority = 1;
    jobs[1]->spec.priority = 2;
    jobs[1]->spec.n = 2;
    for (int i = 0; i < 3; i++) {
        submit(&b, jobs[i]);
        if (i)
            CHECK_OK(engine_step(b.engine, &progressed, &err)); /* 7 + 33 rows; then 1 + 5 + 34, and the fork */
    }
    CHECK_EQ(stats_of(&b).num_running, 4);
    CHECK_EQ(stats_of(&b).kv_blocks_free, 10); /* the long prompt wants 9, the first request 1, the fork's copy 1 */
    CHECK_OK(engine_step(b.engine, &progressed, &err));
    CHECK_OK(engine_check(b.engine, &err));
    CHECK_EQ(stats_of(&b).num_preemptions, 2);
    CHECK_EQ(b.fake.n_copies, 0);
    drain(b.engine, jobs, 3);
    for (int i = 0; i < 3; i++)
        CHECK(jobs[i]->is_done);
    free_jobs(jobs, 3);
    fake_close(b.engine, &b.fake);
}

TEST(a_window_holds_no_more_than_it_shows)
{
    struct bench b;
    struct setup setup = SMALL;
    bool progressed;
    setup.windows[0] = 9;
    setup.max_num_batched_tokens = 8;
    setup.n_pages = 6; /* 9 - 1 + 8 positions touch at most 5 blocks of 4 */
    REQUIRE(bench_open(&b, &setup));
    struct job *job = plain_job(&b.fake, 3, 50, 40);
    submit(&b, job);
    for (int i = 0; i < 30; i++) {
        CHECK_OK(engine_step(b.engine, &progressed, &err));
        CHECK_OK(engine_check(b.engine, &err));
        if (i > 10) /* decoding: 9 positions touch at most 3 blocks */
            CHECK(stats_of(&b).kv_blocks_free >= 2);
    }
    drain(b.engine, &job, 1);
    CHECK_EQ(stats_of(&b).num_preemptions, 0);
    free_jobs(&job, 1);
    fake_close(b.engine, &b.fake);
}

TEST(what_is_evicted_first_is_the_end_of_a_prompt)
{
    struct bench b;
    struct setup setup = SMALL;
    setup.n_pages = 26;
    REQUIRE(bench_open(&b, &setup));
    struct job *jobs[3] = {plain_job(&b.fake, 1, 61, 1), plain_job(&b.fake, 2, 61, 1), plain_job(&b.fake, 1, 61, 1)};
    for (int i = 0; i < 3; i++)
        run_jobs(&b, &jobs[i], 1);
    /* 25 pages: the first request leaves 15 blocks, the second needs 16 and finds 10 that hold nothing. */
    CHECK_EQ(stats_of(&b).evictions, 6 + 6);
    CHECK_EQ(stats_of(&b).prefix_cache_hits, 9 * 4);
    free_jobs(jobs, 3);
    fake_close(b.engine, &b.fake);
}

TEST(a_thousand_requests_through_forty_blocks)
{
    struct bench b;
    struct setup setup = {.block_tokens = 4, .n_pages = 41, .max_num_seqs = 16, .max_num_batched_tokens = 32, .caches = true};
    uint64_t random = 99;
    REQUIRE(bench_open(&b, &setup));
    struct job **jobs = calloc(1000, sizeof *jobs);
    for (uint32_t i = 0; i < 1000; i++) {
        jobs[i] = malloc(sizeof **jobs);
        random_job(jobs[i], &b.fake, POLICY_FCFS, &random);
        submit_job(b.engine, jobs[i]);
    }
    drain(b.engine, jobs, 1000);
    for (uint32_t i = 0; i < 1000; i++)
        CHECK(jobs[i]->is_done);
    CHECK(stats_of(&b).num_preemptions > 0);
    free_jobs(jobs, 1000);
    free(jobs);
    fake_close(b.engine, &b.fake);
}

/* ---- what is refused ---- */

static void expect_refusal(struct bench *b, struct job *job, const char *parameter, const char *message)
{
    uint64_t number;
    enum rc rc = engine_submit(b->engine, &job->spec, &number, &err);
    CHECK_EQ(rc, RC_INVALID);
    CHECK_STR(err.what, parameter);
    CHECK_CONTAINS(err.message, message);
    CHECK(!engine_has_unfinished(b->engine));
    free(job);
}

#define REFUSES(parameter, message, ...)                     \
    do {                                                     \
        struct job *job = plain_job(&b.fake, 1, 10, 5);      \
        struct request_spec *s = &job->spec;                 \
        __VA_ARGS__;                                         \
        expect_refusal(&b, job, parameter, message);         \
    } while (0)

TEST(bad_requests_are_refused)
{
    struct bench b;
    int32_t ids[] = {1, 40}, negative[] = {-1};
    struct id_list words[] = {{ids, 2}}, empty[] = {{ids, 0}};
    struct byte_string nothing = {"", 0};
    struct token_bias far = {40, 1}, infinite = {1, INFINITY};
    REQUIRE(bench_open(&b, &SMALL));
    REFUSES("prompt", "The decoder prompt cannot be empty", s->prompt.n = 0);
    REFUSES("prompt", "The decoder prompt (length 97) is longer than the maximum model length of 96.", s->prompt.n = 97;
            s->prompt.ids = (int32_t[97]){0});
    REFUSES("prompt", "The decoder prompt (length 96) plus the number of requested output tokens (at least 1) is longer", s->prompt.n = 96);
    REFUSES("prompt", "Token id 40 is out of vocabulary", s->prompt.ids = ids; s->prompt.n = 2);
    REFUSES("prompt", "Token id -1 is out of vocabulary", s->prompt.ids = negative; s->prompt.n = 1);
    REFUSES("output_token_ids", "Token id 40 is out of vocabulary", s->prior = (struct id_list){ids, 2});
    REFUSES("n", "n must be at least 1, got 0.", s->n = 0);
    REFUSES("n", "n must be at most 16384, got 16385.", s->n = 16385);
    REFUSES("n", "n must be 1 with output_token_ids, got 2.", s->n = 2; s->prior = (struct id_list){ids, 1});
    REFUSES("sample_index", "sample_index must be less than", s->sample_index = UINT32_MAX);
    REFUSES("temperature", "temperature must be a finite number, got nan.", s->temperature = NAN);
    REFUSES("temperature", "temperature must be non-negative, got -1.", s->temperature = -1);
    REFUSES("top_p", "top_p must be in (0, 1], got 0.", s->top_p = 0);
    REFUSES("min_p", "min_p must be in [0, 1], got 2.", s->min_p = 2);
    REFUSES("presence_penalty", "presence_penalty must be in [-2, 2], got nan.", s->presence_penalty = NAN);
    REFUSES("frequency_penalty", "frequency_penalty must be in [-2, 2], got 3.", s->frequency_penalty = 3);
    REFUSES("repetition_penalty", "repetition_penalty must be greater than zero, got 0.", s->repetition_penalty = 0);
    REFUSES("max_tokens", "max_tokens must be at least 1, got 0.", s->max_tokens = 0);
    REFUSES("min_tokens", "min_tokens must be less than or equal to max_tokens=5, got 6.", s->min_tokens = 6);
    REFUSES("logprobs", "Requested sample logprobs of 4, which is greater than max allowed: 3", s->n_logprobs = 4);
    REFUSES("prompt_logprobs", "Requested prompt logprobs of 4, which is greater than max allowed: 3", s->n_prompt_logprobs = 4);
    REFUSES("stop", "stop cannot contain an empty string.", s->stop_strings = &nothing; s->n_stop_strings = 1);
    REFUSES("logit_bias", "token_id(s) [40] in logit_bias contain out-of-vocab token ids. Vocabulary size: 40", s->bias = &far; s->n_bias = 1);
    REFUSES("logit_bias", "logit_bias values must be finite or -inf, got inf for token 1.", s->bias = &infinite; s->n_bias = 1);
    REFUSES("allowed_token_ids", "allowed_token_ids contains out-of-vocab token id!", s->allowed = words[0]);
    REFUSES("bad_words", "Token id 40 is out of vocabulary", s->bad_words = words; s->n_bad_words = 1);
    REFUSES("bad_words", "bad_words cannot contain an empty string.", s->bad_words = empty; s->n_bad_words = 1);
    REFUSES("priority", "priority is 1 but scheduling_policy is 'fcfs'", s->priority = 1);
    REFUSES("start", "start must be in [1, 10], got 11.", s->is_score = true; s->score_start = 11);
    REFUSES("temperature", "temperature must be greater than zero, got 0.", s->is_score = true; s->score_start = 1; s->temperature = 0);
    fake_close(b.engine, &b.fake);
}

TEST(impossible_engines_are_refused)
{
    struct bench b;
    struct setup setup = SMALL;
    setup.n_pages = 24; /* 96 positions take 24 pages, and page 0 is not used */
    CHECK(!fake_engine(&setup, &b.fake, &err));
    CHECK_EQ(err.rc, RC_CONFIG);
    CHECK_STR(err.message, "max_model_len=96 needs 1536 bytes of KV cache, 1472 available. 92 tokens would fit; raise "
                           "kv_cache_memory_bytes or lower max_model_len.");
    setup = SMALL;
    setup.max_num_batched_tokens = 7;
    CHECK(!fake_engine(&setup, &b.fake, &err));
    CHECK_STR(err.what, "max_num_batched_tokens");
    setup.n_pages = 26;
    setup.max_num_batched_tokens = 8;
    REQUIRE(bench_open(&b, &setup));
    fake_close(b.engine, &b.fake);
}

/* ---- memory and threads ---- */

TEST(every_failed_allocation_is_survived)
{
    struct bench b;
    uint64_t number, n_before = 0, random = 5;
    int64_t n_create = 0, n_submit = 0;
    for (;; n_create++) {
        mem_fail_after(n_create);
        b.engine = fake_engine(&SMALL, &b.fake, &err);
        mem_fail_after(-1);
        if (b.engine)
            break;
        CHECK_EQ(err.rc, RC_MEMORY);
    }
    CHECK(n_create > 15);
    struct job *job = malloc(sizeof *job);
    do
        random_job(job, &b.fake, POLICY_FCFS, &random);
    while (job->spec.n != 4);
    for (;; n_submit++) {
        mem_fail_after(n_submit);
        enum rc rc = engine_submit(b.engine, &job->spec, &number, &err);
        mem_fail_after(-1);
        if (!rc)
            break;
        CHECK_EQ(rc, RC_MEMORY);
        CHECK(!engine_has_unfinished(b.engine));
        CHECK_OK(engine_check(b.engine, &err));
    }
    CHECK_EQ(n_submit, 5); /* the request and its samples */
    job->number = number;
    job->is_submitted = true;
    bool progressed;
    n_before = mem_count();
    while (engine_has_unfinished(b.engine))
        REQUIRE_OK(engine_step(b.engine, &progressed, &err));
    CHECK_EQ(mem_count(), n_before); /* no step allocates */
    drain(b.engine, &job, 1);
    free(job);
    fake_close(b.engine, &b.fake);
}

struct submitter {
    struct engine *engine;
    struct job *jobs[50];
    pthread_t thread;
};

static void *submit_all(void *argument)
{
    struct submitter *s = argument;
    struct err own;
    for (uint32_t i = 0; i < 50; i++) {
        struct engine_stats stats;
        if (engine_submit(s->engine, &s->jobs[i]->spec, &s->jobs[i]->number, &own))
            return s;
        engine_stats(s->engine, &stats);
        if (s->jobs[i]->may_abort && engine_abort(s->engine, &s->jobs[i]->number, 1, &own))
            return s;
    }
    return NULL;
}

TEST(threads_submit_while_one_drives)
{
    struct bench b;
    struct submitter submitters[2];
    struct job *jobs[100];
    bool progressed;
    REQUIRE(bench_open(&b, &SMALL));
    for (uint32_t i = 0; i < 100; i++) {
        jobs[i] = submitters[i / 50].jobs[i % 50] = plain_job(&b.fake, i, 5 + i % 20, 6);
        jobs[i]->may_abort = i % 7 == 0;
        expect(jobs[i]);
    }
    for (int i = 0; i < 2; i++) {
        submitters[i].engine = b.engine;
        REQUIRE(!pthread_create(&submitters[i].thread, NULL, submit_all, &submitters[i]));
    }
    for (int i = 0; i < 200; i++)
        CHECK_OK(engine_step(b.engine, &progressed, &err)); /* takes nothing yet: numbers are being written */
    for (int i = 0; i < 2; i++) {
        void *failed;
        pthread_join(submitters[i].thread, &failed);
        CHECK(!failed);
    }
    for (uint32_t i = 0; i < 100; i++)
        jobs[i]->is_submitted = true;
    struct engine_stats stats = stats_of(&b);
    CHECK(stats.num_unfinished <= 100);
    while (engine_has_unfinished(b.engine))
        REQUIRE_OK(engine_step(b.engine, &progressed, &err));
    take_all(b.engine, true, jobs, 100);
    for (uint32_t i = 0; i < 100; i++)
        CHECK(jobs[i]->is_done);
    CHECK_OK(engine_check(b.engine, &err));
    free_jobs(jobs, 100);
    fake_close(b.engine, &b.fake);
}

TEST(times_are_in_order)
{
    struct bench b;
    struct output output;
    uint32_t n;
    bool progressed;
    REQUIRE(bench_open(&b, &SMALL));
    struct job *job = plain_job(&b.fake, 1, 30, 4);
    submit_job(b.engine, job);
    while (engine_has_unfinished(b.engine))
        CHECK_OK(engine_step(b.engine, &progressed, &err));
    CHECK_OK(engine_take(b.engine, true, &output, 1, &n, &err));
    REQUIRE(n == 1);
    CHECK(0 < output.queued && output.queued <= output.scheduled && output.scheduled < output.first_token && output.first_token < output.last_token);
    CHECK(output.is_last_of_request);
    CHECK_OK(engine_step(b.engine, &progressed, &err));
    CHECK(!progressed);
    free_jobs(&job, 1);
    fake_close(b.engine, &b.fake);
}
