/* fake_model.h: requests for the engine over the fake model of fake_runner.h, and an oracle that computes what must come of them
 * from the tokens alone, with its own plain version of every sampling and stopping rule. One wrong page, count, ban or position
 * changes tokens. */
#ifndef LLMPY_FAKE_MODEL_H
#define LLMPY_FAKE_MODEL_H

#include "fake_runner.h"

/* ---- requests and the oracle ---- */

struct expected {
    uint32_t n;
    int32_t ids[MAX_LENGTH];
    struct sample_result results[MAX_LENGTH];
    int32_t top_ids[MAX_LENGTH][MAX_TOP], top_ranks[MAX_LENGTH][MAX_TOP];
    float top_values[MAX_LENGTH][MAX_TOP];
    enum finish finish;
    int32_t stop;
    uint32_t status, error_position;
};

/* A request with its memory, what must come of it, and what has come. */
struct job {
    struct request_spec spec;
    int32_t prompt[MAX_LENGTH], types[MAX_LENGTH], prior[MAX_LENGTH], stop_ids[4], allowed[VOCAB], words[3][3];
    struct token_bias bias[4];
    struct id_list bad_words[3];
    struct byte_string stops[3];
    bool has_nan;
    const struct kv_layout *layout;
    const struct fake_states *recurrent;

    struct expected expected[MAX_N];
    uint32_t n_scores;
    struct sample_result scores[MAX_LENGTH];
    int32_t score_ids[MAX_LENGTH][MAX_TOP];

    uint64_t number;
    bool is_submitted, may_abort, is_done;
    uint32_t n_received[MAX_N], n_finals;
    enum finish finish[MAX_N];
    bool has_scores;

    uint32_t n_states;
    float states[MAX_LENGTH][STATES_WIDTH];
};

struct history {
    struct cell cells[MAX_LENGTH]; /* stamp: what the row makes of its states */
    const struct kv_layout *layout;
    const struct fake_states *states;
    uint64_t units[MAX_STATES][MAX_UNITS];
    uint32_t n;
};

static const struct cell *fetch_from_history(const void *ctx, uint32_t group, uint32_t position)
{
    (void)group;
    return &((const struct history *)ctx)->cells[position];
}

/* One more row, which these weights compute. */
static void history_add_with(struct history *h, int32_t token, uint64_t weights)
{
    h->cells[h->n] = (struct cell){.token = token, .stamp = next_states(h->states, h->units, (uint64_t)token ^ weights)};
    h->cells[h->n].deep = attend(h->layout, fetch_from_history, h, h->n, false) ^ h->cells[h->n].stamp ^ weights;
    h->n++;
}

static void history_add(struct history *h, int32_t token)
{
    history_add_with(h, token, 0);
}

static uint64_t history_logits(const struct history *h, uint32_t position)
{
    return attend(h->layout, fetch_from_history, h, position, true) ^ h->cells[position].stamp;
}

static bool in_list(const int32_t *ids, uint32_t n, int32_t id)
{
    for (uint32_t i = 0; i < n; i++)
        if (ids[i] == id)
            return true;
    return false;
}

static struct draw draw_of_job(const struct job *job, uint32_t sample, const int32_t *output, uint32_t n_output, uint64_t logits)
{
    const struct request_spec *spec = &job->spec;
    bool is_greedy = spec->temperature < 1e-5f;
    struct draw draw = {.logits = logits, .wants_logprobs = spec->wants_logprobs, .has_nan = job->has_nan};
    draw.n_top = spec->wants_logprobs ? spec->n_logprobs : 0;
    draw.random = is_greedy ? 0 : mix(mix(spec->seed, spec->sample_index + sample), spec->prompt.n + n_output);
    draw.settings = settings_hash(is_greedy, is_greedy ? 1 : spec->temperature, spec->top_p, spec->min_p, spec->top_k, spec->repetition_penalty,
                                  spec->presence_penalty, spec->frequency_penalty, spec->mode);
    bool repeats = spec->repetition_penalty != 1, counts = repeats || spec->presence_penalty != 0 || spec->frequency_penalty != 0;
    for (int32_t id = 0; counts && id < (int32_t)VOCAB; id++) {
        uint32_t count = 0;
        for (uint32_t i = 0; i < n_output; i++)
            count += output[i] == id;
        bool in_prompt = repeats && in_list(job->prompt, spec->prompt.n, id);
        if (count || in_prompt)
            draw.seen += seen_hash(id, count, in_prompt);
    }
    for (uint32_t i = 0; i < spec->n_bias; i++)
        draw.bias += mix((uint64_t)spec->bias[i].id, bits_of(spec->bias[i].value));
    for (int32_t id = 0; id < (int32_t)VOCAB; id++) {
        bool banned = id >= (int32_t)VOCAB_LIMIT || in_list(BANNED, 1, id);
        banned |= spec->allowed.n && !in_list(spec->allowed.ids, spec->allowed.n, id);
        if (n_output < spec->min_tokens)
            banned |= (!spec->ignore_eos && in_list(EOS, 2, id)) || in_list(spec->stop_ids.ids, spec->stop_ids.n, id);
        for (uint32_t w = 0; w < spec->n_bad_words; w++) {
            const struct id_list *word = &spec->bad_words[w];
            banned |= word->ids[word->n - 1] == id && n_output >= word->n - 1 &&
                      !memcmp(output + n_output - (word->n - 1), word->ids, (word->n - 1) * sizeof *output);
        }
        draw.is_banned[id] = banned;
    }
    return draw;
}

