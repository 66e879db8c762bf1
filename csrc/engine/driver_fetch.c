/* driver_fetch.c: calls in which two engines stand between their steps, those of one process or of two. */
#define _GNU_SOURCE
#include "../base/mem.h"
#include "driver_state.h"
#include "engine_fetch.h"
#include "peer_wire.h"

#include <string.h>
#include <unistd.h>

#define LENT_MAGIC "llmpypg1"
#define MESSAGE_S 5.0    /* most for a message */
#define MOST_PAGES (1u << 24)

/* ---- one process ---- */

/* The thread of one engine waits for that of the other, so two such calls in opposite directions would wait for ever. */
static pthread_mutex_t fetch_lock = PTHREAD_MUTEX_INITIALIZER;

struct fetch_call {
    struct driver *to;
    struct engine *from;
    const struct request_spec *spec;
    struct lent_prompt lent;
    uint32_t *n_tokens;
};

static enum rc take_here(struct engine *to, void *ctx, struct err *err)
{
    struct fetch_call *call = ctx;
    enum rc rc = engine_reach_pools(to, call->from, &call->lent.pools, err);
    return rc ? rc : engine_take_prompt(to, call->spec, &call->lent, call->n_tokens, err);
}

static enum rc give_here(struct engine *from, void *ctx, struct err *err)
{
    struct fetch_call *call = ctx;
    call->from = from;
    enum rc rc = engine_lend_prompt(from, call->spec, &call->lent, err);
    if (rc)
        return rc;
    rc = driver_call(call->to, take_here, call, err);
    engine_end_lending(from, &call->lent);
    return rc;
}

enum rc driver_fetch(struct driver *to, struct driver *from, const struct request_spec *spec, uint32_t *n_tokens,
                     struct err *err)
{
    struct fetch_call call = {.to = to, .spec = spec, .n_tokens = n_tokens};
    *n_tokens = 0;
    pthread_mutex_lock(&fetch_lock);
    enum rc rc = driver_call(from, give_here, &call, err);
    pthread_mutex_unlock(&fetch_lock);
    return rc;
}

/* ---- two processes ---- */

/* What the owner says; then come a descriptor of each rank's pool, and the pages. A byte of the reader says that it has copied
 * them, one of the owner that it has taken no step until then. */
struct lent_message {
    char magic[8];
    struct hash last_key;
    uint32_t n_blocks, n_pages, n_ranks, unused;
    uint64_t slot_bytes;
};

struct lend_call {
    const struct request_spec *spec;
    int socket;
};

static enum rc lost(struct err *err)
{
    return err_set(err, RC_IO, "lend: the other process does not answer");
}

/* A welcome with a pool's place in the memory of the descriptor. */
static enum rc send_pool(const struct runner *runner, uint32_t rank, int socket, struct err *err)
{
    uint64_t place[2];
    struct peer_welcome welcome = {PEER_IS_WELCOME, true, rank, 0};
    int descriptor;
    enum rc rc = runner->share(runner->ctx, rank, &descriptor, &place[0], &place[1], err);
    if (rc)
        return rc;
    bool is_sent = peer_write_welcome(socket, &welcome, descriptor, MESSAGE_S) &&
                   peer_write(socket, place, sizeof place, MESSAGE_S);
    close(descriptor);
    return is_sent ? RC_OK : lost(err);
}

static enum rc send_prompt(struct engine *from, const struct lent_prompt *lent, int socket, struct err *err)
{
    const struct runner *runner = engine_runner(from);
    struct lent_message message = {LENT_MAGIC, lent->last_key, lent->n_blocks, lent->n_pages, runner->n_ranks, 0,
                                   runner->host_slot_bytes};
    enum rc rc = RC_OK;
    char end;
    if (!runner->share)
        return err_set(err, RC_UNSUPPORTED, "lend: the engine's pool cannot be read by other processes");
    if (!peer_write(socket, &message, sizeof message, MESSAGE_S))
        return lost(err);
    for (uint32_t rank = 0; rank < runner->n_ranks && !rc; rank++)
        rc = send_pool(runner, rank, socket, err);
    if (rc)
        return rc;
    bool is_read = peer_write(socket, lent->pages, lent->n_pages * sizeof *lent->pages, MESSAGE_S) &&
                   peer_read(socket, &end, 1, MESSAGE_S) && peer_write(socket, &end, 1, MESSAGE_S);
    return is_read ? RC_OK : lost(err);
}

