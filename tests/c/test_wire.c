/* Frames between two processes (csrc/program/wire.c): whole or an error, within their deadlines; and greetings. */
#define _GNU_SOURCE
#include "check.h"

#include "../../csrc/base/clock.h"
#include "../../csrc/base/mem.h"
#include "../../csrc/program/wire.h"

#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#define LONG_BYTES (8u << 20) /* more than the system keeps for a connection */

/* A connection whose two ends are in this process. */
struct pair {
    int listener;
    struct wire *first, *second; /* of the side that listens, and of the other one */
    struct wire_greeting own, other, heard;
    struct wire_patience patience;
    enum rc rc; /* of the side that connects */
    struct err err;
};

static void *join(void *ctx)
{
    struct pair *p = ctx;
    p->rc = wire_connect("127.0.0.1", wire_port(p->listener), &p->other, &p->patience, "host 0", &p->second, &p->err);
    return NULL;
}

static void pair_begin(struct pair *p)
{
    struct err err;
    *p = (struct pair){.own = {.host = 0, .n_hosts = 2, .digests = {1, 2, 3, 4}}, .patience = {.seconds = 5}};
    memset(p->own.token, 7, sizeof p->own.token);
    p->other = p->own;
    p->other.host = 1;
    REQUIRE_OK(wire_listen("127.0.0.1", 0, &p->listener, &err));
}

/* Connects both ends; returns what the side that listens says. */
static enum rc pair_greet(struct pair *p, struct err *err)
{
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, join, p), 0);
    enum rc rc = wire_accept(p->listener, &p->own, &p->patience, &p->first, &p->heard, err);
    close(p->listener);
    pthread_join(thread, NULL);
    return rc;
}

static void pair_open(struct pair *p)
{
    struct err err;
    pair_begin(p);
    REQUIRE_OK(pair_greet(p, &err));
    CHECK_EQ(p->rc, RC_OK);
}

static void pair_close(struct pair *p)
{
    wire_destroy(p->first);
    wire_destroy(p->second);
}

struct writer {
    struct wire *wire;
    const char *bytes;
    enum rc rc;
    pthread_t thread;
};

static void *write_long(void *ctx)
{
    struct writer *w = ctx;
    const struct wire_part parts[WIRE_PARTS] = {{w->bytes, 1}, {w->bytes + 1, 0}, {w->bytes + 1, LONG_BYTES - 1}};
    w->rc = wire_write_parts(w->wire, WIRE_BLOCK, parts, 5, NULL);
    return NULL;
}

TEST(frames_arrive_whole_and_in_order)
{
    struct pair p;
    struct err err;
    size_t n = 9;
    enum wire_kind kind;
    char *sent = mem_alloc(LONG_BYTES), *got = mem_alloc(LONG_BYTES);
    for (uint32_t i = 0; i < LONG_BYTES; i++)
        sent[i] = (char)(i * 2654435761u >> 24);
    pair_open(&p);
    REQUIRE_OK(wire_write(p.second, WIRE_DONE, "one", 3, 1, &err));
    REQUIRE_OK(wire_write(p.second, WIRE_CLOSE, NULL, 0, 1, &err));
    REQUIRE_OK(wire_read(p.first, WIRE_DONE, got, 3, &n, 1, &err));
    CHECK_EQ(n, 3);
    CHECK(!memcmp(got, "one", 3));
    REQUIRE_OK(wire_read_any(p.first, &kind, got, 0, &n, 1, &err));
    CHECK_EQ(kind, WIRE_CLOSE);
    CHECK_EQ(n, 0);
    struct writer w = {.wire = p.first, .bytes = sent};
    CHECK_EQ(pthread_create(&w.thread, NULL, write_long, &w), 0);
    REQUIRE_OK(wire_read(p.second, WIRE_BLOCK, got, LONG_BYTES, &n, 5, &err));
    pthread_join(w.thread, NULL);
    CHECK_EQ(w.rc, RC_OK);
    CHECK_EQ(n, LONG_BYTES);
    CHECK(!memcmp(got, sent, LONG_BYTES));
    CHECK(strstr(wire_name(p.second).text, "host 0 (127.0.0.1:"));
    pair_close(&p);
    mem_free(sent);
    mem_free(got);
}

TEST(a_silent_side_is_late)
{
    struct pair p;
    struct err err;
    char *bytes = mem_calloc(4, LONG_BYTES);
    size_t n;
    pair_open(&p);
    double begun = seconds_now();
    CHECK_EQ(wire_read(p.second, WIRE_STEP, bytes, 8, &n, 0.1, &err), RC_DEVICE);
    CHECK(strstr(err.message, "did not send a step within 0.1 s"));
    CHECK_EQ(wire_write(p.second, WIRE_STEP, bytes, 4 * (size_t)LONG_BYTES, 0.1, &err), RC_DEVICE);
    CHECK(strstr(err.message, "did not take a step within 0.1 s"));
    CHECK(seconds_now() - begun >= 0.2 && seconds_now() - begun < 10);
    const struct wire_patience patience = {.seconds = 0.05};
    wire_destroy(p.second); /* what it has sent can be read first */
    p.second = NULL;
    CHECK_EQ(wire_await(p.first, &patience, &err), RC_OK);
    pair_close(&p);
    mem_free(bytes);
}

