/* stop.h: finds stop strings in a stream of bytes that comes token by token. Each string has a Knuth-Morris-Pratt automaton:
 * the request holds the failure tables, and each sequence holds one state per string. The caller allocates all memory. */
#ifndef LLMPY_STOP_H
#define LLMPY_STOP_H

#include "engine.h"

struct stop_set {
    const struct byte_string *strings; /* [n], none empty */
    uint32_t n;
    uint32_t **fallback;               /* [n][strings[i].n]: longest proper border of the first j + 1 bytes */
};

/* Fills the fallback tables, which the caller has allocated. */
void stop_set_prepare(struct stop_set *set);
/* Feeds the bytes of one token. states: [set->n], zero at the start of the text. Returns true if `counts` is set and a string
 * ends within these bytes. *which is the string that ends first; among several, the longest; among equals, the first. */
bool stop_set_feed(const struct stop_set *set, uint32_t *states, const char *bytes, uint32_t n_bytes, bool counts,
                   uint32_t *which);

/* Number of bytes at the end of the text that begin a UTF-8 character without completing it: 0 to STOP_OPEN_BYTES. */
#define STOP_OPEN_BYTES 3u
uint32_t stop_open_bytes(const char *bytes, uint32_t n_bytes);

#endif
