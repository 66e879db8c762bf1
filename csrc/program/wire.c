#define _GNU_SOURCE
#include "wire.h"

#include "../base/clock.h"
#include "../base/mem.h"

#include <errno.h>
#include <math.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#define MAGIC 0x79706d6cu        /* "lmpy" */
#define VERSION 1u
#define GREETING_SECONDS 1.0
#define ASK_SECONDS 0.2          /* goes_on is asked this often */
#define CONNECT_SECONDS 5.0      /* of one try */
#define MAX_WAIT_SECONDS 1000.0  /* of one poll */

struct frame_header {
    uint32_t magic;
    uint16_t version, kind;
    uint64_t n_bytes;
};

struct wire {
    int fd;
    char name[32], address[64];
};

static const char *const KINDS[] = {"?", "greeting", "welcome", "refusal", "values", "block", "step", "done", "close", "pulse",
                                    "end", "bye", "order", "result", "ask", "give"};

static const char *kind_name(uint32_t kind)
{
    return kind < sizeof KINDS / sizeof *KINDS ? KINDS[kind] : KINDS[0];
}

/* Waits for an event of the socket; false: the deadline has passed. */
static bool wait_until(int fd, short events, double end)
{
    for (;;) {
        double left = end - seconds_now();
        struct pollfd poll_fd = {.fd = fd, .events = events};
        int n = poll(&poll_fd, 1, left <= 0 ? 0 : (int)ceil(1e3 * fmin(left, MAX_WAIT_SECONDS)));
        if (n > 0)
            return true;
        if ((n == 0 || errno != EINTR) && left <= 0)
            return false;
    }
}

/* Waits for an event of the socket (-1: for the time alone) until `end`. */
static enum rc await_event(int fd, short events, const struct wire_patience *patience, double end, struct err *err)
{
    while (!wait_until(fd, events, fmin(end, seconds_now() + ASK_SECONDS))) {
        if (patience->goes_on && !patience->goes_on(patience->ctx))
            return err_set(err, RC_CLOSED, "hosts: the wait was interrupted");
        if (seconds_now() >= end)
            return err_set(err, RC_DEVICE, "hosts: nothing came within %g s", patience->seconds);
    }
    return RC_OK;
}

/* ---- addresses --------------------------------------------------------------------------------------------------------- */

static void write_address(const struct sockaddr *address, socklen_t size, char text[64])
{
    char host[48] = "?", port[8] = "?";
    getnameinfo(address, size, host, sizeof host, port, sizeof port, NI_NUMERICHOST | NI_NUMERICSERV);
    snprintf(text, 64, "%s:%s", host, port);
}

static enum rc find_address(const char *address, uint16_t port, bool is_own, struct addrinfo **found, struct err *err)
{
    const struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM,
                                   .ai_flags = AI_NUMERICSERV | (is_own ? AI_PASSIVE : 0)};
    char service[8];
    *found = NULL;
    snprintf(service, sizeof service, "%u", port);
    int failure = getaddrinfo(address, service, &hints, found);
    if (!failure)
        return RC_OK;
    return err_set(err, RC_CONFIG, "master_addr: wanted the name or the address of the first host, have %.80s: %s", address,
                   gai_strerror(failure));
}

enum rc wire_listen(const char *address, uint16_t port, int *listener, struct err *err)
{
    struct addrinfo *found;
    enum rc rc = find_address(address, port, true, &found, err);
    if (rc)
        return rc;
    const int yes = 1;
    int fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    bool is_bound = fd >= 0 && !setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) &&
                    !bind(fd, found->ai_addr, found->ai_addrlen) && !listen(fd, 64);
    int failure = errno;
    freeaddrinfo(found);
    if (is_bound) {
        *listener = fd;
        return RC_OK;
    }
    if (fd >= 0)
        close(fd);
    err_set(err, RC_CONFIG, "master_port: the first host cannot listen at %.80s:%u: %s; give an address of this machine and a "
            "free port", address, port, strerror(failure));
    err_name(err, "master_port", NULL);
    return RC_CONFIG;
}

uint16_t wire_port(int listener)
{
    struct sockaddr_storage address = {0};
    socklen_t size = sizeof address;
    getsockname(listener, (struct sockaddr *)&address, &size);
    return ntohs(address.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&address)->sin6_port
                                               : ((struct sockaddr_in *)&address)->sin_port);
}

