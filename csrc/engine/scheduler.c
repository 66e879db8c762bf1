#include "scheduler.h"

#include "../step/kv_layout.h"
#include "load_cost.h"
#include "recurrent.h"
#include "seek.h"
#include "sequence_pages.h"
#include "swap.h"

#include <string.h>

#define STORED_BYTES (32u << 20) /* of pages that a step copies out ahead, beside as many as it computes */
#define MAX_PASSED 64 /* most waiting sequences that a step passes over */
#define TEXT_SECONDS 0.1 /* behind a sequence without images the next one is expected for this long */
#define MAX_OVERTAKEN 64 /* most sequences that overtake one that waits for its adapter */

static uint32_t n_tables(const struct scheduler *s)
{
    return kv_layout_n_tables(&config_of(s)->layout);
}

/* ---- running sequences ---- */

static void running_insert(struct scheduler *s, struct sequence *q)
{
    uint32_t at = s->n_running++;
    for (; at && sequence_is_ahead(q, s->running[at - 1]); at--)
        s->running[at] = s->running[at - 1];
    s->running[at] = q;
    for (q->slot = 0; s->slots[q->slot];)
        q->slot++;
    s->slots[q->slot] = q;
    s->pools[q->pool].n_running++;
    q->state = SEQUENCE_RUNNING;
    q->n_admitted_output = q->n_output;
    if (q->request->adapter)
        q->adapter_slot = adapter_slots_enter(&s->adapters, q->request->adapter);
}

static void running_remove(struct scheduler *s, struct sequence *q)
{
    uint32_t at = s->n_running - 1;
    while (s->running[at] != q)
        at--;
    memmove(&s->running[at], &s->running[at + 1], (s->n_running - at - 1) * sizeof *s->running);
    s->n_running--;
    s->pools[q->pool].n_running--;
    s->slots[q->slot] = NULL;
    if (q->request->adapter)
        adapter_slots_leave(&s->adapters, q->adapter_slot);
    q->n_rows = 0;
    q->draws = false;
    q->next_fork = NULL;
}

/* ---- preemption ---- */

static void count_rows(struct scheduler *s, const struct sequence *q, uint32_t from, uint32_t n_rows, bool undo)
{
    uint32_t n_redone = from < q->n_ever_computed ? q->n_ever_computed - from : 0;
    n_redone = n_redone < n_rows ? n_redone : n_rows;
    uint32_t n_prefilled = q->request->spec.prompt.n + q->request->spec.prior.n, first = from + n_redone,
             n_new = n_rows - n_redone;
    uint32_t n_prompt = first < n_prefilled ? n_prefilled - first : 0;
    n_prompt = n_prompt < n_new ? n_prompt : n_new;
    uint64_t sign = undo ? UINT64_MAX : 1;
    s->n_redone_rows += sign * n_redone;
    s->n_prompt_rows += sign * n_prompt;
    s->n_decode_rows += sign * (n_new - n_prompt);
}

/* Takes the rows of this step back from a sequence: withdraws its new blocks and cancels its copies. False if there were
 * copies: some of its pages are not filled then. */
static bool rows_give_back(struct scheduler *s, struct sequence *q)
{
    uint32_t before = q->n_computed - q->n_rows;
    for (uint32_t b = before / block_tokens(s); b < q->n_computed / block_tokens(s); b++)
        for (uint32_t g = 0; g < n_groups(s); g++)
            block_manager_withdraw(blocks_for(s, q), scheduler_table(s, g, q->slot)[b]);
    if (s->n_state_pages)
        recurrent_withdraw(s, q);
    count_rows(s, q, before, q->n_rows, true);
    s->rows_left += q->n_rows;
    pages_give_back(s, q, before);
    if (q->n_published > before / block_tokens(s))
        q->n_published = before / block_tokens(s);
    return !pages_cancel_copies(s, q);
}

/* Takes a running sequence's pages and slot. */
static void stop_running(struct scheduler *s, struct sequence *q)
{
    pages_release(s, q);
    running_remove(s, q);
    q->n_computed = q->n_hit = q->n_taken_rows = 0;
    q->shares_tail = false;
    q->failed_room = q->loaded_by = 0;
    q->has_asked = q->has_sought = false;
}

