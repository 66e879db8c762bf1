#define _GNU_SOURCE
#include "grammar_state.h"

#include "../base/clock.h"
#include "../base/mem.h"

#include <signal.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define COMPILE_SECONDS 5.0
#define MAX_COMPILERS 2u
#define MAX_FILLERS 8u

#define JSON_TEXT "[^\"\\\\\\x00-\\x1F\\x7F]"
/* Classes of tokens, each without the tokens of the classes before it. A mask takes a class as a whole if all its tokens are
 * allowed. The last three are the library's defaults; alone they are too coarse for the ends of texts of limited length. */
static const char *const SLICES[] = {
    JSON_TEXT "{1,3}", JSON_TEXT "{1,6}", JSON_TEXT "{1,10}", JSON_TEXT "{1,30}", JSON_TEXT "+", NULL,
};

static void forget_vocabulary(struct grammars *g)
{
    mem_free((void *)g->init.token_lengths);
    mem_free((void *)g->init.token_bytes);
    mem_free((void *)g->init.more_eos);
    g->init.token_lengths = NULL;
    g->init.token_bytes = NULL;
    g->init.more_eos = NULL;
}

void grammars_unlock_release(struct grammars *g)
{
    bool is_last = --g->n_holders == 0;
    pthread_mutex_unlock(&g->lock);
    if (!is_last)
        return;
    for (uint32_t i = 0; i < N_CACHED && g->cache[i].handle; i++) {
        g->library.free_matcher(g->cache[i].handle);
        mem_free(g->cache[i].kind);
    }
    if (g->tokenizer)
        g->library.free_tokenizer(g->tokenizer);
    forget_vocabulary(g);
    pthread_cond_destroy(&g->ordered);
    pthread_cond_destroy(&g->queued);
    pthread_cond_destroy(&g->changed);
    pthread_mutex_destroy(&g->lock);
    pthread_mutex_destroy(&g->cache_lock);
    mem_free(g);
}

/* Call with the lock held. The thread gets a reference to g and blocks all signals: they belong to the program. */
static bool start_thread(struct grammars *g, void *(*run)(void *), const char *name)
{
    sigset_t all, old;
    pthread_t thread;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    bool is_started = pthread_create(&thread, NULL, run, g) == 0;
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (!is_started)
        return false;
    pthread_setname_np(thread, name);
    pthread_detach(thread);
    g->n_holders++;
    return true;
}

/* ---- orders ------------------------------------------------------------------------------------------------------------- */

/* The cache's entry for the order's grammar, or NULL. Call with the cache's lock held. */
static struct cached *find_cached(struct grammars *g, const struct grammar *order)
{
    for (uint32_t i = 0; i < N_CACHED && g->cache[i].handle; i++)
        if (strcmp(g->cache[i].text, order->text) == 0 && strcmp(g->cache[i].kind, order->kind) == 0)
            return &g->cache[i];
    return NULL;
}

static struct llg_matcher *copy_cached(struct grammars *g, const struct grammar *order)
{
    pthread_mutex_lock(&g->cache_lock);
    struct cached *cached = find_cached(g, order);
    struct llg_matcher *copy = cached ? g->library.clone_matcher(cached->handle) : NULL;
    if (cached)
        cached->used = ++g->n_used;
    pthread_mutex_unlock(&g->cache_lock);
    return copy;
}

/* Puts a used matcher, reset to its beginning, into the cache: copies of it start with what the library built on demand. Done
 * once per entry, so that the memory of the entry is bounded. */
static void warm_cached(struct grammars *g, struct grammar *order)
{
    struct matcher *served = &order->matchers[0];
    pthread_mutex_lock(&g->cache_lock);
    struct cached *cached = find_cached(g, order);
    bool is_sound = served->match != MATCH_FAILED && !served->mask_error;
    if (cached && !cached->is_warm && is_sound && g->library.reset(served->handle) == 0) {
        struct llg_matcher *cold = cached->handle;
        cached->handle = served->handle;
        cached->is_warm = true;
        served->handle = cold;
    }
    pthread_mutex_unlock(&g->cache_lock);
}

static void release_holder(struct grammar *order)
{
    if (atomic_fetch_sub(&order->n_holders, 1) > 1)
        return;
    struct grammars *g = order->grammars;
    for (uint32_t i = 0; i < order->n_made; i++)
        g->library.free_matcher(order->matchers[i].handle);
    mem_free(order);
    pthread_mutex_lock(&g->lock);
    grammars_unlock_release(g);
}

