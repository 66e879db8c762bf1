#define _GNU_SOURCE
#include "disk_cache.h"

#include "../base/checksum.h"
#include "../base/disk.h"
#include "../base/mem.h"
#include "block_manager.h"
#include "key_table.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>

#define MAX_FILES (1u << 22)
#define DEADLINE_S 10.0
#define LEAST_DIRECT (64u << 10) /* smaller pages go through the page cache, where writes wait for no disk */
#define N_LOADERS 4u
#define HEADS (N_LOADERS + 1u)
#define SAVES_A_SCAN 64u /* an engine learns what others have written, to count it towards the limit, every so many saves */
#define NAME_LENGTH 37u /* 32 hexadecimal digits of the key, "-", four of the group */
#define OWN_PREFIX "private-"
#define OWN_PREFIX_LENGTH (sizeof OWN_PREFIX - 1)
#define TEMPORARY ".tmp"

struct header {
    char magic[8];
    uint32_t version, block_tokens;
    uint8_t fingerprint[DISK_FINGERPRINT];
    struct hash key;
    uint32_t group, n_parts;
    uint64_t checksum;             /* of the block's bytes */
};
_Static_assert(sizeof(struct header) == 64, "the header of a file has 64 bytes");

/* What a call that reads or writes a file needs. */
struct room {
    char *head;                    /* [head_bytes] the header, and zeros */
    struct iovec *buffers;         /* [1 + most parts] */
    bool is_taken;
};

struct disk_cache {
    struct header header;          /* the part that all files share */
    size_t page_bytes;
    size_t head_bytes;             /* before the pages; DISK_UNIT if they are large multiples of it, so that files go direct */
    uint32_t bundle_pages, n_items;
    uint64_t limit;
    int base, folder;              /* descriptors; -1: not open */
    bool is_shared;
    char name[64];                 /* of the folder in the base */
    char temporary[32];            /* of the one file that this engine is writing */
    uint32_t n_saves;
    char *heads;
    struct iovec *buffers;
    struct room writer;
    pthread_mutex_t saving;        /* one file is written at a time */

    pthread_mutex_t lock;          /* guards what follows; held O(1) */
    struct room readers[N_LOADERS];
    struct key_table table;        /* its items are the files */
    uint32_t *scans;               /* [n_items + 1] number of the scan that last saw the file */
    uint32_t free, used;           /* lists: unused items; files, the least recently used first */
    uint32_t n_scans;
    uint64_t last_change_ns;       /* of the folder, at the last scan */
    struct connector_stats stats;
};

/* ---- names ---- */

static uint64_t file_bytes(const struct disk_cache *c, uint32_t group)
{
    return c->head_bytes + (group == BUNDLE_GROUP ? c->bundle_pages : 1) * c->page_bytes;
}

static void name_file(const struct hash *key, uint32_t group, char name[NAME_LENGTH + 1])
{
    snprintf(name, NAME_LENGTH + 1, "%016llx%016llx-%04x", (unsigned long long)key->hi, (unsigned long long)key->lo,
             group & 0xffff);
}

/* False if it is no file of a block. */
static bool parse_name(const char *name, struct hash *key, uint32_t *group)
{
    unsigned long long hi, lo;
    char again[NAME_LENGTH + 1];
    if (strlen(name) != NAME_LENGTH || sscanf(name, "%16llx%16llx-%4x", &hi, &lo, group) != 3)
        return false;
    *key = (struct hash){.lo = lo, .hi = hi};
    name_file(key, *group, again);
    return !strcmp(again, name);
}

static bool is_temporary(const char *name)
{
    size_t n = strlen(name), n_ending = strlen(TEMPORARY);
    return n > n_ending && !strcmp(name + n - n_ending, TEMPORARY);
}

