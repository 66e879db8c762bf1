/* bench_step.c: what a step costs the host, scheduling to enqueue and results included, with a runner that does nothing. Prints
 * for each number of sequences the minimum and the median of the microseconds; then the same without a host tier, with one that
 * nothing comes back from, and without one again, whose steps take turns; then of the sources that find drafts in text, for one
 * sequence of a step. tests/engine/test_host_cost.py builds it with the release's flags and guards the numbers. */
#define _GNU_SOURCE
#include "../../csrc/engine/draft.h"
#include "../../csrc/engine/engine.h"
#include "../../csrc/engine/sequence.h"
#include "../../csrc/step/kv_layout.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define N_STEPS 400u
#define PROMPT 2000u

static enum rc start_nothing(void *ctx, struct batch *batch, struct err *err)
{
    (void)ctx;
    (void)err;
    for (uint32_t t = 0; t < batch->n_tasks; t++)
        batch->results[t] = (struct sample_result){.id = (int32_t)(batch->tasks[t].position % 1000), .raw = -1};
    return RC_OK;
}

static enum rc finish_nothing(void *ctx, struct batch *batch, struct err *err)
{
    (void)ctx;
    (void)batch;
    (void)err;
    return RC_OK;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double now_us(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return 1e6 * (double)time.tv_sec + 1e-3 * (double)time.tv_nsec;
}

/* Moves of the host tier that have ended when they are asked for. */
static enum rc move_nothing(void *ctx, struct move_args *args, struct err *err)
{
    struct move_state *state = ctx;
    (void)err;
    for (uint32_t way = MOVE_OUT; way <= MOVE_IN; way++) {
        state->ended[way] = args->lists[way].number;
        state->bytes[way] += args->lists[way].n_moves;
    }
    return RC_OK;
}

static enum rc poll_nothing(void *ctx, struct move_state *state, struct err *err)
{
    (void)err;
    *state = *(struct move_state *)ctx;
    return RC_OK;
}

/* An engine whose sequences have all drawn their first tokens. NULL: it failed. */
static struct engine *begin(uint32_t n_seqs, bool is_rich, uint32_t n_host_slots, struct move_state *state)
{
    static int32_t prompt[PROMPT];
    struct err err;
    struct engine *engine;
    struct kv_place place;
    struct kv_need need = {0};
    struct engine_config config = {.n_pages = 60000, .max_num_seqs = 256, .max_num_batched_tokens = 8192, .max_model_len = 4096,
                                   .max_logprobs = 5, .vocab_size = 1000, .vocab_limit = 1000, .prefix_caching = true,
                                   .runner = {state, start_nothing, finish_nothing, true}};
    config.runner.n_host_slots = n_host_slots;
    config.runner.host_slot_bytes = 1;
    config.runner.move = move_nothing;
    config.runner.poll_moves = poll_nothing;
    if (kv_layout_make(&need, 1, 16, 1, &config.layout, &place, &err) || engine_create(&config, &engine, &err))
        return NULL;
    for (uint32_t i = 0; i < n_seqs; i++) {
        uint64_t number;
        prompt[0] = (int32_t)i;
        struct request_spec spec = {.prompt = {prompt, PROMPT}, .n = 1, .temperature = 1, .top_p = 1, .max_tokens = 2000,
                                    .repetition_penalty = is_rich ? 1.1f : 1, .wants_logprobs = is_rich, .n_logprobs = is_rich ? 5 : 0};
        if (engine_submit(engine, &spec, &number, &err))
            return NULL;
    }
    struct engine_stats stats = {0};
    bool progressed;
    while (stats.generation_tokens < 2 * n_seqs) {
        if (engine_step(engine, &progressed, &err))
            return NULL;
        engine_stats(engine, &stats);
    }
    return engine;
}

static int measure(uint32_t n_seqs, bool is_rich)
{
    static double microseconds[N_STEPS];
    struct move_state state = {0};
    struct engine_stats stats;
    struct err err;
    bool progressed;
    struct engine *engine = begin(n_seqs, is_rich, 0, &state);
    if (!engine)
        return 1;
    for (uint32_t i = 0; i < N_STEPS; i++) {
        if (engine_step(engine, &progressed, &err))
            return 1;
        engine_stats(engine, &stats);
        microseconds[i] = stats.last_host_us;
    }
    qsort(microseconds, N_STEPS, sizeof *microseconds, compare);
    printf("%u %s %.2f %.2f\n", n_seqs, is_rich ? "logprobs+penalties" : "plain", microseconds[0], microseconds[N_STEPS / 2]);
    engine_destroy(engine);
    return 0;
}

/* ---- tiers ---- */

#define N_TURNS 1600u

static int measure_tiers(uint32_t n_seqs)
{
    static const char *const NAMES[] = {"off", "host", "off-again"};
    static double microseconds[3][N_TURNS];
    struct engine *engines[3];
    struct move_state states[3];
    struct err err;
    bool progressed;
    memset(states, 0, sizeof states);
    for (uint32_t i = 0; i < 3; i++)
        if (!(engines[i] = begin(n_seqs, false, i == 1 ? 120000 : 0, &states[i])))
            return 1;
    for (uint32_t step = 0; step < N_TURNS; step++)
        for (uint32_t i = 0; i < 3; i++) {
            double start = now_us();
            if (engine_step(engines[i], &progressed, &err))
                return 1;
            microseconds[i][step] = now_us() - start;
        }
    for (uint32_t i = 0; i < 3; i++) {
        qsort(microseconds[i], N_TURNS, sizeof **microseconds, compare);
        printf("tier-%s-%u %llu %.2f %.2f\n", NAMES[i], n_seqs, (unsigned long long)states[i].bytes[MOVE_OUT], microseconds[i][0],
               microseconds[i][N_TURNS / 2]);
        engine_destroy(engines[i]);
    }
    return 0;
}

/* ---- drafts from text ---- */

#define N_TEXTS 256u
#define N_DRAFTED 400u /* steps */
#define PHRASE 12u

/* Text of phrases that come again, so that there are drafts, some of which are wrong. */
static void write_text(int32_t *ids, uint32_t n, uint64_t *random)
{
    for (uint32_t i = 0; i < n; i++) {
        if (i % PHRASE == 0)
            *random = *random * 6364136223846793005u + 1442695040888963407u;
        ids[i] = (int32_t)(*random >> 58) * 1000 + (int32_t)(i % PHRASE);
    }
}

/* Gives a sequence its prompt and a text from which its output comes. The beginning of the text is a finished output, too. */
static bool begin_text(struct draft_source *source, struct sequence *q, int32_t *prompt)
{
    *q = (struct sequence){.capacity = 5 * N_DRAFTED, .request = calloc(1, sizeof *q->request), .output = prompt + PROMPT};
    q->drafts.memory = calloc(1, source->bytes(source->ctx, PROMPT, PROMPT + q->capacity));
    if (!q->request || !q->drafts.memory)
        return false;
    q->request->spec.prompt.ids = prompt;
    q->request->spec.prompt.n = PROMPT;
    q->n_output = N_DRAFTED;
    if (source->end)
        source->end(source->ctx, q);
    q->n_output = 0;
    source->begin(source->ctx, q);
    return true;
}

/* Every step proposes four drafts for each sequence, and takes those that are right and one token more. */
static int measure_drafts(const char *name, const struct draft_options *options)
{
    enum { LENGTH = PROMPT + 5 * N_DRAFTED };
    static struct sequence sequences[N_TEXTS];
    static double microseconds[N_DRAFTED];
    int32_t *texts = malloc(N_TEXTS * LENGTH * sizeof *texts);
    uint64_t random = 1, n_drafts = 0, n_right = 0;
    struct draft_source *source;
    struct err err;
    if (!texts || draft_source_create(options, &source, &err))
        return 1;
    write_text(texts, N_TEXTS * LENGTH, &random);
    for (uint32_t i = 0; i < N_TEXTS; i++)
        if (!begin_text(source, &sequences[i], texts + i * LENGTH))
            return 1;
    for (uint32_t step = 0; step < N_DRAFTED; step++) {
        double start = now_us();
        for (uint32_t i = 0; i < N_TEXTS; i++) {
            struct sequence *q = &sequences[i];
            int32_t ids[4];
            uint32_t n = source->propose(source->ctx, q, 4, ids), n_same = 0;
            while (n_same < n && ids[n_same] == q->output[q->n_output + n_same])
                n_same++;
            source->accept(source->ctx, q, q->output + q->n_output, n_same + 1);
            q->n_output += n_same + 1;
            n_drafts += n;
            n_right += n_same;
        }
        microseconds[step] = (now_us() - start) / N_TEXTS;
    }
    for (uint32_t i = 0; i < N_TEXTS; i++) {
        free(sequences[i].request);
        free(sequences[i].drafts.memory);
    }
    qsort(microseconds, N_DRAFTED, sizeof *microseconds, compare);
    printf("%s %.2f %.3f %.3f\n", name, (double)n_right / (double)n_drafts, microseconds[0], microseconds[N_DRAFTED / 2]);
    draft_source_destroy(source);
    free(texts);
    return 0;
}

int main(void)
{
    return measure(1, false) || measure(256, false) || measure(1, true) || measure(256, true) || measure_tiers(1) ||
           measure_tiers(256) ||
           measure_drafts("ngram", &(struct draft_options){.method = DRAFT_NGRAM, .k = 4, .min = 2, .max = 4}) ||
           measure_drafts("suffix", &(struct draft_options){.method = DRAFT_SUFFIX, .k = 4, .shared_bytes = 64 << 20});
}
