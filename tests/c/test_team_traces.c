/* Random traces of a team: steps, updates, sleep, wake and aborts in any order, with a fault in some call of some rank every
 * third time. A step without a fault gives the results of plain arithmetic on the weights that were written last. After a fault
 * the error names the rank, and the team is as it was, or dead; nothing waits or leaks. */
#define _GNU_SOURCE
#include "fake_team.h"

#include "../../csrc/program/update.h"

#include <pthread.h>

#define N_OPERATIONS 3000u
#define MOST_ROWS 4u

/* Calls that have to be seen to fail. */
static const char *const CALLS[] = {"meet", "begin", "embed", "linear", "gather", "select", "sample", "graph_launch",
                                    "tensor_write", "tensor_finish", "refresh", "synchronize", "pool_save", "pool_release",
                                    "pool_restore"};
#define N_CALLS (sizeof CALLS / sizeof *CALLS)

struct trace {
    struct team *team;
    struct step_batch step;
    uint32_t n_ranks, asleep;
    bool is_eager;
    bool is_torn, is_dropped; /* weights: partly written; forgotten while they sleep */
    float embed[VOCAB * WIDTH], linear[WIDTH * WIDTH], head[VOCAB * WIDTH]; /* what was written last */
    uint64_t random;
    uint32_t n_good[4];       /* steps, updates, sleeps, wakes without a fault */
    uint32_t n_aborts, seen;  /* seen: bits of CALLS that failed */
};

/* ---- faults ------------------------------------------------------------------------------------------------------------ */

/* Lets one of the next n_calls calls of some rank fail, every third time. */
static void maybe_fault(struct trace *t, uint32_t n_calls)
{
    uint32_t rank = check_below(&t->random, t->n_ranks);
    no_fault();
    if (check_below(&t->random, 3))
        return;
    fault.fakes[rank]->n_calls = 0;
    set_fault(rank, check_below(&t->random, n_calls));
}

/* Whether a call failed; then its error tells where. */
static bool has_failed(struct trace *t, enum rc rc, const struct err *err, bool is_named)
{
    bool has_happened = atomic_load(&fault.has_happened);
    CHECK_EQ(rc != RC_OK, has_happened);
    if (!has_happened)
        return false;
    if (is_named)
        check_named(err, fault.rank);
    CHECK_EQ(rc, RC_DEVICE);
    CHECK_EQ(err->code, 700 + (int64_t)fault.rank);
    for (uint32_t i = 0; i < N_CALLS; i++)
        t->seen |= strcmp(fault.name, CALLS[i]) == 0 ? 1u << i : 0;
    return true;
}

static void start_team(struct trace *t)
{
    struct err err = {0};
    no_fault();
    t->is_eager = check_below(&t->random, 2);
    REQUIRE_OK(make_team(t->n_ranks, t->is_eager, 60, &t->team, &err));
    make_batch(t->team, &t->step);
    t->asleep = 0;
    t->is_dropped = false;
    t->is_torn = true; /* its weights are not those of the trace */
}

static void end_team(struct trace *t)
{
    no_fault();
    free_batch(&t->step);
    team_destroy(t->team);
    check_threads_have_ended();
}

/* ---- steps ------------------------------------------------------------------------------------------------------------- */

static struct sample_result expected(const struct trace *t, int32_t id)
{
    struct sample_result best = {0};
    float y[WIDTH];
    for (uint32_t i = 0; i < WIDTH; i++) {
        y[i] = 0;
        for (uint32_t c = 0; c < WIDTH; c++)
            y[i] += t->embed[(size_t)id * WIDTH + c] * t->linear[i * WIDTH + c];
    }
    for (uint32_t i = 0; i < VOCAB; i++) {
        float sum = 0;
        for (uint32_t c = 0; c < WIDTH; c++)
            sum += y[c] * t->head[i * WIDTH + c];
        if (!i || sum > best.raw)
            best = (struct sample_result){.id = (int32_t)i, .raw = sum};
    }
    return best;
}