/* The text of an output, special tokens hidden as asked. A character that the prompt opens is its first: of the tokens only
 * "\xc3" opens one. */
static uint32_t text_of(const struct job *job, const int32_t *output, uint32_t n, char *text)
{
    uint32_t n_bytes = 0, last = job->spec.prompt.n;
    while (last && (!*TOKEN_TEXTS[job->prompt[last - 1]] || (job->spec.hide_special && in_list(SPECIAL, 2, job->prompt[last - 1]))))
        last--;
    if (last && !strcmp(TOKEN_TEXTS[job->prompt[last - 1]], "\xc3"))
        text[n_bytes++] = '\xc3';
    for (uint32_t i = 0; i < n; i++)
        if (!(job->spec.hide_special && in_list(SPECIAL, 2, output[i]))) {
            strcpy(text + n_bytes, TOKEN_TEXTS[output[i]]);
            n_bytes += (uint32_t)strlen(TOKEN_TEXTS[output[i]]);
        }
    return n_bytes;
}

static bool ends_text(const struct job *job, const int32_t *output, uint32_t n, int32_t *which)
{
    char text[1 + MAX_LENGTH * 4];
    uint32_t begin = text_of(job, output, n - 1, text), end = text_of(job, output, n, text);
    for (uint32_t at = begin + 1; at <= end; at++) {
        uint32_t longest = 0;
        for (uint32_t i = 0; i < job->spec.n_stop_strings; i++) {
            const struct byte_string *stop = &job->spec.stop_strings[i];
            if (stop->n > longest && stop->n <= at && !memcmp(text + at - stop->n, stop->bytes, stop->n)) {
                longest = stop->n;
                *which = (int32_t)i;
            }
        }
        if (longest)
            return true;
    }
    return false;
}

static enum finish expected_finish(const struct job *job, const int32_t *output, uint32_t n, int32_t *stop)
{
    const struct request_spec *spec = &job->spec;
    int32_t last = output[n - 1], which;
    if (n > spec->min_tokens) {
        if (!spec->ignore_eos && in_list(EOS, 2, last))
            return FINISH_EOS;
        if (in_list(spec->stop_ids.ids, spec->stop_ids.n, last)) {
            *stop = last;
            return FINISH_STOP_ID;
        }
        if (ends_text(job, output, n, &which)) {
            *stop = which;
            return FINISH_STOP_STRING;
        }
    }
    return n >= spec->max_tokens || spec->prompt.n + n >= MAX_LENGTH ? FINISH_LENGTH : FINISH_NONE;
}

static void expect_sample(struct job *job, uint32_t sample, struct history h)
{
    const struct request_spec *spec = &job->spec;
    struct expected *e = &job->expected[sample];
    int32_t output[MAX_LENGTH];
    uint32_t n = 0;
    for (; n < spec->prior.n; n++) {
        output[n] = spec->prior.ids[n];
        history_add(&h, output[n]);
        if (!e->finish)
            e->finish = expected_finish(job, output, n + 1, &e->stop);
    }
    while (!e->finish) {
        struct draw draw = draw_of_job(job, sample, output, n, history_logits(&h, h.n - 1));
        struct sample_result result = fake_draw(&draw, e->top_ids[e->n], e->top_values[e->n], e->top_ranks[e->n]);
        if (result.status) {
            e->finish = FINISH_ERROR;
            e->status = result.status;
            e->error_position = h.n;
            return;
        }
        e->results[e->n] = result;
        e->ids[e->n++] = output[n++] = result.id;
        e->finish = expected_finish(job, output, n, &e->stop);
        history_add(&h, result.id);
    }
}

/* ---- beam search ---- */

struct oracle_beam {
    struct history h;
    struct expected made; /* ids, results and alternatives so far */
    double sum, score;
    struct sample_result drawn; /* of its last row */
    int32_t top_ids[MAX_TOP], top_ranks[MAX_TOP];
    float top_values[MAX_TOP];
};

