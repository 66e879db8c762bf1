/* tap.h: intermediate values of a prompt, for inspecting a model. The program runs operation by operation, without fusions, in
 * memory apart from the engine's. Fused operations equal composed ones bit for bit, so the values are those of an engine step.
 * The caller must have claimed the engine, so that no step runs meanwhile. Allocates. */
#ifndef LLMPY_TAP_H
#define LLMPY_TAP_H

#include "team.h"

#define TAP_LOGITS NO_INDEX

/* value: number in the program, or TAP_LOGITS; from n_values of the program on: number in the tower's program.
 * rows [tap_rows][width of the value on the rank, or vocab_size]; the logits of ranks but 0 are undefined. */
struct tapped {
    uint32_t value;
    float *rows;
};

struct tap_prompt {
    const int32_t *ids, *types;       /* [n_tokens]; types NULL: all are 0 */
    uint32_t n_tokens, n_items, n_prefix; /* n_prefix: tokens that see each other if the model's prompts do */
    const struct prompt_item *items;  /* its images, which have been checked */
    const int32_t *rope_positions;    /* [axes][n_tokens]; NULL: those of a text */
};

/* Rows of a value: the prompt's tokens; of a tower's value, those of all images, piece by piece. */
uint64_t tap_rows(const struct program *program, const struct tap_prompt *prompt, uint32_t value);
/* wanted [n_ranks of all hosts][n_wanted]: rows of ranks on other hosts get their values, too. On several hosts a failure of
 * the run ends the hosts. */
enum rc team_tap(struct team *team, const struct tap_prompt *prompt, const struct tapped *wanted, uint32_t n_wanted,
                 struct err *err);

/* What team_tap does on one host, in three steps. */
struct tap;
/* taps: one for each rank of this host. wanted [n_ranks of this host][n_wanted]. The arrays are kept, not copied. */
enum rc taps_open(const struct team *team, const struct tap_prompt *prompt, const struct tapped *wanted, uint32_t n_wanted,
                  struct tap **taps, struct err *err);
enum rc taps_run(struct team *team, struct tap *taps, struct err *err);
void taps_close(const struct team *team, struct tap *taps); /* NULL is allowed */

#endif
