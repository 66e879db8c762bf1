/* draft_model.c: drafts of a second model. It computes every known token; where it lags behind, it catches up before it
 * drafts. */
#include "draft_program.h"

/* The rows that a sequence's known tokens still owe; those of a sequence with drafts draw the first one. */
static void add_known(struct draft_program *d, const struct scheduler *s, struct sequence *q)
{
    uint32_t n_known = sequence_n_known(q), first = q->drafts.n_computed < n_known ? q->drafts.n_computed : n_known - 1,
             end = q->drafts.n || q->n_computed > n_known ? n_known : q->n_computed;
    q->drafts.n_drawn = 0;
    if (first >= end || (!q->drafts.n && !q->drafts.n_wanted))
        return;
    uint32_t n = pass_add_rows(d, s, q, first, end - first, 0);
    q->drafts.n_computed = first + n;
    if (q->drafts.n && first + n == n_known && pass_has_mask(q, 0))
        pass_add_draw(d, q, 0);
}

enum rc draft_by_model(void *ctx, struct scheduler *s, struct err *err)
{
    struct draft_program *d = ctx;
    const struct runner *runner = &d->config->drafter.runners[0];
    uint32_t most = 1;
    pass_begin(d);
    for (uint32_t slot = 0; slot < d->tables.max_seqs; slot++) {
        struct sequence *q = s->slots[slot];
        if (!q || !q->n_rows || !q->drafts.memory)
            continue;
        add_known(d, s, q);
        most = q->drafts.n > most ? q->drafts.n : most;
    }
    enum rc rc = pass_run(d, runner, err);
    for (uint32_t n = 1; n < most && !rc; n++) {
        pass_begin(d);
        for (uint32_t slot = 0; slot < d->tables.max_seqs; slot++) {
            struct sequence *q = s->slots[slot];
            if (!q || !q->n_rows || q->drafts.n <= n || q->drafts.n_drawn != n || !pass_has_mask(q, n) ||
                !pass_add_rows(d, s, q, sequence_n_known(q) + n - 1, 1, 0))
                continue;
            q->drafts.n_computed = sequence_n_known(q) + n;
            pass_add_draw(d, q, n);
        }
        rc = pass_run(d, runner, err);
    }
    return rc;
}
