/* scheduler_drafts.c: rows of drafts in a step, and their way back. */
#include "recurrent.h"
#include "scheduler.h"
#include "sequence_pages.h"

bool scheduler_awaits_drafts(const struct scheduler *s)
{
    for (uint32_t i = 0; i < s->n_running; i++)
        if (s->running[i]->drafts.n_wanted && s->running[i]->n_pending)
            return true;
    return false;
}

uint32_t scheduler_draft_room(const struct scheduler *s, const struct sequence *q, uint32_t most)
{
    bool are_pages_wanted = s->waiting.n && s->n_running < config_of(s)->max_num_seqs;
    uint64_t n_free = are_pages_wanted ? 0 : pages_room(s, q->pool);
    if (s->n_state_pages) {
        uint32_t limit = recurrent_draft_limit(s, q);
        if (n_free < s->n_state_pages || !recurrent_can_keep(s, q))
            return 0;
        n_free -= s->n_state_pages;
        most = most < limit ? most : limit;
    }
    uint64_t n_blocks = n_groups(s) ? n_free / n_groups(s) : most;
    uint64_t n = blocks_of(s, q->n_computed) * block_tokens(s) - q->n_computed + n_blocks * block_tokens(s);
    n = n < s->rows_left ? n : s->rows_left;
    return n < most ? (uint32_t)n : most;
}

void scheduler_take_drafts(struct scheduler *s, struct sequence *q, uint32_t n)
{
    if (s->n_state_pages)
        recurrent_keep(s, q);
    pages_take(s, q, n);
    s->rows_left -= n;
    s->n_draft_rows += n;
    q->n_computed += n;
    q->n_taken_rows += n;
    q->n_rows += n;
    q->drafts.n = n;
}

void scheduler_return_drafts(struct scheduler *s, struct sequence *q, uint32_t n)
{
    s->rows_left += n;
    s->n_draft_rows -= n;
    q->n_rows -= n;
    q->drafts.n -= n;
    pages_give_back(s, q, q->n_computed - n);
}

void scheduler_roll_back(struct scheduler *s, struct sequence *q, uint32_t n)
{
    uint32_t n_valid = q->n_computed - n, n_left = n_valid;
    if (q->kept_state) {
        n_left = n ? q->kept_at : n_left;
        recurrent_settle(s, q, n > 0);
    }
    pages_give_back(s, q, n_left);
    q->n_ever_computed = q->n_ever_computed < n_valid ? q->n_ever_computed : n_valid;
}