void scheduler_park(struct scheduler *s, struct sequence *q)
{
    stop_running(s, q);
    pages_forget(q);
    scheduler_add_parked(s, q);
}

void scheduler_add_parked(struct scheduler *s, struct sequence *q)
{
    q->state = SEQUENCE_PARKED;
    s->n_parked++;
}

void scheduler_unpark(struct scheduler *s, struct sequence *q)
{
    s->n_parked--;
    scheduler_add(s, q);
}

void scheduler_preempt(struct scheduler *s, struct sequence *q, bool may_swap)
{
    bool are_filled = !q->n_rows || rows_give_back(s, q);
    if (s->tier && may_swap && swap_out(s, q, are_filled)) {
        stop_running(s, q);
        scheduler_add(s, q);
    } else {
        s->n_mixed_preemptions += q->is_mixed;
        scheduler_park(s, q);
        if (!q->is_idle)
            scheduler_unpark(s, q);
    }
    q->n_preemptions++;
    s->n_preemptions++;
    s->n_preempted++;
    s->last_victim = sequence_order(q);
    s->last_victim_pool = q->pool;
}

/* ---- a step ---- */

/* Lets the step wait for the moves into a sequence's pages. */
static void loads_await(struct scheduler *s, struct sequence *q)
{
    if (q->loaded_by > s->loads_ended)
        host_tier_await_number(s->tier, q->loaded_by, MOVE_IN);
    q->loaded_by = 0;
}

/* True for a sequence that publishes only after the step's results: drafts in the step may take its recurrent state back, and
 * then the rows of the step are computed again. */
static bool publishes_later(const struct scheduler *s, const struct sequence *q)
{
    return s->n_state_pages && q->drafts.n_wanted && q->draws && !sequence_is_new(q);
}

/* The last running sequence of a pool in which one runs. */
static struct sequence *last_running(const struct scheduler *s, uint32_t pool)
{
    uint32_t i = s->n_running - 1;
    while (s->running[i]->pool != pool)
        i--;
    return s->running[i];
}

/* Gives a running sequence the rows that it owes, as far as rows are left. May preempt sequences behind it, or itself. */
static void rows_take(struct scheduler *s, struct sequence *q)
{
    uint32_t owed = sequence_goal(q) - q->n_computed, n = owed < s->rows_left ? owed : s->rows_left;
    if (!n || (n < owed && config_of(s)->runner.takes_whole_prompts) || q->loaded_by > s->loads_ended)
        return;
    if (s->n_state_pages)
        n = recurrent_cut(s, q, n);
    uint32_t n_ready = features_take(s->features, q, n);
    s->awaits_features |= n_ready < n;
    if (!(n = n_ready))
        return;
    pages_advance_windows(s, q);
    while (!pages_take(s, q, n)) {
        struct sequence *victim = last_running(s, q->pool);
        scheduler_preempt(s, victim, true);
        if (victim == q)
            return;
    }
    count_rows(s, q, q->n_computed, n, false);
    s->rows_left -= n;
    q->n_computed += n;
    q->n_taken_rows += n;
    q->n_rows = n;
    q->draws = n == owed && !sequence_only_scores(q) && !q->request->spec.pooling;
    if (!publishes_later(s, q))
        pages_publish(s, q);
}

/* Number of positions that the first n_blocks blocks serve, without that of the last known token, which must be computed. */
static uint32_t hit_tokens(const struct scheduler *s, const struct sequence *q, uint32_t n_blocks)
{
    uint32_t n = n_blocks * block_tokens(s), n_known = sequence_n_known(q);
    return n < n_known ? n : n_known - 1;
}

