/* Speculation. Random traces with drafts of every kind of source: every token, logprob and finish is the oracle's, which knows no
 * drafts. Then what drafts may cost others, what is counted, and how many of them pay. */
#include "../../csrc/engine/drafting.h"
#include "../../csrc/engine/token_index.h"
#include "bench.h"
#include "fake_drafts.h"
#include "trace.h"

static const struct setup SETUP = {.block_tokens = 4, .n_pages = 60, .max_num_seqs = 8, .max_num_batched_tokens = 16, .caches = true,
                                   .drafts = {.k = 4}};

/* ---- exactness ---- */

static struct fake_source trace_source; /* of the trace that runs */
static uint32_t n_preempting_traces;

/* Checks a trace, and makes the source new for the next one. */
static void look_at_trace(const struct setup *setup, const struct engine_stats *stats)
{
    const struct fake_source *source = &trace_source;
    n_preempting_traces += stats->num_preemptions > 0;
    if (!setup->draft_source)
        return;
    CHECK_EQ(source->n_begun, source->n_ended);
    CHECK(source->n_noted <= stats->generation_tokens && source->n_noted * 10 > stats->generation_tokens * 9); /* not of max_tokens 1 */
    if (setup->drafts.k) { /* else the time of the steps decides whether there are drafts */
        CHECK((stats->draft_rows > 0) == (source->kind != NOTHING));
        CHECK((stats->accepted_rows > 0) == (source->kind != NOTHING) || source->kind == GARBAGE);
        CHECK(stats->accepted_rows < stats->draft_rows || source->kind == NOTHING || !source->n_wrong);
    }
    fake_drafts(&trace_source, source->kind, source->n_wrong);
}