/* Takes ownership of the socket. */
static enum rc make(int fd, const char *name, struct wire **wire, struct err *err)
{
    struct sockaddr_storage address = {0};
    socklen_t size = sizeof address;
    const int yes = 1;
    struct wire *made = *wire = mem_calloc(1, sizeof *made);
    if (!made) {
        close(fd);
        return err_set(err, RC_MEMORY, "hosts: out of memory");
    }
    made->fd = fd;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    getpeername(fd, (struct sockaddr *)&address, &size);
    write_address((struct sockaddr *)&address, size, made->address);
    wire_rename(made, name);
    return RC_OK;
}

void wire_rename(struct wire *wire, const char *name)
{
    snprintf(wire->name, sizeof wire->name, "%s", name);
}

struct wire_text wire_name(const struct wire *wire)
{
    struct wire_text name;
    snprintf(name.text, sizeof name.text, "%s (%s)", wire->name, wire->address);
    return name;
}

int wire_socket(const struct wire *wire)
{
    return wire->fd;
}

void wire_shut(struct wire *wire)
{
    shutdown(wire->fd, SHUT_RDWR);
}

void wire_destroy(struct wire *wire)
{
    if (!wire)
        return;
    close(wire->fd);
    mem_free(wire);
}

/* ---- frames ------------------------------------------------------------------------------------------------------------ */

static enum rc lost(const struct wire *wire, const char *what, const char *why, struct err *err)
{
    err_set(err, RC_DEVICE, "%s (%s): the connection was lost %s: %s", wire->name, wire->address, what, why);
    err_name(err, "hosts", NULL);
    return RC_DEVICE;
}

static enum rc late(const struct wire *wire, const char *what, uint32_t kind, double seconds, struct err *err)
{
    err_set(err, RC_DEVICE, "%s (%s) %s %s within %g s", wire->name, wire->address, what, kind_name(kind), seconds);
    err_name(err, "hosts", NULL);
    return RC_DEVICE;
}

/* Takes n bytes from the front of the parts. */
static void advance(struct iovec *parts, uint32_t n_parts, size_t n)
{
    for (uint32_t i = 0; i < n_parts; i++) {
        size_t taken = n < parts[i].iov_len ? n : parts[i].iov_len;
        parts[i].iov_base = (char *)parts[i].iov_base + taken;
        parts[i].iov_len -= taken;
        n -= taken;
    }
}

enum rc wire_write_parts(struct wire *wire, enum wire_kind kind, const struct wire_part parts[WIRE_PARTS], double seconds,
                         struct err *err)
{
    struct frame_header header = {MAGIC, VERSION, (uint16_t)kind, 0};
    struct iovec vectors[WIRE_PARTS + 1] = {{&header, sizeof header}};
    struct msghdr message = {.msg_iov = vectors, .msg_iovlen = WIRE_PARTS + 1};
    double end = seconds_now() + seconds;
    for (uint32_t i = 0; i < WIRE_PARTS; i++) {
        vectors[i + 1] = (struct iovec){(void *)(uintptr_t)parts[i].bytes, parts[i].n_bytes};
        header.n_bytes += parts[i].n_bytes;
    }
    for (size_t left = sizeof header + header.n_bytes; left;) {
        ssize_t n = sendmsg(wire->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n >= 0) {
            advance(vectors, WIRE_PARTS + 1, (size_t)n);
            left -= (size_t)n;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            if (!wait_until(wire->fd, POLLOUT, end))
                return late(wire, "did not take a", kind, seconds, err);
        } else if (errno != EINTR)
            return lost(wire, "while it was sent to", strerror(errno), err);
    }
    return RC_OK;
}

enum rc wire_write(struct wire *wire, enum wire_kind kind, const void *bytes, size_t n_bytes, double seconds, struct err *err)
{
    const struct wire_part parts[WIRE_PARTS] = {{bytes, n_bytes}};
    return wire_write_parts(wire, kind, parts, seconds, err);
}

/* wanted: the kind of frame, for errors; 0: any. */
static enum rc read_bytes(struct wire *wire, uint32_t wanted, void *bytes, size_t n_bytes, double end, double seconds,
                          struct err *err)
{
    for (size_t done = 0; done < n_bytes;) {
        ssize_t n = recv(wire->fd, (char *)bytes + done, n_bytes - done, MSG_DONTWAIT);
        if (n > 0)
            done += (size_t)n;
        else if (n == 0)
            return lost(wire, "before a whole message came", "it was closed", err);
        else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            if (!wait_until(wire->fd, POLLIN, end))
                return late(wire, "did not send a", wanted, seconds, err);
        } else if (errno != EINTR)
            return lost(wire, "before a whole message came", strerror(errno), err);
    }
    return RC_OK;
}