static bool has_queued(const struct grammar *order)
{
    bool result = false;
    pthread_mutex_lock(&order->grammars->lock);
    for (uint32_t i = 0; i < order->n_made; i++)
        result |= order->matchers[i].is_queued;
    pthread_mutex_unlock(&order->grammars->lock);
    return result;
}

void grammar_release(struct grammar *order)
{
    uint64_t n_masks, mask_us;
    if (!order)
        return;
    bool is_ready = atomic_load(&order->state) == GRAMMAR_READY;
    if (is_ready && has_queued(order)) {
        grammars_finish_tokens(order->grammars);
        grammars_finish_masks(order->grammars, &n_masks, &mask_us);
    }
    if (is_ready)
        warm_cached(order->grammars, order);
    release_holder(order);
}

static struct llg_tokenizer *make_tokenizer(struct grammars *g, char *error)
{
    pthread_mutex_lock(&g->cache_lock);
    if (!g->tokenizer && g->init.token_lengths)
        g->tokenizer = g->library.new_tokenizer(&g->init, error, ERROR_BYTES);
    forget_vocabulary(g);
    pthread_mutex_unlock(&g->cache_lock);
    return g->tokenizer;
}

/* Caches a copy in place of the least recently used entry; caches nothing if memory is short. */
static void keep_cached(struct grammars *g, const struct grammar *order, const struct llg_matcher *handle)
{
    size_t n_kind = strlen(order->kind) + 1, n_text = strlen(order->text) + 1;
    char *names = mem_alloc(n_kind + n_text);
    if (!names)
        return;
    pthread_mutex_lock(&g->cache_lock);
    struct cached *place = &g->cache[0];
    for (uint32_t i = 1; i < N_CACHED; i++)
        place = g->cache[i].used < place->used ? &g->cache[i] : place;
    g->library.free_matcher(place->handle);
    mem_free(place->kind);
    struct llg_matcher *copy = g->library.clone_matcher(handle);
    *place = (struct cached){.kind = names, .text = names + n_kind, .handle = copy, .used = ++g->n_used};
    memcpy(place->kind, order->kind, n_kind);
    memcpy(place->text, order->text, n_text);
    pthread_mutex_unlock(&g->cache_lock);
}

static struct llg_matcher *compile(struct grammars *g, struct grammar *order)
{
    union llg_matcher_init init = {.room = {0}};
    struct llg_tokenizer *tokenizer = make_tokenizer(g, order->error);
    if (!tokenizer)
        return NULL;
    struct llg_matcher *handle = copy_cached(g, order);
    if (handle)
        return handle;
    g->library.set_defaults(&init, tokenizer);
    init.head.log_buffer_level = init.head.log_stderr_level = 0;
    handle = g->library.new_matcher(&init, order->kind, order->text);
    const char *error = g->library.get_error(handle);
    if (!error) {
        keep_cached(g, order, handle);
        return handle;
    }
    llguidance_explain(error, order->error, ERROR_BYTES);
    g->library.free_matcher(handle);
    return NULL;
}

/* Makes the first matcher, consumes the prior tokens and fills its mask; the other matchers are copies of it. */
static bool make_matchers(struct grammars *g, struct grammar *order, struct llg_matcher *handle)
{
    struct matcher *first = &order->matchers[0];
    for (uint32_t i = 0; i < order->n_samples; i++) {
        struct matcher *m = &order->matchers[i];
        *m = (struct matcher){.grammars = g, .stop_ids = &order->stop_ids};
        m->mask = order->masks + (size_t)i * (1 + order->n_ahead) * g->n_words;
        m->handle = i ? g->library.clone_matcher(first->handle) : handle;
        order->n_made++;
        if (i) {
            m->match = first->match;
            memcpy(m->mask, first->mask, g->n_words * sizeof *m->mask);
            continue;
        }
        const struct id_list *prior = &order->prior;
        matcher_consumed(m, prior->n ? g->library.consume_tokens(handle, (const uint32_t *)prior->ids, prior->n) : 0);
        if (m->match != MATCH_FAILED)
            matcher_fill_mask(m);
        const char *error = m->match == MATCH_FAILED ? m->error : m->mask_error;
        if (error) {
            strncpy(order->error, error, ERROR_BYTES - 1);
            return false;
        }
    }
    return true;
}

