/* A peer's store of blocks that several threads fill while it has too little room for them. */
#include "check.h"

#include "../../csrc/engine/peer_store.h"

#include <pthread.h>

#define N_THREADS 4
#define N_BLOCKS 200
#define N_KEYS 7
#define PART_BYTES (1 << 19)

static struct connector_block block_of(uint32_t key, void *const *parts)
{
    return (struct connector_block){.key = {.low = key, .high = 1}, .parts = parts, .n_parts = 1};
}

/* Saves blocks in turn. The bytes of a block are its key. */
static void *save(void *store)
{
    char *bytes = malloc(PART_BYTES);
    for (uint32_t i = 0; i < N_BLOCKS; i++) {
        void *parts[1] = {bytes};
        struct connector_block block = block_of(i % N_KEYS, parts);
        memset(bytes, (int)(i % N_KEYS), PART_BYTES);
        peer_store_save(store, &block);
    }
    free(bytes);
    return NULL;
}

/* Counts the blocks that are found, and checks their bytes. */
static uint32_t count_found(struct peer_store *store)
{
    char *bytes = malloc(PART_BYTES);
    uint32_t n_found = 0, slot;
    for (uint32_t key = 0; key < N_KEYS; key++) {
        void *parts[1] = {bytes};
        struct connector_block block = block_of(key, parts);
        if (!peer_store_find(store, &block.key, 1, &slot))
            continue;
        n_found++;
        CHECK(peer_memory_read(peer_store_memory(store), &slot, &block));
        CHECK(bytes[0] == (char)key && !memcmp(bytes, bytes + 1, PART_BYTES - 1));
    }
    free(bytes);
    return n_found;
}

static void run(uint32_t n_slots)
{
    struct peer_store *store;
    struct err err;
    pthread_t threads[N_THREADS];
    REQUIRE(peer_store_create(n_slots * (PART_BYTES + 64), PART_BYTES, &store, &err) == RC_OK);
    for (uint32_t i = 0; i < N_THREADS; i++)
        REQUIRE(pthread_create(&threads[i], NULL, save, store) == 0);
    for (uint32_t i = 0; i < N_THREADS; i++)
        REQUIRE(pthread_join(threads[i], NULL) == 0);
    struct connector_counts counts;
    peer_store_counts(store, &counts);
    CHECK(counts.n_blocks >= 1 && counts.n_blocks <= n_slots && count_found(store) == counts.n_blocks);
    peer_store_clear(store);
    peer_store_counts(store, &counts);
    CHECK(counts.n_blocks == 0 && count_found(store) == 0);
    peer_store_destroy(store);
}

TEST(several_threads_share_fewer_slots_than_threads) { run(1); }
TEST(several_threads_share_slots) { run(5); }
