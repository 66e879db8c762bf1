/* connector_library.h: opens a connector of connector_abi.h, of a shared library or llmpy's own, as a struct connector.
 * Libraries stay loaded. A library's failures are counted, and blocks whose bytes are not those that were saved are not
 * taken. */
#ifndef LLMPY_CONNECTOR_LIBRARY_H
#define LLMPY_CONNECTOR_LIBRARY_H

#include "connector.h"
#include "connector_abi.h"

#include <stddef.h>

#define LIBRARY_FINGERPRINT 16u
#define LIBRARY_OWN "peer"

struct library_options {
    const char *path;              /* of a shared library, or LIBRARY_OWN: llmpy's connector of that name (peer.h) */
    const struct connector_pair *pairs; /* [n_pairs] */
    uint32_t n_pairs;
    bool is_shared;                /* other engines know the keys */
    double deadline_s;
    uint8_t fingerprint[LIBRARY_FINGERPRINT];
};

/* part_bytes: of a page. bundle_pages: pages of a snapshot; 0: there are none. */
enum rc connector_library_open(const struct library_options *options, size_t part_bytes, uint32_t bundle_pages,
                               uint32_t block_tokens, struct connector *connector, struct err *err);

#endif
