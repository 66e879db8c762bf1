/* What the engine counts: every row is accounted for, the ring and the totals agree, readers see whole snapshots. */
#include "fake_model.h"

#include <pthread.h>
#include <stdatomic.h>

#include "../../csrc/engine/statistics.h"

static struct err err;

/* Sums over all steps, read as they come. */
struct sums {
    uint64_t n_steps, n_rows, n_prompt, n_decode, n_redone, n_tokens, n_admitted, n_preempted;
    double start;
};

static void sums_add(struct sums *sums, const struct step_record *step)
{
    CHECK(step->n_rows > 0);
    CHECK_EQ(step->n_rows, step->n_prompt + step->n_decode + step->n_redone + step->n_wasted); /* invariant 15 */
    CHECK(step->n_tokens <= step->n_rows + step->n_admitted);
    CHECK(step->start >= sums->start && step->host_us >= 0 && step->device_us >= 0);
    CHECK(step->n_pages_used > 0 && step->n_running > 0);
    sums->n_steps++;
    sums->n_rows += step->n_rows;
    sums->n_prompt += step->n_prompt;
    sums->n_decode += step->n_decode;
    sums->n_redone += step->n_redone;
    sums->n_tokens += step->n_tokens;
    sums->n_admitted += step->n_admitted;
    sums->n_preempted += step->n_preempted;
    sums->start = step->start;
}

static void sums_read(struct sums *sums, struct engine *engine)
{
    static struct step_record steps[STEP_LOG_LENGTH];
    struct engine_stats stats;
    uint64_t first;
    engine_stats(engine, &stats);
    uint32_t n_new = (uint32_t)(stats.num_steps - sums->n_steps), n = engine_step_log(engine, steps, n_new, &first);
    CHECK_EQ(n, n_new);
    CHECK_EQ(first, sums->n_steps + 1);
    for (uint32_t i = 0; i < n; i++)
        sums_add(sums, &steps[i]);
}

static uint64_t histogram_count(const struct histogram *histogram)
{
    uint64_t n = 0;
    for (uint32_t i = 0; i <= N_BOUNDS; i++)
        n += histogram->counts[i];
    return n;
}

struct load {
    uint64_t n_samples, n_prompt, n_prior, n_requests; /* n_prompt, n_prior: tokens */
};

static void check_totals(struct engine *engine, const struct fake *fake, const struct sums *sums, const struct load *load)
{
    struct engine_stats stats;
    struct histogram h[N_HISTOGRAMS];
    uint64_t n_finished = 0;
    engine_stats(engine, &stats);
    engine_histograms(engine, h);
    for (int how = 0; how < N_FINISHES; how++)
        n_finished += stats.finished[how];
    CHECK_EQ(stats.finished[FINISH_NONE], 0);
    CHECK_EQ(n_finished, load->n_samples);
    CHECK_EQ(sums->n_steps, fake->n_runs);
    CHECK_EQ(sums->n_rows, fake->n_rows);
    CHECK_EQ(sums->n_prompt, stats.prompt_rows);
    CHECK_EQ(sums->n_decode, stats.decode_rows);
    CHECK_EQ(sums->n_redone, stats.redone_rows);
    CHECK_EQ(sums->n_tokens, stats.generation_tokens);
    CHECK_EQ(sums->n_preempted, stats.num_preemptions);
    CHECK_EQ(sums->n_admitted, load->n_samples + stats.num_preemptions);
    CHECK_EQ(stats.prompt_tokens, load->n_prompt);
    CHECK_EQ(histogram_count(&h[HISTOGRAM_QUEUE]), load->n_requests);
    CHECK_EQ(histogram_count(&h[HISTOGRAM_PROMPT_TOKENS]), load->n_requests);
    CHECK_EQ(h[HISTOGRAM_PROMPT_TOKENS].sum, load->n_prompt);
    CHECK_EQ(histogram_count(&h[HISTOGRAM_END_TO_END]), n_finished);
    CHECK_EQ(histogram_count(&h[HISTOGRAM_OUTPUT_TOKENS]), n_finished);
    CHECK_EQ(h[HISTOGRAM_OUTPUT_TOKENS].sum, stats.generation_tokens);
    CHECK(histogram_count(&h[HISTOGRAM_PER_TOKEN]) <= histogram_count(&h[HISTOGRAM_FIRST_TOKEN]));
    CHECK(h[HISTOGRAM_FIRST_TOKEN].sum <= h[HISTOGRAM_END_TO_END].sum);
    CHECK_EQ(stats.kv_blocks_free, stats.kv_blocks_total);
    CHECK(stats.kv_blocks_cached <= stats.kv_blocks_free);
}

