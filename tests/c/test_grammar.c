/* Grammars in the engine, over a stand-in for llguidance: a text is the ids that must come, one letter each from 'a' on; at '!'
 * compiling fails, 'w' makes it slow, at '?' there is no mask, and '+' lets anything follow. */
#define _GNU_SOURCE
#include "../../csrc/base/mem.h"
#include "../../csrc/engine/llguidance.h"
#include "fake_model.h"

#include <pthread.h>
#include <time.h>

struct llg_matcher {
    char text[32];
    uint32_t at, n_plus;
    const char *error;
};

static int tokenizer;

static struct llg_tokenizer *new_tokenizer(const struct llg_tokenizer_init *init, char *error, size_t error_bytes)
{
    (void)error, (void)error_bytes;
    CHECK(init->vocab_size == VOCAB && init->eos == 35 && init->n_more_eos == 1 && init->more_eos[0] == 12);
    CHECK(init->token_lengths[34] == 4 && init->token_lengths[0] == 1); /* <s> behind a byte that no text has */
    return (struct llg_tokenizer *)&tokenizer;
}

static void free_tokenizer(struct llg_tokenizer *made)
{
    CHECK(made == (void *)&tokenizer);
}

static void set_defaults(union llg_matcher_init *init, const struct llg_tokenizer *made)
{
    memset(init->room + 100, 7, 100); /* more than what is declared */
    init->head.tokenizer = made;
}

static struct llg_matcher *new_matcher(const union llg_matcher_init *init, const char *kind, const char *text)
{
    struct llg_matcher *m = calloc(1, sizeof *m);
    CHECK(init->head.tokenizer == (void *)&tokenizer && strcmp(kind, "regex") == 0);
    if (strchr(text, 'w'))
        nanosleep(&(struct timespec){0, 30000000}, NULL);
    m->error = strchr(text, '!') ? "cannot be" : NULL;
    snprintf(m->text, sizeof m->text, "%s", text + (*text == 'w'));
    return m;
}

static struct llg_matcher *clone_matcher(const struct llg_matcher *source)
{
    struct llg_matcher *m = malloc(sizeof *m);
    return memcpy(m, source, sizeof *m);
}

static void free_matcher(struct llg_matcher *m)
{
    free(m);
}

static int32_t compute_mask_into(struct llg_matcher *m, uint32_t *mask, size_t n_bytes)
{
    CHECK_EQ(n_bytes, (VOCAB + 31) / 32 * 4);
    memset(mask, m->text[m->at] == '+' ? 255 : 0, n_bytes);
    if (m->text[m->at] == '?')
        m->error = "no way on";
    else if (m->text[m->at] && m->text[m->at] != '+')
        mask[0] = 1u << (m->text[m->at] - 'a');
    return m->error ? -1 : 0;
}

static int32_t consume_token(struct llg_matcher *m, uint32_t id)
{
    if (m->text[m->at] == '+') {
        m->n_plus++;
        return 0;
    }
    if (!m->text[m->at] || id != (uint32_t)(m->text[m->at] - 'a'))
        m->error = "not that";
    m->at++;
    return m->error ? -1 : 0;
}

static int32_t consume_tokens(struct llg_matcher *m, const uint32_t *ids, size_t n)
{
    int32_t rc = 0;
    for (size_t i = 0; i < n && !rc; i++)
        rc = consume_token(m, ids[i]);
    return rc;
}

static int32_t validate_tokens(struct llg_matcher *m, const uint32_t *ids, size_t n)
{
    struct llg_matcher trial = *m;
    uint32_t n_valid = 0;
    while (n_valid < n && !consume_token(&trial, ids[n_valid]))
        n_valid++;
    return (int32_t)n_valid;
}

/* Places before a '+' take one token each, and it takes all others. */
static int32_t rollback(struct llg_matcher *m, size_t n)
{
    while (n--)
        if (m->n_plus)
            m->n_plus--;
        else
            m->at--;
    return 0;
}

static int32_t reset(struct llg_matcher *m)
{
    m->at = 0;
    return m->error ? -1 : 0;
}

static bool is_stopped(const struct llg_matcher *m)
{
    return !m->text[m->at];
}

static bool is_accepting(struct llg_matcher *m)
{
    return is_stopped(m);
}

static const char *get_error(struct llg_matcher *m)
{
    return m->error;
}