uint32_t scheduler_find_hit(struct scheduler *s, struct sequence *q, uint32_t slot, uint32_t limit)
{
    uint32_t n_hit = limit;
    for (uint32_t g = 0; g < n_groups(s); g++) {
        if (config_of(s)->layout.groups[g].window)
            continue;
        int32_t *table = scheduler_table(s, g, slot);
        uint32_t b = 0;
        while (b < n_hit && (table[b] = pages_look(s, q, b, g)))
            b++;
        n_hit = b;
    }
    /* A window group needs the blocks that the first row behind the hit sees. A missing block shortens the hit to its place.
     * The loop ends when a whole round of the groups finds no missing block. */
    for (uint32_t n_settled = 0, g = 0; n_settled < n_tables(s); g = (g + 1) % n_tables(s), n_settled++) {
        if (g == n_groups(s)) { /* recurrent states: the hit must end at a snapshot */
            uint32_t n = recurrent_find(s, q, n_hit);
            n_settled = n < n_hit ? 0 : n_settled;
            n_hit = n;
            continue;
        }
        if (!config_of(s)->layout.groups[g].window)
            continue;
        for (uint32_t b = n_hit; b-- > pages_first_seen_block(s, g, hit_tokens(s, q, n_hit));)
            if (!pages_look(s, q, b, g)) {
                n_hit = b;
                n_settled = 0;
            }
    }
    for (uint32_t g = 0; g < n_groups(s); g++) {
        int32_t *table = scheduler_table(s, g, slot);
        uint32_t first = pages_first_seen_block(s, g, hit_tokens(s, q, n_hit));
        for (uint32_t b = 0; b < limit; b++) /* also clears entries behind a shortened hit */
            table[b] = b >= first && b < n_hit ? pages_look(s, q, b, g) : 0;
    }
    return n_hit;
}

/* ---- admission ---- */

/* Pages that all rows q owes will take behind a hit of n_hit positions. A block that is hit in part is copied to a new page. */
static uint64_t pages_needed(const struct scheduler *s, const struct sequence *q, uint32_t n_hit)
{
    const struct engine_config *config = config_of(s);
    uint32_t goal = sequence_goal(q);
    uint64_t need = n_hit % block_tokens(s) ? n_groups(s) : 0;
    for (uint32_t g = 0; g < n_groups(s); g++) {
        uint32_t first = pages_first_seen_block(s, g, n_hit), held = blocks_of(s, n_hit) - first;
        uint32_t all = blocks_of(s, goal) - first,
                 most = kv_group_blocks(&config->layout, g, goal, config->max_num_batched_tokens);
        most = most < all ? most : all;
        need += most > held ? most - held : 0;
    }
    return need;
}

/* Keeps pages for the rest of a prompt for which the step's rows did not suffice. Only forks, which need no rows, can still be
 * admitted beside it. */
static void promise_rest(struct scheduler *s, const struct sequence *q)
{
    if (sequence_goal(q) > q->n_computed)
        s->pools[q->pool].n_promised += (uint32_t)pages_needed(s, q, blocks_of(s, q->n_computed) * block_tokens(s));
}

/* Number of pages that a hit takes off the free lists: those that are found there, and those to be loaded. */
static uint32_t hit_free_pages(const struct scheduler *s, const struct sequence *q, uint32_t slot, uint32_t n_hit)
{
    uint32_t n = 0;
    for (uint32_t g = 0; g < n_groups(s); g++)
        for (uint32_t b = 0; b < n_hit; b++) {
            int32_t page = scheduler_table(s, g, slot)[b];
            n += page < 0 || (page && block_manager_is_free(blocks_for(s, q), page));
        }
    return n;
}

/* True if q may fit now: there is more room, or the cache has the next block. Saves looking up the whole hit again. */
static bool is_worth_trying(struct scheduler *s, struct sequence *q, uint32_t limit)
{
    if (!q->failed_room || !s->n_running || s->n_pools > 1 || pages_room(s, q->pool) >= q->failed_room)
        return true;
    return n_groups(s) && q->failed_hit < limit && block_manager_look(blocks_for(s, q), sequence_key(q, q->failed_hit), 0);
}

