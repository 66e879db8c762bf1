/* Meetings of CPU ranks (kernels/cpu/gather.c): a thread runs each rank, on contexts with a fake `add`. Values are complete, ranks
 * that do not come are named, aborts end all waits, and nothing leaks. */
#define _GNU_SOURCE
#include "check.h"

#include "../../csrc/base/clock.h"
#include "../../csrc/base/mem.h"
#include "../../kernels/cpu/gather.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#define MAX_RANKS 4u
#define WIDTH 12u  /* columns: shares of 3, 4 and 6 are equal */
#define PLACES 2u  /* take turns, so that no rank stores into a value that another rank may still read */
#define NEVER UINT32_MAX

struct team {
    struct cpu cpus[MAX_RANKS];
    void *ctxs[MAX_RANKS], *memory[MAX_RANKS];
    float values[MAX_RANKS][PLACES][WIDTH];
    uint32_t n_ranks;
    double begun; /* the last step */
    struct runner {
        struct team *team;
        uint32_t rank, n_gathers;  /* to do in a step */
        uint32_t leaves_before;    /* this meeting (0: meet, 1: the first gather, ...) */
        bool is_aborting;          /* aborts where it leaves */
        uint32_t n_done;           /* meetings */
        enum rc rc;
        struct err err;
        double ended;
        pthread_t thread;
    } runners[MAX_RANKS];
};

static enum rc fake_add(struct cpu *cpu, const struct add_args *args, struct err *err)
{
    (void)cpu, (void)err;
    for (uint32_t i = 0; i < args->out.width; i++)
        ((float *)args->out.data)[i] = ((const float *)args->a.data)[i] + ((const float *)args->b.data)[i];
    return RC_OK;
}

static const struct cpu_kernels FAKE = {.add = fake_add};

static void team_open_at(struct team *team, uint32_t n_ranks, uint32_t n_processors, double timeout, uint32_t first_meeting)
{
    struct err err = {0};
    struct comm_options options = {.timeout_seconds = timeout, .first_meeting = first_meeting};
    *team = (struct team){.n_ranks = n_ranks};
    for (uint32_t rank = 0; rank < n_ranks; rank++) {
        struct cpu *cpu = team->ctxs[rank] = &team->cpus[rank];
        *cpu = (struct cpu){.n_threads = 1, .kernels = &FAKE, .n_processors = n_processors, .options = {.device = "cpu"}};
        REQUIRE_OK(pool_create(1, "test", &cpu->pool, &err));
        team->memory[rank] = team->values[rank];
    }
    REQUIRE_OK(cpu_comm.open(team->ctxs, n_ranks, &options, &err));
    REQUIRE_OK(cpu_comm.share(team->ctxs, n_ranks, COMM_ARENA, team->memory, sizeof team->values[0], &err));
}

static void team_open(struct team *team, uint32_t n_ranks, uint32_t n_processors, double timeout)
{
    team_open_at(team, n_ranks, n_processors, timeout, 0);
}

static void team_close(struct team *team)
{
    cpu_comm.close(team->ctxs, team->n_ranks);
    for (uint32_t rank = 0; rank < team->n_ranks; rank++) {
        CHECK(!team->cpus[rank].ranks);
        pool_destroy(team->cpus[rank].pool);
    }
}

static uint32_t first_column(const struct team *team, uint32_t rank)
{
    return WIDTH * rank / team->n_ranks;
}

/* Column c after `number` gathers: 1 more than column c + 1 after the one before. */
static float value_at(uint32_t number, uint32_t column)
{
    return (float)(number + (column + number) % WIDTH);
}

static enum rc do_gather(struct team *team, uint32_t rank, uint32_t number, struct err *err)
{
    const float *before = team->values[rank][(number + 1) % PLACES];
    float *whole = team->values[rank][number % PLACES], next[WIDTH], ones[WIDTH];
    uint32_t first = first_column(team, rank), n = first_column(team, rank + 1) - first;
    for (uint32_t i = 0; i < n; i++) {
        next[i] = number == 1 ? value_at(0, (first + i + 1) % WIDTH) : before[(first + i + 1) % WIDTH];
        ones[i] = 1;
    }
    struct gather_args args = {.kind = GATHER_COLUMNS, .n_rows = 1, .whole = {whole, WIDTH, WIDTH}, .first = first,
                               .n_columns = n, .a = {next, n, n}, .b = {ones, n, n}};
    return cpu_comm.gather(&team->cpus[rank], &args, err);
}