static enum rc random_name(const char *before, const char *behind, char *name, size_t n_bytes, struct err *err)
{
    uint64_t number;
    if (getrandom(&number, sizeof number, 0) != sizeof number)
        return err_set(err, RC_IO, "disk_cache: the system gives no random numbers");
    snprintf(name, n_bytes, "%s%016llx%s", before, (unsigned long long)number, behind);
    return RC_OK;
}

/* Calls visit for each name in a folder but the first two. False if the folder cannot be read. */
static bool each_name(int folder, void (*visit)(void *ctx, const char *name), void *ctx)
{
    int again;
    DIR *names = disk_open_folder(folder, ".", &again) ? NULL : fdopendir(again);
    if (!names)
        return false;
    for (struct dirent *entry; (entry = readdir(names));)
        if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, ".."))
            visit(ctx, entry->d_name);
    closedir(names);
    return true;
}

/* ---- what dead engines have left ---- */

static void remove_name(void *ctx, const char *name)
{
    disk_remove(*(int *)ctx, name, false);
}

/* Removes the folder of an engine that was killed: no process holds the folder's lock. */
static void remove_orphan(void *ctx, const char *name)
{
    struct disk_cache *c = ctx;
    int folder;
    if (strncmp(name, OWN_PREFIX, OWN_PREFIX_LENGTH) || disk_open_folder(c->base, name, &folder))
        return;
    if (!disk_lock(folder)) {
        each_name(folder, remove_name, &folder);
        disk_remove(c->base, name, true);
    }
    disk_close(folder);
}

/* Removes the temporary file of an engine that was killed while it wrote. */
static void remove_unfinished(void *ctx, const char *name)
{
    struct disk_cache *c = ctx;
    uint64_t size_bytes;
    int file;
    if (!is_temporary(name) || disk_open(c->folder, name, &size_bytes, &file))
        return;
    if (!disk_lock(file))
        disk_remove(c->folder, name, false);
    disk_close(file);
}

/* ---- the set of files ---- */

static uint32_t item_find(const struct disk_cache *c, const struct hash *key, uint32_t group)
{
    return key_table_match(&c->table, *key_table_bucket(&c->table, key, group), key, group);
}

static void item_drop(struct disk_cache *c, uint32_t item)
{
    c->stats.n_blocks--;
    c->stats.n_bytes -= file_bytes(c, c->table.items[item].group);
    key_table_drop(&c->table, item);
    list_remove(&c->table, item);
    list_push(&c->table, c->free, item);
}

/* Adds a file as the most recently used. There must be a free item. */
static void item_add(struct disk_cache *c, const struct hash *key, uint32_t group)
{
    uint32_t item = c->table.items[c->free].next;
    list_remove(&c->table, item);
    list_push(&c->table, c->used, item);
    key_table_add(&c->table, item, key, group);
    c->scans[item] = c->n_scans;
    c->stats.n_blocks++;
    c->stats.n_bytes += file_bytes(c, group);
}

static void set_add(struct disk_cache *c, const struct hash *key, uint32_t group)
{
    pthread_mutex_lock(&c->lock);
    if (!item_find(c, key, group) && !list_is_empty(&c->table, c->free))
        item_add(c, key, group);
    pthread_mutex_unlock(&c->lock);
}

/* Takes the least recently used files off the set, and off the disk, until there is room for n bytes in a file. */
static void make_room(struct disk_cache *c, uint64_t n_bytes)
{
    char name[NAME_LENGTH + 1];
    for (;;) {
        pthread_mutex_lock(&c->lock);
        uint32_t oldest = c->table.items[c->used].next;
        bool is_enough = oldest == c->used ||
                         (c->stats.n_bytes + n_bytes <= c->limit && !list_is_empty(&c->table, c->free));
        if (!is_enough) {
            name_file(&c->table.items[oldest].key, c->table.items[oldest].group, name);
            item_drop(c, oldest);
            c->stats.n_evicted++;
        }
        pthread_mutex_unlock(&c->lock);
        if (is_enough)
            return;
        disk_remove(c->folder, name, false);
    }
}

