/* engine.h: requests in, tokens out. The engine owns the scheduler, the block manager and every sequence. One thread at a time
 * drives it (engine_step); any thread may call engine_submit and engine_abort (one leaf mutex, held O(1)). The engine knows no
 * Python and no device: a struct runner computes its steps. Semantics: docs/develop/engine.md. */
#ifndef LLMPY_ENGINE_H
#define LLMPY_ENGINE_H

#include "../step/kv_layout.h"
#include "../step/runner.h"
#include "connector_library.h"
#include "disk_cache.h"
#include "draft.h"
#include "kv_events.h"
#include "statistics.h"

struct engine;

#define SNAPSHOT_TOKENS 512u
#define MAX_BLOCK_TOKENS 256

enum engine_policy { POLICY_FCFS = 0, POLICY_PRIORITY = 1 };
/* What a preempted sequence does when it comes back: whatever takes less time, compute its positions again, or have its pages
 * copied back from the host tier. */
enum preemption { PREEMPTION_AUTO = 0, PREEMPTION_RECOMPUTE, PREEMPTION_SWAP };

/* The model of DRAFT_MODEL, or the head of DRAFT_HEAD. Its pages have the numbers of the engine's (draft_program.h).
 * DRAFT_HEADS: a head for each place of a draft; the heads are alike, but for the weights. */
struct drafter_model {
    struct runner runners[MAX_DRAFTS];
    uint32_t n_runners;
    struct kv_layout layout;
    uint32_t n_pages, vocab_size, max_model_len;
};

struct engine_config {
    struct kv_layout layout;
    uint32_t n_pages;                 /* page 0 is reserved */
    uint32_t max_num_seqs, max_num_batched_tokens, max_model_len, max_logprobs;
    uint32_t vocab_size;
    enum engine_policy policy;
    bool loads_by_cost;               /* a hit outside the pool is loaded only if that takes less time than to compute it */
    enum preemption preemption;       /* without a host tier every preemption recomputes */
    bool prefix_caching;
    bool has_cache_seed;              /* the prefix cache's keys follow from cache_seed; else they are secret and random */
    uint64_t cache_seed;
    uint32_t n_kv_events;             /* most cache events kept for readers; 0: none are kept */
    uint32_t snapshot_tokens;         /* tokens between two snapshots of recurrent state in a long prompt */
    const int32_t *eos_ids;           uint32_t n_eos;     /* copied, as all lists here */
    uint32_t vocab_limit;             /* ids >= vocab_limit are never drawn */
    const int32_t *banned_ids;        uint32_t n_banned;  /* these are never drawn either */
    /* The vocabulary's bytes, for stop strings: token i is token_bytes[token_offsets[i] .. token_offsets[i + 1]); a hidden
     * token has none. Copied. NULL: no tokenizer. */
    const char *token_bytes;
    const uint64_t *token_offsets;    /* [n_tokens + 1] */
    uint32_t n_tokens;
    /* Tokens that the text omits when skip_special_tokens is set; stop strings see their bytes only when it is not. Copied. */
    const int32_t *special_ids;       uint32_t n_special;
    struct runner runner;
    struct draft_options drafts;
    struct drafter_model drafter;
    const struct draft_source *draft_source; /* NULL: the source of drafts.method */
    bool is_serial;                   /* at most one step in flight, even if the runner is asynchronous */
    const struct disk_options *disk;  /* read by engine_create; NULL: no blocks are kept on disk */
    const struct library_options *library; /* instead of the disk: read by engine_create; NULL: none */
    const struct connector *connector; /* instead of both: copied by engine_create, which closes it; NULL: none */
};

/* Which hidden states of the prompt a request wants instead of tokens: the last row's, the first row's, the mean of all rows,
 * or every row's. */
enum pooling { POOLING_NONE = 0, POOLING_LAST, POOLING_CLS, POOLING_MEAN, POOLING_ALL };

/* When a beam search ends that has found as many texts as it is wide: when no live beam may still beat the worst of them,
 * if it ended at the most favourable length (NEVER) or right now (CANNOT_WIN), or at once (FOUND). */
