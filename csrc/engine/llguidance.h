/* llguidance.h: the C interface of llguidance's shared library, bound at run time. Its header is not shipped with it, so the
 * functions and the beginnings of its two structs are declared here; the library itself fills in what lies behind them.
 * Its handles may be used by one thread at a time, different handles at once. It never unloads. */
#ifndef LLMPY_LLGUIDANCE_H
#define LLMPY_LLGUIDANCE_H

#include "../base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct llg_tokenizer;
struct llg_matcher;

#define LLG_WANTED "wanted llguidance >=1.8,<2"
#define LLG_NO_TOKEN UINT32_MAX
#define LLG_SPECIAL 0xff /* first byte of a token that no text matches */

struct llg_tokenizer_init {
    size_t struct_size;
    uint32_t vocab_size, eos;
    const uint32_t *token_lengths;     /* [vocab_size] */
    const uint8_t *token_bytes;        /* one behind the other */
    const char *tokenizer_json;        /* NULL: the arrays serve */
    bool assumes_text;
    size_t (*tokenize)(const void *, const uint8_t *, size_t, uint32_t *, size_t);
    bool is_approximate;               /* nothing is tokenised here: masks need no tokenizer */
    const void *user_data;
    const char *const *slices;         /* NULL: the library's */
    const uint32_t *more_eos;
    uint32_t n_more_eos;
};

/* What precedes the library's limits; those are set by its own function, which may write more than is declared here. */
union llg_matcher_init {
    struct {
        const struct llg_tokenizer *tokenizer;
        uint32_t log_buffer_level, log_stderr_level;
    } head;
    char room[1024];
};

struct llguidance {
    struct llg_tokenizer *(*new_tokenizer)(const struct llg_tokenizer_init *init, char *error, size_t error_bytes);
    void (*free_tokenizer)(struct llg_tokenizer *tokenizer);
    void (*set_defaults)(union llg_matcher_init *init, const struct llg_tokenizer *tokenizer);
    struct llg_matcher *(*new_matcher)(const union llg_matcher_init *init, const char *kind, const char *text);
    struct llg_matcher *(*clone_matcher)(const struct llg_matcher *matcher);
    void (*free_matcher)(struct llg_matcher *matcher);
    int32_t (*compute_mask_into)(struct llg_matcher *matcher, uint32_t *mask, size_t mask_bytes); /* 0: done */
    int32_t (*consume_token)(struct llg_matcher *matcher, uint32_t id);
    int32_t (*consume_tokens)(struct llg_matcher *matcher, const uint32_t *ids, size_t n);
    int32_t (*reset)(struct llg_matcher *matcher); /* to its beginning */
    bool (*is_accepting)(struct llg_matcher *matcher);
    bool (*is_stopped)(const struct llg_matcher *matcher);
    const char *(*get_error)(struct llg_matcher *matcher); /* NULL: none; lives as long as the matcher */
    const char *(*get_version)(void);
};

/* RC_UNSUPPORTED names the version where it is none of 1.8 to 1.x, what it lacks, or what it does otherwise: a small grammar is
 * tried, so that structs of another layout show here as far as that can be seen. */
enum rc llguidance_open(const char *path, struct llguidance *library, struct err *err);
/* The same trial with functions that are bound. */
enum rc llguidance_try(const struct llguidance *library, struct err *err);
/* What an error of the library says to who wrote the grammar: without the library's state, stop reasons in words. */
void llguidance_explain(const char *error, char *text, size_t n_bytes);

#endif
