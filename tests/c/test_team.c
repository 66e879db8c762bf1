/* Failures of a team (csrc/program/team.c): whatever fails on whichever rank, the error names that rank, all waits and threads
 * end, and nothing leaks. */
#define _GNU_SOURCE
#include "fake_ranks.h"

#include "../../csrc/program/model_state.h"
#include "../../csrc/program/team.h"

#include <dirent.h>
#include <pthread.h>

#define N_ROWS 3u

/* ---- the program ------------------------------------------------------------------------------------------------------- */

static void *copy_of(const void *from, size_t size_bytes)
{
    void *to = mem_alloc(size_bytes);
    return to ? memcpy(to, from, size_bytes) : NULL;
}

static struct weight rows_of(const char *name, uint32_t first, uint32_t n_rows, uint32_t all_rows)
{
    char *text = copy_of(name, strlen(name) + 1), *source = copy_of(name, strlen(name) + 1);
    struct weight_part part = {.name = text, .source = source, .rows = n_rows, .n_dims = 2, .dims = {all_rows, WIDTH},
                               .base = first, .inner = n_rows, .stride = n_rows};
    return (struct weight){.kind = WEIGHT_MATRIX, .rows = n_rows, .cols = WIDTH, .n_parts = 1,
                           .parts = copy_of(&part, sizeof part)};
}

static struct op op_of(uint32_t code, uint32_t in, uint32_t out, uint32_t weight)
{
    struct op op = {.code = code};
    memset(op.in, 0xff, sizeof op.in);
    memset(op.out, 0xff, sizeof op.out);
    memset(op.weight, 0xff, sizeof op.weight);
    op.in[0] = in;
    op.out[0] = out;
    op.weight[0] = weight;
    return op;
}

/* logits(linear(embed)). A rank has some columns of the linear and some rows of the head. Its layer and its state differ. */
static struct program *make_program(uint32_t rank, uint32_t n_ranks)
{
    bool is_of_rank = n_ranks > 1;
    uint32_t width = WIDTH / n_ranks, n_ids = VOCAB / n_ranks, last = is_of_rank ? 2 : 1;
    const struct value values[] = {
        {WIDTH, NO_INDEX, 0, WIDTH, 0, 1}, {width, NO_INDEX, 0, width, 0, 1}, {WIDTH, NO_INDEX, 0, WIDTH, 0, 1}};
    const struct weight weights[] = {rows_of("embed", 0, VOCAB, VOCAB), rows_of("linear", rank * width, width, WIDTH),
                                     rows_of("head", rank * n_ids, n_ids, VOCAB)};
    const struct cache_layer layer = {.n_heads = 2, .n_kv_heads = rank == 1 ? 2 : 1, .head_dim = 4};
    const struct state_layer state = {.n_units = rank == 0 ? 5 : 3, .unit_floats = 64};
    struct op ops[4] = {op_of(OP_EMBED, NO_INDEX, 0, 0), op_of(OP_LINEAR, 0, 1, 1), op_of(OP_GATHER, 1, 2, NO_INDEX)};
    ops[0].embed.scale = 1;
    ops[2].gather.first = rank * width;
    ops[1 + last] = op_of(OP_LOGITS, last, NO_INDEX, 2);
    ops[1 + last].logits.scale = 1;
    ops[1 + last].logits.first_id = rank * n_ids;
    struct program program = {
        .n_ops = 2 + last, .n_values = 1 + last, .n_weights = 3, .n_layers = 1, .n_states = 1,
        .ops = copy_of(ops, sizeof ops), .values = copy_of(values, sizeof values), .weights = copy_of(weights, sizeof weights),
        .layers = copy_of(&layer, sizeof layer), .states = copy_of(&state, sizeof state), .vocab_size = VOCAB,
        .is_of_rank = is_of_rank};
    return copy_of(&program, sizeof program);
}