enum early_stopping { EARLY_NEVER = 0, EARLY_CANNOT_WIN, EARLY_FOUND };
#define MAX_BEAM_WIDTH 64u
#define BEAM_CANDIDATES(width) (2 * (width)) /* of each row */

struct id_list { const int32_t *ids; uint32_t n; };
struct byte_string { const char *bytes; uint32_t n; };
/* A grammar. kind: its language in llguidance ("json_schema", "regex", "lark", "llguidance"); library: path of llguidance. */
struct grammar_spec { const char *kind, *text, *library; };

/* A request's parameters. The caller owns all memory; engine_submit copies it. */
struct request_spec {
    struct id_list prompt, prior;     /* prior: output_token_ids, already generated */
    struct id_list types;             /* types of the prompt's tokens, with pooling only; types.n 0: all are 0 */
    uint32_t n;
    int64_t priority;
    struct byte_string salt;
    uint64_t adapter;                 /* number of an adapter of the runner; 0: none */
    uint32_t text_key;                /* below 2^31; finished outputs are drafts for requests with the same key */
    bool is_score; /* teacher-forced scoring of prompt tokens from score_start (>= 1) on; generates no tokens */
    uint32_t score_start;
    uint32_t pooling;                 /* enum pooling; except with POOLING_NONE, generates no tokens */
    float temperature;                /* is_score: divides the logits, 1: raw */
    float top_p, min_p;
    uint32_t top_k;
    float repetition_penalty, presence_penalty, frequency_penalty;
    uint32_t max_tokens, min_tokens;  /* max_tokens counts prior tokens too; UINT32_MAX: no limit */
    uint64_t seed;
    uint32_t sample_index;
    bool ignore_eos, wants_logprobs, wants_prompt_logprobs, hide_special, no_drafts;
    bool is_beam_search;              /* n is the width; the samples are the best texts found, best first (beams.h) */
    float length_penalty;
    uint32_t early_stopping;          /* enum early_stopping */
    uint32_t n_logprobs, n_prompt_logprobs;   /* alternatives per token */
    uint32_t mode;                            /* enum logprob_mode */
    struct id_list stop_ids, allowed;         /* allowed.n 0: all ids are allowed */
    const struct token_bias *bias;    uint32_t n_bias;
    const struct id_list *bad_words;  uint32_t n_bad_words;
    const struct byte_string *stop_strings; uint32_t n_stop_strings;
    struct grammar_spec grammar;      /* grammar.text NULL: none */
    void *owner;                      /* the caller's pointer, returned with the request's output */
    /* Images: their ranges ascend and do not overlap. Positions of ropes with axes, [n_axes][prompt.n]; n 0: the index on all
     * axes. An output token's position is its index + rope_delta. */
    const struct prompt_item *items;  uint32_t n_items;
    struct id_list rope_positions;
    int32_t rope_delta;
    /* Prefill and decode apart. saves_early: the prompt's blocks go to the outer tier while later ones are computed. awaits_s:
     * another engine computes the prompt; the request is admitted once the outer tier has all its blocks, once
     * engine_end_wait was called, or if no new block was found for so many seconds. 0: it awaits nothing. */
    bool saves_early;
    float awaits_s;
};

enum finish {
    FINISH_NONE = 0, FINISH_EOS, FINISH_STOP_ID, FINISH_STOP_STRING,
    FINISH_GRAMMAR, /* the grammar is complete: no token may follow */
    FINISH_LENGTH, FINISH_ABORT, FINISH_ERROR
};
#define STATUS_GRAMMAR 3u /* a status beside those of enum sample_status: output.error has the text */

