#define _GNU_SOURCE
#include "grammar_state.h"

#include "../base/clock.h"

#include <string.h>

#define NOT_FORCED (-1)

/* Explains an error of the library in `text`; returns `otherwise` if there is none. */
static const char *explain(const char *error, const char *otherwise, char *text)
{
    if (!error)
        return otherwise;
    llguidance_explain(error, text, EXPLAINED_BYTES);
    return text;
}

/* Fills a mask for the matcher's next token; false on an error of the library. */
static bool fill(struct matcher *m, uint32_t *mask)
{
    const struct llguidance *library = &m->grammars->library;
    if (library->compute_mask_into(m->handle, mask, m->grammars->n_words * sizeof *mask))
        return false;
    for (uint32_t i = 0; i < m->stop_ids->n && library->is_accepting(m->handle); i++)
        mask[m->stop_ids->ids[i] / 32] |= 1u << m->stop_ids->ids[i] % 32;
    return true;
}

void matcher_fill_mask(struct matcher *m)
{
    if (fill(m, m->mask))
        return;
    m->mask_error =
        explain(m->grammars->library.get_error(m->handle), "the grammar has no next token", m->mask_error_text);
    memset(m->mask, 0, m->grammars->n_words * sizeof *m->mask);
}

void matcher_consumed(struct matcher *m, int32_t rc)
{
    const struct llguidance *library = &m->grammars->library;
    if (rc) {
        m->error = explain(library->get_error(m->handle), "the grammar refuses the token", m->error_text);
        m->match = MATCH_FAILED;
    } else {
        m->match = library->is_stopped(m->handle) ? MATCH_ENDED : MATCH_GOES_ON;
    }
}

/* Fills the next queued mask; false if there is none. Call with the lock held; it is released while the mask is filled. */
static bool fill_next(struct grammars *g)
{
    struct matcher *m = g->queue;
    if (!m)
        return false;
    g->queue = m->next;
    g->n_filling++;
    pthread_mutex_unlock(&g->lock);
    double begun = seconds_now();
    matcher_fill_mask(m);
    double seconds = seconds_now() - begun;
    pthread_mutex_lock(&g->lock);
    g->n_filled++;
    g->filling_seconds += seconds;
    m->is_queued = false;
    if (--g->n_filling == 0 && !g->queue)
        pthread_cond_broadcast(&g->changed);
    return true;
}

/* Puts a matcher before a list of its struct grammars and wakes a filler. Call with the lock held. */
static void enqueue(struct matcher *m, struct matcher **list)
{
    struct grammars *g = m->grammars;
    m->is_queued = true;
    m->next = *list;
    *list = m;
    if (!g->n_asleep)
        return;
    g->n_asleep--;
    pthread_cond_signal(&g->queued);
}

/* Consumes the next queued token and queues the mask of the one after it; false if there is none. Locks as fill_next. */
static bool take_next(struct grammars *g)
{
    struct matcher *m = g->tokens;
    if (!m)
        return false;
    g->tokens = m->next;
    g->n_taking++;
    pthread_mutex_unlock(&g->lock);
    matcher_consumed(m, g->library.consume_token(m->handle, (uint32_t)m->id));
    pthread_mutex_lock(&g->lock);
    if (m->match == MATCH_FAILED)
        m->is_queued = false;
    else
        enqueue(m, &g->queue);
    if (--g->n_taking == 0 && !g->tokens)
        pthread_cond_broadcast(&g->changed);
    return true;
}

void *grammars_run_filler(void *ctx)
{
    struct grammars *g = ctx;
    pthread_mutex_lock(&g->lock);
    while (!g->is_closing)
        if (!take_next(g) && !fill_next(g)) {
            g->n_asleep++;
            pthread_cond_wait(&g->queued, &g->lock);
        }
    grammars_unlock_release(g);
    return NULL;
}

/* Call with the lock held. */
static void finish_masks(struct grammars *g)
{
    while (fill_next(g))
        continue;
    while (g->n_filling)
        pthread_cond_wait(&g->changed, &g->lock);
}

void grammars_finish_masks(struct grammars *g, uint64_t *n_masks, uint64_t *mask_us)
{
    pthread_mutex_lock(&g->lock);
    finish_masks(g);
    *n_masks = g->n_filled;
    *mask_us = (uint64_t)(g->filling_seconds * 1e6);
    pthread_mutex_unlock(&g->lock);
}

enum match matcher_look(const struct matcher *m)
{
    return m->match;
}

void matcher_take(struct matcher *m, int32_t id)
{
    struct grammars *g = m->grammars;
    pthread_mutex_lock(&g->lock);
    m->id = id;
    enqueue(m, &g->tokens);
    pthread_mutex_unlock(&g->lock);
}

enum match matcher_take_now(struct matcher *m, int32_t id)
{
    matcher_consumed(m, m->grammars->library.consume_token(m->handle, (uint32_t)id));
    return m->match;
}

