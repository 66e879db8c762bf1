/* Failures of a team (csrc/program/team.c): whatever fails on whichever rank, the error names that rank, all waits and threads
 * end, and nothing leaks. */
#define _GNU_SOURCE
#include "fake_team.h"

#include <pthread.h>

TEST(ranks_give_the_results_of_one)
{
    struct sample_result wanted[N_ROWS];
    uint64_t held = mem_n_held();
    no_fault();
    for (uint32_t n_ranks = 1; n_ranks <= MAX_RANKS; n_ranks *= 2) {
        struct team *team;
        struct step_batch step;
        struct err err = {0};
        REQUIRE_OK(make_team(n_ranks, true, 60, &team, &err));
        make_batch(team, &step);
        for (uint32_t i = 0; i < 20; i++)
            CHECK_OK(run_step(team, &step.batch, &err));
        if (n_ranks == 1)
            memcpy(wanted, step.batch.results, sizeof wanted);
        CHECK(memcmp(wanted, step.batch.results, sizeof wanted) == 0);
        CHECK(wanted[0].raw != wanted[1].raw && wanted[0].raw > 0);
        free_batch(&step);
        team_destroy(team);
    }
    CHECK_EQ(mem_n_held(), held);
}

TEST(pages_are_equal_on_all_ranks)
{
    no_fault();
    for (uint32_t n_ranks = 2; n_ranks <= MAX_RANKS; n_ranks *= 2) {
        struct team *team;
        struct err err = {0};
        uint32_t fewest = UINT32_MAX;
        REQUIRE_OK(make_team(n_ranks, true, 60, &team, &err));
        const struct kv_layout *first = model_layout(team_model(team, 0));
        CHECK_EQ(first->layer_bytes, kv_layer_bytes(NULL, 2, 4, DTYPE_F32, 4)); /* rank 1's */
        CHECK(first->n_state_pages * (first->page_bytes / 256) >= 5);             /* rank 0's units */
        for (uint32_t rank = 0; rank < n_ranks; rank++) {
            const struct model *model = team_model(team, rank);
            uint32_t own = (uint32_t)(model->options.kv_cache_bytes / model->layout.page_bytes);
            fewest = own < fewest ? own : fewest;
            CHECK(memcmp(&model->layout, first, sizeof *first) == 0);
            CHECK_EQ(model->table_stride, team_model(team, 0)->table_stride);
        }
        CHECK(team_model(team, 0)->options.kv_cache_bytes / first->page_bytes > fewest);
        for (uint32_t rank = 0; rank < n_ranks; rank++)
            CHECK_EQ(model_n_pages(team_model(team, rank)), fewest);
        team_destroy(team);
    }
}

/* Every call that a rank makes while a team is made fails in turn. Without `is_eager` steps are captured, too. */
static void fail_creates(uint32_t n_ranks, uint32_t rank, bool is_eager)
{
    static const char *const PHASES[] = {"open", "connect", "matrix_write", "prepare", "memory", "pool_create", "share",
                                         "graph_begin"};
    const uint32_t n_phases = sizeof PHASES / sizeof *PHASES;
    uint32_t seen = 0;
    struct team *team = NULL;
    uint64_t held = mem_n_held();
    for (uint32_t call = 0; call < 500; call++) {
        struct err err = {0};
        set_fault(rank, call);
        enum rc rc = make_team(n_ranks, is_eager, 60, &team, &err);
        if (!rc) {
            team_destroy(team);
            if (!atomic_load(&fault.has_happened) || strcmp(fault.name, "synchronize") == 0)
                break; /* the first call that team_destroy makes */
            if (strcmp(fault.name, "memory") != 0) /* graphs are measured if that works */
                CHECK_FAIL("rank %u: a team is made though %s fails", rank, fault.name);
            continue;
        }
        for (uint32_t i = 0; i < n_phases; i++)
            seen |= strcmp(fault.name, PHASES[i]) == 0 ? 1u << i : 0;
        CHECK(!team);
        CHECK_EQ(rc, RC_DEVICE);
        if (strcmp(fault.name, "connect") != 0 && strcmp(fault.name, "share") != 0)
            check_named(&err, rank);
        CHECK_EQ(mem_n_held(), held);
        check_threads_have_ended();
    }
    CHECK_EQ(seen, (1u << (n_phases - is_eager)) - 1);
    CHECK_EQ(mem_n_held(), held);
}

TEST(every_call_fails_while_a_team_is_made)
{
    for (uint32_t n_ranks = 2; n_ranks <= MAX_RANKS; n_ranks *= 2)
        for (uint32_t rank = 0; rank < n_ranks; rank++)
            for (uint32_t is_eager = 0; is_eager < 2; is_eager++)
                fail_creates(n_ranks, rank, is_eager);
}