TEST(random_traces_with_drafts)
{
    const struct setup SETUPS[] = {
        {.block_tokens = 4, .n_pages = 26, .max_num_seqs = 6, .max_num_batched_tokens = 16, .caches = true},
        {.block_tokens = 16, .n_pages = 12, .max_num_seqs = 4, .max_num_batched_tokens = 9, .caches = true, .has_nan = true},
        {.block_tokens = 1, .n_pages = 110, .max_num_seqs = 5, .max_num_batched_tokens = 64, .caches = true},
        {.block_tokens = 4, .n_pages = 40, .max_num_seqs = 8, .max_num_batched_tokens = 30, .caches = false},
        {.block_tokens = 4, .n_pages = 60, .max_num_seqs = 6, .max_num_batched_tokens = 14, .windows = {0, 6}, .n_layers = 2, .caches = true},
        {.block_tokens = 2, .n_pages = 40, .max_num_seqs = 5, .max_num_batched_tokens = 20, .windows = {3, 7}, .n_layers = 2, .caches = true},
        {.block_tokens = 3, .n_pages = 105, .max_num_seqs = 6, .max_num_batched_tokens = 200, .windows = {1, 0, 10}, .n_layers = 3,
         .caches = true, .policy = POLICY_PRIORITY, .has_nan = true},
        {.block_tokens = 8, .n_pages = 13, .max_num_seqs = 8, .max_num_batched_tokens = 12, .caches = true, .policy = POLICY_PRIORITY},
        {.block_tokens = 4, .n_pages = 60, .max_num_seqs = 6, .max_num_batched_tokens = 40, .states = {{0, 3, 32}, {0, 2, 64}}, .n_states = 2,
         .n_layers = 1, .snapshot_tokens = 128, .caches = true, .has_nan = true},
        {.block_tokens = 4, .n_pages = 34, .max_num_seqs = 6, .max_num_batched_tokens = 16, .states = {{0, 3, 32}, {0, 2, 64}}, .n_states = 2,
         .n_layers = 1, .snapshot_tokens = 20, .caches = true, .policy = POLICY_PRIORITY},
        {.block_tokens = 4, .n_pages = 40, .max_num_seqs = 8, .max_num_batched_tokens = 24, .states = {{0, 3, 256}, {0, 1, 256}}, .n_states = 2,
         .snapshot_tokens = 96, .caches = true, .has_no_attention = true},
        {.block_tokens = 2, .n_pages = 80, .max_num_seqs = 5, .max_num_batched_tokens = 20, .states = {{0, 3, 32}}, .n_states = 1,
         .windows = {0, 6}, .n_layers = 2, .caches = false},
        {.block_tokens = 4, .n_pages = 34, .max_num_seqs = 6, .max_num_batched_tokens = 16, .states = {{0, 3, 32}, {0, 2, 64}}, .n_states = 2,
         .n_layers = 1, .snapshot_tokens = 20, .n_host_slots = 60, .preemption = PREEMPTION_SWAP, .caches = true},
    };
    const struct {
        struct draft_options drafts;
        enum fake_drafts kind;
        uint32_t n_wrong;
    } SOURCES[] = {
        {{.k = 4}, MIXED, 20},
        {{.k = 1}, TRUTH, 0},
        {{.k = 16}, TRUTH, 10},
        {{.k = 0}, TRUTH, 40},
        {{.k = 3}, GARBAGE, 0},
        {{.k = 2}, LIES, 0},
        {{.k = 5}, NOTHING, 0},
        {{.method = DRAFT_NGRAM, .k = 4, .min = 1, .max = 3}, 0, 0},
        {{.method = DRAFT_SUFFIX, .k = 0, .shared_bytes = 1 << 16}, 0, 0},
    };
    enum { N_SETUPS = sizeof SETUPS / sizeof *SETUPS, N_SOURCES = sizeof SOURCES / sizeof *SOURCES };
    n_preempting_traces = 0;
    for (uint32_t from = 0; from < N_SOURCES && !check_failures; from++) {
        struct setup setups[N_SETUPS];
        for (uint32_t i = 0; i < N_SETUPS; i++) {
            setups[i] = SETUPS[i];
            setups[i].no_beams = true; /* their tokens get no drafts */
            setups[i].drafts = SOURCES[from].drafts;
            if (SOURCES[from].drafts.method == DRAFT_NONE)
                setups[i].draft_source = fake_drafts(&trace_source, SOURCES[from].kind, SOURCES[from].n_wrong);
        }
        trace_run_all(setups, N_SETUPS, 100000 / N_SOURCES, look_at_trace);
        if (check_failures)
            fprintf(stderr, "with source %u\n", from);
    }
    CHECK(n_preempting_traces > N_SOURCES * N_SETUPS / 2); /* the traces have gone where they should */
}

TEST(random_traces_with_drafts_of_several_pools)
{
    const struct setup SETUPS[] = {
        {.block_tokens = 4, .n_pages = 26, .n_pools = 2, .max_num_seqs = 8, .max_num_batched_tokens = 24, .caches = true},
        {.block_tokens = 4, .n_pages = 50, .n_pools = 3, .max_num_seqs = 9, .max_num_batched_tokens = 40, .states = {{0, 3, 32}},
         .n_states = 1, .windows = {0, 6}, .n_layers = 2, .snapshot_tokens = 16, .caches = true, .policy = POLICY_PRIORITY},
        {.block_tokens = 16, .n_pages = 12, .n_pools = 2, .max_num_seqs = 5, .max_num_batched_tokens = 12, .caches = true, .has_nan = true},
    };
    const struct draft_options SOURCES[] = {{.k = 4}, {.k = 16}, {.method = DRAFT_NGRAM, .k = 4, .min = 1, .max = 3}};
    enum { N_SETUPS = sizeof SETUPS / sizeof *SETUPS, N_SOURCES = sizeof SOURCES / sizeof *SOURCES };
    for (uint32_t from = 0; from < N_SOURCES && !check_failures; from++) {
        struct setup setups[N_SETUPS];
        for (uint32_t i = 0; i < N_SETUPS; i++) {
            setups[i] = SETUPS[i];
            setups[i].no_beams = true;
            setups[i].drafts = SOURCES[from];
            if (SOURCES[from].method == DRAFT_NONE)
                setups[i].draft_source = fake_drafts(&trace_source, from ? TRUTH : MIXED, 20);
        }
        trace_run_all(setups, N_SETUPS, 10000, look_at_trace);
    }
}

