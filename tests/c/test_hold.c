/* Holds on steps, on the fake model: updates of the weights with their epochs, and sleep. The expected tokens are computed here
 * from the weights that were current when each row was computed. */
#include "bench.h"

#include "../../csrc/base/mem.h"
#include "../../csrc/engine/driver.h"
#include "../../csrc/engine/engine_state.h"

#include <pthread.h>
#include <stdatomic.h>

#define SECONDS 60.0
#define NEW_WEIGHTS 0x5eed5eed5eed5eedu

static const struct setup SMALL = {.block_tokens = 4, .n_pages = 60, .max_num_seqs = 8, .max_num_batched_tokens = 16, .caches = true};

static bool has_states; /* of the models of the benches to come: recurrent ones */

static struct setup small_setup(bool is_async)
{
    struct setup setup = SMALL;
    setup.is_async = is_async;
    setup.states[0] = (struct kv_need){0, 3, 32};
    setup.n_states = has_states;
    setup.snapshot_tokens = 16;
    return setup;
}

static bool small_open(struct bench *b, bool is_async)
{
    struct setup setup = small_setup(is_async);
    return bench_open(b, &setup);
}

/* Of each position the weights that compute its row, and of each new token those that draw it. */
struct plan {
    uint64_t rows[MAX_LENGTH], draws[MAX_LENGTH];
};

static void plan_fill(uint64_t *weights, uint32_t first, uint64_t value)
{
    for (uint32_t i = first; i < MAX_LENGTH; i++)
        weights[i] = value;
}

static void expect_planned(struct job *job, const struct plan *plan)
{
    struct history h = {.layout = job->layout, .states = job->recurrent};
    struct expected *e = &job->expected[0];
    *e = (struct expected){.finish = FINISH_LENGTH};
    while (h.n < job->spec.prompt.n || e->n < job->spec.max_tokens) {
        int32_t token;
        if (h.n < job->spec.prompt.n) {
            token = job->prompt[h.n];
        } else {
            uint64_t logits = history_logits(&h, h.n - 1) ^ plan->draws[e->n];
            struct draw draw = draw_of_job(job, 0, e->ids, e->n, logits);
            e->results[e->n] = fake_draw(&draw, e->top_ids[e->n], e->top_values[e->n], e->top_ranks[e->n]);
            token = e->ids[e->n] = e->results[e->n].id;
            e->n++;
        }
        history_add_with(&h, token, plan->rows[h.n]);
    }
}

static void expect_with(struct job *job, uint64_t weights)
{
    struct plan plan;
    plan_fill(plan.rows, 0, weights);
    plan_fill(plan.draws, 0, weights);
    expect_planned(job, &plan);
}

/* Steps until the job has this many tokens, or has ended. */
static void advance(struct bench *b, struct job **jobs, uint32_t n_jobs, uint32_t n_tokens)
{
    bool progressed;
    for (uint32_t i = 0; i < 1000 && jobs[0]->n_received[0] < n_tokens && !jobs[0]->is_done; i++) {
        REQUIRE_OK(engine_step(b->engine, &progressed, &err));
        REQUIRE_OK(engine_check(b->engine, &err));
        take_all(b->engine, false, jobs, n_jobs);
    }
}

static uint32_t commit(struct bench *b, bool recompute)
{
    uint32_t epoch = 0;
    CHECK_OK(engine_hold_steps(b->engine, &err));
    b->fake.weights = NEW_WEIGHTS;
    CHECK_OK(engine_commit_weights(b->engine, recompute, NULL, &epoch, &err));
    CHECK_OK(engine_check(b->engine, &err));
    CHECK_EQ(engine_epoch(b->engine), epoch);
    return epoch;
}

