#define _GNU_SOURCE
#include "peer.h"

#include "../base/clock.h"
#include "../base/mem.h"
#include "peer_server.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MOST_PEERS 64u
#define HOMES (1u << 16)
#define FIRST_PAUSE_S 1.0 /* a peer that failed is left alone for so long, twice as long each time, at most LAST_PAUSE_S */
#define LAST_PAUSE_S 30.0
#define DEFAULT_BYTES (1u << 30)
#define DEFAULT_SECONDS 2.0

/* Another engine. */
struct other {
    char address[PEER_ADDRESS];
    int fd;                        /* -1: not connected */
    struct peer_memory memory;     /* mapped if the peer is of this host */
    double not_before, pause;
};

struct peer {
    struct peer_store *store;
    struct peer_server *server;
    struct peer_hello hello;
    struct other *others;          /* [n_others] */
    uint32_t n_others;
    double seconds;                /* most for a message */
    pthread_rwlock_t maps;         /* held to read another engine's memory, and to unmap it */
    pthread_mutex_t lock;          /* guards what follows, and all connections */
    uint8_t *homes;                /* [HOMES] by key: number of the peer that said it has the block */
    struct connector_key keys[PEER_MOST_KEYS];
    uint32_t places[PEER_MOST_KEYS];
    uint8_t answers[PEER_MOST_KEYS];
    atomic_uint_least64_t n_failures; /* of connecting to other engines, and of asking what they have */
};

/* ---- connections ---- */

static void other_close(struct peer *p, struct other *o)
{
    if (o->fd >= 0)
        close(o->fd);
    o->fd = -1;
    pthread_rwlock_wrlock(&p->maps);
    peer_memory_unmap(&o->memory);
    pthread_rwlock_unlock(&p->maps);
}

/* Leaves a peer alone for a while; false. */
static bool other_fail(struct peer *p, struct other *o)
{
    other_close(p, o);
    o->pause = o->pause > 0 ? o->pause * 2 : FIRST_PAUSE_S;
    o->pause = o->pause < LAST_PAUSE_S ? o->pause : LAST_PAUSE_S;
    o->not_before = seconds_now() + o->pause;
    return false;
}

/* Says hello and takes the welcome, with the peer's memory if it is of this host. */
static bool other_greet(struct peer *p, struct other *o)
{
    struct peer_hello hello = p->hello;
    struct peer_welcome welcome;
    int descriptor = -1;
    bool is_local = peer_is_local(o->address);
    hello.wants_memory = is_local;
    bool is_good = (!is_local || peer_is_own(o->fd)) && peer_write(o->fd, &hello, sizeof hello, p->seconds) &&
                   peer_read_welcome(o->fd, &welcome, &descriptor, p->seconds) && welcome.status == PEER_IS_WELCOME;
    if (is_good && welcome.has_memory)
        is_good = is_local && descriptor >= 0 && peer_memory_map(&o->memory, descriptor, hello.part_bytes, welcome.n_slots);
    if (descriptor >= 0)
        close(descriptor);
    return is_good;
}

static bool other_reach(struct peer *p, struct other *o)
{
    if (o->fd >= 0)
        return true;
    if (seconds_now() < o->not_before)
        return false;
    o->fd = peer_connect(o->address, p->seconds);
    if (o->fd < 0 || !other_greet(p, o)) {
        atomic_fetch_add(&p->n_failures, 1);
        return other_fail(p, o);
    }
    o->pause = 0;
    return true;
}

/* ---- questions ---- */

static uint8_t *home_of(const struct peer *p, const struct connector_key *key)
{
    return &p->homes[key->low % HOMES];
}

/* Asks a peer for those of p->keys [n] that were not found yet; notes what it has. */
static bool ask_other(struct peer *p, uint32_t number, uint32_t n, uint8_t *found)
{
    struct other *o = &p->others[number];
    struct peer_ask ask = {PEER_MATCH, n};
    if (!n || !other_reach(p, o))
        return true; /* a peer that is not there has nothing */
    bool is_good = peer_write(o->fd, &ask, sizeof ask, p->seconds) &&
                   peer_write(o->fd, p->keys, n * sizeof *p->keys, p->seconds) && peer_read(o->fd, p->answers, n, p->seconds);
    for (uint32_t i = 0; is_good && i < n; i++)
        is_good = p->answers[i] <= 1;
    if (!is_good)
        return other_fail(p, o);
    for (uint32_t i = 0; i < n; i++)
        if (p->answers[i]) {
            found[p->places[i]] = 1;
            *home_of(p, &p->keys[i]) = (uint8_t)number;
        }
    return true;
}

static void ask_all(struct peer *p, const struct connector_key *keys, uint32_t n, uint8_t *found)
{
    double until = seconds_now() + 2 * p->seconds;
    for (uint32_t i = 0; i < n; i++)
        found[i] = peer_store_has(p->store, &keys[i]);
    for (uint32_t number = 0; number < p->n_others && seconds_now() < until; number++) {
        uint32_t n_left = 0;
        for (uint32_t i = 0; i < n; i++)
            if (!found[i]) {
                p->keys[n_left] = keys[i];
                p->places[n_left++] = i;
            }
        if (!ask_other(p, number, n_left, found))
            atomic_fetch_add(&p->n_failures, 1);
    }
}

