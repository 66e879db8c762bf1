/* stop.h: finds stop strings in a stream of bytes that comes token by token. One Knuth-Morris-Pratt automaton a string: the
 * failure tables belong to the request, one state a string to each sequence. Memory is the caller's. */
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
/* Feeds the bytes of one token; states: [set->n], zero at the start of the text. True when a string ends inside them (and
 * `counts`): *which is the one that ends first, of those the longest, of equal ones the first of the list. */
bool stop_set_feed(const struct stop_set *set, uint32_t *states, const char *bytes, uint32_t n_bytes, bool counts,
                   uint32_t *which);

/* How many of the last bytes of a text begin a character of UTF-8 that the text does not complete: 0 to STOP_OPEN_BYTES. */
#define STOP_OPEN_BYTES 3u
uint32_t stop_open_bytes(const char *bytes, uint32_t n_bytes);

#endif