void grammars_finish_tokens(struct grammars *g)
{
    pthread_mutex_lock(&g->lock);
    while (take_next(g))
        continue;
    while (g->n_taking)
        pthread_cond_wait(&g->changed, &g->lock);
    pthread_mutex_unlock(&g->lock);
}

enum match matcher_branch(struct matcher *m, int32_t id, struct llg_matcher **state)
{
    const struct llguidance *library = &m->grammars->library;
    struct llg_matcher *copy = library->clone_matcher(m->handle);
    enum match match = MATCH_FAILED;
    *state = NULL;
    if (library->consume_token(copy, (uint32_t)id))
        m->error = explain(library->get_error(copy), "the grammar refuses the token", m->error_text);
    else
        match = library->is_stopped(copy) ? MATCH_ENDED : MATCH_GOES_ON;
    if (match == MATCH_GOES_ON)
        *state = copy;
    else
        library->free_matcher(copy);
    return match;
}

void matcher_move(struct matcher *m, struct llg_matcher *state)
{
    struct grammars *g = m->grammars;
    g->library.free_matcher(m->handle);
    m->handle = state;
    pthread_mutex_lock(&g->lock);
    enqueue(m, &g->queue);
    pthread_mutex_unlock(&g->lock);
}

void matcher_discard(struct matcher *m, struct llg_matcher *state)
{
    if (state)
        m->grammars->library.free_matcher(state);
}

const char *matcher_error(const struct matcher *m)
{
    return m->error;
}

const char *matcher_mask_error(const struct matcher *m)
{
    return m->mask_error;
}

const uint32_t *matcher_mask(const struct matcher *m, uint32_t n_ahead)
{
    return m->mask + (size_t)n_ahead * m->grammars->n_words;
}

/* Consumes one draft and fills the mask behind it; false if the grammar refuses it or ends with it. *n: tokens consumed. */
static bool consume_draft(struct matcher *m, uint32_t id, uint32_t *n)
{
    const struct llguidance *library = &m->grammars->library;
    if (library->validate_tokens(m->handle, &id, 1) != 1 || library->consume_token(m->handle, id))
        return false;
    ++*n;
    return !library->is_stopped(m->handle) && fill(m, m->mask + (size_t)*n * m->grammars->n_words);
}

static const char *token_text(const struct engine_config *config, uint32_t id, size_t *n_bytes)
{
    bool is_known = id < config->n_tokens;
    *n_bytes = is_known ? config->token_offsets[id + 1] - config->token_offsets[id] : 0;
    return config->token_bytes + (is_known ? config->token_offsets[id] : 0);
}

/* The only id that a mask allows, or the longest if the texts of all others are beginnings of its text: the grammar forces the
 * text then. NOT_FORCED: neither. */
static int32_t forced_id(const struct grammars *g, const uint32_t *mask)
{
    size_t n_longest = 0, n_bytes;
    const char *longest = "";
    int32_t best = NOT_FORCED;
    for (uint32_t word = 0, n_allowed = 0; word < g->n_words; word++)
        for (uint32_t left = mask[word]; left; left &= left - 1) {
            uint32_t id = 32 * word + (uint32_t)__builtin_ctz(left);
            const char *text = token_text(g->config, id, &n_bytes);
            if (++n_allowed > 1 && (!n_bytes || !n_longest || memcmp(text, longest, n_bytes < n_longest ? n_bytes : n_longest)))
                return NOT_FORCED;
            if (n_allowed == 1 || n_bytes > n_longest) {
                best = (int32_t)id;
                longest = text;
                n_longest = n_bytes;
            }
        }
    return best;
}

/* Chooses the draft at place `at`: the proposed one if the mask allows it, else a forced one. n: number of proposed drafts;
 * those behind a replaced draft are dropped. */
static bool choose_draft(const struct matcher *m, int32_t *ids, uint32_t at, uint32_t *n)
{
    const uint32_t *mask = matcher_mask(m, at);
    if (at < *n && mask[ids[at] / 32] >> ids[at] % 32 & 1)
        return true;
    *n = at;
    ids[at] = forced_id(m->grammars, mask);
    return ids[at] != NOT_FORCED;
}

uint32_t matcher_look_ahead(struct matcher *m, int32_t *ids, uint32_t n, uint32_t most)
{
    struct grammars *g = m->grammars;
    uint32_t n_allowed = 0, n_consumed = 0;
    pthread_mutex_lock(&g->lock);
    finish_masks(g);
    pthread_mutex_unlock(&g->lock);
    if (m->match != MATCH_GOES_ON || m->mask_error)
        return 0;
    double begun = seconds_now();
    while (n_allowed < most && choose_draft(m, ids, n_allowed, &n) && consume_draft(m, (uint32_t)ids[n_allowed], &n_consumed))
        n_allowed++;
    bool is_back = !n_consumed || g->library.rollback(m->handle, n_consumed) == 0;
    pthread_mutex_lock(&g->lock);
    g->n_filled += n_allowed;
    g->filling_seconds += seconds_now() - begun;
    pthread_mutex_unlock(&g->lock);
    if (!is_back)
        matcher_consumed(m, -1);
    return is_back ? n_allowed : 0;
}