/* Prior output may satisfy a stop rule, and there may be nothing to score: such a request is never admitted. */
static bool has_rows(const struct job *job)
{
    return job->spec.is_score ? job->n_scores : job->expected[0].n || job->expected[0].finish == FINISH_ERROR;
}

/* Random requests, all run to their end; returns what was counted. */
static struct engine_stats run_load(const struct setup *setup, uint32_t n_jobs, uint64_t random, bool is_plain)
{
    struct fake fake;
    struct engine_stats stats = {0};
    struct setup samples = *setup;
    samples.no_beams = true; /* beams that fall out of a search are admitted and compute tokens, but do not finish */
    struct engine *engine = fake_engine(&samples, &fake, &err);
    struct sums sums = {0};
    struct load load = {.n_requests = n_jobs};
    struct job **jobs = calloc(n_jobs, sizeof *jobs);
    bool progressed = true;
    if (!engine) {
        CHECK_FAIL("%s", err.message);
        free(jobs);
        return stats;
    }
    for (uint32_t i = 0; i < n_jobs; i++) {
        jobs[i] = malloc(sizeof **jobs);
        do
            random_job(jobs[i], &fake, setup->policy, &random);
        while (!has_rows(jobs[i]) || (is_plain && (jobs[i]->spec.n > 1 || jobs[i]->spec.is_score || jobs[i]->spec.wants_prompt_logprobs)));
        load.n_samples += jobs[i]->spec.n;
        load.n_prompt += jobs[i]->spec.prompt.n;
        load.n_prior += jobs[i]->spec.prior.n;
    }
    for (uint32_t i = 0; (i < n_jobs || engine_has_unfinished(engine)) && !check_failures; i++) {
        if (i < n_jobs)
            submit_job(engine, jobs[i]);
        CHECK_OK(engine_step(engine, &progressed, &err));
        take_all(engine, true, jobs, n_jobs);
        if (i % 50 == 0)
            sums_read(&sums, engine);
    }
    drain(engine, jobs, n_jobs); /* nothing is left: it looks whether that is so */
    sums_read(&sums, engine);
    check_totals(engine, &fake, &sums, &load);
    engine_stats(engine, &stats);
    if (is_plain) { /* the scheduler's choice of rows is then known in advance */
        CHECK_EQ(stats.prompt_rows + stats.prefix_cache_hits, load.n_prompt + load.n_prior);
        CHECK_EQ(stats.decode_rows, stats.generation_tokens - load.n_samples);
    }
    for (uint32_t i = 0; i < n_jobs; i++)
        free(jobs[i]);
    free(jobs);
    fake_close(engine, &fake);
    return stats;
}

TEST(rows_without_preemption_are_prompt_or_decode)
{
    const struct setup AMPLE = {.block_tokens = 4, .n_pages = 600, .max_num_seqs = 8, .max_num_batched_tokens = 16, .caches = true};
    struct engine_stats stats = run_load(&AMPLE, 60, 1, true);
    CHECK_EQ(stats.redone_rows, 0);
    CHECK_EQ(stats.num_preemptions, 0);
    CHECK(stats.cached_tokens > 0 && stats.cached_tokens <= stats.prefix_cache_hits);
    CHECK(stats.prefix_cache_hits <= stats.prefix_cache_queries);
    CHECK(stats.kv_blocks_cached > 0);
}

TEST(rows_after_a_preemption_are_redone)
{
    const struct setup TIGHT[] = {
        {.block_tokens = 4, .n_pages = 26, .max_num_seqs = 6, .max_num_batched_tokens = 16, .caches = false},
        {.block_tokens = 4, .n_pages = 26, .max_num_seqs = 6, .max_num_batched_tokens = 16, .caches = true},
        {.block_tokens = 4, .n_pages = 60, .max_num_seqs = 6, .max_num_batched_tokens = 12, .windows = {0, 6}, .n_layers = 2,
         .caches = true, .has_nan = true},
        {.block_tokens = 1, .n_pages = 104, .max_num_seqs = 7, .max_num_batched_tokens = 7, .caches = true, .policy = POLICY_PRIORITY},
    };
    uint64_t n_errors = 0;
    for (uint32_t i = 0; i < sizeof TIGHT / sizeof *TIGHT; i++) {
        struct engine_stats stats = run_load(&TIGHT[i], 150, 2 + i, false);
        CHECK(stats.num_preemptions > 0);
        CHECK(stats.redone_rows > 0);
        n_errors += stats.finished[FINISH_ERROR];
        CHECK(stats.finished[FINISH_EOS] && stats.finished[FINISH_STOP_ID] && stats.finished[FINISH_STOP_STRING] && stats.finished[FINISH_LENGTH]);
    }
    CHECK(n_errors > 0);
}