/* Sends bytes that no wire sends, and ends the connection. */
static void check_refused(const void *bytes, size_t n_bytes, const char *text)
{
    struct pair p;
    struct err err = {0};
    char got[64];
    size_t n;
    pair_open(&p);
    CHECK_EQ(send(wire_socket(p.second), bytes, n_bytes, MSG_NOSIGNAL), (ssize_t)n_bytes);
    shutdown(wire_socket(p.second), SHUT_WR);
    CHECK_EQ(wire_read(p.first, WIRE_DONE, got, 32, &n, 1, &err), RC_DEVICE);
    CHECK_EQ(n, 0);
    if (!strstr(err.message, text))
        CHECK_FAIL("wanted %s, have %s", text, err.message);
    pair_close(&p);
}

TEST(torn_and_foreign_frames_are_errors)
{
    struct {
        uint32_t magic;
        uint16_t version, kind;
        uint64_t n_bytes;
        char bytes[32];
    } frame = {0x79706d6cu, 1, WIRE_DONE, 32, ""};
    check_refused(&frame, 0, "closed");
    check_refused(&frame, 15, "closed");
    check_refused(&frame, 16, "closed");
    check_refused(&frame, 47, "closed");
    frame.n_bytes = 33;
    check_refused(&frame, 48, "at most 32 bytes, have 33");
    frame.n_bytes = UINT64_MAX;
    check_refused(&frame, 48, "at most 32 bytes");
    frame.n_bytes = 32;
    frame.kind = WIRE_STEP;
    check_refused(&frame, 48, "wanted a message of kind done, have kind 6 (step)");
    frame.kind = 999;
    check_refused(&frame, 48, "have kind 999 (?)");
    frame.version = 2;
    check_refused(&frame, 48, "install the same llmpy on all hosts");
    check_refused("GET / HTTP/1.1\r\nHost: a\r\n\r\n", 26, "install the same llmpy on all hosts");
}

TEST(a_wire_that_is_shut_ends_reads)
{
    struct pair p;
    struct err err;
    char got[8];
    size_t n;
    pair_open(&p);
    wire_shut(p.first);
    CHECK_EQ(wire_read(p.first, WIRE_DONE, got, 8, &n, 5, &err), RC_DEVICE);
    CHECK_EQ(wire_write(p.first, WIRE_DONE, got, 8, 5, &err), RC_DEVICE);
    pair_close(&p);
}

/* Both sides are told what differs. */
static void check_unlike(struct pair *p, const char *text)
{
    struct err err = {0};
    CHECK_EQ(pair_greet(p, &err), RC_CONFIG);
    CHECK_EQ(p->rc, RC_CONFIG);
    if (!strstr(err.message, text) || !strstr(p->err.message, text))
        CHECK_FAIL("wanted %s, have %s; %s", text, err.message, p->err.message);
    CHECK(!p->first && !p->second);
}

TEST(unlike_sides_do_not_connect)
{
    static const char *const TEXTS[DIGESTS] = {"version", "instruction set", "options", "another model"};
    struct pair p;
    for (uint32_t i = 0; i < DIGESTS; i++) {
        pair_begin(&p);
        p.other.digests[i] ^= 1ull << 63;
        check_unlike(&p, TEXTS[i]);
    }
    pair_begin(&p);
    p.other.host = 2;
    check_unlike(&p, "wanted a host from 1 to 1 of 2, have host 2 of 2");
    pair_begin(&p);
    p.other.host = 0;
    check_unlike(&p, "have host 0 of 2");
    pair_begin(&p);
    p.other.n_hosts = 3;
    check_unlike(&p, "have host 1 of 3");
}

/* With little patience on a busy machine, the stranger does not come in time either. */
TEST(a_stranger_is_dropped)
{
    struct pair p = {0};
    struct err err = {0};
    for (double patience = 0.25; p.rc != RC_CONFIG && patience < 30; patience *= 4) {
        pair_begin(&p);
        p.other.token[31] ^= 1;
        p.patience.seconds = patience;
        double begun = seconds_now();
        CHECK_EQ(pair_greet(&p, &err), RC_DEVICE); /* no other host came */
        CHECK(seconds_now() - begun < patience + 10);
    }
    CHECK_EQ(p.rc, RC_CONFIG);
    CHECK(strstr(p.err.message, "LLMPY_HOSTS_TOKEN"));
    CHECK(!p.first && !p.second);
}

static bool stop(void *ctx)
{
    return ++*(uint32_t *)ctx < 2;
}

TEST(waits_can_be_interrupted)
{
    struct pair p;
    struct err err = {0};
    uint32_t n_asked = 0;
    pair_begin(&p);
    p.patience = (struct wire_patience){30, stop, &n_asked};
    CHECK_EQ(wire_accept(p.listener, &p.own, &p.patience, &p.first, &p.heard, &err), RC_CLOSED);
    n_asked = 0;
    uint16_t port = wire_port(p.listener);
    close(p.listener);
    CHECK_EQ(wire_connect("127.0.0.1", port, &p.other, &p.patience, "host 0", &p.second, &err), RC_CLOSED);
    CHECK_EQ(n_asked, 2);
    CHECK(!p.first && !p.second);
}

TEST(wrong_addresses_are_told)
{
    struct pair p;
    struct err err = {0};
    int second;
    pair_begin(&p);
    CHECK_EQ(wire_listen("127.0.0.1", wire_port(p.listener), &second, &err), RC_CONFIG);
    CHECK(strstr(err.message, "cannot listen"));
    CHECK_EQ(wire_listen("no.such.name.invalid", 1, &second, &err), RC_CONFIG);
    CHECK(strstr(err.message, "no.such.name.invalid"));
    close(p.listener);
}