/* Forgets a file that could not be read. is_bad: it is damaged, and removed. */
static void forget(struct disk_cache *c, const struct outer_block *block, bool is_bad)
{
    char name[NAME_LENGTH + 1];
    pthread_mutex_lock(&c->lock);
    uint32_t item = item_find(c, &block->key, block->group);
    if (item)
        item_drop(c, item);
    c->stats.n_bad += is_bad;
    pthread_mutex_unlock(&c->lock);
    name_file(&block->key, block->group, name);
    if (is_bad)
        disk_remove(c->folder, name, false);
}

static bool count_error(struct disk_cache *c)
{
    pthread_mutex_lock(&c->lock);
    c->stats.n_errors++;
    pthread_mutex_unlock(&c->lock);
    return false;
}

/* ---- looking at the folder ---- */

struct found {
    struct hash key;
    uint32_t group;
    uint64_t used_ns;
};
struct listing {
    struct disk_cache *cache;
    uint32_t scan;
    struct found *files;           /* [n] those that the set lacks */
    size_t n, capacity;
};

static uint64_t nanoseconds(const struct timespec *time)
{
    return (uint64_t)time->tv_sec * 1000000000u + (uint64_t)time->tv_nsec;
}

static void list_file(void *ctx, const char *name)
{
    struct listing *list = ctx;
    struct disk_cache *c = list->cache;
    struct found file;
    struct stat status;
    if (!parse_name(name, &file.key, &file.group) || fstatat(c->folder, name, &status, AT_SYMLINK_NOFOLLOW) < 0)
        return;
    bool fits = (uint64_t)status.st_size == file_bytes(c, file.group);
    pthread_mutex_lock(&c->lock);
    uint32_t item = item_find(c, &file.key, file.group);
    if (item)
        c->scans[item] = list->scan;
    c->stats.n_bad += !fits;
    pthread_mutex_unlock(&c->lock);
    if (!fits)
        disk_remove(c->folder, name, false);
    if (item || !fits)
        return;
    if (list->n == list->capacity) {
        size_t more = list->capacity ? 2 * list->capacity : 256;
        struct found *files = mem_resize(list->files, list->capacity * sizeof file, more * sizeof file);
        if (!files)
            return;
        list->files = files;
        list->capacity = more;
    }
    file.used_ns = nanoseconds(&status.st_mtim);
    list->files[list->n++] = file;
}

static int by_use(const void *a, const void *b)
{
    uint64_t first = ((const struct found *)a)->used_ns, second = ((const struct found *)b)->used_ns;
    return (first > second) - (first < second);
}

/* Adds files that others have written, and drops those that others have removed. */
static void scan(struct disk_cache *c)
{
    struct listing list = {.cache = c};
    struct stat status;
    uint64_t change_ns = fstat(c->folder, &status) < 0 ? 0 : nanoseconds(&status.st_mtim);
    pthread_mutex_lock(&c->lock);
    bool is_known = change_ns && change_ns == c->last_change_ns;
    c->n_scans += !is_known;
    list.scan = c->n_scans;
    c->last_change_ns = change_ns;
    pthread_mutex_unlock(&c->lock);
    if (is_known || !each_name(c->folder, list_file, &list))
        return;
    if (list.n)
        qsort(list.files, list.n, sizeof *list.files, by_use);
    for (uint32_t item = 1; item <= c->n_items; item++) {
        pthread_mutex_lock(&c->lock);
        if (c->table.items[item].has_key && c->scans[item] < list.scan)
            item_drop(c, item);
        pthread_mutex_unlock(&c->lock);
    }
    for (size_t i = 0; i < list.n; i++) {
        make_room(c, file_bytes(c, list.files[i].group)); /* also if this engine may have less than earlier ones */
        set_add(c, &list.files[i].key, list.files[i].group);
    }
    mem_free(list.files);
}

/* ---- the connector's calls ---- */