/* One request over a commit: the tokens before it are those of the old weights, whatever comes; epochs tell which. */
static void over_a_commit(bool is_async, bool recompute)
{
    struct bench b;
    struct plan plan;
    struct output output[2];
    uint32_t n, n_old = 7, n_prompt = 9, seen = 0;
    bool progressed = true;
    REQUIRE(small_open(&b, is_async));
    struct job *job = plain_job(&b.fake, 3, n_prompt, 20);
    submit_job(b.engine, job);
    for (uint32_t i = 0; i < n_old + has_states; i++) /* a step a token, of which the last may be in flight; a prompt is cut */
        CHECK_OK(engine_step(b.engine, &progressed, &err));
    CHECK_OK(engine_settle(b.engine, &err));
    CHECK_OK(engine_take(b.engine, false, output, 2, &n, &err));
    REQUIRE(n == 1);
    n_old = output[0].n_new;
    CHECK_EQ(n_old, is_async ? 8 : 7);
    plan_fill(plan.rows, 0, recompute ? NEW_WEIGHTS : 0);
    plan_fill(plan.rows, n_prompt + n_old - 1, NEW_WEIGHTS);
    plan_fill(plan.draws, 0, 0);
    plan_fill(plan.draws, n_old, NEW_WEIGHTS);
    if (recompute) { /* of what was drawn under the old weights only the ids stay */
        struct plan old = {0};
        expect_planned(job, &old);
        job->expected[0].n = n_old;
    } else {
        expect_planned(job, &plan);
    }
    check_output(job, &output[0]);
    CHECK_EQ(commit(&b, recompute), 1);
    CHECK_EQ(stats_of(&b).num_preemptions, recompute);
    if (recompute) { /* the rest is that of a request which brings the old tokens along */
        struct job *rest = plain_job(&b.fake, 3, n_prompt + n_old, 20 - n_old);
        memcpy(rest->prompt + n_prompt, job->expected[0].ids, n_old * sizeof *rest->prompt);
        expect_with(rest, NEW_WEIGHTS);
        for (uint32_t i = 0; i < 20 - n_old; i++) {
            job->expected[0].ids[n_old + i] = rest->expected[0].ids[i];
            job->expected[0].results[n_old + i] = rest->expected[0].results[i];
        }
        job->expected[0].n = 20;
        job->expected[0].finish = FINISH_LENGTH;
        free(rest);
    }
    while (!job->is_done && progressed) {
        REQUIRE_OK(engine_step(b.engine, &progressed, &err));
        CHECK_OK(engine_take(b.engine, false, output, 2, &n, &err));
        for (uint32_t i = 0; i < n; i++) {
            for (uint32_t t = 0; t < output[i].n_new; t++, seen++)
                CHECK_EQ(output[i].epochs[t], 1);
            CHECK_EQ(output[i].epoch, 1);
            check_output(job, &output[i]);
        }
    }
    CHECK_EQ(seen, 20 - n_old);
    free(job);
    fake_close(b.engine, &b.fake);
}

TEST(tokens_tell_their_weights)
{
    for (int way = 0; way < 8; way++) {
        has_states = way & 4;
        over_a_commit(way & 1, way & 2);
    }
    has_states = false;
}

TEST(output_that_wait_keep_the_epochs_of_each_token)
{
    struct bench b;
    struct output output[2];
    uint32_t n;
    bool progressed;
    REQUIRE(small_open(&b, false));
    struct job *job = plain_job(&b.fake, 3, 5, 12);
    submit_job(b.engine, job);
    for (uint32_t i = 0; i < 12; i++) {
        CHECK_OK(engine_step(b.engine, &progressed, &err));
        if (i % 4 == 3)
            commit(&b, i > 4);
    }
    CHECK_OK(engine_take(b.engine, true, output, 2, &n, &err));
    REQUIRE(n == 1 && output[0].n_new == 12);
    for (uint32_t i = 0; i < 12; i++)
        CHECK_EQ(output[0].epochs[i], i / 4);
    CHECK_EQ(output[0].epoch, 2);
    free(job);
    fake_close(b.engine, &b.fake);
}

/* What came of a sample. */
struct outcome {
    uint32_t n, epochs[MAX_LENGTH], n_scores;
    int32_t ids[MAX_LENGTH];
    struct sample_result results[MAX_LENGTH], scores[MAX_LENGTH];
};
#define N_OUTCOMES 7u

/* Three samples of one prompt, a twin that shares its blocks, a prompt with logprobs, a continued request and a short one, with
 * a commit behind n_steps steps. */
