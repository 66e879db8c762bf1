/* peer_server.h: answers the questions of other engines about a store. One thread takes connections, each connection has one of
 * its own; they read the store and nothing else of the engine. */
#ifndef LLMPY_PEER_SERVER_H
#define LLMPY_PEER_SERVER_H

#include "peer_store.h"
#include "peer_wire.h"

struct peer_server;

/* hello: what a reader has to say; its wants_memory does not matter. seconds: most for a message. */
enum rc peer_server_create(const char *address, const struct peer_hello *hello, struct peer_store *store, double seconds,
                           struct peer_server **server, struct err *err);
void peer_server_destroy(struct peer_server *server); /* NULL is allowed; ends all connections */

#endif
