/* shelf.c: a connector of llmpy that keeps each block in a file of a folder, the option "folder". Engines with one
 * prefix_cache_seed that use one folder find each other's blocks, now or later. Nothing is ever removed but by a reset. */
#include <llmpy_connector.h>

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define PATH_BYTES 1024

struct shelf {
    char folder[PATH_BYTES - 128];
    char prefix[33];               /* the fingerprint, as text */
    uint64_t part_bytes;
};

static const struct connector_host *core;

static void path_of(const struct shelf *shelf, const struct connector_key *key, const char *ending, char path[PATH_BYTES])
{
    snprintf(path, PATH_BYTES, "%s/%s-%016llx%016llx-%u%s", shelf->folder, shelf->prefix, (unsigned long long)key->high,
             (unsigned long long)key->low, key->group, ending);
}

static enum rc shelf_open(const struct connector_options *options, void **ctx, struct err *err)
{
    const char *folder = NULL;
    for (uint32_t i = 0; i < options->n_pairs; i++)
        if (!strcmp(options->pairs[i].name, "folder"))
            folder = options->pairs[i].value;
    struct shelf *shelf = calloc(1, sizeof *shelf);
    if (!shelf)
        return core->err_set(err, RC_MEMORY, "out of memory");
    if (!folder || strlen(folder) >= sizeof shelf->folder) {
        free(shelf);
        return core->err_set(err, RC_CONFIG, "wanted the option folder, a path");
    }
    strcpy(shelf->folder, folder);
    for (int i = 0; i < 16; i++)
        snprintf(shelf->prefix + 2 * i, 3, "%02x", options->fingerprint[i]);
    shelf->part_bytes = options->part_bytes;
    *ctx = shelf;
    return RC_OK;
}

static enum rc shelf_match(void *ctx, const struct connector_key *keys, uint32_t n, uint8_t *found, struct err *err)
{
    (void)err;
    char path[PATH_BYTES];
    for (uint32_t i = 0; i < n; i++) {
        path_of(ctx, &keys[i], "", path);
        found[i] = !access(path, R_OK);
    }
    return RC_OK;
}

/* A file has the checksum, then the parts. */
static uint8_t read_block(const struct shelf *shelf, struct connector_block *block)
{
    char path[PATH_BYTES];
    path_of(shelf, &block->key, "", path);
    FILE *file = fopen(path, "rb");
    uint8_t is_whole = file && fread(&block->checksum, sizeof block->checksum, 1, file) == 1;
    for (uint32_t i = 0; is_whole && i < block->n_parts; i++)
        is_whole = fread(block->parts[i], shelf->part_bytes, 1, file) == 1;
    if (file)
        fclose(file);
    return is_whole;
}

static enum rc shelf_load(void *ctx, struct connector_block *blocks, uint32_t n, uint8_t *loaded, struct err *err)
{
    (void)err;
    for (uint32_t i = 0; i < n; i++)
        loaded[i] = read_block(ctx, &blocks[i]);
    return RC_OK;
}

/* Writes under a name of its own and renames, so that others read whole files alone. */
static enum rc write_block(const struct shelf *shelf, const struct connector_block *block, struct err *err)
{
    char path[PATH_BYTES], temporary[PATH_BYTES], ending[32];
    snprintf(ending, sizeof ending, ".%ld.tmp", (long)getpid());
    path_of(shelf, &block->key, "", path);
    path_of(shelf, &block->key, ending, temporary);
    FILE *file = fopen(temporary, "wb");
    int is_whole = file && fwrite(&block->checksum, sizeof block->checksum, 1, file) == 1;
    for (uint32_t i = 0; is_whole && i < block->n_parts; i++)
        is_whole = fwrite(block->parts[i], shelf->part_bytes, 1, file) == 1;
    if (file && fclose(file))
        is_whole = 0;
    if (is_whole && !rename(temporary, path))
        return RC_OK;
    remove(temporary);
    return core->err_set(err, RC_IO, "cannot write %s", path);
}

static enum rc shelf_save(void *ctx, const struct connector_block *blocks, uint32_t n, struct err *err)
{
    enum rc rc = RC_OK;
    for (uint32_t i = 0; !rc && i < n; i++)
        rc = write_block(ctx, &blocks[i], err);
    return rc;
}

static enum rc shelf_clear(void *ctx, struct err *err)
{
    struct shelf *shelf = ctx;
    DIR *folder = opendir(shelf->folder);
    char path[PATH_BYTES];
    if (!folder)
        return core->err_set(err, RC_IO, "cannot read %s", shelf->folder);
    for (const struct dirent *entry; (entry = readdir(folder));)
        if (!strncmp(entry->d_name, shelf->prefix, strlen(shelf->prefix))) {
            snprintf(path, sizeof path, "%s/%.120s", shelf->folder, entry->d_name);
            remove(path);
        }
    closedir(folder);
    return RC_OK;
}

EXPORT const struct connector_table *llmpy_connector(const struct connector_host *host)
{
    static const struct connector_table TABLE = {
        .abi = CONNECTOR_ABI, .size_bytes = sizeof TABLE, .lasts = 1, .open = shelf_open, .close = free, .match = shelf_match,
        .load = shelf_load, .save = shelf_save, .clear = shelf_clear};
    core = host;
    return &TABLE;
}