struct oracle_search {
    struct oracle_beam live[MAX_N], next[MAX_N], found[MAX_N + 1];
    uint32_t n_live, n_next, n_found;
    struct oracle_beam child;
};

/* The beam with its candidate number `place` as one more token. */
static void oracle_child(const struct job *job, const struct oracle_beam *parent, uint32_t place, struct oracle_beam *child)
{
    const struct sample_result *drawn = &parent->drawn;
    float full = parent->top_values[place], temperature = job->spec.temperature > 0 ? job->spec.temperature : 1;
    uint32_t at = parent->made.n;
    *child = *parent;
    child->sum += (double)full;
    child->made.ids[at] = parent->top_ids[place];
    child->made.results[at] = (struct sample_result){
        .id = parent->top_ids[place], .raw = drawn->raw + temperature * (full - drawn->full), .full = full,
        .processed = full - (drawn->full - drawn->processed), .kept_mass = drawn->kept_mass, .rank = parent->top_ranks[place]};
    memcpy(child->made.top_ids[at], parent->top_ids, sizeof parent->top_ids);
    memcpy(child->made.top_values[at], parent->top_values, sizeof parent->top_values);
    memcpy(child->made.top_ranks[at], parent->top_ranks, sizeof parent->top_ranks);
    child->made.n++;
    history_add(&child->h, child->made.ids[at]);
    child->made.finish = expected_finish(job, child->made.ids, child->made.n, &child->made.stop);
}

/* The place of the best candidate that is not used, and its beam; false if there is none. */
static bool oracle_best(const struct oracle_search *o, bool is_used[MAX_N][MAX_TOP], uint32_t k, uint32_t *beam, uint32_t *place)
{
    double best = -INFINITY;
    for (uint32_t b = 0; b < o->n_live; b++)
        for (uint32_t i = 0; i < k; i++)
            if (!is_used[b][i] && o->live[b].sum + (double)o->live[b].top_values[i] > best) {
                best = o->live[b].sum + (double)o->live[b].top_values[i];
                *beam = b;
                *place = i;
            }
    return best > -INFINITY;
}

static void oracle_add(struct oracle_search *o, const struct oracle_beam *text, uint32_t width)
{
    uint32_t at = o->n_found;
    for (; at && text->score > o->found[at - 1].score; at--)
        o->found[at] = o->found[at - 1];
    o->found[at] = *text;
    o->n_found += o->n_found < width;
}

/* Draws the candidates of all live beams; the status is SAMPLE_NON_FINITE if a row has bad logits. */
static uint32_t oracle_rows(const struct job *job, struct oracle_search *o)
{
    for (uint32_t b = 0; b < o->n_live; b++) {
        struct oracle_beam *beam = &o->live[b];
        struct draw draw = draw_of_job(job, 0, beam->made.ids, beam->made.n, history_logits(&beam->h, beam->h.n - 1));
        beam->drawn = fake_draw(&draw, beam->top_ids, beam->top_values, beam->top_ranks);
        if (beam->drawn.status == SAMPLE_NON_FINITE)
            return SAMPLE_NON_FINITE;
        for (uint32_t i = 0; i < job->spec.n_logprobs; i++)
            beam->top_values[i] = beam->drawn.status ? -INFINITY : beam->top_values[i] + (beam->drawn.full - beam->drawn.processed);
    }
    return SAMPLE_OK;
}

/* Chooses the next beams; true if the search has ended. */
static bool oracle_choose(const struct job *job, struct oracle_search *o)
{
    const struct request_spec *spec = &job->spec;
    bool is_used[MAX_N][MAX_TOP] = {{false}};
    uint32_t beam, place, room = MAX_LENGTH - spec->prompt.n, most = spec->max_tokens < room ? spec->max_tokens : room;
    o->n_next = 0;
    for (uint32_t rank = 0; rank < 2 * spec->n && o->n_next < spec->n; rank++) {
        if (!oracle_best(o, is_used, spec->n_logprobs, &beam, &place))
            break;
        is_used[beam][place] = true;
        oracle_child(job, &o->live[beam], place, &o->child);
        o->child.score = o->child.sum / pow(o->child.made.n, (double)spec->length_penalty);
        if (!o->child.made.finish)
            o->next[o->n_next++] = o->child;
        else if (rank < spec->n)
            oracle_add(o, &o->child, spec->n);
    }
    if (!o->n_next || o->n_found < spec->n)
        return !o->n_next;
    double length = spec->early_stopping == EARLY_NEVER && spec->length_penalty > 0 ? most : o->next[0].made.n;
    return spec->early_stopping == EARLY_FOUND ||
           o->next[0].sum / pow(length, (double)spec->length_penalty) <= o->found[spec->n - 1].score;
}

