#include "statistics.h"

#include "../base/mem.h"

#include <sched.h>
#include <stdatomic.h>
#include <string.h>

#define SNAPSHOT_WORDS (sizeof(struct snapshot) / sizeof(uint64_t))
#define STEP_WORDS (sizeof(struct step_record) / sizeof(uint64_t))

_Static_assert(sizeof(struct snapshot) % sizeof(uint64_t) == 0, "a snapshot is whole words");
_Static_assert(sizeof(struct step_record) % sizeof(uint64_t) == 0, "a step is whole words");

struct step_slot {
    atomic_uint_least64_t number; /* number of the step in this slot; 0 while it is being written */
    atomic_uint_least64_t words[STEP_WORDS];
};

struct statistics {
    struct snapshot own;           /* the driver's thread changes it in place */
    uint64_t version;              /* the driver's copy of published_version */
    atomic_uint_least64_t published_version; /* odd while the words are being written */
    atomic_uint_least64_t published[SNAPSHOT_WORDS];
    atomic_uint_least64_t n_steps; /* logged so far */
    struct step_slot slots[STEP_LOG_LENGTH];
};

static const double SECONDS[N_BOUNDS] = {1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2,
                                         0.5,  1,    2,    5,    10,   20,   50,   100,  200,  500, 1000};
static const double TOKENS[N_BOUNDS] = {1,    2,    4,    8,     16,    32,    64,     128,    256,    512,     1024,
                                        2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 524288, 1048576, 2097152};

static const struct {
    const char *title;
    const double *bounds;
} HISTOGRAMS[N_HISTOGRAMS] = {
    [HISTOGRAM_FIRST_TOKEN] = {"time_to_first_token_s", SECONDS},
    [HISTOGRAM_PER_TOKEN] = {"time_per_output_token_s", SECONDS},
    [HISTOGRAM_END_TO_END] = {"end_to_end_s", SECONDS},
    [HISTOGRAM_QUEUE] = {"queue_s", SECONDS},
    [HISTOGRAM_PREFILL] = {"prefill_s", SECONDS},
    [HISTOGRAM_DECODE] = {"decode_s", SECONDS},
    [HISTOGRAM_INFERENCE] = {"inference_s", SECONDS},
    [HISTOGRAM_INTER_TOKEN] = {"inter_token_s", SECONDS},
    [HISTOGRAM_PROMPT_TOKENS] = {"prompt_tokens", TOKENS},
    [HISTOGRAM_OUTPUT_TOKENS] = {"output_tokens", TOKENS},
    [HISTOGRAM_STEP_ROWS] = {"step_rows", TOKENS},
    [HISTOGRAM_SAMPLES] = {"samples", TOKENS},
    [HISTOGRAM_MAX_TOKENS] = {"max_tokens", TOKENS},
};

const char *histogram_title(enum histogram_name name)
{
    return HISTOGRAMS[name].title;
}

const double *histogram_bounds(enum histogram_name name)
{
    return HISTOGRAMS[name].bounds;
}

/* Words are written with release and read with acquire, so a reader that sees a new word also sees the counter's change. */
static void words_write(atomic_uint_least64_t *target, const void *source, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint64_t word;
        memcpy(&word, (const char *)source + i * sizeof word, sizeof word);
        atomic_store_explicit(&target[i], word, memory_order_release);
    }
}

static void words_read(void *target, atomic_uint_least64_t *source, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint64_t word = atomic_load_explicit(&source[i], memory_order_acquire);
        memcpy((char *)target + i * sizeof word, &word, sizeof word);
    }
}

enum rc statistics_create(struct statistics **result, struct err *err)
{
    struct statistics *s = *result = mem_calloc(1, sizeof *s);
    return s ? RC_OK : err_set(err, RC_MEMORY, "statistics: out of memory, wanted %zu bytes", sizeof *s);
}

void statistics_destroy(struct statistics *s)
{
    mem_free(s);
}

/* ---- the driver ---- */

struct engine_stats *statistics_totals(struct statistics *s)
{
    return &s->own.totals;
}

void statistics_observe(struct statistics *s, enum histogram_name name, double value)
{
    struct histogram *histogram = &s->own.histograms[name];
    const double *bounds = HISTOGRAMS[name].bounds;
    uint32_t bucket = 0;
    value = value > 0 ? value : 0; /* a request may be queued after the time at which the step that admits it began */
    while (bucket < N_BOUNDS && value > bounds[bucket])
        bucket++;
    histogram->counts[bucket]++;
    histogram->sum += value;
}

void statistics_publish(struct statistics *s)
{
    atomic_store_explicit(&s->published_version, ++s->version, memory_order_relaxed);
    words_write(s->published, &s->own, SNAPSHOT_WORDS);
    atomic_store_explicit(&s->published_version, ++s->version, memory_order_release);
}

void statistics_log_step(struct statistics *s, const struct step_record *step)
{
    uint64_t number = atomic_load_explicit(&s->n_steps, memory_order_relaxed) + 1;
    struct step_slot *slot = &s->slots[number % STEP_LOG_LENGTH];
    atomic_store_explicit(&slot->number, 0, memory_order_relaxed);
    words_write(slot->words, step, STEP_WORDS);
    atomic_store_explicit(&slot->number, number, memory_order_release);
    atomic_store_explicit(&s->n_steps, number, memory_order_release);
}

/* ---- readers ---- */

void statistics_read(struct statistics *s, struct snapshot *snapshot)
{
    for (;; sched_yield()) {
        uint64_t version = atomic_load_explicit(&s->published_version, memory_order_acquire);
        words_read(snapshot, s->published, SNAPSHOT_WORDS);
        if (version % 2 == 0 && atomic_load_explicit(&s->published_version, memory_order_relaxed) == version)
            return;
    }
}

static bool step_read(struct step_slot *slot, uint64_t number, struct step_record *step)
{
    if (atomic_load_explicit(&slot->number, memory_order_acquire) != number)
        return false;
    words_read(step, slot->words, STEP_WORDS);
    return atomic_load_explicit(&slot->number, memory_order_relaxed) == number;
}

uint32_t statistics_read_steps(struct statistics *s, struct step_record *steps, uint32_t max, uint64_t *first)
{
    uint64_t last = atomic_load_explicit(&s->n_steps, memory_order_acquire), number = 1;
    uint32_t n = 0;
    max = max < STEP_LOG_LENGTH ? max : STEP_LOG_LENGTH;
    if (last > max)
        number = last - max + 1;
    for (*first = number; number <= last; number++)
        if (step_read(&s->slots[number % STEP_LOG_LENGTH], number, &steps[n])) {
            n++;
        } else { /* overwritten meanwhile, as were all earlier ones */
            n = 0;
            *first = number + 1;
        }
    return n;
}