static enum rc step_once(struct trace *t, struct err *err)
{
    struct batch *b = &t->step.batch;
    uint32_t n = 1 + check_below(&t->random, MOST_ROWS);
    b->n_rows = b->n_seqs = b->n_logits_rows = b->n_tasks = n;
    for (uint32_t i = 0; i < n; i++) {
        b->token_ids[i] = (int32_t)check_below(&t->random, VOCAB);
        b->row_seq[i] = b->seq_first_row[i] = b->logits_rows[i] = (int32_t)i;
        b->tasks[i] = (struct sample_task){.logits_row = i, .is_greedy = true};
    }
    b->seq_first_row[n] = (int32_t)n;
    b->shares_new_keys = check_below(&t->random, 2); /* then no graph */
    enum rc rc = team_start(t->team, b, err);
    return rc ? rc : team_finish(t->team, b, err);
}

static void check_results(const struct trace *t)
{
    const struct batch *b = &t->step.batch;
    bool is_replayed = !t->is_eager && !b->shares_new_keys; /* a fake graph computes nothing */
    for (uint32_t i = 0; i < b->n_tasks && !is_replayed; i++) {
        struct sample_result wanted = expected(t, b->token_ids[i]);
        CHECK_EQ(b->results[i].id, wanted.id);
        CHECK(memcmp(&b->results[i].raw, &wanted.raw, sizeof wanted.raw) == 0);
    }
}

/* No rank of a team that is dead meets again. */
static void bury(struct trace *t)
{
    struct err err = {0};
    no_fault();
    CHECK_EQ(step_once(t, &err), RC_DEVICE);
    end_team(t);
    start_team(t);
}

static void step(struct trace *t)
{
    struct err err = {0};
    if (t->asleep || t->is_torn || t->is_dropped)
        return;
    maybe_fault(t, 12);
    if (has_failed(t, step_once(t, &err), &err, true)) {
        bury(t);
        return;
    }
    check_results(t);
    t->n_good[0]++;
}

struct abort_at {
    void *ctxs[MAX_RANKS];
    uint32_t n_ranks, microseconds;
};

static void *abort_later(void *argument)
{
    const struct abort_at *at = argument;
    usleep(at->microseconds);
    abort_all(at->ctxs, at->n_ranks);
    return NULL;
}

/* Another thread aborts at any place of a step, or between two. */
static void abort_steps(struct trace *t)
{
    struct abort_at at = {.n_ranks = t->n_ranks, .microseconds = check_below(&t->random, 300)};
    struct err err = {0};
    pthread_t thread;
    uint64_t random = t->random; /* the number of steps up to the abort depends on time */
    if (t->asleep || t->is_torn || t->is_dropped)
        return;
    no_fault();
    for (uint32_t rank = 0; rank < t->n_ranks; rank++)
        at.ctxs[rank] = team_model(t->team, rank)->ctx;
    REQUIRE(pthread_create(&thread, NULL, abort_later, &at) == 0);
    while (!step_once(t, &err))
        check_results(t);
    CHECK_CONTAINS(err.message, "the step was aborted");
    pthread_join(thread, NULL);
    t->random = random;
    t->n_aborts++;
    bury(t);
}

/* ---- updates ----------------------------------------------------------------------------------------------------------- */

static enum rc write_one(struct trace *t, struct update *update, const char *name, float *values, uint32_t n_rows,
                         struct err *err)
{
    enum update_fate fate;
    const struct update_tensor tensor = {.data = values, .dtype = DTYPE_F32, .n_dims = 2, .shape = {n_rows, WIDTH},
                                         .strides = {WIDTH, 1}, .is_host = true};
    for (uint32_t i = 0; i < n_rows * WIDTH; i++)
        values[i] = (float)check_below(&t->random, 2001) / 1000 - 1;
    return update_write(update, name, &tensor, &fate, err);
}