/* ---- what is accepted, and what is counted ---- */

/* Runs a job of 31 new tokens with true drafts; returns the number of steps. */
static uint64_t steps_of(const struct setup *setup, struct engine_stats *stats)
{
    struct bench b;
    if (!bench_open(&b, setup))
        return 0;
    struct job *job = stream_job(&b.fake, 1, 9, 31);
    run_jobs(&b, &job, 1);
    *stats = stats_of(&b);
    CHECK_EQ(stats->prompt_rows + stats->decode_rows + stats->redone_rows + stats->wasted_rows + stats->draft_rows, b.fake.n_rows);
    free(job);
    fake_close(b.engine, &b.fake);
    return stats->num_steps;
}

TEST(true_drafts_are_accepted_and_counted_by_place)
{
    for (uint32_t is_async = 0; is_async < 2; is_async++) {
        struct fake_source source;
        struct engine_stats stats;
        struct setup setup = SETUP;
        setup.is_async = is_async;
        setup.draft_source = fake_drafts(&source, TRUTH, 0);
        CHECK_EQ(steps_of(&setup, &stats), 1 + 6); /* the prompt, then 5 tokens a step */
        for (uint32_t i = 0; i < MAX_DRAFTS; i++) {
            CHECK_EQ(stats.drafts[i], i < 4 ? 6 : 0);
            CHECK_EQ(stats.accepted_drafts[i], stats.drafts[i]);
        }
        CHECK_EQ(stats.draft_rows, 24);
        CHECK_EQ(stats.accepted_rows, 24);
        CHECK_EQ(stats.num_draft_waits > 0, is_async);
        source.kind = GARBAGE;
        CHECK(steps_of(&setup, &stats) > 25);
        CHECK(stats.accepted_drafts[0] < stats.drafts[0] && stats.accepted_drafts[1] <= stats.accepted_drafts[0]);
    }
}

TEST(no_draft_is_behind_the_last_token)
{
    struct bench b;
    struct fake_source source;
    struct setup setup = SETUP;
    setup.draft_source = fake_drafts(&source, TRUTH, 0);
    REQUIRE(bench_open(&b, &setup));
    for (uint32_t n_new = 1; n_new < 12; n_new++) {
        struct job *job = stream_job(&b.fake, n_new, 9, n_new);
        uint64_t rows = b.fake.n_rows;
        run_jobs(&b, &job, 1);
        CHECK_EQ(b.fake.n_rows - rows, 9 + n_new - 1);
        free(job);
    }
    struct job *job = stream_job(&b.fake, 20, MAX_LENGTH - 13, UINT32_MAX); /* max_model_len ends it */
    uint64_t rows = b.fake.n_rows;
    run_jobs(&b, &job, 1);
    CHECK_EQ(b.fake.n_rows - rows, MAX_LENGTH - 1);
    free(job);
    fake_close(b.engine, &b.fake);
}

TEST(a_request_can_do_without_drafts)
{
    struct bench b;
    struct fake_source source;
    struct setup setup = SETUP;
    setup.is_async = true;
    setup.draft_source = fake_drafts(&source, TRUTH, 0);
    REQUIRE(bench_open(&b, &setup));
    struct job *job = stream_job(&b.fake, 1, 9, 30);
    job->spec.no_drafts = true;
    run_jobs(&b, &job, 1);
    CHECK_EQ(stats_of(&b).draft_rows + source.n_begun + stats_of(&b).num_draft_waits, 0);
    CHECK_EQ(b.fake.n_most_in_flight, 2);
    free(job);
    fake_close(b.engine, &b.fake);
}