static void *run_step(void *argument)
{
    struct runner *runner = argument;
    struct team *team = runner->team;
    for (uint32_t number = 0; number <= runner->n_gathers && !runner->rc; number++) {
        if (number == runner->leaves_before) {
            if (runner->is_aborting)
                cpu_comm.abort(team->ctxs, team->n_ranks);
            break;
        }
        if (number == 0)
            runner->rc = cpu_comm.meet(&team->cpus[runner->rank], &(struct meet_args){0}, &runner->err);
        else
            runner->rc = do_gather(team, runner->rank, number, &runner->err);
        runner->n_done += !runner->rc;
        for (uint32_t i = 0; number && !runner->rc && i < WIDTH; i++)
            if (team->values[runner->rank][number % PLACES][i] != value_at(number, i))
                CHECK_FAIL("rank %u, gather %u: column %u is wrong", runner->rank, number, i);
    }
    runner->ended = seconds_now();
    return NULL;
}

static void start(struct team *team, uint32_t n_gathers, uint32_t leaver, uint32_t leaves_before, bool is_aborting)
{
    team->begun = seconds_now();
    for (uint32_t rank = 0; rank < team->n_ranks; rank++) {
        struct runner *runner = &team->runners[rank];
        *runner = (struct runner){.team = team, .rank = rank, .n_gathers = n_gathers, .is_aborting = is_aborting,
                                  .leaves_before = rank == leaver ? leaves_before : NEVER};
        CHECK_EQ(pthread_create(&runner->thread, NULL, run_step, runner), 0);
    }
}

static void join(struct team *team)
{
    for (uint32_t rank = 0; rank < team->n_ranks; rank++)
        pthread_join(team->runners[rank].thread, NULL);
}

/* Every later meeting of every rank fails at once. */
static void check_later_meetings_fail(struct team *team, const char *why)
{
    double begun = seconds_now();
    for (uint32_t rank = 0; rank < team->n_ranks; rank++) {
        struct err err = {0};
        CHECK_EQ(do_gather(team, rank, 1, &err), RC_DEVICE);
        CHECK_STR(err.what, "gather");
        CHECK_EQ(cpu_comm.meet(&team->cpus[rank], &(struct meet_args){0}, &err), RC_DEVICE);
        CHECK_STR(err.what, "meet");
        CHECK_CONTAINS(err.message, why);
        CHECK_EQ(cpu_comm.check(&team->cpus[rank], &err), RC_DEVICE);
    }
    CHECK(seconds_now() - begun < 20);
}

/* Half of the runs spin before they sleep. */
static uint32_t some_processors(uint32_t run)
{
    return run % 2 ? 64 : 0;
}

TEST(values_are_complete)
{
    uint64_t held = mem_n_held();
    for (uint32_t run = 0; run < 2 * MAX_RANKS; run++) {
        struct team team;
        struct err err = {0};
        team_open(&team, 1 + run / 2, some_processors(run), 60);
        for (uint32_t step = 0; step < 3; step++) {
            start(&team, 200, NEVER, NEVER, false);
            join(&team);
            for (uint32_t rank = 0; rank < team.n_ranks; rank++) {
                CHECK_EQ(team.runners[rank].n_done, 201);
                CHECK_OK(cpu_comm.check(&team.cpus[rank], &err));
            }
        }
        team_close(&team);
    }
    CHECK_EQ(mem_n_held(), held);
}

/* Whether every rank came to all meetings before one, and one rank alone did not come to it. */
static bool misses_one(const struct team *team, uint32_t missing, uint32_t meeting)
{
    char text[48];
    bool is_so = true;
    snprintf(text, sizeof text, "rank %u (cpu) did not reach ", missing);
    for (uint32_t rank = 0; rank < team->n_ranks; rank++)
        is_so = is_so && team->runners[rank].n_done == meeting && (rank == missing || strstr(team->runners[rank].err.message, text));
    return is_so;
}

/* Opens three ranks, one of which does not come to a meeting, and returns their timeout. On a busy machine ranks are late for other
 * reasons, too, but not for long: then they are opened again, with a longer timeout. */
