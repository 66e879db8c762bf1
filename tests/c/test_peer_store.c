/* A peer's store of blocks that several threads fill while it has too little room for them. */
#include "check.h"

#include "../../csrc/engine/peer_store.h"

#include <pthread.h>

#define N_THREADS 4
#define N_BLOCKS 200
#define N_KEYS 7
#define PART_BYTES (1 << 19)

/* Saves and loads blocks in turn; every block that is found has its own bytes. */
static void *save_and_load(void *store)
{
    char *bytes = malloc(PART_BYTES), *read = malloc(PART_BYTES);
    const char *fault = NULL;
    void *parts[1];
    for (uint32_t i = 0; i < N_BLOCKS; i++) {
        struct connector_block block = {.key = {.low = i % N_KEYS, .high = 1}, .n_parts = 1, .parts = parts};
        uint32_t slot;
        memset(bytes, (int)(i % N_KEYS), PART_BYTES);
        parts[0] = bytes;
        peer_store_save(store, &block);
        parts[0] = read;
        if (peer_store_find(store, &block.key, 1, &slot) && peer_memory_read(peer_store_memory(store), &slot, &block) &&
            memcmp(read, bytes, PART_BYTES))
            fault = "a block has the bytes of another";
    }
    free(bytes);
    free(read);
    return (void *)fault;
}

static void run(uint32_t n_slots)
{
    struct peer_store *store;
    struct err err;
    pthread_t threads[N_THREADS];
    REQUIRE(peer_store_create(n_slots * (PART_BYTES + 64), PART_BYTES, &store, &err) == RC_OK);
    for (uint32_t i = 0; i < N_THREADS; i++)
        REQUIRE(pthread_create(&threads[i], NULL, save_and_load, store) == 0);
    for (uint32_t i = 0; i < N_THREADS; i++) {
        void *fault;
        REQUIRE(pthread_join(threads[i], &fault) == 0);
        if (fault)
            CHECK_FAIL("%s\n", (char *)fault);
    }
    struct connector_counts counts;
    peer_store_counts(store, &counts);
    CHECK(counts.n_blocks >= 1 && counts.n_blocks <= n_slots);
    peer_store_clear(store);
    peer_store_counts(store, &counts);
    CHECK(counts.n_blocks == 0);
    peer_store_destroy(store);
}

TEST(several_threads_share_fewer_slots_than_threads) { run(1); }
TEST(several_threads_share_slots) { run(5); }
