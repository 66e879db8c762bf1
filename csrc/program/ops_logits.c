/* ops_logits.c: the logits of the wanted rows, and what is sampled from them. */
#include "ops.h"

/* Whether a weight is a constant of vocab_size row numbers below n_rows, or -1. */
static bool is_map(const struct weight *weight, uint32_t vocab_size, uint32_t n_rows)
{
    bool fits = weight->kind == WEIGHT_VECTOR && weight->values && weight->rows == vocab_size;
    for (uint32_t i = 0; fits && i < weight->rows; i++)
        fits = weight->values[i] >= -1 && weight->values[i] < (float)n_rows &&
               weight->values[i] == (float)(int32_t)weight->values[i];
    return fits;
}

const char *check_logits(const struct program *p, const struct op *op)
{
    const struct weight *weight = &p->weights[op->weight[0]];
    uint32_t least = p->is_of_rank || op->weight[2] != NO_INDEX ? 1 : p->vocab_size, first_id = op->logits.first_id;
    if (width_of(p, op->in[0]) != weight->cols || weight->rows < least || (uint64_t)first_id + weight->rows > p->vocab_size)
        return "the head is [vocab_size][hidden], or has a rank's rows of it";
    if (op->weight[1] != NO_INDEX && !is_vector(p, op->weight[1], weight->rows))
        return "the bias is a vector of a number for each row of the head";
    if (op->weight[2] != NO_INDEX && !is_map(&p->weights[op->weight[2]], p->vocab_size, weight->rows))
        return "the constant has a row of the head, or -1, for each token id";
    return op->logits.scale > 0 && op->logits.softcap >= 0 ? NULL : "the factor is above 0, the cap not below";
}

static enum rc sample(struct running *run, uint32_t n_rows, uint32_t first_task, uint32_t n_tasks)
{
    const struct model *m = run->m;
    const struct batch *b = run->batch;
    struct sample_args args = {
        .logits = m->logits, .vocab_size = m->program->vocab_size, .vocab_stride = m->vocab_stride,
        .vocab_limit = b->vocab_limit, .banned = b->banned, .n_banned = b->n_banned,
        .tasks = b->tasks + first_task, .n_tasks = n_tasks, .n_logits_rows = n_rows, .results = b->results + first_task,
        .top_ids = b->top_ids, .top_values = b->top_values, .top_ranks = b->top_ranks, .slot = b->slot,
        .first_task = first_task,
    };
    return RUN_ENTRY(m, sample, &args, run->err);
}

enum rc logits_end(struct running *run)
{
    return run->m->backend->sample_finish ? sample(run, 0, 0, 0) : RC_OK;
}

enum rc logits_draw(struct running *run, uint32_t n_rows)
{
    const struct batch *b = run->batch;
    const struct drawn_rows own = ranks_drawn_rows(run->m, n_rows);
    uint32_t first = 0, end;
    while (first < b->n_tasks && b->tasks[first].logits_row < own.first)
        first++;
    for (end = first; end < b->n_tasks && b->tasks[end].logits_row < own.end; end++)
        ;
    if (b->n_tasks)
        run->m->sampled = (struct meet_args){b->slot, end - first, first};
    return end > first ? sample(run, b->n_logits_rows, first, end - first) : logits_end(run);
}

/* Samples the wanted rows first .. first + n of a step with more than the buffer holds. *task: the next sampling task. */
static enum rc sample_slice(struct running *run, uint32_t first, uint32_t n, uint32_t *task)
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
    return sample(run, n, first_task, *task - first_task);
}

/* Computes the logits of the wanted rows row .. row + n. They end in the buffer of the rank that samples the row. */
static enum rc compute(struct running *run, const struct step *step, struct view x, uint32_t row, uint32_t n)
{
    const struct model *m = run->m;
    const struct op *op = step->ops[ROLE_MAIN];
    bool is_shared = ranks_share_logits(m, op), is_mapped = op->weight[2] != NO_INDEX;
    struct view y = ranks_logits(m, op), all = {m->logits, m->program->vocab_size, m->vocab_stride};
    if (is_mapped)
        y.data = m->head_logits;
    x.data = (char *)x.data + (size_t)row * x.stride * m->item_bytes;
    enum rc rc = is_shared && row ? ranks_meet(run, (struct meet_args){0}) : RC_OK; /* rank 0 has sampled the rows before */
    if (!rc)
        rc = head_run(run, step, row, n, x, y);
    if (!rc && op_scales_logits(op))
        rc = RUN_ENTRY(m, scale_logits, (&(struct scale_logits_args){n, op->logits.scale, op->logits.softcap, y}), run->err);
    if (!rc && is_mapped)
        rc = RUN_ENTRY(m, spread_logits, (&(struct spread_logits_args){n, y, all, vector_of(m, op, 2)}), run->err);
    return rc || !is_shared ? rc : ranks_join_logits(run, op, n);
}

/* Computes the logits of the wanted rows. If the buffer does not hold all of them, rank 0 samples as many as it holds before it
 * computes the next ones. */
enum rc run_logits(struct running *run, const struct step *step, const struct views *v)
{
    struct model *m = run->m;
    enum rc rc = RC_OK;
    uint32_t task = 0;
    if (!model_draws(m) && !ranks_share_logits(m, step->ops[ROLE_MAIN])) /* rank 0 computes all of them */
        return RC_OK;
    for (uint32_t row = 0; row < run->n_logits_rows && !rc; row += m->max_logits_rows) {
        uint32_t left = run->n_logits_rows - row, n = left < m->max_logits_rows ? left : m->max_logits_rows;
        rc = compute(run, step, v->in[0], row, n);
        if (!rc && run->batch && !run->is_drawn_at_once && model_draws(m))
            rc = sample_slice(run, row, n, &task);
    }
    return rc;
}