/* Output of one sample since the last take. Pointers stay valid until the next engine_take or engine_destroy. */
struct output {
    uint64_t request;                 /* number that engine_submit returned */
    void *owner;                      /* request_spec.owner */
    uint32_t sample;                  /* 0 .. n-1 */
    enum finish finish;
    int32_t stop;                     /* the stop id, or the index of the stop string */
    uint32_t status;                  /* with FINISH_ERROR: enum sample_status, or STATUS_GRAMMAR */
    const char *error;                /* with STATUS_GRAMMAR, else NULL */
    uint32_t error_position;
    uint32_t first, n_new;            /* tokens first .. first + n_new of this sample (prior ones not counted) */
    const int32_t *ids;               /* [n_new] */
    const struct sample_result *results; /* [n_new] or NULL without logprobs */
    const int32_t *top_ids; const float *top_values; const int32_t *top_ranks; /* [n_new][n_logprobs] */
    uint32_t n_logprobs;
    /* Results of prompt tokens: given once, with the final output of the request's sample 0; else NULL.
     * [n_prompt - start]; start is 1 for prompt logprobs and score_start for scoring. */
    const struct sample_result *prompt_results;
    const int32_t *prompt_top_ids; const float *prompt_top_values; const int32_t *prompt_top_ranks;
    uint32_t n_prompt_results, n_prompt_logprobs; /* top arrays are [n_prompt_results][n_prompt_logprobs] */
    const float *states;              /* [n_states][states_width] in a complete pooling request's last output; else NULL */
    uint32_t n_states, states_width;
    uint32_t n_cached_tokens;         /* prompt tokens that the prefix cache served at the first admission */
    uint32_t n_cached_items;          /* items of the prompt that no tower had to compute for this request */
    uint32_t n_preemptions;
    const struct draft_counts *drafts; /* in the final output of a sample that could have drafts; else NULL */
    const uint32_t *epochs;           /* [n_new] epoch of the weights that made each token; never decreases */
    uint32_t epoch;                   /* epoch of the last token, or of the scores or states; without either, the current one */
    double queued, scheduled, first_token, last_token; /* monotonic seconds; 0: not yet */
    bool is_last_of_request;          /* no more output of this request will come */
};

enum rc engine_create(const struct engine_config *config, struct engine **engine, struct err *err);
void engine_destroy(struct engine *engine);
/* Validates the request, copies it and queues it. *number identifies the request and is never used again. */
enum rc engine_submit(struct engine *engine, const struct request_spec *spec, uint64_t *number, struct err *err);
/* Aborts requests at the next step boundary. numbers NULL: every unfinished request. Unknown and finished ones are ignored. */
enum rc engine_abort(struct engine *engine, const uint64_t *numbers, uint32_t n, struct err *err);
/* With true, requests submitted from now on wait outside the scheduler; they can still be aborted. With false they enter. */
void engine_hold_new(struct engine *engine, bool holds);
/* Runs one step and processes its results. With an asynchronous runner it starts the next step before it waits for the results,
 * so that the device never waits for the host. *progressed is false if there was nothing to do (all requests finished, or none
 * submitted). RC_BUSY: another thread drives the engine. RC_DEAD: an earlier device fault poisoned the engine. */
enum rc engine_step(struct engine *engine, bool *progressed, struct err *err);
/* Waits for the steps in flight and processes their results. Afterwards the device is idle. */
enum rc engine_settle(struct engine *engine, struct err *err);
/* The fault that poisoned the engine, or why the runner's next batch will; RC_OK if there is none. Any thread. */
enum rc engine_fault(struct engine *engine, struct err *err);
bool engine_has_unfinished(struct engine *engine);
uint32_t engine_n_finished(struct engine *engine);  /* final records not yet taken */
/* Takes the output of at most max samples; finished_only skips samples that still run. The take after a sample's final output
 * releases the sample's memory. Driver's thread only. */
enum rc engine_take(struct engine *engine, bool finished_only, struct output *output, uint32_t max, uint32_t *n,
                    struct err *err);
/* Saves the blocks of a prompt that the cache has to the outer tier, at once, and waits for it: another engine with the same
 * keys finds them then. The driving thread calls it between two steps. *n_tokens: leading tokens that are there now. */
enum rc engine_save_prompt(struct engine *engine, const struct request_spec *spec, uint32_t *n_tokens, struct err *err);
/* Checks ids, token types and images of a prompt, as those of a request for pooling or sampling. Any thread. */
enum rc engine_check_prompt(const struct engine *engine, const struct request_spec *spec, struct err *err);
/* No more blocks will come for a request with awaits_s: it looks once more, and computes what is missing. Any thread. */
void engine_end_wait(struct engine *engine, uint64_t number);
/* At the next step boundary requests with the adapter of number `from` go on with that of number `to`, but searches; their keys
 * and values are computed again. Any thread may call it. */
