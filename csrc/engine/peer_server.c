#define _GNU_SOURCE
#include "peer_server.h"

#include "../base/mem.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#define MOST_READERS 64u

struct reader {
    struct peer_server *owner;
    pthread_t thread;
    int fd;
    bool has_memory;
    atomic_bool has_ended;
    bool is_used;
    struct connector_key keys[PEER_MOST_KEYS];
    uint8_t found[PEER_MOST_KEYS];
};

struct peer_server {
    struct peer_hello hello;
    struct peer_store *store;
    double seconds;
    int listener, wake;            /* wake: an eventfd that ends the waiting thread */
    pthread_t thread;
    bool has_thread;
    atomic_bool is_closing;
    struct reader *readers;        /* [MOST_READERS] the accepting thread's, and once it has ended the closing one's */
};

/* ---- a connection ---- */

static bool greet(struct reader *r)
{
    const struct peer_server *s = r->owner;
    struct peer_hello hello;
    if (!peer_read(r->fd, &hello, sizeof hello, s->seconds))
        return false;
    r->has_memory = hello.wants_memory && peer_is_own(r->fd);
    hello.wants_memory = s->hello.wants_memory;
    bool is_good = !memcmp(&hello, &s->hello, sizeof hello);
    struct peer_welcome welcome = {.status = is_good ? PEER_IS_WELCOME : PEER_IS_OTHER, .has_memory = r->has_memory && is_good,
                                   .n_slots = peer_store_memory(s->store)->n_slots};
    int descriptor = welcome.has_memory ? peer_store_descriptor(s->store) : -1;
    return peer_write_welcome(r->fd, &welcome, descriptor, s->seconds) && is_good;
}

static bool answer_match(struct reader *r, uint32_t n)
{
    double seconds = r->owner->seconds;
    if (n > PEER_MOST_KEYS || !peer_read(r->fd, r->keys, n * sizeof *r->keys, seconds))
        return false;
    for (uint32_t i = 0; i < n; i++)
        r->found[i] = peer_store_has(r->owner->store, &r->keys[i]);
    return peer_write(r->fd, r->found, n, seconds);
}

/* block has room for most_parts, one behind the other. */
static bool answer_load(struct reader *r, uint32_t n_parts, struct connector_block *block, uint32_t *slots)
{
    const struct peer_server *s = r->owner;
    const struct peer_memory *memory = peer_store_memory(s->store);
    struct peer_found found = {0};
    if (n_parts > s->hello.most_parts || !peer_read(r->fd, &block->key, sizeof block->key, s->seconds))
        return false;
    block->n_parts = n_parts;
    found.is_found = peer_store_find(s->store, &block->key, n_parts, slots) &&
                     (r->has_memory || peer_memory_read(memory, slots, block));
    found.checksum = block->checksum;
    if (!peer_write(r->fd, &found, sizeof found, s->seconds))
        return false;
    if (!found.is_found)
        return true;
    if (r->has_memory)
        return peer_write(r->fd, slots, n_parts * sizeof *slots, s->seconds);
    return peer_write(r->fd, block->parts[0], n_parts * memory->part_bytes, s->seconds);
}

static void converse(struct reader *r, struct connector_block *block, uint32_t *slots)
{
    struct peer_ask ask;
    bool goes_on = greet(r);
    while (goes_on) {
        struct pollfd one = {.fd = r->fd, .events = POLLIN};
        while (poll(&one, 1, -1) < 0 && !atomic_load(&r->owner->is_closing))
            continue;
        goes_on = !atomic_load(&r->owner->is_closing) && peer_read(r->fd, &ask, sizeof ask, r->owner->seconds);
        if (goes_on && ask.question == PEER_MATCH)
            goes_on = answer_match(r, ask.n);
        else
            goes_on = goes_on && ask.question == PEER_LOAD && answer_load(r, ask.n, block, slots);
    }
}

