/* Engines with a host tier: random traces whose tokens must be those of the oracle, with moves carried out as late as the engine
 * allows; and what the tier finds again. */
#include "trace.h"

TEST(random_traces_with_a_host_tier)
{
    const struct setup SETUPS[] = {
        {.block_tokens = 4, .n_pages = 26, .max_num_seqs = 6, .max_num_batched_tokens = 16, .n_host_slots = 40},
        {.block_tokens = 4, .n_pages = 26, .max_num_seqs = 6, .max_num_batched_tokens = 40, .n_host_slots = 7, .policy = POLICY_PRIORITY},
        {.block_tokens = 1, .n_pages = 110, .max_num_seqs = 5, .max_num_batched_tokens = 64, .n_host_slots = 200},
        {.block_tokens = 2, .n_pages = 40, .max_num_seqs = 5, .max_num_batched_tokens = 9, .windows = {3, 7}, .n_layers = 2, .n_host_slots = 40},
        {.block_tokens = 4, .n_pages = 60, .max_num_seqs = 6, .max_num_batched_tokens = 12, .windows = {0, 6}, .n_layers = 2, .n_host_slots = 90,
         .has_nan = true},
        {.block_tokens = 4, .n_pages = 50, .max_num_seqs = 6, .max_num_batched_tokens = 40, .states = {{0, 3, 32}, {0, 2, 64}}, .n_states = 2,
         .snapshot_tokens = 24, .n_host_slots = 60},
        {.block_tokens = 2, .n_pages = 60, .max_num_seqs = 5, .max_num_batched_tokens = 30, .windows = {3, 7}, .n_layers = 2,
         .states = {{0, 5, 32}}, .n_states = 1, .snapshot_tokens = 16, .policy = POLICY_PRIORITY, .n_host_slots = 100},
        {.block_tokens = 4, .n_pages = 40, .max_num_seqs = 8, .max_num_batched_tokens = 24, .states = {{0, 3, 256}, {0, 1, 256}}, .n_states = 2,
         .snapshot_tokens = 16, .has_no_attention = true, .n_host_slots = 50},
    };
    const char *wanted = getenv("TRACE_OPERATIONS");
    uint32_t n_setups = sizeof SETUPS / sizeof *SETUPS, n_operations = wanted ? (uint32_t)atoi(wanted) : 24000;
    struct engine_stats stats;
    for (uint32_t i = 0; i < 2 * n_setups && !check_failures; i++) {
        struct setup setup = SETUPS[i / 2];
        setup.is_async = i % 2;
        setup.caches = true;
        trace_run(&setup, n_operations / n_setups, &stats);
        CHECK(stats.evictions > 0);
        CHECK(stats.host_cache_hits > 0);
        CHECK(stats.host_stored_bytes > 0 && stats.host_loaded_bytes > 0);
        if (check_failures)
            fprintf(stderr, "in setup %u, %u steps in flight\n", i / 2, 1 + i % 2);
    }
}
