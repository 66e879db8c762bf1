/* team_tap.c: `team_tap` for the ranks of all hosts. Host 0 tells the others to open, to run and to close; they read the prompt
 * and the numbers of the values from it, and give it their rows. */
#include "tap.h"

#include "../base/mem.h"
#include "model_state.h"
#include "team_state.h"

#include <string.h>

#define MOST_WANTED (1u << 16)

/* ---- host 0 ------------------------------------------------------------------------------------------------------------ */

struct shared_tap {
    const struct team *team;
    const struct tapped *wanted;
    uint32_t n_tokens, n_wanted;
    int32_t *words; /* [n_tokens + n_wanted] token ids, then the numbers of the values */
};

static enum rc read_words(void *ctx, uint64_t first, size_t n_bytes, void *to, struct err *err)
{
    const struct shared_tap *tap = ctx;
    uint64_t most = ((uint64_t)tap->n_tokens + tap->n_wanted) * sizeof(int32_t);
    if (first > most || n_bytes > most - first)
        return err_set(err, RC_INVALID, "tap: the prompt has no %zu bytes at %llu", n_bytes, (unsigned long long)first);
    memcpy(to, (const char *)tap->words + first, n_bytes);
    return RC_OK;
}

/* The place of rows: rank * n_wanted + number among the wanted values. */
static void *find_rows(void *ctx, uint64_t place, uint64_t first, uint64_t n_bytes)
{
    const struct shared_tap *tap = ctx;
    uint64_t rank = place / tap->n_wanted;
    const struct program *program = rank < tap->team->n_all_ranks ? team_program(tap->team, (uint32_t)rank) : NULL;
    if (!program || tap->wanted[place].value == TAP_LOGITS)
        return NULL;
    uint64_t size = (uint64_t)tap->n_tokens * program->values[tap->wanted[place].value].width * sizeof(float);
    return first <= size && n_bytes <= size - first ? (char *)tap->wanted[place].rows + first : NULL;
}

static enum rc tell(const struct shared_tap *tap, enum team_call call, struct err *err)
{
    const struct hosts_memory memory = {.read = read_words, .find = call == TEAM_TAP_RUN ? find_rows : NULL,
                                        .ctx = (void *)(uintptr_t)tap};
    return hosts_await_results(tap->team->hosts, &memory, NULL, err);
}

static enum rc send(const struct shared_tap *tap, enum team_call call, struct err *err)
{
    const struct tap_order order = {call, tap->n_tokens, tap->n_wanted};
    return hosts_send_order(tap->team->hosts, &order, sizeof order, err);
}

static enum rc open_elsewhere(const struct shared_tap *tap, struct err *err)
{
    enum rc rc = send(tap, TEAM_TAP_OPEN, err);
    rc = rc ? rc : tell(tap, TEAM_TAP_OPEN, err);
    if (rc && !send(tap, TEAM_TAP_CLOSE, NULL))
        tell(tap, TEAM_TAP_CLOSE, NULL);
    return rc;
}

static enum rc run_everywhere(struct team *team, const struct shared_tap *tap, struct tap *taps, struct err *err)
{
    struct err failure = {0};
    enum rc rc = send(tap, TEAM_TAP_RUN, &failure);
    rc = rc ? rc : taps_run(team, taps, &failure);
    rc = rc ? rc : tell(tap, TEAM_TAP_RUN, &failure);
    if (rc)
        hosts_end(team->hosts, failure.message);
    if (rc && err)
        *err = failure;
    return rc;
}

enum rc team_tap(struct team *team, const struct tap_prompt *prompt, const struct tapped *wanted, uint32_t n_wanted,
                 struct err *err)
{
    uint32_t n_tokens = prompt->n_tokens;
    struct shared_tap shared = {team, wanted, n_tokens, n_wanted, NULL};
    struct tap *taps;
    if (!n_wanted)
        return RC_OK;
    if (team->hosts && prompt->types)
        return err_set(err, RC_UNSUPPORTED, "tap: token types are not supported yet with nnodes above 1; use one host");
    enum rc rc = taps_open(team, prompt, wanted + (size_t)team->first_rank * n_wanted, n_wanted, &taps, err);
    if (rc || !team->hosts) {
        rc = rc ? rc : taps_run(team, taps, err);
        taps_close(team, taps);
        return rc;
    }
    shared.words = mem_alloc(((size_t)n_tokens + n_wanted) * sizeof *shared.words);
    if (!shared.words)
        rc = err_set(err, RC_MEMORY, "tap: out of memory");
    if (!rc) {
        memcpy(shared.words, prompt->ids, n_tokens * sizeof *prompt->ids);
        for (uint32_t i = 0; i < n_wanted; i++)
            shared.words[n_tokens + i] = (int32_t)wanted[i].value;
        rc = open_elsewhere(&shared, err);
    }
    rc = rc ? rc : run_everywhere(team, &shared, taps, err);
    taps_close(team, taps);
    mem_free(shared.words);
    return rc;
}

