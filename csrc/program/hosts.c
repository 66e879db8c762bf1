#define _GNU_SOURCE
#include "hosts.h"

#include "../base/clock.h"
#include "../base/mem.h"

#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define PULSE_SECONDS 1.0
#define LEAST_LATE_SECONDS 3.0 /* a pulse is not late before, however short a step may be */
#define REASON_SECONDS 0.5     /* a lost connection waits so long for the reason on the other connection */
#define BYE_SECONDS 1.0        /* the longest wait for a goodbye */
#define MOST_PART_BYTES ((uint64_t)8 << 20) /* so few that they come within a step's time */

enum channel { CHANNEL_DATA, CHANNEL_PULSE, CHANNELS };

struct peer {
    struct wire *wires[CHANNELS];
    double heard;              /* when the last pulse came */
    bool is_gone;              /* said goodbye */
};

/* The answer to an order, or to WIRE_ASK if it fails. */
struct result {
    uint64_t number;
    int64_t code; /* of the error */
    uint32_t rc;
    char text[WIRE_TEXT_BYTES];
};

/* Of WIRE_ASK and WIRE_GIVE: bytes of host 0's memory, at most MOST_PART_BYTES. WIRE_BLOCK has them. */
struct part {
    uint64_t place, first, n_bytes;
};

struct hosts {
    struct hosts_options options;
    uint32_t n_peers;          /* host 0: all others; else 1, host 0 */
    struct peer *peers;        /* [n_peers] */
    pthread_t thread;
    bool has_thread;
    int wake;                  /* an eventfd that ends the thread */
    pthread_mutex_t lock;      /* of the writes of pulses, and of `reason` while it is set */
    atomic_bool is_lost;
    struct err reason;         /* may be read once is_lost is set */
    pid_t pid;                 /* of the process that opened it: a forked child has its sockets, too, but says nothing there */
};

/* ---- failures ---------------------------------------------------------------------------------------------------------- */

/* Keeps the first reason, and ends all waits. The caller holds the lock. */
static void lose(struct hosts *hosts, const struct err *reason)
{
    if (atomic_load(&hosts->is_lost))
        return;
    hosts->reason = *reason;
    atomic_store(&hosts->is_lost, true);
    for (uint32_t i = 0; i < hosts->n_peers; i++)
        if (hosts->peers[i].wires[CHANNEL_DATA])
            wire_shut(hosts->peers[i].wires[CHANNEL_DATA]);
}

void hosts_end(struct hosts *hosts, const char *reason)
{
    struct err ended = {0};
    err_set(&ended, RC_DEVICE, "%.400s", reason);
    err_name(&ended, "hosts", NULL);
    pthread_mutex_lock(&hosts->lock);
    for (uint32_t i = 0; i < hosts->n_peers && !atomic_load(&hosts->is_lost); i++) {
        struct wire *wire = hosts->peers[i].wires[CHANNEL_PULSE];
        if (wire) /* NULL: the host has not come */
            wire_write(wire, WIRE_END, ended.message, strnlen(ended.message, WIRE_TEXT_BYTES), PULSE_SECONDS, NULL);
    }
    lose(hosts, &ended);
    pthread_mutex_unlock(&hosts->lock);
}

/* The error of a message that failed. The reason may be on its way on the other connection: it tells more. Else the other hosts
 * are told this one. */
static enum rc fail(struct hosts *hosts, const struct err *failure, struct err *err)
{
    double end = seconds_now() + REASON_SECONDS;
    while (!atomic_load(&hosts->is_lost) && strstr(failure->message, "connection was lost") && seconds_now() < end)
        nanosleep(&(struct timespec){0, 1000000}, NULL);
    hosts_end(hosts, failure->message);
    if (err)
        *err = hosts->reason;
    return hosts->reason.rc;
}

enum rc hosts_check(struct hosts *hosts, struct err *err)
{
    if (!atomic_load(&hosts->is_lost))
        return RC_OK;
    if (err)
        *err = hosts->reason;
    return hosts->reason.rc;
}

/* ---- pulses ------------------------------------------------------------------------------------------------------------ */

