/* team_weights.h: updates and sums of weights whose ranks lie on several hosts. Host 0 tells the others, between two steps,
 * what to check, write or sum; they read tensors from files that they see under the same paths, or the rows of their ranks from
 * host 0. In one process these calls do nothing beyond update.h. */
#ifndef LLMPY_TEAM_WEIGHTS_H
#define LLMPY_TEAM_WEIGHTS_H

#include "checkpoint.h"
#include "team.h"
#include "update.h"

/* What the other hosts do with the tensor `stored` of the file `path`, or, if path is NULL, with a tensor in host memory that
 * they read from this host. Both NULL: there is no tensor. */
struct weight_call {
    uint32_t call; /* enum team_call, from TEAM_SUM on */
    bool is_finite;
    const char *name, *path, *stored;
    const struct update_tensor *tensor;
};

/* An update that knows the names of all ranks, and writes those of this host. */
enum rc team_update_begin(struct team *team, struct update **update, struct err *err);
/* The call on all other hosts. sum: of their numbers; NULL is allowed. */
enum rc team_weights_elsewhere(struct team *team, const struct weight_call *call, uint64_t *sum, struct err *err);
/* Views a tensor of a checkpoint as update.h takes it; `read` and its context are the caller's. */
void team_view_stored(const struct checkpoint_tensor *stored, struct update_tensor *tensor);

#endif
