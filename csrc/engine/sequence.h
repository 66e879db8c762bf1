/* sequence.h: requests and their sequences: what a caller asked for, the tokens so far, and the rules that end them. All memory
 * of a request is laid out when it is created, on the submitting thread; afterwards the driver's thread owns it. Tables and
 * pages are the scheduler's affair, the lists of news the outbox's; their fields live here so that no step allocates. */
#ifndef LLMPY_SEQUENCE_H
#define LLMPY_SEQUENCE_H

#include "../base/hash.h"
#include "engine.h"
#include "stop.h"

#include <stdatomic.h>

struct sequence;
struct grammar;
struct matcher;

/* What requests need to know of their engine; constant after its creation. */
struct sequence_context {
    const struct engine_config *config; /* the engine's own copy */
    const uint8_t *is_special;          /* [n_tokens] */
    struct hash key;                    /* of the prefix cache */
};

struct request {
    struct request_spec spec;      /* its pointers lead into this request's memory; stop_ids and allowed ascending */
    const struct sequence_context *context;
    uint64_t number;               /* given at submission; the order of arrival */
    struct hash root;              /* parent key of the first block */
    struct hash *prompt_keys;      /* [n_prompt / block_tokens] */
    struct stop_set stops;
    struct grammar *grammar;       /* ordered at submission; NULL: none */
    struct sequence **sequences;   /* [n], NULL once released */
    uint32_t n_held;               /* sequences not yet released */
    uint32_t n_unreported;         /* sequences whose final news is not yet taken */
    uint32_t n_cached;             /* hit of the first admission */
    double queued, scheduled;
    atomic_bool is_aborted;
    struct request *next;          /* in the inbox */
    struct request *map_next;      /* in the engine's map of numbers */

    /* Scoring, and prompt logprobs: results of the tokens prompt[first_scored ...]. */
    uint32_t first_scored, n_to_score, n_scored, n_score_top;
    uint32_t score_epoch;                /* of the scores, or of the states */
    struct sample_result *score_results; /* [n_to_score] */
    int32_t *score_top_ids;              /* [n_to_score][n_score_top] */
    float *score_top_values;
    int32_t *score_top_ranks;

    /* Pooling: states of the rows first_pooled ..., taken in this order. */
    uint32_t first_pooled, n_to_pool, n_pooled, n_states;
    uint32_t n_read;               /* rows of a mean that are read at once */
    float *states;                 /* [n_states][states_width] the result; before, [n_read] rows of a mean */
    double *sums;                  /* [states_width] of POOLING_MEAN */
};

/* The one total order of an engine's sequences. */
struct rank {
    int64_t priority;
    uint64_t number;
    uint32_t sample;
};

enum sequence_state { SEQUENCE_WAITING, SEQUENCE_RUNNING, SEQUENCE_FINISHED };

struct links {
    struct sequence *prev, *next;
};

struct sequence {
    struct request *request;
    uint32_t sample;
    enum sequence_state state;

    /* Tokens. Positions count through prompt and output; output begins with the prior tokens. */
    int32_t *output;               /* [n_prior + capacity] */
    uint32_t n_output, capacity;   /* capacity: most new tokens */
    uint32_t n_pending;            /* tokens that steps in flight draw: a sequence with any is not released */
    uint32_t last_task;            /* of the newest pending token, in its step */
    bool needs_values;             /* a draw needs the values of all tokens before it on the host */
    uint32_t *epochs;              /* [capacity] of the weights that made each token */
    struct sample_result *results; /* [capacity], NULL without logprobs */
    int32_t *top_ids;              /* [capacity][n_logprobs] */
    float *top_values;
    int32_t *top_ranks;
    struct hash *keys;             /* of the blocks behind prompt_keys */
    uint32_t n_keys;

    /* Sampling and stopping. */
    struct token_seen *seen;       /* [n_seen]; NULL without penalties */
    uint32_t *seen_slots;          /* [seen_mask + 1] place in seen + 1, open addressing */
    uint32_t n_seen, seen_mask;
    int32_t *banned;               /* [n_eos + stop ids + bad words] filled for each draw */
    struct matcher *matcher;       /* of the grammar, once it is there; NULL: none */
    uint32_t *stop_states;         /* [stops.n] */
    enum finish finish;
    int32_t stop;
    uint32_t status, error_position;
    const char *error;             /* of STATUS_GRAMMAR */
    double first_token, last_token;