/* ---- what drafts get ---- */

TEST(no_drafts_while_a_prompt_is_owed)
{
    struct bench b;
    struct fake_source source;
    struct setup setup = SETUP;
    setup.draft_source = fake_drafts(&source, TRUTH, 0);
    REQUIRE(bench_open(&b, &setup));
    struct job *jobs[2] = {stream_job(&b.fake, 1, 9, 40), stream_job(&b.fake, 2, 80, 2)};
    submit(&b, jobs[0]);
    step(&b, 2);
    uint64_t n_before = stats_of(&b).draft_rows;
    CHECK(n_before > 0);
    submit(&b, jobs[1]);
    step(&b, 5); /* 15 rows a step */
    CHECK_EQ(stats_of(&b).draft_rows, n_before);
    step(&b, 1); /* the last 5 rows of the prompt: others are left */
    CHECK_EQ(stats_of(&b).draft_rows, n_before + 4);
    bench_close(&b, jobs, 2);
}

/* How often a crowd is preempted in a pool of so many pages, with drafts of a kind. */
static uint64_t crowd_preemptions(uint32_t n_pages, enum fake_drafts kind, uint64_t *n_drafts)
{
    struct bench b;
    struct job *jobs[5];
    struct fake_source source;
    struct setup setup = SETUP;
    setup.n_pages = n_pages;
    setup.max_num_batched_tokens = 96;
    setup.draft_source = fake_drafts(&source, kind, 0);
    if (!bench_open(&b, &setup))
        return 0;
    for (uint32_t i = 0; i < 5; i++) {
        jobs[i] = stream_job(&b.fake, i + 1, 6 + i, 24);
        submit(&b, jobs[i]);
    }
    while (engine_has_unfinished(b.engine) && !check_failures)
        step(&b, 1);
    uint64_t n = stats_of(&b).num_preemptions;
    *n_drafts += stats_of(&b).draft_rows;
    bench_close(&b, jobs, 5);
    return n;
}

/* Wrong drafts lead to the same preemptions as none. */
TEST(no_sequence_is_preempted_for_drafts)
{
    uint64_t n_drafts = 0, none = 0, n_preemptions = 0;
    for (uint32_t n_pages = 26; n_pages < 60; n_pages++) {
        uint64_t n = crowd_preemptions(n_pages, NOTHING, &none);
        n_preemptions += n;
        CHECK_EQ(crowd_preemptions(n_pages, GARBAGE, &n_drafts) > n, 0);
    }
    CHECK_EQ(none, 0);
    CHECK(n_drafts > 1000 && n_preemptions > 10);
}

/* With blocks of one token every draft takes a page. */
TEST(drafts_take_no_page_that_a_waiting_sequence_needs)
{
    struct bench b;
    struct fake_source source;
    struct setup setup = SETUP;
    setup.block_tokens = 1;
    setup.n_pages = 120;
    setup.max_num_batched_tokens = 96;
    setup.draft_source = fake_drafts(&source, TRUTH, 0);
    REQUIRE(bench_open(&b, &setup));
    struct job *jobs[2] = {stream_job(&b.fake, 1, 40, 40), stream_job(&b.fake, 2, 90, 2)};
    submit(&b, jobs[0]);
    step(&b, 2);
    CHECK_EQ(stats_of(&b).draft_rows, 4);
    submit(&b, jobs[1]); /* its 90 pages are not free */
    step(&b, 3);
    CHECK_EQ(stats_of(&b).num_waiting, 1);
    CHECK_EQ(stats_of(&b).draft_rows, 4);
    bench_close(&b, jobs, 2);
}