static void tell_peers(struct hosts *hosts, enum wire_kind kind)
{
    pthread_mutex_lock(&hosts->lock);
    for (uint32_t i = 0; i < hosts->n_peers && !atomic_load(&hosts->is_lost); i++) {
        struct err err = {0};
        if (!hosts->peers[i].is_gone && wire_write(hosts->peers[i].wires[CHANNEL_PULSE], kind, NULL, 0, PULSE_SECONDS, &err))
            lose(hosts, &err);
    }
    pthread_mutex_unlock(&hosts->lock);
}

static void hear(struct hosts *hosts, uint32_t index)
{
    struct peer *peer = &hosts->peers[index];
    char text[WIRE_TEXT_BYTES + 1];
    enum wire_kind kind;
    size_t n_bytes;
    struct err err = {0};
    if (wire_read_any(peer->wires[CHANNEL_PULSE], &kind, text, WIRE_TEXT_BYTES, &n_bytes, PULSE_SECONDS, &err)) {
        peer->is_gone = true;
        hosts_end(hosts, err.message);
        return;
    }
    peer->heard = seconds_now();
    text[n_bytes] = 0;
    if (kind == WIRE_END) {
        peer->is_gone = true;
        err_set(&err, RC_DEVICE, "%s: %s", wire_name(peer->wires[CHANNEL_PULSE]).text, text);
        hosts_end(hosts, err.message);
    } else if (kind == WIRE_BYE) {
        peer->is_gone = true;
        shutdown(wire_socket(peer->wires[CHANNEL_PULSE]), SHUT_WR);
    }
}

static void check_pulses(struct hosts *hosts)
{
    double limit = fmax(hosts->options.step_seconds, LEAST_LATE_SECONDS);
    for (uint32_t i = 0; i < hosts->n_peers; i++) {
        struct peer *peer = &hosts->peers[i];
        struct err err;
        if (peer->is_gone || seconds_now() - peer->heard < limit)
            continue;
        err_set(&err, RC_DEVICE, "%s sent no pulse for %g s; one is sent every second",
                wire_name(peer->wires[CHANNEL_PULSE]).text, limit);
        peer->is_gone = true;
        hosts_end(hosts, err.message);
    }
}

static void *watch(void *ctx)
{
    struct hosts *hosts = ctx;
    double next = seconds_now();
    pthread_setname_np(pthread_self(), "llmpy-hosts");
    for (;;) {
        struct pollfd fds[HOSTS_MOST + 1] = {{.fd = hosts->wake, .events = POLLIN}};
        for (uint32_t i = 0; i < hosts->n_peers; i++) {
            bool is_gone = hosts->peers[i].is_gone;
            fds[1 + i] = (struct pollfd){is_gone ? -1 : wire_socket(hosts->peers[i].wires[CHANNEL_PULSE]), POLLIN, 0};
        }
        poll(fds, 1 + hosts->n_peers, (int)fmax(0, ceil(1e3 * (next - seconds_now()))));
        if (fds[0].revents)
            return NULL;
        for (uint32_t i = 0; i < hosts->n_peers; i++)
            if (fds[1 + i].revents)
                hear(hosts, i);
        if (seconds_now() < next)
            continue;
        next = seconds_now() + PULSE_SECONDS;
        tell_peers(hosts, WIRE_PULSE);
        check_pulses(hosts);
    }
}

static enum rc start_watch(struct hosts *hosts, struct err *err)
{
    sigset_t all, before;
    for (uint32_t i = 0; i < hosts->n_peers; i++)
        hosts->peers[i].heard = seconds_now();
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    hosts->has_thread = hosts->wake >= 0 && pthread_create(&hosts->thread, NULL, watch, hosts) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return hosts->has_thread ? RC_OK : err_set(err, RC_MEMORY, "hosts: the system gives no further thread");
}

/* ---- connections ------------------------------------------------------------------------------------------------------- */

static struct wire_greeting greeting_of(const struct hosts_options *options, uint32_t channel)
{
    struct wire_greeting greeting = {.host = options->host, .n_hosts = options->n_hosts, .channel = channel};
    memcpy(greeting.token, options->token, sizeof greeting.token);
    memcpy(greeting.digests, options->digests, sizeof greeting.digests);
    return greeting;
}

static void write_name(uint32_t host, char name[32])
{
    snprintf(name, 32, "host %u", host);
}

