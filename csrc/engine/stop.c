#include "stop.h"

static uint32_t advance(const struct byte_string *string, const uint32_t *fallback, uint32_t state, char byte)
{
    if (state == string->n)
        state = fallback[state - 1];
    while (state && string->bytes[state] != byte)
        state = fallback[state - 1];
    return state + (string->bytes[state] == byte);
}

void stop_set_prepare(struct stop_set *set)
{
    for (uint32_t i = 0; i < set->n; i++) {
        const struct byte_string *string = &set->strings[i];
        uint32_t *fallback = set->fallback[i];
        fallback[0] = 0;
        for (uint32_t j = 1; j < string->n; j++)
            fallback[j] = advance(string, fallback, fallback[j - 1], string->bytes[j]);
    }
}

bool stop_set_feed(const struct stop_set *set, uint32_t *states, const char *bytes, uint32_t n_bytes, bool counts,
                   uint32_t *which)
{
    for (uint32_t b = 0; b < n_bytes; b++) {
        uint32_t longest = 0;
        for (uint32_t i = 0; i < set->n; i++) {
            states[i] = advance(&set->strings[i], set->fallback[i], states[i], bytes[b]);
            if (counts && states[i] == set->strings[i].n && states[i] > longest) {
                longest = states[i];
                *which = i;
            }
        }
        if (longest)
            return true;
    }
    return false;
}

uint32_t stop_open_bytes(const char *bytes, uint32_t n_bytes)
{
    for (uint32_t n = 1; n <= STOP_OPEN_BYTES && n <= n_bytes; n++) {
        uint8_t byte = (uint8_t)bytes[n_bytes - n];
        if ((byte & 0xc0) == 0x80) /* a continuation: its character begins before it */
            continue;
        uint32_t length = byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : byte >= 0xc0 ? 2 : 1;
        return n < length ? n : 0;
    }
    return 0;
}
