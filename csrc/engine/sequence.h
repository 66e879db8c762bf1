/* sequence.h: requests and their sequences: the parameters, the tokens so far, and the rules that end a sequence. The
 * submitting thread allocates all memory of a request when it creates the request; afterwards the driver's thread owns it. The
 * scheduler and the outbox keep their fields of a sequence here, too, so that no step allocates. */
#ifndef LLMPY_SEQUENCE_H
#define LLMPY_SEQUENCE_H

#include "../base/hash.h"
#include "draft.h"
#include "engine.h"
#include "stop.h"

#include <stdatomic.h>

struct sequence;
struct beams;
struct grammar;
struct matcher;

/* The part of an engine that requests use; constant after the engine's creation. */
struct sequence_context {
    const struct engine_config *config; /* the engine's copy */
    const uint8_t *is_special;          /* [n_tokens] */
    struct hash key;                    /* key of the prefix cache's hashes */
    struct hash own_key;                /* secret and random, for hashes that mean nothing to another process */
    const struct draft_source *drafts;  /* NULL: no speculation */
};

struct request {
    struct request_spec spec;      /* its pointers point into this request's memory; stop_ids and allowed are ascending */
    const struct sequence_context *context;
    uint64_t number;               /* assigned at submission, in the order of arrival */
    struct hash root;              /* parent key of the first block */
    struct hash *prompt_keys;      /* [n_prompt / block_tokens] */
    int32_t *features;             /* [n_prompt] number of the feature of its item that a token stands for; -1: of none. Only
                                    * with items */
    struct stop_set stops;
    struct adapter *adapter;       /* held; NULL: none */
    struct grammar *grammar;       /* ordered at submission; NULL: none */
    struct beams *beams;           /* of a beam search, behind the request in memory; NULL: none */
    struct sequence **sequences;   /* [n], NULL once released */
    uint32_t n_held;               /* sequences not yet released */
    uint32_t n_unreported;         /* sequences whose final output is not yet taken */
    uint32_t n_cached;             /* prompt tokens that the prefix cache served at the first admission */
    uint32_t n_seen_items;         /* leading items of the prompt that were in the feature pool, or computed, at least once */
    uint32_t n_encoded_items;      /* of these, items that were computed for this request */
    double queued, scheduled;
    atomic_bool is_aborted, has_all_come; /* has_all_come: by engine_end_wait */
    struct request *next;          /* in the engine's inbox, then in its list of held requests */
    struct request *map_next;      /* in the engine's map of numbers */

    /* Scoring and prompt logprobs: results of the tokens prompt[first_scored ...]. */
    uint32_t first_scored, n_to_score, n_scored, n_score_top;
    uint32_t score_epoch;                /* epoch of the scores or of the pooled states */
    struct sample_result *score_results; /* [n_to_score] */
    int32_t *score_top_ids;              /* [n_to_score][n_score_top] */
    float *score_top_values;
    int32_t *score_top_ranks;

    /* Pooling: states of the rows first_pooled ..., read in this order. */
    uint32_t first_pooled, n_to_pool, n_pooled, n_states;
    uint32_t n_read;               /* POOLING_MEAN: rows read at once */
    float *states;                 /* [n_states][states_width] the result; POOLING_MEAN first reads [n_read] rows into it */
    double *sums;                  /* [states_width] for POOLING_MEAN */
};

/* The total order of an engine's sequences. */
struct order {
    int64_t priority;
    uint64_t number;
    uint32_t sample;
};

/* A parked sequence is one of a beam search that has no pages and needs none: no beam, or one that waits for the others. */
enum sequence_state { SEQUENCE_WAITING, SEQUENCE_RUNNING, SEQUENCE_PARKED, SEQUENCE_FINISHED };

struct links {
    struct sequence *prev, *next;
};

/* Speculation of one sequence, by drafting.h. */
struct drafts {
    void *memory;                  /* of the draft source; NULL: the sequence gets no drafts */
    uint32_t most;                 /* most drafts of any step */
    uint32_t n_wanted;             /* of the next step */
    uint32_t n;                    /* drafts of the step in flight: output[n_output ...] */
    uint32_t n_results, n_accepted; /* results of that step taken up so far; drafts of it that are accepted */
    bool has_more;                 /* another token of the same step follows the one being accepted */
    uint32_t n_idle;               /* tokens since the last drafts, if their number adapts */
    uint32_t n_computed, n_drawn;  /* leading positions that the drafter's program has computed; its drafts of this step */
};

