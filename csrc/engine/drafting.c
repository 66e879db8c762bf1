#include "drafting.h"

#include "draft_program.h"
#include "grammar.h"

#define RATE_STEP 0.1f     /* weight of the newest draft in its place's rate, unless there were few before it */
#define FIRST_WEIGHT 5u    /* drafts that FIRST_RATE counts for */
#define TRIAL_TOKENS 64u   /* tokens without drafts after which one draft is tried */
#define COST_DECAY 0.97    /* weight of a step against that of the next */
#define ASSUMED_COST 0.03  /* of a row as a share of its step */
#define ASSUMED_WEIGHT 0.5 /* of that assumption against the variance of the rows */
#define MOST_REDONE 2u     /* rows that a step with drafts may compute again, for each of the most drafts */
#define RECURRENT_COST 2   /* rows that a draft costs with recurrent state: an accepted row is often computed again */
#define MOST_OFF 2.0       /* a step that takes this many times the mean, or more, counts as this many */
#define OTHER_BATCH 2.0    /* a batch of more than this many times the sequences, or fewer than the inverse, is learnt anew */

enum rc drafter_create(struct drafter *d, const struct engine_config *config, struct err *err)
{
    enum rc rc = RC_OK;
    if (config->drafts.method >= DRAFT_MODEL)
        rc = draft_program_create(config, &d->own, err);
    else if (config->drafts.method != DRAFT_NONE && !config->draft_source)
        rc = draft_source_create(&config->drafts, &d->own, err);
    d->source = config->draft_source ? config->draft_source : d->own;
    d->adapts = !config->drafts.k;
    d->is_recurrent = config->layout.n_state_pages > 0;
    d->overlaps = config->runner.is_async && !config->is_serial && config->drafts.method < DRAFT_HEAD;
    return rc;
}

void drafter_destroy(struct drafter *d)
{
    if (d->own && d->own->draft)
        draft_program_destroy(d->own);
    else
        draft_source_destroy(d->own);
}

/* ---- before a step ---- */

/* Most drafts for a sequence: so many that no row is behind its last position. */
static uint32_t most_drafts(const struct sequence *q)
{
    const struct request_spec *spec = &q->request->spec;
    uint32_t most = q->drafts.n_wanted, to_limit = spec->max_tokens - q->n_output - 1,
             to_end = q->request->context->config->max_model_len - sequence_n_known(q) - 1;
    most = most < to_limit ? most : to_limit;
    return most < to_end ? most : to_end;
}

static bool takes_drafts(const struct sequence *q)
{
    return q->drafts.n_wanted && q->draws && q->n_rows <= 1 + MOST_REDONE * q->drafts.most && !q->n_pending && !q->next_fork &&
           !sequence_is_new(q);
}

/* Asks the source for at most `most` drafts and writes them behind the output, up to the first that cannot be drawn. */
static uint32_t propose(const struct draft_source *source, struct sequence *q, uint32_t most)
{
    int32_t ids[MAX_DRAFTS];
    uint32_t n = source->propose(source->ctx, q, most, ids), n_valid = 0;
    for (; n_valid < n && n_valid < most; n_valid++) {
        if (ids[n_valid] < 0 || (uint32_t)ids[n_valid] >= q->request->context->config->vocab_size)
            break;
        q->output[q->n_output + n_valid] = ids[n_valid];
    }
    return q->matcher ? matcher_look_ahead(q->matcher, q->output + q->n_output, n_valid, most) : n_valid;
}

/* Drafts of all sequences by a model. The rows for them are taken first, because the drafter computes them, too; rows without a
 * draft are returned. */
static enum rc schedule_model(const struct draft_source *source, struct scheduler *s, struct err *err)
{
    for (uint32_t i = 0; i < s->n_running && s->rows_left; i++) {
        struct sequence *q = s->running[i];
        uint32_t most = takes_drafts(q) && !(q->matcher && s->n_state_pages) ? scheduler_draft_room(s, q, most_drafts(q)) : 0;
        if (most)
            scheduler_take_drafts(s, q, most);
    }
    enum rc rc = source->draft(source->ctx, s, err);
    for (uint32_t i = 0; i < s->n_running && !rc; i++) {
        struct sequence *q = s->running[i];
        if (!q->drafts.n)
            continue;
        int32_t *ids = q->output + q->n_output;
        uint32_t n = q->matcher ? matcher_look_ahead(q->matcher, ids, q->drafts.n_drawn, q->drafts.n) : q->drafts.n_drawn;
        if (!n && s->n_state_pages) /* the copy of the state is made already: any id serves as a draft */
            ids[n++] = 0;
        scheduler_return_drafts(s, q, q->drafts.n - n);
    }
    return rc;
}

enum rc drafter_schedule(const struct drafter *d, struct scheduler *s, struct err *err)
{
    if (d->source->draft)
        return schedule_model(d->source, s, err);
    for (uint32_t i = 0; i < s->n_running && s->rows_left; i++) {
        struct sequence *q = s->running[i];
        uint32_t most = takes_drafts(q) ? scheduler_draft_room(s, q, most_drafts(q)) : 0;
        uint32_t n = most ? propose(d->source, q, most) : 0;
        if (n)
            scheduler_take_drafts(s, q, n);
    }
    return RC_OK;
}

/* ---- results ---- */

void drafter_learn(struct sequence *q, uint32_t n, uint32_t n_accepted)
{
    for (uint32_t i = 0; i < n && i <= n_accepted; i++) {
        float step = 1 / (float)(FIRST_WEIGHT + q->draft_counts.proposed[i]);
        q->draft_rates[i] += (step > RATE_STEP ? step : RATE_STEP) * ((float)(i < n_accepted) - q->draft_rates[i]);
    }
}