/* A peer's failure hides what it has and nothing else, so it does not fail the call. */
static enum rc peer_match(void *ctx, const struct connector_key *keys, uint32_t n, uint8_t *found, struct err *err)
{
    (void)err;
    struct peer *p = ctx;
    for (uint32_t at = 0; at < n; at += PEER_MOST_KEYS) {
        uint32_t n_now = n - at < PEER_MOST_KEYS ? n - at : PEER_MOST_KEYS;
        pthread_mutex_lock(&p->lock);
        ask_all(p, keys + at, n_now, found + at);
        pthread_mutex_unlock(&p->lock);
    }
    return RC_OK;
}

/* ---- blocks ---- */

/* A question for a block. In memory of this host it is then read without p->lock. */
struct fetch {
    const struct peer_memory *memory; /* not NULL: p->maps is held, and the slots are to be read */
    uint32_t *slots;               /* [n_parts] */
    bool is_loaded;
};

/* Takes a block's bytes off the connection or, if the peer is of this host, the numbers of its slots. False: the connection is
 * of no use any more. */
static bool fetch(struct peer *p, struct other *o, struct connector_block *block, struct fetch *fetch)
{
    struct peer_ask ask = {PEER_LOAD, block->n_parts};
    struct peer_found found;
    if (!peer_write(o->fd, &ask, sizeof ask, p->seconds) || !peer_write(o->fd, &block->key, sizeof block->key, p->seconds) ||
        !peer_read(o->fd, &found, sizeof found, p->seconds))
        return false;
    if (!found.is_found)
        return true;
    if (o->memory.base) {
        if (!peer_read(o->fd, fetch->slots, block->n_parts * sizeof *fetch->slots, p->seconds))
            return false;
        pthread_rwlock_rdlock(&p->maps);
        fetch->memory = &o->memory;
        return true;
    }
    for (uint32_t part = 0; part < block->n_parts; part++)
        if (!peer_read(o->fd, block->parts[part], p->hello.part_bytes, p->seconds))
            return false;
    block->checksum = found.checksum;
    return fetch->is_loaded = true;
}

/* Asks the others for a block, first the one that said it has it. */
static enum rc fetch_any(struct peer *p, struct connector_block *block, struct fetch *wanted, struct err *err)
{
    enum rc rc = RC_OK;
    double until = seconds_now() + 2 * p->seconds;
    uint32_t first = *home_of(p, &block->key);
    for (uint32_t i = 0; i < p->n_others && !wanted->is_loaded && !wanted->memory && seconds_now() < until; i++) {
        struct other *o = &p->others[(first + i) % p->n_others];
        if (other_reach(p, o) && !fetch(p, o, block, wanted)) {
            other_fail(p, o);
            rc = err_set(err, RC_IO, "peer '%s' has failed", o->address);
        }
    }
    return rc;
}

static enum rc load_one(struct peer *p, struct connector_block *block, bool *is_loaded, struct err *err)
{
    struct fetch wanted = {.slots = mem_calloc(block->n_parts, sizeof *wanted.slots)};
    enum rc rc = RC_OK;
    *is_loaded = false;
    if (!wanted.slots)
        return err_set(err, RC_MEMORY, "peer: out of memory");
    wanted.is_loaded = peer_store_find(p->store, &block->key, block->n_parts, wanted.slots) &&
                       peer_memory_read(peer_store_memory(p->store), wanted.slots, block);
    if (!wanted.is_loaded) {
        pthread_mutex_lock(&p->lock);
        rc = fetch_any(p, block, &wanted, err);
        pthread_mutex_unlock(&p->lock);
    }
    if (wanted.memory) {
        wanted.is_loaded = peer_memory_read(wanted.memory, wanted.slots, block);
        pthread_rwlock_unlock(&p->maps);
    }
    mem_free(wanted.slots);
    *is_loaded = wanted.is_loaded;
    return *is_loaded ? RC_OK : rc;
}

static enum rc peer_load(void *ctx, struct connector_block *blocks, uint32_t n, uint8_t *loaded, struct err *err)
{
    enum rc rc = RC_OK;
    for (uint32_t i = 0; i < n; i++) {
        bool is_loaded;
        enum rc one = load_one(ctx, &blocks[i], &is_loaded, err);
        loaded[i] = is_loaded;
        rc = rc ? rc : one;
    }
    return rc;
}

static enum rc peer_save(void *ctx, const struct connector_block *blocks, uint32_t n, struct err *err)
{
    (void)err;
    struct peer *p = ctx;
    for (uint32_t i = 0; i < n; i++)
        peer_store_save(p->store, &blocks[i]);
    return RC_OK;
}

static enum rc peer_clear(void *ctx, struct err *err)
{
    (void)err;
    struct peer *p = ctx;
    peer_store_clear(p->store);
    return RC_OK;
}

static void peer_counts(void *ctx, struct connector_counts *counts)
{
    struct peer *p = ctx;
    peer_store_counts(p->store, counts);
    counts->n_failures = atomic_load(&p->n_failures);
}

