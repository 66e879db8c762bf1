/* test_connector_abi.c: the offsets of the fields of csrc/engine/connector_abi.h: a number here changes only with CONNECTOR_ABI,
 * and a field that is appended to a struct is appended here, too. Then random traces through llmpy's own connector, whose tokens
 * must be those of the oracle; and what its opening does without memory. */
#include "trace.h"

#include "../../csrc/base/mem.h"
#include "../../csrc/engine/peer.h"

#include <stddef.h>
#include <unistd.h>

#define AT(field, offset) _Static_assert(offsetof(struct OF, field) == (offset), #field);
#define SIZE(name, bytes) _Static_assert(sizeof(struct name) == (bytes), #name);

/* clang-format off */
#define OF connector_key
    AT(low, 0) AT(high, 8) AT(group, 16) AT(unused, 20)
#undef OF
SIZE(connector_key, 24)
#define OF connector_block
    AT(key, 0) AT(parts, 24) AT(n_parts, 32) AT(unused, 36) AT(checksum, 40)
#undef OF
SIZE(connector_block, 48)
#define OF connector_pair
    AT(name, 0) AT(value, 8)
#undef OF
SIZE(connector_pair, 16)
#define OF connector_options
    AT(size_bytes, 0) AT(n_pairs, 4) AT(pairs, 8) AT(fingerprint, 16) AT(part_bytes, 32) AT(most_parts, 40) AT(block_tokens, 44)
#undef OF
SIZE(connector_options, 48)
#define OF connector_counts
    AT(n_blocks, 0) AT(n_bytes, 8) AT(n_evicted, 16) AT(n_failures, 24)
#undef OF
SIZE(connector_counts, 32)
#define OF connector_table
    AT(abi, 0) AT(size_bytes, 4) AT(lasts, 8) AT(unused, 12) AT(open, 16) AT(close, 24) AT(match, 32) AT(load, 40) AT(save, 48)
    AT(clear, 56) AT(counts, 64)
#undef OF
SIZE(connector_table, 72)
#define OF connector_host
    AT(abi, 0) AT(revision, 4) AT(size_bytes, 8) AT(unused, 12) AT(err_set, 16)
#undef OF
SIZE(connector_host, 24)
/* clang-format on */

TEST(the_abi_has_its_number)
{
    CHECK_EQ(CONNECTOR_ABI, 1);
    CHECK(!strcmp(CONNECTOR_SYMBOL, "llmpy_connector"));
}

static uint64_t n_tokens_found, n_evicted;

static void look_at_trace(const struct setup *setup, const struct engine_stats *stats)
{
    (void)setup;
    n_tokens_found += stats->disk_cache_hits;
    n_evicted += stats->disk_evictions;
    CHECK_EQ(stats->disk_errors + stats->disk_bad_files, 0);
}

/* An address of this process alone. */
static const char *own_address(void)
{
    static char address[48];
    snprintf(address, sizeof address, "unix:test-connector-abi-%d", (int)getpid());
    return address;
}

TEST(random_traces_with_a_peer)
{
    const struct connector_pair pairs[2] = {{"bytes", "8000"}, {"listen", own_address()}};
    const struct library_options library = {.path = "peer", .pairs = pairs, .n_pairs = 2, .deadline_s = 10};
    struct setup setups[] = {
        {.block_tokens = 4, .n_pages = 26, .max_num_seqs = 6, .max_num_batched_tokens = 16, .n_host_slots = 30},
        {.block_tokens = 4, .n_pages = 60, .max_num_seqs = 6, .max_num_batched_tokens = 12, .windows = {0, 6}, .n_layers = 2,
         .n_host_slots = 50, .policy = POLICY_PRIORITY},
        {.block_tokens = 4, .n_pages = 50, .max_num_seqs = 6, .max_num_batched_tokens = 40, .states = {{0, 3, 32}, {0, 2, 64}}, .n_states = 2,
         .snapshot_tokens = 24, .n_host_slots = 60},
    };
    for (uint32_t i = 0; i < sizeof setups / sizeof *setups; i++) {
        setups[i].caches = true;
        setups[i].library = &library;
    }
    for (uint32_t round = 0; round < 50 && !(n_tokens_found > 100 && n_evicted > 0) && !check_failures; round++)
        trace_run_all(setups, sizeof setups / sizeof *setups, 1500, look_at_trace); /* on a busy machine, few loads end in one round */
    CHECK(n_tokens_found > 100 && n_evicted > 0);
}

TEST(opening_without_memory_is_an_error)
{
    const struct connector_pair pairs[3] = {{"bytes", "8000"}, {"listen", own_address()}, {"peers", "unix:nobody,,unix:other"}};
    const struct library_options library = {.path = "peer", .pairs = pairs, .n_pairs = 3, .deadline_s = 10};
    struct connector connector;
    struct err err = {0};
    uint64_t n_held = mem_n_held();
    bool is_open = false;
    for (int64_t n = 0; !is_open && n < 100; n++) {
        mem_fail_after(n);
        is_open = !connector_library_open(&library, 256, 3, 4, &connector, &err);
        mem_fail_after(-1);
        CHECK(is_open || mem_n_held() == n_held);
    }
    REQUIRE(is_open);
    const struct hash key = {1, 2};
    bool found = true;
    CHECK(connector.match(connector.ctx, &key, 1, &(uint32_t){0}, 1, &found) && !found); /* nobody is there */
    connector.close(connector.ctx);
    CHECK_EQ(mem_n_held(), n_held);
}