/* Keeps a connection that a follower has made. */
static enum rc keep(struct hosts *hosts, struct wire *wire, const struct wire_greeting *greeting, struct err *err)
{
    char name[32];
    struct wire **place = &hosts->peers[greeting->host - 1].wires[greeting->channel < CHANNELS ? greeting->channel : 0];
    write_name(greeting->host, name);
    wire_rename(wire, name);
    if (*place || greeting->channel >= CHANNELS) {
        err_set(err, RC_CONFIG, "hosts: two processes are host %u of %u: %s came again; give each process another rank",
                greeting->host, hosts->options.n_hosts, wire_name(wire).text);
        wire_destroy(wire);
        return RC_CONFIG;
    }
    *place = wire;
    return RC_OK;
}

static enum rc accept_peers(struct hosts *hosts, struct err *err)
{
    const struct hosts_options *o = &hosts->options;
    const struct wire_greeting own = greeting_of(o, 0);
    struct wire_patience patience = o->patience;
    double end = seconds_now() + patience.seconds;
    int listener;
    enum rc rc = wire_listen(o->address, o->port, &listener, err);
    if (rc)
        return rc;
    for (uint32_t i = 0; i < CHANNELS * hosts->n_peers && !rc; i++) {
        struct wire_greeting greeting;
        struct wire *wire;
        struct err failure = {0};
        patience.seconds = fmax(end - seconds_now(), 0);
        rc = wire_accept(listener, &own, &patience, &wire, &greeting, &failure);
        if (!rc) {
            rc = keep(hosts, wire, &greeting, err);
            continue;
        }
        uint32_t missing = 0;
        while (missing + 1 < hosts->n_peers && hosts->peers[missing].wires[CHANNEL_PULSE])
            missing++;
        if (rc == RC_DEVICE)
            err_set(&failure, rc, "hosts: host %u of %u did not connect to %.80s:%u within %g s (LLMPY_HOSTS_TIMEOUT)",
                    missing + 1, o->n_hosts, o->address, o->port, o->patience.seconds);
        *err = failure;
    }
    close(listener);
    return rc;
}

static enum rc connect_first(struct hosts *hosts, struct err *err)
{
    const struct hosts_options *o = &hosts->options;
    enum rc rc = RC_OK;
    for (uint32_t channel = 0; channel < CHANNELS && !rc; channel++) {
        const struct wire_greeting own = greeting_of(o, channel);
        rc = wire_connect(o->address, o->port, &own, &o->patience, "host 0", &hosts->peers[0].wires[channel], err);
    }
    return rc;
}

/* Followers wait until all hosts have come: host 0 sends and reads no pulses before. Then it sends the first one. */
static enum rc await_all(struct hosts *hosts, struct err *err)
{
    if (hosts_is_first(hosts)) {
        tell_peers(hosts, WIRE_PULSE);
        return hosts_check(hosts, err);
    }
    enum rc rc = wire_await(hosts->peers[0].wires[CHANNEL_PULSE], &hosts->options.patience, err);
    return rc != RC_DEVICE ? rc : err_set(err, rc, "hosts: the other hosts did not come within %g s (LLMPY_HOSTS_TIMEOUT)",
                                          hosts->options.patience.seconds);
}

enum rc hosts_open(const struct hosts_options *options, struct hosts **out, struct err *err)
{
    *out = NULL;
    if (options->n_hosts < 2 || options->n_hosts > HOSTS_MOST || options->host >= options->n_hosts)
        return err_set(err, RC_CONFIG, "nnodes: wanted 2 to %u hosts and a node_rank below, have host %u of %u", HOSTS_MOST,
                       options->host, options->n_hosts);
    struct hosts *hosts = mem_calloc(1, sizeof *hosts);
    if (!hosts)
        return err_set(err, RC_MEMORY, "hosts: out of memory");
    hosts->options = *options;
    hosts->pid = getpid();
    hosts->n_peers = options->host ? 1 : options->n_hosts - 1;
    hosts->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    pthread_mutex_init(&hosts->lock, NULL);
    hosts->peers = mem_calloc(hosts->n_peers, sizeof *hosts->peers);
    enum rc rc = hosts->peers ? RC_OK : err_set(err, RC_MEMORY, "hosts: out of memory");
    if (!rc)
        rc = options->host ? connect_first(hosts, err) : accept_peers(hosts, err);
    if (!rc)
        rc = await_all(hosts, err);
    if (!rc)
        rc = start_watch(hosts, err);
    if (!rc) {
        *out = hosts;
        return RC_OK;
    }
    if (hosts->peers)
        hosts_end(hosts, err->message);
    hosts_close(hosts);
    return rc;
}