static void count_admission(struct scheduler *s, struct sequence *q, uint32_t n_hit_tokens, double now)
{
    struct request *r = q->request;
    s->n_admitted++;
    s->last_admitted = sequence_order(q);
    if (r->scheduled)
        return;
    r->scheduled = now;
    r->n_cached = n_hit_tokens < r->spec.prompt.n ? n_hit_tokens : r->spec.prompt.n;
    s->prompt_tokens += r->spec.prompt.n;
    s->cached_tokens += r->n_cached;
    s->cache_queries += config_of(s)->prefix_caching ? sequence_n_known(q) : 0;
    s->cache_hits += n_hit_tokens;
    statistics_observe(s->statistics, HISTOGRAM_QUEUE, now - r->queued);
    statistics_observe(s->statistics, HISTOGRAM_PROMPT_TOKENS, r->spec.prompt.n);
    statistics_observe(s->statistics, HISTOGRAM_SAMPLES, r->spec.n);
    if (r->spec.max_tokens != UINT32_MAX)
        statistics_observe(s->statistics, HISTOGRAM_MAX_TOKENS, r->spec.max_tokens);
}

/* Most leading blocks that the cache may serve. If no row before the last is wanted, a block that ends with the last known
 * token counts, too: it is copied and its last position computed again. Not so with recurrent states, which cannot go back. */
static uint32_t hit_limit(const struct scheduler *s, const struct sequence *q)
{
    uint32_t limit = sequence_hit_limit(q), n_known = sequence_n_known(q);
    if (!config_of(s)->prefix_caching)
        return 0;
    return (limit + 1 == n_known && block_tokens(s) > 1 && !s->n_state_pages ? n_known : limit) / block_tokens(s);
}

/* True if a hit of n_hit blocks can be used: a block to copy must come from an earlier step, and the pages must suffice. */
static bool hit_fits(const struct scheduler *s, const struct sequence *q, uint32_t slot, uint32_t n_hit)
{
    uint32_t n_tokens = hit_tokens(s, q, n_hit);
    for (uint32_t g = 0; n_tokens % block_tokens(s) && g < n_groups(s); g++) {
        int32_t page = scheduler_table(s, g, slot)[n_hit - 1];
        if (page > 0 && !block_manager_is_settled(blocks_for(s, q), page))
            return false;
    }
    /* A state takes a bundle: a fresh one, or the snapshot itself if there is no room for a copy. */
    return pages_needed(s, q, n_tokens) + hit_free_pages(s, q, slot, n_hit) + s->n_state_pages <= pages_room(s, q->pool);
}

/* Notes which move is the last into a page of a sequence that has just been admitted. */
static void loads_note(struct scheduler *s, struct sequence *q)
{
    uint64_t last = 0, number;
    for (uint32_t g = 0; g < n_groups(s); g++)
        for (uint32_t b = q->first_block[g]; b < blocks_of(s, q->n_hit); b++) {
            number = host_tier_last_move(s->tier, scheduler_table(s, g, q->slot)[b], MOVE_IN);
            last = number > last ? number : last;
        }
    for (uint32_t i = 0; q->n_hit && i < s->n_state_pages; i++) {
        number = host_tier_last_move(s->tier, recurrent_table(s, q->slot)[i], MOVE_IN);
        last = number > last ? number : last;
    }
    q->loaded_by = last;
    if (!config_of(s)->runner.is_async) /* a step waits for its moves anyway */
        loads_await(s, q);
}

/* Loads the blocks that only the host tier has. */
static void hit_load(struct scheduler *s, struct sequence *q, uint32_t n_hit)
{
    for (uint32_t b = 0; b < n_hit; b++) {
        bool is_loaded = false;
        for (uint32_t g = 0; g < n_groups(s); g++) {
            int32_t *page = &scheduler_table(s, g, q->slot)[b];
            if (*page < 0) {
                block_manager_load(blocks_for(s, q), (uint32_t)-*page, sequence_key(q, b), g, page);
                if (s->events)
                    pages_note_stored(s, q, b, g);
                is_loaded = true;
            }
        }
        s->host_hits += is_loaded ? block_tokens(s) : 0;
    }
    loads_note(s, q);
}

