/* sample_work.h: the state of a task while its token is chosen. Included by sample.c and sample_allowed.h. */
#ifndef LLMPY_SAMPLE_WORK_H
#define LLMPY_SAMPLE_WORK_H

#include "ops.h"
#include "sample_select.h"

struct chunk_stat {
    float most, sum;   /* greatest z and sum of e^(z - most) */
    float tail;        /* sum of e^(z - M) over the ids that are not candidates */
    uint32_t n_found;  /* candidates */
    float best;        /* of the draw */
    int32_t best_id;
    bool is_bad;       /* a NaN or +inf among the logits */
};

struct log_sum {
    float most, sum, log; /* M, S, log S */
};

struct removed {
    int32_t id;
    float z;
};

/* A team's state of its task. It lies in the scratch of the team's leader. */
struct sample_work {
    const struct sample_args *args;
    const struct sample_task *task;
    struct sample_result *result;
    const float *logits;
    uint32_t n, limit, n_chunks;
    float *z;                      /* [n] logits of step 2, 3, 4 in turn */
    int32_t *ids;                  /* candidates by chunk, then joined, then the kept ids, ascending */
    struct candidate *candidates;
    struct removed *removed;
    uint32_t n_ids, n_removed;
    struct chunk_stat *stats;
    struct log_sum raw, full, kept;
    bool is_done;                  /* the result is final */
    bool is_edited, is_listed;     /* step 2 changed a logit; ids lists all kept ids */
    bool needs_gather, needs_draw;
    float cut;
};

#endif