static void count(struct sequence *q, struct engine_stats *stats)
{
    const struct drafts *drafts = &q->drafts;
    for (uint32_t i = 0; i < drafts->n; i++) {
        q->draft_counts.proposed[i]++;
        stats->drafts[i]++;
    }
    for (uint32_t i = 0; i < drafts->n_accepted; i++) {
        q->draft_counts.accepted[i]++;
        stats->accepted_drafts[i]++;
    }
    stats->accepted_rows += drafts->n_accepted;
    drafter_learn(q, drafts->n, drafts->n_accepted);
}

bool drafter_takes(struct scheduler *s, struct sequence *q, const struct sample_result *results, struct engine_stats *stats)
{
    struct drafts *drafts = &q->drafts;
    uint32_t at = drafts->n_results++, n = drafts->n;
    if (at == 0) {
        uint32_t n_same = 0;
        while (n_same < n && results[n_same].status == SAMPLE_OK && results[n_same].id == q->output[q->n_output + n_same])
            n_same++;
        drafts->n_accepted = n_same;
        count(q, stats);
        scheduler_roll_back(s, q, n - n_same);
    }
    if (at == n)
        drafts->n = drafts->n_results = 0;
    drafts->has_more = at < drafts->n_accepted;
    return at <= drafts->n_accepted;
}

/* Whether no step carries drafts at present. */
static bool is_plain(const struct drafter *d)
{
    return d->adapts && d->overlaps && d->paces[d->batch_size].is_plain;
}

void drafter_enter(const struct drafter *d, struct sequence *q)
{
    if (is_plain(d))
        q->drafts.n_wanted = 0;
}

/* Sets the number of drafts of the next step, if that adapts. */
static void adapt(const struct drafter *d, struct sequence *q)
{
    struct drafts *drafts = &q->drafts;
    float cost = step_costs_of_row(&d->costs) * (d->is_recurrent ? RECURRENT_COST : 1);
    drafts->n_wanted = is_plain(d) ? 0 : drafts_worth(q->draft_rates, ADAPTIVE_DRAFTS, cost);
    drafts->n_wanted = drafts->n_wanted < drafts->most ? drafts->n_wanted : drafts->most; /* 0: the source left it out */
    drafts->n_idle = drafts->n_wanted ? 0 : drafts->n_idle + 1;
    bool is_due = drafts->n_idle >= TRIAL_TOKENS || draft_pace_begins(&d->paces[d->batch_size]);
    if (is_due && !drafts->n_wanted && drafts->most && !is_plain(d)) {
        drafts->n_wanted = 1;
        if (!q->n_pending) /* else the next step is scheduled already, without drafts */
            drafts->n_idle = 0;
    }
}

void drafter_note(const struct drafter *d, struct sequence *q, int32_t id)
{
    d->source->accept(d->source->ctx, q, &id, 1);
    if (d->adapts && !q->drafts.has_more)
        adapt(d, q);
}

void drafter_end(const struct drafter *d, struct sequence *q)
{
    if (d->source->end)
        d->source->end(d->source->ctx, q);
}

/* ---- how many drafts pay ---- */

uint32_t drafts_worth(const float *rates, uint32_t most, float cost)
{
    uint32_t n = 0;
    for (float chance = 1; n < most && (chance *= rates[n]) > cost;)
        n++;
    return n;
}

/* The slope of a line through the steps' rows and times, drawn towards the assumed one where the rows hardly vary. */
float step_costs_of_row(const struct step_costs *c)
{
    if (c->n < 1)
        return (float)ASSUMED_COST;
    double rows = c->rows / c->n, us = c->us / c->n, variance = c->rows_rows / c->n - rows * rows,
           covariance = c->rows_us / c->n - rows * us,
           slope = (covariance + ASSUMED_WEIGHT * ASSUMED_COST * us) / (variance + ASSUMED_WEIGHT);
    slope = slope < 0 ? 0 : slope > us / rows ? us / rows : slope;
    return (float)(slope * c->tokens / c->us);
}

static void note_pace(struct drafter *d, const struct step_record *record, double us)
{
    double most_us = MOST_OFF * ((double)record->device_us + (double)record->host_us);
    if (record->n_prompt + record->n_redone > record->n_decode)
        return;
    for (d->batch_size = 0; d->batch_size < N_BATCH_SIZES - 1 && record->n_decode >> (d->batch_size + 1);)
        d->batch_size++;
    draft_pace_note(&d->paces[d->batch_size], us < most_us ? us : most_us, record->n_tokens);
}

void drafter_observe(struct drafter *d, const struct step_record *record, double period_us)
{
    struct step_costs *c = &d->costs;
    double rows = record->n_rows, us = (double)record->device_us;
    if (!record->n_rows) /* images alone */
        return;
    note_pace(d, record, period_us);
    if (record->n_prompt || record->n_redone || us <= 0)
        return;
    if (record->n_decode * c->n > OTHER_BATCH * c->seqs || OTHER_BATCH * record->n_decode * c->n < c->seqs)
        *c = (struct step_costs){0};
    if (!c->has_begun) {
        c->has_begun = true;
        return;
    }
    us = c->n > 1 && us > MOST_OFF * c->us / c->n ? MOST_OFF * c->us / c->n : us;
    *c = (struct step_costs){
        .has_begun = true,
        .n = COST_DECAY * c->n + 1,
        .seqs = COST_DECAY * c->seqs + record->n_decode,
        .rows = COST_DECAY * c->rows + rows,
        .us = COST_DECAY * c->us + us,
        .rows_rows = COST_DECAY * c->rows_rows + rows * rows,
        .rows_us = COST_DECAY * c->rows_us + rows * us,
        .tokens = COST_DECAY * c->tokens + record->n_tokens,
    };
}
