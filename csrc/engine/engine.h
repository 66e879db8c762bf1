/* engine.h: requests in, tokens out. The engine owns the scheduler, the block manager and every sequence; it is driven by one
 * thread at a time (engine_step), while engine_submit and engine_abort may be called from any thread (one leaf mutex, held
 * O(1)). It knows no Python and no device: a struct runner computes its steps. Semantics: docs/develop/engine.md. */
#ifndef LLMPY_ENGINE_H
#define LLMPY_ENGINE_H

#include "../step/kv_layout.h"
#include "../step/runner.h"
#include "kv_events.h"
#include "statistics.h"

struct engine;

#define SNAPSHOT_TOKENS 512u
#define MAX_BLOCK_TOKENS 256

enum engine_policy { POLICY_FCFS = 0, POLICY_PRIORITY = 1 };

struct engine_config {
    struct kv_layout layout;
    uint32_t n_pages;                 /* page 0 is reserved */
    uint32_t max_num_seqs, max_num_batched_tokens, max_model_len, max_logprobs;
    uint32_t vocab_size;
    enum engine_policy policy;
    bool prefix_caching;
    uint32_t n_kv_events;             /* that are kept for a reader; 0: none */
    uint32_t snapshot_tokens;         /* between two snapshots of recurrent state in a long prompt */
    const int32_t *eos_ids;           uint32_t n_eos;     /* copied, as all lists here */
    uint32_t vocab_limit;             /* ids from here on are never drawn */
    const int32_t *banned_ids;        uint32_t n_banned;  /* nor are these */
    /* The vocabulary's bytes, for stop strings: token i is token_bytes[token_offsets[i] .. token_offsets[i + 1]), empty for
     * tokens that are hidden. Copied. NULL: no tokenizer. */
    const char *token_bytes;
    const uint64_t *token_offsets;    /* [n_tokens + 1] */
    uint32_t n_tokens;
    /* Tokens that text hides when skip_special_tokens is set; their bytes count only when it is not. Copied. */
    const int32_t *special_ids;       uint32_t n_special;
    struct runner runner;
    bool is_serial;                   /* one step after another, even where the runner could overlap them */
};

/* Which states of the prompt a request wants instead of tokens: its last row's, its first row's, their mean, or every row's. */
enum pooling { POOLING_NONE = 0, POOLING_LAST, POOLING_CLS, POOLING_MEAN, POOLING_ALL };

struct id_list { const int32_t *ids; uint32_t n; };
struct byte_string { const char *bytes; uint32_t n; };
/* A grammar in one of llguidance's languages ("json_schema", "regex", "lark", "llguidance"), and its library's path. */
struct grammar_spec { const char *kind, *text, *library; };

/* Everything a request brings. All memory is the caller's and copied by engine_submit. */
struct request_spec {
    struct id_list prompt, prior;     /* prior: output_token_ids, already generated */
    struct id_list types;             /* of the prompt's tokens, with pooling; n 0: all are 0 */
    uint32_t n;
    int64_t priority;
    struct byte_string salt;
    bool is_score; /* teacher-forced scoring of prompt tokens from score_start (>= 1) on; generates nothing */
    uint32_t score_start;
    uint32_t pooling;                 /* enum pooling; generates nothing */
    float temperature;                /* is_score: divides the logits, 1: raw */
    float top_p, min_p;
    uint32_t top_k;
    float repetition_penalty, presence_penalty, frequency_penalty;
    uint32_t max_tokens, min_tokens;  /* max_tokens counts prior tokens too; UINT32_MAX: no limit */
    uint64_t seed;
    uint32_t sample_index;
    bool ignore_eos, wants_logprobs, wants_prompt_logprobs, hide_special;
    uint32_t n_logprobs, n_prompt_logprobs;   /* alternatives */
    uint32_t mode;                            /* enum logprob_mode */
    struct id_list stop_ids, allowed;         /* allowed.n 0: all */
    const struct token_bias *bias;    uint32_t n_bias;
    const struct id_list *bad_words;  uint32_t n_bad_words;
    const struct byte_string *stop_strings; uint32_t n_stop_strings;
    struct grammar_spec grammar;      /* text NULL: none */
    void *owner;                      /* the caller's; comes back with the request's news */
};

enum finish {
    FINISH_NONE = 0, FINISH_EOS, FINISH_STOP_ID, FINISH_STOP_STRING,
    FINISH_GRAMMAR, /* nothing may follow */
    FINISH_LENGTH, FINISH_ABORT, FINISH_ERROR
};
#define STATUS_GRAMMAR 3u /* beside enum sample_status: news has the error's text */

/* News of one sample: what it has produced since it was last taken. Pointers stay valid until the next engine_take or
 * engine_close. */
struct news {
    uint64_t request;                 /* number that engine_submit returned */
    void *owner;                      /* of the request_spec */
    uint32_t sample;                  /* 0 .. n-1 */
    enum finish finish;
    int32_t stop;                     /* the stop id, or the index of the stop string */
    uint32_t status;                  /* of a FINISH_ERROR: enum sample_status, or STATUS_GRAMMAR */
    const char *error;                /* of STATUS_GRAMMAR, else NULL */
    uint32_t error_position;
    uint32_t first, n_new;            /* tokens first .. first + n_new of this sample (prior ones not counted) */
    const int32_t *ids;               /* [n_new] */
    const struct sample_result *results; /* [n_new] or NULL without logprobs */
    const int32_t *top_ids; const float *top_values; const int32_t *top_ranks; /* [n_new][n_logprobs] */
    uint32_t n_logprobs;
    /* Given once, with the first final news of the request's sample 0 (or of a score request); else NULL.
     * [n_prompt - start], start = 1 for prompt logprobs, score_start for scoring. */
    const struct sample_result *prompt_results;
    const int32_t *prompt_top_ids; const float *prompt_top_values; const int32_t *prompt_top_ranks;
    uint32_t n_prompt_results, n_prompt_logprobs; /* top arrays are [n_prompt_results][n_prompt_logprobs] */
    const float *states;              /* [n_states][states_width], with the final news of a pooling request that has them all */
    uint32_t n_states, states_width;
    uint32_t n_cached_tokens;         /* hit of the first admission */
    uint32_t n_preemptions;
    const uint32_t *epochs;           /* [n_new] of the weights that made each token; never falls */
    uint32_t epoch;                   /* of the last token there is, or of the scores; else the present one */
    double queued, scheduled, first_token, last_token; /* monotonic seconds; 0: not yet */
    bool is_last_of_request;          /* nothing follows for this request */
};

