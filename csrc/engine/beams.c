#include "beams.h"

#include "../base/carve.h"
#include "grammar.h"

#include <math.h>
#include <string.h>

/* ---- life ---- */

void beams_complete(struct request_spec *spec)
{
    spec->wants_logprobs = spec->no_drafts = true;
    spec->n_logprobs = BEAM_CANDIDATES(spec->n);
    spec->mode = LOGPROB_PROCESSED; /* lists no removed token */
    spec->seed = spec->sample_index = 0; /* what is drawn means nothing, but the last bits of a row's logprobs depend on it */
    if (spec->temperature == 1)
        spec->temperature = 0; /* no noise is computed */
}

/* Places the arrays of `beams`, which has its sizes. Returns the end. */
static size_t beams_lay(struct carver *c, struct beams *beams, uint32_t n_stops)
{
    size_t n_rows = (size_t)beams->most_tokens * beams->width, n_values = n_rows * beams->n_candidates;
    CARVE(c, beams->live, beams->width);
    CARVE(c, beams->sums, beams->width);
    CARVE(c, beams->found, beams->width);
    CARVE(c, beams->children, beams->width);
    CARVE(c, beams->next, beams->width);
    CARVE(c, beams->stop_states, n_stops);
    CARVE(c, beams->is_taken, beams->width);
    CARVE(c, beams->origins, n_rows);
    CARVE(c, beams->results, n_rows);
    CARVE(c, beams->epochs, n_rows);
    CARVE(c, beams->ids, n_values);
    CARVE(c, beams->ranks, n_values);
    CARVE(c, beams->values, n_values);
    return c->used;
}

static struct beams sizes_of(const struct request *r)
{
    return (struct beams){.width = r->spec.n, .n_candidates = r->spec.n_logprobs, .most_tokens = request_capacity(r)};
}

size_t beams_bytes(const struct request *r)
{
    struct beams beams = sizes_of(r);
    struct carver c = {NULL, sizeof beams};
    return beams_lay(&c, &beams, r->spec.n_stop_strings);
}

void beams_begin(struct request *r)
{
    struct carver c = {(char *)r->beams, sizeof *r->beams};
    *r->beams = sizes_of(r);
    beams_lay(&c, r->beams, r->spec.n_stop_strings);
    r->beams->sums[0] = 0;
}

void beams_enter(struct scheduler *s, struct request *r)
{
    r->beams->n_live = 1;
    r->beams->live[0] = r->sequences[0];
    for (uint32_t i = 1; i < r->spec.n; i++)
        scheduler_add_parked(s, r->sequences[i]);
    scheduler_add(s, r->sequences[0]);
}

/* ---- candidates ---- */

static size_t row_at(const struct beams *beams, uint32_t n_tokens, uint32_t beam)
{
    return (size_t)n_tokens * beams->width + beam;
}

static size_t candidate_at(const struct beams *beams, uint32_t n_tokens, const struct beam_origin *origin)
{
    return row_at(beams, n_tokens, origin->beam) * beams->n_candidates + origin->candidate;
}

/* The sampler's list has the logprobs of the allowed ids alone. The difference of the drawn token's two logprobs is the
 * logarithm of their mass, so the sum is the logprob among all ids. */
static void keep_row(struct beams *beams, uint32_t beam, const struct batch *b, uint32_t task, uint32_t epoch)
{
    const struct sample_result *result = &b->results[task];
    size_t row = row_at(beams, beams->n_tokens, beam), at = row * beams->n_candidates, from = b->tasks[task].top_offset;
    float shift = result->full - result->processed;
    beams->results[row] = *result;
    beams->epochs[row] = epoch;
    for (uint32_t i = 0; i < beams->n_candidates; i++) {
        beams->ids[at + i] = b->top_ids[from + i];
        beams->ranks[at + i] = b->top_ranks[from + i];
        beams->values[at + i] = result->status == SAMPLE_OK ? b->top_values[from + i] + shift : -INFINITY;
    }
}

/* Takes the best candidate of all live beams that is not taken yet: ties go to the better beam, then to the lower id. Returns
 * false if there is none. */