static void interrupt(bool is_async, uint32_t n_steps, struct outcome *outcomes)
{
    struct bench b;
    struct output output[N_OUTCOMES];
    bool progressed;
    uint32_t n;
    REQUIRE(small_open(&b, is_async));
    struct job *jobs[5] = {plain_job(&b.fake, 5, 37, 6), plain_job(&b.fake, 5, 37, 6), plain_job(&b.fake, 6, 21, 6),
                           plain_job(&b.fake, 7, 30, 20), plain_job(&b.fake, 8, 3, 6)};
    jobs[0]->spec.n = 3;
    jobs[2]->spec.wants_prompt_logprobs = true;
    jobs[3]->spec.prior = (struct id_list){jobs[3]->prior, 8};
    for (uint32_t i = 0; i < 5; i++) {
        jobs[i]->spec.wants_logprobs = true;
        submit_job(b.engine, jobs[i]);
    }
    for (uint32_t i = 0; i < n_steps; i++)
        CHECK_OK(engine_step(b.engine, &progressed, &err));
    commit(&b, false);
    for (progressed = true; engine_has_unfinished(b.engine) && progressed;) {
        REQUIRE_OK(engine_step(b.engine, &progressed, &err));
        REQUIRE_OK(engine_check(b.engine, &err));
    }
    CHECK_OK(engine_take(b.engine, true, output, N_OUTCOMES, &n, &err));
    CHECK_EQ(n, N_OUTCOMES);
    for (uint32_t i = 0; i < n; i++) {
        struct outcome *o = &outcomes[output[i].request == jobs[0]->number ? output[i].sample : 1 + output[i].request - jobs[0]->number + 1];
        memset(o, 0, sizeof *o);
        o->n = output[i].n_new;
        memcpy(o->ids, output[i].ids, o->n * sizeof *o->ids);
        memcpy(o->epochs, output[i].epochs, o->n * sizeof *o->epochs);
        memcpy(o->results, output[i].results, o->n * sizeof *o->results);
        if ((o->n_scores = output[i].n_prompt_results))
            memcpy(o->scores, output[i].prompt_results, o->n_scores * sizeof *o->scores);
    }
    for (uint32_t i = 0; i < 5; i++)
        free(jobs[i]);
    fake_close(b.engine, &b.fake);
}

/* A sample with all tokens of one epoch equals the result of these weights alone, wherever in its prompt the commit was. */
TEST(a_prompt_that_a_commit_interrupts_starts_over)
{
    static struct outcome alone[N_OUTCOMES], found[N_OUTCOMES];
    for (uint32_t way = 0; way < 4; way++) {
        uint32_t n_new = 0;
        has_states = way & 2;
        interrupt(way & 1, 0, alone);
        CHECK_EQ(alone[4].n_scores, 20);
        for (uint32_t n_steps = 1; n_steps < 16; n_steps++) {
            interrupt(way & 1, n_steps, found);
            for (uint32_t i = 0; i < N_OUTCOMES; i++) {
                if (!found[i].epochs[0])
                    continue;
                n_new++;
                CHECK(!memcmp(&found[i], &alone[i], sizeof *found));
            }
        }
        CHECK(n_new >= 10);
    }
    has_states = false;
}

/* Blocks of older weights are never found, mixed sequences publish none, and what is free goes first. */
TEST(a_commit_parts_the_cache)
{
    struct bench b;
    REQUIRE(small_open(&b, false));
    struct job *jobs[4];
    for (uint32_t i = 0; i < 4; i++)
        jobs[i] = plain_job(&b.fake, i == 3 ? 8 : 5, 20, i ? 2 : 30);
    for (uint32_t i = 0; i < 4; i++)
        expect_with(jobs[i], i == 3 ? 0 : NEW_WEIGHTS);
    submit_job(b.engine, jobs[3]);
    drain(b.engine, jobs, 4);
    CHECK_EQ(stats_of(&b).kv_blocks_cached, 5);
    submit_job(b.engine, jobs[0]);
    bool progressed;
    for (uint32_t i = 0; i < 6; i++)
        CHECK_OK(engine_step(b.engine, &progressed, &err));
    commit(&b, false);
    CHECK_EQ(stats_of(&b).kv_blocks_cached, 0);
    uint64_t hits = stats_of(&b).prefix_cache_hits;
    struct plan mixed;
    plan_fill(mixed.rows, 0, 0);
    plan_fill(mixed.rows, 20 + 5 - 1, NEW_WEIGHTS); /* two steps of the prompt, the second of which draws */
    plan_fill(mixed.draws, 0, 0);
    plan_fill(mixed.draws, 5, NEW_WEIGHTS);
    expect_planned(jobs[0], &mixed);
    submit_job(b.engine, jobs[1]);
    advance(&b, jobs + 1, 0, 0);
    while (!jobs[1]->is_done && !check_failures) {
        CHECK_OK(engine_step(b.engine, &progressed, &err));
        take_all(b.engine, false, jobs, 4);
    }
    CHECK_EQ(stats_of(&b).prefix_cache_hits, hits); /* neither the old blocks nor those of the mixed one */
    submit_job(b.engine, jobs[2]);
    drain(b.engine, jobs, 4);
    CHECK_EQ(stats_of(&b).prefix_cache_hits, hits + 19); /* the new ones */
    for (uint32_t i = 0; i < 4; i++) {
        CHECK(jobs[i]->is_done);
        free(jobs[i]);
    }
    fake_close(b.engine, &b.fake);
}

