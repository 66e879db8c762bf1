/* token_index.h: finds earlier occurrences of the last tokens of a text. The index keeps the last tokens of the text in a ring.
 * For each of a few lengths n it has a hash table, from the hash of n tokens to the place behind their newest occurrence, and
 * for every place a link to the occurrence before. Adding a token costs O(1) for each length: the hashes roll. Entries are lost
 * if hashes collide or tokens leave the ring; a place that is found is always right, because the tokens before it are compared.
 * The caller provides the memory. */
#ifndef LLMPY_TOKEN_INDEX_H
#define LLMPY_TOKEN_INDEX_H

#include <stddef.h>
#include <stdint.h>

#define INDEX_LENGTHS 8u    /* most lengths of an index */
#define LONGEST_MATCH 32u   /* greatest length */
#define INDEX_SEPARATOR (-1) /* an id between texts, which no sequence has */

struct token_index {
    uint32_t mask, n_lengths; /* mask: capacity - 1; the capacity is a power of two */
    uint32_t lengths[INDEX_LENGTHS]; /* descending */
    uint64_t hashes[INDEX_LENGTHS];  /* of the last lengths[l] tokens */
    uint64_t leaving[INDEX_LENGTHS]; /* factor of the token that leaves the hash */
    uint32_t n;               /* tokens added, modulo 2^32; a place is the value of n when the token there was added */
    int32_t *ids;             /* [capacity] */
    uint32_t *heads, *links;  /* [n_lengths][capacity] places; 0: none */
};

/* Bytes of an index that keeps at least n_tokens tokens. The memory must be zeroed and 8-byte aligned. */
size_t token_index_bytes(uint32_t n_tokens, uint32_t n_lengths);
void token_index_init(struct token_index *index, void *memory, uint32_t n_tokens, const uint32_t *lengths, uint32_t n_lengths);
void token_index_add(struct token_index *index, int32_t id);
/* Finds places in `index` behind the last lengths[l] tokens of `text`, an index with the same lengths (or the same index), the
 * newest first. Looks at no more than n_places occurrences. Returns the number found. */
uint32_t token_index_find(const struct token_index *index, const struct token_index *text, uint32_t l, uint32_t *places,
                          uint32_t n_places);

static inline int32_t token_index_id(const struct token_index *index, uint32_t place)
{
    return index->ids[place & index->mask];
}

#endif
