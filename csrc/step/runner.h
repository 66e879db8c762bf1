/* runner.h: who computes a batch: the model (csrc/program/executor.c), or a fake one in tests/c. So the engine knows no model
 * and no device, and the executor no request. */
#ifndef LLMPY_RUNNER_H
#define LLMPY_RUNNER_H

#include "batch.h"

/* `start` may return before anything is computed: it has read every array but the tasks' lists, and those stay
 * until `finish` has waited for the results. Batches are finished in the order of their start, and at most two are in between,
 * where is_async says that this makes sense. A failure is a device fault: the engine is poisoned. */
struct runner {
    void *ctx;
    enum rc (*start)(void *ctx, struct batch *batch, struct err *err);
    enum rc (*finish)(void *ctx, struct batch *batch, struct err *err);
    bool is_async;
    uint64_t (*allocations)(void *ctx); /* made by the runner besides those of mem.h so far; NULL: none ever */
    /* The states of a finished batch's state rows first .. first + n, [n][states_width], before another batch is started. */
    enum rc (*read_states)(void *ctx, const struct batch *batch, uint32_t first, uint32_t n, float *rows, struct err *err);
    uint32_t states_width;              /* 0: the model has no states to pool */
    bool lacks_logits;
    /* Both or neither. `release` gives the memory of these parts back and keeps their addresses; with `keeps` the weights are
     * copied to the host before, without it a copy from earlier is dropped. `restore` takes memory for them again: with what
     * was copied, else with zeros for weights and anything for pages. Either acts on all parts or, if it fails, on none. */
    enum rc (*release)(void *ctx, uint32_t parts, bool keeps, struct err *err);
    enum rc (*restore)(void *ctx, uint32_t parts, struct err *err);
    bool takes_whole_prompts;           /* all rows of a prompt in one step */
    uint32_t n_token_types;             /* 0: tokens have no types */
};

enum sleep_part { PART_WEIGHTS = 1, PART_POOL = 2, PART_SCHEDULING = 4 /* no memory; the engine's alone */ };

#endif
