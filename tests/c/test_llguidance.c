/* The trial that a library for grammars must pass before it serves, over libraries that are right but for one thing. */
#include "../../csrc/engine/llguidance.h"
#include "check.h"

struct llg_matcher {
    char text[8];
    uint32_t at;
};

static struct err err;
static char tokenizer, other;
static enum fault { NONE, NO_TOKENIZER, OTHER_HEAD, LARGER, NO_MATCHER, ERROR, OTHER_MASK, REFUSES, ACCEPTS, VALIDATES, NO_ROLLBACK, NO_RESET, N_FAULTS } fault;
static int n_held;

static struct llg_tokenizer *new_tokenizer(const struct llg_tokenizer_init *init, char *error, size_t n_bytes)
{
    CHECK(init->struct_size == sizeof *init && init->vocab_size == 4 && init->token_lengths[2] == 2);
    snprintf(error, n_bytes, "another struct");
    n_held += fault != NO_TOKENIZER;
    return fault == NO_TOKENIZER ? NULL : (struct llg_tokenizer *)&tokenizer;
}

static void free_tokenizer(struct llg_tokenizer *made)
{
    n_held -= made != NULL;
}

static void set_defaults(union llg_matcher_init *init, const struct llg_tokenizer *made)
{
    memset(init->room, 0, fault == LARGER ? sizeof init->room : 200);
    init->head.tokenizer = fault == OTHER_HEAD ? (struct llg_tokenizer *)&other : made;
}

static struct llg_matcher *new_matcher(const union llg_matcher_init *init, const char *kind, const char *text)
{
    CHECK(init->head.tokenizer == (void *)&tokenizer && !strcmp(kind, "regex") && !init->head.log_stderr_level);
    struct llg_matcher *m = fault == NO_MATCHER ? NULL : calloc(1, sizeof *m);
    if (m)
        snprintf(m->text, sizeof m->text, "%s", text);
    n_held += m != NULL;
    return m;
}

static struct llg_matcher *clone_matcher(const struct llg_matcher *source)
{
    struct llg_matcher *m = malloc(sizeof *m);
    n_held++;
    return memcpy(m, source, sizeof *m);
}

static void free_matcher(struct llg_matcher *m)
{
    n_held -= m != NULL;
    free(m);
}

static bool fits(const struct llg_matcher *m, uint32_t id)
{
    static const char *const TEXTS[] = {"a", "b", "ab"};
    return id < 3 && !strncmp(m->text + m->at, TEXTS[id], strlen(TEXTS[id]));
}

static int32_t compute_mask_into(struct llg_matcher *m, uint32_t *mask, size_t n_bytes)
{
    CHECK_EQ(n_bytes, 4);
    for (uint32_t id = 0; id < 4; id++)
        *mask |= (uint32_t)(fits(m, id) || (fault == OTHER_MASK && m->at && id == 3)) << id;
    return 0;
}

static int32_t consume_token(struct llg_matcher *m, uint32_t id)
{
    bool is_taken = fits(m, id) && fault != REFUSES;
    m->at += is_taken ? 1 + (id == 2) : 0;
    return is_taken ? 0 : -1;
}

static int32_t consume_tokens(struct llg_matcher *m, const uint32_t *ids, size_t n)
{
    return n == 1 ? consume_token(m, ids[0]) : -1;
}

static int32_t validate_tokens(struct llg_matcher *m, const uint32_t *ids, size_t n)
{
    return n == 1 && (fits(m, ids[0]) || fault == VALIDATES);
}

static int32_t rollback(struct llg_matcher *m, size_t n)
{
    m->at -= fault == NO_ROLLBACK ? 0 : (uint32_t)n;
    return 0;
}

static int32_t reset(struct llg_matcher *m)
{
    m->at = 0;
    return fault == NO_RESET ? -1 : 0;
}

static bool is_accepting(struct llg_matcher *m)
{
    return fault == ACCEPTS || !m->text[m->at];
}

static bool is_stopped(const struct llg_matcher *m)
{
    return !m->text[m->at];
}

static const char *get_error(struct llg_matcher *m)
{
    (void)m;
    return fault == ERROR ? "no such kind" : NULL;
}

static const char *get_version(void)
{
    return "llguidance@1.99.0";
}

TEST(one_fault_is_enough_to_refuse_a_library)
{
    static const char *const TEXTS[N_FAULTS] = {
        [NO_TOKENIZER] = "another struct", [OTHER_HEAD] = "its constraints begin otherwise", [LARGER] = "its constraints are larger",
        [NO_MATCHER] = "it makes no matcher", [ERROR] = "no such kind",
    };
    const struct llguidance library = {new_tokenizer, free_tokenizer, set_defaults, new_matcher, clone_matcher, free_matcher,
                                       compute_mask_into, consume_token, consume_tokens, validate_tokens, rollback, reset, is_accepting, is_stopped,
                                       get_error, get_version};
    REQUIRE_OK(llguidance_try(&library, &err));
    for (fault = NONE + 1; fault < N_FAULTS; fault++) {
        CHECK_EQ(llguidance_try(&library, &err), RC_UNSUPPORTED);
        CHECK_CONTAINS(err.message, "wanted llguidance >=1.8,<2 with the interface of 1.8 to 1.9, have llguidance@1.99.0: ");
        CHECK_CONTAINS(err.message, TEXTS[fault] ? TEXTS[fault] : "it allows other tokens");
    }
    fault = NONE;
    CHECK_EQ(n_held, 0);
}

TEST(errors_are_told_without_the_librarys_state)
{
    char text[80];
    llguidance_explain("NoExtensionBias\n<state>\nTokens: 2 KB of them\n</state>", text, sizeof text);
    CHECK_CONTAINS(text, "the grammar has a dead end: no token may follow");
    llguidance_explain("unknown name: \"x\"\n   1 | start: x\n", text, sizeof text);
    CHECK_STR(text, "unknown name: \"x\"\n   1 | start: x\n");
    llguidance_explain("something new\n<state>\nTokens\n</state>", text, sizeof text);
    CHECK_STR(text, "something new");
    llguidance_explain("ParserTooComplex: 5000 items", text, sizeof text);
    CHECK_CONTAINS(text, "simplify it");
    char longer[400];
    memset(longer, 'x', sizeof longer - 1);
    longer[sizeof longer - 1] = 0;
    llguidance_explain(longer, text, sizeof text);
    CHECK_EQ(strlen(text), sizeof text - 1);
}