/* Waits until the other side has read the goodbye: to close before would discard it. */
static void await_goodbye(struct peer *peer)
{
    char rest[64];
    struct wire *wire = peer->wires[CHANNEL_PULSE];
    const struct wire_patience patience = {.seconds = BYE_SECONDS};
    shutdown(wire_socket(wire), SHUT_WR);
    while (!peer->is_gone && !wire_await(wire, &patience, NULL) &&
           recv(wire_socket(wire), rest, sizeof rest, MSG_DONTWAIT) > 0)
        ;
}

void hosts_close(struct hosts *hosts)
{
    if (!hosts)
        return;
    if (hosts->has_thread && hosts->pid == getpid()) {
        const uint64_t one = 1;
        bool is_woken = write(hosts->wake, &one, sizeof one) == sizeof one;
        (void)is_woken; /* an eventfd of 0 takes 1 */
        pthread_join(hosts->thread, NULL);
        for (uint32_t i = 0; i < hosts->n_peers && hosts_is_first(hosts) && !atomic_load(&hosts->is_lost); i++)
            wire_write(hosts->peers[i].wires[CHANNEL_DATA], WIRE_CLOSE, NULL, 0, PULSE_SECONDS, NULL);
        tell_peers(hosts, WIRE_BYE);
        for (uint32_t i = 0; i < hosts->n_peers && !atomic_load(&hosts->is_lost); i++)
            await_goodbye(&hosts->peers[i]);
    }
    for (uint32_t i = 0; hosts->peers && i < hosts->n_peers; i++)
        for (uint32_t channel = 0; channel < CHANNELS; channel++)
            wire_destroy(hosts->peers[i].wires[channel]);
    if (hosts->wake >= 0)
        close(hosts->wake);
    pthread_mutex_destroy(&hosts->lock);
    mem_free(hosts->peers);
    mem_free(hosts);
}

bool hosts_is_first(const struct hosts *hosts)
{
    return hosts->options.host == 0;
}

/* ---- messages ---------------------------------------------------------------------------------------------------------- */

static enum rc send_parts(struct hosts *hosts, uint32_t peer, enum wire_kind kind, const struct wire_part parts[WIRE_PARTS],
                          struct err *err)
{
    struct err failure = {0};
    enum rc rc = hosts_check(hosts, err);
    if (rc)
        return rc;
    rc = wire_write_parts(hosts->peers[peer].wires[CHANNEL_DATA], kind, parts, hosts->options.step_seconds, &failure);
    return rc ? fail(hosts, &failure, err) : RC_OK;
}

static enum rc send_to(struct hosts *hosts, uint32_t peer, enum wire_kind kind, const void *bytes, size_t n_bytes,
                       struct err *err)
{
    const struct wire_part parts[WIRE_PARTS] = {{bytes, n_bytes}};
    return send_parts(hosts, peer, kind, parts, err);
}

static enum rc take_from(struct hosts *hosts, uint32_t peer, enum wire_kind kind, void *bytes, size_t max_bytes,
                         size_t *n_bytes, struct err *err)
{
    struct err failure = {0};
    enum rc rc = hosts_check(hosts, err);
    if (rc)
        return rc;
    rc = wire_read(hosts->peers[peer].wires[CHANNEL_DATA], kind, bytes, max_bytes, n_bytes, hosts->options.step_seconds,
                   &failure);
    return rc ? fail(hosts, &failure, err) : RC_OK;
}

/* Waits for a message of a host that may take any time, as long as pulses come. */
static enum rc await(struct hosts *hosts, uint32_t peer, struct err *err)
{
    struct wire_patience patience = hosts->options.patience;
    patience.seconds = INFINITY;
    return wire_await(hosts->peers[peer].wires[CHANNEL_DATA], &patience, err);
}