static double run_without(struct team *team, uint32_t missing, uint32_t meeting, uint32_t n_processors, uint32_t first_meeting)
{
    for (double timeout = 0.05;; timeout *= 4) {
        team_open_at(team, 3, n_processors, timeout, first_meeting);
        start(team, 40, missing, meeting, false);
        join(team);
        if (misses_one(team, missing, meeting) || timeout > 10)
            return timeout;
        team_close(team);
    }
}

TEST(meetings_are_counted_beyond_the_largest_number)
{
    static const uint32_t FIRST[] = {(1u << 31) - 5, UINT32_MAX - 5};
    for (uint32_t run = 0; run < 4; run++) {
        struct team team;
        team_open_at(&team, 3, some_processors(run), 60, FIRST[run / 2]);
        start(&team, 20, NEVER, NEVER, false);
        join(&team);
        for (uint32_t rank = 0; rank < 3; rank++)
            CHECK_EQ(team.runners[rank].n_done, 21);
        team_close(&team);
        run_without(&team, 1, 5, some_processors(run), FIRST[run / 2]);
        CHECK_CONTAINS(team.runners[0].err.message, "rank 1 (cpu) did not reach gather 5");
        CHECK_CONTAINS(team.runners[2].err.message, "rank 1 (cpu) did not reach gather 5");
        team_close(&team);
    }
}

TEST(a_rank_that_does_not_come_is_named)
{
    static const uint32_t MEETINGS[] = {0, 1, 2, 37};
    static const char *const NAMES[] = {"the start of the step", "gather 1", "gather 2", "gather 37"};
    uint64_t held = mem_n_held();
    for (uint32_t run = 0; run < 8; run++) {
        struct team team;
        struct err err = {0};
        char text[96];
        uint32_t meeting = MEETINGS[run % 4], missing = run % 3;
        double timeout = run_without(&team, missing, meeting, some_processors(run / 4), 0);
        snprintf(text, sizeof text, "rank %u (cpu) did not reach %s within %g s (step_timeout_s)", missing, NAMES[run % 4], timeout);
        for (uint32_t rank = 0; rank < 3; rank++) {
            const struct runner *runner = &team.runners[rank];
            CHECK_EQ(runner->n_done, meeting);
            CHECK_EQ(runner->rc, rank == missing ? RC_OK : RC_DEVICE);
            CHECK_EQ(cpu_comm.check(&team.cpus[rank], &err), runner->rc);
            if (rank == missing)
                continue;
            CHECK_STR(err.message, runner->err.message);
            CHECK_STR(err.what, meeting ? "gather" : "meet");
            CHECK_STR(runner->err.message, text);
            CHECK(runner->ended - team.begun > 0.99 * timeout && runner->ended - team.begun < timeout + 10);
        }
        check_later_meetings_fail(&team, text);
        team_close(&team);
    }
    CHECK_EQ(mem_n_held(), held);
}

TEST(an_abort_at_every_meeting)
{
    uint64_t held = mem_n_held();
    for (uint32_t run = 0; run < 24; run++) {
        struct team team;
        uint32_t n_ranks = 2 + run % 3, meeting = run / 2, leaver = run % n_ranks;
        char text[96];
        team_open(&team, n_ranks, some_processors(run / 3), 60);
        start(&team, 12, leaver, meeting, true);
        join(&team);
        for (uint32_t rank = 0; rank < n_ranks; rank++) {
            const struct runner *runner = &team.runners[rank];
            uint32_t stopped_at = runner->n_done;
            CHECK_EQ(runner->rc, rank == leaver ? RC_OK : RC_DEVICE);
            CHECK(runner->n_done == meeting || (rank != leaver && meeting && runner->n_done == meeting - 1));
            snprintf(text, sizeof text, "rank %u (cpu) stopped at gather %u: the step was aborted", rank, stopped_at);
            if (rank != leaver && stopped_at)
                CHECK_STR(runner->err.message, text);
        }
        check_later_meetings_fail(&team, ": the step was aborted");
        team_close(&team);
    }
    CHECK_EQ(mem_n_held(), held);
}