static bool take_best(struct beams *beams, struct beam_child *child)
{
    *child = (struct beam_child){.sum = -INFINITY};
    for (uint32_t beam = 0; beam < beams->n_live; beam++) {
        struct beam_origin origin = {beam, beams->next[beam]};
        if (origin.candidate == beams->n_candidates)
            continue;
        size_t at = candidate_at(beams, beams->n_tokens, &origin);
        double sum = beams->sums[beam] + (double)beams->values[at];
        if (sum > child->sum)
            *child = (struct beam_child){.origin = origin, .id = beams->ids[at], .sum = sum};
    }
    if (child->sum == -INFINITY)
        return false;
    beams->next[child->origin.beam]++;
    return true;
}

static double score_of(const struct request *r, double sum, uint32_t n_tokens)
{
    return sum / pow(n_tokens, (double)r->spec.length_penalty);
}

/* Adds a text to those found, or drops the worst of them. */
static void add_text(struct request *r, const struct beam_child *child, enum finish finish, int32_t stop)
{
    struct beams *beams = r->beams;
    uint32_t n_tokens = beams->n_tokens + 1, at = beams->n_found;
    double score = score_of(r, child->sum, n_tokens);
    if (at == beams->width && !(score > beams->found[at - 1].score))
        return;
    if (at < beams->width)
        beams->n_found++;
    else
        at--;
    for (; at && score > beams->found[at - 1].score; at--)
        beams->found[at] = beams->found[at - 1];
    beams->found[at] = (struct beam_text){n_tokens, child->origin, score, finish, stop};
}

/* The rule that ends a child, or FINISH_NONE. FINISH_ERROR: its grammar failed. Else the child gets its grammar's state. */
static enum finish end_of(struct request *r, struct beam_child *child, int32_t *stop)
{
    struct beams *beams = r->beams;
    struct sequence *parent = beams->live[child->origin.beam];
    if (r->stops.n)
        memcpy(beams->stop_states, parent->stop_states, r->stops.n * sizeof *beams->stop_states);
    enum finish ends = sequence_token_rule(r, child->id, beams->n_tokens + 1, beams->stop_states, stop);
    if (!parent->matcher || (ends != FINISH_NONE && ends != FINISH_LENGTH))
        return ends;
    enum match match = matcher_branch(parent->matcher, child->id, &child->handle);
    if (match == MATCH_FAILED) {
        sequence_fail_grammar(parent, matcher_error(parent->matcher));
        beams_fail(r, parent);
        return FINISH_ERROR;
    }
    if (match == MATCH_GOES_ON && ends == FINISH_NONE)
        return FINISH_NONE;
    matcher_discard(parent->matcher, child->handle);
    return match == MATCH_ENDED && beams->n_tokens + 1 >= r->spec.min_tokens ? FINISH_GRAMMAR : ends;
}

/* Chooses the beams of the next length among the best candidates, as many as a row has. A candidate that ends is a text
 * that is found if it is one of the width best. Returns the number of children. */
static uint32_t choose(struct request *r)
{
    struct beams *beams = r->beams;
    struct beam_child child;
    uint32_t n = 0;
    memset(beams->next, 0, beams->n_live * sizeof *beams->next);
    for (uint32_t rank = 0; rank < beams->n_candidates && n < beams->width && take_best(beams, &child); rank++) {
        int32_t stop = 0;
        enum finish ends = end_of(r, &child, &stop);
        if (ends == FINISH_ERROR)
            break;
        if (ends == FINISH_NONE)
            beams->children[n++] = child;
        else if (rank < beams->width)
            add_text(r, &child, ends, stop);
    }
    return n;
}

/* True if the search has ended: it failed, no beam lives, or no live beam can win any more, as early_stopping says. */
static bool is_over(const struct request *r, uint32_t n_children)
{
    const struct beams *beams = r->beams;
    bool hopes = r->spec.early_stopping == EARLY_NEVER && r->spec.length_penalty > 0;
    if (!n_children || r->sequences[0]->finish == FINISH_ERROR)
        return true;
    if (beams->n_found < beams->width)
        return false;
    if (r->spec.early_stopping == EARLY_FOUND)
        return true;
    double best = score_of(r, beams->children[0].sum, hopes ? beams->most_tokens : beams->n_tokens + 1);
    return !(best > beams->found[beams->width - 1].score);
}

/* ---- the next length ---- */