/* Takes a message of exactly n_bytes. */
static enum rc take_exactly(struct hosts *hosts, uint32_t peer, enum wire_kind kind, void *bytes, size_t n_bytes,
                            struct err *err)
{
    size_t n_taken;
    enum rc rc = take_from(hosts, peer, kind, bytes, n_bytes, &n_taken, err);
    if (rc || n_taken == n_bytes)
        return rc;
    struct err failure;
    err_set(&failure, RC_DEVICE, "%s: wanted a message of %zu bytes, have %zu",
            wire_name(hosts->peers[peer].wires[CHANNEL_DATA]).text, n_bytes, n_taken);
    return fail(hosts, &failure, err);
}

enum rc hosts_agree(struct hosts *hosts, uint64_t *values, uint32_t n, struct err *err)
{
    size_t n_bytes = n * sizeof *values;
    if (!hosts_is_first(hosts)) {
        enum rc rc = send_to(hosts, 0, WIRE_VALUES, values, n_bytes, err);
        rc = rc ? rc : await(hosts, 0, err);
        return rc ? rc : take_exactly(hosts, 0, WIRE_VALUES, values, n_bytes, err);
    }
    uint64_t *theirs = mem_calloc(n, sizeof *theirs);
    enum rc rc = theirs ? RC_OK : err_set(err, RC_MEMORY, "hosts: out of memory");
    for (uint32_t i = 0; i < hosts->n_peers && !rc; i++) {
        rc = await(hosts, i, err);
        rc = rc ? rc : take_exactly(hosts, i, WIRE_VALUES, theirs, n_bytes, err);
        for (uint32_t k = 0; k < n && !rc; k++)
            values[k] = theirs[k] > values[k] ? theirs[k] : values[k];
    }
    for (uint32_t i = 0; i < hosts->n_peers && !rc; i++)
        rc = send_to(hosts, i, WIRE_VALUES, values, n_bytes, err);
    mem_free(theirs);
    return rc;
}

enum rc hosts_exchange(void *ctx, const void *own, size_t own_bytes, bool is_to_first, void *others, size_t max_bytes,
                       size_t *others_bytes, struct err *err)
{
    struct hosts *hosts = ctx;
    *others_bytes = 0;
    if (!hosts_is_first(hosts)) {
        enum rc rc = send_to(hosts, 0, WIRE_BLOCK, own, own_bytes, err);
        return rc || is_to_first ? rc : take_from(hosts, 0, WIRE_BLOCK, others, max_bytes, others_bytes, err);
    }
    size_t places[HOSTS_MOST] = {0};
    enum rc rc = RC_OK;
    for (uint32_t i = 0; i < hosts->n_peers && !rc; i++) {
        size_t n_bytes = 0;
        rc = take_from(hosts, i, WIRE_BLOCK, (char *)others + places[i], max_bytes - places[i], &n_bytes, err);
        places[i + 1] = places[i] + n_bytes;
    }
    *others_bytes = places[hosts->n_peers];
    if (is_to_first || rc)
        return rc;
    for (uint32_t i = 0; i < hosts->n_peers && !rc; i++) { /* to each follower all blocks but its own */
        const struct wire_part parts[WIRE_PARTS] = {
            {own, own_bytes}, {others, places[i]}, {(char *)others + places[i + 1], *others_bytes - places[i + 1]}};
        rc = send_parts(hosts, i, WIRE_BLOCK, parts, err);
    }
    return rc;
}

static enum rc send_to_all(struct hosts *hosts, enum wire_kind kind, const void *bytes, size_t n_bytes, struct err *err)
{
    enum rc rc = RC_OK;
    for (uint32_t i = 0; i < hosts->n_peers && !rc; i++)
        rc = send_to(hosts, i, kind, bytes, n_bytes, err);
    return rc;
}

enum rc hosts_send_step(struct hosts *hosts, const void *bytes, size_t n_bytes, struct err *err)
{
    return send_to_all(hosts, WIRE_STEP, bytes, n_bytes, err);
}

enum rc hosts_send_order(struct hosts *hosts, const void *bytes, size_t n_bytes, struct err *err)
{
    return send_to_all(hosts, WIRE_ORDER, bytes, n_bytes, err);
}