enum rc engine_create(const struct engine_config *config, struct engine **engine, struct err *err);
void engine_destroy(struct engine *engine);
/* Validates completely, copies, queues; *number is the request's for life. */
enum rc engine_submit(struct engine *engine, const struct request_spec *spec, uint64_t *number, struct err *err);
/* numbers NULL: every unfinished request. Unknown or finished ones are ignored. Acts at the next step boundary. */
enum rc engine_abort(struct engine *engine, const uint64_t *numbers, uint32_t n, struct err *err);
/* With true, requests submitted from now on wait outside the scheduler, where they can still be aborted; with false they
 * enter. */
void engine_hold_new(struct engine *engine, bool holds);
/* One step's results; where the runner is asynchronous, the next step is started before they are waited for, so that the device
 * never waits for the host. *progressed is false when there was nothing to run (all finished or none submitted). RC_BUSY:
 * another thread drives. RC_DEAD: poisoned by an earlier device fault. */
enum rc engine_step(struct engine *engine, bool *progressed, struct err *err);
/* Waits for what is in flight and takes its results: the device is idle then. */
enum rc engine_settle(struct engine *engine, struct err *err);
/* What poisoned the engine; RC_OK if it lives. From any thread. */
enum rc engine_fault(struct engine *engine, struct err *err);
bool engine_has_unfinished(struct engine *engine);
uint32_t engine_n_finished(struct engine *engine);  /* final records not yet taken */
/* Fills at most max entries; finished_only leaves running samples alone. Final news releases the sample's memory at the next
 * take. Driver thread only. */
enum rc engine_take(struct engine *engine, bool finished_only, struct news *news, uint32_t max, uint32_t *n, struct err *err);
enum rc engine_reset_prefix_cache(struct engine *engine, bool recompute_running, struct err *err);

/* Why no step runs. Meanwhile engine_step only acts on commands and refuses; requests wait, and can be ended. */
enum engine_hold {
    HOLD_UPDATE = 1,                                         /* weights are being written */
    HOLD_TORN = 2,                                           /* they are incomplete, until a commit */
    HOLD_SCHEDULING = 4, HOLD_WEIGHTS = 8, HOLD_POOL = 16,   /* asleep */
};
/* These three read at any time from any thread. engine_refusal is RC_OK if steps may run, else what a synchronous call says. */
uint32_t engine_holds(struct engine *engine);
uint32_t engine_epoch(struct engine *engine);
enum rc engine_refusal(struct engine *engine, struct err *err);
/* An update of the weights: three calls of whoever drives, between two steps (driver_call). The first comes before the first
 * write: it waits for what is in flight, and no step runs until one of the others. RC_ASLEEP: the weights sleep. */
enum rc engine_hold_steps(struct engine *engine, struct err *err);
/* The weights are new, and complete. The epoch rises; no block computed so far will be found again. What runs goes on with the
 * keys and values that it has, whose blocks it shares no more, or with `recompute` computes them again before its next token;
 * scores that are not complete start over. */
enum rc engine_commit_weights(struct engine *engine, bool recompute, uint32_t *epoch, struct err *err);
/* The update is given up. Torn weights, of which some are written, run no step until a commit. */
void engine_abort_update(struct engine *engine, bool is_torn);

/* Sleep; likewise of whoever drives. Level 0 gives no memory back, 1 keeps a copy of the weights on the host, 2 none: from then
 * on they are torn. parts, of enum sleep_part: what is given back; running sequences lose keys and values with the pool, and
 * compute them again later. A part that sleeps already goes on to sleep, but level 2 drops the copy. A failure leaves all as
 * it was, unless it is the device's. */
enum rc engine_sleep(struct engine *engine, uint32_t level, uint32_t parts, struct err *err);
/* Brings parts back, or none where memory is short. Steps go on when PART_SCHEDULING is woken, or with the last part that this
 * call brings back. */
enum rc engine_wake(struct engine *engine, uint32_t parts, struct err *err);

/* These three read at any time from any thread. */
void engine_stats(struct engine *engine, struct engine_stats *stats);
void engine_histograms(struct engine *engine, struct histogram *histograms); /* [N_HISTOGRAMS] */
/* As statistics_read_steps. */
uint32_t engine_step_log(struct engine *engine, struct step_record *steps, uint32_t max, uint64_t *first);
/* As kv_events_read, from any thread; 0 where none are kept. */
uint32_t engine_block_tokens(const struct engine *engine);
uint32_t engine_kv_events(struct engine *engine, uint64_t *next, struct kv_event *events, int32_t *ids, uint32_t max);
/* block_manager_check and scheduler_check: RC_INTERNAL names the invariant. */
enum rc engine_check(struct engine *engine, struct err *err);

#endif