/* A score is of one epoch: what a commit interrupts starts over. */
TEST(scores_are_of_one_epoch)
{
    struct bench b;
    struct output output[2];
    uint32_t n = 0;
    bool progressed;
    REQUIRE(small_open(&b, false));
    struct sample_result results[2][MAX_LENGTH];
    for (int round = 0; round < 2; round++) { /* the second without a commit in between */
        struct job *job = plain_job(&b.fake, 4, 60, 0);
        job->spec.is_score = true;
        job->spec.score_start = 1;
        submit_job(b.engine, job);
        for (uint32_t i = 0; i < 2; i++)
            CHECK_OK(engine_step(b.engine, &progressed, &err));
        if (!round)
            commit(&b, false);
        do
            CHECK_OK(engine_step(b.engine, &progressed, &err));
        while (progressed);
        CHECK_OK(engine_take(b.engine, true, output, 2, &n, &err));
        REQUIRE(n == 1 && output[0].n_prompt_results == 59);
        CHECK_EQ(output[0].epoch, 1);
        memcpy(results[round], output[0].prompt_results, 59 * sizeof **results);
        free(job);
    }
    CHECK(!memcmp(results[0], results[1], 59 * sizeof **results));
    CHECK(stats_of(&b).redone_rows > 0);
    fake_close(b.engine, &b.fake);
}

TEST(a_mixed_victim_is_counted)
{
    struct bench b;
    struct setup setup = SMALL;
    setup.n_pages = 1 + MAX_LENGTH / 4;
    b.engine = fake_engine(&setup, &b.fake, &err);
    REQUIRE(b.engine);
    struct job *jobs[2] = {plain_job(&b.fake, 1, 30, 50), plain_job(&b.fake, 2, 30, 50)};
    for (uint32_t i = 0; i < 2; i++)
        submit_job(b.engine, jobs[i]);
    bool progressed = true;
    for (uint32_t i = 0; i < 8; i++)
        CHECK_OK(engine_step(b.engine, &progressed, &err));
    CHECK_EQ(stats_of(&b).num_preemptions, 0);
    commit(&b, false);
    while (engine_has_unfinished(b.engine) && progressed) {
        REQUIRE_OK(engine_step(b.engine, &progressed, &err));
        REQUIRE_OK(engine_check(b.engine, &err));
    }
    CHECK(stats_of(&b).num_preemptions > 0);
    CHECK_EQ(stats_of(&b).num_mixed_preemptions, 1); /* once it has begun anew it is of one epoch */
    for (uint32_t i = 0; i < 2; i++)
        free(jobs[i]);
    fake_close(b.engine, &b.fake);
}

/* Two sequences over a commit, of which one is swapped: before the commit, or after it. Both keep their keys and values. */
static void swap_over_a_commit(bool is_async, bool is_swapped_before)
{
    struct bench b;
    struct setup setup = small_setup(is_async);
    struct output outputs[4];
    uint32_t n, n_seen = 0;
    bool progressed;
    setup.n_pages = 1 + MAX_LENGTH / 4 + 4 * has_states;
    setup.n_host_slots = 60;
    setup.preemption = PREEMPTION_SWAP;
    REQUIRE(bench_open(&b, &setup));
    struct job *jobs[2] = {plain_job(&b.fake, 1, 30, 50), plain_job(&b.fake, 2, 30, 50)};
    for (uint32_t i = 0; i < 2; i++)
        submit_job(b.engine, jobs[i]);
    for (uint32_t i = 0; i < 60 && (is_swapped_before ? !stats_of(&b).host_blocks_swapped : i < 10); i++)
        CHECK_OK(engine_step(b.engine, &progressed, &err));
    CHECK_EQ(stats_of(&b).host_blocks_swapped > 0, is_swapped_before);
    CHECK_OK(engine_settle(b.engine, &err));
    CHECK_OK(engine_take(b.engine, false, outputs, 4, &n, &err));
    CHECK_EQ(n, 2);
    for (uint32_t i = 0; i < n; i++) {
        struct job *job = jobs[outputs[i].request != jobs[0]->number];
        struct plan plan = {0};
        plan_fill(plan.rows, 30 + outputs[i].n_new - 1, NEW_WEIGHTS);
        plan_fill(plan.draws, outputs[i].n_new, NEW_WEIGHTS);
        expect_planned(job, &plan);
        check_output(job, &outputs[i]);
        n_seen += outputs[i].n_new > 0;
    }
    CHECK_EQ(n_seen, 2);
    commit(&b, false);
    drain(b.engine, jobs, 2);
    struct engine_stats stats = stats_of(&b);
    CHECK(stats.num_swaps > 0);
    CHECK_EQ(stats.num_swaps, stats.num_preemptions);
    CHECK_EQ(stats.num_mixed_preemptions + stats.redone_rows, 0);
    free_jobs(jobs, 2);
    fake_close(b.engine, &b.fake);
}