static enum rc read_frame(struct wire *wire, uint32_t wanted, struct frame_header *header, void *bytes, size_t max_bytes,
                          double seconds, struct err *err)
{
    double end = seconds_now() + seconds;
    enum rc rc = read_bytes(wire, wanted, header, sizeof *header, end, seconds, err);
    if (rc)
        return rc;
    if (header->magic != MAGIC || header->version != VERSION)
        rc = err_set(err, RC_DEVICE, "%s (%s): wanted a message of llmpy's protocol (magic %08x, version %u), have %08x, %u: "
                     "install the same llmpy on all hosts", wire->name, wire->address, MAGIC, VERSION, header->magic,
                     header->version);
    else if (wanted && header->kind != wanted)
        rc = err_set(err, RC_DEVICE, "%s (%s): wanted a message of kind %s, have kind %u (%s)", wire->name, wire->address,
                     kind_name(wanted), header->kind, kind_name(header->kind));
    else if (header->n_bytes > max_bytes)
        rc = err_set(err, RC_DEVICE, "%s (%s): wanted a message (%s) of at most %zu bytes, have %llu", wire->name,
                     wire->address, kind_name(header->kind), max_bytes, (unsigned long long)header->n_bytes);
    if (rc)
        err_name(err, "hosts", NULL);
    return rc ? rc : read_bytes(wire, wanted, bytes, (size_t)header->n_bytes, end, seconds, err);
}

enum rc wire_read(struct wire *wire, enum wire_kind kind, void *bytes, size_t max_bytes, size_t *n_bytes, double seconds,
                  struct err *err)
{
    struct frame_header header;
    enum rc rc = read_frame(wire, kind, &header, bytes, max_bytes, seconds, err);
    *n_bytes = rc ? 0 : (size_t)header.n_bytes;
    return rc;
}

enum rc wire_read_any(struct wire *wire, enum wire_kind *kind, void *bytes, size_t max_bytes, size_t *n_bytes, double seconds,
                      struct err *err)
{
    struct frame_header header;
    enum rc rc = read_frame(wire, 0, &header, bytes, max_bytes, seconds, err);
    *n_bytes = rc ? 0 : (size_t)header.n_bytes;
    *kind = rc ? 0 : (enum wire_kind)header.kind;
    return rc;
}

enum rc wire_await(const struct wire *wire, const struct wire_patience *patience, struct err *err)
{
    return await_event(wire->fd, POLLIN, patience, seconds_now() + patience->seconds, err);
}

/* ---- greetings --------------------------------------------------------------------------------------------------------- */

/* Takes the same time wherever the keys differ. */
static bool is_same_key(const uint8_t *a, const uint8_t *b)
{
    uint8_t differs = 0;
    for (uint32_t i = 0; i < WIRE_KEY_BYTES; i++)
        differs |= a[i] ^ b[i];
    return !differs;
}

/* Says what differs between two hosts. */
static enum rc compare(const struct wire_greeting *own, const struct wire_greeting *other, const char *address, struct err *err)
{
    static const char *const NAMES[DIGESTS] = {
        "another version of llmpy", "another instruction set or GPU (name one in device)", "other options", "another model"};
    for (uint32_t i = 0; i < DIGESTS; i++)
        if (own->digests[i] != other->digests[i])
            return err_set(err, RC_CONFIG, "host %u (%s) has %s than host 0; make them equal", other->host, address, NAMES[i]);
    if (other->n_hosts != own->n_hosts || !other->host || other->host >= own->n_hosts)
        return err_set(err, RC_CONFIG, "wanted a host from 1 to %u of %u, have host %u of %u (%s); set nnodes and node_rank",
                       own->n_hosts - 1, own->n_hosts, other->host, other->n_hosts, address);
    return RC_OK;
}

/* Answers a greeting. *is_stranger: the other side does not know the token. */
static enum rc answer(struct wire *wire, const struct wire_greeting *own, struct wire_greeting *greeting, bool *is_stranger,
                      struct err *err)
{
    struct err refusal = {0};
    size_t n_bytes = 0;
    enum rc rc = wire_read(wire, WIRE_GREETING, greeting, sizeof *greeting, &n_bytes, GREETING_SECONDS, NULL);
    *is_stranger = rc || n_bytes != sizeof *greeting || !is_same_key(greeting->token, own->token);
    if (*is_stranger)
        rc = err_set(&refusal, RC_CONFIG, "the token differs; set the same LLMPY_HOSTS_TOKEN on all hosts");
    else
        rc = compare(own, greeting, wire->address, &refusal);
    if (!rc)
        return wire_write(wire, WIRE_WELCOME, own->token, WIRE_KEY_BYTES, GREETING_SECONDS, err);
    wire_write(wire, WIRE_REFUSAL, refusal.message, strnlen(refusal.message, WIRE_TEXT_BYTES), GREETING_SECONDS, NULL);
    err_set(err, rc, "hosts: %s", refusal.message);
    err_name(err, "nnodes", NULL);
    return rc;
}

