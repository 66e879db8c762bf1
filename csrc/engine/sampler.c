#include "sampler.h"

#include "grammar.h"
#include "items.h"
#include "pooling.h"

#include <string.h>

#define GREEDY_BELOW 1e-5f

/* A batch while it is filled. */
struct filler {
    struct batch *batch;
    struct task_owner *owners;
    uint32_t n_top;
    const struct features *features; /* NULL: the model has no tower */
};

/* Bans ids that would complete a bad word, and ids that would end the sequence before min_tokens, for the token behind
 * n_output tokens. */
static uint32_t fill_banned(const struct sequence *q, uint32_t n_output, int32_t *banned)
{
    const struct request_spec *spec = &q->request->spec;
    const struct engine_config *config = q->request->context->config;
    uint32_t n = 0;
    if (n_output < spec->min_tokens) {
        for (uint32_t i = 0; !spec->ignore_eos && i < config->n_eos; i++)
            banned[n++] = config->eos_ids[i];
        for (uint32_t i = 0; i < spec->stop_ids.n; i++)
            banned[n++] = spec->stop_ids.ids[i];
    }
    for (uint32_t i = 0; i < spec->n_bad_words; i++) {
        const struct id_list *word = &spec->bad_words[i];
        uint32_t n_before = word->n - 1, same = 0;
        if (n_before > n_output)
            continue;
        while (same < n_before && q->output[n_output - 1 - same] == word->ids[n_before - 1 - same])
            same++;
        if (same == n_before)
            banned[n++] = word->ids[n_before];
    }
    return n;
}

static struct sample_task *add_task(struct filler *f, struct sequence *q, uint32_t position, uint32_t n_top)
{
    struct batch *batch = f->batch;
    struct sample_task *task = &batch->tasks[batch->n_tasks];
    f->owners[batch->n_tasks++] = (struct task_owner){q, position};
    *task = (struct sample_task){
        .logits_row = batch->n_logits_rows - 1,
        .temperature = 1,
        .top_p = 1,
        .repetition_penalty = 1,
        .position = position,
        .n_top = n_top,
        .top_offset = f->n_top,
    };
    f->n_top += n_top;
    return task;
}

void sampler_describe(struct sequence *q, uint32_t n_before, uint32_t n_ahead, struct sample_task *task)
{
    const struct request_spec *spec = &q->request->spec;
    bool is_greedy = spec->temperature < GREEDY_BELOW;
    *task = (struct sample_task){
        .is_greedy = is_greedy,
        .wants_logprobs = spec->wants_logprobs,
        .temperature = is_greedy ? 1 : spec->temperature,
        .top_p = spec->top_p,
        .min_p = spec->min_p,
        .top_k = spec->top_k,
        .repetition_penalty = spec->repetition_penalty,
        .presence_penalty = spec->presence_penalty,
        .frequency_penalty = spec->frequency_penalty,
        .seed = spec->seed,
        .sample_index = spec->sample_index + (q->request->beams ? 0 : q->sample),
        .position = sequence_n_known(q) + n_before,
        .mode = spec->mode,
        .bias = spec->bias,
        .n_bias = spec->n_bias,
        .allowed = spec->allowed.ids,
        .n_allowed = spec->allowed.n,
    };
    task->seen = q->seen ? sequence_seen_ahead(q, n_ahead, &task->n_seen) : NULL;
    task->banned = q->banned + (size_t)n_ahead * q->most_banned;
    task->n_banned = fill_banned(q, q->n_output + n_before, q->banned + (size_t)n_ahead * q->most_banned);
    task->mask = q->matcher ? matcher_mask(q->matcher, n_ahead) : NULL;
}

static void add_draw(struct filler *f, struct sequence *q)
{
    const struct request_spec *spec = &q->request->spec;
    uint32_t number = f->batch->n_tasks, n_ahead = q->drafts.n ? q->n_pending : 0; /* drafts before this draw */
    struct sample_task *task = add_task(f, q, sequence_n_expected(q), spec->wants_logprobs ? spec->n_logprobs : 0),
                       placed = *task;
    sampler_describe(q, q->n_pending, n_ahead, task);
    task->logits_row = placed.logits_row;
    task->n_top = placed.n_top;
    task->top_offset = placed.top_offset;
    f->batch->has_masks |= q->matcher != NULL;
    q->last_task = number;
    q->n_pending++;
}

static void add_score(struct filler *f, struct sequence *q, uint32_t position)
{
    const struct request *r = q->request;
    struct sample_task *task = add_task(f, q, position, r->n_score_top);
    task->is_score = task->wants_logprobs = true;
    task->target = r->spec.prompt.ids[position];
    task->temperature = r->spec.is_score ? r->spec.temperature : 1;
    task->mode = r->spec.is_score ? LOGPROB_FULL : LOGPROB_RAW;
}

/* Which rows stand for features, and where ropes with axes turn them. */
static void add_places(struct filler *f, const struct sequence *q, uint32_t first)
{
    struct batch *batch = f->batch;
    batch->has_visual |= features_fill(f->features, q, first, q->n_rows, batch->visual + batch->n_rows);
    batch->has_visual |= items_visible_ends(q->request, first, q->n_rows, batch->visible_end + batch->n_rows);
    for (uint32_t axis = 0; axis < batch->n_axes; axis++)
        for (uint32_t i = 0; i < q->n_rows; i++)
            batch->rope_positions[(size_t)axis * batch->max_rows + batch->n_rows + i] =
                items_position(q->request, axis, first + i);
}