/* The samples of a beam search with prompt h. */
static void expect_beams(struct job *job, const struct history *h)
{
    struct oracle_search *o = calloc(1, sizeof *o);
    uint32_t status = SAMPLE_OK, n = 0;
    o->n_live = 1;
    o->live[0].h = *h;
    for (bool is_over = false; !is_over; n++) {
        status = oracle_rows(job, o);
        is_over = status || oracle_choose(job, o);
        if (!is_over)
            memcpy(o->live, o->next, sizeof o->live);
        o->n_live = is_over ? o->n_live : o->n_next;
    }
    if (!status && !o->n_found)
        status = SAMPLE_NONE_ALLOWED;
    for (uint32_t i = 0; i < job->spec.n; i++)
        job->expected[i] = status ? (struct expected){.finish = FINISH_ERROR, .status = status, .error_position = h->n + n - 1}
                           : i < o->n_found ? o->found[i].made : (struct expected){.finish = FINISH_GRAMMAR};
    free(o);
}

/* The expected result of a pooling job with prompt h. */
static void expect_states(struct job *job, const struct history *h)
{
    uint32_t kind = job->spec.pooling, n = h->n, begin = kind == POOLING_LAST ? n - 1 : 0;
    uint32_t end = kind == POOLING_CLS ? 1 : n;
    double sums[STATES_WIDTH] = {0};
    job->n_states = kind == POOLING_ALL ? n : 1;
    job->expected[0].finish = FINISH_LENGTH;
    for (uint32_t i = begin; i < end; i++) {
        uint64_t logits = of_type(history_logits(h, i), job->spec.types.n ? job->types[i] : 0);
        float *row = job->states[kind == POOLING_ALL ? i : 0];
        for (uint32_t c = 0; c < STATES_WIDTH; c++) {
            row[c] = fake_state(logits, c, job->has_nan);
            sums[c] += (double)row[c];
        }
        if (isnan(row[0])) {
            job->expected[0] = (struct expected){.finish = FINISH_ERROR, .status = SAMPLE_NON_FINITE, .error_position = i};
            job->n_states = 0;
            return;
        }
    }
    for (uint32_t c = 0; kind == POOLING_MEAN && c < STATES_WIDTH; c++)
        job->states[0][c] = (float)(sums[c] / n);
}

/* Fills what must come of a job, from nothing but its spec. */
static void expect(struct job *job)
{
    const struct request_spec *spec = &job->spec;
    struct history h = {.layout = job->layout, .states = job->recurrent};
    uint32_t start = spec->is_score ? spec->score_start : 1, n_top = spec->is_score ? spec->n_logprobs : spec->n_prompt_logprobs;
    float values[MAX_TOP];
    int32_t ranks[MAX_TOP];
    memset(job->expected, 0, sizeof job->expected);
    job->n_scores = 0;
    for (uint32_t i = 0; i < spec->prompt.n; i++) {
        if ((spec->is_score || spec->wants_prompt_logprobs) && i >= start) {
            uint64_t logits = history_logits(&h, i - 1);
            job->scores[job->n_scores] = fake_score(logits, spec->prompt.ids[i], spec->is_score ? spec->temperature : 1,
                                                    spec->is_score ? LOGPROB_FULL : LOGPROB_RAW, n_top, job->has_nan,
                                                    job->score_ids[job->n_scores], values, ranks);
            if (job->scores[job->n_scores].status) {
                job->expected[0] = (struct expected){.finish = FINISH_ERROR, .status = SAMPLE_NON_FINITE, .error_position = i};
                break;
            }
            job->n_scores++;
        }
        history_add(&h, spec->prompt.ids[i]);
    }
    while (h.n < spec->prompt.n)
        history_add(&h, spec->prompt.ids[h.n]);
    if (spec->is_score && !job->expected[0].finish)
        job->expected[0].finish = FINISH_LENGTH;
    job->n_states = 0;
    if (spec->pooling)
        expect_states(job, &h);
    if (spec->is_beam_search)
        expect_beams(job, &h);
    for (uint32_t s = 0; s < spec->n; s++)
        if (!job->expected[s].finish)
            expect_sample(job, s, h);
}

/* ---- random requests ---- */

static int32_t random_id(uint64_t *random)
{
    return (int32_t)check_below(random, VOCAB);
}

static void random_prompt(struct job *job, uint64_t *random)
{
    uint64_t base = check_below(random, 3);
    uint32_t n = 1 + check_below(random, 60), n_own = check_below(random, 3) ? 0 : check_below(random, n);
    for (uint32_t i = 0; i < n; i++)
        job->prompt[i] = i + n_own < n ? (int32_t)(mix(base, i) % VOCAB) : random_id(random);
    job->spec.prompt = (struct id_list){job->prompt, n};
}

