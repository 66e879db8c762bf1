/* peer_wire.h: sockets between peers, and what is said over them. A connection begins with a hello and a welcome; then the
 * reader asks, one question at a time. All numbers have the byte order of x86. */
#ifndef LLMPY_PEER_WIRE_H
#define LLMPY_PEER_WIRE_H

#include "connector_abi.h"

#include <stdbool.h>
#include <stddef.h>

#define PEER_ADDRESS 256u
#define PEER_TOKEN 64u
#define PEER_MOST_KEYS 4096u /* of a question */
#define PEER_MAGIC "llmpykv1"

struct peer_hello {
    char magic[8];
    uint8_t fingerprint[16];
    uint64_t part_bytes;
    uint32_t most_parts, wants_memory;
    char token[PEER_TOKEN];
};

enum peer_status { PEER_IS_WELCOME = 1, PEER_IS_OTHER = 2 }; /* OTHER: another model, or another token */

/* With has_memory the descriptor of the memory comes with it, and answers name slots; else they have the bytes. */
struct peer_welcome {
    uint32_t status, has_memory, n_slots, unused;
};

enum peer_question { PEER_MATCH = 1, PEER_LOAD = 2 };

/* MATCH: n keys follow; the answer has a byte for each. LOAD: one key follows; n is the block's number of parts. */
struct peer_ask {
    uint32_t question, n;
};

/* To LOAD. If it is found, n slots (uint32_t) or the bytes of n parts follow. */
struct peer_found {
    uint32_t is_found, unused;
    uint64_t checksum;
};

/* Socket that listens at "unix:NAME" or "HOST:PORT"; the error RC_CONFIG names the address. */
enum rc peer_listen(const char *address, int *socket, struct err *err);
/* Connects within so many seconds; -1: nothing answers. */
int peer_connect(const char *address, double seconds);
bool peer_is_local(const char *address);
/* True if the process at the other end of a local socket belongs to this user. */
bool peer_is_own(int socket);
/* All bytes within so many seconds, else false; then the connection is of no use any more. */
bool peer_read(int socket, void *bytes, size_t n_bytes, double seconds);
bool peer_write(int socket, const void *bytes, size_t n_bytes, double seconds);
/* The welcome, with a descriptor unless it is negative. The reader gets -1 for none. */
bool peer_write_welcome(int socket, const struct peer_welcome *welcome, int descriptor, double seconds);
bool peer_read_welcome(int socket, struct peer_welcome *welcome, int *descriptor, double seconds);

#endif
