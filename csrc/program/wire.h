/* wire.h: framed messages between two processes over one TCP connection. A frame is a header of 16 bytes (magic, version, kind,
 * size) and its bytes. Both sides must have the byte order of x86. A connection carries nothing before its greeting: the side
 * that connects sends a token and digests, and the side that listens compares them with its own. A function that fails leaves a
 * connection that can only be destroyed. Errors name the other side by its address. One thread reads and one writes. */
#ifndef LLMPY_WIRE_H
#define LLMPY_WIRE_H

#include "../base/status.h"

#include <stdbool.h>
#include <stddef.h>

#define WIRE_KEY_BYTES 32u
#define WIRE_TEXT_BYTES 400u /* of a refusal, a result, and the reason why a process ends */

enum wire_kind {
    WIRE_GREETING = 1, WIRE_WELCOME, WIRE_REFUSAL, /* before all others */
    WIRE_VALUES, WIRE_BLOCK, WIRE_STEP, WIRE_DONE, WIRE_CLOSE,
    WIRE_PULSE, WIRE_END, WIRE_BYE,
    WIRE_ORDER, WIRE_RESULT, WIRE_ASK, WIRE_GIVE
};

/* What must be equal on all hosts. */
enum wire_digest { DIGEST_VERSION, DIGEST_PROCESSOR, DIGEST_OPTIONS, DIGEST_MODEL, DIGESTS };

/* What a process that connects says. */
struct wire_greeting {
    uint32_t host, n_hosts, channel;
    uint8_t token[WIRE_KEY_BYTES];  /* equal on all hosts; proves nothing but that the caller knows it */
    uint64_t digests[DIGESTS];
};

/* How long a call waits: goes_on (NULL: always true) is asked every 0.2 s, and false ends the call with RC_CLOSED. */
struct wire_patience {
    double seconds;
    bool (*goes_on)(void *ctx);
    void *ctx;
};

struct wire;

/* port 0: the system chooses one; wire_port tells it. The result is a socket, which the caller closes. */
enum rc wire_listen(const char *address, uint16_t port, int *listener, struct err *err);
uint16_t wire_port(int listener);
/* Takes connections until one greets with the token. One that does not, or says nothing for a second, is dropped. RC_CONFIG:
 * the other side has another digest or another number of hosts; it is told so. */
enum rc wire_accept(int listener, const struct wire_greeting *own, const struct wire_patience *patience, struct wire **wire,
                    struct wire_greeting *greeting, struct err *err);
/* Tries until the other side listens, and greets it. name: of the other side, for errors. */
enum rc wire_connect(const char *address, uint16_t port, const struct wire_greeting *own, const struct wire_patience *patience,
                     const char *name, struct wire **wire, struct err *err);
void wire_destroy(struct wire *wire); /* NULL is allowed */
/* Ends all reads and writes, now and later; what has come may still be read. Any thread. */
void wire_shut(struct wire *wire);
void wire_rename(struct wire *wire, const char *name); /* for errors; the address is kept */
struct wire_text {
    char text[104];
};
struct wire_text wire_name(const struct wire *wire); /* the name and the address of the other side */
int wire_socket(const struct wire *wire);
/* Waits until something can be read; the end of the connection counts. RC_DEVICE: nothing came in time. */
enum rc wire_await(const struct wire *wire, const struct wire_patience *patience, struct err *err);

#define WIRE_PARTS 3u
struct wire_part {
    const void *bytes;
    size_t n_bytes;
};

/* The deadlines are in seconds from the call on; INFINITY: none. */
enum rc wire_write_parts(struct wire *wire, enum wire_kind kind, const struct wire_part parts[WIRE_PARTS], double seconds,
                         struct err *err); /* one frame of all parts */
enum rc wire_write(struct wire *wire, enum wire_kind kind, const void *bytes, size_t n_bytes, double seconds, struct err *err);
/* Takes one frame of at most max_bytes. A frame of another kind than `kind` is an error. */
enum rc wire_read(struct wire *wire, enum wire_kind kind, void *bytes, size_t max_bytes, size_t *n_bytes, double seconds,
                  struct err *err);
/* Takes one frame of any kind. */
enum rc wire_read_any(struct wire *wire, enum wire_kind *kind, void *bytes, size_t max_bytes, size_t *n_bytes, double seconds,
                      struct err *err);

#endif