TEST(the_ring_keeps_the_last_steps)
{
    static struct step_record steps[STEP_LOG_LENGTH + 1];
    struct statistics *s;
    uint64_t first;
    REQUIRE_OK(statistics_create(&s, &err));
    CHECK_EQ(statistics_read_steps(s, steps, 10, &first), 0);
    for (uint32_t i = 1; i <= STEP_LOG_LENGTH + 100; i++) {
        statistics_log_step(s, &(struct step_record){.n_rows = i, .start = i});
        if (i == 3) {
            CHECK_EQ(statistics_read_steps(s, steps, 10, &first), 3);
            CHECK_EQ(first, 1);
        }
    }
    CHECK_EQ(statistics_read_steps(s, steps, STEP_LOG_LENGTH + 1, &first), STEP_LOG_LENGTH);
    CHECK_EQ(first, 101);
    for (uint32_t i = 0; i < STEP_LOG_LENGTH; i++)
        CHECK(steps[i].n_rows == first + i && steps[i].start == (double)(first + i));
    CHECK_EQ(statistics_read_steps(s, steps, 0, &first), 0);
    statistics_destroy(s);
}

TEST(values_fall_into_their_buckets)
{
    struct statistics *s;
    struct snapshot snapshot;
    REQUIRE_OK(statistics_create(&s, &err));
    for (int h = 0; h < N_HISTOGRAMS; h++) {
        const double *bounds = histogram_bounds((enum histogram_name)h);
        double sum = 0;
        for (uint32_t i = 0; i < N_BOUNDS; i++) {
            CHECK(!i || bounds[i] > bounds[i - 1]);
            statistics_observe(s, (enum histogram_name)h, bounds[i]);       /* the last of its bucket */
            statistics_observe(s, (enum histogram_name)h, bounds[i] * 1.5); /* the next one's */
            sum += bounds[i] * 2.5;
        }
        statistics_observe(s, (enum histogram_name)h, -1); /* counts as 0 */
        statistics_publish(s);
        statistics_read(s, &snapshot);
        for (uint32_t i = 0; i <= N_BOUNDS; i++)
            CHECK_EQ(snapshot.histograms[h].counts[i], i == N_BOUNDS ? 1 : 2);
        CHECK(fabs(snapshot.histograms[h].sum - sum) <= 1e-9 * sum);
    }
    statistics_destroy(s);
}

struct reader {
    struct statistics *s;
    atomic_bool stops;
    uint64_t n_snapshots, n_steps, n_torn;
};

static void *read_all(void *argument)
{
    static struct step_record steps[STEP_LOG_LENGTH];
    struct reader *r = argument;
    struct snapshot snapshot;
    uint64_t first;
    while (!atomic_load(&r->stops) || !r->n_snapshots) {
        statistics_read(r->s, &snapshot);
        const struct engine_stats *t = &snapshot.totals;
        r->n_torn += t->num_running != t->nonfinite_rows || snapshot.histograms[N_HISTOGRAMS - 1].counts[0] != t->num_running;
        r->n_snapshots++;
        uint32_t n = statistics_read_steps(r->s, steps, STEP_LOG_LENGTH, &first);
        for (uint32_t i = 0; i < n; i++)
            r->n_torn += steps[i].n_rows != (uint32_t)(first + i) || steps[i].n_pages_cached != steps[i].n_rows;
        r->n_steps += n;
    }
    return NULL;
}

TEST(readers_never_see_half_of_anything)
{
    struct reader reader = {0};
    pthread_t thread;
    REQUIRE_OK(statistics_create(&reader.s, &err));
    REQUIRE(!pthread_create(&thread, NULL, read_all, &reader));
    struct engine_stats *totals = statistics_totals(reader.s);
    for (uint32_t i = 1; i <= 200000; i++) {
        totals->num_running = totals->nonfinite_rows = i;
        statistics_observe(reader.s, N_HISTOGRAMS - 1, 0);
        statistics_publish(reader.s);
        statistics_log_step(reader.s, &(struct step_record){.n_rows = i, .n_pages_cached = i});
    }
    atomic_store(&reader.stops, true);
    pthread_join(thread, NULL);
    CHECK_EQ(reader.n_torn, 0);
    CHECK(reader.n_snapshots > 0 && reader.n_steps > 0);
    statistics_destroy(reader.s);
}