static bool set_has(struct disk_cache *c, const struct hash *key, uint32_t group)
{
    pthread_mutex_lock(&c->lock);
    bool has = item_find(c, key, group) != 0;
    pthread_mutex_unlock(&c->lock);
    return has;
}

/* A file that the set lacks may be one that another engine has written. */
static bool cache_has(void *ctx, const struct hash *key, uint32_t group)
{
    struct disk_cache *c = ctx;
    struct stat status;
    char name[NAME_LENGTH + 1];
    bool has = set_has(c, key, group);
    if (has || !c->is_shared)
        return has;
    name_file(key, group, name);
    if (fstatat(c->folder, name, &status, AT_SYMLINK_NOFOLLOW) < 0 || (uint64_t)status.st_size != file_bytes(c, group))
        return false;
    set_add(c, key, group);
    return set_has(c, key, group);
}

static struct header header_of(const struct disk_cache *c, const struct outer_block *block)
{
    struct header header = c->header;
    header.key = block->key;
    header.group = block->group;
    header.n_parts = block->n_parts;
    return header;
}

static bool is_direct(const struct disk_cache *c, const struct outer_block *block)
{
    bool is = c->head_bytes == DISK_UNIT;
    for (uint32_t i = 0; i < block->n_parts; i++)
        is &= (uintptr_t)block->parts[i] % DISK_UNIT == 0;
    return is;
}

static int buffers_fill(const struct disk_cache *c, struct room *room, const struct outer_block *block)
{
    room->buffers[0] = (struct iovec){room->head, c->head_bytes};
    for (uint32_t i = 0; i < block->n_parts; i++)
        room->buffers[1 + i] = (struct iovec){block->parts[i], c->page_bytes};
    return 1 + (int)block->n_parts;
}

/* There are as many as threads that load. */
static struct room *reader_take(struct disk_cache *c)
{
    struct room *room = c->readers;
    pthread_mutex_lock(&c->lock);
    while (room->is_taken)
        room++;
    room->is_taken = true;
    pthread_mutex_unlock(&c->lock);
    return room;
}

static void reader_give(struct disk_cache *c, struct room *room)
{
    pthread_mutex_lock(&c->lock);
    room->is_taken = false;
    pthread_mutex_unlock(&c->lock);
}

/* Reads a file; *is_bad: it is damaged. */
static int read_file(struct disk_cache *c, const struct outer_block *block, bool *is_bad)
{
    struct header wanted = header_of(c, block);
    char name[NAME_LENGTH + 1];
    uint64_t size_bytes;
    int file;
    name_file(&block->key, block->group, name);
    int code = disk_open(c->folder, name, &size_bytes, &file);
    if (code)
        return code;
    if (is_direct(c, block))
        disk_go_direct(file);
    struct room *room = reader_take(c);
    code = disk_read(file, room->buffers, buffers_fill(c, room, block));
    wanted.checksum = code ? 0 : checksum_parts(block->parts, block->n_parts, c->page_bytes);
    *is_bad = code || memcmp(room->head, &wanted, sizeof wanted) || size_bytes != file_bytes(c, block->group);
    reader_give(c, room);
    if (!*is_bad)
        disk_touch(file);
    disk_close(file);
    return code;
}

static bool cache_load(void *ctx, const struct outer_block *block)
{
    struct disk_cache *c = ctx;
    bool is_bad = false;
    int code = read_file(c, block, &is_bad);
    if (!code && !is_bad) {
        pthread_mutex_lock(&c->lock);
        uint32_t item = item_find(c, &block->key, block->group);
        if (item) {
            list_remove(&c->table, item);
            list_push(&c->table, c->used, item);
        }
        pthread_mutex_unlock(&c->lock);
        return true;
    }
    if (code && code != ENOENT && code != ENODATA)
        count_error(c);
    if (is_bad || code == ENOENT) /* ENOENT: another engine made room */
        forget(c, block, is_bad);
    return false;
}

