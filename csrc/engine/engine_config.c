#include "engine_config.h"

#include "../base/mem.h"
#include "token_index.h"

#include <errno.h>
#include <string.h>
#include <sys/random.h>

#define REFUSE(option, ...)                    \
    do {                                       \
        err_set(err, RC_CONFIG, __VA_ARGS__);  \
        err_name(err, option, NULL);           \
        return RC_CONFIG;                      \
    } while (0)

/* The longest sequence that fits into the pool when it is the only one. */
static uint32_t longest_that_fits(const struct engine_config *c)
{
    uint32_t low = 0, high = c->max_model_len;
    while (low < high) {
        uint32_t middle = low + (high - low + 1) / 2;
        if (kv_layout_pages(&c->layout, middle, c->max_num_batched_tokens) < c->n_pages)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

static enum rc check_config(const struct engine_config *c, struct err *err)
{
    if (!kv_layout_n_tables(&c->layout) || c->layout.n_groups > BATCH_MAX_GROUPS)
        REFUSE("model", "model: wanted 1 to %d groups of cached layers, have %u", BATCH_MAX_GROUPS, c->layout.n_groups);
    if (!c->layout.block_tokens || c->layout.block_tokens > MAX_BLOCK_TOKENS)
        REFUSE("block_size", "block_size must be in [1, %d], got %u.", MAX_BLOCK_TOKENS, c->layout.block_tokens);
    if (!c->max_num_seqs)
        REFUSE("max_num_seqs", "max_num_seqs must be at least 1, got 0.");
    if (c->max_num_batched_tokens < c->max_num_seqs)
        REFUSE("max_num_batched_tokens", "max_num_batched_tokens must be at least max_num_seqs=%u, got %u.", c->max_num_seqs,
               c->max_num_batched_tokens);
    if (!c->max_model_len)
        REFUSE("max_model_len", "max_model_len must be at least 1, got 0.");
    uint64_t n_needed = kv_layout_pages(&c->layout, c->max_model_len, c->max_num_batched_tokens),
             n_have = c->n_pages ? c->n_pages - 1 : 0;
    if (n_needed > n_have)
        REFUSE("max_model_len", "max_model_len=%u needs %llu bytes of KV cache, %llu available. %u tokens would fit; raise "
               "kv_cache_memory_bytes or lower max_model_len.",
               c->max_model_len, (unsigned long long)n_needed * c->layout.page_bytes,
               (unsigned long long)n_have * c->layout.page_bytes, longest_that_fits(c));
    const struct draft_options *drafts = &c->drafts;
    if (drafts->k > MAX_DRAFTS)
        REFUSE("speculative_config", "speculative_config: k must be at most %u, got %u.", MAX_DRAFTS, drafts->k);
    if (drafts->method == DRAFT_NGRAM && (!drafts->min || drafts->min > drafts->max || drafts->max > LONGEST_MATCH ||
                                          drafts->max - drafts->min >= INDEX_LENGTHS))
        REFUSE("speculative_config", "speculative_config: min and max must be in [1, %u] and at most %u apart, got %u and %u.",
               LONGEST_MATCH, INDEX_LENGTHS - 1, drafts->min, drafts->max);
    if (!c->vocab_limit || c->vocab_limit > c->vocab_size)
        REFUSE("vocab_limit", "vocab_limit must be in [1, %u], got %u.", c->vocab_size, c->vocab_limit);
    for (uint32_t i = 0; i < c->n_banned; i++)
        if (c->banned_ids[i] < 0 || (uint32_t)c->banned_ids[i] >= c->vocab_size)
            REFUSE("banned_token_ids", "banned_token_ids must be in [0, %u), got %d.", c->vocab_size, c->banned_ids[i]);
    return RC_OK;
}

static void *copy(const void *source, size_t n_bytes)
{
    void *target = mem_alloc(n_bytes);
    return target && n_bytes ? memcpy(target, source, n_bytes) : target;
}

/* Copies the ids inside the vocabulary. EOS ids outside it cannot occur and must not be banned. */
static uint32_t copy_in_vocabulary(int32_t *target, const int32_t *ids, uint32_t n, uint32_t vocab_size)
{
    uint32_t n_kept = 0;
    for (uint32_t i = 0; i < n; i++)
        if (ids[i] >= 0 && (uint32_t)ids[i] < vocab_size)
            target[n_kept++] = ids[i];
    return n_kept;
}

static enum rc cache_keys(const struct engine_config *config, struct sequence_context *context, struct err *err)
{
    if (getrandom(&context->own_key, sizeof context->own_key, 0) == sizeof context->own_key) {
        context->key = context->own_key;
        if (config->has_cache_seed)
            context->key = hash_bytes(&(struct hash){0}, &config->cache_seed, sizeof config->cache_seed);
        return RC_OK;
    }
    err_set(err, RC_IO, "random key of the prefix cache: the system gives no random numbers");
    if (err)
        err->code = errno;
    return RC_IO;
}

enum rc engine_config_copy(const struct engine_config *config, struct engine_config *own, struct sequence_context *context,
                           struct err *err)
{
    enum rc rc = check_config(config, err);
    if (rc)
        return rc;
    *own = *config;
    *context = (struct sequence_context){.config = own};
    uint32_t n_tokens = config->token_offsets ? config->n_tokens : 0;
    int32_t *eos = mem_alloc(config->n_eos * sizeof *eos);
    uint8_t *is_special = mem_calloc((size_t)n_tokens + 1, 1);
    own->n_tokens = n_tokens;
    own->eos_ids = eos;
    own->banned_ids = copy(config->banned_ids, config->n_banned * sizeof *config->banned_ids);
    own->special_ids = NULL;
    own->n_special = 0;
    own->token_offsets = n_tokens ? copy(config->token_offsets, ((size_t)n_tokens + 1) * sizeof *config->token_offsets) : NULL;
    own->token_bytes = n_tokens ? copy(config->token_bytes, config->token_offsets[n_tokens]) : NULL;
    context->is_special = is_special;
    if (!eos || !is_special || !own->banned_ids || (n_tokens && (!own->token_offsets || !own->token_bytes))) {
        engine_config_free(own, context);
        return err_set(err, RC_MEMORY, "engine: out of memory for the vocabulary");
    }
    own->n_eos = copy_in_vocabulary(eos, config->eos_ids, config->n_eos, config->vocab_size);
    for (uint32_t i = 0; i < config->n_special; i++)
        if (config->special_ids[i] >= 0 && (uint32_t)config->special_ids[i] < n_tokens)
            is_special[config->special_ids[i]] = 1;
    rc = cache_keys(config, context, err);
    if (rc)
        engine_config_free(own, context);
    return rc;
}

void engine_config_free(struct engine_config *own, struct sequence_context *context)
{
    mem_free((void *)own->eos_ids);
    mem_free((void *)own->banned_ids);
    mem_free((void *)own->token_offsets);
    mem_free((void *)own->token_bytes);
    mem_free((void *)context->is_special);
    *own = (struct engine_config){0};
    *context = (struct sequence_context){0};
}
