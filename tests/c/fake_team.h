/* fake_team.h: for test_team.c and test_team_traces.c, teams of fake ranks that compute a tiny program, and their steps. */
#ifndef LLMPY_FAKE_TEAM_H
#define LLMPY_FAKE_TEAM_H

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

UNUSED static enum rc run_step(struct team *team, struct batch *batch, struct err *err)
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

static void check_named(const struct err *err, uint32_t rank)
{
    char text[96];
    snprintf(text, sizeof text, "rank %u (%s): %s fails", rank, DEVICES[rank], fault.name);
    CHECK_STR(err->message, text);
    CHECK_STR(err->what, fault.name);
    CHECK_EQ(err->code, 700 + (int64_t)rank);
    CHECK_EQ(err->rc, RC_DEVICE);
}

#endif
