/* bad_connector.c: a connector that keeps blocks in memory, and does one thing wrong: the option "how". Built by
 * test_native_connectors.py; BREAK changes its table. */
#include <llmpy_connector.h>

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifndef BREAK
#define BREAK
#endif
#define MOST 4096

struct kept {
    struct connector_key key;
    uint64_t checksum;
    char *bytes;
};

struct store {
    struct kept kept[MOST];
    uint32_t n;
    uint64_t part_bytes;
    char how[32];
};

static const struct connector_host *core;

static int does(const struct store *store, const char *how)
{
    return !strcmp(store->how, how);
}

static enum rc spoil(const struct store *store, const char *fails, const char *hangs, struct err *err)
{
    if (does(store, hangs))
        sleep(2);
    return does(store, fails) ? core->err_set(err, RC_IO, "not today") : RC_OK;
}

static struct kept *find(struct store *store, const struct connector_key *key)
{
    for (uint32_t i = 0; i < store->n; i++)
        if (!memcmp(&store->kept[i].key, key, sizeof *key))
            return &store->kept[i];
    return NULL;
}

static enum rc store_open(const struct connector_options *options, void **ctx, struct err *err)
{
    struct store *store = calloc(1, sizeof *store);
    for (uint32_t i = 0; i < options->n_pairs; i++)
        if (!strcmp(options->pairs[i].name, "how"))
            strncpy(store->how, options->pairs[i].value, sizeof store->how - 1);
    store->part_bytes = options->part_bytes;
    *ctx = store;
    if (!does(store, "fails open"))
        return RC_OK;
    free(store);
    return core->err_set(err, RC_CONFIG, "the shop is closed");
}

static void store_close(void *ctx)
{
    struct store *store = ctx;
    for (uint32_t i = 0; i < store->n; i++)
        free(store->kept[i].bytes);
    free(store);
}

static enum rc store_match(void *ctx, const struct connector_key *keys, uint32_t n, uint8_t *found, struct err *err)
{
    struct store *store = ctx;
    for (uint32_t i = 0; i < n; i++)
        found[i] = does(store, "answers nonsense") ? (uint8_t)(i + 2) : does(store, "claims") || find(store, &keys[i]);
    return spoil(store, "fails match", "hangs match", err);
}

static enum rc store_load(void *ctx, struct connector_block *blocks, uint32_t n, uint8_t *loaded, struct err *err)
{
    struct store *store = ctx;
    for (uint32_t b = 0; b < n; b++) {
        const struct kept *kept = find(store, &blocks[b].key);
        for (uint32_t i = 0; i < blocks[b].n_parts; i++)
            if (kept)
                memcpy(blocks[b].parts[i], kept->bytes + i * store->part_bytes, store->part_bytes);
        blocks[b].checksum = kept ? kept->checksum : 0;
        loaded[b] = kept != NULL;
        if (does(store, "loads nonsense"))
            loaded[b] = 7;
        if (does(store, "changes bytes"))
            ((char *)blocks[b].parts[0])[store->part_bytes - 1] ^= 1;
    }
    return spoil(store, "fails load", "hangs load", err);
}

static enum rc store_save(void *ctx, const struct connector_block *blocks, uint32_t n, struct err *err)
{
    struct store *store = ctx;
    for (uint32_t b = 0; b < n && store->n < MOST; b++) {
        struct kept *kept = &store->kept[store->n++];
        *kept = (struct kept){blocks[b].key, blocks[b].checksum, malloc(blocks[b].n_parts * store->part_bytes)};
        for (uint32_t i = 0; i < blocks[b].n_parts; i++)
            memcpy(kept->bytes + i * store->part_bytes, blocks[b].parts[i], store->part_bytes);
    }
    return spoil(store, "fails save", "hangs save", err);
}

static void store_counts(void *ctx, struct connector_counts *counts)
{
    const struct store *store = ctx;
    *counts = (struct connector_counts){.n_blocks = store->n, .n_failures = does(store, "counts") ? 5 : 0};
}

/* The table, with room behind it for the fields of a newer header. */
static struct {
    struct connector_table table;
    void *newer[4];
} grown = {.table = {.abi = CONNECTOR_ABI, .size_bytes = sizeof grown, .open = store_open, .close = store_close,
                     .match = store_match, .load = store_load, .save = store_save, .counts = store_counts}};

const struct connector_table *llmpy_connector(const struct connector_host *host)
{
    core = host;
    BREAK;
    return &grown.table;
}