static void *reader_run(void *arg)
{
    struct reader *r = arg;
    uint32_t most = r->owner->hello.most_parts;
    size_t part_bytes = peer_store_memory(r->owner->store)->part_bytes;
    char *bytes = mem_alloc(most * part_bytes);
    void **parts = mem_calloc(most, sizeof *parts);
    uint32_t *slots = mem_calloc(most, sizeof *slots);
    struct connector_block block = {.parts = parts};
    if (bytes && parts && slots) {
        for (uint32_t i = 0; i < most; i++)
            parts[i] = bytes + i * part_bytes;
        converse(r, &block, slots);
    }
    mem_free(slots);
    mem_free(parts);
    mem_free(bytes);
    shutdown(r->fd, SHUT_RDWR); /* closed by who joins, so that the number is not given to another file meanwhile */
    atomic_store(&r->has_ended, true);
    return NULL;
}

/* ---- the server ---- */

static void reader_join(struct reader *r)
{
    pthread_join(r->thread, NULL);
    close(r->fd);
    r->is_used = false;
}

/* A thread that no signal of the program interrupts. */
static bool start(pthread_t *thread, void *(*run)(void *), void *arg)
{
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    bool has = !pthread_create(thread, NULL, run, arg);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return has;
}

static void take_connection(struct peer_server *s)
{
    struct reader *r = NULL;
    int fd = accept4(s->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    for (uint32_t i = 0; i < MOST_READERS; i++) {
        if (s->readers[i].is_used && atomic_load(&s->readers[i].has_ended))
            reader_join(&s->readers[i]);
        if (!s->readers[i].is_used)
            r = &s->readers[i];
    }
    if (fd < 0)
        return;
    if (r) {
        r->owner = s;
        r->fd = fd;
        atomic_store(&r->has_ended, false);
        r->is_used = start(&r->thread, reader_run, r);
    }
    if (!r || !r->is_used)
        close(fd);
}

static void *server_run(void *arg)
{
    struct peer_server *s = arg;
    struct pollfd both[2] = {{.fd = s->listener, .events = POLLIN}, {.fd = s->wake, .events = POLLIN}};
    while (!atomic_load(&s->is_closing))
        if (poll(both, 2, -1) > 0 && both[0].revents)
            take_connection(s);
    return NULL;
}

enum rc peer_server_create(const char *address, const struct peer_hello *hello, struct peer_store *store, double seconds,
                           struct peer_server **result, struct err *err)
{
    struct peer_server *s = mem_calloc(1, sizeof *s);
    if (!s)
        return err_set(err, RC_MEMORY, "peer: out of memory");
    s->hello = *hello;
    s->store = store;
    s->seconds = seconds;
    s->listener = -1;
    s->wake = eventfd(0, EFD_CLOEXEC);
    s->readers = mem_calloc(MOST_READERS, sizeof *s->readers);
    enum rc rc = s->wake >= 0 && s->readers ? RC_OK : err_set(err, RC_MEMORY, "peer: out of memory");
    if (!rc)
        rc = peer_listen(address, &s->listener, err);
    if (!rc && !(s->has_thread = start(&s->thread, server_run, s)))
        rc = err_set(err, RC_MEMORY, "peer: no more threads");
    if (rc) {
        peer_server_destroy(s);
        return rc;
    }
    pthread_setname_np(s->thread, "llmpy-peer");
    *result = s;
    return RC_OK;
}

void peer_server_destroy(struct peer_server *s)
{
    if (!s)
        return;
    atomic_store(&s->is_closing, true);
    if (s->has_thread && write(s->wake, &(uint64_t){1}, sizeof(uint64_t)) > 0)
        pthread_join(s->thread, NULL);
    for (uint32_t i = 0; s->readers && i < MOST_READERS; i++)
        if (s->readers[i].is_used) {
            shutdown(s->readers[i].fd, SHUT_RDWR);
            reader_join(&s->readers[i]);
        }
    if (s->listener >= 0)
        close(s->listener);
    if (s->wake >= 0)
        close(s->wake);
    mem_free(s->readers);
    mem_free(s);
}