enum rc engine_move_adapter(struct engine *engine, uint64_t from, uint64_t to, struct err *err);
enum rc engine_reset_prefix_cache(struct engine *engine, bool recompute_running, struct err *err);

/* Reasons why no step runs. While there is one, engine_step only carries out commands and returns engine_refusal's error;
 * requests wait and can be aborted. */
enum engine_hold {
    HOLD_UPDATE = 1,                                         /* weights are being written */
    HOLD_TORN = 2,                                           /* weights are incomplete, until a commit */
    HOLD_SCHEDULING = 4, HOLD_WEIGHTS = 8, HOLD_POOL = 16,   /* asleep */
};
/* Any thread may call these three at any time. engine_refusal returns RC_OK if steps may run, else the error with the
 * reason. */
uint32_t engine_holds(struct engine *engine);
uint32_t engine_epoch(struct engine *engine);
enum rc engine_refusal(struct engine *engine, struct err *err);
/* An update of the weights takes two of the next three calls, made by the driving thread between two steps (driver_call).
 * engine_hold_steps comes before the first write: it waits for the steps in flight, and no step runs until the update is
 * committed or aborted. RC_ASLEEP: the weights sleep. */
enum rc engine_hold_steps(struct engine *engine, struct err *err);
/* Ends an update: the new weights are complete. The epoch increases by one, and no block computed so far can be found again. A
 * sequence that generates keeps its keys and values and no longer publishes blocks; with `recompute` it computes them again
 * before its next token. Sequences that have drawn no token since their admission, and incomplete scores and pooled states,
 * start over. weights: a digest of the new weights, equal in all engines that have them; NULL: unknown. Only an engine
 * for which engine_wants_digest is true needs it: others find its blocks in the outer tier by their weights. */
bool engine_wants_digest(struct engine *engine);
enum rc engine_commit_weights(struct engine *engine, bool recompute, const struct hash *weights, uint32_t *epoch,
                              struct err *err);
/* Ends an update of the drafter's weights. No epoch begins, because no output changes; the drafter computes running sequences
 * again. */
enum rc engine_commit_drafter(struct engine *engine, uint32_t *epoch, struct err *err);
/* Gives an update up. is_torn: some weights were written, so no step runs until a commit. */
void engine_abort_update(struct engine *engine, bool is_torn);

/* Puts the engine to sleep; the driving thread calls it between two steps.
 *   level 0  frees no memory
 *   level 1  frees the memory of `parts`; a copy of the weights stays on the host
 *   level 2  frees the memory of `parts` without a copy: weights among them are torn until a commit
 * parts: bits of enum sleep_part. Without the pool, running sequences lose their keys and values and compute them again later.
 * A part that already sleeps keeps sleeping, but level 2 drops the copy of the weights. A failure changes nothing, unless it is
 * a device fault. */
enum rc engine_sleep(struct engine *engine, uint32_t level, uint32_t parts, struct err *err);
/* Wakes parts; if memory does not suffice, it wakes none. Steps go on when PART_SCHEDULING is woken, or when the call wakes the
 * last part that sleeps. */
enum rc engine_wake(struct engine *engine, uint32_t parts, struct err *err);

/* Any thread may call these at any time. */
void engine_stats(struct engine *engine, struct engine_stats *stats);
void engine_histograms(struct engine *engine, struct histogram *histograms); /* [N_HISTOGRAMS] */
/* See statistics_read_steps. */
uint32_t engine_step_log(struct engine *engine, struct step_record *steps, uint32_t max, uint64_t *first);
const struct runner *engine_runner(const struct engine *engine);
uint32_t engine_block_tokens(const struct engine *engine);
/* See kv_events_read; returns 0 if no events are kept. */
uint32_t engine_kv_events(struct engine *engine, uint64_t *next, struct kv_event *events, int32_t *ids, uint32_t max);
/* Runs scheduler_check, and with it block_manager_check. The error of RC_INTERNAL names the broken invariant. */
enum rc engine_check(struct engine *engine, struct err *err);

#endif