TEST(an_abort_ends_waits_soon)
{
    double least = 1;
    for (uint32_t run = 0; run < 20 || (least > 1e-3 && run < 500); run++) { /* on a busy machine most runs take longer */
        struct team team;
        team_open(&team, 2, some_processors(run), 60);
        start(&team, 1, 0, run % 2, false);
        pthread_join(team.runners[0].thread, NULL);
        usleep(5000); /* rank 1 sleeps now */
        double begun = seconds_now();
        cpu_comm.abort(team.ctxs, 2);
        pthread_join(team.runners[1].thread, NULL);
        double took = team.runners[1].ended - begun;
        CHECK_EQ(team.runners[1].rc, RC_DEVICE);
        least = took < least ? took : least;
        team_close(&team);
    }
    if (least > 1e-3)
        CHECK_FAIL("an abort took %g s or more", least);
}

TEST(aborts_at_any_time)
{
    uint64_t random = 1;
    for (uint32_t run = 0; run < 60; run++) {
        struct team team;
        team_open(&team, 2 + run % 3, some_processors(run), 60);
        start(&team, 1u << 30, NEVER, NEVER, false);
        usleep(check_below(&random, 3000));
        cpu_comm.abort(team.ctxs, team.n_ranks);
        join(&team);
        for (uint32_t rank = 0; rank < team.n_ranks; rank++) {
            int32_t behind = (int32_t)(team.runners[0].n_done - team.runners[rank].n_done);
            CHECK(team.runners[rank].rc == RC_DEVICE && behind >= -1 && behind <= 1);
        }
        check_later_meetings_fail(&team, ": the step was aborted");
        team_close(&team);
    }
}

static void ignore_signal(int number)
{
    (void)number;
}

TEST(signals_do_not_end_a_wait)
{
    struct team team;
    struct sigaction action = {.sa_handler = ignore_signal}, before;
    sigaction(SIGUSR1, &action, &before);
    team_open(&team, 2, 0, 60);
    struct runner *waiting = &team.runners[1];
    *waiting = (struct runner){.team = &team, .rank = 1, .leaves_before = NEVER};
    CHECK_EQ(pthread_create(&waiting->thread, NULL, run_step, waiting), 0);
    for (uint32_t i = 0; i < 20; i++) {
        usleep(1000);
        pthread_kill(waiting->thread, SIGUSR1);
    }
    struct err err = {0};
    double begun = seconds_now();
    CHECK_OK(cpu_comm.meet(&team.cpus[0], &(struct meet_args){0}, &err));
    pthread_join(waiting->thread, NULL);
    CHECK_EQ(waiting->rc, RC_OK);
    CHECK(waiting->ended >= begun);
    team_close(&team);
    sigaction(SIGUSR1, &before, NULL);
}

TEST(ranks_that_failed_can_be_connected_again)
{
    struct team team;
    struct err err = {0};
    team_open(&team, 2, 0, 60);
    cpu_comm.abort(team.ctxs, 2);
    check_later_meetings_fail(&team, ": the step was aborted");
    cpu_comm.close(team.ctxs, 2);
    cpu_comm.abort(team.ctxs, 2); /* does nothing */
    CHECK_OK(cpu_comm.check(&team.cpus[0], &err));
    CHECK_EQ(cpu_comm.share(team.ctxs, 2, COMM_ARENA, team.memory, 1, &err), RC_INTERNAL);

    mem_fail_after(0);
    CHECK_EQ(cpu_comm.open(team.ctxs, 2, &(struct comm_options){.timeout_seconds = 60}, &err), RC_MEMORY);
    mem_fail_after(-1);
    CHECK(!team.cpus[0].ranks && !team.cpus[1].ranks);
    CHECK_OK(cpu_comm.open(team.ctxs, 2, &(struct comm_options){.timeout_seconds = 60}, &err));
    CHECK_OK(cpu_comm.share(team.ctxs, 2, COMM_ARENA, team.memory, sizeof team.values[0], &err));
    CHECK_EQ(cpu_comm.share(team.ctxs, 2, COMM_MEMORIES, team.memory, 1, &err), RC_INTERNAL);
    start(&team, 5, NEVER, NEVER, false);
    join(&team);
    CHECK_EQ(team.runners[0].n_done, 6);
    CHECK_EQ(team.runners[1].n_done, 6);
    team_close(&team);
}