static void random_lists(struct job *job, uint64_t *random)
{
    static const char *const STOPS[] = {"ab", "abab", "cabx", "\xc3\xa9", "b a", "zz", "</s>", "aba", "b"};
    struct request_spec *spec = &job->spec;
    spec->n_stop_strings = check_below(random, 4);
    for (uint32_t i = 0; i < spec->n_stop_strings; i++) {
        const char *text = STOPS[check_below(random, sizeof STOPS / sizeof *STOPS)];
        job->stops[i] = (struct byte_string){text, (uint32_t)strlen(text)};
    }
    spec->stop_strings = job->stops;
    spec->stop_ids = (struct id_list){job->stop_ids, check_below(random, 3)};
    for (uint32_t i = 0; i < spec->stop_ids.n; i++)
        job->stop_ids[i] = (int32_t)check_below(random, VOCAB + 10); /* may lie outside the vocabulary */
    spec->n_bias = check_below(random, 2) * 3;
    spec->bias = job->bias;
    for (uint32_t i = 0; i < spec->n_bias; i++)
        job->bias[i] = (struct token_bias){(int32_t)i * 7, (float)i};
    spec->allowed.ids = job->allowed;
    if (check_below(random, 8) == 0)
        for (spec->allowed.n = 0; spec->allowed.n < 10; spec->allowed.n++)
            job->allowed[spec->allowed.n] = random_id(random);
    spec->n_bad_words = check_below(random, 3);
    spec->bad_words = job->bad_words;
    for (uint32_t i = 0; i < spec->n_bad_words; i++) {
        job->bad_words[i] = (struct id_list){job->words[i], 1 + check_below(random, 3)};
        for (uint32_t j = 0; j < 3; j++)
            job->words[i][j] = random_id(random);
    }
}

/* The same prompt, for its states. */
static void pool_job(struct job *job, uint32_t kind)
{
    struct request_spec spec = job->spec;
    job->spec = (struct request_spec){.prompt = spec.prompt, .salt = spec.salt, .priority = spec.priority, .n = 1, .temperature = 1,
                                      .top_p = 1, .repetition_penalty = 1, .pooling = kind};
}

/* The same request as a beam search. */
static void beam_job(struct job *job, uint64_t random)
{
    static const float PENALTIES[] = {1, 1, 0, 0.5f, -0.5f, 2};
    struct request_spec *spec = &job->spec;
    spec->is_beam_search = spec->wants_logprobs = true;
    spec->n = 1 + check_below(&random, MAX_N);
    spec->n_logprobs = 2 * spec->n;
    spec->mode = LOGPROB_PROCESSED;
    spec->wants_prompt_logprobs = false;
    spec->prior.n = 0;
    spec->seed = spec->sample_index = 0;
    spec->repetition_penalty = 1;
    spec->presence_penalty = spec->frequency_penalty = 0;
    spec->length_penalty = PENALTIES[check_below(&random, sizeof PENALTIES / sizeof *PENALTIES)];
    spec->early_stopping = check_below(&random, 3);
}

/* Any request that the engine takes; its expectation is filled too. */
UNUSED static void random_job(struct job *job, const struct fake *fake, enum engine_policy policy, uint64_t *random)
{
    static const char *const SALTS[] = {"", "", "", "pepper"};
    memset(job, 0, sizeof *job);
    job->layout = &fake->layout;
    job->recurrent = &fake->states;
    job->has_nan = fake->has_nan;
    struct request_spec *spec = &job->spec;
    *spec = (struct request_spec){.n = 1, .temperature = 1, .top_p = 1, .repetition_penalty = 1, .seed = check_below(random, 5)};
    random_prompt(job, random);
    const char *salt = SALTS[check_below(random, 4)];
    spec->salt = (struct byte_string){salt, (uint32_t)strlen(salt)};
    spec->priority = policy == POLICY_PRIORITY ? (int64_t)check_below(random, 3) - 1 : 0;
    spec->n_logprobs = check_below(random, MAX_ASKED + 1);
    if (check_below(random, 5) == 0) {
        spec->is_score = true;
        spec->score_start = 1 + check_below(random, spec->prompt.n);
        spec->temperature = check_below(random, 2) ? 1 : 0.5f;
    } else {
        spec->max_tokens = check_below(random, 6) ? 1 + check_below(random, 30) : UINT32_MAX;
        spec->min_tokens = check_below(random, 3) ? 0 : check_below(random, spec->max_tokens < 12 ? spec->max_tokens : 12);
        spec->wants_logprobs = check_below(random, 2);
        spec->wants_prompt_logprobs = check_below(random, 5) == 0;
        spec->n_prompt_logprobs = check_below(random, MAX_ASKED + 1);
        spec->mode = check_below(random, 3);
        spec->hide_special = check_below(random, 2);
        spec->ignore_eos = check_below(random, 2);
        spec->temperature = check_below(random, 3) ? 0.7f : 0;
        spec->sample_index = check_below(random, 2);
        if (check_below(random, 3) == 0) {
            spec->repetition_penalty = check_below(random, 2) ? 1.25f : 1;
            spec->presence_penalty = check_below(random, 2) ? 0.5f : 0;
            spec->frequency_penalty = check_below(random, 2) ? -0.5f : 0;
        }
        if (check_below(random, 2))
            random_lists(job, random);
        if (check_below(random, 5) == 0) {
            spec->prior = (struct id_list){job->prior, check_below(random, 20)};
            for (uint32_t i = 0; i < spec->prior.n; i++)
                job->prior[i] = random_id(random);
        } else if (check_below(random, 2) == 0) {
            spec->n = 1 + check_below(random, MAX_N);
        }
        if (mix(*random, 1) % 8 == 0)
            pool_job(job, 1 + (uint32_t)(mix(*random, 2) % 4));
        else if (!fake->no_beams && (fake->only_beams || mix(*random, 3) % 5 == 0))
            beam_job(job, mix(*random, 4));
    }
    expect(job);
}