/* Waits for the next message of an order, of any kind, even if a signal comes: it would be taken for a later answer. */
static enum rc take_next(struct hosts *hosts, uint32_t peer, enum wire_kind *kind, void *bytes, size_t max_bytes,
                         size_t *n_bytes, struct err *err)
{
    const struct wire_patience patience = {.seconds = INFINITY};
    struct wire *wire = hosts->peers[peer].wires[CHANNEL_DATA];
    struct err failure = {0};
    enum rc rc = wire_await(wire, &patience, err);
    rc = rc ? rc : hosts_check(hosts, err);
    if (rc)
        return rc;
    rc = wire_read_any(wire, kind, bytes, max_bytes, n_bytes, hosts->options.step_seconds, &failure);
    return rc ? fail(hosts, &failure, err) : RC_OK;
}

static enum rc is_strange(struct hosts *hosts, uint32_t peer, enum wire_kind kind, size_t n_bytes, struct err *err)
{
    struct err failure;
    err_set(&failure, RC_DEVICE, "%s: a message of kind %u with %zu bytes has no place in an order",
            wire_name(hosts->peers[peer].wires[CHANNEL_DATA]).text, kind, n_bytes);
    return fail(hosts, &failure, err);
}

static enum rc send_result(struct hosts *hosts, uint32_t peer, enum rc rc, uint64_t number, const struct err *result,
                           struct err *err)
{
    struct result sent = {.rc = rc, .number = number, .code = rc ? result->code : 0};
    if (rc)
        snprintf(sent.text, sizeof sent.text, "%.390s", result->message);
    return send_to(hosts, peer, WIRE_RESULT, &sent, sizeof sent, err);
}

/* Answers with bytes of the memory, or with the error of reading them. */
static enum rc serve(struct hosts *hosts, uint32_t peer, const struct hosts_memory *memory, const struct part *part,
                     struct err *err)
{
    struct err failure = {0};
    void *bytes = mem_alloc(part->n_bytes);
    enum rc rc = bytes ? memory->read(memory->ctx, part->first, part->n_bytes, bytes, &failure)
                       : err_set(&failure, RC_MEMORY, "hosts: out of memory");
    rc = rc ? send_result(hosts, peer, rc, 0, &failure, err) : send_to(hosts, peer, WIRE_BLOCK, bytes, part->n_bytes, err);
    mem_free(bytes);
    return rc;
}

static enum rc await_result(struct hosts *hosts, uint32_t peer, const struct hosts_memory *memory, struct result *result,
                            struct err *err)
{
    for (;;) {
        size_t n_bytes;
        enum wire_kind kind;
        struct part part;
        void *place = NULL;
        enum rc rc = take_next(hosts, peer, &kind, result, sizeof *result, &n_bytes, err);
        if (rc || (kind == WIRE_RESULT && n_bytes == sizeof *result))
            return rc;
        bool is_part = n_bytes == sizeof part && memory;
        memcpy(&part, result, sizeof part);
        is_part = is_part && part.n_bytes && part.n_bytes <= MOST_PART_BYTES;
        if (is_part && kind == WIRE_GIVE && memory->find)
            place = memory->find(memory->ctx, part.place, part.first, part.n_bytes);
        if (is_part && kind == WIRE_ASK && memory->read)
            rc = serve(hosts, peer, memory, &part, err);
        else if (place)
            rc = take_exactly(hosts, peer, WIRE_BLOCK, place, part.n_bytes, err);
        else
            rc = is_strange(hosts, peer, kind, n_bytes, err);
        if (rc)
            return rc;
    }
}

/* The error that another host has sent. who: comes before its text. */
static enum rc result_of(struct result *result, const char *who, struct err *err)
{
    enum rc rc = result->rc <= RC_WEIGHTS ? (enum rc)result->rc : RC_INTERNAL;
    result->text[sizeof result->text - 1] = 0;
    err_set(err, rc, "%s%s", who, result->text);
    if (err)
        err->code = result->code;
    return rc;
}

enum rc hosts_await_results(struct hosts *hosts, const struct hosts_memory *memory, uint64_t *sum, struct err *err)
{
    enum rc first = RC_OK;
    if (sum)
        *sum = 0;
    for (uint32_t i = 0; i < hosts->n_peers; i++) {
        struct result result = {0};
        enum rc rc = await_result(hosts, i, memory, &result, err);
        if (rc)
            return rc;
        if (sum)
            *sum += result.number;
        if (!result.rc || first)
            continue;
        char who[sizeof(struct wire_text) + 3];
        snprintf(who, sizeof who, "%s: ", wire_name(hosts->peers[i].wires[CHANNEL_DATA]).text);
        first = result_of(&result, who, err);
    }
    return first;
}