struct sequence {
    struct request *request;
    uint32_t sample;
    enum sequence_state state;

    /* Tokens. Positions count through the prompt and then the output, which begins with the prior tokens. */
    int32_t *output;               /* [n_prior + capacity] */
    uint32_t n_output, capacity;   /* capacity: most new tokens */
    uint32_t n_pending;            /* tokens that steps in flight draw; the sequence is not released while there are any */
    uint32_t last_task;            /* index of the newest pending token's task in its step */
    struct drafts drafts;
    bool needs_values;             /* a draw needs all earlier tokens on the host */
    uint32_t *epochs;              /* [capacity] epoch of the weights that made each token */
    struct sample_result *results; /* [capacity], NULL without logprobs */
    int32_t *top_ids;              /* [capacity][n_logprobs] */
    float *top_values;
    int32_t *top_ranks;
    struct hash *keys;             /* keys of the blocks behind those of prompt_keys */
    uint32_t n_keys;

    /* Sampling and stopping. */
    struct token_seen *seen;       /* [n_seen]; NULL without penalties */
    uint32_t *seen_slots;          /* [seen_mask + 1] hash table with open addressing: 1 + index in seen; 0: empty */
    uint32_t n_seen, seen_mask;
    struct token_seen *seen_ahead; /* [drafts][seen_capacity] `seen` behind each draft of a step; NULL without drafts */
    uint32_t seen_capacity, n_seen_ahead;
    int32_t *banned;               /* [1 + drafts][most_banned] filled for each draw */
    uint32_t most_banned;          /* n_eos + stop ids + bad words */
    struct matcher *matcher;       /* of the grammar, once it is compiled; NULL: none */
    uint32_t *stop_states;         /* [stops.n] */
    enum finish finish;
    int32_t stop;
    uint32_t status, error_position;
    const char *error;             /* text for STATUS_GRAMMAR */
    double first_token, last_token;

    /* Fields of the scheduler. */
    uint32_t slot, n_computed;
    uint32_t pool;                 /* of its pages while it runs; only an admission changes it */
    uint32_t adapter_slot;         /* of its adapter while it runs */
    uint32_t n_overtaken;          /* sequences that were admitted while it waited for a slot of adapters */
    uint32_t n_published;          /* leading blocks that have been published, or found, in the prefix cache */
    uint32_t n_rows;               /* rows in this step */
    bool draws;                    /* draws a token in this step */
    bool is_stale;                 /* has keys and values from before a cache reset or a commit: publishes no blocks */
    bool is_mixed;                 /* has keys and values from before a commit */
    bool is_idle;                  /* a beam that has its candidates: no rows until all beams of the request have theirs */
    bool shares_tail;              /* other page tables or the cache may have the block that it writes next */
    uint32_t n_hit, n_taken_rows;  /* cached positions at the last admission, and rows since; n_computed is their sum */
    uint32_t swapped, n_swapped;   /* first slot of the host tier with its pages, and positions in them; 0: it is not swapped */
    uint64_t loaded_by;            /* number of the host tier's last move into its pages; no rows before that has ended */
    uint64_t sought_by;            /* number of the outer tier's last load for it; it is not admitted before that has ended */
    bool has_asked, has_sought;    /* has asked the outer tier, and looked into it, since it began to wait or looks again */
    bool has_waited;               /* no longer awaits blocks that another engine computes */
    uint32_t n_sought, n_sought_before; /* blocks that its last look found, and most that looks before had found */
    double looked, progressed;     /* times of its last look, and of the last one that found more */
    uint32_t n_kept_early, n_saved_early; /* leading blocks whose copies to the host tier, and whose saves, were ordered */
    uint32_t n_admitted_output;    /* n_output at the last admission */
    uint32_t n_ever_computed;      /* positions below were computed before; computing them again counts as redone */
    uint32_t n_preemptions;
    uint32_t last_due, leaves_at;  /* recurrent state: position of the prompt's last snapshot, and the position up to which
                                    * other sequences have published the same blocks */
    uint32_t passed_block;         /* number of blocks before its newest temporary snapshot; 0: none */
    bool is_blocked;               /* passed over at admission, as scheduler.c says */
    uint32_t first_block[BATCH_MAX_GROUPS]; /* first block of each group's table that is still in the window */
    struct sequence *next_fork;    /* next sequence that draws from the same row in this step */
    struct sequence *left, *right, *parent; /* links in the waiting queue */
    uint64_t heap;
    uint64_t failed_room;          /* 1 + room in pages that did not suffice at the last try; 0: not tried */
    uint32_t failed_hit;           /* blocks hit at that try */

