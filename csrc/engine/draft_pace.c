#include "draft_pace.h"

#define FIRST_STEPS 16u    /* of the first phase, which carries drafts */
#define SETTLING_STEPS 2u  /* of a phase that are not measured: the step before may still be in flight */
#define PROBE_STEPS 8u     /* of a probe that are measured */
#define LEAST_STEPS 64u    /* of a usual phase */
#define MOST_STEPS 4096u
#define PROBE_SHARE 256.0  /* a usual phase lasts this many times as long as its probe costs */
#define LEAST_GAIN 1.02    /* by which the other kind must be faster to become the usual one */
#define PACE_DECAY 0.97    /* weight of a step against that of the next */

static double us_per_token(const struct pace *p)
{
    return p->us / (p->tokens > 0 ? p->tokens : 1e-9);
}

/* Steps of a usual phase whose probe costs loss_us. most: of this phase, because a single measurement may be wrong. */
static uint32_t steps_until_probe(const struct pace *usual, double loss_us, uint32_t most)
{
    double n = loss_us * PROBE_SHARE * usual->n / usual->us;
    n = n < most ? n : most;
    return n > MOST_STEPS ? MOST_STEPS : n > LEAST_STEPS ? (uint32_t)n : LEAST_STEPS;
}

static void begin_phase(struct draft_pace *p, bool is_plain, bool is_probe)
{
    p->is_plain = is_plain;
    p->is_probe = is_probe;
    p->n_steps = 0;
    p->us = p->tokens = 0;
    if (is_probe)
        p->kinds[!is_plain] = (struct pace){0};
}

/* The kind that was probed becomes the usual one if it was faster. */
static void end_probe(struct draft_pace *p)
{
    const struct pace *probed = &p->kinds[!p->is_plain], *usual = &p->kinds[p->is_plain];
    bool is_better = us_per_token(probed) * LEAST_GAIN < us_per_token(usual);
    double loss_us = is_better ? (SETTLING_STEPS + PROBE_STEPS) * (usual->us - usual->tokens * us_per_token(probed)) / usual->n
                               : p->us - p->tokens * us_per_token(usual);
    p->n_usual = steps_until_probe(is_better ? probed : usual, loss_us, is_better ? LEAST_STEPS : 2 * p->n_usual);
    begin_phase(p, is_better ? p->is_plain : !p->is_plain, false);
}

bool draft_pace_begins(const struct draft_pace *p)
{
    return p->is_probe && !p->is_plain && p->n_steps < SETTLING_STEPS;
}

void draft_pace_note(struct draft_pace *p, double us, uint32_t n_tokens)
{
    p->n_steps++;
    p->us += us;
    p->tokens += n_tokens;
    if (p->n_steps > SETTLING_STEPS) {
        struct pace *kind = &p->kinds[!p->is_plain];
        *kind = (struct pace){PACE_DECAY * kind->n + 1, PACE_DECAY * kind->us + us, PACE_DECAY * kind->tokens + n_tokens};
    }
    if (p->is_probe && p->n_steps == SETTLING_STEPS + PROBE_STEPS)
        end_probe(p);
    else if (!p->is_probe && p->n_steps >= (p->n_usual ? p->n_usual : FIRST_STEPS))
        begin_phase(p, !p->is_plain, true);
}