enum rc llguidance_open(const char *path, struct llguidance *library, struct err *err) /* instead of the core's */
{
    *library = (struct llguidance){new_tokenizer,  free_tokenizer, set_defaults, new_matcher, clone_matcher, free_matcher,
                                   compute_mask_into, consume_token, consume_tokens, validate_tokens, rollback, reset, is_accepting, is_stopped, get_error, NULL};
    return strcmp(path, "there") == 0 ? RC_OK : err_set(err, RC_UNSUPPORTED, "no library");
}

static struct err err;

static struct setup setup_of(bool is_async, uint32_t n_pages)
{
    return (struct setup){.block_tokens = 4, .n_pages = n_pages, .max_num_seqs = 8, .max_num_batched_tokens = 16, .caches = true,
                          .is_async = is_async};
}

static enum rc try_submit(struct engine *engine, const char *text, uint32_t n, const char *prior, uint64_t *number)
{
    static const int32_t prompt[5] = {1, 2, 3, 4, 5};
    int32_t ids[8];
    struct request_spec spec = {.prompt = {prompt, 5}, .n = n, .temperature = 1, .top_p = 1, .repetition_penalty = 1, .max_tokens = 12,
                                .seed = 7, .ignore_eos = true, .grammar = {"regex", text, "there"}};
    for (; prior[spec.prior.n]; spec.prior.n++)
        ids[spec.prior.n] = prior[spec.prior.n] - 'a';
    spec.prior.ids = ids;
    return engine_submit(engine, &spec, number, &err);
}

static uint64_t submit(struct engine *engine, const char *text, uint32_t n, const char *prior)
{
    uint64_t number = 0;
    CHECK_OK(try_submit(engine, text, n, prior, &number));
    return number;
}

/* The ends of n samples; what came is in texts. */
static void collect(struct engine *engine, uint32_t n, struct output *ends, char texts[][16])
{
    struct output output[4];
    bool progressed;
    uint32_t n_output, n_ends = 0;
    while (n_ends < n) {
        CHECK_OK(engine_step(engine, &progressed, &err));
        CHECK_OK(engine_take(engine, true, output, 4, &n_output, &err));
        for (uint32_t i = 0; i < n_output; i++) {
            for (uint32_t t = 0; t < output[i].n_new && t < 15; t++)
                texts[n_ends][t] = (char)('a' + output[i].ids[t]);
            texts[n_ends][output[i].n_new] = 0;
            ends[n_ends++] = output[i];
        }
        CHECK_OK(engine_check(engine, &err));
    }
}

TEST(tokens_stay_within_their_grammars)
{
    struct output ends[16];
    char texts[16][16];
    for (uint32_t kind = 0; kind < 8; kind++) { /* overlapping steps or not; with preemptions or not; with drafts or not */
        struct setup setup = setup_of(kind & 1, kind & 2 ? 27 : 60);
        if (kind & 4)
            setup.drafts = (struct draft_options){.method = DRAFT_SUFFIX, .k = 3, .shared_bytes = 1 << 16};
        struct fake fake;
        struct engine *engine = fake_engine(&setup, &fake, &err);
        REQUIRE(engine);
        submit(engine, "abcabcabc", 3, "");
        submit(engine, "wde", 2, "");
        submit(engine, "fgh", 1, "fg");
        submit(engine, "aaaaaaaaaaaaaa", 1, "");
        collect(engine, 7, ends, texts);
        submit(engine, "abcabcabc", 2, ""); /* kept, and served before */
        collect(engine, 2, ends + 7, texts + 7);
        for (uint32_t i = 0; i < 9; i++) {
            const char *wanted[] = {"", "abcabcabc", "de", "h", "aaaaaaaaaaaa", "abcabcabc"};
            CHECK(ends[i].request <= 5 && strcmp(texts[i], wanted[ends[i].request]) == 0);
            CHECK_EQ(ends[i].finish, ends[i].request == 4 ? FINISH_LENGTH : FINISH_GRAMMAR);
        }
        struct engine_stats stats;
        engine_stats(engine, &stats);
        CHECK_EQ(stats.accepted_rows > 8, kind >= 4);
        CHECK(kind >= 4 || fake.n_most_in_flight == 1 + (kind & 1));
        fake_close(engine, &fake);
    }
}

