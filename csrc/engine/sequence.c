#include "sequence.h"

#include "../base/carve.h"
#include "../base/mem.h"
#include "beams.h"
#include "grammar.h"
#include "items.h"
#include "pooling.h"
#include "request_check.h"

#include <stdlib.h>
#include <string.h>

/* ---- requests ---- */

/* Places the arrays of a request. In the pass without memory the pointers of `r` stay NULL. */
static void request_lay(struct carver *c, const struct request_spec *spec, uint32_t block_tokens, struct request *r)
{
    int32_t *prompt, *types, *stop_ids, *allowed;
    struct token_bias *bias;
    struct id_list *bad_words;
    struct byte_string *strings;
    char *salt;
    CARVE(c, salt, spec->salt.n);
    CARVE(c, prompt, spec->prompt.n);
    CARVE(c, types, spec->types.n);
    CARVE(c, stop_ids, spec->stop_ids.n);
    CARVE(c, allowed, spec->allowed.n);
    CARVE(c, bias, spec->n_bias);
    CARVE(c, bad_words, spec->n_bad_words);
    CARVE(c, strings, spec->n_stop_strings);
    CARVE(c, r->stops.fallback, spec->n_stop_strings);
    CARVE(c, r->prompt_keys, spec->prompt.n / block_tokens);
    CARVE(c, r->sequences, spec->n);
    items_lay(c, spec, r);
    for (uint32_t i = 0; i < spec->n_bad_words; i++) {
        int32_t *ids = carve(c, spec->bad_words[i].n, sizeof *ids);
        if (c->base)
            bad_words[i] =
                (struct id_list){memcpy(ids, spec->bad_words[i].ids, spec->bad_words[i].n * sizeof *ids), spec->bad_words[i].n};
    }
    for (uint32_t i = 0; i < spec->n_stop_strings; i++) {
        char *bytes = carve(c, spec->stop_strings[i].n, 1);
        uint32_t *fallback = carve(c, spec->stop_strings[i].n, sizeof *fallback);
        if (c->base) {
            strings[i] = (struct byte_string){memcpy(bytes, spec->stop_strings[i].bytes, spec->stop_strings[i].n),
                                              spec->stop_strings[i].n};
            r->stops.fallback[i] = fallback;
        }
    }
    r->spec.salt.bytes = salt;
    r->spec.prompt.ids = prompt;
    r->spec.types.ids = types;
    r->spec.stop_ids.ids = stop_ids;
    r->spec.allowed.ids = allowed;
    r->spec.bias = bias;
    r->spec.bad_words = bad_words;
    r->spec.stop_strings = r->stops.strings = strings;
    r->stops.n = spec->n_stop_strings;
    CARVE(c, r->score_results, r->n_to_score);
    CARVE(c, r->score_top_ids, (size_t)r->n_to_score * r->n_score_top);
    CARVE(c, r->score_top_values, (size_t)r->n_to_score * r->n_score_top);
    CARVE(c, r->score_top_ranks, (size_t)r->n_to_score * r->n_score_top);
    CARVE(c, r->states, (size_t)(r->n_read > r->n_states ? r->n_read : r->n_states) * r->context->config->runner.states_width);
    CARVE(c, r->sums, spec->pooling == POOLING_MEAN ? r->context->config->runner.states_width : 0);
    if (spec->is_beam_search)
        r->beams = carve(c, beams_bytes(r), 1);
}