TEST(a_mixed_victim_may_swap)
{
    for (uint32_t i = 0; i < 8; i++) {
        has_states = i & 4;
        swap_over_a_commit(i & 1, i & 2);
        if (check_failures)
            fprintf(stderr, "in case %u\n", i);
    }
    has_states = false;
}

/* While weights are written, and while they are torn, requests wait and can be ended. */
TEST(held_steps_do_not_run)
{
    struct bench b;
    bool progressed;
    uint32_t epoch;
    REQUIRE(small_open(&b, true));
    struct job *jobs[2] = {plain_job(&b.fake, 1, 9, 9), plain_job(&b.fake, 2, 9, 9)};
    expect_with(jobs[1], NEW_WEIGHTS);
    submit_job(b.engine, jobs[0]);
    CHECK_OK(engine_refusal(b.engine, &err));
    CHECK_OK(engine_hold_steps(b.engine, &err));
    CHECK_EQ(engine_step(b.engine, &progressed, &err), RC_BUSY);
    CHECK(strstr(err.message, "being updated"));
    engine_abort_update(b.engine, true);
    CHECK_EQ(engine_step(b.engine, &progressed, &err), RC_WEIGHTS_MISSING);
    CHECK(!strcmp(err.message, "weights are incomplete since epoch 0; commit a full update"));
    CHECK_EQ(b.fake.n_runs, 0);
    submit_job(b.engine, jobs[1]);
    jobs[0]->may_abort = true;
    CHECK_OK(engine_abort(b.engine, &jobs[0]->number, 1, &err));
    take_all(b.engine, false, jobs, 2);
    CHECK(jobs[0]->is_done && !jobs[1]->is_done);
    CHECK_OK(engine_hold_steps(b.engine, &err));
    b.fake.weights = NEW_WEIGHTS;
    CHECK_OK(engine_commit_weights(b.engine, false, NULL, &epoch, &err));
    CHECK_EQ(engine_holds(b.engine), 0);
    drain(b.engine, jobs, 2);
    CHECK(jobs[1]->is_done);
    CHECK_OK(engine_hold_steps(b.engine, &err));
    engine_abort_update(b.engine, false); /* nothing was written */
    CHECK_OK(engine_refusal(b.engine, &err));
    CHECK_EQ(engine_epoch(b.engine), 1);
    for (uint32_t i = 0; i < 2; i++)
        free(jobs[i]);
    fake_close(b.engine, &b.fake);
}

/* Whatever sleeps, and however it wakes, the tokens are those of a run without. */
TEST(sleep_changes_no_token)
{
    static const uint32_t WAYS[][3] = {
        /* what sleeps, what wakes first, what wakes then */
        {PART_POOL, PART_POOL, 0},
        {PART_WEIGHTS, PART_WEIGHTS, 0},
        {PART_WEIGHTS | PART_POOL, PART_WEIGHTS, PART_POOL},
        {PART_WEIGHTS | PART_POOL, PART_POOL, PART_WEIGHTS},
        {PART_WEIGHTS | PART_POOL, PART_SCHEDULING, PART_POOL | PART_WEIGHTS},
        {PART_WEIGHTS | PART_POOL, PART_WEIGHTS | PART_POOL | PART_SCHEDULING, 0},
    };
    bool progressed;
    for (uint32_t way = 0; way < 4 * sizeof WAYS / sizeof *WAYS; way++) {
        struct bench b;
        const uint32_t *parts = WAYS[way / 4];
        has_states = way & 2;
        REQUIRE(small_open(&b, way % 2));
        struct job *jobs[3] = {plain_job(&b.fake, 1, 9, 19), plain_job(&b.fake, 2, 30, 9), plain_job(&b.fake, 1, 9, 9)};
        for (uint32_t i = 0; i < 3; i++)
            expect(jobs[i]);
        submit_job(b.engine, jobs[0]);
        submit_job(b.engine, jobs[1]);
        advance(&b, jobs, 3, 5);
        CHECK_OK(engine_sleep(b.engine, 1, parts[0], &err));
        CHECK_OK(engine_sleep(b.engine, 1, parts[0], &err)); /* which does nothing */
        CHECK_OK(engine_sleep(b.engine, 0, parts[0], &err));
        CHECK_EQ(b.fake.n_releases, 1);
        CHECK_EQ(stats_of(&b).sleep_level, 1);
        CHECK_OK(engine_check(b.engine, &err));
        submit_job(b.engine, jobs[2]);
        CHECK_EQ(engine_step(b.engine, &progressed, &err), RC_ASLEEP);
        CHECK(!strcmp(err.message, "engine sleeps at level 1; call wake_up()"));
        CHECK_OK(engine_wake(b.engine, parts[1], &err));
        if (parts[2]) {
            CHECK_EQ(engine_step(b.engine, &progressed, &err), RC_ASLEEP);
            CHECK_OK(engine_wake(b.engine, parts[2], &err));
        }
        CHECK_OK(engine_wake(b.engine, PART_WEIGHTS | PART_POOL | PART_SCHEDULING, &err));
        CHECK_EQ(engine_holds(b.engine), 0);
        CHECK_EQ(stats_of(&b).sleep_level, 0);
        drain(b.engine, jobs, 3);
        for (uint32_t i = 0; i < 3; i++) {
            CHECK(jobs[i]->is_done);
            free(jobs[i]);
        }
        fake_close(b.engine, &b.fake);
    }
    has_states = false;
}

