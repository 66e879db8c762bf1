/* llguidance_check.c: checks that a bound library behaves as expected, and rewrites its errors. */
#include "llguidance.h"

#include <stdio.h>
#include <string.h>

#define GUARD_BYTES 256 /* end of a struct's room, where the library must not write */
#define GUARD 0xa5

enum { TRIAL_A, TRIAL_B, TRIAL_AB, TRIAL_END, TRIAL_TOKENS };

static bool allows(const struct llguidance *library, struct llg_matcher *matcher, uint32_t wanted)
{
    uint32_t mask = 0;
    return library->compute_mask_into(matcher, &mask, sizeof mask) == 0 && mask == wanted;
}

/* The grammar allows the text "ab" alone: it begins with token "a" or "ab", and "b" follows "a". */
static const char *try_matcher(const struct llguidance *library, struct llg_matcher *matcher)
{
    const char *error = library->get_error(matcher);
    if (error)
        return error;
    struct llg_matcher *copy = library->clone_matcher(matcher);
    bool is_right = copy && allows(library, copy, 1u << TRIAL_A | 1u << TRIAL_AB) && !library->is_accepting(copy) &&
                    library->consume_token(copy, TRIAL_A) == 0 && allows(library, copy, 1u << TRIAL_B) &&
                    library->validate_tokens(copy, (const uint32_t[]){TRIAL_A}, 1) == 0 &&
                    library->validate_tokens(copy, (const uint32_t[]){TRIAL_B}, 1) == 1 &&
                    library->consume_token(copy, TRIAL_B) == 0 && library->is_accepting(copy) &&
                    library->rollback(copy, 1) == 0 && allows(library, copy, 1u << TRIAL_B) &&
                    library->consume_token(copy, TRIAL_B) == 0 && library->is_accepting(copy) && library->reset(copy) == 0 &&
                    allows(library, copy, 1u << TRIAL_A | 1u << TRIAL_AB) &&
                    library->consume_tokens(copy, (const uint32_t[]){TRIAL_AB}, 1) == 0 && library->is_accepting(copy);
    library->free_matcher(copy);
    return is_right ? NULL : "it allows other tokens for a regular expression than are right";
}

/* Checks that set_defaults writes no further than the room that we give the struct, and tries a matcher. */
static const char *try_defaults(const struct llguidance *library, const struct llg_tokenizer *tokenizer)
{
    union llg_matcher_init init;
    memset(&init, GUARD, sizeof init);
    library->set_defaults(&init, tokenizer);
    if (init.head.tokenizer != tokenizer)
        return "its constraints begin otherwise";
    for (size_t i = sizeof init.room - GUARD_BYTES; i < sizeof init.room; i++)
        if ((unsigned char)init.room[i] != GUARD)
            return "its constraints are larger";
    memset(&init, 0, sizeof init);
    library->set_defaults(&init, tokenizer);
    init.head.log_buffer_level = init.head.log_stderr_level = 0;
    struct llg_matcher *matcher = library->new_matcher(&init, "regex", "ab");
    if (!matcher)
        return "it makes no matcher";
    const char *fault = try_matcher(library, matcher);
    library->free_matcher(matcher);
    return fault;
}

enum rc llguidance_try(const struct llguidance *library, struct err *err)
{
    static const uint32_t LENGTHS[TRIAL_TOKENS] = {1, 1, 2, 4};
    static const uint8_t BYTES[] = {'a', 'b', 'a', 'b', LLG_SPECIAL, 'e', 'n', 'd'};
    static const uint32_t END[] = {TRIAL_END};
    static const char *const NO_SLICES[] = {NULL};
    char error[200] = "";
    struct llg_tokenizer_init init = {.struct_size = sizeof init, .vocab_size = TRIAL_TOKENS, .eos = TRIAL_END,
                                      .token_lengths = LENGTHS, .token_bytes = BYTES, .is_approximate = true,
                                      .slices = NO_SLICES, .more_eos = END};
    struct llg_tokenizer *tokenizer = library->new_tokenizer(&init, error, sizeof error);
    const char *fault = tokenizer ? try_defaults(library, tokenizer) : error;
    if (fault)
        err_set(err, RC_UNSUPPORTED, "structured_outputs: " LLG_WANTED " with the interface of 1.8 to 1.9, have %.60s: %.200s",
                library->get_version(), fault);
    if (tokenizer)
        library->free_tokenizer(tokenizer);
    return fault ? RC_UNSUPPORTED : RC_OK;
}

/* ---- errors ----------------------------------------------------------------------------------------------------------- */

void llguidance_explain(const char *error, char *text, size_t n_bytes)
{
    static const struct {
        const char *reason, *text;
    } REASONS[] = {
        {"NoExtension", /* also matches NoExtensionBias */
         "the grammar has a dead end: no token may follow, and the text may not end here; change the grammar"},
        {"LexerTooComplex", "the grammar's regular expressions are too complex; simplify them"},
        {"ParserTooComplex", "the grammar is too complex, or too ambiguous; simplify it"},
    };
    const char *state = strstr(error, "\n<state>");
    size_t n = state ? (size_t)(state - error) : strlen(error);
    for (size_t i = 0; i < sizeof REASONS / sizeof *REASONS; i++)
        if (strncmp(error, REASONS[i].reason, strlen(REASONS[i].reason)) == 0) {
            snprintf(text, n_bytes, "%s", REASONS[i].text);
            return;
        }
    snprintf(text, n_bytes, "%.*s", (int)(n < n_bytes ? n : n_bytes), error);
}