static void serve(struct grammars *g, struct grammar *order)
{
    atomic_store(&order->begun, seconds_now());
    struct llg_matcher *handle = compile(g, order);
    bool is_ready = handle && make_matchers(g, order, handle);
    unsigned waits = GRAMMAR_WAITS; /* otherwise the time limit has passed, and the order has failed */
    atomic_compare_exchange_strong(&order->state, &waits, is_ready ? GRAMMAR_READY : GRAMMAR_FAILED);
    release_holder(order);
}

static void *run_compiler(void *ctx)
{
    struct grammars *g = ctx;
    pthread_mutex_lock(&g->lock);
    while (!g->is_closing || g->first) {
        struct grammar *order = g->first;
        if (!order) {
            g->n_idle++;
            pthread_cond_wait(&g->ordered, &g->lock);
            g->n_idle--;
            continue;
        }
        g->first = order->next;
        bool is_wanted = atomic_load(&order->n_holders) > 1;
        pthread_mutex_unlock(&g->lock);
        if (is_wanted)
            serve(g, order);
        else
            release_holder(order);
        pthread_mutex_lock(&g->lock);
        pthread_cond_broadcast(&g->changed);
    }
    g->n_compilers--;
    grammars_unlock_release(g);
    return NULL;
}

/* Allocates an order with copies of all its parameters behind the struct. */
static struct grammar *create_order(struct grammars *g, const struct grammar_spec *spec, const struct id_list *prior,
                                    const struct id_list *stop_ids, uint32_t n_samples, uint32_t n_ahead)
{
    size_t n_kind = strlen(spec->kind) + 1, n_text = strlen(spec->text) + 1, n_ids = (size_t)prior->n + stop_ids->n;
    size_t n_words = (size_t)n_samples * (1 + n_ahead) * g->n_words;
    struct grammar *order = mem_calloc(1, sizeof *order + n_samples * sizeof *order->matchers + n_words * sizeof *order->masks +
                                              n_ids * sizeof(int32_t) + n_kind + n_text);
    if (!order)
        return NULL;
    order->grammars = g;
    order->n_samples = n_samples;
    order->n_ahead = n_ahead;
    order->matchers = (struct matcher *)(order + 1);
    order->masks = (uint32_t *)(order->matchers + n_samples);
    int32_t *ids = (int32_t *)(order->masks + n_words);
    order->prior = (struct id_list){ids, prior->n};
    order->stop_ids = (struct id_list){ids + prior->n, stop_ids->n};
    if (prior->n)
        memcpy(ids, prior->ids, prior->n * sizeof *ids);
    if (stop_ids->n)
        memcpy(ids + prior->n, stop_ids->ids, stop_ids->n * sizeof *ids);
    order->kind = memcpy(ids + n_ids, spec->kind, n_kind);
    order->text = memcpy((char *)order->kind + n_kind, spec->text, n_text);
    atomic_init(&order->n_holders, 2);
    return order;
}

enum rc grammar_order(struct grammars *g, const struct grammar_spec *spec, const struct id_list *prior,
                      const struct id_list *stop_ids, uint32_t n_samples, uint32_t n_ahead, struct grammar **result,
                      struct err *err)
{
    struct grammar *order = create_order(g, spec, prior, stop_ids, n_samples, n_ahead);
    if (!order)
        return err_set(err, RC_MEMORY, "structured_outputs: out of memory for %u samples", n_samples);
    pthread_mutex_lock(&g->lock);
    if (!g->n_idle && g->n_compilers < MAX_COMPILERS)
        g->n_compilers += start_thread(g, run_compiler, "llmpy-grammar");
    bool is_served = g->n_compilers > 0;
    if (is_served) {
        g->n_holders++; /* the order's */
        if (g->first)
            g->last->next = order;
        else
            g->first = order;
        g->last = order;
        pthread_cond_signal(&g->ordered);
    }
    pthread_mutex_unlock(&g->lock);
    if (!is_served) {
        mem_free(order);
        return err_set(err, RC_MEMORY, "structured_outputs: no more threads");
    }
    *result = order;
    return RC_OK;
}

enum grammar_state grammar_look(struct grammar *order)
{
    double begun = atomic_load(&order->begun);
    unsigned waits = GRAMMAR_WAITS;
    if (begun && seconds_now() > begun + COMPILE_SECONDS)
        order->is_late |= atomic_compare_exchange_strong(&order->state, &waits, GRAMMAR_FAILED);
    return (enum grammar_state)atomic_load(&order->state);
}