TEST(too_little_memory_changes_nothing)
{
    struct bench b;
    REQUIRE(small_open(&b, false));
    struct job *job = plain_job(&b.fake, 1, 9, 19);
    submit(&b, job);
    advance(&b, &job, 1, 5);
    b.fake.no_room_for = PART_WEIGHTS;
    CHECK_EQ(engine_sleep(b.engine, 1, PART_WEIGHTS | PART_POOL, &err), RC_DEVICE_MEMORY);
    CHECK_EQ(engine_holds(b.engine), 0);
    advance(&b, &job, 1, 8);
    CHECK_EQ(stats_of(&b).num_preemptions, 0);
    b.fake.no_room_for = 0;
    CHECK_OK(engine_sleep(b.engine, 1, PART_WEIGHTS | PART_POOL, &err));
    b.fake.no_room_for = PART_POOL;
    CHECK_EQ(engine_wake(b.engine, PART_WEIGHTS | PART_POOL | PART_SCHEDULING, &err), RC_DEVICE_MEMORY);
    CHECK_EQ(engine_holds(b.engine), HOLD_WEIGHTS | HOLD_POOL | HOLD_SCHEDULING);
    CHECK_EQ(engine_hold_steps(b.engine, &err), RC_ASLEEP);
    CHECK_OK(engine_wake(b.engine, PART_WEIGHTS, &err));
    b.fake.no_room_for = 0;
    CHECK_OK(engine_wake(b.engine, PART_POOL, &err));
    drain(b.engine, &job, 1);
    CHECK(job->is_done);
    free(job);
    fake_close(b.engine, &b.fake);
}

struct sleeper {
    uint32_t asleep, n_releases;
    bool has_no_room;
};

static enum rc sleeper_release(void *ctx, uint32_t parts, bool keeps, struct err *error)
{
    struct sleeper *s = ctx;
    if (s->has_no_room)
        return err_set(error, RC_DEVICE_MEMORY, "no room");
    CHECK(keeps && !(s->asleep & parts));
    s->asleep |= parts;
    s->n_releases++;
    return RC_OK;
}

static enum rc sleeper_restore(void *ctx, uint32_t parts, struct err *error)
{
    struct sleeper *s = ctx;
    if (s->has_no_room)
        return err_set(error, RC_DEVICE_MEMORY, "no room");
    CHECK_EQ(s->asleep & parts, parts);
    s->asleep &= ~parts;
    return RC_OK;
}

/* Both models sleep and wake, or none does. */
TEST(a_drafter_sleeps_with_its_model)
{
    struct bench b;
    struct sleeper drafter = {0};
    uint32_t both = PART_WEIGHTS | PART_POOL;
    REQUIRE(small_open(&b, false));
    b.engine->config.drafts.method = DRAFT_MODEL;
    b.engine->config.drafter.n_runners = 1;
    b.engine->config.drafter.runners[0] = (struct runner){.ctx = &drafter, .release = sleeper_release, .restore = sleeper_restore};
    b.fake.no_room_for = PART_WEIGHTS;
    CHECK_EQ(engine_sleep(b.engine, 1, both, &err), RC_DEVICE_MEMORY);
    CHECK(!drafter.asleep && drafter.n_releases == 1 && !engine_holds(b.engine));
    b.fake.no_room_for = 0;
    drafter.has_no_room = true;
    CHECK_EQ(engine_sleep(b.engine, 1, both, &err), RC_DEVICE_MEMORY);
    CHECK(!b.fake.n_releases && !engine_holds(b.engine));
    drafter.has_no_room = false;
    CHECK_OK(engine_sleep(b.engine, 1, PART_POOL, &err));
    CHECK_EQ(drafter.asleep, PART_POOL);
    CHECK_OK(engine_sleep(b.engine, 1, both, &err));
    CHECK_OK(engine_sleep(b.engine, 2, both, &err)); /* drops the model's copy alone */
    CHECK(drafter.asleep == both && drafter.n_releases == 3 && b.fake.n_releases == 3);
    b.fake.no_room_for = PART_POOL;
    CHECK_EQ(engine_wake(b.engine, both, &err), RC_DEVICE_MEMORY);
    CHECK_EQ(drafter.asleep, both);
    b.fake.no_room_for = 0;
    CHECK_OK(engine_wake(b.engine, PART_WEIGHTS, &err));
    CHECK_EQ(drafter.asleep, PART_POOL);
    CHECK_OK(engine_wake(b.engine, PART_POOL, &err));
    CHECK(!drafter.asleep);
    b.engine->config.drafts.method = DRAFT_NONE;
    fake_close(b.engine, &b.fake);
}

