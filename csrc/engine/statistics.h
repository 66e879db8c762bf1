/* statistics.h: an engine's statistics: totals, histograms with fixed buckets, and a ring of the last steps. The driver's
 * thread writes and publishes; any thread may read a consistent snapshot at any time. There are no locks: the snapshot, and
 * each step of the ring, has a counter by which a reader detects that it was overwritten during the read. No function allocates
 * after statistics_create. Semantics: docs/develop/engine.md. */
#ifndef LLMPY_STATISTICS_H
#define LLMPY_STATISTICS_H

#include "../base/status.h"
#include "draft.h"

#include <stdbool.h>
#include <stdint.h>

#define N_FINISHES 8          /* values of enum finish */
#define STEP_LOG_LENGTH 4096u
#define N_BOUNDS 22

/* Totals and gauges, each a word of 8 bytes. Where samples or requests could be meant, samples are counted. */
struct engine_stats {
    uint64_t num_running, num_waiting, num_unfinished, num_preemptions, num_steps;
    uint64_t num_held, num_compiling; /* also in num_waiting: outside the scheduler, and waiting only for their grammar */
    uint64_t num_mixed_preemptions; /* of sequences with keys and values of older weights */
    uint64_t prompt_tokens, cached_tokens, generation_tokens, prefix_cache_queries, prefix_cache_hits; /* tokens */
    uint64_t prompt_rows, decode_rows, redone_rows, wasted_rows; /* computed rows; wasted: of ended sequences */
    uint64_t draft_rows, accepted_rows; /* rows of drafts, and how many of these drafts were accepted */
    uint64_t drafts[MAX_DRAFTS], accepted_drafts[MAX_DRAFTS]; /* by place: 0 is the first behind the known tokens */
    uint64_t num_draft_waits;     /* steps that the host scheduled only after the previous one, for the sake of drafts */
    uint64_t num_replayed_steps;  /* steps that replayed a captured graph */
    uint64_t max_steps_in_flight; /* 2: host and device overlap */
    uint64_t kv_blocks_total, kv_blocks_free, kv_blocks_cached, evictions, weight_epoch, sleep_level, nonfinite_rows;
    uint64_t host_blocks_total, host_blocks_cached, host_blocks_swapped; /* slots of the host cache; cached: can be found */
    uint64_t num_swaps;   /* of num_preemptions: those that copied pages to host memory */
    uint64_t blocks_swapped_out, blocks_swapped_in;
    uint64_t host_cache_hits;        /* tokens that admissions, also those after a preemption, found in the host cache alone */
    uint64_t skipped_loads, skipped_load_tokens; /* hits that were computed because loading takes longer */
    uint64_t host_stored_bytes, host_loaded_bytes; /* copied to and from the host cache */
    double host_store_s, host_load_s; /* time of these copies */
    uint64_t disk_blocks_cached, disk_bytes; /* files of the disk cache */
    uint64_t disk_cache_queries;     /* tokens of waiting samples that looked for blocks on disk */
    uint64_t disk_cache_hits;        /* tokens whose blocks waiting samples had read from disk */
    uint64_t disk_stored_bytes, disk_loaded_bytes;
    uint64_t disk_misses;            /* reads that brought no block: damaged, removed by another engine, or failed */
    uint64_t disk_bad_files, disk_errors, disk_evictions; /* damaged; failed calls of the system; removed for room */
    double disk_store_s, disk_load_s; /* the threads' time for these reads and writes */
    uint64_t host_queued_bytes, disk_queued_blocks; /* copies to and from the host cache, and reads and writes, under way */
    uint64_t fetched_tokens, fetched_bytes; /* copied from the pools of other engines */
    double fetch_s;                  /* time of these copies */
    uint64_t state_snapshots, state_snapshot_bytes;  /* snapshots of recurrent states that can be found */
    uint64_t state_snapshots_taken;
    uint64_t images_encoded, image_pieces, image_rows; /* that towers have computed */
    uint64_t image_cache_hits, image_cache_evictions;  /* images whose features were there; that made room for others */
    uint64_t images_reencoded;  /* of images_encoded: computed once more for a request, whose features had made room */
    uint64_t finished[N_FINISHES]; /* by enum finish */
    uint64_t num_masks, mask_us;   /* masks filled for grammars, and the threads' time for them */
    uint64_t allocations_since_warmup;
    double last_step_ms, last_host_us, uptime_s;
};