/* ---- life ---- */

static void peer_close(void *ctx)
{
    struct peer *p = ctx;
    peer_server_destroy(p->server);
    for (uint32_t i = 0; p->others && i < p->n_others; i++)
        other_close(p, &p->others[i]);
    peer_store_destroy(p->store);
    mem_free(p->others);
    mem_free(p->homes);
    pthread_rwlock_destroy(&p->maps);
    pthread_mutex_destroy(&p->lock);
    mem_free(p);
}

static const char *option(const struct connector_options *options, const char *name)
{
    for (uint32_t i = 0; i < options->n_pairs; i++)
        if (!strcmp(options->pairs[i].name, name))
            return options->pairs[i].value;
    return NULL;
}

static enum rc check_names(const struct connector_options *options, struct err *err)
{
    static const char *const NAMES[] = {"bytes", "listen", "peers", "timeout_s", "token"};
    for (uint32_t i = 0; i < options->n_pairs; i++) {
        uint32_t n = 0;
        while (n < sizeof NAMES / sizeof *NAMES && strcmp(options->pairs[i].name, NAMES[n]))
            n++;
        if (n == sizeof NAMES / sizeof *NAMES)
            return err_set(err, RC_CONFIG, "unknown option '%.60s'; wanted bytes, listen, peers, timeout_s, token",
                           options->pairs[i].name);
    }
    return RC_OK;
}

/* Takes "A,B,C" apart. */
static enum rc parse_peers(struct peer *p, const char *text, struct err *err)
{
    for (size_t n; *text; text += n + (text[n] == ',')) {
        n = strcspn(text, ",");
        if (!n)
            continue;
        if (p->n_others == MOST_PEERS || n >= PEER_ADDRESS)
            return err_set(err, RC_CONFIG, "peers: wanted at most %u addresses of less than %u bytes", MOST_PEERS,
                           PEER_ADDRESS);
        struct other *o = &p->others[p->n_others++];
        memcpy(o->address, text, n);
        o->fd = -1;
    }
    return RC_OK;
}

static enum rc peer_parse(struct peer *p, const struct connector_options *options, uint64_t *bytes, struct err *err)
{
    const char *size = option(options, "bytes"), *seconds = option(options, "timeout_s"), *token = option(options, "token");
    char *end = "";
    enum rc rc = check_names(options, err);
    *bytes = size ? strtoull(size, &end, 10) : DEFAULT_BYTES;
    if (!rc && (*end || !*bytes))
        rc = err_set(err, RC_CONFIG, "bytes: wanted a number above 0, have '%.60s'", size);
    p->seconds = seconds ? strtod(seconds, &end) : DEFAULT_SECONDS;
    if (!rc && (*end || !(p->seconds > 0)))
        rc = err_set(err, RC_CONFIG, "timeout_s: wanted a number above 0, have '%.60s'", seconds);
    if (!rc && token && strlen(token) >= PEER_TOKEN)
        rc = err_set(err, RC_CONFIG, "token: wanted less than %u bytes", PEER_TOKEN);
    snprintf(p->hello.token, sizeof p->hello.token, "%s", !rc && token ? token : "");
    return rc;
}

static enum rc peer_open(const struct connector_options *options, void **ctx, struct err *err)
{
    const char *peers = option(options, "peers"), *listen = option(options, "listen");
    struct peer *p = mem_calloc(1, sizeof *p);
    uint64_t bytes;
    if (!p)
        return err_set(err, RC_MEMORY, "out of memory");
    memcpy(p->hello.magic, PEER_MAGIC, sizeof p->hello.magic);
    memcpy(p->hello.fingerprint, options->fingerprint, sizeof p->hello.fingerprint);
    p->hello.part_bytes = options->part_bytes;
    p->hello.most_parts = options->most_parts;
    p->others = mem_calloc(MOST_PEERS, sizeof *p->others);
    p->homes = mem_calloc(HOMES, 1);
    pthread_rwlock_init(&p->maps, NULL);
    pthread_mutex_init(&p->lock, NULL);
    enum rc rc = p->others && p->homes ? RC_OK : err_set(err, RC_MEMORY, "out of memory");
    if (!rc)
        rc = peer_parse(p, options, &bytes, err);
    if (!rc)
        rc = parse_peers(p, peers ? peers : "", err);
    if (!rc)
        rc = peer_store_create(bytes, options->part_bytes, &p->store, err);
    if (!rc && listen)
        rc = peer_server_create(listen, &p->hello, p->store, p->seconds, &p->server, err);
    if (rc) {
        peer_close(p);
        return rc;
    }
    *ctx = p;
    return RC_OK;
}

const struct connector_table *peer_connector(const struct connector_host *host)
{
    static const struct connector_table TABLE = {
        .abi = CONNECTOR_ABI, .size_bytes = sizeof TABLE, .open = peer_open, .close = peer_close, .match = peer_match,
        .load = peer_load, .save = peer_save, .clear = peer_clear, .counts = peer_counts};
    (void)host;
    return &TABLE;
}