TEST(rejected_rows_give_their_pages_back)
{
    struct bench b;
    struct fake_source source;
    struct setup setup = SETUP;
    setup.block_tokens = 1;
    setup.drafts.k = 8;
    setup.n_pages = 120;
    setup.max_num_batched_tokens = 64;
    setup.draft_source = fake_drafts(&source, TRUTH, 100);
    REQUIRE(bench_open(&b, &setup));
    struct job *job = stream_job(&b.fake, 1, 9, 30);
    submit(&b, job);
    for (uint32_t i = 0; i < 30; i++) {
        step(&b, 1);
        CHECK_EQ(stats_of(&b).kv_blocks_total - stats_of(&b).kv_blocks_free, i < 29 ? 9 + i : 0);
    }
    bench_close(&b, &job, 1);
}

TEST(a_fault_ends_a_step_with_drafts)
{
    for (uint64_t fails_at = 2; fails_at < 6; fails_at++) {
        struct bench b;
        struct fake_source source;
        struct setup setup = SETUP;
        bool progressed;
        enum rc rc = RC_OK;
        setup.is_async = fails_at % 2;
        setup.draft_source = fake_drafts(&source, TRUTH, 30);
        REQUIRE(bench_open(&b, &setup));
        struct job *job = stream_job(&b.fake, 1, 9, 40);
        submit(&b, job);
        b.fake.fails_at = fails_at;
        for (int i = 0; i < 10 && !rc; i++)
            rc = engine_step(b.engine, &progressed, &err);
        CHECK_EQ(rc, RC_DEVICE);
        CHECK_OK(engine_check(b.engine, &err));
        CHECK(!engine_has_unfinished(b.engine));
        free(job);
        fake_close(b.engine, &b.fake);
    }
}


/* ---- how many drafts pay ---- */

TEST(drafts_pay_while_they_are_likelier_than_their_cost)
{
    const float rates[] = {0.9f, 0.8f, 0.5f, 0.5f};
    CHECK_EQ(drafts_worth(rates, 4, 0), 4);
    CHECK_EQ(drafts_worth(rates, 4, 0.17f), 4); /* 0.9 * 0.8 * 0.5 * 0.5 = 0.18 */
    CHECK_EQ(drafts_worth(rates, 4, 0.19f), 3);
    CHECK_EQ(drafts_worth(rates, 4, 0.37f), 2);
    CHECK_EQ(drafts_worth(rates, 4, 0.75f), 1);
    CHECK_EQ(drafts_worth(rates, 4, 0.95f), 0);
    CHECK_EQ(drafts_worth(rates, 2, 0), 2);
}

/* A step of n rows takes 1000 + 100 n us and gives `tokens` tokens. */
TEST(the_cost_of_a_row_is_learnt_from_steps)
{
    struct drafter drafter = {0};
    for (uint32_t i = 0; i < 200; i++) {
        struct step_record record = {.n_rows = 1 + i % 4, .n_decode = 1, .device_us = 1000 + 100 * (float)(1 + i % 4), .n_tokens = 2};
        if (i % 10 == 0)
            record.n_prompt = record.n_rows = 500; /* not a step to learn from */
        drafter_observe(&drafter, &record, (double)record.device_us);
    }
    float cost = step_costs_of_row(&drafter.costs); /* nearly 100 us, at 2 tokens in about 1250 us */
    CHECK(cost > 0.12f && cost < 0.165f);
    for (uint32_t i = 0; i < 200; i++) /* 32 sequences, whose rows cost all of the time */
        drafter_observe(&drafter, &(struct step_record){.n_rows = 32 + i % 4, .n_decode = 32, .device_us = 100 * (float)(32 + i % 4), .n_tokens = 32}, 3300);
    cost = step_costs_of_row(&drafter.costs);
    CHECK(cost > 0.8f && cost <= 1.0f);
}

/* ---- whether drafts pay at all ---- */

/* Microseconds and tokens of a step, by kind: [0] without drafts, [1] with. */
struct machine {
    double us[2], tokens[2];
};

