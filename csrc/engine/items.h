/* items.h: the images of a request: their copy in the request's memory, their part of block keys, and their checks. */
#ifndef LLMPY_ENGINE_ITEMS_H
#define LLMPY_ENGINE_ITEMS_H

#include "../base/carve.h"
#include "sequence.h"

#define ITEM_KEY_BYTES (sizeof(struct hash) + sizeof(int64_t)) /* most of items_key for one token of a block */

/* Places the arrays of a request's items; in the pass with memory also copies them. */
void items_lay(struct carver *carver, const struct request_spec *spec, struct request *request);
/* Notes which tokens stand for features, once the prompt is copied. */
void items_fill(struct request *request, const struct request_spec *spec);
/* Writes the content of every item that overlaps a block, and where the block lies in it; returns the number of bytes. */
size_t items_key(const struct request_spec *spec, uint32_t first, uint32_t block_tokens, char *bytes);
/* The contents of the first items that overlap a block; returns their number. */
uint32_t items_contents(const struct request_spec *spec, uint32_t first, uint32_t n_tokens, struct hash *found, uint32_t most);
/* The error of RC_INVALID says what is wrong with an image. */
enum rc items_check(const struct engine_config *config, const struct request_spec *spec, struct err *err);
/* Notes the end of the positions that each of n tokens sees: of its span, or its own. The tokens end with a span. Returns
 * whether a token sees later ones. */
bool items_visible_ends(const struct request *request, uint32_t first, uint32_t n, int32_t *ends);
/* How many of n tokens from `first` on end with a span. */
uint32_t items_cut(const struct request *request, uint32_t first, uint32_t n);
/* The root of a prompt's keys: if all of its tokens see each other, no block is another prompt's. */
struct hash items_root(const struct request *request, struct hash root);
/* The position of a token on an axis of the ropes. */
int32_t items_position(const struct request *request, uint32_t axis, uint32_t position);

#endif