/* ---- engines ---- */

struct trace;
struct setup {
    uint32_t block_tokens, n_pages, max_num_seqs, max_num_batched_tokens;
    uint32_t n_pools; /* 0: one */
    uint32_t windows[4], n_layers; /* 0: one full layer */
    struct kv_need states[MAX_STATES]; /* behind them */
    uint32_t n_states, snapshot_tokens;
    bool has_no_attention;
    enum engine_policy policy;
    bool caches, has_nan, is_async, takes_whole_prompts, only_beams, no_beams;
    uint32_t n_token_types, n_host_slots;
    const struct disk_options *disk;
    const struct connector *connector;
    const struct library_options *library;
    bool has_cache_seed;
    bool is_apart;             /* a random trace has requests that save early, and others that await blocks */
    enum rc (*share)(void *ctx, uint32_t rank, int *descriptor, uint64_t *offset, uint64_t *size_bytes, struct err *err);
    enum rc (*import)(void *ctx, uint32_t rank, int descriptor, uint64_t offset, uint64_t size_bytes, struct imported **imported, const void **pool, struct err *err);
    void (*release_import)(void *ctx, struct imported *imported);
    void (*between)(struct trace *trace); /* called before each operation of a random trace; NULL: nothing is */
    enum preemption preemption;
    bool loads_by_cost;
    struct draft_options drafts;
    const struct draft_source *draft_source;
};

