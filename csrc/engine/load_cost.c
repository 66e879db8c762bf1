#include "load_cost.h"

#include "sequence_pages.h"

#define MEASURED_EVERY 16u /* one of so many hits that would be skipped is loaded, because times change */

/* Seconds of the loads of a page: from the host tier, or through it from outside. */
static double page_s(const struct scheduler *s, int32_t page)
{
    if (page >= 0)
        return 0;
    return s->page_move_s[MOVE_IN] + (page == PAGE_OUTSIDE ? s->page_load_s : 0);
}

/* Seconds of the loads of a hit. *first: the first block with one; n_hit: there is none. */
static double loads_s(struct scheduler *s, struct sequence *q, uint32_t slot, uint32_t n_hit, uint32_t *first)
{
    double seconds = 0;
    *first = n_hit;
    for (uint32_t b = n_hit; b-- > 0;)
        for (uint32_t g = 0; g < n_groups(s); g++) {
            int32_t page = scheduler_table(s, g, slot)[b];
            seconds += page_s(s, page);
            *first = page < 0 ? b : *first;
        }
    int32_t bundle = s->n_state_pages && n_hit ? pages_look(s, q, n_hit - 1, BUNDLE_GROUP) : 0;
    if (bundle < 0 && *first == n_hit)
        *first = n_hit - 1;
    return seconds + page_s(s, bundle) * s->n_state_pages;
}

static void count_skipped(struct scheduler *s, uint32_t n_blocks)
{
    s->n_skipped_loads++;
    s->n_skipped_tokens += n_blocks * block_tokens(s);
}

uint32_t load_cost_cut(struct scheduler *s, struct sequence *q, uint32_t slot, uint32_t n_hit)
{
    uint32_t n = n_hit, first, n_cut;
    if (!config_of(s)->loads_by_cost || s->row_s <= 0)
        return n_hit;
    double seconds = loads_s(s, q, slot, n, &first);
    while (first < n && seconds > (n - first) * block_tokens(s) * s->row_s) {
        if (n == n_hit && ++s->n_dear_hits % MEASURED_EVERY == 0)
            return n_hit;
        n_cut = scheduler_find_hit(s, q, slot, first);
        for (uint32_t g = 0; g < n_groups(s); g++)
            for (uint32_t b = n_cut; b < n; b++)
                scheduler_table(s, g, slot)[b] = 0;
        n = n_cut;
        seconds = loads_s(s, q, slot, n, &first);
    }
    if (n < n_hit)
        count_skipped(s, n_hit - n);
    return n;
}