TEST(what_fails_fails_alone)
{
    struct setup setup = setup_of(true, 60);
    struct output ends[4];
    char texts[4][16];
    struct fake fake;
    struct engine *engine = fake_engine(&setup, &fake, &err);
    REQUIRE(engine);
    submit(engine, "ab", 1, "");
    submit(engine, "!", 1, "");
    submit(engine, "ab?", 1, "");
    submit(engine, "ab", 1, "x");
    collect(engine, 4, ends, texts);
    for (uint32_t i = 0; i < 4; i++) {
        const char *wanted[] = {"", "ab", "", "ab", ""};
        CHECK(strcmp(texts[i], wanted[ends[i].request]) == 0);
        CHECK_EQ(ends[i].finish, ends[i].request == 1 ? FINISH_GRAMMAR : FINISH_ERROR);
        CHECK_EQ(ends[i].status, ends[i].request == 1 ? 0 : STATUS_GRAMMAR);
    }
    fake_close(engine, &fake);
}

TEST(memory_that_is_short_refuses_one_request)
{
    struct setup setup = setup_of(true, 60);
    struct output ends[1];
    char texts[1][16];
    for (uint32_t allowed = 0, has_failed = true; has_failed; allowed++) {
        struct fake fake;
        uint64_t number;
        struct engine *engine = fake_engine(&setup, &fake, &err);
        REQUIRE(engine && allowed < 100);
        mem_fail_after(allowed);
        enum rc rc = try_submit(engine, "abc", 1, "ab", &number);
        mem_fail_after(-1);
        has_failed = rc != RC_OK;
        CHECK(!has_failed || rc == RC_MEMORY);
        if (has_failed)
            submit(engine, "abc", 1, "ab");
        collect(engine, 1, ends, texts);
        CHECK_STR(texts[0], "c");
        fake_close(engine, &fake);
    }
}

TEST(a_fault_ends_what_runs_and_what_is_compiled)
{
    for (uint32_t fails_at = 1; fails_at < 14; fails_at++) { /* steps that overlap find it while they await their masks */
        struct setup setup = setup_of(fails_at > 6, 60);
        struct fake fake;
        struct output output[4];
        bool progressed;
        uint32_t n;
        enum rc rc = RC_OK;
        struct engine *engine = fake_engine(&setup, &fake, &err);
        REQUIRE(engine);
        fake.fails_at = fails_at > 6 ? fails_at - 6 : fails_at;
        submit(engine, "abcabcabc", 2, "");
        submit(engine, "wwwwwwwww", 1, "");
        while (!rc)
            rc = engine_step(engine, &progressed, &err);
        CHECK_EQ(rc, RC_DEVICE);
        CHECK_STR(err.message, "the device is on fire");
        CHECK_EQ(engine_step(engine, &progressed, &err), RC_DEAD);
        CHECK(!engine_has_unfinished(engine));
        CHECK_OK(engine_check(engine, &err));
        CHECK_OK(engine_take(engine, true, output, 4, &n, &err));
        CHECK_EQ(n, 3);
        for (uint32_t i = 0; i < n; i++)
            CHECK_EQ(output[i].finish, FINISH_ERROR);
        fake_close(engine, &fake);
    }
}

static void *submit_many(void *ctx)
{
    for (uint32_t i = 0; i < 20; i++)
        submit(ctx, i % 3 ? "abcdef" : "wabcde", 2, "");
    return NULL;
}

TEST(threads_submit_while_steps_run_and_what_is_left_goes_with_the_engine)
{
    struct setup setup = setup_of(true, 60);
    struct fake fake;
    struct output output[8];
    struct engine *engine = fake_engine(&setup, &fake, &err);
    pthread_t threads[2];
    bool progressed;
    uint32_t n_output, n_ends = 0;
    REQUIRE(engine);
    for (uint32_t i = 0; i < 2; i++)
        pthread_create(&threads[i], NULL, submit_many, engine);
    for (uint64_t number = 3; n_ends < 40; number += 5) {
        CHECK_OK(engine_abort(engine, &number, 1, &err));
        CHECK_OK(engine_step(engine, &progressed, &err));
        CHECK_OK(engine_take(engine, true, output, 8, &n_output, &err));
        n_ends += n_output;
        for (uint32_t i = 0; i < n_output; i++)
            CHECK(output[i].finish == FINISH_GRAMMAR || output[i].finish == FINISH_ABORT);
    }
    for (uint32_t i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    fake_close(engine, &fake); /* some are being compiled */
}