/* Writes a file under its temporary name, and renames it. */
static int write_file(struct disk_cache *c, const struct outer_block *block)
{
    struct header header = header_of(c, block);
    char name[NAME_LENGTH + 1];
    int file;
    header.checksum = checksum_parts(block->parts, block->n_parts, c->page_bytes);
    memcpy(c->writer.head, &header, sizeof header);
    name_file(&block->key, block->group, name);
    int code = disk_create(c->folder, c->temporary, &file);
    if (code)
        return code;
    disk_lock(file); /* as long as it has its temporary name, it is not an orphan; without locks the name lasts */
    if (is_direct(c, block))
        disk_go_direct(file);
    code = disk_write(file, c->writer.buffers, buffers_fill(c, &c->writer, block));
    if (!code)
        code = disk_rename(c->folder, c->temporary, name);
    disk_close(file);
    if (code)
        disk_remove(c->folder, c->temporary, false);
    return code;
}

static bool cache_save(void *ctx, const struct outer_block *block)
{
    struct disk_cache *c = ctx;
    int code = 0;
    pthread_mutex_lock(&c->saving);
    bool has = cache_has(c, &block->key, block->group);
    if (!has) {
        if (c->is_shared && ++c->n_saves % SAVES_A_SCAN == 0)
            scan(c);
        make_room(c, file_bytes(c, block->group));
        code = write_file(c, block);
        if (!code)
            set_add(c, &block->key, block->group);
    }
    pthread_mutex_unlock(&c->saving);
    return code ? count_error(c) : true;
}

static void cache_clear(void *ctx)
{
    struct disk_cache *c = ctx;
    char name[NAME_LENGTH + 1];
    scan(c); /* files of other engines go, too */
    for (;;) {
        pthread_mutex_lock(&c->lock);
        uint32_t item = c->table.items[c->used].next;
        if (item != c->used) {
            name_file(&c->table.items[item].key, c->table.items[item].group, name);
            item_drop(c, item);
        }
        pthread_mutex_unlock(&c->lock);
        if (item == c->used)
            return;
        disk_remove(c->folder, name, false);
    }
}

static void cache_stats(void *ctx, struct connector_stats *stats)
{
    struct disk_cache *c = ctx;
    pthread_mutex_lock(&c->lock);
    *stats = c->stats;
    pthread_mutex_unlock(&c->lock);
}

static void cache_close(void *ctx)
{
    struct disk_cache *c = ctx;
    if (c->folder >= 0 && !c->is_shared) {
        each_name(c->folder, remove_name, &c->folder);
        disk_remove(c->base, c->name, true);
    }
    if (c->folder >= 0)
        disk_close(c->folder);
    if (c->base >= 0)
        disk_close(c->base);
    key_table_destroy(&c->table);
    mem_free(c->scans);
    mem_free(c->buffers);
    mem_unmap(c->heads, HEADS * c->head_bytes);
    pthread_mutex_destroy(&c->saving);
    pthread_mutex_destroy(&c->lock);
    mem_free(c);
}

/* ---- opening ---- */

static enum rc refuse(struct err *err, const char *path, const char *what, int code)
{
    err_set(err, RC_IO, "disk_cache: %s cannot be %s: %s; use another path, or disk_cache=None", path, what, strerror(code));
    err_name(err, path, NULL);
    if (err)
        err->code = code;
    return RC_IO;
}

