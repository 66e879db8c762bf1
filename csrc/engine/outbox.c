#include "outbox.h"

static void list_push(struct outbox_list *list, struct sequence *q)
{
    q->links = (struct links){list->last, NULL};
    if (list->last)
        list->last->links.next = q;
    else
        list->first = q;
    list->last = q;
}

static void list_remove(struct outbox_list *list, struct sequence *q)
{
    if (q->links.prev)
        q->links.prev->links.next = q->links.next;
    else
        list->first = q->links.next;
    if (q->links.next)
        q->links.next->links.prev = q->links.prev;
    else
        list->last = q->links.prev;
}

void outbox_note(struct outbox *outbox, struct sequence *q)
{
    if (!q->is_in_outbox)
        list_push(&outbox->fresh, q);
    q->is_in_outbox = true;
}

void outbox_finish(struct outbox *outbox, struct sequence *q)
{
    if (q->is_in_outbox)
        list_remove(&outbox->fresh, q);
    q->is_in_outbox = true;
    list_push(&outbox->finished, q);
    outbox->n_finished++;
}

static void add_scores(struct output *output, const struct request *r)
{
    output->n_prompt_results = r->n_scored;
    output->n_prompt_logprobs = r->n_score_top;
    output->prompt_results = r->score_results;
    output->prompt_top_ids = r->score_top_ids;
    output->prompt_top_values = r->score_top_values;
    output->prompt_top_ranks = r->score_top_ranks;
}

static void add_states(struct output *output, const struct request *r)
{
    output->states = r->states;
    output->n_states = r->n_states;
    output->states_width = r->context->config->runner.states_width;
}

static void report(struct sequence *q, uint32_t epoch, struct output *output)
{
    const struct request *r = q->request;
    uint32_t n_new = q->n_output - r->spec.prior.n, first = q->n_reported;
    size_t first_top = (size_t)first * r->spec.n_logprobs;
    *output = (struct output){
        .request = r->number,
        .owner = r->spec.owner,
        .sample = q->sample,
        .finish = q->state == SEQUENCE_FINISHED ? q->finish : FINISH_NONE,
        .stop = q->stop,
        .status = q->status,
        .error_position = q->error_position,
        .error = q->error,
        .first = first,
        .n_new = n_new - first,
        .ids = q->output + r->spec.prior.n + first,
        .n_cached_tokens = r->n_cached,
        .n_cached_items = r->spec.n_items - r->n_encoded_items,
        .n_preemptions = q->n_preemptions,
        .drafts = q->drafts.memory && q->state == SEQUENCE_FINISHED ? &q->draft_counts : NULL,
        .epochs = q->epochs + first,
        .epoch = n_new ? q->epochs[n_new - 1] : (r->spec.is_score && r->n_scored) || r->n_pooled ? r->score_epoch : epoch,
        .queued = r->queued,
        .scheduled = r->scheduled,
        .first_token = q->first_token,
        .last_token = q->last_token,
    };
    if (q->results) {
        output->results = q->results + first;
        output->n_logprobs = r->spec.n_logprobs;
        output->top_ids = q->top_ids + first_top;
        output->top_values = q->top_values + first_top;
        output->top_ranks = q->top_ranks + first_top;
    }
    q->n_reported = n_new;
}

uint32_t outbox_take(struct outbox *outbox, bool finished_only, uint32_t epoch, struct output *output, uint32_t max)
{
    uint32_t n = 0;
    for (struct sequence *q; n < max && (q = outbox->finished.first); n++) {
        list_remove(&outbox->finished, q);
        list_push(&outbox->delivered, q);
        outbox->n_finished--;
        report(q, epoch, &output[n]);
        output[n].is_last_of_request = --q->request->n_unreported == 0;
        if (q->sample == 0 && q->request->n_to_score)
            add_scores(&output[n], q->request);
        if (q->request->n_states && q->request->n_pooled == q->request->n_to_pool)
            add_states(&output[n], q->request);
    }
    for (struct sequence *q; n < max && !finished_only && (q = outbox->fresh.first); n++) {
        list_remove(&outbox->fresh, q);
        q->is_in_outbox = false;
        report(q, epoch, &output[n]);
    }
    return n;
}

struct sequence *outbox_next_delivered(struct outbox *outbox)
{
    struct sequence *q = outbox->delivered.first;
    while (q && q->n_pending)
        q = q->links.next;
    if (q)
        list_remove(&outbox->delivered, q);
    return q;
}