const char *grammar_error(const struct grammar *order)
{
    if (order->is_late)
        return "compiling the grammar takes longer than 5 seconds; simplify it";
    return order->error[0] ? order->error : "llguidance cannot take the vocabulary";
}

struct matcher *grammar_matcher(struct grammar *order, uint32_t sample)
{
    return &order->matchers[sample];
}

void grammars_wait(struct grammars *g, double seconds)
{
    const struct timespec deadline = deadline_after(seconds);
    pthread_mutex_lock(&g->lock);
    pthread_cond_timedwait(&g->changed, &g->lock, &deadline);
    pthread_mutex_unlock(&g->lock);
}

/* ---- life --------------------------------------------------------------------------------------------------------------- */

static bool is_end(const struct engine_config *config, uint32_t id)
{
    for (uint32_t i = 0; i < config->n_eos; i++)
        if ((uint32_t)config->eos_ids[i] == id)
            return true;
    return false;
}

/* Builds the library's view of the vocabulary. Special ids and EOS ids get a first byte that no text can match. */
static bool copy_vocabulary(struct grammars *g, const struct engine_config *config, const uint8_t *is_special)
{
    size_t n_bytes = config->token_offsets[config->n_tokens];
    uint32_t *lengths = mem_calloc(config->vocab_size, sizeof *lengths), *more = mem_alloc(config->n_eos * sizeof *more);
    uint8_t *bytes = mem_alloc(n_bytes + config->n_tokens), *at = bytes;
    g->init = (struct llg_tokenizer_init){.struct_size = sizeof g->init, .vocab_size = config->vocab_size,
                                          .token_lengths = lengths, .token_bytes = bytes, .is_approximate = true,
                                          .slices = SLICES, .more_eos = more};
    if (!lengths || !bytes || !more)
        return false;
    for (uint32_t i = 0; i < config->n_tokens && i < config->vocab_size; i++) {
        uint32_t n = (uint32_t)(config->token_offsets[i + 1] - config->token_offsets[i]);
        bool is_mark = is_special[i] || is_end(config, i);
        if (is_mark)
            *at++ = LLG_SPECIAL;
        memcpy(at, config->token_bytes + config->token_offsets[i], n);
        lengths[i] = n + is_mark;
        at += n;
    }
    g->init.eos = config->n_eos ? (uint32_t)config->eos_ids[0] : LLG_NO_TOKEN;
    for (uint32_t i = 1; i < config->n_eos; i++)
        more[g->init.n_more_eos++] = (uint32_t)config->eos_ids[i];
    return true;
}

enum rc grammars_create(const char *library, const struct engine_config *config, const uint8_t *is_special,
                        struct grammars **result, struct err *err)
{
    if (!config->n_tokens)
        return err_set(err, RC_UNSUPPORTED,
                       "structured_outputs: wanted a tokenizer whose tokens' texts, joined, are the text, have none");
    struct grammars *g = mem_calloc(1, sizeof *g);
    if (!g)
        return err_set(err, RC_MEMORY, "structured_outputs: out of memory");
    cond_init_monotonic(&g->changed);
    pthread_cond_init(&g->ordered, NULL);
    pthread_cond_init(&g->queued, NULL);
    pthread_mutex_init(&g->lock, NULL);
    pthread_mutex_init(&g->cache_lock, NULL);
    g->n_holders = 1;
    g->config = config;
    g->n_words = (config->vocab_size + 31) / 32;
    enum rc rc = llguidance_open(library, &g->library, err);
    if (!rc && !copy_vocabulary(g, config, is_special))
        rc = err_set(err, RC_MEMORY, "structured_outputs: out of memory for %u tokens", config->n_tokens);
    if (rc) {
        grammars_release(g);
        return rc;
    }
    long n_cores = sysconf(_SC_NPROCESSORS_ONLN);
    uint32_t n_fillers = n_cores / 2 < 1 ? 1 : n_cores / 2 > MAX_FILLERS ? MAX_FILLERS : (uint32_t)(n_cores / 2);
    pthread_mutex_lock(&g->lock);
    while (n_fillers-- && start_thread(g, grammars_run_filler, "llmpy-mask"))
        continue;
    pthread_mutex_unlock(&g->lock);
    *result = g;
    return RC_OK;
}

void grammars_release(struct grammars *g)
{
    if (!g)
        return;
    pthread_mutex_lock(&g->lock);
    g->is_closing = true;
    pthread_cond_broadcast(&g->queued);
    pthread_cond_broadcast(&g->ordered);
    grammars_unlock_release(g);
}
