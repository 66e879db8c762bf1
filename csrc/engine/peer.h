/* peer.h: llmpy's own connector "peer" (connector_abi.h): engines fetch blocks from each other. Each engine keeps what it saves
 * in a store of its own (peer_store.h), which others read: those of the same host through shared memory, others over TCP. Its
 * options are "bytes", the most that the store holds, "listen", an address, and "peers", addresses separated by commas. An
 * address is "unix:NAME" or "HOST:PORT". A peer that does not answer in time, dies or answers nonsense is not asked for a
 * second; what it has is computed. Unlike connectors of others it may be called by several threads at a time, and a call ends
 * after a few messages' time. */
#ifndef LLMPY_PEER_H
#define LLMPY_PEER_H

#include "connector_abi.h"

#define PEER_THREADS 4u /* that load, and that save */

const struct connector_table *peer_connector(const struct connector_host *host);

#endif
