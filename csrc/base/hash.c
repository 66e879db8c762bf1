#include "hash.h"

#include <string.h>

static inline uint64_t rotate(uint64_t x, int bits)
{
    return x << bits | x >> (64 - bits);
}

static inline void mix(uint64_t v[4], int n_rounds)
{
    for (int i = 0; i < n_rounds; i++) {
        v[0] += v[1];
        v[2] += v[3];
        v[1] = rotate(v[1], 13) ^ v[0];
        v[3] = rotate(v[3], 16) ^ v[2];
        v[0] = rotate(v[0], 32);
        v[2] += v[1];
        v[0] += v[3];
        v[1] = rotate(v[1], 17) ^ v[2];
        v[3] = rotate(v[3], 21) ^ v[0];
        v[2] = rotate(v[2], 32);
    }
}

static inline void absorb(uint64_t v[4], uint64_t word)
{
    v[3] ^= word;
    mix(v, 2);
    v[0] ^= word;
}

struct hash hash_bytes(const struct hash *key, const void *bytes, size_t n_bytes)
{
    uint64_t v[4] = {key->lo ^ 0x736f6d6570736575, key->hi ^ 0x646f72616e646f6d ^ 0xee, key->lo ^ 0x6c7967656e657261,
                     key->hi ^ 0x7465646279746573};
    const unsigned char *at = bytes;
    uint64_t word;
    for (size_t i = 0; i < n_bytes / 8; i++, at += 8) {
        memcpy(&word, at, 8);
        absorb(v, word);
    }
    word = (uint64_t)n_bytes << 56;
    for (size_t i = 0; i < n_bytes % 8; i++)
        word |= (uint64_t)at[i] << 8 * i;
    absorb(v, word);

    struct hash result;
    v[2] ^= 0xee;
    mix(v, 4);
    result.lo = v[0] ^ v[1] ^ v[2] ^ v[3];
    v[1] ^= 0xdd;
    mix(v, 4);
    result.hi = v[0] ^ v[1] ^ v[2] ^ v[3];
    return result;
}