/* Notes n steps on a machine with noise. Returns the time for a token, relative to that of the machine's faster kind. */
static double run_paces(struct draft_pace *pace, const struct machine *machine, uint32_t n, uint32_t *n_plain)
{
    uint64_t random = 3;
    double us = 0, tokens = 0, best = machine->us[0] / machine->tokens[0], other = machine->us[1] / machine->tokens[1];
    *n_plain = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t kind = !pace->is_plain, n_tokens = (uint32_t)(machine->tokens[kind] + check_below(&random, 100) / 100.0);
        double noise = 0.97 + 0.06 * check_below(&random, 100) / 100.0;
        *n_plain += pace->is_plain;
        us += machine->us[kind] * noise;
        tokens += n_tokens;
        draft_pace_note(pace, machine->us[kind] * noise, n_tokens);
    }
    return us / tokens / (best < other ? best : other);
}

/* 256 sequences lose with drafts, one sequence gains; the texts of the last kind begin to repeat themselves later. */
TEST(steps_carry_drafts_while_that_is_faster)
{
    const struct machine large = {{9000, 12700}, {256, 307}}, one = {{3500, 3900}, {1, 3.1}}, idle = {{3500, 3650}, {1, 1}};
    uint32_t n_plain;
    struct draft_pace pace = {0};
    run_paces(&pace, &large, 40, &n_plain);
    CHECK(pace.is_plain && n_plain >= 20);
    CHECK(run_paces(&pace, &large, 4000, &n_plain) < 1.01);
    CHECK(n_plain > 3800 && n_plain < 4000); /* it looks again */
    pace = (struct draft_pace){0};
    run_paces(&pace, &one, 40, &n_plain);
    CHECK(!pace.is_plain && n_plain == 10);
    CHECK(run_paces(&pace, &one, 4000, &n_plain) < 1.02);
    CHECK(n_plain > 0 && n_plain < 100);
    run_paces(&pace, &idle, 4000, &n_plain);
    CHECK(pace.is_plain && n_plain > 1000);
    CHECK(run_paces(&pace, &one, 1000, &n_plain) < 1.3);
    CHECK(!pace.is_plain && n_plain < 150);
}

/* Each size of a batch has phases of its own. */
TEST(a_sequence_that_enters_a_phase_without_drafts_wants_none)
{
    const struct machine large = {{9000, 12700}, {256, 307}};
    struct drafter drafter = {.adapts = true, .overlaps = true};
    struct sequence sequence = {.drafts.n_wanted = 1};
    for (uint32_t i = 0; i < 40; i++) {
        uint32_t kind = !drafter.paces[8].is_plain;
        struct step_record record = {.n_rows = 256 + 64 * kind, .n_decode = 256, .device_us = (float)large.us[kind],
                                     .n_tokens = (uint32_t)large.tokens[kind]};
        drafter_observe(&drafter, &record, large.us[kind]);
        record.n_prompt = 1000; /* mostly a prompt: says nothing */
        drafter_observe(&drafter, &record, 1e6);
    }
    drafter_enter(&drafter, &sequence);
    CHECK_EQ(sequence.drafts.n_wanted, 0);
    sequence.drafts.n_wanted = 1;
    drafter_observe(&drafter, &(struct step_record){.n_rows = 1, .n_decode = 1, .device_us = 3500, .n_tokens = 1}, 3500);
    drafter_enter(&drafter, &sequence);
    CHECK_EQ(sequence.drafts.n_wanted, 1);
}

/* ---- adapting, on a machine whose time is given ---- */

/* Microseconds of a step of an H100 with the shape of Llama-3-8B. Steps with drafts do not overlap, and large ones replay no graph. */
static double step_us(uint32_t n_rows, bool has_drafts)
{
    return 4500 + 26.5 * n_rows + (has_drafts ? 250 : 0) + (has_drafts && n_rows > 64 ? 1200 : 0);
}

static void accept_nothing(void *ctx, struct sequence *q, const int32_t *ids, uint32_t n)
{
    (void)ctx, (void)q, (void)ids, (void)n;
}