static enum rc give_away(struct engine *from, void *ctx, struct err *err)
{
    const struct lend_call *call = ctx;
    struct lent_prompt lent;
    enum rc rc = engine_lend_prompt(from, call->spec, &lent, err);
    if (rc)
        return rc;
    rc = send_prompt(from, &lent, call->socket, err);
    engine_end_lending(from, &lent);
    return rc;
}

enum rc driver_lend(struct driver *from, const struct request_spec *spec, int socket, struct err *err)
{
    struct lend_call call = {spec, socket};
    return driver_call(from, give_away, &call, err);
}

struct borrowing {
    const struct runner *runner;
    const struct request_spec *spec;
    struct lent_prompt lent;
    struct imported *imported[RUNNER_MOST_RANKS];
    uint32_t n_imported, *n_tokens;
};

static enum rc receive_pool(struct borrowing *b, uint32_t rank, int socket, struct err *err)
{
    struct peer_welcome welcome;
    uint64_t place[2];
    int descriptor = -1;
    enum rc rc = RC_OK;
    if (!peer_read_welcome(socket, &welcome, &descriptor, MESSAGE_S) || descriptor < 0 ||
        !peer_read(socket, place, sizeof place, MESSAGE_S) || place[0] > place[1])
        rc = lost(err);
    if (!rc)
        rc = b->runner->import(b->runner->ctx, rank, descriptor, place[0], place[1], &b->imported[rank],
                               &b->lent.pools.pools[rank], err);
    b->n_imported += !rc;
    if (descriptor >= 0)
        close(descriptor);
    return rc;
}

static enum rc receive_prompt(struct borrowing *b, int socket, struct err *err)
{
    struct lent_message m;
    enum rc rc = RC_OK;
    if (!peer_read(socket, &m, sizeof m, MESSAGE_S) || memcmp(m.magic, LENT_MAGIC, sizeof m.magic) || m.n_pages > MOST_PAGES)
        return lost(err);
    if (m.n_ranks != b->runner->n_ranks || m.slot_bytes != b->runner->host_slot_bytes || !b->runner->import)
        return err_set(err, RC_UNSUPPORTED, "lend: wanted an engine with equal ranks and pages");
    b->lent.n_blocks = m.n_blocks;
    b->lent.n_pages = m.n_pages;
    b->lent.last_key = m.last_key;
    b->lent.pages = mem_calloc((size_t)m.n_pages + 1, sizeof *b->lent.pages);
    if (!b->lent.pages)
        return err_set(err, RC_MEMORY, "lend: out of memory");
    for (uint32_t rank = 0; rank < m.n_ranks && !rc; rank++)
        rc = receive_pool(b, rank, socket, err);
    if (!rc && !peer_read(socket, b->lent.pages, m.n_pages * sizeof *b->lent.pages, MESSAGE_S))
        rc = lost(err);
    return rc;
}

static bool is_held(void *ctx)
{
    char end = 0;
    const int socket = *(int *)ctx;
    return peer_write(socket, &end, 1, MESSAGE_S) && peer_read(socket, &end, 1, MESSAGE_S);
}

static enum rc take_away(struct engine *to, void *ctx, struct err *err)
{
    struct borrowing *b = ctx;
    return engine_take_prompt(to, b->spec, &b->lent, b->n_tokens, err);
}

enum rc driver_borrow(struct driver *to, const struct request_spec *spec, int socket, uint32_t *n_tokens, struct err *err)
{
    struct borrowing b = {.runner = engine_runner(to->engine), .spec = spec, .n_tokens = n_tokens};
    b.lent.is_held = is_held;
    b.lent.ctx = &socket;
    *n_tokens = 0;
    enum rc rc = receive_prompt(&b, socket, err);
    if (!rc)
        rc = driver_call(to, take_away, &b, err);
    for (uint32_t rank = 0; rank < b.n_imported; rank++)
        b.runner->release_import(b.runner->ctx, b.imported[rank]);
    mem_free(b.lent.pages);
    return rc;
}