/* Admits a sequence whose pages are in slots of its own, if all its rows fit into the pool. */
static bool admit_swapped(struct scheduler *s, struct sequence *q, uint32_t slot, double now)
{
    uint32_t n_blocks = blocks_of(s, q->n_swapped), n_tails = q->n_swapped % block_tokens(s) ? n_groups(s) : 0,
             n_admitted_output = q->n_admitted_output;
    swap_look(s, q, slot);
    uint64_t need = pages_needed(s, q, q->n_swapped) - n_tails + hit_free_pages(s, q, slot, n_blocks) + s->n_state_pages;
    if (need > pages_room(s, q->pool) || !host_tier_may_load(s->tier)) {
        for (uint32_t g = 0; g < n_groups(s); g++)
            memset(scheduler_table(s, g, slot), 0, n_blocks * sizeof(int32_t));
        q->failed_room = pages_room(s, q->pool) + 1;
        q->failed_hit = UINT32_MAX;
        return false;
    }
    queue_remove(&s->waiting, q);
    running_insert(s, q);
    q->n_admitted_output = n_admitted_output;
    swap_in(s, q);
    loads_note(s, q);
    count_admission(s, q, q->n_hit, now);
    rows_take(s, q);
    promise_rest(s, q);
    return true;
}

/* True if the sequence's adapter, if it has one, is there for the step. */
static bool has_adapter(struct scheduler *s, const struct sequence *q)
{
    return !q->request->adapter || adapter_slots_admit(&s->adapters, q->request->adapter, s->others_run);
}

/* Admits a waiting sequence with the cached blocks of its pool, if all its rows fit there. slot: the first free one. */
static bool admit_to_pool(struct scheduler *s, struct sequence *q, uint32_t slot, uint32_t limit, double now)
{
    uint32_t n_hit = scheduler_find_hit(s, q, slot, limit);
    if (s->tier)
        n_hit = load_cost_cut(s, q, slot, n_hit);
    bool fits = hit_fits(s, q, slot, n_hit);
    if (!fits && hit_tokens(s, q, n_hit) % block_tokens(s)) { /* retry without the block that would be copied */
        for (uint32_t g = 0; g < n_groups(s); g++)
            scheduler_table(s, g, slot)[n_hit - 1] = 0;
        n_hit = scheduler_find_hit(s, q, slot, n_hit - 1);
        fits = hit_fits(s, q, slot, n_hit);
    }
    uint32_t n_tokens = hit_tokens(s, q, n_hit);
    for (uint32_t g = 0; g < n_groups(s); g++) {
        int32_t *table = scheduler_table(s, g, slot);
        for (uint32_t b = 0; fits && b < n_hit; b++)
            s->batch->shares_new_keys |= table[b] > 0 && !block_manager_is_settled(blocks_for(s, q), table[b]);
        for (uint32_t b = 0; b < n_hit; b++)
            if (table[b] > 0 && fits)
                block_manager_share(blocks_for(s, q), table[b]);
            else if (table[b] < 0 && fits)
                host_tier_touch(s->tier, (uint32_t)-table[b]); /* before pages are taken, which may displace entries */
            else
                table[b] = 0;
        q->first_block[g] = fits ? pages_first_seen_block(s, g, n_tokens) : 0;
        page_tables_note(&s->tables, g, slot, q->first_block[g], fits ? n_hit : 0);
    }
    if (!fits) {
        q->failed_room = pages_room(s, q->pool) + 1;
        q->failed_hit = n_hit;
        return false;
    }
    queue_remove(&s->waiting, q);
    running_insert(s, q);
    q->n_computed = q->n_hit = q->drafts.n_computed = n_tokens;
    q->n_published = n_hit;
    q->shares_tail = n_tokens % block_tokens(s) != 0;
    q->n_taken_rows = 0;
    if (s->n_state_pages)
        recurrent_start(s, q, n_hit, limit);
    if (s->tier)
        hit_load(s, q, n_hit);
    count_admission(s, q, q->n_hit, now);
    rows_take(s, q);
    promise_rest(s, q);
    return true;
}