/* The allocation number `failing` of team_create fails; negative: none. */
static enum rc make_team_failing(uint32_t n_ranks, bool is_eager, double timeout, int64_t failing, struct team **team,
                                 struct err *err)
{
    struct program *programs[MAX_RANKS];
    struct model_options ranks[MAX_RANKS];
    const struct team_options options = {.n_ranks = n_ranks, .timeout_seconds = timeout};
    for (uint32_t rank = 0; rank < n_ranks; rank++) {
        programs[rank] = make_program(rank, n_ranks);
        ranks[rank] = (struct model_options){
            .device = DEVICES[rank], .kv_dtype = DTYPE_F32, .block_tokens = 4, .max_num_seqs = 4, .max_num_batched_tokens = 8,
            .max_model_len = 16, .memory_share = 0.5, .is_eager = is_eager, .weights = {.dtype = DTYPE_F32, .is_dummy = true}};
    }
    *team = NULL;
    mem_fail_after(failing);
    enum rc rc = team_create(programs, NULL, ranks, &options, team, err);
    mem_fail_after(-1);
    return rc;
}

static enum rc make_team(uint32_t n_ranks, bool is_eager, double timeout, struct team **team, struct err *err)
{
    return make_team_failing(n_ranks, is_eager, timeout, -1, team, err);
}

/* A step of N_ROWS sequences of one row each, all of which sample. */
struct step_batch {
    struct page_tables tables;
    struct batch batch;
};

static void make_batch(const struct team *team, struct step_batch *step)
{
    const struct model *model = team_model(team, 0);
    struct err err = {0};
    struct batch *b = &step->batch;
    REQUIRE_OK(page_tables_create(&step->tables, kv_layout_n_tables(&model->layout), 4, model->table_stride, &err));
    REQUIRE_OK(batch_create(b, &step->tables, 8, 1, 1, &err));
    b->n_rows = b->n_seqs = b->n_logits_rows = b->n_tasks = N_ROWS;
    for (uint32_t i = 0; i < N_ROWS; i++) {
        b->token_ids[i] = (int32_t)(3 * i + 1);
        b->row_seq[i] = b->seq_first_row[i] = b->logits_rows[i] = (int32_t)i;
        b->tasks[i] = (struct sample_task){.logits_row = i, .is_greedy = true};
    }
    b->seq_first_row[N_ROWS] = N_ROWS;
}

static void free_batch(struct step_batch *step)
{
    batch_destroy(&step->batch);
    page_tables_destroy(&step->tables);
}

static enum rc run_step(struct team *team, struct batch *batch, struct err *err)
{
    for (uint32_t i = 0; i < N_ROWS; i++)
        batch->tasks[i].logits_row = i;
    enum rc rc = team_start(team, batch, err);
    return rc ? rc : team_finish(team, batch, err);
}

static uint32_t n_threads_before; /* all teams */

static uint32_t n_threads(void)
{
    DIR *folder = opendir("/proc/self/task");
    uint32_t n = 0;
    while (folder && readdir(folder))
        n++;
    closedir(folder);
    return n;
}

static void *do_nothing(void *argument)
{
    return argument;
}

/* Counts behind a first thread, because the thread sanitizer then starts one, too. */
__attribute__((constructor)) static void count_threads(void)
{
    pthread_t thread;
    if (!pthread_create(&thread, NULL, do_nothing, NULL))
        pthread_join(thread, NULL);
    usleep(20000);
    n_threads_before = n_threads();
}

/* The system may still list a thread for a while when it has been joined. */
static void check_threads_have_ended(void)
{
    for (uint32_t i = 0; i < 5000 && n_threads() > n_threads_before; i++)
        usleep(1000);
    CHECK_EQ(n_threads(), n_threads_before);
}

/* ---- tests ------------------------------------------------------------------------------------------------------------- */

static void check_named(const struct err *err, uint32_t rank)
{
    char text[96];
    snprintf(text, sizeof text, "rank %u (%s): %s fails", rank, DEVICES[rank], fault.name);
    CHECK_STR(err->message, text);
    CHECK_STR(err->what, fault.name);
    CHECK_EQ(err->code, 700 + (int64_t)rank);
    CHECK_EQ(err->rc, RC_DEVICE);
}

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