static int compare_ids(const void *a, const void *b)
{
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

/* Copies the ids inside the vocabulary, ascending and without duplicates. */
static void copy_sorted(struct id_list *target, const struct id_list *source, uint32_t vocab_size)
{
    int32_t *ids = (int32_t *)target->ids;
    uint32_t n = 0, n_unique = 0;
    for (uint32_t i = 0; i < source->n; i++)
        if (source->ids[i] >= 0 && (uint32_t)source->ids[i] < vocab_size)
            ids[n++] = source->ids[i];
    if (n)
        qsort(ids, n, sizeof *ids, compare_ids);
    for (uint32_t i = 0; i < n; i++)
        if (!n_unique || ids[i] != ids[n_unique - 1])
            ids[n_unique++] = ids[i];
    target->n = n_unique;
}

static void copy_bytes(const void *target, const void *source, size_t n_bytes)
{
    if (n_bytes)
        memcpy((void *)target, source, n_bytes);
}

/* The key of a block covers its tokens, all blocks before it, and what its features are. */
static struct hash block_key(const struct request *r, uint32_t block, const struct hash *parent, const int32_t *ids)
{
    char bytes[sizeof *parent + MAX_BLOCK_TOKENS * (sizeof *ids + ITEM_KEY_BYTES)];
    uint32_t block_tokens = r->context->config->layout.block_tokens;
    size_t n_bytes = block_tokens * sizeof *ids;
    memcpy(bytes, parent, sizeof *parent);
    memcpy(bytes + sizeof *parent, ids, n_bytes);
    n_bytes += items_key(&r->spec, block * block_tokens, block_tokens, bytes + sizeof *parent + n_bytes);
    return hash_bytes(&r->context->key, bytes, sizeof *parent + n_bytes);
}

/* Adapters have their numbers from this process, so the keys mean nothing to another one. */
static struct hash adapter_root(const struct sequence_context *context, const struct hash *root, uint64_t adapter)
{
    struct hash of_adapter = hash_bytes(&context->own_key, &adapter, sizeof adapter);
    return hash_bytes(&of_adapter, root, sizeof *root);
}

/* Keys of the prompt's blocks, which belong to the adapter. */
static void request_set_keys(struct request *r)
{
    const struct request_spec *spec = &r->spec;
    const struct sequence_context *context = r->context;
    uint32_t block_tokens = context->config->layout.block_tokens;
    r->root = hash_bytes(&context->key, spec->salt.n ? spec->salt.bytes : "", spec->salt.n);
    if (spec->adapter)
        r->root = adapter_root(context, &r->root, spec->adapter);
    if (spec->types.n)
        r->root = hash_bytes(&r->root, spec->types.ids, spec->types.n * sizeof *spec->types.ids);
    r->root = items_root(r, r->root);
    if (context->config->prefix_caching)
        for (uint32_t b = 0; b < spec->prompt.n / block_tokens; b++)
            r->prompt_keys[b] =
                block_key(r, b, b ? &r->prompt_keys[b - 1] : &r->root, spec->prompt.ids + (size_t)b * block_tokens);
}

static void request_fill(struct request *r, const struct request_spec *spec)
{
    const struct sequence_context *context = r->context;
    copy_bytes(r->spec.prompt.ids, spec->prompt.ids, spec->prompt.n * sizeof *spec->prompt.ids);
    copy_bytes(r->spec.types.ids, spec->types.ids, spec->types.n * sizeof *spec->types.ids);
    copy_bytes(r->spec.salt.bytes, spec->salt.bytes, spec->salt.n);
    copy_bytes(r->spec.bias, spec->bias, spec->n_bias * sizeof *spec->bias);
    copy_sorted(&r->spec.stop_ids, &spec->stop_ids, context->config->vocab_size);
    copy_sorted(&r->spec.allowed, &spec->allowed, context->config->vocab_size);
    stop_set_prepare(&r->stops);
    if (spec->pooling == POOLING_MEAN)
        memset(r->sums, 0, context->config->runner.states_width * sizeof *r->sums);
    r->spec.prior.ids = NULL;
    r->spec.grammar = (struct grammar_spec){0};
    items_fill(r, spec);
    request_set_keys(r);
}

static void request_plan_scores(struct request *r)
{
    const struct request_spec *spec = &r->spec;
    if (!spec->is_score && !spec->wants_prompt_logprobs)
        return;
    r->first_scored = spec->is_score ? spec->score_start : 1;
    r->n_to_score = spec->prompt.n - r->first_scored;
    r->n_score_top = spec->is_score ? spec->n_logprobs : spec->n_prompt_logprobs;
}

/* ---- sequences ---- */

static bool has_penalties(const struct request_spec *spec)
{
    return !spec->is_score && (spec->repetition_penalty != 1 || spec->presence_penalty != 0 || spec->frequency_penalty != 0);
}

uint32_t request_capacity(const struct request *r)
{
    uint32_t n_prior = r->spec.prior.n, room = r->context->config->max_model_len - r->spec.prompt.n - n_prior;
    uint32_t wanted = r->spec.max_tokens > n_prior ? r->spec.max_tokens - n_prior : 0;
    if (r->spec.is_score || r->spec.pooling)
        return 0;
    return wanted < room ? wanted : room;
}

static uint32_t seen_capacity(const struct request *r)
{
    uint64_t n = (uint64_t)r->spec.prior.n + request_capacity(r) + (r->spec.repetition_penalty != 1 ? r->spec.prompt.n : 0);
    if (!has_penalties(&r->spec))
        return 0;
    return (uint32_t)(n < r->context->config->vocab_size ? n : r->context->config->vocab_size);
}

/* Most drafts of a step; 0: the request gets none. */
static uint32_t drafts_of(const struct request *r)
{
    const struct engine_config *config = r->context->config;
    if (!r->context->drafts || r->spec.no_drafts || request_capacity(r) < 2)
        return 0;
    return config->drafts.k ? config->drafts.k : ADAPTIVE_DRAFTS;
}

/* Places the arrays of a sequence: first those that must start as zeros, last those that may stay untouched for long. Returns
 * the number of bytes to clear. */
static size_t sequence_lay(struct carver *c, const struct request *r, struct sequence *q)
{
    const struct request_spec *spec = &r->spec;
    uint32_t block_tokens = r->context->config->layout.block_tokens, n_seen = seen_capacity(r), n_slots = 0;
    uint32_t n_prior = spec->prior.n, capacity = request_capacity(r), n_most = spec->prompt.n + n_prior + capacity;
    q->drafts.most = drafts_of(r);
    const struct draft_source *source = r->context->drafts;
    if (n_seen)
        for (n_slots = 16; n_slots < 2 * n_seen;)
            n_slots *= 2;
    CARVE(c, q->stop_states, r->stops.n);
    CARVE(c, q->seen_slots, n_slots);
    q->drafts.memory = q->drafts.most ? carve(c, source->bytes(source->ctx, spec->prompt.n + n_prior, n_most), 1) : NULL;
    size_t n_zero = c->used;
    q->most_banned = r->context->config->n_eos + spec->stop_ids.n + spec->n_bad_words;
    CARVE(c, q->banned, (size_t)(1 + q->drafts.most) * q->most_banned);
    CARVE(c, q->seen, n_seen);
    CARVE(c, q->seen_ahead, (size_t)q->drafts.most * n_seen);
    q->seen_capacity = n_seen;
    CARVE(c, q->keys, n_most / block_tokens - spec->prompt.n / block_tokens);
    CARVE(c, q->output, (size_t)n_prior + capacity);
    CARVE(c, q->epochs, capacity);
    if (spec->wants_logprobs) {
        CARVE(c, q->results, capacity);
        CARVE(c, q->top_ids, (size_t)capacity * spec->n_logprobs);
        CARVE(c, q->top_values, (size_t)capacity * spec->n_logprobs);
        CARVE(c, q->top_ranks, (size_t)capacity * spec->n_logprobs);
    }
    q->seen_mask = n_slots ? n_slots - 1 : 0;
    q->capacity = capacity;
    if (!n_seen)
        q->seen = NULL;
    return n_zero;
}

/* The slot of an id in the hash table of seen tokens, or the empty one where it belongs. */
static uint32_t seen_slot(const struct sequence *q, int32_t id)
{
    uint32_t slot = (uint32_t)id * 2654435769u & q->seen_mask;
    while (q->seen_slots[slot] && q->seen[q->seen_slots[slot] - 1].id != id)
        slot = (slot + 1) & q->seen_mask;
    return slot;
}

/* The entry of an id in the list of seen tokens; makes one if there is none. */
static struct token_seen *seen_entry(struct sequence *q, int32_t id)
{
    uint32_t slot = seen_slot(q, id);
    if (!q->seen_slots[slot]) {
        q->seen[q->n_seen] = (struct token_seen){.id = id};
        q->seen_slots[slot] = ++q->n_seen;
    }
    return &q->seen[q->seen_slots[slot] - 1];
}

const struct token_seen *sequence_seen_ahead(struct sequence *q, uint32_t n_ahead, uint32_t *n)
{
    if (!n_ahead) {
        *n = q->n_seen_ahead = q->n_seen;
        return q->seen;
    }
    struct token_seen *list = q->seen_ahead + (size_t)(n_ahead - 1) * q->seen_capacity;
    int32_t id = q->output[q->n_output + n_ahead - 1];
    memcpy(list, n_ahead > 1 ? list - q->seen_capacity : q->seen, q->n_seen_ahead * sizeof *list);
    uint32_t slot = seen_slot(q, id), at = q->seen_slots[slot] ? q->seen_slots[slot] - 1 : q->n_seen;
    while (at < q->n_seen_ahead && list[at].id != id)
        at++;
    if (at == q->n_seen_ahead)
        list[q->n_seen_ahead++] = (struct token_seen){.id = id};
    list[at].count++;
    *n = q->n_seen_ahead;
    return list;
}

static bool contains(const int32_t *ids, uint32_t n, int32_t id)
{
    for (uint32_t i = 0; i < n; i++)
        if (ids[i] == id)
            return true;
    return false;
}

/* states: of the stop strings' automata; they advance. */
static bool completes_stop_string(const struct request *r, int32_t id, uint32_t *states, bool counts, uint32_t *which)
{
    const struct engine_config *config = r->context->config;
    if (!r->stops.n || (uint32_t)id >= config->n_tokens || (r->spec.hide_special && r->context->is_special[id]))
        return false;
    uint64_t begin = config->token_offsets[id], end = config->token_offsets[id + 1];
    return stop_set_feed(&r->stops, states, config->token_bytes + begin, (uint32_t)(end - begin), counts, which);
}

/* Feeds the open bytes at the end of the prompt to the stop strings. If the prompt ends inside a character that the output
 * completes, the text of the output begins with that character. */
static void feed_open_character(struct sequence *q)
{
    const struct request *r = q->request;
    const struct engine_config *config = r->context->config;
    char bytes[STOP_OPEN_BYTES];
    uint32_t n = 0, which;
    for (uint32_t i = r->stops.n ? r->spec.prompt.n : 0; i-- > 0 && n < sizeof bytes;) {
        int32_t id = r->spec.prompt.ids[i];
        if ((uint32_t)id >= config->n_tokens || (r->spec.hide_special && r->context->is_special[id]))
            continue;
        for (uint64_t at = config->token_offsets[id + 1]; at-- > config->token_offsets[id] && n < sizeof bytes;)
            bytes[sizeof bytes - ++n] = config->token_bytes[at];
    }
    uint32_t n_open = stop_open_bytes(bytes + sizeof bytes - n, n);
    stop_set_feed(&r->stops, q->stop_states, bytes + sizeof bytes - n_open, n_open, false, &which);
}

void sequence_fail_grammar(struct sequence *q, const char *error)
{
    q->status = STATUS_GRAMMAR;
    q->error = error;
    q->error_position = sequence_n_known(q);
    q->finish = FINISH_ERROR;
}

enum finish sequence_grammar_rule(struct sequence *q)
{
    enum match match = matcher_look(q->matcher);
    if (match == MATCH_FAILED)
        sequence_fail_grammar(q, matcher_error(q->matcher));
    if (match == MATCH_ENDED && q->n_output >= q->request->spec.min_tokens)
        return FINISH_GRAMMAR;
    return q->finish;
}

/* Lets the grammar consume a token at once, because no mask is needed behind it; returns the finish that it demands. */
static enum finish take_now(struct sequence *q, int32_t id)
{
    matcher_take_now(q->matcher, id);
    return sequence_grammar_rule(q);
}

enum finish sequence_token_rule(const struct request *r, int32_t id, uint32_t n_output, uint32_t *stop_states, int32_t *stop)
{
    const struct request_spec *spec = &r->spec;
    const struct engine_config *config = r->context->config;
    uint32_t which;
    bool counts = n_output > spec->min_tokens;
    bool ends_text = completes_stop_string(r, id, stop_states, counts, &which); /* the automata must see all bytes */
    if (counts) {
        if (!spec->ignore_eos && contains(config->eos_ids, config->n_eos, id))
            return FINISH_EOS;
        if (spec->stop_ids.n && bsearch(&id, spec->stop_ids.ids, spec->stop_ids.n, sizeof id, compare_ids)) {
            *stop = id;
            return FINISH_STOP_ID;
        }
        if (ends_text) {
            *stop = (int32_t)which;
            return FINISH_STOP_STRING;
        }
    }
    bool goes_on = n_output < spec->max_tokens && spec->prompt.n + n_output < config->max_model_len;
    return goes_on ? FINISH_NONE : FINISH_LENGTH;
}

/* The first rule that ends the sequence with its newest token, in the order of docs/develop/engine.md, Ends. */
static enum finish stop_rule(struct sequence *q, int32_t id)
{
    enum finish ends = sequence_token_rule(q->request, id, q->n_output, q->stop_states, &q->stop);
    if (!q->matcher || (ends != FINISH_NONE && ends != FINISH_LENGTH))
        return ends;
    if (ends == FINISH_NONE && !q->drafts.has_more) {
        matcher_take(q->matcher, id);
        return FINISH_NONE;
    }
    enum finish grammar_ends = take_now(q, id);
    return grammar_ends != FINISH_NONE ? grammar_ends : ends;
}

static void add_token(struct sequence *q, int32_t id)
{
    q->output[q->n_output++] = id;
    if (q->seen)
        seen_entry(q, id)->count++;
    if (q->finish == FINISH_NONE)
        q->finish = stop_rule(q, id);
}

static struct sequence *sequence_create(struct request *r, const struct request_spec *spec, uint32_t sample)
{
    struct carver size = {NULL, sizeof(struct sequence)};
    struct sequence dummy;
    size_t n_zero = sequence_lay(&size, r, &dummy);
    struct carver c = {mem_alloc(size.used), sizeof(struct sequence)};
    if (!c.base)
        return NULL;
    memset(c.base, 0, n_zero);
    struct sequence *q = (struct sequence *)c.base;
    sequence_lay(&c, r, q);
    q->request = r;
    q->sample = sample;
    q->needs_values = q->seen || spec->n_bad_words || r->beams;
    q->drafts.n_wanted = r->context->config->drafts.k ? q->drafts.most : q->drafts.most > 0;
    for (uint32_t i = 0; i < q->drafts.most; i++)
        q->draft_rates[i] = FIRST_RATE;
    if (q->seen && spec->repetition_penalty != 1)
        for (uint32_t i = 0; i < spec->prompt.n; i++)
            seen_entry(q, spec->prompt.ids[i])->in_prompt = 1;
    feed_open_character(q);
    for (uint32_t i = 0; i < spec->prior.n; i++)
        add_token(q, spec->prior.ids[i]);
    if (spec->is_score && !r->n_to_score)
        q->finish = FINISH_LENGTH;
    if (q->drafts.memory)
        r->context->drafts->begin(r->context->drafts->ctx, q);
    uint32_t n_blocks = sequence_n_known(q) / r->context->config->layout.block_tokens;
    if (n_blocks && r->context->config->prefix_caching)
        sequence_key(q, n_blocks - 1);
    return q;
}

/* Holds the request's adapter. */
static enum rc take_adapter(struct request *r, struct err *err)
{
    struct adapters *adapters = r->context->config->runner.adapters;
    r->adapter = adapters && r->spec.adapter ? adapters_find(adapters, r->spec.adapter) : NULL;
    if (r->adapter || !r->spec.adapter)
        return RC_OK;
    err_set(err, RC_INVALID, "lora_request: the adapter is no longer loaded; load_adapter() loads it");
    err_name(err, "lora_request", NULL);
    return RC_INVALID;
}

void request_move(struct request *r, struct adapter *adapter)
{
    struct adapters *adapters = r->context->config->runner.adapters;
    adapters_release(adapters, r->adapter);
    r->adapter = adapters_hold(adapters, adapter);
    r->spec.adapter = adapter->number;
    request_set_keys(r);
}

enum rc request_create(const struct sequence_context *context, const struct request_spec *given, struct request **result,
                       struct err *err)
{
    struct request_spec completed = *given;
    const struct request_spec *spec = &completed;
    if (given->is_beam_search)
        beams_complete(&completed);
    enum rc rc = request_check(context->config, spec, err);
    if (rc)
        return rc;
    struct request plan = {.spec = *spec, .context = context};
    request_plan_scores(&plan);
    pooling_plan(&plan);
    struct carver size = {NULL, sizeof plan};
    request_lay(&size, spec, context->config->layout.block_tokens, &plan);
    struct carver c = {mem_alloc(size.used), sizeof plan};
    if (!c.base)
        return err_set(err, RC_MEMORY, "request: out of memory, wanted %zu bytes", size.used);
    struct request *r = (struct request *)c.base;
    *r = plan;
    request_lay(&c, spec, context->config->layout.block_tokens, r);
    request_fill(r, spec);
    if (r->beams)
        beams_begin(r);
    rc = take_adapter(r, err);
    if (rc) {
        request_destroy(r);
        return rc;
    }
    for (r->n_held = 0; r->n_held < spec->n; r->n_held++) {
        struct sequence *q = sequence_create(r, spec, r->n_held);
        if (!q) {
            rc = err_set(err, RC_MEMORY, "request: out of memory for sample %u of %u", r->n_held, spec->n);
            request_destroy(r);
            return rc;
        }
        r->sequences[r->n_held] = q;
    }
    r->n_unreported = spec->n;
    *result = r;
    return RC_OK;
}

static void request_free(struct request *r)
{
    grammar_release(r->grammar);
    if (r->adapter)
        adapters_release(r->context->config->runner.adapters, r->adapter);
    mem_free(r);
}

void sequence_release(struct sequence *q)
{
    struct request *r = q->request;
    r->sequences[q->sample] = NULL;
    mem_free(q);
    if (--r->n_held == 0)
        request_free(r);
}

void request_destroy(struct request *r)
{
    uint32_t n = r->spec.n;
    if (!r->n_held) {
        request_free(r);
        return;
    }
    for (uint32_t i = 0, left = r->n_held; i < n && left; i++)
        if (r->sequences[i]) {
            left--;
            sequence_release(r->sequences[i]);
        }
}

/* ---- questions ---- */

struct order sequence_order(const struct sequence *q)
{
    return (struct order){q->request->spec.priority, q->request->number, q->sample};
}

bool order_is_ahead(const struct order *a, const struct order *b)
{
    if (a->priority != b->priority)
        return a->priority < b->priority;
    return a->number != b->number ? a->number < b->number : a->sample < b->sample;
}

bool sequence_is_ahead(const struct sequence *a, const struct sequence *b)
{
    struct order x = sequence_order(a), y = sequence_order(b);
    return order_is_ahead(&x, &y);
}

uint32_t sequence_n_known(const struct sequence *q)
{
    return q->request->spec.prompt.n + q->n_output;
}

uint32_t sequence_n_expected(const struct sequence *q)
{
    return sequence_n_known(q) + q->n_pending;
}

uint32_t sequence_goal(const struct sequence *q)
{
    uint32_t n = sequence_n_expected(q);
    if (sequence_only_scores(q))
        return q->request->spec.prompt.n - 1;
    bool is_last = q->n_output + q->n_pending >= q->request->spec.max_tokens || n >= q->request->context->config->max_model_len;
    return q->n_pending && is_last ? n - 1 : n;
}

bool sequence_must_wait(const struct sequence *q)
{
    return ((q->needs_values || q->drafts.n_wanted) && q->n_pending) || sequence_is_scoring(q) || q->request->spec.pooling;
}

bool sequence_is_scoring(const struct sequence *q)
{
    return q->sample == 0 && q->request->n_scored < q->request->n_to_score;
}

bool sequence_only_scores(const struct sequence *q)
{
    return q->request->spec.is_score || (q->finish != FINISH_NONE && sequence_is_scoring(q));
}

bool sequence_is_new(const struct sequence *q)
{
    return q->n_output == q->request->spec.prior.n;
}

bool sequence_is_whole(const struct sequence *q)
{
    return q->request->spec.pooling || sequence_is_scoring(q);
}

void sequence_start_over(struct sequence *q)
{
    struct request *r = q->request;
    if (q->sample)
        return;
    r->n_scored = r->n_pooled = 0;
    if (r->spec.pooling == POOLING_MEAN)
        memset(r->sums, 0, r->context->config->runner.states_width * sizeof *r->sums);
}

uint32_t sequence_hit_limit(const struct sequence *q)
{
    const struct request *r = q->request;
    uint32_t most = sequence_n_known(q) - 1;
    uint32_t first_wanted = r->first_scored + r->n_scored - 1; /* row whose logits score the next token */
    if (r->context->config->runner.takes_whole_prompts)
        return 0;
    if (r->spec.pooling)
        return r->first_pooled + r->n_pooled < most ? r->first_pooled + r->n_pooled : most;
    return sequence_is_scoring(q) && first_wanted < most ? first_wanted : most;
}

int32_t sequence_token(const struct sequence *q, uint32_t position)
{
    uint32_t n_prompt = q->request->spec.prompt.n;
    return position < n_prompt ? q->request->spec.prompt.ids[position] : q->output[position - n_prompt];
}

void sequence_forget_keys(struct sequence *q)
{
    q->n_keys = q->n_kept_early = q->n_saved_early = 0;
    q->has_asked = q->has_sought = false;
    q->failed_room = q->sought_by = 0;
    q->n_overtaken = 0;
}

const struct hash *sequence_key(struct sequence *q, uint32_t block)
{
    const struct request *r = q->request;
    uint32_t block_tokens = r->context->config->layout.block_tokens, n_prompt_keys = r->spec.prompt.n / block_tokens;
    if (block < n_prompt_keys)
        return &r->prompt_keys[block];
    while (n_prompt_keys + q->n_keys <= block) {
        uint32_t b = n_prompt_keys + q->n_keys;
        int32_t ids[MAX_BLOCK_TOKENS];
        for (uint32_t i = 0; i < block_tokens; i++)
            ids[i] = sequence_token(q, b * block_tokens + i);
        q->keys[q->n_keys] = block_key(r, b, b ? sequence_key(q, b - 1) : &r->root, ids);
        q->n_keys++;
    }
    return &q->keys[block - n_prompt_keys];
}

/* ---- tokens ---- */

void sequence_accept(struct sequence *q, const struct sample_result *result, const int32_t *top_ids, const float *top_values,
                     const int32_t *top_ranks, uint32_t epoch)
{
    const struct request_spec *spec = &q->request->spec;
    uint32_t at = q->n_output - spec->prior.n, k = spec->n_logprobs;
    if (q->results) {
        q->results[at] = *result;
        copy_bytes(q->top_ids + (size_t)at * k, top_ids, k * sizeof *top_ids);
        copy_bytes(q->top_values + (size_t)at * k, top_values, k * sizeof *top_values);
        copy_bytes(q->top_ranks + (size_t)at * k, top_ranks, k * sizeof *top_ranks);
    }
    q->epochs[at] = epoch;
    add_token(q, result->id);
}