/* Admits a waiting sequence to the pool that was chosen for it, or to any other one with room. */
static bool admit(struct scheduler *s, struct sequence *q, double now)
{
    uint32_t limit = hit_limit(s, q), slot = 0, chosen = q->pool;
    if (config_of(s)->runner.takes_whole_prompts && sequence_goal(q) > s->rows_left)
        return false;
    if (!has_adapter(s, q))
        return false;
    if (!is_worth_trying(s, q, limit))
        return false;
    while (s->slots[slot])
        slot++;
    if (q->swapped && (admit_swapped(s, q, slot, now) || s->n_running))
        return q->state == SEQUENCE_RUNNING;
    swap_drop(s, q); /* no sequence runs, and still there is no room to copy the pages back */
    if (admit_to_pool(s, q, slot, limit, now))
        return true;
    for (uint32_t i = 0; i < s->n_pools; i++) {
        if (i == chosen)
            continue;
        q->pool = i;
        if (admit_to_pool(s, q, slot, limit, now))
            return true;
    }
    return false;
}

/* The first sample of q's request if its last prompt row is computed in this step: q can fork from it. Else NULL. */
static struct sequence *fork_source(const struct sequence *q)
{
    struct sequence *lead = q->request->sequences[0];
    bool is_first = lead && lead != q && lead->draws && !lead->n_output && !lead->n_pending;
    return is_first && !q->n_output && !q->n_pending ? lead : NULL;
}

/* Lets q run on every block of the lead, also the unfilled tail. */
static void share_blocks(struct scheduler *s, struct sequence *lead, struct sequence *q)
{
    q->pool = lead->pool;
    running_insert(s, q);
    pages_share(s, lead, q);
    q->n_published = lead->n_published;
    q->n_computed = q->n_hit = q->n_ever_computed = lead->n_computed;
    q->n_taken_rows = 0;
    q->drafts.n_computed = lead->drafts.n_computed;
    q->is_stale = lead->is_stale;
    q->is_mixed = lead->is_mixed;
}

/* Admits q as a fork of the lead. */
static bool fork_from(struct scheduler *s, struct sequence *lead, struct sequence *q)
{
    if (n_groups(s) + s->n_state_pages > pages_room(s, lead->pool))
        return false;
    queue_remove(&s->waiting, q);
    share_blocks(s, lead, q);
    q->draws = true;
    q->next_fork = lead->next_fork;
    lead->next_fork = q;
    s->pools[q->pool].n_promised += n_groups(s) + s->n_state_pages;
    s->n_admitted++;
    s->last_admitted = sequence_order(q);
    return true;
}

void scheduler_fork(struct scheduler *s, struct sequence *running, struct sequence *q)
{
    if (running->state != SEQUENCE_RUNNING || s->n_running == config_of(s)->max_num_seqs)
        return;
    s->n_parked--;
    share_blocks(s, running, q);
    q->n_admitted_output = running->n_admitted_output;
    s->n_preempted = s->n_admitted = 0; /* the fork may run behind a victim of the last step */
}

/* True for a sequence that waits for its adapter while those behind it may be admitted. */
static bool awaits_adapter(struct scheduler *s, const struct sequence *q)
{
    return q->n_overtaken < MAX_OVERTAKEN && !has_adapter(s, q);
}

/* True for a sequence with images where another one's are not computed in this step; those without images are not held up. */
static bool awaits_features(const struct scheduler *s, const struct sequence *q)
{
    return s->awaits_features && q->request->spec.n_items;
}

/* True for a sequence that is passed over at this step. */
static bool is_passed_over(struct scheduler *s, struct sequence *q, double now)
{
    bool may_hit = s->rows_left && !q->swapped;
    if (awaits_features(s, q) || (s->n_state_pages && may_hit && recurrent_is_awaited(s, q, hit_limit(s, q))))
        return true;
    return awaits_adapter(s, q) || (s->outer && may_hit && seek_is_on(s, q, hit_limit(s, q), now));
}

