/* llguidance.h: the C interface of llguidance's shared library, bound at run time. The library ships without its header, so
 * this file declares the functions and the first members of its two structs; the library itself fills in the members that
 * follow. One thread at a time may use a handle; different handles may be used at once. The library is never unloaded. */
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
    const uint8_t *token_bytes;        /* the tokens' bytes, concatenated */
    const char *tokenizer_json;        /* NULL: use the arrays */
    bool assumes_text;
    size_t (*tokenize)(const void *, const uint8_t *, size_t, uint32_t *, size_t);
    bool is_approximate;               /* true: `tokenize` is never called, because masks need no tokenizer */
    const void *user_data;
    const char *const *slices;         /* NULL: the library's default slices */
    const uint32_t *more_eos;
    uint32_t n_more_eos;
};

/* The members before the library's limits. `set_defaults` sets the limits and may write more than is declared here. */
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
    int32_t (*validate_tokens)(struct llg_matcher *matcher, const uint32_t *ids, size_t n); /* how many can be consumed */
    int32_t (*rollback)(struct llg_matcher *matcher, size_t n); /* the last n tokens were not consumed */
    int32_t (*reset)(struct llg_matcher *matcher); /* to the beginning of the text */
    bool (*is_accepting)(struct llg_matcher *matcher);
    bool (*is_stopped)(const struct llg_matcher *matcher);
    const char *(*get_error)(struct llg_matcher *matcher); /* NULL: none; lives as long as the matcher */
    const char *(*get_version)(void);
};

/* Binds the library and tries a small grammar, which may reveal structs of another layout. The error of RC_UNSUPPORTED names
 * the version if it is not 1.8 to 1.x, the missing function, or what the trial found. */
enum rc llguidance_open(const char *path, struct llguidance *library, struct err *err);
/* The trial of llguidance_open, with functions that are already bound. */
enum rc llguidance_try(const struct llguidance *library, struct err *err);
/* Rewrites an error of the library for the author of the grammar: omits the library's state and puts stop reasons in words. */
void llguidance_explain(const char *error, char *text, size_t n_bytes);

#endif