static void add_sequence(struct filler *f, struct sequence *q)
{
    struct batch *batch = f->batch;
    const struct request *r = q->request;
    uint32_t first = q->n_computed - q->n_rows, n_known = sequence_n_known(q) + q->drafts.n, first_scored = UINT32_MAX;
    uint32_t n_without = q->n_rows - q->drafts.n;
    if (sequence_is_scoring(q))
        first_scored = r->first_scored + r->n_scored;
    if (f->features)
        add_places(f, q, first);
    batch->has_types |= r->spec.types.n != 0;
    batch->has_adapters |= r->adapter != NULL;
    for (uint32_t i = 0; i < q->n_rows; i++) {
        uint32_t row = batch->n_rows++, position = first + i;
        if (pooling_wants(q, position))
            batch->state_rows[batch->n_state_rows++] = (int32_t)row;
        bool draws = q->draws && i + 1 >= n_without, scores = position + 1 >= first_scored && position + 1 < r->spec.prompt.n;
        batch->token_ids[row] = position < n_known ? sequence_token(q, position) : -1 - (int32_t)q->last_task;
        batch->positions[row] = (int32_t)position;
        batch->row_seq[row] = (int32_t)q->slot;
        batch->row_adapter[row] = r->adapter ? (int32_t)q->adapter_slot : -1;
        batch->token_types[row] = r->spec.types.n ? r->spec.types.ids[position] : 0;
        if (!draws && !scores)
            continue;
        batch->logits_rows[batch->n_logits_rows++] = (int32_t)row;
        if (scores)
            add_score(f, q, position + 1);
        for (struct sequence *drawing = draws ? q : NULL; drawing; drawing = drawing->next_fork)
            add_draw(f, drawing);
    }
}

/* Fills the batch with the sequences of a pool. Returns how many have states to read. */
static uint32_t fill(struct filler *f, const struct scheduler *scheduler, uint32_t pool, struct states_owner *states)
{
    struct batch *batch = f->batch;
    uint32_t n_owners = 0;
    batch->has_masks = batch->has_types = batch->has_adapters = batch->has_visual = false;
    batch->n_rows = batch->n_seqs = batch->n_logits_rows = batch->n_state_rows = batch->n_tasks = 0;
    batch->seq_first_row[0] = 0;
    for (uint32_t slot = 0, left = scheduler->pools[pool].n_running; left; slot++) {
        struct sequence *q = scheduler->slots[slot];
        if (!q || q->pool != pool)
            continue;
        left--;
        if (!q->n_rows)
            continue;
        uint32_t first = batch->n_state_rows;
        add_sequence(f, q);
        batch->seq_first_row[++batch->n_seqs] = (int32_t)batch->n_rows;
        if (batch->n_state_rows > first)
            states[n_owners++] = (struct states_owner){q, first, batch->n_state_rows - first};
    }
    memcpy(batch->logits_rows + batch->n_logits_rows, batch->state_rows, batch->n_state_rows * sizeof *batch->state_rows);
    return n_owners;
}

/* Says where a part lies, once it is filled. The part's batch begins behind all parts before it. */
static void close_part(struct batch *whole, const struct batch *part, uint32_t number)
{
    struct batch_part *at = &whole->parts[number];
    at->n_rows = part->n_rows;
    at->n_seqs = part->n_seqs;
    at->n_logits_rows = part->n_logits_rows;
    at->n_state_rows = part->n_state_rows;
    at->n_tasks = part->n_tasks;
    for (uint32_t row = 0; row < part->n_rows; row++)
        whole->row_part[at->first_row + row] = (int32_t)number;
    whole->n_rows += part->n_rows;
    whole->n_seqs += part->n_seqs;
    whole->n_logits_rows += part->n_logits_rows;
    whole->n_state_rows += part->n_state_rows;
    whole->n_tasks += part->n_tasks;
    whole->has_masks |= part->has_masks;
    whole->has_types |= part->has_types;
    whole->has_adapters |= part->has_adapters;
}

/* Fills the parts one behind the other. */
static uint32_t fill_parts(struct scheduler *scheduler, struct task_owner *owners, struct states_owner *states)
{
    struct batch *whole = scheduler->batch;
    uint32_t n_owners = 0, n_top = 0, n_copies = 0;
    scheduler_sort_copies(scheduler);
    whole->has_masks = whole->has_types = whole->has_adapters = whole->has_visual = false;
    whole->n_rows = whole->n_seqs = whole->n_logits_rows = whole->n_state_rows = whole->n_tasks = 0;
    for (uint32_t i = 0; i < whole->n_parts; i++) {
        whole->parts[i] = (struct batch_part){
            .first_row = whole->n_rows, .first_seq_row = whole->n_seqs + i, .first_state = whole->n_state_rows,
            .first_wanted = whole->n_logits_rows + whole->n_state_rows, .first_task = whole->n_tasks, .first_copy = n_copies,
        };
        struct batch part = batch_part_of(whole, i);
        struct filler f = {&part, owners + whole->n_tasks, n_top, scheduler->features};
        uint32_t n = fill(&f, scheduler, i, states + n_owners);
        for (uint32_t j = 0; j < n; j++)
            states[n_owners + j].first += whole->parts[i].first_state;
        for (; n_copies < whole->n_copies && scheduler->copy_owners[n_copies].pool == i; n_copies++)
            whole->parts[i].n_copies++;
        n_owners += n;
        n_top = f.n_top;
        close_part(whole, &part, i);
    }
    return n_owners;
}

uint32_t sampler_fill(struct scheduler *scheduler, struct task_owner *owners, struct states_owner *states)
{
    struct filler f = {scheduler->batch, owners, 0, scheduler->features};
    return scheduler->n_pools > 1 ? fill_parts(scheduler, owners, states) : fill(&f, scheduler, 0, states);
}