enum histogram_name {
    HISTOGRAM_FIRST_TOKEN,   /* seconds from submission to a sample's first token */
    HISTOGRAM_PER_TOKEN,     /* mean seconds between a finished sample's tokens; none for fewer than two */
    HISTOGRAM_END_TO_END,    /* seconds from submission to a sample's end */
    HISTOGRAM_QUEUE,         /* seconds from submission to a request's first admission */
    HISTOGRAM_PREFILL,       /* seconds from a request's first admission to a sample's first token */
    HISTOGRAM_DECODE,        /* seconds from a finished sample's first token to its last */
    HISTOGRAM_INFERENCE,     /* seconds from a request's first admission to a sample's end */
    HISTOGRAM_INTER_TOKEN,   /* seconds from a token of a sample to its next */
    HISTOGRAM_PROMPT_TOKENS, /* prompt tokens of an admitted request */
    HISTOGRAM_OUTPUT_TOKENS, /* new tokens of a finished sample */
    HISTOGRAM_STEP_ROWS,     /* rows of a step */
    HISTOGRAM_SAMPLES,       /* n of an admitted request */
    HISTOGRAM_MAX_TOKENS,    /* max_tokens of an admitted request that has a limit */
    N_HISTOGRAMS,
};

struct histogram {
    uint64_t counts[N_BOUNDS + 1]; /* counts[i]: values above bound i - 1, up to bound i; the last: above all bounds */
    double sum;
};

struct snapshot {
    struct engine_stats totals;
    struct histogram histograms[N_HISTOGRAMS];
};

/* Record of one step. Times are of the monotonic clock. */
struct step_record {
    double start;                  /* seconds */
    float host_us;                 /* host time for scheduling, enqueuing and processing the results */
    float device_us;               /* from its start, or the end of the previous step if that is later, to its results */
    uint32_t n_rows, n_prompt, n_decode, n_redone, n_wasted, n_draft; /* n_rows is the sum of the others */
    uint32_t n_accepted;           /* drafts accepted */
    uint32_t n_tokens;             /* tokens drawn and accepted */
    uint32_t n_admitted, n_preempted, n_running, n_waiting;
    uint32_t n_pages_used, n_pages_cached; /* cached: free, and can be found */
    uint32_t n_in_flight, is_replayed;     /* steps in flight at its start, this one included; 1: a graph was replayed */
    uint32_t n_pieces, n_piece_rows;       /* pieces of images that the tower computes before the rows, and their rows */
};

struct statistics;

enum rc statistics_create(struct statistics **statistics, struct err *err);
void statistics_destroy(struct statistics *statistics);

/* For the driver's thread. It changes the totals in place; other threads see them from the next statistics_publish on. */
struct engine_stats *statistics_totals(struct statistics *statistics);
void statistics_observe(struct statistics *statistics, enum histogram_name name, double value);
void statistics_publish(struct statistics *statistics);
/* Other threads see the step at once. Steps are numbered from 1 on. */
void statistics_log_step(struct statistics *statistics, const struct step_record *step);

/* Any thread. */
void statistics_read(struct statistics *statistics, struct snapshot *snapshot);
/* Copies the last steps, at most max, oldest first. *first: number of the first one copied. Returns how many. */
uint32_t statistics_read_steps(struct statistics *statistics, struct step_record *steps, uint32_t max, uint64_t *first);

const char *histogram_title(enum histogram_name name);
const double *histogram_bounds(enum histogram_name name); /* [N_BOUNDS] ascending */

#endif