enum rc hosts_send_result(struct hosts *hosts, enum rc rc, uint64_t number, const struct err *result, struct err *err)
{
    return send_result(hosts, 0, rc, number, result, err);
}

static enum rc read_part(struct hosts *hosts, const struct part *part, void *to, struct err *err)
{
    struct result result;
    enum wire_kind kind;
    size_t n_bytes, most = part->n_bytes > sizeof result ? part->n_bytes : sizeof result;
    void *block = mem_alloc(most);
    enum rc rc = block ? send_to(hosts, 0, WIRE_ASK, part, sizeof *part, err) : err_set(err, RC_MEMORY, "hosts: out of memory");
    rc = rc ? rc : take_next(hosts, 0, &kind, block, most, &n_bytes, err);
    if (!rc && kind == WIRE_BLOCK && n_bytes == part->n_bytes) {
        memcpy(to, block, n_bytes);
    } else if (!rc && kind == WIRE_RESULT && n_bytes == sizeof result) {
        memcpy(&result, block, sizeof result);
        rc = result_of(&result, "", err);
    } else if (!rc) {
        rc = is_strange(hosts, 0, kind, n_bytes, err);
    }
    mem_free(block);
    return rc;
}

enum rc hosts_read(struct hosts *hosts, uint64_t first, size_t n_bytes, void *to, struct err *err)
{
    enum rc rc = RC_OK;
    for (size_t done = 0; done < n_bytes && !rc; done += MOST_PART_BYTES) {
        size_t left = n_bytes - done;
        struct part part = {.first = first + done, .n_bytes = left < MOST_PART_BYTES ? left : MOST_PART_BYTES};
        rc = read_part(hosts, &part, (char *)to + done, err);
    }
    return rc;
}

enum rc hosts_give(struct hosts *hosts, uint64_t place, const void *bytes, size_t n_bytes, struct err *err)
{
    enum rc rc = RC_OK;
    for (size_t done = 0; done < n_bytes && !rc; done += MOST_PART_BYTES) {
        size_t left = n_bytes - done;
        struct part part = {place, done, left < MOST_PART_BYTES ? left : MOST_PART_BYTES};
        rc = send_to(hosts, 0, WIRE_GIVE, &part, sizeof part, err);
        rc = rc ? rc : send_to(hosts, 0, WIRE_BLOCK, (const char *)bytes + done, part.n_bytes, err);
    }
    return rc;
}

enum rc hosts_await_done(struct hosts *hosts, uint64_t step, struct err *err)
{
    enum rc rc = RC_OK;
    for (uint32_t i = 0; i < hosts->n_peers && !rc; i++) {
        uint64_t done = 0;
        rc = take_exactly(hosts, i, WIRE_DONE, &done, sizeof done, err);
        if (rc || done == step)
            continue;
        struct err failure;
        err_set(&failure, RC_DEVICE, "%s: wanted the end of step %llu, have that of %llu",
                wire_name(hosts->peers[i].wires[CHANNEL_DATA]).text, (unsigned long long)step, (unsigned long long)done);
        rc = fail(hosts, &failure, err);
    }
    return rc;
}

enum rc hosts_read_call(struct hosts *hosts, enum wire_kind *kind, void *bytes, size_t max_bytes, size_t *n_bytes,
                        struct err *err)
{
    struct wire *wire = hosts->peers[0].wires[CHANNEL_DATA];
    struct err failure = {0};
    *n_bytes = 0;
    enum rc rc = await(hosts, 0, err);
    if (rc)
        return rc;
    rc = wire_read_any(wire, kind, bytes, max_bytes, n_bytes, hosts->options.step_seconds, &failure);
    if (!rc && *kind != WIRE_STEP && *kind != WIRE_ORDER && *kind != WIRE_CLOSE)
        rc = err_set(&failure, RC_DEVICE, "%s: wanted a step, have a message of kind %u with %zu bytes", wire_name(wire).text,
                     *kind, *n_bytes);
    return rc ? fail(hosts, &failure, err) : RC_OK;
}

enum rc hosts_send_done(struct hosts *hosts, uint64_t step, struct err *err)
{
    return send_to(hosts, 0, WIRE_DONE, &step, sizeof step, err);
}