/* An engine over a fake model; NULL with err filled. */
static struct engine *fake_engine(const struct setup *setup, struct fake *fake, struct err *err)
{
    static char bytes[VOCAB * 4];
    static uint64_t offsets[VOCAB + 1];
    struct kv_need needs[4 + MAX_STATES] = {{0}};
    struct kv_place places[4 + MAX_STATES];
    uint32_t n_layers = setup->has_no_attention ? 0 : setup->n_layers ? setup->n_layers : 1;
    struct engine *engine = NULL;
    for (uint32_t i = 0; i < VOCAB; i++) {
        offsets[i + 1] = offsets[i] + strlen(TOKEN_TEXTS[i]);
        memcpy(bytes + offsets[i], TOKEN_TEXTS[i], strlen(TOKEN_TEXTS[i]));
    }
    *fake = (struct fake){.n_pages = setup->n_pages, .has_nan = setup->has_nan, .is_async = setup->is_async, .only_beams = setup->only_beams, .no_beams = setup->no_beams,
                          .takes_whole_prompts = setup->takes_whole_prompts};
    for (uint32_t i = 0; i < n_layers; i++)
        needs[i].window = setup->windows[i];
    for (uint32_t i = 0; i < setup->n_states; i++)
        needs[n_layers + i] = fake->states.needs[i] = setup->states[i];
    if (kv_layout_make(needs, n_layers + setup->n_states, setup->block_tokens, 64, &fake->layout, places, err))
        return NULL;
    fake->states.n = setup->n_states;
    for (uint32_t i = 0; i < setup->n_states; i++) {
        fake->states.places[i] = places[n_layers + i];
        CHECK(fake->layout.page_bytes / setup->states[i].unit_bytes <= setup->block_tokens); /* a cell for each */
    }
    fake->n_parts = setup->n_pools ? setup->n_pools : 1;
    fake->pool = fake->pools = calloc((size_t)fake->n_parts * setup->n_pages * setup->block_tokens, sizeof *fake->pool);
    fake->slots = calloc((size_t)setup->n_host_slots * setup->block_tokens + 1, sizeof *fake->slots);
    struct engine_config config = {
        .layout = fake->layout, .n_pages = setup->n_pages, .max_num_seqs = setup->max_num_seqs,
        .max_num_batched_tokens = setup->max_num_batched_tokens, .max_model_len = MAX_LENGTH, .max_logprobs = MAX_ASKED,
        .vocab_size = VOCAB, .vocab_limit = VOCAB_LIMIT, .banned_ids = BANNED, .n_banned = 1, .policy = setup->policy, .preemption = setup->preemption, .loads_by_cost = setup->loads_by_cost,
        .prefix_caching = setup->caches, .disk = setup->disk, .connector = setup->connector, .library = setup->library, .has_cache_seed = setup->has_cache_seed,
        .snapshot_tokens = setup->snapshot_tokens ? setup->snapshot_tokens : SNAPSHOT_TOKENS, .eos_ids = EOS, .n_eos = 2, .token_bytes = bytes, .token_offsets = offsets, .n_tokens = VOCAB,
        .special_ids = SPECIAL, .n_special = 2, .drafts = setup->drafts, .draft_source = setup->draft_source,
        .runner = {fake, fake_start, fake_finish, setup->is_async, NULL, fake_read_states, STATES_WIDTH, setup->takes_whole_prompts,
                   fake_release, fake_restore, setup->takes_whole_prompts, setup->n_token_types, NULL, NULL, setup->n_host_slots,
                   fake_move, fake_poll_moves, fake->slots, setup->block_tokens * sizeof *fake->slots},
    };
    config.runner.n_ranks = 1;
    config.runner.n_pools = setup->n_pools;
    config.runner.lend = fake_lend;
    config.runner.share = setup->share;
    config.runner.import = setup->import;
    config.runner.release_import = setup->release_import;
    if (engine_create(&config, &engine, err)) {
        free(fake->pools);
        free(fake->slots);
    }
    return engine;
}

static void fake_close(struct engine *engine, struct fake *fake)
{
    engine_destroy(engine);
    CHECK(fake->fails_at || !fake->n_in_flight);
    for (uint32_t i = 0; i < 2; i++) {
        struct fake_flight *flight = &fake->flights[i];
        void *arrays[] = {flight->logits, flight->results, flight->top_ids, flight->top_ranks, flight->top_values};
        for (uint32_t j = 0; j < 5; j++)
            free(arrays[j]);
    }
    for (uint32_t way = MOVE_OUT; way <= MOVE_IN; way++)
        fake_end_moves(fake, way, UINT64_MAX);
    free(fake->pools);
    free(fake->slots);
    free(fake->all_row_states);
}

/* ---- what has come ---- */

static void check_scores(struct job *job, const struct output *output)
{
    bool is_whole = output->finish != FINISH_ABORT;
    CHECK(is_whole ? output->n_prompt_results == job->n_scores : output->n_prompt_results <= job->n_scores);
    uint32_t k = output->n_prompt_logprobs;
    for (uint32_t i = 0; i < output->n_prompt_results && i < job->n_scores; i++) {
        CHECK(!memcmp(&output->prompt_results[i], &job->scores[i], sizeof job->scores[i]));
        CHECK(!memcmp(&output->prompt_top_ids[(size_t)i * k], job->score_ids[i], k * sizeof(int32_t)));
    }
    CHECK(!job->has_scores);
    job->has_scores = true;
}