/* Makes q, a parked sample, a copy of a beam. Without a slot or the parent's pages it waits and is computed again. */
static void fork_beam(struct scheduler *s, struct sequence *parent, struct sequence *q)
{
    struct request *r = q->request;
    memcpy(q->output, parent->output, parent->n_output * sizeof *q->output);
    q->n_output = parent->n_output;
    if (parent->n_keys)
        memcpy(q->keys, parent->keys, parent->n_keys * sizeof *q->keys);
    q->n_keys = parent->n_keys;
    if (r->stops.n)
        memcpy(q->stop_states, parent->stop_states, r->stops.n * sizeof *q->stop_states);
    q->n_ever_computed = parent->n_ever_computed;
    q->first_token = parent->first_token;
    q->last_token = parent->last_token;
    q->matcher = parent->matcher ? grammar_matcher(r->grammar, q->sample) : NULL;
    scheduler_fork(s, parent, q);
}

/* Gives every child a place: a beam's best child has that of its parent, the others take those without a beam. */
static void place_children(struct scheduler *s, struct request *r, uint32_t n_children)
{
    struct beams *beams = r->beams;
    memset(beams->is_taken, 0, beams->width * sizeof *beams->is_taken);
    for (uint32_t i = 0; i < n_children; i++) {
        struct sequence *parent = beams->live[beams->children[i].origin.beam];
        beams->children[i].sequence = beams->is_taken[parent->sample] ? NULL : parent;
        beams->is_taken[parent->sample] = true;
    }
    for (uint32_t i = 0; i < beams->width; i++)
        if (!beams->is_taken[i]) {
            r->sequences[i]->is_idle = false;
            if (r->sequences[i]->state == SEQUENCE_RUNNING)
                scheduler_park(s, r->sequences[i]);
        }
    for (uint32_t i = 0, place = 0; i < n_children; i++) {
        if (beams->children[i].sequence)
            continue;
        while (beams->is_taken[place])
            place++;
        beams->is_taken[place] = true;
        beams->children[i].sequence = r->sequences[place];
        fork_beam(s, beams->live[beams->children[i].origin.beam], r->sequences[place]);
    }
}

/* Makes the children the live beams. */
static void go_on(struct scheduler *s, struct request *r, uint32_t n_children)
{
    struct beams *beams = r->beams;
    place_children(s, r, n_children);
    beams->n_tokens++;
    beams->n_live = n_children;
    for (uint32_t i = 0; i < n_children; i++) {
        const struct beam_child *child = &beams->children[i];
        struct sequence *q = child->sequence;
        int32_t stop;
        beams->live[i] = q;
        beams->sums[i] = child->sum;
        beams->origins[row_at(beams, beams->n_tokens, i)] = child->origin;
        q->output[q->n_output++] = child->id;
        sequence_token_rule(r, child->id, q->n_output, q->stop_states, &stop);
        if (child->handle)
            matcher_move(q->matcher, child->handle);
        q->is_idle = false;
        if (q->state == SEQUENCE_PARKED)
            scheduler_unpark(s, q);
    }
}

/* ---- the end ---- */

/* The result of a candidate. All logprobs of a row differ from those of its drawn token by a constant. */
static struct sample_result result_of(const struct request *r, size_t row, size_t at)
{
    const struct beams *beams = r->beams;
    const struct sample_result *drawn = &beams->results[row];
    float temperature = r->spec.temperature > 0 ? r->spec.temperature : 1, full = beams->values[at];
    return (struct sample_result){
        .id = beams->ids[at],
        .raw = drawn->raw + temperature * (full - drawn->full),
        .full = full,
        .processed = full - (drawn->full - drawn->processed),
        .kept_mass = drawn->kept_mass,
        .rank = beams->ranks[at],
    };
}

static void write_text(const struct request *r, const struct beam_text *text, struct sequence *q)
{
    const struct beams *beams = r->beams;
    size_t k = beams->n_candidates;
    struct beam_origin origin = text->last;
    for (uint32_t t = text->n_tokens; t-- > 0;) {
        size_t row = row_at(beams, t, origin.beam), at = candidate_at(beams, t, &origin);
        q->output[t] = beams->ids[at];
        q->results[t] = result_of(r, row, at);
        q->epochs[t] = beams->epochs[row];
        memcpy(q->top_ids + t * k, beams->ids + row * k, k * sizeof *q->top_ids);
        memcpy(q->top_values + t * k, beams->values + row * k, k * sizeof *q->top_values);
        memcpy(q->top_ranks + t * k, beams->ranks + row * k, k * sizeof *q->top_ranks);
        if (t)
            origin = beams->origins[row];
    }
    q->n_output = text->n_tokens;
    q->finish = text->finish;
    q->stop = text->stop;
}

