#include "connector_library.h"

#include "../base/checksum.h"
#include "../base/mem.h"
#include "peer.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <string.h>

/* Size of the table of CONNECTOR_ABI at revision 1. Every library has these fields. */
#define FIRST_BYTES (offsetof(struct connector_table, counts) + sizeof(void (*)(void)))
#define KEYS_AT_ONCE 512u

struct library {
    struct connector_table table;  /* fields that the library does not have are zero */
    void *ctx;
    size_t part_bytes;
    atomic_uint_least64_t n_bad, n_errors;
};

static const struct connector_host HOST = {CONNECTOR_ABI, CONNECTOR_REVISION, sizeof(struct connector_table), 0, err_set};

/* ---- the library ---- */

static enum rc refuse(struct err *err, const char *path, const char *reason)
{
    err_set(err, RC_CONFIG, "kv_connector '%.200s': %.250s", path, reason);
    err_name(err, "kv_connector", NULL);
    return RC_CONFIG;
}

static enum rc find_entry(const char *path, connector_entry *entry, struct err *err)
{
    if (!strcmp(path, LIBRARY_OWN)) {
        *entry = peer_connector;
        return RC_OK;
    }
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!handle)
        return refuse(err, path, dlerror());
    void *symbol = dlsym(handle, CONNECTOR_SYMBOL);
    if (!symbol)
        return refuse(err, path, "the library has no " CONNECTOR_SYMBOL);
    memcpy(entry, &symbol, sizeof *entry);
    return RC_OK;
}

static enum rc copy_table(const char *path, const struct connector_table *given, struct connector_table *table, struct err *err)
{
    if (!given)
        return refuse(err, path, "the library needs a newer llmpy");
    if (given->abi != CONNECTOR_ABI || given->size_bytes < FIRST_BYTES)
        return refuse(err, path, "the library has a struct connector_table of another ABI");
    memset(table, 0, sizeof *table);
    memcpy(table, given, given->size_bytes < sizeof *table ? given->size_bytes : sizeof *table);
    if (!table->open || !table->close || !table->match || !table->load || !table->save)
        return refuse(err, path, "the library lacks one of open, close, match, load and save");
    return RC_OK;
}

/* ---- calls ---- */

static bool note(struct library *library, enum rc rc)
{
    atomic_fetch_add(&library->n_errors, rc != RC_OK);
    return rc == RC_OK;
}

static struct connector_key key_of(const struct hash *key, uint32_t group)
{
    return (struct connector_key){.low = key->lo, .high = key->hi, .group = group};
}

static struct connector_block block_of(const struct library *library, const struct outer_block *block, bool is_save)
{
    return (struct connector_block){
        .key = key_of(&block->key, block->group), .parts = block->parts, .n_parts = block->n_parts,
        .checksum = is_save ? checksum_parts(block->parts, block->n_parts, library->part_bytes) : 0};
}

/* Asks for up to KEYS_AT_ONCE keys of one group. */
static bool match_some(struct library *library, const struct hash *keys, uint32_t n, uint32_t group, bool *found)
{
    struct connector_key wanted[KEYS_AT_ONCE] = {{0}};
    uint8_t answers[KEYS_AT_ONCE] = {0};
    struct err err;
    for (uint32_t i = 0; i < n; i++)
        wanted[i] = key_of(&keys[i], group);
    if (!note(library, library->table.match(library->ctx, wanted, n, answers, &err)))
        return false;
    bool is_good = true;
    for (uint32_t i = 0; i < n; i++) {
        is_good &= answers[i] <= 1;
        found[i] = answers[i] == 1;
    }
    return note(library, is_good ? RC_OK : RC_INVALID);
}

static bool library_match(void *ctx, const struct hash *keys, uint32_t n_keys, const uint32_t *groups, uint32_t n_groups,
                          bool *found)
{
    for (uint32_t g = 0; g < n_groups; g++)
        for (uint32_t i = 0; i < n_keys; i += KEYS_AT_ONCE) {
            uint32_t n = n_keys - i < KEYS_AT_ONCE ? n_keys - i : KEYS_AT_ONCE;
            if (!match_some(ctx, keys + i, n, groups[g], found + (size_t)g * n_keys + i))
                return false;
        }
    return true;
}

static bool library_load(void *ctx, const struct outer_block *block)
{
    struct library *library = ctx;
    struct connector_block wanted = block_of(library, block, false);
    uint8_t is_loaded = 0;
    struct err err;
    if (!note(library, library->table.load(library->ctx, &wanted, 1, &is_loaded, &err)) || is_loaded != 1)
        return false;
    bool is_good = checksum_parts(block->parts, block->n_parts, library->part_bytes) == wanted.checksum;
    atomic_fetch_add(&library->n_bad, !is_good);
    return is_good;
}

static bool library_save(void *ctx, const struct outer_block *block)
{
    struct library *library = ctx;
    struct connector_block given = block_of(library, block, true);
    struct err err;
    return note(library, library->table.save(library->ctx, &given, 1, &err));
}

static void library_clear(void *ctx)
{
    struct library *library = ctx;
    struct err err;
    if (library->table.clear)
        note(library, library->table.clear(library->ctx, &err));
}

static void library_stats(void *ctx, struct connector_stats *stats)
{
    struct library *library = ctx;
    struct connector_counts counts = {0};
    if (library->table.counts)
        library->table.counts(library->ctx, &counts);
    *stats = (struct connector_stats){counts.n_blocks, counts.n_bytes, counts.n_evicted, atomic_load(&library->n_bad),
                                      atomic_load(&library->n_errors) + counts.n_failures};
}

static void library_close(void *ctx)
{
    struct library *library = ctx;
    library->table.close(library->ctx);
    mem_free(library);
}

enum rc connector_library_open(const struct library_options *options, size_t part_bytes, uint32_t bundle_pages,
                               uint32_t block_tokens, struct connector *connector, struct err *err)
{
    struct connector_options given = {
        .size_bytes = sizeof given, .n_pairs = options->n_pairs, .pairs = options->pairs, .part_bytes = part_bytes,
        .most_parts = bundle_pages > 1 ? bundle_pages : 1, .block_tokens = block_tokens};
    struct library *library = mem_calloc(1, sizeof *library);
    connector_entry entry = NULL;
    bool is_own = !strcmp(options->path, LIBRARY_OWN);
    if (!library)
        return err_set(err, RC_MEMORY, "kv_connector: out of memory");
    memcpy(given.fingerprint, options->fingerprint, sizeof given.fingerprint);
    library->part_bytes = part_bytes;
    enum rc rc = find_entry(options->path, &entry, err);
    if (!rc)
        rc = copy_table(options->path, entry(&HOST), &library->table, err);
    if (!rc) {
        struct err own = {.message = "open failed"};
        rc = library->table.open(&given, &library->ctx, &own);
        if (rc)
            rc = refuse(err, options->path, own.message);
    }
    if (rc) {
        mem_free(library);
        return rc;
    }
    *connector = (struct connector){library, NULL, library_match, library_load, library_save, library_clear, library_stats,
                                    library_close, options->is_shared && library->table.lasts, options->deadline_s,
                                    is_own, is_own ? PEER_THREADS : 1};
    return RC_OK;
}