    /* The scheduler's. */
    uint32_t slot, n_computed;
    uint32_t n_published;          /* leading blocks that are in the prefix cache, or were when they filled */
    uint32_t n_rows;               /* in this step */
    bool draws;                    /* a token in this step */
    bool is_stale;                 /* holds entries from before a reset or a commit: publishes nothing */
    bool is_mixed;                 /* from before a commit */
    bool shares_tail;              /* the block it writes next may have other owners */
    uint32_t n_hit, n_taken_rows;  /* since the last admission: n_computed is their sum */
    uint32_t n_admitted_output;    /* n_output at the last admission */
    uint32_t n_ever_computed;      /* rows below were computed before: doing them again is counted as redone */
    uint32_t n_preemptions;
    uint32_t last_due, leaves_at;  /* recurrent state: positions of the prompt's last snapshot, and of the one where it leaves
                                    * what others have computed */
    uint32_t passed_block;         /* + 1: its newest snapshot that the next one replaces stands behind this block; 0: none */
    bool is_blocked;               /* passed over: a running prompt is about to make a snapshot for it */
    uint32_t first_block[BATCH_MAX_GROUPS]; /* of the table that is not out of the window */
    struct sequence *next_fork;    /* draws from the same row in this step */
    struct sequence *left, *right, *parent; /* waiting queue */
    uint64_t heap;
    uint64_t failed_room;          /* free pages that did not suffice at the last try, + 1; 0: not tried */
    uint32_t failed_hit;

    /* The outbox's. */
    struct links links;
    bool has_news;
    uint32_t n_reported;           /* new tokens already taken */
};

/* Validates and copies spec; RC_INVALID names the parameter. The request has no number yet. */
enum rc request_create(const struct sequence_context *context, const struct request_spec *spec, struct request **request,
                       struct err *err);
/* Frees one sequence, and the request with its last one. */
void sequence_release(struct sequence *sequence);
void request_destroy(struct request *request);

struct rank sequence_rank(const struct sequence *sequence);
bool rank_is_ahead(const struct rank *a, const struct rank *b);
bool sequence_is_ahead(const struct sequence *a, const struct sequence *b);
uint32_t sequence_n_known(const struct sequence *sequence);
/* Known tokens and those that steps in flight will add. */
uint32_t sequence_n_expected(const struct sequence *sequence);
/* Positions to compute before the next token can be drawn, or the last one be scored. The last token that lengths allow is not
 * among them. */
uint32_t sequence_goal(const struct sequence *sequence);
/* Most leading positions that the cache may serve. */
uint32_t sequence_hit_limit(const struct sequence *sequence);
int32_t sequence_token(const struct sequence *sequence, uint32_t position);
/* Key of a full block of known tokens; every earlier block's key has been asked for before. */
const struct hash *sequence_key(struct sequence *sequence, uint32_t block);
/* Its next step cannot be built before the results of those in flight are there. */
bool sequence_must_wait(const struct sequence *sequence);
/* Whether the grammar ends the sequence, once its newest token has been taken in. */
enum finish sequence_grammar_rule(struct sequence *sequence);
/* Nothing may be drawn from the grammar: the text becomes the sequence's error. */
void sequence_fail_grammar(struct sequence *sequence, const char *error);
/* True for the sequence that scores the request's prompt and has not done so. */
bool sequence_is_scoring(const struct sequence *sequence);
/* True for a sequence that draws no token: of a score request, or one that its prior tokens have ended and whose prompt is
 * still to be scored. */
bool sequence_only_scores(const struct sequence *sequence);
/* True for a sequence that has drawn no token of its own. */
bool sequence_is_new(const struct sequence *sequence);

/* What it has yet to give must come of one epoch: scores and pooled states. */
bool sequence_is_whole(const struct sequence *sequence);
void sequence_start_over(struct sequence *sequence); /* such a one, or a new one; it holds no pages */

/* Takes a drawn token in and runs the stop rules; the caller looks at sequence->finish. */
void sequence_accept(struct sequence *sequence, const struct sample_result *result, const int32_t *top_ids,
                     const float *top_values, const int32_t *top_ranks, uint32_t epoch, double now);

#endif
