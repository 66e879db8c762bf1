#include "request_check.h"

#include "items.h"

#include <math.h>

#define MAX_SAMPLES 16384u
/* Within these bounds no finite logit becomes infinite in float32, whatever the other parameters are. */
#define MIN_REPETITION 1e-6f
#define MAX_REPETITION 1e6f
#define MAX_BIAS 1e20f
#define MIN_TEMPERATURE 1e-5f /* least for scores; draws below it are greedy */
#define MAX_PROMPT_RESULT_BYTES ((uint64_t)1 << 30)

#define REFUSE(parameter, ...)                        \
    do {                                              \
        err_set(err, RC_INVALID, __VA_ARGS__);        \
        err_name(err, parameter, NULL);               \
        return RC_INVALID;                            \
    } while (0)

static bool in_vocabulary(const struct engine_config *config, int32_t id)
{
    return id >= 0 && (uint32_t)id < config->vocab_size;
}

static enum rc check_ids(const struct engine_config *config, const struct id_list *list, const char *parameter, struct err *err)
{
    for (uint32_t i = 0; i < list->n; i++)
        if (!in_vocabulary(config, list->ids[i]))
            REFUSE(parameter, "Token id %d is out of vocabulary", list->ids[i]);
    return RC_OK;
}

static enum rc check_lengths(const struct engine_config *config, const struct request_spec *spec, struct err *err)
{
    uint64_t length = (uint64_t)spec->prompt.n + spec->prior.n;
    uint32_t most = config->max_model_len;
    if (!spec->prompt.n)
        REFUSE("prompt", "The decoder prompt cannot be empty");
    if (length > most)
        REFUSE("prompt", "The decoder prompt (length %llu) is longer than the maximum model length of %u.",
               (unsigned long long)length, most);
    if (length == most && !spec->prior.n && !spec->is_score && !spec->pooling)
        REFUSE("prompt",
               "The decoder prompt (length %llu) plus the number of requested output tokens (at least 1) is longer than the "
               "maximum model length of %u.",
               (unsigned long long)length, most);
    return RC_OK;
}

static enum rc check_samples(const struct request_spec *spec, struct err *err)
{
    if (spec->n < 1)
        REFUSE("n", "n must be at least 1, got %u.", spec->n);
    if (spec->n > MAX_SAMPLES)
        REFUSE("n", "n must be at most %u, got %u.", MAX_SAMPLES, spec->n);
    if (spec->n > 1 && spec->prior.n)
        REFUSE("n", "n must be 1 with output_token_ids, got %u.", spec->n);
    if (!isfinite(spec->awaits_s) || spec->awaits_s < 0)
        REFUSE("awaits_s", "awaits_s must be at least 0, got %g.", (double)spec->awaits_s);
    if (spec->sample_index > UINT32_MAX - spec->n)
        REFUSE("sample_index", "sample_index must be less than 2**32 - n, got %u.", spec->sample_index);
    return RC_OK;
}

static enum rc check_score(const struct request_spec *spec, struct err *err)
{
    if (spec->n != 1 || spec->prior.n)
        REFUSE("n", "a score request has one sample and no output_token_ids, got n=%u and %u ids.", spec->n, spec->prior.n);
    if (spec->score_start < 1 || spec->score_start > spec->prompt.n)
        REFUSE("start", "start must be in [1, %u], got %u.", spec->prompt.n, spec->score_start);
    if (!isfinite(spec->temperature) || spec->temperature <= 0)
        REFUSE("temperature", "temperature must be greater than zero, got %g.", (double)spec->temperature);
    if (spec->temperature < MIN_TEMPERATURE)
        REFUSE("temperature", "temperature must be at least %g to score, got %g.", (double)MIN_TEMPERATURE,
               (double)spec->temperature);
    return RC_OK;
}

static enum rc check_pooling(const struct engine_config *config, const struct request_spec *spec, struct err *err)
{
    uint64_t n_bytes = (uint64_t)spec->prompt.n * config->runner.states_width * sizeof(float);
    if (!config->runner.states_width || spec->pooling > POOLING_ALL)
        REFUSE("pooling", "pooling: wanted a model with states and one of 4 kinds, have width %u and kind %u",
               config->runner.states_width, spec->pooling);
    if (config->runner.takes_whole_prompts && spec->prompt.n > config->max_num_batched_tokens)
        REFUSE("prompt", "The prompt (length %u) is longer than max_num_batched_tokens=%u, and this model takes whole prompts.",
               spec->prompt.n, config->max_num_batched_tokens);
    if (spec->n != 1 || spec->prior.n)
        REFUSE("n", "a pooling request has one sample and no output_token_ids, got n=%u and %u ids.", spec->n, spec->prior.n);
    if (spec->pooling == POOLING_ALL && n_bytes > MAX_PROMPT_RESULT_BYTES)
        REFUSE("pooling", "states of all tokens: wanted at most %llu bytes, have %llu; split the prompt",
               (unsigned long long)MAX_PROMPT_RESULT_BYTES, (unsigned long long)n_bytes);
    return RC_OK;
}