TEST(every_allocation_fails)
{
    for (uint32_t n_ranks = 2; n_ranks <= MAX_RANKS; n_ranks *= 2) {
        uint64_t held = mem_n_held();
        uint32_t n_failed = 0;
        no_fault();
        for (bool is_made = false; !is_made && n_failed < 2000;) {
            struct err err = {0};
            struct team *team;
            enum rc rc = make_team_failing(n_ranks, false, 60, n_failed, &team, &err);
            is_made = !rc;
            n_failed += !is_made;
            team_destroy(team);
            if (rc) {
                CHECK(!team);
                CHECK_EQ(rc, RC_MEMORY);
                CHECK_CONTAINS(err.message, "memory");
            }
            CHECK_EQ(mem_n_held(), held);
            check_threads_have_ended();
        }
        CHECK(n_failed > 40 && n_failed < 2000);
    }
}

TEST(every_call_fails_in_a_step)
{
    for (uint32_t n_ranks = 2; n_ranks <= MAX_RANKS; n_ranks *= 2)
        for (uint32_t rank = 0; rank < n_ranks; rank++) {
            uint64_t held = mem_n_held();
            enum rc rc = RC_DEVICE;
            uint32_t n_failed = 0;
            for (; rc && n_failed < 100; n_failed++) {
                struct team *team;
                struct step_batch step;
                struct err err = {0};
                no_fault();
                REQUIRE_OK(make_team(n_ranks, n_failed % 2, 60, &team, &err));
                make_batch(team, &step);
                CHECK_OK(run_step(team, &step.batch, &err));
                step.batch.shares_new_keys = true; /* no graph */
                fault.fakes[rank]->n_calls = 0;
                set_fault(rank, n_failed);
                rc = run_step(team, &step.batch, &err);
                CHECK_EQ(rc != RC_OK, atomic_load(&fault.has_happened));
                if (rc) {
                    check_named(&err, rank);
                    fault.rank = NEVER;
                    CHECK_EQ(team_start(team, &step.batch, &err), RC_DEVICE); /* no rank meets again */
                }
                free_batch(&step);
                team_destroy(team);
            }
            CHECK(n_failed > (rank ? 6 : 7) && n_failed < 100);
            CHECK_EQ(mem_n_held(), held);
            check_threads_have_ended();
        }
}

/* A step in which a rank does not come to a call. */
static enum rc run_late_step(uint32_t n_ranks, uint32_t rank, uint32_t call, double timeout, struct err *err)
{
    struct team *team;
    struct step_batch step;
    no_fault();
    enum rc rc = make_team(n_ranks, true, timeout, &team, err);
    if (rc)
        return rc;
    make_batch(team, &step);
    fault.fakes[rank]->n_calls = 0;
    set_fault(rank, call);
    fault.is_late = true;
    rc = run_step(team, &step.batch, err);
    free_batch(&step);
    team_destroy(team);
    return rc;
}

/* On a busy machine other ranks are late, too, but not for long. */
TEST(a_rank_that_does_not_come_is_named)
{
    for (uint32_t n_ranks = 2; n_ranks <= MAX_RANKS; n_ranks *= 2)
        for (uint32_t rank = 0; rank < n_ranks; rank++)
            for (uint32_t call = 0; call < 7; call += 3) { /* meet, the first gather, the logits */
                struct err err = {0};
                char named[96], limit[64];
                bool is_named = false;
                snprintf(named, sizeof named, "rank %u (%s) did not reach ", rank, DEVICES[rank]);
                for (double timeout = 0.05; !is_named && timeout < 30; timeout *= 4) {
                    REQUIRE(run_late_step(n_ranks, rank, call, timeout, &err) == RC_DEVICE);
                    const char *found = strstr(err.message, named);
                    is_named = n_ranks == 2 ? found == err.message : found != NULL; /* of two, nothing stands before it */
                    snprintf(limit, sizeof limit, "within %g s (step_timeout_s)", timeout);
                    CHECK_CONTAINS(err.message, limit);
                }
                if (!is_named)
                    CHECK_FAIL("wanted %s, have %s", named, err.message);
            }
}

static void *abort_soon(void *ctxs)
{
    usleep(3000);
    abort_all(ctxs, MAX_RANKS);
    return NULL;
}

TEST(an_abort_from_outside_ends_steps)
{
    uint64_t held = mem_n_held();
    for (uint32_t run = 0; run < 10; run++) {
        struct team *team;
        struct step_batch step;
        struct err err = {0};
        pthread_t thread;
        void *ctxs[MAX_RANKS];
        no_fault();
        REQUIRE_OK(make_team(MAX_RANKS, true, 60, &team, &err));
        make_batch(team, &step);
        for (uint32_t rank = 0; rank < MAX_RANKS; rank++)
            ctxs[rank] = team_model(team, rank)->ctx;
        CHECK_EQ(pthread_create(&thread, NULL, abort_soon, ctxs), 0);
        while (!run_step(team, &step.batch, &err))
            ;
        CHECK_CONTAINS(err.message, "the step was aborted");
        pthread_join(thread, NULL);
        free_batch(&step);
        team_destroy(team);
    }
    CHECK_EQ(mem_n_held(), held);
}