static bool wants_none(const struct sequence *sequences, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (sequences[i].drafts.n_wanted)
            return false;
    return true;
}

/* Draws n_tokens of each of n new sequences, whose drafts are right with probability `right`. The first step takes `first`
 * times its time, because it loads kernels. Returns the tokens per second. A step is scheduled without drafts before the results of the one before arrive, if no sequence wants drafts then. */
static double adapt_on_machine(struct drafter *drafter, uint32_t n, uint32_t n_tokens, double right, double first, uint64_t *random)
{
    static struct sequence sequences[256];
    double us = 0;
    uint32_t n_drawn = 0;
    bool is_scheduled = false; /* the step, before the results of the one before */
    for (uint32_t i = 0; i < n; i++) {
        sequences[i] = (struct sequence){.drafts = {.n_wanted = 1, .most = ADAPTIVE_DRAFTS}};
        for (uint32_t place = 0; place < MAX_DRAFTS; place++)
            sequences[i].draft_rates[place] = FIRST_RATE;
        drafter_enter(drafter, &sequences[i]);
        drafter_note(drafter, &sequences[i], 0); /* the prompt's token */
    }
    while (n_drawn < n * n_tokens) {
        struct step_record record = {.n_decode = n};
        bool has_next = wants_none(sequences, n);
        for (uint32_t i = 0; i < n; i++)
            record.n_draft += sequences[i].drafts.n = is_scheduled ? 0 : sequences[i].drafts.n_wanted;
        record.n_rows = n + record.n_draft;
        for (uint32_t i = 0; i < n; i++) {
            struct sequence *q = &sequences[i];
            uint32_t n_drafts = q->drafts.n, n_right = 0;
            q->n_pending = has_next;
            while (n_right < n_drafts && check_below(random, 1000) < 1000 * right)
                n_right++;
            for (uint32_t place = 0; place < n_drafts; place++)
                q->draft_counts.proposed[place]++;
            drafter_learn(q, n_drafts, n_right);
            for (uint32_t t = 0; t <= n_right; t++) {
                q->drafts.has_more = t < n_right;
                drafter_note(drafter, q, 0);
            }
            record.n_tokens += 1 + n_right;
        }
        double step = step_us(record.n_rows, record.n_draft > 0) * (n_drawn ? 1 : first) * (0.99 + 0.0002 * check_below(random, 100));
        record.device_us = (float)step;
        drafter_observe(drafter, &record, step);
        us += step;
        n_drawn += record.n_tokens;
        is_scheduled = has_next;
    }
    return 1e6 * n_drawn / us;
}

TEST(adapting_drafts_pay_at_every_size_of_a_batch)
{
    enum { N_SIZES = 4 };
    const struct { uint32_t n; double least; } SIZES[N_SIZES] = {{256, 0.98}, {1, 2.6}, {8, 2.2}, {32, 1.45}};
    struct draft_source source = {.accept = accept_nothing};
    const struct drafter fresh = {.source = &source, .adapts = true, .overlaps = true};
    struct drafter drafter = fresh;
    uint64_t random = 1;
    for (uint32_t i = 0; i < 2 * N_SIZES; i++) { /* first one after the other, then each on a new engine */
        uint32_t n = SIZES[i % N_SIZES].n;
        drafter = i < N_SIZES ? drafter : fresh;
        for (uint32_t round = 0; round < 4; round++) {
            double speed = adapt_on_machine(&drafter, n, 192, 0.8, round ? 1 : 20, &random) * step_us(n, false) / (1e6 * n);
            if (getenv("SHOW")) printf("%u sequences, round %u: %.3f\n", n, round, speed);
            if (round)
                CHECK(speed > SIZES[i % N_SIZES].least);
        }
    }
}