    /* Fields of the outbox. */
    struct links links;
    bool is_in_outbox;
    uint32_t n_reported;           /* new tokens already taken */

    /* Fields of drafting.h that steps without drafts do not touch. */
    float draft_rates[MAX_DRAFTS]; /* estimated share of accepted drafts by place, if those before are accepted */
    struct draft_counts draft_counts;

    /* Recurrent state of a sequence with drafts. */
    int32_t kept_state;            /* bundle with the state before the rows of the step in flight; 0: none */
    uint32_t kept_at;              /* its position */
    uint64_t state_copied;         /* number of the last step that copied the live state */
};

/* Validates and copies spec. The error of RC_INVALID names the parameter. The request has no number yet. */
enum rc request_create(const struct sequence_context *context, const struct request_spec *spec, struct request **request,
                       struct err *err);
/* The request goes on with another adapter. No cached block of a sequence has the new keys: sequence_forget_keys. */
void request_move(struct request *request, struct adapter *adapter);
/* Frees one sequence, and the request with its last one. */
void sequence_release(struct sequence *sequence);
void request_destroy(struct request *request);

struct order sequence_order(const struct sequence *sequence);
bool order_is_ahead(const struct order *a, const struct order *b);
bool sequence_is_ahead(const struct sequence *a, const struct sequence *b);
uint32_t request_capacity(const struct request *request); /* most new tokens of a sample */
uint32_t sequence_n_known(const struct sequence *sequence);
/* Number of known tokens plus those that steps in flight will add. */
uint32_t sequence_n_expected(const struct sequence *sequence);
/* Number of positions to compute before the next token can be drawn or the last token scored. A pending token that reaches the
 * length limit is not counted, because no token follows it. */
uint32_t sequence_goal(const struct sequence *sequence);
/* Most leading positions that the cache may serve. */
uint32_t sequence_hit_limit(const struct sequence *sequence);
int32_t sequence_token(const struct sequence *sequence, uint32_t position);
/* The keys will be others: nothing is known of blocks under them. */
void sequence_forget_keys(struct sequence *sequence);
/* Key of a full block of known tokens; computed at the first call. */
const struct hash *sequence_key(struct sequence *sequence, uint32_t block);
/* The list of seen tokens behind the first n_ahead drafts; it is filled for 0, 1, ... in this order. *n: its entries. */
const struct token_seen *sequence_seen_ahead(struct sequence *sequence, uint32_t n_ahead, uint32_t *n);
/* True if the sequence's next step cannot be built before the results of the steps in flight have arrived. */
bool sequence_must_wait(const struct sequence *sequence);
/* The finish that the grammar demands after the sequence's newest token has been consumed; FINISH_NONE: none. */
enum finish sequence_grammar_rule(struct sequence *sequence);
/* Sets finish to FINISH_ERROR because the grammar failed; the text becomes the sequence's error. */
void sequence_fail_grammar(struct sequence *sequence, const char *error);
/* True for the sequence that scores the request's prompt, until all scores are there. */
bool sequence_is_scoring(const struct sequence *sequence);
/* True for a sequence that draws no token: that of a score request, or one that ended with its prior tokens but must still
 * score its prompt. */
bool sequence_only_scores(const struct sequence *sequence);
/* True for a sequence that has drawn no token of its own. */
bool sequence_is_new(const struct sequence *sequence);

/* True if the sequence's remaining results must all come from one epoch: scores and pooled states. */
bool sequence_is_whole(const struct sequence *sequence);
/* Drops the scores and pooled states so far. The sequence must be whole or new, and hold no pages. */
void sequence_start_over(struct sequence *sequence);

/* The rule, except those of grammars, that would end a sample with this token as its n_output-th; FINISH_NONE: none. The states
 * of the stop strings advance over the token; *stop: the stop id or the index of the stop string. */
enum finish sequence_token_rule(const struct request *request, int32_t id, uint32_t n_output, uint32_t *stop_states,
                                int32_t *stop);
/* Appends a drawn token and runs the stop rules, which set sequence->finish. */
void sequence_accept(struct sequence *sequence, const struct sample_result *result, const int32_t *top_ids,
                     const float *top_values, const int32_t *top_ranks, uint32_t epoch);

#endif