static void check_asleep(const struct team *team, uint32_t parts)
{
    for (uint32_t rank = 0; rank < team_n_ranks(team); rank++) {
        CHECK_EQ(fault.fakes[rank]->is_hidden[MEMORY_WEIGHTS], (parts & PART_WEIGHTS) != 0);
        CHECK_EQ(fault.fakes[rank]->is_hidden[MEMORY_KV], (parts & PART_POOL) != 0);
        CHECK_EQ(team_model(team, rank)->asleep, parts);
        CHECK(!fault.fakes[rank]->is_lost[MEMORY_WEIGHTS]);
    }
}

/* A failed release leaves all ranks awake, a failed restore all asleep, and no rank loses its weights. A copy that fails costs
 * no rank its pages. */
TEST(all_ranks_sleep_or_none)
{
    const uint32_t all = PART_WEIGHTS | PART_POOL;
    for (uint32_t n_ranks = 2; n_ranks <= MAX_RANKS; n_ranks *= 2)
        for (uint32_t rank = 0; rank < n_ranks; rank++) {
            struct team *team;
            struct err err = {0};
            uint32_t n_failed[2] = {0};
            no_fault();
            REQUIRE_OK(make_team(n_ranks, true, 60, &team, &err));
            for (uint32_t is_restore = 0; is_restore < 2; is_restore++) {
                for (enum rc rc = RC_DEVICE; rc && n_failed[is_restore] < 20; n_failed[is_restore] += rc != RC_OK) {
                    fault.fakes[rank]->n_calls = 0;
                    set_fault(rank, n_failed[is_restore]);
                    rc = is_restore ? team_restore(team, all, &err) : team_release(team, all, true, &err);
                    if (rc)
                        check_named(&err, rank);
                    if (!is_restore && rc && strcmp(fault.name, "pool_save") == 0)
                        for (uint32_t i = 0; i < n_ranks; i++)
                            CHECK(!fault.fakes[i]->is_lost[MEMORY_KV]);
                    if (!rc || strcmp(fault.name, "synchronize") != 0)
                        check_asleep(team, (rc == RC_OK) == is_restore ? 0 : all);
                    if (is_restore && rc && strcmp(fault.name, "synchronize") == 0)
                        break; /* a device fault behind a restore */
                }
            }
            CHECK_EQ(n_failed[0], 4); /* synchronize, save, two releases */
            CHECK(n_failed[1] >= 2);
            team_destroy(team);
        }
}

/* Weights that sleep stay asleep if dropping their copy fails. */
TEST(parts_that_sleep_stay_asleep)
{
    struct team *team;
    struct err err = {0};
    no_fault();
    REQUIRE_OK(make_team(2, true, 60, &team, &err));
    CHECK_OK(team_release(team, PART_WEIGHTS, true, &err));
    fault.fakes[1]->n_calls = 0;
    set_fault(1, 1); /* the release behind synchronize */
    CHECK_EQ(team_release(team, PART_WEIGHTS, false, &err), RC_DEVICE);
    check_named(&err, 1);
    check_asleep(team, PART_WEIGHTS);
    team_destroy(team);
}

/* Where a graph cannot be captured again, none is left, and the steps run without. */
TEST(graphs_are_captured_again_for_other_kernels)
{
    struct team *team;
    struct step_batch step;
    struct err err = {0};
    no_fault();
    REQUIRE_OK(make_team(1, false, 60, &team, &err));
    make_batch(team, &step);
    struct model *model = team_model(team, 0);
    struct fake *fake = fault.fakes[0];
    const uint32_t n = model->n_graphs;
    CHECK(n > 0);
    CHECK_OK(graphs_refresh(model, &err));
    CHECK(fake->n_graphs == n && fake->n_recorded == n);
    fake->has_other_kernels = true;
    CHECK_OK(graphs_refresh(model, &err));
    CHECK(fake->n_graphs == n && fake->n_recorded == 2 * n);
    CHECK_OK(run_step(team, &step.batch, &err));
    CHECK(step.batch.is_replayed);
    fake->n_calls = 0;
    set_fault(0, 1); /* the first graph_begin behind refresh */
    CHECK_EQ(graphs_refresh(model, &err), RC_DEVICE);
    CHECK(fake->n_graphs == 0 && model->n_graphs == 0);
    no_fault();
    CHECK_OK(run_step(team, &step.batch, &err));
    CHECK(!step.batch.is_replayed);
    free_batch(&step);
    team_destroy(team);
}