TEST(level_two_wants_an_update)
{
    struct bench b;
    bool progressed;
    uint32_t epoch;
    for (int from_one = 0; from_one < 2; from_one++) {
        REQUIRE(small_open(&b, from_one));
        struct job *job = plain_job(&b.fake, 1, 9, 19);
        expect_with(job, NEW_WEIGHTS);
        if (from_one)
            CHECK_OK(engine_sleep(b.engine, 1, PART_WEIGHTS | PART_POOL, &err));
        CHECK_OK(engine_sleep(b.engine, 2, PART_WEIGHTS | PART_POOL, &err)); /* from level 1 it drops the copy */
        CHECK_OK(engine_sleep(b.engine, 2, PART_WEIGHTS, &err));
        CHECK_EQ(b.fake.n_releases, 1 + from_one);
        CHECK_OK(engine_sleep(b.engine, 1, PART_WEIGHTS, &err));
        CHECK_EQ(b.fake.n_releases, 1 + from_one);
        submit_job(b.engine, job);
        CHECK_EQ(engine_step(b.engine, &progressed, &err), RC_ASLEEP);
        CHECK(strstr(err.message, "level 2"));
        CHECK_OK(engine_wake(b.engine, PART_WEIGHTS, &err));
        CHECK_OK(engine_hold_steps(b.engine, &err)); /* the pool may sleep on while weights come */
        CHECK_EQ(engine_sleep(b.engine, 1, PART_WEIGHTS, &err), RC_BUSY);
        b.fake.weights = NEW_WEIGHTS;
        if (from_one) {
            CHECK_OK(engine_commit_weights(b.engine, false, NULL, &epoch, &err));
            CHECK_EQ(engine_step(b.engine, &progressed, &err), RC_ASLEEP);
            CHECK_OK(engine_wake(b.engine, PART_POOL, &err));
        } else {
            CHECK_OK(engine_wake(b.engine, PART_POOL, &err));
            engine_abort_update(b.engine, false);
            CHECK_EQ(engine_step(b.engine, &progressed, &err), RC_WEIGHTS_MISSING);
            CHECK_OK(engine_hold_steps(b.engine, &err));
            CHECK_OK(engine_commit_weights(b.engine, false, NULL, &epoch, &err));
        }
        drain(b.engine, &job, 1);
        CHECK(job->is_done);
        free(job);
        fake_close(b.engine, &b.fake);
    }
}

/* ---- the engine's thread ---- */

struct crowd {
    struct fake fake;
    struct engine *engine;
    struct driver *driver;
    atomic_uint seeds;
    atomic_bool is_over;
};

static enum rc call_sleep(struct engine *engine, void *ctx, struct err *problem)
{
    return engine_sleep(engine, *(uint32_t *)ctx, PART_WEIGHTS | PART_POOL, problem);
}

static enum rc call_wake(struct engine *engine, void *ctx, struct err *problem)
{
    return engine_wake(engine, *(uint32_t *)ctx, problem);
}

/* An update that brings the weights that are there. */
static enum rc call_update(struct engine *engine, void *ctx, struct err *problem)
{
    struct crowd *crowd = ctx;
    uint32_t epoch;
    enum rc rc = engine_hold_steps(engine, problem);
    if (rc)
        return rc == RC_ASLEEP ? RC_OK : rc;
    crowd->fake.weights = 0;
    return engine_commit_weights(engine, engine_epoch(engine) % 2, NULL, &epoch, problem);
}

static void check_order(const struct output *output, uint32_t *epoch)
{
    for (uint32_t i = 0; i < output->n_new; i++) {
        CHECK(output->epochs[i] >= *epoch);
        *epoch = output->epochs[i];
    }
}