void beams_fail(struct request *r, const struct sequence *failed)
{
    for (uint32_t i = 0; i < r->spec.n; i++) {
        r->sequences[i]->n_output = 0;
        r->sequences[i]->status = failed->status;
        r->sequences[i]->error = failed->error;
        r->sequences[i]->error_position = failed->error_position;
        r->sequences[i]->finish = FINISH_ERROR;
    }
}

/* Parks all samples and writes the texts into them. */
static void end(struct scheduler *s, struct request *r)
{
    struct beams *beams = r->beams;
    for (uint32_t i = 0; i < beams->width; i++) {
        struct sequence *q = r->sequences[i];
        q->is_idle = false;
        q->first_token = beams->live[0]->first_token;
        q->last_token = beams->live[0]->last_token;
        if (q->state == SEQUENCE_RUNNING)
            scheduler_park(s, q);
    }
    if (r->sequences[0]->finish == FINISH_ERROR)
        return;
    if (!beams->n_found) { /* no beam had a candidate */
        beams->live[0]->status = SAMPLE_NONE_ALLOWED;
        beams->live[0]->error_position = r->spec.prompt.n + beams->n_tokens;
        beams_fail(r, beams->live[0]);
        return;
    }
    for (uint32_t i = 0; i < beams->width; i++) {
        r->sequences[i]->n_output = 0;
        r->sequences[i]->finish = FINISH_GRAMMAR; /* fewer texts are possible than the search is wide */
        if (i < beams->n_found)
            write_text(r, &beams->found[i], r->sequences[i]);
    }
}

bool beams_take(struct scheduler *s, struct sequence *q, const struct batch *b, uint32_t task, uint32_t epoch)
{
    struct request *r = q->request;
    struct beams *beams = r->beams;
    uint32_t beam = 0;
    while (beams->live[beam] != q)
        beam++;
    keep_row(beams, beam, b, task, epoch);
    q->is_idle = true;
    if (++beams->n_ready < beams->n_live)
        return false;
    beams->n_ready = 0;
    uint32_t n_children = choose(r);
    if (!is_over(r, n_children)) {
        go_on(s, r, n_children);
        return false;
    }
    for (uint32_t i = 0; q->matcher && i < n_children; i++)
        matcher_discard(q->matcher, beams->children[i].handle);
    end(s, r);
    return true;
}

/* ---- invariants ---- */

enum rc beams_check(const struct request *r, uint32_t *n_parked, struct err *err)
{
    const struct beams *beams = r->beams;
    uint32_t n_idle = 0, n_live = 0;
    *n_parked = 0;
    for (uint32_t i = 0; i < r->spec.n; i++) {
        const struct sequence *q = r->sequences[i];
        uint32_t n_beams = 0;
        for (uint32_t beam = 0; beam < beams->n_live; beam++)
            n_beams += beams->live[beam] == q;
        n_live += n_beams;
        n_idle += q->is_idle;
        *n_parked += q->state == SEQUENCE_PARKED;
        if (n_beams > 1 || (n_beams && q->n_output != beams->n_tokens))
            return err_set(err, RC_INTERNAL, "invariant 17: sample %u is %u beams of %u tokens and has %u", i, n_beams,
                           beams->n_tokens, q->n_output);
        if (q->state == SEQUENCE_PARKED ? n_beams && !q->is_idle : !n_beams || (q->is_idle && q->state != SEQUENCE_RUNNING))
            return err_set(err, RC_INTERNAL, "invariant 17: sample %u has state %d, is %u beams and has%s candidates", i,
                           q->state, n_beams, q->is_idle ? "" : " no");
    }
    if (n_live != beams->n_live || n_idle != beams->n_ready || n_idle >= n_live)
        return err_set(err, RC_INTERNAL, "invariant 17: %u of %u beams, %u have candidates, %u are counted", n_live,
                       beams->n_live, n_idle, beams->n_ready);
    return RC_OK;
}
