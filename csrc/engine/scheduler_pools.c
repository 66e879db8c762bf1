/* scheduler_pools.c: which pool of pages a sequence gets, where each rank has pages of its own. */
#include "scheduler.h"
#include "sequence_pages.h"

/* A pool with a sequence's blocks is chosen unless so many more sequences run there than in another one: blocks are saved once,
 * and a rank with more rows than the others keeps them waiting in every step. */
#define MOST_AHEAD 4u

struct page_counts scheduler_count_pages(const struct scheduler *s)
{
    struct page_counts counts = {0};
    for (uint32_t i = 0; i < s->n_pools; i++) {
        const struct block_manager *blocks = s->pools[i].blocks;
        counts.n_free += block_manager_n_free(blocks);
        counts.n_cached += block_manager_n_cached(blocks);
        counts.n_bundles += block_manager_n_bundles(blocks);
        counts.n_evictions += block_manager_n_evictions(blocks);
    }
    return counts;
}

/* Number of leading blocks that a pool has, by the first group. */
static uint32_t leading_blocks(struct block_manager *blocks, struct sequence *q, uint32_t limit)
{
    uint32_t n = 0;
    while (n < limit && block_manager_find(blocks, sequence_key(q, n), 0))
        n++;
    return n;
}

uint32_t scheduler_choose_pool(const struct scheduler *s, struct sequence *q, uint32_t limit)
{
    uint32_t least = UINT32_MAX, chosen = 0, most_blocks = 0;
    for (uint32_t i = 0; i < s->n_pools; i++)
        least = s->pools[i].n_running < least ? s->pools[i].n_running : least;
    for (uint32_t i = 0; i < s->n_pools; i++) {
        const struct pool *pool = &s->pools[i], *best = &s->pools[chosen];
        bool is_open = n_groups(s) && pool->n_running <= least + MOST_AHEAD;
        uint32_t n_blocks = is_open ? leading_blocks(pool->blocks, q, limit) : 0;
        bool is_better = n_blocks > most_blocks;
        if (n_blocks == most_blocks)
            is_better = pool->n_running != best->n_running
                            ? pool->n_running < best->n_running
                            : block_manager_n_free(pool->blocks) > block_manager_n_free(best->blocks);
        if (i && !is_better)
            continue;
        chosen = i;
        most_blocks = n_blocks;
    }
    return chosen;
}

void scheduler_sort_copies(struct scheduler *s)
{
    for (uint32_t i = 1; i < s->batch->n_copies; i++) {
        const struct copy_owner owner = s->copy_owners[i];
        const struct page_copy copy = s->batch->copies[i];
        uint32_t at = i;
        for (; at && s->copy_owners[at - 1].pool > owner.pool; at--) {
            s->copy_owners[at] = s->copy_owners[at - 1];
            s->batch->copies[at] = s->batch->copies[at - 1];
        }
        s->copy_owners[at] = owner;
        s->batch->copies[at] = copy;
    }
}
