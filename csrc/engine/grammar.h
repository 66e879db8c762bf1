/* grammar.h: restricts a request's tokens to a grammar. An engine has one struct grammars. It holds the trie of the vocabulary,
 * a cache of compiled grammars and two kinds of threads: compilers compile the grammars that requests order, and fillers fill
 * masks while the device computes a step. An order (struct grammar) yields one matcher per sample, with the mask of its next
 * token. Any thread may create orders; only the driver's thread may call functions of matchers. The threads are detached and
 * hold references to what they use, so a long compilation may outlive its request and even the engine. The library's
 * allocations are not counted. */
#ifndef LLMPY_GRAMMAR_H
#define LLMPY_GRAMMAR_H

#include "engine.h"

struct grammars;
struct grammar;
struct matcher;
struct llg_matcher;

/* is_special: [n_tokens] true for ids that stand for no text. The call is fast: the tokenizer is built later, by a compiler. */
enum rc grammars_create(const char *library, const struct engine_config *config, const uint8_t *is_special,
                        struct grammars **grammars, struct err *err);
/* Releases the engine's reference. The engine must have released its orders before. */
void grammars_release(struct grammars *grammars);

/* Orders n_samples matchers that have consumed the prior tokens. stop_ids (ids of the vocabulary) are allowed wherever the
 * grammar accepts the text. n_ahead: the most drafts that matcher_look_ahead takes. */
enum rc grammar_order(struct grammars *grammars, const struct grammar_spec *spec, const struct id_list *prior,
                      const struct id_list *stop_ids, uint32_t n_samples, uint32_t n_ahead, struct grammar **grammar,
                      struct err *err);
void grammar_release(struct grammar *grammar);

enum grammar_state { GRAMMAR_WAITS = 0, GRAMMAR_READY, GRAMMAR_FAILED };
/* State of the order. An order fails when its compilation exceeds the time limit. */
enum grammar_state grammar_look(struct grammar *grammar);
const char *grammar_error(const struct grammar *grammar); /* only for a failed order */
struct matcher *grammar_matcher(struct grammar *grammar, uint32_t sample);
/* Waits until some order is ready or has failed, or until the time is over. */
void grammars_wait(struct grammars *grammars, double seconds);

enum match { MATCH_GOES_ON = 0, MATCH_ENDED /* no token may follow */, MATCH_FAILED };
enum match matcher_look(const struct matcher *matcher);
/* Queues the token: a filler consumes it and then fills the mask of the next token. Call grammars_finish_tokens before
 * matcher_look, which tells whether the token matched. */
void matcher_take(struct matcher *matcher, int32_t id);
void grammars_finish_tokens(struct grammars *grammars);
/* Consumes a token in the calling thread and fills no mask. */
enum match matcher_take_now(struct matcher *matcher, int32_t id);
const char *matcher_error(const struct matcher *matcher); /* NULL: none */
/* Beams. Copies the matcher's state and consumes a token; the matcher does not change, except that it has the error of
 * MATCH_FAILED. *state is NULL unless the match goes on. The mask of the matcher must be complete. */
enum match matcher_branch(struct matcher *matcher, int32_t id, struct llg_matcher **state);
/* Gives the matcher that state and queues its mask. */
void matcher_move(struct matcher *matcher, struct llg_matcher *state);
void matcher_discard(struct matcher *matcher, struct llg_matcher *state); /* state NULL: does nothing */
/* Returns how many of the n drafts the grammar allows before its end, and fills the masks behind them. Where no draft is
 * allowed, and the grammar forces the text, a draft of the forced text takes its place, up to `most` drafts in all. Waits for
 * masks that are being filled. The matcher's own state does not change. ids: [most] */
uint32_t matcher_look_ahead(struct matcher *matcher, int32_t *ids, uint32_t n, uint32_t most);
/* [(vocab_size + 31) / 32] a set bit allows its id. n_ahead: the mask behind so many drafts, after matcher_look_ahead. That
 * of 0 is complete after grammars_finish_masks; all zeros if filling failed. */
const uint32_t *matcher_mask(const struct matcher *matcher, uint32_t n_ahead);
/* Error of filling the mask, valid after grammars_finish_masks; NULL: none. */
const char *matcher_mask_error(const struct matcher *matcher);
/* Waits until all masks are filled; call it after grammars_finish_tokens. n_masks, mask_us: totals of masks filled so far and
 * of the fillers' time for them. */
void grammars_finish_masks(struct grammars *grammars, uint64_t *n_masks, uint64_t *mask_us);

#endif