/* Without overlap, as on a CPU. */
TEST(the_number_of_drafts_adapts)
{
    struct draft_source source = {.accept = accept_nothing};
    uint64_t random = 1;
    for (uint32_t is_right = 0; is_right < 2; is_right++) {
        struct drafter drafter = {.source = &source, .adapts = true};
        double speed = adapt_on_machine(&drafter, 1, 400, is_right, 1, &random) * step_us(1, false) / 1e6;
        CHECK(is_right ? speed > 5 : speed > 0.93 && speed < 1);
    }
}

/* ---- the index ---- */

/* The newest place before the end behind the last `length` tokens that is still within the ring; 0: none. */
static uint32_t find_plainly(const int32_t *ids, uint32_t n, uint32_t length, uint32_t capacity)
{
    for (uint32_t place = n - 1; n > length && place >= length && n - place + length <= capacity; place--)
        if (!memcmp(ids + place - length, ids + n - length, length * sizeof *ids))
            return place;
    return 0;
}

TEST(the_index_finds_what_a_search_finds)
{
    const uint32_t lengths[] = {4, 2, 1}, capacity = 1024;
    static uint64_t memory[1024 * 8];
    static int32_t ids[4000];
    uint64_t random = 1;
    uint32_t n_found = 0, n_missed = 0;
    struct token_index index;
    REQUIRE(token_index_bytes(capacity, 3) <= sizeof memory);
    token_index_init(&index, memory, capacity, lengths, 3);
    for (uint32_t n = 0; n < 4000;) {
        ids[n] = (int32_t)check_below(&random, 4);
        token_index_add(&index, ids[n++]);
        for (uint32_t l = 0; l < 3; l++) {
            uint32_t place = 0, wanted = find_plainly(ids, n, lengths[l], capacity), n_places = token_index_find(&index, &index, l, &place, 1);
            CHECK(!n_places || (place == wanted && token_index_id(&index, place) == ids[place]));
            n_found += n_places;
            n_missed += wanted && !n_places; /* lost to a collision */
        }
    }
    CHECK(n_found > 10000 && n_missed * 10 < n_found);
}

/* ---- the sources ---- */

/* Runs jobs one after another with a source and k = 4; returns the rows of drafts and those accepted. */
static void run_with(const struct draft_options *drafts, const uint32_t *streams, uint32_t n, struct engine_stats *stats)
{
    struct bench b;
    struct setup setup = SETUP;
    setup.drafts = *drafts;
    setup.max_num_batched_tokens = 64;
    REQUIRE(bench_open(&b, &setup));
    for (uint32_t i = 0; i < n; i++) {
        struct job *job = plain_job(&b.fake, streams[i], 12, 40);
        run_jobs(&b, &job, 1);
        free(job);
    }
    *stats = stats_of(&b);
    fake_close(b.engine, &b.fake);
}

TEST(finished_outputs_are_drafts_for_the_same_prompt)
{
    struct engine_stats once, twice, other;
    const struct draft_options shared = {.method = DRAFT_SUFFIX, .k = 4, .shared_bytes = 1 << 16}, own = {.method = DRAFT_SUFFIX, .k = 4};
    run_with(&shared, (const uint32_t[]){1}, 1, &once);
    run_with(&shared, (const uint32_t[]){1, 1}, 2, &twice);
    run_with(&own, (const uint32_t[]){1, 1}, 2, &other);
    CHECK(twice.accepted_rows - once.accepted_rows > 28); /* of 39 tokens, 4 of 5 */
    CHECK(twice.num_steps - once.num_steps < 12);
    CHECK_EQ(other.accepted_rows, 2 * once.accepted_rows);
}

/* A ring of 64 tokens holds the last output alone. */
TEST(finished_outputs_are_dropped_when_memory_is_full)
{
    struct engine_stats stats, alone;
    const struct draft_options small = {.method = DRAFT_SUFFIX, .k = 4, .shared_bytes = 1};
    run_with(&small, (const uint32_t[]){1, 2, 1}, 3, &stats);
    run_with(&small, (const uint32_t[]){1, 2}, 2, &alone);
    CHECK(stats.accepted_rows - alone.accepted_rows < 12);
}
