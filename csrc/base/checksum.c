#include "checksum.h"

#include <string.h>

static uint64_t rotate(uint64_t value, int n)
{
    return value << n | value >> (64 - n);
}

uint64_t checksum_bytes(const void *bytes, size_t n_bytes, uint64_t seed)
{
    const uint64_t odd[4] = {0x9e3779b97f4a7c15u, 0xbf58476d1ce4e5b9u, 0x94d049bb133111ebu, 0xd6e8feb86659fd93u};
    uint64_t lanes[4] = {seed, seed + 1, seed + 2, seed + n_bytes}, words[4];
    for (size_t at = 0; at < n_bytes; at += sizeof words) {
        size_t n = n_bytes - at < sizeof words ? n_bytes - at : sizeof words;
        if (n < sizeof words)
            memset(words, 0, sizeof words);
        memcpy(words, (const char *)bytes + at, n);
        for (int i = 0; i < 4; i++)
            lanes[i] = rotate((lanes[i] ^ words[i]) * odd[i], 29);
    }
    uint64_t sum = 0;
    for (int i = 0; i < 4; i++)
        sum = (rotate(sum, 23) ^ lanes[i] ^ lanes[i] >> 31) * odd[0];
    return sum ^ sum >> 32;
}

uint64_t checksum_parts(void *const *parts, uint32_t n_parts, size_t part_bytes)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < n_parts; i++)
        sum = checksum_bytes(parts[i], part_bytes, sum);
    return sum;
}