static enum rc folders_open(struct disk_cache *c, const struct disk_options *options, struct err *err)
{
    int code = disk_open_folder(AT_FDCWD, options->path, &c->base), file;
    if (code)
        return refuse(err, options->path, "opened", code);
    each_name(c->base, remove_orphan, c);
    enum rc rc = random_name("", TEMPORARY, c->temporary, sizeof c->temporary, err);
    if (!rc && !c->is_shared)
        rc = random_name(OWN_PREFIX, "", c->name, sizeof c->name, err);
    for (uint32_t i = 0; c->is_shared && i < DISK_FINGERPRINT; i++)
        snprintf(c->name + 2 * i, 3, "%02x", options->fingerprint[i]);
    if (rc)
        return rc;
    if ((code = disk_open_folder(c->base, c->name, &c->folder)))
        return refuse(err, options->path, "written to", code);
    if (c->is_shared)
        each_name(c->folder, remove_unfinished, c);
    else
        disk_lock(c->folder); /* fails if the file system has no locks; then no engine removes the folder */
    if ((code = disk_create(c->folder, c->temporary, &file)))
        return refuse(err, options->path, "written to", code);
    disk_close(file);
    disk_remove(c->folder, c->temporary, false);
    return RC_OK;
}

static enum rc set_create(struct disk_cache *c, struct err *err)
{
    uint64_t least = file_bytes(c, 0), n = c->limit / least;
    uint32_t most_parts = c->bundle_pages > 1 ? c->bundle_pages : 1;
    c->n_items = n < MAX_FILES ? (uint32_t)n : MAX_FILES;
    c->scans = mem_calloc((size_t)c->n_items + 1, sizeof *c->scans);
    c->buffers = mem_calloc((size_t)HEADS * (1 + most_parts), sizeof *c->buffers);
    c->heads = mem_map(HEADS * c->head_bytes);
    for (uint32_t i = 0; i < HEADS && c->buffers && c->heads; i++) {
        struct room *room = i < N_LOADERS ? &c->readers[i] : &c->writer;
        room->head = c->heads + i * c->head_bytes;
        room->buffers = c->buffers + (size_t)i * (1 + most_parts);
    }
    if (!c->scans || !c->buffers || !c->heads || key_table_create(&c->table, c->n_items + 1, 2, err))
        return err_set(err, RC_MEMORY, "disk_cache: out of memory for %u files", c->n_items);
    c->free = c->n_items + 1;
    c->used = c->n_items + 2;
    for (uint32_t item = 1; item <= c->n_items; item++)
        list_push(&c->table, c->free, item);
    return RC_OK;
}

enum rc disk_cache_open(const struct disk_options *options, size_t page_bytes, uint32_t bundle_pages, uint32_t block_tokens,
                        struct connector *connector, struct err *err)
{
    struct disk_cache *c = mem_calloc(1, sizeof *c);
    if (!c)
        return err_set(err, RC_MEMORY, "disk_cache: out of memory");
    c->header = (struct header){.magic = "llmpykv", .version = 2, .block_tokens = block_tokens};
    memcpy(c->header.fingerprint, options->fingerprint, DISK_FINGERPRINT);
    c->page_bytes = page_bytes;
    c->head_bytes = page_bytes % DISK_UNIT || page_bytes < LEAST_DIRECT ? sizeof(struct header) : DISK_UNIT;
    c->bundle_pages = bundle_pages;
    c->limit = options->bytes;
    c->is_shared = options->is_shared;
    c->base = c->folder = -1;
    pthread_mutex_init(&c->lock, NULL);
    pthread_mutex_init(&c->saving, NULL);
    uint64_t largest = bundle_pages ? file_bytes(c, BUNDLE_GROUP) : file_bytes(c, 0);
    enum rc rc = RC_OK;
    if (c->limit < largest) {
        rc = err_set(err, RC_CONFIG, "disk_cache: bytes must be at least %llu, a file of this model, got %llu.",
                     (unsigned long long)largest, (unsigned long long)c->limit);
        err_name(err, "disk_cache", NULL);
    }
    if (!rc)
        rc = set_create(c, err);
    if (!rc)
        rc = folders_open(c, options, err);
    if (rc) {
        cache_close(c);
        return rc;
    }
    scan(c);
    *connector = (struct connector){c, cache_has, NULL, cache_load, cache_save, cache_clear, cache_stats, cache_close,
                                    c->is_shared, DEADLINE_S, true, N_LOADERS};
    return RC_OK;
}
