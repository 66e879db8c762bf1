/* grammar.h: what keeps a request's tokens within a grammar. One struct grammars an engine holds the trie of its vocabulary,
 * the grammars compiled lately and two kinds of threads: a few compile what requests order, others fill masks while the
 * device computes a step. A request's order becomes one matcher a sample, each with the mask of its next token. Orders are made
 * by any thread; everything about matchers is the driver's. Threads are nobody's to join: they hold what they use, so that a
 * long compilation outlives its request and even the engine. What the library allocates is its own affair. */
#ifndef LLMPY_GRAMMAR_H
#define LLMPY_GRAMMAR_H

#include "engine.h"

struct grammars;
struct grammar;
struct matcher;

/* is_special: [n_tokens] of config's vocabulary, ids that no text stands for. Nothing slow happens here. */
enum rc grammars_create(const char *library, const struct engine_config *config, const uint8_t *is_special,
                        struct grammars **grammars, struct err *err);
/* The engine's hold ends; its orders are released before. */
void grammars_release(struct grammars *grammars);

/* Orders n_samples matchers that have taken the prior tokens in. stop_ids, of the vocabulary, are allowed where the grammar
 * accepts. */
enum rc grammar_order(struct grammars *grammars, const struct grammar_spec *spec, const struct id_list *prior,
                      const struct id_list *stop_ids, uint32_t n_samples, struct grammar **grammar, struct err *err);
void grammar_release(struct grammar *grammar);

enum grammar_state { GRAMMAR_WAITS = 0, GRAMMAR_READY, GRAMMAR_FAILED };
/* Compiling may take a limited time, after which the order has failed. */
enum grammar_state grammar_look(struct grammar *grammar);
const char *grammar_error(const struct grammar *grammar); /* of a failed one */
struct matcher *grammar_matcher(struct grammar *grammar, uint32_t sample);
/* Until some order is ready or has failed, or the time is over. */
void grammars_wait(struct grammars *grammars, double seconds);

enum match { MATCH_GOES_ON = 0, MATCH_ENDED /* nothing may follow */, MATCH_FAILED };
enum match matcher_look(const struct matcher *matcher);
/* A thread takes the token in and then fills the mask of the next: matcher_look tells what came of the former after
 * grammars_finish_tokens. */
void matcher_take(struct matcher *matcher, int32_t id);
void grammars_finish_tokens(struct grammars *grammars);
/* Takes the last token in at once; no mask follows. */
enum match matcher_take_last(struct matcher *matcher, int32_t id);
const char *matcher_error(const struct matcher *matcher); /* NULL: none */
/* [(vocab_size + 31) / 32] bit set: allowed. Complete after grammars_finish_masks; all zeros when it failed. */
const uint32_t *matcher_mask(const struct matcher *matcher);
const char *matcher_mask_error(const struct matcher *matcher); /* likewise; NULL: none */
/* After the tokens. Totals: masks that the threads have filled so far, and their time. */
void grammars_finish_masks(struct grammars *grammars, uint64_t *n_masks, uint64_t *mask_us);

#endif
