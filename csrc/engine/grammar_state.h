/* grammar_state.h: the state behind grammar.h. grammar.c has the compilers and the orders, matcher.c the fillers and the
 * matchers. */
#ifndef LLMPY_GRAMMAR_STATE_H
#define LLMPY_GRAMMAR_STATE_H

#include "grammar.h"
#include "llguidance.h"

#include <pthread.h>
#include <stdatomic.h>

#define N_CACHED 32u
#define ERROR_BYTES 400u
#define EXPLAINED_BYTES 160u

struct matcher {
    struct grammars *grammars;
    const struct id_list *stop_ids;
    struct llg_matcher *handle;
    uint32_t *mask;                /* behind it in memory: the masks behind 1, 2, ... drafts */
    const char *error, *mask_error; /* from consuming a token; from filling the mask (set by the filling thread); NULL: none */
    char error_text[EXPLAINED_BYTES], mask_error_text[EXPLAINED_BYTES];
    enum match match;
    int32_t id;                    /* token to be consumed */
    bool is_queued;                /* true until its mask is complete */
    struct matcher *next;
};

struct grammar {
    struct grammars *grammars;
    atomic_uint n_holders;         /* the request, and the thread that compiles it */
    atomic_uint state;             /* of enum grammar_state */
    _Atomic double begun;          /* time when compilation began; 0: not yet */
    const char *kind, *text;       /* copies, behind the struct */
    struct id_list prior, stop_ids;
    uint32_t n_samples, n_made, n_ahead;
    struct matcher *matchers;      /* [n_samples] */
    uint32_t *masks;               /* [n_samples][1 + n_ahead][n_words] */
    bool is_late;                  /* compilation exceeded the time limit; used by the driver's thread only */
    char error[ERROR_BYTES];
    struct grammar *next;
};

struct cached {
    char *kind, *text;
    struct llg_matcher *handle;
    bool is_warm;                  /* a request has used the handle, so it has what the library builds on demand */
    uint64_t used;
};

struct grammars {
    struct llguidance library;
    const struct engine_config *config; /* the engine's; for functions of the driver's thread */
    uint32_t n_words;

    pthread_mutex_t lock;          /* guards what follows, up to the blank line */
    pthread_cond_t ordered, queued, changed;
    uint32_t n_holders;            /* the engine and the threads */
    bool is_closing;
    struct grammar *first, *last;  /* orders whose compilation has not begun */
    uint32_t n_compilers, n_idle;
    struct matcher *tokens, *queue; /* lists not yet begun: tokens to be consumed, masks to be filled */
    uint32_t n_taking, n_filling, n_asleep;
    uint64_t n_filled;
    double filling_seconds;

    pthread_mutex_t cache_lock;    /* guards what follows */
    struct llg_tokenizer *tokenizer;
    struct llg_tokenizer_init init; /* its arrays are freed once the tokenizer is made */
    struct cached cache[N_CACHED];
    uint64_t n_used;
};

/* Call with the lock held: releases one reference and unlocks. */
void grammars_unlock_release(struct grammars *g);
/* Runs a filler's thread; ctx: its struct grammars. */
void *grammars_run_filler(void *ctx);
/* Sets the matcher's state after it has consumed tokens; rc: of the library. */
void matcher_consumed(struct matcher *m, int32_t rc);
/* Fills the mask of the matcher's next token. */
void matcher_fill_mask(struct matcher *m);

#endif
