/* sample_allowed.h: the ids that may be drawn: bans, the list of allowed ids, a grammar's mask. The leader of a team runs
 * these functions. Included by sample.c. */
#ifndef LLMPY_SAMPLE_ALLOWED_H
#define LLMPY_SAMPLE_ALLOWED_H

#include "sample_work.h"

#define LISTED_SHARE 16 /* a mask that allows at most 1 / LISTED_SHARE of the ids becomes a list */

static void remove_id(struct sample_work *w, int32_t id)
{
    if (id < 0 || (uint32_t)id >= w->n || !(w->z[id] > -INFINITY))
        return;
    w->removed[w->n_removed++] = (struct removed){id, w->z[id]};
    w->z[id] = -INFINITY;
}

/* Step 4 without the allowed list and vocab_limit. */
static void remove_ids(struct sample_work *w)
{
    const struct sample_task *task = w->task;
    w->n_removed = 0;
    for (uint32_t i = 0; i < w->args->n_banned; i++)
        remove_id(w, w->args->banned[i]);
    for (uint32_t i = 0; i < task->n_banned; i++)
        remove_id(w, task->banned[i]);
    for (uint32_t i = 0; i < task->n_bias; i++)
        if (task->bias[i].value == -INFINITY)
            remove_id(w, task->bias[i].id);
}

static void restore_ids(struct sample_work *w)
{
    for (uint32_t i = 0; i < w->n_removed; i++)
        w->z[w->removed[i].id] = w->removed[i].z;
}

static bool is_unmasked(const struct sample_task *task, uint32_t id)
{
    return !task->mask || task->mask[id / 32] >> id % 32 & 1;
}

static void list_id(struct sample_work *w, uint32_t id)
{
    if (id >= w->limit || !(w->z[id] > -INFINITY))
        return;
    w->ids[w->n_ids++] = (int32_t)id;
    w->kept.most = w->z[id] > w->kept.most ? w->z[id] : w->kept.most;
}

/* Lists the allowed ids, or the ids of the mask if the task has no allowed ids. */
static void list_allowed(struct sample_work *w)
{
    const struct sample_task *task = w->task;
    w->n_ids = 0;
    w->kept = (struct log_sum){.most = -INFINITY};
    for (uint32_t i = 0; i < task->n_allowed; i++)
        if (is_unmasked(task, (uint32_t)task->allowed[i]))
            list_id(w, (uint32_t)task->allowed[i]);
    for (uint32_t word = 0; !task->n_allowed && word < (w->limit + 31) / 32; word++)
        for (uint32_t bits = task->mask[word]; bits; bits &= bits - 1)
            list_id(w, 32 * word + (uint32_t)__builtin_ctz(bits));
    w->is_listed = true;
}

/* If a mask allows few ids, lists them; else removes the ids that it forbids. */
static void apply_mask(struct sample_work *w)
{
    const uint32_t *mask = w->task->mask;
    uint32_t n_words = (w->limit + 31) / 32, n_allowed = 0;
    for (uint32_t word = 0; word < n_words; word++)
        n_allowed += (uint32_t)__builtin_popcount(mask[word]);
    if (n_allowed <= w->limit / LISTED_SHARE) {
        list_allowed(w);
        return;
    }
    for (uint32_t word = 0; word < n_words; word++)
        for (uint32_t bits = ~mask[word]; bits; bits &= bits - 1)
            remove_id(w, (int32_t)(32 * word + (uint32_t)__builtin_ctz(bits)));
}

#endif