/* Refuses a number of the request unless the condition holds. */
#define NUMBER(name, holds, wanted)                                                             \
    do {                                                                                        \
        if (!(holds))                                                                           \
            REFUSE(#name, #name " must be " wanted ", got %g.", (double)spec->name);            \
    } while (0)

static enum rc check_sampling(const struct request_spec *spec, struct err *err)
{
    float repetition = spec->repetition_penalty;
    NUMBER(temperature, isfinite(spec->temperature), "a finite number");
    NUMBER(temperature, spec->temperature >= 0, "non-negative");
    NUMBER(top_p, spec->top_p > 0 && spec->top_p <= 1, "in (0, 1]");
    NUMBER(min_p, spec->min_p >= 0 && spec->min_p <= 1, "in [0, 1]");
    NUMBER(presence_penalty, fabsf(spec->presence_penalty) <= 2, "in [-2, 2]");
    NUMBER(frequency_penalty, fabsf(spec->frequency_penalty) <= 2, "in [-2, 2]");
    NUMBER(repetition_penalty, isfinite(repetition), "a finite number");
    NUMBER(repetition_penalty, repetition > 0, "greater than zero");
    if (repetition < MIN_REPETITION || repetition > MAX_REPETITION)
        REFUSE("repetition_penalty", "repetition_penalty must be in [%g, %g], got %g.", (double)MIN_REPETITION,
               (double)MAX_REPETITION, (double)repetition);
    if (spec->max_tokens < 1)
        REFUSE("max_tokens", "max_tokens must be at least 1, got %u.", spec->max_tokens);
    if (spec->min_tokens > spec->max_tokens)
        REFUSE("min_tokens", "min_tokens must be less than or equal to max_tokens=%u, got %u.", spec->max_tokens,
               spec->min_tokens);
    return RC_OK;
}

static enum rc check_beams(const struct engine_config *config, const struct request_spec *spec, struct err *err)
{
    uint32_t room = config->max_model_len - spec->prompt.n, n_tokens = spec->max_tokens < room ? spec->max_tokens : room;
    uint64_t n_bytes = (uint64_t)n_tokens * spec->n * BEAM_CANDIDATES(spec->n) * 6 * sizeof(float);
    bool has_penalties = spec->repetition_penalty != 1 || spec->presence_penalty != 0 || spec->frequency_penalty != 0;
    if (spec->n > MAX_BEAM_WIDTH)
        REFUSE("beam_width", "beam_width must be at most %u, got %u.", MAX_BEAM_WIDTH, spec->n);
    if (n_bytes > MAX_PROMPT_RESULT_BYTES)
        REFUSE("beam_width", "candidates of %u beams of %u tokens: wanted at most %llu bytes, have %llu; lower max_tokens",
               spec->n, n_tokens, (unsigned long long)MAX_PROMPT_RESULT_BYTES, (unsigned long long)n_bytes);
    if (has_penalties || spec->prior.n || spec->wants_prompt_logprobs)
        return err_set(err, RC_UNSUPPORTED,
                       "beam search: wanted no penalties, output_token_ids or prompt_logprobs; leave them out");
    NUMBER(length_penalty, isfinite(spec->length_penalty), "a finite number");
    return RC_OK;
}

static enum rc check_logprobs(const struct engine_config *config, const struct request_spec *spec, struct err *err)
{
    if (spec->n_logprobs > config->max_logprobs && !spec->is_beam_search)
        REFUSE("logprobs", "Requested sample logprobs of %u, which is greater than max allowed: %u", spec->n_logprobs,
               config->max_logprobs);
    if (spec->n_prompt_logprobs > config->max_logprobs)
        REFUSE("prompt_logprobs", "Requested prompt logprobs of %u, which is greater than max allowed: %u",
               spec->n_prompt_logprobs, config->max_logprobs);
    uint32_t n_top = spec->is_score ? spec->n_logprobs : spec->n_prompt_logprobs;
    uint64_t n_bytes = (uint64_t)spec->prompt.n * (sizeof(struct sample_result) + n_top * 3 * sizeof(float));
    if ((spec->is_score || spec->wants_prompt_logprobs) && n_bytes > MAX_PROMPT_RESULT_BYTES)
        REFUSE(spec->is_score ? "logprobs" : "prompt_logprobs",
               "prompt logprobs: wanted at most %llu bytes, have %llu; ask for fewer alternatives",
               (unsigned long long)MAX_PROMPT_RESULT_BYTES, (unsigned long long)n_bytes);
    if (spec->mode > LOGPROB_PROCESSED)
        REFUSE("logprobs_mode", "logprobs_mode must be one of 0, 1, 2, got %u.", spec->mode);
    return RC_OK;
}

static enum rc check_lists(const struct engine_config *config, const struct request_spec *spec, struct err *err)
{
    for (uint32_t i = 0; i < spec->n_stop_strings; i++)
        if (!spec->stop_strings[i].n)
            REFUSE("stop", "stop cannot contain an empty string.");
    if (spec->n_stop_strings && !config->token_offsets)
        REFUSE("stop", "stop needs a tokenizer; skip_tokenizer_init is True");
    for (uint32_t i = 0; i < spec->n_bias; i++) {
        const struct token_bias *bias = &spec->bias[i];
        if (!in_vocabulary(config, bias->id))
            REFUSE("logit_bias", "token_id(s) [%d] in logit_bias contain out-of-vocab token ids. Vocabulary size: %u", bias->id,
                   config->vocab_size);
        if (isnan(bias->value) || bias->value == INFINITY)
            REFUSE("logit_bias", "logit_bias values must be finite or -inf, got %g for token %d.", (double)bias->value,
                   bias->id);
        if (fabsf(bias->value) > MAX_BIAS && bias->value != -INFINITY)
            REFUSE("logit_bias", "logit_bias values must be -inf, which bans the token, or in [-%g, %g], got %g for token %d.",
                   (double)MAX_BIAS, (double)MAX_BIAS, (double)bias->value, bias->id);
    }
    for (uint32_t i = 0; i < spec->allowed.n; i++)
        if (!in_vocabulary(config, spec->allowed.ids[i]))
            REFUSE("allowed_token_ids", "allowed_token_ids contains out-of-vocab token id!");
    for (uint32_t i = 0; i < spec->n_bad_words; i++) {
        if (!spec->bad_words[i].n)
            REFUSE("bad_words", "bad_words cannot contain an empty string.");
        enum rc rc = check_ids(config, &spec->bad_words[i], "bad_words", err);
        if (rc)
            return rc;
    }
    return RC_OK;
}

static enum rc check_types(const struct engine_config *config, const struct request_spec *spec, struct err *err)
{
    if (spec->types.n && spec->types.n != spec->prompt.n)
        REFUSE("token_type_ids", "token_type_ids must be as many as the prompt's %u tokens, got %u.", spec->prompt.n,
               spec->types.n);
    if (spec->types.n && (!spec->pooling || !config->runner.n_token_types))
        REFUSE("token_type_ids",
               "token_type_ids are for embeddings and classes of models whose tokens have types; leave them out.");
    for (uint32_t i = 0; i < spec->types.n; i++)
        if (spec->types.ids[i] < 0 || (uint32_t)spec->types.ids[i] >= config->runner.n_token_types)
            REFUSE("token_type_ids", "token_type_ids must be below %u, the model's number of types, got %d.",
                   config->runner.n_token_types, spec->types.ids[i]);
    return RC_OK;
}

enum rc request_check_prompt(const struct engine_config *config, const struct request_spec *spec, struct err *err)
{
    enum rc rc = check_ids(config, &spec->prompt, "prompt", err);
    rc = rc ? rc : check_types(config, spec, err);
    return rc ? rc : items_check(config, spec, err);
}

/* Checks the parameters of the request's kind: pooling, scoring or sampling. */
static enum rc check_kind(const struct engine_config *config, const struct request_spec *spec, struct err *err)
{
    if (spec->pooling)
        return check_pooling(config, spec, err);
    if (config->runner.lacks_logits)
        return err_set(err, RC_UNSUPPORTED, "LLM.generate() is only supported for generative models.");
    if (spec->is_score)
        return check_score(spec, err);
    enum rc rc = check_sampling(spec, err);
    return rc || !spec->is_beam_search ? rc : check_beams(config, spec, err);
}

enum rc request_check(const struct engine_config *config, const struct request_spec *spec, struct err *err)
{
    enum rc rc = check_lengths(config, spec, err);
    if (!rc)
        rc = request_check_prompt(config, spec, err);
    if (!rc)
        rc = check_ids(config, &spec->prior, "output_token_ids", err);
    if (!rc)
        rc = check_samples(spec, err);
    if (!rc)
        rc = check_kind(config, spec, err);
    if (!rc)
        rc = check_logprobs(config, spec, err);
    if (!rc)
        rc = check_lists(config, spec, err);
    if (!rc && spec->priority && config->policy == POLICY_FCFS)
        REFUSE("priority", "priority is %lld but scheduling_policy is 'fcfs'", (long long)spec->priority);
    return rc;
}