static void admit_waiting(struct scheduler *s, double now)
{
    struct sequence *overtaken = NULL; /* the first that waits for its adapter */
    uint32_t n_passed = 0;
    for (uint32_t i = 0; s->waiting.n && i < s->n_running; i++)
        promise_rest(s, s->running[i]);
    for (struct sequence *q = queue_first(&s->waiting), *next; q && s->n_running < config_of(s)->max_num_seqs; q = next) {
        struct sequence *lead = q->swapped ? NULL : fork_source(q);
        next = queue_next(q);
        if (s->n_pools > 1)
            q->pool = scheduler_choose_pool(s, q, hit_limit(s, q));
        q->is_blocked = !lead && n_passed < MAX_PASSED && is_passed_over(s, q, now);
        if (q->is_blocked) {
            if (!overtaken && awaits_adapter(s, q))
                overtaken = q;
            n_passed += !seek_awaits(q);
        } else if (lead ? !fork_from(s, lead, q) : !s->rows_left || awaits_features(s, q) || !admit(s, q, now)) {
            break;
        } else if (overtaken) {
            overtaken->n_overtaken++;
        }
    }
}

bool scheduler_can_overlap(const struct scheduler *s)
{
    for (uint32_t i = 0; i < s->n_running; i++)
        if (sequence_must_wait(s->running[i]))
            return false;
    return true;
}

/* True for a sequence that owes the row of its last token alone, or also rows that drafts took back. */
static bool is_decoding(const struct sequence *q)
{
    return sequence_goal(q) - q->n_computed == 1 || (q->n_computed < q->n_ever_computed && q->n_output > q->n_admitted_output);
}

/* If there is nothing else to compute, the step has the rows of the first sequence that still loads, and awaits its moves. */
static void loads_join(struct scheduler *s, bool is_in_flight)
{
    if (!s->tier || is_in_flight)
        return;
    for (uint32_t i = 0; s->rows_left == config_of(s)->max_num_batched_tokens && i < s->n_running; i++)
        if (s->running[i]->loaded_by > s->loads_ended) {
            loads_await(s, s->running[i]);
            rows_take(s, s->running[i]);
        }
}

/* Gives rows to running sequences that have none: to those that decode, or to all. One may be preempted at its turn, and those
 * behind it, which have pages of other pools, go on. */
static void rows_take_all(struct scheduler *s, bool only_decoding)
{
    for (uint32_t i = 0; i < s->n_running;) {
        struct sequence *q = s->running[i];
        if (only_decoding ? is_decoding(q) : !q->n_rows)
            rows_take(s, q);
        i += i < s->n_running && s->running[i] == q;
    }
}

/* Gives rows to running and then to waiting sequences. */
static void rows_spend(struct scheduler *s, bool is_in_flight, double now)
{
    s->n_preempted = s->n_admitted = s->n_seeking = 0;
    for (uint32_t i = 0; i < s->n_pools; i++)
        s->pools[i].n_promised = 0;
    s->awaits_features = false;
    s->others_run = s->n_running > 0;
    rows_take_all(s, true);
    rows_take_all(s, false);
    loads_join(s, is_in_flight);
    if (!s->n_preempted)
        admit_waiting(s, now);
    loads_join(s, is_in_flight);
}

/* Parks the last running sequence that is idle, so that its pages and its slot are free; false if there is none. */
static bool park_idle(struct scheduler *s)
{
    for (uint32_t i = s->n_running; i-- > 0;)
        if (s->running[i]->is_idle) {
            s->n_preemptions++;
            s->running[i]->n_preemptions++;
            scheduler_park(s, s->running[i]);
            return true;
        }
    return false;
}

/* True if a sequence without images may be admitted. */
static bool has_waiting_text(const struct scheduler *s)
{
    struct sequence *q = s->n_running < config_of(s)->max_num_seqs ? queue_first(&s->waiting) : NULL;
    for (uint32_t n = 0; q && n < MAX_PASSED && q->request->spec.n_items; n++)
        q = queue_next(q);
    return q && !q->request->spec.n_items;
}

static bool has_running_text(const struct scheduler *s)
{
    uint32_t i = 0;
    while (i < s->n_running && s->running[i]->request->spec.n_items)
        i++;
    return i < s->n_running;
}

/* Tells what images must leave to texts in this step. A prompt without images that waits need not wait for a tower, too, but
 * never in two steps one after the other. */