static void update(struct trace *t)
{
    struct update *update = NULL;
    struct err err = {0};
    if (t->asleep & PART_WEIGHTS)
        return;
    maybe_fault(t, 7);
    REQUIRE_OK(update_begin(team_models(t->team), t->n_ranks, &update, &err));
    enum rc rc = write_one(t, update, "embed", t->embed, VOCAB, &err);
    if (!rc)
        rc = write_one(t, update, "linear", t->linear, WIDTH, &err);
    if (!rc)
        rc = write_one(t, update, "head", t->head, VOCAB, &err);
    if (!rc)
        rc = update_finish(update, &err);
    if (!rc)
        rc = update_settle(update, &err);
    CHECK_EQ(update_n_written(update) == 3, !rc || strcmp(fault.name, "tensor_write") != 0);
    update_end(update);
    t->is_torn = has_failed(t, rc, &err, false);
    t->is_dropped &= t->is_torn;
    t->n_good[1] += !t->is_torn;
}

/* ---- sleep ------------------------------------------------------------------------------------------------------------- */

static void check_parts(const struct trace *t)
{
    for (uint32_t rank = 0; rank < t->n_ranks; rank++) {
        CHECK_EQ(team_model(t->team, rank)->asleep, t->asleep);
        CHECK_EQ(fault.fakes[rank]->is_hidden[MEMORY_WEIGHTS], (t->asleep & PART_WEIGHTS) != 0);
        CHECK_EQ(fault.fakes[rank]->is_hidden[MEMORY_KV], (t->asleep & PART_POOL) != 0);
    }
}

static uint32_t some_parts(struct trace *t)
{
    static const uint32_t PARTS[] = {PART_WEIGHTS, PART_POOL, PART_WEIGHTS | PART_POOL};
    return PARTS[check_below(&t->random, 3)];
}

static void fall_asleep(struct trace *t)
{
    uint32_t parts = some_parts(t) & ~t->asleep;
    bool keeps = check_below(&t->random, 4);
    struct err err = {0};
    if (!parts)
        return;
    maybe_fault(t, 4);
    if (!has_failed(t, team_release(t->team, parts, keeps, &err), &err, true)) {
        t->asleep |= parts;
        t->n_good[2]++;
        t->is_dropped |= (parts & PART_WEIGHTS) && !keeps;
    }
    check_parts(t);
}

static void wake(struct trace *t)
{
    uint32_t parts = some_parts(t) & t->asleep;
    struct err err = {0};
    if (!parts)
        return;
    maybe_fault(t, 4);
    if (!has_failed(t, team_restore(t->team, parts, &err), &err, true)) {
        t->asleep &= ~parts;
        t->n_good[3]++;
    } else if (strcmp(fault.name, "synchronize") == 0) { /* a fault of the device behind a restore: the engine ends */
        end_team(t);
        start_team(t);
    }
    check_parts(t);
}

/* ---- the traces -------------------------------------------------------------------------------------------------------- */

static void run_trace(uint32_t n_ranks, uint64_t seed)
{
    uint64_t held = mem_n_held();
    struct trace t = {.n_ranks = n_ranks, .random = seed};
    start_team(&t);
    for (uint32_t i = 0; i < N_OPERATIONS; i++) {
        uint32_t what = check_below(&t.random, 100);
        if (what < 50)
            step(&t);
        else if (what < 70 || t.is_torn)
            update(&t);
        else if (what < 82)
            fall_asleep(&t);
        else if (what < 97)
            wake(&t);
        else
            abort_steps(&t);
    }
    end_team(&t);
    for (uint32_t i = 0; i < N_CALLS; i++)
        if (!(t.seen & 1u << i))
            CHECK_FAIL("%u ranks: %s has not failed", n_ranks, CALLS[i]);
    for (uint32_t i = 0; i < 4; i++)
        CHECK(t.n_good[i] > 20);
    CHECK(t.n_aborts > 1);
    CHECK_EQ(mem_n_held(), held);
}

TEST(traces_of_two_ranks)
{
    run_trace(2, 11);
}

TEST(traces_of_four_ranks)
{
    run_trace(4, 12);
}