/* ---- the other hosts --------------------------------------------------------------------------------------------------- */

struct taken_tap {
    struct tap *taps;
    int32_t *words;         /* as in struct shared_tap */
    struct tapped *wanted;  /* [n_ranks][n_wanted] */
    float *rows;
    uint32_t n_tokens, n_wanted;
};

void team_end_taps(struct team *team)
{
    struct taken_tap *taken = team->taken;
    team->taken = NULL;
    if (!taken)
        return;
    taps_close(team, taken->taps);
    mem_free(taken->words);
    mem_free(taken->wanted);
    mem_free(taken->rows);
    mem_free(taken);
}

static size_t width_of(const struct program *program, uint32_t value)
{
    return value == TAP_LOGITS ? program->vocab_size : program->values[value].width;
}

/* Makes room for the rows of all ranks here. */
static enum rc make_rows(const struct team *team, struct taken_tap *taken, struct err *err)
{
    const int32_t *values = taken->words + taken->n_tokens;
    size_t n = 0, at = 0;
    for (uint32_t i = 0; i < team->n_ranks * taken->n_wanted; i++) {
        const struct program *program = team->models[i / taken->n_wanted]->program;
        uint32_t value = (uint32_t)values[i % taken->n_wanted];
        if (value == TAP_LOGITS ? !program_has_logits(program) : value >= program->n_values)
            return err_set(err, RC_INVALID, "tap: there is no value %u", value);
        n += taken->n_tokens * width_of(program, value);
    }
    taken->rows = mem_alloc(n * sizeof(float) + 1);
    if (!taken->rows)
        return err_set(err, RC_MEMORY, "tap: out of memory");
    for (uint32_t i = 0; i < team->n_ranks * taken->n_wanted; i++) {
        uint32_t value = (uint32_t)values[i % taken->n_wanted];
        taken->wanted[i] = (struct tapped){value, taken->rows + at};
        at += taken->n_tokens * width_of(team->models[i / taken->n_wanted]->program, value);
    }
    return RC_OK;
}

static enum rc open_taken(struct team *team, const struct tap_order *order, struct err *err)
{
    if (!order->n_tokens || order->n_tokens > team->models[0]->options.max_model_len || order->n_wanted > MOST_WANTED)
        return err_set(err, RC_INVALID, "order: no tap has %u tokens and %u values", order->n_tokens, order->n_wanted);
    struct taken_tap *taken = team->taken = mem_calloc(1, sizeof *taken);
    if (!taken)
        return err_set(err, RC_MEMORY, "tap: out of memory");
    taken->n_tokens = order->n_tokens;
    taken->n_wanted = order->n_wanted;
    size_t n_words = (size_t)order->n_tokens + order->n_wanted;
    taken->words = mem_calloc(n_words, sizeof *taken->words);
    taken->wanted = mem_calloc((size_t)team->n_ranks * order->n_wanted + 1, sizeof *taken->wanted);
    enum rc rc = taken->words && taken->wanted ? RC_OK : err_set(err, RC_MEMORY, "tap: out of memory");
    rc = rc ? rc : hosts_read(team->hosts, 0, n_words * sizeof *taken->words, taken->words, err);
    rc = rc ? rc : make_rows(team, taken, err);
    const struct tap_prompt prompt = {.ids = taken->words, .n_tokens = taken->n_tokens, .n_prefix = taken->n_tokens};
    return rc ? rc : taps_open(team, &prompt, taken->wanted, taken->n_wanted, &taken->taps, err);
}

/* Gives the rows of all ranks here to host 0; it has the logits itself. */
static enum rc give_rows(const struct team *team, const struct taken_tap *taken, struct err *err)
{
    enum rc rc = RC_OK;
    for (uint32_t i = 0; i < team->n_ranks * taken->n_wanted && !rc; i++) {
        const struct tapped *one = &taken->wanted[i];
        if (one->value == TAP_LOGITS)
            continue;
        size_t width = team->models[i / taken->n_wanted]->program->values[one->value].width;
        rc = hosts_give(team->hosts, (uint64_t)team->first_rank * taken->n_wanted + i, one->rows,
                        taken->n_tokens * width * sizeof(float), err);
    }
    return rc;
}

enum rc team_obey_tap(struct team *team, const struct tap_order *order, struct err *err)
{
    enum rc rc = RC_OK;
    if (order->call != TEAM_TAP_RUN)
        team_end_taps(team);
    if (order->call == TEAM_TAP_OPEN && (rc = open_taken(team, order, err)))
        team_end_taps(team);
    if (order->call != TEAM_TAP_RUN)
        return rc;
    if (!team->taken)
        return err_set(err, RC_INVALID, "order: no tap is open");
    struct err failure = {0};
    rc = taps_run(team, team->taken->taps, &failure);
    rc = rc ? rc : give_rows(team, team->taken, &failure);
    team_end_taps(team);
    if (rc)
        hosts_end(team->hosts, failure.message);
    if (rc && err)
        *err = failure;
    return rc;
}
