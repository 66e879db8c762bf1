/* The thread that drives an engine, its subscription and its notifiers, on the fake model; an oracle knows every expected token.
 * Built a second time under ThreadSanitizer. */
#include "fake_model.h"

#include "../../csrc/base/mem.h"
#include "../../csrc/engine/driver.h"
#include "../../csrc/engine/engine_state.h"

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#define N_THREADS 4u
#define N_JOBS 60u
#define N_READ 20u
#define SECONDS 60.0

static const struct setup SMALL = {.block_tokens = 4, .n_pages = 90, .max_num_seqs = 8, .max_num_batched_tokens = 16, .caches = true,
                                   .is_async = true};

static struct err err;
static bool is_async;

/* A test with each kind of runner: one step after another, and overlapped. */
#define TEST_BOTH(test)                                                                                                        \
    static void test(void);                                                                                                    \
    TEST(test##_serial)                                                                                                        \
    {                                                                                                                          \
        is_async = false;                                                                                                      \
        test();                                                                                                                \
    }                                                                                                                          \
    TEST(test##_overlapped)                                                                                                    \
    {                                                                                                                          \
        is_async = true;                                                                                                       \
        test();                                                                                                                \
    }                                                                                                                          \
    static void test(void)

struct bench {
    struct fake fake;
    struct engine *engine;
    struct driver *driver;
};

static bool bench_open(struct bench *b, uint32_t max_queued)
{
    struct setup setup = SMALL;
    setup.is_async = is_async;
    b->driver = NULL;
    b->engine = fake_engine(&setup, &b->fake, &err);
    if (!b->engine || driver_create(b->engine, max_queued, &b->driver, &err)) {
        CHECK_FAIL("%s", err.message);
        return false;
    }
    return true;
}

static void bench_close(struct bench *b)
{
    driver_close(b->driver);
    driver_close(b->driver);
    CHECK_EQ(driver_state(b->driver) & (DRIVER_CLOSED | DRIVER_IDLE), DRIVER_CLOSED | DRIVER_IDLE);
    CHECK_OK(engine_check(b->engine, &err));
    struct engine_stats stats;
    engine_stats(b->engine, &stats);
    CHECK_EQ(stats.num_unfinished + stats.num_running + stats.num_waiting, 0);
    if (!driver_fault(b->driver, &err))
        CHECK_EQ(stats.kv_blocks_free, stats.kv_blocks_total);
    driver_release(b->driver);
    fake_close(b->engine, &b->fake);
}

/* A job with its expected results. */
static struct job *known_job(const struct fake *fake, uint32_t stream, uint32_t n_prompt, uint32_t n_new)
{
    struct job *job = plain_job(fake, stream, n_prompt, n_new);
    expect(job);
    return job;
}

static struct subscription *submit(struct bench *b, struct notifier *notifier, const struct job *job, bool ends_only)
{
    struct subscription *subscription = NULL;
    struct err problem;
    if (driver_submit(b->driver, notifier, &job->spec, ends_only, &subscription, &problem))
        CHECK_FAIL("%s", problem.message);
    return subscription;
}

/* Takes what there is, and compares it with the oracle. */
static void read_subscription(struct subscription *subscription, struct job *job)
{
    struct output output[2];
    struct err problem;
    uint32_t n = 2;
    while (subscription_take_more(subscription, output))
        check_output(job, output);
    while (n == 2) {
        if (subscription_take(subscription, output, 2, &n, &problem))
            CHECK_FAIL("%s", problem.message);
        for (uint32_t i = 0; i < n; i++)
            check_output(job, &output[i]);
    }
}

static void read_to_end(struct subscription *subscription, struct job *job)
{
    while (!job->is_done && !check_failures) {
        if (!subscription_wait(subscription, SECONDS))
            CHECK_FAIL("no output of request %" PRIu64, subscription_number(subscription));
        read_subscription(subscription, job);
    }
}

TEST_BOTH(reads_what_was_asked)
{
    struct bench b;
    uint64_t random = 1;
    REQUIRE(bench_open(&b, 0));
    struct job *job = malloc(sizeof *job);
    for (uint32_t i = 0; i < 100 && !check_failures; i++) {
        random_job(job, &b.fake, POLICY_FCFS, &random);
        struct subscription *subscription = submit(&b, NULL, job, i % 2);
        read_to_end(subscription, job);
        subscription_drop(subscription);
    }
    CHECK(driver_wait(b.driver, DRIVER_IDLE, 0, SECONDS));
    free(job);
    bench_close(&b);
}

/* Unread output are merged into one piece and delivered once. */
TEST_BOTH(merges_what_is_not_read)
{
    struct bench b;
    struct output output[2];
    uint32_t n, states;
    uint64_t numbers[4];
    struct notifier *notifier;
    REQUIRE(bench_open(&b, 0));
    REQUIRE_OK(notifier_create(b.driver, &notifier, &err));
    struct job *job = known_job(&b.fake, 1, 10, 60);
    struct subscription *subscription = submit(&b, notifier, job, false);
    CHECK(driver_wait(b.driver, DRIVER_IDLE, 0, SECONDS));
    notifier_take(notifier, numbers, 4, &n, &states);
    CHECK_EQ(n, 1);
    CHECK_EQ(numbers[0], subscription_number(subscription));
    notifier_take(notifier, numbers, 4, &n, &states);
    CHECK_EQ(n, 0);
    CHECK_OK(subscription_take(subscription, output, 2, &n, &err));
    CHECK_EQ(n, 1);
    CHECK_EQ(output[0].n_new, 60);
    check_output(job, &output[0]);
    CHECK(job->is_done);
    CHECK_OK(subscription_take(subscription, output, 2, &n, &err));
    CHECK_EQ(n, 0);
    subscription_drop(subscription);
    notifier_destroy(notifier);
    free(job);
    bench_close(&b);
}

static bool is_readable(const struct notifier *notifier, int milliseconds)
{
    struct pollfd poll_for = {.fd = notifier_descriptor(notifier), .events = POLLIN};
    return poll(&poll_for, 1, milliseconds) == 1;
}

TEST_BOTH(notifier_tells_of_ends_and_states)
{
    struct bench b;
    uint32_t n, states;
    uint64_t numbers[4];
    struct notifier *notifier;
    REQUIRE(bench_open(&b, 0));
    REQUIRE_OK(notifier_create(b.driver, &notifier, &err));
    struct job *job = known_job(&b.fake, 2, 5, 20);
    struct subscription *subscription = submit(&b, notifier, job, true);
    CHECK(is_readable(notifier, 30000));
    notifier_take(notifier, numbers, 4, &n, &states);
    CHECK_EQ(n, 1);
    CHECK_EQ(states, 0);
    read_subscription(subscription, job);
    CHECK(job->is_done);
    CHECK(!is_readable(notifier, 0));
    notifier_watch(notifier, DRIVER_IDLE, 0);
    CHECK(is_readable(notifier, 30000));
    notifier_take(notifier, numbers, 4, &n, &states);
    CHECK_EQ(states, DRIVER_IDLE);
    notifier_watch(notifier, DRIVER_CLOSED, driver_next_boundary(b.driver));
    CHECK(is_readable(notifier, 30000));
    notifier_take(notifier, numbers, 4, &n, &states);
    CHECK_EQ(states, DRIVER_BOUNDARY);
    driver_stop(b.driver);
    CHECK(is_readable(notifier, 30000));
    notifier_take(notifier, numbers, 4, &n, &states);
    CHECK_EQ(states, DRIVER_CLOSED);
    subscription_drop(subscription);
    free(job);
    bench_close(&b);
    notifier_destroy(notifier); /* outlives the driver's creator */
}

TEST_BOTH(abort_gives_what_there_is)
{
    struct bench b;
    REQUIRE(bench_open(&b, 0));
    for (uint32_t i = 0; i < 20; i++) {
        struct job *job = known_job(&b.fake, i, 8, 80);
        job->may_abort = true;
        struct subscription *subscription = submit(&b, NULL, job, false);
        if (i % 3)
            CHECK(subscription_wait(subscription, SECONDS));
        subscription_abort(subscription);
        subscription_abort(subscription);
        CHECK(driver_wait(b.driver, 0, driver_next_boundary(b.driver), SECONDS));
        read_subscription(subscription, job);
        CHECK(job->is_done);
        subscription_drop(subscription);
        free(job);
    }
    bench_close(&b);
}

static uint64_t n_tokens(struct bench *b)
{
    struct engine_stats stats;
    engine_stats(b->engine, &stats);
    return stats.generation_tokens;
}

TEST_BOTH(keep_freezes_and_wait_finishes)
{
    struct bench b;
    REQUIRE(bench_open(&b, 0));
    struct job *jobs[3];
    for (uint32_t i = 0; i < 3; i++)
        jobs[i] = known_job(&b.fake, i, 8, 80);
    struct subscription *first = submit(&b, NULL, jobs[0], false);
    CHECK(subscription_wait(first, SECONDS));
    driver_pause(b.driver, PAUSE_KEEP);
    CHECK(driver_is_pausing(b.driver));
    CHECK(driver_wait(b.driver, DRIVER_PAUSED, 0, SECONDS));
    uint64_t n = n_tokens(&b);
    struct subscription *second = submit(&b, NULL, jobs[1], false);
    CHECK(driver_wait(b.driver, 0, driver_next_boundary(b.driver), SECONDS));
    CHECK_EQ(n_tokens(&b), n);
    CHECK_EQ(b.fake.n_in_flight, 0);
    driver_pause(b.driver, PAUSE_WAIT); /* changes nothing */
    CHECK(driver_state(b.driver) & DRIVER_PAUSED);
    driver_pause(b.driver, PAUSE_NONE);
    CHECK(subscription_wait(second, SECONDS));
    driver_pause(b.driver, PAUSE_WAIT);
    struct subscription *third = submit(&b, NULL, jobs[2], false);
    CHECK(driver_wait(b.driver, DRIVER_PAUSED, 0, SECONDS));
    CHECK(!(driver_state(b.driver) & DRIVER_IDLE));
    read_to_end(first, jobs[0]);
    read_to_end(second, jobs[1]);
    CHECK(!subscription_wait(third, 0.01));
    driver_pause(b.driver, PAUSE_NONE);
    read_to_end(third, jobs[2]);
    subscription_drop(first);
    subscription_drop(second);
    subscription_drop(third);
    for (uint32_t i = 0; i < 3; i++)
        free(jobs[i]);
    bench_close(&b);
}

/* Behind a pause's gate requests can be aborted and dropped; a tightened pause ends them. */
TEST_BOTH(gate_lets_aborts_through)
{
    struct bench b;
    REQUIRE(bench_open(&b, 0));
    struct job *jobs[4];
    struct subscription *subscriptions[4];
    driver_pause(b.driver, PAUSE_WAIT);
    CHECK(driver_wait(b.driver, DRIVER_PAUSED, 0, SECONDS));
    for (uint32_t i = 0; i < 4; i++) {
        jobs[i] = known_job(&b.fake, i, 8, 80);
        jobs[i]->may_abort = i != 3;
        if (i < 3)
            subscriptions[i] = submit(&b, NULL, jobs[i], false);
    }
    subscription_abort(subscriptions[1]);
    read_to_end(subscriptions[1], jobs[1]);
    subscription_drop(subscriptions[2]);
    CHECK(!subscription_wait(subscriptions[0], 0));
    driver_pause(b.driver, PAUSE_ABORT);
    read_to_end(subscriptions[0], jobs[0]);
    CHECK(driver_wait(b.driver, DRIVER_PAUSED, 0, SECONDS));
    subscriptions[3] = submit(&b, NULL, jobs[3], false);
    CHECK(!subscription_wait(subscriptions[3], 0.01));
    driver_pause(b.driver, PAUSE_NONE);
    read_to_end(subscriptions[3], jobs[3]);
    for (uint32_t i = 0; i < 4; i++) {
        if (i != 2)
            subscription_drop(subscriptions[i]);
        free(jobs[i]);
    }
    bench_close(&b);
}

TEST_BOTH(fault_reaches_everybody)
{
    struct bench b;
    struct subscription *subscriptions[12];
    REQUIRE(bench_open(&b, 0));
    driver_pause(b.driver, PAUSE_KEEP);
    struct job *job = known_job(&b.fake, 1, 8, 80);
    for (uint32_t i = 0; i < 12; i++)
        subscriptions[i] = submit(&b, NULL, job, i % 2);
    b.fake.fails_at = 7;
    driver_pause(b.driver, PAUSE_NONE);
    CHECK(driver_wait(b.driver, DRIVER_DEAD, 0, SECONDS));
    CHECK(driver_wait(b.driver, DRIVER_IDLE, 0, SECONDS));
    for (uint32_t i = 0; i < 12; i++) {
        struct output output;
        uint32_t n;
        CHECK(subscription_wait(subscriptions[i], SECONDS));
        CHECK_OK(subscription_take(subscriptions[i], &output, 1, &n, &err));
        CHECK_EQ(n, 1);
        CHECK_EQ(output.finish, FINISH_ERROR);
        subscription_drop(subscriptions[i]);
    }
    CHECK_EQ(driver_fault(b.driver, &err), RC_DEVICE);
    CHECK(strstr(err.message, "on fire") != NULL);
    struct subscription *subscription;
    CHECK_EQ(driver_submit(b.driver, NULL, &job->spec, false, &subscription, &err), RC_DEAD);
    free(job);
    bench_close(&b);
}

TEST_BOTH(queue_is_limited)
{
    struct bench b;
    struct subscription *subscriptions[3];
    REQUIRE(bench_open(&b, 2));
    driver_pause(b.driver, PAUSE_KEEP);
    struct job *job = known_job(&b.fake, 1, 8, 30);
    subscriptions[0] = submit(&b, NULL, job, false);
    subscriptions[1] = submit(&b, NULL, job, false);
    CHECK_EQ(driver_submit(b.driver, NULL, &job->spec, false, &subscriptions[2], &err), RC_QUEUE_FULL);
    CHECK_EQ(err.code, 2);
    CHECK(!driver_wait(b.driver, DRIVER_HAS_ROOM, 0, 0.01));
    driver_pause(b.driver, PAUSE_NONE);
    CHECK(driver_wait(b.driver, DRIVER_HAS_ROOM, 0, SECONDS));
    subscription_drop(subscriptions[0]);
    subscription_drop(subscriptions[1]);
    CHECK(driver_wait(b.driver, DRIVER_IDLE, 0, SECONDS));
    free(job);
    bench_close(&b);
}

static enum rc check_on_thread(struct engine *engine, void *ctx, struct err *problem)
{
    ++*(uint32_t *)ctx;
    return engine_check(engine, problem);
}

TEST_BOTH(calls_run_between_steps)
{
    struct bench b;
    uint32_t n_calls = 0;
    REQUIRE(bench_open(&b, 0));
    struct job *job = known_job(&b.fake, 1, 8, 80);
    struct subscription *subscription = submit(&b, NULL, job, false);
    for (uint32_t i = 0; i < 10; i++)
        CHECK_OK(driver_call(b.driver, check_on_thread, &n_calls, &err));
    CHECK_EQ(n_calls, 10);
    read_to_end(subscription, job);
    subscription_drop(subscription);
    driver_close(b.driver);
    CHECK_EQ(driver_call(b.driver, check_on_thread, &n_calls, &err), RC_CLOSED);
    free(job);
    bench_close(&b);
}

/* A subscription that outlives the driver still has what came before the end. */
TEST_BOTH(close_ends_what_runs)
{
    struct bench b;
    REQUIRE(bench_open(&b, 0));
    struct job *job = known_job(&b.fake, 1, 8, 80);
    job->may_abort = true;
    struct subscription *subscription = submit(&b, NULL, job, false);
    CHECK(subscription_wait(subscription, SECONDS));
    bench_close(&b);
    read_to_end(subscription, job);
    subscription_abort(subscription);
    subscription_drop(subscription);
    free(job);
}

/* ---- many threads ---- */

struct crowd {
    struct bench b;
    atomic_bool is_over;
    atomic_uint n_readers; /* witnesses that have read N_READ requests */
};

struct member {
    struct crowd *crowd;
    uint64_t random;
    struct job *jobs;                /* [N_JOBS] */
    struct subscription *subscriptions[N_JOBS];
    struct notifier *notifier;
};

static void act_on(struct member *m, uint32_t i)
{
    struct subscription *subscription = m->subscriptions[i];
    switch (check_below(&m->random, 12)) {
    case 0:
        m->jobs[i].may_abort = true;
        subscription_abort(subscription);
        break;
    case 1:
        subscription_drop(subscription);
        m->subscriptions[i] = NULL;
        break;
    case 2:
        subscription_move(subscription, check_below(&m->random, 2) ? m->notifier : NULL, check_below(&m->random, 2));
        break;
    case 3:
        subscription_wait(subscription, 0.001);
        break;
    case 4:
        driver_call(m->crowd->b.driver, check_on_thread, &(uint32_t){0}, NULL);
        break;
    case 5:
        notifier_watch(m->notifier, DRIVER_IDLE | DRIVER_PAUSED, driver_next_boundary(m->crowd->b.driver));
        break;
    default:
        read_subscription(subscription, &m->jobs[i]);
    }
}

static void *act(void *ctx)
{
    struct member *m = ctx;
    uint64_t numbers[8];
    uint32_t n, states;
    for (uint32_t i = 0; i < N_JOBS; i++) {
        m->subscriptions[i] = submit(&m->crowd->b, check_below(&m->random, 2) ? m->notifier : NULL, &m->jobs[i], check_below(&m->random, 2));
        for (uint32_t k = 0; k < 6; k++) {
            uint32_t at = check_below(&m->random, i + 1);
            if (m->subscriptions[at])
                act_on(m, at);
        }
        notifier_take(m->notifier, numbers, 8, &n, &states);
    }
    for (uint32_t i = 0; i < N_JOBS; i++)
        if (m->subscriptions[i])
            read_to_end(m->subscriptions[i], &m->jobs[i]);
    return NULL;
}

static void *pause_and_resume(void *ctx)
{
    struct crowd *crowd = ctx;
    uint64_t random = 5;
    while (!atomic_load(&crowd->is_over)) {
        driver_pause(crowd->b.driver, check_below(&random, 2) ? PAUSE_KEEP : PAUSE_WAIT);
        driver_wait(crowd->b.driver, DRIVER_PAUSED, 0, 0.01);
        driver_reset_prefix_cache(crowd->b.driver, check_below(&random, 4) == 0, NULL);
        driver_pause(crowd->b.driver, PAUSE_NONE);
        for (uint32_t i = 0; i < 20; i++)
            sched_yield();
    }
    return NULL;
}

TEST_BOTH(stands_a_crowd)
{
    static struct crowd crowd;
    static struct member members[N_THREADS];
    pthread_t threads[N_THREADS], pauser;
    atomic_store(&crowd.is_over, false);
    REQUIRE(bench_open(&crowd.b, 0));
    for (uint32_t t = 0; t < N_THREADS; t++) {
        members[t] = (struct member){.crowd = &crowd, .random = 100 + t, .jobs = calloc(N_JOBS, sizeof(struct job))};
        for (uint32_t i = 0; i < N_JOBS; i++)
            random_job(&members[t].jobs[i], &crowd.b.fake, POLICY_FCFS, &members[t].random);
        REQUIRE_OK(notifier_create(crowd.b.driver, &members[t].notifier, &err));
    }
    for (uint32_t t = 0; t < N_THREADS; t++)
        pthread_create(&threads[t], NULL, act, &members[t]);
    pthread_create(&pauser, NULL, pause_and_resume, &crowd);
    for (uint32_t t = 0; t < N_THREADS; t++)
        pthread_join(threads[t], NULL);
    atomic_store(&crowd.is_over, true);
    pthread_join(pauser, NULL);
    CHECK(driver_wait(crowd.b.driver, DRIVER_IDLE, 0, SECONDS));
    bench_close(&crowd.b);
    for (uint32_t t = 0; t < N_THREADS; t++) {
        for (uint32_t i = 0; i < N_JOBS; i++)
            subscription_drop(members[t].subscriptions[i]);
        notifier_destroy(members[t].notifier);
        free(members[t].jobs);
    }
}

/* ---- weights and faults ---- */

static enum rc step_and_commit(struct engine *engine, void *n_commits, struct err *problem)
{
    bool progressed;
    uint32_t epoch;
    enum rc rc = RC_OK;
    for (uint32_t i = 0; i < 4 && !rc; i++)
        rc = engine_step(engine, &progressed, problem);
    for (uint32_t i = 0; i < *(const uint32_t *)n_commits && !rc; i++)
        rc = engine_hold_steps(engine, problem) ? RC_INTERNAL : engine_commit_weights(engine, false, NULL, &epoch, problem);
    for (uint32_t i = 0; i < 4 && !rc; i++)
        rc = engine_step(engine, &progressed, problem);
    return rc ? rc : engine_settle(engine, problem);
}

/* Subscription with tokens of two epochs cannot use the fast path, which has one epoch per subscription. */
TEST_BOTH(the_quick_way_takes_tokens_of_one_epoch)
{
    struct bench b;
    struct output output[2];
    uint32_t n;
    REQUIRE(bench_open(&b, 0));
    driver_pause(b.driver, PAUSE_KEEP);
    CHECK(driver_wait(b.driver, DRIVER_PAUSED, 0, SECONDS));
    for (uint32_t n_commits = 0; n_commits < 2; n_commits++) {
        struct job *job = known_job(&b.fake, 3, 5, 40);
        struct subscription *subscription = submit(&b, NULL, job, false);
        CHECK_OK(driver_call(b.driver, step_and_commit, &n_commits, &err));
        CHECK(subscription_wait(subscription, SECONDS));
        if (n_commits == 0) {
            CHECK(subscription_take_more(subscription, &output[0]));
            CHECK_EQ(output[0].n_new, 8 + is_async); /* what was in flight when the call ended */
            check_output(job, &output[0]);
        } else {
            CHECK(!subscription_take_more(subscription, &output[0]));
            CHECK_OK(subscription_take(subscription, output, 2, &n, &err));
            CHECK_EQ(n, 1);
            check_output(job, &output[0]);
            CHECK_EQ(output[0].epochs[0], 0);
            CHECK_EQ(output[0].epochs[output[0].n_new - 1], 1);
        }
        job->may_abort = true;
        subscription_abort(subscription);
        read_to_end(subscription, job);
        subscription_drop(subscription);
        free(job);
    }
    driver_pause(b.driver, PAUSE_NONE);
    bench_close(&b);
}

static enum rc do_nothing(struct engine *engine, void *ctx, struct err *problem)
{
    (void)engine, (void)ctx, (void)problem;
    return RC_OK;
}

/* Claims the engine as soon as the driver's turn is over. */
static bool claim_engine(struct engine *engine)
{
    for (uint32_t i = 0; i < SECONDS * 1000; i++) {
        if (engine_claim(engine, &err) == RC_OK)
            return true;
        poll(NULL, 0, 1);
    }
    return false;
}

/* A step that fails without poisoning the engine ends the driver; what was in flight has ended by the error, not by an abort. */
TEST_BOTH(requests_of_a_dead_driver_end_by_its_error)
{
    struct bench b;
    struct output output;
    uint32_t n;
    REQUIRE(bench_open(&b, 0));
    driver_pause(b.driver, PAUSE_KEEP);
    CHECK(driver_wait(b.driver, DRIVER_PAUSED, 0, SECONDS));
    struct job *job = known_job(&b.fake, 3, 5, 40);
    struct subscription *subscription = submit(&b, NULL, job, false);
    CHECK_OK(driver_call(b.driver, do_nothing, NULL, &err));
    REQUIRE(claim_engine(b.engine));
    driver_pause(b.driver, PAUSE_NONE);
    CHECK(driver_wait(b.driver, DRIVER_DEAD, 0, SECONDS));
    engine_unclaim(b.engine);
    driver_reset_prefix_cache(b.driver, false, NULL); /* the next turn */
    CHECK(subscription_wait(subscription, SECONDS));
    CHECK_OK(subscription_take(subscription, &output, 1, &n, &err));
    CHECK_EQ(n, 1);
    CHECK_EQ(output.finish, FINISH_ERROR);
    CHECK_EQ(driver_fault(b.driver, &err), RC_BUSY);
    subscription_drop(subscription);
    free(job);
    bench_close(&b);
}

/* ---- ends under load ---- */

/* Submits and reads until the engine takes no more. What it gets before that must be what the oracle says. */
struct witness {
    struct crowd *crowd;
    uint64_t random;
    uint32_t n_read;        /* requests read to their end */
    enum rc rc;             /* of the submission that was refused */
};

/* Tokens in their order, none twice; a request that ended early has a beginning of what was expected. */
static bool take_beginning(struct subscription *subscription, const struct job *job, uint32_t *n_received)
{
    struct output output;
    struct err problem;
    uint32_t n;
    CHECK_OK(subscription_take(subscription, &output, 1, &n, &problem));
    if (!n)
        return false;
    const struct expected *e = &job->expected[0];
    CHECK_EQ(output.first, *n_received);
    CHECK(*n_received + output.n_new <= e->n &&
          (!output.n_new || !memcmp(output.ids, e->ids + *n_received, output.n_new * sizeof *output.ids)));
    *n_received += output.n_new;
    CHECK(!output.finish || output.finish == FINISH_LENGTH || output.finish == FINISH_ABORT || output.finish == FINISH_ERROR);
    CHECK(output.finish != FINISH_LENGTH || *n_received == e->n);
    return output.finish != FINISH_NONE;
}

static void *witness_run(void *ctx)
{
    struct witness *w = ctx;
    struct bench *b = &w->crowd->b;
    struct err problem;
    struct notifier *notifier;
    uint64_t number;
    uint32_t n, states;
    if ((w->rc = notifier_create(b->driver, &notifier, &problem)))
        return NULL;
    for (uint32_t i = 0; i < 100000; i++) {
        struct job *job = known_job(&b->fake, (uint32_t)check_random(&w->random) % 6, 9, 1 + check_below(&w->random, 40));
        struct subscription *subscription = NULL;
        uint32_t n_received = 0;
        bool is_over = false;
        w->rc = driver_submit(b->driver, i % 2 ? notifier : NULL, &job->spec, i % 3 == 0, &subscription, &problem);
        if (!w->rc && check_below(&w->random, 8)) {
            CHECK(subscription_number(subscription) > 0);
            while (!is_over && !check_failures) {
                CHECK(subscription_wait(subscription, SECONDS));
                if (check_below(&w->random, 4) == 0)
                    subscription_move(subscription, check_below(&w->random, 2) ? notifier : NULL, false);
                is_over = take_beginning(subscription, job, &n_received);
            }
            w->n_read += is_over;
            if (is_over && w->n_read == N_READ)
                atomic_fetch_add(&w->crowd->n_readers, 1);
        }
        subscription_drop(subscription);
        free(job);
        if (w->rc || check_failures)
            break;
        notifier_take(notifier, &number, 1, &n, &states);
    }
    notifier_destroy(notifier);
    return NULL;
}

/* Everybody has had a turn, however the machine shares them out, or something is wrong already. */
static void await_readers(struct crowd *crowd)
{
    while (atomic_load(&crowd->n_readers) < N_THREADS && !check_failures)
        driver_wait(crowd->b.driver, 0, driver_next_boundary(crowd->b.driver), SECONDS);
}

static void let_them_see(enum rc wanted, void (*end)(struct crowd *crowd))
{
    static struct crowd crowd;
    static struct witness witnesses[N_THREADS];
    pthread_t threads[N_THREADS], pauser;
    atomic_store(&crowd.is_over, false);
    atomic_store(&crowd.n_readers, 0);
    REQUIRE(bench_open(&crowd.b, 0));
    for (uint32_t t = 0; t < N_THREADS; t++) {
        witnesses[t] = (struct witness){.crowd = &crowd, .random = 300 + t};
        pthread_create(&threads[t], NULL, witness_run, &witnesses[t]);
    }
    pthread_create(&pauser, NULL, pause_and_resume, &crowd);
    await_readers(&crowd);
    end(&crowd);
    for (uint32_t t = 0; t < N_THREADS; t++) {
        pthread_join(threads[t], NULL);
        CHECK_EQ(witnesses[t].rc, wanted);
    }
    atomic_store(&crowd.is_over, true);
    pthread_join(pauser, NULL);
    bench_close(&crowd.b);
}

static enum rc fail_soon(struct engine *engine, void *ctx, struct err *problem)
{
    (void)engine, (void)problem;
    struct fake *fake = ctx;
    fake->fails_at = fake->n_runs + 3;
    return RC_OK;
}

static void await_fault(struct crowd *crowd)
{
    struct err problem;
    CHECK_OK(driver_call(crowd->b.driver, fail_soon, &crowd->b.fake, &problem));
    CHECK(driver_wait(crowd->b.driver, DRIVER_DEAD, 0, SECONDS));
    CHECK(driver_wait(crowd->b.driver, DRIVER_IDLE, 0, SECONDS));
}

static void close_in_the_middle(struct crowd *crowd)
{
    driver_abort_all(crowd->b.driver);
    driver_stop(crowd->b.driver);
    driver_close(crowd->b.driver);
}

TEST_BOTH(a_fault_reaches_a_crowd)
{
    let_them_see(RC_DEAD, await_fault);
}

TEST_BOTH(a_close_reaches_a_crowd)
{
    let_them_see(RC_CLOSED, close_in_the_middle);
}
