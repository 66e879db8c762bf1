/* engine_fetch.h: a prompt's blocks go from the pool of one engine into that of another, from device to device. The owner lends
 * them between two steps and takes no further step until it has them back; the other engine takes copies between two steps of
 * its own. Threads of one process: driver.h. */
#ifndef LLMPY_ENGINE_FETCH_H
#define LLMPY_ENGINE_FETCH_H

#include "engine.h"

/* Where a prompt's leading blocks lie: a snapshot at their end, if the model has recurrent states, then the pages of each block
 * by group; 0: not there. */
struct lent_prompt {
    uint32_t n_blocks, n_pages;
    struct hash last_key;          /* of the last block */
    int32_t *pages;                /* [n_pages]; the lender owns them */
    struct lent_pools pools;
    /* Whether the owner has taken no step until now; behind the copies. NULL: it cannot have. */
    bool (*is_held)(void *ctx);
    void *ctx;
};

/* The driving thread of the owner calls both; between them the engine is claimed. */
enum rc engine_lend_prompt(struct engine *from, const struct request_spec *spec, struct lent_prompt *lent, struct err *err);
void engine_end_lending(struct engine *from, struct lent_prompt *lent);
/* The pools of an engine of this process, as `to` can copy from them. */
enum rc engine_reach_pools(struct engine *to, struct engine *from, struct lent_pools *pools, struct err *err);
/* Copies the blocks, unless they are there, and waits for the copies. n_tokens: leading tokens whose blocks are there now; 0 if
 * the keys of the engines differ. RC_IO: the owner went on before, so nothing of it is kept. */
enum rc engine_take_prompt(struct engine *to, const struct request_spec *spec, const struct lent_prompt *lent,
                           uint32_t *n_tokens, struct err *err);

#endif
