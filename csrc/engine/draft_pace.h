/* draft_pace.h: whether a step may carry drafts at all, where their number adapts and steps overlap. The host waits for a
 * step's results before it schedules a step with drafts, and a large step with drafts replays no graph. What that costs is
 * measured: an engine alternates between phases of steps with and without drafts and stays in the faster kind. Short probes of
 * the other kind come the rarer, the more they cost. Pure functions: the time comes from the caller. */
#ifndef LLMPY_DRAFT_PACE_H
#define LLMPY_DRAFT_PACE_H

#include <stdbool.h>
#include <stdint.h>

/* Sums over the steps of a kind, in which older steps count less. */
struct pace {
    double n, us, tokens;
};

/* The phases of batches of one size. Zeros are a valid beginning. */
struct draft_pace {
    struct pace kinds[2];      /* [1]: of steps that may carry drafts */
    bool is_plain, is_probe;   /* of the phase: no step carries drafts; the other kind is the usual one */
    uint32_t n_steps, n_usual; /* steps of the phase so far; of a usual phase in all, 0: FIRST_STEPS */
    double us, tokens;         /* of the phase so far */
};

/* Notes a step of the phase, which gave n_tokens in so many microseconds, and may begin another phase. */
void draft_pace_note(struct draft_pace *pace, double us, uint32_t n_tokens);

/* True at the beginning of a probe, when every sequence tries a draft, so that the probe measures steps with drafts. */
bool draft_pace_begins(const struct draft_pace *pace);

#endif