enum rc wire_accept(int listener, const struct wire_greeting *own, const struct wire_patience *patience, struct wire **wire,
                    struct wire_greeting *greeting, struct err *err)
{
    double end = seconds_now() + patience->seconds;
    enum rc rc;
    *wire = NULL;
    while (!(rc = await_event(listener, POLLIN, patience, end, err))) {
        int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        bool is_stranger = true;
        if (fd < 0 && errno != EAGAIN && errno != EINTR && errno != ECONNABORTED)
            return err_set(err, RC_IO, "hosts: no connection can be accepted: %s", strerror(errno));
        if (fd < 0)
            continue;
        rc = make(fd, "a host", wire, err);
        if (!rc)
            rc = answer(*wire, own, greeting, &is_stranger, err);
        if (!rc)
            return RC_OK;
        wire_destroy(*wire);
        *wire = NULL;
        if (!is_stranger)
            return rc;
        if (seconds_now() >= end)
            return err_set(err, RC_DEVICE, "hosts: only processes without the token came within %g s", patience->seconds);
    }
    return rc;
}

static enum rc greet(struct wire *wire, const struct wire_greeting *own, const struct wire_patience *patience, struct err *err)
{
    char text[WIRE_TEXT_BYTES + 1] = "";
    size_t n_bytes = 0;
    enum wire_kind kind = 0;
    enum rc rc = wire_write(wire, WIRE_GREETING, own, sizeof *own, GREETING_SECONDS, err);
    if (!rc)
        rc = wire_await(wire, patience, err); /* the other side answers one host after the other */
    if (!rc)
        rc = wire_read_any(wire, &kind, text, WIRE_TEXT_BYTES, &n_bytes, GREETING_SECONDS, err);
    if (rc)
        return rc;
    if (kind == WIRE_WELCOME && n_bytes == WIRE_KEY_BYTES && is_same_key((const uint8_t *)text, own->token))
        return RC_OK;
    text[n_bytes] = 0;
    err_set(err, RC_CONFIG, "hosts: %s (%s) refused this host: %s", wire->name, wire->address,
            kind == WIRE_REFUSAL ? text : "it does not know the token of LLMPY_HOSTS_TOKEN");
    err_name(err, "nnodes", NULL);
    return RC_CONFIG;
}

/* Tries one address once; returns 0 or the system's error number. */
static int try_address(const struct addrinfo *address, double end, int *fd)
{
    int failure = 0;
    socklen_t size = sizeof failure;
    *fd = socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (*fd < 0)
        return errno;
    if (connect(*fd, address->ai_addr, address->ai_addrlen))
        failure = errno;
    if (failure == EINPROGRESS && wait_until(*fd, POLLOUT, end))
        getsockopt(*fd, SOL_SOCKET, SO_ERROR, &failure, &size);
    if (failure)
        close(*fd);
    return failure;
}

enum rc wire_connect(const char *address, uint16_t port, const struct wire_greeting *own, const struct wire_patience *patience,
                     const char *name, struct wire **wire, struct err *err)
{
    double end = seconds_now() + patience->seconds;
    struct addrinfo *found;
    int failure = 0, fd = -1;
    *wire = NULL;
    enum rc rc = find_address(address, port, false, &found, err);
    for (const struct addrinfo *next = found; !rc; next = next->ai_next ? next->ai_next : found) {
        failure = try_address(next, fmin(end, seconds_now() + CONNECT_SECONDS), &fd);
        if (!failure)
            break;
        rc = await_event(-1, 0, patience, fmin(end, seconds_now() + ASK_SECONDS), err);
        rc = rc == RC_DEVICE && seconds_now() < end ? RC_OK : rc; /* only the pause has ended */
    }
    if (found)
        freeaddrinfo(found);
    if (rc == RC_DEVICE)
        err_set(err, rc, "hosts: %s did not answer at %.80s:%u within %g s: %s", name, address, port, patience->seconds,
                strerror(failure));
    if (rc)
        return rc;
    rc = make(fd, name, wire, err);
    rc = rc ? rc : greet(*wire, own, patience, err);
    if (rc) {
        wire_destroy(*wire);
        *wire = NULL;
    }
    return rc;
}
