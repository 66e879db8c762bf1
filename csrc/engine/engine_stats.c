/* engine_stats.c: the gauges of an engine, and the records of its steps. */
#define _GNU_SOURCE
#include "engine_state.h"

#include "features.h"

void engine_publish_stats(struct engine *e)
{
    struct engine_stats *stats = e->stats;
    const struct page_counts pages = scheduler_count_pages(&e->scheduler);
    stats->num_running = e->scheduler.n_running;
    stats->num_preemptions = e->scheduler.n_preemptions;
    stats->num_mixed_preemptions = e->scheduler.n_mixed_preemptions;
    stats->prompt_tokens = e->scheduler.prompt_tokens;
    stats->cached_tokens = e->scheduler.cached_tokens;
    stats->prefix_cache_queries = e->scheduler.cache_queries;
    stats->prefix_cache_hits = e->scheduler.cache_hits;
    stats->prompt_rows = e->scheduler.n_prompt_rows;
    stats->decode_rows = e->scheduler.n_decode_rows;
    stats->redone_rows = e->scheduler.n_redone_rows;
    stats->draft_rows = e->scheduler.n_draft_rows;
    stats->kv_blocks_free = pages.n_free;
    stats->kv_blocks_cached = pages.n_cached;
    stats->state_snapshots = pages.n_bundles;
    stats->state_snapshot_bytes = stats->state_snapshots * e->config.layout.n_state_pages * e->config.layout.page_bytes;
    stats->state_snapshots_taken = e->scheduler.n_snapshots;
    stats->evictions = pages.n_evictions;
    if (e->scheduler.features) {
        const struct features_counts *counts = features_counts(e->scheduler.features);
        stats->images_encoded = counts->n_items;
        stats->image_pieces = counts->n_pieces;
        stats->image_rows = counts->n_rows;
        stats->image_cache_hits = counts->n_hits;
        stats->images_reencoded = counts->n_again;
        stats->image_cache_evictions = counts->n_evictions;
    }
    statistics_publish(e->statistics);
}

struct step_record engine_describe_step(const struct engine *e, const struct batch *b, const struct scheduler *before,
                                        double begun)
{
    const struct scheduler *s = &e->scheduler;
    const struct page_counts pages = scheduler_count_pages(s);
    return (struct step_record){
        .start = begun,
        .n_rows = b->n_rows,
        .n_prompt = (uint32_t)(s->n_prompt_rows - before->n_prompt_rows),
        .n_decode = (uint32_t)(s->n_decode_rows - before->n_decode_rows),
        .n_redone = (uint32_t)(s->n_redone_rows - before->n_redone_rows),
        .n_draft = (uint32_t)(s->n_draft_rows - before->n_draft_rows),
        .n_admitted = s->n_admitted,
        .n_preempted = s->n_preempted,
        .n_running = s->n_running,
        .n_waiting = (uint32_t)s->waiting.n,
        .n_pages_used = (uint32_t)(e->stats->kv_blocks_total - pages.n_free),
        .n_pages_cached = (uint32_t)pages.n_cached,
        .n_pieces = batch_n_pieces(b),
        .n_piece_rows = batch_n_piece_rows(b),
    };
}
