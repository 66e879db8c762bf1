/* hash.h: SipHash-2-4 with a 128-bit result, as Aumasson and Bernstein define it. The secret key prevents clients from choosing
 * prompts that collide in the prefix cache. Pure functions, any thread. */
#ifndef LLMPY_HASH_H
#define LLMPY_HASH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct hash {
    uint64_t lo, hi;
};

struct hash hash_bytes(const struct hash *key, const void *bytes, size_t n_bytes);

static inline bool hash_equal(const struct hash *a, const struct hash *b)
{
    return a->lo == b->lo && a->hi == b->hi;
}

#endif