static void begin_images(struct scheduler *s, double now)
{
    if (!s->features)
        return;
    bool waits = has_waiting_text(s);
    if (waits || has_running_text(s))
        s->last_text = now;
    s->holds_images = waits && !s->holds_images;
    features_begin_step(s->features, s->batch, s->holds_images, now - s->last_text < TEXT_SECONDS);
}

/* Copies pages out before they are wanted, so that no load waits for room; not beside a load, which has the link for itself.
 * The step's tokens go to the host behind these copies, so a step of few rows makes few. */
static void store_ahead(struct scheduler *s)
{
    const struct engine_config *config = config_of(s);
    const struct kv_layout *layout = &config->layout;
    if (!s->tier || host_tier_has_loads(s->tier))
        return;
    uint32_t n_blocks = (config->max_num_batched_tokens - s->rows_left) / layout->block_tokens;
    uint64_t n_most = (uint64_t)n_groups(s) * n_blocks + STORED_BYTES / layout->page_bytes + 1;
    uint32_t n = n_most < s->n_store_ahead ? (uint32_t)n_most : s->n_store_ahead;
    /* Where copies run beside steps, and what the pool has too takes half of the slots at most. */
    if (config->runner.is_async && config->runner.n_host_slots / 2 >= config->n_pages)
        block_manager_store_new(s->pools[0].blocks, n);
    block_manager_store_ahead(s->pools[0].blocks, n);
}

/* True for a step with neither rows nor images. */
static bool is_empty(const struct scheduler *s)
{
    return s->rows_left == config_of(s)->max_num_batched_tokens && !(s->features && s->batch->n_encodings);
}

void scheduler_begin_step(struct scheduler *s, struct batch *batch, bool is_in_flight, double now)
{
    s->batch = batch;
    s->n_steps++;
    for (uint32_t i = 0; i < s->n_pools; i++)
        block_manager_begin_step(s->pools[i].blocks);
    batch->shares_new_keys = false;
    begin_images(s, now);
    batch->adapter_images = s->adapters.images;
    batch->n_adapter_slots = s->adapters.n;
    s->rows_left = config_of(s)->max_num_batched_tokens;
    rows_spend(s, is_in_flight, now);
    if (s->holds_images && s->rows_left == config_of(s)->max_num_batched_tokens) {
        features_release(s->features);
        rows_spend(s, is_in_flight, now);
    }
    while (is_empty(s) && !is_in_flight && s->waiting.n && park_idle(s))
        rows_spend(s, is_in_flight, now);
    store_ahead(s);
    if (s->outer)
        scheduler_save_early(s);
    s->has_stalled = is_empty(s) && !is_in_flight && s->waiting.n + s->n_running && !s->n_seeking;
}

void scheduler_end_step(struct scheduler *s)
{
    for (uint32_t i = 0; i < s->batch->n_copies; i++)
        if (s->copy_owners[i].held)
            block_manager_unhold(s->pools[s->copy_owners[i].pool].blocks, s->copy_owners[i].held);
    s->batch->n_copies = 0;
    if (s->batch->n_rows) /* else the step with the next rows brings the changes */
        page_tables_settle(&s->tables);
    adapter_slots_settle(&s->adapters);
    for (uint32_t i = 0; i < s->n_running; i++) {
        struct sequence *q = s->running[i];
        q->n_ever_computed = q->n_computed > q->n_ever_computed ? q->n_computed : q->n_ever_computed;
        q->n_rows = 0;
        q->draws = false;
        q->next_fork = NULL;
    }
}

/* ---- commands ---- */

void scheduler_add(struct scheduler *s, struct sequence *q)
{
    q->state = SEQUENCE_WAITING;
    queue_insert(&s->waiting, q);
    s->n_admitted = 0; /* the new sequence may be ahead of those admitted before it arrived */
}

void scheduler_remove(struct scheduler *s, struct sequence *q)
{
    if (q->state == SEQUENCE_RUNNING) {
        pages_release(s, q);
        running_remove(s, q);
    } else if (q->state == SEQUENCE_PARKED) {
        s->n_parked--;
    } else {
        swap_drop(s, q);
        queue_remove(&s->waiting, q);
    }
    features_forget(s->features, q);
    q->state = SEQUENCE_FINISHED;
}