/* Compares a record with the oracle and counts it. */
static void check_output(struct job *job, const struct output *output)
{
    const struct expected *e = &job->expected[output->sample];
    uint32_t *n = &job->n_received[output->sample], k = job->spec.n_logprobs;
    CHECK_EQ(job->finish[output->sample], FINISH_NONE); /* nothing follows a final record */
    CHECK_EQ(output->first, *n);
    for (uint32_t i = 0; i < output->n_new; i++, ++*n) {
        if (*n >= e->n || output->ids[i] != e->ids[*n]) {
            CHECK_FAIL("request %" PRIu64 " sample %u token %u: wanted %d, have %d", output->request, output->sample, *n,
                       *n < e->n ? e->ids[*n] : -1, output->ids[i]);
            return;
        }
        CHECK((output->results != NULL) == job->spec.wants_logprobs);
        if (output->results) {
            CHECK(!memcmp(&output->results[i], &e->results[*n], sizeof *output->results));
            CHECK(!memcmp(output->top_ids + (size_t)i * k, e->top_ids[*n], k * sizeof(int32_t)));
            CHECK(!memcmp(output->top_values + (size_t)i * k, e->top_values[*n], k * sizeof(float)));
            CHECK(!memcmp(output->top_ranks + (size_t)i * k, e->top_ranks[*n], k * sizeof(int32_t)));
        }
    }
    if (!output->finish)
        return;
    job->finish[output->sample] = output->finish;
    job->n_finals++;
    job->is_done = job->n_finals == job->spec.n;
    CHECK_EQ(output->is_last_of_request, job->is_done);
    if (output->sample == 0 && output->prompt_results)
        check_scores(job, output);
    if (output->states) {
        CHECK_EQ(output->n_states, job->n_states);
        CHECK(!memcmp(output->states, job->states, job->n_states * sizeof *job->states));
    }
    CHECK((output->states != NULL) == (job->spec.pooling && output->finish == FINISH_LENGTH));
    if (output->finish == FINISH_ABORT) {
        CHECK(job->may_abort);
        return;
    }
    CHECK_EQ(output->finish, e->finish);
    CHECK_EQ(*n, e->n);
    if (e->finish == FINISH_STOP_ID || e->finish == FINISH_STOP_STRING)
        CHECK_EQ(output->stop, e->stop);
    CHECK_EQ(output->status, e->status);
    CHECK_EQ(output->error_position, e->error_position);
}

UNUSED static void submit_job(struct engine *engine, struct job *job)
{
    struct err err;
    job->spec.owner = job;
    CHECK_OK(engine_submit(engine, &job->spec, &job->number, &err));
    job->is_submitted = true;
}

/* Takes everything there is for n jobs. */
static void take_all(struct engine *engine, bool finished_only, struct job **jobs, uint32_t n_jobs)
{
    struct output output[3];
    struct err err;
    uint32_t n = 3;
    while (n == 3) {
        CHECK_OK(engine_take(engine, finished_only, output, 3, &n, &err));
        for (uint32_t i = 0; i < n; i++) {
            struct job *job = NULL;
            for (uint32_t j = 0; j < n_jobs && !job; j++)
                if (jobs[j] && jobs[j]->is_submitted && jobs[j]->number == output[i].request)
                    job = jobs[j];
            if (job)
                check_output(job, &output[i]);
            else
                CHECK_FAIL("output of request %" PRIu64 ", which is unknown or done", output[i].request);
        }
    }
}

/* Runs until nothing is left, with the invariants walked after each step. */
UNUSED static void drain(struct engine *engine, struct job **jobs, uint32_t n_jobs)
{
    struct err err;
    bool progressed = true;
    for (uint32_t i = 0; engine_has_unfinished(engine) && i < 1000000 && progressed && !check_failures; i++) {
        REQUIRE_OK(engine_step(engine, &progressed, &err));
        REQUIRE_OK(engine_check(engine, &err));
        if (i % 3 == 0)
            take_all(engine, i % 2, jobs, n_jobs);
    }
    CHECK(!engine_has_unfinished(engine));
    CHECK_OK(engine_step(engine, &progressed, &err)); /* a row without a reader may still be in flight */
    take_all(engine, false, jobs, n_jobs);
    take_all(engine, false, jobs, n_jobs); /* releases what the first has delivered */
    struct engine_stats stats;
    engine_stats(engine, &stats);
    CHECK_EQ(stats.kv_blocks_free, stats.kv_blocks_total);
    CHECK_EQ(stats.num_unfinished + stats.num_running + stats.num_waiting, 0);
    CHECK_EQ(stats.allocations_since_warmup, 0);
    CHECK_OK(engine_check(engine, &err));
}

/* A job with n_prompt tokens of a stream and n_new new tokens that no end token cuts short. Its seed is the stream. */
UNUSED static struct job *stream_job(const struct fake *fake, uint32_t stream, uint32_t n_prompt, uint32_t n_new)
{
    struct job *job = calloc(1, sizeof *job);
    job->layout = &fake->layout;
    job->recurrent = &fake->states;
    job->has_nan = fake->has_nan;
    for (uint32_t i = 0; i < n_prompt; i++)
        job->prompt[i] = (int32_t)(mix(stream, i) % VOCAB);
    job->spec = (struct request_spec){.prompt = {job->prompt, n_prompt}, .n = 1, .temperature = 1, .top_p = 1, .repetition_penalty = 1,
                                      .max_tokens = n_new, .ignore_eos = true, .seed = stream};
    return job;
}

/* A stream's job; jobs of all streams have the same seed. */
UNUSED static struct job *plain_job(const struct fake *fake, uint32_t stream, uint32_t n_prompt, uint32_t n_new)
{
    struct job *job = stream_job(fake, stream, n_prompt, n_new);
    job->spec.seed = 7;
    return job;
}

#endif
