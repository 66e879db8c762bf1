/* ops_logits.c: the logits of the wanted rows, and what is sampled from them. */
#include "ops.h"

const char *check_logits(const struct program *p, const struct op *op)
{
    const struct weight *weight = &p->weights[op->weight[0]];
    if (width_of(p, op->in[0]) != weight->cols || weight->rows != p->vocab_size)
        return "the head is [vocab_size][hidden]";
    if (op->weight[1] != NO_INDEX && !is_vector(p, op->weight[1], p->vocab_size))
        return "the bias is a vector of vocab_size";
    return op->logits.scale > 0 && op->logits.softcap >= 0 ? NULL : "the factor is above 0, the cap not below";
}

enum rc logits_sample(struct running *run, uint32_t first, uint32_t n, uint32_t *task)
{
    struct model *m = run->m;
    struct batch *b = run->batch;
    uint32_t first_task = *task;
    if (first_task && m->backend->sample_finish) { /* the step has used the slot before */
        enum rc rc = m->backend->sample_finish(m->ctx, b->slot, run->err);
        if (rc)
            return rc;
    }
    if (b->has_masks && !first_task)
        b->await_masks(b->masks_ctx);
    for (; *task < b->n_tasks && b->tasks[*task].logits_row < first + n; ++*task)
        b->tasks[*task].logits_row -= first;
    struct sample_args args = {
        .logits = m->logits, .vocab_size = m->program->vocab_size, .vocab_stride = m->vocab_stride,
        .vocab_limit = b->vocab_limit, .banned = b->banned, .n_banned = b->n_banned,
        .tasks = b->tasks + first_task, .n_tasks = *task - first_task, .n_logits_rows = n, .results = b->results + first_task,
        .top_ids = b->top_ids, .top_values = b->top_values, .top_ranks = b->top_ranks, .slot = b->slot,
        .first_task = first_task,
    };
    return RUN_ENTRY(m, sample, &args, run->err);
}

/* Computes and samples the logits of the wanted rows, as many rows at a time as the buffer holds. A captured graph ends with
 * the logits; sampling is not captured. */
enum rc run_logits(struct running *run, const struct step *step, const struct views *v)
{
    struct model *m = run->m;
    const struct logits_attributes *given = &step->ops[ROLE_MAIN]->logits;
    enum rc rc = RC_OK;
    uint32_t task = 0;
    for (uint32_t row = 0; row < run->n_logits_rows && !rc; row += m->max_logits_rows) {
        uint32_t left = run->n_logits_rows - row, n = left < m->max_logits_rows ? left : m->max_logits_rows;
        struct view x = v->in[0], y = {m->logits, m->program->vocab_size, m->vocab_stride};
        x.data = (char *)x.data + (size_t)row * x.stride * m->item_bytes;
        rc = linear_run(run, step, n, x, y);
        if (!rc && op_scales_logits(step->ops[ROLE_MAIN]))
            rc = RUN_ENTRY(m, scale_logits, (&(struct scale_logits_args){n, given->scale, given->softcap, y}), run->err);
        if (!rc && run->batch)
            rc = logits_sample(run, row, n, &task);
    }
    return rc;
}