static void *ask(void *ctx)
{
    struct crowd *crowd = ctx;
    struct err problem;
    struct output output[1];
    uint32_t seed;
    while ((seed = atomic_fetch_add(&crowd->seeds, 1)) < 200 && !check_failures) {
        struct job *job = plain_job(&crowd->fake, seed % 7, 5 + seed % 20, 1 + seed % 15);
        struct subscription *subscription;
        uint32_t n, epoch = 0;
        expect(job);
        CHECK_OK(driver_submit(crowd->driver, NULL, &job->spec, seed % 3 == 0, &subscription, &problem));
        while (!job->is_done && !check_failures) {
            CHECK(subscription_wait(subscription, SECONDS));
            while (subscription_take_more(subscription, output)) {
                check_order(output, &epoch);
                check_output(job, output);
            }
            CHECK_OK(subscription_take(subscription, output, 1, &n, &problem));
            if (n) {
                check_order(output, &epoch);
                check_output(job, output);
            }
        }
        subscription_drop(subscription);
        free(job);
    }
    return NULL;
}

static void *disturb(void *ctx)
{
    struct crowd *crowd = ctx;
    struct err problem;
    uint64_t random = 5;
    while (!atomic_load(&crowd->is_over)) {
        uint32_t level = check_below(&random, 3), all = 7, way = check_below(&random, 4);
        if (way == 0) {
            CHECK_OK(driver_call(crowd->driver, call_update, crowd, &problem));
        } else if (way == 1) {
            driver_pause(crowd->driver, PAUSE_KEEP);
            CHECK(driver_wait(crowd->driver, DRIVER_PAUSED, 0, SECONDS));
            driver_pause(crowd->driver, PAUSE_NONE);
        } else {
            driver_begin_sleep(crowd->driver, PAUSE_KEEP);
            CHECK(driver_wait(crowd->driver, DRIVER_PAUSED, 0, SECONDS));
            CHECK_OK(driver_call(crowd->driver, call_sleep, &level, &problem));
            driver_end_sleep(crowd->driver);
            CHECK_OK(driver_call(crowd->driver, call_wake, &all, &problem));
            if (level == 2)
                CHECK_OK(driver_call(crowd->driver, call_update, crowd, &problem));
        }
    }
    return NULL;
}

TEST(a_crowd_sleeps_and_learns)
{
    for (int way = 0; way < 4; way++) {
        struct crowd crowd = {.seeds = 0};
        has_states = way & 2;
        struct setup setup = small_setup(way & 1);
        pthread_t askers[4], disturber;
        crowd.engine = fake_engine(&setup, &crowd.fake, &err);
        REQUIRE(crowd.engine && !driver_create(crowd.engine, 0, &crowd.driver, &err));
        for (uint32_t i = 0; i < 4; i++)
            pthread_create(&askers[i], NULL, ask, &crowd);
        pthread_create(&disturber, NULL, disturb, &crowd);
        for (uint32_t i = 0; i < 4; i++)
            pthread_join(askers[i], NULL);
        atomic_store(&crowd.is_over, true);
        pthread_join(disturber, NULL);
        driver_close(crowd.driver);
        CHECK_OK(engine_check(crowd.engine, &err));
        struct engine_stats stats;
        engine_stats(crowd.engine, &stats);
        CHECK_EQ(stats.num_unfinished, 0);
        CHECK_EQ(stats.kv_blocks_free, stats.kv_blocks_total);
        driver_release(crowd.driver);
        fake_close(crowd.engine, &crowd.fake);
    }
    has_states = false;
}

/* The pause of a sleep and that of a caller do not end each other. */
TEST(pauses_of_a_sleep_and_of_a_caller_are_two)
{
    struct crowd b = {.seeds = 0};
    b.engine = fake_engine(&SMALL, &b.fake, &err);
    REQUIRE(b.engine && !driver_create(b.engine, 0, &b.driver, &err));
    driver_begin_sleep(b.driver, PAUSE_KEEP);
    CHECK(!driver_is_pausing(b.driver));
    CHECK(driver_wait(b.driver, DRIVER_PAUSED, 0, SECONDS));
    driver_pause(b.driver, PAUSE_KEEP);
    driver_begin_sleep(b.driver, PAUSE_WAIT);
    driver_end_sleep(b.driver);
    driver_end_sleep(b.driver);
    CHECK(driver_state(b.driver) & DRIVER_PAUSED);
    driver_begin_sleep(b.driver, PAUSE_KEEP);
    driver_pause(b.driver, PAUSE_NONE);
    CHECK(driver_state(b.driver) & DRIVER_PAUSED);
    driver_end_sleep(b.driver);
    CHECK(!(driver_state(b.driver) & DRIVER_PAUSED));
    driver_close(b.driver);
    driver_release(b.driver);
    fake_close(b.engine, &b.fake);
}
